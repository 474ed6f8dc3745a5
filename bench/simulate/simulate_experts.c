/* The second half of a layer with experts: norm, router, routed experts, shared experts.
 *
 * Routing is fixed and even: the j-th expert of local token i is (i k + j) mod experts, with k
 * experts a token and weight 1, of which no gradient is wanted. What the router computes is
 * computed, and then ignored.
 */
#include "simulate_experts.h"

#include <stdlib.h>

static tn_status make(const simulate_rank *rank, simulate_owner owner, int64_t rows, int64_t cols,
                      const char *name, tn_tensor *out) {
    return simulate_make(rank, owner, simulate_dtype(), rows, cols, name, out);
}

/* ---- where rows go --------------------------------------------------------------------------- */

static tn_status write_numbers(const simulate_rank *rank, const int64_t *numbers, int64_t count,
                               const char *name, tn_tensor *out) {
    const size_t bytes = (size_t)count * sizeof *numbers;
    SIMULATE_TRY(
        simulate_make(rank, SIMULATE_OWNER_WEIGHTS, TN_BYTE, (int64_t)bytes, 0, name, out));
    return tn_plane_write(*out, TN_PLANE_DATA, numbers, bytes, NULL, 0, rank->stream);
}

/* Row q = i k + j of token i is of expert q mod E, and the (q / E)-th there. */
static void fill_route(const simulate_model *model, simulate_route *route) {
    route->offsets[0] = 0;
    for (int64_t e = 0; e < model->experts; e++)
        route->offsets[e + 1] =
            route->offsets[e] + (route->rows - e + model->experts - 1) / model->experts;
    for (int64_t q = 0; q < route->rows; q++) {
        const int64_t place = route->offsets[q % model->experts] + q / model->experts;
        route->permutation[place] = q / model->experts_per_token;
        route->inverse[q] = place;
    }
}

/* The same of every rank: all have as many tokens. */
static int64_t rows_of(const simulate_route *route, int64_t expert) {
    return route->offsets[expert + 1] - route->offsets[expert];
}

static int64_t first_expert(const simulate_rank *rank) {
    return simulate_group_rank(rank->model, SIMULATE_GROUP_EXPERTS, rank->within) *
           rank->local_experts;
}

static tn_status put_route(simulate_rank *rank, simulate_route *route) {
    SIMULATE_TRY(write_numbers(rank, route->permutation, route->rows, "permutation",
                               &route->device_permutation));
    SIMULATE_TRY(
        write_numbers(rank, route->inverse, route->rows, "inverse", &route->device_inverse));
    SIMULATE_TRY(write_numbers(rank, route->local_offsets, rank->local_experts + 1, "offsets",
                               &route->device_offsets));
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_WEIGHTS, TN_BYTE, sizeof(uint32_t), 0, "error",
                               &route->error));
    SIMULATE_TRY(tn_plane_fill(route->error, TN_PLANE_DATA, 0, rank->stream));
    return tn_stream_synchronize(rank->device, rank->stream);
}

void simulate_route_close(simulate_route *route) {
    free(route->offsets);
    free(route->local_offsets);
    free(route->parts);
    free(route->permutation);
    free(route->inverse);
    *route = (simulate_route){0};
}

tn_status simulate_route_open(simulate_rank *rank, simulate_route *route) {
    const simulate_model *model = rank->model;
    route->rows = rank->local_tokens * model->experts_per_token;
    route->offsets = calloc((size_t)model->experts + 1, sizeof *route->offsets);
    route->local_offsets = calloc((size_t)rank->local_experts + 1, sizeof(int64_t));
    route->parts = calloc(4 * (size_t)model->ep, sizeof *route->parts);
    route->permutation = calloc((size_t)route->rows, sizeof(int64_t));
    route->inverse = calloc((size_t)route->rows, sizeof(int64_t));
    if (!route->offsets || !route->local_offsets || !route->parts || !route->permutation ||
        !route->inverse)
        return TN_OUT_OF_HOST_MEMORY;
    fill_route(model, route);
    for (int64_t i = 0; i < rank->local_experts; i++)
        route->local_offsets[i + 1] =
            route->local_offsets[i] + model->ep * rows_of(route, first_expert(rank) + i);
    route->local_rows = route->local_offsets[rank->local_experts];
    return put_route(rank, route);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* ---- rows that travel ------------------------------------------------------------------------ */

/* The i-th expert of each rank: its rows of this rank's tokens, and all its rows here. */
static tn_status exchange_expert(const simulate_rank *rank, int64_t i, size_t row_bytes,
                                 char *spread_rows, char *local, int is_back) {
    const simulate_route *route = &rank->route;
    const size_t ranks = (size_t)rank->model->ep;
    const size_t own_bytes = (size_t)rows_of(route, first_expert(rank) + i) * row_bytes;
    size_t *there_bytes = route->parts, *there_offsets = there_bytes + ranks;
    size_t *here_bytes = there_offsets + ranks, *here_offsets = here_bytes + ranks;
    for (size_t peer = 0; peer < ranks; peer++) {
        const int64_t expert = (int64_t)peer * rank->local_experts + i;
        there_bytes[peer] = (size_t)rows_of(route, expert) * row_bytes;
        there_offsets[peer] = (size_t)route->offsets[expert] * row_bytes;
        here_bytes[peer] = own_bytes;
        here_offsets[peer] = (size_t)route->local_offsets[i] * row_bytes + peer * own_bytes;
    }
    tn_comm *comm = rank->groups[SIMULATE_GROUP_EXPERTS];
    if (is_back)
        return tn_all_to_all_uneven(comm, local, here_bytes, here_offsets, spread_rows, there_bytes,
                                    there_offsets, rank->stream);
    return tn_all_to_all_uneven(comm, spread_rows, there_bytes, there_offsets, local, here_bytes,
                                here_offsets, rank->stream);
}

static tn_status exchange(const simulate_rank *rank, char *spread_rows, char *local, int is_back) {
    tn_comm *comm = rank->groups[SIMULATE_GROUP_EXPERTS];
    const size_t row_bytes = (size_t)rank->model->hidden * tn_dtype_bytes(simulate_dtype());
    tn_status status = TN_OK;
    SIMULATE_TRY(tn_comm_group_begin(comm));
    for (int64_t i = 0; status == TN_OK && i < rank->local_experts; i++)
        status = exchange_expert(rank, i, row_bytes, spread_rows, local, is_back);
    if (status == TN_OK) status = tn_comm_group_end(comm, rank->stream);
    if (status != TN_OK) tn_comm_group_cancel(comm);
    return status;
}

/* Rows by expert of this rank's tokens become rows of its own experts' (is_back: the other way);
 * `from` ends. One group of the experts' ranks; where there is one rank, they are the same rows. */
static tn_status travel(const simulate_rank *rank, tn_tensor *from, tn_tensor *to, int is_back) {
    const int64_t rows = is_back ? rank->route.rows : rank->route.local_rows;
    tn_lease from_lease, to_lease;
    tn_plane_view from_view, to_view;
    if (!rank->groups[SIMULATE_GROUP_EXPERTS]) {
        *to = *from;
        *from = (tn_tensor){0};
        return TN_OK;
    }
    SIMULATE_TRY(
        make(rank, SIMULATE_OWNER_ACTIVATIONS, rows, rank->model->hidden, "dispatched", to));
    SIMULATE_TRY(
        tn_lease_begin(*from, TN_PLANE_DATA, TN_READ, rank->stream, &from_lease, &from_view));
    SIMULATE_TRY(tn_lease_begin(*to, TN_PLANE_DATA, TN_WRITE, rank->stream, &to_lease, &to_view));
    SIMULATE_TRY(is_back ? exchange(rank, to_view.data, from_view.data, 1)
                         : exchange(rank, from_view.data, to_view.data, 0));
    SIMULATE_TRY(tn_lease_end(to_lease));
    SIMULATE_TRY(tn_lease_end(from_lease));
    return simulate_drop(rank, from);
}

/* What this rank's experts are given of x, in a new tensor. */
tn_status simulate_spread(const simulate_rank *rank, tn_tensor x, tn_tensor *out) {
    tn_gather_rows_args args = TN_GATHER_ROWS_ARGS_INIT;
    SIMULATE_TRY(make(rank, SIMULATE_OWNER_ACTIVATIONS, rank->route.rows, rank->model->hidden,
                      "spread", &args.dst));
    args.src = x;
    args.map = rank->route.device_permutation;
    args.error = rank->route.error;
    SIMULATE_TRY(tn_gather_rows(&args, rank->stream));
    return travel(rank, &args.dst, out, 0);
}

/* out[token] = the sum of its experts' rows, which end. */
tn_status simulate_combine(const simulate_rank *rank, tn_tensor *rows, tn_tensor out) {
    tn_combine_rows_args args = TN_COMBINE_ROWS_ARGS_INIT;
    SIMULATE_TRY(travel(rank, rows, &args.src, 1));
    args.map = rank->route.device_inverse;
    args.dst = out;
    args.error = rank->route.error;
    SIMULATE_TRY(tn_combine_rows(&args, rank->stream));
    return simulate_drop(rank, &args.src);
}

/* y += x, and x ends. */
tn_status simulate_add(const simulate_rank *rank, tn_tensor *x, tn_tensor y) {
    tn_axpy_args args = TN_AXPY_ARGS_INIT;
    args.x = *x;
    args.y = y;
    args.alpha = 1.0f;
    SIMULATE_TRY(tn_axpy(&args, rank->stream));
    return simulate_drop(rank, x);
}

/* ---- routed experts: forward ----------------------------------------------------------------- */

tn_experts simulate_experts_of(const simulate_rank *rank, tn_tensor *weights,
                               const simulate_weight *from) {
    tn_experts experts = TN_EXPERTS_INIT;
    for (int64_t i = 0; i < rank->local_experts; i++)
        weights[i] = from[i].value;
    experts.groups = rank->local_experts;
    experts.offsets = rank->route.local_offsets;
    experts.device_offsets = rank->route.device_offsets;
    experts.error = rank->route.error;
    experts.weights = weights;
    return experts;
}

static tn_status grouped_forward(const simulate_rank *rank, const simulate_weight *from,
                                 tn_tensor x, tn_tensor y, int is_saving, tn_grouped_saved *saved) {
    tn_tensor weights[SIMULATE_LOCAL_EXPERTS_MAX];
    tn_grouped_linear_forward_args args = TN_GROUPED_LINEAR_FORWARD_ARGS_INIT;
    args.experts = simulate_experts_of(rank, weights, from);
    args.x = x;
    args.y = y;
    args.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    if (is_saving) args.saved_scope = rank->owners[SIMULATE_OWNER_SAVED];
    return tn_grouped_linear_forward(&args, saved, rank->stream);
}

tn_status simulate_activate(const simulate_rank *rank, tn_tensor hidden, tn_tensor y) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    args.activation = TN_ACTIVATION_SILU;
    args.gated = 1;
    args.x = hidden;
    args.y = y;
    return tn_activation_forward(&args, rank->stream);
}

/* Of what is saved, `recompute` keeps what is not made of the rest. */
static int keeps_products(const simulate_rank *rank) { return !rank->model->recompute; }

static tn_status experts_forward(simulate_pass *pass, const simulate_layer *layer,
                                 simulate_block *block, tn_tensor y) {
    const simulate_rank *rank = pass->rank;
    const int64_t rows = rank->route.local_rows, hidden = rank->model->hidden;
    const int64_t ffn = rank->model->expert_ffn;
    tn_tensor activated = {0}, out = {0};
    SIMULATE_TRY(simulate_spread(rank, block->normed_2, &block->spread));
    SIMULATE_TRY(
        make(rank, SIMULATE_OWNER_SAVED, rows, 2 * ffn, "expert hidden", &block->expert_hidden));
    SIMULATE_TRY(grouped_forward(rank, layer->expert_up, block->spread, block->expert_hidden, 1,
                                 &block->up_saved));
    /* Products of bf16 save nothing: their backward reads what they were given. */
    SIMULATE_TRY(rank->model->fp8
                     ? simulate_drop(rank, &block->spread)
                     : tn_tensor_move(block->spread, rank->owners[SIMULATE_OWNER_SAVED]));
    SIMULATE_TRY(make(rank, SIMULATE_OWNER_ACTIVATIONS, rows, ffn, "activated", &activated));
    SIMULATE_TRY(simulate_activate(rank, block->expert_hidden, activated));
    SIMULATE_TRY(make(rank, SIMULATE_OWNER_ACTIVATIONS, rows, hidden, "expert out", &out));
    SIMULATE_TRY(grouped_forward(rank, layer->expert_down, activated, out, keeps_products(rank),
                                 &block->down_saved));
    SIMULATE_TRY(simulate_drop(rank, &activated));
    return simulate_combine(rank, &out, y);
}

/* ---- shared experts: forward ----------------------------------------------------------------- */

static tn_status shared_linear(const simulate_pass *pass, simulate_cut cut,
                               const simulate_weight *weight, tn_tensor x, tn_tensor y,
                               tn_linear_saved *saved) {
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = x;
    args.w = simulate_layer_weight(weight);
    args.y = y;
    args.common = simulate_common(pass->rank);
    return simulate_linear_forward(pass->rank, cut, &args, saved);
}

static tn_status shared_forward(simulate_pass *pass, const simulate_layer *layer,
                                simulate_block *block, tn_tensor sum) {
    const simulate_rank *rank = pass->rank;
    const int64_t ffn = rank->model->shared_ffn / rank->model->tp;
    tn_tensor activated = {0}, y = {0};
    SIMULATE_TRY(make(rank, SIMULATE_OWNER_SAVED, rank->tokens, 2 * ffn, "shared hidden",
                      &block->shared_hidden));
    SIMULATE_TRY(shared_linear(pass, SIMULATE_CUT_COLUMNS, &layer->parts[SIMULATE_SHARED_UP],
                               block->normed_2, block->shared_hidden, &block->shared_up_saved));
    SIMULATE_TRY(
        make(rank, SIMULATE_OWNER_ACTIVATIONS, rank->tokens, ffn, "activated", &activated));
    SIMULATE_TRY(simulate_activate(rank, block->shared_hidden, activated));
    SIMULATE_TRY(make(rank, SIMULATE_OWNER_ACTIVATIONS, rank->local_tokens, rank->model->hidden,
                      "shared out", &y));
    SIMULATE_TRY(shared_linear(pass, SIMULATE_CUT_ROWS, &layer->parts[SIMULATE_SHARED_DOWN],
                               activated, y, &block->shared_down_saved));
    SIMULATE_TRY(simulate_drop(rank, &activated));
    return simulate_add(rank, &y, sum);
}

/* ---- the half: forward ----------------------------------------------------------------------- */

static tn_status norm_forward(simulate_pass *pass, const simulate_layer *layer,
                              simulate_block *block) {
    const simulate_rank *rank = pass->rank;
    tn_norm_args args = TN_NORM_ARGS_INIT;
    SIMULATE_TRY(simulate_make_sum(pass, &block->sum_2));
    SIMULATE_TRY(make(rank, SIMULATE_OWNER_SAVED, rank->local_tokens, rank->model->hidden, "normed",
                      &block->normed_2));
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_SAVED, TN_FP32, rank->local_tokens, 0, "rstd",
                               &block->rstd_2));
    args.norm = TN_NORM_RMS;
    args.x = pass->x;
    args.residual = pass->residual;
    if (pass->residual.value) args.sum = block->sum_2;
    args.gamma = layer->parts[SIMULATE_GAIN_2].value;
    args.y = block->normed_2;
    args.rstd = block->rstd_2;
    args.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    SIMULATE_TRY(tn_norm_forward(&args, rank->stream));
    return simulate_advance(pass, block->sum_2);
}

static tn_status router_forward(const simulate_pass *pass, const simulate_layer *layer,
                                const simulate_block *block) {
    const simulate_rank *rank = pass->rank;
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    SIMULATE_TRY(make(rank, SIMULATE_OWNER_ACTIVATIONS, rank->local_tokens, rank->model->experts,
                      "router", &args.y));
    args.x = block->normed_2;
    args.w = simulate_layer_weight(&layer->parts[SIMULATE_ROUTER]);
    args.common.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    SIMULATE_TRY(tn_linear_forward(&args, NULL, rank->stream));
    return simulate_drop(rank, &args.y);
}

tn_status simulate_experts_forward(simulate_pass *pass, simulate_layer *layer,
                                   simulate_block *block) {
    const simulate_rank *rank = pass->rank;
    tn_tensor y = {0};
    SIMULATE_TRY(norm_forward(pass, layer, block));
    SIMULATE_TRY(router_forward(pass, layer, block));
    SIMULATE_TRY(simulate_mark(rank, "forward router", layer->index));
    SIMULATE_TRY(make(rank, SIMULATE_OWNER_ACTIVATIONS, rank->local_tokens, rank->model->hidden,
                      "added", &y));
    SIMULATE_TRY(experts_forward(pass, layer, block, y));
    SIMULATE_TRY(simulate_mark(rank, "forward experts", layer->index));
    if (rank->model->shared_ffn) SIMULATE_TRY(shared_forward(pass, layer, block, y));
    pass->x = y;
    return simulate_mark(rank, "forward shared", layer->index);
}
