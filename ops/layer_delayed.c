/* Weight gradients that a layer's backward has left for later. */
#include "layer_product.h"

void tn__layer_delay(const tn_layer_gradient *gradient, const tn__layer_operand *dy,
                     const tn__layer_operand *x, int is_saved_x, tn_delayed_gradient *out) {
    *out = (tn_delayed_gradient){.dy = dy->tensor,
                                 .x = x->tensor,
                                 .dweight = gradient->dweight,
                                 .accumulate = gradient->accumulate,
                                 .is_callers_dy = !dy->is_kept,
                                 .is_callers_x = !x->is_kept && !is_saved_x};
}

typedef struct product {
    tn_tensor_info dy, x, dweight;
    tn__gemm_plane_pair planes;
    int dequantizes; /* x, as a backward in TN_BACKWARD_DEQUANTIZED would have */
} product;

static int is_plain(const tn_tensor_info *info) { return info->format == TN_FORMAT_PLAIN; }

static tn_status check_operands(tn__op_call *call, product *p) {
    p->dequantizes = is_plain(&p->dy) && !is_plain(&p->x);
    if (p->dequantizes) {
        const tn_architecture architecture = tn_device_architecture(call->device);
        p->planes.a = TN_PLANE_DATA;
        TN_TRY(tn__op_require_float(call, "delayed->dy", &p->dy));
        return tn_format_operand(p->x.format, architecture, TN_OPERAND_FPROP_A, &p->planes.b);
    }
    TN_TRY(tn__op_require_format(call, "delayed->x", &p->x, p->dy.format));
    if (is_plain(&p->dy)) {
        TN_TRY(tn__op_require_float(call, "delayed->dy", &p->dy));
        TN_TRY(tn__op_require_dtype(call, "delayed->x", &p->x, p->dy.dtype));
    }
    return tn__gemm_planes(call, TN_GEMM_WGRAD, p->dy.format, p->x.format, &p->planes);
}

static tn_status check(tn__op_call *call, const tn_delayed_gradient *delayed, product *p) {
    TN_REQUIRE(delayed, "%s: delayed is NULL", call->name);
    if (tn__is_no_tensor(delayed->dweight))
        return TN_FAIL(TN_INVALID_STATE,
                       "%s: delayed->dweight is {0}: no backward with gradient.delay has left "
                       "anything to do, or it has been done",
                       call->name);
    TN_TRY(tn__op_tensor(call, "delayed->dweight", delayed->dweight, &p->dweight));
    TN_TRY(tn__op_tensor(call, "delayed->dy", delayed->dy, &p->dy));
    TN_TRY(tn__op_tensor(call, "delayed->x", delayed->x, &p->x));
    TN_TRY(tn__op_require_float(call, "delayed->dweight", &p->dweight));
    TN_TRY(check_operands(call, p));
    TN_TRY(tn__op_require_shape(call, "delayed->x", &p->x, p->dy.rows, p->x.cols,
                                "its rows are dy's"));
    return tn__op_require_shape(call, "delayed->dweight", &p->dweight, p->dy.cols, p->x.cols,
                                "dy's columns x x's columns");
}

static tn_status open_operand(tn__op_call *call, tn_tensor tensor, const tn_tensor_info *info,
                              tn_plane plane, tn__layer_operand *out) {
    if (is_plain(info)) return tn__layer_read(call, tensor, info, out);
    return tn__layer_open(call, tensor, plane, out);
}

static tn_status run(tn__op_call *call, const tn_delayed_gradient *delayed, tn_scope scope,
                     const product *p) {
    tn__layer_pending pending = {.has_product = 0};
    tn__layer_operand dy, x, dequantized;
    const tn__layer_operand *multiplied = &x;
    TN_TRY(tn__layer_lease_dweight(call, delayed->dweight, &p->dweight, delayed->accumulate,
                                   &pending));
    TN_TRY(open_operand(call, delayed->dy, &p->dy, p->planes.a, &dy));
    TN_TRY(open_operand(call, delayed->x, &p->x, p->planes.b, &x));
    if (p->dequantizes) {
        TN_TRY(tn__layer_dequantize(call, scope, &x, p->planes.b, p->dy.dtype, &dequantized));
        multiplied = &dequantized;
    }
    TN_TRY(tn__layer_wgrad(call, scope, &dy, multiplied, p->planes, delayed->accumulate, &pending));
    return tn__layer_finish(call, &pending, 1);
}

tn_status tn_weight_gradient(tn_delayed_gradient *delayed, tn_scope scope, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_weight_gradient", stream);
    product p;
    TN_TRY(tn__op_init());
    TN_TRY(check(&call, delayed, &p));
    if (!delayed->is_callers_dy) tn__op_spend(&call, &delayed->dy);
    if (!delayed->is_callers_x) tn__op_spend(&call, &delayed->x);
    TN_TRY(tn__op_finish(&call, run(&call, delayed, scope, &p)));
    *delayed = (tn_delayed_gradient)TN_DELAYED_GRADIENT_INIT;
    return TN_OK;
}
