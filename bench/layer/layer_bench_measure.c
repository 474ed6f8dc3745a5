/* Times of the sides: algorithms are tuned first; then FP8 and bf16 take turns, each behind a gate,
 * so that neither waits for the host; then each step alone, and what it would take at its limit. */
#include <stdlib.h>

#include "layer_bench.h"

/* A copy of about this many bytes gives the rate that memory-bound steps are held to. */
static const double copy_bytes = 1e9;

static void run_side(gpu_bench *bench, void *argument, int turn) {
    layer_side *side = argument;
    for (int i = 0; i < side->count; i++)
        side->steps[i].work(bench, &side->steps[i].arguments, turn);
}

static int is_product(const layer_step *step) { return step->kind >= LAYER_FPROP; }

static void for_each_step(gpu_bench *bench, layer_report *report,
                          void (*visit)(gpu_bench *, const layer_report *, layer_step *)) {
    for (int pair = 0; pair < LAYER_PAIRS; pair++)
        for (int of = 0; of < LAYER_SIDES; of++)
            for (int i = 0; i < report->sides[pair][of].count; i++)
                visit(bench, report, &report->sides[pair][of].steps[i]);
}

/* ---- algorithms ----------------------------------------------------------------------------- */

static tn_gemm_choice choice_of(const layer_step *step) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    GPU_BENCH_TRY(tn_gemm_choice_get(&step->arguments.gemm, &choice));
    return choice;
}

/* Most shapes are there twice: once is enough. */
static void tune(gpu_bench *bench, const layer_report *report, layer_step *step) {
    (void)report;
    if (!is_product(step) || choice_of(step).is_measured) return;
    GPU_BENCH_TRY(tn_gemm_tune(&step->arguments.gemm, bench->stream));
    const tn_gemm_choice choice = choice_of(step);
    if (!bench->is_rehearsal)
        fprintf(stderr, "tenure-bench-layer: %s: %d of %d offers, %.1f us: %s\n", step->name,
                choice.algorithm, choice.algorithms, choice.us, choice.description);
}

/* ---- times ---------------------------------------------------------------------------------- */

static void copy(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_convert(argument, bench->stream));
}

static double measure_copy_rate(gpu_bench *bench, const layer_shape *shape) {
    const double row_bytes = 2.0 * (double)shape->ffn;
    const int64_t most = (int64_t)(copy_bytes / row_bytes);
    const int64_t rows = most < shape->tokens ? most : shape->tokens;
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    args.x = gpu_bench_random(bench, TN_BF16, rows, shape->ffn);
    args.y = gpu_bench_zeros(bench, TN_BF16, rows, shape->ffn);
    const double rate =
        2.0 * (double)rows * row_bytes / gpu_bench_device_seconds(bench, copy, &args);
    gpu_bench_destroy(bench, args.x);
    gpu_bench_destroy(bench, args.y);
    return rate;
}

/* What is told of the tuning is of the best algorithm, alone; on the host there is none. */
static void measure_step(gpu_bench *bench, const layer_report *report, layer_step *step) {
    step->seconds = gpu_bench_device_seconds(bench, step->work, &step->arguments);
    step->limit = step->bytes / report->copy_rate;
    if (!is_product(step)) return;
    const double tuned = choice_of(step).us * 1e-6;
    step->limit = tuned > 0.0 && tuned < step->seconds ? tuned : step->seconds;
}

/* One way of some, which take turns; rounds: seconds of each. */
typedef struct rival {
    gpu_bench_work work;
    void *argument;
    double *rounds, *seconds;
} rival;

/* Sets seconds of each to the median; the median of the second's time / the first's. */
static double measure_in_turn(gpu_bench *bench, const rival *rivals, int count, int rounds) {
    double ratios[LAYER_ROUNDS_MAX];
    for (int round = 0; round < rounds; round++) {
        for (int turn = 0; turn < count; turn++) {
            const rival *of = &rivals[(round + turn) % count];
            of->rounds[round] = gpu_bench_gated_seconds(bench, of->work, of->argument, LAYER_TURNS);
        }
        ratios[round] = rivals[1].rounds[round] / rivals[0].rounds[round];
    }
    for (int i = 0; i < count; i++)
        *rivals[i].seconds = gpu_bench_median(rivals[i].rounds, rounds);
    return gpu_bench_median(ratios, rounds);
}

static void measure_pair(gpu_bench *bench, layer_report *report, int pair) {
    rival rivals[LAYER_SIDES];
    for (int of = 0; of < LAYER_SIDES; of++) {
        layer_side *side = &report->sides[pair][of];
        rivals[of] = (rival){run_side, side, side->rounds, &side->seconds};
    }
    report->ratio[pair] = measure_in_turn(bench, rivals, LAYER_SIDES, report->rounds);
}

static void measure_calls(gpu_bench *bench, layer_report *report) {
    rival rivals[LAYER_CALLS];
    for (int of = 0; of < LAYER_CALLS; of++) {
        layer_calls *calls = &report->calls[of];
        rivals[of] = (rival){layer_calls_run, calls, calls->rounds, &calls->seconds};
    }
    report->calls_ratio = measure_in_turn(bench, rivals, LAYER_CALLS, report->rounds);
}

/* The queue is empty when it begins, and holds them all. */
static double host_seconds(gpu_bench *bench, gpu_bench_work work, void *argument) {
    GPU_BENCH_TRY(tn_stream_synchronize(bench->device, bench->stream));
    const double start = gpu_bench_now();
    for (int turn = 0; turn < LAYER_TURNS; turn++)
        work(bench, argument, turn);
    const double seconds = (gpu_bench_now() - start) / LAYER_TURNS;
    GPU_BENCH_TRY(tn_stream_synchronize(bench->device, bench->stream));
    return seconds;
}

void layer_measure(gpu_bench *bench, layer_report *report) {
    for (int pair = 0; pair < LAYER_PAIRS; pair++)
        for (int of = 0; of < LAYER_SIDES; of++)
            run_side(bench, &report->sides[pair][of], 0);
    for_each_step(bench, report, tune);
    for (int pair = 0; pair < LAYER_PAIRS; pair++) {
        for (int of = 0; of < LAYER_SIDES; of++)
            report->sides[pair][of].host_seconds =
                host_seconds(bench, run_side, &report->sides[pair][of]);
        measure_pair(bench, report, pair);
    }
    for (int of = 0; of < LAYER_CALLS; of++)
        layer_calls_run(bench, &report->calls[of], 0);
    measure_calls(bench, report);
    for (int of = 0; of < LAYER_CALLS; of++) /* when the pool knows where each block goes */
        report->calls[of].host_seconds = host_seconds(bench, layer_calls_run, &report->calls[of]);
    report->copy_rate = measure_copy_rate(bench, &report->shape);
    for_each_step(bench, report, measure_step);
}
