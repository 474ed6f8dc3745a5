/* Faults of address space that users of other allocators met, as the reports had them: all are
 * listed in docs/cases.md. */
#include "tenure_pool.h"
#include "test_pools.h"

#define MIB MIB_BYTES
#define GIB GIB_BYTES

enum { STREAMS = 200 };

/* pytorch#192269, #193211, #198129: a reservation of 9/8 of the device for each stream, until 128
 * TiB are gone. Here streams share the pool's. */
static void reservations_do_not_grow_with_streams(void **state) {
    tn_device *device = test_open_sim(0, 0); /* 139 GiB, 128 TiB of addresses */
    tn_pool *pool = test_open_pool(device, TN_BACKING_VMM, 0);
    tn_stream streams[STREAMS];
    size_t after_first = 0;
    (void)state;
    for (int i = 0; i < STREAMS; i++) {
        void *large;
        void *small;
        streams[i] = test_open_stream(device);
        large = test_take(pool, 64 * MIB, streams[i]);
        small = test_take(pool, 1000, streams[i]);
        test_sim_write(device, streams[i], large, 64 * MIB, 1000);
        EXPECT_OK(tn_free(large, streams[i]));
        EXPECT_OK(tn_free(small, streams[i]));
        if (i == 0) after_first = test_pool_stats(pool).address_bytes;
    }
    assert_int_equal(test_pool_stats(pool).address_bytes, after_first);
    assert_true(after_first < 278 * GIB);
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_destroy(device, streams[i]));
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
}

/* Pools that come and go leave no addresses behind. */
static void pools_give_their_addresses_back(void **state) {
    const tnsim_config config = {
        .size = sizeof config, .memory_bytes = 1 * GIB, .address_space_bytes = 4 * GIB};
    tn_device *device = test_open_sim_as(&config);
    (void)state;
    for (int i = 0; i < 50; i++) {
        tn_pool *pool = test_open_pool(device, TN_BACKING_VMM, 0);
        void *x = test_take(pool, 900 * MIB, NULL);
        test_give(pool, x, NULL);
        EXPECT_OK(tn_pool_destroy(pool));
    }
    test_close_sim(device);
}

/* llama.cpp#29142, llama.cpp#4680, node-llama-cpp#580: a reservation that the driver refuses ends
 * the program. Here AUTO takes plain memory when there are no addresses at all. */
static void without_any_addresses_the_choice_is_plain_memory(void **state) {
    const test_sim *sim = test_sim_get();
    const int cuda_out_of_memory = 2;
    tn_device *device = test_open_sim(0, 0);
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    tn_pool *vmm = test_open_pool(device, TN_BACKING_VMM, 0);
    void *x[2];
    void *none = NULL;
    (void)state;
    assert_int_equal(sim->fault("cuMemAddressReserve", 1, 1, cuda_out_of_memory), 0);
    x[0] = test_take(pool, 100 * MIB, NULL);
    x[1] = test_take(pool, 1000, NULL);
    assert_int_equal(test_calls(device, TN_CALL_MEM_CREATE), 0);
    assert_int_equal(test_calls(device, TN_CALL_MEM_ALLOC), 2);
    /* One who asks for VMM is told. */
    EXPECT_STATUS(tn_alloc(vmm, 100 * MIB, NULL, NULL, &none), TN_OUT_OF_ADDRESS_SPACE);
    EXPECT_ERROR_HAS("hint: ");
    assert_int_equal(sim->fault("cuMemAddressReserve", 0, 0, 0), 0);
    test_give(pool, x[0], NULL);
    test_give(pool, x[1], NULL);
    none = test_take(vmm, 100 * MIB, NULL);
    test_give(vmm, none, NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_pool_destroy(vmm));
    test_close_sim(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reservations_do_not_grow_with_streams),
        cmocka_unit_test(pools_give_their_addresses_back),
        cmocka_unit_test(without_any_addresses_the_choice_is_plain_memory),
    };
    return cmocka_run_group_tests_name("sim/cases_addresses", tests, NULL, NULL);
}
