/* Sharded models: made, sealed, asked, and ended. */
#include "sharded.h"

#include "comm.h"
#include "error.h"
#include "host_alloc.h"
#include "ring_slots.h"
#include "tensor_internal.h"
#include "tenure_train.h"

/* ---- tensors --------------------------------------------------------------------------------- */

tn_status tn__sharded_plain(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols,
                            const char *name, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    config.policy = TN_POLICY_KEEP;
    config.name = name;
    return tn_tensor_create(scope, &config, out);
}

tn_status tn__sharded_view(tn_tensor base, int64_t first, int64_t count, tn_scope scope,
                           tn_stream stream, tn_tensor *out) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_tensor column = {0};
    TN_TRY(tn_tensor_info_get(base, &info));
    const int64_t shape[2] = {info.rows * info.cols, 1};
    TN_TRY(tn_tensor_view_shape(base, 2, shape, scope, &column));
    const tn_status status = tn_tensor_view_rows(column, first, count, scope, out);
    const tn_status ended = tn_tensor_destroy(column, stream);
    return status == TN_OK ? ended : status;
}

tn_status tn__sharded_zeros(const tn_sharded_model *model, tn_scope scope, tn_dtype dtype,
                            int64_t rows, int64_t cols, const char *name, tn_tensor *out) {
    tn_tensor made = {0};
    TN_TRY(tn__sharded_plain(scope, dtype, rows, cols, name, &made));
    const tn_status status = tn_plane_fill(made, TN_PLANE_DATA, 0, model->config.stream);
    if (status == TN_OK) *out = made;
    return status;
}

tn_status tn__sharded_find(const tn_sharded_model *model, const char *call, int unit,
                           tn__sharded_unit **out) {
    TN_REQUIRE(model, "%s: model is NULL", call);
    TN_REQUIRE(unit >= 0 && unit < model->unit_count,
               "%s: unit is %d, and model %s has %d of them, from 0 on", call, unit,
               model->config.name, model->unit_count);
    *out = model->units[unit];
    return TN_OK;
}

/* What is held, updated and counted calls decide, and launches do not. */
tn_status tn__sharded_check_streams(const tn_sharded_model *model, const char *call) {
    const tn_stream streams[] = {model->config.stream, model->config.comm_stream};
    const tn__driver *driver = tn__device_driver(model->device);
    for (int i = 0; i < 2; i++) {
        int is_capturing = 0;
        TN_TRY(driver->stream_is_capturing(tn__device_state(model->device), streams[i],
                                           &is_capturing));
        if (!is_capturing) continue;
        return TN_FAIL(TN_UNSUPPORTED,
                       "%s: model %s: a stream of it captures a graph, and what a sharded model "
                       "holds changes from call to call: call this outside of the capture",
                       call, model->config.name);
    }
    return TN_OK;
}

int tn__sharded_adds_parts(const tn_sharded_model *model) {
    return model->config.gradient_sum == TN_GRADIENT_SUM_SHARDED && model->config.micro_batches > 1;
}

int tn__sharded_passes_arrived(const tn_sharded_model *model, tn_gradient_sum sum) {
    const int adds = sum == TN_GRADIENT_SUM_SHARDED && model->config.micro_batches > 1;
    return adds || model->config.gradient_wire == TN_GRADIENT_WIRE_FP8;
}

/* ---- made ------------------------------------------------------------------------------------ */

static tn_status check_config(const tn_sharded_config *config) {
    TN_REQUIRE(config, "tn_sharded_create: config is NULL");
    TN_REQUIRE(config->size == sizeof *config,
               "tn_sharded_create: config->size is %zu, expected %zu: start from "
               "TN_SHARDED_CONFIG_INIT",
               config->size, sizeof *config);
    TN_REQUIRE(config->comm, "tn_sharded_create: comm is NULL");
    TN_REQUIRE(config->gradient_dtype == TN_FP32 || config->gradient_dtype == TN_BF16,
               "tn_sharded_create: gradient_dtype is %s, expected fp32 or bf16",
               tn_dtype_name(config->gradient_dtype));
    TN_REQUIRE(config->gradient_slots >= 0, "tn_sharded_create: gradient_slots is %d",
               config->gradient_slots);
    TN_REQUIRE(config->micro_batches >= 0, "tn_sharded_create: micro_batches is %d",
               config->micro_batches);
    TN_REQUIRE((unsigned)config->gradient_sum <= TN_GRADIENT_SUM_WHOLE,
               "tn_sharded_create: gradient_sum is %d, which is no tn_gradient_sum",
               (int)config->gradient_sum);
    TN_REQUIRE((unsigned)config->gradient_wire <= TN_GRADIENT_WIRE_FP8,
               "tn_sharded_create: gradient_wire is %d, which is no tn_gradient_wire",
               (int)config->gradient_wire);
    TN_REQUIRE((unsigned)config->ring_registration <= TN_RING_REGISTER_NONE,
               "tn_sharded_create: ring_registration is %d, which is no tn_ring_register",
               (int)config->ring_registration);
    return TN_OK;
}

static tn_status make_scope(tn_scope parent, const char *name, tn_scope *out) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.parent = parent;
    config.kind = TN_SCOPE_MODEL;
    config.name = name;
    return tn_scope_create(&config, out);
}

static tn_status make_numbers(tn_sharded_model *model, tn_tensor step) {
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    TN_TRY(tn__sharded_zeros(model, model->scope, TN_FP32, 1, 3, "step", &model->step));
    TN_TRY(tn__sharded_zeros(model, model->scope, TN_FP32, 1, TN_SQUARE_SUMS, "squares",
                             &model->squares));
    TN_TRY(tn__sharded_zeros(model, model->scope, TN_FP32, 1, 1, "norm", &model->norm));
    TN_TRY(tn__sharded_zeros(model, model->scope, TN_FP32, 1, 1, "factor", &model->factor));
    if (step.value == 0) return TN_OK;
    convert.x = step, convert.y = model->step;
    return tn_convert(&convert, model->config.stream);
}

static tn_status device_of(const tn_sharded_config *config, tn_sharded_model *model) {
    tn_device *device = NULL;
    TN_REQUIRE(config->scope.value, "tn_sharded_create: scope is {0}");
    TN_TRY(tn__scope_device(config->scope, &device));
    TN_REQUIRE(config->comm->device == device,
               "tn_sharded_create: the communicator %s and the scope are of different devices",
               tn_comm_name(config->comm));
    model->device = device;
    model->rank = tn_comm_rank(config->comm);
    model->rank_count = tn_comm_size(config->comm);
    if (config->comm_stream) return TN_OK;
    TN_TRY(tn_stream_create(model->device, &model->config.comm_stream));
    model->owns_stream = 1;
    return TN_OK;
}

static tn_status build(tn_sharded_model *model, const tn_sharded_config *config) {
    const char *name = config->name ? config->name : "sharded";
    const tn_scratch_config columns = TN_SCRATCH_CONFIG_INIT;
    model->config = *config;
    if (model->config.gradient_slots == 0) model->config.gradient_slots = 2;
    if (model->config.micro_batches == 0) model->config.micro_batches = 1;
    model->config.step = (tn_tensor){0};
    model->config.name = tn__host_strdup(name);
    if (!model->config.name) return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "a model's name");
    TN_TRY(device_of(config, model));
    TN_TRY(make_scope(config->scope, name, &model->scope));
    TN_TRY(tn_scope_scratch_config_set(model->scope, &columns));
    TN_TRY(make_scope(model->scope, "units", &model->units_scope));
    return make_numbers(model, config->step);
}

/* The scope with what is in it, and the stream: as far as it goes, so that it can go on. */
static tn_status end_scope(tn_sharded_model *model) {
    if (model->scope.value) TN_TRY(tn_scope_close(model->scope));
    model->scope = (tn_scope){0};
    if (model->owns_stream) TN_TRY(tn_stream_destroy(model->device, model->config.comm_stream));
    model->owns_stream = 0;
    return TN_OK;
}

/* What is left of a model on the host. */
static void delete_model(tn_sharded_model *model) {
    for (int i = 0; i < model->unit_count; i++)
        tn__sharded_unit_delete(model->units[i]);
    tn__host_free((void *)(uintptr_t)model->config.name);
    tn__host_free(model->units);
    tn__host_free(model->buckets);
    tn__host_free(model->trace);
    tn__host_free(model);
}

tn_status tn_sharded_create(const tn_sharded_config *config, tn_sharded_model **out) {
    TN_TRY(check_config(config));
    TN_REQUIRE(out, "tn_sharded_create: out is NULL");
    tn_sharded_model *model = tn__host_alloc(1, sizeof *model);
    if (!model) return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "a sharded model");
    const tn_status status = build(model, config);
    if (status != TN_OK) {
        tn__saved_error saved;
        tn__error_save(&saved);
        (void)end_scope(model);
        delete_model(model);
        tn__error_restore(&saved);
        return status;
    }
    *out = model;
    return TN_OK;
}

/* ---- sealed ---------------------------------------------------------------------------------- */

static tn_status add_to_ring(tn_ring *ring, tn__sharded_unit *unit, tn_tensor *tensors) {
    tn_ring_unit_config config = TN_RING_UNIT_CONFIG_INIT;
    for (int i = 0; i < unit->part_count; i++)
        tensors[i] = unit->parts[i].gathered;
    config.name = unit->name;
    config.plan = unit->plan;
    config.shard = unit->is_shard_made ? unit->model->made_shard : unit->shard;
    config.tensors = tensors;
    config.tensor_count = unit->part_count;
    if (!unit->is_shard_made) return tn_ring_unit_add(ring, &config, &unit->ring_unit);
    return tn__ring_made_unit_add(ring, &config, unit->version, tn__sharded_make_shard, unit,
                                  &unit->ring_unit);
}

static tn_status fill_ring(tn_sharded_model *model, tn_ring *ring) {
    int most = 1;
    tn_status status = TN_OK;
    for (int i = 0; i < model->unit_count; i++)
        if (model->units[i]->part_count > most) most = model->units[i]->part_count;
    tn_tensor *tensors = tn__host_alloc((size_t)most, sizeof *tensors);
    if (!tensors) return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "a list of a unit's tensors");
    for (int i = 0; i < model->unit_count && status == TN_OK; i++)
        status = add_to_ring(ring, model->units[i], tensors);
    tn__host_free(tensors);
    return status == TN_OK ? tn_ring_seal(ring) : status;
}

/* A model that keeps units gathered has room for all of them, or is told so here. */
static int ring_slots(const tn_sharded_model *model) {
    const int keeps = model->config.keep_after_forward || model->config.keep_after_backward;
    if (model->config.ring_slots != 0 || !keeps) return model->config.ring_slots;
    return model->unit_count > 2 ? model->unit_count : 2;
}

static tn_status make_ring(tn_sharded_model *model) {
    tn_ring_config config = TN_RING_CONFIG_INIT;
    tn_ring *ring = NULL;
    const int slots = ring_slots(model);
    const int keeps = model->config.keep_after_forward || model->config.keep_after_backward;
    TN_REQUIRE(!keeps || slots >= model->unit_count,
               "tn_sharded_seal: model %s keeps its %d units gathered, and "
               "ring_slots is %d: take "
               "as many as there are units, or 0",
               model->config.name, model->unit_count, slots);
    config.scope = model->scope;
    config.comm = model->config.comm;
    config.stream = model->config.comm_stream;
    config.name = model->config.name;
    config.slots = slots;
    config.budget_bytes = model->config.ring_bytes;
    config.registration = model->config.ring_registration;
    TN_TRY(tn_ring_create(&config, &ring));
    const tn_status status = fill_ring(model, ring);
    if (status == TN_OK) {
        model->ring = ring;
        return TN_OK;
    }
    tn__saved_error saved;
    tn__error_save(&saved);
    (void)tn_ring_destroy(ring);
    tn__error_restore(&saved);
    return status;
}

tn_status tn_sharded_seal(tn_sharded_model *model) {
    TN_REQUIRE(model, "tn_sharded_seal: model is NULL");
    if (model->ring)
        return TN_FAIL(TN_INVALID_STATE, "tn_sharded_seal: model %s is sealed already",
                       model->config.name);
    TN_REQUIRE(model->unit_count > 0, "tn_sharded_seal: model %s has no units", model->config.name);
    TN_TRY(tn__sharded_check_streams(model, "tn_sharded_seal"));
    TN_TRY(tn__sharded_buckets_make(model));
    tn_status status = tn__sharded_made_shard_make(model);
    if (status == TN_OK) status = make_ring(model);
    if (status != TN_OK) tn__sharded_buckets_end(model);
    return status;
}

/* ---- ended ----------------------------------------------------------------------------------- */

/* Units first, which may be refused: they are what others can lease. */
static tn_status end_units(tn_sharded_model *model) {
    if (model->is_ending) return TN_OK;
    TN_TRY(tn__sharded_give_up(model)); /* what the ring holds is leased by it */
    TN_TRY(tn_scope_close(model->units_scope));
    model->is_ending = 1;
    return TN_OK;
}

static tn_status end_ring(tn_sharded_model *model) {
    TN_TRY(tn_ring_destroy(model->ring));
    model->ring = NULL;
    return TN_OK;
}

tn_status tn_sharded_destroy(tn_sharded_model *model) {
    if (!model) return TN_OK;
    TN_TRY(end_units(model));
    const tn_status waited = tn_comm_wait(model->config.comm);
    if (waited != TN_COMM_ERROR && waited != TN_COMM_TIMEOUT) TN_TRY(waited);
    tn__saved_error why;
    tn__error_save(&why);
    TN_TRY(end_ring(model));
    tn__sharded_buckets_end(model);
    TN_TRY(end_scope(model));
    delete_model(model);
    if (waited != TN_OK) tn__error_restore(&why);
    return waited;
}

/* ---- asked ----------------------------------------------------------------------------------- */

static const tn__sharded_part *part_of(const tn_sharded_model *model, int unit, int tensor) {
    if (!model || unit < 0 || unit >= model->unit_count) return NULL;
    const tn__sharded_unit *of = model->units[unit];
    return tensor >= 0 && tensor < of->part_count ? &of->parts[tensor] : NULL;
}

tn_tensor tn_sharded_weight(const tn_sharded_model *model, int unit, int tensor) {
    const tn__sharded_part *part = part_of(model, unit, tensor);
    return part ? part->weight : (tn_tensor){0};
}

tn_tensor tn_sharded_source(const tn_sharded_model *model, int unit, int tensor) {
    const tn__sharded_part *part = part_of(model, unit, tensor);
    return part && part->is_quantized_here ? part->gathered : (tn_tensor){0};
}

tn_tensor tn_sharded_gradient(const tn_sharded_model *model, int unit, int tensor) {
    const tn__sharded_part *part = part_of(model, unit, tensor);
    return part ? part->gradient : (tn_tensor){0};
}

tn_tensor tn_sharded_norm(const tn_sharded_model *model) {
    return model ? model->norm : (tn_tensor){0};
}

tn_status tn_sharded_unit_info_get(const tn_sharded_model *model, int unit,
                                   tn_sharded_unit_info *out) {
    tn__sharded_unit *of = NULL;
    TN_TRY(tn__sharded_find(model, "tn_sharded_unit_info_get", unit, &of));
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_sharded_unit_info_get: out is NULL or of another size: start from "
               "TN_SHARDED_UNIT_INFO_INIT");
    out->name = of->name;
    out->plan = of->plan;
    out->tensor_count = of->part_count;
    out->shard = of->shard;
    out->master = of->master, out->first = of->first, out->second = of->second;
    out->gradient = of->gradient;
    out->gradient_bytes = tn__sharded_bucket_bytes(model, of);
    out->micro_batches = of->ended;
    return TN_OK;
}
