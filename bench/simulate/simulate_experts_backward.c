/* The gradients of a layer's experts: see simulate_experts.c for what forward leaves. */
#include "simulate_experts.h"

static tn_status make(const simulate_rank *rank, int64_t rows, int64_t cols, const char *name,
                      tn_tensor *out) {
    return simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(), rows, cols, name, out);
}

static tn_status activation_backward(const simulate_rank *rank, tn_tensor dy, tn_tensor hidden,
                                     tn_tensor dx) {
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    args.activation = TN_ACTIVATION_SILU;
    args.gated = 1;
    args.dy = dy;
    args.x = hidden;
    args.dx = dx;
    args.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    return tn_activation_backward(&args, rank->stream);
}

/* ---- shared experts -------------------------------------------------------------------------- */

static tn_status shared_linear(const simulate_pass *pass, simulate_cut cut,
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

/* dnormed of the shared experts, in a new tensor. */
static tn_status shared_backward(const simulate_pass *pass, const simulate_layer *layer,
                                 simulate_block *block, tn_tensor dnormed) {
    const simulate_rank *rank = pass->rank;
    const int64_t ffn = rank->model->shared_ffn / rank->model->tp;
    tn_tensor activated = {0}, dactivated = {0}, dhidden = {0};
    if (rank->model->recompute || !rank->model->fp8) {
        SIMULATE_TRY(make(rank, rank->tokens, ffn, "activated", &activated));
        SIMULATE_TRY(simulate_activate(rank, block->shared_hidden, activated));
    }
    SIMULATE_TRY(make(rank, rank->tokens, ffn, "gradient", &dactivated));
    SIMULATE_TRY(shared_linear(pass, SIMULATE_CUT_ROWS, &layer->parts[SIMULATE_SHARED_DOWN],
                               pass->gradient, activated, dactivated, &block->shared_down_saved));
    SIMULATE_TRY(simulate_drop(rank, &activated));
    SIMULATE_TRY(make(rank, rank->tokens, 2 * ffn, "gradient", &dhidden));
    SIMULATE_TRY(activation_backward(rank, dactivated, block->shared_hidden, dhidden));
    SIMULATE_TRY(simulate_drop(rank, &dactivated));
    SIMULATE_TRY(simulate_drop(rank, &block->shared_hidden));
    SIMULATE_TRY(shared_linear(pass, SIMULATE_CUT_COLUMNS, &layer->parts[SIMULATE_SHARED_UP],
                               dhidden, block->normed_2, dnormed, &block->shared_up_saved));
    return simulate_drop(rank, &dhidden);
}

/* ---- routed experts -------------------------------------------------------------------------- */

static tn_status grouped_backward(const simulate_pass *pass, const simulate_layer *layer,
                                  const simulate_weight *from, tn_tensor dy, tn_tensor x,
                                  tn_tensor dx, tn_grouped_saved *saved) {
    const simulate_rank *rank = pass->rank;
    tn_tensor weights[SIMULATE_LOCAL_EXPERTS_MAX], gradients[SIMULATE_LOCAL_EXPERTS_MAX];
    tn_grouped_linear_backward_args args = TN_GROUPED_LINEAR_BACKWARD_ARGS_INIT;
    args.experts = simulate_experts_of(rank, weights, from);
    for (int64_t i = 0; i < rank->local_experts; i++)
        gradients[i] = from[i].gradient;
    args.dy = dy;
    args.x = x;
    args.dx = dx;
    args.dweights = gradients;
    args.accumulate = simulate_unit_accumulates(&layer->experts, pass->microbatch);
    args.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    return tn_grouped_linear_backward(&args, saved, NULL, rank->stream);
}

/* Rows of this rank's experts: the gradient of what they were given. */
static tn_status experts_backward(const simulate_pass *pass, const simulate_layer *layer,
                                  simulate_block *block, tn_tensor dy, tn_tensor dx) {
    const simulate_rank *rank = pass->rank;
    const int64_t rows = rank->route.local_rows, ffn = rank->model->expert_ffn;
    tn_tensor activated = {0}, dactivated = {0}, dhidden = {0};
    if (!block->down_saved.x.data.value) {
        SIMULATE_TRY(make(rank, rows, ffn, "activated", &activated));
        SIMULATE_TRY(simulate_activate(rank, block->expert_hidden, activated));
    }
    SIMULATE_TRY(make(rank, rows, ffn, "gradient", &dactivated));
    SIMULATE_TRY(grouped_backward(pass, layer, layer->expert_down, dy, activated, dactivated,
                                  &block->down_saved));
    SIMULATE_TRY(simulate_drop(rank, &activated));
    SIMULATE_TRY(make(rank, rows, 2 * ffn, "gradient", &dhidden));
    SIMULATE_TRY(activation_backward(rank, dactivated, block->expert_hidden, dhidden));
    SIMULATE_TRY(simulate_drop(rank, &dactivated));
    SIMULATE_TRY(simulate_drop(rank, &block->expert_hidden));
    SIMULATE_TRY(grouped_backward(pass, layer, layer->expert_up, dhidden, block->spread, dx,
                                  &block->up_saved));
    SIMULATE_TRY(simulate_drop(rank, &block->spread));
    return simulate_drop(rank, &dhidden);
}

/* ---- the half -------------------------------------------------------------------------------- */

static tn_status norm_backward(simulate_pass *pass, const simulate_layer *layer,
                               simulate_block *block, tn_tensor dnormed) {
    const simulate_rank *rank = pass->rank;
    tn_norm_backward_args args = TN_NORM_BACKWARD_ARGS_INIT;
    tn_tensor dx = {0};
    SIMULATE_TRY(make(rank, rank->local_tokens, rank->model->hidden, "gradient", &dx));
    args.dy = dnormed;
    args.x = block->sum_2;
    args.rstd = block->rstd_2;
    args.gamma = layer->parts[SIMULATE_GAIN_2].value;
    args.added = pass->gradient;
    args.dx = dx;
    args.dgamma = layer->parts[SIMULATE_GAIN_2].gradient;
    args.accumulate = simulate_accumulates(pass);
    args.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    SIMULATE_TRY(tn_norm_backward(&args, rank->stream));
    SIMULATE_TRY(simulate_sum_gradient(rank, args.dgamma));
    SIMULATE_TRY(simulate_drop(rank, &block->rstd_2));
    return simulate_retreat(pass, &block->sum_2, dx);
}

tn_status simulate_experts_backward(simulate_pass *pass, simulate_layer *layer,
                                    simulate_block *block) {
    const simulate_rank *rank = pass->rank;
    const int64_t rows = rank->route.local_rows, hidden = rank->model->hidden;
    tn_tensor dnormed = {0}, dshared = {0}, dy = {0}, dx = {0};
    SIMULATE_TRY(simulate_spread(rank, pass->gradient, &dy));
    SIMULATE_TRY(make(rank, rows, hidden, "gradient", &dx));
    SIMULATE_TRY(experts_backward(pass, layer, block, dy, dx));
    SIMULATE_TRY(simulate_drop(rank, &dy));
    SIMULATE_TRY(make(rank, rank->local_tokens, hidden, "gradient", &dnormed));
    SIMULATE_TRY(simulate_combine(rank, &dx, dnormed));
    SIMULATE_TRY(simulate_mark(rank, "backward experts", layer->index));
    if (rank->model->shared_ffn) {
        SIMULATE_TRY(make(rank, rank->local_tokens, hidden, "gradient", &dshared));
        SIMULATE_TRY(shared_backward(pass, layer, block, dshared));
        SIMULATE_TRY(simulate_add(rank, &dshared, dnormed));
    }
    SIMULATE_TRY(simulate_drop(rank, &block->normed_2));
    SIMULATE_TRY(norm_backward(pass, layer, block, dnormed));
    SIMULATE_TRY(simulate_drop(rank, &dnormed));
    return simulate_mark(rank, "backward shared", layer->index);
}
