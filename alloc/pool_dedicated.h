/* Memory with a physical handle of its own: blocks that asked for one, and blocks of others.
 *
 *   dedicated   one block, one handle, one mapping: registration with a network card or NCCL sees
 *               one handle, and a shareable one can be given to another process. Freed, it is kept
 *               for a request of just that size; one that was exported is not, since nobody knows
 *               when the others end: it goes back as soon as its last use has completed.
 *   guest       memory that another process exported, mapped here: on nobody's books here, and not
 *               to be freed, but closed. Imported again, it is the same mapping, counted.
 *
 * Either is a region of one page. Everything here is under the pool's mutex.
 */
#ifndef TENURE_POOL_DEDICATED_H
#define TENURE_POOL_DEDICATED_H

#include "heap.h"
#include "pool_backing.h"

/* A handle and where it is mapped, as it is made and as it is undone: what a failing undo leaves
 * can be undone again. */
typedef struct tn__own_mapping {
    struct tn__own_mapping *next; /* in the pool's list of those that are stuck */
    void *address;
    size_t bytes;
    tn__handle handle;
    int has_handle;
    int has_address;
    int is_mapped;
    int is_reserved; /* the pool's own memory: on its books */
} tn__own_mapping;

/* Reserves addresses for the mapping's handle and maps it there, for the device and its peers. What
 * a failure leaves is to be undone. */
tn_status tn__own_mapping_place(struct tn_pool *pool, tn__own_mapping *mapping);

/* Gives back all that there is of it, after a failure, and frees the memory that it is the first
 * member of; the failure's text stays. What the driver refuses is stuck: held, and tried again. */
void tn__own_mapping_undo(struct tn_pool *pool, tn__own_mapping *mapping);

typedef struct tn__dedicated {
    tn__own_mapping mapping; /* first */
    int is_shareable;
    int is_exported;
    uint64_t id[2]; /* 0: it was never exported */
} tn__dedicated;

typedef struct tn__guest {
    tn__own_mapping mapping; /* first */
    uint64_t id[2];
    uint64_t references; /* 0: it goes when its uses have completed */
} tn__guest;

/* The size of the block's handle: the request's, up to whole granules. */
size_t tn__dedicated_bytes(const struct tn_pool *pool, size_t asked_bytes);

/* TN_UNSUPPORTED or TN_INVALID_ARGUMENT in words if the pool can not make such a block. */
tn_status tn__dedicated_check(const struct tn_pool *pool, const tn__request *request);

/* As tn__heap_find_run: a freed block of just that size and kind. */
int tn__dedicated_find(struct tn_pool *pool, const tn__request *request, tn__place *out);

/* As a backing's grow, release and close. */
tn_status tn__dedicated_grow(struct tn_pool *pool, const tn__request *request, tn__effort effort,
                             tn__place *out);
tn_status tn__dedicated_release(struct tn_pool *pool, tn__release *release);
tn_status tn__dedicated_close(struct tn_pool *pool);

/* Gives back what waited for its last use: exported blocks that were freed, guests that were
 * closed. What the driver refuses is tried again the next time. */
void tn__dedicated_collect(struct tn_pool *pool);

/* The open guest that begins at the address; NULL: none does. */
tn__piece *tn__guest_find(struct tn_pool *pool, uintptr_t address);

/* TN_LEAK if guests are still open. */
tn_status tn__guests_check_closed(struct tn_pool *pool);

#endif
