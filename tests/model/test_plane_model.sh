# The model of the plane protocol has no state that breaks a promise, and the verifier finds each
# of the faults that can be planted in it: see docs/plane-model.md.
#
#     test_plane_model.sh BUILD SOURCE [LEASES [FAILURES]]
#
# LEASES: 1 (what ctest has) or 2 open leases of users. FAILURES: 0, 1 if what may fail also does,
# 2 if allocations do (what ctest has). EVERY_REPLACE=1 in the environment: a REPLACE of planes
# without contents, too.
set -eu
model=$(cd "$2" && pwd)/tests/model
leases=${3:-1}
failures=${4:-2}

for command in spin cc; do
    command -v $command >/dev/null || { echo "FAIL: no $command; ./run test installs it"; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# The verifier's one function is so large that an optimizer would take minutes.
spin "-DLEASES=$leases" ${EVERY_REPLACE:+-DEVERY_REPLACE} -a "$model/plane_protocol.pml" >log ||
    { cat log; exit 1; }
cc -O0 -w -DSAFETY -DNOFAIR -DNOREDUCE -DMEMLIM=6000 "-DLEASES=$leases" \
    "-DSLOTS=$((leases + 2))" "-I$model" -o pan pan.c

# verify PLANTED FAILURES: runs it; what it says is in the file `log`.
verify() {
    PLANTED=$1 FAILURES=$2 ./pan -m24000000 -n -w22 >log 2>&1 || true
    if grep -q -e 'search depth too small' -e 'out of memory' -e 'reached -DMEMLIM' log; then
        cat log
        echo "FAIL: the search was not complete"
        exit 1
    fi
}

states() { sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' log; }

# fault NUMBER WHAT [FAILURES]: with that fault planted the verifier says WHAT.
fault() {
    verify "$1" "${3:-0}"
    if ! grep -q "^pan:1: .*$2" log; then
        cat log
        echo "FAIL: fault $1 is not found as: $2"
        exit 1
    fi
    echo "fault $1: found after $(states) states"
}

fault 1 'assertion violated.*writes_unseen'
fault 2 'assertion violated.*reads_unseen'
fault 3 'assertion violated.*writes_unrecorded'
fault 4 'assertion violated.*is_taken'
fault 5 'assertion violated.*had_value'
fault 6 'assertion violated.*is_taken'
fault 7 'invalid end state'
fault 8 'assertion violated.*had_value' 2
fault 9 'assertion violated.*leases.*is_open==leases' 2

verify 0 "$failures"
if ! grep -q 'errors: 0$' log; then
    cat log
    echo "FAIL: the model breaks a promise"
    exit 1
fi
echo "no fault: $(states) states, all as promised"
