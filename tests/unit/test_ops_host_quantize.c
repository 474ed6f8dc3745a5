/* Quantization on the host: blocks worked by hand, and whole planes against the reference. */
#include "ops_planes_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host_number.h"

static const tn_dtype sources[] = {TN_FP32, TN_BF16, TN_FP16};
static const tn_dtype targets[] = {TN_E4M3, TN_E5M2};
static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};
static const tn_scale_mode modes[] = {TN_SCALE_POW2, TN_SCALE_FP32};

/* ---- one block by hand ---------------------------------------------------------------------- */

/* Row 0 of a 1 x `count` source of which the first values are given and the rest are 0. */
typedef struct one_block {
    tn__matrix src;
    test_plane plane;
} one_block;

static one_block quantize_block(tn_dtype source, tn_dtype target, tn_scale_mode mode, float epsilon,
                                const float *values, int given, int count) {
    one_block block;
    block.src = (tn__matrix){source, calloc(128, 4), 1, count};
    for (int i = 0; i < given; i++)
        test_matrix_set(&block.src, 0, i, values[i]);
    block.plane = test_plane_make(TN_FORMAT_FP8_BLOCK_1D, TN_PLANE_ROW, target, 1, count);
    test_quantize(&block.src, &block.plane, NULL, mode, epsilon);
    test_plane_expect_zero_padding(&block.plane);
    return block;
}

static void free_block(one_block *block) {
    test_plane_free(&block->plane);
    test_matrix_free(&block->src);
}

static void expect_codes(const one_block *block, const uint8_t *codes, int count) {
    for (int i = 0; i < count; i++) {
        assert_int_equal(test_plane_code(&block->plane, 0, i), codes[i]);
    }
}

static void expect_scale_bits(const one_block *block, uint32_t expected) {
    uint32_t bits;
    memcpy(&bits, block->plane.view.scale, sizeof bits);
    assert_int_equal(bits, expected);
}

/* All zero: scale 1, codes 0, and -0 keeps its sign. */
static void a_block_of_zeros_has_scale_one(void **state) {
    (void)state;
    const float values[] = {0.0f, -0.0f, 0.0f};
    const uint8_t codes[] = {0x00, 0x80, 0x00, 0x00};
    for (int s = 0; s < 3; s++) {
        one_block block = quantize_block(sources[s], TN_E4M3, TN_SCALE_POW2, 0, values, 3, 128);
        expect_scale_bits(&block, 0x3F800000);
        expect_codes(&block, codes, 4);
        free_block(&block);
    }
}

/* amax 3 in E4M3: factor 128; 3*128 = 384 = 1.5*2^8 -> exponent 15, mantissa 4 -> 0x7C;
 * -1*128 = 2^7 -> exponent 14 -> 0xF0; 0.001*128 = 0.128 = 1.024*2^-3 -> 1.0*2^-3 -> 0x20.
 * The NaN does not take part in amax and stays NaN. */
static void nan_is_kept_and_does_not_count(void **state) {
    (void)state;
    const float values[] = {3.0f, NAN, -1.0f, 0.001f};
    const uint8_t codes[] = {0x7C, 0x7F, 0xF0, 0x20, 0x00};
    one_block block = quantize_block(TN_FP32, TN_E4M3, TN_SCALE_POW2, 0, values, 4, 128);
    expect_scale_bits(&block, 0x3C000000); /* 1/128 */
    expect_codes(&block, codes, 5);
    free_block(&block);
}

static void a_block_of_nan_has_scale_one(void **state) {
    (void)state;
    const float values[] = {NAN, -NAN, NAN};
    const uint8_t codes[] = {0x7F, 0x7F, 0x7F};
    for (int t = 0; t < 2; t++) {
        one_block block = quantize_block(TN_BF16, targets[t], TN_SCALE_FP32, 0, values, 3, 3);
        expect_scale_bits(&block, 0x3F800000);
        expect_codes(&block, codes, 3);
        free_block(&block);
    }
}

/* An infinite amax gives factor 1: infinities saturate, the rest is cast as it is.
 * E4M3: 2 -> 0x40, 500 -> 448 = 0x7E. E5M2: 2 -> 0x40, 500 -> 512 = 0x60. */
static void infinity_saturates_and_gives_scale_one(void **state) {
    (void)state;
    const float values[] = {INFINITY, -INFINITY, 2.0f, 500.0f};
    const uint8_t codes[2][4] = {{0x7E, 0xFE, 0x40, 0x7E}, {0x7B, 0xFB, 0x40, 0x60}};
    for (int s = 0; s < 3; s++) {
        for (int t = 0; t < 2; t++) {
            one_block block =
                quantize_block(sources[s], targets[t], TN_SCALE_POW2, 0, values, 4, 128);
            expect_scale_bits(&block, 0x3F800000);
            expect_codes(&block, codes[t], 4);
            free_block(&block);
        }
    }
}

/* amax 1e-40 in fp32: 448/1e-40 is infinite, so FLT_MAX, floored to 2^127. 1e-40 is
 * 71362 * 2^-149; times 2^127 is 0.0170 = 1.089 * 2^-6 -> 1.125 * 2^-6 -> 0x09. */
static void a_denormal_block_has_a_finite_scale(void **state) {
    (void)state;
    const float values[] = {1e-40f, -1e-40f, 0.0f};
    const uint8_t codes[] = {0x09, 0x89, 0x00};
    one_block block = quantize_block(TN_FP32, TN_E4M3, TN_SCALE_POW2, 0, values, 3, 128);
    expect_scale_bits(&block, 0x00400000); /* 2^-127, kept denormal */
    expect_codes(&block, codes, 3);
    free_block(&block);
}

/* bf16 blocks all 1e-38 (0x006D, 109 * 2^-133): times 2^127 is 109/64 = 1.703125 -> 1.75 = 0x3E,
 * and the neighbours' scales are their own. */
static void a_tiny_bf16_block_leaves_its_neighbours_alone(void **state) {
    (void)state;
    tn__matrix src = test_matrix_make(TN_BF16, 1, 384, 3);
    test_plane plane = test_plane_make(TN_FORMAT_FP8_BLOCK_1D, TN_PLANE_ROW, TN_E4M3, 1, 384);
    for (int k = 128; k < 256; k++)
        ((uint16_t *)src.data)[k] = 0x006D;
    test_quantize(&src, &plane, NULL, TN_SCALE_POW2, 0);
    for (int k = 128; k < 256; k++)
        assert_int_equal(test_plane_code(&plane, 0, k), 0x3E);
    uint32_t bits;
    memcpy(&bits, (const float *)plane.view.scale + 4, sizeof bits);
    assert_int_equal(bits, 0x00400000);
    test_plane_expect_quantized(&plane, &src, TN_SCALE_POW2, 0);
    test_plane_free(&plane);
    test_matrix_free(&src);
}

/* The largest of each source type: 448 / max, as a power of two.
 * fp32: FLT_MAX just below 2^128: 448/FLT_MAX = 1.75 * 2^-120 (rounded up a little) -> 2^-120;
 * times it 2^8 - -> 256 = 0x78. bf16: 1.9921875 * 2^127 -> 1.757 * 2^-120 -> 255 -> 256 = 0x78.
 * fp16: 65504 -> 448/65504 = 1.7509 * 2^-8 -> 2^-8; 255.875 -> 256 = 0x78. */
static void a_block_of_the_largest_numbers(void **state) {
    (void)state;
    static const float largest[] = {0x1.FFFFFEp127f, 0x1.FEp127f, 65504.0f};
    static const uint32_t inverse[] = {0x7B800000, 0x7B800000, 0x43800000};
    const uint8_t codes[] = {0x78, 0xF8};
    for (int s = 0; s < 3; s++) {
        const float values[] = {largest[s], -largest[s]};
        one_block block = quantize_block(sources[s], TN_E4M3, TN_SCALE_POW2, 0, values, 2, 2);
        expect_scale_bits(&block, inverse[s]);
        expect_codes(&block, codes, 2);
        free_block(&block);
    }
}

/* fp32 scales map amax to the format's largest: amax 3, factor 0x43155555 = 149.33333;
 * 3 * factor = 448 - a little -> 0x7E; 1 * factor = 149.33 -> 144 (1.125 * 2^7) = 0x71. */
static void fp32_scales_use_the_whole_range(void **state) {
    (void)state;
    const float values[] = {3.0f, 1.0f};
    const uint8_t codes[] = {0x7E, 0x71};
    one_block block = quantize_block(TN_BF16, TN_E4M3, TN_SCALE_FP32, 0, values, 2, 128);
    expect_scale_bits(&block, 0x3BDB6DB7);
    expect_codes(&block, codes, 2);
    free_block(&block);
}

/* Epsilon 1 over amax 0.25: factor 256; 0.25 * 256 = 64 -> 0x68. */
static void epsilon_is_a_floor_under_amax(void **state) {
    (void)state;
    const float values[] = {0.25f};
    const uint8_t codes[] = {0x68, 0x00};
    one_block block = quantize_block(TN_FP32, TN_E4M3, TN_SCALE_POW2, 1.0f, values, 1, 128);
    expect_scale_bits(&block, 0x3B800000);
    expect_codes(&block, codes, 2);
    free_block(&block);
}

/* ---- whole planes against the reference ----------------------------------------------------- */

typedef struct casting {
    tn_dtype source, target;
    tn_format format;
    tn_scale_mode mode;
    float epsilon;
} casting;

static void expect_transposed(const test_plane *row, const test_plane *col) {
    for (int64_t m = 0; m < row->m; m++) {
        for (int64_t k = 0; k < row->k; k++) {
            assert_int_equal(test_plane_code(row, m, k), test_plane_code(col, m, k));
            assert_true(test_plane_scale(row, m, k) == test_plane_scale(col, m, k));
        }
    }
}

/* Both planes in one pass equal the reference, and equal each made alone. */
static void check_casting(casting how, int64_t m, int64_t k, int is_thorough) {
    tn__matrix src = test_matrix_make(how.source, m, k, (uint32_t)(m * 31 + k));
    test_plane row = test_plane_make(how.format, TN_PLANE_ROW, how.target, m, k);
    test_plane col = test_plane_make(how.format, TN_PLANE_COL, how.target, m, k);
    test_quantize(&src, &row, &col, how.mode, how.epsilon);
    test_plane_expect_quantized(&row, &src, how.mode, how.epsilon);
    test_plane_expect_quantized(&col, &src, how.mode, how.epsilon);
    if (is_thorough) {
        test_plane alone[2] = {test_plane_make(how.format, TN_PLANE_ROW, how.target, m, k),
                               test_plane_make(how.format, TN_PLANE_COL, how.target, m, k)};
        test_quantize(&src, &alone[0], NULL, how.mode, how.epsilon);
        test_quantize(&src, NULL, &alone[1], how.mode, how.epsilon);
        for (int p = 0; p < 2; p++) {
            const tn_plane_view *both = p ? &col.view : &row.view, *one = &alone[p].view;
            assert_memory_equal(both->data, one->data, one->layout.data_bytes);
            assert_memory_equal(both->scale, one->scale, one->layout.scale_bytes);
            test_plane_free(&alone[p]);
        }
        if (how.format == TN_FORMAT_FP8_BLOCK_2D) expect_transposed(&row, &col);
    }
    test_plane_free(&row);
    test_plane_free(&col);
    test_matrix_free(&src);
}

static casting casting_of(unsigned index) {
    casting how = {sources[index % 3], targets[index / 3 % 2], formats[index / 6 % 2],
                   modes[index / 12 % 2], index / 24 % 2 ? 1.0f : 0.0f};
    return how;
}

enum { CASTINGS = 48 };

static void every_casting_of_small_and_ragged_shapes_is_exact(void **state) {
    (void)state;
    static const int64_t shapes[][2] = {{1, 1},     {1, 16},    {127, 3},  {128, 128},
                                        {129, 130}, {130, 257}, {65, 96},  {3, 127},
                                        {16, 512},  {255, 1},   {1, 1024}, {256, 256}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (unsigned i = 0; i < CASTINGS; i++) {
            check_casting(casting_of(i), shapes[s][0], shapes[s][1], 1);
        }
    }
}

/* The other shapes of TransformerEngine's list (leading dimensions flattened), each in the
 * castings that its number picks: together they meet all. */
static void transformer_engines_shapes_are_exact(void **state) {
    (void)state;
    static const int64_t shapes[][2] = {{993, 512}, {1024, 1}, {256, 1024}, {512, 512}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (unsigned i = (unsigned)s; i < CASTINGS; i += 4) {
            check_casting(casting_of(i), shapes[s][0], shapes[s][1], 0);
        }
    }
    check_casting(casting_of(1), 4096, 1632, 0);
    check_casting(casting_of(7), 256, 65536, 0);
}

static void an_empty_source_writes_nothing(void **state) {
    (void)state;
    for (int f = 0; f < 2; f++) {
        for (int is_row = 0; is_row < 2; is_row++) {
            int64_t m = is_row ? 0 : 5, k = is_row ? 5 : 0;
            tn__matrix src = {TN_FP32, NULL, m, k};
            test_plane row = test_plane_make(formats[f], TN_PLANE_ROW, TN_E4M3, m, k);
            test_plane col = test_plane_make(formats[f], TN_PLANE_COL, TN_E4M3, m, k);
            test_quantize(&src, &row, &col, TN_SCALE_POW2, 0);
            test_plane_free(&row);
            test_plane_free(&col);
        }
    }
}

/* ---- back, and across ----------------------------------------------------------------------- */

/* q * scale is exact in double; fp32 rounds it once, bf16 and fp16 again. */
static float rounded_to(tn_dtype dtype, double value) {
    uint32_t memory = 0;
    tn__matrix one = {dtype, &memory, 1, 1};
    float narrow = (float)value;
    tn__store_floats(dtype, &memory, 0, 1, &narrow);
    return test_matrix_get(&one, 0, 0);
}

static void check_dequantize(tn_format format, tn_plane plane, tn_dtype to, int64_t m, int64_t k) {
    tn__matrix src = test_matrix_make(TN_FP32, m, k, 9);
    tn__matrix dst = test_matrix_make(to, m, k, 1);
    test_plane quantized = test_plane_make(format, plane, TN_E4M3, m, k);
    int is_row = plane == TN_PLANE_ROW;
    test_quantize(&src, is_row ? &quantized : NULL, is_row ? NULL : &quantized, TN_SCALE_FP32, 0);
    test_plane_poison_padding(&quantized);
    tn__dequantize_work work = {.format = format, .src = quantized.view, .dst = dst};
    tn__host_dequantize(&work);
    for (int64_t r = 0; r < m; r++) {
        for (int64_t c = 0; c < k; c++) {
            float expected = rounded_to(to, test_plane_value(&quantized, r, c));
            assert_true(test_matrix_get(&dst, r, c) == expected);
        }
    }
    test_plane_free(&quantized);
    test_matrix_free(&src);
    test_matrix_free(&dst);
}

static void dequantizing_gives_code_times_scale_and_reads_no_padding(void **state) {
    (void)state;
    static const int64_t shapes[][2] = {{1, 1}, {129, 130}, {3, 257}, {130, 5}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (int i = 0; i < 12; i++) {
            check_dequantize(formats[i % 2], i / 2 % 2 ? TN_PLANE_COL : TN_PLANE_ROW,
                             sources[i / 4], shapes[s][0], shapes[s][1]);
        }
    }
}

static void dequantizing_keeps_nan_and_the_sign_of_zero(void **state) {
    (void)state;
    const float values[] = {NAN, -0.0f, 1.0f};
    const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    one_block block = quantize_block(TN_FP32, TN_E5M2, TN_SCALE_POW2, 0, values, 3, 3);
    for (int t = 0; t < 3; t++) {
        tn__matrix dst = test_matrix_make(types[t], 1, 3, 1);
        tn__dequantize_work work = {TN_FORMAT_FP8_BLOCK_1D, block.plane.view, dst, NULL};
        tn__host_dequantize(&work);
        assert_true(isnan(test_matrix_get(&dst, 0, 0)));
        assert_true(test_matrix_get(&dst, 0, 1) == 0.0f && signbit(test_matrix_get(&dst, 0, 1)));
        assert_true(test_matrix_get(&dst, 0, 2) == 1.0f);
        test_matrix_free(&dst);
    }
    free_block(&block);
}

/* Either plane of a 2D tensor made from the other is, byte for byte, what quantizing gives, the
 * zeros of the scale padding included, though the other's padding is NaN. */
static void the_planes_of_a_2d_tensor_are_each_others_transpose(void **state) {
    (void)state;
    static const int64_t shapes[][2] = {{1, 1},     {128, 128}, {129, 130},
                                        {300, 640}, {1, 700},   {513, 2}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        int64_t m = shapes[s][0], k = shapes[s][1];
        tn__matrix src = test_matrix_make(TN_BF16, m, k, 5);
        test_plane quantized[2], made[2];
        for (int p = 0; p < 2; p++) {
            tn_plane plane = p ? TN_PLANE_COL : TN_PLANE_ROW;
            quantized[p] = test_plane_make(TN_FORMAT_FP8_BLOCK_2D, plane, TN_E4M3, m, k);
            made[p] = test_plane_make(TN_FORMAT_FP8_BLOCK_2D, plane, TN_E4M3, m, k);
        }
        test_quantize(&src, &quantized[0], &quantized[1], TN_SCALE_POW2, 0);
        for (int p = 0; p < 2; p++) {
            test_plane from = quantized[1 - p];
            size_t bytes = from.view.layout.scale_bytes;
            from.view.scale = malloc(bytes);
            memcpy(from.view.scale, quantized[1 - p].view.scale, bytes);
            test_plane_poison_padding(&from);
            tn__transpose_work work = {from.view, made[p].view, 0};
            tn__host_transpose(&work);
            const tn_plane_layout *layout = &made[p].view.layout;
            assert_memory_equal(made[p].view.data, quantized[p].view.data, layout->data_bytes);
            assert_memory_equal(made[p].view.scale, quantized[p].view.scale, layout->scale_bytes);
            free(from.view.scale);
        }
        for (int p = 0; p < 2; p++)
            test_plane_free(&made[p]), test_plane_free(&quantized[p]);
        test_matrix_free(&src);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_of_zeros_has_scale_one),
        cmocka_unit_test(nan_is_kept_and_does_not_count),
        cmocka_unit_test(a_block_of_nan_has_scale_one),
        cmocka_unit_test(infinity_saturates_and_gives_scale_one),
        cmocka_unit_test(a_denormal_block_has_a_finite_scale),
        cmocka_unit_test(a_tiny_bf16_block_leaves_its_neighbours_alone),
        cmocka_unit_test(a_block_of_the_largest_numbers),
        cmocka_unit_test(fp32_scales_use_the_whole_range),
        cmocka_unit_test(epsilon_is_a_floor_under_amax),
        cmocka_unit_test(every_casting_of_small_and_ragged_shapes_is_exact),
        cmocka_unit_test(transformer_engines_shapes_are_exact),
        cmocka_unit_test(an_empty_source_writes_nothing),
        cmocka_unit_test(dequantizing_gives_code_times_scale_and_reads_no_padding),
        cmocka_unit_test(dequantizing_keeps_nan_and_the_sign_of_zero),
        cmocka_unit_test(the_planes_of_a_2d_tensor_are_each_others_transpose),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
