/* Kernels of NVFP4: E2M1 elements, an E4M3 scale for 16 of them along a stored row, and one fp32
 * scale of the tensor, which follows from its amax (cuda_tensor.cu collects it first).
 *
 * A block of threads takes one 128 x 128 tile (cuda_tile.cuh). Bytes that must move for N elements
 * of s bytes: 2 s N in, 9/16 N out for each plane.
 *
 * Transposed codes go through shared memory as words of 8 codes: the 8 rows of a patch in one
 * column. Word u of column k lies at 16 k + (u ^ swizzle(k)), as units of FP8 do.
 */
#include "cuda_dequantize.cuh"
#include "cuda_quantize.cuh"

enum { NV_BLOCK = 16, NV_BLOCKS = TN__TILE / NV_BLOCK };

/* ---- numbers ------------------------------------------------------------------------------ */

/* The code of a magnitude is the whole number nearest to the least of three lines of it, whose
 * slopes are the codes for each 1 below 2, from 2 to 4 and above: 2, 1 and 1/2. Sums with 2^23 are
 * whole, rounded once, ties to even; their last bits are the number, and their bits compare as the
 * sums do. Gives those bits. */
__device__ __forceinline__ uint32_t e2m1_sum(float value) {
    const float size = fminf(fabsf(value), 6.0f);
    const uint32_t low = __float_as_uint(__fmaf_rn(size, 2.0f, 0x1p23f));
    const uint32_t middle = __float_as_uint(__fadd_rn(size, 0x1p23f + 2.0f));
    const uint32_t high = __float_as_uint(__fmaf_rn(size, 0.5f, 0x1p23f + 4.0f));
#ifdef __CUDA_ARCH__
    return __vimin3_u32(low, middle, high);
#else
    return min(low, min(middle, high));
#endif
}

/* The signs of 8 numbers, each the highest bit of its code; a NaN has none. */
__device__ __forceinline__ uint32_t e2m1_signs(const float (&v)[PATCH]) {
    const uint32_t even = bytes_of(__float_as_uint(v[0]), __float_as_uint(v[2]),
                                   __float_as_uint(v[4]), __float_as_uint(v[6]), 3);
    const uint32_t odd = bytes_of(__float_as_uint(v[1]), __float_as_uint(v[3]),
                                  __float_as_uint(v[5]), __float_as_uint(v[7]), 3);
    return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

/* How the sizes of 8 numbers become codes, the first in the lowest place: made once for a row,
 * whatever it is scaled with. */
template <typename R> struct e2m1_rounding;

/* As tn__round_to_nearest gives them. */
template <> struct e2m1_rounding<to_nearest> {
    __device__ explicit e2m1_rounding(const to_nearest::numbers &) {}
    __device__ __forceinline__ uint32_t codes(const float (&v)[PATCH]) const {
        enum { SUM = 0x4B000000 }; /* the bits of 2^23, which are taken off again */
        uint32_t codes = 0;
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            codes += (e2m1_sum(v[j]) - (uint32_t)SUM) << (4 * j);
        return codes;
    }
};

/* As tn__round_stochastically does. */
template <> struct e2m1_rounding<stochastically> {
    uint32_t parts[PATCH];
    __device__ explicit e2m1_rounding(const stochastically::numbers &random) {
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            parts[j] = stochastically::part_of(random, j);
    }
    __device__ __forceinline__ uint32_t codes(const float (&v)[PATCH]) const {
        uint32_t code[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            code[j] = stochastically::drawn<1, 1>(fminf(fabsf(v[j]), 6.0f), parts[j]);
        return bytes_of(code[0], code[2], code[4], code[6], 3) +
               (bytes_of(code[1], code[3], code[5], code[7], 3) << 4);
    }
};

/* Of 8 codes the value of number j: as the bits of a denormal float, which times 2^126 is it. */
__device__ __forceinline__ float e2m1_value(uint32_t codes, int j) {
    const uint32_t spread = (uint32_t)((int32_t)(codes << (28 - 4 * j)) >> 6);
    return __fmul_rn(__uint_as_float(spread & 0x81C00000u), 0x1p126f);
}

__device__ __forceinline__ float largest_float() { return element<float>::max_finite(); }

/* The two scales of the tensor: what its elements are multiplied with, and what is stored. */
struct nv_global {
    float factor;
    float inverse;
    bool is_plain; /* sixths of amaxes need no division */
};

__device__ __forceinline__ nv_global nv_global_of(const tn__cuda_quantize_arguments &a) {
    const float amax = fmaxf(__int_as_float(*a.total), a.amax_epsilon);
    nv_global global = {1.0f, 1.0f, amax >= 0x1p-60f && amax < 0x1p126f};
    if (amax == 0.0f || isinf(amax)) return global;
    global.factor = fminf(__fdiv_rn(2688.0f, amax), largest_float());
    global.inverse = inverse_scale(global.factor);
    return global;
}

__device__ __forceinline__ float e4m3_value(uint32_t code) { return fp8_pair<__NV_E4M3>(code).x; }

/* What the elements of a block are multiplied with, for each code of a scale. */
enum { NV_FACTORS = 128 };

__device__ __forceinline__ void nv_factors_put(float *factors, const nv_global &global) {
    const uint32_t code = threadIdx.x;
    if (code >= NV_FACTORS) return;
    factors[code] =
        fminf(inverse_scale(__fmul_rn(e4m3_value(code), global.inverse)), largest_float());
}

/* amax / 6, rounded to nearest: a product with 1/6 is within a unit of the last place, and what it
 * leaves of the amax, which is exact where nothing is denormal, corrects it. The scale of an amax
 * so small that something is denormal is 0 in any case, unless that of the tensor is small. */
template <int COUNT>
__device__ __forceinline__ void sixths_of(float (&sixth)[COUNT], const float (&amax)[COUNT],
                                          const nv_global &global) {
    const float a_sixth = 0x1.555556p-3f;
    if (global.is_plain) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float about = __fmul_rn(amax[i], a_sixth);
            sixth[i] = __fmaf_rn(__fmaf_rn(about, -6.0f, amax[i]), a_sixth, about);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            sixth[i] = __fdiv_rn(amax[i], 6.0f);
    }
}

/* The E4M3 codes of the scales of blocks, which have no sign and are no NaN, and the factors of the
 * blocks in the place of their amaxes. */
template <int COUNT>
__device__ __forceinline__ void nv_scales(uint32_t (&scale)[COUNT], float (&block)[COUNT],
                                          const nv_global &global, const float *factors) {
    float sixth[COUNT];
    sixths_of(sixth, block, global);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        scale[i] =
            __nv_cvt_float_to_fp8(__fmul_rn(sixth[i], global.factor), __NV_SATFINITE, __NV_E4M3);
        block[i] = factors[scale[i]];
    }
}

/* ---- quantize ----------------------------------------------------------------------------- */

/* Writes 8 codes of a row of the patch, whose first is for `to`: one word, or with 32-bit elements
 * two halves of one apart. `left`: columns from there to the end of the matrix. */
template <typename T>
__device__ __forceinline__ void nv_store_row(unsigned char *to, int left, int vectors,
                                             uint32_t codes) {
    enum { VECTOR = element<T>::VECTOR, APART = 16 * VECTOR };
#pragma unroll
    for (int p = 0; p < PATCH / VECTOR; p++) {
        unsigned char *piece = to + p * APART / 2;
        const uint32_t bytes = codes >> (4 * VECTOR * p);
        if (p * APART >= left) continue;
        if (vectors && VECTOR == 8) {
            *(uint32_t *)piece = bytes;
        } else if (vectors) {
            *(unsigned short *)piece = (unsigned short)bytes;
        } else {
#pragma unroll
            for (int b = 0; b < VECTOR / 2; b++)
                if (p * APART + 2 * b < left) piece[b] = (unsigned char)(bytes >> (8 * b));
        }
    }
}

/* Stores a word of 4 scales, where there is room for them in a row of scales. */
__device__ __forceinline__ void nv_scales_store(const tn__cuda_plane &plane, int64_t row,
                                                int64_t first, uint32_t scales) {
    if (first < plane.scale_stride)
        *(uint32_t *)((unsigned char *)plane.scale + row * plane.scale_stride + first) = scales;
}

/* Maxima of columns, which are there, become those of the squares that they are in; beyond the
 * matrix they stay 0. All threads. */
template <typename M>
__device__ __forceinline__ void nv_squares_put(const tn__cuda_quantize_arguments &a,
                                               const patch_place &at, M (*warp_max)[TN__TILE]) {
    const int warp = (int)threadIdx.x / NV_BLOCKS, first = (int)threadIdx.x % NV_BLOCKS * NV_BLOCK;
    const int64_t cols = warp < WARPS ? a.cols - at.tile_first_col - first : 0;
    const int width = (int)min(cols, (int64_t)NV_BLOCK);
    M amax = 0;
#pragma unroll 1
    for (int c = 0; c < width; c++)
        amax = (M)max(amax, warp_max[warp][first + c]);
#pragma unroll 1
    for (int c = 0; c < width; c++)
        warp_max[warp][first + c] = amax;
    __syncthreads();
}

/* The factors of the patch's rows; their scales go to shared memory. All threads. */
template <typename T, typename M>
__device__ __forceinline__ row_factors<T, NV_BLOCK>
nv_row_factors(const tn__cuda_quantize_arguments &a, const patch_place &at, const nv_global &global,
               const float *factors, const M (*warp_max)[TN__TILE],
               unsigned char (*row_scale)[NV_BLOCKS],
               const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    enum { OWN = row_factors<T, NV_BLOCK>::OWN };
    const int rows_in = (int)min(a.rows - at.tile_first_row, (int64_t)TN__TILE);
    const auto make = [&](int row, int block, float(&of)[OWN]) {
        uint32_t scale[OWN];
        if (a.row.square_blocks) {
            const float square = shared_value<T>(warp_max[row / NV_BLOCK][block * NV_BLOCK]);
#pragma unroll
            for (int r = 0; r < OWN; r++)
                of[r] = row + r < rows_in ? square : 0.0f;
        }
        nv_scales(scale, of, global, factors);
#pragma unroll
        for (int r = 0; r < OWN; r++)
            row_scale[row + r][block] = (unsigned char)scale[r];
    };
    return row_factors<T, NV_BLOCK>(at, words, make);
}

/* Writes the codes of the patch's rows, and their scales from shared memory. All threads. */
template <typename T>
__device__ __forceinline__ void
nv_rows_store(const tn__cuda_quantize_arguments &a, const patch_place &at,
              const unsigned char (*row_scale)[NV_BLOCKS], const uint32_t (&codes)[PATCH]) {
    const int64_t row_bytes = (a.cols + 1) / 2;
    const int64_t first_col = at.tile_first_col + patch_column<T>(at.lane16, 0);
    const int left = (int)min(a.cols - first_col, (int64_t)TN__TILE);
    const int height = left > 0 ? patch_rows_in(a.rows, at) : 0;
    unsigned char *to = a.row.data + at.row * row_bytes + first_col / 2;
    if (a.row.vectors && is_whole_tile(a.rows, a.cols, at)) {
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            nv_store_row<T>(to, TN__TILE, true, codes[i]);
            to += row_bytes;
        }
    } else {
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            if (i < height) nv_store_row<T>(to, left, a.row.vectors, codes[i]);
            to += row_bytes;
        }
    }
    __syncthreads();
    const int row = (int)threadIdx.x % TN__TILE, half = (int)threadIdx.x / TN__TILE;
    nv_scales_store(a.row, at.tile_first_row + row, (int64_t)at.tile_col * NV_BLOCKS + 4 * half,
                    *(const uint32_t *)&row_scale[row][4 * half]);
}

/* Half the threads each: 4 of the 8 scales of a column, from the maxima of each warp's rows. */
template <typename T, typename M>
__device__ __forceinline__ void
nv_column_scales_put(const tn__cuda_quantize_arguments &a, const patch_place &at,
                     const nv_global &global, const float *factors, const M (*warp_max)[TN__TILE],
                     float (*factor)[TN__TILE]) {
    enum { BLOCKS = NV_BLOCKS / 2 };
    const int column = (int)threadIdx.x % TN__TILE, first = (int)threadIdx.x / TN__TILE * BLOCKS;
    uint32_t scale[BLOCKS];
    float of[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
        of[b] = shared_value<T>(warp_max[first + b][column]);
    nv_scales(scale, of, global, factors);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
        factor[first + b][column] = of[b];
    nv_scales_store(a.col, at.tile_first_col + column, (int64_t)at.tile_row * NV_BLOCKS + first,
                    scale[0] | scale[1] << 8 | scale[2] << 16 | scale[3] << 24);
}

template <int VECTOR> __device__ __forceinline__ int nv_word(int column, int unit) {
    return column * UNITS + (unit ^ column_swizzle<VECTOR>(column));
}

/* Writes the transposed tile of codes; 16 threads a column. */
template <int VECTOR>
__device__ __forceinline__ void nv_tile_store(const tn__cuda_quantize_arguments &a,
                                              const patch_place &at, const uint32_t *tile) {
    const int unit = (int)(threadIdx.x % UNITS), first = (int)(threadIdx.x / UNITS);
    const int64_t row_bytes = (a.rows + 1) / 2, col = at.tile_first_col + first;
    const int64_t byte = (at.tile_first_row + unit * PATCH) / 2;
    const int bytes = (int)min(row_bytes - byte, (int64_t)4); /* of a column, for this thread */
    const int width = bytes > 0 ? (int)min(a.cols - col, (int64_t)TN__TILE) : 0;
    unsigned char *to = a.col.data + col * row_bytes + byte;
#pragma unroll
    for (int column = 0; column < TN__TILE; column += UNITS) {
        const uint32_t codes = tile[nv_word<VECTOR>(column + first, unit)];
        if (column < width) {
            if (a.col.vectors) {
                *(uint32_t *)to = codes;
            } else {
#pragma unroll
                for (int b = 0; b < 4; b++)
                    if (b < bytes) to[b] = (unsigned char)(codes >> (8 * b));
            }
        }
        to += UNITS * row_bytes;
    }
}

/* The factors of the patch's columns. */
template <typename T>
__device__ __forceinline__ void load_column_factors(float (&of_column)[PATCH],
                                                    const patch_place &at,
                                                    const float (*factor)[TN__TILE]) {
#pragma unroll
    for (int j = 0; j < PATCH; j += 4) {
        const float4 four =
            *(const float4 *)&factor[at.unit * PATCH / NV_BLOCK][patch_column<T>(at.lane16, j)];
        of_column[j] = four.x, of_column[j + 1] = four.y;
        of_column[j + 2] = four.z, of_column[j + 3] = four.w;
    }
}

/* The patch turned: 8 codes of each column from those of each row. */
__device__ __forceinline__ void turn_codes(uint32_t (&columns)[PATCH],
                                           const uint32_t (&rows)[PATCH]) {
    uint32_t even[PATCH / 2], odd[PATCH / 2], of_even[PATCH / 2], of_odd[PATCH / 2];
#pragma unroll
    for (int k = 0; k < PATCH / 2; k++) { /* a byte: two rows of an even column, or of an odd one */
        const uint32_t upper = rows[2 * k], lower = rows[2 * k + 1];
        even[k] = (upper & 0x0F0F0F0Fu) | (lower << 4 & 0xF0F0F0F0u);
        odd[k] = (upper >> 4 & 0x0F0F0F0Fu) | (lower & 0xF0F0F0F0u);
    }
    transpose_4x4(even, of_even);
    transpose_4x4(odd, of_odd);
#pragma unroll
    for (int k = 0; k < PATCH / 2; k++)
        columns[2 * k] = of_even[k], columns[2 * k + 1] = of_odd[k];
}

/* Row i of the patch, multiplied by what is of its columns. */
template <typename T>
__device__ __forceinline__ void scale_by_columns(float (&scaled)[PATCH],
                                                 const uint32_t (&words)[patch_words<T>::COUNT],
                                                 const float (&of_column)[PATCH]) {
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        scaled[j] = __fmul_rn(element<T>::value(words, j), of_column[j]);
}

/* Writes the codes of the patch's rows transposed. All threads. */
template <typename T>
__device__ __forceinline__ void nv_columns_store(const tn__cuda_quantize_arguments &a,
                                                 const patch_place &at, uint32_t *tile,
                                                 const uint32_t (&codes)[PATCH]) {
    enum { VECTOR = element<T>::VECTOR };
    uint32_t columns[PATCH];
    turn_codes(columns, codes);
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        tile[nv_word<VECTOR>(patch_column<T>(at.lane16, j), at.unit)] = columns[j];
    __syncthreads();
    nv_tile_store<VECTOR>(a, at, tile);
}

template <typename T, bool ROW, bool COL, typename R = to_nearest>
__device__ __forceinline__ void quantize_nvfp4(const tn__cuda_quantize_arguments &a) {
    __shared__ __align__(8) unsigned char row_scale[TN__TILE][NV_BLOCKS];
    __shared__ __align__(16) typename shared_size<T>::type warp_max[WARPS][TN__TILE];
    __shared__ __align__(16) float factor[NV_BLOCKS][TN__TILE];
    __shared__ uint32_t tile[TN__TILE * UNITS];
    __shared__ float factors[NV_FACTORS];
    const patch_place at = patch_of_thread_backwards(a.tiles_across);
    const bool has_row = ROW && a.row.data, has_col = COL && a.col.data;
    uint32_t words[PATCH][patch_words<T>::COUNT];

    /* The kernel ahead is the one of the amax, which does not write src. */
    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    wait_for_the_kernel_ahead();
    let_the_kernel_behind_start();
    if (is_skipped(a.skip)) return;
    const nv_global global = nv_global_of(a);
    const R rounding(a);
    row_factors<T, NV_BLOCK> of_rows;
    float of_column[PATCH] = {0};
    uint32_t codes[PATCH], column_codes[PATCH];
    nv_factors_put(factors, global);
    if (has_col || a.row.square_blocks) column_max_put<T>(warp_max, at, words);
    __syncthreads();
    if (!COL) patch_stay_packed<T>(words); /* or maxima of the rows would be made before */
    if (a.row.square_blocks) nv_squares_put(a, at, warp_max);
    if (ROW) of_rows = nv_row_factors<T>(a, at, global, factors, warp_max, row_scale, words);
    if (has_col) {
        nv_column_scales_put<T>(a, at, global, factors, warp_max, factor);
        __syncthreads();
        load_column_factors<T>(of_column, at, factor);
    }
    patch_stay_packed<T>(words);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const e2m1_rounding<R> to(rounding.template of_row<T>(at, i));
        float by_row[PATCH], by_column[PATCH];
        if (ROW) scale_row<T>(by_row, words[i], of_rows.of_row(i));
        if (COL) scale_by_columns<T>(by_column, words[i], of_column);
        const uint32_t signs = e2m1_signs(ROW ? by_row : by_column);
        if (ROW) make_here(codes[i] = to.codes(by_row) | signs);
        if (COL) make_here(column_codes[i] = to.codes(by_column) | signs);
    }
    /* The place is found anew: there are no registers to keep it in. */
    if (has_row) nv_rows_store<T>(a, patch_of_thread_backwards(a.tiles_across), row_scale, codes);
    if (has_col) nv_columns_store<T>(a, at, tile, column_codes);
}

/* After all blocks of the cast have read the amax, which lies where a scale is to be. */
extern "C" __global__ void nvfp4_finish(const __grid_constant__ tn__cuda_quantize_arguments a) {
    wait_for_the_kernel_ahead();
    if (is_skipped(a.skip)) return;
    const float4 stored = make_float4(nv_global_of(a).inverse, 0.0f, 0.0f, 0.0f);
    if (a.row.global_scale) *(float4 *)a.row.global_scale = stored;
    if (a.col.global_scale) *(float4 *)a.col.global_scale = stored;
}

/* ---- dequantize --------------------------------------------------------------------------- */

/* Up to `bytes` bytes of a stored row, the first in the lowest place. */
__device__ __forceinline__ uint32_t nv_load(const unsigned char *row, int64_t byte,
                                            int64_t row_bytes, int bytes, int vectors) {
    uint32_t codes = 0;
    if (vectors && bytes == 4) return __ldg((const uint32_t *)(row + byte));
    if (vectors) return __ldg((const unsigned short *)(row + byte));
    for (int b = 0; b < bytes; b++)
        if (byte + b < row_bytes) codes |= (uint32_t)row[byte + b] << (8 * b);
    return codes;
}

__device__ __forceinline__ const unsigned char *
scales_of_row(const tn__cuda_dequantize_arguments &a, int64_t stored) {
    return (const unsigned char *)a.src.scale + stored * a.src.scale_stride;
}

/* Half the threads each: of stored row `stored` the 4 scales from block `first` on, as factors into
 * factor[]; there are whole words of scales, which end where the matrix does or beyond. */
__device__ __forceinline__ void nv_factors_load(const tn__cuda_dequantize_arguments &a,
                                                int64_t stored, int64_t stored_rows, int64_t first,
                                                float global, float (&factor)[4]) {
    uint32_t codes = 0;
    if (stored < stored_rows && first < a.src.scale_stride)
        codes = __ldg((const uint32_t *)(scales_of_row(a, stored) + first));
#pragma unroll
    for (int b = 0; b < 4; b++)
        factor[b] = __fmul_rn(e4m3_value(codes >> (8 * b)), global);
}

/* All that is read is asked for before the first store, which no load may pass. */
template <typename T>
__device__ __forceinline__ void dequantize_nvfp4_row(const tn__cuda_dequantize_arguments &a) {
    enum { VECTOR = element<T>::VECTOR, PIECES = PATCH / VECTOR };
    const int64_t row_bytes = (a.cols + 1) / 2;
    const patch_place at = patch_of_thread(a.tiles_across);
    uint32_t codes[PATCH][PIECES], scale[PATCH][PIECES];
    if (is_skipped(a.skip)) return;
    const float global = *a.src.global_scale;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int64_t row = at.row + i;
            const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, p * VECTOR);
            const bool is_there = row < a.rows && col < a.cols;
            scale[i][p] = is_there ? __ldg(scales_of_row(a, row) + col / NV_BLOCK) : 0;
            codes[i][p] = is_there ? nv_load(a.src.data + row * row_bytes, col / 2, row_bytes,
                                             VECTOR / 2, a.src.vectors)
                                   : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        float values[PATCH];
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const float factor = __fmul_rn(e4m3_value(scale[i][p]), global);
#pragma unroll
            for (int v = 0; v < VECTOR; v++)
                values[p * VECTOR + v] = __fmul_rn(e2m1_value(codes[i][p], v), factor);
        }
        store_values<T>(a, at, i, values);
    }
}

/* Reads the tile of codes into shared memory; the caller's barrier follows. */
template <int VECTOR>
__device__ __forceinline__ void nv_columns_load(const tn__cuda_dequantize_arguments &a,
                                                const patch_place &at, uint32_t *tile) {
    const int unit = (int)(threadIdx.x % UNITS), first = (int)(threadIdx.x / UNITS);
    const int64_t row_bytes = (a.rows + 1) / 2, col = at.tile_first_col + first;
    const int64_t byte = (at.tile_first_row + unit * PATCH) / 2;
    const int width = byte < row_bytes ? (int)min(a.cols - col, (int64_t)TN__TILE) : 0;
    const unsigned char *from = a.src.data + col * row_bytes;
    uint32_t codes[TN__TILE / UNITS];
#pragma unroll
    for (int n = 0; n < TN__TILE / UNITS; n++) {
        codes[n] = 0;
        if (n * UNITS < width) codes[n] = nv_load(from, byte, row_bytes, 4, a.src.vectors);
        from += UNITS * row_bytes;
    }
#pragma unroll
    for (int n = 0; n < TN__TILE / UNITS; n++)
        tile[nv_word<VECTOR>(n * UNITS + first, unit)] = codes[n];
}

template <typename T>
__device__ __forceinline__ void dequantize_nvfp4_col(const tn__cuda_dequantize_arguments &a) {
    __shared__ uint32_t tile[TN__TILE * UNITS];
    __shared__ __align__(16) float factor[NV_BLOCKS][TN__TILE];
    const patch_place at = patch_of_thread(a.tiles_across);
    uint32_t codes[PATCH];
    if (is_skipped(a.skip)) return;
    nv_columns_load<element<T>::VECTOR>(a, at, tile);
    const int column = (int)threadIdx.x % TN__TILE, half = (int)threadIdx.x / TN__TILE;
    float made[4];
    nv_factors_load(a, at.tile_first_col + column, a.cols,
                    (int64_t)at.tile_row * NV_BLOCKS + 4 * half, *a.src.global_scale, made);
#pragma unroll
    for (int b = 0; b < 4; b++)
        factor[4 * half + b][column] = made[b];
    __syncthreads();
    alignas(16) float by[PATCH];
#pragma unroll
    for (int j = 0; j < PATCH; j += 4)
        *(float4 *)&by[j] =
            *(const float4 *)&factor[at.unit * PATCH / NV_BLOCK][patch_column<T>(at.lane16, j)];
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        codes[j] = tile[nv_word<element<T>::VECTOR>(patch_column<T>(at.lane16, j), at.unit)];
    const int height = patch_rows_in(a.rows, at);
    T *to = dst_row<T>(a, at);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        float values[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            values[j] = __fmul_rn(e2m1_value(codes[j], i), by[j]);
        if (i < height) store_values_at<T>(a, at, to, values);
        to += a.cols;
    }
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define QUANTIZE(source, T)                                                                        \
    TILE_KERNEL(quantize_nvfp4_row_##source, tn__cuda_quantize_arguments, T, 4,                    \
                (quantize_nvfp4<T, true, false>))                                                  \
    TILE_KERNEL(quantize_nvfp4_col_##source, tn__cuda_quantize_arguments, T, 4,                    \
                (quantize_nvfp4<T, false, true>))                                                  \
    TILE_KERNEL(quantize_nvfp4_both_##source, tn__cuda_quantize_arguments, T, 3,                   \
                (quantize_nvfp4<T, true, true>))                                                   \
    TILE_KERNEL(quantize_nvfp4_stochastic_##source, tn__cuda_quantize_arguments, T, 3,             \
                (quantize_nvfp4<T, true, true, stochastically>))                                   \
    TILE_KERNEL(dequantize_nvfp4_row_##source, tn__cuda_dequantize_arguments, T, 3,                \
                dequantize_nvfp4_row<T>)                                                           \
    TILE_KERNEL(dequantize_nvfp4_col_##source, tn__cuda_dequantize_arguments, T, 3,                \
                dequantize_nvfp4_col<T>)

QUANTIZE(fp32, float)
QUANTIZE(bf16, __nv_bfloat16)
QUANTIZE(fp16, __half)
