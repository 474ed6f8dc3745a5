/* What a layer makes between its products: a value, itself or quantized for the product that reads
 * it, by a producer that does both in one pass where the recipe is of blocks.
 *
 *     recipe          value                        quantized
 *     PLAIN           what the product reads       none
 *     FP8_BLOCK_1D    if somebody wants it         by the producer
 *     FP8_TENSOR      always, perhaps in scratch   of the value, by a cast of its own
 */
#ifndef TENURE_LAYER_PRODUCE_H
#define TENURE_LAYER_PRODUCE_H

#include "layer_product.h"

/* Where something is made. */
typedef enum tn__layer_home {
    TN__LAYER_NOWHERE = 0,
    TN__LAYER_SCRATCH,
    TN__LAYER_SAVED
} tn__layer_home;

typedef struct tn__layer_wants {
    unsigned planes; /* TN_PLANE_BIT of those of the quantized copy; 0: none is wanted */
    int is_gradient; /* it is a dy, not an x */
    int is_kept;     /* the copy, beyond the call; of its planes, one */
    tn_plane kept_plane;
    tn__layer_home value;
    tn_tensor callers_value; /* in whose place the value is made; {0}: none */
} tn__layer_wants;

typedef struct tn__layer_made {
    tn__produced produced;
    tn__layer_operand value;     /* tensor {0}: nowhere */
    tn__layer_operand quantized; /* likewise */
    int value_is_scratch;
    int value_ends_with_cast; /* scratch that only the cast reads */
} tn__layer_made;

/* The tensors, of shape's rows, columns and type; `names` are the value's and the copy's. */
tn_status tn__layer_make_outputs(tn__op_call *call, const tn__layer_product *p,
                                 const char *const names[2], const tn_tensor_info *shape,
                                 const tn__layer_wants *wants, tn__layer_made *out);

/* The addresses that a producer has leased of `produced`. The struct stays where it is. */
void tn__layer_take_views(const tn__quantize_work *cast, tn__layer_made *made);

/* After the producer: the cast that it has not done. */
tn_status tn__layer_cast_made(tn__op_call *call, tn__layer_made *made);

/* What the product reads. */
static inline tn__layer_operand *tn__layer_made_operand(tn__layer_made *made) {
    return tn__is_no_tensor(made->quantized.tensor) ? &made->value : &made->quantized;
}

/* What the weight's gradient reads. */
static inline tn__layer_operand *tn__layer_wgrad_operand(const tn__layer_product *p,
                                                         tn__layer_made *made) {
    return tn__layer_reads_quantized_x(p) ? &made->quantized : &made->value;
}

/* The product has run, and after it only the weight's gradient reads x, if that is wanted: all else
 * that is scratch goes. */
tn_status tn__layer_done_with_x(tn__op_call *call, const tn__layer_product *p, tn__layer_made *made,
                                int for_wgrad);

/* What of it is saved: the copy, the value, or {0}. */
static inline tn_tensor tn__layer_kept_tensor(const tn__layer_made *made) {
    if (made->quantized.is_kept) return made->quantized.tensor;
    return made->value.is_kept ? made->value.tensor : (tn_tensor){0};
}

/* What a backward that recomputes makes for the weight's gradient: as much as forward would have
 * saved; kept if that gradient is delayed. */
tn__layer_wants tn__layer_wgrad_wants(const tn__layer_product *p, int is_delayed);

/* Where forward leaves what backward reads whatever is frozen. */
static inline tn__layer_home tn__layer_statistics_home(const tn_layer_common *common) {
    const int saves = common->saved_scope.value != 0 && !common->recompute;
    return saves ? TN__LAYER_SAVED : TN__LAYER_NOWHERE;
}

/* A PLAIN tensor of the call. */
tn_status tn__layer_plain(tn__op_call *call, const tn_layer_common *common, tn__layer_home home,
                          const char *name, const tn_tensor_info *shape, tn_tensor *out);

#endif
