/* Frees that can not be done at once.
 *
 *     ordered     the block may not be freed on its stream now, which is in a capture that the
 *                 block is no part of: tried again once that may have ended
 *     unordered   nobody tells which streams use the block (cudaFree has no stream): done once the
 *                 devices were seen idle
 *
 * Waiting for the devices at each free would stop them each time, so unordered frees are collected:
 * one wait serves all that are there. It is made when they have grown to a part of the device's
 * memory, when memory is short, and when caches are to be emptied; never while a framework captures
 * a graph, which it would spoil.
 *
 * A free can not fail, and must not for want of memory: who takes a block that is freed unordered
 * promises so, and an entry for it is made then.
 *
 * A flush takes the list out while it waits. Another thread that is short meanwhile has to wait for
 * that flush, or it would fail for want of memory that is on its way back.
 *
 * Invariants: a block that waits here is live in its pool, and in its bucket, once; bytes is the
 * sum of unordered ones.
 */
#ifndef TENURE_LATE_FREES_H
#define TENURE_LATE_FREES_H

#include <pthread.h>
#include <stdatomic.h>

#include "tenure_pool.h"

struct tn__adapter;

enum { TN__LATE_FREE_BUCKETS = 256 };

typedef struct tn__late_free {
    struct tn__late_free *next;
    struct tn__late_free *next_in_bucket;
    void *block;
    tn_stream stream; /* of an ordered one */
    size_t bytes;     /* of an unordered one; 0: it is ordered */
} tn__late_free;

typedef struct tn__late_frees {
    pthread_mutex_t mutex;
    tn__late_free *list;
    tn__late_free *spare; /* promised */
    tn__late_free *buckets[TN__LATE_FREE_BUCKETS];
    atomic_size_t count; /* in the buckets */
    size_t bytes;
    size_t bytes_max; /* beyond it the devices are waited for */
    size_t flushes;   /* under way: each has taken a list out */
    pthread_cond_t flushed;
    _Atomic uint64_t freed; /* blocks, by flushes of all threads so far */
} tn__late_frees;

void tn__late_frees_init(tn__late_frees *late, size_t device_bytes);
void tn__late_frees_deinit(tn__late_frees *late);

/* One unordered free more can not fail; or one less is to come. TN_OUT_OF_HOST_MEMORY. */
tn_status tn__late_frees_promise(tn__late_frees *late);
void tn__late_frees_unpromise(tn__late_frees *late);

/* bytes 0: an ordered free. TN_INVALID_ARGUMENT: the block waits already. What was promised takes
 * its entry and can not fail otherwise; else TN_OUT_OF_HOST_MEMORY: the block is in no list. */
tn_status tn__late_frees_add(tn__late_frees *late, void *block, tn_stream stream, size_t bytes,
                             int is_promised);

/* TN_INVALID_ARGUMENT in words if the block waits to be freed. */
TN_MUST_USE tn_status tn__late_frees_refuse(tn__late_frees *late, const void *block);

/* 1 if unordered frees have grown enough to be worth a wait. */
int tn__late_frees_are_many(tn__late_frees *late);

/* Frees what can be. If may_wait it waits first: for other threads' flushes, and for the devices if
 * there are unordered ones. What can still not be freed stays in the list; `freed` counts the rest.
 */
void tn__late_frees_flush(struct tn__adapter *adapter, int may_wait);

#endif
