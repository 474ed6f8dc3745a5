/* What can be done in a state, its bytes, its name among those that are alike, and words for it;
 * see plane_model.h.
 */
#include <stdio.h>
#include <string.h>

#include "plane_model_parts.h"

/* ---- operations ------------------------------------------------------------------------------ */

typedef struct listing {
    model_operation all[512];
    int count;
} listing;

static void add(listing *list, int kind, int tensor, int plane, int stream, int lease) {
    list->all[list->count++] =
        (model_operation){(unsigned char)kind, (unsigned char)tensor, (unsigned char)plane,
                          (unsigned char)stream, (unsigned char)lease};
}

/* Of every plane and stream that the kind has. */
static void add_each(listing *list, int kind, int tensor) {
    int has_planes = kind <= MODEL_REPLACE || kind == MODEL_SAVE || kind == MODEL_OFFLOAD ||
                     kind == MODEL_PREFETCH;
    int has_streams = kind != MODEL_MOVE && kind != MODEL_FREEZE && kind != MODEL_RESTORE;
    for (int p = 0; p < (has_planes ? MODEL_PLANES : 1); p++) {
        for (int s = 0; s < (has_streams ? MODEL_STREAMS : 1); s++)
            add(list, kind, tensor, p, s, 0);
    }
}

static void add_narrow(listing *list, const model *m, int tensor, int leases_max) {
    int is_saved_there = m->tensors[MODEL_SAVED].is_alive;
    for (int kind = 0; kind < MODEL_CREATE; kind++) {
        int is_lease = kind >= MODEL_READ && kind <= MODEL_REPLACE;
        int makes_third = kind == MODEL_SAVE || kind == MODEL_CLONE;
        if (kind == MODEL_END || kind == MODEL_ABANDON || kind == MODEL_END_BACKWARD) continue;
        if (is_lease && m->lease_count >= leases_max) continue;
        if (kind == MODEL_RESTORE && (!is_saved_there || tensor == MODEL_SAVED)) continue;
        if (makes_third && (is_saved_there || tensor == MODEL_SAVED)) continue;
        add_each(list, kind, tensor);
    }
}

static void add_wide(listing *list, const model *m, int tensor) {
    add_each(list, MODEL_OFFLOAD, tensor);
    add_each(list, MODEL_PREFETCH, tensor);
    for (int policy = TN_POLICY_KEEP; policy < TN_POLICY_COUNT; policy++)
        add(list, MODEL_POLICY, tensor, 0, 0, policy);
    if (m->view.is_alive) return;
    add(list, MODEL_VIEW_ROWS, tensor, 0, 0, 0);
    add(list, MODEL_VIEW_ALL, tensor, 0, 0, 0);
}

/* A or B may come again. */
static void add_births(listing *list, int tensor) {
    for (int turn = 0; turn < 8; turn++) {
        add(list, MODEL_CREATE, tensor, 0, 0, 0);
        add(list, MODEL_ADOPT, tensor, turn & 1, turn >> 1 & 1, turn >> 2);
    }
}

/* Leases, through the view as on a tensor, and what a view refuses. */
static void add_view(listing *list, const model *m, int leases_max) {
    for (int kind = MODEL_MAKE; kind <= MODEL_REPLACE; kind++) {
        if (kind < MODEL_READ || m->lease_count < leases_max) add_each(list, kind, MODEL_VIEW);
    }
    add_each(list, MODEL_OFFLOAD, MODEL_VIEW);
    add_each(list, MODEL_PREFETCH, MODEL_VIEW);
    add_each(list, MODEL_MOVE, MODEL_VIEW);
    for (int turn = 0; turn < 4; turn++)
        add_each(list, MODEL_DESTROY, MODEL_VIEW);
    if (!m->tensors[MODEL_SAVED].is_alive) add_each(list, MODEL_SAVE, MODEL_VIEW);
}

static void add_of_scopes(listing *list) {
    for (int planes = 0; planes < 5; planes++)
        add(list, MODEL_BUDGET, 0, 0, 0, planes);
    for (int s = 0; s < MODEL_STREAMS; s++) {
        add(list, MODEL_SLOT_BUFFERS, 0, 0, s, s + 1);
        add(list, MODEL_SLOT_RESERVE, 0, 0, s, 0);
        add(list, MODEL_SLOT_RELEASE, 0, 0, s, 0);
        add(list, MODEL_RENEW, 0, 0, s, 0);
    }
}

int model_operations(const model *m, int leases_max, int is_wide, model_operation *operations,
                     int limit) {
    listing list = {.count = 0};
    for (int t = 0; t < MODEL_TENSORS; t++) {
        int is_third = t == MODEL_SAVED, is_alive = m->tensors[t].is_alive;
        if (is_third && !is_alive) continue;
        if (is_wide && !is_alive) add_births(&list, t);
        if (!is_wide || is_alive) add_narrow(&list, m, t, leases_max);
        if (is_wide && is_alive) add_wide(&list, m, t);
    }
    if (is_wide && m->view.is_alive) add_view(&list, m, leases_max);
    if (is_wide) add_of_scopes(&list);
    for (int i = 0; i < m->lease_count; i++) {
        add(&list, MODEL_END, 0, 0, 0, i);
        add(&list, MODEL_ABANDON, 0, 0, 0, i);
    }
    for (int s = 0; s < MODEL_STREAMS; s++)
        add(&list, MODEL_END_BACKWARD, 0, 0, s, 0);
    if (list.count > limit) return -1;
    memcpy(operations, list.all, (size_t)list.count * sizeof *operations);
    return list.count;
}

/* ---- bytes --------------------------------------------------------------------------------- */

static const size_t data_bytes = (size_t)MODEL_ROWS * MODEL_COLS;

/* Blocks of 128, rows of scales padded to 4. */
static size_t scale_bytes(const model *m, int plane) {
    if (m->format == TN_FORMAT_FP8_BLOCK_1D) return plane == ROW ? 5 * 132 * 4 : 2 * 600 * 4;
    if (m->format == TN_FORMAT_FP8_BLOCK_2D) return plane == ROW ? 2 * 8 * 4 : 5 * 4 * 4;
    return 16;
}

size_t model_plane_bytes(const model *m, int plane) { return data_bytes + scale_bytes(m, plane); }

static size_t bytes_in(const model *m, unsigned places) {
    size_t bytes = 0;
    for (int t = 0; t < MODEL_TENSORS; t++) {
        for (int p = 0; p < MODEL_PLANES; p++) {
            const model_plane *at = &m->tensors[t].planes[p];
            int is_there = at->now.state != TN_PLANE_ABSENT && (places >> at->now.place & 1);
            if (is_there) bytes += model_plane_bytes(m, p);
            if (at->has_old && (places >> at->old.place & 1)) bytes += model_plane_bytes(m, p);
        }
    }
    return bytes;
}

/* A buffer takes the larger plane: elements to a multiple of 256 bytes, and scales. */
size_t model_slot_bytes(const model *m) {
    size_t row = scale_bytes(m, ROW), col = scale_bytes(m, COL);
    size_t bytes = ((data_bytes + 255) & ~(size_t)255) + (row > col ? row : col);
    return (m->buffers[0].has_memory + (size_t)m->buffers[1].has_memory) * bytes;
}

size_t model_bytes(const model *m) { return bytes_in(m, 1 << PLACE_OWN) + model_slot_bytes(m); }

size_t model_offloaded_bytes(const model *m) { return bytes_in(m, 1 << PLACE_HOST); }

size_t model_foreign_bytes(const model *m) {
    return bytes_in(m, 1 << PLACE_FOREIGN | 1 << PLACE_READ_ONLY);
}

static int is_foreign(const model_memory *at) {
    return at->place == PLACE_FOREIGN || at->place == PLACE_READ_ONLY;
}

int model_foreign_planes(const model *m) {
    int count = 0;
    for (int t = 0; t < MODEL_TENSORS; t++) {
        for (int p = 0; p < MODEL_PLANES; p++) {
            const model_plane *at = &m->tensors[t].planes[p];
            count += is_foreign(&at->now) + (at->has_old && is_foreign(&at->old));
        }
    }
    return count;
}

size_t model_kept_bytes(const model *m) {
    size_t bytes = 0;
    for (int t = 0; t < MODEL_TENSORS; t++) {
        for (int p = 0; p < MODEL_PLANES; p++) {
            if (m->tensors[t].planes[p].now.is_kept) bytes += model_plane_bytes(m, p);
        }
    }
    return bytes;
}

size_t model_budget_of(const model *m, int planes) {
    return (size_t)planes * model_plane_bytes(m, ROW) + 100;
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
    hash =
        mix(hash, at->now.state | (unsigned)at->now.is_derived << 3 | (unsigned)at->has_old << 4 |
                      (unsigned)at->old.state << 5 | (unsigned)at->old.is_derived << 8);
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

static const char *const names[MODEL_KINDS] = {
    "make",   "require",      "drop",         "release",      "read",         "write",
    "update", "replace",      "end",          "abandon",      "save",         "restore",
    "clone",  "move",         "freeze",       "destroy",      "end backward", "create",
    "adopt",  "offload",      "prefetch",     "view rows of", "view all of",  "policy of",
    "budget", "slot buffers", "reserve slot", "release slot", "renew"};

void model_describe(model_operation op, char *text, size_t text_bytes) {
    const char *name = names[op.kind];
    if (op.kind == MODEL_END || op.kind == MODEL_ABANDON) {
        (void)snprintf(text, text_bytes, "%s lease %d", name, op.lease);
    } else if (op.kind == MODEL_BUDGET || op.kind == MODEL_SLOT_BUFFERS) {
        (void)snprintf(text, text_bytes, "%s %d", name, op.lease);
    } else if (op.kind == MODEL_POLICY) {
        (void)snprintf(text, text_bytes, "%s %c: %s", name, "ABSV"[op.tensor],
                       tn_policy_name((tn_plane_policy)op.lease));
    } else if (op.kind == MODEL_END_BACKWARD || op.kind >= MODEL_SLOT_RESERVE) {
        (void)snprintf(text, text_bytes, "%s on stream %d", name, op.stream);
    } else {
        (void)snprintf(text, text_bytes, "%s %c.%s on stream %d%s", name, "ABSV"[op.tensor],
                       op.plane == ROW ? "ROW" : "COL", op.stream,
                       op.kind == MODEL_ADOPT && op.lease ? ", to be read only" : "");
    }
}
