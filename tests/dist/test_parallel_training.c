/* Training over tensor-parallel ranks with sequence-parallel activations, and with data-parallel
 * groups of them, against one rank: 20 steps of FP8 layers with AdamW, gradients accumulated over
 * micro-batches, every other step recomputed, one weight frozen half-way.
 *
 * Losses and weights are equal bit for bit. The order of sums allows it: each rank's part of the
 * features is one block of 128, whose product one rank adds up in the order of the ranks as well
 * (its scales are powers of two), and rows are whole tiles but for the last rank's. Gamma is
 * trained on up to two tensor ranks: of more tiles tn_norm_backward has another order.
 */
#include "parallel_support.h"

#include <string.h>

enum { H = 32, BLOCK = 128, LAST_ROWS = 40, LAYERS_MAX = 2, STEPS = 20 };

static rank_fixture all;

/* One rank's part of the model, or all of it. */
typedef struct model {
    tn_comm *tensor, *data;                  /* NULL: the whole model */
    int layers, ranks, rank, batches, batch; /* of the tensor group; micro-batches of a step, and
                                              * the one that this data rank has, or -1: all */
    int64_t total, own, features;
    int64_t rows[PARALLEL_RANKS_MAX];
    tn_scope scope, saved_scope, op;
    tn_tensor master[LAYERS_MAX][2], weight[LAYERS_MAX][2], gradient[LAYERS_MAX][2];
    tn_tensor first[LAYERS_MAX][2], second[LAYERS_MAX][2];
    tn_tensor gamma[LAYERS_MAX], dgamma[LAYERS_MAX], gamma_first[LAYERS_MAX],
        gamma_second[LAYERS_MAX], step;
    double losses[STEPS];
} model;

static tn_tensor zeros(const model *m, int64_t rows, int64_t cols) {
    parallel_matrix matrix = parallel_zeros(rows, cols);
    tn_tensor tensor = parallel_tensor(&all, m->scope, TN_FP32, &matrix);
    parallel_free(&matrix);
    return tensor;
}

static void make_weight(model *m, int layer, int i) {
    const int64_t whole = (int64_t)BLOCK * m->ranks, at = m->tensor ? m->rank * BLOCK : 0;
    parallel_matrix w = i ? parallel_numbers(H, whole, 20u + (uint32_t)layer)
                          : parallel_numbers(whole, H, 10u + (uint32_t)layer);
    parallel_matrix part =
        i ? parallel_part(&w, 0, H, at, m->features) : parallel_part(&w, at, m->features, 0, H);
    m->master[layer][i] = parallel_tensor(&all, m->scope, TN_FP32, &part);
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = m->master[layer][i];
    args.dst = m->weight[layer][i] =
        test_fp8(m->scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, part.rows, part.cols);
    EXPECT_OK(tn_quantize(&args, all.stream));
    m->gradient[layer][i] = zeros(m, part.rows, part.cols);
    m->first[layer][i] = zeros(m, part.rows, part.cols);
    m->second[layer][i] = zeros(m, part.rows, part.cols);
    parallel_free(&w), parallel_free(&part);
}

static void make_gamma(model *m, int layer) {
    parallel_matrix ones = parallel_zeros(1, H);
    for (int i = 0; i < H; i++)
        ones.at[i] = 1.0f;
    m->gamma[layer] = parallel_tensor(&all, m->scope, TN_FP32, &ones);
    m->dgamma[layer] = zeros(m, 1, H);
    m->gamma_first[layer] = zeros(m, 1, H), m->gamma_second[layer] = zeros(m, 1, H);
    parallel_free(&ones);
}

static model make_model(tn_comm *tensor, tn_comm *data, int ranks, int layers, int batches) {
    model m = {.tensor = tensor, .data = data, .layers = layers, .ranks = ranks, .batch = -1};
    m.batches = batches;
    m.rank = tensor ? tn_comm_rank(tensor) : 0;
    if (data) m.batch = tn_comm_rank(data);
    for (int r = 0; r < ranks; r++)
        m.rows[r] = r == ranks - 1 ? LAST_ROWS : BLOCK;
    m.total = parallel_first(m.rows, ranks);
    m.own = tensor ? m.rows[m.rank] : m.total;
    m.features = tensor ? BLOCK : (int64_t)BLOCK * ranks;
    m.scope = parallel_scope(&all, TN_SCOPE_MODEL, "model");
    m.saved_scope = parallel_scope(&all, TN_SCOPE_SAVED, "saved");
    m.op = parallel_scope(&all, TN_SCOPE_OP, "op");
    for (int i = 0; i < layers; i++) {
        make_weight(&m, i, 0), make_weight(&m, i, 1);
        make_gamma(&m, i);
    }
    m.step = zeros(&m, 1, 3);
    return m;
}

static void end_model(model *m) {
    ranks_wait(&all);
    assert_int_equal(test_ledger(m->op).tensors, 0);
    assert_int_equal(test_ledger(m->saved_scope).tensors, 0);
    EXPECT_OK(tn_scope_close(m->op));
    EXPECT_OK(tn_scope_close(m->saved_scope));
    EXPECT_OK(tn_scope_close(m->scope));
}

static int trains_gamma(const model *m) { return m->ranks <= 2; }

/* ---- a micro-batch --------------------------------------------------------------------------- */

static tn_tensor rows_of(const model *m, tn_scope scope, uint32_t seed) {
    parallel_matrix whole = parallel_numbers(m->total, H, seed);
    parallel_matrix own =
        parallel_part(&whole, m->tensor ? parallel_first(m->rows, m->rank) : 0, m->own, 0, H);
    tn_tensor tensor = parallel_tensor(&all, scope, TN_BF16, &own);
    parallel_free(&whole), parallel_free(&own);
    return tensor;
}

typedef struct activations {
    tn_tensor x[LAYERS_MAX + 1];
    tn_norm_mlp_saved saved[LAYERS_MAX];
} activations;

static tn_parallel parallel_of(const model *m) {
    tn_parallel parallel = TN_PARALLEL_INIT;
    parallel.sequence.comm = m->tensor, parallel.sequence.rows = m->rows;
    parallel.stream = all.other;
    return parallel;
}

static tn_layer_common common_of(const model *m, int recompute) {
    tn_layer_common common = TN_LAYER_COMMON_INIT;
    common.scope = m->op, common.saved_scope = m->saved_scope, common.recompute = recompute;
    return common;
}

static void forward(const model *m, tn_scope scope, int recompute, activations *a) {
    const tn_parallel parallel = parallel_of(m);
    for (int i = 0; i < m->layers; i++) {
        tn_norm_mlp_forward_args args = TN_NORM_MLP_FORWARD_ARGS_INIT;
        args.norm.x = a->x[i], args.norm.gamma = m->gamma[i];
        args.w1.weight = m->weight[i][0], args.w2.weight = m->weight[i][1];
        args.y = a->x[i + 1] = test_plain(scope, TN_BF16, m->own, H);
        args.common = common_of(m, recompute);
        a->saved[i] = (tn_norm_mlp_saved)TN_NORM_MLP_SAVED_INIT;
        EXPECT_OK(m->tensor
                      ? tn_parallel_norm_mlp_forward(&parallel, &args, &a->saved[i], all.stream)
                      : tn_norm_mlp_forward(&args, &a->saved[i], all.stream));
    }
}

static void backward(const model *m, tn_scope scope, int recompute, int is_frozen, int accumulate,
                     tn_tensor dy, activations *a) {
    const tn_parallel parallel = parallel_of(m);
    for (int i = m->layers; i-- > 0;) {
        tn_norm_mlp_backward_args args = TN_NORM_MLP_BACKWARD_ARGS_INIT;
        args.dy = dy, args.norm.x = a->x[i], args.norm.gamma = m->gamma[i];
        args.w1.weight = m->weight[i][0], args.w2.weight = m->weight[i][1];
        args.norm.dx = test_plain(scope, TN_BF16, m->own, H);
        if (trains_gamma(m)) args.norm.dgamma = m->dgamma[i];
        args.norm.accumulate = args.gradient1.accumulate = args.gradient2.accumulate = accumulate;
        if (!is_frozen) args.gradient1.dweight = m->gradient[i][0];
        args.gradient2.dweight = m->gradient[i][1];
        args.common = common_of(m, recompute);
        EXPECT_OK(m->tensor
                      ? tn_parallel_norm_mlp_backward(&parallel, &args, &a->saved[i], all.stream)
                      : tn_norm_mlp_backward(&args, &a->saved[i], NULL, all.stream));
        dy = args.norm.dx;
    }
}

/* Half the sum of squares of y - target over all rows, on the host; dy = y - target. */
static double loss_of(const model *m, tn_scope scope, tn_tensor y, uint32_t seed, tn_tensor *dy) {
    tn_tensor target = rows_of(m, scope, seed), whole = *dy = test_plain(scope, TN_BF16, m->own, H);
    tn_convert_args copy = TN_CONVERT_ARGS_INIT;
    tn_axpy_args minus = TN_AXPY_ARGS_INIT;
    double loss = 0;
    copy.x = y, copy.y = *dy;
    minus.x = target, minus.y = *dy, minus.alpha = -1.0f;
    EXPECT_OK(tn_convert(&copy, all.stream));
    EXPECT_OK(tn_axpy(&minus, all.stream));
    if (m->tensor) {
        tn_sequence_gather_args gather = TN_SEQUENCE_GATHER_ARGS_INIT;
        gather.sequence.comm = m->tensor, gather.sequence.rows = m->rows;
        gather.src = *dy, gather.plane = TN_PLANE_DATA, gather.scope = m->op;
        gather.dst = whole = test_plain(scope, TN_BF16, m->total, H);
        EXPECT_OK(tn_sequence_gather(&gather, all.other));
    }
    parallel_matrix numbers = parallel_fetch(&all, whole);
    for (int64_t i = 0; i < numbers.rows * H; i++)
        loss += 0.5 * (double)numbers.at[i] * (double)numbers.at[i];
    parallel_free(&numbers);
    return loss;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void sum_over_data(const model *m, tn_tensor gradient) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_plane_view view;
    tn_lease lease;
    if (!m->data) return;
    EXPECT_OK(tn_tensor_info_get(gradient, &info));
    EXPECT_OK(tn_lease_begin(gradient, TN_PLANE_DATA, TN_UPDATE, all.stream, &lease, &view));
    EXPECT_OK(tn_all_reduce(m->data, view.data, view.data, (size_t)(info.rows * info.cols), TN_FP32,
                            TN_REDUCE_SUM, all.stream));
    EXPECT_OK(tn_lease_end(lease));
}

static void update(const model *m, tn_tensor master, tn_tensor gradient, tn_tensor first,
                   tn_tensor second, tn_tensor weight) {
    tn_adamw_args args = TN_ADAMW_ARGS_INIT;
    sum_over_data(m, gradient);
    args.master = master, args.gradient = gradient, args.first = first, args.second = second;
    args.step = m->step, args.weight = weight, args.learning_rate = 2e-3f;
    EXPECT_OK(tn_adamw(&args, all.stream));
}

static void update_all(const model *m, int is_frozen) {
    tn_adamw_advance_args advance = TN_ADAMW_ADVANCE_ARGS_INIT;
    advance.step = m->step;
    EXPECT_OK(tn_adamw_advance(&advance, all.stream));
    for (int i = 0; i < m->layers; i++) {
        for (int k = is_frozen ? 1 : 0; k < 2; k++)
            update(m, m->master[i][k], m->gradient[i][k], m->first[i][k], m->second[i][k],
                   m->weight[i][k]);
        if (trains_gamma(m))
            update(m, m->gamma[i], m->dgamma[i], m->gamma_first[i], m->gamma_second[i],
                   (tn_tensor){0});
    }
}

static void train(model *m) {
    for (int s = 0; s < STEPS; s++) {
        const int recompute = s % 2, is_frozen = s >= STEPS / 2;
        int done = 0;
        for (int i = 0; i < m->layers; i++)
            EXPECT_OK(tn_tensor_set_frozen(m->weight[i][0], is_frozen));
        for (int b = 0; b < m->batches; b++) {
            const uint32_t seed = 1000u + (uint32_t)(10 * s + 2 * b);
            tn_scope scope = parallel_scope(&all, TN_SCOPE_STEP, "micro-batch");
            activations a = {.x = {rows_of(m, scope, seed)}};
            tn_tensor dy;
            if (m->batch < 0 || m->batch == b) {
                forward(m, scope, recompute, &a);
                m->losses[s] += loss_of(m, scope, a.x[m->layers], seed + 1, &dy);
                backward(m, scope, recompute, is_frozen, done++ > 0, dy, &a);
            }
            ranks_wait(&all);
            EXPECT_OK(tn_scope_close(scope));
        }
        update_all(m, is_frozen);
    }
}

/* ---- against one rank ------------------------------------------------------------------------ */

static void compare(model *m, const model *whole) {
    const int64_t at = (int64_t)m->rank * BLOCK;
    for (int s = 0; s < STEPS; s++) {
        if (m->batch >= 0) break; /* of its own micro-batch only */
        if (m->losses[s] != whole->losses[s])
            fail_msg("rank %d of %d: step %d has loss %.17g, expected %.17g", all.rank, all.count,
                     s, m->losses[s], whole->losses[s]);
    }
    for (int i = 0; i < m->layers; i++) {
        parallel_matrix w1 = parallel_fetch(&all, whole->master[i][0]);
        parallel_matrix w2 = parallel_fetch(&all, whole->master[i][1]);
        parallel_expect(&all, "w1", m->master[i][0], parallel_part(&w1, at, BLOCK, 0, H));
        parallel_expect(&all, "w2", m->master[i][1], parallel_part(&w2, 0, H, at, BLOCK));
        parallel_expect(&all, "gamma", m->gamma[i], parallel_fetch(&all, whole->gamma[i]));
        parallel_free(&w1), parallel_free(&w2);
    }
    assert_true(whole->losses[STEPS - 1] < whole->losses[0]);
}

static void train_and_compare(tn_comm *tensor, tn_comm *data, int ranks, int layers, int batches) {
    model m = make_model(tensor, data, ranks, layers, batches);
    train(&m);
    /* All ranks' losses are one; the weights of the first and the last are looked at. */
    if (all.rank == 0 || all.rank == all.count - 1) {
        model whole = make_model(NULL, NULL, ranks, layers, batches);
        train(&whole);
        compare(&m, &whole);
        end_model(&whole);
    }
    end_model(&m);
}

static void tensor_parallel_training_is_that_of_one_rank(void **state) {
    (void)state;
    const int is_small = all.count > 2;
    train_and_compare(all.comm, NULL, all.count, is_small ? 1 : LAYERS_MAX, is_small ? 1 : 2);
}

/* Two micro-batches of one rank are one on each of two data ranks. */
static void tensor_times_data_parallel_training_is_that_of_one_rank(void **state) {
    tn_comm *tensor, *data;
    (void)state;
    if (all.count % 2 != 0) return;
    const int ranks = all.count / 2;
    EXPECT_OK(tn_comm_split(all.comm, all.rank / ranks, all.rank, "tensor", &tensor));
    EXPECT_OK(tn_comm_split(all.comm, all.rank % ranks, all.rank, "data", &data));
    train_and_compare(tensor, data, ranks, 1, 2);
    EXPECT_OK(tn_comm_destroy(tensor));
    EXPECT_OK(tn_comm_destroy(data));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensor_parallel_training_is_that_of_one_rank),
        cmocka_unit_test(tensor_times_data_parallel_training_is_that_of_one_rank),
    };
    all = ranks_open();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    ranks_close(&all);
    return failed;
}
