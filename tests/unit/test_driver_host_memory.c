/* Memory of the host driver: its limit, its alignment, and that it is a jemalloc arena's. */
#include "test_support.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "driver_host_memory.h"
#include "host_alloc.h"
#include "track.h"

#define MIB ((size_t)1 << 20)

static const tn__driver *const host = &tn__driver_host;

static tn__driver_device *open_device(size_t limit, tn_device_info *info) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn__driver_device *device = NULL;
    config.memory_limit_bytes = limit;
    EXPECT_OK(host->open(&config, info, &device));
    return device;
}

static size_t free_bytes_of(tn__driver_device *device) {
    size_t free_bytes = 0, total_bytes = 0;
    EXPECT_OK(host->memory_info(device, &free_bytes, &total_bytes));
    return free_bytes;
}

static void the_info_says_what_the_device_is(void **state) {
    (void)state;
    tn_device_info info;
    tn__driver_device *device = open_device(0, &info);
    assert_int_equal(info.driver, TN_DRIVER_HOST);
    assert_int_equal(info.memory_bytes, 16384 * MIB);
    assert_int_equal(info.granularity_bytes, 2 * MIB);
    assert_int_equal(info.supports_vmm, 0);
    assert_int_equal(info.simulated, 0);
    assert_string_equal(info.name, "host CPU, jemalloc memory");
    assert_null(host->mem_create);
    assert_null(host->ghost_launch);
    host->close(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void memory_is_aligned_writable_and_counted_in_granules(void **state) {
    (void)state;
    enum { COUNT = 9 };
    static const size_t sizes[COUNT] = {1,           511,     4096,    2 * MIB - 1, 2 * MIB,
                                        2 * MIB + 1, 3 * MIB, 8 * MIB, 8 * MIB + 5};
    size_t granules = 0;
    void *blocks[COUNT];
    tn_device_info info;
    tn__driver_device *device = open_device(64 * MIB, &info);
    for (int i = 0; i < COUNT; i++) {
        EXPECT_OK(host->mem_alloc(device, sizes[i], &blocks[i]));
        assert_int_equal((uintptr_t)blocks[i] % (2 * MIB), 0);
        memset(blocks[i], i + 1, sizes[i]);
        granules += (sizes[i] + 2 * MIB - 1) / (2 * MIB);
        assert_int_equal(free_bytes_of(device), 64 * MIB - granules * 2 * MIB);
    }
    for (int i = 0; i < COUNT; i++) {
        assert_int_equal(((unsigned char *)blocks[i])[0], i + 1);
        assert_int_equal(((unsigned char *)blocks[i])[sizes[i] - 1], i + 1);
    }
    for (int i = 0; i < COUNT; i += 2)
        EXPECT_OK(host->mem_free(device, blocks[i]));
    for (int i = 1; i < COUNT; i += 2)
        EXPECT_OK(host->mem_free(device, blocks[i]));
    assert_int_equal(free_bytes_of(device), 64 * MIB);
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(host->stats(device, &stats));
    assert_int_equal(stats.calls[TN_CALL_MEM_ALLOC], COUNT);
    assert_int_equal(stats.calls[TN_CALL_MEM_FREE], COUNT);
    assert_true(stats.time_us > 0.0);
    host->close(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void beyond_the_limit_is_out_of_device_memory(void **state) {
    (void)state;
    static const size_t too_much[] = {6 * MIB + 1, 8 * MIB, SIZE_MAX, SIZE_MAX - 2 * MIB,
                                      SIZE_MAX / 2};
    void *first, *second = NULL;
    tn_device_info info;
    tn__driver_device *device = open_device(8 * MIB + 5, &info); /* whole granules count */
    assert_int_equal(info.memory_bytes, 8 * MIB);
    EXPECT_OK(host->mem_alloc(device, 2 * MIB, &first));
    for (size_t i = 0; i < sizeof too_much / sizeof *too_much; i++) {
        EXPECT_STATUS(host->mem_alloc(device, too_much[i], &second), TN_OUT_OF_DEVICE_MEMORY);
        EXPECT_ERROR_HAS("6291456 of 8388608 left");
        assert_null(second);
        assert_int_equal(free_bytes_of(device), 6 * MIB);
    }
    EXPECT_OK(host->mem_alloc(device, 6 * MIB, &second));
    assert_int_equal(free_bytes_of(device), 0);
    host->close(device); /* gives back what is left */
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void bad_arguments_change_nothing(void **state) {
    (void)state;
    void *block, *none = NULL;
    int local;
    tn_device_info info;
    tn__driver_device *device = open_device(8 * MIB, &info);
    EXPECT_OK(host->mem_alloc(device, 4 * MIB, &block));
    EXPECT_STATUS(host->mem_alloc(device, 0, &none), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(host->mem_free(device, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(host->mem_free(device, &local), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(host->mem_free(device, (char *)block + 2 * MIB), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("is no memory of this host device");
    assert_int_equal(free_bytes_of(device), 4 * MIB);
    EXPECT_OK(host->mem_free(device, block));
    EXPECT_STATUS(host->mem_free(device, block), TN_INVALID_ARGUMENT);
    host->close(device);

    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn__driver_device *unopened = NULL;
    config.ordinal = 1;
    EXPECT_STATUS(host->open(&config, &info, &unopened), TN_INVALID_ARGUMENT);
    config.ordinal = 0;
    config.memory_limit_bytes = MIB;
    EXPECT_STATUS(host->open(&config, &info, &unopened), TN_INVALID_ARGUMENT);
    assert_null(unopened);
    assert_int_equal(tn__host_live_blocks(), 0);
}

typedef int (*mallctl_call)(const char *name, void *old, size_t *old_bytes, void *value,
                            size_t bytes);

static mallctl_call private_mallctl(void) {
    mallctl_call mallctl = NULL;
    void *library = dlopen("libtenure-jemalloc.so", RTLD_NOW | RTLD_NOLOAD);
    assert_non_null(library);
    *(void **)&mallctl = dlsym(library, "tn__je_mallctl");
    assert_non_null(mallctl);
    return mallctl;
}

/* Bytes that an arena of the private jemalloc has given out. */
static size_t arena_bytes(mallctl_call mallctl, unsigned arena) {
    char name[64];
    uint64_t epoch = 1;
    size_t bytes = 0, size = sizeof bytes;
    snprintf(name, sizeof name, "stats.arenas.%u.large.allocated", arena);
    assert_int_equal(mallctl("epoch", NULL, NULL, &epoch, sizeof epoch), 0);
    assert_int_equal(mallctl(name, &bytes, &size, NULL, 0), 0);
    return bytes;
}

static void memory_comes_from_an_arena_of_its_own(void **state) {
    (void)state;
    tn__host_memory memory, other;
    void *block;
    tn__host_memory_open(&memory, 64 * MIB, NULL);
    tn__host_memory_open(&other, 64 * MIB, NULL);
    mallctl_call mallctl = private_mallctl();
    assert_null(tn__host_arena_why_none());
    assert_int_equal(memory.arena.is_open, 1);
    assert_int_not_equal(memory.arena.index, other.arena.index);
    EXPECT_OK(tn__host_memory_take(&memory, 8 * MIB, &block));
    assert_int_equal(arena_bytes(mallctl, memory.arena.index), 8 * MIB);
    assert_int_equal(arena_bytes(mallctl, other.arena.index), 0);
    EXPECT_OK(tn__host_memory_give(&memory, block));
    assert_int_equal(arena_bytes(mallctl, memory.arena.index), 0);
    EXPECT_OK(tn__host_memory_close(&other));
    EXPECT_OK(tn__host_memory_close(&memory));
}

static void without_jemalloc_mmap_gives_the_same_answers(void **state) {
    (void)state;
    tn__host_memory memory;
    void *blocks[3], *none = NULL;
    tn__host_memory_open(&memory, 10 * MIB, NULL);
    tn__host_memory_use_no_arena(&memory);
    for (int i = 0; i < 3; i++) {
        EXPECT_OK(tn__host_memory_take(&memory, 3 * MIB - (size_t)i * MIB, &blocks[i]));
        assert_int_equal((uintptr_t)blocks[i] % (2 * MIB), 0);
        memset(blocks[i], 0x5a, 3 * MIB - (size_t)i * MIB);
    }
    assert_int_equal(tn__host_memory_used(&memory), 8 * MIB);
    EXPECT_STATUS(tn__host_memory_take(&memory, 2 * MIB + 1, &none), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_OK(tn__host_memory_give(&memory, blocks[1]));
    EXPECT_STATUS(tn__host_memory_give(&memory, blocks[1]), TN_INVALID_ARGUMENT);
    assert_int_equal(tn__host_memory_used(&memory), 6 * MIB);
    EXPECT_OK(tn__host_memory_close(&memory));
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* A pool marks freed blocks inside its slab. What it gives back must be usable by the next owner.
 */
static void marked_memory_goes_back_usable(void **state) {
    (void)state;
    unsigned char *block, *again;
    tn_device_info info;
    tn__driver_device *device = open_device(8 * MIB, &info);
    EXPECT_OK(host->mem_alloc(device, 2 * MIB, (void **)&block));
    TN_TRACK_FREE(block + 512, MIB);
#ifdef __SANITIZE_ADDRESS__
    assert_int_equal(__asan_address_is_poisoned(block), 0);
    assert_int_equal(__asan_address_is_poisoned(block + 512), 1);
    assert_int_equal(__asan_address_is_poisoned(block + 512 + MIB), 0);
#endif
    TN_TRACK_ALLOC(block + 512, 512);
    memset(block + 512, 1, 512);
    EXPECT_OK(host->mem_free(device, block));
    EXPECT_OK(host->mem_alloc(device, 2 * MIB, (void **)&again));
    assert_ptr_equal(again, block); /* the arena kept it */
    memset(again, 2, 2 * MIB);
    EXPECT_OK(host->mem_free(device, again));
    host->close(device);
}

static void a_failed_host_allocation_takes_no_memory(void **state) {
    (void)state;
    void *block = NULL;
    tn_device_info info;
    tn__driver_device *device = open_device(8 * MIB, &info);
    tn__host_alloc_fault(1, 0);
    EXPECT_STATUS(host->mem_alloc(device, 2 * MIB, &block), TN_OUT_OF_HOST_MEMORY);
    tn__host_alloc_fault(0, 0);
    assert_null(block);
    assert_int_equal(free_bytes_of(device), 8 * MIB);
    host->close(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_info_says_what_the_device_is),
        cmocka_unit_test(memory_is_aligned_writable_and_counted_in_granules),
        cmocka_unit_test(beyond_the_limit_is_out_of_device_memory),
        cmocka_unit_test(bad_arguments_change_nothing),
        cmocka_unit_test(memory_comes_from_an_arena_of_its_own),
        cmocka_unit_test(without_jemalloc_mmap_gives_the_same_answers),
        cmocka_unit_test(marked_memory_goes_back_usable),
        cmocka_unit_test(a_failed_host_allocation_takes_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
