/* Padding of groups and moves of rows on the host: the definition. */
#include <math.h>

#include "host_grouped.h"
#include "host_number.h"
#include "tenure_grouped.h"

/* ---- padding -------------------------------------------------------------------------------- */

/* The padded rows in all; -1 if there is no room for them. */
static int64_t pad_offsets(const tn__pad_groups_work *work, int64_t *padded_offsets) {
    const int64_t *offsets = work->groups.offsets;
    int64_t at = 0;
    for (int64_t g = 0; g < work->groups.count; g++) {
        if (padded_offsets) padded_offsets[g] = at;
        at += work->multiple * tn__units_of(offsets[g + 1] - offsets[g], work->multiple);
    }
    if (padded_offsets) padded_offsets[work->groups.count] = at;
    return at <= work->padded_rows ? at : -1;
}

void tn__host_pad_groups(const tn__pad_groups_work *work) {
    const int64_t *offsets = work->groups.offsets;
    uint32_t error = tn__host_groups_check(&work->groups, work->rows);
    if (error == TN_GROUPED_OK && pad_offsets(work, NULL) < 0) error = TN_GROUPED_OVER_CAPACITY;
    if (tn__host_groups_fail(&work->groups, error)) return;
    pad_offsets(work, work->padded_offsets);
    for (int64_t r = 0; r < work->padded_rows; r++)
        work->map[r] = -1;
    for (int64_t r = 0; work->inverse && r < work->rows; r++)
        work->inverse[r] = -1;
    for (int64_t g = 0; g < work->groups.count; g++) {
        for (int64_t r = offsets[g]; r < offsets[g + 1]; r++) {
            int64_t padded = work->padded_offsets[g] + r - offsets[g];
            work->map[padded] = work->permutation ? work->permutation[r] : r;
            if (work->inverse) work->inverse[r] = padded;
        }
    }
}

/* ---- moves ---------------------------------------------------------------------------------- */

/* The row of the source; -1 for none, and where there is no such row, which is an error. */
static int64_t row_of(int64_t entry, int64_t rows, uint32_t *error) {
    if (entry < rows) return entry < 0 ? -1 : entry;
    if (*error == 0) *error = TN_GROUPED_BAD_MAP;
    return -1;
}

static void gather_scales(const tn__gather_rows_work *work, int64_t scale_row) {
    const float *src = work->src_scale + scale_row * work->src_scale_stride;
    float *dst = work->dst_scale + scale_row * work->dst_scale_stride;
    for (int64_t r = 0; r < work->dst_scale_stride; r++) {
        int64_t from = r < work->dst_rows ? row_of(work->map[r], work->src_rows, work->error) : -1;
        dst[r] = from >= 0 ? src[from] : r < work->dst_rows ? 1.0f : 0.0f;
    }
}

void tn__host_gather_rows(const tn__gather_rows_work *work) {
    const size_t bytes = (size_t)work->row_bytes;
    for (int64_t r = 0; r < work->dst_rows; r++) {
        int64_t from = row_of(work->map[r], work->src_rows, work->error);
        char *to = (char *)work->dst + (size_t)r * bytes;
        if (from >= 0) {
            memcpy(to, (const char *)work->src + (size_t)from * bytes, bytes);
        } else {
            memset(to, work->nothing, bytes);
        }
    }
    for (int64_t k = 0; k < work->scale_rows; k++)
        gather_scales(work, k);
}

enum { RUN = 256 }; /* columns summed at a time */

static void combine_run(const tn__combine_rows_work *work, int64_t t, int64_t col, int64_t count) {
    const tn__matrix *src = &work->src, *dst = &work->dst;
    float sum[RUN] = {0}, value[RUN];
    for (int64_t j = t * work->each; j < (t + 1) * work->each; j++) {
        int64_t from = row_of(work->map[j], src->rows, work->error);
        float weight = work->weights ? work->weights[j] : 1.0f;
        if (from < 0) continue;
        tn__load_floats(src->dtype, src->data, from * src->cols + col, count, value);
        for (int64_t i = 0; i < count; i++)
            sum[i] = fmaf(weight, value[i], sum[i]);
    }
    tn__store_floats(dst->dtype, dst->data, t * dst->cols + col, count, sum);
}

void tn__host_combine_rows(const tn__combine_rows_work *work) {
    for (int64_t t = 0; t < work->dst.rows; t++) {
        for (int64_t col = 0; col < work->dst.cols; col += RUN)
            combine_run(work, t, col, tn__least(RUN, work->dst.cols - col));
    }
}
