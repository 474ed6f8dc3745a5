/* What is alive in a step of a sharded model, to the byte, and what crosses the wire: the shape and
 * the sizes that users of other libraries have reported leaks of.
 *
 *     at rest     shards, masters, moments, ring, one slot for columns
 *     forward     the same, and saved activations: no plane of a weight, whichever its format; and
 *                 what is added up over micro-batches
 *     backward    the same, the activations that are left, no columns; the buckets of the unit and
 *                 of those ahead whose reduction may be on its way, what reductions pass through,
 *                 and the reduced gradients of the units that have ended
 *     update      the reduced gradients of the units that it has not come to
 */
#include "model_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static rank_fixture all;

enum { NUMBERS_BYTES = (3 + 256 + 1 + 1) * 4 }; /* the step, squares, the norm, the factor */

/* ---- expected ------------------------------------------------------------------------------- */

/* What gradients take: all units that train are alike. */
typedef struct gradients {
    size_t units;   /* that train */
    size_t slots;   /* buckets that they take in turn */
    size_t bucket;  /* bytes of one */
    size_t reduced; /* bytes of the rank's part of a unit's */
    size_t beside;  /* bytes that a reduction passes through */
} gradients;

typedef struct expectation {
    test_model *model;
    size_t resting; /* of the model's scope */
    gradients gradients;
    int micro_batch;
    size_t saved; /* of a layer */
    size_t value; /* of an activation */
    uint64_t notes;
} expectation;

static size_t up_to(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static size_t tiles(int64_t n) { return (size_t)((n + 127) / 128); }

static size_t row_bytes(int64_t rows, int64_t cols) {
    return (size_t)(rows * cols) + tiles(rows) * up_to(tiles(cols), 4) * sizeof(float);
}

/* The slot that all columns pass through is as large as the largest weight that has a dgrad. */
static size_t column_slot_bytes(const model_options *options) {
    size_t most = 0;
    if (options->precision != MODEL_FP8 || options->frozen_layers == options->layers) return 0;
    for (int part = 0; part < BLOCK_PARTS; part++) {
        const int64_t rows = block_part_rows(&options->shape, part);
        const int64_t cols = block_part_cols(&options->shape, part);
        if (!block_part_is_product(part)) continue;
        const size_t row =
            up_to((size_t)(rows * cols), 256) + tiles(rows) * up_to(tiles(cols), 4) * sizeof(float);
        const size_t col =
            up_to((size_t)(rows * cols), 256) + tiles(cols) * up_to(tiles(rows), 4) * sizeof(float);
        if (row > most) most = row;
        if (col > most) most = col;
    }
    return most;
}

static size_t resting_bytes(const test_model *model) {
    const tn_sharded_report report = model_report(model);
    return report.shard_bytes + report.made_shard_bytes + report.state_bytes + report.ring_bytes +
           NUMBERS_BYTES;
}

static int is_whole(const model_options *options) {
    return options->sum == TN_GRADIENT_SUM_WHOLE && options->micro_batches > 1;
}

static int is_last(const expectation *e) {
    return e->micro_batch + 1 == e->model->options.micro_batches;
}

static gradients gradients_of(const test_model *model) {
    const model_options *options = &model->options;
    const tn_sharded_report report = model_report(model);
    tn_sharded_unit_info unit = TN_SHARDED_UNIT_INFO_INIT;
    gradients g = {.units = (size_t)(options->layers - options->frozen_layers)};
    const size_t slots = options->gradient_slots ? (size_t)options->gradient_slots : 2;
    EXPECT_OK(tn_sharded_unit_info_get(model->sharded, options->layers - 1, &unit));
    g.slots = slots < g.units ? slots : g.units;
    g.bucket = unit.gradient_bytes;
    g.reduced = report.gradient_bytes / g.units;
    g.beside = report.bucket_bytes - (is_whole(options) ? g.units : g.slots) * g.bucket;
    assert_int_equal(g.reduced * g.units, report.gradient_bytes);
    return g;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

/* Buckets in the backward of the unit that is the `before`-th, from 0, of a micro-batch. */
static size_t buckets_within(const expectation *e, size_t before) {
    const gradients *g = &e->gradients;
    if (!is_whole(&e->model->options)) return least(before + 1, g->slots);
    if (e->micro_batch == 0) return before + 1;
    return is_last(e) && before > 0 ? g->units - before + 1 : g->units;
}

/* The same, when it has ended. */
static size_t buckets_after(const expectation *e, size_t before) {
    const gradients *g = &e->gradients;
    if (is_whole(&e->model->options))
        return is_last(e) ? g->units - before : buckets_within(e, before);
    return g->slots == 1 ? 1 : least(before + 1, g->slots - 1);
}

/* Reduced gradients, when so many units of the micro-batch have ended and there are so many buckets
 * of those: with an update ahead they go together. */
static size_t reduced_after(const expectation *e, size_t ended, size_t buckets) {
    const model_options *options = &e->model->options;
    if (is_whole(options) && !is_last(e)) return 0;
    const size_t left = is_last(e) && options->update_ahead ? least(ended, buckets) : ended;
    const int is_first = e->micro_batch == 0 || is_whole(options);
    return left + (is_first ? 0 : e->gradients.units - ended);
}

static int is_reduced(const expectation *e) { return !is_whole(&e->model->options) || is_last(e); }

static size_t within_backward(const expectation *e, size_t before) {
    const gradients *g = &e->gradients;
    const size_t buckets = buckets_within(e, before);
    const size_t ended = is_whole(&e->model->options) ? (before > 0) : buckets - 1;
    return buckets * g->bucket + reduced_after(e, before, ended) * g->reduced +
           (before > 0 && is_reduced(e) ? g->beside : 0);
}

static size_t after_backward(const expectation *e, size_t before) {
    const gradients *g = &e->gradients;
    const size_t buckets = buckets_after(e, before);
    const size_t ended = is_whole(&e->model->options) ? 1 : buckets;
    return buckets * g->bucket + reduced_after(e, before + 1, ended) * g->reduced +
           (is_reduced(e) ? g->beside : 0);
}

/* Between the backwards of two micro-batches. */
static size_t within_forward(const expectation *e) {
    const gradients *g = &e->gradients;
    if (e->micro_batch == 0) return 0;
    return g->units * (is_whole(&e->model->options) ? g->bucket : g->reduced);
}

/* What a cast of flat shards needs in the update, and of gradients is left then, at most. */
static size_t within_update(const expectation *e, size_t amaxes) {
    expectation last = *e;
    if (e->model->options.update_ahead) return 0;
    last.micro_batch = e->model->options.micro_batches - 1;
    return after_backward(&last, e->gradients.units - 1) - e->gradients.reduced + amaxes;
}

static size_t amax_bytes(const test_model *model) {
    size_t amaxes = 0;
    for (int layer = 0; layer < model->options.layers; layer++) {
        tn_sharded_unit_info unit = TN_SHARDED_UNIT_INFO_INIT;
        tn_shard_plan_info plan = TN_SHARD_PLAN_INFO_INIT;
        EXPECT_OK(tn_sharded_unit_info_get(model->sharded, layer, &unit));
        EXPECT_OK(tn_shard_plan_info_get(unit.plan, &plan));
        const size_t bytes =
            plan.amax_count_trained > 0 ? (size_t)plan.amax_count * sizeof(float) : 0;
        amaxes = most(amaxes, bytes);
    }
    return amaxes;
}

/* Within the end of a unit that is updated ahead. */
static size_t amaxes_ahead(const expectation *e) {
    return is_last(e) && e->model->options.update_ahead ? amax_bytes(e->model) : 0;
}

/* Above what is at rest: what layers have made of bf16 weights within a unit counts, too. */
static size_t passing_bytes(const expectation *e) {
    const model_options *options = &e->model->options;
    expectation at = *e;
    size_t rows = 0, columns = 0;
    for (int part = 0; part < BLOCK_PARTS; part++) {
        const int64_t r = block_part_rows(&options->shape, part);
        const int64_t c = block_part_cols(&options->shape, part);
        if (!block_part_is_product(part) || options->precision != MODEL_FP8_OF_BF16) continue;
        rows += row_bytes(r, c), columns += row_bytes(c, r);
    }
    size_t passing = within_update(e, amax_bytes(e->model));
    for (at.micro_batch = 0; at.micro_batch < options->micro_batches; at.micro_batch++) {
        passing = most(passing, within_forward(&at) + rows);
        for (size_t before = 0; before < e->gradients.units; before++) {
            passing = most(passing, within_backward(&at, before) + columns);
            passing = most(passing, after_backward(&at, before) + amaxes_ahead(&at));
        }
    }
    return passing;
}

/* ---- in a step ------------------------------------------------------------------------------ */

/* Between its forward and its backward, which comes next, the last unit is in the ring. */
static void expect_no_weights(const test_model *model, const tn_ledger *ledger, int is_between) {
    assert_int_equal(ledger->data_bytes[TN_PLANE_COL] + ledger->scale_bytes[TN_PLANE_COL], 0);
    assert_int_equal(ledger->data_bytes[TN_PLANE_ROW] + ledger->scale_bytes[TN_PLANE_ROW], 0);
    if (model->options.keep_after_forward || model->options.keep_after_backward) return;
    for (int layer = 0; layer < model->options.layers; layer++) {
        const int is_kept = is_between && layer + 1 == model->options.layers;
        const tn_plane_state state = is_kept ? TN_PLANE_VALID : TN_PLANE_ABSENT;
        for (int part = 0; part < BLOCK_PARTS; part++) {
            const tn_tensor weight = tn_sharded_weight(model->sharded, layer, part);
            const int is_plain =
                !block_part_is_product(part) || model->options.precision == MODEL_BF16;
            if (is_plain)
                TN_EXPECT_PLANE_STATE(weight, TN_PLANE_DATA, state);
            else if (model->options.precision == MODEL_FP8 || !is_kept)
                TN_EXPECT_PLANE_STATE(weight, TN_PLANE_ROW, state);
        }
    }
}

static void expect_alive(void *context, test_model *model, const char *after, int layer) {
    expectation *e = context;
    const int first = model->options.frozen_layers;
    const size_t layers = strcmp(after, "forward") == 0    ? (size_t)layer + 1
                          : strcmp(after, "backward") == 0 ? (size_t)layer
                                                           : (size_t)model->options.layers;
    const size_t before = (size_t)(model->options.layers - 1 - layer);
    const int is_backward = strcmp(after, "backward") == 0;
    const int has_gradient = strcmp(after, "backward") != 0 || layer > first;
    tn_ledger ledger = TN_LEDGER_INIT, scratch = TN_LEDGER_INIT;
    EXPECT_OK(tn_scope_ledger(model->scope, &ledger));
    EXPECT_OK(tn_scope_ledger(model->scratch, &scratch));
    assert_int_equal(ledger.total_bytes,
                     e->resting + (is_backward ? after_backward(e, before) : within_forward(e)));
    assert_int_equal(scratch.total_bytes, layers * e->saved + (has_gradient ? e->value : 0));
    expect_no_weights(model, &ledger,
                      !is_backward && (layer < 0 || layer + 1 == model->options.layers));
    EXPECT_OK(tn_ledger_check(model->ranks->pool));
    if (is_backward && layer == 0)
        e->micro_batch = (e->micro_batch + 1) % model->options.micro_batches;
    e->notes++;
}

/* ---- on the wire ---------------------------------------------------------------------------- */

static uint64_t wire(const tn_comm_stats *stats) {
    uint64_t bytes = 0;
    for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++)
        bytes += stats->wire_bytes[kind];
    return bytes;
}

static uint64_t calls(const tn_comm_stats *stats) {
    uint64_t count = 0;
    for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++)
        count += stats->calls[kind];
    return count;
}

/* Of equal parts or not: each is one collective. */
static uint64_t gathers(const tn_comm_stats *stats) {
    return stats->calls[TN_ALL_GATHER] + stats->calls[TN_ALL_GATHER_UNEVEN];
}

/* How many gathers and reductions a step makes of each unit. */
typedef struct collectives {
    uint64_t gathers, reductions;
} collectives;

static collectives expected_collectives(const model_options *options) {
    const uint64_t layers = (uint64_t)options->layers, micro = (uint64_t)options->micro_batches;
    const uint64_t trained = layers - (uint64_t)options->frozen_layers;
    const int is_whole = options->sum == TN_GRADIENT_SUM_WHOLE;
    collectives expected = {.reductions = trained * (is_whole ? 1 : micro)};
    if (options->keep_after_forward && options->keep_after_backward)
        expected.gathers = layers;
    else if (options->keep_after_forward)
        expected.gathers = trained * micro + (layers - trained);
    else if (options->keep_after_backward)
        expected.gathers = 2 * trained + (layers - trained) * micro;
    else
        expected.gathers = (layers + trained) * micro;
    /* The last unit stays for its backward, which comes next; what is kept then stays anyway. */
    if (!options->keep_after_forward && trained > 0)
        expected.gathers -= options->keep_after_backward ? 1 : micro;
    return expected;
}

/* All units are alike: a gather of one is a part of the gather of all. */
static void expect_wire(const test_model *model, const tn_comm_stats *before) {
    const model_options *options = &model->options;
    const tn_comm_stats after = model_stats(model);
    const tn_sharded_report report = model_report(model);
    const collectives expected = expected_collectives(options);
    const uint64_t layers = (uint64_t)options->layers;
    const uint64_t trained = layers - (uint64_t)options->frozen_layers;
    uint64_t bytes = report.gather_wire / layers * expected.gathers;
    if (trained > 0) bytes += report.reduce_wire / trained * expected.reductions;
    bytes += report.update_wire;
    if (options->max_norm == 0.0f) {
        const uint64_t n = (uint64_t)all.count, part = (256 + n - 1) / n;
        const uint64_t first = part * (uint64_t)all.rank;
        const uint64_t mine = first >= 256 ? 0 : 256 - first < part ? 256 - first : part;
        bytes -= (256 - mine + (n - 1) * mine) * sizeof(float);
    }
    assert_int_equal(wire(&after) - wire(before), bytes);
    assert_int_equal(gathers(&after) - gathers(before), expected.gathers);
    const tn_collective kind =
        options->wire == TN_GRADIENT_WIRE_FP8 ? TN_ALL_TO_ALL_UNEVEN : TN_REDUCE_SCATTER_UNEVEN;
    assert_int_equal(after.calls[kind] - before->calls[kind], expected.reductions);
}

/* ---- a model's life ------------------------------------------------------------------------- */

static uint64_t memory_calls(void) {
    uint64_t count = 0;
    for (int call = TN_CALL_MEM_CREATE; call <= TN_CALL_MEM_FREE; call++)
        count += test_calls(all.device, (tn_driver_call)call);
    return count;
}

static void expect_no_begun(const test_model *model) {
    const tn_sharded_report report = model_report(model);
    tn_ledger ledger = TN_LEDGER_INIT;
    EXPECT_OK(tn_scope_ledger(model->scratch, &ledger));
    assert_int_equal(ledger.total_bytes, 0);
    assert_int_equal(report.strays, 0);
}

/* Warm-up steps, then steps of which each is as the one before. Returns the bytes at rest. */
static size_t live(const char *name, const model_options *options, int steps) {
    test_model *model = model_open(&all, options, NULL);
    expectation e = {.model = model,
                     .value = (size_t)(options->shape.tokens * options->shape.hidden) * 2};
    const int is_fp8 = options->precision != MODEL_BF16;
    tn_ledger ledger = TN_LEDGER_INIT;
    uint64_t driver = 0;
    size_t reserved = 0;
    e.resting = resting_bytes(model);
    EXPECT_OK(tn_scope_ledger(model->scope, &ledger));
    assert_int_equal(ledger.total_bytes, e.resting);
    e.gradients = gradients_of(model);
    e.saved = options->recompute
                  ? e.value
                  : block_saved_bytes(&options->shape, is_fp8, options->frozen_parts);
    model_step(model, 0);
    e.resting += column_slot_bytes(options);
    model_step(model, 1);
    ranks_wait(&all);
    model->note_context = &e;
    if (options->frozen_layers == 0) model->note = expect_alive;
    EXPECT_OK(tn_scope_ledger_reset_peaks(model->scope));
    for (int step = 2; step < steps; step++) {
        const tn_comm_stats before = model_stats(model);
        if (step == 3) {
            driver = memory_calls();
            reserved = test_pool_stats(all.pool).reserved_bytes;
        }
        model_step(model, step);
        expect_wire(model, &before);
        ranks_wait(&all);
    }
    EXPECT_OK(tn_scope_ledger(model->scope, &ledger));
    assert_int_equal(ledger.total_bytes, e.resting);
    assert_int_equal(ledger.peak_total_bytes, e.resting + passing_bytes(&e));
    if (steps > 3) {
        assert_int_equal(memory_calls(), driver);
        assert_int_equal(test_pool_stats(all.pool).reserved_bytes, reserved);
    }
    expect_no_begun(model);
    const tn_comm_stats stats = model_stats(model);
    if (all.rank == 0)
        printf("  %-28s at rest %zu, +%zu passing; a layer saves %zu; %llu collectives\n", name,
               e.resting, passing_bytes(&e), e.saved, (unsigned long long)calls(&stats));
    model_close(model);
    return e.resting;
}

/* ---- the tests ------------------------------------------------------------------------------ */

static int layers(void) { return all.count > 4 ? 2 : 8; }

/* FP8 products of bf16 weights take not a byte of residency; FP8 weights take less. */
static void the_full_shape_saves_activations_alone(void **state) {
    (void)state;
    size_t resting[3] = {0, 0, 0};
    for (int precision = MODEL_BF16; precision <= MODEL_FP8_OF_BF16; precision++) {
        static const char *const names[] = {"bf16", "FP8", "FP8 of bf16"};
        model_options options = model_options_full(layers());
        options.precision = (model_precision)precision;
        resting[precision] = live(names[precision], &options, 3);
    }
    assert_int_equal(resting[MODEL_FP8_OF_BF16], resting[MODEL_BF16]);
    assert_true(resting[MODEL_FP8] < resting[MODEL_BF16]);
}

static void nothing_grows_over_fifty_steps(void **state) {
    (void)state;
    for (int precision = MODEL_FP8; precision <= MODEL_FP8_OF_BF16; precision++) {
        model_options options = model_options_small(2);
        options.precision = (model_precision)precision;
        options.max_norm = 0.5f;
        const int many = precision == MODEL_FP8 && all.count <= 4 ? 50 : 6;
        live(precision == MODEL_FP8 ? "fifty steps" : "steps of bf16", &options, many);
    }
}

static void so_it_is_in_every_mode(void **state) {
    (void)state;
    model_options options = model_options_small(3);
    options.micro_batches = 2;
    live("sums of parts", &options, 5);
    options.sum = TN_GRADIENT_SUM_WHOLE;
    live("whole sums", &options, 5);
    options.keep_after_backward = 1;
    live("kept after backward", &options, 5);
    options.keep_after_forward = 1;
    live("kept all the step", &options, 5);
    options.keep_after_backward = 0;
    live("kept after forward", &options, 5);
    options = model_options_small(3);
    options.recompute = 1;
    live("computed again", &options, 5);
    options.gradient_dtype = TN_BF16;
    options.gradient_slots = 1;
    live("bf16, one bucket", &options, 5);
    options.wire = TN_GRADIENT_WIRE_FP8;
    live("gradients in FP8", &options, 5);
    options = model_options_small(3);
    options.frozen_layers = 1;
    live("a frozen layer", &options, 5);
    options.frozen_layers = 0;
    options.frozen_parts = 1u << BLOCK_UP | 1u << BLOCK_QKV;
    live("frozen parts", &options, 5);
    options.frozen_parts =
        1u << BLOCK_QKV | 1u << BLOCK_PROJECTION | 1u << BLOCK_UP | 1u << BLOCK_DOWN;
    live("only norms train", &options, 5);
}

/* What is frozen is cut over the ranks all the same. */
static void frozen_weights_are_sharded_and_nothing_grows_over_a_hundred_steps(void **state) {
    (void)state;
    model_options options = model_options_small(1);
    options.frozen_parts =
        1u << BLOCK_QKV | 1u << BLOCK_PROJECTION | 1u << BLOCK_UP | 1u << BLOCK_DOWN;
    options.layout = TN_SHARD_FLAT;
    live("a hundred steps, frozen", &options, all.count > 4 ? 6 : 100);
    test_model *model = model_open(&all, &options, NULL);
    const tn_sharded_report report = model_report(model);
    size_t whole = 0;
    for (int part = 0; part < BLOCK_PARTS; part++)
        if (block_part_is_product(part))
            whole += row_bytes(block_part_rows(&options.shape, part),
                               block_part_cols(&options.shape, part));
    assert_true(report.shard_bytes <= whole / (size_t)all.count + 4096);
    assert_true(report.state_bytes <= 3 * 4 * 2 * (128 + 128));
    model_close(model);
}

/* There is never more than one reduced gradient that is complete. */
static void updates_ahead_leave_no_gradients(void **state) {
    (void)state;
    for (int way = 0; way < 4; way++) {
        model_options options = model_options_small(3);
        options.update_ahead = 1;
        options.micro_batches = way < 2 ? 1 : 2;
        options.layout = way == 1 ? TN_SHARD_FLAT : TN_SHARD_AUTO;
        options.sum = way == 3 ? TN_GRADIENT_SUM_WHOLE : TN_GRADIENT_SUM_SHARDED;
        live("updated ahead", &options, 5);
    }
}

/* Of all weights but one unit's there is nothing but the master copy, between the gathers. */
static void shards_made_of_masters_share_their_memory(void **state) {
    (void)state;
    for (int precision = MODEL_BF16; precision <= MODEL_FP8_OF_BF16; precision++) {
        model_options options = model_options_small(3);
        options.precision = (model_precision)precision;
        options.layout = precision == MODEL_FP8 ? TN_SHARD_TILES : TN_SHARD_AUTO;
        const size_t kept = live("shards that are kept", &options, 5);
        options.shards_from_masters = 1;
        const size_t made = live("shards made of masters", &options, 5);
        test_model *model = model_open(&all, &options, NULL);
        const tn_sharded_report report = model_report(model);
        assert_int_equal(report.shard_bytes, 0);
        assert_int_equal(kept - made, (size_t)(options.layers - 1) * report.made_shard_bytes);
        model_close(model);
        options.micro_batches = 2;
        live("the same, two micro-batches", &options, 5);
    }
}

static void so_it_is_in_every_layout(void **state) {
    (void)state;
    for (int layout = TN_SHARD_TILES; layout < TN_SHARD_LAYOUT_COUNT; layout++) {
        model_options options = model_options_small(2);
        options.layout = (tn_shard_layout)layout;
        live(tn_shard_layout_name(options.layout), &options, 5);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_full_shape_saves_activations_alone),
        cmocka_unit_test(nothing_grows_over_fifty_steps),
        cmocka_unit_test(so_it_is_in_every_mode),
        cmocka_unit_test(so_it_is_in_every_layout),
        cmocka_unit_test(updates_ahead_leave_no_gradients),
        cmocka_unit_test(shards_made_of_masters_share_their_memory),
        cmocka_unit_test(frozen_weights_are_sharded_and_nothing_grows_over_a_hundred_steps),
    };
    return RANKS_RUN(&all, tests);
}
