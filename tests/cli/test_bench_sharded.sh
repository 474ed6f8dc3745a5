#!/bin/sh
# tenure-bench-sharded can do all of its steps (small, on ranks of the host driver): its columns are
# there, its bytes are those of the plan and of the closed form, ranks together train what one does;
# it refuses what it does not know. The peer beside it names the same columns.
# usage: test_bench_sharded.sh BUILD SOURCE
set -eu
program=$1/tenure-bench-sharded
[ -e "$1/libtenure-mpi.so" ] || exit 77
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Open MPI as root, with more ranks than cores, without a network: see cmake/dist.cmake.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_plm_rsh_agent=sh ASAN_OPTIONS=detect_leaks=0
# Where one mpirun removes the folder of all, another can not make its own in it.
export TMPDIR="$work"
sizes="--layers 2 --hidden 256 --heads 4 --ffn 512 --tokens 64 --rounds 1"

fail() {
    echo "FAIL: $*"
    exit 1
}

# The workspace of a product is where devices differ: the planning one is told the host's.
"$1/tenure" simulate tiny --driver host --json >"$work/tiny"
TENURE_SIM_WORKSPACE=$(sed -n 's/.*gemm_workspace_bytes":[^0-9]*\([0-9]*\).*/\1/p' "$work/tiny")
export TENURE_SIM_WORKSPACE

cat >"$work/expect.py" <<'END'
import ast, csv, sys

LAYERS, HIDDEN, FFN, TOKENS = 2, 256, 512, 64
out, source, mix, way, prefetches = *sys.argv[1:5], sys.argv[5:]
ranks = 2
rows = list(csv.DictReader(open(out)))
settings = [(w, p, str(r)) for w in ("fp8", "bf16") for p in prefetches for r in range(ranks)]
assert [(r["weights"], r["prefetch"], r["rank"]) for r in rows] == settings, rows

# [N, K] of a layer's products; gains are two rows of HIDDEN.
PRODUCTS = ((2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN))
ELEMENTS = sum(n * k for n, k in PRODUCTS) + 2 * HIDDEN


TILES = sum(n * k for n, k in PRODUCTS) // 128 // 128


def gathered_bytes(weights):
    """What a layer has on the wire, cut FLAT: elements, of FP8 without scales."""
    return 2 * ELEMENTS if weights == "bf16" else ELEMENTS + 2 * HIDDEN


def reduced_bytes(weights):
    """Gradients in bf16, and an all-reduce of what the scales of FP8 are made of."""
    return 2 * ELEMENTS + (2 * 4 * TILES if weights == "fp8" else 0)


# Each layer is gathered for forward and for backward, the last one once for both, and reduced; all
# ranks together send each byte to all others.
for weights, prefetch in {(r["weights"], r["prefetch"]) for r in rows}:
    of = [r for r in rows if (r["weights"], r["prefetch"]) == (weights, prefetch)]
    sent = sum(int(r["wire_bytes"]) for r in of)
    gathered = (2 * LAYERS - 1) * gathered_bytes(weights)
    expected = (ranks - 1) * (gathered + LAYERS * reduced_bytes(weights))
    assert sent == expected, (weights, prefetch, sent, expected)

for row in rows:
    assert (row["side"], row["mix"], row["layout"]) == ("tenure", mix, "auto"), row
    assert row["shards"] + " " + row["update"] == way, row
    assert int(row["ranks"]) == ranks, row
    assert (row["device"], row["engine"], row["gradients"]) == ("host", "MPI", "bf16"), row
    assert int(row["tokens"]) == TOKENS, row
    for what in ("live", "peak", "wire"):
        assert row[what + "_bytes"] == row[f"planned_{what}_bytes"], (what, row)
    assert int(row["live_bytes"]) < int(row["peak_bytes"]) <= int(row["reserved_bytes"]), row
    assert all(float(row[t + "_us"]) > 0 for t in ("step", "layers", "update")), row
    rest = float(row["step_us"]) - float(row["layers_us"]) - float(row["update_us"])
    assert abs(float(row["exposed_us"]) - rest) < 0.5, row

# A ring of one slot has one layer less, give or take where its parts begin.
by = {(r["weights"], r["prefetch"], r["rank"]): int(r["live_bytes"]) for r in rows}
for weights in ("fp8", "bf16") if len(prefetches) == 2 else ():
    less = by[weights, "on", "0"] - by[weights, "off", "0"]
    assert abs(less - gathered_bytes(weights)) < 4096, (weights, less)

peer = ast.parse(open(source + "/bench/peers/fsdp2_peer.py").read())
columns = [n.value for n in peer.body if isinstance(n, ast.Assign) and n.targets[0].id == "COLUMNS"]
assert list(rows[0]) == ast.literal_eval(columns[0]).split(","), list(rows[0])
END

run() {
    mpirun -n 2 "$program" $sizes "$@" >"$work/out" 2>"$work/err" ||
        fail "$*: $(cat "$work/err")"
}

run
python3 "$work/expect.py" "$work/out" "$2" gate "kept end" on off || fail "$(cat "$work/out")"
kept=$(awk -F, '/^tenure,bf16,gate,on/ { print $21; exit }' "$work/out")
run --prefetch on --shards made --update ahead
python3 "$work/expect.py" "$work/out" "$2" gate "made ahead" on || fail "$(cat "$work/out")"
made=$(awk -F, '/^tenure,bf16,gate,on/ { print $21; exit }' "$work/out")
[ "$made" -lt "$kept" ] || fail "$made bytes are live with shards made of masters, $kept without"
run --sequence 32 --prefetch off
python3 "$work/expect.py" "$work/out" "$2" "attention 32" "kept end" off ||
    fail "$(cat "$work/out")"
run --check --prefetch on --sequence 32 --shards made --update ahead
same=$(grep -c '^check,.*,rank [01] of 2,0 elements differ from those of one rank$' "$work/out")
[ "$same" = 4 ] || fail "expected four checks: $(cat "$work/out")"

refused() {
    status=0
    "$program" "$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = 2 ] || fail "$*: status $status, expected 2"
    [ ! -s "$work/out" ] || fail "$*: something on standard output"
}
refused frobnicate
refused --frobnicate
refused --rounds 0
refused --layers 65
refused --driver tpu
refused --engine both
refused --engine nccl
refused --weights fp4
refused --prefetch maybe
refused --gradients fp8
refused --layout rows
refused --shards both
refused --update never
refused --heads 3
refused --heads 5 --hidden 256
refused --tokens 64 --sequence 48
"$program" --help >"$work/out" || fail "--help: status $?"
grep -q "^usage: .*tenure-bench-sharded" "$work/out" || fail "no help: $(cat "$work/out")"
