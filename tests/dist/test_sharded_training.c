/* Training over ranks against training without: gradients of each layer, losses and master copies,
 * bit for bit, over 20 steps; and within a bound where clipping adds up norms by rank. */
#include "model_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static rank_fixture all;

static int steps(void) { return all.count > 4 ? 3 : 20; }

/* Of each mode, of which there are many. */
static int mode_steps(void) { return all.count > 3 ? 3 : 20; }

static void expect_loss(const test_model *model, const reference_model *reference, int step) {
    const float expected = reference->loss[all.rank];
    if (!(model->loss == expected))
        fail_msg("rank %d, step %d: the loss is %a, expected %a", all.rank, step,
                 (double)model->loss, (double)expected);
}

/* A step of both, held against each other before and after the update. */
static size_t step_of_both(test_model *model, reference_model *reference, int step) {
    size_t compared = 0;
    for (int micro = 0; micro < model->options.micro_batches; micro++)
        model_pass(model, step, micro);
    reference_gradients(reference, step);
    if (!model->options.update_ahead) compared = model_compare_gradients(model, reference);
    expect_loss(model, reference, step);
    model_update(model);
    reference_update(reference);
    return compared;
}

static void train(const char *name, const model_options *options, int many) {
    reference_model *reference = reference_open(&all, options);
    test_model *model = model_open(&all, options, NULL);
    size_t compared = 0;
    float first = 0.0f;
    for (int step = 0; step < many; step++) {
        compared += step_of_both(model, reference, step);
        compared += model_compare_masters(model, reference);
        if (step == 0) first = model->loss;
    }
    if (all.rank == 0)
        printf("  %-24s %d steps: %zu numbers of rank 0 bit-equal, loss %.4f to %.4f\n", name, many,
               compared, (double)first, (double)model->loss);
    assert_true(all.rank > 0 || compared > 0);
    model_close(model);
    reference_close(reference);
}

static void twenty_steps_have_the_bits_of_one_rank(void **state) {
    (void)state;
    for (int precision = MODEL_BF16; precision <= MODEL_FP8_OF_BF16; precision++) {
        static const char *const names[] = {"bf16", "FP8", "FP8 of bf16"};
        model_options options = model_options_small(2);
        options.precision = (model_precision)precision;
        train(names[precision], &options, steps());
    }
}

static void micro_batches_are_added_up_as_stated(void **state) {
    (void)state;
    model_options options = model_options_small(2);
    options.micro_batches = 2;
    train("sums of parts", &options, mode_steps());
    options.sum = TN_GRADIENT_SUM_WHOLE;
    train("whole sums", &options, mode_steps());
    options.gradient_dtype = TN_BF16;
    train("whole sums in bf16", &options, mode_steps());
    options.sum = TN_GRADIENT_SUM_SHARDED;
    train("sums of parts in bf16", &options, mode_steps());
}

static void modes_do_not_change_a_bit(void **state) {
    (void)state;
    model_options options = model_options_small(3);
    options.recompute = 1;
    options.gradient_slots = 1;
    train("computed again", &options, mode_steps());
    options.recompute = 0;
    options.gradient_slots = 0;
    options.keep_after_forward = 1;
    train("kept after forward", &options, mode_steps());
    options.micro_batches = 2;
    options.keep_after_backward = 1;
    train("kept all the step", &options, mode_steps());
    options = model_options_small(3);
    options.frozen_layers = 1;
    options.frozen_parts = 1u << BLOCK_UP | 1u << BLOCK_GAIN_1;
    train("frozen", &options, mode_steps());
}

static void layouts_do_not_change_a_bit(void **state) {
    (void)state;
    for (int layout = TN_SHARD_TILES; layout < TN_SHARD_LAYOUT_COUNT; layout++) {
        model_options options = model_options_small(2);
        options.layout = (tn_shard_layout)layout;
        train(tn_shard_layout_name(options.layout), &options, mode_steps());
    }
}

static void shards_made_of_masters_do_not_change_a_bit(void **state) {
    (void)state;
    for (int precision = MODEL_BF16; precision <= MODEL_FP8_OF_BF16; precision++) {
        model_options options = model_options_small(2);
        options.precision = (model_precision)precision;
        options.layout = precision == MODEL_FP8 ? TN_SHARD_RAGGED : TN_SHARD_AUTO;
        options.shards_from_masters = 1;
        options.keep_after_forward = precision == MODEL_FP8;
        train("shards made of masters", &options, 3);
    }
}

/* Behind each reduction: of all ways to add up, with shards that a cut goes through and without. */
static void updates_ahead_do_not_change_a_bit(void **state) {
    (void)state;
    for (int way = 0; way < 4; way++) {
        model_options options = model_options_small(3);
        options.update_ahead = 1;
        options.micro_batches = way == 0 ? 1 : 2;
        options.layout = way == 1 ? TN_SHARD_FLAT : TN_SHARD_AUTO;
        options.sum = way == 2 ? TN_GRADIENT_SUM_WHOLE : TN_GRADIENT_SUM_SHARDED;
        options.shards_from_masters = way == 3;
        options.frozen_layers = way == 0;
        options.keep_after_backward = way == 3;
        train("updated ahead", &options, 3);
    }
}

static void expect_equal_masters(const test_model *a, const test_model *b) {
    for (int layer = 0; layer < a->options.layers; layer++) {
        tn_sharded_unit_info units[2] = {TN_SHARDED_UNIT_INFO_INIT, TN_SHARDED_UNIT_INFO_INIT};
        tn_tensor_info info = TN_TENSOR_INFO_INIT;
        float *values[2];
        EXPECT_OK(tn_sharded_unit_info_get(a->sharded, layer, &units[0]));
        EXPECT_OK(tn_sharded_unit_info_get(b->sharded, layer, &units[1]));
        if (units[0].master.value == 0) continue;
        EXPECT_OK(tn_tensor_info_get(units[0].master, &info));
        const size_t bytes = (size_t)(info.rows * info.cols) * sizeof(float);
        for (int i = 0; i < 2; i++) {
            values[i] = malloc(bytes);
            assert_non_null(values[i]);
            EXPECT_OK(tn_plane_read(units[i].master, TN_PLANE_DATA, values[i], bytes, NULL, 0,
                                    all.stream));
        }
        EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
        assert_memory_equal(values[0], values[1], bytes);
        free(values[0]), free(values[1]);
    }
}

static int all_have_masters(const test_model *model, int unit, tn_tensor *master) {
    tn_sharded_unit_info info = TN_SHARDED_UNIT_INFO_INIT;
    EXPECT_OK(tn_sharded_unit_info_get(model->sharded, unit, &info));
    *master = info.master;
    return ranks_most(&all, info.master.value ? 0.0f : 1.0f) == 0.0f;
}

/* As a loader would between steps; before the first gather it may. */
static void masters_that_shards_are_made_of_are_the_updates(void **state) {
    (void)state;
    model_options options = model_options_small(2);
    tn_tensor master = {0};
    options.precision = MODEL_BF16; /* of which all shards are made */
    options.shards_from_masters = 1;
    for (int unit = 0; unit < 2; unit++) {
        test_model *model = model_open(&all, &options, NULL);
        if (!all_have_masters(model, unit, &master)) {
            model_close(model);
            continue;
        }
        EXPECT_OK(tn_plane_fill(master, TN_PLANE_DATA, 0, all.stream));
        model_step(model, 0);
        model_step(model, 1);
        EXPECT_OK(tn_plane_fill(master, TN_PLANE_DATA, 0, all.stream));
        EXPECT_STATUS(tn_sharded_forward_begin(model->sharded, unit), TN_INVALID_STATE);
        EXPECT_ERROR_HAS("were written by something else than its update");
        model_close(model);
    }
}

/* The last layer is updated, with another epsilon, before the first one is gathered for its
 * backward: that is still of the update before. */
static void a_shard_is_made_as_its_own_last_update_said(void **state) {
    (void)state;
    model_options options = model_options_small(3);
    test_model *models[2];
    options.precision = MODEL_FP8;
    options.layout = TN_SHARD_RAGGED;
    options.update_ahead = 1;
    for (int is_made = 0; is_made < 2; is_made++) {
        options.shards_from_masters = is_made;
        models[is_made] = model_open(&all, &options, NULL);
        for (int step = 0; step < 3; step++) {
            models[is_made]->options.amax_epsilon = step == 1 ? 64.0f : 0.0f;
            model_step(models[is_made], step);
        }
    }
    expect_equal_masters(models[0], models[1]);
    model_close(models[1]);
    model_close(models[0]);
}

/* Until a unit has been updated the step can be given up; from there on it goes on. */
static void a_step_updated_ahead_is_given_up_or_gone_on_with(void **state) {
    (void)state;
    model_options options = model_options_small(2);
    tn_sharded_update_args args = TN_SHARDED_UPDATE_ARGS_INIT;
    options.update_ahead = 1;
    reference_model *reference = reference_open(&all, &options);
    test_model *model = model_open(&all, &options, NULL);
    EXPECT_OK(tn_sharded_update_ahead(model->sharded, &args));
    EXPECT_STATUS(tn_sharded_update_ahead(model->sharded, &args), TN_INVALID_STATE);
    EXPECT_STATUS(tn_sharded_update(model->sharded, &args), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_sharded_update(model->sharded, NULL), TN_INVALID_STATE);
    EXPECT_OK(tn_sharded_abandon(model->sharded));
    (void)step_of_both(model, reference, 0);
    (void)model_compare_masters(model, reference);

    model_pass(model, 1, 0);
    EXPECT_STATUS(tn_sharded_abandon(model->sharded), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tn_sharded_update_ahead");
    EXPECT_STATUS(tn_sharded_update_ahead(model->sharded, &args), TN_INVALID_STATE);
    model_update(model);
    reference_gradients(reference, 1);
    reference_update(reference);
    (void)model_compare_masters(model, reference);
    model_close(model);
    reference_close(reference);
}

/* The squares are added up in another order: of n numbers, each sum is within n units of 2^-24 of
 * the whole, so the factor is within 2^-14 of the other one here; a step moves a weight by at most
 * the rate of 2^-8, and differs by that fraction of it, but for gradients that are nothing. */
static void clipping_differs_by_the_order_of_its_sum(void **state) {
    (void)state;
    model_options options = model_options_small(2);
    options.max_norm = 0.125f;
    reference_model *reference = reference_open(&all, &options);
    test_model *model = model_open(&all, &options, NULL);
    float norms[2];
    (void)step_of_both(model, reference, 0);
    const float distance = model_master_distance(model, reference);
    EXPECT_OK(tn_plane_read(tn_sharded_norm(model->sharded), TN_PLANE_DATA, &norms[0],
                            sizeof norms[0], NULL, 0, all.stream));
    EXPECT_OK(tn_plane_read(reference->norm, TN_PLANE_DATA, &norms[1], sizeof norms[1], NULL, 0,
                            all.stream));
    ranks_wait(&all);
    if (all.rank == 0)
        printf("  norm %a and %a, masters within %a\n", (double)norms[0], (double)norms[1],
               (double)distance);
    assert_true(norms[0] > options.max_norm);
    assert_true(fabsf(norms[0] - norms[1]) <= 0x1p-14f * norms[1]);
    assert_true(distance <= 0x1p-20f);
    model_close(model);
    reference_close(reference);
}

/* ---- stalls --------------------------------------------------------------------------------- */

/* A stream that stands still from one point of a backward until all of it has been put. */
typedef struct stall {
    tn_stream stream;
    int at, seen;
    ranks_gate *gate;
} stall;

static void stall_there(void *context, test_model *model, const char *after, int layer) {
    stall *s = context;
    (void)model, (void)after;
    if (after[0] == 'f') return;
    if (s->seen++ == s->at) s->gate = ranks_gate_put(&all, s->stream);
    if (layer == 0) ranks_gate_open(s->gate);
}

/* With one bucket each unit's backward waits for the reduction of the one before; nothing waits on
 * the host, or the gate would never be opened. */
static void a_stream_that_stalls_anywhere_changes_no_gradient(void **state) {
    (void)state;
    model_options options = model_options_small(3);
    options.gradient_slots = 1;
    reference_model *reference = reference_open(&all, &options);
    test_model *model = model_open(&all, &options, NULL);
    (void)step_of_both(model, reference, 0);
    model->note = stall_there;
    for (int way = 0; way < 2 * 3; way++) {
        stall s = {.stream = way % 2 ? all.stream : all.other, .at = way / 2};
        model->note_context = &s;
        (void)step_of_both(model, reference, 1 + way);
        (void)model_compare_masters(model, reference);
        ranks_gate_end(s.gate);
    }
    model_close(model);
    reference_close(reference);
}

/* Every rank's part passes FP8 by itself and is summed in fp32, as one rank does it here. */
static void gradients_in_fp8_have_the_bits_of_their_values(void **state) {
    (void)state;
    for (int way = 0; way < 3; way++) {
        model_options options = model_options_small(2);
        options.wire = TN_GRADIENT_WIRE_FP8;
        options.gradient_dtype = way == 2 ? TN_BF16 : TN_FP32;
        options.micro_batches = way == 0 ? 1 : 2;
        options.sum = way == 2 ? TN_GRADIENT_SUM_WHOLE : TN_GRADIENT_SUM_SHARDED;
        reference_model *reference = reference_open(&all, &options);
        test_model *model = model_open(&all, &options, NULL);
        reference->pieces = model;
        for (int step = 0; step < 2; step++) {
            (void)step_of_both(model, reference, step);
            (void)model_compare_masters(model, reference);
        }
        model_close(model);
        reference_close(reference);
    }
}

/* Two steps without ranks, then sharded: master copies, moments and the count of steps go along. */
static void training_goes_on_sharded_after_a_warm_up(void **state) {
    (void)state;
    model_options options = model_options_small(2);
    options.frozen_parts = 1u << BLOCK_DOWN;
    reference_model *reference = reference_open(&all, &options);
    for (int step = 0; step < 2; step++) {
        reference_gradients(reference, step);
        reference_update(reference);
    }
    test_model *model = model_open(&all, &options, reference);
    (void)model_compare_masters(model, reference);
    for (int step = 2; step < 5; step++) {
        (void)step_of_both(model, reference, step);
        (void)model_compare_masters(model, reference);
    }
    model_close(model);
    reference_close(reference);
}

/* A step that was given up in the middle of a backward leaves no trace in those that follow. */
static void a_step_given_up_changes_nothing(void **state) {
    (void)state;
    model_options options = model_options_small(2);
    options.micro_batches = 2;
    reference_model *reference = reference_open(&all, &options);
    test_model *model = model_open(&all, &options, NULL);
    (void)step_of_both(model, reference, 0);
    model_pass(model, 77, 0);
    EXPECT_OK(tn_sharded_forward_begin(model->sharded, 0));
    EXPECT_OK(tn_sharded_abandon(model->sharded));
    for (int step = 1; step < 3; step++) {
        (void)step_of_both(model, reference, step);
        (void)model_compare_masters(model, reference);
    }
    assert_int_equal(model_report(model).strays, 0);
    model_close(model);
    reference_close(reference);
}

/* An update that fails at its second unit's reduced gradient, and then at its shard, which someone
 * reads, goes on from there. */
static void an_update_that_failed_goes_on(void **state) {
    (void)state;
    const model_options options = model_options_small(2);
    tn_sharded_update_args args = TN_SHARDED_UPDATE_ARGS_INIT;
    tn_sharded_unit_info unit = TN_SHARDED_UNIT_INFO_INIT;
    reference_model *reference = reference_open(&all, &options);
    test_model *model = model_open(&all, &options, NULL);
    tn_plane_view view;
    tn_lease lease;
    args.learning_rate = 0x1p-8f;
    model_pass(model, 0, 0);
    reference_gradients(reference, 0);
    EXPECT_OK(tn_sharded_unit_info_get(model->sharded, 1, &unit));
    EXPECT_OK(tn_lease_begin(unit.gradient, TN_PLANE_DATA, TN_READ, all.stream, &lease, &view));
    EXPECT_STATUS(tn_sharded_abandon(model->sharded), TN_IN_USE);
    for (int tries = 0; tries < 2; tries++)
        EXPECT_STATUS(tn_sharded_update(model->sharded, &args), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_lease_begin(unit.shard, TN_PLANE_DATA, TN_READ, all.stream, &lease, &view));
    for (int tries = 0; tries < 2; tries++)
        EXPECT_STATUS(tn_sharded_update(model->sharded, &args), TN_IN_USE);
    EXPECT_STATUS(tn_sharded_forward_begin(model->sharded, 0), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tn_sharded_update");
    EXPECT_STATUS(tn_sharded_abandon(model->sharded), TN_INVALID_STATE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_sharded_update(model->sharded, &args));
    reference_update(reference);
    (void)model_compare_masters(model, reference);
    (void)step_of_both(model, reference, 1);
    (void)model_compare_masters(model, reference);
    model_close(model);
    reference_close(reference);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(twenty_steps_have_the_bits_of_one_rank),
        cmocka_unit_test(micro_batches_are_added_up_as_stated),
        cmocka_unit_test(modes_do_not_change_a_bit),
        cmocka_unit_test(layouts_do_not_change_a_bit),
        cmocka_unit_test(shards_made_of_masters_do_not_change_a_bit),
        cmocka_unit_test(masters_that_shards_are_made_of_are_the_updates),
        cmocka_unit_test(updates_ahead_do_not_change_a_bit),
        cmocka_unit_test(a_shard_is_made_as_its_own_last_update_said),
        cmocka_unit_test(a_step_updated_ahead_is_given_up_or_gone_on_with),
        cmocka_unit_test(clipping_differs_by_the_order_of_its_sum),
        cmocka_unit_test(a_stream_that_stalls_anywhere_changes_no_gradient),
        cmocka_unit_test(gradients_in_fp8_have_the_bits_of_their_values),
        cmocka_unit_test(training_goes_on_sharded_after_a_warm_up),
        cmocka_unit_test(a_step_given_up_changes_nothing),
        cmocka_unit_test(an_update_that_failed_goes_on),
    };
    return RANKS_RUN(&all, tests);
}
