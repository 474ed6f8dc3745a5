/* Stochastic rounding on a GPU: every launch of a graph that has captured a cast draws with an
 * offset that is one larger, and gives what the host draws with that. */
#include "gpu_graphs_support.h"

#include <string.h>

enum { REPLAYS = 20, ROWS = 300, COLS = 520 };

static gpu_side gpu, host;
static tn_pool *graph_pool;

static const struct casting {
    tn_format format;
    tn_dtype dtype;
} castings[] = {
    {TN_FORMAT_NVFP4, TN_E2M1},        {TN_FORMAT_MXFP8, TN_E5M2},
    {TN_FORMAT_FP8_TENSOR, TN_E5M2},   {TN_FORMAT_FP8_BLOCK_1D, TN_E4M3},
    {TN_FORMAT_FP8_BLOCK_2D, TN_E4M3},
};
static const tn_plane planes[] = {TN_PLANE_ROW, TN_PLANE_COL};

static tn_quantize_args make_args(gpu_side *side, const struct casting *to) {
    static uint16_t values[ROWS * COLS];
    static const uint64_t random[2] = {0x123456789ABCDEF0, 0xFFFFFFF8};
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, 3, values, (size_t)ROWS * COLS);
    args.src = gpu_plain(side, TN_BF16, ROWS, COLS);
    gpu_upload(side, args.src, values);
    args.dst = gpu_fp8(side, to->format, to->dtype, TN_SCALE_POW2, ROWS, COLS);
    args.random = gpu_plain(side, TN_BYTE, 1, sizeof random);
    gpu_upload(side, args.random, random);
    args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    return args;
}

static void end_args(gpu_side *side, const tn_quantize_args *args) {
    gpu_destroy(side, args->src);
    gpu_destroy(side, args->dst);
    gpu_destroy(side, args->random);
}

static void compare(tn_tensor on_gpu, tn_tensor on_host, tn_plane plane, const char *name) {
    gpu_copy actual = gpu_download(&gpu, on_gpu, plane);
    gpu_copy expected = gpu_download(&host, on_host, plane);
    gpu_count(name, gpu_copies_equal(&actual, &expected, "a launch"));
    gpu_copy_end(&actual), gpu_copy_end(&expected);
}

static void each_launch_of_a_graph_draws_anew(void **state) {
    (void)state;
    for (size_t c = 0; c < sizeof castings / sizeof *castings; c++) {
        const char *name = tn_format_name(castings[c].format);
        tn_quantize_args args = make_args(&gpu, &castings[c]);
        tn_quantize_args expected = make_args(&host, &castings[c]);
        EXPECT_OK(tn_quantize(&args, gpu.stream));
        EXPECT_OK(tn_quantize(&expected, host.stream));
        gpu_graph_begin(&gpu, graph_pool);
        EXPECT_OK(tn_quantize(&args, gpu.stream));
        gpu_graph graph = gpu_graph_end(&gpu, graph_pool);
        for (int launch = 0; launch < REPLAYS; launch++) {
            gpu_graph_launch(&gpu, &graph);
            EXPECT_OK(tn_quantize(&expected, host.stream));
            for (int p = 0; p < 2; p++)
                compare(args.dst, expected.dst, planes[p], name);
            compare(args.random, expected.random, TN_PLANE_DATA, "seed and offset");
        }
        gpu_graph_drop(&gpu, graph_pool, &graph);
        end_args(&gpu, &args), end_args(&host, &expected);
    }
    gpu_count_report("stochastic rounding in graphs");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_launch_of_a_graph_draws_anew)};
    gpu_open(&gpu);
    gpu_open_host(&host, (size_t)1 << 30);
    EXPECT_OK(tn_graph_pool_create(gpu.device, NULL, &graph_pool));
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_graph_end_what_is_left(&gpu);
    EXPECT_OK(tn_pool_destroy(graph_pool));
    gpu_close(&host);
    gpu_close(&gpu);
    return failures;
}
