/* Planes of blocks of 128 from a plane of them, on the host: the definition.
 *
 * With new scales it is the cast of the values that dequantizing gives, as fp32. The scaling-aware
 * transpose looks at codes and scales alone, a tile of 128 x 128 of the stored plane at a time.
 */
#include "host_kernels.h"
#include "host_number.h"

/* A piece of a row of the tensor, which in a COL plane is a piece of a stored column. */
static void make_row(void *context, int64_t row, int64_t col, int count, float *out) {
    const tn__dequantize_work *plane = context;
    if (plane->src.plane == TN_PLANE_ROW) {
        tn__host_plane_values(plane, row, col, count, out);
        return;
    }
    for (int c = 0; c < count; c++)
        tn__host_plane_values(plane, col + c, row, 1, out + c);
}

/* ---- the scaling-aware transpose ------------------------------------------------------------ */

/* Whether there is a number other than 0 among the codes. */
static int has_numbers(const float *values, const uint8_t *codes, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (tn__magnitude_of(values[codes[i]]) > 0) return 1;
    }
    return 0;
}

/* Rows are brought to the largest of their scales, which all columns get. Rows of zeros have a
 * scale of 1 that says nothing, and do not count. */
static void shift_tile(const tn_plane_view *from, const tn_plane_view *to, int64_t top,
                       int64_t left) {
    const float *values = tn__fp8_values(from->dtype);
    const float *scale = tn__scale_row(from, left / TN__BLOCK) + top;
    const uint8_t *codes = (const uint8_t *)from->data + top * from->layout.cols + left;
    int64_t rows = tn__least(TN__BLOCK, from->layout.rows - top);
    int64_t cols = tn__least(TN__BLOCK, from->layout.cols - left);
    uint32_t bits = 0; /* of scales: they compare as the scales do */
    for (int64_t r = 0; r < rows; r++) {
        if (!has_numbers(values, codes + r * from->layout.cols, cols)) continue;
        bits = tn__bits_of(scale[r]) > bits ? tn__bits_of(scale[r]) : bits;
    }
    float most = bits ? tn__float_of(bits) : 1.0f;
    for (int64_t r = 0; r < rows; r++) {
        float factor = scale[r] < most ? scale[r] / most : 1.0f;
        for (int64_t c = 0; c < cols; c++) {
            float value = values[codes[r * from->layout.cols + c]] * factor;
            tn__store_floats(to->dtype, to->data, (left + c) * to->layout.cols + top + r, 1,
                             &value);
        }
    }
    for (int64_t c = 0; c < cols; c++)
        tn__scale_row(to, top / TN__BLOCK)[left + c] = most;
}

static void shift_plane(const tn_plane_view *from, const tn_plane_view *to) {
    for (int64_t top = 0; top < from->layout.rows; top += TN__BLOCK) {
        for (int64_t left = 0; left < from->layout.cols; left += TN__BLOCK)
            shift_tile(from, to, top, left);
    }
    tn__host_zero_scale_padding(to);
}

void tn__host_requantize(const tn__requantize_work *work) {
    tn__dequantize_work plane = {.format = work->format, .src = work->from};
    if (tn__host_is_skipped(work->to.skip)) return;
    if (work->shifts)
        shift_plane(&work->from, work->to.has_row ? &work->to.row : &work->to.col);
    else
        tn__host_quantize_made(&work->to, make_row, &plane);
}
