/* tn_grouped_gemm on planes of tn_grouped_quantize and on PLAIN rows: the host against tn_gemm of
 * each group alone, and the emulated device against the host, to the bit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulated_driver.h"
#include "emulator.h"
#include "gpu_support.h"
#include "scripted_cublaslt.h"
#include "tenure_grouped.h"
#include "tenure_lifetime.h"
#include "test_ops.h"

enum { GROUPS = 6 };

static gpu_side device, host;

typedef struct grouped_case {
    tn_gemm_form form;
    int64_t offsets[GROUPS + 1];
    int64_t n, k;
    tn_dtype d;
    int accumulate;
    int is_plain; /* of bf16 */
    int has_bias; /* in fp32, of FPROP */
} grouped_case;

static int is_wgrad(const grouped_case *c) { return c->form == TN_GEMM_WGRAD; }

/* Row r of the source has the same values wherever it is a row of. */
static tn_tensor rows_of_source(gpu_side *side, int64_t first, int64_t rows, int64_t cols,
                                uint64_t seed) {
    uint16_t *data = malloc((size_t)(rows * cols) * 2 + 1);
    for (int64_t r = 0; r < rows; r++)
        gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, seed * 1000 + (uint64_t)(first + r),
                        data + r * cols, (size_t)cols);
    tn_tensor made = gpu_plain(side, TN_BF16, rows, cols);
    gpu_upload(side, made, data);
    free(data);
    return made;
}

static tn_tensor bytes_of(gpu_side *side, const void *bytes, int64_t count) {
    tn_tensor made = gpu_plain(side, TN_BYTE, 1, count);
    gpu_upload(side, made, bytes);
    return made;
}

static tn_grouped_plane grouped_plane(gpu_side *side, const grouped_case *c, int is_col,
                                      int64_t cols, uint64_t seed) {
    const uint32_t no_error = 0;
    int64_t rows = c->offsets[GROUPS], floats = 0;
    tn_plane plane = is_col ? TN_PLANE_COL : TN_PLANE_ROW;
    tn_grouped_quantize_args args = TN_GROUPED_QUANTIZE_ARGS_INIT;
    EXPECT_OK(tn_grouped_scale_floats(TN_FORMAT_FP8_BLOCK_1D, plane, GROUPS, rows, cols, &floats));
    tn_grouped_plane made = {gpu_plain(side, TN_BYTE, 1, rows * cols),
                             gpu_plain(side, TN_FP32, 1, floats)};
    args.src = rows_of_source(side, 0, rows, cols, seed);
    args.offsets = bytes_of(side, c->offsets, (int64_t)sizeof c->offsets);
    args.error = bytes_of(side, &no_error, (int64_t)sizeof no_error);
    args.scope = side->scope;
    *(is_col ? &args.col : &args.row) = made;
    EXPECT_OK(tn_grouped_quantize(&args, side->stream));
    gpu_destroy(side, args.src), gpu_destroy(side, args.offsets), gpu_destroy(side, args.error);
    return made;
}

static tn_grouped_plane operand_of(gpu_side *side, const grouped_case *c, int is_col, int64_t cols,
                                   uint64_t seed) {
    if (!c->is_plain) return grouped_plane(side, c, is_col, cols, seed);
    tn_grouped_plane made = {rows_of_source(side, 0, c->offsets[GROUPS], cols, seed), {0}};
    return made;
}

static void end_plane(gpu_side *side, const tn_grouped_plane *plane) {
    gpu_destroy(side, plane->data), gpu_destroy(side, plane->scale);
}

static tn_tensor quantized(gpu_side *side, tn_tensor source, tn_format format, int is_col,
                           int64_t rows, int64_t cols) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = source;
    args.dst = gpu_fp8(side, format, TN_E4M3, TN_SCALE_POW2, rows, cols);
    args.planes = is_col ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW;
    EXPECT_OK(tn_quantize(&args, side->stream));
    gpu_destroy(side, source);
    return args.dst;
}

static tn_tensor bias_of(gpu_side *side, const grouped_case *c, int64_t e) {
    float *data = malloc((size_t)c->n * sizeof *data);
    gpu_fill_values(GPU_FILL_NORMAL, TN_FP32, 9000 + (uint64_t)e, data, (size_t)c->n);
    tn_tensor made = gpu_plain(side, TN_FP32, 1, c->n);
    gpu_upload(side, made, data);
    free(data);
    return made;
}

static tn_tensor weight_of(gpu_side *side, const grouped_case *c, int64_t e) {
    if (c->is_plain) return rows_of_source(side, e * 1000, c->n, c->k, 7);
    return quantized(side, rows_of_source(side, e * 1000, c->n, c->k, 7), TN_FORMAT_FP8_BLOCK_2D, 0,
                     c->n, c->k);
}

static tn_tensor output_of(gpu_side *side, const grouped_case *c, int64_t first, int64_t rows,
                           int64_t cols) {
    size_t each = tn_dtype_bytes(c->d);
    unsigned char *data = malloc((size_t)(rows * cols) * each + 1);
    for (int64_t r = 0; r < rows; r++)
        gpu_fill_values(GPU_FILL_NORMAL, c->d, 5000 + (uint64_t)(first + r),
                        data + (size_t)(r * cols) * each, (size_t)cols);
    tn_tensor made = gpu_plain(side, c->d, rows, cols);
    gpu_upload(side, made, data);
    free(data);
    return made;
}

static int64_t d_cols(const grouped_case *c) { return c->form == TN_GEMM_FPROP ? c->n : c->k; }

static int64_t a_cols(const grouped_case *c) { return c->form == TN_GEMM_FPROP ? c->k : c->n; }

/* All of d: of FPROP and DGRAD one after the other, of WGRAD one for each group. */
typedef struct results {
    gpu_copy copies[GROUPS];
    int count;
} results;

static void end_results(results *of) {
    for (int i = 0; i < of->count; i++)
        gpu_copy_end(&of->copies[i]);
}

static results grouped(gpu_side *side, const grouped_case *c) {
    tn_tensor weights[GROUPS], d[GROUPS], biases[GROUPS];
    tn_grouped_gemm_args args = TN_GROUPED_GEMM_ARGS_INIT;
    results of = {.count = is_wgrad(c) ? GROUPS : 1};
    args.form = c->form, args.groups = GROUPS, args.offsets = c->offsets;
    args.n = c->n, args.k = c->k, args.accumulate = c->accumulate;
    args.scope = side->scope, args.weights = weights, args.d = d;
    args.a = operand_of(side, c, is_wgrad(c), a_cols(c), 1);
    if (is_wgrad(c)) args.b = operand_of(side, c, 1, c->k, 2);
    for (int64_t e = 0; e < GROUPS && !is_wgrad(c); e++)
        weights[e] = weight_of(side, c, e);
    for (int64_t e = 0; e < GROUPS && c->has_bias; e++)
        biases[e] = e == 2 ? (tn_tensor){0} : bias_of(side, c, e);
    if (c->has_bias) args.biases = biases;
    for (int i = 0; i < of.count; i++)
        d[i] = is_wgrad(c) ? output_of(side, c, (int64_t)i * 1000, c->n, c->k)
                           : output_of(side, c, 0, c->offsets[GROUPS], d_cols(c));
    EXPECT_OK(tn_grouped_gemm(&args, side->stream));
    for (int i = 0; i < of.count; i++) {
        of.copies[i] = gpu_download(side, d[i], TN_PLANE_DATA);
        gpu_destroy(side, d[i]);
    }
    for (int64_t e = 0; e < GROUPS && !is_wgrad(c); e++)
        gpu_destroy(side, weights[e]);
    for (int64_t e = 0; e < GROUPS && c->has_bias; e++)
        gpu_destroy(side, biases[e]);
    end_plane(side, &args.a);
    if (is_wgrad(c)) end_plane(side, &args.b);
    return of;
}

/* Rows of the group alone, as tn_gemm takes them. */
static tn_tensor alone(gpu_side *side, const grouped_case *c, int64_t first, int64_t rows,
                       int64_t cols, uint64_t seed) {
    tn_tensor source = rows_of_source(side, first, rows, cols, seed);
    if (c->is_plain) return source;
    return quantized(side, source, TN_FORMAT_FP8_BLOCK_1D, is_wgrad(c), rows, cols);
}

/* What tn_gemm makes of group e, compared with its part of the results. */
static void check_group(gpu_side *side, const grouped_case *c, int64_t e, const results *of) {
    int64_t first = c->offsets[e], rows = c->offsets[e + 1] - first;
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = c->form, args.accumulate = c->accumulate, args.scope = side->scope;
    args.a = alone(side, c, first, rows, a_cols(c), 1);
    args.b = is_wgrad(c) ? alone(side, c, first, rows, c->k, 2) : weight_of(side, c, e);
    if (c->has_bias && e != 2) args.bias = bias_of(side, c, e);
    args.d = is_wgrad(c) ? output_of(side, c, e * 1000, c->n, c->k)
                         : output_of(side, c, first, rows, d_cols(c));
    EXPECT_OK(tn_gemm(&args, side->stream));
    gpu_copy alone = gpu_download(side, args.d, TN_PLANE_DATA), part = alone;
    size_t at = (size_t)(first * d_cols(c)) * tn_dtype_bytes(c->d);
    part.data = is_wgrad(c) ? of->copies[e].data : of->copies[0].data + at;
    gpu_count("each group alone", gpu_copies_equal(&part, &alone, "a group"));
    gpu_copy_end(&alone);
    gpu_destroy(side, args.a), gpu_destroy(side, args.b), gpu_destroy(side, args.d);
    gpu_destroy(side, args.bias);
}

static void check(const grouped_case *c) {
    char what[96];
    results on_host = grouped(&host, c), on_device = grouped(&device, c);
    snprintf(what, sizeof what, "form %d n %lld k %lld", c->form, (long long)c->n, (long long)c->k);
    for (int i = 0; i < on_host.count; i++)
        gpu_count("the device", gpu_copies_equal(&on_device.copies[i], &on_host.copies[i], what));
    for (int64_t e = 0; e < GROUPS; e++)
        check_group(&host, c, e, &on_host);
    end_results(&on_host), end_results(&on_device);
}

/* Without rows, with one, with odd ones, with a whole tile. */
static void groups_equal_products_of_their_own(void **state) {
    static const int64_t counts[][GROUPS] = {{5, 0, 128, 1, 37, 16}, {0, 3, 0, 130, 8, 0}};
    static const int64_t sizes[][2] = {{48, 32}, {20, 130}, {7, 5}, {16, 144}};
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (int i = 0; i < 2 * 4 * 3 * 2 * 2; i++) {
        grouped_case c = {.form = (tn_gemm_form)(i % 3),
                          .n = sizes[i / 3 % 4][0],
                          .k = sizes[i / 3 % 4][1],
                          .d = types[(i + i / 3) % 3],
                          .accumulate = i / 24 % 2,
                          .is_plain = i / 48};
        c.has_bias = c.form == TN_GEMM_FPROP && i / 3 % 2 == 1;
        for (int e = 0; e < GROUPS; e++)
            c.offsets[e + 1] = c.offsets[e] + counts[i / 12 % 2][e];
        check(&c);
    }
    gpu_count_report("grouped products");
}

static void the_variable_pins_the_products_of_groups(void **state) {
    (void)state;
    for (int form = TN_GEMM_FPROP; form <= TN_GEMM_WGRAD; form++) {
        const grouped_case c = {
            (tn_gemm_form)form, {0, 5, 5, 133, 134, 171, 187}, 20, 36, TN_FP32, 0, 0, 0};
        const int products = scripted.products;
        test_pin_engine("wgmma");
        results ours = grouped(&device, &c);
        test_pin_engine(NULL);
        assert_int_equal(scripted.products, products);
        results expected = grouped(&host, &c);
        for (int i = 0; i < expected.count; i++)
            assert_true(gpu_copies_equal(&ours.copies[i], &expected.copies[i], "our own"));
        end_results(&ours), end_results(&expected);
    }
}

/* The gradient of a later group is a view from the second element of another tensor on. */
static void an_unaligned_view_is_refused_before_anything_is_written(void **state) {
    const grouped_case c = {TN_GEMM_WGRAD, {0, 5, 5, 133, 134, 171, 187}, 20, 36, TN_FP32, 1, 1, 0};
    const int64_t shape[] = {c.n, c.k};
    tn_grouped_gemm_args args = TN_GROUPED_GEMM_ARGS_INIT;
    tn_tensor d[GROUPS], elements;
    gpu_copy before[GROUPS];
    (void)state;
    args.form = c.form, args.groups = GROUPS, args.offsets = c.offsets;
    args.n = c.n, args.k = c.k, args.accumulate = c.accumulate;
    args.scope = device.scope, args.d = d;
    args.a = operand_of(&device, &c, 1, c.n, 1), args.b = operand_of(&device, &c, 1, c.k, 2);
    for (int i = 0; i < GROUPS; i++)
        d[i] = output_of(&device, &c, (int64_t)i * 1000, c.n, c.k);
    tn_tensor base = output_of(&device, &c, 9000, c.n * c.k + 1, 1);
    gpu_destroy(&device, d[4]);
    EXPECT_OK(tn_tensor_view_rows(base, 1, c.n * c.k, device.scope, &elements));
    EXPECT_OK(tn_tensor_view_shape(elements, 2, shape, device.scope, &d[4]));
    for (int i = 0; i < GROUPS; i++)
        before[i] = gpu_download(&device, d[i], TN_PLANE_DATA);
    EXPECT_STATUS(tn_grouped_gemm(&args, device.stream), TN_INVALID_ARGUMENT);
    for (int i = 0; i < GROUPS; i++) {
        gpu_copy after = gpu_download(&device, d[i], TN_PLANE_DATA); /* which is valid */
        assert_true(gpu_copies_equal(&after, &before[i], "a gradient"));
        gpu_copy_end(&after), gpu_copy_end(&before[i]);
        gpu_destroy(&device, d[i]);
    }
    gpu_destroy(&device, elements), gpu_destroy(&device, base);
    end_plane(&device, &args.a), end_plane(&device, &args.b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_equal_products_of_their_own),
        cmocka_unit_test(the_variable_pins_the_products_of_groups),
        cmocka_unit_test(an_unaligned_view_is_refused_before_anything_is_written),
    };
    char fault[EMULATED_FAULT_BYTES];
    scripted_cublaslt_begin();
    emulated_has_products = 1;
    gpu_open(&device);
    gpu_open_host(&host, (size_t)1 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&device);
    gpu_close(&host);
    emulated_take_fault(fault);
    if (fault[0]) printf("%s\n", fault);
    return failures + (fault[0] != 0);
}
