#!/bin/sh
# Shows on a GPU that compute-sanitizer reports planted errors inside a pool's memory thanks to the
# NVTX annotations, and reports nothing without a plant.
#
# usage: bench/gpu/sanitizer_plant.sh BUILD
#
# BUILD is a build of this tree with tests. Exit status 1 if anything is not as it should be.
set -u
[ $# = 1 ] || { sed -n '2,7p' "$0" >&2; exit 2; }
program=$1/tests/gpu_test_gpu_sanitizer
failed=0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
export TENURE_NVTX=1

# Where the tool can not follow a program of the driver API alone, the runtime is initialised first.
runtime=
compute-sanitizer --tool memcheck "$program" >"$log" 2>&1
if grep -q "nvtxMem" "$log"; then
    grep -m 3 "nvtxMem" "$log"
    runtime=--runtime
    echo "tried again with the CUDA runtime initialised first"
fi

# expect WHAT PATTERN ARGUMENT...: the pattern is in what compute-sanitizer ARGUMENT... prints.
expect() {
    what=$1
    pattern=$2
    shift 2
    compute-sanitizer --tool memcheck "$@" >"$log" 2>&1
    if grep -q "$pattern" "$log"; then
        echo "ok: $what"
        grep -m 3 -E "Invalid|out of bounds|ERROR SUMMARY" "$log"
    else
        echo "NOT ok: $what"
        cat "$log"
        failed=1
    fi
}

# $runtime is one word or none.
expect "nothing planted, nothing reported" "ERROR SUMMARY: 0 errors" "$program" $runtime
expect "a byte behind a block is reported" "Invalid __global__ write" \
    "$program" $runtime --plant overrun
expect "a write to a freed block is reported" "Invalid __global__ write" \
    "$program" $runtime --plant freed
expect "without the annotations it can not be seen" "ERROR SUMMARY: 0 errors" \
    --nvtx no "$program" $runtime --plant overrun
exit $failed
