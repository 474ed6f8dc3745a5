/* Blocks of host memory: see driver_host_memory.h. */
#include "driver_host_memory.h"

#include <string.h>
#include <sys/mman.h>

#include "host_alloc.h"
#include "track.h"

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

static tn_status take_directly(tn__host_memory *memory, size_t bytes, void **out) {
    if (memory->source.take) return memory->source.take(memory->source.context, bytes, out);
    *out = map_aligned(bytes);
    if (*out) return TN_OK;
    return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY, "the machine has no %zu bytes of memory left", bytes);
}

static tn_status give_directly(tn__host_memory *memory, const tn__host_block *block) {
    if (memory->source.give) {
        return memory->source.give(memory->source.context, block->address, block->bytes);
    }
    munmap(block->address, block->bytes);
    return TN_OK;
}

/* jemalloc has fewer sizes: where its next one is too much, the exact one may not be. */
static tn_status system_take(tn__host_memory *memory, tn__host_block *out) {
    if (memory->arena.is_open) {
        tn_status status = tn__host_arena_take(&memory->arena, out->bytes, &out->address);
        int is_exact = tn__host_arena_round(out->bytes) == out->bytes;
        if (status != TN_OUT_OF_DEVICE_MEMORY || is_exact) return status;
    }
    TN_TRY(take_directly(memory, out->bytes, &out->address));
    out->is_direct = 1;
    memory->direct_bytes += out->bytes;
    return TN_OK;
}

static tn_status system_give(tn__host_memory *memory, const tn__host_block *block) {
    TN_TRACK_ALLOC(block->address, block->bytes);
    if (!block->is_direct) {
        tn__host_arena_give(&memory->arena, block->address);
        return TN_OK;
    }
    TN_TRY(give_directly(memory, block));
    memory->direct_bytes -= block->bytes;
    return TN_OK;
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
    tn__host_block block = {.bytes = bytes};
    TN_TRY(system_take(memory, &block));
    size_t at = lower_bound(memory, block.address);
    memmove(memory->blocks + at + 1, memory->blocks + at,
            (memory->block_count - at) * sizeof *memory->blocks);
    memory->blocks[at] = block;
    memory->block_count++;
    memory->used += bytes;
    *out = block.address;
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

static tn_status give_locked(tn__host_memory *memory, size_t at) {
    tn__host_block block = memory->blocks[at];
    TN_TRY(system_give(memory, &block));
    memory->used -= block.bytes;
    memory->block_count--;
    memmove(memory->blocks + at, memory->blocks + at + 1,
            (memory->block_count - at) * sizeof *memory->blocks);
    return TN_OK;
}

tn_status tn__host_memory_give(tn__host_memory *memory, void *address) {
    tn_status status;
    pthread_mutex_lock(&memory->lock);
    size_t at = lower_bound(memory, address);
    if (at < memory->block_count && memory->blocks[at].address == address) {
        status = give_locked(memory, at);
    } else {
        status = TN_FAIL(TN_INVALID_ARGUMENT, "%p is no memory of this host device", address);
    }
    pthread_mutex_unlock(&memory->lock);
    return status;
}

void tn__host_memory_purge(tn__host_memory *memory) {
    pthread_mutex_lock(&memory->lock);
    if (memory->arena.is_open) tn__host_arena_purge(&memory->arena);
    pthread_mutex_unlock(&memory->lock);
}

size_t tn__host_memory_used(tn__host_memory *memory) {
    pthread_mutex_lock(&memory->lock);
    size_t used = memory->used;
    pthread_mutex_unlock(&memory->lock);
    return used;
}

size_t tn__host_memory_held(const tn__host_memory *memory) {
    return memory->arena.extent_bytes + memory->direct_bytes;
}

/* What a failure leaves, the next reset or the close gives back; until then there is no arena. */
tn_status tn__host_memory_reset(tn__host_memory *memory) {
    tn_status status;
    pthread_mutex_lock(&memory->lock);
    TN_ASSERT(!memory->block_count);
    status = tn__host_arena_close(&memory->arena);
    if (status == TN_OK) {
        const tn__extent_source *source = memory->source.take ? &memory->source : NULL;
        (void)tn__host_arena_open(&memory->arena, source);
    }
    pthread_mutex_unlock(&memory->lock);
    return status;
}

size_t tn__host_memory_round(const tn__host_memory *memory, size_t bytes) {
    return memory->arena.is_open ? tn__host_arena_round(bytes) : bytes;
}

void tn__host_memory_open(tn__host_memory *memory, size_t limit, const tn__extent_source *source) {
    *memory = (tn__host_memory){.limit = limit};
    pthread_mutex_init(&memory->lock, NULL);
    if (source) memory->source = *source;
    (void)tn__host_arena_open(&memory->arena, source);
}

void tn__host_memory_use_no_arena(tn__host_memory *memory) {
    TN_ASSERT(!memory->block_count);
    (void)tn__host_arena_close(&memory->arena);
}

tn_status tn__host_memory_close(tn__host_memory *memory) {
    while (memory->block_count)
        TN_TRY(give_locked(memory, memory->block_count - 1));
    TN_TRY(tn__host_arena_close(&memory->arena));
    tn__host_free(memory->blocks);
    memory->blocks = NULL;
    pthread_mutex_destroy(&memory->lock);
    return TN_OK;
}
