/* GEMMs: TFLOP/s on random data, block-scaled FP8 and bf16, by algorithm.
 *
 * FPROP has 1x128 scales by 128x128 ones and bf16 out; WGRAD 1x128 by 1x128, added to fp32; the
 * bf16 product is there to compare with. Of each: "first" is what cuBLASLt's heuristic offers
 * first, "tuned" what tn_gemm runs after tn_gemm_tune, "best" the fastest of all that are offered,
 * each pinned and timed in this run. First and tuned take turns, so that the clock of the chip is
 * the same for both; "best" is no less than either, since both are among the offers.
 */
#include "gpu_bench.h"

#include <stdio.h>

#include "tenure_gemm.h"

static const int64_t shapes[][3] = {{4096, 4096, 4096}, {8192, 8192, 8192},  {4096, 7168, 2048},
                                    {4096, 2112, 7168}, {4096, 24576, 1536}, {4096, 7168, 16384},
                                    {4096, 4096, 7168}, {2048, 7168, 2304}};

/* Offers that are this much slower than the fastest when they were tuned are not timed again. */
static const double hopeless = 1.1;
enum { PAIRS = 3 };

static void multiply(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_gemm(argument, bench->stream));
}

static double rate_of(gpu_bench *bench, tn_gemm_args *args, int algorithm, double flop) {
    args->algorithm = algorithm;
    double seconds = gpu_bench_device_seconds(bench, multiply, args);
    args->algorithm = 0;
    return flop / seconds * 1e-12;
}

static tn_gemm_choice choice_of(const tn_gemm_args *args, int algorithm) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    tn_gemm_args pinned = *args;
    pinned.algorithm = algorithm;
    GPU_BENCH_TRY(tn_gemm_choice_get(&pinned, &choice));
    return choice;
}

typedef struct rates {
    double first, tuned, best;
} rates;

/* The fastest of the other offers. */
static double best_offer(gpu_bench *bench, tn_gemm_args *args, double flop) {
    tn_gemm_choice tuned = choice_of(args, 0);
    double best = 0.0;
    for (int i = 2; i <= tuned.algorithms; i++) {
        double us = choice_of(args, i).us;
        if (i == tuned.algorithm || us <= 0.0 || us > hopeless * tuned.us) continue;
        double rate = rate_of(bench, args, i, flop);
        if (rate > best) best = rate;
    }
    return best;
}

/* D is m x n and k is contracted, whatever the form. */
static rates measure(gpu_bench *bench, tn_gemm_args *args, double flop) {
    double first[PAIRS], tuned[PAIRS];
    args->scope = bench->scope;
    GPU_BENCH_TRY(tn_gemm_tune(args, bench->stream));
    double best = best_offer(bench, args, flop);
    for (int i = 0; i < PAIRS; i++) {
        first[i] = rate_of(bench, args, 1, flop);
        tuned[i] = rate_of(bench, args, 0, flop);
    }
    rates of = {gpu_bench_median(first, PAIRS), gpu_bench_median(tuned, PAIRS), best};
    if (of.best < of.first) of.best = of.first;
    if (of.best < of.tuned) of.best = of.tuned;
    tn_gemm_choice choice = choice_of(args, 0);
    fprintf(stderr, "  %d of %d offers, %.1f us against %.1f us of the first: %s\n",
            choice.algorithm, choice.algorithms, choice.us, choice.first_us, choice.description);
    gpu_bench_destroy(bench, args->a);
    gpu_bench_destroy(bench, args->b);
    gpu_bench_destroy(bench, args->d);
    return of;
}

static rates fprop(gpu_bench *bench, int64_t m, int64_t n, int64_t k, double flop) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW, m, k);
    args.b = gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW, n, k);
    args.d = gpu_bench_zeros(bench, TN_BF16, m, n);
    return measure(bench, &args, flop);
}

static rates wgrad(gpu_bench *bench, int64_t m, int64_t n, int64_t k, double flop) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = TN_GEMM_WGRAD;
    args.a = gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_COL, k, m);
    args.b = gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_COL, k, n);
    args.d = gpu_bench_zeros(bench, TN_FP32, m, n);
    args.accumulate = 1;
    return measure(bench, &args, flop);
}

static rates plain(gpu_bench *bench, int64_t m, int64_t n, int64_t k, double flop) {
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
        fprintf(stderr, "%s\n", title);
        gpu_bench_row *row = gpu_bench_row_add(section, title);
        const rates of[] = {fprop(bench, m, n, k, flop), wgrad(bench, m, n, k, flop),
                            plain(bench, m, n, k, flop)};
        for (int kind = 0; kind < 3; kind++) {
            double *figures = row->figures + (size_t)3 * (size_t)kind;
            figures[0] = of[kind].first;
            figures[1] = of[kind].tuned;
            figures[2] = of[kind].best;
        }
    }
}
