/* The transpose of a plane on a few multiprocessors, beside a product that leaves them idle.
 *
 * A multiprocessor moves about 100 GB/s if it has enough on the way. So the GPU's own engine moves
 * boxes of 128 x 128 bytes between memory and shared memory (cuda_boxes.cuh), two of them, one
 * below the other, at once, while two workers of 128 threads transpose what has come: of a stage of
 * two boxes each thread takes 16 x 16 bytes in registers.
 *
 *     worker    [ stage 0 | stage 1 ] -> registers -> [ what goes out ]       32 KiB each
 *
 * The 16-byte pieces of row r of a box lie in the order piece ^ r % 8. Of 8 lanes in a row each
 * takes another row of pieces and another column of them, so that they read 8 pieces of one row of
 * the box, or write 8 pieces of different rows, without bank conflicts.
 *
 * One block fills a multiprocessor: no block of the product gets in beside it, nor it beside one.
 * For 4096 x 4096, 32 MiB: 85 us on 4 multiprocessors of an H200, 105 us beside a product.
 */
#include "cuda_boxes.cuh"
#include "cuda_quantize.cuh"

enum {
    STAGES = 2,
    STAGE_BYTES = 2 * BOX_BYTES, /* two tiles, one below the other */
    WORKER_THREADS = TN__NARROW_THREADS / TN__NARROW_WORKERS,
    WORKER_BYTES = (STAGES + 1) * STAGE_BYTES,
    PIECE = 16, /* bytes; and rows and columns that a thread takes of a stage */
    PIECES = BOX / PIECE
};
static_assert(WORKER_BYTES == TN__NARROW_BOXES * BOX_BYTES, "what the launch asks for");
static_assert(WORKER_THREADS == 2 * PIECES * PIECES, "a thread for each 16 x 16 bytes of a stage");

/* Two tiles of the plane: their first row and column, in bytes. */
struct stack_place {
    int row, col;
    bool has_lower; /* the second one begins in the matrix */
};

__device__ __forceinline__ stack_place stack_of(const tn__cuda_transpose_arguments &a,
                                                uint32_t stack, uint32_t stacks_down) {
    stack_place at;
    at.row = (int)(stack % stacks_down) * 2 * BOX;
    at.col = (int)(stack / stacks_down) * BOX;
    at.has_lower = at.row + BOX < a.rows;
    return at;
}

__device__ __forceinline__ void begin_load(const tn__cuda_narrow_arguments &a,
                                           const stack_place &at, unsigned char *stage,
                                           box_arrival *arrival) {
    box_arrival_expect(arrival, at.has_lower ? STAGE_BYTES : BOX_BYTES);
    box_load(a.from_map, at.col, at.row, stage, arrival);
    if (at.has_lower) box_load(a.from_map, at.col, at.row + BOX, stage + BOX_BYTES, arrival);
}

__device__ __forceinline__ void begin_store(const tn__cuda_narrow_arguments &a,
                                            const stack_place &at, const unsigned char *boxes) {
    box_store(a.to_map, at.row, at.col, boxes);
    if (at.has_lower) box_store(a.to_map, at.row + BOX, at.col, boxes + BOX_BYTES);
    box_stores_close();
}

/* Which 16 x 16 bytes of which box a thread of a worker has. */
struct piece_place {
    int box, down, across; /* in pieces */
};

__device__ __forceinline__ piece_place piece_of_thread() {
    const int thread = (int)(threadIdx.x % WORKER_THREADS), lane = thread % PIECES;
    piece_place at;
    at.box = thread / (PIECES * PIECES);
    at.across = lane;
    at.down = lane ^ thread / PIECES % PIECES;
    return at;
}

__device__ __forceinline__ uint4 *piece_in_box(unsigned char *box, int row, int piece) {
    return (uint4 *)(box + row * BOX + (piece ^ row % 8) * PIECE);
}

__device__ __forceinline__ void take(uint32_t (&rows)[PIECE][4], unsigned char *stage,
                                     const piece_place &at) {
    unsigned char *box = stage + at.box * BOX_BYTES;
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        const uint4 piece = *piece_in_box(box, at.down * PIECE + i, at.across);
        rows[i][0] = piece.x;
        rows[i][1] = piece.y;
        rows[i][2] = piece.z;
        rows[i][3] = piece.w;
    }
}

__device__ __forceinline__ void put(const uint32_t (&rows)[PIECE][4], unsigned char *boxes,
                                    const piece_place &at) {
    unsigned char *box = boxes + at.box * BOX_BYTES;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        uint32_t columns[4][4];
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const uint32_t words[4] = {rows[4 * g][q], rows[4 * g + 1][q], rows[4 * g + 2][q],
                                       rows[4 * g + 3][q]};
            uint32_t turned[4];
            transpose_4x4(words, turned);
#pragma unroll
            for (int j = 0; j < 4; j++)
                columns[j][g] = turned[j];
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            *piece_in_box(box, at.across * PIECE + 4 * q + j, at.down) =
                make_uint4(columns[j][0], columns[j][1], columns[j][2], columns[j][3]);
    }
}

/* The scales of the two tiles, by two threads of a worker. */
__device__ __forceinline__ void put_scales(const tn__cuda_transpose_arguments &a,
                                           const stack_place &at) {
    const uint32_t tile_row = at.row / BOX + threadIdx.x % WORKER_THREADS;
    const uint32_t tile_col = at.col / BOX;
    if (threadIdx.x % WORKER_THREADS < 2 && tile_row < a.scale_rows && tile_col < a.scale_cols)
        tile_scale_put(a.to, tile_col, tile_row, a.scale_rows,
                       a.from.scale[tile_row * a.from.scale_stride + tile_col]);
}

/* The stacks of a worker are `step` apart; it makes as many turns as all others, so that barriers
 * may be those of the block. */
extern "C" __global__ void __launch_bounds__(TN__NARROW_THREADS, 1)
    transpose_plane_narrow(const __grid_constant__ tn__cuda_narrow_arguments a) {
    DYNAMIC_SHARED(shared, TN__NARROW_SHARED_BYTES);
    __shared__ box_arrival arrivals[TN__NARROW_WORKERS][STAGES];
    const int worker = (int)(threadIdx.x / WORKER_THREADS);
    const bool is_leader = threadIdx.x % WORKER_THREADS == 0;
    const uint32_t stacks_down = (uint32_t)((a.of.rows + 2 * BOX - 1) / (2 * BOX));
    const uint32_t stacks = stacks_down * a.of.tiles_across;
    const uint32_t step = gridDim.x * TN__NARROW_WORKERS;
    const uint32_t first = blockIdx.x * TN__NARROW_WORKERS + worker;
    unsigned char *stages = box_aligned(shared) + worker * WORKER_BYTES;
    unsigned char *out = stages + STAGES * STAGE_BYTES;
    const piece_place piece = piece_of_thread();

    if (is_leader) {
        for (int s = 0; s < STAGES; s++)
            box_arrival_init(&arrivals[worker][s]);
        box_arrivals_publish();
        for (uint32_t s = 0; s < STAGES; s++)
            if (first + s * step < stacks)
                begin_load(a, stack_of(a.of, first + s * step, stacks_down),
                           stages + s * STAGE_BYTES, &arrivals[worker][s]);
    }
    __syncthreads();
    for (uint32_t turn = 0; turn < a.turns; turn++) {
        const uint32_t s = turn % STAGES, stack = first + turn * step;
        const bool has_work = stack < stacks;
        const stack_place at = stack_of(a.of, stack, stacks_down);
        uint32_t rows[PIECE][4];
        if (has_work) {
            box_arrival_wait(&arrivals[worker][s], turn / STAGES % 2);
            take(rows, stages + s * STAGE_BYTES, piece);
            put_scales(a.of, at);
        }
        worker_sync(worker, WORKER_THREADS);
        if (is_leader) {
            const uint32_t later = stack + STAGES * step;
            if (later < stacks)
                begin_load(a, stack_of(a.of, later, stacks_down), stages + s * STAGE_BYTES,
                           &arrivals[worker][s]);
            box_stores_wait_read();
        }
        worker_sync(worker, WORKER_THREADS);
        if (has_work) put(rows, out, piece);
        box_stores_see_memory();
        worker_sync(worker, WORKER_THREADS);
        if (is_leader && has_work) begin_store(a, at, out);
    }
    if (is_leader) box_stores_wait();
}
