/* What nvcc knows by itself, for g++: the qualifiers, the built-in variables and types, and the
 * intrinsics that the kernels use, each with the result that the device gives, to the bit.
 *
 * No header of CUDA is read, so that this builds on any machine. <cuda_fp8.h> and its like are
 * found under tests/emulation/cuda and include this file. Conversions are those of host_number.h,
 * which is where the library defines them; tests/gpu compares these with the device.
 *
 * `extern "C" __global__ void name(arguments a)` becomes an empty block of declarations and an
 * inline C++ function in the namespace of its file. Its symbol tells the type of its argument, and
 * each `__shared__` variable has a symbol too: from these list_kernels.py makes the tables.
 *
 * What differs from a device: a NaN that a plain operator makes keeps the sign and payload that
 * the CPU gives it (the intrinsics give the canonical one), and exp and log in double are the C
 * library's.
 */
#ifndef TENURE_EMULATED_CUDA_H
#define TENURE_EMULATED_CUDA_H

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

extern "C" {
#include "host_number.h"
}

#include "emulator.h"

/* ---- qualifiers and built-in variables ------------------------------------------------------ */

#define EMULATED_NOTHING_IN_C                                                                      \
    {}
#define __global__ EMULATED_NOTHING_IN_C inline __attribute__((used))
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__       static /* blocks run one after the other */

#define threadIdx emulated_current.thread
#define blockIdx  emulated_current.block
#define blockDim  emulated_current.block_size
#define gridDim   emulated_current.grid_size
enum { warpSize = EMULATED_WARP };

/* ---- vectors of built-in types -------------------------------------------------------------- */

#define EMULATED_VECTOR2(T, name, bytes)                                                           \
    struct __attribute__((aligned(bytes))) name {                                                  \
        T x, y;                                                                                    \
    };                                                                                             \
    static inline name make_##name(T x, T y) { return {x, y}; }
#define EMULATED_VECTOR4(T, name, bytes)                                                           \
    struct __attribute__((aligned(bytes))) name {                                                  \
        T x, y, z, w;                                                                              \
    };                                                                                             \
    static inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }

EMULATED_VECTOR2(unsigned char, uchar2, 2)
EMULATED_VECTOR4(unsigned char, uchar4, 4)
EMULATED_VECTOR2(unsigned short, ushort2, 4)
EMULATED_VECTOR4(unsigned short, ushort4, 8)
EMULATED_VECTOR2(int, int2, 8)
EMULATED_VECTOR4(int, int4, 16)
EMULATED_VECTOR2(unsigned, uint2, 8)
EMULATED_VECTOR4(unsigned, uint4, 16)
EMULATED_VECTOR2(float, float2, 8)
EMULATED_VECTOR4(float, float4, 16)
EMULATED_VECTOR2(double, double2, 16)
EMULATED_VECTOR2(long long, longlong2, 16)
EMULATED_VECTOR2(unsigned long long, ulonglong2, 16)

/* ---- bits ----------------------------------------------------------------------------------- */

static inline uint32_t __float_as_uint(float value) { return tn__bits_of(value); }
static inline float __uint_as_float(uint32_t bits) { return tn__float_of(bits); }
static inline int __float_as_int(float value) { return (int)tn__bits_of(value); }
static inline float __int_as_float(int bits) { return tn__float_of((uint32_t)bits); }

static inline uint64_t __double_as_longlong(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double __longlong_as_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Byte i of the result is the byte of y:x that digit i of the selector names; its top bit, which
 * would spread a sign, is not used by any kernel. */
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    uint64_t both = (uint64_t)y << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t digit = selector >> (4 * i) & 0xF;
        if (digit & 8) emulated_fault("__byte_perm with a sign to spread");
        result |= (uint32_t)(both >> (8 * digit) & 0xFF) << (8 * i);
    }
    return result;
}

static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return (uint32_t)(((uint64_t)high << 32 | low) >> (shift & 31));
}
static inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
    return (uint32_t)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
static inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }
static inline int __clzll(long long value) {
    return value ? __builtin_clzll((unsigned long long)value) : 64;
}
static inline int __ffs(int value) { return __builtin_ffs(value); }
static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
static inline uint32_t __umulhi(uint32_t a, uint32_t b) {
    return (uint32_t)((uint64_t)a * b >> 32);
}
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
    return (uint64_t)((unsigned __int128)a * b >> 64);
}

/* ---- arithmetic ----------------------------------------------------------------------------- */

static inline double emulated_canonical(double value) {
    return value != value ? __longlong_as_double(0x7FFFFFFFFFFFFFFFu) : value;
}

static inline float __fadd_rn(float a, float b) { return tn__canonical(a + b); }
static inline float __fsub_rn(float a, float b) { return tn__canonical(a - b); }
static inline float __fmul_rn(float a, float b) { return tn__canonical(a * b); }
static inline float __fmul_rz(float a, float b) { /* of numbers that are not negative */
    const double product = (double)a * (double)b;
    const float nearest = (float)product;
    return tn__canonical((double)nearest > product ? nextafterf(nearest, 0.0f) : nearest);
}
static inline float __fdiv_rn(float a, float b) { return tn__canonical(a / b); }
static inline float __frcp_rn(float a) { return tn__canonical(1.0f / a); }
static inline float __fsqrt_rn(float a) { return tn__canonical(sqrtf(a)); }
static inline float __fmaf_rn(float a, float b, float c) { return tn__canonical(fmaf(a, b, c)); }
static inline double __dadd_rn(double a, double b) { return emulated_canonical(a + b); }
static inline double __dsub_rn(double a, double b) { return emulated_canonical(a - b); }
static inline double __dmul_rn(double a, double b) { return emulated_canonical(a * b); }
static inline double __ddiv_rn(double a, double b) { return emulated_canonical(a / b); }
static inline double __dsqrt_rn(double a) { return emulated_canonical(sqrt(a)); }
static inline double __fma_rn(double a, double b, double c) {
    return emulated_canonical(fma(a, b, c));
}
static inline float __int2float_rn(int value) { return (float)value; }
static inline float __uint2float_rn(unsigned value) { return (float)value; }

/* Out of range they saturate, and a NaN becomes 0. */
static inline int emulated_to_int(double whole) {
    if (whole != whole) return 0;
    return whole >= 2147483647.0 ? INT_MAX : whole <= -2147483648.0 ? INT_MIN : (int)whole;
}
static inline int __float2int_rn(float value) { return emulated_to_int(nearbyint((double)value)); }
static inline int __float2int_rd(float value) { return emulated_to_int(floor((double)value)); }
static inline int __float2int_rz(float value) { return emulated_to_int(trunc((double)value)); }

template <typename A, typename B>
static inline typename std::common_type<A, B>::type min(A a, B b) {
    return b < a ? b : a;
}
template <typename A, typename B>
static inline typename std::common_type<A, B>::type max(A a, B b) {
    return a < b ? b : a;
}

/* ---- memory --------------------------------------------------------------------------------- */

template <typename T> static inline T __ldg(const T *from) { return *from; }
template <typename T> static inline T __ldcs(const T *from) { return *from; }
template <typename T> static inline T __ldcg(const T *from) { return *from; }
template <typename T> static inline void __stcs(T *to, T value) { *to = value; }
template <typename T> static inline void __stcg(T *to, T value) { *to = value; }

template <typename T> static inline T atomicAdd(T *at, T value) {
    static_assert(std::is_integral<T>::value, "the order of atomic sums of floats is not defined");
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
template <typename T> static inline T atomicOr(T *at, T value) {
    return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}
template <typename T> static inline T atomicExch(T *at, T value) {
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}
template <typename T> static inline T atomicCAS(T *at, T expected, T value) {
    __atomic_compare_exchange_n(at, &expected, value, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <typename T> static inline T atomicMax(T *at, T value) {
    T old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (old < value &&
           !__atomic_compare_exchange_n(at, &old, value, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

static inline void __threadfence(void) {}
static inline void __threadfence_block(void) {}

/* ---- the warp and the block ----------------------------------------------------------------- */

static inline void __syncthreads(void) { (void)emulated_in_block(0); }
static inline int __syncthreads_count(int predicate) { return emulated_in_block(predicate); }
static inline int __syncthreads_or(int predicate) { return emulated_in_block(predicate) > 0; }
static inline int __syncthreads_and(int predicate) {
    return emulated_in_block(predicate) == (int)blockDim.x;
}

static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
    (void)emulated_in_warp(EMULATED_SYNC, mask, 0, 0);
}

template <typename T> static inline T emulated_shuffle(unsigned mask, T value, int from) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulated_in_warp(EMULATED_SHUFFLE, mask, bits, from);
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* `width` lanes, a power of two, are a segment of their own; a lane whose source would lie
 * outside of its segment reads itself. */
template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int from, int width = EMULATED_WARP) {
    int segment = emulated_lane() & ~(width - 1);
    return emulated_shuffle(mask, value, segment | (from & (width - 1)));
}
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = EMULATED_WARP) {
    int lane = emulated_lane(), from = lane ^ lanes, end = (lane & ~(width - 1)) + width;
    return emulated_shuffle(mask, value, from < end ? from : lane);
}
template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, int by, int width = EMULATED_WARP) {
    int lane = emulated_lane(), end = (lane & ~(width - 1)) + width;
    return emulated_shuffle(mask, value, lane + by < end ? lane + by : lane);
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, int by, int width = EMULATED_WARP) {
    int lane = emulated_lane(), first = lane & ~(width - 1);
    return emulated_shuffle(mask, value, lane - by >= first ? lane - by : lane);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return (unsigned)emulated_in_warp(EMULATED_BALLOT, mask, predicate != 0, 0);
}
static inline int __any_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) != 0;
}
static inline int __all_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) == mask;
}
template <typename T> static inline unsigned __match_any_sync(unsigned mask, T value) {
    return (unsigned)emulated_in_warp(EMULATED_MATCH, mask, (uint64_t)value, 0);
}

#define EMULATED_REDUCTION(name, T, kind)                                                          \
    static inline T name(unsigned mask, T value) {                                                 \
        return (T)emulated_in_warp(kind, mask, (uint32_t)value, 0);                                \
    }
EMULATED_REDUCTION(__reduce_add_sync, unsigned, EMULATED_ADD)
EMULATED_REDUCTION(__reduce_add_sync, int, EMULATED_ADD)
EMULATED_REDUCTION(__reduce_and_sync, unsigned, EMULATED_AND)
EMULATED_REDUCTION(__reduce_or_sync, unsigned, EMULATED_OR)
EMULATED_REDUCTION(__reduce_xor_sync, unsigned, EMULATED_XOR)
EMULATED_REDUCTION(__reduce_min_sync, unsigned, EMULATED_MIN)
EMULATED_REDUCTION(__reduce_max_sync, unsigned, EMULATED_MAX)
EMULATED_REDUCTION(__reduce_min_sync, int, EMULATED_MIN_SIGNED)
EMULATED_REDUCTION(__reduce_max_sync, int, EMULATED_MAX_SIGNED)

/* ---- fp16 and bf16 -------------------------------------------------------------------------- */

#define EMULATED_FLOAT16(type, raw, to_float, from_float)                                          \
    struct raw {                                                                                   \
        unsigned short x;                                                                          \
    };                                                                                             \
    struct raw##2 {                                                                                \
        unsigned short x, y;                                                                       \
    };                                                                                             \
    struct type {                                                                                  \
        unsigned short bits;                                                                       \
        type() = default;                                                                          \
        type(raw from) : bits(from.x) {}                                                           \
        explicit type(float value) : bits(from_float(value)) {}                                    \
        explicit operator float() const { return to_float(bits); }                                 \
    };

EMULATED_FLOAT16(__half, __half_raw, tn__fp16_to_float, tn__float_to_fp16)
EMULATED_FLOAT16(__nv_bfloat16, __nv_bfloat16_raw, tn__bf16_to_float, tn__float_to_bf16)

struct __attribute__((aligned(4))) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half low, __half high) : x(low), y(high) {}
    __half2(__half_raw2 from) : x(__half_raw{from.x}), y(__half_raw{from.y}) {}
};
typedef __half_raw2 __half2_raw;

struct __attribute__((aligned(4))) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) : x(low), y(high) {}
};

static inline float __half2float(__half value) { return (float)value; }
static inline __half __float2half_rn(float value) { return __half(value); }
static inline __half __float2half(float value) { return __half(value); }
static inline float2 __half22float2(__half2 pair) { return {(float)pair.x, (float)pair.y}; }
static inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
static inline __half2 __float22half2_rn(float2 pair) { return __floats2half2_rn(pair.x, pair.y); }
static inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
static inline unsigned short __half_as_ushort(__half value) { return value.bits; }

static inline float __bfloat162float(__nv_bfloat16 value) { return (float)value; }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
static inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
static inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
    return {(float)pair.x, (float)pair.y};
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
static inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) {
    return __floats2bfloat162_rn(pair.x, pair.y);
}
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    return __nv_bfloat16_raw{bits};
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }

/* ---- FP8 ------------------------------------------------------------------------------------ */

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
typedef unsigned __nv_fp8x4_storage_t;
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };

static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t saturation,
                                                       __nv_fp8_interpretation_t format) {
    if (saturation != __NV_SATFINITE) emulated_fault("a conversion to FP8 that does not saturate");
    return format == __NV_E4M3 ? tn__float_to_e4m3(value) : tn__float_to_e5m2(value);
}

static inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 pair,
                                                            __nv_saturation_t saturation,
                                                            __nv_fp8_interpretation_t format) {
    return (__nv_fp8x2_storage_t)(__nv_cvt_float_to_fp8(pair.x, saturation, format) |
                                  __nv_cvt_float_to_fp8(pair.y, saturation, format) << 8);
}

/* fp16 holds every FP8 number; the NaNs become its canonical one. */
static inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t code,
                                                 __nv_fp8_interpretation_t format) {
    return {tn__float_to_fp16(tn__fp8_values(format == __NV_E4M3 ? TN_E4M3 : TN_E5M2)[code])};
}

static inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t codes,
                                                     __nv_fp8_interpretation_t format) {
    return {__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(codes & 0xFF), format).x,
            __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(codes >> 8), format).x};
}

/* ---- the table of kernels ------------------------------------------------------------------- */

template <typename A, void (*kernel)(A)> static void emulated_invoke(const void *argument) {
    kernel(*(const A *)argument);
}
#define EMULATED_KERNEL(image, name, A)                                                            \
    { #image, #name, sizeof(A), emulated_invoke < A, image::name> }

#endif
