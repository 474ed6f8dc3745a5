/* Phases: what leaving backward frees, and which planes of a weight a phase reads.
 *
 * Invariants: leaving backward drops all planes that it should or, if one is leased or the pool
 * can not be told, none; the scope's phase changes with the drop or not at all.
 */
#include "books.h"
#include "format_table.h"
#include "ledger.h"
#include "plane_memory.h"
#include "plane_policy.h"
#include "plane_transition.h"

static int phase_is_known(tn_phase phase) { return (int)phase >= 0 && phase < TN_PHASE_COUNT; }

const char *tn_phase_name(tn_phase phase) {
    static const char *const names[TN_PHASE_COUNT] = {"none", "forward", "backward", "recompute",
                                                      "update"};
    return phase_is_known(phase) ? names[phase] : "unknown phase";
}

/* ---- leaving backward ---------------------------------------------------------------------- */

static int is_in_backward(tn_phase phase) {
    return phase == TN_PHASE_BACKWARD || phase == TN_PHASE_RECOMPUTE;
}

typedef tn_status (*plane_action)(tn__tensor_object *tensor, tn_plane plane,
                                  const tn__plane_use *on);

static tn_status refuse_leased(tn__tensor_object *tensor, tn_plane plane, const tn__plane_use *on) {
    const tn__lease_object *holder = tensor->planes[plane].first_lease;
    (void)on;
    return holder ? tn__fail_in_use(holder, "leaving backward") : TN_OK;
}

static tn_status announce(tn__tensor_object *tensor, tn_plane plane, const tn__plane_use *on) {
    return tn__plane_memory_announce(tensor->scope->books, &tensor->planes[plane], on->stream,
                                     on->stream_id);
}

static tn_status drop(tn__tensor_object *tensor, tn_plane plane, const tn__plane_use *on) {
    return tn__transition_drop_announced(tensor, plane, on->stream);
}

static tn_status for_each_ending_plane(tn__scope_object *root, plane_action run,
                                       const tn__plane_use *on) {
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
            if (tn__tensor_policy(tensor) != TN_POLICY_UNTIL_BACKWARD_END) continue;
            for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
                if (!tn__plane_is_spare(tensor, (tn_plane)plane)) continue;
                TN_TRY(run(tensor, (tn_plane)plane, on));
            }
        }
    }
    return TN_OK;
}

static tn_status end_backward(tn__scope_object *scope, tn_stream stream) {
    tn__plane_use on = tn__plane_use_on(stream, 0);
    TN_TRY(tn__books_stream_id(scope->books, stream, &on.stream_id));
    TN_TRY(for_each_ending_plane(scope, refuse_leased, &on));
    TN_TRY(for_each_ending_plane(scope, announce, &on));
    return for_each_ending_plane(scope, drop, &on);
}

tn_status tn_scope_phase_set(tn_scope scope, tn_phase phase, tn_stream stream) {
    tn__scope_object *object;
    TN_REQUIRE(phase_is_known(phase), "tn_scope_phase_set: unknown phase %d", (int)phase);
    TN_TRY(tn__scope_acquire(scope, &object));
    tn_status status = TN_OK;
    if (is_in_backward(object->phase) && !is_in_backward(phase)) {
        status = end_backward(object, stream);
    }
    if (status == TN_OK) {
        object->phase = phase;
        tn__ledger_note_phase(object);
    }
    tn__scope_unlock(object);
    return status;
}

tn_phase tn__scope_phase(const tn__scope_object *scope) {
    while (scope->phase == TN_PHASE_NONE && scope->parent)
        scope = scope->parent;
    return scope->phase;
}

tn_status tn_scope_phase_get(tn_scope scope, tn_phase *out) {
    tn__scope_object *object;
    TN_REQUIRE(out, "tn_scope_phase_get: out is NULL");
    TN_TRY(tn__scope_acquire(scope, &object));
    *out = tn__scope_phase(object);
    tn__scope_unlock(object);
    return TN_OK;
}

/* ---- the plan of a phase ------------------------------------------------------------------- */

static tn_status read_operand(tn_format format, tn_architecture architecture, tn_operand operand,
                              tn_phase_plan *plan) {
    tn_plane plane = TN_PLANE_DATA, source = TN_PLANE_DATA;
    const char *why;
    TN_TRY(tn_format_operand(format, architecture, operand, &plane));
    for (int i = 0; i < plan->count; i++) {
        if (plan->reads[i].plane == plane) return TN_OK; /* one plane serves both */
    }
    TN_ASSERT(plan->count < TN_PHASE_READS_MAX);
    plan->reads[plan->count].plane = plane;
    plan->reads[plan->count].source = plane;
    plan->reads[plan->count].origin = TN_ORIGIN_GIVEN;
    if (operand == TN_OPERAND_DGRAD_B && tn__format_source(format, plane, &source, &why)) {
        plan->reads[plan->count].source = source;
        plan->reads[plan->count].origin = TN_ORIGIN_DERIVED;
    }
    plan->count++;
    return TN_OK;
}

static tn_status make_plan(tn_format format, tn_architecture architecture,
                           const tn_phase_config *config, tn_phase_plan *plan) {
    int is_backward = config->phase == TN_PHASE_BACKWARD;
    int reads_forward = config->phase == TN_PHASE_FORWARD || config->phase == TN_PHASE_RECOMPUTE ||
                        (is_backward && config->recomputes);
    if (reads_forward) TN_TRY(read_operand(format, architecture, TN_OPERAND_FPROP_B, plan));
    if (!is_backward || !config->wants_dgrad) return TN_OK;
    return read_operand(format, architecture, TN_OPERAND_DGRAD_B, plan);
}

tn_status tn_phase_plan_get(tn_tensor tensor, const tn_phase_config *config, tn_phase_plan *out) {
    tn__tensor_object *object;
    tn_phase_plan plan = TN_PHASE_PLAN_INIT;
    TN_REQUIRE(config && config->size == sizeof *config,
               "tn_phase_plan_get: config is not TN_PHASE_CONFIG_INIT");
    TN_REQUIRE(out && out->size == sizeof *out, "tn_phase_plan_get: out is not TN_PHASE_PLAN_INIT");
    TN_REQUIRE(phase_is_known(config->phase) && config->phase != TN_PHASE_NONE,
               "tn_phase_plan_get: phase %d is not one of a step", (int)config->phase);
    TN_TRY(tn__tensor_acquire(tensor, &object));
    tn_format format = object->format;
    tn_device *device = object->scope->books->device;
    tn__tensor_unlock(object);
    TN_TRY(make_plan(format, tn_device_architecture(device), config, &plan));
    *out = plan;
    return TN_OK;
}
