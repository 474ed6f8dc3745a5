/* The measurements of tenure-bench-peers, all of the host's time; each prints its table. */
#ifndef TENURE_PEER_BENCH_H
#define TENURE_PEER_BENCH_H

#include "peer_allocator.h"
#include "tenure_pool.h"

enum { PEER_STREAMS = 16, PEER_ALLOCATORS = 16 };

typedef struct peer_bench {
    tn_device *device;
    tn_stream streams[PEER_STREAMS];
    const peer_allocator *allocators[PEER_ALLOCATORS];
    int count;
    size_t largest_bytes; /* of the blocks that are measured */
    int batches;
    int pairs; /* in one batch */
} peer_bench;

/* Ends the program if the status is a failure. */
#define PEER_TRY(call) peer_require((call), #call)
void peer_require(tn_status status, const char *call);

/* Tenure as one of the peers: a pool of the device. */
const peer_allocator *peer_tenure(tn_device *device);

/* ns of a warm allocation and free of one size on one thread. */
void peer_measure_sizes(const peer_bench *bench, const peer_allocator *allocator);

/* 1 to 16 threads, each with a stream of its own: ns a pair on each, and pairs a second of all. */
void peer_measure_threads(const peer_bench *bench, const peer_allocator *allocator);

/* Blocks that one thread allocates and another frees: ns of an allocation and of a free. */
void peer_measure_handover(const peer_bench *bench, const peer_allocator *allocator);

/* Two streams in turns, each using what the other allocated: ns a block. */
void peer_measure_streams(const peer_bench *bench, const peer_allocator *allocator);

#endif
