/* The shadow of a handle: who touched which stretch of it last.
 *
 *     handle  | chunk 0 (2 MiB)          | chunk 1           | ...
 *     chunk   | segment | segment        | segment           |
 *     segment   begin; last write; last read by each stream since that write
 *
 * A chunk's segments cover it without gaps, sorted; a chunk without segments is untouched.
 * Chunks bound what inserting a segment has to move, so that a large handle full of small blocks
 * stays fast. A write makes one segment of all that it covers, so a chunk never has more segments
 * than borders of live blocks.
 */
#include <string.h>

#include "sim_memory.h"

#define CHUNK_BYTES ((size_t)2 << 20)

typedef struct sim_segment {
    size_t begin; /* in the chunk */
    sim_use write;
    sim_use_list reads;
} sim_segment;

typedef struct sim_chunk {
    sim_segment *segments;
    uint32_t count;
    uint32_t capacity;
} sim_chunk;

/* ---- lists of uses --------------------------------------------------------------------------- */

void tn__sim_use_list_put(sim_use_list *list, sim_use use) {
    for (uint32_t i = 0; i < list->count; i++) {
        if (list->items[i].slot != use.slot) continue;
        list->items[i] = use;
        return;
    }
    if (list->count == list->capacity) {
        list->capacity = list->capacity ? 2 * list->capacity : 1;
        list->items = tn__sim_grow(list->items, list->capacity, sizeof *list->items);
    }
    list->items[list->count++] = use;
}

void tn__sim_use_list_clear(sim_use_list *list) {
    tn__sim_free(list->items);
    memset(list, 0, sizeof *list);
}

static sim_use_list copy_of(const sim_use_list *list) {
    sim_use_list copy = {NULL, 0, 0};
    for (uint32_t i = 0; i < list->count; i++)
        tn__sim_use_list_put(&copy, list->items[i]);
    return copy;
}

/* ---- segments of a chunk --------------------------------------------------------------------- */

static size_t end_of(const sim_chunk *chunk, uint32_t index) {
    return index + 1 < chunk->count ? chunk->segments[index + 1].begin : CHUNK_BYTES;
}

/* The segment that contains the position. */
static uint32_t find_segment(const sim_chunk *chunk, size_t position) {
    uint32_t low = 0;
    uint32_t high = chunk->count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (chunk->segments[middle].begin <= position)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void insert_segment(sim_chunk *chunk, uint32_t at, sim_segment segment) {
    if (chunk->count == chunk->capacity) {
        chunk->capacity = chunk->capacity ? 2 * chunk->capacity : 1;
        chunk->segments = tn__sim_grow(chunk->segments, chunk->capacity, sizeof *chunk->segments);
    }
    memmove(chunk->segments + at + 1, chunk->segments + at,
            (chunk->count - at) * sizeof *chunk->segments);
    chunk->segments[at] = segment;
    chunk->count++;
}

/* Makes a segment begin at the position; its index. */
static uint32_t split_at(sim_chunk *chunk, size_t position) {
    uint32_t index;
    sim_segment half;
    if (position == CHUNK_BYTES) return chunk->count;
    index = find_segment(chunk, position);
    if (chunk->segments[index].begin == position) return index;
    half = chunk->segments[index];
    half.begin = position;
    half.reads = copy_of(&half.reads);
    insert_segment(chunk, index + 1, half);
    return index + 1;
}

/* Leaves one segment of those from first to end, the first. */
static void merge(sim_chunk *chunk, uint32_t first, uint32_t end) {
    for (uint32_t i = first + 1; i < end; i++)
        tn__sim_use_list_clear(&chunk->segments[i].reads);
    memmove(chunk->segments + first + 1, chunk->segments + end,
            (chunk->count - end) * sizeof *chunk->segments);
    chunk->count -= end - first - 1;
}

/* ---- touching -------------------------------------------------------------------------------- */

static void check_segment(sim_operation *operation, const sim_segment *segment, uint64_t address,
                          size_t bytes, sim_access_kind kind) {
    tn__sim_check_order(operation, &segment->write, address, bytes);
    if (kind == SIM_ACCESS_READ) return;
    for (uint32_t i = 0; i < segment->reads.count; i++) {
        tn__sim_check_order(operation, &segment->reads.items[i], address, bytes);
    }
}

/* Checks what overlaps [begin, end); `address` is that of the chunk. */
static void check_range(sim_operation *operation, const sim_chunk *chunk, uint64_t address,
                        size_t begin, size_t end, sim_access_kind kind) {
    uint32_t index = chunk->count ? find_segment(chunk, begin) : 0;
    for (; index < chunk->count && chunk->segments[index].begin < end; index++) {
        size_t from = chunk->segments[index].begin;
        size_t to = end_of(chunk, index);
        if (from < begin) from = begin;
        if (to > end) to = end;
        check_segment(operation, &chunk->segments[index], address + from, to - from, kind);
    }
}

static void record_range(sim_chunk *chunk, size_t begin, size_t end, sim_use use,
                         sim_access_kind kind) {
    sim_segment untouched = {0, {0, 0, 0}, {NULL, 0, 0}};
    uint32_t first, last;
    if (!chunk->count) insert_segment(chunk, 0, untouched);
    first = split_at(chunk, begin);
    last = split_at(chunk, end);
    if (kind == SIM_ACCESS_WRITE) {
        merge(chunk, first, last);
        chunk->segments[first].write = use;
        chunk->segments[first].reads.count = 0;
        return;
    }
    for (uint32_t i = first; i < last; i++)
        tn__sim_use_list_put(&chunk->segments[i].reads, use);
}

void tn__sim_touch(sim_operation *operation, struct sim_mapping *mapping, size_t offset,
                   size_t bytes, sim_access_kind kind) {
    sim_shadow *shadow = &mapping->handle->shadow;
    if (kind != SIM_ACCESS_TAKE) tn__sim_use_list_put(&mapping->uses, operation->use);
    if (!shadow->chunks) {
        if (kind == SIM_ACCESS_TAKE) return;
        shadow->chunk_count = (mapping->handle->bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
        shadow->chunks = tn__sim_alloc(shadow->chunk_count, sizeof *shadow->chunks);
    }
    while (bytes) {
        sim_chunk *chunk = &shadow->chunks[offset / CHUNK_BYTES];
        size_t begin = offset % CHUNK_BYTES;
        size_t part = CHUNK_BYTES - begin < bytes ? CHUNK_BYTES - begin : bytes;
        check_range(operation, chunk, mapping->base + offset - begin, begin, begin + part, kind);
        if (kind != SIM_ACCESS_TAKE) {
            record_range(chunk, begin, begin + part, operation->use, kind);
        }
        offset += part;
        bytes -= part;
    }
}

/* ---- stamps ---------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ hash >> 29;
}

static void stamp_bytes(sim_stamp *stamp, sim_use write, size_t bytes) {
    if (write.epoch != stamp->last.epoch || write.slot != stamp->last.slot) {
        stamp->hash = mix(mix(mix(stamp->hash, stamp->position), write.slot), write.epoch);
        stamp->last = write;
    }
    stamp->position += bytes;
}

static void stamp_chunk(sim_stamp *stamp, const sim_chunk *chunk, size_t begin, size_t end) {
    uint32_t index = chunk->count ? find_segment(chunk, begin) : 0;
    if (!chunk->count) stamp_bytes(stamp, (sim_use){0, 0, 0}, end - begin);
    for (; index < chunk->count && chunk->segments[index].begin < end; index++) {
        size_t from = chunk->segments[index].begin;
        size_t to = end_of(chunk, index);
        if (from < begin) from = begin;
        if (to > end) to = end;
        stamp_bytes(stamp, chunk->segments[index].write, to - from);
    }
}

void tn__sim_stamp_add(sim_stamp *stamp, const struct sim_mapping *mapping, size_t offset,
                       size_t bytes) {
    const sim_shadow *shadow = &mapping->handle->shadow;
    if (!shadow->chunks) {
        stamp_bytes(stamp, (sim_use){0, 0, 0}, bytes);
        return;
    }
    while (bytes) {
        size_t begin = offset % CHUNK_BYTES;
        size_t part = CHUNK_BYTES - begin < bytes ? CHUNK_BYTES - begin : bytes;
        stamp_chunk(stamp, &shadow->chunks[offset / CHUNK_BYTES], begin, begin + part);
        offset += part;
        bytes -= part;
    }
}

void tn__sim_shadow_clear(sim_shadow *shadow) {
    for (size_t i = 0; i < shadow->chunk_count; i++) {
        sim_chunk *chunk = &shadow->chunks[i];
        for (uint32_t k = 0; k < chunk->count; k++) {
            tn__sim_use_list_clear(&chunk->segments[k].reads);
        }
        tn__sim_free(chunk->segments);
    }
    tn__sim_free(shadow->chunks);
    memset(shadow, 0, sizeof *shadow);
}
