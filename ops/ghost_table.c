/* The ghosts: ops on the simulated device. They move no data; they declare the ranges that the
 * CUDA kernels read and write and the time that a roofline gives them, so that races, lifetimes
 * and step times of whole training steps come out without a GPU.
 *
 *     time = 2 us of launch + the larger of bytes / 4.0e12 B/s and operations / peak
 *
 * with H200-like peaks of 1.1e15 (FP8), 7.5e14 (bf16, fp16) and 6.0e13 (fp32) operations a second.
 */
#include "cuda_list_arguments.h"
#include "host_kernels.h"
#include "options.h"

enum { RANGES_MAX = 2 + 5 * TN__LIST_MAX };

static const double bytes_per_us = 4.0e6;
static const double launch_us = 2.0;

/* One kernel's declaration, as it is put together. */
typedef struct ghost {
    tn__range ranges[RANGES_MAX];
    size_t range_count;
    double bytes;
    double compute_us;
} ghost;

static void touch(ghost *kernel, const void *address, size_t bytes, int is_write) {
    if (bytes == 0) return;
    TN_CHECK(kernel->range_count < RANGES_MAX);
    kernel->ranges[kernel->range_count++] = (tn__range){address, bytes, is_write};
    kernel->bytes += (double)bytes;
}

static void touch_matrix(ghost *kernel, const tn__matrix *matrix, int is_write) {
    size_t elements = (size_t)matrix->rows * (size_t)matrix->cols;
    touch(kernel, matrix->data, elements * tn_dtype_bytes(matrix->dtype), is_write);
}

static void touch_plane(ghost *kernel, const tn_plane_view *view, int is_write) {
    touch(kernel, view->data, view->layout.data_bytes, is_write);
    touch(kernel, view->scale, view->layout.scale_bytes, is_write);
}

static tn_status launch(tn_device *device, const char *name, const ghost *kernel,
                        tn_stream stream) {
    double memory_us = kernel->bytes / bytes_per_us;
    double busy_us = memory_us > kernel->compute_us ? memory_us : kernel->compute_us;
    return tn__device_driver(device)->ghost_launch(tn__device_state(device), name, kernel->ranges,
                                                   kernel->range_count, launch_us + busy_us,
                                                   stream);
}

/* ---- casts --------------------------------------------------------------------------------- */

static tn_status quantize(tn_device *device, const tn__quantize_work *work, tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, &work->src, 0);
    int is_given = work->factor || work->whole_amax;
    int reads_twice = (work->format == TN_FORMAT_FP8_TENSOR && !is_given) ||
                      work->format == TN_FORMAT_NVFP4; /* the amax of all, then the casts */
    if (reads_twice) kernel.bytes *= 2.0;
    if (work->skip) touch(&kernel, work->skip, sizeof(float), 0);
    if (work->has_row) touch_plane(&kernel, &work->row, 1);
    if (work->has_col) touch_plane(&kernel, &work->col, 1);
    if (work->factor) touch(&kernel, work->factor, sizeof *work->factor, 0);
    if (work->amax) touch(&kernel, work->amax, sizeof *work->amax, 1);
    if (work->whole_amax) touch(&kernel, work->whole_amax, sizeof *work->whole_amax, 0);
    if (work->random) touch(&kernel, work->random, sizeof *work->random, 1);
    return launch(device, "quantize", &kernel, stream);
}

static void touch_grouped_plane(ghost *kernel, const tn_plane_view *view, size_t data_bytes,
                                int64_t scale_floats) {
    touch(kernel, view->data, data_bytes, 1);
    touch(kernel, view->scale, (size_t)scale_floats * sizeof(float), 1);
}

/* As if the groups filled the source: where they end only the device would know. */
static tn_status grouped_quantize(tn_device *device, const tn__grouped_quantize_work *work,
                                  tn_stream stream) {
    const tn__quantize_work *all = &work->all;
    size_t elements = (size_t)all->src.rows * (size_t)all->src.cols;
    ghost kernel = {.bytes = 0.0};
    touch(&kernel, work->groups.offsets, ((size_t)work->groups.count + 1) * sizeof(int64_t), 0);
    touch(&kernel, work->groups.error, sizeof(uint32_t), 1);
    if (work->skip) touch(&kernel, work->skip, sizeof(float), 0);
    touch(&kernel, work->scratch, tn__cuda_list_bytes(work->groups.count), 1);
    touch_matrix(&kernel, &all->src, 0);
    if (all->has_row) touch_grouped_plane(&kernel, &all->row, elements, work->row_scale_floats);
    if (all->has_col) touch_grouped_plane(&kernel, &all->col, elements, work->col_scale_floats);
    return launch(device, "grouped_quantize", &kernel, stream);
}

static tn_status quantize_list(tn_device *device, const tn__quantize_list_work *work,
                               tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch(&kernel, work->scratch, tn__cuda_list_bytes(work->count), 1);
    if (work->skip) touch(&kernel, work->skip, sizeof(float), 0);
    for (int64_t i = 0; i < work->count; i++) {
        const tn__quantize_work *item = &work->items[i];
        touch_matrix(&kernel, &item->src, 0);
        if (item->has_row) touch_plane(&kernel, &item->row, 1);
        if (item->has_col) touch_plane(&kernel, &item->col, 1);
    }
    return launch(device, "quantize_list", &kernel, stream);
}

static tn_status pad_groups(tn_device *device, const tn__pad_groups_work *work, tn_stream stream) {
    const size_t each = sizeof(int64_t), offsets = ((size_t)work->groups.count + 1) * each;
    ghost kernel = {.bytes = 0.0};
    touch(&kernel, work->groups.offsets, offsets, 0);
    touch(&kernel, work->groups.error, sizeof(uint32_t), 1);
    if (work->permutation) touch(&kernel, work->permutation, (size_t)work->rows * each, 0);
    touch(&kernel, work->scratch, tn__cuda_list_bytes(0), 1);
    touch(&kernel, work->padded_offsets, offsets, 1);
    touch(&kernel, work->map, (size_t)work->padded_rows * each, 1);
    if (work->inverse) touch(&kernel, work->inverse, (size_t)work->rows * each, 1);
    return launch(device, "pad_groups", &kernel, stream);
}

/* All of the source is touched, but no more of it moves than the result. */
static tn_status gather_rows(tn_device *device, const tn__gather_rows_work *work,
                             tn_stream stream) {
    const size_t row_bytes = (size_t)work->row_bytes, rows = (size_t)work->dst_rows;
    const size_t floats = (size_t)work->scale_rows * sizeof(float);
    ghost kernel = {.bytes = 0.0};
    touch(&kernel, work->src, (size_t)work->src_rows * row_bytes, 0);
    touch(&kernel, work->src_scale, floats * (size_t)work->src_scale_stride, 0);
    kernel.bytes = (double)(rows * row_bytes);
    touch(&kernel, work->map, rows * sizeof(int64_t), 0);
    touch(&kernel, work->error, sizeof(uint32_t), 1);
    touch(&kernel, work->dst, rows * row_bytes, 1);
    touch(&kernel, work->dst_scale, floats * (size_t)work->dst_scale_stride, 1);
    return launch(device, "gather_rows", &kernel, stream);
}

static tn_status combine_rows(tn_device *device, const tn__combine_rows_work *work,
                              tn_stream stream) {
    const size_t entries = (size_t)(work->dst.rows * work->each);
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, &work->src, 0);
    kernel.bytes =
        (double)entries * (double)work->src.cols * (double)tn_dtype_bytes(work->src.dtype);
    touch(&kernel, work->map, entries * sizeof(int64_t), 0);
    if (work->weights) touch(&kernel, work->weights, entries * sizeof(float), 0);
    touch(&kernel, work->error, sizeof(uint32_t), 1);
    touch_matrix(&kernel, &work->dst, 1);
    return launch(device, "combine_rows", &kernel, stream);
}

/* A float for each tile, rows of them padded to a multiple. */
static size_t bytes_of_tiles(const tn__shard *shard, int64_t multiple) {
    int64_t down = (shard->rows + TN__BLOCK - 1) / TN__BLOCK;
    int64_t across = (shard->cols + TN__BLOCK - 1) / TN__BLOCK;
    across = (across + multiple - 1) / multiple * multiple;
    return (size_t)(down * across) * sizeof(float);
}

static tn_status shard_amax(tn_device *device, const tn__shard_amax_work *work, tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, &work->shard.src, 0);
    size_t bytes = work->is_whole ? sizeof *work->amax : bytes_of_tiles(&work->shard, 1);
    touch(&kernel, work->amax, bytes, 1);
    return launch(device, "shard_amax", &kernel, stream);
}

static tn_status shard_quantize(tn_device *device, const tn__shard_quantize_work *work,
                                tn_stream stream) {
    const tn__shard *shard = &work->shard;
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, &shard->src, 0);
    touch(&kernel, work->amax, bytes_of_tiles(shard, 1), 0);
    if (work->skip) touch(&kernel, work->skip, sizeof(float), 0);
    touch(&kernel, work->data, (size_t)(shard->end - shard->first), 1);
    if (work->scale) touch(&kernel, work->scale, bytes_of_tiles(shard, 4), 1);
    return launch(device, "shard_quantize", &kernel, stream);
}

static tn_status dequantize(tn_device *device, const tn__dequantize_work *work, tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_plane(&kernel, &work->src, 0);
    if (work->skip) touch(&kernel, work->skip, sizeof(float), 0);
    touch_matrix(&kernel, &work->dst, 1);
    return launch(device, "dequantize", &kernel, stream);
}

static tn_status transpose(tn_device *device, const tn__transpose_work *work, tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_plane(&kernel, &work->from, 0);
    touch_plane(&kernel, &work->to, 1);
    return launch(device, "transpose", &kernel, stream);
}

static tn_status requantize(tn_device *device, const tn__requantize_work *work, tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_plane(&kernel, &work->from, 0);
    if (work->to.skip) touch(&kernel, work->to.skip, sizeof(float), 0);
    if (work->to.has_row) touch_plane(&kernel, &work->to.row, 1);
    if (work->to.has_col) touch_plane(&kernel, &work->to.col, 1);
    return launch(device, "requantize", &kernel, stream);
}

static tn_status scale_update(tn_device *device, const tn__scale_update_work *work,
                              tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    size_t entries = (size_t)work->length * (size_t)work->count;
    touch(&kernel, work->history, entries * sizeof *work->history, 1);
    touch(&kernel, work->scale, (size_t)work->count * sizeof *work->scale, 1);
    kernel.bytes *= 2.0; /* all of it is read first */
    if (work->skip) touch(&kernel, work->skip, sizeof(float), 0);
    return launch(device, "scale_update", &kernel, stream);
}

/* ---- producers ----------------------------------------------------------------------------- */

static void touch_floats(ghost *kernel, const float *floats, int64_t count, int is_write) {
    if (floats) touch(kernel, floats, (size_t)count * sizeof *floats, is_write);
}

static void touch_produced(ghost *kernel, const tn__produce_work *work) {
    const tn__quantize_work *cast = &work->cast;
    const int64_t tiles = (cast->src.rows + TN__BLOCK - 1) / TN__BLOCK;
    if (cast->src.data) touch_matrix(kernel, &cast->src, 1);
    if (cast->has_row) touch_plane(kernel, &cast->row, 1);
    if (cast->has_col) touch_plane(kernel, &cast->col, 1);
    touch_floats(kernel, work->tile_sums, tiles * cast->src.cols, 1);
}

static tn_status produce(tn_device *device, const tn__produce_work *work, tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, &work->x, 0);
    if (work->dy) {
        const size_t count = (size_t)work->x.rows * (size_t)work->x.cols;
        touch(&kernel, work->dy,
              (work->is_gated ? count / 2 : count) * tn_dtype_bytes(work->x.dtype), 0);
    }
    touch_floats(&kernel, work->weights, work->x.rows, 0);
    touch_floats(&kernel, work->skip, 1, 0);
    touch_produced(&kernel, work);
    return launch(device, "produce", &kernel, stream);
}

/* What rows give to tiles goes by the L2 cache. */
static void touch_parts(ghost *kernel, void *parts, const tn__matrix *x, int numbers) {
    const double bytes = kernel->bytes;
    if (parts) touch(kernel, parts, tn__norm_parts_bytes(x->rows, x->cols, numbers), 1);
    kernel->bytes = bytes;
}

/* As the kernels have it: without parts tiles read what is normalised again. */
static tn_status norm(tn_device *device, const tn__norm_work *work, tn_stream stream) {
    const tn__row_statistics_work *statistics = &work->statistics;
    const tn__matrix *x = &statistics->x;
    const size_t bytes = (size_t)x->rows * (size_t)x->cols * tn_dtype_bytes(x->dtype);
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, x, 0);
    if (statistics->residual) touch(&kernel, statistics->residual, bytes, 0);
    if (statistics->sum) touch(&kernel, statistics->sum, bytes, 1);
    touch_floats(&kernel, statistics->mean, x->rows, 1);
    touch_floats(&kernel, statistics->rstd, x->rows, 1);
    if (work->made.gamma.data) touch_matrix(&kernel, &work->made.gamma, 0);
    if (work->made.beta.data) touch_matrix(&kernel, &work->made.beta, 0);
    touch_floats(&kernel, statistics->skip, 1, 0);
    touch_produced(&kernel, &work->made);
    touch_parts(&kernel, work->parts, x, statistics->mean ? 2 : 1);
    if (!work->parts &&
        (work->made.cast.has_col ||
         (work->made.cast.has_row && work->made.cast.format == TN_FORMAT_FP8_BLOCK_2D)))
        kernel.bytes += (double)bytes;
    return launch(device, "norm", &kernel, stream);
}

static tn_status column_sums(tn_device *device, const tn__column_sums_work *work,
                             tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_floats(&kernel, work->tile_sums, work->tiles * work->parts * work->sums.cols, 0);
    touch_floats(&kernel, work->skip, 1, 0);
    if (work->accumulate) touch_matrix(&kernel, &work->sums, 0);
    touch_matrix(&kernel, &work->sums, 1);
    return launch(device, "column_sums", &kernel, stream);
}

/* ---- training ------------------------------------------------------------------------------ */

static void touch_norm_gradient(ghost *kernel, const tn__norm_gradient_work *work) {
    const tn__matrix *x = &work->x;
    const size_t bytes = (size_t)x->rows * (size_t)x->cols * tn_dtype_bytes(x->dtype);
    touch_matrix(kernel, x, 0);
    touch(kernel, work->dy, bytes, 0);
    touch_floats(kernel, work->mean, x->rows, 0);
    touch_floats(kernel, work->rstd, x->rows, 0);
    if (work->gamma.data) touch_matrix(kernel, &work->gamma, 0);
    touch_floats(kernel, work->skip, 1, 0);
}

static tn_status norm_gradient_means(tn_device *device, const tn__norm_gradient_work *work,
                                     tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    if (work->parts) return TN_OK; /* all is made at once */
    touch_norm_gradient(&kernel, work);
    touch_floats(&kernel, work->shift, work->x.rows, 1);
    touch_floats(&kernel, work->tilt, work->x.rows, 1);
    return launch(device, "norm_gradient_means", &kernel, stream);
}

static void touch_cast(ghost *kernel, const tn__quantize_work *cast) {
    if (cast->src.data) touch_matrix(kernel, &cast->src, 1);
    if (cast->has_row) touch_plane(kernel, &cast->row, 1);
    if (cast->has_col) touch_plane(kernel, &cast->col, 1);
}

static tn_status norm_gradient(tn_device *device, const tn__norm_gradient_work *work,
                               tn_stream stream) {
    const tn__matrix *x = &work->x;
    const size_t bytes = (size_t)x->rows * (size_t)x->cols * tn_dtype_bytes(x->dtype);
    const int64_t sums = (x->rows + TN__BLOCK - 1) / TN__BLOCK * x->cols;
    ghost kernel = {.bytes = 0.0};
    touch_norm_gradient(&kernel, work);
    touch_floats(&kernel, work->shift, x->rows, work->parts != NULL);
    touch_floats(&kernel, work->tilt, x->rows, work->parts != NULL);
    touch_parts(&kernel, work->parts, x, work->shift ? 2 : 1);
    if (work->added) touch(&kernel, work->added, bytes, 0);
    touch_cast(&kernel, &work->cast);
    touch_floats(&kernel, work->gamma_sums, sums, 1);
    touch_floats(&kernel, work->beta_sums, sums, 1);
    return launch(device, "norm_gradient", &kernel, stream);
}

static tn_status row_products(tn_device *device, const tn__row_products_work *work,
                              tn_stream stream) {
    const tn__matrix *x = &work->x;
    const size_t bytes = (size_t)x->rows * (size_t)x->cols * tn_dtype_bytes(x->dtype);
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, x, 0);
    touch(&kernel, work->dy, work->is_gated ? bytes / 2 : bytes, 0);
    touch_floats(&kernel, work->skip, 1, 0);
    touch_floats(&kernel, work->sums, x->rows, 1);
    return launch(device, "row_products", &kernel, stream);
}

static tn_status embed_gradient(tn_device *device, const tn__embed_gradient_work *work,
                                tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch(&kernel, work->tokens, (size_t)work->dy.rows, 0);
    touch_matrix(&kernel, &work->dy, 0);
    if (work->accumulate) touch_matrix(&kernel, &work->table, 0);
    touch_matrix(&kernel, &work->table, 1);
    touch_floats(&kernel, work->skip, 1, 0);
    return launch(device, "embed_gradient", &kernel, stream);
}

static tn_status adamw(tn_device *device, const tn__adamw_work *work, tn_stream stream) {
    const tn__matrix *master = &work->cast.src;
    const int64_t count = master->rows * master->cols;
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, &work->gradient, 0);
    touch_floats(&kernel, work->step, 3, 0);
    touch_floats(&kernel, work->rate, 1, 0);
    touch_floats(&kernel, work->gradient_scale, 1, 0);
    touch_floats(&kernel, work->skip, 1, 0);
    touch_floats(&kernel, work->first, count, 1);
    touch_floats(&kernel, work->second, count, 1);
    touch_cast(&kernel, &work->cast);
    kernel.bytes += 3.0 * sizeof(float) * (double)count; /* both moments and the master are read */
    if (work->plain.data) touch_matrix(&kernel, &work->plain, 1);
    return launch(device, "adamw", &kernel, stream);
}

static tn_status adamw_advance(tn_device *device, const tn__adamw_advance_work *work,
                               tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_floats(&kernel, work->step, 3, 1);
    touch_floats(&kernel, work->skip, 1, 0);
    return launch(device, "adamw_advance", &kernel, stream);
}

static tn_status square_sums(tn_device *device, const tn__square_sums_work *work,
                             tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, &work->x, 0);
    touch_floats(&kernel, work->sums, TN__SQUARE_BLOCKS, 1);
    return launch(device, "square_sums", &kernel, stream);
}

static tn_status clip_factor(tn_device *device, const tn__clip_factor_work *work,
                             tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_floats(&kernel, work->sums, TN__SQUARE_BLOCKS, 0);
    touch_floats(&kernel, work->norm, 1, 1);
    touch_floats(&kernel, work->factor, 1, 1);
    return launch(device, "clip_factor", &kernel, stream);
}

/* ---- attention ----------------------------------------------------------------------------- */

/* The packed tensor, and y's. */
static size_t packed_bytes(const tn__attention_work *work, int64_t heads) {
    return (size_t)(work->tokens * heads * work->head_dim) * tn_dtype_bytes(work->dtype);
}

/* Its products are sums in fp32: `operations` for each query, key and element of a head. */
static double attention_us(const tn__attention_work *work, double operations) {
    const double pairs = (double)work->tokens * (double)work->heads * (double)work->sequence;
    return operations * pairs * (double)work->head_dim / (work->is_causal ? 2.0 : 1.0) / 6.0e7;
}

static tn_status attention(tn_device *device, const tn__attention_work *work, tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch(&kernel, work->qkv, packed_bytes(work, work->heads + 2 * work->heads_kv), 0);
    touch(&kernel, work->y, packed_bytes(work, work->heads), 1);
    touch_floats(&kernel, work->log_sum, work->heads * work->tokens, 1);
    kernel.compute_us = attention_us(work, 4.0);
    return launch(device, "attention", &kernel, stream);
}

static tn_status attention_gradient(tn_device *device, const tn__attention_work *work,
                                    tn_stream stream) {
    const size_t all = packed_bytes(work, work->heads + 2 * work->heads_kv);
    ghost kernel = {.bytes = 0.0};
    touch(&kernel, work->qkv, all, 0);
    touch(&kernel, work->y, packed_bytes(work, work->heads), 0);
    touch(&kernel, work->dy, packed_bytes(work, work->heads), 0);
    touch_floats(&kernel, work->log_sum, work->heads * work->tokens, 0);
    touch_floats(&kernel, work->dots, work->heads * work->tokens, 1);
    touch(&kernel, work->dqkv, all, 1);
    kernel.compute_us = attention_us(work, 14.0);
    return launch(device, "attention_gradient", &kernel, stream);
}

/* ---- gemm ---------------------------------------------------------------------------------- */

/* The most that the CUDA table lets an algorithm want: eight fp32 copies of D, within bounds; or
 * what TENURE_SIM_WORKSPACE says, as to be compared with another device. */
static tn_status gemm_scratch_bytes(tn_device *device, const tn__gemm_work *work, size_t *out) {
    const size_t least = (size_t)1 << 20, most = (size_t)32 << 20;
    const size_t said = tn__options_get()->sim_workspace_bytes;
    size_t copies = (size_t)work->d.rows * (size_t)work->d.cols * 8 * sizeof(float);
    (void)device;
    if (said) return *out = said, TN_OK;
    *out = copies < least ? least : copies > most ? most : copies;
    return TN_OK;
}

/* Operations a microsecond. */
static double peak_of(tn_dtype dtype) {
    switch (dtype) {
    case TN_E4M3:
    case TN_E5M2: return 1.1e9;
    case TN_BF16:
    case TN_FP16: return 7.5e8;
    default: return 6.0e7;
    }
}

static void touch_operand(ghost *kernel, const tn__operand *operand, int64_t contracted) {
    int64_t blocks = (contracted + TN__BLOCK - 1) / TN__BLOCK;
    int64_t scale_rows =
        operand->kind == TN__OPERAND_VECTOR ? blocks : (operand->rows + TN__BLOCK - 1) / TN__BLOCK;
    size_t elements = (size_t)operand->rows * (size_t)contracted;
    touch(kernel, operand->data, elements * tn_dtype_bytes(operand->dtype), 0);
    if (operand->kind == TN__OPERAND_PLAIN) return;
    if (operand->kind == TN__OPERAND_TENSOR) scale_rows = 1;
    touch(kernel, operand->scale,
          (size_t)scale_rows * (size_t)operand->scale_stride * sizeof *operand->scale, 0);
}

static tn_status gemm(tn_device *device, const tn__gemm_work *work, tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    double operations =
        2.0 * (double)work->d.rows * (double)work->d.cols * (double)work->contracted;
    touch_operand(&kernel, &work->a, work->contracted);
    touch_operand(&kernel, &work->b, work->contracted);
    if (work->accumulate) touch_matrix(&kernel, &work->d, 0);
    if (work->bias.cols > 0) touch_matrix(&kernel, &work->bias, 0);
    touch_matrix(&kernel, &work->d, 1);
    double bytes = kernel.bytes;
    touch(&kernel, work->scratch, work->scratch_bytes, 1);
    kernel.bytes = bytes; /* a workspace is touched, but it is no traffic that the shape asks for */
    kernel.compute_us = operations / peak_of(work->a.dtype);
    return launch(device, "gemm", &kernel, stream);
}

static tn_status gemm_choice(tn_device *device, const tn__gemm_work *work, tn_gemm_choice *out) {
    size_t scratch_bytes;
    TN_TRY(gemm_scratch_bytes(device, work, &scratch_bytes));
    return tn__gemm_only_choice(work, "the host's definition", scratch_bytes, out);
}

/* ---- small operations ---------------------------------------------------------------------- */

static tn_status axpy(tn_device *device, const tn__axpy_work *work, tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, &work->x, 0);
    touch_matrix(&kernel, &work->y, 0);
    touch_matrix(&kernel, &work->y, 1);
    return launch(device, "axpy", &kernel, stream);
}

static tn_status convert(tn_device *device, const tn__matrix *x, const tn__matrix *y,
                         tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch_matrix(&kernel, x, 0);
    touch_matrix(&kernel, y, 1);
    return launch(device, "convert", &kernel, stream);
}

static tn_status embed(tn_device *device, const tn__embed_work *work, tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    touch(&kernel, work->tokens, (size_t)work->y.rows, 0);
    touch_matrix(&kernel, &work->table, 0);
    touch_matrix(&kernel, &work->y, 1);
    return launch(device, "embed", &kernel, stream);
}

static tn_status cross_entropy(tn_device *device, const tn__cross_entropy_work *work,
                               tn_stream stream) {
    ghost kernel = {.bytes = 0.0};
    size_t rows = (size_t)work->logits.rows;
    touch_matrix(&kernel, &work->logits, 0);
    touch(&kernel, work->targets, rows, 0);
    touch(&kernel, work->loss, rows * sizeof *work->loss, 1);
    touch_matrix(&kernel, &work->dlogits, 1);
    return launch(device, "cross_entropy", &kernel, stream);
}

const tn__op_table tn__op_table_ghost = {
    .name = "ghost",
    .is_whole = 1,
    .quantize = quantize,
    .list_scratch_bytes = tn__cuda_list_bytes,
    .grouped_quantize = grouped_quantize,
    .quantize_list = quantize_list,
    .pad_groups = pad_groups,
    .gather_rows = gather_rows,
    .combine_rows = combine_rows,
    .shard_amax = shard_amax,
    .shard_quantize = shard_quantize,
    .dequantize = dequantize,
    .transpose = transpose,
    .requantize = requantize,
    .scale_update = scale_update,
    .produce = produce,
    .norm = norm,
    .column_sums = column_sums,
    .norm_gradient_means = norm_gradient_means,
    .norm_gradient = norm_gradient,
    .row_products = row_products,
    .embed_gradient = embed_gradient,
    .adamw = adamw,
    .adamw_advance = adamw_advance,
    .square_sums = square_sums,
    .clip_factor = clip_factor,
    .attention = attention,
    .attention_gradient = attention_gradient,
    .gemm_scratch_bytes = gemm_scratch_bytes,
    .gemm = gemm,
    .gemm_tune = tn__gemm_tune_nothing,
    .gemm_choice = gemm_choice,
    .gemm_table_text = tn__gemm_no_table_text,
    .gemm_table_take = tn__gemm_no_table_take,
    .axpy = axpy,
    .convert = convert,
    .embed = embed,
    .cross_entropy = cross_entropy,
};
