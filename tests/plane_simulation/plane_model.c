/* The rules of planes as the headers tell them; see plane_model.h. */
#include <string.h>

#include "plane_model_parts.h"

void model_init(model *m, tn_format format, tn_plane_policy policy) {
    memset(m, 0, sizeof *m);
    m->format = (unsigned char)format;
    m->policy = (unsigned char)policy;
    m->buffer_count = 1;
    for (int t = 0; t < MODEL_TENSORS; t++) {
        m->tensors[t].is_alive = t != MODEL_SAVED;
        m->tensors[t].policy = m->tensors[t].is_alive ? m->policy : 0;
        for (int p = 0; p < MODEL_PLANES; p++)
            m->tensors[t].planes[p].writer = -1;
    }
}

static int is_derivable(const model *m) { return m->format != TN_FORMAT_FP8_BLOCK_1D; }

tn_plane_policy model_policy(const model *m, int tensor) {
    tn_plane_policy policy = (tn_plane_policy)m->tensors[tensor].policy;
    if (policy == TN_POLICY_OFFLOAD) return policy;
    if (!is_derivable(m)) return TN_POLICY_KEEP;
    if (policy == TN_POLICY_UNTIL_LAST_USE && m->format != TN_FORMAT_FP8_BLOCK_2D) {
        return TN_POLICY_KEEP;
    }
    return policy;
}

/* ---- leases -------------------------------------------------------------------------------- */

int model_leases_on(const model *m, int tensor, int plane) {
    int count = 0;
    for (int i = 0; i < m->lease_count; i++)
        count += m->leases[i].tensor == tensor && m->leases[i].plane == plane;
    return count;
}

static int leases_of(const model *m, int tensor) {
    return model_leases_on(m, tensor, ROW) + model_leases_on(m, tensor, COL);
}

static const model_lease *writer_of(const model *m, int tensor, int plane) {
    for (int i = 0; i < m->lease_count; i++) {
        const model_lease *lease = &m->leases[i];
        if (lease->tensor == tensor && lease->plane == plane && lease->access != TN_READ) {
            return lease;
        }
    }
    return NULL;
}

static int is_written(const model *m, int tensor) {
    return writer_of(m, tensor, ROW) || writer_of(m, tensor, COL);
}

static int is_viewed(const model *m, int tensor) {
    return m->view.is_alive && m->view.base == tensor;
}

/* ---- planes -------------------------------------------------------------------------------- */

void model_set_absent(model *m, int tensor, int plane) {
    model_plane *at = &m->tensors[tensor].planes[plane];
    model_leave_slot(m, tensor, plane);
    memset(at, 0, sizeof *at);
    at->writer = -1;
}

/* What the plane would be if a REPLACE of it were given up. */
static model_memory *kept_memory(model_plane *plane) {
    return plane->has_old ? &plane->old : &plane->now;
}

static void note_write(model_plane *plane, int stream) {
    plane->writer = (signed char)stream;
    plane->readers = 0;
}

void model_fetch(model_plane *at) {
    if (at->now.place != PLACE_HOST) return;
    at->now.place = PLACE_OWN;
    at->now.is_kept = 0;
    if (at->now.state == TN_PLANE_OFFLOADED) at->now.state = TN_PLANE_VALID;
    note_write(at, COPY_STREAM);
}

/* Memory for what is derived: what is there, but for host memory and that of others. */
static tn_status take_memory(model *m, int tensor, int plane) {
    model_plane *at = &m->tensors[tensor].planes[plane];
    if (at->now.place == PLACE_READ_ONLY) return TN_INVALID_STATE;
    if (at->now.place == PLACE_HOST) at->now.place = PLACE_OWN;
    if (at->now.state != TN_PLANE_ABSENT || model_policy(m, tensor) != TN_POLICY_SCRATCH) {
        return TN_OK;
    }
    return model_take_buffer(m, tensor, plane, !plane);
}

static tn_status require(model *m, int tensor, int plane, int stream) {
    model_tensor *t = &m->tensors[tensor];
    model_plane *to = &t->planes[plane], *from = &t->planes[!plane];
    if (to->now.state == TN_PLANE_OFFLOADED) model_fetch(to);
    if (to->now.state == TN_PLANE_VALID) return TN_OK;
    if (is_written(m, tensor)) return TN_IN_USE;
    if (!model_is_complete(&from->now)) return TN_INVALID_STATE;
    if (!is_derivable(m)) return TN_UNSUPPORTED;
    model_fetch(from);
    from->readers |= (unsigned char)(1 << stream);
    tn_status status = take_memory(m, tensor, plane);
    if (status != TN_OK) return status;
    to->now.state = TN_PLANE_VALID;
    to->now.is_derived = 1;
    to->now.is_kept = 0;
    note_write(to, stream);
    return TN_OK;
}

static tn_status make(model *m, int tensor, int plane, int stream) {
    model_plane *at = &m->tensors[tensor].planes[plane];
    if (at->now.state != TN_PLANE_ABSENT) return TN_OK;
    at->now.state = TN_PLANE_ALLOCATED;
    note_write(at, stream);
    return TN_OK;
}

/* Dropping it would lose the contents: no other plane has them, nor would after an abandon. */
int model_is_last_copy(const model *m, int tensor, int plane) {
    const model_tensor *t = &m->tensors[tensor];
    const model_plane *at = &t->planes[plane], *other = &t->planes[!plane];
    const model_lease *writer = writer_of(m, tensor, !plane);
    int may_return = at->now.state == TN_PLANE_STALE && writer && writer->has_staled;
    if (!model_is_complete(&at->now) && !may_return) return 0;
    return !model_is_copy(&other->now) && !(other->has_old && model_is_copy(&other->old));
}

static tn_status drop(model *m, int tensor, int plane) {
    if (model_leases_on(m, tensor, plane)) return TN_IN_USE;
    if (model_is_last_copy(m, tensor, plane)) return TN_INVALID_STATE;
    model_set_absent(m, tensor, plane);
    return TN_OK;
}

/* ---- begin and end ------------------------------------------------------------------------- */

static int is_whole_write(int access) { return access == TN_WRITE || access == TN_REPLACE; }

static void begin_write(model *m, model_lease *lease) {
    model_tensor *t = &m->tensors[lease->tensor];
    model_plane *at = &t->planes[lease->plane];
    model_memory *other = kept_memory(&t->planes[!lease->plane]);
    int leaves_slot = at->now.place == PLACE_SLOT && lease->access == TN_WRITE;
    lease->has_made = at->now.state == TN_PLANE_ABSENT || leaves_slot;
    lease->has_staled = (unsigned char)model_is_complete(other);
    if (leaves_slot) model_set_absent(m, lease->tensor, lease->plane);
    if (lease->access == TN_REPLACE && !lease->has_made) {
        at->has_old = 1;
        at->old = at->now;
        at->old.is_kept = 0;
        memset(&at->now, 0, sizeof at->now);
    }
    at->now.state = TN_PLANE_ALLOCATED;
    note_write(at, lease->stream);
    if (lease->has_staled) other->state = TN_PLANE_STALE;
}

static tn_status check_write(const model *m, model_operation op, tn_access access) {
    const model_lease *other = writer_of(m, op.tensor, !op.plane);
    if (model_leases_on(m, op.tensor, op.plane)) return TN_IN_USE;
    if (model_leases_on(m, op.tensor, !op.plane) && !(other && is_whole_write(other->access))) {
        return TN_IN_USE;
    }
    const model_memory *at = &m->tensors[op.tensor].planes[op.plane].now;
    if (access == TN_UPDATE && !model_is_complete(at)) return TN_INVALID_STATE;
    if (access == TN_UPDATE && at->place == PLACE_SLOT) return TN_INVALID_STATE;
    if (access != TN_REPLACE && at->place == PLACE_READ_ONLY) return TN_INVALID_STATE;
    return TN_OK;
}

static tn_status begin(model *m, model_operation op, tn_access access, int is_through) {
    model_lease lease = {op.tensor, op.plane, (unsigned char)access,    op.stream,
                         0,         0,        (unsigned char)is_through};
    model_plane *at = &m->tensors[op.tensor].planes[op.plane];
    tn_status status =
        access == TN_READ ? require(m, op.tensor, op.plane, op.stream) : check_write(m, op, access);
    if (status != TN_OK) return status;
    model_fetch(at);
    if (access == TN_READ)
        at->readers |= (unsigned char)(1 << op.stream);
    else
        begin_write(m, &lease);
    m->leases[m->lease_count++] = lease;
    return TN_OK;
}

static model_lease take_lease(model *m, int index) {
    model_lease lease = m->leases[index];
    memmove(&m->leases[index], &m->leases[index + 1],
            (size_t)(m->lease_count - index - 1) * sizeof lease);
    m->lease_count--;
    memset(&m->leases[m->lease_count], 0, sizeof lease);
    return lease;
}

/* Host memory that is stale is of no use under any policy. */
static tn_status end(model *m, int index) {
    model_lease lease = take_lease(m, index);
    model_tensor *t = &m->tensors[lease.tensor];
    model_plane *at = &t->planes[lease.plane], *other = &t->planes[!lease.plane];
    if (lease.access == TN_READ) return TN_OK;
    if (at->has_old && at->old.place == PLACE_SLOT) model_leave_slot(m, lease.tensor, lease.plane);
    at->has_old = 0;
    memset(&at->old, 0, sizeof at->old);
    at->now.state = TN_PLANE_VALID;
    at->now.is_derived = at->now.is_kept = 0;
    t->contents = ++m->writes;
    if (other->now.state != TN_PLANE_STALE) return TN_OK;
    if (model_policy(m, lease.tensor) != TN_POLICY_KEEP && is_derivable(m)) {
        model_set_absent(m, lease.tensor, !lease.plane);
    } else if (other->now.place == PLACE_HOST) {
        model_set_absent(m, lease.tensor, !lease.plane);
    }
    return TN_OK;
}

static tn_status abandon(model *m, int index) {
    model_lease lease = take_lease(m, index);
    model_tensor *t = &m->tensors[lease.tensor];
    model_plane *at = &t->planes[lease.plane];
    model_memory *other = kept_memory(&t->planes[!lease.plane]);
    if (lease.access == TN_READ) return TN_OK;
    if (at->has_old) {
        at->now = at->old;
        at->has_old = 0;
        memset(&at->old, 0, sizeof at->old);
    } else if (lease.has_made) {
        model_set_absent(m, lease.tensor, lease.plane);
    }
    if (lease.has_staled && other->state == TN_PLANE_STALE) {
        other->state = other->place == PLACE_HOST ? TN_PLANE_OFFLOADED : TN_PLANE_VALID;
    }
    return TN_OK;
}

/* ---- between tensors ----------------------------------------------------------------------- */

static void make_third(model *m, int tensor) {
    model_tensor *third = &m->tensors[MODEL_SAVED];
    memset(third, 0, sizeof *third);
    third->is_alive = third->is_moved = 1;
    third->is_frozen = m->tensors[tensor].is_frozen;
    third->policy = m->tensors[tensor].policy;
    for (int p = 0; p < MODEL_PLANES; p++)
        third->planes[p].writer = -1;
}

static void hand_over(model *m, int from, int plane, int to) {
    m->tensors[to].planes[plane] = m->tensors[from].planes[plane];
    m->tensors[to].planes[plane].now.is_kept = 0;
    model_set_absent(m, from, plane);
}

static tn_status save(model *m, int tensor, int plane, int stream) {
    model_tensor *t = &m->tensors[tensor];
    const model_memory *other = &t->planes[!plane].now;
    if (model_leases_on(m, tensor, plane)) return TN_IN_USE;
    if (t->planes[plane].now.state != TN_PLANE_OFFLOADED) {
        tn_status status = require(m, tensor, plane, stream);
        if (status != TN_OK) return status;
    }
    if (t->planes[plane].now.place == PLACE_SLOT) return TN_INVALID_STATE;
    int leaves_slot = other->place == PLACE_SLOT && model_is_complete(other);
    if (leaves_slot && model_leases_on(m, tensor, !plane)) return TN_IN_USE;
    if (leaves_slot) model_set_absent(m, tensor, !plane);
    make_third(m, tensor);
    m->tensors[MODEL_SAVED].is_saved = 1;
    m->tensors[MODEL_SAVED].contents = t->contents;
    hand_over(m, tensor, plane, MODEL_SAVED);
    return TN_OK;
}

static tn_status check_restore(const model *m, int tensor) {
    const model_tensor *t = &m->tensors[tensor], *saved = &m->tensors[MODEL_SAVED];
    if (!saved->is_saved) return TN_INVALID_STATE;
    if (leases_of(m, MODEL_SAVED)) return TN_IN_USE;
    if (is_viewed(m, MODEL_SAVED)) return TN_IN_USE;
    for (int p = 0; p < MODEL_PLANES; p++) {
        const model_memory *at = &t->planes[p].now;
        if (writer_of(m, tensor, p)) return TN_IN_USE;
        if (at->state != TN_PLANE_ABSENT && saved->planes[p].now.state != TN_PLANE_ABSENT) {
            return TN_INVALID_STATE;
        }
        if (model_is_complete(at) && t->contents != saved->contents) return TN_INVALID_STATE;
    }
    return TN_OK;
}

static tn_status restore(model *m, int tensor) {
    model_tensor *saved = &m->tensors[MODEL_SAVED];
    tn_status status = check_restore(m, tensor);
    if (status != TN_OK) return status;
    for (int p = 0; p < MODEL_PLANES; p++) {
        if (saved->planes[p].now.place == PLACE_SLOT) model_set_absent(m, MODEL_SAVED, p);
        if (saved->planes[p].now.state != TN_PLANE_ABSENT) hand_over(m, MODEL_SAVED, p, tensor);
        model_set_absent(m, MODEL_SAVED, p);
    }
    m->tensors[tensor].contents = saved->contents;
    saved->is_alive = saved->is_saved = saved->is_frozen = saved->is_moved = saved->contents = 0;
    saved->policy = 0;
    return TN_OK;
}

static tn_status clone(model *m, int tensor, int stream) {
    model_tensor *t = &m->tensors[tensor], *copy = &m->tensors[MODEL_SAVED];
    if (is_written(m, tensor)) return TN_IN_USE;
    make_third(m, tensor);
    for (int p = 0; p < MODEL_PLANES; p++) {
        if (!model_is_copy(&t->planes[p].now)) continue;
        model_fetch(&t->planes[p]);
        t->planes[p].readers |= (unsigned char)(1 << stream);
        copy->planes[p].now.state = TN_PLANE_VALID;
        copy->planes[p].now.is_derived = t->planes[p].now.is_derived;
        copy->contents = ++m->writes;
        note_write(&copy->planes[p], stream);
    }
    return TN_OK;
}

static tn_status destroy(model *m, int tensor) {
    model_tensor *t = &m->tensors[tensor];
    if (leases_of(m, tensor)) return TN_IN_USE;
    if (is_viewed(m, tensor)) return TN_IN_USE;
    for (int p = 0; p < MODEL_PLANES; p++)
        model_set_absent(m, tensor, p);
    t->is_alive = t->is_frozen = t->is_saved = t->is_moved = t->contents = t->policy = 0;
    return TN_OK;
}

static tn_status move(model *m, int tensor) {
    model_tensor *t = &m->tensors[tensor];
    t->is_moved = !t->is_moved;
    for (int p = 0; p < MODEL_PLANES; p++)
        t->planes[p].now.is_kept = 0;
    return TN_OK;
}

/* ---- steps --------------------------------------------------------------------------------- */

static tn_status step_tensor(model *m, model_operation op, int is_through) {
    model_tensor *t = &m->tensors[op.tensor];
    switch ((model_kind)op.kind) {
    case MODEL_MAKE: return make(m, op.tensor, op.plane, op.stream);
    case MODEL_REQUIRE: return require(m, op.tensor, op.plane, op.stream);
    case MODEL_DROP: return drop(m, op.tensor, op.plane);
    case MODEL_RELEASE: return model_release(m, op.tensor, op.plane);
    case MODEL_READ: return begin(m, op, TN_READ, is_through);
    case MODEL_WRITE: return begin(m, op, TN_WRITE, is_through);
    case MODEL_UPDATE: return begin(m, op, TN_UPDATE, is_through);
    case MODEL_REPLACE: return begin(m, op, TN_REPLACE, is_through);
    case MODEL_SAVE: return save(m, op.tensor, op.plane, op.stream);
    case MODEL_RESTORE: return restore(m, op.tensor);
    case MODEL_CLONE: return clone(m, op.tensor, op.stream);
    case MODEL_MOVE: return move(m, op.tensor);
    case MODEL_FREEZE: t->is_frozen = !t->is_frozen; return TN_OK;
    case MODEL_DESTROY: return destroy(m, op.tensor);
    default: return model_step_place(m, op);
    }
}

tn_status model_step(model *m, model_operation op) {
    int is_through = op.tensor == MODEL_VIEW;
    m->is_choosing = 0;
    if (op.kind == MODEL_END) return end(m, op.lease);
    if (op.kind == MODEL_ABANDON) return abandon(m, op.lease);
    if (op.kind == MODEL_END_BACKWARD) return model_end_backward(m);
    if (is_through && (op.kind == MODEL_DESTROY || op.kind == MODEL_MOVE)) {
        return model_step_place(m, op);
    }
    if (is_through) {
        tn_status status = model_through_view(m, &op);
        if (status != TN_OK) return status;
    }
    if (op.kind < MODEL_CREATE && !m->tensors[op.tensor].is_alive) return TN_STALE_HANDLE;
    return step_tensor(m, op, is_through);
}
