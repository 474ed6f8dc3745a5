/* The rules of memory that planes have elsewhere or for a while: slots, host memory, that of
 * others, budgets; and of views, which have none. See plane_model.h.
 *
 * What a budget keeps is left to the library: that what it drops was its to drop, that it drops no
 * more than it must, and that what is kept is within the limit is what the model knows.
 */
#include <string.h>

#include "plane_model_parts.h"

/* ---- scratch slots --------------------------------------------------------------------------- */

void model_leave_slot(model *m, int tensor, int plane) {
    for (int i = 0; i < MODEL_BUFFERS; i++) {
        model_buffer *buffer = &m->buffers[i];
        if (!buffer->is_used || buffer->tensor != tensor || buffer->plane != plane) continue;
        buffer->is_used = buffer->tensor = buffer->plane = 0;
    }
}

/* Whether who is in the buffer may go. */
static tn_status check_buffer(const model *m, int index) {
    const model_buffer *buffer = &m->buffers[index];
    if (!buffer->is_used) return TN_OK;
    if (model_leases_on(m, buffer->tensor, buffer->plane)) return TN_IN_USE;
    return model_is_last_copy(m, buffer->tensor, buffer->plane) ? TN_INVALID_STATE : TN_OK;
}

static int in_turn(const model *m, int turn) { return (m->next_buffer + turn) % m->buffer_count; }

static tn_status choose_buffer(const model *m, int tensor, int source, int *out) {
    tn_status first = TN_OK;
    for (int turn = 0; turn < m->buffer_count; turn++) {
        *out = in_turn(m, turn);
        if (!m->buffers[*out].is_used) return TN_OK;
    }
    for (int turn = 0; turn < m->buffer_count; turn++) {
        *out = in_turn(m, turn);
        const model_buffer *buffer = &m->buffers[*out];
        int is_source = buffer->tensor == tensor && buffer->plane == source;
        tn_status status = is_source ? TN_IN_USE : check_buffer(m, *out);
        if (status == TN_OK) return TN_OK;
        if (turn == 0) first = status;
    }
    return first;
}

tn_status model_take_buffer(model *m, int tensor, int plane, int source) {
    int index = 0;
    tn_status status = choose_buffer(m, tensor, source, &index);
    if (status != TN_OK) return status;
    model_buffer *buffer = &m->buffers[index];
    if (buffer->is_used) model_set_absent(m, buffer->tensor, buffer->plane);
    *buffer = (model_buffer){1, 1, (unsigned char)tensor, (unsigned char)plane};
    m->next_buffer = (unsigned char)((index + 1) % m->buffer_count);
    m->tensors[tensor].planes[plane].now.place = PLACE_SLOT;
    return TN_OK;
}

static int has_slot_memory(const model *m) {
    return m->buffers[0].has_memory || m->buffers[1].has_memory;
}

static tn_status set_buffers(model *m, int count) {
    if (has_slot_memory(m)) return TN_INVALID_STATE;
    m->buffer_count = (unsigned char)count;
    m->next_buffer = 0;
    return TN_OK;
}

static tn_status reserve_slot(model *m) {
    int wants = 0;
    for (int t = 0; t < MODEL_TENSORS; t++)
        wants |= m->tensors[t].is_alive && model_policy(m, t) == TN_POLICY_SCRATCH;
    for (int i = 0; wants && i < m->buffer_count; i++)
        m->buffers[i].has_memory = 1;
    return TN_OK;
}

static tn_status release_slot(model *m) {
    for (int i = 0; i < m->buffer_count; i++) {
        tn_status status = check_buffer(m, i);
        if (status != TN_OK) return status;
    }
    for (int i = 0; i < m->buffer_count; i++) {
        if (m->buffers[i].is_used) model_set_absent(m, m->buffers[i].tensor, m->buffers[i].plane);
        m->buffers[i].has_memory = 0;
    }
    m->buffer_count = 1;
    m->next_buffer = 0;
    return TN_OK;
}

/* ---- policies -------------------------------------------------------------------------------- */

static int can_return(const model *m, int tensor, int plane) {
    return m->format != TN_FORMAT_FP8_BLOCK_1D && !model_leases_on(m, tensor, plane) &&
           model_is_copy(&m->tensors[tensor].planes[!plane].now);
}

/* The derived plane, of two written ones COL, that the other one can replace. */
static int is_spare(const model *m, int tensor, int plane) {
    const model_memory *at = &m->tensors[tensor].planes[plane].now;
    const model_memory *other = &m->tensors[tensor].planes[!plane].now;
    if (at->state == TN_PLANE_ABSENT || !model_is_copy(other)) return 0;
    if (m->format == TN_FORMAT_FP8_BLOCK_1D) return 0;
    if (at->state == TN_PLANE_ALLOCATED && !model_leases_on(m, tensor, plane)) return 0;
    return at->is_derived || (plane == COL && !other->is_derived);
}

/* Both planes may have been derived, from each other: then the first one goes, the other stays. */
tn_status model_end_backward(model *m) {
    for (int t = 0; t < MODEL_TENSORS; t++) {
        if (model_policy(m, t) != TN_POLICY_UNTIL_BACKWARD_END) continue;
        for (int p = 0; p < MODEL_PLANES; p++) {
            if (is_spare(m, t, p) && model_leases_on(m, t, p)) return TN_IN_USE;
        }
    }
    for (int t = 0; t < MODEL_TENSORS; t++) {
        if (model_policy(m, t) != TN_POLICY_UNTIL_BACKWARD_END) continue;
        for (int p = 0; p < MODEL_PLANES; p++) {
            if (is_spare(m, t, p)) model_set_absent(m, t, p);
        }
    }
    return TN_OK;
}

/* ---- budgets --------------------------------------------------------------------------------- */

/* What has become the last copy, or was written, is not kept for its worth any more. */
static void forget_needed(model *m) {
    for (int t = 0; t < MODEL_TENSORS; t++) {
        for (int p = 0; p < MODEL_PLANES; p++) {
            if (!model_leases_on(m, t, p) && !is_spare(m, t, p)) {
                m->tensors[t].planes[p].now.is_kept = 0;
            }
        }
    }
}

/* With so many bytes more. */
static unsigned char exceeds_budget(const model *m, size_t bytes) {
    return model_kept_bytes(m) + bytes > model_budget_of(m, m->budget);
}

/* Stays for now, unless there can be no room; others, or it, may then be seen to go. */
static void release_to_budget(model *m, int tensor, int plane) {
    model_memory *at = &m->tensors[tensor].planes[plane].now;
    size_t bytes = model_plane_bytes(m, plane);
    if (at->is_kept) return;
    if (bytes > model_budget_of(m, m->budget)) {
        model_set_absent(m, tensor, plane);
        return;
    }
    if (exceeds_budget(m, bytes)) {
        forget_needed(m);
        m->is_choosing = exceeds_budget(m, bytes);
    }
    at->is_kept = 1;
}

tn_status model_release(model *m, int tensor, int plane) {
    tn_plane_policy policy = model_policy(m, tensor);
    model_plane *at = &m->tensors[tensor].planes[plane];
    int returns = can_return(m, tensor, plane);
    if (policy == TN_POLICY_OFFLOAD) {
        if (at->now.state != TN_PLANE_VALID || at->now.place != PLACE_OWN) return TN_OK;
        if (model_leases_on(m, tensor, plane)) return TN_OK;
        return model_step_place(
            m, (model_operation){MODEL_OFFLOAD, (unsigned char)tensor, (unsigned char)plane, 0, 0});
    }
    if (policy != TN_POLICY_BUDGET) at->now.is_kept = 0;
    if (policy == TN_POLICY_UNTIL_LAST_USE && returns && m->tensors[tensor].is_frozen) {
        model_set_absent(m, tensor, plane);
    }
    if (!returns || !is_spare(m, tensor, plane)) return TN_OK;
    if (policy == TN_POLICY_SCRATCH) model_set_absent(m, tensor, plane);
    if (policy == TN_POLICY_BUDGET) release_to_budget(m, tensor, plane);
    return TN_OK;
}

/* All that is kept and not leased could go: if that is not enough, nothing goes. */
static tn_status set_budget(model *m, int planes) {
    size_t leased = 0;
    forget_needed(m);
    for (int t = 0; t < MODEL_TENSORS; t++) {
        for (int p = 0; p < MODEL_PLANES; p++) {
            if (!m->tensors[t].planes[p].now.is_kept || !model_leases_on(m, t, p)) continue;
            leased += model_plane_bytes(m, p);
        }
    }
    if (leased > model_budget_of(m, planes)) return TN_IN_USE;
    m->budget = (unsigned char)planes;
    m->is_choosing = exceeds_budget(m, 0);
    return TN_OK;
}

/* The sizes of planes differ little, so that to drop one too many is seen. */
int model_choose(model *m, int tensor, int plane) {
    const model_memory *at = &m->tensors[tensor].planes[plane].now;
    if (!m->is_choosing || !at->is_kept || !can_return(m, tensor, plane)) return 0;
    if (!exceeds_budget(m, 0)) return 0;
    model_set_absent(m, tensor, plane);
    return 1;
}

const char *model_chosen(model *m) {
    int was_choosing = m->is_choosing;
    m->is_choosing = 0;
    if (!exceeds_budget(m, 0)) return NULL;
    return was_choosing ? "too little was dropped for the budget" : "more is kept than the budget";
}

/* ---- host memory, memory of others ----------------------------------------------------------- */

static tn_status offload(model *m, int tensor, int plane) {
    model_plane *at = &m->tensors[tensor].planes[plane];
    if (at->now.state == TN_PLANE_OFFLOADED) return TN_OK;
    if (model_leases_on(m, tensor, plane)) return TN_IN_USE;
    if (at->now.state != TN_PLANE_VALID || at->now.place != PLACE_OWN) return TN_INVALID_STATE;
    at->now.state = TN_PLANE_OFFLOADED;
    at->now.place = PLACE_HOST;
    at->now.is_kept = 0;
    at->writer = COPY_STREAM;
    at->readers = 0;
    return TN_OK;
}

static tn_status prefetch(model *m, int tensor, int plane) {
    model_plane *at = &m->tensors[tensor].planes[plane];
    if (at->now.state == TN_PLANE_OFFLOADED) model_fetch(at);
    return at->now.state == TN_PLANE_VALID ? TN_OK : TN_INVALID_STATE;
}

static tn_status create(model *m, int tensor) {
    m->tensors[tensor].is_alive = 1;
    m->tensors[tensor].policy = m->policy;
    return TN_OK;
}

static tn_status adopt(model *m, model_operation op) {
    model_plane *at = &m->tensors[op.tensor].planes[op.plane];
    (void)create(m, op.tensor);
    at->now.state = TN_PLANE_VALID;
    at->now.place = op.lease ? PLACE_READ_ONLY : PLACE_FOREIGN;
    at->writer = (signed char)op.stream;
    m->tensors[op.tensor].contents = ++m->writes;
    return TN_OK;
}

/* ---- views ----------------------------------------------------------------------------------- */

static tn_status make_view(model *m, int tensor, int is_part) {
    if (!m->tensors[tensor].is_alive) return TN_STALE_HANDLE;
    m->view = (model_view){1, 1, (unsigned char)is_part, (unsigned char)tensor};
    return TN_OK;
}

static tn_status step_view(model *m, model_operation op) {
    if (!m->view.is_alive) return TN_STALE_HANDLE;
    if (op.kind == MODEL_MOVE) {
        m->view.is_moved = !m->view.is_moved;
        return TN_OK;
    }
    for (int i = 0; i < m->lease_count; i++) {
        if (m->leases[i].is_through) return TN_IN_USE;
    }
    memset(&m->view, 0, sizeof m->view);
    return TN_OK;
}

/* COL of rows is not contiguous; scales of rows are not theirs alone but in 2D; and the rest of the
 * base must stay as it is. */
tn_status model_through_view(const model *m, model_operation *op) {
    int writes = op->kind >= MODEL_WRITE && op->kind <= MODEL_REPLACE;
    if (!m->view.is_alive) return TN_STALE_HANDLE;
    op->tensor = m->view.base;
    if (op->kind == MODEL_DROP || op->kind == MODEL_SAVE) return TN_INVALID_STATE;
    if (!m->view.is_part) return TN_OK;
    if (op->plane == COL) return TN_UNSUPPORTED;
    if (writes && m->format != TN_FORMAT_FP8_BLOCK_2D) return TN_UNSUPPORTED;
    if (op->kind == MODEL_REPLACE) return TN_UNSUPPORTED;
    if (op->kind == MODEL_WRITE) op->kind = MODEL_UPDATE;
    return TN_OK;
}

/* ---- steps ----------------------------------------------------------------------------------- */

tn_status model_step_place(model *m, model_operation op) {
    if (op.tensor == MODEL_VIEW) return step_view(m, op);
    switch ((model_kind)op.kind) {
    case MODEL_CREATE: return create(m, op.tensor);
    case MODEL_ADOPT: return adopt(m, op);
    case MODEL_VIEW_ROWS: return make_view(m, op.tensor, 1);
    case MODEL_VIEW_ALL: return make_view(m, op.tensor, 0);
    case MODEL_BUDGET: return set_budget(m, op.lease);
    case MODEL_SLOT_BUFFERS: return set_buffers(m, op.lease);
    case MODEL_SLOT_RESERVE: return reserve_slot(m);
    case MODEL_SLOT_RELEASE: return release_slot(m);
    case MODEL_RENEW: return TN_OK;
    default: break;
    }
    if (!m->tensors[op.tensor].is_alive) return TN_STALE_HANDLE;
    switch ((model_kind)op.kind) {
    case MODEL_OFFLOAD: return offload(m, op.tensor, op.plane);
    case MODEL_PREFETCH: return prefetch(m, op.tensor, op.plane);
    case MODEL_POLICY: m->tensors[op.tensor].policy = op.lease; return TN_OK;
    default: return TN_INVALID_ARGUMENT;
    }
}
