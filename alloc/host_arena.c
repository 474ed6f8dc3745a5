/* jemalloc's arenas and their extent hooks: see host_arena.h. */
#include "host_arena.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>

#include "host_alloc.h"

#define JEMALLOC_LIBRARY "libtenure-jemalloc.so"

/* The flags of jemalloc's mallocx, as its manual defines them. */
#define FLAG_ALIGNMENT_2_MIB 21
#define FLAG_NO_THREAD_CACHE 0x100
#define FLAG_ARENA(index)    ((int)((index) + 1) << 20)

typedef struct jemalloc_calls {
    void *(*mallocx)(size_t bytes, int flags);
    void (*dallocx)(void *address, int flags);
    int (*mallctl)(const char *name, void *old, size_t *old_bytes, void *value, size_t bytes);
} jemalloc_calls;

static jemalloc_calls jemalloc;
static char why_no_jemalloc[512];
static pthread_once_t load_once = PTHREAD_ONCE_INIT;

/* ---- the library ----------------------------------------------------------------------------- */

/* Never unloaded: its threads' caches end after us. */
static void load_jemalloc(void) {
    void *library = dlopen(JEMALLOC_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        snprintf(why_no_jemalloc, sizeof why_no_jemalloc,
                 "%s (link the program with it, or set "
                 "GLIBC_TUNABLES=glibc.rtld.optional_static_tls=8192)",
                 reason ? reason : JEMALLOC_LIBRARY " can not be loaded");
        return;
    }
    *(void **)&jemalloc.dallocx = dlsym(library, "tn__je_dallocx");
    *(void **)&jemalloc.mallctl = dlsym(library, "tn__je_mallctl");
    *(void **)&jemalloc.mallocx = dlsym(library, "tn__je_mallocx");
    if (!jemalloc.dallocx || !jemalloc.mallctl || !jemalloc.mallocx) {
        jemalloc = (jemalloc_calls){NULL, NULL, NULL};
        snprintf(why_no_jemalloc, sizeof why_no_jemalloc, "%s lacks a symbol", JEMALLOC_LIBRARY);
    }
}

const char *tn__host_arena_why_none(void) {
    pthread_once(&load_once, load_jemalloc);
    return jemalloc.mallocx ? NULL : why_no_jemalloc;
}

static int control(const tn__host_arena *arena, const char *what, void *value, size_t bytes) {
    char name[64];
    snprintf(name, sizeof name, "arena.%u.%s", arena->index, what);
    return jemalloc.mallctl(name, NULL, NULL, value, bytes) == 0;
}

/* ---- extent hooks ---------------------------------------------------------------------------- */

/* The hooks are the arena's first member. */
static tn__host_arena *arena_of(tn__extent_hooks *hooks) { return (tn__host_arena *)hooks; }

static tn__extent *find_extent(const tn__host_arena *arena, const void *address) {
    for (size_t i = 0; i < arena->extent_count; i++) {
        uintptr_t offset = (uintptr_t)address - (uintptr_t)arena->extents[i].address;
        if (offset < arena->extents[i].bytes) return &arena->extents[i];
    }
    return NULL;
}

static tn_status make_extent_room(tn__host_arena *arena) {
    size_t capacity = arena->extent_capacity ? 2 * arena->extent_capacity : 16;
    tn__extent *grown;
    if (arena->extent_count < arena->extent_capacity) return TN_OK;
    grown = tn__host_realloc(arena->extents, arena->extent_capacity, capacity, sizeof *grown);
    if (!grown) return TN_OUT_OF_HOST_MEMORY;
    arena->extents = grown;
    arena->extent_capacity = capacity;
    return TN_OK;
}

static tn_status take_extent(tn__host_arena *arena, size_t bytes, size_t slack, tn__extent **out) {
    void *address = NULL;
    if (bytes + slack < bytes) return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY, "%zu bytes", bytes);
    TN_TRY(make_extent_room(arena));
    TN_TRY(arena->source.take(arena->source.context, bytes + slack, &address));
    *out = &arena->extents[arena->extent_count++];
    **out = (tn__extent){address, bytes + slack, bytes};
    arena->extent_bytes += bytes + slack;
    return TN_OK;
}

static tn_status give_extent(tn__host_arena *arena, tn__extent *extent) {
    TN_TRY(arena->source.give(arena->source.context, extent->address, extent->bytes));
    arena->extent_bytes -= extent->bytes;
    *extent = arena->extents[--arena->extent_count];
    return TN_OK;
}

/* A source aligns to what it likes: if that is less than jemalloc wants, the extent is larger, and
 * jemalloc gets the aligned part of it. */
static void *hook_alloc(tn__extent_hooks *hooks, void *wanted, size_t bytes, size_t alignment,
                        _Bool *is_zero, _Bool *is_committed, unsigned index) {
    tn__host_arena *arena = arena_of(hooks);
    tn__extent *extent = NULL;
    (void)index;
    if (wanted) return NULL;
    arena->status = take_extent(arena, bytes, arena->has_slack ? alignment : 0, &extent);
    if (arena->status == TN_OK && !arena->has_slack &&
        ((uintptr_t)extent->address & (alignment - 1))) {
        arena->has_slack = 1;
        arena->status = give_extent(arena, extent);
        if (arena->status == TN_OK) arena->status = take_extent(arena, bytes, alignment, &extent);
    }
    if (arena->status != TN_OK) return NULL;
    *is_zero = 0;
    *is_committed = 1;
    return (void *)(((uintptr_t)extent->address + alignment - 1) & ~(uintptr_t)(alignment - 1));
}

/* True: jemalloc keeps it. */
static _Bool hook_dalloc(tn__extent_hooks *hooks, void *address, size_t bytes, _Bool is_committed,
                         unsigned index) {
    tn__host_arena *arena = arena_of(hooks);
    tn__extent *extent = find_extent(arena, address);
    (void)is_committed;
    (void)index;
    TN_CHECK(extent != NULL);
    if (extent->granted_bytes != bytes) return 1;
    return give_extent(arena, extent) != TN_OK;
}

/* The arena ends: its extents go back after it. */
static void hook_destroy(tn__extent_hooks *hooks, void *address, size_t bytes, _Bool is_committed,
                         unsigned index) {
    (void)hooks;
    (void)address;
    (void)bytes;
    (void)is_committed;
    (void)index;
}

static _Bool hook_split(tn__extent_hooks *hooks, void *address, size_t bytes, size_t first_bytes,
                        size_t second_bytes, _Bool is_committed, unsigned index) {
    (void)hooks;
    (void)address;
    (void)bytes;
    (void)first_bytes;
    (void)second_bytes;
    (void)is_committed;
    (void)index;
    return 0;
}

static _Bool hook_merge(tn__extent_hooks *hooks, void *first, size_t first_bytes, void *second,
                        size_t second_bytes, _Bool is_committed, unsigned index) {
    tn__host_arena *arena = arena_of(hooks);
    (void)first_bytes;
    (void)second_bytes;
    (void)is_committed;
    (void)index;
    return find_extent(arena, first) != find_extent(arena, second);
}

/* ---- arenas ---------------------------------------------------------------------------------- */

static int create_arena(tn__host_arena *arena) {
    size_t bytes = sizeof arena->index;
    return jemalloc.mallctl("arenas.create", &arena->index, &bytes, NULL, 0) == 0;
}

/* The arena's own records come from mmap, made before the hooks are set. It asks the source for no
 * more than it needs, and gives nothing back by the clock. */
static int use_source(tn__host_arena *arena) {
    tn__extent_hooks *hooks = &arena->hooks;
    size_t grow_limit = 4096;
    ssize_t never = -1;
    ssize_t at_once = 0;
    return control(arena, "extent_hooks", &hooks, sizeof hooks) &&
           control(arena, "retain_grow_limit", &grow_limit, sizeof grow_limit) &&
           control(arena, "dirty_decay_ms", &never, sizeof never) &&
           control(arena, "muzzy_decay_ms", &at_once, sizeof at_once);
}

int tn__host_arena_open(tn__host_arena *arena, const tn__extent_source *source) {
    *arena = (tn__host_arena){.hooks = {.alloc = hook_alloc,
                                        .dalloc = hook_dalloc,
                                        .destroy = hook_destroy,
                                        .split = hook_split,
                                        .merge = hook_merge}};
    if (tn__host_arena_why_none() || !create_arena(arena)) return 0;
    arena->is_open = 1;
    if (!source) return 1;
    arena->source = *source;
    if (use_source(arena)) return 1;
    (void)tn__host_arena_close(arena);
    return 0;
}

/* Four sizes to a doubling. */
size_t tn__host_arena_round(size_t bytes) {
    size_t step;
    if (bytes <= (size_t)1 << 14 || bytes > SIZE_MAX / 2) return bytes;
    step = (size_t)1 << (63 - __builtin_clzll(bytes - 1)) >> 2;
    return (bytes + step - 1) / step * step;
}

tn_status tn__host_arena_take(tn__host_arena *arena, size_t bytes, void **out) {
    const int flags = FLAG_ALIGNMENT_2_MIB | FLAG_NO_THREAD_CACHE | FLAG_ARENA(arena->index);
    void *address;
    arena->status = TN_OK;
    address = jemalloc.mallocx(bytes, flags);
    if (!address && arena->status != TN_OK) return arena->status;
    if (!address) {
        return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY, "the machine has no %zu bytes of memory left",
                       bytes);
    }
    *out = address;
    return TN_OK;
}

void tn__host_arena_give(tn__host_arena *arena, void *address) {
    (void)arena;
    jemalloc.dallocx(address, FLAG_NO_THREAD_CACHE);
}

void tn__host_arena_purge(tn__host_arena *arena) { (void)control(arena, "purge", NULL, 0); }

tn_status tn__host_arena_close(tn__host_arena *arena) {
    if (arena->is_open) (void)control(arena, "destroy", NULL, 0);
    arena->is_open = 0;
    while (arena->extent_count)
        TN_TRY(give_extent(arena, &arena->extents[arena->extent_count - 1]));
    tn__host_free(arena->extents);
    arena->extents = NULL;
    arena->extent_capacity = 0;
    return TN_OK;
}
