/* What must be true of blocks, kept without any code of the allocator: an independent oracle.
 *
 *     blocks   in no order, so that a random one is found at once
 *     order    their indexes, sorted by address: an overlap is a conflict with a neighbour
 *
 * Each block knows the streams whose work on it is not yet known to come before other work: who
 * wrote it last and who has read it since. From that the simulation knows which waits the program
 * itself owes. Which waits the allocator owes is judged by the simulated device, whose shadow of
 * the physical memory sees every touch and every take.
 *
 * Invariants: order is sorted and holds each index once; no two blocks overlap.
 */
#ifndef TENURE_INTERVAL_ORACLE_H
#define TENURE_INTERVAL_ORACLE_H

#include <stddef.h>
#include <stdint.h>

#define ORACLE_NO_STREAM (-1)

typedef struct oracle_block {
    uintptr_t address;
    size_t bytes;
    int pool;
    int own;        /* the stream that it was made for; ORACLE_NO_STREAM: it has ended */
    int writer;     /* the stream that wrote it last; ORACLE_NO_STREAM: known to have ended */
    uint32_t users; /* a bit a stream: the writer, and who has read since */
} oracle_block;

#define ORACLE_BLOCKS_MAX 2048

typedef struct interval_oracle {
    oracle_block blocks[ORACLE_BLOCKS_MAX];
    uint32_t order[ORACLE_BLOCKS_MAX];
    size_t count;
} interval_oracle;

/* Adds a block; the index of a block that it overlaps, or -1 if all is well. */
int oracle_add(interval_oracle *oracle, const oracle_block *block);

/* Removes the block at the index; the last one takes its index. */
void oracle_remove(interval_oracle *oracle, size_t index);

/* The block that contains the address, or -1. */
int oracle_find(const interval_oracle *oracle, uintptr_t address);

/* Work on the stream touches the block. Gives the streams that the work must come after. */
uint32_t oracle_touch(oracle_block *block, int stream, int is_write);

/* The stream's work so far has completed: nothing need come after it any more. */
void oracle_stream_done(interval_oracle *oracle, int stream);

/* What had to come after `from` has to come after `to` from now on, which waits for it. */
void oracle_stream_moved(interval_oracle *oracle, int from, int to);

/* The stream has ended: blocks made for it are nobody's. */
void oracle_stream_ended(interval_oracle *oracle, int stream);

#endif
