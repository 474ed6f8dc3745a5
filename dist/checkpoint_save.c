/* Saving a checkpoint.
 *
 *     all      file of this rank, synced        path/00000008/rank-00001.safetensors
 *     rank 0   headers read back, index made, synced, put in place of the one before
 *     rank 0   path/00000007 removed
 *
 * Until the index is renamed the checkpoint before is whole, and after that the new one is. What
 * is in no index is removed by the next save, whose generation is above all that are there.
 *
 * A half of the staging memory is filled by the stream while the other half is written.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint_call.h"
#include "file_steps.h"
#include "host_alloc.h"

/* ---- generations ----------------------------------------------------------------------------- */

static int is_generation(const char *name, uint64_t *number) {
    size_t length = strlen(name);
    if (length < 8 || length > 19 || strspn(name, "0123456789") != length) return 0;
    *number = strtoull(name, NULL, 10);
    return 1;
}

static tn_status note_generation(void *context, const char *name) {
    uint64_t *last = context, number;
    if (is_generation(name, &number) && number > *last) *last = number;
    return TN_OK;
}

/* Rank 0 makes the directory of the next generation. */
static tn_status make_generation(const tn__checkpoint *call, uint64_t *generation) {
    const char *path = call->config->path;
    TN_TRY(tn__directory_make(path));
    TN_TRY(tn__directory_list(path, note_generation, generation));
    ++*generation;
    char *directory = tn__checkpoint_directory(path, *generation);
    if (!directory) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = tn__directory_make(directory);
    tn__host_free(directory);
    return status;
}

typedef struct cleaning {
    const char *path;
    uint64_t kept;
} cleaning;

/* Somebody else's directory may be called like a generation. */
static tn_status refuse_strange(void *context, const char *name) {
    const char *end = strrchr(name, '.');
    int is_ours = strcmp(name, TN__CHECKPOINT_INDEX) == 0 ||
                  (strncmp(name, "rank-", 5) == 0 && end && strcmp(end, ".safetensors") == 0);
    (void)context;
    return is_ours ? TN_OK : TN_FAIL(TN_INVALID_STATE, "%s is no file of a checkpoint", name);
}

static tn_status remove_other(void *context, const char *name) {
    const cleaning *now = context;
    uint64_t number;
    if (!is_generation(name, &number) || number == now->kept) return TN_OK;
    char *directory = tn__file_path(now->path, name);
    if (directory && tn__directory_list(directory, refuse_strange, NULL) == TN_OK)
        (void)tn__directory_remove(directory);
    tn__host_free(directory);
    return TN_OK;
}

/* What is not of the generation is of no use; what can not be removed now is the next time. */
static void clean(const char *path, uint64_t kept) {
    cleaning now = {path, kept};
    tn__saved_error saved;
    tn__error_save(&saved);
    (void)tn__directory_list(path, remove_other, &now);
    tn__error_restore(&saved);
}

/* ---- this rank's header ---------------------------------------------------------------------- */

typedef struct writing {
    tn__checkpoint *call;
    uint64_t generation;
    char *path;
    int file;
    char *header; /* the length, the text, and padding */
    size_t header_bytes;
    uint32_t *crcs; /* by item */
    tn__safetensors names;
    char *notes; /* of all items: what the header's notes point to */
} writing;

static void write_note(tn__text *out, const tn__checkpoint_item *item, uint32_t crc) {
    const tn_checkpoint_entry *entry = item->entry;
    tn__text_add(out, "%08x [", (unsigned)crc);
    for (int i = 0; i < entry->rank; i++)
        tn__text_add(out, "%s%" PRId64, i ? "," : "", entry->shape[i]);
    tn__text_add(out, "]");
    for (size_t i = 0; i < entry->piece_count; i++) {
        const tn_checkpoint_piece *piece = &entry->pieces[i];
        if (piece->count) tn__text_add(out, " %" PRId64 "+%" PRId64, piece->first, piece->count);
    }
}

/* All keys and values of the notes, each with its 0; fills in the list if it is there. */
static size_t write_notes(const writing *now, tn__safetensors_note *notes, char *room,
                          size_t room_bytes) {
    tn__text out = tn__text_begin(room, room_bytes);
    for (size_t i = 0; i < now->call->config->entry_count; i++) {
        const tn__checkpoint_item *item = &now->call->items[i];
        size_t key = out.used;
        tn__text_add(&out, TN__CHECKPOINT_PART "%s%c", item->entry->name, 0);
        size_t value = out.used;
        write_note(&out, item, now->crcs[i]);
        tn__text_add(&out, "%c", 0);
        if (notes) notes[i] = (tn__safetensors_note){room + key, room + value};
    }
    return out.used + 1;
}

/* A rank that holds a tensor in order has it in its own shape. */
static int holds_all(const tn__checkpoint_item *item) {
    int64_t next = 0;
    for (size_t i = 0; i < item->entry->piece_count; i++) {
        if (item->entry->pieces[i].first != next) return 0;
        next += item->entry->pieces[i].count;
    }
    return next == item->elements;
}

static void describe_tensors(writing *now) {
    uint64_t at = 0;
    for (size_t i = 0; i < now->call->config->entry_count; i++) {
        const tn__checkpoint_item *item = &now->call->items[i];
        tn__safetensor *tensor = &now->names.tensors[i];
        *tensor = (tn__safetensor){.name = item->entry->name, .dtype = item->dtype, .begin = at};
        at += (uint64_t)item->held * item->element_bytes;
        tensor->end = at;
        tensor->rank = holds_all(item) ? item->entry->rank : 1;
        tensor->shape[0] = item->held;
        if (holds_all(item)) memcpy(tensor->shape, item->entry->shape, sizeof tensor->shape);
    }
    now->names.tensor_count = now->call->config->entry_count;
}

/* The same length whatever the checksums are. */
static tn_status make_header(writing *now) {
    const tn__checkpoint *call = now->call;
    size_t count = call->config->entry_count, own = 2;
    size_t notes_bytes = write_notes(now, NULL, NULL, 0);
    char number[32], rank[32];
    now->notes = now->notes ? now->notes : tn__host_alloc(notes_bytes, 1);
    if (!now->notes) return TN_OUT_OF_HOST_MEMORY;
    (void)write_notes(now, now->names.notes, now->notes, notes_bytes);
    snprintf(number, sizeof number, "%" PRIu64, now->generation);
    snprintf(rank, sizeof rank, "%d of %d", call->rank, call->rank_count);
    now->names.notes[count] = (tn__safetensors_note){"tenure.generation", number};
    now->names.notes[count + 1] = (tn__safetensors_note){"tenure.rank", rank};
    now->names.note_count = count + own;
    tn__text out = tn__text_begin(NULL, 0);
    tn__safetensors_write(&out, &now->names);
    uint64_t padded = tn__safetensors_padded(out.used);
    TN_REQUIRE(padded <= TN__SAFETENSORS_HEADER_MAX, "checkpoint %s: %zu entries are too many",
               call->config->path, count);
    now->header_bytes = TN__SAFETENSORS_LENGTH_BYTES + padded;
    if (!now->header) now->header = tn__host_alloc(now->header_bytes + 1, 1);
    if (!now->header) return TN_OUT_OF_HOST_MEMORY;
    for (int i = 0; i < TN__SAFETENSORS_LENGTH_BYTES; i++)
        now->header[i] = (char)(padded >> 8 * i & 0xFF);
    out = tn__text_begin(now->header + TN__SAFETENSORS_LENGTH_BYTES, padded + 1);
    tn__safetensors_write(&out, &now->names);
    memset(now->header + TN__SAFETENSORS_LENGTH_BYTES + out.used, ' ', padded - out.used);
    return TN_OK;
}

/* ---- this rank's data ------------------------------------------------------------------------ */

/* What a half of the staging memory holds, on its way from the device to the file. */
typedef struct chunk {
    size_t bytes; /* 0: nothing */
    uint64_t at;  /* of the file */
    uint32_t *crc;
} chunk;

typedef struct pump {
    writing *now;
    chunk chunks[TN__CHECKPOINT_HALVES];
    int filling;
    uint64_t at; /* of the file: where the next byte goes */
} pump;

static tn_status drain_half(pump *out, int half) {
    tn__checkpoint *call = out->now->call;
    chunk *full = &out->chunks[half];
    size_t bytes = full->bytes;
    if (!bytes) return TN_OK;
    full->bytes = 0;
    TN_TRY(call->driver->event_synchronize(call->on, call->copied[half]));
    *full->crc = tn__crc32(*full->crc, call->halves[half], bytes);
    return tn__file_write(out->now->file, out->now->path, call->halves[half], bytes, full->at);
}

/* The half that was filled is under way; the other one is emptied to be filled. */
static tn_status turn(pump *out) {
    tn__checkpoint *call = out->now->call;
    if (!out->chunks[out->filling].bytes) return TN_OK;
    TN_TRY(call->driver->event_record(call->on, call->copied[out->filling], call->stream));
    out->filling = !out->filling;
    return drain_half(out, out->filling);
}

static tn_status pump_bytes(pump *out, const char *src, size_t bytes, uint32_t *crc) {
    tn__checkpoint *call = out->now->call;
    while (bytes) {
        chunk *now = &out->chunks[out->filling];
        size_t room = call->half_bytes - now->bytes;
        size_t step = bytes < room ? bytes : room;
        if (!now->bytes) *now = (chunk){.at = out->at, .crc = crc};
        TN_TRY(call->driver->copy(call->on, call->halves[out->filling] + now->bytes, src, step,
                                  call->stream));
        now->bytes += step;
        out->at += step;
        src += step;
        bytes -= step;
        if (now->bytes == call->half_bytes) TN_TRY(turn(out));
    }
    return TN_OK;
}

static tn_status pump_item(pump *out, const tn__checkpoint_item *item, uint32_t *crc) {
    for (size_t i = 0; i < item->entry->piece_count; i++) {
        const tn_checkpoint_piece *piece = &item->entry->pieces[i];
        size_t bytes = (size_t)piece->count * item->element_bytes;
        if (!bytes) continue;
        TN_TRY(pump_bytes(out, tn__checkpoint_address(out->now->call, item, piece), bytes, crc));
    }
    return turn(out); /* a chunk is of one item, whose checksum it goes into */
}

static tn_status write_data(writing *now) {
    pump out = {.now = now, .at = now->header_bytes};
    for (size_t i = 0; i < now->call->config->entry_count; i++)
        TN_TRY(pump_item(&out, &now->call->items[i], &now->crcs[i]));
    TN_TRY(drain_half(&out, 0));
    return drain_half(&out, 1);
}

/* ---- this rank's file ------------------------------------------------------------------------ */

static tn_status fill_file(writing *now) {
    TN_TRY(make_header(now)); /* its length is what is needed at first */
    tn_status status = write_data(now);
    /* Whatever happened, the stream has let go of the staging memory. */
    const tn__checkpoint *call = now->call;
    tn_status synced =
        call->device ? call->driver->stream_synchronize(call->on, call->stream) : TN_OK;
    TN_TRY(status);
    TN_TRY(synced);
    TN_TRY(make_header(now));
    TN_TRY(tn__file_write(now->file, now->path, now->header, now->header_bytes, 0));
    return tn__file_sync(now->file, now->path);
}

static tn_status make_lists(writing *now) {
    size_t count = now->call->config->entry_count;
    now->crcs = tn__host_alloc(count + 1, sizeof *now->crcs);
    now->names.tensors = tn__host_alloc(count + 1, sizeof *now->names.tensors);
    now->names.notes = tn__host_alloc(count + 2, sizeof *now->names.notes);
    if (!now->crcs || !now->names.tensors || !now->names.notes) return TN_OUT_OF_HOST_MEMORY;
    describe_tensors(now);
    return TN_OK;
}

static char *rank_path(const tn__checkpoint *call, uint64_t generation, int rank) {
    char name[TN__CHECKPOINT_NAME_BYTES];
    snprintf(name, sizeof name, "rank-%05d.safetensors", rank);
    return tn__checkpoint_file(call->config->path, generation, name);
}

static tn_status write_file(tn__checkpoint *call, uint64_t generation) {
    writing now = {.call = call, .generation = generation, .file = -1};
    now.path = rank_path(call, generation, call->rank);
    tn_status status = now.path ? make_lists(&now) : TN_OUT_OF_HOST_MEMORY;
    if (status == TN_OK) status = tn__file_create(now.path, &now.file);
    if (status == TN_OK) {
        status = fill_file(&now);
        tn__saved_error saved;
        tn__error_save(&saved);
        tn_status closed = tn__file_close(now.file, now.path);
        if (status == TN_OK)
            status = closed;
        else
            tn__error_restore(&saved);
    }
    tn__safetensors_free(&now.names);
    tn__host_free(now.notes);
    tn__host_free(now.header);
    tn__host_free(now.crcs);
    tn__host_free(now.path);
    return status;
}

/* ---- the index ------------------------------------------------------------------------------- */

typedef struct stored_header {
    char *text; /* what the names are of */
    tn__safetensors header;
} stored_header;

typedef struct indexing {
    const tn__checkpoint *call;
    tn__index index;
    stored_header *headers; /* by rank */
} indexing;

static tn_status read_length(int file, const char *path, uint64_t file_bytes, uint64_t *length) {
    unsigned char bytes[TN__SAFETENSORS_LENGTH_BYTES];
    TN_TRY(tn__file_read(file, path, bytes, sizeof bytes, 0));
    *length = 0;
    for (int i = TN__SAFETENSORS_LENGTH_BYTES - 1; i >= 0; i--)
        *length = *length << 8 | bytes[i];
    if (*length <= TN__SAFETENSORS_HEADER_MAX && *length <= file_bytes - sizeof bytes) return TN_OK;
    return TN_FAIL(TN_CORRUPT_INPUT, "%s: a header of %" PRIu64 " bytes in a file of %" PRIu64,
                   path, *length, file_bytes);
}

static tn_status read_header(int file, const char *path, tn__index_file *facts,
                             stored_header *out) {
    uint64_t length;
    TN_TRY(read_length(file, path, facts->bytes, &length));
    facts->header_bytes = TN__SAFETENSORS_LENGTH_BYTES + length;
    out->text = tn__host_alloc(facts->header_bytes + 1, 1);
    if (!out->text) return TN_OUT_OF_HOST_MEMORY;
    TN_TRY(tn__file_read(file, path, out->text, facts->header_bytes, 0));
    facts->header_crc = tn__crc32(0, out->text, facts->header_bytes);
    return tn__safetensors_read(path, out->text + TN__SAFETENSORS_LENGTH_BYTES, length,
                                facts->bytes - facts->header_bytes, &out->header);
}

static tn_status add_file(indexing *now, int rank) {
    tn__index_file facts = {{0}, 0, 0, 0};
    int file = -1, is_there = 0;
    stored_header *stored = &now->headers[rank];
    char *path = rank_path(now->call, now->index.generation, rank);
    if (!path) return TN_OUT_OF_HOST_MEMORY;
    snprintf(facts.name, sizeof facts.name, "%s", strrchr(path, '/') + 1);
    tn_status status = tn__file_open(path, &file, &facts.bytes, &is_there);
    if (status == TN_OK && !is_there)
        status = TN_FAIL(TN_IO, "%s: rank 0 does not see the file of rank %d", path, rank);
    if (status == TN_OK) status = read_header(file, path, &facts, stored);
    if (status == TN_OK)
        status =
            tn__index_add_file(&now->index, (size_t)now->call->rank_count, &facts, &stored->header);
    if (file >= 0) (void)tn__file_close(file, path);
    tn__host_free(path);
    return status;
}

static tn_status write_index(const tn__index *index, const char *path) {
    int file;
    tn__text out = tn__text_begin(NULL, 0);
    tn__index_write(&out, index);
    size_t bytes = out.used;
    char *text = tn__host_alloc(bytes + 1, 1);
    if (!text) return TN_OUT_OF_HOST_MEMORY;
    out = tn__text_begin(text, bytes + 1);
    tn__index_write(&out, index);
    tn_status status = tn__file_create(path, &file);
    if (status == TN_OK) {
        status = tn__file_write(file, path, text, bytes, 0);
        if (status == TN_OK) status = tn__file_sync(file, path);
        tn_status closed = tn__file_close(file, path);
        if (status == TN_OK) status = closed;
    }
    tn__host_free(text);
    return status;
}

/* The new index is written beside its files, and moved from there over the one before. */
static tn_status publish(const indexing *now) {
    const char *path = now->call->config->path;
    uint64_t generation = now->index.generation;
    char *directory = tn__checkpoint_directory(path, generation);
    char *from = tn__checkpoint_file(path, generation, TN__CHECKPOINT_INDEX);
    char *to = tn__checkpoint_index_path(path);
    tn_status status = directory && from && to ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    if (status == TN_OK) status = write_index(&now->index, from);
    if (status == TN_OK) status = tn__directory_sync(directory);
    if (status == TN_OK) status = tn__directory_sync(path);
    if (status == TN_OK) status = tn__file_rename(from, to);
    if (status == TN_OK) status = tn__directory_sync(path);
    tn__host_free(directory);
    tn__host_free(from);
    tn__host_free(to);
    return status;
}

static void end_indexing(indexing *now) {
    for (int i = 0; now->headers && i < now->call->rank_count; i++) {
        tn__safetensors_free(&now->headers[i].header);
        tn__host_free(now->headers[i].text);
    }
    tn__host_free(now->headers);
    tn__index_free(&now->index);
}

/* Rank 0, when every rank's file is on the disk. */
static tn_status make_index(const tn__checkpoint *call, uint64_t generation) {
    const tn_checkpoint_config *config = call->config;
    indexing now = {
        .call = call,
        .index = {.generation = generation, .step = config->step, .plan_hash = config->plan_hash}};
    now.headers = tn__host_alloc((size_t)call->rank_count, sizeof *now.headers);
    tn_status status = now.headers ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    for (int i = 0; i < call->rank_count && status == TN_OK; i++)
        status = add_file(&now, i);
    if (status == TN_OK) status = tn__index_check(&now.index, TN_INVALID_ARGUMENT);
    if (status == TN_OK) status = publish(&now);
    end_indexing(&now);
    return status;
}

/* ---- the call -------------------------------------------------------------------------------- */

static tn_status save_generation(tn__checkpoint *call, uint64_t generation) {
    TN_TRY(tn__checkpoint_agree(call, write_file(call, generation)));
    tn_status status = call->rank == 0 ? make_index(call, generation) : TN_OK;
    return tn__checkpoint_agree(call, status);
}

static tn_status save(tn__checkpoint *call) {
    uint64_t generation = 0;
    tn_status status = tn__checkpoint_lease_all(call, 0);
    if (status == TN_OK && call->rank == 0) status = make_generation(call, &generation);
    status = tn__checkpoint_agree(call, status);
    if (status == TN_OK) status = tn__checkpoint_share(call, &generation);
    if (status == TN_OK) status = save_generation(call, generation);
    if (call->rank != 0 || !generation) return status;
    if (status == TN_OK) {
        clean(call->config->path, generation);
        return TN_OK;
    }
    tn__index index;
    int is_there = 0;
    tn__saved_error saved;
    tn__error_save(&saved);
    if (tn__checkpoint_read_index(call->config->path, &is_there, &index) == TN_OK) {
        /* The new index may be in place and not be on the disk: the files of the one before, which
         * may come back, stay until the next save. */
        if (index.generation != generation) clean(call->config->path, index.generation);
        tn__index_free(&index);
    }
    tn__error_restore(&saved);
    return status;
}

tn_status tn_checkpoint_save(const tn_checkpoint_config *config, tn_stream stream) {
    tn__checkpoint call;
    tn_status status = tn__checkpoint_begin(&call, config, stream);
    if (status == TN_OK) {
        status = save(&call);
        tn_status released = tn__checkpoint_release_all(&call, 1);
        if (status == TN_OK) status = released;
    }
    tn__checkpoint_end(&call);
    return status;
}
