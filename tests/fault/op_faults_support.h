/* The casts as rows of a table: how each makes its operands, and how it is called; for tests in
 * which everything that a call does fails in turn.
 */
#ifndef TENURE_OP_FAULTS_SUPPORT_H
#define TENURE_OP_FAULTS_SUPPORT_H

#include "test_ops.h"

#include "tenure_cast.h"
#include "tenure_grouped.h"

enum { OP_FAULTS_OUTPUTS = 8 };

typedef struct op_fault_output {
    tn_tensor tensor;
    tn_plane plane;
} op_fault_output;

typedef struct op_fault_call {
    union {
        tn_quantize_args quantize;
        tn_dequantize_args dequantize;
        tn_requantize_args requantize;
        tn_scale_update_args scale_update;
        tn_grouped_quantize_args grouped;
        tn_quantize_list_args list;
        tn_pad_groups_args pad;
        tn_gather_rows_args gather;
        tn_combine_rows_args combine;
        tn_shard_amax_args shard_amax;
        tn_shard_quantize_args shard_quantize;
        tn_activation_args activation;
        tn_activation_backward_args activation_backward;
        tn_bias_gradient_args bias;
        tn_norm_args norm;
    } args;
    tn_tensor sources[3], targets[3]; /* of a list */
    op_fault_output out[OP_FAULTS_OUTPUTS];
    int out_count;
} op_fault_call;

typedef struct op_fault_row {
    const char *name;
    /* Operands in the scope; scratch goes to `scratch`. */
    void (*prepare)(const test_ops *ops, tn_scope scope, tn_scope scratch, op_fault_call *call);
    tn_status (*run)(const op_fault_call *call, tn_stream stream);
    int is_split; /* it puts work on the stream in parts, of which a later one may be refused */
} op_fault_row;

extern const op_fault_row op_fault_rows[];
extern const int op_fault_row_count;

#endif
