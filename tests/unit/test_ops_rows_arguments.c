/* What the ops on rows refuse: one row a mistake, with its status and words, nothing changed. */
#include "ops_groups_support.h"

#include <string.h>

enum { ROWS = 20, COLS = 70, GROUPS = 3, ROOM = 64 };

typedef struct fixture {
    test_ops ops;
    tn_tensor offsets, padded, map, inverse, error, fresh_word, row_map, wide_map, odd;
    tn_tensor bf16, bf16_dst, fp32, bf16_wide, weights, few_weights, vectors, vectors_dst;
    tn_tensor vectors_fp32, tiles;
} fixture;

typedef union any_args {
    tn_pad_groups_args pad;
    tn_gather_rows_args gather;
    tn_combine_rows_args combine;
} any_args;

static tn_tensor valid(const fixture *f, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor tensor = test_plain(f->ops.scope, dtype, rows, cols);
    test_declare_valid(&f->ops, tensor, TN_PLANE_DATA);
    return tensor;
}

static tn_tensor vectors(const fixture *f, tn_scale_mode mode) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    config.format = TN_FORMAT_FP8_BLOCK_1D;
    config.dtype = TN_E4M3;
    config.scale_mode = mode;
    config.rank = 2, config.shape[0] = ROWS, config.shape[1] = COLS;
    EXPECT_OK(tn_tensor_create(f->ops.scope, &config, &tensor));
    test_declare_valid(&f->ops, tensor, TN_PLANE_ROW);
    return tensor;
}

static fixture open_fixture(void) {
    static const int64_t offsets[GROUPS + 1] = {0, 5, 5, ROWS};
    static const int64_t entries[ROWS * 2] = {1, 2, 3};
    static const uint32_t no_error;
    fixture f = {.ops = test_ops_open_host()};
    tn_scope scope = f.ops.scope;
    f.offsets = test_bytes(&f.ops, scope, offsets, sizeof offsets);
    f.error = test_bytes(&f.ops, scope, &no_error, sizeof no_error);
    f.row_map = test_bytes(&f.ops, scope, entries, ROWS * sizeof *entries);
    f.wide_map = test_bytes(&f.ops, scope, entries, sizeof entries);
    f.fresh_word = test_plain(scope, TN_BYTE, 1, 4);
    f.padded = valid(&f, TN_BYTE, GROUPS + 1, 8), f.map = valid(&f, TN_BYTE, ROOM, 8);
    f.inverse = valid(&f, TN_BYTE, ROWS, 8), f.odd = valid(&f, TN_BYTE, 1, ROWS * 8 + 1);
    f.bf16 = valid(&f, TN_BF16, ROWS, COLS), f.bf16_dst = valid(&f, TN_BF16, ROWS, COLS);
    f.fp32 = valid(&f, TN_FP32, ROWS, COLS), f.bf16_wide = valid(&f, TN_BF16, ROWS, COLS + 1);
    f.weights = valid(&f, TN_FP32, ROWS, 2), f.few_weights = valid(&f, TN_FP32, ROWS, 1);
    f.vectors = vectors(&f, TN_SCALE_POW2), f.vectors_dst = vectors(&f, TN_SCALE_POW2);
    f.vectors_fp32 = vectors(&f, TN_SCALE_FP32);
    f.tiles = test_fp8(scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, ROWS, COLS);
    return f;
}

static any_args pad_args(const fixture *f) {
    any_args args = {.pad = TN_PAD_GROUPS_ARGS_INIT};
    args.pad.offsets = f->offsets, args.pad.permutation = f->row_map;
    args.pad.padded_offsets = f->padded, args.pad.map = f->map, args.pad.inverse = f->inverse;
    args.pad.error = f->error, args.pad.rows = ROWS, args.pad.multiple = 16;
    args.pad.scope = f->ops.scope;
    return args;
}

static any_args gather_args(const fixture *f) {
    any_args args = {.gather = TN_GATHER_ROWS_ARGS_INIT};
    args.gather.src = f->bf16, args.gather.map = f->row_map, args.gather.dst = f->bf16_dst;
    args.gather.error = f->error;
    return args;
}

static any_args combine_args(const fixture *f) {
    any_args args = {.combine = TN_COMBINE_ROWS_ARGS_INIT};
    args.combine.src = f->bf16, args.combine.map = f->wide_map, args.combine.weights = f->weights;
    args.combine.dst = f->fp32, args.combine.error = f->error;
    return args;
}

/* ---- mistakes -------------------------------------------------------------------------------- */

typedef enum op { PAD, GATHER, COMBINE } op;
typedef void (*spoil)(any_args *args, const fixture *f);

#define SPOIL(name, change)                                                                        \
    static void name(any_args *args, const fixture *f) {                                           \
        (void)f;                                                                                   \
        change;                                                                                    \
    }
SPOIL(pad_size, args->pad.size--)
SPOIL(negative_rows, args->pad.rows = -1)
SPOIL(no_multiple, args->pad.multiple = 0)
SPOIL(large_multiple, args->pad.multiple = 65537)
SPOIL(more_rows, args->pad.rows = ROWS + 1)
SPOIL(short_padded, args->pad.padded_offsets = f->row_map)
SPOIL(odd_map, args->pad.map = f->odd)
SPOIL(fp32_map, args->pad.map = f->weights)
SPOIL(same_maps, args->pad.inverse = args->pad.permutation)
SPOIL(no_offsets, args->pad.offsets.value = 0)
SPOIL(pad_unwritten_error, args->pad.error = f->fresh_word)
SPOIL(gather_size, args->gather.size--)
SPOIL(other_format, args->gather.dst = f->vectors)
SPOIL(other_type, args->gather.dst = f->fp32)
SPOIL(other_cols, args->gather.dst = f->bf16_wide)
SPOIL(tiles_as_src, args->gather.src = f->tiles)
SPOIL(other_mode, (args->gather.src = f->vectors, args->gather.dst = f->vectors_fp32))
SPOIL(fp8_nothing,
      (args->gather.src = f->vectors, args->gather.dst = f->vectors_dst, args->gather.nothing = 1))
SPOIL(large_nothing, args->gather.nothing = 256)
SPOIL(long_map, args->gather.map = f->wide_map)
SPOIL(in_place, args->gather.dst = args->gather.src)
SPOIL(no_error_word, args->gather.error.value = 0)
SPOIL(long_error, args->gather.error = f->offsets)
SPOIL(combine_size, args->combine.size--)
SPOIL(fp8_src, args->combine.src = f->vectors)
SPOIL(combine_cols, args->combine.dst = f->bf16_wide)
SPOIL(uneven_map, args->combine.map = f->offsets)
SPOIL(too_few_weights, args->combine.weights = f->few_weights)
SPOIL(bf16_weights, args->combine.weights = f->bf16_dst)
SPOIL(combine_in_place, (args->combine.dst = args->combine.src))

static const struct mistake {
    spoil spoil;
    const char *words;
    op operation;
    tn_status status;
} mistakes[] = {
    {pad_size, "initializer macro", PAD, TN_INVALID_ARGUMENT},
    {negative_rows, "rows is -1", PAD, TN_INVALID_ARGUMENT},
    {no_multiple, "multiple is 0", PAD, TN_INVALID_ARGUMENT},
    {large_multiple, "multiple is 65537", PAD, TN_INVALID_ARGUMENT},
    {more_rows, "permutation", PAD, TN_INVALID_ARGUMENT},
    {short_padded, "has 160 bytes, expected 32", PAD, TN_INVALID_ARGUMENT},
    {odd_map, "a multiple of 8", PAD, TN_INVALID_ARGUMENT},
    {fp32_map, "map", PAD, TN_INVALID_ARGUMENT},
    {same_maps, "one tensor is given for two", PAD, TN_INVALID_ARGUMENT},
    {no_offsets, "", PAD, TN_STALE_HANDLE},
    {pad_unwritten_error, "write 0 there first", PAD, TN_INVALID_STATE},
    {gather_size, "initializer macro", GATHER, TN_INVALID_ARGUMENT},
    {other_format, "dst", GATHER, TN_INVALID_ARGUMENT},
    {other_type, "dst", GATHER, TN_INVALID_ARGUMENT},
    {other_cols, "71 columns, expected src's 70", GATHER, TN_INVALID_ARGUMENT},
    {tiles_as_src, "src", GATHER, TN_INVALID_ARGUMENT},
    {other_mode, "scale mode", GATHER, TN_INVALID_ARGUMENT},
    {fp8_nothing, "nothing is 1", GATHER, TN_INVALID_ARGUMENT},
    {large_nothing, "nothing is 256", GATHER, TN_INVALID_ARGUMENT},
    {long_map, "has 320 bytes, expected 160", GATHER, TN_INVALID_ARGUMENT},
    {in_place, "one tensor is given for two", GATHER, TN_INVALID_ARGUMENT},
    {no_error_word, "", GATHER, TN_STALE_HANDLE},
    {long_error, "expected 4", GATHER, TN_INVALID_ARGUMENT},
    {combine_size, "initializer macro", COMBINE, TN_INVALID_ARGUMENT},
    {fp8_src, "src", COMBINE, TN_INVALID_ARGUMENT},
    {combine_cols, "its columns are src's", COMBINE, TN_INVALID_ARGUMENT},
    {uneven_map, "map has 4 numbers", COMBINE, TN_INVALID_ARGUMENT},
    {too_few_weights, "20 elements, expected 40", COMBINE, TN_INVALID_ARGUMENT},
    {bf16_weights, "weights", COMBINE, TN_INVALID_ARGUMENT},
    {combine_in_place, "one tensor is given for two", COMBINE, TN_INVALID_ARGUMENT},
};

static tn_status call(op operation, const any_args *args, tn_stream stream) {
    if (operation == PAD) return tn_pad_groups(&args->pad, stream);
    if (operation == GATHER) return tn_gather_rows(&args->gather, stream);
    return tn_combine_rows(&args->combine, stream);
}

static any_args right_args(op operation, const fixture *f) {
    return operation == PAD ? pad_args(f) : operation == GATHER ? gather_args(f) : combine_args(f);
}

static void each_mistake_is_refused_by_name(void **state) {
    (void)state;
    fixture f = open_fixture();
    const tn_tensor outputs[] = {f.padded, f.map, f.inverse, f.bf16_dst, f.fp32, f.error};
    tn_ledger before = test_ledger(f.ops.scope);
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        any_args args = right_args(mistakes[i].operation, &f);
        mistakes[i].spoil(&args, &f);
        EXPECT_STATUS(call(mistakes[i].operation, &args, f.ops.stream), mistakes[i].status);
        EXPECT_ERROR_HAS(mistakes[i].words);
        tn_ledger after = test_ledger(f.ops.scope);
        test_expect_same_ledger(&before, &after);
        for (size_t o = 0; o < sizeof outputs / sizeof *outputs; o++)
            assert_int_equal(test_state(outputs[o], TN_PLANE_DATA), TN_PLANE_VALID);
    }
    for (int operation = PAD; operation <= COMBINE; operation++) {
        any_args args = right_args((op)operation, &f);
        EXPECT_OK(call((op)operation, &args, f.ops.stream));
    }
    test_ops_close_host(&f.ops);
}

/* No rows, no columns, no groups; no copies of a token are a sum of 0. */
static void nothing_to_move_is_success(void **state) {
    (void)state;
    fixture f = open_fixture();
    any_args pad = pad_args(&f), gather = gather_args(&f), combine = combine_args(&f);
    uint16_t sums[ROWS * COLS];
    pad.pad.offsets = test_bytes(&f.ops, f.ops.scope, (const int64_t[]){0}, 8);
    pad.pad.padded_offsets = test_plain(f.ops.scope, TN_BYTE, 1, 8);
    pad.pad.map = test_plain(f.ops.scope, TN_BYTE, 0, 8);
    pad.pad.rows = 0;
    pad.pad.permutation.value = pad.pad.inverse.value = 0;
    EXPECT_OK(tn_pad_groups(&pad.pad, f.ops.stream));
    gather.gather.map = valid(&f, TN_BYTE, 0, 8);
    gather.gather.dst = test_plain(f.ops.scope, TN_BF16, 0, COLS);
    EXPECT_OK(tn_gather_rows(&gather.gather, f.ops.stream));
    combine.combine.map = valid(&f, TN_BYTE, 0, 8);
    combine.combine.weights.value = 0;
    combine.combine.dst = f.bf16_dst;
    EXPECT_OK(tn_combine_rows(&combine.combine, f.ops.stream));
    test_read(&f.ops, f.bf16_dst, sums);
    for (int i = 0; i < ROWS * COLS; i++)
        assert_int_equal(sums[i], 0);
    test_ops_close_host(&f.ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_mistake_is_refused_by_name),
        cmocka_unit_test(nothing_to_move_is_success),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
