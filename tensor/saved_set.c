/* Saved sets: dropped, and rebuilt by a function of the program.
 *
 *     WHOLE ---- tn_saved_drop ----> DROPPED ---- tn_saved_rebuild ----> WHOLE
 *                                      ^  |
 *                                      +--+  the function failed, or left something out
 *
 * Invariants:
 * - While a set is dropped its tensors can be given no plane, and have none but for what the driver
 *   did not take back: handles, names and shapes are all there is. `dropped` of a tensor says which
 *   planes had contents.
 * - A rebuild ends with every one of those planes valid or derivable, and no lease on them; or with
 *   all that the function wrote or made in the set freed again.
 * - Tensors whose memory is not ours are left alone: to drop them frees nothing.
 * */
#include "saved_set.h"

#include "books.h"
#include "format_table.h"
#include "host_alloc.h"
#include "plane_transition.h"
#include "scope.h"

/* ---- which tensors --------------------------------------------------------------------------- */

static tn__scope_object *set_scope_of(tn__scope_object *scope) {
    while (scope && !scope->saved)
        scope = scope->parent;
    return scope;
}

static int has_foreign_plane(const tn__tensor_object *tensor) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (tensor->planes[i].kind == TN__MEMORY_FOREIGN) return 1;
    }
    return 0;
}

/* The tensor after `after` that the set has to do with; the first one after NULL. */
static tn__tensor_object *next_tensor(tn__scope_object *root, tn__tensor_object *after) {
    tn__scope_object *scope = after ? after->scope : root;
    tn__tensor_object *tensor = after ? after->next : root->first_tensor;
    for (;;) {
        for (; tensor; tensor = tensor->next) {
            int is_ours = !tensor->is_of_library && !tensor->view && !has_foreign_plane(tensor);
            if (is_ours && set_scope_of(tensor->scope) == root) return tensor;
        }
        scope = tn__scope_next(scope, root);
        if (!scope) return NULL;
        tensor = scope->first_tensor;
    }
}

#define FOR_EACH_TENSOR(tensor, root)                                                              \
    for (tn__tensor_object * (tensor) = next_tensor((root), NULL); (tensor);                       \
         (tensor) = next_tensor((root), (tensor)))

static unsigned planes_with_contents(const tn__tensor_object *tensor) {
    unsigned planes = 0;
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (tn__state_is_complete(tensor->planes[i].state)) planes |= TN_PLANE_BIT(i);
    }
    return planes;
}

static int is_empty(const tn__tensor_object *tensor) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (tensor->planes[i].state != TN_PLANE_ABSENT) return 0;
    }
    return 1;
}

tn_status tn__saved_admit(const tn__tensor_object *tensor) {
    const tn__scope_object *scope = set_scope_of(tensor->scope);
    if (!scope || !scope->saved->is_dropped || scope->saved->is_rebuilding) return TN_OK;
    if (tensor->is_of_library) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "tensor %s is of the saved set %s, which is dropped: tn_saved_rebuild first",
                   tensor->name, scope->name);
}

void tn__saved_delete(tn__scope_object *scope) {
    tn__host_free(scope->saved);
    scope->saved = NULL;
}

/* ---- drop ------------------------------------------------------------------------------------ */

static tn_status check_unleased(tn__scope_object *root, const char *what) {
    FOR_EACH_TENSOR(tensor, root) {
        const tn__lease_object *lease = tn__tensor_lease(tensor);
        if (lease) return tn__fail_in_use(lease, what);
    }
    return TN_OK;
}

static tn_status drop(tn__scope_object *root, const tn__plane_use *on) {
    TN_TRY(check_unleased(root, "dropping its saved set"));
    FOR_EACH_TENSOR(tensor, root) { TN_TRY(tn__transition_announce_empty(tensor, on)); }
    FOR_EACH_TENSOR(tensor, root) {
        unsigned before = planes_with_contents(tensor);
        tn_status status = tn__transition_empty(tensor, on);
        if (planes_with_contents(tensor) != before) {
            tensor->dropped |= before;
            root->saved->is_dropped = 1; /* the rest can be dropped by another call, or stay */
        }
        if (status != TN_OK) return status;
    }
    root->saved->is_dropped = 1;
    return TN_OK;
}

static tn_status require_set(const tn__scope_object *scope) {
    if (!scope->saved) {
        return TN_FAIL(TN_INVALID_STATE,
                       "scope %s is no saved set: give it a function with tn_saved_recompute_set",
                       scope->name);
    }
    if (scope->saved->is_rebuilding) {
        return TN_FAIL(TN_INVALID_STATE, "the saved set %s is being rebuilt", scope->name);
    }
    return TN_OK;
}

tn_status tn_saved_drop(tn_scope scope, tn_stream stream) {
    tn__scope_object *object;
    tn__plane_use on = tn__plane_use_on(stream, 0);
    TN_TRY(tn__scope_acquire(scope, &object));
    tn_status status = require_set(object);
    if (status == TN_OK) status = tn__books_stream_id(object->books, stream, &on.stream_id);
    if (status == TN_OK) status = drop(object, &on);
    tn__scope_unlock(object);
    return status;
}

/* ---- rebuild --------------------------------------------------------------------------------- */

static int is_whole(const tn__tensor_object *tensor, tn_plane plane) {
    tn_plane source;
    const char *why;
    if (tn__state_is_complete(tensor->planes[plane].state)) return 1;
    if (!tn__format_source(tensor->format, plane, &source, &why)) return 0;
    return tn__state_is_complete(tensor->planes[source].state);
}

static tn_status check_rebuilt(tn__scope_object *root) {
    TN_TRY(check_unleased(root, "the end of rebuilding its saved set"));
    FOR_EACH_TENSOR(tensor, root) {
        for (int i = 0; i < TN_PLANE_COUNT; i++) {
            if (!(tensor->dropped & TN_PLANE_BIT(i)) || is_whole(tensor, (tn_plane)i)) continue;
            return TN_FAIL(TN_INVALID_STATE,
                           "the recompute function of %s left tensor %s, plane %s without contents",
                           root->name, tensor->name, tn_plane_name((tn_plane)i));
        }
    }
    return TN_OK;
}

/* Those of the function: an export is held by another library, which will end it, and a lease on
 * another stream than the function was given by another thread. */
static void abandon_leases(tn__tensor_object *tensor, uint64_t stream_id) {
    tn__books *books = tensor->scope->books;
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        for (tn__lease_object *lease = tensor->planes[i].first_lease; lease;) {
            tn__lease_object *next = lease->next;
            int is_ours = lease->stream_id == stream_id && !lease->is_export;
            if (lease->handle.value && is_ours) {
                tn__transition_abandon(lease);
                tn__books_end_lease(books, lease);
            }
            lease = next;
        }
    }
}

static int is_new(const tn__tensor_object *tensor, const tn__saved_set *set) {
    return tensor->number > set->made_before;
}

/* What the function made: the views first, then what they were views of. */
static void delete_new(tn__scope_object *root) {
    for (int pass = 0; pass < 2; pass++) {
        for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
            for (tn__tensor_object *tensor = scope->first_tensor; tensor;) {
                tn__tensor_object *next = tensor->next;
                int is_pass = pass == (tensor->view ? 0 : 1);
                int may_go = is_empty(tensor) && !tensor->first_view && !tensor->is_of_library;
                if (is_pass && may_go && is_new(tensor, root->saved))
                    tn__scope_delete_tensor(tensor);
                tensor = next;
            }
        }
    }
}

/* What can not be freed now keeps its memory until the next rebuild or the end of the scope. */
static void undo(tn__scope_object *root) {
    tn__saved_error error;
    tn__error_save(&error);
    FOR_EACH_TENSOR(tensor, root) {
        if (!tensor->is_rebuilt && !is_new(tensor, root->saved)) continue;
        abandon_leases(tensor, root->saved->stream_id);
        if (tn__tensor_lease(tensor)) continue;
        if (tn__transition_announce_empty(tensor, NULL) != TN_OK) continue;
        (void)tn__transition_empty(tensor, NULL);
    }
    delete_new(root);
    tn__error_restore(&error);
}

static void begin_rebuild(tn__scope_object *root, uint64_t stream_id) {
    root->saved->is_rebuilding = 1;
    root->saved->stream_id = stream_id;
    root->saved->made_before = root->books->tensors_made;
    FOR_EACH_TENSOR(tensor, root) { tensor->is_rebuilt = tensor->dropped || is_empty(tensor); }
}

static tn_status end_rebuild(tn__scope_object *root, tn_status status) {
    root->saved->is_rebuilding = 0;
    if (status == TN_OK) status = check_rebuilt(root);
    if (status != TN_OK) {
        undo(root);
        return status;
    }
    root->saved->is_dropped = 0;
    FOR_EACH_TENSOR(tensor, root) { tensor->dropped = 0; }
    return TN_OK;
}

/* The lock is given up while the function runs, which may close the scope for good. */
tn_status tn_saved_rebuild(tn_scope scope, tn_stream stream) {
    tn__scope_object *object;
    TN_TRY(tn__scope_acquire(scope, &object));
    tn_status status = require_set(object);
    int is_dropped = status == TN_OK && object->saved->is_dropped;
    uint64_t stream_id = 0;
    tn__saved_set set = {.function = NULL};
    if (is_dropped) status = tn__books_stream_id(object->books, stream, &stream_id);
    if (is_dropped && status == TN_OK) {
        begin_rebuild(object, stream_id);
        set = *object->saved;
    }
    tn__scope_unlock(object);
    if (!is_dropped || status != TN_OK) return status;
    status = set.function(set.context, scope, stream);
    TN_TRY(tn__scope_acquire(scope, &object));
    status = end_rebuild(object, status);
    tn__scope_unlock(object);
    return status;
}

/* ---- the function ---------------------------------------------------------------------------- */

static tn_status set_function(tn__scope_object *scope, tn_recompute_function function,
                              void *context) {
    TN_REQUIRE(scope->kind == TN_SCOPE_SAVED,
               "tn_saved_recompute_set: scope %s is not of kind TN_SCOPE_SAVED", scope->name);
    if (!scope->saved) {
        scope->saved = tn__host_alloc(1, sizeof *scope->saved);
        if (!scope->saved) return TN_OUT_OF_HOST_MEMORY;
    }
    TN_TRY(require_set(scope));
    scope->saved->function = function;
    scope->saved->context = context;
    return TN_OK;
}

tn_status tn_saved_recompute_set(tn_scope scope, tn_recompute_function function, void *context) {
    tn__scope_object *object;
    TN_REQUIRE(function, "tn_saved_recompute_set: the function is NULL");
    TN_TRY(tn__scope_acquire(scope, &object));
    tn_status status = set_function(object, function, context);
    tn__scope_unlock(object);
    return status;
}

tn_status tn_saved_is_dropped(tn_scope scope, int *out) {
    tn__scope_object *object;
    TN_REQUIRE(out, "tn_saved_is_dropped: out is NULL");
    TN_TRY(tn__scope_acquire(scope, &object));
    *out = object->saved && object->saved->is_dropped;
    tn__scope_unlock(object);
    return TN_OK;
}
