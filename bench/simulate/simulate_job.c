/* Roles of a job, run one after the other: see simulate_job.h. */
#include "simulate_job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "progress.h"

/* ---- roles ----------------------------------------------------------------------------------- */

/* Ranks are numbered tp first, then dp, then pp. */
static int64_t number_of(const simulate_model *model, int stage, int dp_rank) {
    return ((int64_t)stage * model->dp + dp_rank) * model->tp;
}

/* Another role of the stage that the data-parallel rank is like; NULL: none. */
static simulate_role *find_like(const simulate_result *result, int stage, int dp_rank) {
    for (size_t i = 0; i < result->role_count; i++) {
        simulate_role *role = &result->roles[i];
        if (role->stage == stage &&
            simulate_ranks_are_alike(result->job, stage, role->dp_rank, dp_rank))
            return role;
    }
    return NULL;
}

static int find_roles(const simulate_job *job, simulate_result *result) {
    const simulate_model *model = &job->model;
    result->roles = calloc((size_t)(model->pp * model->dp), sizeof *result->roles);
    if (!result->roles) return 0;
    for (int stage = 0; stage < model->pp; stage++) {
        for (int dp_rank = 0; dp_rank < model->dp; dp_rank++) {
            simulate_role *role = find_like(result, stage, dp_rank);
            if (!role) {
                role = &result->roles[result->role_count++];
                role->stage = stage;
                role->dp_rank = dp_rank;
                role->rank = number_of(model, stage, dp_rank);
            }
            role->rank_count += model->tp;
        }
    }
    return 1;
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
    if (!simulate_rank_run(job, role->stage, role->dp_rank, &role->record, words)) {
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
    int is_whole = find_roles(job, result);
    if (!is_whole) snprintf(error, SIMULATE_ERROR_BYTES, "out of host memory");
    if (progress_label) progress_begin(&bar, progress_label);
    for (size_t i = 0; is_whole && i < result->role_count; i++) {
        is_whole = run_role(job, &result->roles[i], error);
        if (progress_label) progress_update(&bar, (double)(i + 1), (double)result->role_count);
    }
    if (progress_label) progress_end(&bar);
    if (is_whole && !put_together(result)) {
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
