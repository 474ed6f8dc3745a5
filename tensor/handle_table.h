/* Handles: 64-bit values that name a scope, tensor or lease and tell when it is gone.
 *
 *     63          32 31  28 27             0
 *     | generation  | kind |     index      |      0 is no handle
 *
 * One table for the process. A slot's generation grows each time its object ends, so an old value
 * never matches again. Each object names the lock that guards it; locks are static, so that a
 * value that died meanwhile is found out under the lock and never by touching freed memory.
 */
#ifndef TENURE_HANDLE_TABLE_H
#define TENURE_HANDLE_TABLE_H

#include "error.h"

typedef enum tn__handle_kind {
    TN__HANDLE_SCOPE = 1,
    TN__HANDLE_TENSOR,
    TN__HANDLE_LEASE
} tn__handle_kind;

enum { TN__LOCK_COUNT = 16 };

/* The locks of the objects: pools are spread over them. Not recursive. */
void tn__lock(unsigned lock);
void tn__unlock(unsigned lock);

/* What must run without the lock, such as functions of the program: tn__unlock runs it, in the
 * order in which it was put in, right after it has given the lock up. The caller holds the lock and
 * keeps the item's memory, which `run` may free. This thread's last error stays what it was. */
typedef struct tn__deferred {
    struct tn__deferred *next;
    void (*run)(struct tn__deferred *self);
} tn__deferred;
void tn__defer(unsigned lock, tn__deferred *item);

/* A handle of `object`, which `lock` guards. TN_OUT_OF_HOST_MEMORY; then nothing has changed. */
tn_status tn__handle_create(tn__handle_kind kind, void *object, unsigned lock, uint64_t *out);

/* Ends a handle that is alive; its lock is held. */
void tn__handle_destroy(uint64_t value);

/* The object of a handle that is alive, with its lock held. Else TN_STALE_HANDLE, none held. */
tn_status tn__handle_acquire(uint64_t value, tn__handle_kind kind, void **object);

/* The same for a caller that holds the lock: NULL if it is not alive or another lock's. */
void *tn__handle_peek(uint64_t value, tn__handle_kind kind, unsigned lock);

/* Handles alive now; 0 means that the table holds no host memory. */
uint64_t tn__handle_count(void);

/* First generation of slots made from now on; the table must be empty. For tests of wrap-around. */
void tn__handle_start_at(uint32_t generation);

#endif
