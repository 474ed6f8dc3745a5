/* The simulated engine: one rank of a job on a simulated device, see tenure_simulated.h.
 *
 * A batch is a ghost kernel: the device is told what it reads and writes, so that races and
 * lifetimes are found as those of ops are, and how long it takes. It can not fail but by what the
 * device refuses, nobody is waited for, and so there is nothing to abort.
 *
 * Invariant: places are those of the ranks in the job that the first communicator was made for;
 * a split takes them along, and asks links.split_of what the others say.
 */
#include <stdlib.h>

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
    tn__host_free(state->group.sums);
    tn__host_free(state);
}

/* Room for a group of so many ranks, whose places are not yet there. */
static tn_status make_state(const tn__driver *driver, tn__driver_device *on, int rank_count,
                            tn__comm_state **out) {
    tn__comm_state *state = tn__host_alloc(1, sizeof *state);
    if (!state) return TN_OUT_OF_HOST_MEMORY;
    state->driver = driver;
    state->on = on;
    state->group.rank_count = rank_count;
    state->group.places = tn__host_alloc((size_t)rank_count, sizeof(int));
    state->group.sums = tn__host_alloc((size_t)rank_count, sizeof(double));
    if (!state->group.places || !state->group.sums) {
        sim_leave(state);
        return TN_OUT_OF_HOST_MEMORY;
    }
    *out = state;
    return TN_OK;
}

static tn_status sim_join(const tn_comm_config *config, int *rank, int *rank_count,
                          tn__comm_state **out) {
    tn_simulated_links links;
    tn__comm_state *state;
    TN_TRY(tn__links_resolve(config->links, &links));
    TN_TRY(make_state(tn__device_driver(config->device), tn__device_state(config->device),
                      config->rank_count, &state));
    state->group.links = links;
    state->group.rank = config->rank;
    for (int i = 0; i < config->rank_count; i++)
        state->group.places[i] = i;
    tn__link_group_measure(&state->group);
    *rank = config->rank;
    *rank_count = config->rank_count;
    *out = state;
    return TN_OK;
}

/* ---- splitting ------------------------------------------------------------------------------- */

/* One that is in the new group, in whose order it is by its key, then by its rank. */
typedef struct member {
    int key;
    int rank;
} member;

static int compare_members(const void *left, const void *right) {
    const member *a = left, *b = right;
    if (a->key != b->key) return a->key < b->key ? -1 : 1;
    return a->rank - b->rank;
}

/* Those of the color, as links.split_of says; what it says of this rank must be what it passed. */
static tn_status find_members(const tn__link_group *group, int color, int key, const char *name,
                              member *members, int *count) {
    *count = 0;
    for (int rank = 0; rank < group->rank_count; rank++) {
        int their_color = -1, their_key = 0;
        group->links.split_of(group->links.context, name, rank, &their_color, &their_key);
        TN_REQUIRE(
            rank != group->rank || (their_color == color && their_key == key),
            "tn_comm_split of %s: rank %d passed color %d and key %d, and links.split_of says "
            "%d and %d",
            name, rank, color, key, their_color, their_key);
        if (their_color == color) members[(*count)++] = (member){their_key, rank};
    }
    qsort(members, (size_t)*count, sizeof *members, compare_members);
    return TN_OK;
}

static tn_status make_split(const tn__comm_state *state, const member *members, int count,
                            tn__comm_state **out) {
    tn__comm_state *made;
    TN_TRY(make_state(state->driver, state->on, count, &made));
    made->group.links = state->group.links;
    for (int i = 0; i < count; i++) {
        made->group.places[i] = state->group.places[members[i].rank];
        if (members[i].rank == state->group.rank) made->group.rank = i;
    }
    tn__link_group_measure(&made->group);
    *out = made;
    return TN_OK;
}

static tn_status sim_split(tn__comm_state *state, int color, int key, const char *name,
                           tn_status so_far, int *rank, int *rank_count, tn__comm_state **out) {
    int count = 0;
    if (so_far != TN_OK) return so_far;
    *out = NULL;
    if (color < 0) return TN_OK;
    if (!state->group.links.split_of) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "tn_comm_split of %s: the other ranks are not there to say their colors; "
                       "tn_simulated_links.split_of does",
                       name);
    }
    member *members = tn__host_alloc((size_t)state->group.rank_count, sizeof *members);
    if (!members) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = find_members(&state->group, color, key, name, members, &count);
    if (status == TN_OK) status = make_split(state, members, count, out);
    tn__host_free(members);
    if (status != TN_OK) return status;
    *rank = (*out)->group.rank;
    *rank_count = count;
    return TN_OK;
}

/* ---- collectives ----------------------------------------------------------------------------- */

typedef struct range_list {
    tn__range *ranges;
    size_t count;
} range_list;

static void touch(range_list *list, const void *address, size_t bytes, int is_write) {
    if (bytes) list->ranges[list->count++] = (tn__range){address, bytes, is_write};
}

/* The segments of this rank, or of the others; packed: one after the other from `address`. */
static void touch_segments(range_list *list, const tn__comm_state *state, const tn__batch *batch,
                           const tn__collective_call *call, const void *address, int is_packed,
                           int is_write) {
    size_t packed = 0;
    for (size_t i = 0; i < call->segment_count; i++) {
        const tn_segment *segment = &batch->segments[call->first_segment + i];
        const size_t bytes = segment->count * call->element_bytes;
        if (segment->rank == state->group.rank) packed += bytes;
        if (!is_packed)
            touch(list, (const char *)address + segment->offset * call->element_bytes, bytes,
                  is_write);
    }
    if (is_packed) touch(list, address, packed, is_write);
}

/* A segment for each rank, from `first` on. */
static void touch_parts(range_list *list, const tn__comm_state *state, const tn__batch *batch,
                        size_t first, const void *address, int is_write) {
    for (int rank = 0; rank < state->group.rank_count; rank++) {
        const tn_segment *part = &batch->segments[first + (size_t)rank];
        touch(list, (const char *)address + part->offset, part->count, is_write);
    }
}

/* What the call reads and writes on this rank: at most two ranges and one for each segment. */
static void touch_call(range_list *list, const tn__comm_state *state, const tn__batch *batch,
                       const tn__collective_call *call) {
    const size_t ranks = (size_t)state->group.rank_count;
    const size_t bytes = call->count * call->element_bytes;
    const int is_in_place = call->src == call->dst;
    switch (call->kind) {
    case TN_ALL_GATHER:
        touch(list, call->src, bytes, 0);
        touch(list, call->dst, bytes * ranks, 1);
        break;
    case TN_REDUCE_SCATTER:
        touch(list, call->src, bytes * ranks, 0);
        touch(list, call->dst, bytes, 1);
        break;
    case TN_ALL_GATHER_UNEVEN:
        if (!is_in_place) touch_segments(list, state, batch, call, call->src, 1, 0);
        touch_segments(list, state, batch, call, call->dst, 0, 1);
        break;
    case TN_REDUCE_SCATTER_UNEVEN:
        touch_segments(list, state, batch, call, call->src, 0, is_in_place);
        if (!is_in_place) touch_segments(list, state, batch, call, call->dst, 1, 1);
        break;
    case TN_ALL_TO_ALL:
        touch(list, call->src, bytes * ranks, 0);
        touch(list, call->dst, bytes * ranks, 1);
        break;
    case TN_ALL_TO_ALL_UNEVEN:
        touch_parts(list, state, batch, call->first_segment, call->src, 0);
        touch_parts(list, state, batch, call->first_segment + ranks, call->dst, 1);
        break;
    case TN_SEND: touch(list, call->src, bytes, 0); break;
    case TN_RECEIVE: touch(list, call->dst, bytes, 1); break;
    default: touch(list, call->src, bytes, 0); touch(list, call->dst, bytes, 1);
    }
}

static tn_status sim_start(tn__comm_state *state, const tn__batch *batch, tn_stream stream) {
    const size_t room = 2 * batch->call_count + batch->segment_count;
    const char *name = batch->call_count == 1 ? tn_collective_name(batch->calls[0].kind) : "group";
    range_list list = {tn__host_alloc(room, sizeof(tn__range)), 0};
    if (!list.ranges) return TN_OUT_OF_HOST_MEMORY;
    for (size_t i = 0; i < batch->call_count; i++)
        touch_call(&list, state, batch, &batch->calls[i]);
    tn_status status = state->driver->ghost_launch(state->on, name, list.ranges, list.count,
                                                   tn__link_batch_us(&state->group, batch), stream);
    tn__host_free(list.ranges);
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
    .is_capturable = 1,
    .join = sim_join,
    .split = sim_split,
    .start = sim_start,
    .check = sim_check,
    .abort = sim_abort,
    .leave = sim_leave,
};

tn_status tn__simulated_engine_get(const tn__comm_engine **out) {
    *out = &engine;
    return TN_OK;
}
