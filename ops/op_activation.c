/* Activations, plain and gated, their gradients, and the gradient of a bias. */
#include "op_produce.h"

static const struct activation {
    const char *name;
    tn__curve curve;
} activations[TN_ACTIVATION_COUNT] = {
    /* 2 sqrt(2 / pi), and 0.044715 times that */
    [TN_ACTIVATION_GELU] = {"gelu", {TN__CURVE_SIGMOID, 1.5957691216f, 0.0713548163f}},
    [TN_ACTIVATION_QUICK_GELU] = {"quick gelu", {TN__CURVE_SIGMOID, 1.702f, 0.0f}},
    [TN_ACTIVATION_SILU] = {"silu", {TN__CURVE_SIGMOID, 1.0f, 0.0f}},
    [TN_ACTIVATION_RELU] = {"relu", {TN__CURVE_RELU, 0.0f, 0.0f}},
    [TN_ACTIVATION_SQUARED_RELU] = {"squared relu", {TN__CURVE_SQUARED_RELU, 0.0f, 0.0f}},
};

const char *tn_activation_name(tn_activation activation) {
    if ((unsigned)activation >= TN_ACTIVATION_COUNT) return "unknown activation";
    return activations[activation].name;
}

/* ---- checks -------------------------------------------------------------------------------- */

/* What the two directions have in common: x, its activation, and the weights of its rows. */
typedef struct operand {
    tn_tensor x, weights;
    tn_tensor_info x_info;
    int64_t cols; /* N: without the gates */
    tn__curve curve;
} operand;

tn_status tn__op_activation_curve(const tn__op_call *call, tn_activation activation,
                                  tn__curve *out) {
    TN_REQUIRE((unsigned)activation < TN_ACTIVATION_COUNT,
               "%s: activation is %d, expected one of the %d of tn_activation", call->name,
               (int)activation, TN_ACTIVATION_COUNT);
    *out = activations[activation].curve;
    return TN_OK;
}

static tn_status check_operand(tn__op_call *call, tn_activation activation, int gated,
                               operand *of) {
    tn_tensor_info weights;
    TN_TRY(tn__op_activation_curve(call, activation, &of->curve));
    TN_TRY(tn__op_tensor(call, "x", of->x, &of->x_info));
    TN_TRY(tn__op_require_float(call, "x", &of->x_info));
    TN_REQUIRE(!gated || of->x_info.cols % 2 == 0,
               "%s: x (tensor %s) has %lld columns, expected an even number: it is gated",
               call->name, of->x_info.name, (long long)of->x_info.cols);
    of->cols = gated ? of->x_info.cols / 2 : of->x_info.cols;
    if (tn__is_no_tensor(of->weights)) return TN_OK;
    return tn__op_require_fp32_vector(call, "weights", of->weights, of->x_info.rows,
                                      "one for each row of x", &weights);
}

static tn_status lease_operand(tn__op_call *call, const operand *of, tn__produce_work *work) {
    tn_plane_view view;
    TN_TRY(tn__op_lease_matrix(call, of->x, &of->x_info, TN_READ, &work->x));
    if (tn__is_no_tensor(of->weights)) return TN_OK;
    TN_TRY(tn__op_lease(call, of->weights, TN_PLANE_DATA, TN_READ, &view));
    work->weights = view.data;
    return TN_OK;
}

static tn_status require_output(const tn__op_call *call, int is_any) {
    TN_REQUIRE(is_any, "%s: no output is given", call->name);
    return TN_OK;
}

/* ---- forward ------------------------------------------------------------------------------- */

tn_status tn_activation_forward(const tn_activation_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_activation_forward", stream);
    tn__column_sums no_sums = {.accumulate = 0};
    tn__produce_work work = {.producer = TN__PRODUCE_ACTIVATION};
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    operand of = {.x = args->x, .weights = args->weights};
    TN_TRY(check_operand(&call, args->activation, args->gated, &of));
    tn__produced out = {.value = args->y,
                        .value_role = "y",
                        .quantized = args->quantized,
                        .dtype = of.x_info.dtype,
                        .rows = of.x_info.rows,
                        .cols = of.cols};
    TN_TRY(tn__op_check_produced(&call, &out));
    TN_TRY(require_output(&call,
                          !tn__is_no_tensor(args->y) || !tn__is_no_tensor(args->quantized.tensor)));
    work.curve = of.curve;
    work.is_gated = args->gated != 0;
    tn_status status = lease_operand(&call, &of, &work);
    if (status == TN_OK) status = tn__op_lease_skip(&call, args->skip, &work.skip);
    if (status == TN_OK) status = tn__op_lease_produced(&call, &out, work.skip, &work.cast);
    if (status == TN_OK) status = tn__op_produce(&call, &work, &no_sums, (tn_scope){0});
    return tn__op_finish(&call, status);
}

/* ---- backward ------------------------------------------------------------------------------ */

typedef struct backward {
    operand of;
    tn_tensor_info dy, dbias, dweights;
    tn__produced out;
} backward;

static tn_status check_dweights(tn__op_call *call, const tn_activation_backward_args *args,
                                backward *b) {
    if (tn__is_no_tensor(args->dweights)) return TN_OK;
    return tn__op_require_fp32_vector(call, "dweights", args->dweights, b->of.x_info.rows,
                                      "one for each row of x", &b->dweights);
}

static tn_status check_backward(tn__op_call *call, const tn_activation_backward_args *args,
                                backward *b) {
    TN_TRY(check_operand(call, args->activation, args->gated, &b->of));
    const tn_tensor_info *x = &b->of.x_info;
    TN_TRY(tn__op_tensor(call, "dy", args->dy, &b->dy));
    TN_TRY(tn__op_require_format(call, "dy", &b->dy, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, "dy", &b->dy, x->dtype));
    TN_TRY(tn__op_require_shape(call, "dy", &b->dy, x->rows, b->of.cols, "the shape of y"));
    b->out = (tn__produced){.value = args->dx,
                            .value_role = "dx",
                            .quantized = args->quantized,
                            .dtype = x->dtype,
                            .rows = x->rows,
                            .cols = x->cols};
    TN_TRY(tn__op_check_produced(call, &b->out));
    TN_TRY(tn__op_check_column_sums(call, "dbias", args->dbias, x->cols, &b->dbias));
    TN_TRY(check_dweights(call, args, b));
    return require_output(
        call, !tn__is_no_tensor(args->dx) || !tn__is_no_tensor(args->quantized.tensor) ||
                  !tn__is_no_tensor(args->dbias) || !tn__is_no_tensor(args->dweights));
}

static tn_status lease_dweights(tn__op_call *call, const tn_activation_backward_args *args,
                                const tn__produce_work *work, tn__row_products_work *products) {
    tn_plane_view view;
    *products = (tn__row_products_work){.curve = work->curve,
                                        .is_gated = work->is_gated,
                                        .x = work->x,
                                        .dy = work->dy,
                                        .skip = work->skip};
    if (tn__is_no_tensor(args->dweights)) return TN_OK;
    TN_TRY(tn__op_require_kept(call, work->skip, "dweights", args->dweights, TN_PLANE_DATA));
    TN_TRY(tn__op_lease(call, args->dweights, TN_PLANE_DATA, TN_WRITE, &view));
    products->sums = view.data;
    return TN_OK;
}

static tn_status lease_backward(tn__op_call *call, const tn_activation_backward_args *args,
                                const backward *b, tn__produce_work *work, tn__column_sums *sums,
                                tn__row_products_work *products) {
    tn__matrix dy;
    TN_TRY(tn__op_lease_matrix(call, args->dy, &b->dy, TN_READ, &dy));
    work->dy = dy.data;
    TN_TRY(lease_operand(call, &b->of, work));
    TN_TRY(tn__op_lease_skip(call, args->skip, &work->skip));
    TN_TRY(tn__op_lease_column_sums(call, "dbias", args->dbias, &b->dbias,
                                    args->accumulate_dbias != 0, work->skip, sums));
    TN_TRY(lease_dweights(call, args, work, products));
    return tn__op_lease_produced(call, &b->out, work->skip, &work->cast);
}

/* What is made of x and dy but for the sums over rows: nothing, if only those are wanted. */
static tn_status run_backward(tn__op_call *call, const tn_activation_backward_args *args,
                              tn__produce_work *work, tn__column_sums *sums,
                              const tn__row_products_work *products) {
    const tn__quantize_work *cast = &work->cast;
    if (cast->src.data || cast->has_row || cast->has_col || sums->to.data)
        TN_TRY(tn__op_produce(call, work, sums, args->scope));
    if (!products->sums || work->x.rows == 0) return TN_OK;
    return TN__OP_RUN(call, row_products, products);
}

tn_status tn_activation_backward(const tn_activation_backward_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_activation_backward", stream);
    tn__produce_work work = {.producer = TN__PRODUCE_GRADIENT};
    tn__row_products_work products;
    tn__column_sums sums;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    backward b = {.of = {.x = args->x, .weights = args->weights}};
    TN_TRY(check_backward(&call, args, &b));
    work.curve = b.of.curve;
    work.is_gated = args->gated != 0;
    tn_status status = lease_backward(&call, args, &b, &work, &sums, &products);
    if (status == TN_OK) status = run_backward(&call, args, &work, &sums, &products);
    return tn__op_finish(&call, status);
}

/* ---- the gradient of a bias ---------------------------------------------------------------- */

tn_status tn_bias_gradient(const tn_bias_gradient_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_bias_gradient", stream);
    tn__produce_work work = {.producer = TN__PRODUCE_ACTIVATION,
                             .curve = {.kind = TN__CURVE_IDENTITY}};
    tn_tensor_info dy, dbias;
    tn__column_sums sums;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(tn__op_tensor(&call, "dy", args->dy, &dy));
    TN_TRY(tn__op_require_float(&call, "dy", &dy));
    tn__produced out = {
        .quantized = args->quantized, .dtype = dy.dtype, .rows = dy.rows, .cols = dy.cols};
    TN_TRY(tn__op_check_produced(&call, &out));
    TN_TRY(require_output(&call, !tn__is_no_tensor(args->dbias)));
    TN_TRY(tn__op_check_column_sums(&call, "dbias", args->dbias, dy.cols, &dbias));
    tn_status status = tn__op_lease_matrix(&call, args->dy, &dy, TN_READ, &work.x);
    if (status == TN_OK) status = tn__op_lease_skip(&call, args->skip, &work.skip);
    if (status == TN_OK)
        status = tn__op_lease_column_sums(&call, "dbias", args->dbias, &dbias,
                                          args->accumulate != 0, work.skip, &sums);
    if (status == TN_OK) status = tn__op_lease_produced(&call, &out, work.skip, &work.cast);
    if (status == TN_OK) status = tn__op_produce(&call, &work, &sums, args->scope);
    return tn__op_finish(&call, status);
}
