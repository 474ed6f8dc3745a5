/* GEMMs of a GPU to the bit: TransformerEngine's list of block-scaled products, with power-of-two
 * scales, against the sums that the tensor cores give for each block of 128 alone.
 *
 * Per element: y = fma(sa * sb, p, y) over the blocks, then bias, in fp32; that rounded to D's
 * type; then D, added in fp32, and rounded. Scales are powers of two, so that no order of them
 * gives other bits, except below what fp32 holds: there a zero is a zero of either sign.
 *
 * The list: the shapes of test_float8_blockwise_gemm_exact.py, those that it expects to be refused
 * (which are padded here), all mixes of E4M3 and E5M2 that there are, magnitudes from 1e-28 to 1e3,
 * 1D x 2D, 1D x 1D and 2D x 1D, row and column planes, three types of D, accumulated or not, with a
 * bias or without; by the first engine, and by our own where it takes the product.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gemm_cases_support.h"

/* ---- what is expected ----------------------------------------------------------------------- */

static float *expected_sums(const gemm_operand *a, const gemm_operand *b) {
    int64_t blocks = (a->contracted + 127) / 128, cols = b->rows;
    float *y = calloc((size_t)(a->rows * cols), sizeof *y);
    for (int64_t block = 0; block < blocks; block++) {
        float *p = gemm_partial_sums(a, b, block);
        for (int64_t r = 0; r < a->rows; r++) {
            const float scale = gemm_scale_of(a, r, block);
            for (int64_t c = 0; c < cols; c++) {
                int64_t at = r * cols + c;
                y[at] = fmaf(scale * gemm_scale_of(b, c, block), p[at], y[at]);
            }
        }
        free(p);
    }
    return y;
}

/* How an element becomes one of D when D is added to: the sum of both is rounded, or the product is
 * rounded and then the sum, as tn_gemm says. */
typedef enum rounding { ROUNDS_ONCE = 0, ROUNDS_FIRST } rounding;

static float in_type(tn_dtype dtype, float value) {
    uint32_t stored = 0;
    gpu_put(dtype, &stored, 0, value);
    return (float)gpu_value(dtype, &stored, 0);
}

/* Elements that are not the expected ones. */
static int64_t differences(const gemm_case *c, rounding rounds, const float *y, int64_t count,
                           int64_t cols, const gpu_copy *d, const gpu_copy *before,
                           const gpu_copy *bias) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        float sum = y[i];
        if (c->has_bias) sum = sum + (float)gpu_value(c->bias, bias->data, (size_t)(i % cols));
        if (c->accumulate && rounds == ROUNDS_FIRST) sum = in_type(c->d, sum);
        if (c->accumulate) sum = (float)gpu_value(c->d, before->data, (size_t)i) + sum;
        const double value = gpu_value(c->d, d->data, (size_t)i), wanted = in_type(c->d, sum);
        wrong += !(value == wanted) && !(isnan(value) && isnan(wanted));
    }
    return wrong;
}

/* ---- one product ---------------------------------------------------------------------------- */

static const char *kind_of(const gemm_case *c) {
    static const char *const names[][3] = {{"fprop 1D x 2D", "dgrad 1D x 2D", "wgrad 1D x 2D"},
                                           {"fprop 1D x 1D", "dgrad 1D x 1D", "wgrad 1D x 1D"},
                                           {"fprop 2D x 1D", "dgrad 2D x 1D", "wgrad 2D x 1D"}};
    if (c->weight == TN_FORMAT_FP8_BLOCK_2D) return names[0][c->form];
    return names[c->a_format == TN_FORMAT_FP8_BLOCK_2D ? 2 : 1][c->form];
}

static void check_engine(const gemm_case *c, const gemm_operand *a, const gemm_operand *b,
                         const float *y, tn_gemm_engine engine) {
    const char *kind = engine == TN_GEMM_ENGINE_WGMMA ? "by our own" : kind_of(c);
    tn_tensor d = gemm_output_make(c, a, b);
    gpu_copy before = {.data = NULL}, bias = {.data = NULL};
    tn_gemm_args args = gemm_args_of(c, a, b, d);
    args.engine = engine;
    args.bias = gemm_bias_make(c, b);
    if (c->accumulate) before = gpu_download(&gemm_gpu, d, TN_PLANE_DATA);
    if (c->has_bias) bias = gpu_download(&gemm_gpu, args.bias, TN_PLANE_DATA);
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    gpu_copy copy = gpu_download(&gemm_gpu, d, TN_PLANE_DATA);
    int64_t wrong =
        differences(c, ROUNDS_FIRST, y, a->rows * b->rows, b->rows, &copy, &before, &bias);
    if (wrong)
        printf("%s m %lld n %lld k %lld %s x %s of %g and %g -> %s%s%s: %lld elements differ\n",
               kind, (long long)c->m, (long long)c->n, (long long)c->k, tn_dtype_name(c->a),
               tn_dtype_name(c->b), (double)c->a_magnitude, (double)c->b_magnitude,
               tn_dtype_name(c->d), c->accumulate ? " +=" : "", c->has_bias ? " bias" : "",
               (long long)wrong);
    gpu_count(kind, wrong == 0);
    gpu_copy_end(&copy), gpu_copy_end(&before), gpu_copy_end(&bias);
    if (c->has_bias) gpu_destroy(&gemm_gpu, args.bias);
    gpu_destroy(&gemm_gpu, d);
}

static int is_for_our_own(const gemm_case *c) {
    return c->a_format != TN_FORMAT_FP8_BLOCK_2D && !c->has_bias &&
           (!c->accumulate || c->d == TN_FP32);
}

static void check_one(const gemm_case *c, const gemm_operand *a, const gemm_operand *b,
                      const float *y) {
    check_engine(c, a, b, y, TN_GEMM_ENGINE_AUTO);
    if (is_for_our_own(c)) check_engine(c, a, b, y, TN_GEMM_ENGINE_WGMMA);
}

/* All D of one pair of operands; few: one of each kind. */
static void check_outputs(gemm_case c, int few) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    /* fp16 does not hold products of 1e3 by 1e3 */
    const int type_count = c.a_magnitude * c.b_magnitude > 1e4f ? 2 : 3;
    gemm_operand a, b;
    gemm_operands_make(&c, &a, &b);
    float *y = expected_sums(&a, &b);
    for (int way = 0; way < 6 * type_count; way++) {
        if (few && way % 5 != 0) continue;
        c.d = types[way % type_count];
        c.accumulate = way / type_count % 2;
        c.has_bias = way / type_count / 2 > 0;
        c.bias = way / type_count / 2 == 2 ? TN_FP32 : c.d;
        check_one(&c, &a, &b, y);
    }
    free(y);
    gemm_operand_end(&a);
    gemm_operand_end(&b);
}

/* ---- the list ------------------------------------------------------------------------------- */

typedef struct product_kind {
    tn_gemm_form form;
    tn_format a, b;
} product_kind;

static const product_kind kinds[] = {
    {TN_GEMM_FPROP, TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D},
    {TN_GEMM_FPROP, TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_1D},
    {TN_GEMM_FPROP, TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_1D},
    {TN_GEMM_DGRAD, TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D},
    {TN_GEMM_WGRAD, TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_1D},
    {TN_GEMM_WGRAD, TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_1D}};
enum { KINDS = sizeof kinds / sizeof *kinds, MIXES = 3, MAGNITUDES = 9 };

/* D is rows x cols, whatever the form. */
static gemm_case case_of(const int64_t *shape, const product_kind *kind, int mix, int magnitudes) {
    static const float magnitude[] = {1.0f, 1e-28f, 1e3f};
    const int64_t rows = shape[0], cols = shape[1], contracted = shape[2];
    gemm_case c = gemm_fp8_case(rows, cols, contracted);
    c.form = kind->form;
    if (kind->form == TN_GEMM_DGRAD) c.n = contracted, c.k = cols;
    if (kind->form == TN_GEMM_WGRAD) c.m = contracted, c.n = rows, c.k = cols;
    c.a_format = kind->a, c.weight = kind->b;
    c.a = mix == 1 ? TN_E5M2 : TN_E4M3;
    c.b = mix == 2 ? TN_E5M2 : TN_E4M3;
    c.a_magnitude = magnitude[magnitudes % 3], c.b_magnitude = magnitude[magnitudes / 3];
    return c;
}

static void the_list_of_transformer_engine(void **state) {
    static const int64_t shapes[][3] = {
        {128, 128, 128}, {256, 256, 128}, {320, 336, 128}, {320, 336, 64},  {256, 256, 256},
        {320, 336, 256}, {16, 128, 128},  {128, 128, 120}, {128, 252, 128}, {255, 128, 128}};
    enum { SHAPES = sizeof shapes / sizeof *shapes };
    (void)state;
    for (int i = 0; i < SHAPES * KINDS; i++) {
        for (int mix = 0; mix < MIXES; mix++) {
            gemm_case c = case_of(shapes[i % SHAPES], &kinds[i / SHAPES], mix, 0);
            check_outputs(c, mix != 0);
        }
        for (int magnitudes = 1; magnitudes < MAGNITUDES; magnitudes++) {
            int mix = magnitudes % MIXES;
            gemm_case c = case_of(shapes[i % SHAPES], &kinds[i / SHAPES], mix, magnitudes);
            check_outputs(c, 1);
        }
    }
    gpu_count_report("GEMM, exact");
}

static void the_large_shapes_of_the_list(void **state) {
    static const int64_t shapes[][3] = {{1024, 1024, 4096}, {4096, 4096, 128}};
    (void)state;
    for (int i = 0; i < 2 * KINDS; i++)
        check_outputs(case_of(shapes[i % 2], &kinds[i / 2], i % MIXES, 0), 1);
    gpu_count_report("GEMM, exact, large");
}

/* ---- our own product ------------------------------------------------------------------------ */

static gpu_copy product_by(tn_gemm_args args, const gemm_case *c, const gemm_operand *a,
                           const gemm_operand *b, tn_gemm_engine engine) {
    args.engine = engine;
    args.d = gemm_output_make(c, a, b);
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    gpu_copy copy = gpu_download(&gemm_gpu, args.d, TN_PLANE_DATA);
    gpu_destroy(&gemm_gpu, args.d);
    return copy;
}

/* Any sizes and scales: what cuBLASLt gives, bit for bit, and the same again. */
static void our_own_gives_the_bits_of_cublaslt(void **state) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    uint64_t seed = 20;
    (void)state;
    for (int i = 0; i < 300; i++) {
        const uint64_t most = i % 10 == 0 ? 3000 : 500;
        int64_t shape[3];
        for (int j = 0; j < 3; j++)
            shape[j] = (int64_t)(gpu_random(&seed) % most) + 1;
        static const product_kind ours[] = {
            {TN_GEMM_FPROP, TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D},
            {TN_GEMM_DGRAD, TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D},
            {TN_GEMM_WGRAD, TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_1D}};
        gemm_case c = case_of(shape, &ours[i % 3], i / 3 % MIXES, 0);
        gemm_operand a, b;
        c.mode = i % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
        c.d = types[i / 9 % 3];
        c.accumulate = c.d == TN_FP32 && i % 4 == 1;
        gemm_operands_make(&c, &a, &b);
        const tn_gemm_args args = gemm_args_of(&c, &a, &b, (tn_tensor){0});
        gpu_copy expected = product_by(args, &c, &a, &b, TN_GEMM_ENGINE_CUBLASLT);
        for (int again = 0; again < 3; again++) {
            gpu_copy actual = product_by(args, &c, &a, &b, TN_GEMM_ENGINE_WGMMA);
            gpu_count(kind_of(&c), gpu_copies_equal(&actual, &expected, "our own product"));
            gpu_copy_end(&actual);
        }
        gpu_copy_end(&expected);
        gemm_operand_end(&a), gemm_operand_end(&b);
    }
    gpu_count_report("our own product against cuBLASLt's");
}

/* Memory may take numbers below the normal ones for 0, and for nothing else. */
static void sums_below_the_normal_ones_stay_or_are_0(void **state) {
    enum { SIZE = 256 };
    static float tiny[SIZE * SIZE];
    int64_t kept = 0;
    gemm_operand a, b;
    (void)state;
    gemm_case c = gemm_fp8_case(SIZE, SIZE, SIZE);
    c.d = TN_FP32;
    c.a_magnitude = c.b_magnitude = 1e-28f;
    for (int i = 0; i < SIZE * SIZE; i++)
        tiny[i] = ldexpf(i % 2 ? 1.5f : -1.25f, -127 - i % 20);
    gemm_operands_make(&c, &a, &b);
    tn_gemm_args args = gemm_args_of(&c, &a, &b, gemm_output_make(&c, &a, &b));
    args.accumulate = 1;
    args.engine = TN_GEMM_ENGINE_WGMMA;
    gpu_upload(&gemm_gpu, args.d, tiny);
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    gpu_copy d = gpu_download(&gemm_gpu, args.d, TN_PLANE_DATA);
    for (int i = 0; i < SIZE * SIZE; i++) {
        const float value = ((const float *)(const void *)d.data)[i];
        assert_true(value == tiny[i] || value == 0.0f);
        kept += value == tiny[i];
    }
    printf("sums below 2^-126: %lld of %d kept\n", (long long)kept, SIZE * SIZE);
    gpu_copy_end(&d);
    gpu_destroy(&gemm_gpu, args.d);
    gemm_operand_end(&a), gemm_operand_end(&b);
}

/* ---- the order of adding -------------------------------------------------------------------- */

/* For each format and type, where D is cuBLASLt's to write and where it is cut out of a padded one
 * by us: y is what a product to fp32 gives. */
static void how_sums_with_d_are_rounded(void **state) {
    static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_1D,
                                        TN_FORMAT_FP8_TENSOR, TN_FORMAT_PLAIN};
    static const tn_dtype types[] = {TN_BF16, TN_FP16};
    (void)state;
    for (int way = 0; way < 32; way++) {
        gemm_case c = gemm_fp8_case(way / 16 ? 255 : 256, 256, 128);
        gemm_operand a, b;
        c.weight = formats[way % 4];
        c.d = c.bias = types[way / 4 % 2];
        c.has_bias = way / 8 % 2;
        if (c.weight == TN_FORMAT_PLAIN) c.a = c.b = c.d;
        gemm_operands_make(&c, &a, &b);
        gemm_case wide = c;
        wide.d = TN_FP32;
        tn_tensor y = gemm_output_make(&wide, &a, &b);
        tn_gemm_args args = gemm_args_of(&wide, &a, &b, y);
        EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
        gpu_copy sums = gpu_download(&gemm_gpu, y, TN_PLANE_DATA), bias = {.data = NULL};
        c.accumulate = 1;
        args.accumulate = 1;
        args.d = gemm_output_make(&c, &a, &b);
        args.bias = gemm_bias_make(&c, &b);
        gpu_copy before = gpu_download(&gemm_gpu, args.d, TN_PLANE_DATA);
        if (c.has_bias) bias = gpu_download(&gemm_gpu, args.bias, TN_PLANE_DATA);
        EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
        gpu_copy d = gpu_download(&gemm_gpu, args.d, TN_PLANE_DATA);
        const float *y_data = (const float *)(const void *)sums.data;
        const int64_t count = c.m * c.n;
        int64_t once = differences(&c, ROUNDS_ONCE, y_data, count, c.n, &d, &before, &bias);
        int64_t first = differences(&c, ROUNDS_FIRST, y_data, count, c.n, &d, &before, &bias);
        printf(
            "%s m %lld %s%s: %lld of %lld elements differ if it is rounded first, %lld if once\n",
            tn_format_name(c.weight), (long long)c.m, tn_dtype_name(c.d), c.has_bias ? " bias" : "",
            (long long)first, (long long)count, (long long)once);
        gpu_count("rounded first", first == 0);
        gpu_copy_end(&sums), gpu_copy_end(&before), gpu_copy_end(&bias), gpu_copy_end(&d);
        gpu_destroy(&gemm_gpu, y), gpu_destroy(&gemm_gpu, args.d);
        if (c.has_bias) gpu_destroy(&gemm_gpu, args.bias);
        gemm_operand_end(&a), gemm_operand_end(&b);
    }
    gpu_count_report("GEMM, sums with D");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(how_sums_with_d_are_rounded),
        cmocka_unit_test(the_list_of_transformer_engine),
        cmocka_unit_test(the_large_shapes_of_the_list),
        cmocka_unit_test(our_own_gives_the_bits_of_cublaslt),
        cmocka_unit_test(sums_below_the_normal_ones_stay_or_are_0),
    };
    gpu_open(&gemm_gpu);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gemm_gpu);
    return failures;
}
