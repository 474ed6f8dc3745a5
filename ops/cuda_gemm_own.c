/* Our own product (cuda_wgmma.cu) among what is offered for a shape.
 *
 * It has its place behind what cuBLASLt's heuristic offers, can be pinned, and is chosen where it
 * was measured to be faster. Its numbers are the same, to the bit: but for D that is added to,
 * where memory adds, and may take what is below the smallest normal number for 0. What stands in a
 * candidate, and in the file of choices, is a description that cuBLASLt does not make.
 *
 * It takes as many multiprocessors as the plan says, and no workspace.
 */
#include "cuda_gemm.h"

#include <string.h>

/* "Tenure 1": the digit is of what follows, and is another one when that changes. */
static const cublasLtMatmulAlgo_t own_algorithm = {
    {0x54656E7572652031u, TN__WGMMA_ROWS, TN__WGMMA_COLS}};

const cublasLtMatmulAlgo_t *tn__gemm_own(void) { return &own_algorithm; }

int tn__gemm_is_own(const cublasLtMatmulAlgo_t *algorithm) {
    return memcmp(algorithm, &own_algorithm, sizeof own_algorithm) == 0;
}

int tn__gemm_is_of_ours(const cublasLtMatmulAlgo_t *algorithm) {
    return algorithm->data[0] >> 8 == own_algorithm.data[0] >> 8;
}

static int is_fp8(tn_dtype dtype) { return dtype == TN_E4M3 || dtype == TN_E5M2; }

int64_t tn__gemm_own_tiles(const tn__blas_shape *shape) {
    return (shape->rows + TN__WGMMA_ROWS - 1) / TN__WGMMA_ROWS *
           ((shape->cols + TN__WGMMA_COLS - 1) / TN__WGMMA_COLS);
}

int tn__gemm_own_takes(const tn__cuda_gemm *gemm, const tn__blas_shape *shape) {
    const int64_t most = INT32_MAX / 2;
    if (gemm->own_processors == 0 || shape->has_bias) return 0;
    if (!is_fp8(shape->a.dtype) || !is_fp8(shape->b.dtype)) return 0;
    if (shape->a.dtype == TN_E5M2 && shape->b.dtype == TN_E5M2) return 0;
    if (shape->a.kind != TN__OPERAND_VECTOR) return 0;
    if (shape->b.kind != TN__OPERAND_VECTOR && shape->b.kind != TN__OPERAND_TILE) return 0;
    if (shape->d != TN_FP32 && (shape->has_beta || (shape->d != TN_BF16 && shape->d != TN_FP16)))
        return 0;
    return shape->rows <= most && shape->cols <= most && shape->contracted <= most &&
           tn__gemm_own_tiles(shape) <= most;
}

/* ---- the launch ----------------------------------------------------------------------------- */

static int kernel_of(const tn__blas_shape *shape) {
    const int types = shape->b.dtype == TN_E5M2 ? 1 : shape->a.dtype == TN_E5M2 ? 2 : 0;
    return TN__KERNEL_PRODUCT + 3 * (shape->b.kind == TN__OPERAND_VECTOR) + types;
}

/* Rows of an operand by 128 bytes, swizzled; a row of its scales. */
static tn_status map_operand(const tn__cuda_context *context, const void *data, const float *scale,
                             int64_t rows, int64_t contracted, int box_rows, int has_vectors,
                             unsigned char *map, unsigned char *scale_map) {
    const tn__boxes boxes = {data, rows, contracted, 1, box_rows, TN__WGMMA_DEPTH, 1};
    const tn__boxes scales = {
        scale, (contracted + TN__TILE - 1) / TN__TILE, rows, (int)sizeof(float), 1, box_rows, 0};
    TN_TRY(context->driver->box_map(context->state, &boxes, map));
    return has_vectors ? context->driver->box_map(context->state, &scales, scale_map) : TN_OK;
}

static tn_status map_d(const tn__cuda_context *context, const tn__blas_shape *shape, void *d,
                       unsigned char *map) {
    const int bytes = (int)tn_dtype_bytes(shape->d);
    const tn__boxes boxes = {
        d, shape->rows, shape->cols, bytes, TN__WGMMA_PART, TN__WGMMA_BOX_BYTES / bytes, 1};
    return context->driver->box_map(context->state, &boxes, map);
}

static int at_most(int64_t count, int most) { return count < most ? (int)count : most; }

tn_status tn__gemm_own_multiply(const tn__gemm_preparation *by, const tn__gemm_placed *placed,
                                tn_stream stream) {
    const tn__blas_shape *shape = &by->plan->shape;
    const int has_vectors = shape->b.kind == TN__OPERAND_VECTOR;
    const int64_t steps = (shape->contracted + TN__TILE - 1) / TN__TILE;
    const int64_t tiles = tn__gemm_own_tiles(shape);
    const int processors = shape->processors > 0 ? shape->processors : by->gemm->own_processors;
    const int blocks = at_most(tiles, processors);
    /* Two by two, as what is to run on those that are spared (cuda_gemm_spare.c). */
    const int is_paired = shape->processors > 0 && blocks % TN__NARROW_CLUSTER == 0;
    const tn__grid grid = {.blocks = blocks,
                           .threads = TN__WGMMA_THREADS,
                           .shared_bytes = TN__WGMMA_SHARED_BYTES,
                           .cluster = is_paired ? TN__NARROW_CLUSTER : 0};
    tn__cuda_wgmma_arguments argument = {
        .a = placed->a,
        .b = placed->b,
        .a_scale = placed->addresses.a_scale,
        .b_scale = placed->addresses.b_scale,
        .d = placed->d,
        .b_scale_stride = (steps + 3) / 4 * 4,
        .rows = (int)shape->rows,
        .cols = (int)shape->cols,
        .contracted = (int)shape->contracted,
        .tiles_down = (int)((shape->rows + TN__WGMMA_ROWS - 1) / TN__WGMMA_ROWS),
        .tiles_across = (int)((shape->cols + TN__WGMMA_COLS - 1) / TN__WGMMA_COLS),
        .d_type = (int)shape->d - TN_FP32,
        .adds = shape->has_beta};
    TN_TRY(map_operand(by->context, placed->a, argument.a_scale, shape->rows, shape->contracted,
                       TN__WGMMA_ROWS, 1, argument.a_map, argument.a_scale_map));
    TN_TRY(map_operand(by->context, placed->b, argument.b_scale, shape->cols, shape->contracted,
                       TN__WGMMA_COLS, has_vectors, argument.b_map, argument.b_scale_map));
    TN_TRY(map_d(by->context, shape, placed->d, argument.d_map));
    return tn__kernel_launch_grid(by->context, kernel_of(shape), &grid, &argument, stream);
}
