/* D = A B^T on the host, over block-scaled FP8 or plain operands: the definition of tn_gemm.
 *
 * For each element of D, in this order and with these roundings:
 *
 *     FP8     for each block of 128 along the contracted dimension (the last may be shorter):
 *                 p = sum of products in fp32, from 0, in rising k
 *                 y = fmaf(p * s1, s2, y)                                        (y from 0)
 *             s1 is A's scale and s2 B's, unless A is scaled by tiles and B by vectors: then
 *             they change places, so that the vector's comes first, as in TransformerEngine's
 *             reference. The product of two FP8 numbers is exact in fp32, so it makes no
 *             difference whether p is summed with multiply and add or with fmaf.
 *     plain   y = sum over all of k in fp32, from 0, in rising k, product and sum each rounded
 *     tensor  the same of the FP8 numbers, then y = (y * s_a) * s_b
 *     bias    y = y + bias
 *     then    d = to_type(y), or with accumulate d = to_type(d + to_type(y)), the sum in fp32, as
 *             cuBLASLt and TransformerEngine's reference do
 *
 * D is made in squares of 128 x 128; for one square, each 128 of k of both operands are widened
 * to fp32 and packed so that the innermost loop reads them in order:
 *
 *     A   [row / 4][k][4]     B   [column / 16][k][16]     innermost: 4 x 16 sums in registers
 */
#include <math.h>

#include "host_kernels.h"
#include "host_number.h"

enum { ROW_LANES = 4, COL_LANES = 16 };

typedef struct square {
    float a[TN__BLOCK / ROW_LANES][TN__BLOCK][ROW_LANES];
    float b[TN__BLOCK / COL_LANES][TN__BLOCK][COL_LANES];
    float y[TN__BLOCK][TN__BLOCK];
    float first[TN__BLOCK];  /* s1 and s2 of this block of k: by row, by column */
    float second[TN__BLOCK]; /* ... or by column, by row if columns_first */
    int columns_first;
    int rows, cols, depth; /* of this square and this block of k */
    int is_wide;           /* the CPU has what the wide clones need */
} square;

size_t tn__host_gemm_scratch_bytes(void) { return sizeof(square); }

/* ---- packing -------------------------------------------------------------------------------- */

/* Widens `rows` rows (from `row` on) by `depth` of k (from `k` on) into groups of `lanes` rows. */
static void pack(const tn__operand *operand, int64_t contracted, int64_t row, int rows, int64_t k,
                 int depth, int lanes, float *out) {
    float line[TN__BLOCK];
    for (int r = 0; r < rows; r++) {
        float *lane = out + (int64_t)(r / lanes) * TN__BLOCK * lanes + r % lanes;
        tn__load_floats(operand->dtype, operand->data, (row + r) * contracted + k, depth, line);
        for (int64_t i = 0; i < depth; i++)
            lane[i * lanes] = line[i];
    }
}

static void pack_transposed(const tn__operand *operand, int64_t row, int rows, int64_t k, int depth,
                            int lanes, float *out) {
    for (int r = 0; r < rows; r += lanes) {
        float *group = out + (int64_t)(r / lanes) * TN__BLOCK * lanes;
        int count = (int)tn__least(lanes, rows - r);
        for (int64_t i = 0; i < depth; i++) {
            tn__load_floats(operand->dtype, operand->data, (k + i) * operand->rows + row + r, count,
                            group + i * lanes);
        }
    }
}

/* Lanes of the last group that no row fills: their sums are never stored, but what was in the
 * scratch before (denormals, NaN) would slow all of the group down. */
static void clear_tail_lanes(int rows, int depth, int lanes, float *out) {
    int used = rows % lanes;
    float *group = out + (int64_t)(rows / lanes) * TN__BLOCK * lanes;
    if (!used) return;
    for (int64_t i = 0; i < depth; i++) {
        for (int lane = used; lane < lanes; lane++)
            group[i * lanes + lane] = 0.0f;
    }
}

static void pack_operand(const tn__operand *operand, int64_t contracted, int64_t row, int rows,
                         int64_t k, int depth, int lanes, float *out) {
    if (operand->is_transposed) {
        pack_transposed(operand, row, rows, k, depth, lanes, out);
    } else {
        pack(operand, contracted, row, rows, k, depth, lanes, out);
    }
    clear_tail_lanes(rows, depth, lanes, out);
}

static void load_scales(const tn__operand *operand, int64_t row, int rows, int64_t k, float *out) {
    int64_t block = k / TN__BLOCK;
    for (int r = 0; r < rows; r++) {
        int64_t at = operand->kind == TN__OPERAND_VECTOR
                         ? block * operand->scale_stride + row + r
                         : (row + r) / TN__BLOCK * operand->scale_stride + block;
        out[r] = operand->scale[at];
    }
}

/* ---- one block of k for one square ---------------------------------------------------------- */

/* sum[r][c] += a[r][k] * b[c][k] for k in order; multiply and add are separate roundings. */
TN__INLINE void sum_products(const float *a, const float *b, int depth, float *sum) {
    const tn__floats8 *wide = (const tn__floats8 *)(const void *)b;
    tn__floats8 *s = (tn__floats8 *)(void *)sum;
    tn__floats8 s00 = s[0], s01 = s[1], s10 = s[2], s11 = s[3];
    tn__floats8 s20 = s[4], s21 = s[5], s30 = s[6], s31 = s[7];
    for (int k = 0; k < depth; k++, wide += 2) {
        tn__floats8 b0 = wide[0], b1 = wide[1];
        const float *lane = a + (int64_t)k * ROW_LANES;
        s00 += lane[0] * b0, s01 += lane[0] * b1;
        s10 += lane[1] * b0, s11 += lane[1] * b1;
        s20 += lane[2] * b0, s21 += lane[2] * b1;
        s30 += lane[3] * b0, s31 += lane[3] * b1;
    }
    s[0] = s00, s[1] = s01, s[2] = s10, s[3] = s11;
    s[4] = s20, s[5] = s21, s[6] = s30, s[7] = s31;
}

TN__INLINE void add_scaled(square *q, int row, int col, const float *sum) {
    int rows = (int)tn__least(ROW_LANES, q->rows - row);
    int cols = (int)tn__least(COL_LANES, q->cols - col);
    for (int r = 0; r < rows; r++) {
        float *y = &q->y[row + r][col];
        const float *p = sum + (int64_t)r * COL_LANES;
        for (int c = 0; c < cols; c++) {
            float s1 = q->columns_first ? q->first[col + c] : q->first[row + r];
            float s2 = q->columns_first ? q->second[row + r] : q->second[col + c];
            y[c] = fmaf(p[c] * s1, s2, y[c]);
        }
    }
}

TN__INLINE void multiply_scaled_body(square *q) {
    for (int row = 0; row < q->rows; row += ROW_LANES) {
        for (int col = 0; col < q->cols; col += COL_LANES) {
            float sum[ROW_LANES * COL_LANES] = {0};
            sum_products(q->a[row / ROW_LANES][0], q->b[col / COL_LANES][0], q->depth, sum);
            add_scaled(q, row, col, sum);
        }
    }
}

/* The sums go on from one block of k to the next. y has room for whole groups of lanes. */
TN__INLINE void multiply_plain_body(square *q) {
    for (int row = 0; row < q->rows; row += ROW_LANES) {
        for (int col = 0; col < q->cols; col += COL_LANES) {
            float sum[ROW_LANES][COL_LANES];
            for (int r = 0; r < ROW_LANES; r++) {
                memcpy(sum[r], &q->y[row + r][col], sizeof sum[r]);
            }
            sum_products(q->a[row / ROW_LANES][0], q->b[col / COL_LANES][0], q->depth, sum[0]);
            for (int r = 0; r < ROW_LANES; r++) {
                memcpy(&q->y[row + r][col], sum[r], sizeof sum[r]);
            }
        }
    }
}

static void multiply_scaled(square *q) { multiply_scaled_body(q); }
static void multiply_plain(square *q) { multiply_plain_body(q); }

#if TN__HAS_WIDE_CLONE
TN__WIDE_CLONE static void multiply_scaled_wide(square *q) { multiply_scaled_body(q); }
TN__WIDE_CLONE static void multiply_plain_wide(square *q) { multiply_plain_body(q); }
#endif

static void multiply(square *q, int is_scaled) {
#if TN__HAS_WIDE_CLONE
    if (q->is_wide) {
        if (is_scaled) multiply_scaled_wide(q);
        if (!is_scaled) multiply_plain_wide(q);
        return;
    }
#endif
    if (is_scaled) multiply_scaled(q);
    if (!is_scaled) multiply_plain(q);
}

/* ---- a square of D -------------------------------------------------------------------------- */

static void round_to_type(tn_dtype dtype, int count, float *y) {
    float stored[TN__BLOCK];
    tn__store_floats(dtype, stored, 0, count, y);
    tn__load_floats(dtype, stored, 0, count, y);
}

static void store_row(const tn__gemm_work *work, int64_t row, int64_t col, int count, float *y) {
    const tn__matrix *d = &work->d;
    int64_t at = row * d->cols + col;
    float old[TN__BLOCK];
    if (work->a.kind == TN__OPERAND_TENSOR) {
        for (int i = 0; i < count; i++)
            y[i] = y[i] * *work->a.scale * *work->b.scale;
    }
    if (work->bias.cols > 0) {
        tn__load_floats(work->bias.dtype, work->bias.data, col, count, old);
        for (int i = 0; i < count; i++)
            y[i] = y[i] + old[i];
    }
    if (work->accumulate) {
        round_to_type(d->dtype, count, y);
        tn__load_floats(d->dtype, d->data, at, count, old);
        for (int i = 0; i < count; i++)
            y[i] = old[i] + y[i];
    }
    tn__store_floats(d->dtype, d->data, at, count, y);
}

static void multiply_block(const tn__gemm_work *work, int64_t row, int64_t col, int64_t k,
                           square *q) {
    const tn__operand *a = &work->a, *b = &work->b;
    q->depth = (int)tn__least(TN__BLOCK, work->contracted - k);
    pack_operand(a, work->contracted, row, q->rows, k, q->depth, ROW_LANES, q->a[0][0]);
    pack_operand(b, work->contracted, col, q->cols, k, q->depth, COL_LANES, q->b[0][0]);
    int has_blocks = a->kind == TN__OPERAND_VECTOR || a->kind == TN__OPERAND_TILE;
    if (has_blocks) {
        load_scales(a, row, q->rows, k, q->columns_first ? q->second : q->first);
        load_scales(b, col, q->cols, k, q->columns_first ? q->first : q->second);
    }
    multiply(q, has_blocks);
}

static void make_square(const tn__gemm_work *work, int64_t row, int64_t col, square *q) {
    q->rows = (int)tn__least(TN__BLOCK, work->d.rows - row);
    q->cols = (int)tn__least(TN__BLOCK, work->d.cols - col);
    memset(q->y, 0, sizeof q->y);
    for (int64_t k = 0; k < work->contracted; k += TN__BLOCK)
        multiply_block(work, row, col, k, q);
    for (int r = 0; r < q->rows; r++)
        store_row(work, row + r, col, q->cols, q->y[r]);
}

static void gemm(const tn__gemm_work *work, int is_wide) {
    square *q = work->scratch;
    q->is_wide = is_wide;
    q->columns_first = work->a.kind == TN__OPERAND_TILE && work->b.kind == TN__OPERAND_VECTOR;
    for (int64_t row = 0; row < work->d.rows; row += TN__BLOCK) {
        for (int64_t col = 0; col < work->d.cols; col += TN__BLOCK) {
            make_square(work, row, col, q);
        }
    }
}

void tn__host_gemm_narrow(const tn__gemm_work *work) { gemm(work, 0); }

void tn__host_gemm(const tn__gemm_work *work) { gemm(work, tn__cpu_is_wide()); }
