/* Each cast of tenure_ops.h, tenure_cast.h and tenure_grouped.h with every driver call and every
 * host allocation failing in turn: see op_faults_support.h. */
#include "op_faults_support.h"

enum { UNKNOWN_ERROR = 999 };

static int fail_each(fault_point fault, int is_sim) {
    return op_faults_fail_each(op_fault_rows, op_fault_row_count, fault, is_sim);
}

static void every_host_allocation_on_the_host_device(void **state) {
    (void)state;
    assert_true(fail_each((fault_point){.is_host = 1}, 0) > 100);
}

static void every_host_allocation_on_the_simulated_device(void **state) {
    (void)state;
    assert_true(fail_each((fault_point){.is_host = 1}, 1) > 100);
}

static void every_driver_call(void **state) {
    (void)state;
    assert_true(fail_each((fault_point){.code = UNKNOWN_ERROR}, 1) > 1000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_host_allocation_on_the_host_device),
        cmocka_unit_test(every_host_allocation_on_the_simulated_device),
        cmocka_unit_test(every_driver_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
