/* Products of FP8 operands with scales of blocks, on Hopper's tensor cores.
 *
 * A multiprocessor has one block for the whole launch, which takes tile after tile of d, 192 x 128.
 * One of its warpgroups begins the loads of steps of 128 of what is contracted, four of which fit
 * into shared memory; three multiply, 64 rows each:
 *
 *     p = the step's products, from 0, by the tensor cores
 *     y = fma(a's scale * b's scale, p, y)     b's scales are 128 x 128
 *     y = fma(p * a's scale, b's scale, y)     they are 1 x 128
 *
 * that is, what cuBLASLt does, to the bit. The three take turns to begin a step, so that the tensor
 * cores always have the next one's while a warpgroup scales: two that go at once would both scale
 * while nothing is multiplied. A tile of 192 x 128 is what registers hold (64 sums and 64 products
 * a thread); larger ones by two warpgroups were slower. Scales of tiles are fetched 32 steps ahead,
 * one to a lane.
 *
 * Sums go to d by boxes, through shared memory, while the next tile is multiplied. Where d is added
 * to, the memory does that: no block reads it.
 */
#include "cuda_scale.cuh"
#include "cuda_wgmma.cuh"
#include "cuda_wgmma_arguments.h"

enum {
    STEPS = TN__WGMMA_STEPS,
    PARTS = TN__WGMMA_WARPGROUPS,
    DEPTH = TN__WGMMA_DEPTH,
    A_BYTES = TN__WGMMA_ROWS * DEPTH, /* of a step */
    B_BYTES = TN__WGMMA_COLS * DEPTH,
    OUT_BOX_BYTES = TN__WGMMA_PART * TN__WGMMA_BOX_BYTES,
    OUT_BYTES = TN__WGMMA_BOXES * OUT_BOX_BYTES, /* of a warpgroup */
    TURNS = 8, /* the first barrier of turns: those before are of parts */
    GROUP = 11 /* tiles, one below the other, that are taken before the next column: what 132 blocks
                * read at a time is least for 11 x 12, and L2 serves it */
};
static_assert(STEPS * (A_BYTES + B_BYTES) + PARTS * OUT_BYTES +
                      STEPS * (TN__WGMMA_ROWS + TN__WGMMA_COLS) * 4 + 2 * STEPS * 8 + 1024 ==
                  TN__WGMMA_SHARED_BYTES,
              "what the launch asks for");
static_assert(32 % STEPS == 0, "32 scales are those of whole rounds of steps");

struct tile_place {
    int row, col; /* its first */
};

__device__ __forceinline__ tile_place tile_at(const tn__cuda_wgmma_arguments &a, int tile) {
    const int in_group = GROUP * a.tiles_across;
    const int first = tile / in_group * GROUP, rest = tile % in_group;
    const int down = min(GROUP, a.tiles_down - first);
    tile_place at;
    at.row = (first + rest % down) * TN__WGMMA_ROWS;
    at.col = rest / down * TN__WGMMA_COLS;
    return at;
}

__device__ __forceinline__ int steps_of(const tn__cuda_wgmma_arguments &a) {
    return (a.contracted + DEPTH - 1) / DEPTH;
}

#if TN__HAS_WGMMA

struct shared_place {
    unsigned char *a, *b, *out;
    float *a_scale, *b_scale;
    box_arrival *full, *empty; /* of each step: it has come; all warps are done with it */
};

__device__ __forceinline__ shared_place shared_of(unsigned char *shared) {
    shared_place at;
    at.a = box_aligned(shared);
    at.b = at.a + STEPS * A_BYTES;
    at.out = at.b + STEPS * B_BYTES;
    at.a_scale = (float *)(at.out + PARTS * OUT_BYTES);
    at.b_scale = at.a_scale + STEPS * TN__WGMMA_ROWS;
    at.full = (box_arrival *)(at.b_scale + STEPS * TN__WGMMA_COLS);
    at.empty = at.full + STEPS;
    return at;
}

/* ---- loads: one thread ---------------------------------------------------------------------- */

template <bool HAS_VECTORS>
__device__ __forceinline__ void load_step(const tn__cuda_wgmma_arguments &a, const shared_place &at,
                                          const tile_place &tile, int step, int slot) {
    const int bytes = A_BYTES + B_BYTES + (TN__WGMMA_ROWS + (HAS_VECTORS ? TN__WGMMA_COLS : 0)) * 4;
    box_arrival *full = at.full + slot;
    box_arrival_expect(full, bytes);
    box_load(a.a_map, step * DEPTH, tile.row, at.a + slot * A_BYTES, full);
    box_load(a.b_map, step * DEPTH, tile.col, at.b + slot * B_BYTES, full);
    box_load(a.a_scale_map, tile.row, step, (unsigned char *)(at.a_scale + slot * TN__WGMMA_ROWS),
             full);
    if (HAS_VECTORS)
        box_load(a.b_scale_map, tile.col, step,
                 (unsigned char *)(at.b_scale + slot * TN__WGMMA_COLS), full);
}

/* Of `phases` bit s is the one that slot s is in next. Every tile begins with slot 0. */
template <bool HAS_VECTORS>
__device__ __forceinline__ void load_tiles(const tn__cuda_wgmma_arguments &a,
                                           const shared_place &at) {
    const int tiles = a.tiles_down * a.tiles_across, steps = steps_of(a);
    uint32_t phases = (1u << STEPS) - 1; /* at first they are empty */
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place place = tile_at(a, tile);
        int slot = 0;
        for (int step = 0; step < steps; step++) {
            box_arrival_wait(at.empty + slot, phases >> slot & 1);
            phases ^= 1u << slot;
            load_step<HAS_VECTORS>(a, at, place, step, slot);
            if (++slot == STEPS) slot = 0;
        }
    }
}

/* ---- sums: the warpgroups that multiply ----------------------------------------------------- */

/* What a thread needs to know of itself. */
struct multiplier {
    int part; /* its warpgroup */
    int lane;
    int row;        /* in the part: the first of its two */
    bool is_leader; /* of the warpgroup */
};

/* b's scales of a column of tiles, a step to a lane: of the next 32 steps, and of 32 behind. */
struct tile_scales {
    const float *of;
    float now, later;
};

__device__ __forceinline__ float tile_scale_fetch(const tile_scales &s, int step, int steps) {
    return __ldg(s.of + min(step, steps - 1));
}

__device__ __forceinline__ void add_by_tiles(float (&y)[PRODUCTS], const float (&p)[PRODUCTS],
                                             float upper, float lower) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; i += 4) {
        y[i] = fmaf(upper, p[i], y[i]);
        y[i + 1] = fmaf(upper, p[i + 1], y[i + 1]);
        y[i + 2] = fmaf(lower, p[i + 2], y[i + 2]);
        y[i + 3] = fmaf(lower, p[i + 3], y[i + 3]);
    }
}

__device__ __forceinline__ void add_by_vectors(float (&y)[PRODUCTS], const float (&p)[PRODUCTS],
                                               float upper, float lower, const float *b_scale) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; i += 4) {
        const float2 b = *(const float2 *)(b_scale + 2 * i);
        y[i] = fmaf(p[i] * upper, b.x, y[i]);
        y[i + 1] = fmaf(p[i + 1] * upper, b.y, y[i + 1]);
        y[i + 2] = fmaf(p[i + 2] * lower, b.x, y[i + 2]);
        y[i + 3] = fmaf(p[i + 3] * lower, b.y, y[i + 3]);
    }
}

/* The step in a slot, which is known when this is compiled: addresses are constants then. */
template <int TYPES, bool HAS_VECTORS>
__device__ __forceinline__ void add_step(const shared_place &at, const multiplier &me, int slot,
                                         uint32_t phase, float tile_scale, float (&y)[PRODUCTS]) {
    float p[PRODUCTS];
    const uint64_t a = rows_at(shared_address(at.a)) + me.part * (TN__WGMMA_PART * DEPTH / 16) +
                       slot * (A_BYTES / 16);
    const uint64_t b = rows_at(shared_address(at.b)) + slot * (B_BYTES / 16);
    const float *a_scale = at.a_scale + slot * TN__WGMMA_ROWS + me.part * TN__WGMMA_PART + me.row;
    box_arrival_wait(at.full + slot, phase);
    turn_wait(TURNS + me.part);
    products_settle(p);
    products_begin();
#pragma unroll
    for (int i = 0; i < DEPTH / 32; i++)
        multiply<TYPES>(p, a + 2 * i, b + 2 * i, i);
    products_end();
    turn_pass(TURNS + (me.part + 1) % PARTS);
    float upper = a_scale[0], lower = a_scale[8];
    if (!HAS_VECTORS) {
        upper *= tile_scale;
        lower *= tile_scale;
    }
    products_wait();
    products_settle(p);
    if (HAS_VECTORS)
        add_by_vectors(y, p, upper, lower, at.b_scale + slot * TN__WGMMA_COLS + me.lane % 4 * 2);
    __syncwarp();
    if (me.lane == 0) box_arrival_come(at.empty + slot); /* each warp: all have read scales */
    if (!HAS_VECTORS) add_by_tiles(y, p, upper, lower);
}

template <int TYPES, bool HAS_VECTORS>
__device__ __forceinline__ void add_tile(const tn__cuda_wgmma_arguments &a, const shared_place &at,
                                         const multiplier &me, const tile_place &tile,
                                         uint32_t &phases, float (&y)[PRODUCTS]) {
    const int steps = steps_of(a);
    tile_scales s = {HAS_VECTORS ? nullptr : a.b_scale + tile.col / DEPTH * a.b_scale_stride, 0, 0};
    if (!HAS_VECTORS) s.later = tile_scale_fetch(s, me.lane, steps);
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++)
        y[i] = 0.0f;
    for (int round = 0; round < steps; round += STEPS) {
        if (!HAS_VECTORS && round % 32 == 0) {
            s.now = s.later;
            if (round + 32 < steps) s.later = tile_scale_fetch(s, round + 32 + me.lane, steps);
        }
#pragma unroll
        for (int slot = 0; slot < STEPS; slot++) {
            if (round + slot >= steps) break;
            const float scale =
                HAS_VECTORS ? 0.0f : __shfl_sync(0xFFFFFFFF, s.now, round % 32 + slot);
            add_step<TYPES, HAS_VECTORS>(at, me, slot, phases >> slot & 1, scale, y);
            phases ^= 1u << slot;
        }
    }
}

/* ---- d -------------------------------------------------------------------------------------- */

/* A box of 64 rows by 32 columns of fp32: two of the thread's 8 bytes in each 16-byte piece. */
__device__ __forceinline__ void put_wide(unsigned char *box, const multiplier &me,
                                         const float *sums) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int piece = 2 * j + me.lane % 4 / 2;
        unsigned char *to = box + me.row * 128 + (piece ^ me.row % 8) * 16 + me.lane % 2 * 8;
        *(float2 *)to = make_float2(sums[4 * j], sums[4 * j + 1]);
        *(float2 *)(to + 8 * 128) = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
    }
}

__device__ __forceinline__ uint32_t pair_of(float low, float high, bool is_bf16) {
    uint32_t pair;
    if (is_bf16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* A box of 64 rows by 64 columns of 16 bits: four matrices of 8 x 8 at once. */
__device__ __forceinline__ void put_narrow(unsigned char *box, const multiplier &me,
                                           const float *sums, bool is_bf16) {
    const int row = me.row / 16 * 16 + me.lane % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float *s = sums + 4 * j;
        const int piece = j + me.lane / 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         shared_address(box + row * 128 + (piece ^ row % 8) * 16)),
                     "r"(pair_of(s[0], s[1], is_bf16)), "r"(pair_of(s[2], s[3], is_bf16)),
                     "r"(pair_of(s[4], s[5], is_bf16)), "r"(pair_of(s[6], s[7], is_bf16))
                     : "memory");
    }
}

/* The boxes of a warpgroup that lie in d, by its leader. */
__device__ __forceinline__ void send_boxes(const tn__cuda_wgmma_arguments &a, int row, int col,
                                           int box_cols, const unsigned char *out) {
    for (int i = 0; i < TN__WGMMA_BOXES && row < a.rows; i++) {
        if (col + i * box_cols >= a.cols) break;
        if (a.adds)
            box_add(a.d_map, col + i * box_cols, row, out + i * OUT_BOX_BYTES);
        else
            box_store(a.d_map, col + i * box_cols, row, out + i * OUT_BOX_BYTES);
    }
    box_stores_close();
}

/* Columns from `first` on of the tile: as many boxes as there is room for. */
template <int COLS>
__device__ __forceinline__ void put_boxes(const tn__cuda_wgmma_arguments &a, unsigned char *out,
                                          const multiplier &me, const tile_place &tile, int first,
                                          const float *sums) {
    if (me.is_leader) box_stores_wait_read();
    worker_sync(me.part, 128);
#pragma unroll
    for (int i = 0; i < TN__WGMMA_BOXES; i++) {
        if (COLS == 32)
            put_wide(out + i * OUT_BOX_BYTES, me, sums + i * COLS / 2);
        else
            put_narrow(out + i * OUT_BOX_BYTES, me, sums + i * COLS / 2, a.d_type == 1);
    }
    box_stores_see_memory();
    worker_sync(me.part, 128);
    if (me.is_leader)
        send_boxes(a, tile.row + me.part * TN__WGMMA_PART, tile.col + first, COLS, out);
}

__device__ __forceinline__ void put_tile(const tn__cuda_wgmma_arguments &a, unsigned char *out,
                                         const multiplier &me, const tile_place &tile,
                                         const float (&y)[PRODUCTS]) {
    if (a.d_type == 0) {
        put_boxes<32>(a, out, me, tile, 0, y);
        put_boxes<32>(a, out, me, tile, 64, y + 32);
    } else {
        put_boxes<64>(a, out, me, tile, 0, y);
    }
}

/* ---- a block -------------------------------------------------------------------------------- */

template <int TYPES, bool HAS_VECTORS>
__device__ __forceinline__ void multiply_tiles(const tn__cuda_wgmma_arguments &a,
                                               const shared_place &at, int part) {
    const int tiles = a.tiles_down * a.tiles_across, warp = threadIdx.x / 32 % 4;
    const multiplier me = {part, (int)(threadIdx.x % 32), warp * 16 + (int)(threadIdx.x % 32) / 4,
                           threadIdx.x % 128 == 0};
    uint32_t phases = 0;
    if (part == PARTS - 1) turn_pass(TURNS);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place place = tile_at(a, tile);
        float y[PRODUCTS];
        add_tile<TYPES, HAS_VECTORS>(a, at, me, place, phases, y);
        put_tile(a, at.out + part * OUT_BYTES, me, place, y);
    }
    if (part == 0) turn_wait(TURNS);
    if (me.is_leader) box_stores_wait();
}

template <int TYPES, bool HAS_VECTORS>
__device__ __forceinline__ void multiply_all(const tn__cuda_wgmma_arguments &a) {
    DYNAMIC_SHARED(shared, TN__WGMMA_SHARED_BYTES);
    const shared_place at = shared_of(shared);
    const int part = __shfl_sync(0xFFFFFFFF, (int)(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STEPS; slot++) {
            box_arrival_init(at.full + slot);
            box_arrival_init_of(at.empty + slot, PARTS * 4);
        }
        box_arrivals_publish();
    }
    __syncthreads();
    if (part == PARTS) {
        registers_give<24>();
        if (threadIdx.x == PARTS * 128) load_tiles<HAS_VECTORS>(a, at);
    } else {
        registers_take<160>();
        multiply_tiles<TYPES, HAS_VECTORS>(a, at, part);
    }
}

#else

/* The same tiles on what has no such tensor cores: a thread has elements of a tile by itself. */
template <int TYPES, bool HAS_VECTORS>
__device__ __forceinline__ float sum_of(const tn__cuda_wgmma_arguments &a, int row, int col) {
    constexpr __nv_fp8_interpretation_t A = TYPES == E5M2_BY_E4M3 ? __NV_E5M2 : __NV_E4M3;
    constexpr __nv_fp8_interpretation_t B = TYPES == E4M3_BY_E5M2 ? __NV_E5M2 : __NV_E4M3;
    float y = 0.0f;
    for (int step = 0; step < steps_of(a); step++) {
        float p = 0.0f;
        for (int i = step * DEPTH; i < min((step + 1) * DEPTH, a.contracted); i++) {
            p += fp8_pair<A>(a.a[(int64_t)row * a.contracted + i]).x *
                 fp8_pair<B>(a.b[(int64_t)col * a.contracted + i]).x;
        }
        const float a_scale = a.a_scale[(int64_t)step * a.rows + row];
        if (HAS_VECTORS)
            y = fmaf(p * a_scale, a.b_scale[(int64_t)step * a.cols + col], y);
        else
            y = fmaf(a_scale * a.b_scale[col / DEPTH * a.b_scale_stride + step], p, y);
    }
    return y;
}

__device__ __forceinline__ void put_sum(const tn__cuda_wgmma_arguments &a, int row, int col,
                                        float y) {
    const int64_t place = (int64_t)row * a.cols + col;
    if (a.d_type == 0) ((float *)a.d)[place] = a.adds ? ((float *)a.d)[place] + y : y;
    if (a.d_type == 1) ((__nv_bfloat16 *)a.d)[place] = __float2bfloat16_rn(y);
    if (a.d_type == 2) ((__half *)a.d)[place] = __float2half_rn(y);
}

template <int TYPES, bool HAS_VECTORS>
__device__ __forceinline__ void multiply_all(const tn__cuda_wgmma_arguments &a) {
    const int tiles = a.tiles_down * a.tiles_across;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place at = tile_at(a, tile);
        for (int i = threadIdx.x; i < TN__WGMMA_ROWS * TN__WGMMA_COLS; i += blockDim.x) {
            const int row = at.row + i / TN__WGMMA_COLS, col = at.col + i % TN__WGMMA_COLS;
            if (row < a.rows && col < a.cols)
                put_sum(a, row, col, sum_of<TYPES, HAS_VECTORS>(a, row, col));
        }
    }
}

#endif

#define PRODUCT(name, types, has_vectors)                                                          \
    extern "C" __global__ void __launch_bounds__(TN__WGMMA_THREADS, 1)                             \
        name(const __grid_constant__ tn__cuda_wgmma_arguments a) {                                 \
        multiply_all<types, has_vectors>(a);                                                       \
    }

PRODUCT(product_tiles_e4m3_e4m3, E4M3_BY_E4M3, false)
PRODUCT(product_tiles_e4m3_e5m2, E4M3_BY_E5M2, false)
PRODUCT(product_tiles_e5m2_e4m3, E5M2_BY_E4M3, false)
PRODUCT(product_vectors_e4m3_e4m3, E4M3_BY_E4M3, true)
PRODUCT(product_vectors_e4m3_e5m2, E4M3_BY_E5M2, true)
PRODUCT(product_vectors_e5m2_e4m3, E5M2_BY_E4M3, true)
