/* Norms on the host: the statistics of rows in their fixed order, and what is made with them. */
#include "host_kernels.h"
#include "host_number.h"

enum { ROW_SUMS = 2048 }; /* column k is added to sum k mod 2048: see tn_norm_forward */

/* ---- statistics ---------------------------------------------------------------------------- */

/* Of each `whole` of the first `count` sums, of which every `nearest`-th counts: the halves are
 * added to each other, then the halves of what is left, until that is one. */
static void add_sums(float sum[ROW_SUMS], int count, int whole, int nearest) {
    for (int first = 0; first < count; first += whole) {
        for (int apart = whole / 2; apart >= nearest; apart /= 2) {
            for (int i = first; i < first + apart; i += nearest)
                sum[i] += sum[i + apart];
        }
    }
}

/* In the order in which a block of 256 threads adds up, 8 neighbours each; sums from `count` on are
 * 0, and to add them changes nothing. */
static float total_of(float sum[ROW_SUMS], int count) {
    add_sums(sum, count, 8, 1);
    add_sums(sum, count, 256, 8);
    add_sums(sum, count, ROW_SUMS, 256);
    return sum[0];
}

/* `count` values from column `col` on of the row whose statistics are wanted. */
static void load_row(const tn__row_statistics_work *work, int64_t at, int count, float *out) {
    const tn__matrix *x = &work->x;
    tn__load_floats(x->dtype, work->sum ? work->sum : x->data, at, count, out);
}

static void add_residual(const tn__row_statistics_work *work, int64_t row) {
    const tn__matrix *x = &work->x;
    float value[ROW_SUMS], residual[ROW_SUMS];
    for (int64_t col = 0; col < x->cols; col += ROW_SUMS) {
        const int64_t at = row * x->cols + col;
        const int64_t count = tn__least(ROW_SUMS, x->cols - col);
        tn__load_floats(x->dtype, x->data, at, count, value);
        tn__load_floats(x->dtype, work->residual, at, count, residual);
        for (int64_t i = 0; i < count; i++)
            value[i] += residual[i];
        tn__store_floats(x->dtype, work->sum, at, count, value);
    }
}

/* The mean of the values, or of the squares of what they deviate from `center`. */
static float mean_of(const tn__row_statistics_work *work, int64_t row, int is_squared,
                     float center) {
    const int64_t cols = work->x.cols;
    float sum[ROW_SUMS] = {0}, value[ROW_SUMS];
    for (int64_t col = 0; col < cols; col += ROW_SUMS) {
        const int count = (int)tn__least(ROW_SUMS, cols - col);
        load_row(work, row * cols + col, count, value);
        for (int i = 0; i < count; i++) {
            const float deviation = value[i] - center;
            sum[i] = is_squared ? fmaf(deviation, deviation, sum[i]) : sum[i] + value[i];
        }
    }
    const float total = total_of(sum, (int)tn__least(ROW_SUMS, cols));
    return total / (float)(cols ? cols : 1); /* of nothing: 0 */
}

void tn__host_row_statistics(const tn__row_statistics_work *work) {
    if (tn__host_is_skipped(work->skip)) return;
    for (int64_t row = 0; row < work->x.rows; row++) {
        float mean = 0.0f;
        if (work->sum) add_residual(work, row);
        if (work->mean) {
            mean = mean_of(work, row, 0, 0.0f);
            work->mean[row] = tn__canonical(mean);
        }
        const float square = mean_of(work, row, 1, mean);
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
