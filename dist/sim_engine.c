/* The simulated engine: one rank of a job on a simulated device, see tenure_simulated.h.
 *
 * A collective is a ghost kernel: the device is told what it reads and writes, so that races and
 * lifetimes are found as those of ops are, and how long it takes. It can not fail but by what the
 * device refuses, nobody is waited for, and so there is nothing to abort.
 */
#include "driver.h"
#include "host_alloc.h"
#include "link_cost.h"

enum { RANGES_MAX = 2 };

struct tn__comm_state {
    const tn__driver *driver;
    tn__driver_device *on;
    tn__link_group group;
};

static void sim_leave(tn__comm_state *state) {
    tn__host_free(state->group.places);
    tn__host_free(state);
}

static tn_status sim_join(const tn_comm_config *config, int *rank, int *rank_count,
                          tn__comm_state **out) {
    tn__comm_state *state = tn__host_alloc(1, sizeof *state);
    if (!state) return TN_OUT_OF_HOST_MEMORY;
    state->driver = tn__device_driver(config->device);
    state->on = tn__device_state(config->device);
    state->group.rank = config->rank;
    state->group.rank_count = config->rank_count;
    state->group.places = tn__host_alloc((size_t)config->rank_count, sizeof(int));
    tn_status status = state->group.places ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    if (status == TN_OK) status = tn__links_resolve(config->links, &state->group.links);
    if (status != TN_OK) {
        sim_leave(state);
        return status;
    }
    for (int i = 0; i < config->rank_count; i++)
        state->group.places[i] = i;
    tn__link_group_measure(&state->group);
    *rank = config->rank;
    *rank_count = config->rank_count;
    *out = state;
    return TN_OK;
}

/* What the call reads and writes on this rank. In place the part of it that is both is written. */
static size_t ranges_of(const tn__comm_state *state, const tn__collective_call *call,
                        tn__range *ranges) {
    const size_t ranks = (size_t)state->group.rank_count;
    const size_t bytes = call->count * call->element_bytes;
    size_t src_bytes = bytes, dst_bytes = bytes;
    if (bytes == 0) return 0;
    if (call->kind == TN_ALL_GATHER) dst_bytes *= ranks;
    if (call->kind == TN_REDUCE_SCATTER) src_bytes *= ranks;
    ranges[0] = (tn__range){call->src, src_bytes, 0};
    ranges[1] = (tn__range){call->dst, dst_bytes, 1};
    return 2;
}

static tn_status sim_start(tn__comm_state *state, const tn__collective_call *call,
                           tn_stream stream) {
    tn__range ranges[RANGES_MAX];
    tn__link_work work = {0};
    size_t range_count = ranges_of(state, call, ranges);
    tn__link_add(&state->group, call, &work);
    return state->driver->ghost_launch(state->on, tn_collective_name(call->kind), ranges,
                                       range_count, tn__link_us(&state->group, &work), stream);
}

static tn_status sim_check(tn__comm_state *state) {
    (void)state;
    return TN_OK;
}

static void sim_abort(tn__comm_state *state) { (void)state; }

static const tn__comm_engine engine = {
    .abi = TN__COMM_ENGINE_ABI,
    .name = "simulated",
    .has_deadlines = 1,
    .in_virtual_time = 1,
    .join = sim_join,
    .start = sim_start,
    .check = sim_check,
    .abort = sim_abort,
    .leave = sim_leave,
};

tn_status tn__simulated_engine_get(const tn__comm_engine **out) {
    *out = &engine;
    return TN_OK;
}
