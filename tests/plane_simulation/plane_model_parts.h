/* What the files of the model share: see plane_model.h. */
#ifndef TENURE_PLANE_MODEL_PARTS_H
#define TENURE_PLANE_MODEL_PARTS_H

#include "plane_model.h"

enum { ROW = 0, COL = 1, COPY_STREAM = MODEL_STREAMS };

/* ---- plane_model.c --------------------------------------------------------------------------- */

static inline int model_is_complete(const model_memory *at) {
    return at->state == TN_PLANE_VALID || at->state == TN_PLANE_OFFLOADED;
}

/* What is in a slot is no copy. */
static inline int model_is_copy(const model_memory *at) {
    return model_is_complete(at) && at->place != PLACE_SLOT;
}

int model_leases_on(const model *m, int tensor, int plane);
int model_is_last_copy(const model *m, int tensor, int plane);
void model_set_absent(model *m, int tensor, int plane);

/* What the policy comes to: UNTIL_LAST_USE is for 2D, none but OFFLOAD for planes that can not be
 * derived. */
tn_plane_policy model_policy(const model *m, int tensor);

/* The offloaded plane is back. */
void model_fetch(model_plane *at);

/* ---- plane_model_places.c -------------------------------------------------------------------- */

/* The plane is about to be derived into the slot; `source` is being read. */
tn_status model_take_buffer(model *m, int tensor, int plane, int source);
/* Nothing of the plane is in a slot any more. */
void model_leave_slot(model *m, int tensor, int plane);

tn_status model_release(model *m, int tensor, int plane);
tn_status model_end_backward(model *m);
tn_status model_step_place(model *m, model_operation op);

/* Whether what is asked of the view may be asked of its base; then *op is that. */
tn_status model_through_view(const model *m, model_operation *op);

/* ---- plane_model_words.c --------------------------------------------------------------------- */

size_t model_plane_bytes(const model *m, int plane);

#endif
