/* Random values for the demo, the same on every machine. */
#ifndef TENURE_DEMO_FILL_H
#define TENURE_DEMO_FILL_H

#include <stddef.h>
#include <stdint.h>

/* `count` bf16 values of about normal distribution with mean 0 and the deviation. */
void demo_fill_bf16(uint16_t *out, size_t count, float deviation, uint64_t seed);

/* The deviation of a matrix that maps a vector of `inputs` values to one `gain` times as long. */
float demo_deviation_of_gain(float gain, int64_t inputs);

#endif
