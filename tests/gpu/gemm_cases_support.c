/* Operands, references and comparisons of the GEMM tests: see gemm_cases_support.h. */
#include "gemm_cases_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

gpu_side gemm_gpu;

enum { SAMPLE_ROWS = 24, SAMPLE_COLS = 96 };

/* ---- operands ------------------------------------------------------------------------------ */

static void poison_padding(gemm_operand *of) {
    const tn_plane_layout *layout = &of->copy.layout;
    for (int64_t r = 0; r < layout->scale_rows; r++)
        for (int64_t c = layout->scale_cols; c < layout->scale_stride; c++)
            of->copy.scale[r * layout->scale_stride + c] = NAN;
    EXPECT_OK(tn_plane_write(of->tensor, of->plane, of->copy.data, layout->data_bytes,
                             of->copy.scale, layout->scale_bytes, gemm_gpu.stream));
    EXPECT_OK(tn_stream_synchronize(gemm_gpu.device, gemm_gpu.stream));
}

/* rows x cols as the tensor is; the plane decides which of them is contracted. */
static gemm_operand make_operand(const gemm_case *c, tn_format format, tn_dtype dtype,
                                 tn_plane plane, int64_t rows, int64_t cols, uint64_t seed) {
    const float magnitude = seed % 2 ? c->a_magnitude : c->b_magnitude;
    gemm_operand of = {.plane = plane, .format = format, .dtype = dtype};
    int is_plain = format == TN_FORMAT_PLAIN;
    tn_dtype source_dtype = is_plain ? dtype : TN_BF16;
    void *data = malloc((size_t)(rows * cols) * 4);
    of.is_turned = plane == TN_PLANE_COL;
    of.rows = of.is_turned ? cols : rows;
    of.contracted = of.is_turned ? rows : cols;
    gpu_fill_values(GPU_FILL_NORMAL, source_dtype, seed, data, (size_t)(rows * cols));
    for (int64_t i = 0; i < rows * cols && magnitude != 0.0f; i++)
        gpu_put(source_dtype, data, (size_t)i,
                magnitude * (float)gpu_value(source_dtype, data, (size_t)i));
    tn_tensor source = gpu_plain(&gemm_gpu, source_dtype, rows, cols);
    gpu_upload(&gemm_gpu, source, data);
    free(data);
    if (is_plain) {
        of.plane = TN_PLANE_DATA;
        of.tensor = source;
    } else {
        tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
        of.tensor = gpu_fp8(&gemm_gpu, format, dtype, c->mode, rows, cols);
        args.src = source;
        args.dst = of.tensor;
        args.planes = of.is_turned ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW;
        EXPECT_OK(tn_quantize(&args, gemm_gpu.stream));
        gpu_destroy(&gemm_gpu, source);
    }
    of.copy = gpu_download(&gemm_gpu, of.tensor, of.plane);
    if (c->poison_padding && !is_plain) poison_padding(&of);
    return of;
}

double gemm_operand_value(const gemm_operand *of, int64_t r, int64_t k) {
    const tn_plane_layout *layout = &of->copy.layout;
    if (of->format == TN_FORMAT_PLAIN) {
        int64_t at = of->is_turned ? k * of->rows + r : r * of->contracted + k;
        return gpu_value(of->dtype, of->copy.data, (size_t)at);
    }
    int64_t scale_at = of->format == TN_FORMAT_FP8_BLOCK_1D ? k / 128 * layout->scale_stride + r
                       : of->format == TN_FORMAT_FP8_TENSOR
                           ? 0
                           : r / 128 * layout->scale_stride + k / 128;
    return gpu_fp8_value(of->dtype, of->copy.data[r * of->contracted + k]) *
           (double)of->copy.scale[scale_at];
}

void gemm_operand_end(gemm_operand *of) {
    gpu_copy_end(&of->copy);
    gpu_destroy(&gemm_gpu, of->tensor);
}

static int is_of_both(const gemm_case *c) {
    return c->weight == TN_FORMAT_PLAIN || c->weight == TN_FORMAT_FP8_TENSOR;
}

gemm_operand gemm_operand_a(const gemm_case *c) {
    tn_format format = is_of_both(c) ? c->weight : TN_FORMAT_FP8_BLOCK_1D;
    if (c->a_format != TN_FORMAT_PLAIN) format = c->a_format;
    switch (c->form) {
    case TN_GEMM_FPROP: return make_operand(c, format, c->a, TN_PLANE_ROW, c->m, c->k, 1);
    case TN_GEMM_DGRAD: return make_operand(c, format, c->a, TN_PLANE_ROW, c->m, c->n, 3);
    default: return make_operand(c, format, c->a, TN_PLANE_COL, c->m, c->n, 5);
    }
}

gemm_operand gemm_operand_b(const gemm_case *c) {
    switch (c->form) {
    case TN_GEMM_FPROP: return make_operand(c, c->weight, c->b, TN_PLANE_ROW, c->n, c->k, 2);
    case TN_GEMM_DGRAD: return make_operand(c, c->weight, c->b, TN_PLANE_COL, c->n, c->k, 4);
    default: return make_operand(c, c->weight, c->b, TN_PLANE_COL, c->m, c->k, 6);
    }
}

void gemm_operands_make(const gemm_case *c, gemm_operand *a, gemm_operand *b) {
    *a = gemm_operand_a(c);
    *b = gemm_operand_b(c);
}

/* ---- the reference -------------------------------------------------------------------------- */

static int64_t sample_of(int i, int samples, int64_t extent) {
    if (extent <= samples) return i;
    return i == samples - 1 ? extent - 1 : (int64_t)i * extent / samples;
}

static double *dequantized_rows(const gemm_operand *of, int samples) {
    double *values = malloc((size_t)samples * (size_t)of->contracted * sizeof *values);
    for (int i = 0; i < samples; i++) {
        int64_t r = sample_of(i, samples, of->rows);
        for (int64_t k = 0; k < of->contracted; k++)
            values[i * of->contracted + k] = gemm_operand_value(of, r, k);
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

typedef struct gemm_errors {
    double relative; /* ||out - ref|| / ||ref|| */
    double diff;     /* 1 - 2 <out, ref> / (|out|^2 + |ref|^2) */
} gemm_errors;

/* NaN anywhere gives NaN, which passes no bound. */
static gemm_errors errors_of(const gemm_case *c, const gemm_operand *a, const gemm_operand *b,
                             const gpu_copy *d, const gpu_copy *before, const gpu_copy *bias) {
    int rows = a->rows < SAMPLE_ROWS ? (int)a->rows : SAMPLE_ROWS;
    int cols = b->rows < SAMPLE_COLS ? (int)b->rows : SAMPLE_COLS;
    double *x = dequantized_rows(a, rows), *y = dequantized_rows(b, cols);
    double difference = 0.0, norm = 0.0, both = 0.0, norms = 0.0;
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < cols; j++) {
            int64_t col = sample_of(j, cols, b->rows);
            int64_t at = sample_of(i, rows, a->rows) * b->rows + col;
            double reference = dot(x + i * a->contracted, y + j * a->contracted, a->contracted);
            double out = gpu_value(c->d, d->data, (size_t)at);
            if (c->has_bias) reference += gpu_value(c->bias, bias->data, (size_t)col);
            if (c->accumulate) reference += gpu_value(c->d, before->data, (size_t)at);
            difference += (out - reference) * (out - reference);
            norm += reference * reference;
            both += out * reference;
            norms += out * out + reference * reference;
        }
    }
    free(x);
    free(y);
    gemm_errors errors = {sqrt(difference / norm), 1.0 - 2.0 * both / norms};
    return errors;
}

/* ---- by the tensor cores, block by block ---------------------------------------------------- */

float *gemm_partial_sums(const gemm_operand *a, const gemm_operand *b, int64_t block) {
    int64_t from = block * 128;
    int64_t depth = a->contracted - from < 128 ? a->contracted - from : 128;
    const gemm_operand *of[] = {a, b};
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    tn_tensor made[2];
    for (int i = 0; i < 2; i++) {
        unsigned char *codes = malloc((size_t)(of[i]->rows * depth));
        const float one[4] = {1.0f, 0.0f, 0.0f, 0.0f};
        for (int64_t r = 0; r < of[i]->rows; r++)
            memcpy(codes + r * depth, of[i]->copy.data + r * of[i]->contracted + from,
                   (size_t)depth);
        made[i] = gpu_fp8(&gemm_gpu, TN_FORMAT_FP8_TENSOR, of[i]->dtype, TN_SCALE_POW2, of[i]->rows,
                          depth);
        EXPECT_OK(tn_plane_write(made[i], TN_PLANE_ROW, codes, (size_t)(of[i]->rows * depth), one,
                                 sizeof one, gemm_gpu.stream));
        EXPECT_OK(tn_stream_synchronize(gemm_gpu.device, gemm_gpu.stream));
        free(codes);
    }
    args.a = made[0], args.b = made[1], args.scope = gemm_gpu.scope;
    args.d = gpu_plain(&gemm_gpu, TN_FP32, a->rows, b->rows);
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    gpu_copy copy = gpu_download(&gemm_gpu, args.d, TN_PLANE_DATA);
    float *sums = malloc(copy.layout.data_bytes);
    memcpy(sums, copy.data, copy.layout.data_bytes);
    gpu_copy_end(&copy);
    gpu_destroy(&gemm_gpu, args.d);
    gpu_destroy(&gemm_gpu, made[0]), gpu_destroy(&gemm_gpu, made[1]);
    return sums;
}

float gemm_scale_of(const gemm_operand *of, int64_t row, int64_t block) {
    int64_t stride = of->copy.layout.scale_stride;
    return of->format == TN_FORMAT_FP8_BLOCK_1D ? of->copy.scale[block * stride + row]
                                                : of->copy.scale[row / 128 * stride + block];
}

/* ---- one case -------------------------------------------------------------------------------- */

static const char *const forms[] = {"fprop", "dgrad", "wgrad"};

tn_gemm_args gemm_args_of(const gemm_case *c, const gemm_operand *a, const gemm_operand *b,
                          tn_tensor d) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = c->form;
    args.a = a->tensor;
    args.b = b->tensor;
    args.d = d;
    args.accumulate = c->accumulate;
    args.scope = gemm_gpu.scope;
    args.algorithm = c->algorithm;
    args.engine = c->engine;
    return args;
}

tn_tensor gemm_output_make(const gemm_case *c, const gemm_operand *a, const gemm_operand *b) {
    tn_tensor d = gpu_plain(&gemm_gpu, c->d, a->rows, b->rows);
    gpu_poison(&gemm_gpu, d, TN_PLANE_DATA);
    if (c->accumulate) {
        size_t count = (size_t)(a->rows * b->rows);
        void *data = malloc(count * 4);
        gpu_fill_values(GPU_FILL_NORMAL, c->d, 9, data, count);
        gpu_upload(&gemm_gpu, d, data);
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

static const char *scaling_of(const gemm_case *c) {
    switch (c->weight) {
    case TN_FORMAT_PLAIN: return "plain";
    case TN_FORMAT_FP8_BLOCK_2D: return "1D x 2D";
    case TN_FORMAT_FP8_TENSOR: return "one scale";
    default: return c->a_format == TN_FORMAT_FP8_BLOCK_2D ? "2D x 1D" : "1D x 1D";
    }
}

static void tell(const gemm_case *c, const char *name, gemm_errors errors, int passed) {
    if (c->is_quiet && passed) return;
    printf("%s %s m %lld n %lld k %lld %s x %s -> %s %s%s%s", name,
           c->poison_padding ? "(NaN padding)" : "", (long long)c->m, (long long)c->n,
           (long long)c->k, tn_dtype_name(c->a), tn_dtype_name(c->b), tn_dtype_name(c->d),
           c->mode == TN_SCALE_POW2 ? "pow2" : "fp32", c->accumulate ? " +=" : "",
           c->has_bias ? " bias" : "");
    if (c->algorithm) printf(" algorithm %d", c->algorithm);
    printf(": %.3g, calc_diff %.2g%s\n", errors.relative, errors.diff, passed ? "" : "  FAILED");
}

tn_tensor gemm_bias_make(const gemm_case *c, const gemm_operand *b) {
    tn_tensor bias = {0};
    if (!c->has_bias) return bias;
    void *data = malloc((size_t)b->rows * sizeof(float));
    gpu_fill_values(GPU_FILL_NORMAL, c->bias, 11, data, (size_t)b->rows);
    bias = gpu_plain(&gemm_gpu, c->bias, 1, b->rows);
    gpu_upload(&gemm_gpu, bias, data);
    free(data);
    return bias;
}

void gemm_check_operands(const gemm_case *c, const gemm_operand *a, const gemm_operand *b) {
    tn_tensor d = gemm_output_make(c, a, b);
    gpu_copy before = gpu_download(&gemm_gpu, d, TN_PLANE_DATA), bias = {.data = NULL};
    tn_gemm_args args = gemm_args_of(c, a, b, d);
    args.bias = gemm_bias_make(c, b);
    if (c->has_bias) bias = gpu_download(&gemm_gpu, args.bias, TN_PLANE_DATA);
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    gpu_copy copy = gpu_download(&gemm_gpu, d, TN_PLANE_DATA);
    gemm_errors errors = errors_of(c, a, b, &copy, &before, &bias);
    int passed = errors.relative < bound_of(c) && errors.diff < 1e-3;
    char name[64];
    snprintf(name, sizeof name, "%s %s", forms[c->form], scaling_of(c));
    gpu_count(name, passed);
    tell(c, name, errors, passed);
    gpu_copy_end(&before);
    gpu_copy_end(&copy);
    gpu_copy_end(&bias);
    if (c->has_bias) gpu_destroy(&gemm_gpu, args.bias);
    gpu_destroy(&gemm_gpu, d);
}

void gemm_check(const gemm_case *c) {
    gemm_operand a, b;
    gemm_operands_make(c, &a, &b);
    gemm_check_operands(c, &a, &b);
    gemm_operand_end(&a);
    gemm_operand_end(&b);
}

gemm_case gemm_fp8_case(int64_t m, int64_t n, int64_t k) {
    gemm_case c = {.m = m,
                   .n = n,
                   .k = k,
                   .weight = TN_FORMAT_FP8_BLOCK_2D,
                   .a = TN_E4M3,
                   .b = TN_E4M3,
                   .d = TN_FP32};
    return c;
}
