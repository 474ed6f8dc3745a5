/* The ring with every driver call and every host allocation failing in turn, once and from then on,
 * in each of its calls. A call that fails has acquired and released nothing and leaves the ring
 * whole; the same call then succeeds, and so does a step; at the end everything is freed.
 */
#include "fault_loop_support.h"
#include "ring_fixture.h"

#include <stdio.h>
#include <string.h>

enum { UNKNOWN_ERROR = 999, ROWS = 64, UNITS = 3 };

static const tn_scope NO_SCOPE = {0};

typedef struct subject {
    ring_fixture f;
    tn_scope step;
} subject;

typedef struct call {
    const char *name;
    int slots;
    int is_unsealed; /* the ring has been made, no more */
    void (*setup)(subject *s);
    tn_status (*run)(subject *s);
    int holds_after; /* of unit 0, once the call has succeeded */
} call;

/* ---- what a ring has been through ---------------------------------------------------------- */

static void use(subject *s, int unit, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(
        tn_lease_begin(s->f.units[unit].weights[1], TN_PLANE_COL, TN_READ, stream, &lease, &view));
    fixture_touch(&s->f.t, &view, 0, stream);
    EXPECT_OK(tn_lease_end(lease));
}

static void nothing(subject *s) { (void)s; }

/* Every slot drains, with uses on two streams. */
static void used(subject *s) {
    for (int unit = 1; unit < UNITS; unit++) {
        EXPECT_OK(tn_ring_acquire(s->f.ring, unit, NO_SCOPE, s->f.t.stream));
        use(s, unit, s->f.t.stream);
        use(s, unit, s->f.t.other);
        EXPECT_OK(tn_ring_release(s->f.ring, unit));
    }
}

static void prefetched(subject *s) {
    used(s);
    EXPECT_OK(tn_ring_prefetch(s->f.ring, 0));
}

static void outdated(subject *s) {
    prefetched(s);
    ring_fixture_write_shard(&s->f, 0, 9);
}

static void displacing(subject *s) {
    EXPECT_OK(tn_ring_prefetch(s->f.ring, 1));
    EXPECT_OK(tn_ring_prefetch(s->f.ring, 2));
}

static void acquired(subject *s) {
    EXPECT_OK(tn_ring_acquire(s->f.ring, 0, NO_SCOPE, s->f.t.stream));
    use(s, 0, s->f.t.stream);
    use(s, 0, s->f.t.other);
}

static void acquired_in_step(subject *s) {
    EXPECT_OK(tn_ring_acquire(s->f.ring, 0, s->step, s->f.t.stream));
    use(s, 0, s->f.t.other);
}

static void acquired_and_wanted(subject *s) {
    acquired(s);
    EXPECT_OK(tn_ring_prefetch(s->f.ring, 1));
}

/* ---- the calls ----------------------------------------------------------------------------- */

static tn_status run_seal(subject *s) { return tn_ring_seal(s->f.ring); }

static tn_status run_prefetch(subject *s) { return tn_ring_prefetch(s->f.ring, 0); }

static tn_status run_acquire(subject *s) {
    return tn_ring_acquire(s->f.ring, 0, s->step, s->f.t.stream);
}

static tn_status run_acquire_elsewhere(subject *s) {
    return tn_ring_acquire(s->f.ring, 0, NO_SCOPE, s->f.t.other);
}

static tn_status run_release(subject *s) { return tn_ring_release(s->f.ring, 0); }

static tn_status run_schedule(subject *s) {
    const tn_ring_op ops[] = {{TN_RING_ACQUIRE, 0}, {TN_RING_RELEASE, 0}};
    return tn_ring_schedule_set(s->f.ring, ops, 2);
}

static tn_status run_close(subject *s) {
    tn_status status = tn_scope_close(s->step);
    if (status == TN_OK) s->step = NO_SCOPE;
    return status;
}

static tn_status run_destroy(subject *s) {
    tn_status status = tn_ring_destroy(s->f.ring);
    if (status == TN_OK) s->f.ring = NULL;
    return status;
}

static const call calls[] = {
    {"seal", 2, 1, nothing, run_seal, 0},
    {"schedule", 2, 1, nothing, run_schedule, 0},
    {"prefetch, first", 2, 0, nothing, run_prefetch, 0},
    {"prefetch, where another was", 2, 0, used, run_prefetch, 0},
    {"prefetch again", 2, 0, outdated, run_prefetch, 0},
    {"acquire, first", 2, 0, nothing, run_acquire, 1},
    {"acquire what is there", 2, 0, prefetched, run_acquire, 1},
    {"acquire what is outdated", 2, 0, outdated, run_acquire, 1},
    {"acquire and displace", 2, 0, displacing, run_acquire, 1},
    {"acquire twice", 2, 0, acquired, run_acquire_elsewhere, 2},
    {"release", 2, 0, acquired, run_release, 0},
    {"release in a scope", 2, 0, acquired_in_step, run_release, 0},
    {"release and start what waits", 1, 0, acquired_and_wanted, run_release, 0},
    {"close the scope", 2, 0, acquired_in_step, run_close, 0},
    {"destroy", 2, 0, prefetched, run_destroy, 0},
    {"destroy what is acquired", 2, 0, acquired_in_step, run_destroy, 0},
};

enum { CALLS = sizeof calls / sizeof *calls };

/* ---- one failure --------------------------------------------------------------------------- */

static void begin(subject *s, const call *of) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    ring_fixture_open(&s->f, 1);
    s->f.config.slots = of->slots;
    for (int i = 0; i < UNITS; i++)
        ring_fixture_add(&s->f, ROWS, 1);
    ring_fixture_make(&s->f);
    if (!of->is_unsealed) EXPECT_OK(tn_ring_seal(s->f.ring));
    config.parent = s->f.t.scope;
    config.kind = TN_SCOPE_STEP;
    EXPECT_OK(tn_scope_create(&config, &s->step));
    of->setup(s);
}

static int holds_of(const subject *s, int unit) {
    tn_ring_unit_info info = TN_RING_UNIT_INFO_INIT;
    EXPECT_OK(tn_ring_unit_info_get(s->f.ring, unit, &info));
    return info.holds;
}

static void run_step(subject *s) {
    for (int unit = 0; unit < UNITS; unit++) {
        EXPECT_OK(tn_ring_acquire(s->f.ring, unit, NO_SCOPE, s->f.t.stream));
        ring_fixture_expect_there(&s->f, unit, s->f.t.stream);
        use(s, unit, s->f.t.other);
        EXPECT_OK(tn_ring_release(s->f.ring, unit));
    }
}

/* What the call has left is released, and the ring does its work. */
static void expect_whole(subject *s, const call *of) {
    if (!s->f.ring) return;
    assert_true(tn__ring_is_valid(s->f.ring));
    if (of->is_unsealed && of->run != run_seal) EXPECT_OK(tn_ring_seal(s->f.ring));
    EXPECT_OK(tn_ring_prefetch(s->f.ring, 1)); /* and ends what a closed scope has left */
    while (holds_of(s, 0) > 0)
        EXPECT_OK(tn_ring_release(s->f.ring, 0));
    ring_fixture_expect_gone(&s->f, 0);
    run_step(s);
    EXPECT_OK(tn_ledger_check(s->f.t.pool));
}

static int run_with_fault(const void *argument, fault_point *fault) {
    const call *of = argument;
    subject s;
    begin(&s, of);
    int holds = holds_of(&s, 0);
    fault_begin(fault);
    tn_status status = of->run(&s);
    fault_end(fault);
    int has_failed = status != TN_OK;
    if (has_failed) {
        assert_true(tn__ring_is_valid(s.f.ring));
        if (of->run != run_destroy) assert_int_equal(holds_of(&s, 0), holds);
        EXPECT_OK(of->run(&s));
    }
    if (s.f.ring && of->run != run_close) assert_int_equal(holds_of(&s, 0), of->holds_after);
    expect_whole(&s, of);
    if (s.step.value) EXPECT_OK(tn_scope_close(s.step));
    ring_fixture_close(&s.f);
    return has_failed;
}

static void each(int is_host, int code) {
    for (int and_after = 0; and_after < 2; and_after++) {
        for (int i = 0; i < CALLS; i++) {
            fault_point fault = {.is_host = is_host, .and_after = and_after, .code = code};
            int failed = fault_each(fault, run_with_fault, &calls[i]);
            printf("%s, %s failing%s: %d times\n", calls[i].name, is_host ? "host" : "driver",
                   and_after ? " for good" : "", failed);
        }
    }
}

static void a_driver_that_fails_leaves_the_ring_whole(void **state) {
    (void)state;
    each(0, UNKNOWN_ERROR);
}

static void a_lack_of_host_memory_leaves_the_ring_whole(void **state) {
    (void)state;
    each(1, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_driver_that_fails_leaves_the_ring_whole),
        cmocka_unit_test(a_lack_of_host_memory_leaves_the_ring_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
