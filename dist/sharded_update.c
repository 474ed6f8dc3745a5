/* The update of a sharded model: the norm of all gradients, AdamW on the rank's parts, the cast of
 * them to the shard; of all units, or of one behind its reduction; and what all of it takes. */
#include "sharded.h"

#include <math.h>

#include "error.h"
#include "tensor_internal.h"
#include "tenure_train.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static tn_status check_units(const tn_sharded_model *model) {
    for (int i = 0; i < model->unit_count; i++) {
        tn__sharded_unit *unit = model->units[i];
        TN_TRY(tn__sharded_check_master(unit));
        if (unit->phase != TN__SHARDED_IDLE)
            return TN_FAIL(TN_INVALID_STATE,
                           "tn_sharded_update: unit %s of model %s has begun and not ended",
                           unit->name, model->config.name);
        if (unit->bucket_elements == 0 || unit->ended == model->config.micro_batches) continue;
        return TN_FAIL(TN_INVALID_STATE,
                       "tn_sharded_update: unit %s of model %s has had the "
                       "backward of %d of %d "
                       "micro-batches",
                       unit->name, model->config.name, unit->ended, model->config.micro_batches);
    }
    return TN_OK;
}

typedef struct number {
    const char *name, *expected;
    float value;
    int is_right;
} number;

static int is_fraction(float value) { return value >= 0.0f && value < 1.0f; }

static int is_size(float value) { return isfinite(value) && value >= 0.0f; }

/* As tn_adamw and the cast want them: once a unit has been updated it would be too late. */
static tn_status check_numbers(const char *call, const tn_sharded_update_args *args) {
    static const char fraction[] = "0 or more, below 1", size[] = "a finite number of at least 0";
    const number numbers[] = {
        {"learning_rate", size, args->learning_rate, is_size(args->learning_rate)},
        {"beta1", fraction, args->beta1, is_fraction(args->beta1)},
        {"beta2", fraction, args->beta2, is_fraction(args->beta2)},
        {"epsilon", "a finite number above 0", args->epsilon,
         isfinite(args->epsilon) && args->epsilon > 0.0f},
        {"weight_decay", size, args->weight_decay, is_size(args->weight_decay)},
        {"gradient_scale", "a finite number", args->gradient_scale, isfinite(args->gradient_scale)},
        {"max_norm", "0 or more", args->max_norm, args->max_norm >= 0.0f},
        {"amax_epsilon", size, args->amax_epsilon, is_size(args->amax_epsilon)},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        TN_REQUIRE(numbers[i].is_right, "%s: %s is %g, expected %s", call, numbers[i].name,
                   (double)numbers[i].value, numbers[i].expected);
    return TN_OK;
}

static tn_status check_rate(const tn_sharded_model *model, const char *call, tn_tensor rate) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_device *device = NULL;
    if (rate.value == 0) return TN_OK;
    TN_TRY(tn_tensor_info_get(rate, &info));
    TN_TRY(tn__tensor_device(rate, &device));
    TN_REQUIRE(info.format == TN_FORMAT_PLAIN && info.dtype == TN_FP32 &&
                   info.rows * info.cols == 1 && device == model->device,
               "%s: rate (tensor %s) is %s %s of %lld elements%s, expected plain fp32 of one, on "
               "the model's device",
               call, info.name, tn_format_name(info.format), tn_dtype_name(info.dtype),
               (long long)(info.rows * info.cols),
               device == model->device ? "" : " on another device");
    return TN_OK;
}

static tn_status check_args(const tn_sharded_model *model, const char *call,
                            const tn_sharded_update_args *args) {
    TN_REQUIRE(args && args->size == sizeof *args,
               "%s: args is NULL or of another size: start from TN_SHARDED_UPDATE_ARGS_INIT", call);
    TN_TRY(check_numbers(call, args));
    return check_rate(model, call, args->rate);
}

static tn_status check_update(const tn_sharded_model *model, const tn_sharded_update_args *args) {
    static const char call[] = "tn_sharded_update";
    TN_REQUIRE(model, "tn_sharded_update: model is NULL");
    TN_REQUIRE(!args || !model->is_update_ahead,
               "tn_sharded_update: args is not NULL, and tn_sharded_update_ahead was called: its "
               "arguments are those of this step");
    if (!model->is_update_ahead) TN_TRY(check_args(model, call, args));
    if (!model->ring)
        return TN_FAIL(TN_INVALID_STATE, "tn_sharded_update: model %s is not sealed",
                       model->config.name);
    TN_TRY(tn__sharded_check_streams(model, call));
    TN_TRY(tn__sharded_check_given_up(model, call));
    return check_units(model);
}

static tn_status check_ahead(const tn_sharded_model *model, const tn_sharded_update_args *args) {
    static const char call[] = "tn_sharded_update_ahead";
    TN_REQUIRE(model, "%s: model is NULL", call);
    TN_TRY(check_args(model, call, args));
    TN_TRY(tn__sharded_check_given_up(model, call));
    TN_REQUIRE(
        args->max_norm == 0.0f,
        "%s: max_norm is %g, and a norm is of all gradients: call tn_sharded_update when all "
        "are there",
        call, (double)args->max_norm);
    if (!model->ring || model->is_update_ahead || model->is_updating)
        return TN_FAIL(TN_INVALID_STATE, "%s: model %s %s", call, model->config.name,
                       !model->ring             ? "is not sealed"
                       : model->is_update_ahead ? "was told before in this step"
                                                : "is in an update");
    for (int i = 0; i < model->unit_count; i++)
        if (model->units[i]->ended == model->config.micro_batches)
            return TN_FAIL(TN_INVALID_STATE,
                           "%s: the last backward of unit %s of model %s has ended: call it before",
                           call, model->units[i]->name, model->config.name);
    return TN_OK;
}

/* ---- the norm -------------------------------------------------------------------------------- */

static tn_status add_squares(const tn_sharded_model *model) {
    tn_square_sums_args squares = TN_SQUARE_SUMS_ARGS_INIT;
    squares.sums = model->squares;
    TN_TRY(tn_plane_fill(model->squares, TN_PLANE_DATA, 0, model->config.stream));
    squares.accumulate = 1;
    for (int i = 0; i < model->unit_count; i++) {
        squares.x = model->units[i]->gradient;
        if (squares.x.value) TN_TRY(tn_square_sums(&squares, model->config.stream));
    }
    return TN_OK;
}

static tn_status reduce_squares(tn_sharded_model *model) {
    const tn_stream stream = model->config.comm_stream;
    tn_lease lease;
    tn_plane_view view;
    TN_TRY(tn_lease_begin(model->squares, TN_PLANE_DATA, TN_UPDATE, stream, &lease, &view));
    const tn_status status = tn_all_reduce(model->config.comm, view.data, view.data, TN_SQUARE_SUMS,
                                           TN_FP32, TN_REDUCE_SUM, stream);
    model->is_normed = status == TN_OK;
    return tn__sharded_end_write(lease, status);
}

static tn_status make_factor(tn_sharded_model *model, const tn_sharded_update_args *args,
                             tn_stream stream) {
    tn_clip_factor_args clip = TN_CLIP_FACTOR_ARGS_INIT;
    const int is_clipped = args->max_norm > 0.0f;
    if (is_clipped && !model->is_normed) {
        TN_TRY(add_squares(model));
        TN_TRY(reduce_squares(model));
    }
    if (is_clipped) clip.norm = model->norm;
    clip.sums = model->squares;
    clip.scale = args->gradient_scale;
    if (clip.scale == 0.0f)
        clip.scale = 1.0f / ((float)model->rank_count * (float)model->config.micro_batches);
    clip.max_norm = is_clipped ? args->max_norm : INFINITY;
    clip.factor = model->factor;
    return tn_clip_factor(&clip, stream);
}

/* ---- the units ------------------------------------------------------------------------------- */

static tn_status update_unit(tn_sharded_model *model, tn__sharded_unit *unit,
                             const tn_sharded_update_args *args, tn_stream stream) {
    tn_adamw_args adamw = TN_ADAMW_ARGS_INIT;
    if (unit->bucket_elements == 0) return TN_OK;
    if (unit->master.value && !model->is_stepped) {
        adamw.master = unit->master, adamw.gradient = unit->gradient;
        adamw.first = unit->first, adamw.second = unit->second;
        adamw.step = model->step;
        adamw.learning_rate = args->learning_rate;
        adamw.beta1 = args->beta1, adamw.beta2 = args->beta2;
        adamw.epsilon = args->epsilon;
        adamw.weight_decay = args->weight_decay;
        adamw.rate = args->rate;
        adamw.gradient_scale = model->factor;
        TN_TRY(tn_adamw(&adamw, stream));
        model->is_stepped = 1;
        TN_TRY(tn__sharded_keep_master(unit));
    }
    if (!model->is_update_ahead) TN_TRY(tn__sharded_plane_drop(unit->gradient, stream));
    TN_TRY(tn__sharded_cast_update(model, unit, args->amax_epsilon, stream));
    model->is_stepped = 0;
    return TN_OK;
}

static tn_status end_step(tn_sharded_model *model) {
    tn__sharded_rest(model);
    TN_TRY(tn__sharded_gather_first(model));
    for (int i = 0; i < model->unit_count; i++)
        model->units[i]->ended = model->units[i]->is_updated = 0;
    model->kept = NULL;
    model->position = 0;
    model->is_stray = 0;
    model->is_updating = 0;
    model->is_update_ahead = model->is_step_counted = 0;
    model->updated = 0;
    model->counts.steps++;
    return TN_OK;
}

/* All that can be done again as it was. The step is counted last. */
static tn_status count_step(tn_sharded_model *model, const tn_sharded_update_args *args,
                            tn_stream stream) {
    tn_adamw_advance_args advance = TN_ADAMW_ADVANCE_ARGS_INIT;
    TN_TRY(make_factor(model, args, stream));
    advance.step = model->step;
    advance.beta1 = args->beta1, advance.beta2 = args->beta2;
    return tn_adamw_advance(&advance, stream);
}

/* Units that were kept for more micro-batches are of weights that are gone then. */
static tn_status begin_update(tn_sharded_model *model, const tn_sharded_update_args *args) {
    TN_TRY(tn__sharded_catch_up(model));
    for (int i = 0; i < model->unit_count; i++)
        TN_TRY(tn__sharded_let_go(model, model->units[i]));
    TN_TRY(tn__sharded_catch_up(model)); /* what has found room now */
    if (!model->is_step_counted) TN_TRY(count_step(model, args, model->config.stream));
    model->is_updating = 1;
    model->is_normed = 0;
    return TN_OK;
}

tn_status tn_sharded_update(tn_sharded_model *model, const tn_sharded_update_args *args) {
    TN_TRY(check_update(model, args));
    if (model->is_update_ahead) args = &model->update_args;
    if (!model->is_updating) TN_TRY(begin_update(model, args));
    /* From the last unit on, whose gradient was reduced first. */
    for (; model->updated < model->unit_count; model->updated++) {
        tn__sharded_unit *unit = model->units[model->unit_count - 1 - model->updated];
        if (!unit->is_updated) TN_TRY(update_unit(model, unit, args, model->config.stream));
    }
    return end_step(model);
}

/* ---- ahead ----------------------------------------------------------------------------------- */

tn_status tn_sharded_update_ahead(tn_sharded_model *model, const tn_sharded_update_args *args) {
    TN_TRY(check_ahead(model, args));
    model->update_args = *args;
    model->is_update_ahead = 1;
    return TN_OK;
}

tn_status tn__sharded_update_ahead(tn_sharded_model *model, tn__sharded_unit *unit) {
    const tn_stream stream = model->config.comm_stream;
    if (!model->is_step_counted) TN_TRY(count_step(model, &model->update_args, stream));
    model->is_step_counted = 1;
    TN_TRY(update_unit(model, unit, &model->update_args, stream));
    unit->is_updated = 1;
    return TN_OK;
}

/* ---- what it takes --------------------------------------------------------------------------- */

static size_t plane_bytes(tn_tensor tensor) {
    tn_plane_layout layout;
    if (tensor.value == 0) return 0;
    if (tn_plane_layout_get(tensor, TN_PLANE_DATA, &layout) != TN_OK) return 0;
    return layout.data_bytes;
}

/* Of an all-reduce: tn_comm_stats has the formula. */
static uint64_t all_reduce_wire(const tn_sharded_model *model, uint64_t count) {
    const uint64_t ranks = (uint64_t)model->rank_count, part = (count + ranks - 1) / ranks;
    const uint64_t before = part * (uint64_t)model->rank;
    const uint64_t left = before >= count ? 0 : count - before;
    const uint64_t mine = left < part ? left : part;
    return (count - mine + (ranks - 1) * mine) * sizeof(float);
}

/* Elements of the bucket that other ranks have. */
static tn_status reduce_wire(const tn_sharded_model *model, const tn__sharded_unit *unit,
                             uint64_t *out) {
    const tn_segment *segments;
    size_t count;
    uint64_t elements = 0;
    if (model->config.gradient_wire == TN_GRADIENT_WIRE_FP8) {
        *out = 0;
        for (int rank = 0; rank < model->rank_count; rank++)
            if (rank != model->rank) *out += tn__sharded_fp8_bytes(unit, rank);
        return TN_OK;
    }
    TN_TRY(tn_shard_bucket_segments(unit->plan, &segments, &count));
    for (size_t i = 0; i < count; i++)
        if (segments[i].rank != model->rank) elements += segments[i].count;
    *out = elements * tn_dtype_bytes(model->config.gradient_dtype);
    return TN_OK;
}

static tn_status count_unit(const tn_sharded_model *model, const tn__sharded_unit *unit,
                            tn_sharded_report *report) {
    tn_shard_plan_info info = TN_SHARD_PLAN_INFO_INIT;
    size_t offset, sent;
    uint64_t reduced;
    TN_TRY(tn_shard_plan_info_get(unit->plan, &info));
    TN_TRY(tn_shard_sent_bytes(unit->plan, TN_SHARD_FORWARD, model->rank, &offset, &sent));
    TN_TRY(reduce_wire(model, unit, &reduced));
    report->shard_bytes += plane_bytes(unit->shard);
    report->state_bytes +=
        plane_bytes(unit->master) + plane_bytes(unit->first) + plane_bytes(unit->second);
    report->gradient_bytes += plane_bytes(unit->gradient);
    report->gather_wire += (uint64_t)(model->rank_count - 1) * sent;
    report->reduce_wire += reduced;
    if (info.amax_count_trained > 0)
        report->update_wire += all_reduce_wire(model, (uint64_t)info.amax_count_trained);
    return TN_OK;
}

/* Bytes of reduced gradients, were they added up so. */
static size_t parts_bytes(const tn_sharded_model *model, tn_gradient_sum sum) {
    const int is_fp32 = tn__sharded_passes_arrived(model, sum);
    const size_t bytes = is_fp32 ? sizeof(float) : tn_dtype_bytes(model->config.gradient_dtype);
    size_t elements = 0;
    for (int i = 0; i < model->unit_count; i++)
        elements += model->units[i]->packed_elements;
    return elements * bytes;
}

tn_status tn_sharded_report_get(const tn_sharded_model *model, tn_sharded_report *out) {
    TN_REQUIRE(model, "tn_sharded_report_get: model is NULL");
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_sharded_report_get: out is NULL or of another size: start from "
               "TN_SHARDED_REPORT_INIT");
    tn_sharded_report report = model->counts;
    report.size = sizeof report;
    for (int i = 0; i < model->unit_count; i++)
        TN_TRY(count_unit(model, model->units[i], &report));
    report.made_shard_bytes = tn__sharded_made_shard_bytes(model);
    report.update_wire += all_reduce_wire(model, TN_SQUARE_SUMS);
    report.bucket_bytes = tn__sharded_buckets_bytes(model, model->config.gradient_sum);
    report.sharded_sum_bytes = parts_bytes(model, TN_GRADIENT_SUM_SHARDED) +
                               tn__sharded_buckets_bytes(model, TN_GRADIENT_SUM_SHARDED);
    report.whole_sum_bytes = parts_bytes(model, TN_GRADIENT_SUM_WHOLE) +
                             tn__sharded_buckets_bytes(model, TN_GRADIENT_SUM_WHOLE);
    if (model->ring) {
        tn_ring_stats stats = TN_RING_STATS_INIT;
        TN_TRY(tn_ring_stats_get(model->ring, &stats));
        report.ring_bytes = stats.buffer_bytes;
    }
    *out = report;
    return TN_OK;
}
