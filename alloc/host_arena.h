/* jemalloc arenas of the library's own, out of libtenure-jemalloc.so: Debian's jemalloc with its
 * names made private, so that a program's malloc stays what it is.
 *
 * That library needs 2.6 KB of static TLS, which glibc has for the libraries that a program is
 * linked with, and has not for those loaded later (unless
 * GLIBC_TUNABLES=glibc.rtld.optional_static_tls=8192). So libtenure does not need it: it is loaded
 * when the first arena is opened, and where that fails there are no arenas.
 *
 * An arena gets its memory from mmap, or through extent hooks from a source, as pinned memory:
 *
 *     extent   what the source gave, and takes back, as a whole
 *     |  block  |   free   |  block  |        jemalloc splits an extent and joins its parts
 *
 * jemalloc never joins two extents, and keeps what is free until it is purged; an extent then goes
 * back if all of it is free. What is free in an extent that is not, jemalloc keeps for later blocks
 * until the arena closes.
 *
 * Not thread-safe: an arena is under its owner's lock. It must not move while it is open.
 */
#ifndef TENURE_HOST_ARENA_H
#define TENURE_HOST_ARENA_H

#include "error.h"

/* Extents are aligned to 4 KiB and their size is a multiple of that. */
typedef struct tn__extent_source {
    tn_status (*take)(void *context, size_t bytes, void **out);
    tn_status (*give)(void *context, void *address, size_t bytes);
    void *context;
} tn__extent_source;

typedef struct tn__extent {
    void *address;
    size_t bytes;
    size_t granted_bytes; /* what jemalloc got of it: its end is not, if it was not aligned */
} tn__extent;

/* jemalloc's extent_hooks_t, as its manual defines it. */
typedef struct tn__extent_hooks tn__extent_hooks;
struct tn__extent_hooks {
    void *(*alloc)(tn__extent_hooks *hooks, void *address, size_t bytes, size_t alignment,
                   _Bool *is_zero, _Bool *is_committed, unsigned arena);
    _Bool (*dalloc)(tn__extent_hooks *hooks, void *address, size_t bytes, _Bool is_committed,
                    unsigned arena);
    void (*destroy)(tn__extent_hooks *hooks, void *address, size_t bytes, _Bool is_committed,
                    unsigned arena);
    void *commit;
    void *decommit;
    void *purge_lazy;
    void *purge_forced;
    _Bool (*split)(tn__extent_hooks *hooks, void *address, size_t bytes, size_t first_bytes,
                   size_t second_bytes, _Bool is_committed, unsigned arena);
    _Bool (*merge)(tn__extent_hooks *hooks, void *first, size_t first_bytes, void *second,
                   size_t second_bytes, _Bool is_committed, unsigned arena);
};

typedef struct tn__host_arena {
    tn__extent_hooks hooks;
    tn__extent_source source; /* take is NULL: mmap */
    tn__extent *extents;      /* of the source, in no order */
    size_t extent_count;
    size_t extent_capacity;
    size_t extent_bytes; /* sum */
    tn_status status;    /* of the source's last failure in a hook */
    unsigned index;
    int is_open;
    int has_slack; /* the source has been seen to align to less than jemalloc wants */
} tn__host_arena;

/* Why there are no arenas, in words; NULL if there are. */
const char *tn__host_arena_why_none(void);

/* source may be NULL. 0 if there are no arenas. */
int tn__host_arena_open(tn__host_arena *arena, const tn__extent_source *source);

/* What jemalloc makes of a size: give it such sizes, and nothing is wasted. */
size_t tn__host_arena_round(size_t bytes);

/* Aligned to 2 MiB. The source's status, or TN_OUT_OF_DEVICE_MEMORY. */
tn_status tn__host_arena_take(tn__host_arena *arena, size_t bytes, void **out);
void tn__host_arena_give(tn__host_arena *arena, void *address);

/* Gives back what is free, as far as it is whole extents. */
void tn__host_arena_purge(tn__host_arena *arena);

/* No block may be in use. On failure some extents are left: it can be closed again. */
tn_status tn__host_arena_close(tn__host_arena *arena);

#endif
