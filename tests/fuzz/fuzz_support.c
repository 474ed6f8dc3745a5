/* Numbers, settings and inputs of fuzz tests: see fuzz_support.h. */
#include "fuzz_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t fuzz_next(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

size_t fuzz_below(uint64_t *state, size_t bound) {
    return bound ? (size_t)(fuzz_next(state) % bound) : 0;
}

uint64_t fuzz_setting(const char *variable, uint64_t otherwise) {
    const char *text = getenv(variable);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

void fuzz_expect(int holds, const char *what, uint64_t seed, uint64_t number) {
    if (!holds)
        fail_msg("%s; replay with TENURE_FUZZ_SEED=%llu TENURE_FUZZ_FIRST=%llu", what,
                 (unsigned long long)seed, (unsigned long long)number);
}

void fuzz_input_load(fuzz_input *input, const char *path) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    input->length = fread(input->bytes, 1, FUZZ_INPUT_BYTES_MAX, file);
    assert_int_equal(fgetc(file), EOF);
    fclose(file);
}

void fuzz_input_replace(fuzz_input *input, size_t at, size_t removed, const void *bytes,
                        size_t length) {
    const size_t tail = input->length - at - removed;
    if (at + length + tail > FUZZ_INPUT_BYTES_MAX) return;
    memmove(input->bytes + at + length, input->bytes + at + removed, tail);
    memcpy(input->bytes + at, bytes, length);
    input->length = at + length + tail;
}
