/* A training step of a rank: the pieces of its stage in their turns, then the optimizer.
 *
 *     simulate_step step = {0};
 *     simulate_step_open(&step, rank);
 *     simulate_step_run(&step);            (any number of times)
 *     simulate_step_close(&step);          (also after a failure)
 */
#ifndef TENURE_SIMULATE_STEP_H
#define TENURE_SIMULATE_STEP_H

#include "simulate_ends.h"

typedef struct simulate_step {
    simulate_rank *rank;
    simulate_block *blocks;   /* [microbatches][layers of the stage] */
    simulate_end_state *ends; /* [microbatches] */
} simulate_step;

TN_MUST_USE tn_status simulate_step_open(simulate_step *step, simulate_rank *rank);
TN_MUST_USE tn_status simulate_step_run(simulate_step *step);
void simulate_step_close(simulate_step *step);

#endif
