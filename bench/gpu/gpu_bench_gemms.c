/* GEMMs: TFLOP/s on random data, block-scaled FP8 and bf16, by algorithm.
 *
 * FPROP has 1x128 scales by 128x128 ones and bf16 out; WGRAD 1x128 by 1x128, added to fp32; the
 * bf16 product is there to compare with. Of each: "first" is what cuBLASLt's heuristic offers
 * first, "tuned" what tn_gemm runs after tn_gemm_tune, "best" the fastest of all that there are
 * (tuned among them), and "%" how much of the best the tuned choice reaches.
 *
 * All of them take turns: in a round each has a batch of launches there and one back, so that a
 * clock that falls under the load of tensor cores is the same for all. The even rounds say who is
 * the best, the odd ones how fast all are and "%", the median of the ratios within a round: the
 * luckiest of several equal ones is no measure of itself. So "%" may be above 100.
 */
#include "gpu_bench.h"

#include <stdio.h>

#include "tenure_gemm.h"

static const int64_t shapes[][3] = {{4096, 4096, 4096}, {8192, 8192, 8192},  {4096, 7168, 2048},
                                    {4096, 2112, 7168}, {4096, 24576, 1536}, {4096, 7168, 16384},
                                    {4096, 4096, 7168}, {2048, 7168, 2304}};

/* Of those that are this much slower than the fastest when they were tuned, only the first is
 * timed again. */
static const double hopeless = 1.05;
static const double batch_us = 2000.0;
enum { HALF = 7, ROUNDS = 2 * HALF, CONTENDERS_MAX = 10, TURNS_LEAST = 2, OURS = 0, FIRST = 1 };

static void multiply(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_gemm(argument, bench->stream));
}

static tn_gemm_choice choice_of(const tn_gemm_args *args, int algorithm) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    tn_gemm_args pinned = *args;
    pinned.algorithm = algorithm;
    GPU_BENCH_TRY(tn_gemm_choice_get(&pinned, &choice));
    return choice;
}

typedef struct rates {
    double first, tuned, best, percent;
    int of_best; /* its algorithm; 0: the tuned one */
} rates;

typedef struct contest {
    int algorithms[CONTENDERS_MAX]; /* pins; OURS is what tn_gemm chooses */
    double seconds[CONTENDERS_MAX][ROUNDS];
    int count;
} contest;

static void invite(const tn_gemm_args *args, contest *of) {
    const tn_gemm_choice tuned = choice_of(args, 0);
    of->algorithms[OURS] = 0, of->algorithms[FIRST] = 1;
    of->count = FIRST + 1;
    for (int i = 2; i <= tuned.algorithms && of->count < CONTENDERS_MAX; i++) {
        const double us = choice_of(args, i).us;
        if (us > 0.0 && us <= hopeless * tuned.us) of->algorithms[of->count++] = i;
    }
}

static void hold(gpu_bench *bench, tn_gemm_args *args, contest *of) {
    const double us = choice_of(args, 0).us;
    const double most = GPU_BENCH_GATED_MAX;
    const double wanted = batch_us / (us > 1.0 ? us : 1.0);
    const int turns = wanted < TURNS_LEAST ? TURNS_LEAST : wanted > most ? (int)most : (int)wanted;
    for (int round = -1; round < ROUNDS; round++) { /* the first is to warm up */
        double seconds[CONTENDERS_MAX] = {0.0};
        for (int turn = 0; turn < 2 * of->count; turn++) {
            const int i = turn < of->count ? turn : 2 * of->count - 1 - turn;
            args->algorithm = of->algorithms[i];
            seconds[i] += gpu_bench_gated_seconds(bench, multiply, args, turns) / 2.0;
        }
        for (int i = 0; i < of->count && round >= 0; i++)
            of->seconds[i][round] = seconds[i];
    }
    args->algorithm = 0;
}

/* Of the even rounds or the odd ones. */
static double median_of(const double *rounds, int is_odd) {
    double half[HALF];
    for (int i = 0; i < HALF; i++)
        half[i] = rounds[2 * i + is_odd];
    return gpu_bench_median(half, HALF);
}

static double share_of_ours(const contest *of, int contender, int is_odd) {
    double shares[ROUNDS];
    for (int round = 0; round < ROUNDS; round++)
        shares[round] = of->seconds[contender][round] / of->seconds[OURS][round];
    return median_of(shares, is_odd);
}

static rates judge(const contest *of, double flop) {
    int best = OURS;
    double least = 1.0;
    for (int i = 0; i < of->count; i++) {
        const double share = share_of_ours(of, i, 0);
        if (share < least) least = share, best = i;
    }
    rates result = {.first = flop / median_of(of->seconds[FIRST], 1) * 1e-12,
                    .tuned = flop / median_of(of->seconds[OURS], 1) * 1e-12,
                    .best = flop / median_of(of->seconds[best], 1) * 1e-12,
                    .percent = 100.0 * share_of_ours(of, best, 1),
                    .of_best = of->algorithms[best]};
    return result;
}

/* D is m x n and k is contracted, whatever the form. */
static rates measure(gpu_bench *bench, tn_gemm_args *args, double flop) {
    contest of = {.count = 0};
    args->scope = bench->scope;
    GPU_BENCH_TRY(tn_gemm_tune(args, bench->stream));
    invite(args, &of);
    hold(bench, args, &of);
    const rates result = judge(&of, flop);
    const tn_gemm_choice choice = choice_of(args, 0);
    fprintf(stderr,
            "  %d of %d, %.1f us against %.1f us of the first; of %d timed %d, %.1f %%: %s\n",
            choice.algorithm, choice.algorithms, choice.us, choice.first_us, of.count,
            result.of_best ? result.of_best : choice.algorithm, result.percent, choice.description);
    gpu_bench_destroy(bench, args->a);
    gpu_bench_destroy(bench, args->b);
    gpu_bench_destroy(bench, args->d);
    return result;
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
            double *figures = row->figures + (size_t)4 * (size_t)kind;
            figures[0] = of[kind].first;
            figures[1] = of[kind].tuned;
            figures[2] = of[kind].best;
            figures[3] = of[kind].percent;
        }
    }
}
