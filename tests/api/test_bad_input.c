/* What no caller should do, to every function of tenure_alloc.h and tenure_pool.h: NULL, sizes and
 * enumerators that do not exist, streams and blocks of others. Each is refused with the documented
 * status and words, and the statistics of every pool stay what they were, to the byte. On the host
 * driver and on the simulated one, each with two devices. */
#include <string.h>

#include "test_graphs.h"

typedef struct fixture {
    tn_device *device;
    tn_device *elsewhere;
    tn_pool *pool;
    tn_pool *other; /* of the other device */
    tn_stream stream;
    tn_stream other_stream;
    void *block;
    tn_pool_stats before;
    tn_pool_stats other_before;
} fixture;

static fixture f;

static void open_pools(void) {
    f.pool = test_open_pool(f.device, TN_BACKING_AUTO, 0);
    f.other = test_open_pool(f.elsewhere, TN_BACKING_AUTO, 0);
    f.stream = test_open_stream(f.device);
    f.other_stream = test_open_stream(f.elsewhere);
    f.block = test_take(f.pool, 5000, f.stream);
    f.before = test_pool_stats(f.pool);
    f.other_before = test_pool_stats(f.other);
}

static int open_on_host(void **state) {
    (void)state;
    f.device = test_open_host();
    f.elsewhere = test_open_host();
    open_pools();
    return 0;
}

static int open_on_sim(void **state) {
    tnsim_config config = {.size = sizeof config, .device_count = 2};
    tn_device_config second = TN_DEVICE_CONFIG_INIT;
    (void)state;
    f.device = test_open_sim_as(&config);
    second.driver = TN_DRIVER_CUDA;
    second.cuda_library = TENURE_SIM_LIBRARY;
    second.ordinal = 1;
    EXPECT_OK(tn_device_create(&second, &f.elsewhere));
    open_pools();
    return 0;
}

static int close_pools(void **state) {
    (void)state;
    test_give(f.pool, f.block, f.stream);
    EXPECT_OK(tn_pool_destroy(f.pool));
    EXPECT_OK(tn_pool_destroy(f.other));
    EXPECT_OK(tn_stream_destroy(f.device, f.stream));
    EXPECT_OK(tn_stream_destroy(f.elsewhere, f.other_stream));
    EXPECT_OK(tn_device_destroy(f.elsewhere));
    test_close_sim(f.device);
    return 0;
}

static void expect_nothing_changed(const char *call) {
    tn_pool_stats now = test_pool_stats(f.pool);
    if (memcmp(&now, &f.before, sizeof now) != 0) fail_msg("%s changed the pool", call);
    now = test_pool_stats(f.other);
    if (memcmp(&now, &f.other_before, sizeof now) != 0) fail_msg("%s changed the other", call);
}

static void expect_refused(tn_status status, tn_status must, const char *call, int line) {
    test_expect_status(status, must, call, __FILE__, line);
    if (tn_error_last()[0] == '\0') fail_msg("%s was refused without a word", call);
    expect_nothing_changed(call);
}
#define REFUSED(call)        expect_refused((call), TN_INVALID_ARGUMENT, #call, __LINE__)
#define REFUSED_AS(call, as) expect_refused((call), (as), #call, __LINE__)

/* ---- devices and streams --------------------------------------------------------------------- */

static void devices_that_there_are_not(void **state) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    tn_device *device = NULL;
    (void)state;
    config.driver = TN_DRIVER_HOST;
    REFUSED(tn_device_create(&config, NULL));
    config.ordinal = -1;
    REFUSED(tn_device_create(&config, &device));
    config.ordinal = 1000;
    REFUSED(tn_device_create(&config, &device));
    config.ordinal = 0;
    config.driver = (tn_driver_kind)77;
    REFUSED(tn_device_create(&config, &device));
    config.driver = (tn_driver_kind)-1;
    REFUSED(tn_device_create(&config, &device));
    config.driver = TN_DRIVER_HOST;
    config.size = 0;
    REFUSED(tn_device_create(&config, &device));
    config.size = sizeof config;
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = "/no/such/library.so";
    REFUSED_AS(tn_device_create(&config, &device), TN_UNSUPPORTED);
    config.cuda_library = TENURE_SIM_LIBRARY;
    config.ordinal = 31;
    REFUSED(tn_device_create(&config, &device));
    assert_null(device);
    REFUSED_AS(tn_device_destroy(f.device), TN_IN_USE);
    EXPECT_OK(tn_device_destroy(NULL));
    REFUSED(tn_device_info_get(NULL, &info));
    REFUSED(tn_device_info_get(f.device, NULL));
    info.size = 1;
    REFUSED(tn_device_info_get(f.device, &info));
    REFUSED(tn_device_synchronize(NULL));
    REFUSED(tn_device_driver_stats(NULL, &stats));
    REFUSED(tn_device_driver_stats(f.device, NULL));
    stats.size = 1;
    REFUSED(tn_device_driver_stats(f.device, &stats));
}

static void streams_that_there_are_not(void **state) {
    int nobody;
    tn_stream strange = (tn_stream)&nobody;
    (void)state;
    REFUSED(tn_stream_create(NULL, &strange));
    REFUSED(tn_stream_create(f.device, NULL));
    REFUSED(tn_stream_destroy(NULL, f.stream));
    REFUSED(tn_stream_destroy(f.device, strange));
    REFUSED(tn_stream_destroy(f.device, f.other_stream));
    EXPECT_OK(tn_stream_destroy(f.device, NULL));
    REFUSED(tn_stream_adopt(NULL, f.stream));
    REFUSED(tn_stream_adopt(f.device, strange));
    REFUSED(tn_stream_forget(NULL, f.stream));
    REFUSED(tn_stream_forget(f.device, strange));
    REFUSED(tn_stream_synchronize(NULL, f.stream));
    REFUSED(tn_stream_synchronize(f.device, strange));
    REFUSED(tn_stream_wait(NULL, f.stream, f.stream));
    REFUSED(tn_stream_wait(f.device, strange, f.stream));
    REFUSED(tn_stream_wait(f.device, f.stream, strange));
    REFUSED(tn_copy(NULL, f.block, f.block, 1, f.stream));
    REFUSED(tn_copy(f.device, NULL, f.block, 1, f.stream));
    REFUSED(tn_copy(f.device, f.block, NULL, 1, f.stream));
    REFUSED(tn_copy(f.device, f.block, f.block, 1, strange));
    EXPECT_OK(tn_copy(f.device, NULL, NULL, 0, f.stream));
    REFUSED(tn_fill(NULL, f.block, 0, 1, f.stream));
    REFUSED(tn_fill(f.device, NULL, 0, 1, f.stream));
    REFUSED(tn_fill(f.device, f.block, 0, 1, strange));
    EXPECT_OK(tn_fill(f.device, NULL, 0, 0, f.stream));
}

static void names_of_nothing(void **state) {
    (void)state;
    assert_string_equal(tn_status_name((tn_status)1000), "unknown status");
    assert_string_equal(tn_status_name((tn_status)-1), "unknown status");
    assert_string_equal(tn_status_text(TN_STATUS_COUNT), "unknown status");
    assert_non_null(tn_driver_call_name((tn_driver_call)-1));
    assert_non_null(tn_driver_call_name((tn_driver_call)1000));
    assert_non_null(tn_event_kind_name((tn_event_kind)-1));
    assert_non_null(tn_event_kind_name((tn_event_kind)1000));
    assert_true(tn_options_describe(NULL, 0) > 0);
    assert_null(tn_pool_device(NULL));
    assert_string_equal(tn_pool_name(NULL), "");
    assert_int_equal(tn_pool_report(NULL, TN_REPORT_TEXT, NULL, 0), 0);
    assert_int_equal(tn_pool_report(f.pool, (tn_report_format)9, NULL, 0), 0);
    expect_nothing_changed("a name of nothing");
}

/* ---- pools ----------------------------------------------------------------------------------- */

static void pools_that_can_not_be(void **state) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    (void)state;
    REFUSED(tn_pool_create(NULL, &config, &pool));
    REFUSED(tn_pool_create(f.device, &config, NULL));
    config.size--;
    REFUSED(tn_pool_create(f.device, &config, &pool));
    config.size = sizeof config;
    config.backing = (tn_pool_backing)-1;
    REFUSED(tn_pool_create(f.device, &config, &pool));
    config.backing = (tn_pool_backing)99;
    REFUSED(tn_pool_create(f.device, &config, &pool));
    config.backing = TN_BACKING_AUTO;
    config.page_bytes = 1000;
    REFUSED(tn_pool_create(f.device, &config, &pool));
    config.page_bytes = SIZE_MAX;
    REFUSED(tn_pool_create(f.device, &config, &pool));
    config.page_bytes = 0;
    config.limit_bytes = MIB_BYTES;
    config.soft_limit_bytes = MIB_BYTES + 1;
    REFUSED(tn_pool_create(f.device, &config, &pool));
    assert_null(pool);
    REFUSED_AS(tn_pool_destroy(f.pool), TN_LEAK);
    EXPECT_OK(tn_pool_destroy(NULL));
}

static void calls_on_no_pool(void **state) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    size_t released = 7;
    (void)state;
    REFUSED(tn_pool_trim(NULL, 0, &released));
    assert_int_equal(released, 7);
    REFUSED(tn_pool_limit_set(NULL, 0));
    REFUSED(tn_pool_stats_get(NULL, &stats));
    REFUSED(tn_pool_stats_get(f.pool, NULL));
    stats.size = 8;
    REFUSED(tn_pool_stats_get(f.pool, &stats));
    REFUSED(tn_pool_stats_reset_peaks(NULL));
    REFUSED(tn_pool_check(NULL));
    REFUSED(tn_pool_trace_begin(NULL, "x"));
    REFUSED(tn_pool_trace_begin(f.pool, NULL));
    REFUSED(tn_pool_trace_begin(f.pool, ""));
    REFUSED_AS(tn_pool_trace_begin(f.pool, "/no/such/directory/x"), TN_IO);
    REFUSED(tn_pool_trace_end(NULL));
    REFUSED_AS(tn_pool_trace_end(f.pool), TN_INVALID_STATE);
}

static void pressure_and_limits(void **state) {
    tn_process_limits limits = TN_PROCESS_LIMITS_INIT;
    (void)state;
    REFUSED(tn_process_limits_set(MIB_BYTES, 2 * MIB_BYTES));
    REFUSED(tn_process_limits_get(NULL));
    limits.size = 3;
    REFUSED(tn_process_limits_get(&limits));
    REFUSED(tn_pool_pressure_callback_set(NULL, NULL, NULL));
}

static void insight_into_nothing(void **state) {
    tn_event event;
    size_t count = 7;
    uint64_t lost = 7;
    (void)state;
    REFUSED(tn_pool_snapshot_write(NULL, "x"));
    REFUSED(tn_pool_snapshot_write(f.pool, NULL));
    REFUSED(tn_pool_snapshot_write(f.pool, ""));
    REFUSED_AS(tn_pool_snapshot_write(f.pool, "/no/such/directory/x"), TN_IO);
    REFUSED(tn_pool_events_begin(NULL, 10, 0));
    REFUSED(tn_pool_events_begin(f.pool, 0, 0));
    REFUSED(tn_pool_events_begin(f.pool, TN_EVENTS_MAX + 1, 0));
    REFUSED(tn_pool_events_begin(f.pool, SIZE_MAX, 0));
    REFUSED(tn_pool_events_read(NULL, &event, 1, &count, &lost));
    REFUSED_AS(tn_pool_events_read(f.pool, &event, 1, &count, &lost), TN_INVALID_STATE);
    REFUSED(tn_pool_events_end(NULL));
    REFUSED_AS(tn_pool_events_end(f.pool), TN_INVALID_STATE);
    EXPECT_OK(tn_pool_events_begin(f.pool, 10, 0));
    REFUSED_AS(tn_pool_events_begin(f.pool, 10, 0), TN_INVALID_STATE);
    REFUSED(tn_pool_events_read(f.pool, NULL, 1, &count, &lost));
    REFUSED(tn_pool_events_read(f.pool, &event, 1, NULL, &lost));
    EXPECT_OK(tn_pool_events_end(f.pool));
    assert_int_equal(count, 7);
    assert_int_equal(lost, 7);
}

/* ---- pause, peers, sharing ------------------------------------------------------------------- */

static void pauses_and_waits_that_can_not_be(void **state) {
    (void)state;
    REFUSED(tn_pool_pause(NULL, 0));
    REFUSED(tn_pool_resume(NULL));
    REFUSED_AS(tn_pool_resume(f.pool), TN_INVALID_STATE);
    REFUSED_AS(tn_no_wait_end(), TN_INVALID_STATE);
    assert_int_equal(tn_pool_page_bytes(NULL), 0);
}

static void peers_and_shares_that_can_not_be(void **state) {
    tn_share share = {0};
    void *address = NULL;
    int file = -1;
    (void)state;
    REFUSED(tn_pool_peer_enable(NULL, f.elsewhere));
    REFUSED(tn_pool_peer_enable(f.pool, NULL));
    REFUSED(tn_pool_peer_disable(NULL, f.elsewhere));
    REFUSED(tn_pool_peer_disable(f.pool, NULL));
    REFUSED(tn_pool_peer_disable(f.pool, f.elsewhere));
    REFUSED(tn_share_export(NULL, &share, &file));
    REFUSED(tn_share_export(f.block, NULL, &file));
    REFUSED(tn_share_export(f.block, &share, NULL));
    REFUSED(tn_share_export(&share, &share, &file));
    REFUSED(tn_share_import(NULL, &share, 0, &address));
    REFUSED(tn_share_import(f.pool, NULL, 0, &address));
    REFUSED(tn_share_import(f.pool, &share, 0, NULL));
    REFUSED(tn_share_close(f.block, f.stream));
    REFUSED(tn_share_close(&share, f.stream));
    EXPECT_OK(tn_share_close(NULL, f.stream));
    assert_null(address);
    assert_int_equal(file, -1);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static void graphs_of_no_graph_pool(void **state) {
    tn_graph_memory memory = 7;
    tn_checkpoint *checkpoint = NULL;
    tn_pool *pool = NULL;
    (void)state;
    REFUSED(tn_graph_pool_create(NULL, NULL, &pool));
    REFUSED(tn_graph_pool_create(f.device, NULL, NULL));
    REFUSED(tn_graph_capture_begin(NULL, f.stream));
    REFUSED_AS(tn_graph_capture_begin(f.pool, f.stream), TN_UNSUPPORTED);
    REFUSED(tn_graph_capture_end(NULL, &memory));
    REFUSED(tn_graph_capture_end(f.pool, NULL));
    REFUSED_AS(tn_graph_capture_end(f.pool, &memory), TN_UNSUPPORTED);
    REFUSED(tn_graph_capture_abort(NULL));
    REFUSED_AS(tn_graph_capture_abort(f.pool), TN_UNSUPPORTED);
    REFUSED(tn_graph_memory_release(NULL, 1, f.stream));
    REFUSED_AS(tn_graph_memory_release(f.pool, 1, f.stream), TN_UNSUPPORTED);
    REFUSED(tn_pool_checkpoint(NULL, &checkpoint));
    REFUSED(tn_pool_checkpoint(f.pool, NULL));
    REFUSED(tn_pool_restore(NULL, checkpoint, f.stream));
    REFUSED(tn_pool_restore(f.pool, NULL, f.stream));
    tn_checkpoint_destroy(NULL);
    assert_int_equal(memory, 7);
    assert_null(checkpoint);
    assert_null(pool);
}

/* Whatever is refused meanwhile, the capture goes on; a free is legal in it, once. */
static void calls_while_a_stream_captures(void **state) {
    void *freed = test_take(f.pool, 3 * MIB_BYTES, f.stream);
    void *block = NULL;
    test_graph graph;
    (void)state;
    f.before = test_pool_stats(f.pool);
    test_capture_begin(f.device, f.stream, TEST_CAPTURE_GLOBAL);
    REFUSED(tn_alloc(f.pool, 4096, f.other_stream, NULL, &block));
    assert_null(block);
    test_give(f.pool, freed, f.stream);
    f.before = test_pool_stats(f.pool);
    REFUSED(tn_free(freed, f.stream));
    REFUSED(tn_record_use(freed, f.stream));
    REFUSED_AS(tn_pool_destroy(f.pool), TN_LEAK);
    assert_true(test_is_capturing(f.device, f.stream));
    graph = test_capture_end(f.device, f.stream);
    test_graph_destroy(f.device, &graph);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static void allocations_that_can_not_be(void **state) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *block = &options;
    int nobody;
    (void)state;
    REFUSED(tn_alloc(NULL, 1, f.stream, NULL, &block));
    REFUSED(tn_alloc(f.pool, 1, f.stream, NULL, NULL));
    REFUSED(tn_alloc(f.pool, 1, (tn_stream)&nobody, NULL, &block));
    options.size = sizeof options + 1;
    REFUSED(tn_alloc(f.pool, 1, f.stream, &options, &block));
    options.size = sizeof options;
    options.lifetime = (tn_lifetime)-1;
    REFUSED(tn_alloc(f.pool, 1, f.stream, &options, &block));
    options.lifetime = (tn_lifetime)50;
    REFUSED(tn_alloc(f.pool, 1, f.stream, &options, &block));
    options.lifetime = TN_LIFETIME_AUTO;
    for (size_t alignment = 3; alignment;
         alignment = alignment > SIZE_MAX / 3 ? 0 : alignment * 3) {
        options.alignment = alignment;
        REFUSED(tn_alloc(f.pool, 1, f.stream, &options, &block));
    }
    for (size_t alignment = (size_t)4 << 20; alignment; alignment *= 2) {
        options.alignment = alignment;
        REFUSED(tn_alloc(f.pool, 1, f.stream, &options, &block));
    }
    assert_ptr_equal(block, &options);
}

static void blocks_of_nobody(void **state) {
    char *inside = f.block;
    size_t bytes = 7;
    tn_pool *pool = f.other;
    void *freed = test_take(f.pool, 70000, f.stream);
    int nobody;
    void *strange[] = {&nobody,    inside + 1,          inside + 512,   inside - 512,    freed,
                       (void *)1u, (void *)UINTPTR_MAX, (void *)f.pool, (void *)f.stream};
    (void)state;
    test_give(f.pool, freed, f.stream);
    f.before = test_pool_stats(f.pool);
    for (size_t i = 0; i < sizeof strange / sizeof *strange; i++) {
        REFUSED(tn_free(strange[i], f.stream));
        REFUSED(tn_record_use(strange[i], f.stream));
        REFUSED(tn_block_info(strange[i], &bytes, &pool));
    }
    REFUSED(tn_block_info(NULL, &bytes, &pool));
    assert_int_equal(bytes, 7);
    assert_ptr_equal(pool, f.other);
}

static void streams_of_nobody_and_of_another_device(void **state) {
    int nobody;
    const tn_stream strange[] = {(tn_stream)&nobody, f.other_stream};
    tn_stream ended = test_open_stream(f.device);
    void *block = NULL;
    (void)state;
    EXPECT_OK(tn_stream_destroy(f.device, ended));
    for (size_t i = 0; i < sizeof strange / sizeof *strange; i++) {
        REFUSED(tn_alloc(f.pool, 100, strange[i], NULL, &block));
        REFUSED(tn_free(f.block, strange[i]));
        REFUSED(tn_record_use(f.block, strange[i]));
    }
    REFUSED(tn_alloc(f.pool, 100, ended, NULL, &block));
    REFUSED(tn_free(f.block, ended));
    REFUSED(tn_record_use(f.block, ended));
    assert_null(block);
}

int main(void) {
#define ON_BOTH(test)                                                                              \
    {#test " (host)", test, open_on_host, close_pools, NULL}, {                                    \
#test " (sim)", test, open_on_sim, close_pools, NULL                                       \
    }
    const struct CMUnitTest tests[] = {
        ON_BOTH(devices_that_there_are_not),
        ON_BOTH(streams_that_there_are_not),
        ON_BOTH(names_of_nothing),
        ON_BOTH(pools_that_can_not_be),
        ON_BOTH(calls_on_no_pool),
        ON_BOTH(pressure_and_limits),
        ON_BOTH(insight_into_nothing),
        ON_BOTH(pauses_and_waits_that_can_not_be),
        ON_BOTH(peers_and_shares_that_can_not_be),
        ON_BOTH(graphs_of_no_graph_pool),
        {"calls_while_a_stream_captures (sim)", calls_while_a_stream_captures, open_on_sim,
         close_pools, NULL},
        ON_BOTH(allocations_that_can_not_be),
        ON_BOTH(blocks_of_nobody),
        ON_BOTH(streams_of_nobody_and_of_another_device),
    };
    return cmocka_run_group_tests_name("api/bad_input", tests, NULL, NULL);
}
