/* AdamW on the host: against the published formulas in double over many steps, what it leaves of
 * the quantized weight, the step that the device counts, the flag, and bad input. */
#include "ops_planes_support.h"

#include "tenure_train.h"

#include <math.h>

enum { ROWS = 130, COLS = 72, COUNT = ROWS * COLS };

typedef struct fixture {
    test_ops ops;
    tn__matrix master, gradient;
    tn_adamw_advance_args advance;
    tn_adamw_args args;
} fixture;

static tn_tensor zeros(const test_ops *ops, int64_t rows, int64_t cols) {
    static const float zero[COUNT];
    tn_tensor tensor = test_plain(ops->scope, TN_FP32, rows, cols);
    test_write(ops, tensor, zero);
    return tensor;
}

static fixture open_fixture(tn_dtype gradient) {
    fixture f = {.ops = test_ops_open_host()};
    tn_adamw_advance_args advance = TN_ADAMW_ADVANCE_ARGS_INIT;
    tn_adamw_args args = TN_ADAMW_ARGS_INIT;
    f.master = test_matrix_make(TN_FP32, ROWS, COLS, 8);
    f.gradient = test_matrix_make(gradient, ROWS, COLS, 9);
    args.master = test_tensor_of(&f.ops, f.ops.scope, &f.master);
    args.gradient = test_tensor_of(&f.ops, f.ops.scope, &f.gradient);
    args.first = zeros(&f.ops, ROWS, COLS), args.second = zeros(&f.ops, ROWS, COLS);
    args.step = advance.step = zeros(&f.ops, 1, 3);
    args.weight = test_weight(f.ops.scope, ROWS, COLS, 0, TN_POLICY_KEEP);
    args.plain = test_plain(f.ops.scope, TN_BF16, ROWS, COLS);
    args.learning_rate = 0x1p-6f, args.weight_decay = 0.125f;
    f.advance = advance, f.args = args;
    return f;
}

static void close_fixture(fixture *f) {
    test_matrix_free(&f->master), test_matrix_free(&f->gradient);
    test_ops_close_host(&f->ops);
}

static void step(const fixture *f) {
    EXPECT_OK(tn_adamw_advance(&f->advance, f->ops.stream));
    EXPECT_OK(tn_adamw(&f->args, f->ops.stream));
}

/* ---- the formulas --------------------------------------------------------------------------- */

/* Loshchilov and Hutter's algorithm 2, with a schedule of 1, of one element. */
typedef struct reference {
    double weight, first, second;
} reference;

static void reference_step(const fixture *f, reference *r, double g, int t) {
    const double beta1 = f->args.beta1, beta2 = f->args.beta2, rate = f->args.learning_rate;
    r->first = beta1 * r->first + (1 - beta1) * g;
    r->second = beta2 * r->second + (1 - beta2) * g * g;
    const double first = r->first / (1 - pow(beta1, t)), second = r->second / (1 - pow(beta2, t));
    r->weight -=
        rate * (first / (sqrt(second) + f->args.epsilon) + f->args.weight_decay * r->weight);
}

static void test_steps_follow_the_published_algorithm(void **state) {
    static reference expected[COUNT];
    enum { STEPS = 40 };
    (void)state;
    fixture f = open_fixture(TN_FP32);
    for (int i = 0; i < COUNT; i++)
        expected[i] = (reference){test_matrix_get(&f.master, i / COLS, i % COLS), 0, 0};
    for (int t = 1; t <= STEPS; t++) {
        for (int i = 0; i < COUNT; i++) {
            const float g = (float)((i * 31 + t * 17) % 61) / 32.0f - 0.9f;
            test_matrix_set(&f.gradient, i / COLS, i % COLS, g);
            reference_step(&f, &expected[i], g, t);
        }
        test_write(&f.ops, f.args.gradient, f.gradient.data);
        step(&f);
    }
    tn__matrix master = test_fetch_matrix(&f.ops, f.args.master);
    tn__matrix second = test_fetch_matrix(&f.ops, f.args.second);
    for (int i = 0; i < COUNT; i++) {
        const double got = test_matrix_get(&master, i / COLS, i % COLS), want = expected[i].weight;
        const double variance = test_matrix_get(&second, i / COLS, i % COLS);
        if (!(fabs(got - want) <= 4e-6 * (fabs(want) + 1.0))) fail_msg("%g, not %g", got, want);
        assert_true(fabs(variance - expected[i].second) <= 1e-5 * expected[i].second);
    }
    test_matrix_free(&master), test_matrix_free(&second);
    close_fixture(&f);
}

static void test_the_device_counts_the_steps(void **state) {
    static const int counts[] = {1, 2, 10, 1000};
    float got[3];
    int t = 0;
    (void)state;
    fixture f = open_fixture(TN_FP32);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        while (t < counts[i]) {
            EXPECT_OK(tn_adamw_advance(&f.advance, f.ops.stream));
            t++;
        }
        test_read(&f.ops, f.args.step, got);
        const double first = 1 / (1 - pow(f.advance.beta1, t));
        const double second = 1 / sqrt(1 - pow(f.advance.beta2, t));
        assert_true(got[0] == (float)t);
        assert_true(fabs(got[1] - first) <= 1e-7 * first);
        assert_true(fabs(got[2] - second) <= 1e-7 * second);
    }
    got[0] = 0x1p24f;
    test_write(&f.ops, f.args.step, got);
    EXPECT_OK(tn_adamw_advance(&f.advance, f.ops.stream));
    test_read(&f.ops, f.args.step, got);
    assert_true(got[0] == 0x1p24f && got[1] == 1.0f && got[2] == 1.0f);
    close_fixture(&f);
}

static void test_factors_on_the_device_are_used(void **state) {
    const float half = 0.5f, twice = 2.0f;
    (void)state;
    fixture f = open_fixture(TN_BF16), scaled = open_fixture(TN_BF16);
    for (int i = 0; i < COUNT; i++)
        test_matrix_set(&scaled.gradient, i / COLS, i % COLS,
                        2 * test_matrix_get(&f.gradient, i / COLS, i % COLS));
    test_write(&scaled.ops, scaled.args.gradient, scaled.gradient.data);
    scaled.args.rate = zeros(&scaled.ops, 1, 1),
    scaled.args.gradient_scale = zeros(&scaled.ops, 1, 1);
    scaled.args.learning_rate *= 0.5f;
    test_write(&scaled.ops, scaled.args.rate, &twice);
    test_write(&scaled.ops, scaled.args.gradient_scale, &half);
    step(&f), step(&scaled);
    tn__matrix one = test_fetch_matrix(&f.ops, f.args.master);
    tn__matrix other = test_fetch_matrix(&scaled.ops, scaled.args.master);
    test_expect_same_matrix(&one, &other);
    test_matrix_free(&one), test_matrix_free(&other);
    close_fixture(&f), close_fixture(&scaled);
}

/* ---- the weight ----------------------------------------------------------------------------- */

static void expect_same_plane(const fixture *f, tn_tensor a, tn_tensor b, tn_plane plane) {
    test_plane one = test_fetch_plane(&f->ops, a, plane), two = test_fetch_plane(&f->ops, b, plane);
    assert_memory_equal(one.view.data, two.view.data, one.view.layout.data_bytes);
    assert_memory_equal(one.view.scale, two.view.scale, one.view.layout.scale_bytes);
    test_plane_free(&one), test_plane_free(&two);
}

static void expect_casts_of_master(const fixture *f) {
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    quantize.src = convert.x = f->args.master;
    quantize.dst = test_weight(f->ops.scope, ROWS, COLS, 0, TN_POLICY_KEEP);
    convert.y = test_plain(f->ops.scope, TN_BF16, ROWS, COLS);
    EXPECT_OK(tn_quantize(&quantize, f->ops.stream));
    EXPECT_OK(tn_convert(&convert, f->ops.stream));
    expect_same_plane(f, f->args.weight, quantize.dst, TN_PLANE_ROW);
    tn__matrix one = test_fetch_matrix(&f->ops, f->args.plain);
    tn__matrix two = test_fetch_matrix(&f->ops, convert.y);
    test_expect_same_matrix(&one, &two);
    test_matrix_free(&one), test_matrix_free(&two);
    EXPECT_OK(tn_tensor_destroy(quantize.dst, f->ops.stream));
    EXPECT_OK(tn_tensor_destroy(convert.y, f->ops.stream));
}

static void test_the_weight_is_the_cast_of_the_master_copy(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        fixture f = open_fixture((tn_dtype)(TN_FP32 + i));
        step(&f);
        expect_casts_of_master(&f);
        step(&f);
        expect_casts_of_master(&f);
        close_fixture(&f);
    }
}

/* Whoever has derived COL gives it back at the update, and derives it from the new ROW. */
static void test_the_columns_of_the_old_weight_are_gone(void **state) {
    (void)state;
    fixture f = open_fixture(TN_FP32);
    tn_plane_layout layout;
    step(&f);
    const tn_ledger before = test_ledger(f.ops.scope);
    EXPECT_OK(tn_plane_require(f.args.weight, TN_PLANE_COL, f.ops.stream));
    EXPECT_OK(tn_plane_layout_get(f.args.weight, TN_PLANE_COL, &layout));
    assert_int_equal(test_ledger(f.ops.scope).total_bytes,
                     before.total_bytes + layout.data_bytes + layout.scale_bytes);
    step(&f);
    const tn_ledger after = test_ledger(f.ops.scope);
    test_expect_same_ledger(&before, &after);
    assert_int_equal(test_state(f.args.weight, TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_int_equal(test_state(f.args.weight, TN_PLANE_ROW), TN_PLANE_VALID);
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    quantize.src = f.args.master, quantize.planes = TN_QUANTIZE_COL;
    quantize.dst = test_weight(f.ops.scope, ROWS, COLS, 0, TN_POLICY_KEEP);
    EXPECT_OK(tn_quantize(&quantize, f.ops.stream));
    EXPECT_OK(tn_plane_require(f.args.weight, TN_PLANE_COL, f.ops.stream));
    expect_same_plane(&f, f.args.weight, quantize.dst, TN_PLANE_COL);
    close_fixture(&f);
}

static void test_only_the_master_copy_is_fine_too(void **state) {
    (void)state;
    fixture f = open_fixture(TN_FP32), bare = open_fixture(TN_FP32);
    bare.args.weight.value = 0, bare.args.plain.value = 0;
    step(&f), step(&bare);
    tn__matrix one = test_fetch_matrix(&f.ops, f.args.master);
    tn__matrix two = test_fetch_matrix(&bare.ops, bare.args.master);
    test_expect_same_matrix(&one, &two);
    test_matrix_free(&one), test_matrix_free(&two);
    close_fixture(&f), close_fixture(&bare);
}

/* ---- the flag, nothing, bad input ----------------------------------------------------------- */

static void test_a_step_that_is_skipped_changes_nothing(void **state) {
    const float flag = 1.0f;
    float count[3];
    (void)state;
    fixture f = open_fixture(TN_BF16);
    step(&f);
    tn__matrix before[3] = {test_fetch_matrix(&f.ops, f.args.master),
                            test_fetch_matrix(&f.ops, f.args.first),
                            test_fetch_matrix(&f.ops, f.args.second)};
    f.args.skip = f.advance.skip = test_plain(f.ops.scope, TN_FP32, 1, 1);
    test_write(&f.ops, f.args.skip, &flag);
    step(&f);
    tn__matrix after[3] = {test_fetch_matrix(&f.ops, f.args.master),
                           test_fetch_matrix(&f.ops, f.args.first),
                           test_fetch_matrix(&f.ops, f.args.second)};
    for (int i = 0; i < 3; i++) {
        test_expect_same_matrix(&before[i], &after[i]);
        test_matrix_free(&before[i]), test_matrix_free(&after[i]);
    }
    test_read(&f.ops, f.args.step, count);
    assert_true(count[0] == 1.0f);
    expect_casts_of_master(&f);
    close_fixture(&f);
}

static void test_nothing_is_success(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_adamw_args args = TN_ADAMW_ARGS_INIT;
    tn_tensor empty[4];
    for (int i = 0; i < 4; i++) {
        empty[i] = test_plain(ops.scope, TN_FP32, 0, COLS);
        test_declare_valid(&ops, empty[i], TN_PLANE_DATA);
    }
    args.master = empty[0], args.gradient = empty[1], args.first = empty[2];
    args.second = empty[3], args.step = zeros(&ops, 1, 3);
    EXPECT_OK(tn_adamw(&args, ops.stream));
    test_ops_close_host(&ops);
}

static void expect_refused(const fixture *f, const tn_adamw_args *args, tn_status want,
                           const char *words) {
    const tn_ledger before = test_ledger(f->ops.scope);
    test_expect_status(tn_adamw(args, f->ops.stream), want, words, __FILE__, __LINE__);
    if (!strstr(tn_error_last(), words))
        fail_msg("\"%s\" does not say \"%s\"", tn_error_last(), words);
    const tn_ledger after = test_ledger(f->ops.scope);
    test_expect_same_ledger(&before, &after);
}

static void test_bad_input_is_refused(void **state) {
    (void)state;
    fixture f = open_fixture(TN_BF16);
    const tn_tensor narrow = zeros(&f.ops, ROWS, 4), flag = zeros(&f.ops, 1, 1), none = {0};
    const tn_tensor wide = test_weight(f.ops.scope, ROWS, COLS + 1, 0, TN_POLICY_KEEP);
    tn_adamw_args args;
    tn_adamw_advance_args advance = f.advance;
    tn_tensor view;
    EXPECT_OK(tn_tensor_view_rows(f.args.weight, 0, ROWS, f.ops.scope, &view));
#define ROW(change, status, words) args = f.args, change, expect_refused(&f, &args, status, words)
    ROW(args.size = 0, TN_INVALID_ARGUMENT, "args->size");
    ROW(args.beta1 = 1.0f, TN_INVALID_ARGUMENT, "beta1 is 1");
    ROW(args.beta2 = -0.5f, TN_INVALID_ARGUMENT, "beta2 is -0.5");
    ROW(args.beta2 = NAN, TN_INVALID_ARGUMENT, "beta2 is nan");
    ROW(args.learning_rate = INFINITY, TN_INVALID_ARGUMENT, "learning_rate is inf");
    ROW(args.learning_rate = -1.0f, TN_INVALID_ARGUMENT, "learning_rate is -1");
    ROW(args.weight_decay = -1.0f, TN_INVALID_ARGUMENT, "weight_decay is -1");
    ROW(args.epsilon = 0.0f, TN_INVALID_ARGUMENT, "epsilon is 0");
    ROW(args.master = none, TN_STALE_HANDLE, "");
    ROW(args.master = args.gradient, TN_INVALID_ARGUMENT, "master (tensor");
    ROW(args.gradient = narrow, TN_INVALID_ARGUMENT, "gradient (tensor");
    ROW(args.gradient = args.weight, TN_INVALID_ARGUMENT, "gradient (tensor");
    ROW(args.gradient = args.master, TN_IN_USE, "");
    ROW(args.first = narrow, TN_INVALID_ARGUMENT, "first (tensor");
    ROW(args.second = args.gradient, TN_INVALID_ARGUMENT, "second (tensor");
    ROW(args.second = args.first, TN_IN_USE, "");
    ROW(args.step = flag, TN_INVALID_ARGUMENT, "step (tensor");
    ROW(args.rate = args.step, TN_INVALID_ARGUMENT, "rate (tensor");
    ROW(args.gradient_scale = args.step, TN_INVALID_ARGUMENT, "gradient_scale (tensor");
    ROW(args.weight = args.plain, TN_INVALID_ARGUMENT, "quantized (tensor");
    ROW(args.weight = wide, TN_INVALID_ARGUMENT, "quantized (tensor");
    ROW(args.weight = view, TN_INVALID_ARGUMENT, "is a view");
    ROW(args.plain = narrow, TN_INVALID_ARGUMENT, "plain (tensor");
    ROW(args.plain = args.master, TN_IN_USE, "");
    ROW(args.amax_epsilon = -1.0f, TN_INVALID_ARGUMENT, "amax_epsilon");
    ROW(args.skip = flag, TN_INVALID_STATE, "skip flag");
#undef ROW
    advance.step = flag;
    EXPECT_STATUS(tn_adamw_advance(&advance, f.ops.stream), TN_INVALID_ARGUMENT);
    advance = f.advance, advance.beta1 = 1.5f;
    EXPECT_STATUS(tn_adamw_advance(&advance, f.ops.stream), TN_INVALID_ARGUMENT);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps_follow_the_published_algorithm),
        cmocka_unit_test(test_the_device_counts_the_steps),
        cmocka_unit_test(test_factors_on_the_device_are_used),
        cmocka_unit_test(test_the_weight_is_the_cast_of_the_master_copy),
        cmocka_unit_test(test_the_columns_of_the_old_weight_are_gone),
        cmocka_unit_test(test_only_the_master_copy_is_fine_too),
        cmocka_unit_test(test_a_step_that_is_skipped_changes_nothing),
        cmocka_unit_test(test_nothing_is_success),
        cmocka_unit_test(test_bad_input_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
