/* The attention half of a layer: queries, keys and values, attention, projection.
 *
 * With a kv_rank (MLA) queries come out of query_rank elements of each token, keys and values out
 * of kv_rank; those are saved, and under `recompute` qkv is made of them again. What one product
 * makes side by side is then taken apart, and put together, as flat bytes: it is not what a model
 * would read, but as much.
 */
#include "simulate_block.h"
#include "simulate_parallel.h"
#include "tenure_attention.h"

static int64_t heads_of(const simulate_rank *rank) { return rank->model->heads / rank->model->tp; }

static int64_t heads_kv_of(const simulate_rank *rank) {
    return rank->model->heads_kv / rank->model->tp;
}

static int64_t attended_cols(const simulate_rank *rank) {
    return heads_of(rank) * rank->model->head_dim;
}

static int64_t qkv_cols(const simulate_rank *rank) {
    return attended_cols(rank) + 2 * heads_kv_of(rank) * rank->model->head_dim;
}

static int has_low_rank(const simulate_rank *rank) { return rank->model->kv_rank > 0; }

/* ---- products -------------------------------------------------------------------------------- */

static tn_status linear_forward(const simulate_pass *pass, simulate_cut cut,
                                const simulate_weight *weight, tn_tensor x, tn_tensor y,
                                tn_linear_saved *saved) {
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = x;
    args.w = simulate_layer_weight(weight);
    args.y = y;
    args.common = simulate_common(pass->rank);
    return simulate_linear_forward(pass->rank, cut, &args, saved);
}

static tn_status linear_backward(const simulate_pass *pass, simulate_cut cut,
                                 const simulate_weight *weight, tn_tensor dy, tn_tensor x,
                                 tn_tensor dx, tn_linear_saved *saved) {
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = dy;
    args.w = simulate_layer_weight(weight);
    args.x = x;
    args.dx = dx;
    args.gradient = simulate_layer_gradient(pass, weight);
    args.common = simulate_common(pass->rank);
    return simulate_linear_backward(pass->rank, cut, &args, saved);
}

/* The norm of the residual and the first product that reads it. */
static tn_status product_forward(simulate_pass *pass, const simulate_layer *layer, tn_tensor y,
                                 simulate_block *block) {
    const simulate_weight *weight = &layer->parts[SIMULATE_QKV];
    const simulate_rank *rank = pass->rank;
    tn_norm_linear_forward_args args = TN_NORM_LINEAR_FORWARD_ARGS_INIT;
    SIMULATE_TRY(simulate_make_sum(pass, &block->sum_1));
    args.norm = simulate_norm(pass, &layer->parts[SIMULATE_GAIN_1], block->sum_1);
    args.w = simulate_layer_weight(weight);
    args.y = y;
    args.common = simulate_common(rank);
    /* What comes down to a low rank is of this rank's tokens, and its weight whole. */
    SIMULATE_TRY(has_low_rank(rank)
                     ? tn_norm_linear_forward(&args, &block->product_saved, rank->stream)
                     : simulate_norm_linear_forward(rank, &args, &block->product_saved));
    return simulate_advance(pass, block->sum_1);
}

static tn_status product_backward(simulate_pass *pass, const simulate_layer *layer, tn_tensor dy,
                                  simulate_block *block) {
    const simulate_weight *weight = &layer->parts[SIMULATE_QKV];
    const simulate_rank *rank = pass->rank;
    tn_norm_linear_backward_args args = TN_NORM_LINEAR_BACKWARD_ARGS_INIT;
    tn_tensor dx = {0};
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(),
                               rank->local_tokens, rank->model->hidden, "gradient", &dx));
    args.dy = dy;
    args.w = simulate_layer_weight(weight);
    args.norm = simulate_norm_gradient(pass, &layer->parts[SIMULATE_GAIN_1], block->sum_1, dx);
    args.gradient = simulate_layer_gradient(pass, weight);
    args.common = simulate_common(rank);
    if (has_low_rank(rank)) {
        SIMULATE_TRY(tn_norm_linear_backward(&args, &block->product_saved, NULL, rank->stream));
        SIMULATE_TRY(simulate_sum_gradient(rank, weight->gradient));
        SIMULATE_TRY(simulate_sum_gradient(rank, layer->parts[SIMULATE_GAIN_1].gradient));
    } else {
        SIMULATE_TRY(simulate_norm_linear_backward(rank, &args, &block->product_saved));
    }
    return simulate_retreat(pass, &block->sum_1, dx);
}

/* ---- queries, keys and values ---------------------------------------------------------------- */

static tn_status make_activation(const simulate_rank *rank, int64_t rows, int64_t cols,
                                 const char *name, tn_tensor *out) {
    return simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(), rows, cols, name, out);
}

static tn_status make_saved(const simulate_rank *rank, int64_t rows, int64_t cols, const char *name,
                            tn_tensor *out) {
    return simulate_make(rank, SIMULATE_OWNER_SAVED, simulate_dtype(), rows, cols, name, out);
}

/* Between one tensor and two that have its elements together. */
static tn_status copy_parts(const simulate_rank *rank, tn_tensor whole, tn_tensor first,
                            tn_tensor second, int apart) {
    const tn_tensor parts[] = {first, second};
    const tn_access of_whole = apart ? TN_READ : TN_WRITE, of_part = apart ? TN_WRITE : TN_READ;
    tn_lease whole_lease, lease[2];
    tn_plane_view whole_view, view;
    size_t at = 0;
    SIMULATE_TRY(
        tn_lease_begin(whole, TN_PLANE_DATA, of_whole, rank->stream, &whole_lease, &whole_view));
    for (int i = 0; i < 2; i++) {
        SIMULATE_TRY(
            tn_lease_begin(parts[i], TN_PLANE_DATA, of_part, rank->stream, &lease[i], &view));
        char *there = (char *)whole_view.data + at;
        SIMULATE_TRY(tn_copy(rank->device, apart ? view.data : (void *)there,
                             apart ? (void *)there : view.data, view.layout.data_bytes,
                             rank->stream));
        at += view.layout.data_bytes;
    }
    for (int i = 0; i < 2; i++)
        SIMULATE_TRY(tn_lease_end(lease[i]));
    return tn_lease_end(whole_lease);
}

/* qkv of what is saved of it. */
static tn_status raise(const simulate_pass *pass, const simulate_layer *layer,
                       simulate_block *block, int is_saving) {
    const simulate_rank *rank = pass->rank;
    const int64_t cols = attended_cols(rank);
    tn_linear_saved unsaved = TN_LINEAR_SAVED_INIT;
    tn_linear_saved *query_saved = is_saving ? &block->query_up_saved : &unsaved;
    tn_linear_saved *kv_saved = is_saving ? &block->kv_up_saved : &unsaved;
    tn_tensor query = {0}, kv = {0};
    SIMULATE_TRY(make_activation(rank, rank->tokens, cols, "queries", &query));
    SIMULATE_TRY(make_activation(rank, rank->tokens, 2 * cols, "keys and values", &kv));
    SIMULATE_TRY(linear_forward(pass, SIMULATE_CUT_COLUMNS, &layer->parts[SIMULATE_QUERY_UP],
                                block->query_low, query, query_saved));
    SIMULATE_TRY(linear_forward(pass, SIMULATE_CUT_COLUMNS, &layer->parts[SIMULATE_KV_UP],
                                block->kv_low, kv, kv_saved));
    SIMULATE_TRY(make_saved(rank, rank->tokens, qkv_cols(rank), "qkv", &block->qkv));
    SIMULATE_TRY(copy_parts(rank, block->qkv, query, kv, 0));
    SIMULATE_TRY(simulate_drop(rank, &query));
    return simulate_drop(rank, &kv);
}

static tn_status low_forward(simulate_pass *pass, const simulate_layer *layer,
                             simulate_block *block) {
    const simulate_rank *rank = pass->rank;
    const int64_t query = rank->model->query_rank, kv = rank->model->kv_rank;
    tn_tensor low = {0};
    SIMULATE_TRY(make_activation(rank, rank->local_tokens, query + kv, "low", &low));
    SIMULATE_TRY(product_forward(pass, layer, low, block));
    SIMULATE_TRY(make_saved(rank, rank->local_tokens, query, "low queries", &block->query_low));
    SIMULATE_TRY(make_saved(rank, rank->local_tokens, kv, "low keys", &block->kv_low));
    SIMULATE_TRY(copy_parts(rank, low, block->query_low, block->kv_low, 1));
    SIMULATE_TRY(simulate_drop(rank, &low));
    return raise(pass, layer, block, 1);
}

static tn_status low_backward(simulate_pass *pass, const simulate_layer *layer,
                              simulate_block *block, tn_tensor *dqkv) {
    const simulate_rank *rank = pass->rank;
    const int64_t cols = attended_cols(rank);
    const int64_t query = rank->model->query_rank, kv = rank->model->kv_rank;
    tn_tensor dq = {0}, dkv = {0}, dquery = {0}, dlow_kv = {0}, dlow = {0};
    SIMULATE_TRY(make_activation(rank, rank->tokens, cols, "gradient", &dq));
    SIMULATE_TRY(make_activation(rank, rank->tokens, 2 * cols, "gradient", &dkv));
    SIMULATE_TRY(copy_parts(rank, *dqkv, dq, dkv, 1));
    SIMULATE_TRY(simulate_drop(rank, dqkv));
    SIMULATE_TRY(make_activation(rank, rank->local_tokens, query, "gradient", &dquery));
    SIMULATE_TRY(linear_backward(pass, SIMULATE_CUT_COLUMNS, &layer->parts[SIMULATE_QUERY_UP], dq,
                                 block->query_low, dquery, &block->query_up_saved));
    SIMULATE_TRY(simulate_drop(rank, &dq));
    SIMULATE_TRY(make_activation(rank, rank->local_tokens, kv, "gradient", &dlow_kv));
    SIMULATE_TRY(linear_backward(pass, SIMULATE_CUT_COLUMNS, &layer->parts[SIMULATE_KV_UP], dkv,
                                 block->kv_low, dlow_kv, &block->kv_up_saved));
    SIMULATE_TRY(simulate_drop(rank, &dkv));
    SIMULATE_TRY(simulate_drop(rank, &block->query_low));
    SIMULATE_TRY(simulate_drop(rank, &block->kv_low));
    SIMULATE_TRY(make_activation(rank, rank->local_tokens, query + kv, "gradient", &dlow));
    SIMULATE_TRY(copy_parts(rank, dlow, dquery, dlow_kv, 0));
    SIMULATE_TRY(simulate_drop(rank, &dquery));
    SIMULATE_TRY(simulate_drop(rank, &dlow_kv));
    SIMULATE_TRY(product_backward(pass, layer, dlow, block));
    return simulate_drop(rank, &dlow);
}

/* ---- attention ------------------------------------------------------------------------------- */

static tn_status attend_forward(const simulate_rank *rank, simulate_block *block) {
    tn_attention_forward_args args = TN_ATTENTION_FORWARD_ARGS_INIT;
    SIMULATE_TRY(make_saved(rank, rank->tokens, attended_cols(rank), "attended", &block->attended));
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_SAVED, TN_FP32, heads_of(rank), rank->tokens,
                               "log sum", &block->log_sum));
    args.qkv = block->qkv;
    args.y = block->attended;
    args.log_sum = block->log_sum;
    args.heads = heads_of(rank);
    args.heads_kv = heads_kv_of(rank);
    args.sequence = rank->model->context;
    args.is_causal = 1;
    return tn_attention_forward(&args, rank->stream);
}

static tn_status attend_backward(const simulate_rank *rank, const simulate_block *block,
                                 tn_tensor dy, tn_tensor dqkv) {
    tn_attention_backward_args args = TN_ATTENTION_BACKWARD_ARGS_INIT;
    args.dy = dy;
    args.qkv = block->qkv;
    args.y = block->attended;
    args.log_sum = block->log_sum;
    args.dqkv = dqkv;
    args.heads = heads_of(rank);
    args.heads_kv = heads_kv_of(rank);
    args.sequence = rank->model->context;
    args.is_causal = 1;
    args.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    return tn_attention_backward(&args, rank->stream);
}

/* ---- the half -------------------------------------------------------------------------------- */

tn_status simulate_attention_forward(simulate_pass *pass, simulate_layer *layer,
                                     simulate_block *block) {
    const simulate_rank *rank = pass->rank;
    tn_tensor y = {0};
    if (has_low_rank(rank)) {
        SIMULATE_TRY(low_forward(pass, layer, block));
    } else {
        SIMULATE_TRY(make_saved(rank, rank->tokens, qkv_cols(rank), "qkv", &block->qkv));
        SIMULATE_TRY(product_forward(pass, layer, block->qkv, block));
    }
    SIMULATE_TRY(simulate_mark(rank, "forward qkv", layer->index));
    SIMULATE_TRY(attend_forward(rank, block));
    if (has_low_rank(rank) && rank->model->recompute)
        SIMULATE_TRY(simulate_drop(rank, &block->qkv));
    SIMULATE_TRY(simulate_mark(rank, "forward attention", layer->index));
    SIMULATE_TRY(make_activation(rank, rank->local_tokens, rank->model->hidden, "projected", &y));
    SIMULATE_TRY(linear_forward(pass, SIMULATE_CUT_ROWS, &layer->parts[SIMULATE_PROJECTION],
                                block->attended, y, &block->projection_saved));
    pass->x = y;
    return simulate_mark(rank, "forward projection", layer->index);
}

tn_status simulate_attention_backward(simulate_pass *pass, simulate_layer *layer,
                                      simulate_block *block) {
    const simulate_rank *rank = pass->rank;
    tn_tensor dattended = {0}, dqkv = {0};
    SIMULATE_TRY(make_activation(rank, rank->tokens, attended_cols(rank), "gradient", &dattended));
    SIMULATE_TRY(linear_backward(pass, SIMULATE_CUT_ROWS, &layer->parts[SIMULATE_PROJECTION],
                                 pass->gradient, block->attended, dattended,
                                 &block->projection_saved));
    SIMULATE_TRY(simulate_mark(rank, "backward projection", layer->index));
    if (!block->qkv.value) SIMULATE_TRY(raise(pass, layer, block, 0));
    SIMULATE_TRY(make_activation(rank, rank->tokens, qkv_cols(rank), "gradient", &dqkv));
    SIMULATE_TRY(attend_backward(rank, block, dattended, dqkv));
    SIMULATE_TRY(simulate_drop(rank, &dattended));
    SIMULATE_TRY(simulate_drop(rank, &block->qkv));
    SIMULATE_TRY(simulate_drop(rank, &block->attended));
    SIMULATE_TRY(simulate_drop(rank, &block->log_sum));
    SIMULATE_TRY(simulate_mark(rank, "backward attention", layer->index));
    if (has_low_rank(rank)) {
        SIMULATE_TRY(low_backward(pass, layer, block, &dqkv));
    } else {
        SIMULATE_TRY(product_backward(pass, layer, dqkv, block));
        SIMULATE_TRY(simulate_drop(rank, &dqkv));
    }
    return simulate_mark(rank, "backward qkv", layer->index);
}
