/* Casts of one tensor: quantize, dequantize, transpose and re-quantize, for each format; and what
 * they are compared with, the copy. */
#include "gpu_bench_cast.h"

#define ROW  TN_QUANTIZE_ROW
#define COL  TN_QUANTIZE_COL
#define BOTH (TN_QUANTIZE_ROW | TN_QUANTIZE_COL)
#define D1   TN_FORMAT_FP8_BLOCK_1D
#define D2   TN_FORMAT_FP8_BLOCK_2D

/* Of the smallest L2 cache that an H200 shows (50 MB); more of it can not hold a source. */
static const double l2_bytes = 50.0 * 1048576.0;

double gpu_cast_data_bytes(tn_tensor tensor) {
    return tensor.value ? gpu_bench_plane_bytes(tensor, TN_PLANE_DATA) : 0.0;
}

double gpu_cast_plane_bytes(tn_tensor tensor, unsigned planes) {
    double bytes = 0.0;
    if (planes & ROW) bytes += gpu_bench_plane_bytes(tensor, TN_PLANE_ROW);
    if (planes & COL) bytes += gpu_bench_plane_bytes(tensor, TN_PLANE_COL);
    return bytes;
}

double gpu_cast_twice_bytes(double source_bytes) {
    return source_bytes > l2_bytes ? 2.0 * source_bytes - l2_bytes : source_bytes;
}

static unsigned plane_bit(tn_plane plane) { return plane == TN_PLANE_COL ? COL : ROW; }

/* ---- copies and sums ------------------------------------------------------------------------ */

static void prepare_plain(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    set->x = gpu_bench_random(bench, TN_BF16, set->rows, set->cols);
    set->y = gpu_bench_zeros(bench, op->dtype, set->rows, set->cols);
    set->bytes = gpu_cast_data_bytes(set->x) + gpu_cast_data_bytes(set->y);
}

static void prepare_axpy(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    prepare_plain(bench, op, set);
    set->bytes += gpu_cast_data_bytes(set->y);
}

static void copy(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_plane_view from, to;
    tn_lease leases[2];
    (void)op;
    GPU_BENCH_TRY(tn_lease_begin(set->x, TN_PLANE_DATA, TN_READ, bench->stream, &leases[0], &from));
    GPU_BENCH_TRY(tn_lease_begin(set->y, TN_PLANE_DATA, TN_WRITE, bench->stream, &leases[1], &to));
    GPU_BENCH_TRY(
        tn_copy(bench->device, to.data, from.data, from.layout.data_bytes, bench->stream));
    GPU_BENCH_TRY(tn_lease_end(leases[1]));
    GPU_BENCH_TRY(tn_lease_end(leases[0]));
}

static void axpy(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_axpy_args args = TN_AXPY_ARGS_INIT;
    (void)op;
    args.x = set->x;
    args.y = set->y;
    args.alpha = 0.5f;
    GPU_BENCH_TRY(tn_axpy(&args, bench->stream));
}

static void convert(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    args.x = op->flags & GPU_CAST_UNDONE ? set->y : set->x;
    args.y = op->flags & GPU_CAST_UNDONE ? set->x : set->y;
    GPU_BENCH_TRY(tn_convert(&args, bench->stream));
}

static const gpu_cast_family copies = {prepare_plain, copy};
static const gpu_cast_family sums = {prepare_axpy, axpy};
static const gpu_cast_family conversions = {prepare_plain, convert};

/* ---- quantize ------------------------------------------------------------------------------- */

static int has_whole_amax(const gpu_cast *op) {
    return op->format == TN_FORMAT_NVFP4 ||
           (op->format == TN_FORMAT_FP8_TENSOR && !(op->flags & GPU_CAST_DELAYED));
}

static void prepare_quantize(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    static const float one = 1.0f;
    set->x = gpu_bench_random(bench, op->dtype, set->rows, set->cols);
    set->q = gpu_bench_quantized(bench, op->format, (tn_scale_mode)op->kind, set->rows, set->cols);
    double source = gpu_cast_data_bytes(set->x);
    set->bytes = has_whole_amax(op) ? gpu_cast_twice_bytes(source) : source;
    set->bytes += gpu_cast_plane_bytes(set->q, op->planes);
    if (op->flags & GPU_CAST_STOCHASTIC) set->random = gpu_bench_zeros(bench, TN_BYTE, 1, 16);
    if (!(op->flags & GPU_CAST_DELAYED)) return;
    set->scale = gpu_bench_upload(bench, TN_FP32, 1, 1, &one);
    set->amax = gpu_bench_zeros(bench, TN_FP32, 16, 1);
}

static void quantize(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = set->x;
    args.dst = set->q;
    args.planes = op->planes;
    args.scale = set->scale;
    args.amax_history = set->amax;
    args.random = set->random;
    GPU_BENCH_TRY(tn_quantize(&args, bench->stream));
}

static const gpu_cast_family quantizes = {prepare_quantize, quantize};

/* ---- from quantized to others --------------------------------------------------------------- */

static void prepare_dequantize(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    unsigned plane = plane_bit(op->plane);
    set->q_from = gpu_bench_random_quantized(bench, op->from, plane, set->rows, set->cols);
    set->y = gpu_bench_zeros(bench, op->dtype, set->rows, set->cols);
    set->bytes = gpu_cast_plane_bytes(set->q_from, plane) + gpu_cast_data_bytes(set->y);
}

static void dequantize(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    args.src = set->q_from;
    args.plane = op->plane;
    args.dst = set->y;
    GPU_BENCH_TRY(tn_dequantize(&args, bench->stream));
}

static void prepare_transpose(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    unsigned plane = plane_bit(op->plane);
    set->q_from = gpu_bench_random_quantized(bench, op->from, plane, set->rows, set->cols);
    set->bytes = gpu_cast_plane_bytes(set->q_from, BOTH);
}

/* Drops the plane that was derived in the last turn, and derives it again. */
static void transpose(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_transpose_args args = TN_TRANSPOSE_ARGS_INIT;
    args.tensor = set->q_from;
    args.to = op->plane == TN_PLANE_COL ? TN_PLANE_ROW : TN_PLANE_COL;
    GPU_BENCH_TRY(tn_plane_drop(args.tensor, args.to, bench->stream));
    GPU_BENCH_TRY(tn_transpose(&args, bench->stream));
}

static void prepare_requantize(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    unsigned plane = plane_bit(op->plane);
    set->q_from = gpu_bench_random_quantized(bench, op->from, plane, set->rows, set->cols);
    set->q = gpu_bench_quantized(bench, op->format, TN_SCALE_POW2, set->rows, set->cols);
    set->bytes =
        gpu_cast_plane_bytes(set->q_from, plane) + gpu_cast_plane_bytes(set->q, op->planes);
}

static void requantize(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_requantize_args args = TN_REQUANTIZE_ARGS_INIT;
    args.src = set->q_from;
    args.from = op->plane;
    args.dst = set->q;
    args.planes = op->planes;
    args.mode = (tn_requantize_mode)op->kind;
    GPU_BENCH_TRY(tn_requantize(&args, bench->stream));
}

static const gpu_cast_family dequantizes = {prepare_dequantize, dequantize};
static const gpu_cast_family transposes = {prepare_transpose, transpose};
static const gpu_cast_family requantizes = {prepare_requantize, requantize};

/* ---- the table ------------------------------------------------------------------------------ */

#define QUANTIZE(text, to, which)                                                                  \
    {                                                                                              \
        .name = "quantize " text, .family = &quantizes, .dtype = TN_BF16, .format = to,            \
        .planes = which                                                                            \
    }
#define QUANTIZE_AS(text, type, to, mode, more)                                                    \
    {                                                                                              \
        .name = "quantize " text, .family = &quantizes, .dtype = type, .format = to,               \
        .planes = BOTH, .kind = mode, .flags = more                                                \
    }
#define DELAYED(text, which)                                                                       \
    {                                                                                              \
        .name = "quantize TENSOR delayed " text, .family = &quantizes, .dtype = TN_BF16,           \
        .format = TN_FORMAT_FP8_TENSOR, .planes = which, .flags = GPU_CAST_DELAYED                 \
    }
#define DEQUANTIZE(text, type, of, side)                                                           \
    { .name = "dequantize " text, .family = &dequantizes, .dtype = type, .from = of, .plane = side }
#define TRANSPOSE(text, of, side)                                                                  \
    { .name = "transpose " text, .family = &transposes, .from = of, .plane = side }
#define REQUANTIZE(text, of, side, to, which, how)                                                 \
    {                                                                                              \
        .name = "requantize " text, .family = &requantizes, .from = of, .plane = side,             \
        .format = to, .planes = which, .kind = how                                                 \
    }

static const gpu_cast ops[] = {
    {.name = "copy bf16", .family = &copies, .dtype = TN_BF16},
    {.name = "axpy bf16", .family = &sums, .dtype = TN_BF16},
    {.name = "convert bf16 to fp32", .family = &conversions, .dtype = TN_FP32},
    {.name = "convert fp32 to bf16", .family = &conversions, .flags = GPU_CAST_UNDONE},
    QUANTIZE("1D row", D1, ROW),
    QUANTIZE("1D column", D1, COL),
    QUANTIZE("1D both", D1, BOTH),
    QUANTIZE("2D row", D2, ROW),
    QUANTIZE("2D column", D2, COL),
    QUANTIZE("2D both", D2, BOTH),
    QUANTIZE_AS("1D both, fp32 scales", TN_BF16, D1, TN_SCALE_FP32, 0),
    QUANTIZE_AS("1D both, fp16 in", TN_FP16, D1, TN_SCALE_POW2, 0),
    QUANTIZE_AS("1D both, fp32 in", TN_FP32, D1, TN_SCALE_POW2, 0),
    QUANTIZE_AS("2D both, fp32 in", TN_FP32, D2, TN_SCALE_POW2, 0),
    QUANTIZE("TENSOR current row", TN_FORMAT_FP8_TENSOR, ROW),
    QUANTIZE("TENSOR current column", TN_FORMAT_FP8_TENSOR, COL),
    QUANTIZE("TENSOR current both", TN_FORMAT_FP8_TENSOR, BOTH),
    DELAYED("row", ROW),
    DELAYED("column", COL),
    DELAYED("both", BOTH),
    QUANTIZE("MXFP8 row", TN_FORMAT_MXFP8, ROW),
    QUANTIZE("MXFP8 column", TN_FORMAT_MXFP8, COL),
    QUANTIZE("MXFP8 both", TN_FORMAT_MXFP8, BOTH),
    QUANTIZE("NVFP4 row", TN_FORMAT_NVFP4, ROW),
    QUANTIZE("NVFP4 column", TN_FORMAT_NVFP4, COL),
    QUANTIZE("NVFP4 both", TN_FORMAT_NVFP4, BOTH),
    QUANTIZE_AS("1D both, stochastic", TN_BF16, D1, TN_SCALE_POW2, GPU_CAST_STOCHASTIC),
    QUANTIZE_AS("NVFP4 both, stochastic", TN_BF16, TN_FORMAT_NVFP4, TN_SCALE_POW2,
                GPU_CAST_STOCHASTIC),
    DEQUANTIZE("1D row", TN_BF16, D1, TN_PLANE_ROW),
    DEQUANTIZE("1D row to fp32", TN_FP32, D1, TN_PLANE_ROW),
    DEQUANTIZE("1D column", TN_BF16, D1, TN_PLANE_COL),
    DEQUANTIZE("2D row", TN_BF16, D2, TN_PLANE_ROW),
    DEQUANTIZE("2D column", TN_BF16, D2, TN_PLANE_COL),
    DEQUANTIZE("TENSOR row", TN_BF16, TN_FORMAT_FP8_TENSOR, TN_PLANE_ROW),
    DEQUANTIZE("TENSOR column", TN_BF16, TN_FORMAT_FP8_TENSOR, TN_PLANE_COL),
    DEQUANTIZE("MXFP8 row", TN_BF16, TN_FORMAT_MXFP8, TN_PLANE_ROW),
    DEQUANTIZE("MXFP8 column", TN_BF16, TN_FORMAT_MXFP8, TN_PLANE_COL),
    DEQUANTIZE("NVFP4 row", TN_BF16, TN_FORMAT_NVFP4, TN_PLANE_ROW),
    DEQUANTIZE("NVFP4 column", TN_BF16, TN_FORMAT_NVFP4, TN_PLANE_COL),
    TRANSPOSE("2D row to column", D2, TN_PLANE_ROW),
    TRANSPOSE("2D column to row", D2, TN_PLANE_COL),
    TRANSPOSE("TENSOR row to column", TN_FORMAT_FP8_TENSOR, TN_PLANE_ROW),
    TRANSPOSE("TENSOR column to row", TN_FORMAT_FP8_TENSOR, TN_PLANE_COL),
    REQUANTIZE("VALUES 1D row to column", D1, TN_PLANE_ROW, D1, COL, TN_REQUANTIZE_VALUES),
    REQUANTIZE("VALUES 1D row to 2D row", D1, TN_PLANE_ROW, D2, ROW, TN_REQUANTIZE_VALUES),
    REQUANTIZE("VALUES 1D row to 2D both", D1, TN_PLANE_ROW, D2, BOTH, TN_REQUANTIZE_VALUES),
    REQUANTIZE("VALUES 2D row to 1D both", D2, TN_PLANE_ROW, D1, BOTH, TN_REQUANTIZE_VALUES),
    REQUANTIZE("VALUES 1D column to row", D1, TN_PLANE_COL, D1, ROW, TN_REQUANTIZE_VALUES),
    REQUANTIZE("SHIFT 1D row to column", D1, TN_PLANE_ROW, D1, COL, TN_REQUANTIZE_SHIFT),
    REQUANTIZE("SHIFT 1D column to row", D1, TN_PLANE_COL, D1, ROW, TN_REQUANTIZE_SHIFT),
};

gpu_cast_table gpu_bench_cast_formats(void) {
    return (gpu_cast_table){ops, (int)(sizeof ops / sizeof *ops)};
}
