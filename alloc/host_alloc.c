/* The one home of the library's own host memory, with its fault hook.
 *
 * Invariant: live_blocks is the number of blocks that were given out and not freed, without those
 * that last.
 */
#include "host_alloc.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static atomic_long live_blocks;
static atomic_long calls_to_fault; /* 0: none; n: the nth call from now fails */
static atomic_int fault_and_after;

static int is_faulted(void) {
    long left = atomic_load_explicit(&calls_to_fault, memory_order_relaxed);
    while (left > 0) {
        long next = left > 1 || !atomic_load(&fault_and_after) ? left - 1 : left;
        if (atomic_compare_exchange_weak(&calls_to_fault, &left, next)) return left == 1;
    }
    return 0;
}

static void *no_memory(size_t count, size_t item_bytes) {
    (void)TN_FAIL(TN_OUT_OF_HOST_MEMORY, "no host memory for %zu items of %zu bytes", count,
                  item_bytes);
    return NULL;
}

void *tn__host_alloc(size_t count, size_t item_bytes) {
    void *memory = is_faulted() ? NULL : calloc(count ? count : 1, item_bytes ? item_bytes : 1);
    if (!memory) return no_memory(count, item_bytes);
    atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    return memory;
}

void *tn__host_alloc_lasting(size_t count, size_t item_bytes) {
    void *memory = tn__host_alloc(count, item_bytes);
    if (memory) atomic_fetch_sub_explicit(&live_blocks, 1, memory_order_relaxed);
    return memory;
}

void *tn__host_alloc_aligned(size_t bytes, size_t alignment) {
    size_t rounded = (bytes + alignment - 1) & ~(alignment - 1);
    void *memory = is_faulted() || rounded < bytes ? NULL : aligned_alloc(alignment, rounded);
    if (!memory) return no_memory(1, bytes);
    memset(memory, 0, rounded);
    atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    return memory;
}

void *tn__host_realloc(void *memory, size_t old_count, size_t new_count, size_t item_bytes) {
    size_t new_bytes;
    if (!memory) return tn__host_alloc(new_count, item_bytes);
    if (__builtin_mul_overflow(new_count, item_bytes, &new_bytes) || is_faulted()) {
        return no_memory(new_count, item_bytes);
    }
    unsigned char *grown = realloc(memory, new_bytes ? new_bytes : 1);
    if (!grown) return no_memory(new_count, item_bytes);
    size_t old_bytes = old_count * item_bytes;
    if (new_bytes > old_bytes) memset(grown + old_bytes, 0, new_bytes - old_bytes);
    return grown;
}

void tn__host_free(void *memory) {
    if (!memory) return;
    atomic_fetch_sub_explicit(&live_blocks, 1, memory_order_relaxed);
    free(memory);
}

void tn__host_free_lasting(void *memory) { free(memory); }

char *tn__host_strdup(const char *text) {
    size_t bytes = strlen(text) + 1;
    char *copy = tn__host_alloc(bytes, 1);
    if (copy) memcpy(copy, text, bytes);
    return copy;
}

long tn__host_live_blocks(void) { return atomic_load(&live_blocks); }

long tn__host_alloc_fault(long nth, int and_after) {
    const long left = atomic_exchange(&calls_to_fault, 0);
    atomic_store(&fault_and_after, and_after);
    atomic_store(&calls_to_fault, nth > 0 ? nth : 0);
    return left;
}
