# The model of the objects' locks lets one thread in at a time and leaves nobody asleep, and the
# verifier finds each of the faults that can be planted in it.
#
#     test_lock_model.sh BUILD SOURCE [THREADS [ROUNDS]]      2 threads, 4 rounds is what ctest has
set -eu
model=$(cd "$2" && pwd)/tests/model/object_lock.pml
threads=${3:-2}
rounds=${4:-4}

for command in spin cc; do
    command -v $command >/dev/null || { echo "FAIL: no $command; ./run test installs it"; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# verify PLANTED: what the verifier says is in the file `log`.
verify() {
    spin "-DTHREADS=$threads" "-DROUNDS=$rounds" "-DPLANTED=$1" -a "$model" >log ||
        { cat log; exit 1; }
    cc -O1 -w -DSAFETY -DCOLLAPSE -DVECTORSZ=2048 -DMEMLIM=4000 -o pan pan.c
    ./pan -m2000000 >log 2>&1 || true
    if grep -q -e 'search depth too small' -e 'out of memory' -e 'reached -DMEMLIM' log; then
        cat log
        echo "FAIL: the search was not complete"
        exit 1
    fi
}

states() { sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' log; }

for fault in 1 2 3 4; do
    verify $fault
    grep -q '^pan:1: ' log || { cat log; echo "FAIL: fault $fault is not found"; exit 1; }
    echo "fault $fault: found after $(states) states: $(sed -n 's/^pan:1: //p' log)"
done

verify 0
if ! grep -q 'errors: 0' log; then
    cat log
    echo "FAIL: a promise is broken"
    exit 1
fi
echo "holds in all of $(states) states"
