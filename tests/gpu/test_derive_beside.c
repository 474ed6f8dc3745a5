/* The next weight's plane, derived beside dgrad on multiprocessors that the product leaves to it:
 * both have the bits that they have alone, for planes of any shape, many times. */
#include <stdio.h>
#include <stdlib.h>

#include "gpu_support.h"
#include "tenure_layers.h"

enum { TURNS = 8 };

static gpu_side gpu;

static tn_tensor filled(int64_t rows, int64_t cols, uint64_t seed) {
    size_t count = (size_t)(rows * cols);
    void *data = malloc(count * 2 + 1);
    gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, seed, data, count);
    tn_tensor tensor = gpu_plain(&gpu, TN_BF16, rows, cols);
    gpu_upload(&gpu, tensor, data);
    free(data);
    return tensor;
}

static tn_tensor frozen_weight(int64_t rows, int64_t cols, uint64_t seed) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = filled(rows, cols, seed);
    args.dst = gpu_fp8(&gpu, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_SCALE_POW2, rows, cols);
    EXPECT_OK(tn_quantize(&args, gpu.stream));
    gpu_destroy(&gpu, args.src);
    EXPECT_OK(tn_tensor_set_frozen(args.dst, 1));
    EXPECT_OK(tn_tensor_set_policy(args.dst, TN_POLICY_UNTIL_LAST_USE));
    return args.dst;
}

static gpu_copy backward(tn_tensor dy, tn_tensor weight, tn_tensor next, tn_stream side) {
    tn_tensor_info rows = TN_TENSOR_INFO_INIT, cols = TN_TENSOR_INFO_INIT;
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    EXPECT_OK(tn_tensor_info_get(dy, &rows));
    EXPECT_OK(tn_tensor_info_get(weight, &cols));
    args.dy = dy;
    args.w.weight = weight;
    args.dx = gpu_plain(&gpu, TN_BF16, rows.rows, cols.cols);
    args.common.scope = gpu.scope;
    args.common.next_weight = next;
    args.common.side = side;
    EXPECT_OK(tn_linear_backward(&args, NULL, NULL, gpu.stream));
    gpu_copy dx = gpu_download(&gpu, args.dx, TN_PLANE_DATA);
    gpu_destroy(&gpu, args.dx);
    return dx;
}

/* A product of 4096 x 4096 x 4096 and a plane of that size or less are what shares the device on an
 * H200; elsewhere, and with planes whose rows are no multiples of 16, it is taken in turn. */
static void check_plane(tn_tensor dy, tn_tensor weight, int64_t rows, int64_t cols,
                        tn_stream side) {
    const tn_tensor none = {0};
    tn_tensor next = frozen_weight(rows, cols, (uint64_t)(rows + cols));
    gpu_copy alone = backward(dy, weight, none, NULL);
    EXPECT_OK(tn_plane_require(next, TN_PLANE_COL, gpu.stream));
    gpu_copy plane = gpu_download(&gpu, next, TN_PLANE_COL);
    for (int turn = 0; turn < TURNS; turn++) {
        EXPECT_OK(tn_plane_drop(next, TN_PLANE_COL, gpu.stream));
        gpu_copy shared = backward(dy, weight, next, side);
        gpu_copy derived = gpu_download(&gpu, next, TN_PLANE_COL);
        assert_true(gpu_copies_equal(&shared, &alone, "dx"));
        assert_true(gpu_copies_equal(&derived, &plane, "the next weight's plane"));
        gpu_copy_end(&shared), gpu_copy_end(&derived);
    }
    printf("%lld x %lld: %d turns, the same bits\n", (long long)rows, (long long)cols, TURNS);
    gpu_copy_end(&alone), gpu_copy_end(&plane);
    gpu_destroy(&gpu, next);
}

static void planes_and_products_are_what_they_are_alone(void **state) {
    static const int64_t shapes[][2] = {{4096, 4096}, {4096, 2048}, {2064, 4112}, {4080, 4096},
                                        {16, 4096},   {4096, 16},   {1000, 3000}, {129, 257}};
    tn_tensor dy = filled(4096, 4096, 1), weight = frozen_weight(4096, 4096, 2);
    tn_stream side;
    (void)state;
    EXPECT_OK(tn_stream_create(gpu.device, &side));
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_plane(dy, weight, shapes[i][0], shapes[i][1], side);
    EXPECT_OK(tn_stream_synchronize(gpu.device, side));
    gpu_destroy(&gpu, dy);
    gpu_destroy(&gpu, weight);
    EXPECT_OK(tn_stream_destroy(gpu.device, side));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(planes_and_products_are_what_they_are_alone)};
    gpu_open(&gpu);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failures;
}
