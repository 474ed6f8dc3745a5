/* The kernels of the norms' gradients that read everything once, against the host's definition, bit
 * for bit, on the emulated device: dx and the sums of the columns. What the two that read twice
 * make is in the battery. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_module.h"
#include "emulation_support.h"
#include "host_number.h"

typedef struct gradient_case {
    int64_t rows, cols;
    tn_dtype dtype, gamma;
    int is_layer, has_added, has_gamma, has_value, has_sums;
    int has_row, has_col; /* else no planes */
    int split;            /* 0: as the device would have it */
    tn_format format;
    tn_dtype fp8;
    gpu_fill fill;
    uint64_t seed;
} gradient_case;

static gradient_case case_of(unsigned way, int64_t rows, int64_t cols) {
    const gradient_case made = {.rows = rows,
                                .cols = cols,
                                .dtype = (tn_dtype)(TN_FP32 + way % 3),
                                .gamma = (tn_dtype)(TN_FP32 + way / 2 % 3),
                                .is_layer = way / 3 % 2,
                                .has_added = way % 5 < 3,
                                .has_gamma = cols % 8 == 0 && way % 7 != 3,
                                .has_value = way % 11 != 5,
                                .has_sums = way % 13 != 6,
                                .format = TN_FORMAT_FP8_BLOCK_1D,
                                .fp8 = TN_E4M3,
                                .fill = (gpu_fill)(way % GPU_FILL_COUNT),
                                .seed = way};
    return made;
}

static void describe(const gradient_case *c, char *text, size_t bytes) {
    snprintf(text, bytes, "%s%s%s to%s%s%s%s, %s, %lld x %lld %s way %llu",
             c->is_layer ? "layer" : "rms", c->has_added ? " added" : "",
             c->has_gamma ? " gamma" : "", c->has_value ? " dx" : "", c->has_sums ? " sums" : "",
             c->has_row ? " row" : "", c->has_col ? " col" : "", tn_dtype_name(c->dtype),
             (long long)c->rows, (long long)c->cols, gpu_fill_name(c->fill),
             (unsigned long long)c->seed);
}

typedef struct operands {
    twin_matrix x, dy, added, gamma, mean, rstd, shift, tilt, dx, gamma_sums, beta_sums;
    twin_plane row, col;
} operands;

static operands make_operands(const gradient_case *c) {
    const int64_t tiles = (c->rows + TN__BLOCK - 1) / TN__BLOCK;
    operands o;
    o.x = twin_matrix_fill(c->dtype, c->rows, c->cols, c->fill, c->seed);
    o.dy = twin_matrix_fill(c->dtype, c->rows, c->cols, GPU_FILL_NORMAL, c->seed + 1);
    o.added = twin_matrix_fill(c->dtype, c->rows, c->cols, c->fill, c->seed + 2);
    o.gamma = twin_matrix_fill(c->gamma, 1, c->cols, c->fill, c->seed + 3);
    o.mean = twin_matrix_fill(TN_FP32, 1, c->rows, c->fill, c->seed + 4);
    o.rstd = twin_matrix_fill(TN_FP32, 1, c->rows, GPU_FILL_NORMAL, c->seed + 5);
    o.shift = twin_matrix_make(TN_FP32, 1, c->rows);
    o.tilt = twin_matrix_make(TN_FP32, 1, c->rows);
    o.dx = twin_matrix_make(c->dtype, c->rows, c->cols);
    o.gamma_sums = twin_matrix_make(TN_FP32, tiles, c->cols);
    o.beta_sums = twin_matrix_make(TN_FP32, tiles, c->cols);
    o.row = twin_plane_make(c->format, TN_PLANE_ROW, c->fp8, c->rows, c->cols);
    o.col = twin_plane_make(c->format, TN_PLANE_COL, c->fp8, c->rows, c->cols);
    return o;
}

static void end_operands(operands *o) {
    twin_matrix_end(&o->x), twin_matrix_end(&o->dy), twin_matrix_end(&o->added);
    twin_matrix_end(&o->gamma), twin_matrix_end(&o->mean), twin_matrix_end(&o->rstd);
    twin_matrix_end(&o->shift), twin_matrix_end(&o->tilt), twin_matrix_end(&o->dx);
    twin_matrix_end(&o->gamma_sums), twin_matrix_end(&o->beta_sums);
    twin_plane_end(&o->row), twin_plane_end(&o->col);
}

static void *data_of(const twin_matrix *of, int emulated) {
    return emulated ? of->emulated.data : of->host.data;
}

static tn__norm_gradient_work work_of(const gradient_case *c, const operands *o, int emulated) {
    tn__norm_gradient_work work = {
        .x = emulated ? o->x.emulated : o->x.host,
        .dy = data_of(&o->dy, emulated),
        .rstd = data_of(&o->rstd, emulated),
        .tilt = data_of(&o->tilt, emulated),
        .gamma_base = c->seed % 2 ? 1.0f : 0.0f,
        .cast = {.src = emulated ? o->dx.emulated : o->dx.host,
                 .format = c->format,
                 .scale_mode = c->seed % 3 ? TN_SCALE_POW2 : TN_SCALE_FP32,
                 .dtype = c->fp8,
                 .has_row = c->has_row,
                 .has_col = c->has_col,
                 .row = emulated ? o->row.emulated : o->row.host,
                 .col = emulated ? o->col.emulated : o->col.host}};
    if (c->has_added) work.added = data_of(&o->added, emulated);
    if (c->has_gamma) work.gamma = emulated ? o->gamma.emulated : o->gamma.host;
    if (!c->has_value) work.cast.src.data = NULL;
    if (c->has_sums) work.gamma_sums = data_of(&o->gamma_sums, emulated);
    if (!c->is_layer) return work;
    work.mean = data_of(&o->mean, emulated);
    work.shift = data_of(&o->shift, emulated);
    if (c->has_sums) work.beta_sums = data_of(&o->beta_sums, emulated);
    return work;
}

/* Sums of tiles are between two kernels; the second one stores any NaN as the canonical one. */
static void compare_sums(const twin_matrix *of, const char *name, const char *what) {
    for (int emulated = 0; emulated < 2; emulated++) {
        float *sums = data_of(of, emulated);
        for (int64_t i = 0; i < of->host.rows * of->host.cols; i++)
            sums[i] = tn__canonical(sums[i]);
    }
    twin_matrix_compare(of, name, what);
}

/* The emulated device's sums of tiles in their parts, of which there may be several. */
typedef struct sum_parts {
    float *sums;    /* NULL: none are wanted */
    float *of_tile; /* what they are added up to */
    int64_t tiles, cols;
    int count;
} sum_parts;

static sum_parts parts_begin(const tn__norm_gradient_work *work, float **sums) {
    sum_parts parts = {NULL, *sums, (work->x.rows + TN__BLOCK - 1) / TN__BLOCK, work->x.cols,
                       tn__norm_gradient_parts(work->split)};
    if (!*sums) return parts;
    const size_t bytes = (size_t)(parts.tiles * parts.count * parts.cols) * sizeof(float);
    parts.sums = malloc(bytes);
    assert_non_null(parts.sums);
    memset(parts.sums, 0xFF, bytes);
    *sums = parts.sums;
    return parts;
}

/* What the device makes of the parts: as the host of them, and of what it has itself of tiles. */
static void compare_columns(const sum_parts *parts, const twin_matrix *of_tiles, const char *what) {
    for (int of_parts = 0; of_parts < 2; of_parts++) {
        twin_matrix sums = twin_matrix_make(TN_FP32, 1, parts->cols);
        tn__column_sums_work work = {parts->sums, parts->tiles, parts->count, sums.emulated,
                                     0,           NULL};
        EXPECT_OK(tn__op_table_cuda.column_sums(emulation.device, &work, emulation.stream));
        emulation_wait(what);
        work.sums = sums.host;
        if (!of_parts) work.tile_sums = of_tiles->host.data, work.parts = 1;
        tn__host_column_sums(&work);
        twin_matrix_compare(&sums, of_parts ? "parts of tiles" : "sums of columns", what);
        twin_matrix_end(&sums);
    }
}

static void parts_end(sum_parts *parts, const twin_matrix *of_tiles, const char *what) {
    if (!parts->sums) return;
    compare_columns(parts, of_tiles, what);
    for (int64_t i = 0; i < parts->tiles * parts->cols; i++) {
        const float *part = parts->sums + i / parts->cols * parts->count * parts->cols;
        part += i % parts->cols;
        parts->of_tile[i] = *part;
        for (int p = 1; p < parts->count; p++)
            parts->of_tile[i] += part[p * parts->cols];
    }
    free(parts->sums);
}

/* Whether everything was read once, by a kernel of this name, `launches` of them in all. */
static void check_case(const gradient_case *c, const char *kernel, uint64_t launches) {
    char what[192];
    operands o = make_operands(c);
    describe(c, what, sizeof what);
    tn__norm_gradient_work work = work_of(c, &o, 0);
    tn__host_norm_gradient_means(&work);
    tn__host_norm_gradient(&work);
    work = work_of(c, &o, 1);
    work.split = c->split;
    if (!c->split)
        EXPECT_OK(tn__op_table_cuda.norm_gradient_split(emulation.device, &work, &work.split));
    sum_parts gamma = parts_begin(&work, &work.gamma_sums),
              beta = parts_begin(&work, &work.beta_sums);
    if (c->has_row || c->has_col)
        work.parts = emulation_parts(c->rows, c->cols, c->is_layer ? 2 : 1);
    const uint64_t before = emulated_launch_count();
    EXPECT_OK(tn__op_table_cuda.norm_gradient_means(emulation.device, &work, emulation.stream));
    EXPECT_OK(tn__op_table_cuda.norm_gradient(emulation.device, &work, emulation.stream));
    emulation_wait(what);
    free(work.parts);
    assert_int_equal(emulated_launch_count() - before, launches);
    assert_int_equal(strncmp(emulated_last_kernel(), kernel, strlen(kernel)), 0);
    parts_end(&gamma, &o.gamma_sums, what), parts_end(&beta, &o.beta_sums, what);
    twin_plane_compare(&o.row, "planes", what);
    twin_plane_compare(&o.col, "planes", what);
    twin_matrix_compare(&o.dx, "dx", what);
    compare_sums(&o.gamma_sums, "sums of dgamma", what);
    compare_sums(&o.beta_sums, "sums of dbeta", what);
    end_operands(&o);
}

static void every_way_equals_the_host_in_every_order(void **state) {
    static const uint64_t orders[] = {0, 1, 20261130};
    static const int64_t rows[] = {1, 8, 23, 130, 128, 259, 13};
    (void)state;
    for (unsigned way = 0; way < 42; way++) {
        const gradient_case c = case_of(way, rows[way % 7], way % 2 ? 264 : 136);
        emulated_set_order(orders[way / 3 % 3]);
        check_case(&c, "norm_gradient_rows", 1);
    }
    emulated_set_order(0);
    gpu_count_report("gradients of norms, every way");
}

static void rows_of_any_length_equal_the_host(void **state) {
    static const int64_t lengths[] = {4, 8, 124, 1032, 2048, 2056, 4088, 4096};
    static const int64_t long_lengths[] = {4352, 7168, 8192};
    (void)state;
    for (unsigned i = 0; i < 4 * sizeof lengths / sizeof *lengths; i++) {
        gradient_case c = case_of(i * 5 + 1, i % 3 ? 11 : 18, lengths[i / 4]);
        if (c.cols % 8 != 0) c.dtype = TN_FP32;
        check_case(&c, "norm_gradient_rows", 1);
    }
    for (unsigned i = 0; i < 4 * sizeof long_lengths / sizeof *long_lengths; i++) {
        gradient_case c = case_of(i * 5 + 2, i % 3 ? 9 : 17, long_lengths[i / 4]);
        c.dtype = i % 2 ? TN_FP16 : TN_BF16;
        check_case(&c, "norm_gradient_rows", 1);
    }
    gpu_count_report("gradients of norms, long and short rows");
}

/* Without the rest of a tile, and whole ones. */
static void split_tiles_equal_the_host_in_every_order(void **state) {
    static const uint64_t orders[] = {0, 1, 20261202};
    static const int64_t rows[] = {1, 16, 17, 33, 64, 80, 127, 128, 129, 151, 200, 256, 270};
    (void)state;
    for (unsigned way = 0; way < 78; way++) {
        gradient_case c = case_of(way, rows[way % 13], way % 2 ? 264 : 136);
        c.split = 2 << way % 3;
        emulated_set_order(orders[way / 3 % 3]);
        check_case(&c, "norm_gradient_rows", 1);
    }
    for (unsigned i = 0; i < 3; i++) {
        gradient_case c = case_of(5 * i + 2, 100, 4352);
        c.dtype = i % 2 ? TN_FP16 : TN_BF16;
        c.split = 2 << i;
        check_case(&c, "norm_gradient_rows", 1);
    }
    emulated_set_order(0);
    gpu_count_report("gradients of norms, tiles of several blocks");
}

/* Of a tile across: the blocks that run one after the other here hold no more. */
static void held_tiles_equal_the_host_in_every_order(void **state) {
    static const uint64_t orders[] = {0, 1, 20261201};
    static const int64_t rows[] = {16, 144, 48, 304, 128, 272, 256}, cols[] = {8, 120, 128, 64, 72};
    (void)state;
    for (unsigned way = 0; way < 36; way++) {
        gradient_case c = case_of(way, rows[way % 7], cols[way % 5]);
        c.dtype = way % 2 ? TN_FP16 : TN_BF16;
        c.format = way / 2 % 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
        c.fp8 = way / 4 % 2 ? TN_E5M2 : TN_E4M3;
        c.has_row = way % 5 != 1, c.has_col = way % 5 != 2;
        c.rows -= way % 16;
        emulated_set_order(orders[way / 3 % 3]);
        check_case(&c, "norm_gradient_held", 2);
    }
    emulated_set_order(0);
    gpu_count_report("gradients of norms, held tiles");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_way_equals_the_host_in_every_order),
        cmocka_unit_test(rows_of_any_length_equal_the_host),
        cmocka_unit_test(split_tiles_equal_the_host_in_every_order),
        cmocka_unit_test(held_tiles_equal_the_host_in_every_order),
    };
    emulation_begin();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    emulation_end();
    return failures;
}
