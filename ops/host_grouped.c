/* Grouped operations on the host: for each group what the operation of one tensor does, so that
 * nothing but where a group's parts lie is defined here. */
#include "host_grouped.h"
#include "tenure_grouped.h"

/* ---- the table of offsets ------------------------------------------------------------------- */

uint32_t tn__host_groups_check(const tn__groups *groups, int64_t rows) {
    const int64_t *offsets = groups->offsets;
    int is_bad = offsets[0] != 0;
    for (int64_t g = 0; g < groups->count; g++)
        is_bad |= offsets[g + 1] < offsets[g];
    if (is_bad) return TN_GROUPED_BAD_OFFSETS;
    return offsets[groups->count] > rows ? TN_GROUPED_OVER_CAPACITY : TN_GROUPED_OK;
}

int tn__host_groups_fail(const tn__groups *groups, uint32_t error) {
    if (*groups->error == 0) *groups->error = error;
    return error != TN_GROUPED_OK;
}

/* ---- quantize ------------------------------------------------------------------------------- */

/* Floats of scales before each group's, in both planes. */
typedef struct scale_place {
    int64_t row, col;
} scale_place;

static void advance(const tn__quantize_work *all, int64_t rows, scale_place *at) {
    at->row += tn__group_scale_floats(all->format, TN_PLANE_ROW, rows, all->src.cols);
    at->col += tn__group_scale_floats(all->format, TN_PLANE_COL, rows, all->src.cols);
}

static uint32_t check_quantize(const tn__grouped_quantize_work *work) {
    const tn__quantize_work *all = &work->all;
    const int64_t *offsets = work->groups.offsets;
    scale_place end = {0, 0};
    uint32_t error = tn__host_groups_check(&work->groups, all->src.rows);
    if (error != TN_GROUPED_OK) return error;
    for (int64_t g = 0; g < work->groups.count; g++)
        advance(all, offsets[g + 1] - offsets[g], &end);
    int fits = (!all->has_row || end.row <= work->row_scale_floats) &&
               (!all->has_col || end.col <= work->col_scale_floats);
    return fits ? TN_GROUPED_OK : TN_GROUPED_OVER_CAPACITY;
}

static tn_plane_view plane_of_group(const tn__quantize_work *all, const tn_plane_view *plane,
                                    int64_t first, int64_t rows, int64_t scale_at, int is_col) {
    int64_t cols = all->src.cols;
    tn_plane_view view = {.dtype = all->dtype, .plane = is_col ? TN_PLANE_COL : TN_PLANE_ROW};
    tn_plane_layout *layout = &view.layout;
    view.data = (uint8_t *)plane->data + first * cols;
    view.scale = (float *)plane->scale + scale_at;
    layout->rows = is_col ? cols : rows;
    layout->cols = is_col ? rows : cols;
    layout->scale_rows = tn__units_of(layout->cols, TN__BLOCK);
    layout->scale_cols = layout->rows;
    if (all->format == TN_FORMAT_FP8_BLOCK_2D) {
        layout->scale_rows = tn__units_of(layout->rows, TN__BLOCK);
        layout->scale_cols = tn__units_of(layout->cols, TN__BLOCK);
    }
    layout->scale_padded_rows = layout->scale_rows;
    layout->scale_stride = 4 * tn__units_of(layout->scale_cols, 4);
    return view;
}

void tn__host_grouped_quantize(const tn__grouped_quantize_work *work) {
    const tn__quantize_work *all = &work->all;
    const int64_t *offsets = work->groups.offsets;
    size_t row_bytes = (size_t)all->src.cols * tn_dtype_bytes(all->src.dtype);
    scale_place at = {0, 0};
    if (tn__host_is_skipped(work->skip)) return;
    if (tn__host_groups_fail(&work->groups, check_quantize(work))) return;
    for (int64_t g = 0; g < work->groups.count; g++) {
        int64_t first = offsets[g], rows = offsets[g + 1] - first;
        tn__quantize_work one = *all;
        one.src.data = (char *)all->src.data + (size_t)first * row_bytes;
        one.src.rows = rows;
        if (all->has_row) one.row = plane_of_group(all, &all->row, first, rows, at.row, 0);
        if (all->has_col) one.col = plane_of_group(all, &all->col, first, rows, at.col, 1);
        if (rows > 0) tn__host_quantize(&one);
        advance(all, rows, &at);
    }
}
