/* The kernels of TENSOR, MXFP8, NVFP4 and of delayed scaling against the host's definition, bit for
 * bit, on the emulated device. */
#include <stdio.h>
#include <string.h>

#include "emulation_support.h"

static const tn_dtype floats[] = {TN_FP32, TN_BF16, TN_FP16};
static const tn_plane planes[] = {TN_PLANE_ROW, TN_PLANE_COL};

static const struct casting {
    tn_format format;
    tn_dtype dtype;
} castings[] = {{TN_FORMAT_FP8_TENSOR, TN_E4M3},
                {TN_FORMAT_FP8_TENSOR, TN_E5M2},
                {TN_FORMAT_MXFP8, TN_E4M3},
                {TN_FORMAT_MXFP8, TN_E5M2},
                {TN_FORMAT_NVFP4, TN_E2M1}};
enum { CASTINGS = sizeof castings / sizeof *castings, WAYS = CASTINGS * 3 * 3 };

/* One cast; delayed: with a factor that is given, and an amax that is collected. */
typedef struct format_case {
    struct casting to;
    tn_dtype source;
    int64_t rows, cols;
    tn_scale_mode mode;
    float epsilon;
    int has_row, has_col, is_delayed;
    gpu_fill fill;
    uint64_t seed;
    char what[160];
} format_case;

static format_case case_of(unsigned way, int64_t rows, int64_t cols, gpu_fill fill, uint64_t seed) {
    unsigned which = way / CASTINGS % 3 + 1;
    format_case c = {.to = castings[way % CASTINGS],
                     .source = floats[way / (CASTINGS * 3) % 3],
                     .rows = rows,
                     .cols = cols,
                     .mode = seed % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2,
                     .epsilon = seed % 3 ? 0.0f : 0.75f,
                     .has_row = which & 1,
                     .has_col = (which & 2) != 0,
                     .fill = fill,
                     .seed = seed};
    c.is_delayed = c.to.format == TN_FORMAT_FP8_TENSOR && seed % 4 == 1;
    snprintf(c.what, sizeof c.what, "%s to %s %s%s epsilon %g, %lld x %lld %s seed %llu",
             tn_dtype_name(c.source), tn_dtype_name(c.to.dtype), tn_format_name(c.to.format),
             c.is_delayed ? " delayed" : "", (double)c.epsilon, (long long)rows, (long long)cols,
             gpu_fill_name(fill), (unsigned long long)seed);
    return c;
}

static tn__quantize_work work_of(const format_case *c) {
    tn__quantize_work work = {.format = c->to.format,
                              .scale_mode = c->mode,
                              .dtype = c->to.dtype,
                              .amax_epsilon = c->epsilon,
                              .has_row = c->has_row,
                              .has_col = c->has_col};
    work.square_blocks = c->to.format == TN_FORMAT_NVFP4 && c->seed % 2;
    return work;
}

/* ---- quantize ------------------------------------------------------------------------------- */

static void check_quantize_of(const format_case *c, const twin_matrix *src) {
    twin_matrix factor = twin_matrix_fill(TN_FP32, 1, 1, GPU_FILL_NORMAL, c->seed);
    twin_matrix amax = twin_matrix_fill(TN_FP32, 1, 1, GPU_FILL_ZERO, c->seed);
    twin_plane made[2];
    tn__quantize_work work = work_of(c);
    for (int p = 0; p < 2; p++)
        made[p] = twin_plane_make(c->to.format, planes[p], c->to.dtype, c->rows, c->cols);
    work.src = src->host, work.row = made[0].host, work.col = made[1].host;
    if (c->is_delayed) work.factor = factor.host.data;
    if (c->to.format == TN_FORMAT_FP8_TENSOR) work.amax = amax.host.data;
    tn__host_quantize(&work);
    work.src = src->emulated, work.row = made[0].emulated, work.col = made[1].emulated;
    if (work.factor) work.factor = factor.emulated.data;
    if (work.amax) work.amax = amax.emulated.data;
    EXPECT_OK(tn__op_table_cuda.quantize(emulation.device, &work, emulation.stream));
    emulation_wait(c->what);
    twin_matrix_compare(&amax, "amax", c->what);
    for (int p = 0; p < 2; p++) {
        twin_plane_compare(&made[p], tn_format_name(c->to.format), c->what);
        twin_plane_end(&made[p]);
    }
    twin_matrix_end(&factor), twin_matrix_end(&amax);
}

static void check_quantize(const format_case *c) {
    twin_matrix src = twin_matrix_fill(c->source, c->rows, c->cols, c->fill, c->seed);
    check_quantize_of(c, &src);
    twin_matrix_end(&src);
}

static void check_quantize_tail(int64_t rows, int64_t cols, uint64_t seed) {
    for (unsigned i = 0; i < 6; i++) {
        gpu_fill fill = i == 0 ? GPU_FILL_SPECIAL : GPU_FILL_NORMAL;
        format_case c = case_of((unsigned)(seed * 6 + i) * 7 % WAYS, rows, cols, fill, seed + i);
        check_quantize(&c);
    }
}

static void quantizing_every_tail_equals_the_host(void **state) {
    (void)state;
    emulation_each_tail(7, check_quantize_tail);
    gpu_count_report("casts of formats, tails");
}

static void every_way_to_quantize_equals_the_host(void **state) {
    static const int64_t shapes[][2] = {{1, 1}, {129, 144}, {40, 259}, {130, 24}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (unsigned way = 0; way < WAYS; way++) {
            for (int fill = (int)(way % 2); fill < GPU_FILL_COUNT; fill += 2) {
                format_case c = case_of(way, shapes[s][0], shapes[s][1], (gpu_fill)fill, way + s);
                check_quantize(&c);
            }
        }
    }
    gpu_count_report("casts of formats, every way");
}

/* Amaxes of blocks so small that what their product with 1/6 leaves is no exact difference: a sixth
 * is half way between two numbers, of which one goes to the scale below, the other to that above.
 * With n the largest whole number below m 2^18 / 21, which is odd, and 2^-149 the least number, an
 * amax of (6 n + 3) 2^-149 has n + 1 for its sixth, to even; times 2688 / 2^-114 that is just above
 * m 2^-10, half way between two E4M3 numbers if m is odd and below 16, and n is just below it. */
static void sixths_that_are_denormal_are_divided(void **state) {
    enum { ROWS = 40, COLS = 144 };
    format_case c = {.to = {TN_FORMAT_NVFP4, TN_E2M1},
                     .rows = ROWS,
                     .cols = COLS,
                     .has_row = 1,
                     .has_col = 1,
                     .what = "denormal sixths"};
    float values[ROWS][COLS] = {{0}};
    (void)state;
    for (int row = 0; row < ROWS; row++) {
        for (int col = row % 16; col < COLS; col += 16) { /* one in each block of both planes */
            const int m = 1 + 2 * ((row + col / 16) % 8);
            values[row][col] = (float)(6 * (m * (1 << 18) / 21) + 3) * 0x1p-149f;
        }
    }
    values[0][0] = 0x1p-114f;
    for (c.seed = 0; c.seed < 2; c.seed++) { /* blocks, squares */
        twin_matrix src = twin_matrix_make(TN_FP32, ROWS, COLS);
        memcpy(src.host.data, values, sizeof values);
        memcpy(src.emulated.data, values, sizeof values);
        check_quantize_of(&c, &src);
        twin_matrix_end(&src);
    }
    gpu_count_report("casts of formats, denormal sixths");
}

/* ---- dequantize ----------------------------------------------------------------------------- */

static void check_dequantize(const format_case *c, int p, tn_dtype to) {
    twin_matrix src = twin_matrix_fill(c->source, c->rows, c->cols, c->fill, c->seed);
    twin_matrix dst = twin_matrix_make(to, c->rows, c->cols);
    twin_plane plane = twin_plane_make(c->to.format, planes[p], c->to.dtype, c->rows, c->cols);
    tn__quantize_work made = work_of(c);
    made.src = src.host, made.has_row = p == 0, made.has_col = p == 1;
    made.row = made.col = plane.host;
    tn__host_quantize(&made);
    twin_plane_share(&plane);
    tn__dequantize_work work = {.format = c->to.format, .src = plane.host, .dst = dst.host};
    tn__host_dequantize(&work);
    work.src = plane.emulated, work.dst = dst.emulated;
    EXPECT_OK(tn__op_table_cuda.dequantize(emulation.device, &work, emulation.stream));
    emulation_wait(c->what);
    twin_matrix_compare(&dst, "dequantize", c->what);
    twin_matrix_end(&src), twin_matrix_end(&dst), twin_plane_end(&plane);
}

static void check_dequantize_tail(int64_t rows, int64_t cols, uint64_t seed) {
    for (unsigned i = 0; i < 4; i++) {
        gpu_fill fill = (gpu_fill)((seed + i) % GPU_FILL_COUNT);
        format_case c = case_of((unsigned)(seed + i) % CASTINGS, rows, cols, fill, seed);
        check_dequantize(&c, (int)(i % 2), floats[(seed + i / 2) % 3]);
    }
}

static void dequantizing_every_tail_equals_the_host(void **state) {
    (void)state;
    emulation_each_tail(7, check_dequantize_tail);
    for (uint64_t seed = 0; seed < 30; seed++)
        check_dequantize_tail(144, 272, seed);
    gpu_count_report("back from formats");
}

/* ---- re-quantize ---------------------------------------------------------------------------- */

/* Planes of blocks of 128 from one of them, with new scales or shifted. */
static void check_requantize(int64_t rows, int64_t cols, uint64_t seed) {
    static const tn_format blocks[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};
    static const tn_dtype codes[] = {TN_E4M3, TN_E5M2};
    const int shifts = seed % 3 == 0, p = (int)(seed / 3 % 2), other = (int)(seed / 6 % 3) + 1;
    const tn_format format = shifts ? TN_FORMAT_FP8_BLOCK_1D : blocks[seed / 2 % 2];
    const tn_dtype dtype = codes[seed / 5 % 2];
    char what[80];
    twin_matrix src =
        twin_matrix_fill(TN_FP32, rows, cols, (gpu_fill)(seed % GPU_FILL_COUNT), seed);
    twin_plane from = twin_plane_make(format, planes[p], dtype, rows, cols);
    tn__quantize_work made = {.src = src.host, .format = format, .dtype = dtype};
    made.has_row = p == 0, made.has_col = p == 1, made.row = made.col = from.host;
    tn__host_quantize(&made);
    twin_plane_share(&from);
    tn__requantize_work work = {.format = format, .from = from.host, .shifts = shifts};
    work.to = (tn__quantize_work){.src = {TN_FP32, NULL, rows, cols},
                                  .format = shifts ? format : blocks[seed / 4 % 2],
                                  .dtype = shifts ? dtype : codes[seed / 7 % 2],
                                  .scale_mode = shifts ? TN_SCALE_POW2 : TN_SCALE_FP32,
                                  .has_row = shifts ? p == 1 : other & 1,
                                  .has_col = shifts ? p == 0 : other >> 1};
    twin_plane to[2];
    for (int i = 0; i < 2; i++)
        to[i] = twin_plane_make(work.to.format, planes[i], work.to.dtype, rows, cols);
    work.to.row = to[0].host, work.to.col = to[1].host;
    snprintf(what, sizeof what, "%lld x %lld seed %llu", (long long)rows, (long long)cols,
             (unsigned long long)seed);
    tn__host_requantize(&work);
    work.from = from.emulated, work.to.row = to[0].emulated, work.to.col = to[1].emulated;
    EXPECT_OK(tn__op_table_cuda.requantize(emulation.device, &work, emulation.stream));
    emulation_wait(what);
    for (int i = 0; i < 2; i++) {
        twin_plane_compare(&to[i], shifts ? "shift" : "requantize", what);
        twin_plane_end(&to[i]);
    }
    twin_matrix_end(&src), twin_plane_end(&from);
}

static void requantizing_every_tail_equals_the_host(void **state) {
    (void)state;
    emulation_each_tail(7, check_requantize);
    for (uint64_t seed = 0; seed < 60; seed++)
        check_requantize(144, 272, seed);
    gpu_count_report("re-quantize");
}

/* ---- delayed scaling ------------------------------------------------------------------------ */

/* More entries than a block has threads; several steps, each with new amaxes in the first row. */
static void updating_scales_equals_the_host(void **state) {
    static const int64_t lengths[] = {1, 2, 3, 255, 256, 257, 258, 600};
    (void)state;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths * 2; i++) {
        const int64_t length = lengths[i / 2], count = 1 + (int64_t)i % 3;
        twin_matrix history = twin_matrix_fill(TN_FP32, length, count, GPU_FILL_SPECIAL, i);
        twin_matrix scale = twin_matrix_fill(TN_FP32, 1, count, GPU_FILL_NORMAL, i);
        for (int step = 0; step < 4; step++) {
            twin_matrix fresh = twin_matrix_fill(TN_FP32, 1, count, (gpu_fill)(step % 3), i);
            memcpy(history.host.data, fresh.host.data, (size_t)count * sizeof(float));
            memcpy(history.emulated.data, fresh.host.data, (size_t)count * sizeof(float));
            tn__scale_update_work work = {.history = history.host.data,
                                          .scale = scale.host.data,
                                          .length = length,
                                          .count = count,
                                          .target = 448.0f,
                                          .is_most_recent = (int)((i + step) % 2)};
            tn__host_scale_update(&work);
            work.history = history.emulated.data, work.scale = scale.emulated.data;
            EXPECT_OK(tn__op_table_cuda.scale_update(emulation.device, &work, emulation.stream));
            emulation_wait("scale_update");
            twin_matrix_compare(&history, "history", "scale_update");
            twin_matrix_compare(&scale, "scale", "scale_update");
            twin_matrix_end(&fresh);
        }
        twin_matrix_end(&history), twin_matrix_end(&scale);
    }
    gpu_count_report("delayed scaling");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantizing_every_tail_equals_the_host),
        cmocka_unit_test(every_way_to_quantize_equals_the_host),
        cmocka_unit_test(sixths_that_are_denormal_are_divided),
        cmocka_unit_test(dequantizing_every_tail_equals_the_host),
        cmocka_unit_test(requantizing_every_tail_equals_the_host),
        cmocka_unit_test(updating_scales_equals_the_host),
    };
    emulation_begin();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    emulation_end();
    return failures;
}
