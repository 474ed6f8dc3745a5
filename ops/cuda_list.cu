/* Quantization of many tensors in one launch: groups of one tensor whose offsets only the device
 * knows, and lists of tensors.
 *
 * First one block writes the list (cuda_list_arguments.h). Then each block of the cast takes one
 * tile: it finds whose it is by bisection (the numbers of the first tiles are a few lines that stay
 * in the L1 cache), takes that tensor's argument to shared memory and does what the kernel of one
 * tensor does. The grid is what there can be at most; blocks beyond the last tile end at once.
 *
 * Bytes moved are those of the same casts one by one (cuda_cast.cu); the list is 128 bytes for each
 * tensor, and 1 to 2 us of latency ahead of the cast.
 */
#include "cuda_groups.cuh"
#include "cuda_quantize.cuh"

/* ---- the list of the groups of a tensor ----------------------------------------------------- */

enum { LIST_THREADS = TN__FLAT_THREADS };

/* Rows of tiles, and fours of scales along the rows, that lie before a group. */
struct group_place {
    int64_t tile_rows;
    int64_t fours;
};

__device__ __forceinline__ int64_t row_scale_at(const tn__cuda_group_arguments &a,
                                                const group_place &at) {
    const int64_t across = a.all.tiles_across;
    return a.is_1d ? across * 4 * at.fours : at.tile_rows * 4 * units_of(across, 4);
}

__device__ __forceinline__ int64_t col_scale_at(const tn__cuda_group_arguments &a,
                                                const group_place &at) {
    const int64_t across = a.all.tiles_across;
    return a.is_1d ? at.tile_rows * 4 * units_of(a.all.cols, 4) : across * 4 * at.fours;
}

__device__ __forceinline__ void put_group(const tn__cuda_group_arguments &a, int64_t g,
                                          int64_t first, int64_t rows, const group_place &at) {
    tn__cuda_quantize_arguments one = a.all;
    const int64_t bytes = first * a.all.cols;
    one.src = (const char *)a.all.src + bytes * a.src_element_bytes;
    one.rows = rows;
    if (a.has_row) {
        one.row.data += bytes;
        one.row.scale += row_scale_at(a, at);
        one.row.scale_stride = 4 * (a.is_1d ? units_of(rows, 4) : units_of(a.all.tiles_across, 4));
    }
    if (a.has_col) {
        one.col.data += bytes;
        one.col.scale += col_scale_at(a, at);
        one.col.scale_stride =
            4 * (a.is_1d ? units_of(a.all.cols, 4) : units_of(units_of(rows, TN__TILE), 4));
        one.col.vectors = ((uint64_t)one.col.data % 16 | (uint64_t)rows % 16) == 0;
    }
    a.list.tensor[g] = one;
    a.list.first_tile[g] = at.tile_rows * a.all.tiles_across;
}

extern "C" __global__ void __launch_bounds__(LIST_THREADS)
    list_groups(const __grid_constant__ tn__cuda_group_arguments a) {
    __shared__ int64_t sums[LIST_THREADS];
    __shared__ uint32_t errors[LIST_THREADS];
    const int is_skipped = a.skip && *a.skip != 0.0f;
    group_place before = {0, 0};
    uint32_t error = is_skipped ? (uint32_t)TN__GROUPS_OK
                                : groups_error(a.offsets, a.list.count, a.all.rows, errors);

    const int is_listed = !is_skipped && error == TN__GROUPS_OK;
    for (int64_t done = 0; is_listed && done < a.list.count; done += LIST_THREADS) {
        const int64_t g = done + threadIdx.x;
        const int64_t first = g < a.list.count ? a.offsets[g] : 0;
        const int64_t rows = g < a.list.count ? a.offsets[g + 1] - first : 0;
        const int64_t tile_rows = units_of(rows, TN__TILE);
        const int64_t fours = units_of(a.is_1d ? rows : tile_rows, 4);
        const group_place own = {before.tile_rows + sum_up_to(sums, tile_rows) - tile_rows,
                                 before.fours};
        before.tile_rows += sums[LIST_THREADS - 1];
        __syncthreads();
        group_place at = {own.tile_rows, own.fours + sum_up_to(sums, fours) - fours};
        before.fours += sums[LIST_THREADS - 1];
        __syncthreads();
        if (g < a.list.count) put_group(a, g, first, rows, at);
    }
    if (is_listed && ((a.has_row && row_scale_at(a, before) > a.row_scale_floats) ||
                      (a.has_col && col_scale_at(a, before) > a.col_scale_floats)))
        error = TN__GROUPS_OVER_CAPACITY;
    if (threadIdx.x != 0) return;
    a.list.first_tile[a.list.count] =
        is_listed && error == TN__GROUPS_OK ? before.tile_rows * a.all.tiles_across : 0;
    if (error != TN__GROUPS_OK && *a.error == 0) *a.error = error;
}

/* ---- the list of tensors that the host knows ------------------------------------------------ */

extern "C" __global__ void __launch_bounds__(LIST_THREADS)
    list_tensors(const __grid_constant__ tn__cuda_list_part a) {
    const int words = (int)(sizeof(tn__cuda_quantize_arguments) / sizeof(uint32_t));
    const uint32_t *from = (const uint32_t *)a.tensor;
    uint32_t *to = (uint32_t *)(a.list.tensor + a.first);
    for (int i = (int)threadIdx.x; i < (int)a.count * words; i += LIST_THREADS)
        to[i] = from[i];
    if ((int)threadIdx.x < (int)a.count)
        a.list.first_tile[a.first + threadIdx.x] = a.first_tile[threadIdx.x];
    if (threadIdx.x == 0 && a.first + a.count == a.list.count)
        a.list.first_tile[a.list.count] = a.skip && *a.skip != 0.0f ? 0 : a.first_tile[a.count];
}

/* ---- the casts ------------------------------------------------------------------------------ */

/* The argument of this block's tensor into shared memory, and the tile's number in it; -1: none. */
__device__ __forceinline__ int64_t take_tile(const tn__cuda_list &list,
                                             tn__cuda_quantize_arguments *argument) {
    const int words = (int)(sizeof *argument / sizeof(uint32_t));
    const int64_t tile = blockIdx.x;
    if (tile >= list.first_tile[list.count]) return -1;
    const int64_t which = place_of(list.first_tile, list.count, tile);
    const uint32_t *from = (const uint32_t *)&list.tensor[which];
    for (int i = (int)threadIdx.x; i < words; i += TN__TILE_THREADS)
        ((uint32_t *)argument)[i] = from[i];
    __syncthreads();
    return tile - list.first_tile[which];
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL>
__device__ __forceinline__ void quantize_listed_1d(const tn__cuda_list &list) {
    __shared__ tn__cuda_quantize_arguments a;
    const int64_t tile = take_tile(list, &a);
    if (tile >= 0) quantize_1d<T, F, ROW, COL>(a, patch_of_tile((uint32_t)tile, a.tiles_across));
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL>
__device__ __forceinline__ void quantize_listed_2d(const tn__cuda_list &list) {
    __shared__ tn__cuda_quantize_arguments a;
    const int64_t tile = take_tile(list, &a);
    if (tile >= 0) quantize_2d<T, F, ROW, COL>(a, patch_of_tile((uint32_t)tile, a.tiles_across));
}

/* ---- the kernels by name ------------------------------------------------------------------ */

/* Registers as for one tensor: cuda_cast.cu. */
#define QUANTIZE(source, T, format, F)                                                             \
    TILE_KERNEL(quantize_list_1d_row_##source##_##format, tn__cuda_list, T, 3,                     \
                (quantize_listed_1d<T, F, true, false>))                                           \
    TILE_KERNEL(quantize_list_1d_col_##source##_##format, tn__cuda_list, T, 3,                     \
                (quantize_listed_1d<T, F, false, true>))                                           \
    TILE_KERNEL(quantize_list_1d_both_##source##_##format, tn__cuda_list, T, 3,                    \
                (quantize_listed_1d<T, F, true, true>))                                            \
    TILE_KERNEL(quantize_list_2d_row_##source##_##format, tn__cuda_list, T, 3,                     \
                (quantize_listed_2d<T, F, true, false>))                                           \
    TILE_KERNEL(quantize_list_2d_col_##source##_##format, tn__cuda_list, T, 3,                     \
                (quantize_listed_2d<T, F, false, true>))                                           \
    TILE_KERNEL(quantize_list_2d_both_##source##_##format, tn__cuda_list, T, 3,                    \
                (quantize_listed_2d<T, F, true, true>))

QUANTIZE(fp32, float, e4m3, __NV_E4M3)
QUANTIZE(fp32, float, e5m2, __NV_E5M2)
QUANTIZE(bf16, __nv_bfloat16, e4m3, __NV_E4M3)
QUANTIZE(bf16, __nv_bfloat16, e5m2, __NV_E5M2)
QUANTIZE(fp16, __half, e4m3, __NV_E4M3)
QUANTIZE(fp16, __half, e5m2, __NV_E5M2)
