/* Who has what of a unit, in three layouts: see tenure_shard.h.
 *
 * RAGGED is a partition of the unit's tile rows, in some order of its tensors, into rank_count
 * runs whose largest is as small as it can be: the smallest limit under which a greedy run needs no
 * more ranks is found by halving. The order is free. Which is best is a question of packing bins,
 * so all are tried of few tensors, and of many those sorted by size and what exchanges better them.
 */
#include "shard_plan.h"

#include "host_alloc.h"

#include <stdlib.h>
#include <string.h>

/* ---- what a rank has ------------------------------------------------------------------------ */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static void tile_rows_of(const tn_shard_plan *plan, const tn__shard_cut *cut, int tensor, int rank,
                         int64_t *first, int64_t *end) {
    const tn__shard_member *member = &plan->members[tensor];
    if (cut->layout == TN_SHARD_TILES) {
        int64_t share = tn__shard_ceil_div(member->tile_rows, plan->rank_count);
        *first = least(rank * share, member->tile_rows);
        *end = least((rank + 1) * share, member->tile_rows);
        return;
    }
    int64_t before = cut->before[cut->position[tensor]];
    *first = least(most(cut->bounds[rank] - before, 0), member->tile_rows);
    *end = least(most(cut->bounds[rank + 1] - before, 0), member->tile_rows);
}

void tn__shard_rows(const tn_shard_plan *plan, const tn__shard_cut *cut, int tensor, int rank,
                    int64_t *first, int64_t *rows) {
    const tn__shard_member *member = &plan->members[tensor];
    int64_t from, to;
    TN_ASSERT(cut->layout == TN_SHARD_TILES || cut->layout == TN_SHARD_RAGGED);
    TN_ASSERT(rank >= 0 && rank < plan->rank_count);
    tile_rows_of(plan, cut, tensor, rank, &from, &to);
    *first = to > from ? from * member->tile_height : 0;
    *rows = to > from ? least(to * member->tile_height, member->spec.rows) - *first : 0;
}

void tn__shard_flat_bytes(const tn_shard_plan *plan, const tn__shard_cut *cut, int tensor, int rank,
                          size_t *first, size_t *bytes) {
    const tn__shard_member *member = &plan->members[tensor];
    size_t begin = (size_t)rank * cut->flat_part, end = begin + cut->flat_part;
    size_t from = member->flat_offset, to = from + member->layout.data_bytes;
    TN_ASSERT(cut->layout == TN_SHARD_FLAT);
    if (from < begin) from = begin;
    if (to > end) to = end;
    *first = to > from ? from - member->flat_offset : 0;
    *bytes = to > from ? to - from : 0;
}

void tn__shard_elements(const tn_shard_plan *plan, const tn__shard_cut *cut, int tensor, int rank,
                        int64_t *first, int64_t *count) {
    const tn_shard_tensor *spec = &plan->members[tensor].spec;
    *first = *count = 0;
    if (plan->members[tensor].tile_rows == 0) return;
    if (cut->layout == TN_SHARD_FLAT) {
        size_t from, bytes, of_element = tn_dtype_bytes(spec->dtype);
        tn__shard_flat_bytes(plan, cut, tensor, rank, &from, &bytes);
        *first = (int64_t)(from / of_element);
        *count = (int64_t)(bytes / of_element);
        return;
    }
    tn__shard_rows(plan, cut, tensor, rank, first, count);
    *first *= spec->cols;
    *count *= spec->cols;
}

int tn__shard_is_even(const tn_shard_plan *plan) {
    for (int i = 0; i < plan->tensor_count; i++) {
        const tn__shard_member *member = &plan->members[i];
        int is_cut = plan->rank_count > 1 && member->tile_rows > 0;
        if (member->tile_rows % plan->rank_count) return 0;
        if (is_cut && member->spec.rows % member->tile_height) return 0;
    }
    return 1;
}

/* ---- the search for RAGGED ------------------------------------------------------------------ */

/* A greedy run over the unit's tile rows: each rank takes what fits under the limit. */
typedef struct filling {
    size_t limit, used;
    int rank, rank_count;
    int64_t at;
    int64_t *bounds; /* NULL: it is only counted */
} filling;

/* 0: there is no rank left. */
static int next_rank(filling *f) {
    if (++f->rank >= f->rank_count) return 0;
    if (f->bounds) f->bounds[f->rank] = f->at;
    f->used = 0;
    return 1;
}

static int take_tile_rows(filling *f, int64_t count, size_t bytes) {
    while (count > 0) {
        int64_t fit = bytes ? (int64_t)((f->limit - f->used) / bytes) : count;
        if (fit > count) fit = count;
        f->used += (size_t)fit * bytes;
        f->at += fit;
        count -= fit;
        if (count > 0 && !next_rank(f)) return 0;
    }
    return 1;
}

/* 1: the unit fits; then bounds, if given, say how. */
static int fill_ranks(const tn_shard_plan *plan, const int *order, size_t limit, int64_t *bounds) {
    filling f = {.limit = limit, .rank_count = plan->rank_count, .bounds = bounds};
    for (int i = 0; i < plan->tensor_count; i++) {
        const tn__shard_member *member = &plan->members[order[i]];
        if (member->tile_rows == 0) continue;
        if (!take_tile_rows(&f, member->tile_rows - 1, member->tile_bytes)) return 0;
        if (!take_tile_rows(&f, 1, member->last_tile_bytes)) return 0;
    }
    for (int rank = f.rank + 1; bounds && rank <= plan->rank_count; rank++)
        bounds[rank] = f.at;
    return 1;
}

/* No limit is less than the largest tile row, nor than the mean of the ranks. */
static void limits_of(const tn_shard_plan *plan, size_t *low, size_t *high) {
    size_t ranks = (size_t)plan->rank_count, largest = 0, sum = 0;
    for (int i = 0; i < plan->tensor_count; i++) {
        const tn__shard_member *member = &plan->members[i];
        if (member->tile_rows == 0) continue;
        sum += (size_t)(member->tile_rows - 1) * member->tile_bytes + member->last_tile_bytes;
        if (member->tile_bytes > largest) largest = member->tile_bytes;
    }
    size_t mean = sum / ranks + (sum % ranks != 0);
    *low = mean > largest ? mean : largest;
    *high = sum;
}

static size_t least_limit(const tn_shard_plan *plan, const int *order) {
    size_t low, high;
    limits_of(plan, &low, &high);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (fill_ranks(plan, order, middle, NULL))
            high = middle;
        else
            low = middle + 1;
    }
    return high;
}

/* ---- orders --------------------------------------------------------------------------------- */

/* Up to so many tensors have all their orders tried; of more, so many exchanges of two. */
enum { ALL_ORDERS_MAX = 7, EXCHANGES_MAX = 2000 };

/* The best order so far, and its limit. */
typedef struct search {
    const tn_shard_plan *plan;
    int *order; /* being tried */
    int *best;
    size_t limit;
    size_t bound; /* that no order can do better than */
} search;

/* The limits are searched only of an order that is better. */
static void try_order(search *s) {
    size_t bytes = (size_t)s->plan->tensor_count * sizeof *s->best;
    if (s->limit <= s->bound || !fill_ranks(s->plan, s->order, s->limit - 1, NULL)) return;
    s->limit = least_limit(s->plan, s->order);
    memcpy(s->best, s->order, bytes);
}

static void exchange(int *order, int a, int b) {
    int of_a = order[a];
    order[a] = order[b];
    order[b] = of_a;
}

/* Every order of the tensors from `first` on. */
static void try_all(search *s, int first) {
    if (first + 1 >= s->plan->tensor_count) try_order(s);
    for (int i = first; i < s->plan->tensor_count; i++) {
        exchange(s->order, first, i);
        try_all(s, first + 1);
        exchange(s->order, first, i);
    }
}

static int are_alike(const tn__shard_member *a, const tn__shard_member *b) {
    return a->tile_rows == b->tile_rows && a->tile_bytes == b->tile_bytes &&
           a->last_tile_bytes == b->last_tile_bytes;
}

/* From the best order so far on, two tensors at a time. */
static void try_exchanges(search *s) {
    int count = s->plan->tensor_count, left = EXCHANGES_MAX;
    for (int a = 0; a < count; a++) {
        for (int b = a + 1; b < count; b++) {
            const tn__shard_member *members = s->plan->members;
            if (are_alike(&members[s->best[a]], &members[s->best[b]])) continue;
            if (left-- == 0 || s->limit <= s->bound) return;
            memcpy(s->order, s->best, (size_t)count * sizeof *s->order);
            exchange(s->order, a, b);
            try_order(s);
        }
    }
}

typedef struct sort_key {
    size_t tile_bytes;
    int tensor;
} sort_key;

/* Large tile rows first; equal ones stay in the order of the unit. */
static int compare_keys(const void *left, const void *right) {
    const sort_key *a = left, *b = right;
    if (a->tile_bytes != b->tile_bytes) return a->tile_bytes > b->tile_bytes ? -1 : 1;
    return a->tensor - b->tensor;
}

static void try_sorted(search *s, sort_key *keys) {
    int count = s->plan->tensor_count;
    for (int i = 0; i < count; i++)
        keys[i] = (sort_key){s->plan->members[i].tile_bytes, i};
    qsort(keys, (size_t)count, sizeof *keys, compare_keys);
    for (int is_reversed = 0; is_reversed < 2; is_reversed++) {
        for (int i = 0; i < count; i++)
            s->order[i] = keys[is_reversed ? count - 1 - i : i].tensor;
        try_order(s);
    }
}

/* order: memory for the one being tried. The unit's own order is taken where no other is better. */
static void cut_ragged(const tn_shard_plan *plan, sort_key *keys, int *order, tn__shard_cut *cut) {
    search s = {.plan = plan, .order = order, .best = cut->order};
    size_t sum;
    memcpy(order, cut->order, (size_t)plan->tensor_count * sizeof *order);
    s.limit = least_limit(plan, order);
    limits_of(plan, &s.bound, &sum);
    if (plan->tensor_count <= ALL_ORDERS_MAX) {
        try_all(&s, 0);
    } else {
        try_sorted(&s, keys);
        try_exchanges(&s);
    }
    TN_CHECK(fill_ranks(plan, cut->order, s.limit, cut->bounds));
    for (int i = 0; i < plan->tensor_count; i++)
        cut->before[i + 1] = cut->before[i] + plan->members[cut->order[i]].tile_rows;
}

/* ---- cuts ----------------------------------------------------------------------------------- */

static void cut_flat(const tn_shard_plan *plan, tn__shard_cut *cut) {
    size_t end = 0, ranks = (size_t)plan->rank_count;
    for (int i = 0; i < plan->tensor_count; i++) {
        const tn__shard_member *member = &plan->members[i];
        if (member->layout.data_bytes) end = member->flat_offset + member->layout.data_bytes;
    }
    size_t part = end / ranks + (end % ranks != 0);
    cut->flat_part = tn__shard_round_up(part, TN__SHARD_FLAT_GRANULE);
}

tn_status tn__shard_cut_make(const tn_shard_plan *plan, tn_shard_layout layout,
                             tn__shard_cut *out) {
    size_t tensors = (size_t)plan->tensor_count, ranks = (size_t)plan->rank_count;
    *out = (tn__shard_cut){.layout = layout};
    out->order = tn__host_alloc(tensors + 1, sizeof *out->order);
    out->position = tn__host_alloc(tensors + 1, sizeof *out->position);
    if (!out->order || !out->position) return TN_OUT_OF_HOST_MEMORY;
    for (int i = 0; i < plan->tensor_count; i++)
        out->order[i] = i;
    if (layout == TN_SHARD_FLAT) cut_flat(plan, out);
    if (layout == TN_SHARD_RAGGED) {
        sort_key *keys = tn__host_alloc(tensors + 1, sizeof *keys);
        out->before = tn__host_alloc(tensors + 1, sizeof *out->before);
        out->bounds = tn__host_alloc(ranks + 1, sizeof *out->bounds);
        int *order = tn__host_alloc(tensors + 1, sizeof *order);
        int has_memory = keys && order && out->before && out->bounds;
        if (has_memory) cut_ragged(plan, keys, order, out);
        tn__host_free(keys);
        tn__host_free(order);
        if (!has_memory) return TN_OUT_OF_HOST_MEMORY;
    }
    for (int i = 0; i < plan->tensor_count; i++)
        out->position[out->order[i]] = i;
    return TN_OK;
}

void tn__shard_cut_end(tn__shard_cut *cut) {
    tn__host_free(cut->order);
    tn__host_free(cut->position);
    tn__host_free(cut->before);
    tn__host_free(cut->bounds);
    *cut = (tn__shard_cut){.layout = TN_SHARD_AUTO};
}
