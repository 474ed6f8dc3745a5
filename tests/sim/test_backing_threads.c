/* Threads on one pool of every backing at once: each writes its blocks whole and finds them as it
 * left them, while others allocate, free, trim and look. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"
#include "test_pools.h"

#define MIB     MIB_BYTES
#define THREADS 4
#define ROUNDS  120

typedef struct shared {
    tn_device *device;
    tn_pool *pool;
    int is_host_driver;
    int failures[THREADS];
} shared;

typedef struct worker {
    shared *all;
    int index;
    tn_stream stream;
} worker;

static tn_status caller_alloc(void *context, size_t bytes, void **out) {
    tn_device *device = context;
    return tn__device_driver(device)->mem_alloc(tn__device_state(device), bytes, out);
}

static tn_status caller_free(void *context, void *address, size_t bytes) {
    tn_device *device = context;
    (void)bytes;
    return tn__device_driver(device)->mem_free(tn__device_state(device), address);
}

/* One block: taken, used, freed. */
static int use_block(const worker *w, int round) {
    size_t bytes = (size_t)((round * 7 + w->index * 3) % 11 + 1) * 700 * 1024;
    unsigned char byte = (unsigned char)(round + w->index + 1), last = 0;
    void *block = NULL;
    int is_wrong = 0;
    if (tn_alloc(w->all->pool, bytes, w->stream, NULL, &block) != TN_OK) return 1;
    if (w->all->is_host_driver) {
        is_wrong |= tn_fill(w->all->device, block, byte, bytes, w->stream) != TN_OK;
        is_wrong |=
            tn_copy(w->all->device, &last, (char *)block + bytes - 1, 1, w->stream) != TN_OK;
        is_wrong |= tn_stream_synchronize(w->all->device, w->stream) != TN_OK;
        is_wrong |= last != byte;
    }
    is_wrong |= tn_free(block, w->stream) != TN_OK;
    return is_wrong;
}

static void *run_worker(void *argument) {
    const worker *w = argument;
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    int failures = 0;
    for (int round = 0; round < ROUNDS; round++) {
        failures += use_block(w, round);
        if (round % 16 == w->index) failures += tn_pool_trim(w->all->pool, MIB, NULL) != TN_OK;
        if (round % 16 == 8) failures += tn_pool_check(w->all->pool) != TN_OK;
        if (round % 16 == 9) failures += tn_pool_stats_get(w->all->pool, &stats) != TN_OK;
    }
    w->all->failures[w->index] = failures;
    return NULL;
}

static void run_backing(tn_pool_backing backing, int is_host_driver) {
    shared all = {.is_host_driver = is_host_driver};
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    pthread_t threads[THREADS];
    worker workers[THREADS];
    all.device = is_host_driver ? test_open_host() : test_open_sim(0, 0);
    config.backing = backing;
    config.functions = (tn_memory_functions){caller_alloc, caller_free, all.device};
    EXPECT_OK(tn_pool_create(all.device, &config, &all.pool));
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){&all, i, test_open_stream(all.device)};
        assert_int_equal(pthread_create(&threads[i], NULL, run_worker, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(all.failures[i], 0);
        EXPECT_OK(tn_stream_destroy(all.device, workers[i].stream));
    }
    EXPECT_OK(tn_pool_destroy(all.pool));
    if (is_host_driver) {
        EXPECT_OK(tn_device_destroy(all.device));
    } else {
        test_close_sim(all.device); /* no race was seen, nothing is left */
    }
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void threads_share_a_pool_of_the_simulated_device(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PINNED; backing++)
        run_backing((tn_pool_backing)backing, 0);
}

static void threads_share_a_pool_of_the_host_driver(void **state) {
    (void)state;
    run_backing(TN_BACKING_PLAIN, 1);
    run_backing(TN_BACKING_CALLER, 1);
    run_backing(TN_BACKING_HOST, 1);
    run_backing(TN_BACKING_PINNED, 1);
}

/* ---- streams of other libraries -------------------------------------------------------------- */

/* A provider that takes its time in free: meanwhile another thread uses many foreign streams. */
typedef struct slow_provider {
    tn_device *device;
    tn_pool *pool;
    tn_stream streams[80];
    int is_slow;
    int failures;
} slow_provider;

static void *use_many_streams(void *argument) {
    slow_provider *p = argument;
    for (size_t i = 0; i < sizeof p->streams / sizeof p->streams[0]; i++) {
        void *block = NULL;
        p->failures += tn_alloc(p->pool, 1000, p->streams[i], NULL, &block) != TN_OK;
        p->failures += tn_free(block, p->streams[i]) != TN_OK;
    }
    return NULL;
}

static tn_status slow_alloc(void *context, size_t bytes, void **out) {
    return caller_alloc(((slow_provider *)context)->device, bytes, out);
}

static tn_status slow_free(void *context, void *address, size_t bytes) {
    slow_provider *p = context;
    pthread_t thread;
    if (p->is_slow && pthread_create(&thread, NULL, use_many_streams, p) == 0) {
        p->is_slow = 0;
        pthread_join(thread, NULL);
    }
    return caller_free(p->device, address, bytes);
}

/* The request's stream has no work, and nothing speaks of it: pools forget such streams. */
static void a_request_keeps_its_stream_while_segments_go(void **state) {
    slow_provider p = {.device = test_open_sim(0, 0)};
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_stream stream = test_open_foreign_stream(p.device);
    void *small, *large;
    (void)state;
    config.backing = TN_BACKING_CALLER;
    config.limit_bytes = 128 * MIB;
    config.functions = (tn_memory_functions){slow_alloc, slow_free, &p};
    EXPECT_OK(tn_pool_create(p.device, &config, &p.pool));
    for (size_t i = 0; i < sizeof p.streams / sizeof p.streams[0]; i++)
        p.streams[i] = test_open_foreign_stream(p.device);
    small = test_take(p.pool, MIB, NULL);
    test_give(p.pool, test_take(p.pool, 80 * MIB, NULL), NULL);
    EXPECT_OK(tn_device_synchronize(p.device));
    p.is_slow = 1;
    large = test_take(p.pool, 90 * MIB, stream);
    assert_int_equal(p.is_slow, 0);
    assert_int_equal(p.failures, 0);
    assert_int_equal(test_pool_stats(p.pool).live_blocks, 2);
    test_give(p.pool, large, stream);
    test_give(p.pool, small, NULL);
    EXPECT_OK(tn_pool_destroy(p.pool));
    for (size_t i = 0; i < sizeof p.streams / sizeof p.streams[0]; i++)
        test_close_foreign_stream(p.device, p.streams[i]);
    test_close_foreign_stream(p.device, stream);
    test_close_sim(p.device);
}

/* ---- a provider that is done before its free returns ----------------------------------------- */

/* It has one piece of memory, and gives it anew while the free of it is on its way back: here by
 * what its free itself does with the pool, as another thread would. */
typedef struct one_piece {
    tn_pool *pool;
    void *memory;
    int is_given;
    int frees;
    int failing_frees; /* bit n: free n says that it failed */
    int failures;
    void *block; /* taken in the first free, if it is to stay */
    int is_kept;
} one_piece;

static tn_status one_alloc(void *context, size_t bytes, void **out) {
    one_piece *p = context;
    if (p->is_given || bytes > 4 * MIB) return TN_OUT_OF_DEVICE_MEMORY;
    p->is_given = 1;
    *out = p->memory;
    return TN_OK;
}

static tn_status one_free(void *context, void *address, size_t bytes) {
    one_piece *p = context;
    int number = p->frees++;
    (void)bytes;
    p->failures += address != p->memory;
    p->is_given = 0;
    if (number == 0) {
        p->failures += tn_alloc(p->pool, 3 * MIB, NULL, NULL, &p->block) != TN_OK;
        p->failures += tn_pool_check(p->pool) != TN_OK;
        if (!p->is_kept) {
            p->failures += tn_free(p->block, NULL) != TN_OK;
            p->failures += tn_pool_trim(p->pool, 0, NULL) != TN_OK;
        }
    }
    p->failures += tn_pool_check(p->pool) != TN_OK;
    return p->failing_frees & 1 << number ? TN_DRIVER_ERROR : TN_OK;
}

static tn_device *open_one_piece(one_piece *p) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_device *device = test_open_sim(0, 0);
    EXPECT_OK(tn__device_driver(device)->mem_alloc(tn__device_state(device), 4 * MIB, &p->memory));
    config.backing = TN_BACKING_CALLER;
    config.functions = (tn_memory_functions){one_alloc, one_free, p};
    EXPECT_OK(tn_pool_create(device, &config, &p->pool));
    test_give(p->pool, test_take(p->pool, 3 * MIB, NULL), NULL);
    return device;
}

static void close_one_piece(tn_device *device, one_piece *p) {
    assert_int_equal(p->failures, 0);
    EXPECT_OK(tn_pool_destroy(p->pool));
    assert_int_equal(p->is_given, 0);
    EXPECT_OK(tn__device_driver(device)->mem_free(tn__device_state(device), p->memory));
    test_close_sim(device);
}

static void two_segments_of_one_address_go_back(void **state) {
    one_piece p = {0};
    tn_device *device = open_one_piece(&p);
    (void)state;
    EXPECT_OK(tn_pool_trim(p.pool, 0, NULL));
    assert_int_equal(p.frees, 2);
    assert_int_equal(test_pool_stats(p.pool).reserved_bytes, 0);
    close_one_piece(device, &p);
}

/* Its memory is a block's by then: the pool believes what it sees, and not the answer. */
static void a_failed_free_does_not_take_memory_given_anew(void **state) {
    one_piece p = {.failing_frees = 1, .is_kept = 1};
    tn_device *device = open_one_piece(&p);
    tn_pool_stats stats;
    (void)state;
    EXPECT_STATUS(tn_pool_trim(p.pool, 0, NULL), TN_DRIVER_ERROR);
    assert_int_equal(p.frees, 1);
    stats = test_pool_stats(p.pool);
    assert_int_equal(stats.live_blocks, 1);
    assert_int_equal(stats.reserved_bytes, 4 * MIB);
    test_give(p.pool, p.block, NULL);
    close_one_piece(device, &p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_share_a_pool_of_the_simulated_device),
        cmocka_unit_test(threads_share_a_pool_of_the_host_driver),
        cmocka_unit_test(a_request_keeps_its_stream_while_segments_go),
        cmocka_unit_test(two_segments_of_one_address_go_back),
        cmocka_unit_test(a_failed_free_does_not_take_memory_given_anew),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
