/* Planes in plain memory and the reference quantizer: see ops_planes_support.h. */
#include "ops_planes_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD_BYTES = 64, GUARD = 0xFF };

static int64_t blocks_of(int64_t count) { return (count + 127) / 128; }
static int64_t up4(int64_t count) { return (count + 3) / 4 * 4; }

static void *guarded_memory(size_t bytes) {
    unsigned char *memory = malloc(bytes + GUARD_BYTES);
    assert_non_null(memory);
    memset(memory, GUARD, bytes + GUARD_BYTES);
    return memory;
}

static void expect_guard(const void *memory, size_t bytes) {
    const unsigned char *guard = (const unsigned char *)memory + bytes;
    for (int i = 0; i < GUARD_BYTES; i++)
        assert_int_equal(guard[i], GUARD);
}

static tn_plane_layout layout_of(tn_format format, tn_plane plane, int64_t m, int64_t k) {
    tn_plane_layout layout = {0};
    int is_col = plane == TN_PLANE_COL;
    layout.rows = is_col ? k : m;
    layout.cols = is_col ? m : k;
    layout.data_bytes = (size_t)(m * k);
    if (format == TN_FORMAT_FP8_BLOCK_1D) {
        layout.scale_rows = blocks_of(layout.cols);
        layout.scale_cols = layout.rows;
    } else {
        layout.scale_rows = blocks_of(layout.rows);
        layout.scale_cols = blocks_of(layout.cols);
    }
    layout.row_bytes = (size_t)layout.cols;
    layout.scale_padded_rows = layout.scale_rows;
    layout.scale_stride = up4(layout.scale_cols);
    layout.scale_bytes = (size_t)(layout.scale_rows * layout.scale_stride) * sizeof(float);
    return layout;
}

test_plane test_plane_make(tn_format format, tn_plane plane, tn_dtype dtype, int64_t m, int64_t k) {
    test_plane result = {.format = format, .m = m, .k = k};
    result.view.dtype = dtype;
    result.view.plane = plane;
    result.view.layout = layout_of(format, plane, m, k);
    result.view.data = guarded_memory(result.view.layout.data_bytes);
    result.view.scale = guarded_memory(result.view.layout.scale_bytes);
    return result;
}

void test_plane_free(test_plane *plane) {
    expect_guard(plane->view.data, plane->view.layout.data_bytes);
    expect_guard(plane->view.scale, plane->view.layout.scale_bytes);
    free(plane->view.data);
    free(plane->view.scale);
}

void test_plane_expect_zero_padding(const test_plane *plane) {
    const tn_plane_layout *layout = &plane->view.layout;
    const float *scales = plane->view.scale;
    for (int64_t row = 0; row < layout->scale_rows; row++) {
        for (int64_t i = layout->scale_cols; i < layout->scale_stride; i++) {
            float scale = scales[row * layout->scale_stride + i];
            assert_true(scale == 0.0f && !signbit(scale));
        }
    }
}

void test_plane_poison_padding(test_plane *plane) {
    const tn_plane_layout *layout = &plane->view.layout;
    float *scales = plane->view.scale;
    for (int64_t row = 0; row < layout->scale_rows; row++) {
        for (int64_t i = layout->scale_cols; i < layout->scale_stride; i++) {
            scales[row * layout->scale_stride + i] = NAN;
        }
    }
}

uint8_t test_plane_code(const test_plane *plane, int64_t m, int64_t k) {
    const uint8_t *data = plane->view.data;
    return plane->view.plane == TN_PLANE_ROW ? data[m * plane->k + k] : data[k * plane->m + m];
}

/* Written out from the layout table of tenure_tensor.h, one line of it a case. */
float test_plane_scale(const test_plane *plane, int64_t m, int64_t k) {
    int is_1d = plane->format == TN_FORMAT_FP8_BLOCK_1D;
    const float *scale = plane->view.scale;
    if (plane->view.plane == TN_PLANE_ROW) {
        if (is_1d) return scale[k / 128 * up4(plane->m) + m];
        return scale[m / 128 * up4(blocks_of(plane->k)) + k / 128];
    }
    if (is_1d) return scale[m / 128 * up4(plane->k) + k];
    return scale[k / 128 * up4(blocks_of(plane->m)) + m / 128];
}

/* ---- FP8 codes, from the definition of the types -------------------------------------------- */

static double magnitude_of_code(tn_dtype dtype, unsigned code) {
    int mantissa_bits = dtype == TN_E4M3 ? 3 : 2, bias = dtype == TN_E4M3 ? 7 : 15;
    int exponent = (int)(code >> mantissa_bits), one = 1 << mantissa_bits;
    int mantissa = (int)(code & (unsigned)(one - 1));
    if (exponent == 0) return ldexp(mantissa, 1 - bias - mantissa_bits);
    return ldexp(one + mantissa, exponent - bias - mantissa_bits);
}

static unsigned last_code(tn_dtype dtype) { return dtype == TN_E4M3 ? 0x7E : 0x7B; }

static uint8_t nearest_code(tn_dtype dtype, float value) {
    static double magnitudes[2][128];
    double *of = magnitudes[dtype == TN_E4M3];
    unsigned low = 0, high = last_code(dtype), sign = signbit(value) ? 0x80 : 0;
    double magnitude = fabs((double)value);
    if (isnan(value)) return 0x7F;
    for (unsigned i = 0; of[1] == 0.0 && i < 128; i++)
        of[127 - i] = magnitude_of_code(dtype, 127 - i);
    if (magnitude >= of[high]) return (uint8_t)(sign | high);
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (of[middle] <= magnitude)
            low = middle;
        else
            high = middle;
    }
    double below = magnitude - of[low], above = of[high] - magnitude;
    return (uint8_t)(sign | (below < above || (below == above && low % 2 == 0) ? low : high));
}

double test_plane_value(const test_plane *plane, int64_t m, int64_t k) {
    uint8_t code = test_plane_code(plane, m, k);
    double magnitude = magnitude_of_code(plane->view.dtype, code & 0x7F);
    return (code & 0x80 ? -magnitude : magnitude) * (double)test_plane_scale(plane, m, k);
}

/* ---- sources -------------------------------------------------------------------------------- */

static size_t bytes_of(tn_dtype dtype) { return dtype == TN_FP32 ? 4 : 2; }

float test_matrix_get(const tn__matrix *matrix, int64_t row, int64_t col) {
    int64_t at = row * matrix->cols + col;
    uint32_t bits;
    float value;
    if (matrix->dtype == TN_FP32) return ((const float *)matrix->data)[at];
    bits = ((const uint16_t *)matrix->data)[at];
    if (matrix->dtype == TN_FP16) {
        int exponent = (int)(bits >> 10) & 31, mantissa = (int)(bits & 1023);
        value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                : exponent == 0 ? ldexpf((float)mantissa, -24)
                                : ldexpf((float)(1024 + mantissa), exponent - 25);
        return bits & 0x8000 ? -value : value;
    }
    bits <<= 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* value must have the type's precision: only its leading bits are kept. */
void test_matrix_set(tn__matrix *matrix, int64_t row, int64_t col, float value) {
    int64_t at = row * matrix->cols + col;
    uint32_t bits, sign;
    memcpy(&bits, &value, sizeof bits);
    if (matrix->dtype == TN_FP32) ((float *)matrix->data)[at] = value;
    if (matrix->dtype == TN_BF16) ((uint16_t *)matrix->data)[at] = (uint16_t)(bits >> 16);
    if (matrix->dtype != TN_FP16) return;
    sign = (bits >> 16) & 0x8000;
    float magnitude = fabsf(value);
    uint32_t half = isnan(value)            ? 0x7E00
                    : magnitude >= 65520.0f ? 0x7C00
                    : magnitude < 0x1p-14f  ? (uint32_t)(magnitude * 0x1p24f)
                                            : ((bits & 0x7FFFFFFF) >> 13) - (112u << 10);
    ((uint16_t *)matrix->data)[at] = (uint16_t)(sign | half);
}

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

tn__matrix test_matrix_make(tn_dtype dtype, int64_t rows, int64_t cols, uint32_t seed) {
    tn__matrix matrix = {.dtype = dtype, .rows = rows, .cols = cols};
    uint32_t random = seed * 2654435761u + 1;
    matrix.data = malloc((size_t)(rows * cols) * bytes_of(dtype) + 1);
    assert_non_null(matrix.data);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            uint32_t draw = next_random(&random);
            float value = ((float)(draw & 0xFFFF) - 32768.0f) * 0x1p-14f; /* [-2, 2) */
            value = ldexpf(value, (int)((r / 3 + c / 50) % 9) - 4);
            if (draw >> 16 == 7) value = 0.0f;
            if (draw >> 16 == 8) value = -0.0f;
            test_matrix_set(&matrix, r, c, value);
        }
    }
    return matrix;
}

void test_matrix_free(tn__matrix *matrix) { free(matrix->data); }

/* ---- the reference -------------------------------------------------------------------------- */

void test_quantize(const tn__matrix *src, test_plane *row, test_plane *col, tn_scale_mode mode,
                   float epsilon) {
    const test_plane *any = row ? row : col;
    tn__quantize_work work = {.src = *src, .format = any->format, .scale_mode = mode};
    work.dtype = any->view.dtype;
    work.amax_epsilon = epsilon;
    work.has_row = row != NULL, work.has_col = col != NULL;
    if (row) work.row = row->view;
    if (col) work.col = col->view;
    tn__host_quantize(&work);
}

static float reference_factor(float amax, const test_plane *plane, const tn__matrix *src,
                              tn_scale_mode mode) {
    double max = plane->view.dtype == TN_E4M3 ? 448.0 : 57344.0;
    float factor;
    int exponent;
    if (amax == 0.0f || isinf(amax)) return 1.0f;
    factor = (float)(max / (double)amax);
    if (isinf(factor)) {
        factor = src->dtype == TN_FP16   ? 65504.0f
                 : src->dtype == TN_BF16 ? 0x1.FEp127f
                                         : 0x1.FFFFFEp127f;
    }
    if (mode == TN_SCALE_FP32) return factor;
    frexp((double)factor, &exponent);
    return (float)ldexp(1.0, exponent - 1);
}

typedef struct area {
    int64_t top, left, bottom, right;
} area;

static float reference_amax(const tn__matrix *src, area block) {
    float amax = 0.0f;
    for (int64_t m = block.top; m < block.bottom; m++) {
        for (int64_t k = block.left; k < block.right; k++) {
            amax = fmaxf(amax, fabsf(test_matrix_get(src, m, k)));
        }
    }
    return amax;
}

static void expect_block(const test_plane *plane, const tn__matrix *src, tn_scale_mode mode,
                         float epsilon, area block) {
    float amax = fmaxf(reference_amax(src, block), epsilon);
    float factor = reference_factor(amax, plane, src, mode);
    float stored = (float)(1.0 / (double)factor);
    for (int64_t m = block.top; m < block.bottom; m++) {
        for (int64_t k = block.left; k < block.right; k++) {
            volatile float product = test_matrix_get(src, m, k) * factor;
            uint8_t expected = nearest_code(plane->view.dtype, product);
            float scale = test_plane_scale(plane, m, k);
            if (memcmp(&scale, &stored, sizeof scale) != 0) {
                fail_msg("scale of (%ld, %ld) is %a, expected %a", (long)m, (long)k, (double)scale,
                         (double)stored);
            }
            if (test_plane_code(plane, m, k) == expected) continue;
            fail_msg("code of (%ld, %ld) is 0x%X, expected 0x%X", (long)m, (long)k,
                     test_plane_code(plane, m, k), expected);
        }
    }
}

void test_plane_expect_quantized(const test_plane *plane, const tn__matrix *src, tn_scale_mode mode,
                                 float epsilon) {
    int is_1d = plane->format == TN_FORMAT_FP8_BLOCK_1D;
    int64_t height = is_1d && plane->view.plane == TN_PLANE_ROW ? 1 : 128;
    int64_t width = is_1d && plane->view.plane == TN_PLANE_COL ? 1 : 128;
    for (int64_t m = 0; m < src->rows; m += height) {
        for (int64_t k = 0; k < src->cols; k += width) {
            area block = {m, k, tn__least(m + height, src->rows), tn__least(k + width, src->cols)};
            expect_block(plane, src, mode, epsilon, block);
        }
    }
    test_plane_expect_zero_padding(plane);
}

/* ---- tensors ------------------------------------------------------------------------------- */

tn_tensor test_tensor_of(const test_ops *ops, tn_scope scope, const tn__matrix *matrix) {
    tn_tensor tensor = test_plain(scope, matrix->dtype, matrix->rows, matrix->cols);
    test_write(ops, tensor, matrix->data);
    return tensor;
}

static tn_tensor_info info_of(tn_tensor tensor) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    return info;
}

tn__matrix test_fetch_matrix(const test_ops *ops, tn_tensor tensor) {
    tn_tensor_info info = info_of(tensor);
    tn__matrix matrix = test_matrix_make(info.dtype, info.rows, info.cols, 0);
    test_read(ops, tensor, matrix.data);
    return matrix;
}

test_plane test_fetch_plane(const test_ops *ops, tn_tensor tensor, tn_plane plane) {
    tn_tensor_info info = info_of(tensor);
    test_plane fetched = test_plane_make(info.format, plane, info.dtype, info.rows, info.cols);
    EXPECT_OK(tn_plane_read(tensor, plane, fetched.view.data, fetched.view.layout.data_bytes,
                            fetched.view.scale, fetched.view.layout.scale_bytes, ops->stream));
    test_ops_wait(ops);
    return fetched;
}

tn_tensor test_quantized(const test_ops *ops, tn_scope scope, const tn__matrix *src,
                         tn_format format, unsigned planes) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = test_tensor_of(ops, scope, src);
    args.dst = test_fp8(scope, format, TN_E4M3, src->rows, src->cols);
    args.planes = planes;
    EXPECT_OK(tn_quantize(&args, ops->stream));
    return args.dst;
}

void test_expect_same_matrix(const tn__matrix *a, const tn__matrix *b) {
    assert_int_equal(a->dtype, b->dtype);
    assert_int_equal(a->rows, b->rows);
    assert_int_equal(a->cols, b->cols);
    assert_memory_equal(a->data, b->data, (size_t)(a->rows * a->cols) * bytes_of(a->dtype));
}
