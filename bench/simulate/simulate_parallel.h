/* The layers as a rank of a tensor-parallel group calls them; alone, it calls the plain ones.
 *
 * Between layers a rank has the rows of its part of the tokens. Column-parallel products make of
 * them rows of all tokens, row-parallel ones their own again.
 */
#ifndef TENURE_SIMULATE_PARALLEL_H
#define TENURE_SIMULATE_PARALLEL_H

#include "simulate_rank.h"

typedef enum simulate_cut { SIMULATE_CUT_COLUMNS = 0, SIMULATE_CUT_ROWS } simulate_cut;

TN_MUST_USE tn_status simulate_linear_forward(const simulate_rank *rank, simulate_cut cut,
                                              const tn_linear_forward_args *args,
                                              tn_linear_saved *saved);
TN_MUST_USE tn_status simulate_linear_backward(const simulate_rank *rank, simulate_cut cut,
                                               const tn_linear_backward_args *args,
                                               tn_linear_saved *saved);
TN_MUST_USE tn_status simulate_norm_linear_forward(const simulate_rank *rank,
                                                   const tn_norm_linear_forward_args *args,
                                                   tn_norm_linear_saved *saved);
TN_MUST_USE tn_status simulate_norm_linear_backward(const simulate_rank *rank,
                                                    const tn_norm_linear_backward_args *args,
                                                    tn_norm_linear_saved *saved);
TN_MUST_USE tn_status simulate_norm_mlp_forward(const simulate_rank *rank,
                                                const tn_norm_mlp_forward_args *args,
                                                tn_norm_mlp_saved *saved);
TN_MUST_USE tn_status simulate_norm_mlp_backward(const simulate_rank *rank,
                                                 const tn_norm_mlp_backward_args *args,
                                                 tn_norm_mlp_saved *saved);

/* Rows of this rank's tokens from those of all, summed over the group, which end; and the other way
 * round, in a new tensor. Of a group only. */
TN_MUST_USE tn_status simulate_rows_reduce(const simulate_rank *rank, tn_tensor *all,
                                           tn_tensor own);
TN_MUST_USE tn_status simulate_rows_gather(const simulate_rank *rank, tn_tensor own,
                                           tn_tensor *all);

/* A gradient of a weight that every rank of the group has whole, from its own rows: their sum. */
TN_MUST_USE tn_status simulate_sum_gradient(const simulate_rank *rank, tn_tensor gradient);

#endif
