/* The load of one thread: steps of a model whose shapes vary, and blocks that outlive them.
 *
 * A step allocates for each layer (forward), reads some of it on the thread's other stream, and
 * frees in the opposite order (backward). Some blocks stay for many steps; some are freed by
 * another thread. A request that is refused frees half of what the thread has, and the load goes
 * on: so memory is full most of the time.
 */
#include <stdio.h>
#include <stdlib.h>

#include "soak.h"

enum { LAYERS_MAX = 48 };

static const uint64_t poison_tag = 0xdeadbeefdeadbeefu;

static uint64_t next_random(soak_thread *me) {
    uint64_t x = me->random += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t below(soak_thread *me, uint64_t bound) { return next_random(me) % bound; }

/* Small blocks are most of the count, large ones most of the bytes. */
static size_t random_bytes(soak_thread *me) {
    uint64_t kind = below(me, 10);
    unsigned low = kind < 6 ? 9 : kind < 9 ? 20 : 26; /* powers of two */
    unsigned high = kind < 6 ? 20 : kind < 9 ? 26 : 31;
    unsigned power = low + (unsigned)below(me, high - low);
    size_t bytes = ((size_t)1 << power) + (size_t)below(me, (size_t)1 << power);
    size_t most = me->shared->limit_bytes / (size_t)me->shared->thread_count / 4;
    if (bytes > most) bytes = most;
    return bytes / 8 * 8;
}

/* Only the allocator knows when another stream has read it: to poison it before would be ours to
 * order. */
static void release_block(soak_thread *me, const soak_block *block) {
    soak_verify(me->shared, block, block->stream);
    if (!block->is_used_across) soak_fill(me->shared, block, poison_tag, block->stream);
    SOAK_TRY(tn_free(block->address, block->stream));
}

static void forget_block(soak_thread *me, int index) {
    me->live_bytes -= me->blocks[index].bytes;
    me->blocks[index] = me->blocks[--me->block_count];
}

static void free_at(soak_thread *me, int index) {
    release_block(me, &me->blocks[index]);
    forget_block(me, index);
}

/* ---- from thread to thread ------------------------------------------------------------------- */

static void hand_over(soak_thread *me, int index) {
    soak *shared = me->shared;
    int is_taken = 0;
    pthread_mutex_lock(&shared->mailbox_mutex);
    if (shared->mailbox_count < SOAK_MAILBOX) {
        shared->mailbox[shared->mailbox_count++] = me->blocks[index];
        is_taken = 1;
    }
    pthread_mutex_unlock(&shared->mailbox_mutex);
    if (!is_taken) return;
    forget_block(me, index);
    me->handed_over++;
}

static void empty_mailbox(soak_thread *me) {
    soak *shared = me->shared;
    for (;;) {
        soak_block block;
        int is_there = 0;
        pthread_mutex_lock(&shared->mailbox_mutex);
        if (shared->mailbox_count > 0) {
            block = shared->mailbox[--shared->mailbox_count];
            is_there = 1;
        }
        pthread_mutex_unlock(&shared->mailbox_mutex);
        if (!is_there) return;
        release_block(me, &block);
    }
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void free_half(soak_thread *me) {
    int keep = me->block_count / 2;
    while (me->block_count > keep)
        free_at(me, (int)below(me, (uint64_t)me->block_count));
    empty_mailbox(me);
}

static void allocate_one(soak_thread *me) {
    soak *shared = me->shared;
    soak_block block = {.bytes = random_bytes(me)};
    tn_status status;
    if (me->block_count == SOAK_BLOCKS_MAX) free_half(me);
    block.stream = me->streams[below(me, SOAK_STREAMS)];
    status = tn_alloc(shared->pool, block.bytes, block.stream, NULL, &block.address);
    if (status == TN_OUT_OF_DEVICE_MEMORY) {
        me->shortages++;
        free_half(me);
        return;
    }
    soak_require(status, "tn_alloc");
    block.tag = next_random(me);
    soak_fill(shared, &block, block.tag, block.stream);
    me->blocks[me->block_count++] = block;
    me->live_bytes += block.bytes;
    me->allocs++;
}

/* The other stream reads the block behind what its own has done with it. */
static void use_across(soak_thread *me, soak_block *block) {
    tn_stream other = me->streams[block->stream == me->streams[0]];
    SOAK_TRY(tn_stream_wait(me->shared->device, other, block->stream));
    soak_verify(me->shared, block, other);
    SOAK_TRY(tn_record_use(block->address, other));
    block->is_used_across = 1;
}

static void run_step(soak_thread *me) {
    int layers = 4 + (int)below(me, LAYERS_MAX - 4);
    int first = me->block_count;
    for (int i = 0; i < layers; i++) {
        allocate_one(me);
        if (me->block_count > 0 && below(me, 3) == 0) {
            use_across(me, &me->blocks[below(me, (uint64_t)me->block_count)]);
        }
    }
    while (me->block_count > first) {
        uint64_t fate = below(me, 16);
        if (fate == 0) {
            first++; /* stays for later steps */
        } else if (fate == 1) {
            hand_over(me, me->block_count - 1);
            if (below(me, 4) == 0) empty_mailbox(me);
        } else {
            free_at(me, me->block_count - 1);
        }
    }
}

/* What has piled up beyond the thread's share leaves again, the oldest as likely as the newest. */
static void keep_share(soak_thread *me) {
    size_t share = me->shared->limit_bytes / (size_t)me->shared->thread_count;
    while (me->live_bytes > share && me->block_count > 0)
        free_at(me, (int)below(me, (uint64_t)me->block_count));
}

void *soak_thread_run(void *argument) {
    soak_thread *me = argument;
    for (int i = 0; i < SOAK_STREAMS; i++)
        SOAK_TRY(tn_stream_create(me->shared->device, &me->streams[i]));
    while (soak_now() < me->shared->deadline_s) {
        run_step(me);
        keep_share(me);
    }
    while (me->block_count > 0)
        free_at(me, me->block_count - 1);
    empty_mailbox(me);
    return NULL;
}
