/* An NVTX tool for tests: it records heaps and blocks, and what does not fit together. */
#include "recording_tool.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define NVTX_NO_IMPL
#include <nvtx3/nvToolsExtMem.h>

static recording state;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

recording *recording_get(void) { return &state; }

static void complain(const char *what, const void *address) {
    if (state.errors++ == 0) {
        snprintf(state.first_error, sizeof state.first_error, "%s: %p", what, address);
    }
}

static void enter(const void *what) {
    pthread_mutex_lock(&mutex);
    if (state.is_device_current && !state.is_device_current()) {
        complain("no device is current", what);
    }
}

static recorded_range *find(recorded_range *ranges, uintptr_t address) {
    for (size_t i = 0; i < RECORDED_MAX; i++) {
        if (ranges[i].address == address) return &ranges[i];
    }
    return NULL;
}

static int overlaps_any(const recorded_range *ranges, uintptr_t address, size_t bytes) {
    for (size_t i = 0; i < RECORDED_MAX; i++) {
        if (ranges[i].address && ranges[i].address < address + bytes &&
            address < ranges[i].address + ranges[i].bytes)
            return 1;
    }
    return 0;
}

static recorded_range *begin_range(recorded_range *ranges, const void *address, size_t bytes,
                                   const char *what) {
    recorded_range *range = find(ranges, 0);
    if (bytes == 0 || overlaps_any(ranges, (uintptr_t)address, bytes)) complain(what, address);
    if (!range) {
        complain("too many", address);
        return NULL;
    }
    *range = (recorded_range){.address = (uintptr_t)address, .bytes = bytes};
    return range;
}

static nvtxMemHeapHandle_t heap_register(nvtxDomainHandle_t domain, nvtxMemHeapDesc_t const *heap) {
    const nvtxMemVirtualRangeDesc_t *range = heap->typeSpecificDesc;
    recorded_range *recorded;
    (void)domain;
    enter(range->ptr);
    if (heap->usage != NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR ||
        heap->type != NVTX_MEM_TYPE_VIRTUAL_ADDRESS ||
        heap->typeSpecificDescSize != sizeof *range || heap->structSize != sizeof *heap)
        complain("a heap of a kind that is not known", range->ptr);
    recorded = begin_range(state.heaps, range->ptr, range->size, "a heap overlaps another");
    state.heap_count++;
    state.heaps_begun++;
    pthread_mutex_unlock(&mutex);
    return (nvtxMemHeapHandle_t)recorded;
}

static void heap_unregister(nvtxDomainHandle_t domain, nvtxMemHeapHandle_t handle) {
    recorded_range *heap = (recorded_range *)handle;
    (void)domain;
    enter(handle);
    if (heap->address == 0) complain("a heap ends twice", handle);
    if (overlaps_any(state.blocks, heap->address, heap->bytes)) {
        complain("a heap ends before its blocks", (void *)heap->address);
    }
    heap->address = 0;
    state.heap_count--;
    pthread_mutex_unlock(&mutex);
}

static void register_one(const recorded_range *heap, const nvtxMemVirtualRangeDesc_t *range) {
    uintptr_t address = (uintptr_t)range->ptr;
    recorded_range *block =
        begin_range(state.blocks, range->ptr, range->size, "a block overlaps another");
    if (!block || !heap || address < heap->address ||
        address + range->size > heap->address + heap->bytes) {
        complain("a block is not in its heap", range->ptr);
        return;
    }
    block->heap = (size_t)(heap - state.heaps);
    state.block_count++;
    state.blocks_begun++;
}

static void regions_register(nvtxDomainHandle_t domain,
                             nvtxMemRegionsRegisterBatch_t const *batch) {
    const nvtxMemVirtualRangeDesc_t *ranges = batch->regionDescElements;
    (void)domain;
    enter(batch);
    for (size_t i = 0; i < batch->regionCount; i++)
        register_one((const recorded_range *)batch->heap, &ranges[i]);
    pthread_mutex_unlock(&mutex);
}

static void regions_unregister(nvtxDomainHandle_t domain,
                               nvtxMemRegionsUnregisterBatch_t const *batch) {
    (void)domain;
    enter(batch);
    for (size_t i = 0; i < batch->refCount; i++) {
        const void *address = batch->refElements[i].pointer;
        recorded_range *block = find(state.blocks, (uintptr_t)address);
        if (batch->refType != NVTX_MEM_REGION_REF_TYPE_POINTER || !block) {
            complain("a block ends that is none", address);
            continue;
        }
        block->address = 0;
        state.block_count--;
    }
    pthread_mutex_unlock(&mutex);
}

static void regions_name(nvtxDomainHandle_t domain, nvtxMemRegionsNameBatch_t const *batch) {
    (void)domain;
    enter(batch);
    for (size_t i = 0; i < batch->regionCount; i++) {
        const nvtxMemRegionNameDesc_t *region = &batch->regionElements[i];
        recorded_range *block = find(state.blocks, (uintptr_t)region->region.pointer);
        if (block) {
            snprintf(block->name, sizeof block->name, "%s", region->name.ascii);
        } else {
            complain("a name for no block", region->region.pointer);
        }
    }
    pthread_mutex_unlock(&mutex);
}

/* What NVTX looks for in an injected library; it has no prototype in a header. */
int InitializeInjectionNvtxExtension(nvtxExtModuleInfo_t *module);

int InitializeInjectionNvtxExtension(nvtxExtModuleInfo_t *module) {
    intptr_t *slots = module->segments[0].functionSlots;
    if (module->moduleId != NVTX_EXT_MODULEID_MEM) return 0;
    slots[NVTX3EXT_CBID_nvtxMemHeapRegister] = (intptr_t)heap_register;
    slots[NVTX3EXT_CBID_nvtxMemHeapUnregister] = (intptr_t)heap_unregister;
    slots[NVTX3EXT_CBID_nvtxMemRegionsRegister] = (intptr_t)regions_register;
    slots[NVTX3EXT_CBID_nvtxMemRegionsUnregister] = (intptr_t)regions_unregister;
    slots[NVTX3EXT_CBID_nvtxMemRegionsName] = (intptr_t)regions_name;
    return 1;
}
