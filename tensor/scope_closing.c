/* Closing a scope although planes in it are leased.
 *
 *     tn_scope_close_deferred     the handles of scopes and tensors end, views end, and all planes
 *                                 that nobody leases are freed
 *     a lease ends                its plane is freed if it was the last one on it, and tensors and
 *                                 scopes that have nothing left go
 *
 * Invariants: if a scope is closing, so are all below it; nothing in them has a handle but leases,
 * so that nobody can begin anything there. Leases that the library takes for itself have none, so
 * a scope with such a lease does not begin to close. The memory of a scratch buffer stays as long
 * as the plane that is in it.
 */
#include "scope_closing.h"

#include "books.h"
#include "plane_transition.h"
#include "scope.h"
#include "scratch_slot.h"
#include "tensor_view.h"
#include "tenure_lifetime.h"

/* ---- what is freed ------------------------------------------------------------------------- */

/* The buffer that the tensor is the memory of; NULL if it is no scratch memory. */
static tn__scratch_buffer *buffer_of(const tn__tensor_object *tensor) {
    tn__scratch_slot *slot = tensor->scope->slot;
    for (int i = 0; slot && i < slot->buffer_count; i++) {
        if (slot->buffers[i].memory == tensor) return &slot->buffers[i];
    }
    return NULL;
}

static int is_kept(const tn__tensor_object *tensor, int plane) {
    const tn__scratch_buffer *buffer = buffer_of(tensor);
    if (tensor->planes[plane].first_lease) return 1;
    return buffer && buffer->resident;
}

static int is_empty(const tn__tensor_object *tensor) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (tensor->planes[i].state != TN_PLANE_ABSENT) return 0;
        if (tn__plane_has_remains(&tensor->planes[i])) return 0;
    }
    return 1;
}

/* What can not be freed now is tried again: see tn__closing_retry. */
static void free_planes(tn__tensor_object *tensor) {
    tn__saved_error error;
    tn__error_save(&error);
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (!is_kept(tensor, i)) (void)tn__transition_end_plane(tensor, (tn_plane)i);
    }
    tn__error_restore(&error);
}

/* Scratch memory last, when what was in it is gone. */
static void free_all(tn__scope_object *root) {
    for (int is_scratch = 0; is_scratch < 2; is_scratch++) {
        for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
            tn__tensor_object *tensor = scope->first_tensor;
            for (; tensor; tensor = tensor->next) {
                if ((buffer_of(tensor) != NULL) == is_scratch) free_planes(tensor);
            }
        }
    }
}

static void delete_empty_tensors(tn__scope_object *root) {
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (tn__tensor_object *tensor = scope->first_tensor; tensor;) {
            tn__tensor_object *next = tensor->next;
            tn__scratch_buffer *buffer = buffer_of(tensor);
            if (is_empty(tensor)) {
                if (buffer) buffer->memory = NULL;
                tn__scope_delete_tensor(tensor);
            }
            tensor = next;
        }
    }
}

static tn__scope_object *empty_scope_in(tn__scope_object *root) {
    tn__scope_object *scope = root;
    while (scope && (scope->first_child || scope->first_tensor))
        scope = tn__scope_next(scope, root);
    return scope;
}

/* Frees what it can below a closing scope; 1 if that is gone itself. */
static int settle(tn__scope_object *root) {
    free_all(root);
    delete_empty_tensors(root);
    for (;;) {
        tn__scope_object *scope = empty_scope_in(root);
        int is_root = scope == root;
        if (!scope) return 0;
        tn__scope_delete_empty(scope);
        if (is_root) return 1;
    }
}

static tn__scope_object *topmost_of(tn__scope_object *scope) {
    while (scope->parent && scope->parent->is_closing)
        scope = scope->parent;
    return scope;
}

void tn__closing_settle(const tn__tensor_object *tensor) {
    const tn__books *books = tensor->scope->books;
    unsigned lock = books->lock;
    (void)settle(topmost_of(tensor->scope));
    int is_over = books->first_root == NULL;
    tn__unlock(lock);
    if (is_over) tn__books_collect(books);
}

static tn__scope_object *next_topmost(const tn__books *books, const tn__scope_object *after) {
    int is_past = after == NULL;
    for (tn__scope_object *root = books->first_root; root; root = root->next) {
        for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
            int is_topmost = scope->is_closing && topmost_of(scope) == scope;
            if (is_past && is_topmost) return scope;
            if (scope == after) is_past = 1;
        }
    }
    return NULL;
}

void tn__closing_retry(tn__books *books) {
    const tn__scope_object *kept = NULL;
    while (books->closing_scopes > 0) {
        tn__scope_object *scope = next_topmost(books, kept);
        if (!scope) return;
        if (!settle(scope)) kept = scope;
    }
}

/* ---- beginning to close -------------------------------------------------------------------- */

static const tn__lease_object *library_lease_in(tn__scope_object *root) {
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
            for (int i = 0; i < TN_PLANE_COUNT; i++) {
                const tn__lease_object *lease = tensor->planes[i].first_lease;
                for (; lease; lease = lease->next) {
                    if (!lease->handle.value) return lease;
                }
            }
        }
    }
    return NULL;
}

/* After it, nothing that is freed at once is likely to be refused. */
static tn_status announce_all(tn__scope_object *root) {
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
            for (int i = 0; i < TN_PLANE_COUNT; i++) {
                if (is_kept(tensor, i)) continue;
                TN_TRY(tn__transition_announce_plane(tensor, (tn_plane)i));
            }
        }
    }
    return TN_OK;
}

static tn_status check(tn__scope_object *root) {
    const tn__lease_object *lease = library_lease_in(root);
    const tn__tensor_object *view = tn__scope_outer_view(root);
    if (lease) return tn__fail_in_use(lease, "closing its scope");
    if (view) return tn__fail_viewed(view, "closing its scope");
    return announce_all(root);
}

/* Leases through a view are the base's alone from now on. */
static void end_view(tn__tensor_object *view) {
    for (tn__lease_object *lease = tn__tensor_lease(view); lease; lease = tn__tensor_lease(view))
        lease->through = NULL;
    tn__scope_delete_tensor(view);
}

static void end_handles(tn__scope_object *scope) {
    for (tn__tensor_object *tensor = scope->first_tensor; tensor;) {
        tn__tensor_object *next = tensor->next;
        if (tensor->view) {
            end_view(tensor);
        } else if (tensor->handle.value) {
            tn__handle_destroy(tensor->handle.value);
            tensor->handle.value = 0;
        }
        tensor = next;
    }
    if (scope->is_closing) return;
    tn__handle_destroy(scope->handle.value);
    scope->handle.value = 0;
    scope->is_closing = 1;
    scope->books->closing_scopes++;
}

tn_status tn_scope_close_deferred(tn_scope scope) {
    tn__scope_object *object;
    if (scope.value == 0) return TN_OK;
    TN_TRY(tn__scope_acquire(scope, &object));
    tn__books *books = object->books;
    unsigned lock = books->lock;
    tn_status status = check(object);
    if (status == TN_OK) {
        for (tn__scope_object *below = object; below; below = tn__scope_next(below, object))
            end_handles(below);
        tn__closing_retry(books);
    }
    tn__unlock(lock);
    if (status == TN_OK) tn__books_collect(books);
    return status;
}
