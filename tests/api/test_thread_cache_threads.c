/* Thread caches under threads, through the public interface on the host driver: hand-over, double
 * frees at the same time, threads that end, sums that are right at any time. Blocks are host memory
 * there: what one thread writes into its block must stay, or two threads have the same one. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "test_pools.h"

enum { THREADS = 4, BLOCKS = 12, ROUNDS = 3000, DOUBLE_FREES = 2000 };

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream streams[THREADS];
    pthread_barrier_t barrier;
    pthread_mutex_t mutex;
    atomic_int is_over;
    atomic_int failures;
    void *shared;
    _Atomic(void *) queue[64]; /* of one producer and one consumer */
} fixture;

static fixture f;

static int open_fixture(void **state) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    (void)state;
    memset(&f, 0, sizeof f);
    config.driver = TN_DRIVER_HOST;
    config.memory_limit_bytes = (size_t)1 << 30;
    EXPECT_OK(tn_device_create(&config, &f.device));
    f.pool = test_open_pool(f.device, TN_BACKING_AUTO, 0);
    for (int i = 0; i < THREADS; i++)
        f.streams[i] = test_open_stream(f.device);
    pthread_barrier_init(&f.barrier, NULL, THREADS);
    pthread_mutex_init(&f.mutex, NULL);
    return 0;
}

static int close_fixture(void **state) {
    (void)state;
    pthread_barrier_destroy(&f.barrier);
    pthread_mutex_destroy(&f.mutex);
    EXPECT_OK(tn_pool_destroy(f.pool));
    for (int i = 0; i < THREADS; i++)
        EXPECT_OK(tn_stream_destroy(f.device, f.streams[i]));
    EXPECT_OK(tn_device_destroy(f.device));
    return 0;
}

static void run_threads(void *(*function)(void *), int count) {
    pthread_t threads[THREADS];
    for (int i = 0; i < count; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, function, &f.streams[i]), 0);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(atomic_load(&f.failures), 0);
}

/* cmocka's checks are for the main thread. */
static void require(int condition) {
    if (!condition) atomic_fetch_add(&f.failures, 1);
}

static void *take(size_t bytes, tn_stream stream) {
    void *block = NULL;
    require(tn_alloc(f.pool, bytes, stream, NULL, &block) == TN_OK);
    return block;
}

static void give(void *block, tn_stream stream) { require(tn_free(block, stream) == TN_OK); }

/* ---- each its own -------------------------------------------------------------------------- */

typedef struct held {
    unsigned char *block;
    size_t bytes;
    unsigned char value;
} held;

static void fill(held *h, size_t bytes, unsigned char value, tn_stream stream) {
    *h = (held){take(bytes, stream), bytes, value};
    h->block[0] = value;
    h->block[bytes - 1] = value;
}

static void check_and_give(held *h, tn_stream stream) {
    require(h->block[0] == h->value && h->block[h->bytes - 1] == h->value);
    give(h->block, stream);
    h->block = NULL;
}

static void *use_own_blocks(void *argument) {
    const tn_stream *stream = argument;
    held blocks[BLOCKS] = {{NULL, 0, 0}};
    uint64_t random = (uint64_t)(stream - f.streams) + 1;
    for (int round = 0; round < ROUNDS; round++) {
        held *h;
        random = random * 6364136223846793005u + 1442695040888963407u;
        h = &blocks[(random >> 33) % BLOCKS];
        if (h->block) {
            check_and_give(h, *stream);
        } else {
            fill(h, (size_t)600 << ((random >> 40) % 10), (unsigned char)(random >> 50), *stream);
        }
    }
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i].block) check_and_give(&blocks[i], *stream);
    }
    return NULL;
}

/* Sums that hold at any moment, while all caches are at work. */
static void *watch_books(void *argument) {
    (void)argument;
    while (!atomic_load(&f.is_over)) {
        tn_pool_stats stats = TN_POOL_STATS_INIT;
        require(tn_pool_stats_get(f.pool, &stats) == TN_OK);
        require(stats.allocs - stats.frees == stats.live_blocks);
        require(stats.live_blocks <= (uint64_t)THREADS * BLOCKS);
        require(stats.live_bytes <= stats.peak_live_bytes);
        require(tn_pool_check(f.pool) == TN_OK);
        require(tn_pool_trim(f.pool, SIZE_MAX, NULL) == TN_OK);
        sched_yield();
    }
    return NULL;
}

static void no_two_threads_have_one_block_and_the_books_hold(void **state) {
    pthread_t watcher;
    (void)state;
    assert_int_equal(pthread_create(&watcher, NULL, watch_books, NULL), 0);
    run_threads(use_own_blocks, THREADS);
    atomic_store(&f.is_over, 1);
    pthread_join(watcher, NULL);
    assert_int_equal(atomic_load(&f.failures), 0);
    assert_int_equal(test_pool_stats(f.pool).live_bytes, 0);
}

/* ---- hand-over ----------------------------------------------------------------------------- */

enum { PASSED = 5000 };

static void *produce(void) {
    for (size_t i = 0; i < PASSED; i++) {
        unsigned char *block = take(64 << 10, f.streams[0]);
        _Atomic(void *) *slot = &f.queue[i % 64];
        block[0] = (unsigned char)i;
        while (atomic_load(slot))
            sched_yield();
        atomic_store(slot, block);
    }
    return NULL;
}

static void *consume(void) {
    for (size_t i = 0; i < PASSED; i++) {
        _Atomic(void *) *slot = &f.queue[i % 64];
        unsigned char *block;
        while (!(block = atomic_load(slot)))
            sched_yield();
        require(block[0] == (unsigned char)i);
        atomic_store(slot, NULL);
        give(block, f.streams[0]);
    }
    return NULL;
}

static void *produce_or_consume(void *argument) {
    return (tn_stream *)argument == f.streams ? produce() : consume();
}

static void blocks_freed_by_another_thread_come_back(void **state) {
    tn_pool_stats stats;
    (void)state;
    run_threads(produce_or_consume, 2);
    stats = test_pool_stats(f.pool);
    assert_int_equal(stats.allocs, PASSED);
    assert_int_equal(stats.frees, PASSED);
    assert_int_equal(stats.live_bytes, 0);
    /* 64 in the queue and one in each hand: the same memory all the time. */
    assert_true(stats.peak_live_bytes <= (size_t)66 << 16);
    assert_true(stats.peak_reserved_bytes <= 32 << 20);
}

/* ---- double frees -------------------------------------------------------------------------- */

static atomic_int good_frees;

static void *free_together(void *argument) {
    const tn_stream *stream = argument;
    give(take(4096, *stream), *stream); /* each has a cache */
    for (int i = 0; i < DOUBLE_FREES; i++) {
        if (stream == &f.streams[0]) {
            f.shared = take(4096, f.streams[i % THREADS]);
        }
        pthread_barrier_wait(&f.barrier);
        /* Half of the time some of them by the way of the mutex: another stream. */
        if (tn_free(f.shared, i % 2 ? *stream : f.streams[i % THREADS]) == TN_OK) {
            atomic_fetch_add(&good_frees, 1);
        }
        pthread_barrier_wait(&f.barrier);
        require(atomic_load(&good_frees) == i + 1);
    }
    return NULL;
}

static void of_frees_of_one_block_at_once_exactly_one_succeeds(void **state) {
    (void)state;
    atomic_store(&good_frees, 0);
    run_threads(free_together, THREADS);
    assert_int_equal(atomic_load(&good_frees), DOUBLE_FREES);
    assert_int_equal(test_pool_stats(f.pool).live_blocks, 0);
}

/* ---- threads that end ---------------------------------------------------------------------- */

static void *keep_and_end(void *argument) {
    void *blocks[20];
    (void)argument;
    for (int i = 0; i < 20; i++)
        blocks[i] = take(1 << 20, f.streams[0]);
    for (int i = 0; i < 20; i++)
        give(blocks[i], f.streams[0]);
    return NULL;
}

static void what_a_thread_kept_when_it_ended_serves_others(void **state) {
    size_t reserved;
    void *large;
    (void)state;
    run_threads(keep_and_end, 1);
    reserved = test_pool_stats(f.pool).reserved_bytes;
    /* The next threads take its cache over, one after the other. */
    for (int i = 0; i < 20; i++)
        run_threads(keep_and_end, 1);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, reserved);
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, 20 << 20);
    large = test_take(f.pool, 16 << 20, f.streams[1]);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, reserved);
    test_give(f.pool, large, f.streams[1]);
}

/* ---- peaks --------------------------------------------------------------------------------- */

static void *take_turns(void *argument) {
    const tn_stream *stream = argument;
    for (int i = 0; i < 500; i++) {
        pthread_mutex_lock(&f.mutex);
        give(take(10000, *stream), *stream);
        pthread_mutex_unlock(&f.mutex);
    }
    return NULL;
}

static void *hold_together(void *argument) {
    const tn_stream *stream = argument;
    for (int i = 0; i < 50; i++) {
        void *block = take(10000, *stream);
        pthread_barrier_wait(&f.barrier);
        give(block, *stream);
    }
    return NULL;
}

static void the_peak_is_what_was_live_at_once(void **state) {
    (void)state;
    run_threads(take_turns, THREADS);
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, 10000);
    run_threads(hold_together, THREADS);
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, THREADS * 10000);
    EXPECT_OK(tn_pool_stats_reset_peaks(f.pool));
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, 0);
}

/* ---- streams that end while threads use others --------------------------------------------- */

static void *end_streams(void *argument) {
    (void)argument;
    for (int i = 0; i < 200; i++) {
        tn_stream stream = NULL;
        require(tn_stream_create(f.device, &stream) == TN_OK);
        give(take(5000, stream), stream);
        require(tn_stream_destroy(f.device, stream) == TN_OK);
    }
    return NULL;
}

static void *use_blocks_or_end_streams(void *argument) {
    return (tn_stream *)argument == f.streams ? end_streams(argument) : use_own_blocks(argument);
}

static void streams_may_end_while_others_are_warm(void **state) {
    (void)state;
    run_threads(use_blocks_or_end_streams, THREADS);
    assert_int_equal(test_pool_stats(f.pool).live_blocks, 0);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
    const struct CMUnitTest tests[] = {
        TEST(no_two_threads_have_one_block_and_the_books_hold),
        TEST(blocks_freed_by_another_thread_come_back),
        TEST(of_frees_of_one_block_at_once_exactly_one_succeeds),
        TEST(what_a_thread_kept_when_it_ended_serves_others),
        TEST(the_peak_is_what_was_live_at_once),
        TEST(streams_may_end_while_others_are_warm),
    };
    return cmocka_run_group_tests_name("api/thread_cache_threads", tests, NULL, NULL);
}
