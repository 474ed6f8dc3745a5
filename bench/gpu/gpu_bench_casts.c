/* Casts, and y += x, against a device copy of their source: GB/s of the bytes that must move.
 *
 * bf16 in, E4M3 with power-of-two scales out (y is bf16). Buffers rotate, so that nothing finds
 * its source in the L2 cache, or leaves its result there for the next one to overwrite.
 */
#include "gpu_bench.h"

#include <math.h>
#include <stdio.h>

enum { SETS_MAX = 8 };
static const double rotated_bytes = 512e6; /* of all sets: ten times the L2 of an H200 */

const int64_t gpu_bench_shapes[GPU_BENCH_SHAPES][2] = {
    {4096, 4096}, {8192, 8192}, {16384, 7168}, {15872, 16384}, {65536, 7168}};

typedef struct cast_sets {
    int count;
    tn_tensor src[SETS_MAX];
    tn_tensor dst[SETS_MAX];
    unsigned planes;
} cast_sets;

static void quantize(gpu_bench *bench, void *argument, int turn) {
    const cast_sets *sets = argument;
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = sets->src[turn % sets->count];
    args.dst = sets->dst[turn % sets->count];
    args.planes = sets->planes;
    GPU_BENCH_TRY(tn_quantize(&args, bench->stream));
}

/* Drops the plane that was derived in the last turn, and derives it again. */
static void transpose(gpu_bench *bench, void *argument, int turn) {
    const cast_sets *sets = argument;
    tn_transpose_args args = TN_TRANSPOSE_ARGS_INIT;
    args.tensor = sets->dst[turn % sets->count];
    GPU_BENCH_TRY(tn_plane_drop(args.tensor, TN_PLANE_COL, bench->stream));
    GPU_BENCH_TRY(tn_transpose(&args, bench->stream));
}

static void copy(gpu_bench *bench, void *argument, int turn) {
    const cast_sets *sets = argument;
    tn_plane_view from, to;
    tn_lease leases[2];
    tn_tensor src = sets->src[turn % sets->count], dst = sets->dst[turn % sets->count];
    GPU_BENCH_TRY(tn_lease_begin(src, TN_PLANE_DATA, TN_READ, bench->stream, &leases[0], &from));
    GPU_BENCH_TRY(tn_lease_begin(dst, TN_PLANE_DATA, TN_WRITE, bench->stream, &leases[1], &to));
    GPU_BENCH_TRY(
        tn_copy(bench->device, to.data, from.data, from.layout.data_bytes, bench->stream));
    GPU_BENCH_TRY(tn_lease_end(leases[1]));
    GPU_BENCH_TRY(tn_lease_end(leases[0]));
}

static void axpy(gpu_bench *bench, void *argument, int turn) {
    const cast_sets *sets = argument;
    tn_axpy_args args = TN_AXPY_ARGS_INIT;
    args.x = sets->src[turn % sets->count];
    args.y = sets->dst[turn % sets->count];
    GPU_BENCH_TRY(tn_axpy(&args, bench->stream));
}

static double source_bytes(const cast_sets *sets) {
    return gpu_bench_plane_bytes(sets->src[0], TN_PLANE_DATA);
}

static double rate(double bytes, double seconds) { return bytes / seconds * 1e-9; }

static void destroy_outputs(gpu_bench *bench, cast_sets *sets) {
    for (int i = 0; i < sets->count; i++)
        gpu_bench_destroy(bench, sets->dst[i]);
}

/* Work of bf16 on bf16 that moves the source's bytes `times` times. */
static double plain_rate(gpu_bench *bench, cast_sets *sets, gpu_bench_work work, double times,
                         int64_t rows, int64_t cols) {
    for (int i = 0; i < sets->count; i++)
        sets->dst[i] = gpu_bench_zeros(bench, TN_BF16, rows, cols);
    double seconds = gpu_bench_device_seconds(bench, work, sets);
    destroy_outputs(bench, sets);
    return rate(times * source_bytes(sets), seconds);
}

double gpu_bench_copy_rate(gpu_bench *bench, const tn_tensor *sources, int count, int64_t rows,
                           int64_t cols) {
    cast_sets sets = {.count = count};
    for (int i = 0; i < count; i++)
        sets.src[i] = sources[i];
    return plain_rate(bench, &sets, copy, 2.0, rows, cols);
}

static double cast_rate(gpu_bench *bench, cast_sets *sets, tn_format format, unsigned planes,
                        int64_t rows, int64_t cols) {
    for (int i = 0; i < sets->count; i++)
        sets->dst[i] = gpu_bench_fp8(bench, format, rows, cols);
    sets->planes = planes;
    double bytes = source_bytes(sets);
    if (planes & TN_QUANTIZE_ROW) bytes += gpu_bench_plane_bytes(sets->dst[0], TN_PLANE_ROW);
    if (planes & TN_QUANTIZE_COL) bytes += gpu_bench_plane_bytes(sets->dst[0], TN_PLANE_COL);
    double result = rate(bytes, gpu_bench_device_seconds(bench, quantize, sets));
    destroy_outputs(bench, sets);
    return result;
}

static double transpose_rate(gpu_bench *bench, cast_sets *sets, int64_t rows, int64_t cols) {
    for (int i = 0; i < sets->count; i++)
        sets->dst[i] =
            gpu_bench_random_fp8(bench, TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW, rows, cols);
    double bytes = gpu_bench_plane_bytes(sets->dst[0], TN_PLANE_ROW) +
                   gpu_bench_plane_bytes(sets->dst[0], TN_PLANE_COL);
    double result = rate(bytes, gpu_bench_device_seconds(bench, transpose, sets));
    destroy_outputs(bench, sets);
    return result;
}

static void measure_shape(gpu_bench *bench, gpu_bench_row *row, int64_t rows, int64_t cols) {
    static const struct {
        tn_format format;
        unsigned planes;
    } casts[] = {{TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW},
                 {TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_COL},
                 {TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW | TN_QUANTIZE_COL},
                 {TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW},
                 {TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW | TN_QUANTIZE_COL}};
    double sets_wanted = ceil(rotated_bytes / ((double)rows * (double)cols * 4.0));
    cast_sets sets = {.count = sets_wanted > SETS_MAX ? SETS_MAX : (int)sets_wanted};
    for (int i = 0; i < sets.count; i++)
        sets.src[i] = gpu_bench_random(bench, rows, cols);
    for (int i = 0; i < 5; i++)
        row->figures[i] = cast_rate(bench, &sets, casts[i].format, casts[i].planes, rows, cols);
    row->figures[5] = transpose_rate(bench, &sets, rows, cols);
    row->figures[6] = plain_rate(bench, &sets, axpy, 3.0, rows, cols);
    row->figures[7] = gpu_bench_copy_rate(bench, sets.src, sets.count, rows, cols);
    for (int i = 0; i < sets.count; i++)
        gpu_bench_destroy(bench, sets.src[i]);
}

void gpu_bench_casts(gpu_bench *bench, gpu_bench_section *section) {
    for (int i = 0; i < GPU_BENCH_SHAPES; i++) {
        const int64_t *shape = gpu_bench_shapes[i];
        char title[48];
        snprintf(title, sizeof title, "%lld x %lld", (long long)shape[0], (long long)shape[1]);
        measure_shape(bench, gpu_bench_row_add(section, title), shape[0], shape[1]);
    }
}
