/* Which streams use a block beside its own, until it is freed.
 *
 * Frameworks say so once, when a block is handed to another stream, and mean all work that is put
 * there until the block is freed (tn_record_use means the work that is there now). So the streams
 * are kept here, and each is recorded at the free. Few blocks have any: `count` is 0 for a program
 * that uses one stream, and a free then looks no further.
 */
#ifndef TENURE_STREAM_USES_H
#define TENURE_STREAM_USES_H

#include <pthread.h>
#include <stdatomic.h>

#include "tenure_alloc.h"

enum { TN__STREAM_USE_BUCKETS = 1024 };

typedef struct tn__stream_use {
    struct tn__stream_use *next;
    const void *block;
    tn_stream stream;
} tn__stream_use;

typedef struct tn__stream_uses {
    pthread_mutex_t mutex;
    tn__stream_use *buckets[TN__STREAM_USE_BUCKETS];
    atomic_size_t count;
} tn__stream_uses;

void tn__stream_uses_init(tn__stream_uses *uses);
void tn__stream_uses_deinit(tn__stream_uses *uses);

/* The same stream again is one use. TN_OUT_OF_HOST_MEMORY. */
tn_status tn__stream_uses_add(tn__stream_uses *uses, const void *block, tn_stream stream);

/* Takes the block's uses out and returns them, linked by next; free each with tn__host_free. */
tn__stream_use *tn__stream_uses_take(tn__stream_uses *uses, const void *block);

/* What was taken out is there again: the block was not freed. */
void tn__stream_uses_put(tn__stream_uses *uses, tn__stream_use *taken);

/* Ends what was taken out for nothing: the block is freed once nothing can use it any more. */
void tn__stream_uses_drop(tn__stream_use *taken);

#endif
