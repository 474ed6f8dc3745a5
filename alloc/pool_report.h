/* What a pool says of itself, in words and as JSON.
 *
 *   pool_stats.c    the statistics: filled, summed, written; tn_pool_check
 *   pool_owners.c   live blocks summed by owner and call site; the report of a leak
 *   pool_report.c   tn_pool_report, fragmentation, the report of a shortage
 *   pool_snapshot.c the map of a pool: every piece
 *
 * Everything here is called with the pool's mutex held and allocates nothing, so that a report can
 * be made where memory has just run out.
 */
#ifndef TENURE_POOL_REPORT_H
#define TENURE_POOL_REPORT_H

#include "tenure_pool.h"
#include "text_sink.h"

/* ---- statistics ----------------------------------------------------------------------------- */

/* tn_pool_stats_get for those who hold the mutex. */
void tn__pool_fill_stats(tn_pool *pool, tn_pool_stats *out);

/* The sum of the PARTs: reserved_bytes, or the books do not balance. */
size_t tn__stats_parts(const tn_pool_stats *stats);

void tn__pool_note_peaks(tn_pool *pool);

/* The rows of the table as lines of text, or as the members of a JSON object. */
void tn__stats_write_text(tn__text *out, const tn_pool_stats *stats);
void tn__stats_write_json(tn__text *out, const tn_pool_stats *stats, const char *indent);

/* With TENURE_VERBOSE: the statistics on standard error, each of what must be 0 once all is given
 * back with "ok" or "not all freed". */
void tn__pool_print_end(struct tn_pool *pool, const char *when);

/* ---- owners --------------------------------------------------------------------------------- */

#define TN__OWNERS_MAX   512 /* told apart; blocks of further ones are added up as "others" */
#define TN__OWNERS_SHOWN 5   /* in the text of a failure */

typedef struct tn__owner_sum {
    const char *owner; /* as the caller gave it: NULL for none */
    const char *site;
    size_t bytes;
    size_t blocks;
    uint64_t oldest_age; /* operations of the pool since the oldest of the blocks was made */
} tn__owner_sum;

typedef struct tn__owners {
    size_t count;
    tn__owner_sum sums[TN__OWNERS_MAX]; /* most bytes first */
} tn__owners;

void tn__owners_gather(tn_pool *pool, tn__owners *out);

/* "owner (site): N bytes in M blocks, ..." of the first ones, and how many more there are. At most
 * `most` of them, and no more than leave the text below `most_bytes`; with the age of the oldest
 * block of each if with_ages is not 0. */
void tn__owners_write_line(tn__text *out, const tn__owners *owners, size_t most, size_t most_bytes,
                           int with_ages);
void tn__owners_write_text(tn__text *out, const tn__owners *owners);
void tn__owners_write_json(tn__text *out, const tn__owners *owners, const char *indent);

/* Records what is still live; gives TN_LEAK. */
tn_status tn__pool_report_leak(tn_pool *pool);

/* ---- parts of more than one report ---------------------------------------------------------- */

/* "{" and the members that say which pool it is; the last without a comma behind it. */
void tn__pool_write_json_head(tn__text *out, const struct tn_pool *pool, const char *format);

/* The items of a JSON list. */
void tn__streams_write_json(tn__text *out, const struct tn_pool *pool, const char *indent);

/* ---- shortage ------------------------------------------------------------------------------- */

/* The last request that could not be served, as things stood then. */
typedef struct tn__shortage {
    size_t asked_bytes; /* 0: there was none */
    size_t device_free_bytes;
    size_t device_total_bytes;
    size_t largest_hole_bytes;
    size_t process_limit_bytes; /* SIZE_MAX: none */
    size_t process_reserved_bytes;
    tn_pool_stats stats;
    const char *hint; /* one that is true of this failure */
} tn__shortage;

/* Records the report of a request that could not be served; gives TN_OUT_OF_DEVICE_MEMORY. */
tn_status tn__pool_report_shortage(tn_pool *pool, size_t asked_bytes);

#endif
