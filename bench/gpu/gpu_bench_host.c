/* What the host pays: a warm alloc and free, and the calls of ops that have next to no work. */
#include "gpu_bench.h"

#include <stdio.h>

#include "tenure_layers.h"

enum { PAIRS = 20000, TINY = 128 };

/* ---- the pool ------------------------------------------------------------------------------ */

static double pair_seconds(gpu_bench *bench, size_t bytes) {
    double seconds[GPU_BENCH_BATCHES];
    for (int batch = -1; batch < GPU_BENCH_BATCHES; batch++) {
        double start = gpu_bench_now();
        for (int i = 0; i < PAIRS; i++) {
            void *block;
            GPU_BENCH_TRY(tn_alloc(bench->pool, bytes, bench->stream, NULL, &block));
            GPU_BENCH_TRY(tn_free(block, bench->stream));
        }
        if (batch >= 0) seconds[batch] = (gpu_bench_now() - start) / PAIRS;
    }
    return gpu_bench_median(seconds, GPU_BENCH_BATCHES);
}

void gpu_bench_pool(gpu_bench *bench, gpu_bench_section *section) {
    static const struct {
        const char *title;
        size_t bytes;
    } sizes[] = {{"512 B", 512},
                 {"1 MiB", (size_t)1 << 20},
                 {"64 MiB", (size_t)64 << 20},
                 {"1 GiB", (size_t)1 << 30}};
    for (int i = 0; i < 4; i++) {
        gpu_bench_row *row = gpu_bench_row_add(section, sizes[i].title);
        row->figures[0] = pair_seconds(bench, sizes[i].bytes) * 1e9;
    }
}

/* ---- calls of ops -------------------------------------------------------------------------- */

static void quantize(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_quantize(argument, bench->stream));
}

static void multiply(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_gemm(argument, bench->stream));
}

static void forward(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_linear_forward(argument, NULL, bench->stream));
}

static void fill(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_fill(bench->device, argument, 0, TINY, bench->stream));
}

static void add(gpu_bench *bench, gpu_bench_section *section, const char *title,
                gpu_bench_work work, void *argument) {
    gpu_bench_row *row = gpu_bench_row_add(section, title);
    row->figures[0] = gpu_bench_host_seconds(bench, work, argument) * 1e6;
}

static void add_quantize(gpu_bench *bench, gpu_bench_section *section) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = gpu_bench_random(bench, TN_BF16, TINY, TINY);
    args.dst = gpu_bench_quantized(bench, TN_FORMAT_FP8_BLOCK_1D, TN_SCALE_POW2, TINY, TINY);
    add(bench, section, "tn_quantize", quantize, &args);
    gpu_bench_destroy(bench, args.src);
    gpu_bench_destroy(bench, args.dst);
}

static void add_gemms(gpu_bench *bench, gpu_bench_section *section) {
    tn_gemm_args fp8 = TN_GEMM_ARGS_INIT, plain = TN_GEMM_ARGS_INIT;
    fp8.a = gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW, TINY, TINY);
    fp8.b = gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW, TINY, TINY);
    plain.a = gpu_bench_random(bench, TN_BF16, TINY, TINY);
    plain.b = gpu_bench_random(bench, TN_BF16, TINY, TINY);
    fp8.d = plain.d = gpu_bench_zeros(bench, TN_BF16, TINY, TINY);
    fp8.scope = plain.scope = bench->scope;
    add(bench, section, "tn_gemm, FP8", multiply, &fp8);
    add(bench, section, "tn_gemm, bf16", multiply, &plain);
    gpu_bench_destroy(bench, fp8.a);
    gpu_bench_destroy(bench, fp8.b);
    gpu_bench_destroy(bench, plain.a);
    gpu_bench_destroy(bench, plain.b);
    gpu_bench_destroy(bench, plain.d);
}

static void add_linear(gpu_bench *bench, gpu_bench_section *section) {
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = gpu_bench_random(bench, TN_BF16, TINY, TINY);
    args.w.weight =
        gpu_bench_random_quantized(bench, TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW, TINY, TINY);
    args.y = gpu_bench_zeros(bench, TN_BF16, TINY, TINY);
    args.common.scope = bench->scope;
    GPU_BENCH_TRY(tn_tensor_set_frozen(args.w.weight, 1));
    add(bench, section, "tn_linear_forward", forward, &args);
    gpu_bench_destroy(bench, args.x);
    gpu_bench_destroy(bench, args.w.weight);
    gpu_bench_destroy(bench, args.y);
}

void gpu_bench_calls(gpu_bench *bench, gpu_bench_section *section) {
    void *block;
    GPU_BENCH_TRY(tn_alloc(bench->pool, TINY, bench->stream, NULL, &block));
    add(bench, section, "tn_fill (one driver call)", fill, block);
    GPU_BENCH_TRY(tn_free(block, bench->stream));
    add_quantize(bench, section);
    add_gemms(bench, section);
    add_linear(bench, section);
}
