/* What the heap placed where, in order: so that a job that repeats itself is placed as before.
 *
 * Windows (heap_windows.h) make a shape that comes back cheap, but hundreds of sizes in an order
 * that does not favour any take each other's frames for ever. Where the whole order comes back it
 * is enough to do the same again: what was free then is free now, and mapped.
 *
 *      noted    ... 4M  8M  8M  2M  6M  3M  ...  4M  8M  8M
 *                                   ^                      ^
 *                          it followed here: 2M     if 2M is asked for now, its place was there
 *
 * One position in the past is followed: as long as the requests are those that came then, it moves
 * on with them. After one that is another it is looked for nearby, where the last few requests came
 * in this order; and after some that it did not help, or while nothing is trusted, anywhere: where
 * the last 256 came in this order, or the last 8.
 *
 * What it says counts only when it is trusted: when a thousand requests, with few others between,
 * were as they had been. Each that is not takes some of the trust away. While a job is new, and has
 * not repeated itself for so long, nothing is placed by its history.
 *
 * It is a hint in each case: what lies at the place now is looked at. The memory is bounded: the
 * last TN__HISTORY_MAX placements; and if there is no host memory for so many, fewer.
 */
#ifndef TENURE_HEAP_HISTORY_H
#define TENURE_HEAP_HISTORY_H

#include <stddef.h>
#include <stdint.h>

#define TN__HISTORY_MAX    ((size_t)1 << 16)
#define TN__HISTORY_ORDERS 2

typedef struct tn__past {
    uint64_t key; /* what was asked for */
    uintptr_t address;
    struct tn__region *region; /* NULL: it is gone */
    int is_drained;            /* the threads' caches were emptied for it */
} tn__past;

typedef struct tn__history {
    tn__past *log; /* a ring */
    size_t capacity;
    uint64_t count;                     /* noted so far; the next position */
    uint32_t *last[TN__HISTORY_ORDERS]; /* by hash of a context: the position where it ended last */
    uint64_t hash[TN__HISTORY_ORDERS];  /* of the newest contexts */
    uint64_t power[TN__HISTORY_ORDERS]; /* of the base: what the oldest key of a context counts */
    uint64_t follow;                    /* the position that is expected next */
    uint32_t run;    /* requests that were as expected, with few others between */
    uint32_t others; /* in a row that were not */
    uint32_t trust;  /* 0: none */
} tn__history;

/* What was noted when the request came last; NULL if that is not known or not trusted. Is asked
 * before each request that is to be noted. The answer holds until the next note. */
const tn__past *tn__history_expect(tn__history *history, uint64_t key);

void tn__history_note(tn__history *history, const tn__past *now);

/* 1 while the job repeats itself. */
static inline int tn__history_is_trusted(const tn__history *history) { return history->trust > 0; }

/* The region goes. */
void tn__history_forget(tn__history *history, const struct tn__region *region);

void tn__history_clear(tn__history *history);

#endif
