/* What the CUDA ops keep for a device: its loaded kernels, and cuBLASLt's state.
 *
 * Made at the first op on the device, under one lock, and ended by tn_device_destroy through the
 * device's attachments. Everything in it but `gemm` is constant once it has been made, so that
 * launching takes no lock.
 */
#ifndef TENURE_CUDA_MODULE_H
#define TENURE_CUDA_MODULE_H

#include "cuda_norm_arguments.h"
#include "cuda_wgmma_arguments.h"
#include "op_kernels.h"

/* Kernels by number: a family's first, plus the index that the functions below compute. A new
 * family is a range here and, in cuda_module.c, a row of `families` (and of `images`). */
enum {
    TN__QUANTIZE_KERNELS = 2 * 3 * 3 * 2,
    TN__DEQUANTIZE_KERNELS = 2 * 2 * 3,
    TN__PAIR_KERNELS = 3 * 3,
    TN__FORMAT_KERNELS = 4 * 3 * 2, /* planes or stochastic, source, FP8 type */
    TN__NVFP4_KERNELS = 4 * 3,
    TN__STOCHASTIC_KERNELS = 2 * 3 * 2,
    TN__PRODUCE_KERNELS = 2 * 3 * 2,
    TN__PAIRS_KERNELS = 2 * 2,                            /* as PRODUCE, of bf16 */
    TN__NORM_LENGTHS = 4,                                 /* of rows: tn__norm_columns */
    TN__NORM_ROWS_KERNELS = TN__NORM_LENGTHS * 2 * 3 * 2, /* RMS or LAYER, type, FP8 type */
    TN__NORM_GRADIENT_ROWS = 8,         /* types and lengths of rows: tn__norm_gradient_rows_of */
    TN__NORM_HELD_KERNELS = 2 * 2 * 2,  /* kind of blocks, 16-bit type, FP8 type */
    TN__REQUANTIZE_KERNELS = 2 * 2 * 2, /* kind of blocks, from, to */
    TN__PRODUCT_KERNELS = 2 * 3,

    TN__KERNEL_QUANTIZE = 0,
    TN__KERNEL_DEQUANTIZE = TN__KERNEL_QUANTIZE + TN__QUANTIZE_KERNELS,
    TN__KERNEL_TRANSPOSE = TN__KERNEL_DEQUANTIZE + TN__DEQUANTIZE_KERNELS,
    TN__KERNEL_TRANSPOSE_NARROW,
    TN__KERNEL_FINISH,
    TN__KERNEL_CONVERT = TN__KERNEL_FINISH + TN__PAIR_KERNELS,
    TN__KERNEL_AXPY = TN__KERNEL_CONVERT + TN__PAIR_KERNELS,
    TN__KERNEL_CROSS_ENTROPY = TN__KERNEL_AXPY + TN__PAIR_KERNELS,
    TN__KERNEL_PAD = TN__KERNEL_CROSS_ENTROPY + TN__PAIR_KERNELS,
    TN__KERNEL_EMBED,
    TN__KERNEL_SHARD_AMAX,
    TN__KERNEL_SHARD_QUANTIZE = TN__KERNEL_SHARD_AMAX + 3,
    TN__KERNEL_COMBINE_ROWS = TN__KERNEL_SHARD_QUANTIZE + 3 * 2,
    TN__KERNEL_PAD_OFFSETS = TN__KERNEL_COMBINE_ROWS + TN__PAIR_KERNELS,
    TN__KERNEL_PAD_MAP,
    TN__KERNEL_GATHER_ROWS,
    TN__KERNEL_GATHER_SCALES,
    TN__KERNEL_LIST_GROUPS,
    TN__KERNEL_LIST_TENSORS,
    TN__KERNEL_QUANTIZE_LIST,
    TN__KERNEL_QUANTIZE_TENSOR = TN__KERNEL_QUANTIZE_LIST + TN__QUANTIZE_KERNELS,
    TN__KERNEL_AMAX = TN__KERNEL_QUANTIZE_TENSOR + TN__FORMAT_KERNELS,
    TN__KERNEL_AMAX_START = TN__KERNEL_AMAX + 3,
    TN__KERNEL_SCALE_FINISH,
    TN__KERNEL_SCALE_UPDATE = TN__KERNEL_SCALE_FINISH + 2,
    TN__KERNEL_QUANTIZE_MXFP8,
    TN__KERNEL_DEQUANTIZE_MXFP8 = TN__KERNEL_QUANTIZE_MXFP8 + TN__FORMAT_KERNELS,
    TN__KERNEL_QUANTIZE_NVFP4 = TN__KERNEL_DEQUANTIZE_MXFP8 + TN__DEQUANTIZE_KERNELS,
    TN__KERNEL_DEQUANTIZE_NVFP4 = TN__KERNEL_QUANTIZE_NVFP4 + TN__NVFP4_KERNELS,
    TN__KERNEL_NVFP4_FINISH = TN__KERNEL_DEQUANTIZE_NVFP4 + 2 * 3,
    TN__KERNEL_ACTIVATE,
    TN__KERNEL_COLUMN_SUMS = TN__KERNEL_ACTIVATE + TN__PRODUCE_KERNELS,
    TN__KERNEL_ACTIVATE_GATED,
    TN__KERNEL_DIFFERENTIATE = TN__KERNEL_ACTIVATE_GATED + TN__PRODUCE_KERNELS,
    TN__KERNEL_DIFFERENTIATE_GATED = TN__KERNEL_DIFFERENTIATE + TN__PRODUCE_KERNELS,
    TN__KERNEL_DIFFERENTIATE_PAIRS = TN__KERNEL_DIFFERENTIATE_GATED + TN__PRODUCE_KERNELS,
    TN__KERNEL_NORM_ROWS = TN__KERNEL_DIFFERENTIATE_PAIRS + TN__PAIRS_KERNELS,
    TN__KERNEL_NORM_TILES = TN__KERNEL_NORM_ROWS + TN__NORM_ROWS_KERNELS,
    TN__KERNEL_NORM_ANY_ROWS = TN__KERNEL_NORM_TILES + TN__PRODUCE_KERNELS,
    TN__KERNEL_NORM_BANDS = TN__KERNEL_NORM_ANY_ROWS + 3 * 2,
    TN__KERNEL_NORM_BEGIN = TN__KERNEL_NORM_BANDS + TN__PRODUCE_KERNELS,
    TN__KERNEL_REQUANTIZE,
    TN__KERNEL_SHIFT = TN__KERNEL_REQUANTIZE + TN__REQUANTIZE_KERNELS,
    TN__KERNEL_QUANTIZE_STOCHASTIC = TN__KERNEL_SHIFT + 2,
    TN__KERNEL_RANDOM_ADVANCE = TN__KERNEL_QUANTIZE_STOCHASTIC + TN__STOCHASTIC_KERNELS,
    TN__KERNEL_NORM_GRADIENT,
    TN__KERNEL_NORM_GRADIENT_MEANS = TN__KERNEL_NORM_GRADIENT + TN__PRODUCE_KERNELS,
    TN__KERNEL_NORM_GRADIENT_ROWS = TN__KERNEL_NORM_GRADIENT_MEANS + 3,
    TN__KERNEL_NORM_GRADIENT_HELD = TN__KERNEL_NORM_GRADIENT_ROWS + 2 * TN__NORM_GRADIENT_ROWS,
    TN__KERNEL_NORM_HELD = TN__KERNEL_NORM_GRADIENT_HELD + TN__NORM_HELD_KERNELS,
    TN__KERNEL_ADAMW = TN__KERNEL_NORM_HELD + TN__NORM_HELD_KERNELS,
    TN__KERNEL_ADAMW_FLAT = TN__KERNEL_ADAMW + 2 * 2,
    TN__KERNEL_ADAMW_ADVANCE = TN__KERNEL_ADAMW_FLAT + 3,
    TN__KERNEL_CLIP_FACTOR,
    TN__KERNEL_SQUARE_SUMS,
    TN__KERNEL_EMBED_GRADIENT = TN__KERNEL_SQUARE_SUMS + 3,
    TN__KERNEL_ROW_PRODUCTS = TN__KERNEL_EMBED_GRADIENT + 3,
    TN__KERNEL_ATTENTION = TN__KERNEL_ROW_PRODUCTS + 3, /* of heads of 64 or 128, type */
    TN__KERNEL_ATTENTION_DQ = TN__KERNEL_ATTENTION + 2 * 3,
    TN__KERNEL_ATTENTION_DKV = TN__KERNEL_ATTENTION_DQ + 2 * 3,
    TN__KERNEL_PRODUCT = TN__KERNEL_ATTENTION_DKV + 2 * 3, /* scales of b, types */
    TN__KERNEL_COUNT = TN__KERNEL_PRODUCT + TN__PRODUCT_KERNELS
};

/* family: QUANTIZE or QUANTIZE_LIST; src is fp32, bf16 or fp16; format E4M3 or E5M2; one of
 * has_row, has_col. */
int tn__kernel_of_quantize(int family, int is_1d, int has_row, int has_col, tn_dtype src,
                           tn_dtype format);
int tn__kernel_of_dequantize(int is_col, tn_dtype format, tn_dtype dst);
int tn__kernel_of_shard_amax(tn_dtype src);
int tn__kernel_of_shard_quantize(tn_dtype src, tn_dtype format);
int tn__kernel_of_stochastic(int is_1d, tn_dtype src, tn_dtype format);
/* family: QUANTIZE_TENSOR, QUANTIZE_MXFP8 or QUANTIZE_NVFP4; DEQUANTIZE_... likewise. */
int tn__kernel_of_format(int family, const tn__quantize_work *work);
int tn__kernel_of_format_back(int family, int is_col, tn_dtype format, tn_dtype dst);
int tn__kernel_of_amax(tn_dtype src);
int tn__kernel_of_scale_finish(tn_dtype format);
/* family: ACTIVATE, ACTIVATE_GATED, DIFFERENTIATE, ..._GATED, ..._PAIRS, NORM_TILES,
 * NORM_BANDS or NORM_GRADIENT. */
int tn__kernel_of_produce(int family, int is_1d, tn_dtype made, tn_dtype format);
/* Rows of up to tn__norm_columns[length] columns, and what a block has, of RMS and of LAYER, as in
 * cuda_norm_rows.cu. */
extern const int64_t tn__norm_columns[TN__NORM_LENGTHS];
typedef struct tn__norm_block {
    unsigned threads;
    int rows; /* at a time */
} tn__norm_block;
extern const tn__norm_block tn__norm_block_of[TN__NORM_LENGTHS][2];
int tn__kernel_of_norm_rows(int length, int is_layer, tn_dtype x, tn_dtype format);
int tn__kernel_of_norm_any_rows(tn_dtype x, tn_dtype format);

/* Kernels of norm_gradient_rows: of RMS, then of LAYER. Rows of more columns than that are taken if
 * they are whole pairs of blocks. */
enum { TN__NORM_GRADIENT_ANY_COLUMNS = 4096, TN__NORM_GRADIENT_WHOLE_COLUMNS = 256 };
typedef struct tn__norm_gradient_rows {
    tn_dtype x;
    int columns; /* at most, and for so many there is room */
    unsigned threads;
    int ring; /* rows that it has room for */
} tn__norm_gradient_rows;
extern const tn__norm_gradient_rows tn__norm_gradient_rows_of[TN__NORM_GRADIENT_ROWS];
/* -1: there is none for rows of so many columns. */
int tn__norm_gradient_rows_index(int64_t cols, int is_layer, tn_dtype x);
/* family: NORM_HELD or NORM_GRADIENT_HELD; x is bf16 or fp16. */
int tn__kernel_of_norm_held(int family, int is_1d, tn_dtype x, tn_dtype format);

int tn__kernel_of_requantize(int is_1d, tn_dtype from, tn_dtype to);
int tn__kernel_of_shift(tn_dtype format);
/* family: FINISH, CONVERT, AXPY or CROSS_ENTROPY. */
int tn__kernel_of_pair(int family, tn_dtype from, tn_dtype to);

enum { TN__KERNEL_NAME_BYTES = 64, TN__CUDA_IMAGE_COUNT = 26, TN__REFUSAL_BYTES = 200 };
void tn__kernel_name(int kernel, char name[TN__KERNEL_NAME_BYTES]);

typedef struct tn__cuda_gemm tn__cuda_gemm; /* cuda_gemm.c and its parts: cuda_gemm.h */

/* How many blocks of a kernel of norm_rows the device holds at once: with a residual or without,
 * and with outputs or with statistics alone. */
typedef int64_t tn__norm_blocks[2][2];

typedef struct tn__cuda_context {
    tn__attachment attachment; /* first: what the device holds is this */
    tn_device *device;
    const tn__driver *driver;
    tn__driver_device *state;
    tn_device_info info;
    int multiprocessors;    /* 0: not told, or no kernel of ours may share them with a product */
    int product_processors; /* likewise, for products of our own */
    char product_refusal[TN__REFUSAL_BYTES]; /* why there are none for those */
    void *modules[TN__CUDA_IMAGE_COUNT];
    tn__function kernels[TN__KERNEL_COUNT];
    tn__norm_blocks norm_blocks[TN__NORM_ROWS_KERNELS];
    int64_t norm_gradient_blocks[2 * TN__NORM_GRADIENT_ROWS]
                                [2]; /* likewise; without, with `added` */
    /* The same of kernels that hold tiles; 0: there is no room for one. */
    int64_t norm_held_blocks[TN__NORM_HELD_KERNELS];
    int64_t norm_gradient_held_blocks[TN__NORM_HELD_KERNELS];
    tn__cuda_gemm *gemm; /* NULL until the first GEMM */
} tn__cuda_context;

/* Loads the kernels at the first call for a device. */
tn_status tn__cuda_context_of(tn_device *device, tn__cuda_context **out);

/* Puts a kernel on the stream: `blocks` blocks of `threads`, its one argument by value. */
tn_status tn__kernel_launch(tn__cuda_context *context, int kernel, int64_t blocks, unsigned threads,
                            void *argument, tn_stream stream);

/* The transpose of a plane on as many multiprocessors, of which two neighbours go together as they
 * do in products. */
tn_status tn__kernel_launch_narrow(tn__cuda_context *context, unsigned blocks,
                                   tn__cuda_narrow_arguments *argument, tn_stream stream);
/* The same of a kernel that wants shared memory of a launch. */
typedef struct tn__grid {
    int64_t blocks;
    unsigned threads;
    unsigned shared_bytes;
    unsigned cluster; /* as tn__launch's */
    int is_together;  /* likewise */
} tn__grid;
tn_status tn__kernel_launch_grid(tn__cuda_context *context, int kernel, const tn__grid *grid,
                                 void *argument, tn_stream stream);

/* cuda_list_table.c */
tn_status tn__cuda_grouped_quantize(tn_device *device, const tn__grouped_quantize_work *work,
                                    tn_stream stream);
tn_status tn__cuda_quantize_list(tn_device *device, const tn__quantize_list_work *work,
                                 tn_stream stream);

/* cuda_rows_table.c */
tn_status tn__cuda_pad_groups(tn_device *device, const tn__pad_groups_work *work, tn_stream stream);
tn_status tn__cuda_gather_rows(tn_device *device, const tn__gather_rows_work *work,
                               tn_stream stream);
tn_status tn__cuda_combine_rows(tn_device *device, const tn__combine_rows_work *work,
                                tn_stream stream);

/* cuda_shard_table.c */
tn_status tn__cuda_shard_amax(tn_device *device, const tn__shard_amax_work *work, tn_stream stream);
tn_status tn__cuda_shard_quantize(tn_device *device, const tn__shard_quantize_work *work,
                                  tn_stream stream);

/* cuda_produce_table.c */
tn_status tn__cuda_produce(tn_device *device, const tn__produce_work *work, tn_stream stream);
tn_status tn__cuda_column_sums(tn_device *device, const tn__column_sums_work *work,
                               tn_stream stream);

/* cuda_norm_table.c */
void tn__cuda_norm_fit(tn__cuda_context *context);
/* How many blocks of such a kernel the device holds at once; 0: none, and then no error. */
int64_t tn__cuda_held_fit(tn__cuda_context *context, int kernel);
tn_status tn__cuda_norm_begin(tn__cuda_context *context, tn__cuda_norm_begin_arguments *begin,
                              tn_stream stream);
tn_status tn__cuda_norm(tn_device *device, const tn__norm_work *work, tn_stream stream);

/* cuda_norm_gradient_table.c */
void tn__cuda_norm_gradient_fit(tn__cuda_context *context);
tn_status tn__cuda_norm_gradient_split(tn_device *device, const tn__norm_gradient_work *work,
                                       int *out);
tn_status tn__cuda_norm_gradient_means(tn_device *device, const tn__norm_gradient_work *work,
                                       tn_stream stream);
tn_status tn__cuda_norm_gradient(tn_device *device, const tn__norm_gradient_work *work,
                                 tn_stream stream);

/* cuda_train_table.c */
tn_status tn__cuda_row_products(tn_device *device, const tn__row_products_work *work,
                                tn_stream stream);
tn_status tn__cuda_embed_gradient(tn_device *device, const tn__embed_gradient_work *work,
                                  tn_stream stream);
tn_status tn__cuda_adamw(tn_device *device, const tn__adamw_work *work, tn_stream stream);
tn_status tn__cuda_adamw_advance(tn_device *device, const tn__adamw_advance_work *work,
                                 tn_stream stream);
tn_status tn__cuda_square_sums(tn_device *device, const tn__square_sums_work *work,
                               tn_stream stream);
tn_status tn__cuda_clip_factor(tn_device *device, const tn__clip_factor_work *work,
                               tn_stream stream);

/* cuda_attention_table.c */
tn_status tn__cuda_attention(tn_device *device, const tn__attention_work *work, tn_stream stream);
tn_status tn__cuda_attention_gradient(tn_device *device, const tn__attention_work *work,
                                      tn_stream stream);

/* cuda_gemm.c and its parts: cuda_gemm.h */
tn_status tn__cuda_gemm_scratch_bytes(tn_device *device, const tn__gemm_work *work, size_t *out);
tn_status tn__cuda_gemm_run(tn_device *device, const tn__gemm_work *work, tn_stream stream);
int tn__cuda_gemm_spares(tn_device *device, const tn__gemm_work *work, size_t plane_bytes);
void tn__cuda_gemm_end(tn__cuda_context *context);
tn_status tn__cuda_gemm_tune(tn_device *device, const tn__gemm_work *work, tn_stream stream);
tn_status tn__cuda_gemm_prefer(tn_device *device, const tn__gemm_work *work, tn_gemm_engine engine);
tn_status tn__cuda_gemm_choice(tn_device *device, const tn__gemm_work *work, tn_gemm_choice *out);
tn_status tn__cuda_gemm_table_text(tn_device *device, char **text, size_t *bytes);
tn_status tn__cuda_gemm_table_take(tn_device *device, const char *text, size_t bytes);

#endif
