/* Attention: times and TFLOP/s of both directions, bf16, 4096 tokens.
 *
 * Counted are the operations that the shape asks for: 4 S D forward and 10 S D backward for each
 * query, half of them if it is causal. Backward makes the scores twice, which is not counted.
 */
#include "gpu_bench.h"

#include <stdio.h>

#include "tenure_attention.h"

enum { TOKENS = 4096 };

static const struct {
    int64_t heads, heads_kv, head_dim, sequence;
    int is_causal;
} shapes[] = {{16, 16, 64, 1024, 0}, {16, 16, 64, 1024, 1}, {16, 16, 64, 256, 0},
              {16, 16, 64, 256, 1},  {16, 4, 128, 1024, 1}, {16, 16, 64, 4096, 1}};

typedef struct calls {
    tn_attention_forward_args forward;
    tn_attention_backward_args backward;
} calls;

static void run_forward(gpu_bench *bench, void *argument, int turn) {
    const calls *c = argument;
    (void)turn;
    GPU_BENCH_TRY(tn_attention_forward(&c->forward, bench->stream));
}

static void run_backward(gpu_bench *bench, void *argument, int turn) {
    const calls *c = argument;
    (void)turn;
    GPU_BENCH_TRY(tn_attention_backward(&c->backward, bench->stream));
}

static calls make_calls(gpu_bench *bench, size_t i) {
    const int64_t of_y = shapes[i].heads * shapes[i].head_dim;
    const int64_t all = of_y + 2 * shapes[i].heads_kv * shapes[i].head_dim;
    calls c = {TN_ATTENTION_FORWARD_ARGS_INIT, TN_ATTENTION_BACKWARD_ARGS_INIT};
    c.forward.qkv = c.backward.qkv = gpu_bench_random(bench, TN_BF16, TOKENS, all);
    c.forward.y = c.backward.y = gpu_bench_zeros(bench, TN_BF16, TOKENS, of_y);
    c.forward.log_sum = c.backward.log_sum =
        gpu_bench_zeros(bench, TN_FP32, shapes[i].heads, TOKENS);
    c.backward.dy = gpu_bench_random(bench, TN_BF16, TOKENS, of_y);
    c.backward.dqkv = gpu_bench_zeros(bench, TN_BF16, TOKENS, all);
    c.backward.scope = bench->scope;
    c.forward.heads = c.backward.heads = shapes[i].heads;
    c.forward.heads_kv = c.backward.heads_kv = shapes[i].heads_kv;
    c.forward.sequence = c.backward.sequence = shapes[i].sequence;
    c.forward.is_causal = c.backward.is_causal = shapes[i].is_causal;
    return c;
}

static void end_calls(gpu_bench *bench, const calls *c) {
    gpu_bench_destroy(bench, c->forward.qkv);
    gpu_bench_destroy(bench, c->forward.y);
    gpu_bench_destroy(bench, c->forward.log_sum);
    gpu_bench_destroy(bench, c->backward.dy);
    gpu_bench_destroy(bench, c->backward.dqkv);
}

void gpu_bench_attention(gpu_bench *bench, gpu_bench_section *section) {
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const double queries = (double)TOKENS * (double)shapes[i].heads;
        const double each = (double)shapes[i].sequence * (double)shapes[i].head_dim;
        const double operations = queries * each / (shapes[i].is_causal ? 2.0 : 1.0);
        char title[48];
        snprintf(title, sizeof title, "S %lld, %lld of %lld by %lld%s",
                 (long long)shapes[i].sequence, (long long)shapes[i].heads,
                 (long long)shapes[i].head_dim, (long long)shapes[i].heads_kv,
                 shapes[i].is_causal ? ", causal" : "");
        calls c = make_calls(bench, i);
        double *figures = gpu_bench_row_add(section, title)->figures;
        const double forward = gpu_bench_device_seconds(bench, run_forward, &c);
        const double backward = gpu_bench_device_seconds(bench, run_backward, &c);
        figures[0] = forward * 1e6, figures[1] = 4.0 * operations / forward * 1e-12;
        figures[2] = backward * 1e6, figures[3] = 10.0 * operations / backward * 1e-12;
        end_calls(bench, &c);
    }
}
