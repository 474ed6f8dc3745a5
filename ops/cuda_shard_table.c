/* The CUDA table's casts of a part of a weight: what cuda_shard.cu wants to know. */
#include "cuda_formats.h"
#include "cuda_module.h"
#include "cuda_shard_arguments.h"
#include "op_grouped.h"

static int64_t tiles_of(int64_t extent) { return tn__units_of(extent, TN__TILE); }

/* Pieces of the weight begin at multiples of their size in src if rows do, and the part does. */
static tn__cuda_shard_arguments argument_of(const tn__shard *shard) {
    const uint64_t element_bytes = tn_dtype_bytes(shard->src.dtype);
    const uint64_t places = (uint64_t)shard->cols | (uint64_t)shard->first;
    tn__cuda_shard_arguments argument = {
        .src = shard->src.data,
        .rows = shard->rows,
        .cols = shard->cols,
        .first = shard->first,
        .end = shard->end,
        .tiles_across = (uint32_t)tiles_of(shard->cols),
        .vectors = (places * element_bytes | (uint64_t)(uintptr_t)shard->src.data) % 16 == 0};
    return argument;
}

static tn_status launch(tn_device *device, int kernel, tn__cuda_shard_arguments *argument,
                        tn_stream stream) {
    tn__cuda_context *context;
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, kernel, tiles_of(argument->rows) * argument->tiles_across,
                             TN__TILE_THREADS, argument, stream);
}

tn_status tn__cuda_shard_amax(tn_device *device, const tn__shard_amax_work *work,
                              tn_stream stream) {
    tn__cuda_shard_arguments argument = argument_of(&work->shard);
    if (work->is_whole) {
        tn__cuda_context *context;
        TN_TRY(tn__cuda_context_of(device, &context));
        return tn__cuda_amax(context, &work->shard.src, work->amax, stream);
    }
    argument.amax = work->amax;
    return launch(device, tn__kernel_of_shard_amax(work->shard.src.dtype), &argument, stream);
}

tn_status tn__cuda_shard_quantize(tn_device *device, const tn__shard_quantize_work *work,
                                  tn_stream stream) {
    const tn__shard *shard = &work->shard;
    tn__cuda_shard_arguments argument = argument_of(shard);
    const uint64_t vector = 16 / tn_dtype_bytes(shard->src.dtype);
    argument.amax = (float *)work->amax;
    argument.data = work->data;
    argument.data_vectors =
        ((uint64_t)shard->cols | (uint64_t)shard->first | (uint64_t)(uintptr_t)work->data) %
            vector ==
        0;
    argument.scale = work->scale;
    argument.scale_stride = 4 * tn__units_of(argument.tiles_across, 4);
    argument.amax_epsilon = work->amax_epsilon;
    argument.is_pow2 = work->scale_mode == TN_SCALE_POW2;
    argument.skip = work->skip;
    return launch(device, tn__kernel_of_shard_quantize(shard->src.dtype, work->dtype), &argument,
                  stream);
}
