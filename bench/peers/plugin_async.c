/* Plug-in: the driver's own stream-ordered allocator, cudaMallocAsync, with the release threshold
 * at its most, so that it keeps what it has. */
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "peer_allocator.h"

static _Thread_local cudaEvent_t event;

static void require(cudaError_t error, const char *call) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "peer_async: %s: %s\n", call, cudaGetErrorString(error));
    exit(1);
}
#define REQUIRE(call) require((call), #call)

static cudaMemPool_t default_pool(void) {
    cudaMemPool_t pool;
    REQUIRE(cudaDeviceGetDefaultMemPool(&pool, 0));
    return pool;
}

static void open_allocator(void) {
    uint64_t threshold = UINT64_MAX;
    REQUIRE(cudaSetDevice(0));
    REQUIRE(cudaMemPoolSetAttribute(default_pool(), cudaMemPoolAttrReleaseThreshold, &threshold));
}

static void close_allocator(void) {}

static void enter_thread(void) {
    REQUIRE(cudaSetDevice(0));
    if (!event) REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
}

static void *allocate(size_t bytes, void *stream) {
    void *block = NULL;
    REQUIRE(cudaMallocAsync(&block, bytes, stream));
    return block;
}

static void release(void *block, size_t bytes, void *stream) {
    (void)bytes;
    REQUIRE(cudaFreeAsync(block, stream));
}

/* It has no notion of a second user: the free is put behind the user by an event. */
static void use_across(size_t bytes, void *owner, void *user) {
    void *block = allocate(bytes, owner);
    REQUIRE(cudaEventRecord(event, user));
    REQUIRE(cudaStreamWaitEvent(owner, event, 0));
    release(block, bytes, owner);
}

static void trim(void) {
    REQUIRE(cudaDeviceSynchronize());
    REQUIRE(cudaMemPoolTrimTo(default_pool(), 0));
}

const peer_allocator *peer_allocators(int *count) {
    static const peer_allocator allocator = {
        "cudaMallocAsync", open_allocator, close_allocator, enter_thread,
        allocate,          release,        use_across,      trim};
    *count = 1;
    return &allocator;
}
