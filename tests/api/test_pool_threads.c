/* Many threads on one pool of the host driver, each with its stream, passing blocks on to the next
 * thread that frees them. What one writes the next reads back, and in the end nothing is live. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "test_pools.h"

enum { THREADS = 4, ROUNDS = 400, PASSED = 8 };

typedef struct shared {
    tn_device *device;
    tn_pool *pool;
    pthread_mutex_t mutex;
    struct {
        unsigned char *block;
        size_t bytes;
        tn_stream writer;
        unsigned char value;
    } passed[PASSED];
} shared;

typedef struct worker {
    shared *shared;
    pthread_t thread;
    tn_stream stream;
    unsigned index;
    const char *failure;
} worker;

static int fails(worker *w, tn_status status, const char *what) {
    if (status == TN_OK) return 0;
    w->failure = what;
    return 1;
}

/* Takes what another thread has left in the slot: reads it on this stream, then frees it here. */
static int consume(worker *w, unsigned slot, unsigned char *block, size_t bytes) {
    shared *s = w->shared;
    unsigned char *other;
    unsigned char back = 0;
    unsigned char value;
    size_t other_bytes;
    tn_stream writer;
    pthread_mutex_lock(&s->mutex);
    other = s->passed[slot].block;
    other_bytes = s->passed[slot].bytes;
    writer = s->passed[slot].writer;
    value = s->passed[slot].value;
    s->passed[slot].block = block;
    s->passed[slot].bytes = bytes;
    s->passed[slot].writer = w->stream;
    s->passed[slot].value = (unsigned char)w->index;
    pthread_mutex_unlock(&s->mutex);
    if (!other) return 0;
    if (fails(w, tn_stream_wait(s->device, w->stream, writer), "wait")) return 1;
    if (fails(w, tn_copy(s->device, &back, other + other_bytes - 1, 1, w->stream), "copy")) {
        return 1;
    }
    if (fails(w, tn_record_use(other, w->stream), "record_use")) return 1;
    if (fails(w, tn_stream_synchronize(s->device, w->stream), "synchronize")) return 1;
    if (back != value) {
        w->failure = "another block's bytes were read";
        return 1;
    }
    return fails(w, tn_free(other, w->stream), "free");
}

static void *work(void *argument) {
    worker *w = argument;
    shared *s = w->shared;
    for (unsigned round = 0; round < ROUNDS; round++) {
        size_t bytes = 1 + (round * 7919u + w->index * 104729u) % (round % 5 ? 5000 : 3000000);
        void *block = NULL;
        if (fails(w, tn_alloc(s->pool, bytes, w->stream, NULL, &block), "alloc")) break;
        if (fails(w, tn_fill(s->device, block, (unsigned char)w->index, bytes, w->stream), "fill"))
            break;
        if (consume(w, (round + w->index) % PASSED, block, bytes)) break;
        if (round % 50 == 0) {
            tn_pool_stats stats = TN_POOL_STATS_INIT;
            if (fails(w, tn_pool_stats_get(s->pool, &stats), "stats")) break;
            if (fails(w, tn_pool_check(s->pool), "check")) break;
            if (fails(w, tn_pool_trim(s->pool, 32 << 20, NULL), "trim")) break;
        }
    }
    return NULL;
}

static void threads_pass_blocks_to_each_other(void **state) {
    static worker workers[THREADS];
    static shared s;
    tn_pool_stats stats;
    (void)state;
    s.device = test_open_host();
    s.pool = test_open_pool(s.device, TN_BACKING_AUTO, 0);
    pthread_mutex_init(&s.mutex, NULL);
    for (unsigned i = 0; i < THREADS; i++) {
        workers[i].shared = &s;
        workers[i].index = i + 1;
        workers[i].stream = test_open_stream(s.device);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    for (int i = 0; i < THREADS; i++) {
        if (workers[i].failure) fail_msg("thread %d: %s", i, workers[i].failure);
    }
    for (int i = 0; i < PASSED; i++) {
        if (s.passed[i].block) test_give(s.pool, s.passed[i].block, workers[0].stream);
    }
    stats = test_pool_stats(s.pool);
    assert_int_equal(stats.allocs, THREADS * ROUNDS);
    assert_int_equal(stats.frees, THREADS * ROUNDS);
    assert_int_equal(stats.live_bytes, 0);
    EXPECT_OK(tn_pool_destroy(s.pool));
    for (int i = 0; i < THREADS; i++)
        EXPECT_OK(tn_stream_destroy(s.device, workers[i].stream));
    EXPECT_OK(tn_device_destroy(s.device));
    pthread_mutex_destroy(&s.mutex);
}

/* ---- addresses of no pool -------------------------------------------------------------------- */

enum { LAST_POOLS = 300 };

typedef struct stranger {
    _Atomic(void *) address; /* of a block that was; NULL: it is over */
    atomic_int wrong;
} stranger;

/* Whatever lives there meanwhile, an address in the middle of a block is no block. */
static void *free_what_is_no_block(void *argument) {
    stranger *s = argument;
    char *address;
    while ((address = atomic_load(&s->address))) {
        if (tn_free(address + 512, NULL) != TN_INVALID_ARGUMENT) atomic_fetch_add(&s->wrong, 1);
    }
    return NULL;
}

/* The process's last pool ends again and again, while another thread looks addresses up. */
static void addresses_are_looked_up_while_the_last_pool_ends(void **state) {
    tn_device *device = test_open_host();
    pthread_t thread;
    stranger s;
    void *block;
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    (void)state;
    block = test_take(pool, 3 * MIB_BYTES, NULL);
    atomic_init(&s.wrong, 0);
    atomic_init(&s.address, (char *)block + 40 * MIB_BYTES); /* near by, and in no segment */
    test_give(pool, block, NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    assert_int_equal(pthread_create(&thread, NULL, free_what_is_no_block, &s), 0);
    for (int i = 0; i < LAST_POOLS; i++) {
        pool = test_open_pool(device, TN_BACKING_AUTO, 0);
        test_give(pool, test_take(pool, 3 * MIB_BYTES, NULL), NULL);
        EXPECT_OK(tn_pool_destroy(pool));
    }
    atomic_store(&s.address, NULL);
    pthread_join(thread, NULL);
    assert_int_equal(atomic_load(&s.wrong), 0);
    EXPECT_OK(tn_device_destroy(device));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_pass_blocks_to_each_other),
        cmocka_unit_test(addresses_are_looked_up_while_the_last_pool_ends),
    };
    return cmocka_run_group_tests_name("api/pool_threads", tests, NULL, NULL);
}
