/* Norms on the host: statistics and values against formulas in double, the order of the sums, what
 * is quantized against a tn_quantize after it, residuals, and bad input. */
#include "ops_planes_support.h"

#include "tenure_cast.h"

#include <math.h>

typedef struct shape {
    int64_t rows, cols;
} shape;
static const shape shapes[] = {{128, 128}, {130, 72}, {40, 1000}, {1, 300}, {257, 1}, {3, 517}};
enum { SHAPES = sizeof shapes / sizeof *shapes, LONG_ROW = 5003 };

/* All that a call may name; both sides of a comparison make their own outputs. */
typedef struct fixture {
    test_ops ops;
    shape s;
    tn_norm norm;
    tn__matrix x, residual, gamma, beta;
    tn_norm_args args;
} fixture;

static fixture open_fixture(tn_norm norm, tn_dtype dtype, tn_format format, shape s) {
    fixture f = {.ops = test_ops_open_host(), .s = s, .norm = norm};
    tn_norm_args args = TN_NORM_ARGS_INIT;
    f.x = test_matrix_make(dtype, s.rows, s.cols, 3);
    f.residual = test_matrix_make(dtype, s.rows, s.cols, 4);
    f.gamma = test_matrix_make(TN_BF16, 1, s.cols, 5);
    f.beta = test_matrix_make(TN_FP32, 1, s.cols, 6);
    args.norm = norm;
    args.x = test_tensor_of(&f.ops, f.ops.scope, &f.x);
    args.gamma = test_tensor_of(&f.ops, f.ops.scope, &f.gamma);
    args.y = test_plain(f.ops.scope, dtype, s.rows, s.cols);
    args.rstd = test_plain(f.ops.scope, TN_FP32, s.rows, 1);
    if (norm == TN_NORM_LAYER) {
        args.beta = test_tensor_of(&f.ops, f.ops.scope, &f.beta);
        args.mean = test_plain(f.ops.scope, TN_FP32, s.rows, 1);
    }
    args.quantized.tensor = test_fp8(f.ops.scope, format, TN_E4M3, s.rows, s.cols);
    args.quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    args.scope = f.ops.scope;
    f.args = args;
    return f;
}

static void close_fixture(fixture *f) {
    test_matrix_free(&f->x), test_matrix_free(&f->residual);
    test_matrix_free(&f->gamma), test_matrix_free(&f->beta);
    test_ops_close_host(&f->ops);
}

static void run(fixture *f) { assert_int_equal(tn_norm_forward(&f->args, f->ops.stream), TN_OK); }

/* ---- formulas in double -------------------------------------------------------------------- */

static void expect_near(double got, double want, double size) {
    if (!(fabs(got - want) <= 2e-6 * size + 1e-30)) fail_msg("%.9g, expected %.9g", got, want);
}

typedef struct row_truth {
    double mean, rstd, largest;
} row_truth;

static row_truth in_double(const fixture *f, int64_t row) {
    row_truth s = {0, 0, 0};
    double square = 0;
    if (f->norm == TN_NORM_LAYER) {
        for (int64_t k = 0; k < f->s.cols; k++)
            s.mean += test_matrix_get(&f->x, row, k) / (double)f->s.cols;
    }
    for (int64_t k = 0; k < f->s.cols; k++) {
        const double value = test_matrix_get(&f->x, row, k);
        square += (value - s.mean) * (value - s.mean) / (double)f->s.cols;
        s.largest = fmax(s.largest, fabs(value));
    }
    s.rstd = 1 / sqrt(square + (double)f->args.epsilon);
    return s;
}

static void expect_formulas(fixture *f) {
    tn__matrix y = test_fetch_matrix(&f->ops, f->args.y);
    tn__matrix rstd = test_fetch_matrix(&f->ops, f->args.rstd);
    for (int64_t m = 0; m < f->s.rows; m++) {
        const row_truth s = in_double(f, m);
        if (f->s.cols > 1) expect_near(test_matrix_get(&rstd, m, 0), s.rstd, 20 * s.rstd);
        for (int64_t k = 0; k < f->s.cols && f->s.cols > 1; k++) {
            const double gamma = test_matrix_get(&f->gamma, 0, k) + f->args.gamma_from_one;
            double want = (test_matrix_get(&f->x, m, k) - s.mean) * s.rstd * gamma, size = 0;
            if (f->norm == TN_NORM_LAYER) {
                size = fabs((double)test_matrix_get(&f->beta, 0, k));
                want += test_matrix_get(&f->beta, 0, k);
            }
            expect_near(test_matrix_get(&y, m, k), want,
                        20 * (s.largest * s.rstd * fabs(gamma) + size));
        }
    }
    test_matrix_free(&y), test_matrix_free(&rstd);
}

static void test_values_are_those_of_the_formulas(void **state) {
    (void)state;
    for (int i = 0; i < 2 * SHAPES; i++) {
        fixture f = open_fixture(i % 2 ? TN_NORM_LAYER : TN_NORM_RMS, TN_FP32,
                                 TN_FORMAT_FP8_BLOCK_1D, shapes[i / 2]);
        f.args.gamma_from_one = i / 2 % 2;
        run(&f);
        expect_formulas(&f);
        close_fixture(&f);
    }
}

/* ---- bits ---------------------------------------------------------------------------------- */

/* As the header orders it, written down once more: a block's sum, whose columns are 0 from `count`
 * on. */
static float block_in_order(const float *value, int count, int is_squared) {
    static const int aparts[] = {1, 16, 8, 4, 2};
    float sum[32];
    for (int i = 0; i < 32; i++) {
        for (int j = 0; j < 4; j++) {
            const float of = 4 * i + j < count ? value[4 * i + j] : 0.0f;
            const float before = j ? sum[i] : 0.0f;
            sum[i] = is_squared ? fmaf(of, of, before) : before + of;
        }
    }
    for (int step = 0; step < 5; step++) {
        for (int i = 0; i + aparts[step] < 32; i++)
            if (!(i & aparts[step])) sum[i] = sum[i] + sum[i + aparts[step]];
    }
    return sum[0];
}

/* The sum of a row, or with a mean of the squares of what deviates from it. */
static float row_in_order(const float *value, int64_t count, const float *mean) {
    float sum[32] = {0}, off[128];
    for (int64_t first = 0; first < count; first += 128) {
        const int width = (int)(count - first < 128 ? count - first : 128);
        float of_block = block_in_order(value + first, width, 0);
        if (mean) {
            const float own = of_block / (float)width, d = own - *mean;
            for (int i = 0; i < width; i++)
                off[i] = value[first + i] - own;
            of_block = fmaf((float)width * d, d, block_in_order(off, width, 1));
        }
        sum[first / 128 % 32] += of_block;
    }
    for (int apart = 16; apart > 0; apart /= 2) {
        for (int i = 0; i < apart; i++)
            sum[i] = sum[i] + sum[i + apart];
    }
    return sum[0];
}

static void test_sums_have_the_order_of_the_header(void **state) {
    (void)state;
    fixture f = open_fixture(TN_NORM_LAYER, TN_FP32, TN_FORMAT_FP8_BLOCK_1D, (shape){7, LONG_ROW});
    float value[LONG_ROW];
    run(&f);
    tn__matrix mean = test_fetch_matrix(&f.ops, f.args.mean);
    tn__matrix rstd = test_fetch_matrix(&f.ops, f.args.rstd);
    for (int64_t m = 0; m < f.s.rows; m++) {
        for (int64_t k = 0; k < f.s.cols; k++)
            value[k] = test_matrix_get(&f.x, m, k);
        const float center = row_in_order(value, f.s.cols, NULL) / (float)f.s.cols;
        const float square = row_in_order(value, f.s.cols, &center) / (float)f.s.cols;
        assert_true(test_matrix_get(&mean, m, 0) == center);
        assert_true(test_matrix_get(&rstd, m, 0) == 1.0f / sqrtf(square + f.args.epsilon));
    }
    test_matrix_free(&mean), test_matrix_free(&rstd);
    close_fixture(&f);
}

static void expect_same_plane(fixture *f, tn_tensor a, tn_tensor b, tn_plane plane) {
    test_plane one = test_fetch_plane(&f->ops, a, plane), two = test_fetch_plane(&f->ops, b, plane);
    assert_memory_equal(one.view.data, two.view.data, one.view.layout.data_bytes);
    assert_memory_equal(one.view.scale, two.view.scale, one.view.layout.scale_bytes);
    test_plane_free(&one), test_plane_free(&two);
}

static void expect_same_values(fixture *f, tn_tensor a, tn_tensor b) {
    tn__matrix one = test_fetch_matrix(&f->ops, a), two = test_fetch_matrix(&f->ops, b);
    test_expect_same_matrix(&one, &two);
    test_matrix_free(&one), test_matrix_free(&two);
}

static void test_planes_are_those_of_a_quantize_after_it(void **state) {
    (void)state;
    for (int i = 0; i < SHAPES * 12; i++) {
        const tn_format format = i / 6 % 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
        fixture f = open_fixture(i % 2 ? TN_NORM_LAYER : TN_NORM_RMS, (tn_dtype)(TN_FP32 + i % 3),
                                 format, shapes[i / 12]);
        tn_quantize_args after = TN_QUANTIZE_ARGS_INIT;
        run(&f);
        after.src = f.args.y, after.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        after.dst = test_fp8(f.ops.scope, format, TN_E4M3, f.s.rows, f.s.cols);
        assert_int_equal(tn_quantize(&after, f.ops.stream), TN_OK);
        expect_same_plane(&f, f.args.quantized.tensor, after.dst, TN_PLANE_ROW);
        expect_same_plane(&f, f.args.quantized.tensor, after.dst, TN_PLANE_COL);
        close_fixture(&f);
    }
}

/* ---- residuals ----------------------------------------------------------------------------- */

/* Adding and normalising is the same as an axpy and then the norm, in the same bits, whether the
 * sum goes over the residual or elsewhere, and with statistics in scratch as well. */
static void test_a_residual_is_added_as_by_an_axpy(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        const tn_dtype dtype = (tn_dtype)(TN_FP32 + i % 3);
        fixture f = open_fixture(i / 3 ? TN_NORM_LAYER : TN_NORM_RMS, dtype, TN_FORMAT_FP8_BLOCK_1D,
                                 shapes[1]);
        tn_axpy_args axpy = TN_AXPY_ARGS_INIT;
        axpy.x = f.args.x, axpy.y = test_tensor_of(&f.ops, f.ops.scope, &f.residual);
        assert_int_equal(tn_axpy(&axpy, f.ops.stream), TN_OK);
        tn_norm_args sequence = f.args;
        sequence.x = axpy.y;
        assert_int_equal(tn_norm_forward(&sequence, f.ops.stream), TN_OK);
        f.args.y = test_plain(f.ops.scope, dtype, f.s.rows, f.s.cols);
        f.args.quantized.tensor =
            test_fp8(f.ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, f.s.rows, f.s.cols);
        f.args.residual = test_tensor_of(&f.ops, f.ops.scope, &f.residual);
        f.args.mean.value = 0, f.args.rstd.value = 0;
        if (i % 2) f.args.sum = test_plain(f.ops.scope, dtype, f.s.rows, f.s.cols);
        run(&f);
        expect_same_values(&f, i % 2 ? f.args.sum : f.args.residual, axpy.y);
        expect_same_values(&f, f.args.y, sequence.y);
        expect_same_plane(&f, f.args.quantized.tensor, sequence.quantized.tensor, TN_PLANE_ROW);
        expect_same_plane(&f, f.args.quantized.tensor, sequence.quantized.tensor, TN_PLANE_COL);
        close_fixture(&f);
    }
}

/* ---- special values, nothing, the flag, bad input ------------------------------------------ */

static void test_special_values(void **state) {
    (void)state;
    fixture f = open_fixture(TN_NORM_RMS, TN_FP32, TN_FORMAT_FP8_BLOCK_1D, (shape){3, 4});
    const float in[12] = {0, -0.0f, 0, 0, 1, NAN, 2, 3, 3e38f, 3e38f, 1, 0};
    float out[12], rstd[3];
    f.args.gamma.value = 0;
    f.args.epsilon = 0.25f;
    test_write(&f.ops, f.args.x, in);
    run(&f);
    test_read(&f.ops, f.args.y, out);
    test_read(&f.ops, f.args.rstd, rstd);
    assert_true(rstd[0] == 2.0f && isnan(rstd[1]) && rstd[2] == 0.0f);
    for (int k = 0; k < 4; k++) {
        uint32_t bits;
        memcpy(&bits, &out[4 + k], sizeof bits);
        assert_true(out[k] == 0.0f && out[8 + k] == 0.0f);
        assert_int_equal(bits, 0x7FFFFFFF);
    }
    close_fixture(&f);
}

static void test_nothing_is_success(void **state) {
    (void)state;
    float statistics[2] = {5.0f, 5.0f};
    fixture f = open_fixture(TN_NORM_LAYER, TN_BF16, TN_FORMAT_FP8_BLOCK_2D, (shape){2, 0});
    f.args.epsilon = 0.25f;
    run(&f);
    test_read(&f.ops, f.args.mean, statistics);
    assert_true(statistics[0] == 0.0f && statistics[1] == 0.0f);
    test_read(&f.ops, f.args.rstd, statistics);
    assert_true(statistics[0] == 2.0f && statistics[1] == 2.0f);
    close_fixture(&f);
    f = open_fixture(TN_NORM_RMS, TN_BF16, TN_FORMAT_FP8_BLOCK_2D, (shape){0, 7});
    run(&f);
    close_fixture(&f);
}

static void test_the_skip_flag_leaves_outputs_alone(void **state) {
    (void)state;
    const float flag = 1.0f;
    fixture f = open_fixture(TN_NORM_RMS, TN_BF16, TN_FORMAT_FP8_BLOCK_1D, shapes[1]);
    run(&f);
    tn__matrix before = test_fetch_matrix(&f.ops, f.args.y);
    test_plane plane = test_fetch_plane(&f.ops, f.args.quantized.tensor, TN_PLANE_COL);
    f.args.skip = test_plain(f.ops.scope, TN_FP32, 1, 1);
    test_write(&f.ops, f.args.skip, &flag);
    f.args.gamma_from_one = 1;
    run(&f);
    tn__matrix after = test_fetch_matrix(&f.ops, f.args.y);
    test_plane same = test_fetch_plane(&f.ops, f.args.quantized.tensor, TN_PLANE_COL);
    test_expect_same_matrix(&before, &after);
    assert_memory_equal(plane.view.data, same.view.data, plane.view.layout.data_bytes);
    test_matrix_free(&before), test_matrix_free(&after);
    test_plane_free(&plane), test_plane_free(&same);
    close_fixture(&f);
}

static void expect_refused(const fixture *f, const tn_norm_args *args, tn_status want,
                           const char *words) {
    const tn_ledger before = test_ledger(f->ops.scope);
    assert_int_equal(tn_norm_forward(args, f->ops.stream), want);
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
    tn_norm_args args;
    test_declare_valid(&f.ops, tall, TN_PLANE_DATA);
    test_declare_valid(&f.ops, fp32, TN_PLANE_DATA);
    test_declare_valid(&f.ops, flag, TN_PLANE_DATA);
#define ROW(change, status, words) args = f.args, change, expect_refused(&f, &args, status, words)
    ROW(args.size = 0, TN_INVALID_ARGUMENT, "args->size");
    ROW(args.norm = TN_NORM_COUNT, TN_INVALID_ARGUMENT, "norm is 2");
    ROW(args.norm = TN_NORM_RMS, TN_INVALID_ARGUMENT, "beta or mean");
    ROW(args.epsilon = -1.0f, TN_INVALID_ARGUMENT, "epsilon is -1");
    ROW(args.epsilon = INFINITY, TN_INVALID_ARGUMENT, "epsilon is inf");
    ROW(args.sum = tall, TN_INVALID_ARGUMENT, "no residual");
    ROW(args.residual = tall, TN_INVALID_ARGUMENT, "residual (tensor");
    ROW(args.residual = fp32, TN_INVALID_ARGUMENT, "residual (tensor");
    ROW(args.residual = args.x, TN_IN_USE, "");
    ROW(args.gamma = args.rstd, TN_INVALID_ARGUMENT, "gamma (tensor");
    ROW(args.beta = fp32, TN_INVALID_ARGUMENT, "beta (tensor");
    ROW(args.mean = args.gamma, TN_INVALID_ARGUMENT, "mean (tensor");
    ROW(args.rstd = args.mean, TN_IN_USE, "");
    ROW(args.y = fp32, TN_INVALID_ARGUMENT, "y (tensor");
    ROW(args.y = args.x, TN_IN_USE, "");
    ROW(args.quantized.tensor = args.x, TN_INVALID_ARGUMENT, "quantized (tensor");
    ROW((args.y.value = 0, args.quantized.tensor.value = 0), TN_INVALID_ARGUMENT, "no output");
    ROW((args.mean.value = 0, args.scope.value = 0), TN_INVALID_ARGUMENT, "scope is {0}");
    ROW(args.skip = flag, TN_INVALID_STATE, "skip flag");
#undef ROW
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values_are_those_of_the_formulas),
        cmocka_unit_test(test_sums_have_the_order_of_the_header),
        cmocka_unit_test(test_planes_are_those_of_a_quantize_after_it),
        cmocka_unit_test(test_a_residual_is_added_as_by_an_axpy),
        cmocka_unit_test(test_special_values),
        cmocka_unit_test(test_nothing_is_success),
        cmocka_unit_test(test_the_skip_flag_leaves_outputs_alone),
        cmocka_unit_test(test_bad_input_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
