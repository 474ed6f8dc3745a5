/* Every call of the CUDA driver's table against the simulated driver: what it does, that it is
 * counted, and how its failure reads.
 */
#include "test_support.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "driver_cuda.h"
#include "host_alloc.h"

#define MIB ((size_t)1 << 20)

static const tn__driver *const cuda = &tn__driver_cuda;

/* A device of a simulated driver configured anew. */
static tn__driver_device *open_device(int backed, tn_device_info *info) {
    tnsim_config sim_config = {.size = sizeof sim_config, .memory_bytes = 256 * MIB};
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn__driver_device *device = NULL;
    tn_device_info ignored;
    sim_config.backed = backed;
    assert_int_equal(test_sim_get()->configure(&sim_config), 0);
    config.cuda_library = TENURE_SIM_LIBRARY;
    EXPECT_OK(cuda->open(&config, info ? info : &ignored, &device));
    return device;
}

static void close_clean(tn__driver_device *device) {
    char left[2048] = "";
    cuda->close(device);
    if (test_sim_get()->leftovers(left, sizeof left)) fail_msg("left over: %s", left);
    assert_int_equal(test_sim_get()->race_count(), 0);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static tn_driver_stats stats_of(tn__driver_device *device) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(cuda->stats(device, &stats));
    return stats;
}

static void the_info_is_the_devices(void **state) {
    (void)state;
    tn_device_info info;
    size_t free_bytes = 0, total_bytes = 0;
    tn__driver_device *device = open_device(0, &info);
    assert_int_equal(info.size, sizeof info);
    assert_int_equal(info.driver, TN_DRIVER_CUDA);
    assert_int_equal(info.simulated, 1);
    assert_int_equal(info.ordinal, 0);
    assert_int_equal(info.compute_major, 9);
    assert_int_equal(info.compute_minor, 0);
    assert_int_equal(info.supports_vmm, 1);
    assert_int_equal(info.memory_bytes, 256 * MIB);
    assert_int_equal(info.granularity_bytes, 2 * MIB);
    assert_true(strlen(info.name) > 0);
    EXPECT_OK(cuda->memory_info(device, &free_bytes, &total_bytes));
    assert_int_equal(total_bytes, 256 * MIB);
    assert_true(free_bytes <= total_bytes);
    close_clean(device);
}

static double memory_call_us(void) {
    double (*get)(void) = NULL;
    *(void **)&get = dlsym(test_sim_get()->library, "tnsim_memory_call_us");
    assert_non_null(get);
    return get();
}

/* The sequence of a page: reserve, create, map, grant, use, unmap, release, free. */
static void virtual_memory_is_made_used_and_given_back(void **state) {
    (void)state;
    unsigned char sample = 0;
    void *address = NULL;
    tn__handle handle = 0;
    tn__driver_device *device = open_device(1, NULL);
    double before_us = memory_call_us();
    EXPECT_OK(cuda->address_reserve(device, 8 * MIB, &address));
    EXPECT_OK(cuda->mem_create(device, 2 * MIB, &handle));
    assert_int_equal(test_sim_get()->physical_bytes(0), 2 * MIB);
    EXPECT_OK(cuda->mem_map(device, (char *)address + 4 * MIB, 2 * MIB, handle));
    EXPECT_OK(cuda->mem_set_access(device, (char *)address + 4 * MIB, 2 * MIB));
    EXPECT_OK(cuda->fill(device, (char *)address + 4 * MIB, 0x5a, 2 * MIB, NULL));
    EXPECT_OK(cuda->copy(device, &sample, (char *)address + 5 * MIB, 1, NULL));
    EXPECT_OK(cuda->stream_synchronize(device, NULL));
    assert_int_equal(sample, 0x5a);
    EXPECT_OK(cuda->mem_unmap(device, (char *)address + 4 * MIB, 2 * MIB));
    EXPECT_OK(cuda->mem_release(device, handle, 2 * MIB));
    EXPECT_OK(cuda->address_free(device, address, 8 * MIB));
    assert_int_equal(test_sim_get()->physical_bytes(0), 0);
    tn_driver_stats stats = stats_of(device);
    static const tn_driver_call once[] = {
        TN_CALL_MEM_CREATE, TN_CALL_MEM_RELEASE, TN_CALL_ADDRESS_RESERVE, TN_CALL_ADDRESS_FREE,
        TN_CALL_MEM_MAP,    TN_CALL_MEM_UNMAP,   TN_CALL_MEM_SET_ACCESS};
    for (size_t i = 0; i < sizeof once / sizeof *once; i++)
        assert_int_equal(stats.calls[once[i]], 1);
    assert_int_equal(stats.calls[TN_CALL_LAUNCH], 2);
    assert_int_equal(stats.calls[TN_CALL_MEM_ALLOC] + stats.calls[TN_CALL_MEM_FREE], 0);
    /* The calls' cost on the virtual clock, and nothing of the wall clock. */
    assert_int_equal(llround(stats.time_us * 1000.0),
                     llround((memory_call_us() - before_us) * 1000.0));
    assert_true(stats.time_us > 13.3 + 1.1 + 28.0 + 18.2 + 13.2);
    close_clean(device);
}

static void plain_memory_is_given_and_taken_back(void **state) {
    (void)state;
    void *block = NULL;
    tn__driver_device *device = open_device(1, NULL);
    EXPECT_OK(cuda->mem_alloc(device, 3 * MIB, &block));
    EXPECT_OK(cuda->fill(device, block, 1, 3 * MIB, NULL));
    EXPECT_OK(cuda->synchronize(device));
    EXPECT_OK(cuda->mem_free(device, block));
    assert_int_equal(stats_of(device).calls[TN_CALL_MEM_ALLOC], 1);
    assert_int_equal(stats_of(device).calls[TN_CALL_MEM_FREE], 1);
    block = NULL;
    EXPECT_STATUS(cuda->mem_alloc(device, 300 * MIB, &block), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("cuMemAlloc(314572800 bytes) failed: CUDA_ERROR_OUT_OF_MEMORY");
    assert_int_equal(tn_error_last_native(), 2);
    assert_null(block);
    close_clean(device);
}

static void an_event_orders_streams_without_the_host(void **state) {
    (void)state;
    int is_done = -1;
    tn_stream slow = NULL, waiting = NULL;
    tn__event event = NULL;
    void *block = NULL;
    tn__driver_device *device = open_device(0, NULL);
    EXPECT_OK(cuda->stream_create(device, &slow));
    EXPECT_OK(cuda->stream_create(device, &waiting));
    EXPECT_OK(cuda->event_create(device, &event));
    EXPECT_OK(cuda->mem_alloc(device, 2 * MIB, &block));
    EXPECT_OK(cuda->event_is_done(device, event, &is_done));
    assert_int_equal(is_done, 1); /* never recorded */
    tn__range range = {block, 2 * MIB, 1};
    EXPECT_OK(cuda->ghost_launch(device, "writer", &range, 1, 1000.0, slow));
    EXPECT_OK(cuda->event_record(device, event, slow));
    EXPECT_OK(cuda->event_is_done(device, event, &is_done));
    assert_int_equal(is_done, 0);
    EXPECT_OK(cuda->stream_wait_event(device, waiting, event));
    EXPECT_OK(cuda->note_take(device, block, 2 * MIB, waiting)); /* no race: it waits */
    EXPECT_OK(cuda->ghost_launch(device, "next writer", &range, 1, 1000.0, waiting));
    double before_us = cuda->now_us(device);
    EXPECT_OK(cuda->event_synchronize(device, event));
    assert_true(cuda->now_us(device) > before_us + 900.0);
    EXPECT_OK(cuda->event_is_done(device, event, &is_done));
    assert_int_equal(is_done, 1);
    EXPECT_OK(cuda->stream_synchronize(device, waiting));
    EXPECT_OK(cuda->mem_free(device, block));
    EXPECT_OK(cuda->event_destroy(device, event));
    EXPECT_OK(cuda->stream_destroy(device, waiting));
    EXPECT_OK(cuda->stream_destroy(device, slow));
    tn_driver_stats stats = stats_of(device);
    assert_int_equal(stats.calls[TN_CALL_EVENT], 2);
    assert_int_equal(stats.calls[TN_CALL_EVENT_RECORD], 1);
    assert_int_equal(stats.calls[TN_CALL_EVENT_QUERY], 3);
    assert_int_equal(stats.calls[TN_CALL_EVENT_SYNCHRONIZE], 1);
    assert_int_equal(stats.calls[TN_CALL_STREAM_WAIT], 1);
    assert_int_equal(stats.calls[TN_CALL_STREAM], 5);
    assert_int_equal(stats.calls[TN_CALL_LAUNCH], 2);
    close_clean(device);
}

/* Of streams that are not named, created or default, blocking or not; later work is not waited for,
 * and neither is later work made to wait. */
static void one_event_comes_after_all_streams(void **state) {
    (void)state;
    int is_done = -1;
    tn_stream streams[2] = {NULL, NULL};
    tn__event event = NULL;
    void *block = NULL;
    tn__driver_device *device = open_device(0, NULL);
    for (int i = 0; i < 2; i++)
        EXPECT_OK(cuda->stream_create(device, &streams[i]));
    EXPECT_OK(cuda->event_create(device, &event));
    EXPECT_OK(cuda->mem_alloc(device, 6 * MIB, &block));
    tn_stream users[3] = {streams[0], streams[1], NULL};
    for (int i = 0; i < 3; i++) {
        tn__range range = {(char *)block + (size_t)i * 2 * MIB, 2 * MIB, 1};
        EXPECT_OK(cuda->ghost_launch(device, "writer", &range, 1, 1000.0 * (i + 1), users[i]));
    }
    EXPECT_OK(cuda->event_record_all(device, event));
    EXPECT_OK(cuda->ghost_launch(device, "later", NULL, 0, 9000.0, streams[0]));
    EXPECT_OK(cuda->stream_synchronize(device, streams[1]));
    EXPECT_OK(cuda->event_is_done(device, event, &is_done));
    assert_int_equal(is_done, 0); /* the default stream's work goes on */
    EXPECT_OK(cuda->event_synchronize(device, event));
    assert_true(cuda->now_us(device) < 3100.0);
    EXPECT_OK(cuda->note_take(device, block, 6 * MIB, streams[1])); /* no race */
    EXPECT_OK(cuda->synchronize(device));
    assert_true(cuda->now_us(device) < 10100.0);
    EXPECT_OK(cuda->mem_free(device, block));
    EXPECT_OK(cuda->event_destroy(device, event));
    for (int i = 0; i < 2; i++)
        EXPECT_OK(cuda->stream_destroy(device, streams[i]));
    close_clean(device);
}

static void without_the_wait_the_take_is_a_race(void **state) {
    (void)state;
    tn_stream first = NULL, second = NULL;
    void *block = NULL;
    tn__driver_device *device = open_device(0, NULL);
    EXPECT_OK(cuda->stream_create(device, &first));
    EXPECT_OK(cuda->stream_create(device, &second));
    EXPECT_OK(cuda->mem_alloc(device, 2 * MIB, &block));
    tn__range range = {block, 2 * MIB, 1};
    EXPECT_OK(cuda->ghost_launch(device, "writer", &range, 1, 1000.0, first));
    (void)cuda->note_take(device, block, 2 * MIB, second);
    assert_int_equal(test_sim_get()->race_count(), 1);
    EXPECT_OK(cuda->synchronize(device));
    EXPECT_OK(cuda->mem_free(device, block));
    EXPECT_OK(cuda->stream_destroy(device, second));
    EXPECT_OK(cuda->stream_destroy(device, first));
    cuda->close(device);
}

static void streams_wait_for_what_the_host_writes(void **state) {
    (void)state;
    tn__driver_device *device = open_device(1, NULL);
    tn_stream stream = NULL;
    tn__event event = NULL;
    void *memory = NULL;
    int is_done = 1;
    EXPECT_OK(cuda->stream_create(device, &stream));
    EXPECT_OK(cuda->event_create(device, &event));
    EXPECT_OK(cuda->host_alloc(device, 64, &memory));
    uint32_t *word = memory;
    __atomic_store_n(word, 0, __ATOMIC_RELEASE);
    tn_driver_stats before = stats_of(device);
    EXPECT_OK(cuda->stream_wait_value(device, stream, word, 1));
    tn_driver_stats after = stats_of(device);
    assert_int_equal(after.calls[TN_CALL_STREAM_WAIT] - before.calls[TN_CALL_STREAM_WAIT], 1);
    EXPECT_OK(cuda->event_record(device, event, stream));
    EXPECT_OK(cuda->event_is_done(device, event, &is_done));
    assert_int_equal(is_done, 0);
    __atomic_store_n(word, 1, __ATOMIC_RELEASE);
    EXPECT_OK(cuda->stream_synchronize(device, stream));
    EXPECT_OK(cuda->event_is_done(device, event, &is_done));
    assert_int_equal(is_done, 1);
    EXPECT_OK(cuda->host_free(device, memory));
    EXPECT_OK(cuda->event_destroy(device, event));
    EXPECT_OK(cuda->stream_destroy(device, stream));
    close_clean(device);
}

static void count_up(void *argument) { (*(int *)argument)++; }

static void host_tasks_run_and_streams_have_ids_of_their_own(void **state) {
    (void)state;
    int count = 0, is_capturing = -1;
    uint64_t ids[4] = {0};
    tn_stream streams[3] = {NULL, NULL, NULL};
    tn__driver_device *device = open_device(0, NULL);
    EXPECT_OK(cuda->stream_create(device, &streams[1]));
    EXPECT_OK(cuda->stream_create(device, &streams[2]));
    for (int i = 0; i < 3; i++) {
        EXPECT_OK(cuda->host_task(device, count_up, &count, streams[i]));
        EXPECT_OK(cuda->stream_id(device, streams[i], &ids[i]));
        EXPECT_OK(cuda->stream_is_capturing(device, streams[i], &is_capturing));
        assert_int_equal(is_capturing, 0);
    }
    EXPECT_OK(cuda->synchronize(device));
    assert_int_equal(count, 3);
    EXPECT_OK(cuda->stream_destroy(device, streams[2]));
    EXPECT_OK(cuda->stream_create(device, &streams[2]));
    EXPECT_OK(cuda->stream_id(device, streams[2], &ids[3]));
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < i; j++)
            assert_true(ids[i] != ids[j]);
    }
    EXPECT_OK(cuda->stream_destroy(device, streams[1]));
    EXPECT_OK(cuda->stream_destroy(device, streams[2]));
    close_clean(device);
}

static void what_the_simulated_device_can_not_do_is_named(void **state) {
    (void)state;
    void *out = NULL;
    tn__launch launch = {.grid = {1, 1, 1}, .block = {1, 1, 1}};
    const tn__boxes boxes = {&out, 16, 16, 1, 16, 16, 0};
    int64_t blocks;
    int count;
    tn__driver_device *device = open_device(0, NULL);
    EXPECT_STATUS(cuda->module_load(device, "image", &out), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("module_load");
    EXPECT_STATUS(cuda->multiprocessors(device, &count), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("multiprocessors");
    EXPECT_STATUS(cuda->shared_max_set(device, NULL, 65536), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("shared_max_set");
    EXPECT_STATUS(cuda->blocks_at_once(device, NULL, 256, 0, &blocks), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("blocks_at_once");
    EXPECT_STATUS(cuda->box_map(device, &boxes, &out), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("box_map");
    EXPECT_STATUS(cuda->box_map_check(device), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("box_map");
    EXPECT_STATUS(cuda->module_function(device, NULL, "kernel", &out), TN_UNSUPPORTED);
    EXPECT_STATUS(cuda->module_unload(device, NULL), TN_UNSUPPORTED);
    EXPECT_STATUS(cuda->launch(device, NULL, &launch, NULL), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("ghost_launch");
    assert_null(out);
    close_clean(device);
}

static void *current_context(void) {
    int (*get)(void **) = NULL;
    void *context = NULL;
    *(void **)&get = dlsym(test_sim_get()->library, "cuCtxGetCurrent");
    assert_non_null(get);
    assert_int_equal(get(&context), 0);
    return context;
}

static void a_callers_current_context_is_left_as_it_was(void **state) {
    (void)state;
    void *block = NULL;
    tn__driver_device *device = open_device(0, NULL);
    assert_null(current_context());
    EXPECT_OK(cuda->mem_alloc(device, 2 * MIB, &block));
    assert_null(current_context());
    EXPECT_OK(cuda->make_current(device));
    assert_non_null(current_context());
    uint64_t pushes = test_sim_get()->call_count("cuCtxPushCurrent_v2");
    EXPECT_OK(cuda->mem_free(device, block));
    assert_non_null(current_context());
    assert_int_equal(test_sim_get()->call_count("cuCtxPushCurrent_v2"), pushes);
    close_clean(device);
}

/* ---- each call made to fail ---------------------------------------------------------------- */

/* What the calls need, made before the fault is set and given back after it. */
typedef struct objects {
    tn__driver_device *device;
    void *range; /* 4 MiB: the first 2 mapped with access, the rest not */
    tn__handle handle, spare;
    tn_stream stream, doomed_stream;
    tn__event event, doomed_event;
    void *block;
    int host_bytes;
} objects;

static tn_status call_address_reserve(objects *on) {
    void *out;
    return cuda->address_reserve(on->device, 2 * MIB, &out);
}
static tn_status call_mem_create(objects *on) {
    tn__handle out;
    return cuda->mem_create(on->device, 2 * MIB, &out);
}
static tn_status call_mem_alloc(objects *on) {
    void *out;
    return cuda->mem_alloc(on->device, 2 * MIB, &out);
}
static tn_status call_address_free(objects *on) {
    return cuda->address_free(on->device, on->range, 4 * MIB);
}
static tn_status call_mem_release(objects *on) {
    return cuda->mem_release(on->device, on->spare, 2 * MIB);
}
static tn_status call_mem_map(objects *on) {
    return cuda->mem_map(on->device, (char *)on->range + 2 * MIB, 2 * MIB, on->spare);
}
static tn_status call_mem_set_access(objects *on) {
    return cuda->mem_set_access(on->device, on->range, 2 * MIB);
}
static tn_status call_mem_unmap(objects *on) {
    return cuda->mem_unmap(on->device, on->range, 2 * MIB);
}
static tn_status call_mem_free(objects *on) { return cuda->mem_free(on->device, on->block); }
static tn_status call_memory_info(objects *on) {
    size_t free_bytes, total_bytes;
    return cuda->memory_info(on->device, &free_bytes, &total_bytes);
}
static tn_status call_synchronize(objects *on) { return cuda->synchronize(on->device); }
static tn_status call_stream_create(objects *on) {
    tn_stream out;
    return cuda->stream_create(on->device, &out);
}
static tn_status call_stream_destroy(objects *on) {
    return cuda->stream_destroy(on->device, on->doomed_stream);
}
static tn_status call_stream_id(objects *on) {
    uint64_t id;
    return cuda->stream_id(on->device, TN__CU_STREAM_PER_THREAD, &id);
}
static tn_status call_stream_synchronize(objects *on) {
    return cuda->stream_synchronize(on->device, on->stream);
}
static tn_status call_stream_capture(objects *on) {
    tn__capture_status status;
    uint64_t id = 0;
    return cuda->stream_capture(on->device, on->stream, &status, &id);
}
static tn_status call_stream_is_capturing(objects *on) {
    int is_capturing;
    return cuda->stream_is_capturing(on->device, on->stream, &is_capturing);
}
static tn_status call_stream_wait_event(objects *on) {
    return cuda->stream_wait_event(on->device, on->stream, on->event);
}
static tn_status call_event_create(objects *on) {
    tn__event out;
    return cuda->event_create(on->device, &out);
}
static tn_status call_event_destroy(objects *on) {
    return cuda->event_destroy(on->device, on->doomed_event);
}
static tn_status call_event_record(objects *on) {
    return cuda->event_record(on->device, on->event, on->stream);
}
static tn_status call_event_record_all(objects *on) {
    return cuda->event_record_all(on->device, on->event);
}
static tn_status call_event_is_done(objects *on) {
    int is_done;
    return cuda->event_is_done(on->device, on->event, &is_done);
}
static tn_status call_event_synchronize(objects *on) {
    return cuda->event_synchronize(on->device, on->event);
}
static tn_status call_copy(objects *on) {
    return cuda->copy(on->device, &on->host_bytes, on->block, sizeof on->host_bytes, on->stream);
}
static tn_status call_copy_rows(objects *on) {
    tn__row_copy rows = {.dst = on->block, .dst_stride = 64, .src_stride = 32, .row_bytes = 16};
    rows.src = (char *)on->block + MIB, rows.rows = 4;
    return cuda->copy_rows(on->device, &rows, on->stream);
}
static tn_status call_fill(objects *on) {
    return cuda->fill(on->device, on->block, 1, MIB, on->stream);
}
static tn_status call_host_task(objects *on) {
    return cuda->host_task(on->device, count_up, &on->host_bytes, on->stream);
}
static tn_status call_stream_wait_value(objects *on) {
    return cuda->stream_wait_value(on->device, on->stream, (const uint32_t *)&on->host_bytes, 0);
}
static tn_status call_make_current(objects *on) { return cuda->make_current(on->device); }

typedef struct call_row {
    const char *symbol;       /* that the simulated driver fails */
    const char *words;        /* in the error */
    tn_status when_no_memory; /* for code 2 */
    tn_status (*call)(objects *on);
} call_row;

static const call_row call_rows[] = {
    {"cuMemAddressReserve", "cuMemAddressReserve(2097152 bytes)", TN_OUT_OF_ADDRESS_SPACE,
     call_address_reserve},
    {"cuMemCreate", "cuMemCreate(2097152 bytes)", TN_OUT_OF_DEVICE_MEMORY, call_mem_create},
    {"cuMemAlloc_v2", "cuMemAlloc(2097152 bytes)", TN_OUT_OF_DEVICE_MEMORY, call_mem_alloc},
    {"cuMemAddressFree", "cuMemAddressFree(", TN_OUT_OF_DEVICE_MEMORY, call_address_free},
    {"cuMemRelease", "cuMemRelease(2097152 bytes)", TN_OUT_OF_DEVICE_MEMORY, call_mem_release},
    {"cuMemMap", "cuMemMap(", TN_OUT_OF_DEVICE_MEMORY, call_mem_map},
    {"cuMemSetAccess", "cuMemSetAccess(", TN_OUT_OF_DEVICE_MEMORY, call_mem_set_access},
    {"cuMemUnmap", "cuMemUnmap(", TN_OUT_OF_DEVICE_MEMORY, call_mem_unmap},
    {"cuMemFree_v2", "cuMemFree(", TN_OUT_OF_DEVICE_MEMORY, call_mem_free},
    {"cuMemGetInfo_v2", "cuMemGetInfo()", TN_OUT_OF_DEVICE_MEMORY, call_memory_info},
    {"cuCtxSynchronize", "cuCtxSynchronize()", TN_OUT_OF_DEVICE_MEMORY, call_synchronize},
    {"cuStreamCreate", "cuStreamCreate()", TN_OUT_OF_DEVICE_MEMORY, call_stream_create},
    {"cuStreamDestroy_v2", "cuStreamDestroy(", TN_OUT_OF_DEVICE_MEMORY, call_stream_destroy},
    {"cuStreamGetId", "cuStreamGetId(", TN_OUT_OF_DEVICE_MEMORY, call_stream_id},
    {"cuStreamSynchronize", "cuStreamSynchronize(", TN_OUT_OF_DEVICE_MEMORY,
     call_stream_synchronize},
    {"cuStreamIsCapturing", "cuStreamIsCapturing(", TN_OUT_OF_DEVICE_MEMORY,
     call_stream_is_capturing},
    {"cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo(", TN_OUT_OF_DEVICE_MEMORY,
     call_stream_capture},
    {"cuStreamWaitEvent", "cuStreamWaitEvent(", TN_OUT_OF_DEVICE_MEMORY, call_stream_wait_event},
    {"cuEventCreate", "cuEventCreate()", TN_OUT_OF_DEVICE_MEMORY, call_event_create},
    {"cuEventDestroy_v2", "cuEventDestroy(", TN_OUT_OF_DEVICE_MEMORY, call_event_destroy},
    {"cuEventRecord", "cuEventRecord(", TN_OUT_OF_DEVICE_MEMORY, call_event_record},
    {"cuCtxRecordEvent", "cuCtxRecordEvent(", TN_OUT_OF_DEVICE_MEMORY, call_event_record_all},
    {"cuEventQuery", "cuEventQuery(", TN_OUT_OF_DEVICE_MEMORY, call_event_is_done},
    {"cuEventSynchronize", "cuEventSynchronize(", TN_OUT_OF_DEVICE_MEMORY, call_event_synchronize},
    {"cuMemcpyAsync", "cuMemcpyAsync(", TN_OUT_OF_DEVICE_MEMORY, call_copy},
    {"cuMemcpy2DAsync_v2", "cuMemcpy2DAsync(", TN_OUT_OF_DEVICE_MEMORY, call_copy_rows},
    {"cuMemsetD8Async", "cuMemsetD8Async(", TN_OUT_OF_DEVICE_MEMORY, call_fill},
    {"cuLaunchHostFunc", "cuLaunchHostFunc(", TN_OUT_OF_DEVICE_MEMORY, call_host_task},
    {"cuStreamWaitValue32_v2", "cuStreamWaitValue32(", TN_OUT_OF_DEVICE_MEMORY,
     call_stream_wait_value},
    {"cuCtxGetCurrent", "cuCtxGetCurrent()", TN_DRIVER_ERROR, call_mem_alloc},
    {"cuCtxPushCurrent_v2", "cuCtxPushCurrent()", TN_DRIVER_ERROR, call_mem_alloc},
    {"cuCtxSetCurrent", "cuCtxSetCurrent()", TN_DRIVER_ERROR, call_make_current},
};

static void make_objects(objects *on) {
    EXPECT_OK(cuda->address_reserve(on->device, 4 * MIB, &on->range));
    EXPECT_OK(cuda->mem_create(on->device, 2 * MIB, &on->handle));
    EXPECT_OK(cuda->mem_create(on->device, 2 * MIB, &on->spare));
    EXPECT_OK(cuda->mem_map(on->device, on->range, 2 * MIB, on->handle));
    EXPECT_OK(cuda->mem_set_access(on->device, on->range, 2 * MIB));
    EXPECT_OK(cuda->mem_alloc(on->device, 2 * MIB, &on->block));
    EXPECT_OK(cuda->stream_create(on->device, &on->stream));
    EXPECT_OK(cuda->stream_create(on->device, &on->doomed_stream));
    EXPECT_OK(cuda->event_create(on->device, &on->event));
    EXPECT_OK(cuda->event_create(on->device, &on->doomed_event));
    EXPECT_OK(cuda->fill(on->device, on->block, 0, 2 * MIB, on->stream));
    EXPECT_OK(cuda->event_record(on->device, on->event, on->stream));
}

/* All of it is still there: no failed call took anything away. */
static void end_objects(objects *on) {
    EXPECT_OK(cuda->synchronize(on->device));
    EXPECT_OK(cuda->event_destroy(on->device, on->doomed_event));
    EXPECT_OK(cuda->event_destroy(on->device, on->event));
    EXPECT_OK(cuda->stream_destroy(on->device, on->doomed_stream));
    EXPECT_OK(cuda->stream_destroy(on->device, on->stream));
    EXPECT_OK(cuda->mem_free(on->device, on->block));
    EXPECT_OK(cuda->mem_unmap(on->device, on->range, 2 * MIB));
    EXPECT_OK(cuda->mem_release(on->device, on->spare, 2 * MIB));
    EXPECT_OK(cuda->mem_release(on->device, on->handle, 2 * MIB));
    EXPECT_OK(cuda->address_free(on->device, on->range, 4 * MIB));
}

static void expect_failure(const call_row *row, objects *on, int code, tn_status expected) {
    const test_sim *sim = test_sim_get();
    assert_int_equal(sim->fault(row->symbol, 1, 0, code), 0);
    tn_status status = row->call(on);
    sim->fault(row->symbol, 0, 0, 0);
    if (status != expected) {
        fail_msg("%s failing with %d gave %s: %s", row->symbol, code, tn_status_name(status),
                 tn_error_last());
    }
    EXPECT_ERROR_HAS(row->words);
    EXPECT_ERROR_HAS(code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN");
    assert_int_equal(tn_error_last_native(), code);
}

static void each_failing_call_is_named_and_takes_no_effect(void **state) {
    (void)state;
    objects on = {.device = open_device(1, NULL)};
    make_objects(&on);
    for (size_t i = 0; i < sizeof call_rows / sizeof *call_rows; i++) {
        expect_failure(&call_rows[i], &on, 999, TN_DRIVER_ERROR);
        expect_failure(&call_rows[i], &on, 2, call_rows[i].when_no_memory);
    }
    end_objects(&on);
    close_clean(on.device);
}

enum { GLOBAL_MODE = 0 }; /* what a thread begins with */
static int capture_mode = GLOBAL_MODE;
static tn__cu_calls real_calls;

static tn__cu_result exchange_mode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return TN__CU_SUCCESS;
}

static tn__cu_result query_event(void *event) {
    assert_int_equal(capture_mode, TN__CU_STREAM_CAPTURE_MODE_RELAXED);
    return real_calls.event_query(event);
}

static tn__cu_result synchronize_event(void *event) {
    assert_int_equal(capture_mode, TN__CU_STREAM_CAPTURE_MODE_RELAXED);
    return real_calls.event_synchronize(event);
}

static tn__cu_result create_memory(tn__cu_handle *out, size_t bytes,
                                   const tn__cu_allocation *allocation, unsigned long long flags) {
    assert_int_equal(capture_mode, TN__CU_STREAM_CAPTURE_MODE_RELAXED);
    return real_calls.mem_create(out, bytes, allocation, flags);
}

/* pytorch's reports: a call on memory, or a question about an event, ends a capture that another
 * thread has begun, unless the thread that makes it is in relaxed mode. */
static void what_could_end_a_capture_is_done_in_relaxed_mode(void **state) {
    (void)state;
    tn__driver_device *device = open_device(0, NULL);
    tn__event event;
    tn__handle handle;
    int is_done = 0;
    real_calls = device->library->cu;
    device->library->cu.capture_mode = exchange_mode;
    device->library->cu.event_query = query_event;
    device->library->cu.event_synchronize = synchronize_event;
    device->library->cu.mem_create = create_memory;
    EXPECT_OK(cuda->event_create(device, &event));
    EXPECT_OK(cuda->event_record(device, event, NULL));
    EXPECT_OK(cuda->event_is_done(device, event, &is_done));
    EXPECT_OK(cuda->event_synchronize(device, event));
    EXPECT_OK(cuda->mem_create(device, 2 * MIB, &handle));
    assert_int_equal(capture_mode, GLOBAL_MODE);
    EXPECT_OK(cuda->mem_release(device, handle, 2 * MIB));
    EXPECT_OK(cuda->event_destroy(device, event));
    device->library->cu = real_calls;
    close_clean(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_info_is_the_devices),
        cmocka_unit_test(virtual_memory_is_made_used_and_given_back),
        cmocka_unit_test(plain_memory_is_given_and_taken_back),
        cmocka_unit_test(an_event_orders_streams_without_the_host),
        cmocka_unit_test(one_event_comes_after_all_streams),
        cmocka_unit_test(without_the_wait_the_take_is_a_race),
        cmocka_unit_test(streams_wait_for_what_the_host_writes),
        cmocka_unit_test(host_tasks_run_and_streams_have_ids_of_their_own),
        cmocka_unit_test(what_the_simulated_device_can_not_do_is_named),
        cmocka_unit_test(a_callers_current_context_is_left_as_it_was),
        cmocka_unit_test(what_could_end_a_capture_is_done_in_relaxed_mode),
        cmocka_unit_test(each_failing_call_is_named_and_takes_no_effect),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
