/* The CUDA table's attention: turns its work into kernels and arguments. */
#include "cuda_attention_arguments.h"
#include "cuda_launch.h"

/* `heads` of queries or of keys, of which a block takes one. */
static tn__cuda_attention_arguments argument_of(const tn__attention_work *work, int64_t heads) {
    const int64_t cols = (work->heads + 2 * work->heads_kv) * work->head_dim;
    const int64_t tiles = (work->sequence + TN__ATTENTION_TILE - 1) / TN__ATTENTION_TILE;
    tn__cuda_attention_arguments argument = {
        .qkv = work->qkv,
        .y = work->y,
        .log_sum = work->log_sum,
        .dy = work->dy,
        .dots = work->dots,
        .dqkv = work->dqkv,
        .tokens = work->tokens,
        .sequence = work->sequence,
        .packed_cols = cols,
        .heads = (uint32_t)work->heads,
        .heads_kv = (uint32_t)work->heads_kv,
        .across = (uint32_t)(heads * (work->tokens / work->sequence)),
        .tiles = (uint32_t)tiles,
        .head_dim = (int)work->head_dim,
        .is_causal = work->is_causal,
        .vectors = tn__is_made_of(work->qkv, 0, 16) && tn__is_made_of(work->y, 0, 16) &&
                   tn__is_made_of(work->dy, 0, 16) && tn__is_made_of(work->dqkv, 0, 16),
        .scale = work->scale,
    };
    return argument;
}

/* More blocks than a grid has are refused by the launch. */
static tn_status launch(tn_device *device, int family, const tn__attention_work *work,
                        int64_t heads, tn_stream stream) {
    const int64_t sequences = work->tokens / work->sequence;
    const int64_t tiles = (work->sequence + TN__ATTENTION_TILE - 1) / TN__ATTENTION_TILE;
    const int is_wide = work->head_dim > 64;
    tn__cuda_attention_arguments argument = argument_of(work, heads);
    tn__cuda_context *context;
    TN_TRY(tn__cuda_context_of(device, &context));
    return tn__kernel_launch(context, family + is_wide * 3 + (int)work->dtype - TN_FP32,
                             tiles * heads * sequences, TN__ATTENTION_THREADS, &argument, stream);
}

tn_status tn__cuda_attention(tn_device *device, const tn__attention_work *work, tn_stream stream) {
    return launch(device, TN__KERNEL_ATTENTION, work, work->heads, stream);
}

/* That of the queries leaves the dots that the other one reads. */
tn_status tn__cuda_attention_gradient(tn_device *device, const tn__attention_work *work,
                                      tn_stream stream) {
    TN_TRY(launch(device, TN__KERNEL_ATTENTION_DQ, work, work->heads, stream));
    return launch(device, TN__KERNEL_ATTENTION_DKV, work, work->heads_kv, stream);
}
