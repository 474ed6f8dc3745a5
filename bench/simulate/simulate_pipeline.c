/* Turns, chunks and when pieces start: see simulate_pipeline.h. */
#include "simulate_pipeline.h"

#include <stdlib.h>

int simulate_turn_count(const simulate_model *model) {
    return (int)(2 * model->vpp * model->microbatches);
}

/* ---- the order of a stage -------------------------------------------------------------------- */

/* The k-th forward or backward piece: rounds of pp micro-batches go through all chunks. */
static simulate_turn piece_of(const simulate_model *model, int stage, int k, int is_backward) {
    const int pp = (int)model->pp, vpp = (int)model->vpp;
    if (vpp == 1) return (simulate_turn){stage, k, is_backward};
    const int round = k / (pp * vpp), in_round = k % (pp * vpp);
    const int own = in_round / pp;
    const int chunk = is_backward ? vpp - 1 - own : own;
    return (simulate_turn){chunk * pp + stage, round * pp + in_round % pp, is_backward};
}

static int warm_up_of(const simulate_model *model, int stage) {
    const int pp = (int)model->pp, vpp = (int)model->vpp;
    const int all = (int)(model->vpp * model->microbatches);
    const int warm_up = vpp == 1 ? pp - stage - 1 : 2 * (pp - stage - 1) + (vpp - 1) * pp;
    return warm_up < all ? warm_up : all;
}

simulate_turn simulate_turn_of(const simulate_model *model, int stage, int index) {
    const int all = (int)(model->vpp * model->microbatches);
    const int warm_up = warm_up_of(model, stage);
    if (index < warm_up) return piece_of(model, stage, index, 0);
    const int after = index - warm_up, paired = all - warm_up;
    if (after >= 2 * paired) return piece_of(model, stage, index - all, 1);
    if (after % 2 == 0) return piece_of(model, stage, warm_up + after / 2, 0);
    return piece_of(model, stage, after / 2, 1);
}

void simulate_chunk_layers(const simulate_model *model, int chunk, int64_t *first, int64_t *count) {
    const int64_t chunks = simulate_chunk_count(model);
    const int64_t each = model->layers / chunks, more = model->layers % chunks;
    *count = each + (chunk < more);
    *first = chunk * each + (chunk < more ? chunk : more);
}

/* ---- all stages together --------------------------------------------------------------------- */

/* When the pieces of a chunk and micro-batch have ended; negative: not yet. */
typedef struct ends {
    double *times;
    const simulate_model *model;
} ends;

static double *end_of(const ends *all, int chunk, int microbatch, int is_backward) {
    const size_t chunks = (size_t)simulate_chunk_count(all->model);
    return &all->times[((size_t)microbatch * chunks + (size_t)chunk) * 2 + (size_t)is_backward];
}

/* When what the piece needs has ended. */
static double needed_by(const ends *all, const simulate_turn *turn) {
    const int last = simulate_chunk_count(all->model) - 1;
    if (!turn->is_backward)
        return turn->chunk == 0 ? 0.0 : *end_of(all, turn->chunk - 1, turn->microbatch, 0);
    if (turn->chunk == last) return *end_of(all, last, turn->microbatch, 0);
    return *end_of(all, turn->chunk + 1, turn->microbatch, 1);
}

/* The stage's next piece, if what it needs is there: 1 if it was started. */
static int start_next(const ends *all, simulate_record *record, int stage, int index,
                      double *free_us) {
    const simulate_turn turn = simulate_turn_of(all->model, stage, index);
    simulate_piece *piece = &record->pieces[index];
    const double needed_us = needed_by(all, &turn);
    if (needed_us < 0.0) return 0;
    piece->start_us = needed_us > *free_us ? needed_us : *free_us;
    *free_us = piece->start_us + piece->own_us;
    *end_of(all, turn.chunk, turn.microbatch, turn.is_backward) = *free_us;
    return 1;
}

/* Turns until no stage can start a piece; how many were started. */
static int run_stages(const ends *all, simulate_record *const *records, int *next,
                      double *free_us) {
    const int turns = simulate_turn_count(all->model);
    int started = 0, progress = 1;
    while (progress) {
        progress = 0;
        for (int stage = 0; stage < all->model->pp; stage++) {
            while (next[stage] < turns &&
                   start_next(all, records[stage], stage, next[stage], &free_us[stage])) {
                next[stage]++;
                progress = 1;
                started++;
            }
        }
    }
    return started;
}

static int has_its_pieces(const simulate_model *model, const simulate_record *record, int stage) {
    if (record->piece_count != (size_t)simulate_turn_count(model)) return 0;
    for (int i = 0; i < simulate_turn_count(model); i++) {
        const simulate_turn turn = simulate_turn_of(model, stage, i);
        const simulate_piece *piece = &record->pieces[i];
        if (piece->chunk != turn.chunk || piece->microbatch != turn.microbatch ||
            piece->is_backward != turn.is_backward)
            return 0;
    }
    return 1;
}

double simulate_pipeline_start(const simulate_model *model, simulate_record *const *records) {
    const size_t stages = (size_t)model->pp;
    const size_t pieces = (size_t)simulate_turn_count(model) * stages;
    ends all = {calloc(pieces, sizeof(double)), model};
    int *next = calloc(stages, sizeof *next);
    double *free_us = calloc(stages, sizeof *free_us);
    double end_us = -1.0;
    int is_whole = all.times && next && free_us;
    for (size_t i = 0; is_whole && i < pieces; i++)
        all.times[i] = -1.0;
    for (int stage = 0; is_whole && stage < model->pp; stage++)
        is_whole = has_its_pieces(model, records[stage], stage);
    if (is_whole && run_stages(&all, records, next, free_us) == (int)pieces) {
        for (size_t stage = 0; stage < stages; stage++)
            end_us = free_us[stage] > end_us ? free_us[stage] : end_us;
    }
    free(free_us);
    free(next);
    free(all.times);
    return end_us;
}
