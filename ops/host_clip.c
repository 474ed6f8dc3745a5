/* Clipping by the norm of all gradients, on the host: tenure_train.h has the order of sums. */
#include "host_kernels.h"
#include "host_number.h"

/* Adds up the 1024 sums of a block. */
static float total_of(float sums[TN__SQUARE_WIDTH]) {
    for (int half = TN__SQUARE_WIDTH / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++)
            sums[i] += sums[i + half];
    }
    return sums[0];
}

static float squares_of_block(const tn__matrix *x, int64_t block) {
    enum { WIDTH = TN__SQUARE_WIDTH };
    const int64_t count = x->rows * x->cols;
    float sums[WIDTH] = {0}, values[WIDTH];
    for (int64_t at = block * WIDTH; at < count; at += (int64_t)TN__SQUARE_BLOCKS * WIDTH) {
        const int many = (int)tn__least(WIDTH, count - at);
        tn__load_floats(x->dtype, x->data, at, many, values);
        for (int i = 0; i < many; i++)
            sums[i] = fmaf(values[i], values[i], sums[i]);
    }
    return total_of(sums);
}

void tn__host_square_sums(const tn__square_sums_work *work) {
    const int64_t count = work->x.rows * work->x.cols;
    for (int64_t block = 0; block < TN__SQUARE_BLOCKS; block++) {
        if (work->accumulate && block * TN__SQUARE_WIDTH >= count) return;
        const float total = squares_of_block(&work->x, block);
        const float sum = work->accumulate ? work->sums[block] + total : total;
        work->sums[block] = tn__canonical(sum);
    }
}

void tn__host_clip_factor(const tn__clip_factor_work *work) {
    const tn__clip clip = tn__clip_of(work->sums, work->scale, work->max_norm);
    if (work->norm) *work->norm = tn__canonical(clip.norm);
    *work->factor = tn__canonical(clip.factor);
}
