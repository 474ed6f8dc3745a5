/* What the recording NVTX tool has been told. Its rules are those of compute-sanitizer: blocks lie
 * in a heap and do not overlap, and what ends has begun. */
#ifndef TENURE_RECORDING_TOOL_H
#define TENURE_RECORDING_TOOL_H

#include <stddef.h>
#include <stdint.h>

enum { RECORDED_MAX = 4096 };

typedef struct recorded_range {
    uintptr_t address; /* 0: the slot is free */
    size_t bytes;
    size_t heap; /* of a block: index of its heap */
    char name[32];
} recorded_range;

typedef struct recording {
    recorded_range heaps[RECORDED_MAX];
    recorded_range blocks[RECORDED_MAX];
    size_t heap_count; /* alive */
    size_t block_count;
    size_t heaps_begun; /* ever */
    size_t blocks_begun;
    size_t errors;
    char first_error[128];
    int (*is_device_current)(void); /* set by the test: asked at every call */
} recording;

/* The tool exports this under its name. */
typedef recording *(*recording_get_function)(void);
recording *recording_get(void);

#endif
