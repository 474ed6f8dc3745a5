/* The battery's cases, and the threads that share them.
 *
 * A case's number in the order below is its seed, so that it is the same whoever runs it: each
 * thread goes through all of them and runs those whose numbers it has drawn. A thread has a stream
 * and a scope of its own on both sides, and shares their pools. An assertion that fails in a thread
 * of its own ends the program.
 */
#include "op_battery_support.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const battery_table *const battery_tables[] = {
    &battery_casts,    &battery_formats,  &battery_producers, &battery_groups,   &battery_small_ops,
    &battery_near_ops, &battery_training, &battery_products,  &battery_attention};
enum { TABLE_COUNT = sizeof battery_tables / sizeof *battery_tables };

typedef struct battery {
    battery_extent extent;
    const char *only;
    int is_near; /* of the table that is run */
    gpu_side device, host;
    long number; /* of the next case, the first is 1 */
    long drawn;  /* the one that is this thread's */
} battery;

static atomic_long next_case;

/* 1 if the next case is the thread's own. */
static int is_drawn(battery *b) {
    if (b->number++ != b->drawn) return 0;
    b->drawn = atomic_fetch_add(&next_case, 1);
    return 1;
}

/* ---- one case ------------------------------------------------------------------------------- */

static battery_results run_on(gpu_side *side, const battery_op *op, const battery_case *c,
                              battery_operands *operands) {
    *operands = battery_prepare(side, op, c);
    EXPECT_OK(op->launch(side, c, operands));
    return battery_fetch(side, operands);
}

static void check_case(battery *b, const battery_op *op, int64_t rows, int64_t cols, gpu_fill fill,
                       unsigned way) {
    battery_case c = {rows, cols, fill, (uint64_t)b->number, way % op->ways, NULL};
    battery_operands on_device, on_host;
    char what[160];
    if (!is_drawn(b)) return;
    battery_results actual = run_on(&b->device, op, &c, &on_device);
    gpu_side *other = b->is_near ? &b->device : &b->host;
    battery_results expected = run_on(other, op, &c, &on_host);
    snprintf(what, sizeof what, "%s way %u, %lld x %lld %s, seed %llu", op->name, c.way,
             (long long)rows, (long long)cols, gpu_fill_name(fill), (unsigned long long)c.seed);
    battery_count(op, BATTERY_COMPARED,
                  battery_results_equal(&on_device, &actual, &expected, what));
    battery_results_end(&on_device, &actual);
    battery_results_end(&on_host, &expected);
    battery_end(&b->device, &on_device);
    battery_end(other, &on_host);
}

/* With the flag set, whatever its value, no byte of an output changes. */
static void check_skip_on(gpu_side *side, const battery_op *op, const battery_case *c) {
    static const float flags[] = {1.0f, -2.5f, 0x1p-149f};
    battery_operands operands = battery_prepare(side, op, c);
    if (operands.skip.value) {
        char what[96];
        battery_results before = battery_fetch(side, &operands);
        battery_flag(side, &operands, flags[c->seed % 3]);
        EXPECT_OK(op->launch(side, c, &operands));
        battery_results after = battery_fetch(side, &operands);
        snprintf(what, sizeof what, "%s way %u, seed %llu, skipped", op->name, c->way,
                 (unsigned long long)c->seed);
        battery_count(op, BATTERY_SKIPPED, battery_results_equal(&operands, &after, &before, what));
        battery_results_end(&operands, &before);
        battery_results_end(&operands, &after);
    }
    battery_end(side, &operands);
}

/* ---- the cases of an op --------------------------------------------------------------------- */

static void check_skip(battery *b, const battery_op *op) {
    const unsigned step = b->extent == BATTERY_WHOLE ? 1 : ((op->ways + 11) / 12) | 1;
    for (unsigned way = 0; way < op->ways; way += step) {
        battery_case c = {130, 40, GPU_FILL_NORMAL, (uint64_t)b->number, way, NULL};
        if (!is_drawn(b)) continue;
        check_skip_on(&b->device, op, &c);
        check_skip_on(&b->host, op, &c);
    }
}

/* Every way, of a shape with tails in both dimensions; all fills, or one at a time. */
static void check_ways(battery *b, const battery_op *op) {
    static const int64_t shapes[][2] = {{130, 24}, {129, 257}};
    const int is_whole = b->extent == BATTERY_WHOLE;
    const unsigned step = b->extent == BATTERY_SMALL ? (op->ways + 5) / 6 : 1;
    for (unsigned way = 0; way < op->ways; way += step) {
        for (unsigned f = 0; f < (is_whole ? GPU_FILL_COUNT : 1); f++) {
            const int64_t *shape = shapes[(way + f) % 2];
            check_case(b, op, shape[0], shape[1], (gpu_fill)((way + f) % GPU_FILL_COUNT), way);
        }
    }
}

static void check_tails(battery *b, const battery_op *op) {
    static const int steps[] = {[BATTERY_SMALL] = 43, [BATTERY_SHORT] = 16, [BATTERY_WHOLE] = 1};
    const int step = steps[b->extent];
    unsigned way = 0;
    for (int64_t tail = 1; tail <= 129; tail += step) {
        check_case(b, op, tail, 136, GPU_FILL_NORMAL, way++);
        check_case(b, op, 136, tail, GPU_FILL_SPECIAL, way++);
        check_case(b, op, 128 + tail, 258 - tail, GPU_FILL_NORMAL, way++);
    }
}

/* Nothing, one row, one column; then TransformerEngine's list (leading dimensions flattened). */
static void check_shapes(battery *b, const battery_op *op) {
    static const int64_t shapes[][2] = {
        {0, 128},     {128, 0},    {0, 0},      {1, 1},       {1, 16},      {1, 300},
        {300, 1},     {65, 96},    {16, 512},   {256, 256},   {303, 300},   {1024, 1},
        {1, 1024},    {993, 512},  {256, 1024}, {512, 512},   {305, 256},   {256, 272},
        {2000, 1024}, {128, 7168}, {513, 131},  {2000, 2000}, {2048, 2000}, {2048, 1024},
        {4096, 1632}, {256, 65536}};
    static const size_t counts[] = {
        [BATTERY_SMALL] = 7, [BATTERY_SHORT] = 9, [BATTERY_WHOLE] = sizeof shapes / sizeof *shapes};
    const int is_whole = b->extent == BATTERY_WHOLE;
    for (size_t s = 0; s < counts[b->extent]; s++) {
        const int is_large = shapes[s][0] * shapes[s][1] > 1 << 20;
        const unsigned ways = !is_whole || is_large ? 2 : op->ways < 8 ? op->ways : 8;
        for (unsigned i = 0; i < ways; i++)
            check_case(b, op, shapes[s][0], shapes[s][1], i % 2 ? GPU_FILL_RANGE : GPU_FILL_NORMAL,
                       (unsigned)s + 5 * i);
    }
}

static void check_op(battery *b, const battery_op *op) {
    check_ways(b, op);
    check_skip(b, op);
    check_tails(b, op);
    check_shapes(b, op);
}

/* ---- threads -------------------------------------------------------------------------------- */

static const char *left_out;

void battery_leave_out(const char *name) { left_out = name; }

static int is_wanted(const char *only, const battery_op *op) {
    if (left_out && strcmp(left_out, op->name) == 0) return 0;
    return !only || strcmp(only, op->name) == 0;
}

static void *run_cases(void *argument) {
    battery *b = argument;
    b->number = 1;
    b->drawn = atomic_fetch_add(&next_case, 1);
    for (int t = 0; t < TABLE_COUNT; t++) {
        b->is_near = battery_tables[t]->is_near;
        for (int i = 0; i < battery_tables[t]->count; i++)
            if (is_wanted(b->only, &battery_tables[t]->ops[i]))
                check_op(b, &battery_tables[t]->ops[i]);
    }
    return NULL;
}

static void open_streams(gpu_side *side, const gpu_side *of) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    *side = *of;
    config.pool = of->pool;
    EXPECT_OK(tn_stream_create(side->device, &side->stream));
    EXPECT_OK(tn_scope_create(&config, &side->scope));
}

static void close_streams(gpu_side *side) {
    EXPECT_OK(tn_scope_close(side->scope));
    EXPECT_OK(tn_stream_destroy(side->device, side->stream));
}

void battery_run(const battery_config *config) {
    battery *all = calloc((size_t)config->threads, sizeof *all);
    pthread_t *threads = calloc((size_t)config->threads, sizeof *threads);
    assert_true(all && threads && config->threads > 0);
    atomic_store(&next_case, 1);
    for (int i = 0; i < config->threads; i++) {
        all[i].extent = config->extent;
        all[i].only = config->only;
        open_streams(&all[i].device, config->device);
        open_streams(&all[i].host, config->host);
    }
    for (int i = 1; i < config->threads; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_cases, &all[i]), 0);
    (void)run_cases(&all[0]);
    for (int i = 1; i < config->threads; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < config->threads; i++) {
        close_streams(&all[i].device);
        close_streams(&all[i].host);
    }
    free(threads);
    free(all);
}

void battery_each_op(const char *only, void (*check)(const battery_op *op)) {
    for (int t = 0; t < TABLE_COUNT; t++)
        for (int i = 0; i < battery_tables[t]->count; i++)
            if (is_wanted(only, &battery_tables[t]->ops[i])) check(&battery_tables[t]->ops[i]);
}
