/* A call of a parallel layer: see parallel_call.h. */
#include "parallel_call.h"

#include "comm.h"

tn_status tn__lease_close(tn_lease lease, tn_status status) {
    tn__saved_error failure;
    if (status == TN_OK) status = tn_lease_end(lease);
    if (status == TN_OK) return TN_OK;
    tn__error_save(&failure);
    const tn_status abandoned = tn_lease_abandon(lease);
    (void)abandoned; /* fails only of a handle that is not alive */
    tn__error_restore(&failure);
    return status;
}

tn_status tn__tensor_close(tn_tensor tensor, tn_stream stream, tn_status status) {
    tn__saved_error failure;
    if (status == TN_OK) return tn_tensor_destroy(tensor, stream);
    tn__error_save(&failure);
    tn_tensor_destroy(tensor, stream);
    tn__error_restore(&failure);
    return status;
}

/* ---- the call -------------------------------------------------------------------------------- */

static tn_status check_common(const char *name, const tn_layer_common *common) {
    TN_REQUIRE(common->precision == TN_BACKWARD_AS_FORWARD,
               "%s: common.precision is %d, expected TN_BACKWARD_AS_FORWARD", name,
               (int)common->precision);
    TN_REQUIRE(common->recompute == 0 || common->recompute == 1,
               "%s: common.recompute is %d, expected 0 or 1", name, common->recompute);
    return TN_OK;
}

tn_status tn__parallel_begin(const char *name, const tn_parallel *told,
                             const tn_layer_common *common, int64_t own, tn_stream stream,
                             tn__parallel *out) {
    TN_REQUIRE(told, "%s: parallel is NULL", name);
    TN_REQUIRE(told->partial_dtype == TN_FP32 || told->partial_dtype == TN_BF16,
               "%s: parallel.partial_dtype is %s, expected fp32 or bf16", name,
               tn_dtype_name(told->partial_dtype));
    TN_REQUIRE(told->keep_gathered == 0 || told->keep_gathered == 1,
               "%s: parallel.keep_gathered is %d, expected 0 or 1", name, told->keep_gathered);
    TN_TRY(check_common(name, common));
    *out = (tn__parallel){.name = name, .told = told, .common = *common, .stream = stream};
    out->wire = told->stream ? told->stream : stream;
    TN_TRY(tn__row_cut_make(name, &told->sequence, own, &out->cut));
    out->puts = tn__comm_puts(out->cut.comm);
    return TN_OK;
}

tn_status tn__parallel_make(tn__parallel *p, const char *name, const tn__parallel_shape *shape,
                            int is_kept, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    int slot = 0;
    while (slot < p->made_count && tn__is_given(p->made[slot]))
        slot++;
    TN_CHECK(slot < TN__PARALLEL_MADE_MAX);
    config.format = shape->format;
    config.dtype = shape->dtype;
    config.scale_mode = shape->scale_mode;
    config.rank = 2;
    config.shape[0] = shape->rows, config.shape[1] = shape->cols;
    config.name = name;
    TN_TRY(tn_tensor_create(is_kept ? p->common.saved_scope : p->common.scope, &config, out));
    p->made[slot] = *out;
    p->is_kept[slot] = is_kept;
    if (slot == p->made_count) p->made_count++;
    return TN_OK;
}

tn_status tn__parallel_let_go(tn__parallel *p, tn_tensor tensor, tn_stream stream) {
    for (int i = 0; i < p->made_count; i++) {
        if (p->made[i].value != tensor.value || !tn__is_given(tensor) || p->is_kept[i]) continue;
        TN_TRY(tn_tensor_destroy(tensor, stream));
        p->made[i] = (tn_tensor){0};
        return TN_OK;
    }
    return TN_OK;
}

void tn__parallel_spend(tn__parallel *p, tn_tensor *tensor) {
    if (!tn__is_given(*tensor)) return;
    TN_CHECK(p->spent_count < TN__PARALLEL_SPENT_MAX);
    p->spent[p->spent_count++] = tensor;
}

static tn_status end_spent(tn__parallel *p) {
    while (p->spent_count > 0) {
        tn_tensor *last = p->spent[p->spent_count - 1];
        TN_TRY(tn_tensor_destroy(*last, p->stream));
        last->value = 0;
        p->spent_count--;
    }
    return TN_OK;
}

/* ---- gradients for later --------------------------------------------------------------------- */

static tn_status hand_on(tn__parallel *p, tn_tensor tensor, int *is_callers) {
    *is_callers = 0;
    for (int i = 0; i < p->made_count; i++) {
        if (p->made[i].value != tensor.value) continue;
        if (!p->is_kept[i]) TN_TRY(tn_tensor_move(tensor, p->common.saved_scope));
        p->is_kept[i] = 1;
        return TN_OK;
    }
    for (int i = 0; i < p->spent_count; i++) {
        if (p->spent[i]->value != tensor.value) continue;
        p->handed[p->handed_count++] = p->spent[i];
        p->spent[i] = p->spent[--p->spent_count];
        return TN_OK;
    }
    *is_callers = 1;
    return TN_OK;
}

tn_status tn__parallel_leave(tn__parallel *p, tn_tensor dy, tn_tensor x,
                             const tn_layer_gradient *gradient, tn_delayed_gradient *out) {
    tn_delayed_gradient left = {
        .dy = dy, .x = x, .dweight = gradient->dweight, .accumulate = gradient->accumulate};
    TN_CHECK(p->left_count < TN__PARALLEL_LEFT_MAX);
    TN_TRY(hand_on(p, dy, &left.is_callers_dy));
    TN_TRY(hand_on(p, x, &left.is_callers_x));
    p->left[p->left_count++] = (tn__parallel_left){left, out};
    return TN_OK;
}

static void tell_left(tn__parallel *p) {
    for (int i = 0; i < p->handed_count; i++)
        p->handed[i]->value = 0;
    for (int i = 0; i < p->left_count; i++)
        *p->left[i].out = p->left[i].gradient;
}

/* ---- the end --------------------------------------------------------------------------------- */

/* Scratch ends with its scope if the driver refuses; what the call was to do is done. */
tn_status tn__parallel_end(tn__parallel *p, tn_status status) {
    tn__saved_error failure;
    if (status == TN_OK) status = end_spent(p);
    tn__error_save(&failure);
    for (int i = p->made_count - 1; i >= 0; i--) {
        if (status == TN_OK && p->is_kept[i]) continue;
        tn_tensor_destroy(p->made[i], p->stream);
    }
    tn__error_restore(&failure);
    if (status == TN_OK) tell_left(p);
    return tn__comm_end_call(p->cut.comm, p->name, p->puts, status);
}

/* ---- sums over rows -------------------------------------------------------------------------- */

tn_status tn__parallel_sums(tn__parallel *p, tn_tensor target, int accumulate, int over_ranks,
                            tn_tensor *out) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    *out = (tn_tensor){0};
    if (!tn__is_given(target)) return TN_OK;
    TN_TRY(tn_tensor_info_get(target, &info));
    TN_REQUIRE(info.format == TN_FORMAT_PLAIN && info.dtype <= TN_FP16,
               "%s: the gradient %s is %s of %s, expected %s of a float type", p->name, info.name,
               tn_format_name(info.format), tn_dtype_name(info.dtype),
               tn_format_name(TN_FORMAT_PLAIN));
    const tn__parallel_shape shape = {.dtype = TN_FP32, .rows = 1, .cols = info.rows * info.cols};
    TN_CHECK(p->sum_count < TN__PARALLEL_SUMS_MAX);
    TN_TRY(tn__parallel_make(p, "sums over rows", &shape, 0, out));
    p->sums[p->sum_count++] = (tn__parallel_sum){
        .sums = *out, .target = target, .accumulate = accumulate, .over_ranks = over_ranks};
    return TN_OK;
}

static tn_status sum_over_ranks(const tn__parallel *p, tn_tensor sums) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_plane_view view;
    tn_lease lease;
    TN_TRY(tn_tensor_info_get(sums, &info));
    TN_TRY(tn_lease_begin(sums, TN_PLANE_DATA, TN_UPDATE, p->wire, &lease, &view));
    return tn__lease_close(lease,
                           tn_all_reduce(p->cut.comm, view.data, view.data, (size_t)info.cols,
                                         TN_FP32, TN_REDUCE_SUM, p->wire));
}

tn_status tn__parallel_reduce_sums(tn__parallel *p) {
    for (int i = 0; i < p->sum_count; i++)
        if (p->sums[i].over_ranks) TN_TRY(sum_over_ranks(p, p->sums[i].sums));
    return TN_OK;
}

tn_status tn__parallel_add_sums(tn__parallel *p) {
    for (int i = 0; i < p->sum_count; i++) {
        const tn__parallel_sum *sum = &p->sums[i];
        tn_convert_args convert = TN_CONVERT_ARGS_INIT;
        tn_axpy_args add = TN_AXPY_ARGS_INIT;
        convert.x = add.x = sum->sums;
        convert.y = add.y = sum->target;
        TN_TRY(sum->accumulate ? tn_axpy(&add, p->stream) : tn_convert(&convert, p->stream));
    }
    return TN_OK;
}

/* ---- between the ranks ----------------------------------------------------------------------- */

tn_status tn__parallel_gather(tn__parallel *p, const char *name, tn_tensor src, tn_plane plane,
                              int is_kept, tn_tensor *out) {
    tn_sequence_gather_args args = TN_SEQUENCE_GATHER_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    TN_TRY(tn_tensor_info_get(src, &info));
    const tn__parallel_shape shape = {.format = info.format,
                                      .dtype = info.dtype,
                                      .rows = tn__row_cut_rows(&p->cut, plane),
                                      .cols = info.cols,
                                      .scale_mode = info.scale_mode};
    TN_TRY(tn__parallel_make(p, name, &shape, is_kept, out));
    args.sequence = p->told->sequence;
    args.src = src, args.plane = plane, args.dst = *out;
    args.scope = p->common.scope;
    return tn_sequence_gather(&args, p->wire);
}

tn_status tn__parallel_reduce(const tn__parallel *p, tn_tensor src, tn_tensor dst) {
    tn_sequence_reduce_args args = TN_SEQUENCE_REDUCE_ARGS_INIT;
    args.sequence = p->told->sequence;
    args.src = src, args.dst = dst;
    args.scope = p->common.scope;
    return tn_sequence_reduce(&args, p->wire);
}
