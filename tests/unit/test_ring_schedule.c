/* Schedules of a ring: what they need, proven before the first step; where gathers lie; and steps
 * of all the orders that training has, which take no memory once the ring is sealed.
 */
#include "ring_fixture.h"

#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 128, OPS_MAX = 512 };

static const tn_scope NO_SCOPE = {0};

/* ---- lists of operations --------------------------------------------------------------------- */

typedef struct op_list {
    tn_ring_op ops[OPS_MAX];
    int count;
} op_list;

static void add(op_list *list, tn_ring_op_kind kind, int unit) {
    assert_true(list->count < OPS_MAX);
    list->ops[list->count++] = (tn_ring_op){kind, unit};
}

/* The next unit is on its way while this one is used. */
static void add_use(op_list *list, int unit, int next, int is_kept) {
    add(list, TN_RING_ACQUIRE, unit);
    if (next >= 0) add(list, TN_RING_PREFETCH, next);
    if (!is_kept) add(list, TN_RING_RELEASE, unit);
}

static void add_forward(op_list *list, int units, int is_kept) {
    for (int i = 0; i < units; i++)
        add_use(list, i, i + 1 < units ? i + 1 : -1, is_kept);
}

static void add_backward(op_list *list, int units) {
    for (int i = units - 1; i >= 0; i--)
        add_use(list, i, i - 1, 0);
}

/* Units stay from forward to backward: acquired once. */
static void add_backward_of_kept(op_list *list, int units) {
    for (int i = units - 1; i >= 0; i--)
        add(list, TN_RING_RELEASE, i);
}

static tn_status call(ring_fixture *f, tn_ring_op op) {
    switch (op.kind) {
    case TN_RING_PREFETCH: return tn_ring_prefetch(f->ring, op.unit);
    case TN_RING_ACQUIRE: return tn_ring_acquire(f->ring, op.unit, NO_SCOPE, f->t.stream);
    case TN_RING_RELEASE: return tn_ring_release(f->ring, op.unit);
    }
    return TN_INVALID_ARGUMENT;
}

/* Weights are read while they are there, and COL derived from one of them. */
static void run_step(ring_fixture *f, const op_list *list) {
    for (int i = 0; i < list->count; i++) {
        EXPECT_OK(call(f, list->ops[i]));
        if (list->ops[i].kind != TN_RING_ACQUIRE) continue;
        const ring_unit *unit = &f->units[list->ops[i].unit];
        EXPECT_OK(tn_plane_require(unit->weights[1], TN_PLANE_COL, f->t.stream));
        ring_fixture_expect_there(f, list->ops[i].unit, i % 2 ? f->t.stream : f->t.other);
    }
}

/* ---- placement ------------------------------------------------------------------------------- */

static void expect_apart(const tn__ring_stay *stays, int count, size_t buffer_bytes) {
    for (int i = 0; i < count; i++) {
        assert_true(stays[i].offset + stays[i].bytes <= buffer_bytes);
        for (int j = 0; j < i; j++) {
            const tn__ring_stay *a = &stays[i], *b = &stays[j];
            int meet_in_time = a->first <= b->last && b->first <= a->last;
            int meet = a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes;
            assert_false(meet_in_time && meet);
        }
    }
}

/* The most that is there at one time, counted op by op. */
static size_t most_at_once(const tn__ring_stay *stays, int count, int *units) {
    size_t most = 0;
    *units = 0;
    for (int at = 0; at < OPS_MAX; at++) {
        size_t bytes = 0;
        int here = 0;
        for (int i = 0; i < count; i++) {
            if (stays[i].first > at || stays[i].last < at) continue;
            bytes += stays[i].bytes;
            here++;
        }
        if (bytes > most) most = bytes;
        if (here > *units) *units = here;
    }
    return most;
}

/* Stays begin at different ops. */
static int random_stays(unsigned *seed, tn__ring_stay *stays, int sizes) {
    int count = 1 + rand_r(seed) % 40, at = 0;
    for (int i = 0; i < count; i++) {
        at += 1 + rand_r(seed) % 4;
        stays[i] = (tn__ring_stay){.first = at, .last = at + rand_r(seed) % 12, .unit = i};
        stays[i].bytes = (size_t)(1 + rand_r(seed) % sizes) * TN__RING_ALIGNMENT;
    }
    return count;
}

static void placements_keep_their_bounds(void **state) {
    (void)state;
    for (unsigned seed = 1; seed <= 3000; seed++) {
        tn__ring_stay stays[40];
        tn__ring_placed placed;
        unsigned random = seed;
        int sizes = seed % 3 == 0 ? 1 : 9, units = 0;
        int count = random_stays(&random, stays, sizes);
        EXPECT_OK(tn__ring_place(stays, count, &placed));
        expect_apart(stays, count, placed.buffer_bytes);
        int is_exact = placed.peak_bytes == most_at_once(stays, count, &units);
        int is_bounded = placed.buffer_bytes >= placed.peak_bytes &&
                         placed.buffer_bytes <= placed.largest_bytes * (size_t)units;
        int is_least = sizes > 1 || placed.buffer_bytes == placed.peak_bytes;
        if (is_exact && is_bounded && is_least && placed.units_at_once == units) continue;
        printf("seed %u: peak %zu, buffer %zu, %d units\n", seed, placed.peak_bytes,
               placed.buffer_bytes, placed.units_at_once);
        fail();
    }
}

static void nothing_needs_nothing(void **state) {
    tn__ring_placed placed = {1, 1, 1, 1};
    (void)state;
    EXPECT_OK(tn__ring_place(NULL, 0, &placed));
    assert_int_equal(placed.buffer_bytes, 0);
    assert_int_equal(placed.units_at_once, 0);
}

static void sizes_that_overflow_are_refused(void **state) {
    tn__ring_stay stays[2] = {{0, 1, 0, SIZE_MAX / 3, 0}, {0, 1, 1, SIZE_MAX / 3, 0}};
    tn__ring_placed placed;
    (void)state;
    EXPECT_STATUS(tn__ring_place(stays, 2, &placed), TN_INVALID_ARGUMENT);
}

/* ---- closed forms ---------------------------------------------------------------------------- */

static tn_ring_demand demand_of(ring_fixture *f, const op_list *list) {
    tn_ring_demand demand = TN_RING_DEMAND_INIT;
    EXPECT_OK(tn_ring_schedule_check(f->ring, list->ops, list->count, &demand));
    return demand;
}

static void equal_units_need_two_at_a_time(void **state) {
    ring_fixture f;
    op_list list = {.count = 0};
    (void)state;
    ring_fixture_open(&f, 0);
    for (int i = 0; i < 8; i++)
        ring_fixture_add(&f, ROWS, 1);
    ring_fixture_make(&f);
    add_forward(&list, 8, 0);
    add_backward(&list, 8);
    tn_ring_demand demand = demand_of(&f, &list);
    size_t unit = ring_fixture_unit_bytes(&f, 0);
    assert_int_equal(demand.peak_bytes, 2 * unit);
    assert_int_equal(demand.buffer_bytes, 2 * unit);
    assert_int_equal(demand.slots_bytes, 2 * unit);
    assert_int_equal(demand.units_at_once, 2);
    assert_int_equal(demand.gathers, 16);
    list.count = 0;
    add_forward(&list, 8, 1);
    add_backward_of_kept(&list, 8);
    demand = demand_of(&f, &list);
    assert_int_equal(demand.buffer_bytes, 8 * unit);
    assert_int_equal(demand.gathers, 8);
    ring_fixture_close(&f);
}

/* An embedding and a head of nine layers' size, and an even and an odd count of layers: what is
 * there at one time is one of them and a layer, and so is the buffer. */
static void large_units_do_not_multiply(void **state) {
    (void)state;
    for (int layers = 5; layers <= 6; layers++) {
        ring_fixture f;
        op_list list = {.count = 0};
        ring_fixture_open(&f, 0);
        ring_fixture_add(&f, 9 * ROWS, 1);
        for (int i = 0; i < layers; i++)
            ring_fixture_add(&f, ROWS, 2);
        ring_fixture_add(&f, 9 * ROWS, 3);
        ring_fixture_make(&f);
        add_forward(&list, layers + 2, 0);
        add_backward(&list, layers + 2);
        tn_ring_demand demand = demand_of(&f, &list);
        size_t large = ring_fixture_unit_bytes(&f, 0), layer = ring_fixture_unit_bytes(&f, 1);
        assert_int_equal(demand.peak_bytes, large + layer);
        assert_int_equal(demand.buffer_bytes, large + layer);
        assert_int_equal(demand.slots_bytes, 2 * large);
        EXPECT_OK(tn_ring_schedule_set(f.ring, list.ops, list.count));
        EXPECT_OK(tn_ring_seal(f.ring));
        assert_int_equal(ring_fixture_stats(&f).buffer_bytes, large + layer);
        for (int round = 0; round < 3; round++)
            run_step(&f, &list);
        tn_ring_stats stats = ring_fixture_stats(&f);
        assert_int_equal(stats.peak_live_bytes, large + layer);
        assert_int_equal(stats.strays, 0);
        assert_int_equal(stats.gathers, 3 * demand.gathers);
        ring_fixture_close(&f);
    }
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void a_schedule_that_does_not_fit_is_refused_with_the_numbers(void **state) {
    ring_fixture f;
    op_list list = {.count = 0};
    char words[64];
    (void)state;
    ring_fixture_open(&f, 0);
    ring_fixture_add(&f, ROWS, 1);
    ring_fixture_add(&f, 3 * ROWS, 1);
    f.config.budget_bytes = 400000;
    ring_fixture_make(&f);
    size_t both = ring_fixture_unit_bytes(&f, 0) + ring_fixture_unit_bytes(&f, 1);
    EXPECT_OK(tn_ring_destroy(f.ring));
    f.config.budget_bytes = both - 1;
    ring_fixture_make(&f);
    add_forward(&list, 2, 0);
    EXPECT_STATUS(tn_ring_schedule_set(f.ring, list.ops, list.count), TN_OUT_OF_DEVICE_MEMORY);
    (void)snprintf(words, sizeof words, "needs %zu bytes and %zu are allowed", both, both - 1);
    EXPECT_ERROR_HAS(words);
    EXPECT_ERROR_HAS("op 1 (prefetch unit 1)");
    EXPECT_OK(tn_ring_seal(f.ring)); /* one slot, as the budget has it */
    assert_int_equal(ring_fixture_stats(&f).slots, 1);
    ring_fixture_close(&f);
}

static void a_schedule_that_makes_no_sense_is_refused(void **state) {
    ring_fixture f;
    const tn_ring_op early[] = {{TN_RING_PREFETCH, 0}, {TN_RING_RELEASE, 0}};
    const tn_ring_op open[] = {{TN_RING_ACQUIRE, 1}};
    const tn_ring_op other[] = {{TN_RING_ACQUIRE, 2}, {TN_RING_RELEASE, 2}};
    const tn_ring_op kind[] = {{(tn_ring_op_kind)3, 0}};
    (void)state;
    ring_fixture_open(&f, 0);
    ring_fixture_add(&f, ROWS, 1);
    ring_fixture_add(&f, ROWS, 1);
    ring_fixture_make(&f);
    EXPECT_STATUS(tn_ring_schedule_set(f.ring, early, 2), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("op 1 of the schedule releases unit 0");
    EXPECT_STATUS(tn_ring_schedule_set(f.ring, open, 1), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("unit 1 is still gathered");
    EXPECT_STATUS(tn_ring_schedule_set(f.ring, other, 2), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_ring_schedule_set(f.ring, kind, 1), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_ring_schedule_set(f.ring, NULL, 1), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_ring_schedule_set(f.ring, other, 0), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_ring_seal(f.ring));
    EXPECT_STATUS(tn_ring_schedule_set(f.ring, early, 0), TN_INVALID_ARGUMENT);
    ring_fixture_close(&f);
}

static void a_unit_that_does_not_fit_is_refused(void **state) {
    ring_fixture f;
    (void)state;
    ring_fixture_open(&f, 0);
    ring_fixture_add(&f, ROWS, 1);
    f.config.budget_bytes = 1000;
    ring_fixture_make(&f);
    EXPECT_STATUS(tn_ring_seal(f.ring), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("1000 are allowed: 1 slots, the largest of 1 units is unit 0");
    assert_int_equal(ring_fixture_stats(&f).buffer_bytes, 0);
    ring_fixture_close(&f);
}

/* Of eight slots of 2^61 bytes each 2^64 are nothing. */
static void a_buffer_that_overflows_is_refused(void **state) {
    const tn__ring_source huge = {.bytes = (size_t)1 << 61};
    ring_fixture f;
    int unit;
    (void)state;
    ring_fixture_open(&f, 0);
    f.config.slots = 8;
    ring_fixture_make(&f);
    for (int i = 0; i < 8; i++)
        EXPECT_OK(tn__ring_unit_add(f.ring, "huge", &huge, (tn_tensor){0}, NULL, 0, &unit));
    EXPECT_STATUS(tn_ring_seal(f.ring), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("8 slots");
    ring_fixture_close(&f);
}

/* ---- following ------------------------------------------------------------------------------- */

static void calls_off_the_schedule_are_served_and_counted(void **state) {
    ring_fixture f;
    op_list list = {.count = 0};
    (void)state;
    ring_fixture_open(&f, 0);
    for (int i = 0; i < 4; i++)
        ring_fixture_add(&f, ROWS, (unsigned char)(i + 1));
    ring_fixture_make(&f);
    add_forward(&list, 4, 0);
    EXPECT_OK(tn_ring_schedule_set(f.ring, list.ops, list.count));
    EXPECT_OK(tn_ring_seal(f.ring));
    run_step(&f, &list);
    assert_int_equal(ring_fixture_stats(&f).strays, 0);
    EXPECT_OK(tn_ring_acquire(f.ring, 2, NO_SCOPE, f.t.stream));
    EXPECT_OK(tn_ring_acquire(f.ring, 1, NO_SCOPE, f.t.stream));
    EXPECT_STATUS(tn_ring_acquire(f.ring, 0, NO_SCOPE, f.t.stream), TN_IN_USE);
    ring_fixture_expect_there(&f, 2, f.t.stream);
    ring_fixture_expect_there(&f, 1, f.t.stream);
    EXPECT_OK(tn_ring_release(f.ring, 2));
    EXPECT_OK(tn_ring_release(f.ring, 1));
    assert_int_equal(ring_fixture_stats(&f).strays, 4);
    run_step(&f, &list);
    assert_int_equal(ring_fixture_stats(&f).strays, 4);
    ring_fixture_close(&f);
}

static void a_schedule_is_replaced_while_nothing_is_gathered(void **state) {
    ring_fixture f;
    op_list train = {.count = 0}, evaluate = {.count = 0}, keep = {.count = 0};
    (void)state;
    ring_fixture_open(&f, 0);
    for (int i = 0; i < 4; i++)
        ring_fixture_add(&f, ROWS, (unsigned char)(i + 1));
    ring_fixture_make(&f);
    add_forward(&evaluate, 4, 0);
    add_forward(&train, 4, 0);
    add_backward(&train, 4);
    add_forward(&keep, 4, 1);
    add_backward_of_kept(&keep, 4);
    EXPECT_OK(tn_ring_schedule_set(f.ring, train.ops, train.count));
    EXPECT_OK(tn_ring_seal(f.ring));
    run_step(&f, &train);
    EXPECT_OK(tn_ring_schedule_set(f.ring, evaluate.ops, evaluate.count));
    run_step(&f, &evaluate);
    EXPECT_OK(call(&f, evaluate.ops[0]));
    EXPECT_STATUS(tn_ring_schedule_set(f.ring, train.ops, train.count), TN_IN_USE);
    EXPECT_OK(tn_ring_release(f.ring, 0));
    EXPECT_STATUS(tn_ring_schedule_set(f.ring, keep.ops, keep.count), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_OK(tn_ring_schedule_set(f.ring, train.ops, train.count));
    run_step(&f, &train);
    ring_fixture_close(&f);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* For memory or events, or to wait on the host. */
static uint64_t calls_that_cost(const ring_fixture *f) {
    static const char *const waits[] = {"cuStreamSynchronize", "cuCtxSynchronize",
                                        "cuEventSynchronize"};
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    uint64_t calls = 0;
    EXPECT_OK(tn_device_driver_stats(f->t.device, &stats));
    for (int i = 0; i < TN_CALL_STREAM; i++)
        calls += stats.calls[i];
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++)
        calls += test_sim_get()->call_count(waits[i]);
    return calls + stats.calls[TN_CALL_EVENT] + stats.calls[TN_CALL_EVENT_QUERY];
}

static uint64_t pool_allocations(const ring_fixture *f) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_pool_stats_get(f->t.pool, &stats));
    return stats.allocs;
}

static void use(ring_fixture *f, int unit) {
    for (int i = 0; i < RING_WEIGHTS; i++) {
        tn_plane plane = i == 0 ? TN_PLANE_DATA : TN_PLANE_ROW;
        tn_stream stream = (unit + i) % 2 ? f->t.stream : f->t.other;
        tn_plane_view view;
        tn_lease lease;
        EXPECT_OK(tn_lease_begin(f->units[unit].weights[i], plane, TN_READ, stream, &lease, &view));
        fixture_touch(&f->t, &view, 0, stream);
        EXPECT_OK(tn_lease_end(lease));
    }
}

static void run_lean_step(ring_fixture *f, const op_list *list) {
    for (int i = 0; i < list->count; i++) {
        EXPECT_OK(call(f, list->ops[i]));
        if (list->ops[i].kind == TN_RING_ACQUIRE) use(f, list->ops[i].unit);
    }
}

/* From the second step on no memory is taken, from pool or driver, and the host waits for nothing;
 * at the end of each step every unit is at rest. Gathers are what the list says. */
static void expect_steady(const op_list *list, int is_scheduled, int slots, int gathers) {
    ring_fixture f;
    ring_fixture_open(&f, 1);
    f.config.slots = slots;
    for (int i = 0; i < 4; i++)
        ring_fixture_add(&f, ROWS, (unsigned char)(i + 1));
    ring_fixture_make(&f);
    if (is_scheduled) EXPECT_OK(tn_ring_schedule_set(f.ring, list->ops, list->count));
    EXPECT_OK(tn_ring_seal(f.ring));
    run_lean_step(&f, list);
    uint64_t calls = calls_that_cost(&f), blocks = pool_allocations(&f);
    for (int step = 2; step <= 5; step++) {
        run_lean_step(&f, list);
        assert_int_equal(calls_that_cost(&f), calls);
        assert_int_equal(pool_allocations(&f), blocks);
        assert_int_equal(ring_fixture_stats(&f).live_bytes, 0);
        assert_int_equal(ring_fixture_stats(&f).gathers, step * gathers);
        for (int i = 0; i < 4; i++)
            ring_fixture_expect_gone(&f, i);
    }
    assert_int_equal(test_sim_get()->race_count(), 0);
    assert_int_equal(ring_fixture_stats(&f).displaced, 0);
    ring_fixture_close(&f);
}

static void steps_take_no_memory_and_wait_for_nothing(void **state) {
    op_list list = {.count = 0};
    (void)state;
    add_forward(&list, 4, 0);
    add_backward(&list, 4);
    expect_steady(&list, 0, 2, 8);
    expect_steady(&list, 1, 0, 8);
    add_forward(&list, 4, 0); /* a second micro-batch */
    add_backward(&list, 4);
    expect_steady(&list, 1, 0, 16);
    list.count = 0; /* no resharding after forward */
    add_forward(&list, 4, 1);
    add_backward_of_kept(&list, 4);
    expect_steady(&list, 0, 4, 4);
    expect_steady(&list, 1, 0, 4);
}

/* Backward recomputes its unit: row planes are read twice under one acquire, or two that nest. */
static void a_recomputation_shares_the_units_gather(void **state) {
    op_list list = {.count = 0};
    (void)state;
    add_forward(&list, 4, 0);
    for (int i = 3; i >= 0; i--) {
        add(&list, TN_RING_ACQUIRE, i);
        add(&list, TN_RING_ACQUIRE, i);
        add(&list, TN_RING_RELEASE, i);
        if (i > 0) add(&list, TN_RING_PREFETCH, i - 1);
        add(&list, TN_RING_RELEASE, i);
    }
    expect_steady(&list, 1, 0, 8);
}

/* With one slot a prefetch can not run ahead, and everything else is as ever. */
static void one_slot_is_enough_without_prefetch(void **state) {
    op_list list = {.count = 0};
    (void)state;
    add_forward(&list, 4, 0);
    expect_steady(&list, 0, 1, 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(placements_keep_their_bounds),
        cmocka_unit_test(nothing_needs_nothing),
        cmocka_unit_test(sizes_that_overflow_are_refused),
        cmocka_unit_test(equal_units_need_two_at_a_time),
        cmocka_unit_test(large_units_do_not_multiply),
        cmocka_unit_test(a_schedule_that_does_not_fit_is_refused_with_the_numbers),
        cmocka_unit_test(a_schedule_that_makes_no_sense_is_refused),
        cmocka_unit_test(a_unit_that_does_not_fit_is_refused),
        cmocka_unit_test(a_buffer_that_overflows_is_refused),
        cmocka_unit_test(calls_off_the_schedule_are_served_and_counted),
        cmocka_unit_test(a_schedule_is_replaced_while_nothing_is_gathered),
        cmocka_unit_test(steps_take_no_memory_and_wait_for_nothing),
        cmocka_unit_test(a_recomputation_shares_the_units_gather),
        cmocka_unit_test(one_slot_is_enough_without_prefetch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
