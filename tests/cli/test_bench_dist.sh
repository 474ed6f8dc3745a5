#!/bin/sh
# tenure-bench-dist can do all of its parts (small, on ranks of the host driver) and prints its
# tables, with a word for what there is not to be had; it refuses what it does not know.
# usage: test_bench_dist.sh BUILD SOURCE
set -eu
program=$1/tenure-bench-dist
[ -e "$program" ] || exit 77
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Open MPI as root, with more ranks than cores, without a network: see cmake/dist.cmake.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_plm_rsh_agent=sh ASAN_OPTIONS=detect_leaks=0
# Where one mpirun removes the folder of all, another can not make its own in it.
export TMPDIR="$work"

fail() {
    echo "FAIL: $*"
    exit 1
}

# check RANKS COMMAND...: what the command prints, and the CSV file that it writes.
check() {
    ranks=$1
    shift
    rm -f "$work/csv"
    "$@" --small --rounds 2 --csv "$work/csv" >"$work/out" 2>"$work/err" ||
        fail "$*: $(cat "$work/err")"
    python3 - "$work/out" "$work/csv" "$ranks" <<'END' || fail "$*: $(cat "$work/out" "$work/csv")"
import csv, sys
rows = list(csv.reader(open(sys.argv[1])))
ranks = sys.argv[3]
assert rows[0] == ["prefetch", "ranks", "driver", "registered", "step_us", "exposed_us"], rows[0]
assert [row[:4] for row in rows[1:3]] == [["on", ranks, "host", "no"], ["off", ranks, "host", "no"]]
assert all(float(row[4]) > 0 for row in rows[1:3])
assert rows[3] == ["gather", "ranks", "driver", "bytes", "us", "bus_bytes_per_us"], rows[3]
sizes = [int(row[3]) for row in rows[4:6]]
assert sizes == [4096 * int(ranks), 32768 * int(ranks)], sizes
lines = list(csv.DictReader(open(sys.argv[2])))
assert all(line["ranks"] == ranks for line in lines)
for what in ("all_gather", "all_gather_ragged", "reduce_scatter"):
    for buffers in ("plain", "pool"):
        cells = [line for line in lines if (line["what"], line["buffers"]) == (what, buffers)]
        assert [int(cell["bytes"]) for cell in cells] == [4096, 16384, 65536], cells
        assert all(cell["status"] == "TN_OK" for cell in cells)
        assert all(0 < float(cell["us_least"]) <= float(cell["us_median"])
                   <= float(cell["us_most"]) for cell in cells)
# No engine of the host registers memory: each such buffer has a line that says so, and no figure.
for buffers in ("pool-registered", "handle-registered", "handle-window", "nccl",
                "nccl-registered", "nccl-window"):
    cells = [line for line in lines if line["buffers"] == buffers]
    assert len(cells) == 10 and all(cell["status"] == "TN_UNSUPPORTED" and not cell["us_median"]
                                    for cell in cells), cells
    assert any(row and row[0].startswith(buffers + ": TN_UNSUPPORTED: ") for row in rows)
sent = {line["what"]: int(line["bytes"]) for line in lines if line["what"].startswith("rows")}
whole = sum(r * c // 256 for r, c in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)))
assert sent["rows_and_columns"] == 2 * sent["rows"], sent
assert sent["rows"] == whole * (int(ranks) - 1) // int(ranks), (sent, whole)
END
}

for ranks in 1 2; do
    check $ranks "$program" --ranks $ranks --engine tcp
done
if [ -e "$1/libtenure-mpi.so" ]; then
    check 2 mpirun -n 2 "$program"
    # ./run builds this target alone, and the program loads the engine by itself.
    ninja -C "$1" -t query tenure-programs | grep -q '^ *libtenure-mpi\.so$' ||
        fail "tenure-programs is built without the MPI engine"
fi
# Over NCCL, by the stand-in for it, which registers whatever it is given: a host has no blocks of
# one handle, and all other buffers have their figures and the time of their registration.
stand_in=$1/tests/libtenure_stand_in_nccl.so
if [ -e "$stand_in" ]; then
    TENURE_NCCL_LIBRARY=$stand_in "$program" --ranks 2 --engine nccl --driver host --small \
        --rounds 2 --parts steps,wire --csv "$work/csv" >"$work/out" 2>"$work/err" ||
        fail "the stand-in: $(cat "$work/err")"
    python3 - "$work/out" "$work/csv" <<'END' || fail "the stand-in: $(cat "$work/out" "$work/csv")"
import csv, sys
steps = list(csv.reader(open(sys.argv[1])))[1:7]
assert [row[3] for row in steps] == ["no", "no", "buffer", "buffer", "window", "window"], steps
lines = list(csv.DictReader(open(sys.argv[2])))
for buffers in ("plain", "pool", "pool-registered", "nccl", "nccl-registered", "nccl-window",
                "handle-registered", "handle-window"):
    wanted = "TN_UNSUPPORTED" if buffers.startswith("handle") else "TN_OK"
    cells = [line for line in lines if line["buffers"] == buffers and line["what"] != "register"]
    assert len(cells) == 9 and all(cell["status"] == wanted for cell in cells), cells
    if buffers.endswith(("registered", "window")):
        assert [line["status"] for line in lines if line["buffers"] == buffers and
                line["what"] == "register"] == [wanted], lines
END
fi
"$program" --ranks 3 --parts planes,wire --buffers pool --small --rounds 1 >"$work/out" ||
    fail "3 ranks"
grep -q "^all_gather_ragged, 3 ranks, TCP" "$work/out" || fail "3 ranks: $(cat "$work/out")"

refused() {
    status=0
    "$program" "$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = 2 ] || fail "$*: status $status, expected 2"
    [ ! -s "$work/out" ] || fail "$*: something on standard output"
}
refused frobnicate
refused --rounds 0
refused --rounds 100
refused --driver tpu
refused --frobnicate
refused --parts steps,frobnicate
refused --buffers plain,frobnicate
refused --ranks 0
refused --engine frobnicate
refused --engine mpi --ranks 2
"$program" --help >"$work/out" || fail "--help: status $?"
grep -q "^usage: .*tenure-bench-dist" "$work/out" || fail "no help: $(cat "$work/out")"
