/* Times and bytes of a job, planned and found: see sharded_bench.h.
 *
 * Times are of the host's clock, from a barrier of all ranks to the end of all work on this one.
 */
#include <stdlib.h>
#include <time.h>

#include "sharded_bench.h"

/* The first one records the order, the second places the gathers, and by the sixth one the pool has
 * found the places of all blocks. */
enum { WARM_STEPS = 6 };

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int by_value(const void *left, const void *right) {
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double median(double *times, int count) {
    qsort(times, (size_t)count, sizeof *times, by_value);
    return times[count / 2];
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static tn_status sent_bytes(const sharded_job *job, uint64_t *out) {
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    SHARDED_TRY(tn_comm_stats_get(job->comm, &stats));
    *out = 0;
    for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++)
        *out += stats.wire_bytes[kind];
    return TN_OK;
}

static tn_status warm_up(sharded_job *job) {
    for (int i = 0; i < WARM_STEPS; i++)
        SHARDED_TRY(sharded_step(job));
    SHARDED_TRY(tn_device_synchronize(job->place->device));
    return tn_pool_stats_reset_peaks(job->place->pool);
}

static tn_status plan_job(sharded_job *job, sharded_result *result) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    uint64_t before, after;
    SHARDED_TRY(warm_up(job));
    SHARDED_TRY(sent_bytes(job, &before));
    SHARDED_TRY(sharded_step(job));
    SHARDED_TRY(sent_bytes(job, &after));
    SHARDED_TRY(tn_device_synchronize(job->place->device));
    SHARDED_TRY(tn_pool_stats_get(job->place->pool, &stats));
    result->planned_live_bytes = stats.live_bytes;
    result->planned_peak_bytes = stats.peak_live_bytes;
    result->planned_wire_bytes = after - before;
    return TN_OK;
}

tn_status sharded_plan(const sharded_shape *shape, int rank, int rank_count,
                       sharded_result *result) {
    sharded_place place;
    sharded_job job = {.model = NULL};
    tn_status status = sharded_place_open_simulated(&place, rank, rank_count);
    if (status == TN_OK) status = sharded_job_open(&job, &place, place.comm, shape, rank, 1);
    if (status == TN_OK) status = plan_job(&job, result);
    tn_status closed = sharded_job_close(&job);
    if (status == TN_OK) status = closed;
    closed = sharded_place_close(&place);
    return status == TN_OK ? closed : status;
}

/* ---- times ----------------------------------------------------------------------------------- */

static tn_status start(const sharded_job *job, double *start_us) {
    SHARDED_TRY(tn_device_synchronize(job->place->device));
    SHARDED_TRY(tn_barrier(job->comm, job->place->stream));
    SHARDED_TRY(tn_stream_synchronize(job->place->device, job->place->stream));
    *start_us = now_us();
    return TN_OK;
}

static tn_status stop(const sharded_job *job, double start_us, double *us) {
    SHARDED_TRY(tn_device_synchronize(job->place->device));
    *us = now_us() - start_us;
    return TN_OK;
}

static tn_status time_steps(sharded_job *job, int rounds, sharded_result *result) {
    double times[SHARDED_ROUNDS_MAX], start_us;
    uint64_t before, after;
    SHARDED_TRY(sent_bytes(job, &before));
    for (int i = 0; i < rounds; i++) {
        SHARDED_TRY(start(job, &start_us));
        SHARDED_TRY(sharded_step(job));
        SHARDED_TRY(stop(job, start_us, &times[i]));
    }
    SHARDED_TRY(sent_bytes(job, &after));
    result->wire_bytes = (after - before) / (uint64_t)rounds;
    result->step_us = median(times, rounds);
    return TN_OK;
}

/* All layers on the weights of the first unit, which are there: nothing travels while the clock
 * runs. The step is given up. */
static tn_status run_layers(sharded_job *job, double *us) {
    sharded_pass pass = {.job = job, .x = job->x[0], .gradient = job->dy[0]};
    double start_us, forward_us, backward_us;
    SHARDED_TRY(tn_sharded_forward_begin(job->model, job->units[0]));
    SHARDED_TRY(start(job, &start_us));
    for (int i = 0; i < job->shape->layers; i++)
        SHARDED_TRY(sharded_layer_forward(&pass, i, 0));
    SHARDED_TRY(stop(job, start_us, &forward_us));
    SHARDED_TRY(sharded_drop(job, &pass.x));
    SHARDED_TRY(tn_sharded_forward_end(job->model, job->units[0]));
    SHARDED_TRY(tn_sharded_backward_begin(job->model, job->units[0]));
    SHARDED_TRY(start(job, &start_us));
    for (int i = job->shape->layers; i-- > 0;)
        SHARDED_TRY(sharded_layer_backward(&pass, i, 0));
    SHARDED_TRY(stop(job, start_us, &backward_us));
    SHARDED_TRY(tn_sharded_backward_end(job->model, job->units[0]));
    *us = forward_us + backward_us;
    return tn_sharded_abandon(job->model);
}

static tn_status run_update(sharded_job *job, double *us) {
    double start_us;
    SHARDED_TRY(sharded_step_passes(job, NULL));
    SHARDED_TRY(start(job, &start_us));
    SHARDED_TRY(sharded_step_update(job));
    return stop(job, start_us, us);
}

static tn_status time_alone(sharded_job *job, int rounds, sharded_result *result) {
    double layers[SHARDED_ROUNDS_MAX], updates[SHARDED_ROUNDS_MAX];
    for (int i = 0; i < rounds; i++) {
        SHARDED_TRY(run_layers(job, &layers[i]));
        SHARDED_TRY(run_update(job, &updates[i]));
    }
    result->layers_us = median(layers, rounds);
    result->update_us = median(updates, rounds);
    return TN_OK;
}

static tn_status measure_job(sharded_job *job, int rounds, sharded_result *result) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    size_t driver_bytes;
    SHARDED_TRY(tn_device_synchronize(job->place->device));
    SHARDED_TRY(tn_pool_trim(job->place->pool, 0, NULL)); /* of what was there to begin with */
    SHARDED_TRY(warm_up(job));
    SHARDED_TRY(time_steps(job, rounds, result));
    SHARDED_TRY(tn_pool_stats_get(job->place->pool, &stats));
    SHARDED_TRY(sharded_place_driver_bytes(job->place, &driver_bytes));
    result->live_bytes = stats.live_bytes;
    result->peak_bytes = stats.peak_live_bytes;
    result->reserved_bytes = stats.peak_reserved_bytes;
    result->driver_bytes = driver_bytes;
    return time_alone(job, rounds, result);
}

tn_status sharded_measure(const sharded_place *place, const sharded_shape *shape, int rounds,
                          sharded_result *result) {
    sharded_job job = {.model = NULL};
    const int rank = tn_comm_rank(place->comm);
    tn_status status = sharded_job_open(&job, place, place->comm, shape, rank, 1);
    if (status == TN_OK) status = measure_job(&job, rounds, result);
    tn_status closed = sharded_job_close(&job);
    if (status == TN_OK) status = closed;
    closed = tn_pool_trim(place->pool, 0, NULL);
    return status == TN_OK ? closed : status;
}
