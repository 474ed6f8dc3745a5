/* Padding of groups, gathers and weighted sums of rows on the host device, against what their
 * header says, worked out here element by element; and a mixture's way there and back. */
#include "ops_groups_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t no_error;

static tn_tensor numbers(const test_ops *ops, tn_scope scope, const int64_t *from, int64_t count) {
    return test_bytes(ops, scope, from, (size_t)count * sizeof(int64_t));
}

static uint32_t error_of(const test_ops *ops, tn_tensor error) {
    uint32_t word;
    test_read(ops, error, &word);
    return word;
}

/* ---- pad ------------------------------------------------------------------------------------ */

enum { GROUPS = 5, ROOM = 2048, ROWS_MAX = 1200 };

typedef struct padding {
    int64_t offsets[GROUPS + 1], rows, multiple, room;
    int64_t permutation[ROWS_MAX];
    int has_permutation;
    int64_t padded_offsets[GROUPS + 1], map[ROOM], inverse[ROWS_MAX];
    uint32_t error;
} padding;

static void set_counts(padding *p, const int64_t *counts, int64_t spare) {
    p->offsets[0] = 0;
    for (int g = 0; g < GROUPS; g++)
        p->offsets[g + 1] = p->offsets[g] + counts[g];
    p->rows = p->offsets[GROUPS] + spare;
    for (int64_t r = 0; r < p->rows; r++)
        p->permutation[r] = (r * 7 + 3) % 1000;
}

/* What was in the outputs before is -77 everywhere. */
static void run_padding(const test_ops *ops, padding *p) {
    tn_scope scope = test_ops_scope(ops, TN_SCOPE_OP, "pad");
    tn_pad_groups_args args = TN_PAD_GROUPS_ARGS_INIT;
    for (int64_t i = 0; i < ROOM; i++)
        p->map[i] = -77;
    for (int64_t i = 0; i < ROWS_MAX; i++)
        p->inverse[i] = -77;
    for (int64_t i = 0; i <= GROUPS; i++)
        p->padded_offsets[i] = -77;
    args.offsets = numbers(ops, scope, p->offsets, GROUPS + 1);
    if (p->has_permutation) args.permutation = numbers(ops, scope, p->permutation, p->rows);
    args.padded_offsets = numbers(ops, scope, p->padded_offsets, GROUPS + 1);
    args.map = numbers(ops, scope, p->map, p->room);
    args.inverse = numbers(ops, scope, p->inverse, p->rows);
    args.error = test_bytes(ops, scope, &no_error, sizeof no_error);
    args.rows = p->rows;
    args.multiple = p->multiple;
    args.scope = scope;
    EXPECT_OK(tn_pad_groups(&args, ops->stream));
    test_read(ops, args.padded_offsets, p->padded_offsets);
    test_read(ops, args.map, p->map);
    test_read(ops, args.inverse, p->inverse);
    p->error = error_of(ops, args.error);
    EXPECT_OK(tn_scope_close(scope));
}

static void expect_padding(const padding *p) {
    int64_t at = 0;
    for (int g = 0; g < GROUPS; g++) {
        assert_int_equal(p->padded_offsets[g], at);
        for (int64_t r = p->offsets[g]; r < p->offsets[g + 1]; r++, at++) {
            assert_int_equal(p->map[at], p->has_permutation ? p->permutation[r] : r);
            assert_int_equal(p->inverse[r], at);
        }
        for (; at % p->multiple != 0; at++)
            assert_int_equal(p->map[at], -1);
    }
    assert_int_equal(p->padded_offsets[GROUPS], at);
    for (; at < p->room; at++)
        assert_int_equal(p->map[at], -1);
    for (int64_t r = p->offsets[GROUPS]; r < p->rows; r++)
        assert_int_equal(p->inverse[r], -1);
}

static void groups_begin_at_multiples(void **state) {
    static const int64_t counts[][GROUPS] = {
        {128, 0, 256, 1, 127}, {0, 0, 0, 0, 0}, {15, 17, 16, 0, 1}, {300, 300, 300, 100, 1}};
    static const int64_t multiples[] = {1, 16, 128, 100};
    (void)state;
    test_ops ops = test_ops_open_host();
    static padding p;
    for (unsigned i = 0; i < 32; i++) {
        p.multiple = multiples[i / 4 % 4];
        p.has_permutation = i / 16 % 2;
        p.room = ROOM;
        set_counts(&p, counts[i % 4], i % 3);
        run_padding(&ops, &p);
        assert_int_equal(p.error, TN_GROUPED_OK);
        expect_padding(&p);
    }
    test_ops_close_host(&ops);
}

static void expect_nothing_written(const padding *p) {
    for (int64_t i = 0; i < p->room; i++)
        assert_int_equal(p->map[i], -77);
    for (int64_t i = 0; i < p->rows; i++)
        assert_int_equal(p->inverse[i], -77);
    for (int64_t i = 0; i <= GROUPS; i++)
        assert_int_equal(p->padded_offsets[i], -77);
}

static void too_little_room_and_wrong_offsets_write_nothing(void **state) {
    static const int64_t counts[GROUPS] = {3, 0, 129, 16, 1};
    (void)state;
    test_ops ops = test_ops_open_host();
    static padding p;
    p = (padding){.multiple = 16, .room = 16 + 144 + 16 + 16};
    set_counts(&p, counts, 2);
    run_padding(&ops, &p);
    assert_int_equal(p.error, TN_GROUPED_OK);
    expect_padding(&p);
    p.room--;
    run_padding(&ops, &p);
    assert_int_equal(p.error, TN_GROUPED_OVER_CAPACITY);
    expect_nothing_written(&p);
    p.room++;
    p.offsets[2] = 1;
    run_padding(&ops, &p);
    assert_int_equal(p.error, TN_GROUPED_BAD_OFFSETS);
    expect_nothing_written(&p);
    test_ops_close_host(&ops);
}

/* ---- gather --------------------------------------------------------------------------------- */

enum { SOURCE = 40, RESULT = 70 };

/* Rows in no order, some twice, some not at all, some from nowhere. */
static void fill_map(int64_t *map, int64_t count, int64_t rows) {
    for (int64_t i = 0; i < count; i++)
        map[i] = i % 11 == 4 ? -1 - i : (i * 13 + 5) % rows;
}

static tn__matrix gathered(const tn__matrix *src, const int64_t *map, int64_t rows) {
    tn__matrix result = test_matrix_make(src->dtype, rows, src->cols, 1);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < src->cols; c++) {
            float value =
                map[r] < 0 || map[r] >= src->rows ? 0.0f : test_matrix_get(src, map[r], c);
            test_matrix_set(&result, r, c, value);
        }
    }
    return result;
}

static void gathering_plain_rows_takes_them_from_the_map(void **state) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    static const int64_t cols[] = {1, 7, 8, 64, 130};
    int64_t map[RESULT];
    (void)state;
    test_ops ops = test_ops_open_host();
    fill_map(map, RESULT, SOURCE);
    for (unsigned i = 0; i < 15; i++) {
        tn_scope scope = test_ops_scope(&ops, TN_SCOPE_OP, "gather");
        tn__matrix src = test_matrix_make(types[i % 3], SOURCE, cols[i / 3], i);
        tn_gather_rows_args args = TN_GATHER_ROWS_ARGS_INIT;
        args.src = test_tensor_of(&ops, scope, &src);
        args.map = numbers(&ops, scope, map, RESULT);
        args.dst = test_plain(scope, src.dtype, RESULT, src.cols);
        args.error = test_bytes(&ops, scope, &no_error, sizeof no_error);
        EXPECT_OK(tn_gather_rows(&args, ops.stream));
        tn__matrix result = test_fetch_matrix(&ops, args.dst);
        tn__matrix expected = gathered(&src, map, RESULT);
        test_expect_same_matrix(&result, &expected);
        assert_int_equal(error_of(&ops, args.error), TN_GROUPED_OK);
        test_matrix_free(&src), test_matrix_free(&result), test_matrix_free(&expected);
        EXPECT_OK(tn_scope_close(scope));
    }
    test_ops_close_host(&ops);
}

/* Bytes, scales and their padding are those of the gathered rows, quantized. */
static void gathering_quantized_rows_equals_quantizing_gathered_ones(void **state) {
    static const int64_t cols[] = {1, 128, 300};
    int64_t map[RESULT];
    (void)state;
    test_ops ops = test_ops_open_host();
    fill_map(map, RESULT, SOURCE);
    for (unsigned i = 0; i < 6; i++) {
        int64_t rows = i / 3 ? RESULT : RESULT - 1; /* with and without padding of the scales */
        tn__matrix src = test_matrix_make(TN_BF16, SOURCE, cols[i % 3], i);
        tn__matrix moved = gathered(&src, map, rows);
        tn_gather_rows_args args = TN_GATHER_ROWS_ARGS_INIT;
        args.src = test_quantized(&ops, ops.scope, &src, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW);
        args.dst = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, rows, src.cols);
        args.map = numbers(&ops, ops.scope, map, rows);
        args.error = test_bytes(&ops, ops.scope, &no_error, sizeof no_error);
        EXPECT_OK(tn_gather_rows(&args, ops.stream));
        test_plane result = test_fetch_plane(&ops, args.dst, TN_PLANE_ROW);
        test_plane_expect_quantized(&result, &moved, TN_SCALE_POW2, 0.0f);
        assert_int_equal(test_state(args.dst, TN_PLANE_COL), TN_PLANE_ABSENT);
        test_plane_free(&result);
        test_matrix_free(&src), test_matrix_free(&moved);
    }
    test_ops_close_host(&ops);
}

static void a_number_that_is_no_row_is_an_error_and_no_row(void **state) {
    int64_t map[4] = {1, SOURCE, INT64_MAX, 0};
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix src = test_matrix_make(TN_FP32, SOURCE, 9, 1);
    tn_gather_rows_args args = TN_GATHER_ROWS_ARGS_INIT;
    args.src = test_tensor_of(&ops, ops.scope, &src);
    args.map = numbers(&ops, ops.scope, map, 4);
    args.dst = test_plain(ops.scope, TN_FP32, 4, 9);
    args.error = test_bytes(&ops, ops.scope, &no_error, sizeof no_error);
    EXPECT_OK(tn_gather_rows(&args, ops.stream));
    tn__matrix result = test_fetch_matrix(&ops, args.dst), expected = gathered(&src, map, 4);
    test_expect_same_matrix(&result, &expected);
    assert_int_equal(error_of(&ops, args.error), TN_GROUPED_BAD_MAP);
    test_matrix_free(&src), test_matrix_free(&result), test_matrix_free(&expected);
    test_ops_close_host(&ops);
}

/* ---- combine -------------------------------------------------------------------------------- */

enum { TOKENS = 30 };

static float combined(const tn__matrix *src, const int64_t *map, const float *weights, int64_t each,
                      int64_t t, int64_t c) {
    float sum = 0.0f;
    for (int64_t j = t * each; j < (t + 1) * each; j++) {
        if (map[j] < 0) continue;
        sum = fmaf(weights ? weights[j] : 1.0f, test_matrix_get(src, map[j], c), sum);
    }
    return sum;
}

static void combining_sums_in_rising_order(void **state) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    int64_t map[TOKENS * 8];
    float weights[TOKENS * 8];
    (void)state;
    test_ops ops = test_ops_open_host();
    fill_map(map, (int64_t)TOKENS * 8, SOURCE);
    for (int i = 0; i < TOKENS * 8; i++)
        weights[i] = 1.0f / (float)(3 + i % 17);
    for (unsigned i = 0; i < 18; i++) {
        const int64_t each = i % 2 ? 8 : 1 + i / 9;
        tn_scope scope = test_ops_scope(&ops, TN_SCOPE_OP, "combine");
        tn__matrix src = test_matrix_make(types[i % 3], SOURCE, i % 5 ? 300 : 5, i);
        tn_combine_rows_args args = TN_COMBINE_ROWS_ARGS_INIT;
        args.src = test_tensor_of(&ops, scope, &src);
        args.map = numbers(&ops, scope, map, TOKENS * each);
        if (i % 4) {
            args.weights = test_plain(scope, TN_FP32, TOKENS, each);
            test_write(&ops, args.weights, weights);
        }
        args.dst = test_plain(scope, TN_FP32, TOKENS, src.cols);
        args.error = test_bytes(&ops, scope, &no_error, sizeof no_error);
        EXPECT_OK(tn_combine_rows(&args, ops.stream));
        tn__matrix result = test_fetch_matrix(&ops, args.dst);
        for (int64_t t = 0; t < TOKENS; t++) {
            for (int64_t c = 0; c < src.cols; c++) {
                float sum = combined(&src, map, i % 4 ? weights : NULL, each, t, c);
                assert_true(test_matrix_get(&result, t, c) == sum);
            }
        }
        assert_int_equal(error_of(&ops, args.error), TN_GROUPED_OK);
        test_matrix_free(&src), test_matrix_free(&result);
        EXPECT_OK(tn_scope_close(scope));
    }
    test_ops_close_host(&ops);
}

/* ---- there and back ------------------------------------------------------------------------- */

enum { EXPERTS = 4, WIDTH = 64, HALF = TOKENS / 2 };

/* Token t goes to experts t % 4 and (t + 1) % 4, every fifth of them is dropped. Permuted and
 * padded in one pass and brought back with halves as weights, a token is itself again, or half of
 * it for each copy that was not dropped. */
static void a_token_comes_back_from_its_experts(void **state) {
    int64_t offsets[EXPERTS + 1] = {0}, from[TOKENS * 2], place[TOKENS * 2], rows = 0;
    float weights[TOKENS * 2];
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int e = 0; e < EXPERTS; e++) {
        for (int t = 0; t < TOKENS; t++) {
            for (int j = 0; j < 2; j++) {
                weights[t * 2 + j] = 0.5f;
                if ((t + j) % EXPERTS != e) continue;
                place[t * 2 + j] = t % 5 == 2 && j ? -1 : rows;
                if (place[t * 2 + j] >= 0) from[rows++] = t;
            }
        }
        offsets[e + 1] = rows;
    }
    tn__matrix tokens = test_matrix_make(TN_BF16, TOKENS, WIDTH, 1);
    tn_tensor error = test_bytes(&ops, ops.scope, &no_error, sizeof no_error);
    tn_pad_groups_args pad = TN_PAD_GROUPS_ARGS_INIT;
    tn_gather_rows_args there = TN_GATHER_ROWS_ARGS_INIT, composed = there;
    tn_combine_rows_args back = TN_COMBINE_ROWS_ARGS_INIT;
    const int64_t room = (int64_t)EXPERTS * 16 * 2;
    pad.offsets = numbers(&ops, ops.scope, offsets, EXPERTS + 1);
    pad.permutation = numbers(&ops, ops.scope, from, rows);
    pad.padded_offsets = test_plain(ops.scope, TN_BYTE, EXPERTS + 1, 8);
    pad.map = test_plain(ops.scope, TN_BYTE, room, 8);
    pad.inverse = test_plain(ops.scope, TN_BYTE, rows, 8);
    pad.error = error, pad.rows = rows, pad.multiple = 16, pad.scope = ops.scope;
    EXPECT_OK(tn_pad_groups(&pad, ops.stream));
    there.src = test_tensor_of(&ops, ops.scope, &tokens);
    there.map = pad.map, there.error = error;
    there.dst = test_plain(ops.scope, TN_BF16, room, WIDTH);
    EXPECT_OK(tn_gather_rows(&there, ops.stream));
    composed.src = pad.inverse; /* a map through a map: rows of 8 bytes */
    composed.map = numbers(&ops, ops.scope, place, (int64_t)TOKENS * 2);
    composed.dst = test_plain(ops.scope, TN_BYTE, (int64_t)TOKENS * 2, 8);
    composed.error = error;
    composed.nothing = 255; /* a copy that was dropped stays dropped */
    EXPECT_OK(tn_gather_rows(&composed, ops.stream));
    back.src = there.dst, back.map = composed.dst, back.error = error;
    back.weights = test_plain(ops.scope, TN_FP32, TOKENS, 2);
    test_write(&ops, back.weights, weights);
    back.dst = test_plain(ops.scope, TN_BF16, TOKENS, WIDTH);
    EXPECT_OK(tn_combine_rows(&back, ops.stream));
    tn__matrix result = test_fetch_matrix(&ops, back.dst);
    for (int64_t t = 0; t < TOKENS; t++) {
        for (int64_t c = 0; c < WIDTH; c++) {
            float token = test_matrix_get(&tokens, t, c);
            float expected = t % 5 == 2 ? 0.5f * token : token;
            assert_true(test_matrix_get(&result, t, c) == expected);
        }
    }
    assert_int_equal(error_of(&ops, error), TN_GROUPED_OK);
    test_matrix_free(&tokens), test_matrix_free(&result);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_begin_at_multiples),
        cmocka_unit_test(too_little_room_and_wrong_offsets_write_nothing),
        cmocka_unit_test(gathering_plain_rows_takes_them_from_the_map),
        cmocka_unit_test(gathering_quantized_rows_equals_quantizing_gathered_ones),
        cmocka_unit_test(a_number_that_is_no_row_is_an_error_and_no_row),
        cmocka_unit_test(combining_sums_in_rising_order),
        cmocka_unit_test(a_token_comes_back_from_its_experts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
