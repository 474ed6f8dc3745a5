/* The second half of a layer without experts: norm, up, gated SiLU, down. */
#include "simulate_block.h"
#include "simulate_parallel.h"

tn_status simulate_mlp_forward(simulate_pass *pass, simulate_layer *layer, simulate_block *block) {
    const simulate_rank *rank = pass->rank;
    const int64_t rows = rank->local_tokens, hidden = rank->model->hidden;
    tn_norm_mlp_forward_args args = TN_NORM_MLP_FORWARD_ARGS_INIT;
    tn_tensor y = {0};
    SIMULATE_TRY(simulate_make_sum(pass, &block->sum_2));
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(), rows, hidden,
                               "added", &y));
    args.norm = simulate_norm(pass, &layer->parts[SIMULATE_GAIN_2], block->sum_2);
    args.activation = TN_ACTIVATION_SILU;
    args.gated = 1;
    args.w1 = simulate_layer_weight(&layer->parts[SIMULATE_UP]);
    args.w2 = simulate_layer_weight(&layer->parts[SIMULATE_DOWN]);
    args.y = y;
    args.common = simulate_common(rank);
    SIMULATE_TRY(simulate_norm_mlp_forward(rank, &args, &block->mlp_saved));
    SIMULATE_TRY(simulate_advance(pass, block->sum_2));
    pass->x = y;
    return simulate_mark(rank, "forward mlp", layer->index);
}

tn_status simulate_mlp_backward(simulate_pass *pass, simulate_layer *layer, simulate_block *block) {
    const simulate_rank *rank = pass->rank;
    const simulate_weight *up = &layer->parts[SIMULATE_UP], *down = &layer->parts[SIMULATE_DOWN];
    tn_norm_mlp_backward_args args = TN_NORM_MLP_BACKWARD_ARGS_INIT;
    tn_tensor dx = {0};
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(),
                               rank->local_tokens, rank->model->hidden, "gradient", &dx));
    args.dy = pass->gradient;
    args.activation = TN_ACTIVATION_SILU;
    args.gated = 1;
    args.w1 = simulate_layer_weight(up);
    args.w2 = simulate_layer_weight(down);
    args.norm = simulate_norm_gradient(pass, &layer->parts[SIMULATE_GAIN_2], block->sum_2, dx);
    args.gradient1 = simulate_layer_gradient(pass, up);
    args.gradient2 = simulate_layer_gradient(pass, down);
    args.common = simulate_common(rank);
    SIMULATE_TRY(simulate_norm_mlp_backward(rank, &args, &block->mlp_saved));
    SIMULATE_TRY(simulate_retreat(pass, &block->sum_2, dx));
    return simulate_mark(rank, "backward mlp", layer->index);
}
