/* Building, updating and taking apart the trainer's model: see trainer_model.h.
 *
 * Invariant: every tensor handle that is not {0} lives in one of the model's scopes, so closing
 * the root scope ends all of them.
 */
#include "trainer_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "random_fill.h"
#include "tenure_lifetime.h"
#include "tenure_train.h"

enum { LOGITS = 256, STEP_FLOATS = 3, AMAX_STEPS = 16 };

const char *trainer_recipe_name(trainer_recipe recipe) {
    static const char *const names[] = {"fp8", "fp8-tensor", "fp8-delayed", "bf16", "fp32"};
    return recipe >= 0 && recipe < TRAINER_RECIPE_COUNT ? names[recipe] : "?";
}

int trainer_model_parameter_count(const trainer_shape *shape) {
    return TRAINER_OUTER_COUNT + shape->layers * TRAINER_PART_COUNT;
}

int64_t trainer_model_tokens(const trainer_shape *shape) { return shape->batch * shape->sequence; }

tn_dtype trainer_model_dtype(const trainer_shape *shape) {
    return shape->recipe == TRAINER_FP32 ? TN_FP32 : TN_BF16;
}

trainer_parameter *trainer_model_part(const trainer_model *model, int layer, trainer_part part) {
    return &model->parameters[TRAINER_OUTER_COUNT + layer * TRAINER_PART_COUNT + (int)part];
}

/* ---- scopes and tensors --------------------------------------------------------------------- */

tn_status trainer_make(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols, const char *name,
                       tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    config.rank = cols ? 2 : 1;
    config.shape[0] = rows;
    config.shape[1] = cols;
    config.name = name;
    return tn_tensor_create(scope, &config, out);
}

tn_status trainer_open_scope(tn_scope parent, tn_pool *pool, tn_scope_kind kind, const char *name,
                             tn_scope *out) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.pool = pool;
    config.parent = parent;
    config.kind = kind;
    config.name = name;
    return tn_scope_create(&config, out);
}

static tn_status make_scopes(trainer_model *model) {
    const tn_scope none = {0};
    const struct {
        const char *name;
        const tn_scope *parent;
        tn_scope *scope;
    } children[] = {{"columns", &model->root, &model->columns},
                    {"parameters", &model->columns, &model->values},
                    {"gradients", &model->root, &model->gradients},
                    {"optimizer state", &model->root, &model->optimizer},
                    {"batches", &model->root, &model->data}};
    TRAINER_TRY(trainer_open_scope(none, model->pool, TN_SCOPE_PROCESS, "trainer", &model->root));
    for (size_t i = 0; i < sizeof children / sizeof *children; i++) {
        TRAINER_TRY(trainer_open_scope(*children[i].parent, NULL, TN_SCOPE_MODEL, children[i].name,
                                       children[i].scope));
    }
    return TN_OK;
}

/* ---- parameters ----------------------------------------------------------------------------- */

/* What a parameter is, and what it is at first: gains are 1, all else is random. */
typedef struct parameter_plan {
    char name[40];
    int64_t rows, cols; /* cols 0: a vector of gains */
    float deviation;
    int is_weight; /* of a layer: quantized in the FP8 recipe */
    int decays;
} parameter_plan;

static parameter_plan plan_outer(const trainer_shape *shape, int index) {
    const int64_t hidden = shape->hidden;
    switch (index) {
    case TRAINER_TABLE: return (parameter_plan){"embedding", LOGITS, hidden, 0.5f, 0, 0};
    case TRAINER_PLACES: return (parameter_plan){"places", LOGITS, hidden, 0.1f, 0, 0};
    case TRAINER_LAST_GAIN: return (parameter_plan){"last gain", hidden, 0, 0.0f, 0, 0};
    default:
        return (parameter_plan){"head", LOGITS, hidden, random_deviation_of_gain(1.0f, hidden),
                                0,      1};
    }
}

/* What writes to the residual stream is the smaller the more layers do. */
static parameter_plan plan_part(const trainer_shape *shape, int layer, trainer_part part) {
    static const char *const names[] = {"gain 1", "qkv", "projection", "gain 2", "up", "down"};
    const int64_t hidden = shape->hidden, ffn = shape->ffn;
    const int64_t rows[] = {hidden, 3 * hidden, hidden, hidden, 2 * ffn, hidden};
    const int64_t cols[] = {0, hidden, hidden, 0, hidden, ffn};
    const int is_gain = cols[part] == 0;
    const int writes = part == TRAINER_PROJECTION || part == TRAINER_DOWN;
    const float gain = writes ? 1.0f / sqrtf(2.0f * (float)shape->layers) : 1.0f;
    parameter_plan plan = {"", rows[part], cols[part], 0.0f, !is_gain, !is_gain};
    if (!is_gain) plan.deviation = random_deviation_of_gain(gain, cols[part]);
    snprintf(plan.name, sizeof plan.name, "%s of layer %d", names[part], layer);
    return plan;
}

static parameter_plan plan_parameter(const trainer_shape *shape, int index) {
    const int inner = index - TRAINER_OUTER_COUNT;
    if (inner < 0) return plan_outer(shape, index);
    return plan_part(shape, inner / TRAINER_PART_COUNT, (trainer_part)(inner % TRAINER_PART_COUNT));
}

static size_t plan_elements(const parameter_plan *plan) {
    return (size_t)plan->rows * (size_t)(plan->cols ? plan->cols : 1);
}

/* The master copy; the host's values live until the stream has taken them. */
static tn_status fill_master(const trainer_model *model, const parameter_plan *plan, uint64_t seed,
                             tn_tensor master) {
    const size_t count = plan_elements(plan);
    float *values = malloc(count * sizeof *values);
    if (!values) return TN_OUT_OF_HOST_MEMORY;
    random_fill_fp32(values, count, plan->deviation, seed);
    for (size_t i = 0; i < count && !plan->cols; i++)
        values[i] = 1.0f;
    tn_status status = tn_plane_write(master, TN_PLANE_DATA, values, count * sizeof *values, NULL,
                                      0, model->stream);
    tn_status synchronized = tn_stream_synchronize(model->device, model->stream);
    free(values);
    return status != TN_OK ? status : synchronized;
}

static int is_fp8(const trainer_model *model) { return model->shape.recipe < TRAINER_BF16; }

/* The value of the master copy. The first one's factor is of its own amax, as there is no other. */
static tn_status quantize(const trainer_model *model, const trainer_parameter *parameter,
                          int is_first) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = parameter->master;
    args.dst = parameter->value;
    args.amax_history = model->amax_history;
    if (!is_first) args.scale = model->scale;
    if (model->amax_history.value) args.slot = parameter->slot + TRAINER_SLOT_WEIGHT;
    return tn_quantize(&args, model->stream);
}

/* A layer's weight in FP8: one that is quantized when its master copy changes, and transposed
 * where dgrad reads it. */
static tn_status make_quantized(const trainer_model *model, const parameter_plan *plan,
                                trainer_parameter *parameter) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format =
        model->shape.recipe == TRAINER_FP8 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_TENSOR;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = plan->rows;
    config.shape[1] = plan->cols;
    config.policy = TN_POLICY_SCRATCH;
    config.name = plan->name;
    TRAINER_TRY(tn_tensor_create(model->values, &config, &parameter->value));
    return quantize(model, parameter, 1);
}

static tn_status make_value(const trainer_model *model, const parameter_plan *plan,
                            trainer_parameter *parameter) {
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    if (is_fp8(model) && plan->is_weight) return make_quantized(model, plan, parameter);
    TRAINER_TRY(trainer_make(model->values, trainer_model_dtype(&model->shape), plan->rows,
                             plan->cols, plan->name, &parameter->value));
    convert.x = parameter->master;
    convert.y = parameter->value;
    return tn_convert(&convert, model->stream);
}

static tn_status make_zeros(const trainer_model *model, tn_scope scope, const parameter_plan *plan,
                            const char *name, tn_tensor *out) {
    TRAINER_TRY(trainer_make(scope, TN_FP32, plan->rows, plan->cols, name, out));
    return tn_plane_fill(*out, TN_PLANE_DATA, 0, model->stream);
}

static tn_status make_parameter(const trainer_model *model, int index) {
    const parameter_plan plan = plan_parameter(&model->shape, index);
    const int is_master = model->shape.recipe == TRAINER_FP32 || !plan.cols;
    trainer_parameter *parameter = &model->parameters[index];
    const uint64_t seed = model->shape.seed * 100003u + (uint64_t)index;
    parameter->decays = plan.decays;
    parameter->slot = TRAINER_SLOTS * index;
    TRAINER_TRY(trainer_make(is_master ? model->values : model->optimizer, TN_FP32, plan.rows,
                             plan.cols, plan.name, &parameter->master));
    TRAINER_TRY(fill_master(model, &plan, seed, parameter->master));
    if (is_master) parameter->value = parameter->master;
    if (!is_master) TRAINER_TRY(make_value(model, &plan, parameter));
    TRAINER_TRY(make_zeros(model, model->gradients, &plan, plan.name, &parameter->gradient));
    TRAINER_TRY(make_zeros(model, model->optimizer, &plan, "first moment", &parameter->first));
    return make_zeros(model, model->optimizer, &plan, "second moment", &parameter->second);
}

/* ---- what else the step reads ---------------------------------------------------------------- */

static tn_status make_batch(const trainer_model *model, trainer_batch *batch) {
    const int64_t tokens = trainer_model_tokens(&model->shape);
    TRAINER_TRY(trainer_make(model->data, TN_BYTE, tokens, 0, "tokens", &batch->tokens));
    TRAINER_TRY(trainer_make(model->data, TN_BYTE, tokens, 0, "targets", &batch->targets));
    TRAINER_TRY(trainer_make(model->data, TN_FP32, tokens, 0, "loss", &batch->loss));
    return tn_plane_make(batch->loss, TN_PLANE_DATA, model->stream);
}

static tn_status make_places(trainer_model *model) {
    const int64_t tokens = trainer_model_tokens(&model->shape);
    unsigned char *places = malloc((size_t)tokens);
    if (!places) return TN_OUT_OF_HOST_MEMORY;
    for (int64_t i = 0; i < tokens; i++)
        places[i] = (unsigned char)(i % model->shape.sequence);
    tn_status status = trainer_make(model->data, TN_BYTE, tokens, 0, "places", &model->places);
    if (status == TN_OK) {
        status = tn_plane_write(model->places, TN_PLANE_DATA, places, (size_t)tokens, NULL, 0,
                                model->stream);
    }
    tn_status synchronized = tn_stream_synchronize(model->device, model->stream);
    free(places);
    return status != TN_OK ? status : synchronized;
}

/* Of the optimizer, 0. */
static tn_status make_floats(const trainer_model *model, int64_t count, const char *name,
                             tn_tensor *out) {
    TRAINER_TRY(trainer_make(model->optimizer, TN_FP32, count, 0, name, out));
    return tn_plane_fill(*out, TN_PLANE_DATA, 0, model->stream);
}

/* Factors of 1 at first: what they are too small for is 0 in the first step. */
static tn_status make_scales(trainer_model *model) {
    const size_t slots =
        (size_t)trainer_model_parameter_count(&model->shape) * (size_t)TRAINER_SLOTS;
    if (model->shape.recipe != TRAINER_FP8_DELAYED) return TN_OK;
    TRAINER_TRY(trainer_make(model->optimizer, TN_FP32, AMAX_STEPS, (int64_t)slots, "amaxes",
                             &model->amax_history));
    TRAINER_TRY(tn_plane_fill(model->amax_history, TN_PLANE_DATA, 0, model->stream));
    TRAINER_TRY(
        trainer_make(model->optimizer, TN_FP32, (int64_t)slots, 0, "scales", &model->scale));
    float *ones = malloc(slots * sizeof *ones);
    if (!ones) return TN_OUT_OF_HOST_MEMORY;
    for (size_t i = 0; i < slots; i++)
        ones[i] = 1.0f;
    tn_status status = tn_plane_write(model->scale, TN_PLANE_DATA, ones, slots * sizeof *ones, NULL,
                                      0, model->stream);
    tn_status synchronized = tn_stream_synchronize(model->device, model->stream);
    free(ones);
    return status != TN_OK ? status : synchronized;
}

static tn_status make_data(trainer_model *model) {
    for (int i = 0; i < model->shape.micro_batches; i++)
        TRAINER_TRY(make_batch(model, &model->batches[i]));
    TRAINER_TRY(make_places(model));
    TRAINER_TRY(make_floats(model, STEP_FLOATS, "steps", &model->steps));
    TRAINER_TRY(make_floats(model, 1, "rate", &model->rate));
    TRAINER_TRY(make_floats(model, TN_SQUARE_SUMS, "square sums", &model->square_sums));
    TRAINER_TRY(make_floats(model, 1, "norm of gradients", &model->norm));
    TRAINER_TRY(make_floats(model, 1, "gradient scale", &model->gradient_scale));
    return tn_stream_synchronize(model->device, model->stream);
}

static tn_status make_all(trainer_model *model) {
    TRAINER_TRY(make_scopes(model));
    TRAINER_TRY(make_scales(model));
    for (int i = 0; i < trainer_model_parameter_count(&model->shape); i++)
        TRAINER_TRY(make_parameter(model, i));
    TRAINER_TRY(make_data(model));
    return tn_scope_scratch_reserve(model->columns, model->stream);
}

tn_status trainer_model_create(trainer_model *model, tn_device *device, tn_pool *pool,
                               tn_stream stream, const trainer_shape *shape) {
    const size_t parameters = (size_t)trainer_model_parameter_count(shape);
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    *model = (trainer_model){.shape = *shape, .device = device, .pool = pool, .stream = stream};
    model->parameters = calloc(parameters, sizeof *model->parameters);
    model->batches = calloc((size_t)shape->micro_batches, sizeof *model->batches);
    if (model->parameters && model->batches) status = make_all(model);
    if (status != TN_OK) (void)trainer_model_destroy(model);
    return status;
}

tn_status trainer_model_destroy(trainer_model *model) {
    tn_status status = tn_scope_close(model->root);
    free(model->parameters);
    free(model->batches);
    *model = (trainer_model){0};
    return status;
}

/* ---- update --------------------------------------------------------------------------------- */

static const float beta1 = 0.9f, beta2 = 0.95f, weight_decay = 0.1f;

static tn_status update(const trainer_model *model, const trainer_parameter *parameter) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_adamw_args args = TN_ADAMW_ARGS_INIT;
    TRAINER_TRY(tn_tensor_info_get(parameter->value, &info));
    args.master = parameter->master;
    args.gradient = parameter->gradient;
    args.first = parameter->first;
    args.second = parameter->second;
    args.step = model->steps;
    args.learning_rate = model->shape.learning_rate;
    args.beta1 = beta1, args.beta2 = beta2;
    args.weight_decay = parameter->decays ? weight_decay : 0.0f;
    args.rate = model->rate;
    args.gradient_scale = model->gradient_scale;
    if (info.format == TN_FORMAT_FP8_BLOCK_2D) {
        args.weight = parameter->value;
    } else if (info.format == TN_FORMAT_PLAIN &&
               parameter->value.value != parameter->master.value) {
        args.plain = parameter->value;
    }
    TRAINER_TRY(tn_adamw(&args, model->stream));
    return info.format == TN_FORMAT_FP8_TENSOR ? quantize(model, parameter, 0) : TN_OK;
}

/* The factors of the next step, of the amaxes of the last ones. */
static tn_status update_scales(const trainer_model *model) {
    tn_scale_update_args args = TN_SCALE_UPDATE_ARGS_INIT;
    if (!model->scale.value) return TN_OK;
    args.amax_history = model->amax_history;
    args.scale = model->scale;
    return tn_scale_update(&args, model->stream);
}

/* gradient_scale becomes what all gradients are multiplied with: a step's is the mean of its
 * micro-batches', whose norm is at most shape.clip then. */
static tn_status clip(const trainer_model *model) {
    tn_square_sums_args sums = TN_SQUARE_SUMS_ARGS_INIT;
    tn_clip_factor_args factor = TN_CLIP_FACTOR_ARGS_INIT;
    sums.sums = model->square_sums;
    for (int i = 0; i < trainer_model_parameter_count(&model->shape); i++) {
        sums.x = model->parameters[i].gradient;
        sums.accumulate = i > 0;
        TRAINER_TRY(tn_square_sums(&sums, model->stream));
    }
    factor.sums = model->square_sums;
    factor.scale = 1.0f / (float)model->shape.micro_batches;
    factor.max_norm = model->shape.clip;
    factor.norm = model->norm;
    factor.factor = model->gradient_scale;
    return tn_clip_factor(&factor, model->stream);
}

tn_status trainer_model_update(const trainer_model *model) {
    tn_adamw_advance_args advance = TN_ADAMW_ADVANCE_ARGS_INIT;
    advance.step = model->steps;
    advance.beta1 = beta1, advance.beta2 = beta2;
    TRAINER_TRY(clip(model));
    TRAINER_TRY(tn_adamw_advance(&advance, model->stream));
    TRAINER_TRY(update_scales(model));
    for (int i = 0; i < trainer_model_parameter_count(&model->shape); i++)
        TRAINER_TRY(update(model, &model->parameters[i]));
    return TN_OK;
}
