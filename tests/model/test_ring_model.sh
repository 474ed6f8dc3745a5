# The model of the ring has no state that breaks a promise, and the verifier finds each of the
# faults that can be planted in it: see docs/plane-model.md.
#
#     test_ring_model.sh BUILD SOURCE
set -eu
model=$(cd "$2" && pwd)/tests/model/ring_protocol.pml

for command in spin cc; do
    command -v $command >/dev/null || { echo "FAIL: no $command; ./run test installs it"; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# An optimizer would take minutes for the verifier's one function.
# verify PLANTED STEP: what the verifier says is in the file `log`.
verify() {
    spin "-DPLANTED=$1" "-DSTEP=$2" -a "$model" >log || { cat log; exit 1; }
    cc -O0 -w -DSAFETY -DCOLLAPSE -DNOREDUCE -DVECTORSZ=2048 -DMEMLIM=4000 -o pan pan.c
    ./pan -m4000000 >log 2>&1 || true
    if grep -q -e 'search depth too small' -e 'out of memory' -e 'reached -DMEMLIM' log; then
        cat log
        echo "FAIL: the search was not complete"
        exit 1
    fi
}

states() { sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' log; }

# fault NUMBER WHAT: with that fault planted the verifier says WHAT.
fault() {
    verify "$1" 0
    if ! grep -q "^pan:1: .*$2" log; then
        cat log
        echo "FAIL: fault $1 is not found as: $2"
        exit 1
    fi
    echo "fault $1: found after $(states) states: $(sed -n 's/^pan:1: //p' log)"
}

holds() {
    verify 0 "$1"
    if ! grep -q 'errors: 0$' log; then
        cat log
        echo "FAIL: the model breaks a promise"
        exit 1
    fi
    echo "$2: holds in all of $(states) states"
}

fault 1 'assertion violated.*unseen'
fault 2 'assertion violated.*unseen'
fault 3 'assertion violated.*unseen'
fault 4 'assertion violated.*unseen'
fault 5 'assertion violated.*is_out.*acquired'
fault 6 'assertion violated.*holds'
fault 7 'assertion violated.*memory_of'
fault 8 'assertion violated.*state'
holds 0 "calls in any order"
holds 1 "steps, forward and backward"
