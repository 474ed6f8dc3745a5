/* Devices and streams of the public interface on the host driver, and what pools hear of them. */
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"
#include "host_alloc.h"
#include "options.h"

static void a_device_with_pools_or_streams_is_in_use(void **state) {
    (void)state;
    tn_stream first, second;
    tn_device *device = test_open_host();
    EXPECT_OK(tn_stream_create(device, &first));
    EXPECT_OK(tn_stream_create(device, &second));
    tn__device_retain(device);
    EXPECT_STATUS(tn_device_destroy(device), TN_IN_USE);
    EXPECT_ERROR_HAS("used by 1 pool and 2 streams");
    tn__device_release(device);
    EXPECT_OK(tn_stream_destroy(device, first));
    EXPECT_STATUS(tn_device_destroy(device), TN_IN_USE);
    EXPECT_ERROR_HAS("used by 0 pools and 1 stream:");
    EXPECT_OK(tn_stream_destroy(device, second));
    EXPECT_OK(tn_device_destroy(device));
    EXPECT_OK(tn_device_destroy(NULL));
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void bad_arguments_are_named(void **state) {
    (void)state;
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    EXPECT_STATUS(tn_device_create(&config, NULL), TN_INVALID_ARGUMENT);
    config.size = 8;
    EXPECT_STATUS(tn_device_create(&config, &device), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("TN_DEVICE_CONFIG_INIT");
    config = (tn_device_config)TN_DEVICE_CONFIG_INIT;
    config.driver = (tn_driver_kind)77;
    EXPECT_STATUS(tn_device_create(&config, &device), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("77");
    config.driver = TN_DRIVER_HOST;
    config.ordinal = -1;
    EXPECT_STATUS(tn_device_create(&config, &device), TN_INVALID_ARGUMENT);
    config.ordinal = 3;
    EXPECT_STATUS(tn_device_create(&config, &device), TN_INVALID_ARGUMENT);
    assert_null(device);

    char byte = 0;
    tn_device_info info = {0};
    tn_driver_stats stats = {0};
    device = test_open_host();
    EXPECT_STATUS(tn_device_info_get(device, &info), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_device_driver_stats(device, &stats), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_copy(device, NULL, &byte, 1, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_copy(device, &byte, NULL, 1, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_fill(device, NULL, 0, 1, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_stream_destroy(device, &byte), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_stream_synchronize(device, &byte), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_stream_wait(device, &byte, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_stream_wait(device, NULL, &byte), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_copy(device, NULL, NULL, 0, NULL));
    EXPECT_OK(tn_fill(device, NULL, 0, 0, NULL));
    EXPECT_OK(tn_stream_destroy(device, NULL));
    EXPECT_OK(tn_device_destroy(device));
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void a_stream_waits_for_another_without_a_host_wait(void **state) {
    (void)state;
    enum { ROUNDS = 200 };
    unsigned char ping[256] = {0}, pong[256] = {0};
    tn_stream first, second;
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    tn_device *device = test_open_host();
    EXPECT_OK(tn_stream_create(device, &first));
    EXPECT_OK(tn_stream_create(device, &second));
    for (int i = 1; i <= ROUNDS; i++) {
        EXPECT_OK(tn_fill(device, ping, (unsigned char)i, sizeof ping, first));
        EXPECT_OK(tn_stream_wait(device, second, first));
        EXPECT_OK(tn_copy(device, pong, ping, sizeof ping, second));
        EXPECT_OK(tn_stream_wait(device, first, second));
    }
    EXPECT_OK(tn_stream_synchronize(device, first));
    for (size_t i = 0; i < sizeof pong; i++)
        assert_int_equal(pong[i], ROUNDS);
    EXPECT_OK(tn_device_driver_stats(device, &stats));
    assert_int_equal(stats.calls[TN_CALL_LAUNCH], 2 * ROUNDS);
    assert_int_equal(stats.calls[TN_CALL_STREAM_WAIT], 2 * ROUNDS);
    assert_int_equal(stats.calls[TN_CALL_EVENT_RECORD], 2 * ROUNDS);
    assert_int_equal(stats.calls[TN_CALL_EVENT], 1); /* one event, used again and again */
    assert_int_equal(stats.calls[TN_CALL_EVENT_SYNCHRONIZE], 0);
    EXPECT_OK(tn_stream_destroy(device, first));
    EXPECT_OK(tn_stream_destroy(device, second));
    EXPECT_OK(tn_device_destroy(device));
    assert_int_equal(tn__host_live_blocks(), 0);
}

typedef struct heard {
    tn_device *device;
    tn_stream stream;
    uint64_t id;
    int count;
    unsigned char *written;
    unsigned char byte_at_end;
} heard;

static void hear_end(void *argument, tn_stream stream, uint64_t id) {
    heard *out = argument;
    out->stream = stream;
    out->id = id;
    out->count++;
    out->byte_at_end = *out->written;
    tn__device_retain(out->device); /* no lock of the device is held */
    tn__device_release(out->device);
    EXPECT_OK(tn_stream_synchronize(out->device, stream)); /* it still exists */
}

static void watchers_hear_of_a_stream_after_its_work_and_before_its_end(void **state) {
    (void)state;
    unsigned char byte = 0;
    uint64_t id = 0;
    tn_stream stream;
    tn_device *device = test_open_host();
    heard first = {.device = device, .written = &byte}, second = first;
    EXPECT_OK(tn__device_watch_streams(device, hear_end, &first));
    EXPECT_OK(tn__device_watch_streams(device, hear_end, &second));
    EXPECT_OK(tn_stream_create(device, &stream));
    EXPECT_OK(tn__device_driver(device)->stream_id(tn__device_state(device), stream, &id));
    EXPECT_OK(tn_fill(device, &byte, 9, 1, stream));
    EXPECT_OK(tn_stream_destroy(device, stream));
    assert_ptr_equal(first.stream, stream);
    assert_int_equal(first.id, id);
    assert_int_equal(first.count, 1);
    assert_int_equal(first.byte_at_end, 9);
    assert_int_equal(second.count, 1);
    EXPECT_STATUS(tn_stream_destroy(device, stream), TN_INVALID_ARGUMENT);
    tn__device_unwatch_streams(device, &first);
    tn__device_unwatch_streams(device, &first); /* twice is nothing */
    EXPECT_OK(tn_stream_create(device, &stream));
    EXPECT_OK(tn_stream_destroy(device, stream));
    assert_int_equal(first.count, 1);
    assert_int_equal(second.count, 2);
    tn__device_unwatch_streams(device, &second);
    EXPECT_OK(tn_device_destroy(device));
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void every_driver_call_has_a_name_of_its_own(void **state) {
    (void)state;
    for (int i = 0; i < TN_CALL_COUNT; i++) {
        for (int j = 0; j < i; j++) {
            assert_string_not_equal(tn_driver_call_name((tn_driver_call)i),
                                    tn_driver_call_name((tn_driver_call)j));
        }
    }
    assert_string_equal(tn_driver_call_name(TN_CALL_MEM_MAP), "mem_map");
    assert_string_equal(tn_driver_call_name(TN_CALL_COUNT), "unknown driver call");
    assert_string_equal(tn_version(), TN_VERSION_STRING);
}

static void a_failed_host_allocation_leaves_nothing(void **state) {
    (void)state;
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = TN_DRIVER_HOST;
    long nth = 0;
    tn_status status;
    do {
        tn_device *device = NULL;
        tn_stream stream = NULL;
        tn__host_alloc_fault(++nth, 0);
        status = tn_device_create(&config, &device);
        if (status == TN_OK) {
            status = tn_stream_create(device, &stream);
            tn_status destroyed = tn_stream_destroy(device, stream);
            tn__host_alloc_fault(0, 0);
            EXPECT_OK(destroyed);
            EXPECT_OK(tn_device_destroy(device));
        }
        tn__host_alloc_fault(0, 0);
        assert_int_equal(tn__host_live_blocks(), 0);
    } while (status == TN_OUT_OF_HOST_MEMORY);
    EXPECT_OK(status);
    assert_int_equal(nth, 7); /* device, its state, two registries, stream, queue; then none */
}

/* What goes to stderr while a device is opened and closed. */
static void open_and_read_stderr(char *text, size_t text_bytes) {
    FILE *file = tmpfile();
    assert_non_null(file);
    fflush(stderr);
    int before = dup(STDERR_FILENO);
    dup2(fileno(file), STDERR_FILENO);
    tn_device *device = test_open_host();
    EXPECT_OK(tn_device_destroy(device));
    fflush(stderr);
    dup2(before, STDERR_FILENO);
    close(before);
    rewind(file);
    text[fread(text, 1, text_bytes - 1, file)] = 0;
    fclose(file);
}

static void verbose_prints_version_options_with_source_and_device(void **state) {
    (void)state;
    static char text[8192];
    open_and_read_stderr(text, sizeof text);
    assert_string_equal(text, "");
    setenv("TENURE_VERBOSE", "1", 1);
    setenv("TENURE_HOST_MEMORY", "64MiB", 1);
    tn__options_reload();
    open_and_read_stderr(text, sizeof text);
    assert_non_null(strstr(text, "tenure " TN_VERSION_STRING "\n"));
    assert_non_null(strstr(text, "TENURE_DRIVER"));
    assert_non_null(strstr(text, "64MiB          (TENURE_HOST_MEMORY)"));
    assert_non_null(strstr(text, "(default)"));
    assert_non_null(strstr(text,
                           "tenure device: driver host, host CPU, jemalloc memory, ordinal 0, "
                           "67108864 bytes in granules of 2097152\n"));
    open_and_read_stderr(text, sizeof text); /* the options once, each device */
    assert_null(strstr(text, "TENURE_DRIVER"));
    assert_non_null(strstr(text, "tenure device: driver host"));
    unsetenv("TENURE_VERBOSE");
    unsetenv("TENURE_HOST_MEMORY");
    tn__options_reload();
}

/* Statuses of a child that was forked while a host device was open: each as one bit. */
static int use_in_child(tn_device *device, tn_stream stream) {
    char byte = 0;
    tn_device *another = NULL;
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = TN_DRIVER_HOST;
    int wrong = tn_fill(device, &byte, 1, 1, stream) != TN_DRIVER_ERROR;
    wrong |= (!strstr(tn_error_last(), "forked child")) << 1;
    wrong |= (tn_device_synchronize(device) != TN_DRIVER_ERROR) << 2;
    wrong |= (tn_device_create(&config, &another) != TN_DRIVER_ERROR) << 3;
    wrong |= (tn_stream_destroy(device, stream) != TN_OK) << 4;
    wrong |= (tn_device_destroy(device) != TN_OK) << 5;
    return wrong;
}

static void a_forked_child_gets_a_status_and_can_close(void **state) {
    (void)state;
    int result = -1;
    tn_stream stream;
    tn_device *device = test_open_host();
    EXPECT_OK(tn_stream_create(device, &stream));
    pid_t child = fork();
    if (child == 0) _exit(use_in_child(device, stream));
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), 0);
    EXPECT_OK(tn_stream_destroy(device, stream)); /* the parent goes on */
    EXPECT_OK(tn_device_destroy(device));
    assert_int_equal(tn__host_live_blocks(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_device_with_pools_or_streams_is_in_use),
        cmocka_unit_test(bad_arguments_are_named),
        cmocka_unit_test(a_stream_waits_for_another_without_a_host_wait),
        cmocka_unit_test(watchers_hear_of_a_stream_after_its_work_and_before_its_end),
        cmocka_unit_test(every_driver_call_has_a_name_of_its_own),
        cmocka_unit_test(a_failed_host_allocation_leaves_nothing),
        cmocka_unit_test(verbose_prints_version_options_with_source_and_device),
        cmocka_unit_test(a_forked_child_gets_a_status_and_can_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
