/* The kernels of the norms against the host's definition, bit for bit, on the emulated device:
 * statistics, the sum with a residual, the value and both planes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_module.h"
#include "emulation_support.h"

typedef struct norm_case {
    int64_t rows, cols;
    tn_dtype dtype, fp8;
    tn_format format;
    int is_layer, has_residual, is_in_place, has_gamma, has_beta;
    int has_value, has_row, has_col, has_parts;
    tn_dtype gamma;
    gpu_fill fill;
    uint64_t seed;
} norm_case;

static norm_case case_of(unsigned way, int64_t rows, int64_t cols, uint64_t seed) {
    norm_case made = {.rows = rows,
                      .cols = cols,
                      .dtype = (tn_dtype)(TN_FP32 + way % 3),
                      .fp8 = way / 2 % 2 ? TN_E5M2 : TN_E4M3,
                      .format = way / 3 % 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D,
                      .is_layer = way / 5 % 2,
                      .has_residual = way % 4 > 1,
                      .is_in_place = way % 4 == 3,
                      .has_gamma = way % 5 != 0,
                      .has_beta = way / 5 % 2 && way % 7 != 0,
                      .gamma = (tn_dtype)(TN_FP32 + way / 4 % 3),
                      .has_value = way % 11 != 4,
                      .has_row = way % 8 != 1,
                      .has_col = way % 13 < 8,
                      .has_parts = way % 9 != 5,
                      .fill = (gpu_fill)(way % GPU_FILL_COUNT),
                      .seed = seed};
    return made;
}

static void describe(const norm_case *c, char *text, size_t bytes) {
    snprintf(text, bytes, "%s%s%s%s, %s to%s%s%s %s %s, %lld x %lld %s seed %llu",
             c->is_layer ? "layer" : "rms", c->has_residual ? " residual" : "",
             c->has_gamma ? " gamma" : "", c->has_beta ? " beta" : "", tn_dtype_name(c->dtype),
             c->has_value ? " y" : "", c->has_row ? " row" : "", c->has_col ? " col" : "",
             tn_dtype_name(c->fp8), tn_format_name(c->format), (long long)c->rows,
             (long long)c->cols, gpu_fill_name(c->fill), (unsigned long long)c->seed);
}

typedef struct operands {
    twin_matrix x, residual, sum, gamma, beta, mean, rstd, value;
    twin_plane row, col;
} operands;

static operands make_operands(const norm_case *c) {
    operands o;
    o.x = twin_matrix_fill(c->dtype, c->rows, c->cols, c->fill, c->seed);
    o.residual = twin_matrix_fill(c->dtype, c->rows, c->cols, GPU_FILL_NORMAL, c->seed + 1);
    o.sum = twin_matrix_make(c->dtype, c->rows, c->cols);
    o.gamma = twin_matrix_fill(c->gamma, 1, c->cols, c->fill, c->seed + 2);
    o.beta = twin_matrix_fill(TN_BF16, 1, c->cols, c->fill, c->seed + 3);
    o.mean = twin_matrix_make(TN_FP32, 1, c->rows);
    o.rstd = twin_matrix_make(TN_FP32, 1, c->rows);
    o.value = twin_matrix_make(c->dtype, c->rows, c->cols);
    o.row = twin_plane_make(c->format, TN_PLANE_ROW, c->fp8, c->rows, c->cols);
    o.col = twin_plane_make(c->format, TN_PLANE_COL, c->fp8, c->rows, c->cols);
    return o;
}

static void end_operands(operands *o) {
    twin_matrix_end(&o->x), twin_matrix_end(&o->residual), twin_matrix_end(&o->sum);
    twin_matrix_end(&o->gamma), twin_matrix_end(&o->beta);
    twin_matrix_end(&o->mean), twin_matrix_end(&o->rstd), twin_matrix_end(&o->value);
    twin_plane_end(&o->row), twin_plane_end(&o->col);
}

static tn__matrix side_of(const twin_matrix *of, int emulated) {
    return emulated ? of->emulated : of->host;
}

static tn__row_statistics_work statistics_of(const norm_case *c, const operands *o, int emulated) {
    tn__row_statistics_work work = {
        .x = side_of(&o->x, emulated), .epsilon = 1e-5f, .rstd = side_of(&o->rstd, emulated).data};
    if (c->is_layer) work.mean = side_of(&o->mean, emulated).data;
    if (!c->has_residual) return work;
    work.residual = side_of(&o->residual, emulated).data;
    work.sum = side_of(c->is_in_place ? &o->residual : &o->sum, emulated).data;
    return work;
}

static tn__produce_work produce_of(const norm_case *c, const operands *o,
                                   const tn__row_statistics_work *statistics, int emulated) {
    tn__produce_work work = {.producer = TN__PRODUCE_NORM,
                             .x = statistics->x,
                             .mean = statistics->mean,
                             .rstd = statistics->rstd,
                             .gamma_base = c->seed % 2 ? 1.0f : 0.0f};
    if (statistics->sum) work.x.data = statistics->sum;
    if (c->has_gamma) work.gamma = side_of(&o->gamma, emulated);
    if (c->has_beta) work.beta = side_of(&o->beta, emulated);
    work.cast = (tn__quantize_work){.src = side_of(&o->value, emulated),
                                    .format = c->format,
                                    .scale_mode = c->seed % 3 ? TN_SCALE_POW2 : TN_SCALE_FP32,
                                    .dtype = c->fp8,
                                    .has_row = c->has_row,
                                    .has_col = c->has_col,
                                    .row = emulated ? o->row.emulated : o->row.host,
                                    .col = emulated ? o->col.emulated : o->col.host};
    if (!c->has_value) work.cast.src.data = NULL;
    return work;
}

static tn__norm_work work_of(const norm_case *c, const operands *o, int emulated) {
    tn__norm_work work = {.statistics = statistics_of(c, o, emulated)};
    work.made = produce_of(c, o, &work.statistics, emulated);
    return work;
}

static void check_case(const norm_case *c) {
    char what[192];
    operands o = make_operands(c);
    describe(c, what, sizeof what);
    tn__norm_work work = work_of(c, &o, 0);
    tn__host_row_statistics(&work.statistics);
    tn__host_produce(&work.made);
    work = work_of(c, &o, 1);
    if (c->has_parts) work.parts = emulation_parts(c->rows, c->cols, c->is_layer ? 2 : 1);
    EXPECT_OK(tn__op_table_cuda.norm(emulation.device, &work, emulation.stream));
    emulation_wait(what);
    free(work.parts);
    twin_matrix_compare(&o.residual, "sum of a residual", what);
    twin_matrix_compare(&o.sum, "sum of a residual", what);
    twin_matrix_compare(&o.mean, "statistics", what);
    twin_matrix_compare(&o.rstd, "statistics", what);
    twin_matrix_compare(&o.value, "norm", what);
    twin_plane_compare(&o.row, "norm", what);
    twin_plane_compare(&o.col, "norm", what);
    end_operands(&o);
}

static void check_tail(int64_t rows, int64_t cols, uint64_t seed) {
    for (unsigned i = 0; i < 2; i++) {
        const norm_case c = case_of((unsigned)seed * 2 + i * 17, rows, cols, seed);
        check_case(&c);
    }
}

static void every_tail_equals_the_host(void **state) {
    (void)state;
    emulation_each_tail(23, check_tail);
    gpu_count_report("norms, tails");
}

static void every_way_equals_the_host_in_every_order(void **state) {
    static const uint64_t orders[] = {0, 1, 20261130};
    (void)state;
    for (unsigned way = 0; way < 42; way++) {
        const norm_case c = case_of(way, way % 2 ? 30 : 136, way % 3 ? 600 : 264, way);
        emulated_set_order(orders[way % 3]);
        check_case(&c);
    }
    emulated_set_order(0);
    gpu_count_report("norms, every way");
}

/* Rows of every number of steps, held and read again, one column too many and too few, and rows
 * that fewer threads take. */
static void rows_of_any_length_equal_the_host(void **state) {
    static const int64_t lengths[] = {1,    7,    255,  256,  257,  520,   1024,  1032,  2047,
                                      2056, 4096, 4104, 7168, 8193, 12296, 16384, 16392, 33001};
    (void)state;
    for (unsigned way = 0; way < 2 * sizeof lengths / sizeof *lengths; way++) {
        const int64_t cols = lengths[way / 2];
        const norm_case c = case_of(way * 5 + 1, cols > 4096 ? 2 : 11, cols, way);
        check_case(&c);
    }
    gpu_count_report("norms, long and short rows");
}

/* Of at most two tiles across: the blocks that run one after the other here hold no more. They have
 * 8 tiles each, or none are held. */
static void held_tiles_equal_the_host_in_every_order(void **state) {
    static const uint64_t orders[] = {0, 1, 20261201};
    static const int64_t cols[] = {200, 136, 256, 8};
    (void)state;
    for (unsigned way = 0; way < 12; way++) {
        const int64_t bands = cols[way % 4] > 128 ? 16 : 32;
        norm_case c = case_of(way, bands * 128 - way % 3 * 16, cols[way % 4], way + 3);
        c.dtype = way % 2 ? TN_FP16 : TN_BF16;
        c.is_layer = c.has_beta = 0;
        c.has_parts = 1;
        c.has_value |= !c.has_residual;
        c.has_col |= !(c.has_row && c.format == TN_FORMAT_FP8_BLOCK_2D);
        c.rows -= way % 16;
        emulated_set_order(orders[way / 4]);
        check_case(&c);
        assert_int_equal(strncmp(emulated_last_kernel(), "norm_held", 9), 0);
    }
    emulated_set_order(0);
    gpu_count_report("norms, held tiles");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_any_length_equal_the_host),
        cmocka_unit_test(every_tail_equals_the_host),
        cmocka_unit_test(every_way_equals_the_host_in_every_order),
        cmocka_unit_test(held_tiles_equal_the_host_in_every_order),
    };
    emulation_begin();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    emulation_end();
    return failures;
}
