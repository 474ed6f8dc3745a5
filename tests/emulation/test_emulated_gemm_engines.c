/* Which engine multiplies on a device that times them: a script's clock says how long products of
 * each kind take. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulated_driver.h"
#include "gpu_support.h"
#include "scripted_cublaslt.h"
#include "table_support.h"
#include "tenure_gemm.h"

static gpu_side gpu;

static int open_gpu(void **state) {
    (void)state;
    scripted.algorithms[0] = (scripted_algorithm){.us = 1000.0};
    scripted.count = 1;
    scripted.plain_share = 1.0;
    scripted.own_us = 500.0;
    emulated_has_products = emulated_lacks_boxes = 0;
    gpu_open(&gpu);
    return 0;
}

static int close_gpu(void **state) {
    (void)state;
    gpu_close(&gpu);
    assert_int_equal(scripted.descriptors, 0);
    return 0;
}

static tn_tensor filled(int64_t rows, int64_t cols, uint64_t seed) {
    void *data = malloc((size_t)(rows * cols) * 2);
    gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, seed, data, (size_t)(rows * cols));
    tn_tensor tensor = gpu_plain(&gpu, TN_BF16, rows, cols);
    gpu_upload(&gpu, tensor, data);
    free(data);
    return tensor;
}

/* Of PLAIN: as it is. */
static tn_tensor quantized(tn_format format, int64_t rows, int64_t cols, uint64_t seed) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = filled(rows, cols, seed);
    if (format == TN_FORMAT_PLAIN) return args.src;
    args.dst = gpu_fp8(&gpu, format, TN_E4M3, TN_SCALE_FP32, rows, cols);
    EXPECT_OK(tn_quantize(&args, gpu.stream));
    gpu_destroy(&gpu, args.src);
    return args.dst;
}

static tn_gemm_args product_of(tn_format format) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = quantized(format, 40, 144, 1), args.b = quantized(format, 24, 144, 2);
    args.d = filled(40, 24, 3);
    args.scope = gpu.scope;
    return args;
}

static void end_product(const tn_gemm_args *args) {
    gpu_destroy(&gpu, args->a), gpu_destroy(&gpu, args->b), gpu_destroy(&gpu, args->d);
}

static tn_gemm_engine engine_of(const tn_gemm_args *args) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    EXPECT_OK(tn_gemm_choice_get(args, &choice));
    return choice.engine;
}

/* D of the call as it is, and of the same with an engine pinned. */
static void expect_bits_of(tn_gemm_args args, tn_gemm_engine engine) {
    gpu_copy copies[2];
    for (int i = 0; i < 2; i++) {
        if (i == 1) args.engine = engine;
        EXPECT_OK(tn_gemm(&args, gpu.stream));
        copies[i] = gpu_download(&gpu, args.d, TN_PLANE_DATA);
    }
    assert_true(gpu_copies_equal(&copies[0], &copies[1], tn_gemm_engine_name(engine)));
    gpu_copy_end(&copies[0]), gpu_copy_end(&copies[1]);
}

static void another_engine_is_taken_by_time_where_that_is_allowed(void **state) {
    (void)state;
    tn_gemm_args args = product_of(TN_FORMAT_FP8_BLOCK_1D);
    scripted.plain_share = 0.5;
    args.may_differ = 1;
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_CUBLASLT); /* nothing is measured yet */
    gpu_copy before = gpu_download(&gpu, args.d, TN_PLANE_DATA);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    gpu_copy after = gpu_download(&gpu, args.d, TN_PLANE_DATA);
    assert_true(gpu_copies_equal(&after, &before, "d"));
    gpu_copy_end(&before), gpu_copy_end(&after);
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    expect_bits_of(args, TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    args.may_differ = 0;
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_CUBLASLT);
    expect_bits_of(args, TN_GEMM_ENGINE_CUBLASLT);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream)); /* says nothing of the others */
    args.may_differ = 1;
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    scripted.plain_share = 1.0; /* and as fast, it is not clearly faster */
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_CUBLASLT);
    end_product(&args);
}

/* Its number is of the formats' own engine, whichever one calls without a pin take. */
static void a_pinned_algorithm_is_of_the_formats_own_engine(void **state) {
    (void)state;
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    tn_gemm_args args = product_of(TN_FORMAT_FP8_BLOCK_1D);
    scripted.algorithms[0].swizzled_us = 1500.0; /* so that tuning finds a second one */
    scripted.plain_share = 0.5;
    args.may_differ = 1;
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    for (args.algorithm = 1; args.algorithm <= 2; args.algorithm++) {
        EXPECT_OK(tn_gemm_choice_get(&args, &choice));
        assert_int_equal(choice.engine, TN_GEMM_ENGINE_CUBLASLT);
        assert_int_equal(choice.algorithm, args.algorithm);
        assert_int_equal(choice.algorithms, 2);
        expect_bits_of(args, TN_GEMM_ENGINE_CUBLASLT);
    }
    EXPECT_STATUS(tn_gemm(&args, gpu.stream), TN_INVALID_ARGUMENT); /* there is no third one */
    end_product(&args);
}

static void tuning_without_leave_times_one_engine(void **state) {
    (void)state;
    tn_gemm_args args = product_of(TN_FORMAT_FP8_BLOCK_1D);
    scripted.plain_share = 0.5;
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    args.may_differ = 1;
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_CUBLASLT);
    args.engine = TN_GEMM_ENGINE_CUBLASLT; /* a pin comes first */
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    args.engine = TN_GEMM_ENGINE_AUTO;
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_CUBLASLT);
    end_product(&args);
}

static tn_gemm_args tuned_meanwhile;

static void tune_meanwhile(void) { EXPECT_OK(tn_gemm_tune(&tuned_meanwhile, gpu.stream)); }

/* While more offers are asked for, another thread has tuned the same shape, and that others are
 * faster: what it has found stays. */
static void what_another_thread_has_tuned_meanwhile_stays(void **state) {
    (void)state;
    tn_gemm_args args = product_of(TN_FORMAT_FP8_BLOCK_1D);
    scripted.plain_share = 0.5;
    EXPECT_OK(tn_gemm(&args, gpu.stream)); /* so that there are offers */
    tuned_meanwhile = args;
    tuned_meanwhile.may_differ = 1;
    scripted.meanwhile = tune_meanwhile;
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    assert_null(scripted.meanwhile);
    assert_int_equal(engine_of(&tuned_meanwhile), TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    end_product(&args);
}

static void a_file_keeps_which_engine_it_is(void **state) {
    char path[] = "/tmp/tenure_engines_XXXXXX";
    int file = mkstemp(path);
    (void)state;
    assert_true(file >= 0);
    assert_int_equal(close(file), 0);
    tn_gemm_args args = product_of(TN_FORMAT_FP8_BLOCK_1D);
    scripted.plain_share = 0.5;
    args.may_differ = 1;
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    EXPECT_OK(tn_gemm_table_save(gpu.device, path));
    end_product(&args);
    gpu_close(&gpu), gpu_open(&gpu);
    args = product_of(TN_FORMAT_FP8_BLOCK_1D);
    args.may_differ = 1;
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_CUBLASLT);
    EXPECT_OK(tn_gemm_table_load(gpu.device, path));
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    expect_bits_of(args, TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    end_product(&args);
    unlink(path);
}

static void formats_without_a_gemm_are_dequantized_where_that_is_allowed(void **state) {
    (void)state;
    tn_gemm_args args = product_of(TN_FORMAT_MXFP8);
    EXPECT_STATUS(tn_gemm(&args, gpu.stream), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_gemm_tune(&args, gpu.stream), TN_UNSUPPORTED);
    args.may_differ = 1;
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    expect_bits_of(args, TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    end_product(&args);
}

/* The device has GEMMs of the format, and cuBLASLt none of this product. */
static void products_without_an_algorithm_are_dequantized_where_that_is_allowed(void **state) {
    (void)state;
    tn_gemm_args args = product_of(TN_FORMAT_FP8_BLOCK_1D);
    scripted.lacks_fp8 = 1;
    EXPECT_STATUS(tn_gemm(&args, gpu.stream), TN_UNSUPPORTED);
    args.may_differ = 1;
    for (int tuned = 0; tuned < 2; tuned++) {
        assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_DEQUANTIZE_BF16);
        expect_bits_of(args, TN_GEMM_ENGINE_DEQUANTIZE_BF16);
        EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    }
    args.engine = TN_GEMM_ENGINE_CUBLASLT; /* a pin comes first */
    EXPECT_STATUS(tn_gemm(&args, gpu.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("MatmulAlgoGetHeuristic");
    scripted.lacks_fp8 = 0;
    end_product(&args);
}

/* ---- our own --------------------------------------------------------------------------------- */

/* A device that has products of our own, by a driver that has all calls that they need, or not. */
static void reopen_with_products(int lacks_boxes) {
    emulated_has_products = 1;
    emulated_lacks_boxes = lacks_boxes;
    gpu_close(&gpu), gpu_open(&gpu);
}

static void a_driver_without_boxes_is_offered_none_of_ours(void **state) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    (void)state;
    reopen_with_products(1);
    tn_gemm_args args = product_of(TN_FORMAT_FP8_BLOCK_1D);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_CUBLASLT);
    assert_int_equal(choice.algorithms, 1);
    gpu_copy before = gpu_download(&gpu, args.d, TN_PLANE_DATA);
    args.engine = TN_GEMM_ENGINE_WGMMA;
    EXPECT_STATUS(tn_gemm_choice_get(&args, &choice), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_gemm_tune(&args, gpu.stream), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_gemm(&args, gpu.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("be chosen: the emulated driver lacks cuTensorMapEncodeTiled");
    gpu_copy after = gpu_download(&gpu, args.d, TN_PLANE_DATA);
    assert_true(gpu_copies_equal(&after, &before, "d of a refused product"));
    gpu_copy_end(&before), gpu_copy_end(&after);
    end_product(&args);

    reopen_with_products(0);
    args = product_of(TN_FORMAT_FP8_BLOCK_1D);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_WGMMA);
    end_product(&args);
}

static int is_measured(const tn_gemm_args *args) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    EXPECT_OK(tn_gemm_choice_get(args, &choice));
    return choice.is_measured;
}

/* The line of ours is left out, the other one counts, and the shape can be timed. */
static void expect_left_out(const char *path, tn_gemm_engine retimed) {
    tn_gemm_args ours = product_of(TN_FORMAT_FP8_BLOCK_1D), plain = product_of(TN_FORMAT_PLAIN);
    EXPECT_OK(tn_gemm_table_load(gpu.device, path));
    assert_int_equal(is_measured(&ours), 0);
    assert_int_equal(is_measured(&plain), 1);
    assert_int_equal(engine_of(&ours), TN_GEMM_ENGINE_CUBLASLT);
    expect_bits_of(ours, TN_GEMM_ENGINE_CUBLASLT);
    EXPECT_OK(tn_gemm_tune(&ours, gpu.stream));
    EXPECT_OK(tn_gemm_table_load(gpu.device, path)); /* and keeps what it has */
    assert_int_equal(is_measured(&ours), 1);
    assert_int_equal(engine_of(&ours), retimed);
    end_product(&ours), end_product(&plain);
}

static void lines_of_ours_are_left_out_where_it_does_not_run(void **state) {
    char path[] = "/tmp/tenure_engines_XXXXXX";
    int file = mkstemp(path);
    (void)state;
    assert_true(file >= 0);
    assert_int_equal(close(file), 0);
    reopen_with_products(0);
    tn_gemm_args ours = product_of(TN_FORMAT_FP8_BLOCK_1D), plain = product_of(TN_FORMAT_PLAIN);
    EXPECT_OK(tn_gemm_tune(&ours, gpu.stream));
    EXPECT_OK(tn_gemm_tune(&plain, gpu.stream));
    EXPECT_OK(tn_gemm_table_save(gpu.device, path));
    end_product(&ours), end_product(&plain);
    reopen_with_products(0); /* where it does, they count */
    ours = product_of(TN_FORMAT_FP8_BLOCK_1D);
    EXPECT_OK(tn_gemm_table_load(gpu.device, path));
    assert_int_equal(engine_of(&ours), TN_GEMM_ENGINE_WGMMA);
    end_product(&ours);
    reopen_with_products(1);
    expect_left_out(path, TN_GEMM_ENGINE_CUBLASLT);
    table_edit(path, "54656e757265203100000000", "54656e7572652031ffffffff"); /* of another tile */
    reopen_with_products(0);
    expect_left_out(path, TN_GEMM_ENGINE_WGMMA);
    table_edit(path, "54656e7572652031ffffffff", "54656e7572652032ffffffff"); /* "Tenure 2" */
    reopen_with_products(0);
    expect_left_out(path, TN_GEMM_ENGINE_WGMMA);
    unlink(path);
}

/* Where cuBLASLt offers nothing, of a shape that ours takes. */
static void our_own_goes_without_another(void **state) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    (void)state;
    reopen_with_products(0);
    scripted.count = 0;
    tn_gemm_args args = product_of(TN_FORMAT_FP8_BLOCK_1D), plain = product_of(TN_FORMAT_PLAIN);
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_WGMMA);
    assert_int_equal(choice.algorithms, 1);
    expect_bits_of(args, TN_GEMM_ENGINE_WGMMA);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    assert_int_equal(engine_of(&args), TN_GEMM_ENGINE_WGMMA);
    args.engine = TN_GEMM_ENGINE_CUBLASLT;
    EXPECT_STATUS(tn_gemm(&args, gpu.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("the engine cublaslt is pinned, and does not take");
    EXPECT_STATUS(tn_gemm(&plain, gpu.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("MatmulAlgoGetHeuristic");
    gpu_poison(&gpu, plain.d, TN_PLANE_DATA);
    end_product(&args), end_product(&plain);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_gpu, close_gpu)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(another_engine_is_taken_by_time_where_that_is_allowed),
        TEST(a_pinned_algorithm_is_of_the_formats_own_engine),
        TEST(tuning_without_leave_times_one_engine),
        TEST(what_another_thread_has_tuned_meanwhile_stays),
        TEST(a_file_keeps_which_engine_it_is),
        TEST(formats_without_a_gemm_are_dequantized_where_that_is_allowed),
        TEST(products_without_an_algorithm_are_dequantized_where_that_is_allowed),
        TEST(a_driver_without_boxes_is_offered_none_of_ours),
        TEST(lines_of_ours_are_left_out_where_it_does_not_run),
        TEST(our_own_goes_without_another),
    };
    scripted_cublaslt_begin();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
