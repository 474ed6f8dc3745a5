/* The CUDA table's ops on rows: what cuda_rows.cu wants to know. */
#include "cuda_module.h"
#include "cuda_rows_arguments.h"
#include "op_grouped.h"
#include "tenure_grouped.h"

_Static_assert((int)TN__GROUPS_BAD_MAP == (int)TN_GROUPED_BAD_MAP, "one numbering");

static int64_t more_of(int64_t a, int64_t b) { return a > b ? a : b; }

tn_status tn__cuda_pad_groups(tn_device *device, const tn__pad_groups_work *work,
                              tn_stream stream) {
    int64_t blocks = tn__units_of(more_of(work->rows, work->padded_rows), TN__FLAT_THREADS);
    tn__cuda_context *context;
    tn__cuda_pad_groups_arguments argument = {.offsets = work->groups.offsets,
                                              .groups = work->groups.count,
                                              .rows = work->rows,
                                              .multiple = work->multiple,
                                              .permutation = work->permutation,
                                              .padded_offsets = work->padded_offsets,
                                              .map = work->map,
                                              .padded_rows = work->padded_rows,
                                              .inverse = work->inverse,
                                              .total = work->scratch,
                                              .error = work->groups.error};
    TN_TRY(tn__cuda_context_of(device, &context));
    TN_TRY(
        tn__kernel_launch(context, TN__KERNEL_PAD_OFFSETS, 1, TN__FLAT_THREADS, &argument, stream));
    if (blocks == 0) return TN_OK;
    return tn__kernel_launch(context, TN__KERNEL_PAD_MAP, blocks, TN__FLAT_THREADS, &argument,
                             stream);
}

/* ---- rows by threads ------------------------------------------------------------------------ */

/* Threads for a row of so many pieces: a power of two up to a block. */
static uint32_t lanes_for(int64_t pieces) {
    uint32_t lanes = 1;
    while (lanes < TN__FLAT_THREADS && lanes < pieces)
        lanes *= 2;
    return lanes;
}

static int64_t blocks_for(int64_t rows, uint32_t lanes) {
    return tn__units_of(rows, TN__FLAT_THREADS / (int64_t)lanes);
}

static uint32_t piece_for(const tn__gather_rows_work *work) {
    uint64_t all =
        (uint64_t)(uintptr_t)work->src | (uint64_t)(uintptr_t)work->dst | (uint64_t)work->row_bytes;
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
}

static tn_status gather_scales(tn__cuda_context *context, const tn__gather_rows_work *work,
                               tn_stream stream) {
    int64_t across = tn__units_of(work->dst_scale_stride, TN__FLAT_THREADS);
    tn__cuda_gather_scales_arguments argument = {.src = work->src_scale,
                                                 .dst = work->dst_scale,
                                                 .map = work->map,
                                                 .src_rows = work->src_rows,
                                                 .dst_rows = work->dst_rows,
                                                 .src_stride = work->src_scale_stride,
                                                 .dst_stride = work->dst_scale_stride,
                                                 .scale_rows = work->scale_rows,
                                                 .blocks_across = (uint32_t)across};
    int64_t down = tn__units_of(work->scale_rows, TN__GATHER_SCALE_ROWS);
    return tn__kernel_launch(context, TN__KERNEL_GATHER_SCALES, across * down, TN__FLAT_THREADS,
                             &argument, stream);
}

tn_status tn__cuda_gather_rows(tn_device *device, const tn__gather_rows_work *work,
                               tn_stream stream) {
    uint32_t piece = piece_for(work);
    tn__cuda_context *context;
    tn__cuda_gather_arguments argument = {.src = work->src,
                                          .dst = work->dst,
                                          .map = work->map,
                                          .error = work->error,
                                          .src_rows = work->src_rows,
                                          .dst_rows = work->dst_rows,
                                          .pieces = work->row_bytes / piece,
                                          .lanes = lanes_for(work->row_bytes / piece),
                                          .piece_bytes = piece,
                                          .nothing = work->nothing * 0x01010101u};
    TN_TRY(tn__cuda_context_of(device, &context));
    TN_TRY(tn__kernel_launch(context, TN__KERNEL_GATHER_ROWS,
                             blocks_for(work->dst_rows, argument.lanes), TN__FLAT_THREADS,
                             &argument, stream));
    return work->dst_scale ? gather_scales(context, work, stream) : TN_OK;
}

tn_status tn__cuda_combine_rows(tn_device *device, const tn__combine_rows_work *work,
                                tn_stream stream) {
    const int64_t columns = 8; /* of a thread at once, if the rows are made of such */
    const tn__matrix *src = &work->src, *dst = &work->dst;
    int vectors = dst->cols % columns == 0 && (uintptr_t)src->data % 16 == 0 &&
                  (uintptr_t)dst->data % 16 == 0;
    tn__cuda_context *context;
    tn__cuda_combine_arguments argument = {.src = src->data,
                                           .dst = dst->data,
                                           .map = work->map,
                                           .weights = work->weights,
                                           .error = work->error,
                                           .src_rows = src->rows,
                                           .dst_rows = dst->rows,
                                           .cols = dst->cols,
                                           .each = work->each,
                                           .lanes =
                                               lanes_for(vectors ? dst->cols / columns : dst->cols),
                                           .vectors = vectors};
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(
        context, tn__kernel_of_pair(TN__KERNEL_COMBINE_ROWS, src->dtype, dst->dtype),
        blocks_for(dst->rows, argument.lanes), TN__FLAT_THREADS, &argument, stream);
}
