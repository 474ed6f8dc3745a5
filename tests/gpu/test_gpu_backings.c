/* The backings beyond VMM on a real GPU: the driver's own pool, plain segments, segments of
 * functions (cuMemAlloc through the driver's library), and host memory, pageable and pinned. Bytes
 * written through a block are read back, on two streams, also across reuse. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_support.h"

#define MIB ((size_t)1 << 20)

static tn_device *device;

/* ---- the caller's functions ------------------------------------------------------------------ */

typedef struct cuda_calls {
    int (*mem_alloc)(unsigned long long *address, size_t bytes);
    int (*mem_free)(unsigned long long address);
    int (*device_get)(int *device, int ordinal);
    int (*context_retain)(void **context, int device);
    int (*context_release)(int device);
    int (*context_set)(void *context);
    void *context;
    int ordinal;
    size_t given;
} cuda_calls;

static cuda_calls cuda;

static void load_cuda(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    *(void **)&cuda.mem_alloc = dlsym(library, "cuMemAlloc_v2");
    *(void **)&cuda.mem_free = dlsym(library, "cuMemFree_v2");
    *(void **)&cuda.device_get = dlsym(library, "cuDeviceGet");
    *(void **)&cuda.context_retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&cuda.context_release = dlsym(library, "cuDevicePrimaryCtxRelease_v2");
    *(void **)&cuda.context_set = dlsym(library, "cuCtxSetCurrent");
    assert_int_equal(cuda.device_get(&cuda.ordinal, 0), 0);
    assert_int_equal(cuda.context_retain(&cuda.context, cuda.ordinal), 0);
    assert_int_equal(cuda.context_set(cuda.context), 0);
}

static tn_status cuda_alloc(void *context, size_t bytes, void **out) {
    unsigned long long address = 0;
    (void)context;
    if (cuda.mem_alloc(&address, bytes) != 0) return TN_OUT_OF_DEVICE_MEMORY;
    cuda.given += bytes;
    *out = (void *)(uintptr_t)address;
    return TN_OK;
}

static tn_status cuda_free(void *context, void *address, size_t bytes) {
    (void)context;
    if (cuda.mem_free((unsigned long long)(uintptr_t)address) != 0) return TN_DRIVER_ERROR;
    cuda.given -= bytes;
    return TN_OK;
}

/* ---- what every backing must do -------------------------------------------------------------- */

static const struct {
    tn_pool_backing backing;
    const char *name;
    int is_host_memory;
} rows[] = {{TN_BACKING_VMM, "vmm", 0},       {TN_BACKING_PLAIN, "plain", 0},
            {TN_BACKING_ASYNC, "async", 0},   {TN_BACKING_CALLER, "caller", 0},
            {TN_BACKING_PINNED, "pinned", 1}, {TN_BACKING_HOST, "host", 1}};

static tn_pool *open_pool(tn_pool_backing backing, size_t limit_bytes) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    config.backing = backing;
    config.limit_bytes = limit_bytes;
    config.functions = (tn_memory_functions){cuda_alloc, cuda_free, NULL};
    EXPECT_OK(tn_pool_create(device, &config, &pool));
    return pool;
}

/* Fills the block with a byte on the stream, and copies its last bytes to `out`. */
static void write_block(void *block, size_t bytes, unsigned char byte, int is_host_memory,
                        unsigned char *out, tn_stream stream) {
    if (is_host_memory) {
        memset(block, byte, bytes); /* the CPU may use it at once */
    } else {
        EXPECT_OK(tn_fill(device, block, byte, bytes, stream));
    }
    EXPECT_OK(tn_copy(device, out, (char *)block + bytes - 64, 64, stream));
}

static void check_bytes(const unsigned char *bytes, unsigned char expected) {
    for (int i = 0; i < 64; i++)
        assert_int_equal(bytes[i], expected);
}

static void run_backing(size_t row) {
    static unsigned char seen[64][64];
    tn_pool *pool = open_pool(rows[row].backing, 0);
    tn_stream streams[2];
    size_t released = 0;
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    for (int i = 0; i < 2; i++)
        EXPECT_OK(tn_stream_create(device, &streams[i]));
    for (int i = 0; i < 64; i++) {
        size_t bytes = (size_t)(i % 7 + 1) * 3 * MIB + (size_t)i * 512;
        tn_stream stream = streams[i % 2];
        void *block = NULL;
        EXPECT_OK(tn_alloc(pool, bytes, stream, NULL, &block));
        write_block(block, bytes, (unsigned char)(i + 1), rows[row].is_host_memory, seen[i],
                    stream);
        EXPECT_OK(tn_pool_check(pool));
        EXPECT_OK(tn_free(block, stream));
    }
    EXPECT_OK(tn_device_synchronize(device));
    for (int i = 0; i < 64; i++)
        check_bytes(seen[i], (unsigned char)(i + 1));
    EXPECT_OK(tn_pool_trim(pool, 0, &released));
    EXPECT_OK(tn_pool_stats_get(pool, &stats));
    printf("%s: peak reserved %zu MiB, %zu MiB given back, %llu waits between streams\n",
           rows[row].name, stats.peak_reserved_bytes / MIB, released / MIB,
           (unsigned long long)stats.stream_waits);
    assert_int_equal(stats.live_bytes, 0);
    if (rows[row].backing != TN_BACKING_ASYNC) assert_int_equal(stats.reserved_bytes, 0);
    EXPECT_OK(tn_pool_destroy(pool));
    for (int i = 0; i < 2; i++)
        EXPECT_OK(tn_stream_destroy(device, streams[i]));
    assert_int_equal(cuda.given, 0);
}

static void every_backing_keeps_bytes_apart(void **state) {
    (void)state;
    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++)
        run_backing(row);
}

static void a_limit_holds_and_idle_memory_does_not_count(void **state) {
    (void)state;
    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) {
        tn_pool *pool = open_pool(rows[row].backing, 512 * MIB);
        tn_pool_stats stats = TN_POOL_STATS_INIT;
        void *block = NULL, *none = NULL;
        EXPECT_OK(tn_alloc(pool, 256 * MIB, NULL, NULL, &block));
        EXPECT_STATUS(tn_alloc(pool, 384 * MIB, NULL, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
        EXPECT_OK(tn_free(block, NULL));
        EXPECT_OK(tn_alloc(pool, 384 * MIB, NULL, NULL, &block));
        EXPECT_OK(tn_free(block, NULL));
        EXPECT_OK(tn_pool_stats_get(pool, &stats));
        assert_true(stats.peak_reserved_bytes <= 512 * MIB);
        EXPECT_OK(tn_pool_destroy(pool));
    }
}

/* Synchronising after every step must not make the driver unmap what is free. */
static void a_driver_pool_keeps_its_memory_over_synchronisation(void **state) {
    tn_pool *pool = open_pool(TN_BACKING_ASYNC, 0);
    tn_pool_stats first = TN_POOL_STATS_INIT, last = TN_POOL_STATS_INIT;
    (void)state;
    for (int i = 0; i < 100; i++) {
        void *block = NULL;
        EXPECT_OK(tn_alloc(pool, (size_t)(i % 4 + 1) * 16 * MIB, NULL, NULL, &block));
        EXPECT_OK(tn_fill(device, block, 1, 16 * MIB, NULL));
        EXPECT_OK(tn_free(block, NULL));
        EXPECT_OK(tn_device_synchronize(device));
        if (i == 7) EXPECT_OK(tn_pool_stats_get(pool, &first));
    }
    EXPECT_OK(tn_pool_stats_get(pool, &last));
    assert_int_equal(last.reserved_bytes, first.reserved_bytes);
    assert_true(last.reserved_bytes >= 64 * MIB);
    EXPECT_OK(tn_pool_destroy(pool));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_backing_keeps_bytes_apart),
        cmocka_unit_test(a_limit_holds_and_idle_memory_does_not_count),
        cmocka_unit_test(a_driver_pool_keeps_its_memory_over_synchronisation),
    };
    gpu_side gpu;
    int failures;
    gpu_open(&gpu);
    device = gpu.device;
    load_cuda();
    failures = cmocka_run_group_tests(tests, NULL, NULL);
    (void)cuda.context_release(cuda.ordinal);
    gpu_close(&gpu);
    return failures;
}
