/* The arithmetic of attention that is not a product, one number at a time: the same in the host's
 * definition and in the kernels. tenure_attention.h has the formulas, exact_math.h how they stay
 * exact.
 *
 * A largest score is never NaN: NaN is not above anything. So a NaN score makes weights NaN, and by
 * them sums, but not what other scores are compared with.
 */
#ifndef TENURE_EXACT_ATTENTION_H
#define TENURE_EXACT_ATTENTION_H

#include "exact_math.h"

enum {
    TN__ATTENTION_TILE = 64, /* queries, and keys, that are worked on at once */
    TN__ATTENTION_SUMS = 16  /* that a row is added up in */
};

TN__EXACT float tn__attention_larger(float a, float b) { return b > a ? b : a; }

/* What scores are taken relative to: the largest one so far, which is -infinity as long as all are.
 * Then 0 instead, so that they get the weight 0. */
TN__EXACT float tn__attention_base(float largest) { return largest == -INFINITY ? 0.0f : largest; }

/* The factor for what was summed relative to `before`, now that it is `base`. */
TN__EXACT float tn__attention_rescale(float before, float base) {
    return tn__exact_exp_minus(base - before);
}

/* Of a score, relative to the base or to the logarithm of the row's sum: 1 at most, whatever that
 * logarithm is. */
TN__EXACT float tn__attention_weight(float score, float relative_to) {
    const float below = relative_to - score;
    return tn__exact_exp_minus(below < 0.0f ? 0.0f : below);
}

/* Where no score has a weight, or a sum is NaN: NaN. */
TN__EXACT float tn__attention_log_sum(float base, float sum) {
    return sum > 0.0f ? base + tn__exact_log(sum) : NAN;
}

/* What a key's and a query's gradients get of dy: p * (dp - dot). */
TN__EXACT float tn__attention_slope(float weight, float product, float dot) {
    return weight * (product - dot);
}

#endif
