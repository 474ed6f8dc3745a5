/* The pipeline: in which order a stage does its pieces, and when, once all stages are put together.
 *
 * Layers are cut into pp x vpp chunks in order, chunk c of stage c mod pp; the first chunks have
 * one layer more where it does not divide. Each stage does one forward and one backward piece in
 * turns after as many forward pieces as it takes to fill the pipeline (1F1B; with vpp chunks
 * interleaved, whole rounds of pp micro-batches at a time).
 *
 * A piece begins when the one before it on its stage has ended and the one that it needs has: of
 * the chunk before (forward), of the chunk behind (backward), or its own forward at the last chunk.
 * The message between two stages is part of the piece that sends it.
 */
#ifndef TENURE_SIMULATE_PIPELINE_H
#define TENURE_SIMULATE_PIPELINE_H

#include "simulate_model.h"
#include "simulate_record.h"

typedef struct simulate_turn {
    int chunk; /* of all chunks */
    int microbatch;
    int is_backward;
} simulate_turn;

/* 2 x vpp x microbatches of them, each stage. */
int simulate_turn_count(const simulate_model *model);

/* Turn number `index` of a stage. */
simulate_turn simulate_turn_of(const simulate_model *model, int stage, int index);

/* First layer and count of layers of a chunk. */
void simulate_chunk_layers(const simulate_model *model, int chunk, int64_t *first, int64_t *count);

static inline int simulate_chunk_count(const simulate_model *model) {
    return (int)(model->pp * model->vpp);
}

/* Puts the stages' pieces together: their start_us, counted from the first. records[stage] has the
 * pieces in the order of the turns. Returns when the last one has ended; negative without memory,
 * or if the pieces are not those of the turns. */
double simulate_pipeline_start(const simulate_model *model, simulate_record *const *records);

#endif
