/* DeepGEMM's lists of grouped products on a GPU: M-grouped, masked, K-grouped, with groups of its
 * sizes, of odd sizes and without rows. Each group is compared with the product in fp32 of what its
 * quantized operands stand for, made on the GPU from the same rows quantized alone; the measure is
 * DeepGEMM's, 1 - 2 <x, y> / (|x|^2 + |y|^2), of each group, and must be below 1e-3.
 *
 * GEMM_LISTS_SEED=N gives other sizes and numbers; GEMM_LISTS_DIVISOR=N takes all sizes N times
 * smaller, for devices that are slow.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_support.h"
#include "tenure_grouped.h"
#include "tenure_lifetime.h"

enum { GROUPS_MAX = 32, NOISE = 1 << 21 };

static const double difference_max = 1e-3;
static gpu_side gpu;
static uint16_t noise[NOISE]; /* bf16, normal */
static uint64_t random_state;
static int64_t divisor = 1;

typedef struct list_case {
    const char *list;
    tn_gemm_form form;
    int64_t groups, n, k;
    int64_t offsets[GROUPS_MAX + 1];
    tn_scale_mode mode;
    tn_dtype d;
    int accumulate;
} list_case;

static int is_wgrad(const list_case *c) { return c->form == TN_GEMM_WGRAD; }
static int64_t rows_of(const list_case *c, int64_t e) { return c->offsets[e + 1] - c->offsets[e]; }
static int64_t a_cols(const list_case *c) { return c->form == TN_GEMM_FPROP ? c->k : c->n; }
static int64_t d_cols(const list_case *c) { return c->form == TN_GEMM_FPROP ? c->n : c->k; }

/* ---- operands -------------------------------------------------------------------------------- */

/* Rows of noise, each from a place of its own; in fp32 if it is to be added to. */
static tn_tensor noisy(tn_dtype dtype, int64_t rows, int64_t cols) {
    const size_t each = tn_dtype_bytes(dtype);
    unsigned char *data = malloc((size_t)(rows * cols) * each + 1);
    tn_tensor made = gpu_plain(&gpu, dtype, rows, cols);
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t *from = noise + gpu_random(&random_state) % (uint64_t)(NOISE - cols);
        unsigned char *to = data + (size_t)(r * cols) * each;
        if (dtype == TN_BF16) {
            memcpy(to, from, (size_t)cols * each);
        } else {
            for (int64_t i = 0; i < cols; i++)
                ((uint32_t *)(void *)to)[i] = (uint32_t)from[i] << 16;
        }
    }
    gpu_upload(&gpu, made, data);
    free(data);
    return made;
}

static tn_tensor bytes_of(const void *bytes, int64_t count) {
    tn_tensor made = gpu_plain(&gpu, TN_BYTE, 1, count);
    gpu_upload(&gpu, made, bytes);
    return made;
}

static tn_grouped_plane grouped_plane(const list_case *c, tn_tensor source, int64_t cols) {
    const uint32_t no_error = 0;
    const int64_t rows = c->offsets[c->groups];
    const tn_plane plane = is_wgrad(c) ? TN_PLANE_COL : TN_PLANE_ROW;
    tn_grouped_quantize_args args = TN_GROUPED_QUANTIZE_ARGS_INIT;
    tn_grouped_plane made;
    int64_t floats = 0;
    EXPECT_OK(
        tn_grouped_scale_floats(TN_FORMAT_FP8_BLOCK_1D, plane, c->groups, rows, cols, &floats));
    made.data = gpu_plain(&gpu, TN_BYTE, rows, cols);
    made.scale = gpu_plain(&gpu, TN_FP32, 1, floats);
    args.src = source, args.scale_mode = c->mode;
    args.offsets = bytes_of(c->offsets, (c->groups + 1) * (int64_t)sizeof *c->offsets);
    args.error = bytes_of(&no_error, (int64_t)sizeof no_error);
    args.scope = gpu.scope;
    *(is_wgrad(c) ? &args.col : &args.row) = made;
    EXPECT_OK(tn_grouped_quantize(&args, gpu.stream));
    gpu_copy error = gpu_download(&gpu, args.error, TN_PLANE_DATA);
    assert_memory_equal(error.data, &no_error, sizeof no_error);
    gpu_copy_end(&error);
    gpu_destroy(&gpu, args.offsets), gpu_destroy(&gpu, args.error);
    return made;
}

static tn_tensor quantized(tn_tensor source, tn_format format, tn_scale_mode mode, unsigned planes,
                           int64_t rows, int64_t cols) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = source, args.planes = planes;
    args.dst = gpu_fp8(&gpu, format, TN_E4M3, mode, rows, cols);
    EXPECT_OK(tn_quantize(&args, gpu.stream));
    return args.dst;
}

static tn_tensor weight_of(const list_case *c) {
    tn_tensor source = noisy(TN_BF16, c->n, c->k);
    tn_tensor weight =
        quantized(source, TN_FORMAT_FP8_BLOCK_2D, c->mode,
                  c->form == TN_GEMM_FPROP ? TN_QUANTIZE_ROW : TN_QUANTIZE_COL, c->n, c->k);
    gpu_destroy(&gpu, source);
    return weight;
}

static tn_tensor view_of(tn_tensor base, const list_case *c, int64_t e) {
    tn_tensor view;
    EXPECT_OK(tn_tensor_view_rows(base, c->offsets[e], rows_of(c, e), gpu.scope, &view));
    return view;
}

/* The group's rows, quantized alone. */
static tn_tensor alone(tn_tensor source, const list_case *c, int64_t e, int64_t cols) {
    tn_tensor rows = view_of(source, c, e);
    tn_tensor made =
        quantized(rows, TN_FORMAT_FP8_BLOCK_1D, c->mode,
                  is_wgrad(c) ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW, rows_of(c, e), cols);
    gpu_destroy(&gpu, rows);
    return made;
}

/* ---- the measure ----------------------------------------------------------------------------- */

/* Many partial sums, so that they are not the time that all this takes. */
static double difference(const gpu_copy *x, tn_dtype x_dtype, const float *y, size_t count) {
    enum { SUMS = 8 };
    double xy[SUMS] = {0}, squares[SUMS] = {0};
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        float value;
        if (x_dtype == TN_BF16) {
            bits = (uint32_t)((const uint16_t *)(const void *)x->data)[i] << 16;
            memcpy(&value, &bits, sizeof value);
        } else {
            value = ((const float *)(const void *)x->data)[i];
        }
        xy[i % SUMS] += (double)value * (double)y[i];
        squares[i % SUMS] += (double)value * (double)value + (double)y[i] * (double)y[i];
    }
    for (int i = 1; i < SUMS; i++)
        xy[0] += xy[i], squares[0] += squares[i];
    return squares[0] == 0.0 ? 0.0 : 1.0 - 2.0 * xy[0] / squares[0];
}

/* ---- a case ---------------------------------------------------------------------------------- */

typedef struct operands {
    tn_tensor a_source, b_source; /* b: of WGRAD */
    tn_tensor weights[GROUPS_MAX], d[GROUPS_MAX], before[GROUPS_MAX];
    tn_grouped_plane a, b;
    int count; /* of d */
} operands;

static operands make_operands(const list_case *c) {
    const int64_t rows = c->offsets[c->groups];
    operands o = {.count = is_wgrad(c) ? (int)c->groups : 1};
    o.a_source = noisy(TN_BF16, rows, a_cols(c));
    o.a = grouped_plane(c, o.a_source, a_cols(c));
    if (is_wgrad(c)) {
        o.b_source = noisy(TN_BF16, rows, c->k);
        o.b = grouped_plane(c, o.b_source, c->k);
    }
    for (int64_t e = 0; e < c->groups && !is_wgrad(c); e++)
        o.weights[e] = weight_of(c);
    for (int i = 0; i < o.count; i++) {
        const int64_t d_rows = is_wgrad(c) ? c->n : rows;
        o.d[i] = c->accumulate ? noisy(c->d, d_rows, d_cols(c))
                               : gpu_plain(&gpu, c->d, d_rows, d_cols(c));
        if (c->accumulate) EXPECT_OK(tn_tensor_clone(o.d[i], gpu.scope, gpu.stream, &o.before[i]));
    }
    return o;
}

static void end_operands(const list_case *c, operands *o) {
    gpu_destroy(&gpu, o->a_source), gpu_destroy(&gpu, o->b_source);
    gpu_destroy(&gpu, o->a.data), gpu_destroy(&gpu, o->a.scale);
    gpu_destroy(&gpu, o->b.data), gpu_destroy(&gpu, o->b.scale);
    for (int64_t e = 0; e < c->groups; e++)
        gpu_destroy(&gpu, o->weights[e]);
    for (int i = 0; i < o->count; i++)
        gpu_destroy(&gpu, o->d[i]), gpu_destroy(&gpu, o->before[i]);
}

static void multiply(const list_case *c, const operands *o) {
    tn_grouped_gemm_args args = TN_GROUPED_GEMM_ARGS_INIT;
    args.form = c->form, args.groups = c->groups, args.offsets = c->offsets;
    args.n = c->n, args.k = c->k, args.a = o->a, args.b = o->b;
    args.weights = o->weights, args.d = o->d, args.accumulate = c->accumulate;
    args.scope = gpu.scope;
    EXPECT_OK(tn_grouped_gemm(&args, gpu.stream));
}

/* In fp32, of the group's operands alone. */
static tn_tensor reference(const list_case *c, const operands *o, int64_t e) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = c->form, args.engine = TN_GEMM_ENGINE_DEQUANTIZE_FP32, args.scope = gpu.scope;
    args.a = alone(o->a_source, c, e, a_cols(c));
    args.b = is_wgrad(c) ? alone(o->b_source, c, e, c->k) : o->weights[e];
    args.accumulate = c->accumulate;
    args.d = c->accumulate
                 ? o->before[e]
                 : gpu_plain(&gpu, TN_FP32, is_wgrad(c) ? c->n : rows_of(c, e), d_cols(c));
    EXPECT_OK(tn_gemm(&args, gpu.stream));
    gpu_destroy(&gpu, args.a);
    if (is_wgrad(c)) gpu_destroy(&gpu, args.b);
    return args.d;
}

static double check_group(const list_case *c, const operands *o, int64_t e) {
    tn_tensor expected = reference(c, o, e);
    tn_tensor actual = is_wgrad(c) ? o->d[e] : view_of(o->d[0], c, e);
    gpu_copy x = gpu_download(&gpu, actual, TN_PLANE_DATA);
    gpu_copy y = gpu_download(&gpu, expected, TN_PLANE_DATA);
    double off = difference(&x, c->d, (const float *)(const void *)y.data,
                            y.layout.data_bytes / sizeof(float));
    gpu_copy_end(&x), gpu_copy_end(&y);
    if (!is_wgrad(c)) gpu_destroy(&gpu, actual);
    if (!c->accumulate) gpu_destroy(&gpu, expected);
    return off;
}

static void check(const list_case *c) {
    double worst = 0.0;
    operands o = make_operands(c);
    multiply(c, &o);
    for (int64_t e = 0; e < c->groups; e++) {
        double off = check_group(c, &o, e);
        int passed = off < difference_max && off > -difference_max; /* NaN is neither */
        if (!passed || off > worst) worst = off;
        gpu_count(rows_of(c, e) ? c->list : "groups without rows", passed);
        if (!passed)
            printf("  group %lld of %lld rows: %.3g\n", (long long)e, (long long)rows_of(c, e),
                   off);
    }
    printf("%s, %lld groups, %lld rows, form %d, n %lld k %lld, %s scales: %.2e\n", c->list,
           (long long)c->groups, (long long)c->offsets[c->groups], (int)c->form, (long long)c->n,
           (long long)c->k, c->mode == TN_SCALE_POW2 ? "pow2" : "fp32", worst);
    end_operands(c, &o);
}

/* ---- the lists ------------------------------------------------------------------------------- */

static int64_t divided(int64_t extent) { return extent > divisor ? extent / divisor : 1; }

/* From 0.7 to 1.3 times what is expected. */
static int64_t jittered(int64_t expected) {
    double factor = 0.7 + 0.6 * (double)(gpu_random(&random_state) % 4096) / 4096.0;
    return (int64_t)((double)expected * factor);
}

static void set_sizes(list_case *c, const int64_t shape[2], int64_t expected, int is_jittered) {
    c->n = divided(shape[0]), c->k = divided(shape[1]);
    for (int64_t e = 0; e < c->groups; e++) {
        int64_t rows = is_jittered ? jittered(divided(expected)) : divided(expected);
        if (is_jittered && e == 1) rows = 0;
        c->offsets[e + 1] = c->offsets[e] + rows;
    }
}

static const int64_t shapes[][2] = {{6144, 7168}, {7168, 3072}, {4096, 4096}, {4096, 2048}};

static void m_grouped(void **state) {
    static const int64_t lists[][2] = {{4, 8192}, {8, 4096}};
    (void)state;
    for (int i = 0; i < 2 * 4 * 3; i++) { /* even sizes; odd ones; odd ones of DGRAD */
        list_case c = {.list = "M-grouped", .d = TN_BF16, .groups = lists[i / 4 % 2][0]};
        c.form = i / 8 == 2 ? TN_GEMM_DGRAD : TN_GEMM_FPROP;
        c.mode = i % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
        set_sizes(&c, shapes[i % 4], lists[i / 4 % 2][1], i / 8 > 0);
        check(&c);
    }
    gpu_count_report("grouped GEMM, M-grouped");
}

static void masked(void **state) {
    static const int64_t lists[][2] = {{32, 192}, {6, 1024}, {32, 20}, {6, 20}};
    (void)state;
    for (int i = 0; i < 4 * 4; i++) {
        list_case c = {.list = "masked", .d = TN_BF16, .groups = lists[i / 4][0]};
        c.mode = i % 2 ? TN_SCALE_POW2 : TN_SCALE_FP32;
        set_sizes(&c, shapes[i % 4], lists[i / 4][1], 1);
        check(&c);
    }
    gpu_count_report("grouped GEMM, masked");
}

/* One group is empty, one has exactly 128 rows; every other case adds to what is there. */
static void k_grouped(void **state) {
    static const int64_t lists[][2] = {{4, 8192}, {8, 4096}, {16, 2048}};
    static const int64_t k_shapes[][2] = {{4096, 7168}, {7168, 2048}};
    (void)state;
    for (int i = 0; i < 3 * 2; i++) {
        list_case c = {.list = "K-grouped", .form = TN_GEMM_WGRAD, .d = TN_FP32};
        c.groups = lists[i / 2][0], c.accumulate = i % 2;
        c.mode = i / 2 % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
        set_sizes(&c, k_shapes[i % 2], lists[i / 2][1], 1);
        const int64_t more = 128 - rows_of(&c, 2);
        for (int64_t e = 3; e <= c.groups; e++)
            c.offsets[e] += more;
        check(&c);
    }
    gpu_count_report("grouped GEMM, K-grouped");
}

static uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masked),
        cmocka_unit_test(k_grouped),
        cmocka_unit_test(m_grouped),
    };
    gpu_open(&gpu);
    random_state = setting("GEMM_LISTS_SEED", 20261130);
    divisor = (int64_t)setting("GEMM_LISTS_DIVISOR", 1);
    printf("seed %llu (GEMM_LISTS_SEED replays it)\n", (unsigned long long)random_state);
    gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, random_state, noise, NOISE);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failures;
}
