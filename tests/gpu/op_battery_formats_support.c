/* The battery's ops on planes that are there already, of any format: dequantize, transpose,
 * requantize; and delayed scaling. Planes are written from the host, so that an op does not depend
 * on a cast, and sees codes and scales that no cast makes. */
#include "op_battery_bands_support.h"
#include "tenure_cast.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PICK_CODE = 1, PICK_MODE, PICK_PLANES, PICK_EPSILON, PICK_SLOT, PICK_DELAYED, PICK_SKIP };

static tn_dtype code_of(const battery_case *c, tn_format format) {
    return format == TN_FORMAT_NVFP4 ? TN_E2M1 : battery_codes[battery_pick(c, PICK_CODE, 2)];
}

static void add_skip(gpu_side *side, const battery_case *c, battery_operands *operands) {
    if (battery_pick(c, PICK_SKIP, 2)) (void)battery_skip(side, operands);
}

/* ---- planes from the host ------------------------------------------------------------------- */

/* A positive factor of the case's fill; a power of two where the format asks for one. */
static float scale_value(float value, tn_scale_mode mode) {
    const float magnitude = fabsf(value);
    if (mode != TN_SCALE_POW2) return magnitude;
    if (!(magnitude >= 0x1p-127f && magnitude <= 0x1p127f)) return 1.0f;
    return ldexpf(1.0f, ilogbf(magnitude));
}

/* fp32 scales of blocks: what pads them is NaN, which nobody may read. */
static void fill_block_scales(const battery_case *c, const tn_plane_layout *layout,
                              tn_scale_mode mode, uint64_t seed, float *scale) {
    memset(scale, 0xFF, layout->scale_bytes);
    for (int64_t row = 0; row < layout->scale_rows; row++) {
        float *values = scale + row * layout->scale_stride;
        gpu_fill_values(c->fill, TN_FP32, seed + (uint64_t)row, values, (size_t)layout->scale_cols);
        for (int64_t col = 0; col < layout->scale_cols; col++)
            values[col] = scale_value(values[col], mode);
    }
}

static void fill_bytes(uint64_t *state, unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)(gpu_random(state) >> 32);
}

static void fill_scales(const battery_case *c, const tn_plane_layout *layout, tn_scale_mode mode,
                        uint64_t seed, unsigned char *scale) {
    uint64_t state = seed;
    if (layout->global_scale_offset < 0 && layout->scale_dtype == TN_FP32) {
        fill_block_scales(c, layout, mode, seed, (float *)(void *)scale);
        return;
    }
    fill_bytes(&state, scale, layout->scale_bytes);
    if (layout->global_scale_offset < 0) return;
    const float global = scale_value(gpu_normal(&state), TN_SCALE_FP32);
    memcpy(scale + layout->global_scale_offset, &global, sizeof global);
}

/* A plane in host memory. */
typedef struct plane_bytes {
    tn_plane_layout layout;
    unsigned char *data, *scale;
} plane_bytes;

static plane_bytes plane_of(tn_tensor tensor, tn_plane plane) {
    plane_bytes of = {.data = NULL};
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &of.layout));
    of.data = malloc(of.layout.data_bytes + 1);
    of.scale = malloc(of.layout.scale_bytes + 1);
    return of;
}

/* Any codes; the case's zeros are zeros. */
static void fill_plane(const battery_case *c, tn_scale_mode mode, const plane_bytes *of) {
    const uint64_t seed = c->seed * 64 + 7;
    uint64_t state = seed;
    fill_bytes(&state, of->data, of->layout.data_bytes);
    if (c->fill == GPU_FILL_ZERO)
        for (size_t i = 0; i < of->layout.data_bytes; i++)
            of->data[i] &= 0x80;
    if (of->layout.scale_bytes > 0) fill_scales(c, &of->layout, mode, seed, of->scale);
}

/* The plane that a compact tensor would be filled with, spread over a large one. */
static void fill_large_plane(gpu_side *side, const battery_case *c, tn_tensor tensor,
                             tn_plane plane, tn_scale_mode mode, const plane_bytes *to) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    tn_tensor compact =
        gpu_fp8(side, info.format, info.dtype, mode, c->bands->compact_rows, c->cols);
    plane_bytes from = plane_of(compact, plane);
    fill_plane(c, mode, &from);
    battery_expand(c->bands, tensor, compact, plane, 0, from.data, to->data);
    battery_expand(c->bands, tensor, compact, plane, 1, from.scale, to->scale);
    gpu_destroy(side, compact);
    free(from.data);
    free(from.scale);
}

static void write_plane(gpu_side *side, const battery_case *c, tn_tensor tensor, tn_plane plane,
                        tn_scale_mode mode) {
    plane_bytes of = plane_of(tensor, plane);
    if (c->bands && c->rows == c->bands->rows)
        fill_large_plane(side, c, tensor, plane, mode, &of);
    else
        fill_plane(c, mode, &of);
    EXPECT_OK(tn_plane_write(tensor, plane, of.data, of.layout.data_bytes,
                             of.layout.scale_bytes > 0 ? of.scale : NULL, of.layout.scale_bytes,
                             side->stream));
    EXPECT_OK(tn_stream_synchronize(side->device, side->stream));
    free(of.data);
    free(of.scale);
}

/* ---- dequantize ----------------------------------------------------------------------------- */

static const tn_format quantized_formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D,
                                              TN_FORMAT_FP8_TENSOR, TN_FORMAT_MXFP8,
                                              TN_FORMAT_NVFP4};
enum { FORMATS = sizeof quantized_formats / sizeof *quantized_formats };
enum { DEQUANTIZE_WAYS = FORMATS * 2 * 3 };

static void prepare_dequantize(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_format format = quantized_formats[c->way % FORMATS];
    const tn_scale_mode mode = battery_pick(c, PICK_MODE, 2) ? TN_SCALE_FP32 : TN_SCALE_POW2;
    tn_tensor src = gpu_fp8(side, format, code_of(c, format), mode, c->rows, c->cols);
    battery_keep(operands, src);
    write_plane(side, c, src, battery_row_and_col[c->way / FORMATS % 2], mode);
    add_skip(side, c, operands);
    battery_output_add(operands, "values",
                       gpu_plain(side, battery_floats[c->way / FORMATS / 2], c->rows, c->cols),
                       TN_PLANE_DATA);
}

static tn_status launch_dequantize(gpu_side *side, const battery_case *c,
                                   const battery_operands *operands) {
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    args.src = operands->in[0];
    args.plane = battery_row_and_col[c->way / FORMATS % 2];
    args.dst = operands->out[0].tensor;
    args.skip = operands->skip;
    return tn_dequantize(&args, side->stream);
}

/* ---- transpose ------------------------------------------------------------------------------ */

enum { TRANSPOSE_WAYS = 2 * 2 * 2 };

static void prepare_transpose(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_format format = c->way % 2 ? TN_FORMAT_FP8_TENSOR : TN_FORMAT_FP8_BLOCK_2D;
    const tn_scale_mode mode = battery_pick(c, PICK_MODE, 2) ? TN_SCALE_FP32 : TN_SCALE_POW2;
    const unsigned from = c->way / 2 % 2;
    tn_tensor tensor = gpu_fp8(side, format, battery_codes[c->way / 4], mode, c->rows, c->cols);
    write_plane(side, c, tensor, battery_row_and_col[from], mode);
    battery_derived_add(operands, from ? "row plane" : "column plane", tensor,
                        battery_row_and_col[!from]);
}

static tn_status launch_transpose(gpu_side *side, const battery_case *c,
                                  const battery_operands *operands) {
    tn_transpose_args args = TN_TRANSPOSE_ARGS_INIT;
    (void)c;
    args.tensor = operands->out[0].tensor;
    args.to = operands->out[0].plane;
    return tn_transpose(&args, side->stream);
}

/* ---- requantize ----------------------------------------------------------------------------- */

/* From ROW or COL, of 1D or 2D, to 1D or 2D, in either type. */
enum { VALUES_WAYS = 2 * 2 * 2 * 2, SHIFT_WAYS = 2 * 2 };

static unsigned values_planes(const battery_case *c) { return battery_pick(c, PICK_PLANES, 3) + 1; }

static tn_format block_format(unsigned is_2d) {
    return is_2d ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
}

static void prepare_values(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_scale_mode from_mode = battery_pick(c, PICK_MODE, 2) ? TN_SCALE_FP32 : TN_SCALE_POW2;
    const tn_scale_mode to_mode = battery_pick(c, PICK_MODE, 3) ? TN_SCALE_POW2 : TN_SCALE_FP32;
    tn_tensor src = gpu_fp8(side, block_format(c->way / 2 % 2), code_of(c, TN_FORMAT_FP8_BLOCK_1D),
                            from_mode, c->rows, c->cols);
    battery_keep(operands, src);
    write_plane(side, c, src, battery_row_and_col[c->way % 2], from_mode);
    add_skip(side, c, operands);
    battery_planes_add(operands,
                       gpu_fp8(side, block_format(c->way / 4 % 2), battery_codes[c->way / 8],
                               to_mode, c->rows, c->cols),
                       values_planes(c));
}

static tn_status launch_values(gpu_side *side, const battery_case *c,
                               const battery_operands *operands) {
    tn_requantize_args args = TN_REQUANTIZE_ARGS_INIT;
    args.src = operands->in[0];
    args.from = battery_row_and_col[c->way % 2];
    args.dst = operands->out[0].tensor;
    args.planes = values_planes(c);
    args.amax_epsilon = battery_pick(c, PICK_EPSILON, 4) ? 0.0f : 1.0f;
    args.skip = operands->skip;
    return tn_requantize(&args, side->stream);
}

static void prepare_shift(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_dtype dtype = battery_codes[c->way / 2];
    const unsigned from = c->way % 2;
    tn_tensor src = gpu_fp8(side, TN_FORMAT_FP8_BLOCK_1D, dtype, TN_SCALE_POW2, c->rows, c->cols);
    battery_keep(operands, src);
    write_plane(side, c, src, battery_row_and_col[from], TN_SCALE_POW2);
    add_skip(side, c, operands);
    battery_output_add(
        operands, "other plane",
        gpu_fp8(side, TN_FORMAT_FP8_BLOCK_1D, dtype, TN_SCALE_POW2, c->rows, c->cols),
        battery_row_and_col[!from]);
}

static tn_status launch_shift(gpu_side *side, const battery_case *c,
                              const battery_operands *operands) {
    tn_requantize_args args = TN_REQUANTIZE_ARGS_INIT;
    args.src = operands->in[0];
    args.from = battery_row_and_col[c->way % 2];
    args.dst = operands->out[0].tensor;
    args.mode = TN_REQUANTIZE_SHIFT;
    args.skip = operands->skip;
    return tn_requantize(&args, side->stream);
}

/* ---- delayed scaling ------------------------------------------------------------------------ */

/* fp32, not negative, of the case's fill. */
static tn_tensor magnitudes(gpu_side *side, const battery_case *c, battery_operands *operands,
                            int64_t rows, int64_t cols, uint64_t salt) {
    const size_t count = (size_t)rows * (size_t)cols;
    float *values = malloc(count * sizeof *values + 1);
    tn_tensor tensor = gpu_plain(side, TN_FP32, rows, cols);
    gpu_fill_values(c->fill, TN_FP32, c->seed * 64 + salt, values, count);
    for (size_t i = 0; i < count; i++)
        values[i] = fabsf(values[i]);
    gpu_upload(side, tensor, values);
    free(values);
    battery_keep(operands, tensor);
    return tensor;
}

enum { DELAYED_WAYS = 3 * 2 * 3, HISTORY = 5, SLOTS = 3 };

/* A scale, a history, or both. */
static unsigned delayed_of(const battery_case *c) { return battery_pick(c, PICK_DELAYED, 3) + 1; }

static void prepare_delayed(gpu_side *side, const battery_case *c, battery_operands *operands) {
    tn_tensor dst = gpu_fp8(side, TN_FORMAT_FP8_TENSOR, battery_codes[c->way / 3 % 2],
                            TN_SCALE_FP32, c->rows, c->cols);
    (void)battery_input(side, c, operands, battery_floats[c->way % 3], c->rows, c->cols, 0);
    (void)magnitudes(side, c, operands, 1, SLOTS, 1);
    tn_tensor history = magnitudes(side, c, operands, HISTORY, SLOTS, 2);
    add_skip(side, c, operands);
    battery_planes_add(operands, dst, c->way / 6 + 1);
    battery_updated_add(operands, "amax history", gpu_plain(side, TN_FP32, HISTORY, SLOTS),
                        history);
}

static tn_status launch_delayed(gpu_side *side, const battery_case *c,
                                const battery_operands *operands) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = operands->in[0];
    args.dst = operands->out[0].tensor;
    args.planes = c->way / 6 + 1;
    if (delayed_of(c) & 1) args.scale = operands->in[1];
    if (delayed_of(c) & 2) args.amax_history = operands->out[operands->out_count - 1].tensor;
    args.slot = battery_pick(c, PICK_SLOT, SLOTS);
    args.skip = operands->skip;
    return tn_quantize(&args, side->stream);
}

enum { UPDATE_WAYS = 2 * 2 * 4 };

/* As many tensors as the case has columns, and its rows are how far the history goes back. */
static void prepare_update(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const int64_t length = c->rows > 0 ? c->rows : 1;
    tn_tensor history = magnitudes(side, c, operands, length, c->cols, 0);
    tn_tensor scale = magnitudes(side, c, operands, 1, c->cols, 1);
    add_skip(side, c, operands);
    battery_updated_add(operands, "amax history", gpu_plain(side, TN_FP32, length, c->cols),
                        history);
    battery_updated_add(operands, "scale", gpu_plain(side, TN_FP32, 1, c->cols), scale);
}

static tn_status launch_update(gpu_side *side, const battery_case *c,
                               const battery_operands *operands) {
    static const int margins[] = {0, 3, -64, 64};
    tn_scale_update_args args = TN_SCALE_UPDATE_ARGS_INIT;
    args.amax_history = operands->out[0].tensor;
    args.scale = operands->out[1].tensor;
    args.amax = c->way % 2 ? TN_AMAX_MOST_RECENT : TN_AMAX_MOST;
    args.dtype = battery_codes[c->way / 2 % 2];
    args.margin = margins[c->way / 4];
    args.skip = operands->skip;
    return tn_scale_update(&args, side->stream);
}

static const battery_op ops[] = {
    {"dequantize", DEQUANTIZE_WAYS, prepare_dequantize, launch_dequantize},
    {"transpose", TRANSPOSE_WAYS, prepare_transpose, launch_transpose},
    {"requantize, values", VALUES_WAYS, prepare_values, launch_values},
    {"requantize, shift", SHIFT_WAYS, prepare_shift, launch_shift},
    {"quantize, delayed", DELAYED_WAYS, prepare_delayed, launch_delayed},
    {"scale update", UPDATE_WAYS, prepare_update, launch_update},
};

const battery_table battery_formats = {ops, sizeof ops / sizeof *ops, 0};
