/* The groups of a job's ranks: who shares what with whom.
 *
 * Ranks are numbered tensor-parallel first, then data-parallel, then by stage. Within a stage, rank
 * i of its tp x dp shares
 *
 *     each layer            with i / tp                      tp ranks
 *     its data's weights    with i mod tp, by i / tp         dp ranks
 *     the experts           with i / ep                      ep ranks
 *     each expert           with i mod ep, by i / ep         tp x dp / ep ranks
 */
#ifndef TENURE_SIMULATE_GROUPS_H
#define TENURE_SIMULATE_GROUPS_H

#include "simulate_model.h"

typedef enum simulate_group {
    SIMULATE_GROUP_TENSOR = 0,
    SIMULATE_GROUP_DATA,
    SIMULATE_GROUP_EXPERTS,
    SIMULATE_GROUP_EXPERT_DATA,
    SIMULATE_GROUP_COUNT
} simulate_group;

const char *simulate_group_name(simulate_group group);

/* What a rank of the job passes to tn_comm_split for it. */
void simulate_group_color(const simulate_model *model, simulate_group group, int64_t rank,
                          int *color, int *key);

/* How many share it, and which of them `within` is, of the ranks of a stage. */
int simulate_group_size(const simulate_model *model, simulate_group group);
int simulate_group_rank(const simulate_model *model, simulate_group group, int within);

/* A tn_simulated_split whose context is the model. */
void simulate_group_split(void *context, const char *name, int rank, int *color, int *key);

static inline int64_t simulate_ranks_of_stage(const simulate_model *model) {
    return model->tp * model->dp;
}

#endif
