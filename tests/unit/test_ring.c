/* The ring: units come and go in its buffer, and what is refused changes nothing. */
#include "ring_fixture.h"

#include "tenure_pool.h"
#include "test_graphs.h"

enum { ROWS = 160 };

static const tn_scope NO_SCOPE = {0};

static void acquire(ring_fixture *f, int unit) {
    EXPECT_OK(tn_ring_acquire(f->ring, unit, NO_SCOPE, f->t.stream));
}

static int open_ring(void **state) {
    static ring_fixture f;
    ring_fixture_open(&f, 0);
    *state = &f;
    return 0;
}

static int close_ring(void **state) {
    ring_fixture_close(*state);
    return 0;
}

/* A test whose state is a fixture with nothing in it yet. */
#define WITH_RING(test) cmocka_unit_test_setup_teardown(test, open_ring, close_ring)

/* ---- what is where ------------------------------------------------------------------------- */

static void weights_have_planes_while_they_are_acquired(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 3, ROWS);
    size_t owned = fixture_owned_bytes(&f->t);
    for (int unit = 0; unit < 3; unit++) {
        ring_fixture_expect_gone(f, unit);
        acquire(f, unit);
        assert_int_equal(ring_fixture_state(f, unit), TN_RING_IN_USE);
        ring_fixture_expect_there(f, unit, f->t.other);
        assert_int_equal(fixture_ledger(f->t.scope).foreign_bytes, f->units[unit].bytes);
        EXPECT_OK(tn_plane_require(f->units[unit].weights[1], TN_PLANE_COL, f->t.stream));
        EXPECT_OK(tn_ring_release(f->ring, unit));
        ring_fixture_expect_gone(f, unit);
        assert_int_equal(fixture_owned_bytes(&f->t), owned); /* COL, too */
        assert_int_equal(fixture_ledger(f->t.scope).foreign_bytes, 0);
        assert_int_equal(ring_fixture_state(f, unit), TN_RING_EMPTY);
    }
    assert_int_equal(f->gathers, 3);
}

static void the_ledger_has_the_buffer_once(void **state) {
    ring_fixture *f = *state;
    f->config.name = "gathered";
    for (int unit = 0; unit < 3; unit++)
        ring_fixture_add(f, ROWS, 1);
    ring_fixture_make(f);
    size_t before = fixture_ledger(f->t.scope).total_bytes;
    EXPECT_OK(tn_ring_seal(f->ring));
    size_t bytes = 2 * ring_fixture_unit_bytes(f, 0); /* two slots if nothing is said */
    assert_int_equal(fixture_ledger(f->t.scope).total_bytes - before, bytes);
    assert_int_equal(ring_fixture_stats(f).buffer_bytes, bytes);
    acquire(f, 0);
    EXPECT_OK(tn_ring_prefetch(f->ring, 1));
    assert_int_equal(fixture_ledger(f->t.scope).total_bytes - before, bytes);
    assert_int_equal(ring_fixture_stats(f).live_bytes, bytes);
    EXPECT_OK(tn_ring_destroy(f->ring));
    f->ring = NULL;
    assert_int_equal(fixture_ledger(f->t.scope).total_bytes, before);
    assert_int_equal(fixture_ledger(f->t.scope).foreign_bytes, 0);
}

static void acquires_of_one_unit_share_its_gather(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 2, ROWS);
    EXPECT_OK(tn_ring_prefetch(f->ring, 0));
    EXPECT_OK(tn_ring_prefetch(f->ring, 0));
    ring_fixture_expect_gone(f, 0);
    acquire(f, 0);
    EXPECT_OK(tn_ring_acquire(f->ring, 0, NO_SCOPE, f->t.other));
    assert_int_equal(f->gathers, 1);
    assert_int_equal(ring_fixture_stats(f).found, 2);
    EXPECT_OK(tn_ring_release(f->ring, 0));
    ring_fixture_expect_there(f, 0, f->t.stream);
    EXPECT_OK(tn_ring_release(f->ring, 0));
    ring_fixture_expect_gone(f, 0);
    EXPECT_STATUS(tn_ring_release(f->ring, 0), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("unit 0 is not acquired");
}

static void units_without_bytes_take_no_slot(void **state) {
    ring_fixture *f = *state;
    f->config.slots = 1;
    ring_fixture_add(f, 0, 1);
    ring_fixture_add(f, ROWS, 2);
    ring_fixture_add(f, 0, 3);
    ring_fixture_make(f);
    EXPECT_OK(tn_ring_seal(f->ring));
    for (int round = 0; round < 2; round++) {
        for (int unit = 0; unit < 3; unit++)
            acquire(f, unit);
        ring_fixture_expect_there(f, 1, f->t.stream);
        for (int unit = 0; unit < 3; unit++)
            EXPECT_OK(tn_ring_release(f->ring, unit));
    }
    assert_int_equal(f->gathers, 2);
    assert_int_equal(ring_fixture_stats(f).buffer_bytes, ring_fixture_unit_bytes(f, 1));
}

/* ---- a full ring --------------------------------------------------------------------------- */

static void a_prefetch_waits_for_room_in_device_order(void **state) {
    ring_fixture *f = *state;
    f->config.slots = 1;
    ring_fixture_start(f, 3, ROWS);
    acquire(f, 0);
    EXPECT_OK(tn_ring_prefetch(f->ring, 2));
    EXPECT_OK(tn_ring_prefetch(f->ring, 1));
    EXPECT_OK(tn_ring_prefetch(f->ring, 2));
    assert_int_equal(f->gathers, 1);
    assert_int_equal(ring_fixture_stats(f).deferred, 2);
    EXPECT_OK(tn_ring_release(f->ring, 0));
    assert_int_equal(f->gathers, 2); /* the first to ask; the other one waits on */
    assert_int_equal(ring_fixture_state(f, 2), TN_RING_READY);
    acquire(f, 2);
    ring_fixture_expect_there(f, 2, f->t.stream);
    EXPECT_OK(tn_ring_release(f->ring, 2));
    assert_int_equal(ring_fixture_state(f, 1), TN_RING_READY);
}

static void a_prefetch_may_fail_instead(void **state) {
    ring_fixture *f = *state;
    f->config.slots = 1;
    f->config.full = TN_RING_FULL_FAIL;
    ring_fixture_start(f, 2, ROWS);
    acquire(f, 0);
    EXPECT_STATUS(tn_ring_prefetch(f->ring, 1), TN_IN_USE);
    EXPECT_ERROR_HAS("no room for unit 1");
    EXPECT_OK(tn_ring_release(f->ring, 0));
    assert_int_equal(f->gathers, 1);
}

static void an_acquire_that_finds_no_room_says_who_holds_it(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 3, ROWS);
    acquire(f, 0);
    acquire(f, 1);
    tn_ring_stats before = ring_fixture_stats(f);
    EXPECT_STATUS(tn_ring_acquire(f->ring, 2, NO_SCOPE, f->t.stream), TN_IN_USE);
    EXPECT_ERROR_HAS("unit 1 has");
    tn_ring_stats after = ring_fixture_stats(f);
    assert_memory_equal(&before, &after, sizeof before);
    ring_fixture_expect_there(f, 0, f->t.stream);
    ring_fixture_expect_there(f, 1, f->t.stream);
}

static void a_wrong_prefetch_makes_no_acquire_fail(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 4, ROWS);
    EXPECT_OK(tn_ring_prefetch(f->ring, 0));
    EXPECT_OK(tn_ring_prefetch(f->ring, 1));
    acquire(f, 2);
    assert_int_equal(ring_fixture_state(f, 0), TN_RING_EMPTY); /* the oldest */
    assert_int_equal(ring_fixture_state(f, 1), TN_RING_READY);
    acquire(f, 3);
    assert_int_equal(ring_fixture_stats(f).displaced, 2);
    ring_fixture_expect_there(f, 2, f->t.stream);
    ring_fixture_expect_there(f, 3, f->t.stream);
}

/* ---- leases -------------------------------------------------------------------------------- */

static void a_leased_plane_is_not_released(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 2, ROWS);
    acquire(f, 0);
    tn_lease lease = fixture_lease(f->units[0].weights[1], TN_PLANE_ROW, TN_READ, f->t.other);
    EXPECT_STATUS(tn_ring_release(f->ring, 0), TN_IN_USE);
    EXPECT_STATUS(tn_ring_destroy(f->ring), TN_IN_USE);
    ring_fixture_expect_there(f, 0, f->t.stream);
    assert_int_equal(ring_fixture_state(f, 0), TN_RING_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_ring_release(f->ring, 0));
    ring_fixture_expect_gone(f, 0);
    tn_plane_view view;
    EXPECT_STATUS(
        tn_lease_begin(f->units[0].weights[1], TN_PLANE_ROW, TN_READ, f->t.stream, &lease, &view),
        TN_INVALID_STATE);
}

static void gathered_weights_are_only_read(void **state) {
    ring_fixture *f = *state;
    tn_lease lease;
    tn_plane_view view;
    ring_fixture_start(f, 1, ROWS);
    acquire(f, 0);
    EXPECT_STATUS(
        tn_lease_begin(f->units[0].weights[0], TN_PLANE_DATA, TN_WRITE, f->t.stream, &lease, &view),
        TN_INVALID_STATE);
}

static void a_saved_plane_keeps_its_place(void **state) {
    ring_fixture *f = *state;
    tn_tensor saved;
    f->config.slots = 1;
    ring_fixture_start(f, 2, ROWS);
    acquire(f, 0);
    EXPECT_OK(tn_tensor_save(f->units[0].weights[1], TN_PLANE_BIT(TN_PLANE_ROW), f->t.scope,
                             f->t.stream, &saved));
    EXPECT_OK(tn_ring_release(f->ring, 0));
    assert_int_equal(ring_fixture_state(f, 0), TN_RING_DRAINING);
    EXPECT_STATUS(tn_ring_acquire(f->ring, 1, NO_SCOPE, f->t.stream), TN_IN_USE);
    EXPECT_STATUS(tn_ring_acquire(f->ring, 0, NO_SCOPE, f->t.stream), TN_IN_USE);
    EXPECT_STATUS(tn_ring_destroy(f->ring), TN_IN_USE);
    EXPECT_OK(tn_tensor_destroy(saved, f->t.other));
    acquire(f, 1);
    ring_fixture_expect_there(f, 1, f->t.stream);
}

/* ---- shards -------------------------------------------------------------------------------- */

static void what_was_gathered_before_a_write_is_gathered_again(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 2, ROWS);
    EXPECT_OK(tn_ring_prefetch(f->ring, 0));
    ring_fixture_write_shard(f, 0, 77);
    acquire(f, 0);
    ring_fixture_expect_there(f, 0, f->t.stream);
    assert_int_equal(ring_fixture_stats(f).regathers, 1);
    EXPECT_OK(tn_ring_release(f->ring, 0));
    ring_fixture_write_shard(f, 0, 78);
    acquire(f, 0);
    ring_fixture_expect_there(f, 0, f->t.stream);
    assert_int_equal(ring_fixture_stats(f).regathers, 1); /* it was not there */
}

static void a_shard_is_not_written_while_its_unit_is_acquired(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 1, ROWS);
    acquire(f, 0);
    EXPECT_STATUS(tn_plane_fill(f->units[0].shard, TN_PLANE_DATA, 9, f->t.stream), TN_IN_USE);
    ring_fixture_expect_there(f, 0, f->t.stream);
    EXPECT_OK(tn_ring_release(f->ring, 0));
    ring_fixture_write_shard(f, 0, 9);
}

/* ---- scopes -------------------------------------------------------------------------------- */

static tn_scope step_scope(const ring_fixture *f) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = f->t.scope;
    config.kind = TN_SCOPE_STEP;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static void a_scope_that_closes_releases_what_it_acquired(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 2, ROWS);
    tn_scope step = step_scope(f);
    EXPECT_OK(tn_ring_acquire(f->ring, 0, step, f->t.stream));
    EXPECT_OK(tn_ring_acquire(f->ring, 1, step, f->t.stream));
    EXPECT_OK(tn_ring_acquire(f->ring, 1, NO_SCOPE, f->t.stream));
    EXPECT_OK(tn_ring_release(f->ring, 1)); /* the one without a scope, which is newer */
    EXPECT_OK(tn_scope_close(step));
    ring_fixture_expect_gone(f, 0);
    ring_fixture_expect_gone(f, 1);
    assert_int_equal(ring_fixture_stats(f).abandoned, 2);
    EXPECT_STATUS(tn_ring_release(f->ring, 0), TN_INVALID_STATE);
}

static void what_is_leased_then_is_released_by_the_next_call(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 2, ROWS);
    tn_scope step = step_scope(f);
    EXPECT_OK(tn_ring_acquire(f->ring, 0, step, f->t.stream));
    tn_lease lease = fixture_lease(f->units[0].weights[0], TN_PLANE_DATA, TN_READ, f->t.other);
    EXPECT_OK(tn_scope_close(step));
    ring_fixture_expect_there(f, 0, f->t.stream);
    EXPECT_STATUS(tn_ring_release(f->ring, 0), TN_INVALID_STATE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_ring_prefetch(f->ring, 1));
    ring_fixture_expect_gone(f, 0);
}

static void a_released_hold_leaves_its_scope(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 1, ROWS);
    tn_scope step = step_scope(f);
    uint64_t tensors = fixture_ledger(step).tensors;
    for (int round = 0; round < 3; round++) {
        EXPECT_OK(tn_ring_acquire(f->ring, 0, step, f->t.stream));
        EXPECT_OK(tn_ring_release(f->ring, 0));
        assert_int_equal(fixture_ledger(step).tensors, tensors);
    }
    EXPECT_OK(tn_scope_close(step));
    assert_int_equal(ring_fixture_stats(f).abandoned, 0);
}

static void weights_that_end_first_leave_the_ring_whole(void **state) {
    ring_fixture *f = *state;
    ring_fixture_start(f, 2, ROWS);
    acquire(f, 0);
    for (int i = 0; i < RING_WEIGHTS; i++)
        EXPECT_OK(tn_tensor_destroy(f->units[0].weights[i], f->t.stream));
    EXPECT_OK(tn_ring_release(f->ring, 0));
    EXPECT_STATUS(tn_ring_acquire(f->ring, 0, NO_SCOPE, f->t.stream), TN_STALE_HANDLE);
    acquire(f, 1);
    ring_fixture_expect_there(f, 1, f->t.stream);
}

/* ---- failures ------------------------------------------------------------------------------ */

/* All ranks gather in one order: what one of them fails to start comes before all else. */
static void a_wanted_unit_that_fails_to_start_comes_first(void **state) {
    ring_fixture *f = *state;
    f->config.slots = 1;
    ring_fixture_start(f, 3, ROWS);
    acquire(f, 0);
    EXPECT_OK(tn_ring_prefetch(f->ring, 2));
    f->gather_fault = 1;
    EXPECT_OK(tn_ring_release(f->ring, 0)); /* it is released, whatever else */
    const int before = f->gathers;
    f->gather_fault = 1;
    EXPECT_STATUS(tn_ring_acquire(f->ring, 1, (tn_scope){0}, f->t.stream), TN_COMM_ERROR);
    f->gather_fault = 1;
    EXPECT_STATUS(tn_ring_prefetch(f->ring, 1), TN_COMM_ERROR);
    assert_int_equal(f->gathers, before); /* each time it was unit 2's that failed */
    EXPECT_OK(tn_ring_prefetch(f->ring, 1));
    assert_int_equal(f->gathers, before + 1);
    acquire(f, 2);
    assert_int_equal(f->gathers, before + 1); /* it was there */
    ring_fixture_expect_there(f, 2, f->t.stream);
}

static void a_gather_that_fails_may_be_started_again(void **state) {
    ring_fixture *f = *state;
    f->config.slots = 1;
    ring_fixture_start(f, 2, ROWS);
    f->gather_fault = 1;
    EXPECT_STATUS(tn_ring_prefetch(f->ring, 0), TN_COMM_ERROR);
    assert_int_equal(ring_fixture_state(f, 0), TN_RING_EMPTY);
    f->gather_fault = 1;
    EXPECT_STATUS(tn_ring_acquire(f->ring, 0, NO_SCOPE, f->t.stream), TN_COMM_ERROR);
    ring_fixture_expect_gone(f, 0);
    assert_int_equal(ring_fixture_stats(f).live_bytes, 0);
    acquire(f, 0);
    EXPECT_OK(tn_ring_prefetch(f->ring, 1));
    f->gather_fault = 1;
    EXPECT_OK(tn_ring_release(f->ring, 0)); /* which would have started it */
    assert_int_equal(ring_fixture_state(f, 1), TN_RING_EMPTY);
    acquire(f, 1);
    ring_fixture_expect_there(f, 1, f->t.stream);
}

static void what_makes_no_sense_is_refused(void **state) {
    ring_fixture *f = *state;
    tn_ring *ring = NULL;
    EXPECT_STATUS(tn_ring_create(NULL, &ring), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_ring_create(&f->config, &ring), TN_INVALID_ARGUMENT);
    f->config.slots = TN_RING_SLOTS_MAX + 1;
    EXPECT_STATUS(tn__ring_create(&f->config, &ring), TN_INVALID_ARGUMENT);
    f->config.slots = 0;
    ring_fixture_add(f, ROWS, 1);
    ring_fixture_make(f);
    EXPECT_STATUS(tn_ring_prefetch(f->ring, 0), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tn_ring_seal first");
    EXPECT_OK(tn_ring_seal(f->ring));
    EXPECT_STATUS(tn_ring_seal(f->ring), TN_INVALID_STATE);
    EXPECT_STATUS(tn_ring_prefetch(f->ring, 1), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_ring_acquire(f->ring, -1, NO_SCOPE, f->t.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_ring_release(f->ring, 7), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_ring_acquire(NULL, 0, NO_SCOPE, NULL), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_ring_destroy(NULL));
}

/* On the acquirer's stream or the ring's own: neither is harmed, and the step goes on outside. */
static void calls_in_a_capture_are_refused(void **state) {
    (void)state;
    for (int is_own = 0; is_own < 2; is_own++) {
        ring_fixture f;
        ring_fixture_open(&f, 1);
        if (is_own) f.config.stream = f.t.other;
        ring_fixture_start(&f, 3, ROWS);
        const tn_stream stream = is_own ? f.t.other : f.t.stream;
        acquire(&f, 0);
        const tn_ring_stats before = ring_fixture_stats(&f);
        test_capture_begin(f.t.device, stream, TEST_CAPTURE_GLOBAL);
        EXPECT_STATUS(tn_ring_acquire(f.ring, 1, NO_SCOPE, stream), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS("tn_ring_acquire: ring ring: the stream captures a graph");
        EXPECT_STATUS(tn_ring_release(f.ring, 0), TN_UNSUPPORTED);
        if (is_own) EXPECT_STATUS(tn_ring_prefetch(f.ring, 1), TN_UNSUPPORTED);
        const tn_ring_stats after = ring_fixture_stats(&f);
        assert_memory_equal(&before, &after, sizeof before);
        assert_int_equal(test_is_capturing(f.t.device, stream), 1);
        test_graph graph = test_capture_end(f.t.device, stream);
        test_graph_destroy(f.t.device, &graph);
        ring_fixture_expect_there(&f, 0, f.t.stream);
        EXPECT_OK(tn_ring_release(f.ring, 0));
        acquire(&f, 1);
        EXPECT_OK(tn_ring_release(f.ring, 1));
        ring_fixture_close(&f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_RING(weights_have_planes_while_they_are_acquired),
        WITH_RING(the_ledger_has_the_buffer_once),
        WITH_RING(acquires_of_one_unit_share_its_gather),
        WITH_RING(units_without_bytes_take_no_slot),
        WITH_RING(a_prefetch_waits_for_room_in_device_order),
        WITH_RING(a_prefetch_may_fail_instead),
        WITH_RING(an_acquire_that_finds_no_room_says_who_holds_it),
        WITH_RING(a_wrong_prefetch_makes_no_acquire_fail),
        WITH_RING(a_leased_plane_is_not_released),
        WITH_RING(gathered_weights_are_only_read),
        WITH_RING(a_saved_plane_keeps_its_place),
        WITH_RING(what_was_gathered_before_a_write_is_gathered_again),
        WITH_RING(a_shard_is_not_written_while_its_unit_is_acquired),
        WITH_RING(a_scope_that_closes_releases_what_it_acquired),
        WITH_RING(what_is_leased_then_is_released_by_the_next_call),
        WITH_RING(a_released_hold_leaves_its_scope),
        WITH_RING(weights_that_end_first_leave_the_ring_whole),
        WITH_RING(a_wanted_unit_that_fails_to_start_comes_first),
        WITH_RING(a_gather_that_fails_may_be_started_again),
        cmocka_unit_test(calls_in_a_capture_are_refused),
        WITH_RING(what_makes_no_sense_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
