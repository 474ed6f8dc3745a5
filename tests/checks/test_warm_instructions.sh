# What a warm pair costs in instructions, which no other load of the machine changes: the same at
# every size up to 2 MiB, the same at every size above, where a lane keeps one block and looks for
# it, the same for each further pair, and no more than a bound.
set -eu
build=$1
most=205

command -v valgrind >/dev/null || { echo "skipped: no valgrind"; exit 77; }
if nm "$build/libtenure.so" | grep -q -E '__(asan|tsan)_init|__gcov_init'; then
    echo "skipped: a sanitizer or coverage: its instructions would be counted, too"
    exit 77
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/pairs.c" <<'END'
#include <stdio.h>
#include <stdlib.h>
#include "tenure_alloc.h"
int main(int count, char **arguments) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    void *block;
    size_t bytes = strtoull(arguments[count - 2], NULL, 10);
    long pairs = strtol(arguments[count - 1], NULL, 10);
    config.driver = TN_DRIVER_CUDA;
    if (tn_device_create(&config, &device) || tn_pool_create(device, NULL, &pool)) return 1;
    if (tn_stream_create(device, &stream)) return 1;
    for (long i = 0; i < pairs; i++) {
        if (tn_alloc(pool, bytes, stream, NULL, &block) || tn_free(block, stream)) return 1;
    }
    if (tn_pool_destroy(pool) || tn_stream_destroy(device, stream)) return 1;
    return tn_device_destroy(device);
}
END
cc -I"$2/alloc" "$work/pairs.c" -L"$build" -ltenure -Wl,-rpath,"$build" \
    -Wl,-rpath-link,"$build" -o "$work/pairs"

# Instructions in the cache's own functions: the simulated device is told of each take outside.
count() {
    TENURE_CUDA_LIBRARY="$build/libtenure-simcuda.so" valgrind --tool=callgrind \
        --toggle-collect=tn__cache_take --toggle-collect=tn__cache_give \
        --callgrind-out-file="$work/out" "$work/pairs" "$1" "$2" >"$work/log" 2>&1 ||
        { cat "$work/log"; exit 1; }
    sed -n 's/^summary: //p' "$work/out"
}

expected=
for bytes in 512 65536 1048576 8388608 1073741824; do
    [ $bytes -ne 8388608 ] || expected=
    few=$(count $bytes 100)
    many=$(count $bytes 300)
    if [ $(((many - few) % 200)) -ne 0 ]; then
        echo "FAIL: $bytes bytes: 200 pairs take $((many - few)) instructions: not all alike"
        exit 1
    fi
    pair=$(((many - few) / 200))
    echo "$bytes bytes: $pair instructions a pair"
    [ "${expected:=$pair}" -eq "$pair" ] || { echo "FAIL: not the same at every size"; exit 1; }
    [ "$pair" -gt 0 ] && [ "$pair" -le "$most" ] ||
        { echo "FAIL: a pair takes $pair instructions, the bound is $most"; exit 1; }
done
