/* Norms on the host: the statistics of rows in their fixed order, and what is made with them. */
#include "host_norm_sums.h"
#include "host_number.h"

/* ---- statistics ---------------------------------------------------------------------------- */

/* `count` values from column `col` on of the row whose statistics are wanted. */
static void load_row(const tn__row_statistics_work *work, int64_t at, int count, float *out) {
    const tn__matrix *x = &work->x;
    tn__load_floats(x->dtype, work->sum ? work->sum : x->data, at, count, out);
}

static void add_residual(const tn__row_statistics_work *work, int64_t row) {
    const tn__matrix *x = &work->x;
    float value[TN__BLOCK], residual[TN__BLOCK];
    for (int64_t col = 0; col < x->cols; col += TN__BLOCK) {
        const int64_t at = row * x->cols + col;
        const int64_t count = tn__least(TN__BLOCK, x->cols - col);
        tn__load_floats(x->dtype, x->data, at, count, value);
        tn__load_floats(x->dtype, work->residual, at, count, residual);
        for (int64_t i = 0; i < count; i++)
            value[i] += residual[i];
        tn__store_floats(x->dtype, work->sum, at, count, value);
    }
}

/* A block of the row whose statistics are wanted. */
typedef struct row_block {
    int count; /* of columns that are in the row */
    float value[TN__BLOCK];
} row_block;

static void load_block(const tn__row_statistics_work *work, int64_t row, int64_t col,
                       row_block *block) {
    const int64_t cols = work->x.cols;
    block->count = (int)tn__least(TN__BLOCK, cols - col);
    load_row(work, row * cols + col, block->count, block->value);
    for (int i = block->count; i < TN__BLOCK; i++)
        block->value[i] = 0.0f;
}

static float mean_of_row(const tn__row_statistics_work *work, int64_t row) {
    const int64_t cols = work->x.cols;
    float sum[TN__NORM_ROW_SUMS] = {0};
    row_block block;
    for (int64_t col = 0; col < cols; col += TN__BLOCK) {
        load_block(work, row, col, &block);
        sum[col / TN__BLOCK % TN__NORM_ROW_SUMS] += tn__norm_block_sum(block.value, NULL);
    }
    return tn__norm_row_total(sum) / (float)(cols ? cols : 1); /* of nothing: 0 */
}

/* Of the deviations from `mean`: those from the block's own mean, and what that one deviates. */
static float squares_around(row_block *block, float mean) {
    const float count = (float)block->count, own = tn__norm_block_sum(block->value, NULL) / count;
    for (int i = 0; i < block->count; i++)
        block->value[i] -= own;
    const float off = own - mean;
    return fmaf(count * off, off, tn__norm_block_sum(block->value, block->value));
}

/* The mean of squares: of the values, or of what they deviate from `mean`, if that is one. */
static float mean_square_of_row(const tn__row_statistics_work *work, int64_t row, float mean) {
    const int64_t cols = work->x.cols;
    float sum[TN__NORM_ROW_SUMS] = {0};
    row_block block;
    for (int64_t col = 0; col < cols; col += TN__BLOCK) {
        load_block(work, row, col, &block);
        sum[col / TN__BLOCK % TN__NORM_ROW_SUMS] +=
            work->mean ? squares_around(&block, mean)
                       : tn__norm_block_sum(block.value, block.value);
    }
    return tn__norm_row_total(sum) / (float)(cols ? cols : 1);
}

void tn__host_row_statistics(const tn__row_statistics_work *work) {
    if (tn__host_is_skipped(work->skip)) return;
    for (int64_t row = 0; row < work->x.rows; row++) {
        float mean = 0.0f;
        if (work->sum) add_residual(work, row);
        if (work->mean) {
            mean = mean_of_row(work, row);
            work->mean[row] = tn__canonical(mean);
        }
        const float square = mean_square_of_row(work, row, mean);
        work->rstd[row] = tn__canonical(tn__exact_rsqrt(square + work->epsilon));
    }
}

/* ---- what is made -------------------------------------------------------------------------- */

void tn__host_norm_vector(const tn__matrix *vector, int64_t col, int count, float absent,
                          float base, float *out) {
    for (int i = 0; i < count; i++)
        out[i] = absent;
    if (!vector->data) return;
    tn__load_floats(vector->dtype, vector->data, col, count, out);
    for (int i = 0; i < count && base != 0.0f; i++) /* -0 + 0 is not -0 */
        out[i] += base;
}

void tn__host_norm_run(const tn__produce_work *work, int64_t row, int64_t col, int count,
                       float *out) {
    const tn__matrix *x = &work->x;
    const float mean = work->mean ? work->mean[row] : 0.0f, rstd = work->rstd[row];
    float value[TN__BLOCK], gamma[TN__BLOCK], beta[TN__BLOCK];
    tn__load_floats(x->dtype, x->data, row * x->cols + col, count, value);
    tn__host_norm_vector(&work->gamma, col, count, 1.0f, work->gamma_base, gamma);
    tn__host_norm_vector(&work->beta, col, count, 0.0f, 0.0f, beta);
    for (int i = 0; i < count; i++) {
        const float scaled = (value[i] - mean) * rstd;
        out[i] = work->beta.data ? fmaf(scaled, gamma[i], beta[i]) : scaled * gamma[i];
    }
}
