/* Pause and resume: a pool's physical memory given back and taken again. See pool_pause.h.
 *
 * Pause: wait for all uses; give idle memory back; undo dormant views; copy contents to the host;
 * unmap all pages; release all handles. A failure up to the unmapping is undone: the memory is
 * still held, so that nothing of it is lost. If even the mapping anew fails, the pool is paused,
 * with its memory held. From the first release on nothing fails the call any more.
 *
 * Resume: make handles, map, set access, copy contents back. A failure is undone as far as the
 * driver lets us; the pool is paused, and what it holds is used by the next try.
 */
#include "pool_pause.h"

#include "driver_state.h"
#include "event_ring.h"
#include "host_alloc.h"
#include "pool_idle.h"
#include "tenure_pool.h"

#define CHUNK_BYTES ((size_t)64 << 20)
#define ROUNDS_MAX  8 /* of waiting, while other threads go on freeing */

/* ---- contents in host memory ----------------------------------------------------------------- */

/* Blocks follow each other through the chunks; a block may lie in several. */
struct tn__chunk {
    tn__chunk *next;
    unsigned char *bytes;
    size_t capacity;
    size_t used;
    int is_pinned;
};

typedef struct saved_block {
    uintptr_t address;
    size_t bytes;
} saved_block;

struct tn__pause {
    int is_done; /* the memory is gone; 0: the pool is about to be paused */
    int has_contents;
    saved_block *blocks; /* in the order of the chunks */
    size_t block_count;
    tn__chunk *first;
};

tn_status tn__pause_check(const tn_pool *pool, const char *call) {
    if (!pool->pause) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "%s: pool %s is paused: tn_pool_resume", call, pool->name);
}

int tn__pause_is_done(const tn_pool *pool) { return pool->pause && pool->pause->is_done; }

static tn_status free_chunk(tn_pool *pool, tn__chunk *chunk) {
    if (chunk->is_pinned) TN_TRY(pool->driver->host_free(pool->state, chunk->bytes));
    if (!chunk->is_pinned) tn__host_free(chunk->bytes);
    tn__host_free(chunk);
    return TN_OK;
}

/* Copies are over: only then may host memory be freed, and device memory be unmapped. */
static tn_status finish_copies(tn_pool *pool) {
    if (!pool->contents.is_busy) return TN_OK;
    TN_TRY(pool->driver->stream_synchronize(pool->state, pool->contents.stream));
    pool->contents.is_busy = 0;
    return TN_OK;
}

static tn_status free_stuck(tn_pool *pool) {
    TN_TRY(finish_copies(pool));
    while (pool->contents.stuck) {
        tn__chunk *next = pool->contents.stuck->next;
        TN_TRY(free_chunk(pool, pool->contents.stuck));
        pool->contents.stuck = next;
    }
    return TN_OK;
}

/* What can not be freed now is later. */
static void free_chunks(tn_pool *pool, tn__pause *pause) {
    while (pause->first) {
        tn__chunk *chunk = pause->first;
        pause->first = chunk->next;
        chunk->next = pool->contents.stuck;
        pool->contents.stuck = chunk;
    }
    tn__error_scope_begin();
    (void)free_stuck(pool);
    (void)tn__error_scope_end(TN_OK);
    tn__host_free(pause->blocks);
}

/* Locked memory if there is any: it is copied faster. */
static tn__chunk *make_chunk(tn_pool *pool, size_t bytes) {
    tn__chunk *made = tn__host_alloc(1, sizeof *made);
    void *locked = NULL;
    if (!made) return NULL;
    made->capacity = bytes;
    tn__error_scope_begin();
    made->is_pinned = pool->driver->host_alloc(pool->state, bytes, &locked) == TN_OK;
    (void)tn__error_scope_end(TN_OK);
    made->bytes = made->is_pinned ? locked : tn__host_alloc(bytes, 1);
    if (made->bytes) return made;
    tn__host_free(made);
    return NULL;
}

static tn_status make_chunks(tn_pool *pool, tn__pause *pause, size_t bytes) {
    tn__chunk **at = &pause->first;
    while (bytes > 0) {
        *at = make_chunk(pool, bytes < CHUNK_BYTES ? bytes : CHUNK_BYTES);
        if (!*at) return TN_OUT_OF_HOST_MEMORY;
        bytes -= (*at)->capacity;
        at = &(*at)->next;
    }
    return TN_OK;
}

/* Goes over the chunks as over one stretch of bytes. */
typedef struct chunk_cursor {
    tn__chunk *at;
    size_t offset;
} chunk_cursor;

static tn_status copy_block(tn_pool *pool, const saved_block *block, chunk_cursor *to, int is_save,
                            int is_skipped, tn_stream stream) {
    for (size_t done = 0; done < block->bytes;) {
        size_t room = to->at->capacity - to->offset;
        size_t bytes = block->bytes - done < room ? block->bytes - done : room;
        unsigned char *device = (unsigned char *)block->address + done;
        unsigned char *host = to->at->bytes + to->offset;
        if (!is_skipped) {
            TN_TRY(pool->driver->copy(pool->state, is_save ? host : device, is_save ? device : host,
                                      bytes, stream));
        }
        done += bytes;
        to->offset += bytes;
        if (to->offset < to->at->capacity) continue;
        *to = (chunk_cursor){to->at->next, 0};
    }
    return TN_OK;
}

static tn_status copy_blocks(tn_pool *pool, const tn__pause *pause, int is_save, tn_stream stream) {
    chunk_cursor at = {pause->first, 0};
    for (size_t i = 0; i < pause->block_count; i++) {
        const saved_block *block = &pause->blocks[i];
        int is_gone = !tn__heap_find_block(&pool->heap, block->address);
        TN_TRY(copy_block(pool, block, &at, is_save, is_gone, stream));
    }
    return TN_OK;
}

/* On a stream of its own: all uses are over, as the host knows. */
static tn_status copy_contents(tn_pool *pool, const tn__pause *pause, int is_save) {
    tn__contents *contents = &pool->contents;
    tn_status status;
    if (!contents->has_stream) {
        TN_TRY(pool->driver->stream_create(pool->state, &contents->stream));
        contents->has_stream = 1;
    }
    contents->is_busy = 1;
    status = copy_blocks(pool, pause, is_save, contents->stream);
    if (status == TN_OK) status = finish_copies(pool);
    if (status != TN_OK) {
        tn__saved_error saved;
        tn__error_save(&saved);
        (void)finish_copies(pool);
        tn__error_restore(&saved);
    }
    return status;
}

static tn_status save_contents(tn_pool *pool, tn__pause *pause) {
    tn__piece *block = NULL;
    size_t count = pool->heap.block_count;
    size_t bytes = 0;
    if (count == 0) return TN_OK;
    pause->blocks = tn__host_alloc(count, sizeof *pause->blocks);
    if (!pause->blocks) return TN_OUT_OF_HOST_MEMORY;
    while ((block = tn__heap_next_block(&pool->heap, block)) != NULL) {
        pause->blocks[pause->block_count++] = (saved_block){block->address, block->asked_bytes};
        bytes += block->asked_bytes;
    }
    TN_TRY(make_chunks(pool, pause, bytes));
    pause->has_contents = 1;
    return copy_contents(pool, pause, 1);
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* A block's own stream may be using it, without a word. */
static void note_own_uses(tn_pool *pool) {
    tn__piece *block = NULL;
    while ((block = tn__heap_next_block(&pool->heap, block)) != NULL) {
        tn__use use;
        if (!block->stream) continue;
        use = tn__order_use_now(block->stream);
        tn__uses_add(&block->uses, use.stream, use.epoch);
    }
}

/* No pause after all: a block with a lane goes to a thread's cache when it is freed, where blocks
 * have no uses. */
static void forget_own_uses(tn_pool *pool) {
    tn__piece *block = NULL;
    while ((block = tn__heap_next_block(&pool->heap, block)) != NULL) {
        if (block->lane) tn__uses_forget(&block->uses, block->stream);
    }
}

static int has_uses(tn_pool *pool) {
    tn__heap_settle(&pool->heap);
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (tn__piece *piece = region->first; piece; piece = piece->next) {
            if (piece->kind == TN__PIECE_GUEST) continue;
            if (piece->kind == TN__PIECE_LIVE) tn__uses_settle(&piece->uses);
            if (piece->uses.count > 0) return 1;
        }
    }
    return 0;
}

/* The pool's mutex is let go meanwhile: others may free. */
static tn_status wait_for_uses(tn_pool *pool) {
    note_own_uses(pool);
    for (int round = 0; round < ROUNDS_MAX; round++) {
        if (!has_uses(pool)) return TN_OK;
        TN_TRY(tn__pool_wait_uses(pool));
    }
    return TN_FAIL(TN_INVALID_STATE,
                   "blocks of pool %s are in use: other threads go on freeing them", pool->name);
}

/* ---- pages ----------------------------------------------------------------------------------- */

typedef tn_status (*span_visit)(tn_pool *pool, tn__region *region, tn__page_span span);

/* Visits the stretches of active pages whose view is paused or is not. */
static tn_status for_each_active(tn_pool *pool, int is_paused, span_visit visit) {
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        size_t page = 0;
        while (region->views && page < region->page_count) {
            tn__page_span span;
            page = tn__bits_find(region->mapped, page, region->page_count, 1);
            span.first = page;
            while (page < region->page_count && tn__page_bit(region->mapped, page) &&
                   region->views[page].is_paused == is_paused)
                page++;
            span.end = page;
            if (span.first < span.end) TN_TRY(visit(pool, region, span));
            if (span.first == span.end) page++;
        }
    }
    return TN_OK;
}

static tn_status unmap_span(tn_pool *pool, tn__region *region, tn__page_span span) {
    size_t bytes = (span.end - span.first) * region->page_bytes;
    TN_TRY(
        pool->driver->mem_unmap(pool->state, (void *)tn__page_address(region, span.first), bytes));
    for (size_t page = span.first; page < span.end; page++)
        region->views[page].is_paused = 1;
    return TN_OK;
}

static tn_status make_handles(tn_pool *pool, tn__region *region, tn__page_span span) {
    for (size_t page = span.first; page < span.end; page++) {
        tn__frame *frame = tn__region_frame(region, page);
        tn_status status;
        if (frame->handle) continue;
        TN_TRY(tn__pool_claim(pool, pool->page_bytes));
        status = pool->driver->mem_create(pool->state, pool->page_bytes, &frame->handle);
        if (status != TN_OK) {
            frame->handle = 0;
            tn__process_unclaim(pool->page_bytes);
            return status;
        }
        pool->paused_bytes -= pool->page_bytes;
    }
    return TN_OK;
}

/* A failing release leaves the handle with its frame. */
static tn_status release_handles(tn_pool *pool, tn__region *region, tn__page_span span) {
    for (size_t page = span.first; page < span.end; page++) {
        tn__frame *frame = tn__region_frame(region, page);
        if (!frame->handle) continue;
        if (pool->driver->mem_release(pool->state, frame->handle, pool->page_bytes) != TN_OK) {
            continue;
        }
        frame->handle = 0;
        tn__process_give_back(pool->page_bytes);
        pool->paused_bytes += pool->page_bytes;
    }
    return TN_OK;
}

static tn_status map_span(tn_pool *pool, tn__region *region, tn__page_span span) {
    for (size_t page = span.first; page < span.end; page++) {
        TN_TRY(pool->driver->mem_map(pool->state, (void *)tn__page_address(region, page),
                                     pool->page_bytes, tn__region_frame(region, page)->handle));
        region->views[page].is_paused = 0;
    }
    return TN_OK;
}

static tn_status open_span(tn_pool *pool, tn__region *region, tn__page_span span) {
    return tn__pool_set_access(pool, (void *)tn__page_address(region, span.first),
                               (span.end - span.first) * region->page_bytes);
}

static tn_status map_all(tn_pool *pool) {
    TN_TRY(for_each_active(pool, 1, map_span));
    return for_each_active(pool, 0, open_span);
}

/* Gives back what can be: what the driver refuses stays mapped, or held. The text of the failure
 * that led here stays. */
static void give_all_back(tn_pool *pool) {
    if (pool->contents.is_busy) return;
    tn__error_scope_begin();
    (void)for_each_active(pool, 0, unmap_span);
    (void)for_each_active(pool, 1, release_handles);
    (void)tn__error_scope_end(TN_OK);
}

/* ---- pause ----------------------------------------------------------------------------------- */

static tn_status check_pausable(const tn_pool *pool) {
    TN_TRY(tn__pause_check(pool, "tn_pool_pause"));
    if (!pool->backing->maps_handles) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "tn_pool_pause: pool %s has no VMM pages: its addresses go with its memory",
                       pool->name);
    }
    if (pool->graph && pool->graph->is_open) {
        return TN_FAIL(TN_INVALID_STATE, "tn_pool_pause: pool %s has a capture open", pool->name);
    }
    return TN_OK;
}

static tn_status check_shared(const tn_pool *pool) {
    for (const tn__region *region = pool->heap.regions; region; region = region->next) {
        if (!region->dedicated) continue;
        return TN_FAIL(TN_IN_USE,
                       "tn_pool_pause: the block at %p of pool %s has a handle of its own, which "
                       "others may share: free it first",
                       (void *)region->map.begin, pool->name);
    }
    return TN_OK;
}

static tn_status unmap_dormant(tn_pool *pool) {
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (size_t page = 0; region->views && page < region->page_count; page++) {
            if (!region->views[page].frame || tn__page_bit(region->mapped, page)) continue;
            TN_TRY(tn__views_unmap(pool, region, (tn__page_span){page, page + 1}));
        }
    }
    return TN_OK;
}

/* The contents are safe while the handles are held. */
static tn_status unmap_all(tn_pool *pool, tn__pause *pause) {
    tn_status status = for_each_active(pool, 0, unmap_span);
    if (status == TN_OK) {
        pause->is_done = 1;
        return TN_OK;
    }
    tn__error_scope_begin();
    pause->is_done = map_all(pool) != TN_OK;
    (void)tn__error_scope_end(TN_OK);
    return status;
}

static tn_status pause_pages(tn_pool *pool, tn__pause *pause, int keep_contents) {
    tn__release everything = {.least_bytes = SIZE_MAX, .most_bytes = SIZE_MAX};
    TN_TRY(wait_for_uses(pool));
    TN_TRY(tn__pool_release(pool, &everything));
    TN_TRY(check_shared(pool));
    TN_TRY(unmap_dormant(pool));
    if (keep_contents) TN_TRY(save_contents(pool, pause));
    TN_TRY(unmap_all(pool, pause));
    tn__error_scope_begin();
    (void)for_each_active(pool, 1, release_handles);
    (void)tn__error_scope_end(TN_OK);
    return TN_OK;
}

static void end_pause(tn_pool *pool) {
    tn__pause *pause = pool->pause;
    pool->pause = NULL;
    tn__pool_observe(pool, TN__OBSERVE_PAUSE, 0);
    free_chunks(pool, pause);
    tn__host_free(pause);
}

static tn_status pause_locked(tn_pool *pool, int keep_contents) {
    tn_status status;
    TN_TRY(check_pausable(pool));
    TN_TRY(free_stuck(pool));
    pool->pause = tn__host_alloc(1, sizeof *pool->pause);
    if (!pool->pause) return TN_OUT_OF_HOST_MEMORY;
    tn__pool_observe(pool, TN__OBSERVE_PAUSE, 1);
    status = pause_pages(pool, pool->pause, keep_contents);
    if (!pool->pause->is_done) {
        tn__error_scope_begin();
        forget_own_uses(pool);
        end_pause(pool);
        (void)tn__error_scope_end(TN_OK);
        return status;
    }
    tn__pool_event(pool, TN_EVENT_PAUSE, 0, pool->paused_bytes, NULL, NULL);
    return status;
}

tn_status tn_pool_pause(tn_pool *pool, int keep_contents) {
    tn_status status;
    TN_REQUIRE(pool, "tn_pool_pause: pool is NULL");
    TN_TRY(tn__driver_require_present("tn_pool_pause"));
    pthread_mutex_lock(&pool->mutex);
    status = pause_locked(pool, keep_contents);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* ---- resume ---------------------------------------------------------------------------------- */

/* No work has used memory that was not there. */
static void forget_uses(tn_pool *pool) {
    pool->order.use_stamp++;
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (tn__piece *piece = region->first; piece; piece = piece->next) {
            if (piece->kind == TN__PIECE_GUEST) continue;
            tn__uses_clear(&piece->uses);
            if (piece->kind != TN__PIECE_LIVE) piece->stream = NULL;
        }
    }
    tn__heap_settle(&pool->heap);
}

/* The page is VOID then, as if it had been given back before the pause. */
static tn_status drop_page(tn_pool *pool, tn__region *region, size_t page) {
    tn__piece *piece = NULL;
    tn__frame *frame;
    TN_TRY(tn__idle_isolate(&pool->heap, region, (tn__page_span){page, page + 1}, &piece));
    frame = tn__page_deactivate(&pool->heap, region, page);
    tn__heap_change(&pool->heap, piece, TN__PIECE_VOID);
    region->views[page].is_paused = 0;
    tn__frame_detach(&pool->heap, &region->views[page]);
    tn__heap_join(&pool->heap, piece);
    if (frame->handle) {
        tn__frame_spare(pool, frame);
        return TN_OK;
    }
    pool->paused_bytes -= pool->page_bytes;
    pool->heap.inactive_count--;
    tn__host_free(frame);
    return TN_OK;
}

/* What was freed while the pool was paused needs no memory, unless graphs use it. */
static tn_status drop_idle(tn_pool *pool) {
    forget_uses(pool);
    if (tn__graph_holds(pool->graph)) return TN_OK;
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (size_t page = 0; region->views && page < region->page_count; page++) {
            int is_idle = tn__page_bit(region->idle, page);
            if (is_idle && region->views[page].is_paused) TN_TRY(drop_page(pool, region, page));
        }
    }
    return TN_OK;
}

tn_status tn__pause_close(tn_pool *pool) {
    if (tn__pause_is_done(pool)) {
        TN_TRY(drop_idle(pool));
        end_pause(pool);
    }
    TN_TRY(free_stuck(pool));
    if (!pool->contents.has_stream) return TN_OK;
    TN_TRY(pool->driver->stream_destroy(pool->state, pool->contents.stream));
    pool->contents.has_stream = 0;
    return TN_OK;
}

static tn_status resume_pages(tn_pool *pool) {
    TN_TRY(for_each_active(pool, 1, make_handles));
    TN_TRY(map_all(pool));
    return pool->pause->has_contents ? copy_contents(pool, pool->pause, 0) : TN_OK;
}

static tn_status resume_locked(tn_pool *pool) {
    size_t paused_bytes = pool->paused_bytes;
    tn_status status;
    if (!tn__pause_is_done(pool)) {
        return TN_FAIL(TN_INVALID_STATE, "tn_pool_resume: pool %s is not paused", pool->name);
    }
    TN_TRY(finish_copies(pool));
    TN_TRY(drop_idle(pool));
    status = resume_pages(pool);
    if (status != TN_OK) {
        give_all_back(pool);
        return status;
    }
    tn__error_scope_begin();
    end_pause(pool);
    (void)tn__error_scope_end(TN_OK);
    tn__pool_note_peaks(pool);
    tn__pool_event(pool, TN_EVENT_RESUME, 0, paused_bytes, NULL, NULL);
    return TN_OK;
}

/* Idle memory of the device's other pools, if that is what lacks. The list of pools comes before a
 * pool's mutex. */
static tn_status resume_with_others(tn_pool *pool) {
    tn__release release = {.least_bytes = pool->paused_bytes, .most_bytes = SIZE_MAX};
    tn_status status;
    pthread_mutex_unlock(&pool->mutex);
    status = tn__pools_release_others(pool, 0, &release);
    pthread_mutex_lock(&pool->mutex);
    return status == TN_OK ? resume_locked(pool) : status;
}

tn_status tn_pool_resume(tn_pool *pool) {
    tn_status status;
    TN_REQUIRE(pool, "tn_pool_resume: pool is NULL");
    TN_TRY(tn__driver_require_present("tn_pool_resume"));
    pthread_mutex_lock(&pool->mutex);
    tn__error_scope_begin();
    status = resume_locked(pool);
    if (status == TN_OUT_OF_DEVICE_MEMORY) status = resume_with_others(pool);
    status = tn__error_scope_end(status);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}
