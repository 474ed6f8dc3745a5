/* Steps on a ring in which a stream stands still, from each of their operations on: nothing is
 * reused too early, the host waits for nothing, and all of it comes to an end once the stream goes
 * on. And random schedules, followed and left, on the simulated device with its race detector.
 */
#include "ring_fixture.h"

#include <stdio.h>
#include <stdlib.h>

enum { UNITS = 4, OPS_MAX = 400, STEPS = 2, STREAMS_MAX = 8 };

static const tn_scope NO_SCOPE = {0};

typedef struct op_list {
    tn_ring_op ops[OPS_MAX];
    int count;
} op_list;

static void add(op_list *list, tn_ring_op_kind kind, int unit) {
    assert_true(list->count < OPS_MAX);
    list->ops[list->count++] = (tn_ring_op){kind, unit};
}

static void add_use(op_list *list, int unit, int next) {
    add(list, TN_RING_ACQUIRE, unit);
    if (next >= 0 && next < UNITS) add(list, TN_RING_PREFETCH, next);
    add(list, TN_RING_RELEASE, unit);
}

static tn_status call(ring_fixture *f, tn_ring_op op) {
    switch (op.kind) {
    case TN_RING_PREFETCH: return tn_ring_prefetch(f->ring, op.unit);
    case TN_RING_ACQUIRE: return tn_ring_acquire(f->ring, op.unit, NO_SCOPE, f->t.stream);
    case TN_RING_RELEASE: return tn_ring_release(f->ring, op.unit);
    }
    return TN_INVALID_ARGUMENT;
}

/* Both weights, on both streams. */
static void use(ring_fixture *f, int unit) {
    for (int i = 0; i < 2 * RING_WEIGHTS; i++) {
        tn_plane plane = i % 2 == 0 ? TN_PLANE_DATA : TN_PLANE_ROW;
        tn_stream stream = i < 2 ? f->t.stream : f->t.other;
        tn_plane_view view;
        tn_lease lease;
        EXPECT_OK(
            tn_lease_begin(f->units[unit].weights[i % 2], plane, TN_READ, stream, &lease, &view));
        fixture_touch(&f->t, &view, 0, stream);
        EXPECT_OK(tn_lease_end(lease));
    }
}

/* ---- stalls -------------------------------------------------------------------------------- */

/* Those of the program, that of communication, and the lanes. */
static int streams_of(const ring_fixture *f, tn_stream out[STREAMS_MAX]) {
    int count = 0;
    out[count++] = f->t.stream;
    out[count++] = f->t.other;
    out[count++] = f->ring->stream;
    for (int i = 0; i < f->ring->slot_count && count < STREAMS_MAX; i++)
        out[count++] = f->ring->slots[i].lane;
    return count;
}

static uint64_t host_waits(void) {
    const test_sim *sim = test_sim_get();
    return sim->call_count("cuStreamSynchronize") + sim->call_count("cuEventSynchronize") +
           sim->call_count("cuCtxSynchronize");
}

/* The optimizer writes every shard at the end of a step. */
static void run_steps(ring_fixture *f, const op_list *list, int at, tn_stream stalled) {
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < list->count; i++) {
            if (step * list->count + i == at) (void)test_sim_get()->stall(stalled, 1);
            EXPECT_OK(call(f, list->ops[i]));
            if (list->ops[i].kind == TN_RING_ACQUIRE) use(f, list->ops[i].unit);
        }
        for (int unit = 0; unit < UNITS; unit++)
            ring_fixture_write_shard(f, unit, 1);
    }
}

static int stall_once(const op_list *list, int slots, int at, int which) {
    ring_fixture f;
    tn_stream streams[STREAMS_MAX];
    ring_fixture_open(&f, 1);
    f.config.slots = slots;
    ring_fixture_start(&f, UNITS, 64);
    int count = streams_of(&f, streams);
    if (which < count) {
        uint64_t waits = host_waits();
        run_steps(&f, list, at, streams[which]);
        assert_int_equal(host_waits(), waits);
        assert_int_equal(test_sim_get()->race_count(), 0);
        (void)test_sim_get()->stall(streams[which], 0);
        EXPECT_OK(tn_device_synchronize(f.t.device));
    }
    ring_fixture_close(&f);
    return which < count;
}

static void a_stream_may_stand_still_at_any_point(void **state) {
    op_list list = {.count = 0};
    (void)state;
    for (int i = 0; i < UNITS; i++)
        add_use(&list, i, i + 1);
    for (int i = UNITS - 1; i >= 0; i--)
        add_use(&list, i, i - 1);
    for (int slots = 1; slots <= 3; slots++) {
        for (int which = 0; which < STREAMS_MAX; which++) {
            for (int at = 0; at < STEPS * list.count; at += 1 + slots / 2)
                if (!stall_once(&list, slots, at, which)) break;
        }
    }
}

/* ---- random schedules ------------------------------------------------------------------------ */

static unsigned pick(uint64_t *random, unsigned below) {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return (unsigned)((*random >> 20) % below);
}

/* Any order that makes sense: at the end all is released. */
static void random_schedule(uint64_t *random, op_list *list) {
    int holds[UNITS] = {0}, is_there[UNITS] = {0}, count = 10 + (int)pick(random, 60);
    list->count = 0;
    for (int i = 0; i < count; i++) {
        int unit = (int)pick(random, UNITS);
        tn_ring_op_kind kind = (tn_ring_op_kind)pick(random, 3);
        if (kind == TN_RING_RELEASE && holds[unit] == 0) kind = TN_RING_PREFETCH;
        holds[unit] += kind == TN_RING_ACQUIRE ? 1 : kind == TN_RING_RELEASE ? -1 : 0;
        is_there[unit] = kind == TN_RING_RELEASE ? holds[unit] > 0 : 1;
        add(list, kind, unit);
    }
    for (int unit = 0; unit < UNITS; unit++) {
        if (is_there[unit] && holds[unit] == 0) add(list, TN_RING_ACQUIRE, unit), holds[unit]++;
        for (; holds[unit] > 0; holds[unit]--)
            add(list, TN_RING_RELEASE, unit);
    }
}

/* What is there lies apart, in the buffer. */
static void expect_apart(const ring_fixture *f) {
    tn_ring_unit_info infos[UNITS];
    assert_true(tn__ring_is_valid(f->ring));
    for (int i = 0; i < UNITS; i++) {
        infos[i] = (tn_ring_unit_info)TN_RING_UNIT_INFO_INIT;
        EXPECT_OK(tn_ring_unit_info_get(f->ring, i, &infos[i]));
        if (infos[i].state == TN_RING_EMPTY) continue;
        assert_true(infos[i].offset + infos[i].bytes <= ring_fixture_stats(f).buffer_bytes);
        for (int j = 0; j < i; j++) {
            if (infos[j].state == TN_RING_EMPTY) continue;
            assert_true(infos[i].offset + infos[i].bytes <= infos[j].offset ||
                        infos[j].offset + infos[j].bytes <= infos[i].offset);
        }
    }
}

static int holds_of(const ring_fixture *f, int unit) {
    tn_ring_unit_info info = TN_RING_UNIT_INFO_INIT;
    EXPECT_OK(tn_ring_unit_info_get(f->ring, unit, &info));
    return info.holds;
}

static void follow(ring_fixture *f, const op_list *list) {
    uint64_t strays = ring_fixture_stats(f).strays, displaced = ring_fixture_stats(f).displaced;
    for (int i = 0; i < list->count; i++) {
        EXPECT_OK(call(f, list->ops[i])); /* never full */
        if (holds_of(f, list->ops[i].unit) > 0) use(f, list->ops[i].unit);
        expect_apart(f);
    }
    assert_int_equal(ring_fixture_stats(f).strays, strays);
    assert_int_equal(ring_fixture_stats(f).displaced, displaced);
    assert_int_equal(ring_fixture_stats(f).live_bytes, 0);
}

/* Anything at all. A full ring is full of what is held, and what is not held never keeps it so. */
static void stray(ring_fixture *f, uint64_t *random) {
    for (int i = 0; i < 30; i++) {
        tn_ring_op op = {(tn_ring_op_kind)pick(random, 3), (int)pick(random, UNITS)};
        int held = 0;
        for (int unit = 0; unit < UNITS; unit++)
            held += holds_of(f, unit) > 0;
        tn_status status = call(f, op);
        if (op.kind == TN_RING_ACQUIRE) assert_true(status == TN_OK || held > 0);
        if (op.kind == TN_RING_PREFETCH) EXPECT_OK(status);
        if (holds_of(f, op.unit) > 0) use(f, op.unit);
        expect_apart(f);
    }
    for (int unit = 0; unit < UNITS; unit++) {
        EXPECT_OK(tn_ring_prefetch(f->ring, unit));
        while (holds_of(f, unit) > 0)
            EXPECT_OK(tn_ring_release(f->ring, unit));
    }
    for (int unit = 0; unit < UNITS; unit++) { /* prefetches that waited have come meanwhile */
        EXPECT_OK(tn_ring_acquire(f->ring, unit, NO_SCOPE, f->t.other));
        EXPECT_OK(tn_ring_release(f->ring, unit));
    }
}

static void run_schedule(uint64_t seed) {
    uint64_t random = seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
    ring_fixture f;
    op_list list;
    ring_fixture_open(&f, 1);
    for (int i = 0; i < UNITS; i++)
        ring_fixture_add(&f, 1 + (int)pick(&random, 300), 1);
    ring_fixture_make(&f);
    random_schedule(&random, &list);
    EXPECT_OK(tn_ring_schedule_set(f.ring, list.ops, list.count));
    EXPECT_OK(tn_ring_seal(f.ring));
    for (int round = 0; round < 3; round++) {
        follow(&f, &list);
        follow(&f, &list);
        stray(&f, &random);
    }
    follow(&f, &list);
    assert_int_equal(test_sim_get()->race_count(), 0);
    ring_fixture_close(&f);
}

static uint64_t given_seed;

static void a_schedule_that_is_followed_never_finds_the_ring_full(void **state) {
    (void)state;
    for (uint64_t seed = given_seed ? given_seed : 1; seed <= (given_seed ? given_seed : 40);
         seed++) {
        print_message("seed %llu (replay: sim_test_ring_stalls %llu)\n", (unsigned long long)seed,
                      (unsigned long long)seed);
        run_schedule(seed);
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_may_stand_still_at_any_point),
        cmocka_unit_test(a_schedule_that_is_followed_never_finds_the_ring_full),
    };
    if (argc == 2) given_seed = strtoull(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
