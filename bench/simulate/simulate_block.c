/* A layer of the simulated transformer: see simulate_block.h. */
#include "simulate_block.h"

#include "simulate_kept.h"
#include "simulate_weights.h"

tn_layer_common simulate_common(const simulate_rank *rank) {
    tn_layer_common common = TN_LAYER_COMMON_INIT;
    common.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    common.saved_scope = rank->owners[SIMULATE_OWNER_SAVED];
    common.recompute = (int)rank->model->recompute;
    return common;
}

tn_layer_weight simulate_layer_weight(const simulate_weight *weight) {
    tn_layer_weight args = TN_LAYER_WEIGHT_INIT;
    args.weight = weight->value;
    return args;
}

int simulate_accumulates(const simulate_pass *pass) {
    return simulate_unit_accumulates(pass->unit, pass->microbatch);
}

tn_layer_gradient simulate_layer_gradient(const simulate_pass *pass,
                                          const simulate_weight *weight) {
    tn_layer_gradient gradient = TN_LAYER_GRADIENT_INIT;
    gradient.dweight = weight->gradient;
    gradient.accumulate = simulate_accumulates(pass);
    return gradient;
}

/* ---- norms ----------------------------------------------------------------------------------- */

tn_status simulate_make_sum(simulate_pass *pass, tn_tensor *sum) {
    const simulate_rank *rank = pass->rank;
    if (pass->residual.value) {
        return simulate_make(rank, SIMULATE_OWNER_SAVED, simulate_dtype(), rank->local_tokens,
                             rank->model->hidden, "sum", sum);
    }
    *sum = pass->x;
    return tn_tensor_move(pass->x, rank->owners[SIMULATE_OWNER_SAVED]);
}

tn_layer_norm simulate_norm(const simulate_pass *pass, const simulate_weight *gain, tn_tensor sum) {
    tn_layer_norm norm = TN_LAYER_NORM_INIT;
    norm.norm = TN_NORM_RMS;
    norm.x = pass->x;
    norm.residual = pass->residual;
    if (pass->residual.value) norm.sum = sum;
    norm.gamma = gain->value;
    return norm;
}

tn_layer_norm_gradient simulate_norm_gradient(const simulate_pass *pass,
                                              const simulate_weight *gain, tn_tensor sum,
                                              tn_tensor dx) {
    tn_layer_norm_gradient gradient = TN_LAYER_NORM_GRADIENT_INIT;
    gradient.norm = TN_NORM_RMS;
    gradient.x = sum;
    gradient.gamma = gain->value;
    gradient.added = pass->gradient;
    gradient.dx = dx;
    gradient.dgamma = gain->gradient;
    gradient.accumulate = simulate_accumulates(pass);
    return gradient;
}

tn_status simulate_advance(simulate_pass *pass, tn_tensor sum) {
    if (pass->residual.value) SIMULATE_TRY(simulate_drop(pass->rank, &pass->x));
    pass->x = (tn_tensor){0};
    pass->residual = sum;
    return TN_OK;
}

tn_status simulate_retreat(simulate_pass *pass, tn_tensor *sum, tn_tensor dx) {
    SIMULATE_TRY(simulate_drop(pass->rank, sum));
    SIMULATE_TRY(simulate_drop(pass->rank, &pass->gradient));
    pass->gradient = dx;
    return TN_OK;
}

/* ---- the layer ------------------------------------------------------------------------------- */

tn_status simulate_block_forward(simulate_pass *pass, simulate_layer *layer, simulate_layer *next,
                                 simulate_block *block) {
    simulate_rank *rank = pass->rank;
    SIMULATE_TRY(simulate_layer_begin(rank, layer, next, 0));
    SIMULATE_TRY(simulate_kept_forward(rank, layer));
    SIMULATE_TRY(simulate_attention_forward(pass, layer, block));
    SIMULATE_TRY(layer->has_experts ? simulate_experts_forward(pass, layer, block)
                                    : simulate_mlp_forward(pass, layer, block));
    SIMULATE_TRY(simulate_layer_end(rank, layer, 0));
    return simulate_mark(rank, "forward layer", layer->index);
}

tn_status simulate_block_backward(simulate_pass *pass, simulate_layer *layer, simulate_layer *next,
                                  simulate_block *block) {
    simulate_rank *rank = pass->rank;
    SIMULATE_TRY(simulate_layer_begin(rank, layer, next, 1));
    pass->unit = &layer->unit;
    SIMULATE_TRY(layer->has_experts ? simulate_experts_backward(pass, layer, block)
                                    : simulate_mlp_backward(pass, layer, block));
    SIMULATE_TRY(simulate_attention_backward(pass, layer, block));
    SIMULATE_TRY(simulate_kept_backward(rank, layer));
    SIMULATE_TRY(simulate_layer_end(rank, layer, 1));
    return simulate_mark(rank, "backward layer", layer->index);
}
