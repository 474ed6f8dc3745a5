/* Scopes: made, closed with all that is in them, and their lists of tensors.
 *
 * Invariants: a child has its parent's books; a scope is in exactly one list (its parent's
 * children, or the books' roots). Closing looks for leases first and frees afterwards: a scope
 * with a live lease anywhere below it loses nothing.
 */
#include "scope.h"

#include "books.h"
#include "host_alloc.h"
#include "ledger.h"
#include "plane_order.h"
#include "plane_transition.h"
#include "scope_closing.h"
#include "saved_set.h"
#include "scratch_slot.h"
#include "tensor_internal.h"
#include "tensor_view.h"

/* ---- lists --------------------------------------------------------------------------------- */

static tn__scope_object **list_of(tn__scope_object *scope) {
    return scope->parent ? &scope->parent->first_child : &scope->books->first_root;
}

static void link_scope(tn__scope_object *scope) {
    tn__scope_object **first = list_of(scope);
    scope->next = *first;
    if (scope->next) scope->next->previous = scope;
    *first = scope;
}

static void unlink_scope(tn__scope_object *scope) {
    if (scope->next) scope->next->previous = scope->previous;
    if (scope->previous)
        scope->previous->next = scope->next;
    else
        *list_of(scope) = scope->next;
}

void tn__scope_link_tensor(tn__scope_object *scope, tn__tensor_object *tensor) {
    tensor->scope = scope;
    tensor->books = scope->books;
    tensor->previous = NULL;
    tensor->next = scope->first_tensor;
    if (tensor->next) tensor->next->previous = tensor;
    scope->first_tensor = tensor;
}

void tn__scope_unlink_tensor(tn__tensor_object *tensor) {
    if (tensor->next) tensor->next->previous = tensor->previous;
    if (tensor->previous)
        tensor->previous->next = tensor->next;
    else
        tensor->scope->first_tensor = tensor->next;
}

void tn__scope_delete_tensor(tn__tensor_object *tensor) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        TN_CHECK(tensor->planes[i].state == TN_PLANE_ABSENT);
        TN_CHECK(!tensor->planes[i].first_lease);
        tn__plane_order_deinit(&tensor->planes[i]);
    }
    TN_CHECK(!tensor->first_view);
    if (tensor->view) tn__view_unlink(tensor);
    tn__ledger_count_tensor(tensor->scope, -1);
    tn__scope_unlink_tensor(tensor);
    if (tensor->handle.value) tn__handle_destroy(tensor->handle.value);
    tn__host_free(tensor->name);
    tn__host_free(tensor);
}

/* ---- create -------------------------------------------------------------------------------- */

static const char *kind_name(tn_scope_kind kind) {
    static const char *const names[] = {"process", "model", "step", "layer", "op", "saved"};
    return (int)kind >= 0 && kind <= TN_SCOPE_SAVED ? names[kind] : NULL;
}

/* The books to make the scope in, with their lock held, and its parent (NULL for a root). */
static tn_status open_place(const tn_scope_config *config, tn__books **books,
                            tn__scope_object **parent) {
    if (config->parent.value == 0) {
        TN_REQUIRE(config->pool, "tn_scope_create: a root scope needs a pool");
        *parent = NULL;
        return tn__books_open(config->pool, books);
    }
    TN_TRY(tn__scope_acquire(config->parent, parent));
    *books = (*parent)->books;
    if (!config->pool || config->pool == (*books)->pool) return TN_OK;
    tn_status status =
        TN_FAIL(TN_INVALID_ARGUMENT,
                "tn_scope_create: the pool is not that of the parent, scope %s", (*parent)->name);
    tn__unlock((*books)->lock);
    return status;
}

static tn_status make_scope(tn__books *books, tn__scope_object *parent,
                            const tn_scope_config *config, tn_scope *out) {
    tn__scope_object *scope = tn__host_alloc(1, sizeof *scope);
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    if (!scope) return status;
    scope->books = books;
    scope->parent = parent;
    scope->kind = config->kind;
    tn__site_copy(config->site, scope->site);
    status = tn__name_copy(config->name, kind_name(config->kind), &scope->name);
    if (status == TN_OK) {
        status = tn__handle_create(TN__HANDLE_SCOPE, scope, books->lock, &scope->handle.value);
    }
    if (status != TN_OK) {
        tn__host_free(scope->name);
        tn__host_free(scope);
        return status;
    }
    link_scope(scope);
    *out = scope->handle;
    return TN_OK;
}

tn_status tn_scope_create(const tn_scope_config *config, tn_scope *out) {
    tn__books *books = NULL;
    tn__scope_object *parent = NULL;
    TN_REQUIRE(config && config->size == sizeof *config,
               "tn_scope_create: config is not TN_SCOPE_CONFIG_INIT");
    TN_REQUIRE(out, "tn_scope_create: out is NULL");
    TN_REQUIRE(kind_name(config->kind), "tn_scope_create: unknown kind %d", (int)config->kind);
    TN_TRY(open_place(config, &books, &parent));
    TN_CHECK(books != NULL);
    tn__closing_retry(books);
    tn_status status = make_scope(books, parent, config, out);
    tn__unlock(books->lock);
    if (status != TN_OK) tn__books_collect(books); /* that were made for this scope */
    return status;
}

/* ---- close --------------------------------------------------------------------------------- */

static const tn__lease_object *first_lease_in(tn__scope_object *root) {
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
            const tn__lease_object *lease = tn__tensor_lease(tensor);
            if (lease) return lease;
        }
    }
    return NULL;
}

static int is_below(const tn__scope_object *scope, const tn__scope_object *root) {
    while (scope && scope != root)
        scope = scope->parent;
    return scope == root;
}

const tn__tensor_object *tn__scope_outer_view(tn__scope_object *root) {
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
            for (tn__tensor_object *view = tensor->first_view; view; view = view->view->next) {
                if (!is_below(view->scope, root)) return view;
            }
        }
    }
    return NULL;
}

static tn_status check_close(tn__scope_object *root) {
    const tn__lease_object *lease = first_lease_in(root);
    const tn__tensor_object *view = tn__scope_outer_view(root);
    if (lease) return tn__fail_in_use(lease, "closing its scope");
    return view ? tn__fail_viewed(view, "closing its scope") : TN_OK;
}

typedef tn_status (*tensor_transition)(tn__tensor_object *tensor, const tn__plane_use *on);

static tn_status for_each_tensor(tn__scope_object *root, tensor_transition run) {
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
            TN_TRY(run(tensor, NULL));
        }
    }
    return TN_OK;
}

/* Views end before what they are views of. */
static void delete_views(tn__scope_object *root) {
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (tn__tensor_object *tensor = scope->first_tensor; tensor;) {
            tn__tensor_object *next = tensor->next;
            if (tensor->view) tn__scope_delete_tensor(tensor);
            tensor = next;
        }
    }
}

void tn__scope_delete_empty(tn__scope_object *scope) {
    TN_CHECK(!scope->first_child && !scope->first_tensor);
    tn__scratch_delete(scope);
    tn__saved_delete(scope);
    unlink_scope(scope);
    if (scope->is_closing)
        scope->books->closing_scopes--;
    else
        tn__handle_destroy(scope->handle.value);
    tn__host_free(scope->name);
    tn__host_free(scope);
}

/* Leaves first: the scope to delete is always the deepest first child. */
static void delete_scopes(tn__scope_object *root) {
    delete_views(root);
    for (;;) {
        tn__scope_object *scope = root;
        while (scope->first_child)
            scope = scope->first_child;
        int is_root = scope == root;
        while (scope->first_tensor)
            tn__scope_delete_tensor(scope->first_tensor);
        tn__scope_delete_empty(scope);
        if (is_root) return;
    }
}

tn_status tn_scope_close(tn_scope scope) {
    tn__scope_object *object;
    if (scope.value == 0) return TN_OK;
    TN_TRY(tn__scope_acquire(scope, &object));
    tn__books *books = object->books;
    unsigned lock = books->lock;
    tn_status status = check_close(object);
    if (status == TN_OK) status = for_each_tensor(object, tn__transition_announce_empty);
    if (status == TN_OK) tn__scratch_vacate(object);
    if (status == TN_OK) status = for_each_tensor(object, tn__transition_empty);
    if (status == TN_OK) {
        delete_scopes(object);
        tn__closing_retry(books);
    }
    tn__unlock(lock);
    if (status == TN_OK) tn__books_collect(books);
    return status;
}

/* ---- for the sister libraries -------------------------------------------------------------- */

tn_status tn__scope_pool(tn_scope scope, tn_pool **out) {
    tn__scope_object *object;
    TN_TRY(tn__scope_acquire(scope, &object));
    *out = object->books->pool;
    tn__scope_unlock(object);
    return TN_OK;
}

tn_status tn__scope_device(tn_scope scope, tn_device **out) {
    tn__scope_object *object;
    TN_TRY(tn__scope_acquire(scope, &object));
    *out = object->books->device;
    tn__scope_unlock(object);
    return TN_OK;
}
