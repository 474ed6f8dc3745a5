/* Parameters of a small transformer over ranks, or alone: see rank_trainer_support.h. */
#include <stdlib.h>
#include <string.h>

#include "rank_trainer_support.h"

enum {
    H = TRAINER_HIDDEN,
    FROZEN_EXPERT = 1, /* of every layer: its weights never train */
    FIRST_UP = PARTS,  /* numbers of experts' weights: up, down, up, down ... */
    FIRST_DOWN
};

int trainer_count(const trainer_layout *layout, trainer_extent of) {
    if (of == OF_REPLICA) return layout->replicas;
    return layout->replicas * layout->ranks / (of == OF_GROUP ? layout->tensor_ranks : 1);
}

int64_t trainer_own_experts(const trainer *t) {
    if (!t->layout.has_experts) return 0;
    return t->is_alone ? TRAINER_EXPERTS : TRAINER_EXPERTS / t->layout.ranks;
}

int trainer_homes(const trainer *t) { return t->is_alone ? t->layout.ranks : 1; }

int trainer_rank(const trainer *t, int home) {
    return t->is_alone ? home : t->all->rank % t->layout.ranks;
}

tn_tensor trainer_added(const trainer *t, tn_tensor x, tn_tensor y) {
    tn_axpy_args args = TN_AXPY_ARGS_INIT;
    args.x = x, args.y = y;
    EXPECT_OK(tn_axpy(&args, t->all->stream));
    return y;
}

/* ---- parameters ------------------------------------------------------------------------------ */

static tn_tensor zeros(const trainer *t, int64_t rows, int64_t cols) {
    parallel_matrix matrix = parallel_zeros(rows, cols);
    tn_tensor tensor = parallel_tensor(t->all, t->scope, TN_FP32, &matrix);
    parallel_free(&matrix);
    return tensor;
}

static int is_gain(int number) { return number == GAIN_1 || number == GAIN_2 || number == GAIN_3; }

static void make_weight(const trainer *t, parameter *p, const parallel_matrix *values) {
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    if (is_gain(p->number)) {
        p->weight = p->master;
    } else if (p->number == ROUTER) {
        p->weight = parallel_tensor(t->all, t->scope, TN_BF16, values);
    } else {
        quantize.src = p->master;
        quantize.dst = p->weight = test_weight(t->scope, values->rows, values->cols, p->is_frozen,
                                               TN_POLICY_UNTIL_LAST_USE);
        EXPECT_OK(tn_quantize(&quantize, t->all->stream));
    }
}

/* The values end. */
static void make(const trainer *t, trained_layer *l, parameter *p, int number, trainer_extent of,
                 parallel_matrix values) {
    p->is_there = 1, p->number = number, p->extent = of;
    p->has_no_gradient = of == OF_GROUP && is_gain(number) && t->layout.tensor_ranks > 2;
    if (t->layout.sharding && trainer_freezes(t, (int)(l - t->layers), p)) p->is_frozen = 1;
    p->master = parallel_tensor(t->all, t->scope, TN_FP32, &values);
    p->first = zeros(t, values.rows, values.cols);
    p->second = zeros(t, values.rows, values.cols);
    for (int i = 0; i < (t->is_alone ? trainer_count(&t->layout, of) : 1); i++)
        p->gradient[i] = zeros(t, values.rows, values.cols);
    make_weight(t, p, &values);
    parallel_free(&values);
}

/* ---- their first values ---------------------------------------------------------------------- */

static parallel_matrix scaled(int64_t rows, int64_t cols, uint32_t seed, float scale) {
    parallel_matrix matrix = parallel_numbers(rows, cols, seed);
    for (int64_t i = 0; i < rows * cols; i++)
        matrix.at[i] *= scale;
    return matrix;
}

static parallel_matrix ones(void) {
    parallel_matrix matrix = parallel_zeros(1, H);
    for (int i = 0; i < H; i++)
        matrix.at[i] = 1.0f;
    return matrix;
}

/* The last expert begins with logits of 0: few tokens pick it. */
static parallel_matrix router_of(uint32_t seed) {
    parallel_matrix matrix = parallel_numbers(TRAINER_EXPERTS, H, seed);
    memset(matrix.at + (TRAINER_EXPERTS - 1) * H, 0, H * sizeof *matrix.at);
    return matrix;
}

/* This rank's part of the rows (or columns) of a weight that is cut. */
static parallel_matrix cut(const trainer *t, parallel_matrix whole, int by_rows) {
    const int64_t at = (int64_t)TRAINER_BLOCK * (t->all->rank % t->layout.tensor_ranks);
    if (t->is_alone) return whole;
    parallel_matrix part = by_rows ? parallel_part(&whole, at, TRAINER_BLOCK, 0, H)
                                   : parallel_part(&whole, 0, H, at, TRAINER_BLOCK);
    parallel_free(&whole);
    return part;
}

static void make_mlp(const trainer *t, trained_layer *l, uint32_t seed) {
    const int64_t ffn = (int64_t)TRAINER_BLOCK * t->layout.tensor_ranks;
    make(t, l, &l->parts[GAIN_2], GAIN_2, OF_GROUP, ones());
    make(t, l, &l->parts[UP], UP, OF_GROUP, cut(t, scaled(ffn, H, seed, 0.25f), 1));
    make(t, l, &l->parts[DOWN], DOWN, OF_GROUP, cut(t, scaled(H, ffn, seed + 1, 0.125f), 0));
}

static void make_cut_attention(const trainer *t, trained_layer *l, uint32_t seed) {
    const int64_t features = (int64_t)TRAINER_BLOCK * t->layout.tensor_ranks;
    make(t, l, &l->parts[GAIN_1], GAIN_1, OF_GROUP, ones());
    make(t, l, &l->parts[QKV], QKV, OF_GROUP, cut(t, scaled(features, H, seed, 0.25f), 1));
    make(t, l, &l->parts[KEYS], KEYS, OF_GROUP, cut(t, scaled(features, H, seed + 2, 0.25f), 1));
    make(t, l, &l->parts[PROJECTION], PROJECTION, OF_GROUP,
         cut(t, scaled(H, features, seed + 1, 0.125f), 0));
}

static void make_attention(const trainer *t, trained_layer *l, uint32_t seed) {
    make(t, l, &l->parts[GAIN_1], GAIN_1, OF_RANK, ones());
    make(t, l, &l->parts[QKV], QKV, OF_RANK, scaled(3 * H, H, seed, 0.25f));
    make(t, l, &l->parts[PROJECTION], PROJECTION, OF_RANK, scaled(H, H, seed + 1, 0.25f));
}

static void make_experts(const trainer *t, trained_layer *l, uint32_t seed) {
    const int64_t own = trainer_own_experts(t), first = own * trainer_rank(t, 0);
    make(t, l, &l->parts[GAIN_3], GAIN_3, OF_RANK, ones());
    make(t, l, &l->parts[ROUTER], ROUTER, OF_RANK, router_of(seed));
    for (int e = 0; e < own; e++) {
        const uint32_t of = seed + 1 + 2 * (uint32_t)(first + e);
        l->expert_up[e].is_frozen = l->expert_down[e].is_frozen = first + e == FROZEN_EXPERT;
        make(t, l, &l->expert_up[e], FIRST_UP + 2 * e, OF_REPLICA,
             scaled(TRAINER_EXPERT_FFN, H, of, 0.5f));
        make(t, l, &l->expert_down[e], FIRST_DOWN + 2 * e, OF_REPLICA,
             scaled(H, TRAINER_EXPERT_FFN, of + 1, 0.5f));
    }
}

int trainer_freezes(const trainer *t, int layer, const parameter *p) {
    if (p->extent == OF_REPLICA) return layer == 0 && (t->layout.layers > 1 || !t->layout.sharding);
    return p->number == UP;
}

/* ---- all of them ----------------------------------------------------------------------------- */

void trainer_each(trainer *t, parameter_function visit, void *context) {
    for (int i = 0; i < t->layout.layers; i++) {
        trained_layer *l = &t->layers[i];
        for (int part = 0; part < PARTS; part++)
            if (l->parts[part].is_there) visit(t, i, &l->parts[part], context);
        for (int64_t e = 0; e < trainer_own_experts(t); e++) {
            visit(t, i, &l->expert_up[e], context);
            visit(t, i, &l->expert_down[e], context);
        }
    }
}

/* ---- a trainer ------------------------------------------------------------------------------- */

static tn_comm *split(const trainer *t, int color, const char *name) {
    tn_comm *comm = NULL;
    EXPECT_OK(tn_comm_split(t->all->comm, color, t->all->rank, name, &comm));
    return comm;
}

static void make_comms(trainer *t) {
    const int rank = t->all->rank, ranks = t->layout.ranks, tensor = t->layout.tensor_ranks;
    t->group = split(t, rank / tensor, "tensor");
    t->replica = split(t, rank / ranks, "replica");
    t->sums[OF_RANK] = split(t, 0, "ranks");
    t->sums[OF_GROUP] = split(t, rank % tensor, "groups");
    t->sums[OF_REPLICA] = split(t, rank % ranks, "replicas");
}

trainer *trainer_open(const rank_fixture *all, const trainer_layout *layout, int is_alone) {
    static const uint32_t no_error;
    trainer *t = calloc(1, sizeof *t);
    assert_non_null(t);
    t->all = all, t->layout = *layout, t->is_alone = is_alone;
    t->bytes_before = test_pool_stats(all->pool).live_bytes;
    if (!is_alone) make_comms(t);
    t->scope = parallel_scope(all, TN_SCOPE_MODEL, "model");
    for (int i = 0; i < layout->layers; i++) {
        const uint32_t seed = 100u * (uint32_t)i + 10u;
        make_mlp(t, &t->layers[i], seed);
        if (layout->attention == OWN_TOKENS) make_attention(t, &t->layers[i], seed + 10);
        if (layout->attention == CUT_HEADS) make_cut_attention(t, &t->layers[i], seed + 10);
        if (layout->has_experts) make_experts(t, &t->layers[i], seed + 20);
    }
    if (layout->sharding && !is_alone) trainer_shard(t);
    t->step = zeros(t, 1, 3);
    t->error = test_plain(t->scope, TN_BYTE, 1, sizeof no_error);
    EXPECT_OK(
        tn_plane_write(t->error, TN_PLANE_DATA, &no_error, sizeof no_error, NULL, 0, all->stream));
    return t;
}

void trainer_close(trainer *t) {
    uint32_t error = 0;
    EXPECT_OK(
        tn_plane_read(t->error, TN_PLANE_DATA, &error, sizeof error, NULL, 0, t->all->stream));
    ranks_wait(t->all);
    assert_int_equal(error, TN_GROUPED_OK);
    trainer_unshard(t);
    EXPECT_OK(tn_scope_close(t->scope));
    assert_int_equal(test_pool_stats(t->all->pool).live_bytes, t->bytes_before);
    for (int i = 0; i < EXTENTS; i++)
        EXPECT_OK(tn_comm_destroy(t->sums[i]));
    EXPECT_OK(tn_comm_destroy(t->replica));
    EXPECT_OK(tn_comm_destroy(t->group));
    free(t);
}
