/* Casts of many tensors at once: tn_quantize_list. */
#include "host_alloc.h"
#include "op_produce.h"
#include "tenure_grouped.h"

#include <math.h>

_Static_assert((int)TN_QUANTIZE_LIST_MAX == (int)TN__LIST_MAX, "one bound");

/* What the checks find out of each tensor; on the heap, 64 of them are too many for a stack. */
typedef struct list_tensors {
    tn_tensor_info src[TN__LIST_MAX], dst[TN__LIST_MAX];
    tn__quantize_work items[TN__LIST_MAX];
    int64_t count; /* of items: those with elements */
} list_tensors;

static unsigned planes_of(const tn_quantize_list_args *args) {
    return args->planes ? args->planes : TN_QUANTIZE_ROW;
}

static tn_status check_numbers(const tn__op_call *call, const tn_quantize_list_args *args) {
    TN_REQUIRE(args->count >= 0 && args->count <= TN_QUANTIZE_LIST_MAX,
               "%s: count is %d, expected 0 to %d", call->name, args->count, TN_QUANTIZE_LIST_MAX);
    TN_REQUIRE(args->count == 0 || (args->src && args->dst), "%s: src or dst is NULL", call->name);
    TN_REQUIRE(args->planes <= (TN_QUANTIZE_ROW | TN_QUANTIZE_COL),
               "%s: planes is 0x%X, expected TN_QUANTIZE_ROW, TN_QUANTIZE_COL or both", call->name,
               args->planes);
    TN_REQUIRE(isfinite(args->amax_epsilon) && args->amax_epsilon >= 0.0f,
               "%s: amax_epsilon is %g, expected a finite number of at least 0", call->name,
               (double)args->amax_epsilon);
    return TN_OK;
}

static tn_status check_alike(const tn__op_call *call, const list_tensors *t, int i) {
    const tn_tensor_info *src = &t->src[i], *dst = &t->dst[i];
    TN_TRY(tn__op_require_dtype(call, "src", src, t->src[0].dtype));
    TN_TRY(tn__op_require_format(call, "dst", dst, t->dst[0].format));
    TN_TRY(tn__op_require_dtype(call, "dst", dst, t->dst[0].dtype));
    TN_REQUIRE(dst->scale_mode == t->dst[0].scale_mode,
               "%s: dst (tensor %s) has scale mode %d, expected %d, that of the first (tensor %s)",
               call->name, dst->name, (int)dst->scale_mode, (int)t->dst[0].scale_mode,
               t->dst[0].name);
    return tn__op_require_shape(call, "dst", dst, src->rows, src->cols, "the shape of src");
}

static tn_status check_list(tn__op_call *call, const tn_quantize_list_args *args, list_tensors *t) {
    for (int i = 0; i < args->count; i++) {
        TN_TRY(tn__op_tensor(call, "src", args->src[i], &t->src[i]));
        TN_TRY(tn__op_tensor(call, "dst", args->dst[i], &t->dst[i]));
        TN_TRY(tn__op_require_float(call, "src", &t->src[i]));
        for (int j = 0; j < i; j++) {
            TN_REQUIRE(args->dst[j].value != args->dst[i].value,
                       "%s: dst (tensor %s) is twice in the list", call->name, t->dst[i].name);
        }
        TN_REQUIRE(t->dst[i].format == TN_FORMAT_FP8_BLOCK_1D ||
                       t->dst[i].format == TN_FORMAT_FP8_BLOCK_2D,
                   "%s: dst (tensor %s) is %s, expected %s or %s", call->name, t->dst[i].name,
                   tn_format_name(t->dst[i].format), tn_format_name(TN_FORMAT_FP8_BLOCK_1D),
                   tn_format_name(TN_FORMAT_FP8_BLOCK_2D));
        TN_TRY(check_alike(call, t, i));
    }
    return TN_OK;
}

/* One tensor's planes; without elements they become valid with nothing to do. */
static tn_status lease_item(tn__op_call *call, const tn_quantize_list_args *args, list_tensors *t,
                            int i) {
    const tn_tensor_info *dst = &t->dst[i];
    tn__quantize_work work = {.format = dst->format,
                              .scale_mode = dst->scale_mode,
                              .dtype = dst->dtype,
                              .amax_epsilon = args->amax_epsilon,
                              .has_row = (planes_of(args) & TN_QUANTIZE_ROW) != 0,
                              .has_col = (planes_of(args) & TN_QUANTIZE_COL) != 0};
    TN_TRY(tn__op_lease_matrix(call, args->src[i], &t->src[i], TN_READ, &work.src));
    if (work.has_row) TN_TRY(tn__op_lease(call, args->dst[i], TN_PLANE_ROW, TN_WRITE, &work.row));
    if (work.has_col) TN_TRY(tn__op_lease(call, args->dst[i], TN_PLANE_COL, TN_WRITE, &work.col));
    if (!tn__is_empty(dst)) t->items[t->count++] = work;
    return TN_OK;
}

/* Before a lease makes the other plane of a tensor stale. */
static tn_status require_kept(const tn__op_call *call, const tn_quantize_list_args *args,
                              const float *skip) {
    for (int i = 0; i < args->count; i++) {
        if (planes_of(args) & TN_QUANTIZE_ROW)
            TN_TRY(tn__op_require_kept(call, skip, "dst", args->dst[i], TN_PLANE_ROW));
        if (planes_of(args) & TN_QUANTIZE_COL)
            TN_TRY(tn__op_require_kept(call, skip, "dst", args->dst[i], TN_PLANE_COL));
    }
    return TN_OK;
}

static tn_status run_list(tn__op_call *call, const tn_quantize_list_args *args, list_tensors *t) {
    tn__quantize_list_work work = {.items = t->items};
    TN_TRY(tn__op_lease_skip(call, args->skip, &work.skip));
    TN_TRY(require_kept(call, args, work.skip));
    TN_TRY(tn__op_scratch_bytes(call, args->scope, call->ops->list_scratch_bytes(args->count),
                                &work.scratch));
    for (int i = 0; i < args->count; i++)
        TN_TRY(lease_item(call, args, t, i));
    work.count = t->count;
    return t->count ? TN__OP_RUN(call, quantize_list, &work) : TN_OK;
}

tn_status tn_quantize_list(const tn_quantize_list_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_quantize_list", stream);
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(check_numbers(&call, args));
    if (args->count == 0) return TN_OK;
    list_tensors *t = tn__host_alloc(1, sizeof *t);
    if (!t) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = check_list(&call, args, t);
    if (status == TN_OK) status = tn__op_reserve_leases(&call, 3 * args->count + 2);
    if (status == TN_OK) status = run_list(&call, args, t);
    status = tn__op_finish(&call, status);
    tn__host_free(t);
    return status;
}
