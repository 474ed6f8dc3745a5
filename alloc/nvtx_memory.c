/* The calls to NVTX's memory extension: see nvtx_memory.h. */
#include "nvtx_memory.h"

#include <stdlib.h>

#include "options.h"

#ifdef TENURE_WITH_NVTX

#include <nvtx3/nvToolsExtMem.h>
#include <pthread.h>

static nvtxDomainHandle_t domain;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_domain(void) { domain = nvtxDomainCreateA("tenure"); }

int tn__nvtx_is_built(void) { return 1; }

int tn__nvtx_is_wanted(void) {
    const char *injected = getenv("NVTX_INJECTION64_PATH");
    return tn__options_get()->nvtx || (injected && injected[0]);
}

void *tn__nvtx_heap_begin(const void *address, size_t bytes) {
    nvtxMemVirtualRangeDesc_t range = {.size = bytes, .ptr = address};
    nvtxMemHeapDesc_t heap = {.extCompatID = NVTX_EXT_COMPATID_MEM,
                              .structSize = sizeof heap,
                              .usage = NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR,
                              .type = NVTX_MEM_TYPE_VIRTUAL_ADDRESS,
                              .typeSpecificDescSize = sizeof range,
                              .typeSpecificDesc = &range};
    nvtxMemHeapHandle_t handle;
    pthread_once(&once, make_domain);
    handle = nvtxMemHeapRegister(domain, &heap);
    return handle == NVTX_MEM_HEAP_HANDLE_NO_TOOL ? NULL : handle;
}

void tn__nvtx_heap_end(void *heap) { nvtxMemHeapUnregister(domain, heap); }

static void name_block(const void *address, const char *name) {
    nvtxMemRegionNameDesc_t region = {.regionRefType = NVTX_MEM_REGION_REF_TYPE_POINTER,
                                      .nameType = NVTX_MESSAGE_TYPE_ASCII,
                                      .region = {.pointer = address},
                                      .name = {.ascii = name}};
    nvtxMemRegionsNameBatch_t batch = {.extCompatID = NVTX_EXT_COMPATID_MEM,
                                       .structSize = sizeof batch,
                                       .regionCount = 1,
                                       .regionElementSize = sizeof region,
                                       .regionElements = &region};
    nvtxMemRegionsName(domain, &batch);
}

void tn__nvtx_block_begin(void *heap, const void *address, size_t bytes, const char *name) {
    nvtxMemVirtualRangeDesc_t range = {.size = bytes, .ptr = address};
    nvtxMemRegionsRegisterBatch_t batch = {.extCompatID = NVTX_EXT_COMPATID_MEM,
                                           .structSize = sizeof batch,
                                           .regionType = NVTX_MEM_TYPE_VIRTUAL_ADDRESS,
                                           .heap = heap,
                                           .regionCount = 1,
                                           .regionDescElementSize = sizeof range,
                                           .regionDescElements = &range};
    nvtxMemRegionsRegister(domain, &batch);
    if (name) name_block(address, name);
}

void tn__nvtx_block_end(const void *address) {
    nvtxMemRegionRef_t region = {.pointer = address};
    nvtxMemRegionsUnregisterBatch_t batch = {.extCompatID = NVTX_EXT_COMPATID_MEM,
                                             .structSize = sizeof batch,
                                             .refType = NVTX_MEM_REGION_REF_TYPE_POINTER,
                                             .refCount = 1,
                                             .refElementSize = sizeof region,
                                             .refElements = &region};
    nvtxMemRegionsUnregister(domain, &batch);
}

#else

int tn__nvtx_is_built(void) { return 0; }

int tn__nvtx_is_wanted(void) { return 0; }

void *tn__nvtx_heap_begin(const void *address, size_t bytes) {
    (void)address;
    (void)bytes;
    return NULL;
}

void tn__nvtx_heap_end(void *heap) { (void)heap; }

void tn__nvtx_block_begin(void *heap, const void *address, size_t bytes, const char *name) {
    (void)heap;
    (void)address;
    (void)bytes;
    (void)name;
}

void tn__nvtx_block_end(const void *address) { (void)address; }

#endif
