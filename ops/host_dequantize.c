/* Dequantization on the host, from any plane of any format: the definition.
 *
 * Each element is multiplied once, in fp32, with what the plane stores for it, and rounded once to
 * the type of the result. Where a scale of a block and one of the tensor go together (NVFP4), they
 * are multiplied first.
 */
#include "host_kernels.h"
#include "host_number.h"

static float scale_code(const tn_plane_view *src, int64_t row, int64_t col) {
    uint8_t code = ((const uint8_t *)src->scale)[row * src->layout.scale_stride + col];
    if (src->layout.scale_dtype == TN_E8M0) return tn__e8m0_to_float(code);
    return tn__fp8_values(TN_E4M3)[code] * *src->global_scale;
}

/* The scale of the element at (row, col) of the plane, as it is stored. */
static float scale_of(const tn__dequantize_work *work, int64_t row, int64_t col) {
    const tn_plane_view *src = &work->src;
    switch (work->format) {
    case TN_FORMAT_FP8_BLOCK_1D: return tn__scale_row(src, col / TN__BLOCK)[row];
    case TN_FORMAT_FP8_BLOCK_2D: return tn__scale_row(src, row / TN__BLOCK)[col / TN__BLOCK];
    case TN_FORMAT_MXFP8:
        if (src->plane == TN_PLANE_COL) return scale_code(src, row / TN__MXFP8_BLOCK, col);
        return scale_code(src, row, col / TN__MXFP8_BLOCK);
    case TN_FORMAT_NVFP4: return scale_code(src, row, col / TN__NVFP4_BLOCK);
    default: return *src->global_scale;
    }
}

static void load_codes(const tn_plane_view *src, int64_t row, int64_t col, int64_t count,
                       float *out) {
    const uint8_t *from = (const uint8_t *)src->data + (size_t)row * src->layout.row_bytes;
    if (src->dtype != TN_E2M1) {
        tn__load_floats(src->dtype, from, col, count, out);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        unsigned pair = from[(col + i) / 2];
        out[i] = tn__e2m1_to_float((col + i) % 2 ? pair >> 4 : pair & 0xF);
    }
}

/* No more than 16 elements of a row: they share a scale, but in MXFP8's COL. */
static void dequantize_piece(const tn__dequantize_work *work, int64_t row, int64_t col,
                             int64_t count, float *out) {
    int each = work->format == TN_FORMAT_MXFP8 && work->src.plane == TN_PLANE_COL;
    float scale = scale_of(work, row, col);
    load_codes(&work->src, row, col, count, out);
    for (int64_t i = 0; i < count; i++)
        out[i] *= each ? scale_of(work, row, col + i) : scale;
}

void tn__host_plane_values(const tn__dequantize_work *work, int64_t row, int64_t col, int64_t count,
                           float *out) {
    for (int64_t at = 0; at < count; at += TN__NVFP4_BLOCK) {
        int64_t piece = tn__least(TN__NVFP4_BLOCK, count - at);
        dequantize_piece(work, row, col + at, piece, out + at);
    }
}

void tn__host_dequantize(const tn__dequantize_work *work) {
    const tn_plane_layout *layout = &work->src.layout;
    const tn__matrix *dst = &work->dst;
    int is_transposed = work->src.plane == TN_PLANE_COL && work->format != TN_FORMAT_MXFP8;
    float value[TN__NVFP4_BLOCK];
    if (tn__host_is_skipped(work->skip)) return;
    for (int64_t row = 0; row < layout->rows; row++) {
        for (int64_t col = 0; col < layout->cols; col += TN__NVFP4_BLOCK) {
            int64_t count = tn__least(TN__NVFP4_BLOCK, layout->cols - col);
            dequantize_piece(work, row, col, count, value);
            if (!is_transposed) {
                tn__store_floats(dst->dtype, dst->data, row * dst->cols + col, count, value);
                continue;
            }
            for (int64_t i = 0; i < count; i++)
                tn__store_floats(dst->dtype, dst->data, (col + i) * dst->cols + row, 1, &value[i]);
        }
    }
}
