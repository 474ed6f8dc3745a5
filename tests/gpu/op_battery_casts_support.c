/* The battery's casts: tn_quantize to every format. */
#include "op_battery_support.h"

static tn_dtype source_of(const battery_case *c) { return battery_floats[c->way % 3]; }

static void prepare(gpu_side *side, const battery_case *c, battery_operands *operands,
                    tn_tensor dst, unsigned planes) {
    (void)battery_input(side, c, operands, source_of(c), c->rows, c->cols, 0);
    if (c->way % 2) (void)battery_skip(side, operands);
    battery_planes_add(operands, dst, planes);
}

static tn_status launch(gpu_side *side, const battery_case *c, const battery_operands *operands,
                        unsigned planes) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    const int is_alive = tn_tensor_info_get(operands->out[0].tensor, &info) == TN_OK;
    args.src = operands->in[0];
    args.dst = operands->out[0].tensor;
    args.planes = planes;
    args.amax_epsilon = c->way % 5 == 4 ? 1.0f : 0.0f;
    args.skip = operands->skip;
    args.random = operands->random;
    args.square_blocks = is_alive && info.format == TN_FORMAT_NVFP4 && c->seed % 2;
    return tn_quantize(&args, side->stream);
}

/* ---- blocks of 128 -------------------------------------------------------------------------- */

enum { BLOCK_WAYS = 3 * 2 * 2 * 2 * 3 };

static unsigned block_planes(const battery_case *c) { return c->way / 24 % 3 + 1; }

static void prepare_blocks(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_format format = c->way / 12 % 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
    const tn_scale_mode mode = c->way / 6 % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
    prepare(side, c, operands,
            gpu_fp8(side, format, battery_codes[c->way / 3 % 2], mode, c->rows, c->cols),
            block_planes(c));
}

static tn_status launch_blocks(gpu_side *side, const battery_case *c,
                               const battery_operands *operands) {
    return launch(side, c, operands, block_planes(c));
}

/* ---- the other formats ---------------------------------------------------------------------- */

enum { OTHER_WAYS = 3 * 3 * 3 * 2 };

static unsigned other_planes(const battery_case *c) { return c->way / 9 % 3 + 1; }

static void prepare_other(gpu_side *side, const battery_case *c, battery_operands *operands) {
    static const tn_format formats[] = {TN_FORMAT_FP8_TENSOR, TN_FORMAT_MXFP8, TN_FORMAT_NVFP4};
    const tn_format format = formats[c->way / 3 % 3];
    const tn_dtype dtype = format == TN_FORMAT_NVFP4 ? TN_E2M1 : battery_codes[c->way / 27];
    const tn_scale_mode mode = battery_pick(c, 1, 2) ? TN_SCALE_FP32 : TN_SCALE_POW2;
    prepare(side, c, operands, gpu_fp8(side, format, dtype, mode, c->rows, c->cols),
            other_planes(c));
}

static tn_status launch_other(gpu_side *side, const battery_case *c,
                              const battery_operands *operands) {
    return launch(side, c, operands, other_planes(c));
}

/* ---- stochastically ------------------------------------------------------------------------- */

enum { STOCHASTIC_WAYS = 3 * 9 * 3 };

static unsigned stochastic_planes(const battery_case *c) { return c->way / 27 + 1; }

/* The generator's state is an output: each launch begins with the same one, and the next offset is
 * compared. */
static void prepare_stochastic(gpu_side *side, const battery_case *c, battery_operands *operands) {
    static const tn_format formats[] = {TN_FORMAT_NVFP4, TN_FORMAT_MXFP8, TN_FORMAT_FP8_TENSOR,
                                        TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};
    const unsigned which = c->way / 3 % 9;
    const tn_dtype dtype = which == 0 ? TN_E2M1 : battery_codes[which % 2];
    const tn_scale_mode mode = battery_pick(c, 1, 2) ? TN_SCALE_FP32 : TN_SCALE_POW2;
    prepare(side, c, operands,
            gpu_fp8(side, formats[(which + 1) / 2], dtype, mode, c->rows, c->cols),
            stochastic_planes(c));
    operands->random = gpu_plain(side, TN_BYTE, 1, 16);
    battery_updated_add(operands, "seed and offset", operands->random,
                        battery_input(side, c, operands, TN_BYTE, 1, 16, 1));
}

static tn_status launch_stochastic(gpu_side *side, const battery_case *c,
                                   const battery_operands *operands) {
    return launch(side, c, operands, stochastic_planes(c));
}

static const battery_op ops[] = {
    {"quantize, blocks of 128", BLOCK_WAYS, prepare_blocks, launch_blocks},
    {"quantize, other formats", OTHER_WAYS, prepare_other, launch_other},
    {"quantize, stochastically", STOCHASTIC_WAYS, prepare_stochastic, launch_stochastic},
};

const battery_table battery_casts = {ops, sizeof ops / sizeof *ops, 0};
