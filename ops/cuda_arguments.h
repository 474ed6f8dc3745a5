/* What the kernels take: one struct per kernel family, passed by value, the same in C and CUDA.
 *
 * Counts are 64-bit: a tensor may have more than 2^31 elements. A kernel works on tiles or on
 * 16-byte pieces numbered by blockIdx.x alone (up to 2^31 - 1 of them), never on grid.y.
 */
#ifndef TENURE_CUDA_ARGUMENTS_H
#define TENURE_CUDA_ARGUMENTS_H

#include "exact_rounding.h"

enum {
    TN__TILE = 128, /* rows and columns */
    TN__TILE_THREADS = 256,
    TN__TRANSPOSE_TILES = 2, /* that a block of the transpose takes, one below the other */
    TN__FLAT_THREADS = 256,
    TN__MAP_ELEMENTS = 4096,   /* that a block of a map takes */
    TN__FINISH_ELEMENTS = 1024 /* of one row that a block of finish takes */
};

/* One quantized plane as a kernel sees it: bytes, scales, scales from one scale row to the next. */
typedef struct tn__cuda_plane {
    unsigned char *data;
    float *scale; /* floats; MXFP8, NVFP4: bytes */
    int64_t scale_stride;
    int vectors;         /* every row starts at a multiple of the piece that is moved at once */
    int square_blocks;   /* NVFP4: a scale is of 16 x 16 elements; else 0: lists of planes are
                            copied whole, so no byte of one is left unwritten */
    float *global_scale; /* of the tensor, and 12 bytes of padding; NULL: there is none */
} tn__cuda_plane;

typedef struct tn__cuda_quantize_arguments {
    const void *src; /* M x K */
    int64_t rows;
    int64_t cols;
    tn__cuda_plane row;
    tn__cuda_plane col;
    uint32_t tiles_across; /* ceil(cols / 128); tiles are numbered along a row first */
    float amax_epsilon;
    int is_pow2;
    int src_vectors;     /* rows of src can be read 16 bytes at a time */
    int *total;          /* TENSOR, NVFP4: bits of the amax of src, as amax_* leaves them */
    const float *factor; /* TENSOR: what to multiply with, instead of what total gives */
    int *amax;           /* TENSOR: bits that are raised to those of the amax; NULL: none are */
    const float *skip;   /* NULL: never */
    tn__random *random;  /* kernels that round stochastically: their numbers */
} tn__cuda_quantize_arguments;

/* src is M x K bytes, or K x M if is_col; dst is M x K. Scales as in tenure_tensor.h. */
typedef struct tn__cuda_dequantize_arguments {
    tn__cuda_plane src;
    void *dst;
    int64_t rows;
    int64_t cols;
    uint32_t tiles_across;
    int is_1d;
    int64_t tile_step; /* not 1D: from a tile's scale to its neighbour's in a scale row */
    int dst_vectors;
    const float *skip; /* NULL: never */
} tn__cuda_dequantize_arguments;

/* to [cols, rows] = from [rows, cols] transposed; the scales of `from`, of which there are no more
 * than tiles in either direction, likewise. */
typedef struct tn__cuda_transpose_arguments {
    tn__cuda_plane from;
    tn__cuda_plane to;
    int64_t rows;
    int64_t cols;
    uint32_t scale_rows;
    uint32_t scale_cols;
    uint32_t tiles_across;
} tn__cuda_transpose_arguments;

/* The same by boxes that the GPU moves by itself: what tn__driver.box_map says of both planes. The
 * blocks are few, and take what lies between two of them in `turns` turns. */
enum {
    TN__NARROW_THREADS = 256,
    TN__NARROW_CLUSTER = 2, /* blocks that run on neighbouring multiprocessors */
    TN__NARROW_WORKERS = 2, /* parts of a block, each with boxes of its own */
    TN__NARROW_BOXES = 6,   /* that a worker has in shared memory */
    TN__NARROW_SHARED_BYTES =
        TN__NARROW_WORKERS * TN__NARROW_BOXES * TN__TILE * TN__TILE + 1024 /* to align them */
};
typedef struct tn__cuda_narrow_arguments {
    unsigned char from_map[128];
    unsigned char to_map[128];
    tn__cuda_transpose_arguments of;
    uint32_t turns;
} __attribute__((aligned(64))) tn__cuda_narrow_arguments;

/* `from` is what a dequantize kernel would read, dst aside; `to` what a quantize kernel would
 * write, src aside, and its skip is that of the whole. Shifting: rows and columns of both are those
 * of the plane as it is stored, and it is to.col that is written. */
typedef struct tn__cuda_requantize_arguments {
    tn__cuda_dequantize_arguments from;
    tn__cuda_quantize_arguments to;
    int is_col; /* not shifting: `from` is stored turned */
} tn__cuda_requantize_arguments;

/* tn_scale_update of `count` tensors, one for a block. */
typedef struct tn__cuda_scale_update_arguments {
    float *history;
    float *scale;
    int64_t length;
    int64_t count;
    float target;
    int is_most_recent;
    const float *skip; /* NULL: never */
} tn__cuda_scale_update_arguments;

/* dst [dst_rows, dst_row_bytes] = src [rows, row_bytes] and zeros around it; dst_row_bytes and
 * dst are multiples of 16. */
typedef struct tn__cuda_pad_arguments {
    const unsigned char *src;
    unsigned char *dst;
    int64_t rows;
    int64_t row_bytes;
    int64_t src_stride_bytes;
    int64_t dst_row_bytes;
    int64_t chunks; /* 16-byte pieces of dst */
} tn__cuda_pad_arguments;

/* dst [rows, cols] = (accumulate ? dst : 0) + (src + bias), src [rows, src_stride], rounded once.
 */
typedef struct tn__cuda_finish_arguments {
    const void *src;
    void *dst;
    const float *bias; /* of the columns; NULL: none */
    int64_t rows;
    int64_t cols;
    int64_t src_stride;
    uint32_t blocks_across;
    int accumulate;
} tn__cuda_finish_arguments;

/* convert: y = x; axpy: y = alpha * x + y; both are aligned to 16 bytes. */
typedef struct tn__cuda_map_arguments {
    const void *x;
    void *y;
    int64_t count;
    float alpha;
} tn__cuda_map_arguments;

typedef struct tn__cuda_embed_arguments {
    const unsigned char *tokens;
    const unsigned char *table;
    unsigned char *y;
    int64_t token_count;
    int64_t row_bytes;
} tn__cuda_embed_arguments;

typedef struct tn__cuda_cross_entropy_arguments {
    const void *logits;
    void *dlogits;
    const unsigned char *targets;
    float *loss;
    int64_t rows;
    int64_t classes;
} tn__cuda_cross_entropy_arguments;

#endif
