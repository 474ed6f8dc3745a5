/* What a test that runs on several ranks stands on: a device, a pool, two streams and a
 * communicator of all ranks: MPI's, or with TENURE_TEST_ENGINE=TCP or NCCL one of theirs, whose
 * ranks meet through MPI. NCCL takes a GPU for each rank; on the host it is a stand-in for NCCL
 * (stand_in_nccl.c, which TENURE_NCCL_LIBRARY then names).
 *
 * TENURE_RANKS_ON says what kind of device each rank opens: host (if it is not set), sim (the
 * simulated CUDA driver, backed), cuda (the GPU of the rank's number on its machine, or the first
 * where there are fewer). */
#ifndef TENURE_RANKS_SUPPORT_H
#define TENURE_RANKS_SUPPORT_H

#include "tenure_rendezvous.h"
#include "test_pools.h"
#include "test_processes.h"

typedef enum ranks_place { RANKS_ON_HOST, RANKS_ON_SIM, RANKS_ON_CUDA } ranks_place;

typedef struct rank_fixture {
    ranks_place place;
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_stream other;
    tn_comm *comm;
    tn_comm_engine engine;     /* MPI, TCP or NCCL */
    tn_rendezvous *rendezvous; /* where it is not MPI */
    int rank;
    int count;
    long host_blocks; /* of the library's own memory, before anything was opened */
    int is_shrinkable;
    int has_given_up; /* a test set it: MPI may hold on to a given-up request's buffers */
} rank_fixture;

rank_fixture ranks_open(void);

/* main of tests that share a fixture: it is opened before them and closed behind them. */
#define RANKS_RUN(fixture, tests)                                                                  \
    (ranks_of_group(fixture), TEST_RUN_GROUP(tests, ranks_open_group, ranks_close_group))
void ranks_of_group(rank_fixture *fixture);
int ranks_open_group(void **state);
int ranks_close_group(void **state);

/* That of a forked rank, whose ranks meet at the test's own store: TCP's, or NCCL's, and then
 * shrinkable. timeout_us as below. */
rank_fixture ranks_open_forked(const test_meeting *meeting, uint64_t timeout_us);

/* `shrunk` takes the place of the communicator, which ends with old_status; without a rendezvous
 * any further one is split from it. */
void ranks_go_on(rank_fixture *ranks, tn_comm *shrunk, tn_status old_status);

/* Fails unless the communicator is in order, no block is live, the books balance and no
 * host memory of the library is left. */
void ranks_close(rank_fixture *ranks);

/* A communicator of all ranks on the device. timeout_us 0: long, but a test that hangs ends. */
tn_comm *ranks_comm(const rank_fixture *ranks, const char *name, uint64_t timeout_us);

/* Waits for the communicator, and for both streams. */
void ranks_wait(const rank_fixture *ranks);

/* "MPI", "TCP" or "NCCL". */
const char *ranks_engine(const rank_fixture *ranks);

/* 1: sums have the bits of sums in the order of ranks from 0, rounded once. NCCL has an order of
 * its own and rounds bf16 at each step; of two ranks that is one sum and one rounding, as a + b is
 * b + a. */
int ranks_sum_in_order(const rank_fixture *ranks);

/* 1 under NCCL, for what it does not promise; it is printed, and tests/gpu_dist.sh counts it. */
int ranks_leaves_out(const rank_fixture *ranks, const char *why);

/* The largest of all ranks' values, by the fixture's communicator. */
float ranks_most(const rank_fixture *ranks, float mine);

tn_comm_stats ranks_stats(const rank_fixture *ranks);

/* A gate in a stream: work behind it starts when it is opened. */
typedef struct ranks_gate ranks_gate;
ranks_gate *ranks_gate_put(const rank_fixture *ranks, tn_stream stream);
void ranks_gate_open(ranks_gate *gate);

/* Once the stream has passed it. */
void ranks_gate_end(ranks_gate *gate);

#endif
