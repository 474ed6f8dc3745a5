/* The battery's ops that make values and cast them: activations, their gradients, the gradient of a
 * bias, norms. A way is what changes the kernel; the rest (which outputs, which formats) the case
 * picks. */
#include "op_battery_support.h"
#include "tenure_cast.h"

/* What a case picks, by number; salts from 16 on are an op's own. */
enum { PICK_OUTPUTS = 1, PICK_FORMAT, PICK_CODE, PICK_MODE, PICK_PLANES, PICK_EPSILON, PICK_SKIP };
enum { PICK_WEIGHTS = 16, PICK_SUMS, PICK_GAMMA, PICK_FROM_ONE, PICK_BETA, PICK_STATISTICS };

static unsigned planes_of(const battery_case *c) { return battery_pick(c, PICK_PLANES, 3) + 1; }

static void add_quantized(gpu_side *side, const battery_case *c, battery_operands *operands,
                          int64_t rows, int64_t cols) {
    const tn_format format =
        battery_pick(c, PICK_FORMAT, 2) ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
    const tn_scale_mode mode = battery_pick(c, PICK_MODE, 3) ? TN_SCALE_POW2 : TN_SCALE_FP32;
    const tn_tensor tensor =
        gpu_fp8(side, format, battery_codes[battery_pick(c, PICK_CODE, 2)], mode, rows, cols);
    battery_planes_add(operands, tensor, planes_of(c));
}

/* The value, what it is quantized to, or both, as `wanted` says in its two lowest bits. */
enum { WANTS_VALUE = 1, WANTS_QUANTIZED = 2, WANTS_SUMS = 4 };

static void add_produced(gpu_side *side, const battery_case *c, battery_operands *operands,
                         unsigned wanted, tn_dtype dtype, int64_t rows, int64_t cols) {
    if (wanted & WANTS_VALUE)
        battery_output_add(operands, "value", gpu_plain(side, dtype, rows, cols), TN_PLANE_DATA);
    if (wanted & WANTS_QUANTIZED) add_quantized(side, c, operands, rows, cols);
}

/* The output that has this plane; {0}: none has, in the order that they were added in. */
static tn_tensor next_output(const battery_operands *operands, int *at, int is_wanted) {
    if (!is_wanted) return (tn_tensor){0};
    return operands->out[(*at)++].tensor;
}

static tn_quantized_out next_quantized(const battery_case *c, const battery_operands *operands,
                                       int *at, int is_wanted) {
    tn_quantized_out out = TN_QUANTIZED_OUT_INIT;
    if (!is_wanted) return out;
    out.planes = planes_of(c);
    out.tensor = operands->out[*at].tensor;
    out.amax_epsilon = battery_pick(c, PICK_EPSILON, 4) ? 0.0f : 0.25f;
    *at += out.planes == (TN_QUANTIZE_ROW | TN_QUANTIZE_COL) ? 2 : 1;
    return out;
}

static void add_skip(gpu_side *side, const battery_case *c, battery_operands *operands) {
    if (battery_pick(c, PICK_SKIP, 2)) (void)battery_skip(side, operands);
}

/* ---- activations ---------------------------------------------------------------------------- */

enum { ACTIVATION_WAYS = TN_ACTIVATION_COUNT * 2 * 3 };

static tn_activation activation_of(const battery_case *c) {
    return (tn_activation)(c->way % TN_ACTIVATION_COUNT);
}
static int is_gated(const battery_case *c) { return (int)(c->way / TN_ACTIVATION_COUNT % 2); }
static tn_dtype activation_type(const battery_case *c) {
    return battery_floats[c->way / TN_ACTIVATION_COUNT / 2];
}
static int is_weighted(const battery_case *c) { return (int)battery_pick(c, PICK_WEIGHTS, 2); }

/* in: x, dy, weights. */
static void prepare_activation(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_dtype dtype = activation_type(c);
    (void)battery_input(side, c, operands, dtype, c->rows, is_gated(c) ? 2 * c->cols : c->cols, 0);
    if (is_weighted(c)) (void)battery_input(side, c, operands, TN_FP32, c->rows, 1, 2);
    add_skip(side, c, operands);
    add_produced(side, c, operands, battery_pick(c, PICK_OUTPUTS, 3) + 1, dtype, c->rows, c->cols);
}

static tn_status launch_activation(gpu_side *side, const battery_case *c,
                                   const battery_operands *operands) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    const unsigned wanted = battery_pick(c, PICK_OUTPUTS, 3) + 1;
    int at = 0;
    args.activation = activation_of(c), args.gated = is_gated(c);
    args.x = operands->in[0];
    if (is_weighted(c)) args.weights = operands->in[1];
    args.y = next_output(operands, &at, wanted & WANTS_VALUE);
    args.quantized = next_quantized(c, operands, &at, wanted & WANTS_QUANTIZED);
    args.skip = operands->skip;
    return tn_activation_forward(&args, side->stream);
}

/* Any of value, quantized and sums, but not none. */
static unsigned gradient_outputs(const battery_case *c) {
    return battery_pick(c, PICK_OUTPUTS, 7) + 1;
}

static void prepare_gradient(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_dtype dtype = activation_type(c);
    const int64_t cols = is_gated(c) ? 2 * c->cols : c->cols;
    (void)battery_input(side, c, operands, dtype, c->rows, cols, 0);
    (void)battery_input(side, c, operands, dtype, c->rows, c->cols, 1);
    if (is_weighted(c)) (void)battery_input(side, c, operands, TN_FP32, c->rows, 1, 2);
    add_skip(side, c, operands);
    add_produced(side, c, operands, gradient_outputs(c), dtype, c->rows, cols);
    if (gradient_outputs(c) & WANTS_SUMS)
        battery_output_add(operands, "bias gradient",
                           gpu_plain(side, battery_floats[battery_pick(c, PICK_SUMS, 3)], 1, cols),
                           TN_PLANE_DATA);
}

static tn_status launch_gradient(gpu_side *side, const battery_case *c,
                                 const battery_operands *operands) {
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    const unsigned wanted = gradient_outputs(c);
    int at = 0;
    args.activation = activation_of(c), args.gated = is_gated(c);
    args.x = operands->in[0], args.dy = operands->in[1];
    if (is_weighted(c)) args.weights = operands->in[2];
    args.dx = next_output(operands, &at, wanted & WANTS_VALUE);
    args.quantized = next_quantized(c, operands, &at, wanted & WANTS_QUANTIZED);
    args.dbias = next_output(operands, &at, wanted & WANTS_SUMS);
    args.skip = operands->skip;
    args.scope = side->scope;
    return tn_activation_backward(&args, side->stream);
}

/* ---- the gradient of a bias ----------------------------------------------------------------- */

enum { BIAS_WAYS = 3 * 3 * 2 };

static int bias_is_quantized(const battery_case *c) { return (int)(c->way / 9); }

static void prepare_bias(gpu_side *side, const battery_case *c, battery_operands *operands) {
    (void)battery_input(side, c, operands, battery_floats[c->way % 3], c->rows, c->cols, 0);
    add_skip(side, c, operands);
    if (bias_is_quantized(c)) add_quantized(side, c, operands, c->rows, c->cols);
    battery_output_add(operands, "bias gradient",
                       gpu_plain(side, battery_floats[c->way / 3 % 3], 1, c->cols), TN_PLANE_DATA);
}

static tn_status launch_bias(gpu_side *side, const battery_case *c,
                             const battery_operands *operands) {
    tn_bias_gradient_args args = TN_BIAS_GRADIENT_ARGS_INIT;
    int at = 0;
    args.dy = operands->in[0];
    args.quantized = next_quantized(c, operands, &at, bias_is_quantized(c));
    args.dbias = next_output(operands, &at, 1);
    args.skip = operands->skip;
    args.scope = side->scope;
    return tn_bias_gradient(&args, side->stream);
}

/* ---- norms ---------------------------------------------------------------------------------- */

/* RMS and LAYER, in each type, without a residual, with the sum over it and beside it. */
enum { NORM_WAYS = TN_NORM_COUNT * 3 * 3 };
enum { NO_RESIDUAL = 0, SUM_OVER_IT, SUM_BESIDE_IT };

static tn_norm norm_of(const battery_case *c) { return (tn_norm)(c->way % TN_NORM_COUNT); }
static unsigned residual_of(const battery_case *c) { return c->way / TN_NORM_COUNT / 3; }
static tn_dtype norm_type(const battery_case *c) {
    return battery_floats[c->way / TN_NORM_COUNT % 3];
}

/* None, or in one of the three types. */
static void add_vector(gpu_side *side, const battery_case *c, battery_operands *operands,
                       unsigned salt) {
    const unsigned choice = battery_pick(c, salt, 4);
    if (choice < 3)
        (void)battery_input(side, c, operands, battery_floats[choice], 1, c->cols, salt % 8);
}

static tn_tensor next_vector(const battery_case *c, const battery_operands *operands, int *at,
                             unsigned salt) {
    if (battery_pick(c, salt, 4) == 3) return (tn_tensor){0};
    return operands->in[(*at)++];
}

static int wants_mean(const battery_case *c) {
    return norm_of(c) == TN_NORM_LAYER && battery_pick(c, PICK_STATISTICS, 4) & 1;
}
static int wants_rstd(const battery_case *c) {
    return (battery_pick(c, PICK_STATISTICS, 4) & 2) != 0;
}

/* in: x, residual, gamma, beta; out: value, planes, sum, mean, rstd. */
static void prepare_norm(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_dtype dtype = norm_type(c);
    (void)battery_input(side, c, operands, dtype, c->rows, c->cols, 0);
    if (residual_of(c) != NO_RESIDUAL)
        (void)battery_input(side, c, operands, dtype, c->rows, c->cols, 1);
    add_vector(side, c, operands, PICK_GAMMA);
    if (norm_of(c) == TN_NORM_LAYER) add_vector(side, c, operands, PICK_BETA);
    add_skip(side, c, operands);
    add_produced(side, c, operands, battery_pick(c, PICK_OUTPUTS, 3) + 1, dtype, c->rows, c->cols);
    if (residual_of(c) == SUM_OVER_IT)
        battery_updated_add(operands, "sum over the residual",
                            gpu_plain(side, dtype, c->rows, c->cols), operands->in[1]);
    if (residual_of(c) == SUM_BESIDE_IT)
        battery_output_add(operands, "sum", gpu_plain(side, dtype, c->rows, c->cols),
                           TN_PLANE_DATA);
    if (wants_mean(c))
        battery_output_add(operands, "mean", gpu_plain(side, TN_FP32, c->rows, 1), TN_PLANE_DATA);
    if (wants_rstd(c))
        battery_output_add(operands, "rstd", gpu_plain(side, TN_FP32, c->rows, 1), TN_PLANE_DATA);
}

static tn_status launch_norm(gpu_side *side, const battery_case *c,
                             const battery_operands *operands) {
    static const float epsilons[] = {1e-5f, 0.0f, 0.5f};
    tn_norm_args args = TN_NORM_ARGS_INIT;
    const unsigned wanted = battery_pick(c, PICK_OUTPUTS, 3) + 1;
    int in = 0, at = 0;
    args.norm = norm_of(c);
    args.epsilon = epsilons[battery_pick(c, PICK_EPSILON, 3)];
    args.gamma_from_one = (int)battery_pick(c, PICK_FROM_ONE, 2);
    args.x = operands->in[in++];
    if (residual_of(c) != NO_RESIDUAL) args.residual = operands->in[in++];
    args.gamma = next_vector(c, operands, &in, PICK_GAMMA);
    if (args.norm == TN_NORM_LAYER) args.beta = next_vector(c, operands, &in, PICK_BETA);
    args.y = next_output(operands, &at, wanted & WANTS_VALUE);
    args.quantized = next_quantized(c, operands, &at, wanted & WANTS_QUANTIZED);
    if (residual_of(c) == SUM_OVER_IT) args.residual = next_output(operands, &at, 1);
    args.sum = next_output(operands, &at, residual_of(c) == SUM_BESIDE_IT);
    args.mean = next_output(operands, &at, wants_mean(c));
    args.rstd = next_output(operands, &at, wants_rstd(c));
    args.skip = operands->skip;
    args.scope = side->scope;
    return tn_norm_forward(&args, side->stream);
}

static const battery_op ops[] = {
    {"activation forward", ACTIVATION_WAYS, prepare_activation, launch_activation},
    {"activation backward", ACTIVATION_WAYS, prepare_gradient, launch_gradient},
    {"bias gradient", BIAS_WAYS, prepare_bias, launch_bias},
    {"norm forward", NORM_WAYS, prepare_norm, launch_norm},
};

const battery_table battery_producers = {ops, sizeof ops / sizeof *ops, 0};
