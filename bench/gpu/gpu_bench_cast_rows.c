/* Casts of many experts at once, of rows, of parts of a weight, of lists of tensors.
 *
 * Tokens are spread over the experts as evenly as they go, or, where the op says "uneven", expert e
 * of E begins at e^2 / E^2 of them: none of them is then a multiple of a tile. Maps are
 * permutations, the same stride for all. Lists are the rows of the size that is measured, cut into
 * equal tensors.
 */
#include "gpu_bench_cast.h"

#include <stdlib.h>

#define ROW    TN_QUANTIZE_ROW
#define BOTH   (TN_QUANTIZE_ROW | TN_QUANTIZE_COL)
#define D1     TN_FORMAT_FP8_BLOCK_1D
#define D2     TN_FORMAT_FP8_BLOCK_2D
#define UNEVEN GPU_CAST_UNEVEN

enum { EXPERTS_MAX = 64, CHOICES = 2, PADDED_TO = 128, PART_BEGINS = 77777 };

/* ---- operands ------------------------------------------------------------------------------- */

static int64_t *numbers_alloc(int64_t count) {
    int64_t *numbers = calloc((size_t)count, sizeof *numbers);
    if (!numbers) gpu_bench_out_of_memory();
    return numbers;
}

static int64_t offset_of(const gpu_cast *op, const gpu_cast_set *set, int64_t e) {
    int64_t experts = op->count;
    if (op->flags & UNEVEN) return set->rows * e * e / (experts * experts);
    return set->rows * e / experts;
}

static void make_offsets(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    int64_t offsets[EXPERTS_MAX + 1];
    for (int e = 0; e <= op->count; e++)
        offsets[e] = offset_of(op, set, e);
    set->offsets =
        gpu_bench_upload(bench, TN_BYTE, 1, (int64_t)sizeof *offsets * (op->count + 1), offsets);
}

/* Row i of the result is row 7919 i of the source: 7919 is prime to all the sizes. */
static tn_tensor permutation_of(gpu_bench *bench, int64_t rows) {
    int64_t *map = numbers_alloc(rows);
    for (int64_t i = 0; i < rows; i++)
        map[i] = i * 7919 % rows;
    tn_tensor tensor = gpu_bench_upload(bench, TN_BYTE, rows, (int64_t)sizeof *map, map);
    free(map);
    return tensor;
}

static void make_error(gpu_bench *bench, gpu_cast_set *set) {
    set->error = gpu_bench_zeros(bench, TN_BYTE, 1, 4);
}

static void add_data_bytes(gpu_cast_set *set, tn_tensor tensor) {
    set->bytes += gpu_cast_data_bytes(tensor);
}

/* ---- groups --------------------------------------------------------------------------------- */

static int64_t up4(int64_t number) { return (number + 3) / 4 * 4; }
static int64_t tiles(int64_t number) { return (number + 127) / 128; }

/* Exactly the scales of the groups: of planes of m x K, and of K x m. */
static double group_scale_bytes(const gpu_cast *op, const gpu_cast_set *set, int is_col) {
    int64_t floats = 0, cols = set->cols;
    for (int e = 0; e < op->count; e++) {
        int64_t m = offset_of(op, set, e + 1) - offset_of(op, set, e);
        if (op->format == D1)
            floats += is_col ? tiles(m) * up4(cols) : tiles(cols) * up4(m);
        else
            floats += is_col ? tiles(cols) * up4(tiles(m)) : tiles(m) * up4(tiles(cols));
    }
    return (double)floats * (double)sizeof(float);
}

static tn_grouped_plane make_plane(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set,
                                   tn_plane plane) {
    tn_grouped_plane made;
    int64_t floats;
    GPU_BENCH_TRY(
        tn_grouped_scale_floats(op->format, plane, op->count, set->rows, set->cols, &floats));
    made.data = gpu_bench_zeros(bench, TN_BYTE, set->rows, set->cols);
    made.scale = gpu_bench_zeros(bench, TN_FP32, 1, floats);
    set->bytes += gpu_cast_data_bytes(made.data);
    set->bytes += group_scale_bytes(op, set, plane == TN_PLANE_COL);
    return made;
}

static void prepare_grouped(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    set->x = gpu_bench_random(bench, TN_BF16, set->rows, set->cols);
    make_offsets(bench, op, set);
    make_error(bench, set);
    add_data_bytes(set, set->x);
    add_data_bytes(set, set->offsets);
    if (op->planes & TN_QUANTIZE_ROW) set->row = make_plane(bench, op, set, TN_PLANE_ROW);
    if (op->planes & TN_QUANTIZE_COL) set->col = make_plane(bench, op, set, TN_PLANE_COL);
}

static void grouped_quantize(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_grouped_quantize_args args = TN_GROUPED_QUANTIZE_ARGS_INIT;
    args.src = set->x;
    args.offsets = set->offsets;
    args.error = set->error;
    args.format = op->format;
    args.row = set->row;
    args.col = set->col;
    args.scope = bench->scope;
    GPU_BENCH_TRY(tn_grouped_quantize(&args, bench->stream));
}

static const gpu_cast_family groups = {prepare_grouped, grouped_quantize};

/* ---- padding -------------------------------------------------------------------------------- */

static int64_t padded_rows_of(const gpu_cast *op, const gpu_cast_set *set) {
    int64_t padded = set->rows < op->count ? set->rows : op->count;
    return set->rows + (PADDED_TO - 1) * padded;
}

static void pad_groups(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_pad_groups_args args = TN_PAD_GROUPS_ARGS_INIT;
    (void)op;
    args.offsets = set->offsets;
    args.padded_offsets = set->padded_offsets;
    args.map = set->map;
    args.inverse = set->inverse;
    args.error = set->error;
    args.rows = set->rows;
    args.multiple = PADDED_TO;
    args.scope = bench->scope;
    GPU_BENCH_TRY(tn_pad_groups(&args, bench->stream));
}

static void prepare_padding(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    make_offsets(bench, op, set);
    make_error(bench, set);
    set->padded_offsets = gpu_bench_zeros(bench, TN_BYTE, op->count + 1, 8);
    set->map = gpu_bench_zeros(bench, TN_BYTE, padded_rows_of(op, set), 8);
    set->inverse = gpu_bench_zeros(bench, TN_BYTE, set->rows, 8);
    add_data_bytes(set, set->offsets);
    add_data_bytes(set, set->padded_offsets);
    add_data_bytes(set, set->map);
    add_data_bytes(set, set->inverse);
}

static const gpu_cast_family paddings = {prepare_padding, pad_groups};

/* ---- rows ----------------------------------------------------------------------------------- */

static void gather(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_gather_rows_args args = TN_GATHER_ROWS_ARGS_INIT;
    int is_quantized = op->format != TN_FORMAT_PLAIN, is_undone = op->flags & GPU_CAST_UNDONE;
    args.src = is_quantized ? set->q_from : set->x;
    args.map = is_undone ? set->inverse : set->map;
    args.dst = is_quantized ? set->q : set->y;
    args.error = set->error;
    GPU_BENCH_TRY(tn_gather_rows(&args, bench->stream));
}

/* Sources and results of so many rows each, which `read_rows` rows of the source come to. */
static void make_rows(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set, int64_t src_rows,
                      int64_t dst_rows, int64_t read_rows) {
    double src_bytes, dst_bytes;
    if (op->format == TN_FORMAT_PLAIN) {
        set->x = gpu_bench_random(bench, TN_BF16, src_rows, set->cols);
        set->y = gpu_bench_zeros(bench, TN_BF16, dst_rows, set->cols);
        src_bytes = gpu_cast_data_bytes(set->x);
        dst_bytes = gpu_cast_data_bytes(set->y);
    } else {
        set->q_from = gpu_bench_random_quantized(bench, op->format, ROW, src_rows, set->cols);
        set->q = gpu_bench_quantized(bench, op->format, TN_SCALE_POW2, dst_rows, set->cols);
        src_bytes = gpu_cast_plane_bytes(set->q_from, ROW);
        dst_bytes = gpu_cast_plane_bytes(set->q, ROW);
    }
    set->bytes = src_bytes * (double)read_rows / (double)src_rows + dst_bytes;
}

static void prepare_gather(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    make_error(bench, set);
    set->map = permutation_of(bench, set->rows);
    make_rows(bench, op, set, set->rows, set->rows, set->rows);
    add_data_bytes(set, set->map);
}

/* Rows from nowhere are written, not read. */
static void prepare_pad(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    int is_undone = op->flags & GPU_CAST_UNDONE;
    int64_t padded_rows = padded_rows_of(op, set);
    prepare_padding(bench, op, set);
    pad_groups(bench, op, set);
    if (is_undone)
        make_rows(bench, op, set, padded_rows, set->rows, set->rows);
    else
        make_rows(bench, op, set, set->rows, padded_rows, set->rows);
    add_data_bytes(set, is_undone ? set->inverse : set->map);
}

static void prepare_combine(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    make_error(bench, set);
    set->map = permutation_of(bench, set->rows);
    if (op->flags & GPU_CAST_WEIGHTED)
        set->weights = gpu_bench_random(bench, TN_FP32, set->rows, 1);
    make_rows(bench, op, set, set->rows, set->rows / CHOICES, set->rows);
    add_data_bytes(set, set->map);
    add_data_bytes(set, set->weights);
}

static void combine(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_combine_rows_args args = TN_COMBINE_ROWS_ARGS_INIT;
    (void)op;
    args.src = set->x;
    args.map = set->map;
    args.weights = set->weights;
    args.dst = set->y;
    args.error = set->error;
    GPU_BENCH_TRY(tn_combine_rows(&args, bench->stream));
}

static const gpu_cast_family gathers = {prepare_gather, gather};
static const gpu_cast_family pads = {prepare_pad, gather};
static const gpu_cast_family combines = {prepare_combine, combine};

/* ---- parts of a weight ---------------------------------------------------------------------- */

/* All of the weight, or what comes after an element that begins no piece of memory. */
static int64_t part_first(const gpu_cast *op) { return op->flags & UNEVEN ? PART_BEGINS : 0; }

static void prepare_part(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    int64_t elements = set->rows * set->cols - part_first(op) % (set->rows * set->cols);
    set->x = gpu_bench_random(bench, op->dtype, 1, elements);
    set->amax = gpu_bench_zeros(bench, TN_FP32, tiles(set->rows), tiles(set->cols));
    add_data_bytes(set, set->x);
    add_data_bytes(set, set->amax);
}

static void shard_amax(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_shard_amax_args args = TN_SHARD_AMAX_ARGS_INIT;
    args.src = set->x;
    args.rows = set->rows, args.cols = set->cols;
    args.first = part_first(op) % (set->rows * set->cols);
    args.amax = set->amax;
    GPU_BENCH_TRY(tn_shard_amax(&args, bench->stream));
}

static void prepare_part_cast(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    prepare_part(bench, op, set);
    shard_amax(bench, op, set);
    set->row.data = gpu_bench_zeros(bench, TN_BYTE, set->rows, set->cols);
    set->row.scale = gpu_bench_zeros(bench, TN_FP32, tiles(set->rows), up4(tiles(set->cols)));
    set->bytes += gpu_cast_data_bytes(set->x) / (double)tn_dtype_bytes(op->dtype);
    add_data_bytes(set, set->row.scale);
}

static void shard_quantize(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_shard_quantize_args args = TN_SHARD_QUANTIZE_ARGS_INIT;
    args.src = set->x;
    args.rows = set->rows, args.cols = set->cols;
    args.first = part_first(op) % (set->rows * set->cols);
    args.amax = set->amax;
    args.data = set->row.data;
    args.data_first = args.first;
    args.scale = set->row.scale;
    GPU_BENCH_TRY(tn_shard_quantize(&args, bench->stream));
}

static const gpu_cast_family parts = {prepare_part, shard_amax};
static const gpu_cast_family part_casts = {prepare_part_cast, shard_quantize};

/* ---- lists ---------------------------------------------------------------------------------- */

static void prepare_list(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    for (int i = 0; i < op->count; i++) {
        int64_t rows = set->rows * (i + 1) / op->count - set->rows * i / op->count;
        set->src[i] = gpu_bench_random(bench, TN_BF16, rows, set->cols);
        set->dst[i] = gpu_bench_quantized(bench, op->format, TN_SCALE_POW2, rows, set->cols);
        add_data_bytes(set, set->src[i]);
        set->bytes += gpu_cast_plane_bytes(set->dst[i], op->planes);
    }
}

static void quantize_list(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_quantize_list_args args = TN_QUANTIZE_LIST_ARGS_INIT;
    args.src = set->src;
    args.dst = set->dst;
    args.count = op->count;
    args.planes = op->planes;
    args.scope = bench->scope;
    GPU_BENCH_TRY(tn_quantize_list(&args, bench->stream));
}

static const gpu_cast_family lists = {prepare_list, quantize_list};

/* ---- the table ------------------------------------------------------------------------------ */

#define GROUPED(text, to, which, experts, more)                                                    \
    {                                                                                              \
        .name = "grouped " text, .family = &groups, .dtype = TN_BF16, .format = to,                \
        .planes = which, .count = experts, .flags = more                                           \
    }
#define ROWS(text, of, to, experts, more)                                                          \
    {                                                                                              \
        .name = text, .family = of, .dtype = TN_BF16, .format = to, .planes = ROW,                 \
        .count = experts, .flags = more                                                            \
    }
#define PART(text, of, type, more)                                                                 \
    { .name = "part of a weight " text, .family = of, .dtype = type, .flags = more }
#define LIST(text, to, tensors)                                                                    \
    {                                                                                              \
        .name = "list " text, .family = &lists, .dtype = TN_BF16, .format = to, .planes = BOTH,    \
        .count = tensors                                                                           \
    }

static const gpu_cast ops[] = {
    GROUPED("1D both, 8 experts", D1, BOTH, 8, 0),
    GROUPED("1D both, 16 experts", D1, BOTH, 16, 0),
    GROUPED("1D both, 32 experts", D1, BOTH, 32, 0),
    GROUPED("1D both, 64 experts", D1, BOTH, 64, 0),
    GROUPED("1D both, 8 uneven experts", D1, BOTH, 8, UNEVEN),
    GROUPED("1D both, 16 uneven experts", D1, BOTH, 16, UNEVEN),
    GROUPED("1D both, 32 uneven experts", D1, BOTH, 32, UNEVEN),
    GROUPED("1D both, 64 uneven experts", D1, BOTH, 64, UNEVEN),
    GROUPED("1D row, 8 experts", D1, ROW, 8, 0),
    GROUPED("1D row, 64 uneven experts", D1, ROW, 64, UNEVEN),
    GROUPED("2D both, 8 experts", D2, BOTH, 8, 0),
    GROUPED("2D both, 64 uneven experts", D2, BOTH, 64, UNEVEN),
    ROWS("map of padding, 8 uneven experts", &paddings, TN_FORMAT_PLAIN, 8, UNEVEN),
    ROWS("map of padding, 64 uneven experts", &paddings, TN_FORMAT_PLAIN, 64, UNEVEN),
    ROWS("pad bf16, 8 uneven experts", &pads, TN_FORMAT_PLAIN, 8, UNEVEN),
    ROWS("pad bf16, 64 uneven experts", &pads, TN_FORMAT_PLAIN, 64, UNEVEN),
    ROWS("unpad bf16, 64 uneven experts", &pads, TN_FORMAT_PLAIN, 64, UNEVEN | GPU_CAST_UNDONE),
    ROWS("pad 1D, 64 uneven experts", &pads, D1, 64, UNEVEN),
    ROWS("unpad 1D, 64 uneven experts", &pads, D1, 64, UNEVEN | GPU_CAST_UNDONE),
    ROWS("gather bf16", &gathers, TN_FORMAT_PLAIN, 0, 0),
    ROWS("gather 1D", &gathers, D1, 0, 0),
    ROWS("combine 2 rows", &combines, TN_FORMAT_PLAIN, 0, 0),
    ROWS("combine 2 rows, weighted", &combines, TN_FORMAT_PLAIN, 0, GPU_CAST_WEIGHTED),
    PART("amax, fp32", &parts, TN_FP32, 0),
    PART("amax, bf16", &parts, TN_BF16, 0),
    PART("amax, fp32, from anywhere", &parts, TN_FP32, UNEVEN),
    PART("cast, fp32", &part_casts, TN_FP32, 0),
    PART("cast, bf16", &part_casts, TN_BF16, 0),
    PART("cast, fp32, from anywhere", &part_casts, TN_FP32, UNEVEN),
    LIST("1D both, 16 tensors", D1, 16),
    LIST("1D both, 64 tensors", D1, 64),
    LIST("2D both, 16 tensors", D2, 16),
};

gpu_cast_table gpu_bench_cast_rows(void) {
    return (gpu_cast_table){ops, (int)(sizeof ops / sizeof *ops)};
}
