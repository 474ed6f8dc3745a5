/* Operations on the real tensors, compared with the model after each, under faults too; see
 * plane_world.h.
 */
#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"
#include "plane_world.h"

/* ---- faults -------------------------------------------------------------------------------- */

static void set_fault(const plane_world *w, long nth) {
    if (w->fault.is_host)
        tn__host_alloc_fault(nth, w->fault.and_after);
    else
        (void)w->driver.fault(NULL, nth, w->fault.and_after, 999);
}

static void arm(plane_world *w, plane_fault fault) {
    w->fault = fault;
    w->is_armed = 1;
    w->calls = w->driver.call_count(NULL);
    set_fault(w, fault.nth);
}

/* Before work is put under a lease, at the latest after the step. */
void plane_world_disarm(plane_world *w) {
    if (!w->is_armed) return;
    w->is_armed = 0;
    w->calls = w->driver.call_count(NULL) - w->calls;
    set_fault(w, 0);
}

/* ---- operations ---------------------------------------------------------------------------- */

static void touch(const plane_world *w, const tn_plane_view *view, const tn_plane_view *old,
                  int is_write, tn_stream stream) {
    const tn__driver *driver = tn__device_driver(w->device);
    tn__range ranges[4] = {{view->data, view->layout.data_bytes, is_write},
                           {view->scale, view->layout.scale_bytes, is_write}};
    size_t count = 2;
    if (old) {
        ranges[count++] = (tn__range){old->data, old->layout.data_bytes, 0};
        ranges[count++] = (tn__range){old->scale, old->layout.scale_bytes, 0};
    }
    EXPECT_OK(w, driver->ghost_launch(tn__device_state(w->device), is_write ? "write" : "read",
                                      ranges, count, 50.0, stream));
}

static tn_status begin_lease(plane_world *w, model_operation op, tn_access access) {
    tn_stream stream = w->streams[op.stream];
    tn_plane_view view, old;
    tn_lease lease;
    tn_status status = tn_lease_begin(w->tensors[op.tensor], world_planes[op.plane], access, stream,
                                      &lease, &view);
    if (status != TN_OK) return status;
    plane_world_disarm(w);
    int has_old = access == TN_REPLACE && tn_lease_old_view(lease, &old) == TN_OK;
    touch(w, &view, has_old ? &old : NULL, access != TN_READ, stream);
    w->leases[w->m.lease_count] = lease; /* the model counts it after */
    return TN_OK;
}

static tn_status finish_lease(plane_world *w, int index, int is_end) {
    tn_lease lease = w->leases[index];
    tn_status status = is_end ? tn_lease_end(lease) : tn_lease_abandon(lease);
    if (status != TN_OK) return status;
    memmove(&w->leases[index], &w->leases[index + 1],
            (size_t)(MODEL_LEASES - index - 1) * sizeof lease);
    return TN_OK;
}

static tn_status end_backward(plane_world *w, tn_stream stream) {
    EXPECT_OK(w, tn_scope_phase_set(w->root, TN_PHASE_BACKWARD, stream));
    return tn_scope_phase_set(w->root, TN_PHASE_NONE, stream);
}

static tn_status adopt(plane_world *w, model_operation op) {
    tn_tensor_config config = plane_world_tensor_config(w, op.tensor);
    int was_armed = w->is_armed;
    plane_fault fault = w->fault;
    plane_world_disarm(w);
    world_loan *loan = plane_world_lend(w, op.plane, op.stream);
    tn_foreign_memory memory = plane_world_memory_of(w, loan, op.plane);
    memory.read_only = op.lease;
    if (was_armed) arm(w, fault);
    tn_status status = tn_tensor_adopt(w->scopes[0], &config, &memory, &w->tensors[op.tensor]);
    if (status != TN_OK) plane_world_take_back(loan);
    return status;
}

static tn_status create(plane_world *w, int tensor) {
    tn_tensor_config config = plane_world_tensor_config(w, tensor);
    return tn_tensor_create(w->scopes[0], &config, &w->tensors[tensor]);
}

/* Its own policy is for what a slot is reserved for: none. */
static tn_status make_view(plane_world *w, tn_tensor base, int is_part) {
    static const int64_t shape[] = {10, MODEL_ROWS / 10, MODEL_COLS};
    tn_tensor *view = &w->tensors[MODEL_VIEW];
    tn_status status = is_part ? tn_tensor_view_rows(base, 0, MODEL_VIEW_PART, w->scopes[1], view)
                               : tn_tensor_view_shape(base, 3, shape, w->scopes[1], view);
    return status == TN_OK ? tn_tensor_set_policy(*view, TN_POLICY_KEEP) : status;
}

static tn_status renew(plane_world *w, int stream) {
    EXPECT_OK(w, tn_stream_destroy(w->device, w->streams[stream]));
    w->generations[stream]++;
    return tn_stream_create(w->device, &w->streams[stream]);
}

static tn_status set_buffers(const plane_world *w, int count) {
    tn_scratch_config config = TN_SCRATCH_CONFIG_INIT;
    config.buffers = count;
    return tn_scope_scratch_config_set(w->root, &config);
}

static tn_status wide_step(plane_world *w, model_operation op) {
    tn_tensor tensor = w->tensors[op.tensor];
    tn_stream stream = w->streams[op.stream];
    switch ((model_kind)op.kind) {
    case MODEL_CREATE: return create(w, op.tensor);
    case MODEL_ADOPT: return adopt(w, op);
    case MODEL_OFFLOAD: return tn_plane_offload(tensor, world_planes[op.plane], stream);
    case MODEL_PREFETCH: return tn_plane_prefetch(tensor, world_planes[op.plane], stream);
    case MODEL_VIEW_ROWS: return make_view(w, tensor, 1);
    case MODEL_VIEW_ALL: return make_view(w, tensor, 0);
    case MODEL_POLICY: return tn_tensor_set_policy(tensor, (tn_plane_policy)op.lease);
    case MODEL_BUDGET: return tn_scope_budget_set(w->root, model_budget_of(&w->m, op.lease));
    case MODEL_SLOT_BUFFERS: return set_buffers(w, op.lease);
    case MODEL_SLOT_RESERVE: return tn_scope_scratch_reserve(w->root, stream);
    case MODEL_SLOT_RELEASE: return tn_scope_scratch_release(w->root, stream);
    case MODEL_RENEW: return renew(w, op.stream);
    default: return TN_INVALID_ARGUMENT;
    }
}

static tn_status move(plane_world *w, int tensor) {
    int is_view = tensor == MODEL_VIEW;
    int is_moved = is_view ? w->m.view.is_moved : w->m.tensors[tensor].is_moved;
    return tn_tensor_move(w->tensors[tensor], w->scopes[!is_moved]);
}

static tn_status real_step(plane_world *w, model_operation op) {
    tn_tensor tensor = w->tensors[op.tensor], *saved = &w->tensors[MODEL_SAVED];
    tn_plane plane = world_planes[op.plane];
    tn_stream stream = w->streams[op.stream];
    switch ((model_kind)op.kind) {
    case MODEL_MAKE: return tn_plane_make(tensor, plane, stream);
    case MODEL_REQUIRE: return tn_plane_require(tensor, plane, stream);
    case MODEL_DROP: return tn_plane_drop(tensor, plane, stream);
    case MODEL_RELEASE: return tn_plane_release(tensor, plane, stream);
    case MODEL_READ: return begin_lease(w, op, TN_READ);
    case MODEL_WRITE: return begin_lease(w, op, TN_WRITE);
    case MODEL_UPDATE: return begin_lease(w, op, TN_UPDATE);
    case MODEL_REPLACE: return begin_lease(w, op, TN_REPLACE);
    case MODEL_END: return finish_lease(w, op.lease, 1);
    case MODEL_ABANDON: return finish_lease(w, op.lease, 0);
    case MODEL_SAVE:
        return tn_tensor_save(tensor, TN_PLANE_BIT(plane), w->scopes[1], stream, saved);
    case MODEL_RESTORE: return tn_tensor_restore_into(*saved, tensor);
    case MODEL_CLONE: return tn_tensor_clone(tensor, w->scopes[1], stream, saved);
    case MODEL_MOVE: return move(w, op.tensor);
    case MODEL_FREEZE: return tn_tensor_set_frozen(tensor, !w->m.tensors[op.tensor].is_frozen);
    case MODEL_DESTROY: return tn_tensor_destroy(tensor, stream);
    case MODEL_END_BACKWARD: return end_backward(w, stream);
    default: return wide_step(w, op);
    }
}

static void note_step(plane_world *w, model_operation op) {
    w->path[w->path_length++ % WORLD_PATH_MAX] = op;
    w->steps++;
}

/* ---- steps --------------------------------------------------------------------------------- */

/* The model learns which planes the budget has dropped, and whether it might. */
static void learn_choice(const plane_world *w, model *m, const world_sight *sight) {
    for (int t = 0; t < MODEL_TENSORS; t++) {
        for (int p = 0; p < MODEL_PLANES; p++) {
            int is_gone = sight->states[t][p] == TN_PLANE_ABSENT;
            if (!is_gone || m->tensors[t].planes[p].now.state == TN_PLANE_ABSENT) continue;
            if (!model_choose(m, t, p)) {
                plane_world_fail(w, "%c.%s is gone, and was not the budget's to drop", "ABS"[t],
                                 p ? "COL" : "ROW");
            }
        }
    }
    const char *wrong = model_chosen(m);
    if (wrong) plane_world_fail(w, "%s", wrong);
}

void plane_world_step(plane_world *w, model_operation op) {
    model next = w->m;
    char text[WORLD_TEXT] = "";
    world_sight sight;
    tn_status expected = model_step(&next, op);
    note_step(w, op);
    tn_status status = real_step(w, op);
    if (status != expected) {
        plane_world_fail(w, "the status is %s (%s), not %s", tn_status_name(status),
                         status == TN_OK ? "" : tn_error_last(), tn_status_name(expected));
    }
    plane_world_see(w, &next, &sight);
    if (next.is_choosing) learn_choice(w, &next, &sight);
    w->m = next;
    if (!plane_world_agrees(&sight, &w->m, w->remains, text)) plane_world_fail(w, "%s", text);
    w->remains = sight.ledger.total_bytes - model_bytes(&w->m);
    plane_world_check(w, &sight);
}

/* ---- steps under a fault ------------------------------------------------------------------- */

/* What a call that failed may have done all the same, none of which loses anything. */
enum {
    FETCHED = 1,       /* the plane has come back from host memory */
    OTHER_FETCHED = 2, /* the plane that it was to be derived or copied from has */
    DISPLACED = 4,     /* the slot has memory, and who was in it went, for nothing */
    DERIVED = 8,       /* what it was to read or save is there */
    UNLOADED = 16,     /* what was stale in host memory is in memory of its own, undefined */
    EFFECTS = 32
};

static int effects_of(int kind) {
    switch ((model_kind)kind) {
    case MODEL_READ:
    case MODEL_REQUIRE:
    case MODEL_SAVE: return EFFECTS - 1;
    case MODEL_CLONE: return FETCHED | OTHER_FETCHED;
    case MODEL_UPDATE:
    case MODEL_REPLACE:
    case MODEL_WRITE: return FETCHED | UNLOADED;
    default: return 0;
    }
}

static void displace(model *m, int tensor, int plane) {
    if (model_policy(m, tensor) != TN_POLICY_SCRATCH) return;
    if (m->tensors[tensor].planes[plane].now.state != TN_PLANE_ABSENT) return;
    if (model_take_buffer(m, tensor, plane, !plane) == TN_OK) model_set_absent(m, tensor, plane);
}

static void apply(model *m, model_operation op, int effects) {
    int tensor = op.tensor == MODEL_VIEW ? m->view.base : op.tensor;
    model_plane *at = &m->tensors[tensor].planes[op.plane];
    model_plane *other = &m->tensors[tensor].planes[!op.plane];
    model_operation derivation = {MODEL_REQUIRE, (unsigned char)tensor, op.plane, op.stream, 0};
    if (effects & FETCHED) model_fetch(at);
    if (effects & OTHER_FETCHED) model_fetch(other);
    if (effects & DISPLACED) displace(m, tensor, op.plane);
    if ((effects & UNLOADED) && at->now.place == PLACE_HOST && at->now.state == TN_PLANE_STALE) {
        at->now.place = PLACE_OWN;
        at->now.state = TN_PLANE_ALLOCATED;
    }
    if (effects & DERIVED) (void)model_step(m, derivation);
}

/* The state before, with some of those effects, is what is seen. */
static int explain(plane_world *w, model_operation op, const world_sight *sight, size_t remains) {
    char text[WORLD_TEXT];
    int possible = effects_of(op.kind);
    for (int effects = 0; effects < EFFECTS; effects++) {
        model m = w->m;
        if (effects & ~possible) continue;
        apply(&m, op, effects);
        if (!plane_world_agrees(sight, &m, remains, text)) continue;
        w->m = m;
        return 1;
    }
    return 0;
}

/* What a call that succeeds may leave undone if it can not be had: a plane that a REPLACE has made
 * stale is not freed, one that is released is not offloaded. */
static void keep_undone(const plane_world *w, model_operation op, const world_sight *sight,
                        model *next) {
    int tensor = op.tensor == MODEL_VIEW ? w->m.view.base : op.tensor, plane = op.plane;
    tn_plane_state undone = TN_PLANE_VALID;
    if (op.kind == MODEL_END && w->m.leases[op.lease].access == TN_REPLACE) {
        tensor = w->m.leases[op.lease].tensor;
        plane = !w->m.leases[op.lease].plane;
        undone = TN_PLANE_STALE;
    } else if (op.kind != MODEL_RELEASE || model_policy(next, tensor) != TN_POLICY_OFFLOAD) {
        return;
    }
    if (sight->states[tensor][plane] != undone) return;
    next->tensors[tensor].planes[plane] = w->m.tensors[tensor].planes[plane];
}

/* With as little as can be left behind. */
static void accept(plane_world *w, model_operation op, const model *next, int is_done) {
    const size_t remains[] = {w->remains, SIZE_MAX};
    char text[WORLD_TEXT] = "";
    int is_right = 0;
    world_sight sight;
    model after = *next;
    plane_world_see(w, is_done ? next : &w->m, &sight);
    if (is_done) keep_undone(w, op, &sight, &after);
    for (int i = 0; i < 2 && !is_right; i++) {
        is_right = is_done ? plane_world_agrees(&sight, &after, remains[i], text)
                           : explain(w, op, &sight, remains[i]);
    }
    if (!is_right) {
        (void)plane_world_agrees(&sight, is_done ? &after : &w->m, SIZE_MAX, text);
        plane_world_fail(w, "after a failure: %s", text);
    }
    if (is_done) w->m = after;
    w->remains = sight.ledger.total_bytes - model_bytes(&w->m);
    plane_world_check(w, &sight);
}

int plane_world_step_faulted(plane_world *w, model_operation op, plane_fault fault) {
    model next = w->m;
    size_t end = strlen(w->label);
    tn_status expected = model_step(&next, op);
    note_step(w, op);
    (void)snprintf(w->label + end, sizeof w->label - end, "; %s call %ld fails%s",
                   fault.is_host ? "host memory" : "driver", fault.nth,
                   fault.and_after ? ", and all after it" : "");
    arm(w, fault);
    tn_status status = real_step(w, op);
    plane_world_disarm(w);
    if (status == TN_OK && expected != TN_OK) {
        plane_world_fail(w, "success where %s was expected", tn_status_name(expected));
    }
    accept(w, op, &next, status == expected);
    w->label[end] = 0;
    return fault.is_host ? status != expected : (uint64_t)fault.nth <= w->calls;
}
