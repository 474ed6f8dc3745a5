/* One training step of the demo's model: see demo_model.h for the formulas.
 *
 * What forward saves lives in a step's child scope of `saved`, all else in one of `scratch`;
 * backward frees each activation after its last use, and closing the two scopes ends whatever a
 * failure left, so a step that fails leaves the model as it was but for the gradients.
 */
#include "demo_model.h"

#include <stdlib.h>

typedef struct demo_step {
    demo_model *model;
    tn_scope saved, scratch;
    tn_tensor *inputs;  /* [layers + 1]: what each adapter read: x, h[0], h[1], ... */
    tn_tensor *lowered; /* [layers + 1]: A[i] times that, [tokens, rank] */
    tn_tensor tokens, targets, loss;
    tn_tensor activation; /* h[i] while it runs forward, its gradient while it runs back */
} demo_step;

static tn_status make(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols, const char *name,
                      tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    config.rank = cols ? 2 : 1;
    config.shape[0] = rows;
    config.shape[1] = cols;
    config.name = name;
    return tn_tensor_create(scope, &config, out);
}

static tn_status multiply(const demo_step *step, tn_gemm_form form, tn_tensor a, tn_tensor b,
                          tn_tensor d, int accumulate) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = form;
    args.a = a;
    args.b = b;
    args.d = d;
    args.accumulate = accumulate;
    args.scope = step->scratch;
    return tn_gemm(&args, step->model->stream);
}

static tn_status add(const demo_step *step, tn_tensor x, tn_tensor y, float alpha) {
    tn_axpy_args args = TN_AXPY_ARGS_INIT;
    args.x = x;
    args.y = y;
    args.alpha = alpha;
    return tn_axpy(&args, step->model->stream);
}

/* ---- forward -------------------------------------------------------------------------------- */

/* output += B (A input); keeps the input and A input for backward. */
static tn_status adapter_forward(demo_step *step, int index, tn_tensor input, tn_tensor output) {
    const demo_shape *shape = &step->model->shape;
    const demo_adapter *adapter = &step->model->adapters[index];
    DEMO_TRY(
        make(step->saved, TN_BF16, shape->tokens, shape->rank, "lowered", &step->lowered[index]));
    DEMO_TRY(multiply(step, TN_GEMM_FPROP, input, adapter->a, step->lowered[index], 0));
    DEMO_TRY(multiply(step, TN_GEMM_FPROP, step->lowered[index], adapter->b, output, 1));
    step->inputs[index] = input;
    return tn_tensor_move(input, step->saved);
}

static tn_status embed(demo_step *step) {
    const demo_shape *shape = &step->model->shape;
    tn_tensor x = {0}, h = {0};
    DEMO_TRY(make(step->scratch, TN_BF16, shape->tokens, shape->hidden, "embedded", &x));
    DEMO_TRY(make(step->scratch, TN_BF16, shape->tokens, shape->hidden, "activation 0", &h));
    tn_embed_args args = TN_EMBED_ARGS_INIT;
    args.tokens = step->tokens;
    args.table = step->model->table;
    args.y = x;
    DEMO_TRY(tn_embed(&args, step->model->stream));
    tn_convert_args copy = TN_CONVERT_ARGS_INIT;
    copy.x = x;
    copy.y = h;
    DEMO_TRY(tn_convert(&copy, step->model->stream));
    step->activation = h;
    return adapter_forward(step, 0, x, h);
}

static tn_status layer_forward(demo_step *step, int layer) {
    const demo_shape *shape = &step->model->shape;
    tn_tensor input = step->activation, output = {0};
    DEMO_TRY(make(step->scratch, TN_BF16, shape->tokens, shape->hidden, "activation", &output));
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = input;
    args.w.weight = step->model->weights[layer];
    args.y = output;
    args.common.scope = step->scratch;
    if (layer == shape->layers - 1) args.common.next_weight = step->model->weights[layer];
    args.common.side = step->model->side;
    DEMO_TRY(tn_linear_forward(&args, NULL, step->model->stream));
    DEMO_TRY(add(step, input, output, 1.0f));
    step->activation = output;
    return adapter_forward(step, layer + 1, input, output);
}

/* Loss of every token, and the gradient of the last activation. */
static tn_status head_forward_backward(demo_step *step) {
    const demo_shape *shape = &step->model->shape;
    tn_stream stream = step->model->stream;
    tn_tensor logits = {0}, dlogits = {0}, gradient = {0};
    DEMO_TRY(make(step->scratch, TN_FP32, shape->tokens, 256, "logits", &logits));
    DEMO_TRY(multiply(step, TN_GEMM_FPROP, step->activation, step->model->head, logits, 0));
    DEMO_TRY(tn_tensor_destroy(step->activation, stream));
    DEMO_TRY(make(step->scratch, TN_BF16, shape->tokens, 256, "dlogits", &dlogits));
    DEMO_TRY(make(step->scratch, TN_FP32, shape->tokens, 0, "loss", &step->loss));
    tn_cross_entropy_args args = TN_CROSS_ENTROPY_ARGS_INIT;
    args.logits = logits;
    args.targets = step->targets;
    args.loss = step->loss;
    args.dlogits = dlogits;
    DEMO_TRY(tn_cross_entropy(&args, stream));
    DEMO_TRY(tn_tensor_destroy(logits, stream));
    DEMO_TRY(make(step->scratch, TN_BF16, shape->tokens, shape->hidden, "gradient", &gradient));
    DEMO_TRY(multiply(step, TN_GEMM_DGRAD, dlogits, step->model->head, gradient, 0));
    step->activation = gradient;
    return tn_tensor_destroy(dlogits, stream);
}

/* ---- backward ------------------------------------------------------------------------------- */

/* Gradients of A and B from dy, and dx += A^T B^T dy if dx is not {0}. Frees what was saved. */
static tn_status adapter_backward(demo_step *step, int index, tn_tensor dy, tn_tensor dx) {
    const demo_shape *shape = &step->model->shape;
    const demo_adapter *adapter = &step->model->adapters[index];
    tn_stream stream = step->model->stream;
    tn_tensor dlowered = {0};
    DEMO_TRY(make(step->scratch, TN_BF16, shape->tokens, shape->rank, "dlowered", &dlowered));
    DEMO_TRY(multiply(step, TN_GEMM_DGRAD, dy, adapter->b, dlowered, 0));
    DEMO_TRY(multiply(step, TN_GEMM_WGRAD, dy, step->lowered[index], adapter->grad_b, 0));
    DEMO_TRY(multiply(step, TN_GEMM_WGRAD, dlowered, step->inputs[index], adapter->grad_a, 0));
    if (dx.value) DEMO_TRY(multiply(step, TN_GEMM_DGRAD, dlowered, adapter->a, dx, 1));
    DEMO_TRY(tn_tensor_destroy(dlowered, stream));
    DEMO_TRY(tn_tensor_destroy(step->lowered[index], stream));
    return tn_tensor_destroy(step->inputs[index], stream);
}

static tn_status layer_backward(demo_step *step, int layer) {
    const demo_shape *shape = &step->model->shape;
    tn_tensor dy = step->activation, dx = {0};
    DEMO_TRY(make(step->scratch, TN_BF16, shape->tokens, shape->hidden, "gradient", &dx));
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = dy;
    args.w.weight = step->model->weights[layer];
    args.dx = dx;
    args.common.scope = step->scratch;
    if (layer > 0) args.common.next_weight = step->model->weights[layer - 1];
    args.common.side = step->model->side;
    DEMO_TRY(tn_linear_backward(&args, NULL, NULL, step->model->stream));
    DEMO_TRY(add(step, dy, dx, 1.0f));
    DEMO_TRY(adapter_backward(step, layer + 1, dy, dx));
    step->activation = dx;
    return tn_tensor_destroy(dy, step->model->stream);
}

/* ---- update --------------------------------------------------------------------------------- */

static tn_status update(const demo_step *step, tn_tensor grad, tn_tensor master, tn_tensor copy,
                        float learning_rate) {
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    convert.x = master;
    convert.y = copy;
    DEMO_TRY(add(step, grad, master, -learning_rate));
    return tn_convert(&convert, step->model->stream);
}

static tn_status update_all(const demo_step *step, float learning_rate) {
    for (int i = 0; i <= step->model->shape.layers; i++) {
        const demo_adapter *adapter = &step->model->adapters[i];
        DEMO_TRY(update(step, adapter->grad_a, adapter->master_a, adapter->a, learning_rate));
        DEMO_TRY(update(step, adapter->grad_b, adapter->master_b, adapter->b, learning_rate));
    }
    return TN_OK;
}

/* ---- the step ------------------------------------------------------------------------------- */

static tn_status upload(demo_step *step, const unsigned char *bytes, const char *name,
                        tn_tensor *out) {
    const int64_t tokens = step->model->shape.tokens;
    DEMO_TRY(make(step->scratch, TN_BYTE, tokens, 0, name, out));
    return tn_plane_write(*out, TN_PLANE_DATA, bytes, (size_t)tokens, NULL, 0, step->model->stream);
}

static tn_status run_step(demo_step *step, const unsigned char *tokens,
                          const unsigned char *targets, float learning_rate, float *loss_out) {
    demo_model *model = step->model;
    DEMO_TRY(upload(step, tokens, "tokens", &step->tokens));
    DEMO_TRY(upload(step, targets, "targets", &step->targets));
    DEMO_TRY(embed(step));
    for (int i = 0; i < model->shape.layers; i++)
        DEMO_TRY(layer_forward(step, i));
    DEMO_TRY(head_forward_backward(step));
    for (int i = model->shape.layers; i-- > 0;)
        DEMO_TRY(layer_backward(step, i));
    DEMO_TRY(adapter_backward(step, 0, step->activation, (tn_tensor){0}));
    DEMO_TRY(update_all(step, learning_rate));
    return tn_plane_read(step->loss, TN_PLANE_DATA, loss_out,
                         (size_t)model->shape.tokens * sizeof(float), NULL, 0, model->stream);
}

static tn_status open_scope(tn_scope parent, const char *name, tn_scope *out) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.parent = parent;
    config.kind = TN_SCOPE_STEP;
    config.name = name;
    return tn_scope_create(&config, out);
}

tn_status demo_model_step(demo_model *model, const unsigned char *tokens,
                          const unsigned char *targets, float learning_rate, float *loss_out) {
    const size_t adapters = (size_t)model->shape.layers + 1;
    demo_step step = {.model = model};
    tn_status closed_saved, closed_scratch, status = TN_OUT_OF_HOST_MEMORY;
    step.inputs = calloc(adapters, sizeof *step.inputs);
    step.lowered = calloc(adapters, sizeof *step.lowered);
    if (step.inputs && step.lowered) status = open_scope(model->saved, "step", &step.saved);
    if (status == TN_OK) status = open_scope(model->scratch, "step", &step.scratch);
    if (status == TN_OK) status = run_step(&step, tokens, targets, learning_rate, loss_out);
    closed_saved = tn_scope_close(step.saved);
    closed_scratch = tn_scope_close(step.scratch);
    free(step.inputs);
    free(step.lowered);
    if (status != TN_OK) return status;
    return closed_saved != TN_OK ? closed_saved : closed_scratch;
}
