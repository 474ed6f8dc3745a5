/* Faults of stream order that users of other allocators met, each as the report had it: the report
 * is named by repository and number. docs/cases.md lists all of them.
 *
 * Where the fault was a use that nobody waited for, the same is done once more with the wait left
 * out (the use not recorded): that must be seen as a race, or the test could not fail. */
#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#include "driver.h"
#include "tenure_pool.h"
#include "pool_fixture.h"

#define MIB MIB_BYTES

/* ---- torchrec#4231: a copy on a side stream, the storage freed on the main one --------------- */

/* The device has no room for a second block, so the freed one must serve. */
static uint64_t copy_aside(tn_pool_backing backing, int is_recorded) {
    pool_fixture f;
    void *x;
    void *y;
    f = pool_fixture_open(64 * MIB, backing, 0);
    x = test_take(f.pool, 64 * MIB, f.a);
    test_sim_write(f.device, f.a, x, 64 * MIB, 10);
    EXPECT_OK(tn_stream_wait(f.device, f.b, f.a));
    test_sim_write(f.device, f.b, NULL, 0, 1e6); /* the kernel that spins before the copy */
    test_sim_read(f.device, f.b, x, 64 * MIB, 100);
    if (is_recorded) EXPECT_OK(tn_record_use(x, f.b));
    test_give(f.pool, x, f.a);
    y = test_take(f.pool, 64 * MIB, f.a);
    test_sim_write(f.device, f.a, y, 64 * MIB, 10);
    test_give(f.pool, y, f.a);
    return pool_fixture_close_with_races(&f);
}

static void a_copy_aside_reads_what_was_there(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        assert_int_equal(copy_aside((tn_pool_backing)backing, 1), 0);
        assert_true(copy_aside((tn_pool_backing)backing, 0) > 0);
    }
}

static sem_t gate;

static void wait_for_the_gate(void *argument) {
    (void)argument;
    sem_wait(&gate);
}

/* The same with real bytes, on the host driver. */
static void a_copy_aside_brings_the_right_bytes(void **state) {
    static unsigned char copied[4 * MIB_BYTES];
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    pool_fixture f;
    void *x;
    void *y;
    (void)state;
    config.driver = TN_DRIVER_HOST;
    config.memory_limit_bytes = 32 * MIB; /* one segment of a pool */
    EXPECT_OK(tn_device_create(&config, &f.device));
    f.pool = test_open_pool(f.device, TN_BACKING_PLAIN, 0);
    f.a = test_open_stream(f.device);
    f.b = test_open_stream(f.device);
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    x = test_take(f.pool, sizeof copied, f.a);
    EXPECT_OK(tn_fill(f.device, x, 0x11, sizeof copied, f.a));
    EXPECT_OK(tn_stream_wait(f.device, f.b, f.a));
    EXPECT_OK(tn__device_driver(f.device)->host_task(tn__device_state(f.device), wait_for_the_gate,
                                                     NULL, f.b));
    EXPECT_OK(tn_copy(f.device, copied, x, sizeof copied, f.b));
    EXPECT_OK(tn_record_use(x, f.b));
    test_give(f.pool, x, f.a);
    y = test_take(f.pool, 32 * MIB, f.a);
    EXPECT_OK(tn_fill(f.device, y, 0xff, 32 * MIB, f.a));
    sem_post(&gate);
    EXPECT_OK(tn_device_synchronize(f.device));
    for (size_t i = 0; i < sizeof copied; i++)
        assert_int_equal(copied[i], 0x11);
    test_give(f.pool, y, f.a);
    EXPECT_OK(tn_pool_destroy(f.pool));
    EXPECT_OK(tn_stream_destroy(f.device, f.a));
    EXPECT_OK(tn_stream_destroy(f.device, f.b));
    EXPECT_OK(tn_device_destroy(f.device));
    sem_destroy(&gate);
}

/* ---- onnxruntime#32342: freed just after a read was queued, taken by another thread ---------- */

typedef struct taker {
    pool_fixture *f;
    size_t bytes;
    void *block;
    tn_status status;
} taker;

static void *take_elsewhere(void *argument) {
    taker *t = argument;
    const tn__range range = {NULL, t->bytes, 1};
    tn__range touched = range;
    t->status = tn_alloc(t->f->pool, t->bytes, t->f->b, NULL, &t->block);
    if (t->status != TN_OK) return NULL;
    touched.address = t->block;
    t->status =
        tn__device_driver(t->f->device)
            ->ghost_launch(tn__device_state(t->f->device), "write", &touched, 1, 10, t->f->b);
    if (t->status == TN_OK) t->status = tn_free(t->block, t->f->b);
    return NULL;
}

/* The block was made and is freed without a stream; a stream of another library reads it. */
static uint64_t free_without_a_stream(int is_recorded) {
    pool_fixture f;
    taker t = {&f, 64 * MIB, NULL, TN_LEAK};
    pthread_t thread;
    tn_stream foreign;
    void *x;
    f = pool_fixture_open(64 * MIB, TN_BACKING_VMM, 0);
    EXPECT_OK(tn__device_driver(f.device)->stream_create(tn__device_state(f.device), &foreign));
    x = test_take(f.pool, 64 * MIB, NULL);
    test_sim_read(f.device, foreign, x, 64 * MIB, 1e5);
    if (is_recorded) EXPECT_OK(tn_record_use(x, foreign));
    test_give(f.pool, x, NULL);
    assert_int_equal(pthread_create(&thread, NULL, take_elsewhere, &t), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    EXPECT_STATUS(t.status, TN_OK);
    EXPECT_OK(tn_device_synchronize(f.device));
    EXPECT_OK(tn__device_driver(f.device)->stream_destroy(tn__device_state(f.device), foreign));
    return pool_fixture_close_with_races(&f);
}

static void blocks_of_the_default_stream_are_fenced_before_reuse(void **state) {
    (void)state;
    assert_int_equal(free_without_a_stream(1), 0);
    assert_true(free_without_a_stream(0) > 0);
}

/* ---- NVIDIA/cub#156: a block in the free list before its event is recorded ------------------- */

enum { THREADS = 3, ROUNDS = 150 };

typedef struct exchanger {
    pthread_t thread;
    pool_fixture *f;
    tn_stream stream;
    tn_status bad;
} exchanger;

static void *exchange(void *argument) {
    exchanger *e = argument;
    const tn__driver *driver = tn__device_driver(e->f->device);
    for (int round = 0; round < ROUNDS && e->bad == TN_OK; round++) {
        tn__range range = {NULL, 4 * MIB, 1};
        void *block = NULL;
        e->bad = tn_alloc(e->f->pool, range.bytes, e->stream, NULL, &block);
        if (e->bad == TN_OUT_OF_DEVICE_MEMORY) e->bad = TN_OK; /* all are in others' hands */
        if (!block) continue;
        range.address = block;
        e->bad = driver->ghost_launch(tn__device_state(e->f->device), "write", &range, 1, 1000,
                                      e->stream);
        if (tn_free(block, e->stream) != TN_OK) e->bad = TN_INVALID_STATE;
    }
    return NULL;
}

/* There is memory for one block fewer than there are threads: each takes what another has just
 * freed, again and again, and always behind that one's work. */
static void a_block_is_not_to_be_had_before_its_use_is_known(void **state) {
    exchanger threads[THREADS] = {0};
    pool_fixture f;
    (void)state;
    f = pool_fixture_open((THREADS - 1) * (4 * MIB), TN_BACKING_VMM, 0);
    for (int i = 0; i < THREADS; i++) {
        threads[i].f = &f;
        threads[i].stream = test_open_stream(f.device);
    }
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i].thread, NULL, exchange, &threads[i]), 0);
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i].thread, NULL), 0);
        EXPECT_STATUS(threads[i].bad, TN_OK);
    }
    (void)test_pool_stats(f.pool);
    for (int i = 0; i < THREADS; i++)
        EXPECT_OK(tn_stream_destroy(f.device, threads[i].stream));
    assert_int_equal(pool_fixture_close_with_races(&f), 0);
}

/* ---- rmm#850: stealing from another stream makes the two run one after the other ------------- */

/* Two streams take turns; gives how long their work took. */
static double run_two_streams(int keep_streams_apart, tn_pool_stats *stats) {
    const test_sim *sim = test_sim_get();
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    double begin_us;
    pool_fixture f;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    EXPECT_OK(tn_pool_destroy(f.pool));
    config.keep_streams_apart = keep_streams_apart;
    EXPECT_OK(tn_pool_create(f.device, &config, &f.pool));
    begin_us = sim->now_us();
    for (int round = 0; round < 100; round++) {
        tn_stream streams[2] = {f.a, f.b};
        for (int i = 0; i < 2; i++) {
            void *x = test_take(f.pool, 8 * MIB, streams[i]);
            test_sim_write(f.device, streams[i], x, 8 * MIB, 1000);
            test_give(f.pool, x, streams[i]);
        }
    }
    *stats = test_pool_stats(f.pool);
    EXPECT_OK(tn_device_synchronize(f.device));
    begin_us = sim->now_us() - begin_us;
    assert_int_equal(pool_fixture_close_with_races(&f), 0);
    return begin_us;
}

/* Where it is asked for, each stream gets memory of its own and keeps to it: both run at the same
 * time all along, for twice the memory. */
static void streams_that_are_kept_apart_run_side_by_side(void **state) {
    tn_pool_stats stats;
    (void)state;
    assert_true(run_two_streams(1, &stats) < 110e3); /* 100 kernels of 1 ms, and what it costs */
    assert_int_equal(stats.stream_waits, 0);
    assert_int_equal(stats.reserved_bytes, 16 * MIB);
    assert_true(run_two_streams(0, &stats) >= 200e3);
    assert_int_equal(stats.reserved_bytes, 8 * MIB);
}

/* Apart as long as there is memory for it. */
static void streams_that_are_kept_apart_share_when_memory_is_short(void **state) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    pool_fixture f;
    void *x;
    (void)state;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    EXPECT_OK(tn_pool_destroy(f.pool));
    config.keep_streams_apart = 1;
    config.limit_bytes = 24 * MIB;
    EXPECT_OK(tn_pool_create(f.device, &config, &f.pool));
    x = test_take(f.pool, 16 * MIB, f.a);
    test_sim_write(f.device, f.a, x, 16 * MIB, 1e5);
    test_give(f.pool, x, f.a);
    x = test_take(f.pool, 16 * MIB, f.b);
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 1);
    test_sim_write(f.device, f.b, x, 16 * MIB, 10);
    test_give(f.pool, x, f.b);
    assert_int_equal(pool_fixture_close_with_races(&f), 0);
}

/* ---- llama.cpp#22155: a cache that is flushed under kernels that are still queued ------------ */

static void nothing_goes_back_before_the_work_on_it_is_done(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        pool_fixture f;
        tn_pool *other;
        void *x;
        void *none = NULL;
        size_t released = 1;
        f = pool_fixture_open(64 * MIB, (tn_pool_backing)backing, 0);
        other = test_open_pool(f.device, (tn_pool_backing)backing, 0);
        x = test_take(f.pool, 64 * MIB, f.a);
        test_sim_stall(f.device, f.a, 1);
        test_sim_write(f.device, f.a, x, 64 * MIB, 10);
        test_give(f.pool, x, f.a);
        EXPECT_OK(tn_pool_trim(f.pool, 0, &released));
        assert_int_equal(released, 0);
        /* Nor does another pool that is short get it. */
        EXPECT_STATUS(tn_alloc(other, 8 * MIB, f.b, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
        assert_int_equal(test_calls(f.device, TN_CALL_MEM_UNMAP), 0);
        assert_int_equal(test_calls(f.device, TN_CALL_MEM_FREE), 0);
        test_sim_stall(f.device, f.a, 0);
        EXPECT_OK(tn_stream_synchronize(f.device, f.a));
        EXPECT_OK(tn_pool_trim(f.pool, 0, &released));
        assert_int_equal(released, 64 * MIB);
        EXPECT_OK(tn_pool_destroy(other));
        assert_int_equal(pool_fixture_close_with_races(&f), 0);
    }
}

/* ---- pytorch#50925: a free between two launches of one collective waits for ever ------------- */

/* Both halves of the collective wait for each other; the second is not launched yet. Meanwhile the
 * pool allocates, frees, grows, moves pages, and gives others back: without a wait of the host. */
static void no_call_waits_for_a_collective_that_is_half_launched(void **state) {
    pool_fixture f;
    void *sent;
    void *x[4];
    (void)state;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    sent = test_take(f.pool, 16 * MIB, f.a);
    test_sim_stall(f.device, f.a, 1);
    test_sim_write(f.device, f.a, sent, 16 * MIB, 10);
    for (int i = 0; i < 4; i++)
        x[i] = test_take(f.pool, (size_t)(i + 1) * 24 * MIB, f.b);
    for (int i = 0; i < 4; i += 2)
        test_give(f.pool, x[i], f.b);
    x[0] = test_take(f.pool, 96 * MIB, f.b); /* from the two holes */
    for (int i = 0; i < 4; i++) {
        if (i != 2) test_give(f.pool, x[i], f.b);
    }
    EXPECT_OK(tn_pool_trim(f.pool, 0, NULL));
    assert_int_equal(test_calls(f.device, TN_CALL_EVENT_SYNCHRONIZE), 0);
    assert_int_equal(test_sim_get()->call_count("cuStreamSynchronize"), 0);
    assert_int_equal(test_sim_get()->call_count("cuCtxSynchronize"), 0);
    test_sim_stall(f.device, f.a, 0);
    test_give(f.pool, sent, f.a);
    assert_int_equal(pool_fixture_close_with_races(&f), 0);
}

/* Memory that only a call of the driver which waits could give back is gone without meanwhile. */
static void what_would_wait_is_put_off_between_the_launches(void **state) {
    pool_fixture f;
    tn_pool *other;
    void *sent;
    void *x = NULL;
    size_t released = 1;
    (void)state;
    f = pool_fixture_open(128 * MIB, TN_BACKING_PLAIN, 0);
    other = test_open_pool(f.device, TN_BACKING_PLAIN, 0);
    sent = test_take(f.pool, 64 * MIB, f.a);
    test_give(f.pool, test_take(f.pool, 64 * MIB, f.b), f.b);
    EXPECT_OK(tn_stream_synchronize(f.device, f.b));
    EXPECT_OK(tn_no_wait_begin());
    EXPECT_OK(tn_no_wait_begin());
    test_sim_stall(f.device, f.a, 1); /* the first half runs, and waits for the second */
    test_sim_write(f.device, f.a, sent, 64 * MIB, 10);
    EXPECT_OK(tn_pool_trim(f.pool, 0, &released));
    assert_int_equal(released, 0);
    EXPECT_STATUS(tn_alloc(other, 40 * MIB, f.b, NULL, &x), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_STATUS(tn_pool_destroy(other), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("not before tn_no_wait_end");
    test_give(f.pool, sent, f.a);
    EXPECT_STATUS(tn_alloc(f.pool, 128 * MIB, f.a, NULL, &x), TN_OUT_OF_DEVICE_MEMORY);
    x = test_take(f.pool, 64 * MIB, f.b); /* what needs no wait goes on */
    test_give(f.pool, x, f.b);
    assert_int_equal(test_calls(f.device, TN_CALL_MEM_FREE), 0);
    assert_int_equal(test_calls(f.device, TN_CALL_EVENT_SYNCHRONIZE), 0);
    test_sim_stall(f.device, f.a, 0);
    EXPECT_OK(tn_no_wait_end());
    EXPECT_STATUS(tn_pool_destroy(other), TN_INVALID_STATE);
    EXPECT_OK(tn_no_wait_end());
    EXPECT_STATUS(tn_no_wait_end(), TN_INVALID_STATE);
    EXPECT_OK(tn_pool_destroy(other));
    x = test_take(f.pool, 128 * MIB, f.a);
    test_give(f.pool, x, f.a);
    assert_int_equal(pool_fixture_close_with_races(&f), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_copy_aside_reads_what_was_there),
        cmocka_unit_test(a_copy_aside_brings_the_right_bytes),
        cmocka_unit_test(blocks_of_the_default_stream_are_fenced_before_reuse),
        cmocka_unit_test(a_block_is_not_to_be_had_before_its_use_is_known),
        cmocka_unit_test(streams_that_are_kept_apart_run_side_by_side),
        cmocka_unit_test(streams_that_are_kept_apart_share_when_memory_is_short),
        cmocka_unit_test(nothing_goes_back_before_the_work_on_it_is_done),
        cmocka_unit_test(no_call_waits_for_a_collective_that_is_half_launched),
        cmocka_unit_test(what_would_wait_is_put_off_between_the_launches),
    };
    return cmocka_run_group_tests_name("sim/cases_streams", tests, NULL, NULL);
}
