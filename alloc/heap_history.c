/* Placements by history: see heap_history.h. */
#include "heap_history.h"

#include "host_alloc.h"

#define CAPACITY_FIRST 1024
#define NEAR_MAX       32   /* positions around the one that is followed */
#define AGREED_LEAST   4    /* requests in the same order that make a position */
#define AGREED_MAX     32   /* that are counted */
#define TRUST_FULL     4096 /* when it is gained */
#define TRUST_LOST     16   /* by a request that is another than expected */
#define RUN_LOST       32
#define NOWHERE        UINT64_MAX

/* RUN: requests that are as expected, until the history is trusted; one that is not takes RUN_LOST
 * off. OTHERS_MAX: requests in a row that are not, for which nearby is enough. CONTEXTS: their
 * lengths, longest first. One build of the simulation is eager, so that its random programs are
 * placed by their history (cmake/simulation.cmake). */
#ifdef TENURE_HISTORY_EAGER
#define RUN        1
#define OTHERS_MAX 1
#define CONTEXTS                                                                                   \
    { 2, 1 }
#else
#define RUN        1000
#define OTHERS_MAX 32
#define CONTEXTS                                                                                   \
    { 256, 8 }
#endif
static const uint32_t order_length[TN__HISTORY_ORDERS] = CONTEXTS; /* powers of two */

/* The hash of a context: the sum of its keys' hashes times powers of BASE, so that the next is had
 * from the one before. */
#define BASE ((uint64_t)0x9E3779B97F4A7C15u)

static uint64_t mix(uint64_t value) {
    value *= 0xD6E8FEB86659FD93u;
    value ^= value >> 32;
    value *= 0xD6E8FEB86659FD93u;
    return value ^ (value >> 32);
}

static uint64_t base_power(uint32_t exponent) { /* a power of two */
    uint64_t power = BASE;
    for (; exponent > 1; exponent /= 2)
        power *= power;
    return power;
}

static tn__past *past_at(const tn__history *history, uint64_t position) {
    return &history->log[position & (history->capacity - 1)];
}

static int is_noted(const tn__history *history, uint64_t position, uint64_t key) {
    return position < history->count && history->count - position <= history->capacity &&
           past_at(history, position)->key == key;
}

/* ---- contexts -------------------------------------------------------------------------------- */

/* The hash of the context that ends with the key at the position, of which `mixed` is the hash. */
static uint64_t next_hash(const tn__history *history, int order, uint64_t position,
                          uint64_t mixed) {
    uint32_t length = order_length[order];
    uint64_t hash = history->hash[order] * BASE + mixed;
    if (position < length) return hash;
    return hash - history->power[order] * mix(past_at(history, position - length)->key);
}

static uint32_t *last_slot(const tn__history *history, int order, uint64_t hash) {
    return &history->last[order][mix(hash) & (history->capacity - 1)];
}

static void remember_contexts(tn__history *history, uint64_t position) {
    uint64_t mixed = mix(past_at(history, position)->key);
    for (int order = 0; order < TN__HISTORY_ORDERS; order++) {
        history->hash[order] = next_hash(history, order, position, mixed);
        *last_slot(history, order, history->hash[order]) = (uint32_t)position;
    }
}

/* How many of the newest requests, up to a few, are as those before the position. */
static int agreement(const tn__history *history, uint64_t position) {
    int agreed = 0;
    while (agreed < AGREED_MAX && (uint64_t)agreed < position) {
        uint64_t key = past_at(history, history->count - 1 - (uint64_t)agreed)->key;
        if (!is_noted(history, position - 1 - (uint64_t)agreed, key)) break;
        agreed++;
    }
    return agreed;
}

/* Where the context that the key completes ended last. Others may have the same hash: the end of it
 * is looked at. */
static uint64_t find_context(const tn__history *history, int order, uint64_t key) {
    uint64_t hash = next_hash(history, order, history->count, mix(key));
    uint32_t last = *last_slot(history, order, hash);
    uint64_t position = history->count - (uint32_t)((uint32_t)history->count - last);
    int least =
        (int)order_length[order] - 1 < AGREED_MAX ? (int)order_length[order] - 1 : AGREED_MAX;
    if (!is_noted(history, position, key)) return NOWHERE;
    return agreement(history, position) >= least ? position : NOWHERE;
}

/* Where the last few requests came in this order, near the position that is followed: some may have
 * been left out, or come in between. */
static uint64_t find_near(const tn__history *history, uint64_t key) {
    uint64_t position = history->follow > NEAR_MAX ? history->follow - NEAR_MAX : 0;
    uint64_t end = history->follow + NEAR_MAX;
    uint64_t found = NOWHERE;
    int most = AGREED_LEAST - 1;
    for (; position < end; position++) {
        int agreed = is_noted(history, position, key) ? agreement(history, position) : 0;
        if (agreed <= most) continue;
        most = agreed;
        found = position;
    }
    return found;
}

/* While the history is trusted, a few other requests are no reason to look far. */
static uint64_t find_position(const tn__history *history, uint64_t key) {
    uint64_t position = find_near(history, key);
    if (position != NOWHERE) return position;
    if (history->trust > 0 && history->others < OTHERS_MAX) return NOWHERE;
    for (int order = 0; order < TN__HISTORY_ORDERS && position == NOWHERE; order++)
        position = find_context(history, order, key);
    return position;
}

/* ---- growing --------------------------------------------------------------------------------- */

static void free_tables(uint32_t *const tables[TN__HISTORY_ORDERS]) {
    for (int order = 0; order < TN__HISTORY_ORDERS; order++)
        tn__host_free(tables[order]);
}

/* Room for twice as many, as long as nothing was overwritten; without memory for that, nothing
 * changes. */
static void grow(tn__history *history) {
    size_t capacity = history->capacity ? 2 * history->capacity : CAPACITY_FIRST;
    uint32_t *tables[TN__HISTORY_ORDERS] = {NULL};
    tn__past *log = NULL;
    int is_complete = 1;
    if (history->count != history->capacity || capacity > TN__HISTORY_MAX) return;
    tn__error_scope_begin();
    for (int order = 0; order < TN__HISTORY_ORDERS; order++) {
        tables[order] = tn__host_alloc(capacity, sizeof *tables[order]);
        is_complete &= tables[order] != NULL;
    }
    if (is_complete) {
        log = tn__host_realloc(history->log, history->capacity, capacity, sizeof *log);
    }
    (void)tn__error_scope_end(TN_OK);
    if (!log) {
        free_tables(tables);
        return;
    }
    free_tables(history->last);
    history->log = log;
    history->capacity = capacity;
    for (int order = 0; order < TN__HISTORY_ORDERS; order++) {
        history->last[order] = tables[order];
        history->hash[order] = 0;
        history->power[order] = base_power(order_length[order]);
    }
    for (uint64_t position = 0; position < history->count; position++)
        remember_contexts(history, position);
}

/* ---- use ------------------------------------------------------------------------------------- */

static void gain_trust(tn__history *history) {
    if (history->run < RUN) history->run++;
    if (history->trust == 0 && history->run == RUN) {
        history->trust = TRUST_FULL;
    } else if (history->trust > 0 && history->trust < TRUST_FULL) {
        history->trust++;
    }
}

const tn__past *tn__history_expect(tn__history *history, uint64_t key) {
    if (history->count == 0) return NULL;
    if (is_noted(history, history->follow, key)) {
        history->others = 0;
        gain_trust(history);
    } else {
        uint64_t position = find_position(history, key);
        history->others++;
        history->run -= history->run < RUN_LOST ? history->run : RUN_LOST;
        history->trust -= history->trust < TRUST_LOST ? history->trust : TRUST_LOST;
        if (position == NOWHERE) return NULL;
        history->follow = position;
    }
    return history->trust > 0 ? past_at(history, history->follow) : NULL;
}

void tn__history_note(tn__history *history, const tn__past *now) {
    grow(history);
    if (history->capacity == 0) return;
    if (is_noted(history, history->follow, now->key)) history->follow++;
    *past_at(history, history->count) = *now;
    remember_contexts(history, history->count);
    history->count++;
}

void tn__history_forget(tn__history *history, const struct tn__region *region) {
    size_t noted = history->count < history->capacity ? history->count : history->capacity;
    for (size_t i = 0; i < noted; i++) {
        if (history->log[i].region == region) history->log[i].region = NULL;
    }
}

void tn__history_clear(tn__history *history) {
    tn__host_free(history->log);
    free_tables(history->last);
    *history = (tn__history){0};
}
