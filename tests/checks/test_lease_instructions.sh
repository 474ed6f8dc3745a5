# What a warm lease costs in instructions, which no other load of the machine changes: the same for
# each further pair of begin and end, and no more than a bound, whatever the access and the stream.
set -eu
build=$1
most_read=400 most_write=460

command -v valgrind >/dev/null || { echo "skipped: no valgrind"; exit 77; }
if nm "$build/libtenure.so" | grep -q -E '__(asan|tsan)_init|__gcov_init'; then
    echo "skipped: a sanitizer or coverage: its instructions would be counted, too"
    exit 77
fi

# A build with assertions walks the tensor after each transition.
if grep -q 'tn__tensor_is_valid(tensor)' "$build/libtenure.so"; then
    most_read=1000 most_write=1300
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/leases.c" <<'END'
#include <stdlib.h>
#include "tenure_tensor.h"
int main(int count, char **arguments) {
    tn_device_config device_config = TN_DEVICE_CONFIG_INIT;
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_device *device;
    tn_stream home, second, stream;
    tn_scope scope;
    tn_tensor tensor;
    tn_lease lease;
    tn_plane_view view;
    tn_access access = (tn_access)atoi(arguments[count - 3]);
    long pairs = atol(arguments[count - 1]);
    device_config.driver = TN_DRIVER_CUDA;
    if (tn_device_create(&device_config, &device)) return 1;
    if (tn_pool_create(device, NULL, &scope_config.pool)) return 1;
    if (tn_stream_create(device, &home) || tn_stream_create(device, &second)) return 1;
    stream = atoi(arguments[count - 2]) ? second : home;
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = config.shape[1] = 256;
    if (tn_scope_create(&scope_config, &scope)) return 1;
    if (tn_tensor_create(scope, &config, &tensor)) return 1;
    if (tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, home, &lease, &view)) return 1;
    if (tn_lease_end(lease)) return 1;
    for (long i = 0; i < pairs; i++) {
        if (tn_lease_begin(tensor, TN_PLANE_ROW, access, stream, &lease, &view)) return 1;
        if (tn_lease_end(lease)) return 1;
    }
    if (tn_scope_close(scope) || tn_pool_destroy(scope_config.pool)) return 1;
    if (tn_stream_destroy(device, home) || tn_stream_destroy(device, second)) return 1;
    return tn_device_destroy(device);
}
END
cc -I"$2/alloc" -I"$2/tensor" "$work/leases.c" -L"$build" -ltenure -Wl,-rpath,"$build" \
    -Wl,-rpath-link,"$build" -o "$work/leases"

# Instructions in the two calls and in all that they call.
count() {
    TENURE_CUDA_LIBRARY="$build/libtenure-simcuda.so" valgrind --tool=callgrind \
        --toggle-collect=tn_lease_begin --toggle-collect=tn_lease_end \
        --callgrind-out-file="$work/out" "$work/leases" "$1" "$2" "$3" >"$work/log" 2>&1 ||
        { cat "$work/log"; exit 1; }
    sed -n 's/^summary: //p' "$work/out"
}

for stream in 0 1; do
    for access in 0 1 2; do
        most=$most_write
        [ $access -ne 0 ] || most=$most_read
        few=$(count $access $stream 100)
        many=$(count $access $stream 300)
        if [ $(((many - few) % 200)) -ne 0 ]; then
            echo "FAIL: access $access: 200 leases take $((many - few)) instructions: not all alike"
            exit 1
        fi
        pair=$(((many - few) / 200))
        echo "access $access, stream $stream: $pair instructions a lease"
        [ "$pair" -gt 0 ] && [ "$pair" -le "$most" ] ||
            { echo "FAIL: a lease takes $pair instructions, the bound is $most"; exit 1; }
    done
done
