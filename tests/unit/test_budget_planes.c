/* Byte budgets: what is kept is never more than the budget, and it is what is worth most. */
#include "tensor_fixture.h"

#include <stdlib.h>

#include "host_alloc.h"
#include "options.h"

enum { COL_BYTES = 256 * 128 + 1 * 4 * 4 };      /* of 256 x 128 */
enum { WIDE_COL_BYTES = 256 * 512 + 4 * 4 * 4 }; /* of 256 x 512 */
enum { LAYERS = 6 };

typedef struct budget_fixture {
    tensor_fixture base;
    tn_tensor layers[LAYERS];
} budget_fixture;

static tn_tensor weight(const tensor_fixture *f, tn_scope scope, int64_t cols) {
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 256, cols, "w");
    EXPECT_OK(tn_tensor_move(tensor, scope));
    EXPECT_OK(tn_tensor_set_policy(tensor, TN_POLICY_BUDGET));
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    return tensor;
}

static int open_fixture(void **state) {
    static budget_fixture fixture;
    tensor_fixture_open(&fixture.base);
    for (int i = 0; i < LAYERS; i++)
        fixture.layers[i] = weight(&fixture.base, fixture.base.scope, 128);
    *state = &fixture;
    return 0;
}

static int close_fixture(void **state) {
    budget_fixture *f = *state;
    unsetenv("TENURE_PLANE_BUDGET");
    tn__options_reload();
    tensor_fixture_close(&f->base);
    return 0;
}

static tn_plane_budget budget_of(tn_scope scope) {
    tn_plane_budget budget = TN_PLANE_BUDGET_INIT;
    EXPECT_OK(tn_scope_budget_get(scope, &budget));
    return budget;
}

static size_t col_bytes(const budget_fixture *f) {
    tn_ledger ledger = fixture_ledger(f->base.scope);
    return ledger.data_bytes[TN_PLANE_COL] + ledger.scale_bytes[TN_PLANE_COL];
}

/* Of random_uses_stay_within_the_budget: to replay, let `first` begin at the seed that failed. */
static uint64_t random_seed;
static int random_step;

/* Derives if it must, reads, releases; between calls nothing but what is kept has memory. */
static void use(const budget_fixture *f, tn_tensor tensor) {
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->base.stream));
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_COL, f->base.stream));
    tn_plane_budget budget = budget_of(f->base.scope);
    if (budget.kept_bytes > budget.limit_bytes || col_bytes(f) != budget.kept_bytes) {
        fail_msg("seed %llu, step %d: %zu bytes of planes, %zu kept, limit %zu",
                 (unsigned long long)random_seed, random_step, col_bytes(f), budget.kept_bytes,
                 budget.limit_bytes);
    }
    EXPECT_OK(tn_ledger_check(f->base.pool));
}

static int is_kept(tn_tensor tensor) {
    return fixture_state(tensor, TN_PLANE_COL) == TN_PLANE_VALID;
}

/* Which of the layers are kept, as bits. */
static unsigned kept_layers(const budget_fixture *f) {
    unsigned kept = 0;
    for (int i = 0; i < LAYERS; i++)
        kept |= (unsigned)is_kept(f->layers[i]) << i;
    return kept;
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void without_a_budget_nothing_is_kept(void **state) {
    const budget_fixture *f = *state;
    use(f, f->layers[0]);
    assert_int_equal(col_bytes(f), 0);
    setenv("TENURE_PLANE_BUDGET", "65568", 1); /* two planes */
    tn__options_reload();
    for (int i = 0; i < 3; i++)
        use(f, f->layers[i]);
    assert_int_equal(kept_layers(f), 3);
    assert_int_equal(budget_of(f->base.scope).limit_bytes, 2 * COL_BYTES);
    assert_int_equal(col_bytes(f), 2 * COL_BYTES);
}

/* A working set beyond the budget by one plane is where a cache that keeps the last used has no
 * hit at all: here it has all the hits that the budget has room for, from the second step on. */
static void a_cycle_keeps_the_same_planes(void **state) {
    const budget_fixture *f = *state;
    enum { KEPT = LAYERS - 1, STEPS = 100 };
    EXPECT_OK(tn_scope_budget_set(f->base.scope, (size_t)KEPT * COL_BYTES));
    for (int step = 0; step < STEPS; step++) {
        int derived = fixture_derive_calls();
        for (int i = LAYERS - 1; i >= 0; i--)
            use(f, f->layers[i]);
        assert_int_equal(fixture_derive_calls() - derived, step == 0 ? LAYERS : LAYERS - KEPT);
        assert_int_equal(kept_layers(f), 0x3E); /* the first five that were used */
        assert_int_equal(col_bytes(f), KEPT * COL_BYTES);
    }
}

/* Up and down again: the order in which a layer's turn comes changes with every pass. */
static void a_walk_there_and_back_keeps_the_same_planes(void **state) {
    const budget_fixture *f = *state;
    EXPECT_OK(tn_scope_budget_set(f->base.scope, (size_t)2 * COL_BYTES));
    for (int step = 0; step < 100; step++) {
        for (int i = 0; i < LAYERS; i++)
            use(f, f->layers[step % 2 ? LAYERS - 1 - i : i]);
        assert_int_equal(kept_layers(f), 3);
    }
}

static void the_most_wanted_displaces_the_least(void **state) {
    const budget_fixture *f = *state;
    EXPECT_OK(tn_scope_budget_set(f->base.scope, (size_t)2 * COL_BYTES));
    use(f, f->layers[0]);
    use(f, f->layers[1]);
    use(f, f->layers[1]);
    for (int times = 1; times <= 4; times++) {
        use(f, f->layers[2]);
        assert_int_equal(kept_layers(f), times < 4 ? 3 : 6); /* four beat one by more than two */
    }
}

/* What was wanted a thousand times long ago does not stay for ever. */
static void old_wants_fade(void **state) {
    const budget_fixture *f = *state;
    EXPECT_OK(tn_scope_budget_set(f->base.scope, COL_BYTES));
    for (int i = 0; i < 1000; i++)
        use(f, f->layers[0]);
    int times = 0;
    while (!is_kept(f->layers[1])) {
        use(f, f->layers[1]);
        assert_true(++times <= 64);
    }
    assert_int_equal(kept_layers(f), 2);
}

/* Wanted as often, the smaller one saves more for its bytes: a launch costs the same for it. */
static void worth_is_for_the_bytes(void **state) {
    const budget_fixture *f = *state;
    tn_tensor wide = weight(&f->base, f->base.scope, 512);
    EXPECT_OK(tn_scope_budget_set(f->base.scope, WIDE_COL_BYTES));
    use(f, wide);
    assert_true(is_kept(wide));
    for (int step = 0; step < 4; step++) {
        use(f, wide);
        for (int i = 0; i < 4; i++)
            use(f, f->layers[i]);
    }
    assert_false(is_kept(wide));
    assert_int_equal(kept_layers(f), 0xF); /* 4 x 32784 of 131136 bytes */
}

static void a_plane_beyond_the_budget_displaces_nothing(void **state) {
    const budget_fixture *f = *state;
    tn_tensor wide = weight(&f->base, f->base.scope, 512);
    EXPECT_OK(tn_scope_budget_set(f->base.scope, (size_t)3 * COL_BYTES));
    for (int i = 0; i < 3; i++)
        use(f, f->layers[i]);
    for (int times = 0; times < 50; times++)
        use(f, wide);
    assert_int_equal(kept_layers(f), 7);
}

static void a_smaller_budget_drops_at_once_or_says_why_not(void **state) {
    const budget_fixture *f = *state;
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_scope_budget_set(f->base.scope, (size_t)4 * COL_BYTES));
    for (int i = 0; i < 4; i++)
        use(f, f->layers[i]);
    use(f, f->layers[3]); /* worth most */
    EXPECT_OK(tn_scope_budget_set(f->base.scope, (size_t)2 * COL_BYTES + 1));
    assert_int_equal(col_bytes(f), 2 * COL_BYTES);
    assert_true(is_kept(f->layers[3]));
    EXPECT_OK(tn_lease_begin(f->layers[3], TN_PLANE_COL, TN_READ, f->base.stream, &lease, &view));
    EXPECT_STATUS(tn_scope_budget_set(f->base.scope, 0), TN_IN_USE);
    EXPECT_ERROR_HAS("making the budget smaller");
    assert_int_equal(col_bytes(f), 2 * COL_BYTES);
    assert_int_equal(budget_of(f->base.scope).limit_bytes, 2 * COL_BYTES + 1);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_scope_budget_set(f->base.scope, 0));
    assert_int_equal(col_bytes(f), 0);
}

static void a_leased_plane_is_no_victim(void **state) {
    const budget_fixture *f = *state;
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_scope_budget_set(f->base.scope, COL_BYTES));
    use(f, f->layers[0]);
    EXPECT_OK(tn_lease_begin(f->layers[0], TN_PLANE_COL, TN_READ, f->base.other, &lease, &view));
    for (int times = 0; times < 10; times++)
        use(f, f->layers[1]);
    assert_int_equal(kept_layers(f), 1);
    EXPECT_OK(tn_lease_end(lease));
    use(f, f->layers[1]);
    assert_int_equal(kept_layers(f), 2);
}

/* What ends a plane, or makes it more than a spare, takes it out of the budget. */
/* A REPLACE is the end of the keeping, also if it is abandoned: the plane is kept again when it is
 * released again. Nothing of it stands in the way of a smaller budget meanwhile. */
static void a_plane_that_is_replaced_is_not_kept(void **state) {
    const budget_fixture *f = *state;
    tn_tensor first = f->layers[0];
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_scope_budget_set(f->base.scope, COL_BYTES));
    use(f, first);
    assert_int_equal(kept_layers(f), 1);
    EXPECT_OK(tn_lease_begin(first, TN_PLANE_COL, TN_REPLACE, f->base.stream, &lease, &view));
    assert_int_equal(budget_of(f->base.scope).kept_bytes, 0);
    EXPECT_OK(tn_scope_budget_set(f->base.scope, 0));
    EXPECT_OK(tn_scope_budget_set(f->base.scope, COL_BYTES));
    EXPECT_OK(tn_lease_abandon(lease));
    assert_int_equal(fixture_state(first, TN_PLANE_COL), TN_PLANE_VALID);
    assert_int_equal(budget_of(f->base.scope).kept_bytes, 0);
    use(f, first);
    assert_int_equal(budget_of(f->base.scope).kept_bytes, COL_BYTES);
}

static void the_budget_counts_only_what_it_keeps(void **state) {
    const budget_fixture *f = *state;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope elsewhere = {0};
    EXPECT_OK(tn_scope_budget_set(f->base.scope, (size_t)LAYERS * COL_BYTES));
    for (int i = 0; i < LAYERS; i++)
        use(f, f->layers[i]);
    EXPECT_OK(tn_plane_drop(f->layers[0], TN_PLANE_COL, f->base.stream));
    assert_int_equal(budget_of(f->base.scope).kept_bytes, 5 * COL_BYTES);
    fixture_write(f->layers[1], TN_PLANE_ROW, f->base.stream); /* COL was stale: freed */
    assert_int_equal(budget_of(f->base.scope).kept_bytes, 4 * COL_BYTES);
    fixture_write(f->layers[2], TN_PLANE_COL, f->base.stream); /* written: not to be derived */
    assert_int_equal(budget_of(f->base.scope).kept_bytes, 3 * COL_BYTES);
    EXPECT_OK(tn_tensor_destroy(f->layers[3], f->base.stream));
    assert_int_equal(budget_of(f->base.scope).kept_bytes, 2 * COL_BYTES);
    config.parent = f->base.scope;
    EXPECT_OK(tn_scope_create(&config, &elsewhere));
    EXPECT_OK(tn_tensor_move(f->layers[4], elsewhere));
    assert_int_equal(budget_of(f->base.scope).kept_bytes, COL_BYTES);
    assert_int_equal(fixture_state(f->layers[4], TN_PLANE_COL), TN_PLANE_VALID);
    EXPECT_OK(tn_plane_drop(f->layers[5], TN_PLANE_ROW, f->base.stream)); /* COL: the last copy */
    EXPECT_OK(tn_scope_budget_set(f->base.scope, 0));
    assert_int_equal(budget_of(f->base.scope).kept_bytes, 0);
    assert_int_equal(fixture_state(f->layers[5], TN_PLANE_COL), TN_PLANE_VALID);
}

static void a_nearer_budget_takes_over_at_the_next_release(void **state) {
    const budget_fixture *f = *state;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope block = {0};
    config.parent = f->base.scope;
    EXPECT_OK(tn_scope_create(&config, &block));
    tn_tensor w = weight(&f->base, block, 128);
    EXPECT_OK(tn_scope_budget_set(f->base.scope, COL_BYTES));
    use(f, w);
    assert_int_equal(budget_of(block).kept_bytes, COL_BYTES); /* the root's, which it is under */
    EXPECT_OK(tn_scope_budget_set(block, (size_t)2 * COL_BYTES));
    assert_int_equal(budget_of(block).kept_bytes, 0);
    assert_int_equal(budget_of(f->base.scope).kept_bytes, COL_BYTES);
    EXPECT_OK(tn_plane_release(w, TN_PLANE_COL, f->base.stream));
    assert_int_equal(budget_of(block).kept_bytes, COL_BYTES);
    assert_int_equal(budget_of(f->base.scope).kept_bytes, 0);
    EXPECT_OK(tn_scope_close(block));
    assert_int_equal(budget_of(f->base.scope).kept_bytes, 0);
    EXPECT_STATUS(tn_scope_budget_set(block, 0), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_scope_budget_get(f->base.scope, NULL), TN_INVALID_ARGUMENT);
}

static void a_policy_that_is_not_budget_ends_the_keeping(void **state) {
    const budget_fixture *f = *state;
    EXPECT_OK(tn_scope_budget_set(f->base.scope, COL_BYTES));
    use(f, f->layers[0]);
    EXPECT_OK(tn_tensor_set_policy(f->layers[0], TN_POLICY_KEEP));
    EXPECT_OK(tn_plane_release(f->layers[0], TN_PLANE_COL, f->base.stream));
    assert_int_equal(budget_of(f->base.scope).kept_bytes, 0);
    assert_int_equal(col_bytes(f), COL_BYTES); /* KEEP has it */
}

static uint64_t next_random(uint64_t *seed) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *seed >> 33;
}

/* Sizes, uses, budgets and drops at random: use() checks the books after each. */
static void random_uses_stay_within_the_budget(void **state) {
    const budget_fixture *f = *state;
    for (uint64_t first = 1; first <= 4; first++) {
        uint64_t seed = random_seed = first;
        tn_tensor wide[3];
        for (int i = 0; i < 3; i++)
            wide[i] = weight(&f->base, f->base.scope, 512);
        for (int step = 0; step < 500; step++) {
            random_step = step;
            uint64_t which = next_random(&seed) % (LAYERS + 3);
            tn_tensor tensor = which < LAYERS ? f->layers[which] : wide[which - LAYERS];
            if (next_random(&seed) % 32 == 0) {
                size_t bytes = next_random(&seed) % ((uint64_t)5 * WIDE_COL_BYTES);
                EXPECT_OK(tn_scope_budget_set(f->base.scope, bytes));
            }
            if (next_random(&seed) % 16 == 0)
                EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f->base.stream));
            use(f, tensor);
        }
        for (int i = 0; i < 3; i++)
            EXPECT_OK(tn_tensor_destroy(wide[i], f->base.stream));
    }
}

int main(void) {
#define WITH_FIXTURE(test) cmocka_unit_test_setup_teardown(test, open_fixture, close_fixture)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(without_a_budget_nothing_is_kept),
        WITH_FIXTURE(a_cycle_keeps_the_same_planes),
        WITH_FIXTURE(a_walk_there_and_back_keeps_the_same_planes),
        WITH_FIXTURE(the_most_wanted_displaces_the_least),
        WITH_FIXTURE(old_wants_fade),
        WITH_FIXTURE(worth_is_for_the_bytes),
        WITH_FIXTURE(a_plane_beyond_the_budget_displaces_nothing),
        WITH_FIXTURE(a_smaller_budget_drops_at_once_or_says_why_not),
        WITH_FIXTURE(a_leased_plane_is_no_victim),
        WITH_FIXTURE(a_plane_that_is_replaced_is_not_kept),
        WITH_FIXTURE(the_budget_counts_only_what_it_keeps),
        WITH_FIXTURE(a_nearer_budget_takes_over_at_the_next_release),
        WITH_FIXTURE(a_policy_that_is_not_budget_ends_the_keeping),
        WITH_FIXTURE(random_uses_stay_within_the_budget),
    };
    return cmocka_run_group_tests_name("unit/budget_planes", tests, NULL, NULL);
}
