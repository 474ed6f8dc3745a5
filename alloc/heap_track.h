/* What memory checkers are told of a heap: which bytes of its memory are blocks.
 *
 * Two kinds listen: checkers of host memory (ASan, Valgrind: track.h), for pools of the host
 * driver, and NVTX tools (nvtx_memory.h), for PLAIN pools on CUDA. Both are told of exactly the
 * bytes that a caller asked for, so that the rounding of a size is a red zone behind the block.
 *
 * A block is not taken away from a checker when it is freed: work that was put on a stream before
 * may still use it. It is when that is known to be over, or when its memory is given out anew.
 * Where the checker comes from outside, each free asks; in a build with ASan the pool asks when it
 * always does, so that its tests see what they see without.
 * For NVTX the blocks that a tool knows are remembered by address until then.
 *
 * Everything here is under the pool's mutex.
 */
#ifndef TENURE_HEAP_TRACK_H
#define TENURE_HEAP_TRACK_H

#include "driver.h"
#include "heap_tree.h"

typedef struct tn__told_block tn__told_block;

typedef struct tn__heap_track {
    int is_on;        /* one of the following is; else nothing here is called */
    int marks_memory; /* ASan or Valgrind */
    int tells_tools;  /* NVTX; with the device current, as compute-sanitizer wants it */
    const tn__driver *driver;
    tn__driver_device *device;
    int asks_at_free;    /* each free finds out what is over by now */
    tn__tree_node *told; /* blocks that a tool knows */
    tn__told_block *spare;
} tn__heap_track;

/* So that the next tn__track_take can not fail. */
tn_status tn__track_reserve(tn__heap_track *track);

/* Memory of the driver that the heap begins, or ceases, to give blocks out of. *tool_heap is the
 * tool's name for it, NULL if it has none: then it is told nothing of blocks there. */
void tn__track_memory_begin(tn__heap_track *track, uintptr_t address, size_t bytes,
                            void **tool_heap);
void tn__track_memory_end(tn__heap_track *track, uintptr_t address, size_t bytes, void *tool_heap);

/* A block is given out: asked_bytes of the bytes from its address on. owner may be NULL. */
void tn__track_take(tn__heap_track *track, void *tool_heap, uintptr_t address, size_t bytes,
                    size_t asked_bytes, const char *owner);

/* No work uses the bytes any more, and they are in no block. */
void tn__track_idle(tn__heap_track *track, uintptr_t address, size_t bytes);

/* Forgets everything without a word to anybody: when the driver is gone. */
void tn__track_clear(tn__heap_track *track);

#endif
