/* The battery's small operations. The exp and log of the cross entropy are those of the device, so
 * that its results are near the host's (test_small_ops.c), not the same. */
#include "op_battery_support.h"

enum { PAIRS = 9, ALPHAS = 3 };

static void prepare_map(gpu_side *side, const battery_case *c, battery_operands *operands) {
    (void)battery_input(side, c, operands, battery_floats[c->way % 3], c->rows, c->cols, 0);
    battery_output_add(operands, "y",
                       gpu_plain(side, battery_floats[c->way / 3 % 3], c->rows, c->cols),
                       TN_PLANE_DATA);
}

static tn_status launch_convert(gpu_side *side, const battery_case *c,
                                const battery_operands *operands) {
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    (void)c;
    args.x = operands->in[0];
    args.y = operands->out[0].tensor;
    return tn_convert(&args, side->stream);
}

static void prepare_axpy(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_dtype to = battery_floats[c->way / 3 % 3];
    (void)battery_input(side, c, operands, battery_floats[c->way % 3], c->rows, c->cols, 0);
    tn_tensor before = battery_input(side, c, operands, to, c->rows, c->cols, 1);
    battery_updated_add(operands, "y", gpu_plain(side, to, c->rows, c->cols), before);
}

static tn_status launch_axpy(gpu_side *side, const battery_case *c,
                             const battery_operands *operands) {
    static const float alphas[ALPHAS] = {1.0f, -0.37f, 0.0f};
    tn_axpy_args args = TN_AXPY_ARGS_INIT;
    args.x = operands->in[0];
    args.y = operands->out[0].tensor;
    args.alpha = alphas[c->way / PAIRS];
    return tn_axpy(&args, side->stream);
}

static void prepare_embed(gpu_side *side, const battery_case *c, battery_operands *operands) {
    tn_dtype dtype = battery_floats[c->way % 3];
    (void)battery_input(side, c, operands, TN_BYTE, c->rows, 1, 0);
    (void)battery_input(side, c, operands, dtype, 256, c->cols, 1);
    battery_output_add(operands, "y", gpu_plain(side, dtype, c->rows, c->cols), TN_PLANE_DATA);
}

static tn_status launch_embed(gpu_side *side, const battery_case *c,
                              const battery_operands *operands) {
    tn_embed_args args = TN_EMBED_ARGS_INIT;
    (void)c;
    args.tokens = operands->in[0];
    args.table = operands->in[1];
    args.y = operands->out[0].tensor;
    return tn_embed(&args, side->stream);
}

enum { CLASSES_MIN = 256 };

static void prepare_loss(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const int64_t classes = CLASSES_MIN + c->cols % 1024;
    (void)battery_input(side, c, operands, battery_floats[c->way % 3], c->rows, classes, 0);
    (void)battery_input(side, c, operands, TN_BYTE, c->rows, 1, 1);
    battery_output_add(operands, "loss", gpu_plain(side, TN_FP32, c->rows, 1), TN_PLANE_DATA);
    battery_output_add(operands, "gradient",
                       gpu_plain(side, battery_floats[c->way / 3], c->rows, classes),
                       TN_PLANE_DATA);
}

static tn_status launch_loss(gpu_side *side, const battery_case *c,
                             const battery_operands *operands) {
    tn_cross_entropy_args args = TN_CROSS_ENTROPY_ARGS_INIT;
    (void)c;
    args.logits = operands->in[0], args.targets = operands->in[1];
    args.loss = operands->out[0].tensor, args.dlogits = operands->out[1].tensor;
    return tn_cross_entropy(&args, side->stream);
}

static const battery_op near_ops[] = {
    {"cross entropy", PAIRS, prepare_loss, launch_loss},
};

const battery_table battery_near_ops = {near_ops, sizeof near_ops / sizeof *near_ops, 1};

static const battery_op ops[] = {
    {"convert", PAIRS, prepare_map, launch_convert},
    {"axpy", PAIRS *ALPHAS, prepare_axpy, launch_axpy},
    {"embed", 3, prepare_embed, launch_embed},
};

const battery_table battery_small_ops = {ops, sizeof ops / sizeof *ops, 0};
