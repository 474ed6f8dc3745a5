// Plug-in: PyTorch's caching allocator, native and with expandable segments, through c10.
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "peer_allocator.h"

// Exported by libc10_cuda, declared in no header that it comes with.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*function)(c10::DeviceIndex));
}

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

[[noreturn]] void end(const std::exception &error) {
    std::fprintf(stderr, "peer_torch: %s\n", error.what());
    std::exit(1);
}

void open_with(const char *settings) {
    static bool is_ready = false;
    try {
        // libtorch_cuda, which is not needed here, would say that the device is in use.
        c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
        if (!is_ready) caching::init(c10::cuda::device_count());
        is_ready = true;
        c10::CachingAllocator::setAllocatorSettings(settings);
        c10::cuda::set_device(0);
    } catch (const std::exception &error) {
        end(error);
    }
}

void open_native() { open_with("expandable_segments:False"); }
void open_expandable() { open_with("expandable_segments:True"); }
void close_allocator() {}
void enter_thread() { c10::cuda::set_device(0); }

void *allocate(std::size_t bytes, void *stream) {
    try {
        return caching::raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream));
    } catch (const std::exception &error) {
        end(error);
    }
}

void release(void *block, std::size_t, void *) { caching::raw_delete(block); }

void use_across(std::size_t bytes, void *owner, void *user) {
    try {
        auto owning =
            c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(owner), c10::DeviceIndex{0});
        auto using_ =
            c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(user), c10::DeviceIndex{0});
        c10::cuda::CUDAStreamGuard guard(owning);
        c10::DataPtr block = caching::get()->allocate(bytes);
        caching::recordStream(block, using_);
    } catch (const std::exception &error) {
        end(error);
    }
}

void trim() { caching::emptyCache(); }

} // namespace

extern "C" const peer_allocator *peer_allocators(int *count) {
    static const peer_allocator all[] = {
        {"torch native", open_native, close_allocator, enter_thread, allocate, release, use_across,
         trim},
        {"torch expandable", open_expandable, close_allocator, enter_thread, allocate, release,
         use_across, trim},
    };
    *count = 2;
    return all;
}
