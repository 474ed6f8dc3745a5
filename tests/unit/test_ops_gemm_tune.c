/* Tuning, choices and tables of GEMMs on the host device, which has one way for each product. */
#include "ops_planes_support.h"

#include "tenure_gemm.h"

static tn_gemm_args product_of(const test_ops *ops, int64_t m, int64_t n, int64_t k) {
    tn__matrix a = test_matrix_make(TN_BF16, m, k, 1), b = test_matrix_make(TN_BF16, n, k, 2);
    tn__matrix d = test_matrix_make(TN_BF16, m, n, 3);
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = test_tensor_of(ops, ops->scope, &a);
    args.b = test_tensor_of(ops, ops->scope, &b);
    args.d = test_tensor_of(ops, ops->scope, &d);
    args.scope = ops->scope;
    test_matrix_free(&a), test_matrix_free(&b), test_matrix_free(&d);
    return args;
}

static void tuning_checks_and_leaves_everything_as_it_was(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_gemm_args args = product_of(&ops, 5, 7, 9), wrong = args;
    tn__matrix before = test_fetch_matrix(&ops, args.d);
    tn_ledger ledger = test_ledger(ops.scope);
    EXPECT_OK(tn_gemm_tune(&args, ops.stream));
    tn_ledger after = test_ledger(ops.scope);
    test_expect_same_ledger(&ledger, &after);
    tn__matrix kept = test_fetch_matrix(&ops, args.d);
    test_expect_same_matrix(&kept, &before);
    wrong.b = args.a;
    EXPECT_STATUS(tn_gemm_tune(&wrong, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tn_gemm_tune: d (tensor");
    wrong = args, wrong.scope = (tn_scope){0};
    EXPECT_STATUS(tn_gemm_tune(&wrong, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("name a scope");
    EXPECT_STATUS(tn_gemm_tune(NULL, ops.stream), TN_INVALID_ARGUMENT);
    test_matrix_free(&before), test_matrix_free(&kept);
    test_ops_close_host(&ops);
}

static void there_is_one_algorithm_and_it_can_be_pinned(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_gemm_args args = product_of(&ops, 5, 7, 9);
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.algorithm, 1);
    assert_int_equal(choice.algorithms, 1);
    assert_int_equal(choice.is_measured, 0);
    assert_true(choice.scratch_bytes > 0);
    assert_string_equal(choice.description, "the host's definition");
    args.algorithm = 1;
    EXPECT_OK(tn_gemm(&args, ops.stream));
    args.algorithm = 2;
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("algorithm is 2, expected at most 1");
    EXPECT_STATUS(tn_gemm_choice_get(&args, &choice), TN_INVALID_ARGUMENT);
    args.algorithm = 0;
    choice.size = 3;
    EXPECT_STATUS(tn_gemm_choice_get(&args, &choice), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_gemm_choice_get(&args, NULL), TN_INVALID_ARGUMENT);
    assert_int_equal(test_state(args.d, TN_PLANE_DATA), TN_PLANE_VALID);
    test_ops_close_host(&ops);
}

/* Planes that are not there do not matter to a choice; of FP8, either. */
static void a_choice_needs_no_planes(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    args.a = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 40, 130);
    args.b = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 24, 130);
    args.d = test_plain(ops.scope, TN_BF16, 40, 24);
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.algorithms, 1);
    assert_int_equal(test_state(args.a, TN_PLANE_ROW), TN_PLANE_ABSENT);
    test_ops_close_host(&ops);
}

static void there_is_no_table_on_the_host(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    EXPECT_STATUS(tn_gemm_table_save(ops.device, "/tmp/never"), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("one way");
    EXPECT_STATUS(tn_gemm_table_load(ops.device, "/dev/null"), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_gemm_table_load(ops.device, ""), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_gemm_table_save(ops.device, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_gemm_table_save(NULL, "/tmp/never"), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_gemm_table_load(ops.device, "/dev/zero"), TN_CORRUPT_INPUT);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tuning_checks_and_leaves_everything_as_it_was),
        cmocka_unit_test(there_is_one_algorithm_and_it_can_be_pinned),
        cmocka_unit_test(a_choice_needs_no_planes),
        cmocka_unit_test(there_is_no_table_on_the_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
