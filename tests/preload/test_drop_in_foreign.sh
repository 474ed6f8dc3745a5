#!/bin/sh
# Programs that have nothing to do with CUDA run as if nothing was there.
. "$2/tests/preload/preload_support.sh"
export LD_LIBRARY_PATH="$plain_library_path"

same() {
    run_words "$@"
    cp "$work_dir/out" "$work_dir/out_plain"
    cp "$work_dir/err" "$work_dir/err_plain"
    plain_status=$last_status
    run_words "$tenure" run -- "$@"
    expect_status $plain_status
    checks=$((checks + 2))
    cmp -s "$work_dir/out" "$work_dir/out_plain" || complain "the output is another"
    cmp -s "$work_dir/err" "$work_dir/err_plain" || complain "the error output is another"
}

export TENURE_VERBOSE=1
same ls -l "$source_dir/docs"
same ls "$work_dir/nothing"
same sh -c 'printf "b\na\n" | sort | tr ab xy; exit 7'
same python3 -c 'import ctypes, json, zlib; print(json.dumps(zlib.crc32(b"x")))'
same python3 -c 'import ctypes; print(ctypes.CDLL("libm.so.6").cos is None)'
same python3 -c 'import ctypes; ctypes.CDLL("libm.so.6").cuMemAlloc_v2'

# One that asks all libraries for the driver's calls finds none, also if all is switched off.
for off in 0 1; do
    TENURE_DISABLE=$off run_words "$tenure" run -- \
        python3 -c 'import ctypes; ctypes.CDLL(None).cuMemAlloc_v2'
    expect_status 1
    expect_error "undefined symbol: cuMemAlloc_v2"
done
same env -i PATH="$PATH" sh -c 'echo "${LD_PRELOAD:-none}"'

# Nothing but the one small library is in them, and that needs nothing but libc.
run_words "$tenure" run -- python3 -c '
for line in open("/proc/self/maps"):
    if "tenure" in line: print(line.split("/")[-1].strip())'
expect_status 0
checks=$((checks + 2))
[ "$(sort -u "$work_dir/out")" = "libtenure-preload.so" ] || complain "only libtenure-preload"
needed=$(readelf -dW "$drop_in" | sed -n 's/.*(NEEDED).*\[\(.*\)\].*/\1/p')
[ "$needed" = "libc.so.6" ] || complain "libtenure-preload needs: $needed"

# A program whose driver can not be found gets the answer that it would get.
run_words "$tenure" run -- python3 -c '
import ctypes
try:
    ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print("no driver" if "libcuda.so.1" in str(error) else error)'
expect_status 0
finish
