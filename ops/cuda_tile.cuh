/* How a block of 256 threads holds a 128 x 128 tile, shared by the casts and the transpose.
 *
 * A warp holds 16 rows of the tile, each half warp 8 of them, and a lane 8 columns of those 8
 * rows: an 8 x 8 patch in registers. A row of the tile is read by the 16 lanes of a half warp,
 * 16 bytes each, so that every request is whole lines.
 *
 *      columns    0 ... 7   8 ... 15   ...  120 ... 127      (16-bit elements)
 *      lane          0          1       ...      15          rows 16 w + 0 ... 7   of warp w
 *      lane         16         17       ...      31          rows 16 w + 8 ... 15
 *
 * With 32-bit elements a lane's 8 columns are two pieces of 4, at 4 c and 64 + 4 c.
 *
 * Transposed bytes go through shared memory as `units` of 8 bytes (8 rows of one column): unit u
 * of column k lies at k * 16 + (u ^ swizzle(k)). The 16 lanes of a half warp write one unit each
 * of 16 columns whose swizzles differ, and 8 lanes read a whole column 16 bytes at a time: both
 * without bank conflicts.
 */
#ifndef TENURE_CUDA_TILE_CUH
#define TENURE_CUDA_TILE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda_arguments.h"

enum {
    PATCH = 8, /* rows and columns that a lane holds */
    WARPS = TN__TILE_THREADS / 32,
    UNITS = TN__TILE / PATCH, /* of a column in shared memory */
    TILE_PIECES = TN__TILE * TN__TILE / 16
};

/* ---- what PTX alone can say; without it (on a CPU) the plain meaning ------------------------ */

/* Launched before the kernel ahead of it has ended (cuda_table.c): it waits for it here. */
__device__ __forceinline__ void wait_for_the_kernel_ahead() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The one behind may take its place while this one works, if it is made to wait as above. */
__device__ __forceinline__ void let_the_kernel_behind_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* threadIdx.x, asked anew: what follows from it is computed where it is wanted, for a loop over
 * tiles has no registers to keep it in. */
__device__ __forceinline__ uint32_t thread_of_block() {
#ifdef __CUDA_ARCH__
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
#else
    return threadIdx.x;
#endif
}

/* The same address, of which the compiler computes and reads nothing ahead of here. */
template <typename T> __device__ __forceinline__ const T *address_anew(const T *address) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+l"(address));
#endif
    return address;
}

/* Uniform over the grid: all blocks see the same flag. Asked before any barrier. */
__device__ __forceinline__ bool is_skipped(const float *skip) { return skip && *skip != 0.0f; }

/* ---- elements ------------------------------------------------------------------------------- */

/* VECTOR: elements in 16 bytes. value(): element j of a lane's columns in one row. */
template <typename T> struct element;

template <> struct element<float> {
    enum { VECTOR = 4 };
    static __device__ float value(const uint32_t *words, int j) {
        return __uint_as_float(words[j]);
    }
    static __device__ uint32_t word(const float *values, int w) {
        return __float_as_uint(values[w]);
    }
    static __device__ float load(const void *from, int64_t at) { return ((const float *)from)[at]; }
    static __device__ void store(void *to, int64_t at, float value) { ((float *)to)[at] = value; }
    static __device__ float max_finite() { return __uint_as_float(0x7F7FFFFFu); }
};

template <> struct element<__nv_bfloat16> {
    enum { VECTOR = 8 };
    static __device__ float value(const uint32_t *words, int j) {
        uint32_t word = words[j / 2];
        return __uint_as_float(j % 2 ? word & 0xFFFF0000u : word << 16);
    }
    static __device__ uint32_t word(const float *values, int w) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * w], values[2 * w + 1]);
        return *(const uint32_t *)&pair;
    }
    static __device__ float load(const void *from, int64_t at) {
        return __bfloat162float(((const __nv_bfloat16 *)from)[at]);
    }
    static __device__ void store(void *to, int64_t at, float value) {
        ((__nv_bfloat16 *)to)[at] = __float2bfloat16_rn(value);
    }
    static __device__ float max_finite() { return __uint_as_float(0x7F7F0000u); }
};

template <> struct element<__half> {
    enum { VECTOR = 8 };
    static __device__ float value(const uint32_t *words, int j) {
        uint32_t word = words[j / 2];
        return __half2float(__ushort_as_half((unsigned short)(j % 2 ? word >> 16 : word)));
    }
    static __device__ uint32_t word(const float *values, int w) {
        __half2 pair = __floats2half2_rn(values[2 * w], values[2 * w + 1]);
        return *(const uint32_t *)&pair;
    }
    static __device__ float load(const void *from, int64_t at) {
        return __half2float(((const __half *)from)[at]);
    }
    static __device__ void store(void *to, int64_t at, float value) {
        ((__half *)to)[at] = __float2half_rn(value);
    }
    static __device__ float max_finite() { return 65504.0f; }
};

template <typename T> struct is_bf16 {
    enum { VALUE = 0 };
};
template <> struct is_bf16<__nv_bfloat16> {
    enum { VALUE = 1 };
};

/* Any NaN is stored as the canonical one; bf16 and fp16 conversions do so by themselves. */
template <typename T> __device__ __forceinline__ float canonical_of(float value) {
    return sizeof(T) == 4 && isnan(value) ? __uint_as_float(0x7FFFFFFFu) : value;
}

/* Where this thread's patch lies. */
struct patch_place {
    enum { IS_WHOLE = 0 };
    uint32_t tile_row; /* of the grid of tiles */
    uint32_t tile_col;
    int lane16;  /* which of the 16 lanes of a half warp */
    int unit;    /* which 8 rows of the tile */
    int64_t row; /* first row of the patch in the matrix */
    int64_t tile_first_row;
    int64_t tile_first_col;
};

/* The same where the whole tile is in the matrix and every plane is moved in pieces: functions that
 * take a place of either type ask nothing for each row then. */
struct whole_place : patch_place {
    enum { IS_WHOLE = 1 };
    __device__ explicit whole_place(const patch_place &at) : patch_place(at) {}
};

__device__ __forceinline__ patch_place patch_in_tile(uint32_t tile_row, uint32_t tile_col) {
    const uint32_t thread = thread_of_block();
    patch_place at;
    at.tile_row = tile_row;
    at.tile_col = tile_col;
    at.lane16 = (int)(thread % 16);
    at.unit = (int)(thread / 16);
    at.tile_first_row = (int64_t)at.tile_row * TN__TILE;
    at.tile_first_col = (int64_t)at.tile_col * TN__TILE;
    at.row = at.tile_first_row + at.unit * PATCH;
    return at;
}

__device__ __forceinline__ patch_place patch_of_tile(uint32_t tile, uint32_t tiles_across) {
    const uint32_t tile_row = tile / tiles_across;
    return patch_in_tile(tile_row, tile - tile_row * tiles_across);
}

/* Of the tile that is this block's, where the grid covers one matrix. */
__device__ __forceinline__ patch_place patch_of_thread(uint32_t tiles_across) {
    return patch_of_tile(blockIdx.x, tiles_across);
}

/* The same from the last tile to the first: what the kernel ahead has read last is read first,
 * while the L2 cache has it. */
__device__ __forceinline__ patch_place patch_of_thread_backwards(uint32_t tiles_across) {
    return patch_of_tile(gridDim.x - 1 - blockIdx.x, tiles_across);
}

/* Column in the tile of the lane's element j. */
template <typename T> __device__ __forceinline__ int patch_column(int lane16, int j) {
    const int vector = element<T>::VECTOR;
    return (j / vector) * (16 * vector) + lane16 * vector + j % vector;
}

/* Words of 32 bits that hold 8 elements. */
template <typename T> struct patch_words {
    enum { COUNT = PATCH * (int)sizeof(T) / 4, PIECES = COUNT / 4 };
};

/* How many of the patch's rows are in the matrix; 0 or less: none. Kernels step a pointer from
 * row to row and compare with this: 64-bit products and comparisons in each row would cost as
 * much as the casts do. */
template <typename Place>
__device__ __forceinline__ int patch_rows_in(int64_t rows, const Place &at) {
    return Place::IS_WHOLE ? (int)PATCH : (int)min(rows - at.row, (int64_t)PATCH);
}

template <typename Place>
__device__ __forceinline__ bool is_column_in(int64_t cols, const Place &at, int column) {
    return Place::IS_WHOLE || at.tile_first_col + column < cols;
}

template <typename Place>
__device__ __forceinline__ bool is_whole_tile(int64_t rows, int64_t cols, const Place &at) {
    return Place::IS_WHOLE ||
           (at.tile_first_row + TN__TILE <= rows && at.tile_first_col + TN__TILE <= cols);
}

/* Whether a plane is moved in pieces. */
template <typename Place> __device__ __forceinline__ bool has_vectors(int vectors, const Place &) {
    return Place::IS_WHOLE || vectors;
}

/* Asks for a tile that a later block of threads reads, a line of 128 bytes at a time, so that it is
 * in the L2 cache then. Some 3 us ahead is best: what is written pushes it out again after 5 to 8.
 * `src` is [rows, row_bytes]; what is outside of it is not asked for. */
__device__ __forceinline__ void prefetch_tile(const void *src, int64_t rows, int64_t row_bytes,
                                              int64_t first_row, int64_t first_byte,
                                              int tile_bytes) {
#ifdef __CUDA_ARCH__
    enum { LINE = 128 };
    const int across = tile_bytes / LINE;
    for (int line = (int)threadIdx.x; line < TN__TILE * across; line += TN__TILE_THREADS) {
        const int64_t row = first_row + line / across;
        const int64_t byte = first_byte + line % across * LINE;
        if (row < rows && byte < row_bytes)
            asm volatile(
                "prefetch.global.L2 [%0];" ::"l"((const char *)src + row * row_bytes + byte));
    }
#endif
}

/* From the L2 cache if this kernel itself may have written it before (IS_FRESH): the L1 caches of
 * other multiprocessors do not follow. */
template <bool IS_FRESH, typename P>
__device__ __forceinline__ P load_shared_by_blocks(const P *from) {
    if constexpr (IS_FRESH)
        return __ldcg(from);
    else
        return __ldg(from);
}

/* Of one element, by a load that the compiler does not move ahead: all 64 of a patch on their way
 * at once take more registers than there are. */
template <bool IS_FRESH, typename P> __device__ __forceinline__ P load_element(const P *from) {
    if constexpr (IS_FRESH)
        return __ldcg(from);
    else
        return *from;
}

/* Reads the patch; what lies outside of the matrix is 0. */
template <typename T, bool IS_FRESH = false>
__device__ __forceinline__ void patch_load(uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                           const void *src, int64_t rows, int64_t cols, int vectors,
                                           const patch_place &at) {
    const int64_t first = at.row * cols + at.tile_first_col;
    if (vectors) {
        const int rows_in = patch_rows_in(rows, at);
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            const int column = patch_column<T>(at.lane16, p * element<T>::VECTOR);
            const int height = at.tile_first_col + column < cols ? rows_in : 0;
            const T *from = (const T *)src + first + column;
#pragma unroll
            for (int i = 0; i < PATCH; i++) {
                uint4 piece = make_uint4(0, 0, 0, 0);
                if (i < height) piece = load_shared_by_blocks<IS_FRESH>((const uint4 *)from);
                from += cols;
                words[i][4 * p] = piece.x;
                words[i][4 * p + 1] = piece.y;
                words[i][4 * p + 2] = piece.z;
                words[i][4 * p + 3] = piece.w;
            }
        }
        return;
    }
    const int height = patch_rows_in(rows, at);
    const int width = (int)min(cols - at.tile_first_col, (int64_t)TN__TILE);
    const T *from = (const T *)src + first;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
#pragma unroll
        for (int j = 0; j < PATCH; j++) {
            const int column = patch_column<T>(at.lane16, j);
            uint32_t bits = 0;
            if (i < height && column < width) {
                if constexpr (sizeof(T) == 4)
                    bits = load_element<IS_FRESH>((const uint32_t *)from + column);
                else
                    bits = load_element<IS_FRESH>((const unsigned short *)from + column);
            }
            if constexpr (sizeof(T) == 4)
                words[i][j] = bits;
            else if (j % 2)
                words[i][j / 2] |= bits << 16;
            else
                words[i][j / 2] = bits;
        }
        from += cols;
    }
}

/* Makes the compiler compute a word here, not once in each branch that uses it. */
__device__ __forceinline__ void make_here(uint32_t &word) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(word));
#endif
}

/* Makes the compiler forget that it has unpacked the words before: it would keep 64 floats alive
 * from one phase to the next, which takes twice the registers and halves the blocks that fit. */
template <typename T>
__device__ __forceinline__ void row_stay_packed(uint32_t (&words)[patch_words<T>::COUNT]) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int w = 0; w < patch_words<T>::COUNT; w++)
            asm volatile("" : "+r"(words[w]));
    }
}

template <typename T>
__device__ __forceinline__ void patch_stay_packed(uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        row_stay_packed<T>(words[i]);
}

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

template <int VECTOR> __device__ __forceinline__ int column_swizzle(int column) {
    return (column / VECTOR) % UNITS;
}

/* Puts the 8 bytes of rows 8 unit ... 8 unit + 7 of a column into the transposed tile. */
template <int VECTOR>
__device__ __forceinline__ void transposed_put(uint4 *tile, int column, int unit, uint2 bytes) {
    ((uint2 *)tile)[column * UNITS + (unit ^ column_swizzle<VECTOR>(column))] = bytes;
}

template <int VECTOR>
__device__ __forceinline__ uint2 transposed_get(const uint4 *tile, int column, int unit) {
    return ((const uint2 *)tile)[column * UNITS + (unit ^ column_swizzle<VECTOR>(column))];
}

/* Where in the transposed tile 16 bytes of a column (units 2 piece and 2 piece + 1) lie; the
 * two units are exchanged if the column's swizzle is odd. */
template <int VECTOR>
__device__ __forceinline__ int transposed_piece(int column, int piece, int *is_exchanged) {
    int swizzle = column_swizzle<VECTOR>(column);
    *is_exchanged = swizzle & 1;
    return column * (UNITS / 2) + (piece ^ (swizzle >> 1));
}

__device__ __forceinline__ uint4 exchange_units(uint4 piece, int is_exchanged) {
    return is_exchanged ? make_uint4(piece.z, piece.w, piece.x, piece.y) : piece;
}

/* Where in the transposed tile byte `row` of a column lies, or the word of 4 bytes that begins
 * there: what the swizzle exchanges is larger. */
template <int VECTOR> __device__ __forceinline__ int transposed_byte(int column, int row) {
    return column * TN__TILE + (row ^ column_swizzle<VECTOR>(column) * PATCH);
}

/* Bytes before a word of memory begins, in the columns that are this warp's: every WARPS-th, so
 * that it is the same in all. */
__device__ __forceinline__ int bytes_before_word(const unsigned char *dst, int64_t stride,
                                                 uint32_t warp) {
    static_assert(WARPS % 4 == 0, "columns of a warp");
    return (int)(0u - ((uint32_t)(uintptr_t)dst + warp * (uint32_t)stride)) & 3;
}

/* Rows of a column that are no whole words of memory, at most 3 at either end: 8 lanes a column. */
template <int VECTOR>
__device__ __forceinline__ void transposed_ends_store(const uint4 *tile, unsigned char *dst,
                                                      int64_t stride, int width, int height) {
    enum { LANES = 8, AT_ONCE = 32 / LANES };
    const uint32_t thread = thread_of_block(), warp = thread / 32;
    const int before = bytes_before_word(dst, stride, warp), whole = max(height - before, 0) & ~3;
    const int end = (int)(thread % LANES), row = end < 4 ? end : before + whole + end - 4;
    if (row >= (end < 4 ? min(before, height) : height)) return;
    int column = (int)(warp + thread % 32 / LANES * WARPS);
    unsigned char *to = dst + column * stride + row;
#pragma unroll 2
    for (; column < width; column += AT_ONCE * WARPS) {
        *to = ((const unsigned char *)tile)[transposed_byte<VECTOR>(column, row)];
        to += AT_ONCE * WARPS * stride;
    }
}

/* Writes the first `height` bytes of the transposed tile's columns, of which there are `width`, to
 * any address; `stride` from column to column. A warp writes a column at a time, a lane a word of
 * memory, and then their ends. Not inline: kernels have no registers left for it. */
template <int VECTOR>
__device__ __attribute__((noinline)) void
transposed_store_anywhere(const uint4 *tile, unsigned char *dst, int64_t stride, int width,
                          int height) {
#ifdef __CUDA_ARCH__
    __builtin_assume(__isShared(tile));
    __builtin_assume(__isGlobal(dst));
#endif
    const uint32_t thread = thread_of_block(), warp = thread / 32;
    const int before = bytes_before_word(dst, stride, warp);
    const int row = (int)(thread % 32) * 4, next = min(row + 4, TN__TILE - 4);
    unsigned char *to = dst + warp * stride + row + before;
    if (row + before + 4 <= height) {
#pragma unroll 4
        for (int column = (int)warp; column < width; column += WARPS) {
            const unsigned char *bytes = (const unsigned char *)tile;
            const uint32_t low = *(const uint32_t *)(bytes + transposed_byte<VECTOR>(column, row));
            const uint32_t high =
                *(const uint32_t *)(bytes + transposed_byte<VECTOR>(column, next));
            *(uint32_t *)to = __funnelshift_r(low, high, 8 * before);
            to += WARPS * stride;
        }
    }
    transposed_ends_store<VECTOR>(tile, dst, stride, width, height);
}

/* Writes the transposed tile to dst [cols, rows]; all threads, after a barrier. */
template <int VECTOR, typename Place>
__device__ __forceinline__ void transposed_store(const uint4 *tile, unsigned char *dst,
                                                 int64_t rows, int64_t cols, int vectors,
                                                 const Place &at) {
    if (has_vectors(vectors, at)) {
        const int piece = (int)(threadIdx.x % 8), first = (int)(threadIdx.x / 8);
        const int64_t row = at.tile_first_row + piece * 16, col = at.tile_first_col + first;
        const int width = row < rows ? (int)min(cols - col, (int64_t)TN__TILE) : 0;
        unsigned char *to = dst + col * rows + row;
#pragma unroll
        for (int pass = 0; pass < TN__TILE / 32; pass++) {
            int is_exchanged;
            int index = transposed_piece<VECTOR>(pass * 32 + first, piece, &is_exchanged);
            uint4 bytes = exchange_units(tile[index], is_exchanged);
            if (Place::IS_WHOLE || pass * 32 < width) *(uint4 *)to = bytes;
            to += 32 * rows;
        }
        return;
    }
    const int height = (int)min(rows - at.tile_first_row, (int64_t)TN__TILE);
    const int width = (int)min(cols - at.tile_first_col, (int64_t)TN__TILE);
    transposed_store_anywhere<VECTOR>(tile, dst + at.tile_first_col * rows + at.tile_first_row,
                                      rows, width, height);
}

/* Reads src [cols, rows] into the transposed tile; the caller's barrier follows. Outside: 0. */
template <int VECTOR, typename Place>
__device__ __forceinline__ void transposed_load(uint4 *tile, const unsigned char *src, int64_t rows,
                                                int64_t cols, int vectors, const Place &at) {
    if (has_vectors(vectors, at)) {
        int piece = (int)(threadIdx.x % 8);
        int64_t row = at.tile_first_row + piece * 16;
#pragma unroll
        for (int pass = 0; pass < TN__TILE / 32; pass++) {
            int column = pass * 32 + (int)(threadIdx.x / 8);
            int64_t col = at.tile_first_col + column;
            int is_exchanged;
            int index = transposed_piece<VECTOR>(column, piece, &is_exchanged);
            uint4 bytes = make_uint4(0, 0, 0, 0);
            if (Place::IS_WHOLE || (row < rows && col < cols))
                bytes = __ldg((const uint4 *)(src + col * rows + row));
            tile[index] = exchange_units(bytes, is_exchanged);
        }
        return;
    }
    for (int column = (int)(threadIdx.x / 32); column < TN__TILE; column += WARPS) {
        int64_t col = at.tile_first_col + column;
        for (int r = (int)(threadIdx.x % 32); r < TN__TILE; r += 32) {
            int64_t row = at.tile_first_row + r;
            ((unsigned char *)tile)[transposed_byte<VECTOR>(column, r)] =
                row < rows && col < cols ? src[col * rows + row] : (unsigned char)0;
        }
    }
}

/* A kernel that holds patches of T. Registers for `blocks` blocks on a multiprocessor (the casts:
 * 3, or 4 where only the column plane is made), or for 2 where the patch is 64 words: enough reads
 * in flight, and nothing spills. */
#define TILE_KERNEL(name, arguments, T, blocks, body)                                              \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS, sizeof(T) == 2 ? blocks : 2)    \
        name(const __grid_constant__ arguments a) {                                                \
        body(a);                                                                                   \
    }

#endif
