/* The operations of a training step on the host, beside the norms: AdamW, and the gradients of the
 * embedding and of the weights of rows. tenure_train.h has the formulas and the order of sums. */
#include "host_kernels.h"
#include "host_number.h"
#include "host_row_sums.h"

static int is_skipped(const float *skip) { return skip && *skip != 0.0f; }

/* ---- AdamW --------------------------------------------------------------------------------- */

typedef struct maker {
    const tn__adamw_work *work;
    tn__adamw_factors factors;
} maker;

/* The new master copy of a run, which is then cast; both moments change where they are. */
static void update_tile_row(void *context, int64_t row, int64_t col, int count, float *out) {
    const maker *m = context;
    const tn__adamw_work *work = m->work;
    const tn__matrix *master = &work->cast.src;
    const int64_t at = row * master->cols + col;
    float gradient[TN__BLOCK];
    tn__load_floats(work->gradient.dtype, work->gradient.data, at, count, gradient);
    tn__load_floats(TN_FP32, master->data, at, count, out);
    for (int i = 0; i < count; i++) {
        float *first = &work->first[at + i], *second = &work->second[at + i];
        out[i] = tn__adamw_element(&m->factors, gradient[i], first, second, out[i]);
        *first = tn__canonical(*first);
        *second = tn__canonical(*second);
    }
    tn__host_round_run(master, row, col, count, out);
    if (work->plain.data) tn__store_floats(work->plain.dtype, work->plain.data, at, count, out);
}

void tn__host_adamw(const tn__adamw_work *work) {
    maker m = {.work = work};
    if (is_skipped(work->skip)) return;
    m.factors = tn__adamw_factors_of(work->constants, work->step, work->rate, work->gradient_scale);
    tn__host_quantize_made(&work->cast, update_tile_row, &m);
}

void tn__host_adamw_advance(const tn__adamw_advance_work *work) {
    if (is_skipped(work->skip)) return;
    tn__adamw_begin_step(work->step, work->beta1, work->beta2);
}

/* ---- the embedding's gradient --------------------------------------------------------------- */

void tn__host_embed_gradient(const tn__embed_gradient_work *work) {
    const tn__matrix *dy = &work->dy, *table = &work->table;
    if (is_skipped(work->skip)) return;
    for (int64_t row = 0; row < table->rows; row++) {
        for (int64_t col = 0; col < table->cols; col += TN__BLOCK) {
            const int count = (int)tn__least(TN__BLOCK, table->cols - col);
            float sum[TN__BLOCK] = {0}, value[TN__BLOCK];
            for (int64_t t = 0; t < dy->rows; t++) {
                if (work->tokens[t] != row) continue;
                tn__load_floats(dy->dtype, dy->data, t * dy->cols + col, count, value);
                for (int i = 0; i < count; i++)
                    sum[i] += value[i];
            }
            if (work->accumulate) {
                tn__load_floats(table->dtype, table->data, row * table->cols + col, count, value);
                for (int i = 0; i < count; i++)
                    sum[i] = value[i] + sum[i];
            }
            tn__store_floats(table->dtype, table->data, row * table->cols + col, count, sum);
        }
    }
}

/* ---- products over rows -------------------------------------------------------------------- */

static float product_of_row(const tn__row_products_work *work, int64_t row) {
    const tn__matrix *x = &work->x;
    const int64_t cols = work->is_gated ? x->cols / 2 : x->cols; /* N */
    float sum[TN__HOST_ROW_SUMS] = {0};
    float value[TN__HOST_ROW_SUMS], gate[TN__HOST_ROW_SUMS], dy[TN__HOST_ROW_SUMS];
    for (int64_t col = 0; col < cols; col += TN__HOST_ROW_SUMS) {
        const int count = (int)tn__least(TN__HOST_ROW_SUMS, cols - col);
        tn__load_floats(x->dtype, x->data, row * x->cols + col, count, value);
        if (work->is_gated)
            tn__load_floats(x->dtype, x->data, row * x->cols + cols + col, count, gate);
        tn__load_floats(x->dtype, work->dy, row * cols + col, count, dy);
        for (int i = 0; i < count; i++) {
            float made = tn__curve_at(work->curve, value[i], x->dtype == TN_BF16).value;
            if (work->is_gated) made = made * gate[i];
            sum[i] = fmaf(dy[i], made, sum[i]);
        }
    }
    return tn__row_total(sum);
}

void tn__host_row_products(const tn__row_products_work *work) {
    if (is_skipped(work->skip)) return;
    for (int64_t row = 0; row < work->x.rows; row++)
        work->sums[row] = tn__canonical(product_of_row(work, row));
}
