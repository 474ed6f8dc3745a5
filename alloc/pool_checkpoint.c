/* Checkpoints of a graph pool: which blocks are live, and how that is brought back.
 *
 * A restore first makes sure that it can not fail: every block that is live is the checkpoint's,
 * every other one of the checkpoint lies in free memory; the stream waits for the uses of that
 * memory; cuts are made where the blocks begin and end (that changes nothing: what is alike is
 * joined again). Then it takes them.
 */
#include <stdlib.h>

#include "driver_state.h"
#include "host_alloc.h"
#include "pool_internal.h"

typedef struct saved_block {
    uintptr_t address;
    size_t bytes;
    size_t asked_bytes;
    const char *owner;
    const char *site;
} saved_block;

struct tn_checkpoint {
    uint64_t pool_number;
    size_t count;
    saved_block blocks[]; /* by address */
};

static int compare_blocks(const void *a, const void *b) {
    uintptr_t left = ((const saved_block *)a)->address;
    uintptr_t right = ((const saved_block *)b)->address;
    return left < right ? -1 : left > right;
}

/* ---- taking one ------------------------------------------------------------------------------ */

static tn_status lock_quiet_pool(tn_pool *pool, const char *call) {
    TN_REQUIRE(pool, "%s: pool is NULL", call);
    if (!pool->graph) {
        return TN_FAIL(TN_UNSUPPORTED, "%s: pool %s is no graph pool", call, pool->name);
    }
    TN_TRY(tn__driver_require_present(call));
    pthread_mutex_lock(&pool->mutex);
    if (!pool->graph->is_open) return TN_OK;
    pthread_mutex_unlock(&pool->mutex);
    return TN_FAIL(TN_INVALID_STATE, "%s: pool %s has a capture open", call, pool->name);
}

static tn_status save_blocks(tn_pool *pool, tn_checkpoint *checkpoint) {
    tn__piece *block = NULL;
    while ((block = tn__heap_next_block(&pool->heap, block)) != NULL) {
        if (block->is_owned) {
            return TN_FAIL(
                TN_INVALID_STATE,
                "tn_pool_checkpoint: a tensor owns the block at %p, and lives on its own "
                "terms",
                (void *)block->address);
        }
        checkpoint->blocks[checkpoint->count++] = (saved_block){
            block->address, block->bytes, block->asked_bytes, block->owner, block->site};
    }
    return TN_OK;
}

static tn_status checkpoint_locked(tn_pool *pool, tn_checkpoint **out) {
    size_t room = pool->heap.block_count * sizeof(saved_block);
    tn_checkpoint *checkpoint = tn__host_alloc(1, sizeof *checkpoint + room);
    tn_status status;
    if (!checkpoint) return TN_OUT_OF_HOST_MEMORY;
    checkpoint->pool_number = pool->graph->number;
    status = save_blocks(pool, checkpoint);
    if (status == TN_OK) {
        qsort(checkpoint->blocks, checkpoint->count, sizeof(saved_block), compare_blocks);
        *out = checkpoint;
    } else {
        tn__host_free(checkpoint);
    }
    return status;
}

tn_status tn_pool_checkpoint(tn_pool *pool, tn_checkpoint **out) {
    tn_status status;
    TN_REQUIRE(out, "tn_pool_checkpoint: out is NULL");
    TN_TRY(lock_quiet_pool(pool, "tn_pool_checkpoint"));
    status = checkpoint_locked(pool, out);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

void tn_checkpoint_destroy(tn_checkpoint *checkpoint) { tn__host_free(checkpoint); }

/* ---- bringing it back ------------------------------------------------------------------------ */

static const saved_block *find_saved(const tn_checkpoint *checkpoint, uintptr_t address) {
    const saved_block wanted = {.address = address};
    return bsearch(&wanted, checkpoint->blocks, checkpoint->count, sizeof wanted, compare_blocks);
}

static tn_status check_live(tn_pool *pool, const tn_checkpoint *checkpoint) {
    tn__piece *block = NULL;
    while ((block = tn__heap_next_block(&pool->heap, block)) != NULL) {
        const saved_block *saved = find_saved(checkpoint, block->address);
        if (saved && saved->asked_bytes == block->asked_bytes) continue;
        return TN_FAIL(
            TN_IN_USE,
            "tn_pool_restore: the block of %zu bytes at %p (owner %s) is live and not in "
            "the checkpoint: free it first",
            block->asked_bytes, (void *)block->address, block->owner ? block->owner : "none");
    }
    return TN_OK;
}

static tn__region *find_region(tn_pool *pool, const saved_block *saved) {
    tn__region *region = pool->heap.regions;
    while (region) {
        if (saved->address >= region->map.begin && saved->address < region->map.end) break;
        region = region->next;
    }
    return region && saved->bytes <= region->map.end - saved->address ? region : NULL;
}

/* The first piece of the saved block's memory, all of which is FREE; NULL if it is not. */
static tn__piece *find_free(tn_pool *pool, const saved_block *saved) {
    tn__region *region = find_region(pool, saved);
    tn__piece *first, *last;
    if (!region) return NULL;
    first = tn__piece_at(region->first, saved->address);
    for (last = first; tn__piece_is(last, TN__PIECE_FREE); last = last->next) {
        if (tn__piece_end(last) >= saved->address + saved->bytes) return first;
    }
    return NULL;
}

/* Cuts, so that the saved block's memory is whole pieces, and waits for them. */
static tn_status prepare_block(tn_pool *pool, const saved_block *saved, tn__pool_stream *stream) {
    uintptr_t end = saved->address + saved->bytes;
    tn__piece *piece = find_free(pool, saved);
    if (!piece) {
        return TN_FAIL(TN_INVALID_STATE,
                       "tn_pool_restore: the memory of the block at %p is not free in pool %s any "
                       "more: it has gone back to the driver",
                       (void *)saved->address, pool->name);
    }
    TN_TRY(tn__heap_reserve(&pool->heap, 2));
    if (piece->address < saved->address) {
        TN_TRY(tn__heap_split(&pool->heap, piece, saved->address));
        piece = piece->next;
    }
    for (; piece && piece->address < end; piece = piece->next) {
        if (tn__piece_end(piece) > end) TN_TRY(tn__heap_split(&pool->heap, piece, end));
        TN_TRY(tn__order_wait(&pool->order, stream, &piece->uses));
    }
    return TN_OK;
}

static void take_block(tn_pool *pool, const saved_block *saved, tn__pool_stream *stream) {
    tn__piece *block = NULL;
    tn__piece *at = find_free(pool, saved);
    tn__request request = {.asked_bytes = saved->asked_bytes,
                           .bytes = saved->bytes,
                           .alignment = TN__BLOCK_ALIGN,
                           .stream = stream,
                           .owner = saved->owner,
                           .site = saved->site};
    tn_status status =
        tn__heap_take(&pool->heap, tn__run_first(at), saved->address, &request, &block);
    TN_CHECK(status == TN_OK);
    tn__pool_note_take(pool, block);
    tn__pool_note_alloc(pool, block);
}

static tn_status restore_locked(tn_pool *pool, const tn_checkpoint *checkpoint, tn_stream handle) {
    tn__pool_stream *stream = NULL;
    tn_status status;
    TN_REQUIRE(checkpoint->pool_number == pool->graph->number,
               "tn_pool_restore: the checkpoint is of another pool than %s", pool->name);
    TN_TRY(tn__pause_check(pool, "tn_pool_restore"));
    TN_TRY(tn__order_check_capture(&pool->order, handle, "wait for what uses its blocks"));
    TN_TRY(tn__pool_find_stream(pool, handle, &stream));
    TN_TRY(check_live(pool, checkpoint));
    status = tn__pool_collect(pool);
    for (size_t i = 0; i < checkpoint->count && status == TN_OK; i++) {
        const saved_block *saved = &checkpoint->blocks[i];
        if (tn__heap_find_block(&pool->heap, saved->address)) continue;
        status = prepare_block(pool, saved, stream);
    }
    if (status == TN_OK) status = tn__heap_reserve(&pool->heap, checkpoint->count + 2);
    for (size_t i = 0; i < checkpoint->count && status == TN_OK; i++) {
        const saved_block *saved = &checkpoint->blocks[i];
        if (!tn__heap_find_block(&pool->heap, saved->address)) take_block(pool, saved, stream);
    }
    tn__heap_settle(&pool->heap);
    tn__pool_note_peaks(pool);
    return status;
}

tn_status tn_pool_restore(tn_pool *pool, const tn_checkpoint *checkpoint, tn_stream stream) {
    tn_status status;
    TN_REQUIRE(checkpoint, "tn_pool_restore: checkpoint is NULL");
    TN_TRY(lock_quiet_pool(pool, "tn_pool_restore"));
    status = restore_locked(pool, checkpoint, stream);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}
