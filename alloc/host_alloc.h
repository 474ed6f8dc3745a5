/* All host memory of the library's own metadata comes from here and from nowhere else.
 *
 * Zeroed memory; a fault hook fails the N-th call, once or from then on, for the tests that
 * loop over every host allocation of an operation. Counts are exact and thread-safe.
 */
#ifndef TENURE_HOST_ALLOC_H
#define TENURE_HOST_ALLOC_H

#include "error.h"

/* `count` zeroed items of `item_bytes`; NULL if there is no memory or the product overflows
 * (and then TN_OUT_OF_HOST_MEMORY has been recorded as this thread's last error). */
TN_SISTER_API void *tn__host_alloc(size_t count, size_t item_bytes);

/* The same for one item at a multiple of `alignment`, a power of two. */
TN_SISTER_API void *tn__host_alloc_aligned(size_t bytes, size_t alignment);

/* Grows or shrinks; new bytes are zero. On NULL the old memory is untouched. */
TN_SISTER_API void *tn__host_realloc(void *memory, size_t old_count, size_t new_count,
                                     size_t item_bytes);
TN_SISTER_API void tn__host_free(void *memory);
TN_SISTER_API char *tn__host_strdup(const char *text);

/* For what stays while the library is loaded: not among the blocks alive. */
void *tn__host_alloc_lasting(size_t count, size_t item_bytes);
void tn__host_free_lasting(void *memory);

/* Blocks alive now: 0 once everything is destroyed. */
TN_SISTER_API long tn__host_live_blocks(void);

/* The nth call from now on (1 is the next) fails; if `and_after`, so do all later ones. nth 0
 * ends the faults. Returns how many calls the one before was still away; 0: it has come, or there
 * was none. For tests. */
TN_SISTER_API long tn__host_alloc_fault(long nth, int and_after);

#endif
