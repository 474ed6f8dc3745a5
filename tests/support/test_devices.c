/* Devices for tests, and the simulated driver's controls: see test_support.h. */
#include "test_support.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

tn_device *test_open_host(void) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    config.driver = TN_DRIVER_HOST;
    EXPECT_OK(tn_device_create(&config, &device));
    return device;
}

int test_gpu_of_rank(int rank) {
    const char *shared = getenv("TENURE_RANKS_SHARE_GPU");
    char host[32];
    if (!shared || strcmp(shared, "1") != 0) return rank;
    snprintf(host, sizeof host, "tenure-rank-%d", rank);
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1); /* else we refuse it ourselves */
    return 0;
}

static void *symbol(void *library, const char *name) {
    void *address = dlsym(library, name);
    if (!address) fail_msg("%s lacks %s", TENURE_SIM_LIBRARY, name);
    return address;
}

const test_sim *test_sim_get(void) {
    static test_sim sim;
    if (sim.library) return &sim;
    sim.library = dlopen(TENURE_SIM_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!sim.library) fail_msg("%s", dlerror());
    *(void **)&sim.configure = symbol(sim.library, "tnsim_configure");
    *(void **)&sim.launch = symbol(sim.library, "tnsim_launch");
    *(void **)&sim.fault = symbol(sim.library, "tnsim_fault");
    *(void **)&sim.call_count = symbol(sim.library, "tnsim_call_count");
    *(void **)&sim.set_memory = symbol(sim.library, "tnsim_set_memory");
    *(void **)&sim.stall = symbol(sim.library, "tnsim_stall");
    *(void **)&sim.lost_stream_uses = symbol(sim.library, "tnsim_lost_stream_uses");
    *(void **)&sim.race_count = symbol(sim.library, "tnsim_race_count");
    *(void **)&sim.race_text = symbol(sim.library, "tnsim_race_text");
    *(void **)&sim.now_us = symbol(sim.library, "tnsim_now_us");
    *(void **)&sim.physical_bytes = symbol(sim.library, "tnsim_physical_bytes");
    *(void **)&sim.physical_peak_bytes = symbol(sim.library, "tnsim_physical_peak_bytes");
    *(void **)&sim.leftovers = symbol(sim.library, "tnsim_leftovers");
    *(void **)&sim.watch = symbol(sim.library, "tnsim_watch");
    return &sim;
}

tn_device *test_open_sim(size_t memory_bytes, int backed) {
    tnsim_config sim_config = {.size = sizeof sim_config};
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    sim_config.memory_bytes = memory_bytes;
    sim_config.backed = backed;
    assert_int_equal(test_sim_get()->configure(&sim_config), 0);
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = TENURE_SIM_LIBRARY;
    EXPECT_OK(tn_device_create(&config, &device));
    return device;
}

void test_close_sim(tn_device *device) {
    const test_sim *sim = test_sim_get();
    char left[4096] = "";
    uint64_t races = sim->race_count();
    if (races) print_error("race: %s\n", sim->race_text(0));
    assert_int_equal(races, 0);
    EXPECT_OK(tn_device_destroy(device));
    if (sim->leftovers(left, sizeof left)) fail_msg("left over: %s", left);
}
