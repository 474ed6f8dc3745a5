/* The kernels that round stochastically against the host's definition, bit for bit: every format,
 * and the generator's state after each. */
#include <stdio.h>
#include <string.h>

#include "emulation_support.h"

static const tn_dtype floats[] = {TN_FP32, TN_BF16, TN_FP16};
static const tn_plane planes[] = {TN_PLANE_ROW, TN_PLANE_COL};

static const struct casting {
    tn_format format;
    tn_dtype dtype;
} castings[] = {
    {TN_FORMAT_NVFP4, TN_E2M1},        {TN_FORMAT_MXFP8, TN_E4M3},
    {TN_FORMAT_MXFP8, TN_E5M2},        {TN_FORMAT_FP8_TENSOR, TN_E4M3},
    {TN_FORMAT_FP8_TENSOR, TN_E5M2},   {TN_FORMAT_FP8_BLOCK_1D, TN_E4M3},
    {TN_FORMAT_FP8_BLOCK_1D, TN_E5M2}, {TN_FORMAT_FP8_BLOCK_2D, TN_E4M3},
    {TN_FORMAT_FP8_BLOCK_2D, TN_E5M2},
};
enum { CASTINGS = sizeof castings / sizeof *castings, WAYS = CASTINGS * 3 * 3 };

/* Seed and offset with bits in both halves of each. */
static twin state_make(uint64_t seed) {
    const tn__random state = {0x9876543210000000u + seed, 0xFFFFFFFFu - seed % 2};
    twin made = twin_make(sizeof state, 0);
    memcpy(made.host, &state, sizeof state);
    memcpy(made.emulated, &state, sizeof state);
    return made;
}

static tn__random *state_in(unsigned char *memory) { return (tn__random *)(void *)memory; }

static void check_cast(unsigned way, int64_t rows, int64_t cols, gpu_fill fill, uint64_t seed) {
    const struct casting *to = &castings[way % CASTINGS];
    const unsigned which = way / CASTINGS % 3 + 1;
    const tn_dtype source = floats[way / (CASTINGS * 3) % 3];
    char what[160];
    twin_matrix src = twin_matrix_fill(source, rows, cols, fill, seed);
    twin state = state_make(seed);
    twin_plane made[2];
    tn__quantize_work work = {.format = to->format,
                              .dtype = to->dtype,
                              .scale_mode = seed % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2,
                              .has_row = which & 1,
                              .has_col = which >> 1};
    work.square_blocks = to->format == TN_FORMAT_NVFP4 && seed % 2;
    snprintf(what, sizeof what, "%s to %s %s, %lld x %lld %s seed %llu", tn_dtype_name(source),
             tn_dtype_name(to->dtype), tn_format_name(to->format), (long long)rows, (long long)cols,
             gpu_fill_name(fill), (unsigned long long)seed);
    for (int p = 0; p < 2; p++)
        made[p] = twin_plane_make(to->format, planes[p], to->dtype, rows, cols);
    work.src = src.host, work.row = made[0].host, work.col = made[1].host;
    work.random = state_in(state.host);
    tn__host_quantize(&work);
    work.src = src.emulated, work.row = made[0].emulated, work.col = made[1].emulated;
    work.random = state_in(state.emulated);
    EXPECT_OK(tn__op_table_cuda.quantize(emulation.device, &work, emulation.stream));
    emulation_wait(what);
    twin_compare(&state, "seed and offset", what);
    for (int p = 0; p < 2; p++) {
        twin_plane_compare(&made[p], tn_format_name(to->format), what);
        twin_plane_end(&made[p]);
    }
    twin_matrix_end(&src), twin_end(&state);
}

static void check_tail(int64_t rows, int64_t cols, uint64_t seed) {
    for (unsigned i = 0; i < 6; i++) {
        gpu_fill fill = i == 0 ? GPU_FILL_SPECIAL : GPU_FILL_NORMAL;
        check_cast((unsigned)(seed * 6 + i) * 7 % WAYS, rows, cols, fill, seed + i);
    }
}

static void every_tail_equals_the_host(void **unused) {
    (void)unused;
    emulation_each_tail(7, check_tail);
    gpu_count_report("stochastic rounding, tails");
}

static void every_way_equals_the_host(void **unused) {
    static const int64_t shapes[][2] = {{1, 1}, {129, 144}, {40, 259}};
    (void)unused;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (unsigned way = 0; way < WAYS; way++) {
            gpu_fill fill = (gpu_fill)((way + s) % GPU_FILL_COUNT);
            check_cast(way, shapes[s][0], shapes[s][1], fill, way + s);
        }
    }
    gpu_count_report("stochastic rounding, every way");
}

/* With the flag set nothing is drawn, either. */
static void a_skipped_cast_leaves_the_offset(void **unused) {
    static float flag = 1.0f;
    (void)unused;
    for (int c = 0; c < CASTINGS; c++) {
        twin_matrix src = twin_matrix_fill(TN_BF16, 40, 130, GPU_FILL_NORMAL, 5);
        twin_plane row =
            twin_plane_make(castings[c].format, TN_PLANE_ROW, castings[c].dtype, 40, 130);
        twin state = state_make(0);
        tn__quantize_work work = {.src = src.emulated,
                                  .format = castings[c].format,
                                  .dtype = castings[c].dtype,
                                  .has_row = 1,
                                  .row = row.emulated,
                                  .skip = &flag,
                                  .random = state_in(state.emulated)};
        EXPECT_OK(tn__op_table_cuda.quantize(emulation.device, &work, emulation.stream));
        emulation_wait("skip");
        twin_compare(&state, "seed and offset", "skip");
        twin_plane_compare(&row, "plane", "skip"); /* both sides are as they were made */
        twin_plane_end(&row), twin_matrix_end(&src), twin_end(&state);
    }
    gpu_count_report("skipped draws");
}

static int run_all(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tail_equals_the_host),
        cmocka_unit_test(every_way_equals_the_host),
        cmocka_unit_test(a_skipped_cast_leaves_the_offset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(void) {
    emulation_begin();
    int failures = run_all();
    emulation_end();
    return failures;
}
