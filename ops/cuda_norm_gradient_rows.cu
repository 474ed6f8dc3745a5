/* Kernels of the norms' gradients that take whole rows: the means of a row, dx, and what the
 * columns of dgamma and dbeta add up to in each tile, all from one read of x, dy and what is added.
 *
 * A block takes a tile of 128 rows, or where there are few tiles a half, quarter or eighth of one,
 * the first row to the last, ROWS of them in a turn. A thread has 8 columns of
 * a row in each of STEPS steps, 16 neighbours of it a block of 128 columns, as in
 * cuda_norm_rows.cu; its pieces of the turns to come are on their way to a ring of SLOTS turns in
 * shared memory, where no other thread reads them:
 *
 *     turn         t - 1        t             t + 1 ... t + SLOTS - 2
 *     its rows     are made     are summed    are on their way
 *
 * One barrier a turn: before it what the turn's rows sum up to, block by block, goes to shared
 * memory; after it each warp adds all of that up. The sums of columns are added up in registers,
 * 16 rows at a time, and then in shared memory, each thread's own; a block that has not the first
 * of a tile's rows writes each 16 rows' as they are, since it does not know those before.
 *
 * Bytes that must move for each element of s bytes: 2 s to read x and dy, s for what is added and
 * s for dx.
 */
#include "cuda_async.cuh"
#include "cuda_norm.cuh"
#include "cuda_norm_sums.cuh"
#include "cuda_train_arguments.h"

/* ---- a turn's rows in a block's threads ------------------------------------------------------ */

/* Of a turn's rows and of the next one's: what each block of columns gives to tilt and shift; and
 * the statistics of the tile's rows. */
template <int GIVEN, int BLOCKS> struct tile_numbers {
    float given[2][GIVEN][BLOCKS];
    float mean[TN__TILE], rstd[TN__TILE];
};

/* WHOLE_ROWS: all of the block's are there. WHOLE_COLS: no warp has a part of a step. */
template <typename T, int THREADS, int STEPS, int ROWS, int SLOTS, bool IS_LAYER, bool WHOLE_ROWS,
          bool WHOLE_COLS>
struct gradient_rows {
    enum {
        THREAD_COUNT = THREADS,
        PIECES = patch_words<T>::PIECES,
        COLS = THREADS * PATCH, /* of a step */
        BLOCKS = STEPS * THREADS / 16,
        ROW = STEPS * PIECES * THREADS, /* pieces of it */
        KINDS = IS_LAYER ? 2 : 1,       /* of sums: tilt and shift, dgamma and dbeta */
        GIVEN = ROWS * KINDS * STEPS,   /* numbers that a thread has of a turn */
        LANES_EACH = 16 / GIVEN,
        GROUP_ROWS = 8, /* that are added up first: see tn_bias_gradient */
        PAIR_ROWS = 2 * GROUP_ROWS,
        PAIRS = TN__TILE / PAIR_ROWS /* of a tile */
    };
    static_assert(GIVEN <= 16, "a lane is left with one number");
    typedef tile_numbers<GIVEN, BLOCKS> numbers_of_tile;

    uint4 *ring;     /* [SLOTS][ROWS][2 or 3: x, dy, what is added][ROW] */
    float4 *of_tile; /* [KINDS][STEPS][2][THREADS] */
    int arrays, rows, cols;
    int64_t first_row;
    unsigned split, place; /* of the tile's blocks */

    __device__ __forceinline__ int pairs() const { return PAIRS / (int)split; }
    /* Columns of part `part` of the sums of the tile. */
    __device__ __forceinline__ float *part_of(float *sums, int part) const {
        const int64_t parts = 1 + PAIRS - pairs();
        return sums + (blockIdx.x / split * parts + part) * cols;
    }

    /* Column of the thread's element j in step s. */
    static __device__ __forceinline__ int column(int s, int j) {
        return s * COLS + (int)threadIdx.x / 16 * TN__TILE +
               patch_column<T>((int)threadIdx.x % 16, j);
    }
    /* No lane of the warp has a column of the row in step s. */
    __device__ __forceinline__ bool is_beyond(int s) const {
        return s * COLS + (int)threadIdx.x / 32 * 2 * TN__TILE >= cols;
    }
    /* In a step that the warp has columns in. */
    __device__ __forceinline__ bool has_piece(int s, int p) const {
        return WHOLE_COLS || column(s, p * element<T>::VECTOR) < cols;
    }
    __device__ __forceinline__ bool has_row(int row) const { return WHOLE_ROWS || row < rows; }
    /* Of the piece, from column(0, 0) on: a constant. */
    static __device__ __forceinline__ int offset(int s, int p) {
        return s * COLS + p * 16 * element<T>::VECTOR;
    }
    /* The thread's pieces of a turn's row, of x; those of the other arrays are ROW apart. */
    __device__ __forceinline__ uint4 *slot_row(int slot, int r) const {
        return ring + (slot * ROWS + r) * arrays * ROW + threadIdx.x;
    }
    /* Its first element of a row of the tile, in any of the matrices. */
    template <typename M> __device__ __forceinline__ M *own(M *matrix, int row) const {
        return matrix + (first_row * cols + (row * cols + column(0, 0)));
    }
};

/* ---- rows are on their way ------------------------------------------------------------------ */

template <typename T, typename G, int STEPS>
__device__ __forceinline__ void fetch_row(const G &g, const void *src, int row, uint4 *slot) {
    const T *from = g.own((const T *)src, row);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        if (g.is_beyond(s)) continue;
#pragma unroll
        for (int p = 0; p < G::PIECES; p++) {
            if (g.has_piece(s, p))
                fetch_piece(slot + (s * G::PIECES + p) * G::THREAD_COUNT, from + G::offset(s, p),
                            true);
        }
    }
}

/* Also of a turn that is not there: a group of fetches is empty then. */
template <typename T, typename G, int STEPS, int ROWS>
__device__ __forceinline__ void fetch_turn(const G &g, const tn__cuda_norm_gradient_arguments &a,
                                           int turn, int slot) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int row = turn * ROWS + r;
        if (row >= g.rows) break;
        fetch_row<T, G, STEPS>(g, a.of.cast.src, row, g.slot_row(slot, r));
        fetch_row<T, G, STEPS>(g, a.of.dy, row, g.slot_row(slot, r) + G::ROW);
        if (a.added) fetch_row<T, G, STEPS>(g, a.added, row, g.slot_row(slot, r) + 2 * G::ROW);
    }
    fetches_end();
}

/* 8 columns of a row in its slot; what is beyond the row is 0. */
template <typename T, typename G>
__device__ __forceinline__ void read_step(float (&value)[PATCH], const G &g, const uint4 *slot,
                                          int s) {
    uint32_t words[patch_words<T>::COUNT];
#pragma unroll
    for (int p = 0; p < G::PIECES; p++) {
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (g.has_piece(s, p)) piece = slot[(s * G::PIECES + p) * G::THREAD_COUNT];
        words[4 * p] = piece.x, words[4 * p + 1] = piece.y;
        words[4 * p + 2] = piece.z, words[4 * p + 3] = piece.w;
    }
    unpack_words<T>(value, words);
}

/* ---- a turn's rows are summed ---------------------------------------------------------------- */

/* n of 8 columns. */
template <bool IS_LAYER>
__device__ __forceinline__ void normal_of(float (&x)[PATCH], const row_statistics &of) {
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        x[j] = __fmul_rn(IS_LAYER ? __fsub_rn(x[j], of.mean) : x[j], of.rstd);
}

/* gamma of a thread's columns. */
template <int STEPS> struct own_gamma { float of[STEPS][PATCH]; };

template <typename T, typename G, int STEPS, bool IS_LAYER>
__device__ __forceinline__ void sum_step(float *tilt, float *shift, const G &g, const uint4 *slot,
                                         int s, const float (&gamma)[PATCH],
                                         const row_statistics &of) {
    float x[PATCH], dy[PATCH];
    read_step<T, G>(x, g, slot, s);
    read_step<T, G>(dy, g, slot + G::ROW, s);
    normal_of<IS_LAYER>(x, of);
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        dy[j] = __fmul_rn(dy[j], gamma[j]);
    *tilt = products_of_lane<T>(dy, x, g.has_piece(s, 0), g.has_piece(s, G::PIECES - 1));
    if constexpr (IS_LAYER) *shift = sum_of_lane<T>(dy);
}

/* Number (r * KINDS + kind) * STEPS + s of the turn goes to its place. */
template <typename T, typename G, int STEPS, int ROWS, bool IS_LAYER>
__device__ __forceinline__ void sum_turn(const G &g, int turn, int slot,
                                         const own_gamma<STEPS> &gamma,
                                         typename G::numbers_of_tile &numbers) {
    const int lane16 = (int)threadIdx.x % 16, number = lane16 / G::LANES_EACH;
    float given[G::GIVEN];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int row = turn * ROWS + r;
        row_statistics of = {0.0f, 0.0f};
        if (g.has_row(row)) of.rstd = numbers.rstd[row];
        if (IS_LAYER && g.has_row(row)) of.mean = numbers.mean[row];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            float tilt = 0.0f, shift = 0.0f;
            if (!g.is_beyond(s) && g.has_row(row))
                sum_step<T, G, STEPS, IS_LAYER>(&tilt, &shift, g, g.slot_row(slot, r), s,
                                                gamma.of[s], of);
            given[r * G::KINDS * STEPS + s] = tilt;
            if (IS_LAYER) given[(r * G::KINDS + 1) * STEPS + s] = shift;
        }
    }
    const float sum = sums_of_half_warp<T, G::GIVEN>(given, lane16);
    if (lane16 % G::LANES_EACH == 0)
        numbers.given[turn % 2][number]
                     [number % STEPS * G::THREAD_COUNT / 16 + (int)threadIdx.x / 16] = sum;
}

/* By each warp: tilt and shift of the turn's rows, number r * KINDS + kind. A lane adds up the
 * blocks b, b + 32, ... of each; at every step a lane is concerned with half as many numbers, and
 * has the mean of one in the end. */
template <typename G, int STEPS, int COUNT>
__device__ __forceinline__ void means_of_turn(float (&mean)[COUNT], const G &g,
                                              const typename G::numbers_of_tile &numbers,
                                              int turn) {
    const int blocks = (g.cols + TN__TILE - 1) / TN__TILE;
    const int lane = (int)threadIdx.x % 32;
    float total[COUNT];
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        total[n] = 0.0f;
#pragma unroll
        for (int b = 0; b < G::BLOCKS; b += ROW_PARTS) {
            const int block = b + lane, s = b / (G::BLOCKS / STEPS);
            if (block < blocks)
                total[n] = __fadd_rn(total[n], numbers.given[turn % 2][n * STEPS + s][block]);
        }
    }
#pragma unroll
    for (int apart = ROW_PARTS / 2; apart > 0; apart /= 2) {
        const int kept = COUNT * apart / ROW_PARTS;
#pragma unroll
        for (int n = 0; n < kept; n++) {
            const float keep = lane & apart ? total[n + kept] : total[n];
            const float give = lane & apart ? total[n] : total[n + kept];
            total[n] = __fadd_rn(keep, __shfl_xor_sync(0xFFFFFFFFu, give, apart));
        }
        if (kept == 0)
            total[0] = __fadd_rn(total[0], __shfl_xor_sync(0xFFFFFFFFu, total[0], apart));
    }
    const float own = __fdiv_rn(total[0], (float)g.cols);
#pragma unroll
    for (int n = 0; n < COUNT; n++)
        mean[n] = __shfl_sync(0xFFFFFFFFu, own, n * (32 / COUNT));
}

/* ---- a turn's rows are made ------------------------------------------------------------------ */

/* What a thread's columns add up to: in the group of 8 rows that goes on, and in the one before if
 * that is the first of two. */
template <int KINDS, int STEPS> struct column_sums {
    float group[KINDS][STEPS][PATCH], first[KINDS][STEPS][PATCH];
};

template <typename T, typename G, int KINDS, int STEPS>
__device__ __forceinline__ void
make_step(const G &g, const tn__cuda_norm_gradient_arguments &a, const uint4 *slot, int row, int s,
          const float (&gamma)[PATCH], const row_statistics &of, float tilt, float shift,
          column_sums<KINDS, STEPS> &sums) {
    float x[PATCH], dy[PATCH], dx[PATCH], added[PATCH];
    uint32_t words[patch_words<T>::COUNT];
    read_step<T, G>(x, g, slot, s);
    read_step<T, G>(dy, g, slot + G::ROW, s);
    normal_of<KINDS == 2>(x, of);
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        float by_gamma = __fmul_rn(dy[j], gamma[j]);
        if constexpr (KINDS == 2) by_gamma = __fsub_rn(by_gamma, shift);
        dx[j] = __fmul_rn(__fmaf_rn(-x[j], tilt, by_gamma), of.rstd);
        sums.group[0][s][j] = __fmaf_rn(dy[j], x[j], sums.group[0][s][j]);
        if constexpr (KINDS == 2) sums.group[1][s][j] = __fadd_rn(sums.group[1][s][j], dy[j]);
    }
    if (!a.of.value) return;
    if (a.added) {
        read_step<T, G>(added, g, slot + 2 * G::ROW, s);
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            dx[j] = __fadd_rn(dx[j], added[j]);
    }
    pack_words<T>(words, dx);
    T *to = g.own((T *)a.of.value, row);
#pragma unroll
    for (int p = 0; p < G::PIECES; p++) {
        if (g.has_piece(s, p))
            *(uint4 *)(to + G::offset(s, p)) =
                make_uint4(words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3]);
    }
}

/* Two groups of rows, of which the second may be empty, to the sums of the tile's first rows. */
template <typename G, int KINDS, int STEPS>
__device__ __forceinline__ void add_groups(const G &g, const column_sums<KINDS, STEPS> &sums) {
#pragma unroll
    for (int k = 0; k < KINDS; k++) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float4 *const to =
                    g.of_tile + ((k * STEPS + s) * 2 + half) * G::THREAD_COUNT + threadIdx.x;
                const float *const one = sums.first[k][s] + half * 4;
                const float *const two = sums.group[k][s] + half * 4;
                float4 tile = *to;
                tile.x = __fadd_rn(tile.x, __fadd_rn(one[0], two[0]));
                tile.y = __fadd_rn(tile.y, __fadd_rn(one[1], two[1]));
                tile.z = __fadd_rn(tile.z, __fadd_rn(one[2], two[2]));
                tile.w = __fadd_rn(tile.w, __fadd_rn(one[3], two[3]));
                *to = tile;
            }
        }
    }
}

/* Likewise to a part of their own: number `pair` of the block. */
template <typename G, int KINDS, int STEPS>
__device__ __forceinline__ void store_groups(const G &g, const tn__cuda_norm_gradient_arguments &a,
                                             int pair, const column_sums<KINDS, STEPS> &sums) {
    float *const out[2] = {a.gamma_sums, a.beta_sums};
#pragma unroll
    for (int k = 0; k < KINDS; k++) {
        if (!out[k]) continue;
        float *const part = g.part_of(out[k], 1 + ((int)g.place - 1) * g.pairs() + pair);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
#pragma unroll
            for (int j = 0; j < PATCH; j += 4) {
                const float *const one = sums.first[k][s] + j, *const two = sums.group[k][s] + j;
                const int column = G::column(s, j);
                if (column < g.cols)
                    *(float4 *)(part + column) =
                        make_float4(__fadd_rn(one[0], two[0]), __fadd_rn(one[1], two[1]),
                                    __fadd_rn(one[2], two[2]), __fadd_rn(one[3], two[3]));
            }
        }
    }
}

template <typename G, int KINDS, int STEPS>
__device__ __forceinline__ void end_pair(const G &g, const tn__cuda_norm_gradient_arguments &a,
                                         int row, const column_sums<KINDS, STEPS> &sums) {
    if (g.place == 0)
        add_groups<G, KINDS, STEPS>(g, sums);
    else
        store_groups<G, KINDS, STEPS>(g, a, row / G::PAIR_ROWS, sums);
}

/* After a group's last row. */
template <typename G, int KINDS, int STEPS>
__device__ __forceinline__ void end_group(const G &g, const tn__cuda_norm_gradient_arguments &a,
                                          int row, column_sums<KINDS, STEPS> &sums) {
    const bool is_first = row / G::GROUP_ROWS % 2 == 0;
    if (!is_first) end_pair<G, KINDS, STEPS>(g, a, row, sums);
#pragma unroll
    for (int k = 0; k < KINDS; k++) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
#pragma unroll
            for (int j = 0; j < PATCH; j++) {
                sums.first[k][s][j] = is_first ? sums.group[k][s][j] : 0.0f;
                sums.group[k][s][j] = 0.0f;
            }
        }
    }
}

template <typename T, typename G, int STEPS, int ROWS, bool IS_LAYER>
__device__ __forceinline__ void make_turn(const G &g, const tn__cuda_norm_gradient_arguments &a,
                                          int turn, int slot, const own_gamma<STEPS> &gamma,
                                          const typename G::numbers_of_tile &numbers,
                                          column_sums<G::KINDS, STEPS> &sums) {
    float of_turn[ROWS * G::KINDS];
    means_of_turn<G, STEPS, ROWS * G::KINDS>(of_turn, g, numbers, turn);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int row = turn * ROWS + r;
        if (!g.has_row(row)) break;
        const float tilt = of_turn[r * G::KINDS];
        const float shift = IS_LAYER ? of_turn[r * G::KINDS + G::KINDS - 1] : 0.0f;
        const row_statistics of = {IS_LAYER ? numbers.mean[row] : 0.0f, numbers.rstd[row]};
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (!g.is_beyond(s))
                make_step<T, G, G::KINDS, STEPS>(g, a, g.slot_row(slot, r), row, s, gamma.of[s], of,
                                                 tilt, shift, sums);
        }
        if (row % G::GROUP_ROWS == G::GROUP_ROWS - 1)
            end_group<G, G::KINDS, STEPS>(g, a, row, sums);
    }
}

/* ---- a tile's rows -------------------------------------------------------------------------- */

template <typename G, int STEPS> __device__ __forceinline__ void clear_tile(const G &g) {
#pragma unroll
    for (int i = 0; i < G::KINDS * STEPS * 2; i++)
        g.of_tile[i * G::THREAD_COUNT + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

template <typename T, typename G, int STEPS>
__device__ __forceinline__ void store_tile(const G &g, const tn__cuda_norm_gradient_arguments &a) {
    float *const out[2] = {a.gamma_sums, a.beta_sums};
#pragma unroll
    for (int k = 0; k < G::KINDS; k++) {
        if (!out[k]) continue;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = G::column(s, half * 4);
                if (column < g.cols)
                    *(float4 *)(g.part_of(out[k], 0) + column) =
                        g.of_tile[((k * STEPS + s) * 2 + half) * G::THREAD_COUNT + threadIdx.x];
            }
        }
    }
}

/* What rows that are not there give, too. */
template <typename T, typename G, int STEPS>
__device__ __forceinline__ void end_tile(const G &g, const tn__cuda_norm_gradient_arguments &a,
                                         column_sums<G::KINDS, STEPS> &sums) {
    if (g.place == 0) {
        if (g.rows % G::PAIR_ROWS != 0) add_groups<G, G::KINDS, STEPS>(g, sums);
        store_tile<T, G, STEPS>(g, a);
        return;
    }
#pragma unroll 1
    for (int pair = g.rows / G::PAIR_ROWS; pair < g.pairs(); pair++) {
        store_groups<G, G::KINDS, STEPS>(g, a, pair, sums);
        sums = {};
    }
}

template <typename T, typename G, int STEPS>
__device__ __forceinline__ void load_gamma(own_gamma<STEPS> &gamma, const G &g,
                                           const tn__cuda_norm_gradient_arguments &a) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
#pragma unroll
        for (int j = 0; j < PATCH; j += 4) {
            const int column = G::column(s, j);
#pragma unroll
            for (int v = 0; v < 4; v++)
                gamma.of[s][j + v] = 1.0f;
            if (!a.gamma) continue;
            load_floats<4, true>(gamma.of[s] + j, a.gamma_dtype, a.gamma, column, g.cols - column);
#pragma unroll
            for (int v = 0; v < 4; v++) /* -0 + 0 is not -0 */
                if (a.gamma_base != 0.0f)
                    gamma.of[s][j + v] = __fadd_rn(gamma.of[s][j + v], a.gamma_base);
        }
    }
}

template <typename T, int THREADS, int STEPS, int ROWS, int SLOTS, bool IS_LAYER, bool WHOLE_ROWS,
          bool WHOLE_COLS, typename NUMBERS>
__device__ __forceinline__ void gradient_of_tile(const tn__cuda_norm_gradient_arguments &a,
                                                 uint4 *shared, NUMBERS &numbers) {
    typedef gradient_rows<T, THREADS, STEPS, ROWS, SLOTS, IS_LAYER, WHOLE_ROWS, WHOLE_COLS> G;
    own_gamma<STEPS> gamma;
    column_sums<G::KINDS, STEPS> sums = {};
    G g;
    g.arrays = a.added ? 3 : 2;
    g.ring = shared;
    g.of_tile = (float4 *)(g.ring + SLOTS * ROWS * g.arrays * G::ROW);
    g.cols = (int)a.of.cast.cols;
    g.split = a.split;
    g.place = blockIdx.x % a.split;
    g.rows = (int)(TN__TILE / a.split);
    g.first_row = (int64_t)blockIdx.x * g.rows;
    if (!WHOLE_ROWS)
        g.rows = (int)max(min(a.of.cast.rows - g.first_row, (int64_t)g.rows), (int64_t)0);
    const int turns = (g.rows + ROWS - 1) / ROWS;
#pragma unroll
    for (int turn = 0; turn < SLOTS - 1; turn++)
        fetch_turn<T, G, STEPS, ROWS>(g, a, turn, turn);
    for (int row = (int)threadIdx.x; row < g.rows; row += THREADS) {
        numbers.rstd[row] = a.rstd[g.first_row + row];
        if (IS_LAYER) numbers.mean[row] = a.mean[g.first_row + row];
    }
    load_gamma<T, G, STEPS>(gamma, g, a);
    clear_tile<G, STEPS>(g);
    __syncthreads();
    int slot = 0, slot_before = SLOTS - 1; /* where the turn is, and the one before it */
#pragma unroll 1
    for (int turn = 0; turn <= turns; turn++) {
        fetches_wait<SLOTS - 2>();
        if (turn < turns) sum_turn<T, G, STEPS, ROWS, IS_LAYER>(g, turn, slot, gamma, numbers);
        if (turn > 0)
            make_turn<T, G, STEPS, ROWS, IS_LAYER>(g, a, turn - 1, slot_before, gamma, numbers,
                                                   sums);
        fetch_turn<T, G, STEPS, ROWS>(g, a, turn + SLOTS - 1, slot_before);
        __syncthreads();
        slot_before = slot;
        slot = slot == SLOTS - 1 ? 0 : slot + 1;
    }
    end_tile<T, G, STEPS>(g, a, sums);
}

/* Rows of two steps are launched if they have whole columns: there are no registers to ask for each
 * column, nor is there a second kernel for whole rows. */
template <typename T, int THREADS, int STEPS, int ROWS, int SLOTS, bool IS_LAYER>
__device__ __forceinline__ void norm_gradient_rows(const tn__cuda_norm_gradient_arguments &a) {
    typedef gradient_rows<T, THREADS, STEPS, ROWS, SLOTS, IS_LAYER, true, true> G;
    DYNAMIC_SHARED(shared,
                   sizeof(uint4) * (SLOTS * ROWS * 3 * G::ROW + G::KINDS * STEPS * 2 * THREADS));
    __shared__ typename G::numbers_of_tile numbers; /* once: there is no room for two */
    uint4 *const memory = (uint4 *)shared;
    const bool is_whole = (int64_t)(blockIdx.x / a.split + 1) * TN__TILE <= a.of.cast.rows &&
                          a.of.cast.cols % (2 * TN__TILE) == 0;
    if (is_skipped(a.of.skip)) return;
    if constexpr (STEPS > 1)
        gradient_of_tile<T, THREADS, STEPS, ROWS, SLOTS, IS_LAYER, false, true>(a, memory, numbers);
    else if (is_whole)
        gradient_of_tile<T, THREADS, STEPS, ROWS, SLOTS, IS_LAYER, true, true>(a, memory, numbers);
    else
        gradient_of_tile<T, THREADS, STEPS, ROWS, SLOTS, IS_LAYER, false, false>(a, memory,
                                                                                 numbers);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define KERNEL(name, T, threads, steps, rows, slots, blocks, is_layer)                             \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                  \
        name(const __grid_constant__ tn__cuda_norm_gradient_arguments a) {                         \
        norm_gradient_rows<T, threads, steps, rows, slots, is_layer>(a);                           \
    }
/* As many rows and slots as there is room for: of rows of 2048 for two blocks. */
#define NORM(name, T, slots, rows)                                                                 \
    KERNEL(norm_gradient_rows_2048_rms_##name, T, 256, 1, 1, slots, 2, false)                      \
    KERNEL(norm_gradient_rows_4096_rms_##name, T, 512, 1, rows, 4, 1, false)                       \
    KERNEL(norm_gradient_rows_2048_layer_##name, T, 256, 1, 1, slots, 2, true)                     \
    KERNEL(norm_gradient_rows_4096_layer_##name, T, 512, 1, rows, 4, 1, true)
#define NORM_8192(name, T)                                                                         \
    KERNEL(norm_gradient_rows_8192_rms_##name, T, 512, 2, 1, 3, 1, false)                          \
    KERNEL(norm_gradient_rows_8192_layer_##name, T, 512, 2, 1, 3, 1, true)

NORM(fp32, float, 3, 1)
NORM(bf16, __nv_bfloat16, 6, 2)
NORM(fp16, __half, 6, 2)
NORM_8192(bf16, __nv_bfloat16)
NORM_8192(fp16, __half)
