/* The N-th failure of every host allocation and every driver call of every tensor function.
 *
 * Each scenario is set up without faults and run with one, once or from then on. A run that fails
 * must leave planes, leases, ledger and pool as they were (what a driver that refuses everything
 * kept back is freed by the next call), and the same run without a fault must then succeed.
 */
#include "tensor_fixture.h"

#include <string.h>

#include "host_alloc.h"
#include "tenure_lifetime.h"

enum { NTH_MAX = 40, CUDA_ERROR_UNKNOWN = 999, CULPRIT_BYTES = 64, FRESH_STREAMS = 2 };

typedef struct subject {
    tensor_fixture *fixture;
    tn_scope scope;   /* a child of the fixture's, where all of a run happens */
    tn_tensor tensor; /* 8 x 8, 2D, called "w" */
    tn_tensor saved;
    tn_lease lease;
    tn_stream fresh[FRESH_STREAMS]; /* that the pool has not seen yet */
    unsigned char data[64];
    float scales[4];
} subject;

typedef struct scenario {
    const char *name;
    void (*setup)(subject *s);
    tn_status (*run)(subject *s);
    int may_undefine_row; /* the run overwrites ROW: a failure half-way leaves it ALLOCATED */
    int may_derive_col;   /* the run derives COL first: a later failure leaves it derived */
    int may_free_in_part; /* what was freed before the failure is not brought back */
    int is_simulated_only;
    int never_fails;
    int host_faults, driver_faults; /* at least so many different N make the run fail */
} scenario;

/* ---- setups -------------------------------------------------------------------------------- */

static void no_plane(subject *s) { (void)s; }

static void valid_row(subject *s) { fixture_write(s->tensor, TN_PLANE_ROW, s->fixture->stream); }

static void valid_both(subject *s) {
    valid_row(s);
    EXPECT_OK(tn_plane_require(s->tensor, TN_PLANE_COL, s->fixture->stream));
}

static tn_status begin(subject *s, tn_plane plane, tn_access access, tn_stream stream) {
    tn_plane_view view;
    return tn_lease_begin(s->tensor, plane, access, stream, &s->lease, &view);
}

static void row_read_elsewhere(subject *s) {
    valid_row(s);
    EXPECT_OK(begin(s, TN_PLANE_ROW, TN_READ, s->fixture->other));
}

static void row_written_elsewhere(subject *s) {
    valid_row(s);
    EXPECT_OK(begin(s, TN_PLANE_ROW, TN_WRITE, s->fixture->other));
}

static void row_made_by_a_write(subject *s) {
    EXPECT_OK(begin(s, TN_PLANE_ROW, TN_WRITE, s->fixture->other));
}

static void row_written_and_col_not_kept(subject *s) {
    EXPECT_OK(tn_tensor_set_policy(s->tensor, TN_POLICY_UNTIL_LAST_USE));
    EXPECT_OK(tn_tensor_set_frozen(s->tensor, 1));
    valid_both(s);
    EXPECT_OK(begin(s, TN_PLANE_ROW, TN_WRITE, s->fixture->other));
}

static void both_and_col_not_kept(subject *s) {
    EXPECT_OK(tn_tensor_set_policy(s->tensor, TN_POLICY_UNTIL_LAST_USE));
    EXPECT_OK(tn_tensor_set_frozen(s->tensor, 1));
    valid_both(s);
}

static void used_on_both_streams(subject *s) {
    valid_both(s);
    EXPECT_OK(begin(s, TN_PLANE_ROW, TN_READ, s->fixture->other));
    EXPECT_OK(tn_lease_end(s->lease));
    EXPECT_OK(begin(s, TN_PLANE_COL, TN_READ, s->fixture->other));
    EXPECT_OK(tn_lease_end(s->lease));
}

static void row_being_replaced(subject *s) {
    used_on_both_streams(s);
    EXPECT_OK(begin(s, TN_PLANE_ROW, TN_REPLACE, s->fixture->other));
}

static void row_saved(subject *s) {
    valid_row(s);
    EXPECT_OK(tn_tensor_save(s->tensor, TN_PLANE_BIT(TN_PLANE_ROW), s->scope, s->fixture->other,
                             &s->saved));
}

static void row_read_on_a_fresh_stream(subject *s) {
    valid_row(s);
    EXPECT_OK(begin(s, TN_PLANE_ROW, TN_READ, s->fresh[0]));
}

/* ROW would be freed on a stream that the pool knows, COL on the default stream, which it does not
 * know before this scenario. */
static void col_last_used_on_a_stream_that_has_ended(subject *s) {
    valid_both(s);
    EXPECT_OK(begin(s, TN_PLANE_COL, TN_READ, s->fresh[0]));
    EXPECT_OK(tn_lease_end(s->lease));
    EXPECT_OK(tn_stream_destroy(s->fixture->device, s->fresh[0]));
    EXPECT_OK(tn_stream_create(s->fixture->device, &s->fresh[0]));
}

/* ---- runs ---------------------------------------------------------------------------------- */

static tn_status create_scope(subject *s) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope;
    config.parent = s->scope;
    return tn_scope_create(&config, &scope);
}

static tn_status create_root(subject *s) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope;
    config.pool = s->fixture->pool;
    TN_TRY(tn_scope_create(&config, &scope));
    return tn_scope_close(scope);
}

static tn_status create_tensor(subject *s) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    return tn_tensor_create(s->scope, &config, &tensor);
}

static tn_status make_row(subject *s) {
    return tn_plane_make(s->tensor, TN_PLANE_ROW, s->fixture->other);
}

static tn_status require_col(subject *s) {
    return tn_plane_require(s->tensor, TN_PLANE_COL, s->fixture->other);
}

static tn_status begin_write_row(subject *s) {
    return begin(s, TN_PLANE_ROW, TN_WRITE, s->fixture->other);
}

static tn_status begin_update_row(subject *s) {
    return begin(s, TN_PLANE_ROW, TN_UPDATE, s->fixture->other);
}

static tn_status begin_read_col(subject *s) {
    return begin(s, TN_PLANE_COL, TN_READ, s->fixture->other);
}

static tn_status end_lease(subject *s) { return tn_lease_end(s->lease); }

static tn_status abandon_lease(subject *s) { return tn_lease_abandon(s->lease); }

static tn_status drop_col(subject *s) {
    return tn_plane_drop(s->tensor, TN_PLANE_COL, s->fixture->other);
}

static tn_status drop_col_on_a_fresh_stream(subject *s) {
    return tn_plane_drop(s->tensor, TN_PLANE_COL, s->fresh[1]);
}

static tn_status destroy_on_a_fresh_stream(subject *s) {
    return tn_tensor_destroy(s->tensor, s->fresh[1]);
}

/* Not ours, so that each call of the pool asks the driver for it anew. */
static tn_status destroy_on_the_per_thread_stream(subject *s) {
    return tn_tensor_destroy(s->tensor, (tn_stream)(uintptr_t)2);
}

/* A block that the drop could not free is freed before the plane gets new ones. */
static tn_status drop_col_and_make_it_again(subject *s) {
    TN_TRY(tn_plane_drop(s->tensor, TN_PLANE_COL, (tn_stream)(uintptr_t)2));
    return tn_plane_make(s->tensor, TN_PLANE_COL, s->fixture->stream);
}

static tn_status release_col(subject *s) {
    return tn_plane_release(s->tensor, TN_PLANE_COL, s->fixture->other);
}

static tn_status destroy(subject *s) { return tn_tensor_destroy(s->tensor, s->fixture->other); }

static tn_status close_scope(subject *s) { return tn_scope_close(s->scope); }

static tn_status write_row(subject *s) {
    return tn_plane_write(s->tensor, TN_PLANE_ROW, s->data, 64, s->scales, 16, s->fixture->other);
}

static tn_status read_col(subject *s) {
    return tn_plane_read(s->tensor, TN_PLANE_COL, s->data, 64, s->scales, 16, s->fixture->other);
}

static void see(void *argument, tn_tensor tensor, const tn_tensor_info *info,
                const size_t data_bytes[TN_PLANE_COUNT], const size_t scale_bytes[TN_PLANE_COUNT]) {
    (void)argument, (void)tensor, (void)info, (void)data_bytes, (void)scale_bytes;
}

static tn_status visit(subject *s) { return tn_scope_visit(s->scope, see, NULL); }

static tn_status begin_replace_row(subject *s) {
    return begin(s, TN_PLANE_ROW, TN_REPLACE, s->fixture->other);
}

static tn_status fill_row(subject *s) {
    return tn_plane_fill(s->tensor, TN_PLANE_ROW, 0, s->fixture->other);
}

static tn_status save_both(subject *s) {
    unsigned both = TN_PLANE_BIT(TN_PLANE_ROW) | TN_PLANE_BIT(TN_PLANE_COL);
    return tn_tensor_save(s->tensor, both, s->scope, s->fixture->other, &s->saved);
}

static tn_status restore(subject *s) {
    tn_tensor restored;
    return tn_tensor_restore(s->saved, s->scope, &restored);
}

static tn_status restore_into(subject *s) { return tn_tensor_restore_into(s->saved, s->tensor); }

static tn_status clone(subject *s) {
    tn_tensor copy;
    return tn_tensor_clone(s->tensor, s->scope, s->fixture->other, &copy);
}

static tn_status view_rows(subject *s) {
    tn_tensor view;
    return tn_tensor_view_rows(s->tensor, 0, 8, s->scope, &view);
}

static tn_status close_deferred(subject *s) { return tn_scope_close_deferred(s->scope); }

static const scenario scenarios[] = {
    {"create a scope", no_plane, create_scope, .host_faults = 2},
    {"create a root scope", no_plane, create_root, .host_faults = 2},
    {"create a tensor", no_plane, create_tensor, .host_faults = 2},
    {"make a plane", no_plane, make_row, .driver_faults = 1},
    {"derive", valid_row, require_col, .driver_faults = 2},
    {"derive in place", valid_both, require_col, .host_faults = 0},
    {"begin a write of an absent plane", no_plane, begin_write_row, .host_faults = 0},
    {"begin a write after a read elsewhere", used_on_both_streams, begin_write_row,
     .host_faults = 0},
    {"begin an update of what another stream wrote", valid_row, begin_update_row,
     .driver_faults = 1},
    {"begin a read of what another stream wrote", valid_both, begin_read_col, .driver_faults = 1},
    {"begin a read that derives", valid_row, begin_read_col, .driver_faults = 2},
    {"end a read", row_read_elsewhere, end_lease, .host_faults = 0},
    {"end a write", row_written_elsewhere, end_lease, .host_faults = 0},
    {"end a write that frees the stale plane", row_written_and_col_not_kept, end_lease,
     .host_faults = 0},
    {"abandon a read", row_read_elsewhere, abandon_lease, .never_fails = 1},
    {"abandon a write", row_written_elsewhere, abandon_lease, .never_fails = 1},
    {"abandon a write that made the plane", row_made_by_a_write, abandon_lease, .never_fails = 1},
    {"drop", used_on_both_streams, drop_col, .host_faults = 0},
    {"release", both_and_col_not_kept, release_col, .host_faults = 0},
    {"destroy", used_on_both_streams, destroy, .host_faults = 0},
    {"close a scope", used_on_both_streams, close_scope, .host_faults = 0},
    {"end a read on a fresh stream", row_read_on_a_fresh_stream, end_lease, .host_faults = 1},
    {"drop on a fresh stream", valid_both, drop_col_on_a_fresh_stream, .host_faults = 1},
    {"destroy on a fresh stream", valid_both, destroy_on_a_fresh_stream, .host_faults = 1},
    {"close a scope after a stream has ended", col_last_used_on_a_stream_that_has_ended,
     close_scope, .host_faults = 1},
    {"destroy on the per-thread default stream", valid_both, destroy_on_the_per_thread_stream,
     .is_simulated_only = 1, .may_free_in_part = 1, .driver_faults = 3},
    {"drop on that stream and make again", valid_both, drop_col_and_make_it_again,
     .is_simulated_only = 1, .may_free_in_part = 1, .driver_faults = 3},
    {"write an absent plane", no_plane, write_row, .driver_faults = 2},
    {"write a valid plane", used_on_both_streams, write_row, .may_undefine_row = 1,
     .driver_faults = 2},
    {"read a plane that must be derived", valid_row, read_col, .may_derive_col = 1,
     .driver_faults = 3},
    {"visit", valid_both, visit, .host_faults = 1},
    {"begin a replacement", used_on_both_streams, begin_replace_row, .host_faults = 1},
    {"end a replacement", row_being_replaced, end_lease, .host_faults = 0},
    {"abandon a replacement", row_being_replaced, abandon_lease, .never_fails = 1},
    {"fill an absent plane", no_plane, fill_row, .driver_faults = 2},
    {"save", valid_both, save_both, .host_faults = 2},
    {"save what must be derived", valid_row, save_both, .may_derive_col = 1, .host_faults = 2,
     .driver_faults = 2},
    {"restore", row_saved, restore, .host_faults = 0},
    {"restore into the tensor", row_saved, restore_into, .host_faults = 0},
    {"clone", valid_both, clone, .may_free_in_part = 1, .host_faults = 2, .driver_faults = 2},
    {"view", valid_row, view_rows, .host_faults = 2},
    {"close a scope as soon as it can be", used_on_both_streams, close_deferred, .host_faults = 0},
};

/* ---- before and after ---------------------------------------------------------------------- */

typedef struct snapshot {
    tn_plane_state row, col;
    size_t bytes, owned_bytes;
    uint64_t tensors, planes, leases;
} snapshot;

static snapshot look(const subject *s) {
    tn_ledger ledger = fixture_ledger(s->fixture->scope);
    return (snapshot){fixture_state(s->tensor, TN_PLANE_ROW),
                      fixture_state(s->tensor, TN_PLANE_COL),
                      ledger.total_bytes,
                      fixture_owned_bytes(s->fixture),
                      ledger.tensors,
                      ledger.planes,
                      ledger.leases};
}

/* A driver that refuses everything can keep a plane from being given back: it is ALLOCATED, or
 * ABSENT with a block still in the ledger. Dropping it now must work. */
static void settle(const subject *s, tn_plane plane, tn_plane_state before, int and_after,
                   int may_derive) {
    tn_plane_state now = fixture_state(s->tensor, plane);
    int was_derived = may_derive && before == TN_PLANE_ABSENT && now == TN_PLANE_VALID;
    int was_kept_back = and_after && before == TN_PLANE_ABSENT && now == TN_PLANE_ALLOCATED;
    if (now == TN_PLANE_ABSENT || was_kept_back || was_derived) {
        EXPECT_OK(tn_plane_drop(s->tensor, plane, s->fixture->stream));
    }
}

static void expect_same(const scenario *now, const char *what, size_t before, size_t after) {
    if (before != after) {
        fail_msg("%s: %s was %zu and is %zu after the failure", now->name, what, before, after);
    }
}

static void expect_unchanged(const subject *s, const scenario *now, const snapshot *before,
                             int and_after) {
    settle(s, TN_PLANE_ROW, before->row, and_after, 0);
    settle(s, TN_PLANE_COL, before->col, and_after, now->may_derive_col);
    snapshot after = look(s);
    if (now->may_undefine_row && after.row == TN_PLANE_ALLOCATED) after.row = before->row;
    expect_same(now, "ROW's state", before->row, after.row);
    expect_same(now, "COL's state", before->col, after.col);
    expect_same(now, "the ledger", before->bytes, after.bytes);
    expect_same(now, "owned_bytes", before->owned_bytes, after.owned_bytes);
    expect_same(now, "tensors", before->tensors, after.tensors);
    expect_same(now, "planes", before->planes, after.planes);
    expect_same(now, "leases", before->leases, after.leases);
}

/* ---- the loop ------------------------------------------------------------------------------ */

typedef enum fault_kind { HOST_FAULT, DRIVER_FAULT } fault_kind;

static void set_fault(fault_kind kind, long nth, int and_after) {
    if (kind == HOST_FAULT)
        tn__host_alloc_fault(nth, and_after);
    else
        assert_int_equal(test_sim_get()->fault(NULL, nth, and_after, CUDA_ERROR_UNKNOWN), 0);
}

static void open_subject(subject *s, tensor_fixture *fixture) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    *s = (subject){.fixture = fixture};
    config.parent = fixture->scope;
    EXPECT_OK(tn_scope_create(&config, &s->scope));
    s->tensor = fixture_tensor(fixture, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
    EXPECT_OK(tn_tensor_move(s->tensor, s->scope));
    for (int i = 0; i < FRESH_STREAMS; i++) {
        EXPECT_OK(tn_stream_create(fixture->device, &s->fresh[i]));
    }
}

static void close_subject(subject *s) {
    EXPECT_OK(tn_device_synchronize(s->fixture->device)); /* copies to and from *s */
    (void)!tn_lease_abandon(s->lease);                    /* stale if the run has ended it */
    tn_status status = tn_scope_close(s->scope);
    if (status != TN_STALE_HANDLE) EXPECT_OK(status);
    assert_int_equal(fixture_owned_bytes(s->fixture), 0);
    assert_int_equal(fixture_ledger(s->fixture->scope).total_bytes, 0);
    EXPECT_OK(tn_ledger_check(s->fixture->pool));
    EXPECT_OK(tn_pool_check(s->fixture->pool));
    for (int i = 0; i < FRESH_STREAMS; i++) {
        EXPECT_OK(tn_stream_destroy(s->fixture->device, s->fresh[i]));
    }
}

/* The call that the last error names, without its arguments. */
static void read_culprit(char culprit[CULPRIT_BYTES]) {
    size_t length = strcspn(tn_error_last(), "(");
    if (length >= CULPRIT_BYTES) length = CULPRIT_BYTES - 1;
    memcpy(culprit, tn_error_last(), length);
    culprit[length] = 0;
}

/* 1 if the fault made the run fail; `culprit` then is the call that the error names. */
static int run_once(tensor_fixture *fixture, const scenario *now, fault_kind kind, long nth,
                    int and_after, char culprit[CULPRIT_BYTES]) {
    subject s;
    open_subject(&s, fixture);
    now->setup(&s);
    snapshot before = look(&s);
    set_fault(kind, nth, and_after);
    tn_status status = now->run(&s);
    read_culprit(culprit);
    set_fault(kind, 0, 0);
    EXPECT_OK(tn_ledger_check(fixture->pool));
    if (status != TN_OK) {
        if (kind == HOST_FAULT) EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
        assert_false(now->never_fails);
        if (!now->may_free_in_part) expect_unchanged(&s, now, &before, and_after);
        EXPECT_OK(now->run(&s));
    }
    close_subject(&s);
    return status != TN_OK;
}

/* Failing once and from then on, the Nth driver call is the same and the first to fail: the error
 * names it both times, though in the second case the cleanup fails as well. */
static void run_all(tensor_fixture *fixture, fault_kind kind) {
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        const scenario *now = &scenarios[i];
        int failures = 0;
        if (now->is_simulated_only && kind == HOST_FAULT) continue;
        for (long nth = 1; nth <= NTH_MAX; nth++) {
            char once[CULPRIT_BYTES], from_then_on[CULPRIT_BYTES];
            int has_failed = run_once(fixture, now, kind, nth, 0, once);
            int has_failed_again = run_once(fixture, now, kind, nth, 1, from_then_on);
            if (kind == DRIVER_FAULT && has_failed && has_failed_again) {
                assert_string_equal(from_then_on, once);
            }
            failures += has_failed;
        }
        int expected = kind == HOST_FAULT ? now->host_faults : now->driver_faults;
        if (failures < expected) {
            fail_msg("%s: %d faults made it fail, at least %d should", now->name, failures,
                     expected);
        }
    }
}

static void every_host_allocation_may_fail(void **state) {
    tensor_fixture fixture;
    (void)state;
    tensor_fixture_open(&fixture);
    run_all(&fixture, HOST_FAULT);
    tensor_fixture_close(&fixture);
}

static void every_driver_call_may_fail(void **state) {
    tensor_fixture fixture;
    (void)state;
    tensor_fixture_open_sim(&fixture);
    run_all(&fixture, DRIVER_FAULT);
    tensor_fixture_close(&fixture);
}

/* Leases that have ended leave their host memory to the next ones: only the first may fail. */
static void the_first_lease_may_fail(void **state) {
    tensor_fixture fixture;
    tn_plane_view view;
    tn_lease lease = {0};
    (void)state;
    tensor_fixture_open(&fixture);
    tn_tensor tensor = fixture_tensor(&fixture, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
    EXPECT_OK(tn_plane_make(tensor, TN_PLANE_ROW, fixture.stream));
    tn__host_alloc_fault(1, 0);
    EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, fixture.stream, &lease, &view),
                  TN_OUT_OF_HOST_MEMORY);
    assert_int_equal(lease.value, 0);
    assert_int_equal(fixture_ledger(fixture.scope).leases, 0);
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_ALLOCATED);
    fixture_write(tensor, TN_PLANE_ROW, fixture.stream);
    tn__host_alloc_fault(1, 0);
    fixture_write(tensor, TN_PLANE_ROW, fixture.stream);
    tn__host_alloc_fault(0, 0);
    tensor_fixture_close(&fixture);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_lease_may_fail),
        cmocka_unit_test(every_host_allocation_may_fail),
        cmocka_unit_test(every_driver_call_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
