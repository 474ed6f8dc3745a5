/* Physical handles, their account, and the memory files of backed mode: see sim_memory.h.
 *
 * Tokens are indices into a table and are reused, last freed first, as a real driver reuses its
 * handle values: a program that keeps one too long meets another handle, not an error.
 *
 * A device's file in backed mode only grows; a handle gets fresh space at its end, and the space
 * of a freed handle is given back to the host by punching a hole. So physical memory never
 * fragments, as that of a GPU does not. A handle that is made for sharing has a file of its own.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim_memory.h"

#define TOKEN_BASE ((CUmemGenericAllocationHandle)0x48000000)
#define FILE_ALIGN ((size_t)4096)

static sim_handle *all;
static sim_handle **handles; /* by token; NULL: a free one */
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

static int device_file(int ordinal) {
    sim_device *device = &tn__sim.devices[ordinal];
    if (device->file < 0) device->file = memfd_create("tenure-simcuda", MFD_CLOEXEC);
    return device->file;
}

int tn__sim_handle_file(const sim_handle *handle) {
    return handle->file >= 0 ? handle->file : device_file(handle->device);
}

static size_t file_bytes_of(const sim_handle *handle) {
    return (handle->bytes + FILE_ALIGN - 1) / FILE_ALIGN * FILE_ALIGN;
}

/* Space for the handle in the device's file. */
static int place_in_file(sim_handle *handle) {
    sim_device *device = &tn__sim.devices[handle->device];
    size_t bytes = file_bytes_of(handle);
    int file = device_file(handle->device);
    if (file < 0) return 0;
    if (ftruncate(file, (off_t)(device->file_bytes + bytes)) != 0) return 0;
    handle->file_offset = device->file_bytes;
    device->file_bytes += bytes;
    return 1;
}

static int place(sim_handle *handle, int is_shareable) {
    if (!is_shareable) return !tn__sim.config.backed || place_in_file(handle);
    handle->file = tn__sim_share_file(handle->device, handle->bytes);
    return handle->file >= 0;
}

static sim_handle *make_handle(int device, size_t bytes) {
    sim_handle *handle = tn__sim_alloc(1, sizeof *handle);
    handle->device = device;
    handle->bytes = bytes;
    handle->tokens = 1;
    handle->file = -1;
    handle->next = all;
    if (all) all->previous = handle;
    all = handle;
    return handle;
}

static void unlink_handle(sim_handle *handle) {
    if (handle->next) handle->next->previous = handle->previous;
    if (handle->previous)
        handle->previous->next = handle->next;
    else
        all = handle->next;
    tn__sim_free(handle);
}

sim_handle *tn__sim_handle_create(int device, size_t bytes, int is_shareable) {
    sim_handle *handle;
    if (device == SIM_HOST) return make_handle(device, bytes);
    if (!tn__sim_charge(device, bytes)) return NULL;
    handle = make_handle(device, bytes);
    if (place(handle, is_shareable)) return handle;
    tn__sim_discharge(device, bytes);
    unlink_handle(handle);
    return NULL;
}

/* Its contents are another's: they are not poisoned here. */
sim_handle *tn__sim_handle_adopt(int device, size_t bytes, int file) {
    sim_handle *handle = make_handle(device, bytes);
    handle->file = file;
    handle->is_foreign = 1;
    handle->is_poisoned = 1;
    return handle;
}

sim_handle *tn__sim_handle_of_file(unsigned long long file_system, unsigned long long inode) {
    for (sim_handle *handle = all; handle; handle = handle->next) {
        struct stat status;
        if (handle->file < 0 || fstat(handle->file, &status) != 0) continue;
        if (status.st_dev == file_system && status.st_ino == inode) return handle;
    }
    return NULL;
}

static void give_device_memory_back(const sim_handle *handle) {
    const sim_device *device = &tn__sim.devices[handle->device];
    if (!handle->is_foreign) tn__sim_discharge(handle->device, handle->bytes);
    if (handle->file >= 0) {
        close(handle->file);
    } else if (device->file >= 0) {
        fallocate(device->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  (off_t)handle->file_offset, (off_t)file_bytes_of(handle));
    }
}

static void destroy(sim_handle *handle) {
    if (handle->device != SIM_HOST) give_device_memory_back(handle);
    tn__sim_shadow_clear(&handle->shadow);
    unlink_handle(handle);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

CUmemGenericAllocationHandle tn__sim_token_create(sim_handle *handle) {
    size_t index;
    if (!free_count) grow_table();
    index = free_tokens[--free_count];
    handles[index] = handle;
    return TOKEN_BASE + index;
}

sim_handle *tn__sim_handle_find(CUmemGenericAllocationHandle token) {
    if (token < TOKEN_BASE || token - TOKEN_BASE >= handle_capacity) return NULL;
    return handles[token - TOKEN_BASE];
}

void tn__sim_handle_release(sim_handle *handle) {
    handle->tokens--;
    if (!handle->tokens && !handle->mapped) destroy(handle);
}

void tn__sim_token_release(CUmemGenericAllocationHandle token) {
    size_t index = (size_t)(token - TOKEN_BASE);
    sim_handle *handle = handles[index];
    handles[index] = NULL;
    free_tokens[free_count++] = index;
    tn__sim_handle_release(handle);
}

void tn__sim_handle_unmapped(sim_handle *handle) {
    handle->mapped--;
    if (!handle->mapped && !handle->tokens) destroy(handle);
}

void tn__sim_handles_reset(void) {
    while (all)
        destroy(all);
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
