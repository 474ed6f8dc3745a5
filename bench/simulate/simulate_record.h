/* What one simulated rank has done: what was alive after each sub-step, what ran when.
 *
 *     simulate_record record;
 *     simulate_record_begin(&record);
 *     tnsim_watch(simulate_record_watch, &record);     (the library's own function, by pointer)
 *     simulate_record_note(&record, "forward 3", owner_bytes);
 *     simulate_record_piece(&record, chunk, microbatch, is_backward);
 *     simulate_record_close(&record);
 *     simulate_record_end(&record);
 *
 * Owners are the rows of SIMULATE_OWNERS: each byte that is alive belongs to one. A *piece* is what
 * a rank does between two messages of the pipeline: it is as long as what the device does for it.
 * Without host memory the record is incomplete, and says so.
 */
#ifndef TENURE_SIMULATE_RECORD_H
#define TENURE_SIMULATE_RECORD_H

#include <stddef.h>
#include <stdint.h>

#include "simcuda.h"
#include "tenure_dist.h"

/* X(name, how reports call it) */
#define SIMULATE_OWNERS(X)                                                                         \
    X(WEIGHTS, "weights and shards")                                                               \
    X(RING, "gathered units (ring)")                                                               \
    X(COLUMNS, "derived columns (scratch)")                                                        \
    X(GRADIENTS, "gradients")                                                                      \
    X(OPTIMIZER, "masters and moments")                                                            \
    X(SAVED, "saved for backward")                                                                 \
    X(ACTIVATIONS, "activations and scratch")                                                      \
    X(L1, "kept: L1 frozen columns")                                                               \
    X(L2, "kept: L2 planes of each layer")                                                         \
    X(L3, "kept: L3 gathered activations")                                                         \
    X(L4, "kept: L4 gathered columns")

typedef enum simulate_owner {
#define SIMULATE_OWNER(name, text) SIMULATE_OWNER_##name,
    SIMULATE_OWNERS(SIMULATE_OWNER)
#undef SIMULATE_OWNER
        SIMULATE_OWNER_COUNT
} simulate_owner;

const char *simulate_owner_name(simulate_owner owner);

enum { SIMULATE_NOTE_BYTES = 40 };

typedef struct simulate_note {
    char name[SIMULATE_NOTE_BYTES];
    double time_us; /* on the device: all before it has run then */
    size_t live_bytes;
    size_t owner_bytes[SIMULATE_OWNER_COUNT];
} simulate_note;

typedef struct simulate_interval {
    const char *what;
    double begin_us, end_us;
    int stream; /* numbered as they first appear, from 0 */
    int is_communication;
} simulate_interval;

typedef struct simulate_piece {
    int chunk, microbatch;
    int is_backward;
    double own_us;   /* of the device */
    double start_us; /* in the step, once the pipeline is put together */
} simulate_piece;

typedef struct simulate_record {
    simulate_note *notes;
    size_t note_count, note_room;
    simulate_interval *intervals;
    size_t interval_count, interval_room;
    simulate_piece *pieces;
    size_t piece_count, piece_room;
    uint64_t streams[16]; /* the driver's numbers */
    int stream_count;
    double origin_us; /* the step begins */
    double last_us;   /* the latest end of any work */
    double piece_us;  /* where the last piece ended */
    int is_complete;

    /* Of the step, once it is closed or has been put in by who ran it. */
    double step_us, compute_us, communication_us, exposed_us;
    size_t peak_live_bytes, peak_reserved_bytes, resting_bytes;
    size_t workspace_bytes; /* of a small GEMM: where devices differ */
    uint64_t calls[TN_COLLECTIVE_COUNT];
    uint64_t wire_bytes[TN_COLLECTIVE_COUNT];
    uint64_t races;
} simulate_record;

void simulate_record_begin(simulate_record *record);
void simulate_record_end(simulate_record *record);

/* A tnsim_watcher. */
void simulate_record_watch(void *context, const tnsim_interval *interval);

/* The step begins: what was recorded so far is forgotten; times count from now_us. */
void simulate_record_restart(simulate_record *record, double now_us);

void simulate_record_note(simulate_record *record, const char *name,
                          const size_t owner_bytes[SIMULATE_OWNER_COUNT]);
void simulate_record_piece(simulate_record *record, int chunk, int microbatch, int is_backward);

/* Sums up the intervals: how long something was computed, how long something was sent, and how
 * long something was sent while nothing was computed. */
void simulate_record_close(simulate_record *record);

#endif
