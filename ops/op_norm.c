/* Norms: the statistics of the rows, then the values with their casts. */
#include "op_norm.h"

#include <math.h>

/* ---- checks -------------------------------------------------------------------------------- */

/* PLAIN, and of x's type and shape. */
static tn_status check_like_x(tn__op_call *call, const char *role, tn_tensor tensor,
                              const tn_tensor_info *x, tn_tensor_info *info) {
    if (tn__is_no_tensor(tensor)) return TN_OK;
    TN_TRY(tn__op_tensor(call, role, tensor, info));
    TN_TRY(tn__op_require_format(call, role, info, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, role, info, x->dtype));
    return tn__op_require_shape(call, role, info, x->rows, x->cols, "the shape of x");
}

static tn_status check_of_columns(tn__op_call *call, const char *role, tn_tensor tensor,
                                  int64_t cols, tn_tensor_info *info) {
    if (tn__is_no_tensor(tensor)) return TN_OK;
    return tn__op_require_vector(call, role, tensor, cols, "one for each column of x", info);
}

static tn_status check_of_rows(tn__op_call *call, const char *role, tn_tensor tensor, int64_t rows,
                               tn_tensor_info *info) {
    if (tn__is_no_tensor(tensor)) return TN_OK;
    return tn__op_require_fp32_vector(call, role, tensor, rows, "one for each row of x", info);
}

static tn_status check_kind(const tn__op_call *call, const tn_norm_args *args,
                            const tn__norm_roles *roles) {
    TN_REQUIRE((unsigned)args->norm < TN_NORM_COUNT,
               "%s: %s is %d, expected TN_NORM_RMS or TN_NORM_LAYER", call->name, roles->norm,
               (int)args->norm);
    TN_REQUIRE(isfinite(args->epsilon) && args->epsilon >= 0.0f,
               "%s: %s is %g, expected a finite number of at least 0", call->name, roles->epsilon,
               (double)args->epsilon);
    TN_REQUIRE(args->norm == TN_NORM_LAYER ||
                   (tn__is_no_tensor(args->beta) && tn__is_no_tensor(args->mean)),
               "%s: %s or mean is given, which TN_NORM_RMS has not", call->name, roles->beta);
    TN_REQUIRE(tn__is_no_tensor(args->sum) || !tn__is_no_tensor(args->residual),
               "%s: %s is given, but no %s", call->name, roles->sum, roles->residual);
    return TN_OK;
}

tn_status tn__norm_check(tn__op_call *call, const tn_norm_args *args, const tn__norm_roles *roles,
                         tn__norm *n) {
    TN_TRY(check_kind(call, args, roles));
    TN_TRY(tn__op_tensor(call, roles->x, args->x, &n->x));
    TN_TRY(tn__op_require_float(call, roles->x, &n->x));
    TN_TRY(check_like_x(call, roles->residual, args->residual, &n->x, &n->residual));
    TN_TRY(check_like_x(call, roles->sum, args->sum, &n->x, &n->sum));
    TN_TRY(check_of_columns(call, roles->gamma, args->gamma, n->x.cols, &n->gamma));
    TN_TRY(check_of_columns(call, roles->beta, args->beta, n->x.cols, &n->beta));
    TN_TRY(check_of_rows(call, "mean", args->mean, n->x.rows, &n->mean));
    TN_TRY(check_of_rows(call, "rstd", args->rstd, n->x.rows, &n->rstd));
    n->out = (tn__produced){.value = args->y,
                            .value_role = "y",
                            .quantized = args->quantized,
                            .dtype = n->x.dtype,
                            .rows = n->x.rows,
                            .cols = n->x.cols};
    return tn__op_check_produced(call, &n->out);
}

/* ---- leases -------------------------------------------------------------------------------- */

/* x, or x and the residual and where their sum goes. */
static tn_status lease_source(tn__op_call *call, const tn_norm_args *args, const tn__norm *n,
                              tn__row_statistics_work *work) {
    tn__matrix residual, sum;
    TN_TRY(tn__op_lease_matrix(call, args->x, &n->x, TN_READ, &work->x));
    if (tn__is_no_tensor(args->residual)) return TN_OK;
    const int in_place = tn__is_no_tensor(args->sum);
    TN_TRY(tn__op_lease_matrix(call, args->residual, &n->residual, in_place ? TN_UPDATE : TN_READ,
                               &residual));
    work->residual = residual.data;
    work->sum = residual.data;
    if (in_place) return TN_OK;
    TN_TRY(tn__op_require_kept(call, work->skip, "sum", args->sum, TN_PLANE_DATA));
    TN_TRY(tn__op_lease_matrix(call, args->sum, &n->sum, TN_WRITE, &sum));
    work->sum = sum.data;
    return TN_OK;
}

static tn_status lease_vector(tn__op_call *call, tn_tensor tensor, const tn_tensor_info *info,
                              tn__matrix *vector) {
    *vector = (tn__matrix){TN_FP32, NULL, 0, 0};
    if (tn__is_no_tensor(tensor)) return TN_OK;
    return tn__op_lease_matrix(call, tensor, info, TN_READ, vector);
}

/* Rows without columns have statistics still. */
static int makes_something(const tn_norm_args *args, const tn__norm *n) {
    const int has_statistics = !tn__is_no_tensor(args->mean) || !tn__is_no_tensor(args->rstd);
    return n->x.rows > 0 && (n->x.cols > 0 || has_statistics);
}

/* The caller's tensor, or scratch where the work reads it. */
static tn_status lease_statistic(tn__op_call *call, const char *role, tn_tensor tensor,
                                 const tn__norm *n, const tn_norm_args *args, const float *skip,
                                 float **out) {
    tn_plane_view view;
    void *scratch = NULL;
    if (tn__is_no_tensor(tensor)) {
        if (!makes_something(args, n)) return TN_OK;
        TN_TRY(
            tn__op_scratch_bytes(call, args->scope, (size_t)n->x.rows * sizeof(float), &scratch));
        *out = scratch;
        return TN_OK;
    }
    TN_TRY(tn__op_require_kept(call, skip, role, tensor, TN_PLANE_DATA));
    TN_TRY(tn__op_lease(call, tensor, TN_PLANE_DATA, TN_WRITE, &view));
    *out = view.data;
    return TN_OK;
}

/* Of RMS beside a value or a sum, and only where a scope is given: else two reads do. */
static tn_status lease_parts(tn__op_call *call, const tn_norm_args *args, tn__norm_work *work) {
    const tn__matrix *x = &work->statistics.x;
    const tn__quantize_work *cast = &work->made.cast;
    if (args->scope.value == 0 || args->norm != TN_NORM_RMS || x->dtype == TN_FP32) return TN_OK;
    if (!tn__norm_needs_rows_first(cast) || !(cast->src.data || work->statistics.sum)) return TN_OK;
    return tn__op_scratch_bytes(call, args->scope, tn__norm_parts_bytes(x->rows, x->cols, 1),
                                &work->parts);
}

tn_status tn__norm_lease(tn__op_call *call, const tn_norm_args *args, const tn__norm *n,
                         tn__norm_work *norm_work) {
    tn__row_statistics_work *statistics = &norm_work->statistics;
    tn__produce_work *work = &norm_work->made;
    *norm_work = (tn__norm_work){.made.producer = TN__PRODUCE_NORM};
    statistics->epsilon = args->epsilon;
    TN_TRY(tn__op_lease_skip(call, args->skip, &statistics->skip));
    TN_TRY(lease_source(call, args, n, statistics));
    TN_TRY(lease_vector(call, args->gamma, &n->gamma, &work->gamma));
    TN_TRY(lease_vector(call, args->beta, &n->beta, &work->beta));
    if (args->norm == TN_NORM_LAYER)
        TN_TRY(lease_statistic(call, "mean", args->mean, n, args, statistics->skip,
                               &statistics->mean));
    TN_TRY(lease_statistic(call, "rstd", args->rstd, n, args, statistics->skip, &statistics->rstd));
    TN_TRY(tn__op_lease_produced(call, &n->out, statistics->skip, &work->cast));
    TN_TRY(lease_parts(call, args, norm_work));
    work->x = statistics->x;
    if (statistics->sum) work->x.data = statistics->sum;
    work->mean = statistics->mean;
    work->rstd = statistics->rstd;
    work->gamma_base = args->gamma_from_one ? 1.0f : 0.0f;
    work->skip = statistics->skip;
    return TN_OK;
}

/* ---- the op -------------------------------------------------------------------------------- */

tn_status tn__norm_run(tn__op_call *call, const tn_norm_args *args, const tn__norm *n,
                       tn__norm_work *work) {
    return makes_something(args, n) ? TN__OP_RUN(call, norm, work) : TN_OK;
}

static const tn__norm_roles own_roles = {.norm = "norm",
                                         .epsilon = "epsilon",
                                         .x = "x",
                                         .residual = "residual",
                                         .sum = "sum",
                                         .gamma = "gamma",
                                         .beta = "beta"};

tn_status tn_norm_forward(const tn_norm_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_norm_forward", stream);
    tn__norm_work work;
    tn__norm n;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(tn__norm_check(&call, args, &own_roles, &n));
    TN_REQUIRE(!tn__is_no_tensor(args->y) || !tn__is_no_tensor(args->quantized.tensor),
               "%s: no output is given", call.name);
    tn_status status = tn__norm_lease(&call, args, &n, &work);
    if (status == TN_OK) status = tn__norm_run(&call, args, &n, &work);
    return tn__op_finish(&call, status);
}
