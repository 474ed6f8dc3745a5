/* The CUDA table's norms: by rows alone; or, if a plane's blocks are of 128 rows, the statistics of
 * rows first, and behind them tiles that make everything: in one launch for planes alone, else in
 * two; or, of RMS beside a value or a sum, in one that holds tiles until their rows are known. Rows
 * that are too long, or not made of groups of 8 columns at their addresses, have a kernel of their
 * own.
 */
#include "cuda_launch.h"
#include "cuda_norm_arguments.h"

/* ---- what a device has room for -------------------------------------------------------------- */

/* A block's rows and their residuals, and if anything is made of them gamma and beta as fp32. */
static unsigned shared_bytes_of(int length, int is_layer, size_t element_bytes, int has_residual,
                                int has_outputs) {
    const size_t rows = (size_t)tn__norm_block_of[length][is_layer].rows;
    size_t of_column = rows * element_bytes * (has_residual ? 2 : 1);
    if (has_outputs) of_column += sizeof(float) * (is_layer ? 2 : 1);
    return (unsigned)((size_t)tn__norm_columns[length] * of_column);
}

/* The most comes last: it is what the kernel may have from then on. */
static void fit(tn__cuda_context *context, int index) {
    const int length = index / 12, is_layer = index / 6 % 2;
    const size_t element_bytes = index / 2 % 3 == 0 ? 4 : 2; /* as kernels are numbered */
    const tn__driver *driver = context->driver;
    const tn__function kernel = context->kernels[TN__KERNEL_NORM_ROWS + index];
    for (int way = 0; way < 4; way++) {
        const int has_residual = way % 2, has_outputs = way / 2;
        const unsigned bytes =
            shared_bytes_of(length, is_layer, element_bytes, has_residual, has_outputs);
        int64_t blocks = 0;
        if (driver->shared_max_set(context->state, kernel, bytes) == TN_OK &&
            driver->blocks_at_once(context->state, kernel,
                                   tn__norm_block_of[length][is_layer].threads, bytes,
                                   &blocks) == TN_OK)
            context->norm_blocks[index][has_residual][has_outputs] = blocks;
    }
}

int64_t tn__cuda_held_fit(tn__cuda_context *context, int kernel) {
    const tn__driver *driver = context->driver;
    const tn__function function = context->kernels[kernel];
    int64_t blocks = 0;
    if (driver->shared_max_set(context->state, function, TN__HELD_BYTES) != TN_OK ||
        driver->blocks_at_once(context->state, function, TN__TILE_THREADS, TN__HELD_BYTES,
                               &blocks) != TN_OK)
        return 0;
    return blocks;
}

/* Where a driver lacks the calls, or a GPU the shared memory, rows are taken as any rows, and no
 * tiles are held. */
void tn__cuda_norm_fit(tn__cuda_context *context) {
    tn__saved_error error;
    if (!context->driver->shared_max_set || !context->driver->blocks_at_once) return;
    tn__error_save(&error);
    for (int index = 0; index < TN__NORM_ROWS_KERNELS; index++)
        fit(context, index);
    for (int index = 0; index < TN__NORM_HELD_KERNELS; index++)
        context->norm_held_blocks[index] = tn__cuda_held_fit(context, TN__KERNEL_NORM_HELD + index);
    tn__error_restore(&error);
}

/* ---- arguments ------------------------------------------------------------------------------ */

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

static int needs_tiles(const tn__quantize_work *cast) {
    return cast->src.cols > 0 &&
           (cast->has_col || (cast->has_row && cast->format == TN_FORMAT_FP8_BLOCK_2D));
}

/* ---- launches ------------------------------------------------------------------------------- */

static tn_status launch_any_rows(tn__cuda_context *context, const tn__quantize_work *cast,
                                 tn__cuda_norm_arguments *argument, tn_stream stream) {
    return tn__kernel_launch(context, tn__kernel_of_norm_any_rows(cast->src.dtype, cast->dtype),
                             cast->src.rows, TN__FLAT_THREADS, argument, stream);
}

static tn_status launch_rows(tn__cuda_context *context, const tn__quantize_work *cast,
                             tn__cuda_norm_arguments *argument, tn_stream stream) {
    const int is_layer = argument->mean != NULL, has_residual = argument->sum != NULL;
    const int has_outputs = argument->value || argument->cast.row.data;
    int length = 0;
    while (length < TN__NORM_LENGTHS && cast->src.cols > tn__norm_columns[length])
        length++;
    if (length == TN__NORM_LENGTHS || !argument->cast.src_vectors || cast->src.cols == 0)
        return launch_any_rows(context, cast, argument, stream);
    const int kernel = tn__kernel_of_norm_rows(length, is_layer, cast->src.dtype, cast->dtype);
    const int64_t blocks =
        context->norm_blocks[kernel - TN__KERNEL_NORM_ROWS][has_residual][has_outputs];
    if (blocks == 0) return launch_any_rows(context, cast, argument, stream);
    const tn__norm_block *block = &tn__norm_block_of[length][is_layer];
    const int64_t wanted = (cast->src.rows + block->rows - 1) / block->rows;
    const tn__grid grid = {.blocks = blocks < wanted ? blocks : wanted,
                           .threads = block->threads,
                           .shared_bytes =
                               shared_bytes_of(length, is_layer, tn_dtype_bytes(cast->src.dtype),
                                               has_residual, has_outputs)};
    return tn__kernel_launch_grid(context, kernel, &grid, argument, stream);
}

/* So many bands ahead that a tile's rows were taken a round of blocks before it. */
static tn__cuda_bands bands_of(const tn__matrix *x, int *turn) {
    enum { ROUND_BLOCKS = 512 };
    const int64_t each = TN__BAND_PARTS + tn__tiles_of(x->cols);
    return (tn__cuda_bands){.turn = turn, .ahead = (uint32_t)((ROUND_BLOCKS + each - 1) / each)};
}

static int64_t parts_of(const tn__matrix *x, const tn__cuda_bands *bands) {
    return tn__tiles_of(x->rows) * (TN__BAND_PARTS + tn__tiles_of(x->cols)) +
           (int64_t)bands->ahead * TN__BAND_PARTS;
}

/* Where the last tile's scale goes, which the last part to be taken writes: until then parts are
 * counted there. */
static int *turn_of(const tn__quantize_work *cast) {
    const int64_t down = tn__tiles_of(cast->src.rows), across = tn__tiles_of(cast->src.cols);
    const tn_plane_view *col = &cast->col, *row = &cast->row;
    float *scale = cast->has_col ? col->scale : row->scale;
    int64_t stride;
    if (cast->format == TN_FORMAT_FP8_BLOCK_1D)
        return (int *)(scale + (down - 1) * tn__cuda_plane_of(col, 16).scale_stride +
                       cast->src.cols - 1);
    stride = tn__cuda_plane_of(cast->has_col ? col : row, 16).scale_stride;
    return (int *)(scale + (cast->has_col ? (across - 1) * stride + down - 1
                                          : (down - 1) * stride + across - 1));
}

/* As measured on an H200: with a sum or a value to be written two launches are faster. */
static int takes_bands(const tn__quantize_work *cast, const tn__cuda_norm_arguments *argument) {
    return argument->cast.src_vectors && !argument->sum && !argument->value &&
           tn__tiles_of(cast->src.cols) <= TN__BAND_BLOCKS_MAX;
}

static int kernel_of_tiles(int family, const tn__quantize_work *cast) {
    return tn__kernel_of_produce(family, cast->format == TN_FORMAT_FP8_BLOCK_1D, cast->src.dtype,
                                 cast->dtype);
}

tn_status tn__cuda_norm_begin(tn__cuda_context *context, tn__cuda_norm_begin_arguments *begin,
                              tn_stream stream) {
    return tn__kernel_launch(context, TN__KERNEL_NORM_BEGIN,
                             (begin->rows + TN__FLAT_THREADS - 1) / TN__FLAT_THREADS,
                             TN__FLAT_THREADS, begin, stream);
}

static tn_status launch_bands(tn__cuda_context *context, const tn__quantize_work *cast,
                              tn__cuda_norm_arguments *argument, tn_stream stream) {
    tn__cuda_norm_begin_arguments begin = {.numbers = {argument->rstd, argument->mean},
                                           .rows = cast->src.rows,
                                           .counts = turn_of(cast),
                                           .count = 1,
                                           .skip = argument->skip};
    argument->bands = bands_of(&cast->src, begin.counts);
    TN_TRY(tn__cuda_norm_begin(context, &begin, stream));
    return tn__kernel_launch(context, kernel_of_tiles(TN__KERNEL_NORM_BANDS, cast),
                             parts_of(&cast->src, &argument->bands), TN__TILE_THREADS, argument,
                             stream);
}

/* The kernel that holds tiles, as an index; -1: there is none for these. As measured on an H200 it
 * is slower where blocks have less than 8 tiles each, of LAYER, and where nothing but planes is
 * written. */
static int held_kernel_of(const tn__cuda_context *context, const tn__norm_work *work,
                          const tn__cuda_norm_arguments *argument) {
    enum { TURNS = 8 };
    const tn__quantize_work *cast = &work->made.cast;
    if (!work->parts || !argument->cast.src_vectors || argument->mean) return -1;
    if (cast->src.dtype == TN_FP32 || !(argument->sum || argument->value)) return -1;
    const int index =
        tn__kernel_of_norm_held(TN__KERNEL_NORM_HELD, cast->format == TN_FORMAT_FP8_BLOCK_1D,
                                cast->src.dtype, cast->dtype) -
        TN__KERNEL_NORM_HELD;
    const int64_t blocks = context->norm_held_blocks[index];
    if (!tn__cuda_can_hold(&cast->src, blocks)) return -1;
    return tn__matrix_tiles(&cast->src) >= TURNS * blocks ? index : -1;
}

static tn_status launch_held(tn__cuda_context *context, int index, const tn__norm_work *work,
                             tn__cuda_norm_arguments *argument, tn_stream stream) {
    const tn__matrix *x = &work->made.cast.src;
    argument->held = tn__cuda_held_of(x, work->parts, 1);
    tn__cuda_norm_begin_arguments begin = {.numbers = {argument->rstd},
                                           .rows = x->rows,
                                           .counts = argument->held.given,
                                           .count = argument->held.turn + 1 - argument->held.given,
                                           .skip = argument->skip};
    const tn__grid grid = {.blocks = context->norm_held_blocks[index],
                           .threads = TN__TILE_THREADS,
                           .shared_bytes = TN__HELD_BYTES,
                           .is_together = 1};
    TN_TRY(tn__cuda_norm_begin(context, &begin, stream));
    return tn__kernel_launch_grid(context, TN__KERNEL_NORM_HELD + index, &grid, argument, stream);
}

static tn_status launch_tiles(tn__cuda_context *context, const tn__norm_work *work,
                              tn__cuda_norm_arguments *argument, tn_stream stream) {
    const tn__quantize_work *cast = &work->made.cast;
    tn__cuda_norm_arguments statistics = *argument;
    const int held = held_kernel_of(context, work, argument);
    if (held >= 0) return launch_held(context, held, work, argument, stream);
    if (takes_bands(cast, argument)) return launch_bands(context, cast, argument, stream);
    statistics.value = NULL;
    statistics.cast.row.data = NULL;
    TN_TRY(launch_rows(context, cast, &statistics, stream));
    return tn__kernel_launch(context, kernel_of_tiles(TN__KERNEL_NORM_TILES, cast),
                             tn__matrix_tiles(&cast->src), TN__TILE_THREADS, argument, stream);
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
                                        .beta_dtype = (int)made->beta.dtype - TN_FP32};
    TN_TRY(tn__cuda_context_of(device, &context));
    return needs_tiles(&made->cast) ? launch_tiles(context, work, &argument, stream)
                                    : launch_rows(context, &made->cast, &argument, stream);
}
