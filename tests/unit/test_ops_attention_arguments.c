/* What attention refuses: the exact status, the words, and nothing changed. Of each direction one
 * call is right, and a row makes one thing in it wrong. And what it takes: empty tensors, rows of
 * larger ones, memory of any alignment. */
#include "ops_planes_support.h"

#include "tenure_attention.h"

#include <math.h>
#include <string.h>

enum { TOKENS = 12, HEADS = 6, HEADS_KV = 2, HEAD_DIM = 16, SEQUENCE = 4 };
enum { OF_Y = HEADS * HEAD_DIM, ALL = OF_Y + 2 * HEADS_KV * HEAD_DIM };

typedef struct fixture {
    test_ops ops, other;
    tn_tensor qkv, y, dy, log_sum, dqkv;
    tn_tensor fp16, bytes, quantized, narrow, tall, elsewhere, absent, turned, half_sum, no_cols;
} fixture;

static tn_tensor valid(const test_ops *ops, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor tensor = test_plain(ops->scope, dtype, rows, cols);
    test_declare_valid(ops, tensor, TN_PLANE_DATA);
    return tensor;
}

static fixture open_fixture(void) {
    fixture f = {.ops = test_ops_open_host()};
    f.other = test_ops_open_host();
    f.qkv = valid(&f.ops, TN_BF16, TOKENS, ALL);
    f.y = valid(&f.ops, TN_BF16, TOKENS, OF_Y);
    f.dy = valid(&f.ops, TN_BF16, TOKENS, OF_Y);
    f.log_sum = valid(&f.ops, TN_FP32, HEADS, TOKENS);
    f.dqkv = valid(&f.ops, TN_BF16, TOKENS, ALL);
    f.fp16 = valid(&f.ops, TN_FP16, TOKENS, OF_Y);
    f.bytes = valid(&f.ops, TN_BYTE, TOKENS, ALL);
    f.quantized = test_fp8(f.ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TOKENS, ALL);
    f.narrow = valid(&f.ops, TN_BF16, TOKENS, OF_Y - 8);
    f.tall = valid(&f.ops, TN_BF16, TOKENS + 1, OF_Y);
    f.elsewhere = valid(&f.other, TN_BF16, TOKENS, OF_Y);
    f.absent = test_plain(f.ops.scope, TN_BF16, TOKENS, ALL);
    f.turned = valid(&f.ops, TN_FP32, TOKENS, HEADS);
    f.half_sum = valid(&f.ops, TN_BF16, HEADS, TOKENS);
    f.no_cols = valid(&f.ops, TN_BF16, TOKENS, 0);
    return f;
}

static void close_fixture(fixture *f) {
    test_ops_close_host(&f->ops);
    test_ops_close_host(&f->other);
}

static void expect_refused(tn_status got, tn_status want, const char *words,
                           const tn_ledger *before, const fixture *f) {
    tn_ledger after = test_ledger(f->ops.scope);
    assert_int_equal(got, want);
    if (!strstr(tn_error_last(), words))
        fail_msg("\"%s\" does not say \"%s\"", tn_error_last(), words);
    test_expect_same_ledger(before, &after);
}

#define REFUSES(function, right, change, status, words)                                            \
    do {                                                                                           \
        tn_ledger before = test_ledger(f.ops.scope);                                               \
        args = right(&f);                                                                          \
        change;                                                                                    \
        expect_refused(function(&args, f.ops.stream), status, words, &before, &f);                 \
    } while (0)

static tn_attention_forward_args right_forward(const fixture *f) {
    tn_attention_forward_args args = TN_ATTENTION_FORWARD_ARGS_INIT;
    args.qkv = f->qkv, args.y = f->y, args.log_sum = f->log_sum;
    args.heads = HEADS, args.heads_kv = HEADS_KV, args.sequence = SEQUENCE;
    return args;
}

static tn_attention_backward_args right_backward(const fixture *f) {
    tn_attention_backward_args args = TN_ATTENTION_BACKWARD_ARGS_INIT;
    args.dy = f->dy, args.qkv = f->qkv, args.y = f->y, args.log_sum = f->log_sum;
    args.dqkv = f->dqkv, args.scope = f->ops.scope;
    args.heads = HEADS, args.heads_kv = HEADS_KV, args.sequence = SEQUENCE;
    return args;
}

static void test_forward_refuses_bad_input(void **state) {
    fixture f = open_fixture();
    tn_attention_forward_args args;
    (void)state;
#define ROW(change, status, words)                                                                 \
    REFUSES(tn_attention_forward, right_forward, change, status, words)
    assert_int_equal(tn_attention_forward(NULL, f.ops.stream), TN_INVALID_ARGUMENT);
    ROW(args.size = 0, TN_INVALID_ARGUMENT, "args->size");
    ROW(args.qkv.value = 0, TN_STALE_HANDLE, "");
    ROW(args.qkv = f.bytes, TN_INVALID_ARGUMENT, "qkv (tensor");
    ROW(args.qkv = f.quantized, TN_INVALID_ARGUMENT, "qkv (tensor");
    ROW(args.qkv = f.absent, TN_INVALID_STATE, "");
    ROW(args.qkv = f.no_cols, TN_INVALID_ARGUMENT, "has 0 columns");
    ROW(args.heads = 0, TN_INVALID_ARGUMENT, "heads is 0");
    ROW(args.heads = -6, TN_INVALID_ARGUMENT, "heads is -6");
    ROW(args.heads_kv = -2, TN_INVALID_ARGUMENT, "heads_kv is -2");
    ROW(args.heads_kv = 4, TN_INVALID_ARGUMENT, "heads_kv is 4, expected a divisor of heads");
    ROW(args.heads_kv = 12, TN_INVALID_ARGUMENT, "heads_kv is 12");
    ROW(args.heads_kv = 1, TN_INVALID_ARGUMENT, "6 heads of queries and 2 x 1"); /* of 20 */
    ROW(args.heads_kv = 0, TN_INVALID_ARGUMENT, "160 columns");                  /* for 18 heads */
    ROW((args.heads = 2, args.heads_kv = 1), TN_INVALID_ARGUMENT, "expected 12 x 80");
    ROW((args.heads = 16, args.heads_kv = 12), TN_INVALID_ARGUMENT, "heads_kv is 12");
    ROW((args.heads = 16, args.heads_kv = 8), TN_INVALID_ARGUMENT, "a multiple of 8"); /* 5 each */
    ROW(args.heads = INT64_MAX / 2 * 2, TN_INVALID_ARGUMENT, "160 columns");
    ROW((args.heads = INT64_MAX, args.heads_kv = 0), TN_INVALID_ARGUMENT, "160 columns");
    ROW(args.sequence = 0, TN_INVALID_ARGUMENT, "sequence is 0");
    ROW(args.sequence = -4, TN_INVALID_ARGUMENT, "sequence is -4");
    ROW(args.sequence = 5, TN_INVALID_ARGUMENT, "a divisor of the 12 rows of qkv");
    ROW(args.sequence = 24, TN_INVALID_ARGUMENT, "sequence is 24");
    ROW(args.scale = -1.0f, TN_INVALID_ARGUMENT, "scale is -1");
    ROW(args.scale = NAN, TN_INVALID_ARGUMENT, "scale is");
    ROW(args.scale = INFINITY, TN_INVALID_ARGUMENT, "scale is inf");
    ROW(args.y.value = 0, TN_STALE_HANDLE, "");
    ROW(args.y = f.narrow, TN_INVALID_ARGUMENT, "y (tensor");
    ROW(args.y = f.tall, TN_INVALID_ARGUMENT, "y (tensor");
    ROW(args.y = f.fp16, TN_INVALID_ARGUMENT, "y (tensor");
    ROW(args.y = f.elsewhere, TN_INVALID_ARGUMENT, "another device");
    ROW(args.log_sum = f.turned, TN_INVALID_ARGUMENT, "one for each head and row of qkv");
    ROW(args.log_sum = f.half_sum, TN_INVALID_ARGUMENT, "log_sum (tensor");
    ROW(args.log_sum = f.y, TN_INVALID_ARGUMENT, "log_sum (tensor");
#undef ROW
    close_fixture(&f);
}

static void test_backward_refuses_bad_input(void **state) {
    fixture f = open_fixture();
    tn_attention_backward_args args;
    (void)state;
#define ROW(change, status, words)                                                                 \
    REFUSES(tn_attention_backward, right_backward, change, status, words)
    assert_int_equal(tn_attention_backward(NULL, f.ops.stream), TN_INVALID_ARGUMENT);
    ROW(args.size = 8, TN_INVALID_ARGUMENT, "args->size");
    ROW(args.heads_kv = 5, TN_INVALID_ARGUMENT, "heads_kv is 5");
    ROW(args.sequence = 7, TN_INVALID_ARGUMENT, "sequence is 7");
    ROW(args.scale = -0.5f, TN_INVALID_ARGUMENT, "scale is -0.5");
    ROW(args.qkv = f.absent, TN_INVALID_STATE, "");
    ROW(args.dy = f.narrow, TN_INVALID_ARGUMENT, "dy (tensor");
    ROW(args.dy = f.fp16, TN_INVALID_ARGUMENT, "dy (tensor");
    ROW(args.dy = f.elsewhere, TN_INVALID_ARGUMENT, "another device");
    ROW(args.dy.value = 0, TN_STALE_HANDLE, "");
    ROW(args.y = f.tall, TN_INVALID_ARGUMENT, "y (tensor");
    ROW(args.y = f.fp16, TN_INVALID_ARGUMENT, "y (tensor");
    ROW(args.log_sum.value = 0, TN_STALE_HANDLE, "");
    ROW(args.log_sum = f.turned, TN_INVALID_ARGUMENT, "log_sum (tensor");
    ROW(args.dqkv = f.y, TN_INVALID_ARGUMENT, "the shape of qkv");
    ROW(args.dqkv = f.bytes, TN_INVALID_ARGUMENT, "dqkv (tensor");
    ROW(args.dqkv = f.quantized, TN_INVALID_ARGUMENT, "dqkv (tensor");
    ROW(args.dqkv = f.qkv, TN_IN_USE, "");
    ROW(args.scope.value = 0, TN_INVALID_ARGUMENT, "scope is {0}");
#undef ROW
    close_fixture(&f);
}

/* No tokens: every output is valid, and nothing runs. A scope is not asked for. */
static void test_no_tokens_are_success(void **state) {
    test_ops ops = test_ops_open_host();
    tn_attention_forward_args forward = TN_ATTENTION_FORWARD_ARGS_INIT;
    tn_attention_backward_args backward = TN_ATTENTION_BACKWARD_ARGS_INIT;
    (void)state;
    forward.qkv = backward.qkv = valid(&ops, TN_BF16, 0, ALL);
    forward.y = backward.y = test_plain(ops.scope, TN_BF16, 0, OF_Y);
    forward.log_sum = backward.log_sum = test_plain(ops.scope, TN_FP32, HEADS, 0);
    backward.dy = valid(&ops, TN_BF16, 0, OF_Y);
    backward.dqkv = test_plain(ops.scope, TN_BF16, 0, ALL);
    forward.heads = backward.heads = HEADS;
    forward.heads_kv = backward.heads_kv = HEADS_KV;
    forward.sequence = backward.sequence = SEQUENCE;
    EXPECT_OK(tn_attention_forward(&forward, ops.stream));
    EXPECT_OK(tn_attention_backward(&backward, ops.stream));
    assert_int_equal(test_state(forward.y, TN_PLANE_DATA), TN_PLANE_VALID);
    assert_int_equal(test_state(forward.log_sum, TN_PLANE_DATA), TN_PLANE_VALID);
    assert_int_equal(test_state(backward.dqkv, TN_PLANE_DATA), TN_PLANE_VALID);
    test_ops_close_host(&ops);
}

static tn_tensor view_of(const test_ops *ops, tn_tensor base, int64_t first, int64_t rows) {
    tn_tensor view;
    EXPECT_OK(tn_tensor_view_rows(base, first, rows, ops->scope, &view));
    return view;
}

/* The middle sequence alone, as rows of the tensors of all three: the same bits as of all, and the
 * rows around it are what they were. */
static void test_rows_of_larger_tensors_are_taken(void **state) {
    test_ops ops = test_ops_open_host();
    tn_attention_forward_args all = TN_ATTENTION_FORWARD_ARGS_INIT, part;
    (void)state;
    tn__matrix qkv = test_matrix_make(TN_BF16, TOKENS, ALL, 9);
    all.heads = HEADS, all.heads_kv = HEADS_KV, all.sequence = SEQUENCE, all.is_causal = 1;
    all.qkv = test_tensor_of(&ops, ops.scope, &qkv);
    all.y = test_plain(ops.scope, TN_BF16, TOKENS, OF_Y);
    EXPECT_OK(tn_attention_forward(&all, ops.stream));
    tn_tensor other = valid(&ops, TN_BF16, TOKENS, OF_Y);
    tn__matrix before = test_fetch_matrix(&ops, other), y = test_fetch_matrix(&ops, all.y);
    part = all;
    part.qkv = view_of(&ops, all.qkv, SEQUENCE, SEQUENCE);
    part.y = view_of(&ops, other, SEQUENCE, SEQUENCE);
    EXPECT_OK(tn_attention_forward(&part, ops.stream));
    EXPECT_OK(tn_tensor_destroy(part.qkv, ops.stream));
    EXPECT_OK(tn_tensor_destroy(part.y, ops.stream));
    tn__matrix after = test_fetch_matrix(&ops, other);
    for (int64_t t = 0; t < TOKENS; t++) {
        const size_t row = (size_t)OF_Y * 2, at = (size_t)t * row;
        const tn__matrix *want = t / SEQUENCE == 1 ? &y : &before;
        assert_memory_equal((char *)after.data + at, (char *)want->data + at, row);
    }
    test_matrix_free(&qkv), test_matrix_free(&before), test_matrix_free(&y);
    test_matrix_free(&after);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward_refuses_bad_input),
        cmocka_unit_test(test_backward_refuses_bad_input),
        cmocka_unit_test(test_no_tokens_are_success),
        cmocka_unit_test(test_rows_of_larger_tensors_are_taken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
