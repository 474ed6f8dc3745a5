/* The gradient of a norm: the means of the rows, then dx with its casts and the sums over rows. */
#include "op_norm.h"

/* ---- checks -------------------------------------------------------------------------------- */

static tn_status check_kind(const tn__op_call *call, const tn_norm_backward_args *args,
                            const tn__norm_roles *roles) {
    const int is_layer = args->norm == TN_NORM_LAYER;
    TN_REQUIRE((unsigned)args->norm < TN_NORM_COUNT,
               "%s: %s is %d, expected TN_NORM_RMS or TN_NORM_LAYER", call->name, roles->norm,
               (int)args->norm);
    TN_REQUIRE(is_layer || (tn__is_no_tensor(args->mean) && tn__is_no_tensor(args->dbeta)),
               "%s: mean or %s is given, which TN_NORM_RMS has not", call->name, roles->dbeta);
    return TN_OK;
}

static tn_status check_like_x(tn__op_call *call, const char *role, tn_tensor tensor,
                              const tn_tensor_info *x, tn_tensor_info *info) {
    TN_TRY(tn__op_tensor(call, role, tensor, info));
    TN_TRY(tn__op_require_format(call, role, info, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, role, info, x->dtype));
    return tn__op_require_shape(call, role, info, x->rows, x->cols, "the shape of x");
}

tn_status tn__norm_gradient_check(tn__op_call *call, const tn_norm_backward_args *args,
                                  const tn__norm_roles *roles, tn__norm_gradient *n) {
    static const char of_cols[] = "one for each column of x";
    TN_TRY(check_kind(call, args, roles));
    TN_TRY(tn__op_tensor(call, roles->x, args->x, &n->x));
    TN_TRY(tn__op_require_float(call, roles->x, &n->x));
    const tn_tensor_info *x = &n->x;
    if (!tn__is_no_tensor(args->added))
        TN_TRY(check_like_x(call, roles->added, args->added, x, &n->added));
    if (!tn__is_no_tensor(args->gamma))
        TN_TRY(tn__op_require_vector(call, roles->gamma, args->gamma, x->cols, of_cols, &n->gamma));
    TN_TRY(tn__op_check_column_sums(call, roles->dgamma, args->dgamma, x->cols, &n->dgamma));
    TN_TRY(tn__op_check_column_sums(call, roles->dbeta, args->dbeta, x->cols, &n->dbeta));
    n->out = (tn__produced){.value = args->dx,
                            .value_role = roles->dx,
                            .quantized = args->quantized,
                            .dtype = x->dtype,
                            .rows = x->rows,
                            .cols = x->cols};
    return tn__op_check_produced(call, &n->out);
}

/* What a caller of the op brings; a layer has made its own. */
static tn_status check_given(tn__op_call *call, const tn_norm_backward_args *args,
                             tn__norm_gradient *n) {
    static const char of_rows[] = "one for each row of x";
    TN_REQUIRE(args->norm != TN_NORM_LAYER || !tn__is_no_tensor(args->mean),
               "%s: mean is {0}: TN_NORM_LAYER needs the one that tn_norm_forward left",
               call->name);
    TN_REQUIRE(!tn__is_no_tensor(args->dx) || !tn__is_no_tensor(args->quantized.tensor) ||
                   !tn__is_no_tensor(args->dgamma) || !tn__is_no_tensor(args->dbeta),
               "%s: no output is given", call->name);
    TN_TRY(check_like_x(call, "dy", args->dy, &n->x, &n->dy));
    if (!tn__is_no_tensor(args->mean))
        TN_TRY(tn__op_require_fp32_vector(call, "mean", args->mean, n->x.rows, of_rows, &n->mean));
    return tn__op_require_fp32_vector(call, "rstd", args->rstd, n->x.rows, of_rows, &n->rstd);
}

/* ---- leases -------------------------------------------------------------------------------- */

static tn_status lease_read(tn__op_call *call, tn_tensor tensor, const void **out) {
    tn_plane_view view;
    *out = NULL;
    if (tn__is_no_tensor(tensor)) return TN_OK;
    TN_TRY(tn__op_lease(call, tensor, TN_PLANE_DATA, TN_READ, &view));
    *out = view.data;
    return TN_OK;
}

static tn_status lease_inputs(tn__op_call *call, const tn_norm_backward_args *args,
                              const tn__norm_gradient *n, tn__norm_gradient_work *work) {
    const void *mean, *rstd;
    TN_TRY(tn__op_lease_skip(call, args->skip, &work->skip));
    TN_TRY(tn__op_lease_matrix(call, args->x, &n->x, TN_READ, &work->x));
    TN_TRY(lease_read(call, args->dy, &work->dy));
    TN_TRY(lease_read(call, args->added, &work->added));
    TN_TRY(lease_read(call, args->mean, &mean));
    TN_TRY(lease_read(call, args->rstd, &rstd));
    work->mean = mean, work->rstd = rstd;
    work->gamma = (tn__matrix){TN_FP32, NULL, 0, 0};
    work->gamma_base = args->gamma_from_one ? 1.0f : 0.0f;
    if (tn__is_no_tensor(args->gamma)) return TN_OK;
    return tn__op_lease_matrix(call, args->gamma, &n->gamma, TN_READ, &work->gamma);
}

static tn_status lease_means(tn__op_call *call, const tn_norm_backward_args *args,
                             tn__norm_gradient_work *work) {
    const size_t bytes = (size_t)work->x.rows * sizeof(float);
    void *shift = NULL, *tilt = NULL;
    if (args->norm == TN_NORM_LAYER) TN_TRY(tn__op_scratch_bytes(call, args->scope, bytes, &shift));
    TN_TRY(tn__op_scratch_bytes(call, args->scope, bytes, &tilt));
    work->shift = shift, work->tilt = tilt;
    return TN_OK;
}

tn_status tn__norm_gradient_lease(tn__op_call *call, const tn_norm_backward_args *args,
                                  const tn__norm_gradient *n, tn__norm_gradient_work *work) {
    *work = (tn__norm_gradient_work){.skip = NULL};
    TN_TRY(lease_inputs(call, args, n, work));
    return lease_means(call, args, work);
}

tn_status tn__norm_gradient_lease_parts(tn__op_call *call, tn_scope scope,
                                        tn__norm_gradient_work *work) {
    const tn__matrix *x = &work->x;
    if (x->rows == 0 || x->cols == 0 || x->dtype == TN_FP32) return TN_OK;
    if (!work->cast.has_row && !work->cast.has_col) return TN_OK;
    return tn__op_scratch_bytes(
        call, scope, tn__norm_parts_bytes(x->rows, x->cols, work->shift ? 2 : 1), &work->parts);
}

tn_status tn__norm_gradient_split(tn__op_call *call, tn__norm_gradient_work *work,
                                  tn__column_sums *gamma, tn__column_sums *beta) {
    work->split = 1;
    if (call->ops->norm_gradient_split && work->x.rows > 0 && work->x.cols > 0)
        TN_TRY(call->ops->norm_gradient_split(call->device, work, &work->split));
    gamma->parts = beta->parts = tn__norm_gradient_parts(work->split);
    return TN_OK;
}

typedef struct sums_of_columns {
    tn__column_sums gamma, beta;
} sums_of_columns;

static tn_status lease_outputs(tn__op_call *call, const tn_norm_backward_args *args,
                               const tn__norm_gradient *n, tn__norm_gradient_work *work,
                               sums_of_columns *sums) {
    const int accumulate = args->accumulate != 0;
    TN_TRY(tn__op_lease_column_sums(call, "dgamma", args->dgamma, &n->dgamma, accumulate,
                                    work->skip, &sums->gamma));
    TN_TRY(tn__op_lease_column_sums(call, "dbeta", args->dbeta, &n->dbeta, accumulate, work->skip,
                                    &sums->beta));
    TN_TRY(tn__op_lease_produced(call, &n->out, work->skip, &work->cast));
    TN_TRY(tn__norm_gradient_split(call, work, &sums->gamma, &sums->beta));
    TN_TRY(tn__op_tile_sums(call, args->scope, n->x.rows, &sums->gamma));
    TN_TRY(tn__op_tile_sums(call, args->scope, n->x.rows, &sums->beta));
    work->gamma_sums = sums->gamma.tile_sums;
    work->beta_sums = sums->beta.tile_sums;
    return tn__norm_gradient_lease_parts(call, args->scope, work);
}

/* ---- the op -------------------------------------------------------------------------------- */

tn_status tn__norm_gradient_run(tn__op_call *call, const tn__norm_gradient_work *work) {
    if (work->x.rows == 0 || work->x.cols == 0) return TN_OK;
    TN_TRY(TN__OP_RUN(call, norm_gradient_means, work));
    return TN__OP_RUN(call, norm_gradient, work);
}

static tn_status run(tn__op_call *call, const tn__norm_gradient *n,
                     const tn__norm_gradient_work *work, const sums_of_columns *sums) {
    if (n->x.cols == 0) return TN_OK;
    TN_TRY(tn__norm_gradient_run(call, work));
    TN_TRY(tn__op_add_up_tiles(call, n->x.rows, work->skip, &sums->gamma));
    return tn__op_add_up_tiles(call, n->x.rows, work->skip, &sums->beta);
}

static const tn__norm_roles own_roles = {.norm = "norm",
                                         .x = "x",
                                         .gamma = "gamma",
                                         .added = "added",
                                         .dx = "dx",
                                         .dgamma = "dgamma",
                                         .dbeta = "dbeta"};

tn_status tn_norm_backward(const tn_norm_backward_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_norm_backward", stream);
    tn__norm_gradient_work work;
    sums_of_columns sums = {.gamma = {.accumulate = 0}};
    tn__norm_gradient n;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(tn__norm_gradient_check(&call, args, &own_roles, &n));
    TN_TRY(check_given(&call, args, &n));
    tn_status status = tn__norm_gradient_lease(&call, args, &n, &work);
    if (status == TN_OK) status = lease_outputs(&call, args, &n, &work, &sums);
    if (status == TN_OK) status = run(&call, &n, &work, &sums);
    return tn__op_finish(&call, status);
}
