/* Random values: splitmix64, and a sum of uniform values for the bell shape. */
#include "random_fill.h"

#include <math.h>
#include <string.h>

uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* Four uniform 16-bit values: variance 4/12 of their span's square. */
static float next_normal(uint64_t *state, float scale) {
    uint64_t r = random_next(state);
    int32_t sum = (int32_t)(r & 0xffff) + (int32_t)((r >> 16) & 0xffff) +
                  (int32_t)((r >> 32) & 0xffff) + (int32_t)(r >> 48) - 2 * 65535;
    return (float)sum * scale;
}

static uint64_t first_state(uint64_t seed) { return seed * 0x2545f4914f6cdd1du + 1; }

static float scale_of(float deviation) { return deviation * sqrtf(3.0f) / 65536.0f; }

void random_fill_fp32(float *out, size_t count, float deviation, uint64_t seed) {
    uint64_t state = first_state(seed);
    for (size_t i = 0; i < count; i++)
        out[i] = next_normal(&state, scale_of(deviation));
}

void random_fill_bf16(uint16_t *out, size_t count, float deviation, uint64_t seed) {
    uint64_t state = first_state(seed);
    for (size_t i = 0; i < count; i++)
        out[i] = to_bf16(next_normal(&state, scale_of(deviation)));
}

float random_deviation_of_gain(float gain, int64_t inputs) { return gain / sqrtf((float)inputs); }
