/* Blocks that tensors own: told apart in the books, otherwise blocks like any other. */
#include "pool_owned.h"
#include "test_pools.h"

static void owned_bytes_are_those_of_living_owned_blocks(void **state) {
    tn_device *device = test_open_host();
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    void *owned[2] = {NULL, NULL};
    void *plain = test_take(pool, 1000, NULL);
    size_t bytes = 0;
    (void)state;
    EXPECT_OK(tn__alloc_owned(pool, 300, NULL, NULL, &owned[0]));
    EXPECT_OK(tn__alloc_owned(pool, 5 * MIB_BYTES + 1, NULL, NULL, &owned[1]));
    assert_int_equal(test_pool_stats(pool).owned_bytes, 5 * MIB_BYTES + 301);
    assert_int_equal(test_pool_stats(pool).live_bytes, 5 * MIB_BYTES + 1301);
    EXPECT_OK(tn_block_info(owned[1], &bytes, NULL));
    assert_int_equal(bytes, 5 * MIB_BYTES + 1);
    test_give(pool, owned[0], NULL);
    assert_int_equal(test_pool_stats(pool).owned_bytes, 5 * MIB_BYTES + 1);
    owned[0] = test_take(pool, 300, NULL); /* the same memory, owned no more */
    assert_int_equal(test_pool_stats(pool).owned_bytes, 5 * MIB_BYTES + 1);
    test_give(pool, owned[0], NULL);
    test_give(pool, owned[1], NULL);
    assert_int_equal(test_pool_stats(pool).owned_bytes, 0);
    EXPECT_OK(tn__alloc_owned(pool, 0, NULL, NULL, &owned[0]));
    assert_null(owned[0]);
    test_give(pool, plain, NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_device_destroy(device));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(owned_bytes_are_those_of_living_owned_blocks),
    };
    return cmocka_run_group_tests_name("unit/pool_owned", tests, NULL, NULL);
}
