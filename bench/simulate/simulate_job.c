/* Roles of a job, run one after the other: see simulate_job.h. */
#include "simulate_job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "progress.h"
#include "simulate_weights.h"

/* ---- roles ----------------------------------------------------------------------------------- */

/* The role of the stage with that share; NULL: none yet. */
static simulate_role *find_like(const simulate_result *result, int stage, uint64_t share) {
    for (size_t i = 0; i < result->role_count; i++) {
        simulate_role *role = &result->roles[i];
        if (role->stage == stage && role->share == share) return role;
    }
    return NULL;
}

static simulate_role *add_role(simulate_result *result, int stage, int within, uint64_t share) {
    simulate_role *roles = realloc(result->roles, (result->role_count + 1) * sizeof *result->roles);
    if (!roles) return NULL;
    result->roles = roles;
    simulate_role *role = &roles[result->role_count++];
    *role = (simulate_role){.stage = stage, .within = within, .share = share};
    role->rank = stage * simulate_ranks_of_stage(&result->job->model) + within;
    return role;
}

static int find_roles(const simulate_job *job, simulate_result *result) {
    const int64_t ranks = simulate_ranks_of_stage(&job->model);
    uint64_t *shares = calloc((size_t)ranks, sizeof *shares);
    int is_whole = shares != NULL;
    for (int stage = 0; is_whole && stage < job->model.pp; stage++) {
        is_whole = simulate_weights_shares(job, stage, shares) == TN_OK;
        for (int within = 0; is_whole && within < ranks; within++) {
            simulate_role *role = find_like(result, stage, shares[within]);
            if (!role) role = add_role(result, stage, within, shares[within]);
            if (role) role->rank_count++;
            is_whole = role != NULL;
        }
    }
    free(shares);
    return is_whole;
}

/* On the host driver a process is one rank: that which MPI says. */
static int find_own_role(const simulate_job *job, simulate_result *result, char *error) {
    const int64_t ranks = simulate_model_ranks(&job->model);
    const int64_t in_stage = simulate_ranks_of_stage(&job->model);
    int own = 0;
    if (!simulate_rank_find(job, &own, error)) return 0;
    if (own < 0 || own >= ranks) {
        snprintf(error, SIMULATE_ERROR_BYTES, "rank %d of MPI, and the job has %lld", own,
                 (long long)ranks);
        return 0;
    }
    simulate_role *role = add_role(result, (int)(own / in_stage), (int)(own % in_stage), 0);
    if (role) role->rank_count = 1;
    if (!role) snprintf(error, SIMULATE_ERROR_BYTES, "out of host memory");
    return role != NULL;
}

/* ---- the stages together --------------------------------------------------------------------- */

/* The slowest of each stage goes on for all of it: the others wait for it. */
static int put_together(simulate_result *result) {
    const simulate_model *model = &result->job->model;
    simulate_record **slowest = calloc((size_t)model->pp, sizeof *slowest);
    if (!slowest) return 0;
    for (size_t i = 0; i < result->role_count; i++) {
        simulate_record *record = &result->roles[i].record;
        simulate_record **of_stage = &slowest[result->roles[i].stage];
        if (!*of_stage || record->step_us > (*of_stage)->step_us) *of_stage = record;
    }
    const double pieces_us = simulate_pipeline_start(model, slowest);
    for (int stage = 0; pieces_us >= 0.0 && stage < model->pp; stage++) {
        const double update_us = slowest[stage]->step_us - slowest[stage]->piece_us;
        const double idle_us = pieces_us - slowest[stage]->piece_us;
        if (pieces_us + update_us > result->step_us) result->step_us = pieces_us + update_us;
        if (idle_us > result->bubble_us) result->bubble_us = idle_us;
    }
    free(slowest);
    return pieces_us >= 0.0;
}

/* ---- running --------------------------------------------------------------------------------- */

static int run_role(const simulate_job *job, simulate_role *role, char *error) {
    char words[SIMULATE_ERROR_BYTES];
    simulate_record_begin(&role->record);
    if (!simulate_rank_run(job, role->stage, role->within, &role->record, words)) {
        snprintf(error, SIMULATE_ERROR_BYTES, "rank %lld: %.460s", (long long)role->rank, words);
        return 0;
    }
    if (role->record.is_complete) return 1;
    snprintf(error, SIMULATE_ERROR_BYTES, "out of host memory");
    return 0;
}

int simulate_job_run(const simulate_job *job, const char *progress_label, simulate_result *result,
                     char *error) {
    progress bar;
    *result = (simulate_result){.job = job};
    int is_whole = job->sim ? find_roles(job, result) : find_own_role(job, result, error);
    if (!is_whole && job->sim) snprintf(error, SIMULATE_ERROR_BYTES, "out of host memory");
    if (progress_label) progress_begin(&bar, progress_label);
    for (size_t i = 0; is_whole && i < result->role_count; i++) {
        is_whole = run_role(job, &result->roles[i], error);
        if (progress_label) progress_update(&bar, (double)(i + 1), (double)result->role_count);
    }
    if (progress_label) progress_end(&bar);
    if (is_whole && job->sim && !put_together(result)) {
        snprintf(error, SIMULATE_ERROR_BYTES, "out of host memory");
        is_whole = 0;
    }
    if (!is_whole) simulate_result_free(result);
    return is_whole;
}

void simulate_result_free(simulate_result *result) {
    for (size_t i = 0; i < result->role_count; i++)
        simulate_record_end(&result->roles[i].record);
    free(result->roles);
    *result = (simulate_result){0};
}
