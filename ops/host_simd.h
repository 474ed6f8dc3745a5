/* The compiler extensions that the host kernels use, behind names, and nothing else.
 *
 * A kernel body is written once with vectors of 8 floats and forced inline into two functions: one
 * for every CPU, one for CPUs with AVX2 and FMA. Both give the same bits: multiplies and adds are
 * never contracted (-ffp-contract=off), and a fused multiply-add is written as fmaf, which is
 * correctly rounded in either.
 */
#ifndef TENURE_HOST_SIMD_H
#define TENURE_HOST_SIMD_H

#define TN__INLINE static inline __attribute__((always_inline))

/* 8 floats at an address that is aligned for one float. */
typedef float tn__floats8 __attribute__((vector_size(32), aligned(4)));

#if defined(__x86_64__)
#define TN__HAS_WIDE_CLONE 1
#define TN__WIDE_CLONE     __attribute__((target("avx2,fma")))
TN__INLINE int tn__cpu_is_wide(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
#define TN__HAS_WIDE_CLONE 0
TN__INLINE int tn__cpu_is_wide(void) { return 0; }
#endif

#endif
