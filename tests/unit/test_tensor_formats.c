/* The format table: layouts worked by hand and by a second formula, what takes which dtype, what
 * derives from what. Operands of GEMMs: test_format_operands.c. */
#include "tensor_fixture.h"

#include <string.h>

#include "format_table.h"

typedef struct layout_case {
    int64_t m, k;
    tn_plane plane;
    int64_t rows, cols;
    size_t data_bytes;
    int64_t scale_rows, scale_cols, scale_stride;
    size_t scale_bytes;
} layout_case;

static void check_cases(tn_format format, const layout_case *cases, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const layout_case *want = &cases[i];
        tn_plane_layout got;
        EXPECT_OK(tn__format_layout(format, TN_E4M3, want->m, want->k, want->plane, &got));
        assert_int_equal(got.rows, want->rows);
        assert_int_equal(got.cols, want->cols);
        assert_int_equal(got.data_bytes, want->data_bytes);
        assert_int_equal(got.scale_rows, want->scale_rows);
        assert_int_equal(got.scale_cols, want->scale_cols);
        assert_int_equal(got.scale_stride, want->scale_stride);
        assert_int_equal(got.scale_bytes, want->scale_bytes);
        int is_empty = want->data_bytes == 0;
        assert_int_equal(got.row_bytes, is_empty ? 0 : want->cols);
        assert_int_equal(got.scale_padded_rows, is_empty ? 0 : want->scale_rows);
        assert_int_equal(got.global_scale_offset,
                         format == TN_FORMAT_FP8_TENSOR && !is_empty ? 0 : -1);
    }
}

/* ROW [ceil(K/128), up4(M)], COL [ceil(M/128), up4(K)]. */
static void layouts_of_1d_scaling(void **state) {
    (void)state;
    static const layout_case cases[] = {
        {1, 1, TN_PLANE_ROW, 1, 1, 1, 1, 1, 4, 16},
        {1, 1, TN_PLANE_COL, 1, 1, 1, 1, 1, 4, 16},
        {128, 128, TN_PLANE_ROW, 128, 128, 16384, 1, 128, 128, 512},
        {128, 128, TN_PLANE_COL, 128, 128, 16384, 1, 128, 128, 512},
        {129, 257, TN_PLANE_ROW, 129, 257, 33153, 3, 129, 132, 1584},
        {129, 257, TN_PLANE_COL, 257, 129, 33153, 2, 257, 260, 2080},
        {993, 512, TN_PLANE_ROW, 993, 512, 508416, 4, 993, 996, 15936},
        {993, 512, TN_PLANE_COL, 512, 993, 508416, 8, 512, 512, 16384},
        {0, 640, TN_PLANE_ROW, 0, 640, 0, 0, 0, 0, 0},
        {0, 640, TN_PLANE_COL, 640, 0, 0, 0, 0, 0, 0},
        {640, 0, TN_PLANE_ROW, 640, 0, 0, 0, 0, 0, 0},
        {0, 0, TN_PLANE_COL, 0, 0, 0, 0, 0, 0, 0},
    };
    check_cases(TN_FORMAT_FP8_BLOCK_1D, cases, sizeof cases / sizeof *cases);
}

/* ROW [ceil(M/128), up4(ceil(K/128))], COL [ceil(K/128), up4(ceil(M/128))]. */
static void layouts_of_2d_scaling(void **state) {
    (void)state;
    static const layout_case cases[] = {
        {1, 1, TN_PLANE_ROW, 1, 1, 1, 1, 1, 4, 16},
        {1, 1, TN_PLANE_COL, 1, 1, 1, 1, 1, 4, 16},
        {128, 128, TN_PLANE_ROW, 128, 128, 16384, 1, 1, 4, 16},
        {129, 257, TN_PLANE_ROW, 129, 257, 33153, 2, 3, 4, 32},
        {129, 257, TN_PLANE_COL, 257, 129, 33153, 3, 2, 4, 48},
        {4096, 4096, TN_PLANE_ROW, 4096, 4096, 16777216, 32, 32, 32, 4096},
        {4096, 1632, TN_PLANE_ROW, 4096, 1632, 6684672, 32, 13, 16, 2048},
        {4096, 1632, TN_PLANE_COL, 1632, 4096, 6684672, 13, 32, 32, 1664},
        {0, 640, TN_PLANE_ROW, 0, 640, 0, 0, 0, 0, 0},
        {640, 0, TN_PLANE_COL, 0, 640, 0, 0, 0, 0, 0},
    };
    check_cases(TN_FORMAT_FP8_BLOCK_2D, cases, sizeof cases / sizeof *cases);
}

/* One float, and three of padding. */
static void layouts_of_one_scale_for_a_tensor(void **state) {
    (void)state;
    static const layout_case cases[] = {
        {1, 1, TN_PLANE_ROW, 1, 1, 1, 1, 1, 4, 16},
        {129, 257, TN_PLANE_ROW, 129, 257, 33153, 1, 1, 4, 16},
        {129, 257, TN_PLANE_COL, 257, 129, 33153, 1, 1, 4, 16},
        {4096, 4096, TN_PLANE_COL, 4096, 4096, 16777216, 1, 1, 4, 16},
        {0, 640, TN_PLANE_ROW, 0, 640, 0, 0, 0, 0, 0},
        {640, 0, TN_PLANE_COL, 0, 640, 0, 0, 0, 0, 0},
    };
    check_cases(TN_FORMAT_FP8_TENSOR, cases, sizeof cases / sizeof *cases);
}

/* What the formats with scales of one byte have beyond a layout_case. */
typedef struct byte_case {
    int64_t m, k;
    tn_plane plane;
    int64_t rows, cols;
    size_t row_bytes;
    int64_t scale_rows, scale_padded_rows, scale_cols, scale_stride;
} byte_case;

static void check_byte_cases(tn_format format, tn_dtype dtype, const byte_case *cases,
                             size_t count) {
    for (size_t i = 0; i < count; i++) {
        const byte_case *want = &cases[i];
        size_t scales = (size_t)(want->scale_padded_rows * want->scale_stride);
        int has_global = format == TN_FORMAT_NVFP4 && scales > 0;
        tn_plane_layout got;
        EXPECT_OK(tn__format_layout(format, dtype, want->m, want->k, want->plane, &got));
        assert_int_equal(got.rows, want->rows);
        assert_int_equal(got.cols, want->cols);
        assert_int_equal(got.row_bytes, want->row_bytes);
        assert_int_equal(got.data_bytes, (size_t)want->rows * want->row_bytes);
        assert_int_equal(got.scale_rows, want->scale_rows);
        assert_int_equal(got.scale_padded_rows, want->scale_padded_rows);
        assert_int_equal(got.scale_cols, want->scale_cols);
        assert_int_equal(got.scale_stride, want->scale_stride);
        assert_int_equal(got.scale_bytes, scales + (has_global ? 16 : 0));
        assert_int_equal(got.global_scale_offset, has_global ? (int64_t)scales : -1);
        if (scales == 0) continue;
        assert_int_equal(got.scale_dtype, format == TN_FORMAT_NVFP4 ? TN_E4M3 : TN_E8M0);
    }
}

/* ROW [up128(M), up4(ceil(K/32))]; COL is stored M x K too: [up4(ceil(M/32)), up128(K)]. */
static void layouts_of_mxfp8(void **state) {
    (void)state;
    static const byte_case cases[] = {
        {1, 1, TN_PLANE_ROW, 1, 1, 1, 1, 128, 1, 4},
        {1, 1, TN_PLANE_COL, 1, 1, 1, 1, 4, 1, 128},
        {128, 128, TN_PLANE_ROW, 128, 128, 128, 128, 128, 4, 4},
        {128, 128, TN_PLANE_COL, 128, 128, 128, 4, 4, 128, 128},
        {129, 257, TN_PLANE_ROW, 129, 257, 257, 129, 256, 9, 12},
        {129, 257, TN_PLANE_COL, 129, 257, 257, 5, 8, 257, 384},
        {4096, 7168, TN_PLANE_ROW, 4096, 7168, 7168, 4096, 4096, 224, 224},
        {4096, 7168, TN_PLANE_COL, 4096, 7168, 7168, 128, 128, 7168, 7168},
        {31, 33, TN_PLANE_ROW, 31, 33, 33, 31, 128, 2, 4},
        {0, 640, TN_PLANE_ROW, 0, 640, 0, 0, 0, 0, 0},
        {640, 0, TN_PLANE_COL, 640, 0, 0, 0, 0, 0, 0},
    };
    check_byte_cases(TN_FORMAT_MXFP8, TN_E5M2, cases, sizeof cases / sizeof *cases);
}

/* [up128(rows), up4(ceil(cols/16))] of the plane as stored, then 16 bytes; two elements a byte. */
static void layouts_of_nvfp4(void **state) {
    (void)state;
    static const byte_case cases[] = {
        {1, 1, TN_PLANE_ROW, 1, 1, 1, 1, 128, 1, 4},
        {1, 1, TN_PLANE_COL, 1, 1, 1, 1, 128, 1, 4},
        {128, 128, TN_PLANE_ROW, 128, 128, 64, 128, 128, 8, 8},
        {129, 257, TN_PLANE_ROW, 129, 257, 129, 129, 256, 17, 20},
        {129, 257, TN_PLANE_COL, 257, 129, 65, 257, 384, 9, 12},
        {4096, 7168, TN_PLANE_ROW, 4096, 7168, 3584, 4096, 4096, 448, 448},
        {4096, 7168, TN_PLANE_COL, 7168, 4096, 2048, 7168, 7168, 256, 256},
        {2, 15, TN_PLANE_ROW, 2, 15, 8, 2, 128, 1, 4},
        {2, 15, TN_PLANE_COL, 15, 2, 1, 15, 128, 1, 4},
        {0, 640, TN_PLANE_ROW, 0, 640, 0, 0, 0, 0, 0},
        {640, 0, TN_PLANE_COL, 0, 640, 0, 0, 0, 0, 0},
    };
    check_byte_cases(TN_FORMAT_NVFP4, TN_E2M1, cases, sizeof cases / sizeof *cases);
}

/* For all sizes around the blocks and paddings: what the hand-made cases say, by formula. */
static int64_t up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

static size_t scale_bytes_by_formula(tn_format format, int64_t rows, int64_t cols, tn_plane plane) {
    switch (format) {
    case TN_FORMAT_FP8_BLOCK_1D: return (size_t)(up(cols, 128) / 128 * up(rows, 4) * 4);
    case TN_FORMAT_FP8_BLOCK_2D:
        return (size_t)(up(rows, 128) / 128 * up(up(cols, 128) / 128, 4) * 4);
    case TN_FORMAT_FP8_TENSOR: return 16;
    case TN_FORMAT_MXFP8:
        if (plane == TN_PLANE_ROW) return (size_t)(up(rows, 128) * up(cols, 128) / 32);
        return (size_t)(up(rows, 128) / 32 * up(cols, 128));
    case TN_FORMAT_NVFP4: return (size_t)(up(rows, 128) * up(cols, 64) / 16 + 16);
    default: return 0;
    }
}

static void bytes_of_all_formats_at_all_tails(void **state) {
    (void)state;
    static const int64_t sizes[] = {1,  2,  3,  15,  16,  17,  31,  32,  33,  63,  64,
                                    65, 96, 97, 127, 128, 129, 255, 256, 257, 4095};
    const size_t count = sizeof sizes / sizeof *sizes;
    for (size_t i = 0; i < count * count * TN_FORMAT_COUNT * 2; i++) {
        int64_t m = sizes[i % count], k = sizes[i / count % count];
        tn_format format = (tn_format)(i / count / count % TN_FORMAT_COUNT);
        tn_plane plane = i / count / count / TN_FORMAT_COUNT ? TN_PLANE_COL : TN_PLANE_ROW;
        if (!tn__format_has_plane(format, plane)) continue;
        int is_turned = plane == TN_PLANE_COL && format != TN_FORMAT_MXFP8;
        int64_t rows = is_turned ? k : m, cols = is_turned ? m : k;
        int is_fp4 = format == TN_FORMAT_NVFP4;
        tn_plane_layout got;
        EXPECT_OK(tn__format_layout(format, is_fp4 ? TN_E2M1 : TN_E4M3, m, k, plane, &got));
        assert_int_equal(got.data_bytes, rows * (is_fp4 ? up(cols, 2) / 2 : cols));
        assert_int_equal(got.scale_bytes, scale_bytes_by_formula(format, rows, cols, plane));
        assert_int_equal(got.scale_bytes % 16, 0);
    }
}

static void plain_layouts_have_no_scales(void **state) {
    (void)state;
    static const struct {
        tn_dtype dtype;
        size_t bytes;
    } cases[] = {{TN_FP32, 60}, {TN_BF16, 30}, {TN_FP16, 30}, {TN_BYTE, 15}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tn_plane_layout got;
        EXPECT_OK(tn__format_layout(TN_FORMAT_PLAIN, cases[i].dtype, 3, 5, TN_PLANE_DATA, &got));
        assert_int_equal(got.rows, 3);
        assert_int_equal(got.cols, 5);
        assert_int_equal(got.data_bytes, cases[i].bytes);
        assert_int_equal(got.scale_rows, 0);
        assert_int_equal(got.scale_stride, 0);
        assert_int_equal(got.scale_bytes, 0);
    }
}

static void expect_col_is_row_of_the_transpose(tn_format format) {
    for (int64_t m = 1; m < 700; m += 63) {
        for (int64_t k = 1; k < 700; k += 61) {
            tn_plane_layout col, row;
            EXPECT_OK(tn__format_layout(format, TN_E5M2, m, k, TN_PLANE_COL, &col));
            EXPECT_OK(tn__format_layout(format, TN_E5M2, k, m, TN_PLANE_ROW, &row));
            assert_memory_equal(&col, &row, sizeof col);
        }
    }
}

static void col_layouts_are_row_layouts_of_the_transpose_where_planes_derive(void **state) {
    (void)state;
    expect_col_is_row_of_the_transpose(TN_FORMAT_FP8_BLOCK_2D);
    expect_col_is_row_of_the_transpose(TN_FORMAT_FP8_TENSOR);
}

static void a_plane_that_the_format_lacks_is_refused(void **state) {
    (void)state;
    tn_plane_layout layout;
    EXPECT_STATUS(tn__format_layout(TN_FORMAT_PLAIN, TN_FP32, 1, 1, TN_PLANE_COL, &layout),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("format plain has no plane COL");
    EXPECT_STATUS(tn__format_layout(TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 1, 1, TN_PLANE_DATA, &layout),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("format fp8_block_1d has no plane DATA");
    EXPECT_STATUS(tn__format_layout(TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 1, 1, (tn_plane)7, &layout),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("unknown plane (7)");
}

static void bytes_beyond_63_bits_are_refused(void **state) {
    (void)state;
    tn_plane_layout layout;
    int64_t most = TN__ELEMENTS_MAX;
    EXPECT_OK(tn__format_layout(TN_FORMAT_PLAIN, TN_BYTE, most, 1, TN_PLANE_DATA, &layout));
    assert_int_equal(layout.data_bytes, most);
    EXPECT_STATUS(tn__format_layout(TN_FORMAT_PLAIN, TN_FP32, most, 1, TN_PLANE_DATA, &layout),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("does not fit 63 bits");
    /* One column of 2^62 rows: the scales alone are 2^62 floats. */
    EXPECT_STATUS(
        tn__format_layout(TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, most, 1, TN_PLANE_ROW, &layout),
        TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("does not fit 63 bits");
}

/* Where data fits and its scales do not; and where both do, just. */
static void scales_beyond_63_bits_are_refused(void **state) {
    (void)state;
    tn_plane_layout layout;
    int64_t most = TN__ELEMENTS_MAX;
    static const struct {
        tn_format format;
        tn_dtype dtype;
        tn_plane plane;
        int fits;
    } cases[] = {
        {TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_PLANE_COL, 1}, /* 2^55 rows of 4 floats */
        {TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_PLANE_ROW, 1},
        {TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_PLANE_COL, 1},
        {TN_FORMAT_FP8_TENSOR, TN_E4M3, TN_PLANE_ROW, 1},
        {TN_FORMAT_MXFP8, TN_E4M3, TN_PLANE_ROW, 0}, /* 2^62 rows of 4 */
        {TN_FORMAT_MXFP8, TN_E4M3, TN_PLANE_COL, 0}, /* 2^57 rows of 128 */
        {TN_FORMAT_NVFP4, TN_E2M1, TN_PLANE_ROW, 0}, /* 2^62 rows of 4 */
        {TN_FORMAT_NVFP4, TN_E2M1, TN_PLANE_COL, 0}, /* 128 rows of 2^58 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tn_status status =
            tn__format_layout(cases[i].format, cases[i].dtype, most, 1, cases[i].plane, &layout);
        int fits = cases[i].fits;
        assert_int_equal(status, fits ? TN_OK : TN_INVALID_ARGUMENT);
        if (!fits) EXPECT_ERROR_HAS("does not fit 63 bits");
    }
}

static void expect_both_ways(tn_format format) {
    tn_plane source = TN_PLANE_DATA;
    const char *why = NULL;
    assert_int_equal(tn__format_source(format, TN_PLANE_COL, &source, &why), 1);
    assert_int_equal(source, TN_PLANE_ROW);
    assert_int_equal(tn__format_source(format, TN_PLANE_ROW, &source, &why), 1);
    assert_int_equal(source, TN_PLANE_COL);
}

static void expect_not_derived(tn_format format, tn_plane plane, const char *reason) {
    tn_plane source = TN_PLANE_DATA;
    const char *why = NULL;
    assert_int_equal(tn__format_source(format, plane, &source, &why), 0);
    assert_non_null(strstr(why, reason));
    EXPECT_STATUS(tn_format_set_derive(format, fixture_derive), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS(tn_format_name(format));
    EXPECT_ERROR_HAS(reason);
}

static void planes_derive_where_each_is_the_others_transpose(void **state) {
    (void)state;
    expect_both_ways(TN_FORMAT_FP8_BLOCK_2D);
    expect_both_ways(TN_FORMAT_FP8_TENSOR);
    expect_not_derived(TN_FORMAT_PLAIN, TN_PLANE_DATA, "no other plane");
    expect_not_derived(TN_FORMAT_FP8_BLOCK_1D, TN_PLANE_COL, "scales of its own");
    expect_not_derived(TN_FORMAT_MXFP8, TN_PLANE_COL, "scales of its own");
    expect_not_derived(TN_FORMAT_NVFP4, TN_PLANE_ROW, "scales of its own");
    EXPECT_STATUS(tn_format_set_derive((tn_format)9, fixture_derive), TN_INVALID_ARGUMENT);
}

static void dtypes_and_names(void **state) {
    (void)state;
    static const unsigned taken[TN_FORMAT_COUNT] = {
        [TN_FORMAT_PLAIN] = 1u << TN_FP32 | 1u << TN_BF16 | 1u << TN_FP16 | 1u << TN_BYTE,
        [TN_FORMAT_FP8_BLOCK_1D] = 1u << TN_E4M3 | 1u << TN_E5M2,
        [TN_FORMAT_FP8_BLOCK_2D] = 1u << TN_E4M3 | 1u << TN_E5M2,
        [TN_FORMAT_FP8_TENSOR] = 1u << TN_E4M3 | 1u << TN_E5M2,
        [TN_FORMAT_MXFP8] = 1u << TN_E4M3 | 1u << TN_E5M2,
        [TN_FORMAT_NVFP4] = 1u << TN_E2M1,
    };
    for (int format = 0; format < TN_FORMAT_COUNT; format++) {
        for (int dtype = 0; dtype < TN_DTYPE_COUNT; dtype++) {
            assert_int_equal(tn__format_takes_dtype((tn_format)format, (tn_dtype)dtype),
                             taken[format] >> dtype & 1);
        }
    }
    assert_int_equal(tn_dtype_bytes(TN_FP32), 4);
    assert_int_equal(tn_dtype_bytes(TN_E5M2), 1);
    assert_int_equal(tn_dtype_bytes((tn_dtype)99), 0);
    assert_int_equal(tn_dtype_bits((tn_dtype)99), 0);
    assert_int_equal(tn_dtype_bits(TN_BF16), 16);
    assert_int_equal(tn_dtype_bits(TN_E2M1), 4);
    assert_int_equal(tn_dtype_bytes(TN_E2M1), 0);
    assert_int_equal(tn_dtype_bytes(TN_E8M0), 1);
    assert_string_equal(tn_dtype_name(TN_BF16), "bf16");
    assert_string_equal(tn_dtype_name((tn_dtype)-1), "unknown dtype");
    assert_string_equal(tn_format_name(TN_FORMAT_FP8_BLOCK_2D), "fp8_block_2d");
    assert_string_equal(tn_format_name(TN_FORMAT_FP8_TENSOR), "fp8_tensor");
    assert_string_equal(tn_format_name(TN_FORMAT_MXFP8), "mxfp8");
    assert_string_equal(tn_format_name(TN_FORMAT_NVFP4), "nvfp4");
    assert_string_equal(tn_format_name((tn_format)6), "unknown format");
    assert_string_equal(tn_plane_name(TN_PLANE_COL), "COL");
    assert_string_equal(tn_plane_name((tn_plane)3), "unknown plane");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts_of_1d_scaling),
        cmocka_unit_test(layouts_of_2d_scaling),
        cmocka_unit_test(layouts_of_one_scale_for_a_tensor),
        cmocka_unit_test(layouts_of_mxfp8),
        cmocka_unit_test(layouts_of_nvfp4),
        cmocka_unit_test(bytes_of_all_formats_at_all_tails),
        cmocka_unit_test(plain_layouts_have_no_scales),
        cmocka_unit_test(col_layouts_are_row_layouts_of_the_transpose_where_planes_derive),
        cmocka_unit_test(a_plane_that_the_format_lacks_is_refused),
        cmocka_unit_test(bytes_beyond_63_bits_are_refused),
        cmocka_unit_test(scales_beyond_63_bits_are_refused),
        cmocka_unit_test(planes_derive_where_each_is_the_others_transpose),
        cmocka_unit_test(dtypes_and_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
