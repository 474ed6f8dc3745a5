/* Kernels of the small operations, and the copies around a GEMM whose shape cuBLASLt refuses.
 *
 * All are bound by memory: each input is read once and each output written once, but for the
 * cross entropy, which reads its logits three times (from the L2 cache after the first).
 */
#include "cuda_tile.cuh"

template <typename T>
__device__ __forceinline__ void store_canonical(void *to, int64_t at, float value) {
    element<T>::store(to, at, canonical_of<T>(value));
}

/* ---- around a GEMM ------------------------------------------------------------------------ */

/* Word w of what begins at an aligned address, of which the first `count` bytes may be read: the
 * rest of the last word can be of another allocation. */
__device__ __forceinline__ uint32_t load_word(const uint32_t *aligned, int w, int count) {
    uint32_t word = 0;
    if (4 * w + 4 <= count) return __ldg(aligned + w);
    for (int b = 4 * w; b < count; b++)
        word |= (uint32_t)__ldg((const unsigned char *)aligned + b) << (8 * (b - 4 * w));
    return word;
}

/* The first `count` bytes from any address, 1 to 16 of them, and zeros: by way of the aligned
 * words that hold them. */
__device__ __forceinline__ void load_bytes(uint32_t (&words)[4], const unsigned char *from,
                                           int count) {
    const int before = (int)((uintptr_t)from % 4);
    const uint32_t *aligned = (const uint32_t *)(from - before);
    uint32_t parts[5];
    if (count == 16 && (uintptr_t)from % 16 == 0) {
        const uint4 piece = __ldg((const uint4 *)from);
        words[0] = piece.x, words[1] = piece.y, words[2] = piece.z, words[3] = piece.w;
        return;
    }
#pragma unroll
    for (int w = 0; w < 5; w++)
        parts[w] = load_word(aligned, w, before + count);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const int valid = count - 4 * w;
        words[w] = __funnelshift_r(parts[w], parts[w + 1], 8 * before);
        if (valid < 4) words[w] = valid <= 0 ? 0 : words[w] & ((1u << (8 * valid)) - 1);
    }
}

extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)
    pad_bytes(const __grid_constant__ tn__cuda_pad_arguments a) {
    const int64_t chunk = (int64_t)blockIdx.x * TN__FLAT_THREADS + threadIdx.x;
    if (chunk >= a.chunks) return;
    const int64_t across = a.dst_row_bytes / 16;
    const int64_t row = chunk / across;
    const int64_t first = (chunk - row * across) * 16;
    uint32_t words[4] = {0, 0, 0, 0};
    if (row < a.rows && first < a.row_bytes)
        load_bytes(words, a.src + row * a.src_stride_bytes + first,
                   (int)min(a.row_bytes - first, (int64_t)16));
    ((uint4 *)a.dst)[chunk] = make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T> __device__ __forceinline__ float in_type(float value);
template <> __device__ __forceinline__ float in_type<float>(float value) { return value; }
template <> __device__ __forceinline__ float in_type<__nv_bfloat16>(float value) {
    return __bfloat162float(__float2bfloat16_rn(value));
}
template <> __device__ __forceinline__ float in_type<__half>(float value) {
    return __half2float(__float2half_rn(value));
}

/* One block writes up to TN__FINISH_ELEMENTS of one row. What is added to D is rounded before, as
 * cuBLASLt does by itself. */
template <typename S, typename D>
__device__ __forceinline__ void finish(const tn__cuda_finish_arguments &a) {
    const uint32_t row = blockIdx.x / a.blocks_across;
    const uint32_t part_of_row = blockIdx.x - row * a.blocks_across;
    const int64_t first = (int64_t)part_of_row * TN__FINISH_ELEMENTS + threadIdx.x;
#pragma unroll
    for (int part = 0; part < TN__FINISH_ELEMENTS / TN__FLAT_THREADS; part++) {
        const int64_t col = first + part * TN__FLAT_THREADS;
        if (col >= a.cols) return;
        const int64_t at = row * a.cols + col;
        float value = element<S>::load(a.src, row * a.src_stride + col);
        if (a.bias) value = __fadd_rn(value, a.bias[col]);
        if (a.accumulate) value = __fadd_rn(element<D>::load(a.dst, at), in_type<D>(value));
        store_canonical<D>(a.dst, at, value);
    }
}

/* ---- element by element ------------------------------------------------------------------- */

/* What a thread of a map takes at once: 16 bytes of what is written. A warp then writes whole
 * sectors of 32 bytes; with 16 of every 32 bytes in each store, memory would see two halves of
 * every sector, and takes half as long again. */
template <typename Y> struct runs_of {
    enum { RUN = element<Y>::VECTOR, RUNS = TN__MAP_ELEMENTS / TN__FLAT_THREADS / RUN };
    static __device__ __forceinline__ int64_t begin(int r) {
        return (int64_t)blockIdx.x * TN__MAP_ELEMENTS + (r * TN__FLAT_THREADS + threadIdx.x) * RUN;
    }
};

/* RUN neighbours, of which `count` are there; they begin at a multiple of RUN elements. */
template <typename T, int RUN>
__device__ __forceinline__ void load_run(float (&values)[RUN], const void *from, int64_t at,
                                         int64_t count) {
    if (count >= RUN) {
        const T *first = (const T *)from + at;
        uint32_t words[RUN * sizeof(T) / 4];
        if constexpr (sizeof words == 8) {
            const uint2 piece = *(const uint2 *)first;
            words[0] = piece.x;
            words[1] = piece.y;
        }
#pragma unroll
        for (int p = 0; p < (int)sizeof words / 16; p++) {
            const uint4 piece = ((const uint4 *)first)[p];
            words[4 * p] = piece.x;
            words[4 * p + 1] = piece.y;
            words[4 * p + 2] = piece.z;
            words[4 * p + 3] = piece.w;
        }
#pragma unroll
        for (int i = 0; i < RUN; i++)
            values[i] = element<T>::value(words, i);
        return;
    }
#pragma unroll
    for (int i = 0; i < RUN; i++)
        values[i] = i < count ? element<T>::load(from, at + i) : 0.0f;
}

template <typename T, int RUN>
__device__ __forceinline__ void store_run(const float (&values)[RUN], void *to, int64_t at,
                                          int64_t count) {
    if (count >= RUN) {
        float canonical[RUN];
#pragma unroll
        for (int i = 0; i < RUN; i++)
            canonical[i] = canonical_of<T>(values[i]);
        *(uint4 *)((T *)to + at) =
            make_uint4(element<T>::word(canonical, 0), element<T>::word(canonical, 1),
                       element<T>::word(canonical, 2), element<T>::word(canonical, 3));
        return;
    }
#pragma unroll
    for (int i = 0; i < RUN; i++)
        if (i < count) store_canonical<T>(to, at + i, values[i]);
}

template <typename X, typename Y>
__device__ __forceinline__ void convert(const tn__cuda_map_arguments &a) {
    using runs = runs_of<Y>;
    float x[runs::RUNS][runs::RUN];
#pragma unroll
    for (int r = 0; r < runs::RUNS; r++)
        load_run<X>(x[r], a.x, runs::begin(r), a.count - runs::begin(r));
#pragma unroll
    for (int r = 0; r < runs::RUNS; r++)
        store_run<Y>(x[r], a.y, runs::begin(r), a.count - runs::begin(r));
}

template <typename X, typename Y>
__device__ __forceinline__ void axpy(const tn__cuda_map_arguments &a) {
    using runs = runs_of<Y>;
    float x[runs::RUNS][runs::RUN], y[runs::RUNS][runs::RUN];
#pragma unroll
    for (int r = 0; r < runs::RUNS; r++) {
        load_run<X>(x[r], a.x, runs::begin(r), a.count - runs::begin(r));
        load_run<Y>(y[r], a.y, runs::begin(r), a.count - runs::begin(r));
    }
#pragma unroll
    for (int r = 0; r < runs::RUNS; r++) {
#pragma unroll
        for (int i = 0; i < runs::RUN; i++)
            y[r][i] = __fmaf_rn(a.alpha, x[r][i], y[r][i]);
        store_run<Y>(y[r], a.y, runs::begin(r), a.count - runs::begin(r));
    }
}

/* ---- embedding ---------------------------------------------------------------------------- */

/* One block copies the row of one token; rows are whole elements of at least 2 bytes. */
extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)
    embed_rows(const __grid_constant__ tn__cuda_embed_arguments a) {
    const unsigned char *from = a.table + a.tokens[blockIdx.x] * a.row_bytes;
    unsigned char *to = a.y + (int64_t)blockIdx.x * a.row_bytes;
    const uintptr_t misalignment = (uintptr_t)from | (uintptr_t)to | (uintptr_t)a.row_bytes;
    if (misalignment % 16 == 0) {
        for (int64_t i = threadIdx.x; i < a.row_bytes / 16; i += TN__FLAT_THREADS)
            ((uint4 *)to)[i] = __ldg((const uint4 *)from + i);
        return;
    }
    for (int64_t i = threadIdx.x; i < a.row_bytes / 2; i += TN__FLAT_THREADS)
        ((unsigned short *)to)[i] = ((const unsigned short *)from)[i];
}

/* ---- cross entropy ------------------------------------------------------------------------ */

struct take_max {
    static __device__ double of(double a, double b) { return fmax(a, b); }
};
struct take_sum {
    static __device__ double of(double a, double b) { return a + b; }
};

/* Over the block, in an order that depends on nothing but the thread count. */
template <typename Take> __device__ __forceinline__ double block_reduce(double value) {
    __shared__ double partial[TN__FLAT_THREADS];
    __syncthreads();
    partial[threadIdx.x] = value;
    for (int half = TN__FLAT_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half)
            partial[threadIdx.x] = Take::of(partial[threadIdx.x], partial[threadIdx.x + half]);
    }
    __syncthreads();
    return partial[0];
}

/* One block takes one token, in double like the host's definition. */
template <typename X, typename Y>
__device__ __forceinline__ void cross_entropy(const tn__cuda_cross_entropy_arguments &a) {
    const int64_t first = (int64_t)blockIdx.x * a.classes;
    const int target = a.targets[blockIdx.x];
    double largest = -INFINITY;
    for (int64_t v = threadIdx.x; v < a.classes; v += TN__FLAT_THREADS)
        largest = fmax(largest, (double)element<X>::load(a.logits, first + v));
    largest = block_reduce<take_max>(largest);
    double sum = 0.0;
    for (int64_t v = threadIdx.x; v < a.classes; v += TN__FLAT_THREADS)
        sum += exp((double)element<X>::load(a.logits, first + v) - largest);
    sum = block_reduce<take_sum>(sum);
    const double of_target = (double)element<X>::load(a.logits, first + target) - largest;
    if (threadIdx.x == 0) store_canonical<float>(a.loss, blockIdx.x, (float)(log(sum) - of_target));
    __syncthreads(); /* dlogits may be the logits' own memory */
    for (int64_t v = threadIdx.x; v < a.classes; v += TN__FLAT_THREADS) {
        double softmax = exp((double)element<X>::load(a.logits, first + v) - largest) / sum;
        double gradient = (softmax - (v == target ? 1.0 : 0.0)) / (double)a.rows;
        store_canonical<Y>(a.dlogits, first + v, (float)gradient);
    }
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define KERNEL(name, arguments, body)                                                              \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)                                 \
        name(const __grid_constant__ arguments a) {                                                \
        body(a);                                                                                   \
    }
#define PAIR(from, X, to, Y)                                                                       \
    KERNEL(finish_##from##_##to, tn__cuda_finish_arguments, (finish<X, Y>))                        \
    KERNEL(convert_##from##_##to, tn__cuda_map_arguments, (convert<X, Y>))                         \
    KERNEL(axpy_##from##_##to, tn__cuda_map_arguments, (axpy<X, Y>))                               \
    KERNEL(cross_entropy_##from##_##to, tn__cuda_cross_entropy_arguments, (cross_entropy<X, Y>))
#define PAIRS(from, X)                                                                             \
    PAIR(from, X, fp32, float)                                                                     \
    PAIR(from, X, bf16, __nv_bfloat16)                                                             \
    PAIR(from, X, fp16, __half)

PAIRS(fp32, float)
PAIRS(bf16, __nv_bfloat16)
PAIRS(fp16, __half)
