/* Values of ranks: see rank_values_support.h. */
#include "rank_values_support.h"

#include <math.h>
#include <string.h>

/* ---- blocks --------------------------------------------------------------------------------- */

void *ranks_take(const rank_fixture *ranks, size_t bytes) {
    return test_take(ranks->pool, bytes, ranks->stream);
}

void ranks_give(const rank_fixture *ranks, void *block) {
    test_give(ranks->pool, block, ranks->stream);
}

void ranks_put(const rank_fixture *ranks, void *block, const void *data, size_t bytes) {
    EXPECT_OK(tn_copy(ranks->device, block, data, bytes, ranks->stream));
}

void ranks_get(const rank_fixture *ranks, void *data, const void *block, size_t bytes) {
    EXPECT_OK(tn_copy(ranks->device, data, block, bytes, ranks->stream));
    ranks_wait(ranks);
}

/* ---- values --------------------------------------------------------------------------------- */

unsigned char ranks_byte(int rank, size_t at) {
    return (unsigned char)(at * 31 + at / 251 + (size_t)rank * 67 + 5);
}

void ranks_fill_bytes(unsigned char *data, int rank, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        data[i] = ranks_byte(rank, i);
}

float ranks_number(int rank, size_t at) {
    uint32_t mixed = (uint32_t)at * 2654435761u + (uint32_t)rank * 40503u + 12345u;
    mixed ^= mixed >> 13;
    mixed *= 2246822519u;
    float fraction = 1.0f + (float)(mixed & 0xFFFF) / 65536.0f;
    float value = ldexpf(fraction, (int)(mixed >> 16) % 41 - 20);
    return mixed & 0x80000000u ? -value : value;
}

float ranks_widen(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Round to nearest even by comparing with the two neighbours. */
uint16_t ranks_narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t down = (uint16_t)(bits >> 16);
    uint32_t rest = bits & 0xFFFF;
    return (uint16_t)(down + (rest > 0x8000 || (rest == 0x8000 && (down & 1))));
}

void ranks_store(void *data, size_t at, tn_dtype dtype, float value) {
    if (dtype == TN_FP32)
        ((float *)data)[at] = value;
    else
        ((uint16_t *)data)[at] = ranks_narrow(value);
}

static float input(tn_dtype dtype, int rank, size_t at) {
    float value = ranks_number(rank, at);
    return dtype == TN_FP32 ? value : ranks_widen(ranks_narrow(value));
}

float ranks_reduced(const rank_fixture *ranks, tn_dtype dtype, tn_reduce reduce, size_t at) {
    float result = input(dtype, 0, at);
    for (int rank = 1; rank < ranks->count; rank++) {
        float value = input(dtype, rank, at);
        if (reduce == TN_REDUCE_SUM)
            result += value;
        else if (value > result)
            result = value;
    }
    return result;
}

static float load(const void *data, size_t at, tn_dtype dtype) {
    return dtype == TN_FP32 ? ((const float *)data)[at] : ranks_widen(((const uint16_t *)data)[at]);
}

/* n - 1 sums, each of which is rounded by at most half a unit of its last place, and so is the
 * expected one. */
static float bound_of_sums(const rank_fixture *ranks, tn_dtype dtype, size_t at) {
    float magnitudes = 0.0f, unit = dtype == TN_FP32 ? 0x1p-23f : 0x1p-8f;
    for (int rank = 0; rank < ranks->count; rank++)
        magnitudes += fabsf(input(dtype, rank, at));
    return (float)ranks->count * unit * magnitudes;
}

float ranks_reduced_as(const rank_fixture *ranks, tn_dtype dtype, tn_reduce reduce, size_t at,
                       const void *seen, size_t seen_at) {
    float expected = ranks_reduced(ranks, dtype, reduce, at), value = load(seen, seen_at, dtype);
    if (reduce == TN_REDUCE_MAX || ranks_sum_in_order(ranks)) return expected;
    return fabsf(value - expected) <= bound_of_sums(ranks, dtype, at) ? value : expected;
}
