/* The CUDA table's training operations: turns their work into kernels and arguments. */
#include "cuda_launch.h"
#include "cuda_train_arguments.h"

static int float_number(tn_dtype dtype) { return (int)dtype - TN_FP32; }

static int64_t blocks_of_rows(int64_t rows) {
    const int64_t at_once = TN__FLAT_THREADS / 32; /* a warp takes a row */
    return (rows + at_once - 1) / at_once;
}

/* ---- products over rows, the embedding ----------------------------------------------------- */

tn_status tn__cuda_row_products(tn_device *device, const tn__row_products_work *work,
                                tn_stream stream) {
    const tn__matrix *x = &work->x;
    const int64_t half_cols = work->is_gated ? x->cols / 2 : x->cols;
    const int64_t half_row_bytes = half_cols * (int64_t)tn_dtype_bytes(x->dtype);
    tn__cuda_context *context;
    tn__cuda_row_products_arguments argument = {
        .x = x->data,
        .dy = work->dy,
        .sums = work->sums,
        .skip = work->skip,
        .rows = x->rows,
        .half_cols = half_cols,
        .curve = work->curve,
        .is_gated = work->is_gated,
        .vectors = tn__is_made_of(x->data, half_row_bytes, 16) &&
                   tn__is_made_of(work->dy, half_row_bytes, 16),
    };
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, TN__KERNEL_ROW_PRODUCTS + float_number(x->dtype),
                             blocks_of_rows(x->rows), TN__FLAT_THREADS, &argument, stream);
}

tn_status tn__cuda_embed_gradient(tn_device *device, const tn__embed_gradient_work *work,
                                  tn_stream stream) {
    const tn__matrix *table = &work->table;
    const int64_t across = (table->cols + TN__FLAT_THREADS - 1) / TN__FLAT_THREADS;
    tn__cuda_context *context;
    tn__cuda_embed_gradient_arguments argument = {.tokens = work->tokens,
                                                  .dy = work->dy.data,
                                                  .table = table->data,
                                                  .skip = work->skip,
                                                  .token_count = work->dy.rows,
                                                  .cols = table->cols,
                                                  .blocks_across = (uint32_t)across,
                                                  .dtype = float_number(table->dtype),
                                                  .accumulate = work->accumulate};
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, TN__KERNEL_EMBED_GRADIENT + float_number(work->dy.dtype),
                             table->rows * across, TN__FLAT_THREADS, &argument, stream);
}

/* ---- AdamW --------------------------------------------------------------------------------- */

/* Four elements at a time: 16 bytes of fp32, 8 of a 16-bit type. */
static int moves_fours(const void *data, tn_dtype dtype, int64_t cols) {
    const int64_t bytes = (int64_t)tn_dtype_bytes(dtype);
    return tn__is_made_of(data, cols * bytes, 4 * bytes);
}

/* Everything of an update that moves with the weight, in lines of `cols`. */
static int update_moves_fours(const tn__adamw_work *work, int64_t cols) {
    return moves_fours(work->cast.src.data, TN_FP32, cols) &&
           moves_fours(work->first, TN_FP32, cols) && moves_fours(work->second, TN_FP32, cols) &&
           moves_fours(work->gradient.data, work->gradient.dtype, cols) &&
           moves_fours(work->plain.data, work->plain.dtype, cols);
}

static tn_status adamw_flat(tn__cuda_context *context, const tn__adamw_work *work,
                            tn__cuda_adamw_arguments *argument, tn_stream stream) {
    const int64_t count = work->cast.src.rows * work->cast.src.cols;
    const int64_t of_block = 4 * (int64_t)TN__FLAT_THREADS;
    argument->cast.src_vectors = update_moves_fours(work, count);
    return tn__kernel_launch(context, TN__KERNEL_ADAMW_FLAT + float_number(work->gradient.dtype),
                             (count + of_block - 1) / of_block, TN__FLAT_THREADS, argument, stream);
}

tn_status tn__cuda_adamw(tn_device *device, const tn__adamw_work *work, tn_stream stream) {
    const tn__quantize_work *cast = &work->cast;
    tn__cuda_context *context;
    tn__cuda_adamw_arguments argument = {.cast = tn__cuda_quantize_argument(cast),
                                         .gradient = work->gradient.data,
                                         .first = work->first,
                                         .second = work->second,
                                         .step = work->step,
                                         .rate = work->rate,
                                         .gradient_scale = work->gradient_scale,
                                         .plain = work->plain.data,
                                         .constants = work->constants,
                                         .gradient_dtype = float_number(work->gradient.dtype),
                                         .plain_dtype = float_number(work->plain.dtype)};
    argument.cast.skip = work->skip;
    TN_TRY(tn__cuda_context_of(device, &context));
    if (!cast->has_row) return adamw_flat(context, work, &argument, stream);
    argument.cast.src_vectors = update_moves_fours(work, cast->src.cols);
    argument.cast.row = tn__cuda_plane_of(&cast->row, tn__vector_of(TN_FP32));
    const int kernel =
        TN__KERNEL_ADAMW + (cast->format == TN_FORMAT_FP8_BLOCK_2D) * 2 + (cast->dtype == TN_E5M2);
    return tn__kernel_launch(context, kernel, tn__matrix_tiles(&cast->src), TN__TILE_THREADS,
                             &argument, stream);
}

tn_status tn__cuda_adamw_advance(tn_device *device, const tn__adamw_advance_work *work,
                                 tn_stream stream) {
    tn__cuda_context *context;
    tn__cuda_adamw_advance_arguments argument = {
        .step = work->step, .skip = work->skip, .beta1 = work->beta1, .beta2 = work->beta2};
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, TN__KERNEL_ADAMW_ADVANCE, 1, 32, &argument, stream);
}

/* ---- clipping ------------------------------------------------------------------------------ */

tn_status tn__cuda_square_sums(tn_device *device, const tn__square_sums_work *work,
                               tn_stream stream) {
    const tn__matrix *x = &work->x;
    const int64_t count = x->rows * x->cols;
    const int64_t wanted = count > 0 ? (count + TN__SQUARE_WIDTH - 1) / TN__SQUARE_WIDTH : 1;
    const int64_t blocks = wanted < TN__SQUARE_BLOCKS ? wanted : TN__SQUARE_BLOCKS;
    tn__cuda_context *context;
    tn__cuda_square_sums_arguments argument = {.x = x->data,
                                               .sums = work->sums,
                                               .count = count,
                                               .blocks = (int)blocks,
                                               .accumulate = work->accumulate,
                                               .vectors = moves_fours(x->data, x->dtype, count)};
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, TN__KERNEL_SQUARE_SUMS + float_number(x->dtype), blocks,
                             TN__FLAT_THREADS, &argument, stream);
}

tn_status tn__cuda_clip_factor(tn_device *device, const tn__clip_factor_work *work,
                               tn_stream stream) {
    tn__cuda_context *context;
    tn__cuda_clip_factor_arguments argument = {.sums = work->sums,
                                               .norm = work->norm,
                                               .factor = work->factor,
                                               .scale = work->scale,
                                               .max_norm = work->max_norm};
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, TN__KERNEL_CLIP_FACTOR, 1, 32, &argument, stream);
}
