/* One rank: opened, run through two steps, closed. See simulate_rank.h. */
#include "simulate_rank.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulate_step.h"
#include "simulate_weights.h"
#include "tenure_gemm.h"

static const size_t roomy_bytes = (size_t)4 << 40; /* of a device that holds whatever comes */

/* ---- what the parts share -------------------------------------------------------------------- */

tn_status simulate_make(const simulate_rank *rank, simulate_owner owner, tn_dtype dtype,
                        int64_t rows, int64_t cols, const char *name, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    config.rank = cols ? 2 : 1;
    config.shape[0] = rows;
    config.shape[1] = cols;
    config.name = name;
    return tn_tensor_create(rank->owners[owner], &config, out);
}

tn_status simulate_drop(const simulate_rank *rank, tn_tensor *tensor) {
    SIMULATE_TRY(tn_tensor_destroy(*tensor, rank->stream));
    *tensor = (tn_tensor){0};
    return TN_OK;
}

tn_status simulate_mark(const simulate_rank *rank, const char *name, int64_t index) {
    size_t bytes[SIMULATE_OWNER_COUNT];
    char words[SIMULATE_NOTE_BYTES];
    for (int i = 0; i < SIMULATE_OWNER_COUNT; i++) {
        tn_ledger ledger = TN_LEDGER_INIT;
        SIMULATE_TRY(tn_scope_ledger(rank->owners[i], &ledger));
        bytes[i] = ledger.total_bytes;
    }
    /* The weights' scope is below that of the slot which their columns are derived into. */
    bytes[SIMULATE_OWNER_COLUMNS] -= bytes[SIMULATE_OWNER_WEIGHTS];
    if (index < 0) snprintf(words, sizeof words, "%s", name);
    if (index >= 0) snprintf(words, sizeof words, "%s %lld", name, (long long)index);
    simulate_record_note(rank->record, words, bytes);
    return TN_OK;
}

/* ---- opening --------------------------------------------------------------------------------- */

static tn_status open_device(simulate_rank *rank) {
    const simulate_job *job = rank->job;
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_pool_config pool = TN_POOL_CONFIG_INIT;
    config.driver = job->sim ? TN_DRIVER_CUDA : TN_DRIVER_HOST;
    if (job->sim) config.cuda_library = job->sim->path;
    SIMULATE_TRY(tn_device_create(&config, &rank->device));
    pool.name = "rank";
    SIMULATE_TRY(tn_pool_create(rank->device, &pool, &rank->pool));
    SIMULATE_TRY(tn_stream_create(rank->device, &rank->stream));
    return tn_stream_create(rank->device, &rank->side);
}

static tn_status open_scope(tn_scope parent, tn_pool *pool, const char *name, tn_scope *out) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.pool = pool;
    config.parent = parent;
    config.kind = TN_SCOPE_MODEL;
    config.name = name;
    return tn_scope_create(&config, out);
}

static tn_status open_scopes(simulate_rank *rank) {
    const tn_scope none = {0};
    SIMULATE_TRY(open_scope(none, rank->pool, "rank", &rank->root));
    SIMULATE_TRY(open_scope(rank->root, NULL, simulate_owner_name(SIMULATE_OWNER_COLUMNS),
                            &rank->owners[SIMULATE_OWNER_COLUMNS]));
    for (int i = 0; i < SIMULATE_OWNER_COUNT; i++) {
        const tn_scope parent =
            i == SIMULATE_OWNER_WEIGHTS ? rank->owners[SIMULATE_OWNER_COLUMNS] : rank->root;
        if (i == SIMULATE_OWNER_COLUMNS) continue;
        SIMULATE_TRY(
            open_scope(parent, NULL, simulate_owner_name((simulate_owner)i), &rank->owners[i]));
    }
    return TN_OK;
}

tn_status simulate_layers_open(simulate_rank *rank) {
    const simulate_model *model = rank->model;
    int64_t first, count, at = 0;
    for (int64_t chunk = rank->stage; chunk < simulate_chunk_count(model); chunk += model->pp) {
        simulate_chunk_layers(model, (int)chunk, &first, &count);
        rank->layer_count += count;
    }
    rank->layers = calloc((size_t)rank->layer_count, sizeof *rank->layers);
    if (!rank->layers) return TN_OUT_OF_HOST_MEMORY;
    for (int64_t chunk = rank->stage; chunk < simulate_chunk_count(model); chunk += model->pp) {
        simulate_chunk_layers(model, (int)chunk, &first, &count);
        for (int64_t i = first; i < first + count; i++, at++) {
            rank->layers[at].index = i;
            rank->layers[at].has_experts = simulate_model_has_experts(model, i);
            rank->layers[at].is_frozen = i < model->frozen_layers;
        }
    }
    return TN_OK;
}

int simulate_rank_find(const simulate_job *job, int *out, char *error) {
    tn_device_config device = TN_DEVICE_CONFIG_INIT;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *comm = NULL;
    int ranks = 1;
    *out = 0;
    if (simulate_model_ranks(&job->model) == 1) return 1;
    device.driver = TN_DRIVER_HOST;
    tn_status status = tn_device_create(&device, &config.device);
    if (status == TN_OK) status = tn_comm_create(&config, &comm);
    if (status == TN_OK) *out = tn_comm_rank(comm), ranks = tn_comm_size(comm);
    if (status != TN_OK) snprintf(error, SIMULATE_ERROR_BYTES, "%.500s", tn_error_last());
    (void)tn_comm_destroy(comm);
    if (config.device) (void)tn_device_destroy(config.device);
    if (status != TN_OK || ranks == simulate_model_ranks(&job->model)) return status == TN_OK;
    snprintf(error, SIMULATE_ERROR_BYTES, "%d ranks of MPI, and the job has %lld", ranks,
             (long long)simulate_model_ranks(&job->model));
    return 0;
}

/* All ranks of the job, then those that share something with this one. On the host driver the job
 * is that of MPI, which says who this one is. */
static tn_status open_groups(simulate_rank *rank) {
    const int64_t ranks = simulate_model_ranks(rank->model);
    const int64_t own = rank->stage * simulate_ranks_of_stage(rank->model) + rank->within;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    if (ranks == 1) return TN_OK;
    config.device = rank->device;
    config.name = "job";
    if (rank->job->sim) {
        config.engine = TN_COMM_SIMULATED;
        config.rank = (int)own, config.rank_count = (int)ranks;
        config.links = &rank->job->links;
    }
    SIMULATE_TRY(tn_comm_create(&config, &rank->world));
    for (int i = 0; i < SIMULATE_GROUP_COUNT; i++) {
        const simulate_group group = (simulate_group)i;
        int color, key;
        simulate_group_color(rank->model, group, own, &color, &key);
        if (simulate_group_size(rank->model, group) == 1) continue;
        SIMULATE_TRY(
            tn_comm_split(rank->world, color, key, simulate_group_name(group), &rank->groups[i]));
    }
    return TN_OK;
}

static tn_status open_all(simulate_rank *rank) {
    SIMULATE_TRY(open_device(rank));
    SIMULATE_TRY(open_scopes(rank));
    SIMULATE_TRY(simulate_layers_open(rank));
    SIMULATE_TRY(open_groups(rank));
    if (rank->model->experts) SIMULATE_TRY(simulate_route_open(rank, &rank->route));
    return simulate_weights_make(rank);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static double now_us(const simulate_rank *rank) {
    return rank->job->sim ? rank->job->sim->now_us() : 0.0;
}

/* What a GEMM of 16 x 16 takes besides its operands: on the host driver every one takes that. */
static tn_status find_workspace(const simulate_rank *rank) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    tn_tensor *const operands[] = {&args.a, &args.b, &args.d};
    for (int i = 0; i < 3; i++)
        SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(), 16, 16,
                                   "operand", operands[i]));
    SIMULATE_TRY(tn_gemm_choice_get(&args, &choice));
    rank->record->workspace_bytes = choice.workspace_bytes;
    for (int i = 0; i < 3; i++)
        SIMULATE_TRY(simulate_drop(rank, operands[i]));
    return TN_OK;
}

/* What all communicators have sent so far, added to or taken from what the record has. */
static tn_status count_sent(const simulate_rank *rank, int is_end) {
    simulate_record *record = rank->record;
    for (int i = -1; i < SIMULATE_GROUP_COUNT; i++) {
        tn_comm *comm = i < 0 ? rank->world : rank->groups[i];
        tn_comm_stats stats = TN_COMM_STATS_INIT;
        if (!comm) continue;
        SIMULATE_TRY(tn_comm_stats_get(comm, &stats));
        for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++) {
            const uint64_t sign = is_end ? 1 : UINT64_MAX; /* modulo 2^64: less */
            record->calls[kind] += sign * stats.calls[kind];
            record->wire_bytes[kind] += sign * stats.wire_bytes[kind];
        }
    }
    return TN_OK;
}

static tn_status begin_recording(simulate_rank *rank) {
    SIMULATE_TRY(tn_device_synchronize(rank->device));
    SIMULATE_TRY(count_sent(rank, 0));
    SIMULATE_TRY(tn_pool_stats_reset_peaks(rank->pool));
    simulate_record_restart(rank->record, now_us(rank));
    return TN_OK;
}

static tn_status end_recording(simulate_rank *rank) {
    simulate_record *record = rank->record;
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    SIMULATE_TRY(tn_device_synchronize(rank->device));
    record->step_us = now_us(rank) - record->origin_us;
    SIMULATE_TRY(count_sent(rank, 1));
    SIMULATE_TRY(tn_pool_stats_get(rank->pool, &stats));
    record->peak_live_bytes = stats.peak_live_bytes;
    record->peak_reserved_bytes = stats.peak_reserved_bytes;
    record->resting_bytes = stats.live_bytes;
    simulate_record_close(record);
    return tn_ledger_check(rank->pool);
}

static tn_status run_steps(simulate_rank *rank) {
    simulate_step step = {0};
    SIMULATE_TRY(find_workspace(rank));
    tn_status status = simulate_step_open(&step, rank);
    if (status == TN_OK) status = simulate_step_run(&step);
    if (status == TN_OK) status = begin_recording(rank);
    if (status == TN_OK) status = simulate_step_run(&step);
    if (status == TN_OK) status = end_recording(rank);
    simulate_step_close(&step);
    return status;
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* Everything goes, also after a failure; what was wrong first is what is said. */
static void close_all(simulate_rank *rank) {
    for (int i = 0; i < SIMULATE_GROUP_COUNT; i++)
        (void)tn_ring_destroy(rank->rings[i]);
    (void)tn_scope_close(rank->root);
    for (int i = 0; i < SIMULATE_GROUP_COUNT; i++)
        (void)tn_comm_destroy(rank->groups[i]);
    (void)tn_comm_destroy(rank->world);
    if (rank->side) (void)tn_stream_destroy(rank->device, rank->side);
    if (rank->stream) (void)tn_stream_destroy(rank->device, rank->stream);
    (void)tn_pool_destroy(rank->pool);
    if (rank->device) (void)tn_device_destroy(rank->device);
    simulate_weights_end(rank);
    simulate_route_close(&rank->route);
    free(rank->layers);
}

/* A race is a mistake here, which the words name well enough. */
static int configure(const simulate_job *job) {
    tnsim_config config = {.size = sizeof config, .stackless = 1};
    config.memory_bytes = job->device_bytes ? job->device_bytes : roomy_bytes;
    return job->sim->configure(&config) == 0;
}

int simulate_rank_run(const simulate_job *job, int stage, int within, simulate_record *record,
                      char *error) {
    simulate_rank rank = {.job = job, .model = &job->model, .record = record, .stage = stage};
    rank.within = within;
    rank.tokens = simulate_model_tokens(&job->model);
    rank.local_tokens = rank.tokens / job->model.tp;
    rank.local_experts = job->model.experts / job->model.ep;
    if (job->sim && !configure(job)) {
        snprintf(error, SIMULATE_ERROR_BYTES, "the simulated device does not take %zu bytes",
                 job->device_bytes);
        return 0;
    }
    if (job->sim) job->sim->watch(simulate_record_watch, record);
    tn_status status = open_all(&rank);
    if (status == TN_OK) status = run_steps(&rank);
    if (status != TN_OK)
        snprintf(error, SIMULATE_ERROR_BYTES, "%s: %.400s", tn_status_name(status),
                 tn_error_last());
    if (job->sim) {
        record->races = job->sim->race_count();
        job->sim->watch(NULL, NULL);
    }
    close_all(&rank);
    return status == TN_OK;
}
