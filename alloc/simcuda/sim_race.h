/* Race detection: which work touched which physical memory, and what that work happens before.
 *
 * Each handle has a shadow: for every stretch of it the last write, and the last read by each
 * stream since. New work that touches a stretch must happen after the last write, and if it
 * writes, after all those reads; what does not is a race, kept in words with the host stack of
 * both submissions. The shadow belongs to the handle and not to an address: the same memory at
 * two addresses is the same memory.
 *
 * An unmap needs something else: all work that went *through that address* must be known to the
 * host as complete. So mappings keep the last use by each stream.
 */
#ifndef TENURE_SIM_RACE_H
#define TENURE_SIM_RACE_H

#include "sim_clock.h"

/* Work that touched memory. epoch 0: none. */
typedef struct sim_use {
    uint32_t slot;
    uint32_t site; /* what it was, and from where the host submitted it */
    uint64_t epoch;
} sim_use;

/* The latest use by each stream. */
typedef struct sim_use_list {
    sim_use *items;
    uint32_t count;
    uint32_t capacity;
} sim_use_list;

typedef struct sim_shadow {
    struct sim_chunk *chunks; /* NULL: untouched */
    size_t chunk_count;
} sim_shadow;

struct sim_mapping;
struct sim_stream;

/* A take is checked as a write is, but touches nothing: no later work must come after it. */
typedef enum sim_access_kind { SIM_ACCESS_READ, SIM_ACCESS_WRITE, SIM_ACCESS_TAKE } sim_access_kind;

/* One piece of work, or a call of the host, that is checked against what came before. It makes
 * one race with each earlier operation that it conflicts with, however much memory they share. */
#define SIM_CONFLICTS_MAX 32
typedef struct sim_conflict {
    uint32_t slot;
    uint64_t epoch;
    uint64_t race;
} sim_conflict;

typedef struct sim_operation {
    const char *what;
    sim_use use;            /* the site of a take or a host call is taken only if it races */
    const sim_clock *known; /* what happens before it */
    uint64_t stream_id;     /* 0: the host */
    uint32_t conflict_count;
    sim_conflict conflicts[SIM_CONFLICTS_MAX];
} sim_operation;

/* Who wrote a range last, as one number: begin with zeros, and go over it by rising addresses.
 * The same whatever reads have split the range into. */
typedef struct sim_stamp {
    uint64_t hash;
    uint64_t position; /* in the range */
    sim_use last;      /* who wrote the byte before */
} sim_stamp;

/* ---- sim_race.c ------------------------------------------------------------------------------ */

/* Of work that tn__sim_stream_begin has begun. */
void tn__sim_operation_of_stream(sim_operation *operation, struct sim_stream *stream,
                                 const char *what);
void tn__sim_operation_of_take(sim_operation *operation, struct sim_stream *stream);
void tn__sim_operation_of_host(sim_operation *operation, const char *what);
/* If `earlier` does not happen before the operation, that is a race on the bytes. */
void tn__sim_check_order(sim_operation *operation, const sim_use *earlier, uint64_t address,
                         size_t bytes);
/* The host ends the mapping: everything through it must be complete, as the host knows. */
void tn__sim_check_unused(sim_operation *operation, const struct sim_mapping *mapping);

void tn__sim_races_load(void);
void tn__sim_races_reset(void);

/* ---- sim_shadow.c ---------------------------------------------------------------------------- */

/* The operation touches bytes of the mapping's handle, from offset on. */
void tn__sim_touch(sim_operation *operation, struct sim_mapping *mapping, size_t offset,
                   size_t bytes, sim_access_kind kind);
/* Goes on with the stamp over bytes of the mapping's handle, from offset on. */
void tn__sim_stamp_add(sim_stamp *stamp, const struct sim_mapping *mapping, size_t offset,
                       size_t bytes);
void tn__sim_shadow_clear(sim_shadow *shadow);
void tn__sim_use_list_put(sim_use_list *list, sim_use use);
void tn__sim_use_list_clear(sim_use_list *list);

/* ---- sim_site.c: from where the host submitted work ------------------------------------------ */

/* The site of the call that is being made; the same place and words give the same site. */
uint32_t tn__sim_site_here(const char *what);
const char *tn__sim_site_what(uint32_t site);
/* Appends the stack in words, a line a frame. */
struct sim_report;
void tn__sim_site_describe(uint32_t site, struct sim_report *report);
void tn__sim_sites_load(void);
void tn__sim_sites_reset(void);

#endif
