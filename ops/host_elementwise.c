/* The small operations of a trainer on the host: axpy, convert, embed, cross entropy. */
#include <math.h>

#include "host_kernels.h"
#include "host_number.h"

enum { RUN = 256 }; /* elements widened at a time */

static int64_t elements(const tn__matrix *matrix) { return matrix->rows * matrix->cols; }

void tn__host_axpy(const tn__axpy_work *work) {
    const tn__matrix *x = &work->x, *y = &work->y;
    float from[RUN], to[RUN];
    for (int64_t at = 0; at < elements(y); at += RUN) {
        int64_t count = tn__least(RUN, elements(y) - at);
        tn__load_floats(x->dtype, x->data, at, count, from);
        tn__load_floats(y->dtype, y->data, at, count, to);
        for (int64_t i = 0; i < count; i++)
            to[i] = fmaf(work->alpha, from[i], to[i]);
        tn__store_floats(y->dtype, y->data, at, count, to);
    }
}

void tn__host_convert(const tn__matrix *x, const tn__matrix *y) {
    float run[RUN];
    for (int64_t at = 0; at < elements(y); at += RUN) {
        int64_t count = tn__least(RUN, elements(y) - at);
        tn__load_floats(x->dtype, x->data, at, count, run);
        tn__store_floats(y->dtype, y->data, at, count, run);
    }
}

void tn__host_embed(const tn__embed_work *work) {
    size_t row_bytes = (size_t)work->y.cols * tn_dtype_bytes(work->y.dtype);
    const char *table = work->table.data;
    char *y = work->y.data;
    for (int64_t t = 0; t < work->y.rows; t++) {
        memcpy(y + (size_t)t * row_bytes, table + work->tokens[t] * row_bytes, row_bytes);
    }
}

/* ---- cross entropy -------------------------------------------------------------------------- */

static float value_at(const tn__matrix *matrix, int64_t at) {
    float value;
    tn__load_floats(matrix->dtype, matrix->data, at, 1, &value);
    return value;
}

static float largest_of(const tn__matrix *logits, int64_t first) {
    float largest = -INFINITY;
    for (int64_t v = 0; v < logits->cols; v++) {
        float value = value_at(logits, first + v);
        largest = value > largest ? value : largest;
    }
    return largest;
}

/* One token. The sum runs in rising v in double, so its order and its bits are fixed. */
static void cross_entropy_row(const tn__cross_entropy_work *work, int64_t t) {
    const tn__matrix *logits = &work->logits, *dlogits = &work->dlogits;
    int64_t first = t * logits->cols;
    double largest = largest_of(logits, first);
    double sum = 0.0;
    for (int64_t v = 0; v < logits->cols; v++)
        sum += exp(value_at(logits, first + v) - largest);
    double of_target = value_at(logits, first + work->targets[t]) - largest;
    work->loss[t] = tn__canonical((float)(log(sum) - of_target));
    for (int64_t v = 0; v < logits->cols; v++) {
        double softmax = exp(value_at(logits, first + v) - largest) / sum;
        double one_hot = v == work->targets[t] ? 1.0 : 0.0;
        float gradient = (float)((softmax - one_hot) / (double)logits->rows);
        tn__store_floats(dlogits->dtype, dlogits->data, first + v, 1, &gradient);
    }
}

void tn__host_cross_entropy(const tn__cross_entropy_work *work) {
    for (int64_t t = 0; t < work->logits.rows; t++)
        cross_entropy_row(work, t);
}
