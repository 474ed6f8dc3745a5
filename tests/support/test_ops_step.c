/* A training step that may fail anywhere: see test_ops_step.h. */
#include "test_ops_step.h"

#include "tenure_layers.h"

#include <stdio.h>

#define TRY(stack, call)                                                                           \
    do {                                                                                           \
        tn_status try_status = first_failure((stack), (call));                                     \
        if (try_status != TN_OK) return try_status;                                                \
    } while (0)

static tn_status first_failure(test_stack *stack, tn_status status) {
    if (status != TN_OK && stack->failure[0] == 0) {
        snprintf(stack->failure, sizeof stack->failure, "%s", tn_error_last());
    }
    return status;
}

static tn_status new_scope(tn_scope parent, tn_scope_kind kind, const char *name, tn_scope *out) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.parent = parent;
    config.kind = kind;
    config.name = name;
    return tn_scope_create(&config, out);
}

static tn_status new_tensor(tn_scope scope, tn_format format, int64_t rows, int64_t cols,
                            tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = format;
    config.dtype = format == TN_FORMAT_PLAIN ? TN_BF16 : TN_E4M3;
    config.rank = 2;
    config.shape[0] = rows, config.shape[1] = cols;
    return tn_tensor_create(scope, &config, out);
}

/* As a loader or another library would: the contents do not matter here. */
static tn_status write_plane(tn_tensor tensor, tn_plane plane, tn_stream stream) {
    tn_lease lease;
    tn_plane_view view;
    tn_status status = tn_lease_begin(tensor, plane, TN_WRITE, stream, &lease, &view);
    if (status != TN_OK) return status;
    status = tn_lease_end(lease);
    if (status != TN_OK && tn_lease_abandon(lease) != TN_OK) return TN_LEAK;
    return status;
}

/* ---- loading ------------------------------------------------------------------------------- */

static tn_status load_weight(test_stack *stack, int layer, tn_scope scope, tn_scope loading,
                             tn_stream stream) {
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    tn_tensor weight;
    TRY(stack, new_tensor(scope, TN_FORMAT_FP8_BLOCK_2D, stack->width, stack->width, &weight));
    stack->weights[layer] = weight;
    TRY(stack, tn_tensor_set_frozen(weight, !stack->trainable));
    TRY(stack, tn_tensor_set_policy(weight, stack->policy));
    TRY(stack, new_tensor(loading, TN_FORMAT_PLAIN, stack->width, stack->width, &quantize.src));
    TRY(stack, write_plane(quantize.src, TN_PLANE_DATA, stream));
    quantize.dst = weight;
    TRY(stack, tn_quantize(&quantize, stream));
    TRY(stack, tn_tensor_destroy(quantize.src, stream));
    return TN_OK;
}

tn_status test_stack_load(test_stack *stack, tn_scope scope, tn_stream stream) {
    tn_scope loading;
    tn_status status = first_failure(stack, new_scope(scope, TN_SCOPE_OP, "loading", &loading));
    if (status != TN_OK) return status;
    for (int layer = 0; status == TN_OK && layer < stack->layers; layer++) {
        status = load_weight(stack, layer, scope, loading, stream);
    }
    tn_status closed = first_failure(stack, tn_scope_close(loading));
    return status == TN_OK ? closed : status;
}

/* ---- a step -------------------------------------------------------------------------------- */

typedef struct step {
    tn_scope scope, op;
    tn_tensor inputs[TEST_LAYERS_MAX + 1]; /* of each layer; the last is the stack's output */
    tn_linear_saved saved[TEST_LAYERS_MAX];
} step;

static tn_status forward_pass(test_stack *stack, step *s, tn_stream stream) {
    TRY(stack, new_tensor(s->scope, TN_FORMAT_PLAIN, stack->tokens, stack->width, &s->inputs[0]));
    TRY(stack, write_plane(s->inputs[0], TN_PLANE_DATA, stream));
    for (int layer = 0; layer < stack->layers; layer++) {
        tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
        TRY(stack, new_tensor(s->scope, TN_FORMAT_PLAIN, stack->tokens, stack->width, &args.y));
        args.x = s->inputs[layer];
        args.w.weight = stack->weights[layer];
        args.common.scope = s->op;
        args.common.saved_scope = s->scope;
        TRY(stack, tn_linear_forward(&args, &s->saved[layer], stream));
        s->inputs[layer + 1] = args.y;
    }
    return TN_OK;
}

static tn_status backward_pass(test_stack *stack, step *s, tn_stream stream) {
    tn_tensor dy = s->inputs[stack->layers]; /* the loss's gradient, where the output was */
    TRY(stack, write_plane(dy, TN_PLANE_DATA, stream));
    for (int layer = stack->layers - 1; layer >= 0; layer--) {
        tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
        TRY(stack, new_tensor(s->scope, TN_FORMAT_PLAIN, stack->tokens, stack->width, &args.dx));
        if (stack->trainable) {
            TRY(stack, new_tensor(s->scope, TN_FORMAT_PLAIN, stack->width, stack->width,
                                  &args.gradient.dweight));
        }
        args.dy = dy;
        args.w.weight = stack->weights[layer];
        args.common.scope = s->op;
        TRY(stack, tn_linear_backward(&args, &s->saved[layer], NULL, stream));
        TRY(stack, tn_tensor_destroy(dy, stream));
        dy = args.dx;
    }
    return TN_OK;
}

tn_status test_stack_step(test_stack *stack, tn_scope parent, tn_stream forward,
                          tn_stream backward) {
    step s = {.scope = {0}};
    TRY(stack, new_scope(parent, TN_SCOPE_STEP, "step", &s.scope));
    tn_status status = first_failure(stack, new_scope(s.scope, TN_SCOPE_OP, "op", &s.op));
    if (status == TN_OK) status = forward_pass(stack, &s, forward);
    if (status == TN_OK) status = backward_pass(stack, &s, backward);
    tn_status closed = first_failure(stack, tn_scope_close(s.scope));
    return status == TN_OK ? closed : status;
}
