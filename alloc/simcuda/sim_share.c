/* Physical memory that travels between processes, as a file descriptor.
 *
 *     file | the handle's bytes | one page: the description |
 *
 * The file of a shareable handle is a memfd of its own. Whoever gets the descriptor reads from the
 * description what it is, and maps the same memory. In the process that made it an import is one
 * more token for the same handle; anywhere else it is a foreign handle, which costs its device
 * nothing there.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim_memory.h"

#define PAGE_BYTES ((size_t)4096)

typedef struct description {
    char magic[16];
    size_t bytes;
    size_t granularity_bytes;
    int device;
} description;

static const char magic[16] = "simcuda shared";

/* ---- files ----------------------------------------------------------------------------------- */

int tn__sim_share_file(int device, size_t bytes) {
    description text = {
        .bytes = bytes, .granularity_bytes = tn__sim.config.granularity_bytes, .device = device};
    int file = memfd_create("tenure-simcuda-shared", MFD_CLOEXEC);
    if (file < 0) return -1;
    memcpy(text.magic, magic, sizeof magic);
    if (ftruncate(file, (off_t)(bytes + PAGE_BYTES)) == 0 &&
        pwrite(file, &text, sizeof text, (off_t)bytes) == (ssize_t)sizeof text) {
        return file;
    }
    close(file);
    return -1;
}

static int read_description(int file, const struct stat *status, description *out) {
    off_t at = status->st_size - (off_t)PAGE_BYTES;
    if (!S_ISREG(status->st_mode) || at <= 0) return 0;
    if (pread(file, out, sizeof *out, at) != (ssize_t)sizeof *out) return 0;
    if (memcmp(out->magic, magic, sizeof magic) != 0 || out->bytes != (size_t)at) return 0;
    return out->device >= 0 && out->device < tn__sim.config.device_count &&
           out->granularity_bytes == tn__sim.config.granularity_bytes;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static CUresult export_handle(void *out, CUmemGenericAllocationHandle token, int type,
                              unsigned long long flags) {
    const sim_handle *handle = tn__sim_handle_find(token);
    int file;
    if (!out || !handle || flags) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        return tn__sim_refuse("cuMemExportToShareableHandle: type %d", type);
    }
    if (handle->file < 0) return CUDA_ERROR_INVALID_VALUE; /* not made for it */
    file = fcntl(handle->file, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    memcpy(out, &file, sizeof file);
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      int type, unsigned long long flags) {
    SIM_ENTER(cuMemExportToShareableHandle);
    return tn__sim_leave(export_handle(shareable, handle, type, flags));
}

static CUresult import_file(CUmemGenericAllocationHandle *out, int file) {
    description text;
    struct stat status;
    sim_handle *handle;
    /* As the driver of an H200 says it. */
    if (fstat(file, &status) != 0) return CUDA_ERROR_UNKNOWN;
    if (!read_description(file, &status, &text)) return CUDA_ERROR_UNKNOWN;
    handle = tn__sim_handle_of_file(status.st_dev, status.st_ino);
    if (handle) {
        handle->tokens++;
    } else {
        int own = fcntl(file, F_DUPFD_CLOEXEC, 0);
        if (own < 0) return CUDA_ERROR_OPERATING_SYSTEM;
        handle = tn__sim_handle_adopt(text.device, text.bytes, own);
    }
    *out = tn__sim_token_create(handle);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        int type) {
    SIM_ENTER(cuMemImportFromShareableHandle);
    if (!handle) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        return tn__sim_leave(tn__sim_refuse("cuMemImportFromShareableHandle: type %d", type));
    }
    return tn__sim_leave(import_file(handle, (int)(intptr_t)shareable));
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle token) {
    SIM_ENTER(cuMemGetAllocationPropertiesFromHandle);
    const sim_handle *handle = tn__sim_handle_find(token);
    if (!properties || !handle) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    memset(properties, 0, sizeof *properties);
    properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties->location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, handle->device};
    if (handle->file >= 0) {
        properties->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    }
    return tn__sim_leave(CUDA_SUCCESS);
}
