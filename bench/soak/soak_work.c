/* Fills and checks of blocks: kernels on a GPU, tasks of the stream's worker on the host driver,
 * declarations on the simulated device, which then looks for races instead of wrong words. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "soak.h"

enum { BLOCK_THREADS = 256, GRID_MAX = 1056 }; /* 8 blocks for each of an H200's 132 processors */

extern const unsigned char tn__soak_kernels_image[] __attribute__((weak));

static const tn__driver *driver_of(const soak *shared) { return tn__device_driver(shared->device); }

static int is_simulated(const soak *shared) { return shared->info.simulated; }

void soak_work_open(soak *shared) {
    void *errors = NULL;
    if (shared->info.driver == TN_DRIVER_CUDA && !is_simulated(shared)) {
        if (!tn__soak_kernels_image) {
            fprintf(stderr, "tenure-soak: built without a CUDA toolkit: no kernels for a GPU\n");
            exit(1);
        }
        const tn__driver *driver = driver_of(shared);
        tn__driver_device *state = tn__device_state(shared->device);
        SOAK_TRY(driver->module_load(state, tn__soak_kernels_image, &shared->module));
        SOAK_TRY(driver->module_function(state, shared->module, "soak_fill", &shared->fill));
        SOAK_TRY(driver->module_function(state, shared->module, "soak_verify", &shared->verify));
    }
    SOAK_TRY(tn_alloc(shared->pool, sizeof *shared->errors, NULL, NULL, &errors));
    SOAK_TRY(tn_fill(shared->device, errors, 0, sizeof *shared->errors, NULL));
    SOAK_TRY(tn_device_synchronize(shared->device));
    shared->errors = errors;
}

void soak_work_close(soak *shared) {
    SOAK_TRY(tn_free(shared->errors, NULL));
    if (shared->module) {
        SOAK_TRY(
            driver_of(shared)->module_unload(tn__device_state(shared->device), shared->module));
    }
}

/* ---- the host driver ------------------------------------------------------------------------- */

typedef struct host_work {
    uint64_t *words;
    size_t count;
    uint64_t tag;
    uint64_t *errors; /* NULL: fill */
} host_work;

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
    return x ^ (x >> 29);
}

static void do_host_work(void *argument) {
    host_work *work = argument;
    uint64_t wrong = 0;
    for (size_t i = 0; i < work->count; i++) {
        if (work->errors) {
            wrong += work->words[i] != mix(work->tag + i);
        } else {
            work->words[i] = mix(work->tag + i);
        }
    }
    if (wrong) atomic_fetch_add((_Atomic uint64_t *)work->errors, wrong);
    free(work);
}

static void put_host_work(soak *shared, host_work work, tn_stream stream) {
    host_work *copy = malloc(sizeof *copy);
    if (!copy) {
        soak_require(TN_OUT_OF_HOST_MEMORY, "malloc");
        return;
    }
    *copy = work;
    SOAK_TRY(
        driver_of(shared)->host_task(tn__device_state(shared->device), do_host_work, copy, stream));
}

/* ---- all drivers ----------------------------------------------------------------------------- */

static void launch(soak *shared, tn__function function, void **parameters, size_t words,
                   tn_stream stream) {
    size_t grid = (words + BLOCK_THREADS - 1) / BLOCK_THREADS;
    tn__launch shape = {.grid = {(unsigned)(grid > GRID_MAX ? GRID_MAX : grid), 1, 1},
                        .block = {BLOCK_THREADS, 1, 1},
                        .parameters = parameters};
    SOAK_TRY(driver_of(shared)->launch(tn__device_state(shared->device), function, &shape, stream));
}

static void declare(soak *shared, const soak_block *block, int is_write, tn_stream stream) {
    const double bytes_a_us = 4e6;
    tn__range range = {block->address, block->bytes, is_write};
    SOAK_TRY(driver_of(shared)->ghost_launch(tn__device_state(shared->device),
                                             is_write ? "soak_fill" : "soak_verify", &range, 1,
                                             1.0 + (double)block->bytes / bytes_a_us, stream));
}

void soak_fill(soak *shared, const soak_block *block, uint64_t tag, tn_stream stream) {
    size_t words = block->bytes / sizeof(uint64_t);
    uint64_t *address = block->address;
    void *parameters[] = {&address, &words, &tag};
    if (is_simulated(shared)) {
        declare(shared, block, 1, stream);
    } else if (shared->info.driver == TN_DRIVER_HOST) {
        put_host_work(shared, (host_work){address, words, tag, NULL}, stream);
    } else {
        launch(shared, shared->fill, parameters, words, stream);
    }
}

void soak_verify(soak *shared, const soak_block *block, tn_stream stream) {
    size_t words = block->bytes / sizeof(uint64_t);
    uint64_t *address = block->address;
    uint64_t tag = block->tag;
    void *parameters[] = {&address, &words, &tag, &shared->errors};
    if (is_simulated(shared)) {
        declare(shared, block, 0, stream);
    } else if (shared->info.driver == TN_DRIVER_HOST) {
        put_host_work(shared, (host_work){address, words, tag, shared->errors}, stream);
    } else {
        launch(shared, shared->verify, parameters, words, stream);
    }
}
