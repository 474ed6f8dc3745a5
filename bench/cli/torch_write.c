/* A history as PyTorch's memory snapshot: see history_write.h.
 *
 * PyTorch's viewer starts from the segments and plays the events backwards: each block that it then
 * finds must lie in a segment. Freed blocks that lie in no segment of the end get one, a *former*
 * segment, which the last events give back.
 */
#include <stdlib.h>
#include <string.h>

#include "history_write.h"
#include "pickle_writer.h"

#define PAGE_BYTES (UINT64_C(2) << 20)

/* Texts that come again; the number is what they are remembered under. */
typedef enum torch_word {
    WORD_ACTION,
    WORD_ADDR,
    WORD_SIZE,
    WORD_STREAM,
    WORD_TIME_US,
    WORD_FRAMES,
    WORD_ALLOC,
    WORD_FREE_REQUESTED,
    WORD_FREE_COMPLETED,
    WORD_SEGMENT_MAP,
    WORD_SEGMENT_UNMAP,
    WORD_OOM,
    WORD_DEVICE_FREE,
    WORD_DEVICE,
    WORD_ADDRESS,
    WORD_TOTAL_SIZE,
    WORD_ALLOCATED_SIZE,
    WORD_ACTIVE_SIZE,
    WORD_REQUESTED_SIZE,
    WORD_SEGMENT_TYPE,
    WORD_LARGE,
    WORD_SEGMENT_POOL_ID,
    WORD_IS_EXPANDABLE,
    WORD_BLOCKS,
    WORD_STATE,
    WORD_ACTIVE_ALLOCATED,
    WORD_ACTIVE_PENDING_FREE,
    WORD_INACTIVE,
    WORD_NAME,
    WORD_FILENAME,
    WORD_LINE,
    WORD_COUNT
} torch_word;

static const char *const words[WORD_COUNT] = {
    [WORD_ACTION] = "action",
    [WORD_ADDR] = "addr",
    [WORD_SIZE] = "size",
    [WORD_STREAM] = "stream",
    [WORD_TIME_US] = "time_us",
    [WORD_FRAMES] = "frames",
    [WORD_ALLOC] = "alloc",
    [WORD_FREE_REQUESTED] = "free_requested",
    [WORD_FREE_COMPLETED] = "free_completed",
    [WORD_SEGMENT_MAP] = "segment_map",
    [WORD_SEGMENT_UNMAP] = "segment_unmap",
    [WORD_OOM] = "oom",
    [WORD_DEVICE_FREE] = "device_free",
    [WORD_DEVICE] = "device",
    [WORD_ADDRESS] = "address",
    [WORD_TOTAL_SIZE] = "total_size",
    [WORD_ALLOCATED_SIZE] = "allocated_size",
    [WORD_ACTIVE_SIZE] = "active_size",
    [WORD_REQUESTED_SIZE] = "requested_size",
    [WORD_SEGMENT_TYPE] = "segment_type",
    [WORD_LARGE] = "large",
    [WORD_SEGMENT_POOL_ID] = "segment_pool_id",
    [WORD_IS_EXPANDABLE] = "is_expandable",
    [WORD_BLOCKS] = "blocks",
    [WORD_STATE] = "state",
    [WORD_ACTIVE_ALLOCATED] = "active_allocated",
    [WORD_ACTIVE_PENDING_FREE] = "active_pending_free",
    [WORD_INACTIVE] = "inactive",
    [WORD_NAME] = "name",
    [WORD_FILENAME] = "filename",
    [WORD_LINE] = "line",
};

typedef struct address_range {
    uint64_t from;
    uint64_t to;
} address_range;

typedef struct torch_writer {
    FILE *stream;
    const memory_history *history;
    unsigned char is_known[WORD_COUNT];
    unsigned char *is_owner_known; /* of the stack of an owner's number */
    address_range *former;
    size_t former_count;
} torch_writer;

/* ---- small parts ----------------------------------------------------------------------------- */

static void put_word(torch_writer *self, torch_word word) {
    if (self->is_known[word]) {
        pickle_recall(self->stream, word);
        return;
    }
    pickle_text(self->stream, words[word]);
    pickle_remember(self->stream, word);
    self->is_known[word] = 1;
}

static void put_member(torch_writer *self, torch_word name, uint64_t value) {
    put_word(self, name);
    pickle_integer(self->stream, (int64_t)value);
}

static void put_time(torch_writer *self, double time_us) {
    put_member(self, WORD_TIME_US, time_us > 0 && time_us < 9e18 ? (uint64_t)time_us : 0);
}

/* The stack of an owner's blocks: one frame with its name, or none. */
static void put_frames(torch_writer *self, uint32_t owner) {
    put_word(self, WORD_FRAMES);
    if (self->is_owner_known[owner]) {
        pickle_recall(self->stream, WORD_COUNT + owner);
        return;
    }
    pickle_list_begin(self->stream);
    if (owner) {
        pickle_list_next(self->stream, 0);
        pickle_dict_begin(self->stream);
        put_word(self, WORD_NAME);
        pickle_text(self->stream, name_table_text(&self->history->owners, owner));
        put_word(self, WORD_FILENAME);
        pickle_text(self->stream, "owner");
        put_member(self, WORD_LINE, 0);
        pickle_dict_end(self->stream);
    }
    pickle_list_end(self->stream);
    pickle_remember(self->stream, WORD_COUNT + owner);
    self->is_owner_known[owner] = 1;
}

/* ---- segments -------------------------------------------------------------------------------- */

static void put_block(torch_writer *self, const history_piece *piece) {
    static const torch_word states[] = {[HISTORY_LIVE] = WORD_ACTIVE_ALLOCATED,
                                        [HISTORY_PENDING] = WORD_ACTIVE_PENDING_FREE,
                                        [HISTORY_UNUSED] = WORD_INACTIVE};
    pickle_dict_begin(self->stream);
    put_member(self, WORD_ADDRESS, piece->address);
    put_member(self, WORD_SIZE, piece->bytes);
    put_member(self, WORD_REQUESTED_SIZE, piece->asked_bytes);
    put_word(self, WORD_STATE);
    put_word(self, states[piece->state]);
    put_frames(self, piece->owner);
    pickle_dict_end(self->stream);
}

static void put_sums(torch_writer *self, const history_segment *segment) {
    uint64_t sums[3] = {0, 0, 0}; /* allocated, active, requested */
    for (uint32_t i = 0; i < segment->piece_count; i++) {
        const history_piece *piece = &self->history->pieces[segment->first_piece + i];
        if (piece->state == HISTORY_LIVE) sums[0] += piece->bytes;
        if (piece->state != HISTORY_UNUSED) sums[1] += piece->bytes;
        sums[2] += piece->asked_bytes;
    }
    put_member(self, WORD_TOTAL_SIZE, segment->bytes);
    put_member(self, WORD_ALLOCATED_SIZE, sums[0]);
    put_member(self, WORD_ACTIVE_SIZE, sums[1]);
    put_member(self, WORD_REQUESTED_SIZE, sums[2]);
}

static void put_segment(torch_writer *self, const history_segment *segment) {
    pickle_dict_begin(self->stream);
    put_member(self, WORD_DEVICE, (uint64_t)self->history->ordinal);
    put_member(self, WORD_ADDRESS, segment->address);
    put_sums(self, segment);
    put_member(self, WORD_STREAM, segment->stream);
    put_word(self, WORD_SEGMENT_TYPE);
    put_word(self, WORD_LARGE);
    put_word(self, WORD_SEGMENT_POOL_ID);
    pickle_integer(self->stream, 0);
    pickle_integer(self->stream, 0);
    pickle_pair(self->stream);
    put_word(self, WORD_IS_EXPANDABLE);
    pickle_boolean(self->stream, 0);
    put_frames(self, 0);
    put_word(self, WORD_BLOCKS);
    pickle_list_begin(self->stream);
    for (uint32_t i = 0; i < segment->piece_count; i++) {
        pickle_list_next(self->stream, i);
        put_block(self, &self->history->pieces[segment->first_piece + i]);
    }
    pickle_list_end(self->stream);
    pickle_dict_end(self->stream);
}

/* ---- former segments ------------------------------------------------------------------------- */

static int compare_ranges(const void *a, const void *b) {
    uint64_t left = ((const address_range *)a)->from;
    uint64_t right = ((const address_range *)b)->from;
    return left < right ? -1 : left > right;
}

/* Sorted ranges that do not touch each other; the new count. */
static size_t join_ranges(address_range *ranges, size_t count) {
    size_t kept = 0;
    if (count) qsort(ranges, count, sizeof *ranges, compare_ranges);
    for (size_t i = 0; i < count; i++) {
        if (kept > 0 && ranges[i].from <= ranges[kept - 1].to) {
            if (ranges[i].to > ranges[kept - 1].to) ranges[kept - 1].to = ranges[i].to;
        } else {
            ranges[kept++] = ranges[i];
        }
    }
    return kept;
}

/* What of the blocks that were freed lies in none of the segments; both are sorted. */
static void subtract(torch_writer *self, const address_range *blocks, size_t block_count,
                     const address_range *segments, size_t segment_count) {
    size_t at = 0;
    for (size_t i = 0; i < block_count; i++) {
        uint64_t from = blocks[i].from;
        while (at < segment_count && segments[at].to <= from)
            at++;
        for (size_t j = at; j < segment_count && segments[j].from < blocks[i].to; j++) {
            if (segments[j].from > from)
                self->former[self->former_count++] = (address_range){from, segments[j].from};
            if (segments[j].to > from) from = segments[j].to;
        }
        if (from < blocks[i].to)
            self->former[self->former_count++] = (address_range){from, blocks[i].to};
    }
}

static size_t gather_blocks(const memory_history *history, address_range *out) {
    size_t count = 0;
    for (uint32_t i = 0; i < history->block_count; i++) {
        const history_block *block = &history->blocks[i];
        uint64_t end = block->address + block->bytes;
        if (!block->address || end < block->address || end > UINT64_MAX - PAGE_BYTES) continue;
        out[count++] = (address_range){block->address / PAGE_BYTES * PAGE_BYTES,
                                       (end / PAGE_BYTES + 1) * PAGE_BYTES};
    }
    return join_ranges(out, count);
}

static int find_former(torch_writer *self) {
    const memory_history *history = self->history;
    address_range *blocks = calloc((size_t)history->block_count + 1, sizeof *blocks);
    address_range *segments = calloc((size_t)history->segment_count + 1, sizeof *segments);
    size_t most = (size_t)history->block_count + history->segment_count + 1;
    size_t block_count, segment_count = 0;
    self->former = calloc(most, sizeof *self->former);
    if (blocks && segments && self->former) {
        block_count = gather_blocks(history, blocks);
        for (uint32_t i = 0; i < history->segment_count; i++) {
            const history_segment *segment = &history->segments[i];
            segments[segment_count++] =
                (address_range){segment->address, segment->address + segment->bytes};
        }
        segment_count = join_ranges(segments, segment_count);
        subtract(self, blocks, block_count, segments, segment_count);
    }
    free(blocks);
    free(segments);
    return blocks && segments && self->former;
}

/* ---- events ---------------------------------------------------------------------------------- */

static void put_entry(torch_writer *self, uint32_t *index, torch_word action, uint64_t address,
                      uint64_t bytes) {
    pickle_list_next(self->stream, (*index)++);
    pickle_dict_begin(self->stream);
    put_word(self, WORD_ACTION);
    put_word(self, action);
    put_member(self, action == WORD_OOM ? WORD_DEVICE_FREE : WORD_ADDR, address);
    put_member(self, WORD_SIZE, bytes);
}

static void end_entry(torch_writer *self, uint64_t stream, double time_us) {
    put_member(self, WORD_STREAM, stream);
    put_time(self, time_us);
    pickle_dict_end(self->stream);
}

static void put_block_event(torch_writer *self, uint32_t *index, const history_event *event) {
    const history_block *block = &self->history->blocks[event->index];
    uint64_t stream = self->history->stream_names[block->stream];
    if (event->kind == HISTORY_ALLOC) {
        put_entry(self, index, WORD_ALLOC, block->address, block->bytes);
        put_frames(self, block->owner);
    } else {
        put_entry(self, index, WORD_FREE_REQUESTED, block->address, block->bytes);
        put_frames(self, block->owner);
        end_entry(self, stream, event->time_us);
        put_entry(self, index, WORD_FREE_COMPLETED, block->address, block->bytes);
        put_frames(self, block->owner);
    }
    end_entry(self, stream, event->time_us);
}

static void put_change(torch_writer *self, uint32_t *index, const history_event *event) {
    const history_change *change = &self->history->changes[event->index];
    if (change->address == 0) return; /* where is not known */
    put_entry(self, index, change->bytes < 0 ? WORD_SEGMENT_UNMAP : WORD_SEGMENT_MAP,
              change->address, (uint64_t)(change->bytes < 0 ? -change->bytes : change->bytes));
    put_frames(self, 0);
    end_entry(self, 0, event->time_us);
}

static void put_shortage(torch_writer *self, uint32_t *index, const history_event *event) {
    const history_shortage *shortage = &self->history->shortages[event->index];
    put_entry(self, index, WORD_OOM, shortage->free_bytes, shortage->asked_bytes);
    put_frames(self, shortage->owner);
    end_entry(self, 0, event->time_us);
}

/* 1 if changes have addresses: then they tell of every segment themselves. */
static int has_places(const memory_history *history) {
    return history->change_count > 0 && history->changes[0].address != 0;
}

static void put_events(torch_writer *self) {
    const memory_history *history = self->history;
    uint32_t index = 0;
    for (uint32_t i = history->before_count; i < history->event_count; i++) {
        const history_event *event = &history->events[i];
        if (event->kind <= HISTORY_FREE) put_block_event(self, &index, event);
        if (event->kind == HISTORY_RESERVE) put_change(self, &index, event);
        if (event->kind == HISTORY_SHORTAGE) put_shortage(self, &index, event);
    }
    for (size_t i = 0; i < self->former_count && !has_places(history); i++) {
        const address_range *range = &self->former[i];
        put_entry(self, &index, WORD_SEGMENT_UNMAP, range->from, range->to - range->from);
        put_frames(self, 0);
        end_entry(self, 0, history->events[history->event_count - 1].time_us);
    }
}

/* ---- the whole ------------------------------------------------------------------------------- */

static void put_snapshot(torch_writer *self) {
    FILE *stream = self->stream;
    const memory_history *history = self->history;
    pickle_begin(stream);
    pickle_dict_begin(stream);
    pickle_text(stream, "segments");
    pickle_list_begin(stream);
    for (uint32_t i = 0; i < history->segment_count; i++) {
        pickle_list_next(stream, i);
        put_segment(self, &history->segments[i]);
    }
    pickle_list_end(stream);
    pickle_text(stream, "device_traces");
    pickle_list_begin(stream);
    for (int i = 0; i <= history->ordinal; i++) {
        pickle_list_next(stream, (uint32_t)i);
        pickle_list_begin(stream);
        if (i == history->ordinal) put_events(self);
        pickle_list_end(stream);
    }
    pickle_list_end(stream);
    pickle_text(stream, "allocator_settings");
    pickle_dict_begin(stream);
    pickle_dict_end(stream);
    pickle_text(stream, "external_annotations");
    pickle_list_begin(stream);
    pickle_list_end(stream);
    pickle_dict_end(stream);
    pickle_end(stream);
}

int history_write_torch(FILE *stream, memory_history *history) {
    torch_writer self = {.stream = stream, .history = history};
    int is_ready;
    self.is_owner_known = calloc((size_t)history->owners.count + 1, 1);
    is_ready = self.is_owner_known && history_place(history) && find_former(&self);
    if (is_ready) put_snapshot(&self);
    free(self.is_owner_known);
    free(self.former);
    return is_ready;
}
