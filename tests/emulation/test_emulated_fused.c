/* The kernels that make values and cast them against the host's definition, bit for bit, on the
 * emulated device: the value, both planes with their scales, and the sums of columns. */
#include <stdio.h>

#include "emulation_support.h"

typedef struct fused_case {
    int64_t rows, cols; /* of y */
    tn_dtype dtype, fp8;
    tn_format format;
    tn__producer producer;
    tn__curve curve;
    int is_gated, is_weighted, has_value, has_row, has_col;
    gpu_fill fill;
    uint64_t seed;
} fused_case;

static const tn__curve curves[] = {{TN__CURVE_SIGMOID, 1.5957691216f, 0.0713548163f},
                                   {TN__CURVE_SIGMOID, 1.0f, 0.0f},
                                   {TN__CURVE_RELU, 0.0f, 0.0f},
                                   {TN__CURVE_SQUARED_RELU, 0.0f, 0.0f},
                                   {TN__CURVE_IDENTITY, 0.0f, 0.0f}};

/* Every number of a way is another combination, with neighbours that differ in all. */
static fused_case case_of(unsigned way, int64_t rows, int64_t cols, uint64_t seed) {
    const unsigned planes = way / 5 % 4;
    fused_case made = {.rows = rows,
                       .cols = cols,
                       .dtype = (tn_dtype)(TN_FP32 + way % 3),
                       .fp8 = way / 2 % 2 ? TN_E5M2 : TN_E4M3,
                       .format = way / 3 % 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D,
                       .producer = way / 7 % 2 ? TN__PRODUCE_GRADIENT : TN__PRODUCE_ACTIVATION,
                       .curve = curves[way % 5],
                       .is_gated = way / 4 % 2,
                       .is_weighted = way % 4 == 1,
                       .has_value = planes == 3 || way % 2,
                       .has_row = planes != 1 && planes != 3,
                       .has_col = planes != 0 && planes != 3,
                       .fill = (gpu_fill)(way / 3 % GPU_FILL_COUNT),
                       .seed = seed};
    return made;
}

static void describe(const fused_case *c, char *text, size_t bytes) {
    snprintf(text, bytes, "%s of curve %d%s%s, %s to %s %s, %lld x %lld %s seed %llu",
             c->producer == TN__PRODUCE_GRADIENT ? "gradient" : "value", (int)c->curve.kind,
             c->is_gated ? " gated" : "", c->is_weighted ? " weighted" : "",
             tn_dtype_name(c->dtype), tn_dtype_name(c->fp8), tn_format_name(c->format),
             (long long)c->rows, (long long)c->cols, gpu_fill_name(c->fill),
             (unsigned long long)c->seed);
}

/* All that a call reads and writes, on both sides. */
typedef struct operands {
    twin_matrix x, dy, weights, value, tile_sums, sums;
    twin_plane row, col;
    int64_t cols, tiles; /* of what is made */
} operands;

static operands make_operands(const fused_case *c) {
    const int is_gradient = c->producer == TN__PRODUCE_GRADIENT;
    operands o = {.cols = is_gradient && c->is_gated ? 2 * c->cols : c->cols,
                  .tiles = (c->rows + TN__BLOCK - 1) / TN__BLOCK};
    o.x =
        twin_matrix_fill(c->dtype, c->rows, c->is_gated ? 2 * c->cols : c->cols, c->fill, c->seed);
    o.dy = twin_matrix_fill(c->dtype, c->rows, c->cols, GPU_FILL_NORMAL, c->seed + 1);
    o.weights = twin_matrix_fill(TN_FP32, c->rows, 1, GPU_FILL_NORMAL, c->seed + 2);
    o.value = twin_matrix_make(c->dtype, c->rows, o.cols);
    o.tile_sums = twin_matrix_make(TN_FP32, o.tiles, o.cols);
    o.sums = twin_matrix_make(c->dtype, 1, o.cols);
    o.row = twin_plane_make(c->format, TN_PLANE_ROW, c->fp8, c->rows, o.cols);
    o.col = twin_plane_make(c->format, TN_PLANE_COL, c->fp8, c->rows, o.cols);
    return o;
}

static void end_operands(operands *o) {
    twin_matrix_end(&o->x);
    twin_matrix_end(&o->dy);
    twin_matrix_end(&o->weights);
    twin_matrix_end(&o->value);
    twin_matrix_end(&o->tile_sums);
    twin_matrix_end(&o->sums);
    twin_plane_end(&o->row);
    twin_plane_end(&o->col);
}

static tn__produce_work work_of(const fused_case *c, const operands *o, int emulated) {
    const int is_gradient = c->producer == TN__PRODUCE_GRADIENT;
    tn__produce_work work = {.producer = c->producer,
                             .curve = c->curve,
                             .is_gated = c->is_gated,
                             .x = emulated ? o->x.emulated : o->x.host};
    const tn__matrix *dy = emulated ? &o->dy.emulated : &o->dy.host;
    const tn__matrix *weights = emulated ? &o->weights.emulated : &o->weights.host;
    const tn__matrix *tile_sums = emulated ? &o->tile_sums.emulated : &o->tile_sums.host;
    if (is_gradient) work.dy = dy->data;
    if (c->is_weighted) work.weights = weights->data;
    work.tile_sums = tile_sums->data;
    work.cast = (tn__quantize_work){.src = emulated ? o->value.emulated : o->value.host,
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

static void check_case(const fused_case *c) {
    const char *name = c->producer == TN__PRODUCE_GRADIENT ? "gradient" : "activation";
    char what[192];
    operands o = make_operands(c);
    describe(c, what, sizeof what);
    tn__produce_work work = work_of(c, &o, 0);
    tn__column_sums_work sums = {work.tile_sums, o.tiles, 1, o.sums.host, 0, NULL};
    tn__host_produce(&work);
    tn__host_column_sums(&sums);
    work = work_of(c, &o, 1);
    sums.tile_sums = work.tile_sums, sums.sums = o.sums.emulated;
    EXPECT_OK(tn__op_table_cuda.produce(emulation.device, &work, emulation.stream));
    EXPECT_OK(tn__op_table_cuda.column_sums(emulation.device, &sums, emulation.stream));
    emulation_wait(what);
    twin_matrix_compare(&o.value, name, what); /* what is not wanted stays as it was */
    twin_plane_compare(&o.row, name, what);
    twin_plane_compare(&o.col, name, what);
    twin_matrix_compare(&o.sums, "sums of columns", what);
    end_operands(&o);
}

static void check_tail(int64_t rows, int64_t cols, uint64_t seed) {
    for (unsigned i = 0; i < 3; i++) {
        const fused_case c = case_of((unsigned)seed * 3 + i * 11, rows, cols, seed);
        check_case(&c);
    }
}

static void every_tail_equals_the_host(void **state) {
    (void)state;
    emulation_each_tail(9, check_tail);
    gpu_count_report("activations, tails");
}

static void every_way_equals_the_host_in_every_order(void **state) {
    static const uint64_t orders[] = {0, 1, 20261130};
    (void)state;
    for (unsigned way = 0; way < 210; way++) {
        const fused_case c = case_of(way, way % 2 ? 140 : 256, way % 3 ? 136 : 200, way);
        emulated_set_order(orders[way % 3]);
        check_case(&c);
    }
    emulated_set_order(0);
    gpu_count_report("activations, every way");
}

/* Tall enough for every sum of tiles to have several. */
static void sums_of_many_tiles_equal_the_host(void **state) {
    (void)state;
    fused_case c = case_of(0, 2200, 40, 5);
    c.curve = curves[4], c.fill = GPU_FILL_NORMAL, c.is_gated = 0;
    check_case(&c);
    gpu_count_report("sums of columns");
}

/* A gated gradient of bf16 whose halves are whole tiles makes both at once. */
static void halves_of_whole_tiles_equal_the_host(void **state) {
    (void)state;
    for (unsigned way = 0; way < 40; way++) {
        fused_case c = case_of(way * 7, way % 2 ? 130 : 256, way % 3 ? 128 : 256, way);
        c.producer = TN__PRODUCE_GRADIENT, c.is_gated = 1;
        c.dtype = TN_BF16;
        emulated_set_order(way % 4);
        check_case(&c);
    }
    emulated_set_order(0);
    gpu_count_report("both halves at once");
}

/* Blocks that look sigmoids up go from tile to tile. */
static void more_tiles_than_blocks_equal_the_host(void **state) {
    (void)state;
    for (unsigned way = 0; way < 8; way++) {
        fused_case c = case_of(way, 1, 128 * 401, way);
        c.producer = way / 2 % 2 ? TN__PRODUCE_GRADIENT : TN__PRODUCE_ACTIVATION;
        c.dtype = TN_BF16, c.curve = curves[way / 4], c.is_gated = way % 2;
        c.has_row = c.has_col = c.has_value = 1;
        check_case(&c);
    }
    gpu_count_report("more tiles than blocks");
}

static void the_flag_leaves_all_as_it_was(void **state) {
    (void)state;
    const fused_case c = case_of(6, 130, 70, 3);
    operands o = make_operands(&c);
    tn__produce_work work = work_of(&c, &o, 1);
    tn__column_sums_work sums = {work.tile_sums, o.tiles, 1, o.sums.emulated, 0, NULL};
    twin_matrix flag = twin_matrix_fill(TN_FP32, 1, 1, GPU_FILL_MAXIMUM, 1);
    work.skip = sums.skip = flag.emulated.data;
    EXPECT_OK(tn__op_table_cuda.produce(emulation.device, &work, emulation.stream));
    EXPECT_OK(tn__op_table_cuda.column_sums(emulation.device, &sums, emulation.stream));
    emulation_wait("skipped");
    twin_matrix_compare(&o.value, "skipped", "value");
    twin_plane_compare(&o.row, "skipped", "row plane");
    twin_plane_compare(&o.col, "skipped", "column plane");
    twin_matrix_compare(&o.tile_sums, "skipped", "sums of tiles");
    twin_matrix_compare(&o.sums, "skipped", "sums of columns");
    twin_matrix_end(&flag);
    end_operands(&o);
    gpu_count_report("skip flag");
}

int main(void) {
#ifdef __SANITIZE_ADDRESS__
    return 77; /* a switch of fibers costs so much there that it takes more than ten minutes */
#endif
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tail_equals_the_host),
        cmocka_unit_test(every_way_equals_the_host_in_every_order),
        cmocka_unit_test(sums_of_many_tiles_equal_the_host),
        cmocka_unit_test(halves_of_whole_tiles_equal_the_host),
        cmocka_unit_test(more_tiles_than_blocks_equal_the_host),
        cmocka_unit_test(the_flag_leaves_all_as_it_was),
    };
    emulation_begin();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    emulation_end();
    return failures;
}
