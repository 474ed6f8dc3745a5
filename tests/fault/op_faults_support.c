/* See op_faults_support.h. */
#include "op_faults_support.h"

#include <string.h>

enum { ROWS = OP_FAULTS_ROWS, COLS = OP_FAULTS_COLS, GROUPS = 2 };
enum { BOTH = TN_QUANTIZE_ROW | TN_QUANTIZE_COL };

/* ---- operands ------------------------------------------------------------------------------- */

tn_tensor op_fault_input(const test_ops *ops, tn_scope scope, tn_dtype dtype, int64_t rows,
                         int64_t cols) {
    static const char zeros[sizeof(float) * 2 * ROWS * COLS];
    tn_tensor tensor = test_plain(scope, dtype, rows, cols);
    assert_true((size_t)(rows * cols) * tn_dtype_bytes(dtype) <= sizeof zeros);
    test_write(ops, tensor, zeros);
    return tensor;
}

tn_tensor op_fault_output_add(op_fault_call *call, tn_tensor tensor, tn_plane plane) {
    assert_true(call->out_count < OP_FAULTS_OUTPUTS);
    call->out[call->out_count++] = (op_fault_output){tensor, plane};
    return tensor;
}

tn_tensor op_fault_updated(const test_ops *ops, tn_scope scope, op_fault_call *call, tn_dtype dtype,
                           int64_t rows, int64_t cols) {
    return op_fault_output_add(call, op_fault_input(ops, scope, dtype, rows, cols), TN_PLANE_DATA);
}

tn_tensor op_fault_made(tn_scope scope, op_fault_call *call, tn_dtype dtype, int64_t rows,
                        int64_t cols) {
    return op_fault_output_add(call, test_plain(scope, dtype, rows, cols), TN_PLANE_DATA);
}

tn_tensor op_fault_made_planes(tn_scope scope, op_fault_call *call, tn_format format,
                               tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor tensor = test_fp8(scope, format, dtype, rows, cols);
    (void)op_fault_output_add(call, tensor, TN_PLANE_ROW);
    return op_fault_output_add(call, tensor, TN_PLANE_COL);
}

tn_quantized_out op_fault_quantized(tn_scope scope, op_fault_call *call, int64_t cols) {
    tn_quantized_out out = TN_QUANTIZED_OUT_INIT;
    out.tensor = op_fault_made_planes(scope, call, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, cols);
    out.planes = BOTH;
    return out;
}

/* ---- casts ---------------------------------------------------------------------------------- */

static void prepare_stochastic(const test_ops *ops, tn_scope scope, tn_scope scratch,
                               op_fault_call *call) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    (void)scratch;
    args.src = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.dst = op_fault_made_planes(scope, call, TN_FORMAT_NVFP4, TN_E2M1, ROWS, COLS);
    args.random = op_fault_updated(ops, scope, call, TN_BYTE, 1, 16);
    args.planes = BOTH;
    call->args.quantize = args;
}

static void prepare_delayed(const test_ops *ops, tn_scope scope, tn_scope scratch,
                            op_fault_call *call) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    (void)scratch;
    args.src = op_fault_input(ops, scope, TN_FP32, ROWS, COLS);
    args.dst = op_fault_made_planes(scope, call, TN_FORMAT_FP8_TENSOR, TN_E5M2, ROWS, COLS);
    args.scale = op_fault_input(ops, scope, TN_FP32, 1, 1);
    args.amax_history = op_fault_updated(ops, scope, call, TN_FP32, 4, 1);
    args.planes = BOTH;
    call->args.quantize = args;
}

static tn_status run_quantize(const op_fault_call *call, tn_stream stream) {
    return tn_quantize(&call->args.quantize, stream);
}

tn_tensor op_fault_plane(const test_ops *ops, tn_scope scope) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, COLS);
    EXPECT_OK(tn_quantize(&args, ops->stream));
    return args.dst;
}

static void prepare_dequantize(const test_ops *ops, tn_scope scope, tn_scope scratch,
                               op_fault_call *call) {
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    (void)scratch;
    args.src = op_fault_plane(ops, scope);
    args.dst = op_fault_made(scope, call, TN_FP32, ROWS, COLS);
    call->args.dequantize = args;
}

static tn_status run_dequantize(const op_fault_call *call, tn_stream stream) {
    return tn_dequantize(&call->args.dequantize, stream);
}

static void prepare_requantize(const test_ops *ops, tn_scope scope, tn_scope scratch,
                               op_fault_call *call) {
    tn_requantize_args args = TN_REQUANTIZE_ARGS_INIT;
    (void)scratch;
    args.src = op_fault_plane(ops, scope);
    args.dst = op_fault_made_planes(scope, call, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, ROWS, COLS);
    args.planes = BOTH;
    call->args.requantize = args;
}

static tn_status run_requantize(const op_fault_call *call, tn_stream stream) {
    return tn_requantize(&call->args.requantize, stream);
}

static void prepare_scale_update(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                 op_fault_call *call) {
    tn_scale_update_args args = TN_SCALE_UPDATE_ARGS_INIT;
    (void)scratch;
    args.amax_history = op_fault_updated(ops, scope, call, TN_FP32, 16, 5);
    args.scale = op_fault_updated(ops, scope, call, TN_FP32, 1, 5);
    call->args.scale_update = args;
}

static tn_status run_scale_update(const op_fault_call *call, tn_stream stream) {
    return tn_scale_update(&call->args.scale_update, stream);
}

/* ---- groups, lists, rows, shards ------------------------------------------------------------ */

/* Offsets that are 0: groups without rows. */
static void prepare_grouped(const test_ops *ops, tn_scope scope, tn_scope scratch,
                            op_fault_call *call) {
    tn_grouped_quantize_args args = TN_GROUPED_QUANTIZE_ARGS_INIT;
    args.src = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.offsets = op_fault_input(ops, scope, TN_BYTE, GROUPS + 1, 8);
    args.error = op_fault_updated(ops, scope, call, TN_BYTE, 1, 4);
    args.row.data = op_fault_made(scope, call, TN_BYTE, ROWS, COLS);
    args.row.scale = op_fault_made(scope, call, TN_FP32, 4, ROWS + 8);
    args.col.data = op_fault_made(scope, call, TN_BYTE, ROWS, COLS);
    args.col.scale = op_fault_made(scope, call, TN_FP32, 4, COLS);
    args.scope = scratch;
    call->args.grouped = args;
}

static tn_status run_grouped(const op_fault_call *call, tn_stream stream) {
    return tn_grouped_quantize(&call->args.grouped, stream);
}

static void prepare_list(const test_ops *ops, tn_scope scope, tn_scope scratch,
                         op_fault_call *call) {
    tn_quantize_list_args args = TN_QUANTIZE_LIST_ARGS_INIT;
    for (int i = 0; i < 3; i++) {
        call->sources[i] = op_fault_input(ops, scope, TN_BF16, ROWS, 40 + i);
        call->targets[i] =
            op_fault_made_planes(scope, call, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, ROWS, 40 + i);
    }
    args.src = call->sources, args.dst = call->targets, args.count = 3;
    args.planes = BOTH;
    args.scope = scratch;
    call->args.list = args;
}

static tn_status run_list(const op_fault_call *call, tn_stream stream) {
    return tn_quantize_list(&call->args.list, stream);
}

static void prepare_pad(const test_ops *ops, tn_scope scope, tn_scope scratch,
                        op_fault_call *call) {
    tn_pad_groups_args args = TN_PAD_GROUPS_ARGS_INIT;
    args.offsets = op_fault_input(ops, scope, TN_BYTE, GROUPS + 1, 8);
    args.padded_offsets = op_fault_made(scope, call, TN_BYTE, GROUPS + 1, 8);
    args.map = op_fault_made(scope, call, TN_BYTE, ROWS + 300, 8);
    args.inverse = op_fault_made(scope, call, TN_BYTE, ROWS, 8);
    args.error = op_fault_updated(ops, scope, call, TN_BYTE, 1, 4);
    args.rows = ROWS, args.scope = scratch;
    call->args.pad = args;
}

static tn_status run_pad(const op_fault_call *call, tn_stream stream) {
    return tn_pad_groups(&call->args.pad, stream);
}

static void prepare_gather(const test_ops *ops, tn_scope scope, tn_scope scratch,
                           op_fault_call *call) {
    tn_gather_rows_args args = TN_GATHER_ROWS_ARGS_INIT;
    (void)scratch;
    args.src = op_fault_plane(ops, scope);
    args.map = op_fault_input(ops, scope, TN_BYTE, 70, 8);
    args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 70, COLS);
    (void)op_fault_output_add(call, args.dst, TN_PLANE_ROW);
    args.error = op_fault_updated(ops, scope, call, TN_BYTE, 1, 4);
    call->args.gather = args;
}

static tn_status run_gather(const op_fault_call *call, tn_stream stream) {
    return tn_gather_rows(&call->args.gather, stream);
}

static void prepare_combine(const test_ops *ops, tn_scope scope, tn_scope scratch,
                            op_fault_call *call) {
    tn_combine_rows_args args = TN_COMBINE_ROWS_ARGS_INIT;
    (void)scratch;
    args.src = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.map = op_fault_input(ops, scope, TN_BYTE, 70, 16);
    args.weights = op_fault_input(ops, scope, TN_FP32, 70, 2);
    args.dst = op_fault_made(scope, call, TN_FP32, 70, COLS);
    args.error = op_fault_updated(ops, scope, call, TN_BYTE, 1, 4);
    call->args.combine = args;
}

static tn_status run_combine(const op_fault_call *call, tn_stream stream) {
    return tn_combine_rows(&call->args.combine, stream);
}

static void prepare_shard_amax(const test_ops *ops, tn_scope scope, tn_scope scratch,
                               op_fault_call *call) {
    tn_shard_amax_args args = TN_SHARD_AMAX_ARGS_INIT;
    (void)scratch;
    args.src = op_fault_input(ops, scope, TN_FP32, 1, 777);
    args.rows = ROWS, args.cols = COLS, args.first = 13;
    args.amax = op_fault_made(scope, call, TN_FP32, 2, 2);
    call->args.shard_amax = args;
}

static tn_status run_shard_amax(const op_fault_call *call, tn_stream stream) {
    return tn_shard_amax(&call->args.shard_amax, stream);
}

static void prepare_shard_quantize(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                   op_fault_call *call) {
    tn_shard_quantize_args args = TN_SHARD_QUANTIZE_ARGS_INIT;
    (void)scratch;
    args.src = op_fault_input(ops, scope, TN_FP32, 1, 777);
    args.rows = ROWS, args.cols = COLS, args.first = args.data_first = 13;
    args.amax = op_fault_input(ops, scope, TN_FP32, 2, 2);
    args.data = op_fault_updated(ops, scope, call, TN_BYTE, ROWS, COLS);
    args.scale = op_fault_made(scope, call, TN_FP32, 2, 4);
    call->args.shard_quantize = args;
}

static tn_status run_shard_quantize(const op_fault_call *call, tn_stream stream) {
    return tn_shard_quantize(&call->args.shard_quantize, stream);
}

/* ---- producers ------------------------------------------------------------------------------ */

static void prepare_activation(const test_ops *ops, tn_scope scope, tn_scope scratch,
                               op_fault_call *call) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    (void)scratch;
    args.gated = 1;
    args.x = op_fault_input(ops, scope, TN_BF16, ROWS, (int64_t)2 * COLS);
    args.weights = op_fault_input(ops, scope, TN_FP32, 1, ROWS);
    args.y = op_fault_made(scope, call, TN_BF16, ROWS, COLS);
    args.quantized = op_fault_quantized(scope, call, COLS);
    call->args.activation = args;
}

static tn_status run_activation(const op_fault_call *call, tn_stream stream) {
    return tn_activation_forward(&call->args.activation, stream);
}

static void prepare_activation_backward(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                        op_fault_call *call) {
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    args.gated = 1;
    args.dy = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.x = op_fault_input(ops, scope, TN_BF16, ROWS, (int64_t)2 * COLS);
    args.dx = op_fault_made(scope, call, TN_BF16, ROWS, (int64_t)2 * COLS);
    args.quantized = op_fault_quantized(scope, call, (int64_t)2 * COLS);
    args.dbias = op_fault_made(scope, call, TN_FP32, 1, (int64_t)2 * COLS);
    args.scope = scratch;
    call->args.activation_backward = args;
}

static tn_status run_activation_backward(const op_fault_call *call, tn_stream stream) {
    return tn_activation_backward(&call->args.activation_backward, stream);
}

static void prepare_bias(const test_ops *ops, tn_scope scope, tn_scope scratch,
                         op_fault_call *call) {
    tn_bias_gradient_args args = TN_BIAS_GRADIENT_ARGS_INIT;
    args.dy = op_fault_input(ops, scope, TN_FP32, ROWS, COLS);
    args.quantized = op_fault_quantized(scope, call, COLS);
    args.dbias = op_fault_made(scope, call, TN_BF16, 1, COLS);
    args.scope = scratch;
    call->args.bias = args;
}

static tn_status run_bias(const op_fault_call *call, tn_stream stream) {
    return tn_bias_gradient(&call->args.bias, stream);
}

/* Over its residual. */
static void prepare_norm(const test_ops *ops, tn_scope scope, tn_scope scratch,
                         op_fault_call *call) {
    tn_norm_args args = TN_NORM_ARGS_INIT;
    args.norm = TN_NORM_LAYER;
    args.x = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.residual = op_fault_updated(ops, scope, call, TN_BF16, ROWS, COLS);
    args.gamma = op_fault_input(ops, scope, TN_FP32, 1, COLS);
    args.y = op_fault_made(scope, call, TN_BF16, ROWS, COLS);
    args.quantized = op_fault_quantized(scope, call, COLS);
    args.rstd = op_fault_made(scope, call, TN_FP32, 1, ROWS);
    args.scope = scratch;
    call->args.norm = args;
}

static tn_status run_norm(const op_fault_call *call, tn_stream stream) {
    return tn_norm_forward(&call->args.norm, stream);
}

const op_fault_row op_fault_rows[] = {
    {"stochastic cast", prepare_stochastic, run_quantize, 0},
    {"delayed cast", prepare_delayed, run_quantize, 0},
    {"dequantize", prepare_dequantize, run_dequantize, 0},
    {"requantize", prepare_requantize, run_requantize, 0},
    {"scale_update", prepare_scale_update, run_scale_update, 0},
    {"grouped_quantize", prepare_grouped, run_grouped, 0},
    {"quantize_list", prepare_list, run_list, 0},
    {"pad_groups", prepare_pad, run_pad, 0},
    {"gather_rows", prepare_gather, run_gather, 0},
    {"combine_rows", prepare_combine, run_combine, 0},
    {"shard_amax", prepare_shard_amax, run_shard_amax, 0},
    {"shard_quantize", prepare_shard_quantize, run_shard_quantize, 0},
    {"activation_forward", prepare_activation, run_activation, 0},
    {"activation_backward", prepare_activation_backward, run_activation_backward, 1},
    {"bias_gradient", prepare_bias, run_bias, 1},
    {"norm_forward", prepare_norm, run_norm, 0},
};
const int op_fault_row_count = sizeof op_fault_rows / sizeof *op_fault_rows;
