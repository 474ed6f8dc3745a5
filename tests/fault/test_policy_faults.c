/* The N-th failure of every host allocation and every driver call of what policies do: a derivation
 * into a slot that another stream uses, a reservation, the end of backward, a full budget, saved
 * sets. A run that fails has freed and displaced nothing, and succeeds when it is repeated.
 */
#include "tensor_fixture.h"

#include <string.h>

#include "error.h"
#include "host_alloc.h"

enum { NTH_MAX = 24, CUDA_ERROR_UNKNOWN = 999, WEIGHTS = 3 };
enum { COL_BYTES = 256 * 128 + 1 * 4 * 4 }; /* of 256 x 128 */

typedef struct subject {
    tensor_fixture f;
    tn_scope saved;
    tn_tensor weights[WEIGHTS];
    tn_stream fresh; /* that the pool has not seen yet */
} subject;

typedef struct scenario {
    const char *name;
    void (*setup)(subject *s);
    tn_status (*run)(subject *s);
    int displaces;     /* a derivation that fails may have displaced what was in the slot */
    int driver_faults; /* at least so many different N make it fail; frees make no driver call */
} scenario;

static void use(const subject *s, int which, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(s->weights[which], TN_PLANE_COL, TN_READ, stream, &lease, &view));
    EXPECT_OK(tn_lease_end(lease));
}

static void set_policy(const subject *s, tn_plane_policy policy) {
    EXPECT_OK(tn_scope_policy_set(s->f.scope, policy));
}

/* ---- scenarios ------------------------------------------------------------------------------- */

static void slot_in_use(subject *s) {
    set_policy(s, TN_POLICY_SCRATCH);
    use(s, 0, s->f.stream);
    use(s, 0, s->f.other);
}

static tn_status derive_into_the_slot(subject *s) {
    return tn_plane_require(s->weights[1], TN_PLANE_COL, s->fresh);
}

static void slot_too_small(subject *s) {
    slot_in_use(s);
    s->weights[2] = fixture_tensor(&s->f, TN_FORMAT_FP8_BLOCK_2D, 512, 128, "large");
    fixture_write(s->weights[2], TN_PLANE_ROW, s->f.stream);
}

static tn_status reserve(subject *s) { return tn_scope_scratch_reserve(s->f.scope, s->fresh); }

static tn_status release_slot(subject *s) { return tn_scope_scratch_release(s->f.scope, s->fresh); }

static void in_backward(subject *s) {
    set_policy(s, TN_POLICY_UNTIL_BACKWARD_END);
    EXPECT_OK(tn_scope_phase_set(s->f.scope, TN_PHASE_BACKWARD, s->f.stream));
    for (int i = 0; i < WEIGHTS; i++) {
        use(s, i, s->f.stream);
        use(s, i, s->f.other);
    }
}

static tn_status leave_backward(subject *s) {
    return tn_scope_phase_set(s->f.scope, TN_PHASE_UPDATE, s->fresh);
}

static void budget_full(subject *s) {
    set_policy(s, TN_POLICY_BUDGET);
    EXPECT_OK(tn_scope_budget_set(s->f.scope, (size_t)2 * COL_BYTES));
    for (int i = 0; i < 2; i++) {
        use(s, i, s->f.other);
        EXPECT_OK(tn_plane_release(s->weights[i], TN_PLANE_COL, s->f.stream));
    }
    for (int times = 0; times < 3; times++) { /* not yet worth more than the others by enough */
        use(s, 2, s->f.stream);
        if (times < 2) EXPECT_OK(tn_plane_release(s->weights[2], TN_PLANE_COL, s->f.stream));
    }
    use(s, 2, s->f.stream);
    EXPECT_OK(tn_plane_release(s->weights[2], TN_PLANE_COL, s->f.stream));
    use(s, 2, s->f.stream);
}

static tn_status displace_from_the_budget(subject *s) {
    TN_TRY(tn_plane_release(s->weights[2], TN_PLANE_COL, s->fresh));
    assert_int_equal(fixture_state(s->weights[2], TN_PLANE_COL), TN_PLANE_VALID);
    assert_int_equal(fixture_state(s->weights[1], TN_PLANE_COL), TN_PLANE_ABSENT);
    return TN_OK;
}

static tn_status shrink_the_budget(subject *s) { return tn_scope_budget_set(s->f.scope, 0); }

static tn_status write_again(void *context, tn_scope scope, tn_stream stream) {
    const subject *s = context;
    (void)scope;
    for (int i = 0; i < WEIGHTS; i++)
        TN_TRY(tn_plane_fill(s->weights[i], TN_PLANE_ROW, 1, stream));
    return TN_OK;
}

static void saved(subject *s) {
    EXPECT_OK(tn_saved_recompute_set(s->saved, write_again, s));
    for (int i = 0; i < WEIGHTS; i++) {
        EXPECT_OK(tn_tensor_move(s->weights[i], s->saved));
        use(s, i, s->f.other);
        EXPECT_OK(tn_plane_drop(s->weights[i], TN_PLANE_COL, s->f.other));
    }
}

static tn_status drop_the_set(subject *s) { return tn_saved_drop(s->saved, s->fresh); }

static void saved_and_dropped(subject *s) {
    saved(s);
    EXPECT_OK(tn_saved_drop(s->saved, s->f.stream));
}

static tn_status rebuild_the_set(subject *s) { return tn_saved_rebuild(s->saved, s->fresh); }

static const scenario scenarios[] = {
    {"derive into a slot in use", slot_in_use, derive_into_the_slot, 1, 10},
    {"reserve a larger slot", slot_too_small, reserve, 0, 0},
    {"release the slot", slot_in_use, release_slot, 0, 0},
    {"leave backward", in_backward, leave_backward, 0, 0},
    {"displace from a full budget", budget_full, displace_from_the_budget, 0, 0},
    {"shrink a budget", budget_full, shrink_the_budget, 0, 0},
    {"drop a saved set", saved, drop_the_set, 0, 0},
    {"rebuild a saved set", saved_and_dropped, rebuild_the_set, 0, 6},
};

/* ---- the run --------------------------------------------------------------------------------- */

static void open_subject(subject *s, const scenario *what) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    memset(s, 0, sizeof *s);
    tensor_fixture_open_sim(&s->f);
    config.parent = s->f.scope;
    config.kind = TN_SCOPE_SAVED;
    EXPECT_OK(tn_scope_create(&config, &s->saved));
    for (int i = 0; i < WEIGHTS; i++) {
        s->weights[i] = fixture_tensor(&s->f, TN_FORMAT_FP8_BLOCK_2D, 256, 128, "w");
        fixture_write(s->weights[i], TN_PLANE_ROW, s->f.stream);
    }
    what->setup(s);
    EXPECT_OK(tn_stream_create(s->f.device, &s->fresh));
}

typedef struct snapshot {
    uint64_t owned, leases, tensors, phase, kept, limit;
    uint64_t states[WEIGHTS][2];
} snapshot;

static snapshot snapshot_of(const subject *s) {
    snapshot shot;
    tn_phase phase = TN_PHASE_NONE;
    tn_ledger ledger = fixture_ledger(s->f.scope);
    tn_plane_budget budget = TN_PLANE_BUDGET_INIT;
    memset(&shot, 0, sizeof shot);
    shot.owned = fixture_owned_bytes(&s->f);
    shot.leases = ledger.leases;
    shot.tensors = ledger.tensors;
    for (int i = 0; i < WEIGHTS; i++) {
        shot.states[i][0] = fixture_state(s->weights[i], TN_PLANE_ROW);
        shot.states[i][1] = fixture_state(s->weights[i], TN_PLANE_COL);
    }
    EXPECT_OK(tn_scope_phase_get(s->f.scope, &phase));
    shot.phase = phase;
    EXPECT_OK(tn_scope_budget_get(s->f.scope, &budget));
    shot.kept = budget.kept_bytes;
    shot.limit = budget.limit_bytes;
    return shot;
}

static void expect_unchanged(const subject *s, const scenario *what, const snapshot *before,
                             long nth) {
    snapshot after = snapshot_of(s);
    if (what->displaces) {
        after.states[0][1] = before->states[0][1];
        assert_int_equal(after.states[1][1], TN_PLANE_ABSENT);
    }
    if (memcmp(before, &after, sizeof after) != 0) {
        fail_msg("%s, failure %ld: %zu bytes owned before, %zu after, or planes differ", what->name,
                 nth, (size_t)before->owned, (size_t)after.owned);
    }
    EXPECT_OK(tn_ledger_check(s->f.pool));
}

/* 1 if the fault was met. */
static int run_with_fault(const scenario *what, int is_driver, long nth, int and_after) {
    subject s;
    open_subject(&s, what);
    snapshot before = snapshot_of(&s);
    if (is_driver)
        assert_int_equal(test_sim_get()->fault(NULL, nth, and_after, CUDA_ERROR_UNKNOWN), 0);
    else
        tn__host_alloc_fault(nth, and_after);
    tn_status status = what->run(&s);
    assert_int_equal(test_sim_get()->fault(NULL, 0, 0, CUDA_ERROR_UNKNOWN), 0);
    tn__host_alloc_fault(0, 0);
    if (status != TN_OK) {
        expect_unchanged(&s, what, &before, nth);
        EXPECT_OK(what->run(&s));
    }
    EXPECT_OK(tn_ledger_check(s.f.pool));
    EXPECT_OK(tn_scope_close(s.f.scope));
    EXPECT_OK(tn_stream_destroy(s.f.device, s.fresh));
    tensor_fixture_close(&s.f);
    return status != TN_OK;
}

static void every_failure_changes_nothing(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        const scenario *what = &scenarios[i];
        int driver_faults = 0;
        for (long nth = 1; nth <= NTH_MAX; nth++) {
            driver_faults += run_with_fault(what, 1, nth, 0);
            (void)run_with_fault(what, 1, nth, 1);
        }
        for (long nth = 1; nth <= 8; nth++)
            (void)run_with_fault(what, 0, nth, 1);
        if (driver_faults < what->driver_faults) {
            fail_msg("%s: only %d driver calls could fail", what->name, driver_faults);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_failure_changes_nothing)};
    return cmocka_run_group_tests_name("fault/policy_faults", tests, NULL, NULL);
}
