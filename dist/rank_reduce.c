/* Reductions in the order of ranks: see rank_reduce.h.
 *
 * Every rank's contribution is here before the first is added, so that neither the count of
 * ranks' messages nor their order of arrival shows in the result: the sum is
 * ((r0 + r1) + r2) + ..., the same bits on every rank and in every run.
 */
#include "rank_reduce.h"

#include "host_number.h"

static float combine(tn_reduce reduce, float sum, float value) {
    if (reduce == TN_REDUCE_SUM) return sum + value;
    if (sum != sum) return value; /* NaN gives way to any other value */
    return value > sum ? value : sum;
}

static float reduce_fp32(tn_reduce reduce, const char *at, size_t row_bytes, int row_count) {
    float sum, value;
    memcpy(&sum, at, sizeof sum);
    for (int row = 1; row < row_count; row++) {
        memcpy(&value, at + (size_t)row * row_bytes, sizeof value);
        sum = combine(reduce, sum, value);
    }
    return sum;
}

static float reduce_bf16(tn_reduce reduce, const char *at, size_t row_bytes, int row_count) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    float sum = tn__bf16_to_float(bits);
    for (int row = 1; row < row_count; row++) {
        memcpy(&bits, at + (size_t)row * row_bytes, sizeof bits);
        sum = combine(reduce, sum, tn__bf16_to_float(bits));
    }
    return sum;
}

void tn__reduce_rows(tn_dtype dtype, tn_reduce reduce, const void *rows, size_t row_bytes,
                     int row_count, size_t count, void *out) {
    const char *at = rows;
    if (dtype == TN_FP32) {
        float *results = out;
        for (size_t i = 0; i < count; i++)
            results[i] = reduce_fp32(reduce, at + i * sizeof(float), row_bytes, row_count);
        return;
    }
    uint16_t *results = out;
    for (size_t i = 0; i < count; i++)
        results[i] =
            tn__float_to_bf16(reduce_bf16(reduce, at + i * sizeof(uint16_t), row_bytes, row_count));
}
