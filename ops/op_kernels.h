/* The seam between the ops' front (checks, leases, scratch) and their three implementations.
 *
 *     op_*.c         front: one file per family, public functions, device-independent
 *     host_*.c       the definition; runs as a host task in stream order
 *     cuda_*.c/.cu   kernels and cuBLASLt; kernels are loaded from an embedded fatbin
 *     ghost_*.c      declares ranges and a roofline time to the simulated device
 *
 * Each table has one function per op. They get addresses that are valid until the work now on
 * `stream` is done, never allocate device memory, never wait, and are called only with elements
 * to work on. The work struct itself is only valid during the call.
 *
 * Conversions are exact to the bit in all implementations (host_number.h is the definition):
 * round to nearest even, denormals kept; every NaN that is stored is the canonical one of its
 * type (fp32 0x7FFFFFFF, bf16 and fp16 0x7FFF, E4M3 and E5M2 0x7F), as CUDA's cvt makes it.
 */
#ifndef TENURE_OP_KERNELS_H
#define TENURE_OP_KERNELS_H

#include "../alloc/driver.h"
#include "exact_activation.h"
#include "exact_adamw.h"
#include "exact_clip.h"
#include "exact_rounding.h"
#include "tenure_gemm.h"

/* A plain matrix or vector in device memory. */
typedef struct tn__matrix {
    tn_dtype dtype;
    void *data;
    int64_t rows;
    int64_t cols; /* row-major, stride cols */
} tn__matrix;

typedef struct tn__quantize_work {
    tn__matrix src;
    tn_format format; /* any but PLAIN */
    tn_scale_mode scale_mode;
    tn_dtype dtype; /* E4M3, E5M2 or E2M1 */
    float amax_epsilon;
    int has_row, has_col;
    const float *factor; /* TENSOR: what elements are multiplied with; NULL: it follows from amax */
    float *amax;         /* TENSOR: raised to the amax of src; NULL: it is not wanted */
    const float *whole_amax; /* TENSOR: taken for the amax of src; NULL: it is not given */
    tn_plane_view row, col;
    const float *skip;  /* in device memory; NULL: never */
    tn__random *random; /* likewise: stochastic rounding, and one draw more; NULL: to nearest */
    int square_blocks;  /* NVFP4: of 16 x 16 elements */
} tn__quantize_work;

/* Groups of the rows of one tensor: see tenure_grouped.h. */
typedef struct tn__groups {
    const int64_t *offsets; /* count + 1, in device memory */
    int64_t count;
    uint32_t *error;
} tn__groups;

typedef struct tn__grouped_quantize_work {
    tn__quantize_work all; /* as if there were one group; of the views only dtype and addresses */
    tn__groups groups;
    int64_t row_scale_floats; /* that there is room for */
    int64_t col_scale_floats;
    const float *skip; /* NULL: never */
    void *scratch;     /* of list_scratch_bytes(count of groups), 512-aligned; NULL if 0 */
} tn__grouped_quantize_work;

/* padded_offsets, map and inverse are made; what they are: tn_pad_groups. */
typedef struct tn__pad_groups_work {
    tn__groups groups;
    int64_t rows, multiple;
    const int64_t *permutation; /* of rows; NULL: none */
    int64_t *padded_offsets;
    int64_t *map;
    int64_t padded_rows; /* that map has room for */
    int64_t *inverse;    /* of rows; NULL: not wanted */
    void *scratch;       /* of list_scratch_bytes(0) */
} tn__pad_groups_work;

/* Rows of bytes, and for 1D ROW planes fp32 scales of which each column belongs to a row. */
typedef struct tn__gather_rows_work {
    const void *src;
    void *dst;
    int64_t src_rows, dst_rows, row_bytes;
    const int64_t *map; /* of dst_rows */
    uint32_t *error;
    unsigned char nothing;  /* what a row from nowhere is made of */
    const float *src_scale; /* NULL: PLAIN */
    float *dst_scale;
    int64_t scale_rows, src_scale_stride, dst_scale_stride;
} tn__gather_rows_work;

typedef struct tn__combine_rows_work {
    tn__matrix src, dst;
    const int64_t *map;   /* dst.rows x each */
    const float *weights; /* likewise; NULL: 1 */
    int64_t each;
    uint32_t *error;
} tn__combine_rows_work;

/* Elements first ... end - 1 of a weight of rows x cols, in src. */
typedef struct tn__shard {
    tn__matrix src;
    int64_t rows, cols;
    int64_t first, end;
} tn__shard;

typedef struct tn__shard_amax_work {
    tn__shard shard;
    float *amax;  /* of each 128 x 128 tile, row by row */
    int is_whole; /* or one, of all of src */
} tn__shard_amax_work;

typedef struct tn__shard_quantize_work {
    tn__shard shard;
    const float *amax;
    tn_dtype dtype;
    tn_scale_mode scale_mode;
    float amax_epsilon;
    uint8_t *data; /* of element `first` */
    float *scale;  /* of all tiles, as in a 2D ROW plane; NULL: not made */
    const float *skip;
} tn__shard_quantize_work;

enum { TN__LIST_MAX = 64 };

/* As many casts at once, at most TN__LIST_MAX, of one source type, target type and format, with the
 * same planes. */
typedef struct tn__quantize_list_work {
    const tn__quantize_work *items; /* each with elements */
    int64_t count;
    const float *skip; /* NULL: never */
    void *scratch;     /* of list_scratch_bytes(count); NULL if 0 */
} tn__quantize_list_work;

typedef struct tn__dequantize_work {
    tn_format format;
    tn_plane_view src; /* ROW or COL */
    tn__matrix dst;    /* M x K */
    const float *skip; /* NULL: never */
} tn__dequantize_work;

/* Of one plane of blocks of 128 into others: see tn_requantize. `to` says all but its source. */
typedef struct tn__requantize_work {
    tn_format format; /* of `from` */
    tn_plane_view from;
    int shifts; /* the scaling-aware transpose, into the one plane of `to` */
    tn__quantize_work to;
} tn__requantize_work;

/* Delayed scaling of `count` tensors: see tn_scale_update. history is [length, count]. */
typedef struct tn__scale_update_work {
    float *history;
    float *scale;
    int64_t length;
    int64_t count;
    float target; /* what the amax is to be scaled to */
    int is_most_recent;
    const float *skip; /* NULL: never */
} tn__scale_update_work;

/* Bytes and fp32 scales transposed: of tiles, or the one of the tensor. */
typedef struct tn__transpose_work {
    tn_plane_view from;
    tn_plane_view to;
    int processors; /* multiprocessors that a product beside it leaves to it; 0: it has all */
} tn__transpose_work;

/* How an FP8 operand is scaled, seen as a matrix of R rows by `contracted` columns. */
typedef enum tn__operand_kind {
    TN__OPERAND_PLAIN = 0,
    TN__OPERAND_VECTOR, /* one scale per row and 128 of the contracted dimension: [k/128][r] */
    TN__OPERAND_TILE,   /* one scale per 128 x 128: [r/128][k/128] */
    TN__OPERAND_TENSOR  /* one scale */
} tn__operand_kind;

typedef struct tn__operand {
    tn__operand_kind kind;
    tn_dtype dtype;
    const void *data;
    int is_transposed; /* PLAIN only: stored [contracted, rows] instead of [rows, contracted] */
    int64_t rows;
    const float *scale;
    int64_t scale_stride;
    int is_unaligned; /* data is no multiple of 16 bytes */
} tn__operand;

/* d [a.rows, b.rows] = (accumulate ? d : 0) + (sum over k of a[r, k] * b[c, k] + bias[c]) */
typedef struct tn__gemm_work {
    tn__operand a;
    tn__operand b;
    int64_t contracted;
    tn__matrix d;
    int accumulate;
    tn__matrix bias;    /* one for each column of d, of any float type, added in fp32 before the one
                        rounding; 0 columns: none */
    int d_is_unaligned; /* d.data is no multiple of 16 bytes */
    tn_gemm_engine engine; /* that is pinned; AUTO: none */
    int may_differ; /* of gemm_choice: an engine of other numbers is told, if one is preferred */
    int algorithm;  /* place of the one to take, from 1 on; 0: the chosen one */
    int tunes;      /* of gemm_scratch_bytes: for gemm_tune */
    int spared;     /* multiprocessors that are left to other work, as gemm_spares said; or 0 */
    void *scratch;  /* scratch_bytes from gemm_scratch_bytes, 512-aligned; NULL if 0 */
    size_t scratch_bytes;
} tn__gemm_work;

/* y = to_type_of_y(fmaf(alpha, x, y)) */
typedef struct tn__axpy_work {
    tn__matrix x, y;
    float alpha;
} tn__axpy_work;

typedef struct tn__embed_work {
    const unsigned char *tokens;
    tn__matrix table, y;
} tn__embed_work;

typedef struct tn__cross_entropy_work {
    tn__matrix logits, dlogits;
    const unsigned char *targets;
    float *loss;
} tn__cross_entropy_work;

/* What an op makes element by element and casts in the same pass. */
typedef enum tn__producer {
    TN__PRODUCE_ACTIVATION = 0, /* curve(x), times the gate, times the row's weight */
    TN__PRODUCE_GRADIENT,       /* of that with respect to x, and to the gate behind it */
    TN__PRODUCE_NORM            /* x by the statistics of its row: see tn_norm_forward */
} tn__producer;

typedef struct tn__produce_work {
    tn__producer producer;
    tn__curve curve;
    int is_gated;
    tn__matrix x;           /* [M, N]; gated: [M, 2 N], the gates in the upper columns */
    const void *dy;         /* GRADIENT: [M, N] of x's type */
    const float *weights;   /* of the rows; NULL: all are 1 */
    const float *mean;      /* NORM: of the rows; NULL: all are 0 */
    const float *rstd;      /* NORM: of the rows */
    tn__matrix gamma, beta; /* NORM: of the columns, of any type; without data: 1, 0 */
    float gamma_base;       /* NORM: 1 where gamma counts from 1, else 0 */
    tn__quantize_work cast; /* cast.src is what is made: of x's type, and written unless it has no
                               data; the planes may be none */
    float *tile_sums;       /* [ceil(M/128), columns of cast.src]: see tn_bias_gradient; or NULL */
    const float *skip;      /* NULL: never */
} tn__produce_work;

/* sums [cols], in its type, of the sums of tiles [tiles, parts, cols]; added to what is there, or
 * not. A tile's parts are added up in rising order. */
typedef struct tn__column_sums_work {
    const float *tile_sums;
    int64_t tiles;
    int parts;
    tn__matrix sums;
    int accumulate;
    const float *skip;
} tn__column_sums_work;

/* rstd, and mean if it is not NULL: then of what deviates from it. Of x, or if `sum` is not NULL of
 * x + residual rounded to their type, which is written there (it may be the residual). */
typedef struct tn__row_statistics_work {
    tn__matrix x;
    const void *residual;
    void *sum;
    float epsilon;
    float *mean, *rstd;
    const float *skip;
} tn__row_statistics_work;

/* A NORM: the statistics of all rows, and with them what is made of x, or of `sum`; made.mean and
 * made.rstd are those of `statistics`. One work, since it may be one kernel. */
typedef struct tn__norm_work {
    tn__row_statistics_work statistics;
    tn__produce_work made;
    void *parts; /* of tn__norm_parts_bytes: all may be made from one read; NULL: from two */
} tn__norm_work;

/* What a norm's planes, or those of its gradient, take for one read: `numbers` of each row in each
 * tile of 128 x 128, 8 counts for each 128 rows, and one more. */
static inline size_t tn__norm_parts_bytes(int64_t rows, int64_t cols, int numbers) {
    const size_t bands = (size_t)((rows + 127) / 128), across = (size_t)((cols + 127) / 128);
    return (bands * across * 128 * (size_t)numbers + bands * 8 + 1) * 4;
}

/* Parts of a tile's sums where `split` make it, 1 to 8 of them: the first one's sum, and of the
 * others that of each 16 rows, for it is to those before that they are added. */
static inline int tn__norm_gradient_parts(int split) { return 9 - 8 / split; }

/* The gradient of a norm: see tn_norm_backward. The means of a row are made first, then the rest.
 * dx is cast.src, of x's type, and written unless it has no data; the planes may be none. */
typedef struct tn__norm_gradient_work {
    tn__matrix x;
    const void *dy;    /* of x's shape and type */
    const void *added; /* likewise; NULL: nothing */
    const float *mean; /* of the rows; NULL: RMS */
    const float *rstd; /* of the rows */
    tn__matrix gamma;  /* without data: 1 */
    float gamma_base;  /* 1 where gamma counts from 1, else 0 */
    float *shift;      /* of the rows: mean of dy gamma; NULL: RMS */
    float *tilt;       /* of the rows: mean of dy gamma times what x was normalized to */
    tn__quantize_work cast;
    int split;         /* 0: 1; else what norm_gradient_split has told of the rest */
    float *gamma_sums; /* [ceil(M/128), tn__norm_gradient_parts(split), N]; NULL: not wanted */
    float *beta_sums;  /* likewise */
    void *parts;       /* as of a norm */
    const float *skip;
} tn__norm_gradient_work;

/* sums[m] = sum over n of dy[m, n] * curve(x[m, n]) (* x[m, N + n], if gated) */
typedef struct tn__row_products_work {
    tn__curve curve;
    int is_gated;
    tn__matrix x;
    const void *dy; /* [M, N] of x's type */
    float *sums;
    const float *skip;
} tn__row_products_work;

/* table [rows, H] = (accumulate ? table : 0) + sum over t of dy[t, :] where tokens[t] is the row */
typedef struct tn__embed_gradient_work {
    const unsigned char *tokens;
    tn__matrix dy, table;
    int accumulate;
    const float *skip;
} tn__embed_gradient_work;

/* See tn_adamw; the factors are those that tn_adamw_advance has left in step[1] and step[2]. */
typedef struct tn__adamw_work {
    tn__adamw_constants constants;
    tn__matrix gradient;
    float *first, *second; /* moments, as many as there are elements */
    const float *step;     /* [3] */
    const float *rate;     /* of one element; NULL: 1. Likewise gradient_scale */
    const float *gradient_scale;
    tn__matrix plain;       /* without data: not wanted */
    tn__quantize_work cast; /* cast.src is the master copy, fp32; the planes may be none */
    const float *skip;
} tn__adamw_work;

typedef struct tn__adamw_advance_work {
    float *step; /* [3] */
    float beta1, beta2;
    const float *skip;
} tn__adamw_advance_work;

/* See tn_square_sums. */
typedef struct tn__square_sums_work {
    tn__matrix x;
    float *sums; /* [TN__SQUARE_BLOCKS] */
    int accumulate;
} tn__square_sums_work;

/* See tn_clip_factor. */
typedef struct tn__clip_factor_work {
    const float *sums; /* [TN__SQUARE_BLOCKS] */
    float scale, max_norm;
    float *norm; /* NULL: not wanted */
    float *factor;
} tn__clip_factor_work;

/* See tenure_attention.h: what forward reads and writes, or backward, of which y and log_sum are
 * inputs. */
typedef struct tn__attention_work {
    tn_dtype dtype;
    const void *qkv; /* [tokens, (heads + 2 heads_kv) * head_dim] */
    int64_t tokens, sequence;
    int64_t heads, heads_kv, head_dim;
    int is_causal;
    float scale;
    void *y;        /* [tokens, heads * head_dim] */
    float *log_sum; /* [heads, tokens]; forward: NULL: not wanted */
    const void *dy; /* of y's shape; and from here on: backward only */
    float *dots;    /* [heads, tokens]: sums of dy * y, made on the way */
    void *dqkv;
} tn__attention_work;

typedef struct tn__op_table {
    const char *name; /* "host", "cuda", "ghost" */
    int is_whole;     /* a function that fails has put nothing on the stream */
    tn_status (*quantize)(tn_device *device, const tn__quantize_work *work, tn_stream stream);
    /* Bytes of scratch for a list of tensors that one launch works on. */
    size_t (*list_scratch_bytes)(int64_t tensors);
    tn_status (*grouped_quantize)(tn_device *device, const tn__grouped_quantize_work *work,
                                  tn_stream stream);
    tn_status (*quantize_list)(tn_device *device, const tn__quantize_list_work *work,
                               tn_stream stream);
    tn_status (*pad_groups)(tn_device *device, const tn__pad_groups_work *work, tn_stream stream);
    tn_status (*gather_rows)(tn_device *device, const tn__gather_rows_work *work, tn_stream stream);
    tn_status (*combine_rows)(tn_device *device, const tn__combine_rows_work *work,
                              tn_stream stream);
    tn_status (*shard_amax)(tn_device *device, const tn__shard_amax_work *work, tn_stream stream);
    tn_status (*shard_quantize)(tn_device *device, const tn__shard_quantize_work *work,
                                tn_stream stream);
    tn_status (*dequantize)(tn_device *device, const tn__dequantize_work *work, tn_stream stream);
    tn_status (*transpose)(tn_device *device, const tn__transpose_work *work, tn_stream stream);
    tn_status (*requantize)(tn_device *device, const tn__requantize_work *work, tn_stream stream);
    tn_status (*scale_update)(tn_device *device, const tn__scale_update_work *work,
                              tn_stream stream);
    tn_status (*produce)(tn_device *device, const tn__produce_work *work, tn_stream stream);
    /* Also called with rows of no columns, whose statistics are wanted all the same. */
    tn_status (*norm)(tn_device *device, const tn__norm_work *work, tn_stream stream);
    tn_status (*column_sums)(tn_device *device, const tn__column_sums_work *work, tn_stream stream);
    /* How many are to make a tile's sums, so that the device has enough to do. NULL: always one. */
    tn_status (*norm_gradient_split)(tn_device *device, const tn__norm_gradient_work *work,
                                     int *out);
    tn_status (*norm_gradient_means)(tn_device *device, const tn__norm_gradient_work *work,
                                     tn_stream stream);
    tn_status (*norm_gradient)(tn_device *device, const tn__norm_gradient_work *work,
                               tn_stream stream);
    tn_status (*row_products)(tn_device *device, const tn__row_products_work *work,
                              tn_stream stream);
    tn_status (*embed_gradient)(tn_device *device, const tn__embed_gradient_work *work,
                                tn_stream stream);
    tn_status (*adamw)(tn_device *device, const tn__adamw_work *work, tn_stream stream);
    tn_status (*adamw_advance)(tn_device *device, const tn__adamw_advance_work *work,
                               tn_stream stream);
    tn_status (*square_sums)(tn_device *device, const tn__square_sums_work *work, tn_stream stream);
    tn_status (*clip_factor)(tn_device *device, const tn__clip_factor_work *work, tn_stream stream);
    tn_status (*attention)(tn_device *device, const tn__attention_work *work, tn_stream stream);
    tn_status (*attention_gradient)(tn_device *device, const tn__attention_work *work,
                                    tn_stream stream);
    /* Bytes of scratch that gemm wants for this work (its data addresses are not read). */
    tn_status (*gemm_scratch_bytes)(tn_device *device, const tn__gemm_work *work, size_t *out);
    tn_status (*gemm)(tn_device *device, const tn__gemm_work *work, tn_stream stream);
    /* Times what there is for the work, again and again into d, and waits. */
    tn_status (*gemm_tune)(tn_device *device, const tn__gemm_work *work, tn_stream stream);
    /* How many multiprocessors the product can leave to the derivation of a plane of these bytes
     * beside it without taking longer, and without another bit in d; 0: none. NULL: the device has
     * no such thing. */
    int (*gemm_spares)(tn_device *device, const tn__gemm_work *work, size_t plane_bytes);
    /* Keeps which engine was measured to be faster than the formats' own for the work, AUTO if
     * none; gemm_choice tells it. NULL: nothing is timed on the device. */
    tn_status (*gemm_prefer)(tn_device *device, const tn__gemm_work *work, tn_gemm_engine engine);
    /* What gemm would do; no address is read. */
    tn_status (*gemm_choice)(tn_device *device, const tn__gemm_work *work, tn_gemm_choice *out);
    /* All choices as text, which the caller gives to tn__host_free; and back. */
    tn_status (*gemm_table_text)(tn_device *device, char **text, size_t *bytes);
    tn_status (*gemm_table_take)(tn_device *device, const char *text, size_t bytes);
    /* contracted == 0: d = accumulate ? d : 0 is done by the front with a fill. */
    tn_status (*axpy)(tn_device *device, const tn__axpy_work *work, tn_stream stream);
    tn_status (*convert)(tn_device *device, const tn__matrix *x, const tn__matrix *y,
                         tn_stream stream);
    tn_status (*embed)(tn_device *device, const tn__embed_work *work, tn_stream stream);
    tn_status (*cross_entropy)(tn_device *device, const tn__cross_entropy_work *work,
                               tn_stream stream);
} tn__op_table;

extern const tn__op_table tn__op_table_host;
extern const tn__op_table tn__op_table_cuda; /* every call TN_UNSUPPORTED without kernels */
extern const tn__op_table tn__op_table_ghost;

/* Of tables of devices that have one way for each product (op_gemm_table.c). */
tn_status tn__gemm_tune_nothing(tn_device *device, const tn__gemm_work *work, tn_stream stream);
tn_status tn__gemm_only_choice(const tn__gemm_work *work, const char *description,
                               size_t scratch_bytes, tn_gemm_choice *out);
tn_status tn__gemm_no_table_text(tn_device *device, char **text, size_t *bytes);
tn_status tn__gemm_no_table_take(tn_device *device, const char *text, size_t bytes);

/* The table for a device; NULL never. */
const tn__op_table *tn__op_table_of(tn_device *device);

#endif
