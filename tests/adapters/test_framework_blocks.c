/* What every framework asks: blocks, stream order, uses that are told before they happen, frees
 * that nobody orders, several devices, shortage. Races on the simulated device fail a test. */
#include "adapter_device.h"
#include "adapters_support.h"
#include "host_alloc.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void blocks_are_given_out_and_taken_back_once(void **state) {
    tn_device *device = adapters_open(1, 0);
    uint64_t value = 7;
    void *block = adapters_take(1000, NULL);
    void *nothing = block;
    (void)state;
    assert_int_equal(adapters_number("live_bytes"), 1000);
    assert_int_equal(adapters_number("peak_live_bytes"), 1000);
    EXPECT_OK(tn__framework_alloc(0, 0, NULL, "test", &nothing));
    assert_null(nothing);
    EXPECT_OK(tn__framework_free(0, NULL, NULL));
    adapters_give(block, NULL);
    EXPECT_STATUS(tn__framework_free(0, block, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn__framework_free(0, &value, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn__framework_free(3, block, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn__framework_alloc(-1, 16, NULL, "test", &nothing), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn__framework_alloc(64, 16, NULL, "test", &nothing), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn__framework_alloc(1, 16, NULL, "test", &nothing), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_adapter_stat(0, "no_such", &value), TN_INVALID_ARGUMENT);
    assert_int_equal(adapters_number("live_blocks"), 0);
    EXPECT_OK(tn_adapter_stat(5, "live_blocks", &value));
    assert_int_equal(value, 0);
    EXPECT_OK(tn_adapter_reset_peaks(0));
    assert_int_equal(adapters_number("peak_live_bytes"), 0);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("reserved_bytes"), 0);
    adapters_close(device);
}

/* torch: record_stream comes before the work, and means all of it until the free. */
static void a_use_that_is_told_early_holds_until_the_free(void **state) {
    tn_device *device = adapters_open(1, 0);
    tn_stream main_stream = test_open_foreign_stream(device);
    tn_stream side = test_open_foreign_stream(device);
    void *block = adapters_take(4 * MIB, main_stream);
    void *again;
    (void)state;
    test_sim_write(device, main_stream, block, 4 * MIB, 10);
    EXPECT_OK(tn_stream_wait(device, side, main_stream));
    EXPECT_OK(tn__framework_use(block, side));
    EXPECT_OK(tn__framework_use(block, side));
    test_sim_read(device, side, block, 4 * MIB, 1000);
    adapters_give(block, main_stream);
    again = adapters_take(4 * MIB, main_stream);
    test_sim_write(device, main_stream, again, 4 * MIB, 10);
    adapters_give(again, main_stream);
    EXPECT_OK(tn__framework_use(block, side));  /* no block any more: nobody's concern */
    EXPECT_OK(tn__framework_use(&again, side)); /* host memory */
    EXPECT_OK(tn__framework_use(NULL, side));
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, main_stream);
    test_close_foreign_stream(device, side);
    adapters_close(device);
}

/* Data fetched ahead: made on one stream, read on another that nobody records, freed at once; the
 * first stream waits for the reader only before it allocates again. Torch's own allocator allows
 * that, since nobody but the first stream ever gets the memory. A third stream must not, and no
 * mapping may go under the reader, whatever sizes come. */
static void unrecorded_readers_are_safe_from_other_streams(void **state) {
    tn_device *device = adapters_open(1, 0);
    tn_stream fetch = test_open_foreign_stream(device);
    tn_stream reader = test_open_foreign_stream(device);
    tn_stream third = test_open_foreign_stream(device);
    unsigned seed = 3;
    (void)state;
    for (int i = 0; i < 300; i++) {
        size_t bytes = (size_t)(1 + rand_r(&seed) % 40) * MIB;
        void *x;
        void *y;
        EXPECT_OK(tn_stream_wait(device, fetch, reader));
        x = adapters_take(bytes, fetch);
        test_sim_write(device, fetch, x, bytes, 5);
        EXPECT_OK(tn_stream_wait(device, reader, fetch));
        test_sim_read(device, reader, x, bytes, 500);
        adapters_give(x, fetch);
        y = adapters_take(bytes, third);
        test_sim_write(device, third, y, bytes, 5);
        adapters_give(y, third);
    }
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, fetch);
    test_close_foreign_stream(device, reader);
    test_close_foreign_stream(device, third);
    adapters_close(device);
}

typedef struct thread_stream {
    tn_device *device;
    tn_stream reader;
} thread_stream;
#define PER_THREAD ((tn_stream)2) /* CU_STREAM_PER_THREAD */

static void *read_and_free(void *argument) {
    thread_stream *t = argument;
    void *block = adapters_take(40 * MIB, PER_THREAD);
    test_sim_write(t->device, PER_THREAD, block, 40 * MIB, 5);
    EXPECT_OK(tn_stream_wait(t->device, t->reader, PER_THREAD));
    test_sim_read(t->device, t->reader, block, 40 * MIB, 500);
    adapters_give(block, PER_THREAD);
    return NULL;
}

/* The default streams of two threads have one name, and are two. */
static void unrecorded_readers_are_safe_from_other_threads(void **state) {
    thread_stream t = {adapters_open(1, 64 * MIB), NULL};
    pthread_t thread;
    void *block;
    (void)state;
    t.reader = test_open_foreign_stream(t.device);
    assert_int_equal(pthread_create(&thread, NULL, read_and_free, &t), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    block = adapters_take(40 * MIB, PER_THREAD);
    test_sim_write(t.device, PER_THREAD, block, 40 * MIB, 5);
    adapters_give(block, PER_THREAD);
    EXPECT_OK(tn_device_synchronize(t.device));
    test_close_foreign_stream(t.device, t.reader);
    adapters_close(t.device);
}

/* Short of memory, what one stream has idle goes to another: behind all work of the device. */
static void idle_memory_goes_between_streams_behind_all_work(void **state) {
    tn_device *device = adapters_open(1, 256 * MIB);
    tn_stream fetch = test_open_foreign_stream(device);
    tn_stream reader = test_open_foreign_stream(device);
    void *x = adapters_take(200 * MIB, fetch);
    void *y;
    uint64_t waits;
    (void)state;
    test_sim_write(device, fetch, x, 200 * MIB, 5);
    EXPECT_OK(tn_stream_wait(device, reader, fetch));
    test_sim_read(device, reader, x, 200 * MIB, 500);
    adapters_give(x, fetch);
    waits = test_sim_get()->call_count("cuCtxSynchronize");
    y = adapters_take(200 * MIB, NULL);
    assert_true(test_sim_get()->call_count("cuCtxSynchronize") > waits);
    test_sim_write(device, NULL, y, 200 * MIB, 5);
    adapters_give(y, NULL);
    x = adapters_take(200 * MIB, fetch); /* and back */
    test_sim_write(device, fetch, x, 200 * MIB, 5);
    adapters_give(x, fetch);
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, fetch);
    test_close_foreign_stream(device, reader);
    adapters_close(device);
}

/* Also what waits for another stream than its own: no device has work any more when it goes. */
static void memory_with_recorded_uses_goes_between_streams_too(void **state) {
    tn_device *device = adapters_open(1, 256 * MIB);
    tn_stream fetch = test_open_foreign_stream(device);
    tn_stream reader = test_open_foreign_stream(device);
    void *x = adapters_take(200 * MIB, fetch);
    void *y;
    (void)state;
    test_sim_write(device, fetch, x, 200 * MIB, 5);
    EXPECT_OK(tn_stream_wait(device, reader, fetch));
    EXPECT_OK(tn__framework_use(x, reader));
    test_sim_read(device, reader, x, 200 * MIB, 500);
    adapters_give(x, fetch);
    y = adapters_take(200 * MIB, NULL);
    test_sim_write(device, NULL, y, 200 * MIB, 5);
    adapters_give(y, NULL);
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, fetch);
    test_close_foreign_stream(device, reader);
    adapters_close(device);
}

/* A recorded stream that is gone at the free: the block is reused after a wait for the device. */
static void a_use_of_a_stream_that_is_gone_waits_for_the_device(void **state) {
    tn_device *device = adapters_open(1, 0);
    tn_stream side = test_open_foreign_stream(device);
    void *block = adapters_take(4 * MIB, NULL);
    (void)state;
    EXPECT_OK(tn__framework_use(block, side));
    test_sim_read(device, side, block, 4 * MIB, 1000);
    test_close_foreign_stream(device, side);
    adapters_give(block, NULL);
    assert_int_equal(adapters_number("live_blocks"), 1);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 0);
    adapters_close(device);
}

/* A stream that its program has ended before the last block of it was freed. */
static void a_block_of_a_stream_that_is_gone_is_freed(void **state) {
    tn_device *device = adapters_open(1, 0);
    tn_stream stream = test_open_foreign_stream(device);
    void *block = adapters_take(4 * MIB, stream);
    void *small = adapters_take(1000, stream);
    (void)state;
    test_sim_write(device, stream, block, 4 * MIB, 1000);
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, stream);
    adapters_give(block, stream);
    adapters_give(small, stream);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 0);
    adapters_close(device);
}

/* Work that no one told of runs on: the memory is not given out before the device was idle. */
static void memory_freed_without_a_stream_waits_for_all_work(void **state) {
    tn_device *device = adapters_open(1, 128 * MIB);
    tn_stream hidden = test_open_foreign_stream(device);
    void *block = adapters_take(60 * MIB, NULL);
    void *other;
    uint64_t waits;
    (void)state;
    test_sim_write(device, hidden, block, 60 * MIB, 1000);
    tn__framework_free_unordered(0, block);
    waits = test_sim_get()->call_count("cuCtxSynchronize");
    other = adapters_take(60 * MIB, NULL);
    assert_ptr_not_equal(other, block);
    test_sim_write(device, NULL, other, 60 * MIB, 10);
    assert_int_equal(test_sim_get()->call_count("cuCtxSynchronize"), waits);
    adapters_give(other, NULL);
    /* 100 MiB are only there with the block's: the device is waited for, once. */
    other = adapters_take(100 * MIB, NULL);
    test_sim_write(device, NULL, other, 100 * MIB, 10);
    assert_int_equal(test_sim_get()->call_count("cuCtxSynchronize"), waits + 1);
    adapters_give(other, NULL);
    tn__framework_free_unordered(0, NULL);
    tn__framework_free_unordered(9, other);
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, hidden);
    adapters_close(device);
}

/* What was recorded for a block is not held against the next one at its address. */
static void uses_end_with_their_block(void **state) {
    tn_device *device = adapters_open(1, 0);
    tn_stream side = test_open_foreign_stream(device);
    tn__adapter *adapter = NULL;
    void *block = NULL;
    (void)state;
    EXPECT_OK(tn__framework_segment(0, MIB, NULL, "test", &block));
    EXPECT_OK(tn__adapter_find(0, &adapter));
    EXPECT_OK(tn__framework_use(block, side));
    assert_int_equal(adapter->uses.count, 1);
    tn__framework_free_unordered(0, block);
    assert_int_equal(adapter->uses.count, 0);
    block = adapters_take(MIB, NULL);
    EXPECT_OK(tn__framework_use(block, side));
    adapters_give(block, NULL);
    assert_int_equal(adapter->uses.count, 0);
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, side);
    adapters_close(device);
}

/* A block that was freed and waits for the devices is no live block any more. */
static void what_waits_for_the_devices_is_freed_once(void **state) {
    tn_device *device = adapters_open(1, 0);
    tn_stream side = test_open_foreign_stream(device);
    tn__adapter *adapter = NULL;
    void *block = NULL;
    void *other;
    (void)state;
    EXPECT_OK(tn__framework_segment(0, MIB, NULL, "test", &block));
    EXPECT_OK(tn__adapter_find(0, &adapter));
    EXPECT_OK(tn__framework_use(block, side));
    tn__host_alloc_fault(1, 1);
    EXPECT_STATUS(tn__adapter_free_unordered(adapter, block, 0), TN_OUT_OF_HOST_MEMORY);
    tn__host_alloc_fault(0, 0);
    assert_int_equal(adapter->uses.count, 1); /* nothing has changed */
    EXPECT_OK(tn__adapter_free_unordered(adapter, block, 1));
    EXPECT_STATUS(tn__adapter_free_unordered(adapter, block, 1), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("was freed before");
    EXPECT_STATUS(tn__framework_free(0, block, NULL), TN_INVALID_ARGUMENT);
    assert_int_equal(adapters_number("live_blocks"), 1);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 0);
    other = adapters_take(MIB, NULL);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 1);
    adapters_give(other, NULL);
    test_close_foreign_stream(device, side);
    adapters_close(device);
}

/* Many of them are worth a wait by themselves: what waits stays bounded. */
static void what_waits_for_the_devices_is_bounded(void **state) {
    tn_device *device = adapters_open(1, (size_t)16 << 30); /* a wait for each 256 MiB */
    uint64_t waits;
    (void)state;
    adapters_give(adapters_take(MIB, NULL), NULL);
    waits = test_sim_get()->call_count("cuCtxSynchronize");
    for (int i = 0; i < 1000; i++)
        tn__framework_free_unordered(0, adapters_take(16 * MIB, NULL));
    assert_int_equal(test_sim_get()->call_count("cuCtxSynchronize") - waits, 1000 / 16);
    assert_true(adapters_number("peak_reserved_bytes") <= 288 * MIB);
    adapters_close(device);
}

static void shortage_is_a_status_or_null(void **state) {
    tn_device *device = adapters_open(1, 64 * MIB);
    void *block = adapters_take(40 * MIB, NULL);
    void *other = NULL;
    (void)state;
    EXPECT_STATUS(tn__framework_alloc(0, 40 * MIB, NULL, "test", &other), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("largest owners: test");
    assert_null(other);
    assert_null(tn_cupy_malloc(NULL, 40 * MIB, 0));
    assert_null(tn_ort_alloc(40 * MIB));
    EXPECT_STATUS(tn__framework_alloc(0, SIZE_MAX, NULL, "test", &other), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_STATUS(tn__framework_alloc(0, SIZE_MAX - 510, NULL, "test", &other),
                  TN_OUT_OF_DEVICE_MEMORY);
    adapters_give(block, NULL);
    adapters_give(adapters_take(60 * MIB, NULL), NULL);
    adapters_close(device);
}

static void a_fraction_limits_the_pool(void **state) {
    tn_device *device = adapters_open(1, 1024 * MIB);
    void *block = NULL;
    (void)state;
    EXPECT_OK(tn__framework_fraction_set(0, 0.25));
    EXPECT_STATUS(tn__framework_alloc(0, 257 * MIB, NULL, "test", &block), TN_OUT_OF_DEVICE_MEMORY);
    block = adapters_take(200 * MIB, NULL);
    EXPECT_STATUS(tn__framework_fraction_set(0, 0.125), TN_IN_USE);
    EXPECT_STATUS(tn__framework_fraction_set(0, -0.5), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn__framework_fraction_set(0, 1.5), TN_INVALID_ARGUMENT);
    adapters_give(block, NULL);
    EXPECT_OK(tn__framework_fraction_set(0, 0.125)); /* idle memory went back */
    assert_true(adapters_number("reserved_bytes") <= 128 * MIB);
    EXPECT_OK(tn__framework_fraction_set(0, 0));
    EXPECT_STATUS(tn__framework_alloc(0, 1, NULL, "test", &block), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_OK(tn__framework_fraction_set(0, 1));
    adapters_give(adapters_take(900 * MIB, NULL), NULL);
    adapters_close(device);
}

/* Memory of one device that a stream of another uses. */
static void devices_are_peers_of_each_other(void **state) {
    tn_device *device = adapters_open(2, 0);
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *second = NULL;
    tn_stream peer;
    void *block = adapters_take(4 * MIB, NULL);
    void *on_second = NULL;
    uint64_t value = 0;
    (void)state;
    config.driver = TN_DRIVER_CUDA;
    config.ordinal = 1;
    EXPECT_OK(tn_device_create(&config, &second));
    peer = test_open_foreign_stream(second);
    EXPECT_OK(tn__framework_alloc(1, 2 * MIB, peer, "test", &on_second));
    EXPECT_OK(tn_adapter_stat(1, "live_bytes", &value));
    assert_int_equal(value, 2 * MIB);
    assert_int_equal(adapters_number("live_bytes"), 4 * MIB);
    EXPECT_OK(tn__framework_use(block, peer));
    test_sim_read(second, peer, block, 4 * MIB, 1000);
    adapters_give(block, NULL);
    block = adapters_take(4 * MIB, NULL);
    test_sim_write(device, NULL, block, 4 * MIB, 10);
    adapters_give(block, NULL);
    EXPECT_OK(tn__framework_free(1, on_second, peer));
    EXPECT_OK(tn_device_synchronize(device));
    EXPECT_OK(tn_device_synchronize(second));
    test_close_foreign_stream(second, peer);
    EXPECT_OK(tn_adapters_close());
    EXPECT_OK(tn_device_destroy(second));
    adapters_close(device);
}

static void the_program_can_give_its_own_pool(void **state) {
    tn_device *device = adapters_open(1, 0);
    tn_pool *mine = test_open_pool(device, TN_BACKING_VMM, 64 * MIB);
    tn_pool *used = NULL;
    void *block = NULL;
    uint64_t waits;
    (void)state;
    tn_pool *const others[] = {test_open_pool(device, TN_BACKING_PINNED, 0),
                               test_open_graph_pool(device, TN_BACKING_VMM)};
    for (int i = 0; i < 2; i++) {
        EXPECT_STATUS(tn_adapter_pool_use(others[i]), TN_INVALID_ARGUMENT);
        EXPECT_OK(tn_pool_destroy(others[i]));
    }
    EXPECT_STATUS(tn_adapter_pool_use(NULL), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_adapter_pool_use(mine));
    EXPECT_STATUS(tn_adapter_pool_use(mine), TN_INVALID_STATE);
    EXPECT_OK(tn_adapter_pool(0, &used));
    assert_ptr_equal(used, mine);
    EXPECT_STATUS(tn__framework_alloc(0, 65 * MIB, NULL, "test", &block), TN_OUT_OF_DEVICE_MEMORY);
    block = adapters_take(16 * MIB, NULL);
    tn__framework_free_unordered(0, block);
    adapters_give(adapters_take(16 * MIB, NULL), NULL);
    waits = test_sim_get()->call_count("cuCtxSynchronize");
    EXPECT_OK(tn_pool_trim(mine, 0, NULL)); /* behind all work */
    assert_int_equal(test_sim_get()->call_count("cuCtxSynchronize"), waits + 1);
    EXPECT_OK(tn_adapters_close());
    waits = test_sim_get()->call_count("cuCtxSynchronize");
    EXPECT_OK(tn_pool_trim(mine, 0, NULL)); /* the program's own again */
    assert_int_equal(test_sim_get()->call_count("cuCtxSynchronize"), waits);
    assert_int_equal(test_pool_stats(mine).live_blocks, 0);
    EXPECT_OK(tn_pool_destroy(mine));
    adapters_close(device);
}

static void closing_finds_leaks(void **state) {
    tn_device *device = adapters_open(1, 0);
    void *block = adapters_take(100, NULL);
    (void)state;
    EXPECT_STATUS(tn_adapters_close(), TN_LEAK);
    EXPECT_ERROR_HAS("test");
    adapters_give(block, NULL);
    adapters_close(device);
}

/* In a forked child frees do nothing, and to allocate fails. */
static void a_forked_child_allocates_and_frees_nothing(void **state) {
    tn_device *device = adapters_open(1, 0);
    void *block = adapters_take(100, NULL);
    void *other = NULL;
    uint64_t value = 0;
    int ended = 0;
    pid_t child = fork();
    (void)state;
    assert_true(child >= 0);
    if (child == 0) {
        int is_right = tn__framework_free(0, block, NULL) == TN_OK &&
                       tn__framework_alloc(0, 100, NULL, "test", &other) == TN_INVALID_STATE &&
                       !tn_cupy_malloc(NULL, 100, 0) && !tn_ort_alloc(100) &&
                       adapters_end(1) == TN_INVALID_STATE && adapters_release(1) == TN_OK &&
                       tn_adapter_stat(0, "live_bytes", &value) == TN_INVALID_STATE &&
                       tn_adapters_trim() == TN_OK && tn_adapters_close() == TN_OK;
        tn__framework_free_unordered(0, block);
        _exit(is_right ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(WIFEXITED(ended));
    assert_int_equal(WEXITSTATUS(ended), 0);
    adapters_give(block, NULL);
    adapters_close(device);
}

/* ---- CuPy and ONNX Runtime ------------------------------------------------------------------- */

static void cupy_has_the_order_of_the_stream_that_it_names(void **state) {
    tn_device *device = adapters_open(1, 0);
    tn_stream stream = test_open_foreign_stream(device);
    void *block = tn_cupy_malloc(stream, 4 * MIB, 0);
    (void)state;
    assert_non_null(block);
    test_sim_write(device, stream, block, 4 * MIB, 100);
    tn_cupy_free(stream, block, 0);
    tn_cupy_free(stream, block, 0); /* told on stderr */
    tn_cupy_free(stream, NULL, 0);
    block = tn_cupy_malloc(NULL, 4 * MIB, 0); /* another stream: waits, or other memory */
    test_sim_write(device, NULL, block, 4 * MIB, 100);
    tn_cupy_free(NULL, block, 0);
    assert_null(tn_cupy_malloc(NULL, 16, 1));
    assert_int_equal(adapters_number("live_blocks"), 0);
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, stream);
    adapters_close(device);
}

static void onnx_runtime_has_no_stream_unless_told(void **state) {
    tn_device *device = adapters_open(1, 0);
    tn_stream compute = test_open_foreign_stream(device);
    void *block = tn_ort_alloc(8 * MIB);
    void *other;
    (void)state;
    assert_non_null(block);
    EXPECT_STATUS(tn_ort_configure(0, compute, 1), TN_INVALID_STATE);
    EXPECT_OK(tn_ort_configure(0, NULL, 0)); /* for the next session: as it is */
    test_sim_write(device, compute, block, 8 * MIB, 1000);
    tn_ort_free(block);
    tn_ort_free(block); /* freed already, though not back yet: told on stderr */
    other = tn_ort_alloc(8 * MIB);
    assert_ptr_not_equal(other, block);
    tn_ort_free(other);
    tn_ort_free(NULL);
    tn_ort_empty_cache();
    assert_int_equal(adapters_number("reserved_bytes"), 0);
    tn_ort_free(block); /* freed already: told on stderr */
    EXPECT_OK(tn_ort_configure(0, compute, 1));
    block = tn_ort_alloc(8 * MIB);
    test_sim_write(device, compute, block, 8 * MIB, 1000);
    tn_ort_free(block);
    assert_ptr_equal(tn_ort_alloc(8 * MIB), block); /* in the order of the stream */
    test_sim_write(device, compute, block, 8 * MIB, 1000);
    tn_ort_free(block);
    EXPECT_STATUS(tn_ort_configure(7, NULL, 0), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_ort_configure(0, NULL, 0));
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, compute);
    adapters_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_given_out_and_taken_back_once),
        cmocka_unit_test(a_use_that_is_told_early_holds_until_the_free),
        cmocka_unit_test(unrecorded_readers_are_safe_from_other_streams),
        cmocka_unit_test(unrecorded_readers_are_safe_from_other_threads),
        cmocka_unit_test(idle_memory_goes_between_streams_behind_all_work),
        cmocka_unit_test(memory_with_recorded_uses_goes_between_streams_too),
        cmocka_unit_test(a_use_of_a_stream_that_is_gone_waits_for_the_device),
        cmocka_unit_test(memory_freed_without_a_stream_waits_for_all_work),
        cmocka_unit_test(what_waits_for_the_devices_is_bounded),
        cmocka_unit_test(uses_end_with_their_block),
        cmocka_unit_test(what_waits_for_the_devices_is_freed_once),
        cmocka_unit_test(shortage_is_a_status_or_null),
        cmocka_unit_test(a_block_of_a_stream_that_is_gone_is_freed),
        cmocka_unit_test(a_fraction_limits_the_pool),
        cmocka_unit_test(devices_are_peers_of_each_other),
        cmocka_unit_test(the_program_can_give_its_own_pool),
        cmocka_unit_test(closing_finds_leaks),
        cmocka_unit_test(a_forked_child_allocates_and_frees_nothing),
        cmocka_unit_test(cupy_has_the_order_of_the_stream_that_it_names),
        cmocka_unit_test(onnx_runtime_has_no_stream_unless_told),
    };
    return cmocka_run_group_tests_name("adapters/framework_blocks", tests, NULL, NULL);
}
