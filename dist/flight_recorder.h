/* The last collectives of a communicator: what was put on streams, and what is known to be done.
 *
 * Kept under the communicator's lock in memory of its own, so that a report can be made after
 * anything has failed. `done` never passes what the device has been asked about: collectives of a
 * communicator end in the order they were put.
 */
#ifndef TENURE_FLIGHT_RECORDER_H
#define TENURE_FLIGHT_RECORDER_H

#include "comm_engine.h"
#include "text_sink.h"

enum { TN__FLIGHT_OPS = 64 };

typedef struct tn__flight_op {
    uint64_t sequence;  /* from 1 */
    tn_collective kind; /* of a group: of its first call */
    int is_graph;       /* that was launched */
    size_t calls;       /* more than 1: a group; of a graph: what it has */
    size_t count;
    tn_dtype dtype;
    int root;
    uint64_t stream_id;
    uint64_t put_us;
} tn__flight_op;

typedef struct tn__flight_recorder {
    uint64_t put;
    uint64_t done;
    tn__flight_op ops[TN__FLIGHT_OPS]; /* of sequence s: at s % TN__FLIGHT_OPS */
} tn__flight_recorder;

void tn__flight_put(tn__flight_recorder *recorder, const tn__batch *batch, uint64_t stream_id);

void tn__flight_put_graph(tn__flight_recorder *recorder, uint64_t calls, uint64_t stream_id);

/* The oldest that is not known to be done; NULL if there is none, or it is kept no more. */
const tn__flight_op *tn__flight_oldest(const tn__flight_recorder *recorder);

/* "all_gather 7". */
void tn__flight_name(const tn__flight_op *op, char *text, size_t text_bytes);

/* The kept ones, oldest first: lines of text, or the items of a JSON list. */
void tn__flight_write_text(const tn__flight_recorder *recorder, tn__text *out);
void tn__flight_write_json(const tn__flight_recorder *recorder, tn__text *out);

uint64_t tn__flight_now_us(void);

#endif
