/* A CUDA runtime for the tests of the drop-in, as little of one as they need, that comes by the
 * driver as the real one does, shared or static: dlopen, dlsym of cuGetProcAddress_v2 alone, and
 * all else from that.
 */
#include "lookalike_cudart.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "lookalike_cuda.h"

#define RUNTIME_VERSION 13000

static __typeof__(&cuGetProcAddress_v2) get_address;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *find(const char *symbol, int version) {
    void *found = NULL;
    int status = 0;
    if (get_address(symbol, &found, version, 0, &status) != CUDA_SUCCESS || !found) {
        fprintf(stderr, "cudart: no %s (status %d)\n", symbol, status);
        exit(1);
    }
    return found;
}

/* Looked up once, as the real runtime does. */
#define DRIVER(function, base)                                                                     \
    ({                                                                                             \
        static __typeof__(&function) _Atomic known;                                                \
        if (!known) known = (__typeof__(&function))find(base, RUNTIME_VERSION);                    \
        (__typeof__(&function))known;                                                              \
    })

static void start(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    CUcontext context;
    if (driver) {
        *(void **)&get_address = dlsym(driver, "cuGetProcAddress_v2");
    }
    if (!get_address) {
        fprintf(stderr, "cudart: no driver: %s\n", dlerror());
        exit(1);
    }
    if (DRIVER(cuInit, "cuInit")(0) != CUDA_SUCCESS) exit(1);
    if (DRIVER(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")(&context, 0)) exit(1);
}

/* As the runtime does, whichever thread comes. */
static void make_current(void) {
    CUcontext context = NULL;
    pthread_once(&once, start);
    (void)DRIVER(cuCtxGetCurrent, "cuCtxGetCurrent")(&context);
    if (context) return;
    (void)DRIVER(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")(&context, 0);
    (void)DRIVER(cuCtxSetCurrent, "cuCtxSetCurrent")(context);
}

#define CALL(function, base, ...) (make_current(), (int)DRIVER(function, base)(__VA_ARGS__))

static CUdeviceptr address_of(const void *pointer) { return (CUdeviceptr)(uintptr_t)pointer; }

static int give(int code, CUdeviceptr address, void **out) {
    if (code == 0) *out = (void *)(uintptr_t)address;
    return code;
}

int cudaMalloc(void **out, size_t bytes) {
    CUdeviceptr address = 0;
    int code = CALL(cuMemAlloc_v2, "cuMemAlloc", &address, bytes);
    return give(code, address, out);
}

int cudaFree(void *pointer) { return CALL(cuMemFree_v2, "cuMemFree", address_of(pointer)); }

int cudaMallocManaged(void **out, size_t bytes, unsigned flags) {
    CUdeviceptr address = 0;
    int code = CALL(cuMemAllocManaged, "cuMemAllocManaged", &address, bytes, flags);
    return give(code, address, out);
}

int cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height) {
    CUdeviceptr address = 0;
    int code = CALL(cuMemAllocPitch_v2, "cuMemAllocPitch", &address, pitch, width, height, 4);
    return give(code, address, out);
}

int cudaMallocAsync(void **out, size_t bytes, void *stream) {
    CUdeviceptr address = 0;
    int code = CALL(cuMemAllocAsync, "cuMemAllocAsync", &address, bytes, stream);
    return give(code, address, out);
}

int cudaFreeAsync(void *pointer, void *stream) {
    return CALL(cuMemFreeAsync, "cuMemFreeAsync", address_of(pointer), stream);
}

int cudaMallocFromPoolAsync(void **out, size_t bytes, void *pool, void *stream) {
    CUdeviceptr address = 0;
    int code =
        CALL(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", &address, bytes, pool, stream);
    return give(code, address, out);
}

int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    return CALL(cuMemGetInfo_v2, "cuMemGetInfo", free_bytes, total_bytes);
}

int cudaDeviceSynchronize(void) {
    make_current();
    return (int)DRIVER(cuCtxSynchronize, "cuCtxSynchronize")();
}

/* By the call's first version, as the real runtime does. */
int cudaDeviceReset(void) {
    make_current();
    return (int)((__typeof__(&cuDevicePrimaryCtxReset))find("cuDevicePrimaryCtxReset", 7000))(0);
}

void *cudaGetDriverEntryPoint(const char *symbol, unsigned long long flags) {
    void *found = NULL;
    int status = 0;
    make_current();
    (void)get_address(symbol, &found, RUNTIME_VERSION, flags, &status);
    return found;
}
