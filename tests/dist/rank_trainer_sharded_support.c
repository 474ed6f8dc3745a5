/* The small transformer with weights, gradients and optimizer state cut over the ranks that would
 * have them all alike: a sharded model for each extent, with a unit a layer. See
 * rank_trainer_support.h. */
#include <string.h>

#include "rank_trainer_support.h"
#include "rank_values_support.h"

enum { TENSORS_MAX = 2 * TRAINER_EXPERTS };

/* What one layer has of an extent, in order. */
typedef struct unit_parameters {
    int layer, count;
    trainer_extent extent;
    parameter *at[TENSORS_MAX];
} unit_parameters;

static void list(trainer *t, int layer, parameter *p, void *context) {
    unit_parameters *unit = context;
    (void)t;
    if (layer != unit->layer || p->extent != unit->extent) return;
    p->tensor = unit->count;
    unit->at[unit->count++] = p;
}

static unit_parameters unit_of(trainer *t, int layer, trainer_extent of) {
    unit_parameters unit = {.layer = layer, .extent = of};
    trainer_each(t, list, &unit);
    return unit;
}

static tn_sharded_tensor tensor_of(const parameter *p) {
    tn_tensor_info weight = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(p->weight, &weight));
    return (tn_sharded_tensor){.name = "parameter",
                               .format = weight.format,
                               .dtype = weight.dtype,
                               .scale_mode = weight.scale_mode,
                               .rows = weight.rows,
                               .cols = weight.cols,
                               .frozen = p->is_frozen || p->has_no_gradient,
                               .initial = p->master};
}

static void add_unit(trainer *t, const unit_parameters *unit) {
    tn_sharded_tensor tensors[TENSORS_MAX];
    tn_sharded_unit_config config = TN_SHARDED_UNIT_CONFIG_INIT;
    int number = -1;
    for (int i = 0; i < unit->count; i++)
        tensors[i] = tensor_of(unit->at[i]);
    config.tensors = tensors, config.tensor_count = unit->count;
    EXPECT_OK(tn_sharded_unit_add(t->sharded[unit->extent], &config, &number));
    assert_int_equal(number, unit->layer);
}

static void make_model(trainer *t, trainer_extent of) {
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    if (unit_of(t, 0, of).count == 0) return;
    config.scope = t->scope, config.comm = t->sums[of];
    config.stream = t->all->stream, config.comm_stream = t->all->other;
    config.gradient_sum = TN_GRADIENT_SUM_WHOLE;
    config.micro_batches = t->layout.micro_batches;
    config.keep_after_forward = t->layout.sharding >= KEPT_AFTER_FORWARD;
    config.keep_after_backward = t->layout.sharding == KEPT_AFTER_BACKWARD;
    EXPECT_OK(tn_sharded_create(&config, &t->sharded[of]));
    for (int layer = 0; layer < t->layout.layers; layer++) {
        const unit_parameters unit = unit_of(t, layer, of);
        add_unit(t, &unit);
    }
    EXPECT_OK(tn_sharded_seal(t->sharded[of]));
}

/* The whole ones have been read. */
static void hand_over(trainer *t, int layer, parameter *p, void *context) {
    const tn_sharded_model *model = t->sharded[p->extent];
    tn_tensor *const whole[] = {&p->first, &p->second, &p->gradient[0], &p->master, &p->weight};
    (void)context;
    if (p->weight.value == p->master.value) p->weight = (tn_tensor){0};
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        EXPECT_OK(tn_tensor_destroy(*whole[i], t->all->stream));
        *whole[i] = (tn_tensor){0};
    }
    p->weight = tn_sharded_weight(model, layer, p->tensor);
    p->gradient[0] = tn_sharded_gradient(model, layer, p->tensor);
}

void trainer_shard(trainer *t) {
    for (int of = 0; of < EXTENTS; of++)
        make_model(t, (trainer_extent)of);
    trainer_each(t, hand_over, NULL);
}

void trainer_unshard(trainer *t) {
    for (int of = 0; of < EXTENTS; of++)
        EXPECT_OK(tn_sharded_destroy(t->sharded[of]));
}

/* ---- a step ---------------------------------------------------------------------------------- */

void trainer_put(const trainer *t, trainer_call call, const trained_layer *l) {
    const int unit = (int)(l - t->layers);
    for (int of = 0; of < EXTENTS; of++)
        if (t->sharded[of]) EXPECT_OK(call(t->sharded[of], unit));
}

void trainer_update_sharded(const trainer *t) {
    tn_sharded_update_args args = TN_SHARDED_UPDATE_ARGS_INIT;
    args.learning_rate = TRAINER_RATE, args.gradient_scale = 1.0f;
    for (int of = 0; of < EXTENTS; of++)
        if (t->sharded[of]) EXPECT_OK(tn_sharded_update(t->sharded[of], &args));
}

/* ---- master copies --------------------------------------------------------------------------- */

static void take_piece(const trainer *t, const parameter *p, const tn_sharded_unit_info *unit,
                       parallel_matrix *out) {
    tn_shard_piece piece = TN_SHARD_PIECE_INIT;
    const int rank = tn_comm_rank(t->sums[p->extent]);
    if (unit->master.value == 0) return;
    EXPECT_OK(tn_shard_piece_get(unit->plan, rank, p->tensor, &piece));
    if (piece.count == 0 || piece.packed_first < 0) return;
    parallel_matrix packed = parallel_fetch(t->all, unit->master);
    memcpy(out->at + piece.first, packed.at + piece.packed_first,
           (size_t)piece.count * sizeof *packed.at);
    parallel_free(&packed);
}

/* Each element is one rank's, and 0 on the others. */
parallel_matrix trainer_sharded_master(const trainer *t, int layer, const parameter *p) {
    tn_sharded_unit_info unit = TN_SHARDED_UNIT_INFO_INIT;
    tn_tensor_info weight = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_sharded_unit_info_get(t->sharded[p->extent], layer, &unit));
    EXPECT_OK(tn_tensor_info_get(p->weight, &weight));
    parallel_matrix whole = parallel_zeros(weight.rows, weight.cols);
    const size_t count = (size_t)(weight.rows * weight.cols), bytes = count * sizeof *whole.at;
    take_piece(t, p, &unit, &whole);
    void *sums = ranks_take(t->all, bytes);
    ranks_put(t->all, sums, whole.at, bytes);
    EXPECT_OK(tn_all_reduce(t->sums[p->extent], sums, sums, count, TN_FP32, TN_REDUCE_SUM,
                            t->all->stream));
    ranks_get(t->all, whole.at, sums, bytes);
    ranks_give(t->all, sums);
    return whole;
}
