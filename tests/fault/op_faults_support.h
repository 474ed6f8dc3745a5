/* Ops as rows of a table: how each makes its operands, and how it is called; and what runs a table
 * with everything that a call does failing in turn, once and from then on. A call that fails leaves
 * every plane in the state and with the bytes that it had, and no scratch; the same call then does
 * its work. Where work goes on the stream in parts and a later one is refused, no output is valid.
 *
 * Each is called twice: with outputs that there are not yet, and on another stream with outputs
 * that a first call has made.
 */
#ifndef TENURE_OP_FAULTS_SUPPORT_H
#define TENURE_OP_FAULTS_SUPPORT_H

#include "test_ops.h"

#include "fault_loop_support.h"
#include "tenure_attention.h"
#include "tenure_grouped.h"
#include "tenure_train.h"

enum { OP_FAULTS_OUTPUTS = 8, OP_FAULTS_ROWS = 130, OP_FAULTS_COLS = 200 };

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
        tn_norm_backward_args norm_backward;
        tn_embed_backward_args embed_backward;
        tn_adamw_args adamw;
        tn_adamw_advance_args adamw_advance;
        tn_square_sums_args square_sums;
        tn_clip_factor_args clip_factor;
        tn_gemm_args gemm;
        tn_grouped_gemm_args grouped_gemm;
        tn_attention_forward_args attention;
        tn_attention_backward_args attention_backward;
    } args;
    tn_tensor sources[3], targets[3], biases[3]; /* of a list */
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

/* The casts. */
extern const op_fault_row op_fault_rows[];
extern const int op_fault_row_count;

/* Every fault of that kind, of every row: how many calls failed. */
int op_faults_fail_each(const op_fault_row *rows, int count, fault_point fault, int is_sim);

/* ---- for prepare ---------------------------------------------------------------------------- */

/* Valid, of elements that are 0; at most as many bytes as ROWS x 2 COLS of fp32. */
tn_tensor op_fault_input(const test_ops *ops, tn_scope scope, tn_dtype dtype, int64_t rows,
                         int64_t cols);
/* A source of ROWS x COLS with its ROW plane, FP8_BLOCK_1D. */
tn_tensor op_fault_plane(const test_ops *ops, tn_scope scope);

/* Outputs: any; one that there is before, for an op that updates it; and those that it makes. */
tn_tensor op_fault_output_add(op_fault_call *call, tn_tensor tensor, tn_plane plane);
tn_tensor op_fault_updated(const test_ops *ops, tn_scope scope, op_fault_call *call, tn_dtype dtype,
                           int64_t rows, int64_t cols);
tn_tensor op_fault_made(tn_scope scope, op_fault_call *call, tn_dtype dtype, int64_t rows,
                        int64_t cols);
tn_tensor op_fault_made_planes(tn_scope scope, op_fault_call *call, tn_format format,
                               tn_dtype dtype, int64_t rows, int64_t cols);
tn_quantized_out op_fault_quantized(tn_scope scope, op_fault_call *call, int64_t cols);

#endif
