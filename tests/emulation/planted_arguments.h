/* What the planted kernels take. */
#ifndef TENURE_PLANTED_ARGUMENTS_H
#define TENURE_PLANTED_ARGUMENTS_H

#include <stdint.h>

enum { PLANTED_THREADS = 64, PLANTED_TILE = 64 };

typedef struct tn__planted_arguments {
    const uint32_t *in;
    uint32_t *out;
    int64_t count;
} tn__planted_arguments;

#endif
