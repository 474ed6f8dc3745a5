/* Sums over a row in the order that gradients have: 256 sums from 0, column k goes to sum k mod 256
 * in rising order, then sums i and i + 128, i and i + 64, ..., i and i + 1. */
#ifndef TENURE_HOST_ROW_SUMS_H
#define TENURE_HOST_ROW_SUMS_H

enum { TN__HOST_ROW_SUMS = 256 };

static inline float tn__row_total(float sum[TN__HOST_ROW_SUMS]) {
    for (int half = TN__HOST_ROW_SUMS / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++)
            sum[i] += sum[i + half];
    }
    return sum[0];
}

#endif
