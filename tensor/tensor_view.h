/* Views: tensors that are rows, or another shape, of a base tensor's planes.
 *
 * Callers hold the books' lock.
 */
#ifndef TENURE_TENSOR_VIEW_H
#define TENURE_TENSOR_VIEW_H

#include "tensor_state.h"

/* Where a plane of a view is in the base's. */
typedef struct tn__cut {
    size_t data_offset, scale_offset;
    const char *why_not;   /* it can not be used in place; else NULL */
    const char *read_only; /* why it can not be written in place; else NULL */
} tn__cut;

struct tn__view {
    tn__tensor_object *base;            /* never a view itself */
    tn__tensor_object *previous, *next; /* views of that base */
    int64_t first_element;              /* of the base */
    int is_part;                        /* the base has more elements than it */
    tn__cut cuts[TN_PLANE_COUNT];
};

/* The tensor that has the planes: the base of a view. */
static inline tn__tensor_object *tn__tensor_owner(tn__tensor_object *tensor) {
    return tensor->view ? tensor->view->base : tensor;
}

/* What the access to the view asks of the base: a write of a part leaves the rest, so that it is an
 * UPDATE. TN_UNSUPPORTED if the plane can not be used in place, if its scales are not the part's
 * own and it would be written, or if a part would be replaced. */
tn_status tn__view_admit(const tn__tensor_object *view, tn_plane plane, tn_access *access);

/* Of the base's plane, the part that is the view's. */
void tn__view_cut(const tn__tensor_object *view, tn_plane_view *out);

/* Takes a view that ends out of its base's list. */
void tn__view_unlink(tn__tensor_object *view);

/* TN_INVALID_ARGUMENT unless these are rows of the tensor; and what makes a tensor of so many. */
tn_status tn__view_check_rows(const tn__tensor_object *tensor, int64_t first_row, int64_t rows);
tn_tensor_config tn__view_config_of_rows(const tn__tensor_object *tensor, int64_t rows);

/* TN_INVALID_STATE for what views can not do; TN_OK for other tensors. */
tn_status tn__view_refuse(const tn__tensor_object *tensor, const char *what);

#endif
