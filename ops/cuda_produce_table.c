/* The CUDA table's producers: turns the work of making values and casting them into kernels. */
#include "cuda_launch.h"
#include "cuda_produce_arguments.h"

/* What is made, where its planes go, and whether all that is moved comes in pieces of 16 bytes. */
static tn__cuda_quantize_arguments cast_of(const tn__quantize_work *cast, const tn__matrix *x,
                                           int64_t half_row_bytes, const void *dy) {
    tn__cuda_quantize_arguments argument = {
        .src = x->data,
        .rows = cast->src.rows,
        .cols = cast->src.cols,
        .tiles_across = (uint32_t)tn__tiles_of(cast->src.cols),
        .amax_epsilon = cast->amax_epsilon,
        .is_pow2 = cast->scale_mode == TN_SCALE_POW2,
        .src_vectors = tn__is_made_of(x->data, half_row_bytes, 16) &&
                       tn__is_made_of(dy, half_row_bytes, 16) &&
                       tn__is_made_of(cast->src.data, half_row_bytes, 16),
    };
    if (cast->has_row) argument.row = tn__cuda_plane_of(&cast->row, tn__vector_of(x->dtype));
    if (cast->has_col) argument.col = tn__cuda_plane_of(&cast->col, 16);
    return argument;
}

/* Of a gated gradient both halves are made at once where they are whole tiles of bf16. */
static int is_in_pairs(const tn__produce_work *work, const tn__cuda_produce_arguments *argument) {
    return work->producer == TN__PRODUCE_GRADIENT && work->is_gated && argument->cast.src_vectors &&
           work->x.dtype == TN_BF16 && argument->half_cols % TN__TILE == 0;
}

static int family_of(const tn__produce_work *work, const tn__cuda_produce_arguments *argument) {
    if (is_in_pairs(work, argument)) return TN__KERNEL_DIFFERENTIATE_PAIRS;
    if (work->producer == TN__PRODUCE_GRADIENT)
        return work->is_gated ? TN__KERNEL_DIFFERENTIATE_GATED : TN__KERNEL_DIFFERENTIATE;
    return work->is_gated ? TN__KERNEL_ACTIVATE_GATED : TN__KERNEL_ACTIVATE;
}

tn_status tn__cuda_produce(tn_device *device, const tn__produce_work *work, tn_stream stream) {
    const tn__quantize_work *cast = &work->cast;
    const tn__matrix *x = &work->x;
    const int64_t half_cols = work->is_gated ? x->cols / 2 : x->cols;
    const int64_t half_row_bytes = half_cols * (int64_t)tn_dtype_bytes(x->dtype);
    int64_t tiles = tn__matrix_tiles(&cast->src);
    tn__cuda_context *context;
    tn__cuda_produce_arguments argument = {.cast = cast_of(cast, x, half_row_bytes, work->dy),
                                           .half_cols = half_cols,
                                           .dy = work->dy,
                                           .weights = work->weights,
                                           .value = cast->src.data,
                                           .tile_sums = work->tile_sums,
                                           .skip = work->skip,
                                           .curve = work->curve};
    const int family = family_of(work, &argument);
    if (family == TN__KERNEL_DIFFERENTIATE_PAIRS) tiles /= 2;
    if (tiles > INT32_MAX)
        return TN_FAIL(TN_UNSUPPORTED, "%lld tiles of 128 x 128 are more than a kernel counts",
                       (long long)tiles);
    TN_TRY(tn__cuda_context_of(device, &context));
    const int kernel = tn__kernel_of_produce(family, cast->format == TN_FORMAT_FP8_BLOCK_1D,
                                             x->dtype, cast->dtype);
    return tn__kernel_launch(context, kernel, tiles, TN__TILE_THREADS, &argument, stream);
}

tn_status tn__cuda_column_sums(tn_device *device, const tn__column_sums_work *work,
                               tn_stream stream) {
    const int64_t cols = work->sums.cols;
    tn__cuda_context *context;
    tn__cuda_column_sums_arguments argument = {.tile_sums = work->tile_sums,
                                               .sums = work->sums.data,
                                               .skip = work->skip,
                                               .tiles = work->tiles,
                                               .cols = cols,
                                               .parts = work->parts,
                                               .dtype = (int)work->sums.dtype - TN_FP32,
                                               .accumulate = work->accumulate};
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, TN__KERNEL_COLUMN_SUMS,
                             (cols + TN__SUM_COLUMNS - 1) / TN__SUM_COLUMNS, TN__FLAT_THREADS,
                             &argument, stream);
}
