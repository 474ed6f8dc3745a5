/* The kernels of grouped ops against the host's definition, bit for bit, on the emulated device:
 * counts of tokens around the blocks, wrong offsets, too little room, the skip flag. */
#include <stdio.h>
#include <string.h>

#include "cuda_list_arguments.h"
#include "emulation_support.h"
#include "host_grouped.h"
#include "tenure_grouped.h"

enum { GROUPS_MAX = 600 };

static const tn_dtype floats[] = {TN_FP32, TN_BF16, TN_FP16};
static const tn_dtype codes[] = {TN_E4M3, TN_E5M2};
static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};

/* ---- quantize ------------------------------------------------------------------------------- */

typedef struct grouped_case {
    int64_t offsets[GROUPS_MAX + 1];
    int64_t groups, rows, cols;
    int64_t scales_missing; /* of each plane */
    tn_dtype source, target;
    tn_format format;
    tn_scale_mode mode;
    unsigned planes;
    gpu_fill fill;
    float skip;
    int has_skip;
} grouped_case;

static void set_counts(grouped_case *c, const int64_t *counts, int64_t groups, int64_t spare) {
    c->groups = groups;
    c->offsets[0] = 0;
    for (int64_t g = 0; g < groups; g++)
        c->offsets[g + 1] = c->offsets[g] + counts[g];
    c->rows = c->offsets[groups] + spare;
}

static void set_way(grouped_case *c, unsigned way) {
    c->source = floats[way % 3];
    c->target = codes[way / 3 % 2];
    c->format = formats[way / 6 % 2];
    c->mode = way / 12 % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
    c->planes = way / 24 % 3 + 1;
    c->fill = (gpu_fill)(way % GPU_FILL_COUNT);
}
enum { WAYS = 72 };

/* What of a plane the work names, on both sides. */
typedef struct group_twins {
    twin data, scale;
    int64_t floats;
} group_twins;

static group_twins group_twins_make(const grouped_case *c, tn_plane plane) {
    group_twins made;
    made.floats = 0;
    EXPECT_OK(tn_grouped_scale_floats(c->format, plane, c->groups, c->rows, c->cols, &made.floats));
    if (c->scales_missing) { /* as many as these groups need, less the missing */
        made.floats = -c->scales_missing;
        for (int64_t g = 0; g < c->groups; g++)
            made.floats += tn__group_scale_floats(c->format, plane,
                                                  c->offsets[g + 1] - c->offsets[g], c->cols);
    }
    made.data = twin_make((size_t)(c->rows * c->cols), 0);
    made.scale = twin_make((size_t)made.floats * sizeof(float), 0);
    return made;
}

static tn_plane_view view_of(const group_twins *of, int is_emulated) {
    tn_plane_view view = {.data = is_emulated ? of->data.emulated : of->data.host,
                          .scale = is_emulated ? of->scale.emulated : of->scale.host};
    return view;
}

static twin input(const void *bytes, size_t count) {
    twin made = twin_make(count, 0);
    memcpy(made.host, bytes, count);
    memcpy(made.emulated, bytes, count);
    return made;
}

typedef struct grouped_operands {
    twin_matrix src;
    twin offsets, error, skip, scratch;
    group_twins row, col;
} grouped_operands;

static grouped_operands operands_make(const grouped_case *c) {
    const uint32_t no_error = 0;
    grouped_operands made;
    made.src = twin_matrix_fill(c->source, c->rows, c->cols, c->fill, (uint64_t)c->rows);
    made.offsets = input(c->offsets, (size_t)(c->groups + 1) * sizeof(int64_t));
    made.error = input(&no_error, sizeof no_error);
    made.skip = input(&c->skip, sizeof c->skip);
    made.scratch = twin_make(tn__op_table_cuda.list_scratch_bytes(c->groups), 0);
    made.row = group_twins_make(c, TN_PLANE_ROW);
    made.col = group_twins_make(c, TN_PLANE_COL);
    return made;
}

static void operands_end(grouped_operands *made) {
    twin_matrix_end(&made->src);
    twin_end(&made->offsets), twin_end(&made->error);
    twin_end(&made->skip), twin_end(&made->scratch);
    twin_end(&made->row.data), twin_end(&made->row.scale);
    twin_end(&made->col.data), twin_end(&made->col.scale);
}

static tn__grouped_quantize_work work_of(const grouped_case *c, const grouped_operands *of,
                                         int is_emulated) {
    tn__grouped_quantize_work work = {
        .all = {.src = is_emulated ? of->src.emulated : of->src.host,
                .format = c->format,
                .scale_mode = c->mode,
                .dtype = c->target,
                .has_row = (c->planes & TN_QUANTIZE_ROW) != 0,
                .has_col = (c->planes & TN_QUANTIZE_COL) != 0},
        .groups = {(const int64_t *)(is_emulated ? of->offsets.emulated : of->offsets.host),
                   c->groups, (uint32_t *)(is_emulated ? of->error.emulated : of->error.host)},
        .row_scale_floats = of->row.floats,
        .col_scale_floats = of->col.floats,
        .scratch = of->scratch.emulated,
    };
    if (work.all.has_row) work.all.row = view_of(&of->row, is_emulated);
    if (work.all.has_col) work.all.col = view_of(&of->col, is_emulated);
    if (c->has_skip) work.skip = (const float *)(is_emulated ? of->skip.emulated : of->skip.host);
    return work;
}

/* Gives what the kernels left in the word of errors. */
static uint32_t check(const grouped_case *c, const char *name, unsigned number) {
    grouped_operands of = operands_make(c);
    tn__grouped_quantize_work on_host = work_of(c, &of, 0), emulated = work_of(c, &of, 1);
    uint32_t error;
    char what[160];
    snprintf(what, sizeof what, "case %u: %lld groups, %lld rows, %lld columns, %s %s planes %u",
             number, (long long)c->groups, (long long)c->rows, (long long)c->cols,
             tn_dtype_name(c->source), tn_format_name(c->format), c->planes);
    tn__host_grouped_quantize(&on_host);
    EXPECT_OK(tn__op_table_cuda.grouped_quantize(emulation.device, &emulated, emulation.stream));
    emulation_wait(what);
    twin_compare(&of.row.data, name, what);
    twin_compare(&of.row.scale, name, what);
    twin_compare(&of.col.data, name, what);
    twin_compare(&of.col.scale, name, what);
    twin_compare(&of.error, name, what);
    memcpy(&error, of.error.emulated, sizeof error);
    operands_end(&of);
    return error;
}

static void every_way_equals_the_host(void **state) {
    static const int64_t counts[][6] = {
        {128, 0, 256, 1, 127, 129}, {0, 3, 0, 0, 5, 0}, {16, 32, 0, 144, 128, 0}};
    static const int64_t cols[] = {136, 130, 16};
    (void)state;
    for (unsigned way = 0; way < WAYS; way++) {
        grouped_case c = {.cols = cols[way / 2 % 3]};
        set_way(&c, way);
        set_counts(&c, counts[way % 3], 6, way % 4 ? 0 : 7);
        assert_int_equal(check(&c, "grouped quantize", way), TN_GROUPED_OK);
    }
    gpu_count_report("grouped quantize, every way");
}

static void every_tail_is_a_group(void **state) {
    int64_t counts[130];
    (void)state;
    for (int64_t g = 0; g < 130; g++)
        counts[g] = (g * 37) % 130;
    for (unsigned i = 0; i < 2; i++) {
        grouped_case c = {.cols = 9, .planes = 3, .format = formats[i]};
        c.source = TN_BF16, c.target = TN_E4M3;
        set_counts(&c, counts, 130, 0);
        assert_int_equal(check(&c, "grouped quantize", i), TN_GROUPED_OK);
    }
    gpu_count_report("grouped quantize, tails");
}

/* More groups than the list's block has threads, and none at all. */
static void many_groups_and_none(void **state) {
    int64_t counts[GROUPS_MAX];
    (void)state;
    for (int64_t g = 0; g < GROUPS_MAX; g++)
        counts[g] = g % 7 == 3 ? 3 : 0;
    for (unsigned i = 0; i < 4; i++) {
        grouped_case c = {.cols = 5, .planes = 3, .format = formats[i % 2]};
        c.source = TN_FP32, c.target = TN_E4M3;
        set_counts(&c, counts, i / 2 ? 0 : GROUPS_MAX, 2);
        assert_int_equal(check(&c, "grouped quantize", i), TN_GROUPED_OK);
    }
    gpu_count_report("grouped quantize, many groups and none");
}

static void wrong_offsets_write_the_host_s_error(void **state) {
    static const int64_t tables[][4] = {{1, 10, 20, 30},
                                        {-1, 10, 20, 30},
                                        {0, 20, 10, 30},
                                        {0, 10, 20, 19},
                                        {0, INT64_MAX, INT64_MIN, 30},
                                        {0, 50, 20, 30},
                                        {0, 10, 20, 41},
                                        {0, 10, 20, INT64_MAX},
                                        {0, INT64_MAX, INT64_MAX, INT64_MAX}};
    static const int64_t counts[] = {10, 10, 20};
    (void)state;
    for (unsigned i = 0; i < sizeof tables / sizeof *tables; i++) {
        grouped_case c = {.cols = 70, .planes = 3, .format = formats[i % 2]};
        c.source = TN_BF16, c.target = TN_E4M3;
        set_counts(&c, counts, 3, 0);
        memcpy(c.offsets, tables[i], sizeof tables[i]);
        assert_int_not_equal(check(&c, "wrong offsets", i), TN_GROUPED_OK);
    }
    for (unsigned i = 0; i < 4; i++) {
        grouped_case c = {.cols = 300, .planes = 1 + i / 2, .format = formats[i % 2]};
        c.source = TN_BF16, c.target = TN_E4M3;
        set_counts(&c, counts, 3, 0);
        c.scales_missing = 1;
        assert_int_equal(check(&c, "too few scales", i), TN_GROUPED_OVER_CAPACITY);
    }
    gpu_count_report("grouped quantize, errors");
}

static void the_skip_flag_leaves_all_as_it_was(void **state) {
    static const int64_t counts[] = {10, 10, 20};
    (void)state;
    for (unsigned i = 0; i < 4; i++) {
        grouped_case c = {.cols = 70, .planes = 3, .format = formats[i % 2], .has_skip = 1};
        c.source = TN_BF16, c.target = TN_E4M3;
        c.skip = i / 2 ? 0.0f : 1.0f;
        set_counts(&c, counts, 3, 0);
        assert_int_equal(check(&c, "skip flag", i), TN_GROUPED_OK);
    }
    gpu_count_report("grouped quantize, skip flag");
}

/* ---- a list --------------------------------------------------------------------------------- */

enum { LISTED = 2 * TN__LIST_PART + 5 }; /* three parts of a list */

static void lists_of_tensors_equal_the_host(void **state) {
    static const tn_plane planes[] = {TN_PLANE_ROW, TN_PLANE_COL};
    (void)state;
    for (unsigned way = 0; way < 4; way++) {
        static tn__quantize_work items[LISTED];
        static twin_matrix src[LISTED];
        static twin_plane made[LISTED][2];
        twin scratch = twin_make(tn__op_table_cuda.list_scratch_bytes(LISTED), 0);
        for (int i = 0; i < LISTED; i++) {
            const int64_t rows = 1 + i * 29 % 150, cols = i % 4 ? 16 : 1 + i * 17 % 140;
            src[i] = twin_matrix_fill(floats[way % 3], rows, cols, GPU_FILL_NORMAL, (uint64_t)i);
            items[i] = (tn__quantize_work){.src = src[i].host,
                                           .format = formats[way % 2],
                                           .dtype = TN_E4M3,
                                           .has_row = way != 1,
                                           .has_col = way != 2};
            for (int p = 0; p < 2; p++)
                made[i][p] = twin_plane_make(formats[way % 2], planes[p], TN_E4M3, rows, cols);
            items[i].row = made[i][0].host, items[i].col = made[i][1].host;
            tn__host_quantize(&items[i]);
            items[i].src = src[i].emulated;
            items[i].row = made[i][0].emulated, items[i].col = made[i][1].emulated;
        }
        tn__quantize_list_work work = {items, LISTED, NULL, scratch.emulated};
        EXPECT_OK(tn__op_table_cuda.quantize_list(emulation.device, &work, emulation.stream));
        emulation_wait("a list");
        for (int i = 0; i < LISTED; i++) {
            for (int p = 0; p < 2; p++) {
                twin_plane_compare(&made[i][p], "quantize list", "a list");
                twin_plane_end(&made[i][p]);
            }
            twin_matrix_end(&src[i]);
        }
        twin_end(&scratch);
    }
    gpu_count_report("quantize list");
}

/* What a simulated device takes is what a GPU would. */
static void the_ghost_takes_as_much_for_a_list(void **state) {
    (void)state;
    for (int64_t tensors = 0; tensors <= GROUPS_MAX; tensors++)
        assert_int_equal(tn__op_table_ghost.list_scratch_bytes(tensors),
                         tn__op_table_cuda.list_scratch_bytes(tensors));
}

static int run_all(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_way_equals_the_host),
        cmocka_unit_test(every_tail_is_a_group),
        cmocka_unit_test(many_groups_and_none),
        cmocka_unit_test(wrong_offsets_write_the_host_s_error),
        cmocka_unit_test(the_skip_flag_leaves_all_as_it_was),
        cmocka_unit_test(lists_of_tensors_equal_the_host),
        cmocka_unit_test(the_ghost_takes_as_much_for_a_list),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(void) { return emulation_run_in_orders(run_all); }
