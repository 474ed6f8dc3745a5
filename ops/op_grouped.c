/* Grouped quantization: tn_grouped_quantize, and what every grouped op checks. */
#include "op_grouped.h"
#include "tenure_grouped.h"

#include <math.h>

/* ---- groups -------------------------------------------------------------------------------- */

tn_status tn__op_require_plain(const tn__op_call *call, const char *role,
                               const tn_tensor_info *info, tn_dtype dtype) {
    TN_TRY(tn__op_require_format(call, role, info, TN_FORMAT_PLAIN));
    return tn__op_require_dtype(call, role, info, dtype);
}

tn_status tn__op_require_distinct(const tn__op_call *call, const tn_tensor *tensors, int count) {
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < i; j++) {
            TN_REQUIRE(tn__is_no_tensor(tensors[i]) || tensors[i].value != tensors[j].value,
                       "%s: one tensor is given for two of src, offsets, error, skip and outputs",
                       call->name);
        }
    }
    return TN_OK;
}

static int64_t elements_of(const tn_tensor_info *info) { return info->rows * info->cols; }

static tn_status check_offsets(tn__op_call *call, tn_tensor offsets, int64_t *groups) {
    const int64_t each = (int64_t)sizeof(int64_t);
    tn_tensor_info info;
    TN_TRY(tn__op_tensor(call, "offsets", offsets, &info));
    TN_TRY(tn__op_require_plain(call, "offsets", &info, TN_BYTE));
    TN_REQUIRE(elements_of(&info) >= each && elements_of(&info) % each == 0,
               "%s: offsets (tensor %s) has %lld bytes, expected 8 for each group and 8 more",
               call->name, info.name, (long long)elements_of(&info));
    *groups = elements_of(&info) / each - 1;
    return TN_OK;
}

tn_status tn__op_check_error(tn__op_call *call, tn_tensor error) {
    tn_plane_state state;
    tn_tensor_info info;
    TN_TRY(tn__op_tensor(call, "error", error, &info));
    TN_TRY(tn__op_require_plain(call, "error", &info, TN_BYTE));
    TN_REQUIRE(elements_of(&info) == (int64_t)sizeof(uint32_t),
               "%s: error (tensor %s) has %lld bytes, expected 4", call->name, info.name,
               (long long)elements_of(&info));
    TN_TRY(tn_plane_state_get(error, TN_PLANE_DATA, &state));
    if (state != TN_PLANE_VALID && state != TN_PLANE_OFFLOADED)
        return TN_FAIL(TN_INVALID_STATE, "%s: error (tensor %s) is not valid: write 0 there first",
                       call->name, info.name);
    return TN_OK;
}

tn_status tn__op_require_aligned(const tn__op_call *call, const char *role, const void *address,
                                 size_t alignment) {
    TN_REQUIRE((uintptr_t)address % alignment == 0,
               "%s: %s is a view that does not begin at a multiple of %zu bytes", call->name, role,
               alignment);
    return TN_OK;
}

tn_status tn__op_check_groups(tn__op_call *call, tn_tensor offsets, tn_tensor error,
                              tn__groups *groups) {
    TN_TRY(check_offsets(call, offsets, &groups->count));
    return tn__op_check_error(call, error);
}

tn_status tn__op_lease_offsets(tn__op_call *call, tn_tensor offsets, tn__groups *groups) {
    tn_plane_view view;
    TN_TRY(tn__op_lease(call, offsets, TN_PLANE_DATA, TN_READ, &view));
    groups->offsets = view.data;
    return tn__op_require_aligned(call, "offsets", groups->offsets, sizeof *groups->offsets);
}

tn_status tn__op_lease_error(tn__op_call *call, tn_tensor error, tn__groups *groups) {
    tn_plane_view view;
    TN_TRY(tn__op_lease(call, error, TN_PLANE_DATA, TN_UPDATE, &view));
    groups->error = view.data;
    return tn__op_require_aligned(call, "error", groups->error, sizeof *groups->error);
}

/* A group that is not empty has one unit, and another one for each further `unit` rows of it. */
int64_t tn__groups_units_max(int64_t groups, int64_t rows, int64_t unit) {
    int64_t with_rows = groups < rows ? groups : rows;
    return with_rows + (rows - with_rows) / unit;
}

/* ---- scales -------------------------------------------------------------------------------- */

static int is_block_format(tn_format format) {
    return format == TN_FORMAT_FP8_BLOCK_1D || format == TN_FORMAT_FP8_BLOCK_2D;
}

/* A sum of what is padded to a multiple is most where every group begins a new multiple. */
static int64_t scale_floats_max(tn_format format, tn_plane plane, int64_t groups, int64_t rows,
                                int64_t cols) {
    int is_1d = format == TN_FORMAT_FP8_BLOCK_1D;
    int64_t across = tn__units_of(cols, 128);
    if (plane == TN_PLANE_ROW && is_1d) return across * 4 * tn__groups_units_max(groups, rows, 4);
    if (plane == TN_PLANE_COL && !is_1d)
        return across * 4 * tn__groups_units_max(groups, rows, 512);
    return tn__groups_units_max(groups, rows, 128) * tn__group_scale_floats(format, plane, 1, cols);
}

tn_status tn_grouped_scale_floats(tn_format format, tn_plane plane, int64_t groups, int64_t rows,
                                  int64_t cols, int64_t *out) {
    const int64_t most = (int64_t)1 << 40;
    TN_REQUIRE(is_block_format(format) && (plane == TN_PLANE_ROW || plane == TN_PLANE_COL),
               "tn_grouped_scale_floats: format %d, plane %d, expected a block format's ROW or COL",
               (int)format, (int)plane);
    TN_REQUIRE(groups >= 0 && rows >= 0 && cols >= 0 && groups < most && rows < most,
               "tn_grouped_scale_floats: %lld groups of %lld rows by %lld columns",
               (long long)groups, (long long)rows, (long long)cols);
    TN_REQUIRE(rows == 0 || cols <= (INT64_MAX >> 4) / rows,
               "tn_grouped_scale_floats: %lld rows by %lld columns are too many", (long long)rows,
               (long long)cols);
    TN_REQUIRE(out != NULL, "tn_grouped_scale_floats: out is NULL");
    *out = rows == 0 || cols == 0 ? 0 : scale_floats_max(format, plane, groups, rows, cols);
    return TN_OK;
}

/* ---- quantize ------------------------------------------------------------------------------ */

static int is_wanted(const tn_grouped_plane *plane) {
    return !tn__is_no_tensor(plane->data) || !tn__is_no_tensor(plane->scale);
}

static tn_status check_plane(tn__op_call *call, const char *role, const tn_grouped_plane *plane,
                             const tn_tensor_info *src, int64_t *scale_floats) {
    tn_tensor_info data, scale;
    TN_TRY(tn__op_tensor(call, role, plane->data, &data));
    TN_TRY(tn__op_require_plain(call, role, &data, TN_BYTE));
    TN_REQUIRE(elements_of(&data) >= elements_of(src),
               "%s: data of %s (tensor %s) has %lld bytes, expected at least %lld: one for each "
               "element of src",
               call->name, role, data.name, (long long)elements_of(&data),
               (long long)elements_of(src));
    TN_TRY(tn__op_tensor(call, role, plane->scale, &scale));
    TN_TRY(tn__op_require_plain(call, role, &scale, TN_FP32));
    *scale_floats = elements_of(&scale);
    return TN_OK;
}

static tn_status check_numbers(const tn__op_call *call, const tn_grouped_quantize_args *args) {
    TN_REQUIRE(is_block_format(args->format), "%s: format is %d, expected %s or %s", call->name,
               (int)args->format, tn_format_name(TN_FORMAT_FP8_BLOCK_1D),
               tn_format_name(TN_FORMAT_FP8_BLOCK_2D));
    TN_REQUIRE(args->dtype == TN_E4M3 || args->dtype == TN_E5M2,
               "%s: dtype is %d, expected %s or %s", call->name, (int)args->dtype,
               tn_dtype_name(TN_E4M3), tn_dtype_name(TN_E5M2));
    TN_REQUIRE(args->scale_mode == TN_SCALE_POW2 || args->scale_mode == TN_SCALE_FP32,
               "%s: scale_mode is %d, expected TN_SCALE_POW2 or TN_SCALE_FP32", call->name,
               (int)args->scale_mode);
    TN_REQUIRE(isfinite(args->amax_epsilon) && args->amax_epsilon >= 0.0f,
               "%s: amax_epsilon is %g, expected a finite number of at least 0", call->name,
               (double)args->amax_epsilon);
    TN_REQUIRE(is_wanted(&args->row) || is_wanted(&args->col),
               "%s: row and col are both {0}: there is nothing to make", call->name);
    return TN_OK;
}

static tn_status check_quantize(tn__op_call *call, const tn_grouped_quantize_args *args,
                                tn_tensor_info *src, tn__grouped_quantize_work *work) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    const tn_tensor all[] = {args->src,      args->offsets,   args->error,    args->skip,
                             args->row.data, args->row.scale, args->col.data, args->col.scale};
    TN_TRY(check_numbers(call, args));
    TN_TRY(tn__op_tensor(call, "src", args->src, src));
    TN_TRY(tn__op_require_float(call, "src", src));
    work->all = (tn__quantize_work){.format = args->format,
                                    .scale_mode = args->scale_mode,
                                    .dtype = args->dtype,
                                    .amax_epsilon = args->amax_epsilon,
                                    .has_row = is_wanted(&args->row),
                                    .has_col = is_wanted(&args->col)};
    if (work->all.has_row)
        TN_TRY(check_plane(call, "row", &args->row, src, &work->row_scale_floats));
    if (work->all.has_col)
        TN_TRY(check_plane(call, "col", &args->col, src, &work->col_scale_floats));
    TN_TRY(tn__op_check_groups(call, args->offsets, args->error, &work->groups));
    return tn__op_require_distinct(call, all, sizeof all / sizeof *all);
}

static tn_status lease_plane(tn__op_call *call, const char *role, const tn_grouped_plane *plane,
                             tn_access access, tn_plane_view *out) {
    tn_plane_view scale;
    TN_TRY(tn__op_lease(call, plane->data, TN_PLANE_DATA, access, out));
    TN_TRY(tn__op_lease(call, plane->scale, TN_PLANE_DATA, access, &scale));
    out->scale = scale.data;
    return tn__op_require_aligned(call, role, out->scale, sizeof(float));
}

static tn_status lease_quantize(tn__op_call *call, const tn_grouped_quantize_args *args,
                                const tn_tensor_info *src, tn__grouped_quantize_work *work) {
    tn_access access = tn__is_no_tensor(args->skip) ? TN_WRITE : TN_UPDATE;
    TN_TRY(tn__op_lease_offsets(call, args->offsets, &work->groups));
    TN_TRY(tn__op_lease_skip(call, args->skip, &work->skip));
    TN_TRY(tn__op_lease_matrix(call, args->src, src, TN_READ, &work->all.src));
    if (!tn__is_empty(src)) {
        size_t bytes = call->ops->list_scratch_bytes(work->groups.count);
        TN_TRY(tn__op_scratch_bytes(call, args->scope, bytes, &work->scratch));
    }
    if (work->all.has_row)
        TN_TRY(lease_plane(call, "scale of row", &args->row, access, &work->all.row));
    if (work->all.has_col)
        TN_TRY(lease_plane(call, "scale of col", &args->col, access, &work->all.col));
    return tn__op_lease_error(call, args->error, &work->groups);
}

tn_status tn_grouped_quantize(const tn_grouped_quantize_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_grouped_quantize", stream);
    tn_tensor_info src = TN_TENSOR_INFO_INIT;
    tn__grouped_quantize_work work = {.scratch = NULL};
    TN_TRY(tn__op_init());
    TN_TRY(check_quantize(&call, args, &src, &work));
    tn_status status = lease_quantize(&call, args, &src, &work);
    if (status == TN_OK && !tn__is_empty(&src)) {
        status = TN__OP_RUN(&call, grouped_quantize, &work);
    }
    return tn__op_finish(&call, status);
}
