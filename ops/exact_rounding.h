/* How fp32 is rounded to the small floats, with the same bits on the host and on every GPU: to
 * nearest, or stochastically by numbers of a counter-based generator.
 *
 *     type   sign exponent mantissa   bias   largest   smallest normal   smallest
 *     fp16      1        5       10     15     65504             2^-14       2^-24
 *     E5M2      1        5        2     15     57344             2^-14       2^-16
 *     E4M3      1        4        3      7       448              2^-6        2^-9
 *     E2M1      1        2        1      1         6              1           0.5
 *
 * A stochastic rounding adds a number to the bits behind the mantissa and cuts them off. Of a value
 * that lies x * 2^16 of 2^16 parts of the way between two neighbours, and of all 2^16 numbers, as
 * many as x * 2^16 rounded to nearest carry into the mantissa: none where the value is one of the
 * type's, so that what can be stored never changes, and the mean is the value, to 2^-17 of the gap.
 *
 * The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as
 * 1, 2, 3; SC11): a function of key and counter, so that any number is made where it is needed.
 */
#ifndef TENURE_EXACT_ROUNDING_H
#define TENURE_EXACT_ROUNDING_H

#include "exact_math.h"

/* `kept` bits of mantissa; a magnitude whose fp32 bits are `limit` or more becomes the code `most`,
 * and a NaN the code `nan`, without a sign. */
typedef struct tn__small_float {
    unsigned kept, bias;
    uint32_t limit;
    uint32_t most, nan;
    unsigned sign_bit;
} tn__small_float;

#define TN__SMALL_FLOAT(name, ...)                                                                 \
    TN__EXACT tn__small_float name(void) {                                                         \
        const tn__small_float type = {__VA_ARGS__};                                                \
        return type;                                                                               \
    }
TN__SMALL_FLOAT(tn__type_fp16, 10, 15, 0x477FF000u, 0x7C00, 0x7FFF, 15)
TN__SMALL_FLOAT(tn__type_e4m3, 3, 7, 0x43E00000u, 0x7E, 0x7F, 7)
TN__SMALL_FLOAT(tn__type_e5m2, 2, 15, 0x47600000u, 0x7B, 0x7F, 7)
TN__SMALL_FLOAT(tn__type_e2m1, 1, 1, 0x40C00000u, 7, 7, 3)

TN__EXACT int tn__is_denormal_in(tn__small_float type, uint32_t magnitude) {
    return magnitude < (128 - type.bias) << 23;
}

/* The code of a magnitude below the limit, with the sign and what is special. */
TN__EXACT uint32_t tn__small_code(tn__small_float type, uint32_t bits, uint32_t code) {
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude >= type.limit) code = type.most;
    return magnitude > 0x7F800000u ? type.nan : code | (bits >> 31) << type.sign_bit;
}

/* Ties to even. A float whose last bit is worth as much as the type's smallest denormal is the
 * anchor: adding it rounds a smaller number to a whole count of those, and the sum's low bits are
 * the count. A carry out of the mantissa goes to the exponent, as it should. */
TN__EXACT uint32_t tn__round_to_nearest(tn__small_float type, float value) {
    const uint32_t bits = tn__bits_of(value), magnitude = bits & 0x7FFFFFFFu;
    const unsigned dropped = 23 - type.kept;
    const uint32_t anchor = (151 - type.bias - type.kept) << 23;
    const uint32_t half = (1u << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1);
    const uint32_t normal = ((magnitude + half) >> dropped) - ((127 - type.bias) << type.kept);
    const uint32_t denormal = tn__bits_of(tn__float_of(magnitude) + tn__float_of(anchor)) - anchor;
    return tn__small_code(type, bits, tn__is_denormal_in(type, magnitude) ? denormal : normal);
}

/* The magnitude as a code with 23 - kept bits behind it, denormals too. */
TN__EXACT uint32_t tn__long_code(tn__small_float type, uint32_t magnitude) {
    if (!tn__is_denormal_in(type, magnitude)) return magnitude - ((127 - type.bias) << 23);
    return (uint32_t)(tn__float_of(magnitude) * tn__float_of((149 + type.bias) << 23));
}

/* `random` is of 16 bits. */
TN__EXACT uint32_t tn__round_stochastically(tn__small_float type, float value, uint32_t random) {
    const uint32_t bits = tn__bits_of(value), magnitude = bits & 0x7FFFFFFFu;
    const unsigned dropped = 23 - type.kept;
    uint32_t code = 0;
    if (magnitude < type.limit)
        code = (tn__long_code(type, magnitude) + ((2 * random + 1) << (dropped - 17))) >> dropped;
    return tn__small_code(type, bits, code);
}

/* ---- random numbers ------------------------------------------------------------------------ */

/* What a tensor of tn_quantize's `random` holds. */
typedef struct tn__random {
    uint64_t seed;
    uint64_t offset;
} tn__random;

enum { TN__PHILOX_ROUNDS = 10 };

TN__EXACT void tn__philox_round(uint32_t counter[4], uint64_t key, uint32_t round) {
    const uint64_t first = (uint64_t)0xD2511F53u * counter[0];
    const uint64_t second = (uint64_t)0xCD9E8D57u * counter[2];
    const uint32_t key_low = (uint32_t)key + round * 0x9E3779B9u;
    const uint32_t key_high = (uint32_t)(key >> 32) + round * 0xBB67AE85u;
    counter[0] = (uint32_t)(second >> 32) ^ counter[1] ^ key_low;
    counter[1] = (uint32_t)second;
    counter[2] = (uint32_t)(first >> 32) ^ counter[3] ^ key_high;
    counter[3] = (uint32_t)first;
}

/* The counter becomes the numbers. */
TN__EXACT void tn__philox(uint32_t counter[4], uint64_t key) {
    for (uint32_t round = 0; round < TN__PHILOX_ROUNDS; round++)
        tn__philox_round(counter, key, round);
}

/* Elements that one counter serves: columns 8 g ... 8 g + 7 of a row. */
enum { TN__RANDOM_GROUP = 8 };

TN__EXACT uint64_t tn__random_group_of(int64_t row, int64_t col, int64_t cols) {
    const int64_t groups = (cols + TN__RANDOM_GROUP - 1) / TN__RANDOM_GROUP;
    return (uint64_t)(row * groups + col / TN__RANDOM_GROUP);
}

/* The counter of a group. */
TN__EXACT void tn__random_begin(uint32_t words[4], tn__random state, uint64_t group) {
    words[0] = (uint32_t)group;
    words[1] = (uint32_t)(group >> 32);
    words[2] = (uint32_t)state.offset;
    words[3] = (uint32_t)(state.offset >> 32);
}

TN__EXACT void tn__random_words(tn__random state, uint64_t group, uint32_t words[4]) {
    tn__random_begin(words, state, group);
    tn__philox(words, state.seed);
}

/* The number of the group's element `i`. */
TN__EXACT uint32_t tn__random_number(const uint32_t words[4], int i) {
    return words[i / 2] >> (16 * (i % 2)) & 0xFFFFu;
}

#endif
