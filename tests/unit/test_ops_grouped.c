/* Grouped quantization on the host device: each group's block is, bit for bit, what the op of one
 * tensor makes of the group, wherever the offsets say that the groups lie. */
#include "ops_groups_support.h"

#include <math.h>
#include <string.h>

#include "op_grouped.h"

static const tn_dtype sources[] = {TN_FP32, TN_BF16, TN_FP16};
static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};

/* ---- one grouped call against calls for each group ------------------------------------------ */

/* The block of a group in a fetched plane against the plane of a tensor of that group alone. */
static void expect_block(const test_grouped *made, tn_plane plane, const tn__matrix *group,
                         int64_t data_at, int64_t *scale_at) {
    const test_grouped_plane *of = plane == TN_PLANE_ROW ? &made->row : &made->col;
    int64_t floats = tn__group_scale_floats(made->format, plane, group->rows, group->cols);
    test_plane alone = test_plane_make(made->format, plane, made->dtype, group->rows, group->cols);
    if (plane == TN_PLANE_ROW) test_quantize(group, &alone, NULL, made->mode, made->epsilon);
    if (plane == TN_PLANE_COL) test_quantize(group, NULL, &alone, made->mode, made->epsilon);
    assert_int_equal(alone.view.layout.scale_bytes, (size_t)floats * sizeof(float));
    assert_memory_equal(of->data + data_at, alone.view.data, alone.view.layout.data_bytes);
    assert_memory_equal(of->scale + *scale_at, alone.view.scale, alone.view.layout.scale_bytes);
    test_plane_free(&alone);
    *scale_at += floats;
}

/* What lies behind the last group must be as it was before. */
static void expect_untouched(const test_grouped_plane *of, int64_t data_at, int64_t scale_at) {
    const uint8_t *scale = (const uint8_t *)(of->scale + scale_at);
    for (int64_t i = data_at; i < of->data_bytes; i++)
        assert_int_equal(of->data[i], TEST_GROUPED_BEFORE);
    for (int64_t i = 0; i < (of->scale_floats - scale_at) * 4; i++)
        assert_int_equal(scale[i], TEST_GROUPED_BEFORE);
}

static void expect_plane(const test_grouped *made, tn_plane plane) {
    const test_grouped_plane *of = plane == TN_PLANE_ROW ? &made->row : &made->col;
    int64_t scale_at = 0, end = made->offsets[made->groups];
    for (int64_t g = 0; g < made->groups; g++) {
        tn__matrix group = test_group(made, g);
        if (group.rows > 0)
            expect_block(made, plane, &group, made->offsets[g] * group.cols, &scale_at);
    }
    expect_untouched(of, end * made->src.cols, scale_at);
}

static void check(const test_ops *ops, test_grouped *made) {
    test_grouped_run(ops, made);
    assert_int_equal(made->error, TN_GROUPED_OK);
    if (made->planes & TN_QUANTIZE_ROW) expect_plane(made, TN_PLANE_ROW);
    if (made->planes & TN_QUANTIZE_COL) expect_plane(made, TN_PLANE_COL);
    test_grouped_end(made);
}

/* Counts around the block, none, one, and rows behind the last group. */
static void each_group_equals_the_tensor_alone(void **state) {
    static const int64_t counts[][6] = {
        {128, 0, 256, 1, 127, 129}, {0, 0, 0, 0, 0, 0},       {0, 3, 0, 0, 5, 0},
        {1, 1, 1, 1, 1, 1},         {130, 126, 4, 511, 2, 0},
    };
    static const int64_t cols[] = {128, 1, 200, 515};
    (void)state;
    test_ops ops = test_ops_open_host();
    for (unsigned i = 0; i < 60; i++) {
        test_grouped made = {.groups = 6,
                             .format = formats[i % 2],
                             .dtype = i % 5 ? TN_E4M3 : TN_E5M2,
                             .mode = i % 3 ? TN_SCALE_POW2 : TN_SCALE_FP32,
                             .epsilon = i % 7 ? 0.0f : 0.25f,
                             .planes = 1 + i % 3,
                             .spare_rows = (int64_t)(i % 4) * 3};
        test_grouped_counts(&made, counts[i % 5], sources[i / 4 % 3], cols[i / 2 % 4], i);
        check(&ops, &made);
    }
    test_ops_close_host(&ops);
}

/* Every count of tokens from none to 129, in one call. */
static void every_tail_is_a_group(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    int64_t counts[130];
    for (int64_t g = 0; g < 130; g++)
        counts[g] = g;
    for (unsigned i = 0; i < 2; i++) {
        test_grouped made = {.groups = 130, .format = formats[i], .dtype = TN_E4M3, .planes = 3};
        test_grouped_counts(&made, counts, TN_BF16, 33, i);
        check(&ops, &made);
    }
    test_ops_close_host(&ops);
}

/* The bound is reached, and never passed, by the worst tables of offsets of small sizes. */
static void the_bound_of_scales_is_the_least_that_is_enough(void **state) {
    (void)state;
    for (int format = 0; format < 2; format++) {
        for (int plane = TN_PLANE_ROW; plane <= TN_PLANE_COL; plane++) {
            for (int64_t rows = 0; rows < 700; rows += 13) {
                int64_t bound, most = 0;
                EXPECT_OK(tn_grouped_scale_floats(formats[format], (tn_plane)plane, 2, rows, 300,
                                                  &bound));
                for (int64_t first = 0; first <= rows; first++) {
                    int64_t both =
                        tn__group_scale_floats(formats[format], (tn_plane)plane, first, 300) +
                        tn__group_scale_floats(formats[format], (tn_plane)plane, rows - first, 300);
                    most = both > most ? both : most;
                }
                assert_int_equal(bound, most);
            }
        }
    }
    int64_t out;
    EXPECT_STATUS(tn_grouped_scale_floats(TN_FORMAT_PLAIN, TN_PLANE_ROW, 1, 1, 1, &out),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_grouped_scale_floats(formats[0], TN_PLANE_ROW, -1, 1, 1, &out),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(
        tn_grouped_scale_floats(formats[0], TN_PLANE_ROW, 1, 1 << 30, INT64_MAX >> 8, &out),
        TN_INVALID_ARGUMENT);
}

/* ---- tables of offsets that are wrong ------------------------------------------------------- */

typedef struct bad_table {
    int64_t offsets[4];
    uint32_t error;
} bad_table;

static void wrong_offsets_write_nothing_but_the_error(void **state) {
    static const bad_table tables[] = {
        {{1, 10, 20, 30}, TN_GROUPED_BAD_OFFSETS},
        {{-1, 10, 20, 30}, TN_GROUPED_BAD_OFFSETS},
        {{0, 20, 10, 30}, TN_GROUPED_BAD_OFFSETS},
        {{0, 10, 20, 19}, TN_GROUPED_BAD_OFFSETS},
        {{0, INT64_MAX, INT64_MIN, 30}, TN_GROUPED_BAD_OFFSETS},
        {{0, 50, 20, 30}, TN_GROUPED_BAD_OFFSETS},
        {{0, 10, 20, 41}, TN_GROUPED_OVER_CAPACITY},
        {{0, 10, 20, INT64_MAX}, TN_GROUPED_OVER_CAPACITY},
        {{0, INT64_MAX, INT64_MAX, INT64_MAX}, TN_GROUPED_OVER_CAPACITY},
    };
    const int64_t counts[] = {10, 10, 20};
    (void)state;
    test_ops ops = test_ops_open_host();
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        test_grouped made = {.groups = 3, .format = formats[i % 2], .planes = 3};
        made.dtype = TN_E4M3;
        test_grouped_counts(&made, counts, TN_BF16, 70, 1);
        memcpy(made.offsets, tables[i].offsets, sizeof tables[i].offsets);
        test_grouped_run(&ops, &made);
        assert_int_equal(made.error, tables[i].error);
        expect_untouched(&made.row, 0, 0);
        expect_untouched(&made.col, 0, 0);
        test_grouped_end(&made);
    }
    test_ops_close_host(&ops);
}

/* One float less than the groups need, in either plane; with as many it works. */
static void too_few_scales_are_over_capacity(void **state) {
    const int64_t counts[] = {10, 0, 130};
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 6; i++) {
        test_grouped made = {.groups = 3, .format = formats[i % 2], .planes = 3};
        int64_t row = 0, col = 0;
        made.dtype = TN_E4M3;
        for (int g = 0; g < 3; g++) {
            row += tn__group_scale_floats(made.format, TN_PLANE_ROW, counts[g], 300);
            col += tn__group_scale_floats(made.format, TN_PLANE_COL, counts[g], 300);
        }
        test_grouped_counts(&made, counts, TN_FP32, 300, 1);
        made.row.scale_floats = row - (i / 2 == 1);
        made.col.scale_floats = col - (i / 2 == 2);
        test_grouped_run(&ops, &made);
        if (i / 2 == 0) {
            assert_int_equal(made.error, TN_GROUPED_OK);
            expect_plane(&made, TN_PLANE_ROW);
            expect_plane(&made, TN_PLANE_COL);
        } else {
            assert_int_equal(made.error, TN_GROUPED_OVER_CAPACITY);
            expect_untouched(&made.row, 0, 0);
            expect_untouched(&made.col, 0, 0);
        }
        test_grouped_end(&made);
    }
    test_ops_close_host(&ops);
}

static void the_first_error_stays(void **state) {
    const int64_t counts[] = {10, 10, 20};
    (void)state;
    test_ops ops = test_ops_open_host();
    test_grouped made = {.groups = 3, .format = formats[0], .planes = 1, .dtype = TN_E4M3};
    test_grouped_counts(&made, counts, TN_BF16, 70, 1);
    made.error_before = 77;
    made.offsets[3] = 1000;
    test_grouped_run(&ops, &made);
    assert_int_equal(made.error, 77);
    test_grouped_end(&made);
    test_ops_close_host(&ops);
}

static void the_skip_flag_leaves_all_as_it_was(void **state) {
    const int64_t counts[] = {10, 10, 20};
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 2; i++) {
        test_grouped made = {.groups = 3, .format = formats[i], .planes = 3, .dtype = TN_E4M3};
        made.has_skip = 1, made.skip = 1.0f;
        test_grouped_counts(&made, counts, TN_BF16, 70, 1);
        made.offsets[3] = 1000; /* not even looked at */
        test_grouped_run(&ops, &made);
        assert_int_equal(made.error, TN_GROUPED_OK);
        expect_untouched(&made.row, 0, 0);
        expect_untouched(&made.col, 0, 0);
        test_grouped_end(&made);
        made = (test_grouped){.groups = 3, .format = formats[i], .planes = 3, .dtype = TN_E4M3};
        made.has_skip = 1;
        test_grouped_counts(&made, counts, TN_BF16, 70, 1);
        check(&ops, &made);
    }
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_group_equals_the_tensor_alone),
        cmocka_unit_test(every_tail_is_a_group),
        cmocka_unit_test(the_bound_of_scales_is_the_least_that_is_enough),
        cmocka_unit_test(wrong_offsets_write_nothing_but_the_error),
        cmocka_unit_test(too_few_scales_are_over_capacity),
        cmocka_unit_test(the_first_error_stays),
        cmocka_unit_test(the_skip_flag_leaves_all_as_it_was),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
