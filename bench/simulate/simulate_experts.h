/* What the files of a layer's experts share: where rows go, and the ops on them. */
#ifndef TENURE_SIMULATE_EXPERTS_H
#define TENURE_SIMULATE_EXPERTS_H

#include "simulate_block.h"
#include "simulate_parallel.h"

tn_experts simulate_experts_of(const simulate_rank *rank, tn_tensor *weights,
                               const simulate_weight *from);

/* What this rank's experts are given of x, in a new tensor: rows by expert, then by the rank that
 * the token is of. */
TN_MUST_USE tn_status simulate_spread(const simulate_rank *rank, tn_tensor x, tn_tensor *out);

/* out[token] = the sum of its experts' rows, which end. */
TN_MUST_USE tn_status simulate_combine(const simulate_rank *rank, tn_tensor *rows, tn_tensor out);

/* y += x, and x ends. */
TN_MUST_USE tn_status simulate_add(const simulate_rank *rank, tn_tensor *x, tn_tensor y);

TN_MUST_USE tn_status simulate_activate(const simulate_rank *rank, tn_tensor hidden, tn_tensor y);

#endif
