/* Rows that move by a map in device memory: tn_pad_groups, tn_gather_rows, tn_combine_rows. */
#include "op_grouped.h"
#include "tenure_grouped.h"

enum { MULTIPLE_MAX = 65536, ENTRY_BYTES = sizeof(int64_t) };

static int64_t elements_of(const tn_tensor_info *info) { return info->rows * info->cols; }

/* `entries` int64 numbers in bytes; entries -1: any whole number of them. */
static tn_status check_map(tn__op_call *call, const char *role, tn_tensor tensor, int64_t entries,
                           int64_t *count) {
    tn_tensor_info info;
    TN_TRY(tn__op_tensor(call, role, tensor, &info));
    TN_TRY(tn__op_require_plain(call, role, &info, TN_BYTE));
    TN_REQUIRE(elements_of(&info) % ENTRY_BYTES == 0,
               "%s: %s (tensor %s) has %lld bytes, expected "
               "a multiple of 8",
               call->name, role, info.name, (long long)elements_of(&info));
    *count = elements_of(&info) / ENTRY_BYTES;
    TN_REQUIRE(entries < 0 || *count == entries,
               "%s: %s (tensor %s) has %lld bytes, expected %lld: 8 for each of its rows",
               call->name, role, info.name, (long long)elements_of(&info),
               (long long)(entries * ENTRY_BYTES));
    return TN_OK;
}

static tn_status lease_map(tn__op_call *call, const char *role, tn_tensor tensor, tn_access access,
                           int64_t **out) {
    tn_plane_view view;
    TN_TRY(tn__op_lease(call, tensor, TN_PLANE_DATA, access, &view));
    *out = view.data;
    return tn__op_require_aligned(call, role, view.data, ENTRY_BYTES);
}

static tn_status lease_input_map(tn__op_call *call, const char *role, tn_tensor tensor,
                                 const int64_t **out) {
    int64_t *map = NULL;
    TN_TRY(lease_map(call, role, tensor, TN_READ, &map));
    *out = map;
    return TN_OK;
}

/* ---- pad groups ------------------------------------------------------------------------------ */

static tn_status check_pad_groups(tn__op_call *call, const tn_pad_groups_args *args,
                                  tn__pad_groups_work *work) {
    int64_t count;
    TN__OP_REQUIRE_ARGS(call->name, args);
    const tn_tensor all[] = {args->offsets, args->permutation, args->padded_offsets,
                             args->map,     args->inverse,     args->error};
    TN_REQUIRE(args->rows >= 0 && args->rows <= INT64_MAX / ENTRY_BYTES,
               "%s: rows is %lld, expected at least 0", call->name, (long long)args->rows);
    TN_REQUIRE(args->multiple >= 1 && args->multiple <= MULTIPLE_MAX,
               "%s: multiple is %lld, expected 1 to %d", call->name, (long long)args->multiple,
               MULTIPLE_MAX);
    work->rows = args->rows;
    work->multiple = args->multiple;
    TN_TRY(tn__op_check_groups(call, args->offsets, args->error, &work->groups));
    TN_TRY(check_map(call, "padded_offsets", args->padded_offsets, work->groups.count + 1, &count));
    TN_TRY(check_map(call, "map", args->map, -1, &work->padded_rows));
    if (!tn__is_no_tensor(args->permutation))
        TN_TRY(check_map(call, "permutation", args->permutation, args->rows, &count));
    if (!tn__is_no_tensor(args->inverse))
        TN_TRY(check_map(call, "inverse", args->inverse, args->rows, &count));
    return tn__op_require_distinct(call, all, sizeof all / sizeof *all);
}

static tn_status lease_pad_groups(tn__op_call *call, const tn_pad_groups_args *args,
                                  tn__pad_groups_work *work) {
    TN_TRY(tn__op_lease_offsets(call, args->offsets, &work->groups));
    if (!tn__is_no_tensor(args->permutation))
        TN_TRY(lease_input_map(call, "permutation", args->permutation, &work->permutation));
    TN_TRY(
        tn__op_scratch_bytes(call, args->scope, call->ops->list_scratch_bytes(0), &work->scratch));
    TN_TRY(
        lease_map(call, "padded_offsets", args->padded_offsets, TN_WRITE, &work->padded_offsets));
    TN_TRY(lease_map(call, "map", args->map, TN_WRITE, &work->map));
    if (!tn__is_no_tensor(args->inverse))
        TN_TRY(lease_map(call, "inverse", args->inverse, TN_WRITE, &work->inverse));
    return tn__op_lease_error(call, args->error, &work->groups);
}

tn_status tn_pad_groups(const tn_pad_groups_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_pad_groups", stream);
    tn__pad_groups_work work = {.scratch = NULL};
    TN_TRY(tn__op_init());
    TN_TRY(check_pad_groups(&call, args, &work));
    tn_status status = lease_pad_groups(&call, args, &work);
    if (status == TN_OK) status = TN__OP_RUN(&call, pad_groups, &work);
    return tn__op_finish(&call, status);
}

/* ---- gather rows ----------------------------------------------------------------------------- */

typedef struct gather_tensors {
    tn_tensor_info src, dst;
    tn_plane plane;
} gather_tensors;

static tn_status check_gather(tn__op_call *call, const tn_gather_rows_args *args,
                              gather_tensors *t) {
    int64_t count;
    TN__OP_REQUIRE_ARGS(call->name, args);
    const tn_tensor all[] = {args->src, args->map, args->dst, args->error};
    TN_TRY(tn__op_tensor(call, "src", args->src, &t->src));
    TN_TRY(tn__op_tensor(call, "dst", args->dst, &t->dst));
    TN_REQUIRE(t->src.format == TN_FORMAT_PLAIN || t->src.format == TN_FORMAT_FP8_BLOCK_1D,
               "%s: src (tensor %s) is %s, expected %s or %s", call->name, t->src.name,
               tn_format_name(t->src.format), tn_format_name(TN_FORMAT_PLAIN),
               tn_format_name(TN_FORMAT_FP8_BLOCK_1D));
    TN_TRY(tn__op_require_format(call, "dst", &t->dst, t->src.format));
    TN_TRY(tn__op_require_dtype(call, "dst", &t->dst, t->src.dtype));
    TN_REQUIRE(t->dst.cols == t->src.cols,
               "%s: dst (tensor %s) has %lld columns, expected src's "
               "%lld",
               call->name, t->dst.name, (long long)t->dst.cols, (long long)t->src.cols);
    TN_REQUIRE(args->nothing >= 0 && args->nothing <= (t->src.format == TN_FORMAT_PLAIN ? 255 : 0),
               "%s: nothing is %d, expected a byte, and 0 for %s", call->name, args->nothing,
               tn_format_name(TN_FORMAT_FP8_BLOCK_1D));
    t->plane = t->src.format == TN_FORMAT_PLAIN ? TN_PLANE_DATA : TN_PLANE_ROW;
    TN_REQUIRE(t->plane == TN_PLANE_DATA || t->dst.scale_mode == t->src.scale_mode,
               "%s: dst (tensor %s) has scale mode %d, expected src's %d", call->name, t->dst.name,
               (int)t->dst.scale_mode, (int)t->src.scale_mode);
    TN_TRY(check_map(call, "map", args->map, t->dst.rows, &count));
    TN_TRY(tn__op_check_error(call, args->error));
    return tn__op_require_distinct(call, all, sizeof all / sizeof *all);
}

static tn_status lease_gather(tn__op_call *call, const tn_gather_rows_args *args,
                              const gather_tensors *t, tn__gather_rows_work *work) {
    tn__groups groups;
    tn_plane_view src, dst;
    TN_TRY(lease_input_map(call, "map", args->map, &work->map));
    TN_TRY(tn__op_lease(call, args->src, t->plane, TN_READ, &src));
    TN_TRY(tn__op_lease(call, args->dst, t->plane, TN_WRITE, &dst));
    TN_TRY(tn__op_lease_error(call, args->error, &groups));
    work->error = groups.error;
    work->nothing = (unsigned char)args->nothing;
    work->src = src.data, work->dst = dst.data;
    work->src_rows = t->src.rows, work->dst_rows = t->dst.rows;
    work->row_bytes = t->src.cols * (int64_t)tn_dtype_bytes(t->src.dtype);
    if (t->plane == TN_PLANE_DATA) return TN_OK;
    work->src_scale = src.scale, work->dst_scale = dst.scale;
    work->scale_rows = dst.layout.scale_rows;
    work->src_scale_stride = src.layout.scale_stride;
    work->dst_scale_stride = dst.layout.scale_stride;
    return TN_OK;
}

tn_status tn_gather_rows(const tn_gather_rows_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_gather_rows", stream);
    gather_tensors t = {.plane = TN_PLANE_DATA};
    tn__gather_rows_work work = {.src = NULL};
    TN_TRY(tn__op_init());
    TN_TRY(check_gather(&call, args, &t));
    tn_status status = lease_gather(&call, args, &t, &work);
    if (status == TN_OK && !tn__is_empty(&t.dst)) {
        status = TN__OP_RUN(&call, gather_rows, &work);
    }
    return tn__op_finish(&call, status);
}

/* ---- combine rows ---------------------------------------------------------------------------- */

typedef struct combine_tensors {
    tn_tensor_info src, dst;
} combine_tensors;

static tn_status check_weights(tn__op_call *call, tn_tensor weights, int64_t entries) {
    tn_tensor_info info;
    if (tn__is_no_tensor(weights)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "weights", weights, &info));
    TN_TRY(tn__op_require_plain(call, "weights", &info, TN_FP32));
    TN_REQUIRE(elements_of(&info) == entries,
               "%s: weights (tensor %s) has %lld elements, expected %lld, one for each of map",
               call->name, info.name, (long long)elements_of(&info), (long long)entries);
    return TN_OK;
}

static tn_status check_combine(tn__op_call *call, const tn_combine_rows_args *args,
                               combine_tensors *t, tn__combine_rows_work *work) {
    int64_t entries = 0;
    TN__OP_REQUIRE_ARGS(call->name, args);
    const tn_tensor all[] = {args->src, args->map, args->weights, args->dst, args->error};
    TN_TRY(tn__op_tensor(call, "src", args->src, &t->src));
    TN_TRY(tn__op_tensor(call, "dst", args->dst, &t->dst));
    TN_TRY(tn__op_require_float(call, "src", &t->src));
    TN_TRY(tn__op_require_float(call, "dst", &t->dst));
    TN_TRY(tn__op_require_shape(call, "dst", &t->dst, t->dst.rows, t->src.cols,
                                "its columns are src's"));
    TN_TRY(check_map(call, "map", args->map, -1, &entries));
    TN_REQUIRE(t->dst.rows > 0 ? entries % t->dst.rows == 0 : entries == 0,
               "%s: map has %lld numbers, expected as many for each of the %lld rows of dst",
               call->name, (long long)entries, (long long)t->dst.rows);
    work->each = t->dst.rows > 0 ? entries / t->dst.rows : 0;
    TN_TRY(check_weights(call, args->weights, entries));
    TN_TRY(tn__op_check_error(call, args->error));
    return tn__op_require_distinct(call, all, sizeof all / sizeof *all);
}

static tn_status lease_combine(tn__op_call *call, const tn_combine_rows_args *args,
                               const combine_tensors *t, tn__combine_rows_work *work) {
    tn__groups groups;
    tn_plane_view weights;
    TN_TRY(lease_input_map(call, "map", args->map, &work->map));
    if (!tn__is_no_tensor(args->weights)) {
        TN_TRY(tn__op_lease(call, args->weights, TN_PLANE_DATA, TN_READ, &weights));
        work->weights = weights.data;
    }
    TN_TRY(tn__op_lease_matrix(call, args->src, &t->src, TN_READ, &work->src));
    TN_TRY(tn__op_lease_matrix(call, args->dst, &t->dst, TN_WRITE, &work->dst));
    TN_TRY(tn__op_lease_error(call, args->error, &groups));
    work->error = groups.error;
    return TN_OK;
}

tn_status tn_combine_rows(const tn_combine_rows_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_combine_rows", stream);
    combine_tensors t = {.src = TN_TENSOR_INFO_INIT};
    tn__combine_rows_work work = {.weights = NULL};
    TN_TRY(tn__op_init());
    TN_TRY(check_combine(&call, args, &t, &work));
    tn_status status = lease_combine(&call, args, &t, &work);
    if (status == TN_OK && !tn__is_empty(&t.dst)) {
        status = TN__OP_RUN(&call, combine_rows, &work);
    }
    return tn__op_finish(&call, status);
}
