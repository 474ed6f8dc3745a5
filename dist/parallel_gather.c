/* Gathers and sums of activations along their rows.
 *
 * A plane has a part that lies rank after rank in what is gathered, which is received where it
 * belongs, and perhaps a strided part, of which each rank has a piece in every *strip*:
 *
 *     plane   rank after rank     in strips
 *     DATA    elements            none
 *     ROW     elements            scales: a strip for each 128 columns
 *     COL     scales              elements: a strip for each column
 *
 * Strips are received some at a time in a slot of bounded size and put in place by strided copies.
 * Gathering each piece of a strip by itself would need no slot, but thousands of messages a plane.
 *
 * Invariant: beside the output no memory is used but the slot, TN_GATHER_SLOT_BYTES or one strip.
 */
#include "comm.h"
#include "driver.h"
#include "error.h"
#include "host_alloc.h"
#include "parallel_call.h"
#include "tensor_internal.h"

typedef struct gather {
    const char *name;
    tn__row_cut cut;
    tn_plane plane;
    tn_stream stream;
    tn_device *device;
    tn_tensor_info src, dst;
    tn_plane_view from, to;
    tn_tensor slot;
    tn_plane_view slot_view;
    tn_segment *segments; /* one for each rank */
    int64_t strips;
    size_t strip_bytes;  /* of all ranks' pieces */
    int64_t slot_strips; /* that the slot holds */
} gather;

/* ---- where things are ------------------------------------------------------------------------ */

/* A rank's piece of each strip. */
typedef struct piece {
    size_t sent;  /* bytes on the wire: ROW's scales with their padding */
    size_t bytes; /* that belong into the strip */
    size_t at;    /* where in it */
} piece;

static piece piece_of(const gather *g, const tn__row_part *part) {
    if (g->plane == TN_PLANE_COL)
        return (piece){(size_t)part->rows, (size_t)part->rows, (size_t)part->first_in_tiles};
    return (piece){(size_t)tn__up_to(part->rows, 4) * sizeof(float),
                   (size_t)part->rows * sizeof(float), (size_t)part->first * sizeof(float)};
}

/* Of the part that lies rank after rank. */
static tn_segment whole_of(const gather *g, int rank, const tn__row_part *part) {
    const tn_plane_layout *layout = &g->to.layout;
    if (g->plane == TN_PLANE_COL) {
        const size_t tile = (size_t)layout->scale_stride * sizeof(float);
        const int64_t tiles = tn__up_to(part->rows, TN__TILE_ROWS) / TN__TILE_ROWS;
        return (tn_segment){rank, (size_t)(part->first_in_tiles / TN__TILE_ROWS) * tile,
                            (size_t)tiles * tile};
    }
    return (tn_segment){rank, (size_t)part->first * layout->row_bytes,
                        (size_t)part->rows * layout->row_bytes};
}

static char *strips_begin(const gather *g, const tn_plane_view *view) {
    return g->plane == TN_PLANE_COL ? view->data : view->scale;
}

static size_t strip_stride(const gather *g, const tn_plane_view *view) {
    if (g->plane == TN_PLANE_COL) return view->layout.row_bytes;
    return (size_t)view->layout.scale_stride * sizeof(float);
}

static void measure_strips(gather *g) {
    tn__row_part part = tn__row_part_first(&g->cut);
    if (g->plane == TN_PLANE_DATA) return;
    g->strips = g->plane == TN_PLANE_COL ? g->to.layout.rows : g->to.layout.scale_rows;
    for (int rank = 0;;) {
        g->strip_bytes += piece_of(g, &part).sent;
        if (++rank == g->cut.ranks) break;
        part = tn__row_part_next(&g->cut, rank, &part);
    }
    if (g->strip_bytes == 0) g->strips = 0;
    if (g->strips == 0) return;
    g->slot_strips = (int64_t)(TN_GATHER_SLOT_BYTES / g->strip_bytes);
    if (g->slot_strips < 1) g->slot_strips = 1;
    if (g->slot_strips > g->strips) g->slot_strips = g->strips;
}

/* ---- the work -------------------------------------------------------------------------------- */

static tn_status put_whole(const gather *g) {
    tn__row_part part = tn__row_part_first(&g->cut);
    const int is_col = g->plane == TN_PLANE_COL;
    for (int rank = 0;;) {
        g->segments[rank] = whole_of(g, rank, &part);
        if (++rank == g->cut.ranks) break;
        part = tn__row_part_next(&g->cut, rank, &part);
    }
    return tn_all_gather_uneven(g->cut.comm, is_col ? g->from.scale : g->from.data,
                                is_col ? g->to.scale : g->to.data, g->segments,
                                (size_t)g->cut.ranks, g->stream);
}

static tn_status put_strips(const gather *g, int64_t first, int64_t count) {
    tn__row_part part = tn__row_part_first(&g->cut);
    const char *src = strips_begin(g, &g->from);
    size_t at = 0;
    for (int rank = 0;;) {
        const size_t bytes = (size_t)count * piece_of(g, &part).sent;
        g->segments[rank] = (tn_segment){rank, at, bytes};
        at += bytes;
        if (++rank == g->cut.ranks) break;
        part = tn__row_part_next(&g->cut, rank, &part);
    }
    if (src) src += (size_t)first * strip_stride(g, &g->from);
    return tn_all_gather_uneven(g->cut.comm, src, g->slot_view.data, g->segments,
                                (size_t)g->cut.ranks, g->stream);
}

/* What has come, to where it belongs. */
static tn_status place_strips(const gather *g, int64_t first, int64_t count) {
    const tn__driver *driver = tn__device_driver(g->device);
    tn__row_part part = tn__row_part_first(&g->cut);
    const char *came = g->slot_view.data;
    const size_t stride = strip_stride(g, &g->to);
    char *strips = strips_begin(g, &g->to) + (size_t)first * stride;
    for (int rank = 0;;) {
        const piece mine = piece_of(g, &part);
        const tn__row_copy rows = {.dst = strips + mine.at,
                                   .dst_stride = stride,
                                   .src = came,
                                   .src_stride = mine.sent,
                                   .row_bytes = mine.bytes,
                                   .rows = (size_t)count};
        if (mine.bytes != 0)
            TN_TRY(driver->copy_rows(tn__device_state(g->device), &rows, g->stream));
        came += (size_t)count * mine.sent;
        if (++rank == g->cut.ranks) return TN_OK;
        part = tn__row_part_next(&g->cut, rank, &part);
    }
}

/* Zeros between ranks' tiles, and the padding of scales. */
static tn_status fill_gaps(const gather *g) {
    const tn_plane_layout *layout = &g->to.layout;
    if (g->plane == TN_PLANE_COL && !tn__row_cut_is_aligned(&g->cut))
        return tn_fill(g->device, g->to.data, 0, layout->data_bytes, g->stream);
    if (g->plane == TN_PLANE_ROW && layout->scale_cols != layout->scale_stride)
        return tn_fill(g->device, g->to.scale, 0, layout->scale_bytes, g->stream);
    return TN_OK;
}

/* One collective of the part that lies rank after rank and the first strips. */
static tn_status put_first(const gather *g) {
    TN_TRY(tn_comm_group_begin(g->cut.comm));
    tn_status status = put_whole(g);
    if (status == TN_OK && g->strips > 0) status = put_strips(g, 0, g->slot_strips);
    if (status == TN_OK) status = tn_comm_group_end(g->cut.comm, g->stream);
    if (status != TN_OK) tn_comm_group_cancel(g->cut.comm);
    return status;
}

static tn_status put_work(const gather *g) {
    if (g->cut.total == 0 || g->dst.cols == 0) return TN_OK;
    TN_TRY(fill_gaps(g));
    TN_TRY(put_first(g));
    for (int64_t first = 0; first < g->strips; first += g->slot_strips) {
        const int64_t left = g->strips - first;
        const int64_t count = left < g->slot_strips ? left : g->slot_strips;
        if (first > 0) TN_TRY(put_strips(g, first, count));
        TN_TRY(place_strips(g, first, count));
    }
    return TN_OK;
}

/* ---- leases ---------------------------------------------------------------------------------- */

static tn_status with_slot(gather *g, tn_scope scope) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_lease lease;
    if (g->strips == 0) return put_work(g);
    config.dtype = TN_BYTE;
    config.rank = 1;
    config.shape[0] = g->slot_strips * (int64_t)g->strip_bytes;
    config.name = "slot of a gather";
    TN_TRY(tn_tensor_create(scope, &config, &g->slot));
    tn_status status =
        tn_lease_begin(g->slot, TN_PLANE_DATA, TN_WRITE, g->stream, &lease, &g->slot_view);
    if (status == TN_OK) status = tn__lease_close(lease, put_work(g));
    return tn__tensor_close(g->slot, g->stream, status);
}

static tn_status with_leases(gather *g, const tn_sequence_gather_args *args) {
    tn_lease reading, writing;
    TN_TRY(tn_lease_begin(args->src, g->plane, TN_READ, g->stream, &reading, &g->from));
    tn_status status = tn_lease_begin(args->dst, g->plane, TN_WRITE, g->stream, &writing, &g->to);
    if (status == TN_OK) {
        measure_strips(g);
        status = tn__lease_close(writing, with_slot(g, args->scope));
    }
    return tn__lease_close(reading, status);
}

/* ---- checks ---------------------------------------------------------------------------------- */

static tn_status check_plane(const gather *g) {
    const int is_plain = g->src.format == TN_FORMAT_PLAIN;
    if (!is_plain && g->src.format != TN_FORMAT_FP8_BLOCK_1D)
        return TN_FAIL(TN_UNSUPPORTED, "%s: src (tensor %s) is %s, expected %s or %s", g->name,
                       g->src.name, tn_format_name(g->src.format), tn_format_name(TN_FORMAT_PLAIN),
                       tn_format_name(TN_FORMAT_FP8_BLOCK_1D));
    TN_REQUIRE((g->plane == TN_PLANE_DATA) == is_plain && (unsigned)g->plane < TN_PLANE_COUNT,
               "%s: plane %s of src (tensor %s), which is %s", g->name, tn_plane_name(g->plane),
               g->src.name, tn_format_name(g->src.format));
    return TN_OK;
}

static tn_status check_dst(const gather *g) {
    const int64_t rows = tn__row_cut_rows(&g->cut, g->plane);
    TN_REQUIRE(g->dst.format == g->src.format && g->dst.dtype == g->src.dtype &&
                   g->dst.scale_mode == g->src.scale_mode,
               "%s: dst (tensor %s) is %s of %s, and src (tensor %s) %s of %s: format, type and "
               "scale mode must be the same",
               g->name, g->dst.name, tn_format_name(g->dst.format), tn_dtype_name(g->dst.dtype),
               g->src.name, tn_format_name(g->src.format), tn_dtype_name(g->src.dtype));
    TN_REQUIRE(g->dst.rows == rows && g->dst.cols == g->src.cols,
               "%s: dst (tensor %s) is %lld x %lld, expected %lld x %lld: all ranks' rows%s",
               g->name, g->dst.name, (long long)g->dst.rows, (long long)g->dst.cols,
               (long long)rows, (long long)g->src.cols,
               g->plane == TN_PLANE_COL ? ", each rank's from a multiple of 128 on" : "");
    return TN_OK;
}

tn_status tn_sequence_gather(const tn_sequence_gather_args *args, tn_stream stream) {
    gather g = {.name = "tn_sequence_gather",
                .stream = stream,
                .src = TN_TENSOR_INFO_INIT,
                .dst = TN_TENSOR_INFO_INIT};
    TN_REQUIRE(args && args->size == sizeof *args,
               "%s: args is NULL, or not from the initializer macro", g.name);
    g.plane = args->plane;
    TN_TRY(tn_tensor_info_get(args->src, &g.src));
    TN_TRY(tn_tensor_info_get(args->dst, &g.dst));
    TN_TRY(tn__tensor_device(args->dst, &g.device));
    TN_TRY(tn__row_cut_make(g.name, &args->sequence, g.src.rows, &g.cut));
    TN_TRY(check_plane(&g));
    TN_TRY(check_dst(&g));
    g.segments = tn__host_alloc((size_t)g.cut.ranks, sizeof *g.segments);
    if (!g.segments) return TN_OUT_OF_HOST_MEMORY;
    const uint64_t puts = tn__comm_puts(g.cut.comm);
    tn_status status = with_leases(&g, args);
    tn__host_free(g.segments);
    return tn__comm_end_call(g.cut.comm, g.name, puts, status);
}

tn_status tn_sequence_rows(const tn_sequence *sequence, int64_t own, tn_plane plane, int64_t *out) {
    static const char call[] = "tn_sequence_rows";
    tn__row_cut cut;
    TN_REQUIRE(sequence && out, "%s: sequence or out is NULL", call);
    TN_REQUIRE(own >= 0, "%s: %lld rows", call, (long long)own);
    TN_TRY(tn__row_cut_make(call, sequence, own, &cut));
    *out = tn__row_cut_rows(&cut, plane);
    return TN_OK;
}
