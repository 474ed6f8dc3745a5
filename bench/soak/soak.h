/* tenure-soak: random training-like load from many threads, every byte checked on the device.
 *
 * Each block is filled with a pattern of its own, read back by kernels on its stream and on others,
 * and poisoned before it is freed. If memory were handed out twice, moved while in use, or reused
 * before its last use, some kernel would read another pattern; each such word is counted. So the
 * sum must be 0, the books must balance, and reserved memory must stay within the pool's limit.
 */
#ifndef TENURE_SOAK_H
#define TENURE_SOAK_H

#include <pthread.h>

#include "driver.h"

enum { SOAK_THREADS_MAX = 64, SOAK_BLOCKS_MAX = 4096, SOAK_MAILBOX = 64, SOAK_STREAMS = 2 };

typedef struct soak_block {
    void *address;
    size_t bytes; /* a multiple of 8 */
    uint64_t tag;
    tn_stream stream;
    int is_used_across; /* another stream may read it until its end */
} soak_block;

typedef struct soak {
    tn_device *device;
    tn_device_info info;
    tn_pool *pool;
    void *module;
    tn__function fill;
    tn__function verify;
    uint64_t *errors; /* device memory: words that were read and not as written */
    size_t limit_bytes;
    uint64_t seed;
    double deadline_s; /* of soak_now */
    int thread_count;
    pthread_mutex_t mailbox_mutex;
    soak_block mailbox[SOAK_MAILBOX]; /* blocks that some other thread is to free */
    int mailbox_count;
} soak;

typedef struct soak_thread {
    soak *shared;
    pthread_t thread;
    uint64_t random;
    tn_stream streams[SOAK_STREAMS];
    soak_block blocks[SOAK_BLOCKS_MAX];
    int block_count;
    size_t live_bytes;
    uint64_t allocs;
    uint64_t shortages; /* requests that were refused for want of memory */
    uint64_t handed_over;
} soak_thread;

/* Ends the program if the status is a failure. */
#define SOAK_TRY(call) soak_require((call), #call)
void soak_require(tn_status status, const char *call);

double soak_now(void);

/* ---- soak_work.c: what the device does, on each kind of driver ---------------------------- */

void soak_work_open(soak *shared);
void soak_work_close(soak *shared);
void soak_fill(soak *shared, const soak_block *block, uint64_t tag, tn_stream stream);
void soak_verify(soak *shared, const soak_block *block, tn_stream stream);

/* ---- soak_thread.c: the load of one thread ------------------------------------------------- */

void *soak_thread_run(void *thread);

#endif
