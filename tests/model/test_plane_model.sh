# The model of the plane protocol has no state that breaks a promise, and the verifier finds each
# of the faults that can be planted in it: see docs/plane-model.md.
#
#     test_plane_model.sh BUILD SOURCE                   one lease of users, nothing fails
#     test_plane_model.sh BUILD SOURCE LEASES [FLAGS]    1 or 2 leases, with flags of the model
set -eu
model=$(cd "$2" && pwd)/tests/model
leases=${3:-1}
flags=${4--DNO_FAILURES}

for command in spin cc; do
    command -v $command >/dev/null || { echo "FAIL: no $command; ./run test installs it"; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# verify FLAGS...: builds the verifier of the model with these flags and runs it; what it says is in
# the file `log`. Its one function is so large that an optimizer would take minutes.
verify() {
    rm -rf ./pan*
    spin "-DLEASES=$leases" "$@" -a "$model/plane_protocol.pml" >log || { cat log; exit 1; }
    cc -O0 -w -DSAFETY -DNOFAIR -DNOREDUCE -DMEMLIM=6000 "-DLEASES=$leases" \
        "-DSLOTS=$((leases + 2))" "-I$model" -o pan pan.c
    ./pan -m24000000 -n -w22 >log 2>&1 || true
    if grep -q -e 'search depth too small' -e 'out of memory' -e 'reached -DMEMLIM' log; then
        cat log
        echo "FAIL: the search was not complete"
        exit 1
    fi
}

states() { sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' log; }

# fault NAME WHAT: with -DFAULT_NAME the verifier says WHAT.
fault() {
    verify -DNO_FAILURES "-DFAULT_$1"
    if ! grep -q "^pan:1: .*$2" log; then
        cat log
        echo "FAIL: fault $1 is not found as: $2"
        exit 1
    fi
    echo "$1: found after $(states) states"
}

fault NO_WAIT_FOR_WRITE 'assertion violated.*writes_unseen'
fault NO_WAIT_FOR_READS 'assertion violated.*reads_unseen'
fault USE_NOT_RECORDED 'assertion violated.*writes_unrecorded'
fault DROP_LEASED 'assertion violated.*is_taken'
fault DROP_LAST 'assertion violated.*had_value'
fault REPLACE_FORGETS 'assertion violated.*is_taken'
fault LOCK_KEPT 'invalid end state'

# shellcheck disable=SC2086
verify $flags
if ! grep -q 'errors: 0$' log; then
    cat log
    echo "FAIL: the model breaks a promise"
    exit 1
fi
echo "no fault: $(states) states, all as promised"
