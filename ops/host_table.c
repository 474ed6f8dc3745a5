/* The host table: each op is a task that the stream's worker thread runs in order.
 *
 * The work is copied into a block of our own, which the task frees when it is done; a call that
 * can not put its task on the stream frees it itself. What a table function gets from its caller
 * is only valid during the call; the addresses in it are valid until the stream has done the work.
 */
#include "host_grouped.h"
#include "host_alloc.h"

#include <string.h>

typedef struct conversion {
    tn__matrix x, y;
} conversion;

typedef struct host_task {
    void (*run)(const struct host_task *task);
    union {
        tn__quantize_work quantize;
        tn__grouped_quantize_work grouped_quantize;
        tn__pad_groups_work pad_groups;
        tn__gather_rows_work gather_rows;
        tn__combine_rows_work combine_rows;
        tn__shard_amax_work shard_amax;
        tn__shard_quantize_work shard_quantize;
        tn__dequantize_work dequantize;
        tn__transpose_work transpose;
        tn__requantize_work requantize;
        tn__scale_update_work scale_update;
        tn__produce_work produce;
        tn__column_sums_work column_sums;
        tn__norm_work norm;
        tn__norm_gradient_work norm_gradient;
        tn__row_products_work row_products;
        tn__embed_gradient_work embed_gradient;
        tn__adamw_work adamw;
        tn__adamw_advance_work adamw_advance;
        tn__square_sums_work square_sums;
        tn__clip_factor_work clip_factor;
        tn__attention_work attention;
        tn__gemm_work gemm;
        tn__axpy_work axpy;
        conversion convert;
        tn__embed_work embed;
        tn__cross_entropy_work cross_entropy;
    } work;
} host_task;

static void run_and_free(void *argument) {
    host_task *task = argument;
    task->run(task);
    tn__host_free(task);
}

static tn_status enqueue(tn_device *device, const host_task *task, tn_stream stream) {
    const tn__driver *driver = tn__device_driver(device);
    host_task *copy = tn__host_alloc(1, sizeof *copy);
    if (!copy) return TN_OUT_OF_HOST_MEMORY;
    *copy = *task;
    tn_status status = driver->host_task(tn__device_state(device), run_and_free, copy, stream);
    if (status != TN_OK) tn__host_free(copy);
    return status;
}

/* ---- quantize, dequantize, transpose ------------------------------------------------------- */

static void run_quantize(const host_task *task) { tn__host_quantize(&task->work.quantize); }

static tn_status quantize(tn_device *device, const tn__quantize_work *work, tn_stream stream) {
    host_task task = {.run = run_quantize, .work.quantize = *work};
    return enqueue(device, &task, stream);
}

static void run_dequantize(const host_task *task) { tn__host_dequantize(&task->work.dequantize); }

static tn_status dequantize(tn_device *device, const tn__dequantize_work *work, tn_stream stream) {
    host_task task = {.run = run_dequantize, .work.dequantize = *work};
    return enqueue(device, &task, stream);
}

static void run_transpose(const host_task *task) { tn__host_transpose(&task->work.transpose); }

static tn_status transpose(tn_device *device, const tn__transpose_work *work, tn_stream stream) {
    host_task task = {.run = run_transpose, .work.transpose = *work};
    return enqueue(device, &task, stream);
}

static void run_requantize(const host_task *task) { tn__host_requantize(&task->work.requantize); }

static tn_status requantize(tn_device *device, const tn__requantize_work *work, tn_stream stream) {
    host_task task = {.run = run_requantize, .work.requantize = *work};
    return enqueue(device, &task, stream);
}

static void run_scale_update(const host_task *task) {
    tn__host_scale_update(&task->work.scale_update);
}

static tn_status scale_update(tn_device *device, const tn__scale_update_work *work,
                              tn_stream stream) {
    host_task task = {.run = run_scale_update, .work.scale_update = *work};
    return enqueue(device, &task, stream);
}

/* ---- grouped ------------------------------------------------------------------------------- */

static size_t list_scratch_bytes(int64_t tensors) {
    (void)tensors;
    return 0;
}

static void run_grouped_quantize(const host_task *task) {
    tn__host_grouped_quantize(&task->work.grouped_quantize);
}

static tn_status grouped_quantize(tn_device *device, const tn__grouped_quantize_work *work,
                                  tn_stream stream) {
    host_task task = {.run = run_grouped_quantize, .work.grouped_quantize = *work};
    return enqueue(device, &task, stream);
}

/* A task with copies of all casts behind it. */
typedef struct list_task {
    int64_t count;
    const float *skip;
    tn__quantize_work items[];
} list_task;

static void run_list(void *argument) {
    list_task *task = argument;
    int is_skipped = tn__host_is_skipped(task->skip);
    for (int64_t i = 0; !is_skipped && i < task->count; i++)
        tn__host_quantize(&task->items[i]);
    tn__host_free(task);
}

static tn_status quantize_list(tn_device *device, const tn__quantize_list_work *work,
                               tn_stream stream) {
    size_t bytes = (size_t)work->count * sizeof *work->items;
    list_task *task = tn__host_alloc(1, sizeof *task + bytes);
    if (!task) return TN_OUT_OF_HOST_MEMORY;
    task->count = work->count;
    task->skip = work->skip;
    memcpy(task->items, work->items, bytes);
    tn_status status =
        tn__device_driver(device)->host_task(tn__device_state(device), run_list, task, stream);
    if (status != TN_OK) tn__host_free(task);
    return status;
}

/* ---- rows ---------------------------------------------------------------------------------- */

static void run_pad_groups(const host_task *task) { tn__host_pad_groups(&task->work.pad_groups); }

static tn_status pad_groups(tn_device *device, const tn__pad_groups_work *work, tn_stream stream) {
    host_task task = {.run = run_pad_groups, .work.pad_groups = *work};
    return enqueue(device, &task, stream);
}

static void run_gather_rows(const host_task *task) {
    tn__host_gather_rows(&task->work.gather_rows);
}

static tn_status gather_rows(tn_device *device, const tn__gather_rows_work *work,
                             tn_stream stream) {
    host_task task = {.run = run_gather_rows, .work.gather_rows = *work};
    return enqueue(device, &task, stream);
}

static void run_combine_rows(const host_task *task) {
    tn__host_combine_rows(&task->work.combine_rows);
}

static tn_status combine_rows(tn_device *device, const tn__combine_rows_work *work,
                              tn_stream stream) {
    host_task task = {.run = run_combine_rows, .work.combine_rows = *work};
    return enqueue(device, &task, stream);
}

/* ---- shards -------------------------------------------------------------------------------- */

static void run_shard_amax(const host_task *task) { tn__host_shard_amax(&task->work.shard_amax); }

static tn_status shard_amax(tn_device *device, const tn__shard_amax_work *work, tn_stream stream) {
    host_task task = {.run = run_shard_amax, .work.shard_amax = *work};
    return enqueue(device, &task, stream);
}

static void run_shard_quantize(const host_task *task) {
    tn__host_shard_quantize(&task->work.shard_quantize);
}

static tn_status shard_quantize(tn_device *device, const tn__shard_quantize_work *work,
                                tn_stream stream) {
    host_task task = {.run = run_shard_quantize, .work.shard_quantize = *work};
    return enqueue(device, &task, stream);
}

/* ---- producers ----------------------------------------------------------------------------- */

static void run_produce(const host_task *task) { tn__host_produce(&task->work.produce); }

static tn_status produce(tn_device *device, const tn__produce_work *work, tn_stream stream) {
    host_task task = {.run = run_produce, .work.produce = *work};
    return enqueue(device, &task, stream);
}

static void run_norm(const host_task *task) {
    tn__host_row_statistics(&task->work.norm.statistics);
    tn__host_produce(&task->work.norm.made);
}

static tn_status norm(tn_device *device, const tn__norm_work *work, tn_stream stream) {
    host_task task = {.run = run_norm, .work.norm = *work};
    return enqueue(device, &task, stream);
}

static void run_column_sums(const host_task *task) {
    tn__host_column_sums(&task->work.column_sums);
}

static tn_status column_sums(tn_device *device, const tn__column_sums_work *work,
                             tn_stream stream) {
    host_task task = {.run = run_column_sums, .work.column_sums = *work};
    return enqueue(device, &task, stream);
}

/* ---- training ------------------------------------------------------------------------------ */

static void run_norm_gradient_means(const host_task *task) {
    tn__host_norm_gradient_means(&task->work.norm_gradient);
}

static tn_status norm_gradient_means(tn_device *device, const tn__norm_gradient_work *work,
                                     tn_stream stream) {
    host_task task = {.run = run_norm_gradient_means, .work.norm_gradient = *work};
    return enqueue(device, &task, stream);
}

static void run_norm_gradient(const host_task *task) {
    tn__host_norm_gradient(&task->work.norm_gradient);
}

static tn_status norm_gradient(tn_device *device, const tn__norm_gradient_work *work,
                               tn_stream stream) {
    host_task task = {.run = run_norm_gradient, .work.norm_gradient = *work};
    return enqueue(device, &task, stream);
}

static void run_row_products(const host_task *task) {
    tn__host_row_products(&task->work.row_products);
}

static tn_status row_products(tn_device *device, const tn__row_products_work *work,
                              tn_stream stream) {
    host_task task = {.run = run_row_products, .work.row_products = *work};
    return enqueue(device, &task, stream);
}

static void run_embed_gradient(const host_task *task) {
    tn__host_embed_gradient(&task->work.embed_gradient);
}

static tn_status embed_gradient(tn_device *device, const tn__embed_gradient_work *work,
                                tn_stream stream) {
    host_task task = {.run = run_embed_gradient, .work.embed_gradient = *work};
    return enqueue(device, &task, stream);
}

static void run_adamw(const host_task *task) { tn__host_adamw(&task->work.adamw); }

static tn_status adamw(tn_device *device, const tn__adamw_work *work, tn_stream stream) {
    host_task task = {.run = run_adamw, .work.adamw = *work};
    return enqueue(device, &task, stream);
}

static void run_adamw_advance(const host_task *task) {
    tn__host_adamw_advance(&task->work.adamw_advance);
}

static tn_status adamw_advance(tn_device *device, const tn__adamw_advance_work *work,
                               tn_stream stream) {
    host_task task = {.run = run_adamw_advance, .work.adamw_advance = *work};
    return enqueue(device, &task, stream);
}

static void run_square_sums(const host_task *task) {
    tn__host_square_sums(&task->work.square_sums);
}

static tn_status square_sums(tn_device *device, const tn__square_sums_work *work,
                             tn_stream stream) {
    host_task task = {.run = run_square_sums, .work.square_sums = *work};
    return enqueue(device, &task, stream);
}

static void run_clip_factor(const host_task *task) {
    tn__host_clip_factor(&task->work.clip_factor);
}

static tn_status clip_factor(tn_device *device, const tn__clip_factor_work *work,
                             tn_stream stream) {
    host_task task = {.run = run_clip_factor, .work.clip_factor = *work};
    return enqueue(device, &task, stream);
}

static void run_attention(const host_task *task) { tn__host_attention(&task->work.attention); }

static tn_status attention(tn_device *device, const tn__attention_work *work, tn_stream stream) {
    host_task task = {.run = run_attention, .work.attention = *work};
    return enqueue(device, &task, stream);
}

static void run_attention_gradient(const host_task *task) {
    tn__host_attention_gradient(&task->work.attention);
}

static tn_status attention_gradient(tn_device *device, const tn__attention_work *work,
                                    tn_stream stream) {
    host_task task = {.run = run_attention_gradient, .work.attention = *work};
    return enqueue(device, &task, stream);
}

/* ---- gemm ---------------------------------------------------------------------------------- */

static tn_status gemm_scratch_bytes(tn_device *device, const tn__gemm_work *work, size_t *out) {
    (void)device, (void)work;
    *out = tn__host_gemm_scratch_bytes();
    return TN_OK;
}

static void run_gemm(const host_task *task) { tn__host_gemm(&task->work.gemm); }

static tn_status gemm(tn_device *device, const tn__gemm_work *work, tn_stream stream) {
    host_task task = {.run = run_gemm, .work.gemm = *work};
    return enqueue(device, &task, stream);
}

static tn_status gemm_choice(tn_device *device, const tn__gemm_work *work, tn_gemm_choice *out) {
    size_t scratch_bytes;
    TN_TRY(gemm_scratch_bytes(device, work, &scratch_bytes));
    return tn__gemm_only_choice(work, "the host's definition", scratch_bytes, out);
}

/* ---- small operations ---------------------------------------------------------------------- */

static void run_axpy(const host_task *task) { tn__host_axpy(&task->work.axpy); }

static tn_status axpy(tn_device *device, const tn__axpy_work *work, tn_stream stream) {
    host_task task = {.run = run_axpy, .work.axpy = *work};
    return enqueue(device, &task, stream);
}

static void run_convert(const host_task *task) {
    tn__host_convert(&task->work.convert.x, &task->work.convert.y);
}

static tn_status convert(tn_device *device, const tn__matrix *x, const tn__matrix *y,
                         tn_stream stream) {
    host_task task = {.run = run_convert, .work.convert = {*x, *y}};
    return enqueue(device, &task, stream);
}

static void run_embed(const host_task *task) { tn__host_embed(&task->work.embed); }

static tn_status embed(tn_device *device, const tn__embed_work *work, tn_stream stream) {
    host_task task = {.run = run_embed, .work.embed = *work};
    return enqueue(device, &task, stream);
}

static void run_cross_entropy(const host_task *task) {
    tn__host_cross_entropy(&task->work.cross_entropy);
}

static tn_status cross_entropy(tn_device *device, const tn__cross_entropy_work *work,
                               tn_stream stream) {
    host_task task = {.run = run_cross_entropy, .work.cross_entropy = *work};
    return enqueue(device, &task, stream);
}

const tn__op_table tn__op_table_host = {
    .name = "host",
    .is_whole = 1,
    .quantize = quantize,
    .list_scratch_bytes = list_scratch_bytes,
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
