/* The experts' layer on the host device: its values, gradients, and what is saved. */
#include "ops_planes_support.h"
#include "test_experts.h"

#include "tenure_cast.h"

#include <string.h>

static const test_experts_config fp8 = {TN_FORMAT_FP8_BLOCK_2D, TN_BF16, TN_SCALE_POW2, 0,
                                        TN_POLICY_KEEP,         0};

static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_TENSOR, TN_FORMAT_PLAIN};

/* ---- one expert alone ------------------------------------------------------------------------ */

/* A tensor of the expert's rows. */
static tn_tensor rows_of(const test_ops *ops, tn_tensor tensor, int e) {
    tn__matrix all = test_fetch_matrix(ops, tensor), part = all;
    size_t begins = (size_t)(test_experts_offsets[e] * all.cols) * tn_dtype_bytes(all.dtype);
    part.data = (unsigned char *)all.data + begins;
    part.rows = test_experts_offsets[e + 1] - test_experts_offsets[e];
    tn_tensor made = test_tensor_of(ops, ops->scope, &part);
    test_matrix_free(&all);
    return made;
}

/* As a GEMM takes it: quantized to both planes, in the weights' scale mode, or as it is. */
static tn_tensor operand_of(const test_ops *ops, const test_experts *t, tn_tensor tensor, int e,
                            tn_dtype dtype, tn_tensor history) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = rows_of(ops, tensor, e);
    if (t->config.format == TN_FORMAT_PLAIN) return args.src;
    EXPECT_OK(tn_tensor_info_get(args.src, &info));
    config.format = t->config.format, config.dtype = dtype;
    if (config.format == TN_FORMAT_FP8_BLOCK_2D) config.format = TN_FORMAT_FP8_BLOCK_1D;
    config.scale_mode = t->config.mode;
    config.rank = 2, config.shape[0] = info.rows, config.shape[1] = info.cols;
    EXPECT_OK(tn_tensor_create(ops->scope, &config, &args.dst));
    args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    if (t->config.has_scales) {
        args.scale = t->scale, args.amax_history = history;
        args.slot = e + (tensor.value == t->dy.value ? EXPERTS : 0);
    }
    EXPECT_OK(tn_quantize(&args, ops->stream));
    return args.dst;
}

static void expect_same(const test_ops *ops, tn_tensor actual, tn_tensor expected) {
    tn__matrix a = test_fetch_matrix(ops, actual), b = test_fetch_matrix(ops, expected);
    test_expect_same_matrix(&a, &b);
    test_matrix_free(&a), test_matrix_free(&b);
}

/* d [rows, cols] = the product, added to what `before` holds (or not), and is what `actual` is. */
static void expect_product(const test_ops *ops, tn_gemm_args args, tn_tensor before,
                           tn_tensor actual, int64_t rows, int64_t cols) {
    args.d = test_plain(ops->scope, TN_FP32, rows, cols);
    args.scope = ops->scope;
    if (args.accumulate) {
        tn__matrix values = test_fetch_matrix(ops, before);
        test_write(ops, args.d, values.data);
        test_matrix_free(&values);
    }
    EXPECT_OK(tn_gemm(&args, ops->stream));
    expect_same(ops, actual, args.d);
}

typedef struct before {
    tn_tensor dweights[EXPERTS], dbiases[EXPERTS];
    tn_tensor history; /* of amaxes, of delayed scaling */
} before;

static void expect_expert(const test_ops *ops, const test_experts *t, int e, const before *was,
                          int accumulate, tn_dtype gradient_dtype) {
    const int64_t rows = test_experts_offsets[e + 1] - test_experts_offsets[e];
    tn_tensor x = operand_of(ops, t, t->x, e, TN_E4M3, was->history);
    tn_tensor dy = operand_of(ops, t, t->dy, e, gradient_dtype, was->history);
    tn_gemm_args fprop = TN_GEMM_ARGS_INIT, dgrad = fprop, wgrad = fprop;
    fprop.a = x, fprop.b = t->weights[e], fprop.bias = t->biases[e];
    expect_product(ops, fprop, (tn_tensor){0}, rows_of(ops, t->y, e), rows, EXPERTS_N);
    dgrad.form = TN_GEMM_DGRAD, dgrad.a = dy, dgrad.b = t->weights[e];
    expect_product(ops, dgrad, (tn_tensor){0}, rows_of(ops, t->dx, e), rows, EXPERTS_K);
    wgrad.form = TN_GEMM_WGRAD, wgrad.a = dy, wgrad.b = x, wgrad.accumulate = accumulate;
    expect_product(ops, wgrad, was->dweights[e], t->dweights[e], EXPERTS_N, EXPERTS_K);
    tn_bias_gradient_args bias = TN_BIAS_GRADIENT_ARGS_INIT;
    bias.dy = rows_of(ops, t->dy, e), bias.accumulate = accumulate, bias.scope = ops->scope;
    bias.dbias = was->dbiases[e];
    EXPECT_OK(tn_bias_gradient(&bias, ops->stream));
    expect_same(ops, t->dbiases[e], bias.dbias);
}

/* Gradients of before, and a copy of them to compare with. */
static before fill_gradients(const test_ops *ops, const test_experts *t) {
    static const float nothing[EXPERTS_HISTORY * EXPERTS_SLOTS];
    before was = {.history = {0}};
    if (t->config.has_scales) {
        was.history = test_plain(ops->scope, TN_FP32, EXPERTS_HISTORY, EXPERTS_SLOTS);
        test_write(ops, was.history, nothing);
    }
    for (int e = 0; e < EXPERTS; e++) {
        was.dweights[e] = test_plain(ops->scope, TN_FP32, EXPERTS_N, EXPERTS_K);
        was.dbiases[e] = test_plain(ops->scope, TN_FP32, 1, EXPERTS_N);
        test_experts_fill(ops, was.dweights[e], 300 + (uint32_t)e);
        test_experts_fill(ops, was.dbiases[e], 400 + (uint32_t)e);
        test_experts_fill(ops, t->dweights[e], 300 + (uint32_t)e);
        test_experts_fill(ops, t->dbiases[e], 400 + (uint32_t)e);
    }
    return was;
}

static void step(const test_ops *ops, const test_experts *t, int accumulate,
                 tn_dtype gradient_dtype) {
    tn_grouped_saved saved = TN_GROUPED_SAVED_INIT;
    tn_grouped_linear_forward_args forward = test_experts_forward(t, 1);
    tn_grouped_linear_backward_args backward = test_experts_backward(t);
    backward.accumulate = accumulate, backward.gradient_dtype = gradient_dtype;
    EXPECT_OK(tn_grouped_linear_forward(&forward, &saved, ops->stream));
    EXPECT_OK(tn_grouped_linear_backward(&backward, &saved, NULL, ops->stream));
}

/* Of every group with rows, of x and of dy; of the one without, nothing. */
static void expect_history(const test_ops *ops, const test_experts *t, tn_tensor expected) {
    float amax[EXPERTS_HISTORY * EXPERTS_SLOTS];
    expect_same(ops, t->history, expected);
    test_read(ops, t->history, amax);
    for (int i = 0; i < EXPERTS_SLOTS; i++)
        assert_true(i % EXPERTS == 1 ? amax[i] == 0.0f : amax[i] > 0.0f);
}

static void each_expert_is_a_linear_layer_of_its_own(void **state) {
    static const test_experts_config configs[] = {
        {TN_FORMAT_FP8_BLOCK_2D, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0},
        {TN_FORMAT_FP8_BLOCK_2D, TN_FP32, TN_SCALE_FP32, 0, TN_POLICY_KEEP, 0},
        {TN_FORMAT_FP8_TENSOR, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0},
        {TN_FORMAT_FP8_TENSOR, TN_FP32, TN_SCALE_FP32, 0, TN_POLICY_SCRATCH, 0},
        {TN_FORMAT_FP8_TENSOR, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 1},
        {TN_FORMAT_PLAIN, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0},
        {TN_FORMAT_PLAIN, TN_FP32, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0}};
    enum { CONFIGS = sizeof configs / sizeof *configs };
    (void)state;
    for (int i = 0; i < CONFIGS * 3; i++) {
        test_ops ops = test_ops_open_host();
        test_experts t = test_experts_open(&ops, &configs[i % CONFIGS]);
        const int accumulate = i / CONFIGS == 1;
        const tn_dtype gradient_dtype = i / CONFIGS == 2 ? TN_E5M2 : TN_E4M3;
        before was = fill_gradients(&ops, &t);
        step(&ops, &t, accumulate, gradient_dtype);
        for (int e = 0; e < EXPERTS; e++)
            expect_expert(&ops, &t, e, &was, accumulate, gradient_dtype);
        if (t.config.has_scales) expect_history(&ops, &t, was.history);
        test_ops_close_host(&ops);
    }
}

/* Rows of y and dx that no expert has keep their bytes. */
static void rows_behind_the_last_expert_are_left_alone(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    test_experts t = test_experts_open(&ops, &fp8);
    test_experts_fill(&ops, t.y, 7), test_experts_fill(&ops, t.dx, 8);
    step(&ops, &t, 0, TN_E4M3);
    tn__matrix y = test_fetch_matrix(&ops, t.y), dx = test_fetch_matrix(&ops, t.dx);
    for (int64_t i = (int64_t)EXPERTS_ROWS * EXPERTS_N; i < y.rows * y.cols; i++)
        assert_true(((float *)y.data)[i] == test_experts_value(7, i));
    for (int64_t i = (int64_t)EXPERTS_ROWS * EXPERTS_K; i < dx.rows * dx.cols; i++)
        assert_true(((float *)dx.data)[i] == test_experts_value(8, i));
    test_matrix_free(&y), test_matrix_free(&dx);
    test_ops_close_host(&ops);
}

/* ---- finite differences ---------------------------------------------------------------------- */

/* sum of dy * y in double. */
static double loss(const test_ops *ops, const test_experts *t) {
    tn_grouped_linear_forward_args forward = test_experts_forward(t, 0);
    EXPECT_OK(tn_grouped_linear_forward(&forward, NULL, ops->stream));
    tn__matrix y = test_fetch_matrix(ops, t->y), dy = test_fetch_matrix(ops, t->dy);
    double sum = 0.0;
    for (int64_t i = 0; i < (int64_t)EXPERTS_ROWS * EXPERTS_N; i++)
        sum += (double)((float *)y.data)[i] * (double)((float *)dy.data)[i];
    test_matrix_free(&y), test_matrix_free(&dy);
    return sum;
}

/* The loss is linear in one element, and every sum here is exact: so the difference is, too. */
static void expect_difference(const test_ops *ops, const test_experts *t, tn_tensor of,
                              tn_tensor gradient, int64_t i) {
    tn__matrix values = test_fetch_matrix(ops, of), got = test_fetch_matrix(ops, gradient);
    float *element = (float *)values.data + i, value = *element;
    *element = value + 1.0f;
    test_write(ops, of, values.data);
    double above = loss(ops, t);
    *element = value - 1.0f;
    test_write(ops, of, values.data);
    double below = loss(ops, t);
    *element = value;
    test_write(ops, of, values.data);
    assert_true((double)((float *)got.data)[i] == (above - below) / 2.0);
    test_matrix_free(&values), test_matrix_free(&got);
}

static void gradients_are_the_finite_differences(void **state) {
    static const test_experts_config plain = {TN_FORMAT_PLAIN, TN_FP32, TN_SCALE_POW2, 0,
                                              TN_POLICY_KEEP,  0};
    (void)state;
    test_ops ops = test_ops_open_host();
    test_experts t = test_experts_open(&ops, &plain);
    step(&ops, &t, 0, TN_E4M3);
    for (int64_t i = 0; i < (int64_t)EXPERTS_ROWS * EXPERTS_K; i += 317)
        expect_difference(&ops, &t, t.x, t.dx, i);
    for (int e = 0; e < EXPERTS; e++) {
        for (int64_t i = e; i < (int64_t)EXPERTS_N * EXPERTS_K; i += 379)
            expect_difference(&ops, &t, t.weights[e], t.dweights[e], i);
        for (int64_t i = e; i < EXPERTS_N; i += 9)
            expect_difference(&ops, &t, t.biases[e], t.dbiases[e], i);
    }
    test_ops_close_host(&ops);
}

/* ---- experts without rows -------------------------------------------------------------------- */

static int is_filled_with(const test_ops *ops, tn_tensor tensor, uint32_t seed) {
    tn__matrix values = test_fetch_matrix(ops, tensor);
    int is = 1;
    for (int64_t i = 0; i < values.rows * values.cols; i++)
        is = is && ((float *)values.data)[i] == (seed ? test_experts_value(seed, i) : 0.0f);
    test_matrix_free(&values);
    return is;
}

static void an_expert_without_rows_has_zero_gradients_or_keeps_them(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        test_experts_config config = fp8;
        config.format = formats[i];
        test_ops ops = test_ops_open_host();
        test_experts t = test_experts_open(&ops, &config);
        (void)fill_gradients(&ops, &t);
        step(&ops, &t, 1, TN_E4M3);
        assert_true(is_filled_with(&ops, t.dweights[1], 301));
        assert_true(is_filled_with(&ops, t.dbiases[1], 401));
        assert_false(is_filled_with(&ops, t.dweights[0], 300));
        step(&ops, &t, 0, TN_E4M3);
        assert_true(is_filled_with(&ops, t.dweights[1], 0));
        assert_true(is_filled_with(&ops, t.dbiases[1], 0));
        assert_false(is_filled_with(&ops, t.dweights[4], 0));
        test_ops_close_host(&ops);
    }
}

/* Its weight is not read: no plane of it need be there, and none is derived. */
static void a_weight_without_rows_is_not_read(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    test_experts t = test_experts_open(&ops, &fp8);
    t.weights[1] = test_weight(ops.scope, EXPERTS_N, EXPERTS_K, 0, TN_POLICY_KEEP);
    step(&ops, &t, 0, TN_E4M3);
    assert_int_equal(test_state(t.weights[1], TN_PLANE_ROW), TN_PLANE_ABSENT);
    assert_int_equal(test_state(t.weights[1], TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_int_equal(test_state(t.weights[0], TN_PLANE_COL), TN_PLANE_VALID);
    test_ops_close_host(&ops);
}

static void no_experts_and_no_rows_are_success(void **state) {
    static const int64_t none[EXPERTS + 1];
    (void)state;
    test_ops ops = test_ops_open_host();
    test_experts t = test_experts_open(&ops, &fp8);
    test_experts_fill(&ops, t.y, 7);
    t.experts.groups = 0;
    step(&ops, &t, 0, TN_E4M3);
    assert_true(is_filled_with(&ops, t.y, 7));
    t.experts.groups = EXPERTS, t.experts.offsets = none;
    test_write(&ops, t.experts.device_offsets, none);
    step(&ops, &t, 0, TN_E4M3);
    assert_true(is_filled_with(&ops, t.y, 7));
    assert_true(is_filled_with(&ops, t.dweights[2], 0));
    test_ops_close_host(&ops);
}

/* ---- what is saved, delayed, computed again -------------------------------------------------- */

/* dweights of a step, in one block: 0 as it is usual, 1 delayed, 2 with x again, 3 both, with the
 * type of dy left open. */
static tn__matrix dweights_of(test_experts_config config, int way) {
    test_ops ops = test_ops_open_host();
    test_experts t = test_experts_open(&ops, &config);
    tn_grouped_saved saved = TN_GROUPED_SAVED_INIT;
    tn_grouped_delayed delayed = TN_GROUPED_DELAYED_INIT;
    tn_grouped_linear_forward_args forward = test_experts_forward(&t, way < 2);
    tn_grouped_linear_backward_args backward = test_experts_backward(&t);
    tn__matrix all = test_matrix_make(TN_FP32, (int64_t)EXPERTS * EXPERTS_N, EXPERTS_K, 1);
    const size_t each = (size_t)EXPERTS_N * EXPERTS_K * sizeof(float);
    if (way >= 2) backward.x = t.x;
    backward.delay = way % 2, backward.saved_scope = t.saved;
    if (way == 3) backward.gradient_dtype = (tn_dtype)0;
    EXPECT_OK(tn_grouped_linear_forward(&forward, &saved, ops.stream));
    EXPECT_OK(tn_grouped_linear_backward(&backward, &saved, &delayed, ops.stream));
    assert_int_equal(test_state(t.dweights[0], TN_PLANE_DATA),
                     backward.delay ? TN_PLANE_ABSENT : TN_PLANE_VALID);
    if (backward.delay)
        EXPECT_OK(tn_grouped_linear_weight_gradient(&backward, &saved, &delayed, ops.stream));
    for (int e = 0; e < EXPERTS; e++) {
        tn__matrix one = test_fetch_matrix(&ops, t.dweights[e]);
        memcpy((unsigned char *)all.data + (size_t)e * each, one.data, each);
        test_matrix_free(&one);
    }
    assert_int_equal(test_ledger(t.saved).tensors, 0);
    test_ops_close_host(&ops);
    return all;
}

static void delayed_and_recomputed_gradients_have_the_same_bits(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        test_experts_config config = fp8;
        config.format = formats[i];
        tn__matrix usual = dweights_of(config, 0);
        for (int way = 1; way < 4; way++) {
            tn__matrix other = dweights_of(config, way);
            test_expect_same_matrix(&other, &usual);
            test_matrix_free(&other);
        }
        test_matrix_free(&usual);
    }
}

/* Only the dweights that are asked for; the others' rows are passed by, with their scales. */
static void gradients_that_are_not_wanted_are_left_out(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    test_experts t = test_experts_open(&ops, &fp8), all = t;
    tn_tensor last = t.dweights[4];
    before was = fill_gradients(&ops, &t);
    step(&ops, &all, 0, TN_E4M3);
    tn__matrix expected = test_fetch_matrix(&ops, last);
    test_experts_fill(&ops, last, 5);
    t.dweights[0].value = t.dweights[2].value = t.dbiases[0].value = t.dbiases[3].value = 0;
    step(&ops, &t, 0, TN_E4M3);
    tn__matrix actual = test_fetch_matrix(&ops, last);
    test_expect_same_matrix(&actual, &expected);
    test_matrix_free(&actual), test_matrix_free(&expected);
    assert_int_equal(test_state(was.dweights[0], TN_PLANE_DATA), TN_PLANE_VALID);
    test_ops_close_host(&ops);
}

static void nothing_is_saved_that_backward_does_not_need(void **state) {
    (void)state;
    for (int way = 0; way < 3; way++) {
        test_experts_config config = fp8;
        if (way == 0) config.frozen = (1 << EXPERTS) - 1;
        if (way == 1) config.format = TN_FORMAT_PLAIN;
        test_ops ops = test_ops_open_host();
        test_experts t = test_experts_open(&ops, &config);
        tn_grouped_saved saved = {.x = {{1}, {2}}};
        tn_grouped_linear_forward_args forward = test_experts_forward(&t, 1);
        EXPECT_OK(tn_grouped_linear_forward(&forward, &saved, ops.stream));
        assert_int_equal(test_ledger(t.saved).tensors, way == 2 ? 2 : 0);
        assert_int_equal(saved.x.data.value != 0, way == 2);
        test_ops_close_host(&ops);
    }
}

static void bytes_are_those_of_the_closed_form(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    test_experts_bytes(&ops);
    test_ops_close_host(&ops);
}

/* ---- planes of frozen weights ---------------------------------------------------------------- */

/* dx of three steps under a policy, and the most that COL took at once. */
static tn__matrix dx_under(tn_plane_policy policy, size_t *col_peak, size_t *data_peak) {
    test_experts_config config = fp8;
    config.frozen = (1 << EXPERTS) - 1, config.policy = policy;
    test_ops ops = test_ops_open_host();
    test_experts t = test_experts_open(&ops, &config);
    tn_grouped_linear_backward_args backward = test_experts_backward(&t);
    for (int i = 0; i < 3; i++)
        EXPECT_OK(tn_grouped_linear_backward(&backward, NULL, NULL, ops.stream));
    tn_ledger ledger = test_ledger(ops.scope);
    *col_peak = ledger.peak_plane_bytes[TN_PLANE_COL];
    *data_peak = ledger.total_bytes;
    tn__matrix dx = test_fetch_matrix(&ops, t.dx);
    test_ops_close_host(&ops);
    return dx;
}

static void frozen_planes_come_and_go_one_by_one(void **state) {
    static const tn_plane_policy policies[] = {TN_POLICY_UNTIL_LAST_USE, TN_POLICY_SCRATCH};
    size_t kept, kept_total, peak, total;
    (void)state;
    tn__matrix expected = dx_under(TN_POLICY_KEEP, &kept, &kept_total);
    assert_int_equal(kept, (EXPERTS - 1) * test_experts_weight_bytes());
    for (int i = 0; i < 2; i++) {
        tn__matrix dx = dx_under(policies[i], &peak, &total);
        assert_int_equal(peak, i == 0 ? test_experts_weight_bytes() : 0); /* the slot is no plane */
        assert_true(total < kept_total);
        test_expect_same_matrix(&dx, &expected);
        test_matrix_free(&dx);
    }
    test_matrix_free(&expected);
}

/* ---- planes that are made ahead -------------------------------------------------------------- */

/* dx, dweights of the last expert, and how many planes of weights there were at once. */
typedef struct ahead {
    tn__matrix dx, dweight;
    size_t planes;
    tn_plane_state next;
} ahead;

/* A backward, with the next layer's weight; `has_side`: planes are derived on another stream. */
static ahead backward_of(tn_format format, int has_side) {
    test_experts_config config = fp8;
    test_ops ops = test_ops_open_host();
    tn_stream side;
    config.format = format, config.policy = TN_POLICY_UNTIL_LAST_USE;
    if (format == TN_FORMAT_FP8_TENSOR) config.policy = TN_POLICY_KEEP;
    if (format == TN_FORMAT_FP8_BLOCK_2D) config.frozen = (1 << EXPERTS) - 1 - (1 << 4);
    EXPECT_OK(tn_stream_create(ops.device, &side));
    test_experts t = test_experts_open(&ops, &config);
    tn_tensor next = test_weight(ops.scope, EXPERTS_N, EXPERTS_K, 0, TN_POLICY_KEEP);
    test_declare_valid(&ops, next, TN_PLANE_ROW);
    tn_grouped_linear_backward_args backward = test_experts_backward(&t);
    backward.x = t.x;
    if (has_side) backward.experts.side = side, backward.experts.next_weight = next;
    EXPECT_OK(tn_grouped_linear_backward(&backward, NULL, NULL, ops.stream));
    EXPECT_OK(tn_device_synchronize(ops.device));
    ahead of = {test_fetch_matrix(&ops, t.dx), test_fetch_matrix(&ops, t.dweights[4]),
                test_ledger(ops.scope).peak_plane_bytes[TN_PLANE_COL],
                test_state(next, TN_PLANE_COL)};
    of.planes /= test_experts_weight_bytes();
    EXPECT_OK(tn_stream_destroy(ops.device, side));
    test_ops_close_host(&ops);
    return of;
}

/* Of the last expert's policy, which trains, the plane stays; those before are frozen. */
static void planes_are_made_ahead_of_their_products(void **state) {
    static const size_t planes[][2] = {{1, 2}, {EXPERTS - 1, EXPERTS}, {0, 1}};
    (void)state;
    for (int i = 0; i < 3; i++) {
        ahead usual = backward_of(formats[i], 0), early = backward_of(formats[i], 1);
        test_expect_same_matrix(&early.dx, &usual.dx);
        test_expect_same_matrix(&early.dweight, &usual.dweight);
        assert_int_equal(usual.next, TN_PLANE_ABSENT);
        assert_int_equal(early.next, TN_PLANE_VALID);
        assert_int_equal(usual.planes, planes[i][0]);
        assert_int_equal(early.planes, planes[i][1]);
        test_matrix_free(&usual.dx), test_matrix_free(&usual.dweight);
        test_matrix_free(&early.dx), test_matrix_free(&early.dweight);
    }
}

/* That of the layer whose dgrad comes first. */
static void a_forward_has_another_layers_plane_made_ahead(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        test_experts_config config = fp8;
        test_ops ops = test_ops_open_host();
        tn_stream side;
        config.format = formats[i];
        EXPECT_OK(tn_stream_create(ops.device, &side));
        test_experts t = test_experts_open(&ops, &config);
        tn_tensor next = test_weight(ops.scope, EXPERTS_N, EXPERTS_K, 0, TN_POLICY_KEEP);
        test_declare_valid(&ops, next, TN_PLANE_ROW);
        tn_grouped_linear_forward_args forward = test_experts_forward(&t, 0);
        forward.experts.side = side;
        EXPECT_OK(tn_grouped_linear_forward(&forward, NULL, ops.stream));
        assert_int_equal(test_ledger(ops.scope).peak_plane_bytes[TN_PLANE_COL], 0);
        forward.experts.next_weight = next;
        EXPECT_OK(tn_grouped_linear_forward(&forward, NULL, ops.stream));
        assert_int_equal(test_state(next, TN_PLANE_COL), TN_PLANE_VALID);
        EXPECT_OK(tn_device_synchronize(ops.device));
        EXPECT_OK(tn_stream_destroy(ops.device, side));
        test_ops_close_host(&ops);
    }
}

/* A frozen layer under the first trainable one: no plane is ever made. */
static void without_dx_no_plane_of_a_weight_is_derived(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    test_experts t = test_experts_open(&ops, &fp8);
    tn_grouped_linear_backward_args backward = test_experts_backward(&t);
    backward.dx.value = 0, backward.x = t.x;
    EXPECT_OK(tn_grouped_linear_backward(&backward, NULL, NULL, ops.stream));
    assert_int_equal(test_ledger(ops.scope).peak_plane_bytes[TN_PLANE_COL], 0);
    assert_false(is_filled_with(&ops, t.dweights[0], 0));
    test_ops_close_host(&ops);
}

/* The device's table and the host's say different things: the word tells, and nothing is written
 * beyond what the host has made room for. */
static void tables_that_differ_are_told_in_the_error_word(void **state) {
    static const int64_t more[] = {0, 17, 17, 145, 150, EXPERTS_ROWS + 1};
    uint32_t error = 0;
    (void)state;
    test_ops ops = test_ops_open_host();
    test_experts t = test_experts_open(&ops, &fp8);
    tn_grouped_linear_forward_args forward = test_experts_forward(&t, 0);
    test_write(&ops, t.experts.device_offsets, more);
    EXPECT_OK(tn_grouped_linear_forward(&forward, NULL, ops.stream));
    test_read(&ops, t.experts.error, &error);
    assert_int_equal(error, TN_GROUPED_OVER_CAPACITY);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_expert_is_a_linear_layer_of_its_own),
        cmocka_unit_test(rows_behind_the_last_expert_are_left_alone),
        cmocka_unit_test(gradients_are_the_finite_differences),
        cmocka_unit_test(an_expert_without_rows_has_zero_gradients_or_keeps_them),
        cmocka_unit_test(a_weight_without_rows_is_not_read),
        cmocka_unit_test(no_experts_and_no_rows_are_success),
        cmocka_unit_test(delayed_and_recomputed_gradients_have_the_same_bits),
        cmocka_unit_test(gradients_that_are_not_wanted_are_left_out),
        cmocka_unit_test(nothing_is_saved_that_backward_does_not_need),
        cmocka_unit_test(bytes_are_those_of_the_closed_form),
        cmocka_unit_test(frozen_planes_come_and_go_one_by_one),
        cmocka_unit_test(planes_are_made_ahead_of_their_products),
        cmocka_unit_test(a_forward_has_another_layers_plane_made_ahead),
        cmocka_unit_test(without_dx_no_plane_of_a_weight_is_derived),
        cmocka_unit_test(tables_that_differ_are_told_in_the_error_word),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
