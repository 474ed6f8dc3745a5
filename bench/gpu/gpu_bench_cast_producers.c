/* Ops that make a value and cast it in the same pass: activations, their gradients, bias gradients
 * and norms. Their x, of the size that is measured, is bf16; gated ones make half as many columns.
 * "1D both" alone leaves the value itself unwritten, "+ y" and "+ dx" writes it too. */
#include "gpu_bench_cast.h"
#include "tenure_train.h"

#define ROW   TN_QUANTIZE_ROW
#define BOTH  (TN_QUANTIZE_ROW | TN_QUANTIZE_COL)
#define PLAIN TN_FORMAT_PLAIN
#define D1    TN_FORMAT_FP8_BLOCK_1D
#define D2    TN_FORMAT_FP8_BLOCK_2D

static int has(const gpu_cast *op, unsigned flag) { return (op->flags & flag) != 0; }

/* What is quantized, of `cols` columns: makes it and counts its bytes. */
static void add_quantized(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set, int64_t cols) {
    if (op->format == PLAIN) return;
    set->q = gpu_bench_quantized(bench, op->format, TN_SCALE_POW2, set->rows, cols);
    set->bytes += gpu_cast_plane_bytes(set->q, op->planes);
}

static tn_quantized_out quantized_out(const gpu_cast *op, const gpu_cast_set *set) {
    tn_quantized_out out = TN_QUANTIZED_OUT_INIT;
    out.tensor = set->q;
    out.planes = op->planes;
    return out;
}

static void add_data_bytes(gpu_cast_set *set, tn_tensor tensor) {
    set->bytes += gpu_cast_data_bytes(tensor);
}

/* ---- activations ---------------------------------------------------------------------------- */

static void prepare_activation(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    int64_t cols = has(op, GPU_CAST_GATED) ? set->cols / 2 : set->cols;
    set->x = gpu_bench_random(bench, TN_BF16, set->rows, set->cols);
    if (has(op, GPU_CAST_WEIGHTED)) set->weights = gpu_bench_random(bench, TN_FP32, set->rows, 1);
    if (has(op, GPU_CAST_Y)) set->y = gpu_bench_zeros(bench, TN_BF16, set->rows, cols);
    add_data_bytes(set, set->x);
    add_data_bytes(set, set->weights);
    add_data_bytes(set, set->y);
    add_quantized(bench, op, set, cols);
}

static void activation(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    args.activation = (tn_activation)op->kind;
    args.gated = has(op, GPU_CAST_GATED);
    args.x = set->x;
    args.weights = set->weights;
    args.y = set->y;
    args.quantized = quantized_out(op, set);
    GPU_BENCH_TRY(tn_activation_forward(&args, bench->stream));
}

static void prepare_gradient(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    int64_t cols = has(op, GPU_CAST_GATED) ? set->cols / 2 : set->cols;
    set->x = gpu_bench_random(bench, TN_BF16, set->rows, set->cols);
    set->other = gpu_bench_random(bench, TN_BF16, set->rows, cols);
    if (has(op, GPU_CAST_WEIGHTED)) set->weights = gpu_bench_random(bench, TN_FP32, set->rows, 1);
    if (has(op, GPU_CAST_Y)) set->y = gpu_bench_zeros(bench, TN_BF16, set->rows, set->cols);
    if (has(op, GPU_CAST_DBIAS)) set->dbias = gpu_bench_zeros(bench, TN_BF16, 1, set->cols);
    add_data_bytes(set, set->x);
    add_data_bytes(set, set->other);
    add_data_bytes(set, set->weights);
    add_data_bytes(set, set->y);
    add_data_bytes(set, set->dbias);
    add_quantized(bench, op, set, set->cols);
}

static void gradient(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    args.activation = (tn_activation)op->kind;
    args.gated = has(op, GPU_CAST_GATED);
    args.dy = set->other;
    args.x = set->x;
    args.weights = set->weights;
    args.dx = set->y;
    args.quantized = quantized_out(op, set);
    args.dbias = set->dbias;
    args.scope = bench->scope;
    GPU_BENCH_TRY(tn_activation_backward(&args, bench->stream));
}

static void prepare_bias(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    set->x = gpu_bench_random(bench, TN_BF16, set->rows, set->cols);
    set->dbias = gpu_bench_zeros(bench, TN_BF16, 1, set->cols);
    add_data_bytes(set, set->x);
    add_data_bytes(set, set->dbias);
    add_quantized(bench, op, set, set->cols);
}

static void bias(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_bias_gradient_args args = TN_BIAS_GRADIENT_ARGS_INIT;
    args.dy = set->x;
    args.quantized = quantized_out(op, set);
    args.dbias = set->dbias;
    args.scope = bench->scope;
    GPU_BENCH_TRY(tn_bias_gradient(&args, bench->stream));
}

static const gpu_cast_family activations = {prepare_activation, activation};
static const gpu_cast_family gradients = {prepare_gradient, gradient};
static const gpu_cast_family biases = {prepare_bias, bias};

/* ---- norms ---------------------------------------------------------------------------------- */

static void prepare_statistics(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    set->weights = gpu_bench_random(bench, TN_BF16, 1, set->cols);
    set->rstd = gpu_bench_zeros(bench, TN_FP32, set->rows, 1);
    if (op->kind == TN_NORM_LAYER) {
        set->beta = gpu_bench_random(bench, TN_BF16, 1, set->cols);
        set->mean = gpu_bench_zeros(bench, TN_FP32, set->rows, 1);
    }
    add_data_bytes(set, set->weights);
    add_data_bytes(set, set->beta);
    add_data_bytes(set, set->rstd);
    add_data_bytes(set, set->mean);
}

static void prepare_norm(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    set->x = gpu_bench_random(bench, TN_BF16, set->rows, set->cols);
    if (has(op, GPU_CAST_RESIDUAL)) {
        set->other = gpu_bench_random(bench, TN_BF16, set->rows, set->cols);
        set->sum = gpu_bench_zeros(bench, TN_BF16, set->rows, set->cols);
    }
    if (has(op, GPU_CAST_Y)) set->y = gpu_bench_zeros(bench, TN_BF16, set->rows, set->cols);
    add_data_bytes(set, set->x);
    add_data_bytes(set, set->other);
    add_data_bytes(set, set->sum);
    add_data_bytes(set, set->y);
    prepare_statistics(bench, op, set);
    add_quantized(bench, op, set, set->cols);
}

static void norm(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_norm_args args = TN_NORM_ARGS_INIT;
    args.norm = (tn_norm)op->kind;
    args.x = set->x;
    args.residual = set->other;
    args.sum = set->sum;
    args.gamma = set->weights;
    args.beta = set->beta;
    args.y = set->y;
    args.quantized = quantized_out(op, set);
    args.mean = set->mean;
    args.rstd = set->rstd;
    args.scope = bench->scope;
    GPU_BENCH_TRY(tn_norm_forward(&args, bench->stream));
}

/* dgamma and dbeta are made too; with a residual its gradient is added. */
static void prepare_norm_gradient(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set) {
    set->x = gpu_bench_random(bench, TN_BF16, set->rows, set->cols);
    set->other = gpu_bench_random(bench, TN_BF16, set->rows, set->cols);
    if (has(op, GPU_CAST_RESIDUAL))
        set->sum = gpu_bench_random(bench, TN_BF16, set->rows, set->cols);
    set->y = gpu_bench_zeros(bench, TN_BF16, set->rows, set->cols);
    set->weights = gpu_bench_random(bench, TN_BF16, 1, set->cols);
    set->rstd = gpu_bench_random(bench, TN_FP32, set->rows, 1);
    set->dgamma = gpu_bench_zeros(bench, TN_BF16, 1, set->cols);
    if (op->kind == TN_NORM_LAYER) {
        set->mean = gpu_bench_random(bench, TN_FP32, set->rows, 1);
        set->dbeta = gpu_bench_zeros(bench, TN_BF16, 1, set->cols);
    }
    const tn_tensor moved[] = {set->x,    set->other, set->sum,    set->y,    set->weights,
                               set->rstd, set->mean,  set->dgamma, set->dbeta};
    for (size_t i = 0; i < sizeof moved / sizeof *moved; i++)
        add_data_bytes(set, moved[i]);
    add_quantized(bench, op, set, set->cols);
}

static void norm_gradient(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set) {
    tn_norm_backward_args args = TN_NORM_BACKWARD_ARGS_INIT;
    args.norm = (tn_norm)op->kind;
    args.dy = set->other;
    args.x = set->x;
    args.mean = set->mean;
    args.rstd = set->rstd;
    args.gamma = set->weights;
    args.added = set->sum;
    args.dx = set->y;
    args.quantized = quantized_out(op, set);
    args.dgamma = set->dgamma;
    args.dbeta = set->dbeta;
    args.scope = bench->scope;
    GPU_BENCH_TRY(tn_norm_backward(&args, bench->stream));
}

static const gpu_cast_family norms = {prepare_norm, norm};
static const gpu_cast_family norm_gradients = {prepare_norm_gradient, norm_gradient};

/* ---- the table ------------------------------------------------------------------------------ */

#define MAKE(text, of, what, to, which, more)                                                      \
    {                                                                                              \
        .name = text, .family = of, .dtype = TN_BF16, .format = to, .planes = which, .kind = what, \
        .flags = more                                                                              \
    }
#define FORWARD(text, what, to, which, more) MAKE(text, &activations, what, to, which, more)
#define BACKWARD(of, text, what, to, which, more)                                                  \
    MAKE(of " backward " text, &gradients, what, to, which, more)
#define BIAS(text, to, which)             MAKE("bias gradient" text, &biases, 0, to, which, 0)
#define NORM(text, what, to, which, more) MAKE(text, &norms, what, to, which, more)
#define NORM_BACKWARD(of, text, what, to, which, more)                                             \
    MAKE(of " backward " text, &norm_gradients, what, to, which, more)
#define GELU          TN_ACTIVATION_GELU
#define QUICK         TN_ACTIVATION_QUICK_GELU
#define SILU          TN_ACTIVATION_SILU
#define RELU          TN_ACTIVATION_RELU
#define SQUARED       TN_ACTIVATION_SQUARED_RELU
#define GATED         GPU_CAST_GATED
#define WITH_Y        GPU_CAST_Y
#define WITH_DBIAS    GPU_CAST_DBIAS
#define WITH_WEIGHTS  GPU_CAST_WEIGHTED
#define WITH_RESIDUAL GPU_CAST_RESIDUAL
#define RMS           TN_NORM_RMS
#define LAYER         TN_NORM_LAYER

static const gpu_cast ops[] = {
    FORWARD("GELU 1D both", GELU, D1, BOTH, 0),
    FORWARD("quick GELU 1D both", QUICK, D1, BOTH, 0),
    FORWARD("SiLU 1D both", SILU, D1, BOTH, 0),
    FORWARD("ReLU 1D both", RELU, D1, BOTH, 0),
    FORWARD("squared ReLU 1D both", SQUARED, D1, BOTH, 0),
    FORWARD("GELU y", GELU, PLAIN, 0, WITH_Y),
    FORWARD("GELU 1D row", GELU, D1, ROW, 0),
    FORWARD("GELU 1D both + y", GELU, D1, BOTH, WITH_Y),
    FORWARD("GELU 2D both", GELU, D2, BOTH, 0),
    FORWARD("GeGLU 1D both", GELU, D1, BOTH, GATED),
    FORWARD("quick GeGLU 1D both", QUICK, D1, BOTH, GATED),
    FORWARD("SwiGLU 1D both", SILU, D1, BOTH, GATED),
    FORWARD("ReGLU 1D both", RELU, D1, BOTH, GATED),
    FORWARD("squared ReGLU 1D both", SQUARED, D1, BOTH, GATED),
    FORWARD("SwiGLU y", SILU, PLAIN, 0, GATED | WITH_Y),
    FORWARD("SwiGLU 1D row", SILU, D1, ROW, GATED),
    FORWARD("SwiGLU 1D both + y", SILU, D1, BOTH, GATED | WITH_Y),
    FORWARD("SwiGLU 2D both", SILU, D2, BOTH, GATED),
    FORWARD("weighted SwiGLU 1D both", SILU, D1, BOTH, GATED | WITH_WEIGHTS),
    BACKWARD("GELU", "1D both", GELU, D1, BOTH, 0),
    BACKWARD("quick GELU", "1D both", QUICK, D1, BOTH, 0),
    BACKWARD("SiLU", "1D both", SILU, D1, BOTH, 0),
    BACKWARD("ReLU", "1D both", RELU, D1, BOTH, 0),
    BACKWARD("squared ReLU", "1D both", SQUARED, D1, BOTH, 0),
    BACKWARD("GELU", "dx", GELU, PLAIN, 0, WITH_Y),
    BACKWARD("GELU", "1D row", GELU, D1, ROW, 0),
    BACKWARD("GELU", "1D both + dx", GELU, D1, BOTH, WITH_Y),
    BACKWARD("GELU", "1D both + dbias", GELU, D1, BOTH, WITH_DBIAS),
    BACKWARD("GeGLU", "1D both", GELU, D1, BOTH, GATED),
    BACKWARD("quick GeGLU", "1D both", QUICK, D1, BOTH, GATED),
    BACKWARD("SwiGLU", "1D both", SILU, D1, BOTH, GATED),
    BACKWARD("ReGLU", "1D both", RELU, D1, BOTH, GATED),
    BACKWARD("squared ReGLU", "1D both", SQUARED, D1, BOTH, GATED),
    BACKWARD("SwiGLU", "dx", SILU, PLAIN, 0, GATED | WITH_Y),
    BACKWARD("SwiGLU", "1D row", SILU, D1, ROW, GATED),
    BACKWARD("SwiGLU", "1D both + dx", SILU, D1, BOTH, GATED | WITH_Y),
    BACKWARD("SwiGLU", "1D both + dbias", SILU, D1, BOTH, GATED | WITH_DBIAS),
    BACKWARD("weighted SwiGLU", "1D both", SILU, D1, BOTH, GATED | WITH_WEIGHTS),
    BIAS("", PLAIN, 0),
    BIAS(" + 1D row", D1, ROW),
    BIAS(" + 1D both", D1, BOTH),
    BIAS(" + 2D both", D2, BOTH),
    NORM("RMSNorm y", RMS, PLAIN, 0, WITH_Y),
    NORM("RMSNorm 1D row", RMS, D1, ROW, 0),
    NORM("RMSNorm 1D both", RMS, D1, BOTH, 0),
    NORM("RMSNorm 1D both + y", RMS, D1, BOTH, WITH_Y),
    NORM("RMSNorm 2D both", RMS, D2, BOTH, 0),
    NORM("LayerNorm y", LAYER, PLAIN, 0, WITH_Y),
    NORM("LayerNorm 1D row", LAYER, D1, ROW, 0),
    NORM("LayerNorm 1D both", LAYER, D1, BOTH, 0),
    NORM("LayerNorm 1D both + y", LAYER, D1, BOTH, WITH_Y),
    NORM("residual + RMSNorm y", RMS, PLAIN, 0, WITH_RESIDUAL | WITH_Y),
    NORM("residual + RMSNorm 1D row", RMS, D1, ROW, WITH_RESIDUAL),
    NORM("residual + RMSNorm 1D both", RMS, D1, BOTH, WITH_RESIDUAL),
    NORM("residual + RMSNorm 1D both + y", RMS, D1, BOTH, WITH_RESIDUAL | WITH_Y),
    NORM("residual + LayerNorm 1D both", LAYER, D1, BOTH, WITH_RESIDUAL),
    NORM_BACKWARD("RMSNorm", "dx", RMS, PLAIN, 0, 0),
    NORM_BACKWARD("RMSNorm", "1D both + dx", RMS, D1, BOTH, 0),
    NORM_BACKWARD("LayerNorm", "dx", LAYER, PLAIN, 0, 0),
    NORM_BACKWARD("residual + RMSNorm", "dx", RMS, PLAIN, 0, WITH_RESIDUAL),
    NORM_BACKWARD("residual + LayerNorm", "dx", LAYER, PLAIN, 0, WITH_RESIDUAL),
};

gpu_cast_table gpu_bench_cast_producers(void) {
    return (gpu_cast_table){ops, (int)(sizeof ops / sizeof *ops)};
}
