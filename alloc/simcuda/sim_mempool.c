/* Memory pools of the driver: cuMemAllocFromPoolAsync and its kin.
 *
 *     pool      -> chunks of physical memory, 32 MiB or what one allocation needs if that is more
 *     chunk     | live | free | live |  free  | free |       stretches, in order of address
 *
 * A free stretch knows the cuMemFreeAsync that freed it: its place in the order of streams, and
 * its time. An allocation on a stream may take, in this order:
 *
 *   1 what its stream comes after anyway: freed on it, or behind an event that it waited for, or
 *     known to the host as complete
 *   2 what the device has done with by now: the driver sees that, though no wait says it
 *   3 a new chunk
 *   4 what some stream still uses: the driver makes this stream wait for it
 *   5 a new chunk after giving back those that are free and complete as the host knows; else it
 *     fails, and may succeed once the host has synchronised with the streams that freed
 *
 * Giving back (cuMemPoolTrimTo, and every synchronisation of the host while more is reserved than
 * the release threshold) takes whole chunks that are free and known to be complete. Touching what
 * a program has freed is error 700 here; a real device would not notice.
 */
#include <string.h>

#include "sim_capture.h"
#include "sim_memory.h"
#include "sim_stream.h"

#define ALIGN       ((size_t)512)
#define CHUNK_BYTES ((size_t)32 << 20)

typedef struct sim_stretch {
    size_t begin; /* in the chunk */
    size_t bytes;
    int is_live;
    uint32_t slot; /* free: where and when it was freed; epoch 0: known to be complete */
    uint64_t epoch;
    sim_clock clock;
    sim_ticket *ticket;
} sim_stretch;

typedef struct sim_chunk {
    struct sim_chunk *next;
    struct sim_mempool *pool;
    sim_region *region;
    sim_stretch *stretches;
    size_t count;
    size_t capacity;
} sim_chunk;

typedef struct sim_mempool {
    struct sim_mempool *next;
    int device;
    size_t maximum; /* to reserve; SIZE_MAX: no bound */
    uint64_t threshold;
    uint64_t reserved, reserved_high;
    uint64_t used, used_high;
    sim_chunk *chunks;
} sim_mempool;

static sim_mempool *pools;

static sim_mempool *find_pool(CUmemoryPool handle) {
    sim_mempool *pool = pools;
    while (pool && (CUmemoryPool)pool != handle)
        pool = pool->next;
    return pool;
}

/* ---- stretches ------------------------------------------------------------------------------- */

static void forget_free(sim_stretch *stretch) {
    tn__sim_clock_clear(&stretch->clock);
    tn__sim_ticket_release(stretch->ticket);
    stretch->ticket = NULL;
    stretch->slot = 0;
    stretch->epoch = 0;
}

static void remove_stretch(sim_chunk *chunk, size_t index) {
    forget_free(&chunk->stretches[index]);
    memmove(chunk->stretches + index, chunk->stretches + index + 1,
            (chunk->count - index - 1) * sizeof *chunk->stretches);
    chunk->count--;
}

/* Cuts a free stretch; both parts were freed alike. */
static void split_stretch(sim_chunk *chunk, size_t index, size_t bytes) {
    sim_stretch *stretch;
    sim_stretch rest;
    if (chunk->count == chunk->capacity) {
        chunk->capacity *= 2;
        chunk->stretches = tn__sim_grow(chunk->stretches, chunk->capacity, sizeof *stretch);
    }
    stretch = &chunk->stretches[index];
    rest = *stretch;
    rest.begin += bytes;
    rest.bytes -= bytes;
    rest.clock = (sim_clock){NULL, 0};
    tn__sim_clock_copy(&rest.clock, &stretch->clock);
    if (rest.ticket) rest.ticket->references++;
    stretch->bytes = bytes;
    memmove(chunk->stretches + index + 2, chunk->stretches + index + 1,
            (chunk->count - index - 1) * sizeof *stretch);
    chunk->stretches[index + 1] = rest;
    chunk->count++;
}

/* Forgets how stretches were freed that the host knows to be complete, and joins those. */
static void settle(sim_chunk *chunk) {
    const sim_clock *host = tn__sim_host_clock();
    for (size_t i = 0; i < chunk->count; i++) {
        sim_stretch *stretch = &chunk->stretches[i];
        if (stretch->is_live || !tn__sim_clock_covers(host, stretch->slot, stretch->epoch)) {
            continue;
        }
        forget_free(stretch);
        if (i == 0 || stretch[-1].is_live || stretch[-1].epoch) continue;
        stretch[-1].bytes += stretch->bytes;
        remove_stretch(chunk, i--);
    }
}

static int is_idle(const sim_chunk *chunk) {
    return chunk->count == 1 && !chunk->stretches[0].is_live && !chunk->stretches[0].epoch;
}

/* ---- chunks ---------------------------------------------------------------------------------- */

static sim_chunk *create_chunk(sim_mempool *pool, size_t bytes) {
    size_t unit = CHUNK_BYTES > tn__sim.config.granularity_bytes ? CHUNK_BYTES
                                                                 : tn__sim.config.granularity_bytes;
    size_t rounded = (bytes + unit - 1) / unit * unit;
    sim_chunk *chunk;
    sim_region *region;
    if (rounded < bytes || rounded > pool->maximum - pool->reserved) return NULL;
    region = tn__sim_plain_create(pool->device, rounded);
    if (!region) return NULL;
    tn__sim_spend(tn__sim_cost(SIM_COST_RESERVE, rounded) + tn__sim_cost(SIM_COST_CREATE, rounded) +
                  tn__sim_cost(SIM_COST_MAP, rounded) + tn__sim_cost(SIM_COST_SET_ACCESS, rounded));
    chunk = tn__sim_alloc(1, sizeof *chunk);
    chunk->pool = pool;
    chunk->region = region;
    chunk->capacity = 4;
    chunk->stretches = tn__sim_alloc(chunk->capacity, sizeof *chunk->stretches);
    chunk->stretches[0].bytes = rounded;
    chunk->count = 1;
    chunk->next = pool->chunks;
    pool->chunks = chunk;
    region->chunk = chunk;
    pool->reserved += rounded;
    if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
    return chunk;
}

/* `at` is the link to it. */
static void destroy_chunk(sim_chunk **at) {
    sim_chunk *chunk = *at;
    *at = chunk->next;
    chunk->pool->reserved -= chunk->region->bytes;
    tn__sim_spend(tn__sim_cost(SIM_COST_UNMAP, chunk->region->bytes) +
                  tn__sim_cost(SIM_COST_RELEASE, chunk->region->bytes));
    for (size_t i = 0; i < chunk->count; i++)
        forget_free(&chunk->stretches[i]);
    tn__sim_plain_destroy(chunk->region);
    tn__sim_free(chunk->stretches);
    tn__sim_free(chunk);
}

/* Gives idle chunks back as long as `keep` bytes stay reserved. */
static void trim(sim_mempool *pool, uint64_t keep) {
    sim_chunk **at = &pool->chunks;
    while (*at) {
        settle(*at);
        if (is_idle(*at) && pool->reserved - (*at)->region->bytes >= keep) {
            destroy_chunk(at);
        } else {
            at = &(*at)->next;
        }
    }
}

void tn__sim_mempools_synchronized(void) {
    for (sim_mempool *pool = pools; pool; pool = pool->next) {
        if (pool->reserved > pool->threshold) trim(pool, pool->threshold);
    }
}

/* ---- allocation ------------------------------------------------------------------------------ */

typedef enum sim_reuse { SIM_REUSE_ORDERED, SIM_REUSE_COMPLETE, SIM_REUSE_PENDING } sim_reuse;

static int may_reuse(const sim_stretch *stretch, const sim_stream *stream, const sim_clock *known,
                     sim_reuse reuse) {
    if (stretch->is_live) return 0;
    if (!stretch->epoch || stretch->slot == stream->slot) return 1;
    if (tn__sim_clock_covers(known, stretch->slot, stretch->epoch)) return 1;
    if (reuse == SIM_REUSE_ORDERED) return 0;
    if (reuse == SIM_REUSE_PENDING) return 1;
    return stretch->ticket->is_done && stretch->ticket->time <= tn__sim.now;
}

/* Index of the first of neighbouring stretches that hold so many bytes; count if there are none. */
static size_t find_in_chunk(const sim_chunk *chunk, size_t bytes, const sim_stream *stream,
                            const sim_clock *known, sim_reuse reuse) {
    size_t first = 0;
    size_t sum = 0;
    for (size_t i = 0; i < chunk->count; i++) {
        if (!may_reuse(&chunk->stretches[i], stream, known, reuse)) {
            first = i + 1;
            sum = 0;
            continue;
        }
        sum += chunk->stretches[i].bytes;
        if (sum >= bytes) return first;
    }
    return chunk->count;
}

static sim_chunk *find_place(sim_mempool *pool, size_t bytes, sim_stream *stream, sim_reuse reuse,
                             size_t *index) {
    const sim_clock *known = tn__sim_stream_peek(stream);
    for (sim_chunk *chunk = pool->chunks; chunk; chunk = chunk->next) {
        *index = find_in_chunk(chunk, bytes, stream, known, reuse);
        if (*index < chunk->count) return chunk;
    }
    return NULL;
}

static sim_chunk *find_or_make_place(sim_mempool *pool, size_t bytes, sim_stream *stream,
                                     size_t *index) {
    sim_chunk *chunk;
    for (chunk = pool->chunks; chunk; chunk = chunk->next)
        settle(chunk);
    chunk = find_place(pool, bytes, stream, SIM_REUSE_ORDERED, index);
    if (!chunk) chunk = find_place(pool, bytes, stream, SIM_REUSE_COMPLETE, index);
    *index = chunk ? *index : 0;
    if (!chunk) chunk = create_chunk(pool, bytes);
    if (!chunk) chunk = find_place(pool, bytes, stream, SIM_REUSE_PENDING, index);
    if (chunk) return chunk;
    trim(pool, 0);
    *index = 0;
    return create_chunk(pool, bytes);
}

/* The stream comes after the free, if it does not yet. */
static void come_after(sim_stream *stream, const sim_stretch *stretch) {
    sim_work wait = {.kind = SIM_WORK_WAIT, .submitted = tn__sim.now, .ticket = stretch->ticket};
    if (!stretch->epoch || stretch->slot == stream->slot) return;
    tn__sim_clock_join(&stream->clock, &stretch->clock);
    stretch->ticket->references++;
    tn__sim_stream_submit(stream, &wait);
}

/* Makes [index ...] one live stretch; its stream comes after all that freed what it is made of. */
static sim_stretch *take_stretches(sim_chunk *chunk, size_t index, size_t bytes,
                                   sim_stream *stream) {
    sim_stretch *live = &chunk->stretches[index];
    while (live->bytes < bytes) {
        size_t missing = bytes - live->bytes;
        if (live[1].bytes > missing) split_stretch(chunk, index + 1, missing);
        live = &chunk->stretches[index];
        come_after(stream, &live[1]);
        live->bytes += live[1].bytes;
        remove_stretch(chunk, index + 1);
    }
    if (live->bytes > bytes) split_stretch(chunk, index, bytes);
    live = &chunk->stretches[index];
    come_after(stream, live);
    forget_free(live);
    live->is_live = 1;
    return live;
}

static void touch(sim_stream *stream, sim_chunk *chunk, const sim_stretch *stretch,
                  const char *what) {
    sim_operation operation;
    sim_mapping *mapping = tn__sim_mapping_at(chunk->region, chunk->region->base);
    tn__sim_operation_of_stream(&operation, stream, what);
    tn__sim_touch(&operation, mapping, stretch->begin, stretch->bytes, SIM_ACCESS_WRITE);
}

/* In a capture the real calls make nodes that own memory: these are not simulated. */
static CUresult check_stream(sim_stream *stream) {
    CUresult result;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    result = tn__sim_capture_gate(stream);
    if (result == CUDA_SUCCESS && stream->capture) {
        return tn__sim_refuse("memory nodes of graphs are not simulated");
    }
    return result;
}

static CUresult alloc_async(CUdeviceptr *out, size_t bytes, CUmemoryPool handle,
                            CUstream stream_handle) {
    sim_mempool *pool = find_pool(handle);
    sim_stream *stream = tn__sim_stream_find(stream_handle);
    size_t rounded = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    size_t index = 0;
    sim_chunk *chunk;
    const sim_stretch *live;
    CUresult result = check_stream(stream);
    if (result != CUDA_SUCCESS) return result;
    if (!out || !pool || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (pool->device != stream->device) {
        return tn__sim_refuse("a memory pool of another device than the stream's");
    }
    chunk = rounded < bytes ? NULL : find_or_make_place(pool, rounded, stream, &index);
    if (!chunk) return CUDA_ERROR_OUT_OF_MEMORY;
    tn__sim_spend(SIM_COST_POOL_CALL);
    tn__sim_stream_begin(stream);
    live = take_stretches(chunk, index, rounded, stream);
    touch(stream, chunk, live, "cuMemAllocFromPoolAsync");
    pool->used += rounded;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
    *out = chunk->region->base + live->begin;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool,
                                 CUstream stream) {
    SIM_ENTER(cuMemAllocFromPoolAsync);
    return tn__sim_leave(alloc_async(address, bytes, pool, stream));
}

/* The live stretch that begins at the address, and its chunk; NULL if there is none. */
static sim_stretch *find_live(CUdeviceptr address, sim_chunk **chunk) {
    const sim_region *region = tn__sim_region_find(address);
    if (!region || !region->chunk) return NULL;
    *chunk = region->chunk;
    for (size_t i = 0; i < (*chunk)->count; i++) {
        sim_stretch *stretch = &(*chunk)->stretches[i];
        if (stretch->is_live && region->base + stretch->begin == address) return stretch;
    }
    return NULL;
}

static CUresult free_async(CUdeviceptr address, CUstream handle) {
    sim_chunk *chunk = NULL;
    sim_stretch *stretch = find_live(address, &chunk);
    sim_stream *stream = tn__sim_stream_find(handle);
    CUresult result = check_stream(stream);
    sim_work record = {.kind = SIM_WORK_RECORD};
    if (result != CUDA_SUCCESS) return result;
    if (!stretch) return CUDA_ERROR_INVALID_VALUE;
    tn__sim_spend(SIM_COST_POOL_CALL);
    tn__sim_stream_begin(stream);
    touch(stream, chunk, stretch, "cuMemFreeAsync");
    stretch->is_live = 0;
    stretch->slot = stream->slot;
    stretch->epoch = stream->epoch;
    tn__sim_clock_copy(&stretch->clock, &stream->clock);
    stretch->ticket = tn__sim_ticket_create();
    stretch->ticket->references++;
    chunk->pool->used -= stretch->bytes;
    record.ticket = stretch->ticket;
    record.submitted = tn__sim.now;
    tn__sim_stream_submit(stream, &record);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    SIM_ENTER(cuMemFreeAsync);
    return tn__sim_leave(free_async(address, stream));
}

int tn__sim_mempool_lends(const sim_region *region, CUdeviceptr address, size_t bytes) {
    const sim_chunk *chunk = region->chunk;
    size_t begin = (size_t)(address - region->base);
    if (!chunk) return 1;
    for (size_t i = 0; i < chunk->count; i++) {
        const sim_stretch *stretch = &chunk->stretches[i];
        if (stretch->begin + stretch->bytes <= begin || stretch->begin >= begin + bytes) continue;
        if (!stretch->is_live) return 0;
    }
    return 1;
}

/* ---- pools ----------------------------------------------------------------------------------- */

static CUresult pool_create(CUmemoryPool *out, const CUmemPoolProps *properties) {
    sim_mempool *pool;
    if (!out || !properties) return CUDA_ERROR_INVALID_VALUE;
    if (properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return tn__sim_refuse("only memory pools of device memory are simulated");
    }
    if (properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE) {
        return tn__sim_refuse("handles of memory pools are not exported");
    }
    if (properties->location.id < 0 || properties->location.id >= tn__sim.config.device_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    pool = tn__sim_alloc(1, sizeof *pool);
    pool->device = properties->location.id;
    pool->maximum = properties->maxSize ? properties->maxSize : SIZE_MAX;
    pool->next = pools;
    pools = pool;
    *out = (CUmemoryPool)pool;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    SIM_ENTER(cuMemPoolCreate);
    return tn__sim_leave(pool_create(pool, properties));
}

static void end_pool(sim_mempool *pool) {
    sim_mempool **at = &pools;
    while (pool->chunks)
        destroy_chunk(&pool->chunks);
    while (*at != pool)
        at = &(*at)->next;
    *at = pool->next;
    tn__sim_free(pool);
}

/* A real driver lets such a pool go on until its memory is free and its work is done. */
static CUresult pool_destroy(CUmemoryPool handle) {
    sim_mempool *pool = find_pool(handle);
    if (!pool) return CUDA_ERROR_INVALID_VALUE;
    for (sim_chunk *chunk = pool->chunks; chunk; chunk = chunk->next) {
        settle(chunk);
        if (!is_idle(chunk)) {
            return tn__sim_refuse("a memory pool in use, as far as the host knows, is not ended");
        }
    }
    end_pool(pool);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    SIM_ENTER(cuMemPoolDestroy);
    return tn__sim_leave(pool_destroy(pool));
}

static CUresult set_attribute(CUmemoryPool handle, int attribute, const void *value) {
    sim_mempool *pool = find_pool(handle);
    uint64_t number;
    if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        memcpy(&pool->threshold, value, sizeof pool->threshold);
        return CUDA_SUCCESS;
    }
    memcpy(&number, value, sizeof number);
    if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH && number == 0) {
        pool->reserved_high = pool->reserved;
        return CUDA_SUCCESS;
    }
    if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH && number == 0) {
        pool->used_high = pool->used;
        return CUDA_SUCCESS;
    }
    return tn__sim_refuse("cuMemPoolSetAttribute: attribute %d", attribute);
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value) {
    SIM_ENTER(cuMemPoolSetAttribute);
    return tn__sim_leave(set_attribute(pool, attribute, value));
}

static CUresult get_attribute(CUmemoryPool handle, int attribute, void *value) {
    const sim_mempool *pool = find_pool(handle);
    uint64_t number;
    if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: number = pool->threshold; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: number = pool->reserved; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: number = pool->reserved_high; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: number = pool->used; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: number = pool->used_high; break;
    default: return tn__sim_refuse("cuMemPoolGetAttribute: attribute %d", attribute);
    }
    memcpy(value, &number, sizeof number);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
    SIM_ENTER(cuMemPoolGetAttribute);
    return tn__sim_leave(get_attribute(pool, attribute, value));
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep_bytes) {
    SIM_ENTER(cuMemPoolTrimTo);
    sim_mempool *pool = find_pool(handle);
    if (pool) trim(pool, keep_bytes);
    return tn__sim_leave(pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

/* ---- reset, leftovers ------------------------------------------------------------------------ */

void tn__sim_mempools_reset(void) {
    while (pools)
        end_pool(pools);
}

int tn__sim_mempool_leftovers(sim_report *report) {
    int count = 0;
    for (const sim_mempool *pool = pools; pool; pool = pool->next, count++) {
        tn__sim_report_line(report, "  memory pool: %llu bytes in use of %llu reserved\n",
                            (unsigned long long)pool->used, (unsigned long long)pool->reserved);
    }
    return count;
}
