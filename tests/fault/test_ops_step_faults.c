/* A small training step in which every driver call and every host allocation fails in turn, once
 * and from then on. The status names the call, the books balance, nothing leaks, and the same
 * device goes on to do the step. */
#include "test_ops_step.h"

#include <stdio.h>
#include <string.h>

#include "host_alloc.h"

enum { UNKNOWN_ERROR = 999, OUT_OF_MEMORY = 2 };

static test_stack small_stack(int trainable) {
    test_stack stack = {.layers = 2,
                        .tokens = 9,
                        .width = 130,
                        .policy = TN_POLICY_UNTIL_LAST_USE,
                        .trainable = trainable};
    return stack;
}

/* Loading and one step in a scope of their own; forward and backward on different streams. */
static tn_status whole_step(test_stack *stack, const test_ops *ops, tn_stream other,
                            tn_scope scope) {
    tn_status status = test_stack_load(stack, scope, other);
    if (status == TN_OK) status = test_stack_step(stack, scope, ops->stream, other);
    return status;
}

/* What must hold after a failure, once the faults have ended. */
static void expect_clean(test_ops *ops, tn_scope scope) {
    EXPECT_OK(tn_ledger_check(ops->pool));
    EXPECT_OK(tn_pool_check(ops->pool));
    assert_int_equal(test_ledger(ops->scope).leases, 0);
    EXPECT_OK(tn_scope_close(scope));
    tn_ledger ledger = test_ledger(ops->scope);
    assert_int_equal(ledger.total_bytes, 0);
    assert_int_equal(ledger.tensors, 0);
    EXPECT_OK(tn_ledger_check(ops->pool));
    EXPECT_OK(tn_pool_check(ops->pool));
}

typedef struct faulty_run {
    tn_status status;
    char failure[2048];
} faulty_run;

/* A step under a fault, which begin and end put in and take out; then the same step without. */
static faulty_run run_with_fault(test_ops *ops, int trainable, void (*begin)(const void *fault),
                                 void (*end)(void), const void *fault) {
    faulty_run run = {.status = TN_OK};
    test_stack stack = small_stack(trainable), again = small_stack(trainable);
    tn_stream other;
    EXPECT_OK(tn_stream_create(ops->device, &other));
    tn_scope scope = test_ops_scope(ops, TN_SCOPE_MODEL, "faulty");
    begin(fault);
    run.status = whole_step(&stack, ops, other, scope);
    end();
    memcpy(run.failure, stack.failure, sizeof run.failure);
    expect_clean(ops, scope);
    scope = test_ops_scope(ops, TN_SCOPE_MODEL, "again");
    EXPECT_OK(whole_step(&again, ops, other, scope));
    EXPECT_OK(tn_scope_close(scope));
    EXPECT_OK(tn_device_synchronize(ops->device));
    EXPECT_OK(tn_stream_destroy(ops->device, other));
    return run;
}

/* ---- driver calls -------------------------------------------------------------------------- */

typedef struct driver_fault {
    const char *call;
    long nth;
    int and_after;
    int code;
} driver_fault;

static void begin_driver_fault(const void *argument) {
    const driver_fault *fault = argument;
    assert_int_equal(test_sim_get()->fault(fault->call, fault->nth, fault->and_after, fault->code),
                     0);
}

static void end_driver_fault(void) { test_sim_get()->fault(NULL, 0, 0, 0); }

static faulty_run run_on_sim(const driver_fault *fault) {
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    faulty_run run = run_with_fault(&ops, 1, begin_driver_fault, end_driver_fault, fault);
    test_ops_close(&ops);
    test_close_sim(ops.device);
    return run;
}

/* What may come of a call that fails. */
typedef enum outcome {
    NAMED,     /* the step fails and names it */
    TOLERATED, /* that, or the step does without: the pool asks what is done, and goes on */
    ABSORBED   /* the step may always do without: events of such questions, a context put back */
} outcome;

/* The calls that a step may make, by the name in errors and the suffix that exports add. */
static const struct {
    const char *name, *suffix;
    outcome outcome;
} calls[] = {
    {"cuCtxGetCurrent", "", TOLERATED},
    {"cuCtxPushCurrent", "_v2", TOLERATED},
    {"cuCtxPopCurrent", "_v2", ABSORBED},
    {"cuMemGetInfo", "_v2", ABSORBED},
    {"cuMemAlloc", "_v2", NAMED},
    {"cuMemFree", "_v2", NAMED},
    {"cuMemAddressReserve", "", NAMED},
    {"cuMemAddressFree", "", NAMED},
    {"cuMemCreate", "", NAMED},
    {"cuMemRelease", "", NAMED},
    {"cuMemMap", "", NAMED},
    {"cuMemSetAccess", "", NAMED},
    {"cuMemUnmap", "", NAMED},
    {"cuStreamGetId", "", NAMED},
    {"cuStreamIsCapturing", "", TOLERATED},
    {"cuStreamWaitEvent", "", NAMED},
    {"cuEventCreate", "", ABSORBED},
    {"cuEventDestroy", "_v2", ABSORBED},
    {"cuEventRecord", "", ABSORBED},
    {"cuEventQuery", "", ABSORBED},
    {"cuMemsetD8Async", "", NAMED},
    {"tnsim_launch", "", NAMED},
};

enum { CALLS = sizeof calls / sizeof *calls };

static const char *export_name(int index) {
    static char name[64];
    snprintf(name, sizeof name, "%s%s", calls[index].name, calls[index].suffix);
    return name;
}

/* How often a step makes each call; they must be all the calls that it makes. */
static void count_calls(uint64_t counts[CALLS]) {
    const test_sim *sim = test_sim_get();
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    test_stack stack = small_stack(1);
    tn_stream other;
    uint64_t sum = 0;
    EXPECT_OK(tn_stream_create(ops.device, &other));
    tn_scope scope = test_ops_scope(&ops, TN_SCOPE_MODEL, "clean");
    uint64_t all = sim->call_count(NULL);
    for (int i = 0; i < CALLS; i++)
        counts[i] = sim->call_count(export_name(i));
    EXPECT_OK(whole_step(&stack, &ops, other, scope));
    for (int i = 0; i < CALLS; i++) {
        counts[i] = sim->call_count(export_name(i)) - counts[i];
        sum += counts[i];
    }
    assert_int_equal(sum, sim->call_count(NULL) - all);
    EXPECT_OK(tn_scope_close(scope));
    EXPECT_OK(tn_device_synchronize(ops.device));
    EXPECT_OK(tn_stream_destroy(ops.device, other));
    test_ops_close(&ops);
    test_close_sim(ops.device);
}

static void expect_named(const faulty_run *run, const driver_fault *fault, int index) {
    if (run->status == TN_OK && calls[index].outcome != NAMED) return;
    if (run->status != TN_OK && strstr(run->failure, calls[index].name)) return;
    fail_msg("%s failed at call %ld%s: the step gave %s, \"%s\"", fault->call, fault->nth,
             fault->and_after ? " and after" : "", tn_status_name(run->status), run->failure);
}

static void fail_every_call(int and_after) {
    uint64_t counts[CALLS];
    count_calls(counts);
    for (int i = 0; i < CALLS; i++) {
        uint64_t failures = 0;
        for (uint64_t nth = 1; nth <= counts[i]; nth++) {
            driver_fault fault = {export_name(i), (long)nth, and_after, UNKNOWN_ERROR};
            faulty_run run = run_on_sim(&fault);
            expect_named(&run, &fault, i);
            if (run.status != TN_OK) failures++;
        }
        if (counts[i] > 0 && calls[i].outcome == TOLERATED) assert_true(failures > 0);
    }
}

static void every_driver_call_that_fails_once_is_named_and_leaves_nothing(void **state) {
    (void)state;
    fail_every_call(0);
}

static void every_driver_call_that_fails_from_then_on_is_named_and_leaves_nothing(void **state) {
    (void)state;
    fail_every_call(1);
}

/* Whether both name the same call: "cuMemMap" of "cuMemMap(0x..., ...) failed: ...". */
static int name_the_same_call(const char *a, const char *b) {
    size_t length = strcspn(a, "(");
    return length == strcspn(b, "(") && memcmp(a, b, length) == 0;
}

/* Fails the nth call once, and for good: 0 if the second tells of another call than the first, -1
 * if the step does without the nth call, so that another one is the first to be told of. */
static int tells_the_first_failure(uint64_t nth) {
    driver_fault once = {NULL, (long)nth, 0, UNKNOWN_ERROR}, for_good = once;
    for_good.and_after = 1;
    faulty_run first = run_on_sim(&once), both = run_on_sim(&for_good);
    if (first.status == TN_OK) return -1;
    return both.status != TN_OK && name_the_same_call(first.failure, both.failure);
}

/* Once any call has failed for good, so do the calls of the cleanup: what is told is the first. */
static void a_cleanup_that_fails_too_does_not_hide_the_first_failure(void **state) {
    (void)state;
    uint64_t counts[CALLS], all = 0, compared = 0;
    count_calls(counts);
    for (int i = 0; i < CALLS; i++)
        all += counts[i];
    for (uint64_t nth = 1; nth <= all; nth++) {
        int tells = tells_the_first_failure(nth);
        assert_int_not_equal(tells, 0);
        if (tells == 1) compared++;
    }
    assert_true(compared > 50);
}

static void running_out_of_device_memory_has_its_own_status(void **state) {
    (void)state;
    for (int and_after = 0; and_after < 2; and_after++) {
        driver_fault fault = {"cuMemCreate", 1, and_after, OUT_OF_MEMORY};
        faulty_run run = run_on_sim(&fault);
        if (and_after) assert_int_equal(run.status, TN_OUT_OF_DEVICE_MEMORY);
        if (!and_after && run.status != TN_OK) {
            assert_int_equal(run.status, TN_OUT_OF_DEVICE_MEMORY);
        }
    }
}

/* ---- host allocations ---------------------------------------------------------------------- */

typedef struct host_fault {
    long nth;
    int and_after;
} host_fault;

static void begin_host_fault(const void *argument) {
    const host_fault *fault = argument;
    tn__host_alloc_fault(fault->nth, fault->and_after);
}

static void end_host_fault(void) { tn__host_alloc_fault(0, 0); }

/* Fails the nth allocation for every n, until some steps in a row have been long done by then. */
static void fail_every_allocation(test_ops (*open)(void), void (*close)(test_ops *ops),
                                  int and_after) {
    enum { ENOUGH = 5, AT_LEAST = 30 };
    long live = -1, nth = 0;
    for (int passed = 0; passed < ENOUGH;) {
        host_fault fault = {++nth, and_after};
        test_ops ops = open();
        faulty_run run =
            run_with_fault(&ops, nth % 2 ? 0 : 1, begin_host_fault, end_host_fault, &fault);
        close(&ops);
        passed = run.status == TN_OK ? passed + 1 : 0;
        if (run.status != TN_OK) assert_int_equal(run.status, TN_OUT_OF_HOST_MEMORY);
        if (live >= 0) assert_int_equal(tn__host_live_blocks(), live);
        live = tn__host_live_blocks();
    }
    assert_true(nth > AT_LEAST);
}

static test_ops open_sim(void) { return test_ops_open(test_open_sim(0, 0)); }

static void close_sim(test_ops *ops) {
    test_ops_close(ops);
    test_close_sim(ops->device);
}

static void every_host_allocation_may_fail_on_the_simulated_device(void **state) {
    (void)state;
    fail_every_allocation(open_sim, close_sim, 0);
    fail_every_allocation(open_sim, close_sim, 1);
}

static void every_host_allocation_may_fail_on_the_host_device(void **state) {
    (void)state;
    fail_every_allocation(test_ops_open_host, test_ops_close_host, 0);
    fail_every_allocation(test_ops_open_host, test_ops_close_host, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_driver_call_that_fails_once_is_named_and_leaves_nothing),
        cmocka_unit_test(every_driver_call_that_fails_from_then_on_is_named_and_leaves_nothing),
        cmocka_unit_test(a_cleanup_that_fails_too_does_not_hide_the_first_failure),
        cmocka_unit_test(running_out_of_device_memory_has_its_own_status),
        cmocka_unit_test(every_host_allocation_may_fail_on_the_simulated_device),
        cmocka_unit_test(every_host_allocation_may_fail_on_the_host_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
