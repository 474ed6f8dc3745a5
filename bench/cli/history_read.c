/* Finds out what a file is, and reads it: see history_read.h. */
#include "history_read.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "pool_history.h"
#include "progress.h"
#include "trace_reader.h"

enum { EXIT_BAD_INPUT = 2, PROGRESS_EVENTS = 4096 };

file_kind history_file_kind(const char *path) {
    struct stat about;
    FILE *file = NULL;
    int first = EOF;
    /* What is looked at in a pipe is gone from it. */
    if (strcmp(path, "-") != 0 && stat(path, &about) == 0 && S_ISREG(about.st_mode))
        file = fopen(path, "re");
    if (!file) return FILE_TRACE;
    do {
        first = fgetc(file);
    } while (first == ' ' || first == '\n' || first == '\t' || first == '\r');
    fclose(file);
    return first == '{' ? FILE_JSON : first == 0x80 ? FILE_PICKLE : FILE_TRACE;
}

/* NULL if there is no memory. */
static char *read_whole(FILE *file, size_t *bytes) {
    size_t room = 1 << 16;
    char *text = malloc(room);
    *bytes = 0;
    while (text) {
        char *grown;
        *bytes += fread(text + *bytes, 1, room - 1 - *bytes, file);
        if (*bytes < room - 1) break;
        room *= 2;
        grown = realloc(text, room);
        if (!grown) free(text);
        text = grown;
    }
    if (text) text[*bytes] = 0;
    return text;
}

char *history_read_file(const char *path, size_t *bytes, char *error, int *status) {
    FILE *file = fopen(path, "re");
    char *text = file ? read_whole(file, bytes) : NULL;
    *status = 0;
    if (!file || ferror(file)) {
        snprintf(error, HISTORY_ERROR_BYTES, "%.300s: cannot read: %s", path, strerror(errno));
        *status = EXIT_BAD_INPUT;
    } else if (!text) {
        snprintf(error, HISTORY_ERROR_BYTES, "out of host memory");
        *status = EXIT_FAILURE;
    }
    if (file) fclose(file);
    if (*status == 0) return text;
    free(text);
    return NULL;
}

static int read_pickle(const history_source *source, memory_history **out, char *error) {
    int status = 0;
    size_t bytes = 0;
    char *text = history_read_file(source->path, &bytes, error, &status);
    if (text)
        status = torch_history_read(source->path, (const unsigned char *)text, bytes,
                                    source->ordinal, out, error);
    free(text);
    return status;
}

static int read_json(const history_source *source, memory_history **out, char *error) {
    int status = 0;
    int is_out_of_memory = 0;
    size_t bytes = 0;
    char *text = history_read_file(source->path, &bytes, error, &status);
    cJSON *root = text ? cJSON_ParseWithLength(text, bytes) : NULL;
    if (text && !root) {
        snprintf(error, HISTORY_ERROR_BYTES, "%.300s: it is no JSON object", source->path);
        status = EXIT_BAD_INPUT;
    } else if (root && !pool_history_read(source->path, root, out, error, &is_out_of_memory)) {
        status = is_out_of_memory ? EXIT_FAILURE : EXIT_BAD_INPUT;
    }
    cJSON_Delete(root);
    free(text);
    return status;
}

/* ---- traces ---------------------------------------------------------------------------------- */

typedef struct trace_input {
    trace_reader *reader;
    memory_history *history;
    uint32_t *blocks; /* of each slot */
    uint32_t slot_count;
} trace_input;

static int reserve_slots(trace_input *self) {
    uint32_t needed = trace_reader_slot_count(self->reader);
    uint32_t count = self->slot_count ? self->slot_count : 1024;
    uint32_t *blocks;
    if (needed <= self->slot_count) return 1;
    while (count < needed)
        count *= 2; /* the reader has fewer than 2^31 slots */
    blocks = realloc(self->blocks, count * sizeof *blocks);
    if (!blocks) return 0;
    self->blocks = blocks;
    self->slot_count = count;
    return 1;
}

static int add_event(trace_input *self, const trace_event *event) {
    history_block block = {.address = event->address, .bytes = event->bytes};
    const char *owner = trace_reader_owner(self->reader, event->owner);
    if (!reserve_slots(self)) return 0;
    if (event->op == TRACE_SHORTAGE) {
        history_shortage shortage = {.asked_bytes = event->bytes};
        return history_owner(self->history, owner, strlen(owner), &shortage.owner) &&
               history_shortage_add(self->history, &shortage, event->time_us);
    }
    if (event->op == TRACE_FREE)
        return history_free(self->history, self->blocks[event->slot], event->time_us);
    return history_stream(self->history, event->stream, &block.stream) &&
           history_owner(self->history, owner, strlen(owner), &block.owner) &&
           history_alloc(self->history, &block, event->time_us, &self->blocks[event->slot]);
}

static trace_result read_events(trace_input *self, const char *label) {
    progress bar;
    trace_event event;
    trace_result result;
    size_t count = 0;
    progress_begin(&bar, label);
    while ((result = trace_reader_next(self->reader, &event)) == TRACE_EVENT) {
        if (!add_event(self, &event)) {
            result = TRACE_NO_MEMORY;
            break;
        }
        if (++count % PROGRESS_EVENTS == 0) {
            double done = trace_reader_done(self->reader);
            progress_update(&bar, done, done < 0.0 ? 0.0 : 1.0);
        }
    }
    progress_end(&bar);
    return result;
}

static int trace_status(trace_result result) {
    if (result == TRACE_END) return 0;
    return result == TRACE_NO_MEMORY ? EXIT_FAILURE : EXIT_BAD_INPUT;
}

static int read_trace(const history_source *source, memory_history **out, char *error) {
    trace_input self = {0};
    trace_result result = trace_reader_open(source->path, &self.reader, error);
    if (result != TRACE_EVENT) return trace_status(result);
    self.history = history_create();
    if (self.history) self.history->has_shortages = trace_reader_want_shortages(self.reader);
    result = self.history ? read_events(&self, source->command) : TRACE_NO_MEMORY;
    if (result == TRACE_END && !history_finish(self.history)) result = TRACE_NO_MEMORY;
    snprintf(error, HISTORY_ERROR_BYTES, "%s", trace_reader_error(self.reader));
    if (result == TRACE_NO_MEMORY && !error[0])
        snprintf(error, HISTORY_ERROR_BYTES, "out of host memory");
    if (result == TRACE_END) {
        snprintf(self.history->source, sizeof self.history->source, "trace");
        *out = self.history;
    } else {
        history_destroy(self.history);
    }
    trace_reader_close(self.reader);
    free(self.blocks);
    return trace_status(result);
}

int history_read(const history_source *source, memory_history **out, char *error) {
    switch (history_file_kind(source->path)) {
    case FILE_PICKLE: return read_pickle(source, out, error);
    case FILE_JSON: return read_json(source, out, error);
    default: return read_trace(source, out, error);
    }
}
