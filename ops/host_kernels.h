/* The host kernels themselves: plain functions on memory, run now on the calling thread.
 *
 * host_table.c puts them into stream order as host tasks; the tests call them directly. They read
 * and write only what their work names: never a scale's padding, never past a tail.
 */
#ifndef TENURE_HOST_KERNELS_H
#define TENURE_HOST_KERNELS_H

#include "format_table.h" /* the sizes of blocks */
#include "op_kernels.h"

void tn__host_quantize(const tn__quantize_work *work);
/* The same for values that are made as they are needed: `make` gives `count` values of row `row`
 * from column `col` on, tile after tile and in each its rows in rising order. The source's data is
 * not read; without planes, `make` is all there is. */
typedef void (*tn__make_row)(void *context, int64_t row, int64_t col, int count, float *out);
void tn__host_quantize_made(const tn__quantize_work *work, tn__make_row make, void *context);

void tn__host_dequantize(const tn__dequantize_work *work);
void tn__host_transpose(const tn__transpose_work *work);
void tn__host_requantize(const tn__requantize_work *work);
void tn__host_scale_update(const tn__scale_update_work *work);

/* Parts of them: quantizing to TENSOR, MXFP8 and NVFP4, but for the padding of scales; that; and
 * the bits of the largest magnitude of some values, NaN ignored. */
void tn__host_quantize_formats(const tn__quantize_work *work);
void tn__host_zero_scale_padding(const tn_plane_view *view);
uint32_t tn__host_row_amax(const float *value, int64_t count);

/* Elements of the source from (row, col) on, along a row or down a column. */
typedef struct tn__run {
    int64_t row, col;
    int is_down;
} tn__run;

/* The codes of `count` elements that are scaled already, rounded as the work asks for. */
void tn__host_encode(const tn__quantize_work *work, tn__run run, int count, const float *scaled,
                     uint8_t *code);

void tn__host_produce(const tn__produce_work *work);
void tn__host_row_statistics(const tn__row_statistics_work *work);
/* `count` values of one row that a NORM makes, not rounded. */
void tn__host_norm_run(const tn__produce_work *work, int64_t row, int64_t col, int count,
                       float *out);
/* `count` values of a vector of the columns, plus `base`; `absent` where it has no data. */
void tn__host_norm_vector(const tn__matrix *vector, int64_t col, int count, float absent,
                          float base, float *out);
void tn__host_column_sums(const tn__column_sums_work *work);
/* Values of one row of what an op makes, rounded to its type; and written, if it has data. */
void tn__host_round_run(const tn__matrix *made, int64_t row, int64_t col, int count, float *values);

void tn__host_norm_gradient_means(const tn__norm_gradient_work *work);
void tn__host_norm_gradient(const tn__norm_gradient_work *work);
void tn__host_row_products(const tn__row_products_work *work);
void tn__host_embed_gradient(const tn__embed_gradient_work *work);
void tn__host_adamw(const tn__adamw_work *work);
void tn__host_adamw_advance(const tn__adamw_advance_work *work);
void tn__host_square_sums(const tn__square_sums_work *work); /* host_clip.c */
void tn__host_clip_factor(const tn__clip_factor_work *work);

void tn__host_attention(const tn__attention_work *work);
void tn__host_attention_gradient(const tn__attention_work *work);

/* Values of the plane at (row, col) and after, as it is stored; dst is not looked at. */
void tn__host_plane_values(const tn__dequantize_work *work, int64_t row, int64_t col, int64_t count,
                           float *out);

/* Bytes that work->scratch must have, whatever the sizes. */
size_t tn__host_gemm_scratch_bytes(void);
void tn__host_gemm(const tn__gemm_work *work);
void tn__host_gemm_narrow(const tn__gemm_work *work); /* the same bits on any CPU, slower */

void tn__host_axpy(const tn__axpy_work *work);
void tn__host_convert(const tn__matrix *x, const tn__matrix *y);
void tn__host_embed(const tn__embed_work *work);
void tn__host_cross_entropy(const tn__cross_entropy_work *work);

/* Of a work's skip flag, when it runs. */
static inline int tn__host_is_skipped(const float *skip) { return skip && *skip != 0.0f; }

static inline int64_t tn__least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A row of a plane's fp32 scales. */
static inline float *tn__scale_row(const tn_plane_view *view, int64_t row) {
    return (float *)view->scale + row * view->layout.scale_stride;
}

#endif
