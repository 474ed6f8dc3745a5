/* The simulated engine: one rank of a job on a simulated device, see tenure_simulated.h.
 *
 * A collective is a ghost kernel: the device is told what it reads and writes, so that races and
 * lifetimes are found as those of ops are, and how long it takes. It can not fail but by what the
 * device refuses, nobody is waited for, and so there is nothing to abort.
 */
#include "driver.h"
#include "host_alloc.h"
#include "link_cost.h"

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

/* The segments of an uneven call in the whole buffer, and this rank's beside it. */
static size_t segment_ranges(const tn__comm_state *state, const tn__batch *batch,
                             const tn__collective_call *call, tn__range *ranges) {
    const tn_segment *segments = batch->segments + call->first_segment;
    int gathers = call->kind == TN_ALL_GATHER_UNEVEN;
    const char *whole = gathers ? call->dst : call->src;
    size_t mine = 0, count = 0;
    for (size_t i = 0; i < call->segment_count; i++) {
        size_t bytes = segments[i].count * call->element_bytes;
        int is_mine = segments[i].rank == state->group.rank;
        const char *at = whole + segments[i].offset * call->element_bytes;
        if (is_mine) mine += bytes;
        int is_written = gathers || (is_mine && call->src == call->dst);
        if (bytes) ranges[count++] = (tn__range){at, bytes, is_written};
    }
    if (call->src == call->dst || !mine) return count;
    ranges[count++] = (tn__range){gathers ? call->src : call->dst, mine, !gathers};
    return count;
}

/* What the call reads and writes on this rank. In place the part of it that is both is written. */
static size_t ranges_of(const tn__comm_state *state, const tn__batch *batch,
                        const tn__collective_call *call, tn__range *ranges) {
    const size_t ranks = (size_t)state->group.rank_count;
    const size_t bytes = call->count * call->element_bytes;
    size_t src_bytes = bytes, dst_bytes = bytes;
    if (bytes == 0) return 0;
    if (call->segment_count) return segment_ranges(state, batch, call, ranges);
    if (call->kind == TN_ALL_GATHER) dst_bytes *= ranks;
    if (call->kind == TN_REDUCE_SCATTER) src_bytes *= ranks;
    ranges[0] = (tn__range){call->src, src_bytes, 0};
    ranges[1] = (tn__range){call->dst, dst_bytes, 1};
    return 2;
}

static tn_status sim_start(tn__comm_state *state, const tn__batch *batch, tn_stream stream) {
    size_t count = 0, most = 2 * batch->call_count + batch->segment_count;
    tn__range *ranges = tn__host_alloc(most, sizeof *ranges);
    if (!ranges) return TN_OUT_OF_HOST_MEMORY;
    tn__link_work work = {0};
    for (size_t i = 0; i < batch->call_count; i++) {
        count += ranges_of(state, batch, &batch->calls[i], ranges + count);
        tn__link_add(&state->group, &batch->calls[i], &work);
    }
    const char *name = batch->call_count > 1 ? "group" : tn_collective_name(batch->calls[0].kind);
    tn_status status = state->driver->ghost_launch(state->on, name, ranges, count,
                                                   tn__link_us(&state->group, &work), stream);
    tn__host_free(ranges);
    return status;
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
