/* What fuzz tests share: numbers from a seed, settings that replay a failure, mutated inputs. */
#ifndef TENURE_FUZZ_SUPPORT_H
#define TENURE_FUZZ_SUPPORT_H

#include "test_support.h"

uint64_t fuzz_next(uint64_t *state);

/* 0 below 0. */
size_t fuzz_below(uint64_t *state, size_t bound);

/* TENURE_FUZZ_SEED, TENURE_FUZZ_FIRST, TENURE_FUZZ_COUNT. */
uint64_t fuzz_setting(const char *variable, uint64_t otherwise);

/* Fails with how to replay it. */
void fuzz_expect(int holds, const char *what, uint64_t seed, uint64_t number);

enum { FUZZ_INPUT_BYTES_MAX = 32 * 1024 };

typedef struct fuzz_input {
    size_t length;
    unsigned char bytes[FUZZ_INPUT_BYTES_MAX];
} fuzz_input;

/* A whole file. */
void fuzz_input_load(fuzz_input *input, const char *path);

/* Puts `length` bytes in the place of `removed` ones at `at`, if there is room. */
void fuzz_input_replace(fuzz_input *input, size_t at, size_t removed, const void *bytes,
                        size_t length);

#endif
