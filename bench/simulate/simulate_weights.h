/* The weights of a rank as units: which there are, and in which order they are used.
 *
 * A layer is a unit, sharded over the data-parallel ranks; its experts are another one, sharded
 * over the ranks that have the same experts. So are the embedding, and the head with its gain.
 */
#ifndef TENURE_SIMULATE_WEIGHTS_H
#define TENURE_SIMULATE_WEIGHTS_H

#include "simulate_rank.h"

/* All weights of this rank's layers and ends, as they are before the first step. */
TN_MUST_USE tn_status simulate_weights_make(simulate_rank *rank);

/* Around a layer's forward, or its backward; the units of `next` are gathered meanwhile (NULL: none
 * follows). */
TN_MUST_USE tn_status simulate_layer_begin(simulate_rank *rank, simulate_layer *layer,
                                           simulate_layer *next, int is_backward);
TN_MUST_USE tn_status simulate_layer_end(simulate_rank *rank, simulate_layer *layer,
                                         int is_backward);

/* The optimizer's step. */
TN_MUST_USE tn_status simulate_weights_update(simulate_rank *rank);

/* For each rank of a stage a number that says what it has of all units: ranks of one number have as
 * much of each. */
TN_MUST_USE tn_status simulate_weights_shares(const simulate_job *job, int stage, uint64_t *shares);

/* Frees what is not memory of the device, once the scopes are closed and the rings destroyed. */
void simulate_weights_end(simulate_rank *rank);

#endif
