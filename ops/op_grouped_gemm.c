/* tn_grouped_gemm: one product for each group, one behind the other on the stream.
 *
 * Where the groups lie in grouped planes (m rows in group e, which begins at row o):
 *
 *     plane        data            as an operand                   scales
 *     ROW [m, K]   at o K bytes    m rows, K contracted            after those of the groups before
 *     COL [K, m]   at o K bytes    K rows, m contracted            likewise
 *
 * Groups begin at any row, so at any byte: operands and outputs that do not begin at a multiple of
 * 16 bytes are said to be unaligned, and the engine copies them. All products share one scratch,
 * as large as the largest one wants.
 */
#include "host_alloc.h"
#include "op_gemm.h"
#include "op_grouped.h"
#include "tenure_grouped.h"

enum { ALIGNMENT = 16, GROUPS_MAX = 4096 };

/* A grouped plane: of which tensors and how large, then where. */
typedef struct grouped_operand {
    tn_plane plane;
    tn_dtype dtype;
    int64_t cols; /* of the matrix that was quantized */
    const unsigned char *data;
    const float *scale;
} grouped_operand;

typedef struct grouped {
    const tn_grouped_gemm_args *args;
    int64_t rows; /* of all groups */
    int64_t n, k;
    grouped_operand a, b;  /* b: of WGRAD */
    tn_plane weight_plane; /* of FPROP and DGRAD */
    tn_tensor_info d;      /* of FPROP and DGRAD */
    tn__matrix d_matrix;
    tn__gemm_work *works; /* of the groups */
    void *scratch;
    size_t scratch_bytes;
} grouped;

static int is_wgrad(const grouped *g) { return g->args->form == TN_GEMM_WGRAD; }

static int64_t rows_of(const grouped *g, int64_t e) {
    return g->args->offsets[e + 1] - g->args->offsets[e];
}

/* ---- checks ---------------------------------------------------------------------------------- */

static tn_status check_offsets(const tn__op_call *call, grouped *g) {
    const tn_grouped_gemm_args *args = g->args;
    TN_REQUIRE(args->groups >= 0 && args->groups <= GROUPS_MAX,
               "%s: groups is %lld, expected 0 to %d", call->name, (long long)args->groups,
               GROUPS_MAX);
    if (!args->offsets)
        return TN_FAIL(TN_UNSUPPORTED,
                       "%s: offsets is NULL: no engine here reads where groups begin from device "
                       "memory, so they must be known on the host",
                       call->name);
    TN_REQUIRE(args->offsets[0] == 0, "%s: offsets[0] is %lld, expected 0", call->name,
               (long long)args->offsets[0]);
    for (int64_t e = 0; e < args->groups; e++) {
        TN_REQUIRE(args->offsets[e + 1] >= args->offsets[e],
                   "%s: offsets[%lld] is %lld, less than the one before, %lld", call->name,
                   (long long)(e + 1), (long long)args->offsets[e + 1],
                   (long long)args->offsets[e]);
    }
    g->rows = args->offsets[args->groups];
    TN_REQUIRE(args->groups == 0 || (args->d && (is_wgrad(g) || args->weights)),
               "%s: an array of tensors is NULL", call->name);
    return TN_OK;
}

static tn_status check_plane(tn__op_call *call, const char *role, const tn_grouped_plane *plane,
                             const grouped *g, const grouped_operand *of) {
    tn_tensor_info data, scale;
    int64_t floats = 0;
    TN_TRY(tn__op_tensor(call, role, plane->data, &data));
    TN_TRY(tn__op_require_plain(call, role, &data, TN_BYTE));
    TN_TRY(tn__op_tensor(call, role, plane->scale, &scale));
    TN_TRY(tn__op_require_plain(call, role, &scale, TN_FP32));
    for (int64_t e = 0; e < g->args->groups; e++)
        floats +=
            tn__group_scale_floats(TN_FORMAT_FP8_BLOCK_1D, of->plane, rows_of(g, e), of->cols);
    TN_REQUIRE(of->cols == 0 || data.rows * data.cols / of->cols >= g->rows,
               "%s: %s's data (tensor %s) has %lld bytes, fewer than %lld rows of %lld", call->name,
               role, data.name, (long long)(data.rows * data.cols), (long long)g->rows,
               (long long)of->cols);
    TN_REQUIRE(scale.rows * scale.cols >= floats,
               "%s: %s's scale (tensor %s) has %lld elements, expected at least %lld", call->name,
               role, scale.name, (long long)(scale.rows * scale.cols), (long long)floats);
    TN_REQUIRE(of->dtype == TN_E4M3 || of->dtype == TN_E5M2, "%s: %s is %s, expected e4m3 or e5m2",
               call->name, role, tn_dtype_name(of->dtype));
    return TN_OK;
}

/* The weight of a group, or its gradient: [n, k]. */
static tn_status check_weight(tn__op_call *call, const char *role, tn_tensor tensor,
                              const grouped *g, tn_tensor_info *info) {
    TN_TRY(tn__op_tensor(call, role, tensor, info));
    return tn__op_require_shape(call, role, info, g->n, g->k, "n x k");
}

static tn_status check_group(tn__op_call *call, const grouped *g, int64_t e) {
    tn_tensor_info info;
    if (is_wgrad(g)) {
        TN_TRY(check_weight(call, "d", g->args->d[e], g, &info));
        return tn__op_require_float(call, "d", &info);
    }
    TN_TRY(check_weight(call, "weight", g->args->weights[e], g, &info));
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
    TN_TRY(tn__gemm_planes(call, g->args->form, TN_FORMAT_FP8_BLOCK_1D, weight, &planes));
    TN_CHECK(planes.a == g->a.plane);
    g->weight_plane = planes.b;
    return TN_OK;
}

static tn_status check(tn__op_call *call, grouped *g) {
    const tn_grouped_gemm_args *args = g->args;
    int is_fprop = args->form == TN_GEMM_FPROP;
    TN_REQUIRE((unsigned)args->form <= TN_GEMM_WGRAD,
               "%s: form is %d, expected TN_GEMM_FPROP, TN_GEMM_DGRAD or TN_GEMM_WGRAD", call->name,
               (int)args->form);
    TN_REQUIRE(args->n >= 0 && args->k >= 0, "%s: n is %lld and k is %lld, expected 0 or more",
               call->name, (long long)args->n, (long long)args->k);
    g->n = args->n, g->k = args->k;
    TN_TRY(check_offsets(call, g));
    g->a = (grouped_operand){.plane = is_wgrad(g) ? TN_PLANE_COL : TN_PLANE_ROW,
                             .dtype = args->a_dtype,
                             .cols = is_fprop ? g->k : g->n};
    g->b = (grouped_operand){.plane = TN_PLANE_COL, .dtype = args->b_dtype, .cols = g->k};
    TN_TRY(check_plane(call, "a", &args->a, g, &g->a));
    if (is_wgrad(g)) TN_TRY(check_plane(call, "b", &args->b, g, &g->b));
    if (is_wgrad(g) && g->a.dtype == TN_E5M2 && g->b.dtype == TN_E5M2)
        return TN_FAIL(TN_UNSUPPORTED, "%s: a and b are both E5M2: one must be E4M3", call->name);
    TN_TRY(check_planes(call, g));
    for (int64_t e = 0; e < args->groups; e++)
        TN_TRY(check_group(call, g, e));
    if (is_wgrad(g) || args->groups == 0) return TN_OK;
    TN_TRY(tn__op_tensor(call, "d", args->d[0], &g->d));
    TN_TRY(tn__op_require_float(call, "d", &g->d));
    TN_REQUIRE(g->d.rows >= g->rows && g->d.cols == (is_fprop ? g->n : g->k),
               "%s: d (tensor %s) is %lld x %lld, expected at least %lld x %lld", call->name,
               g->d.name, (long long)g->d.rows, (long long)g->d.cols, (long long)g->rows,
               (long long)(is_fprop ? g->n : g->k));
    return TN_OK;
}

/* ---- operands -------------------------------------------------------------------------------- */

static tn_status lease_plane(tn__op_call *call, const tn_grouped_plane *plane,
                             grouped_operand *of) {
    tn_plane_view data, scale;
    TN_TRY(tn__op_lease(call, plane->data, TN_PLANE_DATA, TN_READ, &data));
    TN_TRY(tn__op_lease(call, plane->scale, TN_PLANE_DATA, TN_READ, &scale));
    TN_TRY(tn__op_require_aligned(call, "a grouped plane's scale", scale.data, ALIGNMENT));
    of->data = data.data;
    of->scale = scale.data;
    return TN_OK;
}

static int is_unaligned(const void *address) { return (uintptr_t)address % ALIGNMENT != 0; }

/* The group that begins at `row`, whose scales begin at of->scale: which go on to the next. */
static tn__operand operand_at(grouped_operand *of, int64_t row, int64_t rows) {
    int64_t stored = of->plane == TN_PLANE_ROW ? rows : of->cols;
    const unsigned char *data = of->data + row * of->cols;
    tn__operand operand = {.kind = TN__OPERAND_VECTOR,
                           .dtype = of->dtype,
                           .data = data,
                           .is_unaligned = is_unaligned(data),
                           .rows = stored,
                           .scale = of->scale,
                           .scale_stride = 4 * tn__units_of(stored, 4)};
    of->scale += tn__group_scale_floats(TN_FORMAT_FP8_BLOCK_1D, of->plane, rows, of->cols);
    return operand;
}

static tn_status lease_group(tn__op_call *call, grouped *g, int64_t e) {
    const int64_t row = g->args->offsets[e], rows = rows_of(g, e);
    tn__gemm_work *work = &g->works[e];
    tn_plane_view weight;
    work->accumulate = g->args->accumulate != 0;
    work->a = operand_at(&g->a, row, rows);
    if (is_wgrad(g)) {
        work->b = operand_at(&g->b, row, rows);
        work->contracted = rows;
        return TN_OK;
    }
    TN_TRY(tn__op_lease(call, g->args->weights[e], g->weight_plane, TN_READ, &weight));
    work->b = tn__gemm_operand(TN_FORMAT_FP8_BLOCK_2D, &weight);
    work->contracted = g->args->form == TN_GEMM_FPROP ? g->k : g->n;
    return TN_OK;
}

/* Without its address, which nothing but its alignment is known of: where the rows begin. */
static tn_status outline_d(tn__op_call *call, const grouped *g, int64_t e, tn__gemm_work *work) {
    tn_tensor_info info = g->d;
    if (is_wgrad(g)) TN_TRY(tn__op_tensor(call, "d", g->args->d[e], &info));
    int64_t rows = is_wgrad(g) ? info.rows : rows_of(g, e);
    size_t begins = (size_t)g->args->offsets[e] * (size_t)info.cols * tn_dtype_bytes(info.dtype);
    work->d = (tn__matrix){info.dtype, NULL, rows, info.cols};
    work->d_is_unaligned = !is_wgrad(g) && begins % ALIGNMENT != 0;
    return TN_OK;
}

static int has_product(const tn__gemm_work *work) {
    return work->d.rows > 0 && work->d.cols > 0 && work->contracted > 0;
}

static tn_status make_scratch(tn__op_call *call, grouped *g) {
    for (int64_t e = 0; e < g->args->groups; e++) {
        size_t bytes = 0;
        TN_TRY(outline_d(call, g, e, &g->works[e]));
        if (has_product(&g->works[e]))
            TN_TRY(call->ops->gemm_scratch_bytes(call->device, &g->works[e], &bytes));
        if (bytes > g->scratch_bytes) g->scratch_bytes = bytes;
    }
    return tn__op_scratch_bytes(call, g->args->scope, g->scratch_bytes, &g->scratch);
}

static tn_status lease_outputs(tn__op_call *call, grouped *g) {
    const tn_access access = g->args->accumulate ? TN_UPDATE : TN_WRITE;
    if (!is_wgrad(g) && g->args->groups > 0)
        TN_TRY(tn__op_lease_matrix(call, g->args->d[0], &g->d, access, &g->d_matrix));
    for (int64_t e = 0; e < g->args->groups; e++) {
        tn__matrix *d = &g->works[e].d;
        tn_plane_view view;
        if (is_wgrad(g)) {
            TN_TRY(tn__op_lease(call, g->args->d[e], TN_PLANE_DATA, access, &view));
            d->data = view.data;
        } else {
            d->data = (unsigned char *)g->d_matrix.data +
                      (size_t)g->args->offsets[e] * (size_t)d->cols * tn_dtype_bytes(d->dtype);
        }
        g->works[e].scratch = g->scratch;
        g->works[e].scratch_bytes = g->scratch_bytes;
    }
    return TN_OK;
}

/* ---- the call -------------------------------------------------------------------------------- */

static tn_status run(tn__op_call *call, grouped *g) {
    const int64_t groups = g->args->groups;
    TN_TRY(lease_plane(call, &g->args->a, &g->a));
    if (is_wgrad(g)) TN_TRY(lease_plane(call, &g->args->b, &g->b));
    for (int64_t e = 0; e < groups; e++)
        TN_TRY(lease_group(call, g, e));
    TN_TRY(make_scratch(call, g));
    TN_TRY(lease_outputs(call, g));
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
    tn_status status = tn__op_reserve_leases(&call, (int)args->groups + OTHER_LEASES);
    if (status == TN_OK) {
        g.works = tn__host_alloc((size_t)args->groups + 1, sizeof *g.works);
        if (!g.works) status = TN_OUT_OF_HOST_MEMORY;
    }
    if (status == TN_OK) status = run(&call, &g);
    status = tn__op_finish(&call, status);
    tn__host_free(g.works);
    return status;
}
