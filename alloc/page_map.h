/* From an address to the pool whose region it lies in, for the whole process.
 *
 *     57 bits of address = root 12 | middle 12 | leaf 12 | 21 bits inside a page of 2 MiB
 *
 * Regions are at least one page long, so a page that two of them share is the last of one and the
 * first of the other, and never of three. A leaf entry has a slot for each, and the offset in the
 * page at which the second begins:
 *
 *     |   page   |   page   |   page   |          slots of the page in the middle:
 *     |-- region A ---|-- region B ----|          [0] A's pool, [1] B's pool, border: B's begin
 *
 * Reads take no lock (acquire loads) and look into no region: one may be removed meanwhile, and
 * the answer for addresses of others stays right. Writes are under one mutex. Nodes are made on
 * demand and stay while the library is loaded: a thread may ask for any address, also of no pool,
 * while the last pool ends. Each serves 8 GiB of addresses, which a driver uses again and again.
 */
#ifndef TENURE_PAGE_MAP_H
#define TENURE_PAGE_MAP_H

#include "error.h"

#define TN__MAP_PAGE_SHIFT 21
#define TN__MAP_PAGE_BYTES ((size_t)1 << TN__MAP_PAGE_SHIFT)
#define TN__MAP_BITS       57

/* Its ends are fixed while it is in the map. Begins at a multiple of TN__MAP_ALIGN. */
typedef struct tn__mapped_region {
    uintptr_t begin;
    uintptr_t end;
    struct tn_pool *pool;
    int is_in_map;
} tn__mapped_region;
#define TN__MAP_ALIGN ((size_t)512)

/* Adds a region of at least TN__MAP_PAGE_BYTES. On failure nothing is added: TN_OUT_OF_HOST_MEMORY,
 * TN_UNSUPPORTED for an address of more than 57 bits, or TN_IN_USE if it overlaps another (but for
 * the last page of that one, where only its pool can tell). */
tn_status tn__page_map_add(tn__mapped_region *region);

/* Before the driver gets the addresses back: at once it may give them to another pool, on another
 * thread. A region that is not in the map stays so. */
void tn__page_map_remove(tn__mapped_region *region);

/* The driver did not take them back: can not fail. */
void tn__page_map_restore(tn__mapped_region *region);

/* The pool of the region that holds the address. NULL if none does; an address that is in no
 * region but in the last page of one, behind its end, finds that one's pool. */
TN_SISTER_API struct tn_pool *tn__page_map_find(const void *address);

#endif
