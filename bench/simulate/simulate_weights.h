/* The weights of a rank: made, gathered around their use, updated.
 *
 * Invariant: between simulate_unit_begin and _end the weights of a layer can be read; outside of it
 * a weight that is sharded has no plane of its own.
 */
#ifndef TENURE_SIMULATE_WEIGHTS_H
#define TENURE_SIMULATE_WEIGHTS_H

#include "simulate_rank.h"

/* All weights of this rank's layers and ends, as they are before the first step. */
TN_MUST_USE tn_status simulate_weights_make(simulate_rank *rank);

/* Around a layer's forward, or its backward. */
TN_MUST_USE tn_status simulate_unit_begin(simulate_rank *rank, simulate_layer *layer,
                                          int is_backward);
TN_MUST_USE tn_status simulate_unit_end(simulate_rank *rank, simulate_layer *layer,
                                        int is_backward);

/* The optimizer's step. */
TN_MUST_USE tn_status simulate_weights_update(simulate_rank *rank);

/* Frees what is not memory of the device. */
void simulate_weights_end(simulate_rank *rank);

#endif
