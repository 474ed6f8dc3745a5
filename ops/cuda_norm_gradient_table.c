/* The CUDA table's gradient of a norm: by whole rows or, if a plane is wanted, by tiles that are
 * held until their rows are known, which reads everything once; or, where rows are not such as
 * these take, the means of the rows first, and behind them tiles.
 */
#include "cuda_launch.h"
#include "cuda_train_arguments.h"

enum {
    SPLIT_MAX = 8,  /* of a tile's rows, which are added up in 8 times 16 */
    BLOCK_ROWS = 16 /* which a block could make in the time that it takes beside its rows */
};

/* ---- what a device has room for -------------------------------------------------------------- */

/* The ring of rows, and what the columns add up to: see cuda_norm_gradient_rows.cu. */
static unsigned shared_bytes_of(const tn__norm_gradient_rows *rows, int is_layer, int has_added) {
    const size_t of_ring = (size_t)rows->ring * (has_added ? 3 : 2) * tn_dtype_bytes(rows->x);
    return (unsigned)((size_t)rows->columns * (of_ring + sizeof(float) * (is_layer ? 2 : 1)));
}

static void fit(tn__cuda_context *context, int index) {
    const int is_layer = index / TN__NORM_GRADIENT_ROWS;
    const tn__norm_gradient_rows *rows = &tn__norm_gradient_rows_of[index % TN__NORM_GRADIENT_ROWS];
    const tn__driver *driver = context->driver;
    const tn__function kernel = context->kernels[TN__KERNEL_NORM_GRADIENT_ROWS + index];
    for (int has_added = 0; has_added < 2; has_added++) { /* the most comes last, and stays */
        const unsigned bytes = shared_bytes_of(rows, is_layer, has_added);
        int64_t blocks = 0;
        if (driver->shared_max_set(context->state, kernel, bytes) == TN_OK &&
            driver->blocks_at_once(context->state, kernel, rows->threads, bytes, &blocks) == TN_OK)
            context->norm_gradient_blocks[index][has_added] = blocks;
    }
}

/* Where a driver lacks the calls, or a GPU the shared memory, there are means and tiles. */
void tn__cuda_norm_gradient_fit(tn__cuda_context *context) {
    tn__saved_error error;
    if (!context->driver->shared_max_set || !context->driver->blocks_at_once) return;
    tn__error_save(&error);
    for (int index = 0; index < 2 * TN__NORM_GRADIENT_ROWS; index++)
        fit(context, index);
    for (int index = 0; index < TN__NORM_HELD_KERNELS; index++)
        context->norm_gradient_held_blocks[index] =
            tn__cuda_held_fit(context, TN__KERNEL_NORM_GRADIENT_HELD + index);
    tn__error_restore(&error);
}

/* ---- arguments ------------------------------------------------------------------------------ */

static int float_number(tn_dtype dtype) { return (int)dtype - TN_FP32; }

static tn__cuda_quantize_arguments cast_of(const tn__norm_gradient_work *work) {
    const tn__quantize_work *cast = &work->cast;
    const tn__matrix *x = &work->x;
    const int64_t row_bytes = tn__row_bytes_of(x);
    tn__cuda_quantize_arguments argument = {
        .src = x->data,
        .rows = x->rows,
        .cols = x->cols,
        .tiles_across = (uint32_t)tn__tiles_of(x->cols),
        .amax_epsilon = cast->amax_epsilon,
        .is_pow2 = cast->scale_mode == TN_SCALE_POW2,
        .src_vectors = tn__is_made_of(x->data, row_bytes, 16) &&
                       tn__is_made_of(work->dy, row_bytes, 16) &&
                       tn__is_made_of(work->added, row_bytes, 16) &&
                       tn__is_made_of(cast->src.data, row_bytes, 16),
    };
    if (cast->has_row) argument.row = tn__cuda_plane_of(&cast->row, tn__vector_of(x->dtype));
    if (cast->has_col) argument.col = tn__cuda_plane_of(&cast->col, 16);
    return argument;
}

static tn__cuda_norm_gradient_arguments argument_of(const tn__norm_gradient_work *work) {
    tn__cuda_norm_gradient_arguments argument = {
        .of = {.cast = cast_of(work),
               .half_cols = work->x.cols,
               .dy = work->dy,
               .value = work->cast.src.data,
               .skip = work->skip},
        .added = work->added,
        .mean = work->mean,
        .rstd = work->rstd,
        .gamma = work->gamma.data,
        .gamma_base = work->gamma_base,
        .gamma_dtype = float_number(work->gamma.dtype),
        .gamma_vectors = tn__is_made_of(work->gamma.data, 0, 16) && work->x.cols % 8 == 0,
        .shift = work->shift,
        .tilt = work->tilt,
        .gamma_sums = work->gamma_sums,
        .beta_sums = work->beta_sums,
    };
    return argument;
}

/* ---- launches ------------------------------------------------------------------------------- */

/* What a launch of whole rows takes, in rows that a block makes: that many one after the other, and
 * what a block has to do beside them. */
static int64_t rows_in_turn(int64_t blocks, int64_t tiles, int split) {
    return (tiles * split + blocks - 1) / blocks * (TN__TILE / split + BLOCK_ROWS);
}

/* So many tiles of rows take as long by tiles as by a turn of whole ones, as measured on an H200:
 * with 3 blocks of 512 threads for 8 multiprocessors. */
static int64_t tiles_of_a_turn(int64_t blocks, unsigned threads) {
    return blocks * (int64_t)threads * 3 / 4096;
}

/* Blocks to a tile's rows, so that all of the device has some; 0: by tiles it is faster. */
static int best_split(const tn__cuda_context *context, int index,
                      const tn__norm_gradient_work *work) {
    const unsigned threads = tn__norm_gradient_rows_of[index % TN__NORM_GRADIENT_ROWS].threads;
    const int64_t blocks = context->norm_gradient_blocks[index][work->added != NULL];
    const int64_t tiles = tn__tiles_of(work->x.rows);
    int best = 1;
    for (int split = 2; split <= SPLIT_MAX; split *= 2) {
        if (rows_in_turn(blocks, tiles, split) < rows_in_turn(blocks, tiles, best)) best = split;
    }
    const int64_t by_rows = tiles_of_a_turn(blocks, threads) * rows_in_turn(blocks, tiles, best);
    return tiles * (TN__TILE + BLOCK_ROWS) >= by_rows ? best : 0;
}

/* The kernel that takes whole rows, as an index; -1: there is none for these. */
static int rows_kernel_of(const tn__cuda_context *context, const tn__norm_gradient_work *work,
                          const tn__cuda_norm_gradient_arguments *argument) {
    const tn__matrix *x = &work->x;
    const int64_t sums_bytes = x->cols * (int64_t)sizeof(float);
    const int index = tn__norm_gradient_rows_index(x->cols, work->mean != NULL, x->dtype);
    if (index < 0 || work->cast.has_row || work->cast.has_col) return -1;
    if (x->cols > TN__NORM_GRADIENT_ANY_COLUMNS && x->cols % TN__NORM_GRADIENT_WHOLE_COLUMNS != 0)
        return -1;
    if (!argument->of.cast.src_vectors || (work->gamma.data && !argument->gamma_vectors)) return -1;
    if (!tn__is_made_of(work->gamma_sums, sums_bytes, 16) ||
        !tn__is_made_of(work->beta_sums, sums_bytes, 16))
        return -1;
    if (context->norm_gradient_blocks[index][work->added != NULL] == 0) return -1;
    return best_split(context, index, work) > 0 ? index : -1;
}

/* The kernel that holds tiles, as an index; -1: there is none for these. */
static int held_kernel_of(const tn__cuda_context *context, const tn__norm_gradient_work *work,
                          const tn__cuda_norm_gradient_arguments *argument) {
    const tn__quantize_work *cast = &work->cast;
    if (!work->parts || work->x.dtype == TN_FP32 || !argument->of.cast.src_vectors) return -1;
    if (work->gamma.data && !argument->gamma_vectors) return -1;
    const int index = tn__kernel_of_norm_held(TN__KERNEL_NORM_GRADIENT_HELD,
                                              cast->format == TN_FORMAT_FP8_BLOCK_1D, work->x.dtype,
                                              cast->dtype) -
                      TN__KERNEL_NORM_GRADIENT_HELD;
    const int64_t blocks = context->norm_gradient_held_blocks[index];
    return tn__cuda_can_hold(&work->x, blocks) ? index : -1;
}

tn_status tn__cuda_norm_gradient_split(tn_device *device, const tn__norm_gradient_work *work,
                                       int *out) {
    tn__cuda_context *context;
    const tn__cuda_norm_gradient_arguments argument = argument_of(work);
    TN_TRY(tn__cuda_context_of(device, &context));
    const int rows = rows_kernel_of(context, work, &argument);
    *out = rows >= 0 ? best_split(context, rows, work) : 1;
    return TN_OK;
}

tn_status tn__cuda_norm_gradient_means(tn_device *device, const tn__norm_gradient_work *work,
                                       tn_stream stream) {
    const int64_t at_once = TN__FLAT_THREADS / 32; /* a warp takes a row */
    tn__cuda_context *context;
    tn__cuda_norm_gradient_arguments argument = argument_of(work);
    TN_TRY(tn__cuda_context_of(device, &context));
    if (rows_kernel_of(context, work, &argument) >= 0 ||
        held_kernel_of(context, work, &argument) >= 0)
        return TN_OK; /* it makes them itself */
    return tn__kernel_launch(context, TN__KERNEL_NORM_GRADIENT_MEANS + float_number(work->x.dtype),
                             (work->x.rows + at_once - 1) / at_once, TN__FLAT_THREADS, &argument,
                             stream);
}

static tn_status launch_rows(tn__cuda_context *context, int index,
                             const tn__norm_gradient_work *work,
                             tn__cuda_norm_gradient_arguments *argument, tn_stream stream) {
    const tn__norm_gradient_rows *rows = &tn__norm_gradient_rows_of[index % TN__NORM_GRADIENT_ROWS];
    argument->split = work->split > 0 ? (unsigned)work->split : 1;
    const tn__grid grid = {.blocks = tn__tiles_of(work->x.rows) * argument->split,
                           .threads = rows->threads,
                           .shared_bytes =
                               shared_bytes_of(rows, work->mean != NULL, work->added != NULL)};
    return tn__kernel_launch_grid(context, TN__KERNEL_NORM_GRADIENT_ROWS + index, &grid, argument,
                                  stream);
}

static tn_status launch_held(tn__cuda_context *context, int index,
                             const tn__norm_gradient_work *work,
                             tn__cuda_norm_gradient_arguments *argument, tn_stream stream) {
    const int64_t tiles = tn__matrix_tiles(&work->x);
    const int64_t blocks = context->norm_gradient_held_blocks[index];
    argument->held = tn__cuda_held_of(&work->x, work->parts, work->shift ? 2 : 1);
    tn__cuda_norm_begin_arguments begin = {.numbers = {work->tilt, work->shift},
                                           .rows = work->x.rows,
                                           .counts = argument->held.given,
                                           .count = argument->held.turn + 1 - argument->held.given,
                                           .skip = work->skip};
    const tn__grid grid = {.blocks = blocks < tiles ? blocks : tiles,
                           .threads = TN__TILE_THREADS,
                           .shared_bytes = TN__HELD_BYTES,
                           .is_together = 1};
    TN_TRY(tn__cuda_norm_begin(context, &begin, stream));
    return tn__kernel_launch_grid(context, TN__KERNEL_NORM_GRADIENT_HELD + index, &grid, argument,
                                  stream);
}

tn_status tn__cuda_norm_gradient(tn_device *device, const tn__norm_gradient_work *work,
                                 tn_stream stream) {
    tn__cuda_context *context;
    tn__cuda_norm_gradient_arguments argument = argument_of(work);
    TN_TRY(tn__cuda_context_of(device, &context));
    const int rows = rows_kernel_of(context, work, &argument);
    if (rows >= 0) return launch_rows(context, rows, work, &argument, stream);
    TN_CHECK(work->split <= 1); /* there is room for the parts of whole rows */
    const int held = held_kernel_of(context, work, &argument);
    if (held >= 0) return launch_held(context, held, work, &argument, stream);
    const int kernel =
        tn__kernel_of_produce(TN__KERNEL_NORM_GRADIENT, work->cast.format == TN_FORMAT_FP8_BLOCK_1D,
                              work->x.dtype, work->cast.dtype);
    return tn__kernel_launch(context, kernel, tn__matrix_tiles(&work->x), TN__TILE_THREADS,
                             &argument, stream);
}
