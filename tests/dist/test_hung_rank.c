/* A rank that hangs for good: the others time out, release all, and the job ends.
 *
 * The last rank stops and never comes back, so that MPI_Finalize would wait for it for ever. The
 * others say that they are clean; then their exit ends the job, the hung rank with it.
 */
#include "ranks_support.h"

#include <stdio.h>
#include <unistd.h>

enum { DEADLINE_US = 5 * 1000 * 1000 };

static void the_survivors_are_clean(void **state) {
    (void)state;
    rank_fixture all = ranks_open();
    tn_comm *comm = ranks_comm(&all, "doomed", DEADLINE_US);
    if (all.rank == all.count - 1) {
        for (;;)
            pause();
    }
    float *block = test_take(all.pool, sizeof *block, all.stream);
    EXPECT_OK(tn_all_reduce(comm, block, block, 1, TN_FP32, TN_REDUCE_SUM, all.stream));
    EXPECT_STATUS(tn_comm_wait(comm), TN_COMM_TIMEOUT);
    EXPECT_STATUS(tn_comm_destroy(comm), TN_COMM_TIMEOUT);
    test_give(all.pool, block, all.stream);
    all.has_given_up = 1;
    ranks_close(&all);
    printf("clean after a hung rank\n");
    fflush(stdout);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_survivors_are_clean)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
