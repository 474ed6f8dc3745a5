/* Elementary functions whose bits are the same on the host and on every GPU.
 *
 * A math library gives other last bits on other machines, so none of a result here comes from one.
 * These are made of IEEE additions, multiplications, fused multiply-adds, divisions and square
 * roots alone, each rounded to nearest, with denormals. The build sees to it that no compiler
 * changes them: -ffp-contract=off on the host; -fmad=false, -ftz=false, -prec-div=true and
 * -prec-sqrt=true (which is nvcc's default) for kernels. NaN gives NaN, of whatever bits: whoever
 * stores it makes it canonical.
 *
 * Bounds, against the true value, in units of the last place of the result; tests/unit/
 * test_ops_exact_math.c holds them:
 *
 *     tn__exact_exp_minus   1 ulp    x from 0 to 87; from there on 0
 *     tn__exact_sigmoid     2.5 ulp  x of -87 and above; below 0
 *     tn__exact_rsqrt       1.5 ulp  every positive x
 *     tn__exact_log         2 ulp    x of 1 and above
 */
#ifndef TENURE_EXACT_MATH_H
#define TENURE_EXACT_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define TN__EXACT static __device__ __forceinline__
#else
#define TN__EXACT static inline __attribute__((always_inline))
#endif

TN__EXACT uint32_t tn__bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

TN__EXACT float tn__float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* exp(-x) for x of at least 0 (NaN gives NaN).
 *
 * -x = n ln 2 + r with n whole and |r| at most ln(2) / 2, where ln 2 is two floats, so that n times
 * the first is exact; exp(r) = 1 + r + r^2 q(r), q the minimax polynomial of degree 4, whose
 * relative error in exp(r) is 3.1e-9. */
TN__EXACT float tn__exact_exp_minus(float x) {
    const float shift = 0x1.8p23f; /* a sum with it is whole, and its low bits are the number */
    const float shifted = fmaf(x, -0x1.715476p0f, shift);
    const float n = shifted - shift;
    const float r = fmaf(n, -0x1.7f7d1cp-20f, fmaf(n, -0x1.62e4p-1f, -x));
    float q = fmaf(1.381459646998016e-3f, r, 8.368716850262454e-3f);
    q = fmaf(q, r, 4.166838807216392e-2f);
    q = fmaf(q, r, 0.1666652063216066f);
    q = fmaf(q, r, 0.49999993447799307f);
    const float power = /* 2^n; the high bits of `shifted` fall off */
        tn__float_of((tn__bits_of(shifted) + 127) << 23);
    const float value = (1.0f + fmaf(q, r * r, r)) * power;
    return x > 87.0f ? 0.0f : value;
}

/* 1 / d, rounded to nearest, for d from 1 to 2: on a GPU its approximation and a step of Newton's,
 * which is what nvcc makes of a division by such a d too, without the test for other ones. */
TN__EXACT float tn__exact_reciprocal(float d) {
#ifdef __CUDA_ARCH__
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(d));
    return fmaf(inverse, fmaf(-d, inverse, 1.0f), inverse);
#else
    return 1.0f / d;
#endif
}

/* 1 / (1 + exp(-x)) and 1 / (1 + exp(x)), for x of at least 0. With e = exp(-x) the second is
 * e / (1 + e), whose small results keep their digits so. */
typedef struct tn__sigmoid_pair {
    float of_x, of_minus_x;
} tn__sigmoid_pair;

TN__EXACT tn__sigmoid_pair tn__exact_sigmoids(float x) {
    const float e = tn__exact_exp_minus(x);
    const float inverse = tn__exact_reciprocal(1.0f + e);
    const tn__sigmoid_pair both = {inverse, e * inverse};
    return both;
}

/* 1 / (1 + exp(-x)). */
TN__EXACT float tn__exact_sigmoid(float x) {
    const tn__sigmoid_pair both = tn__exact_sigmoids(fabsf(x));
    return x < 0.0f ? both.of_minus_x : both.of_x;
}

/* log(x) for x of at least 1 (infinity gives infinity, NaN gives NaN).
 *
 * x = 2^n z with z from sqrt(1/2) to sqrt(2); log(z) = 2 atanh(s), s = (z - 1) / (z + 1), is
 * 2 s + s^3 q(s^2) with the first four terms of its series, the fifth being below 2^-28 of it. ln 2
 * is two floats as above, of which the first has few enough bits that n times it is exact. */
TN__EXACT float tn__exact_log(float x) {
    const uint32_t bits = tn__bits_of(x), half = 0x3F3504F3; /* of sqrt(1/2) */
    const int32_t n = (int32_t)(bits - half) >> 23;
    const float z = tn__float_of(bits - ((uint32_t)n << 23));
    const float s = (z - 1.0f) / (z + 1.0f), square = s * s;
    float q = fmaf(0.22222222f, square, 0.2857143f);
    q = fmaf(q, square, 0.4f);
    q = fmaf(q, square, 0.6666667f);
    const float of_z = fmaf(s * square, q, s + s);
    const float value = fmaf((float)n, 0x1.62e4p-1f, fmaf((float)n, 0x1.7f7d1cp-20f, of_z));
    return x < INFINITY ? value : x;
}

/* 1 / sqrt(x). */
TN__EXACT float tn__exact_rsqrt(float x) { return 1.0f / sqrtf(x); }

#endif
