/* The CUDA table: turns each op's work into a kernel and its argument.
 *
 * A kernel moves pieces of 8 or 16 bytes where the addresses and the length of the rows allow it,
 * and single elements where they do not: which of the two is decided here, once a launch.
 */
#include "cuda_module.h"

/* ---- what the kernels want to know -------------------------------------------------------- */

static int64_t tiles_of(int64_t extent) { return (extent + TN__TILE - 1) / TN__TILE; }

/* Every row of `row_bytes` bytes from `address` on starts at, and is, a multiple of `piece`. */
static int is_made_of(const void *address, int64_t row_bytes, int64_t piece) {
    return (uintptr_t)address % (uintptr_t)piece == 0 && row_bytes % piece == 0;
}

static tn__cuda_plane plane_of(const tn_plane_view *view, int64_t piece) {
    tn__cuda_plane plane = {.data = view->data,
                            .scale = view->scale,
                            .scale_stride = view->layout.scale_stride,
                            .vectors = is_made_of(view->data, view->layout.cols, piece)};
    return plane;
}

/* Elements that 16 bytes of this type hold: what a lane takes of a row at a time. */
static int64_t vector_of(tn_dtype dtype) { return 16 / (int64_t)tn_dtype_bytes(dtype); }

static int64_t elements(const tn__matrix *matrix) { return matrix->rows * matrix->cols; }

static int64_t row_bytes(const tn__matrix *matrix) {
    return matrix->cols * (int64_t)tn_dtype_bytes(matrix->dtype);
}

/* ---- casts -------------------------------------------------------------------------------- */

static tn_status quantize(tn_device *device, const tn__quantize_work *work, tn_stream stream) {
    const tn__matrix *src = &work->src;
    tn__cuda_context *context;
    tn__cuda_quantize_arguments argument = {
        .src = src->data,
        .rows = src->rows,
        .cols = src->cols,
        .tiles_across = (uint32_t)tiles_of(src->cols),
        .amax_epsilon = work->amax_epsilon,
        .is_pow2 = work->scale_mode == TN_SCALE_POW2,
        .src_vectors = is_made_of(src->data, row_bytes(src), 16),
    };
    TN_TRY(tn__cuda_context_of(device, &context));
    if (work->has_row) argument.row = plane_of(&work->row, vector_of(src->dtype));
    if (work->has_col) argument.col = plane_of(&work->col, 16);
    int kernel = tn__kernel_of_quantize(TN__KERNEL_QUANTIZE, work->format == TN_FORMAT_FP8_BLOCK_1D,
                                        work->has_row, work->has_col, src->dtype, work->dtype);
    return tn__kernel_launch(context, kernel, tiles_of(src->rows) * tiles_of(src->cols),
                             TN__TILE_THREADS, &argument, stream);
}

static tn_status dequantize(tn_device *device, const tn__dequantize_work *work, tn_stream stream) {
    const tn__matrix *dst = &work->dst;
    int is_col = work->src.plane == TN_PLANE_COL;
    tn__cuda_context *context;
    tn__cuda_dequantize_arguments argument = {
        .src = plane_of(&work->src, is_col ? 16 : vector_of(dst->dtype)),
        .dst = dst->data,
        .rows = dst->rows,
        .cols = dst->cols,
        .tiles_across = (uint32_t)tiles_of(dst->cols),
        .is_1d = work->format == TN_FORMAT_FP8_BLOCK_1D,
        .dst_vectors = is_made_of(dst->data, row_bytes(dst), 16),
    };
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, tn__kernel_of_dequantize(is_col, work->src.dtype, dst->dtype),
                             tiles_of(dst->rows) * tiles_of(dst->cols), TN__TILE_THREADS, &argument,
                             stream);
}

static tn_status transpose(tn_device *device, const tn__transpose_work *work, tn_stream stream) {
    const tn_plane_layout *from = &work->from.layout;
    tn__cuda_context *context;
    tn__cuda_transpose_arguments argument = {
        .from = plane_of(&work->from, 16),
        .to = plane_of(&work->to, 16),
        .rows = from->rows,
        .cols = from->cols,
        .scale_rows = (uint32_t)from->scale_rows,
        .scale_cols = (uint32_t)from->scale_cols,
        .tiles_across = (uint32_t)tiles_of(from->cols),
    };
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, TN__KERNEL_TRANSPOSE,
                             tiles_of(from->rows) * tiles_of(from->cols), TN__TILE_THREADS,
                             &argument, stream);
}

/* ---- small operations --------------------------------------------------------------------- */

static tn_status map(tn_device *device, int family, const tn__matrix *x, const tn__matrix *y,
                     float alpha, tn_stream stream) {
    tn__cuda_context *context;
    tn__cuda_map_arguments argument = {x->data, y->data, elements(y), alpha};
    TN_CHECK(((uintptr_t)x->data | (uintptr_t)y->data) % 16 == 0);
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, tn__kernel_of_pair(family, x->dtype, y->dtype),
                             (elements(y) + TN__MAP_ELEMENTS - 1) / TN__MAP_ELEMENTS,
                             TN__FLAT_THREADS, &argument, stream);
}

static tn_status axpy(tn_device *device, const tn__axpy_work *work, tn_stream stream) {
    return map(device, TN__KERNEL_AXPY, &work->x, &work->y, work->alpha, stream);
}

static tn_status convert(tn_device *device, const tn__matrix *x, const tn__matrix *y,
                         tn_stream stream) {
    return map(device, TN__KERNEL_CONVERT, x, y, 1.0f, stream);
}

static tn_status embed(tn_device *device, const tn__embed_work *work, tn_stream stream) {
    tn__cuda_context *context;
    tn__cuda_embed_arguments argument = {.tokens = work->tokens,
                                         .table = work->table.data,
                                         .y = work->y.data,
                                         .token_count = work->y.rows,
                                         .row_bytes = row_bytes(&work->y)};
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, TN__KERNEL_EMBED, argument.token_count, TN__FLAT_THREADS,
                             &argument, stream);
}

static tn_status cross_entropy(tn_device *device, const tn__cross_entropy_work *work,
                               tn_stream stream) {
    const tn__matrix *logits = &work->logits;
    tn__cuda_context *context;
    tn__cuda_cross_entropy_arguments argument = {.logits = logits->data,
                                                 .dlogits = work->dlogits.data,
                                                 .targets = work->targets,
                                                 .loss = work->loss,
                                                 .rows = logits->rows,
                                                 .classes = logits->cols};
    TN_TRY(tn__cuda_context_of(device, &context));
    int kernel = tn__kernel_of_pair(TN__KERNEL_CROSS_ENTROPY, logits->dtype, work->dlogits.dtype);
    return tn__kernel_launch(context, kernel, logits->rows, TN__FLAT_THREADS, &argument, stream);
}

const tn__op_table tn__op_table_cuda = {
    .name = "cuda",
    .quantize = quantize,
    .list_scratch_bytes = tn__cuda_list_scratch_bytes,
    .grouped_quantize = tn__cuda_grouped_quantize,
    .pad_groups = tn__cuda_pad_groups,
    .gather_rows = tn__cuda_gather_rows,
    .combine_rows = tn__cuda_combine_rows,
    .shard_amax = tn__cuda_shard_amax,
    .shard_quantize = tn__cuda_shard_quantize,
    .dequantize = dequantize,
    .transpose = transpose,
    .gemm_scratch_bytes = tn__cuda_gemm_scratch_bytes,
    .gemm = tn__cuda_gemm_run,
    .axpy = axpy,
    .convert = convert,
    .embed = embed,
    .cross_entropy = cross_entropy,
};
