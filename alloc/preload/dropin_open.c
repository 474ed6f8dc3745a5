/* Configuration, devices, exit and fork of libtenure-dropin: see dropin.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dropin.h"
#include "host_alloc.h"
#include "options.h"

tn__dropin_all tn__dropin;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of opening and closing devices */

/* ---- the driver's calls that are only asked -------------------------------------------------- */

typedef struct context_calls {
    tn__cu_result (*current)(void **context);
    tn__cu_result (*device)(tn__cu_device *device);
    tn__cu_result (*retain)(void **context, tn__cu_device device);
    tn__cu_result (*release)(tn__cu_device device);
    tn__cu_result (*state)(tn__cu_device device, unsigned *flags, int *is_active);
    tn__cu_result (*count)(int *count);
} context_calls;

static context_calls contexts;

static int find_context_calls(void) {
    *(void **)&contexts.current = tn__dropin.driver->find("cuCtxGetCurrent");
    *(void **)&contexts.device = tn__dropin.driver->find("cuCtxGetDevice");
    *(void **)&contexts.retain = tn__dropin.driver->find("cuDevicePrimaryCtxRetain");
    *(void **)&contexts.release = tn__dropin.driver->find("cuDevicePrimaryCtxRelease_v2");
    *(void **)&contexts.state = tn__dropin.driver->find("cuDevicePrimaryCtxGetState");
    *(void **)&contexts.count = tn__dropin.driver->find("cuDeviceGetCount");
    return contexts.current && contexts.device && contexts.retain && contexts.release &&
           contexts.state && contexts.count;
}

/* ---- exit and fork --------------------------------------------------------------------------- */

static void when_exit_begins(void) {
    if (tn__dropin.is_over) return;
    tn__dropin_record_close();
    tn__dropin.is_over = 1;
}

static void before_fork(void) {
    tn__dropin_blocks_lock();
    tn__dropin_record_lock();
}

static void after_fork_in_parent(void) {
    tn__dropin_record_unlock();
    tn__dropin_blocks_unlock();
}

static void after_fork_in_child(void) {
    tn__dropin.is_over = 1;
    after_fork_in_parent();
}

/* With the first device, after the driver's own handlers and libtenure's: so it runs before them.
 * */
static int watch_exit(void) {
    static int is_watched;
    if (is_watched) return 1;
    is_watched = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0 &&
                 atexit(when_exit_begins) == 0;
    return is_watched;
}

/* ---- pins ------------------------------------------------------------------------------------ */

static pthread_mutex_t pins_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t unpinned = PTHREAD_COND_INITIALIZER;

tn__dropin_device *tn__dropin_device_pin(int ordinal) {
    tn__dropin_device *device;
    pthread_mutex_lock(&pins_mutex);
    device = tn__dropin.devices[ordinal];
    if (device) device->pins++;
    pthread_mutex_unlock(&pins_mutex);
    return device;
}

void tn__dropin_device_unpin(tn__dropin_device *device) {
    pthread_mutex_lock(&pins_mutex);
    if (--device->pins == 0) pthread_cond_broadcast(&unpinned);
    pthread_mutex_unlock(&pins_mutex);
}

void tn__dropin_device_remove(const tn__dropin_device *device) {
    pthread_mutex_lock(&pins_mutex);
    tn__dropin.devices[device->ordinal] = NULL;
    tn__dropin.contexts[device->ordinal] = NULL;
    pthread_mutex_unlock(&pins_mutex);
}

/* It has been removed. */
static void await_unpinned(const tn__dropin_device *device) {
    pthread_mutex_lock(&pins_mutex);
    while (device->pins > 0)
        pthread_cond_wait(&unpinned, &pins_mutex);
    pthread_mutex_unlock(&pins_mutex);
}

/* ---- devices --------------------------------------------------------------------------------- */

static tn_status make_pool(const tn__dropin_device *device, const char *name, tn_pool **out) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.name = name;
    config.backing = tn__dropin.backing;
    return tn_pool_create(device->device, &config, out);
}

static void destroy_device(tn__dropin_device *device) {
    if (device->idle) (void)tn_stream_destroy(device->device, device->idle);
    if (device->pool) (void)tn_pool_destroy(device->pool);
    (void)tn_device_destroy(device->device);
    tn__host_free(device);
}

static tn_status open_device(int ordinal, void *context, tn__dropin_device **out) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn__dropin_device *device = tn__host_alloc(1, sizeof *device);
    tn_status status;
    if (!device) return TN_OUT_OF_HOST_MEMORY;
    config.driver = TN_DRIVER_CUDA;
    config.ordinal = ordinal;
    device->ordinal = ordinal;
    device->context = context;
    status = tn_device_create(&config, &device->device);
    if (status != TN_OK) {
        tn__host_free(device);
        return status;
    }
    device->driver = tn__device_driver(device->device);
    device->state = tn__device_state(device->device);
    status = tn_device_info_get(device->device, &info);
    device->memory_bytes = info.memory_bytes;
    if (status == TN_OK) status = make_pool(device, "cuMemAlloc", &device->pool);
    if (status == TN_OK) status = tn_stream_create(device->device, &device->idle);
    if (status == TN_OK && !watch_exit()) status = TN_OUT_OF_HOST_MEMORY;
    if (status == TN_OK) {
        *out = device;
    } else {
        destroy_device(device);
    }
    return status;
}

/* One that could not be opened is the driver's from then on: said once. */
static int refused[TN__DROPIN_DEVICES_MAX];

/* One that a reset took away with what it had; once for each, since it is refused then. */
static tn__dropin_device *left_behind[TN__DROPIN_DEVICES_MAX];

/* Its context is being reset: what was opened meanwhile would go with it. */
static int is_ending[TN__DROPIN_DEVICES_MAX];

static tn__dropin_device *open_once(int ordinal, void *context) {
    tn__dropin_device *device = NULL;
    pthread_mutex_lock(&mutex);
    device = tn__dropin.devices[ordinal];
    if (!device && !refused[ordinal] && !is_ending[ordinal]) {
        if (open_device(ordinal, context, &device) == TN_OK) {
            tn__dropin.contexts[ordinal] = context;
            tn__dropin.devices[ordinal] = device;
        } else {
            refused[ordinal] = 1;
            fprintf(stderr, "tenure: not active on device %d: %s\n", ordinal, tn_error_last());
        }
    }
    pthread_mutex_unlock(&mutex);
    return device;
}

/* A program that uses none must not get one: it takes memory and time to make. */
static int is_active(int ordinal) {
    unsigned flags = 0;
    int is = 0;
    return contexts.state(ordinal, &flags, &is) == TN__CU_SUCCESS && is;
}

static int is_primary(int ordinal, const void *context) {
    void *primary = NULL;
    if (!is_active(ordinal) || contexts.retain(&primary, ordinal) != TN__CU_SUCCESS) return 0;
    (void)contexts.release(ordinal);
    return primary == context;
}

tn__dropin_device *tn__dropin_device_current(void) {
    static _Thread_local int last __attribute__((tls_model("global-dynamic")));
    tn__dropin_device *device = tn__dropin.devices[last];
    void *context = NULL;
    int ordinal = 0;
    if (tn__dropin.is_over || tn__dropin.is_recording_only) return NULL;
    if (contexts.current(&context) != TN__CU_SUCCESS || !context) return NULL;
    if (device && tn__dropin.contexts[last] == context && device->is_told) return device;
    if (contexts.device(&ordinal) != TN__CU_SUCCESS) return NULL;
    if (ordinal < 0 || ordinal >= TN__DROPIN_DEVICES_MAX) return NULL;
    device = tn__dropin.devices[ordinal];
    if (!device && is_primary(ordinal, context)) device = open_once(ordinal, context);
    if (!device || device->context != context) return NULL;
    if (!device->is_told) tn__dropin_peers_apply(device);
    last = ordinal;
    return device;
}

tn__dropin_device *tn__dropin_device_open(int ordinal) {
    void *context = NULL;
    if (tn__dropin.devices[ordinal]) return tn__dropin.devices[ordinal];
    if (contexts.retain(&context, ordinal) != TN__CU_SUCCESS) return NULL;
    tn__dropin_device *device = open_once(ordinal, context);
    (void)contexts.release(ordinal);
    return device;
}

int tn__dropin_ordinal_of(const void *context) {
    void *current = NULL;
    int ordinal = 0;
    if (!context && contexts.current(&current) == TN__CU_SUCCESS) context = current;
    for (; context && ordinal < tn__dropin_device_count(); ordinal++) {
        if (is_primary(ordinal, context)) return ordinal;
    }
    return -1;
}

int tn__dropin_device_count(void) {
    int count = 0;
    if (contexts.count(&count) != TN__CU_SUCCESS) return 0;
    return count < TN__DROPIN_DEVICES_MAX ? count : TN__DROPIN_DEVICES_MAX;
}

void tn__dropin_devices_open_active(void) {
    for (int i = 0; i < tn__dropin_device_count(); i++) {
        tn__dropin_device *device = NULL;
        if (tn__dropin.devices[i] || refused[i] || !is_active(i)) continue;
        device = tn__dropin_device_open(i);
        if (device && !device->is_told) tn__dropin_peers_apply(device);
    }
}

tn_pool *tn__dropin_stream_pool(tn__dropin_device *device) {
    tn_pool *pool;
    pthread_mutex_lock(&mutex);
    pool = device->stream_pool;
    if (!pool && make_pool(device, "cuMemAllocAsync", &pool) == TN_OK) device->stream_pool = pool;
    pthread_mutex_unlock(&mutex);
    if (pool && !device->is_stream_told) tn__dropin_peers_apply(device);
    return pool;
}

/* All blocks that the program has: back to the pools, or only forgotten. */
static void end_blocks(tn__dropin_device *device, int are_given) {
    tn__dropin_block *block;
    while ((block = tn__dropin_blocks_take_any(device)) != NULL) {
        tn__dropin_record_free(block);
        if (are_given) {
            tn__dropin_give(block);
        } else {
            tn__host_free(block);
        }
    }
}

static void leave_behind(tn__dropin_device *device) {
    pthread_mutex_lock(&mutex);
    left_behind[device->ordinal] = device;
    refused[device->ordinal] = 1;
    pthread_mutex_unlock(&mutex);
    end_blocks(device, 0);
}

/* No thread finds the device any more, or has it pinned. */
static void give_all_back(tn__dropin_device *device) {
    tn__dropin_fence_close(device);
    end_blocks(device, 1);
    tn__dropin_streams_close(device);
    tn__dropin_whole_trim(device, 0);
    if (device->stream_pool) (void)tn_pool_destroy(device->stream_pool);
    destroy_device(device);
}

/* NULL: the device is not open. */
static tn__dropin_device *begin_ending(int ordinal) {
    tn__dropin_device *device;
    pthread_mutex_lock(&mutex);
    device = is_ending[ordinal] ? NULL : tn__dropin.devices[ordinal];
    is_ending[ordinal]++;
    pthread_mutex_unlock(&mutex);
    return device;
}

static int is_known(int ordinal) { return ordinal >= 0 && ordinal < TN__DROPIN_DEVICES_MAX; }

/* All work ends first. Where it ends in an error nothing can be given back: all goes with the
 * context, and the pools, which must not touch its memory again, are left as they are. From then on
 * the device is the driver's. */
void tn__dropin_device_close(int ordinal) {
    tn__dropin_device *device;
    int is_good;
    if (tn__dropin.is_over || !is_known(ordinal)) return;
    device = begin_ending(ordinal);
    if (!device) return;
    tn__dropin_peers_close(device);
    is_good = tn_device_synchronize(device->device) == TN_OK;
    tn__dropin_fence_forget(device);
    await_unpinned(device);
    if (is_good) {
        give_all_back(device);
    } else {
        leave_behind(device);
    }
}

void tn__dropin_device_closed(int ordinal) {
    if (tn__dropin.is_over || !is_known(ordinal)) return;
    pthread_mutex_lock(&mutex);
    is_ending[ordinal]--;
    pthread_mutex_unlock(&mutex);
}

/* ---- configuration --------------------------------------------------------------------------- */

static void read_options(void) {
    static const tn_pool_backing backings[] = {[TN__RUN_POOL_PLAIN] = TN_BACKING_PLAIN,
                                               [TN__RUN_POOL_VMM] = TN_BACKING_VMM,
                                               [TN__RUN_POOL_ASYNC] = TN_BACKING_ASYNC,
                                               [TN__RUN_POOL_NONE] = TN_BACKING_AUTO};
    const tn__options *options = tn__options_get();
    tn__dropin.backing = backings[options->run_pool];
    tn__dropin.is_recording_only = options->run_pool == TN__RUN_POOL_NONE;
    tn__dropin.free_waits = options->run_free_waits;
    tn__dropin.limit_bytes = options->limit_bytes;
    tn__dropin.soft_limit_bytes = options->soft_limit_bytes;
}

static void print_banner(void) {
    if (!tn__options_get()->verbose) return;
    fprintf(stderr, "tenure: drop-in %s is active in process %ld (%s), pool %s\n", tn_version(),
            (long)getpid(), program_invocation_short_name,
            tn__run_pool_choices[tn__options_get()->run_pool]);
}

static void fill_hooks(tn__dropin_calls *hooks) {
    tn__dropin_memory_hooks(hooks);
    tn__dropin_stream_hooks(hooks);
    tn__dropin_pointer_hooks(hooks);
    tn__dropin_peer_hooks(hooks);
}

int tn__dropin_open(const tn__dropin_driver *driver, tn__dropin_calls *hooks) {
    if (strcmp(driver->build, TN__DROPIN_BUILD) != 0) {
        fprintf(stderr, "tenure: not active: libtenure-preload.so and libtenure-dropin.so are of "
                        "different builds\n");
        return 0;
    }
    tn__dropin.driver = driver;
    read_options();
    if (!find_context_calls()) {
        fprintf(stderr, "tenure: not active: the CUDA driver lacks calls on contexts\n");
        return 0;
    }
    tn__dropin_record_open();
    if (tn__dropin.is_recording_only && !watch_exit()) return 0;
    fill_hooks(hooks);
    print_banner();
    return 1;
}
