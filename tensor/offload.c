/* Offloading: planes wait in pinned host memory until they are needed.
 *
 *     stream    ... last write | compute    | compute      | a lease: waits for the copy
 *     copy                     | to host |  | to device |
 *
 * Invariants: pinned memory is touched by the copy stream only, so that it is reused in its order
 * without a wait. Either the device memory or the host's is whole and the plane's at any time.
 */
#include "offload.h"

#include "host_alloc.h"
#include "options.h"
#include "plane_order.h"
#include "plane_policy.h"
#include "plane_transition.h"
#include "tenure_pool.h"

#include <pthread.h>

/* ---- memory and stream --------------------------------------------------------------------- */

static tn_status make_parts(tn__offload *offload) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    const tn__driver *driver = tn__device_driver(offload->device);
    config.name = "offload";
    config.backing = TN_BACKING_PINNED;
    config.limit_bytes = tn__options_get()->offload_limit_bytes;
    TN_TRY(tn_stream_create(offload->device, &offload->copy.stream));
    TN_TRY(driver->stream_id(tn__device_state(offload->device), offload->copy.stream,
                             &offload->copy.stream_id));
    offload->copy.is_recorded = 1;
    return tn_pool_create(offload->device, &config, &offload->pool);
}

/* The stream first: the pool then has no use left to wait for. */
static tn_status end_parts(tn__offload *offload) {
    if (offload->copy.stream) {
        TN_TRY(tn_stream_destroy(offload->device, offload->copy.stream));
        offload->copy.stream = NULL;
    }
    return tn_pool_destroy(offload->pool);
}

/* Those that the driver refused to end. */
static struct {
    pthread_mutex_t lock;
    tn__offload *first;
} left = {.lock = PTHREAD_MUTEX_INITIALIZER};

static tn__offload *take_left(void) {
    TN_CHECK(pthread_mutex_lock(&left.lock) == 0);
    tn__offload *first = left.first;
    left.first = NULL;
    TN_CHECK(pthread_mutex_unlock(&left.lock) == 0);
    return first;
}

static void keep_left(tn__offload *offload) {
    TN_CHECK(pthread_mutex_lock(&left.lock) == 0);
    offload->next = left.first;
    left.first = offload;
    TN_CHECK(pthread_mutex_unlock(&left.lock) == 0);
}

void tn__offload_close(tn__offload *offload) {
    tn__offload *all = take_left();
    tn__saved_error error;
    if (offload) {
        offload->next = all;
        all = offload;
    }
    if (all) tn__error_save(&error);
    for (tn__offload *at = all; at;) {
        tn__offload *next = at->next;
        if (end_parts(at) == TN_OK)
            tn__host_free(at);
        else
            keep_left(at);
        at = next;
    }
    if (all) tn__error_restore(&error);
}

static void close_deferred(tn__deferred *self) {
    tn__offload_close((tn__offload *)self); /* its first member */
}

tn_status tn__offload_open(tn__books *books, tn__offload **out) {
    if (!books->offload) {
        tn__offload *offload = tn__host_alloc(1, sizeof *offload);
        if (!offload) return TN_OUT_OF_HOST_MEMORY;
        offload->device = books->device;
        tn_status status = make_parts(offload);
        if (status != TN_OK) {
            offload->deferred.run = close_deferred;
            tn__defer(books->lock, &offload->deferred);
            return status;
        }
        books->offload = offload;
    }
    *out = books->offload;
    return TN_OK;
}

/* ---- there and back ------------------------------------------------------------------------ */

static tn_status check_plane(const tn__tensor_object *tensor, tn_plane plane) {
    const tn__plane_object *object = &tensor->planes[plane];
    if (object->first_lease) return tn__fail_in_use(object->first_lease, "offloading it");
    if (object->state != TN_PLANE_VALID) {
        return TN_FAIL(TN_INVALID_STATE, "tensor %s, plane %s is %s: only a valid one is offloaded",
                       tensor->name, tn_plane_name(plane), tn__plane_state_name(object->state));
    }
    if (object->kind != TN__MEMORY_OWNED) {
        return TN_FAIL(TN_INVALID_STATE,
                       "tensor %s, plane %s is not in memory of its own: it can not be offloaded",
                       tensor->name, tn_plane_name(plane));
    }
    return TN_OK;
}

/* The copy stream comes after the plane's last write anyway, and here after `stream`. */
static tn_status follow(const tn__tensor_object *tensor, tn_plane plane, const tn__plane_use *copy,
                        tn_stream stream, uint64_t stream_id) {
    const tn__plane_object *object = &tensor->planes[plane];
    if (object->has_write && object->write.stream_id == stream_id) return TN_OK;
    return tn_stream_wait(tensor->scope->books->device, copy->stream, stream);
}

tn_status tn__offload_plane(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                            uint64_t stream_id) {
    tn__offload *offload = NULL;
    if (tensor->planes[plane].state == TN_PLANE_OFFLOADED) return TN_OK;
    TN_TRY(check_plane(tensor, plane));
    TN_TRY(tn__plane_order_refuse_capture(tensor, plane, stream));
    TN_TRY(tn__offload_open(tensor->scope->books, &offload));
    TN_TRY(follow(tensor, plane, &offload->copy, stream, stream_id));
    tn__relocation there = {TN__MEMORY_HOST, TN_PLANE_OFFLOADED, offload->copy, 1};
    return tn__transition_relocate(tensor, plane, &there);
}

tn_status tn__offload_prefetch(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                               uint64_t stream_id) {
    (void)stream_id; /* it has the shape of a transition */
    const tn__plane_object *object = &tensor->planes[plane];
    if (object->state == TN_PLANE_VALID) return TN_OK;
    if (object->state != TN_PLANE_OFFLOADED) {
        return TN_FAIL(TN_INVALID_STATE, "tensor %s, plane %s is %s: there is nothing to fetch",
                       tensor->name, tn_plane_name(plane), tn__plane_state_name(object->state));
    }
    const tn__offload *offload = tensor->scope->books->offload;
    TN_TRY(tn__plane_order_refuse_capture(tensor, plane, stream));
    TN_TRY(tn_stream_wait(offload->device, offload->copy.stream, stream));
    return tn__transition_fetch(tensor, plane, stream);
}

/* A plane stays where it is if it can not go now, or if pinned memory is short: the policy saves
 * device memory where it can. */
tn_status tn__offload_release(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                              uint64_t stream_id) {
    const tn__plane_object *object = &tensor->planes[plane];
    if (object->state != TN_PLANE_VALID || object->kind != TN__MEMORY_OWNED) return TN_OK;
    if (object->first_lease) return TN_OK;
    tn__error_scope_begin();
    uint64_t capture = 0;
    tn_status status = tn__plane_order_capture(tensor->scope->books->device, stream, &capture);
    if (status == TN_OK && !capture) status = tn__offload_plane(tensor, plane, stream, stream_id);
    if (status == TN_OUT_OF_DEVICE_MEMORY || status == TN_OUT_OF_HOST_MEMORY) status = TN_OK;
    return tn__error_scope_end(status);
}
