/* A step of a sharded model: what is gathered when, and ahead of what.
 *
 *     begin   acquire in the ring, unless it is held; then the unit that comes next in the trace is
 *             gathered ahead, on comm_stream, beside the layers of this one
 *     end     the planes that were made of the weights go, and the unit itself unless it is kept,
 *             as it is where its backward comes next
 *     update  behind it the next step's first unit is gathered ahead
 */
#include "sharded.h"

#include "error.h"
#include "host_alloc.h"
#include "ring_slots.h"
#include "tensor_internal.h"
#include "tenure_ops.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static const char *const phase_names[] = {"not begun", "in forward", "in backward"};

static tn_status require_phase(const tn_sharded_model *model, const char *call,
                               const tn__sharded_unit *unit, tn__sharded_phase phase) {
    if (!model->ring)
        return TN_FAIL(TN_INVALID_STATE, "%s: model %s is not sealed: call tn_sharded_seal first",
                       call, model->config.name);
    TN_TRY(tn__sharded_check_streams(model, call));
    TN_TRY(tn__sharded_check_given_up(model, call));
    if (model->is_updating || model->is_normed)
        return TN_FAIL(
            TN_INVALID_STATE,
            "%s: an update of model %s has failed half-way: call tn_sharded_update again", call,
            model->config.name);
    if (model->sent && model->sent != unit)
        return TN_FAIL(TN_INVALID_STATE,
                       "%s: tn_sharded_backward_end of unit %s of model %s has failed half-way: "
                       "call it again",
                       call, model->sent->name, model->config.name);
    if (unit->phase == phase) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "%s: unit %s of model %s is %s, expected %s", call, unit->name,
                   model->config.name, phase_names[unit->phase], phase_names[phase]);
}

/* ---- the trace ------------------------------------------------------------------------------- */

static int is_recording(const tn_sharded_model *model) { return model->counts.steps == 0; }

/* Room for one more begin, before anything is done that would have to be undone. */
static tn_status reserve_trace(tn_sharded_model *model) {
    const size_t room = model->trace_room;
    if (!is_recording(model) || model->position < room) return TN_OK;
    const size_t more = room ? 2 * room : 64;
    tn__sharded_begin *trace = tn__host_realloc(model->trace, room, more, sizeof *trace);
    if (!trace) return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "the trace of model %s", model->config.name);
    model->trace = trace;
    model->trace_room = more;
    return TN_OK;
}

static void pass_begin(tn_sharded_model *model, int unit, int is_backward) {
    const size_t at = model->position++;
    if (is_recording(model)) {
        model->trace[at] = (tn__sharded_begin){unit, is_backward};
        model->trace_count = model->position;
        return;
    }
    if (model->is_stray) return;
    const int is_next = at < model->trace_count && model->trace[at].unit == unit &&
                        model->trace[at].is_backward == is_backward;
    if (is_next) return;
    model->is_stray = 1;
    model->counts.strays++;
}

static int reads_weights(const tn__sharded_unit *unit, int is_backward) {
    return !is_backward || !unit->backward_reads_nothing;
}

/* The unit's backward is the next begin, for which it stays as it is. */
static int is_backward_next(const tn_sharded_model *model, const tn__sharded_unit *unit) {
    if (is_recording(model) || model->is_stray || model->position >= model->trace_count) return 0;
    const tn__sharded_begin *next = &model->trace[model->position];
    return next->is_backward && model->units[next->unit] == unit && reads_weights(unit, 1);
}

/* The next begin that will have to gather, as the trace has it, if what comes before it gathers
 * nothing; NULL: none, or nobody knows. A unit that is held now, and let go before its next begin,
 * is not gathered ahead: it is there still. */
static tn__sharded_unit *next_to_gather(const tn_sharded_model *model) {
    if (is_recording(model) || model->is_stray) return NULL;
    for (size_t at = model->position; at < model->trace_count; at++) {
        tn__sharded_unit *unit = model->units[model->trace[at].unit];
        if (!reads_weights(unit, model->trace[at].is_backward)) continue;
        if (!unit->is_held) return unit;
        if (unit->phase != TN__SHARDED_IDLE && !is_backward_next(model, unit)) return NULL;
    }
    return NULL;
}

/* ---- gathered, and let go -------------------------------------------------------------------- */

static tn_status is_there(const tn_sharded_model *model, const tn__sharded_unit *unit, int *out) {
    tn_ring_unit_info info = TN_RING_UNIT_INFO_INIT;
    TN_TRY(tn_ring_unit_info_get(model->ring, unit->ring_unit, &info));
    *out =
        info.state == TN_RING_RESERVED || info.state == TN_RING_COMM || info.state == TN_RING_READY;
    return TN_OK;
}

static tn_status gather(tn_sharded_model *model, tn__sharded_unit *unit) {
    int is_ahead;
    TN_TRY(tn__sharded_check_master(unit));
    if (unit->is_held) return TN_OK;
    TN_TRY(is_there(model, unit, &is_ahead));
    TN_TRY(tn_ring_acquire(model->ring, unit->ring_unit, (tn_scope){0}, model->config.stream));
    unit->is_held = 1;
    if (is_ahead)
        model->counts.gathers_ahead++;
    else
        model->counts.gathers_late++;
    return TN_OK;
}

static tn_status drop_made(const tn_sharded_model *model, const tn__sharded_unit *unit) {
    const tn_stream stream = model->config.stream;
    for (int i = 0; i < unit->part_count; i++) {
        const tn__sharded_part *part = &unit->parts[i];
        tn_tensor_info info = TN_TENSOR_INFO_INIT;
        TN_TRY(tn_tensor_info_get(part->weight, &info));
        if (info.format == TN_FORMAT_PLAIN) continue;
        TN_TRY(tn_plane_drop(part->weight, TN_PLANE_COL, stream));
        if (part->is_quantized_here) TN_TRY(tn_plane_drop(part->weight, TN_PLANE_ROW, stream));
    }
    return TN_OK;
}

tn_status tn__sharded_let_go(tn_sharded_model *model, tn__sharded_unit *unit) {
    if (!unit->is_held) return TN_OK;
    TN_TRY(drop_made(model, unit));
    TN_TRY(tn_ring_release(model->ring, unit->ring_unit));
    unit->is_held = 0;
    return TN_OK;
}

/* What was kept for another begin than the one that comes has no claim to its place. */
static tn_status let_go_kept(tn_sharded_model *model, const tn__sharded_unit *unit,
                             int is_backward) {
    if (model->kept && (model->kept != unit || !is_backward))
        TN_TRY(tn__sharded_let_go(model, model->kept));
    model->kept = NULL;
    return TN_OK;
}

/* Failing to is no failure of the begin. What is in the way on all ranks alike the unit's begin
 * will say; what is on this one alone the next call that all ranks make puts first, or says. */
static void gather_ahead(tn_sharded_model *model) {
    tn__sharded_unit *next = next_to_gather(model);
    if (!next) return;
    tn__error_scope_begin();
    const tn_status status = tn_ring_prefetch(model->ring, next->ring_unit);
    if (status != TN_OK && status != TN_IN_USE) model->ahead = next;
    (void)tn__error_scope_end(TN_OK);
}

/* A communicator that has failed says so in the next step: this one is over. */
tn_status tn__sharded_gather_first(tn_sharded_model *model) {
    size_t first = 0;
    while (first < model->trace_count &&
           !reads_weights(model->units[model->trace[first].unit], model->trace[first].is_backward))
        first++;
    if (first == model->trace_count) return TN_OK;
    tn__error_scope_begin();
    tn_status status =
        tn_ring_prefetch(model->ring, model->units[model->trace[first].unit]->ring_unit);
    if (status == TN_IN_USE || status == TN_COMM_ERROR || status == TN_COMM_TIMEOUT) status = TN_OK;
    return tn__error_scope_end(status);
}

tn_status tn__sharded_catch_up(tn_sharded_model *model) {
    if (model->ahead) {
        TN_TRY(tn_ring_prefetch(model->ring, model->ahead->ring_unit));
        model->ahead = NULL;
    }
    return tn__ring_catch_up(model->ring);
}

/* ---- forward --------------------------------------------------------------------------------- */

tn_status tn_sharded_forward_begin(tn_sharded_model *model, int unit) {
    static const char call[] = "tn_sharded_forward_begin";
    tn__sharded_unit *of = NULL;
    TN_TRY(tn__sharded_find(model, call, unit, &of));
    TN_TRY(require_phase(model, call, of, TN__SHARDED_IDLE));
    TN_TRY(reserve_trace(model));
    TN_TRY(let_go_kept(model, of, 0));
    TN_TRY(tn__sharded_catch_up(model));
    TN_TRY(gather(model, of));
    pass_begin(model, unit, 0);
    of->phase = TN__SHARDED_FORWARD;
    gather_ahead(model);
    return TN_OK;
}

tn_status tn_sharded_forward_end(tn_sharded_model *model, int unit) {
    static const char call[] = "tn_sharded_forward_end";
    tn__sharded_unit *of = NULL;
    TN_TRY(tn__sharded_find(model, call, unit, &of));
    TN_TRY(require_phase(model, call, of, TN__SHARDED_FORWARD));
    /* What a backward has kept stays until the last one. */
    const int is_kept =
        model->config.keep_after_forward || (model->config.keep_after_backward && of->ended > 0);
    const int is_kept_once = !is_kept && is_backward_next(model, of);
    if (is_kept || is_kept_once)
        TN_TRY(drop_made(model, of));
    else
        TN_TRY(tn__sharded_let_go(model, of));
    if (is_kept_once) model->kept = of;
    of->phase = TN__SHARDED_IDLE;
    tn__sharded_rest(model);
    return TN_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* What a dgrad reads of weights that were gathered in high precision. */
static tn_status quantize_columns(const tn_sharded_model *model, const tn__sharded_unit *unit) {
    if (unit->backward_reads_nothing) return TN_OK;
    for (int i = 0; i < unit->part_count; i++) {
        tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
        if (!unit->parts[i].is_quantized_here) continue;
        quantize.src = unit->parts[i].gathered;
        quantize.dst = unit->parts[i].weight;
        quantize.planes = TN_QUANTIZE_COL;
        TN_TRY(tn_quantize(&quantize, model->config.stream));
    }
    return TN_OK;
}

/* Gathered, with a bucket. What is gathered stays so, where it fails behind that: the other ranks
 * have it, too, and do not gather it again with this one. */
static tn_status begin_backward(tn_sharded_model *model, tn__sharded_unit *unit, int number) {
    TN_TRY(tn__sharded_bucket_may_take(model, unit));
    TN_TRY(reserve_trace(model));
    TN_TRY(let_go_kept(model, unit, 1));
    TN_TRY(tn__sharded_catch_up(model));
    if (reads_weights(unit, 1)) TN_TRY(gather(model, unit));
    tn_status status = quantize_columns(model, unit);
    if (status == TN_OK) status = tn__sharded_bucket_take(model, unit);
    if (status == TN_OK) {
        pass_begin(model, number, 1);
        return TN_OK;
    }
    tn__saved_error saved;
    tn__error_save(&saved);
    (void)drop_made(model, unit);
    tn__error_restore(&saved);
    return status;
}

tn_status tn_sharded_backward_begin(tn_sharded_model *model, int unit) {
    static const char call[] = "tn_sharded_backward_begin";
    tn__sharded_unit *of = NULL;
    TN_TRY(tn__sharded_find(model, call, unit, &of));
    TN_TRY(require_phase(model, call, of, TN__SHARDED_IDLE));
    if (of->bucket_elements > 0 && of->ended == model->config.micro_batches)
        return TN_FAIL(TN_INVALID_STATE,
                       "%s: unit %s of model %s has had the backward of all %d "
                       "micro-batches of "
                       "the step: call tn_sharded_update, or tn_sharded_abandon",
                       call, of->name, model->config.name, model->config.micro_batches);
    TN_TRY(begin_backward(model, of, unit));
    of->phase = TN__SHARDED_BACKWARD;
    gather_ahead(model);
    return TN_OK;
}

int tn_sharded_accumulates(const tn_sharded_model *model, int unit) {
    if (!model || unit < 0 || unit >= model->unit_count) return 0;
    return !tn__sharded_adds_parts(model) && model->units[unit]->ended > 0;
}

/* Kept for the micro-batches that come, never with a plane that was made of it. */
static tn_status end_weights(tn_sharded_model *model, tn__sharded_unit *unit) {
    const int is_last = unit->ended + 1 >= model->config.micro_batches;
    if (model->config.keep_after_backward && !is_last) return drop_made(model, unit);
    return tn__sharded_let_go(model, unit);
}

tn_status tn_sharded_backward_end(tn_sharded_model *model, int unit) {
    static const char call[] = "tn_sharded_backward_end";
    tn__sharded_unit *of = NULL;
    TN_TRY(tn__sharded_find(model, call, unit, &of));
    TN_TRY(require_phase(model, call, of, TN__SHARDED_BACKWARD));
    if (model->is_update_ahead) TN_TRY(tn__sharded_check_master(of));
    if (!model->sent) {
        TN_TRY(tn__sharded_bucket_check(model, of));
        TN_TRY(tn__sharded_catch_up(model));
        TN_TRY(end_weights(model, of));
        TN_TRY(tn__sharded_catch_up(model)); /* what has found room now */
        tn__sharded_bucket_vacate(model);
    }
    TN_TRY(tn__sharded_reduce(model, of));
    of->phase = TN__SHARDED_IDLE;
    of->ended++;
    return TN_OK;
}

/* ---- given up -------------------------------------------------------------------------------- */

/* A tensor that is no more was leased by nobody. */
static tn_status check_idle(tn_tensor tensor) {
    if (tensor.value == 0) return TN_OK;
    return tn__tensor_check_idle(tensor, "giving up the step");
}

static tn_status check_all_idle(const tn_sharded_model *model) {
    for (int i = 0; i < model->unit_count; i++) {
        const tn__sharded_unit *unit = model->units[i];
        for (int part = 0; part < unit->part_count; part++) {
            TN_TRY(check_idle(unit->parts[part].gathered));
            TN_TRY(check_idle(unit->parts[part].weight));
            TN_TRY(check_idle(unit->parts[part].gradient));
        }
        TN_TRY(check_idle(unit->gradient));
    }
    return TN_OK;
}

tn_status tn__sharded_give_up(tn_sharded_model *model) {
    TN_TRY(check_all_idle(model));
    for (int i = 0; i < model->unit_count; i++) {
        tn__sharded_unit *unit = model->units[i];
        TN_TRY(tn__sharded_bucket_drop(model, unit));
        TN_TRY(tn__sharded_let_go(model, unit));
        TN_TRY(tn__sharded_plane_drop(unit->gradient, model->config.stream));
        unit->phase = TN__SHARDED_IDLE;
        unit->ended = unit->is_updated = 0;
    }
    tn__sharded_rest(model);
    model->position = 0;
    model->is_stray = model->has_met = 0;
    model->ahead = model->sent = model->kept = NULL;
    model->is_normed = model->is_taken = 0;
    model->is_update_ahead = model->is_step_counted = 0;
    return TN_OK;
}

tn_status tn__sharded_check_given_up(const tn_sharded_model *model, const char *call) {
    if (!model->has_met && !model->is_ending) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "%s: %s of model %s has failed half-way: call it again", call,
                   model->is_ending ? "tn_sharded_destroy" : "tn_sharded_abandon",
                   model->config.name);
}

/* Ranks that give up at different places would take each other's gathers for their own from here
 * on: where they meet it shows. A communicator that has failed needs no such meeting. */
static tn_status meet(tn_sharded_model *model) {
    tn_status status;
    if (model->has_met) return TN_OK; /* and failed behind that: the others have gone on */
    tn__error_scope_begin();
    status = tn_barrier(model->config.comm, model->config.comm_stream);
    if (status == TN_COMM_ERROR || status == TN_COMM_TIMEOUT) status = TN_OK;
    model->has_met = status == TN_OK;
    return tn__error_scope_end(status);
}

tn_status tn_sharded_abandon(tn_sharded_model *model) {
    TN_REQUIRE(model, "tn_sharded_abandon: model is NULL");
    TN_TRY(tn__sharded_check_streams(model, "tn_sharded_abandon"));
    if (model->is_updating)
        return TN_FAIL(TN_INVALID_STATE,
                       "tn_sharded_abandon: an update of model %s has changed %d of %d units: call "
                       "tn_sharded_update again",
                       model->config.name, model->updated, model->unit_count);
    if (model->is_step_counted)
        return TN_FAIL(TN_INVALID_STATE,
                       "tn_sharded_abandon: tn_sharded_backward_end has begun to update the units "
                       "of model %s, as tn_sharded_update_ahead has said: go on with the step",
                       model->config.name);
    TN_TRY(check_all_idle(model));
    TN_TRY(meet(model));
    return tn__sharded_give_up(model);
}
