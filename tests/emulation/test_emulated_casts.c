/* The kernels of the casts against the host's definition, bit for bit, on the emulated device. */
#include <stdio.h>

#include "emulation_support.h"

static const tn_dtype floats[] = {TN_FP32, TN_BF16, TN_FP16};
static const tn_dtype codes[] = {TN_E4M3, TN_E5M2};
static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};
static const tn_plane planes[] = {TN_PLANE_ROW, TN_PLANE_COL};

/* ---- quantize ------------------------------------------------------------------------------- */

typedef struct cast_case {
    int64_t rows, cols;
    tn_dtype source, target;
    tn_format format;
    tn_scale_mode mode;
    float epsilon;
    int has_row, has_col;
    gpu_fill fill;
    uint64_t seed;
} cast_case;

/* One of all combinations of types, modes and planes; the epsilon changes with them. */
enum { WAYS = 3 * 2 * 2 * 2 * 3 };

static cast_case case_of(unsigned way, int64_t rows, int64_t cols, gpu_fill fill, uint64_t seed) {
    unsigned which = way / 24 % 3 + 1;
    cast_case made = {.rows = rows,
                      .cols = cols,
                      .source = floats[way % 3],
                      .target = codes[way / 3 % 2],
                      .format = formats[way / 6 % 2],
                      .mode = way / 12 % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2,
                      .epsilon = way % 5 == 4 ? 1.0f : 0.0f,
                      .has_row = which & 1,
                      .has_col = (which & 2) != 0,
                      .fill = fill,
                      .seed = seed};
    return made;
}

static void describe(const cast_case *c, char *text, size_t bytes) {
    snprintf(text, bytes, "%s to %s %s %s epsilon %g, %lld x %lld %s seed %llu",
             tn_dtype_name(c->source), tn_dtype_name(c->target), tn_format_name(c->format),
             c->mode == TN_SCALE_POW2 ? "pow2" : "fp32", (double)c->epsilon, (long long)c->rows,
             (long long)c->cols, gpu_fill_name(c->fill), (unsigned long long)c->seed);
}

static void check_quantize(const cast_case *c) {
    static const char *const names[] = {"", "quantize row", "quantize col", "quantize both"};
    char what[160];
    twin_matrix src = twin_matrix_fill(c->source, c->rows, c->cols, c->fill, c->seed);
    twin_plane made[2];
    describe(c, what, sizeof what);
    for (int p = 0; p < 2; p++)
        made[p] = twin_plane_make(c->format, planes[p], c->target, c->rows, c->cols);
    tn__quantize_work work = {.src = src.host,
                              .format = c->format,
                              .scale_mode = c->mode,
                              .dtype = c->target,
                              .amax_epsilon = c->epsilon,
                              .has_row = c->has_row,
                              .has_col = c->has_col,
                              .row = made[0].host,
                              .col = made[1].host};
    tn__host_quantize(&work);
    work.src = src.emulated, work.row = made[0].emulated, work.col = made[1].emulated;
    EXPECT_OK(tn__op_table_cuda.quantize(emulation.device, &work, emulation.stream));
    emulation_wait(what);
    for (int p = 0; p < 2; p++) {
        twin_plane_compare(&made[p], names[c->has_row + 2 * c->has_col], what);
        twin_plane_end(&made[p]);
    }
    twin_matrix_end(&src);
}

/* Together the tails meet every way several times. */
static void check_quantize_tail(int64_t rows, int64_t cols, uint64_t seed) {
    for (unsigned i = 0; i < 6; i++) {
        unsigned way = (unsigned)(seed * 6 + i) * 37 % WAYS;
        cast_case c = case_of(way, rows, cols, i == 0 ? GPU_FILL_SPECIAL : GPU_FILL_NORMAL, seed);
        check_quantize(&c);
    }
}

static void quantizing_every_tail_equals_the_host(void **state) {
    (void)state;
    emulation_each_tail(7, check_quantize_tail);
    gpu_count_report("quantize, tails");
}

static void every_way_to_quantize_equals_the_host(void **state) {
    static const int64_t shapes[][2] = {{1, 1}, {129, 130}, {65, 96}, {303, 300}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (unsigned way = 0; way < WAYS; way++) {
            gpu_fill fill = (gpu_fill)((way + s) % GPU_FILL_COUNT);
            cast_case c = case_of(way, shapes[s][0], shapes[s][1], fill, way);
            check_quantize(&c);
        }
    }
    gpu_count_report("quantize, every way");
}

/* Of TransformerEngine's list, those that are not large; each in the ways that its number picks. */
static void transformer_engines_shapes_equal_the_host(void **state) {
    static const int64_t shapes[][2] = {{1, 16},   {256, 256}, {993, 512},
                                        {1024, 1}, {16, 512},  {1, 1024}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (unsigned way = (unsigned)s; way < WAYS; way += 6) {
            gpu_fill fill = way % 4 ? GPU_FILL_NORMAL : GPU_FILL_RANGE;
            cast_case c = case_of(way, shapes[s][0], shapes[s][1], fill, way);
            check_quantize(&c);
        }
    }
    gpu_count_report("quantize, TransformerEngine's shapes");
}

/* All of a block the same: zeros, the largest number, a denormal, NaN, infinities. */
static void blocks_of_special_numbers_equal_the_host(void **state) {
    (void)state;
    for (int fill = 0; fill < GPU_FILL_COUNT; fill++) {
        for (unsigned way = 0; way < WAYS; way++) {
            cast_case c = case_of(way, 130, 24, (gpu_fill)fill, way + 1);
            check_quantize(&c);
        }
    }
    gpu_count_report("quantize, special numbers");
}

/* ---- dequantize and transpose --------------------------------------------------------------- */

static twin_plane quantized(const cast_case *c, int p) {
    twin_matrix src = twin_matrix_fill(c->source, c->rows, c->cols, c->fill, c->seed);
    twin_plane made = twin_plane_make(c->format, planes[p], c->target, c->rows, c->cols);
    tn__quantize_work work = {.src = src.host,
                              .format = c->format,
                              .scale_mode = c->mode,
                              .dtype = c->target,
                              .has_row = p == 0,
                              .has_col = p == 1,
                              .row = made.host,
                              .col = made.host};
    tn__host_quantize(&work);
    twin_plane_share(&made);
    twin_matrix_end(&src);
    return made;
}

static void check_dequantize(const cast_case *c, int p, tn_dtype to) {
    char what[160];
    twin_plane src = quantized(c, p);
    twin_matrix dst = twin_matrix_make(to, c->rows, c->cols);
    tn__dequantize_work work = {.format = c->format, .src = src.host, .dst = dst.host};
    describe(c, what, sizeof what);
    tn__host_dequantize(&work);
    work.src = src.emulated, work.dst = dst.emulated;
    EXPECT_OK(tn__op_table_cuda.dequantize(emulation.device, &work, emulation.stream));
    emulation_wait(what);
    twin_matrix_compare(&dst, p ? "dequantize col" : "dequantize row", what);
    twin_matrix_end(&dst);
    twin_plane_end(&src);
}

static void check_transpose_on(const cast_case *c, int p, int processors, const char *kernel) {
    char what[160];
    twin_plane from = quantized(c, p);
    twin_plane to = twin_plane_make(c->format, planes[!p], c->target, c->rows, c->cols);
    tn__transpose_work work = {from.host, to.host, 0};
    describe(c, what, sizeof what);
    tn__host_transpose(&work);
    work = (tn__transpose_work){from.emulated, to.emulated, processors};
    EXPECT_OK(tn__op_table_cuda.transpose(emulation.device, &work, emulation.stream));
    assert_string_equal(emulated_last_kernel(), kernel);
    emulation_wait(what);
    twin_plane_compare(&to, p ? "transpose to row" : "transpose to col", what);
    twin_plane_end(&to);
    twin_plane_end(&from);
}

static void check_transpose(const cast_case *c, int p) {
    check_transpose_on(c, p, 0, "transpose_plane");
}

static void check_inverse_tail(int64_t rows, int64_t cols, uint64_t seed) {
    gpu_fill fill = seed % 3 ? GPU_FILL_NORMAL : GPU_FILL_SPECIAL;
    for (unsigned i = 0; i < 4; i++) {
        cast_case c = case_of((unsigned)seed * 4 + i, rows, cols, fill, seed);
        check_dequantize(&c, (int)(i % 2), floats[(seed + i) % 3]);
        c.format = TN_FORMAT_FP8_BLOCK_2D;
        check_transpose(&c, (int)(i % 2));
    }
}

static void dequantizing_and_transposing_every_tail_equals_the_host(void **state) {
    (void)state;
    emulation_each_tail(7, check_inverse_tail);
    gpu_count_report("dequantize, transpose, tails");
}

static void every_way_to_dequantize_equals_the_host(void **state) {
    (void)state;
    for (unsigned way = 0; way < 24; way++) {
        for (int fill = 0; fill < GPU_FILL_COUNT; fill++) {
            cast_case c = case_of(way, 144, 272, (gpu_fill)fill, way);
            check_dequantize(&c, (int)(way + (unsigned)fill) % 2, floats[way / 2 % 3]);
            check_dequantize(&c, (int)(way + (unsigned)fill + 1) % 2, floats[way / 2 % 3]);
        }
    }
    gpu_count_report("dequantize, every way");
}

/* As beside a product. Rows that do not begin at multiples of 16 are for the other kernel. */
static void transposing_on_few_multiprocessors_equals_the_host(void **state) {
    static const int64_t shapes[][2] = {{16, 16},   {128, 128}, {256, 128}, {144, 272},
                                        {272, 144}, {528, 400}, {400, 784}, {1040, 272}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (unsigned way = 0; way < 8; way++) {
            const gpu_fill fill = way % 4 == 3 ? GPU_FILL_SPECIAL : GPU_FILL_NORMAL;
            cast_case c = case_of(way * 3 + 6, shapes[s][0], shapes[s][1], fill, s * 8 + way);
            c.format = TN_FORMAT_FP8_BLOCK_2D;
            check_transpose_on(&c, (int)(way % 2), way / 2 % 2 ? 4 : 2, "transpose_plane_narrow");
        }
    }
    cast_case odd = case_of(6, 136, 144, GPU_FILL_NORMAL, 1);
    odd.format = TN_FORMAT_FP8_BLOCK_2D;
    check_transpose_on(&odd, 0, 4, "transpose_plane");
    gpu_count_report("transpose, on few multiprocessors");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantizing_every_tail_equals_the_host),
        cmocka_unit_test(every_way_to_quantize_equals_the_host),
        cmocka_unit_test(transformer_engines_shapes_equal_the_host),
        cmocka_unit_test(blocks_of_special_numbers_equal_the_host),
        cmocka_unit_test(dequantizing_and_transposing_every_tail_equals_the_host),
        cmocka_unit_test(every_way_to_dequantize_equals_the_host),
        cmocka_unit_test(transposing_on_few_multiprocessors_equals_the_host),
    };
    emulation_begin();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    emulation_end();
    return failures;
}
