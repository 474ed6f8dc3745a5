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
    float linear, cubic; /* SIGMOID */
} tn__curve;

/* x^2, but bounded: where it is not exact any more, the sigmoid is 0 or 1 in any case. */
TN__EXACT float tn__bounded_square(float x) {
    const float square = x * x;
    return square < 1e6f ? square : 1e6f;
}

typedef struct tn__curve_point {
    float value, slope;
} tn__curve_point;

/* Both at once, as they share most of the work; what is not read is not computed. */
TN__EXACT tn__curve_point tn__curve_at(tn__curve curve, float x) {
    tn__curve_point at = {x, 1.0f};
    if (curve.kind == TN__CURVE_SIGMOID) {
        const float square = tn__bounded_square(x);
        const float s = tn__exact_sigmoid(x * fmaf(curve.cubic, square, curve.linear));
        const float inner = fmaf(3.0f * curve.cubic, square, curve.linear);
        at.value = x * s;
        at.slope = fmaf(x * (s * (1.0f - s)), inner, s);
    } else if (curve.kind != TN__CURVE_IDENTITY) {
        const float relu = x < 0.0f ? 0.0f : x;
        const int is_squared = curve.kind == TN__CURVE_SQUARED_RELU;
        at.value = is_squared ? relu * relu : relu;
        at.slope = is_squared ? 2.0f * relu : x > 0.0f ? 1.0f : x <= 0.0f ? 0.0f : x;
    }
    return at;
}

#endif
