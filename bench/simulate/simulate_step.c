/* The pieces of a step: see simulate_step.h. */
#include "simulate_step.h"

#include <stdlib.h>

#include "simulate_kept.h"
#include "simulate_weights.h"

tn_status simulate_step_open(simulate_step *step, simulate_rank *rank) {
    const size_t microbatches = (size_t)rank->model->microbatches;
    step->rank = rank;
    step->blocks = calloc(microbatches * (size_t)rank->layer_count, sizeof *step->blocks);
    step->ends = calloc(microbatches, sizeof *step->ends);
    return step->blocks && step->ends ? TN_OK : TN_OUT_OF_HOST_MEMORY;
}

void simulate_step_close(simulate_step *step) {
    free(step->blocks);
    free(step->ends);
    *step = (simulate_step){0};
}

/* ---- pieces ---------------------------------------------------------------------------------- */

/* The layers of a chunk: where they begin among those of the stage, and how many. */
static void layers_of(const simulate_rank *rank, int chunk, int64_t *at, int64_t *count) {
    int64_t first;
    *at = 0;
    for (int before = rank->stage; before < chunk; before += (int)rank->model->pp) {
        simulate_chunk_layers(rank->model, before, &first, count);
        *at += *count;
    }
    simulate_chunk_layers(rank->model, chunk, &first, count);
}

static simulate_block *block_of(const simulate_step *step, int microbatch, int64_t at) {
    return &step->blocks[(int64_t)microbatch * step->rank->layer_count + at];
}

/* The rank of a neighbouring stage that has the same place in it; chunks go round the stages. */
static int neighbour(const simulate_rank *rank, int step) {
    const int64_t in_stage = simulate_ranks_of_stage(rank->model), pp = rank->model->pp;
    return (int)((rank->stage + step + pp) % pp * in_stage + rank->within);
}

static tn_status pass_message(const simulate_rank *rank, tn_tensor message, tn_access access,
                              int peer) {
    tn_lease lease;
    tn_plane_view view;
    SIMULATE_TRY(tn_lease_begin(message, TN_PLANE_DATA, access, rank->stream, &lease, &view));
    const size_t bytes = view.layout.data_bytes;
    SIMULATE_TRY(access == TN_READ ? tn_send(rank->world, view.data, bytes, peer, rank->stream)
                                   : tn_receive(rank->world, view.data, bytes, peer, rank->stream));
    return tn_lease_end(lease);
}

/* What another stage has made: activations, or their gradient. */
static tn_status take_message(const simulate_rank *rank, const char *name, int step,
                              tn_tensor *out) {
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(),
                               rank->local_tokens, rank->model->hidden, name, out));
    return pass_message(rank, *out, TN_WRITE, neighbour(rank, step));
}

static tn_status give_message(const simulate_rank *rank, int step, tn_tensor *message) {
    SIMULATE_TRY(pass_message(rank, *message, TN_READ, neighbour(rank, step)));
    return simulate_drop(rank, message);
}

/* What goes to the next stage is the sum; the residual stays, as what a norm has read. */
static tn_status give_sum(simulate_pass *pass) {
    tn_axpy_args args = TN_AXPY_ARGS_INIT;
    args.x = pass->residual;
    args.y = pass->x;
    args.alpha = 1.0f;
    SIMULATE_TRY(tn_axpy(&args, pass->rank->stream));
    return give_message(pass->rank, 1, &pass->x);
}

static int is_last_chunk(const simulate_rank *rank, int chunk) {
    return chunk == simulate_chunk_count(rank->model) - 1;
}

static tn_status run_forward(const simulate_step *step, const simulate_turn *turn) {
    simulate_rank *rank = step->rank;
    simulate_pass pass = {.rank = rank};
    int64_t at, count;
    layers_of(rank, turn->chunk, &at, &count);
    if (turn->chunk == 0) SIMULATE_TRY(simulate_embed_forward(&pass));
    if (turn->chunk > 0) SIMULATE_TRY(take_message(rank, "received", -1, &pass.x));
    for (int64_t i = at; i < at + count; i++) {
        simulate_layer *next = i + 1 < at + count ? &rank->layers[i + 1] : NULL;
        SIMULATE_TRY(simulate_block_forward(&pass, &rank->layers[i], next,
                                            block_of(step, turn->microbatch, i)));
    }
    if (!is_last_chunk(rank, turn->chunk)) return give_sum(&pass);
    return simulate_head_forward(&pass, &step->ends[turn->microbatch]);
}

static tn_status run_backward(const simulate_step *step, const simulate_turn *turn) {
    simulate_rank *rank = step->rank;
    simulate_pass pass = {.rank = rank, .microbatch = turn->microbatch};
    int64_t at, count;
    layers_of(rank, turn->chunk, &at, &count);
    if (is_last_chunk(rank, turn->chunk))
        SIMULATE_TRY(simulate_head_backward(&pass, &step->ends[turn->microbatch]));
    else
        SIMULATE_TRY(take_message(rank, "gradient", 1, &pass.gradient));
    for (int64_t i = at + count; i-- > at;) {
        simulate_layer *next = i > at ? &rank->layers[i - 1] : NULL;
        SIMULATE_TRY(simulate_block_backward(&pass, &rank->layers[i], next,
                                             block_of(step, turn->microbatch, i)));
    }
    SIMULATE_TRY(simulate_kept_chunk_end(rank));
    if (turn->chunk == 0) return simulate_embed_backward(&pass);
    return give_message(rank, -1, &pass.gradient);
}

tn_status simulate_step_run(simulate_step *step) {
    simulate_rank *rank = step->rank;
    for (int i = 0; i < simulate_turn_count(rank->model); i++) {
        const simulate_turn turn = simulate_turn_of(rank->model, rank->stage, i);
        SIMULATE_TRY(turn.is_backward ? run_backward(step, &turn) : run_forward(step, &turn));
        simulate_record_piece(rank->record, turn.chunk, turn.microbatch, turn.is_backward);
    }
    return simulate_weights_update(rank);
}
