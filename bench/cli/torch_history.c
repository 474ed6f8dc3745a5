/* From PyTorch's snapshot to a history: see torch_history.h.
 *
 * A pickle can hold the same list a million times, so what is walked is counted: no more entries
 * and blocks than the pickle has values. A stack of frames is looked at once, its owner is kept.
 */
#include "torch_history.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "id_table.h"
#include "pickle_reader.h"

enum { EXIT_BAD_INPUT = 2, MEMBERS_MAX = 64, FRAMES_MAX = 512, DEVICES_MAX = 1024 };
enum { FILE_BYTES_MAX = 4096 }; /* of a file's name, its end; many frames can have the same one */

typedef struct torch_reader {
    const char *name;
    char *error;
    pickle *root;
    memory_history *history;
    int ordinal;
    uint32_t visited;
    uint32_t *owners;        /* of lists of frames, by value number: owner + 1; 0: not looked at */
    id_table alive;          /* addresses of blocks without a completed free */
    unsigned char *is_asked; /* of blocks: their free was requested */
    uint32_t asked_capacity;
} torch_reader;

/* ---- messages -------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static int fail(torch_reader *self, const char *format, ...) {
    va_list arguments;
    int used = snprintf(self->error, HISTORY_ERROR_BYTES, "%.200s: ", self->name);
    va_start(arguments, format);
    vsnprintf(self->error + used, HISTORY_ERROR_BYTES - (size_t)used, format, arguments);
    va_end(arguments);
    return EXIT_BAD_INPUT;
}

static int no_memory(torch_reader *self) {
    snprintf(self->error, HISTORY_ERROR_BYTES, "out of host memory");
    return EXIT_FAILURE;
}

/* ---- members --------------------------------------------------------------------------------- */

static const pickle_value *list_of(const torch_reader *self, const pickle_value *dict,
                                   const char *name) {
    const pickle_value *value = pickle_member(self->root, dict, name);
    return value && value->kind == PICKLE_LIST ? value : NULL;
}

/* 1 if the dict has that member and it is a whole number, negative or not. */
static int number_of(const torch_reader *self, const pickle_value *dict, const char *name,
                     int64_t *out) {
    const pickle_value *value = pickle_member(self->root, dict, name);
    if (!value || value->kind != PICKLE_INTEGER) return 0;
    *out = value->of.integer;
    return 1;
}

/* A dict that is one entry: counted, and small enough to be looked through for each member. */
static int enter(torch_reader *self, const pickle_value *dict, const char *what, uint32_t index) {
    if (dict->kind != PICKLE_DICT)
        return fail(self, "%s %u is no dict; expected a memory snapshot of PyTorch", what, index);
    if (dict->count > 2 * MEMBERS_MAX)
        return fail(self, "%s %u has %u members; expected at most %d", what, index, dict->count / 2,
                    MEMBERS_MAX);
    if (++self->visited > pickle_value_count(self->root))
        return fail(self, "the same lists are used again and again; expected each once");
    return 0;
}

/* ---- owners ---------------------------------------------------------------------------------- */

typedef struct file_name {
    const char *text; /* not 0-terminated */
    size_t bytes;
} file_name;

/* The end of the name: what is looked at of a frame must not grow with the pickle. */
static file_name end_of_name(const pickle_value *file) {
    size_t bytes = file->count < FILE_BYTES_MAX ? file->count : FILE_BYTES_MAX;
    return (file_name){file->of.text + (file->count - bytes), bytes};
}

static int is_torch(const pickle_value *file) {
    static const char part[] = "/torch/";
    file_name name = end_of_name(file);
    return memmem(name.text, name.bytes, part, strlen(part)) != NULL;
}

static int is_python(const pickle_value *file) {
    return file->count > 3 && memcmp(file->of.text + file->count - 3, ".py", 3) == 0;
}

/* The frame that says best where memory was asked for: the innermost of the program's own Python,
 * else the innermost of Python, else the first. */
static const pickle_value *best_frame(const torch_reader *self, const pickle_value *frames) {
    const pickle_value *best = NULL;
    int best_rank = 0;
    for (uint32_t i = 0; i < frames->count && i < FRAMES_MAX && best_rank < 3; i++) {
        const pickle_value *frame = pickle_item(self->root, frames, i);
        const pickle_value *file;
        int rank;
        if (frame->kind != PICKLE_DICT || frame->count > 2 * MEMBERS_MAX) continue;
        file = pickle_member(self->root, frame, "filename");
        if (!file || file->kind != PICKLE_TEXT) continue;
        rank = !is_python(file) ? 1 : is_torch(file) ? 2 : 3;
        if (rank <= best_rank) continue;
        best_rank = rank;
        best = frame;
    }
    return best;
}

/* "train.py:42 forward" */
static int name_frame(torch_reader *self, const pickle_value *frame, uint32_t *owner) {
    const pickle_value *function = pickle_member(self->root, frame, "name");
    file_name file = end_of_name(pickle_member(self->root, frame, "filename"));
    char text[2 * NAME_BYTES_MAX];
    const char *base = memrchr(file.text, '/', file.bytes);
    size_t file_bytes = base ? file.bytes - (size_t)(base + 1 - file.text) : file.bytes;
    int64_t line = 0;
    int has_name = function && function->kind == PICKLE_TEXT;
    int used;
    if (file_bytes > 60) file_bytes = 60;
    used = snprintf(text, sizeof text, "%.*s", (int)file_bytes, base ? base + 1 : file.text);
    if (number_of(self, frame, "line", &line) && line > 0)
        used += snprintf(text + used, sizeof text - (size_t)used, ":%lld", (long long)line);
    if (has_name)
        used += snprintf(text + used, sizeof text - (size_t)used, " %.*s",
                         function->count < 80 ? (int)function->count : 80, function->of.text);
    return history_owner(self->history, text, (size_t)used, owner);
}

static int owner_of(torch_reader *self, const pickle_value *entry, uint32_t *owner) {
    const pickle_value *metadata = pickle_member(self->root, entry, "user_metadata");
    const pickle_value *frames = list_of(self, entry, "frames");
    const pickle_value *best;
    uint32_t *known;
    *owner = 0;
    if (metadata && metadata->kind == PICKLE_TEXT && metadata->count > 0)
        return history_owner(self->history, metadata->of.text, metadata->count, owner);
    if (!frames) return 1;
    known = &self->owners[pickle_value_number(self->root, frames)];
    if (*known == 0) {
        best = best_frame(self, frames);
        if (best && !name_frame(self, best, owner)) return 0;
        *known = *owner + 1;
    }
    *owner = *known - 1;
    return 1;
}

/* ---- events ---------------------------------------------------------------------------------- */

/* The flag of a block, which is clear if the block is new. */
static unsigned char *asked_flag(torch_reader *self, uint32_t block) {
    if (block >= self->asked_capacity) {
        uint32_t capacity = block < 512 ? 1024 : 2 * block;
        unsigned char *grown = realloc(self->is_asked, capacity);
        if (!grown) return NULL;
        memset(grown + self->asked_capacity, 0, capacity - self->asked_capacity);
        self->is_asked = grown;
        self->asked_capacity = capacity;
    }
    return &self->is_asked[block];
}

typedef struct torch_event {
    const pickle_value *entry;
    uint64_t address;
    uint64_t bytes;
    uint32_t stream;
    double time_us;
} torch_event;

static int make_block(torch_reader *self, const torch_event *event, history_block *out) {
    *out = (history_block){.address = event->address, .bytes = event->bytes};
    out->stream = event->stream;
    return owner_of(self, event->entry, &out->owner);
}

static int read_alloc(torch_reader *self, const torch_event *event, uint32_t number) {
    history_block block;
    uint32_t index = 0;
    if (id_table_find(&self->alive, event->address, &index)) {
        unsigned char *flag = asked_flag(self, index);
        if (!flag) return no_memory(self);
        if (!*flag)
            return fail(self,
                        "event %u of device %d allocates address 0x%llx, which is still alive; "
                        "expected it to be freed first",
                        number, self->ordinal, (unsigned long long)event->address);
        /* Completions can be left out of a recording. */
        if (!history_free(self->history, index, event->time_us)) return no_memory(self);
        (void)id_table_remove(&self->alive, event->address);
    }
    if (!make_block(self, event, &block) ||
        !history_alloc(self->history, &block, event->time_us, &index) ||
        !id_table_insert(&self->alive, event->address, index))
        return no_memory(self);
    return 0;
}

/* Of a block that was there before the recording as well. */
static int read_free(torch_reader *self, const torch_event *event, int is_complete) {
    history_block block;
    uint32_t index = 0;
    unsigned char *flag;
    if (!id_table_find(&self->alive, event->address, &index)) {
        /* The stack is that of the free: whose the block was is not known. */
        block = (history_block){.address = event->address, .bytes = event->bytes};
        block.stream = event->stream;
        if (!history_before(self->history, &block, &index) ||
            !id_table_insert(&self->alive, event->address, index))
            return no_memory(self);
    }
    flag = asked_flag(self, index);
    if (!flag) return no_memory(self);
    *flag = 1;
    if (!is_complete) return 0;
    (void)id_table_remove(&self->alive, event->address);
    return history_free(self->history, index, event->time_us) ? 0 : no_memory(self);
}

static int read_shortage(torch_reader *self, const torch_event *event) {
    history_shortage shortage = {.asked_bytes = event->bytes};
    int64_t free_bytes = 0;
    if (number_of(self, event->entry, "device_free", &free_bytes))
        shortage.free_bytes = (uint64_t)free_bytes;
    if (!owner_of(self, event->entry, &shortage.owner)) return no_memory(self);
    return history_shortage_add(self->history, &shortage, event->time_us) ? 0 : no_memory(self);
}

/* Actions that say nothing of blocks or segments are passed over: later versions may add some. */
static int read_action(torch_reader *self, const pickle_value *action, const torch_event *event,
                       uint32_t number) {
    int64_t bytes = (int64_t)event->bytes;
    if (pickle_is_text(action, "alloc")) return read_alloc(self, event, number);
    if (pickle_is_text(action, "free_requested")) return read_free(self, event, 0);
    if (pickle_is_text(action, "free_completed") || pickle_is_text(action, "free"))
        return read_free(self, event, 1);
    if (pickle_is_text(action, "oom")) return read_shortage(self, event);
    if (pickle_is_text(action, "segment_free") || pickle_is_text(action, "segment_unmap")) {
        bytes = -bytes;
    } else if (!pickle_is_text(action, "segment_alloc") && !pickle_is_text(action, "segment_map")) {
        return 0;
    }
    return history_reserve(self->history, bytes, event->address, event->time_us) ? 0
                                                                                 : no_memory(self);
}

static int read_event(torch_reader *self, const pickle_value *entry, uint32_t number) {
    const pickle_value *action;
    torch_event event = {.entry = entry, .time_us = -1.0};
    int64_t address = 0, bytes = 0, stream = 0, time_us = -1;
    int status = enter(self, entry, "event", number);
    if (status != 0) return status;
    action = pickle_member(self->root, entry, "action");
    if (!action || action->kind != PICKLE_TEXT)
        return fail(self, "event %u of device %d has no action", number, self->ordinal);
    if (pickle_is_text(action, "snapshot")) return 0;
    if (!number_of(self, entry, "size", &bytes) || bytes < 0)
        return fail(self, "event %u of device %d has no size of at least 0", number, self->ordinal);
    if (!number_of(self, entry, "addr", &address) && !pickle_is_text(action, "oom"))
        return fail(self, "event %u of device %d has no address", number, self->ordinal);
    (void)number_of(self, entry, "stream", &stream);
    (void)number_of(self, entry, "time_us", &time_us);
    event.address = (uint64_t)address;
    event.bytes = (uint64_t)bytes;
    event.time_us = (double)time_us;
    if (!history_stream(self->history, (uint64_t)stream, &event.stream)) return no_memory(self);
    return read_action(self, action, &event, number);
}

/* ---- segments -------------------------------------------------------------------------------- */

static int check_alive(torch_reader *self, const history_piece *piece, uint32_t stream) {
    history_block block = {.address = piece->address, .bytes = piece->asked_bytes};
    uint32_t index = 0;
    if (id_table_find(&self->alive, piece->address, &index)) return 0;
    block.stream = stream;
    block.owner = piece->owner;
    return history_before(self->history, &block, &index) &&
                   id_table_insert(&self->alive, piece->address, index)
               ? 0
               : no_memory(self);
}

static int read_block(torch_reader *self, const pickle_value *entry, uint32_t number,
                      history_piece *piece, uint32_t stream) {
    const pickle_value *state;
    int64_t bytes = 0, asked = 0;
    int status = enter(self, entry, "block", number);
    if (status != 0) return status;
    state = pickle_member(self->root, entry, "state");
    if (!number_of(self, entry, "size", &bytes) || bytes < 0 || !state)
        return fail(self, "block %u of a segment has no size or no state", number);
    if (!number_of(self, entry, "requested_size", &asked)) asked = bytes;
    if (asked < 0 || asked > bytes) asked = bytes;
    piece->bytes = (uint64_t)bytes;
    piece->state = pickle_is_text(state, "active_allocated") ? HISTORY_LIVE
                   : pickle_is_text(state, "inactive")       ? HISTORY_UNUSED
                                                             : HISTORY_PENDING;
    piece->asked_bytes = piece->state == HISTORY_UNUSED ? 0 : (uint64_t)asked;
    piece->owner = 0;
    if (piece->state != HISTORY_UNUSED) {
        if (!owner_of(self, entry, &piece->owner)) return no_memory(self);
        status = check_alive(self, piece, stream);
    }
    if (status == 0 && !history_piece_add(self->history, piece)) return no_memory(self);
    return status;
}

static int read_segment(torch_reader *self, const pickle_value *entry, uint32_t number) {
    const pickle_value *blocks;
    history_piece piece = {0};
    int64_t address = 0, bytes = 0, stream = 0, device = 0;
    uint32_t stream_number = 0;
    int status = enter(self, entry, "segment", number);
    if (status != 0) return status;
    (void)number_of(self, entry, "device", &device);
    if (device != self->ordinal) return 0;
    blocks = list_of(self, entry, "blocks");
    if (!number_of(self, entry, "address", &address) || !blocks ||
        !number_of(self, entry, "total_size", &bytes) || bytes < 0)
        return fail(self, "segment %u has no address, total_size or blocks", number);
    (void)number_of(self, entry, "stream", &stream);
    if (!history_stream(self->history, (uint64_t)stream, &stream_number) ||
        !history_segment_begin(self->history, (uint64_t)address, (uint64_t)stream))
        return no_memory(self);
    piece.address = (uint64_t)address;
    for (uint32_t i = 0; i < blocks->count && status == 0; i++) {
        status = read_block(self, pickle_item(self->root, blocks, i), i, &piece, stream_number);
        piece.address += piece.bytes;
    }
    if (status == 0 && piece.address - (uint64_t)address != (uint64_t)bytes)
        return fail(self, "the blocks of segment %u add up to %llu bytes, but it has %lld", number,
                    (unsigned long long)(piece.address - (uint64_t)address), (long long)bytes);
    return status;
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* Which devices have anything: a bit of each, as far as there is one. */
static int find_devices(torch_reader *self, const pickle_value *segments,
                        const pickle_value *traces, unsigned char *has) {
    for (uint32_t i = 0; i < traces->count && i < DEVICES_MAX; i++) {
        const pickle_value *trace = pickle_item(self->root, traces, i);
        if (trace->kind != PICKLE_LIST)
            return fail(self, "device_traces %u is no list; expected one for each device", i);
        has[i] = trace->count > 0;
    }
    for (uint32_t i = 0; i < segments->count; i++) {
        const pickle_value *segment = pickle_item(self->root, segments, i);
        int64_t device = 0;
        if (segment->kind != PICKLE_DICT || segment->count > 2 * MEMBERS_MAX) continue;
        (void)number_of(self, segment, "device", &device);
        if (device >= 0 && device < DEVICES_MAX) has[device] = 1;
    }
    return 0;
}

static int choose_device(torch_reader *self, const unsigned char *has) {
    char listed[128] = "";
    size_t used = 0;
    int count = 0;
    int first = 0;
    for (int i = 0; i < DEVICES_MAX; i++) {
        if (!has[i]) continue;
        if (count++ == 0) first = i;
        if (used + 8 < sizeof listed)
            used += (size_t)snprintf(listed + used, sizeof listed - used, "%s%d",
                                     count > 1 ? ", " : "", i);
    }
    if (count == 0)
        return fail(self, "the snapshot has no memory and no events; record with "
                          "torch.cuda.memory._record_memory_history()");
    if (self->ordinal == ORDINAL_ANY && count > 1)
        return fail(self, "the snapshot has devices %s; choose one by `tenure convert --ordinal N`",
                    listed);
    if (self->ordinal == ORDINAL_ANY) self->ordinal = first;
    if (self->ordinal < DEVICES_MAX && has[self->ordinal]) return 0;
    return fail(self, "the snapshot has nothing of device %d, only of %s", self->ordinal, listed);
}

static int read_all(torch_reader *self) {
    static const char expected[] = "expected a memory snapshot of PyTorch "
                                   "(torch.cuda.memory._dump_snapshot)";
    const pickle_value *root = pickle_root(self->root);
    unsigned char has[DEVICES_MAX] = {0};
    const pickle_value *segments, *traces;
    int status;
    if (root->kind != PICKLE_DICT || root->count > 2 * MEMBERS_MAX)
        return fail(self, "the pickle is not of a dict with a few members; %s", expected);
    segments = list_of(self, root, "segments");
    traces = list_of(self, root, "device_traces");
    if (!segments || !traces)
        return fail(self, "the dict has no list %s; %s", segments ? "device_traces" : "segments",
                    expected);
    status = find_devices(self, segments, traces, has);
    if (status == 0) status = choose_device(self, has);
    if (status != 0) return status;
    self->history->ordinal = self->ordinal;
    if ((uint32_t)self->ordinal < traces->count) {
        const pickle_value *trace = pickle_item(self->root, traces, (uint32_t)self->ordinal);
        for (uint32_t i = 0; i < trace->count && status == 0; i++)
            status = read_event(self, pickle_item(self->root, trace, i), i);
    }
    for (uint32_t i = 0; i < segments->count && status == 0; i++)
        status = read_segment(self, pickle_item(self->root, segments, i), i);
    if (status == 0 && !history_finish(self->history)) return no_memory(self);
    return status;
}

int torch_history_is(const unsigned char *bytes, size_t length) {
    return length > 0 && bytes[0] == 0x80;
}

int torch_history_read(const char *name, const unsigned char *bytes, size_t length, int ordinal,
                       memory_history **out, char *error) {
    torch_reader self = {.name = name, .error = error, .ordinal = ordinal};
    char reason[PICKLE_ERROR_BYTES];
    int status = EXIT_FAILURE;
    pickle_result result = pickle_read(bytes, length, &self.root, reason);
    if (result != PICKLE_READ) {
        snprintf(error, HISTORY_ERROR_BYTES, "%.200s: %s", name, reason);
        return result == PICKLE_NO_MEMORY ? EXIT_FAILURE : EXIT_BAD_INPUT;
    }
    self.history = history_create();
    self.owners = calloc(pickle_value_count(self.root), sizeof *self.owners);
    status = self.history && self.owners ? read_all(&self) : no_memory(&self);
    if (status == 0) {
        self.history->has_shortages = 1;
        snprintf(self.history->source, sizeof self.history->source, "PyTorch snapshot");
        *out = self.history;
    } else {
        history_destroy(self.history);
    }
    pickle_free(self.root);
    free(self.owners);
    free(self.is_asked);
    id_table_deinit(&self.alive);
    return status;
}
