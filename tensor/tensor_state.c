/* Questions about scopes, tensors, planes and leases, and their look-up by handle. */
#include "tensor_state.h"

#include "format_table.h"
#include "host_alloc.h"
#include "ledger.h"
#include "tensor_view.h"

#include <stdio.h>
#include <string.h>

/* ---- names --------------------------------------------------------------------------------- */

const char *tn__access_name(tn_access access) {
    static const char *const names[] = {"READ", "WRITE", "UPDATE", "REPLACE"};
    return names[access];
}

const char *tn__plane_state_name(tn_plane_state state) {
    static const char *const names[] = {"ABSENT", "ALLOCATED", "VALID", "STALE", "OFFLOADED"};
    return (size_t)state < sizeof names / sizeof *names ? names[state] : "unknown state";
}

tn_status tn__name_copy(const char *text, const char *otherwise, char **out) {
    const char *name = text && text[0] ? text : otherwise;
    TN_REQUIRE(strnlen(name, TN__NAME_BYTES_MAX + 1) <= TN__NAME_BYTES_MAX,
               "the name \"%.32s...\" is longer than %d bytes", name, (int)TN__NAME_BYTES_MAX);
    char *copy = tn__host_strdup(name);
    if (!copy) return TN_OUT_OF_HOST_MEMORY;
    *out = copy;
    return TN_OK;
}

/* ---- tensors -------------------------------------------------------------------------------- */

tn_tensor_info tn__tensor_info_of(const tn__tensor_object *tensor) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    info.format = tensor->format;
    info.dtype = tensor->dtype;
    info.rank = tensor->rank;
    memcpy(info.shape, tensor->shape, sizeof info.shape);
    info.rows = tensor->rows;
    info.cols = tensor->cols;
    info.scale_mode = tensor->scale_mode;
    info.policy = tn__tensor_policy(tensor);
    info.frozen = tensor->is_frozen;
    info.scope = tensor->scope->handle;
    info.pool = tensor->scope->books->pool;
    info.name = tensor->name;
    if (tensor->view) info.base = tensor->view->base->handle;
    info.site = tensor->site;
    return info;
}

tn_tensor_config tn__tensor_config_of(const tn__tensor_object *tensor) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = tensor->format;
    config.dtype = tensor->dtype;
    config.rank = tensor->rank;
    memcpy(config.shape, tensor->shape, sizeof config.shape);
    config.scale_mode = tensor->scale_mode;
    config.policy = tensor->policy;
    config.frozen = tensor->is_frozen;
    config.name = tensor->name;
    config.regatherable = tensor->is_regatherable;
    config.site = tensor->site;
    return config;
}

void tn__site_copy(const char *site, char out[TN__SITE_BYTES]) {
    const char *slash = site ? strrchr(site, '/') : NULL;
    const char *from = slash ? slash + 1 : site ? site : "";
    size_t bytes = strlen(from);
    if (bytes >= TN__SITE_BYTES) from += bytes - (TN__SITE_BYTES - 1);
    snprintf(out, TN__SITE_BYTES, "%s", from);
}

/* ---- leases -------------------------------------------------------------------------------- */

tn__lease_object *tn__tensor_lease(const tn__tensor_object *tensor) {
    const tn__tensor_object *owner = tensor->view ? tensor->view->base : tensor;
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        tn__lease_object *lease = owner->planes[i].first_lease;
        while (lease && tensor->view && lease->through != tensor)
            lease = lease->next;
        if (lease) return lease;
    }
    return NULL;
}

void tn__plane_owned_bytes(const tn__plane_object *plane, size_t out[TN__PART_COUNT]) {
    const tn__plane_object *memories[] = {plane, plane->replaced};
    out[TN__PART_DATA] = out[TN__PART_SCALE] = 0;
    for (int i = 0; i < 2; i++) {
        if (!memories[i] || memories[i]->kind != TN__MEMORY_OWNED) continue;
        for (int part = 0; part < TN__PART_COUNT; part++)
            out[part] += memories[i]->bytes[part];
    }
}

size_t tn__plane_bytes_in(const tn__plane_object *plane, tn__memory_kind kind) {
    size_t replaced = plane->replaced ? tn__plane_bytes_in(plane->replaced, kind) : 0;
    if (plane->kind != kind) return replaced;
    return replaced + plane->bytes[TN__PART_DATA] + plane->bytes[TN__PART_SCALE];
}

/* In a scratch slot both parts are in one block, which the data begins. */
void *tn__plane_pool_block(const tn__plane_object *plane, tn__part part) {
    int is_pool = plane->kind == TN__MEMORY_OWNED ||
                  (plane->kind == TN__MEMORY_SLOT && part == TN__PART_DATA);
    return is_pool ? plane->blocks[part] : NULL;
}

int tn__plane_has_remains(const tn__plane_object *plane) {
    if (plane->replaced && plane->replaced->state == TN_PLANE_ABSENT) return 1;
    if (plane->state != TN_PLANE_ABSENT) return 0;
    return plane->blocks[TN__PART_DATA] || plane->blocks[TN__PART_SCALE];
}

tn_status tn__fail_in_use(const tn__lease_object *holder, const char *refused) {
    if (holder->is_export) {
        return TN_FAIL(TN_IN_USE,
                       "tensor %s, plane %s is exported through DLPack (%s, on stream %p): %s must "
                       "wait until the consumer calls the deleter",
                       holder->tensor->name, tn_plane_name(holder->plane),
                       tn__access_name(holder->access), holder->stream, refused);
    }
    return TN_FAIL(TN_IN_USE,
                   "tensor %s, plane %s is under a %s lease on stream %p: %s must wait until that "
                   "lease ends; the tensor was made at %s, the lease by the call at %p",
                   holder->tensor->name, tn_plane_name(holder->plane),
                   tn__access_name(holder->access), holder->stream, refused,
                   holder->tensor->site[0] ? holder->tensor->site : "an unknown place",
                   holder->caller);
}

tn_status tn__fail_viewed(const tn__tensor_object *view, const char *refused) {
    return TN_FAIL(TN_IN_USE, "tensor %s has a view, %s in scope %s: %s must wait until that ends",
                   view->view->base->name, view->name, view->scope->name, refused);
}

/* ---- validity ------------------------------------------------------------------------------ */

static int leases_are_valid(const tn__tensor_object *tensor, tn_plane plane) {
    const tn__lease_object *first = tensor->planes[plane].first_lease;
    for (const tn__lease_object *lease = first; lease; lease = lease->next) {
        if (lease->tensor != tensor || lease->plane != plane) return 0;
        if (lease->access != TN_READ && (lease != first || lease->next)) return 0;
        if (lease->next && lease->next->previous != lease) return 0;
    }
    return 1;
}

static int memory_is_valid(const tn__tensor_object *tensor, tn_plane plane,
                           const tn__plane_object *object) {
    if (object->state != TN_PLANE_ABSENT) {
        const tn_plane_layout *layout = &tensor->layouts[plane];
        if (object->bytes[TN__PART_DATA] != layout->data_bytes) return 0;
        if (object->bytes[TN__PART_SCALE] != layout->scale_bytes) return 0;
    }
    for (int part = 0; part < TN__PART_COUNT; part++) {
        if ((object->blocks[part] != NULL) != (object->bytes[part] > 0)) return 0;
    }
    if ((object->kind == TN__MEMORY_FOREIGN) != (object->foreign != NULL)) return 0;
    return object->read_count <= object->read_limit;
}

static int plane_is_valid(const tn__tensor_object *tensor, tn_plane plane) {
    const tn__plane_object *object = &tensor->planes[plane];
    const tn__plane_object *replaced = object->replaced;
    if (!memory_is_valid(tensor, plane, object)) return 0;
    if (replaced) {
        const tn__lease_object *writer = tn__plane_writer(object);
        if (!memory_is_valid(tensor, plane, replaced)) return 0;
        if (replaced->first_lease || replaced->replaced) return 0;
        if (replaced->state != TN_PLANE_ABSENT && (!writer || writer->access != TN_REPLACE))
            return 0;
    }
    if (object->state == TN_PLANE_ABSENT && object->first_lease) return 0;
    if (object->state == TN_PLANE_STALE && object->first_lease) return 0;
    if (object->kind == TN__MEMORY_HOST && object->first_lease) return 0;
    if (object->state == TN_PLANE_OFFLOADED && object->kind != TN__MEMORY_HOST) return 0;
    return leases_are_valid(tensor, plane);
}

int tn__tensor_is_valid(const tn__tensor_object *tensor) {
    if (!tensor->scope || !tensor->name) return 0;
    if (tensor->rows < 0 || tensor->cols < 0) return 0;
    if (tensor->view && (tensor->first_view || tensor->view->base->view)) return 0;
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        if (!plane_is_valid(tensor, (tn_plane)plane)) return 0;
        if (tensor->view && tensor->planes[plane].state != TN_PLANE_ABSENT) return 0;
    }
    return 1;
}

/* ---- look-up ------------------------------------------------------------------------------- */

tn_status tn__scope_acquire(tn_scope scope, tn__scope_object **out) {
    void *object;
    TN_TRY(tn__handle_acquire(scope.value, TN__HANDLE_SCOPE, &object));
    *out = object;
    return TN_OK;
}

TN__SLOW tn_status tn__fail_of_library(const tn__tensor_object *tensor) {
    tn__tensor_unlock(tensor);
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "the tensor is the library's own: the ledger shows it, but it can not be used");
}
