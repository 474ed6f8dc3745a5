/* Kernels that cast a part of a weight, a flat range of its elements that may begin and end within
 * a row of a 128 x 128 tile: the amax of what it holds of each tile, and the cast by given amaxes.
 *
 * A block takes a tile; a thread takes pieces of 16 bytes of its rows. A piece that an end of the
 * range cuts is read and written element by element, so no byte outside of the range is touched.
 * Bound by memory: of n elements of s bytes, s n in for the amax; s n in and n out for the cast.
 */
#include "cuda_scale.cuh"
#include "cuda_shard_arguments.h"

/* Elements of a 16-byte piece that the part holds, as floats; the others are 0. Gives whether it
 * holds all of them. `at` is the number of the first in the weight. */
template <typename T>
__device__ __forceinline__ bool load_piece(const tn__cuda_shard_arguments &a, int64_t at, int width,
                                           float (&values)[element<T>::VECTOR]) {
    const int vector = element<T>::VECTOR;
    const bool is_whole = width == vector && at >= a.first && at + vector <= a.end;
    if (is_whole && a.vectors) {
        const uint4 piece = __ldg((const uint4 *)((const T *)a.src + (at - a.first)));
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int j = 0; j < vector; j++)
            values[j] = element<T>::value(words, j);
        return true;
    }
#pragma unroll
    for (int j = 0; j < vector; j++) {
        values[j] = 0.0f;
        if (j < width && at + j >= a.first && at + j < a.end)
            values[j] = element<T>::load(a.src, at + j - a.first);
    }
    return is_whole;
}

/* Where a thread's piece lies in pass `pass` over the tile; width 0 or less: nowhere. */
struct piece_place {
    int64_t at;
    int width;
};

template <typename T>
__device__ __forceinline__ piece_place piece_of_thread(const tn__cuda_shard_arguments &a,
                                                       int pass) {
    const int across = TN__TILE / element<T>::VECTOR;
    const int64_t row = (int64_t)(blockIdx.x / a.tiles_across) * TN__TILE +
                        pass * (TN__TILE_THREADS / across) + (int)threadIdx.x / across;
    const int64_t col = (int64_t)(blockIdx.x % a.tiles_across) * TN__TILE +
                        (int)threadIdx.x % across * element<T>::VECTOR;
    piece_place place;
    place.at = row * a.cols + col;
    place.width = row < a.rows ? (int)min(a.cols - col, (int64_t)element<T>::VECTOR) : 0;
    if (place.at >= a.end || place.at + element<T>::VECTOR <= a.first) place.width = 0;
    return place;
}

template <typename T> struct tile_passes {
    enum { COUNT = TN__TILE * TN__TILE / element<T>::VECTOR / TN__TILE_THREADS };
};

template <typename T>
__device__ __forceinline__ void amax_of_part(const tn__cuda_shard_arguments &a) {
    __shared__ float warp_max[WARPS];
    float amax = 0.0f;
#pragma unroll 4
    for (int pass = 0; pass < tile_passes<T>::COUNT; pass++) {
        const piece_place place = piece_of_thread<T>(a, pass);
        float values[element<T>::VECTOR];
        if (place.width <= 0) continue;
        load_piece<T>(a, place.at, place.width, values);
#pragma unroll
        for (int j = 0; j < element<T>::VECTOR; j++)
            amax = fmaxf(amax, fabsf(values[j]));
    }
    /* Floats that are not negative compare as their bits do. */
    amax = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(amax)));
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = amax;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 0; w < WARPS; w++)
        amax = fmaxf(amax, warp_max[w]);
    a.amax[blockIdx.x] = amax;
}

/* One thread: the scale, and what pads its row behind the last one. */
__device__ __forceinline__ void put_scale(const tn__cuda_shard_arguments &a, float inverse) {
    const int64_t row = blockIdx.x / a.tiles_across, col = blockIdx.x % a.tiles_across;
    float *to = a.scale + row * a.scale_stride;
    to[col] = inverse;
    if (col + 1 < a.tiles_across) return;
    for (int64_t c = a.tiles_across; c < a.scale_stride; c++)
        to[c] = 0.0f;
}

template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void store_piece(const tn__cuda_shard_arguments &a,
                                            const piece_place &place, bool is_whole,
                                            const float (&values)[element<T>::VECTOR]) {
    const int vector = element<T>::VECTOR;
    uint32_t words[vector / 4];
#pragma unroll
    for (int w = 0; w < vector / 4; w++)
        words[w] =
            cast_four<F>(values[4 * w], values[4 * w + 1], values[4 * w + 2], values[4 * w + 3]);
    unsigned char *to = a.data + (place.at - a.first);
    if (is_whole && a.data_vectors) {
        if constexpr (vector == 8)
            *(uint2 *)to = make_uint2(words[0], words[1]);
        else
            *(uint32_t *)to = words[0];
        return;
    }
#pragma unroll
    for (int j = 0; j < vector; j++)
        if (j < place.width && place.at + j >= a.first && place.at + j < a.end)
            to[j] = (unsigned char)(words[j / 4] >> (8 * (j % 4)));
}

template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void quantize_part(const tn__cuda_shard_arguments &a) {
    if (a.skip && *a.skip != 0.0f) return;
    const float scale = block_scale<T, F>(a.amax[blockIdx.x], a.amax_epsilon, a.is_pow2);
    if (a.scale && threadIdx.x == 0) put_scale(a, inverse_scale(scale));
#pragma unroll 2
    for (int pass = 0; pass < tile_passes<T>::COUNT; pass++) {
        const piece_place place = piece_of_thread<T>(a, pass);
        float values[element<T>::VECTOR];
        if (place.width <= 0) continue;
        const bool is_whole = load_piece<T>(a, place.at, place.width, values);
#pragma unroll
        for (int j = 0; j < element<T>::VECTOR; j++)
            values[j] = __fmul_rn(values[j], scale);
        store_piece<T, F>(a, place, is_whole, values);
    }
}

#define KERNEL(name, body)                                                                         \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS)                                 \
        name(const __grid_constant__ tn__cuda_shard_arguments a) {                                 \
        body(a);                                                                                   \
    }
#define SHARD(source, T)                                                                           \
    KERNEL(shard_amax_##source, (amax_of_part<T>))                                                 \
    KERNEL(shard_quantize_##source##_e4m3, (quantize_part<T, __NV_E4M3>))                          \
    KERNEL(shard_quantize_##source##_e5m2, (quantize_part<T, __NV_E5M2>))

SHARD(fp32, float)
SHARD(bf16, __nv_bfloat16)
SHARD(fp16, __half)
