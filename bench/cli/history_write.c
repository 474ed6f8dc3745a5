/* Traces and Chrome's events: see history_write.h. */
#include "history_write.h"

#include <inttypes.h>
#include <stdlib.h>

#include "history_owners.h"

enum { TRACKS_MAX = 32 }; /* owners with a counter of their own */

/* ---- traces ---------------------------------------------------------------------------------- */

/* Tenths by integers: files must not depend on the locale. */
static void put_time(FILE *stream, double time_us) {
    uint64_t tenths = time_us > 0 && time_us < 1e18 ? (uint64_t)(time_us * 10.0 + 0.5) : 0;
    fprintf(stream, "%" PRIu64, tenths / 10);
    if (tenths % 10) fprintf(stream, ".%" PRIu64, tenths % 10);
}

static double first_time(const memory_history *history) {
    return history->event_count ? history->events[0].time_us : 0.0;
}

/* An owner of a trace has at most 47 bytes, whole characters of them. */
static int owner_bytes(const char *owner) {
    int bytes = 0;
    while (owner[bytes] && bytes < 47)
        bytes++;
    while (owner[bytes] && bytes > 0 && ((unsigned char)owner[bytes] & 0xc0) == 0x80)
        bytes--;
    return bytes;
}

static void put_shortage(FILE *stream, const memory_history *history, const history_event *event,
                         double begin_us) {
    const history_shortage *shortage = &history->shortages[event->index];
    const char *owner = name_table_text(&history->owners, shortage->owner);
    fprintf(stream, "o,,%" PRIu64 ",,", shortage->asked_bytes);
    put_time(stream, event->time_us - begin_us);
    fprintf(stream, ",,%.*s\n", owner_bytes(owner), owner);
}

void history_write_trace(FILE *stream, const memory_history *history) {
    double begin_us = first_time(history);
    fputs("op,id,bytes,stream,time_us,address,owner\n", stream);
    for (uint32_t i = 0; i < history->event_count; i++) {
        const history_event *event = &history->events[i];
        const history_block *block;
        const char *owner;
        if (event->kind == HISTORY_SHORTAGE) put_shortage(stream, history, event, begin_us);
        if (event->kind > HISTORY_FREE) continue;
        block = &history->blocks[event->index];
        if (event->kind == HISTORY_FREE) {
            fprintf(stream, "f,%" PRIu32 ",,,", event->index + 1);
            put_time(stream, event->time_us - begin_us);
            fputs(",,\n", stream);
            continue;
        }
        owner = name_table_text(&history->owners, block->owner);
        fprintf(stream, "a,%" PRIu32 ",%" PRIu64 ",%" PRIu32 ",", event->index + 1, block->bytes,
                block->stream);
        put_time(stream, event->time_us - begin_us);
        fputc(',', stream);
        if (block->address) fprintf(stream, "0x%" PRIx64, block->address);
        fprintf(stream, ",%.*s\n", owner_bytes(owner), owner);
    }
}

/* ---- Chrome ---------------------------------------------------------------------------------- */

typedef struct chrome_writer {
    FILE *stream;
    const memory_history *history;
    history_owners owners;
    uint64_t live[TRACKS_MAX + 1]; /* the last is of all others */
    uint64_t total;
    uint64_t reserved;
} chrome_writer;

/* Names are clean UTF-8 without control characters (name_table.h). */
static void put_name(FILE *stream, const char *name) {
    fputc('"', stream);
    for (; *name; name++) {
        if (*name == '"' || *name == '\\') fputc('\\', stream);
        fputc(*name, stream);
    }
    fputc('"', stream);
}

static void begin_event(chrome_writer *self, const char *phase, uint32_t event) {
    const memory_history *history = self->history;
    fprintf(self->stream, ",\n{\"ph\":\"%s\",\"pid\":1,\"tid\":1,\"ts\":", phase);
    put_time(self->stream, history->has_times ? history->events[event].time_us - first_time(history)
                                              : (double)event);
}

static uint32_t track_of(const chrome_writer *self, const history_block *block) {
    uint32_t rank = self->owners.ranks[block->owner];
    return rank < TRACKS_MAX ? rank : TRACKS_MAX;
}

static void put_counters(chrome_writer *self, uint32_t event, uint32_t track) {
    const char *name = track == TRACKS_MAX
                           ? "all others"
                           : history_owner_name(self->history, self->owners.sums[track].owner);
    begin_event(self, "C", event);
    fprintf(self->stream, ",\"name\":\"live bytes\",\"args\":{\"all\":%" PRIu64 "}}", self->total);
    begin_event(self, "C", event);
    fputs(",\"name\":\"live bytes by owner\",\"id\":", self->stream);
    put_name(self->stream, name);
    fprintf(self->stream, ",\"args\":{\"bytes\":%" PRIu64 "}}", self->live[track]);
}

static void put_slice(chrome_writer *self, uint32_t event, uint32_t index, int is_begin) {
    const history_block *block = &self->history->blocks[index];
    begin_event(self, is_begin ? "b" : "e", event);
    fprintf(self->stream, ",\"cat\":\"block\",\"id\":\"%" PRIu32 "\",\"name\":", index);
    put_name(self->stream, history_owner_name(self->history, block->owner));
    if (is_begin) {
        fprintf(self->stream,
                ",\"args\":{\"bytes\":%" PRIu64 ",\"address\":\"0x%" PRIx64 "\",\"stream\":%" PRIu32
                "}",
                block->bytes, block->address, block->stream);
    }
    fputc('}', self->stream);
}

static void put_block_event(chrome_writer *self, uint32_t event) {
    uint32_t index = self->history->events[event].index;
    const history_block *block = &self->history->blocks[index];
    uint32_t track = track_of(self, block);
    int is_alloc = self->history->events[event].kind == HISTORY_ALLOC;
    uint64_t bytes = is_alloc ? block->bytes : 0 - block->bytes;
    self->live[track] += bytes;
    self->total += bytes;
    put_counters(self, event, track);
    put_slice(self, event, index, is_alloc);
}

static void put_other_event(chrome_writer *self, uint32_t event) {
    const history_event *what = &self->history->events[event];
    if (what->kind == HISTORY_RESERVE) {
        self->reserved += (uint64_t)self->history->changes[what->index].bytes;
        begin_event(self, "C", event);
        fprintf(self->stream, ",\"name\":\"reserved bytes\",\"args\":{\"all\":%" PRIu64 "}}",
                self->reserved);
        return;
    }
    begin_event(self, "i", event);
    fprintf(self->stream,
            ",\"s\":\"g\",\"name\":\"out of memory\",\"args\":{\"asked_bytes\":%" PRIu64
            ",\"device_free_bytes\":%" PRIu64 "}}",
            self->history->shortages[what->index].asked_bytes,
            self->history->shortages[what->index].free_bytes);
}

/* What was reserved when the recording began. */
static uint64_t reserved_before(const memory_history *history) {
    uint64_t bytes = history_reserved_bytes(history);
    for (uint32_t i = 0; i < history->change_count; i++)
        bytes -= (uint64_t)history->changes[i].bytes;
    return bytes;
}

int history_write_chrome(FILE *stream, const memory_history *history) {
    chrome_writer self = {.stream = stream, .history = history};
    if (!history_owners_gather(history, &self.owners)) return 0;
    self.reserved = reserved_before(history);
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
          "{\"ph\":\"M\",\"pid\":1,\"tid\":1,\"name\":\"process_name\",\"args\":{\"name\":",
          stream);
    put_name(stream, history->source);
    fputs("}}", stream);
    for (uint32_t i = 0; i < history->event_count; i++) {
        if (history->events[i].kind <= HISTORY_FREE) {
            put_block_event(&self, i);
        } else {
            put_other_event(&self, i);
        }
    }
    fputs("\n]}\n", stream);
    history_owners_deinit(&self.owners);
    return 1;
}
