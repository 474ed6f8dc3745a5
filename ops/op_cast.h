/* The quantization that tn_quantize and the layers share: two planes in one pass over the source,
 * which may belong to two tensors. */
#ifndef TENURE_OP_CAST_H
#define TENURE_OP_CAST_H

#include "op_call.h"

/* What goes where; a plane without elements is left alone. has_row or has_col says which of the
 * views is there. */
typedef struct tn__quantize_plan {
    tn__matrix src;
    const tn_tensor_info *dst; /* format, dtype and scale mode of both planes */
    float amax_epsilon;
    int has_row, has_col;
    tn_plane_view row, col;
    const float *factor; /* of delayed scaling, likewise amax; NULL: none */
    float *amax;
    const float *whole_amax; /* of a tensor that src is a part of; NULL: it is not */
    const float *skip;       /* NULL: never */
    tn__random *random;      /* NULL: to nearest even */
    int square_blocks;
} tn__quantize_plan;

/* Puts it on the call's stream, if there is anything to do. */
tn_status tn__op_quantize(tn__op_call *call, const tn__quantize_plan *plan);

#endif
