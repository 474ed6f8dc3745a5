/* The battery's training operations: gradients of norms, of the embedding and of the weights of
 * rows, and the optimizer. */
#include "op_battery_support.h"

#include "tenure_train.h"

static tn_dtype source_of(const battery_case *c) { return battery_floats[c->way % 3]; }

/* An output that begins as `initial`, or that the op writes all of. */
static void add_sum(battery_operands *operands, const char *name, tn_tensor tensor,
                    tn_tensor initial, int accumulates) {
    if (accumulates)
        battery_updated_add(operands, name, tensor, initial);
    else
        battery_output_add(operands, name, tensor, TN_PLANE_DATA);
}

/* ---- norms ---------------------------------------------------------------------------------- */

enum { NORM_WAYS = 3 * 2 * 2 * 2 };

static int norm_is_layer(const battery_case *c) { return (int)(c->way / 3 % 2); }
static int norm_is_2d(const battery_case *c) { return (int)(c->way / 6 % 2); }
static int norm_is_e5m2(const battery_case *c) { return (int)(c->way / 12 % 2); }
static unsigned norm_planes(const battery_case *c) { return (c->way / 6 + c->way % 6) % 4; }
static int norm_accumulates(const battery_case *c) { return c->way % 5 == 1 && c->way % 2 == 0; }

enum { NORM_DY, NORM_X, NORM_ADDED, NORM_MEAN, NORM_RSTD, NORM_GAMMA, NORM_BEFORE };
enum { NORM_DX, NORM_DGAMMA, NORM_DBETA, NORM_PLANES }; /* DBETA of LAYER only */

static void prepare_norm(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_dtype of_sums = battery_floats[c->way / 2 % 3];
    tn_tensor planes =
        gpu_fp8(side, norm_is_2d(c) ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D,
                battery_codes[norm_is_e5m2(c)], c->way % 7 ? TN_SCALE_POW2 : TN_SCALE_FP32, c->rows,
                c->cols);
    for (uint64_t i = NORM_DY; i <= NORM_ADDED; i++)
        (void)battery_input(side, c, operands, source_of(c), c->rows, c->cols, i);
    (void)battery_input(side, c, operands, TN_FP32, 1, c->rows, NORM_MEAN);
    (void)battery_input(side, c, operands, TN_FP32, 1, c->rows, NORM_RSTD);
    (void)battery_input(side, c, operands, battery_floats[c->way / 4 % 3], 1, c->cols, NORM_GAMMA);
    (void)battery_input(side, c, operands, of_sums, 1, c->cols, NORM_BEFORE);
    if (c->way % 2) (void)battery_skip(side, operands);
    battery_output_add(operands, "dx", gpu_plain(side, source_of(c), c->rows, c->cols),
                       TN_PLANE_DATA);
    add_sum(operands, "dgamma", gpu_plain(side, of_sums, 1, c->cols), operands->in[NORM_BEFORE],
            norm_accumulates(c));
    if (norm_is_layer(c))
        add_sum(operands, "dbeta", gpu_plain(side, of_sums, 1, c->cols), operands->in[NORM_BEFORE],
                norm_accumulates(c));
    if (norm_planes(c) & TN_QUANTIZE_ROW)
        battery_output_add(operands, "row plane", planes, TN_PLANE_ROW);
    if (norm_planes(c) & TN_QUANTIZE_COL)
        battery_output_add(operands, "column plane", planes, TN_PLANE_COL);
}

static tn_status launch_norm(gpu_side *side, const battery_case *c,
                             const battery_operands *operands) {
    tn_norm_backward_args args = TN_NORM_BACKWARD_ARGS_INIT;
    const int is_layer = norm_is_layer(c);
    args.norm = is_layer ? TN_NORM_LAYER : TN_NORM_RMS;
    args.dy = operands->in[NORM_DY], args.x = operands->in[NORM_X];
    if (c->way % 4 < 2) args.added = operands->in[NORM_ADDED];
    if (is_layer) args.mean = operands->in[NORM_MEAN];
    args.rstd = operands->in[NORM_RSTD];
    if (c->way % 5) args.gamma = operands->in[NORM_GAMMA];
    args.gamma_from_one = c->way % 3 == 1;
    args.dx = operands->out[NORM_DX].tensor;
    args.dgamma = operands->out[NORM_DGAMMA].tensor;
    if (is_layer) args.dbeta = operands->out[NORM_DBETA].tensor;
    args.quantized.tensor = operands->out[NORM_DBETA + is_layer].tensor;
    args.quantized.planes = norm_planes(c);
    args.accumulate = norm_accumulates(c);
    args.skip = operands->skip;
    args.scope = side->scope;
    return tn_norm_backward(&args, side->stream);
}

/* ---- the embedding -------------------------------------------------------------------------- */

enum { EMBED_WAYS = 3 * 3 };

static int embed_accumulates(const battery_case *c) { return (int)(c->way % 2); }

static void prepare_embed(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_dtype of_table = battery_floats[c->way / 3 % 3];
    (void)battery_input(side, c, operands, TN_BYTE, c->rows, 1, 0);
    (void)battery_input(side, c, operands, source_of(c), c->rows, c->cols, 1);
    (void)battery_input(side, c, operands, of_table, 256, c->cols, 2);
    if (c->way % 4 == 1) (void)battery_skip(side, operands);
    add_sum(operands, "dtable", gpu_plain(side, of_table, 256, c->cols), operands->in[2],
            embed_accumulates(c));
}

static tn_status launch_embed(gpu_side *side, const battery_case *c,
                              const battery_operands *operands) {
    tn_embed_backward_args args = TN_EMBED_BACKWARD_ARGS_INIT;
    args.tokens = operands->in[0], args.dy = operands->in[1];
    args.dtable = operands->out[0].tensor;
    args.accumulate = embed_accumulates(c);
    args.skip = operands->skip;
    return tn_embed_backward(&args, side->stream);
}

/* ---- the weights of rows -------------------------------------------------------------------- */

enum { WEIGHT_WAYS = 3 * TN_ACTIVATION_COUNT * 2 };

static int is_gated(const battery_case *c) { return (int)(c->way / (3 * TN_ACTIVATION_COUNT)); }

static void prepare_weights(gpu_side *side, const battery_case *c, battery_operands *operands) {
    (void)battery_input(side, c, operands, source_of(c), c->rows, c->cols, 0);
    (void)battery_input(side, c, operands, source_of(c), c->rows, c->cols << is_gated(c), 1);
    if (c->way % 2) (void)battery_skip(side, operands);
    battery_output_add(operands, "dweights", gpu_plain(side, TN_FP32, 1, c->rows), TN_PLANE_DATA);
}

static tn_status launch_weights(gpu_side *side, const battery_case *c,
                                const battery_operands *operands) {
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    args.activation = (tn_activation)(c->way / 3 % TN_ACTIVATION_COUNT);
    args.gated = is_gated(c);
    args.dy = operands->in[0], args.x = operands->in[1];
    args.dweights = operands->out[0].tensor;
    args.skip = operands->skip;
    return tn_activation_backward(&args, side->stream);
}

/* ---- AdamW ---------------------------------------------------------------------------------- */

enum { ADAMW_WAYS = 3 * 2 * 2 };
enum { ADAMW_GRADIENT, ADAMW_FIRST, ADAMW_ANY, ADAMW_MASTER, ADAMW_STEP, ADAMW_FACTOR };
enum { ADAMW_SECOND = ADAMW_FACTOR + 1 };
enum { OUT_MASTER, OUT_FIRST, OUT_SECOND, OUT_STEP, OUT_PLAIN, OUT_WEIGHT };

static int adamw_has_weight(const battery_case *c) { return c->way % 5 != 3; }

/* Second moments are not negative: they are what a ReLU makes of the case's numbers. */
static tn_tensor positive(gpu_side *side, tn_tensor x, const battery_case *c) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    args.activation = TN_ACTIVATION_RELU;
    args.x = x;
    args.y = gpu_plain(side, TN_FP32, c->rows, c->cols);
    EXPECT_OK(tn_activation_forward(&args, side->stream));
    return args.y;
}

static void prepare_adamw(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_format format = c->way / 3 % 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
    (void)battery_input(side, c, operands, source_of(c), c->rows, c->cols, 0);
    for (uint64_t i = ADAMW_FIRST; i <= ADAMW_MASTER; i++)
        (void)battery_input(side, c, operands, TN_FP32, c->rows, c->cols, i);
    const float steps[3] = {(float)(c->seed % 3000), 0.0f, 0.0f}, factor = 0.5f;
    battery_keep(operands, gpu_plain(side, TN_FP32, 1, 3));
    gpu_upload(side, operands->in[ADAMW_STEP], steps);
    battery_keep(operands, gpu_plain(side, TN_FP32, 1, 1));
    gpu_upload(side, operands->in[ADAMW_FACTOR], &factor);
    battery_keep(operands, positive(side, operands->in[ADAMW_ANY], c));
    if (c->way % 2) (void)battery_skip(side, operands);
    battery_updated_add(operands, "master", gpu_plain(side, TN_FP32, c->rows, c->cols),
                        operands->in[ADAMW_MASTER]);
    battery_updated_add(operands, "first moment", gpu_plain(side, TN_FP32, c->rows, c->cols),
                        operands->in[ADAMW_FIRST]);
    battery_updated_add(operands, "second moment", gpu_plain(side, TN_FP32, c->rows, c->cols),
                        operands->in[ADAMW_SECOND]);
    battery_updated_add(operands, "step", gpu_plain(side, TN_FP32, 1, 3), operands->in[ADAMW_STEP]);
    battery_output_add(operands, "plain weight",
                       gpu_plain(side, battery_floats[c->way / 2 % 3], c->rows, c->cols),
                       TN_PLANE_DATA);
    if (adamw_has_weight(c))
        battery_output_add(
            operands, "row plane",
            gpu_fp8(side, format, battery_codes[c->way / 6 % 2], TN_SCALE_POW2, c->rows, c->cols),
            TN_PLANE_ROW);
}

static tn_status launch_adamw(gpu_side *side, const battery_case *c,
                              const battery_operands *operands) {
    tn_adamw_advance_args advance = TN_ADAMW_ADVANCE_ARGS_INIT;
    tn_adamw_args args = TN_ADAMW_ARGS_INIT;
    args.gradient = operands->in[ADAMW_GRADIENT];
    args.master = operands->out[OUT_MASTER].tensor;
    args.first = operands->out[OUT_FIRST].tensor;
    args.second = operands->out[OUT_SECOND].tensor;
    args.step = operands->out[OUT_STEP].tensor;
    args.plain = operands->out[OUT_PLAIN].tensor;
    if (adamw_has_weight(c)) args.weight = operands->out[OUT_WEIGHT].tensor;
    if (c->way % 4 == 1) args.rate = operands->in[ADAMW_FACTOR];
    if (c->way % 4 == 2) args.gradient_scale = operands->in[ADAMW_FACTOR];
    args.skip = advance.skip = operands->skip;
    advance.step = args.step;
    tn_status status = tn_adamw(&args, side->stream);
    if (status != TN_OK || c->rows == 0 || c->cols == 0) return status;
    return tn_adamw_advance(&advance, side->stream);
}

/* ---- clipping ------------------------------------------------------------------------------- */

enum { SQUARES_X, SQUARES_BEFORE };

static void prepare_squares(gpu_side *side, const battery_case *c, battery_operands *operands) {
    (void)battery_input(side, c, operands, source_of(c), c->rows, c->cols, SQUARES_X);
    (void)battery_input(side, c, operands, TN_FP32, 1, TN_SQUARE_SUMS, SQUARES_BEFORE);
    add_sum(operands, "sums", gpu_plain(side, TN_FP32, 1, TN_SQUARE_SUMS),
            operands->in[SQUARES_BEFORE], c->way / 3 % 2);
}

static tn_status launch_squares(gpu_side *side, const battery_case *c,
                                const battery_operands *operands) {
    tn_square_sums_args args = TN_SQUARE_SUMS_ARGS_INIT;
    args.x = operands->in[SQUARES_X], args.sums = operands->out[0].tensor;
    args.accumulate = (int)(c->way / 3 % 2);
    return tn_square_sums(&args, side->stream);
}

static void prepare_factor(gpu_side *side, const battery_case *c, battery_operands *operands) {
    (void)battery_input(side, c, operands, TN_FP32, 1, TN_SQUARE_SUMS, 0);
    battery_output_add(operands, "norm", gpu_plain(side, TN_FP32, 1, 1), TN_PLANE_DATA);
    battery_output_add(operands, "factor", gpu_plain(side, TN_FP32, 1, 1), TN_PLANE_DATA);
}

static tn_status launch_factor(gpu_side *side, const battery_case *c,
                               const battery_operands *operands) {
    tn_clip_factor_args args = TN_CLIP_FACTOR_ARGS_INIT;
    args.sums = operands->in[0];
    args.norm = operands->out[0].tensor, args.factor = operands->out[1].tensor;
    args.scale = 0.25f, args.max_norm = c->way % 2 ? 0.5f : 1e30f;
    return tn_clip_factor(&args, side->stream);
}

static const battery_op ops[] = {
    {"norm backward", NORM_WAYS, prepare_norm, launch_norm},
    {"embed backward", EMBED_WAYS, prepare_embed, launch_embed},
    {"weights of rows", WEIGHT_WAYS, prepare_weights, launch_weights},
    {"adamw", ADAMW_WAYS, prepare_adamw, launch_adamw},
    {"squares", 3 * 2, prepare_squares, launch_squares},
    {"clip factor", 2, prepare_factor, launch_factor},
};

const battery_table battery_training = {ops, sizeof ops / sizeof *ops, 0};
