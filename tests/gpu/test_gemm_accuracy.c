/* GEMMs of a GPU against fp64 (gemm_cases_support.h has the measure): forms, mixes of types, odd
 * shapes, large ones. */
#include "gemm_cases_support.h"

/* ---- tests ----------------------------------------------------------------------------------- */

/* Each weight once, for all numbers of tokens. */
static void test_deepgemm_shapes(void **state) {
    static const int64_t ms[] = {1, 128, 4096};
    static const int64_t nks[][2] = {{2112, 7168},  {576, 7168},  {24576, 1536}, {32768, 512},
                                     {7168, 16384}, {4096, 7168}, {7168, 2048}};
    (void)state;
    for (int i = 0; i < 7; i++) {
        gemm_case c = gemm_fp8_case(1, nks[i][0], nks[i][1]);
        gemm_operand b = gemm_operand_b(&c);
        for (int j = 0; j < 3; j++) {
            c.m = ms[j];
            gemm_operand a = gemm_operand_a(&c);
            c.d = TN_FP32;
            gemm_check_operands(&c, &a, &b);
            c.d = TN_BF16;
            gemm_check_operands(&c, &a, &b);
            gemm_operand_end(&a);
        }
        gemm_operand_end(&b);
    }
    gpu_count_report("GEMM, large shapes");
}

/* Every form, format and mix of types that there is, on one shape. */
static void check_forms(int64_t m, int64_t n, int64_t k, int poison) {
    for (int way = 0; way < 4; way++) {
        for (int mix = 0; mix < 3; mix++) {
            gemm_case c = gemm_fp8_case(m, n, k);
            c.form = way == 3 ? TN_GEMM_FPROP : (tn_gemm_form)way;
            c.weight = way >= 2 ? TN_FORMAT_FP8_BLOCK_1D : TN_FORMAT_FP8_BLOCK_2D;
            c.a = mix == 1 ? TN_E5M2 : TN_E4M3;
            c.b = mix == 2 ? TN_E5M2 : TN_E4M3;
            c.poison_padding = poison;
            gemm_check(&c);
            c.mode = TN_SCALE_FP32;
            c.d = mix == 1 ? TN_BF16 : mix == 2 ? TN_FP16 : TN_FP32;
            gemm_check(&c);
            c.accumulate = 1;
            gemm_check(&c);
        }
    }
}

static void test_forms_and_mixes(void **state) {
    static const int64_t shapes[][3] = {{128, 128, 128}, {256, 128, 256}, {320, 336, 128},
                                        {320, 336, 256}, {16, 128, 128},  {512, 1024, 768}};
    (void)state;
    for (int i = 0; i < 6; i++)
        check_forms(shapes[i][0], shapes[i][1], shapes[i][2], 0);
    gpu_count_report("GEMM, forms and mixes");
}

static void test_odd_shapes_with_nan_in_scale_padding(void **state) {
    static const int64_t shapes[][3] = {
        {100, 130, 128}, {320, 336, 64},  {128, 128, 120}, {128, 252, 128}, {255, 128, 128},
        {255, 252, 120}, {128, 256, 640}, {1, 1, 1},       {7, 5, 3},       {129, 257, 131},
        {1, 4096, 640},  {33, 576, 448},  {17, 192, 1152}, {4, 4, 128}};
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_forms(shapes[i][0], shapes[i][1], shapes[i][2], 1);
    gpu_count_report("GEMM, odd shapes");
}

static void test_packed_sequence_of_5743_tokens(void **state) {
    (void)state;
    for (int form = 0; form < 3; form++) {
        gemm_case c = gemm_fp8_case(5743, 1024, 4096);
        c.form = (tn_gemm_form)form;
        if (form == TN_GEMM_WGRAD) c.weight = TN_FORMAT_FP8_BLOCK_1D;
        gemm_check(&c);
        c.d = TN_BF16;
        gemm_check(&c);
    }
    gpu_count_report("GEMM, 5743 tokens");
}

static void test_plain(void **state) {
    static const int64_t shapes[][3] = {{256, 384, 512}, {100, 130, 128}, {33, 7, 65}};
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (int i = 0; i < 3; i++) {
        for (int way = 0; way < 54; way++) {
            gemm_case c = gemm_fp8_case(shapes[i][0], shapes[i][1], shapes[i][2]);
            c.weight = TN_FORMAT_PLAIN;
            c.form = (tn_gemm_form)(way % 3);
            c.a = c.b = types[way / 3 % 3];
            c.d = types[way / 9 % 3];
            c.accumulate = way / 27;
            gemm_check(&c);
        }
    }
    gpu_count_report("GEMM, plain");
}

static void check_repeats(const gemm_case *c, const char *name) {
    gemm_operand a, b;
    gemm_operands_make(c, &a, &b);
    tn_tensor d = gemm_output_make(c, &a, &b);
    tn_gemm_args args = gemm_args_of(c, &a, &b, d);
    args.bias = gemm_bias_make(c, &b);
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    gpu_copy first = gpu_download(&gemm_gpu, d, TN_PLANE_DATA);
    for (int i = 0; i < 100; i++) {
        EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
        gpu_copy again = gpu_download(&gemm_gpu, d, TN_PLANE_DATA);
        gpu_count(name, gpu_copies_equal(&again, &first, name));
        gpu_copy_end(&again);
    }
    gpu_copy_end(&first);
    if (c->has_bias) gpu_destroy(&gemm_gpu, args.bias);
    gpu_destroy(&gemm_gpu, d);
    gemm_operand_end(&a);
    gemm_operand_end(&b);
}

static void test_the_same_bits_a_hundred_times(void **state) {
    static const char *const names[] = {"fprop", "dgrad", "wgrad"};
    static const tn_format weights[] = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_1D,
                                        TN_FORMAT_FP8_TENSOR, TN_FORMAT_PLAIN};
    (void)state;
    for (int i = 0; i < 3 * 4; i++) {
        gemm_case c = gemm_fp8_case(256, 392, 1160);
        c.form = (tn_gemm_form)(i % 3);
        c.weight = weights[i / 3];
        if (c.weight == TN_FORMAT_PLAIN) c.a = c.b = TN_BF16;
        c.d = i % 2 ? TN_BF16 : TN_FP32;
        c.has_bias = i % 3 == 0;
        c.bias = TN_BF16;
        check_repeats(&c, names[i % 3]);
    }
    gpu_count_report("GEMM, repeats");
}

static void test_what_there_is_not(void **state) {
    gemm_operand a, b;
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    gemm_case c = gemm_fp8_case(128, 128, 128);
    (void)state;
    c.a = c.b = TN_E5M2;
    gemm_operands_make(&c, &a, &b);
    args.a = a.tensor;
    args.b = b.tensor;
    args.d = gpu_plain(&gemm_gpu, TN_FP32, 128, 128);
    args.scope = gemm_gpu.scope;
    EXPECT_STATUS(tn_gemm(&args, gemm_gpu.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("E4M3");
    gpu_destroy(&gemm_gpu, args.d);
    gemm_operand_end(&a);
    gemm_operand_end(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms_and_mixes),
        cmocka_unit_test(test_odd_shapes_with_nan_in_scale_padding),
        cmocka_unit_test(test_packed_sequence_of_5743_tokens),
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_the_same_bits_a_hundred_times),
        cmocka_unit_test(test_what_there_is_not),
        cmocka_unit_test(test_deepgemm_shapes),
    };
    gpu_open(&gemm_gpu);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gemm_gpu);
    return failures;
}
