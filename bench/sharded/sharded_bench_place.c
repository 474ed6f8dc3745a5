/* Where a rank is: see sharded_bench.h. */
#include <stdio.h>
#include <stdlib.h>

#include "driver.h"
#include "sharded_bench.h"
#include "tenure_simulated.h"

/* Where ranks meet if the environment does not say: on this machine. */
static const int default_port = 29471;
static const size_t simulated_bytes = (size_t)4 << 40;

/* ---- a real one ------------------------------------------------------------------------------ */

static int is_any_set(const char *const *names, int count) {
    for (int i = 0; i < count; i++)
        if (getenv(names[i])) return 1;
    return 0;
}

/* A process that nobody launched is the only one. */
static tn_status meet(sharded_place *place) {
    static const char *const ranks[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"};
    static const char *const ports[] = {"MASTER_PORT", "TENURE_RENDEZVOUS_PORT"};
    tn_rendezvous_config config = TN_RENDEZVOUS_CONFIG_INIT;
    if (!is_any_set(ranks, 4)) config.rank_count = 1;
    if (!getenv("MASTER_ADDR")) config.host = "127.0.0.1";
    if (!is_any_set(ports, 2)) config.port = default_port;
    return tn_rendezvous_create(&config, &place->rendezvous);
}

/* NCCL takes no two ranks of one machine on a GPU: each is on a machine of its own, it is told. */
static void share_gpu(const sharded_place *place) {
    char host[32];
    snprintf(host, sizeof host, "tenure-rank-%d", tn_rendezvous_rank(place->rendezvous));
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1); /* else the rendezvous refuses it */
}

/* Ranks of MPI may be more than GPUs, and then share the first. */
static tn_status open_device(sharded_place *place, tn_driver_kind driver, int shares_gpu) {
    const char *local = getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = driver;
    if (driver == TN_DRIVER_HOST || shares_gpu) return tn_device_create(&config, &place->device);
    if (place->rendezvous && tn_rendezvous_local_rank(place->rendezvous) >= 0)
        config.ordinal = tn_rendezvous_local_rank(place->rendezvous);
    else if (local)
        config.ordinal = atoi(local);
    const tn_status status = tn_device_create(&config, &place->device);
    if (status == TN_OK || place->rendezvous || config.ordinal == 0) return status;
    config.ordinal = 0;
    return tn_device_create(&config, &place->device);
}

static tn_status open_pool(sharded_place *place) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.name = "rank";
    SHARDED_TRY(tn_device_info_get(place->device, &place->info));
    SHARDED_TRY(tn_pool_create(place->device, &config, &place->pool));
    return tn_stream_create(place->device, &place->stream);
}

tn_status sharded_place_open(sharded_place *place, tn_driver_kind driver, tn_comm_engine engine,
                             int shares_gpu) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    *place = (sharded_place){.info = TN_DEVICE_INFO_INIT};
    if (engine == TN_COMM_NCCL) SHARDED_TRY(meet(place));
    if (place->rendezvous && shares_gpu) share_gpu(place);
    SHARDED_TRY(open_device(place, driver, shares_gpu));
    SHARDED_TRY(open_pool(place));
    config.device = place->device;
    config.engine = engine;
    config.rendezvous = place->rendezvous;
    return tn_comm_create(&config, &place->comm);
}

/* ---- a simulated one ------------------------------------------------------------------------- */

tn_status sharded_place_open_simulated(sharded_place *place, int rank, int rank_count) {
    char error[SIM_LIBRARY_ERROR_BYTES];
    tn_device_config device = TN_DEVICE_CONFIG_INIT;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    *place = (sharded_place){.info = TN_DEVICE_INFO_INIT};
    if (!sim_library_open(&place->sim, error) ||
        !sim_library_configure(&place->sim, simulated_bytes)) {
        fprintf(stderr, "tenure-bench-sharded: no simulated device to plan on: %s\n", error);
        return TN_UNSUPPORTED;
    }
    device.driver = TN_DRIVER_CUDA;
    device.cuda_library = place->sim.path;
    SHARDED_TRY(tn_device_create(&device, &place->device));
    SHARDED_TRY(open_pool(place));
    config.device = place->device;
    config.engine = TN_COMM_SIMULATED;
    config.rank = rank, config.rank_count = rank_count;
    return tn_comm_create(&config, &place->comm);
}

/* ---- closed, asked --------------------------------------------------------------------------- */

/* What comes first in failing is returned; all is tried. */
static void note(tn_status *status, tn_status of_call) {
    if (*status == TN_OK) *status = of_call;
}

tn_status sharded_place_close(sharded_place *place) {
    tn_status status = TN_OK;
    note(&status, tn_comm_destroy(place->comm));
    tn_rendezvous_destroy(place->rendezvous);
    if (place->stream) note(&status, tn_stream_destroy(place->device, place->stream));
    note(&status, tn_pool_destroy(place->pool));
    if (place->device) note(&status, tn_device_destroy(place->device));
    if (place->sim.handle) sim_library_close(&place->sim);
    return status;
}

tn_status sharded_place_driver_bytes(const sharded_place *place, size_t *out) {
    const tn__driver *driver = tn__device_driver(place->device);
    size_t free_bytes = 0, total_bytes = 0;
    *out = 0;
    if (place->info.driver == TN_DRIVER_HOST) return TN_OK;
    SHARDED_TRY(driver->memory_info(tn__device_state(place->device), &free_bytes, &total_bytes));
    *out = total_bytes - free_bytes;
    return TN_OK;
}
