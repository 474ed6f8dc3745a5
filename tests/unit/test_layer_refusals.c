/* What LayerNormLinear and LayerNormMLP refuse: one thing wrong in arguments that are right, with
 * its status and words, and nothing changed. */
#include "tenure_lifetime.h"
#include "test_layers.h"

#include <stddef.h>
#include <string.h>

typedef struct call {
    test_layer l;
    tn_norm_linear_forward_args linear;
    tn_norm_linear_backward_args linear_back;
    tn_norm_mlp_forward_args mlp;
    tn_norm_mlp_backward_args mlp_back;
} call;

typedef enum which { LINEAR, LINEAR_BACK, MLP, MLP_BACK } which;

static tn_status make_call(call *c, which w) {
    test_layer_saved *saved = &c->l.saved;
    const tn_stream stream = c->l.ops.stream;
    switch (w) {
    case LINEAR: return tn_norm_linear_forward(&c->linear, &saved->norm_linear, stream);
    case LINEAR_BACK:
        return tn_norm_linear_backward(&c->linear_back, &saved->norm_linear, c->l.delayed, stream);
    case MLP: return tn_norm_mlp_forward(&c->mlp, &saved->mlp, stream);
    default: return tn_norm_mlp_backward(&c->mlp_back, &saved->mlp, c->l.delayed, stream);
    }
}

/* What takes the right one's place. */
typedef enum wrong {
    NONE,
    NARROW,  /* bf16, a column less than x */
    SHORT,   /* fp32, a single element */
    WEIGHT,  /* the first weight */
    VECTORS, /* FP8_BLOCK_1D of x's shape */
    FP32,    /* of x's shape */
    NUMBER   /* not a tensor: `number` */
} wrong;

typedef struct mistake {
    which call;
    tn_status status;
    size_t offset; /* in call */
    wrong wrong;
    int number;
    const char *words;
} mistake;

#define AT(field) offsetof(call, field)
#define BAD       TN_INVALID_ARGUMENT

static const mistake mistakes[] = {
    {LINEAR, TN_STALE_HANDLE, AT(linear.norm.x), NONE, 0, ""},
    {LINEAR, BAD, AT(linear.norm.x), VECTORS, 0, "norm.x (tensor"},
    {LINEAR, BAD, AT(linear.norm.x), NARROW, 0, "the shape of x"},
    {LINEAR, BAD, AT(linear.w.x_scale.scale), SHORT, 0, "w.x_scale is given, but the weight"},
    {MLP, BAD, AT(mlp.w2.weight_scale.amax_history), SHORT, 0, "w2.weight_scale is given, but the"},
    {MLP_BACK, BAD, AT(mlp_back.w1.dy_scale.slot), NUMBER, 1, "w1.dy_scale has slot 1"},
    {LINEAR, BAD, AT(linear.norm.norm), NUMBER, 2, "norm.norm is 2"},
    {LINEAR, BAD, AT(linear.norm.norm), NUMBER, TN_NORM_RMS, "norm.beta or mean is given"},
    {LINEAR, BAD, AT(linear.norm.residual), NONE, 0, "norm.sum is given, but no norm.residual"},
    {LINEAR, BAD, AT(linear.norm.sum), NONE, 0, "norm.sum is {0}"},
    {LINEAR, BAD, AT(linear.norm.gamma), SHORT, 0, "norm.gamma (tensor"},
    {LINEAR, BAD, AT(linear.norm.beta), SHORT, 0, "norm.beta (tensor"},
    {LINEAR, BAD, AT(linear.norm.normed), NARROW, 0, "norm.normed (tensor"},
    {LINEAR, TN_UNSUPPORTED, AT(linear.w.weight), VECTORS, 0, "w.weight (tensor"},
    {LINEAR, BAD, AT(linear.w.weight), FP32, 0, "both must be one type"},
    {LINEAR, BAD, AT(linear.w.bias), SHORT, 0, "w.bias (tensor"},
    {LINEAR, BAD, AT(linear.y), NARROW, 0, "y (tensor"},
    {LINEAR, BAD, AT(linear.y), WEIGHT, 0, "y (tensor"},
    {LINEAR, BAD, AT(linear.common.recompute), NUMBER, 2, "common.recompute is 2"},

    {LINEAR_BACK, BAD, AT(linear_back.dy), NARROW, 0, "its columns are weight's rows"},
    {LINEAR_BACK, BAD, AT(linear_back.norm.x), NARROW, 0, "norm.added (tensor"},
    {LINEAR_BACK, BAD, AT(linear_back.norm.dx), NARROW, 0, "norm.dx (tensor"},
    {LINEAR_BACK, BAD, AT(linear_back.norm.dx), NONE, 0, "norm.added is given, but norm.dx"},
    {LINEAR_BACK, BAD, AT(linear_back.norm.dgamma), SHORT, 0, "norm.dgamma (tensor"},
    {LINEAR_BACK, BAD, AT(linear_back.norm.added), FP32, 0, "norm.added (tensor"},
    {LINEAR_BACK, BAD, AT(linear_back.gradient.dweight), SHORT, 0, "gradient.dweight (tensor"},
    {LINEAR_BACK, BAD, AT(l.saved.norm_linear.rstd), NONE, 0, "saved->rstd is {0}"},
    {LINEAR_BACK, BAD, AT(l.saved.norm_linear.rstd), SHORT, 0, "saved->rstd (tensor"},
    {LINEAR_BACK, BAD, AT(l.saved.norm_linear.mean), NONE, 0, "saved->mean is {0}"},
    {LINEAR_BACK, BAD, AT(l.saved.norm_linear.normed), NONE, 0, "saved->normed, which is {0}"},
    {LINEAR_BACK, BAD, AT(l.saved.norm_linear.normed), FP32, 0, "saved->normed (tensor"},
    {LINEAR_BACK, TN_INVALID_STATE, AT(l.saved.norm_linear.normed), VECTORS, 0,
     "saved->normed (tensor"},
    {LINEAR_BACK, TN_INVALID_STATE, AT(linear_back.common.precision), NUMBER,
     TN_BACKWARD_DEQUANTIZED, "the same common.precision"},

    {MLP, BAD, AT(mlp.activation), NUMBER, TN_ACTIVATION_COUNT, "activation is"},
    {MLP, BAD, AT(mlp.gated), NUMBER, 2, "gated is 2"},
    {MLP, BAD, AT(mlp.gated), NUMBER, 1, "its columns are half of w1.weight's rows"},
    {MLP, TN_UNSUPPORTED, AT(mlp.w1.weight), VECTORS, 0, "w1.weight (tensor"},
    {MLP, BAD, AT(mlp.w2.weight), WEIGHT, 0, "w2.weight (tensor"},
    {MLP, BAD, AT(mlp.w2.bias), SHORT, 0, "w2.bias (tensor"},
    {MLP, BAD, AT(mlp.w2.skip), SHORT, 0, "w2.skip is given, but no w2.source"},
    {MLP, BAD, AT(mlp.y), NARROW, 0, "y (tensor"},

    {MLP_BACK, BAD, AT(mlp_back.dy), NARROW, 0, "its columns are w2.weight's rows"},
    {MLP_BACK, BAD, AT(l.saved.mlp.hidden), NONE, 0, "saved->hidden is {0}"},
    {MLP_BACK, BAD, AT(l.saved.mlp.hidden), FP32, 0, "saved->hidden (tensor"},
    {MLP_BACK, BAD, AT(l.saved.mlp.activated), NONE, 0, "saved->activated, which is {0}"},
    {MLP_BACK, BAD, AT(l.saved.mlp.activated), VECTORS, 0, "saved->activated (tensor"},
    {MLP_BACK, BAD, AT(l.saved.mlp.normed), NONE, 0, "saved->normed, which is {0}"},
    {MLP_BACK, BAD, AT(mlp_back.gradient1.dweight), SHORT, 0, "gradient1.dweight (tensor"},
    {MLP_BACK, BAD, AT(mlp_back.gradient2.dweight), SHORT, 0, "gradient2.dweight (tensor"},
    {MLP_BACK, BAD, AT(mlp_back.gradient2.dbias), SHORT, 0, "gradient2.dbias (tensor"},
    {MLP_BACK, BAD, AT(mlp_back.gradient2.delay), NUMBER, 3, "delay of gradient2.dweight is 3"},
};

static call right_call(const test_ops *ops, which w) {
    const test_layer_config config = {.kind = w <= LINEAR_BACK ? TEST_NORM_LINEAR : TEST_NORM_MLP,
                                      .format = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_2D},
                                      .dtype = TN_BF16,
                                      .norm = TN_NORM_LAYER,
                                      .has_residual = 1,
                                      .policy = TN_POLICY_KEEP};
    call c = {.l = test_layer_open(ops, &config)};
    if (w == LINEAR_BACK || w == MLP_BACK) EXPECT_OK(test_layer_forward(&c.l, ops->stream));
    c.linear = test_norm_linear_forward_args(&c.l);
    c.linear_back = test_norm_linear_backward_args(&c.l);
    c.mlp = test_norm_mlp_forward_args(&c.l);
    c.mlp_back = test_norm_mlp_backward_args(&c.l);
    return c;
}

static tn_tensor wrong_tensor(const call *c, wrong kind) {
    tn_tensor tensor = {0};
    if (kind == NONE) return tensor;
    if (kind == WEIGHT) return c->l.weight[0];
    if (kind == NARROW)
        tensor = test_plain(c->l.io, TN_BF16, LAYER_M, LAYER_K - 1);
    else if (kind == SHORT)
        tensor = test_plain(c->l.io, TN_FP32, 1, 1);
    else if (kind == FP32)
        tensor = test_plain(c->l.io, TN_FP32, LAYER_M, LAYER_K);
    else
        return test_fp8(c->l.io, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, LAYER_M, LAYER_K);
    test_declare_valid(&c->l.ops, tensor, TN_PLANE_DATA);
    return tensor;
}

static void close_call(call *c) {
    EXPECT_OK(tn_scope_close(c->l.op));
    EXPECT_OK(tn_scope_close(c->l.saved_scope));
    EXPECT_OK(tn_scope_close(c->l.io));
    EXPECT_OK(tn_scope_close(c->l.model));
}

static void expect_refused(call *c, which w, tn_status expected, const char *words, int index) {
    const tn_ledger before = test_ledger(c->l.ops.scope);
    const test_layer_saved saved = c->l.saved;
    tn_status status = make_call(c, w);
    if (status != expected || !strstr(tn_error_last(), words))
        fail_msg("mistake %d: %s, \"%s\"; expected %s, \"%s\"", index, tn_status_name(status),
                 tn_error_last(), tn_status_name(expected), words);
    const tn_ledger after = test_ledger(c->l.ops.scope);
    test_expect_same_ledger(&before, &after);
    assert_memory_equal(&saved, &c->l.saved, sizeof saved);
}

static void every_mistake_has_its_status_and_changes_nothing(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        const mistake *m = &mistakes[i];
        call c = right_call(&ops, m->call);
        const tn_tensor tensor = m->wrong == NUMBER ? (tn_tensor){0} : wrong_tensor(&c, m->wrong);
        if (m->wrong == NUMBER)
            memcpy((char *)&c + m->offset, &m->number, sizeof m->number);
        else
            memcpy((char *)&c + m->offset, &tensor, sizeof tensor);
        expect_refused(&c, m->call, m->status, m->words, (int)i);
        close_call(&c);
    }
    test_ops_close_host(&ops);
}

static void the_right_arguments_are_taken(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int w = LINEAR; w <= MLP_BACK; w++) {
        call c = right_call(&ops, (which)w);
        EXPECT_OK(make_call(&c, (which)w));
        close_call(&c);
    }
    test_ops_close_host(&ops);
}

static void a_set_needs_a_place_and_a_gradient_something_to_add_to(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    call c = right_call(&ops, MLP);
    EXPECT_STATUS(tn_norm_mlp_forward(&c.mlp, NULL, ops.stream), BAD);
    EXPECT_ERROR_HAS("saved is NULL");
    close_call(&c);
    c = right_call(&ops, MLP_BACK);
    c.mlp_back.gradient1.dweight = test_plain(c.l.io, TN_FP32, LAYER_F, LAYER_K);
    expect_refused(&c, MLP_BACK, TN_INVALID_STATE, "", 0);
    assert_int_equal(test_state(c.l.weight[0], TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_int_equal(test_state(c.l.weight[1], TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_int_equal(test_state(c.l.dx, TN_PLANE_DATA), TN_PLANE_ABSENT);
    close_call(&c);
    test_ops_close_host(&ops);
}

/* A normed value that is made again for a delayed gradient is to outlive the call. */
static void a_delayed_normed_value_that_is_made_needs_a_scope(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const test_layer_config config = {.kind = TEST_NORM_LINEAR,
                                      .dtype = TN_BF16,
                                      .norm = TN_NORM_LAYER,
                                      .recompute = 1,
                                      .delay = 1,
                                      .policy = TN_POLICY_KEEP};
    call c = {.l = test_layer_open(&ops, &config)};
    EXPECT_OK(test_layer_forward(&c.l, ops.stream));
    c.linear_back = test_norm_linear_backward_args(&c.l);
    c.linear_back.common.saved_scope = (tn_scope){0};
    expect_refused(&c, LINEAR_BACK, BAD, "gradient.dweight is to be delayed, but common.saved", 0);
    assert_int_equal(test_state(c.l.dx, TN_PLANE_DATA), TN_PLANE_ABSENT);
    c.linear_back.common.saved_scope = c.l.saved_scope;
    EXPECT_OK(make_call(&c, LINEAR_BACK));
    EXPECT_OK(test_layer_weight_gradients(&c.l, ops.stream));
    close_call(&c);
    test_ops_close_host(&ops);
}

/* Delayed scaling whose tensors have no such slot, are of another type or no history. */
static void a_scale_that_does_not_fit_is_refused(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const test_layer_config config = {.kind = TEST_NORM_MLP,
                                      .format = {TN_FORMAT_FP8_TENSOR, TN_FORMAT_FP8_TENSOR},
                                      .dtype = TN_BF16,
                                      .norm = TN_NORM_LAYER,
                                      .has_scales = 1,
                                      .policy = TN_POLICY_KEEP};
    call c = {.l = test_layer_open(&ops, &config)};
    const tn_layer_scale right = {c.l.scale, c.l.history, LAYER_SLOTS - 1};
    const struct {
        tn_layer_scale scale;
        const char *words;
    } cases[] = {
        {{c.l.scale, c.l.history, LAYER_SLOTS}, "slot is 4, but "},
        {{c.l.scale, c.l.history, -1}, "slot is -1, but "},
        {{{0}, c.l.history, LAYER_SLOTS}, "slot is 4, but amax_history"},
        {{c.l.x, c.l.history, 0}, "elements of bf16, expected fp32"},
        {{c.l.scale, c.l.x, 0}, "amax_history (tensor"},
        {{c.l.weight[0], {0}, 0}, "is fp8_tensor, expected plain"},
        {{{0}, {0}, 1}, "has slot 1, but neither scale nor amax_history"},
    };
    for (size_t i = 0; i < 6 * sizeof cases / sizeof *cases; i++) {
        const which w = i % 2 ? MLP_BACK : MLP;
        if (w == MLP_BACK && i == 1) EXPECT_OK(test_layer_forward(&c.l, ops.stream));
        c.mlp = test_norm_mlp_forward_args(&c.l);
        c.mlp_back = test_norm_mlp_backward_args(&c.l);
        tn_layer_scale *const at[] = {&c.mlp.w1.x_scale,      &c.mlp_back.w1.x_scale,
                                      &c.mlp.w2.weight_scale, &c.mlp_back.w2.weight_scale,
                                      &c.mlp.w2.dy_scale,     &c.mlp_back.w2.dy_scale};
        *at[i % 6] = cases[i / 6].scale;
        expect_refused(&c, w, BAD, cases[i / 6].words, (int)i);
        *at[i % 6] = right;
    }
    close_call(&c);
    test_ops_close_host(&ops);
}

/* The second half can not begin: the first weight keeps what its source says, all else goes. */
static void a_weight_that_was_quantized_stays_so_after_a_failure(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    call c = right_call(&ops, MLP);
    c.mlp.w1.weight = test_weight(c.l.model, LAYER_F, LAYER_K, 0, TN_POLICY_KEEP);
    c.mlp.w1.source = c.l.source[0];
    c.mlp.w2.weight = test_weight(c.l.model, LAYER_N, LAYER_F, 0, TN_POLICY_KEEP);
    EXPECT_STATUS(make_call(&c, MLP), TN_INVALID_STATE);
    assert_int_equal(test_state(c.mlp.w1.weight, TN_PLANE_ROW), TN_PLANE_VALID);
    assert_int_equal(test_state(c.l.y, TN_PLANE_DATA), TN_PLANE_ABSENT);
    assert_int_equal(test_ledger(c.l.saved_scope).tensors, 0);
    assert_int_equal(test_ledger(c.l.op).tensors, 0);
    c.mlp.w1.source = (tn_tensor){0};
    c.mlp.w2.source = c.l.source[1];
    EXPECT_OK(make_call(&c, MLP));
    close_call(&c);
    test_ops_close_host(&ops);
}

/* The second product is none of the engine's, and the norm ahead of the first has outputs. */
static void a_pin_that_refuses_the_second_product_changes_nothing(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const test_layer_config config = {.kind = TEST_NORM_MLP,
                                      .format = {TN_FORMAT_PLAIN, TN_FORMAT_FP8_BLOCK_2D},
                                      .dtype = TN_BF16,
                                      .norm = TN_NORM_LAYER,
                                      .has_residual = 1,
                                      .has_normed = 1,
                                      .policy = TN_POLICY_KEEP};
    call c = {.l = test_layer_open(&ops, &config)};
    c.mlp = test_norm_mlp_forward_args(&c.l);
    EXPECT_OK(tn_plane_fill(c.l.sum, TN_PLANE_DATA, 1, ops.stream));
    EXPECT_OK(tn_plane_fill(c.l.normed, TN_PLANE_DATA, 1, ops.stream));
    test_pin_engine("dequantize-bf16");
    expect_refused(&c, MLP, TN_UNSUPPORTED, "dequantize-bf16, which does not take its product", 0);
    test_pin_engine(NULL);
    assert_int_equal(test_state(c.l.sum, TN_PLANE_DATA), TN_PLANE_VALID);
    assert_int_equal(test_state(c.l.normed, TN_PLANE_DATA), TN_PLANE_VALID);
    EXPECT_OK(make_call(&c, MLP));
    close_call(&c);
    test_ops_close_host(&ops);
}

/* ---- outputs in the place of parameters ------------------------------------------------------ */

/* Of one stretch of fp32, its first elements. */
static tn_tensor first_of(tn_scope scope, tn_tensor elements, int64_t rows, int64_t cols) {
    const int64_t shape[] = {rows, cols};
    tn_tensor part, view;
    EXPECT_OK(tn_tensor_view_rows(elements, 0, rows * cols, scope, &part));
    EXPECT_OK(tn_tensor_view_shape(part, 2, shape, scope, &view));
    return view;
}

static void an_output_is_none_of_the_parameters(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    static const char *const words[] = {"norm.dx and w.weight share memory",
                                        "norm.dx and w.source share memory",
                                        "norm.dbeta and norm.beta share memory",
                                        "norm.dx and w1.source share memory",
                                        "gradient2.dweight and w1.source share memo",
                                        "norm.dgamma and w2.bias share memory",
                                        "y and w1.source share memory",
                                        "norm.sum and w1.source share memory"};
    for (int i = 0; i < 8; i++) {
        const which w = i < 3 ? LINEAR_BACK : i < 6 ? MLP_BACK : MLP;
        const test_layer_config config = {
            .kind = w == LINEAR_BACK ? TEST_NORM_LINEAR : TEST_NORM_MLP,
            .format = {i == 0 ? TN_FORMAT_PLAIN : TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_2D},
            .dtype = TN_FP32,
            .norm = TN_NORM_LAYER,
            .has_residual = 1,
            .policy = TN_POLICY_KEEP};
        call c = {.l = test_layer_open(&ops, &config)};
        const tn_tensor all = test_plain(c.l.io, TN_FP32, LAYER_M * LAYER_K * 2, 1);
        EXPECT_OK(tn_plane_fill(all, TN_PLANE_DATA, 1, ops.stream));
        if (i < 2) c.l.dx = first_of(c.l.io, all, LAYER_M, LAYER_K);
        if (i == 0) c.l.weight[0] = first_of(c.l.io, all, LAYER_N, LAYER_K);
        if (w != MLP) EXPECT_OK(test_layer_forward(&c.l, ops.stream));
        c.linear_back = test_norm_linear_backward_args(&c.l);
        c.mlp = test_norm_mlp_forward_args(&c.l);
        c.mlp_back = test_norm_mlp_backward_args(&c.l);
        if (i == 1) c.linear_back.w.source = first_of(c.l.io, all, LAYER_N, LAYER_K);
        if (i == 2) c.linear_back.norm.beta = c.l.dbeta;
        if (i == 3) c.mlp_back.w1.source = c.l.dx;
        if (i == 4) c.mlp_back.w1.source = c.l.dweight[1];
        if (i == 5) c.mlp_back.w2.bias = c.l.dgamma;
        if (i > 5) c.mlp.w1.source = first_of(c.l.io, all, LAYER_F, LAYER_K);
        if (i == 6) c.mlp.y = first_of(c.l.io, all, LAYER_M, LAYER_N);
        if (i == 7) c.mlp.norm.sum = first_of(c.l.io, all, LAYER_M, LAYER_K);
        expect_refused(&c, w, BAD, words[i], i);
        assert_int_equal(test_state(all, TN_PLANE_DATA), TN_PLANE_VALID);
        close_call(&c);
    }
    test_ops_close_host(&ops);
}

/* ---- what someone else holds ----------------------------------------------------------------- */

static void hold(const test_layer *l, tn_tensor tensor, tn_plane plane, tn_lease *lease) {
    tn_plane_view view;
    EXPECT_OK(tn_lease_begin(tensor, plane, TN_READ, l->ops.stream, lease, &view));
}

/* It can not be destroyed now: the call has succeeded all the same, and it ends with its scope. */
static void what_is_held_at_its_last_use_ends_with_its_scope(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 4; i++) {
        const test_layer_config config = {
            .kind = TEST_NORM_MLP,
            .format = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_2D},
            .dtype = TN_BF16,
            .norm = TN_NORM_LAYER,
            .delay = 1,
            .policy = TN_POLICY_KEEP};
        call c = {.l = test_layer_open(&ops, &config)};
        const test_layer_saved none = {.mlp = TN_NORM_MLP_SAVED_INIT};
        tn_lease lease;
        EXPECT_OK(test_layer_forward(&c.l, ops.stream));
        const tn_tensor saved[] = {c.l.saved.mlp.mean, c.l.saved.mlp.rstd, c.l.saved.mlp.hidden};
        if (i < 3) hold(&c.l, saved[i], TN_PLANE_DATA, &lease);
        EXPECT_OK(test_layer_backward(&c.l, ops.stream));
        assert_memory_equal(&c.l.saved, &none, sizeof none.mlp);
        assert_int_equal(test_state(c.l.dx, TN_PLANE_DATA), TN_PLANE_VALID);
        if (i == 3) hold(&c.l, c.l.delayed[0].dy, TN_PLANE_COL, &lease);
        EXPECT_OK(test_layer_weight_gradients(&c.l, ops.stream));
        assert_int_equal(test_state(c.l.dweight[0], TN_PLANE_DATA), TN_PLANE_VALID);
        assert_int_equal(test_ledger(c.l.saved_scope).tensors, 1);
        EXPECT_OK(tn_lease_end(lease));
        close_call(&c);
    }
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mistake_has_its_status_and_changes_nothing),
        cmocka_unit_test(the_right_arguments_are_taken),
        cmocka_unit_test(a_delayed_normed_value_that_is_made_needs_a_scope),
        cmocka_unit_test(a_scale_that_does_not_fit_is_refused),
        cmocka_unit_test(a_weight_that_was_quantized_stays_so_after_a_failure),
        cmocka_unit_test(a_set_needs_a_place_and_a_gradient_something_to_add_to),
        cmocka_unit_test(a_pin_that_refuses_the_second_product_changes_nothing),
        cmocka_unit_test(what_is_held_at_its_last_use_ends_with_its_scope),
        cmocka_unit_test(an_output_is_none_of_the_parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
