/* Random values of the programs, the same on every machine. */
#ifndef TENURE_RANDOM_FILL_H
#define TENURE_RANDOM_FILL_H

#include <stddef.h>
#include <stdint.h>

/* The next of a sequence (splitmix64): any state is a good start. */
uint64_t random_next(uint64_t *state);

/* `count` values of about normal distribution with mean 0 and the deviation. The bf16 ones are the
 * fp32 ones of the same seed, rounded. */
void random_fill_fp32(float *out, size_t count, float deviation, uint64_t seed);
void random_fill_bf16(uint16_t *out, size_t count, float deviation, uint64_t seed);

/* The deviation of a matrix that maps a vector of `inputs` values to one `gain` times as long. */
float random_deviation_of_gain(float gain, int64_t inputs);

#endif
