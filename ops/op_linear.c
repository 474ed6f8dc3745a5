/* The Linear layer: y = x w^T and its two gradients, over block-scaled FP8.
 *
 * What is alive when (w is 2D, N x K; x and dy become 1D in scratch):
 *
 *     forward    x_q ROW   (w ROW)   [saved_x COL, trainable weights only]
 *                in the last layer, while the product runs, w COL is derived
 *     backward   dy_q ROW  (w COL)   dgrad, while the next weight's COL is derived;
 *                                    then w COL is released
 *                dy_q COL  (saved_x COL)                     wgrad
 *
 * Invariant: between forward and backward nothing of a frozen layer is alive but w's ROW plane,
 * and COL is alive only from just before dgrad to just after it, where w's policy says so.
 */
#include "op_cast.h"
#include "op_gemm.h"

/* x and dy are quantized so, in the weight's scale mode. */
static const tn_dtype activation_dtype = TN_E4M3;

/* An FP8 copy of a PLAIN tensor in scratch, its planes under the call's leases. */
typedef struct quantized {
    tn_tensor tensor;
    tn_tensor_info info;
} quantized;

static tn_status make_quantized(tn__op_call *call, tn_scope scope, const char *name,
                                const tn_tensor_info *of, tn_scale_mode mode, quantized *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = TN_FORMAT_FP8_BLOCK_1D;
    config.dtype = activation_dtype;
    config.rank = 2;
    config.shape[0] = of->rows, config.shape[1] = of->cols;
    config.scale_mode = mode;
    config.name = name;
    TN_TRY(tn__op_scratch(call, scope, &config, &out->tensor));
    return tn__op_tensor(call, name, out->tensor, &out->info);
}

/* The view of a plane that the cast makes; the plan has it from now on. */
static tn_plane_view *planned_view(tn__quantize_plan *plan, tn_plane plane) {
    if (plane == TN_PLANE_COL) {
        plan->has_col = 1;
        return &plan->col;
    }
    plan->has_row = 1;
    return &plan->row;
}

static tn__operand planned_operand(const tn__quantize_plan *plan, tn_plane plane) {
    return tn__gemm_operand(plan->dst->format, plane == TN_PLANE_COL ? &plan->col : &plan->row);
}

static tn_status lease_planned(tn__op_call *call, tn_tensor tensor, tn_plane plane,
                               tn__quantize_plan *plan) {
    return tn__op_lease(call, tensor, plane, TN_WRITE, planned_view(plan, plane));
}

/* What the three GEMMs of a layer read. */
typedef struct layer_planes {
    tn__gemm_plane_pair fprop; /* x, w */
    tn__gemm_plane_pair dgrad; /* dy, w */
    tn__gemm_plane_pair wgrad; /* dy, x */
} layer_planes;

static tn_status planes_of(const tn__op_call *call, const tn_tensor_info *weight,
                           layer_planes *out) {
    const tn_format scaled_1d = TN_FORMAT_FP8_BLOCK_1D;
    TN_TRY(tn__gemm_planes(call, TN_GEMM_FPROP, scaled_1d, weight->format, &out->fprop));
    TN_TRY(tn__gemm_planes(call, TN_GEMM_DGRAD, scaled_1d, weight->format, &out->dgrad));
    return tn__gemm_planes(call, TN_GEMM_WGRAD, scaled_1d, scaled_1d, &out->wgrad);
}

static tn_status check_weight(tn__op_call *call, tn_tensor weight, tn_tensor_info *info) {
    TN_TRY(tn__op_tensor(call, "weight", weight, info));
    return tn__op_require_format(call, "weight", info, TN_FORMAT_FP8_BLOCK_2D);
}

static tn_status check_next_weight(tn__op_call *call, tn_tensor next, tn_tensor_info *info) {
    if (tn__is_no_tensor(next)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "next_weight", next, info));
    return tn__op_require_format(call, "next_weight", info, TN_FORMAT_FP8_BLOCK_2D);
}

/* Between what a product reads and the product. It is bound by its operations and leaves the memory
 * idle, as the casts before and after it do not; so this waits for all that is on the call's
 * stream, which is one event, and the pool need not wait for what used the memory before. */
static tn_status derive_next(tn__op_call *call, tn_tensor next, tn_plane plane, tn_stream side) {
    return tn__is_no_tensor(next) ? TN_OK : tn__op_derive_ahead(call, next, plane, side);
}

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct forward_tensors {
    tn_tensor_info x, weight, next_weight, y, saved_x;
    layer_planes planes;
    int saves_x;
} forward_tensors;

static tn_status check_saved_x(tn__op_call *call, tn_tensor saved_x, const tn_tensor_info *weight,
                               int64_t rows, int64_t cols, tn_tensor_info *info) {
    TN_TRY(tn__op_tensor(call, "saved_x", saved_x, info));
    TN_TRY(tn__op_require_format(call, "saved_x", info, TN_FORMAT_FP8_BLOCK_1D));
    TN_TRY(tn__op_require_dtype(call, "saved_x", info, activation_dtype));
    TN_REQUIRE(info->scale_mode == weight->scale_mode,
               "%s: saved_x (tensor %s) has scale mode %d, expected %d, weight's (tensor %s)",
               call->name, info->name, (int)info->scale_mode, (int)weight->scale_mode,
               weight->name);
    return tn__op_require_shape(call, "saved_x", info, rows, cols, "the shape of x");
}

static tn_status check_forward(tn__op_call *call, const tn_linear_forward_args *args,
                               forward_tensors *t) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_TRY(tn__op_tensor(call, "x", args->x, &t->x));
    TN_TRY(check_weight(call, args->weight, &t->weight));
    TN_TRY(tn__op_tensor(call, "y", args->y, &t->y));
    TN_TRY(tn__op_require_float(call, "x", &t->x));
    TN_TRY(tn__op_require_float(call, "y", &t->y));
    TN_TRY(tn__op_require_shape(call, "weight", &t->weight, t->weight.rows, t->x.cols,
                                "its columns are x's"));
    TN_TRY(tn__op_require_shape(call, "y", &t->y, t->x.rows, t->weight.rows,
                                "x's rows x weight's rows"));
    TN_TRY(planes_of(call, &t->weight, &t->planes));
    TN_TRY(check_next_weight(call, args->next_weight, &t->next_weight));
    t->saves_x = !tn__is_no_tensor(args->saved_x);
    TN_REQUIRE(!t->saves_x || !t->weight.frozen,
               "%s: saved_x is given, but weight (tensor %s) is frozen: nothing is saved for it",
               call->name, t->weight.name);
    TN_REQUIRE(t->saves_x || t->weight.frozen,
               "%s: saved_x is {0}, but weight (tensor %s) is trainable: its gradient needs it",
               call->name, t->weight.name);
    if (!t->saves_x) return TN_OK;
    return check_saved_x(call, args->saved_x, &t->weight, t->x.rows, t->x.cols, &t->saved_x);
}

/* Leases what forward reads and writes but for y, which comes last. */
static tn_status lease_forward(tn__op_call *call, const tn_linear_forward_args *args,
                               const forward_tensors *t, const quantized *x,
                               tn__quantize_plan *plan, tn__gemm_work *work) {
    tn_plane_view weight;
    TN_TRY(tn__op_lease_matrix(call, args->x, &t->x, TN_READ, &plan->src));
    TN_TRY(tn__op_lease_derived(call, args->weight, t->planes.fprop.b, &weight));
    plan->dst = &x->info;
    TN_TRY(lease_planned(call, x->tensor, t->planes.fprop.a, plan));
    work->a = planned_operand(plan, t->planes.fprop.a);
    work->b = tn__gemm_operand(t->weight.format, &weight);
    work->contracted = t->x.cols;
    TN_TRY(tn__gemm_scratch(call, args->scope, &t->y, work));
    if (!t->saves_x) return TN_OK;
    return lease_planned(call, args->saved_x, t->planes.wgrad.b, plan);
}

tn_status tn_linear_forward(const tn_linear_forward_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_linear_forward", stream);
    forward_tensors t = {.saves_x = 0};
    quantized x = {.tensor = {0}};
    tn__quantize_plan plan = {.amax_epsilon = 0.0f};
    tn__gemm_work work = {.accumulate = 0};
    TN_TRY(tn__op_init());
    TN_TRY(check_forward(&call, args, &t));
    tn_status status =
        make_quantized(&call, args->scope, "quantized x", &t.x, t.weight.scale_mode, &x);
    if (status == TN_OK) status = lease_forward(&call, args, &t, &x, &plan, &work);
    if (status == TN_OK) status = tn__op_lease_matrix(&call, args->y, &t.y, TN_WRITE, &work.d);
    if (status == TN_OK) status = tn__op_quantize(&call, &plan);
    if (status == TN_OK) {
        status = derive_next(&call, args->next_weight, t.planes.dgrad.b, args->side);
    }
    if (status == TN_OK) status = tn__gemm_launch(&call, &work);
    return tn__op_finish(&call, status);
}

/* ---- backward -------------------------------------------------------------------------------- */

typedef struct backward_tensors {
    tn_tensor_info dy, weight, next_weight, saved_x, dx, dw;
    layer_planes planes;
    int wants_dx, wants_dw;
} backward_tensors;

static tn_status check_dw(tn__op_call *call, const tn_linear_backward_args *args,
                          backward_tensors *t) {
    TN_REQUIRE(!t->weight.frozen, "%s: dw is given, but weight (tensor %s) is frozen", call->name,
               t->weight.name);
    TN_REQUIRE(!tn__is_no_tensor(args->saved_x),
               "%s: dw needs saved_x, which is {0}: give tn_linear_forward one", call->name);
    TN_TRY(check_saved_x(call, args->saved_x, &t->weight, t->dy.rows, t->weight.cols, &t->saved_x));
    TN_TRY(tn__op_tensor(call, "dw", args->dw, &t->dw));
    TN_TRY(tn__op_require_float(call, "dw", &t->dw));
    return tn__op_require_shape(call, "dw", &t->dw, t->weight.rows, t->weight.cols,
                                "the shape of weight");
}

static tn_status check_backward(tn__op_call *call, const tn_linear_backward_args *args,
                                backward_tensors *t) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    t->wants_dx = !tn__is_no_tensor(args->dx);
    t->wants_dw = !tn__is_no_tensor(args->dw);
    TN_TRY(tn__op_tensor(call, "dy", args->dy, &t->dy));
    TN_TRY(check_weight(call, args->weight, &t->weight));
    TN_TRY(tn__op_require_float(call, "dy", &t->dy));
    TN_TRY(tn__op_require_shape(call, "dy", &t->dy, t->dy.rows, t->weight.rows,
                                "its columns are weight's rows"));
    TN_TRY(planes_of(call, &t->weight, &t->planes));
    TN_TRY(check_next_weight(call, args->next_weight, &t->next_weight));
    if (t->wants_dx) {
        TN_TRY(tn__op_tensor(call, "dx", args->dx, &t->dx));
        TN_TRY(tn__op_require_float(call, "dx", &t->dx));
        TN_TRY(tn__op_require_shape(call, "dx", &t->dx, t->dy.rows, t->weight.cols,
                                    "dy's rows x weight's columns"));
    }
    return t->wants_dw ? check_dw(call, args, t) : TN_OK;
}

/* dy in both planes that are wanted, in one pass over it. */
static tn_status quantize_dy(tn__op_call *call, const tn_linear_backward_args *args,
                             const backward_tensors *t, tn__quantize_plan *plan, quantized *dy) {
    TN_TRY(make_quantized(call, args->scope, "quantized dy", &t->dy, t->weight.scale_mode, dy));
    plan->dst = &dy->info;
    TN_TRY(tn__op_lease_matrix(call, args->dy, &t->dy, TN_READ, &plan->src));
    if (t->wants_dx) TN_TRY(lease_planned(call, dy->tensor, t->planes.dgrad.a, plan));
    if (t->wants_dw) TN_TRY(lease_planned(call, dy->tensor, t->planes.wgrad.a, plan));
    return tn__op_quantize(call, plan);
}

/* dx = dy w. The weight's COL plane is under lease only from here to the end of here. The next
 * weight's is derived only after this one's lease, which waits for all that is on the stream that
 * derived it. */
static tn_status dgrad(tn__op_call *call, const tn_linear_backward_args *args,
                       const backward_tensors *t, const tn__quantize_plan *dy) {
    tn__gemm_work work = {.contracted = t->dy.cols};
    tn_plane_view weight;
    int weight_lease = call->lease_count;
    TN_TRY(tn__op_lease_derived(call, args->weight, t->planes.dgrad.b, &weight));
    work.a = planned_operand(dy, t->planes.dgrad.a);
    work.b = tn__gemm_operand(t->weight.format, &weight);
    TN_TRY(tn__gemm_scratch(call, args->scope, &t->dx, &work));
    TN_TRY(tn__op_lease_matrix(call, args->dx, &t->dx, TN_WRITE, &work.d));
    TN_TRY(derive_next(call, args->next_weight, t->planes.dgrad.b, args->side));
    TN_TRY(tn__gemm_launch(call, &work));
    return tn__op_end_lease(call, weight_lease);
}

/* dw = dy^T x, or added to it. */
static tn_status wgrad(tn__op_call *call, const tn_linear_backward_args *args,
                       const backward_tensors *t, const tn__quantize_plan *dy) {
    tn__gemm_work work = {.contracted = t->dy.rows, .accumulate = args->accumulate_dw != 0};
    tn_plane_view x;
    TN_TRY(tn__op_lease(call, args->saved_x, t->planes.wgrad.b, TN_READ, &x));
    work.a = planned_operand(dy, t->planes.wgrad.a);
    work.b = tn__gemm_operand(t->saved_x.format, &x);
    TN_TRY(tn__gemm_scratch(call, args->scope, &t->dw, &work));
    TN_TRY(tn__op_lease_matrix(call, args->dw, &t->dw, work.accumulate ? TN_UPDATE : TN_WRITE,
                               &work.d));
    return tn__gemm_launch(call, &work);
}

tn_status tn_linear_backward(const tn_linear_backward_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_linear_backward", stream);
    backward_tensors t = {.wants_dx = 0};
    quantized dy = {.tensor = {0}};
    tn__quantize_plan plan = {.amax_epsilon = 0.0f};
    tn_status status = TN_OK;
    TN_TRY(tn__op_init());
    TN_TRY(check_backward(&call, args, &t));
    if (t.wants_dx || t.wants_dw) status = quantize_dy(&call, args, &t, &plan, &dy);
    if (status == TN_OK && t.wants_dx) status = dgrad(&call, args, &t, &plan);
    if (status == TN_OK) status = tn_plane_release(args->weight, t.planes.dgrad.b, stream);
    if (status == TN_OK && t.wants_dw) status = wgrad(&call, args, &t, &plan);
    return tn__op_finish(&call, status);
}
