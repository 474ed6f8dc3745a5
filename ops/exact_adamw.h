/* AdamW of one element, with the same bits on the host and on every GPU.
 *
 * Made of IEEE operations alone, as exact_math.h says, in this order:
 *
 *     g     = gradient * scale
 *     m     = m + (1 - beta1) (g - m)                        one fused multiply-add
 *     v     = beta2 v + ((1 - beta2) g) g                    likewise
 *     w     = w - (rate decay) w                             likewise
 *     w     = w - rate ((m correction1) / (sqrt(v) correction2 + epsilon))
 *
 * where correction1 is 1 / (1 - beta1^t) and correction2 is 1 / sqrt(1 - beta2^t): these are made
 * once a step, in double, the powers by squaring, and rounded to fp32 at the end.
 */
#ifndef TENURE_EXACT_ADAMW_H
#define TENURE_EXACT_ADAMW_H

#include "exact_math.h"

/* As the caller says them; the complements are 1 - beta in double, rounded once. */
typedef struct tn__adamw_constants {
    float rate, decay, epsilon;
    float beta2;
    float beta1_complement, beta2_complement;
} tn__adamw_constants;

/* And as they are in this step, on the device. */
typedef struct tn__adamw_factors {
    tn__adamw_constants constants;
    float rate;  /* times what lies in device memory */
    float decay; /* that times the decay */
    float scale; /* of the gradient */
    float correction1, correction2;
} tn__adamw_factors;

/* step [3] as tn_adamw_advance leaves it; the others are NULL, or one element. */
TN__EXACT tn__adamw_factors tn__adamw_factors_of(tn__adamw_constants constants, const float *step,
                                                 const float *rate, const float *scale) {
    tn__adamw_factors f;
    f.constants = constants;
    f.rate = rate ? constants.rate * *rate : constants.rate;
    f.decay = f.rate * constants.decay;
    f.scale = scale ? *scale : 1.0f;
    f.correction1 = step[1];
    f.correction2 = step[2];
    return f;
}

/* The new weight; the moments change where they are. */
TN__EXACT float tn__adamw_element(const tn__adamw_factors *f, float gradient, float *first,
                                  float *second, float weight) {
    const float g = gradient * f->scale;
    *first = fmaf(f->constants.beta1_complement, g - *first, *first);
    *second = fmaf(f->constants.beta2, *second, (f->constants.beta2_complement * g) * g);
    const float root = fmaf(sqrtf(*second), f->correction2, f->constants.epsilon);
    const float change = (*first * f->correction1) / root;
    const float decayed = fmaf(-f->decay, weight, weight);
    return fmaf(-f->rate, change, decayed);
}

/* beta^t by squaring, t whole and not negative. */
TN__EXACT double tn__exact_power(double beta, int64_t t) {
    double power = 1.0;
    for (; t > 0; t /= 2) {
        if (t % 2) power = power * beta;
        beta = beta * beta;
    }
    return power;
}

/* step [3]: the number of steps, and the two corrections of the step that begins. */
TN__EXACT void tn__adamw_begin_step(float *step, float beta1, float beta2) {
    const float count = step[0] + 1.0f;
    const int64_t t = count < 0x1p30f ? (int64_t)count : (int64_t)1 << 30;
    step[0] = count;
    step[1] = (float)(1.0 / (1.0 - tn__exact_power((double)beta1, t)));
    step[2] = (float)(1.0 / sqrt(1.0 - tn__exact_power((double)beta2, t)));
}

#endif
