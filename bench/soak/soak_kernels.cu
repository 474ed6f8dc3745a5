// The two kernels of tenure-soak. Word i of a block with tag t holds mix(t + i): neighbouring words
// and blocks have nothing in common, so a word from elsewhere is not taken for the right one.
//
// Each moves 8 bytes a word once: the floor is the size of the block over the memory's rate.
#include <cstddef>
#include <cstdint>

namespace {

__device__ uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ull;
    return x ^ (x >> 29);
}

} // namespace

extern "C" __global__ void soak_fill(uint64_t *words, size_t count, uint64_t tag) {
    size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += stride)
        words[i] = mix(tag + i);
}

extern "C" __global__ void soak_verify(const uint64_t *words, size_t count, uint64_t tag,
                                       unsigned long long *errors) {
    size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    unsigned long long wrong = 0;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += stride)
        wrong += words[i] != mix(tag + i);
    if (wrong) atomicAdd(errors, wrong);
}
