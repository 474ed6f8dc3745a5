/* The CUDA table's norms: by rows, or by bands of 128 rows if a plane's blocks have as many. */
#include "cuda_launch.h"
#include "cuda_norm_arguments.h"

static int64_t bands_of(const tn__norm_work *work) { return tn__tiles_of(work->statistics.x.rows); }

static int needs_bands(const tn__norm_work *work) {
    const tn__quantize_work *cast = &work->made.cast;
    const int needs_tiles =
        cast->has_col || (cast->has_row && cast->format == TN_FORMAT_FP8_BLOCK_2D);
    return needs_tiles && cast->src.cols > 0;
}

static size_t ticket_bytes(const tn__norm_work *work) {
    return (size_t)(1 + bands_of(work)) * sizeof(uint32_t);
}

size_t tn__cuda_norm_scratch_bytes(const tn__norm_work *work) {
    return needs_bands(work) ? ticket_bytes(work) : 0;
}

/* All that a row has, or that goes with its columns, in groups of 8. */
static int is_made_of_groups(const tn__norm_work *work) {
    const tn__quantize_work *cast = &work->made.cast;
    const void *const addresses[] = {
        work->statistics.x.data, work->statistics.residual, work->statistics.sum, cast->src.data,
        work->made.gamma.data,   work->made.beta.data,      cast->row.data};
    if (cast->src.cols % TN__LANE_COLUMNS != 0) return 0;
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++)
        if (!tn__is_made_of(addresses[i], 0, 16)) return 0;
    return 1;
}

static tn__cuda_quantize_arguments cast_of(const tn__norm_work *work) {
    const tn__quantize_work *cast = &work->made.cast;
    tn__cuda_quantize_arguments argument = tn__cuda_quantize_argument(cast);
    argument.src = work->made.x.data;
    argument.src_vectors = is_made_of_groups(work);
    if (cast->has_row) argument.row = tn__cuda_plane_of(&cast->row, tn__vector_of(cast->src.dtype));
    if (cast->has_col) argument.col = tn__cuda_plane_of(&cast->col, 16);
    return argument;
}

/* As many threads as hold a short row in one step. */
static int threads_of_row(int64_t cols) {
    int threads = TN__FLAT_THREADS;
    while (threads > 32 && cols <= (int64_t)threads / 2 * TN__LANE_COLUMNS)
        threads /= 2;
    return threads;
}

static tn_status launch_rows(tn__cuda_context *context, const tn__quantize_work *cast,
                             tn__cuda_norm_arguments *argument, tn_stream stream) {
    const int64_t at_once = TN__FLAT_THREADS / argument->row_threads;
    const int kernel = tn__kernel_of_norm_rows(cast->src.cols, argument->cast.src_vectors,
                                               cast->src.dtype, cast->dtype);
    return tn__kernel_launch(context, kernel, (cast->src.rows + at_once - 1) / at_once,
                             TN__FLAT_THREADS, argument, stream);
}

static tn_status launch_bands(tn__cuda_context *context, const tn__norm_work *work,
                              tn__cuda_norm_arguments *argument, tn_stream stream) {
    const tn__quantize_work *cast = &work->made.cast;
    const int64_t bands = bands_of(work), at_once = TN__FLAT_THREADS / argument->row_threads;
    const int64_t items = TN__TILE / TN__ITEM_PASSES / at_once + tn__tiles_of(cast->src.cols);
    const int kernel =
        tn__kernel_of_produce(TN__KERNEL_NORM_BANDS, cast->format == TN_FORMAT_FP8_BLOCK_1D,
                              cast->src.dtype, cast->dtype);
    argument->tickets = work->scratch;
    argument->bands = (uint32_t)bands;
    /* As many tickets as there are blocks lie between rows and a tile that needs them. More would
     * do as well, but what is normalised must stay in the L2 cache so long. */
    argument->lead = (uint32_t)(context->blocks_at_once / items + 1);
    if (argument->lead > argument->bands) argument->lead = argument->bands;
    TN_TRY(context->driver->fill(context->state, work->scratch, 0, ticket_bytes(work), stream));
    return tn__kernel_launch(context, kernel, bands * items, TN__TILE_THREADS, argument, stream);
}

tn_status tn__cuda_norm(tn_device *device, const tn__norm_work *work, tn_stream stream) {
    const tn__row_statistics_work *statistics = &work->statistics;
    const tn__produce_work *made = &work->made;
    tn__cuda_context *context;
    tn__cuda_norm_arguments argument = {.cast = cast_of(work),
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
                                        .row_threads = threads_of_row(statistics->x.cols)};
    TN_TRY(tn__cuda_context_of(device, &context));
    if (needs_bands(work)) return launch_bands(context, work, &argument, stream);
    return launch_rows(context, &made->cast, &argument, stream);
}
