/* Operands, references and comparisons of the GEMM tests: see gemm_cases_support.h. */
#include "gemm_cases_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

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
    gemm_operand of = {.plane = plane, .format = format, .dtype = dtype};
    int is_plain = format == TN_FORMAT_PLAIN;
    tn_dtype source_dtype = is_plain ? dtype : TN_BF16;
    void *data = malloc((size_t)(rows * cols) * 4);
    of.is_turned = plane == TN_PLANE_COL;
    of.rows = of.is_turned ? cols : rows;
    of.contracted = of.is_turned ? rows : cols;
    gpu_fill_values(GPU_FILL_NORMAL, source_dtype, seed, data, (size_t)(rows * cols));
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

void gemm_operands_make(const gemm_case *c, gemm_operand *a, gemm_operand *b) {
    int is_both = c->weight == TN_FORMAT_PLAIN || c->weight == TN_FORMAT_FP8_TENSOR;
    tn_format vector = is_both ? c->weight : TN_FORMAT_FP8_BLOCK_1D;
    tn_format tile = is_both ? c->weight : TN_FORMAT_FP8_BLOCK_2D;
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

/* ||out - ref|| / ||ref||; NaN anywhere gives NaN, which passes no bound. */
static double relative_error(const gemm_case *c, const gemm_operand *a, const gemm_operand *b,
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
    case TN_FORMAT_FP8_BLOCK_2D: return "2D";
    case TN_FORMAT_FP8_TENSOR: return "one scale";
    default: return "1D";
    }
}

static void tell(const gemm_case *c, const char *name, double error, int passed) {
    if (c->is_quiet && passed) return;
    printf("%s %s m %lld n %lld k %lld %s x %s -> %s %s%s", name,
           c->poison_padding ? "(NaN padding)" : "", (long long)c->m, (long long)c->n,
           (long long)c->k, tn_dtype_name(c->a), tn_dtype_name(c->b), tn_dtype_name(c->d),
           c->mode == TN_SCALE_POW2 ? "pow2" : "fp32", c->accumulate ? " +=" : "");
    if (c->algorithm) printf(" algorithm %d", c->algorithm);
    printf(": %.3g%s\n", error, passed ? "" : "  FAILED");
}

void gemm_check_operands(const gemm_case *c, const gemm_operand *a, const gemm_operand *b) {
    tn_tensor d = gemm_output_make(c, a, b);
    gpu_copy before = gpu_download(&gemm_gpu, d, TN_PLANE_DATA);
    tn_gemm_args args = gemm_args_of(c, a, b, d);
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    gpu_copy copy = gpu_download(&gemm_gpu, d, TN_PLANE_DATA);
    double error = relative_error(c, a, b, &copy, &before);
    int passed = error < bound_of(c);
    char name[64];
    snprintf(name, sizeof name, "%s %s", forms[c->form], scaling_of(c));
    gpu_count(name, passed);
    tell(c, name, error, passed);
    gpu_copy_end(&before);
    gpu_copy_end(&copy);
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
