/* Random values for the demo: splitmix64, and a sum of uniform values for the bell shape. */
#include "demo_fill.h"

#include <math.h>
#include <string.h>

static uint64_t next_random(uint64_t *state) {
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
void demo_fill_bf16(uint16_t *out, size_t count, float deviation, uint64_t seed) {
    uint64_t state = seed * 0x2545f4914f6cdd1du + 1;
    const float scale = deviation * sqrtf(3.0f) / 65536.0f;
    for (size_t i = 0; i < count; i++) {
        uint64_t r = next_random(&state);
        int32_t sum = (int32_t)(r & 0xffff) + (int32_t)((r >> 16) & 0xffff) +
                      (int32_t)((r >> 32) & 0xffff) + (int32_t)(r >> 48) - 2 * 65535;
        out[i] = to_bf16((float)sum * scale);
    }
}

float demo_deviation_of_gain(float gain, int64_t inputs) { return gain / sqrtf((float)inputs); }
