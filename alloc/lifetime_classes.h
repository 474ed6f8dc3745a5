/* How long blocks live, learned from those before: so that long-lived and short-lived blocks can
 * be kept in zones of their own.
 *
 * The clock counts allocated bytes: it runs as fast as memory is turned over, whatever the host or
 * the device does. Blocks of one class (the same rounded size, owner and call site) are expected to
 * live as long as those before did, and as those that are live have lived so far: a gradient is
 * known by the weight of the same size that lies there since the start.
 *
 *     expected = mean(lifetimes of the last freed ones, ages of the live ones)
 *
 * A class is long-lived from when that exceeds a bound that the heap gives, until it falls below
 * half of it: a class that changes its zone has to find memory there.
 *
 * Memory is bounded: a table of fixed size, classes that share a slot are one class.
 */
#ifndef TENURE_LIFETIME_CLASSES_H
#define TENURE_LIFETIME_CLASSES_H

#include <stddef.h>
#include <stdint.h>

#define TN__LIFETIME_SLOTS 2048

typedef struct tn__lifetime_class {
    uint32_t live_count;
    uint32_t freed_count; /* up to a limit: the weight of freed_mean */
    uint64_t born_sum;    /* of the live ones, on the clock; modulo 2^64 */
    double freed_mean;    /* of lifetimes; recent ones weigh more */
    int is_long;
} tn__lifetime_class;

typedef struct tn__lifetimes {
    tn__lifetime_class classes[TN__LIFETIME_SLOTS];
    uint64_t clock; /* bytes allocated so far */
} tn__lifetimes;

uint32_t tn__lifetime_slot(size_t bytes, const char *owner, const char *site);

/* 1 if a new block of the class is expected to live for at least about that many bytes of the
 * clock. */
int tn__lifetime_is_long(tn__lifetimes *lifetimes, uint32_t slot, uint64_t bound_bytes);

/* A block of the class is allocated; gives its birth, to be handed in when it is freed. */
uint64_t tn__lifetime_begin(tn__lifetimes *lifetimes, uint32_t slot, size_t bytes);
void tn__lifetime_end(tn__lifetimes *lifetimes, uint32_t slot, uint64_t born);

#endif
