/* The battery's casts: quantize, dequantize, transpose. */
#include "op_battery_support.h"

static const tn_plane planes[] = {TN_PLANE_ROW, TN_PLANE_COL};
static const char *const plane_names[] = {"row plane", "column plane"};

/* ---- what a way means ----------------------------------------------------------------------- */

static tn_dtype source_of(const battery_case *c) { return battery_floats[c->way % 3]; }

static tn_tensor target_of(gpu_side *side, const battery_case *c, int is_2d) {
    tn_scale_mode mode = c->way / 6 % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
    return gpu_fp8(side, is_2d ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D,
                   battery_codes[c->way / 3 % 2], mode, c->rows, c->cols);
}

/* ---- quantize ------------------------------------------------------------------------------- */

enum { QUANTIZE_WAYS = 3 * 2 * 2 * 2 * 3 };

static unsigned planes_of(const battery_case *c) { return c->way / 24 % 3 + 1; }

static void prepare_quantize(gpu_side *side, const battery_case *c, battery_operands *operands) {
    tn_tensor dst = target_of(side, c, (int)(c->way / 12 % 2));
    (void)battery_input(side, c, operands, source_of(c), c->rows, c->cols, 0);
    if (c->way % 2) (void)battery_skip(side, operands);
    for (unsigned p = 0; p < 2; p++)
        if (planes_of(c) >> p & 1) battery_output_add(operands, plane_names[p], dst, planes[p]);
}

static void launch_quantize(gpu_side *side, const battery_case *c,
                            const battery_operands *operands) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = operands->in[0];
    args.dst = operands->out[0].tensor;
    args.planes = planes_of(c);
    args.amax_epsilon = c->way % 5 == 4 ? 1.0f : 0.0f;
    args.skip = operands->skip;
    EXPECT_OK(tn_quantize(&args, side->stream));
}

/* ---- quantize to the formats whose blocks are not of 128 ------------------------------------ */

enum { OTHER_WAYS = 3 * 3 * 3 };

static tn_tensor other_target(gpu_side *side, const battery_case *c) {
    static const tn_format formats[] = {TN_FORMAT_FP8_TENSOR, TN_FORMAT_MXFP8, TN_FORMAT_NVFP4};
    tn_format format = formats[c->way / 3 % 3];
    tn_dtype dtype = format == TN_FORMAT_NVFP4 ? TN_E2M1 : battery_codes[c->seed % 2];
    return gpu_fp8(side, format, dtype, TN_SCALE_POW2, c->rows, c->cols);
}

static unsigned other_planes(const battery_case *c) { return c->way / 9 % 3 + 1; }

static void prepare_other(gpu_side *side, const battery_case *c, battery_operands *operands) {
    tn_tensor dst = other_target(side, c);
    (void)battery_input(side, c, operands, source_of(c), c->rows, c->cols, 0);
    if (c->way % 2) (void)battery_skip(side, operands);
    for (unsigned p = 0; p < 2; p++)
        if (other_planes(c) >> p & 1) battery_output_add(operands, plane_names[p], dst, planes[p]);
}

static void launch_other(gpu_side *side, const battery_case *c, const battery_operands *operands) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = operands->in[0];
    args.dst = operands->out[0].tensor;
    args.planes = other_planes(c);
    args.skip = operands->skip;
    EXPECT_OK(tn_quantize(&args, side->stream));
}

/* ---- back, and across ----------------------------------------------------------------------- */

enum { DEQUANTIZE_WAYS = 3 * 2 * 2 * 2 * 2 * 3, TRANSPOSE_WAYS = 3 * 2 * 2 * 2 };

/* A tensor of the case's with one plane. */
static tn_tensor quantized(gpu_side *side, const battery_case *c, battery_operands *operands,
                           int is_2d, unsigned plane) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = battery_input(side, c, operands, source_of(c), c->rows, c->cols, 0);
    args.dst = target_of(side, c, is_2d);
    args.planes = 1u << plane;
    EXPECT_OK(tn_quantize(&args, side->stream));
    return args.dst;
}

static void prepare_dequantize(gpu_side *side, const battery_case *c, battery_operands *operands) {
    tn_tensor dst = gpu_plain(side, battery_floats[c->way / 48 % 3], c->rows, c->cols);
    battery_keep(operands, quantized(side, c, operands, (int)(c->way / 12 % 2), c->way / 24 % 2));
    battery_output_add(operands, "values", dst, TN_PLANE_DATA);
}

static void launch_dequantize(gpu_side *side, const battery_case *c,
                              const battery_operands *operands) {
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    args.src = operands->in[1];
    args.plane = planes[c->way / 24 % 2];
    args.dst = operands->out[0].tensor;
    EXPECT_OK(tn_dequantize(&args, side->stream));
}

static void prepare_transpose(gpu_side *side, const battery_case *c, battery_operands *operands) {
    unsigned from = c->way / 12 % 2;
    tn_tensor tensor = quantized(side, c, operands, 1, from);
    battery_derived_add(operands, plane_names[!from], tensor, planes[!from]);
}

static void launch_transpose(gpu_side *side, const battery_case *c,
                             const battery_operands *operands) {
    tn_transpose_args args = TN_TRANSPOSE_ARGS_INIT;
    (void)c;
    args.tensor = operands->out[0].tensor;
    args.to = operands->out[0].plane;
    EXPECT_OK(tn_transpose(&args, side->stream));
}

static const battery_op ops[] = {
    {"quantize", QUANTIZE_WAYS, prepare_quantize, launch_quantize},
    {"quantize, other formats", OTHER_WAYS, prepare_other, launch_other},
    {"dequantize", DEQUANTIZE_WAYS, prepare_dequantize, launch_dequantize},
    {"transpose", TRANSPOSE_WAYS, prepare_transpose, launch_transpose},
};

const battery_table battery_casts = {ops, sizeof ops / sizeof *ops};
