/* Embedding, head and loss: see simulate_ends.h. */
#include "simulate_ends.h"

#include "driver.h"
#include "simulate_parallel.h"
#include "simulate_weights.h"

enum { RANGES_MAX = 4, BYTE_VOCABULARY = 256 };

static const double memory_bytes_per_us = 4.0e6, launch_us = 2.0; /* as the ghosts of ops have it */

static int is_of_bytes(const simulate_rank *rank) {
    return rank->model->vocabulary == BYTE_VOCABULARY;
}

/* ---- declared work --------------------------------------------------------------------------- */

typedef struct touched {
    tn_tensor tensor;
    tn_access access;
    size_t bytes; /* that move; of all of it at most */
} touched;

static tn_status declare_leased(const simulate_rank *rank, const char *what, const touched *list,
                                int count, const tn_plane_view *views) {
    const tn__driver *driver = tn__device_driver(rank->device);
    tn__range ranges[RANGES_MAX];
    double bytes = 0.0;
    for (int i = 0; i < count; i++) {
        ranges[i] =
            (tn__range){views[i].data, views[i].layout.data_bytes, list[i].access != TN_READ};
        bytes += (double)list[i].bytes;
    }
    return driver->ghost_launch(tn__device_state(rank->device), what, ranges, (size_t)count,
                                launch_us + bytes / memory_bytes_per_us, rank->stream);
}

/* A kernel that there is no op for. */
static tn_status declare(const simulate_rank *rank, const char *what, const touched *list,
                         int count) {
    tn_lease leases[RANGES_MAX];
    tn_plane_view views[RANGES_MAX];
    if (!rank->job->sim) return TN_UNSUPPORTED;
    for (int i = 0; i < count; i++)
        SIMULATE_TRY(tn_lease_begin(list[i].tensor, TN_PLANE_DATA, list[i].access, rank->stream,
                                    &leases[i], &views[i]));
    SIMULATE_TRY(declare_leased(rank, what, list, count, views));
    for (int i = 0; i < count; i++)
        SIMULATE_TRY(tn_lease_end(leases[i]));
    return TN_OK;
}

/* ---- embedding ------------------------------------------------------------------------------- */

static tn_status make_tokens(const simulate_rank *rank, const char *name, tn_tensor *out) {
    SIMULATE_TRY(
        simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, TN_BYTE, rank->local_tokens, 0, name, out));
    return tn_plane_fill(*out, TN_PLANE_DATA, 1, rank->stream);
}

static tn_status embed_bytes(const simulate_rank *rank, tn_tensor y) {
    tn_embed_args args = TN_EMBED_ARGS_INIT;
    SIMULATE_TRY(make_tokens(rank, "tokens", &args.tokens));
    args.table = rank->table.value;
    args.y = y;
    SIMULATE_TRY(tn_embed(&args, rank->stream));
    return simulate_drop(rank, &args.tokens);
}

/* Of all tokens those that are in this rank's part of the table. */
static tn_status embed_part(const simulate_rank *rank, tn_tensor y) {
    const int is_cut = rank->groups[SIMULATE_GROUP_TENSOR] != NULL;
    const int64_t rows = is_cut ? rank->tokens : rank->local_tokens;
    const size_t bytes = (size_t)(rows * rank->model->hidden) * tn_dtype_bytes(simulate_dtype());
    tn_tensor all = y;
    if (is_cut)
        SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(), rows,
                                   rank->model->hidden, "all rows", &all));
    const touched list[] = {{rank->table.value, TN_READ, bytes}, {all, TN_WRITE, bytes}};
    SIMULATE_TRY(declare(rank, "embed", list, 2));
    return is_cut ? simulate_rows_reduce(rank, &all, y) : TN_OK;
}

tn_status simulate_embed_forward(simulate_pass *pass) {
    simulate_rank *rank = pass->rank;
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(),
                               rank->local_tokens, rank->model->hidden, "embedded", &pass->x));
    SIMULATE_TRY(simulate_unit_begin(rank, &rank->table_unit, NULL, 0));
    SIMULATE_TRY(is_of_bytes(rank) ? embed_bytes(rank, pass->x) : embed_part(rank, pass->x));
    SIMULATE_TRY(simulate_unit_end(rank, &rank->table_unit, 0));
    return simulate_mark(rank, "forward embedding", -1);
}

static tn_status embed_bytes_backward(const simulate_pass *pass) {
    const simulate_rank *rank = pass->rank;
    tn_embed_backward_args args = TN_EMBED_BACKWARD_ARGS_INIT;
    SIMULATE_TRY(make_tokens(rank, "tokens", &args.tokens));
    args.dy = pass->gradient;
    args.dtable = rank->table.gradient;
    args.accumulate = simulate_accumulates(pass);
    SIMULATE_TRY(tn_embed_backward(&args, rank->stream));
    SIMULATE_TRY(simulate_sum_gradient(rank, args.dtable));
    return simulate_drop(rank, &args.tokens);
}

static tn_status embed_part_backward(const simulate_pass *pass) {
    const simulate_rank *rank = pass->rank;
    const int is_cut = rank->groups[SIMULATE_GROUP_TENSOR] != NULL;
    const size_t elements = (size_t)rank->tokens * (size_t)rank->model->hidden;
    tn_tensor all = pass->gradient;
    if (is_cut) SIMULATE_TRY(simulate_rows_gather(rank, pass->gradient, &all));
    const touched list[] = {{all, TN_READ, elements * 2},
                            {rank->table.gradient, TN_WRITE, elements * 8}};
    SIMULATE_TRY(declare(rank, "embed_gradient", list, 2));
    return is_cut ? simulate_drop(rank, &all) : TN_OK;
}

tn_status simulate_embed_backward(simulate_pass *pass) {
    simulate_rank *rank = pass->rank;
    pass->unit = &rank->table_unit;
    SIMULATE_TRY(simulate_unit_begin(rank, pass->unit, NULL, 1));
    SIMULATE_TRY(is_of_bytes(rank) ? embed_bytes_backward(pass) : embed_part_backward(pass));
    SIMULATE_TRY(simulate_drop(rank, &pass->gradient));
    SIMULATE_TRY(simulate_unit_end(rank, pass->unit, 1));
    return simulate_mark(rank, "backward embedding", -1);
}

/* ---- head and loss --------------------------------------------------------------------------- */

static int64_t logit_rows(const simulate_rank *rank) {
    return is_of_bytes(rank) ? rank->local_tokens : rank->tokens;
}

static int64_t logit_cols(const simulate_rank *rank) {
    return is_of_bytes(rank) ? BYTE_VOCABULARY : rank->model->vocabulary / rank->model->tp;
}

/* The largest logit and the sum of each row, over the ranks that have parts of it. */
static tn_status sum_up_rows(const simulate_rank *rank) {
    tn_tensor sums = {0};
    if (!rank->groups[SIMULATE_GROUP_TENSOR]) return TN_OK;
    SIMULATE_TRY(
        simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, TN_FP32, rank->tokens, 2, "sums", &sums));
    SIMULATE_TRY(tn_plane_fill(sums, TN_PLANE_DATA, 0, rank->stream));
    SIMULATE_TRY(simulate_sum_gradient(rank, sums));
    return simulate_drop(rank, &sums);
}

static tn_status loss(const simulate_rank *rank, tn_tensor logits, tn_tensor dlogits) {
    tn_cross_entropy_args args = TN_CROSS_ENTROPY_ARGS_INIT;
    if (!is_of_bytes(rank)) {
        const size_t elements = (size_t)logit_rows(rank) * (size_t)logit_cols(rank);
        const touched list[] = {{logits, TN_READ, 2 * elements * sizeof(float)},
                                {dlogits, TN_WRITE, elements * 2}};
        SIMULATE_TRY(sum_up_rows(rank));
        return declare(rank, "cross_entropy", list, 2);
    }
    args.logits = logits;
    args.dlogits = dlogits;
    SIMULATE_TRY(make_tokens(rank, "targets", &args.targets));
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, TN_FP32, rank->local_tokens, 0,
                               "loss", &args.loss));
    SIMULATE_TRY(tn_cross_entropy(&args, rank->stream));
    SIMULATE_TRY(simulate_drop(rank, &args.targets));
    return simulate_drop(rank, &args.loss);
}

tn_status simulate_head_forward(simulate_pass *pass, simulate_end_state *state) {
    simulate_rank *rank = pass->rank;
    const int64_t rows = logit_rows(rank), cols = logit_cols(rank);
    tn_norm_linear_forward_args args = TN_NORM_LINEAR_FORWARD_ARGS_INIT;
    tn_tensor logits = {0};
    SIMULATE_TRY(
        simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, TN_FP32, rows, cols, "logits", &logits));
    SIMULATE_TRY(simulate_make_sum(pass, &state->sum));
    SIMULATE_TRY(simulate_unit_begin(rank, &rank->head_unit, NULL, 0));
    args.norm = simulate_norm(pass, &rank->last_gain, state->sum);
    args.w = simulate_layer_weight(&rank->head);
    args.y = logits;
    args.common = simulate_common(rank);
    SIMULATE_TRY(is_of_bytes(rank) ? tn_norm_linear_forward(&args, &state->saved, rank->stream)
                                   : simulate_norm_linear_forward(rank, &args, &state->saved));
    SIMULATE_TRY(simulate_advance(pass, state->sum));
    pass->residual = (tn_tensor){0};
    SIMULATE_TRY(simulate_unit_end(rank, &rank->head_unit, 0));
    SIMULATE_TRY(simulate_mark(rank, "forward head", -1));
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(), rows, cols,
                               "dlogits", &state->dlogits));
    SIMULATE_TRY(loss(rank, logits, state->dlogits));
    SIMULATE_TRY(simulate_drop(rank, &logits));
    return simulate_mark(rank, "loss", -1);
}

tn_status simulate_head_backward(simulate_pass *pass, simulate_end_state *state) {
    simulate_rank *rank = pass->rank;
    tn_norm_linear_backward_args args = TN_NORM_LINEAR_BACKWARD_ARGS_INIT;
    tn_tensor dx = {0};
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(),
                               rank->local_tokens, rank->model->hidden, "gradient", &dx));
    pass->unit = &rank->head_unit;
    SIMULATE_TRY(simulate_unit_begin(rank, pass->unit, NULL, 1));
    args.dy = state->dlogits;
    args.w = simulate_layer_weight(&rank->head);
    args.norm = simulate_norm_gradient(pass, &rank->last_gain, state->sum, dx);
    args.gradient = simulate_layer_gradient(pass, &rank->head);
    args.common = simulate_common(rank);
    if (is_of_bytes(rank)) {
        SIMULATE_TRY(tn_norm_linear_backward(&args, &state->saved, NULL, rank->stream));
        SIMULATE_TRY(simulate_sum_gradient(rank, rank->head.gradient));
        SIMULATE_TRY(simulate_sum_gradient(rank, rank->last_gain.gradient));
    } else {
        SIMULATE_TRY(simulate_norm_linear_backward(rank, &args, &state->saved));
    }
    SIMULATE_TRY(simulate_drop(rank, &state->dlogits));
    SIMULATE_TRY(simulate_retreat(pass, &state->sum, dx));
    SIMULATE_TRY(simulate_unit_end(rank, pass->unit, 1));
    return simulate_mark(rank, "backward head", -1);
}
