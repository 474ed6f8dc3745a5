/* What the experts' layer refuses: one row a mistake, with its status and words, and nothing is
 * changed. */
#include "ops_planes_support.h"
#include "tenure_lifetime.h"
#include "test_experts.h"

typedef struct fixture {
    test_ops ops, other;
    test_experts t;
    tn_tensor small, fp32, bytes, frozen, fp8_1d, tensor_scaled, elsewhere, e5m2, fp32_scaled;
    tn_tensor scalar, plain[EXPERTS], view, first_rows, later_rows, fp32_dy, fp32_x;
    tn_tensor weights[EXPERTS], vectors[EXPERTS], matrices[EXPERTS];
    tn_grouped_saved saved;
    tn_grouped_delayed delayed;
} fixture;

/* One call of either, as it would succeed. */
typedef struct call {
    tn_grouped_linear_forward_args forward;
    tn_grouped_linear_backward_args backward;
    tn_grouped_saved *saved;
    tn_grouped_delayed *delayed;
} call;

static tn_tensor scaled(tn_scope scope, tn_format format, tn_dtype dtype, tn_scale_mode mode) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    config.format = format, config.dtype = dtype, config.scale_mode = mode;
    config.rank = 2, config.shape[0] = EXPERTS_N, config.shape[1] = EXPERTS_K;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    return tensor;
}

static tn_tensor valid(const test_ops *ops, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor tensor = test_plain(ops->scope, dtype, rows, cols);
    test_declare_valid(ops, tensor, TN_PLANE_DATA);
    return tensor;
}

static fixture open_fixture(void) {
    static const test_experts_config config = {TN_FORMAT_FP8_BLOCK_2D, TN_BF16, TN_SCALE_POW2, 0,
                                               TN_POLICY_KEEP,         0};
    fixture f = {.ops = test_ops_open_host(), .other = test_ops_open_host()};
    const tn_format tiles = TN_FORMAT_FP8_BLOCK_2D;
    tn_scope scope = f.ops.scope;
    f.t = test_experts_open(&f.ops, &config);
    f.small = valid(&f.ops, TN_BF16, EXPERTS_ROWS - 1, EXPERTS_K);
    f.fp32 = valid(&f.ops, TN_FP32, EXPERTS_N, EXPERTS_K);
    f.scalar = valid(&f.ops, TN_FP32, 1, 1);
    f.bytes = valid(&f.ops, TN_BYTE, EXPERTS_ROWS, EXPERTS_K);
    f.frozen = test_weight(scope, EXPERTS_N, EXPERTS_K, 1, TN_POLICY_KEEP);
    f.fp8_1d = scaled(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_SCALE_POW2);
    f.tensor_scaled = scaled(scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, TN_SCALE_POW2);
    f.e5m2 = scaled(scope, tiles, TN_E5M2, TN_SCALE_POW2);
    f.fp32_scaled = scaled(scope, tiles, TN_E4M3, TN_SCALE_FP32);
    for (int e = 0; e < EXPERTS; e++)
        f.plain[e] = valid(&f.ops, TN_FP32, EXPERTS_N, EXPERTS_K);
    EXPECT_OK(tn_tensor_view_rows(f.plain[3], 0, EXPERTS_N, scope, &f.view));
    tn_tensor both = valid(&f.ops, TN_FP32, 2 * EXPERTS_N, EXPERTS_K);
    EXPECT_OK(tn_tensor_view_rows(both, 0, EXPERTS_N, scope, &f.first_rows));
    EXPECT_OK(tn_tensor_view_rows(both, EXPERTS_N - 1, EXPERTS_N, scope, &f.later_rows));
    f.fp32_dy = valid(&f.ops, TN_FP32, EXPERTS_ROWS, EXPERTS_N);
    f.fp32_x = valid(&f.ops, TN_FP32, EXPERTS_ROWS, EXPERTS_K);
    f.elsewhere = valid(&f.other, TN_BF16, EXPERTS_ROWS, EXPERTS_K);
    tn_grouped_linear_forward_args forward = test_experts_forward(&f.t, 1);
    EXPECT_OK(tn_grouped_linear_forward(&forward, &f.saved, f.ops.stream));
    return f;
}

static call right_call(fixture *f) {
    call c = {test_experts_forward(&f->t, 1), test_experts_backward(&f->t), &f->saved, &f->delayed};
    c.backward.saved_scope = f->t.saved;
    for (int e = 0; e < EXPERTS; e++) {
        f->weights[e] = f->t.weights[e];
        f->vectors[e] = f->t.biases[e];
        f->matrices[e] = f->t.dweights[e];
    }
    c.forward.experts.weights = c.backward.experts.weights = f->weights;
    c.forward.biases = f->vectors, c.backward.dweights = f->matrices;
    return c;
}

typedef void (*spoil)(call *c, fixture *f);
#define SPOIL(name, change)                                                                        \
    static void name(call *c, fixture *f) {                                                        \
        (void)c, (void)f;                                                                          \
        change;                                                                                    \
    }

/* ---- what both are told ---------------------------------------------------------------------- */

static const int64_t falling[] = {0, 17, 16, 145, 150, EXPERTS_ROWS};
static const int64_t late[] = {1, 17, 17, 145, 150, EXPERTS_ROWS};
static const int64_t far[] = {0, 17, 17, 145, 150, INT64_MAX};

SPOIL(wrong_size, (c->forward.size--, c->backward.size--))
#define BOTH(field, value) (c->forward.experts.field = value, c->backward.experts.field = value)
SPOIL(negative_groups, BOTH(groups, -1))
SPOIL(many_groups, BOTH(groups, INT64_MAX))
SPOIL(no_offsets, BOTH(offsets, NULL))
SPOIL(falling_offsets, BOTH(offsets, falling))
SPOIL(late_offsets, BOTH(offsets, late))
SPOIL(far_offsets, BOTH(offsets, far))
SPOIL(no_weights, BOTH(weights, NULL))
SPOIL(no_table, BOTH(device_offsets, (tn_tensor){0}))
SPOIL(short_table, BOTH(device_offsets, f->t.experts.error))
SPOIL(fewer_groups, (BOTH(groups, 2)))
SPOIL(no_error, BOTH(error, (tn_tensor){0}))
SPOIL(long_error, BOTH(error, f->t.experts.device_offsets))
SPOIL(no_weight, f->weights[1].value = 0)
SPOIL(other_shape, f->weights[2] = f->t.y)
SPOIL(other_format, f->weights[3] = f->fp32)
SPOIL(other_dtype, f->weights[4] = f->e5m2)
SPOIL(other_mode, f->weights[1] = f->fp32_scaled)
SPOIL(all_1d, for (int e = 0; e < EXPERTS; e++) f->weights[e] = f->fp8_1d)
SPOIL(one_tensor, f->weights[2] = f->tensor_scaled)
SPOIL(own_side, BOTH(side, f->ops.stream))
SPOIL(no_side, BOTH(next_weight, f->frozen))
SPOIL(next_of_1d, (BOTH(side, f->other.stream), BOTH(next_weight, f->fp8_1d)))
SPOIL(scaled_blocks, BOTH(x_scale.scale, f->fp32))
SPOIL(slot_of_nothing, BOTH(dy_scale.slot, 2))
static void few_slots(call *c, fixture *f) {
    for (int e = 0; e < EXPERTS; e++)
        f->weights[e] = f->tensor_scaled;
    BOTH(x_scale.scale, f->t.biases[0]), BOTH(x_scale.slot, EXPERTS_N - EXPERTS + 1);
}
static void short_history(call *c, fixture *f) {
    few_slots(c, f);
    BOTH(x_scale.slot, 0), BOTH(dy_scale.amax_history, f->scalar);
}
SPOIL(far_slot, (few_slots(c, f), BOTH(x_scale.slot, INT64_MAX)))
SPOIL(next_elsewhere, (BOTH(side, f->other.stream), BOTH(next_weight, f->elsewhere)))
SPOIL(plain_of_another_type, for (int e = 0; e < EXPERTS; e++) f->weights[e] = f->fp32)

/* ---- forward --------------------------------------------------------------------------------- */

SPOIL(no_x, c->forward.x.value = 0)
SPOIL(small_x, c->forward.x = f->small)
SPOIL(x_of_bytes, c->forward.x = f->bytes)
SPOIL(quantized_x, c->forward.x = f->fp8_1d)
SPOIL(x_elsewhere, c->forward.x = f->elsewhere)
SPOIL(y_like_x, c->forward.y = f->t.dx)
SPOIL(long_bias, f->vectors[4] = f->fp32)
SPOIL(bias_of_bytes, f->vectors[0] = f->t.experts.error)
SPOIL(no_scope, c->forward.scope.value = 0)
SPOIL(nowhere_to_save, c->saved = NULL)
SPOIL(scope_elsewhere, (c->forward.scope = c->backward.scope = f->other.scope))
SPOIL(saved_elsewhere, c->forward.saved_scope = f->other.scope)
SPOIL(absent_x, c->forward.x = test_plain(f->ops.scope, TN_BF16, EXPERTS_ROWS, EXPERTS_K))

/* ---- backward -------------------------------------------------------------------------------- */

SPOIL(small_dy, c->backward.dy = f->t.weights[0])
SPOIL(dy_of_x, c->backward.dy = f->t.x)
SPOIL(dx_of_dy, c->backward.dx = f->t.y)
SPOIL(dweight_of_frozen, f->weights[0] = f->frozen)
SPOIL(dweight_shape, f->matrices[2] = f->t.dx)
SPOIL(dweight_of_bytes, f->matrices[2] = f->weights[2])
SPOIL(dweight_of_itself, {
    for (int e = 0; e < EXPERTS; e++)
        f->weights[e] = f->plain[e];
    c->backward.dy = f->fp32_dy;
    c->backward.x = f->fp32_x;
    c->backward.dx.value = 0;
    f->matrices[2] = f->plain[2];
})
SPOIL(dweight_of_another, (dweight_of_itself(c, f), f->matrices[2] = f->plain[4]))
SPOIL(dweight_in_a_weight, (dweight_of_itself(c, f), f->matrices[2] = f->view))
SPOIL(dweight_over_a_weight,
      (dweight_of_itself(c, f), f->weights[1] = f->first_rows, f->matrices[2] = f->later_rows))
SPOIL(dbias_shape, c->backward.dbiases = f->matrices)
SPOIL(bf16_gradient, c->backward.gradient_dtype = TN_BF16)
SPOIL(nothing_saved, c->saved = NULL)
SPOIL(short_saved, f->saved.x.data = f->t.experts.error)
SPOIL(short_saved_scale, f->saved.x.scale = f->t.biases[0])
SPOIL(no_saved_scale, f->saved.x.scale.value = 0)
SPOIL(nowhere_to_delay, (c->backward.delay = 1, c->delayed = NULL))
SPOIL(no_scope_to_delay, (c->backward.delay = 1, c->backward.saved_scope.value = 0))
SPOIL(delayed_elsewhere, (c->backward.delay = 1, c->backward.saved_scope = f->other.scope))
SPOIL(dy_is_dx, c->backward.dx = c->backward.dy)
SPOIL(no_op_scope, c->backward.scope.value = 0)
SPOIL(both_e5m2, {
    c->backward.gradient_dtype = TN_E5M2;
    for (int e = 0; e < EXPERTS; e++)
        f->weights[e] = f->e5m2;
})

typedef enum which { FORWARD = 1, BACKWARD, EITHER } which;

static const struct mistake {
    spoil spoil;
    which of;
    tn_status status;
    const char *words;
} mistakes[] = {
    {wrong_size, EITHER, TN_INVALID_ARGUMENT, "initializer macro"},
    {negative_groups, EITHER, TN_INVALID_ARGUMENT, "groups is -1"},
    {many_groups, EITHER, TN_INVALID_ARGUMENT, "groups is 922337"},
    {no_offsets, EITHER, TN_UNSUPPORTED, "on the host"},
    {falling_offsets, EITHER, TN_INVALID_ARGUMENT, "offsets[2] is 16"},
    {late_offsets, EITHER, TN_INVALID_ARGUMENT, "offsets[0] is 1"},
    {far_offsets, EITHER, TN_INVALID_ARGUMENT, "expected at most"},
    {no_weights, EITHER, TN_INVALID_ARGUMENT, "weights is NULL"},
    {no_table, EITHER, TN_STALE_HANDLE, ""},
    {short_table, EITHER, TN_INVALID_ARGUMENT, "offsets"},
    {fewer_groups, EITHER, TN_INVALID_ARGUMENT, "device_offsets has 6 numbers, expected 3"},
    {no_error, EITHER, TN_STALE_HANDLE, ""},
    {long_error, EITHER, TN_INVALID_ARGUMENT, "expected 4"},
    {no_weight, EITHER, TN_STALE_HANDLE, ""},
    {other_shape, EITHER, TN_INVALID_ARGUMENT, "weight (tensor"},
    {other_format, EITHER, TN_INVALID_ARGUMENT, "is plain, expected fp8_block_2d"},
    {other_dtype, EITHER, TN_INVALID_ARGUMENT, "weight (tensor"},
    {other_mode, EITHER, TN_INVALID_ARGUMENT, "scale mode 1, expected 0"},
    {all_1d, EITHER, TN_UNSUPPORTED, "experts take fp8_block_2d, fp8_tensor or plain"},
    {one_tensor, EITHER, TN_INVALID_ARGUMENT, "is fp8_tensor, expected fp8_block_2d"},
    {own_side, EITHER, TN_INVALID_ARGUMENT, "experts.side is the call's own stream"},
    {no_side, EITHER, TN_INVALID_ARGUMENT, "experts.side is NULL"},
    {next_of_1d, EITHER, TN_INVALID_ARGUMENT, "experts.next_weight (tensor"},
    {next_elsewhere, EITHER, TN_INVALID_ARGUMENT, "another device"},
    {scaled_blocks, EITHER, TN_INVALID_ARGUMENT, "experts.x_scale is given, but the weight"},
    {slot_of_nothing, EITHER, TN_INVALID_ARGUMENT, "experts.dy_scale has slot 2, but neither"},
    {few_slots, EITHER, TN_INVALID_ARGUMENT, "slot is 40, but experts.x_scale"},
    {far_slot, EITHER, TN_INVALID_ARGUMENT, "but experts.x_scale (tensor"},
    {short_history, EITHER, TN_INVALID_ARGUMENT, "slot is 4, but amax_history"},
    {plain_of_another_type, EITHER, TN_INVALID_ARGUMENT, "elements of bf16, expected fp32"},
    {no_x, FORWARD, TN_STALE_HANDLE, ""},
    {small_x, FORWARD, TN_INVALID_ARGUMENT, "is 150 x 72, expected at least 151 x 72"},
    {x_of_bytes, FORWARD, TN_INVALID_ARGUMENT, "x (tensor"},
    {quantized_x, FORWARD, TN_INVALID_ARGUMENT, "x (tensor"},
    {x_elsewhere, FORWARD, TN_INVALID_ARGUMENT, "another device"},
    {y_like_x, FORWARD, TN_INVALID_ARGUMENT, "y (tensor"},
    {long_bias, FORWARD, TN_INVALID_ARGUMENT, "bias (tensor"},
    {bias_of_bytes, FORWARD, TN_INVALID_ARGUMENT, "bias (tensor"},
    {no_scope, FORWARD, TN_INVALID_ARGUMENT, "name a scope"},
    {nowhere_to_save, FORWARD, TN_INVALID_ARGUMENT, "saved is NULL"},
    {scope_elsewhere, EITHER, TN_INVALID_ARGUMENT, "of another device"},
    {saved_elsewhere, FORWARD, TN_INVALID_ARGUMENT, "of another device"},
    {absent_x, FORWARD, TN_INVALID_STATE, ""},
    {small_dy, BACKWARD, TN_INVALID_ARGUMENT, "dy (tensor"},
    {dy_of_x, BACKWARD, TN_INVALID_ARGUMENT, "dy (tensor"},
    {dx_of_dy, BACKWARD, TN_INVALID_ARGUMENT, "dx (tensor"},
    {dweight_of_frozen, BACKWARD, TN_INVALID_ARGUMENT, "dweights[0] is given, but weight"},
    {dweight_shape, BACKWARD, TN_INVALID_ARGUMENT, "dweight (tensor"},
    {dweight_of_bytes, BACKWARD, TN_INVALID_ARGUMENT, "dweight (tensor"},
    {dweight_of_itself, BACKWARD, TN_INVALID_ARGUMENT, "weights[2] share memory"},
    {dweight_of_another, BACKWARD, TN_INVALID_ARGUMENT, "weights[4] share memory"},
    {dweight_in_a_weight, BACKWARD, TN_INVALID_ARGUMENT, "weights[3] share memory"},
    {dweight_over_a_weight, BACKWARD, TN_INVALID_ARGUMENT, "weights[1] share memory"},
    {dbias_shape, BACKWARD, TN_INVALID_ARGUMENT, "dbias (tensor"},
    {bf16_gradient, BACKWARD, TN_INVALID_ARGUMENT, "gradient_dtype is"},
    {nothing_saved, BACKWARD, TN_INVALID_ARGUMENT, "dweights need x"},
    {short_saved, BACKWARD, TN_INVALID_ARGUMENT, "saved->x's data"},
    {short_saved_scale, BACKWARD, TN_INVALID_ARGUMENT, "saved->x's scale"},
    {no_saved_scale, BACKWARD, TN_STALE_HANDLE, ""},
    {nowhere_to_delay, BACKWARD, TN_INVALID_ARGUMENT, "delayed is NULL"},
    {no_scope_to_delay, BACKWARD, TN_INVALID_ARGUMENT, "saved_scope is {0}"},
    {delayed_elsewhere, BACKWARD, TN_INVALID_ARGUMENT, "of another device"},
    {dy_is_dx, BACKWARD, TN_INVALID_ARGUMENT, "dx (tensor"},
    {no_op_scope, BACKWARD, TN_INVALID_ARGUMENT, "name a scope"},
    {both_e5m2, BACKWARD, TN_UNSUPPORTED, "are both E5M2"},
};

static void expect_refused(fixture *f, const struct mistake *mistake, which of) {
    const tn_grouped_saved kept = f->saved;
    call c = right_call(f);
    mistake->spoil(&c, f);
    tn_ledger before = test_ledger(f->ops.scope), elsewhere = test_ledger(f->other.scope);
    tn_grouped_saved other = TN_GROUPED_SAVED_INIT;
    tn_status status =
        of == FORWARD
            ? tn_grouped_linear_forward(&c.forward, c.saved ? &other : NULL, f->ops.stream)
            : tn_grouped_linear_backward(&c.backward, c.saved, c.delayed, f->ops.stream);
    EXPECT_STATUS(status, mistake->status);
    EXPECT_ERROR_HAS(mistake->words);
    f->saved = kept;
    tn_ledger after = test_ledger(f->ops.scope);
    test_expect_same_ledger(&before, &after);
    after = test_ledger(f->other.scope);
    test_expect_same_ledger(&elsewhere, &after);
    assert_true(other.x.data.value == 0 && f->delayed.dy.data.value == 0);
}

static void each_mistake_is_refused_by_name(void **state) {
    (void)state;
    fixture f = open_fixture();
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        for (which of = FORWARD; of <= BACKWARD; of++)
            if (mistakes[i].of & of) expect_refused(&f, &mistakes[i], of);
    }
    EXPECT_STATUS(tn_grouped_linear_forward(NULL, NULL, f.ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_grouped_linear_backward(NULL, NULL, NULL, f.ops.stream), TN_INVALID_ARGUMENT);
    call c = right_call(&f);
    EXPECT_OK(tn_grouped_linear_backward(&c.backward, c.saved, c.delayed, f.ops.stream));
    test_ops_close_host(&f.ops);
    test_ops_close_host(&f.other);
}

/* Over one that is still to be done: it stays what it was, and nothing is computed. */
static void expect_no_other_is_delayed(const fixture *f, const call *c) {
    const tn_grouped_delayed kept = *c->delayed;
    tn_ledger before = test_ledger(f->ops.scope);
    EXPECT_STATUS(tn_grouped_linear_backward(&c->backward, c->saved, c->delayed, f->ops.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("delayed still holds another gradient");
    assert_memory_equal(c->delayed, &kept, sizeof kept);
    tn_ledger after = test_ledger(f->ops.scope);
    test_expect_same_ledger(&before, &after);
}

static void a_late_weight_gradient_needs_what_was_delayed(void **state) {
    (void)state;
    fixture f = open_fixture();
    call c = right_call(&f);
    EXPECT_STATUS(tn_grouped_linear_weight_gradient(&c.backward, c.saved, c.delayed, f.ops.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("delayed has no dy");
    EXPECT_STATUS(tn_grouped_linear_weight_gradient(&c.backward, c.saved, NULL, f.ops.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_grouped_linear_weight_gradient(NULL, c.saved, NULL, f.ops.stream),
                  TN_INVALID_ARGUMENT);
    c.backward.delay = 1;
    EXPECT_OK(tn_grouped_linear_backward(&c.backward, c.saved, c.delayed, f.ops.stream));
    expect_no_other_is_delayed(&f, &c);
    EXPECT_STATUS(tn_grouped_linear_weight_gradient(&c.backward, NULL, c.delayed, f.ops.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("dweights need x");
    EXPECT_OK(tn_grouped_linear_weight_gradient(&c.backward, c.saved, c.delayed, f.ops.stream));
    test_ops_close_host(&f.ops);
    test_ops_close_host(&f.other);
}

/* Two experts' gradients are one tensor: dx and all gradients are what they were. */
static void outputs_that_are_one_are_refused_before_dx(void **state) {
    (void)state;
    fixture f = open_fixture();
    test_experts_fill(&f.ops, f.t.dx, 8);
    tn__matrix before = test_fetch_matrix(&f.ops, f.t.dx);
    for (int i = 0; i < 2; i++) {
        call c = right_call(&f);
        if (i == 0) f.matrices[4] = f.matrices[0];
        for (int e = 0; e < EXPERTS; e++)
            f.vectors[e] = f.t.dbiases[e];
        if (i == 1) f.vectors[2] = f.vectors[0];
        c.backward.dbiases = f.vectors;
        EXPECT_STATUS(tn_grouped_linear_backward(&c.backward, c.saved, NULL, f.ops.stream),
                      TN_IN_USE);
        tn__matrix after = test_fetch_matrix(&f.ops, f.t.dx);
        test_expect_same_matrix(&after, &before);
        test_matrix_free(&after);
        for (int e = 0; e < EXPERTS; e++) {
            assert_int_equal(test_state(f.t.dweights[e], TN_PLANE_DATA), TN_PLANE_ABSENT);
            assert_int_equal(test_state(f.t.dbiases[e], TN_PLANE_DATA), TN_PLANE_ABSENT);
        }
    }
    test_matrix_free(&before);
    test_ops_close_host(&f.ops);
    test_ops_close_host(&f.other);
}

/* What is under a lease can not be destroyed: the call has succeeded, the handles are {0}, and the
 * tensor ends with its scope. */
static void what_is_saved_and_leased_ends_with_its_scope(void **state) {
    (void)state;
    for (int is_scale = 0; is_scale < 2; is_scale++) {
        fixture f = open_fixture();
        call c = right_call(&f);
        tn_lease lease;
        tn_plane_view view;
        EXPECT_OK(tn_lease_begin(is_scale ? f.saved.x.scale : f.saved.x.data, TN_PLANE_DATA,
                                 TN_READ, f.ops.stream, &lease, &view));
        EXPECT_OK(tn_grouped_linear_backward(&c.backward, c.saved, c.delayed, f.ops.stream));
        assert_true(f.saved.x.data.value == 0 && f.saved.x.scale.value == 0);
        assert_int_equal(test_ledger(f.t.saved).tensors, 1);
        EXPECT_OK(tn_lease_end(lease));
        EXPECT_OK(tn_scope_close(f.t.saved));
        test_ops_close_host(&f.ops);
        test_ops_close_host(&f.other);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_mistake_is_refused_by_name),
        cmocka_unit_test(outputs_that_are_one_are_refused_before_dx),
        cmocka_unit_test(a_late_weight_gradient_needs_what_was_delayed),
        cmocka_unit_test(what_is_saved_and_leased_ends_with_its_scope),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
