/* Column-parallel LayerNormLinear and tensor-parallel LayerNormMLP: each bit is that of the steps
 * that they are made of, one call each: norm, column-parallel Linear, activation, row-parallel
 * Linear, which test_parallel_linear.c compares with one rank. On one rank, they are those of the
 * layers of tenure_layers.h.
 */
#include "parallel_support.h"

#include <string.h>

enum { K = 136, F = 72, N = 40 }; /* F: of each rank */

static rank_fixture all;

typedef struct setup {
    const char *what;
    tn_format format[2];
    tn_norm norm;
    int gated, recompute, keep_gathered, side;
    int64_t rows[PARALLEL_RANKS_MAX];
} setup;

#define TILES                                                                                      \
    { 128, 128, 128, 128, 128, 128, 128, 128 }
#define ANY                                                                                        \
    { 5, 130, 27, 77, 0, 2, 3, 4 }
#define BLOCKS TN_FORMAT_FP8_BLOCK_2D

static const setup setups[] = {
    {"tiles", {BLOCKS, BLOCKS}, TN_NORM_RMS, 0, 0, 0, 0, TILES},
    {"any rows", {BLOCKS, BLOCKS}, TN_NORM_LAYER, 1, 0, 0, 0, ANY},
    {"other stream", {BLOCKS, BLOCKS}, TN_NORM_RMS, 1, 0, 0, 1, ANY},
    {"recomputed", {BLOCKS, BLOCKS}, TN_NORM_LAYER, 0, 1, 0, 0, ANY},
    {"recomputed tiles", {BLOCKS, BLOCKS}, TN_NORM_RMS, 1, 1, 0, 1, TILES},
    {"gathered once", {BLOCKS, BLOCKS}, TN_NORM_RMS, 0, 0, 1, 0, ANY},
    {"plain", {TN_FORMAT_PLAIN, TN_FORMAT_PLAIN}, TN_NORM_LAYER, 0, 0, 0, 0, ANY},
    {"plain recomputed", {TN_FORMAT_PLAIN, TN_FORMAT_PLAIN}, TN_NORM_RMS, 1, 1, 0, 0, ANY},
    {"plain first", {TN_FORMAT_PLAIN, BLOCKS}, TN_NORM_RMS, 0, 0, 0, 0, ANY},
    {"plain second", {BLOCKS, TN_FORMAT_PLAIN}, TN_NORM_RMS, 0, 0, 0, 0, ANY},
};

/* ---- the layer's tensors --------------------------------------------------------------------- */

typedef struct gradients {
    tn_tensor dx, dgamma, dbeta, dweight[2], dbias[2];
} gradients;

typedef struct layer {
    const setup *of;
    tn_parallel parallel;
    tn_scope io, saved_scope, op;
    int64_t own, total;
    tn_tensor x, dy, added, gamma, beta, weight[2], bias[2];
    int64_t features; /* w1's rows */
} layer;

static tn_tensor numbers(const layer *l, tn_dtype dtype, int64_t rows, int64_t cols,
                         uint32_t seed) {
    parallel_matrix matrix = parallel_numbers(rows, cols, seed);
    tn_tensor tensor = parallel_tensor(&all, l->io, dtype, &matrix);
    parallel_free(&matrix);
    return tensor;
}

static tn_tensor weight_of(const layer *l, int i, int64_t rows, int64_t cols) {
    parallel_matrix matrix = parallel_numbers(rows, cols, 50u + (uint32_t)(2 * all.rank + i));
    tn_tensor tensor = parallel_weight(&all, l->io, l->of->format[i], &matrix);
    parallel_free(&matrix);
    return tensor;
}

/* is_mlp 0: dy is of all rows and this rank's part of w1's. */
static layer open_layer(const setup *of, int is_mlp) {
    const uint32_t seed = 10u * (uint32_t)all.rank;
    layer l = {.of = of, .parallel = TN_PARALLEL_INIT};
    l.io = parallel_scope(&all, TN_SCOPE_STEP, "io");
    l.saved_scope = parallel_scope(&all, TN_SCOPE_SAVED, "saved");
    l.op = parallel_scope(&all, TN_SCOPE_OP, "op");
    l.parallel.sequence.comm = all.comm, l.parallel.sequence.rows = of->rows;
    l.parallel.stream = of->side ? all.other : NULL;
    l.parallel.keep_gathered = of->keep_gathered;
    l.own = of->rows[all.rank], l.total = parallel_first(of->rows, all.count);
    l.features = of->gated && is_mlp ? 2 * F : F;
    l.x = numbers(&l, TN_BF16, l.own, K, 1 + seed);
    l.added = numbers(&l, TN_BF16, l.own, K, 2 + seed);
    l.dy = is_mlp ? numbers(&l, TN_BF16, l.own, N, 3 + seed)
                  : numbers(&l, TN_BF16, l.total, F, 3 + seed);
    l.gamma = numbers(&l, TN_FP32, 1, K, 4);
    if (of->norm == TN_NORM_LAYER) l.beta = numbers(&l, TN_FP32, 1, K, 5);
    l.weight[0] = weight_of(&l, 0, l.features, K);
    l.weight[1] = weight_of(&l, 1, N, F);
    l.bias[0] = numbers(&l, TN_FP32, 1, l.features, 6 + seed);
    l.bias[1] = numbers(&l, TN_FP32, 1, N, 7);
    return l;
}

static void close_layer(layer *l) {
    assert_int_equal(test_ledger(l->op).tensors, 0);
    assert_int_equal(test_ledger(l->saved_scope).tensors, 0);
    ranks_wait(&all);
    EXPECT_OK(tn_scope_close(l->op));
    EXPECT_OK(tn_scope_close(l->saved_scope));
    EXPECT_OK(tn_scope_close(l->io));
}

static gradients make_gradients(const layer *l) {
    gradients g = {.dx = test_plain(l->io, TN_BF16, l->own, K)};
    g.dgamma = test_plain(l->io, TN_FP32, 1, K);
    if (l->of->norm == TN_NORM_LAYER) g.dbeta = test_plain(l->io, TN_FP32, 1, K);
    g.dweight[0] = test_plain(l->io, TN_FP32, l->features, K);
    g.dweight[1] = test_plain(l->io, TN_FP32, N, F);
    g.dbias[0] = test_plain(l->io, TN_FP32, 1, l->features);
    g.dbias[1] = test_plain(l->io, TN_FP32, 1, N);
    return g;
}

static tn_layer_common common_of(const layer *l) {
    tn_layer_common common = TN_LAYER_COMMON_INIT;
    common.scope = l->op, common.saved_scope = l->saved_scope;
    common.recompute = l->of->recompute;
    return common;
}

static tn_layer_weight layer_weight(const layer *l, int i) {
    tn_layer_weight w = TN_LAYER_WEIGHT_INIT;
    w.weight = l->weight[i], w.bias = l->bias[i];
    return w;
}

static tn_layer_norm layer_norm(const layer *l) {
    tn_layer_norm norm = TN_LAYER_NORM_INIT;
    norm.norm = l->of->norm, norm.x = l->x, norm.gamma = l->gamma, norm.beta = l->beta;
    return norm;
}

static tn_layer_norm_gradient norm_gradient(const layer *l, const gradients *g) {
    tn_layer_norm_gradient norm = TN_LAYER_NORM_GRADIENT_INIT;
    norm.norm = l->of->norm, norm.x = l->x, norm.gamma = l->gamma, norm.beta = l->beta;
    norm.added = l->added;
    norm.dx = g->dx, norm.dgamma = g->dgamma, norm.dbeta = g->dbeta;
    return norm;
}

static tn_layer_gradient layer_gradient(const gradients *g, int i) {
    tn_layer_gradient gradient = TN_LAYER_GRADIENT_INIT;
    gradient.dweight = g->dweight[i], gradient.dbias = g->dbias[i];
    return gradient;
}

/* ---- step by step ---------------------------------------------------------------------------- */

typedef struct steps {
    tn_tensor normed, mean, rstd, hidden, activated, y;
    gradients g;
} steps;

static void norm_step(const layer *l, steps *s) {
    tn_norm_args args = TN_NORM_ARGS_INIT;
    s->normed = test_plain(l->io, TN_BF16, l->own, K);
    s->rstd = test_plain(l->io, TN_FP32, l->own, 1);
    if (l->of->norm == TN_NORM_LAYER) s->mean = test_plain(l->io, TN_FP32, l->own, 1);
    args.norm = l->of->norm, args.x = l->x, args.gamma = l->gamma, args.beta = l->beta;
    args.y = s->normed, args.mean = s->mean, args.rstd = s->rstd, args.scope = l->op;
    EXPECT_OK(tn_norm_forward(&args, all.stream));
}

static void linear_step(const layer *l, int i, tn_tensor x, tn_tensor y, tn_linear_saved *saved) {
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = x, args.w = layer_weight(l, i), args.y = y, args.common = common_of(l);
    EXPECT_OK(i == 0 ? tn_column_linear_forward(&l->parallel, &args, saved, all.stream)
                     : tn_row_linear_forward(&l->parallel, &args, saved, all.stream));
}

static void linear_back_step(const layer *l, int i, const steps *s, tn_tensor x, tn_tensor dy,
                             tn_tensor dx, tn_linear_saved *saved) {
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    args.x = x, args.dy = dy, args.dx = dx, args.w = layer_weight(l, i);
    args.gradient = layer_gradient(&s->g, i), args.common = common_of(l);
    EXPECT_OK(i == 0 ? tn_column_linear_backward(&l->parallel, &args, saved, NULL, all.stream)
                     : tn_row_linear_backward(&l->parallel, &args, saved, NULL, all.stream));
}

static void sum_over_ranks(tn_tensor sums) {
    tn_plane_view view;
    tn_lease lease;
    if (sums.value == 0) return;
    EXPECT_OK(tn_lease_begin(sums, TN_PLANE_DATA, TN_UPDATE, all.stream, &lease, &view));
    EXPECT_OK(tn_all_reduce(all.comm, view.data, view.data, K, TN_FP32, TN_REDUCE_SUM, all.stream));
    EXPECT_OK(tn_lease_end(lease));
}

static void norm_back_step(const layer *l, const steps *s, tn_tensor dn) {
    tn_norm_backward_args args = TN_NORM_BACKWARD_ARGS_INIT;
    args.norm = l->of->norm, args.dy = dn, args.x = l->x, args.mean = s->mean;
    args.rstd = s->rstd, args.gamma = l->gamma, args.added = l->added;
    args.dx = s->g.dx, args.dgamma = s->g.dgamma, args.dbeta = s->g.dbeta, args.scope = l->op;
    EXPECT_OK(tn_norm_backward(&args, all.stream));
    sum_over_ranks(s->g.dgamma);
    sum_over_ranks(s->g.dbeta);
}

static steps norm_linear_steps(const layer *l) {
    steps s = {.g = make_gradients(l), .y = test_plain(l->io, TN_BF16, l->total, F)};
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    tn_tensor dn = test_plain(l->io, TN_BF16, l->own, K);
    norm_step(l, &s);
    linear_step(l, 0, s.normed, s.y, &saved);
    linear_back_step(l, 0, &s, s.normed, l->dy, dn, &saved);
    norm_back_step(l, &s, dn);
    return s;
}

static void activation_step(const layer *l, tn_tensor dy, steps *s, tn_tensor dx) {
    tn_activation_args forward = TN_ACTIVATION_ARGS_INIT;
    tn_activation_backward_args backward = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    forward.activation = backward.activation = TN_ACTIVATION_SILU;
    forward.gated = backward.gated = l->of->gated;
    forward.x = backward.x = s->hidden, forward.y = s->activated;
    backward.dy = dy, backward.dx = dx, backward.scope = l->op;
    EXPECT_OK(dy.value ? tn_activation_backward(&backward, all.stream)
                       : tn_activation_forward(&forward, all.stream));
}

static steps mlp_steps(const layer *l) {
    steps s = {.g = make_gradients(l), .y = test_plain(l->io, TN_BF16, l->own, N)};
    tn_linear_saved saved[2] = {TN_LINEAR_SAVED_INIT, TN_LINEAR_SAVED_INIT};
    tn_tensor dn = test_plain(l->io, TN_BF16, l->own, K);
    tn_tensor da = test_plain(l->io, TN_BF16, l->total, F);
    tn_tensor dh = test_plain(l->io, TN_BF16, l->total, l->features);
    s.hidden = test_plain(l->io, TN_BF16, l->total, l->features);
    s.activated = test_plain(l->io, TN_BF16, l->total, F);
    norm_step(l, &s);
    linear_step(l, 0, s.normed, s.hidden, &saved[0]);
    activation_step(l, (tn_tensor){0}, &s, (tn_tensor){0});
    linear_step(l, 1, s.activated, s.y, &saved[1]);
    linear_back_step(l, 1, &s, s.activated, l->dy, da, &saved[1]);
    activation_step(l, da, &s, dh);
    linear_back_step(l, 0, &s, s.normed, dh, dn, &saved[0]);
    norm_back_step(l, &s, dn);
    return s;
}

/* ---- comparisons ----------------------------------------------------------------------------- */

static void expect_same(const char *what, tn_tensor actual, tn_tensor expected) {
    if (expected.value == 0) return;
    parallel_expect(&all, what, actual, parallel_fetch(&all, expected));
}

static void expect_gradients(const char *what, const gradients *actual, const gradients *expected,
                             int products) {
    expect_same(what, actual->dx, expected->dx);
    expect_same("dgamma", actual->dgamma, expected->dgamma);
    expect_same("dbeta", actual->dbeta, expected->dbeta);
    for (int i = 0; i < products; i++) {
        expect_same(i ? "dweight 2" : "dweight 1", actual->dweight[i], expected->dweight[i]);
        expect_same(i ? "dbias 2" : "dbias 1", actual->dbias[i], expected->dbias[i]);
    }
}

static void do_late(const layer *l, tn_delayed_gradient *delayed) {
    if (delayed->dweight.value) EXPECT_OK(tn_weight_gradient(delayed, l->op, all.stream));
}

static void norm_linear(const setup *of) {
    layer l = open_layer(of, 0);
    const steps expected = norm_linear_steps(&l);
    tn_norm_linear_forward_args forward = TN_NORM_LINEAR_FORWARD_ARGS_INIT;
    tn_norm_linear_backward_args backward = TN_NORM_LINEAR_BACKWARD_ARGS_INIT;
    tn_norm_linear_saved saved = TN_NORM_LINEAR_SAVED_INIT;
    forward.norm = layer_norm(&l), forward.w = layer_weight(&l, 0);
    forward.y = test_plain(l.io, TN_BF16, l.total, F), forward.common = common_of(&l);
    backward.dy = l.dy, backward.w = forward.w, backward.common = forward.common;
    for (int delay = 0; delay < 2; delay++) {
        const gradients g = make_gradients(&l);
        tn_delayed_gradient delayed = TN_DELAYED_GRADIENT_INIT;
        backward.norm = norm_gradient(&l, &g), backward.gradient = layer_gradient(&g, 0);
        backward.gradient.delay = delay;
        EXPECT_OK(tn_column_norm_linear_forward(&l.parallel, &forward, &saved, all.stream));
        EXPECT_OK(
            tn_column_norm_linear_backward(&l.parallel, &backward, &saved, &delayed, all.stream));
        assert_int_equal(delayed.dweight.value != 0, delay);
        do_late(&l, &delayed);
        expect_same(of->what, forward.y, expected.y);
        expect_gradients(of->what, &g, &expected.g, 1);
    }
    close_layer(&l);
}

/* is_layer: on one rank, the layer of tenure_layers.h. delay: bits, of w1's and of w2's. */
static void mlp_back(const layer *l, const steps *expected, tn_norm_mlp_backward_args *backward,
                     tn_norm_mlp_saved *saved, int is_layer, int delay) {
    const gradients g = make_gradients(l);
    tn_delayed_gradient delayed[2] = {TN_DELAYED_GRADIENT_INIT, TN_DELAYED_GRADIENT_INIT};
    backward->norm = norm_gradient(l, &g);
    backward->gradient1 = layer_gradient(&g, 0), backward->gradient2 = layer_gradient(&g, 1);
    backward->gradient1.delay = delay & 1, backward->gradient2.delay = delay >> 1;
    EXPECT_OK(is_layer ? tn_norm_mlp_backward(backward, saved, delayed, all.stream)
                       : tn_parallel_norm_mlp_backward(&l->parallel, backward, saved, delayed,
                                                       all.stream));
    for (int i = 0; i < 2; i++) {
        assert_int_equal(delayed[i].dweight.value != 0, delay >> i & 1);
        do_late(l, &delayed[i]);
    }
    expect_gradients(l->of->what, &g, &expected->g, 2);
}

static void mlp(const setup *of, int is_layer) {
    layer l = open_layer(of, 1);
    const steps expected = mlp_steps(&l);
    tn_norm_mlp_forward_args forward = TN_NORM_MLP_FORWARD_ARGS_INIT;
    tn_norm_mlp_backward_args backward = TN_NORM_MLP_BACKWARD_ARGS_INIT;
    tn_norm_mlp_saved saved = TN_NORM_MLP_SAVED_INIT;
    forward.norm = layer_norm(&l);
    forward.w1 = layer_weight(&l, 0), forward.w2 = layer_weight(&l, 1);
    forward.activation = TN_ACTIVATION_SILU, forward.gated = of->gated;
    forward.y = test_plain(l.io, TN_BF16, l.own, N), forward.common = common_of(&l);
    backward.dy = l.dy, backward.w1 = forward.w1, backward.w2 = forward.w2;
    backward.activation = forward.activation, backward.gated = of->gated;
    backward.common = forward.common;
    for (int delay = 0; delay < 4; delay++) {
        EXPECT_OK(is_layer
                      ? tn_norm_mlp_forward(&forward, &saved, all.stream)
                      : tn_parallel_norm_mlp_forward(&l.parallel, &forward, &saved, all.stream));
        expect_same(of->what, forward.y, expected.y);
        mlp_back(&l, &expected, &backward, &saved, is_layer, delay);
    }
    close_layer(&l);
}

static void norm_linear_is_its_steps(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++)
        norm_linear(&setups[i]);
}

static void norm_mlp_is_its_steps(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++)
        mlp(&setups[i], 0);
}

static void one_rank_has_the_bits_of_the_layer(void **state) {
    (void)state;
    if (all.count == 1) mlp(&setups[1], 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_linear_is_its_steps),
        cmocka_unit_test(norm_mlp_is_its_steps),
        cmocka_unit_test(one_rank_has_the_bits_of_the_layer),
    };
    return RANKS_RUN(&all, tests);
}
