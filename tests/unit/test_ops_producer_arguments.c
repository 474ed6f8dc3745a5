/* What the ops that make values and cast them refuse: the exact status, the words, and nothing
 * changed. Of each op one call is right, and a row makes one thing in it wrong. */
#include "test_ops.h"

#include "tenure_cast.h"

#include <math.h>
#include <string.h>

enum { ROWS = 20, COLS = 36 };

typedef struct fixture {
    test_ops ops, other;
    tn_tensor x, y, dy, narrow, tall, odd, fp16, bytes, weights, column, elsewhere, absent;
    tn_tensor quantized, quantized_wide, tensor_scaled, flag, two_flags;
} fixture;

static tn_tensor valid(const test_ops *ops, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor tensor = test_plain(ops->scope, dtype, rows, cols);
    test_declare_valid(ops, tensor, TN_PLANE_DATA);
    return tensor;
}

static fixture open_fixture(void) {
    fixture f = {.ops = test_ops_open_host()};
    f.other = test_ops_open_host();
    f.x = valid(&f.ops, TN_BF16, ROWS, COLS);
    f.y = valid(&f.ops, TN_BF16, ROWS, COLS);
    f.dy = valid(&f.ops, TN_BF16, ROWS, COLS);
    f.narrow = valid(&f.ops, TN_BF16, ROWS, COLS / 2);
    f.tall = valid(&f.ops, TN_BF16, ROWS + 1, COLS);
    f.odd = valid(&f.ops, TN_BF16, ROWS, COLS + 1);
    f.fp16 = valid(&f.ops, TN_FP16, ROWS, COLS);
    f.bytes = valid(&f.ops, TN_BYTE, ROWS, COLS);
    f.weights = valid(&f.ops, TN_FP32, ROWS, 1);
    f.column = valid(&f.ops, TN_FP32, 1, COLS);
    f.elsewhere = valid(&f.other, TN_BF16, ROWS, COLS);
    f.absent = test_plain(f.ops.scope, TN_BF16, ROWS, COLS);
    f.quantized = test_fp8(f.ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, COLS);
    f.quantized_wide = test_fp8(f.ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, COLS + 1);
    f.tensor_scaled = test_fp8(f.ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, ROWS, COLS);
    f.flag = valid(&f.ops, TN_FP32, 1, 1);
    f.two_flags = valid(&f.ops, TN_FP32, 1, 2);
    return f;
}

static void close_fixture(fixture *f) {
    test_ops_close_host(&f->ops);
    test_ops_close_host(&f->other);
}

/* The status and words of a call that must have left the books as they were. */
static void expect_refused(tn_status got, tn_status want, const char *words,
                           const tn_ledger *before, const fixture *f) {
    tn_ledger after = test_ledger(f->ops.scope);
    assert_int_equal(got, want);
    if (!strstr(tn_error_last(), words))
        fail_msg("\"%s\" does not say \"%s\"", tn_error_last(), words);
    test_expect_same_ledger(before, &after);
}

/* ---- activations --------------------------------------------------------------------------- */

static tn_activation_args right_activation(const fixture *f) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    args.x = f->x, args.y = f->y, args.weights = f->weights;
    args.quantized.tensor = f->quantized;
    return args;
}

#define REFUSES(function, right, change, status, words)                                            \
    do {                                                                                           \
        tn_ledger before = test_ledger(f.ops.scope);                                               \
        args = right(&f);                                                                          \
        change;                                                                                    \
        expect_refused(function(&args, f.ops.stream), status, words, &before, &f);                 \
    } while (0)

static void test_activations_refuse_bad_input(void **state) {
    fixture f = open_fixture();
    tn_activation_args args;
    (void)state;
#define ROW(change, status, words)                                                                 \
    REFUSES(tn_activation_forward, right_activation, change, status, words)
    ROW(args.size = 0, TN_INVALID_ARGUMENT, "args->size");
    ROW(args.activation = TN_ACTIVATION_COUNT, TN_INVALID_ARGUMENT, "activation is 5");
    ROW(args.x.value = 0, TN_STALE_HANDLE, "");
    ROW(args.x = f.bytes, TN_INVALID_ARGUMENT, "x (tensor");
    ROW(args.x = f.quantized, TN_INVALID_ARGUMENT, "x (tensor");
    ROW(args.x = f.absent, TN_INVALID_STATE, "");
    ROW((args.x = f.odd, args.gated = 1), TN_INVALID_ARGUMENT, "even number");
    ROW(args.gated = 1, TN_INVALID_ARGUMENT, "36");
    ROW(args.y = f.narrow, TN_INVALID_ARGUMENT, "y (tensor");
    ROW(args.y = f.tall, TN_INVALID_ARGUMENT, "y (tensor");
    ROW(args.y = f.fp16, TN_INVALID_ARGUMENT, "y (tensor");
    ROW(args.y = f.x, TN_IN_USE, "");
    ROW(args.y = f.elsewhere, TN_INVALID_ARGUMENT, "another device");
    ROW(args.weights = f.column, TN_INVALID_ARGUMENT, "one for each row of x");
    ROW(args.weights = f.x, TN_INVALID_ARGUMENT, "weights (tensor");
    ROW(args.quantized.tensor = f.quantized_wide, TN_INVALID_ARGUMENT, "quantized (tensor");
    ROW(args.quantized.tensor = f.tensor_scaled, TN_INVALID_ARGUMENT, "quantized (tensor");
    ROW(args.quantized.tensor = f.y, TN_INVALID_ARGUMENT, "quantized (tensor");
    ROW(args.quantized.planes = 4, TN_INVALID_ARGUMENT, "quantized.planes is 0x4");
    ROW(args.quantized.amax_epsilon = NAN, TN_INVALID_ARGUMENT, "amax_epsilon");
    ROW((args.y.value = 0, args.quantized.tensor.value = 0), TN_INVALID_ARGUMENT, "no output");
    ROW(args.skip = f.two_flags, TN_INVALID_ARGUMENT, "expected 1");
    ROW(args.skip = f.narrow, TN_INVALID_ARGUMENT, "skip (tensor");
    ROW(args.skip = f.flag, TN_INVALID_STATE, "skip flag"); /* no plane of quantized is valid */
#undef ROW
    close_fixture(&f);
}

static tn_activation_backward_args right_backward(const fixture *f) {
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    args.dy = f->dy, args.x = f->x, args.dx = f->y, args.dbias = f->column;
    args.quantized.tensor = f->quantized;
    args.scope = f->ops.scope;
    return args;
}

static void test_gradients_refuse_bad_input(void **state) {
    fixture f = open_fixture();
    tn_activation_backward_args args;
    (void)state;
#define ROW(change, status, words)                                                                 \
    REFUSES(tn_activation_backward, right_backward, change, status, words)
    ROW(args.size = 1, TN_INVALID_ARGUMENT, "args->size");
    ROW(args.activation = (tn_activation)-1, TN_INVALID_ARGUMENT, "activation is -1");
    ROW(args.dy = f.narrow, TN_INVALID_ARGUMENT, "dy (tensor");
    ROW(args.dy = f.fp16, TN_INVALID_ARGUMENT, "dy (tensor");
    ROW(args.dx = f.tall, TN_INVALID_ARGUMENT, "dx (tensor");
    ROW(args.dx = f.x, TN_IN_USE, "");
    ROW(args.dbias = f.weights, TN_INVALID_ARGUMENT, "one for each column");
    ROW(args.dbias = f.bytes, TN_INVALID_ARGUMENT, "dbias (tensor");
    ROW(args.scope.value = 0, TN_INVALID_ARGUMENT, "scope is {0}");
    ROW((args.dx.value = 0, args.dbias.value = 0, args.quantized.tensor.value = 0),
        TN_INVALID_ARGUMENT, "no output");
#undef ROW
    close_fixture(&f);
}

static tn_bias_gradient_args right_bias(const fixture *f) {
    tn_bias_gradient_args args = TN_BIAS_GRADIENT_ARGS_INIT;
    args.dy = f->x, args.dbias = f->column, args.quantized.tensor = f->quantized;
    args.scope = f->ops.scope;
    return args;
}

static void test_bias_gradients_refuse_bad_input(void **state) {
    fixture f = open_fixture();
    tn_bias_gradient_args args;
    (void)state;
#define ROW(change, status, words) REFUSES(tn_bias_gradient, right_bias, change, status, words)
    ROW(args.size = 1, TN_INVALID_ARGUMENT, "args->size");
    ROW(args.dy = f.bytes, TN_INVALID_ARGUMENT, "dy (tensor");
    ROW(args.dbias = f.weights, TN_INVALID_ARGUMENT, "one for each column");
    ROW(args.dbias.value = 0, TN_INVALID_ARGUMENT, "no output");
    ROW(args.quantized.tensor = f.quantized_wide, TN_INVALID_ARGUMENT, "quantized (tensor");
    ROW(args.scope.value = 0, TN_INVALID_ARGUMENT, "scope is {0}");
#undef ROW
    close_fixture(&f);
}

/* The calls that the rows start from are right, and names are there for messages. */
static void test_what_is_right_is_taken(void **state) {
    fixture f = open_fixture();
    (void)state;
    tn_activation_args forward = right_activation(&f);
    tn_activation_backward_args backward = right_backward(&f);
    tn_bias_gradient_args bias = right_bias(&f);
    assert_int_equal(tn_activation_forward(&forward, f.ops.stream), TN_OK);
    assert_int_equal(tn_activation_backward(&backward, f.ops.stream), TN_OK);
    assert_int_equal(tn_bias_gradient(&bias, f.ops.stream), TN_OK);
    assert_string_equal(tn_activation_name(TN_ACTIVATION_SQUARED_RELU), "squared relu");
    assert_string_equal(tn_activation_name(TN_ACTIVATION_COUNT), "unknown activation");
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_activations_refuse_bad_input),
        cmocka_unit_test(test_gradients_refuse_bad_input),
        cmocka_unit_test(test_bias_gradients_refuse_bad_input),
        cmocka_unit_test(test_what_is_right_is_taken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
