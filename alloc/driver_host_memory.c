/* Blocks of memory for the host driver: see driver_host_memory.h. */
#include "driver_host_memory.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "host_alloc.h"
#include "track.h"

/* ---- jemalloc -------------------------------------------------------------------------------- */

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

const char *tn__host_memory_why_no_arena(void) {
    pthread_once(&load_once, load_jemalloc);
    return jemalloc.mallocx ? NULL : why_no_jemalloc;
}

static int make_arena(unsigned *arena) {
    size_t bytes = sizeof *arena;
    if (tn__host_memory_why_no_arena()) return 0;
    return jemalloc.mallctl("arenas.create", arena, &bytes, NULL, 0) == 0;
}

static void destroy_arena(unsigned arena) {
    char name[64];
    snprintf(name, sizeof name, "arena.%u.destroy", arena);
    (void)jemalloc.mallctl(name, NULL, NULL, NULL, 0);
}

/* ---- mmap ------------------------------------------------------------------------------------ */

/* Maps one granule more than asked for and gives back what is outside the aligned part. */
static void *map_aligned(size_t bytes) {
    size_t total = bytes + TN__HOST_GRANULARITY;
    if (total < bytes) return NULL;
    char *start = mmap(NULL, total, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    size_t before = (size_t)(-(uintptr_t)start & (TN__HOST_GRANULARITY - 1));
    size_t after = TN__HOST_GRANULARITY - before;
    if (before) munmap(start, before);
    if (after) munmap(start + before + bytes, after);
    return start + before;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static void *system_take(const tn__host_memory *memory, size_t bytes) {
    if (!memory->has_arena) return map_aligned(bytes);
    return jemalloc.mallocx(bytes, FLAG_ALIGNMENT_2_MIB | FLAG_NO_THREAD_CACHE |
                                       FLAG_ARENA(memory->arena));
}

static void system_give(const tn__host_memory *memory, tn__host_block block) {
    TN_TRACK_ALLOC(block.address, block.bytes);
    if (memory->has_arena) {
        jemalloc.dallocx(block.address, FLAG_NO_THREAD_CACHE);
    } else {
        munmap(block.address, block.bytes);
    }
}

/* Index of the first block at or above the address. */
static size_t lower_bound(const tn__host_memory *memory, const void *address) {
    size_t low = 0, high = memory->block_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((uintptr_t)memory->blocks[middle].address < (uintptr_t)address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static tn_status make_room(tn__host_memory *memory) {
    if (memory->block_count < memory->block_capacity) return TN_OK;
    size_t capacity = memory->block_capacity ? memory->block_capacity * 2 : 16;
    tn__host_block *grown =
        tn__host_realloc(memory->blocks, memory->block_capacity, capacity, sizeof *grown);
    if (!grown) return TN_OUT_OF_HOST_MEMORY;
    memory->blocks = grown;
    memory->block_capacity = capacity;
    return TN_OK;
}

static tn_status take_locked(tn__host_memory *memory, size_t asked, size_t bytes, void **out) {
    if (bytes < asked || bytes > memory->limit - memory->used) {
        return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY,
                       "%zu bytes asked for, but the host device has %zu of %zu left: raise "
                       "TENURE_HOST_MEMORY or memory_limit_bytes",
                       asked, memory->limit - memory->used, memory->limit);
    }
    TN_TRY(make_room(memory));
    void *address = system_take(memory, bytes);
    if (!address) {
        return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY,
                       "the machine has no %zu bytes left for the host "
                       "device",
                       bytes);
    }
    size_t at = lower_bound(memory, address);
    memmove(memory->blocks + at + 1, memory->blocks + at,
            (memory->block_count - at) * sizeof *memory->blocks);
    memory->blocks[at] = (tn__host_block){address, bytes};
    memory->block_count++;
    memory->used += bytes;
    *out = address;
    return TN_OK;
}

tn_status tn__host_memory_take(tn__host_memory *memory, size_t bytes, void **out) {
    size_t granule = TN__HOST_GRANULARITY;
    size_t rounded = (bytes + granule - 1) / granule * granule;
    pthread_mutex_lock(&memory->lock);
    tn_status status = take_locked(memory, bytes, rounded, out);
    pthread_mutex_unlock(&memory->lock);
    return status;
}

tn_status tn__host_memory_give(tn__host_memory *memory, void *address) {
    tn_status status = TN_OK;
    pthread_mutex_lock(&memory->lock);
    size_t at = lower_bound(memory, address);
    if (at < memory->block_count && memory->blocks[at].address == address) {
        system_give(memory, memory->blocks[at]);
        memory->used -= memory->blocks[at].bytes;
        memory->block_count--;
        memmove(memory->blocks + at, memory->blocks + at + 1,
                (memory->block_count - at) * sizeof *memory->blocks);
    } else {
        status = TN_FAIL(TN_INVALID_ARGUMENT, "%p is no memory of this host device", address);
    }
    pthread_mutex_unlock(&memory->lock);
    return status;
}

size_t tn__host_memory_used(tn__host_memory *memory) {
    pthread_mutex_lock(&memory->lock);
    size_t used = memory->used;
    pthread_mutex_unlock(&memory->lock);
    return used;
}

void tn__host_memory_open(tn__host_memory *memory, size_t limit) {
    *memory = (tn__host_memory){.limit = limit};
    pthread_mutex_init(&memory->lock, NULL);
    memory->has_arena = make_arena(&memory->arena);
}

void tn__host_memory_use_mmap(tn__host_memory *memory) {
    TN_ASSERT(!memory->block_count);
    if (memory->has_arena) destroy_arena(memory->arena);
    memory->has_arena = 0;
}

void tn__host_memory_close(tn__host_memory *memory) {
    for (size_t i = 0; i < memory->block_count; i++)
        system_give(memory, memory->blocks[i]);
    if (memory->has_arena) destroy_arena(memory->arena);
    tn__host_free(memory->blocks);
    pthread_mutex_destroy(&memory->lock);
}
