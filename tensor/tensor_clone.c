/* Deep copies of tensors, or of some of their rows, on the device and in the order of a stream.
 *
 * Invariants: all planes of the copy are under WRITE together, so that none makes another stale,
 * and become valid together; the planes that are read are leased, so that the copy is of one
 * moment. The lock is held all the time.
 */
#include "books.h"
#include "format_table.h"
#include "plane_transition.h"
#include "scope.h"
#include "tensor_view.h"
#include "tenure_lifetime.h"

typedef struct copying {
    tn__tensor_object *from, *to;
    tn__slice slices[TN_PLANE_COUNT]; /* of `from`: what is copied */
    tn_stream stream;
    uint64_t stream_id;
    tn__lease_object reads[TN_PLANE_COUNT], writes[TN_PLANE_COUNT];
    unsigned chosen;        /* bits of planes to copy */
    unsigned read, written; /* and of those whose lease is open */
} copying;

static tn__lease_object lease_of(const copying *job, tn__tensor_object *tensor, int plane,
                                 tn_access access) {
    return (tn__lease_object){.tensor = tensor,
                              .plane = (tn_plane)plane,
                              .at = &tensor->planes[plane],
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

/* Rows of `row_bytes` each; one copy where they follow each other on both sides. */
static tn_status copy_matrix(const copying *job, char *to, size_t to_stride, const char *from,
                             size_t from_stride, size_t row_bytes, int64_t rows) {
    tn_device *device = job->from->scope->books->device;
    if (to_stride == row_bytes && from_stride == row_bytes) {
        return tn_copy(device, to, from, row_bytes * (size_t)rows, job->stream);
    }
    for (size_t row = 0; row < (size_t)rows; row++) {
        TN_TRY(tn_copy(device, to + row * to_stride, from + row * from_stride, row_bytes,
                       job->stream));
    }
    return TN_OK;
}

/* Scales that are copied row by row leave out the padding: it is written as 0. */
static tn_status copy_scales(const copying *job, const tn_plane_view *from, const tn__slice *slice,
                             const tn_plane_view *to) {
    tn_device *device = job->from->scope->books->device;
    const tn_plane_layout *layout = &to->layout;
    size_t item_bytes = tn_dtype_bytes(layout->scale_dtype);
    size_t stride = (size_t)layout->scale_stride * item_bytes;
    size_t from_stride = (size_t)slice->layout.scale_stride * item_bytes;
    const char *source = (const char *)from->scale + slice->scale_offset;
    if (!slice->is_scale_interleaved) {
        TN_TRY(tn_copy(device, to->scale, source, slice->layout.scale_bytes, job->stream));
    } else {
        TN_TRY(tn_fill(device, to->scale, 0, layout->scale_bytes, job->stream));
        TN_TRY(copy_matrix(job, to->scale, stride, source, from_stride,
                           (size_t)layout->scale_cols * item_bytes, layout->scale_rows));
    }
    size_t end = slice->is_scale_interleaved ? 0 : slice->layout.scale_bytes;
    if (layout->global_scale_offset < 0 || end == layout->scale_bytes) return TN_OK;
    return tn_copy(device, to->global_scale, from->global_scale,
                   layout->scale_bytes - (size_t)layout->global_scale_offset, job->stream);
}

static tn_status copy_plane(const copying *job, int plane) {
    const tn__slice *slice = &job->slices[plane];
    tn_plane_view from = {0}, to = {0};
    tn__plane_view_fill(job->from, (tn_plane)plane, &job->from->planes[plane], &from);
    tn__plane_view_fill(job->to, (tn_plane)plane, &job->to->planes[plane], &to);
    if (!to.data) return TN_OK;
    TN_TRY(copy_matrix(job, to.data, to.layout.row_bytes, (char *)from.data + slice->data_offset,
                       slice->layout.row_bytes, to.layout.row_bytes, to.layout.rows));
    return to.scale ? copy_scales(job, &from, slice, &to) : TN_OK;
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
        if (job->chosen & TN_PLANE_BIT(i)) status = open_plane(job, i);
    }
    for (int i = 0; i < TN_PLANE_COUNT && status == TN_OK; i++) {
        if (job->written & TN_PLANE_BIT(i)) status = copy_plane(job, i);
    }
    return close_planes(job, status);
}

/* ---- what is copied ------------------------------------------------------------------------ */

/* Rows of the base, or of elements without scales a number of them, which are any rows. */
typedef struct part {
    tn__tensor_object *base;
    int64_t first_element, rows;
} part;

static part part_of(tn__tensor_object *tensor, int64_t first_row, int64_t rows) {
    int64_t skipped = tensor->view ? tensor->view->first_element : 0;
    return (part){tn__tensor_owner(tensor), skipped + first_row * tensor->cols, rows};
}

static tn_status slice_plane(copying *job, const part *of, tn_plane plane) {
    const tn__tensor_object *base = of->base;
    int64_t first = base->cols > 0 ? of->first_element / base->cols : 0;
    tn__slice *slice = &job->slices[plane];
    const char *why;
    if (plane == TN_PLANE_DATA) {
        *slice = (tn__slice){.layout = job->to->layouts[plane], .is_contiguous = 1};
        slice->data_offset = (size_t)of->first_element * tn_dtype_bytes(base->dtype);
        return TN_OK;
    }
    if (tn__format_slice(base->format, base->dtype, base->rows, base->cols, plane, first, of->rows,
                         slice, &why)) {
        return TN_OK;
    }
    return TN_FAIL(TN_UNSUPPORTED,
                   "plane %s of %lld rows of tensor %s can not be copied, because %s",
                   tn_plane_name(plane), (long long)of->rows, base->name, why);
}

/* A plane whose rows are not contiguous is derived again where it is wanted, if that can be. */
static int is_left_out(const copying *job, tn_plane plane) {
    tn_plane source;
    const char *why;
    if (job->slices[plane].is_contiguous) return 0;
    if (!tn__format_source(job->from->format, plane, &source, &why)) return 0;
    return tn__state_is_complete(job->from->planes[source].state);
}

static tn_status choose_planes(copying *job, const part *of) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        const tn__lease_object *writer = tn__plane_writer(&job->from->planes[i]);
        if (writer) return tn__fail_in_use(writer, "copying the tensor");
        if (!tn__state_is_complete(job->from->planes[i].state)) continue;
        if (job->from->planes[i].kind == TN__MEMORY_SLOT) continue; /* derived again, in the slot */
        TN_TRY(slice_plane(job, of, (tn_plane)i));
        if (!is_left_out(job, (tn_plane)i)) job->chosen |= TN_PLANE_BIT(i);
    }
    return TN_OK;
}

/* ---- copying ------------------------------------------------------------------------------- */

/* A tensor whose memory the driver would not take back stays in its scope, which frees it. */
static void delete_copy(tn__tensor_object *tensor) {
    tn__saved_error error;
    tn__error_save(&error);
    tn_status status = tn__transition_announce_empty(tensor, NULL);
    if (status == TN_OK) status = tn__transition_empty(tensor, NULL);
    if (status == TN_OK) tn__scope_delete_tensor(tensor);
    tn__error_restore(&error);
}

static tn_status copy_part(const part *of, tn__scope_object *scope, const tn_tensor_config *config,
                           tn_stream stream, tn__tensor_object **out) {
    copying job = {.from = of->base, .stream = stream};
    TN_TRY(tn__books_stream_id(scope->books, stream, &job.stream_id));
    TN_TRY(tn__scope_add_tensor(scope, config, &job.to));
    tn_status status = choose_planes(&job, of);
    if (status == TN_OK) status = copy_planes(&job);
    if (status != TN_OK) {
        delete_copy(job.to);
        return status;
    }
    *out = job.to;
    return TN_OK;
}

tn_status tn_tensor_clone(tn_tensor tensor, tn_scope scope, tn_stream stream, tn_tensor *out) {
    tn__tensor_object *object, *copy = NULL;
    tn__scope_object *to;
    TN_REQUIRE(out, "tn_tensor_clone: out is NULL");
    TN_TRY(tn__tensor_acquire_for(tensor, scope, &object, &to));
    tn_tensor_config config = tn__tensor_config_of(object);
    part all = part_of(object, 0, object->rows);
    tn_status status = copy_part(&all, to, &config, stream, &copy);
    if (status == TN_OK) {
        int is_whole = !object->view || !object->view->is_part;
        if (is_whole) copy->contents = all.base->contents;
        *out = copy->handle;
    }
    tn__tensor_unlock(object);
    return status;
}

tn_status tn_tensor_copy_rows(tn_tensor tensor, int64_t first_row, int64_t rows, tn_scope scope,
                              tn_stream stream, tn_tensor *out) {
    tn__tensor_object *object, *copy = NULL;
    tn__scope_object *to;
    TN_REQUIRE(out, "tn_tensor_copy_rows: out is NULL");
    TN_TRY(tn__tensor_acquire_for(tensor, scope, &object, &to));
    tn_status status = tn__view_check_rows(object, first_row, rows);
    if (status == TN_OK) {
        tn_tensor_config config = tn__view_config_of_rows(object, rows);
        part some = part_of(object, first_row, rows);
        status = copy_part(&some, to, &config, stream, &copy);
    }
    if (status == TN_OK) *out = copy->handle;
    tn__tensor_unlock(object);
    return status;
}
