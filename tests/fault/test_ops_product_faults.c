/* Products and what a training step needs beside them, with every driver call and every host
 * allocation failing in turn: see op_faults_support.h. */
#include "op_faults_support.h"

enum { UNKNOWN_ERROR = 999, ROWS = OP_FAULTS_ROWS, COLS = OP_FAULTS_COLS, N = 24, GROUPS = 3 };

static const int64_t offsets[GROUPS + 1] = {0, 37, 37, ROWS};

/* ---- products -------------------------------------------------------------------------------- */

/* FP8_BLOCK_2D with its ROW plane. */
static tn_tensor weight_of(const test_ops *ops, tn_scope scope, int64_t rows, int64_t cols) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = op_fault_input(ops, scope, TN_BF16, rows, cols);
    args.dst = test_weight(scope, rows, cols, 0, TN_POLICY_KEEP);
    EXPECT_OK(tn_quantize(&args, ops->stream));
    return args.dst;
}

static void prepare_bias_gemm(const test_ops *ops, tn_scope scope, tn_scope scratch,
                              op_fault_call *call) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = op_fault_plane(ops, scope);
    args.b = weight_of(ops, scope, N, COLS);
    args.bias = op_fault_input(ops, scope, TN_FP32, 1, N);
    args.d = op_fault_made(scope, call, TN_BF16, ROWS, N);
    args.scope = scratch;
    call->args.gemm = args;
}

/* COL of the weight is derived by the call, and goes again if it fails. */
static void prepare_deriving_gemm(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                  op_fault_call *call) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = TN_GEMM_DGRAD, args.accumulate = 1;
    args.a = op_fault_plane(ops, scope);
    args.b = weight_of(ops, scope, COLS, N);
    args.d = op_fault_updated(ops, scope, call, TN_FP32, ROWS, N);
    args.scope = scratch;
    call->args.gemm = args;
}

static void prepare_dequantizing_gemm(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                      op_fault_call *call) {
    prepare_bias_gemm(ops, scope, scratch, call);
    call->args.gemm.engine = TN_GEMM_ENGINE_DEQUANTIZE_BF16;
}

static void prepare_gelu_gemm(const test_ops *ops, tn_scope scope, tn_scope scratch,
                              op_fault_call *call) {
    prepare_bias_gemm(ops, scope, scratch, call);
    call->args.gemm.epilogue = TN_GEMM_EPILOGUE_GELU;
    call->args.gemm.pre = op_fault_made(scope, call, TN_BF16, ROWS, N);
}

static void prepare_gelu_gradient_gemm(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                       op_fault_call *call) {
    prepare_bias_gemm(ops, scope, scratch, call);
    call->args.gemm.bias = (tn_tensor){0};
    call->args.gemm.epilogue = TN_GEMM_EPILOGUE_GELU_GRADIENT;
    call->args.gemm.pre = op_fault_input(ops, scope, TN_BF16, ROWS, N);
    call->args.gemm.dbias = op_fault_made(scope, call, TN_FP32, 1, N);
}

static void prepare_dbias_gemm(const test_ops *ops, tn_scope scope, tn_scope scratch,
                               op_fault_call *call) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = TN_GEMM_DGRAD;
    args.a = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.b = op_fault_input(ops, scope, TN_BF16, COLS, N);
    args.d = op_fault_made(scope, call, TN_BF16, ROWS, N);
    args.dbias = op_fault_made(scope, call, TN_FP32, 1, COLS);
    args.scope = scratch;
    call->args.gemm = args;
}

static tn_status run_gemm(const op_fault_call *call, tn_stream stream) {
    return tn_gemm(&call->args.gemm, stream);
}

static tn_grouped_plane grouped(const test_ops *ops, tn_scope scope, tn_plane plane, int64_t cols) {
    int64_t floats = 0;
    EXPECT_OK(tn_grouped_scale_floats(TN_FORMAT_FP8_BLOCK_1D, plane, GROUPS, ROWS, cols, &floats));
    return (tn_grouped_plane){op_fault_input(ops, scope, TN_BYTE, ROWS, cols),
                              op_fault_input(ops, scope, TN_FP32, 1, floats)};
}

static tn_grouped_gemm_args grouped_args(tn_scope scratch) {
    tn_grouped_gemm_args args = TN_GROUPED_GEMM_ARGS_INIT;
    args.groups = GROUPS, args.offsets = offsets;
    args.n = N, args.k = COLS, args.scope = scratch;
    return args;
}

static void prepare_m_grouped(const test_ops *ops, tn_scope scope, tn_scope scratch,
                              op_fault_call *call) {
    tn_grouped_gemm_args args = grouped_args(scratch);
    for (int e = 0; e < GROUPS; e++) {
        call->sources[e] = weight_of(ops, scope, N, COLS);
        call->biases[e] = op_fault_input(ops, scope, TN_FP32, 1, N);
    }
    args.a = grouped(ops, scope, TN_PLANE_ROW, COLS);
    args.weights = call->sources, args.biases = call->biases;
    call->targets[0] = op_fault_made(scope, call, TN_BF16, ROWS, N);
    args.d = call->targets;
    call->args.grouped_gemm = args;
}

/* Of PLAIN rows, each with a COL that is no plane: DGRAD reads the weights as they are. */
static void prepare_plain_grouped(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                  op_fault_call *call) {
    tn_grouped_gemm_args args = grouped_args(scratch);
    args.form = TN_GEMM_DGRAD, args.accumulate = 1;
    for (int e = 0; e < GROUPS; e++)
        call->sources[e] = op_fault_input(ops, scope, TN_BF16, N, COLS);
    args.a.data = op_fault_input(ops, scope, TN_BF16, ROWS, N);
    args.weights = call->sources;
    call->targets[0] = op_fault_updated(ops, scope, call, TN_FP32, ROWS, COLS);
    args.d = call->targets;
    call->args.grouped_gemm = args;
}

static void prepare_k_grouped(const test_ops *ops, tn_scope scope, tn_scope scratch,
                              op_fault_call *call) {
    tn_grouped_gemm_args args = grouped_args(scratch);
    args.form = TN_GEMM_WGRAD, args.accumulate = 1;
    args.a = grouped(ops, scope, TN_PLANE_COL, N);
    args.b = grouped(ops, scope, TN_PLANE_COL, COLS);
    for (int e = 0; e < GROUPS; e++)
        call->targets[e] = op_fault_updated(ops, scope, call, TN_FP32, N, COLS);
    args.d = call->targets;
    call->args.grouped_gemm = args;
}

static tn_status run_grouped(const op_fault_call *call, tn_stream stream) {
    return tn_grouped_gemm(&call->args.grouped_gemm, stream);
}

/* ---- a training step ------------------------------------------------------------------------- */

static void prepare_norm_backward(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                  op_fault_call *call) {
    tn_norm_backward_args args = TN_NORM_BACKWARD_ARGS_INIT;
    args.norm = TN_NORM_LAYER;
    args.dy = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.x = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.mean = op_fault_input(ops, scope, TN_FP32, 1, ROWS);
    args.rstd = op_fault_input(ops, scope, TN_FP32, 1, ROWS);
    args.gamma = op_fault_input(ops, scope, TN_BF16, 1, COLS);
    args.added = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.dx = op_fault_made(scope, call, TN_BF16, ROWS, COLS);
    args.quantized = op_fault_quantized(scope, call, COLS);
    args.dgamma = op_fault_updated(ops, scope, call, TN_FP32, 1, COLS);
    args.dbeta = op_fault_updated(ops, scope, call, TN_BF16, 1, COLS);
    args.accumulate = 1, args.scope = scratch;
    call->args.norm_backward = args;
}

static tn_status run_norm_backward(const op_fault_call *call, tn_stream stream) {
    return tn_norm_backward(&call->args.norm_backward, stream);
}

static void prepare_embed_backward(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                   op_fault_call *call) {
    tn_embed_backward_args args = TN_EMBED_BACKWARD_ARGS_INIT;
    (void)scratch;
    args.tokens = op_fault_input(ops, scope, TN_BYTE, 1, ROWS);
    args.dy = op_fault_input(ops, scope, TN_BF16, ROWS, 40);
    args.dtable = op_fault_updated(ops, scope, call, TN_FP32, 256, 40);
    args.accumulate = 1;
    call->args.embed_backward = args;
}

static tn_status run_embed_backward(const op_fault_call *call, tn_stream stream) {
    return tn_embed_backward(&call->args.embed_backward, stream);
}

static void prepare_adamw(const test_ops *ops, tn_scope scope, tn_scope scratch,
                          op_fault_call *call) {
    tn_adamw_args args = TN_ADAMW_ARGS_INIT;
    (void)scratch;
    args.master = op_fault_updated(ops, scope, call, TN_FP32, ROWS, COLS);
    args.gradient = op_fault_input(ops, scope, TN_FP32, ROWS, COLS);
    args.first = op_fault_updated(ops, scope, call, TN_FP32, ROWS, COLS);
    args.second = op_fault_updated(ops, scope, call, TN_FP32, ROWS, COLS);
    args.step = op_fault_input(ops, scope, TN_FP32, 1, 3);
    args.rate = op_fault_input(ops, scope, TN_FP32, 1, 1);
    args.gradient_scale = op_fault_input(ops, scope, TN_FP32, 1, 1);
    args.weight = test_weight(scope, ROWS, COLS, 0, TN_POLICY_KEEP);
    (void)op_fault_output_add(call, args.weight, TN_PLANE_ROW);
    args.plain = op_fault_made(scope, call, TN_BF16, ROWS, COLS);
    call->args.adamw = args;
}

static tn_status run_adamw(const op_fault_call *call, tn_stream stream) {
    return tn_adamw(&call->args.adamw, stream);
}

static void prepare_adamw_advance(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                  op_fault_call *call) {
    tn_adamw_advance_args args = TN_ADAMW_ADVANCE_ARGS_INIT;
    (void)scratch;
    args.step = op_fault_updated(ops, scope, call, TN_FP32, 1, 3);
    call->args.adamw_advance = args;
}

static tn_status run_adamw_advance(const op_fault_call *call, tn_stream stream) {
    return tn_adamw_advance(&call->args.adamw_advance, stream);
}

static void prepare_square_sums(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                op_fault_call *call) {
    tn_square_sums_args args = TN_SQUARE_SUMS_ARGS_INIT;
    (void)scratch;
    args.x = op_fault_input(ops, scope, TN_BF16, ROWS, COLS);
    args.sums = op_fault_updated(ops, scope, call, TN_FP32, 1, TN_SQUARE_SUMS);
    args.accumulate = 1;
    call->args.square_sums = args;
}

static tn_status run_square_sums(const op_fault_call *call, tn_stream stream) {
    return tn_square_sums(&call->args.square_sums, stream);
}

static void prepare_clip_factor(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                op_fault_call *call) {
    tn_clip_factor_args args = TN_CLIP_FACTOR_ARGS_INIT;
    (void)scratch;
    args.sums = op_fault_input(ops, scope, TN_FP32, 1, TN_SQUARE_SUMS);
    args.norm = op_fault_made(scope, call, TN_FP32, 1, 1);
    args.factor = op_fault_made(scope, call, TN_FP32, 1, 1);
    call->args.clip_factor = args;
}

static tn_status run_clip_factor(const op_fault_call *call, tn_stream stream) {
    return tn_clip_factor(&call->args.clip_factor, stream);
}

/* ---- attention ------------------------------------------------------------------------------- */

enum { TOKENS = 70, HEADS = 2, OF_Y = HEADS * 8, PACKED = OF_Y + 2 * 8 };

static void prepare_attention(const test_ops *ops, tn_scope scope, tn_scope scratch,
                              op_fault_call *call) {
    tn_attention_forward_args args = TN_ATTENTION_FORWARD_ARGS_INIT;
    (void)scratch;
    args.qkv = op_fault_input(ops, scope, TN_BF16, TOKENS, PACKED);
    args.y = op_fault_made(scope, call, TN_BF16, TOKENS, OF_Y);
    args.log_sum = op_fault_made(scope, call, TN_FP32, HEADS, TOKENS);
    args.heads = HEADS, args.heads_kv = 1, args.sequence = TOKENS / 2;
    call->args.attention = args;
}

static tn_status run_attention(const op_fault_call *call, tn_stream stream) {
    return tn_attention_forward(&call->args.attention, stream);
}

static void prepare_attention_backward(const test_ops *ops, tn_scope scope, tn_scope scratch,
                                       op_fault_call *call) {
    tn_attention_backward_args args = TN_ATTENTION_BACKWARD_ARGS_INIT;
    args.dy = op_fault_input(ops, scope, TN_BF16, TOKENS, OF_Y);
    args.qkv = op_fault_input(ops, scope, TN_BF16, TOKENS, PACKED);
    args.y = op_fault_input(ops, scope, TN_BF16, TOKENS, OF_Y);
    args.log_sum = op_fault_input(ops, scope, TN_FP32, HEADS, TOKENS);
    args.dqkv = op_fault_made(scope, call, TN_BF16, TOKENS, PACKED);
    args.heads = HEADS, args.heads_kv = 1, args.sequence = TOKENS / 2;
    args.scope = scratch;
    call->args.attention_backward = args;
}

static tn_status run_attention_backward(const op_fault_call *call, tn_stream stream) {
    return tn_attention_backward(&call->args.attention_backward, stream);
}

/* ---- the table ------------------------------------------------------------------------------- */

static const op_fault_row rows[] = {
    {"gemm with a bias", prepare_bias_gemm, run_gemm, 0},
    {"gemm that derives", prepare_deriving_gemm, run_gemm, 0},
    {"gemm that dequantizes", prepare_dequantizing_gemm, run_gemm, 0},
    {"gemm with GELU", prepare_gelu_gemm, run_gemm, 1},
    {"gemm with GELU's gradient", prepare_gelu_gradient_gemm, run_gemm, 1},
    {"gemm with dbias", prepare_dbias_gemm, run_gemm, 1},
    {"grouped gemm, rows", prepare_m_grouped, run_grouped, 1},
    {"grouped gemm, plain", prepare_plain_grouped, run_grouped, 1},
    {"grouped gemm, weights", prepare_k_grouped, run_grouped, 1},
    {"norm_backward", prepare_norm_backward, run_norm_backward, 1},
    {"embed_backward", prepare_embed_backward, run_embed_backward, 0},
    {"adamw", prepare_adamw, run_adamw, 0},
    {"adamw_advance", prepare_adamw_advance, run_adamw_advance, 0},
    {"square_sums", prepare_square_sums, run_square_sums, 0},
    {"clip_factor", prepare_clip_factor, run_clip_factor, 0},
    {"attention_forward", prepare_attention, run_attention, 0},
    {"attention_backward", prepare_attention_backward, run_attention_backward, 0},
};

static int fail_each(fault_point fault, int is_sim) {
    return op_faults_fail_each(rows, sizeof rows / sizeof *rows, fault, is_sim);
}

static void every_host_allocation_on_the_host_device(void **state) {
    (void)state;
    assert_true(fail_each((fault_point){.is_host = 1}, 0) > 50);
}

static void every_host_allocation_on_the_simulated_device(void **state) {
    (void)state;
    assert_true(fail_each((fault_point){.is_host = 1}, 1) > 50);
}

static void every_driver_call(void **state) {
    (void)state;
    assert_true(fail_each((fault_point){.code = UNKNOWN_ERROR}, 1) > 500);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_host_allocation_on_the_host_device),
        cmocka_unit_test(every_host_allocation_on_the_simulated_device),
        cmocka_unit_test(every_driver_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
