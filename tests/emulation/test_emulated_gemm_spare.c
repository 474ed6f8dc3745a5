/* Products that leave multiprocessors to the derivation of the next weight's plane: for which
 * shapes, how many, and that neither is off by a bit. */
#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "emulated_driver.h"
#include "emulator.h"
#include "gpu_support.h"
#include "op_call.h"
#include "scripted_cublaslt.h"
#include "table_support.h"
#include "tenure_gemm.h"
#include "tenure_layers.h"

static gpu_side gpu;

static int open_gpu(void **state) {
    static const scripted_algorithm one = {.us = 10.0};
    (void)state;
    scripted.algorithms[0] = one;
    scripted.count = 1;
    scripted.tile = CUBLASLT_MATMUL_TILE_128x128;
    scripted.keeps_all = 0;
    scripted.keeps_varied = 0;
    scripted.outruns_host = 0;
    emulated_has_products = 0;
    gpu_open(&gpu);
    return 0;
}

static int close_gpu(void **state) {
    (void)state;
    scripted.outruns_host = 1; /* events that the pool may still wait for are over */
    gpu_close(&gpu);
    assert_int_equal(scripted.descriptors, 0);
    return 0;
}

/* ---- how many -------------------------------------------------------------------------------- */

/* Beside d [rows, cols] and the derivation of a plane of cols x contracted. */
static int spares(int64_t rows, int64_t cols, int64_t contracted) {
    tn__gemm_work work = {
        .a = {.kind = TN__OPERAND_VECTOR, .dtype = TN_E4M3, .rows = rows, .scale_stride = rows},
        .b = {.kind = TN__OPERAND_TILE, .dtype = TN_E4M3, .rows = cols},
        .contracted = contracted,
        .d = {.dtype = TN_BF16, .rows = rows, .cols = cols}};
    return tn__op_table_cuda.gemm_spares(gpu.device, &work, (size_t)(cols * contracted));
}

/* Of 132 multiprocessors. */
static void what_a_product_can_do_without_follows_from_its_rounds(void **state) {
    (void)state;
    assert_int_equal(EMULATED_MULTIPROCESSORS, 132);
    assert_int_equal(spares(4096, 4096, 4096), 4);  /* 1024 tiles: 8 rounds, and 8 on 128 */
    assert_int_equal(spares(15872, 4096, 4096), 2); /* time enough for 2: 31 rounds on 130 */
    assert_int_equal(spares(4224, 4096, 4096), 0);  /* 1056 tiles: 8 rounds on 132, 9 on 128 */
    assert_int_equal(spares(2048, 4096, 4096), 0);  /* 8 in time: 4 rounds, 5 on 124 */
}

static void products_that_are_too_short_or_not_known_spare_none(void **state) {
    (void)state;
    assert_int_equal(spares(256, 4096, 4096), 0); /* the plane takes longer on 8 than the product */
    scripted.tile = CUBLASLT_MATMUL_TILE_64x128;
    assert_int_equal(spares(4096, 4096, 4096), 0);
    scripted.tile = CUBLASLT_MATMUL_TILE_128x128;
    scripted.keeps_all = 1;
    assert_int_equal(spares(4096, 4096, 8192), 0);
}

/* ---- a layer --------------------------------------------------------------------------------- */

enum { TOKENS = 1920, WIDTH = 128 };

static tn_tensor filled(int64_t rows, int64_t cols, uint64_t seed) {
    size_t count = (size_t)(rows * cols);
    void *data = malloc(count * 2 + 1);
    gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, seed, data, count);
    tn_tensor tensor = gpu_plain(&gpu, TN_BF16, rows, cols);
    gpu_upload(&gpu, tensor, data);
    free(data);
    return tensor;
}

static tn_tensor frozen(int64_t rows, int64_t cols, uint64_t seed) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = filled(rows, cols, seed);
    args.dst = gpu_fp8(&gpu, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_SCALE_POW2, rows, cols);
    EXPECT_OK(tn_quantize(&args, gpu.stream));
    gpu_destroy(&gpu, args.src);
    EXPECT_OK(tn_tensor_set_frozen(args.dst, 1));
    EXPECT_OK(tn_tensor_set_policy(args.dst, TN_POLICY_UNTIL_LAST_USE));
    return args.dst;
}

static tn_tensor frozen_weight(uint64_t seed) { return frozen(WIDTH, WIDTH, seed); }

static gpu_copy backward(tn_tensor dy, tn_tensor weight, tn_tensor next, tn_stream side) {
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(weight, &info));
    args.dy = dy;
    args.w.weight = weight;
    args.dx = gpu_plain(&gpu, TN_BF16, TOKENS, info.cols);
    args.common.scope = gpu.scope;
    args.common.next_weight = next;
    args.common.side = side;
    EXPECT_OK(tn_linear_backward(&args, NULL, NULL, gpu.stream));
    gpu_copy dx = gpu_download(&gpu, args.dx, TN_PLANE_DATA);
    gpu_destroy(&gpu, args.dx);
    return dx;
}

/* 15 tiles: one round on 132 and on 124. */
static void a_layer_shares_the_device_and_gives_the_same_bits(void **state) {
    tn_tensor dy = filled(TOKENS, WIDTH, 1), weights[] = {frozen_weight(2), frozen_weight(3)};
    const tn_tensor none = {0};
    tn_stream side;
    (void)state;
    EXPECT_OK(tn_stream_create(gpu.device, &side));
    gpu_copy alone = backward(dy, weights[0], none, NULL);
    assert_int_equal(scripted.last_processors, 0);
    EXPECT_OK(tn_plane_require(weights[1], TN_PLANE_COL, gpu.stream));
    assert_string_equal(emulated_last_kernel(), "transpose_plane");
    gpu_copy plane = gpu_download(&gpu, weights[1], TN_PLANE_COL);
    EXPECT_OK(tn_plane_drop(weights[1], TN_PLANE_COL, gpu.stream));

    gpu_copy shared = backward(dy, weights[0], weights[1], side);
    assert_string_equal(emulated_last_kernel(), "transpose_plane_narrow");
    assert_int_equal(scripted.last_processors, EMULATED_MULTIPROCESSORS - 8);
    assert_true(gpu_copies_equal(&shared, &alone, "dx"));
    gpu_copy derived = gpu_download(&gpu, weights[1], TN_PLANE_COL);
    assert_true(gpu_copies_equal(&derived, &plane, "the next weight's plane"));

    gpu_copy next = backward(dy, weights[1], none, NULL); /* beside which nothing is derived */
    assert_int_equal(scripted.last_processors, 0);
    gpu_copy_end(&next), gpu_copy_end(&derived), gpu_copy_end(&shared);
    gpu_copy_end(&plane), gpu_copy_end(&alone);
    gpu_destroy(&gpu, weights[0]), gpu_destroy(&gpu, weights[1]);
    gpu_destroy(&gpu, dy);
    EXPECT_OK(tn_stream_synchronize(gpu.device, side));
    EXPECT_OK(tn_stream_destroy(gpu.device, side));
}

/* ---- a variation ----------------------------------------------------------------------------- */

/* The layer's dgrad by an order of blocks that nobody offers. */
static void tune_dgrad(tn_tensor dy, tn_tensor weight) {
    static const scripted_algorithm hidden = {.us = 1000.0, .swizzled_us = 900.0};
    tn_quantize_args cast = TN_QUANTIZE_ARGS_INIT;
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    scripted.algorithms[0] = hidden;
    cast.src = dy;
    cast.dst = gpu_fp8(&gpu, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_SCALE_POW2, TOKENS, WIDTH);
    EXPECT_OK(tn_quantize(&cast, gpu.stream));
    args.form = TN_GEMM_DGRAD;
    args.a = cast.dst;
    args.b = weight;
    args.d = gpu_plain(&gpu, TN_BF16, TOKENS, WIDTH);
    args.scope = gpu.scope;
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    gpu_destroy(&gpu, args.d);
    gpu_destroy(&gpu, cast.dst);
}

static void check_variation(int is_taken) {
    tn_tensor dy = filled(TOKENS, WIDTH, 1), weights[] = {frozen_weight(2), frozen_weight(3)};
    const tn_tensor none = {0};
    const int part = is_taken ? EMULATED_MULTIPROCESSORS - 8 : 0;
    tn_stream side;
    int checks = 0;
    EXPECT_OK(tn_stream_create(gpu.device, &side));
    tune_dgrad(dy, weights[0]);
    gpu_copy alone = backward(dy, weights[0], none, NULL);
    assert_true(scripted.last < 0);
    for (int turn = 0; turn < 3; turn++) {
        gpu_copy shared = backward(dy, weights[0], weights[1], side);
        assert_true(scripted.last < 0); /* the same one */
        assert_int_equal(scripted.last_processors, part);
        assert_true(gpu_copies_equal(&shared, &alone, "dx"));
        gpu_copy_end(&shared);
        EXPECT_OK(tn_plane_drop(weights[1], TN_PLANE_COL, gpu.stream));
        if (turn == 0) checks = scripted.part_checks;
    }
    assert_int_equal(scripted.part_checks, checks); /* asked about once */
    gpu_copy_end(&alone);
    gpu_destroy(&gpu, weights[0]), gpu_destroy(&gpu, weights[1]);
    gpu_destroy(&gpu, dy);
    EXPECT_OK(tn_stream_synchronize(gpu.device, side));
    EXPECT_OK(tn_stream_destroy(gpu.device, side));
}

static void a_variation_that_tuning_chose_is_put_to_the_offers(void **state) {
    (void)state;
    check_variation(1);
}

static void a_variation_that_is_not_taken_spares_none(void **state) {
    (void)state;
    scripted.keeps_varied = 1;
    check_variation(0);
}

/* ---- our own product ------------------------------------------------------------------------- */

enum { DEPTH = 16, COLS = 1792 }; /* 140 tiles of 192 x 128: two rounds on 132 and on 124 */

extern tn__driver tn__driver_emulated;
static tn_status (*launch_all)(tn__driver_device *, tn__function, const tn__launch *, tn_stream);
static unsigned product_blocks, product_neighbours; /* of the last product of ours */
static int narrow_launches;

static tn_status launch_and_look(tn__driver_device *state, tn__function function,
                                 const tn__launch *launch, tn_stream stream) {
    const char *name = ((const emulated_kernel *)function)->name;
    if (strncmp(name, "product_", 8) == 0) {
        product_blocks = launch->grid[0];
        product_neighbours = launch->cluster;
    }
    narrow_launches += strcmp(name, "transpose_plane_narrow") == 0;
    return launch_all(state, function, launch, stream);
}

/* The file's choice of the small product becomes that of the layer's dgrad: to time such a large
 * one would take long here. */
static void choose_ours(void) {
    char path[] = "/tmp/tenure_spare_XXXXXX";
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    const int file = mkstemp(path);
    assert_true(file >= 0);
    assert_int_equal(close(file), 0);
    tn_quantize_args cast = TN_QUANTIZE_ARGS_INIT;
    cast.src = filled(DEPTH, DEPTH, 1);
    cast.dst = gpu_fp8(&gpu, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_SCALE_POW2, DEPTH, DEPTH);
    EXPECT_OK(tn_quantize(&cast, gpu.stream));
    args.a = cast.dst;
    args.b = frozen(DEPTH, DEPTH, 2);
    args.d = cast.src;
    args.scope = gpu.scope;
    scripted.algorithms[0].us = 1000.0, scripted.own_us = 500.0;
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    EXPECT_OK(tn_gemm_table_save(gpu.device, path));
    table_edit(path, "16 16 16 0 0 bf16", "1920 1792 16 0 0 bf16");
    EXPECT_OK(tn_gemm_table_load(gpu.device, path));
    unlink(path);
    gpu_destroy(&gpu, args.a), gpu_destroy(&gpu, args.b), gpu_destroy(&gpu, args.d);
}

static void our_own_leaves_multiprocessors_and_gives_the_same_bits(void **state) {
    const tn_tensor none = {0};
    tn_stream side;
    (void)state;
    emulated_has_products = 1;
    (void)close_gpu(state);
    scripted.outruns_host = 0;
    gpu_open(&gpu);
    choose_ours();
    launch_all = tn__driver_emulated.launch;
    tn__driver_emulated.launch = launch_and_look;
    tn_tensor dy = filled(TOKENS, DEPTH, 1);
    tn_tensor weights[] = {frozen(DEPTH, COLS, 2), frozen(DEPTH, COLS, 3)};
    EXPECT_OK(tn_stream_create(gpu.device, &side));
    const int products = scripted.products;
    gpu_copy alone = backward(dy, weights[0], none, NULL);
    assert_int_equal(product_blocks, EMULATED_MULTIPROCESSORS);
    assert_int_equal(product_neighbours, 0);
    assert_int_equal(narrow_launches, 0);
    gpu_copy shared = backward(dy, weights[0], weights[1], side);
    assert_int_equal(product_blocks, EMULATED_MULTIPROCESSORS - 8);
    assert_int_equal(product_neighbours, 2); /* what is left is pairs of neighbours, too */
    assert_int_equal(narrow_launches, 1);
    assert_true(gpu_copies_equal(&shared, &alone, "dx"));
    gpu_copy again = backward(dy, weights[1], none, NULL);
    assert_int_equal(product_blocks, EMULATED_MULTIPROCESSORS);
    assert_int_equal(scripted.products, products);
    tn__driver_emulated.launch = launch_all;
    gpu_copy_end(&again), gpu_copy_end(&shared), gpu_copy_end(&alone);
    gpu_destroy(&gpu, weights[0]), gpu_destroy(&gpu, weights[1]);
    gpu_destroy(&gpu, dy);
    EXPECT_OK(tn_stream_synchronize(gpu.device, side));
    EXPECT_OK(tn_stream_destroy(gpu.device, side));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_gpu, close_gpu)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(what_a_product_can_do_without_follows_from_its_rounds),
        TEST(products_that_are_too_short_or_not_known_spare_none),
        TEST(a_layer_shares_the_device_and_gives_the_same_bits),
        TEST(a_variation_that_tuning_chose_is_put_to_the_offers),
        TEST(a_variation_that_is_not_taken_spares_none),
        TEST(our_own_leaves_multiprocessors_and_gives_the_same_bits),
    };
    scripted_cublaslt_begin();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
