/* Pools that are asked before idle memory of theirs goes back: by a trim, a lower limit, and
 * another pool that is short. */
#include "pool_settle.h"
#include "tenure_pool.h"
#include "test_pools.h"

#define MIB MIB_BYTES

static int answer;
static int asked;

static int settle(void) {
    asked++;
    return answer;
}

typedef struct fixture {
    tn_device *device;
    tn_pool *asks;
    tn_pool *other;
} fixture;

static void open_fixture(fixture *f, tn_pool_backing backing) {
    f->device = test_open_sim(128 * MIB, 0);
    f->asks = test_open_pool(f->device, backing, 0);
    f->other = test_open_pool(f->device, backing, 0);
    tn__pool_settle_set(f->asks, settle);
    asked = 0;
}

static void close_fixture(fixture *f) {
    EXPECT_OK(tn_pool_destroy(f->asks));
    EXPECT_OK(tn_pool_destroy(f->other));
    test_close_sim(f->device);
}

static void leave_idle(fixture *f, size_t bytes) {
    test_give(f->asks, test_take(f->asks, bytes, NULL), NULL);
    assert_true(test_pool_stats(f->asks).cached_bytes >= bytes);
}

static void a_trim_asks(void **state) {
    size_t released = 7;
    fixture f;
    (void)state;
    open_fixture(&f, TN_BACKING_VMM);
    leave_idle(&f, 32 * MIB);
    answer = 0;
    EXPECT_OK(tn_pool_trim(f.asks, 0, &released));
    assert_int_equal(released, 0);
    assert_int_equal(test_pool_stats(f.asks).reserved_bytes, 32 * MIB);
    answer = 1;
    EXPECT_OK(tn_pool_trim(f.asks, 0, &released));
    assert_int_equal(released, 32 * MIB);
    assert_int_equal(asked, 2);
    close_fixture(&f);
}

static void a_lower_limit_asks(void **state) {
    fixture f;
    (void)state;
    open_fixture(&f, TN_BACKING_VMM);
    leave_idle(&f, 32 * MIB);
    answer = 0;
    EXPECT_STATUS(tn_pool_limit_set(f.asks, 16 * MIB), TN_IN_USE);
    EXPECT_OK(tn_pool_limit_set(f.asks, 0));
    answer = 1;
    EXPECT_OK(tn_pool_limit_set(f.asks, 16 * MIB));
    assert_int_equal(test_pool_stats(f.asks).reserved_bytes, 0);
    close_fixture(&f);
}

static void another_pool_that_is_short_asks(void **state) {
    static const tn_pool_backing backings[] = {TN_BACKING_VMM, TN_BACKING_PLAIN};
    (void)state;
    for (int i = 0; i < 2; i++) {
        fixture f;
        void *block = NULL;
        open_fixture(&f, backings[i]);
        test_give(f.other, test_take(f.other, 100 * MIB, NULL), NULL);
        EXPECT_OK(tn_pool_trim(f.other, 0, NULL));
        assert_int_equal(asked, 0);
        leave_idle(&f, 64 * MIB);
        answer = 0;
        EXPECT_STATUS(tn_alloc(f.other, 100 * MIB, NULL, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
        assert_true(asked > 0);
        answer = 1;
        block = test_take(f.other, 100 * MIB, NULL);
        test_give(f.other, block, NULL);
        close_fixture(&f);
    }
}

/* Nothing idle is nothing to ask for; and in a no-wait time nobody is asked. */
static void it_is_asked_only_where_it_helps(void **state) {
    fixture f;
    void *kept;
    void *block = NULL;
    (void)state;
    open_fixture(&f, TN_BACKING_VMM);
    answer = 1;
    kept = test_take(f.asks, 64 * MIB, NULL);
    EXPECT_STATUS(tn_alloc(f.other, 100 * MIB, NULL, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(asked, 0);
    test_give(f.asks, kept, NULL);
    EXPECT_OK(tn_no_wait_begin());
    EXPECT_OK(tn_pool_trim(f.asks, 0, NULL));
    assert_int_equal(asked, 0);
    EXPECT_OK(tn_no_wait_end());
    EXPECT_OK(tn_pool_trim(f.asks, 0, NULL));
    assert_int_equal(asked, 1);
    close_fixture(&f);
}

/* ---- while it is asked ----------------------------------------------------------------------- */

static tn_pool *trimmed;

static int settle_while_another_thread_trims(void) {
    tn__pool_settle_set(trimmed, NULL);
    EXPECT_OK(tn_pool_trim(trimmed, 0, NULL));
    return 1;
}

/* What the pool that is short is about to take has gone back to the driver before: it is there. */
static void memory_that_another_thread_gives_back_is_found(void **state) {
    static const tn_pool_backing backings[] = {TN_BACKING_VMM, TN_BACKING_PLAIN};
    (void)state;
    for (int i = 0; i < 2; i++) {
        fixture f;
        open_fixture(&f, backings[i]);
        leave_idle(&f, 64 * MIB);
        trimmed = f.asks;
        tn__pool_settle_set(f.asks, settle_while_another_thread_trims);
        test_give(f.other, test_take(f.other, 100 * MIB, NULL), NULL);
        close_fixture(&f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_trim_asks),
        cmocka_unit_test(a_lower_limit_asks),
        cmocka_unit_test(another_pool_that_is_short_asks),
        cmocka_unit_test(it_is_asked_only_where_it_helps),
        cmocka_unit_test(memory_that_another_thread_gives_back_is_found),
    };
    return cmocka_run_group_tests_name("sim/pool_settle", tests, NULL, NULL);
}
