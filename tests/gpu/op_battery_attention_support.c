/* The battery's attention, forward and backward. A case's rows are tokens, of which large cases
 * keep some; its columns say how many elements a head has. */
#include "op_battery_support.h"

#include "tenure_attention.h"

enum { ATTENTION_WAYS = 3 * 2 * 4, TOKENS_MAX = 90 };

typedef struct shape {
    int64_t tokens, heads, heads_kv, head_dim, sequence;
} shape;

static shape shape_of(const battery_case *c) {
    static const int64_t heads[][2] = {{1, 1}, {2, 1}, {2, 2}, {4, 2}};
    static const int64_t parts[] = {1, 2, 3, 5, 7};
    const int64_t *of = heads[c->way / 6 % 4];
    const int64_t rows = c->rows < TOKENS_MAX ? c->rows : TOKENS_MAX;
    const int64_t part = parts[battery_pick(c, 1, 5)];
    shape s = {c->cols > 0 ? rows : 0, of[0], of[1], 8 * (1 + c->cols % 16), 1};
    if (s.tokens > 0) s.sequence = s.tokens % part == 0 ? s.tokens / part : s.tokens;
    return s;
}

static tn_dtype source_of(const battery_case *c) { return battery_floats[c->way % 3]; }
static int is_causal(const battery_case *c) { return (int)(c->way / 3 % 2); }
static float scale_of(const battery_case *c) { return c->way % 5 == 4 ? 0.625f : 0.0f; }

static int64_t packed_cols(const shape *s) { return (s->heads + 2 * s->heads_kv) * s->head_dim; }

static tn_tensor input(gpu_side *side, const battery_case *c, battery_operands *operands,
                       int64_t cols, uint64_t salt) {
    return battery_input(side, c, operands, source_of(c), shape_of(c).tokens, cols, salt);
}

static tn_attention_forward_args forward_of(const battery_case *c, tn_tensor qkv, tn_tensor y,
                                            tn_tensor log_sum) {
    const shape s = shape_of(c);
    tn_attention_forward_args args = TN_ATTENTION_FORWARD_ARGS_INIT;
    args.qkv = qkv, args.y = y, args.log_sum = log_sum;
    args.heads = s.heads, args.heads_kv = s.heads_kv;
    args.sequence = s.sequence, args.is_causal = is_causal(c), args.scale = scale_of(c);
    return args;
}

static void prepare_forward(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const shape s = shape_of(c);
    (void)input(side, c, operands, packed_cols(&s), 0);
    battery_output_add(operands, "y", gpu_plain(side, source_of(c), s.tokens, s.heads * s.head_dim),
                       TN_PLANE_DATA);
    if (c->way % 7 == 3) return;
    battery_output_add(operands, "log_sum", gpu_plain(side, TN_FP32, s.heads, s.tokens),
                       TN_PLANE_DATA);
}

static tn_status launch_forward(gpu_side *side, const battery_case *c,
                                const battery_operands *operands) {
    const tn_tensor log_sum = operands->out_count > 1 ? operands->out[1].tensor : (tn_tensor){0};
    const tn_attention_forward_args args =
        forward_of(c, operands->in[0], operands->out[0].tensor, log_sum);
    return tn_attention_forward(&args, side->stream);
}

enum { BACK_QKV, BACK_DY, BACK_Y, BACK_LOG_SUM };

/* From what forward makes of the case's numbers. */
static void prepare_backward(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const shape s = shape_of(c);
    (void)input(side, c, operands, packed_cols(&s), 0);
    (void)input(side, c, operands, s.heads * s.head_dim, 1);
    battery_keep(operands, gpu_plain(side, source_of(c), s.tokens, s.heads * s.head_dim));
    battery_keep(operands, gpu_plain(side, TN_FP32, s.heads, s.tokens));
    const tn_attention_forward_args args =
        forward_of(c, operands->in[BACK_QKV], operands->in[BACK_Y], operands->in[BACK_LOG_SUM]);
    EXPECT_OK(tn_attention_forward(&args, side->stream));
    battery_output_add(operands, "dqkv", gpu_plain(side, source_of(c), s.tokens, packed_cols(&s)),
                       TN_PLANE_DATA);
}

static tn_status launch_backward(gpu_side *side, const battery_case *c,
                                 const battery_operands *operands) {
    const shape s = shape_of(c);
    tn_attention_backward_args args = TN_ATTENTION_BACKWARD_ARGS_INIT;
    args.dy = operands->in[BACK_DY], args.qkv = operands->in[BACK_QKV];
    args.y = operands->in[BACK_Y], args.log_sum = operands->in[BACK_LOG_SUM];
    args.dqkv = operands->out[0].tensor;
    args.heads = s.heads, args.heads_kv = s.heads_kv;
    args.sequence = s.sequence, args.is_causal = is_causal(c), args.scale = scale_of(c);
    args.scope = side->scope;
    return tn_attention_backward(&args, side->stream);
}

static const battery_op ops[] = {
    {"attention", ATTENTION_WAYS, prepare_forward, launch_forward},
    {"attention backward", ATTENTION_WAYS, prepare_backward, launch_backward},
};

const battery_table battery_attention = {ops, sizeof ops / sizeof *ops, 0};
