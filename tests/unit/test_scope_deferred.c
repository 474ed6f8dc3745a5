/* Closing a scope in which planes are leased: what nobody leases is freed at once, the rest when
 * its last lease ends, and nothing new begins there.
 */
#include "tensor_fixture.h"

#include <pthread.h>

#include "handle_table.h"
#include "host_alloc.h"
#include "tenure_lifetime.h"

enum { PLANE_BYTES = 64 + 16, NTH_MAX = 24, CUDA_ERROR_UNKNOWN = 999 }; /* 8 x 8 in 2D */

static tn_scope scope_below(tn_scope parent, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = parent;
    config.kind = TN_SCOPE_STEP;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_tensor square_in(tn_scope scope) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = config.shape[1] = 8;
    config.name = "w";
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    return tensor;
}

static uint64_t leases_in(tn_scope scope) { return fixture_ledger(scope).leases; }

/* ---- what is freed when -------------------------------------------------------------------- */

static void without_leases_it_is_a_close(void **state) {
    const tensor_fixture *f = *state;
    tn_scope scope = scope_below(f->scope, "step"), below = scope_below(scope, "below");
    fixture_write_both(f, square_in(scope));
    fixture_write_both(f, square_in(below));
    assert_int_equal(fixture_owned_bytes(f), 4 * PLANE_BYTES);
    EXPECT_OK(tn_scope_close_deferred(scope));
    assert_int_equal(fixture_owned_bytes(f), 0);
    assert_int_equal(fixture_ledger(f->scope).tensors, 0);
    EXPECT_STATUS(tn_scope_close_deferred(scope), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_scope_close(below), TN_STALE_HANDLE);
    EXPECT_OK(tn_scope_close_deferred((tn_scope){0}));
    assert_int_equal(tn__handle_count(), 1); /* the fixture's scope */
}

static void a_leased_plane_is_freed_when_its_last_lease_ends(void **state) {
    const tensor_fixture *f = *state;
    tn_scope scope = scope_below(f->scope, "step");
    tn_tensor x = square_in(scope), y = square_in(scope);
    fixture_write_both(f, x);
    fixture_write_both(f, y);
    tn_lease first = fixture_lease(x, TN_PLANE_ROW, TN_READ, f->stream);
    tn_lease second = fixture_lease(x, TN_PLANE_ROW, TN_READ, f->other);
    EXPECT_OK(tn_scope_close_deferred(scope));
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES); /* x's ROW */
    assert_int_equal(fixture_ledger(f->scope).data_bytes[TN_PLANE_ROW], 64);
    assert_int_equal(fixture_ledger(f->scope).tensors, 1);
    assert_int_equal(leases_in(f->scope), 2);
    EXPECT_OK(tn_ledger_check(f->pool));
    EXPECT_STATUS(tn_scope_close(f->scope), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor w, plane ROW is under a READ lease");
    EXPECT_OK(tn_lease_end(second));
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    EXPECT_OK(tn_lease_end(first));
    assert_int_equal(fixture_owned_bytes(f), 0);
    assert_int_equal(fixture_ledger(f->scope).tensors, 0);
    EXPECT_STATUS(tn_lease_end(first), TN_STALE_HANDLE);
    EXPECT_OK(tn_ledger_check(f->pool));
}

static void nothing_begins_in_a_closing_scope(void **state) {
    const tensor_fixture *f = *state;
    tn_scope scope = scope_below(f->scope, "step"), below = scope_below(scope, "below"), made;
    tn_tensor x = square_in(below), free_one = square_in(f->scope), out;
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_plane_view view;
    tn_lease lease;
    fixture_write_both(f, x);
    tn_lease held = fixture_lease(x, TN_PLANE_ROW, TN_READ, f->stream);
    EXPECT_OK(tn_scope_close_deferred(scope));
    for (int i = 0; i < 2; i++) {
        tn_scope closing = i ? below : scope;
        scope_config.parent = closing;
        EXPECT_STATUS(tn_scope_create(&scope_config, &made), TN_STALE_HANDLE);
        EXPECT_STATUS(tn_tensor_create(closing, &config, &out), TN_STALE_HANDLE);
        EXPECT_STATUS(tn_tensor_move(free_one, closing), TN_STALE_HANDLE);
        EXPECT_STATUS(tn_tensor_clone(free_one, closing, f->stream, &out), TN_STALE_HANDLE);
        EXPECT_STATUS(tn_scope_close(closing), TN_STALE_HANDLE);
    }
    EXPECT_STATUS(tn_lease_begin(x, TN_PLANE_ROW, TN_READ, f->stream, &lease, &view),
                  TN_STALE_HANDLE);
    EXPECT_STATUS(tn_plane_require(x, TN_PLANE_COL, f->stream), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_move(x, f->scope), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_destroy(x, f->stream), TN_STALE_HANDLE);
    EXPECT_OK(tn_lease_end(held));
    assert_int_equal(fixture_ledger(f->scope).tensors, 1);
}

static void writes_that_are_under_way_end_or_are_abandoned(void **state) {
    const tensor_fixture *f = *state;
    static const tn_access accesses[] = {TN_WRITE, TN_UPDATE, TN_REPLACE};
    for (int i = 0; i < 6; i++) {
        tn_scope scope = scope_below(f->scope, "step");
        tn_tensor x = square_in(scope);
        tn_access access = accesses[i / 2];
        tn_plane_view old;
        fixture_write_both(f, x);
        tn_lease lease = fixture_lease(x, TN_PLANE_ROW, access, f->other);
        EXPECT_OK(tn_scope_close_deferred(scope)); /* COL is stale and goes */
        assert_int_equal(fixture_owned_bytes(f), (access == TN_REPLACE ? 2 : 1) * PLANE_BYTES);
        if (access == TN_REPLACE) EXPECT_OK(tn_lease_old_view(lease, &old));
        EXPECT_OK(i % 2 ? tn_lease_end(lease) : tn_lease_abandon(lease));
        assert_int_equal(fixture_owned_bytes(f), 0);
        assert_int_equal(fixture_ledger(f->scope).tensors, 0);
        EXPECT_OK(tn_ledger_check(f->pool));
    }
}

/* ---- trees, roots and views ---------------------------------------------------------------- */

static void scopes_go_from_below_when_they_are_empty(void **state) {
    const tensor_fixture *f = *state;
    tn_scope outer = scope_below(f->scope, "outer"), inner = scope_below(outer, "inner");
    tn_tensor x = square_in(outer), y = square_in(inner);
    fixture_write(x, TN_PLANE_ROW, f->stream);
    fixture_write(y, TN_PLANE_ROW, f->stream);
    tn_lease of_x = fixture_lease(x, TN_PLANE_ROW, TN_READ, f->stream);
    tn_lease of_y = fixture_lease(y, TN_PLANE_ROW, TN_READ, f->stream);
    EXPECT_OK(tn_scope_close_deferred(inner));
    assert_int_equal(fixture_ledger(outer).tensors, 2);
    EXPECT_STATUS(tn_scope_close(outer), TN_IN_USE);
    EXPECT_OK(tn_scope_close_deferred(outer)); /* while one below is closing already */
    EXPECT_OK(tn_lease_end(of_x));
    assert_int_equal(fixture_ledger(f->scope).tensors, 1);
    EXPECT_OK(tn_lease_end(of_y));
    assert_int_equal(fixture_ledger(f->scope).tensors, 0);
    assert_int_equal(fixture_owned_bytes(f), 0);
    EXPECT_OK(tn_scope_close(scope_below(f->scope, "again")));
}

static void a_root_goes_with_its_books_when_the_last_lease_ends(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = square_in(f->scope);
    fixture_write(x, TN_PLANE_ROW, f->stream);
    tn_lease lease = fixture_lease(x, TN_PLANE_ROW, TN_READ, f->stream);
    EXPECT_OK(tn_scope_close_deferred(f->scope));
    EXPECT_OK(tn_ledger_check(f->pool));
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(fixture_owned_bytes(f), 0);
    assert_int_equal(tn__handle_count(), 0);
}

static void views_end_with_the_call_and_keep_a_base_from_closing(void **state) {
    const tensor_fixture *f = *state;
    tn_scope scope = scope_below(f->scope, "step");
    tn_tensor x = square_in(scope), outside = square_in(f->scope), view, inner;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    fixture_write(x, TN_PLANE_ROW, f->stream);
    fixture_write(outside, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_tensor_view_rows(x, 0, 8, f->scope, &view));
    EXPECT_STATUS(tn_scope_close_deferred(scope), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor w has a view, w in scope model");
    EXPECT_OK(tn_tensor_info_get(x, &info)); /* nothing has ended */
    EXPECT_OK(tn_tensor_destroy(view, f->stream));
    EXPECT_OK(tn_tensor_view_rows(outside, 0, 8, scope, &view));
    EXPECT_OK(tn_tensor_view_rows(x, 0, 8, scope, &inner));
    tn_lease through = fixture_lease(view, TN_PLANE_ROW, TN_READ, f->stream);
    tn_lease through_inner = fixture_lease(inner, TN_PLANE_ROW, TN_READ, f->stream);
    EXPECT_OK(tn_scope_close_deferred(scope));
    EXPECT_STATUS(tn_tensor_info_get(view, &info), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_destroy(outside, f->stream), TN_IN_USE); /* it is the base's lease */
    assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES);
    EXPECT_OK(tn_lease_end(through_inner));
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    EXPECT_OK(tn_lease_end(through));
    EXPECT_OK(tn_tensor_destroy(outside, f->stream));
}

static void scratch_memory_stays_as_long_as_what_is_in_it(void **state) {
    const tensor_fixture *f = *state;
    tn_scope scope = scope_below(f->scope, "step");
    tn_tensor x = square_in(scope);
    EXPECT_OK(tn_tensor_set_policy(x, TN_POLICY_SCRATCH));
    fixture_write(x, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_scope_scratch_reserve(scope, f->stream));
    size_t reserved = fixture_owned_bytes(f) - PLANE_BYTES;
    tn_lease lease = fixture_lease(x, TN_PLANE_COL, TN_READ, f->stream); /* derived into the slot */
    EXPECT_OK(tn_scope_close_deferred(scope));
    assert_int_equal(fixture_owned_bytes(f), reserved);
    EXPECT_OK(tn_ledger_check(f->pool));
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(fixture_owned_bytes(f), 0);
    assert_int_equal(fixture_ledger(f->scope).tensors, 0);
}

static void offloaded_planes_are_freed_too(void **state) {
    const tensor_fixture *f = *state;
    tn_scope scope = scope_below(f->scope, "step");
    tn_tensor x = square_in(scope), y = square_in(scope);
    fixture_write_both(f, x);
    fixture_write(y, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_offload(x, TN_PLANE_ROW, f->stream));
    EXPECT_OK(tn_plane_offload(y, TN_PLANE_ROW, f->stream));
    assert_int_equal(fixture_ledger(f->scope).offloaded_bytes, 2 * PLANE_BYTES);
    tn_lease lease = fixture_lease(x, TN_PLANE_COL, TN_READ, f->other);
    EXPECT_OK(tn_scope_close_deferred(scope));
    assert_int_equal(fixture_ledger(f->scope).offloaded_bytes, 0);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(fixture_owned_bytes(f), 0);
    assert_int_equal(fixture_ledger(f->scope).tensors, 0);
}

/* ---- threads, order and failure ------------------------------------------------------------ */

static void *end_lease(void *argument) {
    const tn_lease *lease = argument;
    EXPECT_OK(tn_lease_end(*lease));
    return NULL;
}

static void any_threads_may_end_the_leases(void **state) {
    const tensor_fixture *f = *state;
    enum { THREADS = 4 };
    for (int round = 0; round < 8; round++) {
        tn_scope scope = scope_below(f->scope, "step");
        tn_lease leases[THREADS];
        pthread_t threads[THREADS];
        tn_tensor x = square_in(scope);
        fixture_write(x, TN_PLANE_ROW, f->stream);
        for (int i = 0; i < THREADS; i++)
            leases[i] = fixture_lease(x, TN_PLANE_ROW, TN_READ, i & 1 ? f->other : f->stream);
        for (int i = 0; i < THREADS; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, end_lease, &leases[i]), 0);
        EXPECT_OK(tn_scope_close_deferred(scope));
        for (int i = 0; i < THREADS; i++)
            assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(fixture_owned_bytes(f), 0);
        assert_int_equal(fixture_ledger(f->scope).tensors, 0);
    }
}

static void what_is_freed_late_is_freed_in_order(void **state) {
    const tensor_fixture *f = *state;
    for (int round = 0; round < 4; round++) {
        tn_scope scope = scope_below(f->scope, "step");
        tn_tensor x = square_in(scope), next = square_in(f->scope);
        tn_plane_view views[2];
        tn_lease leases[2];
        fixture_write(x, TN_PLANE_ROW, f->stream);
        for (int i = 0; i < 2; i++) {
            tn_stream stream = (i ^ (round & 1)) ? f->other : f->stream;
            EXPECT_OK(tn_lease_begin(x, TN_PLANE_ROW, TN_READ, stream, &leases[i], &views[i]));
            fixture_touch(f, &views[i], 0, stream);
        }
        EXPECT_OK(tn_scope_close_deferred(scope));
        EXPECT_OK(tn_lease_end(leases[round >> 1]));
        EXPECT_OK(tn_lease_end(leases[!(round >> 1)]));
        tn_lease lease = {0};
        EXPECT_OK(tn_lease_begin(next, TN_PLANE_ROW, TN_WRITE, f->stream, &lease, &views[0]));
        fixture_touch(f, &views[0], 1, f->stream);
        EXPECT_OK(tn_lease_end(lease));
        assert_int_equal(test_sim_get()->race_count(), 0);
        EXPECT_OK(tn_tensor_destroy(next, f->other));
    }
}

static void set_faults(int is_driver, long nth, int and_after) {
    if (is_driver)
        assert_int_equal(test_sim_get()->fault(NULL, nth, and_after, CUDA_ERROR_UNKNOWN), 0);
    else
        tn__host_alloc_fault(nth, and_after);
}

/* With the N-th host allocation or driver call failing, on a stream that the pool has not seen.
 * What could not be freed then is freed by the next call that makes or closes a scope. */
static void what_can_not_be_freed_is_freed_later(void **state) {
    const tensor_fixture *f = *state;
    int failed = 0;
    for (int kind = 0; kind < 4; kind++) {
        for (long nth = 1; nth <= NTH_MAX; nth++) {
            tn_scope scope = scope_below(f->scope, "step");
            tn_tensor x = square_in(scope);
            tn_stream fresh;
            fixture_write_both(f, x);
            EXPECT_OK(tn_stream_create(f->device, &fresh));
            tn_lease lease = fixture_lease(x, TN_PLANE_ROW, TN_READ, fresh);
            set_faults(kind & 1, nth, kind >> 1);
            tn_status closed = tn_scope_close_deferred(scope);
            tn_status ended = tn_lease_end(lease);
            set_faults(kind & 1, 0, 0);
            EXPECT_OK(tn_ledger_check(f->pool));
            failed += closed != TN_OK || ended != TN_OK;
            if (closed != TN_OK) { /* nothing has changed */
                assert_int_equal(fixture_state(x, TN_PLANE_COL), TN_PLANE_VALID);
                EXPECT_OK(tn_scope_close_deferred(scope));
            }
            if (ended != TN_OK) EXPECT_OK(tn_lease_end(lease));
            EXPECT_OK(tn_scope_close(scope_below(f->scope, "next")));
            assert_int_equal(fixture_owned_bytes(f), 0);
            assert_int_equal(fixture_ledger(f->scope).tensors, 0);
            EXPECT_OK(tn_stream_destroy(f->device, fresh));
            EXPECT_OK(tn_pool_trim(f->pool, 0, NULL));
        }
    }
    assert_in_range(failed, 1, 4 * NTH_MAX);
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, tensor_fixture_tear_down)
#define SIMULATED(test)                                                                            \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up_sim, tensor_fixture_tear_down)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(without_leases_it_is_a_close),
        WITH_FIXTURE(a_leased_plane_is_freed_when_its_last_lease_ends),
        WITH_FIXTURE(nothing_begins_in_a_closing_scope),
        WITH_FIXTURE(writes_that_are_under_way_end_or_are_abandoned),
        WITH_FIXTURE(scopes_go_from_below_when_they_are_empty),
        WITH_FIXTURE(a_root_goes_with_its_books_when_the_last_lease_ends),
        WITH_FIXTURE(views_end_with_the_call_and_keep_a_base_from_closing),
        WITH_FIXTURE(scratch_memory_stays_as_long_as_what_is_in_it),
        WITH_FIXTURE(offloaded_planes_are_freed_too),
        WITH_FIXTURE(any_threads_may_end_the_leases),
        SIMULATED(what_is_freed_late_is_freed_in_order),
        SIMULATED(what_can_not_be_freed_is_freed_later),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
