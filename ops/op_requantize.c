/* tn_requantize: blocks of 128 from blocks of 128. */
#include "op_call.h"
#include "tenure_cast.h"

#include <math.h>

/* What goes where. */
typedef struct plan {
    tn_tensor_info src, dst;
    tn_plane from;
    int has_row, has_col;
} plan;

static tn_status require_blocks(const tn__op_call *call, const char *role,
                                const tn_tensor_info *info) {
    TN_REQUIRE(info->format == TN_FORMAT_FP8_BLOCK_1D || info->format == TN_FORMAT_FP8_BLOCK_2D,
               "%s: %s (tensor %s) is %s, expected %s or %s", call->name, role, info->name,
               tn_format_name(info->format), tn_format_name(TN_FORMAT_FP8_BLOCK_1D),
               tn_format_name(TN_FORMAT_FP8_BLOCK_2D));
    return TN_OK;
}

static tn_status check_numbers(const tn__op_call *call, const tn_requantize_args *args) {
    TN_REQUIRE(args->mode == TN_REQUANTIZE_VALUES || args->mode == TN_REQUANTIZE_SHIFT,
               "%s: mode is %d, expected TN_REQUANTIZE_VALUES or TN_REQUANTIZE_SHIFT", call->name,
               (int)args->mode);
    TN_REQUIRE((unsigned)args->from < TN_PLANE_COUNT,
               "%s: from is %d, expected TN_PLANE_ROW or TN_PLANE_COL", call->name,
               (int)args->from);
    TN_REQUIRE(args->planes <= (TN_QUANTIZE_ROW | TN_QUANTIZE_COL),
               "%s: planes is 0x%X, expected TN_QUANTIZE_ROW, TN_QUANTIZE_COL or both", call->name,
               args->planes);
    TN_REQUIRE(isfinite(args->amax_epsilon) && args->amax_epsilon >= 0.0f,
               "%s: amax_epsilon is %g, expected a finite number of at least 0", call->name,
               (double)args->amax_epsilon);
    return TN_OK;
}

static tn_status check_tensors(tn__op_call *call, const tn_requantize_args *args, plan *p) {
    TN_TRY(tn__op_tensor(call, "src", args->src, &p->src));
    TN_TRY(tn__op_tensor(call, "dst", args->dst, &p->dst));
    TN_REQUIRE(args->src.value != args->dst.value, "%s: dst is src (tensor %s): name another one",
               call->name, p->src.name);
    TN_TRY(require_blocks(call, "src", &p->src));
    TN_TRY(require_blocks(call, "dst", &p->dst));
    return tn__op_require_shape(call, "dst", &p->dst, p->src.rows, p->src.cols, "the shape of src");
}

/* A scale that is a power of two is what makes the shift exact. */
static tn_status check_shift(const tn__op_call *call, const tn_requantize_args *args,
                             const plan *p) {
    unsigned other = p->from == TN_PLANE_ROW ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW;
    TN_TRY(tn__op_require_format(call, "src", &p->src, TN_FORMAT_FP8_BLOCK_1D));
    TN_TRY(tn__op_require_format(call, "dst", &p->dst, TN_FORMAT_FP8_BLOCK_1D));
    TN_TRY(tn__op_require_dtype(call, "dst", &p->dst, p->src.dtype));
    TN_REQUIRE(p->src.scale_mode == TN_SCALE_POW2 && p->dst.scale_mode == TN_SCALE_POW2,
               "%s: SHIFT asks for scales that are powers of two, in src (tensor %s) and dst "
               "(tensor %s)",
               call->name, p->src.name, p->dst.name);
    TN_REQUIRE(args->planes == 0 || args->planes == other,
               "%s: SHIFT from %s makes the other plane, but planes is 0x%X", call->name,
               tn_plane_name(p->from), args->planes);
    TN_REQUIRE(args->amax_epsilon == 0.0f, "%s: SHIFT takes no amax: amax_epsilon is %g, not 0",
               call->name, (double)args->amax_epsilon);
    return TN_OK;
}

static tn_status check(tn__op_call *call, const tn_requantize_args *args, plan *p) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_TRY(check_numbers(call, args));
    TN_TRY(check_tensors(call, args, p));
    p->from = args->from == TN_PLANE_COL ? TN_PLANE_COL : TN_PLANE_ROW;
    p->has_col = (args->planes & TN_QUANTIZE_COL) != 0;
    p->has_row = (args->planes & TN_QUANTIZE_ROW) != 0 || !p->has_col;
    if (args->mode != TN_REQUANTIZE_SHIFT) return TN_OK;
    TN_TRY(check_shift(call, args, p));
    p->has_col = p->from == TN_PLANE_ROW;
    p->has_row = !p->has_col;
    return TN_OK;
}

/* Asked of both planes before either is leased: to write one makes the other stale. */
static tn_status lease_skip(tn__op_call *call, const tn_requantize_args *args, const plan *p,
                            const float **skip) {
    TN_TRY(tn__op_lease_skip(call, args->skip, skip));
    if (p->has_row) TN_TRY(tn__op_require_kept(call, *skip, "dst", args->dst, TN_PLANE_ROW));
    if (p->has_col) TN_TRY(tn__op_require_kept(call, *skip, "dst", args->dst, TN_PLANE_COL));
    return TN_OK;
}

tn_status tn_requantize(const tn_requantize_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_requantize", stream);
    plan p = {.src = TN_TENSOR_INFO_INIT, .dst = TN_TENSOR_INFO_INIT};
    TN_TRY(tn__op_init());
    TN_TRY(check(&call, args, &p));
    tn__requantize_work work = {.format = p.src.format,
                                .shifts = args->mode == TN_REQUANTIZE_SHIFT,
                                .to = {.src = {TN_FP32, NULL, p.src.rows, p.src.cols},
                                       .format = p.dst.format,
                                       .scale_mode = p.dst.scale_mode,
                                       .dtype = p.dst.dtype,
                                       .amax_epsilon = args->amax_epsilon,
                                       .has_row = p.has_row,
                                       .has_col = p.has_col}};
    tn_status status = lease_skip(&call, args, &p, &work.to.skip);
    if (status == TN_OK) status = tn__op_lease_derived(&call, args->src, p.from, &work.from);
    if (status == TN_OK && p.has_row) {
        status = tn__op_lease(&call, args->dst, TN_PLANE_ROW, TN_WRITE, &work.to.row);
    }
    if (status == TN_OK && p.has_col) {
        status = tn__op_lease(&call, args->dst, TN_PLANE_COL, TN_WRITE, &work.to.col);
    }
    if (status == TN_OK && !tn__is_empty(&p.src)) {
        status = TN__OP_RUN(&call, requantize, &work);
    }
    return tn__op_finish(&call, status);
}
