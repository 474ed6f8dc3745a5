/* Where a tensor's policy comes from: itself, the nearest scope, the process, the environment; and
 * that no policy, wherever it is from, touches what can not be derived again.
 */
#include "tensor_fixture.h"

#include <stdlib.h>

#include "options.h"

enum { ROW_BYTES = 256 * 128 + 2 * 4 * 4, COL_BYTES = 256 * 128 + 1 * 4 * 4 }; /* 256 x 128 */

static void set_variable(const char *name, const char *value) {
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
    tn__options_reload();
}

static int close_fixture(void **state) {
    EXPECT_OK(tn_policy_default_set(TN_POLICY_DEFAULT));
    set_variable("TENURE_PLANE_POLICY", NULL);
    set_variable("TENURE_RELEASE_FROZEN_COLUMNWISE", NULL);
    tensor_fixture_close(*state);
    return 0;
}

static tn_scope child(tn_scope parent, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = parent;
    config.kind = TN_SCOPE_LAYER;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_tensor tensor_in(tn_scope scope, tn_format format) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = format;
    config.dtype = format == TN_FORMAT_PLAIN ? TN_BF16 : TN_E4M3;
    config.rank = 2;
    config.shape[0] = 256, config.shape[1] = 128;
    config.frozen = 1;
    config.name = "w";
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    return tensor;
}

static tn_plane_policy policy_of(tn_tensor tensor) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    return info.policy;
}

/* Each line takes one source away; what is left says what comes next. */
static void the_nearest_source_wins(void **state) {
    const tensor_fixture *f = *state;
    tn_scope block = child(f->scope, "block"), layer = child(block, "layer");
    tn_tensor w = tensor_in(layer, TN_FORMAT_FP8_BLOCK_2D);
    EXPECT_OK(tn_tensor_set_policy(w, TN_POLICY_UNTIL_LAST_USE));
    EXPECT_OK(tn_scope_policy_set(layer, TN_POLICY_KEEP));
    EXPECT_OK(tn_scope_policy_set(f->scope, TN_POLICY_UNTIL_BACKWARD_END));
    EXPECT_OK(tn_policy_default_set(TN_POLICY_UNTIL_LAST_USE));
    set_variable("TENURE_PLANE_POLICY", "until_backward_end");
    set_variable("TENURE_RELEASE_FROZEN_COLUMNWISE", "1");
    assert_int_equal(policy_of(w), TN_POLICY_UNTIL_LAST_USE);
    EXPECT_OK(tn_tensor_set_policy(w, TN_POLICY_DEFAULT));
    assert_int_equal(policy_of(w), TN_POLICY_KEEP); /* layer's */
    EXPECT_OK(tn_scope_policy_set(layer, TN_POLICY_DEFAULT));
    assert_int_equal(policy_of(w), TN_POLICY_UNTIL_BACKWARD_END); /* model's, through block */
    EXPECT_OK(tn_scope_policy_set(f->scope, TN_POLICY_DEFAULT));
    assert_int_equal(policy_of(w), TN_POLICY_UNTIL_LAST_USE); /* the process's */
    EXPECT_OK(tn_policy_default_set(TN_POLICY_DEFAULT));
    assert_int_equal(policy_of(w), TN_POLICY_UNTIL_BACKWARD_END); /* TENURE_PLANE_POLICY */
    set_variable("TENURE_PLANE_POLICY", NULL);
    assert_int_equal(policy_of(w), TN_POLICY_UNTIL_LAST_USE); /* frozen, and the variable is set */
    EXPECT_OK(tn_tensor_set_frozen(w, 0));
    assert_int_equal(policy_of(w), TN_POLICY_KEEP);
}

static void a_tensor_that_moves_comes_under_its_new_scope(void **state) {
    const tensor_fixture *f = *state;
    tn_scope keep = child(f->scope, "keep"), end = child(f->scope, "end");
    EXPECT_OK(tn_scope_policy_set(keep, TN_POLICY_KEEP));
    EXPECT_OK(tn_scope_policy_set(end, TN_POLICY_UNTIL_LAST_USE));
    tn_tensor w = tensor_in(keep, TN_FORMAT_FP8_BLOCK_2D);
    assert_int_equal(policy_of(w), TN_POLICY_KEEP);
    EXPECT_OK(tn_tensor_move(w, end));
    assert_int_equal(policy_of(w), TN_POLICY_UNTIL_LAST_USE);
}

static void what_can_not_be_derived_is_kept_by_every_policy(void **state) {
    const tensor_fixture *f = *state;
    static const tn_format formats[] = {TN_FORMAT_PLAIN, TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_MXFP8};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        tn_tensor tensor = tensor_in(f->scope, formats[i]);
        for (int policy = TN_POLICY_KEEP; policy < TN_POLICY_COUNT; policy++) {
            EXPECT_OK(tn_tensor_set_policy(tensor, (tn_plane_policy)policy));
            int is_offload = policy == TN_POLICY_OFFLOAD; /* which loses nothing */
            assert_int_equal(policy_of(tensor), is_offload ? TN_POLICY_OFFLOAD : TN_POLICY_KEEP);
        }
    }
}

/* The rule of frozen weights is 2D's alone; the policies that do not ask for
 * frozen weights are for all planes that can be derived. */
static void the_frozen_rule_is_not_for_other_formats(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = tensor_in(f->scope, TN_FORMAT_FP8_TENSOR);
    set_variable("TENURE_RELEASE_FROZEN_COLUMNWISE", "1");
    assert_int_equal(policy_of(tensor), TN_POLICY_KEEP);
    EXPECT_OK(tn_tensor_set_policy(tensor, TN_POLICY_UNTIL_LAST_USE));
    assert_int_equal(policy_of(tensor), TN_POLICY_KEEP);
    EXPECT_OK(tn_tensor_set_policy(tensor, TN_POLICY_UNTIL_BACKWARD_END));
    assert_int_equal(policy_of(tensor), TN_POLICY_UNTIL_BACKWARD_END);
}

/* L1.4: made with both planes, trainable at first, and frozen later by a scope's policy. */
static void a_weight_with_both_planes_saves_at_its_next_release(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor w = tensor_in(f->scope, TN_FORMAT_FP8_BLOCK_2D);
    tn_lease row, col;
    tn_plane_view view;
    EXPECT_OK(tn_tensor_set_frozen(w, 0));
    EXPECT_OK(tn_scope_policy_set(f->scope, TN_POLICY_UNTIL_LAST_USE));
    EXPECT_OK(tn_lease_begin(w, TN_PLANE_ROW, TN_WRITE, f->stream, &row, &view));
    EXPECT_OK(tn_lease_begin(w, TN_PLANE_COL, TN_WRITE, f->stream, &col, &view));
    EXPECT_OK(tn_lease_end(row));
    EXPECT_OK(tn_lease_end(col));
    EXPECT_OK(tn_plane_release(w, TN_PLANE_COL, f->stream));
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + COL_BYTES);
    EXPECT_OK(tn_tensor_set_frozen(w, 1));
    EXPECT_OK(tn_plane_release(w, TN_PLANE_COL, f->stream));
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES);
}

static void unknown_policies_and_dead_scopes_are_refused(void **state) {
    const tensor_fixture *f = *state;
    tn_scope layer = child(f->scope, "layer");
    EXPECT_STATUS(tn_scope_policy_set(layer, TN_POLICY_COUNT), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_scope_policy_set(layer, (tn_plane_policy)-1), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_policy_default_set(TN_POLICY_COUNT), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_scope_close(layer));
    EXPECT_STATUS(tn_scope_policy_set(layer, TN_POLICY_KEEP), TN_STALE_HANDLE);
    assert_string_equal(tn_policy_name(TN_POLICY_COUNT), "unknown policy");
}

static void the_variable_takes_every_policy_by_its_name(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor w = tensor_in(f->scope, TN_FORMAT_FP8_BLOCK_2D);
    for (int policy = TN_POLICY_KEEP; policy < TN_POLICY_COUNT; policy++) {
        set_variable("TENURE_PLANE_POLICY", tn_policy_name((tn_plane_policy)policy));
        assert_int_equal(policy_of(w), policy);
    }
    set_variable("TENURE_PLANE_POLICY", "sometimes"); /* warns */
    assert_int_equal(policy_of(w), TN_POLICY_KEEP);
    assert_null(tn__policy_choices[TN_POLICY_COUNT]);
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, close_fixture)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(the_nearest_source_wins),
        WITH_FIXTURE(a_tensor_that_moves_comes_under_its_new_scope),
        WITH_FIXTURE(what_can_not_be_derived_is_kept_by_every_policy),
        WITH_FIXTURE(the_frozen_rule_is_not_for_other_formats),
        WITH_FIXTURE(a_weight_with_both_planes_saves_at_its_next_release),
        WITH_FIXTURE(unknown_policies_and_dead_scopes_are_refused),
        WITH_FIXTURE(the_variable_takes_every_policy_by_its_name),
    };
    return cmocka_run_group_tests_name("unit/policy_scopes", tests, NULL, NULL);
}
