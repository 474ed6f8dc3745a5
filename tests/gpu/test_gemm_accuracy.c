/* GEMMs of a GPU against fp64: sampled rows and columns of the product of the very operands that
 * the GPU multiplied, dequantized on the CPU.
 *
 * The measure is ||out - ref|| / ||ref|| over the samples. In fp32 out it must be below 1e-3 (the
 * tensor cores add with fewer bits than fp32); bf16 out adds its own rounding of at most 2^-9 of
 * each value (fp16: 2^-12), so its bound is 1e-3 + 2^-9.
 */
#include "gpu_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static gpu_side gpu;

enum { SAMPLE_ROWS = 24, SAMPLE_COLS = 96 };

typedef struct gemm_case {
    tn_gemm_form form;
    int64_t m, n, k;  /* as in tenure_ops.h: FPROP y [m, n], DGRAD dx [m, k], WGRAD dw [n, k] */
    tn_format weight; /* of FPROP's b; PLAIN: both operands PLAIN of dtype a */
    tn_dtype a, b, d;
    tn_scale_mode mode;
    int accumulate;
    int poison_padding; /* NaN into the padding of the operands' scales */
} gemm_case;

/* An operand as the GEMM contracts it: [rows, contracted]. */
typedef struct operand {
    tn_tensor tensor;
    tn_plane plane;
    int64_t rows, contracted;
    gpu_copy copy;
    tn_format format;
    tn_dtype dtype;
    int is_turned; /* PLAIN, stored [contracted, rows] */
} operand;

/* ---- operands ------------------------------------------------------------------------------ */

static void poison_padding(operand *of) {
    const tn_plane_layout *layout = &of->copy.layout;
    for (int64_t r = 0; r < layout->scale_rows; r++)
        for (int64_t c = layout->scale_cols; c < layout->scale_stride; c++)
            of->copy.scale[r * layout->scale_stride + c] = NAN;
    EXPECT_OK(tn_plane_write(of->tensor, of->plane, of->copy.data, layout->data_bytes,
                             of->copy.scale, layout->scale_bytes, gpu.stream));
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
}

/* rows x cols as the tensor is; the plane decides which of them is contracted. */
static operand make_operand(const gemm_case *c, tn_format format, tn_dtype dtype, tn_plane plane,
                            int64_t rows, int64_t cols, uint64_t seed) {
    operand of = {.plane = plane, .format = format, .dtype = dtype};
    int is_plain = format == TN_FORMAT_PLAIN;
    tn_dtype source_dtype = is_plain ? dtype : TN_BF16;
    void *data = malloc((size_t)(rows * cols) * 4);
    of.is_turned = plane == TN_PLANE_COL;
    of.rows = of.is_turned ? cols : rows;
    of.contracted = of.is_turned ? rows : cols;
    gpu_fill_values(GPU_FILL_NORMAL, source_dtype, seed, data, (size_t)(rows * cols));
    tn_tensor source = gpu_plain(&gpu, source_dtype, rows, cols);
    gpu_upload(&gpu, source, data);
    free(data);
    if (is_plain) {
        of.plane = TN_PLANE_DATA;
        of.tensor = source;
    } else {
        tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
        of.tensor = gpu_fp8(&gpu, format, dtype, c->mode, rows, cols);
        args.src = source;
        args.dst = of.tensor;
        args.planes = of.is_turned ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW;
        EXPECT_OK(tn_quantize(&args, gpu.stream));
        gpu_destroy(&gpu, source);
    }
    of.copy = gpu_download(&gpu, of.tensor, of.plane);
    if (c->poison_padding && !is_plain) poison_padding(&of);
    return of;
}

static double operand_value(const operand *of, int64_t r, int64_t k) {
    const tn_plane_layout *layout = &of->copy.layout;
    if (of->format == TN_FORMAT_PLAIN) {
        int64_t at = of->is_turned ? k * of->rows + r : r * of->contracted + k;
        return gpu_value(of->dtype, of->copy.data, (size_t)at);
    }
    int64_t scale_at = of->format == TN_FORMAT_FP8_BLOCK_1D
                           ? k / 128 * layout->scale_stride + r
                           : r / 128 * layout->scale_stride + k / 128;
    return gpu_fp8_value(of->dtype, of->copy.data[r * of->contracted + k]) *
           (double)of->copy.scale[scale_at];
}

static void end_operand(operand *of) {
    gpu_copy_end(&of->copy);
    gpu_destroy(&gpu, of->tensor);
}

static void make_operands(const gemm_case *c, operand *a, operand *b) {
    int is_plain = c->weight == TN_FORMAT_PLAIN;
    tn_format vector = is_plain ? TN_FORMAT_PLAIN : TN_FORMAT_FP8_BLOCK_1D;
    tn_format tile = is_plain ? TN_FORMAT_PLAIN : TN_FORMAT_FP8_BLOCK_2D;
    switch (c->form) {
    case TN_GEMM_FPROP:
        *a = make_operand(c, vector, c->a, TN_PLANE_ROW, c->m, c->k, 1);
        *b = make_operand(c, c->weight, c->b, TN_PLANE_ROW, c->n, c->k, 2);
        return;
    case TN_GEMM_DGRAD:
        *a = make_operand(c, vector, c->a, TN_PLANE_ROW, c->m, c->n, 3);
        *b = make_operand(c, tile, c->b, TN_PLANE_COL, c->n, c->k, 4);
        return;
    default:
        *a = make_operand(c, vector, c->a, TN_PLANE_COL, c->m, c->n, 5);
        *b = make_operand(c, vector, c->b, TN_PLANE_COL, c->m, c->k, 6);
    }
}

/* ---- the reference -------------------------------------------------------------------------- */

static int64_t sample_of(int i, int samples, int64_t extent) {
    if (extent <= samples) return i;
    return i == samples - 1 ? extent - 1 : (int64_t)i * extent / samples;
}

static double *dequantized_rows(const operand *of, int samples) {
    double *values = malloc((size_t)samples * (size_t)of->contracted * sizeof *values);
    for (int i = 0; i < samples; i++) {
        int64_t r = sample_of(i, samples, of->rows);
        for (int64_t k = 0; k < of->contracted; k++)
            values[i * of->contracted + k] = operand_value(of, r, k);
    }
    return values;
}

static double dot(const double *x, const double *y, int64_t count) {
    double sums[4] = {0, 0, 0, 0};
    int64_t k = 0;
    for (; k + 4 <= count; k += 4)
        for (int lane = 0; lane < 4; lane++)
            sums[lane] += x[k + lane] * y[k + lane];
    for (; k < count; k++)
        sums[0] += x[k] * y[k];
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/* ||out - ref|| / ||ref||; NaN anywhere gives NaN, which passes no bound. */
static double relative_error(const gemm_case *c, const operand *a, const operand *b,
                             const gpu_copy *d, const gpu_copy *before) {
    int rows = a->rows < SAMPLE_ROWS ? (int)a->rows : SAMPLE_ROWS;
    int cols = b->rows < SAMPLE_COLS ? (int)b->rows : SAMPLE_COLS;
    double *x = dequantized_rows(a, rows), *y = dequantized_rows(b, cols);
    double difference = 0.0, norm = 0.0;
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < cols; j++) {
            int64_t at = sample_of(i, rows, a->rows) * b->rows + sample_of(j, cols, b->rows);
            double reference = dot(x + i * a->contracted, y + j * a->contracted, a->contracted);
            if (c->accumulate) reference += gpu_value(c->d, before->data, (size_t)at);
            double off = gpu_value(c->d, d->data, (size_t)at) - reference;
            difference += off * off;
            norm += reference * reference;
        }
    }
    free(x);
    free(y);
    return sqrt(difference / norm);
}

/* ---- one case -------------------------------------------------------------------------------- */

static const char *const forms[] = {"fprop", "dgrad", "wgrad"};

static void run_gemm(const gemm_case *c, const operand *a, const operand *b, tn_tensor d) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = c->form;
    args.a = a->tensor;
    args.b = b->tensor;
    args.d = d;
    args.accumulate = c->accumulate;
    args.scope = gpu.scope;
    EXPECT_OK(tn_gemm(&args, gpu.stream));
}

static tn_tensor make_output(const gemm_case *c, const operand *a, const operand *b) {
    tn_tensor d = gpu_plain(&gpu, c->d, a->rows, b->rows);
    gpu_poison(&gpu, d, TN_PLANE_DATA);
    if (c->accumulate) {
        size_t count = (size_t)(a->rows * b->rows);
        void *data = malloc(count * 4);
        gpu_fill_values(GPU_FILL_NORMAL, c->d, 9, data, count);
        gpu_upload(&gpu, d, data);
        free(data);
    }
    return d;
}

/* 1e-3 for the sums, and the worst rounding of one element to D's type: half a unit in its last
 * place, which is what counts where D has few elements. */
static double bound_of(const gemm_case *c) {
    double bound = c->weight == TN_FORMAT_PLAIN && c->a == TN_FP32 ? 1e-5 : 1e-3;
    if (c->d == TN_BF16) bound += 0x1p-8;
    if (c->d == TN_FP16) bound += 0x1p-11;
    return bound;
}

static void check(const gemm_case *c) {
    operand a, b;
    make_operands(c, &a, &b);
    tn_tensor d = make_output(c, &a, &b);
    gpu_copy before = gpu_download(&gpu, d, TN_PLANE_DATA);
    run_gemm(c, &a, &b, d);
    gpu_copy copy = gpu_download(&gpu, d, TN_PLANE_DATA);
    double error = relative_error(c, &a, &b, &copy, &before);
    int passed = error < bound_of(c);
    char name[64];
    snprintf(name, sizeof name, "%s %s", forms[c->form],
             c->weight == TN_FORMAT_PLAIN          ? "plain"
             : c->weight == TN_FORMAT_FP8_BLOCK_2D ? "2D"
                                                   : "1D");
    gpu_count(name, passed);
    printf("%s %s m %lld n %lld k %lld %s x %s -> %s %s%s: %.3g%s\n", name,
           c->poison_padding ? "(NaN padding)" : "", (long long)c->m, (long long)c->n,
           (long long)c->k, tn_dtype_name(c->a), tn_dtype_name(c->b), tn_dtype_name(c->d),
           c->mode == TN_SCALE_POW2 ? "pow2" : "fp32", c->accumulate ? " +=" : "", error,
           passed ? "" : "  FAILED");
    gpu_copy_end(&before);
    gpu_copy_end(&copy);
    gpu_destroy(&gpu, d);
    end_operand(&a);
    end_operand(&b);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static gemm_case fp8_case(int64_t m, int64_t n, int64_t k) {
    gemm_case c = {.m = m,
                   .n = n,
                   .k = k,
                   .weight = TN_FORMAT_FP8_BLOCK_2D,
                   .a = TN_E4M3,
                   .b = TN_E4M3,
                   .d = TN_FP32};
    return c;
}

static void test_deepgemm_shapes(void **state) {
    static const int64_t ms[] = {1, 128, 4096};
    static const int64_t nks[][2] = {{2112, 7168},  {576, 7168},  {24576, 1536}, {32768, 512},
                                     {7168, 16384}, {4096, 7168}, {7168, 2048}};
    (void)state;
    for (int i = 0; i < 7; i++) {
        for (int j = 0; j < 3; j++) {
            gemm_case c = fp8_case(ms[j], nks[i][0], nks[i][1]);
            check(&c);
            c.d = TN_BF16;
            check(&c);
        }
    }
    gpu_count_report("GEMM, large shapes");
}

/* Every form, format and mix of types that there is, on one shape. */
static void check_forms(int64_t m, int64_t n, int64_t k, int poison) {
    for (int way = 0; way < 4; way++) {
        for (int mix = 0; mix < 3; mix++) {
            gemm_case c = fp8_case(m, n, k);
            c.form = way == 3 ? TN_GEMM_FPROP : (tn_gemm_form)way;
            c.weight = way >= 2 ? TN_FORMAT_FP8_BLOCK_1D : TN_FORMAT_FP8_BLOCK_2D;
            c.a = mix == 1 ? TN_E5M2 : TN_E4M3;
            c.b = mix == 2 ? TN_E5M2 : TN_E4M3;
            c.poison_padding = poison;
            check(&c);
            c.mode = TN_SCALE_FP32;
            c.d = mix == 1 ? TN_BF16 : mix == 2 ? TN_FP16 : TN_FP32;
            check(&c);
            c.accumulate = 1;
            check(&c);
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
        gemm_case c = fp8_case(5743, 1024, 4096);
        c.form = (tn_gemm_form)form;
        if (form == TN_GEMM_WGRAD) c.weight = TN_FORMAT_FP8_BLOCK_1D;
        check(&c);
        c.d = TN_BF16;
        check(&c);
    }
    gpu_count_report("GEMM, 5743 tokens");
}

static void test_plain(void **state) {
    static const int64_t shapes[][3] = {{256, 384, 512}, {100, 130, 128}, {33, 7, 65}};
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (int i = 0; i < 3; i++) {
        for (int way = 0; way < 54; way++) {
            gemm_case c = fp8_case(shapes[i][0], shapes[i][1], shapes[i][2]);
            c.weight = TN_FORMAT_PLAIN;
            c.form = (tn_gemm_form)(way % 3);
            c.a = c.b = types[way / 3 % 3];
            c.d = types[way / 9 % 3];
            c.accumulate = way / 27;
            check(&c);
        }
    }
    gpu_count_report("GEMM, plain");
}

static void test_the_same_bits_a_hundred_times(void **state) {
    operand a, b;
    gemm_case c = fp8_case(256, 384, 1152);
    (void)state;
    make_operands(&c, &a, &b);
    tn_tensor d = make_output(&c, &a, &b);
    run_gemm(&c, &a, &b, d);
    gpu_copy first = gpu_download(&gpu, d, TN_PLANE_DATA);
    for (int i = 0; i < 100; i++) {
        run_gemm(&c, &a, &b, d);
        gpu_copy again = gpu_download(&gpu, d, TN_PLANE_DATA);
        gpu_count("repeat", gpu_copies_equal(&again, &first, "repeat"));
        gpu_copy_end(&again);
    }
    gpu_copy_end(&first);
    gpu_destroy(&gpu, d);
    end_operand(&a);
    end_operand(&b);
    gpu_count_report("GEMM, repeats");
}

static void test_what_there_is_not(void **state) {
    operand a, b;
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    gemm_case c = fp8_case(128, 128, 128);
    (void)state;
    c.a = c.b = TN_E5M2;
    make_operands(&c, &a, &b);
    args.a = a.tensor;
    args.b = b.tensor;
    args.d = gpu_plain(&gpu, TN_FP32, 128, 128);
    args.scope = gpu.scope;
    EXPECT_STATUS(tn_gemm(&args, gpu.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("E4M3");
    gpu_destroy(&gpu, args.d);
    end_operand(&a);
    end_operand(&b);
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
    gpu_open(&gpu);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failures;
}
