/* GEMMs: TFLOP/s on random data, block-scaled FP8 and bf16.
 *
 * FPROP has 1x128 scales by 128x128 ones and bf16 out; WGRAD 1x128 by 1x128, added to fp32; the
 * bf16 product is there to compare with.
 */
#include "gpu_bench.h"

#include <stdio.h>

static const int64_t shapes[][3] = {{4096, 4096, 4096}, {8192, 8192, 8192},  {4096, 7168, 2048},
                                    {4096, 2112, 7168}, {4096, 24576, 1536}, {4096, 7168, 16384},
                                    {4096, 4096, 7168}, {2048, 7168, 2304}};

static void multiply(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_gemm(argument, bench->stream));
}

/* D is m x n and k is contracted, whatever the form. */
static double measure(gpu_bench *bench, tn_gemm_args *args, double flop) {
    args->scope = bench->scope;
    double seconds = gpu_bench_device_seconds(bench, multiply, args);
    gpu_bench_destroy(bench, args->a);
    gpu_bench_destroy(bench, args->b);
    gpu_bench_destroy(bench, args->d);
    return flop / seconds * 1e-12;
}

static double fprop(gpu_bench *bench, int64_t m, int64_t n, int64_t k, double flop) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW, m, k);
    args.b = gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW, n, k);
    args.d = gpu_bench_zeros(bench, TN_BF16, m, n);
    return measure(bench, &args, flop);
}

static double wgrad(gpu_bench *bench, int64_t m, int64_t n, int64_t k, double flop) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = TN_GEMM_WGRAD;
    args.a = gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_COL, k, m);
    args.b = gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_COL, k, n);
    args.d = gpu_bench_zeros(bench, TN_FP32, m, n);
    args.accumulate = 1;
    return measure(bench, &args, flop);
}

static double plain(gpu_bench *bench, int64_t m, int64_t n, int64_t k, double flop) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = gpu_bench_random(bench, TN_BF16, m, k);
    args.b = gpu_bench_random(bench, TN_BF16, n, k);
    args.d = gpu_bench_zeros(bench, TN_BF16, m, n);
    return measure(bench, &args, flop);
}

void gpu_bench_gemms(gpu_bench *bench, gpu_bench_section *section) {
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int64_t m = shapes[i][0], n = shapes[i][1], k = shapes[i][2];
        const double flop = 2.0 * (double)m * (double)n * (double)k;
        char title[48];
        snprintf(title, sizeof title, "%lld x %lld x %lld", (long long)m, (long long)n,
                 (long long)k);
        gpu_bench_row *row = gpu_bench_row_add(section, title);
        row->figures[0] = fprop(bench, m, n, k, flop);
        row->figures[1] = wgrad(bench, m, n, k, flop);
        row->figures[2] = plain(bench, m, n, k, flop);
    }
}
