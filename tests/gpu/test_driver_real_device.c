/* The CUDA driver on a real GPU: the facts that everything above relies on, and a round trip.
 *
 * Skipped (77) where there is no GPU. Uses the driver's table, which the library shows to its
 * sister libraries.
 */
#include "test_support.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"

#define MIB ((size_t)1 << 20)

static tn_device *device;
static const tn__driver *cuda;
static tn__driver_device *on;

static uint64_t calls_of(tn_driver_call call) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(device, &stats));
    return stats.calls[call];
}

static void the_info_is_of_a_real_gpu(void **state) {
    (void)state;
    tn_device_info info = TN_DEVICE_INFO_INIT;
    size_t free_bytes = 0, total_bytes = 0;
    EXPECT_OK(tn_device_info_get(device, &info));
    printf("%s, compute %d.%d, %zu bytes, granularity %zu\n", info.name, info.compute_major,
           info.compute_minor, info.memory_bytes, info.granularity_bytes);
    assert_int_equal(info.simulated, 0);
    assert_int_equal(info.driver, TN_DRIVER_CUDA);
    assert_true(info.compute_major >= 7);
    assert_int_equal(info.supports_vmm, 1);
    assert_int_equal(info.granularity_bytes, 2 * MIB);
    EXPECT_OK(cuda->memory_info(on, &free_bytes, &total_bytes));
    assert_true(free_bytes <= total_bytes);
    assert_true(total_bytes <= info.memory_bytes);
}

static void bytes_go_to_the_device_and_back_through_a_mapped_page(void **state) {
    (void)state;
    static unsigned char sent[2 << 20], received[2 << 20];
    char *range;
    tn__handle handle;
    tn_stream stream;
    for (size_t i = 0; i < sizeof sent; i++)
        sent[i] = (unsigned char)(i * 31 + i / 4096);
    EXPECT_OK(tn_stream_create(device, &stream));
    EXPECT_OK(cuda->address_reserve(on, 64 * MIB, (void **)&range));
    EXPECT_OK(cuda->mem_create(on, 2 * MIB, &handle));
    EXPECT_OK(cuda->mem_map(on, range + 32 * MIB, 2 * MIB, handle));
    EXPECT_OK(cuda->mem_set_access(on, range + 32 * MIB, 2 * MIB));
    EXPECT_OK(tn_copy(device, range + 32 * MIB, sent, sizeof sent, stream));
    EXPECT_OK(tn_copy(device, received, range + 32 * MIB, sizeof received, stream));
    EXPECT_OK(tn_stream_synchronize(device, stream));
    assert_memory_equal(sent, received, sizeof sent);
    EXPECT_OK(cuda->mem_unmap(on, range + 32 * MIB, 2 * MIB));
    EXPECT_OK(cuda->mem_release(on, handle, 2 * MIB));
    EXPECT_OK(cuda->address_free(on, range, 64 * MIB));
    EXPECT_OK(tn_stream_destroy(device, stream));
}

/* What moving memory in stream order rests on, and what the driver refuses. */
static void one_handle_maps_at_two_addresses_and_only_whole(void **state) {
    (void)state;
    unsigned char byte = 0;
    char *range;
    tn__handle handle, large;
    EXPECT_OK(cuda->address_reserve(on, 16 * MIB, (void **)&range));
    EXPECT_OK(cuda->mem_create(on, 2 * MIB, &handle));
    EXPECT_OK(cuda->mem_create(on, 4 * MIB, &large));
    for (size_t at = 0; at < 8 * MIB; at += 4 * MIB) {
        EXPECT_OK(cuda->mem_map(on, range + at, 2 * MIB, handle));
        EXPECT_OK(cuda->mem_set_access(on, range + at, 2 * MIB));
    }
    EXPECT_OK(tn_fill(device, range, 0x3c, 2 * MIB, NULL));
    EXPECT_OK(tn_copy(device, &byte, range + 4 * MIB + 12345, 1, NULL));
    EXPECT_OK(tn_stream_synchronize(device, NULL));
    assert_int_equal(byte, 0x3c);
    assert_int_not_equal(cuda->mem_map(on, range, 2 * MIB, handle), TN_OK);
    EXPECT_ERROR_HAS("cuMemMap(");
    assert_int_not_equal(cuda->mem_map(on, range + 8 * MIB, 2 * MIB, large), TN_OK);
    for (size_t at = 0; at < 8 * MIB; at += 4 * MIB)
        EXPECT_OK(cuda->mem_unmap(on, range + at, 2 * MIB));
    EXPECT_OK(cuda->mem_release(on, large, 4 * MIB));
    EXPECT_OK(cuda->mem_release(on, handle, 2 * MIB));
    EXPECT_OK(cuda->address_free(on, range, 16 * MIB));
}

static void more_than_the_device_has_is_out_of_memory_and_nothing_sticks(void **state) {
    (void)state;
    void *block = NULL, *fits = NULL;
    tn__handle handle = 0;
    size_t free_before, free_after, total;
    EXPECT_OK(cuda->memory_info(on, &free_before, &total));
    EXPECT_STATUS(cuda->mem_alloc(on, total * 2, &block), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("CUDA_ERROR_OUT_OF_MEMORY");
    size_t too_much = total / (2 * MIB) * (2 * MIB) + 64 * MIB;
    EXPECT_STATUS(cuda->mem_create(on, too_much, &handle), TN_OUT_OF_DEVICE_MEMORY);
    assert_null(block);
    assert_int_equal(handle, 0);
    EXPECT_OK(cuda->mem_alloc(on, 4 * MIB, &fits));
    EXPECT_OK(cuda->mem_free(on, fits));
    EXPECT_OK(cuda->memory_info(on, &free_after, &total));
    assert_true(free_after + 64 * MIB >= free_before); /* the driver may keep a little */
}

static void streams_wait_for_each_other_on_the_device(void **state) {
    (void)state;
    enum { ROUNDS = 100 };
    static unsigned char result[4096];
    char *blocks;
    uint64_t ids[2] = {0, 0};
    tn_stream streams[2];
    EXPECT_OK(cuda->mem_alloc(on, 2 * MIB, (void **)&blocks));
    for (int i = 0; i < 2; i++) {
        EXPECT_OK(tn_stream_create(device, &streams[i]));
        EXPECT_OK(cuda->stream_id(on, streams[i], &ids[i]));
    }
    assert_true(ids[0] != ids[1]);
    uint64_t events = calls_of(TN_CALL_EVENT);
    for (int i = 1; i <= ROUNDS; i++) {
        EXPECT_OK(tn_fill(device, blocks, (unsigned char)i, MIB, streams[0]));
        EXPECT_OK(tn_stream_wait(device, streams[1], streams[0]));
        EXPECT_OK(tn_copy(device, blocks + MIB, blocks, MIB, streams[1]));
        EXPECT_OK(tn_stream_wait(device, streams[0], streams[1]));
    }
    EXPECT_OK(tn_copy(device, result, blocks + MIB, sizeof result, streams[0]));
    EXPECT_OK(tn_stream_synchronize(device, streams[0]));
    for (size_t i = 0; i < sizeof result; i++)
        assert_int_equal(result[i], ROUNDS);
    assert_true(calls_of(TN_CALL_EVENT) - events <= 1);
    EXPECT_OK(tn_stream_destroy(device, streams[1]));
    EXPECT_OK(tn_stream_destroy(device, streams[0]));
    EXPECT_OK(cuda->mem_free(on, blocks));
}

static void count_up(void *argument) { (*(int *)argument)++; }

static void host_tasks_and_events_are_in_stream_order(void **state) {
    (void)state;
    int count = 0, is_done = 0, is_capturing = -1;
    tn_stream stream;
    tn__event event;
    EXPECT_OK(tn_stream_create(device, &stream));
    EXPECT_OK(cuda->event_create(on, &event));
    EXPECT_OK(cuda->stream_is_capturing(on, stream, &is_capturing));
    assert_int_equal(is_capturing, 0);
    for (int i = 0; i < 10; i++)
        EXPECT_OK(cuda->host_task(on, count_up, &count, stream));
    EXPECT_OK(cuda->event_record(on, event, stream));
    EXPECT_OK(cuda->event_synchronize(on, event));
    assert_int_equal(count, 10);
    EXPECT_OK(cuda->event_is_done(on, event, &is_done));
    assert_int_equal(is_done, 1);
    EXPECT_OK(cuda->event_destroy(on, event));
    EXPECT_OK(tn_stream_destroy(device, stream));
}

static void a_forked_child_gets_a_status(void **state) {
    (void)state;
    int result = -1;
    pid_t child = fork();
    if (child == 0) {
        int is_refused = tn_device_synchronize(device) == TN_DRIVER_ERROR &&
                         strstr(tn_error_last(), "forked child") &&
                         tn_device_destroy(device) == TN_OK;
        _exit(is_refused ? 7 : 8);
    }
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), 7);
    EXPECT_OK(tn_device_synchronize(device));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_info_is_of_a_real_gpu),
        cmocka_unit_test(bytes_go_to_the_device_and_back_through_a_mapped_page),
        cmocka_unit_test(one_handle_maps_at_two_addresses_and_only_whole),
        cmocka_unit_test(more_than_the_device_has_is_out_of_memory_and_nothing_sticks),
        cmocka_unit_test(streams_wait_for_each_other_on_the_device),
        cmocka_unit_test(host_tasks_and_events_are_in_stream_order),
        cmocka_unit_test(a_forked_child_gets_a_status),
    };
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = "libcuda.so.1";
    tn_status status = tn_device_create(&config, &device);
    if (status == TN_UNSUPPORTED) {
        printf("skipped: %s\n", tn_error_last());
        return 77;
    }
    if (status != TN_OK) {
        printf("%s\n", tn_error_last());
        return 1;
    }
    cuda = tn__device_driver(device);
    on = tn__device_state(device);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    return tn_device_destroy(device) == TN_OK ? failures : 1;
}
