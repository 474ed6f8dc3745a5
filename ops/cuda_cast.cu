/* Kernels of the casts: quantize (1x128, 128x1, 128x128 blocks), dequantize, transpose.
 *
 * One block of threads takes one 128 x 128 tile of the source and reads it once, into registers
 * (cuda_tile.cuh). Bytes that must move for N elements of s bytes: s N in, N out for each plane,
 * and 1/32 N (1D) or next to nothing (2D) for each plane's scales. From bf16 into both planes
 * that is 4.06 N: at 4.2 TB/s an H200 can not do it in less than 0.97 ns per 1000 elements.
 *
 * A tile at the edge holds zeros beyond it, which no amax sees; the last tiles of a row or
 * column of tiles write the zeros that pad the scales.
 */
#include "cuda_scale.cuh"

/* ---- quantize, 1D ------------------------------------------------------------------------- */

/* The 16 lanes of a half warp each hold maxima of 8 rows; returns, on lane c, the maximum of row
 * c / 2 over the 16 lanes. Each step halves the rows that a lane is still concerned with. */
__device__ __forceinline__ float half_warp_row_max(const float (&row_max)[PATCH], int lane16) {
    float four[4], two[2];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float keep = lane16 & 8 ? row_max[r + 4] : row_max[r];
        float give = lane16 & 8 ? row_max[r] : row_max[r + 4];
        four[r] = fmaxf(keep, __shfl_xor_sync(0xFFFFFFFFu, give, 8));
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float keep = lane16 & 4 ? four[r + 2] : four[r];
        float give = lane16 & 4 ? four[r] : four[r + 2];
        two[r] = fmaxf(keep, __shfl_xor_sync(0xFFFFFFFFu, give, 4));
    }
    float keep = lane16 & 2 ? two[1] : two[0];
    float give = lane16 & 2 ? two[0] : two[1];
    float one = fmaxf(keep, __shfl_xor_sync(0xFFFFFFFFu, give, 2));
    return fmaxf(one, __shfl_xor_sync(0xFFFFFFFFu, one, 1));
}

/* Casts one row of the patch. */
template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ uint2 cast_row(const uint32_t *words, float scale) {
    uint32_t bytes[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int j = half * 4;
        bytes[half] = cast_four<F>(__fmul_rn(element<T>::value(words, j), scale),
                                   __fmul_rn(element<T>::value(words, j + 1), scale),
                                   __fmul_rn(element<T>::value(words, j + 2), scale),
                                   __fmul_rn(element<T>::value(words, j + 3), scale));
    }
    return make_uint2(bytes[0], bytes[1]);
}

/* Writes one row of the patch, byte by byte. */
template <typename T>
__device__ __forceinline__ void store_row_bytes(const tn__cuda_quantize_arguments &a,
                                                const patch_place &at, int i, uint2 bytes) {
    unsigned char *to = a.row.data + (at.row + i) * a.cols + at.tile_first_col;
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        int column = patch_column<T>(at.lane16, j);
        if (at.tile_first_col + column < a.cols)
            to[column] = (unsigned char)((j < 4 ? bytes.x : bytes.y) >> (8 * (j % 4)));
    }
}

/* Casts and writes the patch; `scale_of(i)` gives the scale of row i and is called by all lanes. */
template <typename T, __nv_fp8_interpretation_t F, typename ScaleOf>
__device__ __forceinline__ void
store_rows(const tn__cuda_quantize_arguments &a, const patch_place &at,
           const uint32_t (&words)[PATCH][patch_words<T>::COUNT], ScaleOf scale_of) {
    const int rows_in = patch_rows_in(a.rows, at);
    if (!a.row.vectors) {
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            const float scale = scale_of(i);
            if (i < rows_in) store_row_bytes<T>(a, at, i, cast_row<T, F>(words[i], scale));
        }
        return;
    }
    const int first = patch_column<T>(at.lane16, 0), second = patch_column<T>(at.lane16, 4);
    const int height = at.tile_first_col + first < a.cols ? rows_in : 0;
    const int second_height = at.tile_first_col + second < a.cols ? rows_in : 0;
    unsigned char *to = a.row.data + at.row * a.cols + at.tile_first_col + first;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const float scale = scale_of(i);
        if (i < height) { /* the cast too: a branch keeps the compiler from mixing all rows */
            const uint2 bytes = cast_row<T, F>(words[i], scale);
            if constexpr (sizeof(T) == 2) {
                *(uint2 *)to = bytes;
            } else {
                *(uint32_t *)to = bytes.x;
                if (i < second_height) *(uint32_t *)(to + (second - first)) = bytes.y;
            }
        }
        to += a.cols;
    }
}

template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void quantize_rows(const tn__cuda_quantize_arguments &a,
                                              const patch_place &at,
                                              uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    float row_max[PATCH];
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        row_max[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            row_max[i] = fmaxf(row_max[i], fabsf(element<T>::value(words[i], j)));
    }
    const float amax = half_warp_row_max(row_max, at.lane16);
    patch_stay_packed<T>(words);
    const float scale = block_scale<T, F>(amax, a.amax_epsilon, a.is_pow2);
    const int64_t own_row = at.row + at.lane16 / 2;
    if (at.lane16 % 2 == 0 && own_row < a.row.scale_stride)
        a.row.scale[at.tile_col * a.row.scale_stride + own_row] =
            own_row < a.rows ? inverse_scale(scale) : 0.0f;
    store_rows<T, F>(a, at, words,
                     [=](int i) { return __shfl_sync(0xFFFFFFFFu, scale, 2 * i, 16); });
}

/* Maxima of the 8 columns over the warp's 16 rows, to shared memory. */
template <typename T>
__device__ __forceinline__ void
column_max_put(float (*warp_max)[TN__TILE], const patch_place &at,
               const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    float column_max[PATCH];
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        column_max[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            column_max[j] = fmaxf(column_max[j], fabsf(element<T>::value(words[i], j)));
    }
    const int upper = at.unit & 1; /* the upper half warp keeps columns 4 ... 7 */
    float kept[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float keep = upper ? column_max[j + 4] : column_max[j];
        float give = upper ? column_max[j] : column_max[j + 4];
        kept[j] = fmaxf(keep, __shfl_xor_sync(0xFFFFFFFFu, give, 16));
    }
    int column = patch_column<T>(at.lane16, upper * 4);
    *(float4 *)&warp_max[at.unit / 2][column] = make_float4(kept[0], kept[1], kept[2], kept[3]);
}

/* Thread c < 128: the scale of column c from the warps' maxima. */
template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void
column_scale_put(const tn__cuda_quantize_arguments &a, const patch_place &at,
                 const float (*warp_max)[TN__TILE], float *column_scale) {
    const int column = (int)threadIdx.x;
    if (column >= TN__TILE) return;
    float amax = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        amax = fmaxf(amax, warp_max[w][column]);
    const float scale = block_scale<T, F>(amax, a.amax_epsilon, a.is_pow2);
    const int64_t col = at.tile_first_col + column;
    column_scale[column] = scale;
    if (col < a.col.scale_stride)
        a.col.scale[at.tile_row * a.col.scale_stride + col] =
            col < a.cols ? inverse_scale(scale) : 0.0f;
}

/* The 8 x 8 patch as bytes into the transposed tile. */
template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void column_put(uint4 *tile, const patch_place &at, int j,
                                           const uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                           float scale) {
    float scaled[PATCH];
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        scaled[i] = __fmul_rn(element<T>::value(words[i], j), scale);
    uint2 bytes = make_uint2(cast_four<F>(scaled[0], scaled[1], scaled[2], scaled[3]),
                             cast_four<F>(scaled[4], scaled[5], scaled[6], scaled[7]));
    transposed_put<element<T>::VECTOR>(tile, patch_column<T>(at.lane16, j), at.unit, bytes);
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL>
__device__ __forceinline__ void quantize_1d(const tn__cuda_quantize_arguments &a) {
    __shared__ uint4 transposed[TILE_PIECES]; /* not there at all without COL */
    __shared__ __align__(16) float warp_max[WARPS][TN__TILE];
    __shared__ __align__(16) float column_scale[TN__TILE];
    const patch_place at = patch_of_thread(a.tiles_across);
    uint32_t words[PATCH][patch_words<T>::COUNT];

    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    if constexpr (COL) {
        column_max_put<T>(warp_max, at, words);
        patch_stay_packed<T>(words);
    }
    /* The row plane's stores are under way while the block waits for the columns' maxima. */
    if constexpr (ROW) quantize_rows<T, F>(a, at, words);
    if constexpr (COL) {
        patch_stay_packed<T>(words);
        __syncthreads();
        column_scale_put<T, F>(a, at, warp_max, column_scale);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PATCH; j += 4) {
            float4 scale = *(const float4 *)&column_scale[patch_column<T>(at.lane16, j)];
            column_put<T, F>(transposed, at, j, words, scale.x);
            column_put<T, F>(transposed, at, j + 1, words, scale.y);
            column_put<T, F>(transposed, at, j + 2, words, scale.z);
            column_put<T, F>(transposed, at, j + 3, words, scale.w);
        }
        __syncthreads();
        transposed_store<element<T>::VECTOR>(transposed, a.col.data, a.rows, a.cols, a.col.vectors,
                                             at);
    }
}

/* ---- quantize, 2D ------------------------------------------------------------------------- */

/* The largest |x| of the tile, on every thread. */
template <typename T>
__device__ __forceinline__ float tile_max(float *warp_max,
                                          const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            amax = fmaxf(amax, fabsf(element<T>::value(words[i], j)));
    }
    /* Floats that are not negative compare as their bits do. */
    amax = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(amax)));
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        amax = fmaxf(amax, warp_max[w]);
    return amax;
}

/* One thread writes the tile's scale and, in the last tile of a row of scales, its padding. */
__device__ __forceinline__ void tile_scale_put(const tn__cuda_plane &plane, int64_t scale_row,
                                               int64_t scale_col, int64_t scale_cols,
                                               float inverse) {
    float *to = plane.scale + scale_row * plane.scale_stride;
    to[scale_col] = inverse;
    if (scale_col + 1 < scale_cols) return;
    for (int64_t c = scale_cols; c < plane.scale_stride; c++)
        to[c] = 0.0f;
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL>
__device__ __forceinline__ void quantize_2d(const tn__cuda_quantize_arguments &a) {
    __shared__ uint4 transposed[TILE_PIECES]; /* not there at all without COL */
    __shared__ float warp_max[WARPS];
    const patch_place at = patch_of_thread(a.tiles_across);
    uint32_t words[PATCH][patch_words<T>::COUNT];

    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    const float amax = tile_max<T>(warp_max, words);
    patch_stay_packed<T>(words);
    const float scale = block_scale<T, F>(amax, a.amax_epsilon, a.is_pow2);
    if (threadIdx.x == 0) {
        const float inverse = inverse_scale(scale);
        if (ROW) tile_scale_put(a.row, at.tile_row, at.tile_col, a.tiles_across, inverse);
        if (COL)
            tile_scale_put(a.col, at.tile_col, at.tile_row, (a.rows + TN__TILE - 1) / TN__TILE,
                           inverse);
    }
    if constexpr (ROW) {
        store_rows<T, F>(a, at, words, [=](int) { return scale; });
        patch_stay_packed<T>(words);
    }
    if constexpr (COL) {
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            column_put<T, F>(transposed, at, j, words, scale);
        __syncthreads();
        transposed_store<element<T>::VECTOR>(transposed, a.col.data, a.rows, a.cols, a.col.vectors,
                                             at);
    }
}

/* ---- dequantize --------------------------------------------------------------------------- */

/* Writes 8 values of one row of the patch, rounded to T. */
template <typename T>
__device__ __forceinline__ void store_values(const tn__cuda_dequantize_arguments &a,
                                             const patch_place &at, int i,
                                             const float (&values)[PATCH]) {
    if (at.row + i >= a.rows) return;
    const int64_t first = (at.row + i) * a.cols + at.tile_first_col;
    if (a.dst_vectors) {
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            int column = patch_column<T>(at.lane16, p * element<T>::VECTOR);
            uint4 piece = make_uint4(
                element<T>::word(values, 4 * p), element<T>::word(values, 4 * p + 1),
                element<T>::word(values, 4 * p + 2), element<T>::word(values, 4 * p + 3));
            if (at.tile_first_col + column < a.cols)
                *(uint4 *)((T *)a.dst + first + column) = piece;
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        int column = patch_column<T>(at.lane16, j);
        if (at.tile_first_col + column < a.cols)
            element<T>::store(a.dst, first + column, values[j]);
    }
}

/* The 8 bytes of row i of the patch, from a row plane. */
template <typename T>
__device__ __forceinline__ uint2 load_row_bytes(const tn__cuda_dequantize_arguments &a,
                                                const patch_place &at, int i) {
    uint32_t bytes[2] = {0, 0};
    if (at.row + i >= a.rows) return make_uint2(0, 0);
    const unsigned char *from = a.src.data + (at.row + i) * a.cols + at.tile_first_col;
    if (a.src.vectors) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int column = patch_column<T>(at.lane16, 4 * half);
            if (at.tile_first_col + column < a.cols)
                bytes[half] = __ldg((const uint32_t *)(from + column));
        }
        return make_uint2(bytes[0], bytes[1]);
    }
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        int column = patch_column<T>(at.lane16, j);
        if (at.tile_first_col + column < a.cols)
            bytes[j / 4] |= (uint32_t)from[column] << (8 * (j % 4));
    }
    return make_uint2(bytes[0], bytes[1]);
}

template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void dequantize_row(const tn__cuda_dequantize_arguments &a) {
    const patch_place at = patch_of_thread(a.tiles_across);
    uint2 bytes[PATCH];
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        bytes[i] = load_row_bytes<T>(a, at, i);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        float scale = 0.0f;
        if (at.row + i < a.rows)
            scale = a.is_1d ? a.src.scale[at.tile_col * a.src.scale_stride + at.row + i]
                            : a.src.scale[at.tile_row * a.src.scale_stride + at.tile_col];
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

    transposed_load<element<T>::VECTOR>(transposed, a.src.data, a.rows, a.cols, a.src.vectors, at);
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        int64_t col = at.tile_first_col + patch_column<T>(at.lane16, j);
        scale[j] = 0.0f;
        if (col < a.cols)
            scale[j] = a.is_1d ? a.src.scale[at.tile_row * a.src.scale_stride + col]
                               : a.src.scale[at.tile_col * a.src.scale_stride + at.tile_row];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        bytes[j] = transposed_get<vector>(transposed, patch_column<T>(at.lane16, j), at.unit);
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
        store_values<T>(a, at, i, upper);
        store_values<T>(a, at, i + 1, lower);
    }
}

/* ---- transpose ----------------------------------------------------------------------------
 *
 * A warp takes 16 rows of the tile and reads 4 of them at once, 16 bytes a lane: a lane holds 4
 * rows of 16 columns, which registers turn into 16 columns of 4 bytes. Those go to shared memory as
 * words: word u (rows 4 u ... 4 u + 3) of column k lies at 32 k + (u ^ 4 (k / 16)), so that a warp
 * writes 32 banks at once and 8 lanes read a column back in whole pieces of 16 bytes.
 *
 * It is bound by memory: for 4096 x 4096, 32 MiB in 8 us at 4.2 TB/s, less what stays in the L2
 * cache. What is read is not wanted again soon and is the first to leave that cache (evict_first),
 * so that what is written is still there for the GEMM that follows.
 */

enum { LANE_ROWS = 4, LANE_COLS = 16, COLUMN_WORDS = TN__TILE / LANE_ROWS };

/* words[r] holds 4 bytes of row r; gives 4 bytes of each column. */
__device__ __forceinline__ void transpose_4x4(const uint32_t *words, uint32_t *columns) {
    const uint32_t a = __byte_perm(words[0], words[1], 0x5140);
    const uint32_t b = __byte_perm(words[2], words[3], 0x5140);
    const uint32_t c = __byte_perm(words[0], words[1], 0x7362);
    const uint32_t d = __byte_perm(words[2], words[3], 0x7362);
    columns[0] = __byte_perm(a, b, 0x5410);
    columns[1] = __byte_perm(a, b, 0x7632);
    columns[2] = __byte_perm(c, d, 0x5410);
    columns[3] = __byte_perm(c, d, 0x7632);
}

/* 16 bytes that leave the L2 cache first. */
__device__ __forceinline__ uint4 load_once(const void *from) {
    uint64_t policy;
    uint4 piece;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "l"(from), "l"(policy));
    return piece;
}

/* Where this lane's 4 rows and 16 columns lie, and which word of a column they become. */
struct lane_place {
    int64_t row, col;
    int tile_col; /* of the first column, in the tile */
    int word;
};

__device__ __forceinline__ lane_place lane_of_thread(const patch_place &at) {
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    lane_place place;
    place.word = warp * 4 + lane / 8;
    place.tile_col = lane % 8 * LANE_COLS;
    place.row = at.tile_first_row + place.word * LANE_ROWS;
    place.col = at.tile_first_col + place.tile_col;
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
            if (i < height) piece = load_once(from);
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

/* Writes the tile to `to` [cols, rows]: 8 lanes a column. */
__device__ __forceinline__ void store_columns(const tn__cuda_transpose_arguments &a,
                                              const patch_place &at, const uint32_t *tile) {
    const int piece = (int)(threadIdx.x % 8), first = (int)(threadIdx.x / 8);
    const int64_t row = at.tile_first_row + piece * 16, col = at.tile_first_col + first;
    const int width = row < a.rows ? (int)min(a.cols - col, (int64_t)TN__TILE) : 0;
    unsigned char *to = a.to.data + col * a.rows + row;
#pragma unroll
    for (int pass = 0; pass < TN__TILE / 32; pass++) {
        const uint4 bytes = *(const uint4 *)&tile[column_word(pass * 32 + first, piece * 4)];
        if (pass * 32 < width) {
            if (a.to.vectors)
                *(uint4 *)to = bytes;
            else
                store_bytes(to, bytes, (int)min(a.rows - row, (int64_t)16));
        }
        to += 32 * a.rows;
    }
}

/* Launched before the kernel ahead of it has ended (cuda_table.c): it waits for it here. */
__device__ __forceinline__ void wait_for_the_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS)
    transpose_plane(const __grid_constant__ tn__cuda_transpose_arguments a) {
    __shared__ __align__(16) uint32_t tile[TN__TILE * COLUMN_WORDS];
    const patch_place at = patch_of_thread(a.tiles_across);
    const lane_place lane = lane_of_thread(at);
    uint32_t words[LANE_ROWS][LANE_COLS / 4];

    wait_for_the_kernel_ahead();
    load_lane(a, lane, words);
    if (threadIdx.x == 0 && at.tile_row < a.scale_rows && at.tile_col < a.scale_cols)
        tile_scale_put(a.to, at.tile_col, at.tile_row, a.scale_rows,
                       a.from.scale[at.tile_row * a.from.scale_stride + at.tile_col]);
    put_lane(tile, lane, words);
    __syncthreads();
    store_columns(a, at, tile);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

/* Registers for three blocks on a multiprocessor, four where only the column plane is made, or two
 * where the patch is 64 words: enough reads in flight, and nothing spills. */
#define KERNEL(name, arguments, T, blocks, body)                                                   \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS, sizeof(T) == 2 ? blocks : 2)    \
        name(const __grid_constant__ arguments a) {                                                \
        body(a);                                                                                   \
    }
#define QUANTIZE(source, T, format, F)                                                             \
    KERNEL(quantize_1d_row_##source##_##format, tn__cuda_quantize_arguments, T, 3,                 \
           (quantize_1d<T, F, true, false>))                                                       \
    KERNEL(quantize_1d_col_##source##_##format, tn__cuda_quantize_arguments, T, 4,                 \
           (quantize_1d<T, F, false, true>))                                                       \
    KERNEL(quantize_1d_both_##source##_##format, tn__cuda_quantize_arguments, T, 3,                \
           (quantize_1d<T, F, true, true>))                                                        \
    KERNEL(quantize_2d_row_##source##_##format, tn__cuda_quantize_arguments, T, 3,                 \
           (quantize_2d<T, F, true, false>))                                                       \
    KERNEL(quantize_2d_col_##source##_##format, tn__cuda_quantize_arguments, T, 4,                 \
           (quantize_2d<T, F, false, true>))                                                       \
    KERNEL(quantize_2d_both_##source##_##format, tn__cuda_quantize_arguments, T, 3,                \
           (quantize_2d<T, F, true, true>))                                                        \
    KERNEL(dequantize_row_##format##_##source, tn__cuda_dequantize_arguments, T, 3,                \
           (dequantize_row<T, F>))                                                                 \
    KERNEL(dequantize_col_##format##_##source, tn__cuda_dequantize_arguments, T, 3,                \
           (dequantize_col<T, F>))

QUANTIZE(fp32, float, e4m3, __NV_E4M3)
QUANTIZE(fp32, float, e5m2, __NV_E5M2)
QUANTIZE(bf16, __nv_bfloat16, e4m3, __NV_E4M3)
QUANTIZE(bf16, __nv_bfloat16, e5m2, __NV_E5M2)
QUANTIZE(fp16, __half, e4m3, __NV_E4M3)
QUANTIZE(fp16, __half, e5m2, __NV_E5M2)
