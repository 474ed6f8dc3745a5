/* What happened in one allocator: its blocks, each with an address, an owner and a lifetime, and
 * the events in order. Every file that tells such a story is read into this, and written from it:
 *
 *     traces (trace_reader.h) ----\                    /---- traces
 *     snapshots of pools (JSON) --- -> memory_history ------ snapshots for PyTorch's viewer
 *     snapshots of PyTorch -------/                    \---- Chrome traces, pages
 *
 *     memory_history *history = history_create();
 *     history_alloc(history, &block, time_us, &index);     a block has a number from 0 on
 *     history_free(history, index, time_us);
 *     history_finish(history);
 *
 * Functions that return int: 1, or 0 if there is no memory; then the history is as before. Blocks
 * that were alive when recording began are given by history_before, at any time; history_finish
 * puts their allocations before all other events. Times never fall: one that would is taken for the
 * one before it. Used by one thread.
 */
#ifndef TENURE_MEMORY_HISTORY_H
#define TENURE_MEMORY_HISTORY_H

#include <stddef.h>
#include <stdint.h>

#include "name_table.h"

#define HISTORY_ALIVE      UINT32_MAX /* the end of a block that was not freed */
#define HISTORY_EVENTS_MAX (UINT32_MAX - 1)

typedef struct history_block {
    uint64_t address; /* 0: not known */
    uint64_t bytes;   /* as asked for */
    uint32_t owner;   /* of owners */
    uint32_t stream;
    uint32_t begin; /* the event that made it */
    uint32_t end;   /* the event that freed it, or HISTORY_ALIVE */
} history_block;

typedef enum history_kind {
    HISTORY_ALLOC,
    HISTORY_FREE,
    HISTORY_RESERVE, /* physical memory was taken or given back */
    HISTORY_SHORTAGE /* a request could not be served */
} history_kind;

typedef struct history_event {
    double time_us;
    history_kind kind;
    uint32_t index; /* of the block, the change or the shortage */
} history_event;

typedef struct history_change {
    int64_t bytes; /* more, or fewer if negative */
    uint64_t address;
} history_change;

typedef struct history_shortage {
    uint64_t asked_bytes;
    uint64_t free_bytes; /* that the device had; 0: not known */
    uint32_t owner;
    uint32_t event;
} history_shortage;

/* The end of the story: stretches of addresses with memory, tiled by pieces. */
typedef enum history_state { HISTORY_LIVE, HISTORY_PENDING, HISTORY_UNUSED } history_state;

typedef struct history_piece {
    uint64_t address;
    uint64_t bytes;
    uint64_t asked_bytes; /* at most bytes; 0 if unused */
    history_state state;
    uint32_t owner;
} history_piece;

typedef struct history_segment {
    uint64_t address;
    uint64_t bytes; /* those of its pieces together */
    uint64_t stream;
    uint32_t first_piece;
    uint32_t piece_count;
} history_segment;

typedef struct memory_history {
    name_table owners;
    history_block *blocks;
    history_event *events;
    history_change *changes;
    history_shortage *shortages;
    history_segment *segments;
    history_piece *pieces;
    uint32_t block_count;
    uint32_t event_count;
    uint32_t change_count;
    uint32_t shortage_count;
    uint32_t segment_count;
    uint32_t piece_count;
    uint32_t before_count; /* after history_finish these blocks' allocations are the first events */
    uint32_t stream_count; /* one more than the largest stream of a block */
    uint64_t *stream_names; /* what the file calls each stream */
    int has_times;
    int has_addresses;
    int has_owners;
    int has_shortages; /* the file can tell of them, whether there are any or not */
    int ordinal;       /* of the device */
    char source[32];   /* what it was read from: "trace", "PyTorch snapshot", "pool snapshot" */
    char device[128];  /* "" if not known */
    char shortage_text[512]; /* of the last shortage, "" if there is none */
} memory_history;

/* 1 if it is known where the block lies: an address, bytes, and an end that addresses reach. */
int history_has_place(const history_block *block);

memory_history *history_create(void);

/* NULL is a no-op. */
void history_destroy(memory_history *history);

int history_owner(memory_history *history, const char *text, size_t length, uint32_t *out);

/* The number of a stream that the file knows by a name. At most HISTORY_STREAMS_MAX are told
 * apart; those beyond are one. */
#define HISTORY_STREAMS_MAX 1024
int history_stream(memory_history *history, uint64_t name, uint32_t *out);

/* begin and end of the block are filled in here. A negative time is none. */
int history_alloc(memory_history *history, const history_block *block, double time_us,
                  uint32_t *index);
int history_before(memory_history *history, const history_block *block, uint32_t *index);
int history_free(memory_history *history, uint32_t block, double time_us);
int history_reserve(memory_history *history, int64_t bytes, uint64_t address, double time_us);
int history_shortage_add(memory_history *history, const history_shortage *shortage, double time_us);

/* Pieces that follow belong to the segment. */
int history_segment_begin(memory_history *history, uint64_t address, uint64_t stream);
int history_piece_add(memory_history *history, const history_piece *piece);

int history_finish(memory_history *history);

/* Where the file had none, segments of 2 MiB pages around the blocks that are alive at the end.
 * Needs addresses. Blocks that overlap another are left out. 0 if there is no memory. */
int history_place(memory_history *history);

/* The bytes alive after the last event; those reserved then, 0 if that is not known. */
uint64_t history_live_bytes(const memory_history *history);
uint64_t history_reserved_bytes(const memory_history *history);

#endif
