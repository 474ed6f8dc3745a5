/* Boxes of 128 x 128 bytes that Hopper's tensor memory accelerator moves between a matrix and
 * shared memory while threads do something else, and the same by plain loads and stores where there
 * is no such thing: on a CPU, and in PTX for other GPUs, where no kernel that uses it is launched.
 *
 * A box lies in shared memory at a multiple of 1024, row after row, the 16-byte pieces of row r in
 * the order piece ^ r % 8. What lies outside of the matrix is read as 0 and not written. One thread
 * begins a load or store; x is the byte in a row, y the row. On a GPU a matrix may have boxes and
 * elements of another size (tn__driver.box_map): x is the element then.
 *
 * A box_arrival turns from phase 0 to 1 and back, once for each load that was expected.
 */
#ifndef TENURE_CUDA_BOXES_CUH
#define TENURE_CUDA_BOXES_CUH

#include "cuda_async.cuh"

enum { BOX = TN__TILE, BOX_BYTES = BOX * BOX, BOX_ALIGNMENT = 1024 };

typedef unsigned long long box_arrival;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define TN__HAS_BOXES 1
#else
#define TN__HAS_BOXES 0
#endif

__device__ __forceinline__ unsigned char *box_aligned(unsigned char *shared) {
    return shared + (BOX_ALIGNMENT - (uintptr_t)shared % BOX_ALIGNMENT) % BOX_ALIGNMENT;
}

#if TN__HAS_BOXES

__device__ __forceinline__ uint32_t shared_address(const void *at) {
    return (uint32_t)__cvta_generic_to_shared(at);
}

__device__ __forceinline__ void box_arrival_init(box_arrival *arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival))
                 : "memory");
}

/* One that as many threads end with box_arrival_come, in the place of a load. */
__device__ __forceinline__ void box_arrival_init_of(box_arrival *arrival, int threads) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(arrival)),
                 "r"(threads)
                 : "memory");
}

__device__ __forceinline__ void box_arrival_come(box_arrival *arrival) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(arrival))
                 : "memory");
}

__device__ __forceinline__ void box_arrivals_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void box_arrival_expect(box_arrival *arrival, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)),
        "r"(bytes)
        : "memory");
}

__device__ __forceinline__ void box_arrival_wait(box_arrival *arrival, uint32_t phase) {
    uint32_t has_come = 0;
    while (!has_come)
        asm volatile("{\n"
                     ".reg .pred come;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 come, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, come;\n"
                     "}"
                     : "=r"(has_come)
                     : "r"(shared_address(arrival)), "r"(phase)
                     : "memory");
}

__device__ __forceinline__ void box_load(const unsigned char *map, int x, int y, unsigned char *to,
                                         box_arrival *arrival) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(arrival))
                 : "memory");
}

__device__ __forceinline__ void box_store(const unsigned char *map, int x, int y,
                                          const unsigned char *from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], "
                 "[%3];" ::"l"(map),
                 "r"(x), "r"(y), "r"(shared_address(from))
                 : "memory");
}

/* The same added to what is there, each element by itself; what is below the smallest normal number
 * may count as 0. */
__device__ __forceinline__ void box_add(const unsigned char *map, int x, int y,
                                        const unsigned char *from) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
                 "[%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(x), "r"(y), "r"(shared_address(from))
                 : "memory");
}

/* Those that were begun are waited for together. */
__device__ __forceinline__ void box_stores_close() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until the boxes in shared memory may be written again. */
__device__ __forceinline__ void box_stores_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void box_stores_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Before a barrier: what this thread has written is there for a store behind the barrier. */
__device__ __forceinline__ void box_stores_see_memory() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Of the `threads` threads of a part of the block. */
__device__ __forceinline__ void worker_sync(int worker, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(worker + 1), "r"(threads) : "memory");
}

#else

/* What stands in the place of the driver's description of a matrix. */
typedef struct box_matrix {
    unsigned char *bytes;
    int64_t rows, cols;
} box_matrix;

__device__ __forceinline__ void box_arrival_init(box_arrival *) {}
__device__ __forceinline__ void box_arrivals_publish() {}
__device__ __forceinline__ void box_arrival_expect(box_arrival *, int) {}
__device__ __forceinline__ void box_arrival_wait(box_arrival *, uint32_t) {}
__device__ __forceinline__ void box_stores_close() {}
__device__ __forceinline__ void box_stores_wait_read() {}
__device__ __forceinline__ void box_stores_wait() {}
__device__ __forceinline__ void box_stores_see_memory() {}
__device__ __forceinline__ void worker_sync(int, int) { __syncthreads(); }

/* Piece i of a box, in the matrix; NULL: outside of it. */
__device__ __forceinline__ uint4 *box_piece(const box_matrix &matrix, int x, int y, int i) {
    const int64_t row = y + i / 8, col = x + i % 8 * 16;
    return row < matrix.rows && col < matrix.cols
               ? (uint4 *)(matrix.bytes + row * matrix.cols + col)
               : nullptr;
}

__device__ __forceinline__ int box_place(int i) { return i / 8 * 8 + (i % 8 ^ i / 8 % 8); }

__device__ __forceinline__ void box_load(const unsigned char *map, int x, int y, unsigned char *to,
                                         box_arrival *) {
    const box_matrix matrix = *(const box_matrix *)map;
    for (int i = 0; i < BOX_BYTES / 16; i++) {
        const uint4 *piece = box_piece(matrix, x, y, i);
        ((uint4 *)to)[box_place(i)] = piece ? *piece : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void box_store(const unsigned char *map, int x, int y,
                                          const unsigned char *from) {
    const box_matrix matrix = *(const box_matrix *)map;
    for (int i = 0; i < BOX_BYTES / 16; i++) {
        uint4 *piece = box_piece(matrix, x, y, i);
        if (piece) *piece = ((const uint4 *)from)[box_place(i)];
    }
}

#endif
#endif
