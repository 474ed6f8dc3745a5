/* Deep copies of tensors, on the device and in the order of a stream.
 *
 * Invariants: all planes of the copy are under WRITE together, so that none makes another stale,
 * and become valid together; the planes that are read are leased, so that the copy is of one
 * moment. The lock is held all the time.
 */
#include "books.h"
#include "plane_transition.h"
#include "scope.h"
#include "tenure_lifetime.h"

typedef struct copying {
    tn__tensor_object *from, *to;
    tn_stream stream;
    uint64_t stream_id;
    tn__lease_object reads[TN_PLANE_COUNT], writes[TN_PLANE_COUNT];
    unsigned read, written; /* bits of planes whose lease is open */
} copying;

static tn__lease_object lease_of(const copying *job, tn__tensor_object *tensor, int plane,
                                 tn_access access) {
    return (tn__lease_object){.tensor = tensor,
                              .plane = (tn_plane)plane,
                              .access = access,
                              .stream = job->stream,
                              .stream_id = job->stream_id};
}

static tn_status open_plane(copying *job, int plane) {
    job->reads[plane] = lease_of(job, job->from, plane, TN_READ);
    TN_TRY(tn__transition_begin(&job->reads[plane]));
    job->read |= TN_PLANE_BIT(plane);
    job->writes[plane] = lease_of(job, job->to, plane, TN_WRITE);
    TN_TRY(tn__transition_begin(&job->writes[plane]));
    job->written |= TN_PLANE_BIT(plane);
    return TN_OK;
}

static tn_status copy_plane(const copying *job, int plane) {
    tn_device *device = job->from->scope->books->device;
    tn_plane_view from, to;
    tn__plane_view_fill(job->from, (tn_plane)plane, &from);
    tn__plane_view_fill(job->to, (tn_plane)plane, &to);
    TN_TRY(tn_copy(device, to.data, from.data, to.layout.data_bytes, job->stream));
    return tn_copy(device, to.scale, from.scale, to.layout.scale_bytes, job->stream);
}

static tn_status close_planes(copying *job, tn_status status) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (!(job->written & TN_PLANE_BIT(i))) continue;
        if (status == TN_OK) status = tn__transition_end(&job->writes[i]);
        if (status != TN_OK) tn__transition_abandon(&job->writes[i]);
        job->to->planes[i].is_derived = status == TN_OK && job->from->planes[i].is_derived;
    }
    for (int i = 0; i < TN_PLANE_COUNT; i++) { /* of a READ: the same as its end, but certain */
        if (job->read & TN_PLANE_BIT(i)) tn__transition_abandon(&job->reads[i]);
    }
    return status;
}

static tn_status copy_planes(copying *job) {
    tn_status status = TN_OK;
    for (int i = 0; i < TN_PLANE_COUNT && status == TN_OK; i++) {
        if (job->from->planes[i].state == TN_PLANE_VALID) status = open_plane(job, i);
    }
    for (int i = 0; i < TN_PLANE_COUNT && status == TN_OK; i++) {
        if (job->written & TN_PLANE_BIT(i)) status = copy_plane(job, i);
    }
    return close_planes(job, status);
}

static tn_status check_writers(const tn__tensor_object *tensor) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        const tn__lease_object *writer = tn__plane_writer(&tensor->planes[i]);
        if (writer) return tn__fail_in_use(writer, "cloning the tensor");
    }
    return TN_OK;
}

/* A tensor whose memory the driver would not take back stays in its scope, which frees it. */
static void delete_copy(tn__tensor_object *tensor) {
    tn__saved_error error;
    tn__error_save(&error);
    tn_status status = tn__transition_announce_empty(tensor, NULL);
    if (status == TN_OK) status = tn__transition_empty(tensor, NULL);
    if (status == TN_OK) tn__scope_delete_tensor(tensor);
    tn__error_restore(&error);
}

static tn_status clone(tn__tensor_object *tensor, tn__scope_object *scope, tn_stream stream,
                       tn_tensor *out) {
    tn_tensor_config config = tn__tensor_config_of(tensor);
    copying job = {.from = tensor, .stream = stream};
    TN_TRY(check_writers(tensor));
    TN_TRY(tn__books_stream_id(scope->books, stream, &job.stream_id));
    TN_TRY(tn__scope_add_tensor(scope, &config, &job.to));
    tn_status status = copy_planes(&job);
    if (status != TN_OK) {
        delete_copy(job.to);
        return status;
    }
    job.to->contents = tensor->contents;
    *out = job.to->handle;
    return TN_OK;
}

tn_status tn_tensor_clone(tn_tensor tensor, tn_scope scope, tn_stream stream, tn_tensor *out) {
    tn__tensor_object *object;
    tn__scope_object *to;
    TN_REQUIRE(out, "tn_tensor_clone: out is NULL");
    TN_TRY(tn__tensor_acquire_for(tensor, scope, &object, &to));
    tn_status status = clone(object, to, stream, out);
    tn__tensor_unlock(object);
    return status;
}
