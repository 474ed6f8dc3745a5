/* The common part of saving and loading: see checkpoint_call.h. */
#include "checkpoint_call.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "file_steps.h"
#include "host_alloc.h"
#include "json_reader.h"
#include "lease.h"
#include "tensor_internal.h"

enum {
    STAGING_BYTES = 8 << 20,
    STAGING_BYTES_MIN = 4096,
    WORDS_BYTES = 64, /* of the block: a float that is reduced, and at NUMBER_AT a number */
    NUMBER_AT = 16,
    RANKS_MAX = 1 << 16 /* so that a status and a rank are one whole float */
};

/* ---- arguments ------------------------------------------------------------------------------- */

static tn_status check_config(const tn_checkpoint_config *config) {
    TN_REQUIRE(config && config->size == sizeof *config,
               "tn_checkpoint_config: begin with TN_CHECKPOINT_CONFIG_INIT");
    TN_REQUIRE(config->path && *config->path, "tn_checkpoint_config.path is missing");
    TN_REQUIRE(config->entries || !config->entry_count, "tn_checkpoint_config.entries is NULL");
    TN_REQUIRE(!config->comm || config->scope.value,
               "tn_checkpoint_config: with a communicator it takes a scope");
    return TN_OK;
}

static tn_status check_name(const char *name, size_t at) {
    TN_REQUIRE(name && *name, "tn_checkpoint_config: entry %zu has no name", at);
    TN_REQUIRE(tn__is_utf8(name, strlen(name)),
               "tn_checkpoint_config: entry %zu: its name is no "
               "UTF-8",
               at);
    TN_REQUIRE(strcmp(name, "__metadata__") != 0,
               "tn_checkpoint_config: entry %zu: __metadata__ is the format's own name", at);
    return TN_OK;
}

static tn_status check_shape(tn__checkpoint_item *item) {
    const tn_checkpoint_entry *entry = item->entry;
    int64_t elements = 1;
    TN_REQUIRE(entry->rank >= 0 && entry->rank <= TN_RANK_MAX, "checkpoint entry %s: rank %d",
               entry->name, entry->rank);
    for (int i = 0; i < entry->rank; i++) {
        TN_REQUIRE(entry->shape[i] >= 0, "checkpoint entry %s: shape[%d] is %" PRId64, entry->name,
                   i, entry->shape[i]);
        TN_REQUIRE(!__builtin_mul_overflow(elements, entry->shape[i], &elements),
                   "checkpoint entry %s: its shape is too large", entry->name);
    }
    TN_REQUIRE(elements <= INT64_MAX / 8, "checkpoint entry %s: its shape is too large",
               entry->name);
    item->elements = elements;
    return TN_OK;
}

static tn_status check_pieces(tn__checkpoint_item *item) {
    const tn_checkpoint_entry *entry = item->entry;
    TN_REQUIRE(entry->pieces || !entry->piece_count, "checkpoint entry %s: pieces is NULL",
               entry->name);
    for (size_t i = 0; i < entry->piece_count; i++) {
        const tn_checkpoint_piece *piece = &entry->pieces[i];
        TN_REQUIRE(piece->first >= 0 && piece->count >= 0 && piece->first <= item->elements &&
                       piece->count <= item->elements - piece->first,
                   "checkpoint entry %s: piece %zu is elements %" PRId64 " + %" PRId64
                   " of %" PRId64,
                   entry->name, i, piece->first, piece->count, item->elements);
        TN_REQUIRE(!__builtin_add_overflow(item->held, piece->count, &item->held),
                   "checkpoint entry %s: too many elements", entry->name);
    }
    return TN_OK;
}

static tn_status check_memory(const tn__checkpoint_item *item) {
    const tn_checkpoint_entry *entry = item->entry;
    tn_plane_layout layout;
    TN_TRY(tn_plane_layout_get(entry->memory, entry->plane, &layout));
    size_t bytes = entry->is_scale ? layout.scale_bytes : layout.data_bytes;
    for (size_t i = 0; i < entry->piece_count; i++) {
        const tn_checkpoint_piece *piece = &entry->pieces[i];
        size_t length = (size_t)piece->count * item->element_bytes;
        TN_REQUIRE(piece->offset <= bytes && length <= bytes - piece->offset,
                   "checkpoint entry %s: piece %zu is bytes %zu + %zu of %zu", entry->name, i,
                   piece->offset, length, bytes);
    }
    return TN_OK;
}

static tn_status check_device(tn__checkpoint *call, const tn_checkpoint_entry *entry) {
    tn_device *device;
    TN_TRY(tn__tensor_device(entry->memory, &device));
    if (!call->device) call->device = device;
    TN_REQUIRE(device == call->device,
               "checkpoint entry %s is on another device than the communicator, or the entries "
               "before it",
               entry->name);
    return TN_OK;
}

static size_t lease_of(tn__checkpoint *call, const tn_checkpoint_entry *entry) {
    size_t at = 0;
    while (at < call->lease_count && (call->leases[at].memory.value != entry->memory.value ||
                                      call->leases[at].plane != entry->plane))
        at++;
    if (at == call->lease_count)
        call->leases[call->lease_count++] =
            (tn__checkpoint_lease){.memory = entry->memory, .plane = entry->plane};
    return at;
}

static tn_status check_entry(tn__checkpoint *call, size_t at) {
    const tn_checkpoint_entry *entry = &call->config->entries[at];
    tn__checkpoint_item *item = &call->items[at];
    item->entry = entry;
    TN_TRY(check_name(entry->name, at));
    item->dtype = tn__safetensors_dtype(entry->dtype);
    TN_REQUIRE(item->dtype, "checkpoint entry %s: %s is saved as bytes: dtype TN_BYTE", entry->name,
               tn_dtype_name(entry->dtype));
    item->element_bytes = (unsigned)tn_dtype_bytes(entry->dtype);
    TN_TRY(check_shape(item));
    TN_TRY(check_pieces(item));
    if (!item->held) return TN_OK;
    TN_TRY(check_memory(item));
    TN_TRY(check_device(call, entry));
    item->lease = lease_of(call, entry);
    return TN_OK;
}

static int by_name(const void *left, const void *right) {
    const tn__checkpoint_item *a = left, *b = right;
    return strcmp(a->entry->name, b->entry->name);
}

static tn_status check_entries(tn__checkpoint *call) {
    size_t count = call->config->entry_count;
    call->items = tn__host_alloc(count + 1, sizeof *call->items);
    call->leases = tn__host_alloc(count + 1, sizeof *call->leases);
    if (!call->items || !call->leases) return TN_OUT_OF_HOST_MEMORY;
    for (size_t i = 0; i < count; i++)
        TN_TRY(check_entry(call, i));
    qsort(call->items, count, sizeof *call->items, by_name);
    for (size_t i = 1; i < count; i++)
        TN_REQUIRE(by_name(&call->items[i - 1], &call->items[i]) != 0,
                   "checkpoint entry %s is there twice", call->items[i].entry->name);
    return TN_OK;
}

/* ---- begin and end --------------------------------------------------------------------------- */

static tn_status make_staging(tn__checkpoint *call) {
    size_t bytes = call->config->staging_bytes ? call->config->staging_bytes : STAGING_BYTES;
    void *pinned;
    if (bytes < STAGING_BYTES_MIN) bytes = STAGING_BYTES_MIN;
    call->half_bytes = bytes / TN__CHECKPOINT_HALVES;
    TN_TRY(call->driver->host_alloc(
        call->on, WORDS_BYTES + TN__CHECKPOINT_HALVES * call->half_bytes, &pinned));
    call->words = pinned;
    for (int i = 0; i < TN__CHECKPOINT_HALVES; i++) {
        call->halves[i] = call->words + WORDS_BYTES + (size_t)i * call->half_bytes;
        TN_TRY(call->driver->event_create(call->on, &call->copied[i]));
    }
    return TN_OK;
}

static tn_status make_block(tn__checkpoint *call) {
    tn_device *device;
    tn_pool *pool;
    TN_REQUIRE(call->rank_count < RANKS_MAX, "checkpoints of %d ranks", call->rank_count);
    TN_TRY(tn__scope_device(call->config->scope, &device));
    TN_REQUIRE(device == call->device,
               "checkpoint %s: the communicator %s and the scope are of different devices",
               call->config->path, tn_comm_name(call->config->comm));
    TN_TRY(tn__scope_pool(call->config->scope, &pool));
    return tn_alloc(pool, WORDS_BYTES, call->stream, NULL, &call->block);
}

static tn_status get_memory(tn__checkpoint *call) {
    if (!call->device) return TN_OK;
    call->driver = tn__device_driver(call->device);
    call->on = tn__device_state(call->device);
    TN_TRY(tn__refuse_capture(call->device, call->stream, "a checkpoint"));
    TN_TRY(make_staging(call));
    return call->config->comm ? make_block(call) : TN_OK;
}

/* With a communicator the memory comes first, so that what is wrong with a rank's entries can be
 * told to the others. */
tn_status tn__checkpoint_begin(tn__checkpoint *call, const tn_checkpoint_config *config,
                               tn_stream stream) {
    *call = (tn__checkpoint){.config = config, .stream = stream, .rank_count = 1};
    TN_TRY(check_config(config));
    if (!config->comm) {
        TN_TRY(check_entries(call));
        return get_memory(call);
    }
    call->rank = tn_comm_rank(config->comm);
    call->rank_count = tn_comm_size(config->comm);
    call->device = config->comm->device;
    call->puts = tn__comm_puts(config->comm);
    TN_TRY(get_memory(call));
    return tn__checkpoint_agree(call, check_entries(call));
}

void tn__checkpoint_end(tn__checkpoint *call) {
    tn__saved_error saved;
    tn__error_save(&saved);
    (void)tn__checkpoint_release_all(call, 0);
    tn_status freed = call->block ? tn_free(call->block, call->stream) : TN_OK;
    (void)freed; /* a communicator's failure is what the caller hears of */
    for (int i = 0; i < TN__CHECKPOINT_HALVES; i++) {
        if (call->copied[i]) (void)call->driver->event_destroy(call->on, call->copied[i]);
    }
    /* Where a meeting failed, a copy of its words may still be under way. */
    if (call->words) (void)call->driver->stream_synchronize(call->on, call->stream);
    if (call->words) (void)call->driver->host_free(call->on, call->words);
    tn__host_free(call->items);
    tn__host_free(call->leases);
    tn__error_restore(&saved);
}

/* ---- leases ---------------------------------------------------------------------------------- */

tn_status tn__checkpoint_lease_all(tn__checkpoint *call, int is_to_write) {
    for (size_t i = 0; i < call->lease_count; i++) {
        tn__checkpoint_lease *one = &call->leases[i];
        tn_plane_state state;
        TN_TRY(tn_plane_state_get(one->memory, one->plane, &state));
        const int is_valid = state == TN_PLANE_VALID || state == TN_PLANE_OFFLOADED;
        tn_access access = !is_to_write ? TN_READ : is_valid ? TN_UPDATE : TN_WRITE;
        TN_TRY(
            tn_lease_begin(one->memory, one->plane, access, call->stream, &one->lease, &one->view));
        one->is_begun = 1;
    }
    return TN_OK;
}

tn_status tn__checkpoint_release_all(tn__checkpoint *call, int are_written) {
    tn_status first = TN_OK;
    for (size_t i = 0; i < call->lease_count; i++) {
        tn__checkpoint_lease *one = &call->leases[i];
        if (!one->is_begun) continue;
        one->is_begun = 0;
        tn_status status = are_written > 0    ? tn_lease_end(one->lease)
                           : are_written == 0 ? tn__lease_undo(one->lease)
                                              : tn_lease_abandon(one->lease);
        if (status != TN_OK && are_written > 0) {
            tn_status abandoned = tn_lease_abandon(one->lease);
            (void)abandoned;
        }
        if (first == TN_OK) first = status;
    }
    return first;
}

char *tn__checkpoint_address(const tn__checkpoint *call, const tn__checkpoint_item *item,
                             const tn_checkpoint_piece *piece) {
    const tn_plane_view *view = &call->leases[item->lease].view;
    return (char *)(item->entry->is_scale ? view->scale : view->data) + piece->offset;
}

/* ---- the ranks ------------------------------------------------------------------------------- */

static tn_status move_words(tn__checkpoint *call, int to_block) {
    char *block = call->block;
    return to_block ? call->driver->copy(call->on, block, call->words, WORDS_BYTES, call->stream)
                    : call->driver->copy(call->on, call->words, block, WORDS_BYTES, call->stream);
}

static tn_status finish_words(tn__checkpoint *call) {
    TN_TRY(move_words(call, 0));
    TN_TRY(tn_comm_wait(call->config->comm));
    return call->driver->stream_synchronize(call->on, call->stream);
}

static tn_status worst_of_all(tn__checkpoint *call, tn_status mine, float *worst) {
    float word = mine == TN_OK ? 0.0f : (float)((int)mine * RANKS_MAX + call->rank);
    memcpy(call->words, &word, sizeof word);
    TN_TRY(move_words(call, 1));
    TN_TRY(tn_all_reduce(call->config->comm, call->block, call->block, 1, TN_FP32, TN_REDUCE_MAX,
                         call->stream));
    TN_TRY(finish_words(call));
    memcpy(worst, call->words, sizeof *worst);
    return TN_OK;
}

/* The others are in a meeting that this rank can not come to any more. */
static tn_status end_meeting(tn__checkpoint *call, tn_status status) {
    return tn__comm_end_call(call->config->comm, "a checkpoint", call->puts, status);
}

tn_status tn__checkpoint_agree(tn__checkpoint *call, tn_status mine) {
    tn__saved_error saved;
    float worst = 0.0f;
    if (!call->config->comm) return mine;
    tn__error_save(&saved);
    tn_status status = end_meeting(call, worst_of_all(call, mine, &worst));
    if (mine != TN_OK) {
        tn__error_restore(&saved);
        return mine;
    }
    TN_TRY(status);
    if (worst == 0.0f) return TN_OK;
    tn_status other = (tn_status)((int)worst / RANKS_MAX);
    return TN_FAIL(other, "checkpoint %s: rank %d has failed (%s), and says there why",
                   call->config->path, (int)worst % RANKS_MAX, tn_status_name(other));
}

static tn_status broadcast_number(tn__checkpoint *call) {
    TN_TRY(move_words(call, 1));
    TN_TRY(tn_broadcast(call->config->comm, (char *)call->block + NUMBER_AT, sizeof(uint64_t), 0,
                        call->stream));
    return finish_words(call);
}

tn_status tn__checkpoint_share(tn__checkpoint *call, uint64_t *number) {
    if (!call->config->comm) return TN_OK;
    memcpy(call->words + NUMBER_AT, number, sizeof *number);
    TN_TRY(end_meeting(call, broadcast_number(call)));
    memcpy(number, call->words + NUMBER_AT, sizeof *number);
    return TN_OK;
}

/* ---- paths ----------------------------------------------------------------------------------- */

char *tn__checkpoint_index_path(const char *path) {
    return tn__file_path(path, TN__CHECKPOINT_INDEX);
}

char *tn__checkpoint_directory(const char *path, uint64_t generation) {
    char name[TN__CHECKPOINT_NAME_BYTES];
    snprintf(name, sizeof name, "%08" PRIu64, generation);
    return tn__file_path(path, name);
}

char *tn__checkpoint_file(const char *path, uint64_t generation, const char *name) {
    char *directory = tn__checkpoint_directory(path, generation);
    char *file = directory ? tn__file_path(directory, name) : NULL;
    tn__host_free(directory);
    return file;
}

static tn_status read_text(const char *path, char **text, uint64_t *bytes, int *is_there) {
    int file;
    TN_TRY(tn__file_open(path, &file, bytes, is_there));
    if (!*is_there) return TN_OK;
    *text = tn__host_alloc(*bytes + 1, 1);
    tn_status status = *text ? tn__file_read(file, path, *text, *bytes, 0) : TN_OUT_OF_HOST_MEMORY;
    tn_status closed = tn__file_close(file, path);
    if (status == TN_OK) status = closed;
    if (status != TN_OK) tn__host_free(*text);
    return status;
}

tn_status tn__checkpoint_read_index(const char *path, int *is_there, tn__index *out) {
    char *text = NULL, *index_path = tn__checkpoint_index_path(path);
    uint64_t bytes = 0;
    *out = (tn__index){0};
    if (!index_path) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = read_text(index_path, &text, &bytes, is_there);
    if (status == TN_OK && *is_there) status = tn__index_read(index_path, text, bytes, out);
    tn__host_free(index_path);
    return status;
}

tn_status tn_checkpoint_info_get(const char *path, tn_checkpoint_info *out) {
    tn__index index;
    int is_there = 0;
    TN_REQUIRE(path && out && out->size == sizeof *out,
               "tn_checkpoint_info_get: path is NULL, or begin with TN_CHECKPOINT_INFO_INIT");
    TN_TRY(tn__checkpoint_read_index(path, &is_there, &index));
    if (!is_there) return TN_FAIL(TN_IO, "%s: there is no checkpoint", path);
    out->rank_count = (int)index.file_count;
    out->plan_hash = index.plan_hash;
    out->step = index.step;
    out->entry_count = index.tensor_count;
    out->bytes = 0;
    for (size_t i = 0; i < index.tensor_count; i++)
        out->bytes +=
            (uint64_t)index.tensors[i].elements * tn__index_dtype_bytes(index.tensors[i].dtype);
    tn__index_free(&index);
    return TN_OK;
}
