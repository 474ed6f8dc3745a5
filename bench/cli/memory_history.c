/* Blocks and events in order: see memory_history.h.
 *
 * Invariants: an event's index is below the count of what it is of; each block has one allocation
 * (those from before: from history_finish on) and at most one free, which comes later; arrays have
 * capacities that are powers of two and follow from their counts.
 */
#include "memory_history.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_ITEMS = 64 };

#define PAGE_BYTES (UINT64_C(2) << 20)

int history_has_place(const history_block *block) {
    return block->address && block->address + block->bytes > block->address;
}

memory_history *history_create(void) { return calloc(1, sizeof(memory_history)); }

void history_destroy(memory_history *history) {
    if (!history) return;
    name_table_deinit(&history->owners);
    free(history->blocks);
    free(history->events);
    free(history->changes);
    free(history->shortages);
    free(history->segments);
    free(history->pieces);
    free(history->stream_names);
    free(history);
}

/* ---- arrays ---------------------------------------------------------------------------------- */

/* Room for one more item; the array, which may have moved, or NULL. */
static void *reserve(void *items, uint32_t count, size_t item_bytes) {
    size_t capacity = count ? (size_t)count * 2 : FIRST_ITEMS;
    if (count >= HISTORY_EVENTS_MAX) return NULL;
    if (items && (count < FIRST_ITEMS || (count & (count - 1)))) return items;
    return realloc(items, capacity * item_bytes);
}

#define RESERVE(history, array, count)                                                             \
    do {                                                                                           \
        void *reserved = reserve((history)->array, (history)->count, sizeof *(history)->array);    \
        if (!reserved) return 0;                                                                   \
        (history)->array = reserved;                                                               \
    } while (0)

/* ---- names ----------------------------------------------------------------------------------- */

int history_owner(memory_history *history, const char *text, size_t length, uint32_t *out) {
    if (!name_table_add(&history->owners, text, length, out)) return 0;
    if (*out) history->has_owners = 1;
    return 1;
}

int history_stream(memory_history *history, uint64_t name, uint32_t *out) {
    for (uint32_t i = 0; i < history->stream_count; i++) {
        if (history->stream_names[i] == name) return *out = i, 1;
    }
    if (history->stream_count == HISTORY_STREAMS_MAX) return *out = HISTORY_STREAMS_MAX - 1, 1;
    RESERVE(history, stream_names, stream_count);
    history->stream_names[history->stream_count] = name;
    *out = history->stream_count++;
    return 1;
}

/* ---- events ---------------------------------------------------------------------------------- */

static int add_event(memory_history *history, history_kind kind, uint32_t index, double time_us) {
    double before_us =
        history->event_count ? history->events[history->event_count - 1].time_us : 0.0;
    RESERVE(history, events, event_count);
    if (time_us >= 0.0) history->has_times = 1;
    if (!(time_us >= before_us)) time_us = before_us;
    history->events[history->event_count++] = (history_event){time_us, kind, index};
    return 1;
}

static int add_block(memory_history *history, const history_block *block, uint32_t *index) {
    RESERVE(history, blocks, block_count);
    history->blocks[history->block_count] = *block;
    history->blocks[history->block_count].begin = history->event_count;
    history->blocks[history->block_count].end = HISTORY_ALIVE;
    if (history_has_place(block)) history->has_addresses = 1;
    *index = history->block_count++;
    return 1;
}

int history_alloc(memory_history *history, const history_block *block, double time_us,
                  uint32_t *index) {
    if (!add_block(history, block, index)) return 0;
    if (add_event(history, HISTORY_ALLOC, *index, time_us)) return 1;
    history->block_count--;
    return 0;
}

int history_before(memory_history *history, const history_block *block, uint32_t *index) {
    if (history->before_count + history->event_count >= HISTORY_EVENTS_MAX / 2) return 0;
    if (!add_block(history, block, index)) return 0;
    history->blocks[*index].begin = HISTORY_ALIVE; /* history_finish knows them by that */
    history->before_count++;
    return 1;
}

int history_free(memory_history *history, uint32_t block, double time_us) {
    if (!add_event(history, HISTORY_FREE, block, time_us)) return 0;
    history->blocks[block].end = history->event_count - 1;
    return 1;
}

int history_reserve(memory_history *history, int64_t bytes, uint64_t address, double time_us) {
    RESERVE(history, changes, change_count);
    if (!add_event(history, HISTORY_RESERVE, history->change_count, time_us)) return 0;
    history->changes[history->change_count++] = (history_change){bytes, address};
    return 1;
}

int history_shortage_add(memory_history *history, const history_shortage *shortage,
                         double time_us) {
    RESERVE(history, shortages, shortage_count);
    if (!add_event(history, HISTORY_SHORTAGE, history->shortage_count, time_us)) return 0;
    history->shortages[history->shortage_count] = *shortage;
    history->shortages[history->shortage_count++].event = history->event_count - 1;
    return 1;
}

/* ---- the end --------------------------------------------------------------------------------- */

int history_segment_begin(memory_history *history, uint64_t address, uint64_t stream) {
    RESERVE(history, segments, segment_count);
    history->segments[history->segment_count++] =
        (history_segment){address, 0, stream, history->piece_count, 0};
    return 1;
}

int history_piece_add(memory_history *history, const history_piece *piece) {
    history_segment *segment = &history->segments[history->segment_count - 1];
    RESERVE(history, pieces, piece_count);
    history->pieces[history->piece_count++] = *piece;
    segment->piece_count++;
    segment->bytes += piece->bytes;
    return 1;
}

/* Makes room for the allocations of the blocks from before at the front of the events. */
static int shift_events(memory_history *history) {
    size_t count = history->before_count;
    size_t capacity = FIRST_ITEMS;
    history_event *events;
    while (capacity < history->event_count + count)
        capacity *= 2;
    events = realloc(history->events, capacity * sizeof *events);
    if (!events) return 0;
    memmove(events + count, events, history->event_count * sizeof *events);
    history->events = events;
    return 1;
}

static int move_before_to_front(memory_history *history) {
    uint32_t shift = history->before_count;
    uint32_t at = 0;
    double time_us = history->event_count ? history->events[0].time_us : 0.0;
    if (!shift_events(history)) return 0;
    history->event_count += shift;
    for (uint32_t i = 0; i < history->block_count; i++) {
        history_block *block = &history->blocks[i];
        if (block->end != HISTORY_ALIVE) block->end += shift;
        if (block->begin != HISTORY_ALIVE) {
            block->begin += shift;
            continue;
        }
        history->events[at] = (history_event){time_us, HISTORY_ALLOC, i};
        block->begin = at++;
    }
    for (uint32_t i = 0; i < history->shortage_count; i++)
        history->shortages[i].event += shift;
    return 1;
}

int history_finish(memory_history *history) {
    return history->before_count == 0 || move_before_to_front(history);
}

uint64_t history_live_bytes(const memory_history *history) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < history->block_count; i++) {
        if (history->blocks[i].end == HISTORY_ALIVE) sum += history->blocks[i].bytes;
    }
    return sum;
}

uint64_t history_reserved_bytes(const memory_history *history) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < history->segment_count; i++)
        sum += history->segments[i].bytes;
    return sum;
}

/* ---- placing --------------------------------------------------------------------------------- */

static int compare_addresses(const void *a, const void *b) {
    uint64_t left = (*(const history_block *const *)a)->address;
    uint64_t right = (*(const history_block *const *)b)->address;
    return left < right ? -1 : left > right;
}

static int add_unused(memory_history *history, uint64_t from, uint64_t to) {
    history_piece piece = {from, to - from, 0, HISTORY_UNUSED, 0};
    return to <= from || history_piece_add(history, &piece);
}

/* The blocks in order of address; *at is where the last piece ended, 0 before the first. */
static int place_block(memory_history *history, const history_block *block, uint64_t *at) {
    uint64_t page = block->address / PAGE_BYTES * PAGE_BYTES;
    uint64_t open_end = (*at + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    history_piece piece = {block->address, block->bytes, block->bytes, HISTORY_LIVE, block->owner};
    if (block->address < *at || block->bytes == 0) return 1;
    if (block->bytes > UINT64_MAX / 2 || block->address > UINT64_MAX / 2) return 1;
    if (*at == 0 || page > open_end) {
        if (*at && !add_unused(history, *at, open_end)) return 0;
        if (!history_segment_begin(history, page, history->stream_names[block->stream])) return 0;
        *at = page;
    }
    if (!add_unused(history, *at, block->address)) return 0;
    *at = block->address + block->bytes;
    return history_piece_add(history, &piece);
}

int history_place(memory_history *history) {
    const history_block **alive;
    size_t count = 0;
    uint64_t at = 0;
    int is_placed = 1;
    if (history->segment_count > 0 || history->block_count == 0) return 1;
    alive = malloc(history->block_count * sizeof *alive);
    if (!alive) return 0;
    for (uint32_t i = 0; i < history->block_count; i++) {
        if (history->blocks[i].end == HISTORY_ALIVE && history->blocks[i].address)
            alive[count++] = &history->blocks[i];
    }
    qsort(alive, count, sizeof *alive, compare_addresses);
    for (size_t i = 0; i < count && is_placed; i++)
        is_placed = place_block(history, alive[i], &at);
    if (is_placed && at)
        is_placed = add_unused(history, at, (at + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
    free(alive);
    return is_placed;
}
