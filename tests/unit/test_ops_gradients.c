/* The gradients of the embedding and of the weights of rows on the host: their formulas, the order
 * of their sums, accumulation, and bad input; and that a bias gradient can be added to another. */
#include "ops_planes_support.h"

#include "tenure_train.h"

#include <math.h>

/* ---- the embedding -------------------------------------------------------------------------- */

typedef struct embedding {
    test_ops ops;
    unsigned char tokens[500];
    tn__matrix dy, table;
    tn_embed_backward_args args;
} embedding;

static embedding open_embedding(tn_dtype dy, tn_dtype table, int64_t tokens, int64_t cols) {
    embedding e = {.ops = test_ops_open_host()};
    tn_embed_backward_args args = TN_EMBED_BACKWARD_ARGS_INIT;
    for (int64_t t = 0; t < tokens; t++)
        e.tokens[t] = (unsigned char)(t * t % 251 % 17 * 15);
    e.dy = test_matrix_make(dy, tokens, cols, 3);
    e.table = test_matrix_make(table, 256, cols, 4);
    args.tokens = test_plain(e.ops.scope, TN_BYTE, 1, tokens);
    test_write(&e.ops, args.tokens, e.tokens);
    args.dy = test_tensor_of(&e.ops, e.ops.scope, &e.dy);
    args.dtable = test_tensor_of(&e.ops, e.ops.scope, &e.table);
    e.args = args;
    return e;
}

static void close_embedding(embedding *e) {
    test_matrix_free(&e->dy), test_matrix_free(&e->table);
    test_ops_close_host(&e->ops);
}

static float in_order(const embedding *e, int row, int64_t col) {
    float sum = 0.0f;
    for (int64_t t = 0; t < e->dy.rows; t++)
        if (e->tokens[t] == row) sum += test_matrix_get(&e->dy, t, col);
    return sum;
}

static void test_rows_that_tokens_name_add_up(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        embedding e = open_embedding((tn_dtype)(TN_FP32 + i % 3), TN_FP32, 500, 130);
        e.args.accumulate = i / 3;
        EXPECT_OK(tn_embed_backward(&e.args, e.ops.stream));
        tn__matrix got = test_fetch_matrix(&e.ops, e.args.dtable);
        for (int row = 0; row < 256; row++)
            for (int64_t col = 0; col < 130; col++) {
                const float before = i / 3 ? test_matrix_get(&e.table, row, col) : 0.0f;
                assert_true(test_matrix_get(&got, row, col) == before + in_order(&e, row, col));
            }
        test_matrix_free(&got);
        close_embedding(&e);
    }
}

/* tn_embed is linear in its table: <dy, embed(table)> = <dtable, table>. */
static void test_it_is_what_embed_asks_for(void **state) {
    double forward = 0, backward = 0, size = 0;
    (void)state;
    embedding e = open_embedding(TN_FP32, TN_FP32, 333, 40);
    tn_embed_args embed = TN_EMBED_ARGS_INIT;
    embed.tokens = e.args.tokens, embed.table = e.args.dtable;
    embed.y = test_plain(e.ops.scope, TN_FP32, 333, 40);
    EXPECT_OK(tn_embed(&embed, e.ops.stream));
    tn__matrix y = test_fetch_matrix(&e.ops, embed.y);
    EXPECT_OK(tn_embed_backward(&e.args, e.ops.stream));
    tn__matrix dtable = test_fetch_matrix(&e.ops, e.args.dtable);
    for (int64_t t = 0; t < 333; t++)
        for (int64_t col = 0; col < 40; col++) {
            const double both =
                (double)test_matrix_get(&e.dy, t, col) * test_matrix_get(&y, t, col);
            forward += both, size += fabs(both);
        }
    for (int64_t row = 0; row < 256; row++)
        for (int64_t col = 0; col < 40; col++)
            backward +=
                (double)test_matrix_get(&dtable, row, col) * test_matrix_get(&e.table, row, col);
    assert_true(fabs(forward - backward) <= 1e-5 * size);
    test_matrix_free(&y), test_matrix_free(&dtable);
    close_embedding(&e);
}

static void test_no_tokens_give_zero_or_leave_the_table(void **state) {
    (void)state;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        embedding e = open_embedding(TN_BF16, TN_BF16, 0, 8);
        e.args.accumulate = accumulate;
        EXPECT_OK(tn_embed_backward(&e.args, e.ops.stream));
        tn__matrix got = test_fetch_matrix(&e.ops, e.args.dtable);
        for (int64_t row = 0; row < 256; row++)
            for (int64_t col = 0; col < 8; col++) {
                const float before = accumulate ? test_matrix_get(&e.table, row, col) : 0.0f;
                assert_true(test_matrix_get(&got, row, col) == before);
            }
        test_matrix_free(&got);
        close_embedding(&e);
    }
}

static void test_embed_backward_refuses_bad_input(void **state) {
    (void)state;
    embedding e = open_embedding(TN_BF16, TN_FP32, 20, 8);
    const tn_tensor short_table = test_plain(e.ops.scope, TN_FP32, 255, 8);
    const tn_ledger before = test_ledger(e.ops.scope);
    tn_embed_backward_args args;
#define ROW(change, status, words)                                                                 \
    args = e.args, change;                                                                         \
    EXPECT_STATUS(tn_embed_backward(&args, e.ops.stream), status);                                 \
    EXPECT_ERROR_HAS(words)
    ROW(args.size = 1, TN_INVALID_ARGUMENT, "args->size");
    ROW(args.tokens = args.dy, TN_INVALID_ARGUMENT, "tokens (tensor");
    ROW(args.dy = args.tokens, TN_INVALID_ARGUMENT, "dy (tensor");
    ROW(args.dtable = short_table, TN_INVALID_ARGUMENT, "dtable (tensor");
    ROW(args.dtable = args.tokens, TN_INVALID_ARGUMENT, "dtable (tensor");
    ROW(args.dtable = args.dy, TN_INVALID_ARGUMENT, "dtable (tensor");
#undef ROW
    const tn_ledger after = test_ledger(e.ops.scope);
    test_expect_same_ledger(&before, &after);
    close_embedding(&e);
}

/* ---- the weights of rows -------------------------------------------------------------------- */

typedef struct weighted {
    test_ops ops;
    tn__matrix x, dy, weights;
    tn_activation_args forward;
    tn_activation_backward_args args;
} weighted;

static weighted open_weighted(tn_activation activation, int gated, int64_t rows, int64_t cols) {
    weighted w = {.ops = test_ops_open_host()};
    tn_activation_args forward = TN_ACTIVATION_ARGS_INIT;
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    w.x = test_matrix_make(TN_FP32, rows, cols << gated, 3);
    w.dy = test_matrix_make(TN_FP32, rows, cols, 4);
    w.weights = test_matrix_make(TN_FP32, 1, rows, 5);
    forward.activation = args.activation = activation;
    forward.gated = args.gated = gated;
    forward.x = args.x = test_tensor_of(&w.ops, w.ops.scope, &w.x);
    args.dy = test_tensor_of(&w.ops, w.ops.scope, &w.dy);
    forward.weights = args.weights = test_tensor_of(&w.ops, w.ops.scope, &w.weights);
    forward.y = test_plain(w.ops.scope, TN_FP32, rows, cols);
    args.dweights = test_plain(w.ops.scope, TN_FP32, 1, rows);
    w.forward = forward, w.args = args;
    return w;
}

static void close_weighted(weighted *w) {
    test_matrix_free(&w->x), test_matrix_free(&w->dy), test_matrix_free(&w->weights);
    test_ops_close_host(&w->ops);
}

/* y of weights of 1 is what each weight is multiplied with. */
static void test_it_is_the_slope_of_the_weighted_activation(void **state) {
    (void)state;
    for (int i = 0; i < 2 * TN_ACTIVATION_COUNT; i++) {
        weighted w = open_weighted((tn_activation)(i / 2), i % 2, 37, 300);
        w.forward.weights.value = 0;
        EXPECT_OK(tn_activation_forward(&w.forward, w.ops.stream));
        EXPECT_OK(tn_activation_backward(&w.args, w.ops.stream));
        tn__matrix y = test_fetch_matrix(&w.ops, w.forward.y);
        tn__matrix got = test_fetch_matrix(&w.ops, w.args.dweights);
        for (int64_t m = 0; m < 37; m++) {
            float sum[256] = {0};
            for (int64_t n = 0; n < 300; n++)
                sum[n % 256] =
                    fmaf(test_matrix_get(&w.dy, m, n), test_matrix_get(&y, m, n), sum[n % 256]);
            for (int apart = 128; apart > 0; apart /= 2)
                for (int k = 0; k < apart; k++)
                    sum[k] = sum[k] + sum[k + apart];
            assert_true(test_matrix_get(&got, 0, m) == sum[0]);
        }
        test_matrix_free(&y), test_matrix_free(&got);
        close_weighted(&w);
    }
}

static void test_it_comes_with_the_other_gradients(void **state) {
    (void)state;
    weighted w = open_weighted(TN_ACTIVATION_SILU, 1, 130, 72), alone = w;
    w.args.dx = test_plain(w.ops.scope, TN_FP32, 130, 144);
    w.args.dbias = test_plain(w.ops.scope, TN_FP32, 1, 144);
    w.args.scope = w.ops.scope;
    alone.args.dweights = test_plain(w.ops.scope, TN_FP32, 130, 1);
    EXPECT_OK(tn_activation_backward(&w.args, w.ops.stream));
    EXPECT_OK(tn_activation_backward(&alone.args, w.ops.stream));
    float with[130], without[130], bias[144], twice[144];
    test_read(&w.ops, w.args.dweights, with);
    test_read(&w.ops, alone.args.dweights, without);
    assert_memory_equal(with, without, sizeof with);
    test_read(&w.ops, w.args.dbias, bias);
    w.args.accumulate_dbias = 1;
    EXPECT_OK(tn_activation_backward(&w.args, w.ops.stream));
    test_read(&w.ops, w.args.dbias, twice);
    for (int n = 0; n < 144; n++)
        assert_true(twice[n] == 2 * bias[n]);
    w.args.dweights = w.args.dbias;
    EXPECT_STATUS(tn_activation_backward(&w.args, w.ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("dweights (tensor");
    close_weighted(&w);
}

/* ---- the gradient of a bias ----------------------------------------------------------------- */

static void test_a_bias_gradient_is_added_in_fp32(void **state) {
    tn__matrix dy = test_matrix_make(TN_BF16, 300, 40, 6),
               before = test_matrix_make(TN_BF16, 1, 40, 7);
    test_ops ops = test_ops_open_host();
    tn_bias_gradient_args args = TN_BIAS_GRADIENT_ARGS_INIT;
    (void)state;
    args.dy = test_tensor_of(&ops, ops.scope, &dy);
    args.dbias = test_plain(ops.scope, TN_FP32, 1, 40);
    args.scope = ops.scope;
    EXPECT_OK(tn_bias_gradient(&args, ops.stream));
    tn__matrix alone = test_fetch_matrix(&ops, args.dbias);
    args.dbias = test_tensor_of(&ops, ops.scope, &before);
    args.accumulate = 1;
    EXPECT_OK(tn_bias_gradient(&args, ops.stream));
    tn_axpy_args axpy = TN_AXPY_ARGS_INIT;
    axpy.x = test_tensor_of(&ops, ops.scope, &alone);
    axpy.y = test_tensor_of(&ops, ops.scope, &before);
    EXPECT_OK(tn_axpy(&axpy, ops.stream));
    tn__matrix got = test_fetch_matrix(&ops, args.dbias);
    tn__matrix expected = test_fetch_matrix(&ops, axpy.y);
    test_expect_same_matrix(&got, &expected);
    test_matrix_free(&expected);
    test_matrix_free(&alone), test_matrix_free(&got);
    test_matrix_free(&dy), test_matrix_free(&before);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_that_tokens_name_add_up),
        cmocka_unit_test(test_it_is_what_embed_asks_for),
        cmocka_unit_test(test_no_tokens_give_zero_or_leave_the_table),
        cmocka_unit_test(test_embed_backward_refuses_bad_input),
        cmocka_unit_test(test_it_is_the_slope_of_the_weighted_activation),
        cmocka_unit_test(test_it_comes_with_the_other_gradients),
        cmocka_unit_test(test_a_bias_gradient_is_added_in_fp32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
