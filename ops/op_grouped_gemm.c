/* tn_grouped_gemm: one product for each group, one behind the other on the stream. Where the groups
 * lie in their planes: op_grouped_gemm.h. */
#include "op_grouped_gemm.h"

#include "host_alloc.h"
#include "op_produce.h"

enum { ALIGNMENT = 16, GROUPS_MAX = 4096 };

/* More rows than any device has bytes for: all that is counted with stays within an int64. */
static const int64_t extent_max = (int64_t)1 << 40;

/* ---- groups ---------------------------------------------------------------------------------- */

tn_status tn__group_list_check(const tn__op_call *call, int64_t count, const int64_t *offsets,
                               tn__group_list *out) {
    TN_REQUIRE(count >= 0 && count <= GROUPS_MAX, "%s: groups is %lld, expected 0 to %d",
               call->name, (long long)count, GROUPS_MAX);
    if (!offsets)
        return TN_FAIL(TN_UNSUPPORTED,
                       "%s: offsets is NULL: no engine here reads where groups begin from device "
                       "memory, so they must be known on the host",
                       call->name);
    TN_REQUIRE(offsets[0] == 0, "%s: offsets[0] is %lld, expected 0", call->name,
               (long long)offsets[0]);
    for (int64_t e = 0; e < count; e++) {
        TN_REQUIRE(offsets[e + 1] >= offsets[e],
                   "%s: offsets[%lld] is %lld, less than the one before, %lld", call->name,
                   (long long)(e + 1), (long long)offsets[e + 1], (long long)offsets[e]);
    }
    TN_REQUIRE(offsets[count] <= extent_max, "%s: offsets[%lld] is %lld, expected at most %lld",
               call->name, (long long)count, (long long)offsets[count], (long long)extent_max);
    *out = (tn__group_list){count, offsets, offsets[count]};
    return TN_OK;
}

int64_t tn__grouped_floats(const tn__group_list *groups, tn_format format, tn_plane plane,
                           int64_t cols) {
    int64_t floats = 0;
    for (int64_t e = 0; e < groups->count; e++)
        floats += tn__group_scale_floats(format, plane, tn__group_rows(groups, e), cols);
    return floats;
}

/* ---- operands -------------------------------------------------------------------------------- */

static tn_plane plane_of(const tn__grouped_operand *of) {
    return of->is_along_rows ? TN_PLANE_COL : TN_PLANE_ROW;
}

/* Enough data first: then rows x cols is what a tensor has, and its scales can be counted. */
tn_status tn__grouped_plane_check(tn__op_call *call, const char *role,
                                  const tn_grouped_plane *plane, const tn__group_list *groups,
                                  const tn__grouped_operand *of) {
    tn_tensor_info data, scale;
    TN_TRY(tn__op_tensor(call, role, plane->data, &data));
    TN_TRY(tn__op_require_plain(call, role, &data, TN_BYTE));
    TN_TRY(tn__op_tensor(call, role, plane->scale, &scale));
    TN_TRY(tn__op_require_plain(call, role, &scale, TN_FP32));
    TN_REQUIRE(of->cols == 0 || data.rows * data.cols / of->cols >= groups->rows,
               "%s: %s's data (tensor %s) has %lld bytes, fewer than %lld rows of %lld", call->name,
               role, data.name, (long long)(data.rows * data.cols), (long long)groups->rows,
               (long long)of->cols);
    const int64_t floats = tn__grouped_floats(groups, of->format, plane_of(of), of->cols);
    TN_REQUIRE(scale.rows * scale.cols >= floats,
               "%s: %s's scale (tensor %s) has %lld elements, expected at least %lld", call->name,
               role, scale.name, (long long)(scale.rows * scale.cols), (long long)floats);
    TN_REQUIRE(of->dtype == TN_E4M3 || of->dtype == TN_E5M2, "%s: %s is %s, expected e4m3 or e5m2",
               call->name, role, tn_dtype_name(of->dtype));
    return TN_OK;
}

tn_status tn__grouped_plane_lease(tn__op_call *call, const tn_grouped_plane *plane,
                                  tn_access access, tn__grouped_operand *of) {
    tn_plane_view data, scale;
    TN_TRY(tn__op_lease(call, plane->data, TN_PLANE_DATA, access, &data));
    of->data = data.data;
    if (tn__grouped_is_plain(of)) return TN_OK;
    TN_TRY(tn__op_lease(call, plane->scale, TN_PLANE_DATA, access, &scale));
    TN_TRY(tn__op_require_aligned(call, "a grouped plane's scale", scale.data, ALIGNMENT));
    of->scale = scale.data;
    return TN_OK;
}

static int is_unaligned(const void *address) { return (uintptr_t)address % ALIGNMENT != 0; }

tn__operand tn__grouped_operand_take(tn__grouped_operand *of, const tn__group_list *groups,
                                     int64_t e) {
    const int64_t rows = tn__group_rows(groups, e);
    const size_t begins = (size_t)groups->offsets[e] * (size_t)of->cols * tn_dtype_bytes(of->dtype);
    const int64_t stored = of->is_along_rows ? of->cols : rows;
    tn__operand operand = {.dtype = of->dtype,
                           .data = of->data + begins,
                           .is_unaligned = is_unaligned(of->data + begins),
                           .rows = stored};
    if (tn__grouped_is_plain(of)) {
        operand.is_transposed = of->is_along_rows;
        return operand;
    }
    operand.kind = TN__OPERAND_TENSOR;
    operand.scale = of->scale;
    of->scale += tn__group_scale_floats(of->format, plane_of(of), rows, of->cols);
    if (of->format == TN_FORMAT_FP8_TENSOR) return operand;
    operand.kind = TN__OPERAND_VECTOR;
    operand.scale_stride = 4 * tn__units_of(stored, 4);
    return operand;
}

/* ---- outputs --------------------------------------------------------------------------------- */

/* What is not a view begins at a multiple of 16 bytes: no address is needed to know where rows
 * begin. A view that does not is refused, as its first group with rows begins where it does. */
int tn__group_is_unaligned(const tn__group_list *groups, int64_t e, int64_t cols, tn_dtype dtype) {
    return (size_t)groups->offsets[e] * (size_t)cols * tn_dtype_bytes(dtype) % ALIGNMENT != 0;
}

void tn__grouped_outline_rows(const tn__group_list *groups, int64_t e, const tn_tensor_info *d,
                              tn__gemm_work *work) {
    work->d = (tn__matrix){d->dtype, NULL, tn__group_rows(groups, e), d->cols};
    work->d_is_unaligned = tn__group_is_unaligned(groups, e, d->cols, d->dtype);
}

void tn__grouped_address_rows(const tn__group_list *groups, int64_t e, const tn__matrix *d,
                              tn__gemm_work *work) {
    work->d.data = (unsigned char *)d->data +
                   (size_t)groups->offsets[e] * (size_t)d->cols * tn_dtype_bytes(d->dtype);
}

tn_status tn__grouped_scratch(tn__op_call *call, tn_scope scope, tn__gemm_work *works,
                              int64_t count) {
    size_t most = 0;
    void *scratch = NULL;
    for (int64_t i = 0; i < count; i++) {
        size_t bytes = 0;
        if (!tn__gemm_has_product(&works[i])) continue;
        TN_TRY(tn__gemm_take_pin(call, &works[i]));
        TN_TRY(call->ops->gemm_scratch_bytes(call->device, &works[i], &bytes));
        if (bytes > most) most = bytes;
    }
    TN_TRY(tn__op_scratch_bytes(call, scope, most, &scratch));
    for (int64_t i = 0; i < count; i++)
        works[i].scratch = scratch, works[i].scratch_bytes = most;
    return TN_OK;
}

tn_status tn__grouped_require_aligned(const tn__op_call *call, const tn__gemm_work *works,
                                      int64_t count) {
    for (int64_t i = 0; i < count; i++)
        TN_TRY(tn__gemm_require_aligned(call, &works[i]));
    return TN_OK;
}

/* ---- tn_grouped_gemm: checks ----------------------------------------------------------------- */

typedef struct grouped {
    const tn_grouped_gemm_args *args;
    tn__group_list groups;
    int64_t n, k;
    tn__grouped_operand a, b; /* b: of WGRAD */
    tn_plane weight_plane;    /* of FPROP and DGRAD */
    tn_tensor_info d;         /* of FPROP and DGRAD */
    tn__gemm_work *works;     /* of the groups */
} grouped;

static int is_wgrad(const grouped *g) { return g->args->form == TN_GEMM_WGRAD; }

/* A grouped plane, or without a scale a PLAIN matrix. */
static tn_status check_operand(tn__op_call *call, const char *role, const tn_grouped_plane *plane,
                               const grouped *g, tn__grouped_operand *of) {
    tn_tensor_info info;
    if (!tn__grouped_is_plain(of))
        return tn__grouped_plane_check(call, role, plane, &g->groups, of);
    TN_REQUIRE(tn__is_no_tensor(plane->scale),
               "%s: %s has a scale and the other operand has none: both must be FP8, or both %s",
               call->name, role, tn_format_name(TN_FORMAT_PLAIN));
    TN_TRY(tn__op_tensor(call, role, plane->data, &info));
    TN_TRY(tn__op_require_float(call, role, &info));
    TN_REQUIRE(info.rows >= g->groups.rows && info.cols == of->cols,
               "%s: %s (tensor %s) is %lld x %lld, expected at least %lld x %lld", call->name, role,
               info.name, (long long)info.rows, (long long)info.cols, (long long)g->groups.rows,
               (long long)of->cols);
    of->dtype = info.dtype;
    return TN_OK;
}

/* The weight of a group, or its gradient: [n, k]. */
static tn_status check_n_by_k(tn__op_call *call, const char *role, tn_tensor tensor,
                              const grouped *g, tn_tensor_info *info) {
    TN_TRY(tn__op_tensor(call, role, tensor, info));
    return tn__op_require_shape(call, role, info, g->n, g->k, "n x k");
}

static tn_status check_bias(tn__op_call *call, const grouped *g, int64_t e) {
    tn_tensor_info info;
    const tn_tensor bias = g->args->biases ? g->args->biases[e] : (tn_tensor){0};
    if (tn__is_no_tensor(bias)) return TN_OK;
    TN_TRY(tn__op_require_vector(call, "bias", bias, g->n, "one for each column of d", &info));
    TN_REQUIRE(g->k > 0, "%s: a bias is given, but there is nothing to contract", call->name);
    return TN_OK;
}

static tn_status check_group(tn__op_call *call, const grouped *g, int64_t e) {
    tn_tensor_info info;
    if (is_wgrad(g)) {
        TN_TRY(check_n_by_k(call, "d", g->args->d[e], g, &info));
        return tn__op_require_float(call, "d", &info);
    }
    TN_TRY(check_bias(call, g, e));
    TN_TRY(check_n_by_k(call, "weight", g->args->weights[e], g, &info));
    if (tn__grouped_is_plain(&g->a)) {
        TN_TRY(tn__op_require_format(call, "weight", &info, TN_FORMAT_PLAIN));
        return tn__op_require_dtype(call, "weight", &info, g->a.dtype);
    }
    TN_TRY(tn__op_require_format(call, "weight", &info, TN_FORMAT_FP8_BLOCK_2D));
    if (info.dtype == TN_E5M2 && g->a.dtype == TN_E5M2)
        return TN_FAIL(TN_UNSUPPORTED,
                       "%s: a and weight (tensor %s) are both E5M2: one must be "
                       "E4M3",
                       call->name, info.name);
    return TN_OK;
}

static tn_status check_planes(tn__op_call *call, grouped *g) {
    const tn_format weight = is_wgrad(g) ? TN_FORMAT_FP8_BLOCK_1D : TN_FORMAT_FP8_BLOCK_2D;
    tn__gemm_plane_pair planes;
    g->weight_plane = TN_PLANE_DATA;
    if (tn__grouped_is_plain(&g->a)) return TN_OK;
    TN_TRY(tn__gemm_planes(call, g->args->form, TN_FORMAT_FP8_BLOCK_1D, weight, &planes));
    TN_CHECK(planes.a == plane_of(&g->a));
    g->weight_plane = planes.b;
    return TN_OK;
}

static tn_status check_numbers(const tn__op_call *call, grouped *g) {
    const tn_grouped_gemm_args *args = g->args;
    TN_REQUIRE((unsigned)args->form <= TN_GEMM_WGRAD,
               "%s: form is %d, expected TN_GEMM_FPROP, TN_GEMM_DGRAD or TN_GEMM_WGRAD", call->name,
               (int)args->form);
    TN_REQUIRE(args->n >= 0 && args->k >= 0 && args->n <= extent_max && args->k <= extent_max,
               "%s: n is %lld and k is %lld, expected 0 to %lld", call->name, (long long)args->n,
               (long long)args->k, (long long)extent_max);
    TN_TRY(tn__group_list_check(call, args->groups, args->offsets, &g->groups));
    TN_REQUIRE(args->groups == 0 || (args->d && (is_wgrad(g) || args->weights)),
               "%s: an array of tensors is NULL", call->name);
    TN_REQUIRE(!args->biases || args->form == TN_GEMM_FPROP,
               "%s: biases are given, but they are of TN_GEMM_FPROP only", call->name);
    g->n = args->n, g->k = args->k;
    return TN_OK;
}

static tn_status check_operands(tn__op_call *call, grouped *g) {
    const tn_grouped_gemm_args *args = g->args;
    const int is_plain = tn__is_no_tensor(args->a.scale);
    g->a = (tn__grouped_operand){.format = is_plain ? TN_FORMAT_PLAIN : TN_FORMAT_FP8_BLOCK_1D,
                                 .is_along_rows = is_wgrad(g),
                                 .dtype = args->a_dtype,
                                 .cols = args->form == TN_GEMM_FPROP ? g->k : g->n};
    g->b = (tn__grouped_operand){
        .format = g->a.format, .is_along_rows = 1, .dtype = args->b_dtype, .cols = g->k};
    TN_TRY(check_operand(call, "a", &args->a, g, &g->a));
    if (!is_wgrad(g)) return TN_OK;
    TN_TRY(check_operand(call, "b", &args->b, g, &g->b));
    TN_REQUIRE(!is_plain || g->a.dtype == g->b.dtype,
               "%s: a is %s and b is %s: they must be "
               "of one type",
               call->name, tn_dtype_name(g->a.dtype), tn_dtype_name(g->b.dtype));
    if (g->a.dtype == TN_E5M2 && g->b.dtype == TN_E5M2)
        return TN_FAIL(TN_UNSUPPORTED, "%s: a and b are both E5M2: one must be E4M3", call->name);
    return TN_OK;
}

static tn_status check(tn__op_call *call, grouped *g) {
    const tn_grouped_gemm_args *args = g->args;
    const int is_fprop = args->form == TN_GEMM_FPROP;
    TN_TRY(check_numbers(call, g));
    TN_TRY(check_operands(call, g));
    TN_TRY(check_planes(call, g));
    for (int64_t e = 0; e < args->groups; e++)
        TN_TRY(check_group(call, g, e));
    if (is_wgrad(g) || args->groups == 0) return TN_OK;
    TN_TRY(tn__op_tensor(call, "d", args->d[0], &g->d));
    TN_TRY(tn__op_require_float(call, "d", &g->d));
    TN_REQUIRE(g->d.rows >= g->groups.rows && g->d.cols == (is_fprop ? g->n : g->k),
               "%s: d (tensor %s) is %lld x %lld, expected at least %lld x %lld", call->name,
               g->d.name, (long long)g->d.rows, (long long)g->d.cols, (long long)g->groups.rows,
               (long long)(is_fprop ? g->n : g->k));
    return TN_OK;
}

/* ---- tn_grouped_gemm: the call --------------------------------------------------------------- */

static tn_status lease_weight(tn__op_call *call, const grouped *g, int64_t e, tn__gemm_work *work) {
    tn_plane_view weight;
    TN_TRY(tn__op_lease_derived(call, g->args->weights[e], g->weight_plane, &weight));
    if (tn__grouped_is_plain(&g->a)) {
        const tn__matrix matrix = {g->a.dtype, weight.data, g->n, g->k};
        work->b = tn__gemm_plain_operand(&matrix, g->args->form == TN_GEMM_DGRAD);
        return TN_OK;
    }
    work->b = tn__gemm_operand(TN_FORMAT_FP8_BLOCK_2D, &weight);
    return TN_OK;
}

static tn_status lease_bias(tn__op_call *call, const grouped *g, int64_t e, tn__gemm_work *work) {
    tn_tensor_info info;
    const tn_tensor bias = g->args->biases ? g->args->biases[e] : (tn_tensor){0};
    if (tn__is_no_tensor(bias)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "bias", bias, &info));
    TN_TRY(tn__op_lease_matrix(call, bias, &info, TN_READ, &work->bias));
    work->bias.rows = 1, work->bias.cols = g->n;
    return TN_OK;
}

/* Of a group without rows neither weight nor bias is read. */
static tn_status lease_group(tn__op_call *call, grouped *g, int64_t e) {
    tn__gemm_work *work = &g->works[e];
    tn_tensor_info d;
    work->accumulate = g->args->accumulate != 0;
    work->a = tn__grouped_operand_take(&g->a, &g->groups, e);
    if (is_wgrad(g)) {
        work->b = tn__grouped_operand_take(&g->b, &g->groups, e);
        work->contracted = tn__group_rows(&g->groups, e);
        TN_TRY(tn__op_tensor(call, "d", g->args->d[e], &d));
        work->d = (tn__matrix){d.dtype, NULL, d.rows, d.cols};
        return TN_OK;
    }
    work->contracted = g->args->form == TN_GEMM_FPROP ? g->k : g->n;
    tn__grouped_outline_rows(&g->groups, e, &g->d, work);
    if (work->d.rows == 0) return TN_OK;
    TN_TRY(lease_weight(call, g, e, work));
    return lease_bias(call, g, e, work);
}

static tn_status lease_outputs(tn__op_call *call, grouped *g) {
    const tn_access access = g->args->accumulate ? TN_UPDATE : TN_WRITE;
    tn__matrix d = {TN_FP32, NULL, 0, 0};
    if (!is_wgrad(g) && g->groups.count > 0)
        TN_TRY(tn__op_lease_matrix(call, g->args->d[0], &g->d, access, &d));
    for (int64_t e = 0; e < g->groups.count; e++) {
        tn_plane_view view;
        if (is_wgrad(g)) {
            TN_TRY(tn__op_lease(call, g->args->d[e], TN_PLANE_DATA, access, &view));
            g->works[e].d.data = view.data;
        } else {
            tn__grouped_address_rows(&g->groups, e, &d, &g->works[e]);
        }
    }
    return TN_OK;
}

static tn_status run(tn__op_call *call, grouped *g) {
    const int64_t groups = g->groups.count;
    TN_TRY(tn__grouped_plane_lease(call, &g->args->a, TN_READ, &g->a));
    if (is_wgrad(g)) TN_TRY(tn__grouped_plane_lease(call, &g->args->b, TN_READ, &g->b));
    for (int64_t e = 0; e < groups; e++)
        TN_TRY(lease_group(call, g, e));
    TN_TRY(tn__grouped_scratch(call, g->args->scope, g->works, groups));
    TN_TRY(lease_outputs(call, g));
    TN_TRY(tn__grouped_require_aligned(call, g->works, groups));
    for (int64_t e = 0; e < groups; e++)
        TN_TRY(tn__gemm_launch(call, &g->works[e]));
    return TN_OK;
}

tn_status tn_grouped_gemm(const tn_grouped_gemm_args *args, tn_stream stream) {
    enum { OTHER_LEASES = 6 };
    tn__op_call call = tn__op_begin("tn_grouped_gemm", stream);
    grouped g = {.args = args};
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(check(&call, &g));
    tn_status status = tn__op_reserve_leases(&call, 2 * (int)args->groups + OTHER_LEASES);
    if (status == TN_OK) {
        g.works = tn__host_alloc((size_t)args->groups + 1, sizeof *g.works);
        if (!g.works) status = TN_OUT_OF_HOST_MEMORY;
    }
    if (status == TN_OK) status = run(&call, &g);
    status = tn__op_finish(&call, status);
    tn__host_free(g.works);
    return status;
}
