/* The format table: layouts worked by hand, what takes which dtype, what derives from what. */
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

static void the_col_layout_of_2d_is_the_row_layout_of_the_transpose(void **state) {
    (void)state;
    for (int64_t m = 1; m < 700; m += 63) {
        for (int64_t k = 1; k < 700; k += 61) {
            tn_plane_layout col, row;
            EXPECT_OK(tn__format_layout(TN_FORMAT_FP8_BLOCK_2D, TN_E5M2, m, k, TN_PLANE_COL, &col));
            EXPECT_OK(tn__format_layout(TN_FORMAT_FP8_BLOCK_2D, TN_E5M2, k, m, TN_PLANE_ROW, &row));
            assert_memory_equal(&col, &row, sizeof col);
        }
    }
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

static void only_2d_planes_derive_from_each_other(void **state) {
    (void)state;
    tn_plane source = TN_PLANE_DATA;
    const char *why = NULL;
    assert_int_equal(tn__format_source(TN_FORMAT_FP8_BLOCK_2D, TN_PLANE_COL, &source, &why), 1);
    assert_int_equal(source, TN_PLANE_ROW);
    assert_int_equal(tn__format_source(TN_FORMAT_FP8_BLOCK_2D, TN_PLANE_ROW, &source, &why), 1);
    assert_int_equal(source, TN_PLANE_COL);
    assert_int_equal(tn__format_source(TN_FORMAT_FP8_BLOCK_1D, TN_PLANE_COL, &source, &why), 0);
    assert_non_null(strstr(why, "scales of its own"));
    assert_int_equal(tn__format_source(TN_FORMAT_PLAIN, TN_PLANE_DATA, &source, &why), 0);
    EXPECT_STATUS(tn_format_set_derive(TN_FORMAT_FP8_BLOCK_1D, fixture_derive),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("fp8_block_1d");
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
        cmocka_unit_test(plain_layouts_have_no_scales),
        cmocka_unit_test(the_col_layout_of_2d_is_the_row_layout_of_the_transpose),
        cmocka_unit_test(a_plane_that_the_format_lacks_is_refused),
        cmocka_unit_test(bytes_beyond_63_bits_are_refused),
        cmocka_unit_test(only_2d_planes_derive_from_each_other),
        cmocka_unit_test(dtypes_and_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
