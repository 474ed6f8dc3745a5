/* Drivers that lack a symbol: a required one is named when the device opens; without an optional
 * one the device works, and only what needs it says so.
 *
 * Such a driver is made of the simulated one: a copy of its file in which the name is misspelt.
 */
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "driver.h"
#include "host_alloc.h"

#define MIB ((size_t)1 << 20)

static const tn__driver *const cuda = &tn__driver_cuda;

typedef struct symbol_row {
    const char *need;
    const char *name;
} symbol_row;

#define AS_ROW(need, field, name, parameters) {#need, name},
static const symbol_row symbols[] = {TN__CU_CALLS(AS_ROW)};
enum { SYMBOL_COUNT = sizeof symbols / sizeof *symbols };

static char copy_path[] = "/tmp/tenure-driver-XXXXXX";

static char *read_whole(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *content = malloc(*bytes);
    assert_non_null(content);
    assert_int_equal(fread(content, 1, *bytes, file), *bytes);
    fclose(file);
    return content;
}

/* Misspells the names in the copy's symbol table: dlsym then finds nothing under them. */
static void write_copy_without(const char *const *names, size_t count) {
    size_t bytes;
    char *content = read_whole(TENURE_SIM_LIBRARY, &bytes);
    for (size_t i = 0; i < count; i++) {
        size_t length = strlen(names[i]) + 1, misspelt = 0;
        char *at = content;
        while ((at = memmem(at, bytes - (size_t)(at - content), names[i], length)) != NULL) {
            at[length - 2] = '#';
            misspelt++;
        }
        assert_true(misspelt > 0);
    }
    FILE *file = fopen(copy_path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(content, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
    free(content);
}

static tn_status open_copy(tn_device_info *info, tn__driver_device **out) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.cuda_library = copy_path;
    return cuda->open(&config, info, out);
}

static tn__driver_device *open_without(const char *name, tn_device_info *info) {
    tn__driver_device *device = NULL;
    write_copy_without(&name, 1);
    EXPECT_OK(open_copy(info, &device));
    return device;
}

static void a_missing_required_symbol_is_named(void **state) {
    (void)state;
    int required = 0;
    for (int i = 0; i < SYMBOL_COUNT; i++) {
        tn__driver_device *device = NULL;
        tn_device_info info;
        if (strcmp(symbols[i].need, "REQUIRED") != 0) continue;
        write_copy_without(&symbols[i].name, 1);
        EXPECT_STATUS(open_copy(&info, &device), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS(symbols[i].name);
        EXPECT_ERROR_HAS(copy_path);
        assert_null(device);
        required++;
    }
    assert_int_equal(required, 29);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void without_one_vmm_symbol_there_is_only_plain_memory(void **state) {
    (void)state;
    int vmm = 0;
    for (int i = 0; i < SYMBOL_COUNT; i++) {
        void *out = NULL;
        tn__handle handle;
        tn_device_info info;
        if (strcmp(symbols[i].need, "VMM") != 0) continue;
        tn__driver_device *device = open_without(symbols[i].name, &info);
        assert_int_equal(info.supports_vmm, 0);
        assert_int_equal(info.granularity_bytes, 2 * MIB);
        EXPECT_STATUS(cuda->address_reserve(device, 2 * MIB, &out), TN_UNSUPPORTED);
        EXPECT_STATUS(cuda->mem_create(device, 2 * MIB, &handle), TN_UNSUPPORTED);
        EXPECT_STATUS(cuda->mem_map(device, NULL, 2 * MIB, 1), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS("no virtual memory management");
        EXPECT_OK(cuda->mem_alloc(device, 2 * MIB, &out));
        EXPECT_OK(cuda->mem_free(device, out));
        cuda->close(device);
        vmm++;
    }
    assert_int_equal(vmm, 8);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void do_nothing(void *argument) { (void)argument; }

static void without_host_functions_only_host_tasks_fail(void **state) {
    (void)state;
    tn_device_info info;
    tn__driver_device *device = open_without("cuLaunchHostFunc", &info);
    assert_int_equal(info.supports_vmm, 1);
    EXPECT_STATUS(cuda->host_task(device, do_nothing, NULL, NULL), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("lacks cuLaunchHostFunc");
    EXPECT_OK(cuda->synchronize(device));
    cuda->close(device);
}

static void without_waits_for_values_only_they_fail(void **state) {
    (void)state;
    tn_device_info info;
    void *word = NULL;
    tn__driver_device *device = open_without("cuStreamWaitValue32_v2", &info);
    EXPECT_OK(cuda->host_alloc(device, 64, &word));
    EXPECT_STATUS(cuda->stream_wait_value(device, NULL, word, 0), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("lacks cuStreamWaitValue32_v2");
    EXPECT_OK(cuda->host_free(device, word));
    cuda->close(device);
}

static void without_one_pool_symbol_there_are_no_pools_of_the_drivers(void **state) {
    (void)state;
    static const char *const names[] = {"cuMemPoolCreate",       "cuMemPoolDestroy",
                                        "cuMemPoolSetAttribute", "cuMemPoolGetAttribute",
                                        "cuMemPoolTrimTo",       "cuMemAllocFromPoolAsync",
                                        "cuMemFreeAsync"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        tn_device_info info;
        tn__mempool pool = NULL;
        tn__driver_device *device = open_without(names[i], &info);
        EXPECT_STATUS(cuda->mempool_create(device, 0, &pool), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS(names[i]);
        assert_null(pool);
        cuda->close(device);
    }
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void without_one_of_its_symbols_there_is_no_pinned_memory(void **state) {
    (void)state;
    static const char *const names[] = {"cuMemHostAlloc", "cuMemFreeHost"};
    for (size_t i = 0; i < 2; i++) {
        tn_device_info info;
        void *address = NULL;
        tn__driver_device *device = open_without(names[i], &info);
        EXPECT_STATUS(cuda->host_alloc(device, 2 * MIB, &address), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS(names[i]);
        assert_null(address);
        cuda->close(device);
    }
}

static void without_capture_queries_no_stream_captures(void **state) {
    (void)state;
    int is_capturing = -1;
    tn_device_info info;
    tn__driver_device *device = open_without("cuStreamIsCapturing", &info);
    EXPECT_OK(cuda->stream_is_capturing(device, NULL, &is_capturing));
    assert_int_equal(is_capturing, 0);
    cuda->close(device);
}

static void without_capture_info_captures_are_not_told_apart(void **state) {
    (void)state;
    tn__capture_status status = TN__CAPTURE_ACTIVE;
    uint64_t id = 0;
    tn_device_info info;
    tn__driver_device *device = open_without("cuStreamGetCaptureInfo_v2", &info);
    EXPECT_STATUS(cuda->stream_capture(device, NULL, &status, &id), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("lacks cuStreamGetCaptureInfo_v2");
    cuda->close(device);
}

static void without_stream_ids_handles_and_threads_tell_streams_apart(void **state) {
    (void)state;
    uint64_t first = 0, second = 0, null_id = 0, legacy = 0, own_thread = 0, again = 0;
    tn_stream streams[2];
    tn_device_info info;
    tn__driver_device *device = open_without("cuStreamGetId", &info);
    EXPECT_OK(cuda->stream_create(device, &streams[0]));
    EXPECT_OK(cuda->stream_create(device, &streams[1]));
    EXPECT_OK(cuda->stream_id(device, streams[0], &first));
    EXPECT_OK(cuda->stream_id(device, streams[1], &second));
    EXPECT_OK(cuda->stream_id(device, NULL, &null_id));
    EXPECT_OK(cuda->stream_id(device, TN__CU_STREAM_LEGACY, &legacy));
    EXPECT_OK(cuda->stream_id(device, TN__CU_STREAM_PER_THREAD, &own_thread));
    EXPECT_OK(cuda->stream_id(device, TN__CU_STREAM_PER_THREAD, &again));
    assert_int_equal(null_id, legacy); /* two names of one stream */
    assert_int_equal(own_thread, again);
    assert_true(first != second && first != null_id && second != null_id);
    assert_true(own_thread != null_id && own_thread != first && own_thread != second);
    EXPECT_OK(cuda->stream_destroy(device, streams[1]));
    EXPECT_OK(cuda->stream_destroy(device, streams[0]));
    cuda->close(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static int make_copy_path(void **state) {
    (void)state;
    int file = mkstemp(copy_path);
    return file < 0 || close(file) != 0;
}

static int remove_copy(void **state) {
    (void)state;
    return unlink(copy_path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_missing_required_symbol_is_named),
        cmocka_unit_test(without_one_vmm_symbol_there_is_only_plain_memory),
        cmocka_unit_test(without_host_functions_only_host_tasks_fail),
        cmocka_unit_test(without_waits_for_values_only_they_fail),
        cmocka_unit_test(without_one_pool_symbol_there_are_no_pools_of_the_drivers),
        cmocka_unit_test(without_one_of_its_symbols_there_is_no_pinned_memory),
        cmocka_unit_test(without_capture_queries_no_stream_captures),
        cmocka_unit_test(without_capture_info_captures_are_not_told_apart),
        cmocka_unit_test(without_stream_ids_handles_and_threads_tell_streams_apart),
    };
    return TEST_RUN_GROUP(tests, make_copy_path, remove_copy);
}
