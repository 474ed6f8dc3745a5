/* The Linear layer on the host device: its values, and what is alive when. */
#include "ops_planes_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "tenure_layers.h"

enum { M = 70, N = 200, K = 300 };

/* A layer with its input and the gradient of its output. */
typedef struct layer {
    test_ops ops;
    tn_scope op, saved;
    tn_tensor x, weight, dy;
    tn__matrix x_values, weight_values, dy_values;
} layer;

static layer open_layer(int frozen, tn_plane_policy policy) {
    layer l = {.ops = test_ops_open_host()};
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    tn_scope loading = test_ops_scope(&l.ops, TN_SCOPE_OP, "loading");
    l.op = test_ops_scope(&l.ops, TN_SCOPE_OP, "op");
    l.saved = test_ops_scope(&l.ops, TN_SCOPE_SAVED, "saved");
    l.x_values = test_matrix_make(TN_BF16, M, K, 1);
    l.weight_values = test_matrix_make(TN_BF16, N, K, 2);
    l.dy_values = test_matrix_make(TN_BF16, M, N, 3);
    l.x = test_tensor_of(&l.ops, l.ops.scope, &l.x_values);
    l.dy = test_tensor_of(&l.ops, l.ops.scope, &l.dy_values);
    l.weight = test_weight(l.ops.scope, N, K, frozen, policy);
    quantize.src = test_tensor_of(&l.ops, loading, &l.weight_values);
    quantize.dst = l.weight;
    EXPECT_OK(tn_quantize(&quantize, l.ops.stream));
    EXPECT_OK(tn_scope_close(loading));
    return l;
}

static void close_layer(layer *l) {
    test_matrix_free(&l->x_values), test_matrix_free(&l->weight_values);
    test_matrix_free(&l->dy_values);
    test_ops_close_host(&l->ops);
}

static tn_linear_forward_args forward_args(const layer *l, tn_dtype dtype) {
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = l->x;
    args.w.weight = l->weight;
    args.y = test_plain(l->ops.scope, dtype, M, N);
    args.common.scope = l->op;
    args.common.saved_scope = l->saved;
    return args;
}

static tn_linear_backward_args backward_args(const layer *l, tn_dtype dtype) {
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = l->dy;
    args.w.weight = l->weight;
    args.dx = test_plain(l->ops.scope, dtype, M, K);
    args.common.scope = l->op;
    return args;
}

static size_t col_bytes(const layer *l) {
    tn_ledger ledger = test_ledger(l->ops.scope);
    return ledger.data_bytes[TN_PLANE_COL] + ledger.scale_bytes[TN_PLANE_COL];
}

static void expect_no_scratch_left(const layer *l) {
    tn_ledger ledger = test_ledger(l->op);
    assert_int_equal(ledger.tensors, 0);
    assert_int_equal(ledger.total_bytes, 0);
    assert_int_equal(test_ledger(l->ops.scope).leases, 0);
}

/* ---- values -------------------------------------------------------------------------------- */

static void expect_product(const layer *l, tn_gemm_form form, tn_tensor a, tn_tensor b,
                           tn_tensor result) {
    tn__matrix actual = test_fetch_matrix(&l->ops, result);
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = form;
    args.a = a, args.b = b, args.scope = l->op;
    args.d = test_plain(l->ops.scope, actual.dtype, actual.rows, actual.cols);
    EXPECT_OK(tn_gemm(&args, l->ops.stream));
    tn__matrix expected = test_fetch_matrix(&l->ops, args.d);
    test_expect_same_matrix(&actual, &expected);
    test_matrix_free(&actual), test_matrix_free(&expected);
}

static void a_layer_is_its_quantizations_and_products(void **state) {
    (void)state;
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    layer l = open_layer(0, TN_POLICY_KEEP);
    const unsigned both = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    tn_linear_forward_args forward = forward_args(&l, TN_BF16);
    tn_linear_backward_args backward = backward_args(&l, TN_BF16);
    backward.gradient.dweight = test_plain(l.ops.scope, TN_FP32, N, K);
    EXPECT_OK(tn_linear_forward(&forward, &saved, l.ops.stream));
    assert_int_equal(test_state(saved.x, TN_PLANE_ROW), TN_PLANE_ABSENT);
    assert_int_equal(test_state(saved.x, TN_PLANE_COL), TN_PLANE_VALID);
    EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l.ops.stream));
    assert_int_equal(saved.x.value, 0);
    expect_no_scratch_left(&l);

    tn_tensor x = test_quantized(&l.ops, l.ops.scope, &l.x_values, TN_FORMAT_FP8_BLOCK_1D, both);
    tn_tensor dy = test_quantized(&l.ops, l.ops.scope, &l.dy_values, TN_FORMAT_FP8_BLOCK_1D, both);
    expect_product(&l, TN_GEMM_FPROP, x, l.weight, forward.y);
    expect_product(&l, TN_GEMM_DGRAD, dy, l.weight, backward.dx);
    expect_product(&l, TN_GEMM_WGRAD, dy, x, backward.gradient.dweight);
    close_layer(&l);
}

/* FP8 with 3 mantissa bits errs by at most 1/16 in each factor, so a product by at most about
 * 1/8, and a sum of products by 1/8 of the sum of magnitudes. */
static void gradients_are_near_double_of_the_unquantized(void **state) {
    (void)state;
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    layer l = open_layer(0, TN_POLICY_KEEP);
    tn_linear_forward_args forward = forward_args(&l, TN_FP32);
    tn_linear_backward_args backward = backward_args(&l, TN_FP32);
    backward.gradient.dweight = test_plain(l.ops.scope, TN_FP32, N, K);
    EXPECT_OK(tn_linear_forward(&forward, &saved, l.ops.stream));
    EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l.ops.stream));
    tn__matrix results[] = {test_fetch_matrix(&l.ops, forward.y),
                            test_fetch_matrix(&l.ops, backward.dx),
                            test_fetch_matrix(&l.ops, backward.gradient.dweight)};
    const int64_t contracted[] = {K, N, M};
    for (int which = 0; which < 3; which++) {
        double error = 0.0, size = 0.0;
        for (int64_t r = 0; r < results[which].rows; r++) {
            for (int64_t c = 0; c < results[which].cols; c++) {
                double sum = 0.0, magnitude = 0.0;
                for (int64_t i = 0; i < contracted[which]; i++) {
                    float a = which == 0   ? test_matrix_get(&l.x_values, r, i)
                              : which == 1 ? test_matrix_get(&l.dy_values, r, i)
                                           : test_matrix_get(&l.dy_values, i, r);
                    float b = which == 0   ? test_matrix_get(&l.weight_values, c, i)
                              : which == 1 ? test_matrix_get(&l.weight_values, i, c)
                                           : test_matrix_get(&l.x_values, i, c);
                    sum += (double)a * (double)b;
                    magnitude += fabs((double)a * (double)b);
                }
                double off = (double)test_matrix_get(&results[which], r, c) - sum;
                assert_true(fabs(off) <= magnitude / 7.0);
                error += off * off, size += sum * sum;
            }
        }
        assert_true(sqrt(error / size) < 0.05); /* and far less on average */
        test_matrix_free(&results[which]);
    }
    close_layer(&l);
}

/* One pass of both, with and without adding to what there is. */
static void run_once(const layer *l, int accumulate, tn_tensor dweight) {
    tn_linear_forward_args forward = forward_args(l, TN_BF16);
    tn_linear_backward_args backward = backward_args(l, TN_BF16);
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    backward.gradient.dweight = dweight;
    backward.gradient.accumulate = accumulate;
    backward.dx = (tn_tensor){0};
    EXPECT_OK(tn_linear_forward(&forward, &saved, l->ops.stream));
    EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l->ops.stream));
}

static void weight_gradients_accumulate(void **state) {
    (void)state;
    layer l = open_layer(0, TN_POLICY_KEEP);
    tn_tensor dweight = test_plain(l.ops.scope, TN_FP32, N, K);
    run_once(&l, 0, dweight);
    tn__matrix once = test_fetch_matrix(&l.ops, dweight);
    run_once(&l, 1, dweight);
    tn__matrix twice = test_fetch_matrix(&l.ops, dweight);
    for (int i = 0; i < N * K; i++) {
        assert_true(((float *)twice.data)[i] == 2.0f * ((float *)once.data)[i]);
    }
    assert_int_equal(test_state(l.weight, TN_PLANE_COL), TN_PLANE_ABSENT); /* no dgrad, no COL */
    test_matrix_free(&once), test_matrix_free(&twice);
    close_layer(&l);
}

static void set_flag(const layer *l, tn_tensor flag, float value) {
    test_write(&l->ops, flag, &value);
}

/* Over micro-batches: the first quantizes the weight, the others keep it whatever its source is. */
static void a_flag_keeps_the_quantized_weight(void **state) {
    (void)state;
    layer l = open_layer(0, TN_POLICY_UNTIL_LAST_USE);
    tn_linear_forward_args forward = forward_args(&l, TN_BF16);
    tn__matrix other = test_matrix_make(TN_BF16, N, K, 9), y[4];
    const tn_tensor others = test_tensor_of(&l.ops, l.ops.scope, &other);
    forward.common.saved_scope = (tn_scope){0};
    forward.w.source = test_tensor_of(&l.ops, l.ops.scope, &l.weight_values);
    forward.w.skip = test_plain(l.ops.scope, TN_FP32, 1, 1);
    for (int i = 0; i < 4; i++) {
        set_flag(&l, forward.w.skip, i == 1 || i == 3 ? 1.0f : 0.0f);
        if (i > 0) forward.w.source = others;
        EXPECT_OK(tn_linear_forward(&forward, NULL, l.ops.stream));
        y[i] = test_fetch_matrix(&l.ops, forward.y);
    }
    test_expect_same_matrix(&y[0], &y[1]);
    test_expect_same_matrix(&y[2], &y[3]);
    assert_memory_not_equal(y[1].data, y[2].data, (size_t)M * N * 2);
    for (int i = 0; i < 4; i++)
        test_matrix_free(&y[i]);
    test_matrix_free(&other);
    expect_no_scratch_left(&l);
    close_layer(&l);
}

/* ---- what is alive ------------------------------------------------------------------------- */

/* [K, N] bytes, and a scale for each of 3 x 2 tiles, whose rows of 2 are padded to 4. */
enum { COL_DATA_BYTES = K * N, COL_SCALE_BYTES = 3 * 4 * 4 };

/* Three steps of a frozen layer under both policies: exact bytes, and the same bits. */
static void a_frozen_weights_columnwise_plane_lives_as_its_policy_says(void **state) {
    (void)state;
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    static const tn_plane_policy policies[] = {TN_POLICY_KEEP, TN_POLICY_UNTIL_LAST_USE};
    tn__matrix y[2], dx[2];
    for (int p = 0; p < 2; p++) {
        layer l = open_layer(1, policies[p]);
        tn_linear_forward_args forward = forward_args(&l, TN_BF16);
        tn_linear_backward_args backward = backward_args(&l, TN_FP32);
        for (int step = 0; step < 3; step++) {
            size_t kept = policies[p] == TN_POLICY_KEEP ? COL_DATA_BYTES + COL_SCALE_BYTES : 0;
            EXPECT_OK(tn_linear_forward(&forward, &saved, l.ops.stream));
            assert_int_equal(col_bytes(&l), step ? kept : 0); /* forward makes none */
            EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l.ops.stream));
            assert_int_equal(col_bytes(&l), kept);
            expect_no_scratch_left(&l);
            assert_int_equal(test_ledger(l.saved).total_bytes, 0);
        }
        tn_ledger ledger = test_ledger(l.ops.scope);
        assert_int_equal(ledger.peak_plane_bytes[TN_PLANE_COL], COL_DATA_BYTES + COL_SCALE_BYTES);
        y[p] = test_fetch_matrix(&l.ops, forward.y);
        dx[p] = test_fetch_matrix(&l.ops, backward.dx);
        close_layer(&l);
    }
    test_expect_same_matrix(&y[0], &y[1]);
    test_expect_same_matrix(&dx[0], &dx[1]);
    for (int p = 0; p < 2; p++)
        test_matrix_free(&y[p]), test_matrix_free(&dx[p]);
}

static tn_tensor quantize_columns(const layer *l, tn_scope scope, tn_tensor src, int64_t cols) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = src, args.planes = TN_QUANTIZE_COL;
    args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, M, cols);
    EXPECT_OK(tn_quantize(&args, l->ops.stream));
    return args.dst;
}

/* dgrad alone reads dy by rows: they are gone when x is made again for the weight's gradient. */
static void the_rows_of_dy_end_with_dgrad(void **state) {
    (void)state;
    layer l = open_layer(0, TN_POLICY_KEEP);
    const tn_scope expected = test_ops_scope(&l.ops, TN_SCOPE_OP, "both by columns");
    tn_linear_backward_args backward = backward_args(&l, TN_BF16);
    backward.x = l.x, backward.common.recompute = 1;
    backward.gradient.dweight = test_plain(l.ops.scope, TN_FP32, N, K);
    EXPECT_OK(tn_linear_backward(&backward, NULL, NULL, l.ops.stream));
    tn_gemm_args product = TN_GEMM_ARGS_INIT;
    product.form = TN_GEMM_WGRAD, product.scope = expected;
    product.a = quantize_columns(&l, expected, l.dy, N);
    product.b = quantize_columns(&l, expected, l.x, K);
    product.d = backward.gradient.dweight;
    EXPECT_OK(tn_gemm(&product, l.ops.stream));
    assert_int_equal(test_ledger(l.op).peak_total_bytes, test_ledger(expected).peak_total_bytes);
    expect_no_scratch_left(&l);
    close_layer(&l);
}

/* The policy of a tensor that names none, by either name of the variable. */
static void the_environment_sets_the_default_policy_of_frozen_weights(void **state) {
    (void)state;
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    static const char *const names[] = {"TENURE_RELEASE_FROZEN_COLUMNWISE",
                                        "NVTE_RELEASE_FROZEN_WEIGHT_COLUMNWISE"};
    for (int i = 0; i < 6; i++) {
        int is_released = i % 3 == 1;
        const size_t kept = COL_DATA_BYTES + COL_SCALE_BYTES;
        if (i % 3 < 2) assert_int_equal(setenv(names[i / 3], is_released ? "1" : "0", 1), 0);
        tn__options_reload();
        layer l = open_layer(1, TN_POLICY_DEFAULT);
        tn_linear_backward_args backward = backward_args(&l, TN_BF16);
        EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l.ops.stream));
        assert_int_equal(col_bytes(&l), is_released ? 0 : kept);
        close_layer(&l);
        assert_int_equal(unsetenv(names[i / 3]), 0);
    }
    tn__options_reload();
}

/* A weight that has both planes when it becomes frozen gets the same saving, also from a layer
 * that computes no dgrad. */
static void a_plane_from_before_freezing_is_released_too(void **state) {
    (void)state;
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    layer l = open_layer(0, TN_POLICY_UNTIL_LAST_USE);
    tn_linear_backward_args backward = backward_args(&l, TN_BF16);
    EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l.ops.stream));
    assert_int_equal(col_bytes(&l), COL_DATA_BYTES + COL_SCALE_BYTES); /* trainable: kept */
    EXPECT_OK(tn_tensor_set_frozen(l.weight, 1));
    backward.dx = (tn_tensor){0};
    EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l.ops.stream));
    assert_int_equal(col_bytes(&l), 0);
    close_layer(&l);
}

static void a_columnwise_plane_that_someone_leases_stays(void **state) {
    (void)state;
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    layer l = open_layer(1, TN_POLICY_UNTIL_LAST_USE);
    tn_linear_backward_args backward = backward_args(&l, TN_BF16);
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_lease_begin(l.weight, TN_PLANE_COL, TN_READ, l.ops.stream, &lease, &view));
    EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l.ops.stream));
    assert_int_equal(col_bytes(&l), COL_DATA_BYTES + COL_SCALE_BYTES);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l.ops.stream));
    assert_int_equal(col_bytes(&l), 0);
    close_layer(&l);
}

/* x saved for backward is its COL plane and no more: [K, M] bytes, one scale a row of 128. */
static void a_trainable_layer_saves_only_the_columnwise_plane_of_x(void **state) {
    (void)state;
    layer l = open_layer(0, TN_POLICY_KEEP);
    tn_linear_forward_args forward = forward_args(&l, TN_BF16);
    tn_linear_saved set = TN_LINEAR_SAVED_INIT;
    EXPECT_OK(tn_linear_forward(&forward, &set, l.ops.stream));
    tn_ledger saved = test_ledger(l.saved);
    assert_int_equal(saved.data_bytes[TN_PLANE_COL], K * M);
    assert_int_equal(saved.scale_bytes[TN_PLANE_COL], 1 * K * 4);
    assert_int_equal(saved.total_bytes, K * M + K * 4);
    expect_no_scratch_left(&l);
    close_layer(&l);
}

static void nothing_is_saved_where_no_weight_gradient_will_be_asked_for(void **state) {
    (void)state;
    for (int frozen = 0; frozen < 2; frozen++) {
        layer l = open_layer(frozen, TN_POLICY_KEEP);
        tn_linear_forward_args forward = forward_args(&l, TN_BF16);
        tn_linear_backward_args backward = backward_args(&l, TN_BF16);
        tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
        if (!frozen) forward.common.saved_scope = (tn_scope){0};
        EXPECT_OK(tn_linear_forward(&forward, frozen ? &saved : NULL, l.ops.stream));
        assert_int_equal(saved.x.value, 0);
        assert_int_equal(test_ledger(l.saved).total_bytes, 0);
        backward.gradient.dweight = test_plain(l.ops.scope, TN_FP32, N, K);
        EXPECT_STATUS(tn_linear_backward(&backward, &saved, NULL, l.ops.stream),
                      TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS(frozen ? "gradient.dweight is given, but w.weight" : "saved->x, which is");
        assert_int_equal(test_state(backward.dx, TN_PLANE_DATA), TN_PLANE_ABSENT);
        expect_no_scratch_left(&l);
        close_layer(&l);
    }
}

/* A saved x as forward makes it, but without a plane. */
static tn_linear_saved saved_without_planes(const layer *l) {
    return (tn_linear_saved){test_fp8(l->saved, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, M, K)};
}

/* dweight needs what forward has saved; without it nothing has changed, dx and COL included. */
static void a_backward_that_fails_half_way_leaves_nothing(void **state) {
    (void)state;
    layer l = open_layer(0, TN_POLICY_KEEP);
    tn_linear_backward_args backward = backward_args(&l, TN_BF16);
    tn_linear_saved saved = saved_without_planes(&l);
    backward.gradient.dweight = test_plain(l.ops.scope, TN_FP32, N, K);
    tn_ledger before = test_ledger(l.ops.scope);
    EXPECT_STATUS(tn_linear_backward(&backward, &saved, NULL, l.ops.stream), TN_INVALID_STATE);
    tn_ledger after = test_ledger(l.ops.scope);
    test_expect_same_ledger(&before, &after);
    assert_int_equal(test_state(backward.dx, TN_PLANE_DATA), TN_PLANE_ABSENT);
    assert_int_equal(test_state(backward.gradient.dweight, TN_PLANE_DATA), TN_PLANE_ABSENT);
    assert_int_equal(test_state(l.weight, TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_int_not_equal(saved.x.value, 0);
    close_layer(&l);
}

/* The same with the next weight's plane derived on another stream before the failure. */
static void what_was_derived_ahead_is_gone_after_a_failure(void **state) {
    (void)state;
    layer l = open_layer(0, TN_POLICY_KEEP);
    tn_linear_backward_args backward = backward_args(&l, TN_BF16);
    tn_linear_saved saved = saved_without_planes(&l);
    tn_stream side;
    tn_tensor next = test_weight(l.ops.scope, 70, 200, 1, TN_POLICY_UNTIL_LAST_USE);
    EXPECT_OK(tn_stream_create(l.ops.device, &side));
    test_declare_valid(&l.ops, next, TN_PLANE_ROW);
    backward.common.next_weight = next, backward.common.side = side;
    backward.gradient.dweight = test_plain(l.ops.scope, TN_FP32, N, K);
    tn_ledger before = test_ledger(l.ops.scope);
    EXPECT_STATUS(tn_linear_backward(&backward, &saved, NULL, l.ops.stream), TN_INVALID_STATE);
    assert_int_equal(test_ledger(l.ops.scope).total_bytes, before.total_bytes);
    assert_int_equal(test_state(next, TN_PLANE_COL), TN_PLANE_ABSENT);
    backward.gradient.dweight = (tn_tensor){0};
    EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l.ops.stream));
    assert_int_equal(test_state(next, TN_PLANE_COL), TN_PLANE_VALID);
    EXPECT_OK(tn_device_synchronize(l.ops.device));
    EXPECT_OK(tn_stream_destroy(l.ops.device, side));
    close_layer(&l);
}

static void a_next_weight_that_is_none_is_refused_by_name(void **state) {
    (void)state;
    layer l = open_layer(1, TN_POLICY_KEEP);
    tn_linear_backward_args backward = backward_args(&l, TN_BF16);
    backward.common.next_weight = saved_without_planes(&l).x;
    EXPECT_STATUS(tn_linear_backward(&backward, NULL, NULL, l.ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("next_weight");
    EXPECT_ERROR_HAS("is fp8_block_1d, expected fp8_block_2d");
    assert_int_equal(test_state(l.weight, TN_PLANE_COL), TN_PLANE_ABSENT);
    close_layer(&l);
}

static void a_layer_without_tokens_has_zero_gradients(void **state) {
    (void)state;
    layer l = open_layer(0, TN_POLICY_KEEP);
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    tn_linear_forward_args forward = forward_args(&l, TN_BF16);
    tn_linear_backward_args backward = backward_args(&l, TN_BF16);
    forward.x = test_plain(l.ops.scope, TN_BF16, 0, K);
    forward.y = test_plain(l.ops.scope, TN_BF16, 0, N);
    backward.dy = test_plain(l.ops.scope, TN_BF16, 0, N);
    backward.dx = test_plain(l.ops.scope, TN_BF16, 0, K);
    backward.gradient.dweight = test_plain(l.ops.scope, TN_FP32, N, K);
    backward.gradient.dbias = test_plain(l.ops.scope, TN_FP32, 1, N);
    test_declare_valid(&l.ops, forward.x, TN_PLANE_DATA);
    test_declare_valid(&l.ops, backward.dy, TN_PLANE_DATA);
    EXPECT_OK(tn_linear_forward(&forward, &saved, l.ops.stream));
    EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, l.ops.stream));
    tn__matrix dw = test_fetch_matrix(&l.ops, backward.gradient.dweight);
    tn__matrix dbias = test_fetch_matrix(&l.ops, backward.gradient.dbias);
    for (int i = 0; i < N * K; i++)
        assert_true(((float *)dw.data)[i] == 0.0f);
    for (int i = 0; i < N; i++)
        assert_true(((float *)dbias.data)[i] == 0.0f);
    test_matrix_free(&dw), test_matrix_free(&dbias);
    close_layer(&l);
}

/* What does not run here, or would have to dequantize first, is refused before anything is made. */
static void the_variable_pins_the_products_of_layers(void **state) {
    (void)state;
    static const struct {
        const char *engine, *words;
    } refused[] = {{"cublaslt", "the engine cublaslt is pinned, but it is of CUDA only"},
                   {"wgmma", "the engine wgmma is pinned, but it is of CUDA only"},
                   {"dequantize-bf16", "pins the engine dequantize-bf16, which does not take"},
                   {"dequantize-fp32", "pins the engine dequantize-fp32, which does not take"}};
    layer l = open_layer(0, TN_POLICY_KEEP);
    tn_linear_forward_args args = forward_args(&l, TN_BF16);
    tn_linear_saved saved;
    tn_plane_state y;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        test_pin_engine(refused[i].engine);
        EXPECT_STATUS(tn_linear_forward(&args, &saved, l.ops.stream), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS(refused[i].words);
        EXPECT_OK(tn_plane_state_get(args.y, TN_PLANE_DATA, &y));
        assert_int_equal(y, TN_PLANE_ABSENT);
    }
    test_pin_engine("reference");
    EXPECT_OK(tn_linear_forward(&args, &saved, l.ops.stream));
    args.w.weight = test_tensor_of(&l.ops, l.ops.scope, &l.weight_values); /* PLAIN, of bf16 */
    test_pin_engine("dequantize-fp32");
    EXPECT_STATUS(tn_linear_forward(&args, &saved, l.ops.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("does not take its product of bf16 by bf16");
    test_pin_engine("dequantize-bf16");
    EXPECT_OK(tn_linear_forward(&args, &saved, l.ops.stream));
    test_pin_engine(NULL);
    close_layer(&l);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_layer_is_its_quantizations_and_products),
        cmocka_unit_test(gradients_are_near_double_of_the_unquantized),
        cmocka_unit_test(weight_gradients_accumulate),
        cmocka_unit_test(a_flag_keeps_the_quantized_weight),
        cmocka_unit_test(a_frozen_weights_columnwise_plane_lives_as_its_policy_says),
        cmocka_unit_test(the_rows_of_dy_end_with_dgrad),
        cmocka_unit_test(the_environment_sets_the_default_policy_of_frozen_weights),
        cmocka_unit_test(a_plane_from_before_freezing_is_released_too),
        cmocka_unit_test(a_columnwise_plane_that_someone_leases_stays),
        cmocka_unit_test(a_trainable_layer_saves_only_the_columnwise_plane_of_x),
        cmocka_unit_test(nothing_is_saved_where_no_weight_gradient_will_be_asked_for),
        cmocka_unit_test(a_backward_that_fails_half_way_leaves_nothing),
        cmocka_unit_test(what_was_derived_ahead_is_gone_after_a_failure),
        cmocka_unit_test(a_next_weight_that_is_none_is_refused_by_name),
        cmocka_unit_test(a_layer_without_tokens_has_zero_gradients),
        cmocka_unit_test(the_variable_pins_the_products_of_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
