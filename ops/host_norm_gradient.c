/* The gradient of the norms on the host: the two means of each row, then dx with its casts and the
 * sums of the columns. tenure_train.h has the formulas and the order of the sums. */
#include "host_norm_sums.h"
#include "host_number.h"
#include "host_tile_sums.h"

/* What a run of columns of one row is worked out from. */
typedef struct run {
    int count;
    float dy[TN__BLOCK];
    float normal[TN__BLOCK]; /* what x was normalized to */
    float gamma[TN__BLOCK];
} run;

static void load_run(const tn__norm_gradient_work *work, int64_t row, int64_t col, int count,
                     run *r) {
    const tn__matrix *x = &work->x;
    const float mean = work->mean ? work->mean[row] : 0.0f, rstd = work->rstd[row];
    r->count = count;
    tn__load_floats(x->dtype, work->dy, row * x->cols + col, count, r->dy);
    tn__load_floats(x->dtype, x->data, row * x->cols + col, count, r->normal);
    tn__host_norm_vector(&work->gamma, col, count, 1.0f, work->gamma_base, r->gamma);
    for (int i = 0; i < count; i++)
        r->normal[i] = (r->normal[i] - mean) * rstd;
}

static int is_skipped(const float *skip) { return skip && *skip != 0.0f; }

/* ---- the means of a row -------------------------------------------------------------------- */

static void means_of_row(const tn__norm_gradient_work *work, int64_t row) {
    const int64_t cols = work->x.cols;
    const float count = (float)(cols ? cols : 1);
    float shift[TN__NORM_ROW_SUMS] = {0}, tilt[TN__NORM_ROW_SUMS] = {0};
    run r;
    for (int64_t col = 0; col < cols; col += TN__BLOCK) {
        const int to = (int)(col / TN__BLOCK % TN__NORM_ROW_SUMS);
        float g[TN__BLOCK];
        load_run(work, row, col, (int)tn__least(TN__BLOCK, cols - col), &r);
        for (int i = 0; i < TN__BLOCK; i++) {
            g[i] = i < r.count ? r.dy[i] * r.gamma[i] : 0.0f;
            if (i >= r.count) r.normal[i] = 0.0f;
        }
        shift[to] += tn__norm_block_sum(g, NULL);
        tilt[to] += tn__norm_block_sum(g, r.normal);
    }
    if (work->shift) work->shift[row] = tn__canonical(tn__norm_row_total(shift) / count);
    work->tilt[row] = tn__canonical(tn__norm_row_total(tilt) / count);
}

void tn__host_norm_gradient_means(const tn__norm_gradient_work *work) {
    if (is_skipped(work->skip)) return;
    for (int64_t row = 0; row < work->x.rows; row++)
        means_of_row(work, row);
}

/* ---- dx ------------------------------------------------------------------------------------ */

typedef struct maker {
    const tn__norm_gradient_work *work;
    tn__tile_sums gamma, beta;
} maker;

static void add_to_sums(maker *m, int64_t row, int64_t col, const run *r) {
    const tn__norm_gradient_work *work = m->work;
    const tn__matrix *x = &work->x;
    float *gamma = tn__tile_sums_of(&m->gamma, row), *beta = tn__tile_sums_of(&m->beta, row);
    for (int i = 0; i < r->count; i++) {
        gamma[i] = fmaf(r->dy[i], r->normal[i], gamma[i]);
        beta[i] += r->dy[i];
    }
    if (work->gamma_sums)
        tn__tile_sums_end_row(&m->gamma, row, x->rows, work->gamma_sums, x->cols, col, r->count);
    if (work->beta_sums)
        tn__tile_sums_end_row(&m->beta, row, x->rows, work->beta_sums, x->cols, col, r->count);
}

static void make_tile_row(void *context, int64_t row, int64_t col, int count, float *out) {
    maker *m = context;
    const tn__norm_gradient_work *work = m->work;
    const tn__matrix *x = &work->x;
    const float shift = work->shift ? work->shift[row] : 0.0f, tilt = work->tilt[row];
    float added[TN__BLOCK];
    run r;
    load_run(work, row, col, count, &r);
    for (int i = 0; i < count; i++) {
        const float g = r.dy[i] * r.gamma[i] - shift;
        out[i] = fmaf(-r.normal[i], tilt, g) * work->rstd[row];
    }
    if (work->added) {
        tn__load_floats(x->dtype, work->added, row * x->cols + col, count, added);
        for (int i = 0; i < count; i++)
            out[i] = out[i] + added[i];
    }
    add_to_sums(m, row, col, &r);
    tn__host_round_run(&work->cast.src, row, col, count, out);
}

void tn__host_norm_gradient(const tn__norm_gradient_work *work) {
    maker m = {.work = work};
    if (is_skipped(work->skip)) return;
    tn__host_quantize_made(&work->cast, make_tile_row, &m);
}
