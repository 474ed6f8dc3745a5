// A program outside the tree, in C++, of libtenure-ops: y = 2 x + y on two tensors.
#include <cstdio>
#include <tenure/tenure_ops.h>

static int failed(tn_status status) {
    if (status == TN_OK) return 0;
    std::puts(tn_error_last());
    return 1;
}

static tn_status make_vector(tn_scope scope, const float *values, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.rank = 1;
    config.shape[0] = 4;
    tn_status status = tn_tensor_create(scope, &config, out);
    if (status != TN_OK) return status;
    return tn_plane_write(*out, TN_PLANE_DATA, values, 4 * sizeof(float), nullptr, 0, nullptr);
}

int main() {
    const float x_values[4] = {1, 2, 3, -4}, y_values[4] = {10, 20, 30, 40};
    const float expected[4] = {12, 24, 36, 32};
    float result[4] = {};
    tn_device_config device_config = TN_DEVICE_CONFIG_INIT;
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    tn_axpy_args axpy = TN_AXPY_ARGS_INIT;
    tn_device *device = nullptr;
    tn_scope scope = {};
    device_config.driver = TN_DRIVER_HOST;
    if (failed(tn_device_create(&device_config, &device))) return 1;
    if (failed(tn_pool_create(device, &pool_config, &scope_config.pool))) return 1;
    if (failed(tn_scope_create(&scope_config, &scope))) return 1;
    if (failed(make_vector(scope, x_values, &axpy.x))) return 1;
    if (failed(make_vector(scope, y_values, &axpy.y))) return 1;
    axpy.alpha = 2;
    if (failed(tn_axpy(&axpy, nullptr))) return 1;
    if (failed(tn_plane_read(axpy.y, TN_PLANE_DATA, result, sizeof result, nullptr, 0, nullptr)))
        return 1;
    if (failed(tn_device_synchronize(device))) return 1;
    for (int i = 0; i < 4; i++)
        if (result[i] != expected[i]) return 2;
    if (failed(tn_scope_close(scope)) || failed(tn_pool_destroy(scope_config.pool))) return 1;
    if (failed(tn_device_destroy(device))) return 1;
    std::puts("outside_ops: y = 2 x + y");
    return 0;
}
