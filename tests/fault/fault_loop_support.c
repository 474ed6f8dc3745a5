/* See fault_loop_support.h. */
#include "fault_loop_support.h"

#include "host_alloc.h"
#include "test_support.h"

enum { DRIVER_NTH_MAX = 2000, HOST_NTH_MAX = 60 };

void fault_begin(fault_point *fault) {
    const test_sim *sim = test_sim_get();
    if (fault->is_host) {
        tn__host_alloc_fault(fault->nth, fault->and_after);
        return;
    }
    fault->calls_before = sim->call_count(NULL);
    assert_int_equal(sim->fault(NULL, fault->nth, fault->and_after, fault->code), 0);
}

void fault_end(fault_point *fault) {
    const test_sim *sim = test_sim_get();
    if (fault->is_host) {
        tn__host_alloc_fault(0, 0);
        fault->is_reached = fault->nth < HOST_NTH_MAX;
        return;
    }
    assert_int_equal(sim->fault(NULL, 0, 0, 0), 0);
    fault->is_reached = sim->call_count(NULL) - fault->calls_before >= (uint64_t)fault->nth;
}

int fault_each(fault_point fault, int (*run)(const void *scenario, fault_point *fault),
               const void *scenario) {
    int failed = 0;
    do {
        fault.nth++;
        assert_true(fault.nth < DRIVER_NTH_MAX);
        failed += run(scenario, &fault);
    } while (fault.is_reached);
    return failed;
}

void fault_everywhere(int is_host, int code, int (*run)(const void *scenario, fault_point *fault),
                      const void *scenarios, size_t each_bytes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const fault_scenario *of = (const void *)((const char *)scenarios + i * each_bytes);
        const int least = is_host ? of->least_host_faults : of->least_faults;
        for (int and_after = 0; and_after < 2; and_after++) {
            const fault_point fault = {.is_host = is_host, .and_after = and_after, .code = code};
            const int failed = fault_each(fault, run, of);
            if (failed < least) fail_msg("%s: only %d faults made it fail", of->name, failed);
        }
    }
}
