/* The gradient of the norms on the host: against finite differences of tn_norm_forward, against
 * formulas in double, the order of the sums, what is quantized, accumulation, and bad input. */
#include "ops_planes_support.h"

#include "tenure_train.h"

#include <math.h>

typedef struct shape {
    int64_t rows, cols;
} shape;
static const shape shapes[] = {{128, 128}, {130, 72}, {40, 1000}, {1, 300}, {257, 3}, {3, 517}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* A forward whose statistics are there, and a backward call that wants everything. */
typedef struct fixture {
    test_ops ops;
    shape s;
    tn__matrix x, dy, added, gamma, beta;
    tn_norm_args forward;
    tn_norm_backward_args args;
} fixture;

static fixture open_fixture(tn_norm norm, tn_dtype dtype, tn_format format, shape s) {
    fixture f = {.ops = test_ops_open_host(), .s = s};
    tn_norm_args forward = TN_NORM_ARGS_INIT;
    tn_norm_backward_args args = TN_NORM_BACKWARD_ARGS_INIT;
    const int is_layer = norm == TN_NORM_LAYER;
    const tn_scope scope = f.ops.scope;
    f.x = test_matrix_make(dtype, s.rows, s.cols, 3);
    f.dy = test_matrix_make(dtype, s.rows, s.cols, 4);
    f.added = test_matrix_make(dtype, s.rows, s.cols, 5);
    f.gamma = test_matrix_make(TN_BF16, 1, s.cols, 6);
    f.beta = test_matrix_make(TN_FP32, 1, s.cols, 7);
    forward.norm = args.norm = norm;
    forward.x = args.x = test_tensor_of(&f.ops, scope, &f.x);
    forward.gamma = args.gamma = test_tensor_of(&f.ops, scope, &f.gamma);
    forward.y = test_plain(scope, dtype, s.rows, s.cols);
    forward.rstd = args.rstd = test_plain(scope, TN_FP32, s.rows, 1);
    if (is_layer) {
        forward.beta = test_tensor_of(&f.ops, scope, &f.beta);
        forward.mean = args.mean = test_plain(scope, TN_FP32, s.rows, 1);
        args.dbeta = test_plain(scope, TN_FP32, 1, s.cols);
    }
    args.dy = test_tensor_of(&f.ops, scope, &f.dy);
    args.dx = test_plain(scope, dtype, s.rows, s.cols);
    args.dgamma = test_plain(scope, TN_FP32, 1, s.cols);
    args.quantized.tensor = test_fp8(scope, format, TN_E4M3, s.rows, s.cols);
    args.quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    forward.scope = args.scope = scope;
    EXPECT_OK(tn_norm_forward(&forward, f.ops.stream));
    f.forward = forward, f.args = args;
    return f;
}

static void close_fixture(fixture *f) {
    test_matrix_free(&f->x), test_matrix_free(&f->dy), test_matrix_free(&f->added);
    test_matrix_free(&f->gamma), test_matrix_free(&f->beta);
    test_ops_close_host(&f->ops);
}

static void run(const fixture *f) { EXPECT_OK(tn_norm_backward(&f->args, f->ops.stream)); }

/* ---- finite differences -------------------------------------------------------------------- */

/* The sum of dy * y for this x and gamma, as tn_norm_forward makes y. */
static double loss_of(const fixture *f, const tn__matrix *x, const tn__matrix *gamma) {
    tn_norm_args forward = f->forward;
    double loss = 0;
    forward.x = test_tensor_of(&f->ops, f->ops.scope, x);
    forward.gamma = test_tensor_of(&f->ops, f->ops.scope, gamma);
    forward.y = test_plain(f->ops.scope, TN_FP32, f->s.rows, f->s.cols);
    forward.rstd.value = 0, forward.mean.value = 0;
    EXPECT_OK(tn_norm_forward(&forward, f->ops.stream));
    tn__matrix y = test_fetch_matrix(&f->ops, forward.y);
    for (int64_t m = 0; m < f->s.rows; m++)
        for (int64_t k = 0; k < f->s.cols; k++)
            loss += (double)test_matrix_get(&f->dy, m, k) * test_matrix_get(&y, m, k);
    test_matrix_free(&y);
    EXPECT_OK(tn_tensor_destroy(forward.x, f->ops.stream));
    EXPECT_OK(tn_tensor_destroy(forward.gamma, f->ops.stream));
    EXPECT_OK(tn_tensor_destroy(forward.y, f->ops.stream));
    return loss;
}

/* Both ways along a direction that moves every element: what the loss changes by is what the
 * gradient says. */
static void expect_slope(fixture *f, tn__matrix *of, tn_tensor gradient, uint32_t seed,
                         double step) {
    const int is_x = of == &f->x;
    tn__matrix slope = test_fetch_matrix(&f->ops, gradient), direction, moved;
    double want = 0, size = 0, loss[2];
    direction = test_matrix_make(TN_BF16, of->rows, of->cols, seed);
    for (int side = 0; side < 2; side++) {
        moved = test_matrix_make(TN_FP32, of->rows, of->cols, seed);
        for (int64_t m = 0; m < of->rows; m++)
            for (int64_t k = 0; k < of->cols; k++) {
                const float d = copysignf(1.0f, test_matrix_get(&direction, m, k));
                test_matrix_set(&moved, m, k,
                                test_matrix_get(of, m, k) + (side ? 1 : -1) * (float)step * d);
                if (side == 0) {
                    want += (double)test_matrix_get(&slope, m, k) * d;
                    size += fabs((double)test_matrix_get(&slope, m, k));
                }
            }
        loss[side] = is_x ? loss_of(f, &moved, &f->gamma) : loss_of(f, &f->x, &moved);
        test_matrix_free(&moved);
    }
    const double got = (loss[1] - loss[0]) / (2 * step);
    if (!(fabs(got - want) <= 1e-4 * size))
        fail_msg("slope %g, expected %g of %g", got, want, size);
    test_matrix_free(&slope), test_matrix_free(&direction);
}

/* x whose elements are near to each other in size: differences are then of use in fp32. */
static void make_even(fixture *f) {
    for (int64_t m = 0; m < f->s.rows; m++)
        for (int64_t k = 0; k < f->s.cols; k++) {
            const float value = (float)((m * 7 + k * 13) % 29) / 8.0f - 1.7f;
            test_matrix_set(&f->x, m, k, value);
            test_matrix_set(&f->dy, m, k, (float)((m * 5 + k * 11) % 17) / 8.0f - 1.0f);
        }
    for (int64_t k = 0; k < f->s.cols; k++)
        test_matrix_set(&f->gamma, 0, k, 0.5f + (float)(k % 5) / 4.0f);
    test_write(&f->ops, f->args.x, f->x.data);
    test_write(&f->ops, f->args.dy, f->dy.data);
    test_write(&f->ops, f->args.gamma, f->gamma.data);
    EXPECT_OK(tn_norm_forward(&f->forward, f->ops.stream));
}

static void test_gradients_are_those_of_finite_differences(void **state) {
    (void)state;
    for (int i = 0; i < 2 * SHAPES; i++) {
        fixture f = open_fixture(i % 2 ? TN_NORM_LAYER : TN_NORM_RMS, TN_FP32,
                                 TN_FORMAT_FP8_BLOCK_1D, shapes[i / 2]);
        if (f.s.cols > 3) {
            make_even(&f);
            f.args.gamma_from_one = f.forward.gamma_from_one = i / 2 % 2;
            run(&f);
            for (uint32_t seed = 1; seed <= 3; seed++) {
                expect_slope(&f, &f.x, f.args.dx, seed, 0x1p-6);
                expect_slope(&f, &f.gamma, f.args.dgamma, seed, 0x1p-4);
            }
        }
        close_fixture(&f);
    }
}

/* ---- formulas, and the order of sums, in fp32 ----------------------------------------------- */

/* Of a block of 128 columns, of which `left` and maybe more are in the row. */
static float block_sum_in_order(const float *value, const float *times, int64_t left) {
    float sum[32];
    for (int64_t k = 0; k < 128; k++) {
        const float of = k < left ? value[k] : 0.0f, by = times && k < left ? times[k] : 0.0f;
        float *to = &sum[k / 4];
        if (k % 4 == 0)
            *to = times ? of * by : of;
        else
            *to = times ? fmaf(of, by, *to) : *to + of;
    }
    for (int i = 0; i < 32; i += 2)
        sum[i] = sum[i] + sum[i + 1];
    for (int apart = 16; apart > 1; apart /= 2)
        for (int i = 0; i < apart; i += 2)
            sum[i] = sum[i] + sum[i + apart];
    return sum[0];
}

static float row_sum_in_order(const float *value, const float *times, int64_t count) {
    float sum[32] = {0};
    for (int64_t k = 0; k < count; k += 128)
        sum[k / 128 % 32] += block_sum_in_order(value + k, times ? times + k : NULL, count - k);
    for (int apart = 16; apart > 0; apart /= 2)
        for (int i = 0; i < apart; i++)
            sum[i] = sum[i] + sum[i + apart];
    return sum[0];
}

/* As tn_bias_gradient orders it, of value * times (or value). */
static float column_sum_in_order(const float *value, const float *times, int64_t count) {
    float sum[8] = {0};
    for (int64_t tile = 0; tile * 128 < count; tile++) {
        float group[16] = {0}, of_tile = 0.0f;
        for (int64_t m = tile * 128; m < count && m < tile * 128 + 128; m++) {
            float *to = &group[m % 128 / 8];
            *to = times ? fmaf(value[m], times[m], *to) : *to + value[m];
        }
        for (int g = 0; g < 16; g += 2)
            of_tile += group[g] + group[g + 1];
        sum[tile % 8] += of_tile;
    }
    for (int apart = 4; apart > 0; apart /= 2)
        for (int i = 0; i < apart; i++)
            sum[i] = sum[i] + sum[i + apart];
    return sum[0];
}

typedef struct statistics {
    tn__matrix mean, rstd;
} statistics;

static float normal_at(const fixture *f, const statistics *s, int64_t m, int64_t k) {
    const float mean = f->args.mean.value ? test_matrix_get(&s->mean, m, 0) : 0.0f;
    return (test_matrix_get(&f->x, m, k) - mean) * test_matrix_get(&s->rstd, m, 0);
}

/* What a row of dx is, written down once more. */
static void row_in_order(const fixture *f, const statistics *s, int64_t m, float *out) {
    float g[1024], normal[1024];
    const int64_t cols = f->s.cols;
    for (int64_t k = 0; k < cols; k++) {
        g[k] = test_matrix_get(&f->dy, m, k) * test_matrix_get(&f->gamma, 0, k);
        normal[k] = normal_at(f, s, m, k);
    }
    const float shift = f->args.mean.value ? row_sum_in_order(g, NULL, cols) / (float)cols : 0.0f;
    const float tilt = row_sum_in_order(g, normal, cols) / (float)cols;
    for (int64_t k = 0; k < cols; k++) {
        out[k] = fmaf(-normal[k], tilt, g[k] - shift) * test_matrix_get(&s->rstd, m, 0);
        out[k] = out[k] + test_matrix_get(&f->added, m, k);
    }
}

static void expect_columns_in_order(const fixture *f, const statistics *s) {
    const int is_layer = f->args.mean.value != 0;
    tn__matrix dgamma = test_fetch_matrix(&f->ops, f->args.dgamma), dbeta = dgamma;
    float dy[300], normal[300];
    if (is_layer) dbeta = test_fetch_matrix(&f->ops, f->args.dbeta);
    for (int64_t k = 0; k < f->s.cols; k++) {
        for (int64_t m = 0; m < f->s.rows; m++) {
            dy[m] = test_matrix_get(&f->dy, m, k);
            normal[m] = normal_at(f, s, m, k);
        }
        assert_true(test_matrix_get(&dgamma, 0, k) == column_sum_in_order(dy, normal, f->s.rows));
        if (is_layer)
            assert_true(test_matrix_get(&dbeta, 0, k) == column_sum_in_order(dy, NULL, f->s.rows));
    }
    if (is_layer) test_matrix_free(&dbeta);
    test_matrix_free(&dgamma);
}

static void test_bits_are_those_of_the_header(void **state) {
    (void)state;
    for (int i = 0; i < 2 * SHAPES; i++) {
        fixture f = open_fixture(i % 2 ? TN_NORM_LAYER : TN_NORM_RMS, TN_FP32,
                                 TN_FORMAT_FP8_BLOCK_1D, shapes[i / 2]);
        float row[1024];
        statistics s = {.rstd = test_fetch_matrix(&f.ops, f.args.rstd)};
        if (i % 2) s.mean = test_fetch_matrix(&f.ops, f.args.mean);
        f.args.added = test_tensor_of(&f.ops, f.ops.scope, &f.added);
        run(&f);
        tn__matrix dx = test_fetch_matrix(&f.ops, f.args.dx);
        for (int64_t m = 0; m < f.s.rows; m++) {
            row_in_order(&f, &s, m, row);
            for (int64_t k = 0; k < f.s.cols; k++)
                assert_true(test_matrix_get(&dx, m, k) == row[k]);
        }
        expect_columns_in_order(&f, &s);
        if (i % 2) test_matrix_free(&s.mean);
        test_matrix_free(&s.rstd), test_matrix_free(&dx);
        close_fixture(&f);
    }
}

/* ---- what is quantized, and added up -------------------------------------------------------- */

static void expect_same_plane(const fixture *f, tn_tensor a, tn_tensor b, tn_plane plane) {
    test_plane one = test_fetch_plane(&f->ops, a, plane), two = test_fetch_plane(&f->ops, b, plane);
    assert_memory_equal(one.view.data, two.view.data, one.view.layout.data_bytes);
    assert_memory_equal(one.view.scale, two.view.scale, one.view.layout.scale_bytes);
    test_plane_free(&one), test_plane_free(&two);
}

static void test_planes_are_those_of_a_quantize_after_it(void **state) {
    (void)state;
    for (int i = 0; i < SHAPES * 6; i++) {
        const tn_format format = i % 4 / 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
        fixture f = open_fixture(i % 2 ? TN_NORM_LAYER : TN_NORM_RMS, (tn_dtype)(TN_FP32 + i % 3),
                                 format, shapes[i / 6]);
        tn_quantize_args after = TN_QUANTIZE_ARGS_INIT;
        run(&f);
        after.src = f.args.dx, after.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        after.dst = test_fp8(f.ops.scope, format, TN_E4M3, f.s.rows, f.s.cols);
        EXPECT_OK(tn_quantize(&after, f.ops.stream));
        expect_same_plane(&f, f.args.quantized.tensor, after.dst, TN_PLANE_ROW);
        expect_same_plane(&f, f.args.quantized.tensor, after.dst, TN_PLANE_COL);
        close_fixture(&f);
    }
}

static void test_sums_are_accumulated_in_fp32(void **state) {
    (void)state;
    fixture f = open_fixture(TN_NORM_LAYER, TN_BF16, TN_FORMAT_FP8_BLOCK_1D, shapes[1]);
    run(&f);
    tn__matrix dgamma = test_fetch_matrix(&f.ops, f.args.dgamma);
    tn__matrix dbeta = test_fetch_matrix(&f.ops, f.args.dbeta);
    f.args.accumulate = 1;
    run(&f);
    tn__matrix twice = test_fetch_matrix(&f.ops, f.args.dgamma);
    tn__matrix beta_twice = test_fetch_matrix(&f.ops, f.args.dbeta);
    for (int64_t k = 0; k < f.s.cols; k++) {
        assert_true(test_matrix_get(&twice, 0, k) == 2 * test_matrix_get(&dgamma, 0, k));
        assert_true(test_matrix_get(&beta_twice, 0, k) == 2 * test_matrix_get(&dbeta, 0, k));
    }
    test_matrix_free(&dgamma), test_matrix_free(&dbeta);
    test_matrix_free(&twice), test_matrix_free(&beta_twice);
    close_fixture(&f);
}

/* ---- nothing, the flag, bad input ----------------------------------------------------------- */

static void test_nothing_is_success(void **state) {
    float sums[7] = {1, 1, 1, 1, 1, 1, 1};
    (void)state;
    fixture f = open_fixture(TN_NORM_RMS, TN_BF16, TN_FORMAT_FP8_BLOCK_2D, (shape){0, 7});
    run(&f);
    test_read(&f.ops, f.args.dgamma, sums);
    for (int k = 0; k < 7; k++)
        assert_true(sums[k] == 0.0f);
    close_fixture(&f);
    f = open_fixture(TN_NORM_LAYER, TN_BF16, TN_FORMAT_FP8_BLOCK_1D, (shape){5, 0});
    run(&f);
    close_fixture(&f);
}

static void test_the_skip_flag_leaves_outputs_alone(void **state) {
    (void)state;
    const float flag = 1.0f;
    fixture f = open_fixture(TN_NORM_RMS, TN_BF16, TN_FORMAT_FP8_BLOCK_1D, shapes[1]);
    run(&f);
    tn__matrix before = test_fetch_matrix(&f.ops, f.args.dx);
    tn__matrix sums = test_fetch_matrix(&f.ops, f.args.dgamma);
    f.args.skip = test_plain(f.ops.scope, TN_FP32, 1, 1);
    test_write(&f.ops, f.args.skip, &flag);
    f.args.gamma_from_one = 1, f.args.accumulate = 1;
    run(&f);
    tn__matrix after = test_fetch_matrix(&f.ops, f.args.dx);
    tn__matrix sums_after = test_fetch_matrix(&f.ops, f.args.dgamma);
    test_expect_same_matrix(&before, &after);
    test_expect_same_matrix(&sums, &sums_after);
    test_matrix_free(&before), test_matrix_free(&after);
    test_matrix_free(&sums), test_matrix_free(&sums_after);
    close_fixture(&f);
}

static void expect_refused(const fixture *f, const tn_norm_backward_args *args, tn_status want,
                           const char *words) {
    const tn_ledger before = test_ledger(f->ops.scope);
    assert_int_equal(tn_norm_backward(args, f->ops.stream), want);
    if (!strstr(tn_error_last(), words))
        fail_msg("\"%s\" does not say \"%s\"", tn_error_last(), words);
    const tn_ledger after = test_ledger(f->ops.scope);
    test_expect_same_ledger(&before, &after);
}

static void test_bad_input_is_refused(void **state) {
    (void)state;
    fixture f = open_fixture(TN_NORM_LAYER, TN_BF16, TN_FORMAT_FP8_BLOCK_1D, (shape){20, 36});
    const tn_tensor tall = test_plain(f.ops.scope, TN_BF16, 21, 36);
    const tn_tensor fp32 = test_plain(f.ops.scope, TN_FP32, 20, 36);
    const tn_tensor flag = test_plain(f.ops.scope, TN_FP32, 1, 1);
    const tn_tensor none = {0};
    tn_norm_backward_args args;
    test_declare_valid(&f.ops, tall, TN_PLANE_DATA);
    test_declare_valid(&f.ops, fp32, TN_PLANE_DATA);
    test_declare_valid(&f.ops, flag, TN_PLANE_DATA);
#define ROW(change, status, words) args = f.args, change, expect_refused(&f, &args, status, words)
    ROW(args.size = 0, TN_INVALID_ARGUMENT, "args->size");
    ROW(args.norm = TN_NORM_COUNT, TN_INVALID_ARGUMENT, "norm is 2");
    ROW(args.norm = TN_NORM_RMS, TN_INVALID_ARGUMENT, "mean or dbeta");
    ROW(args.mean = none, TN_INVALID_ARGUMENT, "mean is {0}");
    ROW(args.x = none, TN_STALE_HANDLE, "");
    ROW(args.rstd = none, TN_STALE_HANDLE, "");
    ROW(args.dy = tall, TN_INVALID_ARGUMENT, "dy (tensor");
    ROW(args.dy = fp32, TN_INVALID_ARGUMENT, "dy (tensor");
    ROW(args.added = fp32, TN_INVALID_ARGUMENT, "added (tensor");
    ROW(args.rstd = args.gamma, TN_INVALID_ARGUMENT, "rstd (tensor");
    ROW(args.gamma = args.rstd, TN_INVALID_ARGUMENT, "gamma (tensor");
    ROW(args.dgamma = args.rstd, TN_INVALID_ARGUMENT, "dgamma (tensor");
    ROW(args.dbeta = fp32, TN_INVALID_ARGUMENT, "dbeta (tensor");
    ROW(args.dbeta = args.dgamma, TN_IN_USE, "");
    ROW(args.dx = args.x, TN_IN_USE, "");
    ROW(args.dx = fp32, TN_INVALID_ARGUMENT, "dx (tensor");
    ROW(args.quantized.tensor = args.dx, TN_INVALID_ARGUMENT, "quantized (tensor");
    ROW((args.dx = none, args.dgamma = none, args.dbeta = none, args.quantized.tensor = none),
        TN_INVALID_ARGUMENT, "no output");
    ROW(args.accumulate = 1, TN_INVALID_STATE, "");
    ROW(args.scope.value = 0, TN_INVALID_ARGUMENT, "scope is {0}");
    ROW(args.skip = flag, TN_INVALID_STATE, "skip flag");
#undef ROW
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients_are_those_of_finite_differences),
        cmocka_unit_test(test_bits_are_those_of_the_header),
        cmocka_unit_test(test_planes_are_those_of_a_quantize_after_it),
        cmocka_unit_test(test_sums_are_accumulated_in_fp32),
        cmocka_unit_test(test_nothing_is_success),
        cmocka_unit_test(test_the_skip_flag_leaves_outputs_alone),
        cmocka_unit_test(test_bad_input_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
