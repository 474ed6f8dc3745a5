/* What memory checkers are told: see heap_track.h. */
#include "heap_track.h"

#include "host_alloc.h"
#include "nvtx_memory.h"
#include "track.h"

struct tn__told_block {
    tn__tree_node node; /* by the address behind the block */
    uintptr_t address;
};

static tn__told_block *told_of(tn__tree_node *node) {
    return TN__TREE_ITEM(node, tn__told_block, node);
}

/* ---- what a tool knows ----------------------------------------------------------------------- */

/* The first block that a tool knows and that shares a byte with [begin, end). */
static tn__told_block *find_told(tn__heap_track *track, uintptr_t begin, uintptr_t end) {
    tn__told_block *block = told_of(tn__tree_at_least(track->told, begin + 1, 0));
    return block && block->address < end ? block : NULL;
}

static void end_told(tn__heap_track *track, uintptr_t begin, uintptr_t end) {
    tn__told_block *block = find_told(track, begin, end);
    for (; block; block = find_told(track, begin, end)) {
        tn__tree_remove(&track->told, &block->node);
        tn__nvtx_block_end((void *)block->address);
        tn__host_free(block);
    }
}

/* ---- telling it ------------------------------------------------------------------------------ */

typedef struct tool_call {
    tn__heap_track *track;
    void *heap;
    uintptr_t address;
    size_t bytes;
    size_t asked_bytes;
    const char *owner;
} tool_call;

static void tell_memory_begin(void *argument) {
    tool_call *call = argument;
    call->heap = tn__nvtx_heap_begin((void *)call->address, call->bytes);
}

static void tell_memory_end(void *argument) {
    tool_call *call = argument;
    end_told(call->track, call->address, call->address + call->bytes);
    if (call->heap) tn__nvtx_heap_end(call->heap);
}

static void tell_take(void *argument) {
    tool_call *call = argument;
    tn__told_block *block = call->track->spare;
    TN_CHECK(block != NULL);
    end_told(call->track, call->address, call->address + call->bytes);
    call->track->spare = NULL;
    block->address = call->address;
    tn__tree_insert(&call->track->told, &block->node, call->address + call->asked_bytes, 0);
    tn__nvtx_block_begin(call->heap, (void *)call->address, call->asked_bytes, call->owner);
}

static void tell_idle(void *argument) {
    tool_call *call = argument;
    end_told(call->track, call->address, call->address + call->bytes);
}

/* A device that can not be made current is of no use to the caller either: its own call says so. */
static void tell(tn__host_task task, tool_call *call) {
    tn__heap_track *track = call->track;
    tn__error_scope_begin();
    (void)track->driver->with_current(track->device, task, call);
    (void)tn__error_scope_end(TN_OK);
}

/* ---- the interface --------------------------------------------------------------------------- */

tn_status tn__track_reserve(tn__heap_track *track) {
    if (track->spare || !track->tells_tools) return TN_OK;
    track->spare = tn__host_alloc(1, sizeof *track->spare);
    return track->spare ? TN_OK : TN_OUT_OF_HOST_MEMORY;
}

void tn__track_memory_begin(tn__heap_track *track, uintptr_t address, size_t bytes,
                            void **tool_heap) {
    if (track->marks_memory) TN_TRACK_FREE((void *)address, bytes);
    if (track->tells_tools) {
        tool_call call = {.track = track, .address = address, .bytes = bytes};
        tell(tell_memory_begin, &call);
        *tool_heap = call.heap;
    }
}

/* Whoever gets the addresses next knows nothing of our marks: they go back usable. */
void tn__track_memory_end(tn__heap_track *track, uintptr_t address, size_t bytes, void *tool_heap) {
    if (track->marks_memory) TN_TRACK_ALLOC((void *)address, bytes);
    if (track->tells_tools) {
        tool_call call = {.track = track, .heap = tool_heap, .address = address, .bytes = bytes};
        tell(tell_memory_end, &call);
    }
}

void tn__track_take(tn__heap_track *track, void *tool_heap, uintptr_t address, size_t bytes,
                    size_t asked_bytes, const char *owner) {
    if (track->marks_memory) TN_TRACK_ALLOC((void *)address, asked_bytes);
    if (track->tells_tools && tool_heap) {
        tool_call call = {track, tool_heap, address, bytes, asked_bytes, owner};
        tell(tell_take, &call);
    }
}

void tn__track_idle(tn__heap_track *track, uintptr_t address, size_t bytes) {
    if (track->marks_memory) TN_TRACK_FREE((void *)address, bytes);
    if (track->tells_tools && find_told(track, address, address + bytes)) {
        tool_call call = {.track = track, .address = address, .bytes = bytes};
        tell(tell_idle, &call);
    }
}

void tn__track_clear(tn__heap_track *track) {
    while (track->told) {
        tn__told_block *block = told_of(track->told);
        tn__tree_remove(&track->told, &block->node);
        tn__host_free(block);
    }
    tn__host_free(track->spare);
    track->spare = NULL;
}
