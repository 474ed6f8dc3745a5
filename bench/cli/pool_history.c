/* From a pool's snapshot to a history: see pool_history.h.
 *
 * The ring has the last events only: what is alive at the end and was not allocated in it, or is
 * freed in it alone, was there before.
 */
#include "pool_history.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "id_table.h"
#include "torch_history.h"

typedef struct pool_reader {
    const char *name;
    char *error;
    const cJSON *root;
    memory_history *history;
    id_table alive; /* addresses */
    int is_out_of_memory;
} pool_reader;

static int no_memory(pool_reader *self) {
    snprintf(self->error, HISTORY_ERROR_BYTES, "out of host memory");
    self->is_out_of_memory = 1;
    return 0;
}

__attribute__((format(printf, 2, 3))) static int fail(pool_reader *self, const char *format, ...) {
    va_list arguments;
    int used = snprintf(self->error, HISTORY_ERROR_BYTES, "%.200s: ", self->name);
    va_start(arguments, format);
    vsnprintf(self->error + used, HISTORY_ERROR_BYTES - (size_t)used, format, arguments);
    va_end(arguments);
    return 0;
}

/* ---- members --------------------------------------------------------------------------------- */

static const cJSON *member(const cJSON *object, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

/* Sizes and numbers, as far as they have a sign to spare: releases are negative. */
static uint64_t whole(const cJSON *object, const char *name) {
    const cJSON *item = member(object, name);
    double value = cJSON_IsNumber(item) ? item->valuedouble : 0.0;
    return value > 0 && value < 9.2e18 ? (uint64_t)value : 0;
}

static const char *text_of(const cJSON *object, const char *name) {
    const char *text = cJSON_GetStringValue(member(object, name));
    return text ? text : "";
}

static uint64_t address_of(const cJSON *object) {
    return strtoull(text_of(object, "address"), NULL, 16);
}

static int is_kind(const cJSON *object, const char *kind) {
    return strcmp(text_of(object, "kind"), kind) == 0;
}

/* Unnamed blocks may still have a call site. */
static int owner_of(pool_reader *self, const cJSON *object, uint32_t *out) {
    const char *owner = text_of(object, "owner");
    if (!owner[0]) owner = text_of(object, "site");
    return history_owner(self->history, owner, strlen(owner), out) || no_memory(self);
}

/* ---- events ---------------------------------------------------------------------------------- */

static int fill_block(pool_reader *self, const cJSON *event, history_block *out) {
    *out = (history_block){.address = address_of(event), .bytes = whole(event, "bytes")};
    if (!history_stream(self->history, whole(event, "stream_id"), &out->stream))
        return no_memory(self);
    return owner_of(self, event, &out->owner);
}

static int read_alloc(pool_reader *self, const cJSON *event, double time_us) {
    history_block block;
    uint32_t index = 0;
    if (!fill_block(self, event, &block)) return 0;
    if (id_table_find(&self->alive, block.address, &index))
        return fail(self, "event %llu gives out %s, which is still alive",
                    (unsigned long long)whole(event, "number"), text_of(event, "address"));
    return (history_alloc(self->history, &block, time_us, &index) &&
            id_table_insert(&self->alive, block.address, index)) ||
           no_memory(self);
}

static int read_free(pool_reader *self, const cJSON *event, double time_us) {
    history_block block;
    uint32_t index = 0;
    if (!fill_block(self, event, &block)) return 0;
    if (!id_table_find(&self->alive, block.address, &index) &&
        !history_before(self->history, &block, &index))
        return no_memory(self);
    (void)id_table_remove(&self->alive, block.address);
    return history_free(self->history, index, time_us) || no_memory(self);
}

static int read_shortage(pool_reader *self, const cJSON *event, double time_us) {
    history_shortage shortage = {.asked_bytes = whole(event, "bytes")};
    return owner_of(self, event, &shortage.owner) &&
           (history_shortage_add(self->history, &shortage, time_us) || no_memory(self));
}

static int read_event(pool_reader *self, const cJSON *event) {
    double time_us = (double)whole(event, "time_us");
    int64_t bytes = (int64_t)whole(event, "bytes");
    if (is_kind(event, "alloc")) return read_alloc(self, event, time_us);
    if (is_kind(event, "free")) return read_free(self, event, time_us);
    if (is_kind(event, "out_of_memory")) return read_shortage(self, event, time_us);
    if (is_kind(event, "release")) {
        bytes = -bytes;
    } else if (!is_kind(event, "grow")) {
        return 1;
    }
    return history_reserve(self->history, bytes, 0, time_us) || no_memory(self);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

/* A block of the map that no event told of. */
static int note_alive(pool_reader *self, const history_piece *piece, uint64_t stream) {
    history_block block = {.address = piece->address, .bytes = piece->asked_bytes};
    uint32_t index = 0;
    block.owner = piece->owner;
    if (id_table_find(&self->alive, piece->address, &index)) return 1;
    return (history_stream(self->history, stream, &block.stream) &&
            history_before(self->history, &block, &index) &&
            id_table_insert(&self->alive, piece->address, index)) ||
           no_memory(self);
}

/* The driver's id of the stream that the pool numbers so; of those beyond the most that a history
 * tells apart, the number. */
static uint64_t stream_id_of(const pool_reader *self, uint64_t number) {
    const cJSON *stream;
    int looked_at = 0;
    cJSON_ArrayForEach(stream, member(self->root, "streams")) {
        if (looked_at++ == HISTORY_STREAMS_MAX) break;
        if (whole(stream, "number") == number) return whole(stream, "id");
    }
    return number;
}

/* Addresses without memory of the pool's end a segment. */
static int read_region(pool_reader *self, const cJSON *region) {
    uint64_t base = address_of(region);
    int is_open = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, member(region, "pieces")) {
        history_piece piece = {.address = base + whole(item, "offset"),
                               .bytes = whole(item, "bytes"),
                               .asked_bytes = whole(item, "asked_bytes"),
                               .state = HISTORY_UNUSED};
        uint64_t stream = stream_id_of(self, whole(item, "stream"));
        if (is_kind(item, "void") || is_kind(item, "imported")) {
            is_open = 0;
            continue;
        }
        if (is_kind(item, "live")) {
            piece.state = HISTORY_LIVE;
            if (piece.asked_bytes > piece.bytes) piece.asked_bytes = piece.bytes;
            if (!owner_of(self, item, &piece.owner) || !note_alive(self, &piece, stream)) return 0;
        } else {
            piece.asked_bytes = 0;
            if (cJSON_IsTrue(member(item, "is_pending"))) piece.state = HISTORY_PENDING;
        }
        if (!is_open && !history_segment_begin(self->history, piece.address, 0))
            return no_memory(self);
        is_open = 1;
        if (!history_piece_add(self->history, &piece)) return no_memory(self);
    }
    return 1;
}

static int read_all(pool_reader *self) {
    const cJSON *item;
    if (strcmp(text_of(self->root, "format"), "tenure pool snapshot 1") != 0)
        return fail(self, "its format is \"%.100s\"; expected \"tenure pool snapshot 1\"",
                    text_of(self->root, "format"));
    if (!cJSON_IsArray(member(self->root, "regions")))
        return fail(self, "it has no list of regions");
    cJSON_ArrayForEach(item, member(self->root, "events")) {
        if (!read_event(self, item)) return 0;
    }
    cJSON_ArrayForEach(item, member(self->root, "regions")) {
        if (!read_region(self, item)) return 0;
    }
    return history_finish(self->history) || no_memory(self);
}

int pool_history_read(const char *name, const cJSON *root, memory_history **out, char *error,
                      int *is_out_of_memory) {
    pool_reader self = {.name = name, .error = error, .root = root};
    int is_read;
    self.history = history_create();
    is_read = self.history ? read_all(&self) : no_memory(&self);
    if (is_read) {
        memory_history *history = self.history;
        history->has_shortages = 1;
        snprintf(history->source, sizeof history->source, "pool snapshot");
        snprintf(history->device, sizeof history->device, "%s", text_of(root, "device"));
        history->ordinal = (int)(whole(root, "ordinal") & 0xffff);
        *out = history;
    } else {
        history_destroy(self.history);
    }
    id_table_deinit(&self.alive);
    *is_out_of_memory = self.is_out_of_memory;
    return is_read;
}
