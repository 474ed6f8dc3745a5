/* The radix tree of page_map.h. */
#include "page_map.h"

#include <pthread.h>
#include <stdatomic.h>

#include "driver.h"
#include "host_alloc.h"

#define LEVEL_BITS  12
#define LEVEL_COUNT ((size_t)1 << LEVEL_BITS)

typedef struct map_leaf {
    _Atomic(struct tn_pool *) slots[LEVEL_COUNT][2];
    _Atomic uint16_t borders[LEVEL_COUNT]; /* where slot 1 begins, in units of TN__MAP_ALIGN */
} map_leaf;

typedef struct map_middle {
    _Atomic(map_leaf *) leaves[LEVEL_COUNT];
} map_middle;

static _Atomic(map_middle *) root[LEVEL_COUNT];
static pthread_mutex_t map_mutex = PTHREAD_MUTEX_INITIALIZER;

static size_t root_index(uintptr_t page) { return page >> (2 * LEVEL_BITS); }
static size_t middle_index(uintptr_t page) { return (page >> LEVEL_BITS) & (LEVEL_COUNT - 1); }
static size_t leaf_index(uintptr_t page) { return page & (LEVEL_COUNT - 1); }

/* dlclose: nobody can ask any more. When the process exits, other threads may still be at it. */
__attribute__((destructor)) static void free_nodes(void) {
    if (tn__driver_is_gone()) return;
    for (size_t r = 0; r < LEVEL_COUNT; r++) {
        map_middle *middle = atomic_load(&root[r]);
        if (!middle) continue;
        for (size_t m = 0; m < LEVEL_COUNT; m++)
            tn__host_free_lasting(atomic_load(&middle->leaves[m]));
        tn__host_free_lasting(middle);
        atomic_store(&root[r], NULL);
    }
}

static map_leaf *find_leaf(uintptr_t page) {
    map_middle *middle;
    if (root_index(page) >= LEVEL_COUNT) return NULL;
    middle = atomic_load_explicit(&root[root_index(page)], memory_order_acquire);
    if (!middle) return NULL;
    return atomic_load_explicit(&middle->leaves[middle_index(page)], memory_order_acquire);
}

/* Under the mutex: the leaf of a page, made if need be; NULL without host memory. */
static map_leaf *make_leaf(uintptr_t page) {
    map_middle *middle = atomic_load(&root[root_index(page)]);
    map_leaf *leaf;
    if (!middle) {
        middle = tn__host_alloc_lasting(1, sizeof *middle);
        if (!middle) return NULL;
        atomic_store_explicit(&root[root_index(page)], middle, memory_order_release);
    }
    leaf = atomic_load(&middle->leaves[middle_index(page)]);
    if (!leaf) {
        leaf = tn__host_alloc_lasting(1, sizeof *leaf);
        if (!leaf) return NULL;
        atomic_store_explicit(&middle->leaves[middle_index(page)], leaf, memory_order_release);
    }
    return leaf;
}

/* Under the mutex: the region's slot of one of its pages. */
static _Atomic(struct tn_pool *) *slot_of(const tn__mapped_region *region, uintptr_t page) {
    int is_second = region->begin > page << TN__MAP_PAGE_SHIFT;
    return &find_leaf(page)->slots[leaf_index(page)][is_second];
}

/* Under the mutex: puts `to` where `from` is, in the region's slot of one of its pages. */
static void replace_slot(const tn__mapped_region *region, uintptr_t page, struct tn_pool *from,
                         struct tn_pool *to) {
    map_leaf *leaf = find_leaf(page);
    uintptr_t page_begin = page << TN__MAP_PAGE_SHIFT;
    int is_second = region->begin > page_begin;
    _Atomic(struct tn_pool *) *entry = slot_of(region, page);
    TN_CHECK(atomic_load(entry) == from);
    if (is_second) {
        uint16_t border = (uint16_t)((region->begin - page_begin) / TN__MAP_ALIGN);
        atomic_store_explicit(&leaf->borders[leaf_index(page)], border, memory_order_relaxed);
    }
    atomic_store_explicit(entry, to, memory_order_release);
}

tn_status tn__page_map_add(tn__mapped_region *region) {
    uintptr_t first = region->begin >> TN__MAP_PAGE_SHIFT;
    uintptr_t last = (region->end - 1) >> TN__MAP_PAGE_SHIFT;
    tn_status status = TN_OK;
    TN_ASSERT(region->end - region->begin >= TN__MAP_PAGE_BYTES);
    TN_ASSERT(region->begin % TN__MAP_ALIGN == 0);
    if (last >> (TN__MAP_BITS - TN__MAP_PAGE_SHIFT)) {
        return TN_FAIL(TN_UNSUPPORTED, "the driver gave memory at %#zx, beyond %d bits of address",
                       (size_t)region->end, TN__MAP_BITS);
    }
    pthread_mutex_lock(&map_mutex);
    /* First all the nodes, so that nothing can fail once an entry is written. */
    for (uintptr_t page = first; page <= last && status == TN_OK;
         page = (page | (LEVEL_COUNT - 1)) + 1) {
        if (!make_leaf(page)) status = TN_OUT_OF_HOST_MEMORY;
    }
    for (uintptr_t page = first; page <= last && status == TN_OK; page++) {
        if (!atomic_load(slot_of(region, page))) continue;
        status = TN_FAIL(TN_IN_USE, "memory at %#zx is a pool's already", (size_t)region->begin);
    }
    for (uintptr_t page = first; page <= last && status == TN_OK; page++)
        replace_slot(region, page, NULL, region->pool);
    region->is_in_map = status == TN_OK;
    pthread_mutex_unlock(&map_mutex);
    return status;
}

void tn__page_map_remove(tn__mapped_region *region) {
    uintptr_t first = region->begin >> TN__MAP_PAGE_SHIFT;
    uintptr_t last = (region->end - 1) >> TN__MAP_PAGE_SHIFT;
    if (!region->is_in_map) return;
    pthread_mutex_lock(&map_mutex);
    for (uintptr_t page = first; page <= last; page++)
        replace_slot(region, page, region->pool, NULL);
    region->is_in_map = 0;
    pthread_mutex_unlock(&map_mutex);
}

/* The nodes are there since the first time. */
void tn__page_map_restore(tn__mapped_region *region) {
    tn_status status = tn__page_map_add(region);
    TN_CHECK(status == TN_OK);
}

struct tn_pool *tn__page_map_find(const void *address) {
    uintptr_t at = (uintptr_t)address;
    uintptr_t page = at >> TN__MAP_PAGE_SHIFT;
    const map_leaf *leaf = find_leaf(page);
    struct tn_pool *second;
    if (!leaf) return NULL;
    second = atomic_load_explicit(&leaf->slots[leaf_index(page)][1], memory_order_acquire);
    if (second) {
        size_t offset = (at & (TN__MAP_PAGE_BYTES - 1)) / TN__MAP_ALIGN;
        uint16_t border =
            atomic_load_explicit(&leaf->borders[leaf_index(page)], memory_order_relaxed);
        if (offset >= border) return second;
    }
    return atomic_load_explicit(&leaf->slots[leaf_index(page)][0], memory_order_acquire);
}
