/* Several devices: which memory their streams reach, whenever it and they are made; and the end of
 * all of them, also when it has to be tried again. */
#include "adapter_device.h"
#include "adapters_support.h"

typedef struct fixture {
    tn_device *device;
    tn_device *second; /* the test's own handle, as `device` is */
    tn_stream capturing;
    tn_stream peer; /* of the second */
} fixture;

static void open_fixture(fixture *f) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    f->device = adapters_open(2, 0);
    config.driver = TN_DRIVER_CUDA;
    config.ordinal = 1;
    EXPECT_OK(tn_device_create(&config, &f->second));
    f->capturing = test_open_foreign_stream(f->device);
    f->peer = test_open_foreign_stream(f->second);
}

static void close_fixture(fixture *f) {
    EXPECT_OK(tn_device_synchronize(f->device));
    EXPECT_OK(tn_device_synchronize(f->second));
    test_close_foreign_stream(f->device, f->capturing);
    test_close_foreign_stream(f->second, f->peer);
    EXPECT_OK(tn_adapters_close());
    EXPECT_OK(tn_device_destroy(f->second));
    adapters_close(f->device);
}

static void *take_of_second(fixture *f) {
    void *block = NULL;
    EXPECT_OK(tn__framework_alloc(1, MIB, f->peer, "test", &block));
    return block;
}

/* ---- peers ----------------------------------------------------------------------------------- */

/* A captured graph's result, of a time when the other device had no memory yet. */
static void a_later_device_reaches_memory_of_graphs(void **state) {
    adapters_filter filter = {NULL, 0, 0};
    test_graph graph;
    fixture f;
    void *result;
    void *on_second;
    (void)state;
    open_fixture(&f);
    adapters_begin(1, &filter);
    test_capture_begin(f.device, f.capturing, TEST_CAPTURE_GLOBAL);
    result = adapters_take(2 * MIB, f.capturing);
    test_sim_write(f.device, f.capturing, result, 2 * MIB, 10);
    graph = test_capture_end(f.device, f.capturing);
    EXPECT_OK(adapters_end(1));
    test_graph_launch(f.device, &graph, f.capturing);
    on_second = take_of_second(&f);
    EXPECT_OK(tn_device_synchronize(f.device));
    test_sim_read(f.second, f.peer, result, 2 * MIB, 10);
    EXPECT_OK(tn_device_synchronize(f.second));
    EXPECT_OK(tn__framework_free(1, on_second, f.peer));
    test_graph_destroy(f.device, &graph);
    adapters_give(result, f.capturing);
    EXPECT_OK(adapters_release(1));
    close_fixture(&f);
}

/* ---- the end --------------------------------------------------------------------------------- */

/* The program's pool stays, and has the other device, which ends, as its peer no more. */
static void a_pool_of_the_programs_outlives_the_other_devices(void **state) {
    fixture f;
    tn_pool *mine;
    void *block;
    void *on_second;
    (void)state;
    open_fixture(&f);
    mine = test_open_pool(f.device, TN_BACKING_VMM, 0);
    EXPECT_OK(tn_adapter_pool_use(mine));
    block = adapters_take(4 * MIB, NULL);
    on_second = take_of_second(&f);
    EXPECT_OK(tn__framework_use(block, f.peer));
    test_sim_read(f.second, f.peer, block, 4 * MIB, 1000);
    adapters_give(block, NULL);
    EXPECT_OK(tn__framework_free(1, on_second, f.peer));
    EXPECT_OK(tn_adapters_close());
    test_give(mine, test_take(mine, 4 * MIB, NULL), NULL);
    EXPECT_OK(tn_pool_destroy(mine));
    close_fixture(&f);
}

/* Of two devices one has a block: what the other had is gone, and questions have answers. */
static void a_close_that_found_a_leak_can_be_asked_and_made_again(void **state) {
    tn_pool *pool = NULL;
    uint64_t value = 7;
    fixture f;
    void *block;
    (void)state;
    open_fixture(&f);
    adapters_give(adapters_take(4 * MIB, NULL), NULL);
    block = take_of_second(&f);
    EXPECT_STATUS(tn_adapters_close(), TN_LEAK);
    EXPECT_OK(tn_adapter_stat(0, "reserved_bytes", &value));
    assert_int_equal(value, 0);
    EXPECT_OK(tn_adapter_stat(1, "live_bytes", &value));
    assert_int_equal(value, MIB);
    EXPECT_OK(tn_adapter_reset_peaks(0));
    EXPECT_OK(tn_adapters_trim());
    EXPECT_STATUS(tn_adapter_pool(0, &pool), TN_INVALID_STATE);
    assert_null(pool);
    EXPECT_OK(tn__framework_free(1, block, f.peer));
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_later_device_reaches_memory_of_graphs),
        cmocka_unit_test(a_pool_of_the_programs_outlives_the_other_devices),
        cmocka_unit_test(a_close_that_found_a_leak_can_be_asked_and_made_again),
    };
    return cmocka_run_group_tests_name("adapters/adapter_devices", tests, NULL, NULL);
}
