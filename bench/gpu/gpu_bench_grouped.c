/* Casts of many experts at once, of rows, and of parts of a weight, against a device copy.
 *
 * bf16 in, E4M3 with power-of-two scales out. Counted are the bytes that must move: each input
 * once, each output once, with scales and maps. Tokens are spread over the experts as evenly as
 * they go; maps are permutations, the same stride for all.
 */
#include "gpu_bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tenure_cast.h"

enum { SETS_MAX = 8, EXPERTS_MAX = 64, CHOICES = 2 };
static const double rotated_bytes = 512e6; /* of all sets: ten times the L2 of an H200 */

/* What an op works on, SETS_MAX times at most, so that nothing is found in the L2 cache. */
typedef struct rows_sets {
    int count;
    int64_t rows, cols;
    int experts;
    tn_tensor src[SETS_MAX];
    tn_tensor data[SETS_MAX][2], scale[SETS_MAX][2]; /* row, column plane */
    tn_tensor dst[SETS_MAX];
    tn_tensor offsets, map, error, amax;
} rows_sets;

/* ---- operands ------------------------------------------------------------------------------- */

static tn_tensor bytes_of(gpu_bench *bench, const void *data, size_t bytes) {
    tn_tensor tensor = gpu_bench_zeros(bench, TN_BYTE, 1, (int64_t)bytes);
    GPU_BENCH_TRY(tn_plane_write(tensor, TN_PLANE_DATA, data, bytes, NULL, 0, bench->stream));
    GPU_BENCH_TRY(tn_stream_synchronize(bench->device, bench->stream));
    return tensor;
}

static tn_tensor offsets_of(gpu_bench *bench, int experts, int64_t rows) {
    int64_t offsets[EXPERTS_MAX + 1];
    for (int e = 0; e <= experts; e++)
        offsets[e] = rows * e / experts;
    return bytes_of(bench, offsets, sizeof *offsets * (size_t)(experts + 1));
}

/* Row i of the result is row 7919 i of the source: 7919 is prime to all the sizes. */
static tn_tensor permutation_of(gpu_bench *bench, int64_t rows) {
    int64_t *map = malloc((size_t)rows * sizeof *map);
    gpu_bench_require(map ? TN_OK : TN_OUT_OF_HOST_MEMORY, "malloc");
    for (int64_t i = 0; map && i < rows; i++)
        map[i] = i * 7919 % rows;
    tn_tensor tensor = bytes_of(bench, map, (size_t)rows * sizeof *map);
    free(map);
    return tensor;
}

/* Exactly the scales of the groups: of 1D planes of m x K, ceil(K/128) up4(m) and, turned,
 * ceil(m/128) up4(K). */
static double group_scale_bytes(const rows_sets *sets) {
    int64_t floats = 0;
    for (int e = 0; e < sets->experts; e++) {
        int64_t m = sets->rows * (e + 1) / sets->experts - sets->rows * e / sets->experts;
        floats += (sets->cols + 127) / 128 * ((m + 3) / 4 * 4);
        floats += (m + 127) / 128 * ((sets->cols + 3) / 4 * 4);
    }
    return (double)floats * (double)sizeof(float);
}

/* ---- ops ------------------------------------------------------------------------------------ */

static void grouped_quantize(gpu_bench *bench, void *argument, int turn) {
    const rows_sets *sets = argument;
    tn_grouped_quantize_args args = TN_GROUPED_QUANTIZE_ARGS_INIT;
    int set = turn % sets->count;
    args.src = sets->src[set];
    args.offsets = sets->offsets;
    args.error = sets->error;
    args.row = (tn_grouped_plane){sets->data[set][0], sets->scale[set][0]};
    args.col = (tn_grouped_plane){sets->data[set][1], sets->scale[set][1]};
    args.scope = bench->scope;
    GPU_BENCH_TRY(tn_grouped_quantize(&args, bench->stream));
}

static void gather(gpu_bench *bench, void *argument, int turn) {
    const rows_sets *sets = argument;
    tn_gather_rows_args args = TN_GATHER_ROWS_ARGS_INIT;
    args.src = sets->src[turn % sets->count];
    args.map = sets->map;
    args.dst = sets->dst[turn % sets->count];
    args.error = sets->error;
    GPU_BENCH_TRY(tn_gather_rows(&args, bench->stream));
}

static void combine(gpu_bench *bench, void *argument, int turn) {
    const rows_sets *sets = argument;
    tn_combine_rows_args args = TN_COMBINE_ROWS_ARGS_INIT;
    args.src = sets->src[turn % sets->count];
    args.map = sets->map;
    args.dst = sets->dst[turn % sets->count];
    args.error = sets->error;
    GPU_BENCH_TRY(tn_combine_rows(&args, bench->stream));
}

static void shard_amax(gpu_bench *bench, void *argument, int turn) {
    const rows_sets *sets = argument;
    tn_shard_amax_args args = TN_SHARD_AMAX_ARGS_INIT;
    args.src = sets->src[turn % sets->count];
    args.rows = sets->rows, args.cols = sets->cols;
    args.amax = sets->amax;
    GPU_BENCH_TRY(tn_shard_amax(&args, bench->stream));
}

static void shard_quantize(gpu_bench *bench, void *argument, int turn) {
    const rows_sets *sets = argument;
    tn_shard_quantize_args args = TN_SHARD_QUANTIZE_ARGS_INIT;
    args.src = sets->src[turn % sets->count];
    args.rows = sets->rows, args.cols = sets->cols;
    args.amax = sets->amax;
    args.data = sets->data[turn % sets->count][0];
    GPU_BENCH_TRY(tn_shard_quantize(&args, bench->stream));
}

static void dequantize(gpu_bench *bench, void *argument, int turn) {
    const rows_sets *sets = argument;
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    args.src = sets->data[turn % sets->count][0];
    args.dst = sets->dst[turn % sets->count];
    GPU_BENCH_TRY(tn_dequantize(&args, bench->stream));
}

/* ---- measuring ------------------------------------------------------------------------------ */

static double rate(gpu_bench *bench, gpu_bench_work work, rows_sets *sets, double bytes) {
    return bytes / gpu_bench_device_seconds(bench, work, sets) * 1e-9;
}

static void destroy_planes(gpu_bench *bench, rows_sets *sets, int planes, int has_scales) {
    for (int i = 0; i < sets->count; i++) {
        for (int p = 0; p < planes; p++) {
            gpu_bench_destroy(bench, sets->data[i][p]);
            if (has_scales) gpu_bench_destroy(bench, sets->scale[i][p]);
        }
    }
}

static double grouped_rate(gpu_bench *bench, rows_sets *sets, int experts) {
    double elements = (double)sets->rows * (double)sets->cols;
    sets->experts = experts;
    sets->offsets = offsets_of(bench, experts, sets->rows);
    for (int i = 0; i < sets->count; i++) {
        for (int p = 0; p < 2; p++) {
            int64_t floats;
            GPU_BENCH_TRY(tn_grouped_scale_floats(TN_FORMAT_FP8_BLOCK_1D,
                                                  p ? TN_PLANE_COL : TN_PLANE_ROW, experts,
                                                  sets->rows, sets->cols, &floats));
            sets->data[i][p] = gpu_bench_zeros(bench, TN_BYTE, sets->rows, sets->cols);
            sets->scale[i][p] = gpu_bench_zeros(bench, TN_FP32, 1, floats);
        }
    }
    double result = rate(bench, grouped_quantize, sets, 4.0 * elements + group_scale_bytes(sets));
    destroy_planes(bench, sets, 2, 1);
    gpu_bench_destroy(bench, sets->offsets);
    return result;
}

/* Outputs of bf16 of `rows` rows, for the length of one measurement. */
static double rows_rate(gpu_bench *bench, rows_sets *sets, gpu_bench_work work, int64_t rows) {
    double elements = (double)(sets->rows + rows) * (double)sets->cols;
    sets->map = permutation_of(bench, sets->rows);
    for (int i = 0; i < sets->count; i++)
        sets->dst[i] = gpu_bench_zeros(bench, TN_BF16, rows, sets->cols);
    double bytes = 2.0 * elements + (double)sets->rows * (double)sizeof(int64_t);
    double result = rate(bench, work, sets, bytes);
    for (int i = 0; i < sets->count; i++)
        gpu_bench_destroy(bench, sets->dst[i]);
    gpu_bench_destroy(bench, sets->map);
    return result;
}

static void shard_rates(gpu_bench *bench, rows_sets *sets, double figures[2]) {
    double elements = (double)sets->rows * (double)sets->cols;
    int64_t tiles_down = (sets->rows + 127) / 128, tiles_across = (sets->cols + 127) / 128;
    sets->amax = gpu_bench_zeros(bench, TN_FP32, tiles_down, tiles_across);
    for (int i = 0; i < sets->count; i++)
        sets->data[i][0] = gpu_bench_zeros(bench, TN_BYTE, sets->rows, sets->cols);
    figures[0] = rate(bench, shard_amax, sets, 2.0 * elements);
    figures[1] = rate(bench, shard_quantize, sets, 3.0 * elements);
    destroy_planes(bench, sets, 1, 0);
    gpu_bench_destroy(bench, sets->amax);
}

static double dequantize_rate(gpu_bench *bench, rows_sets *sets) {
    for (int i = 0; i < sets->count; i++) {
        sets->data[i][0] = gpu_bench_random_fp8(bench, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW,
                                                sets->rows, sets->cols);
        sets->dst[i] = gpu_bench_zeros(bench, TN_BF16, sets->rows, sets->cols);
    }
    double bytes = gpu_bench_plane_bytes(sets->data[0][0], TN_PLANE_ROW) +
                   gpu_bench_plane_bytes(sets->dst[0], TN_PLANE_DATA);
    double result = rate(bench, dequantize, sets, bytes);
    destroy_planes(bench, sets, 1, 0);
    for (int i = 0; i < sets->count; i++)
        gpu_bench_destroy(bench, sets->dst[i]);
    return result;
}

static void measure_shape(gpu_bench *bench, gpu_bench_row *row, int64_t rows, int64_t cols) {
    static const unsigned char no_error[4] = {0};
    double sets_wanted = ceil(rotated_bytes / ((double)rows * (double)cols * 4.0));
    rows_sets sets = {.rows = rows, .cols = cols};
    sets.count = sets_wanted > SETS_MAX ? SETS_MAX : (int)sets_wanted;
    sets.error = bytes_of(bench, no_error, sizeof no_error);
    for (int i = 0; i < sets.count; i++)
        sets.src[i] = gpu_bench_random(bench, rows, cols);
    row->figures[0] = grouped_rate(bench, &sets, 8);
    row->figures[1] = grouped_rate(bench, &sets, EXPERTS_MAX);
    row->figures[2] = rows_rate(bench, &sets, gather, rows);
    row->figures[3] = rows_rate(bench, &sets, combine, rows / CHOICES);
    shard_rates(bench, &sets, &row->figures[4]);
    row->figures[6] = dequantize_rate(bench, &sets);
    row->figures[7] = gpu_bench_copy_rate(bench, sets.src, sets.count, rows, cols);
    for (int i = 0; i < sets.count; i++)
        gpu_bench_destroy(bench, sets.src[i]);
    gpu_bench_destroy(bench, sets.error);
}

void gpu_bench_grouped(gpu_bench *bench, gpu_bench_section *section) {
    for (int i = 0; i < GPU_BENCH_SHAPES; i++) {
        const int64_t *shape = gpu_bench_shapes[i];
        char title[48];
        snprintf(title, sizeof title, "%lld x %lld", (long long)shape[0], (long long)shape[1]);
        measure_shape(bench, gpu_bench_row_add(section, title), shape[0], shape[1]);
    }
}
