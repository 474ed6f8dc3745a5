/* Sums over a row in the order that tn_norm_forward fixes, shared by the norms and their gradients:
 * of each block of 128 columns, and of the blocks. */
#ifndef TENURE_HOST_NORM_SUMS_H
#define TENURE_HOST_NORM_SUMS_H

#include <math.h>
#include <stddef.h>

#include "host_kernels.h"

enum {
    TN__NORM_QUADS = TN__BLOCK / 4, /* of a block, each of 4 neighbours */
    TN__NORM_ROW_SUMS = 32          /* block b is added to sum b mod 32 */
};

/* Sums i and i + apart of every `nearest`-th, then half as far apart, until that is `nearest`. */
static inline void tn__norm_add_sums(float *sum, int apart, int nearest) {
    for (; apart >= nearest; apart /= 2) {
        for (int i = 0; i < apart; i += nearest)
            sum[i] += sum[i + apart];
    }
}

/* Of a block's values, or of their products with those of `by`, if that is one; both have 0 where
 * the row has no column. */
static inline float tn__norm_block_sum(const float value[TN__BLOCK], const float *by) {
    float sum[TN__NORM_QUADS];
    for (int i = 0; i < TN__NORM_QUADS; i++) {
        const size_t first = (size_t)4 * (size_t)i;
        const float *of = &value[first];
        sum[i] = by ? of[0] * by[first] : of[0];
        for (size_t j = 1; j < 4; j++)
            sum[i] = by ? fmaf(of[j], by[first + j], sum[i]) : sum[i] + of[j];
    }
    for (int i = 0; i < TN__NORM_QUADS; i += 2)
        sum[i] += sum[i + 1];
    tn__norm_add_sums(sum, TN__NORM_QUADS / 2, 2);
    return sum[0];
}

/* Of what the blocks were added to. */
static inline float tn__norm_row_total(float sum[TN__NORM_ROW_SUMS]) {
    tn__norm_add_sums(sum, TN__NORM_ROW_SUMS / 2, 1);
    return sum[0];
}

#endif
