/* Starts that fail: no driver library, one that is none, a driver that does not come up, any call
 * of the start failing. The status and the words are right, nothing is left, and the next try
 * works. */
#include "misuse_support.h"

enum { NTH_MAX = 120, CUDA_OUT_OF_MEMORY = 2, CUDA_NO_DEVICE = 100, CUDA_UNKNOWN = 999 };

typedef struct started {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    void *block;
} started;

static tn_status open_device(const char *library, tn_device **out) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = library;
    return tn_device_create(&config, out);
}

static tn_status start(started *s) {
    tn_status status = open_device(TENURE_SIM_LIBRARY, &s->device);
    if (status == TN_OK) status = tn_pool_create(s->device, NULL, &s->pool);
    if (status == TN_OK) status = tn_stream_create(s->device, &s->stream);
    if (status == TN_OK) status = tn_alloc(s->pool, 1 << 20, s->stream, NULL, &s->block);
    return status;
}

static void stop(started *s) {
    EXPECT_OK(tn_free(s->block, s->stream));
    EXPECT_OK(tn_pool_destroy(s->pool));
    EXPECT_OK(tn_stream_destroy(s->device, s->stream));
    EXPECT_OK(tn_device_destroy(s->device));
    *s = (started){NULL, NULL, NULL, NULL};
}

static void reset(void) { assert_int_equal(test_sim_get()->configure(NULL), 0); }

static void expect_clean_start(void) {
    started s = {NULL, NULL, NULL, NULL};
    char left[1024] = "";
    EXPECT_OK(start(&s));
    stop(&s);
    if (test_sim_get()->leftovers(left, sizeof left)) fail_msg("left: %s", left);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void a_library_that_is_missing_or_none_is_named(void **state) {
    tn_device *device = NULL;
    (void)state;
    reset();
    EXPECT_STATUS(open_device("/nowhere/libcuda.so.1", &device), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("/nowhere/libcuda.so.1");
    EXPECT_STATUS(open_device("libm.so.6", &device), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("it lacks cuInit");
    EXPECT_STATUS(open_device("", &device), TN_UNSUPPORTED);
    assert_null(device);
    expect_clean_start();
}

static void a_driver_that_does_not_come_up_can_be_tried_again(void **state) {
    const test_sim *sim = test_sim_get();
    tn_device *device = NULL;
    (void)state;
    reset();
    assert_int_equal(sim->fault("cuInit", 1, 0, CUDA_UNKNOWN), 0);
    EXPECT_STATUS(open_device(TENURE_SIM_LIBRARY, &device), TN_DRIVER_ERROR);
    EXPECT_ERROR_HAS("cuInit");
    assert_int_equal(sim->fault("cuInit", 1, 0, CUDA_NO_DEVICE), 0);
    EXPECT_STATUS(open_device(TENURE_SIM_LIBRARY, &device), TN_UNSUPPORTED);
    assert_null(device);
    expect_clean_start();
}

/* What a start that failed half-way has made, its caller can take down. */
static int start_with_fault(long nth, int and_after, int code) {
    const test_sim *sim = test_sim_get();
    started s = {NULL, NULL, NULL, NULL};
    tn_status status;
    reset();
    assert_int_equal(sim->fault(NULL, nth, and_after, code), 0);
    status = start(&s);
    assert_int_equal(sim->fault(NULL, 0, 0, 0), 0);
    stop(&s);
    expect_clean_start();
    return status != TN_OK;
}

static void any_call_of_a_start_may_fail(void **state) {
    const int codes[] = {CUDA_UNKNOWN, CUDA_OUT_OF_MEMORY};
    (void)state;
    for (int and_after = 0; and_after < 2; and_after++) {
        for (int i = 0; i < 2; i++) {
            int failed = 0;
            for (long nth = 1; nth <= NTH_MAX; nth++)
                failed += start_with_fault(nth, and_after, codes[i]);
            assert_true(failed >= 10);
            assert_true(failed < NTH_MAX);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_library_that_is_missing_or_none_is_named),
        cmocka_unit_test(a_driver_that_does_not_come_up_can_be_tried_again),
        cmocka_unit_test(any_call_of_a_start_may_fail),
    };
    return cmocka_run_group_tests_name("misuse/failed_start", tests, NULL, NULL);
}
