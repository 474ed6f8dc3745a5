/* A call that fails inside, recovers and succeeds leaves this thread's last error as it was. */
#include <string.h>

#include "error.h"
#include "test_pools.h"

#define MIB MIB_BYTES

static char before[TN__ERROR_TEXT_BYTES];

static void remember(void) { memcpy(before, tn_error_last(), sizeof before); }

static void a_scope_that_succeeds_puts_the_last_error_back(void **state) {
    (void)state;
    (void)TN_FAIL_NATIVE(TN_DRIVER_ERROR, 7, "the first");
    remember();
    tn__error_scope_begin();
    (void)TN_FAIL_NATIVE(TN_IO, 9, "inside");
    EXPECT_ERROR_HAS("inside");
    EXPECT_OK(tn__error_scope_end(TN_OK));
    assert_string_equal(tn_error_last(), before);
    assert_int_equal(tn_error_last_native(), 7);
}

static void a_scope_that_fails_keeps_its_own(void **state) {
    (void)state;
    (void)TN_FAIL(TN_DRIVER_ERROR, "the first");
    tn__error_scope_begin();
    EXPECT_STATUS(tn__error_scope_end(TN_FAIL(TN_IO, "inside")), TN_IO);
    EXPECT_ERROR_HAS("inside");
}

static void scopes_nest(void **state) {
    (void)state;
    (void)TN_FAIL(TN_DRIVER_ERROR, "the first");
    remember();
    tn__error_scope_begin();
    tn__error_scope_begin();
    EXPECT_OK(tn__error_scope_end(TN_OK));
    tn__error_scope_begin();
    EXPECT_STATUS(tn__error_scope_end(TN_FAIL(TN_IO, "the inner one fails")), TN_IO);
    EXPECT_ERROR_HAS("the inner one fails");
    EXPECT_OK(tn__error_scope_end(TN_OK));
    assert_string_equal(tn_error_last(), before);
    tn__error_scope_begin(); /* a scope in which nothing fails keeps nothing from before */
    EXPECT_OK(tn__error_scope_end(TN_OK));
    assert_string_equal(tn_error_last(), before);
}

/* ---- calls that recover ---------------------------------------------------------------------- */

static void a_request_that_finds_memory_at_last_leaves_it(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        tn_device *device = test_open_sim(128 * MIB, 0);
        tn_pool *pool = test_open_pool(device, (tn_pool_backing)backing, 0);
        tn_pool *other = test_open_pool(device, (tn_pool_backing)backing, 0);
        void *x;
        test_give(other, test_take(other, 100 * MIB, NULL), NULL);
        (void)TN_FAIL(TN_DRIVER_ERROR, "the first");
        remember();
        x = test_take(pool, 64 * MIB, NULL);
        assert_string_equal(tn_error_last(), before);
        test_give(pool, x, NULL);
        EXPECT_OK(tn_pool_destroy(pool));
        EXPECT_OK(tn_pool_destroy(other));
        assert_string_equal(tn_error_last(), before);
        test_close_sim(device);
    }
}

/* Each driver call in turn is refused once: whenever the request is served all the same, nobody
 * hears of it. */
static void a_driver_call_that_is_got_over_leaves_it(void **state) {
    const test_sim *sim = test_sim_get();
    int got_over = 0;
    int is_reached = 1;
    (void)state;
    for (long nth = 1; is_reached; nth++) {
        tn_device *device = test_open_sim(128 * MIB, 0);
        tn_pool *pool = test_open_pool(device, TN_BACKING_VMM, 0);
        void *kept;
        void *x = NULL;
        uint64_t calls;
        tn_status status;
        x = test_take(pool, 60 * MIB, NULL);
        kept = test_take(pool, 2 * MIB, NULL);
        test_give(pool, x, NULL);
        x = NULL;
        (void)TN_FAIL(TN_DRIVER_ERROR, "the first");
        remember();
        calls = sim->call_count(NULL);
        assert_int_equal(sim->fault(NULL, nth, 0, 2), 0); /* out of memory */
        status = tn_alloc(pool, 100 * MIB, NULL, NULL, &x);
        assert_int_equal(sim->fault(NULL, 0, 0, 0), 0);
        is_reached = sim->call_count(NULL) - calls >= (uint64_t)nth;
        if (status == TN_OK) {
            assert_string_equal(tn_error_last(), before);
            got_over += is_reached;
        }
        EXPECT_OK(tn_free(x, NULL));
        test_give(pool, kept, NULL);
        EXPECT_OK(tn_pool_destroy(pool));
        test_close_sim(device);
    }
    assert_true(got_over > 0);
}

/* Without a GPU, AUTO takes the host; with one it fails nowhere. */
static void a_device_that_is_the_second_choice_leaves_it(void **state) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    (void)state;
    (void)TN_FAIL(TN_DRIVER_ERROR, "the first");
    remember();
    EXPECT_OK(tn_device_create(&config, &device));
    assert_string_equal(tn_error_last(), before);
    EXPECT_OK(tn_device_destroy(device));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_scope_that_succeeds_puts_the_last_error_back),
        cmocka_unit_test(a_scope_that_fails_keeps_its_own),
        cmocka_unit_test(scopes_nest),
        cmocka_unit_test(a_request_that_finds_memory_at_last_leaves_it),
        cmocka_unit_test(a_driver_call_that_is_got_over_leaves_it),
        cmocka_unit_test(a_device_that_is_the_second_choice_leaves_it),
    };
    return cmocka_run_group_tests_name("unit/error_scope", tests, NULL, NULL);
}
