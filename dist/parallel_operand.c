/* What products of parallel layers read of activations: see parallel_product.h. */
#include "driver.h"
#include "parallel_product.h"
#include "tenure_lifetime.h"
#include "tensor_internal.h"

static unsigned plane_flags(const tn__parallel_wants *wants) {
    return (wants->row ? (unsigned)TN_QUANTIZE_ROW : 0u) |
           (wants->col ? (unsigned)TN_QUANTIZE_COL : 0u);
}

tn_status tn__parallel_quantized(tn__parallel *p, const tn__parallel_weight *w,
                                 const tn__parallel_wants *wants, int64_t rows, int64_t cols,
                                 tn_tensor *out) {
    const tn__parallel_shape shape = {.format = TN_FORMAT_FP8_BLOCK_1D,
                                      .dtype = wants->dtype,
                                      .rows = rows,
                                      .cols = cols,
                                      .scale_mode = w->info.scale_mode};
    return tn__parallel_make(p, wants->name, &shape, wants->is_kept, out);
}

static tn_status sum_rows(const tn__parallel *p, tn_tensor src, tn_tensor quantized,
                          unsigned planes, tn_tensor sums) {
    tn_bias_gradient_args args = TN_BIAS_GRADIENT_ARGS_INIT;
    args.dy = src, args.dbias = sums;
    args.quantized.tensor = quantized, args.quantized.planes = planes;
    args.scope = p->common.scope;
    return tn_bias_gradient(&args, p->stream);
}

tn_status tn__parallel_cast(tn__parallel *p, const tn__parallel_weight *w, tn_tensor src,
                            const tn__parallel_wants *wants, tn_tensor sums, tn_tensor *out) {
    const unsigned planes = plane_flags(wants);
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    *out = src;
    if (!w->is_quantized || !planes)
        return tn__is_given(sums) ? sum_rows(p, src, (tn_tensor){0}, 0, sums) : TN_OK;
    TN_TRY(tn_tensor_info_get(src, &info));
    TN_TRY(tn__parallel_quantized(p, w, wants, info.rows, info.cols, out));
    if (tn__is_given(sums)) return sum_rows(p, src, *out, planes, sums);
    args.src = src, args.dst = *out, args.planes = planes;
    return tn_quantize(&args, p->stream);
}

/* ---- all ranks' rows, not in whole tiles ----------------------------------------------------- */

typedef struct parts {
    tn__parallel *p;
    tn_device *device;
    tn_tensor src;
    tn_plane_view whole;
    tn__parallel_wants wants; /* of a part: scratch, COL */
} parts;

/* A part's columns among those of all. */
static tn_status place(const parts *all, tn_tensor part, int64_t first) {
    const tn__driver *driver = tn__device_driver(all->device);
    const tn_plane_layout *to = &all->whole.layout;
    char *scales = all->whole.scale;
    tn_plane_view view;
    tn_lease lease;
    TN_TRY(tn_lease_begin(part, TN_PLANE_COL, TN_READ, all->p->stream, &lease, &view));
    const tn__row_copy rows = {.dst = (char *)all->whole.data + first,
                               .dst_stride = to->row_bytes,
                               .src = view.data,
                               .src_stride = view.layout.row_bytes,
                               .row_bytes = view.layout.row_bytes,
                               .rows = (size_t)view.layout.rows};
    scales += (size_t)(first / TN__TILE_ROWS) * (size_t)to->scale_stride * sizeof(float);
    tn_status status = driver->copy_rows(tn__device_state(all->device), &rows, all->p->stream);
    if (status == TN_OK)
        status = tn_copy(all->device, scales, view.scale, view.layout.scale_bytes, all->p->stream);
    return tn__lease_close(lease, status);
}

static tn_status cast_part(const parts *all, const tn__parallel_weight *w,
                           const tn__row_part *part) {
    tn_tensor view, cast;
    if (part->rows == 0) return TN_OK;
    TN_TRY(tn_tensor_view_rows(all->src, part->first, part->rows, all->p->common.scope, &view));
    tn_status status = tn__parallel_cast(all->p, w, view, &all->wants, (tn_tensor){0}, &cast);
    if (status == TN_OK) status = place(all, cast, part->first_in_tiles);
    status = tn__tensor_close(view, all->p->stream, status);
    return status == TN_OK ? tn__parallel_let_go(all->p, cast, all->p->stream) : status;
}

static tn_status cast_parts(const parts *all, const tn__parallel_weight *w, int64_t cols) {
    const tn__row_cut *cut = &all->p->cut;
    tn__row_part part = tn__row_part_first(cut);
    if (cut->total == 0 || cols == 0) return TN_OK;
    TN_TRY(tn_fill(all->device, all->whole.data, 0, all->whole.layout.data_bytes, all->p->stream));
    for (int rank = 0;;) {
        TN_TRY(cast_part(all, w, &part));
        if (++rank == cut->ranks) return TN_OK;
        part = tn__row_part_next(cut, rank, &part);
    }
}

tn_status tn__parallel_cast_parts(tn__parallel *p, const tn__parallel_weight *w, tn_tensor src,
                                  const tn__parallel_wants *wants, tn_tensor *out) {
    parts all = {.p = p, .src = src, .wants = *wants};
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_lease lease;
    all.wants.row = all.wants.is_kept = 0;
    TN_TRY(tn_tensor_info_get(src, &info));
    TN_TRY(tn__tensor_device(src, &all.device));
    TN_TRY(tn__parallel_quantized(p, w, wants, p->cut.total_in_tiles, info.cols, out));
    TN_TRY(tn_lease_begin(*out, TN_PLANE_COL, TN_WRITE, p->stream, &lease, &all.whole));
    return tn__lease_close(lease, cast_parts(&all, w, info.cols));
}

tn_status tn__parallel_cast_whole(tn__parallel *p, const tn__parallel_weight *w, tn_tensor src,
                                  const tn__parallel_wants *wants, tn_tensor sums,
                                  tn__parallel_operand *out) {
    tn__parallel_wants row = *wants;
    if (!w->is_quantized || !wants->col || tn__row_cut_is_aligned(&p->cut)) {
        TN_TRY(tn__parallel_cast(p, w, src, wants, sums, &out->row));
        out->col = out->row;
        return TN_OK;
    }
    row.col = row.is_kept = 0;
    TN_TRY(tn__parallel_cast(p, w, src, &row, sums, &out->row));
    return tn__parallel_cast_parts(p, w, src, wants, &out->col);
}

tn_status tn__parallel_done_with_row(tn__parallel *p, const tn__parallel_operand *operand) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_plane_state col;
    TN_TRY(tn_tensor_info_get(operand->row, &info));
    if (info.format == TN_FORMAT_PLAIN) return TN_OK;
    if (operand->row.value != operand->col.value)
        return tn__parallel_let_go(p, operand->row, p->stream);
    TN_TRY(tn_plane_state_get(operand->row, TN_PLANE_COL, &col));
    if (col == TN_PLANE_VALID) return tn_plane_drop(operand->row, TN_PLANE_ROW, p->stream);
    return tn__parallel_let_go(p, operand->row, p->stream);
}
