/* The CUDA driver library: loading it, finding its symbols, and putting its errors into words.
 *
 * Invariant, under `lock`: `loaded` holds each library with references once, by path. A library is
 * local to us (RTLD_LOCAL): loading it changes no symbol of the program.
 */
#include "driver_cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "host_alloc.h"

enum { NEED_REQUIRED, NEED_VMM, NEED_OPTIONAL };

typedef struct symbol_row {
    int need;
    size_t offset;
    const char *name;
} symbol_row;

#define AS_ROW(need, field, name, parameters) {NEED_##need, offsetof(tn__cu_calls, field), name},
static const symbol_row symbols[] = {TN__CU_CALLS(AS_ROW)};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tn__cuda_library *loaded;

/* ---- errors -------------------------------------------------------------------------------- */

static const char *words_for(tn__cu_result (*get)(tn__cu_result, const char **), int code) {
    const char *text = NULL;
    if (get(code, &text) != TN__CU_SUCCESS || !text) return "no text";
    return text;
}

tn_status tn__cuda_fail(const tn__cuda_library *library, tn_status when_out_of_memory, int code,
                        const char *call) {
    tn_status status = TN_DRIVER_ERROR;
    const char *more = "";
    switch (code) {
    case TN__CU_ERROR_OUT_OF_MEMORY: status = when_out_of_memory; break;
    case TN__CU_ERROR_INVALID_HANDLE: status = TN_INVALID_ARGUMENT; break;
    case TN__CU_ERROR_CONTEXT_IS_DESTROYED: /* an H200 says so of a stream that was destroyed */
        status = TN_INVALID_ARGUMENT;
        break;
    case TN__CU_ERROR_NOT_SUPPORTED: status = TN_UNSUPPORTED; break;
    case TN__CU_ERROR_NOT_INITIALIZED: more = ": not initialized in this process"; break;
    case TN__CU_ERROR_DEINITIALIZED:
        tn__driver_set_gone();
        more = ": the driver has shut down, since the process is ending";
        break;
    default: break;
    }
    return TN_FAIL_NATIVE(status, code, "%s failed: %s (%s)%s", call,
                          words_for(library->cu.error_name, code),
                          words_for(library->cu.error_string, code), more);
}

/* ---- loading ------------------------------------------------------------------------------- */

static void set_call(tn__cu_calls *calls, const symbol_row *row, void *address) {
    memcpy((char *)calls + row->offset, &address, sizeof address);
}

static tn_status find_symbols(tn__cuda_library *library) {
    library->has_vmm = 1;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address = dlsym(library->handle, symbols[i].name);
        if (!address && symbols[i].need == NEED_REQUIRED) {
            return TN_FAIL(TN_UNSUPPORTED,
                           "%s is no CUDA driver that can be used: it lacks %s (a driver of CUDA "
                           "11.2 or later has it)",
                           library->path, symbols[i].name);
        }
        if (!address && symbols[i].need == NEED_VMM) library->has_vmm = 0;
        set_call(&library->cu, &symbols[i], address);
    }
    return TN_OK;
}

static void find_sim_calls(tn__cuda_library *library) {
    tn__sim_calls sim;
    *(void **)&sim.launch = dlsym(library->handle, "tnsim_launch");
    *(void **)&sim.take = dlsym(library->handle, "tnsim_take");
    *(void **)&sim.now_us = dlsym(library->handle, "tnsim_now_us");
    *(void **)&sim.memory_call_us = dlsym(library->handle, "tnsim_memory_call_us");
    *(void **)&sim.write_stamp = dlsym(library->handle, "tnsim_write_stamp");
    library->is_simulated =
        sim.launch && sim.take && sim.write_stamp && sim.now_us && sim.memory_call_us;
    if (library->is_simulated) library->sim = sim;
}

static tn_status initialize(tn__cuda_library *library) {
    int count = 0;
    int code = library->cu.init(0);
    if (code == TN__CU_SUCCESS) {
        code = library->cu.device_count(&count);
        if (code == TN__CU_SUCCESS && count > 0) return TN_OK;
        if (code == TN__CU_SUCCESS) code = TN__CU_ERROR_NO_DEVICE;
    }
    if (code == TN__CU_ERROR_NO_DEVICE || code == TN__CU_ERROR_STUB_LIBRARY) {
        return TN_FAIL_NATIVE(TN_UNSUPPORTED, code, "%s finds no CUDA device", library->path);
    }
    return tn__cuda_fail(library, TN_OUT_OF_DEVICE_MEMORY, code, "cuInit(0)");
}

static void unload(tn__cuda_library *library) {
    if (library->handle && library->is_simulated) dlclose(library->handle);
    tn__host_free(library->path);
    tn__host_free(library);
}

static tn_status load_into(tn__cuda_library *library, const char *path) {
    library->path = tn__host_strdup(path);
    if (!library->path) return TN_OUT_OF_HOST_MEMORY;
    library->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library->handle) {
        const char *reason = dlerror();
        return TN_FAIL(TN_UNSUPPORTED,
                       "no CUDA driver: %s; install the NVIDIA driver, name one in "
                       "TENURE_CUDA_LIBRARY, or use TENURE_DRIVER=host",
                       reason ? reason : path);
    }
    tn_status status = find_symbols(library);
    if (status != TN_OK) {
        dlclose(library->handle); /* nothing of it has run */
        library->handle = NULL;
        return status;
    }
    find_sim_calls(library);
    return initialize(library);
}

static tn_status load(const char *path, tn__cuda_library **out) {
    tn__cuda_library *library = tn__host_alloc(1, sizeof *library);
    if (!library) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = load_into(library, path);
    if (status != TN_OK) {
        unload(library);
        return status;
    }
    library->next = loaded;
    loaded = library;
    *out = library;
    return TN_OK;
}

static tn__cuda_library *find_loaded(const char *path) {
    tn__cuda_library *library = loaded;
    while (library && strcmp(library->path, path) != 0)
        library = library->next;
    return library;
}

tn_status tn__cuda_library_open(const char *path, tn__cuda_library **out) {
    tn_status status = TN_OK;
    pthread_mutex_lock(&lock);
    tn__cuda_library *library = find_loaded(path);
    if (!library) status = load(path, &library);
    if (status == TN_OK) {
        library->references++;
        *out = library;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void tn__cuda_library_close(tn__cuda_library *library) {
    pthread_mutex_lock(&lock);
    TN_ASSERT(library->references > 0);
    if (--library->references == 0) {
        tn__cuda_library **link = &loaded;
        while (*link != library)
            link = &(*link)->next;
        *link = library->next;
        unload(library);
    }
    pthread_mutex_unlock(&lock);
}
