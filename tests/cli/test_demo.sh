# The main job at a small size: its claims hold, its JSON says so, and bad usage is refused.
set -eu
build=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
small="--driver host --layers 3 --hidden 650 --tokens 130 --steps 3"

fail() {
    echo "$1" >&2
    exit 1
}

refused() {
    words=$1
    shift
    status=0
    "$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = 2 ] || fail "exit status $status, expected 2: $*"
    [ ! -s "$work/out" ] || fail "output in spite of bad usage: $*"
    grep -q -- "$words" "$work/err" || fail "no '$words' in: $(cat "$work/err")"
}

printf 'op,id,bytes,stream\na,1,4096,0\na,2,8388608,0\nf,1,,\nf,2,,\n' >"$work/trace.csv"
demo="$build/tenure-demo --text $2/LICENSE --trace $work/trace.csv"

$demo $small >"$work/table" || fail "the demo failed: $(cat "$work/table")"
grep -q '^Both runs are bit-identical and the ledger is balanced.$' "$work/table" ||
    fail "the closing line is missing"
! grep -q PyTorch "$work/table" || fail "PyTorch's figures beside a trace that they are not of"
$demo $small --json >"$work/json" || fail "the demo failed with --json"
python3 - "$work/json" <<'PYTHON' || fail "the JSON does not add up"
import json, sys
report = json.load(open(sys.argv[1]))
one = 650 * 650 + 6 * 8 * 4  # elements, and 6 x 8 scales of 4 bytes
kept, released = report["kept"], report["released"]
assert report["all_hold"] and all(report["claims"].values())
assert kept["columnwise_bytes_after_backward"] == 3 * one
assert released["columnwise_bytes_after_backward"] == 0
assert kept["resident_bytes"] - released["resident_bytes"] == 3 * one
assert kept["peak_bytes"] - released["peak_bytes"] == one  # two are alive in a dgrad
assert kept["loss"] == released["loss"] and kept["loss"][2] < kept["loss"][0]
assert report["replay"]["peak_live_bytes"] == 4096 + 8388608
assert sum(o["resident_bytes"] for o in kept["owners"]) == kept["resident_bytes"]
PYTHON

# The curve: budgets of 0, 1, 2 and 3 of 3 planes, each used to the byte.
$demo $small --budget-curve 3 >"$work/curve" || fail "the curve failed: $(cat "$work/curve")"
one=$((650 * 650 + 6 * 8 * 4))
for planes in 0 1 2 3; do
    bytes=$((planes * one))
    grep -q "^budget,$bytes,$bytes,[0-9]*,[0-9.]*,[0-9.]*,1\$" "$work/curve" ||
        fail "the curve lacks a budget of $planes planes: $(cat "$work/curve")"
done
$demo $small --budget-curve 1 --json | python3 -c \
    'import json, sys; assert len(json.load(sys.stdin)) == 3' || fail "no curve as JSON"
refused "budget-curve: 0" $demo --budget-curve 0

refused "unrecognized option" $demo --colour
refused "hidden: 639" $demo --hidden 639
refused "hidden: 12x" $demo --hidden 12x
refused "steps: 1" $demo --steps 1
refused "driver: gpu" $demo --driver gpu
refused "unexpected argument: x" $demo x
refused "no file with at least 1024 bytes" $demo $small --text "$work/missing"
refused "no file with at least 1024 bytes" $demo $small --text "$work/trace.csv"
refused "missing.csv" $demo $small --trace "$work/missing.csv"
refused "a device that computes" env TENURE_CUDA_LIBRARY="$build/libtenure-simcuda.so" \
    $demo --driver cuda --layers 1 --hidden 640 --tokens 64 --steps 2
$demo --help | grep -q '^usage: tenure-demo' || fail "no help"
