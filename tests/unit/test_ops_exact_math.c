/* The elementary functions of kernels against the C library's in long double: the stated bounds
 * over samples of every exponent, where they end, and special values. */
#include "test_support.h"

#include "exact_math.h"
#include "host_number.h"

/* How far `got` is from `want`, in units of the last place of a float of want's size. */
static double ulps(float got, long double want) {
    int exponent;
    (void)frexpl(want, &exponent);
    int last_place = exponent - 24 < -149 ? -149 : exponent - 24;
    return (double)(fabsl((long double)got - want) / ldexpl(1.0L, last_place));
}

static double larger(double a, double b) { return a > b ? a : b; }

enum { STEP = 4999 }; /* between the floats that are tried; odd, so that all low bits occur */

static void test_exp_stays_within_its_bound(void **state) {
    const uint32_t end = tn__bits_of(87.0f);
    double worst = 0.0;
    (void)state;
    for (uint32_t bits = 0; bits <= end; bits += STEP) {
        float x = tn__float_of(bits);
        worst = larger(worst, ulps(tn__exact_exp_minus(x), expl(-(long double)x)));
    }
    assert_true(worst > 0.0 && worst <= 1.0);
}

static void test_sigmoid_stays_within_its_bound(void **state) {
    const uint32_t end = tn__bits_of(87.0f);
    double worst = 0.0;
    (void)state;
    for (uint32_t bits = 0; bits <= end; bits += STEP) {
        float x = tn__float_of(bits);
        long double e = expl(-(long double)x);
        worst = larger(worst, ulps(tn__exact_sigmoid(x), 1.0L / (1.0L + e)));
        worst = larger(worst, ulps(tn__exact_sigmoid(-x), e / (1.0L + e)));
    }
    assert_true(worst > 0.0 && worst <= 2.5);
}

static void test_rsqrt_stays_within_its_bound(void **state) {
    double worst = 0.0;
    (void)state;
    for (uint32_t bits = 1; bits < TN__FP32_INFINITY; bits += STEP) {
        float x = tn__float_of(bits);
        worst = larger(worst, ulps(tn__exact_rsqrt(x), 1.0L / sqrtl((long double)x)));
    }
    assert_true(worst > 0.0 && worst <= 1.5);
}

static void test_log_stays_within_its_bound(void **state) {
    const uint32_t one = tn__bits_of(1.0f);
    double worst = 0.0;
    (void)state;
    for (uint32_t bits = one; bits < TN__FP32_INFINITY; bits += STEP) {
        float x = tn__float_of(bits);
        worst = larger(worst, ulps(tn__exact_log(x), logl((long double)x)));
    }
    for (uint32_t bits = one + 1; bits < one + 200000; bits++) { /* where it is near to 0 */
        float x = tn__float_of(bits);
        worst = larger(worst, ulps(tn__exact_log(x), logl((long double)x)));
    }
    assert_true(worst > 0.0 && worst <= 2.0);
}

static void test_sigmoid_rises(void **state) {
    float before = 0.0f;
    (void)state;
    for (int step = -90 * 32; step <= 20 * 32; step++) {
        const float x = (float)step / 32.0f;
        assert_true(tn__exact_sigmoid(x) >= before);
        before = tn__exact_sigmoid(x);
    }
    assert_true(before == 1.0f);
}

static void test_special_values(void **state) {
    const float nan = tn__float_of(0x7FC00001), negative_nan = tn__float_of(0xFFFFFFFF);
    (void)state;
    assert_true(tn__exact_exp_minus(0.0f) == 1.0f);
    assert_true(tn__exact_exp_minus(0x1p-149f) == 1.0f);
    assert_true(tn__exact_exp_minus(87.0f) >= 0x1p-126f);
    assert_true(tn__exact_exp_minus(nextafterf(87.0f, 88.0f)) == 0.0f);
    assert_true(tn__exact_exp_minus(INFINITY) == 0.0f);
    assert_true(isnan(tn__exact_exp_minus(nan)));
    assert_true(tn__exact_sigmoid(0.0f) == 0.5f && tn__exact_sigmoid(-0.0f) == 0.5f);
    assert_true(tn__exact_sigmoid(INFINITY) == 1.0f && tn__exact_sigmoid(-INFINITY) == 0.0f);
    assert_true(tn__exact_sigmoid(tn__float_of(0x7F7FFFFF)) == 1.0f);
    assert_true(tn__exact_sigmoid(tn__float_of(0xFF7FFFFF)) == 0.0f);
    assert_true(isnan(tn__exact_sigmoid(nan)) && isnan(tn__exact_sigmoid(negative_nan)));
    assert_true(tn__exact_rsqrt(4.0f) == 0.5f && tn__exact_rsqrt(INFINITY) == 0.0f);
    assert_true(tn__bits_of(tn__exact_log(1.0f)) == 0 && isnan(tn__exact_log(nan)));
    assert_true(tn__exact_log(INFINITY) == INFINITY);
    assert_true(tn__exact_rsqrt(0.0f) == INFINITY && isnan(tn__exact_rsqrt(-1.0f)));
}

/* Values worked out once with 50 digits, so that a wrong long double library is seen too. */
static void test_known_values(void **state) {
    (void)state;
    assert_true(ulps(tn__exact_exp_minus(1.0f), 0.36787944117144232159552L) <= 1.0);
    assert_true(ulps(tn__exact_exp_minus(80.0f), 1.8048513878454151721e-35L) <= 1.0);
    assert_true(ulps(tn__exact_sigmoid(-10.0f), 4.5397868702434390e-5L) <= 2.5);
    assert_true(ulps(tn__exact_sigmoid(2.0f), 0.88079707797788244406L) <= 2.5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp_stays_within_its_bound),
        cmocka_unit_test(test_sigmoid_stays_within_its_bound),
        cmocka_unit_test(test_rsqrt_stays_within_its_bound),
        cmocka_unit_test(test_log_stays_within_its_bound),
        cmocka_unit_test(test_sigmoid_rises),
        cmocka_unit_test(test_special_values),
        cmocka_unit_test(test_known_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
