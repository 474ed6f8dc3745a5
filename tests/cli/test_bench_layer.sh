#!/bin/sh
# tenure-bench-layer can do all of its steps (a rehearsal on the host), in the order of a layer, and
# counts the bytes and operations of each; it refuses what it does not know.
# usage: test_bench_layer.sh BUILD SOURCE
set -eu
program=$1/tenure-bench-layer
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "FAIL: $*"
    exit 1
}

"$program" --rehearse --rounds 2 --json >"$work/all.json" 2>"$work/err" ||
    fail "a rehearsal ends with status $?: $(cat "$work/err")"

# Of 256 tokens, hidden 128, FFN 512, counted by hand: pair, side, step, bytes or operations.
python3 - "$work/all.json" <<'END'
import json, sys
report = json.load(open(sys.argv[1]))
expected = {
    ("products", "FP8", "QKV w cast"): (384 * 128 * 3 + 3 * 4 * 4, 0),  # scales in rows of 4
    ("products", "FP8", "FC2 x cast"): (256 * 512 * 4 + 4 * 256 * 4 + 2 * 512 * 4, 0),
    ("products", "FP8", "FC1 w transposed"): (512 * 128 * 2 + 4 * 4 * 4 + 1 * 4 * 4, 0),
    ("products", "FP8", "QKV fprop"): (0, 2 * 256 * 384 * 128),
    ("products", "bf16", "proj wgrad"): (0, 2 * 256 * 128 * 128),
    ("layer", "FP8", "FC2 GELU"): (256 * 512 * 4 + 4 * 256 * 4 + 2 * 512 * 4, 0),
    ("layer", "bf16", "FC2 GELU backward"): (256 * 512 * 6, 0),
    ("layer", "bf16", "QKV norm"): (256 * 128 * 4 + 2 * 128 * 2 + 2 * 256 * 4, 0),
    ("layer", "bf16", "FC1 norm"): (256 * 128 * 8 + 2 * 128 * 2 + 2 * 256 * 4, 0),
    ("layer", "FP8", "FC1 norm backward"):
        (256 * 128 * 8 + 2 * 256 * 4 + 128 * 2 + 4 * 128 * 4, 0),
}
for (pair, side, name), (bytes_, flop) in expected.items():
    step = report[pair][side]["steps"][name]
    if (step["bytes"], step["flop"]) != (bytes_, flop):
        sys.exit(f"FAIL: {pair}, {side}, {name}: {step}, expected {bytes_} and {flop}")
calls = report["calls"]
if sorted(calls) != ["FP8", "FP8 beside", "bf16", "ratio"] or min(calls.values()) <= 0:
    sys.exit(f"FAIL: through the layers: {calls}")
counts = {pair: {side: len(report[pair][side]["steps"]) for side in ("FP8", "bf16")}
          for pair in ("products", "layer")}
if counts != {"products": {"FP8": 28, "bf16": 12}, "layer": {"FP8": 30, "bf16": 18}}:
    sys.exit(f"FAIL: steps: {counts}")
for pair in counts:
    for side in ("FP8", "bf16"):
        steps = report[pair][side]["steps"]
        flop = sum(step["flop"] for step in steps.values())
        if flop != 3 * 2 * 256 * 128 * (384 + 128 + 512 + 512):
            sys.exit(f"FAIL: {pair}, {side}: {flop} operations")
        if any(step["us"] <= 0 or step["limit_us"] <= 0 for step in steps.values()):
            sys.exit(f"FAIL: {pair}, {side}: a step without a time: {steps}")
END

"$program" --rehearse --rounds 1 --tokens 130 --hidden 40 --ffn 72 --main-gradient bf16 \
    >"$work/odd.txt" 2>"$work/err" || fail "a rehearsal of odd sizes: $(cat "$work/err")"
grep -q "130 tokens, hidden 40, FFN 72; main gradients bf16" "$work/odd.txt" ||
    fail "other sizes than asked for: $(head -n 2 "$work/odd.txt")"

refused() {
    status=0
    "$program" "$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = 2 ] || fail "$*: status $status, expected 2"
    [ ! -s "$work/out" ] || fail "$*: something on standard output"
}
refused frobnicate
refused --tokens 0
refused --hidden 1x
refused --main-gradient fp16
refused --rounds 100
refused --frobnicate
