/* GEMM on the host: by hand, to the bit against the definition written naively, and within the
 * bound of its roundings against double; with odd sizes and NaN in all padding. */
#include "ops_planes_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host_number.h"

/* A quantized operand of `rows` by `depth`, as GEMM sees it, with its plane for test access. */
typedef struct scaled_operand {
    test_plane plane;
    tn__operand operand;
} scaled_operand;

static scaled_operand make_scaled(tn__operand_kind kind, tn_dtype dtype, tn_scale_mode mode,
                                  int64_t rows, int64_t depth, uint32_t seed) {
    scaled_operand result;
    int is_vector = kind == TN__OPERAND_VECTOR;
    tn_format format = is_vector ? TN_FORMAT_FP8_BLOCK_1D : TN_FORMAT_FP8_BLOCK_2D;
    tn__matrix src = test_matrix_make(TN_FP32, rows, depth, seed);
    result.plane = test_plane_make(format, TN_PLANE_ROW, dtype, rows, depth);
    test_quantize(&src, &result.plane, NULL, mode, 0);
    test_plane_poison_padding(&result.plane);
    test_matrix_free(&src);
    result.operand = (tn__operand){.kind = kind, .dtype = dtype, .rows = rows};
    result.operand.data = result.plane.view.data;
    result.operand.scale = result.plane.view.scale;
    result.operand.scale_stride = result.plane.view.layout.scale_stride;
    return result;
}

static void run_gemm(tn__gemm_work *work, int is_narrow) {
    work->scratch = malloc(tn__host_gemm_scratch_bytes());
    assert_non_null(work->scratch);
    memset(work->scratch, 0xFF, tn__host_gemm_scratch_bytes());
    if (is_narrow)
        tn__host_gemm_narrow(work);
    else
        tn__host_gemm(work);
    free(work->scratch);
}

static float round_to(tn_dtype dtype, float value) {
    uint32_t memory = 0;
    tn__store_floats(dtype, &memory, 0, 1, &value);
    tn__load_floats(dtype, &memory, 0, 1, &value);
    return value;
}

/* ---- FP8 ------------------------------------------------------------------------------------ */

/* One element by the definition: volatile, so that each rounding is where it is written. */
static float scaled_element(const scaled_operand *a, const scaled_operand *b, int64_t m, int64_t n,
                            int64_t depth) {
    const float *va = tn__fp8_values(a->operand.dtype), *vb = tn__fp8_values(b->operand.dtype);
    int swaps = a->operand.kind == TN__OPERAND_TILE && b->operand.kind == TN__OPERAND_VECTOR;
    float y = 0.0f;
    for (int64_t k = 0; k < depth; k += 128) {
        volatile float p = 0.0f;
        for (int64_t i = k; i < tn__least(k + 128, depth); i++) {
            float x = va[test_plane_code(&a->plane, m, i)],
                  w = vb[test_plane_code(&b->plane, n, i)];
            volatile float product = x * w;
            p = p + product;
        }
        float sa = test_plane_scale(&a->plane, m, k), sb = test_plane_scale(&b->plane, n, k);
        volatile float scaled = p * (swaps ? sb : sa);
        y = fmaf(scaled, swaps ? sa : sb, y);
    }
    return y;
}

/* In double the sum is as good as exact; each of the roundings in fp32 is at most 2^-24 of the
 * sum of magnitudes: one per addition in a block and three per block. */
static void expect_near_double(const scaled_operand *a, const scaled_operand *b, int64_t m,
                               int64_t n, int64_t depth, float actual) {
    double sum = 0.0, magnitude = 0.0;
    for (int64_t k = 0; k < depth; k++) {
        double product = test_plane_value(&a->plane, m, k) * test_plane_value(&b->plane, n, k);
        sum += product;
        magnitude += fabs(product);
    }
    double roundings = 128.0 + 3.0 * (double)((depth + 127) / 128);
    assert_true(fabs((double)actual - sum) <= roundings * 0x1p-24 * magnitude);
}

typedef struct product {
    tn__operand_kind a, b;
    tn_dtype a_dtype, b_dtype, d_dtype;
    tn_scale_mode mode;
    int accumulate;
} product;

static void check_scaled(product how, int64_t m, int64_t n, int64_t depth) {
    scaled_operand a = make_scaled(how.a, how.a_dtype, how.mode, m, depth, 1);
    scaled_operand b = make_scaled(how.b, how.b_dtype, how.mode, n, depth, 2);
    tn__matrix d = test_matrix_make(how.d_dtype, m, n, 3),
               old = test_matrix_make(how.d_dtype, m, n, 3);
    tn__gemm_work work = {
        .a = a.operand, .b = b.operand, .contracted = depth, .d = d, .accumulate = how.accumulate};
    run_gemm(&work, 0);
    for (int64_t r = 0; r < m; r++) {
        for (int64_t c = 0; c < n; c++) {
            float y = scaled_element(&a, &b, r, c, depth);
            float sum = round_to(how.d_dtype, y);
            if (how.accumulate) sum = test_matrix_get(&old, r, c) + sum;
            float expected = round_to(how.d_dtype, sum);
            float actual = test_matrix_get(&d, r, c);
            if (tn__bits_of(actual) != tn__bits_of(expected)) {
                fail_msg("(%ld, %ld) of %ldx%ldx%ld is %a, expected %a", (long)r, (long)c, (long)m,
                         (long)n, (long)depth, (double)actual, (double)expected);
            }
            if (how.d_dtype == TN_FP32 && !how.accumulate) {
                expect_near_double(&a, &b, r, c, depth, actual);
            }
        }
    }
    test_plane_free(&a.plane), test_plane_free(&b.plane);
    test_matrix_free(&d), test_matrix_free(&old);
}

static const int64_t sizes[][3] = {
    {1, 1, 1},       {1, 130, 128}, {129, 1, 257},   {4, 16, 127},    {5, 17, 129},
    {100, 130, 128}, {3, 5, 640},   {131, 133, 300}, {128, 128, 256}, {64, 448, 192},
};

static void block_scaled_products_follow_the_definition_to_the_bit(void **state) {
    (void)state;
    static const tn__operand_kind kinds[][2] = {{TN__OPERAND_VECTOR, TN__OPERAND_TILE},
                                                {TN__OPERAND_VECTOR, TN__OPERAND_VECTOR},
                                                {TN__OPERAND_TILE, TN__OPERAND_VECTOR},
                                                {TN__OPERAND_TILE, TN__OPERAND_TILE}};
    static const tn_dtype outputs[] = {TN_FP32, TN_BF16, TN_FP16};
    unsigned turn = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int k = 0; k < 4; k++) {
            for (int mode = 0; mode < 2; mode++, turn++) {
                product how = {kinds[k][0], kinds[k][1],       TN_E4M3,
                               TN_E4M3,     outputs[turn % 3], mode ? TN_SCALE_FP32 : TN_SCALE_POW2,
                               turn / 3 % 2};
                if (turn % 5 == 1) how.a_dtype = TN_E5M2;
                if (turn % 5 == 2) how.b_dtype = TN_E5M2;
                check_scaled(how, sizes[s][0], sizes[s][1], sizes[s][2]);
            }
        }
    }
}

/* 1 x 2 times 1 x 2: codes 0x38 = 1, 0x40 = 2, 0x3C = 1.5, 0xB8 = -1. p = 1*1.5 + 2*-1 = -0.5;
 * y = -0.5 * 4 * 0.25 = -0.5. With D = 3 to accumulate on: 2.5. */
static void a_product_by_hand(void **state) {
    (void)state;
    const uint8_t a[] = {0x38, 0x40}, b[] = {0x3C, 0xB8};
    const float sa[] = {4.0f, NAN, NAN, NAN}, sb[] = {0.25f, NAN, NAN, NAN};
    float d = 3.0f;
    tn__gemm_work work = {.a = {TN__OPERAND_VECTOR, TN_E4M3, a, 0, 1, sa, 4, 0},
                          .b = {TN__OPERAND_TILE, TN_E4M3, b, 0, 1, sb, 4, 0},
                          .contracted = 2,
                          .d = {TN_FP32, &d, 1, 1}};
    run_gemm(&work, 0);
    assert_true(d == -0.5f);
    d = 3.0f;
    work.accumulate = 1;
    run_gemm(&work, 0);
    assert_true(d == 2.5f);
}

/* p * s1 is rounded before s2 is applied. With a by vectors, s1 = 1 + 2^-23 and p = 3:
 * 3 * (1 + 2^-23) = 3 + 1.5 * 2^-22 lies between 3 + 2^-22 and 3 + 2^-21, half way: to even, that
 * is 3 + 2^-21 (its last bit is 0). With a by tiles and b by vectors the roles change, so the same
 * scales given the other way round make the same bits. */
static void the_vectors_scale_is_applied_before_the_tiles(void **state) {
    (void)state;
    const uint8_t three[] = {0x44}, one[] = {0x38};
    const float vector[] = {0x1.000002p0f, NAN, NAN, NAN}, tile[] = {0x1.8p0f, NAN, NAN, NAN};
    float d[2];
    for (int swaps = 0; swaps < 2; swaps++) {
        tn__operand by_vector = {TN__OPERAND_VECTOR, TN_E4M3, three, 0, 1, vector, 4, 0};
        tn__operand by_tile = {TN__OPERAND_TILE, TN_E4M3, one, 0, 1, tile, 4, 0};
        tn__matrix out = {TN_FP32, &d[swaps], 1, 1};
        tn__gemm_work work = {.a = swaps ? by_tile : by_vector,
                              .b = swaps ? by_vector : by_tile,
                              .contracted = 1,
                              .d = out};
        run_gemm(&work, 0);
    }
    assert_true(d[0] == fmaf(0x1.800004p1f, 0x1.8p0f, 0.0f));
    assert_true(d[1] == d[0]);
}

static void nan_in_an_operand_reaches_its_row_only(void **state) {
    (void)state;
    scaled_operand a = make_scaled(TN__OPERAND_VECTOR, TN_E4M3, TN_SCALE_POW2, 5, 130, 1);
    scaled_operand b = make_scaled(TN__OPERAND_TILE, TN_E4M3, TN_SCALE_POW2, 3, 130, 2);
    tn__matrix d = test_matrix_make(TN_BF16, 5, 3, 3);
    tn__gemm_work work = {.a = a.operand, .b = b.operand, .contracted = 130, .d = d};
    ((uint8_t *)a.plane.view.data)[2 * 130 + 129] = 0x7F;
    run_gemm(&work, 0);
    for (int r = 0; r < 5; r++) {
        for (int c = 0; c < 3; c++) {
            assert_int_equal(isnan(test_matrix_get(&d, r, c)) != 0, r == 2);
            if (r == 2) assert_int_equal(((uint16_t *)d.data)[r * 3 + c], 0x7FFF);
        }
    }
    test_plane_free(&a.plane), test_plane_free(&b.plane), test_matrix_free(&d);
}

static void the_cpus_wide_clone_gives_the_same_bits(void **state) {
    (void)state;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int64_t m = sizes[s][0], n = sizes[s][1], depth = sizes[s][2];
        scaled_operand a = make_scaled(TN__OPERAND_VECTOR, TN_E4M3, TN_SCALE_FP32, m, depth, 1);
        scaled_operand b = make_scaled(TN__OPERAND_TILE, TN_E5M2, TN_SCALE_FP32, n, depth, 2);
        tn__matrix x = test_matrix_make(TN_FP32, m, depth, 5),
                   w = test_matrix_make(TN_FP32, n, depth, 6);
        tn__matrix d[2] = {test_matrix_make(TN_FP32, m, n, 3), test_matrix_make(TN_FP32, m, n, 3)};
        for (int is_plain = 0; is_plain < 2; is_plain++) {
            tn__operand plain_a = {TN__OPERAND_PLAIN, TN_FP32, x.data, 0, m, NULL, 0, 0};
            tn__operand plain_b = {TN__OPERAND_PLAIN, TN_FP32, w.data, 0, n, NULL, 0, 0};
            for (int is_narrow = 0; is_narrow < 2; is_narrow++) {
                tn__gemm_work work = {.a = is_plain ? plain_a : a.operand,
                                      .b = is_plain ? plain_b : b.operand,
                                      .contracted = depth,
                                      .d = d[is_narrow]};
                run_gemm(&work, is_narrow);
            }
            assert_memory_equal(d[0].data, d[1].data, (size_t)(m * n) * sizeof(float));
        }
        test_plane_free(&a.plane), test_plane_free(&b.plane);
        test_matrix_free(&x), test_matrix_free(&w);
        test_matrix_free(&d[0]), test_matrix_free(&d[1]);
    }
}

/* ---- plain ---------------------------------------------------------------------------------- */

static float plain_element(const tn__matrix *a, int a_turned, const tn__matrix *b, int b_turned,
                           int64_t m, int64_t n, int64_t depth) {
    volatile float y = 0.0f;
    for (int64_t k = 0; k < depth; k++) {
        float x = a_turned ? test_matrix_get(a, k, m) : test_matrix_get(a, m, k);
        float w = b_turned ? test_matrix_get(b, k, n) : test_matrix_get(b, n, k);
        volatile float rounded = x * w;
        y = y + rounded;
    }
    return y;
}

static void check_plain(tn_dtype dtype, tn_dtype to, int turned, int accumulate, int64_t m,
                        int64_t n, int64_t depth) {
    int a_turned = turned & 1, b_turned = turned >> 1;
    tn__matrix a = test_matrix_make(dtype, a_turned ? depth : m, a_turned ? m : depth, 1);
    tn__matrix b = test_matrix_make(dtype, b_turned ? depth : n, b_turned ? n : depth, 2);
    tn__matrix d = test_matrix_make(to, m, n, 3), old = test_matrix_make(to, m, n, 3);
    tn__gemm_work work = {.a = {TN__OPERAND_PLAIN, dtype, a.data, a_turned, m, NULL, 0, 0},
                          .b = {TN__OPERAND_PLAIN, dtype, b.data, b_turned, n, NULL, 0, 0},
                          .contracted = depth,
                          .d = d,
                          .accumulate = accumulate};
    run_gemm(&work, 0);
    for (int64_t r = 0; r < m; r++) {
        for (int64_t c = 0; c < n; c++) {
            float sum = plain_element(&a, a_turned, &b, b_turned, r, c, depth);
            sum = round_to(to, sum);
            if (accumulate) sum = test_matrix_get(&old, r, c) + sum;
            float expected = round_to(to, sum);
            assert_int_equal(tn__bits_of(test_matrix_get(&d, r, c)), tn__bits_of(expected));
        }
    }
    test_matrix_free(&a), test_matrix_free(&b), test_matrix_free(&d), test_matrix_free(&old);
}

static void plain_products_in_every_orientation_are_exact(void **state) {
    (void)state;
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    unsigned turn = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int dtype = 0; dtype < 3; dtype++) {
            for (int turned = 0; turned < 4; turned++, turn++) {
                check_plain(types[dtype], types[turn % 3], turned, turn / 2 % 2, sizes[s][0],
                            sizes[s][1], sizes[s][2]);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_product_by_hand),
        cmocka_unit_test(the_vectors_scale_is_applied_before_the_tiles),
        cmocka_unit_test(block_scaled_products_follow_the_definition_to_the_bit),
        cmocka_unit_test(nan_in_an_operand_reaches_its_row_only),
        cmocka_unit_test(the_cpus_wide_clone_gives_the_same_bits),
        cmocka_unit_test(plain_products_in_every_orientation_are_exact),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
