/* The ledger: what every scope owns, and the proof that nothing else is owned.
 *
 * Invariants: a scope's sums are those of its tensors and of the scopes below it; a peak is never
 * below its sum. tn_ledger_check counts all planes anew and compares with both the scopes' sums
 * and the bytes that the pool says tensors own: three counts that are kept by different code.
 */
#include "ledger.h"

#include "books.h"
#include "host_alloc.h"

#include <stdlib.h>
#include <string.h>

/* ---- sums ---------------------------------------------------------------------------------- */

static size_t plane_bytes(const tn__sums *sums, int plane) {
    return sums->data_bytes[plane] + sums->scale_bytes[plane];
}

static size_t total_bytes(const tn__sums *sums) {
    size_t total = 0;
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++)
        total += plane_bytes(sums, plane);
    return total;
}

static void raise_peaks(tn__scope_object *scope) {
    size_t total = total_bytes(&scope->sums);
    if (total > scope->peak_total_bytes) scope->peak_total_bytes = total;
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        size_t bytes = plane_bytes(&scope->sums, plane);
        if (bytes > scope->peak_plane_bytes[plane]) scope->peak_plane_bytes[plane] = bytes;
    }
}

/* A scope without a phase of its own is in that of the nearest one above: so all that are passed on
 * the way up to one that has a phase are in it. */
static void raise_phase_peaks(tn__scope_object *scope) {
    tn__scope_object *waiting = scope;
    for (tn__scope_object *at = scope; at; at = at->parent) {
        if (at->phase == TN_PHASE_NONE && at->parent) continue;
        for (; waiting != at->parent; waiting = waiting->parent) {
            size_t total = total_bytes(&waiting->sums);
            size_t *peak = &waiting->peak_phase_bytes[at->phase];
            if (total > *peak) *peak = total;
        }
    }
}

static void add_sums(tn__sums *to, const tn__sums *sums) {
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        to->data_bytes[plane] += sums->data_bytes[plane];
        to->scale_bytes[plane] += sums->scale_bytes[plane];
    }
    for (int format = 0; format < TN_FORMAT_COUNT; format++)
        to->format_bytes[format] += sums->format_bytes[format];
    to->foreign_bytes += sums->foreign_bytes;
    to->offloaded_bytes += sums->offloaded_bytes;
    to->tensors += sums->tensors;
    to->planes += sums->planes;
    to->leases += sums->leases;
}

static void subtract_sums(tn__sums *from, const tn__sums *sums) {
    TN_CHECK(total_bytes(from) >= total_bytes(sums));
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        from->data_bytes[plane] -= sums->data_bytes[plane];
        from->scale_bytes[plane] -= sums->scale_bytes[plane];
    }
    for (int format = 0; format < TN_FORMAT_COUNT; format++)
        from->format_bytes[format] -= sums->format_bytes[format];
    from->foreign_bytes -= sums->foreign_bytes;
    from->offloaded_bytes -= sums->offloaded_bytes;
    from->tensors -= sums->tensors;
    from->planes -= sums->planes;
    from->leases -= sums->leases;
}

static void add_up(tn__scope_object *scope, const tn__sums *sums) {
    for (tn__scope_object *at = scope; at; at = at->parent) {
        add_sums(&at->sums, sums);
        raise_peaks(at);
    }
    raise_phase_peaks(scope);
}

static void subtract_up(tn__scope_object *scope, const tn__sums *sums) {
    for (; scope; scope = scope->parent)
        subtract_sums(&scope->sums, sums);
}

static tn__sums sums_of_plane(tn_format format, tn_plane plane,
                              const size_t bytes[TN__PART_COUNT]) {
    tn__sums sums = {0};
    sums.format_bytes[format] = bytes[TN__PART_DATA] + bytes[TN__PART_SCALE];
    sums.data_bytes[plane] = bytes[TN__PART_DATA];
    sums.scale_bytes[plane] = bytes[TN__PART_SCALE];
    sums.planes = bytes[TN__PART_DATA] + bytes[TN__PART_SCALE] > 0;
    return sums;
}

static tn__sums sums_of_tensor(const tn__tensor_object *tensor) {
    tn__sums sums = {.tensors = 1};
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        size_t bytes[TN__PART_COUNT];
        tn__plane_owned_bytes(&tensor->planes[plane], bytes);
        tn__sums of_plane = sums_of_plane(tensor->format, (tn_plane)plane, bytes);
        add_sums(&sums, &of_plane);
        sums.foreign_bytes += tn__plane_bytes_in(&tensor->planes[plane], TN__MEMORY_FOREIGN);
        sums.offloaded_bytes += tn__plane_bytes_in(&tensor->planes[plane], TN__MEMORY_HOST);
        const tn__lease_object *lease = tensor->planes[plane].first_lease;
        for (; lease; lease = lease->next)
            sums.leases++;
    }
    return sums;
}

/* ---- changes ------------------------------------------------------------------------------- */

void tn__ledger_change_plane(const tn__tensor_object *tensor, tn_plane plane,
                             const size_t before[TN__PART_COUNT],
                             const size_t after[TN__PART_COUNT]) {
    tn__sums old = sums_of_plane(tensor->format, plane, before);
    tn__sums new = sums_of_plane(tensor->format, plane, after);
    subtract_up(tensor->scope, &old);
    add_up(tensor->scope, &new);
}

void tn__ledger_note_phase(tn__scope_object *scope) {
    for (tn__scope_object *at = scope; at; at = tn__scope_next(at, scope)) {
        size_t *peak = &at->peak_phase_bytes[tn__scope_phase(at)];
        size_t total = total_bytes(&at->sums);
        if (total > *peak) *peak = total;
    }
}

void tn__ledger_change_elsewhere(tn__scope_object *scope, const tn__elsewhere *before,
                                 const tn__elsewhere *after) {
    tn__sums old = {.foreign_bytes = before->foreign, .offloaded_bytes = before->offloaded};
    tn__sums new = {.foreign_bytes = after->foreign, .offloaded_bytes = after->offloaded};
    subtract_up(scope, &old);
    add_up(scope, &new);
}

static void change_up(tn__scope_object *scope, const tn__sums *sums, int change) {
    TN_ASSERT(change == 1 || change == -1);
    if (change > 0)
        add_up(scope, sums);
    else
        subtract_up(scope, sums);
}

void tn__ledger_count_tensor(tn__scope_object *scope, int change) {
    tn__sums sums = {.tensors = 1};
    change_up(scope, &sums, change);
}

/* Taken out first, so that a scope above both does not see it twice at its peak. */
void tn__ledger_move(const tn__tensor_object *tensor, tn__scope_object *to) {
    tn__sums sums = sums_of_tensor(tensor);
    subtract_up(tensor->scope, &sums);
    add_up(to, &sums);
}

/* ---- reports ------------------------------------------------------------------------------- */

tn_status tn_scope_ledger(tn_scope scope, tn_ledger *out) {
    tn__scope_object *object;
    TN_REQUIRE(out && out->size == sizeof *out, "tn_scope_ledger: out is not TN_LEDGER_INIT");
    TN_TRY(tn__scope_acquire(scope, &object));
    tn_ledger ledger = TN_LEDGER_INIT;
    ledger.total_bytes = total_bytes(&object->sums);
    memcpy(ledger.data_bytes, object->sums.data_bytes, sizeof ledger.data_bytes);
    memcpy(ledger.scale_bytes, object->sums.scale_bytes, sizeof ledger.scale_bytes);
    ledger.peak_total_bytes = object->peak_total_bytes;
    memcpy(ledger.peak_plane_bytes, object->peak_plane_bytes, sizeof ledger.peak_plane_bytes);
    ledger.tensors = object->sums.tensors;
    ledger.planes = object->sums.planes;
    ledger.leases = object->sums.leases;
    ledger.foreign_bytes = object->sums.foreign_bytes;
    memcpy(ledger.format_bytes, object->sums.format_bytes, sizeof ledger.format_bytes);
    memcpy(ledger.peak_phase_bytes, object->peak_phase_bytes, sizeof ledger.peak_phase_bytes);
    ledger.offloaded_bytes = object->sums.offloaded_bytes;
    tn__scope_unlock(object);
    *out = ledger;
    return TN_OK;
}

tn_status tn_scope_ledger_reset_peaks(tn_scope scope) {
    tn__scope_object *object;
    TN_TRY(tn__scope_acquire(scope, &object));
    object->peak_total_bytes = 0;
    memset(object->peak_plane_bytes, 0, sizeof object->peak_plane_bytes);
    memset(object->peak_phase_bytes, 0, sizeof object->peak_phase_bytes);
    raise_peaks(object);
    object->peak_phase_bytes[tn__scope_phase(object)] = total_bytes(&object->sums);
    tn__scope_unlock(object);
    return TN_OK;
}

typedef struct visit_entry {
    uint64_t number;
    tn_tensor tensor;
    tn_tensor_info info;
    tn__sums sums;
} visit_entry;

static int by_number(const void *left, const void *right) {
    uint64_t a = ((const visit_entry *)left)->number;
    uint64_t b = ((const visit_entry *)right)->number;
    return (a > b) - (a < b);
}

static size_t collect_entries(tn__scope_object *root, visit_entry *entries) {
    size_t count = 0;
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
            tn__sums sums = sums_of_tensor(tensor);
            if (sums.planes == 0) continue;
            visit_entry *entry = &entries[count++];
            entry->number = tensor->number;
            entry->tensor = tensor->handle;
            entry->info = tn__tensor_info_of(tensor);
            entry->sums = sums;
        }
    }
    return count;
}

/* The visitor runs without the lock, on a copy, so that it may call anything. */
tn_status tn_scope_visit(tn_scope scope, tn_ledger_visitor visitor, void *argument) {
    tn__scope_object *object;
    TN_REQUIRE(visitor, "tn_scope_visit: the visitor is NULL");
    TN_TRY(tn__scope_acquire(scope, &object));
    size_t limit = (size_t)object->sums.tensors;
    visit_entry *entries = tn__host_alloc(limit, sizeof *entries);
    size_t count = entries ? collect_entries(object, entries) : 0;
    tn__scope_unlock(object);
    if (!entries) return TN_OUT_OF_HOST_MEMORY;
    TN_CHECK(count <= limit);
    qsort(entries, count, sizeof *entries, by_number);
    for (size_t i = 0; i < count; i++) {
        visitor(argument, entries[i].tensor, &entries[i].info, entries[i].sums.data_bytes,
                entries[i].sums.scale_bytes);
    }
    tn__host_free(entries);
    return TN_OK;
}

/* ---- the proof ----------------------------------------------------------------------------- */

static int sums_are_equal(const tn__sums *a, const tn__sums *b) {
    return !memcmp(a->data_bytes, b->data_bytes, sizeof a->data_bytes) &&
           !memcmp(a->scale_bytes, b->scale_bytes, sizeof a->scale_bytes) &&
           !memcmp(a->format_bytes, b->format_bytes, sizeof a->format_bytes) &&
           a->foreign_bytes == b->foreign_bytes && a->offloaded_bytes == b->offloaded_bytes &&
           a->tensors == b->tensors && a->planes == b->planes && a->leases == b->leases;
}

/* The scope's sums, made anew from its own tensors and its children's sums. */
static tn__sums recount(const tn__scope_object *scope) {
    tn__sums sums = {0};
    for (const tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
        tn__sums of_tensor = sums_of_tensor(tensor);
        add_sums(&sums, &of_tensor);
    }
    for (const tn__scope_object *child = scope->first_child; child; child = child->next) {
        add_sums(&sums, &child->sums);
    }
    return sums;
}

typedef struct counts {
    size_t planes_bytes;           /* plane by plane */
    size_t scopes_bytes;           /* of the roots' sums */
    const tn__scope_object *wrong; /* deepest scope whose sums are not those of what is in it */
} counts;

static counts count_root(tn__scope_object *root) {
    counts counted = {.scopes_bytes = total_bytes(&root->sums)};
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        tn__sums sums = recount(scope);
        if (!sums_are_equal(&sums, &scope->sums)) counted.wrong = scope;
        for (tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
            TN_ASSERT_SLOW(tn__tensor_is_valid(tensor));
            tn__sums of_tensor = sums_of_tensor(tensor);
            counted.planes_bytes += total_bytes(&of_tensor);
        }
    }
    return counted;
}

tn_status tn_ledger_check(tn_pool *pool) {
    counts all = {0};
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    TN_REQUIRE(pool, "tn_ledger_check: the pool is NULL");
    tn__books *books = tn__books_find(pool);
    tn__scope_object *root = books ? books->first_root : NULL;
    for (; root; root = root->next) {
        counts counted = count_root(root);
        all.planes_bytes += counted.planes_bytes;
        all.scopes_bytes += counted.scopes_bytes;
        if (!all.wrong) all.wrong = counted.wrong;
    }
    tn_status status = tn_pool_stats_get(pool, &stats);
    if (status == TN_OK && (all.wrong || all.planes_bytes != all.scopes_bytes ||
                            all.planes_bytes != stats.owned_bytes)) {
        status =
            TN_FAIL(TN_LEAK,
                    "the ledger of pool %s does not balance: planes %zu bytes, scopes %zu "
                    "bytes, pool owned %zu bytes%s%s",
                    tn_pool_name(pool), all.planes_bytes, all.scopes_bytes, stats.owned_bytes,
                    all.wrong ? "; wrong sums in scope " : "", all.wrong ? all.wrong->name : "");
    }
    if (books) tn__unlock(books->lock);
    return status;
}
