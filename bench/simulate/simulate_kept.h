/* What today's stacks keep alive beyond its last use: the four lifetimes of docs/simulate.md, for a
 * simulation with one of them unsolved. Each tensor that they keep is a tensor here, of its size,
 * alive from where they make it to where they free it.
 *
 *     L1  the columnwise copy of a frozen weight, from its first dgrad on
 *     L2  the quantized weights of every layer, from its forward to its backward; and their
 *         columnwise copies, from its backward to its next forward
 *     L3  gathered activations of `stranded` tensors of all tokens x hidden bytes a layer, from its
 *         backward to the end of its chunk's
 *     L4  the columnwise planes of a gathered unit, gathered too, as long as the unit is
 */
#ifndef TENURE_SIMULATE_KEPT_H
#define TENURE_SIMULATE_KEPT_H

#include "simulate_rank.h"

TN_MUST_USE tn_status simulate_kept_forward(simulate_rank *rank, simulate_layer *layer);
TN_MUST_USE tn_status simulate_kept_backward(simulate_rank *rank, simulate_layer *layer);

/* A chunk's backward has ended. */
TN_MUST_USE tn_status simulate_kept_chunk_end(simulate_rank *rank);

/* With a sharded unit's gather; *columns is {0} where they are not gathered. */
TN_MUST_USE tn_status simulate_kept_gather(simulate_rank *rank, const simulate_unit *unit,
                                           tn_tensor *columns);

#endif
