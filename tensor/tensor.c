/* Tensors: made, described, moved, destroyed; and the public functions on their planes, each of
 * which looks up the tensor and calls one transition.
 */
#include "books.h"
#include "format_table.h"
#include "host_alloc.h"
#include "ledger.h"
#include "offload.h"
#include "plane_budget.h"
#include "plane_policy.h"
#include "plane_transition.h"
#include "scope.h"
#include "saved_set.h"
#include "scratch_slot.h"
#include "plane_order.h"
#include "tensor_internal.h"
#include "tensor_view.h"

#include <string.h>

/* ---- shapes -------------------------------------------------------------------------------- */

/* A product of sizes, none negative; 0 if it is more than TN__ELEMENTS_MAX. A 0 anywhere makes it
 * 0 whatever the others are. */
static int product_of(const int64_t *sizes, int count, int64_t *out) {
    int64_t product = 1;
    for (int i = 0; i < count; i++) {
        if (sizes[i] == 0) product = 0;
    }
    for (int i = 0; i < count && product > 0; i++) {
        if (sizes[i] > TN__ELEMENTS_MAX / product) return 0;
        product *= sizes[i];
    }
    *out = product;
    return 1;
}

tn_status tn__tensor_flatten(const tn_tensor_config *config, int64_t *rows, int64_t *cols) {
    TN_REQUIRE(config->rank >= 0 && config->rank <= TN_RANK_MAX, "rank %d is not 0 to %d",
               config->rank, TN_RANK_MAX);
    for (int i = 0; i < config->rank; i++) {
        TN_REQUIRE(config->shape[i] >= 0, "dimension %d is %lld: it can not be negative", i,
                   (long long)config->shape[i]);
    }
    int leading = config->rank > 0 ? config->rank - 1 : 0;
    int64_t elements[2];
    int fits = product_of(config->shape, leading, &elements[0]);
    elements[1] = config->rank > 0 ? config->shape[leading] : 1;
    fits = fits && elements[1] <= TN__ELEMENTS_MAX;
    int64_t all = 0;
    TN_REQUIRE(fits && product_of(elements, 2, &all), "the shape has more than 2^62 elements");
    *rows = elements[0];
    *cols = elements[1];
    return TN_OK;
}

/* ---- create -------------------------------------------------------------------------------- */

static tn_status check_planes(const tn_tensor_config *config) {
    int64_t rows = 0, cols = 0;
    TN_TRY(tn__tensor_flatten(config, &rows, &cols));
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        tn_plane_layout layout;
        if (!tn__format_has_plane(config->format, (tn_plane)plane)) continue;
        TN_TRY(
            tn__format_layout(config->format, config->dtype, rows, cols, (tn_plane)plane, &layout));
    }
    return TN_OK;
}

tn_status tn__tensor_config_check(const tn_tensor_config *config) {
    TN_REQUIRE(config && config->size == sizeof *config,
               "tn_tensor_create: config is not TN_TENSOR_CONFIG_INIT");
    TN_REQUIRE(tn__format_is_known(config->format), "tn_tensor_create: unknown format %d",
               (int)config->format);
    TN_REQUIRE(tn__dtype_is_known(config->dtype), "tn_tensor_create: unknown dtype %d",
               (int)config->dtype);
    TN_REQUIRE(tn__format_takes_dtype(config->format, config->dtype),
               "tn_tensor_create: format %s does not take dtype %s", tn_format_name(config->format),
               tn_dtype_name(config->dtype));
    TN_REQUIRE(config->scale_mode == TN_SCALE_POW2 || config->scale_mode == TN_SCALE_FP32,
               "tn_tensor_create: unknown scale mode %d", (int)config->scale_mode);
    TN_REQUIRE(tn__policy_is_known(config->policy), "tn_tensor_create: unknown policy %d",
               (int)config->policy);
    return check_planes(config);
}

static tn_status new_tensor(const tn_tensor_config *config, tn__tensor_object **out) {
    tn__tensor_object *tensor = tn__host_alloc(1, sizeof *tensor);
    if (!tensor) return TN_OUT_OF_HOST_MEMORY;
    tensor->format = config->format;
    tensor->dtype = config->dtype;
    tensor->rank = config->rank;
    memcpy(tensor->shape, config->shape, (size_t)config->rank * sizeof tensor->shape[0]);
    TN_CHECK(tn__tensor_flatten(config, &tensor->rows, &tensor->cols) == TN_OK);
    tensor->scale_mode = config->scale_mode;
    tensor->policy = config->policy;
    tensor->is_frozen = config->frozen != 0;
    tensor->is_regatherable = config->regatherable != 0;
    tn__site_copy(config->site, tensor->site);
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        tn__plane_order_init(&tensor->planes[i]);
        if (!tn__format_has_plane(tensor->format, (tn_plane)i)) continue;
        tensor->plane_bits |= TN_PLANE_BIT(i);
        TN_CHECK(tn__format_layout(tensor->format, tensor->dtype, tensor->rows, tensor->cols,
                                   (tn_plane)i, &tensor->layouts[i]) == TN_OK);
    }
    tn_status status = tn__name_copy(config->name, "tensor", &tensor->name);
    if (status != TN_OK) {
        tn__host_free(tensor);
        return status;
    }
    *out = tensor;
    return TN_OK;
}

tn_status tn__scope_add_tensor(tn__scope_object *scope, const tn_tensor_config *config,
                               tn__tensor_object **out) {
    unsigned lock = scope->books->lock;
    tn__tensor_object *tensor = NULL;
    TN_TRY(new_tensor(config, &tensor));
    tn_status status = tn__handle_create(TN__HANDLE_TENSOR, tensor, lock, &tensor->handle.value);
    if (status != TN_OK) {
        tn__host_free(tensor->name);
        tn__host_free(tensor);
        return status;
    }
    tensor->number = ++scope->books->tensors_made;
    tn__scope_link_tensor(scope, tensor);
    tn__ledger_count_tensor(scope, 1);
    TN_ASSERT(tn__tensor_is_valid(tensor));
    *out = tensor;
    return TN_OK;
}

tn_status tn_tensor_create(tn_scope scope, const tn_tensor_config *config, tn_tensor *out) {
    tn__scope_object *object;
    tn__tensor_object *tensor = NULL;
    TN_REQUIRE(out, "tn_tensor_create: out is NULL");
    TN_TRY(tn__tensor_config_check(config));
    TN_TRY(tn__scope_acquire(scope, &object));
    tn_status status = tn__scope_add_tensor(object, config, &tensor);
    if (status == TN_OK) *out = tensor->handle;
    tn__scope_unlock(object);
    return status;
}

/* ---- destroy and move ---------------------------------------------------------------------- */

static tn_status stream_of(const tn__tensor_object *tensor, tn_stream stream, tn__plane_use *out) {
    out->stream = stream;
    out->is_recorded = 1;
    return tn__books_stream_id(tensor->scope->books, stream, &out->stream_id);
}

static tn_status destroy(tn__tensor_object *tensor, tn_stream stream) {
    const tn__lease_object *holder = tn__tensor_lease(tensor);
    tn__plane_use on;
    if (holder) return tn__fail_in_use(holder, "destroying the tensor");
    if (tensor->first_view) return tn__fail_viewed(tensor->first_view, "destroying the tensor");
    TN_TRY(stream_of(tensor, stream, &on));
    TN_TRY(tn__transition_announce_empty(tensor, &on));
    TN_TRY(tn__transition_empty(tensor, &on));
    tn__scope_delete_tensor(tensor);
    return TN_OK;
}

tn_status tn_tensor_destroy(tn_tensor tensor, tn_stream stream) {
    tn__tensor_object *object;
    if (tensor.value == 0) return TN_OK;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    unsigned lock = object->scope->books->lock;
    tn_status status = destroy(object, stream);
    tn__unlock(lock);
    return status;
}

tn_status tn__scope_find_for(const tn__tensor_object *tensor, tn_scope to, tn__scope_object **out) {
    unsigned lock = tensor->scope->books->lock;
    tn__scope_object *scope = tn__handle_peek(to.value, TN__HANDLE_SCOPE, lock);
    if (!scope || scope->books != tensor->scope->books) {
        return TN_FAIL(TN_INVALID_ARGUMENT,
                       "tensor %s can not go to scope 0x%llx: it is not of the pool of scope %s",
                       tensor->name, (unsigned long long)to.value, tensor->scope->name);
    }
    *out = scope;
    return TN_OK;
}

/* A scope of the same pool has the same lock. */
tn_status tn__tensor_acquire_for(tn_tensor tensor, tn_scope to, tn__tensor_object **out,
                                 tn__scope_object **scope) {
    TN_TRY(tn__scope_acquire(to, scope)); /* for the right status if it is not alive */
    tn__scope_unlock(*scope);
    TN_TRY(tn__tensor_acquire(tensor, out));
    tn_status status = tn__scope_find_for(*out, to, scope);
    if (status != TN_OK) tn__tensor_unlock(*out);
    return status;
}

tn_status tn__scope_move_tensor(tn__tensor_object *tensor, tn__scope_object *scope) {
    if (scope == tensor->scope) return TN_OK;
    TN_TRY(tn__saved_admit(tensor));
    TN_TRY(tn__scratch_leave_for(tensor, scope));
    tn__budget_forget_all(tensor);
    tn__ledger_move(tensor, scope);
    tn__scope_unlink_tensor(tensor);
    tn__scope_link_tensor(scope, tensor);
    TN_ASSERT(tn__tensor_is_valid(tensor));
    return TN_OK;
}

tn_status tn_tensor_move(tn_tensor tensor, tn_scope scope) {
    tn__tensor_object *object;
    tn__scope_object *to;
    TN_TRY(tn__tensor_acquire_for(tensor, scope, &object, &to));
    tn_status status = tn__scope_move_tensor(object, to);
    tn__tensor_unlock(object);
    return status;
}

/* ---- properties ---------------------------------------------------------------------------- */

tn_status tn_tensor_info_get(tn_tensor tensor, tn_tensor_info *out) {
    tn__tensor_object *object;
    TN_REQUIRE(out && out->size == sizeof *out, "tn_tensor_info_get: out is not "
                                                "TN_TENSOR_INFO_INIT");
    TN_TRY(tn__tensor_acquire(tensor, &object));
    *out = tn__tensor_info_of(object);
    tn__tensor_unlock(object);
    return TN_OK;
}

tn_status tn_tensor_set_frozen(tn_tensor tensor, int frozen) {
    tn__tensor_object *object;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    object->is_frozen = frozen != 0;
    tn__tensor_unlock(object);
    return TN_OK;
}

tn_status tn_tensor_set_regatherable(tn_tensor tensor, int regatherable) {
    tn__tensor_object *object;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    object->is_regatherable = regatherable != 0;
    tn__tensor_unlock(object);
    return TN_OK;
}

tn_status tn__tensor_pool_blocks(tn_tensor tensor, tn_plane plane, void *blocks[2]) {
    tn__tensor_object *object;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    for (int part = 0; part < TN__PART_COUNT; part++)
        blocks[part] =
            object->view ? NULL : tn__plane_pool_block(&object->planes[plane], (tn__part)part);
    tn__tensor_unlock(object);
    return TN_OK;
}

tn_status tn__tensor_contents(tn_tensor tensor, uint64_t *out) {
    tn__tensor_object *object;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    *out = tn__tensor_owner(object)->contents;
    tn__tensor_unlock(object);
    return TN_OK;
}

tn_status tn__tensor_check_idle(tn_tensor tensor, const char *refused) {
    tn__tensor_object *object;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    const tn__lease_object *holder = tn__tensor_lease(object);
    tn_status status = holder ? tn__fail_in_use(holder, refused) : TN_OK;
    tn__tensor_unlock(object);
    return status;
}

tn_status tn__tensor_set_block_flags(tn_tensor tensor, unsigned flags) {
    tn__tensor_object *object;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    object->block_flags = flags;
    tn__tensor_unlock(object);
    return TN_OK;
}

tn_status tn__tensor_device(tn_tensor tensor, tn_device **out) {
    tn__tensor_object *object;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    *out = object->scope->books->device;
    tn__tensor_unlock(object);
    return TN_OK;
}

/* ---- planes -------------------------------------------------------------------------------- */

static tn_status require_plane(const tn__tensor_object *tensor, tn_plane plane) {
    if (tn__format_has_plane(tensor->format, plane)) return TN_OK;
    return TN_FAIL(TN_INVALID_ARGUMENT, "tensor %s of format %s has no plane %s (%d)", tensor->name,
                   tn_format_name(tensor->format), tn_plane_name(plane), (int)plane);
}

tn_status tn_plane_layout_get(tn_tensor tensor, tn_plane plane, tn_plane_layout *out) {
    tn__tensor_object *object;
    TN_REQUIRE(out, "tn_plane_layout_get: out is NULL");
    TN_TRY(tn__tensor_acquire(tensor, &object));
    tn_status status = require_plane(object, plane);
    tn_access access = TN_READ;
    if (status == TN_OK && object->view) status = tn__view_admit(object, plane, &access);
    if (status == TN_OK) *out = object->layouts[plane];
    tn__tensor_unlock(object);
    return status;
}

tn_status tn_plane_state_get(tn_tensor tensor, tn_plane plane, tn_plane_state *out) {
    tn__tensor_object *object;
    TN_REQUIRE(out, "tn_plane_state_get: out is NULL");
    TN_TRY(tn__tensor_acquire(tensor, &object));
    tn_status status = require_plane(object, plane);
    if (status == TN_OK) *out = tn__tensor_owner(object)->planes[plane].state;
    tn__tensor_unlock(object);
    return status;
}

typedef tn_status (*transition)(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                                uint64_t stream_id);

static tn_status run_transition(transition run, tn_tensor tensor, tn_plane plane,
                                tn_stream stream) {
    tn__tensor_object *object;
    tn__plane_use on = {0};
    tn_access access = TN_READ;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    unsigned lock = object->scope->books->lock;
    tn_status status = require_plane(object, plane);
    if (status == TN_OK) status = stream_of(object, stream, &on);
    if (status == TN_OK && object->view) status = tn__view_admit(object, plane, &access);
    if (status == TN_OK) status = run(tn__tensor_owner(object), plane, stream, on.stream_id);
    tn__unlock(lock); /* of a view, which may have ended while its base's plane was derived */
    return status;
}

tn_status tn_plane_make(tn_tensor tensor, tn_plane plane, tn_stream stream) {
    return run_transition(tn__transition_make, tensor, plane, stream);
}

tn_status tn_plane_require(tn_tensor tensor, tn_plane plane, tn_stream stream) {
    return run_transition(tn__transition_derive, tensor, plane, stream);
}

tn_status tn_plane_drop(tn_tensor tensor, tn_plane plane, tn_stream stream) {
    tn__tensor_object *object;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    tn_status status = tn__view_refuse(object, "drop");
    tn__tensor_unlock(object);
    return status == TN_OK ? run_transition(tn__transition_drop, tensor, plane, stream) : status;
}

tn_status tn_plane_release(tn_tensor tensor, tn_plane plane, tn_stream stream) {
    return run_transition(tn__transition_release, tensor, plane, stream);
}

tn_status tn_plane_offload(tn_tensor tensor, tn_plane plane, tn_stream stream) {
    return run_transition(tn__offload_plane, tensor, plane, stream);
}

tn_status tn_plane_prefetch(tn_tensor tensor, tn_plane plane, tn_stream stream) {
    return run_transition(tn__offload_prefetch, tensor, plane, stream);
}
