/* Columnwise planes of frozen weights, each case on the host driver and on the
 * simulated device: bytes to the byte on both, gradients bit for bit on the host.
 *
 * W is what one COL plane takes with its scales.
 */
#include "test_frozen.h"

#include <stdlib.h>

#include "options.h"

enum { LAYERS = 5, STEPS = 3, TOKENS = 70, WIDTH = 200 };

static const tn_plane_policy policies[] = {TN_POLICY_KEEP, TN_POLICY_UNTIL_LAST_USE,
                                           TN_POLICY_SCRATCH};
enum { POLICIES = sizeof policies / sizeof *policies };

static test_ops open_ops(int is_sim) {
    return is_sim ? test_ops_open(test_open_sim(0, 0)) : test_ops_open_host();
}

static void close_ops(test_ops *ops, int is_sim) {
    if (!is_sim) {
        test_ops_close_host(ops);
        return;
    }
    test_ops_close(ops);
    test_close_sim(ops->device);
}

static frozen_config config_of(tn_plane_policy policy) {
    return (frozen_config){
        .layers = LAYERS, .steps = STEPS, .tokens = TOKENS, .width = WIDTH, .policy = policy};
}

/* `expected` in planes, one for each policy, and in buffers of the slot that is made at first need;
 * all policies give the same gradients. */
typedef struct planes {
    size_t at_first, kept, peak, buffers;
    int buffers_from; /* the step that makes the slot */
} planes;

static void run_policies(const frozen_config *base, const planes expected[POLICIES]) {
    const size_t plane = frozen_plane_bytes(base->width);
    for (int is_sim = 0; is_sim < 2; is_sim++) {
        frozen_result results[POLICIES];
        for (int p = 0; p < POLICIES; p++) {
            test_ops ops = open_ops(is_sim);
            frozen_config config = *base;
            config.policy = policies[p];
            frozen_bytes bytes = {
                expected[p].at_first * plane, expected[p].kept * plane, expected[p].peak * plane,
                expected[p].buffers * frozen_buffer_bytes(base->width), expected[p].buffers_from};
            frozen_run(&ops, &config, &results[p]);
            frozen_expect(&config, &results[p], &bytes);
            if (p > 0) frozen_expect_same_gradients(&config, &results[0], &results[p]);
            close_ops(&ops, is_sim);
        }
        for (int p = 0; p < POLICIES; p++)
            frozen_result_free(&results[p]);
    }
}

static void a_plane_lives_as_its_policy_says(void **state) {
    frozen_config config = config_of(TN_POLICY_KEEP);
    (void)state;
    run_policies(&config,
                 (const planes[]){{0, LAYERS, LAYERS, 0, 0}, {0, 0, 1, 0, 0}, {0, 0, 0, 1, 0}});
}

/* The first backward lets go of what the weights were created with, one layer after another. */
static void weights_created_with_both_planes_get_the_same_saving(void **state) {
    frozen_config config = config_of(TN_POLICY_KEEP);
    (void)state;
    config.has_both_planes = 1;
    run_policies(&config, (const planes[]){{LAYERS, LAYERS, LAYERS, 0, 0},
                                           {LAYERS, 0, LAYERS, 0, 0},
                                           {LAYERS, 0, LAYERS, 1, 1}});
}

static void layers_below_the_first_gradient_make_no_columnwise_plane(void **state) {
    frozen_config config = config_of(TN_POLICY_KEEP);
    (void)state;
    config.first_with_dgrad = 2;
    run_policies(&config, (const planes[]){
                              {0, LAYERS - 2, LAYERS - 2, 0, 0}, {0, 0, 1, 0, 0}, {0, 0, 0, 1, 0}});
    config.first_with_dgrad = LAYERS;
    run_policies(&config, (const planes[]){{0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}});
}

/* ROW is read by the forward that is computed again, then COL is derived: no plane more. */
static void recomputation_changes_nothing(void **state) {
    frozen_config config = config_of(TN_POLICY_KEEP);
    (void)state;
    config.recomputes = 1;
    run_policies(&config,
                 (const planes[]){{0, LAYERS, LAYERS, 0, 0}, {0, 0, 1, 0, 0}, {0, 0, 0, 1, 0}});
}

/* The last layer's forward has the plane of the first dgrad derived meanwhile, and each dgrad the
 * next layer's: one more is alive, or one more buffer; a slot of one buffer has no room for it, and
 * each is derived when it is read. */
static void deriving_ahead_takes_one_plane_more(void **state) {
    frozen_config config = config_of(TN_POLICY_KEEP);
    (void)state;
    config.derives_ahead = 1;
    config.scratch_buffers = 2;
    run_policies(&config,
                 (const planes[]){{1, LAYERS, LAYERS, 0, 0}, {1, 0, 2, 0, 0}, {0, 0, 0, 2, 0}});
    config.scratch_buffers = 1;
    run_policies(&config,
                 (const planes[]){{1, LAYERS, LAYERS, 0, 0}, {1, 0, 2, 0, 0}, {0, 0, 0, 1, 0}});
}

/* The budget keeps whole planes; the rest are derived for one dgrad each. */
static void a_budget_keeps_as_many_planes_as_fit(void **state) {
    static const size_t fitting[] = {0, 1, 3, LAYERS};
    const size_t plane = frozen_plane_bytes(WIDTH);
    (void)state;
    for (int i = 0; i < 8; i++) {
        const int is_sim = i % 2;
        const size_t kept = fitting[i / 2];
        const size_t peak = kept < LAYERS ? kept + 1 : kept;
        frozen_bytes bytes = {0, kept * plane, peak * plane, 0, 0};
        frozen_config config = config_of(TN_POLICY_BUDGET);
        frozen_result result;
        test_ops ops = open_ops(is_sim);
        EXPECT_OK(tn_scope_budget_set(ops.scope, kept * plane + plane / 2));
        frozen_run(&ops, &config, &result);
        frozen_expect(&config, &result, &bytes);
        frozen_result_free(&result);
        close_ops(&ops, is_sim);
    }
}

/* Trainable in the first step: its planes stay. From the second on they go. */
static void weights_that_become_frozen_later_get_the_saving_from_then_on(void **state) {
    const size_t plane = frozen_plane_bytes(WIDTH);
    (void)state;
    for (int is_sim = 0; is_sim < 2; is_sim++) {
        test_ops ops = open_ops(is_sim);
        frozen_config config = config_of(TN_POLICY_UNTIL_LAST_USE);
        frozen_result result;
        config.frozen_from = 1;
        frozen_run(&ops, &config, &result);
        assert_int_equal(result.col_after_forward[0], 0);
        assert_int_equal(result.col_after_backward[0], LAYERS * plane);
        assert_int_equal(result.col_after_forward[1], LAYERS * plane);
        assert_int_equal(result.col_after_backward[1], 0);
        assert_int_equal(result.col_after_forward[2], 0);
        assert_int_equal(result.col_after_backward[2], 0);
        assert_int_equal(result.total_after_step[0] - result.total_after_step[1], LAYERS * plane);
        frozen_result_free(&result);
        close_ops(&ops, is_sim);
    }
}

/* Steady and peak fall by the planes of all layers, less the one that dgrad works with. */
static void what_a_release_saves_is_exact(void **state) {
    const size_t plane = frozen_plane_bytes(WIDTH);
    (void)state;
    for (int is_sim = 0; is_sim < 2; is_sim++) {
        frozen_result results[2];
        for (int p = 0; p < 2; p++) {
            test_ops ops = open_ops(is_sim);
            frozen_config config = config_of(policies[p]);
            config.tokens = 8; /* so that the most is alive in the first layer's backward */
            frozen_run(&ops, &config, &results[p]);
            close_ops(&ops, is_sim);
        }
        for (int step = 0; step < STEPS; step++)
            assert_int_equal(results[0].total_after_step[step] - results[1].total_after_step[step],
                             LAYERS * plane);
        assert_int_equal(results[0].peak_total_bytes - results[1].peak_total_bytes,
                         (LAYERS - 1) * plane);
        frozen_result_free(&results[0]);
        frozen_result_free(&results[1]);
    }
}

/* Neither the tensor nor its scopes say anything: the variable does, by either of its names. */
static void the_environment_releases_them_by_either_name(void **state) {
    static const char *const names[] = {"TENURE_RELEASE_FROZEN_COLUMNWISE",
                                        "NVTE_RELEASE_FROZEN_WEIGHT_COLUMNWISE"};
    const size_t plane = frozen_plane_bytes(WIDTH);
    (void)state;
    for (int i = 0; i < 8; i++) {
        const int is_sim = i % 2, is_on = i / 2 % 2;
        frozen_config config = config_of(TN_POLICY_DEFAULT);
        frozen_result result;
        assert_int_equal(setenv(names[i / 4], is_on ? "1" : "0", 1), 0);
        tn__options_reload();
        test_ops ops = open_ops(is_sim);
        frozen_run(&ops, &config, &result);
        frozen_bytes bytes = {0, is_on ? 0 : LAYERS * plane, (is_on ? 1 : LAYERS) * plane, 0, 0};
        frozen_expect(&config, &result, &bytes);
        frozen_result_free(&result);
        close_ops(&ops, is_sim);
        assert_int_equal(unsetenv(names[i / 4]), 0);
        tn__options_reload();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plane_lives_as_its_policy_says),
        cmocka_unit_test(weights_created_with_both_planes_get_the_same_saving),
        cmocka_unit_test(layers_below_the_first_gradient_make_no_columnwise_plane),
        cmocka_unit_test(recomputation_changes_nothing),
        cmocka_unit_test(deriving_ahead_takes_one_plane_more),
        cmocka_unit_test(a_budget_keeps_as_many_planes_as_fit),
        cmocka_unit_test(weights_that_become_frozen_later_get_the_saving_from_then_on),
        cmocka_unit_test(what_a_release_saves_is_exact),
        cmocka_unit_test(the_environment_releases_them_by_either_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
