/* tn_gemm: operands of the three forms, scratch, launch; tuning and telling. */
#include "op_gemm.h"

/* ---- forms ----------------------------------------------------------------------------------- */

tn_status tn__gemm_planes(const tn__op_call *call, tn_gemm_form form, tn_format a, tn_format b,
                          tn__gemm_plane_pair *out) {
    static const tn_operand operands[][2] = {
        [TN_GEMM_FPROP] = {TN_OPERAND_FPROP_A, TN_OPERAND_FPROP_B},
        [TN_GEMM_DGRAD] = {TN_OPERAND_DGRAD_A, TN_OPERAND_DGRAD_B},
        [TN_GEMM_WGRAD] = {TN_OPERAND_WGRAD_A, TN_OPERAND_WGRAD_B},
    };
    tn_architecture architecture = tn_device_architecture(call->device);
    TN_TRY(tn_format_operand(a, architecture, operands[form][0], &out->a));
    return tn_format_operand(b, architecture, operands[form][1], &out->b);
}

tn__operand tn__gemm_operand(tn_format format, const tn_plane_view *view) {
    tn__operand operand = {.kind = format == TN_FORMAT_FP8_BLOCK_1D ? TN__OPERAND_VECTOR
                                   : format == TN_FORMAT_FP8_TENSOR ? TN__OPERAND_TENSOR
                                                                    : TN__OPERAND_TILE,
                           .dtype = view->dtype,
                           .data = view->data,
                           .rows = view->layout.rows,
                           .scale = view->scale,
                           .scale_stride = view->layout.scale_stride};
    return operand;
}

tn__operand tn__gemm_plain_operand(const tn__matrix *matrix, int is_turned) {
    tn__operand operand = {.kind = TN__OPERAND_PLAIN,
                           .dtype = matrix->dtype,
                           .data = matrix->data,
                           .is_transposed = is_turned,
                           .rows = is_turned ? matrix->cols : matrix->rows};
    return operand;
}

/* ---- the work -------------------------------------------------------------------------------- */

static int64_t contracted_of(tn_gemm_form form, const tn_tensor_info *a) {
    return form == TN_GEMM_WGRAD ? a->rows : a->cols;
}

tn_status tn__gemm_scratch(tn__op_call *call, tn_scope scope, const tn_tensor_info *d,
                           tn__gemm_work *work) {
    work->d = (tn__matrix){d->dtype, NULL, d->rows, d->cols};
    work->scratch = NULL;
    work->scratch_bytes = 0;
    if (tn__is_empty(d) || work->contracted == 0) return TN_OK;
    TN_TRY(tn__gemm_take_pin(call, work));
    TN_TRY(call->ops->gemm_scratch_bytes(call->device, work, &work->scratch_bytes));
    return tn__op_scratch_bytes(call, scope, work->scratch_bytes, &work->scratch);
}

int tn__gemm_has_product(const tn__gemm_work *work) {
    return work->d.rows > 0 && work->d.cols > 0 && work->contracted > 0;
}

tn_status tn__gemm_require_aligned(const tn__op_call *call, const tn__gemm_work *work) {
    if (!tn__gemm_has_product(work)) return TN_OK;
    uintptr_t all = (uintptr_t)work->bias.data | (uintptr_t)work->a.scale;
    all |= (uintptr_t)work->b.scale | (work->d_is_unaligned ? 0 : (uintptr_t)work->d.data);
    all |= work->a.is_unaligned ? 0 : (uintptr_t)work->a.data;
    all |= work->b.is_unaligned ? 0 : (uintptr_t)work->b.data;
    return tn__op_require_whole_16(call, all);
}

tn_status tn__gemm_launch(tn__op_call *call, const tn__gemm_work *work) {
    const tn__matrix *d = &work->d;
    if (d->rows == 0 || d->cols == 0) return TN_OK;
    if (work->contracted == 0) {
        size_t bytes = (size_t)d->rows * (size_t)d->cols * tn_dtype_bytes(d->dtype);
        if (work->accumulate) return TN_OK;
        return tn__op_ran(call, tn_fill(call->device, d->data, 0, bytes, call->stream));
    }
    TN_TRY(tn__gemm_require_aligned(call, work));
    return TN__OP_RUN(call, gemm, work);
}

static tn_status lease_bias(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                            tn__gemm_work *work) {
    if (tn__is_no_tensor(args->bias)) return TN_OK;
    TN_TRY(tn__op_lease_matrix(call, args->bias, &t->bias, TN_READ, &work->bias));
    work->bias.rows = 1, work->bias.cols = t->d.cols;
    return TN_OK;
}

/* Everything but d, scratch and the launch. */
static tn_status begin_work(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                            tn__gemm_work *work) {
    work->accumulate = args->accumulate != 0;
    work->engine = tn__gemm_pinned(args);
    work->contracted = contracted_of(args->form, &t->a);
    TN_TRY(t->engine->lease(call, args, t, work));
    return lease_bias(call, args, t, work);
}

/* A pin that is none is refused before anything is leased for writing. */
static tn_status check_pin(const tn__op_call *call, const tn__gemm_tensors *t, int algorithm,
                           tn__gemm_work *work) {
    tn_gemm_choice choice;
    TN_REQUIRE(algorithm >= 0, "%s: algorithm is %d, expected 0 or more", call->name, algorithm);
    work->algorithm = algorithm;
    if (algorithm == 0 || tn__is_empty(&t->d) || work->contracted == 0) return TN_OK;
    work->d = (tn__matrix){t->d.dtype, NULL, t->d.rows, t->d.cols};
    return call->ops->gemm_choice(call->device, work, &choice);
}

tn_status tn_gemm(const tn_gemm_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_gemm", stream);
    tn__gemm_tensors t = {.engine = NULL};
    tn__gemm_work work = {.accumulate = 0};
    tn__gemm_pass pass;
    TN_TRY(tn__op_init());
    TN_TRY(tn__gemm_check(&call, args, &t));
    tn_status status = begin_work(&call, args, &t, &work);
    if (status == TN_OK) status = check_pin(&call, &t, args->algorithm, &work);
    if (status == TN_OK) status = tn__gemm_scratch(&call, args->scope, &t.d, &work);
    if (status == TN_OK) status = tn__gemm_lease_outputs(&call, args, &t, &work, &pass);
    if (status == TN_OK) status = tn__gemm_launch(&call, &work);
    if (status == TN_OK) status = tn__gemm_run_pass(&call, &pass);
    return tn__op_finish(&call, status);
}

/* ---- tuning --------------------------------------------------------------------------------- */

static tn_status require_no_capture(const tn__op_call *call) {
    int is_capturing = 0;
    TN_TRY(tn__device_driver(call->device)
               ->stream_is_capturing(tn__device_state(call->device), call->stream, &is_capturing));
    if (!is_capturing) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "%s: the stream captures: it can not be waited for",
                   call->name);
}

/* In d's place: what the products are written to while they are timed. */
static tn_status make_d(tn__op_call *call, tn_scope scope, const tn_tensor_info *d,
                        tn__matrix *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    config.dtype = d->dtype;
    config.rank = 2;
    config.shape[0] = d->rows, config.shape[1] = d->cols;
    config.name = "tuned product";
    TN_TRY(tn__op_scratch(call, scope, &config, &tensor));
    TN_TRY(tn__op_lease_matrix(call, tensor, d, TN_WRITE, out));
    size_t bytes = (size_t)d->rows * (size_t)d->cols * tn_dtype_bytes(d->dtype);
    return tn_fill(call->device, out->data, 0, bytes, call->stream);
}

/* Of the one engine that a call takes. *is_timed: there was something to multiply, and timed. */
static tn_status tune_engine(const tn_gemm_args *args, tn_stream stream, tn__gemm_tensors *t,
                             int *is_timed) {
    tn__op_call call = tn__op_begin("tn_gemm_tune", stream);
    tn__gemm_work work = {.tunes = 1};
    tn__matrix d;
    TN_TRY(tn__gemm_check(&call, args, t));
    TN_TRY(require_no_capture(&call));
    *is_timed = 0;
    if (tn__is_empty(&t->d) || contracted_of(args->form, &t->a) == 0) return TN_OK;
    tn_status status = begin_work(&call, args, t, &work);
    if (status == TN_OK) status = tn__gemm_scratch(&call, args->scope, &t->d, &work);
    if (status == TN_OK) status = make_d(&call, args->scope, &t->d, &d);
    if (status == TN_OK) {
        work.d = d;
        status = TN__OP_RUN(&call, gemm_tune, &work);
    }
    *is_timed = call.ops->gemm_prefer != NULL;
    return tn__op_finish(&call, status);
}

/* What a call does without a look at its tensors' planes. */
static tn_status outline(const tn_gemm_args *args, const tn__gemm_tensors *t, tn__gemm_work *work) {
    work->accumulate = args->accumulate != 0;
    work->engine = tn__gemm_pinned(args);
    work->algorithm = args->algorithm;
    work->contracted = contracted_of(args->form, &t->a);
    work->d = (tn__matrix){t->d.dtype, NULL, t->d.rows, t->d.cols};
    if (!tn__is_no_tensor(args->bias)) work->bias = (tn__matrix){t->bias.dtype, NULL, 1, t->d.cols};
    return t->engine->outline(args, t, work);
}

/* The formats' own engine has been tuned: the others are, and all compared. */
static tn_status tune_others(const tn_gemm_args *own, const tn__gemm_tensors *t, tn_stream stream) {
    tn_gemm_engine fastest = t->id;
    tn_device *device = tn_pool_device(t->d.pool);
    tn__gemm_work work = {.accumulate = 0};
    TN_TRY(tn__gemm_time_engines(own, t->id, &t->d, stream, &fastest));
    TN_TRY(outline(own, t, &work));
    work.algorithm = 0;
    return tn__op_table_of(device)->gemm_prefer(device, &work,
                                                fastest == t->id ? TN_GEMM_ENGINE_AUTO : fastest);
}

tn_status tn_gemm_tune(const tn_gemm_args *args, tn_stream stream) {
    tn__gemm_tensors t = {.engine = NULL};
    tn_gemm_args own;
    int is_timed = 0;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS("tn_gemm_tune", args);
    own = *args;
    own.may_differ = 0;
    tn_status status = tune_engine(&own, stream, &t, &is_timed);
    if (!tn__gemm_may_differ(args)) return status;
    if (status == TN_UNSUPPORTED) return tune_engine(args, stream, &t, &is_timed);
    if (status == TN_OK && is_timed) status = tune_others(&own, &t, stream);
    return status;
}

/* ---- the choice ------------------------------------------------------------------------------ */

tn_status tn_gemm_choice_get(const tn_gemm_args *args, tn_gemm_choice *out) {
    tn__op_call call = tn__op_begin("tn_gemm_choice_get", NULL);
    tn__gemm_tensors t = {.engine = NULL};
    tn__gemm_work work = {.accumulate = 0};
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    TN_TRY(tn__op_init());
    TN_REQUIRE(out && out->size == sizeof *out,
               "%s: out is NULL, or its size is not that of TN_GEMM_CHOICE_INIT", call.name);
    TN_TRY(tn__gemm_check(&call, args, &t));
    TN_REQUIRE(args->algorithm >= 0, "%s: algorithm is %d, expected 0 or more", call.name,
               args->algorithm);
    TN_TRY(outline(args, &t, &work));
    if (!tn__is_empty(&t.d) && work.contracted > 0)
        TN_TRY(call.ops->gemm_choice(call.device, &work, &choice));
    if (!tn__gemm_is_among_own(choice.engine) || !t.engine->is_automatic) choice.engine = t.id;
    choice.scratch_bytes += tn__gemm_pass_bytes(args, &t);
    *out = choice;
    return TN_OK;
}
