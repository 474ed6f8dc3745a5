/* Planes of any quantized format and their reference: see ops_formats_support.h. */
#include "ops_formats_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "format_table.h"

enum { GUARD_BYTES = 64 };

static void *guarded_memory(size_t bytes) {
    unsigned char *memory = aligned_alloc(64, (bytes + GUARD_BYTES + 63) / 64 * 64);
    assert_non_null(memory);
    memset(memory, 0xFF, bytes + GUARD_BYTES);
    return memory;
}

static void expect_guard(const void *memory, size_t bytes) {
    for (int i = 0; i < GUARD_BYTES; i++)
        assert_int_equal(((const unsigned char *)memory + bytes)[i], 0xFF);
}

test_plane format_plane_make(tn_format format, tn_plane plane, tn_dtype dtype, int64_t m,
                             int64_t k) {
    test_plane result = {.format = format, .m = m, .k = k};
    tn_plane_view *view = &result.view;
    EXPECT_OK(tn__format_layout(format, dtype, m, k, plane, &view->layout));
    view->dtype = dtype, view->plane = plane;
    view->data = guarded_memory(view->layout.data_bytes);
    view->scale = guarded_memory(view->layout.scale_bytes);
    if (view->layout.global_scale_offset >= 0)
        view->global_scale = (float *)((char *)view->scale + view->layout.global_scale_offset);
    return result;
}

void format_plane_free(test_plane *plane) {
    expect_guard(plane->view.data, plane->view.layout.data_bytes);
    expect_guard(plane->view.scale, plane->view.layout.scale_bytes);
    free(plane->view.data);
    free(plane->view.scale);
}

/* ---- codes ---------------------------------------------------------------------------------- */

typedef struct code_type {
    int mantissa_bits, bias;
    unsigned sign, largest; /* bit, and the code of the largest finite number */
} code_type;

static code_type type_of(tn_dtype dtype) {
    if (dtype == TN_E4M3) return (code_type){3, 7, 0x80, 0x7E};
    if (dtype == TN_E5M2) return (code_type){2, 15, 0x80, 0x7B};
    assert_int_equal(dtype, TN_E2M1);
    return (code_type){1, 1, 0x8, 0x7};
}

double format_code_value(tn_dtype dtype, unsigned code) {
    if (dtype == TN_E8M0) return code == 255 ? (double)NAN : ldexp(1.0, (int)code - 127);
    code_type type = type_of(dtype);
    unsigned magnitude = code & (type.sign - 1);
    int exponent = (int)(magnitude >> type.mantissa_bits), one = 1 << type.mantissa_bits;
    int mantissa = (int)magnitude % one;
    double value = exponent == 0 ? ldexp(mantissa, 1 - type.bias - type.mantissa_bits)
                                 : ldexp(one + mantissa, exponent - type.bias - type.mantissa_bits);
    if (magnitude > type.largest) value = NAN;
    if (dtype == TN_E5M2 && magnitude == 0x7C) value = INFINITY;
    return code & type.sign ? -value : value;
}

unsigned format_nearest_code(tn_dtype dtype, double value) {
    code_type type = type_of(dtype);
    unsigned best = 0;
    double magnitude = fabs(value), least = INFINITY;
    if (isnan(value)) return dtype == TN_E2M1 ? 0x7 : 0x7F;
    if (magnitude > format_code_value(dtype, type.largest))
        magnitude = format_code_value(dtype, type.largest);
    for (unsigned code = 0; code <= type.largest; code++) {
        double distance = fabs(format_code_value(dtype, code) - magnitude);
        if (distance < least || (distance == least && code % 2 == 0)) best = code;
        if (distance < least) least = distance;
        if (distance > least) break; /* values grow with codes */
    }
    return signbit(value) ? best | type.sign : best;
}

/* ---- what a plane holds, from the table of docs/formats.md ---------------------------------- */

static int is_turned(const test_plane *plane) {
    return plane->view.plane == TN_PLANE_COL && plane->format != TN_FORMAT_MXFP8;
}

unsigned format_plane_code(const test_plane *plane, int64_t m, int64_t k) {
    int64_t row = is_turned(plane) ? k : m, col = is_turned(plane) ? m : k;
    int64_t cols = is_turned(plane) ? plane->m : plane->k;
    const uint8_t *data = plane->view.data;
    if (plane->format != TN_FORMAT_NVFP4) return data[row * cols + col];
    unsigned byte = data[row * ((cols + 1) / 2) + col / 2];
    return col % 2 ? byte >> 4 : byte & 0xF;
}

static int64_t up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

double format_plane_scale(const test_plane *plane, int64_t m, int64_t k) {
    const uint8_t *bytes = plane->view.scale;
    const float *floats = plane->view.scale;
    int is_col = plane->view.plane == TN_PLANE_COL;
    int64_t row = is_col ? k : m, col = is_col ? m : k;
    int64_t cols = is_col ? plane->m : plane->k, rows = is_col ? plane->k : plane->m;
    switch (plane->format) {
    case TN_FORMAT_FP8_TENSOR: return (double)floats[0];
    case TN_FORMAT_FP8_BLOCK_1D: return (double)floats[col / 128 * up(rows, 4) + row];
    case TN_FORMAT_FP8_BLOCK_2D:
        return (double)floats[row / 128 * up((cols + 127) / 128, 4) + col / 128];
    case TN_FORMAT_MXFP8:
        if (is_col) return format_code_value(TN_E8M0, bytes[m / 32 * up(plane->k, 128) + k]);
        return format_code_value(TN_E8M0, bytes[m * up((plane->k + 31) / 32, 4) + k / 32]);
    default: return format_code_value(TN_E4M3, bytes[row * up((cols + 15) / 16, 4) + col / 16]);
    }
}

float format_plane_value(const test_plane *plane, int64_t m, int64_t k) {
    double value = format_code_value(plane->view.dtype, format_plane_code(plane, m, k));
    double scale = format_plane_scale(plane, m, k);
    if (plane->format == TN_FORMAT_NVFP4)
        scale = (double)(float)(scale * (double)*plane->view.global_scale);
    return (float)(value * scale);
}

/* ---- padding -------------------------------------------------------------------------------- */

typedef void (*padding_function)(uint8_t *byte, uint8_t mask);

static void poison(uint8_t *byte, uint8_t mask) { *byte |= mask; }
static void expect_zero(uint8_t *byte, uint8_t mask) { assert_int_equal(*byte & mask, 0); }

static void for_padding(const test_plane *plane, padding_function take) {
    const tn_plane_layout *layout = &plane->view.layout;
    size_t item = tn_dtype_bytes(layout->scale_dtype);
    uint8_t *scale = plane->view.scale, *data = plane->view.data;
    size_t row_bytes = (size_t)layout->scale_stride * item, at = 0;
    for (; at < row_bytes * (size_t)layout->scale_padded_rows; at++) {
        if (at / row_bytes >= (size_t)layout->scale_rows ||
            at % row_bytes >= (size_t)layout->scale_cols * item)
            take(scale + at, 0xFF);
    }
    for (at += plane->format == TN_FORMAT_NVFP4 ? 4 : 0; at < layout->scale_bytes; at++)
        take(scale + at, 0xFF);
    if (plane->format != TN_FORMAT_NVFP4 || layout->cols % 2 == 0) return;
    for (int64_t row = 1; row <= layout->rows; row++)
        take(data + (size_t)row * layout->row_bytes - 1, 0xF0);
}

void format_plane_poison(test_plane *plane) { for_padding(plane, poison); }
void format_plane_expect_zero_padding(const test_plane *plane) { for_padding(plane, expect_zero); }

/* ---- the reference -------------------------------------------------------------------------- */

void format_quantize(const tn__matrix *src, test_plane *row, test_plane *col, tn_scale_mode mode,
                     float epsilon) {
    test_quantize(src, row, col, mode, epsilon);
}

typedef struct area {
    int64_t top, left, bottom, right;
} area;

static double amax_of(const tn__matrix *src, area block) {
    double amax = 0.0;
    for (int64_t m = block.top; m < block.bottom; m++)
        for (int64_t k = block.left; k < block.right; k++)
            amax = fmax(amax, fabs((double)test_matrix_get(src, m, k)));
    return amax;
}

/* Of the block that the plane scales together with (m, k). */
static area block_at(const test_plane *plane, int64_t m, int64_t k) {
    int64_t size = plane->format == TN_FORMAT_MXFP8 ? 32 : 16;
    if (plane->format == TN_FORMAT_FP8_TENSOR) return (area){0, 0, plane->m, plane->k};
    if (plane->view.plane == TN_PLANE_ROW) {
        int64_t left = k / size * size;
        return (area){m, left, m + 1, tn__least(left + size, plane->k)};
    }
    int64_t top = m / size * size;
    return (area){top, k, tn__least(top + size, plane->m), k + 1};
}

static float capped(double value) {
    return value > (double)0x1.FFFFFEp127f ? 0x1.FFFFFEp127f : (float)value;
}

/* What a plane stores for a block or the tensor, and what its elements are multiplied with. */
typedef struct scales {
    double block, global;
    float factor;
} scales;

static scales tensor_scales(const test_plane *plane, double amax, tn_scale_mode mode) {
    float factor = 1.0f;
    int exponent;
    if (amax != 0.0 && !isinf(amax))
        factor = capped((plane->view.dtype == TN_E4M3 ? 448.0 : 57344.0) / amax);
    if (mode == TN_SCALE_POW2) {
        (void)frexp((double)factor, &exponent);
        factor = (float)ldexp(1.0, exponent - 1);
    }
    float stored = (float)(1.0 / (double)factor);
    return (scales){(double)stored, (double)stored, factor};
}

/* The least power of two that brings amax within the type; of normal amaxes only, where fp32 can
 * tell the difference. */
static scales mxfp8_scales(const test_plane *plane, double amax) {
    double max = plane->view.dtype == TN_E4M3 ? 448.0 : 57344.0;
    int exponent = -127;
    while (exponent < 127 && ldexp(max, exponent) < amax)
        exponent++;
    return (scales){ldexp(1.0, exponent), 0.0, (float)ldexp(1.0, -exponent)};
}

static scales nvfp4_scales(double amax, double amax_of_tensor) {
    float enlarge = 1.0f;
    if (amax_of_tensor != 0.0 && !isinf(amax_of_tensor)) enlarge = capped(2688.0 / amax_of_tensor);
    float global = (float)(1.0 / (double)enlarge);
    float sixth = (float)(amax / 6.0);
    unsigned code = format_nearest_code(TN_E4M3, (double)(float)((double)sixth * (double)enlarge));
    double block = format_code_value(TN_E4M3, code);
    double stored = (double)(float)(block * (double)global);
    return (scales){block, (double)global, capped(stored == 0.0 ? (double)INFINITY : 1.0 / stored)};
}

static scales reference_scales(const test_plane *plane, const tn__matrix *src, tn_scale_mode mode,
                               double epsilon, double of_tensor, int64_t m, int64_t k) {
    if (plane->format == TN_FORMAT_FP8_TENSOR) return tensor_scales(plane, of_tensor, mode);
    double amax = amax_of(src, block_at(plane, m, k));
    if (plane->format == TN_FORMAT_MXFP8) return mxfp8_scales(plane, fmax(amax, epsilon));
    return nvfp4_scales(amax, of_tensor);
}

void format_plane_expect_quantized(const test_plane *plane, const tn__matrix *src,
                                   tn_scale_mode mode, float epsilon) {
    double of_tensor = fmax(amax_of(src, (area){0, 0, src->rows, src->cols}), (double)epsilon);
    for (int64_t m = 0; m < src->rows; m++) {
        for (int64_t k = 0; k < src->cols; k++) {
            scales want = reference_scales(plane, src, mode, (double)epsilon, of_tensor, m, k);
            double product = (double)test_matrix_get(src, m, k) * (double)want.factor;
            unsigned expected = format_nearest_code(plane->view.dtype, (double)(float)product);
            unsigned code = format_plane_code(plane, m, k);
            double scale = format_plane_scale(plane, m, k);
            if (scale != want.block || code != expected)
                fail_msg("%s %s (%ld, %ld) of %ld x %ld: scale %a code 0x%X, expected %a 0x%X",
                         tn_format_name(plane->format), tn_plane_name(plane->view.plane), (long)m,
                         (long)k, (long)src->rows, (long)src->cols, scale, code, want.block,
                         expected);
            if (plane->view.global_scale)
                assert_true((double)*plane->view.global_scale == want.global);
        }
    }
    format_plane_expect_zero_padding(plane);
}
