/* The battery on a GPU: every op against the host driver, bit for bit, one table for all; and
 * every op captured into a graph, whose replays give the same bits. */
#include "gpu_graphs_support.h"
#include "op_battery_support.h"

#include "tenure_pool.h"

enum { REPLAYS = 100, WAYS_REPLAYED = 3 };

static gpu_side gpu, host;
static tn_pool *graph_pool;

static void every_op_equals_the_host(void **state) {
    (void)state;
    battery_run(&gpu, &host, BATTERY_WHOLE);
    gpu_count_report("GPU against host");
}

static int is_derived(const battery_operands *operands) {
    for (int i = 0; i < operands->out_count; i++)
        if (operands->out[i].is_derived) return 1;
    return 0;
}

/* A plane that is derived is made once, not at every replay: such ops are left out. */
static void check_replays(const battery_op *op) {
    for (unsigned i = 0; i < WAYS_REPLAYED; i++) {
        battery_case c = {1000, 520, GPU_FILL_NORMAL, i + 7, i * 7 % op->ways};
        battery_operands operands = battery_prepare(&gpu, op, &c);
        if (is_derived(&operands)) {
            battery_end(&gpu, &operands);
            return;
        }
        op->launch(&gpu, &c, &operands);
        battery_results expected = battery_fetch(&gpu, &operands);
        gpu_graph_begin(&gpu, graph_pool);
        op->launch(&gpu, &c, &operands);
        gpu_graph graph = gpu_graph_end(&gpu, graph_pool);
        for (int replay = 0; replay < REPLAYS; replay++) {
            battery_poison(&gpu, &operands);
            gpu_graph_launch(&gpu, &graph);
            battery_results actual = battery_fetch(&gpu, &operands);
            battery_compare(&operands, &actual, &expected, op->name, "replayed");
            battery_results_end(&operands, &actual);
        }
        gpu_graph_drop(&gpu, graph_pool, &graph);
        battery_results_end(&operands, &expected);
        battery_end(&gpu, &operands);
    }
}

static void every_op_replayed_100_times_gives_the_same_bits(void **state) {
    (void)state;
    (void)gpu_graph_load();
    EXPECT_OK(tn_graph_pool_create(gpu.device, NULL, &graph_pool));
    battery_each_op(check_replays);
    EXPECT_OK(tn_pool_destroy(graph_pool));
    gpu_count_report("replays of graphs");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_op_equals_the_host),
        cmocka_unit_test(every_op_replayed_100_times_gives_the_same_bits),
    };
    gpu_open(&gpu);
    gpu_open_host(&host, (size_t)8 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_graph_end_what_is_left(&gpu);
    gpu_close(&host);
    gpu_close(&gpu);
    return failures;
}
