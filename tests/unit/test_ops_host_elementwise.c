/* axpy, convert, embed and cross entropy on the host: by hand, and against double. */
#include "ops_planes_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host_number.h"

static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};

static float rounded(tn_dtype dtype, float value) {
    uint32_t memory = 0;
    tn__store_floats(dtype, &memory, 0, 1, &value);
    tn__load_floats(dtype, &memory, 0, 1, &value);
    return value;
}

static void axpy_rounds_once_in_fp32_and_then_to_its_type(void **state) {
    (void)state;
    for (int i = 0; i < 9; i++) {
        tn__matrix x = test_matrix_make(types[i % 3], 3, 257, 1);
        tn__matrix y = test_matrix_make(types[i / 3], 3, 257, 2);
        tn__matrix old = test_matrix_make(types[i / 3], 3, 257, 2);
        tn__axpy_work work = {x, y, 0.3f};
        tn__host_axpy(&work);
        for (int64_t r = 0; r < 3; r++) {
            for (int64_t c = 0; c < 257; c++) {
                float sum = fmaf(0.3f, test_matrix_get(&x, r, c), test_matrix_get(&old, r, c));
                assert_true(test_matrix_get(&y, r, c) == rounded(y.dtype, sum));
            }
        }
        test_matrix_free(&x), test_matrix_free(&y), test_matrix_free(&old);
    }
}

/* 1 + 2^-12 squared is 1 + 2^-11 + 2^-24: fp32 drops the last term from the product, so that a
 * separate add would give 2^-11; fused, 2^-24 is left over. */
static void axpy_fuses_multiply_and_add(void **state) {
    (void)state;
    float x = 1.0f + 0x1p-12f, y = -1.0f;
    tn__axpy_work work = {{TN_FP32, &x, 1, 1}, {TN_FP32, &y, 1, 1}, 1.0f + 0x1p-12f};
    tn__host_axpy(&work);
    assert_true(y == 0x1p-11f + 0x1p-24f);
}

static void convert_rounds_to_nearest_even(void **state) {
    (void)state;
    /* bf16 has 8 significant bits: 1 + 2^-8 is half way to 1 + 2^-7 and goes to even, 1;
     * 3e38 is 0x7F61B1E6 */
    float from[] = {1.0f, 1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f, -0.0f, INFINITY, 3e38f};
    const uint16_t expected[] = {0x3F80, 0x3F80, 0x3F82, 0x8000, 0x7F80, 0x7F62};
    uint16_t to[6];
    tn__matrix x = {TN_FP32, from, 2, 3}, y = {TN_BF16, to, 3, 2};
    tn__host_convert(&x, &y);
    assert_memory_equal(to, expected, sizeof to);
}

static void embed_copies_rows_bit_for_bit(void **state) {
    (void)state;
    const unsigned char tokens[] = {255, 0, 7, 7, 128};
    for (int i = 0; i < 3; i++) {
        tn__matrix table = test_matrix_make(types[i], 256, 33, 4);
        tn__matrix y = test_matrix_make(types[i], 5, 33, 5);
        tn__embed_work work = {tokens, table, y};
        tn__host_embed(&work);
        for (int t = 0; t < 5; t++) {
            for (int c = 0; c < 33; c++) {
                assert_true(test_matrix_get(&y, t, c) == test_matrix_get(&table, tokens[t], c));
            }
        }
        test_matrix_free(&table), test_matrix_free(&y);
    }
}

/* All logits alike: softmax is 1/256, the loss ln 256 = 5.5451774, the gradient 1/256 / T, less
 * 1 / T at the target. Then one logit ahead by ln 255, which makes its softmax 1/2. */
static void cross_entropy_by_hand(void **state) {
    (void)state;
    float logits[2][256], dlogits[2][256], loss[2];
    const unsigned char targets[] = {3, 200};
    for (int v = 0; v < 256; v++)
        logits[0][v] = 1000.0f, logits[1][v] = -5.0f;
    logits[1][200] += (float)log(255.0);
    tn__cross_entropy_work work = {
        {TN_FP32, logits, 2, 256}, {TN_FP32, dlogits, 2, 256}, targets, loss};
    tn__host_cross_entropy(&work);
    assert_true(loss[0] == (float)log(256.0));
    assert_true(fabs((double)loss[1] - log(2.0)) < 1e-6);
    assert_true(dlogits[0][0] == 0x1p-9f);
    assert_true(dlogits[0][3] == 0x1p-9f - 0.5f);
    assert_true(fabs((double)dlogits[1][200] + 0.25) < 1e-6);
    assert_true(fabs((double)dlogits[1][0] - 0.25 / 255.0) < 1e-8);
}

static void cross_entropy_of_all_types_is_near_double(void **state) {
    (void)state;
    enum { ROWS = 7, VOCABULARY = 300 };
    static const double tolerance[] = {1e-7, 0x1p-8, 0x1p-10};
    unsigned char targets[ROWS] = {0, 255, 17, 17, 99, 254, 1};
    for (int i = 0; i < 9; i++) {
        tn__matrix logits = test_matrix_make(types[i % 3], ROWS, VOCABULARY, 8);
        tn__matrix dlogits = test_matrix_make(types[i / 3], ROWS, VOCABULARY, 9);
        float loss[ROWS];
        tn__cross_entropy_work work = {logits, dlogits, targets, loss};
        tn__host_cross_entropy(&work);
        for (int t = 0; t < ROWS; t++) {
            double sum = 0.0;
            for (int v = 0; v < VOCABULARY; v++)
                sum += exp((double)test_matrix_get(&logits, t, v));
            double expected = log(sum) - (double)test_matrix_get(&logits, t, targets[t]);
            assert_true(fabs((double)loss[t] - expected) <= 1e-6 * (1.0 + fabs(expected)));
            for (int v = 0; v < VOCABULARY; v++) {
                double softmax = exp((double)test_matrix_get(&logits, t, v)) / sum;
                double gradient = (softmax - (v == targets[t])) / ROWS;
                double error = fabs((double)test_matrix_get(&dlogits, t, v) - gradient);
                assert_true(error <= tolerance[i / 3] * fabs(gradient) + 0x1p-24);
            }
        }
        test_matrix_free(&logits), test_matrix_free(&dlogits);
    }
}

static void a_nan_logit_makes_its_row_nan(void **state) {
    (void)state;
    float logits[2][256] = {{0}}, dlogits[2][256], loss[2];
    const unsigned char targets[] = {1, 1};
    logits[0][9] = NAN;
    tn__cross_entropy_work work = {
        {TN_FP32, logits, 2, 256}, {TN_FP32, dlogits, 2, 256}, targets, loss};
    tn__host_cross_entropy(&work);
    assert_int_equal(tn__bits_of(loss[0]), 0x7FFFFFFF);
    assert_true(loss[1] == (float)log(256.0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(axpy_rounds_once_in_fp32_and_then_to_its_type),
        cmocka_unit_test(axpy_fuses_multiply_and_add),
        cmocka_unit_test(convert_rounds_to_nearest_even),
        cmocka_unit_test(embed_copies_rows_bit_for_bit),
        cmocka_unit_test(cross_entropy_by_hand),
        cmocka_unit_test(cross_entropy_of_all_types_is_near_double),
        cmocka_unit_test(a_nan_logit_makes_its_row_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
