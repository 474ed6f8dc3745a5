/* The battery's ops on groups, rows and shards. What the device alone would know (offsets, maps) is
 * made from the case, so that it is the same on both sides. */
#include "op_battery_support.h"
#include "tenure_grouped.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GROUPS = 6, COPIES = 3, MULTIPLE = 16 };

enum { PICK_ERROR = 1, PICK_SKIP, PICK_PERMUTED };

/* Inputs are destroyed in the order in which they are kept, and found by their number. */
static tn_tensor keep_bytes(gpu_side *side, battery_operands *operands, const void *bytes,
                            int64_t count) {
    tn_tensor tensor = gpu_plain(side, TN_BYTE, 1, count);
    gpu_upload(side, tensor, bytes);
    battery_keep(operands, tensor);
    return tensor;
}

/* The last output: 0 before, and what the device finds wrong after. */
static void add_error(gpu_side *side, battery_operands *operands) {
    const uint32_t no_error = 0;
    battery_updated_add(operands, "error", gpu_plain(side, TN_BYTE, 1, sizeof no_error),
                        keep_bytes(side, operands, &no_error, sizeof no_error));
}

static tn_tensor error_of(const battery_operands *operands) {
    return operands->out[operands->out_count - 1].tensor;
}

/* One case in eight tells the device nonsense, which it must find. */
static int is_wrong(const battery_case *c) {
    return !c->bands && battery_pick(c, PICK_ERROR, 8) == 0;
}

static void add_skip(gpu_side *side, const battery_case *c, battery_operands *operands) {
    if (battery_pick(c, PICK_SKIP, 2)) (void)battery_skip(side, operands);
}

/* One group has nothing, and the last rows are in none; of bands, one group has all. */
static void keep_offsets(gpu_side *side, const battery_case *c, battery_operands *operands) {
    int64_t offsets[GROUPS + 1] = {0}, left = c->bands ? c->rows : c->rows - c->rows / 20;
    for (int g = 0; g < GROUPS; g++) {
        int64_t rows = g == 2            ? 0
                       : g == GROUPS - 1 ? left
                                         : left * (1 + (int64_t)(c->seed % 3)) / 5;
        if (c->bands) rows = left;
        offsets[g + 1] = offsets[g] + rows;
        left -= rows;
    }
    if (is_wrong(c)) offsets[3] = c->seed % 2 ? c->rows + 1 : -1;
    (void)keep_bytes(side, operands, offsets, sizeof offsets);
}

/* Row `row` of a map that goes to the rows of the case's matrix: in every tile of 128 the same, but
 * for those of bands, which go to each other's. */
static int64_t mapped(const battery_case *c, int64_t row, int64_t i) {
    if (i % 13 == 5) return -1;
    if (!c->bands) return (i * 11 + (int64_t)c->seed) % c->rows;
    const int band = battery_band_at(c, row / 128);
    const int64_t first = band < 0 ? 128 : battery_band_tile(c, (band + 1) % BATTERY_BANDS) * 128;
    const int64_t there = c->rows - first < 128 ? c->rows - first : 128;
    return first + row % 128 * 11 % there;
}

/* `each` numbers for each of `rows` rows. */
static void keep_map(gpu_side *side, const battery_case *c, battery_operands *operands,
                     int64_t rows, int64_t each) {
    const int64_t count = rows * each;
    int64_t *map = malloc((size_t)count * sizeof *map + 1);
    for (int64_t i = 0; i < count; i++)
        map[i] = mapped(c, i / each, c->bands ? i / each % 128 * each + i % each : i);
    if (is_wrong(c) && count > 0) map[count / 2] = c->rows;
    (void)keep_bytes(side, operands, map, count * (int64_t)sizeof *map);
    free(map);
}

/* ---- grouped quantize ----------------------------------------------------------------------- */

enum { GROUPED_WAYS = 3 * 2 * 2 * 2 * 3 };

static tn_format format_of(const battery_case *c) {
    return c->way / 12 % 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
}

static void prepare_grouped(gpu_side *side, const battery_case *c, battery_operands *operands) {
    unsigned mask = c->way / 24 % 3 + 1;
    tn_tensor like = {0};
    (void)battery_input(side, c, operands, battery_floats[c->way % 3], c->rows, c->cols, 0);
    keep_offsets(side, c, operands);
    add_skip(side, c, operands);
    if (c->bands) like = gpu_fp8(side, format_of(c), TN_E4M3, TN_SCALE_POW2, c->rows, c->cols);
    if (c->bands) battery_keep(operands, like);
    for (int p = 0; p < 2; p++) {
        int64_t floats;
        if (!(mask >> p & 1)) continue;
        EXPECT_OK(tn_grouped_scale_floats(format_of(c), battery_row_and_col[p], GROUPS, c->rows,
                                          c->cols, &floats));
        battery_output_add(operands, p ? "column bytes" : "row bytes",
                           gpu_plain(side, TN_BYTE, c->rows, c->cols), TN_PLANE_DATA);
        battery_output_like(operands, like, battery_row_and_col[p], BATTERY_LIKE_DATA);
        battery_output_add(operands, p ? "column scales" : "row scales",
                           gpu_plain(side, TN_FP32, 1, floats), TN_PLANE_DATA);
        battery_output_like(operands, like, battery_row_and_col[p], BATTERY_LIKE_SCALES);
    }
    add_error(side, operands);
}

static tn_status launch_grouped(gpu_side *side, const battery_case *c,
                                const battery_operands *operands) {
    unsigned mask = c->way / 24 % 3 + 1;
    tn_grouped_quantize_args args = TN_GROUPED_QUANTIZE_ARGS_INIT;
    int out = 0;
    args.src = operands->in[0], args.offsets = operands->in[1];
    args.error = error_of(operands), args.skip = operands->skip;
    args.format = format_of(c);
    args.dtype = battery_codes[c->way / 3 % 2];
    args.scale_mode = c->way / 6 % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
    args.scope = side->scope;
    for (int p = 0; p < 2; p++) {
        tn_grouped_plane *plane = p ? &args.col : &args.row;
        if (!(mask >> p & 1)) continue;
        plane->data = operands->out[out++].tensor;
        plane->scale = operands->out[out++].tensor;
    }
    return tn_grouped_quantize(&args, side->stream);
}

/* ---- a list of tensors ---------------------------------------------------------------------- */

enum { LISTED = 3 };

static void prepare_list(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_scale_mode mode = c->way / 6 % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
    for (int i = 0; i < LISTED; i++) { /* one is as the case says */
        int64_t rows = i == 1 ? 3 : c->rows + (int64_t)5 * i, cols = i == 1 ? 17 : c->cols;
        if (c->bands && i == 2) rows = 5;
        (void)battery_input(side, c, operands, battery_floats[c->way % 3], rows, cols, (uint64_t)i);
        battery_planes_add(
            operands, gpu_fp8(side, format_of(c), battery_codes[c->way / 3 % 2], mode, rows, cols),
            c->way / 24 % 3 + 1);
    }
    add_skip(side, c, operands);
}

static tn_status launch_list(gpu_side *side, const battery_case *c,
                             const battery_operands *operands) {
    tn_quantize_list_args args = TN_QUANTIZE_LIST_ARGS_INIT;
    tn_tensor dst[LISTED];
    for (int i = 0; i < LISTED; i++)
        dst[i] = operands->out[i * operands->out_count / LISTED].tensor;
    args.src = operands->in, args.dst = dst, args.count = LISTED;
    args.planes = c->way / 24 % 3 + 1;
    args.skip = operands->skip;
    args.scope = side->scope;
    return tn_quantize_list(&args, side->stream);
}

/* ---- rows ----------------------------------------------------------------------------------- */

enum { GATHER_WAYS = 3 + 2, COMBINE_WAYS = 3 * 3 * 2 };

static void prepare_pad(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const int64_t room = c->rows + (int64_t)(MULTIPLE - 1) * GROUPS;
    keep_offsets(side, c, operands);
    if (battery_pick(c, PICK_PERMUTED, 2)) keep_map(side, c, operands, c->rows, 1);
    battery_output_add(operands, "padded offsets", gpu_plain(side, TN_BYTE, GROUPS + 1, 8),
                       TN_PLANE_DATA);
    battery_output_add(operands, "map", gpu_plain(side, TN_BYTE, room, 8), TN_PLANE_DATA);
    battery_output_add(operands, "inverse", gpu_plain(side, TN_BYTE, c->rows, 8), TN_PLANE_DATA);
    add_error(side, operands);
}

static tn_status launch_pad(gpu_side *side, const battery_case *c,
                            const battery_operands *operands) {
    tn_pad_groups_args args = TN_PAD_GROUPS_ARGS_INIT;
    args.offsets = operands->in[0], args.error = error_of(operands);
    if (battery_pick(c, PICK_PERMUTED, 2)) args.permutation = operands->in[1];
    args.padded_offsets = operands->out[0].tensor;
    args.map = operands->out[1].tensor, args.inverse = operands->out[2].tensor;
    args.rows = c->rows;
    args.multiple = MULTIPLE;
    args.scope = side->scope;
    return tn_pad_groups(&args, side->stream);
}

static tn_tensor quantized_rows(gpu_side *side, const battery_case *c, tn_tensor src) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = src;
    args.dst = gpu_fp8(side, TN_FORMAT_FP8_BLOCK_1D, battery_codes[c->way % 2], TN_SCALE_POW2,
                       c->rows, c->cols);
    EXPECT_OK(tn_quantize(&args, side->stream));
    return args.dst;
}

static void prepare_gather(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const int64_t count = c->rows && !c->bands ? c->rows + 37 : c->rows;
    const tn_dtype type = c->way < 3 ? battery_floats[c->way] : TN_FP32;
    tn_tensor src = battery_input(side, c, operands, type, c->rows, c->cols, 0);
    keep_map(side, c, operands, count, 1);
    if (c->way < 3) {
        battery_output_add(operands, "rows", gpu_plain(side, type, count, c->cols), TN_PLANE_DATA);
    } else {
        battery_keep(operands, quantized_rows(side, c, src));
        battery_output_add(operands, "row plane",
                           gpu_fp8(side, TN_FORMAT_FP8_BLOCK_1D, battery_codes[c->way % 2],
                                   TN_SCALE_POW2, count, c->cols),
                           TN_PLANE_ROW);
    }
    add_error(side, operands);
}

static tn_status launch_gather(gpu_side *side, const battery_case *c,
                               const battery_operands *operands) {
    tn_gather_rows_args args = TN_GATHER_ROWS_ARGS_INIT;
    args.src = operands->in[c->way < 3 ? 0 : 2];
    args.map = operands->in[1], args.error = error_of(operands);
    args.dst = operands->out[0].tensor;
    return tn_gather_rows(&args, side->stream);
}

static void prepare_combine(gpu_side *side, const battery_case *c, battery_operands *operands) {
    (void)battery_input(side, c, operands, battery_floats[c->way % 3], c->rows, c->cols, 0);
    keep_map(side, c, operands, c->rows, COPIES);
    (void)battery_input(side, c, operands, TN_FP32, c->rows, COPIES, 1);
    battery_output_add(operands, "sums",
                       gpu_plain(side, battery_floats[c->way / 3 % 3], c->rows, c->cols),
                       TN_PLANE_DATA);
    add_error(side, operands);
}

static tn_status launch_combine(gpu_side *side, const battery_case *c,
                                const battery_operands *operands) {
    tn_combine_rows_args args = TN_COMBINE_ROWS_ARGS_INIT;
    args.src = operands->in[0], args.map = operands->in[1], args.error = error_of(operands);
    if (c->way / 9 % 2) args.weights = operands->in[2];
    args.dst = operands->out[0].tensor;
    return tn_combine_rows(&args, side->stream);
}

/* ---- shards --------------------------------------------------------------------------------- */

enum { SHARD_WAYS = 3 * 2 * 2 };

/* The case's matrix is the middle of a weight that has a row and three elements more; of bands, all
 * of it, so that its tiles are the weight's. */
static int64_t weight_rows(const battery_case *c) {
    if (c->bands) return c->rows;
    return c->cols ? c->rows + 1 + 3 : 0;
}

static int64_t tiles_of(int64_t extent) { return (extent + 127) / 128; }

static int64_t first_of(const battery_case *c) {
    return c->cols && !c->bands ? c->cols + 3 % c->cols : 0;
}

/* The other half of the ways: one amax of all. */
static int has_whole_amax(const battery_case *c) { return c->way / 3 && !c->bands; }

static void prepare_amax(gpu_side *side, const battery_case *c, battery_operands *operands) {
    (void)battery_input(side, c, operands, battery_floats[c->way % 3], c->rows, c->cols, 0);
    tn_tensor amaxes = has_whole_amax(c)
                           ? gpu_plain(side, TN_FP32, 1, 1)
                           : gpu_plain(side, TN_FP32, tiles_of(weight_rows(c)), tiles_of(c->cols));
    battery_output_add(operands, "amaxes", amaxes, TN_PLANE_DATA);
}

static tn_status launch_amax(gpu_side *side, const battery_case *c,
                             const battery_operands *operands) {
    tn_shard_amax_args args = TN_SHARD_AMAX_ARGS_INIT;
    args.src = operands->in[0];
    args.rows = weight_rows(c), args.cols = c->cols, args.first = first_of(c);
    args.amax = operands->out[0].tensor;
    args.whole = has_whole_amax(c);
    return tn_shard_amax(&args, side->stream);
}

static void prepare_shard(gpu_side *side, const battery_case *c, battery_operands *operands) {
    int64_t down = tiles_of(weight_rows(c)), across = tiles_of(c->cols);
    float *amax = malloc((size_t)(down * across) * sizeof *amax + 1);
    tn_tensor amaxes = gpu_plain(side, TN_FP32, down, across);
    (void)battery_input(side, c, operands, battery_floats[c->way % 3], c->rows, c->cols, 0);
    for (int64_t i = 0; i < down * across; i++)
        amax[i] = (float)((c->bands ? i % across : i) % 7) * 0.75f;
    gpu_upload(side, amaxes, amax);
    free(amax);
    battery_keep(operands, amaxes);
    add_skip(side, c, operands);
    battery_output_add(operands, "bytes",
                       c->bands ? gpu_plain(side, TN_BYTE, c->rows, c->cols)
                                : gpu_plain(side, TN_BYTE, 1, c->rows * c->cols + 21),
                       TN_PLANE_DATA);
    battery_output_add(operands, "scales", gpu_plain(side, TN_FP32, down, (across + 3) / 4 * 4),
                       TN_PLANE_DATA);
}

static tn_status launch_shard(gpu_side *side, const battery_case *c,
                              const battery_operands *operands) {
    tn_shard_quantize_args args = TN_SHARD_QUANTIZE_ARGS_INIT;
    args.src = operands->in[0], args.amax = operands->in[1];
    args.rows = weight_rows(c), args.cols = c->cols, args.first = first_of(c);
    args.dtype = battery_codes[c->way / 3 % 2];
    args.scale_mode = c->way / 6 % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
    args.data = operands->out[0].tensor;
    args.data_first = c->bands ? 0 : c->way % 2 ? 16 : 5;
    args.scale = operands->out[1].tensor;
    args.skip = operands->skip;
    return tn_shard_quantize(&args, side->stream);
}

enum { PART_WAYS = 3 * 2 * 3 };

/* A part of a tensor with one scale: the amax is of the whole, and not of what is cast. */
static void prepare_part(gpu_side *side, const battery_case *c, battery_operands *operands) {
    static const float amaxes[] = {0.0f, 0.375f, 3.0e4f, INFINITY};
    const tn_scale_mode mode = c->way % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
    tn_tensor amax = gpu_plain(side, TN_FP32, 1, 1);
    (void)battery_input(side, c, operands, battery_floats[c->way % 3], c->rows, c->cols, 0);
    gpu_upload(side, amax, &amaxes[c->seed % 4]);
    battery_keep(operands, amax);
    add_skip(side, c, operands);
    battery_planes_add(
        operands,
        gpu_fp8(side, TN_FORMAT_FP8_TENSOR, battery_codes[c->way / 3 % 2], mode, c->rows, c->cols),
        c->way / 6 + 1);
}

static tn_status launch_part(gpu_side *side, const battery_case *c,
                             const battery_operands *operands) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = operands->in[0], args.whole_amax = operands->in[1];
    args.dst = operands->out[0].tensor;
    args.planes = c->way / 6 + 1;
    args.skip = operands->skip;
    return tn_quantize(&args, side->stream);
}

static const battery_op ops[] = {
    {"grouped quantize", GROUPED_WAYS, prepare_grouped, launch_grouped},
    {"quantize list", GROUPED_WAYS, prepare_list, launch_list},
    {"pad groups", 1, prepare_pad, launch_pad},
    {"gather rows", GATHER_WAYS, prepare_gather, launch_gather},
    {"combine rows", COMBINE_WAYS, prepare_combine, launch_combine},
    {"shard amax", 3 * 2, prepare_amax, launch_amax},
    {"quantize part", PART_WAYS, prepare_part, launch_part},
    {"shard quantize", SHARD_WAYS, prepare_shard, launch_shard},
};

const battery_table battery_groups = {ops, sizeof ops / sizeof *ops, 0};
