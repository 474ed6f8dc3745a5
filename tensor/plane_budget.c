/* Byte budgets: what a plane is worth, and who stays when there is no room for all.
 *
 *     worth = times it was wanted x cost of deriving it again / its bytes
 *     cost  = the launch, as the bytes that could be moved meanwhile, + bytes read and written
 *
 * Between planes of one size that is the number of times; of two that are wanted as often the
 * smaller one stays, since a launch costs the same for less memory.
 *
 * Invariants:
 * - The sum of `kept_bytes` over the planes whose `kept_by` is a budget is its kept_bytes, and that
 *   is at most its limit.
 * - A plane is dropped for another only if it is worth less by more than two wants of the other. A
 *   plane's turn in a cycle, and in a walk there and back, makes a difference of at most two: so
 *   equal planes that are wanted in any such order never displace each other, and the same ones
 *   stay.
 * - Wants are halved for all when one has WANTS_MAX, so that what was wanted long ago fades.
 */
#include "plane_budget.h"

#include "books.h"
#include "format_table.h"
#include "options.h"
#include "plane_memory.h"
#include "plane_order.h"
#include "plane_policy.h"
#include "plane_transition.h"

#include <math.h>

enum { WANTS_MAX = 64, WANTS_OF_A_CYCLE = 2 };

/* 4 microseconds of an H200's 4.8 TB/s, rounded down to a power of two. */
static const double launch_bytes = 16.0 * 1024 * 1024;

/* ---- budgets -------------------------------------------------------------------------------- */

static size_t limit_of(const tn__plane_budget *budget) {
    return budget->is_set ? budget->limit_bytes : tn__options_get()->plane_budget_bytes;
}

/* The scope whose budget planes in it come under: the nearest that has one, else the root. */
static tn__scope_object *budget_scope_of(tn__scope_object *scope) {
    while (!scope->budget.is_set && scope->parent)
        scope = scope->parent;
    return scope;
}

void tn__budget_forget(tn__plane_object *plane) {
    if (!plane->kept_by) return;
    TN_CHECK(plane->kept_by->kept_bytes >= plane->kept_bytes);
    plane->kept_by->kept_bytes -= plane->kept_bytes;
    plane->kept_by = NULL;
    plane->kept_bytes = 0;
}

void tn__budget_forget_all(tn__tensor_object *tensor) {
    for (int i = 0; i < TN_PLANE_COUNT; i++)
        tn__budget_forget(&tensor->planes[i]);
}

static size_t bytes_of(const tn__plane_object *plane) {
    return plane->bytes[TN__PART_DATA] + plane->bytes[TN__PART_SCALE];
}

/* ---- worth ---------------------------------------------------------------------------------- */

static double worth_of(size_t bytes, unsigned wants) {
    return (double)wants * (2.0 + launch_bytes / (double)bytes);
}

typedef void (*plane_visitor)(tn__tensor_object *tensor, tn_plane plane, void *argument);

static void for_each_plane(tn__scope_object *root, plane_visitor visit, void *argument) {
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
            for (int plane = 0; plane < TN_PLANE_COUNT; plane++)
                visit(tensor, (tn_plane)plane, argument);
        }
    }
}

static void halve_wants(tn__tensor_object *tensor, tn_plane plane, void *unused) {
    (void)unused;
    tensor->wants[plane] /= 2;
}

static void count_want(tn__tensor_object *tensor, tn_plane plane, tn__scope_object *scope) {
    tensor->wants[plane]++;
    while (tensor->wants[plane] >= WANTS_MAX)
        for_each_plane(scope, halve_wants, NULL);
}

/* ---- victims -------------------------------------------------------------------------------- */

/* What is kept and worth least, of what is not chosen yet and may go. */
typedef struct search {
    const tn__plane_budget *budget;
    tn__tensor_object *tensor; /* NULL: none found */
    tn_plane plane;
    double worth;
    const tn__lease_object *holder; /* of one that could not be chosen */
} search;

static void look_at(tn__tensor_object *tensor, tn_plane plane, void *argument) {
    search *found = argument;
    const tn__plane_object *object = &tensor->planes[plane];
    if (object->kept_by != found->budget || object->is_chosen) return;
    if (object->first_lease) found->holder = object->first_lease;
    if (!tn__plane_can_return(tensor, plane)) return;
    double worth = worth_of(object->kept_bytes, tensor->wants[plane]);
    if (found->tensor && worth >= found->worth) return;
    found->tensor = tensor;
    found->plane = plane;
    found->worth = worth;
}

static void unchoose(tn__tensor_object *tensor, tn_plane plane, void *unused) {
    (void)unused;
    tensor->planes[plane].is_chosen = 0;
}

/* A kept plane that has become the last copy of its contents, or the written one, is not kept for
 * its worth any more. */
static void forget_needed(tn__tensor_object *tensor, tn_plane plane, void *argument) {
    tn__plane_object *object = &tensor->planes[plane];
    if (object->kept_by != argument || object->first_lease) return;
    if (!tn__plane_is_spare(tensor, plane)) tn__budget_forget(object);
}

/* Chooses planes worth less than `worth` until at most `most` bytes would be kept. 1 if there are
 * enough; `holder` is then or else the lease that stood in the way of one, if any did. */
static int choose(tn__scope_object *scope, size_t most, double worth,
                  const tn__lease_object **holder) {
    tn__plane_budget *budget = &scope->budget;
    for_each_plane(scope, forget_needed, budget);
    size_t kept = budget->kept_bytes;
    while (kept > most) {
        search found = {.budget = budget};
        for_each_plane(scope, look_at, &found);
        *holder = found.holder;
        if (!found.tensor || found.worth >= worth) return 0;
        tn__plane_object *object = &found.tensor->planes[found.plane];
        object->is_chosen = 1;
        kept -= object->kept_bytes;
    }
    return 1;
}

typedef struct dropping {
    const tn__plane_use *on; /* NULL: each in the order of its last use */
    tn_status status;
} dropping;

static tn__plane_use use_for(const tn__plane_object *plane, const dropping *job) {
    return job->on ? *job->on : tn__plane_order_last(plane);
}

static void announce_chosen(tn__tensor_object *tensor, tn_plane plane, void *argument) {
    dropping *job = argument;
    tn__plane_object *object = &tensor->planes[plane];
    if (!object->is_chosen || job->status != TN_OK) return;
    tn__plane_use on = use_for(object, job);
    job->status = tn__plane_memory_announce(tensor->scope->books, object, on.stream, on.stream_id);
}

static void drop_chosen(tn__tensor_object *tensor, tn_plane plane, void *argument) {
    dropping *job = argument;
    tn__plane_object *object = &tensor->planes[plane];
    if (!object->is_chosen || job->status != TN_OK) return;
    job->status = tn__transition_drop_announced(tensor, plane, use_for(object, job).stream);
}

static tn_status drop_all_chosen(tn__scope_object *scope, const tn__plane_use *on) {
    dropping job = {on, TN_OK};
    for_each_plane(scope, announce_chosen, &job);
    for_each_plane(scope, drop_chosen, &job);
    for_each_plane(scope, unchoose, NULL);
    return job.status;
}

/* ---- releasing ------------------------------------------------------------------------------ */

/* Room for `bytes` more, made at the cost of planes worth less than `worth`. */
static tn_status make_room(tn__scope_object *scope, size_t bytes, double worth,
                           const tn__plane_use *on, int *has_room) {
    const tn__lease_object *holder = NULL;
    size_t limit = limit_of(&scope->budget);
    *has_room = bytes <= limit;
    if (!*has_room || scope->budget.kept_bytes <= limit - bytes) return TN_OK;
    *has_room = choose(scope, limit - bytes, worth, &holder);
    if (*has_room) return drop_all_chosen(scope, on);
    for_each_plane(scope, unchoose, NULL);
    return TN_OK;
}

static tn_status admit(tn__tensor_object *tensor, tn_plane plane, tn__scope_object *scope,
                       const tn__plane_use *on, int *keeps) {
    tn__plane_object *object = &tensor->planes[plane];
    unsigned wants = tensor->wants[plane] + 1; /* this one */
    unsigned ahead = wants > WANTS_OF_A_CYCLE ? wants - WANTS_OF_A_CYCLE : 0;
    size_t bytes = bytes_of(object);
    TN_TRY(make_room(scope, bytes, worth_of(bytes, ahead), on, keeps));
    tn__budget_forget(object); /* of another scope's budget, if it is */
    if (!*keeps) return TN_OK;
    object->kept_by = &scope->budget;
    object->kept_bytes = bytes;
    scope->budget.kept_bytes += bytes;
    TN_ASSERT(scope->budget.kept_bytes <= limit_of(&scope->budget));
    return TN_OK;
}

tn_status tn__budget_release(tn__tensor_object *tensor, tn_plane plane, const tn__plane_use *on,
                             int *keeps) {
    tn__plane_object *object = &tensor->planes[plane];
    tn__scope_object *scope = budget_scope_of(tensor->scope);
    TN_ASSERT(tn__plane_is_spare(tensor, plane));
    *keeps = object->kept_by == &scope->budget;
    if (!*keeps) TN_TRY(admit(tensor, plane, scope, on, keeps));
    count_want(tensor, plane, scope);
    return TN_OK;
}

/* ---- the public part ------------------------------------------------------------------------ */

static tn_status shrink(tn__scope_object *scope, size_t bytes) {
    const tn__lease_object *holder = NULL;
    if (choose(scope, bytes, HUGE_VAL, &holder)) return drop_all_chosen(scope, NULL);
    for_each_plane(scope, unchoose, NULL);
    TN_CHECK(holder != NULL); /* else all could go */
    return tn__fail_in_use(holder, "making the budget smaller");
}

tn_status tn_scope_budget_set(tn_scope scope, size_t bytes) {
    tn__scope_object *object;
    TN_TRY(tn__scope_acquire(scope, &object));
    tn_status status = shrink(object, bytes);
    if (status == TN_OK) {
        object->budget.is_set = 1;
        object->budget.limit_bytes = bytes;
    }
    tn__scope_unlock(object);
    return status;
}

tn_status tn_scope_budget_get(tn_scope scope, tn_plane_budget *out) {
    tn__scope_object *object;
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_scope_budget_get: out is not TN_PLANE_BUDGET_INIT");
    TN_TRY(tn__scope_acquire(scope, &object));
    const tn__plane_budget *budget = &budget_scope_of(object)->budget;
    out->limit_bytes = limit_of(budget);
    out->kept_bytes = budget->kept_bytes;
    tn__scope_unlock(object);
    return TN_OK;
}
