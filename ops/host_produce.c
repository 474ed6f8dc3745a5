/* Producers on the host: the definition of the activations and their gradients, of the casts that
 * go with them, and of the sums of columns.
 *
 * The casts are those of host_quantize.c, which asks for its tiles row by row: what is made for a
 * row of a tile is rounded to its type, written if it is wanted, and handed on as it now is. So a
 * plane is by construction what tn_quantize makes of the value.
 */
#include "host_number.h"
#include "host_tile_sums.h"

enum { TILE_SUMS = 8 }; /* that the tiles of a column are added up in */

/* Of one tile while its rows go by. */
typedef struct maker {
    const tn__produce_work *work;
    tn__tile_sums sums;
} maker;

/* ---- a run of values ----------------------------------------------------------------------- */

/* `count` neighbours of one row: x, and gate and dy where there are any. */
typedef struct run {
    tn__curve curve;
    float weight;
    int is_gated, is_weighted;
    int is_looked_up; /* the sigmoid, as of bf16 */
    int count;
    float x[TN__BLOCK], gate[TN__BLOCK], dy[TN__BLOCK];
} run;

TN__INLINE tn__curve_point point_at(const run *in, float x) {
    return tn__curve_at(in->curve, x, in->is_looked_up);
}

TN__INLINE void activate_body(const run *in, float *out) {
    for (int i = 0; i < in->count; i++) {
        float value = point_at(in, in->x[i]).value;
        if (in->is_gated) value *= in->gate[i];
        out[i] = in->is_weighted ? value * in->weight : value;
    }
}

/* With respect to x. */
TN__INLINE void x_gradient_body(const run *in, float *out) {
    for (int i = 0; i < in->count; i++) {
        const float dy = in->is_weighted ? in->dy[i] * in->weight : in->dy[i];
        const float value = point_at(in, in->x[i]).slope * dy;
        out[i] = in->is_gated ? value * in->gate[i] : value;
    }
}

/* With respect to the gate. */
TN__INLINE void gate_gradient_body(const run *in, float *out) {
    for (int i = 0; i < in->count; i++) {
        const float dy = in->is_weighted ? in->dy[i] * in->weight : in->dy[i];
        out[i] = point_at(in, in->x[i]).value * dy;
    }
}

static void activate_narrow(const run *in, float *out) { activate_body(in, out); }
static void x_gradient_narrow(const run *in, float *out) { x_gradient_body(in, out); }
static void gate_gradient_narrow(const run *in, float *out) { gate_gradient_body(in, out); }

typedef void (*run_function)(const run *in, float *out);
enum { ACTIVATE = 0, X_GRADIENT, GATE_GRADIENT, RUN_FUNCTIONS };
static const run_function narrow[RUN_FUNCTIONS] = {activate_narrow, x_gradient_narrow,
                                                   gate_gradient_narrow};

#if TN__HAS_WIDE_CLONE
TN__WIDE_CLONE static void activate_wide(const run *in, float *out) { activate_body(in, out); }
TN__WIDE_CLONE static void x_gradient_wide(const run *in, float *out) { x_gradient_body(in, out); }
TN__WIDE_CLONE static void gate_gradient_wide(const run *in, float *out) {
    gate_gradient_body(in, out);
}
static const run_function wide[RUN_FUNCTIONS] = {activate_wide, x_gradient_wide,
                                                 gate_gradient_wide};
#else
#define wide narrow
#endif

static void load_weight(const tn__produce_work *work, int64_t row, run *in) {
    in->curve = work->curve;
    in->is_gated = work->is_gated;
    in->is_looked_up = work->x.dtype == TN_BF16;
    in->is_weighted = work->weights != NULL;
    in->weight = work->weights ? work->weights[row] : 1.0f;
}

/* Columns `col` on of row `row` of what is made, none of them beyond the half that it begins in. */
static void make_run(const tn__produce_work *work, int64_t row, int64_t col, int count,
                     float *out) {
    const run_function *functions = tn__cpu_is_wide() ? wide : narrow;
    const tn__matrix *x = &work->x;
    const int64_t cols = work->is_gated ? x->cols / 2 : x->cols; /* N */
    const int64_t in_half = col % cols;
    run in;
    if (work->producer == TN__PRODUCE_NORM) {
        tn__host_norm_run(work, row, col, count, out);
        return;
    }
    load_weight(work, row, &in);
    in.count = count;
    tn__load_floats(x->dtype, x->data, row * x->cols + in_half, count, in.x);
    if (work->is_gated)
        tn__load_floats(x->dtype, x->data, row * x->cols + cols + in_half, count, in.gate);
    if (work->producer == TN__PRODUCE_ACTIVATION) {
        functions[ACTIVATE](&in, out);
        return;
    }
    tn__load_floats(x->dtype, work->dy, row * cols + in_half, count, in.dy);
    functions[col < cols ? X_GRADIENT : GATE_GRADIENT](&in, out);
}

/* ---- a row of a tile ----------------------------------------------------------------------- */

void tn__host_round_run(const tn__matrix *made, int64_t row, int64_t col, int count,
                        float *values) {
    float rounded[TN__BLOCK];
    const size_t item_bytes = tn_dtype_bytes(made->dtype);
    tn__store_floats(made->dtype, rounded, 0, count, values);
    tn__load_floats(made->dtype, rounded, 0, count, values);
    if (!made->data) return;
    memcpy((char *)made->data + (size_t)(row * made->cols + col) * item_bytes, rounded,
           (size_t)count * item_bytes);
}

static void add_to_tile_sums(maker *m, int64_t row, int64_t col, int count, const float *values) {
    const tn__matrix *made = &m->work->cast.src;
    float *group = tn__tile_sums_of(&m->sums, row);
    for (int c = 0; c < count; c++)
        group[c] += values[c];
    tn__tile_sums_end_row(&m->sums, row, made->rows, m->work->tile_sums, made->cols, col, count);
}

static void make_tile_row(void *context, int64_t row, int64_t col, int count, float *out) {
    maker *m = context;
    const tn__produce_work *work = m->work;
    const int64_t half = work->cast.src.cols / 2;
    int first = count; /* in the half that `col` is in */
    if (work->producer == TN__PRODUCE_GRADIENT && work->is_gated && col < half)
        first = (int)tn__least(count, half - col);
    make_run(work, row, col, first, out);
    if (first < count) make_run(work, row, col + first, count - first, out + first);
    tn__host_round_run(&work->cast.src, row, col, count, out);
    if (work->tile_sums) add_to_tile_sums(m, row, col, count, out);
}

void tn__host_produce(const tn__produce_work *work) {
    maker m = {.work = work};
    if (tn__host_is_skipped(work->skip)) return;
    tn__host_quantize_made(&work->cast, make_tile_row, &m);
}

/* ---- the sums of tiles --------------------------------------------------------------------- */

static float sum_of_tile(const tn__column_sums_work *work, int64_t tile, int64_t col) {
    const float *part = work->tile_sums + tile * work->parts * work->sums.cols + col;
    float sum = *part;
    for (int i = 1; i < work->parts; i++)
        sum += part[i * work->sums.cols];
    return sum;
}

void tn__host_column_sums(const tn__column_sums_work *work) {
    if (tn__host_is_skipped(work->skip)) return;
    for (int64_t col = 0; col < work->sums.cols; col++) {
        float sum[TILE_SUMS] = {0};
        for (int64_t t = 0; t < work->tiles; t++)
            sum[t % TILE_SUMS] += sum_of_tile(work, t, col);
        for (int half = TILE_SUMS / 2; half > 0; half /= 2) {
            for (int i = 0; i < half; i++)
                sum[i] += sum[i + half];
        }
        if (work->accumulate) {
            float before;
            tn__load_floats(work->sums.dtype, work->sums.data, col, 1, &before);
            sum[0] = before + sum[0];
        }
        tn__store_floats(work->sums.dtype, work->sums.data, col, 1, sum);
    }
}
