/* tn_gemm: checks of the three forms, operands, scratch, launch. */
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
    int is_vector = format == TN_FORMAT_FP8_BLOCK_1D;
    tn__operand operand = {.kind = is_vector ? TN__OPERAND_VECTOR : TN__OPERAND_TILE,
                           .dtype = view->dtype,
                           .data = view->data,
                           .rows = view->layout.rows,
                           .scale = view->scale,
                           .scale_stride = view->layout.scale_stride};
    return operand;
}

static tn__operand plain_operand(const tn__matrix *matrix, int is_turned) {
    tn__operand operand = {.kind = TN__OPERAND_PLAIN,
                           .dtype = matrix->dtype,
                           .data = matrix->data,
                           .is_transposed = is_turned,
                           .rows = is_turned ? matrix->cols : matrix->rows};
    return operand;
}

/* ---- checks ---------------------------------------------------------------------------------- */

typedef struct gemm_tensors {
    tn_tensor_info a, b, d;
    tn__gemm_plane_pair planes;
    int is_fp8;
} gemm_tensors;

static int is_fp8(const tn_tensor_info *info) { return info->format != TN_FORMAT_PLAIN; }

static tn_status check_shapes(const tn__op_call *call, tn_gemm_form form, const gemm_tensors *t) {
    const tn_tensor_info *a = &t->a, *b = &t->b, *d = &t->d;
    switch (form) {
    case TN_GEMM_FPROP:
        TN_TRY(tn__op_require_shape(call, "b", b, b->rows, a->cols, "its columns are a's"));
        return tn__op_require_shape(call, "d", d, a->rows, b->rows, "a's rows x b's rows");
    case TN_GEMM_DGRAD:
        TN_TRY(tn__op_require_shape(call, "b", b, a->cols, b->cols, "its rows are a's columns"));
        return tn__op_require_shape(call, "d", d, a->rows, b->cols, "a's rows x b's columns");
    default:
        TN_TRY(tn__op_require_shape(call, "b", b, a->rows, b->cols, "its rows are a's"));
        return tn__op_require_shape(call, "d", d, a->cols, b->cols, "a's columns x b's columns");
    }
}

static tn_status check_fp8(const tn__op_call *call, tn_gemm_form form, const gemm_tensors *t) {
    const tn_tensor_info *a = &t->a, *b = &t->b;
    TN_REQUIRE(is_fp8(a) && is_fp8(b),
               "%s: a (tensor %s) is %s and b (tensor %s) is %s: both must be FP8, or both %s",
               call->name, a->name, tn_format_name(a->format), b->name, tn_format_name(b->format),
               tn_format_name(TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_format(call, "a", a, TN_FORMAT_FP8_BLOCK_1D));
    if (form == TN_GEMM_DGRAD) {
        TN_TRY(tn__op_require_format(call, "b (of DGRAD)", b, TN_FORMAT_FP8_BLOCK_2D));
    }
    if (form == TN_GEMM_WGRAD) {
        TN_TRY(tn__op_require_format(call, "b (of WGRAD)", b, TN_FORMAT_FP8_BLOCK_1D));
    }
    if (a->dtype == TN_E5M2 && b->dtype == TN_E5M2) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "%s: a (tensor %s) and b (tensor %s) are both E5M2: one must be E4M3",
                       call->name, a->name, b->name);
    }
    return TN_OK;
}

static tn_status check_operands(const tn__op_call *call, tn_gemm_form form, gemm_tensors *t) {
    t->is_fp8 = is_fp8(&t->a) || is_fp8(&t->b);
    if (t->is_fp8) {
        TN_TRY(check_fp8(call, form, t));
    } else {
        TN_TRY(tn__op_require_float(call, "a", &t->a));
        TN_TRY(tn__op_require_float(call, "b", &t->b));
        TN_TRY(tn__op_require_dtype(call, "b", &t->b, t->a.dtype));
    }
    TN_TRY(tn__op_require_float(call, "d", &t->d));
    TN_TRY(check_shapes(call, form, t));
    return tn__gemm_planes(call, form, t->a.format, t->b.format, &t->planes);
}

static tn_status check_gemm(tn__op_call *call, const tn_gemm_args *args, gemm_tensors *t) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_REQUIRE((unsigned)args->form <= TN_GEMM_WGRAD,
               "%s: form is %d, expected TN_GEMM_FPROP, TN_GEMM_DGRAD or TN_GEMM_WGRAD", call->name,
               (int)args->form);
    TN_TRY(tn__op_tensor(call, "a", args->a, &t->a));
    TN_TRY(tn__op_tensor(call, "b", args->b, &t->b));
    TN_TRY(tn__op_tensor(call, "d", args->d, &t->d));
    return check_operands(call, args->form, t);
}

/* ---- the work -------------------------------------------------------------------------------- */

static int64_t contracted_of(tn_gemm_form form, const tn_tensor_info *a) {
    return form == TN_GEMM_WGRAD ? a->rows : a->cols;
}

static tn_status lease_fp8(tn__op_call *call, const tn_gemm_args *args, const gemm_tensors *t,
                           tn__gemm_work *work) {
    tn_plane_view a, b;
    TN_TRY(tn__op_lease(call, args->a, t->planes.a, TN_READ, &a));
    TN_TRY(tn__op_lease_derived(call, args->b, t->planes.b, &b));
    work->a = tn__gemm_operand(t->a.format, &a);
    work->b = tn__gemm_operand(t->b.format, &b);
    return TN_OK;
}

static tn_status lease_plain(tn__op_call *call, const tn_gemm_args *args, const gemm_tensors *t,
                             tn__gemm_work *work) {
    tn__matrix a, b;
    TN_TRY(tn__op_lease_matrix(call, args->a, &t->a, TN_READ, &a));
    TN_TRY(tn__op_lease_matrix(call, args->b, &t->b, TN_READ, &b));
    work->a = plain_operand(&a, args->form == TN_GEMM_WGRAD);
    work->b = plain_operand(&b, args->form != TN_GEMM_FPROP);
    return TN_OK;
}

tn_status tn__gemm_scratch(tn__op_call *call, tn_scope scope, const tn_tensor_info *d,
                           tn__gemm_work *work) {
    work->d = (tn__matrix){d->dtype, NULL, d->rows, d->cols};
    work->scratch = NULL;
    work->scratch_bytes = 0;
    if (tn__is_empty(d) || work->contracted == 0) return TN_OK;
    TN_TRY(call->ops->gemm_scratch_bytes(call->device, work, &work->scratch_bytes));
    return tn__op_scratch_bytes(call, scope, work->scratch_bytes, &work->scratch);
}

tn_status tn__gemm_launch(tn__op_call *call, const tn__gemm_work *work) {
    const tn__matrix *d = &work->d;
    if (d->rows == 0 || d->cols == 0) return TN_OK;
    if (work->contracted == 0) {
        size_t bytes = (size_t)d->rows * (size_t)d->cols * tn_dtype_bytes(d->dtype);
        if (work->accumulate) return TN_OK;
        return tn__op_ran(call, tn_fill(call->device, d->data, 0, bytes, call->stream));
    }
    return TN__OP_RUN(call, gemm, work);
}

/* Everything but d, scratch and the launch. */
static tn_status begin_work(tn__op_call *call, const tn_gemm_args *args, const gemm_tensors *t,
                            tn__gemm_work *work) {
    work->accumulate = args->accumulate != 0;
    work->contracted = contracted_of(args->form, &t->a);
    return t->is_fp8 ? lease_fp8(call, args, t, work) : lease_plain(call, args, t, work);
}

/* A pin that is none is refused before anything is leased for writing. */
static tn_status check_pin(const tn__op_call *call, const gemm_tensors *t, int algorithm,
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
    gemm_tensors t = {.is_fp8 = 0};
    tn__gemm_work work = {.accumulate = 0};
    TN_TRY(tn__op_init());
    TN_TRY(check_gemm(&call, args, &t));
    tn_access access = args->accumulate ? TN_UPDATE : TN_WRITE;
    tn_status status = begin_work(&call, args, &t, &work);
    if (status == TN_OK) status = check_pin(&call, &t, args->algorithm, &work);
    if (status == TN_OK) status = tn__gemm_scratch(&call, args->scope, &t.d, &work);
    if (status == TN_OK) status = tn__op_lease_matrix(&call, args->d, &t.d, access, &work.d);
    if (status == TN_OK) status = tn__gemm_launch(&call, &work);
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

tn_status tn_gemm_tune(const tn_gemm_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_gemm_tune", stream);
    gemm_tensors t = {.is_fp8 = 0};
    tn__gemm_work work = {.tunes = 1};
    tn__matrix d;
    TN_TRY(tn__op_init());
    TN_TRY(check_gemm(&call, args, &t));
    TN_TRY(require_no_capture(&call));
    if (tn__is_empty(&t.d) || contracted_of(args->form, &t.a) == 0) return TN_OK;
    tn_status status = begin_work(&call, args, &t, &work);
    if (status == TN_OK) status = tn__gemm_scratch(&call, args->scope, &t.d, &work);
    if (status == TN_OK) status = make_d(&call, args->scope, &t.d, &d);
    if (status == TN_OK) {
        work.d = d;
        status = TN__OP_RUN(&call, gemm_tune, &work);
    }
    return tn__op_finish(&call, status);
}

/* ---- the choice ------------------------------------------------------------------------------ */

static tn_status unleased_operand(tn_tensor tensor, const tn_tensor_info *info, tn_plane plane,
                                  int is_turned, tn__operand *out) {
    tn_plane_view view = {.dtype = info->dtype};
    tn__matrix matrix = {info->dtype, NULL, info->rows, info->cols};
    if (info->format == TN_FORMAT_PLAIN) {
        *out = plain_operand(&matrix, is_turned);
        return TN_OK;
    }
    TN_TRY(tn_plane_layout_get(tensor, plane, &view.layout));
    *out = tn__gemm_operand(info->format, &view);
    return TN_OK;
}

tn_status tn_gemm_choice_get(const tn_gemm_args *args, tn_gemm_choice *out) {
    tn__op_call call = tn__op_begin("tn_gemm_choice_get", NULL);
    gemm_tensors t = {.is_fp8 = 0};
    tn__gemm_work work = {.accumulate = 0};
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    TN_TRY(tn__op_init());
    TN_REQUIRE(out && out->size == sizeof *out,
               "%s: out is NULL, or its size is not that of TN_GEMM_CHOICE_INIT", call.name);
    TN_TRY(check_gemm(&call, args, &t));
    TN_REQUIRE(args->algorithm >= 0, "%s: algorithm is %d, expected 0 or more", call.name,
               args->algorithm);
    work.accumulate = args->accumulate != 0;
    work.algorithm = args->algorithm;
    work.contracted = contracted_of(args->form, &t.a);
    work.d = (tn__matrix){t.d.dtype, NULL, t.d.rows, t.d.cols};
    TN_TRY(unleased_operand(args->a, &t.a, t.planes.a, args->form == TN_GEMM_WGRAD, &work.a));
    TN_TRY(unleased_operand(args->b, &t.b, t.planes.b, args->form != TN_GEMM_FPROP, &work.b));
    if (!tn__is_empty(&t.d) && work.contracted > 0)
        TN_TRY(call.ops->gemm_choice(call.device, &work, &choice));
    *out = choice;
    return TN_OK;
}
