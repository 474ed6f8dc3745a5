/* Devices, pools and communicators of a rank: see ranks_support.h. */
#include "ranks_support.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"

enum { LONG_US = 20 * 1000 * 1000 };

tn_comm *ranks_comm(const rank_fixture *ranks, const char *name, uint64_t timeout_us) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *comm = NULL;
    config.device = ranks->device;
    config.name = name;
    config.timeout_us = timeout_us ? timeout_us : LONG_US;
    config.rendezvous = ranks->rendezvous;
    EXPECT_OK(tn_comm_create(&config, &comm));
    return comm;
}

/* ---- another engine ------------------------------------------------------------------------- */

/* A fixture's copies may go; what gathers stays. */
typedef struct gatherer {
    tn_device *device;
    tn_comm *comm;
    tn_stream stream;
} gatherer;

static gatherer by_mpi;

static int gather_by_mpi(void *context, const void *mine, size_t bytes, void *all) {
    const gatherer *by = context;
    tn_status status = tn_all_gather(by->comm, mine, all, bytes, by->stream);
    if (status == TN_OK) status = tn_comm_wait(by->comm);
    return (int)status;
}

static void meet_through_mpi(rank_fixture *ranks) {
    tn_rendezvous_config config = TN_RENDEZVOUS_CONFIG_INIT;
    ranks->launcher = ranks_comm(ranks, "launcher", 0);
    by_mpi = (gatherer){ranks->device, ranks->launcher, ranks->stream};
    config.rank = tn_comm_rank(ranks->launcher);
    config.rank_count = tn_comm_size(ranks->launcher);
    config.all_gather = gather_by_mpi;
    config.context = &by_mpi;
    config.timeout_us = LONG_US;
    EXPECT_OK(tn_rendezvous_create(&config, &ranks->rendezvous));
}

static int is_tcp(void) {
    const char *engine = getenv("TENURE_TEST_ENGINE");
    return engine && strcmp(engine, "TCP") == 0;
}

const char *ranks_engine(const rank_fixture *ranks) { return ranks->rendezvous ? "TCP" : "MPI"; }

/* ---- the fixture ---------------------------------------------------------------------------- */

rank_fixture ranks_open(void) {
    rank_fixture ranks = {.host_blocks = tn__host_live_blocks()};
    ranks.device = test_open_host();
    ranks.pool = test_open_pool(ranks.device, TN_BACKING_AUTO, 0);
    ranks.stream = test_open_stream(ranks.device);
    ranks.other = test_open_stream(ranks.device);
    if (is_tcp()) meet_through_mpi(&ranks);
    ranks.comm = ranks_comm(&ranks, "ranks", 0);
    ranks.rank = tn_comm_rank(ranks.comm);
    ranks.count = tn_comm_size(ranks.comm);
    return ranks;
}

void ranks_close(rank_fixture *ranks) {
    EXPECT_OK(tn_comm_destroy(ranks->comm));
    tn_rendezvous_destroy(ranks->rendezvous);
    EXPECT_OK(tn_comm_destroy(ranks->launcher));
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->stream));
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->other));
    tn_pool_stats stats = test_pool_stats(ranks->pool);
    assert_int_equal(stats.live_bytes, 0);
    assert_int_equal(stats.live_blocks, 0);
    EXPECT_OK(tn_pool_destroy(ranks->pool));
    EXPECT_OK(tn_stream_destroy(ranks->device, ranks->stream));
    EXPECT_OK(tn_stream_destroy(ranks->device, ranks->other));
    EXPECT_OK(tn_device_destroy(ranks->device));
    if (!ranks->has_given_up) assert_int_equal(tn__host_live_blocks(), ranks->host_blocks);
}

void ranks_wait(const rank_fixture *ranks) {
    EXPECT_OK(tn_comm_wait(ranks->comm));
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->stream));
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->other));
}

tn_comm_stats ranks_stats(const rank_fixture *ranks) {
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    EXPECT_OK(tn_comm_stats_get(ranks->comm, &stats));
    return stats;
}

/* ---- gates ---------------------------------------------------------------------------------- */

struct ranks_gate {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    int is_open;
};

static void wait_at(void *argument) {
    ranks_gate *gate = argument;
    pthread_mutex_lock(&gate->lock);
    while (!gate->is_open)
        pthread_cond_wait(&gate->opened, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
}

ranks_gate *ranks_gate_put(const rank_fixture *ranks, tn_stream stream) {
    ranks_gate *gate = calloc(1, sizeof *gate);
    assert_non_null(gate);
    pthread_mutex_init(&gate->lock, NULL);
    pthread_cond_init(&gate->opened, NULL);
    EXPECT_OK(tn__device_driver(ranks->device)
                  ->host_task(tn__device_state(ranks->device), wait_at, gate, stream));
    return gate;
}

void ranks_gate_open(ranks_gate *gate) {
    pthread_mutex_lock(&gate->lock);
    gate->is_open = 1;
    pthread_cond_broadcast(&gate->opened);
    pthread_mutex_unlock(&gate->lock);
}

void ranks_gate_end(ranks_gate *gate) {
    pthread_cond_destroy(&gate->opened);
    pthread_mutex_destroy(&gate->lock);
    free(gate);
}
