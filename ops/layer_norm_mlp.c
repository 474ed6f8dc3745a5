/* LayerNormMLP forward, and what it shares with its backward: see layer_norm_mlp.h. */
#include "layer_norm_mlp.h"

#include "tensor_internal.h"

const tn__layer_roles tn__mlp_roles[2] = {{.weight = "w1.weight",
                                           .bias = "w1.bias",
                                           .source = "w1.source",
                                           .skip = "w1.skip",
                                           .weight_scale = "w1.weight_scale",
                                           .x_scale = "w1.x_scale",
                                           .dy_scale = "w1.dy_scale",
                                           .dweight = "gradient1.dweight",
                                           .dbias = "gradient1.dbias"},
                                          {.weight = "w2.weight",
                                           .bias = "w2.bias",
                                           .source = "w2.source",
                                           .skip = "w2.skip",
                                           .weight_scale = "w2.weight_scale",
                                           .x_scale = "w2.x_scale",
                                           .dy_scale = "w2.dy_scale",
                                           .dweight = "gradient2.dweight",
                                           .dbias = "gradient2.dbias"}};

/* ---- checks ---------------------------------------------------------------------------------- */

tn_status tn__mlp_check_weights(tn__op_call *call, const tn_layer_weight *w1,
                                const tn_layer_weight *w2, int gated, const tn_layer_common *common,
                                const tn_layer_common *common2, tn__layer_product p[2]) {
    TN_TRY(tn__layer_check_weight(call, &tn__mlp_roles[0], w1, common, &p[0]));
    TN_TRY(tn__layer_check_weight(call, &tn__mlp_roles[1], w2, common2, &p[1]));
    const tn_tensor_info *first = &p[0].weight, *second = &p[1].weight;
    TN_REQUIRE(gated == 0 || gated == 1, "%s: gated is %d, expected 0 or 1", call->name, gated);
    TN_REQUIRE(first->rows % (gated ? 2 : 1) == 0,
               "%s: w1.weight (tensor %s) has %lld rows, expected an even number: it is gated",
               call->name, first->name, (long long)first->rows);
    return tn__op_require_shape(
        call, "w2.weight", second, second->rows, gated ? first->rows / 2 : first->rows,
        gated ? "its columns are half of w1.weight's rows" : "its columns are w1.weight's rows");
}

tn_status tn__mlp_check_activation(const tn__op_call *call, tn_activation activation, int gated,
                                   const tn__layer_product p[2], const tn_tensor_info *x,
                                   tn__layer_activation *out) {
    *out = (tn__layer_activation){.is_gated = gated, .shape = *x};
    out->shape.cols = p[1].weight.cols;
    return tn__op_activation_curve(call, activation, &out->curve);
}

/* ---- the activation -------------------------------------------------------------------------- */

tn_status tn__layer_prepare_activation(tn__op_call *call, const tn__layer_product *p2,
                                       const tn__matrix *hidden, const tn__layer_wants *wants,
                                       tn__layer_activation *activation) {
    static const char *const names[] = {"activated", "quantized activated"};
    tn__produce_work *work = &activation->work;
    *work = (tn__produce_work){.producer = TN__PRODUCE_ACTIVATION,
                               .curve = activation->curve,
                               .is_gated = activation->is_gated,
                               .x = *hidden};
    TN_TRY(tn__layer_make_outputs(call, p2, names, &activation->shape, wants, &activation->made));
    TN_TRY(tn__op_lease_produced(call, &activation->made.produced, NULL, &work->cast));
    tn__layer_take_views(&work->cast, &activation->made);
    return TN_OK;
}

tn_status tn__layer_run_activation(tn__op_call *call, tn__layer_activation *activation) {
    tn__column_sums no_sums = {.accumulate = 0};
    TN_TRY(tn__op_produce(call, &activation->work, &no_sums, (tn_scope){0}));
    return tn__layer_cast_made(call, &activation->made);
}

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct forward {
    tn_tensor_info y;
    tn__layer_product p[2];
    tn__layer_norm norm;
    tn_tensor hidden;
    tn__layer_home hidden_home;
    tn__matrix hidden_values;
    tn__layer_activation activation;
} forward;

static tn_status check_forward(tn__op_call *call, const tn_norm_mlp_forward_args *args,
                               const tn_norm_mlp_saved *saved, forward *f) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_TRY(tn__layer_check_norm(call, &args->norm, &args->common, &f->norm));
    TN_TRY(tn__layer_check_common(call, &args->common));
    TN_TRY(tn__mlp_check_weights(call, &args->w1, &args->w2, args->gated, &args->common,
                                 &args->common, f->p));
    const tn_tensor_info *x = &f->norm.norm.x, *w1 = &f->p[0].weight, *w2 = &f->p[1].weight;
    TN_TRY(tn__mlp_check_activation(call, args->activation, args->gated, f->p, x, &f->activation));
    TN_TRY(tn__layer_check_input(call, &f->p[0], "norm.x", x));
    TN_TRY(tn__layer_check_input(call, &f->p[1], "norm.x", x));
    TN_TRY(tn__op_require_shape(call, "w1.weight", w1, w1->rows, x->cols, "its columns are x's"));
    TN_TRY(tn__op_tensor(call, "y", args->y, &f->y));
    TN_TRY(tn__op_require_float(call, "y", &f->y));
    TN_TRY(tn__op_require_shape(call, "y", &f->y, x->rows, w2->rows, "x's rows x w2's rows"));
    TN_TRY(tn__layer_check_saved_set(call, saved, &args->common));
    TN_TRY(tn__layer_check_forward(call, &f->p[0]));
    return tn__layer_check_forward(call, &f->p[1]);
}

/* Of a tensor that is leased behind the first product: a view says already where it begins. */
static tn_status require_aligned(const tn__op_call *call, tn_tensor tensor,
                                 const tn_tensor_info *info) {
    tn__element_range range;
    if (tn__is_no_tensor(tensor) || info->format != TN_FORMAT_PLAIN) return TN_OK;
    TN_TRY(tn__tensor_elements(tensor, &range));
    return tn__op_require_whole_16(call, (uintptr_t)range.first * tn_dtype_bytes(info->dtype));
}

/* A source is read by a cast of its own, which ends its lease. */
static tn_status check_apart(const tn__op_call *call, const tn_norm_mlp_forward_args *args) {
    const tn__op_named outputs[] = {
        {"norm.sum", args->norm.sum}, {"norm.normed", args->norm.normed}, {"y", args->y}};
    const tn__op_named sources[] = {{tn__mlp_roles[0].source, args->w1.source},
                                    {tn__mlp_roles[1].source, args->w2.source}};
    return tn__op_require_apart(call, outputs, 3, sources, 2);
}

/* What the second product would refuse when the norm has written. */
static tn_status ask(const tn__op_call *call, const tn_norm_mlp_forward_args *args,
                     const forward *f) {
    const tn_tensor_info *x = &f->norm.norm.x;
    const tn__layer_product *second = &f->p[1];
    TN_TRY(tn__layer_ask(call, &f->p[0], TN_GEMM_FPROP, x->rows, x->dtype, x->dtype, 0));
    TN_TRY(tn__layer_ask(call, second, TN_GEMM_FPROP, x->rows, x->dtype, f->y.dtype, 0));
    if (tn__is_empty(&f->y) || second->weight.cols == 0) return TN_OK;
    TN_TRY(require_aligned(call, args->w2.weight, &second->weight));
    TN_TRY(require_aligned(call, args->w2.bias, &second->bias));
    return require_aligned(call, args->y, &f->y);
}

static tn_status make_hidden(tn__op_call *call, const tn_layer_common *common, forward *f,
                             tn_tensor_info *info) {
    const tn_tensor_info shape = tn__mlp_hidden(&f->p[0], &f->norm.norm.x);
    const tn__layer_home home = tn__layer_statistics_home(common);
    f->hidden_home = home == TN__LAYER_SAVED ? TN__LAYER_SAVED : TN__LAYER_SCRATCH;
    TN_TRY(tn__layer_plain(call, common, f->hidden_home, "hidden", &shape, &f->hidden));
    return tn__op_tensor(call, "hidden", f->hidden, info);
}

static tn_status run_first(tn__op_call *call, const tn_norm_mlp_forward_args *args, forward *f) {
    const tn__layer_product *p = &f->p[0];
    const tn__layer_wants wants = tn__layer_norm_wants(p, args->norm.normed);
    const tn__layer_home statistics = tn__layer_statistics_home(&args->common);
    tn_tensor_info hidden;
    tn__gemm_work work;
    TN_TRY(tn__layer_prepare_norm(call, p, &wants, statistics, &f->norm));
    TN_TRY(make_hidden(call, &args->common, f, &hidden));
    tn__layer_operand *operand = tn__layer_made_operand(&f->norm.made);
    TN_TRY(tn__layer_fprop(call, p, operand, &hidden, &work));
    TN_TRY(tn__op_lease_matrix(call, f->hidden, &hidden, TN_WRITE, &work.d));
    f->hidden_values = work.d;
    TN_TRY(tn__layer_read_weight(call, p, &work));
    TN_TRY(tn__gemm_require_aligned(call, &work));
    TN_TRY(tn__layer_run_norm(call, &f->norm));
    TN_TRY(tn__layer_launch(call, &work));
    return tn__layer_done_with_x(call, p, &f->norm.made, 0);
}

static tn_status run_second(tn__op_call *call, const tn_norm_mlp_forward_args *args, forward *f) {
    const tn__layer_product *p = &f->p[1];
    const tn__layer_wants wants = tn__layer_norm_wants(p, (tn_tensor){0});
    tn__gemm_work work;
    TN_TRY(tn__layer_prepare_activation(call, p, &f->hidden_values, &wants, &f->activation));
    tn__layer_operand *operand = tn__layer_made_operand(&f->activation.made);
    TN_TRY(tn__layer_fprop(call, p, operand, &f->y, &work));
    TN_TRY(tn__op_lease_matrix(call, args->y, &f->y, TN_WRITE, &work.d));
    TN_TRY(tn__layer_read_weight(call, p, &work));
    TN_TRY(tn__layer_run_activation(call, &f->activation));
    if (f->hidden_home == TN__LAYER_SCRATCH) TN_TRY(tn__op_let_go(call, f->hidden));
    TN_TRY(tn__layer_derive_next(call, &args->common, &work));
    TN_TRY(tn__layer_launch(call, &work));
    return tn__layer_done(call, operand, p->fprop.a);
}

static tn_status run_forward(tn__op_call *call, const tn_norm_mlp_forward_args *args, forward *f) {
    TN_TRY(tn__op_reserve_leases(call, TN__MLP_LEASES_MAX));
    TN_TRY(run_first(call, args, f));
    return run_second(call, args, f);
}

tn_status tn_norm_mlp_forward(const tn_norm_mlp_forward_args *args, tn_norm_mlp_saved *saved,
                              tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_norm_mlp_forward", stream);
    forward f;
    TN_TRY(tn__op_init());
    TN_TRY(check_forward(&call, args, saved, &f));
    TN_TRY(check_apart(&call, args));
    TN_TRY(ask(&call, args, &f));
    TN_TRY(tn__op_finish(&call, run_forward(&call, args, &f)));
    if (!saved) return TN_OK;
    *saved = (tn_norm_mlp_saved){.mean = f.norm.args.mean,
                                 .rstd = f.norm.args.rstd,
                                 .normed = tn__layer_kept_tensor(&f.norm.made),
                                 .activated = tn__layer_kept_tensor(&f.activation.made)};
    if (f.hidden_home == TN__LAYER_SAVED) saved->hidden = f.hidden;
    return TN_OK;
}
