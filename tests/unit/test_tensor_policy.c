/* How long derived planes live: the policies, what DEFAULT means, and which formats are eligible.
 *
 * A frozen 2D weight gives its COL plane up directly after dgrad, and no other tensor is touched.
 */
#include "tensor_fixture.h"

#include <stdlib.h>

#include "options.h"

enum { PLANE_BYTES = 256 * 128 + 2 * 4 * 4, COL_BYTES = 256 * 128 + 1 * 4 * 4 }; /* 256 x 128 */

static void set_release_option(const char *value) {
    if (value)
        setenv("TENURE_RELEASE_FROZEN_COLUMNWISE", value, 1);
    else
        unsetenv("TENURE_RELEASE_FROZEN_COLUMNWISE");
    tn__options_reload();
}

static int close_fixture(void **state) {
    set_release_option(NULL);
    tensor_fixture_close(*state);
    return 0;
}

static tn_tensor weight(const tensor_fixture *f, tn_plane_policy policy, int frozen) {
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 256, 128, "w");
    EXPECT_OK(tn_tensor_set_policy(tensor, policy));
    EXPECT_OK(tn_tensor_set_frozen(tensor, frozen));
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    return tensor;
}

static tn_plane_policy policy_of(tn_tensor tensor) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    return info.policy;
}

/* What dgrad does: reads COL, then is done with it. */
static void read_and_release(tn_tensor tensor, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_READ, stream, &lease, &view));
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_COL, stream));
}

static void default_is_keep_without_the_option(void **state) {
    const tensor_fixture *f = *state;
    set_release_option(NULL);
    tn_tensor tensor = weight(f, TN_POLICY_DEFAULT, 1);
    assert_int_equal(policy_of(tensor), TN_POLICY_KEEP);
    read_and_release(tensor, f->stream);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES + COL_BYTES);
}

static void default_releases_frozen_2d_weights_with_the_option(void **state) {
    const tensor_fixture *f = *state;
    set_release_option("1");
    tn_tensor tensor = weight(f, TN_POLICY_DEFAULT, 1);
    assert_int_equal(policy_of(tensor), TN_POLICY_UNTIL_LAST_USE);
    for (int step = 0; step < 3; step++) {
        read_and_release(tensor, f->stream);
        assert_int_equal(fixture_ledger(f->scope).data_bytes[TN_PLANE_COL], 0);
        assert_int_equal(fixture_ledger(f->scope).scale_bytes[TN_PLANE_COL], 0);
        assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    }
    assert_int_equal(fixture_ledger(f->scope).peak_total_bytes, PLANE_BYTES + COL_BYTES);
    assert_int_equal(fixture_ledger(f->scope).peak_plane_bytes[TN_PLANE_COL], COL_BYTES);
}

static void the_policy_follows_freezing_and_thawing(void **state) {
    const tensor_fixture *f = *state;
    set_release_option("1");
    tn_tensor tensor = weight(f, TN_POLICY_DEFAULT, 0);
    assert_int_equal(policy_of(tensor), TN_POLICY_KEEP);
    read_and_release(tensor, f->stream); /* trainable: kept */
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES + COL_BYTES);
    EXPECT_OK(tn_tensor_set_frozen(tensor, 1)); /* frozen later, with both planes */
    assert_int_equal(policy_of(tensor), TN_POLICY_UNTIL_LAST_USE);
    read_and_release(tensor, f->stream);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    EXPECT_OK(tn_tensor_set_frozen(tensor, 0));
    read_and_release(tensor, f->stream);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES + COL_BYTES);
}

static void a_policy_of_its_own_wins_over_the_option(void **state) {
    const tensor_fixture *f = *state;
    set_release_option("1");
    tn_tensor keep = weight(f, TN_POLICY_KEEP, 1);
    read_and_release(keep, f->stream);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES + COL_BYTES);
    set_release_option("0");
    EXPECT_OK(tn_tensor_set_policy(keep, TN_POLICY_UNTIL_LAST_USE));
    read_and_release(keep, f->stream);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    EXPECT_STATUS(tn_tensor_set_policy(keep, TN_POLICY_COUNT), TN_INVALID_ARGUMENT);
    assert_int_equal(policy_of(keep), TN_POLICY_UNTIL_LAST_USE);
}

static void a_trainable_weight_is_not_released(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = weight(f, TN_POLICY_UNTIL_LAST_USE, 0);
    read_and_release(tensor, f->stream);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES + COL_BYTES);
}

static void formats_that_can_not_derive_are_untouched(void **state) {
    const tensor_fixture *f = *state;
    set_release_option("1");
    tn_tensor scaled = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_1D, 256, 128, "1d");
    tn_tensor plain = fixture_tensor(f, TN_FORMAT_PLAIN, 256, 128, "plain");
    EXPECT_OK(tn_tensor_set_frozen(scaled, 1));
    EXPECT_OK(tn_tensor_set_frozen(plain, 1));
    assert_int_equal(policy_of(scaled), TN_POLICY_KEEP);
    assert_int_equal(policy_of(plain), TN_POLICY_KEEP);
    EXPECT_OK(tn_tensor_set_policy(scaled, TN_POLICY_UNTIL_LAST_USE));
    fixture_write(scaled, TN_PLANE_ROW, f->stream);
    fixture_write(scaled, TN_PLANE_COL, f->stream); /* stales ROW, which stays */
    fixture_write(plain, TN_PLANE_DATA, f->stream);
    size_t owned = fixture_owned_bytes(f);
    EXPECT_OK(tn_plane_release(scaled, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_plane_release(scaled, TN_PLANE_ROW, f->stream));
    EXPECT_OK(tn_plane_release(plain, TN_PLANE_DATA, f->stream));
    assert_int_equal(fixture_owned_bytes(f), owned);
    assert_int_equal(fixture_state(scaled, TN_PLANE_COL), TN_PLANE_VALID);
    assert_int_equal(fixture_state(scaled, TN_PLANE_ROW), TN_PLANE_STALE);
    assert_int_equal(fixture_state(plain, TN_PLANE_DATA), TN_PLANE_VALID);
}

/* Its planes derive from each other as 2D ones do, yet it is not what the policy is for. */
static void one_scale_for_a_tensor_is_untouched(void **state) {
    const tensor_fixture *f = *state;
    set_release_option("1");
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_TENSOR, 256, 128, "per tensor");
    EXPECT_OK(tn_format_set_derive(TN_FORMAT_FP8_TENSOR, fixture_derive));
    EXPECT_OK(tn_tensor_set_frozen(tensor, 1));
    assert_int_equal(policy_of(tensor), TN_POLICY_KEEP);
    EXPECT_OK(tn_tensor_set_policy(tensor, TN_POLICY_UNTIL_LAST_USE));
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    size_t owned = fixture_owned_bytes(f);
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_COL, f->stream));
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_VALID);
    fixture_write(tensor, TN_PLANE_ROW, f->stream); /* stales COL, which stays */
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_STALE);
    assert_int_equal(fixture_owned_bytes(f), owned);
}

static void release_leaves_a_leased_plane_and_the_last_copy(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = weight(f, TN_POLICY_UNTIL_LAST_USE, 1);
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_ROW, f->stream)); /* COL is absent */
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_VALID);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_READ, f->other, &lease, &view));
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_COL, f->stream));
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_VALID);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_COL, f->stream));
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_ABSENT);
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_COL, f->stream)); /* absent: success */
}

static void a_stale_plane_is_freed_at_the_end_of_the_write_unless_kept(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = weight(f, TN_POLICY_UNTIL_LAST_USE, 0);
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f->stream, &lease, &view));
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_STALE);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES + COL_BYTES); /* it may be abandoned */
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    EXPECT_OK(tn_tensor_set_policy(tensor, TN_POLICY_KEEP));
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_STALE);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES + COL_BYTES);
}

/* L1: sixteen frozen weights; with release the COL bytes alive after backward are 0, and only one
 * weight's COL is ever alive at a time. */
static void a_frozen_stack_saves_exactly_its_col_planes(void **state) {
    const tensor_fixture *f = *state;
    enum { LAYERS = 16 };
    tn_tensor layers[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        layers[i] = weight(f, TN_POLICY_KEEP, 1);
    for (int i = LAYERS - 1; i >= 0; i--)
        read_and_release(layers[i], f->stream);
    tn_ledger kept = fixture_ledger(f->scope);
    assert_int_equal(kept.data_bytes[TN_PLANE_COL] + kept.scale_bytes[TN_PLANE_COL],
                     LAYERS * COL_BYTES);
    for (int i = 0; i < LAYERS; i++) {
        EXPECT_OK(tn_tensor_set_policy(layers[i], TN_POLICY_UNTIL_LAST_USE));
        EXPECT_OK(tn_plane_release(layers[i], TN_PLANE_COL, f->stream));
    }
    EXPECT_OK(tn_scope_ledger_reset_peaks(f->scope));
    for (int i = LAYERS - 1; i >= 0; i--)
        read_and_release(layers[i], f->stream);
    tn_ledger released = fixture_ledger(f->scope);
    assert_int_equal(released.data_bytes[TN_PLANE_COL] + released.scale_bytes[TN_PLANE_COL], 0);
    assert_int_equal(kept.total_bytes - released.total_bytes, LAYERS * COL_BYTES);
    assert_int_equal(released.peak_plane_bytes[TN_PLANE_COL], COL_BYTES);
    assert_int_equal(kept.peak_total_bytes - released.peak_total_bytes, (LAYERS - 1) * COL_BYTES);
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, close_fixture)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(default_is_keep_without_the_option),
        WITH_FIXTURE(default_releases_frozen_2d_weights_with_the_option),
        WITH_FIXTURE(the_policy_follows_freezing_and_thawing),
        WITH_FIXTURE(a_policy_of_its_own_wins_over_the_option),
        WITH_FIXTURE(a_trainable_weight_is_not_released),
        WITH_FIXTURE(formats_that_can_not_derive_are_untouched),
        WITH_FIXTURE(one_scale_for_a_tensor_is_untouched),
        WITH_FIXTURE(release_leaves_a_leased_plane_and_the_last_copy),
        WITH_FIXTURE(a_stale_plane_is_freed_at_the_end_of_the_write_unless_kept),
        WITH_FIXTURE(a_frozen_stack_saves_exactly_its_col_planes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
