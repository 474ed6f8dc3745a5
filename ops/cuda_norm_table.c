/* The CUDA table's norms: rows, and then tiles if a plane's blocks are of 128 rows. */
#include "cuda_launch.h"
#include "cuda_norm_arguments.h"

/* One element for each column: 8 of them, or the 4 of a piece of fp32 rows, lie together. */
static int is_made_of_pieces(const tn__matrix *vector, int64_t cols) {
    return tn__is_made_of(vector->data, 0, 16) && cols % TN__LANE_COLUMNS == 0;
}

static tn__cuda_quantize_arguments cast_of(const tn__norm_work *work) {
    const tn__quantize_work *cast = &work->made.cast;
    const tn__matrix *x = &work->statistics.x;
    const int64_t row_bytes = tn__row_bytes_of(x);
    tn__cuda_quantize_arguments argument = tn__cuda_quantize_argument(cast);
    argument.src = work->made.x.data;
    argument.src_vectors = tn__is_made_of(x->data, row_bytes, 16) &&
                           tn__is_made_of(work->statistics.residual, row_bytes, 16) &&
                           tn__is_made_of(work->statistics.sum, row_bytes, 16) &&
                           tn__is_made_of(cast->src.data, row_bytes, 16);
    return argument;
}

/* As many threads as hold a short row in one step. */
static int threads_of_row(int64_t cols) {
    int threads = TN__FLAT_THREADS;
    while (threads > 32 && cols <= threads / 2 * TN__LANE_COLUMNS)
        threads /= 2;
    return threads;
}

/* `argument` without planes; `work` says which of them are made row by row. */
static tn_status launch_rows(tn__cuda_context *context, const tn__norm_work *work,
                             tn__cuda_norm_arguments argument, tn_stream stream) {
    const tn__quantize_work *cast = &work->made.cast;
    const tn_dtype dtype = cast->src.dtype;
    const int64_t at_once = TN__FLAT_THREADS / argument.row_threads;
    if (cast->has_row && cast->format == TN_FORMAT_FP8_BLOCK_1D)
        argument.cast.row = tn__cuda_plane_of(&cast->row, tn__vector_of(dtype));
    return tn__kernel_launch(
        context, tn__kernel_of_norm_rows(argument.cast.cols, dtype, cast->dtype),
        (argument.cast.rows + at_once - 1) / at_once, TN__FLAT_THREADS, &argument, stream);
}

static tn_status launch_tiles(tn__cuda_context *context, const tn__norm_work *work,
                              tn__cuda_norm_arguments argument, tn_stream stream) {
    const tn__quantize_work *cast = &work->made.cast;
    const int is_1d = cast->format == TN_FORMAT_FP8_BLOCK_1D;
    if (cast->has_row && !is_1d)
        argument.cast.row = tn__cuda_plane_of(&cast->row, tn__vector_of(cast->src.dtype));
    if (cast->has_col) argument.cast.col = tn__cuda_plane_of(&cast->col, 16);
    if (cast->src.cols == 0 || (!argument.cast.row.data && !argument.cast.col.data)) return TN_OK;
    return tn__kernel_launch(
        context, tn__kernel_of_produce(TN__KERNEL_NORM_TILES, is_1d, cast->src.dtype, cast->dtype),
        tn__matrix_tiles(&cast->src), TN__TILE_THREADS, &argument, stream);
}

tn_status tn__cuda_norm(tn_device *device, const tn__norm_work *work, tn_stream stream) {
    const tn__row_statistics_work *statistics = &work->statistics;
    const tn__produce_work *made = &work->made;
    tn__cuda_context *context;
    const tn__cuda_norm_arguments argument = {
        .cast = cast_of(work),
        .x = statistics->x.data,
        .residual = statistics->residual,
        .sum = statistics->sum,
        .value = made->cast.src.data,
        .mean = statistics->mean,
        .rstd = statistics->rstd,
        .gamma = made->gamma.data,
        .beta = made->beta.data,
        .skip = statistics->skip,
        .epsilon = statistics->epsilon,
        .gamma_base = made->gamma_base,
        .gamma_dtype = (int)made->gamma.dtype - TN_FP32,
        .beta_dtype = (int)made->beta.dtype - TN_FP32,
        .gamma_vectors = is_made_of_pieces(&made->gamma, statistics->x.cols),
        .beta_vectors = is_made_of_pieces(&made->beta, statistics->x.cols),
        .row_threads = threads_of_row(statistics->x.cols)};
    TN_TRY(tn__cuda_context_of(device, &context));
    TN_TRY(launch_rows(context, work, argument, stream));
    return launch_tiles(context, work, argument, stream);
}
