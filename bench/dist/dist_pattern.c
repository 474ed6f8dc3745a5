/* Contents to be told apart: see dist_pattern.h. */
#include "dist_pattern.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define TRY(call)                                                                                  \
    do {                                                                                           \
        tn_status try_status = (call);                                                             \
        if (try_status != TN_OK) return try_status;                                                \
    } while (0)

enum { NUMBERS = 13, BF16_BYTES = 2 };
static const size_t stage_bytes = (size_t)8 << 20; /* of each half: what is sent, what is seen */

/* ---- what is where --------------------------------------------------------------------------- */

static unsigned number_of(size_t element, int rank) {
    return (unsigned)((element * 7 + (size_t)rank * 3) % NUMBERS);
}

/* The upper half of a float: exact for whole numbers up to 256. */
static uint16_t bf16_of(unsigned number) {
    const float value = (float)number;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* A period of numbers, or of their sums, by the place modulo 13. */
static void make_period(const dist_pattern *pattern, uint16_t period[NUMBERS]) {
    for (size_t i = 0; i < NUMBERS; i++) {
        unsigned sum = pattern->kind == DIST_NUMBERS ? number_of(i, pattern->rank) : 0;
        for (int rank = 0; pattern->kind == DIST_SUMS && rank < pattern->rank_count; rank++)
            sum += number_of(i, rank);
        period[i] = bf16_of(sum);
    }
}

static void make_numbers(const dist_pattern *pattern, size_t first, uint16_t *out, size_t count) {
    uint16_t period[NUMBERS];
    make_period(pattern, period);
    size_t at = (first / BF16_BYTES) % NUMBERS;
    for (size_t i = 0; i < count; i++) {
        out[i] = period[at];
        at = at + 1 == NUMBERS ? 0 : at + 1;
    }
}

static void make_words(const dist_pattern *pattern, size_t first, uint64_t *out, size_t count) {
    const uint64_t key = (uint64_t)(pattern->rank + 1) * 0xC2B2AE3D27D4EB4Fu;
    const size_t word = first / sizeof *out;
    for (size_t i = 0; i < count; i++)
        out[i] = (uint64_t)(word + i) * 0x9E3779B97F4A7C15u ^ key;
}

static void make(const dist_pattern *pattern, size_t at, void *out, size_t bytes) {
    if (pattern->kind == DIST_WORDS)
        make_words(pattern, pattern->first + at, out, bytes / sizeof(uint64_t));
    else
        make_numbers(pattern, pattern->first + at, out, bytes / BF16_BYTES);
}

/* ---- to and from the device ------------------------------------------------------------------ */

tn_status dist_stage_open(dist_stage *stage, tn_device *device, tn_stream stream) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    void *memory = NULL;
    config.backing = TN_BACKING_PINNED;
    stage->device = device;
    stage->stream = stream;
    TRY(tn_pool_create(device, &config, &stage->pool));
    TRY(tn_alloc(stage->pool, 2 * stage_bytes, stream, NULL, &memory));
    stage->memory = memory;
    return TN_OK;
}

tn_status dist_stage_close(dist_stage *stage) {
    if (stage->memory) TRY(tn_free(stage->memory, stage->stream));
    stage->memory = NULL;
    return tn_pool_destroy(stage->pool);
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

tn_status dist_pattern_write(const dist_stage *stage, const dist_pattern *pattern, void *address,
                             size_t bytes) {
    for (size_t at = 0; at < bytes; at += stage_bytes) {
        const size_t part = least(bytes - at, stage_bytes);
        make(pattern, at, stage->memory, part);
        TRY(tn_copy(stage->device, (char *)address + at, stage->memory, part, stage->stream));
        TRY(tn_stream_synchronize(stage->device, stage->stream));
    }
    return TN_OK;
}

static tn_status tell_difference(const unsigned char *seen, const unsigned char *wanted, size_t at,
                                 size_t part) {
    size_t i = 0;
    while (i + 1 < part && seen[i] == wanted[i])
        i++;
    fprintf(stderr, "tenure-bench-dist: wrong contents: byte %zu is %02x, not %02x\n", at + i,
            seen[i], wanted[i]);
    return TN_CORRUPT_INPUT;
}

tn_status dist_pattern_check(const dist_stage *stage, const dist_pattern *pattern,
                             const void *address, size_t bytes) {
    unsigned char *wanted = stage->memory, *seen = stage->memory + stage_bytes;
    for (size_t at = 0; at < bytes; at += stage_bytes) {
        const size_t part = least(bytes - at, stage_bytes);
        TRY(tn_copy(stage->device, seen, (const char *)address + at, part, stage->stream));
        make(pattern, at, wanted, part);
        TRY(tn_stream_synchronize(stage->device, stage->stream));
        if (memcmp(seen, wanted, part) != 0) return tell_difference(seen, wanted, at, part);
    }
    return TN_OK;
}
