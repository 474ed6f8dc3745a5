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

enum { LIST_THREADS = TN__FLAT_THREADS };

/* What follows from where a tensor's planes are and how large it is. */
__device__ __forceinline__ void lay_out(tn__cuda_quantize_arguments &one,
                                        const tn__cuda_list_layout &layout) {
    const uint64_t vector = 16 / layout.element_bytes;
    const int64_t across = units_of(one.cols, TN__TILE), down = units_of(one.rows, TN__TILE);
    one.tiles_across = (uint32_t)across;
    one.src_vectors = ((uint64_t)one.src % 16 | (uint64_t)one.cols % vector) == 0;
    one.row.vectors = (((uint64_t)one.row.data | (uint64_t)one.cols) % vector) == 0;
    one.col.vectors = (((uint64_t)one.col.data | (uint64_t)one.rows) % 16) == 0;
    one.row.scale_stride = 4 * units_of(layout.is_1d ? one.rows : across, 4);
    one.col.scale_stride = 4 * units_of(layout.is_1d ? one.cols : down, 4);
}

/* ---- the list of the groups of a tensor ----------------------------------------------------- */

/* Rows of tiles, and fours of scales along the rows, that lie before a group. */
struct group_place {
    int64_t tile_rows;
    int64_t fours;
};

__device__ __forceinline__ int64_t row_scale_at(const tn__cuda_group_arguments &a,
                                                const group_place &at) {
    const int64_t across = a.all.tiles_across;
    return a.layout.is_1d ? across * 4 * at.fours : at.tile_rows * 4 * units_of(across, 4);
}

__device__ __forceinline__ int64_t col_scale_at(const tn__cuda_group_arguments &a,
                                                const group_place &at) {
    const int64_t across = a.all.tiles_across;
    return a.layout.is_1d ? at.tile_rows * 4 * units_of(a.all.cols, 4) : across * 4 * at.fours;
}

__device__ __forceinline__ void put_group(const tn__cuda_group_arguments &a, int64_t g,
                                          int64_t first, int64_t rows, const group_place &at) {
    tn__cuda_quantize_arguments one = a.all;
    const int64_t bytes = first * a.all.cols;
    one.src = (const char *)a.all.src + bytes * a.layout.element_bytes;
    one.rows = rows;
    if (a.layout.has_row) {
        one.row.data += bytes;
        one.row.scale += row_scale_at(a, at);
    }
    if (a.layout.has_col) {
        one.col.data += bytes;
        one.col.scale += col_scale_at(a, at);
    }
    lay_out(one, a.layout);
    a.list.tensor[g] = one;
    a.list.first_tile[g] = at.tile_rows * a.all.tiles_across;
}

extern "C" __global__ void __launch_bounds__(LIST_THREADS)
    list_groups(const __grid_constant__ tn__cuda_group_arguments a) {
    __shared__ int64_t tile_sums[GROUPS_WARPS], four_sums[GROUPS_WARPS];
    let_the_kernel_behind_start();
    const bool skips = is_skipped(a.all.skip);
    group_place before = {0, 0};
    uint32_t error =
        skips ? (uint32_t)TN__GROUPS_OK : groups_error(a.offsets, a.list.count, a.all.rows);

    const bool is_listed = !skips && error == TN__GROUPS_OK;
    for (int64_t done = 0; is_listed && done < a.list.count; done += LIST_THREADS) {
        const int64_t g = done + threadIdx.x;
        const int64_t first = g < a.list.count ? a.offsets[g] : 0;
        const int64_t rows = g < a.list.count ? a.offsets[g + 1] - first : 0;
        const int64_t tile_rows = units_of(rows, TN__TILE);
        const int64_t fours = units_of(a.layout.is_1d ? rows : tile_rows, 4);
        group_place all;
        const group_place at = {before.tile_rows + sum_up_to(tile_sums, tile_rows, &all.tile_rows) -
                                    tile_rows,
                                before.fours + sum_up_to(four_sums, fours, &all.fours) - fours};
        before.tile_rows += all.tile_rows;
        before.fours += all.fours;
        if (g < a.list.count) put_group(a, g, first, rows, at);
        __syncthreads();
    }
    if (is_listed && ((a.layout.has_row && row_scale_at(a, before) > a.row_scale_floats) ||
                      (a.layout.has_col && col_scale_at(a, before) > a.col_scale_floats)))
        error = TN__GROUPS_OVER_CAPACITY;
    if (threadIdx.x != 0) return;
    a.list.first_tile[a.list.count] =
        is_listed && error == TN__GROUPS_OK ? before.tile_rows * a.all.tiles_across : 0;
    if (error != TN__GROUPS_OK && *a.error == 0) *a.error = error;
}

/* ---- the list of tensors that the host knows ------------------------------------------------ */

extern "C" __global__ void __launch_bounds__(LIST_THREADS)
    list_tensors(const __grid_constant__ tn__cuda_list_part a) {
    let_the_kernel_behind_start();
    const uint32_t i = threadIdx.x;
    if (i < a.count) {
        const tn__cuda_listed &listed = a.tensor[i];
        tn__cuda_quantize_arguments one = a.all;
        one.src = listed.src;
        one.rows = listed.rows;
        one.cols = listed.cols;
        one.row.data = listed.row_data;
        one.row.scale = listed.row_scale;
        one.col.data = listed.col_data;
        one.col.scale = listed.col_scale;
        lay_out(one, a.layout);
        a.list.tensor[a.first + i] = one;
        a.list.first_tile[a.first + i] = a.first_tile[i];
    }
    if (i == 0 && a.first + a.count == a.list.count)
        a.list.first_tile[a.list.count] = is_skipped(a.all.skip) ? 0 : a.first_tile[a.count];
}

/* ---- the casts ------------------------------------------------------------------------------ */

/* The argument of this block's tensor into shared memory, and the tile's number in it; -1: none. */
__device__ __forceinline__ int64_t take_tile(const tn__cuda_list &list,
                                             tn__cuda_quantize_arguments *argument) {
    const int words = (int)(sizeof *argument / sizeof(uint32_t));
    const int64_t tile = blockIdx.x;
    wait_for_the_kernel_ahead();
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
