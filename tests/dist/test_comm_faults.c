/* The N-th host allocation fails: a communicator is not made or a collective not put, nothing is
 * left behind, and the same call then works. */
#include "ranks_support.h"

#include "host_alloc.h"

static rank_fixture all;

static void create_fails_whole_or_works(void **state) {
    (void)state;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    long failures = 0, before = tn__host_live_blocks();
    config.device = all.device;
    for (long nth = 1; status != TN_OK; nth++) {
        tn_comm *comm = NULL;
        tn__host_alloc_fault(nth, 0);
        status = tn_comm_create(&config, &comm);
        tn__host_alloc_fault(0, 0);
        if (status == TN_OK) {
            EXPECT_OK(tn_comm_destroy(comm));
        } else {
            EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
            assert_null(comm);
            failures++;
        }
        assert_int_equal(tn__host_live_blocks(), before);
    }
    assert_true(failures >= 9); /* the communicator, its engine's state and its buffers */
}

static void a_collective_is_put_whole_or_not_at_all(void **state) {
    (void)state;
    unsigned char *block = test_take(all.pool, 64, all.stream);
    tn_comm_stats before = ranks_stats(&all);
    tn__host_alloc_fault(1, 0);
    EXPECT_STATUS(tn_broadcast(all.comm, block, 64, 0, all.stream), TN_OUT_OF_HOST_MEMORY);
    tn__host_alloc_fault(0, 0);
    tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&before, &after, sizeof before);
    EXPECT_OK(tn_broadcast(all.comm, block, 64, 0, all.stream));
    ranks_wait(&all);
    assert_int_equal(ranks_stats(&all).calls[TN_BROADCAST], before.calls[TN_BROADCAST] + 1);
    test_give(all.pool, block, all.stream);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(create_fails_whole_or_works),
        cmocka_unit_test(a_collective_is_put_whole_or_not_at_all),
    };
    return RANKS_RUN(&all, tests);
}
