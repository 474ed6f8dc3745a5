/* The ops that gpu_bench_casts.c measures: what each works on, and the bytes that it must move.
 *
 * An op is a row of one of the tables below. Its family prepares the tensors of a set and puts the
 * op on the stream; a few sets take turns, so that nothing finds its operands in the L2 cache, or
 * leaves its result there for the next one to overwrite.
 *
 * Bytes are the least that any kernel could do with: each input once, each output once, with
 * scales, maps and offsets. Two things are counted beyond that and one is not. Where a scale
 * follows from the amax of the whole tensor (TENSOR current, NVFP4), no element can be cast before
 * the last is read: what of the source no L2 cache holds is counted twice. What only some kernels
 * need, such as the second read of x in a norm, is not counted: it shows as a lower share.
 */
#ifndef TENURE_GPU_BENCH_CAST_H
#define TENURE_GPU_BENCH_CAST_H

#include "gpu_bench.h"
#include "tenure_cast.h"
#include "tenure_grouped.h"

enum { GPU_CAST_SETS_MAX = 8 };

typedef struct gpu_cast gpu_cast;

/* What one turn works on. Those that an op has no use for are {0}. */
typedef struct gpu_cast_set {
    int64_t rows, cols;
    tn_tensor x, other;      /* of the size that is measured; a second input */
    tn_tensor weights, beta; /* of rows, or of columns */
    tn_tensor y, sum;        /* high-precision outputs */
    tn_tensor q, q_from;     /* quantized output and input */
    tn_tensor dbias, dgamma, dbeta, mean, rstd;
    tn_tensor scale, amax, random; /* amax: a history, or that of tiles */
    tn_tensor offsets, map, inverse, padded_offsets, error;
    tn_grouped_plane row, col;
    tn_tensor src[TN_QUANTIZE_LIST_MAX], dst[TN_QUANTIZE_LIST_MAX];
    double bytes; /* that must move in one turn */
} gpu_cast_set;

typedef struct gpu_cast_family {
    void (*prepare)(gpu_bench *bench, const gpu_cast *op, gpu_cast_set *set);
    void (*work)(gpu_bench *bench, const gpu_cast *op, const gpu_cast_set *set);
} gpu_cast_family;

enum {
    GPU_CAST_Y = 1 << 0, /* the high-precision output too */
    GPU_CAST_GATED = 1 << 1,
    GPU_CAST_WEIGHTED = 1 << 2, /* by a number of each row */
    GPU_CAST_DBIAS = 1 << 3,
    GPU_CAST_RESIDUAL = 1 << 4,
    GPU_CAST_DELAYED = 1 << 5, /* the scale is there before */
    GPU_CAST_UNEVEN = 1 << 6,  /* groups of any size; a part of a weight that begins anywhere */
    GPU_CAST_UNDONE = 1 << 7,  /* the inverse */
    GPU_CAST_STOCHASTIC = 1 << 8,
};

struct gpu_cast {
    const char *name;
    const gpu_cast_family *family;
    tn_dtype dtype;   /* of the high-precision side */
    tn_format format; /* PLAIN: nothing is quantized */
    unsigned planes;
    tn_format from; /* of a quantized source, and which of its planes */
    tn_plane plane;
    int kind;  /* a tn_activation, tn_norm, tn_requantize_mode or tn_scale_mode */
    int count; /* of groups, of tensors */
    unsigned flags;
};

typedef struct gpu_cast_table {
    const gpu_cast *ops;
    int count;
} gpu_cast_table;

gpu_cast_table gpu_bench_cast_formats(void);   /* the first of them is the copy */
gpu_cast_table gpu_bench_cast_producers(void); /* of values that are cast in the same pass */
gpu_cast_table gpu_bench_cast_rows(void);      /* groups, rows, parts of a weight, lists */

/* ---- operands ------------------------------------------------------------------------------- */

/* Bytes of a tensor's DATA plane; 0 for {0}. */
double gpu_cast_data_bytes(tn_tensor tensor);
/* Bytes of these planes (TN_QUANTIZE_ROW, TN_QUANTIZE_COL) of a quantized tensor. */
double gpu_cast_plane_bytes(tn_tensor tensor, unsigned planes);
/* Bytes to read of a source whose whole amax must be known before it is cast: see above. */
double gpu_cast_twice_bytes(double source_bytes);

#endif
