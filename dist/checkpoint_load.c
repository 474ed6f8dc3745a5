/* Loading a checkpoint.
 *
 *     all   index read, the same one by all ranks, entries found in it
 *     all   every file that this rank needs: its size, its header's checksum, and the checksums of
 *           what it has of the entries           (nothing has been written so far on any rank)
 *     all   planes leased
 *     all   elements read again, into their places
 *
 * The files stay open from their check to their last read, so that a checkpoint that is replaced
 * meanwhile does no harm.
 */
#include <inttypes.h>
#include <string.h>

#include "checkpoint_call.h"
#include "file_steps.h"
#include "host_alloc.h"

typedef struct loading {
    tn__checkpoint *call;
    tn__index index;
    char **paths;                     /* by file: of those that are needed */
    int *files;                       /* by file: open, or 0 */
    const tn__index_tensor **tensors; /* by item */
    int half;                         /* of the staging memory that is filled next */
} loading;

/* ---- what is asked for is there -------------------------------------------------------------- */

static tn_status refuse(const loading *now, const tn_checkpoint_entry *entry, const char *has,
                        const char *asked) {
    return TN_FAIL(TN_INVALID_ARGUMENT, "checkpoint %s has %s as %s, and %s is asked for",
                   now->call->config->path, entry->name, has, asked);
}

static tn_status find_item(loading *now, size_t at) {
    const tn__checkpoint_item *item = &now->call->items[at];
    const tn_checkpoint_entry *entry = item->entry;
    const tn__index_tensor *tensor = tn__index_find(&now->index, entry->name);
    char has[128], asked[128];
    if (!tensor)
        return TN_FAIL(TN_INVALID_ARGUMENT, "checkpoint %s has no entry %s",
                       now->call->config->path, entry->name);
    if (strcmp(tensor->dtype, item->dtype) != 0)
        return refuse(now, entry, tensor->dtype, item->dtype);
    now->tensors[at] = tensor;
    size_t shape_bytes = (size_t)entry->rank * sizeof *entry->shape;
    if (tensor->rank == entry->rank && memcmp(tensor->shape, entry->shape, shape_bytes) == 0)
        return TN_OK;
    const struct {
        int rank;
        const int64_t *shape;
        char *text;
    } sides[2] = {{tensor->rank, tensor->shape, has}, {entry->rank, entry->shape, asked}};
    for (int side = 0; side < 2; side++) {
        tn__text out = tn__text_begin(sides[side].text, sizeof has);
        tn__text_add(&out, "[");
        for (int i = 0; i < sides[side].rank; i++)
            tn__text_add(&out, "%s%" PRId64, i ? "," : "", sides[side].shape[i]);
        tn__text_add(&out, "]");
    }
    return refuse(now, entry, has, asked);
}

static tn_status find_items(loading *now) {
    const tn_checkpoint_config *config = now->call->config;
    int is_there = 0;
    TN_TRY(tn__checkpoint_read_index(config->path, &is_there, &now->index));
    if (!is_there) return TN_FAIL(TN_IO, "%s: there is no checkpoint", config->path);
    if (config->plan_hash && config->plan_hash != now->index.plan_hash)
        return TN_FAIL(TN_INVALID_ARGUMENT,
                       "checkpoint %s was saved with plan hash %016" PRIx64 ", not %016" PRIx64,
                       config->path, now->index.plan_hash, config->plan_hash);
    now->paths = tn__host_alloc(now->index.file_count + 1, sizeof *now->paths);
    now->files = tn__host_alloc(now->index.file_count + 1, sizeof *now->files);
    now->tensors = tn__host_alloc(config->entry_count + 1, sizeof *now->tensors);
    if (!now->paths || !now->files || !now->tensors) return TN_OUT_OF_HOST_MEMORY;
    for (size_t i = 0; i < config->entry_count; i++)
        TN_TRY(find_item(now, i));
    return TN_OK;
}

/* Which checkpoint the index is of; never 0. */
static uint64_t identity_of(const tn__index *index) {
    const uint64_t identity = index->generation << 32 ^ index->crc;
    return identity ? identity : 1;
}

static tn_status is_replaced(const loading *now) {
    return TN_FAIL(TN_INVALID_STATE,
                   "checkpoint %s: another one was put in its place while it was read: load it "
                   "again",
                   now->call->config->path);
}

/* Each rank has read it by itself, and another program may have saved in between. After status of
 * this rank's reading. */
static tn_status check_same(const loading *now, tn_status status) {
    const uint64_t mine = status == TN_OK ? identity_of(&now->index) : 0;
    uint64_t of_rank_0 = mine;
    tn__saved_error saved;
    tn__error_save(&saved);
    const tn_status shared = tn__checkpoint_share(now->call, &of_rank_0);
    if (status != TN_OK) {
        tn__error_restore(&saved);
        return status;
    }
    TN_TRY(shared);
    if (of_rank_0 == mine || of_rank_0 == 0) return TN_OK; /* rank 0 says itself what it has met */
    return is_replaced(now);
}

/* ---- where elements are asked for and stored ------------------------------------------------- */

/* Elements of a run that a piece asks for: where they are in the file, and in the piece. */
typedef struct overlap {
    uint64_t at;
    size_t bytes;
    size_t offset; /* bytes into the piece */
} overlap;

static int overlap_of(const tn__checkpoint_item *item, const tn__index_run *run, uint64_t run_at,
                      const tn_checkpoint_piece *piece, overlap *out) {
    int64_t run_end = run->first + run->count, piece_end = piece->first + piece->count;
    int64_t first = run->first > piece->first ? run->first : piece->first;
    int64_t end = run_end < piece_end ? run_end : piece_end;
    if (first >= end) return 0;
    out->at = run_at + (uint64_t)(first - run->first) * item->element_bytes;
    out->bytes = (size_t)(end - first) * item->element_bytes;
    out->offset = (size_t)(first - piece->first) * item->element_bytes;
    return 1;
}

typedef tn_status (*visit_overlap)(loading *now, const tn__checkpoint_item *item,
                                   const tn__index_part *part, const tn_checkpoint_piece *piece,
                                   const overlap *both);

static tn_status visit_run(loading *now, const tn__checkpoint_item *item,
                           const tn__index_part *part, const tn__index_run *run, uint64_t run_at,
                           visit_overlap visit) {
    overlap both;
    for (size_t i = 0; i < item->entry->piece_count; i++) {
        const tn_checkpoint_piece *piece = &item->entry->pieces[i];
        if (overlap_of(item, run, run_at, piece, &both))
            TN_TRY(visit(now, item, part, piece, &both));
    }
    return TN_OK;
}

static tn_status visit_part(loading *now, const tn__checkpoint_item *item,
                            const tn__index_part *part, visit_overlap visit) {
    uint64_t at = part->begin;
    for (size_t i = 0; i < part->run_count; i++) {
        const tn__index_run *run = &now->index.runs[part->first_run + i];
        TN_TRY(visit_run(now, item, part, run, at, visit));
        at += (uint64_t)run->count * item->element_bytes;
    }
    return TN_OK;
}

/* ---- the check ------------------------------------------------------------------------------- */

static tn_status check_sum(loading *now, size_t file, uint64_t at, uint64_t bytes,
                           uint32_t expected, const char *what) {
    tn__checkpoint *call = now->call;
    const char *path = now->paths[file];
    uint32_t crc = 0;
    while (bytes) {
        size_t step = bytes < call->half_bytes ? (size_t)bytes : call->half_bytes;
        TN_TRY(tn__file_read(now->files[file], path, call->halves[0], step, at));
        crc = tn__crc32(crc, call->halves[0], step);
        at += step;
        bytes -= step;
    }
    if (crc == expected) return TN_OK;
    return TN_FAIL(TN_CORRUPT_INPUT, "%s: the crc32 of %s is %08x, and the index says %08x", path,
                   what, (unsigned)crc, (unsigned)expected);
}

/* A save removes what it has replaced. */
static tn_status is_missing(const loading *now, const char *path, uint64_t bytes) {
    tn__index index;
    int is_there = 0, is_same = 1;
    tn__error_scope_begin();
    if (tn__checkpoint_read_index(now->call->config->path, &is_there, &index) == TN_OK) {
        if (is_there) is_same = identity_of(&index) == identity_of(&now->index);
        tn__index_free(&index);
    }
    (void)tn__error_scope_end(TN_OK);
    if (!is_same) return is_replaced(now);
    return TN_FAIL(TN_CORRUPT_INPUT, "%s is missing, and the index says it has %" PRIu64 " bytes",
                   path, bytes);
}

static tn_status open_file(loading *now, size_t at) {
    const tn__index_file *facts = &now->index.files[at];
    uint64_t bytes = 0;
    int is_there = 0, file = -1;
    if (now->paths[at]) return TN_OK;
    char *path = tn__checkpoint_file(now->call->config->path, now->index.generation, facts->name);
    if (!path) return TN_OUT_OF_HOST_MEMORY;
    now->paths[at] = path;
    now->files[at] = -1;
    TN_TRY(tn__file_open(path, &file, &bytes, &is_there));
    if (!is_there) return is_missing(now, path, facts->bytes);
    now->files[at] = file;
    if (bytes != facts->bytes)
        return TN_FAIL(TN_CORRUPT_INPUT, "%s has %" PRIu64 " bytes, and the index says %" PRIu64,
                       path, bytes, facts->bytes);
    return check_sum(now, at, 0, facts->header_bytes, facts->header_crc, "its header");
}

static int is_needed(const loading *now, const tn__checkpoint_item *item,
                     const tn__index_part *part) {
    overlap both;
    for (size_t i = 0; i < part->run_count; i++) {
        const tn__index_run *run = &now->index.runs[part->first_run + i];
        for (size_t j = 0; j < item->entry->piece_count; j++) {
            if (overlap_of(item, run, 0, &item->entry->pieces[j], &both)) return 1;
        }
    }
    return 0;
}

static tn_status check_item(loading *now, size_t at) {
    const tn__checkpoint_item *item = &now->call->items[at];
    const tn__index_tensor *tensor = now->tensors[at];
    for (size_t i = 0; i < tensor->part_count; i++) {
        const tn__index_part *part = &now->index.parts[tensor->first_part + i];
        if (!is_needed(now, item, part)) continue;
        TN_TRY(open_file(now, part->file));
        TN_TRY(check_sum(now, part->file, part->begin, part->bytes, part->crc, tensor->name));
    }
    return TN_OK;
}

static tn_status check(loading *now) {
    for (size_t i = 0; i < now->call->config->entry_count; i++)
        TN_TRY(check_item(now, i));
    return TN_OK;
}

/* ---- the elements ---------------------------------------------------------------------------- */

/* A half is filled from the file once the stream has emptied it. */
static tn_status load_overlap(loading *now, const tn__checkpoint_item *item,
                              const tn__index_part *part, const tn_checkpoint_piece *piece,
                              const overlap *both) {
    tn__checkpoint *call = now->call;
    char *dst = tn__checkpoint_address(call, item, piece) + both->offset;
    for (size_t done = 0; done < both->bytes;) {
        size_t left = both->bytes - done;
        size_t step = left < call->half_bytes ? left : call->half_bytes;
        unsigned char *half = call->halves[now->half];
        TN_TRY(call->driver->event_synchronize(call->on, call->copied[now->half]));
        TN_TRY(tn__file_read(now->files[part->file], now->paths[part->file], half, step,
                             both->at + done));
        TN_TRY(call->driver->copy(call->on, dst + done, half, step, call->stream));
        TN_TRY(call->driver->event_record(call->on, call->copied[now->half], call->stream));
        now->half = (now->half + 1) % TN__CHECKPOINT_HALVES;
        done += step;
    }
    return TN_OK;
}

static tn_status load_items(loading *now) {
    const tn__checkpoint *call = now->call;
    for (size_t i = 0; i < call->config->entry_count; i++) {
        const tn__index_tensor *tensor = now->tensors[i];
        for (size_t j = 0; j < tensor->part_count; j++)
            TN_TRY(visit_part(now, &call->items[i], &now->index.parts[tensor->first_part + j],
                              load_overlap));
    }
    return TN_OK;
}

static tn_status load_and_wait(loading *now) {
    const tn__checkpoint *call = now->call;
    tn_status status = load_items(now);
    tn__saved_error saved;
    tn__error_save(&saved);
    tn_status synced =
        call->device ? call->driver->stream_synchronize(call->on, call->stream) : TN_OK;
    if (status == TN_OK) return synced;
    tn__error_restore(&saved);
    return status;
}

/* ---- the call -------------------------------------------------------------------------------- */

static tn_status load(loading *now) {
    tn__checkpoint *call = now->call;
    tn_status status = find_items(now);
    TN_TRY(tn__checkpoint_agree(call, check_same(now, status)));
    TN_TRY(tn__checkpoint_agree(call, check(now)));
    TN_TRY(tn__checkpoint_agree(call, tn__checkpoint_lease_all(call, 1)));
    status = tn__checkpoint_agree(call, load_and_wait(now));
    tn__saved_error saved;
    tn__error_save(&saved);
    tn_status released = tn__checkpoint_release_all(call, status == TN_OK ? 1 : -1);
    if (status == TN_OK) return released;
    tn__error_restore(&saved);
    return status;
}

static void end_loading(loading *now) {
    for (size_t i = 0; now->paths && now->files && i < now->index.file_count; i++) {
        if (!now->paths[i]) continue;
        if (now->files[i] >= 0) (void)tn__file_close(now->files[i], now->paths[i]);
        tn__host_free(now->paths[i]);
    }
    tn__host_free(now->paths);
    tn__host_free(now->files);
    tn__host_free(now->tensors);
    tn__index_free(&now->index);
}

tn_status tn_checkpoint_load(const tn_checkpoint_config *config, tn_stream stream) {
    tn__checkpoint call;
    loading now = {.call = &call};
    tn_status status = tn__checkpoint_begin(&call, config, stream);
    if (status == TN_OK) status = load(&now);
    tn__saved_error saved;
    tn__error_save(&saved);
    end_loading(&now);
    tn__checkpoint_end(&call);
    tn__error_restore(&saved);
    return status;
}
