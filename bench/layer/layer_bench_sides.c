/* The sides of tenure-bench-layer: the tensors of a transformer layer, and its steps in order.
 *
 *     x -> norm -> QKV -> (attention, not here) -> proj -> + x -> norm -> FC1 -> GELU -> FC2
 *
 * Both sides work on the same unquantized tensors; the FP8 side has quantized ones of its own. What
 * comes from outside, x, the attention's output, dy and the attention's gradient, is random.
 */
#include <string.h>

#include "error.h"
#include "layer_bench.h"

typedef enum layer_product { QKV = 0, PROJ, FC1, FC2, PRODUCTS } layer_product;

static const char *const product_names[PRODUCTS] = {"QKV", "proj", "FC1", "FC2"};

/* Of one product y = x w^T. */
typedef struct product_tensors {
    int64_t rows, cols; /* of w: y's columns, x's columns */
    tn_tensor w;        /* bf16 */
    tn_tensor w_q;      /* 2D */
    tn_tensor x, y;     /* bf16 */
    tn_tensor dx, dy;
    tn_tensor x_q, dy_q; /* 1D */
    tn_tensor dw;        /* the main gradient */
} product_tensors;

typedef struct layer_tensors {
    product_tensors of[PRODUCTS];
    tn_tensor x, sum, dy;  /* of the layer: its input, what FC1's norm has read, its gradient */
    tn_tensor dsum, dx;    /* of the two norms' inputs */
    tn_tensor gamma, beta; /* both norms have the same ones */
    tn_tensor dgamma, dbeta;
    tn_tensor mean[2], rstd[2];
} layer_tensors;

/* ---- tensors -------------------------------------------------------------------------------- */

static tn_tensor quantized(gpu_bench *bench, tn_format format, int64_t rows, int64_t cols) {
    return gpu_bench_quantized(bench, format, TN_SCALE_POW2, rows, cols);
}

/* x and dy, where they are what another product makes or is given, are the caller's to set. */
static void make_product(gpu_bench *bench, const layer_shape *shape, int64_t rows, int64_t cols,
                         product_tensors *out) {
    out->rows = rows;
    out->cols = cols;
    out->w = gpu_bench_random(bench, TN_BF16, rows, cols);
    out->w_q = quantized(bench, TN_FORMAT_FP8_BLOCK_2D, rows, cols);
    out->x = gpu_bench_random(bench, TN_BF16, shape->tokens, cols);
    out->y = gpu_bench_zeros(bench, TN_BF16, shape->tokens, rows);
    out->dx = gpu_bench_zeros(bench, TN_BF16, shape->tokens, cols);
    out->dy = gpu_bench_random(bench, TN_BF16, shape->tokens, rows);
    out->x_q = quantized(bench, TN_FORMAT_FP8_BLOCK_1D, shape->tokens, cols);
    out->dy_q = quantized(bench, TN_FORMAT_FP8_BLOCK_1D, shape->tokens, rows);
    out->dw = gpu_bench_zeros(bench, shape->main_gradient, rows, cols);
}

static layer_tensors make_tensors(gpu_bench *bench, const layer_shape *shape) {
    const int64_t hidden = shape->hidden, tokens = shape->tokens;
    layer_tensors t;
    memset(&t, 0, sizeof t);
    make_product(bench, shape, 3 * hidden, hidden, &t.of[QKV]);
    make_product(bench, shape, hidden, hidden, &t.of[PROJ]);
    make_product(bench, shape, shape->ffn, hidden, &t.of[FC1]);
    make_product(bench, shape, hidden, shape->ffn, &t.of[FC2]);
    t.x = gpu_bench_random(bench, TN_BF16, tokens, hidden);
    t.sum = gpu_bench_zeros(bench, TN_BF16, tokens, hidden);
    t.dy = t.of[FC2].dy;
    t.dsum = t.of[PROJ].dy;
    t.dx = gpu_bench_zeros(bench, TN_BF16, tokens, hidden);
    t.gamma = gpu_bench_random(bench, TN_BF16, 1, hidden);
    t.beta = gpu_bench_random(bench, TN_BF16, 1, hidden);
    t.dgamma = gpu_bench_zeros(bench, TN_FP32, 1, hidden);
    t.dbeta = gpu_bench_zeros(bench, TN_FP32, 1, hidden);
    for (int i = 0; i < 2; i++) {
        t.mean[i] = gpu_bench_zeros(bench, TN_FP32, 1, tokens);
        t.rstd[i] = gpu_bench_zeros(bench, TN_FP32, 1, tokens);
    }
    return t;
}

static double data_bytes(tn_tensor tensor) {
    return tensor.value ? gpu_bench_plane_bytes(tensor, TN_PLANE_DATA) : 0.0;
}

static double both_bytes(tn_tensor tensor) {
    return gpu_bench_plane_bytes(tensor, TN_PLANE_ROW) +
           gpu_bench_plane_bytes(tensor, TN_PLANE_COL);
}

/* ---- steps ---------------------------------------------------------------------------------- */

static layer_step *add(layer_side *side, layer_kind kind, gpu_bench_work work, const char *what,
                       const char *of) {
    TN_CHECK(side->count < LAYER_STEPS_MAX);
    layer_step *step = &side->steps[side->count++];
    memset(step, 0, sizeof *step);
    snprintf(step->name, sizeof step->name, "%s %s", of, what);
    step->kind = kind;
    step->work = work;
    return step;
}

static void quantize(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_quantize(argument, bench->stream));
}

static void add_cast(layer_side *side, const char *what, layer_product product, tn_tensor src,
                     tn_tensor dst) {
    layer_step *step = add(side, LAYER_CAST, quantize, what, product_names[product]);
    step->arguments.quantize = (tn_quantize_args)TN_QUANTIZE_ARGS_INIT;
    step->arguments.quantize.src = src;
    step->arguments.quantize.dst = dst;
    step->arguments.quantize.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    step->bytes = data_bytes(src) + both_bytes(dst);
}

/* As after an optimizer's step: COL is derived when it is needed. */
static void add_weight_cast(layer_side *side, layer_product product, const product_tensors *of) {
    add_cast(side, "w cast", product, of->w, of->w_q);
    layer_step *step = &side->steps[side->count - 1];
    step->arguments.quantize.planes = TN_QUANTIZE_ROW;
    step->bytes = data_bytes(of->w) + gpu_bench_plane_bytes(of->w_q, TN_PLANE_ROW);
}

static void derive(gpu_bench *bench, void *argument, int turn) {
    const tn_transpose_args *args = argument;
    (void)turn;
    GPU_BENCH_TRY(tn_plane_drop(args->tensor, args->to, bench->stream));
    GPU_BENCH_TRY(tn_transpose(args, bench->stream));
}

static void add_derivation(layer_side *side, layer_product product, const product_tensors *of) {
    layer_step *step = add(side, LAYER_CAST, derive, "w transposed", product_names[product]);
    step->arguments.transpose = (tn_transpose_args)TN_TRANSPOSE_ARGS_INIT;
    step->arguments.transpose.tensor = of->w_q;
    step->bytes = both_bytes(of->w_q);
}

static void multiply(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_gemm(argument, bench->stream));
}

static void add_product(gpu_bench *bench, layer_side *side, layer_kind kind, layer_product product,
                        const layer_shape *shape, const product_tensors *of) {
    static const char *const names[] = {
        [LAYER_FPROP] = "fprop", [LAYER_DGRAD] = "dgrad", [LAYER_WGRAD] = "wgrad"};
    static const tn_gemm_form forms[] = {[LAYER_FPROP] = TN_GEMM_FPROP,
                                         [LAYER_DGRAD] = TN_GEMM_DGRAD,
                                         [LAYER_WGRAD] = TN_GEMM_WGRAD};
    const tn_tensor w = side->is_fp8 ? of->w_q : of->w, x = side->is_fp8 ? of->x_q : of->x,
                    dy = side->is_fp8 ? of->dy_q : of->dy;
    layer_step *step = add(side, kind, multiply, names[kind], product_names[product]);
    tn_gemm_args *args = &step->arguments.gemm;
    *args = (tn_gemm_args)TN_GEMM_ARGS_INIT;
    args->form = forms[kind];
    args->a = kind == LAYER_FPROP ? x : dy;
    args->b = kind == LAYER_WGRAD ? x : w;
    args->d = kind == LAYER_FPROP ? of->y : kind == LAYER_DGRAD ? of->dx : of->dw;
    args->accumulate = kind == LAYER_WGRAD;
    args->scope = bench->scope;
    step->flop = 2.0 * (double)shape->tokens * (double)of->rows * (double)of->cols;
}

static void normalize(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_norm_forward(argument, bench->stream));
}

/* Of x, or of x + residual, which goes to `sum`: into bf16, or into both planes. */
static void add_norm(gpu_bench *bench, layer_side *side, layer_product product,
                     const layer_tensors *t, tn_tensor x, tn_tensor residual) {
    const product_tensors *of = &t->of[product];
    const int number = product == FC1;
    layer_step *step = add(side, LAYER_NORM, normalize, "norm", product_names[product]);
    tn_norm_args *args = &step->arguments.norm;
    *args = (tn_norm_args)TN_NORM_ARGS_INIT;
    args->norm = TN_NORM_LAYER;
    args->x = x;
    args->residual = residual;
    if (residual.value) args->sum = t->sum;
    args->gamma = t->gamma;
    args->beta = t->beta;
    args->mean = t->mean[number];
    args->rstd = t->rstd[number];
    args->scope = bench->scope;
    if (side->is_fp8) {
        args->quantized.tensor = of->x_q;
        args->quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    } else {
        args->y = of->x;
    }
    step->bytes = data_bytes(x) + data_bytes(residual) + data_bytes(args->sum) +
                  (side->is_fp8 ? both_bytes(of->x_q) : data_bytes(of->x)) +
                  data_bytes(args->gamma) + data_bytes(args->beta) + data_bytes(args->mean) +
                  data_bytes(args->rstd);
}

static void differentiate_norm(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_norm_backward(argument, bench->stream));
}

static void add_norm_backward(gpu_bench *bench, layer_side *side, layer_product product,
                              const layer_tensors *t, tn_tensor added, tn_tensor dx) {
    const int number = product == FC1;
    layer_step *step =
        add(side, LAYER_NORM, differentiate_norm, "norm backward", product_names[product]);
    tn_norm_backward_args *args = &step->arguments.norm_backward;
    *args = (tn_norm_backward_args)TN_NORM_BACKWARD_ARGS_INIT;
    args->norm = TN_NORM_LAYER;
    args->dy = t->of[product].dx;
    args->x = product == FC1 ? t->sum : t->x;
    args->mean = t->mean[number];
    args->rstd = t->rstd[number];
    args->gamma = t->gamma;
    args->added = added;
    args->dx = dx;
    args->dgamma = t->dgamma;
    args->dbeta = t->dbeta;
    args->accumulate = 1;
    args->scope = bench->scope;
    step->bytes = data_bytes(args->dy) + data_bytes(args->x) + data_bytes(added) + data_bytes(dx) +
                  data_bytes(args->mean) + data_bytes(args->rstd) + data_bytes(args->gamma) +
                  2.0 * data_bytes(args->dgamma) + 2.0 * data_bytes(args->dbeta);
}

static void activate(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_activation_forward(argument, bench->stream));
}

static void add_activation(layer_side *side, const layer_tensors *t) {
    const product_tensors *of = &t->of[FC2];
    layer_step *step = add(side, LAYER_ACTIVATION, activate, "GELU", product_names[FC2]);
    tn_activation_args *args = &step->arguments.activation;
    *args = (tn_activation_args)TN_ACTIVATION_ARGS_INIT;
    args->x = t->of[FC1].y;
    if (side->is_fp8) {
        args->quantized.tensor = of->x_q;
        args->quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    } else {
        args->y = of->x;
    }
    step->bytes = data_bytes(args->x) + (side->is_fp8 ? both_bytes(of->x_q) : data_bytes(of->x));
}

static void differentiate(gpu_bench *bench, void *argument, int turn) {
    (void)turn;
    GPU_BENCH_TRY(tn_activation_backward(argument, bench->stream));
}

static void add_activation_backward(gpu_bench *bench, layer_side *side, const layer_tensors *t) {
    const product_tensors *of = &t->of[FC1];
    layer_step *step =
        add(side, LAYER_ACTIVATION, differentiate, "GELU backward", product_names[FC2]);
    tn_activation_backward_args *args = &step->arguments.activation_backward;
    *args = (tn_activation_backward_args)TN_ACTIVATION_BACKWARD_ARGS_INIT;
    args->dy = t->of[FC2].dx;
    args->x = of->y;
    args->scope = bench->scope;
    if (side->is_fp8) {
        args->quantized.tensor = of->dy_q;
        args->quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    } else {
        args->dx = of->dy;
    }
    step->bytes = data_bytes(args->dy) + data_bytes(args->x) +
                  (side->is_fp8 ? both_bytes(of->dy_q) : data_bytes(of->dy));
}

/* ---- sides ---------------------------------------------------------------------------------- */

/* y = x w^T, x quantized before if it comes unquantized. */
static void add_forward(gpu_bench *bench, layer_side *side, const layer_shape *shape,
                        layer_product product, const product_tensors *of, int is_quantized) {
    if (side->is_fp8) add_weight_cast(side, product, of);
    if (side->is_fp8 && !is_quantized) add_cast(side, "x cast", product, of->x, of->x_q);
    add_product(bench, side, LAYER_FPROP, product, shape, of);
}

static void add_backward(gpu_bench *bench, layer_side *side, const layer_shape *shape,
                         layer_product product, const product_tensors *of, int is_quantized) {
    if (side->is_fp8 && !is_quantized) add_cast(side, "dy cast", product, of->dy, of->dy_q);
    if (side->is_fp8) add_derivation(side, product, of);
    add_product(bench, side, LAYER_DGRAD, product, shape, of);
    add_product(bench, side, LAYER_WGRAD, product, shape, of);
}

static void make_products(gpu_bench *bench, layer_side *side, const layer_shape *shape,
                          const layer_tensors *t) {
    for (int product = 0; product < PRODUCTS; product++)
        add_forward(bench, side, shape, (layer_product)product, &t->of[product], 0);
    for (int product = PRODUCTS; product-- > 0;)
        add_backward(bench, side, shape, (layer_product)product, &t->of[product], 0);
}

static void make_whole(gpu_bench *bench, layer_side *side, const layer_shape *shape,
                       const layer_tensors *t) {
    const tn_tensor none = {0};
    add_norm(bench, side, QKV, t, t->x, none);
    add_forward(bench, side, shape, QKV, &t->of[QKV], 1);
    add_forward(bench, side, shape, PROJ, &t->of[PROJ], 0);
    add_norm(bench, side, FC1, t, t->of[PROJ].y, t->x);
    add_forward(bench, side, shape, FC1, &t->of[FC1], 1);
    add_activation(side, t);
    add_forward(bench, side, shape, FC2, &t->of[FC2], 1);
    add_backward(bench, side, shape, FC2, &t->of[FC2], 0);
    add_activation_backward(bench, side, t);
    add_backward(bench, side, shape, FC1, &t->of[FC1], 1);
    add_norm_backward(bench, side, FC1, t, t->dy, t->dsum);
    add_backward(bench, side, shape, PROJ, &t->of[PROJ], 0);
    add_backward(bench, side, shape, QKV, &t->of[QKV], 0);
    add_norm_backward(bench, side, QKV, t, t->dsum, t->dx);
}

/* ---- through the layers ---------------------------------------------------------------------- */

static tn_layer_weight weight_of(const product_tensors *of, int is_fp8) {
    tn_layer_weight w = TN_LAYER_WEIGHT_INIT;
    w.weight = is_fp8 ? of->w_q : of->w;
    if (is_fp8) w.source = of->w;
    return w;
}

static tn_layer_gradient gradient_of(const product_tensors *of) {
    tn_layer_gradient gradient = TN_LAYER_GRADIENT_INIT;
    gradient.dweight = of->dw;
    gradient.accumulate = 1;
    return gradient;
}

/* side: 0 for none; next: the product whose dgrad comes next, whose weight's other plane is derived
 * there before it. */
static tn_layer_common common_of(const gpu_bench *bench, tn_stream side,
                                 const product_tensors *next, int is_fp8) {
    tn_layer_common common = TN_LAYER_COMMON_INIT;
    common.scope = common.saved_scope = bench->scope;
    common.side = side;
    if (is_fp8 && side && next) common.next_weight = next->w_q;
    return common;
}

static tn_layer_norm norm_of(const layer_tensors *t, tn_tensor x) {
    tn_layer_norm norm = TN_LAYER_NORM_INIT;
    norm.norm = TN_NORM_LAYER;
    norm.x = x;
    norm.gamma = t->gamma;
    norm.beta = t->beta;
    return norm;
}

static tn_layer_norm_gradient norm_gradient_of(const layer_tensors *t, tn_tensor x, tn_tensor added,
                                               tn_tensor dx) {
    tn_layer_norm_gradient norm = TN_LAYER_NORM_GRADIENT_INIT;
    norm.norm = TN_NORM_LAYER;
    norm.x = x;
    norm.gamma = t->gamma;
    norm.added = added;
    norm.dx = dx;
    norm.dgamma = t->dgamma;
    norm.dbeta = t->dbeta;
    norm.accumulate = 1;
    return norm;
}

static void make_forward_calls(const gpu_bench *bench, const layer_tensors *t, tn_stream side,
                               int is_fp8, layer_calls *calls) {
    const product_tensors *of = t->of;
    calls->qkv = (tn_norm_linear_forward_args)TN_NORM_LINEAR_FORWARD_ARGS_INIT;
    calls->qkv.norm = norm_of(t, t->x);
    calls->qkv.w = weight_of(&of[QKV], is_fp8);
    calls->qkv.y = of[QKV].y;
    calls->qkv.common = common_of(bench, side, NULL, is_fp8);
    calls->proj = (tn_linear_forward_args)TN_LINEAR_FORWARD_ARGS_INIT;
    calls->proj.x = of[PROJ].x;
    calls->proj.w = weight_of(&of[PROJ], is_fp8);
    calls->proj.y = of[PROJ].y;
    calls->proj.common = common_of(bench, side, NULL, is_fp8);
    calls->mlp = (tn_norm_mlp_forward_args)TN_NORM_MLP_FORWARD_ARGS_INIT;
    calls->mlp.norm = norm_of(t, of[PROJ].y);
    calls->mlp.norm.residual = t->x;
    calls->mlp.norm.sum = t->sum;
    calls->mlp.w1 = weight_of(&of[FC1], is_fp8);
    calls->mlp.w2 = weight_of(&of[FC2], is_fp8);
    calls->mlp.y = of[FC2].y;
    calls->mlp.common = common_of(bench, side, &of[FC2], is_fp8);
}

static void make_backward_calls(const gpu_bench *bench, const layer_tensors *t, tn_stream side,
                                int is_fp8, layer_calls *calls) {
    const product_tensors *of = t->of;
    calls->mlp_backward = (tn_norm_mlp_backward_args)TN_NORM_MLP_BACKWARD_ARGS_INIT;
    calls->mlp_backward.dy = t->dy;
    calls->mlp_backward.w1 = calls->mlp.w1;
    calls->mlp_backward.w2 = calls->mlp.w2;
    calls->mlp_backward.norm = norm_gradient_of(t, t->sum, t->dy, t->dsum);
    calls->mlp_backward.gradient1 = gradient_of(&of[FC1]);
    calls->mlp_backward.gradient2 = gradient_of(&of[FC2]);
    calls->mlp_backward.common = common_of(bench, side, &of[PROJ], is_fp8);
    calls->proj_backward = (tn_linear_backward_args)TN_LINEAR_BACKWARD_ARGS_INIT;
    calls->proj_backward.dy = t->dsum;
    calls->proj_backward.w = calls->proj.w;
    calls->proj_backward.x = calls->proj.x;
    calls->proj_backward.dx = of[PROJ].dx;
    calls->proj_backward.gradient = gradient_of(&of[PROJ]);
    calls->proj_backward.common = common_of(bench, side, &of[QKV], is_fp8);
    calls->qkv_backward = (tn_norm_linear_backward_args)TN_NORM_LINEAR_BACKWARD_ARGS_INIT;
    calls->qkv_backward.dy = of[QKV].dy;
    calls->qkv_backward.w = calls->qkv.w;
    calls->qkv_backward.norm = norm_gradient_of(t, t->x, t->dsum, t->dx);
    calls->qkv_backward.gradient = gradient_of(&of[QKV]);
    calls->qkv_backward.common = common_of(bench, side, NULL, is_fp8);
}

void layer_calls_run(gpu_bench *bench, void *argument, int turn) {
    const layer_calls *calls = argument;
    tn_norm_linear_saved qkv = TN_NORM_LINEAR_SAVED_INIT;
    tn_linear_saved proj = TN_LINEAR_SAVED_INIT;
    tn_norm_mlp_saved mlp = TN_NORM_MLP_SAVED_INIT;
    (void)turn;
    GPU_BENCH_TRY(tn_norm_linear_forward(&calls->qkv, &qkv, bench->stream));
    GPU_BENCH_TRY(tn_linear_forward(&calls->proj, &proj, bench->stream));
    GPU_BENCH_TRY(tn_norm_mlp_forward(&calls->mlp, &mlp, bench->stream));
    GPU_BENCH_TRY(tn_norm_mlp_backward(&calls->mlp_backward, &mlp, NULL, bench->stream));
    GPU_BENCH_TRY(tn_linear_backward(&calls->proj_backward, &proj, NULL, bench->stream));
    GPU_BENCH_TRY(tn_norm_linear_backward(&calls->qkv_backward, &qkv, NULL, bench->stream));
}

/* ---- all of it ------------------------------------------------------------------------------- */

void layer_sides_make(gpu_bench *bench, layer_report *report) {
    static const char *const names[LAYER_SIDES] = {"FP8", "bf16"};
    const layer_tensors tensors = make_tensors(bench, &report->shape);
    for (int of = 0; of < LAYER_SIDES; of++) {
        for (int pair = 0; pair < LAYER_PAIRS; pair++) {
            report->sides[pair][of].name = names[of];
            report->sides[pair][of].is_fp8 = of == LAYER_FP8;
        }
        make_products(bench, &report->sides[LAYER_PRODUCTS][of], &report->shape, &tensors);
        make_whole(bench, &report->sides[LAYER_WHOLE][of], &report->shape, &tensors);
    }
    for (int of = 0; of < LAYER_CALLS; of++) {
        const tn_stream side = of == LAYER_FP8_BESIDE ? report->side : 0;
        make_forward_calls(bench, &tensors, side, of != LAYER_BF16, &report->calls[of]);
        make_backward_calls(bench, &tensors, side, of != LAYER_BF16, &report->calls[of]);
    }
}
