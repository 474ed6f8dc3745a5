/* Limits of the process: see process_limits.h.
 *
 * Invariants: both limits are SIZE_MAX where there is none; claimed <= hard, but for what was
 * claimed before the limit was set. Two threads that set limits at once may leave one of each: the
 * soft one counts only below the hard one.
 */
#include "process_limits.h"

#include <pthread.h>
#include <stdatomic.h>

#include "options.h"
#include "tenure_pool.h"

static atomic_size_t claimed;
static _Atomic uint64_t given_back; /* times */
static atomic_size_t limits[2];     /* by tn__growth */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static size_t or_none(size_t bytes) { return bytes ? bytes : SIZE_MAX; }

static void read_options(void) {
    atomic_store(&limits[TN__GROWTH_HARD], or_none(tn__options_get()->limit_bytes));
    atomic_store(&limits[TN__GROWTH_SOFT], or_none(tn__options_get()->soft_limit_bytes));
}

size_t tn__process_limit(tn__growth growth) {
    size_t hard;
    size_t own;
    pthread_once(&once, read_options);
    hard = atomic_load(&limits[TN__GROWTH_HARD]);
    own = atomic_load(&limits[growth]);
    return own < hard ? own : hard;
}

size_t tn__process_claimed(void) { return atomic_load(&claimed); }

size_t tn__process_headroom(tn__growth growth) {
    size_t limit = tn__process_limit(growth);
    size_t now = atomic_load(&claimed);
    if (limit == SIZE_MAX) return SIZE_MAX;
    return limit > now ? limit - now : 0;
}

static tn_status check_claim(size_t bytes, size_t limit, size_t now) {
    if (now <= limit && bytes <= limit - now) return TN_OK;
    return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY,
                   "%zu more bytes exceed the process's limit of %zu: all pools hold %zu", bytes,
                   limit, now);
}

/* The limit is looked at again, which may have been lowered since: whoever lowers one and then asks
 * what is claimed sees this claim, or this sees the new limit. */
tn_status tn__process_claim(size_t bytes, tn__growth growth) {
    size_t limit = tn__process_limit(growth);
    size_t now = atomic_load(&claimed);
    tn_status status;
    do {
        TN_TRY(check_claim(bytes, limit, now));
    } while (!atomic_compare_exchange_weak(&claimed, &now, now + bytes));
    status = check_claim(bytes, tn__process_limit(growth), now);
    if (status != TN_OK) tn__process_unclaim(bytes);
    return status;
}

void tn__process_unclaim(size_t bytes) {
    size_t before = atomic_fetch_sub(&claimed, bytes);
    TN_CHECK(before >= bytes);
}

void tn__process_give_back(size_t bytes) {
    tn__process_unclaim(bytes);
    atomic_fetch_add(&given_back, 1);
}

uint64_t tn__process_given_back(void) { return atomic_load(&given_back); }

/* ---- the interface --------------------------------------------------------------------------- */

tn_status tn_process_limits_set(size_t hard_bytes, size_t soft_bytes) {
    TN_REQUIRE(!soft_bytes || soft_bytes <= or_none(hard_bytes),
               "tn_process_limits_set: the soft limit %zu is above the hard limit %zu", soft_bytes,
               hard_bytes);
    pthread_once(&once, read_options);
    atomic_store(&limits[TN__GROWTH_SOFT], or_none(soft_bytes));
    atomic_store(&limits[TN__GROWTH_HARD], or_none(hard_bytes));
    return TN_OK;
}

static size_t or_zero(size_t bytes) { return bytes == SIZE_MAX ? 0 : bytes; }

tn_status tn_process_limits_get(tn_process_limits *out) {
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_process_limits_get: begin with TN_PROCESS_LIMITS_INIT");
    out->hard_bytes = or_zero(tn__process_limit(TN__GROWTH_HARD));
    out->soft_bytes = or_zero(tn__process_limit(TN__GROWTH_SOFT));
    out->reserved_bytes = tn__process_claimed();
    return TN_OK;
}
