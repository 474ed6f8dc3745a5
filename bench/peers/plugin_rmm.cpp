// Plug-in: RMM's pool resource and its arena resource, over cudaMalloc.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <optional>

#include <cuda/stream_ref>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include "peer_allocator.h"

namespace {

constexpr std::size_t initial_bytes = std::size_t{8} << 30;
constexpr std::size_t alignment = 256;
thread_local cudaEvent_t event = nullptr;

void require(cudaError_t error, const char *call) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "peer_rmm: %s: %s\n", call, cudaGetErrorString(error));
    std::exit(1);
}

template <typename Resource> struct peer {
    static inline std::optional<Resource> resource;

    static void open() {
        require(cudaSetDevice(0), "cudaSetDevice");
        resource.emplace(rmm::mr::cuda_memory_resource{}, initial_bytes);
    }
    static void close() { resource.reset(); }
    static void enter_thread() {
        require(cudaSetDevice(0), "cudaSetDevice");
        if (!event) {
            require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
        }
    }
    static cuda::stream_ref stream_of(void *stream) {
        return cuda::stream_ref{static_cast<cudaStream_t>(stream)};
    }
    static void *alloc(std::size_t bytes, void *stream) {
        return resource->allocate(stream_of(stream), bytes, alignment);
    }
    static void free(void *block, std::size_t bytes, void *stream) {
        resource->deallocate(stream_of(stream), block, bytes, alignment);
    }
    // A block goes back on the stream of its last user, which has been put behind the owner.
    static void use_across(std::size_t bytes, void *owner, void *user) {
        void *block = alloc(bytes, owner);
        require(cudaEventRecord(event, static_cast<cudaStream_t>(user)), "cudaEventRecord");
        require(cudaStreamWaitEvent(static_cast<cudaStream_t>(owner), event, 0),
                "cudaStreamWaitEvent");
        free(block, bytes, owner);
    }
    static void trim() {}
    static peer_allocator table(const char *name) {
        return {name, open, close, enter_thread, alloc, free, use_across, trim};
    }
};

} // namespace

extern "C" const peer_allocator *peer_allocators(int *count) {
    static const peer_allocator all[] = {
        peer<rmm::mr::pool_memory_resource>::table("rmm pool"),
        peer<rmm::mr::arena_memory_resource>::table("rmm arena"),
    };
    *count = 2;
    return all;
}
