/* A sharded model with its data, made and ended, and a step of it: see sharded_bench.h. */
#include <stdlib.h>

#include "random_fill.h"
#include "sharded_bench.h"

enum { INPUT_SEED = 1000, GRADIENT_SEED = 2000 };

/* ---- tensors --------------------------------------------------------------------------------- */

tn_status sharded_make(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols, const char *name,
                       tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    config.name = name;
    return tn_tensor_create(scope, &config, out);
}

tn_status sharded_drop(const sharded_job *job, tn_tensor *tensor) {
    SHARDED_TRY(tn_tensor_destroy(*tensor, job->place->stream));
    *tensor = (tn_tensor){0};
    return TN_OK;
}

static tn_status open_scope(tn_scope parent, tn_pool *pool, tn_scope_kind kind, const char *name,
                            tn_scope *out) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.parent = parent;
    config.pool = pool;
    config.kind = kind;
    config.name = name;
    return tn_scope_create(&config, out);
}

/* ---- contents -------------------------------------------------------------------------------- */

enum { NOISE = 1 << 20 }; /* elements: larger tensors have them again and again */

static tn_status write_noise(const sharded_place *place, tn_tensor noise, int64_t count,
                             float deviation, uint64_t seed) {
    const size_t bytes = (size_t)count * sizeof(uint16_t);
    uint16_t *values = malloc(bytes);
    if (!values) return TN_OUT_OF_HOST_MEMORY;
    random_fill_bf16(values, (size_t)count, deviation, seed);
    tn_status status = tn_plane_write(noise, TN_PLANE_DATA, values, bytes, NULL, 0, place->stream);
    if (status == TN_OK) status = tn_stream_synchronize(place->device, place->stream);
    free(values);
    return status;
}

static tn_status repeat(const sharded_place *place, tn_tensor noise, tn_tensor tensor) {
    const tn_stream stream = place->stream;
    tn_plane_view from, to;
    tn_lease leases[2];
    tn_status status = TN_OK;
    SHARDED_TRY(tn_lease_begin(noise, TN_PLANE_DATA, TN_READ, stream, &leases[0], &from));
    SHARDED_TRY(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, stream, &leases[1], &to));
    const size_t all = to.layout.data_bytes, most = from.layout.data_bytes;
    for (size_t at = 0; status == TN_OK && at < all; at += most)
        status = tn_copy(place->device, (char *)to.data + at, from.data,
                         all - at < most ? all - at : most, stream);
    SHARDED_TRY(status);
    SHARDED_TRY(tn_lease_end(leases[1]));
    return tn_lease_end(leases[0]);
}

tn_status sharded_make_random(const sharded_place *place, tn_scope scope, int64_t rows,
                              int64_t cols, float deviation, uint64_t seed, tn_tensor *out) {
    const int64_t count = rows * cols < NOISE ? rows * cols : NOISE;
    tn_tensor noise = {0};
    SHARDED_TRY(sharded_make(scope, TN_BF16, rows, cols, "values", out));
    if (place->sim.handle) return tn_plane_fill(*out, TN_PLANE_DATA, 0, place->stream);
    SHARDED_TRY(sharded_make(scope, TN_BF16, 1, count, "noise", &noise));
    SHARDED_TRY(write_noise(place, noise, count, deviation, seed));
    SHARDED_TRY(repeat(place, noise, *out));
    return tn_tensor_destroy(noise, place->stream);
}

static tn_status make_data(sharded_job *job, int first_rank) {
    const sharded_shape *shape = job->shape;
    for (int i = 0; i < job->micro_batches; i++) {
        const uint64_t rank = (uint64_t)first_rank + (uint64_t)i;
        SHARDED_TRY(sharded_make_random(job->place, job->data, shape->tokens, shape->hidden, 1.0f,
                                        INPUT_SEED + rank, &job->x[i]));
        SHARDED_TRY(sharded_make_random(job->place, job->data, shape->tokens, shape->hidden,
                                        0x1p-10f, GRADIENT_SEED + rank, &job->dy[i]));
    }
    return TN_OK;
}

/* ---- the model ------------------------------------------------------------------------------- */

int64_t sharded_part_rows(const sharded_shape *shape, sharded_part part) {
    switch (part) {
    case SHARDED_QKV: return 2 * shape->hidden;
    case SHARDED_UP: return 2 * shape->ffn;
    case SHARDED_PROJECTION:
    case SHARDED_DOWN: return shape->hidden;
    default: return 1;
    }
}

int64_t sharded_part_cols(const sharded_shape *shape, sharded_part part) {
    return part == SHARDED_DOWN ? shape->ffn : shape->hidden;
}

static const char *const part_names[SHARDED_PARTS] = {"gain 1", "qkv", "projection",
                                                      "gain 2", "up",  "down"};

static tn_status make_part(const sharded_job *job, tn_scope scope, int layer, sharded_part part,
                           tn_sharded_tensor *out) {
    const sharded_shape *shape = job->shape;
    const int is_gain = part == SHARDED_GAIN_1 || part == SHARDED_GAIN_2;
    *out = (tn_sharded_tensor){.name = part_names[part],
                               .format = TN_FORMAT_PLAIN,
                               .dtype = TN_BF16,
                               .rows = sharded_part_rows(shape, part),
                               .cols = sharded_part_cols(shape, part)};
    if (!is_gain && shape->is_fp8) out->format = TN_FORMAT_FP8_BLOCK_2D, out->dtype = TN_E4M3;
    const float deviation = is_gain ? 1.0f : random_deviation_of_gain(1.0f, out->cols);
    return sharded_make_random(job->place, scope, out->rows, out->cols, deviation,
                               (uint64_t)(layer * SHARDED_PARTS) + part, &out->initial);
}

/* Initial values are not kept. */
static tn_status add_layer(sharded_job *job, int layer) {
    const tn_scope none = {0};
    tn_sharded_unit_config config = TN_SHARDED_UNIT_CONFIG_INIT;
    tn_sharded_tensor tensors[SHARDED_PARTS];
    tn_scope scope = {0};
    tn_status status = open_scope(none, job->place->pool, TN_SCOPE_STEP, "initial", &scope);
    for (int i = 0; status == TN_OK && i < SHARDED_PARTS; i++)
        status = make_part(job, scope, layer, (sharded_part)i, &tensors[i]);
    config.tensors = tensors, config.tensor_count = SHARDED_PARTS;
    config.layout = job->shape->layout;
    if (status == TN_OK) status = tn_sharded_unit_add(job->model, &config, &job->units[layer]);
    const tn_status closed = tn_scope_close(scope);
    return status == TN_OK ? closed : status;
}

static tn_status make_model(sharded_job *job) {
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    config.scope = job->root;
    config.comm = job->comm;
    config.stream = job->place->stream;
    config.gradient_dtype = job->shape->gradient_dtype;
    config.micro_batches = job->micro_batches;
    config.shards_from_masters = job->shape->shards_from_masters;
    if (!job->shape->has_prefetch) config.ring_slots = 1;
    SHARDED_TRY(tn_sharded_create(&config, &job->model));
    for (int i = 0; i < job->shape->layers; i++)
        SHARDED_TRY(add_layer(job, i));
    return tn_sharded_seal(job->model);
}

tn_status sharded_job_open(sharded_job *job, const sharded_place *place, tn_comm *comm,
                           const sharded_shape *shape, int first_rank, int micro_batches) {
    const tn_scope none = {0};
    *job =
        (sharded_job){.place = place, .shape = shape, .comm = comm, .micro_batches = micro_batches};
    SHARDED_TRY(open_scope(none, place->pool, TN_SCOPE_MODEL, "job", &job->root));
    SHARDED_TRY(open_scope(job->root, NULL, TN_SCOPE_MODEL, "data", &job->data));
    SHARDED_TRY(open_scope(job->root, NULL, TN_SCOPE_SAVED, "saved", &job->saved));
    SHARDED_TRY(open_scope(job->root, NULL, TN_SCOPE_STEP, "scratch", &job->scratch));
    SHARDED_TRY(make_data(job, first_rank));
    return make_model(job);
}

tn_status sharded_job_close(sharded_job *job) {
    tn_status status = tn_sharded_destroy(job->model);
    const tn_status closed = tn_scope_close(job->root);
    job->model = NULL;
    job->root = (tn_scope){0};
    return status == TN_OK ? closed : status;
}

/* ---- a step ---------------------------------------------------------------------------------- */

static tn_status forward(sharded_pass *pass) {
    const sharded_job *job = pass->job;
    for (int i = 0; i < job->shape->layers; i++) {
        SHARDED_TRY(tn_sharded_forward_begin(job->model, job->units[i]));
        SHARDED_TRY(sharded_layer_forward(pass, i, i));
        SHARDED_TRY(tn_sharded_forward_end(job->model, job->units[i]));
    }
    return TN_OK;
}

static tn_status backward(sharded_pass *pass) {
    const sharded_job *job = pass->job;
    for (int i = job->shape->layers; i-- > 0;) {
        SHARDED_TRY(tn_sharded_backward_begin(job->model, job->units[i]));
        SHARDED_TRY(sharded_layer_backward(pass, i, i));
        SHARDED_TRY(tn_sharded_backward_end(job->model, job->units[i]));
    }
    return TN_OK;
}

static tn_sharded_update_args update_args(void) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    update.learning_rate = 1e-4f;
    return update;
}

tn_status sharded_step_passes(sharded_job *job, tn_tensor *values) {
    const tn_sharded_update_args update = update_args();
    if (job->shape->update_ahead) SHARDED_TRY(tn_sharded_update_ahead(job->model, &update));
    for (int i = 0; i < job->micro_batches; i++) {
        sharded_pass pass = {.job = job, .micro_batch = i, .x = job->x[i], .gradient = job->dy[i]};
        SHARDED_TRY(forward(&pass));
        if (values)
            values[i] = pass.x;
        else
            SHARDED_TRY(sharded_drop(job, &pass.x));
        SHARDED_TRY(backward(&pass));
    }
    return TN_OK;
}

tn_status sharded_step_update(sharded_job *job) {
    const tn_sharded_update_args update = update_args();
    return tn_sharded_update(job->model, job->shape->update_ahead ? NULL : &update);
}

tn_status sharded_step(sharded_job *job) {
    SHARDED_TRY(sharded_step_passes(job, NULL));
    return sharded_step_update(job);
}
