/* The bodies of the quantize kernels: a 128 x 128 tile of the source into FP8 planes.
 *
 * A kernel says which tile its block takes (patch_place) and of which matrix; cuda_cast.cu does so
 * for one tensor. A tile at the edge holds zeros beyond it, which no amax sees; the last tiles of a
 * row or column of tiles write the zeros that pad the scales.
 */
#ifndef TENURE_CUDA_QUANTIZE_CUH
#define TENURE_CUDA_QUANTIZE_CUH

#include "cuda_amax.cuh"
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

/* The same of pair_maxima's rows. */
template <typename T>
__device__ __forceinline__ float half_warp_pair_max(const uint32_t (&pairs)[PATCH / 2],
                                                    int lane16) {
    uint32_t two[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t keep = lane16 & 4 ? pairs[r + 2] : pairs[r];
        const uint32_t give = lane16 & 4 ? pairs[r] : pairs[r + 2];
        two[r] = larger_pair<T>(keep, __shfl_xor_sync(0xFFFFFFFFu, give, 4));
    }
    const uint32_t keep = lane16 & 2 ? two[1] : two[0];
    const uint32_t give = lane16 & 2 ? two[0] : two[1];
    uint32_t one = larger_pair<T>(keep, __shfl_xor_sync(0xFFFFFFFFu, give, 2));
    one = larger_pair<T>(one, __shfl_xor_sync(0xFFFFFFFFu, one, 8));
    one = larger_pair<T>(one, __shfl_xor_sync(0xFFFFFFFFu, one, 1));
    one = lane16 & 8 ? one >> 16 : one;
    return element<T>::value(&one, 0);
}

/* Casts row i of the patch; `words` holds it. */
template <typename T, __nv_fp8_interpretation_t F, typename R>
__device__ __forceinline__ uint2 cast_row(const R &rounding, const patch_place &at, int i,
                                          const uint32_t *words, float scale) {
    float scaled[PATCH];
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        scaled[j] = __fmul_rn(element<T>::value(words, j), scale);
    return R::template codes<F>(scaled, rounding.template of_row<T>(at, i));
}

/* Writes one row of the patch, whose first byte is for `to`, byte by byte; `width`: of the tile. */
template <typename T>
__device__ __forceinline__ void store_row_bytes(unsigned char *to, int lane16, int width,
                                                uint2 bytes) {
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const int column = patch_column<T>(lane16, j);
        if (column < width)
            to[column - patch_column<T>(lane16, 0)] =
                (unsigned char)((j < 4 ? bytes.x : bytes.y) >> (8 * (j % 4)));
    }
}

/* Writes the codes of the patch into a plane of the same shape. `scale_of(i)` is called by all
 * lanes; with what it gives, `codes_of(i, scale)` gives the codes of row i. */
template <typename T, typename Place, typename ScaleOf, typename CodesOf>
__device__ __forceinline__ void store_patch_rows(const tn__cuda_plane &plane, int64_t rows,
                                                 int64_t cols, const Place &at, ScaleOf scale_of,
                                                 CodesOf codes_of) {
    const int first = patch_column<T>(at.lane16, 0), second = patch_column<T>(at.lane16, 4);
    unsigned char *to = plane.data + at.row * cols + at.tile_first_col + first;
    if (sizeof(T) == 2 && has_vectors(plane.vectors, at) && is_whole_tile(rows, cols, at)) {
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            *(uint2 *)to = codes_of(i, scale_of(i));
            to += cols;
        }
        return;
    }
    const int width = (int)min(cols - at.tile_first_col, (int64_t)TN__TILE);
    const int height = first < width ? patch_rows_in(rows, at) : 0;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const auto scale = scale_of(i);
        if (i < height) { /* the cast too: a branch keeps the compiler from mixing all rows */
            const uint2 bytes = codes_of(i, scale);
            if (!has_vectors(plane.vectors, at)) {
                store_row_bytes<T>(to, at.lane16, width, bytes);
            } else if constexpr (sizeof(T) == 2) {
                *(uint2 *)to = bytes;
            } else {
                *(uint32_t *)to = bytes.x;
                if (second < width) *(uint32_t *)(to + (second - first)) = bytes.y;
            }
        }
        to += cols;
    }
}

/* Casts and writes the patch; `scale_of(i)` gives the scale of row i and is called by all lanes. */
template <typename T, __nv_fp8_interpretation_t F, typename R, typename ScaleOf>
__device__ __forceinline__ void
store_rows(const tn__cuda_quantize_arguments &a, const patch_place &at,
           const uint32_t (&words)[PATCH][patch_words<T>::COUNT], ScaleOf scale_of) {
    const R rounding(a);
    store_patch_rows<T>(a.row, a.rows, a.cols, at, scale_of, [&](int i, float scale) {
        return cast_row<T, F>(rounding, at, i, words[i], scale);
    });
}

/* The scale of row lane16 / 2, whose amax the lane has; it is written. S: the type of the source.
 */
template <typename S, __nv_fp8_interpretation_t F>
__device__ __forceinline__ float row_scale_put(const tn__cuda_quantize_arguments &a,
                                               const patch_place &at, float amax) {
    const scale_pair made = block_scales<S, F>(amax, a.amax_epsilon, a.is_pow2);
    const int64_t own_row = at.row + at.lane16 / 2;
    if (at.lane16 % 2 == 0 && own_row < a.row.scale_stride)
        a.row.scale[at.tile_col * a.row.scale_stride + own_row] =
            own_row < a.rows ? made.inverse : 0.0f;
    return made.scale;
}

/* ---- blocks along a row ------------------------------------------------------------------- */

/* Each of LANES neighbours gives maxima of 8 rows and is left with those of its 8 / LANES rows over
 * all of them. Each step halves the rows that a lane is still concerned with. */
template <int LANES>
__device__ __forceinline__ void group_row_max(float (&own)[PATCH / LANES],
                                              const float (&row_max)[PATCH], int lane) {
    float most[PATCH];
    int kept = PATCH / 2;
#pragma unroll
    for (int r = 0; r < PATCH; r++)
        most[r] = row_max[r];
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2, kept /= 2) {
        const bool is_upper = lane & lanes;
#pragma unroll
        for (int r = 0; r < kept; r++) {
            const float keep = is_upper ? most[r + kept] : most[r];
            const float give = is_upper ? most[r] : most[r + kept];
            most[r] = fmaxf(keep, __shfl_xor_sync(0xFFFFFFFFu, give, lanes));
        }
    }
#pragma unroll
    for (int r = 0; r < PATCH / LANES; r++)
        own[r] = most[r];
}

/* The same of pair_maxima's rows: of two lanes each has one half of all pairs in the end, and of
 * four one half of two pairs. */
template <typename T, int LANES>
__device__ __forceinline__ void group_pair_max(float (&own)[PATCH / LANES],
                                               const uint32_t (&pairs)[PATCH / 2], int lane) {
    static_assert(LANES == 2 || LANES == 4, "lanes of a block");
    enum { OWN = PATCH / LANES };
    const bool is_upper = lane & (LANES / 2);
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        uint32_t most = pairs[r];
        if (LANES == 4) {
            const uint32_t keep = lane & 1 ? pairs[r + OWN % 4] : pairs[r];
            const uint32_t give = lane & 1 ? pairs[r] : pairs[r + OWN % 4];
            most = larger_pair<T>(keep, __shfl_xor_sync(0xFFFFFFFFu, give, 1));
        }
        most = larger_pair<T>(most, __shfl_xor_sync(0xFFFFFFFFu, most, LANES / 2));
        most = is_upper ? most >> 16 : most;
        own[r] = element<T>::value(&most, 0);
    }
}

/* What the elements of the patch's rows are multiplied with, in blocks of BLOCK elements along the
 * rows: a piece of 16 bytes lies in one block, and LANES lanes hold a row of it. Each makes the
 * factors of some rows, for all of them. */
template <typename T, int BLOCK> struct row_factors {
    enum { VECTOR = element<T>::VECTOR, PIECES = PATCH / VECTOR };
    enum { LANES = BLOCK / VECTOR, OWN = PATCH / LANES };
    struct of_pieces {
        float of[PIECES];
    };
    float factor[PIECES][OWN];

    row_factors() = default;

    /* `make(row, block, amax)` makes factors of the amaxes of some rows of the tile, from `row` on,
     * and a block of each. */
    template <typename Make>
    __device__ __forceinline__ row_factors(const patch_place &at,
                                           const uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                           Make make) {
        const int lane = at.lane16 % LANES;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int block = patch_column<T>(at.lane16, p * VECTOR) / BLOCK;
            if constexpr (sizeof(T) == 2) {
                uint32_t rows[PATCH / 2], columns[PATCH / 2];
                pair_maxima<T>(rows, columns, words);
                group_pair_max<T, LANES>(factor[p], rows, lane);
            } else {
                float row_max[PATCH];
#pragma unroll
                for (int i = 0; i < PATCH; i++)
                    row_max[i] = piece_maximum<T>(words[i] + 4 * p);
                group_row_max<LANES>(factor[p], row_max, lane);
            }
            make(at.unit * PATCH + lane * OWN, block, factor[p]);
        }
    }

    /* Of row i of the patch; all lanes. */
    __device__ __forceinline__ of_pieces of_row(int i) const {
        of_pieces factors;
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            factors.of[p] = __shfl_sync(0xFFFFFFFFu, factor[p][i % OWN], i / OWN, LANES);
        return factors;
    }
};

/* Row i of the patch, multiplied. */
template <typename T, typename Factors>
__device__ __forceinline__ void scale_row(float (&scaled)[PATCH],
                                          uint32_t (&words)[patch_words<T>::COUNT],
                                          const Factors &factors) {
    row_stay_packed<T>(words);
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        scaled[j] = __fmul_rn(element<T>::value(words, j), factors.of[j / element<T>::VECTOR]);
}

/* ---- columns of a tile --------------------------------------------------------------------- */

/* The lanes' maxima of 8 columns become those over the warp's 16 rows, in shared memory. */
template <typename T>
__device__ __forceinline__ void column_max_share(float (*warp_max)[TN__TILE], const patch_place &at,
                                                 const float (&column_max)[PATCH]) {
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

template <typename T>
__device__ __forceinline__ void
column_max_put(float (*warp_max)[TN__TILE], const patch_place &at,
               const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    float column_max[PATCH];
    column_maxima<T>(column_max, words);
    column_max_share<T>(warp_max, at, column_max);
}

/* The same of pair_maxima's columns, as 16-bit numbers. */
template <typename T>
__device__ __forceinline__ void column_pairs_share(unsigned short (*warp_max)[TN__TILE],
                                                   const patch_place &at,
                                                   const uint32_t (&columns)[PATCH / 2]) {
    const int upper = at.unit & 1;
    uint32_t kept[2];
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const uint32_t keep = upper ? columns[w + 2] : columns[w];
        const uint32_t give = upper ? columns[w] : columns[w + 2];
        kept[w] = larger_pair<T>(keep, __shfl_xor_sync(0xFFFFFFFFu, give, 16));
    }
    *(uint2 *)&warp_max[at.unit / 2][patch_column<T>(at.lane16, upper * 4)] =
        make_uint2(kept[0], kept[1]);
}

template <typename T>
__device__ __forceinline__ void
column_max_put(unsigned short (*warp_max)[TN__TILE], const patch_place &at,
               const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    uint32_t rows[PATCH / 2], columns[PATCH / 2];
    pair_maxima<T>(rows, columns, words);
    column_pairs_share<T>(warp_max, at, columns);
}

/* A size that is shared, as a number. */
template <typename T> __device__ __forceinline__ float shared_value(float size) { return size; }
template <typename T> __device__ __forceinline__ float shared_value(unsigned short size) {
    const uint32_t bits = size;
    return element<T>::value(&bits, 0);
}

/* The largest of a column's 8 maxima, one from each warp. */
template <typename T>
__device__ __forceinline__ float largest_of_warps(const float (*warp_max)[TN__TILE], int column) {
    float amax = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        amax = fmaxf(amax, warp_max[w][column]);
    return amax;
}

template <typename T>
__device__ __forceinline__ float largest_of_warps(const unsigned short (*warp_max)[TN__TILE],
                                                  int column) {
    uint32_t amax = 0; /* numbers that are not negative compare as their bits do */
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        amax = max(amax, (uint32_t)warp_max[w][column]);
    return element<T>::value(&amax, 0);
}

/* Thread c < 128: the scale of column c from the warps' maxima. */
template <typename T, __nv_fp8_interpretation_t F, typename M>
__device__ __forceinline__ void
column_scale_put(const tn__cuda_quantize_arguments &a, const patch_place &at,
                 const M (*warp_max)[TN__TILE], float *column_scale) {
    const int column = (int)threadIdx.x;
    if (column >= TN__TILE) return;
    const scale_pair made =
        block_scales<T, F>(largest_of_warps<T>(warp_max, column), a.amax_epsilon, a.is_pow2);
    const int64_t col = at.tile_first_col + column;
    column_scale[column] = made.scale;
    if (col < a.col.scale_stride)
        a.col.scale[at.tile_row * a.col.scale_stride + col] = col < a.cols ? made.inverse : 0.0f;
}

/* Column j of the patch as bytes into the transposed tile, to nearest. */
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

/* The patch turned: 8 bytes of each column from those of each row. */
__device__ __forceinline__ void turn_patch(uint2 (&columns)[PATCH], const uint2 (&rows)[PATCH]) {
#pragma unroll
    for (int right = 0; right < 2; right++) {
        uint32_t words[PATCH], upper[4], lower[4];
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            words[i] = right ? rows[i].y : rows[i].x;
        transpose_4x4(words, upper);
        transpose_4x4(words + 4, lower);
#pragma unroll
        for (int j = 0; j < 4; j++)
            columns[4 * right + j] = make_uint2(upper[j], lower[j]);
    }
}

/* Writes codes of the patch's rows transposed; all threads. */
template <typename T>
__device__ __forceinline__ void store_turned(const tn__cuda_quantize_arguments &a, uint4 *tile,
                                             const patch_place &at, const uint2 (&codes)[PATCH]) {
    uint2 columns[PATCH];
    turn_patch(columns, codes);
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        transposed_put<element<T>::VECTOR>(tile, patch_column<T>(at.lane16, j), at.unit,
                                           columns[j]);
    __syncthreads();
    transposed_store<element<T>::VECTOR>(tile, a.col.data, a.rows, a.cols, a.col.vectors, at);
}

/* Casts the tile with one scale into the planes that are wanted: their codes are the same. All
 * threads. */
template <typename T, __nv_fp8_interpretation_t F, typename R>
__device__ __forceinline__ void store_tile_cast(const tn__cuda_quantize_arguments &a, uint4 *tile,
                                                const patch_place &at,
                                                uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                                float scale, bool has_row, bool has_col) {
    const R rounding(a);
    uint2 codes[PATCH];
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        codes[i] = cast_row<T, F>(rounding, at, i, words[i], scale);
    if (has_row)
        store_patch_rows<T>(
            a.row, a.rows, a.cols, at, [](int) { return 0; }, [&](int i, int) { return codes[i]; });
    if (has_col) store_turned<T>(a, tile, at, codes);
}

/* Casts the tile and writes it transposed; `scales_of(j)` gives the scales of the lane's columns
 * j ... j + 3. All threads. */
template <typename T, __nv_fp8_interpretation_t F, typename ScalesOf>
__device__ __forceinline__ void
store_columns_cast(const tn__cuda_quantize_arguments &a, uint4 *tile, const patch_place &at,
                   const uint32_t (&words)[PATCH][patch_words<T>::COUNT], ScalesOf scales_of) {
    if (at.row < a.rows) { /* what is beyond is not stored */
#pragma unroll
        for (int j = 0; j < PATCH; j += 4) {
            const float4 scale = scales_of(j);
            column_put<T, F>(tile, at, j, words, scale.x);
            column_put<T, F>(tile, at, j + 1, words, scale.y);
            column_put<T, F>(tile, at, j + 2, words, scale.z);
            column_put<T, F>(tile, at, j + 3, words, scale.w);
        }
    }
    __syncthreads();
    transposed_store<element<T>::VECTOR>(tile, a.col.data, a.rows, a.cols, a.col.vectors, at);
}

/* A number of a size that is shared: the element's bits, or fp32. */
template <typename T> struct shared_size { typedef unsigned short type; };
template <> struct shared_size<float> { typedef float type; };

/* The maxima of a patch's columns go to shared memory, if they are wanted; returns that of row
 * lane16 / 2. */
template <typename T>
__device__ __forceinline__ float
patch_maxima_share(typename shared_size<T>::type (*warp_max)[TN__TILE], const patch_place &at,
                   const uint32_t (&words)[PATCH][patch_words<T>::COUNT], bool has_col) {
    if constexpr (sizeof(T) == 2) {
        uint32_t rows[PATCH / 2], columns[PATCH / 2];
        pair_maxima<T>(rows, columns, words);
        if (has_col) column_pairs_share<T>(warp_max, at, columns);
        return half_warp_pair_max<T>(rows, at.lane16);
    } else {
        float rows[PATCH];
        if (has_col) column_max_put<T>(warp_max, at, words);
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            rows[i] = row_maximum<T>(words[i]);
        return half_warp_row_max(rows, at.lane16);
    }
}

/* The signs of row i of the patch as the highest bits of bytes; no element is a NaN. */
template <typename T>
__device__ __forceinline__ uint2 row_signs(const uint32_t (&words)[patch_words<T>::COUNT]) {
    const int half = patch_words<T>::COUNT / 2;
    uint32_t bytes[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t *of = words + h * half;
        bytes[h] =
            0x80808080u & (half == 2 ? __byte_perm(of[0], of[1], 0x7531)
                                     : bytes_of(of[0], of[1], of[half - 2], of[half - 1], 3));
    }
    return make_uint2(bytes[0], bytes[1]);
}

/* The codes of the patch's rows, scaled by rows and by columns, each element with one number for
 * both. Where all elements of the tile are finite (IS_FINITE), no scale lifts one beyond what the
 * type holds, and nothing is asked for each. */
template <typename T, __nv_fp8_interpretation_t F, bool IS_FINITE, typename ScaleOf>
__device__ __forceinline__ void draw_patch(const stochastically &rounding, const patch_place &at,
                                           const uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                           ScaleOf scale_of, const float (&of_column)[PATCH],
                                           uint2 (&codes)[PATCH], uint2 (&column_codes)[PATCH]) {
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const stochastically::numbers numbers = rounding.of_row<T>(at, i);
        const float scale = scale_of(i);
        float by_row[PATCH], by_column[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j++) {
            const float value = element<T>::value(words[i], j);
            by_row[j] = __fmul_rn(value, scale);
            by_column[j] = __fmul_rn(value, of_column[j]);
        }
        if constexpr (IS_FINITE) {
            const uint2 sign = row_signs<T>(words[i]);
            codes[i] = stochastically::size_codes<F>(by_row, numbers);
            column_codes[i] = stochastically::size_codes<F>(by_column, numbers);
            codes[i] = make_uint2(codes[i].x | sign.x, codes[i].y | sign.y);
            column_codes[i] = make_uint2(column_codes[i].x | sign.x, column_codes[i].y | sign.y);
        } else {
            codes[i] = stochastically::codes<F>(by_row, numbers);
            column_codes[i] = stochastically::codes<F>(by_column, numbers);
        }
    }
}

/* Whether all elements of the tile are finite; found so that the compiler knows that all lanes
 * branch alike. All threads. */
template <typename T>
__device__ __forceinline__ bool
is_finite_block(const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    const int others = __syncthreads_or(!patch_is_finite<T>(words));
    return !__reduce_or_sync(0xFFFFFFFFu, (uint32_t)others);
}

/* Casts the tile with scales of rows and of columns into the planes that are wanted. All
 * threads. */
template <typename T, __nv_fp8_interpretation_t F, typename ScaleOf>
__device__ __forceinline__ void
store_drawn(const tn__cuda_quantize_arguments &a, uint4 *tile, const patch_place &at,
            const uint32_t (&words)[PATCH][patch_words<T>::COUNT], ScaleOf scale_of,
            const float *column_scale, bool is_finite) {
    const stochastically rounding(a);
    float of_column[PATCH];
    uint2 codes[PATCH], column_codes[PATCH];
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        of_column[j] = a.col.data ? column_scale[patch_column<T>(at.lane16, j)] : 1.0f;
    if (is_finite)
        draw_patch<T, F, true>(rounding, at, words, scale_of, of_column, codes, column_codes);
    else
        draw_patch<T, F, false>(rounding, at, words, scale_of, of_column, codes, column_codes);
    /* The place is found anew: there are no registers to keep it in. */
    const patch_place place = patch_in_tile(at.tile_row, at.tile_col);
    if (a.row.data)
        store_patch_rows<T>(
            a.row, a.rows, a.cols, place, [](int) { return 0; },
            [&](int i, int) { return codes[i]; });
    if (a.col.data) store_turned<T>(a, tile, place, column_codes);
}

/* The tile whose patches the threads hold in `words`, which a producer may have made. Of the planes
 * that a kernel is compiled for, the one whose data is NULL is left out. `transposed` is for the
 * column plane; it is the block's own, or given by a caller that has it for another use too. */
template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL, typename R = to_nearest>
__device__ __forceinline__ void
quantize_patches_1d(const tn__cuda_quantize_arguments &a, const patch_place &at,
                    uint32_t (&words)[PATCH][patch_words<T>::COUNT], uint4 *transposed) {
    __shared__ __align__(16) typename shared_size<T>::type warp_max[WARPS][TN__TILE];
    __shared__ __align__(16) float column_scale[TN__TILE];
    const bool has_col = COL && a.col.data;
    const float row_max = patch_maxima_share<T>(warp_max, at, words, has_col);
    patch_stay_packed<T>(words);
    float scale = 1.0f;
    const auto scale_of = [&](int i) { return __shfl_sync(0xFFFFFFFFu, scale, 2 * i, 16); };
    if (ROW && a.row.data) {
        scale = row_scale_put<T, F>(a, at, row_max);
        if constexpr (!R::IS_STOCHASTIC) {
            /* Its stores are under way while the block waits for the columns' maxima. */
            store_rows<T, F, R>(a, at, words, scale_of);
            patch_stay_packed<T>(words);
        }
    }
    bool is_finite = false;
    if constexpr (R::IS_STOCHASTIC) is_finite = is_finite_block<T>(words);
    if (has_col) {
        if constexpr (!R::IS_STOCHASTIC) __syncthreads();
        column_scale_put<T, F>(a, at, warp_max, column_scale);
        __syncthreads();
    }
    if constexpr (R::IS_STOCHASTIC) {
        store_drawn<T, F>(a, transposed, at, words, scale_of, column_scale, is_finite);
    } else if (has_col) {
        store_columns_cast<T, F>(a, transposed, at, words, [&](int j) {
            return *(const float4 *)&column_scale[patch_column<T>(at.lane16, j)];
        });
    }
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL, typename R = to_nearest>
__device__ __forceinline__ void
quantize_patches_1d(const tn__cuda_quantize_arguments &a, const patch_place &at,
                    uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    __shared__ uint4 transposed[TILE_PIECES]; /* not there at all without COL */
    quantize_patches_1d<T, F, ROW, COL, R>(a, at, words, transposed);
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL, typename R = to_nearest>
__device__ __forceinline__ void quantize_1d(const tn__cuda_quantize_arguments &a,
                                            const patch_place &at) {
    uint32_t words[PATCH][patch_words<T>::COUNT];

    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    quantize_patches_1d<T, F, ROW, COL, R>(a, at, words);
}

/* ---- quantize, 2D ------------------------------------------------------------------------- */

/* The largest of what the threads give, none of it below 0; all threads. */
__device__ __forceinline__ float tile_max_share(float *warp_max, float amax) {
    /* Floats that are not negative compare as their bits do. */
    amax = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(amax)));
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        amax = fmaxf(amax, warp_max[w]);
    return amax;
}

/* The largest |x| of the tile, on every thread. */
template <typename T>
__device__ __forceinline__ float tile_max(float *warp_max,
                                          const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    return tile_max_share(warp_max, patch_maximum<T>(words));
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

/* Into the planes that are made. One thread. */
__device__ __forceinline__ void tile_scales_put(const tn__cuda_quantize_arguments &a,
                                                const patch_place &at, float inverse, bool has_row,
                                                bool has_col) {
    const int64_t tiles_down = (a.rows + TN__TILE - 1) / TN__TILE;
    if (has_row) tile_scale_put(a.row, at.tile_row, at.tile_col, a.tiles_across, inverse);
    if (has_col) tile_scale_put(a.col, at.tile_col, at.tile_row, tiles_down, inverse);
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL, typename R = to_nearest>
__device__ __forceinline__ void
quantize_patches_2d(const tn__cuda_quantize_arguments &a, const patch_place &at,
                    uint32_t (&words)[PATCH][patch_words<T>::COUNT], uint4 *transposed) {
    __shared__ float warp_max[WARPS];
    const bool has_row = ROW && a.row.data, has_col = COL && a.col.data;
    const float amax = tile_max<T>(warp_max, words);
    patch_stay_packed<T>(words);
    const scale_pair made = block_scales<T, F>(amax, a.amax_epsilon, a.is_pow2);
    if (threadIdx.x == 0) tile_scales_put(a, at, made.inverse, has_row, has_col);
    store_tile_cast<T, F, R>(a, transposed, at, words, made.scale, has_row, has_col);
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL, typename R = to_nearest>
__device__ __forceinline__ void
quantize_patches_2d(const tn__cuda_quantize_arguments &a, const patch_place &at,
                    uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    __shared__ uint4 transposed[TILE_PIECES]; /* not there at all without COL */
    quantize_patches_2d<T, F, ROW, COL, R>(a, at, words, transposed);
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL, typename R = to_nearest>
__device__ __forceinline__ void quantize_2d(const tn__cuda_quantize_arguments &a,
                                            const patch_place &at) {
    uint32_t words[PATCH][patch_words<T>::COUNT];

    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    quantize_patches_2d<T, F, ROW, COL, R>(a, at, words);
}

#endif
