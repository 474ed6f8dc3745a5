/* Kernels of the casts: quantize (1x128, 128x1, 128x128 blocks), dequantize, transpose.
 *
 * One block of threads takes one 128 x 128 tile of the source and reads it once, into registers
 * (cuda_tile.cuh). Bytes that must move for N elements of s bytes: s N in, N out for each plane,
 * and 1/32 N (1D) or next to nothing (2D) for each plane's scales. From bf16 into both planes
 * that is 4.06 N: at 4.2 TB/s an H200 can not do it in less than 0.97 ns per 1000 elements.
 */
#include "cuda_dequantize.cuh"
#include "cuda_produce_arguments.h"
#include "cuda_quantize.cuh"

/* ---- quantize one tensor --------------------------------------------------------------------- */

/* Of 16-bit elements and with COL, whose writes are far apart, the tile that is read a third or a
 * fourth of the blocks that run at once later; otherwise nothing is gained. */
template <typename T>
__device__ __forceinline__ void prefetch_source(const tn__cuda_quantize_arguments &a) {
    const patch_place next = patch_of_tile(blockIdx.x + TN__MULTIPROCESSORS, a.tiles_across);
    prefetch_tile(a.src, a.rows, a.cols * (int64_t)sizeof(T), next.tile_first_row,
                  next.tile_first_col * (int64_t)sizeof(T), TN__TILE * (int)sizeof(T));
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL>
__device__ __forceinline__ void quantize_tensor_1d(const tn__cuda_quantize_arguments &a) {
    const patch_place at = patch_of_thread(a.tiles_across);
    uint32_t words[PATCH][patch_words<T>::COUNT];
    if (is_skipped(a.skip)) return;
    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    if (COL && sizeof(T) == 2) prefetch_source<T>(a);
    quantize_patches_1d<T, F, ROW, COL>(a, at, words);
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL>
__device__ __forceinline__ void quantize_tensor_2d(const tn__cuda_quantize_arguments &a) {
    const patch_place at = patch_of_thread(a.tiles_across);
    uint32_t words[PATCH][patch_words<T>::COUNT];
    if (is_skipped(a.skip)) return;
    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    if (COL && sizeof(T) == 2) prefetch_source<T>(a);
    quantize_patches_2d<T, F, ROW, COL>(a, at, words);
}

/* ---- dequantize --------------------------------------------------------------------------- */

template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void dequantize_row(const tn__cuda_dequantize_arguments &a) {
    const patch_place at = patch_of_thread(a.tiles_across);
    uint2 bytes[PATCH];
    if (is_skipped(a.skip)) return;
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        bytes[i] = load_row_bytes<T>(a, at, i);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        float scale = 0.0f;
        if (at.row + i < a.rows)
            scale = a.is_1d
                        ? a.src.scale[at.tile_col * a.src.scale_stride + at.row + i]
                        : a.src.scale[at.tile_row * a.src.scale_stride + at.tile_col * a.tile_step];
        float values[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j += 2) {
            uint32_t word = j < 4 ? bytes[i].x : bytes[i].y;
            float2 pair = fp8_pair<F>(word >> (8 * (j % 4)));
            values[j] = __fmul_rn(pair.x, scale);
            values[j + 1] = __fmul_rn(pair.y, scale);
        }
        store_values<T>(a, at, i, values);
    }
}

template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void dequantize_col(const tn__cuda_dequantize_arguments &a) {
    __shared__ uint4 transposed[TILE_PIECES];
    const int vector = element<T>::VECTOR;
    const patch_place at = patch_of_thread(a.tiles_across);
    float scale[PATCH];
    uint2 bytes[PATCH];

    if (is_skipped(a.skip)) return;
    transposed_load<element<T>::VECTOR>(transposed, a.src.data, a.rows, a.cols, a.src.vectors, at);
    load_column_scales<T>(scale, a, at);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        bytes[j] = transposed_get<vector>(transposed, patch_column<T>(at.lane16, j), at.unit);
    const int height = patch_rows_in(a.rows, at);
    T *to = dst_row<T>(a, at);
#pragma unroll
    for (int i = 0; i < PATCH; i += 2) {
        float upper[PATCH], lower[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j++) {
            uint32_t word = i < 4 ? bytes[j].x : bytes[j].y;
            float2 pair = fp8_pair<F>(word >> (8 * (i % 4)));
            upper[j] = __fmul_rn(pair.x, scale[j]);
            lower[j] = __fmul_rn(pair.y, scale[j]);
        }
        if (i < height) store_values_at<T>(a, at, to, upper);
        if (i + 1 < height) store_values_at<T>(a, at, to + a.cols, lower);
        to += 2 * a.cols;
    }
}

/* ---- transpose ----------------------------------------------------------------------------
 *
 * A block takes two tiles, one below the other, so that it writes pieces of 256 bytes. A warp takes
 * 16 rows of each and reads 4 of them at once, 16 bytes a lane: a lane holds 4 rows of 16 columns,
 * which registers turn into 16 columns of 4 bytes. Those go to shared memory as words: word u (rows
 * 4 u ... 4 u + 3) of column k lies at 64 k + (u ^ 4 (k / 16)), so that a warp writes 32 banks at
 * once and 16 lanes read a column back in whole pieces of 16 bytes.
 *
 * It is bound by memory: for 4096 x 4096, 32 MiB in 8 us at 4.2 TB/s, less what stays in the L2
 * cache.
 */

enum {
    LANE_ROWS = 4,
    LANE_COLS = 16,
    STACK = TN__TRANSPOSE_TILES,
    COLUMN_WORDS = STACK * TN__TILE / LANE_ROWS,
    COLUMN_PIECES = COLUMN_WORDS / 4,
    COLUMNS_AT_ONCE = TN__TILE_THREADS / COLUMN_PIECES
};

/* Where this lane's 4 rows and 16 columns of one of the tiles lie, and which word of a column they
 * become. */
struct lane_place {
    int64_t row, col;
    int tile_col; /* of the first column, in the tile */
    int word;
};

__device__ __forceinline__ lane_place lane_of_thread(int64_t first_row, int64_t first_col,
                                                     int tile) {
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    lane_place place;
    place.word = tile * (TN__TILE / LANE_ROWS) + warp * 4 + lane / 8;
    place.tile_col = lane % 8 * LANE_COLS;
    place.row = first_row + place.word * LANE_ROWS;
    place.col = first_col + place.tile_col;
    return place;
}

/* What lies outside of the matrix is 0. */
__device__ __forceinline__ void load_lane(const tn__cuda_transpose_arguments &a,
                                          const lane_place &at,
                                          uint32_t (&words)[LANE_ROWS][LANE_COLS / 4]) {
    const unsigned char *from = a.from.data + at.row * a.cols + at.col;
    const int height = at.col < a.cols ? (int)min(a.rows - at.row, (int64_t)LANE_ROWS) : 0;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (a.from.vectors) {
            if (i < height) piece = __ldg((const uint4 *)from);
        } else {
            uint32_t bytes[4] = {0, 0, 0, 0};
#pragma unroll
            for (int j = 0; j < LANE_COLS; j++)
                if (i < height && at.col + j < a.cols)
                    bytes[j / 4] |= (uint32_t)from[j] << (8 * (j % 4));
            piece = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
        }
        from += a.cols;
        words[i][0] = piece.x;
        words[i][1] = piece.y;
        words[i][2] = piece.z;
        words[i][3] = piece.w;
    }
}

__device__ __forceinline__ int column_word(int column, int word) {
    return column * COLUMN_WORDS + (word ^ (column / LANE_COLS * 4));
}

__device__ __forceinline__ void put_lane(uint32_t *tile, const lane_place &at,
                                         const uint32_t (&words)[LANE_ROWS][LANE_COLS / 4]) {
#pragma unroll
    for (int q = 0; q < LANE_COLS / 4; q++) {
        const uint32_t rows[LANE_ROWS] = {words[0][q], words[1][q], words[2][q], words[3][q]};
        uint32_t columns[4];
        transpose_4x4(rows, columns);
#pragma unroll
        for (int j = 0; j < 4; j++)
            tile[column_word(at.tile_col + 4 * q + j, at.word)] = columns[j];
    }
}

/* The first `count` bytes, where rows do not begin at multiples of 16. */
__device__ __forceinline__ void store_bytes(unsigned char *to, uint4 bytes, int count) {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (i < count) to[i] = (unsigned char)(words[i / 4] >> (8 * (i % 4)));
}

/* Writes the tiles to `to` [cols, rows]: 16 lanes a column. */
__device__ __forceinline__ void store_columns(const tn__cuda_transpose_arguments &a,
                                              int64_t first_row, int64_t first_col,
                                              const uint32_t *tile) {
    const int piece = (int)(threadIdx.x % COLUMN_PIECES);
    const int first = (int)(threadIdx.x / COLUMN_PIECES);
    const int64_t row = first_row + piece * 16, col = first_col + first;
    const int width = row < a.rows ? (int)min(a.cols - col, (int64_t)TN__TILE) : 0;
    unsigned char *to = a.to.data + col * a.rows + row;
#pragma unroll
    for (int column = 0; column < TN__TILE; column += COLUMNS_AT_ONCE) {
        const uint4 bytes = *(const uint4 *)&tile[column_word(column + first, piece * 4)];
        if (column < width) {
            if (a.to.vectors)
                *(uint4 *)to = bytes;
            else
                store_bytes(to, bytes, (int)min(a.rows - row, (int64_t)16));
        }
        to += COLUMNS_AT_ONCE * a.rows;
    }
}

extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS, 4)
    transpose_plane(const __grid_constant__ tn__cuda_transpose_arguments a) {
    __shared__ __align__(16) uint32_t tile[TN__TILE * COLUMN_WORDS];
    const uint32_t stack = blockIdx.x / a.tiles_across;
    const uint32_t tile_col = blockIdx.x - stack * a.tiles_across;
    const int64_t first_row = (int64_t)stack * STACK * TN__TILE;
    const int64_t first_col = (int64_t)tile_col * TN__TILE;
    uint32_t words[STACK][LANE_ROWS][LANE_COLS / 4];

    wait_for_the_kernel_ahead();
#pragma unroll
    for (int t = 0; t < STACK; t++)
        load_lane(a, lane_of_thread(first_row, first_col, t), words[t]);
    const uint32_t tile_row = stack * STACK + threadIdx.x;
    if (threadIdx.x < STACK && tile_row < a.scale_rows && tile_col < a.scale_cols)
        tile_scale_put(a.to, tile_col, tile_row, a.scale_rows,
                       a.from.scale[tile_row * a.from.scale_stride + tile_col]);
#pragma unroll
    for (int t = 0; t < STACK; t++)
        put_lane(tile, lane_of_thread(first_row, first_col, t), words[t]);
    __syncthreads();
    store_columns(a, first_row, first_col, tile);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define QUANTIZE(source, T, format, F)                                                             \
    TILE_KERNEL(quantize_1d_row_##source##_##format, tn__cuda_quantize_arguments, T, 3,            \
                (quantize_tensor_1d<T, F, true, false>))                                           \
    TILE_KERNEL(quantize_1d_col_##source##_##format, tn__cuda_quantize_arguments, T, 4,            \
                (quantize_tensor_1d<T, F, false, true>))                                           \
    TILE_KERNEL(quantize_1d_both_##source##_##format, tn__cuda_quantize_arguments, T, 3,           \
                (quantize_tensor_1d<T, F, true, true>))                                            \
    TILE_KERNEL(quantize_2d_row_##source##_##format, tn__cuda_quantize_arguments, T, 3,            \
                (quantize_tensor_2d<T, F, true, false>))                                           \
    TILE_KERNEL(quantize_2d_col_##source##_##format, tn__cuda_quantize_arguments, T, 4,            \
                (quantize_tensor_2d<T, F, false, true>))                                           \
    TILE_KERNEL(quantize_2d_both_##source##_##format, tn__cuda_quantize_arguments, T, 3,           \
                (quantize_tensor_2d<T, F, true, true>))                                            \
    TILE_KERNEL(dequantize_row_##format##_##source, tn__cuda_dequantize_arguments, T, 3,           \
                (dequantize_row<T, F>))                                                            \
    TILE_KERNEL(dequantize_col_##format##_##source, tn__cuda_dequantize_arguments, T, 3,           \
                (dequantize_col<T, F>))

QUANTIZE(fp32, float, e4m3, __NV_E4M3)
QUANTIZE(fp32, float, e5m2, __NV_E5M2)
QUANTIZE(bf16, __nv_bfloat16, e4m3, __NV_E4M3)
QUANTIZE(bf16, __nv_bfloat16, e5m2, __NV_E5M2)
QUANTIZE(fp16, __half, e4m3, __NV_E4M3)
QUANTIZE(fp16, __half, e5m2, __NV_E5M2)
