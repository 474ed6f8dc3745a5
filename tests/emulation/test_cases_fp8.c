/* Faults that users of FP8 block scaling met, as the reports had them: all are listed in
 * docs/cases.md. Each runs on the host and on the emulated device, against values worked out here.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_support.h"

#include "tenure_pool.h"

enum { BLOCK = 128, SIDES = 2, REPEATS = 1000 };

static gpu_side sides[SIDES]; /* the host's, the emulated device's */

/* ---- help ----------------------------------------------------------------------------------- */

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static tn_tensor source(gpu_side *side, tn_dtype dtype, int64_t rows, int64_t cols,
                        float (*value)(int64_t row, int64_t col)) {
    tn_tensor tensor = gpu_plain(side, dtype, rows, cols);
    void *data = malloc((size_t)(rows * cols) * tn_dtype_bytes(dtype));
    for (int64_t i = 0; i < rows * cols; i++)
        gpu_put(dtype, data, (size_t)i, value(i / cols, i % cols));
    gpu_upload(side, tensor, data);
    free(data);
    return tensor;
}

/* src, quantized to new planes of power-of-two scales. */
static tn_tensor quantized(gpu_side *side, tn_tensor src, tn_format format, tn_dtype dtype,
                           int64_t rows, int64_t cols, unsigned planes) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = src;
    args.dst = gpu_fp8(side, format, dtype, TN_SCALE_POW2, rows, cols);
    args.planes = planes;
    if (planes & TN_QUANTIZE_ROW) gpu_poison(side, args.dst, TN_PLANE_ROW);
    EXPECT_OK(tn_quantize(&args, side->stream));
    return args.dst;
}

static gpu_copy dequantized(gpu_side *side, tn_tensor tensor, tn_plane plane, int64_t rows,
                            int64_t cols) {
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    args.src = tensor;
    args.plane = plane;
    args.dst = gpu_plain(side, TN_FP32, rows, cols);
    EXPECT_OK(tn_dequantize(&args, side->stream));
    gpu_copy copy = gpu_download(side, args.dst, TN_PLANE_DATA);
    gpu_destroy(side, args.dst);
    return copy;
}

/* The scale of the block of 1 x 128 that starts at (row, block * 128), from a ROW plane. */
static float row_scale(const gpu_copy *plane, int64_t row, int64_t block) {
    return plane->scale[block * plane->layout.scale_stride + row];
}

static unsigned e8m0_of(float scale) { return bits_of(scale) >> 23 & 0xFF; }

static uint64_t launches(const gpu_side *side) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(side->device, &stats));
    return stats.calls[TN_CALL_LAUNCH];
}

/* ---- TransformerEngine#2589: a tiny amax, whose inverse scale has exponent 0 ---------------- */

static float tiny_middle_block(int64_t row, int64_t col) {
    (void)row;
    return col / BLOCK == 1 ? 1e-38f : 1.0f;
}

/* 1e-38 in bf16 is 109 * 2^-133; times 2^127 it is 1.703125 -> 1.75 = 0x3E. The neighbours: 448
 * over 1, down to a power of two, is 256, so 0x78 and 2^-8, whose exponent field is 119. */
static void a_tiny_block_has_e8m0_byte_0_and_its_neighbours_their_own(void **state) {
    (void)state;
    for (int s = 0; s < SIDES; s++) {
        gpu_side *side = &sides[s];
        tn_tensor src = source(side, TN_BF16, 2, 3 * BLOCK, tiny_middle_block);
        tn_tensor dst =
            quantized(side, src, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 2, 3 * BLOCK, TN_QUANTIZE_ROW);
        gpu_copy copy = gpu_download(side, dst, TN_PLANE_ROW);
        for (int64_t row = 0; row < 2; row++) {
            assert_int_equal(bits_of(row_scale(&copy, row, 1)), 0x00400000);
            assert_int_equal(e8m0_of(row_scale(&copy, row, 0)), 119);
            assert_int_equal(e8m0_of(row_scale(&copy, row, 1)), 0);
            assert_int_equal(e8m0_of(row_scale(&copy, row, 2)), 119);
            for (int64_t col = 0; col < 3 * BLOCK; col++)
                assert_int_equal(copy.data[row * 3 * BLOCK + col], col / BLOCK == 1 ? 0x3E : 0x78);
        }
        gpu_copy_end(&copy);
        gpu_destroy(side, src);
        gpu_destroy(side, dst);
    }
}

/* ---- pytorch/ao#4713: a block of zeros divides 0 by 0 --------------------------------------- */

static float zero(int64_t row, int64_t col) { return (row + col) % 2 ? -0.0f : 0.0f; }

static void a_zero_block_has_scale_1_and_comes_back_as_zeros(void **state) {
    static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};
    (void)state;
    for (int way = 0; way < SIDES * 4; way++) {
        gpu_side *side = &sides[way % 2];
        tn_dtype dtype = way / 2 % 2 ? TN_E5M2 : TN_E4M3;
        tn_tensor src = source(side, TN_FP16, 1, BLOCK, zero);
        tn_tensor dst = quantized(side, src, formats[way / 4], dtype, 1, BLOCK, TN_QUANTIZE_ROW);
        gpu_copy copy = gpu_download(side, dst, TN_PLANE_ROW);
        gpu_copy back = dequantized(side, dst, TN_PLANE_ROW, 1, BLOCK);
        assert_int_equal(bits_of(copy.scale[0]), 0x3F800000);
        for (int64_t i = 0; i < BLOCK; i++) {
            assert_int_equal(copy.data[i], i % 2 ? 0x80 : 0x00);
            assert_int_equal(bits_of(((float *)(void *)back.data)[i]), i % 2 ? 0x80000000 : 0);
        }
        gpu_copy_end(&back);
        gpu_copy_end(&copy);
        gpu_destroy(side, src);
        gpu_destroy(side, dst);
    }
}

/* ---- ROCm TransformerEngine#737: a denormal amax gives an infinite scale -------------------- */

static float denormal(int64_t row, int64_t col) {
    (void)row;
    return col % 2 ? -1e-40f : 1e-40f;
}

/* 448 / 1e-40 is beyond fp32: FLT_MAX instead, down to 2^127. 1e-40 is 71362 * 2^-149; times 2^127
 * that is 1.089 * 2^-6 -> 1.125 * 2^-6 = 0x09, and back 1.125 * 2^-6 * 2^-127 = 9 * 2^-136. */
static void a_denormal_amax_has_a_finite_scale(void **state) {
    (void)state;
    for (int s = 0; s < SIDES; s++) {
        gpu_side *side = &sides[s];
        tn_tensor src = source(side, TN_FP32, 1, 64, denormal);
        tn_tensor dst =
            quantized(side, src, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 1, 64, TN_QUANTIZE_ROW);
        gpu_copy copy = gpu_download(side, dst, TN_PLANE_ROW);
        gpu_copy back = dequantized(side, dst, TN_PLANE_ROW, 1, 64);
        assert_int_equal(bits_of(copy.scale[0]), 0x00400000);
        for (int64_t i = 0; i < 64; i++) {
            assert_int_equal(copy.data[i], i % 2 ? 0x89 : 0x09);
            assert_true(((float *)(void *)back.data)[i] == (i % 2 ? -0x9p-136f : 0x9p-136f));
        }
        gpu_copy_end(&back);
        gpu_copy_end(&copy);
        gpu_destroy(side, src);
        gpu_destroy(side, dst);
    }
}

/* ---- flashinfer#2787, #2261, vLLM#47103, oneDNN: a last block that is not whole ------------- */

/* Each block of 128 x 128 has its own power of two; all its elements are that. */
static float power_of_tile(int64_t row, int64_t col) {
    return ldexpf(1.0f, (int)(row / BLOCK * 5 + col / BLOCK) - 8);
}

static void check_last_block(gpu_side *side, int64_t rows, int64_t cols) {
    tn_tensor src = source(side, TN_BF16, rows, cols, power_of_tile);
    tn_tensor dst = quantized(side, src, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, rows, cols,
                              TN_QUANTIZE_ROW | TN_QUANTIZE_COL);
    gpu_copy row = gpu_download(side, dst, TN_PLANE_ROW);
    gpu_copy col = gpu_download(side, dst, TN_PLANE_COL);
    int64_t tiles_down = (rows + BLOCK - 1) / BLOCK, tiles_across = (cols + BLOCK - 1) / BLOCK;
    assert_int_equal(row.layout.scale_rows, tiles_down);
    assert_int_equal(row.layout.scale_cols, tiles_across);
    for (int64_t r = 0; r < tiles_down; r++) {
        for (int64_t c = 0; c < tiles_across; c++) {
            float expected = power_of_tile(r * BLOCK, c * BLOCK) / 256.0f; /* 448 -> 256 */
            assert_true(row.scale[r * row.layout.scale_stride + c] == expected);
            assert_true(col.scale[c * col.layout.scale_stride + r] == expected);
        }
    }
    for (int64_t i = 0; i < rows * cols; i++)
        assert_int_equal(row.data[i], 0x78); /* 256 */
    gpu_copy_end(&row);
    gpu_copy_end(&col);
    gpu_destroy(side, src);
    gpu_destroy(side, dst);
}

static void a_last_block_that_is_not_whole_has_its_own_scale(void **state) {
    static const int64_t widths[] = {576, 448, 192};
    (void)state;
    for (int i = 0; i < 3 * SIDES; i++) {
        check_last_block(&sides[i % 2], widths[i / 2], 300);
        check_last_block(&sides[i % 2], 130, widths[i / 2]);
    }
}

/* ---- pytorch/ao#4652: the transposed store of 128x1 blocks is miscompiled ------------------- */

/* Column c is 2^(c % 7) but for -1.5 in its last row: the codes tell every element's place. */
static float marked(int64_t row, int64_t col) {
    if (row == col % 100) return -1.5f;
    return ldexpf(1.0f, -(int)((row * 3 + col) % 7));
}

/* The amax of every column of 100 is 1.5: scale 256; the codes are those of the row plane of the
 * matrix that was transposed before. */
static float marked_transposed(int64_t row, int64_t col) { return marked(col, row); }

static void blocks_along_columns_are_stored_transposed(void **state) {
    enum { ROWS = 100, COLS = 77 };
    (void)state;
    for (int s = 0; s < SIDES; s++) {
        gpu_side *side = &sides[s];
        tn_tensor src = source(side, TN_BF16, ROWS, COLS, marked);
        tn_tensor turned = source(side, TN_BF16, COLS, ROWS, marked_transposed);
        tn_tensor dst =
            quantized(side, src, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, COLS, TN_QUANTIZE_COL);
        tn_tensor expected =
            quantized(side, turned, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, COLS, ROWS, TN_QUANTIZE_ROW);
        gpu_copy actual = gpu_download(side, dst, TN_PLANE_COL);
        gpu_copy wanted = gpu_download(side, expected, TN_PLANE_ROW);
        assert_true(gpu_copies_equal(&actual, &wanted, "128x1 against 1x128 of the transpose"));
        for (int64_t col = 0; col < COLS; col++) {
            assert_true(actual.scale[col] == 0x1p-8f);
            assert_int_equal(actual.data[col * ROWS + col % ROWS], 0xFC); /* -384 */
        }
        gpu_copy_end(&actual);
        gpu_copy_end(&wanted);
        gpu_destroy(side, src);
        gpu_destroy(side, turned);
        gpu_destroy(side, dst);
        gpu_destroy(side, expected);
    }
}

/* ---- vLLM#53338: the stride of the scales is taken for their number ------------------------- */

static float power_of_row(int64_t row, int64_t col) {
    return ldexpf(1.0f + (float)(col / BLOCK), (int)(row % 11) - 5);
}

/* 130 rows of scales lie 132 apart; what is between is NaN here, as a user's memory may have it. */
static void the_stride_of_scales_is_not_their_number(void **state) {
    enum { ROWS = 130, COLS = 3 * BLOCK };
    (void)state;
    for (int s = 0; s < SIDES; s++) {
        gpu_side *side = &sides[s];
        tn_tensor src = source(side, TN_FP32, ROWS, COLS, power_of_row);
        tn_tensor dst =
            quantized(side, src, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, COLS, TN_QUANTIZE_ROW);
        gpu_copy copy = gpu_download(side, dst, TN_PLANE_ROW);
        assert_int_equal(copy.layout.scale_stride, ROWS + 2);
        for (int64_t block = 0; block < 3; block++)
            copy.scale[block * (ROWS + 2) + ROWS] = copy.scale[block * (ROWS + 2) + ROWS + 1] = NAN;
        EXPECT_OK(tn_plane_write(dst, TN_PLANE_ROW, copy.data, copy.layout.data_bytes, copy.scale,
                                 copy.layout.scale_bytes, side->stream));
        gpu_copy back = dequantized(side, dst, TN_PLANE_ROW, ROWS, COLS);
        for (int64_t i = 0; i < (int64_t)ROWS * COLS; i++)
            assert_true(((float *)(void *)back.data)[i] == power_of_row(i / COLS, i % COLS));
        gpu_copy_end(&back);
        gpu_copy_end(&copy);
        gpu_destroy(side, src);
        gpu_destroy(side, dst);
    }
}

/* ---- TransformerEngine#2892, verl#5440: 5743 packed tokens ---------------------------------- */

static void an_odd_number_of_tokens_is_like_any_other(void **state) {
    enum { TOKENS = 5743, COLS = 144 };
    (void)state;
    for (int s = 0; s < SIDES; s++) {
        gpu_side *side = &sides[s];
        tn_tensor src = source(side, TN_BF16, TOKENS, COLS, power_of_row);
        tn_tensor dst = quantized(side, src, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TOKENS, COLS,
                                  TN_QUANTIZE_ROW | TN_QUANTIZE_COL);
        for (int plane = 0; plane < 2; plane++) {
            gpu_copy back =
                dequantized(side, dst, plane ? TN_PLANE_COL : TN_PLANE_ROW, TOKENS, COLS);
            for (int64_t i = 0; i < (int64_t)TOKENS * COLS; i++)
                assert_true(((float *)(void *)back.data)[i] == power_of_row(i / COLS, i % COLS));
            gpu_copy_end(&back);
        }
        gpu_destroy(side, src);
        gpu_destroy(side, dst);
    }
}

/* ---- TransformerEngine#2848, #1969, and its C interface: tensors without elements ----------- */

static void check_empty(gpu_side *side, tn_format format, int64_t rows, int64_t cols) {
    tn_transpose_args transpose = TN_TRANSPOSE_ARGS_INIT;
    tn_tensor src = gpu_plain(side, TN_BF16, rows, cols);
    gpu_upload(side, src, "");
    uint64_t before = launches(side);
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = src;
    args.dst = gpu_fp8(side, format, TN_E4M3, TN_SCALE_POW2, rows, cols);
    args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    EXPECT_OK(tn_quantize(&args, side->stream));
    gpu_copy back = dequantized(side, args.dst, TN_PLANE_COL, rows, cols);
    transpose.tensor = args.dst;
    if (format == TN_FORMAT_FP8_BLOCK_2D) EXPECT_OK(tn_transpose(&transpose, side->stream));
    assert_int_equal(launches(side), before);
    gpu_copy_end(&back);
    gpu_destroy(side, src);
    gpu_destroy(side, args.dst);
}

static void tensors_without_elements_are_done_without_a_launch(void **state) {
    (void)state;
    for (int way = 0; way < SIDES * 2; way++) {
        tn_format format = way / 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
        check_empty(&sides[way % 2], format, 0, 7168);
        check_empty(&sides[way % 2], format, 4096, 0);
        check_empty(&sides[way % 2], format, 0, 0);
    }
}

/* ---- TransformerEngine#2607: the columnwise shape of a tensor of rank 3 --------------------- */

/* (2, 64, 256): the columnwise plane is 256 x (2, 64). */
static void a_tensor_of_rank_3_is_flattened_before_it_is_turned(void **state) {
    (void)state;
    for (int s = 0; s < SIDES; s++) {
        gpu_side *side = &sides[s];
        tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
        tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
        config.format = TN_FORMAT_FP8_BLOCK_1D;
        config.dtype = TN_E4M3;
        config.rank = 3;
        config.shape[0] = 2, config.shape[1] = 64, config.shape[2] = 256;
        EXPECT_OK(tn_tensor_create(side->scope, &config, &args.dst));
        args.src = source(side, TN_BF16, 128, 256, marked);
        args.planes = TN_QUANTIZE_COL;
        EXPECT_OK(tn_quantize(&args, side->stream));
        gpu_copy copy = gpu_download(side, args.dst, TN_PLANE_COL);
        assert_int_equal(copy.layout.rows, 256);
        assert_int_equal(copy.layout.cols, 2 * 64);
        assert_int_equal(copy.layout.scale_rows, 1);
        assert_int_equal(copy.layout.scale_cols, 256);
        for (int64_t col = 0; col < 256; col++)
            assert_int_equal(copy.data[col * 128 + col % 100], 0xFC);
        gpu_copy_end(&copy);
        gpu_destroy(side, args.src);
        gpu_destroy(side, args.dst);
    }
}

/* ---- TransformerEngine#2681, #2717: planes that are never freed ----------------------------- */

static size_t live_bytes(const gpu_side *side) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_stream_synchronize(side->device, side->stream));
    EXPECT_OK(tn_pool_stats_get(side->pool, &stats));
    return stats.live_bytes;
}

static void planes_made_and_dropped_1000_times_leave_memory_flat(void **state) {
    (void)state;
    for (int s = 0; s < SIDES; s++) {
        gpu_side *side = &sides[s];
        tn_tensor src = source(side, TN_BF16, 64, 48, marked);
        tn_tensor weight =
            quantized(side, src, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 64, 48, TN_QUANTIZE_ROW);
        size_t before = live_bytes(side);
        for (int i = 0; i < REPEATS; i++) {
            tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
            args.src = src;
            args.dst = weight;
            EXPECT_OK(tn_quantize(&args, side->stream));
            EXPECT_OK(tn_plane_require(weight, TN_PLANE_COL, side->stream));
            EXPECT_OK(tn_plane_drop(weight, TN_PLANE_COL, side->stream));
        }
        assert_int_equal(live_bytes(side), before);
        gpu_destroy(side, src);
        gpu_destroy(side, weight);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_tiny_block_has_e8m0_byte_0_and_its_neighbours_their_own),
        cmocka_unit_test(a_zero_block_has_scale_1_and_comes_back_as_zeros),
        cmocka_unit_test(a_denormal_amax_has_a_finite_scale),
        cmocka_unit_test(a_last_block_that_is_not_whole_has_its_own_scale),
        cmocka_unit_test(blocks_along_columns_are_stored_transposed),
        cmocka_unit_test(the_stride_of_scales_is_not_their_number),
        cmocka_unit_test(an_odd_number_of_tokens_is_like_any_other),
        cmocka_unit_test(tensors_without_elements_are_done_without_a_launch),
        cmocka_unit_test(a_tensor_of_rank_3_is_flattened_before_it_is_turned),
        cmocka_unit_test(planes_made_and_dropped_1000_times_leave_memory_flat),
    };
    gpu_open_host(&sides[0], (size_t)1 << 30);
    gpu_open(&sides[1]);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&sides[1]);
    gpu_close(&sides[0]);
    return failures;
}
