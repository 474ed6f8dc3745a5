/* tn_quantize_list on the host device: each tensor's planes are those of tn_quantize, and all that
 * is wrong with one of them is told before anything has changed. */
#include "ops_planes_support.h"

#include <math.h>
#include <string.h>

#include "tenure_grouped.h"

enum { COUNT = TN_QUANTIZE_LIST_MAX };

static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};

static void each_tensor_is_quantized_as_alone(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (unsigned way = 0; way < 6; way++) {
        tn_scope scope = test_ops_scope(&ops, TN_SCOPE_OP, "list");
        tn_quantize_list_args args = TN_QUANTIZE_LIST_ARGS_INIT;
        tn_tensor src[COUNT], dst[COUNT];
        tn__matrix matrix[COUNT];
        for (int i = 0; i < COUNT; i++) {
            int64_t rows = i % 9 == 4 ? 0 : 1 + i * 13 % 140, cols = i % 11 == 7 ? 0 : 1 + i * 7;
            matrix[i] = test_matrix_make(TN_BF16, rows, cols, (uint32_t)i);
            src[i] = test_tensor_of(&ops, scope, &matrix[i]);
            dst[i] = test_fp8(scope, formats[way % 2], TN_E4M3, rows, cols);
        }
        args.src = src, args.dst = dst, args.count = COUNT, args.scope = scope;
        args.planes = way / 2 + 1;
        EXPECT_OK(tn_quantize_list(&args, ops.stream));
        for (int i = 0; i < COUNT; i++) {
            for (int p = 0; p < 2; p++) {
                tn_plane plane = p ? TN_PLANE_COL : TN_PLANE_ROW;
                int is_made = args.planes >> p & 1;
                assert_int_equal(test_state(dst[i], plane),
                                 is_made ? TN_PLANE_VALID : TN_PLANE_ABSENT);
                if (!is_made) continue;
                test_plane fetched = test_fetch_plane(&ops, dst[i], plane);
                test_plane_expect_quantized(&fetched, &matrix[i], TN_SCALE_POW2, 0.0f);
                test_plane_free(&fetched);
            }
            test_matrix_free(&matrix[i]);
        }
        EXPECT_OK(tn_scope_close(scope));
    }
    test_ops_close_host(&ops);
}

/* ---- mistakes -------------------------------------------------------------------------------- */

typedef struct pair_list {
    tn_tensor src[3], dst[3];
} pair_list;

static tn_tensor valid(const test_ops *ops, tn_dtype dtype, int64_t cols) {
    tn_tensor tensor = test_plain(ops->scope, dtype, 5, cols);
    test_declare_valid(ops, tensor, TN_PLANE_DATA);
    return tensor;
}

static tn_tensor scaled(const test_ops *ops, tn_scale_mode mode) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    config.format = TN_FORMAT_FP8_BLOCK_1D, config.dtype = TN_E4M3, config.scale_mode = mode;
    config.rank = 2, config.shape[0] = 5, config.shape[1] = 9;
    EXPECT_OK(tn_tensor_create(ops->scope, &config, &tensor));
    return tensor;
}

static void expect_refused(const test_ops *ops, const tn_quantize_list_args *args, tn_status status,
                           const char *words) {
    tn_ledger before = test_ledger(ops->scope);
    EXPECT_STATUS(tn_quantize_list(args, ops->stream), status);
    EXPECT_ERROR_HAS(words);
    tn_ledger after = test_ledger(ops->scope);
    test_expect_same_ledger(&before, &after);
}

static void each_mistake_is_refused_by_name(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    pair_list right, wrong;
    for (int i = 0; i < 3; i++) {
        right.src[i] = valid(&ops, TN_BF16, 9);
        right.dst[i] = scaled(&ops, TN_SCALE_POW2);
    }
    tn_quantize_list_args args = TN_QUANTIZE_LIST_ARGS_INIT, bad;
    args.src = wrong.src, args.dst = wrong.dst, args.count = 3, args.scope = ops.scope;
#define WITH(change, status, words)                                                                \
    do {                                                                                           \
        wrong = right, bad = args;                                                                 \
        change;                                                                                    \
        expect_refused(&ops, &bad, status, words);                                                 \
    } while (0)
    WITH(bad.size--, TN_INVALID_ARGUMENT, "initializer macro");
    WITH(bad.count = -1, TN_INVALID_ARGUMENT, "count is -1");
    WITH(bad.count = COUNT + 1, TN_INVALID_ARGUMENT, "expected 0 to 64");
    WITH(bad.src = NULL, TN_INVALID_ARGUMENT, "NULL");
    WITH(bad.dst = NULL, TN_INVALID_ARGUMENT, "NULL");
    WITH(bad.planes = 4, TN_INVALID_ARGUMENT, "planes is 0x4");
    WITH(bad.amax_epsilon = NAN, TN_INVALID_ARGUMENT, "amax_epsilon");
    WITH(wrong.src[2] = valid(&ops, TN_FP32, 9), TN_INVALID_ARGUMENT, "src");
    WITH(wrong.src[2] = valid(&ops, TN_BF16, 10), TN_INVALID_ARGUMENT, "5 x 10");
    WITH(wrong.src[1].value = 0, TN_STALE_HANDLE, "");
    WITH(wrong.src[1] = test_plain(ops.scope, TN_BF16, 5, 9), TN_INVALID_STATE, "");
    WITH(wrong.dst[2] = wrong.dst[0], TN_INVALID_ARGUMENT, "twice in the list");
    WITH(wrong.dst[1] = wrong.src[1], TN_INVALID_ARGUMENT, "dst");
    WITH(wrong.dst[1] = scaled(&ops, TN_SCALE_FP32), TN_INVALID_ARGUMENT, "that of the first");
    WITH(wrong.dst[1] = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 5, 9),
         TN_INVALID_ARGUMENT, "dst");
    WITH(wrong.dst[1] = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E5M2, 5, 9),
         TN_INVALID_ARGUMENT, "dst");
    WITH(bad.skip = wrong.src[0], TN_INVALID_ARGUMENT, "skip");
    bad = args;
    bad.count = 0, bad.src = bad.dst = NULL;
    EXPECT_OK(tn_quantize_list(&bad, ops.stream));
    args.src = right.src, args.dst = right.dst;
    EXPECT_OK(tn_quantize_list(&args, ops.stream));
    test_ops_close_host(&ops);
}

/* With a flag the planes must be there; while it is 1 they keep their bytes. */
static void the_skip_flag_is_for_the_whole_list(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix first = test_matrix_make(TN_BF16, 40, 70, 1),
               second = test_matrix_make(TN_BF16, 40, 70, 2);
    const float flags[] = {1.0f, 0.0f};
    tn_tensor src[2], dst[2];
    tn_quantize_list_args args = TN_QUANTIZE_LIST_ARGS_INIT;
    for (int i = 0; i < 2; i++) {
        src[i] = test_tensor_of(&ops, ops.scope, &second);
        dst[i] = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 40, 70);
    }
    args.src = src, args.dst = dst, args.count = 2, args.scope = ops.scope, args.planes = 3;
    args.skip = test_plain(ops.scope, TN_FP32, 1, 1);
    test_write(&ops, args.skip, &flags[0]);
    expect_refused(&ops, &args, TN_INVALID_STATE, "not valid");
    for (int i = 0; i < 2; i++) {
        dst[i] = test_quantized(&ops, ops.scope, &first, TN_FORMAT_FP8_BLOCK_1D, 3);
    }
    for (int flag = 0; flag < 2; flag++) {
        test_write(&ops, args.skip, &flags[flag]);
        EXPECT_OK(tn_quantize_list(&args, ops.stream));
        for (int i = 0; i < 2; i++) {
            test_plane col = test_fetch_plane(&ops, dst[i], TN_PLANE_COL);
            test_plane_expect_quantized(&col, flag ? &second : &first, TN_SCALE_POW2, 0.0f);
            test_plane_free(&col);
        }
    }
    test_matrix_free(&first), test_matrix_free(&second);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_tensor_is_quantized_as_alone),
        cmocka_unit_test(each_mistake_is_refused_by_name),
        cmocka_unit_test(the_skip_flag_is_for_the_whole_list),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
