/* Kernels of the norms that take whole rows: statistics, the value, and the 1D ROW plane, all from
 * one read of x.
 *
 * A block of 256 threads takes a row, or several short ones, and holds it in registers. Bytes that
 * must move for each element of s bytes: s to read x (with a residual 3 s: x, the residual, their
 * sum), s for the value and 1 for the plane. Rows that can not be moved by pieces are not held.
 */
#include "cuda_norm_row.cuh"

template <typename T, __nv_fp8_interpretation_t F, int STEPS, bool VECTORS>
__device__ __forceinline__ void norm_rows(const tn__cuda_norm_arguments &a) {
    int turn = 0;
    if (is_skipped(a.skip)) return;
    const row_place at = row_of_thread(a, (int64_t)blockIdx.x * (TN__FLAT_THREADS / a.row_threads));
    norm_row<T, F, STEPS, VECTORS>(a, at, a.cast.row.data != nullptr, true, turn);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

/* Registers for as many blocks on a multiprocessor as hold a row without spilling. */
#define KERNEL(name, T, F, steps, vectors, blocks)                                                 \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS, blocks)                         \
        name(const __grid_constant__ tn__cuda_norm_arguments a) {                                  \
        norm_rows<T, F, steps, vectors>(a);                                                        \
    }
#define NORM(name, T, F, blocks_2, blocks_4, blocks_8)                                             \
    KERNEL(norm_rows_1_##name, T, F, 1, false, blocks_4)                                           \
    KERNEL(norm_rows_2_##name, T, F, 2, true, blocks_2)                                            \
    KERNEL(norm_rows_4_##name, T, F, 4, true, blocks_4)                                            \
    KERNEL(norm_rows_8_##name, T, F, 8, true, blocks_8)

NORM(fp32_e4m3, float, __NV_E4M3, 2, 2, 1)
NORM(fp32_e5m2, float, __NV_E5M2, 2, 2, 1)
NORM(bf16_e4m3, __nv_bfloat16, __NV_E4M3, 5, 4, 3)
NORM(bf16_e5m2, __nv_bfloat16, __NV_E5M2, 5, 4, 3)
NORM(fp16_e4m3, __half, __NV_E4M3, 5, 4, 3)
NORM(fp16_e5m2, __half, __NV_E5M2, 5, 4, 3)
