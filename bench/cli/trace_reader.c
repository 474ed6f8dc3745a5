/* The trace reader: bytes, then lines, then fields, then events. See trace_reader.h.
 *
 *     gzFile -> chunk (64 KiB) -> line (at most 255 bytes) -> fields -> trace_event
 *
 * Invariants: `line_number` is that of the last line begun, so a message can be positioned at any
 * time; every live id has one slot, every slot that is not live is on the free list; once a
 * result other than TRACE_EVENT came out, it stays.
 */
#include "trace_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "id_table.h"
#include "name_table.h"
#include "torch_history.h"

#define CHUNK_BYTES (64 * 1024)
#define NO_SLOT     UINT32_MAX

enum { FIELDS_MAX = 7, FIRST_SLOTS = 1024 };

typedef enum trace_format {
    FORMAT_TENURE,
    FORMAT_TENURE_TIMED,
    FORMAT_TENURE_OWNED,
    FORMAT_RMM
} trace_format;

typedef struct format_row {
    const char *header;
    size_t columns;
    int is_open; /* the last column is the rest of the line, commas and all */
} format_row;

static const format_row formats[] = {
    [FORMAT_TENURE] = {"op,id,bytes,stream", 4, 0},
    [FORMAT_TENURE_TIMED] = {"op,id,bytes,stream,time_us", 5, 0},
    [FORMAT_TENURE_OWNED] = {"op,id,bytes,stream,time_us,address,owner", 7, 1},
    [FORMAT_RMM] = {"Thread,Time,Action,Pointer,Size,Stream", 6, 0},
};
enum { FORMAT_COUNT = sizeof(formats) / sizeof(formats[0]) };

typedef struct field {
    const char *text; /* not 0-terminated */
    size_t length;
} field;

/* What a live id is, and of a free slot the next one on the free list. */
typedef struct live_block {
    uint64_t bytes;
    uint64_t line;
    uint32_t stream;
    uint32_t next_free;
} live_block;

struct trace_reader {
    gzFile file;             /* NULL: events come from the history */
    memory_history *history; /* of a snapshot of PyTorch */
    uint32_t history_at;     /* its next event */
    char *name;
    double file_bytes; /* negative: not known */
    uint64_t device_bytes;
    trace_format format;
    trace_result result;
    int wants_shortages;
    uint64_t line_number;

    id_table ids;
    name_table owners;
    live_block *blocks;
    uint32_t slot_count;
    uint32_t slot_capacity;
    uint32_t first_free;

    uint32_t stream_count;
    uint64_t stream_names[TRACE_STREAMS_MAX];

    size_t chunk_at;
    size_t chunk_end;
    size_t line_length;
    char line[TRACE_LINE_BYTES_MAX + 1];
    field fields[FIELDS_MAX]; /* of the line, as many as the format has columns */
    char error[TRACE_ERROR_BYTES];
    char chunk[CHUNK_BYTES];
};

/* ---- messages ----------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static trace_result fail(trace_reader *reader,
                                                               const char *format, ...) {
    va_list arguments;
    int used = snprintf(reader->error, sizeof(reader->error), "%.300s:%llu: ", reader->name,
                        (unsigned long long)reader->line_number);
    va_start(arguments, format);
    vsnprintf(reader->error + used, sizeof(reader->error) - (size_t)used, format, arguments);
    va_end(arguments);
    return TRACE_BAD_INPUT;
}

static trace_result fail_no_memory(trace_reader *reader) {
    fail(reader, "out of host memory with %zu ids live", reader->ids.count);
    return TRACE_NO_MEMORY;
}

typedef struct quoted {
    char text[128];
} quoted;

/* The field as it can be shown: cut at 24 bytes, what does not print as \xNN. */
static quoted quote(field value) {
    quoted out = {"\""};
    size_t used = 1;
    size_t shown = value.length < 24 ? value.length : 24;
    for (size_t i = 0; i < shown; i++) {
        unsigned char byte = (unsigned char)value.text[i];
        int prints = byte >= 0x20 && byte < 0x7f;
        used += (size_t)snprintf(out.text + used, sizeof(out.text) - used,
                                 prints ? "%c" : "\\x%02x", byte);
    }
    snprintf(out.text + used, sizeof(out.text) - used, "%s\"", shown < value.length ? "..." : "");
    return out;
}

/* ---- lines -------------------------------------------------------------------------------- */

/* TRACE_END if nothing is left. What zlib could not decode is named at the line it broke in. */
static trace_result fill_chunk(trace_reader *reader) {
    int got = gzread(reader->file, reader->chunk, CHUNK_BYTES);
    if (got > 0) {
        reader->chunk_at = 0;
        reader->chunk_end = (size_t)got;
        return TRACE_EVENT;
    }
    int code = Z_OK;
    const char *words = gzerror(reader->file, &code);
    if (code == Z_BUF_ERROR)
        return fail(reader, "the compressed data ends early; expected a whole gzip file: was it "
                            "cut short while it was copied?");
    if (code == Z_ERRNO) return fail(reader, "cannot read: %s", strerror(errno));
    /* zlib puts its own name for the file first, which says nothing here. */
    const char *reason = strstr(words, ">: ");
    if (got < 0)
        return fail(reader, "damaged compressed data (%s); expected a gzip file",
                    reason ? reason + 3 : words);
    return TRACE_END;
}

static trace_result fail_overlong(trace_reader *reader) {
    return fail(reader, "line longer than %d bytes; expected %s", TRACE_LINE_BYTES_MAX,
                formats[reader->format].header);
}

/* Moves what the chunk has of the line into it; *ended if its newline was there. */
static trace_result take_from_chunk(trace_reader *reader, int *ended) {
    const char *from = reader->chunk + reader->chunk_at;
    size_t left = reader->chunk_end - reader->chunk_at;
    const char *newline = memchr(from, '\n', left);
    size_t length = newline ? (size_t)(newline - from) : left;
    if (length > TRACE_LINE_BYTES_MAX - reader->line_length) return fail_overlong(reader);
    memcpy(reader->line + reader->line_length, from, length);
    reader->line_length += length;
    reader->chunk_at += length + (newline ? 1 : 0);
    *ended = newline != NULL;
    return TRACE_EVENT;
}

/* The next line without its newline. A last line that has none may have been cut anywhere, also
 * within a number, so it is refused. */
static trace_result read_line(trace_reader *reader) {
    int ended = 0;
    reader->line_number++;
    reader->line_length = 0;
    while (!ended) {
        if (reader->chunk_at == reader->chunk_end) {
            trace_result result = fill_chunk(reader);
            if (result == TRACE_END && reader->line_length > 0)
                return fail(reader, "the last line has no newline; expected a whole line: the "
                                    "trace was cut short");
            if (result != TRACE_EVENT) return result;
        }
        trace_result result = take_from_chunk(reader, &ended);
        if (result != TRACE_EVENT) return result;
    }
    if (memchr(reader->line, 0, reader->line_length))
        return fail(reader, "the line has a NUL byte; expected text");
    if (reader->line_length > 0 && reader->line[reader->line_length - 1] == '\r')
        reader->line_length--;
    return TRACE_EVENT;
}

/* ---- fields ------------------------------------------------------------------------------- */

static int field_is(field value, const char *text) {
    return value.length == strlen(text) && memcmp(value.text, text, value.length) == 0;
}

static trace_result split_line(trace_reader *reader) {
    size_t columns = formats[reader->format].columns;
    size_t open_column = formats[reader->format].is_open ? columns - 1 : SIZE_MAX;
    const char *at = reader->line;
    const char *end = reader->line + reader->line_length;
    size_t count = 0;
    for (;;) {
        const char *comma = count == open_column ? NULL : memchr(at, ',', (size_t)(end - at));
        const char *stop = comma ? comma : end;
        if (count < columns) reader->fields[count] = (field){at, (size_t)(stop - at)};
        count++;
        if (!comma) break;
        at = comma + 1;
    }
    if (count == columns) return TRACE_EVENT;
    if (reader->line_length == 0)
        return fail(reader, "empty line; expected %s", formats[reader->format].header);
    return fail(reader, "%zu column%s; expected %zu: %s", count, count == 1 ? "" : "s", columns,
                formats[reader->format].header);
}

static int digit_of(char letter) {
    if (letter >= '0' && letter <= '9') return letter - '0';
    if (letter >= 'a' && letter <= 'f') return letter - 'a' + 10;
    if (letter >= 'A' && letter <= 'F') return letter - 'A' + 10;
    return 16;
}

/* NULL and the number, or what is wrong with it. */
static const char *parse_digits(const char *text, size_t length, uint64_t base, uint64_t *out) {
    uint64_t total = 0;
    if (length == 0) return "is empty";
    if (text[0] == '-') return "is negative";
    for (size_t i = 0; i < length; i++) {
        uint64_t digit = (uint64_t)digit_of(text[i]);
        if (digit >= base) return "is no number";
        if (__builtin_mul_overflow(total, base, &total)) return "is too large";
        if (__builtin_add_overflow(total, digit, &total)) return "is too large";
    }
    *out = total;
    return NULL;
}

static trace_result read_number(trace_reader *reader, const char *column, field value,
                                uint64_t *out) {
    const char *problem = parse_digits(value.text, value.length, 10, out);
    if (!problem) return TRACE_EVENT;
    return fail(reader, "%s %s %s; expected a whole number below 2^64", column, quote(value).text,
                problem);
}

/* RMM prints pointers and streams in base 16, with 0x or without, a null pointer as (nil). */
static trace_result read_address(trace_reader *reader, const char *column, field value,
                                 uint64_t *out) {
    *out = 0;
    if (field_is(value, "(nil)")) return TRACE_EVENT;
    size_t skip = value.length > 2 && value.text[0] == '0' && value.text[1] == 'x' ? 2 : 0;
    const char *problem = parse_digits(value.text + skip, value.length - skip, 16, out);
    if (!problem) return TRACE_EVENT;
    return fail(reader, "%s %s %s; expected a hexadecimal address such as 0x7f00", column,
                quote(value).text, problem);
}

/* Microseconds, perhaps with decimals. */
static trace_result read_time(trace_reader *reader, field value, double *out) {
    uint64_t number = 0;
    uint64_t part = 0;
    double scale = 1.0;
    const char *point = memchr(value.text, '.', value.length);
    size_t whole = point ? (size_t)(point - value.text) : value.length;
    const char *problem = parse_digits(value.text, whole, 10, &number);
    if (!problem && point) problem = parse_digits(point + 1, value.length - whole - 1, 10, &part);
    if (problem)
        return fail(reader, "time_us %s %s; expected microseconds such as 1250 or 1250.5",
                    quote(value).text, problem);
    for (size_t i = whole + 1; i < value.length; i++)
        scale *= 10.0;
    *out = (double)number + (double)part / scale;
    return TRACE_EVENT;
}

/* ---- ids and streams ---------------------------------------------------------------------- */

static trace_result find_stream(trace_reader *reader, uint64_t name, uint32_t *out) {
    for (uint32_t i = 0; i < reader->stream_count; i++) {
        if (reader->stream_names[i] == name) return *out = i, TRACE_EVENT;
    }
    if (reader->stream_count == TRACE_STREAMS_MAX)
        return fail(reader, "stream %llu is one too many; expected at most %d different streams",
                    (unsigned long long)name, TRACE_STREAMS_MAX);
    reader->stream_names[reader->stream_count] = name;
    *out = reader->stream_count++;
    return TRACE_EVENT;
}

static int reserve_slot(trace_reader *reader) {
    if (reader->first_free != NO_SLOT || reader->slot_count < reader->slot_capacity) return 1;
    if (reader->slot_capacity >= UINT32_MAX / 2) return 0;
    uint32_t capacity = reader->slot_capacity ? reader->slot_capacity * 2 : FIRST_SLOTS;
    live_block *blocks = realloc(reader->blocks, capacity * sizeof(*blocks));
    if (!blocks) return 0;
    reader->blocks = blocks;
    reader->slot_capacity = capacity;
    return 1;
}

static uint32_t take_slot(trace_reader *reader) {
    uint32_t slot = reader->first_free;
    if (slot == NO_SLOT) return reader->slot_count++;
    reader->first_free = reader->blocks[slot].next_free;
    return slot;
}

static trace_result make_alloc(trace_reader *reader, uint64_t id, uint64_t bytes, uint32_t stream,
                               field shown_id, trace_event *event) {
    uint32_t slot = 0;
    if (reader->device_bytes > 0 && bytes > reader->device_bytes)
        return fail(reader, "%llu bytes are more than the whole device; expected at most %llu",
                    (unsigned long long)bytes, (unsigned long long)reader->device_bytes);
    if (id_table_find(&reader->ids, id, &slot))
        return fail(reader, "id %s is still alive since line %llu; expected it to be freed first",
                    quote(shown_id).text, (unsigned long long)reader->blocks[slot].line);
    if (!reserve_slot(reader)) return fail_no_memory(reader);
    slot = reader->first_free != NO_SLOT ? reader->first_free : reader->slot_count;
    if (!id_table_insert(&reader->ids, id, slot)) return fail_no_memory(reader);
    slot = take_slot(reader);
    reader->blocks[slot] = (live_block){bytes, reader->line_number, stream, NO_SLOT};
    *event = (trace_event){.op = TRACE_ALLOC,
                           .slot = slot,
                           .stream = stream,
                           .bytes = bytes,
                           .line = reader->line_number,
                           .time_us = -1.0};
    return TRACE_EVENT;
}

/* stream is that of the allocation if it is not given. */
static trace_result make_free(trace_reader *reader, uint64_t id, const uint32_t *stream,
                              field shown_id, trace_event *event) {
    uint32_t slot = 0;
    if (!id_table_find(&reader->ids, id, &slot))
        return fail(reader,
                    "free of id %s, which is not alive; expected an id that was allocated "
                    "before and not yet freed",
                    quote(shown_id).text);
    live_block *block = &reader->blocks[slot];
    *event = (trace_event){.op = TRACE_FREE,
                           .slot = slot,
                           .stream = stream ? *stream : block->stream,
                           .bytes = block->bytes,
                           .line = reader->line_number,
                           .time_us = -1.0};
    (void)id_table_remove(&reader->ids, id);
    block->next_free = reader->first_free;
    reader->first_free = slot;
    return TRACE_EVENT;
}

/* ---- events ------------------------------------------------------------------------------- */

static trace_result parse_tenure_alloc(trace_reader *reader, const field *fields, uint64_t id,
                                       trace_event *event) {
    uint64_t bytes = 0, name = 0;
    uint32_t stream = 0;
    trace_result result = read_number(reader, "bytes", fields[2], &bytes);
    if (result == TRACE_EVENT) result = read_number(reader, "stream", fields[3], &name);
    if (result == TRACE_EVENT) result = find_stream(reader, name, &stream);
    if (result != TRACE_EVENT) return result;
    return make_alloc(reader, id, bytes, stream, fields[1], event);
}

static trace_result parse_tenure_free(trace_reader *reader, const field *fields, uint64_t id,
                                      trace_event *event) {
    uint64_t name = 0;
    uint32_t stream = 0;
    if (fields[2].length > 0)
        return fail(reader, "a free has bytes %s; expected none: f,id,,stream",
                    quote(fields[2]).text);
    if (fields[3].length == 0) return make_free(reader, id, NULL, fields[1], event);
    trace_result result = read_number(reader, "stream", fields[3], &name);
    if (result == TRACE_EVENT) result = find_stream(reader, name, &stream);
    if (result != TRACE_EVENT) return result;
    return make_free(reader, id, &stream, fields[1], event);
}

/* The columns that only the longest format has. */
static trace_result parse_place(trace_reader *reader, const field *fields, int is_alloc,
                                uint64_t *address, uint32_t *owner) {
    trace_result result = TRACE_EVENT;
    if (reader->format != FORMAT_TENURE_OWNED) return TRACE_EVENT;
    if (!is_alloc && fields[5].length + fields[6].length > 0)
        return fail(reader,
                    "a free has address %s and owner %s; expected none: f,id,,stream,time,,",
                    quote(fields[5]).text, quote(fields[6]).text);
    if (fields[5].length > 0) result = read_address(reader, "address", fields[5], address);
    if (result != TRACE_EVENT) return result;
    return name_table_add(&reader->owners, fields[6].text, fields[6].length, owner)
               ? TRACE_EVENT
               : fail_no_memory(reader);
}

static trace_result parse_shortage(trace_reader *reader, const field *fields, trace_event *event) {
    *event = (trace_event){.op = TRACE_SHORTAGE, .line = reader->line_number};
    if (fields[1].length + fields[3].length + fields[5].length > 0)
        return fail(reader, "op o has an id, a stream or an address; expected none: "
                            "o,,bytes,,time,,owner");
    trace_result result = read_number(reader, "bytes", fields[2], &event->bytes);
    if (result == TRACE_EVENT) result = read_time(reader, fields[4], &event->time_us);
    if (result != TRACE_EVENT) return result;
    return name_table_add(&reader->owners, fields[6].text, fields[6].length, &event->owner)
               ? TRACE_EVENT
               : fail_no_memory(reader);
}

static trace_result parse_tenure(trace_reader *reader, const field *fields, trace_event *event) {
    uint64_t id = 0;
    uint64_t address = 0;
    uint32_t owner = 0;
    double time_us = -1.0;
    int is_alloc = field_is(fields[0], "a");
    if (reader->format == FORMAT_TENURE_OWNED && field_is(fields[0], "o"))
        return parse_shortage(reader, fields, event);
    if (!is_alloc && !field_is(fields[0], "f"))
        return fail(reader, "unknown op %s; expected a (allocate) or f (free)",
                    quote(fields[0]).text);
    trace_result result = read_number(reader, "id", fields[1], &id);
    if (result == TRACE_EVENT && reader->format != FORMAT_TENURE)
        result = read_time(reader, fields[4], &time_us);
    if (result == TRACE_EVENT) result = parse_place(reader, fields, is_alloc, &address, &owner);
    if (result == TRACE_EVENT)
        result = is_alloc ? parse_tenure_alloc(reader, fields, id, event)
                          : parse_tenure_free(reader, fields, id, event);
    if (result != TRACE_EVENT) return result;
    event->time_us = time_us;
    event->address = address;
    event->owner = owner;
    return TRACE_EVENT;
}

/* TRACE_END: the row is no event (a null pointer of 0 bytes). */
static trace_result parse_rmm(trace_reader *reader, const field *fields, trace_event *event) {
    uint64_t address = 0, bytes = 0, name = 0;
    uint32_t stream = 0;
    int is_alloc = field_is(fields[2], "allocate");
    int is_free = field_is(fields[2], "free") || field_is(fields[2], "deallocate");
    int is_failure = field_is(fields[2], "allocate failure");
    if (!is_alloc && !is_free && !is_failure)
        return fail(reader, "unknown Action %s; expected allocate, free or allocate failure",
                    quote(fields[2]).text);
    trace_result result = read_number(reader, "Thread", fields[0], &name);
    if (result == TRACE_EVENT) result = read_address(reader, "Pointer", fields[3], &address);
    if (result == TRACE_EVENT) result = read_number(reader, "Size", fields[4], &bytes);
    if (result == TRACE_EVENT) result = read_address(reader, "Stream", fields[5], &name);
    if (result != TRACE_EVENT) return result;
    if (is_failure) {
        *event = (trace_event){.op = TRACE_SHORTAGE, .bytes = bytes, .time_us = -1.0};
        event->line = reader->line_number;
        return TRACE_EVENT;
    }
    if (address == 0 && bytes == 0) return TRACE_END;
    if (address == 0)
        return fail(reader, "Pointer %s of %llu bytes; expected an address", quote(fields[3]).text,
                    (unsigned long long)bytes);
    result = find_stream(reader, name, &stream);
    if (result != TRACE_EVENT) return result;
    result = is_alloc ? make_alloc(reader, address, bytes, stream, fields[3], event)
                      : make_free(reader, address, &stream, fields[3], event);
    if (result == TRACE_EVENT && is_alloc) event->address = address;
    return result;
}

/* An event of the history: its number stands for the line, the block's number for the id. */
static trace_result recall_event(trace_reader *reader, trace_event *event) {
    const memory_history *history = reader->history;
    while (reader->history_at < history->event_count) {
        const history_event *from = &history->events[reader->history_at++];
        const history_block *block;
        const char *owner;
        trace_result result;
        reader->line_number = reader->history_at;
        if (from->kind > HISTORY_FREE) continue;
        block = &history->blocks[from->index];
        owner = name_table_text(&history->owners, block->owner);
        if (block->stream >= reader->stream_count) reader->stream_count = block->stream + 1;
        result = from->kind == HISTORY_ALLOC
                     ? make_alloc(reader, from->index, block->bytes, block->stream, (field){"", 0},
                                  event)
                     : make_free(reader, from->index, NULL, (field){"", 0}, event);
        if (result != TRACE_EVENT) return result;
        event->time_us = from->time_us;
        if (from->kind == HISTORY_FREE) return TRACE_EVENT;
        event->address = block->address;
        return name_table_add(&reader->owners, owner, strlen(owner), &event->owner)
                   ? TRACE_EVENT
                   : fail_no_memory(reader);
    }
    return TRACE_END;
}

static trace_result read_event(trace_reader *reader, trace_event *event) {
    const field *fields = reader->fields;
    if (reader->history) return recall_event(reader, event);
    for (;;) {
        trace_result result = read_line(reader);
        if (result == TRACE_EVENT) result = split_line(reader);
        if (result != TRACE_EVENT) return result;
        result = reader->format == FORMAT_RMM ? parse_rmm(reader, fields, event)
                                              : parse_tenure(reader, fields, event);
        if (result == TRACE_END) continue;
        if (result != TRACE_EVENT || event->op != TRACE_SHORTAGE || reader->wants_shortages)
            return result;
    }
}

void trace_reader_limit(trace_reader *reader, uint64_t device_bytes) {
    reader->device_bytes = device_bytes;
}

int trace_reader_want_shortages(trace_reader *reader) {
    reader->wants_shortages = 1;
    return reader->format == FORMAT_TENURE_OWNED || reader->format == FORMAT_RMM;
}

trace_result trace_reader_next(trace_reader *reader, trace_event *event) {
    if (reader->result != TRACE_EVENT) return reader->result;
    reader->result = read_event(reader, event);
    return reader->result;
}

/* ---- opening ------------------------------------------------------------------------------ */

static trace_result read_header(trace_reader *reader) {
    trace_result result = read_line(reader);
    if (result == TRACE_END)
        return fail(reader, "the trace is empty; expected the header line %s",
                    formats[FORMAT_TENURE].header);
    if (result != TRACE_EVENT) return result;
    field line = {reader->line, reader->line_length};
    for (int format = 0; format < FORMAT_COUNT; format++) {
        if (!field_is(line, formats[format].header)) continue;
        reader->format = (trace_format)format;
        return TRACE_EVENT;
    }
    return fail(reader, "header line %s; expected %s or %s or %s or %s", quote(line).text,
                formats[FORMAT_TENURE].header, formats[FORMAT_TENURE_TIMED].header,
                formats[FORMAT_TENURE_OWNED].header, formats[FORMAT_RMM].header);
}

static void write_open_error(char *error, const char *name, const char *words) {
    snprintf(error, TRACE_ERROR_BYTES, "%.300s: cannot open: %s", name, words);
}

static trace_result fail_open(trace_reader *reader, const char *name, char *error) {
    write_open_error(error, name, "out of host memory");
    if (reader) free(reader->name);
    free(reader);
    return TRACE_NO_MEMORY;
}

/* Takes the descriptor over only on success. */
static trace_result make_reader(int descriptor, const char *name, trace_reader **out, char *error) {
    trace_reader *reader = calloc(1, sizeof(*reader));
    if (reader) reader->name = strdup(name);
    if (reader && reader->name) reader->file = gzdopen(descriptor, "rb");
    if (!reader || !reader->file) return fail_open(reader, name, error);
    (void)gzbuffer(reader->file, CHUNK_BYTES); /* only speed: the default buffer works too */
    reader->first_free = NO_SLOT;
    *out = reader;
    return TRACE_EVENT;
}

/* All bytes of a file; NULL and errno if they can not be read. */
static unsigned char *read_bytes(int descriptor, size_t length) {
    unsigned char *bytes = malloc(length);
    size_t at = 0;
    while (bytes && at < length) {
        ssize_t got = read(descriptor, bytes + at, length - at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            if (got == 0) errno = ENODATA; /* shorter than it was a moment ago */
            free(bytes);
            return NULL;
        }
        at += (size_t)got;
    }
    return bytes;
}

static trace_result make_history_reader(int descriptor, size_t length, const char *name,
                                        trace_reader **out, char *error) {
    unsigned char *bytes = read_bytes(descriptor, length);
    trace_reader *reader;
    int status;
    if (!bytes) {
        write_open_error(error, name, strerror(errno));
        return errno == ENOMEM ? TRACE_NO_MEMORY : TRACE_BAD_INPUT;
    }
    reader = calloc(1, sizeof(*reader));
    if (reader) reader->name = strdup(name);
    if (!reader || !reader->name) {
        free(bytes);
        return fail_open(reader, name, error);
    }
    status = torch_history_read(name, bytes, length, ORDINAL_ANY, &reader->history, error);
    free(bytes);
    if (status != 0) {
        free(reader->name);
        free(reader);
        return status == 2 ? TRACE_BAD_INPUT : TRACE_NO_MEMORY;
    }
    reader->first_free = NO_SLOT;
    *out = reader;
    return TRACE_EVENT;
}

static int is_pickle(int descriptor) {
    unsigned char first = 0;
    return pread(descriptor, &first, 1, 0) == 1 && torch_history_is(&first, 1);
}

static trace_result open_text(int descriptor, const char *name, double file_bytes,
                              trace_reader **out, char *error) {
    trace_reader *reader = NULL;
    trace_result result = make_reader(descriptor, name, &reader, error);
    if (result != TRACE_EVENT) {
        close(descriptor);
        return result;
    }
    reader->file_bytes = file_bytes;
    result = read_header(reader);
    if (result != TRACE_EVENT) {
        memcpy(error, reader->error, sizeof(reader->error));
        trace_reader_close(reader);
        return result;
    }
    *out = reader;
    return TRACE_EVENT;
}

trace_result trace_reader_open_descriptor(int descriptor, const char *name, trace_reader **out,
                                          char *error) {
    struct stat about;
    int has_stat = fstat(descriptor, &about) == 0;
    int is_file = has_stat && S_ISREG(about.st_mode);
    if (has_stat && S_ISDIR(about.st_mode)) {
        write_open_error(error, name, "it is a directory; expected a trace");
        close(descriptor);
        return TRACE_BAD_INPUT;
    }
    if (is_file && is_pickle(descriptor)) {
        trace_result result =
            make_history_reader(descriptor, (size_t)about.st_size, name, out, error);
        close(descriptor);
        return result;
    }
    return open_text(descriptor, name, is_file ? (double)about.st_size : -1.0, out, error);
}

trace_result trace_reader_open(const char *path, trace_reader **out, char *error) {
    int is_standard_input = strcmp(path, "-") == 0;
    const char *name = is_standard_input ? "standard input" : path;
    int descriptor = is_standard_input ? fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0)
                                       : open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        write_open_error(error, name, strerror(errno));
        return TRACE_BAD_INPUT;
    }
    return trace_reader_open_descriptor(descriptor, name, out, error);
}

void trace_reader_close(trace_reader *reader) {
    if (!reader) return;
    /* What closing could complain of, reading has reported. */
    if (reader->file) (void)gzclose_r(reader->file);
    history_destroy(reader->history);
    id_table_deinit(&reader->ids);
    name_table_deinit(&reader->owners);
    free(reader->blocks);
    free(reader->name);
    free(reader);
}

/* ---- what is known so far ----------------------------------------------------------------- */

const char *trace_reader_error(const trace_reader *reader) { return reader->error; }

uint32_t trace_reader_slot_count(const trace_reader *reader) { return reader->slot_count; }

uint32_t trace_reader_stream_count(const trace_reader *reader) { return reader->stream_count; }

const char *trace_reader_owner(const trace_reader *reader, uint32_t owner) {
    return name_table_text(&reader->owners, owner);
}

double trace_reader_done(const trace_reader *reader) {
    if (reader->history)
        return (double)reader->history_at / ((double)reader->history->event_count + 1.0);
    if (reader->file_bytes <= 0.0) return -1.0;
    double offset = (double)gzoffset(reader->file);
    return offset < reader->file_bytes ? offset / reader->file_bytes : 1.0;
}
