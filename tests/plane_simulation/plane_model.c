/* The rules of planes as the headers tell them; see plane_model.h. */
#include "plane_model.h"

#include <stdio.h>
#include <string.h>

enum { ROW = 0, COL = 1 };

void model_init(model *m, tn_format format, tn_plane_policy policy) {
    memset(m, 0, sizeof *m);
    m->format = (unsigned char)format;
    m->policy = (unsigned char)policy;
    for (int t = 0; t < MODEL_TENSORS; t++) {
        m->tensors[t].is_alive = t != MODEL_SAVED;
        for (int p = 0; p < MODEL_PLANES; p++)
            m->tensors[t].planes[p].writer = -1;
    }
}

static int is_derivable(const model *m) { return m->format != TN_FORMAT_FP8_BLOCK_1D; }

/* What the policy comes to: UNTIL_LAST_USE is for 2D, none for planes that can not be derived. */
static tn_plane_policy policy_of(const model *m) {
    if (!is_derivable(m)) return TN_POLICY_KEEP;
    if (m->policy == TN_POLICY_UNTIL_LAST_USE && m->format != TN_FORMAT_FP8_BLOCK_2D) {
        return TN_POLICY_KEEP;
    }
    return (tn_plane_policy)m->policy;
}

/* ---- leases -------------------------------------------------------------------------------- */

static int leases_on(const model *m, int tensor, int plane) {
    int count = 0;
    for (int i = 0; i < m->lease_count; i++)
        count += m->leases[i].tensor == tensor && m->leases[i].plane == plane;
    return count;
}

static int leases_of(const model *m, int tensor) {
    return leases_on(m, tensor, ROW) + leases_on(m, tensor, COL);
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

/* ---- planes -------------------------------------------------------------------------------- */

static void set_absent(model_plane *plane) {
    memset(plane, 0, sizeof *plane);
    plane->writer = -1;
}

/* Of what the plane would be if a REPLACE of it were given up. */
static unsigned char *kept_state(model_plane *plane) {
    return plane->has_old ? &plane->old_state : &plane->state;
}

static void note_write(model_plane *plane, int stream) {
    plane->writer = (signed char)stream;
    plane->readers = 0;
}

static tn_status require(model *m, int tensor, int plane, int stream) {
    model_tensor *t = &m->tensors[tensor];
    model_plane *to = &t->planes[plane], *from = &t->planes[!plane];
    if (to->state == TN_PLANE_VALID) return TN_OK;
    if (is_written(m, tensor)) return TN_IN_USE;
    if (from->state != TN_PLANE_VALID) return TN_INVALID_STATE;
    if (!is_derivable(m)) return TN_UNSUPPORTED;
    from->readers |= (unsigned char)(1 << stream);
    to->state = TN_PLANE_VALID;
    to->is_derived = 1;
    note_write(to, stream);
    return TN_OK;
}

static tn_status make(model *m, int tensor, int plane, int stream) {
    model_plane *at = &m->tensors[tensor].planes[plane];
    if (at->state != TN_PLANE_ABSENT) return TN_OK;
    at->state = TN_PLANE_ALLOCATED;
    note_write(at, stream);
    return TN_OK;
}

/* Dropping it would lose the contents: no other plane has them, nor would after an abandon. */
static int is_last_copy(model *m, int tensor, int plane) {
    model_tensor *t = &m->tensors[tensor];
    const model_plane *at = &t->planes[plane];
    model_plane *other = &t->planes[!plane];
    const model_lease *writer = writer_of(m, tensor, !plane);
    int may_return = at->state == TN_PLANE_STALE && writer && writer->has_staled;
    if (at->state != TN_PLANE_VALID && !may_return) return 0;
    return other->state != TN_PLANE_VALID && *kept_state(other) != TN_PLANE_VALID;
}

static tn_status drop(model *m, int tensor, int plane) {
    if (leases_on(m, tensor, plane)) return TN_IN_USE;
    if (is_last_copy(m, tensor, plane)) return TN_INVALID_STATE;
    set_absent(&m->tensors[tensor].planes[plane]);
    return TN_OK;
}

static tn_status release(model *m, int tensor, int plane) {
    model_tensor *t = &m->tensors[tensor];
    int drops = policy_of(m) == TN_POLICY_UNTIL_LAST_USE && t->is_frozen &&
                t->planes[!plane].state == TN_PLANE_VALID && !leases_on(m, tensor, plane);
    if (drops) set_absent(&t->planes[plane]);
    return TN_OK;
}

/* ---- begin and end ------------------------------------------------------------------------- */

static int is_whole_write(int access) { return access == TN_WRITE || access == TN_REPLACE; }

static void begin_write(model *m, model_lease *lease) {
    model_tensor *t = &m->tensors[lease->tensor];
    model_plane *at = &t->planes[lease->plane];
    unsigned char *other = kept_state(&t->planes[!lease->plane]);
    lease->has_made = at->state == TN_PLANE_ABSENT;
    lease->has_staled = *other == TN_PLANE_VALID;
    if (lease->access == TN_REPLACE && !lease->has_made) {
        at->has_old = 1;
        at->old_state = at->state;
        at->is_old_derived = at->is_derived;
        at->is_derived = 0;
    }
    at->state = TN_PLANE_ALLOCATED;
    note_write(at, lease->stream);
    if (lease->has_staled) *other = TN_PLANE_STALE;
}

static tn_status begin(model *m, model_operation op, tn_access access) {
    model_lease lease = {op.tensor, op.plane, (unsigned char)access, op.stream, 0, 0};
    model_plane *at = &m->tensors[op.tensor].planes[op.plane];
    if (access == TN_READ) {
        tn_status status = require(m, op.tensor, op.plane, op.stream);
        if (status != TN_OK) return status;
        at->readers |= (unsigned char)(1 << op.stream);
    } else {
        const model_lease *other = writer_of(m, op.tensor, !op.plane);
        if (leases_on(m, op.tensor, op.plane)) return TN_IN_USE;
        if (leases_on(m, op.tensor, !op.plane) && !(other && is_whole_write(other->access))) {
            return TN_IN_USE;
        }
        if (access == TN_UPDATE && at->state != TN_PLANE_VALID) return TN_INVALID_STATE;
        begin_write(m, &lease);
    }
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

static tn_status end(model *m, int index) {
    model_lease lease = take_lease(m, index);
    model_tensor *t = &m->tensors[lease.tensor];
    model_plane *at = &t->planes[lease.plane], *other = &t->planes[!lease.plane];
    if (lease.access == TN_READ) return TN_OK;
    at->state = TN_PLANE_VALID;
    at->is_derived = at->has_old = at->old_state = at->is_old_derived = 0;
    t->contents = ++m->writes;
    if (other->state == TN_PLANE_STALE && policy_of(m) != TN_POLICY_KEEP) set_absent(other);
    return TN_OK;
}

static tn_status abandon(model *m, int index) {
    model_lease lease = take_lease(m, index);
    model_tensor *t = &m->tensors[lease.tensor];
    model_plane *at = &t->planes[lease.plane];
    unsigned char *other = kept_state(&t->planes[!lease.plane]);
    if (lease.access == TN_READ) return TN_OK;
    if (at->has_old) {
        at->state = at->old_state;
        at->is_derived = at->is_old_derived;
        at->has_old = at->old_state = at->is_old_derived = 0;
    } else if (lease.has_made) {
        set_absent(at);
    }
    if (lease.has_staled && *other == TN_PLANE_STALE) *other = TN_PLANE_VALID;
    return TN_OK;
}

/* ---- between tensors ----------------------------------------------------------------------- */

static tn_status save(model *m, int tensor, int plane, int stream) {
    model_tensor *t = &m->tensors[tensor], *saved = &m->tensors[MODEL_SAVED];
    if (leases_on(m, tensor, plane)) return TN_IN_USE;
    tn_status status = require(m, tensor, plane, stream);
    if (status != TN_OK) return status;
    memset(saved, 0, sizeof *saved);
    saved->is_alive = saved->is_saved = 1;
    saved->is_frozen = t->is_frozen;
    saved->contents = t->contents;
    set_absent(&saved->planes[!plane]);
    saved->planes[plane] = t->planes[plane];
    set_absent(&t->planes[plane]);
    return TN_OK;
}

static tn_status restore(model *m, int tensor) {
    model_tensor *t = &m->tensors[tensor], *saved = &m->tensors[MODEL_SAVED];
    if (!saved->is_saved) return TN_INVALID_STATE;
    if (leases_of(m, MODEL_SAVED)) return TN_IN_USE;
    for (int p = 0; p < MODEL_PLANES; p++) {
        const model_plane *at = &t->planes[p];
        if (writer_of(m, tensor, p)) return TN_IN_USE;
        if (at->state != TN_PLANE_ABSENT && saved->planes[p].state != TN_PLANE_ABSENT) {
            return TN_INVALID_STATE;
        }
        if (at->state == TN_PLANE_VALID && t->contents != saved->contents) return TN_INVALID_STATE;
    }
    for (int p = 0; p < MODEL_PLANES; p++) {
        if (saved->planes[p].state != TN_PLANE_ABSENT) t->planes[p] = saved->planes[p];
        set_absent(&saved->planes[p]);
    }
    t->contents = saved->contents;
    saved->is_alive = saved->is_saved = saved->is_frozen = saved->contents = 0;
    return TN_OK;
}

static tn_status clone(model *m, int tensor, int stream) {
    model_tensor *t = &m->tensors[tensor], *copy = &m->tensors[MODEL_SAVED];
    if (is_written(m, tensor)) return TN_IN_USE;
    memset(copy, 0, sizeof *copy);
    copy->is_alive = 1;
    copy->is_frozen = t->is_frozen;
    for (int p = 0; p < MODEL_PLANES; p++) {
        set_absent(&copy->planes[p]);
        if (t->planes[p].state != TN_PLANE_VALID) continue;
        t->planes[p].readers |= (unsigned char)(1 << stream);
        copy->planes[p].state = TN_PLANE_VALID;
        copy->planes[p].is_derived = t->planes[p].is_derived;
        copy->contents = ++m->writes;
        note_write(&copy->planes[p], stream);
    }
    return TN_OK;
}

static tn_status destroy(model *m, int tensor) {
    model_tensor *t = &m->tensors[tensor];
    if (leases_of(m, tensor)) return TN_IN_USE;
    memset(t, 0, sizeof *t);
    for (int p = 0; p < MODEL_PLANES; p++)
        set_absent(&t->planes[p]);
    return TN_OK;
}

/* The derived plane, of two written ones COL, that the other one can replace. */
static int is_spare(const model *m, int tensor, int plane) {
    const model_plane *at = &m->tensors[tensor].planes[plane];
    const model_plane *other = &m->tensors[tensor].planes[!plane];
    if (at->state == TN_PLANE_ABSENT || other->state != TN_PLANE_VALID) return 0;
    if (at->state == TN_PLANE_ALLOCATED && !leases_on(m, tensor, plane)) return 0;
    return at->is_derived || (plane == COL && !other->is_derived);
}

/* Both planes may have been derived, from each other: then the first one goes, the other stays. */
static tn_status end_backward(model *m) {
    if (policy_of(m) != TN_POLICY_UNTIL_BACKWARD_END) return TN_OK;
    for (int t = 0; t < MODEL_TENSORS; t++) {
        for (int p = 0; p < MODEL_PLANES; p++) {
            if (is_spare(m, t, p) && leases_on(m, t, p)) return TN_IN_USE;
        }
    }
    for (int t = 0; t < MODEL_TENSORS; t++) {
        for (int p = 0; p < MODEL_PLANES; p++) {
            if (is_spare(m, t, p)) set_absent(&m->tensors[t].planes[p]);
        }
    }
    return TN_OK;
}

/* ---- steps --------------------------------------------------------------------------------- */

tn_status model_step(model *m, model_operation op) {
    model_tensor *t = &m->tensors[op.tensor];
    if (op.kind == MODEL_END) return end(m, op.lease);
    if (op.kind == MODEL_ABANDON) return abandon(m, op.lease);
    if (op.kind == MODEL_END_BACKWARD) return end_backward(m);
    if (!t->is_alive) return TN_STALE_HANDLE;
    switch ((model_kind)op.kind) {
    case MODEL_MAKE: return make(m, op.tensor, op.plane, op.stream);
    case MODEL_REQUIRE: return require(m, op.tensor, op.plane, op.stream);
    case MODEL_DROP: return drop(m, op.tensor, op.plane);
    case MODEL_RELEASE: return release(m, op.tensor, op.plane);
    case MODEL_READ: return begin(m, op, TN_READ);
    case MODEL_WRITE: return begin(m, op, TN_WRITE);
    case MODEL_UPDATE: return begin(m, op, TN_UPDATE);
    case MODEL_REPLACE: return begin(m, op, TN_REPLACE);
    case MODEL_SAVE: return save(m, op.tensor, op.plane, op.stream);
    case MODEL_RESTORE: return restore(m, op.tensor);
    case MODEL_CLONE: return clone(m, op.tensor, op.stream);
    case MODEL_MOVE: t->is_moved = !t->is_moved; return TN_OK;
    case MODEL_FREEZE: t->is_frozen = !t->is_frozen; return TN_OK;
    case MODEL_DESTROY: return destroy(m, op.tensor);
    default: return TN_INVALID_ARGUMENT;
    }
}

static model_operation operation_of(int kind, int tensor, int plane, int stream) {
    return (model_operation){(unsigned char)kind, (unsigned char)tensor, (unsigned char)plane,
                             (unsigned char)stream, 0};
}

static int operations_of(const model *m, int tensor, int leases_max, model_operation *out) {
    int count = 0, is_saved_there = m->tensors[MODEL_SAVED].is_alive;
    for (int kind = 0; kind < MODEL_KINDS; kind++) {
        int is_lease = kind >= MODEL_READ && kind <= MODEL_REPLACE;
        int has_planes = kind <= MODEL_REPLACE || kind == MODEL_SAVE;
        int has_streams = kind != MODEL_MOVE && kind != MODEL_FREEZE && kind != MODEL_RESTORE;
        if (kind == MODEL_END || kind == MODEL_ABANDON || kind == MODEL_END_BACKWARD) continue;
        if (is_lease && m->lease_count >= leases_max) continue;
        if (kind == MODEL_RESTORE && (!is_saved_there || tensor == MODEL_SAVED)) continue;
        if ((kind == MODEL_SAVE || kind == MODEL_CLONE) &&
            (is_saved_there || tensor == MODEL_SAVED)) {
            continue;
        }
        for (int p = 0; p < (has_planes ? MODEL_PLANES : 1); p++) {
            for (int s = 0; s < (has_streams ? MODEL_STREAMS : 1); s++)
                out[count++] = operation_of(kind, tensor, p, s);
        }
    }
    return count;
}

int model_operations(const model *m, int leases_max, model_operation *operations, int limit) {
    model_operation all[256];
    int count = 0;
    for (int t = 0; t < MODEL_TENSORS; t++) {
        if (t == MODEL_SAVED && !m->tensors[t].is_alive) continue;
        count += operations_of(m, t, leases_max, all + count);
    }
    for (unsigned char i = 0; i < m->lease_count; i++) {
        all[count++] = (model_operation){MODEL_END, 0, 0, 0, i};
        all[count++] = (model_operation){MODEL_ABANDON, 0, 0, 0, i};
    }
    for (int s = 0; s < MODEL_STREAMS; s++)
        all[count++] = operation_of(MODEL_END_BACKWARD, 0, 0, s);
    if (count > limit) return -1;
    memcpy(operations, all, (size_t)count * sizeof *all);
    return count;
}

/* ---- bytes --------------------------------------------------------------------------------- */

/* Of 130 x 600 elements: blocks of 128, rows of scales padded to 4. */
static size_t plane_bytes(int format, int plane) {
    size_t data = (size_t)130 * 600;
    if (format == TN_FORMAT_FP8_BLOCK_1D) return data + (plane == ROW ? 5 * 132 * 4 : 2 * 600 * 4);
    if (format == TN_FORMAT_FP8_BLOCK_2D) return data + (plane == ROW ? 2 * 8 * 4 : 5 * 4 * 4);
    return data + 16;
}

size_t model_bytes(const model *m) {
    size_t bytes = 0;
    for (int t = 0; t < MODEL_TENSORS; t++) {
        for (int p = 0; p < MODEL_PLANES; p++) {
            const model_plane *at = &m->tensors[t].planes[p];
            if (at->state != TN_PLANE_ABSENT) bytes += plane_bytes(m->format, p);
            if (at->has_old) bytes += plane_bytes(m->format, p);
        }
    }
    return bytes;
}

/* ---- states that are alike ----------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, unsigned value) {
    hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 29);
}

static uint64_t hash_plane(uint64_t hash, const model_plane *at, int swaps_streams) {
    int writer = at->writer < 0 ? 2 : at->writer ^ swaps_streams;
    unsigned readers = at->readers;
    if (swaps_streams) readers = ((readers & 1) << 1) | (readers >> 1);
    hash = mix(hash, at->state | (unsigned)at->is_derived << 3 | (unsigned)at->has_old << 4 |
                         (unsigned)at->old_state << 5 | (unsigned)at->is_old_derived << 8);
    return mix(hash, (unsigned)writer | readers << 2);
}

/* Which of the tensors have the same contents is all that the numbers of writes mean. */
static unsigned same_contents(const model *m, int a, int b) {
    unsigned same = 0;
    same |= m->tensors[a].contents == m->tensors[MODEL_SAVED].contents;
    same |= (unsigned)(m->tensors[b].contents == m->tensors[MODEL_SAVED].contents) << 1;
    return same;
}

/* Leases in any order: they are ended by index, but each index is tried. */
static uint64_t hash_leases(const model *m, int swaps_tensors, int swaps_streams) {
    uint64_t sum = 0;
    for (int i = 0; i < m->lease_count; i++) {
        const model_lease *lease = &m->leases[i];
        unsigned tensor = lease->tensor;
        if (tensor != MODEL_SAVED) tensor ^= (unsigned)swaps_tensors;
        uint64_t one = mix(17, tensor | (unsigned)lease->plane << 2 | (unsigned)lease->access << 3);
        one = mix(one, (lease->stream ^ (unsigned)swaps_streams) | (unsigned)lease->has_made << 1 |
                           (unsigned)lease->has_staled << 2);
        sum += one * UINT64_C(0xD6E8FEB86659FD93);
    }
    return sum;
}

static uint64_t hash_named(const model *m, int swaps_tensors, int swaps_streams) {
    int order[MODEL_TENSORS] = {swaps_tensors, !swaps_tensors, MODEL_SAVED};
    uint64_t hash = mix(1, m->format * 16u + m->policy);
    for (int i = 0; i < MODEL_TENSORS; i++) {
        const model_tensor *t = &m->tensors[order[i]];
        hash = mix(hash, t->is_alive | (unsigned)t->is_frozen << 1 | (unsigned)t->is_saved << 2 |
                             (unsigned)t->is_moved << 3);
        for (int p = 0; p < MODEL_PLANES; p++)
            hash = hash_plane(hash, &t->planes[p], swaps_streams);
    }
    hash = mix(hash, same_contents(m, order[0], order[1]));
    return hash + hash_leases(m, swaps_tensors, swaps_streams);
}

uint64_t model_hash(const model *m) {
    uint64_t least = UINT64_MAX;
    for (int tensors = 0; tensors < 2; tensors++) {
        for (int streams = 0; streams < 2; streams++) {
            uint64_t hash = hash_named(m, tensors, streams);
            if (hash < least) least = hash;
        }
    }
    return least ? least : 1;
}

/* ---- words --------------------------------------------------------------------------------- */

void model_describe(model_operation op, char *text, size_t text_bytes) {
    static const char *const names[MODEL_KINDS] = {
        "make",   "require", "drop",   "release", "read",        "write",
        "update", "replace", "end",    "abandon", "save",        "restore",
        "clone",  "move",    "freeze", "destroy", "end backward"};
    const char *name = names[op.kind];
    if (op.kind == MODEL_END || op.kind == MODEL_ABANDON) {
        (void)snprintf(text, text_bytes, "%s lease %d", name, op.lease);
    } else if (op.kind == MODEL_END_BACKWARD) {
        (void)snprintf(text, text_bytes, "%s on stream %d", name, op.stream);
    } else {
        (void)snprintf(text, text_bytes, "%s %c.%s on stream %d", name, "ABS"[op.tensor],
                       op.plane == ROW ? "ROW" : "COL", op.stream);
    }
}
