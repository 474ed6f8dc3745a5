/* Physical handles, their account, and the memory files of backed mode: see sim_memory.h.
 *
 * Tokens are indices into a table and are reused, last freed first, as a real driver reuses its
 * handle values: a program that keeps one too long meets another handle, not an error.
 *
 * A device's file in backed mode only grows; a handle gets fresh space at its end, and the space
 * of a freed handle is given back to the host by punching a hole. So physical memory never
 * fragments, as that of a GPU does not.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim_memory.h"

#define TOKEN_BASE ((CUmemGenericAllocationHandle)0x48000000)
#define FILE_ALIGN ((size_t)4096)

static sim_handle **handles; /* NULL: a free token */
static size_t *free_tokens;
static size_t handle_capacity;
static size_t free_count;

static void grow_table(void) {
    size_t capacity = handle_capacity ? 2 * handle_capacity : 64;
    handles = tn__sim_grow(handles, capacity, sizeof *handles);
    free_tokens = tn__sim_grow(free_tokens, capacity, sizeof *free_tokens);
    for (size_t i = capacity; i > handle_capacity; i--) {
        handles[i - 1] = NULL;
        free_tokens[free_count++] = i - 1;
    }
    handle_capacity = capacity;
}

int tn__sim_device_file(int ordinal) {
    sim_device *device = &tn__sim.devices[ordinal];
    if (device->file < 0) device->file = memfd_create("tenure-simcuda", MFD_CLOEXEC);
    return device->file;
}

/* Space for the handle in the device's file. */
static int place_in_file(sim_handle *handle) {
    sim_device *device = &tn__sim.devices[handle->device];
    size_t bytes = (handle->bytes + FILE_ALIGN - 1) / FILE_ALIGN * FILE_ALIGN;
    int file = tn__sim_device_file(handle->device);
    if (file < 0) return 0;
    if (ftruncate(file, (off_t)(device->file_bytes + bytes)) != 0) return 0;
    handle->file_offset = device->file_bytes;
    device->file_bytes += bytes;
    return 1;
}

sim_handle *tn__sim_handle_create(int device, size_t bytes, int has_token) {
    sim_handle *handle;
    if (!tn__sim_charge(device, bytes)) return NULL;
    handle = tn__sim_alloc(1, sizeof *handle);
    handle->device = device;
    handle->bytes = bytes;
    if (tn__sim.config.backed && !place_in_file(handle)) {
        tn__sim_discharge(device, bytes);
        tn__sim_free(handle);
        return NULL;
    }
    if (has_token) {
        if (!free_count) grow_table();
        size_t index = free_tokens[--free_count];
        handles[index] = handle;
        handle->token = TOKEN_BASE + index;
    }
    return handle;
}

sim_handle *tn__sim_handle_find(CUmemGenericAllocationHandle token) {
    if (token < TOKEN_BASE || token - TOKEN_BASE >= handle_capacity) return NULL;
    return handles[token - TOKEN_BASE];
}

static void destroy(sim_handle *handle) {
    sim_device *device = &tn__sim.devices[handle->device];
    size_t file_bytes = (handle->bytes + FILE_ALIGN - 1) / FILE_ALIGN * FILE_ALIGN;
    tn__sim_discharge(handle->device, handle->bytes);
    if (device->file >= 0) {
        fallocate(device->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  (off_t)handle->file_offset, (off_t)file_bytes);
    }
    tn__sim_shadow_clear(&handle->shadow);
    tn__sim_free(handle);
}

void tn__sim_handle_release(sim_handle *handle) {
    if (handle->token) {
        handles[handle->token - TOKEN_BASE] = NULL;
        free_tokens[free_count++] = (size_t)(handle->token - TOKEN_BASE);
    }
    handle->is_released = 1;
    if (!handle->mapped) destroy(handle);
}

void tn__sim_handle_unmapped(sim_handle *handle) {
    handle->mapped--;
    if (!handle->mapped && handle->is_released) destroy(handle);
}

void tn__sim_handles_reset(void) {
    for (size_t i = 0; i < handle_capacity; i++) {
        if (handles[i]) destroy(handles[i]);
    }
    for (int i = 0; i < SIM_DEVICES_MAX; i++) {
        if (tn__sim.devices[i].file >= 0) close(tn__sim.devices[i].file);
        tn__sim.devices[i].file = -1;
    }
    tn__sim_free(handles);
    tn__sim_free(free_tokens);
    handles = NULL;
    free_tokens = NULL;
    handle_capacity = free_count = 0;
}

void tn__sim_handles_count(size_t *count, size_t *bytes) {
    *count = handle_capacity - free_count;
    *bytes = 0;
    for (size_t i = 0; i < handle_capacity; i++)
        *bytes += handles[i] ? handles[i]->bytes : 0;
}
