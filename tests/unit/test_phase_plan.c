/* Which planes of a weight a phase reads, in order, for each format. */
#include "tensor_fixture.h"

#include <stdio.h>
#include <string.h>

typedef struct plan_case {
    tn_phase phase;
    int wants_dgrad, recomputes;
    const char *planes; /* as "ROW COL": a * follows what is derived */
} plan_case;

static tn_phase_config config_of(const plan_case *expected) {
    tn_phase_config config = TN_PHASE_CONFIG_INIT;
    config.phase = expected->phase;
    config.wants_dgrad = expected->wants_dgrad;
    config.recomputes = expected->recomputes;
    return config;
}

static void expect_plan(tn_tensor tensor, const plan_case *expected) {
    tn_phase_config config = config_of(expected);
    tn_phase_plan plan = TN_PHASE_PLAN_INIT;
    char text[32] = "";
    size_t used = 0;
    EXPECT_OK(tn_phase_plan_get(tensor, &config, &plan));
    for (int i = 0; i < plan.count; i++) {
        tn_plane plane = plan.reads[i].plane;
        int is_derived = plan.reads[i].origin == TN_ORIGIN_DERIVED;
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s%s", i ? " " : "",
                                 tn_plane_name(plane), is_derived ? "*" : "");
        assert_true(used < sizeof text);
        assert_int_equal(plan.reads[i].source, is_derived ? TN_PLANE_ROW : plane);
    }
    if (strcmp(text, expected->planes) != 0) {
        fail_msg("%s, dgrad %d, recompute %d: %s, expected %s", tn_phase_name(expected->phase),
                 expected->wants_dgrad, expected->recomputes, text, expected->planes);
    }
}

static void expect_plans(tn_format format, int is_sim, const plan_case *cases, int count) {
    tensor_fixture f;
    if (is_sim)
        tensor_fixture_open_sim(&f);
    else
        tensor_fixture_open(&f);
    tn_tensor tensor = fixture_tensor(&f, format, 256, 128, "w");
    for (int i = 0; i < count; i++)
        expect_plan(tensor, &cases[i]);
    assert_int_equal(fixture_owned_bytes(&f), 0); /* a plan makes nothing */
    tensor_fixture_close(&f);
}

static void a_2d_weight_reads_row_then_derives_col(void **state) {
    (void)state;
    static const plan_case cases[] = {
        {TN_PHASE_FORWARD, 1, 0, "ROW"},       {TN_PHASE_BACKWARD, 1, 0, "COL*"},
        {TN_PHASE_BACKWARD, 1, 1, "ROW COL*"}, {TN_PHASE_FORWARD, 0, 0, "ROW"},
        {TN_PHASE_BACKWARD, 0, 0, ""},         {TN_PHASE_BACKWARD, 0, 1, "ROW"},
        {TN_PHASE_RECOMPUTE, 1, 1, "ROW"},     {TN_PHASE_UPDATE, 1, 1, ""},
    };
    expect_plans(TN_FORMAT_FP8_BLOCK_2D, 0, cases, 8);
    expect_plans(TN_FORMAT_FP8_BLOCK_2D, 1, cases, 8);
}

/* Each plane of 1D has scales of its own: the plan says that COL has to be given. */
static void a_1d_weight_is_given_each_plane(void **state) {
    (void)state;
    static const plan_case cases[] = {{TN_PHASE_FORWARD, 1, 0, "ROW"},
                                      {TN_PHASE_BACKWARD, 1, 0, "COL"},
                                      {TN_PHASE_BACKWARD, 1, 1, "ROW COL"},
                                      {TN_PHASE_BACKWARD, 0, 0, ""}};
    expect_plans(TN_FORMAT_FP8_BLOCK_1D, 0, cases, 4);
    expect_plans(TN_FORMAT_FP8_BLOCK_1D, 1, cases, 4);
}

static void a_plain_weight_reads_its_one_plane_once(void **state) {
    (void)state;
    static const plan_case cases[] = {{TN_PHASE_FORWARD, 1, 0, "DATA"},
                                      {TN_PHASE_BACKWARD, 1, 0, "DATA"},
                                      {TN_PHASE_BACKWARD, 1, 1, "DATA"},
                                      {TN_PHASE_BACKWARD, 0, 0, ""}};
    expect_plans(TN_FORMAT_PLAIN, 0, cases, 4);
}

/* The simulated device says that it is a Hopper. */
static void per_tensor_scaling_derives_col_on_hopper(void **state) {
    (void)state;
    static const plan_case cases[] = {{TN_PHASE_FORWARD, 1, 0, "ROW"},
                                      {TN_PHASE_BACKWARD, 1, 0, "COL*"},
                                      {TN_PHASE_BACKWARD, 1, 1, "ROW COL*"},
                                      {TN_PHASE_BACKWARD, 0, 0, ""}};
    expect_plans(TN_FORMAT_FP8_TENSOR, 1, cases, 4);
}

static void what_makes_no_plan_is_refused(void **state) {
    (void)state;
    tensor_fixture f;
    tn_phase_config config = TN_PHASE_CONFIG_INIT;
    tn_phase_plan plan = TN_PHASE_PLAN_INIT;
    tensor_fixture_open(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, 256, 128, "w");
    tn_tensor mx = fixture_tensor(&f, TN_FORMAT_MXFP8, 256, 128, "mx");
    plan.count = 7;
    EXPECT_STATUS(tn_phase_plan_get(mx, &config, &plan), TN_UNSUPPORTED);
    config.phase = TN_PHASE_NONE;
    EXPECT_STATUS(tn_phase_plan_get(tensor, &config, &plan), TN_INVALID_ARGUMENT);
    config.phase = TN_PHASE_COUNT;
    EXPECT_STATUS(tn_phase_plan_get(tensor, &config, &plan), TN_INVALID_ARGUMENT);
    config.phase = TN_PHASE_FORWARD;
    EXPECT_STATUS(tn_phase_plan_get((tn_tensor){0}, &config, &plan), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_phase_plan_get(tensor, NULL, &plan), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_phase_plan_get(tensor, &config, NULL), TN_INVALID_ARGUMENT);
    assert_int_equal(plan.count, 7);
    config.size--;
    EXPECT_STATUS(tn_phase_plan_get(tensor, &config, &plan), TN_INVALID_ARGUMENT);
    tensor_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_2d_weight_reads_row_then_derives_col),
        cmocka_unit_test(a_1d_weight_is_given_each_plane),
        cmocka_unit_test(a_plain_weight_reads_its_one_plane_once),
        cmocka_unit_test(per_tensor_scaling_derives_col_on_hopper),
        cmocka_unit_test(what_makes_no_plan_is_refused),
    };
    return cmocka_run_group_tests_name("unit/phase_plan", tests, NULL, NULL);
}
