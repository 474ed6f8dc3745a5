/* The middle of a few times: what a tuning goes by, as one round that something else on the device
 * took part in does not move it.
 */
#ifndef TENURE_TIME_MEDIAN_H
#define TENURE_TIME_MEDIAN_H

enum { TN__MEDIAN_MAX = 16 };

/* Of 1 to TN__MEDIAN_MAX values; the larger of two in the middle. */
static inline double tn__median(const double *values, int count) {
    double sorted[TN__MEDIAN_MAX] = {0.0};
    for (int i = 0; i < count; i++) {
        int at = i;
        for (; at > 0 && sorted[at - 1] > values[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = values[i];
    }
    return sorted[count / 2];
}

#endif
