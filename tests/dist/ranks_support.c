/* Devices, pools and communicators of a rank: see ranks_support.h. */
#include "ranks_support.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"

enum { LONG_US = 120 * 1000 * 1000 };
#define LOCAL_RANK "OMPI_COMM_WORLD_LOCAL_RANK"

tn_comm *ranks_comm(const rank_fixture *ranks, const char *name, uint64_t timeout_us) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *comm = NULL;
    if (ranks->engine != TN_COMM_MPI && !ranks->rendezvous) {
        EXPECT_OK(tn_comm_split(ranks->comm, 0, 0, name, &comm));
        return comm;
    }
    config.device = ranks->device;
    config.shrinkable = ranks->is_shrinkable;
    config.engine = ranks->engine;
    config.name = name;
    config.timeout_us = timeout_us ? timeout_us : LONG_US;
    if (ranks->engine != TN_COMM_MPI) config.rendezvous = ranks->rendezvous;
    EXPECT_OK(tn_comm_create(&config, &comm));
    return comm;
}

/* ---- another engine ------------------------------------------------------------------------- */

/* MPI's communicator of the ranks on a host device: what the others meet through. A fixture's
 * copies may go; this stays. */
static struct launcher {
    tn_device *device;
    tn_comm *comm;
} launcher;

static int gather_by_mpi(void *context, const void *mine, size_t bytes, void *all) {
    (void)context;
    tn_status status = tn_all_gather(launcher.comm, mine, all, bytes, NULL);
    if (status == TN_OK) status = tn_comm_wait(launcher.comm);
    return (int)status;
}

static void meet_through_mpi(rank_fixture *ranks) {
    tn_rendezvous_config config = TN_RENDEZVOUS_CONFIG_INIT;
    tn_comm_config by_mpi = TN_COMM_CONFIG_INIT;
    launcher.device = test_open_host();
    by_mpi.device = launcher.device;
    by_mpi.engine = TN_COMM_MPI;
    by_mpi.timeout_us = LONG_US;
    EXPECT_OK(tn_comm_create(&by_mpi, &launcher.comm));
    config.rank = tn_comm_rank(launcher.comm);
    config.rank_count = tn_comm_size(launcher.comm);
    config.all_gather = gather_by_mpi;
    config.timeout_us = LONG_US;
    EXPECT_OK(tn_rendezvous_create(&config, &ranks->rendezvous));
}

static void leave(const rank_fixture *ranks) {
    tn_rendezvous_destroy(ranks->rendezvous);
    if (!launcher.device) return;
    EXPECT_OK(tn_comm_destroy(launcher.comm));
    EXPECT_OK(tn_device_destroy(launcher.device));
    launcher = (struct launcher){0};
}

static tn_comm_engine engine_of_ranks(void) {
    const char *engine = getenv("TENURE_TEST_ENGINE");
    if (!engine || strcmp(engine, "MPI") == 0) return TN_COMM_MPI;
    if (strcmp(engine, "TCP") == 0) return TN_COMM_TCP;
    if (strcmp(engine, "NCCL") != 0) fail_msg("TENURE_TEST_ENGINE=%s: MPI, TCP or NCCL", engine);
    return TN_COMM_NCCL;
}

const char *ranks_engine(const rank_fixture *ranks) {
    return ranks->engine == TN_COMM_MPI ? "MPI" : ranks->engine == TN_COMM_TCP ? "TCP" : "NCCL";
}

int ranks_sum_in_order(const rank_fixture *ranks) {
    return ranks->engine != TN_COMM_NCCL || ranks->count <= 2;
}

int ranks_leaves_out(const rank_fixture *ranks, const char *why) {
    if (ranks->engine == TN_COMM_NCCL) print_message("left out: %s\n", why);
    return ranks->engine == TN_COMM_NCCL;
}

/* ---- the fixture ---------------------------------------------------------------------------- */

static ranks_place place_of_ranks(void) {
    const char *place = getenv("TENURE_RANKS_ON");
    if (!place || strcmp(place, "host") == 0) return RANKS_ON_HOST;
    if (strcmp(place, "sim") == 0) return RANKS_ON_SIM;
    if (strcmp(place, "cuda") != 0) fail_msg("TENURE_RANKS_ON=%s: host, sim or cuda", place);
    return RANKS_ON_CUDA;
}

/* The number of the rank in its machine is what Open MPI tells its children. */
static tn_device *open_cuda(tn_comm_engine engine) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    const char *rank = getenv(LOCAL_RANK);
    tn_device *device = NULL;
    config.driver = TN_DRIVER_CUDA;
    config.ordinal = test_gpu_of_rank(rank ? atoi(rank) : 0);
    if (tn_device_create(&config, &device) == TN_OK) return device;
    if (engine == TN_COMM_NCCL)
        fail_msg("NCCL takes a GPU for each rank, and there is none for rank %d: %s",
                 config.ordinal, tn_error_last());
    config.ordinal = 0; /* there are fewer GPUs than ranks: they share the first */
    EXPECT_OK(tn_device_create(&config, &device));
    return device;
}

static tn_device *open_device(ranks_place place, tn_comm_engine engine) {
    switch (place) {
    case RANKS_ON_SIM: return test_open_sim(0, 1);
    case RANKS_ON_CUDA: return open_cuda(engine);
    default: return test_open_host();
    }
}

static void close_device(const rank_fixture *ranks) {
    if (ranks->place == RANKS_ON_SIM)
        test_close_sim(ranks->device);
    else
        EXPECT_OK(tn_device_destroy(ranks->device));
}

rank_fixture ranks_open(void) {
    rank_fixture ranks = {.host_blocks = tn__host_live_blocks(), .place = place_of_ranks()};
    ranks.engine = engine_of_ranks();
    ranks.device = open_device(ranks.place, ranks.engine);
    ranks.pool = test_open_pool(ranks.device, TN_BACKING_AUTO, 0);
    ranks.stream = test_open_stream(ranks.device);
    ranks.other = test_open_stream(ranks.device);
    if (ranks.engine != TN_COMM_MPI) meet_through_mpi(&ranks);
    ranks.comm = ranks_comm(&ranks, "ranks", 0);
    ranks.rank = tn_comm_rank(ranks.comm);
    ranks.count = tn_comm_size(ranks.comm);
    return ranks;
}

rank_fixture ranks_open_forked(const test_meeting *meeting, uint64_t timeout_us) {
    rank_fixture ranks = {.place = place_of_ranks(), .engine = engine_of_ranks()};
    tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;
    char number[16];
    snprintf(number, sizeof number, "%d", meeting->rank);
    setenv(LOCAL_RANK, number, 1);
    if (ranks.engine == TN_COMM_MPI) ranks.engine = TN_COMM_TCP;
    ranks.device = open_device(ranks.place, ranks.engine);
    ranks.pool = test_open_pool(ranks.device, TN_BACKING_AUTO, 0);
    ranks.stream = test_open_stream(ranks.device);
    ranks.other = test_open_stream(ranks.device);
    how.rank = ranks.rank = meeting->rank;
    how.rank_count = ranks.count = meeting->rank_count;
    how.host = "127.0.0.1";
    how.port = meeting->port;
    how.listen_file = meeting->rank ? -1 : meeting->listener;
    how.timeout_us = LONG_US;
    EXPECT_OK(tn_rendezvous_create(&how, &ranks.rendezvous));
    ranks.is_shrinkable = 1;
    ranks.comm = ranks_comm(&ranks, "ranks", timeout_us);
    ranks.is_shrinkable = 0;
    return ranks;
}

void ranks_go_on(rank_fixture *ranks, tn_comm *shrunk, tn_status old_status) {
    EXPECT_STATUS(tn_comm_destroy(ranks->comm), old_status);
    tn_rendezvous_destroy(ranks->rendezvous);
    ranks->rendezvous = NULL;
    ranks->comm = shrunk;
    ranks->rank = tn_comm_rank(shrunk);
    ranks->count = tn_comm_size(shrunk);
}

void ranks_close(rank_fixture *ranks) {
    EXPECT_OK(tn_comm_destroy(ranks->comm));
    leave(ranks);
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->stream));
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->other));
    tn_pool_stats stats = test_pool_stats(ranks->pool);
    assert_int_equal(stats.live_bytes, 0);
    assert_int_equal(stats.live_blocks, 0);
    EXPECT_OK(tn_pool_destroy(ranks->pool));
    EXPECT_OK(tn_stream_destroy(ranks->device, ranks->stream));
    EXPECT_OK(tn_stream_destroy(ranks->device, ranks->other));
    close_device(ranks);
    if (!ranks->has_given_up) assert_int_equal(tn__host_live_blocks(), ranks->host_blocks);
}

static rank_fixture *of_group;

void ranks_of_group(rank_fixture *fixture) { of_group = fixture; }

int ranks_open_group(void **state) {
    (void)state;
    *of_group = ranks_open();
    return 0;
}

int ranks_close_group(void **state) {
    (void)state;
    ranks_close(of_group);
    return 0;
}

void ranks_wait(const rank_fixture *ranks) {
    EXPECT_OK(tn_comm_wait(ranks->comm));
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->stream));
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->other));
}

float ranks_most(const rank_fixture *ranks, float mine) {
    float value = mine;
    float *block = test_take(ranks->pool, sizeof value, ranks->stream);
    EXPECT_OK(tn_copy(ranks->device, block, &value, sizeof value, ranks->stream));
    EXPECT_OK(tn_all_reduce(ranks->comm, block, block, 1, TN_FP32, TN_REDUCE_MAX, ranks->stream));
    EXPECT_OK(tn_copy(ranks->device, &value, block, sizeof value, ranks->stream));
    ranks_wait(ranks);
    test_give(ranks->pool, block, ranks->stream);
    return value;
}

tn_comm_stats ranks_stats(const rank_fixture *ranks) {
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    EXPECT_OK(tn_comm_stats_get(ranks->comm, &stats));
    return stats;
}

/* ---- gates ---------------------------------------------------------------------------------- */

struct ranks_gate {
    tn_device *device;
    pthread_mutex_t lock;
    pthread_cond_t opened;
    int is_open;
    uint32_t *word; /* of a CUDA device's gate: 1 opens it */
};

static void wait_at(void *argument) {
    ranks_gate *gate = argument;
    pthread_mutex_lock(&gate->lock);
    while (!gate->is_open)
        pthread_cond_wait(&gate->opened, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
}

/* A host function that waits would hold up those of other streams. */
static void put_word(ranks_gate *gate, tn_stream stream) {
    const tn__driver *driver = tn__device_driver(gate->device);
    tn__driver_device *on = tn__device_state(gate->device);
    void *word = NULL;
    EXPECT_OK(driver->host_alloc(on, sizeof *gate->word, &word));
    gate->word = word;
    __atomic_store_n(gate->word, 0, __ATOMIC_RELEASE);
    EXPECT_OK(driver->stream_wait_value(on, stream, gate->word, 1));
}

ranks_gate *ranks_gate_put(const rank_fixture *ranks, tn_stream stream) {
    ranks_gate *gate = calloc(1, sizeof *gate);
    assert_non_null(gate);
    gate->device = ranks->device;
    pthread_mutex_init(&gate->lock, NULL);
    pthread_cond_init(&gate->opened, NULL);
    if (ranks->place != RANKS_ON_HOST) {
        put_word(gate, stream);
        return gate;
    }
    EXPECT_OK(tn__device_driver(ranks->device)
                  ->host_task(tn__device_state(ranks->device), wait_at, gate, stream));
    return gate;
}

void ranks_gate_open(ranks_gate *gate) {
    if (gate->word) __atomic_store_n(gate->word, 1, __ATOMIC_RELEASE);
    pthread_mutex_lock(&gate->lock);
    gate->is_open = 1;
    pthread_cond_broadcast(&gate->opened);
    pthread_mutex_unlock(&gate->lock);
}

void ranks_gate_end(ranks_gate *gate) {
    if (gate->word)
        EXPECT_OK(
            tn__device_driver(gate->device)->host_free(tn__device_state(gate->device), gate->word));
    pthread_cond_destroy(&gate->opened);
    pthread_mutex_destroy(&gate->lock);
    free(gate);
}
