/* The ops that make values and cast them: a GPU's results against the host driver's, byte for byte.
 *
 * Outputs are full of 0xFF (NaN) before each call, so that a byte that was not written shows.
 */
#include "gpu_support.h"

#include <stdio.h>
#include <stdlib.h>

#include "tenure_cast.h"

static gpu_side gpu, host;

typedef struct fused_case {
    int64_t rows, cols; /* of y */
    tn_dtype dtype, fp8;
    tn_format format;
    gpu_fill fill;
    tn_activation activation;
    int gated, weighted;
} fused_case;

/* Whole tiles, every kind of tail, rows that are not pieces of 16 bytes, one row and one column. */
static const int64_t shapes[][2] = {{128, 128}, {256, 512}, {129, 136}, {127, 129}, {300, 72},
                                    {1, 1000},  {1000, 1},  {64, 24},   {2049, 40}};

/* The outputs of one side, in the order of `names`. */
enum { VALUE = 0, ROW, COL, SUMS, OUTPUTS };
static const char *const names[OUTPUTS] = {"value", "row plane", "column plane", "sums"};

typedef struct outputs {
    tn_tensor value, quantized, sums;
    gpu_copy copies[OUTPUTS];
} outputs;

static tn_tensor filled(gpu_side *side, const fused_case *c, tn_dtype dtype, int64_t rows,
                        int64_t cols, uint64_t seed) {
    const size_t count = (size_t)rows * (size_t)cols;
    void *data = malloc(count * tn_dtype_bytes(dtype));
    tn_tensor tensor = gpu_plain(side, dtype, rows, cols);
    gpu_fill_values(c->fill, dtype, seed, data, count);
    gpu_upload(side, tensor, data);
    free(data);
    return tensor;
}

static outputs make_outputs(gpu_side *side, const fused_case *c, int64_t cols) {
    outputs out = {.value = gpu_plain(side, c->dtype, c->rows, cols),
                   .quantized = gpu_fp8(side, c->format, c->fp8, TN_SCALE_POW2, c->rows, cols),
                   .sums = gpu_plain(side, TN_FP32, 1, cols)};
    gpu_poison(side, out.value, TN_PLANE_DATA);
    gpu_poison(side, out.quantized, TN_PLANE_ROW);
    gpu_poison(side, out.quantized, TN_PLANE_COL);
    gpu_poison(side, out.sums, TN_PLANE_DATA);
    return out;
}

static void fetch_outputs(gpu_side *side, outputs *out) {
    out->copies[VALUE] = gpu_download(side, out->value, TN_PLANE_DATA);
    out->copies[ROW] = gpu_download(side, out->quantized, TN_PLANE_ROW);
    out->copies[COL] = gpu_download(side, out->quantized, TN_PLANE_COL);
    out->copies[SUMS] = gpu_download(side, out->sums, TN_PLANE_DATA);
    gpu_destroy(side, out->value);
    gpu_destroy(side, out->quantized);
    gpu_destroy(side, out->sums);
}

static tn_quantized_out both_planes(tn_tensor tensor) {
    tn_quantized_out out = TN_QUANTIZED_OUT_INIT;
    out.tensor = tensor;
    out.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    return out;
}

static outputs run_forward(gpu_side *side, const fused_case *c) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    outputs out = make_outputs(side, c, c->cols);
    args.activation = c->activation, args.gated = c->gated;
    args.x = filled(side, c, c->dtype, c->rows, c->gated ? 2 * c->cols : c->cols, 1);
    if (c->weighted) args.weights = filled(side, c, TN_FP32, c->rows, 1, 2);
    args.y = out.value, args.quantized = both_planes(out.quantized);
    EXPECT_OK(tn_activation_forward(&args, side->stream));
    fetch_outputs(side, &out);
    gpu_destroy(side, args.x);
    if (c->weighted) gpu_destroy(side, args.weights);
    return out;
}

static outputs run_backward(gpu_side *side, const fused_case *c) {
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    const int64_t cols = c->gated ? 2 * c->cols : c->cols;
    outputs out = make_outputs(side, c, cols);
    args.activation = c->activation, args.gated = c->gated;
    args.x = filled(side, c, c->dtype, c->rows, cols, 1);
    args.dy = filled(side, c, c->dtype, c->rows, c->cols, 3);
    if (c->weighted) args.weights = filled(side, c, TN_FP32, c->rows, 1, 2);
    args.dx = out.value, args.quantized = both_planes(out.quantized), args.dbias = out.sums;
    args.scope = side->scope;
    EXPECT_OK(tn_activation_backward(&args, side->stream));
    fetch_outputs(side, &out);
    gpu_destroy(side, args.x);
    gpu_destroy(side, args.dy);
    if (c->weighted) gpu_destroy(side, args.weights);
    return out;
}

static outputs run_bias(gpu_side *side, const fused_case *c) {
    tn_bias_gradient_args args = TN_BIAS_GRADIENT_ARGS_INIT;
    outputs out = make_outputs(side, c, c->cols);
    args.dy = filled(side, c, c->dtype, c->rows, c->cols, 3);
    args.quantized = both_planes(out.quantized), args.dbias = out.sums;
    args.scope = side->scope;
    EXPECT_OK(tn_bias_gradient(&args, side->stream));
    fetch_outputs(side, &out);
    gpu_destroy(side, args.dy);
    return out;
}

/* LAYER in the place of a gated case, with a residual in that of a weighted one. */
static outputs run_norm(gpu_side *side, const fused_case *c) {
    tn_norm_args args = TN_NORM_ARGS_INIT;
    outputs out = make_outputs(side, c, c->cols);
    args.norm = c->gated ? TN_NORM_LAYER : TN_NORM_RMS;
    args.x = filled(side, c, c->dtype, c->rows, c->cols, 1);
    args.gamma = filled(side, c, TN_BF16, 1, c->cols, 4);
    if (c->gated) args.beta = filled(side, c, TN_FP32, 1, c->cols, 5);
    if (c->weighted) args.residual = filled(side, c, c->dtype, c->rows, c->cols, 6);
    args.y = out.value, args.quantized = both_planes(out.quantized);
    args.scope = side->scope;
    EXPECT_OK(tn_norm_forward(&args, side->stream));
    fetch_outputs(side, &out);
    gpu_destroy(side, args.x);
    gpu_destroy(side, args.gamma);
    if (c->gated) gpu_destroy(side, args.beta);
    if (c->weighted) gpu_destroy(side, args.residual);
    return out;
}

/* What an op leaves alone is poison on both sides and so is equal as well. */
static void compare(const char *op, const fused_case *c,
                    outputs (*run)(gpu_side *side, const fused_case *c)) {
    outputs actual = run(&gpu, c), expected = run(&host, c);
    char what[192];
    for (int i = 0; i < OUTPUTS; i++) {
        snprintf(what, sizeof what, "%s %s %s%s %s->%s %s %lldx%lld fill %s: %s", op,
                 tn_activation_name(c->activation), c->gated ? "gated" : "plain",
                 c->weighted ? " weighted" : "", tn_dtype_name(c->dtype), tn_dtype_name(c->fp8),
                 tn_format_name(c->format), (long long)c->rows, (long long)c->cols,
                 gpu_fill_name(c->fill), names[i]);
        gpu_count(op, gpu_copies_equal(&actual.copies[i], &expected.copies[i], what));
        gpu_copy_end(&actual.copies[i]);
        gpu_copy_end(&expected.copies[i]);
    }
}

/* Every shape with each type and format; activations and fills take turns. */
static void test_results_are_the_hosts(void **state) {
    (void)state;
    unsigned turn = 0;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (int kind = 0; kind < 24; kind++, turn++) {
            const fused_case c = {.rows = shapes[s][0],
                                  .cols = shapes[s][1],
                                  .dtype = (tn_dtype)(TN_FP32 + kind % 3),
                                  .fp8 = kind / 3 % 2 ? TN_E5M2 : TN_E4M3,
                                  .format = kind / 6 % 2 ? TN_FORMAT_FP8_BLOCK_2D
                                                         : TN_FORMAT_FP8_BLOCK_1D,
                                  .fill = (gpu_fill)(turn % GPU_FILL_COUNT),
                                  .activation = (tn_activation)(turn / 2 % TN_ACTIVATION_COUNT),
                                  .gated = kind / 12,
                                  .weighted = turn / 5 % 2};
            compare("activation", &c, run_forward);
            compare("activation gradient", &c, run_backward);
            if (!c.gated) compare("bias gradient", &c, run_bias);
            compare("norm", &c, run_norm);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_results_are_the_hosts),
    };
    gpu_open(&gpu);
    gpu_open_host(&host, (size_t)1 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_count_report("fused casts, CUDA against host");
    gpu_close(&gpu);
    gpu_close(&host);
    return failures;
}
