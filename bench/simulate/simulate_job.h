/* All ranks of a job: which are alike, each kind run once, and the stages put together.
 *
 *     simulate_result result;
 *     if (!simulate_job_run(&job, "simulate", &result, error)) ...
 *     ... result.roles[i] ...
 *     simulate_result_free(&result);
 *
 * A *role* is a stage of the pipeline and a share of the weights: ranks of one role do the same
 * work on as many bytes, and one of them is run for all.
 */
#ifndef TENURE_SIMULATE_JOB_H
#define TENURE_SIMULATE_JOB_H

#include "simulate_rank.h"

typedef struct simulate_role {
    int stage;
    int within;         /* of the stage's ranks: the one that is run */
    uint64_t share;     /* what it has of all units: simulate_weights_shares */
    int64_t rank;       /* its number in the job */
    int64_t rank_count; /* that are like it, itself included */
    simulate_record record;
} simulate_role;

typedef struct simulate_result {
    const simulate_job *job;
    simulate_role *roles;
    size_t role_count;
    double step_us;   /* from the first piece of any stage to the last update */
    double bubble_us; /* of the stage that waits longest for others */
} simulate_result;

/* progress_label: of the line on a terminal; NULL: none. 1 if all ran; 0 with the words, and then
 * there is nothing to free. */
int simulate_job_run(const simulate_job *job, const char *progress_label, simulate_result *result,
                     char *error);
void simulate_result_free(simulate_result *result);

#endif
