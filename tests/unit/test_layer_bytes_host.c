/* What each layer leaves alive after each call, on the host: see test_layer_bytes. */
#include "test_layers.h"

static void between_calls_only_what_is_saved_is_alive(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    assert_int_equal(test_layer_bytes(&ops, 0, 0), 960);
    test_ops_close_host(&ops);
}

/* [K, N] bytes, and a scale for each tile, in rows of a multiple of four. */
static size_t col_bytes(int64_t rows, int64_t cols) {
    const size_t n = (size_t)rows, k = (size_t)cols;
    return n * k + (k + 127) / 128 * (((n + 127) / 128 + 3) / 4 * 4) * sizeof(float);
}

/* An MLP's weights keep and release COL each by its own rule; of two that release it, one is there
 * at a time. */
static void each_weight_releases_by_its_own_rule(void **state) {
    (void)state;
    for (unsigned frozen = 0; frozen < 4; frozen++) {
        const tn_format blocks = TN_FORMAT_FP8_BLOCK_2D;
        const test_layer_config config = {.kind = TEST_NORM_MLP,
                                          .format = {blocks, blocks},
                                          .dtype = TN_BF16,
                                          .frozen = frozen,
                                          .policy = TN_POLICY_UNTIL_LAST_USE};
        test_ops ops = test_ops_open_host();
        test_layer l = test_layer_open(&ops, &config);
        size_t all = 0, largest = 0;
        EXPECT_OK(test_layer_forward(&l, ops.stream));
        assert_int_equal(test_ledger(l.saved_scope).total_bytes, test_layer_saved_bytes(&config));
        EXPECT_OK(test_layer_backward(&l, ops.stream));
        for (int i = 0; i < 2; i++) {
            int64_t rows, cols;
            test_layer_shape(&config, i, &rows, &cols);
            const size_t bytes = col_bytes(rows, cols);
            const int is_frozen = frozen >> i & 1u;
            assert_int_equal(test_state(l.weight[i], TN_PLANE_COL),
                             is_frozen ? TN_PLANE_ABSENT : TN_PLANE_VALID);
            all += bytes;
            if (bytes > largest) largest = bytes;
        }
        const tn_ledger model = test_ledger(l.model);
        const int w2_ends_first = frozen >> 1 & 1u;
        assert_int_equal(model.peak_plane_bytes[TN_PLANE_COL], w2_ends_first ? largest : all);
        test_ops_close_host(&ops);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(between_calls_only_what_is_saved_is_alive),
        cmocka_unit_test(each_weight_releases_by_its_own_rule),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
