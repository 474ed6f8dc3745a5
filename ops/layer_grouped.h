/* What the calls on a mixture's experts share: what they are told, checked, and casts of the rows
 * of all groups (tenure_experts.h has the calls, layer_grouped.c the invariants). */
#ifndef TENURE_LAYER_GROUPED_H
#define TENURE_LAYER_GROUPED_H

#include "layer_product.h"
#include "op_grouped_gemm.h"
#include "tenure_experts.h"

/* What x is quantized to. */
#define TN__EXPERTS_X_DTYPE TN_E4M3

/* Of a call: the weights are alike, so the first one's info is all of theirs but for contents. */
typedef struct tn__experts {
    const tn_experts *args;
    tn__group_list groups;
    tn_tensor_info weight; /* no rows and no columns, and PLAIN, without groups */
    int is_plain;
    int is_any_trainable;
    tn_format operand;                /* what x and dy become */
    tn__gemm_plane_pair fprop, dgrad; /* of b: DATA for PLAIN weights */
    tn__groups device;                /* blocks: leased with the first cast */
    void *table;                      /* likewise: scratch that casts share */
    int is_leased;
} tn__experts;

tn_status tn__experts_check(tn__op_call *call, const tn_experts *args, tn__experts *out);

/* At least the groups' rows, `cols` columns, and for PLAIN weights of their type. */
tn_status tn__experts_check_rows(tn__op_call *call, const char *role, tn_tensor tensor,
                                 const tn__experts *of, int64_t cols, int is_operand,
                                 tn_tensor_info *info);

/* The entry of an array that may not be there. */
static inline tn_tensor tn__tensor_at(const tn_tensor *tensors, int64_t e) {
    return tensors ? tensors[e] : (tn_tensor){0};
}

static inline int tn__has_plane(const tn_grouped_plane *plane) {
    return plane && !tn__is_no_tensor(plane->data);
}

/* Destroys both tensors in the stream's order, and their handles are {0}; what can not be destroyed
 * now, as it is under a lease, ends with its scope. */
void tn__grouped_plane_end(tn_grouped_plane *plane, tn_stream stream);

/* A cast of a PLAIN matrix to grouped planes of exactly the groups' size. */
typedef struct tn__experts_cast {
    tn_tensor src;
    const tn_tensor_info *info;
    tn_dtype dtype;
    const tn_layer_scale *scale; /* delayed scaling, of the first group's slot on */
    int has_row, has_col;
    int keeps_col; /* in keep_scope, beyond the call; else both are scratch */
    tn_scope keep_scope;
    tn_grouped_plane kept; /* from here on: what was made */
    tn__grouped_operand row, col;
} tn__experts_cast;

/* Makes the planes and puts the cast on the stream. After a failure the caller ends `kept`. */
tn_status tn__experts_quantize(tn__op_call *call, tn__experts *of, tn_scope scope,
                               tn__experts_cast *cast);

/* The next group that has rows, after e; how many groups there are if none has. */
static inline int64_t tn__experts_next_group(const tn__experts *of, int64_t e) {
    do
        e++;
    while (e < of->groups.count && tn__group_rows(&of->groups, e) == 0);
    return e;
}

/* A group's weight as b of FPROP or DGRAD, without its address. */
tn_status tn__experts_outline_weight(const tn__experts *of, int64_t e, tn_gemm_form form,
                                     tn__operand *out);

#endif
