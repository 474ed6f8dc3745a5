/* Activations and their slopes, with the same bits on the host and on every GPU.
 *
 *     GELU (tanh form)    x (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3)
 *     quick GELU          x sigmoid(1.702 x)
 *     SiLU                x sigmoid(x)
 *     ReLU                max(x, 0)
 *     squared ReLU        max(x, 0)^2
 *
 * are the functions that TransformerEngine's common/util/math.h computes. As (1 + tanh(u)) / 2 is
 * sigmoid(2 u), the first three are one curve, x sigmoid(x (linear + cubic x^2)), which keeps the
 * digits of GELU's lower tail as well. Its slope is s + x s (1 - s) (linear + 3 cubic x^2).
 *
 * A bf16 x has so few digits that its sigmoids are looked up: of |x| from 2^-15 to below 128 there
 * are 2,816, and outside of them that of 0 or of the last one is taken. Against the true value that
 * adds at most 2^-15 of it to the sigmoids of the smallest; the others are 0 or 1 there anyway.
 *
 * NaN gives NaN, also in ReLU. An infinite x gives what IEEE arithmetic makes of these formulas:
 * -inf is NaN but in ReLU (0 times infinity), as it is in PyTorch.
 */
#ifndef TENURE_EXACT_ACTIVATION_H
#define TENURE_EXACT_ACTIVATION_H

#include "exact_math.h"

typedef enum tn__curve_kind {
    TN__CURVE_IDENTITY = 0,
    TN__CURVE_SIGMOID,
    TN__CURVE_RELU,
    TN__CURVE_SQUARED_RELU
} tn__curve_kind;

typedef struct tn__curve {
    tn__curve_kind kind;
    float linear, cubic; /* SIGMOID; not negative */
} tn__curve;

/* ---- sigmoids ------------------------------------------------------------------------------ */

/* x^2, but bounded: where it is not exact any more, the sigmoid is 0 or 1 in any case. */
TN__EXACT float tn__bounded_square(float x) {
    const float square = x * x;
    return square < 1e6f ? square : 1e6f;
}

/* What the sigmoid is taken of. */
TN__EXACT float tn__curve_argument(tn__curve curve, float x) {
    return x * fmaf(curve.cubic, tn__bounded_square(x), curve.linear);
}

/* The table for bf16: entry i is of the |x| whose bits are FIRST + i, but entry 0 is of 0. */
enum {
    TN__SIGMOID_FIRST = 0x37FF, /* below 2^-15 */
    TN__SIGMOID_LAST = 0x42FF,  /* 127.5 */
    TN__SIGMOID_COUNT = TN__SIGMOID_LAST - TN__SIGMOID_FIRST + 1
};

TN__EXACT float tn__sigmoid_entry(int i) {
    const uint32_t bits = (uint32_t)(TN__SIGMOID_FIRST + i) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return i ? x : 0.0f;
}

/* The |x|, with x's sign, whose entry a bf16 x takes. */
TN__EXACT float tn__sigmoid_place(float x) {
    const float last = tn__sigmoid_entry(TN__SIGMOID_LAST - TN__SIGMOID_FIRST);
    const float size = fabsf(x) < last ? fabsf(x) : last;
    return copysignf(size < 0x1p-15f ? 0.0f : size, x);
}

/* ---- values and slopes --------------------------------------------------------------------- */

typedef struct tn__curve_point {
    float value, slope;
} tn__curve_point;

/* Both at once, as they share most of the work; what is not read is not computed. `s` is the
 * sigmoid. */
TN__EXACT tn__curve_point tn__sigmoid_point(tn__curve curve, float x, float s) {
    const float inner = fmaf(3.0f * curve.cubic, tn__bounded_square(x), curve.linear);
    const tn__curve_point at = {x * s, fmaf(x * (s * (1.0f - s)), inner, s)};
    return at;
}

/* Of the curves without a sigmoid. */
TN__EXACT tn__curve_point tn__corner_point(tn__curve_kind kind, float x) {
    const float relu = x < 0.0f ? 0.0f : x;
    const float step = x > 0.0f ? 1.0f : x <= 0.0f ? 0.0f : x;
    const int is_squared = kind == TN__CURVE_SQUARED_RELU, is_line = kind == TN__CURVE_IDENTITY;
    const tn__curve_point at = {(is_line ? x : relu) * (is_squared ? relu : 1.0f), is_line ? 1.0f
                                                                                   : is_squared
                                                                                       ? 2.0f * relu
                                                                                       : step};
    return at;
}

/* Of any curve; as a sigmoid that is looked up is where x is bf16. */
TN__EXACT tn__curve_point tn__curve_at(tn__curve curve, float x, int is_looked_up) {
    if (curve.kind != TN__CURVE_SIGMOID) return tn__corner_point(curve.kind, x);
    const float place = is_looked_up ? tn__sigmoid_place(x) : x;
    return tn__sigmoid_point(curve, x, tn__exact_sigmoid(tn__curve_argument(curve, place)));
}

#endif
