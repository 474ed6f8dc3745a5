/* A unit of a sharded model: cut, filled from initial values, cast.
 *
 * Everything of a unit is made in its own scope, so that a unit that fails half-way is gone when
 * the scope is closed.
 */
#include "sharded.h"

#include <stdio.h>

#include "comm.h"
#include "error.h"
#include "host_alloc.h"
#include "tensor_internal.h"
#include "tenure_cast.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static tn_status check_initial(const tn_sharded_tensor *tensor, const char *role, tn_tensor given,
                               int is_fp32) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    int64_t elements;
    TN_TRY(tn_tensor_info_get(given, &info));
    TN_REQUIRE(info.format == TN_FORMAT_PLAIN && info.dtype != TN_BYTE &&
                   (!is_fp32 || info.dtype == TN_FP32),
               "tn_sharded_unit_add: %s of tensor %s is %s %s, expected plain %s", role,
               tensor->name, tn_format_name(info.format), tn_dtype_name(info.dtype),
               is_fp32 ? "fp32" : "fp32, bf16 or fp16");
    TN_REQUIRE(!__builtin_mul_overflow(tensor->rows, tensor->cols, &elements) &&
                   info.rows * info.cols == elements,
               "tn_sharded_unit_add: %s of tensor %s has %lld elements, and the "
               "tensor %lld x %lld",
               role, tensor->name, (long long)(info.rows * info.cols), (long long)tensor->rows,
               (long long)tensor->cols);
    return TN_OK;
}

static tn_status check_tensor(const tn_sharded_tensor *tensor) {
    const int is_block = tensor->format == TN_FORMAT_FP8_BLOCK_2D;
    TN_REQUIRE(tensor->name, "tn_sharded_unit_add: a tensor has no name");
    if (tensor->format != TN_FORMAT_PLAIN && !is_block)
        return TN_FAIL(TN_UNSUPPORTED,
                       "tn_sharded_unit_add: tensor %s is %s: masters are cast to "
                       "shards of plain "
                       "and fp8_block_2d weights only",
                       tensor->name, tn_format_name(tensor->format));
    TN_REQUIRE(is_block || !tensor->high_precision,
               "tn_sharded_unit_add: tensor %s is plain, so there is nothing to "
               "quantize: "
               "high_precision is for FP8 formats",
               tensor->name);
    TN_REQUIRE(is_block || tensor->dtype == TN_FP32 || tensor->dtype == TN_BF16 ||
                   tensor->dtype == TN_FP16,
               "tn_sharded_unit_add: tensor %s is plain %s, expected fp32, bf16 or fp16",
               tensor->name, tn_dtype_name(tensor->dtype));
    TN_TRY(check_initial(tensor, "initial", tensor->initial, 0));
    if (tensor->first.value) TN_TRY(check_initial(tensor, "first", tensor->first, 1));
    if (tensor->second.value) TN_TRY(check_initial(tensor, "second", tensor->second, 1));
    TN_REQUIRE(!tensor->frozen || (tensor->first.value == 0 && tensor->second.value == 0),
               "tn_sharded_unit_add: tensor %s is frozen, and has no moments", tensor->name);
    return TN_OK;
}

static tn_status check_unit(const tn_sharded_model *model, const tn_sharded_unit_config *config,
                            const int *out) {
    TN_REQUIRE(model, "tn_sharded_unit_add: model is NULL");
    TN_REQUIRE(config && config->size == sizeof *config,
               "tn_sharded_unit_add: config is NULL or of another size: start from "
               "TN_SHARDED_UNIT_CONFIG_INIT");
    TN_REQUIRE(out, "tn_sharded_unit_add: out is NULL");
    TN_REQUIRE(config->tensor_count > 0 && config->tensor_count <= TN_SHARD_TENSORS_MAX &&
                   config->tensors,
               "tn_sharded_unit_add: a unit has 1 to %d tensors, and tensor_count is %d",
               TN_SHARD_TENSORS_MAX, config->tensor_count);
    if (model->ring)
        return TN_FAIL(TN_INVALID_STATE, "tn_sharded_unit_add: model %s is sealed",
                       model->config.name);
    for (int i = 0; i < config->tensor_count; i++)
        TN_TRY(check_tensor(&config->tensors[i]));
    return TN_OK;
}

/* ---- the plan -------------------------------------------------------------------------------- */

/* How a tensor is gathered. */
static tn_shard_tensor gathered_of(const tn_sharded_tensor *tensor) {
    tn_shard_tensor gathered = {.name = tensor->name,
                                .format = tensor->format,
                                .dtype = tensor->dtype,
                                .scale_mode = tensor->scale_mode,
                                .rows = tensor->rows,
                                .cols = tensor->cols,
                                .frozen = tensor->frozen};
    if (tensor->high_precision) gathered.format = TN_FORMAT_PLAIN, gathered.dtype = TN_BF16;
    return gathered;
}

/* A shard that is made for each gather needs nothing but the rank's own masters. */
static int is_shard_made(const tn_sharded_model *model, const tn_sharded_unit_config *config,
                         const tn_shard_plan_info *plan) {
    if (!model->config.shards_from_masters || plan->amax_count > 0) return 0;
    for (int i = 0; i < config->tensor_count; i++)
        if (config->tensors[i].frozen) return 0;
    return 1;
}

static tn_status make_plan(const tn_sharded_model *model, const tn_sharded_unit_config *config,
                           tn__sharded_unit *unit) {
    tn_shard_plan_config plan = TN_SHARD_PLAN_CONFIG_INIT;
    tn_shard_plan_info info = TN_SHARD_PLAN_INFO_INIT;
    tn_shard_tensor *tensors = tn__host_alloc((size_t)config->tensor_count, sizeof *tensors);
    if (!tensors) return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "the tensors of unit %s", unit->name);
    for (int i = 0; i < config->tensor_count; i++)
        tensors[i] = gathered_of(&config->tensors[i]);
    plan.name = unit->name;
    plan.tensors = tensors, plan.tensor_count = config->tensor_count;
    plan.rank_count = model->rank_count;
    plan.layout = config->layout;
    plan.costs = model->config.costs;
    const tn_status status = tn_shard_plan_create(&plan, &unit->plan);
    tn__host_free(tensors);
    TN_TRY(status);
    TN_TRY(tn_shard_plan_info_get(unit->plan, &info));
    unit->bucket_elements = (size_t)info.bucket_elements;
    unit->is_shard_made = is_shard_made(model, config, &info);
    return TN_OK;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static tn_status make_gathered(const tn__sharded_unit *unit, const tn_shard_tensor *of,
                               tn_plane_policy policy, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = of->format, config.dtype = of->dtype, config.scale_mode = of->scale_mode;
    config.rank = 2, config.shape[0] = of->rows, config.shape[1] = of->cols;
    config.policy = policy;
    config.frozen = of->frozen;
    config.name = of->name;
    config.regatherable = 1;
    return tn_tensor_create(unit->scope, &config, out);
}

static tn_status make_part(const tn_sharded_model *model, tn__sharded_unit *unit,
                           const tn_sharded_tensor *tensor, int index) {
    tn__sharded_part *part = &unit->parts[index];
    const tn_shard_tensor gathered = gathered_of(tensor);
    const int is_plain = gathered.format == TN_FORMAT_PLAIN;
    int64_t offset = -1;
    TN_TRY(make_gathered(unit, &gathered, is_plain ? TN_POLICY_KEEP : TN_POLICY_SCRATCH,
                         &part->gathered));
    part->weight = part->gathered;
    part->is_quantized_here = tensor->high_precision;
    if (tensor->high_precision) {
        tn_shard_tensor weight = gathered;
        weight.format = tensor->format, weight.dtype = tensor->dtype;
        TN_TRY(make_gathered(unit, &weight, TN_POLICY_KEEP, &part->weight));
    }
    if (tensor->frozen) return TN_OK;
    TN_TRY(tn_shard_bucket_offset(unit->plan, index, &offset));
    part->bucket_offset = (size_t)offset;
    TN_TRY(tn__sharded_plain(unit->scope, model->config.gradient_dtype, tensor->rows, tensor->cols,
                             tensor->name, &part->gradient));
    return tn_tensor_set_regatherable(part->gradient, 1);
}

/* What is reduced once a step stays in its type; what is added to is fp32. */
static tn_dtype gradient_dtype_of(const tn_sharded_model *model) {
    const int is_fp32 = tn__sharded_passes_arrived(model, model->config.gradient_sum);
    return is_fp32 ? TN_FP32 : model->config.gradient_dtype;
}

static tn_status make_shard(const tn_sharded_model *model, tn__sharded_unit *unit) {
    size_t bytes = 0;
    TN_TRY(tn_shard_bytes(unit->plan, model->rank, &bytes));
    if (!unit->is_shard_made)
        return tn__sharded_zeros(model, unit->scope, TN_BYTE, 1, (int64_t)bytes, "shard",
                                 &unit->shard);
    return tn__sharded_zeros(model, unit->scope, TN_BYTE, 1, 0, "version", &unit->version);
}

static tn_status make_state(const tn_sharded_model *model, tn__sharded_unit *unit) {
    const int64_t rows = (int64_t)unit->packed_elements / TN__SHARDED_WIDTH;
    const int64_t cols = TN__SHARDED_WIDTH;
    TN_TRY(make_shard(model, unit));
    if (rows == 0) return TN_OK;
    TN_TRY(tn__sharded_zeros(model, unit->scope, TN_FP32, rows, cols, "master", &unit->master));
    TN_TRY(tn__sharded_zeros(model, unit->scope, TN_FP32, rows, cols, "first", &unit->first));
    TN_TRY(tn__sharded_zeros(model, unit->scope, TN_FP32, rows, cols, "second", &unit->second));
    TN_TRY(tn__sharded_plain(unit->scope, gradient_dtype_of(model), rows, cols, "gradient",
                             &unit->gradient));
    return tn_tensor_set_regatherable(unit->gradient, 1);
}

static tn_status make_tensors(const tn_sharded_model *model, const tn_sharded_unit_config *config,
                              tn__sharded_unit *unit) {
    int64_t packed = 0;
    TN_TRY(tn_shard_packed_elements(unit->plan, model->rank, &packed));
    unit->held_elements = (size_t)packed;
    unit->packed_elements =
        ((size_t)packed + TN__SHARDED_WIDTH - 1) / TN__SHARDED_WIDTH * TN__SHARDED_WIDTH;
    for (int i = 0; i < config->tensor_count; i++)
        TN_TRY(make_part(model, unit, &config->tensors[i], i));
    return make_state(model, unit);
}

/* ---- initial values -------------------------------------------------------------------------- */

/* Elements in fp32 to element `at` on of `to`, at any address. */
static tn_status copy_floats(const tn_sharded_model *model, tn_tensor from, size_t count,
                             tn_tensor to, size_t at) {
    const tn_stream stream = model->config.stream;
    tn_lease read, written;
    tn_plane_view source, target;
    TN_TRY(tn_lease_begin(from, TN_PLANE_DATA, TN_READ, stream, &read, &source));
    tn_status status = tn_lease_begin(to, TN_PLANE_DATA, TN_UPDATE, stream, &written, &target);
    if (status != TN_OK) {
        TN_CHECK(tn_lease_abandon(read) == TN_OK);
        return status;
    }
    status = tn_copy(model->device, (float *)target.data + at, source.data, count * sizeof(float),
                     stream);
    const tn_status ended = tn_lease_end(written), last = tn_lease_end(read);
    if (status == TN_OK) status = ended;
    return status == TN_OK ? last : status;
}

/* The rank's elements of `from`, to where they are in `to`. */
static tn_status copy_piece(const tn_sharded_model *model, const tn__sharded_unit *unit,
                            const tn_shard_piece *piece, tn_tensor from, tn_tensor to) {
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    const tn_stream stream = model->config.stream;
    if (from.value == 0) return TN_OK;
    TN_TRY(tn__sharded_view(from, piece->first, piece->count, unit->scope, stream, &convert.x));
    tn_status status =
        tn__sharded_plain(unit->scope, TN_FP32, piece->count, 1, "piece", &convert.y);
    if (status == TN_OK) {
        status = tn_convert(&convert, stream);
        if (status == TN_OK)
            status = copy_floats(model, convert.y, (size_t)piece->count, to,
                                 (size_t)piece->packed_first);
        const tn_status ended = tn_tensor_destroy(convert.y, stream);
        if (status == TN_OK) status = ended;
    }
    const tn_status ended = tn_tensor_destroy(convert.x, stream);
    return status == TN_OK ? ended : status;
}

static tn_status fill_part(const tn_sharded_model *model, tn__sharded_unit *unit,
                           const tn_sharded_tensor *tensor, int index) {
    tn_shard_piece piece = TN_SHARD_PIECE_INIT;
    TN_TRY(tn_shard_piece_get(unit->plan, model->rank, index, &piece));
    if (piece.count == 0 || tensor->frozen) return TN_OK;
    TN_TRY(copy_piece(model, unit, &piece, tensor->initial, unit->master));
    TN_TRY(copy_piece(model, unit, &piece, tensor->first, unit->first));
    TN_TRY(copy_piece(model, unit, &piece, tensor->second, unit->second));
    return tn__sharded_view(unit->master, piece.packed_first, piece.count, unit->scope,
                            model->config.stream, &unit->parts[index].master);
}

/* The rank's part of what a frozen tensor begins with, and stays. */
static tn_status view_frozen(const tn_sharded_model *model, const tn__sharded_unit *unit,
                             const tn_sharded_tensor *tensor, int index, tn_tensor *out) {
    tn_shard_piece piece = TN_SHARD_PIECE_INIT;
    TN_TRY(tn_shard_piece_get(unit->plan, model->rank, index, &piece));
    if (piece.count == 0) return TN_OK;
    return tn__sharded_view(tensor->initial, piece.first, piece.count, unit->scope,
                            model->config.stream, out);
}

/* The first cast has all tensors, the frozen ones from their initial values. */
typedef struct first_cast {
    tn_tensor *masters; /* of each tensor: frozen[i] where there is one */
    tn_tensor *frozen;
} first_cast;

static tn_status prepare_cast(const tn_sharded_model *model, const tn_sharded_unit_config *config,
                              const tn__sharded_unit *unit, first_cast *cast) {
    const size_t count = (size_t)unit->part_count;
    cast->masters = tn__host_alloc(2 * count, sizeof *cast->masters);
    if (!cast->masters) return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "the tensors of unit %s", unit->name);
    cast->frozen = cast->masters + count;
    for (size_t i = 0; i < count; i++) {
        if (config->tensors[i].frozen)
            TN_TRY(view_frozen(model, unit, &config->tensors[i], (int)i, &cast->frozen[i]));
        cast->masters[i] = cast->frozen[i].value ? cast->frozen[i] : unit->parts[i].master;
    }
    return TN_OK;
}

static tn_status put_first_cast(const tn_sharded_model *model, const tn__sharded_unit *unit,
                                const first_cast *first) {
    tn_shard_cast_args cast = TN_SHARD_CAST_ARGS_INIT;
    tn_status status;
    cast.plan = unit->plan;
    cast.comm = model->config.comm;
    cast.masters = first->masters;
    cast.shard = unit->shard;
    cast.with_frozen = 1;
    cast.scope = unit->scope;
    status = tn_shard_cast(&cast, model->config.stream);
    for (int i = 0; i < unit->part_count; i++) {
        if (first->frozen[i].value == 0) continue;
        const tn_status ended = tn_tensor_destroy(first->frozen[i], model->config.stream);
        if (status == TN_OK) status = ended;
    }
    return status;
}

/* The amaxes of a unit's tiles that cuts go through, over all ranks: put once. */
static tn_status reduce_amaxes(tn_sharded_model *model, const tn__sharded_unit *unit,
                               tn_shard_cast_args *cast, const tn_shard_plan_info *info,
                               tn_stream stream) {
    tn_lease lease;
    tn_plane_view view;
    if (model->has_amaxes) return TN_OK;
    if (model->amaxes.value == 0)
        TN_TRY(
            tn__sharded_plain(unit->scope, TN_FP32, 1, info->amax_count, "amaxes", &model->amaxes));
    cast->amax = model->amaxes;
    TN_TRY(tn_shard_cast_amax(cast, stream));
    TN_TRY(tn_lease_begin(model->amaxes, TN_PLANE_DATA, TN_UPDATE, stream, &lease, &view));
    const tn_status status =
        tn_all_reduce(model->config.comm, view.data, view.data, (size_t)info->amax_count_trained,
                      TN_FP32, TN_REDUCE_MAX, stream);
    model->has_amaxes = status == TN_OK;
    return tn__sharded_end_write(lease, status);
}

/* A view that the driver refuses to end goes with its scope. */
static void end_amaxes(tn_sharded_model *model, tn_stream stream) {
    tn__error_scope_begin();
    if (model->amaxes.value) (void)tn_tensor_destroy(model->amaxes, stream);
    (void)tn__error_scope_end(TN_OK);
    model->amaxes = (tn_tensor){0};
    model->has_amaxes = 0;
}

static tn_status cast_trained(tn_sharded_model *model, const tn__sharded_unit *unit,
                              tn_shard_cast_args *cast, tn_stream stream) {
    tn_shard_plan_info info = TN_SHARD_PLAN_INFO_INIT;
    TN_TRY(tn_shard_plan_info_get(unit->plan, &info));
    if (model->rank_count > 1 && info.amax_count_trained > 0) {
        TN_TRY(reduce_amaxes(model, unit, cast, &info, stream));
        cast->amax = model->amaxes;
    }
    TN_TRY(tn_shard_cast(cast, stream));
    end_amaxes(model, stream);
    return TN_OK;
}

static tn_status cast_masters(tn_sharded_model *model, const tn__sharded_unit *unit,
                              float amax_epsilon, tn_stream stream) {
    tn_shard_cast_args cast = TN_SHARD_CAST_ARGS_INIT;
    const size_t count = (size_t)unit->part_count;
    tn_tensor *masters = tn__host_alloc(count, sizeof *masters);
    if (!masters) return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "the tensors of unit %s", unit->name);
    for (size_t i = 0; i < count; i++)
        masters[i] = unit->parts[i].master;
    cast.plan = unit->plan;
    cast.rank = model->rank;
    cast.masters = masters;
    cast.shard = unit->is_shard_made ? model->made_shard : unit->shard;
    cast.amax_epsilon = amax_epsilon;
    cast.scope = unit->scope;
    const tn_status status = unit->is_shard_made ? tn_shard_cast(&cast, stream)
                                                 : cast_trained(model, unit, &cast, stream);
    tn__host_free(masters);
    return status;
}

tn_status tn__sharded_made_shard_make(tn_sharded_model *model) {
    const size_t bytes = tn__sharded_made_shard_bytes(model);
    if (bytes == 0) return TN_OK;
    return tn__sharded_zeros(model, model->scope, TN_BYTE, 1, (int64_t)bytes, "made shard",
                             &model->made_shard);
}

tn_status tn__sharded_make_shard(void *unit, tn_stream stream) {
    const tn__sharded_unit *of = unit;
    return cast_masters(of->model, of, of->amax_epsilon, stream);
}

tn_status tn__sharded_check_master(tn__sharded_unit *unit) {
    uint64_t contents = 0;
    if (!unit->is_shard_made || unit->master.value == 0) return TN_OK;
    TN_TRY(tn__tensor_contents(unit->master, &contents));
    if (unit->master_contents == 0) unit->master_contents = contents;
    if (unit->master_contents == contents) return TN_OK;
    return TN_FAIL(
        TN_INVALID_STATE,
        "the masters of unit %s were written by something else than its update, of which "
        "what is gathered already knows nothing (shards_from_masters): make the model "
        "anew, with them as its initial values",
        unit->name);
}

tn_status tn__sharded_keep_master(tn__sharded_unit *unit) {
    if (unit->master.value == 0) return TN_OK;
    return tn__tensor_contents(unit->master, &unit->master_contents);
}

tn_status tn__sharded_cast_update(tn_sharded_model *model, tn__sharded_unit *unit,
                                  float amax_epsilon, tn_stream stream) {
    if (!unit->is_shard_made) return cast_masters(model, unit, amax_epsilon, stream);
    unit->amax_epsilon = amax_epsilon;
    return tn_plane_fill(unit->version, TN_PLANE_DATA, 0, stream);
}

/* ---- made and ended -------------------------------------------------------------------------- */

/* All of this rank's memory. */
static tn_status make_parts(const tn_sharded_model *model, const tn_sharded_unit_config *config,
                            tn__sharded_unit *unit) {
    tn_scope_config scope = TN_SCOPE_CONFIG_INIT;
    const size_t count = (size_t)config->tensor_count;
    unit->parts = tn__host_alloc(count, sizeof *unit->parts);
    unit->leases = tn__host_alloc(count, sizeof *unit->leases);
    if (!unit->parts || !unit->leases)
        return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "the tensors of unit %s", unit->name);
    unit->part_count = config->tensor_count;
    unit->backward_reads_nothing = config->backward_reads_nothing;
    TN_TRY(make_plan(model, config, unit));
    scope.parent = model->units_scope;
    scope.kind = TN_SCOPE_LAYER;
    scope.name = unit->name;
    TN_TRY(tn_scope_create(&scope, &unit->scope));
    TN_TRY(make_tensors(model, config, unit));
    for (int i = 0; i < config->tensor_count; i++)
        TN_TRY(fill_part(model, unit, &config->tensors[i], i));
    return TN_OK;
}

/* Of what follows the meeting nothing can be made again on one rank alone. */
static tn_status meet_and_cast(const tn_sharded_model *model, const tn__sharded_unit *unit,
                               const first_cast *cast) {
    tn_comm *comm = model->config.comm;
    TN_TRY(tn_shard_plan_verify(unit->plan, comm, unit->scope, model->config.stream));
    if (unit->is_shard_made) return TN_OK;
    return tn__comm_end_call(comm, "tn_sharded_unit_add", 0, put_first_cast(model, unit, cast));
}

static tn_status build_unit(const tn_sharded_model *model, const tn_sharded_unit_config *config,
                            tn__sharded_unit *unit) {
    first_cast cast = {NULL, NULL};
    TN_TRY(make_parts(model, config, unit));
    tn_status status = prepare_cast(model, config, unit, &cast);
    if (status == TN_OK) status = meet_and_cast(model, unit, &cast);
    tn__host_free(cast.masters);
    return status;
}

void tn__sharded_unit_delete(tn__sharded_unit *unit) {
    tn_shard_plan_destroy(unit->plan);
    tn__host_free(unit->parts);
    tn__host_free(unit->leases);
    tn__host_free(unit->name);
    tn__host_free(unit);
}

static void undo_unit(tn__sharded_unit *unit) {
    tn__saved_error saved;
    tn__error_save(&saved);
    (void)tn_scope_close(unit->scope);
    tn__sharded_unit_delete(unit);
    tn__error_restore(&saved);
}

static tn_status make_unit(const tn_sharded_model *model, const tn_sharded_unit_config *config,
                           tn__sharded_unit **out) {
    char number[32];
    snprintf(number, sizeof number, "unit %d", model->unit_count);
    tn__sharded_unit *unit = tn__host_alloc(1, sizeof *unit);
    if (unit) unit->name = tn__host_strdup(config->name ? config->name : number);
    if (!unit || !unit->name) {
        tn__host_free(unit);
        return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "unit %d of model %s", model->unit_count,
                       model->config.name);
    }
    const tn_status status = build_unit(model, config, unit);
    if (status == TN_OK)
        *out = unit;
    else
        undo_unit(unit);
    return status;
}

tn_status tn_sharded_unit_add(tn_sharded_model *model, const tn_sharded_unit_config *config,
                              int *out) {
    TN_TRY(check_unit(model, config, out));
    TN_TRY(tn__sharded_check_streams(model, "tn_sharded_unit_add"));
    const size_t count = (size_t)model->unit_count;
    tn__sharded_unit **units =
        tn__host_realloc(model->units, count, count + 1, sizeof(tn__sharded_unit *));
    if (!units) return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "the units of model %s", model->config.name);
    model->units = units;
    TN_TRY(make_unit(model, config, &units[count]));
    units[count]->model = model;
    *out = model->unit_count++;
    return TN_OK;
}
