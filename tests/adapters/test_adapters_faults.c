/* The N-th host allocation, or the N-th driver call, of a framework's calls fails, once and from
 * then on, for every N: each call succeeds or leaves all as it was, and the pools can be ended. */
#include "adapters_support.h"

#include "host_alloc.h"

enum { CUDA_UNKNOWN = 999, NTH_MAX = 400 };

/* The calls of a step; 1 if none failed. Blocks that were given are given back, but for one whose
 * free failed: *kept. A free of a segment can not fail. */
static int step(tn_stream stream, void **kept) {
    const uint64_t key[2] = {1, 1};
    const tn__stream_filter filter = {NULL, NULL, NULL};
    void *block = NULL;
    void *segment = NULL;
    int failed = 0;
    failed |= tn__framework_alloc(0, 3 * MIB, stream, "test", &block) != TN_OK;
    failed |= tn__framework_segment(0, 8 * MIB, stream, "test", &segment) != TN_OK;
    failed |= tn__framework_use(block, NULL) != TN_OK;
    if (tn__framework_free(0, block, stream) != TN_OK) {
        failed = 1;
        *kept = block;
    }
    tn__framework_free_unordered(0, segment);
    if (tn__framework_begin(0, key, &filter) == TN_OK) {
        failed |= tn__framework_end(0, key) != TN_OK;
        failed |= tn__framework_release(0, key) != TN_OK;
    } else {
        failed = 1;
    }
    failed |= tn_adapters_trim() != TN_OK;
    return !failed;
}

static void set_fault(int is_host, long nth, int and_after) {
    if (is_host) {
        tn__host_alloc_fault(nth, and_after);
    } else {
        test_sim_get()->fault(NULL, nth, and_after, CUDA_UNKNOWN);
    }
}

/* After a failure all can be ended, and nothing is left. */
static void end_all(tn_device *device, tn_stream stream, void *kept) {
    EXPECT_OK(tn__framework_free(0, kept, stream));
    EXPECT_OK(tn_device_synchronize(device));
    EXPECT_OK(tn_adapters_trim());
    test_close_foreign_stream(device, stream);
    adapters_close(device);
}

static void run_faults(int is_host, int and_after) {
    long nth;
    for (nth = 1; nth <= NTH_MAX; nth++) {
        tn_device *device = adapters_open(1, 0);
        tn_stream stream = test_open_foreign_stream(device);
        void *kept = NULL;
        int is_done;
        set_fault(is_host, nth, and_after);
        is_done = step(stream, &kept);
        set_fault(is_host, 0, 0);
        end_all(device, stream, kept);
        if (is_done) break;
    }
    assert_true(nth > 5 && nth < NTH_MAX);
}

static void one_host_allocation_fails(void **state) {
    (void)state;
    run_faults(1, 0);
}
static void host_allocations_fail_from_then_on(void **state) {
    (void)state;
    run_faults(1, 1);
}
static void one_driver_call_fails(void **state) {
    (void)state;
    run_faults(0, 0);
}
static void driver_calls_fail_from_then_on(void **state) {
    (void)state;
    run_faults(0, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_host_allocation_fails),
        cmocka_unit_test(host_allocations_fail_from_then_on),
        cmocka_unit_test(one_driver_call_fails),
        cmocka_unit_test(driver_calls_fail_from_then_on),
    };
    return cmocka_run_group_tests_name("adapters/adapters_faults", tests, NULL, NULL);
}
