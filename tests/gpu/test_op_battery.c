/* The battery on a GPU: every op against the host driver, bit for bit, and captured into a graph
 * whose replays give the same bits. It ends with one table.
 *
 *     gpu_test_op_battery               all of it, by a thread for each core, 16 at most
 *     gpu_test_op_battery --small       few shapes and no graphs, for compute-sanitizer
 *     gpu_test_op_battery --op NAME     one op, by its name in the table
 *     gpu_test_op_battery --threads N
 *     gpu_test_op_battery --host        the host driver in the place of the GPU, no graphs
 *
 * What is thinned: a case has one combination of type, format and outputs, and the combinations
 * take turns over the shapes; all of them with all fills are run on two small shapes only.
 */
#include "gpu_graphs_support.h"
#include "op_battery_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tenure_pool.h"

enum { REPLAYS = 100, FLIP_EVERY = 5, WAYS_REPLAYED = 4, WAYS_LOOKED_AT = 64, THREADS_MAX = 16 };

static gpu_side gpu, host;
static battery_config config = {&gpu, &host, BATTERY_WHOLE, 0, NULL};
static int is_on_host;

static void every_op_equals_the_host(void **state) {
    (void)state;
    battery_run(&config);
    assert_int_equal(battery_failures(BATTERY_COMPARED), 0);
    assert_int_equal(battery_failures(BATTERY_SKIPPED), 0);
}

/* ---- graphs --------------------------------------------------------------------------------- */

/* The GPU, with the graph pool for the scratch of what is captured. */
static gpu_side capturing;

typedef struct replay {
    const battery_op *op;
    battery_case c;
    battery_operands operands;
    battery_results expected;
    gpu_graph graph;
} replay;

static void capture(replay *r) {
    r->operands = battery_prepare(&gpu, r->op, &r->c);
    gpu_graph_begin(&gpu, capturing.pool);
    EXPECT_OK(r->op->launch(&capturing, &r->c, &r->operands));
    r->graph = gpu_graph_end(&gpu, capturing.pool);
}

static int launch_once(replay *r, const battery_results *expected, const char *what) {
    gpu_graph_launch(&gpu, &r->graph);
    battery_results actual = battery_fetch(&gpu, &r->operands);
    const int equal = battery_results_equal(&r->operands, &actual, expected, what);
    battery_results_end(&r->operands, &actual);
    return equal;
}

/* The flag is set for one launch, which must leave the outputs as they are. */
static int launch_skipped(replay *r) {
    battery_results before = battery_fetch(&gpu, &r->operands);
    battery_flag(&gpu, &r->operands, 1.0f);
    const int equal = launch_once(r, &before, "replayed with the skip flag set");
    battery_flag(&gpu, &r->operands, 0.0f);
    battery_results_end(&r->operands, &before);
    return equal;
}

static void check_replays_of(const battery_op *op, const battery_case *c) {
    replay r = {.op = op, .c = *c};
    battery_operands operands = battery_prepare(&gpu, op, c);
    EXPECT_OK(op->launch(&gpu, c, &operands));
    r.expected = battery_fetch(&gpu, &operands);
    battery_end(&gpu, &operands);
    capture(&r);
    for (int i = 0; i < REPLAYS; i++) {
        battery_poison(&gpu, &r.operands);
        battery_poison_derived(&gpu, &r.operands);
        if (r.operands.skip.value && i % FLIP_EVERY == 1)
            battery_count(op, BATTERY_REPLAYED, launch_skipped(&r));
        battery_count(op, BATTERY_REPLAYED, launch_once(&r, &r.expected, "replayed"));
    }
    gpu_graph_drop(&gpu, capturing.pool, &r.graph);
    battery_results_end(&r.operands, &r.expected);
    battery_end(&gpu, &r.operands);
}

static int has_skip(const battery_op *op, const battery_case *c) {
    battery_operands operands = battery_prepare(&gpu, op, c);
    const int has = operands.skip.value != 0;
    battery_end(&gpu, &operands);
    return has;
}

/* Some ways, and one with a skip flag if the op has any. */
static void check_replays(const battery_op *op) {
    battery_case c = {300, 264, GPU_FILL_NORMAL, 7, 0, NULL};
    for (unsigned i = 0; i < WAYS_REPLAYED; i++) {
        c.seed = i + 7;
        c.way = i * 7 % op->ways;
        check_replays_of(op, &c);
    }
    for (unsigned i = 0; i < WAYS_LOOKED_AT; i++) {
        c.seed = i + 50;
        c.way = i % op->ways;
        if (!has_skip(op, &c)) continue;
        check_replays_of(op, &c);
        return;
    }
}

static void every_op_replayed_100_times_gives_the_same_bits(void **state) {
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    (void)state;
    capturing = gpu;
    EXPECT_OK(tn_graph_pool_create(gpu.device, NULL, &capturing.pool));
    scope_config.pool = capturing.pool;
    EXPECT_OK(tn_scope_create(&scope_config, &capturing.scope));
    battery_each_op(config.only, check_replays);
    EXPECT_OK(tn_scope_close(capturing.scope));
    EXPECT_OK(tn_pool_destroy(capturing.pool));
    assert_int_equal(battery_failures(BATTERY_REPLAYED), 0);
}

/* ---- the program ---------------------------------------------------------------------------- */

static void read_options(int argc, char **argv) {
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    config.threads = cores < THREADS_MAX ? (int)cores : THREADS_MAX;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0)
            config.extent = BATTERY_SMALL, config.threads = 1;
        else if (strcmp(argv[i], "--host") == 0)
            is_on_host = 1;
        else if (strcmp(argv[i], "--op") == 0 && i + 1 < argc)
            config.only = argv[++i];
        else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc && atoi(argv[i + 1]) > 0)
            config.threads = atoi(argv[++i]);
        else {
            fprintf(stderr, "usage: %s [--small] [--op NAME] [--threads N] [--host]\n", argv[0]);
            exit(2);
        }
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest without_graphs[] = {cmocka_unit_test(every_op_equals_the_host)};
    const struct CMUnitTest whole[] = {
        cmocka_unit_test(every_op_equals_the_host),
        cmocka_unit_test(every_op_replayed_100_times_gives_the_same_bits),
    };
    int failures;
    read_options(argc, argv);
    if (is_on_host)
        gpu_open_host(&gpu, (size_t)64 << 30);
    else
        gpu_open(&gpu);
    gpu_open_host(&host, (size_t)64 << 30);
    if (is_on_host || config.extent == BATTERY_SMALL)
        failures = cmocka_run_group_tests_name("battery", without_graphs, NULL, NULL);
    else
        failures = cmocka_run_group_tests_name("battery", whole, NULL, NULL);
    gpu_graph_end_what_is_left(&gpu);
    battery_print_table("operation");
    if (failures == 0) {
        gpu_close(&host);
        gpu_close(&gpu);
    }
    return failures;
}
