/* What a launch has to know of the matrices and planes that its kernel works on.
 *
 * A kernel moves pieces of 8 or 16 bytes where the addresses and the length of the rows allow it,
 * and single elements where they do not: which of the two is decided here, once a launch.
 */
#ifndef TENURE_CUDA_LAUNCH_H
#define TENURE_CUDA_LAUNCH_H

#include "cuda_module.h"

static inline int64_t tn__tiles_of(int64_t extent) { return (extent + TN__TILE - 1) / TN__TILE; }

static inline int64_t tn__matrix_tiles(const tn__matrix *matrix) {
    return tn__tiles_of(matrix->rows) * tn__tiles_of(matrix->cols);
}

/* Every row of `row_bytes` bytes from `address` on starts at, and is, a multiple of `piece`. */
static inline int tn__is_made_of(const void *address, int64_t row_bytes, int64_t piece) {
    return (uintptr_t)address % (uintptr_t)piece == 0 && row_bytes % piece == 0;
}

static inline tn__cuda_plane tn__cuda_plane_of(const tn_plane_view *view, int64_t piece) {
    tn__cuda_plane plane = {.data = view->data,
                            .scale = view->scale,
                            .scale_stride = view->layout.scale_stride,
                            .vectors =
                                tn__is_made_of(view->data, (int64_t)view->layout.row_bytes, piece),
                            .global_scale = view->global_scale};
    return plane;
}

/* Elements that 16 bytes of this type hold: what a lane takes of a row at a time. */
static inline int64_t tn__vector_of(tn_dtype dtype) { return 16 / (int64_t)tn_dtype_bytes(dtype); }

static inline int64_t tn__row_bytes_of(const tn__matrix *matrix) {
    return matrix->cols * (int64_t)tn_dtype_bytes(matrix->dtype);
}

/* The part of the argument that the source alone decides. */
static inline tn__cuda_quantize_arguments
tn__cuda_quantize_argument(const tn__quantize_work *work) {
    const tn__matrix *src = &work->src;
    tn__cuda_quantize_arguments argument = {
        .src = src->data,
        .rows = src->rows,
        .cols = src->cols,
        .tiles_across = (uint32_t)tn__tiles_of(src->cols),
        .amax_epsilon = work->amax_epsilon,
        .is_pow2 = work->scale_mode == TN_SCALE_POW2,
        .src_vectors = tn__is_made_of(src->data, tn__row_bytes_of(src), 16),
        .skip = work->skip,
        .random = work->random,
    };
    return argument;
}

/* Likewise of the destination. */
static inline tn__cuda_dequantize_arguments
tn__cuda_dequantize_argument(const tn__dequantize_work *work) {
    const tn__matrix *dst = &work->dst;
    tn__cuda_dequantize_arguments argument = {
        .dst = dst->data,
        .rows = dst->rows,
        .cols = dst->cols,
        .tiles_across = (uint32_t)tn__tiles_of(dst->cols),
        .dst_vectors = tn__is_made_of(dst->data, tn__row_bytes_of(dst), 16),
        .skip = work->skip,
    };
    return argument;
}

/* What of a norm's scratch (tn__norm_parts_bytes) is what. */
static inline tn__cuda_held tn__cuda_held_of(const tn__matrix *x, void *parts, int numbers) {
    tn__cuda_held held = {.parts = parts};
    held.given = (int *)(held.parts + tn__matrix_tiles(x) * numbers * TN__TILE);
    held.turn = held.given + tn__tiles_of(x->rows) * (TN__TILE_THREADS / 32);
    return held;
}

/* Blocks wait for parts of each other (cuda_norm_held.cuh), and are all there at once: those of two
 * bands, so that one is made while the other is read. */
static inline int tn__cuda_can_hold(const tn__matrix *x, int64_t blocks) {
    return blocks >= 2 * tn__tiles_of(x->cols);
}

#endif
