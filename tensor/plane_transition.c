/* The transitions of planes. No other file sets a state, but plane_relocate.c of what it moves.
 *
 * Invariants kept by each transition, and checked after it in debug builds by
 * tn__tensor_is_valid: memory goes with the state; the ledger has every byte that a plane has;
 * a plane is STALE only after another one began to be written, and `stale_made` of the lease that
 * writes says which planes become VALID again should that write not happen; memory that a REPLACE
 * lease supersedes is whole until its end.
 */
#include "plane_transition.h"

#include "adopt.h"
#include "canary.h"
#include "host_alloc.h"
#include "ledger.h"
#include "offload.h"
#include "plane_budget.h"
#include "plane_memory.h"
#include "plane_order.h"
#include "plane_policy.h"
#include "saved_set.h"
#include "scratch_slot.h"

#define BIT(plane) (1u << (plane))

static const tn__books *books_of(const tn__tensor_object *tensor) { return tensor->books; }

/* ---- memory -------------------------------------------------------------------------------- */

static void set_absent(tn__plane_object *plane) {
    if (!TN__CANARY(TN__CANARY_PLANE_KEPT)) tn__budget_forget(plane);
    plane->state = TN_PLANE_ABSENT;
    plane->is_derived = 0;
    plane->has_write = plane->has_skips = 0;
    plane->read_count = 0;
}

tn_status tn__transition_free_announced(tn__tensor_object *tensor, tn_plane plane,
                                        tn__plane_object *at, tn_stream stream) {
    TN_ASSERT(!at->first_lease);
    TN_TRY(tn__plane_memory_give_back(tensor, plane, at, stream));
    set_absent(at);
    return TN_OK;
}

tn_status tn__transition_drop_announced(tn__tensor_object *tensor, tn_plane plane,
                                        tn_stream stream) {
    return tn__transition_free_announced(tensor, plane, &tensor->planes[plane], stream);
}

void tn__transition_end_replaced(tn__plane_object *plane) {
    tn__plane_object *replaced = plane->replaced;
    TN_ASSERT(replaced->state == TN_PLANE_ABSENT);
    if (replaced->blocks[TN__PART_DATA] || replaced->blocks[TN__PART_SCALE]) return;
    tn__plane_order_deinit(replaced);
    tn__host_free(replaced);
    plane->replaced = NULL;
}

tn_status tn__transition_free_replaced(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                                       uint64_t stream_id) {
    tn__plane_object *object = &tensor->planes[plane];
    if (!object->replaced) return TN_OK;
    if (TN__CANARY(TN__CANARY_PLANE_REPLACED)) {
        object->replaced = NULL;
        return TN_OK;
    }
    TN_TRY(tn__plane_memory_announce(books_of(tensor), object->replaced, stream, stream_id));
    TN_TRY(tn__transition_free_announced(tensor, plane, object->replaced, stream));
    tn__transition_end_replaced(object);
    return TN_OK;
}

static TN__SLOW tn_status free_plane(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                                     uint64_t stream_id) {
    tn__plane_object *object = &tensor->planes[plane];
    if (object->state == TN_PLANE_ABSENT && !tn__plane_has_remains(object)) return TN_OK;
    TN_TRY(tn__transition_free_replaced(tensor, plane, stream,
                                        stream_id)); /* remains, if there are any */
    if (!object->buffer) {
        TN_TRY(tn__plane_memory_announce(books_of(tensor), object, stream, stream_id));
    }
    return tn__transition_free_announced(tensor, plane, object, stream);
}

TN__SLOW tn_status tn__transition_make(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                                       uint64_t stream_id) {
    tn__plane_object *object = &tensor->planes[plane];
    if (object->state != TN_PLANE_ABSENT) return TN_OK;
    TN_TRY(tn__saved_admit(tensor));
    TN_TRY(free_plane(tensor, plane, stream, stream_id)); /* remains, if there are any */
    tn_status status = tn__plane_memory_take(tensor, plane, object, stream, stream_id);
    if (status == TN_OK) {
        object->state = TN_PLANE_ALLOCATED;
        tn__plane_order_note(object, TN_WRITE, stream, stream_id);
    }
    TN_ASSERT(tn__tensor_is_valid(tensor));
    return status;
}

tn_status tn__transition_adopt(tn__tensor_object *tensor, tn_plane plane, tn__foreign *foreign,
                               void *const blocks[TN__PART_COUNT]) {
    tn__plane_object *object = &tensor->planes[plane];
    TN_ASSERT(object->state == TN_PLANE_ABSENT);
    TN_TRY(tn__plane_memory_adopt(tensor, plane, foreign, blocks));
    object->state = TN_PLANE_VALID;
    tn__tensor_set_written(tensor);
    tn__plane_order_note(object, TN_WRITE, foreign->stream, foreign->stream_id);
    TN_ASSERT(tn__tensor_is_valid(tensor));
    return TN_OK;
}

/* The stream of `on`, or that of the plane's last use. */
static tn__plane_use free_use(const tn__plane_object *plane, const tn__plane_use *on) {
    return on ? *on : tn__plane_order_last(plane);
}

static tn_status announce_plane(const tn__books *books, tn__plane_object *plane,
                                const tn__plane_use *on) {
    tn__plane_use use = free_use(plane, on);
    TN_TRY(tn__plane_memory_announce(books, plane, use.stream, use.stream_id));
    if (!plane->replaced) return TN_OK;
    return tn__plane_memory_announce(books, plane->replaced, use.stream, use.stream_id);
}

tn_status tn__transition_announce_empty(tn__tensor_object *tensor, const tn__plane_use *on) {
    for (int i = 0; i < TN_PLANE_COUNT; i++)
        TN_TRY(announce_plane(books_of(tensor), &tensor->planes[i], on));
    return TN_OK;
}

tn_status tn__transition_announce_plane(tn__tensor_object *tensor, tn_plane plane) {
    return announce_plane(books_of(tensor), &tensor->planes[plane], NULL);
}

/* A second try tells what is wrong with a block that was left. */
static tn_status empty_memory(tn__tensor_object *tensor, tn_plane plane, tn__plane_object *at,
                              tn_stream stream) {
    TN_TRY(tn__transition_free_announced(tensor, plane, at, stream));
    if (!at->blocks[TN__PART_DATA] && !at->blocks[TN__PART_SCALE]) return TN_OK;
    return tn__transition_free_announced(tensor, plane, at, stream);
}

static tn_status empty_plane(tn__tensor_object *tensor, tn_plane plane, const tn__plane_use *on) {
    tn__plane_object *object = &tensor->planes[plane];
    tn_stream stream = free_use(object, on).stream;
    TN_TRY(empty_memory(tensor, plane, object, stream));
    if (!object->replaced) return TN_OK;
    TN_TRY(empty_memory(tensor, plane, object->replaced, stream));
    tn__transition_end_replaced(object);
    return TN_OK;
}

tn_status tn__transition_empty(tn__tensor_object *tensor, const tn__plane_use *on) {
    for (int i = 0; i < TN_PLANE_COUNT; i++)
        TN_TRY(empty_plane(tensor, (tn_plane)i, on));
    return TN_OK;
}

tn_status tn__transition_end_plane(tn__tensor_object *tensor, tn_plane plane) {
    TN_TRY(announce_plane(books_of(tensor), &tensor->planes[plane], NULL));
    return empty_plane(tensor, plane, NULL);
}

static tn_status settle_plane(tn__tensor_object *tensor, tn_plane plane) {
    tn__plane_object *object = &tensor->planes[plane];
    tn__plane_use on = free_use(object, NULL);
    if (object->state != TN_PLANE_ABSENT) {
        return tn__transition_free_replaced(tensor, plane, on.stream, on.stream_id);
    }
    return free_plane(tensor, plane, on.stream, on.stream_id);
}

/* A second try tells what is wrong with a block that was left. */
tn_status tn__transition_settle(tn__tensor_object *tensor) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        const tn__plane_object *plane = &tensor->planes[i];
        for (int tries = 0; tries < 2 && tn__plane_has_remains(plane); tries++) {
            TN_TRY(settle_plane(tensor, (tn_plane)i));
        }
    }
    return TN_OK;
}

/* ---- who holds what ------------------------------------------------------------------------ */

/* Complete, or STALE only because of a write that is still under way and may be abandoned. */
static int has_contents(const tn__tensor_object *tensor, tn_plane plane) {
    if (tn__state_is_complete(tensor->planes[plane].state)) return 1;
    if (tensor->planes[plane].state != TN_PLANE_STALE) return 0;
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        const tn__lease_object *writer = tn__plane_writer(&tensor->planes[i]);
        if (writer && (writer->stale_made & BIT(plane))) return 1;
    }
    return 0;
}

/* The object with the contents that the plane has, also if a write to new memory is abandoned. */
static tn__plane_object *kept_object(tn__plane_object *plane) {
    int is_replaced = plane->replaced && plane->replaced->state != TN_PLANE_ABSENT;
    return is_replaced ? plane->replaced : plane;
}

static tn_plane_state *kept_state(tn__plane_object *plane) { return &kept_object(plane)->state; }

/* What is in a scratch slot, where others displace it, is no copy. */
static int is_copy(const tn__plane_object *object) {
    return tn__state_is_complete(object->state) && object->kind != TN__MEMORY_SLOT;
}

/* Never so of an ABSENT plane. */
static int is_last_copy(tn__tensor_object *tensor, tn_plane plane) {
    if (tensor->is_regatherable || !has_contents(tensor, plane)) return 0;
    if (TN__CANARY(TN__CANARY_PLANE_LAST_COPY)) return 0;
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        tn__plane_object *other = &tensor->planes[i];
        if (i == (int)plane) continue;
        if (is_copy(other) || is_copy(kept_object(other))) return 0;
    }
    return 1;
}

/* ---- begin --------------------------------------------------------------------------------- */

/* Several planes may be written at once if each is written whole. */
static int is_whole_write(tn_access access) { return access == TN_WRITE || access == TN_REPLACE; }

/* The lease that keeps `lease` out; NULL if it may come in. */
static const tn__lease_object *holder_against(const tn__lease_object *lease) {
    if (lease->access == TN_READ) return tn__plane_writer(lease->at);
    if (lease->at->first_lease || lease->is_derivation) return lease->at->first_lease;
    for (unsigned others = tn__lease_others(lease); others;) {
        const tn__lease_object *other = lease->tensor->planes[tn__take_plane(&others)].first_lease;
        if (other && !is_whole_write(other->access)) return other;
    }
    return NULL;
}

/* A derivation makes a plane equal to the others: they stay valid. A plane under a WRITE lease is
 * ALLOCATED, so an op that makes two planes at once stales neither; of one under REPLACE it is the
 * old contents that become stale. */
static void make_others_stale(tn__lease_object *lease) {
    for (unsigned others = tn__lease_others(lease); others;) {
        int i = tn__take_plane(&others);
        tn_plane_state *state = kept_state(&lease->tensor->planes[i]);
        if (!tn__state_is_complete(*state)) continue;
        *state = TN_PLANE_STALE;
        lease->stale_made |= (unsigned char)BIT(i);
    }
}

static void make_others_valid(const tn__lease_object *lease) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        tn__plane_object *plane = &lease->tensor->planes[i];
        tn_plane_state *state = kept_state(plane);
        if (!(lease->stale_made & BIT(i)) || *state != TN_PLANE_STALE) continue;
        *state = plane->kind == TN__MEMORY_HOST ? TN_PLANE_OFFLOADED : TN_PLANE_VALID;
    }
}

/* New memory for the plane; what it had is what the lease may read. */
static TN__SLOW tn_status replace_memory(const tn__lease_object *lease) {
    tn__tensor_object *tensor = lease->tensor;
    tn__plane_object *plane = lease->at;
    TN_TRY(tn__transition_free_replaced(tensor, lease->plane, lease->stream,
                                        lease->stream_id)); /* remains */
    TN_TRY(
        tn__plane_order_before(books_of(tensor), plane, TN_READ, lease->stream, lease->stream_id));
    plane->replaced = tn__host_alloc(1, sizeof *plane->replaced);
    if (!plane->replaced) return TN_OUT_OF_HOST_MEMORY;
    tn__plane_order_init(plane->replaced);
    tn_status status = tn__plane_memory_take(tensor, lease->plane, plane->replaced, lease->stream,
                                             lease->stream_id);
    if (status != TN_OK) {
        tn__transition_end_replaced(plane);
        return status;
    }
    tn__budget_forget(plane);
    tn__plane_order_note(plane, TN_READ, lease->stream, lease->stream_id);
    tn__plane_order_swap(plane, plane->replaced);
    return TN_OK;
}

/* What is in a scratch slot is not written in place: the plane gets memory of its own, or stays as
 * it was. */
static tn_status leave_slot(const tn__lease_object *lease) {
    tn__tensor_object *tensor = lease->tensor;
    tn__plane_object *plane = lease->at;
    tn__scratch_buffer *buffer = plane->buffer;
    tn_plane_state state = plane->state;
    int is_derived = plane->is_derived;
    if (lease->access == TN_UPDATE) {
        return TN_FAIL(
            TN_INVALID_STATE,
            "tensor %s, plane %s is in a scratch slot, where it can not be updated: drop "
            "it, or write it",
            tensor->name, tn_plane_name(lease->plane));
    }
    TN_TRY(tn__transition_drop_announced(tensor, lease->plane, lease->stream));
    tn_status status = tn__transition_make(tensor, lease->plane, lease->stream, lease->stream_id);
    if (status != TN_OK && !tn__plane_has_remains(plane)) {
        tn__scratch_enter(buffer, tensor, lease->plane);
        plane->state = state;
        plane->is_derived = is_derived;
    }
    return status;
}

/* Memory for a plane that has none, or none that may be written. */
static tn_status make_for(const tn__lease_object *lease) {
    tn__tensor_object *tensor = lease->tensor;
    if (lease->at->kind == TN__MEMORY_SLOT) return leave_slot(lease);
    if (!lease->is_derivation || !tn__scratch_takes(tensor, lease->plane)) {
        return tn__transition_make(tensor, lease->plane, lease->stream, lease->stream_id);
    }
    TN_TRY(free_plane(tensor, lease->plane, lease->stream, lease->stream_id)); /* remains */
    TN_TRY(tn__scratch_take(tensor, lease->plane, lease->stream, lease->stream_id));
    lease->at->state = TN_PLANE_ALLOCATED;
    return TN_OK;
}

static int needs_memory(const tn__lease_object *lease) {
    const tn__plane_object *plane = lease->at;
    int is_write = lease->access == TN_WRITE || lease->access == TN_UPDATE;
    return plane->state == TN_PLANE_ABSENT ||
           (plane->kind == TN__MEMORY_SLOT && is_write && !lease->is_derivation);
}

/* Makes ready what the lease uses: memory where it writes, and its stream behind earlier uses. */
static tn_status prepare(tn__lease_object *lease) {
    if (lease->has_made_plane) return make_for(lease);
    if (lease->access == TN_REPLACE) return replace_memory(lease);
    TN_TRY(tn__plane_order_before(books_of(lease->tensor), lease->at, lease->access, lease->stream,
                                  lease->stream_id));
    int is_again = lease->is_derivation && lease->access != TN_READ && lease->at->buffer;
    return is_again ? tn__scratch_derive_again(lease->at->buffer, lease->stream) : TN_OK;
}

static TN__SLOW tn_status fail_not_valid(const tn__lease_object *lease) {
    TN_TRY(tn__saved_admit(lease->tensor));
    return TN_FAIL(TN_INVALID_STATE, "tensor %s, plane %s is %s: %s needs a valid plane",
                   lease->tensor->name, tn_plane_name(lease->plane),
                   tn__plane_state_name(lease->at->state), tn__access_name(lease->access));
}

/* No lease is given of host memory. A plane that will be written whole gets new memory, in the
 * order of the lease: from there on nothing can fail. */
static TN__SLOW tn_status bring_back(const tn__lease_object *lease) {
    tn__relocation here = {TN__MEMORY_OWNED, TN_PLANE_ALLOCATED,
                           tn__plane_use_on(lease->stream, lease->stream_id), 0};
    if (lease->access != TN_WRITE) {
        return tn__transition_fetch(lease->tensor, lease->plane, lease->stream);
    }
    return tn__transition_relocate(lease->tensor, lease->plane, &here);
}

tn_status tn__transition_begin_any(tn__lease_object *lease) {
    tn__tensor_object *tensor = lease->tensor;
    tn__plane_object *plane = lease->at;
    const tn__lease_object *holder = holder_against(lease);
    if (holder) return tn__fail_in_use(holder, tn__access_name(lease->access));
    if (!is_whole_write(lease->access) && !tn__state_is_complete(plane->state)) {
        return fail_not_valid(lease);
    }
    if (plane->kind == TN__MEMORY_HOST) TN_TRY(bring_back(lease));
    if (plane->foreign) TN_TRY(tn__foreign_admit(tensor, lease->plane, lease->access));
    lease->state_before = plane->state;
    lease->has_made_plane = needs_memory(lease);
    TN_TRY(prepare(lease));
    tn__plane_order_note(plane, lease->access, lease->stream, lease->stream_id);
    if (lease->access != TN_READ) plane->state = TN_PLANE_ALLOCATED;
    if (lease->access != TN_READ && !lease->is_derivation) make_others_stale(lease);
    tn__lease_link(lease, plane);
    TN_ASSERT(tn__tensor_is_valid(tensor));
    return TN_OK;
}

/* ---- end ----------------------------------------------------------------------------------- */

/* Where a free that follows the lease goes: work of a stream that has ended is done. */
static tn__plane_use free_stream_of(const tn__lease_object *lease) {
    if (lease->is_stream_ended) return tn__plane_use_on(NULL, 0);
    return tn__plane_use_on(lease->stream, lease->stream_id);
}

/* Under most policies a plane that the write has made stale is not kept to be derived again in
 * place. */
static tn_status free_stale(tn__lease_object *lease) {
    tn__tensor_object *tensor = lease->tensor;
    for (unsigned others = tn__lease_others(lease); others;) {
        int i = tn__take_plane(&others);
        if (tensor->planes[i].state != TN_PLANE_STALE) continue;
        int is_useless = tensor->planes[i].kind == TN__MEMORY_HOST; /* nothing is written there */
        if (!is_useless && !tn__policy_drops_stale(tensor, (tn_plane)i)) continue;
        tn__plane_use on = free_stream_of(lease);
        TN_TRY(free_plane(tensor, (tn_plane)i, on.stream, on.stream_id));
    }
    return TN_OK;
}

static int has_old_memory(const tn__lease_object *lease) {
    return lease->access == TN_REPLACE && lease->at->replaced;
}

/* Once the old memory is gone there is no way back: a stale plane that can not be freed then stays,
 * as one does that the policy keeps. */
static TN__SLOW tn_status free_old_memory(tn__lease_object *lease) {
    tn__plane_use on = free_stream_of(lease);
    tn__saved_error error;
    TN_TRY(tn__transition_free_replaced(lease->tensor, lease->plane, on.stream, on.stream_id));
    tn__error_save(&error);
    (void)free_stale(lease);
    tn__error_restore(&error);
    return TN_OK;
}

/* What the write makes superfluous. */
static tn_status free_superseded(tn__lease_object *lease) {
    return has_old_memory(lease) ? free_old_memory(lease) : free_stale(lease);
}

static TN__SLOW tn_status finish_write(tn__lease_object *lease, tn__plane_object *plane) {
    if (!lease->is_derivation) {
        TN_TRY(free_superseded(lease));
        tn__tensor_set_written(lease->tensor);
    }
    plane->state = TN_PLANE_VALID;
    plane->is_derived = lease->is_derivation;
    if (plane->kept_by) tn__budget_forget(plane);
    return TN_OK;
}

tn_status tn__transition_end_any(tn__lease_object *lease) {
    tn__plane_object *plane = lease->at;
    if (!lease->is_stream_ended) {
        TN_TRY(tn__plane_order_record(lease->tensor, plane, lease->stream, lease->stream_id));
    }
    if (lease->access != TN_READ) TN_TRY(finish_write(lease, plane));
    tn__lease_unlink(lease, plane);
    TN_ASSERT(tn__tensor_is_valid(lease->tensor));
    return TN_OK;
}

static void give_up_write(tn__lease_object *lease, const tn__plane_use *on) {
    tn__tensor_object *tensor = lease->tensor;
    tn__plane_object *plane = lease->at;
    plane->state = TN_PLANE_ALLOCATED;
    int is_as_before = lease->is_derivation || lease->is_untouched;
    if (is_as_before && !lease->has_made_plane) plane->state = lease->state_before;
    if (lease->has_made_plane) (void)free_plane(tensor, lease->plane, on->stream, on->stream_id);
}

/* The plane has its old memory again; what was new is given back as soon as that is possible. */
static void give_up_replacement(tn__lease_object *lease, const tn__plane_use *on) {
    tn__plane_object *plane = lease->at;
    plane->replaced->state = TN_PLANE_ABSENT;
    (void)tn__transition_free_replaced(lease->tensor, lease->plane, on->stream, on->stream_id);
}

void tn__transition_abandon(tn__lease_object *lease) {
    tn__plane_object *plane = lease->at;
    tn__saved_error error; /* what made the caller abandon it is what he must hear of */
    int is_replacement = has_old_memory(lease);
    tn__plane_use on = free_stream_of(lease);
    tn__error_save(&error);
    if (is_replacement) tn__plane_order_swap(plane, plane->replaced);
    if (!lease->is_stream_ended &&
        tn__plane_order_record(lease->tensor, plane, lease->stream, lease->stream_id) != TN_OK) {
        tn__plane_order_mark_unrecorded(plane, lease->stream_id);
        if (plane->replaced) tn__plane_order_mark_unrecorded(plane->replaced, lease->stream_id);
        if (lease->stream_id & TN__STREAM_ID_MAY_GO) {
            on = tn__plane_use_on(TN__NO_STREAM, TN__NO_STREAM_ID); /* it may be gone */
        }
    }
    tn__lease_unlink(lease, plane);
    if (is_replacement)
        give_up_replacement(lease, &on);
    else if (lease->access != TN_READ)
        give_up_write(lease, &on);
    make_others_valid(lease);
    tn__error_restore(&error);
    TN_ASSERT(tn__tensor_is_valid(lease->tensor));
}

void tn__transition_end_surely(tn__lease_object *lease) {
    tn__plane_object *plane = lease->at;
    tn__saved_error error;
    TN_ASSERT(lease->access == TN_READ || lease->access == TN_UPDATE);
    if (lease->access == TN_READ) {
        tn__transition_abandon(lease);
        return;
    }
    tn__error_save(&error);
    if (tn__transition_end(lease) != TN_OK) {
        tn__plane_order_mark_unrecorded(plane, lease->stream_id);
        tn__tensor_set_written(lease->tensor);
        plane->state = TN_PLANE_VALID;
        plane->is_derived = 0;
        tn__budget_forget(plane);
        tn__lease_unlink(lease, plane);
    }
    tn__error_restore(&error);
    TN_ASSERT(tn__tensor_is_valid(lease->tensor));
}

/* ---- hand over ----------------------------------------------------------------------------- */

void tn__transition_hand_over(tn__tensor_object *from, tn_plane plane, tn__tensor_object *to) {
    tn__plane_object *source = &from->planes[plane];
    TN_CHECK(!source->first_lease && !source->replaced);
    TN_CHECK(to->planes[plane].state == TN_PLANE_ABSENT);
    TN_CHECK(!tn__plane_has_remains(&to->planes[plane]));
    tn__budget_forget(source);
    tn__plane_memory_move(from, plane, to);
    set_absent(source);
    TN_ASSERT(tn__tensor_is_valid(from));
    TN_ASSERT(tn__tensor_is_valid(to));
}

/* ---- drop ---------------------------------------------------------------------------------- */

tn_status tn__transition_check_drop(tn__tensor_object *tensor, tn_plane plane, const char *what) {
    const tn__plane_object *object = &tensor->planes[plane];
    if (object->first_lease) return tn__fail_in_use(object->first_lease, what);
    if (is_last_copy(tensor, plane)) {
        return TN_FAIL(TN_INVALID_STATE,
                       "tensor %s, plane %s is %s and the last copy of its contents: destroy the "
                       "tensor, or make another plane valid first",
                       tensor->name, tn_plane_name(plane), tn__plane_state_name(object->state));
    }
    return TN_OK;
}

tn_status tn__transition_drop(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                              uint64_t stream_id) {
    TN_TRY(tn__transition_check_drop(tensor, plane, "drop"));
    TN_TRY(free_plane(tensor, plane, stream, stream_id));
    TN_ASSERT(tn__tensor_is_valid(tensor));
    return TN_OK;
}

tn_status tn__transition_release(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                                 uint64_t stream_id) {
    if (tn__policy_offloads(tensor)) return tn__offload_release(tensor, plane, stream, stream_id);
    tn__plane_use on = tn__plane_use_on(stream, stream_id);
    int drops = 0;
    TN_TRY(tn__policy_release(tensor, plane, &on, &drops));
    if (!drops) return TN_OK;
    TN_TRY(free_plane(tensor, plane, stream, stream_id));
    TN_ASSERT(tn__tensor_is_valid(tensor));
    return TN_OK;
}
