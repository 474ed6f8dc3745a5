/* The emulated device as a driver: see emulated_driver.h. */
#include "emulated_driver.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_module.h"
#include "emulator.h"
#include "test_support.h"

/* Where the linker finds tn__driver_cuda (cmake/emulation.cmake). */
extern tn__driver tn__driver_emulated;
tn__driver tn__driver_emulated;

static atomic_uint_fast64_t launch_count;
static const char *_Atomic last_kernel = "";

/* ---- the calls that the host driver lacks --------------------------------------------------- */

static tn_status open_device(const tn_device_config *config, tn_device_info *info,
                             tn__driver_device **out) {
    TN_TRY(tn__driver_host.open(config, info, out));
    info->driver = TN_DRIVER_CUDA;
    info->compute_major = 9;
    info->compute_minor = 0;
    return TN_OK;
}

/* An image is the name of the file that it was made from. */
static tn_status module_load(tn__driver_device *device, const void *image, void **out) {
    (void)device;
    *out = (void *)(uintptr_t)image;
    return TN_OK;
}

static tn_status module_unload(tn__driver_device *device, void *module) {
    (void)device, (void)module;
    return TN_OK;
}

static tn_status module_function(tn__driver_device *device, void *module, const char *name,
                                 tn__function *out) {
    const emulated_kernel *kernel = emulated_kernel_find(module, name);
    (void)device;
    if (!kernel) return TN_FAIL(TN_DRIVER_ERROR, "%s has no kernel %s", (const char *)module, name);
    *out = (tn__function)(uintptr_t)kernel;
    return TN_OK;
}

enum { ARGUMENT_ALIGNMENT = 64 };

typedef struct queued_launch {
    emulated_launch launch;
    _Alignas(ARGUMENT_ALIGNMENT) char argument[]; /* a copy: the caller's ends with its call */
} queued_launch;

static void run_launch(void *argument) {
    queued_launch *queued = argument;
    emulated_run(&queued->launch);
    if (emulated_ran) emulated_ran(queued->launch.kernel->name);
    free(queued);
}

static tn_status launch(tn__driver_device *device, tn__function function, const tn__launch *wanted,
                        tn_stream stream) {
    const emulated_kernel *kernel = function;
    const size_t bytes = sizeof(queued_launch) + kernel->argument_bytes + ARGUMENT_ALIGNMENT - 1;
    /* A GPU would hang where they do not all find a place. */
    if (strstr(kernel->name, "_held_") && !wanted->is_together)
        emulated_fault("blocks that wait for each other, but are not launched together");
    queued_launch *queued = aligned_alloc(ARGUMENT_ALIGNMENT, bytes - bytes % ARGUMENT_ALIGNMENT);
    TN_CHECK(wanted->grid[1] == 1 && wanted->grid[2] == 1);
    TN_CHECK(wanted->block[1] == 1 && wanted->block[2] == 1);
    if (!queued) return TN_OUT_OF_HOST_MEMORY;
    memcpy(queued->argument, wanted->parameters[0], kernel->argument_bytes);
    queued->launch = (emulated_launch){kernel, queued->argument, wanted->grid[0], wanted->block[0]};
    atomic_fetch_add(&launch_count, 1);
    atomic_store(&last_kernel, kernel->name);
    tn_status status = tn__driver_host.host_task(device, run_launch, queued, stream);
    if (status != TN_OK) free(queued);
    return status;
}

/* As many as a Hopper has: kernels that share them with a product run, one after the other. */
static tn_status multiprocessors(tn__driver_device *device, int *out) {
    (void)device;
    *out = EMULATED_MULTIPROCESSORS;
    return TN_OK;
}

int emulated_has_products;
void (*emulated_ran)(const char *kernel);

static tn_status shared_max_set(tn__driver_device *device, tn__function function, unsigned bytes) {
    const char *name = ((const emulated_kernel *)function)->name;
    (void)device;
    if (emulated_has_products || strncmp(name, "product_", 8) != 0) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED, "%s has not %u bytes of shared memory", name, bytes);
}

/* So that a block of those that take one piece of work after the other has more than one. Blocks
 * that hold tiles wait for each other: here the first takes all there is, and must hold a band: two
 * tiles, of gradients one. */
static tn_status blocks_at_once(tn__driver_device *device, tn__function function, unsigned threads,
                                unsigned shared_bytes, int64_t *out) {
    const char *name = ((const emulated_kernel *)function)->name;
    (void)device, (void)threads, (void)shared_bytes;
    *out = strncmp(name, "norm_gradient_held", 18) == 0 ? 2 : 4;
    return TN_OK;
}

int emulated_lacks_boxes;

static tn_status box_map_check(const tn__driver_device *device) {
    (void)device;
    if (!emulated_lacks_boxes) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED, "the emulated driver lacks cuTensorMapEncodeTiled");
}

/* What cuda_boxes.cuh reads where there is no GPU. */
static tn_status box_map(tn__driver_device *device, const tn__boxes *boxes, void *out) {
    const struct {
        const void *bytes;
        int64_t rows, row_bytes;
    } matrix = {boxes->data, boxes->rows, boxes->cols * boxes->element_bytes};
    TN_TRY(box_map_check(device));
    TN_CHECK(matrix.row_bytes % 16 == 0 && (uintptr_t)boxes->data % 16 == 0);
    TN_CHECK(boxes->box_rows <= 256 && boxes->box_cols <= 256);
    TN_CHECK(!boxes->is_swizzled || boxes->box_cols * boxes->element_bytes == 128);
    TN_CHECK((uintptr_t)out % 64 == 0);
    memset(out, 0, TN__BOX_MAP_BYTES);
    memcpy(out, &matrix, sizeof matrix);
    return TN_OK;
}

static __attribute__((constructor)) void make_driver(void) {
    tn__driver_emulated = tn__driver_host;
    tn__driver_emulated.name = "cuda";
    tn__driver_emulated.open = open_device;
    tn__driver_emulated.module_load = module_load;
    tn__driver_emulated.module_unload = module_unload;
    tn__driver_emulated.module_function = module_function;
    tn__driver_emulated.launch = launch;
    tn__driver_emulated.multiprocessors = multiprocessors;
    tn__driver_emulated.shared_max_set = shared_max_set;
    tn__driver_emulated.blocks_at_once = blocks_at_once;
    tn__driver_emulated.box_map = box_map;
    tn__driver_emulated.box_map_check = box_map_check;
}

tn_device *emulated_open(void) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    config.driver = TN_DRIVER_CUDA;
    EXPECT_OK(tn_device_create(&config, &device));
    return device;
}

uint64_t emulated_launch_count(void) { return atomic_load(&launch_count); }

const char *emulated_last_kernel(void) { return atomic_load(&last_kernel); }
