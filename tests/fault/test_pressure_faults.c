/* The N-th failure, once and from then on, of every driver call and every host allocation while
 * memory is short: under limits, with a user's callback that frees, and where AUTO has to take
 * plain memory. A request that fails gives nothing away, the bytes that count against the process's
 * limit are those that the pools hold, and once the fault is over the same request is served. */
#include <string.h>

#include "fault_loop_support.h"
#include "host_alloc.h"
#include "tenure_pool.h"
#include "test_pools.h"

#define MIB MIB_BYTES

enum { CUDA_OUT_OF_MEMORY = 2, CUDA_UNKNOWN = 999 };

typedef struct subject {
    tn_device *device;
    tn_pool *pool;
    tn_pool *other;
    tn_stream a;
    tn_stream b;
    void *held[3];
    void *made;
} subject;

typedef struct scenario {
    const char *name;
    tn_pool_backing backing;
    size_t memory;
    size_t soft_limit;
    size_t process_limit;
    int has_callback;
    int without_addresses;
    size_t held_bytes;
    size_t idle_bytes; /* of the other pool */
    size_t request_bytes;
} scenario;

/* Each needs two of the three held blocks freed, or what the other pool has. */
static const scenario scenarios[] = {
    {"callback, pages", TN_BACKING_VMM, 64 * MIB, 0, 0, 1, 0, 20 * MIB, 0, 40 * MIB},
    {"callback, segments", TN_BACKING_PLAIN, 128 * MIB, 0, 0, 1, 0, 40 * MIB, 0, 70 * MIB},
    {"callback at the process's limit", TN_BACKING_VMM, 0, 0, 64 * MIB, 1, 0, 20 * MIB, 0,
     40 * MIB},
    {"idle pages at the process's limit", TN_BACKING_VMM, 0, 0, 64 * MIB, 0, 0, 4 * MIB, 40 * MIB,
     30 * MIB},
    {"idle segments at the process's limit", TN_BACKING_PLAIN, 0, 0, 192 * MIB, 0, 0, 4 * MIB,
     100 * MIB, 80 * MIB},
    {"soft limit, pages", TN_BACKING_VMM, 0, 16 * MIB, 0, 0, 0, 4 * MIB, 0, 30 * MIB},
    {"soft limit, segments", TN_BACKING_PLAIN, 0, 40 * MIB, 0, 0, 0, 4 * MIB, 0, 60 * MIB},
    {"no addresses", TN_BACKING_AUTO, 0, 0, 0, 0, 1, 0, 0, 30 * MIB},
};

static int free_one(void *context, const tn_pressure *pressure) {
    subject *s = context;
    (void)pressure;
    for (int i = 0; i < 3; i++) {
        if (!s->held[i]) continue;
        if (tn_free(s->held[i], s->a) != TN_OK) return 0;
        s->held[i] = NULL;
        return 1;
    }
    return 0;
}

static void open_subject(subject *s, const scenario *plan) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    memset(s, 0, sizeof *s);
    s->device = test_open_sim(plan->memory, 0);
    config.backing = plan->backing;
    config.soft_limit_bytes = plan->soft_limit;
    EXPECT_OK(tn_pool_create(s->device, &config, &s->pool));
    s->other = test_open_pool(s->device, plan->backing, 0);
    s->a = test_open_stream(s->device);
    s->b = test_open_stream(s->device);
    for (int i = 0; i < 3 && plan->held_bytes; i++) {
        s->held[i] = test_take(s->pool, plan->held_bytes, s->a);
        test_sim_write(s->device, s->b, s->held[i], plan->held_bytes, 1000);
        EXPECT_OK(tn_record_use(s->held[i], s->b));
    }
    if (plan->idle_bytes) {
        test_give(s->other, test_take(s->other, plan->idle_bytes, s->a), s->a);
        EXPECT_OK(tn_stream_synchronize(s->device, s->a));
    }
    if (plan->has_callback) EXPECT_OK(tn_pool_pressure_callback_set(s->pool, free_one, s));
    EXPECT_OK(tn_process_limits_set(plan->process_limit, 0));
}

/* What counts against the limit is what is held. */
static void expect_true_claims(const subject *s) {
    tn_process_limits limits = TN_PROCESS_LIMITS_INIT;
    EXPECT_OK(tn_process_limits_get(&limits));
    assert_int_equal(limits.reserved_bytes, test_pool_stats(s->pool).reserved_bytes +
                                                test_pool_stats(s->other).reserved_bytes);
}

static void close_subject(subject *s) {
    tn_process_limits limits = TN_PROCESS_LIMITS_INIT;
    for (int i = 0; i < 3; i++)
        EXPECT_OK(tn_free(s->held[i], s->a));
    EXPECT_OK(tn_free(s->made, s->a));
    EXPECT_OK(tn_pool_destroy(s->pool));
    EXPECT_OK(tn_pool_destroy(s->other));
    EXPECT_OK(tn_process_limits_get(&limits));
    assert_int_equal(limits.reserved_bytes, 0);
    EXPECT_OK(tn_stream_destroy(s->device, s->a));
    EXPECT_OK(tn_stream_destroy(s->device, s->b));
    test_close_sim(s->device);
    assert_int_equal(tn__host_live_blocks(), 0);
    EXPECT_OK(tn_process_limits_set(0, 0));
}

static uint64_t held_count(const subject *s) {
    uint64_t count = 0;
    for (int i = 0; i < 3; i++)
        count += s->held[i] != NULL;
    return count;
}

static tn_status run(subject *s, const scenario *plan) {
    return tn_alloc(s->pool, plan->request_bytes, s->a, NULL, &s->made);
}

/* After a run, whether it failed or not. */
static void expect_sound(subject *s, const scenario *plan, tn_status status) {
    tn_pool_stats stats = test_pool_stats(s->pool);
    if (status == TN_OK) assert_non_null(s->made);
    if (status != TN_OK) assert_null(s->made);
    assert_int_equal(stats.live_blocks, held_count(s) + (s->made != NULL));
    assert_int_equal(stats.live_bytes,
                     held_count(s) * plan->held_bytes + (s->made ? plan->request_bytes : 0));
    expect_true_claims(s);
    if (status != TN_OK) EXPECT_OK(run(s, plan));
}

static void set_address_fault(const scenario *plan, int is_on) {
    const test_sim *sim = test_sim_get();
    if (!plan->without_addresses) return;
    assert_int_equal(sim->fault("cuMemAddressReserve", is_on, is_on, CUDA_OUT_OF_MEMORY), 0);
}

static int run_with_fault(const void *argument, fault_point *fault) {
    const scenario *plan = argument;
    subject s;
    tn_status status;
    open_subject(&s, plan);
    set_address_fault(plan, 1);
    fault_begin(fault);
    status = run(&s, plan);
    fault_end(fault);
    if (fault->is_host && status != TN_OK) EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
    expect_sound(&s, plan, status);
    set_address_fault(plan, 0);
    close_subject(&s);
    return status != TN_OK;
}

static void any_driver_call_may_fail(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        if (scenarios[i].without_addresses) continue; /* one fault at a time */
        for (int kind = 0; kind < 4; kind++) {
            fault_point fault = {.and_after = kind % 2,
                                 .code = kind / 2 ? CUDA_UNKNOWN : CUDA_OUT_OF_MEMORY};
            int failed = fault_each(fault, run_with_fault, &scenarios[i]);
            if (kind == 2 && failed < 4) fail_msg("%s: %d faults", scenarios[i].name, failed);
        }
    }
}

static void any_host_allocation_may_fail(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        for (int and_after = 0; and_after < 2; and_after++) {
            const fault_point fault = {.is_host = 1, .and_after = and_after};
            int failed = fault_each(fault, run_with_fault, &scenarios[i]);
            if (failed < 1) fail_msg("%s: %d host faults", scenarios[i].name, failed);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_driver_call_may_fail),
        cmocka_unit_test(any_host_allocation_may_fail),
    };
    return cmocka_run_group_tests_name("fault/pressure_faults", tests, NULL, NULL);
}
