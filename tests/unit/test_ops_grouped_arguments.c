/* What the grouped ops refuse: one row a mistake, with its status and words, nothing changed. */
#include "ops_groups_support.h"

#include <string.h>

enum { ROWS = 20, COLS = 70, GROUPS = 3, SCALES = 4000 };

typedef struct fixture {
    test_ops ops, other;
    tn_tensor src, offsets, error, row_data, row_scale, col_data, col_scale, skip;
    tn_grouped_plane none;
    tn_tensor wrong_bytes, small, fp32_small, fp8, elsewhere, fresh, fresh_word;
} fixture;

static tn_tensor valid(const test_ops *ops, tn_tensor tensor) {
    test_declare_valid(ops, tensor, TN_PLANE_DATA);
    return tensor;
}

static fixture open_fixture(void) {
    static const int64_t offsets[GROUPS + 1] = {0, 5, 5, ROWS};
    static const uint32_t no_error;
    static const float no_skip;
    fixture f = {.ops = test_ops_open_host(), .other = test_ops_open_host(), .none = {{0}, {0}}};
    tn_scope scope = f.ops.scope;
    f.src = valid(&f.ops, test_plain(scope, TN_BF16, ROWS, COLS));
    f.offsets = test_bytes(&f.ops, scope, offsets, sizeof offsets);
    f.error = test_bytes(&f.ops, scope, &no_error, sizeof no_error);
    f.row_data = valid(&f.ops, test_plain(scope, TN_BYTE, ROWS, COLS));
    f.col_data = valid(&f.ops, test_plain(scope, TN_BYTE, ROWS, COLS));
    f.row_scale = valid(&f.ops, test_plain(scope, TN_FP32, 1, SCALES));
    f.col_scale = valid(&f.ops, test_plain(scope, TN_FP32, 1, SCALES));
    f.skip = test_plain(scope, TN_FP32, 1, 1);
    test_write(&f.ops, f.skip, &no_skip);
    f.wrong_bytes = test_bytes(&f.ops, scope, offsets, sizeof offsets - 1);
    f.small = valid(&f.ops, test_plain(scope, TN_BYTE, ROWS, COLS - 1));
    f.fp32_small = valid(&f.ops, test_plain(scope, TN_FP32, 1, 2));
    f.fp8 = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, COLS);
    f.fresh_word = test_plain(scope, TN_BYTE, 1, 4);
    f.fresh = test_plain(scope, TN_BYTE, ROWS, COLS);
    f.elsewhere = valid(&f.other, test_plain(f.other.scope, TN_BYTE, ROWS, COLS));
    return f;
}

static void close_fixture(fixture *f) {
    test_ops_close_host(&f->ops);
    test_ops_close_host(&f->other);
}

static tn_grouped_quantize_args right_args(const fixture *f) {
    tn_grouped_quantize_args args = TN_GROUPED_QUANTIZE_ARGS_INIT;
    args.src = f->src;
    args.offsets = f->offsets;
    args.error = f->error;
    args.row = (tn_grouped_plane){f->row_data, f->row_scale};
    args.col = (tn_grouped_plane){f->col_data, f->col_scale};
    args.scope = f->ops.scope;
    return args;
}

/* ---- mistakes -------------------------------------------------------------------------------- */

typedef void (*spoil)(tn_grouped_quantize_args *args, const fixture *f);

#define SPOIL(name, change)                                                                        \
    static void name(tn_grouped_quantize_args *args, const fixture *f) {                           \
        (void)f;                                                                                   \
        change;                                                                                    \
    }
SPOIL(wrong_size, args->size--)
SPOIL(no_src, args->src.value = 0)
SPOIL(bytes_as_src, args->src = f->row_data)
SPOIL(fp8_as_src, args->src = f->fp8)
SPOIL(no_offsets, args->offsets.value = 0)
SPOIL(odd_offsets, args->offsets = f->wrong_bytes)
SPOIL(short_offsets, args->offsets = f->error)
SPOIL(fp32_offsets, args->offsets = f->row_scale)
SPOIL(absent_offsets, args->offsets = f->fresh)
SPOIL(no_error_word, args->error.value = 0)
SPOIL(long_error, args->error = f->offsets)
SPOIL(fp32_error, args->error = f->skip)
SPOIL(unwritten_error, args->error = f->fresh_word)
SPOIL(plain_format, args->format = TN_FORMAT_PLAIN)
SPOIL(bf16_dtype, args->dtype = TN_BF16)
SPOIL(odd_mode, args->scale_mode = (tn_scale_mode)7)
SPOIL(negative_epsilon, args->amax_epsilon = -1.0f)
SPOIL(no_planes, args->row = args->col = f->none)
SPOIL(small_data, args->row.data = f->small)
SPOIL(fp32_data, args->col.data = f->row_scale)
SPOIL(bytes_as_scale, args->col.scale = f->small)
SPOIL(half_a_plane, args->col.scale.value = 0)
SPOIL(same_data, args->col.data = f->row_data)
SPOIL(same_scale, args->col.scale = f->row_scale)
SPOIL(offsets_as_data, args->offsets = args->col.data)
SPOIL(foreign_data, args->row.data = f->elsewhere)
SPOIL(long_skip, args->skip = f->fp32_small)
SPOIL(bytes_as_skip, args->skip = f->wrong_bytes)
SPOIL(skip_and_absent, (args->skip = f->skip, args->row.data = f->fresh))

static const struct mistake {
    spoil spoil;
    tn_status status;
    const char *words;
} mistakes[] = {
    {wrong_size, TN_INVALID_ARGUMENT, "initializer macro"},
    {no_src, TN_STALE_HANDLE, ""},
    {bytes_as_src, TN_INVALID_ARGUMENT, "src"},
    {fp8_as_src, TN_INVALID_ARGUMENT, "src"},
    {no_offsets, TN_STALE_HANDLE, ""},
    {odd_offsets, TN_INVALID_ARGUMENT, "has 31 bytes, expected 8 for each group"},
    {short_offsets, TN_INVALID_ARGUMENT, "has 4 bytes"},
    {fp32_offsets, TN_INVALID_ARGUMENT, "offsets"},
    {absent_offsets, TN_INVALID_STATE, ""},
    {no_error_word, TN_STALE_HANDLE, ""},
    {long_error, TN_INVALID_ARGUMENT, "has 32 bytes, expected 4"},
    {fp32_error, TN_INVALID_ARGUMENT, "error"},
    {unwritten_error, TN_INVALID_STATE, "write 0 there first"},
    {plain_format, TN_INVALID_ARGUMENT, "format is 0"},
    {bf16_dtype, TN_INVALID_ARGUMENT, "dtype is"},
    {odd_mode, TN_INVALID_ARGUMENT, "scale_mode is 7"},
    {negative_epsilon, TN_INVALID_ARGUMENT, "amax_epsilon"},
    {no_planes, TN_INVALID_ARGUMENT, "nothing to make"},
    {small_data, TN_INVALID_ARGUMENT, "has 1380 bytes, expected at least 1400"},
    {fp32_data, TN_INVALID_ARGUMENT, "col"},
    {bytes_as_scale, TN_INVALID_ARGUMENT, "col"},
    {half_a_plane, TN_STALE_HANDLE, ""},
    {same_data, TN_INVALID_ARGUMENT, "one tensor is given for two"},
    {same_scale, TN_INVALID_ARGUMENT, "one tensor is given for two"},
    {offsets_as_data, TN_INVALID_ARGUMENT, "one tensor is given for two"},
    {foreign_data, TN_INVALID_ARGUMENT, "another device"},
    {long_skip, TN_INVALID_ARGUMENT, "has 2 elements, expected 1"},
    {bytes_as_skip, TN_INVALID_ARGUMENT, "skip"},
    {skip_and_absent, TN_INVALID_STATE, ""},
};

static void expect_unchanged(const fixture *f, const tn_ledger *before) {
    tn_ledger after = test_ledger(f->ops.scope);
    test_expect_same_ledger(before, &after);
    assert_int_equal(test_state(f->error, TN_PLANE_DATA), TN_PLANE_VALID);
    assert_int_equal(test_state(f->row_data, TN_PLANE_DATA), TN_PLANE_VALID);
    assert_int_equal(test_state(f->fresh, TN_PLANE_DATA), TN_PLANE_ABSENT);
}

static void each_mistake_is_refused_by_name(void **state) {
    (void)state;
    fixture f = open_fixture();
    tn_ledger before = test_ledger(f.ops.scope);
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        tn_grouped_quantize_args args = right_args(&f);
        mistakes[i].spoil(&args, &f);
        EXPECT_STATUS(tn_grouped_quantize(&args, f.ops.stream), mistakes[i].status);
        EXPECT_ERROR_HAS(mistakes[i].words);
        expect_unchanged(&f, &before);
    }
    EXPECT_STATUS(tn_grouped_quantize(NULL, f.ops.stream), TN_INVALID_ARGUMENT);
    tn_grouped_quantize_args args = right_args(&f);
    EXPECT_OK(tn_grouped_quantize(&args, f.ops.stream));
    close_fixture(&f);
}

/* Empty sources launch nothing, and the offsets are not looked at. */
static void nothing_to_quantize_is_success(void **state) {
    static const int64_t shapes[][2] = {{0, 70}, {20, 0}, {0, 0}};
    (void)state;
    fixture f = open_fixture();
    for (int i = 0; i < 3; i++) {
        tn_driver_stats before = TN_DRIVER_STATS_INIT, after = TN_DRIVER_STATS_INIT;
        tn_grouped_quantize_args args = right_args(&f);
        args.src = valid(&f.ops, test_plain(f.ops.scope, TN_BF16, shapes[i][0], shapes[i][1]));
        EXPECT_OK(tn_device_driver_stats(f.ops.device, &before));
        EXPECT_OK(tn_grouped_quantize(&args, f.ops.stream));
        EXPECT_OK(tn_device_driver_stats(f.ops.device, &after));
        assert_int_equal(after.calls[TN_CALL_LAUNCH], before.calls[TN_CALL_LAUNCH]);
    }
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_mistake_is_refused_by_name),
        cmocka_unit_test(nothing_to_quantize_is_success),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
