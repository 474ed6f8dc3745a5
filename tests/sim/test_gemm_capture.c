/* GEMMs and captures: the product goes into one, tuning does not and leaves it whole. */
#include "test_graphs.h"
#include "test_ops.h"

#include "tenure_gemm.h"

static tn_gemm_args product_of(const test_ops *ops) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = test_plain(ops->scope, TN_BF16, 64, 32);
    args.b = test_plain(ops->scope, TN_BF16, 48, 32);
    args.d = test_plain(ops->scope, TN_BF16, 64, 48);
    args.scope = ops->scope;
    test_declare_valid(ops, args.a, TN_PLANE_DATA);
    test_declare_valid(ops, args.b, TN_PLANE_DATA);
    test_declare_valid(ops, args.d, TN_PLANE_DATA);
    return args;
}

static void tuning_in_a_capture_is_refused_and_does_not_spoil_it(void **state) {
    (void)state;
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_gemm_args args = product_of(&ops);
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    EXPECT_OK(tn_gemm_tune(&args, ops.stream));
    test_capture_begin(ops.device, ops.stream, TEST_CAPTURE_THREAD_LOCAL);
    EXPECT_STATUS(tn_gemm_tune(&args, ops.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("the stream captures");
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    EXPECT_OK(tn_gemm(&args, ops.stream));
    assert_int_equal(test_is_capturing(ops.device, ops.stream), 1);
    test_graph graph = test_capture_end(ops.device, ops.stream);
    test_graph_destroy(ops.device, &graph);
    test_ops_close(&ops);
    test_close_sim(ops.device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tuning_in_a_capture_is_refused_and_does_not_spoil_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
