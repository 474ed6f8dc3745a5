/* A training step of the trainer, and a pass over held-out text: see trainer_step.h. */
#include "trainer_step.h"

#include <stdlib.h>

#include "tenure_lifetime.h"
#include "tenure_train.h"
#include "trainer_block.h"

enum { LOGITS = 256 };

/* ---- scopes --------------------------------------------------------------------------------- */

tn_status trainer_scopes_open(trainer_scopes *scopes, tn_pool *pool) {
    const tn_scope none = {0};
    *scopes = (trainer_scopes){{0}, {0}, {0}};
    tn_status status = trainer_open_scope(none, pool, TN_SCOPE_STEP, "step", &scopes->root);
    if (status == TN_OK) {
        status = trainer_open_scope(scopes->root, NULL, TN_SCOPE_SAVED, "saved for backward",
                                    &scopes->saved);
    }
    if (status == TN_OK) {
        status =
            trainer_open_scope(scopes->root, NULL, TN_SCOPE_STEP, "activations", &scopes->scratch);
    }
    if (status != TN_OK) (void)trainer_scopes_close(scopes);
    return status;
}

tn_status trainer_scopes_close(trainer_scopes *scopes) {
    tn_status status = tn_scope_close(scopes->root);
    *scopes = (trainer_scopes){{0}, {0}, {0}};
    return status;
}

/* ---- a pass --------------------------------------------------------------------------------- */

tn_status trainer_pass_make(const trainer_pass *pass, tn_scope scope, int64_t cols,
                            const char *name, tn_tensor *out) {
    const trainer_shape *shape = &pass->model->shape;
    return trainer_make(scope, trainer_model_dtype(shape), trainer_model_tokens(shape), cols, name,
                        out);
}

tn_status trainer_pass_drop(const trainer_pass *pass, tn_tensor *tensor) {
    TRAINER_TRY(tn_tensor_destroy(*tensor, pass->model->stream));
    *tensor = (tn_tensor){0};
    return TN_OK;
}

tn_status trainer_pass_note(const trainer_pass *pass, const char *name, int layer) {
    char words[48];
    if (!pass->trail) return TN_OK;
    if (layer < 0) snprintf(words, sizeof words, "%s", name);
    if (layer >= 0) snprintf(words, sizeof words, "%s %d", name, layer);
    return trainer_trail_note(pass->trail, pass->model, pass->saved, pass->scratch, words);
}

static tn_status embed(trainer_pass *pass, int table, tn_tensor tokens, tn_tensor *out) {
    tn_embed_args args = TN_EMBED_ARGS_INIT;
    TRAINER_TRY(trainer_pass_make(pass, pass->scratch, pass->model->shape.hidden, "embedded", out));
    args.tokens = tokens;
    args.table = pass->model->parameters[table].value;
    args.y = *out;
    return tn_embed(&args, pass->model->stream);
}

static tn_status embed_backward(const trainer_pass *pass, int table, tn_tensor tokens) {
    tn_embed_backward_args args = TN_EMBED_BACKWARD_ARGS_INIT;
    args.tokens = tokens;
    args.dy = pass->gradient;
    args.dtable = pass->model->parameters[table].gradient;
    args.accumulate = pass->accumulates;
    return tn_embed_backward(&args, pass->model->stream);
}

/* The last norm and the head; the logits are gone when their gradient is there. */
typedef struct head {
    tn_tensor sum, dlogits;
    tn_norm_linear_saved saved;
} head;

static tn_status head_forward(trainer_pass *pass, const trainer_batch *batch, head *out) {
    const trainer_model *model = pass->model;
    tn_cross_entropy_args args = TN_CROSS_ENTROPY_ARGS_INIT;
    tn_tensor logits = {0};
    TRAINER_TRY(trainer_make(pass->scratch, TN_FP32, trainer_model_tokens(&model->shape), LOGITS,
                             "logits", &logits));
    TRAINER_TRY(trainer_product_forward(pass, &model->parameters[TRAINER_LAST_GAIN],
                                        &model->parameters[TRAINER_HEAD], logits, &out->sum,
                                        &out->saved));
    TRAINER_TRY(trainer_pass_note(pass, "forward head", -1));
    TRAINER_TRY(trainer_pass_make(pass, pass->scratch, LOGITS, "dlogits", &out->dlogits));
    args.logits = logits;
    args.targets = batch->targets;
    args.loss = batch->loss;
    args.dlogits = out->dlogits;
    TRAINER_TRY(tn_cross_entropy(&args, model->stream));
    TRAINER_TRY(trainer_pass_drop(pass, &logits));
    return trainer_pass_note(pass, "loss", -1);
}

static tn_status head_backward(trainer_pass *pass, head *h) {
    const trainer_model *model = pass->model;
    TRAINER_TRY(trainer_product_backward(pass, &model->parameters[TRAINER_LAST_GAIN],
                                         &model->parameters[TRAINER_HEAD], h->dlogits, &h->sum,
                                         &h->saved));
    TRAINER_TRY(trainer_pass_drop(pass, &h->dlogits));
    return trainer_pass_note(pass, "backward head", -1);
}

static tn_status run_forward(trainer_pass *pass, const trainer_batch *batch, head *out) {
    TRAINER_TRY(embed(pass, TRAINER_TABLE, batch->tokens, &pass->x));
    TRAINER_TRY(embed(pass, TRAINER_PLACES, pass->model->places, &pass->residual));
    pass->is_first_sum = 1;
    TRAINER_TRY(trainer_pass_note(pass, "forward embedding", -1));
    for (int i = 0; i < pass->model->shape.layers; i++)
        TRAINER_TRY(trainer_block_forward(pass, i));
    return head_forward(pass, batch, out);
}

static tn_status run_backward(trainer_pass *pass, const trainer_batch *batch, head *h) {
    TRAINER_TRY(head_backward(pass, h));
    for (int i = pass->model->shape.layers; i-- > 0;)
        TRAINER_TRY(trainer_block_backward(pass, i));
    TRAINER_TRY(embed_backward(pass, TRAINER_TABLE, batch->tokens));
    TRAINER_TRY(embed_backward(pass, TRAINER_PLACES, pass->model->places));
    TRAINER_TRY(trainer_pass_drop(pass, &pass->gradient));
    return trainer_pass_note(pass, "backward embedding", -1);
}

/* ---- steps ---------------------------------------------------------------------------------- */

static tn_status run_step(trainer_pass *pass) {
    const trainer_model *model = pass->model;
    for (int i = 0; i < model->shape.micro_batches; i++) {
        head h = {.saved = TN_NORM_LINEAR_SAVED_INIT};
        pass->accumulates = i > 0;
        TRAINER_TRY(run_forward(pass, &model->batches[i], &h));
        TRAINER_TRY(run_backward(pass, &model->batches[i], &h));
    }
    TRAINER_TRY(trainer_model_update(model));
    return trainer_pass_note(pass, "update", -1);
}

/* Scopes of one step below those of all: to close them ends whatever a failure has left. */
static tn_status with_scopes(trainer_pass *pass, const trainer_scopes *scopes,
                             tn_status (*run)(trainer_pass *)) {
    tn_status closed_saved, closed_scratch;
    tn_status status =
        trainer_open_scope(scopes->saved, NULL, TN_SCOPE_SAVED, "step", &pass->saved);
    if (status == TN_OK) {
        status = trainer_open_scope(scopes->scratch, NULL, TN_SCOPE_STEP, "step", &pass->scratch);
    }
    if (status == TN_OK) status = run(pass);
    closed_saved = tn_scope_close(pass->saved);
    closed_scratch = tn_scope_close(pass->scratch);
    if (status != TN_OK) return status;
    return closed_saved != TN_OK ? closed_saved : closed_scratch;
}

static tn_status run_pass(trainer_pass *pass, const trainer_scopes *scopes,
                          tn_status (*run)(trainer_pass *)) {
    const size_t layers = (size_t)pass->model->shape.layers;
    tn_status status;
    pass->blocks = calloc(layers ? layers : 1, sizeof *pass->blocks);
    if (!pass->blocks) return TN_OUT_OF_HOST_MEMORY;
    status = with_scopes(pass, scopes, run);
    free(pass->blocks);
    return status;
}

tn_status trainer_step(const trainer_model *model, const trainer_scopes *scopes,
                       trainer_trail *trail) {
    trainer_pass pass = {.model = model, .trail = trail, .is_training = 1};
    trainer_trail_begin_step(trail);
    TRAINER_TRY(run_pass(&pass, scopes, run_step));
    trainer_trail_end_step(trail);
    return TN_OK;
}

static tn_status run_evaluation(trainer_pass *pass) {
    head h = {.saved = TN_NORM_LINEAR_SAVED_INIT};
    return run_forward(pass, &pass->model->batches[0], &h);
}

tn_status trainer_evaluate(const trainer_model *model, const trainer_scopes *scopes) {
    trainer_pass pass = {.model = model};
    return run_pass(&pass, scopes, run_evaluation);
}
