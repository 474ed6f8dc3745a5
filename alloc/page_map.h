/* From an address to the region of a pool that it lies in, for the whole process.
 *
 *     57 bits of address = root 12 | middle 12 | leaf 12 | 21 bits inside a page of 2 MiB
 *
 * A leaf entry has two slots: regions are at least one page long, so a page that two of them
 * share is the last page of one and the first of the other, and never of three. Reads take no
 * lock (acquire loads); writes are under one mutex. Nodes are made on demand and live until the
 * last user (pool) is gone: an address is looked up only while some pool exists.
 */
#ifndef TENURE_PAGE_MAP_H
#define TENURE_PAGE_MAP_H

#include "error.h"

#define TN__MAP_PAGE_SHIFT 21
#define TN__MAP_PAGE_BYTES ((size_t)1 << TN__MAP_PAGE_SHIFT)
#define TN__MAP_BITS       57

/* What the map finds: the head of a region. Fixed while it is in the map. */
typedef struct tn__mapped_region {
    uintptr_t begin;
    uintptr_t end;
} tn__mapped_region;

/* Counts the pools; the nodes are freed when the last one is gone. */
void tn__page_map_retain(void);
void tn__page_map_release(void);

/* Adds a region of at least TN__MAP_PAGE_BYTES that overlaps no other. On failure nothing is
 * added: TN_OUT_OF_HOST_MEMORY, or TN_UNSUPPORTED for an address of more than 57 bits. */
tn_status tn__page_map_add(tn__mapped_region *region);
void tn__page_map_remove(tn__mapped_region *region);

/* The region with begin <= address < end; NULL if there is none. */
tn__mapped_region *tn__page_map_find(const void *address);

#endif
