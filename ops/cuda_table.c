/* The CUDA table: turns each op's work into a kernel and its argument.
 */
#include "cuda_formats.h"
#include "cuda_launch.h"
#include "cuda_list_arguments.h"

/* ---- casts -------------------------------------------------------------------------------- */

static int has_blocks_of_128(tn_format format) {
    return format == TN_FORMAT_FP8_BLOCK_1D || format == TN_FORMAT_FP8_BLOCK_2D;
}

static tn_status quantize_blocks(tn__cuda_context *context, const tn__quantize_work *work,
                                 tn_stream stream) {
    const tn__matrix *src = &work->src;
    const int is_1d = work->format == TN_FORMAT_FP8_BLOCK_1D;
    tn__cuda_quantize_arguments argument = tn__cuda_quantize_argument(work);
    if (work->has_row) argument.row = tn__cuda_plane_of(&work->row, tn__vector_of(src->dtype));
    if (work->has_col) argument.col = tn__cuda_plane_of(&work->col, 16);
    int kernel = tn__kernel_of_quantize(TN__KERNEL_QUANTIZE, is_1d, work->has_row, work->has_col,
                                        src->dtype, work->dtype);
    if (work->random) kernel = tn__kernel_of_stochastic(is_1d, src->dtype, work->dtype);
    return tn__kernel_launch(context, kernel, tn__matrix_tiles(src), TN__TILE_THREADS, &argument,
                             stream);
}

static tn_status quantize(tn_device *device, const tn__quantize_work *work, tn_stream stream) {
    tn__cuda_context *context;
    TN_TRY(tn__cuda_context_of(device, &context));
    TN_TRY(has_blocks_of_128(work->format) ? quantize_blocks(context, work, stream)
                                           : tn__cuda_quantize_formats(context, work, stream));
    if (!work->random) return TN_OK;
    tn__cuda_quantize_arguments argument = tn__cuda_quantize_argument(work);
    return tn__kernel_launch(context, TN__KERNEL_RANDOM_ADVANCE, 1, 1, &argument, stream);
}

static tn_status dequantize(tn_device *device, const tn__dequantize_work *work, tn_stream stream) {
    const tn__matrix *dst = &work->dst;
    int is_col = work->src.plane == TN_PLANE_COL;
    int is_tensor = work->format == TN_FORMAT_FP8_TENSOR;
    tn__cuda_context *context;
    tn__cuda_dequantize_arguments argument = tn__cuda_dequantize_argument(work);
    TN_TRY(tn__cuda_context_of(device, &context));
    if (!is_tensor && !has_blocks_of_128(work->format)) {
        return tn__cuda_dequantize_formats(context, work, stream);
    }
    argument.src = tn__cuda_plane_of(&work->src, is_col ? 16 : tn__vector_of(dst->dtype));
    argument.is_1d = work->format == TN_FORMAT_FP8_BLOCK_1D;
    argument.tile_step = !is_tensor;
    if (is_tensor) argument.src.scale_stride = 0; /* all tiles have the same scale */
    return tn__kernel_launch(context, tn__kernel_of_dequantize(is_col, work->src.dtype, dst->dtype),
                             tn__matrix_tiles(dst), TN__TILE_THREADS, &argument, stream);
}

/* Whether boxes can be moved between the planes (cuda_boxes.cuh). */
static int can_be_narrow(const tn__cuda_context *context, const tn__transpose_work *work,
                         const tn__cuda_transpose_arguments *argument) {
    return work->processors > 0 && context->multiprocessors > 0 && argument->from.vectors &&
           argument->to.vectors && argument->rows <= INT32_MAX && argument->cols <= INT32_MAX;
}

static tn__boxes tile_boxes(const void *data, int64_t rows, int64_t cols) {
    return (tn__boxes){.data = data,
                       .rows = rows,
                       .cols = cols,
                       .element_bytes = 1,
                       .box_rows = TN__TILE,
                       .box_cols = TN__TILE,
                       .is_swizzled = 1};
}

static tn_status transpose_narrow(tn__cuda_context *context, int processors,
                                  const tn__cuda_transpose_arguments *of, tn_stream stream) {
    const tn__driver *driver = context->driver;
    const int64_t stacks = (tn__tiles_of(of->rows) + 1) / 2 * tn__tiles_of(of->cols);
    const int64_t at_once = (int64_t)processors * TN__NARROW_WORKERS;
    tn__cuda_narrow_arguments argument = {.of = *of,
                                          .turns = (uint32_t)((stacks + at_once - 1) / at_once)};
    const tn__boxes from = tile_boxes(of->from.data, of->rows, of->cols);
    const tn__boxes to = tile_boxes(of->to.data, of->cols, of->rows);
    TN_TRY(driver->box_map(context->state, &from, argument.from_map));
    TN_TRY(driver->box_map(context->state, &to, argument.to_map));
    return tn__kernel_launch_narrow(context, (unsigned)processors, &argument, stream);
}

static tn_status transpose(tn_device *device, const tn__transpose_work *work, tn_stream stream) {
    const tn_plane_layout *from = &work->from.layout;
    tn__cuda_context *context;
    tn__cuda_transpose_arguments argument = {
        .from = tn__cuda_plane_of(&work->from, 16),
        .to = tn__cuda_plane_of(&work->to, 16),
        .rows = from->rows,
        .cols = from->cols,
        .scale_rows = (uint32_t)from->scale_rows,
        .scale_cols = (uint32_t)from->scale_cols,
        .tiles_across = (uint32_t)tn__tiles_of(from->cols),
    };
    TN_TRY(tn__cuda_context_of(device, &context));
    if (can_be_narrow(context, work, &argument))
        return transpose_narrow(context, work->processors, &argument, stream);
    const int64_t stacks =
        (tn__tiles_of(from->rows) + TN__TRANSPOSE_TILES - 1) / TN__TRANSPOSE_TILES;
    return tn__kernel_launch(context, TN__KERNEL_TRANSPOSE, stacks * tn__tiles_of(from->cols),
                             TN__TILE_THREADS, &argument, stream);
}

static tn_status requantize(tn_device *device, const tn__requantize_work *work, tn_stream stream) {
    tn__cuda_context *context;
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__cuda_requantize(context, work, stream);
}

static tn_status scale_update(tn_device *device, const tn__scale_update_work *work,
                              tn_stream stream) {
    tn__cuda_context *context;
    tn__cuda_scale_update_arguments argument = {.history = work->history,
                                                .scale = work->scale,
                                                .length = work->length,
                                                .count = work->count,
                                                .target = work->target,
                                                .is_most_recent = work->is_most_recent,
                                                .skip = work->skip};
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, TN__KERNEL_SCALE_UPDATE, work->count, TN__FLAT_THREADS,
                             &argument, stream);
}

/* ---- small operations --------------------------------------------------------------------- */

static int64_t elements(const tn__matrix *matrix) { return matrix->rows * matrix->cols; }

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
                                         .row_bytes = tn__row_bytes_of(&work->y)};
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
    .list_scratch_bytes = tn__cuda_list_bytes,
    .grouped_quantize = tn__cuda_grouped_quantize,
    .quantize_list = tn__cuda_quantize_list,
    .pad_groups = tn__cuda_pad_groups,
    .gather_rows = tn__cuda_gather_rows,
    .combine_rows = tn__cuda_combine_rows,
    .shard_amax = tn__cuda_shard_amax,
    .shard_quantize = tn__cuda_shard_quantize,
    .dequantize = dequantize,
    .transpose = transpose,
    .requantize = requantize,
    .scale_update = scale_update,
    .produce = tn__cuda_produce,
    .norm = tn__cuda_norm,
    .column_sums = tn__cuda_column_sums,
    .norm_gradient_split = tn__cuda_norm_gradient_split,
    .norm_gradient_means = tn__cuda_norm_gradient_means,
    .norm_gradient = tn__cuda_norm_gradient,
    .row_products = tn__cuda_row_products,
    .embed_gradient = tn__cuda_embed_gradient,
    .adamw = tn__cuda_adamw,
    .adamw_advance = tn__cuda_adamw_advance,
    .square_sums = tn__cuda_square_sums,
    .clip_factor = tn__cuda_clip_factor,
    .attention = tn__cuda_attention,
    .attention_gradient = tn__cuda_attention_gradient,
    .gemm_scratch_bytes = tn__cuda_gemm_scratch_bytes,
    .gemm = tn__cuda_gemm_run,
    .gemm_spares = tn__cuda_gemm_spares,
    .gemm_tune = tn__cuda_gemm_tune,
    .gemm_prefer = tn__cuda_gemm_prefer,
    .gemm_choice = tn__cuda_gemm_choice,
    .gemm_table_text = tn__cuda_gemm_table_text,
    .gemm_table_take = tn__cuda_gemm_table_take,
    .axpy = axpy,
    .convert = convert,
    .embed = embed,
    .cross_entropy = cross_entropy,
};
