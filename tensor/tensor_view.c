/* Views: made, linked to their base, and cut out of its planes.
 *
 *     base      | rows 0..127 | rows 128..383 | rows 384..499 |     one block of elements, one of
 *     view                    | first_element, layouts, cuts  |     scales: a view has addresses in
 *                             | say which part is its own     |     both
 *
 * Invariants: a view has no memory, and its own planes stay ABSENT; what it is asked for is asked
 * of the base, with leases on the base's planes (lease->through names the view). A view of a view
 * is one of the same base. A base with views is not destroyed.
 */
#include "tensor_view.h"

#include "format_table.h"
#include "host_alloc.h"
#include "scope.h"
#include "tensor_internal.h"
#include "tenure_lifetime.h"

#include <string.h>

/* ---- cuts ---------------------------------------------------------------------------------- */

static const char *const not_contiguous =
    "the rows of a tensor are columns of that plane, which are not contiguous";

static const char *const scale_of_all = "all rows of the tensor share a scale";

/* Whoever writes scales pads their rows, and would pad over those of the next rows. */
static const char *const scales_interleaved =
    "the scales of its rows lie between those of the other rows";

/* Without scales any shape will do. */
static void cut_data(tn__tensor_object *tensor, tn__view *view) {
    size_t element_bytes = tn_dtype_bytes(tensor->dtype);
    view->cuts[TN_PLANE_DATA].data_offset = (size_t)view->first_element * element_bytes;
}

static void cut_plane(tn__tensor_object *tensor, tn__view *view, tn_plane plane) {
    const tn__tensor_object *base = view->base;
    tn__cut *cut = &view->cuts[plane];
    int64_t first = base->cols > 0 ? view->first_element / base->cols : 0;
    tn__slice slice;
    if (!tn__format_slice(base->format, base->dtype, base->rows, base->cols, plane, first,
                          tensor->rows, &slice, &cut->why_not)) {
        return;
    }
    if (!slice.is_contiguous) {
        cut->why_not = not_contiguous;
        return;
    }
    tensor->layouts[plane] = slice.layout;
    cut->data_offset = slice.data_offset;
    cut->scale_offset = slice.scale_offset;
    if (slice.layout.global_scale_offset >= 0) cut->read_only = scale_of_all;
    if (slice.is_scale_interleaved) cut->read_only = scales_interleaved;
}

/* At least one plane must be of use. */
static tn_status cut_planes(tn__tensor_object *tensor, tn__view *view) {
    const char *why = NULL;
    int usable = 0;
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (!tn__format_has_plane(tensor->format, (tn_plane)i)) continue;
        if (i == TN_PLANE_DATA)
            cut_data(tensor, view);
        else
            cut_plane(tensor, view, (tn_plane)i);
        usable += !view->cuts[i].why_not;
        if (!why) why = view->cuts[i].why_not;
    }
    if (usable > 0) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "a view of %lld rows of tensor %s is refused, because %s; tn_tensor_copy_rows "
                   "copies rows where whole blocks allow it",
                   (long long)tensor->rows, view->base->name, why);
}

tn_status tn__view_admit(const tn__tensor_object *view, tn_plane plane, tn_access *access) {
    const char *why = view->view->cuts[plane].why_not;
    if (why) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "plane %s of view %s can not be used in place, because %s; "
                       "tn_tensor_copy_rows makes a copy where whole blocks allow it",
                       tn_plane_name(plane), view->name, why);
    }
    if (!view->view->is_part) return TN_OK;
    if (*access != TN_READ && view->view->cuts[plane].read_only) {
        return TN_FAIL(TN_UNSUPPORTED, "plane %s of view %s can only be read, because %s",
                       tn_plane_name(plane), view->name, view->view->cuts[plane].read_only);
    }
    if (*access == TN_REPLACE) {
        return TN_FAIL(TN_UNSUPPORTED, "view %s is a part of tensor %s: only the whole is replaced",
                       view->name, view->view->base->name);
    }
    if (*access == TN_WRITE) *access = TN_UPDATE;
    return TN_OK;
}

void tn__view_cut(const tn__tensor_object *view, tn_plane_view *out) {
    const tn__cut *cut = &view->view->cuts[out->plane];
    out->layout = view->layouts[out->plane];
    if (out->layout.data_bytes == 0) out->data = NULL;
    if (out->layout.scale_bytes == 0) out->scale = NULL;
    if (out->layout.global_scale_offset < 0) out->global_scale = NULL;
    if (out->data) out->data = (char *)out->data + cut->data_offset;
    if (out->scale) out->scale = (char *)out->scale + cut->scale_offset;
}

tn_status tn__view_refuse(const tn__tensor_object *tensor, const char *what) {
    if (!tensor->view) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "tensor %s is a view of tensor %s and has no plane to %s",
                   tensor->name, tensor->view->base->name, what);
}

/* ---- making and ending --------------------------------------------------------------------- */

static void link_view(tn__tensor_object *tensor, tn__view *view) {
    tn__tensor_object *next = view->base->first_view;
    view->next = next;
    if (next) next->view->previous = tensor;
    view->base->first_view = tensor;
    tensor->view = view;
}

void tn__view_unlink(tn__tensor_object *tensor) {
    tn__view *view = tensor->view;
    if (view->next) view->next->view->previous = view->previous;
    if (view->previous)
        view->previous->view->next = view->next;
    else
        view->base->first_view = view->next;
    tn__host_free(view);
    tensor->view = NULL;
}

static int64_t elements_of(const tn__tensor_object *tensor) { return tensor->rows * tensor->cols; }

/* `skipped` elements of `of`, which may be a view itself, come before it. */
static tn_status make_view(tn__tensor_object *of, tn__scope_object *scope,
                           const tn_tensor_config *config, int64_t skipped, tn_tensor *out) {
    tn__tensor_object *tensor = NULL;
    tn__view *view = tn__host_alloc(1, sizeof *view);
    if (!view) return TN_OUT_OF_HOST_MEMORY;
    view->base = tn__tensor_owner(of);
    view->first_element = skipped + (of->view ? of->view->first_element : 0);
    tn_status status = tn__scope_add_tensor(scope, config, &tensor);
    if (status == TN_OK) {
        view->is_part = elements_of(tensor) != elements_of(view->base);
        status = cut_planes(tensor, view);
        if (status != TN_OK) tn__scope_delete_tensor(tensor);
    }
    if (status != TN_OK) {
        tn__host_free(view);
        return status;
    }
    link_view(tensor, view);
    *out = tensor->handle;
    return TN_OK;
}

/* ---- the public part ----------------------------------------------------------------------- */

tn_tensor_config tn__view_config_of_rows(const tn__tensor_object *tensor, int64_t rows) {
    tn_tensor_config config = tn__tensor_config_of(tensor);
    config.rank = 2;
    memset(config.shape, 0, sizeof config.shape);
    config.shape[0] = rows;
    config.shape[1] = tensor->cols;
    return config;
}

tn_status tn__view_check_rows(const tn__tensor_object *tensor, int64_t first_row, int64_t rows) {
    TN_REQUIRE(first_row >= 0 && rows >= 0 && rows <= tensor->rows &&
                   first_row <= tensor->rows - rows,
               "rows %lld and the next %lld are not all rows of tensor %s, which has %lld",
               (long long)first_row, (long long)rows, tensor->name, (long long)tensor->rows);
    return TN_OK;
}

tn_status tn_tensor_view_rows(tn_tensor base, int64_t first_row, int64_t rows, tn_scope scope,
                              tn_tensor *out) {
    tn__tensor_object *object;
    tn__scope_object *to;
    TN_REQUIRE(out, "tn_tensor_view_rows: view is NULL");
    TN_TRY(tn__tensor_acquire_for(base, scope, &object, &to));
    tn_status status = tn__view_check_rows(object, first_row, rows);
    if (status == TN_OK) {
        tn_tensor_config config = tn__view_config_of_rows(object, rows);
        status = make_view(object, to, &config, first_row * object->cols, out);
    }
    tn__tensor_unlock(object);
    return status;
}

/* With scales along rows and columns, only the split of the rows into dimensions may change. */
static tn_status check_shape(const tn__tensor_object *tensor, const tn_tensor_config *config) {
    int64_t rows = 0, cols = 0;
    TN_TRY(tn__tensor_config_check(config));
    TN_TRY(tn__tensor_flatten(config, &rows, &cols));
    TN_REQUIRE(rows * cols == elements_of(tensor),
               "the shape has %lld x %lld elements, and tensor %s %lld x %lld", (long long)rows,
               (long long)cols, tensor->name, (long long)tensor->rows, (long long)tensor->cols);
    if (tn__format_has_plane(tensor->format, TN_PLANE_DATA)) return TN_OK;
    if (rows == tensor->rows && cols == tensor->cols) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "a shape of %lld x %lld is refused for tensor %s of %lld x %lld, because its "
                   "scales are those of blocks of the matrix",
                   (long long)rows, (long long)cols, tensor->name, (long long)tensor->rows,
                   (long long)tensor->cols);
}

tn_status tn_tensor_view_shape(tn_tensor base, int rank, const int64_t *shape, tn_scope scope,
                               tn_tensor *out) {
    tn__tensor_object *object;
    tn__scope_object *to;
    TN_REQUIRE(out, "tn_tensor_view_shape: view is NULL");
    TN_REQUIRE(rank >= 0 && rank <= TN_RANK_MAX, "rank %d is not 0 to %d", rank, TN_RANK_MAX);
    TN_REQUIRE(shape || rank == 0, "tn_tensor_view_shape: shape is NULL");
    TN_TRY(tn__tensor_acquire_for(base, scope, &object, &to));
    tn_tensor_config config = tn__tensor_config_of(object);
    memset(config.shape, 0, sizeof config.shape);
    config.rank = rank;
    if (rank > 0) memcpy(config.shape, shape, (size_t)rank * sizeof *shape);
    tn_status status = check_shape(object, &config);
    if (status == TN_OK) status = make_view(object, to, &config, 0, out);
    tn__tensor_unlock(object);
    return status;
}

tn_status tn__tensor_elements(tn_tensor tensor, tn__element_range *out) {
    tn__tensor_object *object;
    TN_TRY(tn__tensor_acquire(tensor, &object));
    *out = (tn__element_range){.owner = tn__tensor_owner(object),
                               .first = object->view ? object->view->first_element : 0,
                               .count = elements_of(object)};
    tn__tensor_unlock(object);
    return TN_OK;
}
