/* The simulated CUDA driver as the programs here use it: found, loaded, configured, asked.
 *
 *     sim_library sim;
 *     char error[SIM_LIBRARY_ERROR_BYTES];
 *     if (!sim_library_open(&sim, error)) ...
 *     sim_library_configure(&sim, device_bytes)     before the device is opened
 *     device_config.cuda_library = sim.path;
 *     ... sim.race_count() ...
 *     sim_library_close(&sim);                      after the device is closed
 *
 * The library's state belongs to the process: configuring it clears what any other user of it in
 * this process had.
 */
#ifndef TENURE_SIM_LIBRARY_H
#define TENURE_SIM_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

#include "simcuda.h"

#define SIM_LIBRARY_PATH_BYTES  4096
#define SIM_LIBRARY_ERROR_BYTES 1024

typedef struct sim_library {
    void *handle;
    char path[SIM_LIBRARY_PATH_BYTES];
    int (*configure)(const tnsim_config *config);
    uint64_t (*race_count)(void);
    const char *(*race_text)(uint64_t index);
    size_t (*physical_bytes)(int device);
    double (*now_us)(void);
    void (*watch)(tnsim_watcher watcher, void *context);
} sim_library;

/* Loads TENURE_CUDA_LIBRARY if it is set, else libtenure-simcuda.so beside the program or beside
 * libtenure. 1 on success; 0 with the words, and nothing is open. */
int sim_library_open(sim_library *sim, char *error);

/* Everything anew, with one unbacked device of this memory; 0: as the TENURE_SIM_ variables say,
 * else 139 GiB. 1 on success. */
int sim_library_configure(const sim_library *sim, size_t device_bytes);

/* A library that is not open is a no-op. */
void sim_library_close(sim_library *sim);

#endif
