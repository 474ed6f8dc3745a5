/* Casts of a part of a weight: tn_shard_amax, tn_shard_quantize. */
#include "op_grouped.h"
#include "tenure_grouped.h"

#include <math.h>

static int64_t elements_of(const tn_tensor_info *info) { return info->rows * info->cols; }

/* What both ops are told of the part and the whole. */
typedef struct shard {
    tn_tensor_info src;
    int64_t rows, cols, first;
    int64_t tiles_down, tiles_across;
} shard;

static tn_status check_shard(tn__op_call *call, tn_tensor src, shard *s) {
    TN_TRY(tn__op_tensor(call, "src", src, &s->src));
    TN_TRY(tn__op_require_float(call, "src", &s->src));
    TN_REQUIRE(s->rows >= 0 && s->cols >= 0 && (s->rows == 0 || s->cols <= INT64_MAX / 4 / s->rows),
               "%s: the weight is %lld x %lld, expected sizes of at least 0", call->name,
               (long long)s->rows, (long long)s->cols);
    int64_t whole = s->rows * s->cols, held = elements_of(&s->src);
    TN_REQUIRE(s->first >= 0 && s->first <= whole && held <= whole - s->first,
               "%s: src (tensor %s) holds %lld elements from %lld on, the weight has %lld",
               call->name, s->src.name, (long long)held, (long long)s->first, (long long)whole);
    s->tiles_down = tn__units_of(s->rows, 128);
    s->tiles_across = tn__units_of(s->cols, 128);
    return TN_OK;
}

static tn_status check_floats(tn__op_call *call, const char *role, tn_tensor tensor, int64_t count,
                              const char *reason) {
    tn_tensor_info info;
    TN_TRY(tn__op_tensor(call, role, tensor, &info));
    TN_TRY(tn__op_require_plain(call, role, &info, TN_FP32));
    TN_REQUIRE(elements_of(&info) == count,
               "%s: %s (tensor %s) has %lld elements, expected %lld: %s", call->name, role,
               info.name, (long long)elements_of(&info), (long long)count, reason);
    return TN_OK;
}

static void describe(const shard *s, const tn__matrix *src, tn__shard *out) {
    *out = (tn__shard){.src = *src,
                       .rows = s->rows,
                       .cols = s->cols,
                       .first = s->first,
                       .end = s->first + elements_of(&s->src)};
}

/* ---- amax ------------------------------------------------------------------------------------ */

static tn_status check_amax(tn__op_call *call, const tn_shard_amax_args *args, shard *s) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    const tn_tensor all[] = {args->src, args->amax};
    *s = (shard){.rows = args->rows, .cols = args->cols, .first = args->first};
    TN_TRY(check_shard(call, args->src, s));
    TN_REQUIRE(args->whole == 0 || args->whole == 1, "%s: whole is %d, expected 0 or 1", call->name,
               args->whole);
    if (args->whole)
        TN_TRY(check_floats(call, "amax", args->amax, 1, "one for the whole"));
    else
        TN_TRY(check_floats(call, "amax", args->amax, s->tiles_down * s->tiles_across,
                            "one for each tile"));
    return tn__op_require_distinct(call, all, sizeof all / sizeof *all);
}

tn_status tn_shard_amax(const tn_shard_amax_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_shard_amax", stream);
    tn__shard_amax_work work = {.amax = NULL};
    tn__matrix src;
    tn_plane_view amax;
    shard s;
    TN_TRY(tn__op_init());
    TN_TRY(check_amax(&call, args, &s));
    tn_status status = tn__op_lease_matrix(&call, args->src, &s.src, TN_READ, &src);
    if (status == TN_OK) status = tn__op_lease(&call, args->amax, TN_PLANE_DATA, TN_WRITE, &amax);
    if (status == TN_OK && (args->whole || s.tiles_down * s.tiles_across > 0)) {
        describe(&s, &src, &work.shard);
        work.amax = amax.data;
        work.is_whole = args->whole;
        status = TN__OP_RUN(&call, shard_amax, &work);
    }
    return tn__op_finish(&call, status);
}

/* ---- quantize -------------------------------------------------------------------------------- */

static tn_status check_numbers(const tn__op_call *call, const tn_shard_quantize_args *args) {
    TN_REQUIRE(args->dtype == TN_E4M3 || args->dtype == TN_E5M2,
               "%s: dtype is %d, expected %s or %s", call->name, (int)args->dtype,
               tn_dtype_name(TN_E4M3), tn_dtype_name(TN_E5M2));
    TN_REQUIRE(args->scale_mode == TN_SCALE_POW2 || args->scale_mode == TN_SCALE_FP32,
               "%s: scale_mode is %d, expected TN_SCALE_POW2 or TN_SCALE_FP32", call->name,
               (int)args->scale_mode);
    TN_REQUIRE(isfinite(args->amax_epsilon) && args->amax_epsilon >= 0.0f,
               "%s: amax_epsilon is %g, expected a finite number of at least 0", call->name,
               (double)args->amax_epsilon);
    return TN_OK;
}

static tn_status check_quantize(tn__op_call *call, const tn_shard_quantize_args *args, shard *s,
                                tn_tensor_info *data) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    const tn_tensor all[] = {args->src, args->amax, args->data, args->scale, args->skip};
    *s = (shard){.rows = args->rows, .cols = args->cols, .first = args->first};
    TN_TRY(check_numbers(call, args));
    TN_TRY(check_shard(call, args->src, s));
    TN_TRY(check_floats(call, "amax", args->amax, s->tiles_down * s->tiles_across,
                        "one for each tile"));
    if (!tn__is_no_tensor(args->scale))
        TN_TRY(check_floats(call, "scale", args->scale,
                            s->tiles_down * 4 * tn__units_of(s->tiles_across, 4),
                            "the scales of a 2D ROW plane, with padding"));
    TN_TRY(tn__op_tensor(call, "data", args->data, data));
    TN_TRY(tn__op_require_plain(call, "data", data, TN_BYTE));
    TN_REQUIRE(args->data_first >= 0 && args->data_first <= elements_of(data) &&
                   elements_of(&s->src) <= elements_of(data) - args->data_first,
               "%s: data (tensor %s) has %lld bytes, expected %lld from %lld on", call->name,
               data->name, (long long)elements_of(data), (long long)elements_of(&s->src),
               (long long)args->data_first);
    return tn__op_require_distinct(call, all, sizeof all / sizeof *all);
}

static tn_status lease_quantize(tn__op_call *call, const tn_shard_quantize_args *args,
                                const shard *s, const tn_tensor_info *info,
                                tn__shard_quantize_work *work) {
    int is_skippable = !tn__is_no_tensor(args->skip);
    int is_whole = elements_of(&s->src) == elements_of(info);
    tn__matrix src;
    tn_plane_view amax, data, scale;
    TN_TRY(tn__op_lease_matrix(call, args->src, &s->src, TN_READ, &src));
    TN_TRY(tn__op_lease(call, args->amax, TN_PLANE_DATA, TN_READ, &amax));
    TN_TRY(tn__op_lease_skip(call, args->skip, &work->skip));
    if (!tn__is_no_tensor(args->scale)) {
        TN_TRY(tn__op_lease(call, args->scale, TN_PLANE_DATA, is_skippable ? TN_UPDATE : TN_WRITE,
                            &scale));
        work->scale = scale.data;
    }
    TN_TRY(tn__op_lease(call, args->data, TN_PLANE_DATA,
                        is_skippable || !is_whole ? TN_UPDATE : TN_WRITE, &data));
    describe(s, &src, &work->shard);
    work->amax = amax.data;
    if (data.data) work->data = (uint8_t *)data.data + args->data_first;
    return TN_OK;
}

tn_status tn_shard_quantize(const tn_shard_quantize_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_shard_quantize", stream);
    tn__shard_quantize_work work = {.data = NULL};
    tn_tensor_info data = TN_TENSOR_INFO_INIT;
    shard s;
    TN_TRY(tn__op_init());
    TN_TRY(check_quantize(&call, args, &s, &data));
    work.dtype = args->dtype;
    work.scale_mode = args->scale_mode;
    work.amax_epsilon = args->amax_epsilon;
    tn_status status = lease_quantize(&call, args, &s, &data, &work);
    int is_nothing = !work.scale && tn__is_empty(&s.src);
    if (status == TN_OK && s.tiles_down * s.tiles_across > 0 && !is_nothing)
        status = TN__OP_RUN(&call, shard_quantize, &work);
    return tn__op_finish(&call, status);
}
