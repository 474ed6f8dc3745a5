/* Finding and loading the simulated CUDA driver; see sim_library.h. */
#include "sim_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tenure_alloc.h"

#define SIM_LIBRARY_NAME "libtenure-simcuda.so"

/* Replaces the file name at the end of path. 0 if path has no folder or there is no room. */
static int put_beside(char *path, size_t path_bytes) {
    char *slash = strrchr(path, '/');
    if (!slash) return 0;
    size_t room = path_bytes - (size_t)(slash + 1 - path);
    return (size_t)snprintf(slash + 1, room, "%s", SIM_LIBRARY_NAME) < room;
}

static int beside_program(char *path) {
    ssize_t length = readlink("/proc/self/exe", path, SIM_LIBRARY_PATH_BYTES - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return put_beside(path, SIM_LIBRARY_PATH_BYTES);
}

static int beside_libtenure(char *path) {
    Dl_info about;
    if (!dladdr((const void *)&tn_version, &about) || !about.dli_fname) return 0;
    int length = snprintf(path, SIM_LIBRARY_PATH_BYTES, "%s", about.dli_fname);
    return length < SIM_LIBRARY_PATH_BYTES && put_beside(path, SIM_LIBRARY_PATH_BYTES);
}

static int find_path(char *path, char *error) {
    const char *chosen = getenv("TENURE_CUDA_LIBRARY");
    if (chosen && *chosen) {
        if (snprintf(path, SIM_LIBRARY_PATH_BYTES, "%s", chosen) < SIM_LIBRARY_PATH_BYTES) return 1;
        snprintf(error, SIM_LIBRARY_ERROR_BYTES, "TENURE_CUDA_LIBRARY is longer than any path");
        return 0;
    }
    if (beside_program(path) && access(path, R_OK) == 0) return 1;
    if (beside_libtenure(path) && access(path, R_OK) == 0) return 1;
    snprintf(error, SIM_LIBRARY_ERROR_BYTES,
             "%s is neither beside this program nor beside libtenure; set TENURE_CUDA_LIBRARY to "
             "its path",
             SIM_LIBRARY_NAME);
    return 0;
}

static int load_symbols(sim_library *sim, char *error) {
    const struct {
        const char *name;
        void **address;
    } wanted[] = {{"tnsim_configure", (void **)&sim->configure},
                  {"tnsim_race_count", (void **)&sim->race_count},
                  {"tnsim_race_text", (void **)&sim->race_text},
                  {"tnsim_physical_bytes", (void **)&sim->physical_bytes},
                  {"tnsim_now_us", (void **)&sim->now_us},
                  {"tnsim_watch", (void **)&sim->watch}};
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        *wanted[i].address = dlsym(sim->handle, wanted[i].name);
        if (*wanted[i].address) continue;
        snprintf(error, SIM_LIBRARY_ERROR_BYTES,
                 "%.700s is no simulated CUDA driver: it lacks %s; for a real one use --driver "
                 "cuda",
                 sim->path, wanted[i].name);
        return 0;
    }
    return 1;
}

int sim_library_open(sim_library *sim, char *error) {
    memset(sim, 0, sizeof(*sim));
    if (!find_path(sim->path, error)) return 0;
    sim->handle = dlopen(sim->path, RTLD_NOW | RTLD_LOCAL);
    if (!sim->handle) {
        snprintf(error, SIM_LIBRARY_ERROR_BYTES, "cannot load the simulated CUDA driver: %s",
                 dlerror());
        return 0;
    }
    if (load_symbols(sim, error)) return 1;
    sim_library_close(sim);
    return 0;
}

int sim_library_configure(const sim_library *sim, size_t device_bytes) {
    tnsim_config config = {.size = sizeof(config), .memory_bytes = device_bytes};
    return sim->configure(device_bytes ? &config : NULL) == 0;
}

void sim_library_close(sim_library *sim) {
    if (sim->handle) dlclose(sim->handle);
    sim->handle = NULL;
}
