/* Each layer with every driver call and every host allocation of a forward, a backward and a
 * delayed gradient failing in turn, once and from then on. After a failure the books balance, no
 * scratch is there, the saved set is what it was, and gradients that are added to are untouched
 * unless the driver refused a later part of the work that adds to them; then the same call
 * succeeds. */
#include "fault_loop_support.h"
#include "tenure_lifetime.h"
#include "test_layers.h"

#include <string.h>

/* Of the launches that add to gradients, bias1's, bias2's, gamma's and beta's, those after the
 * first may be refused when that has run. */
enum { UNKNOWN_ERROR = 999, LAUNCHES_LAST = 3 };

typedef enum part { FORWARD, BACKWARD, DELAYED, PARTS } part;

typedef struct scenario {
    test_layer_config config;
    part part;
    int is_sim;
    int *cut_short; /* counts */
} scenario;

static tn_status run_part(test_layer *l, part which, tn_stream stream) {
    if (which == FORWARD) return test_layer_forward(l, stream);
    if (which == BACKWARD) return test_layer_backward(l, stream);
    return tn_weight_gradient(&l->delayed[0], l->op, stream);
}

static const tn_tensor *gradients_of(const test_layer *l, int *count) {
    static tn_tensor all[6];
    const tn_tensor gradients[6] = {l->dweight[0], l->dweight[1], l->dbias[0],
                                    l->dbias[1],   l->dgamma,     l->dbeta};
    *count = 0;
    for (int i = 0; i < 6; i++)
        if (gradients[i].value) all[(*count)++] = gradients[i];
    return all;
}

/* The driver has refused a later one of the launches that add to gradients: those are not valid,
 * and are written again here. On the host a launch takes host memory. */
static int is_cut_short(const test_layer *l) {
    int count, invalid = 0;
    const tn_tensor *gradients = gradients_of(l, &count);
    for (int i = 0; i < count; i++) {
        if (test_state(gradients[i], TN_PLANE_DATA) == TN_PLANE_VALID) continue;
        EXPECT_OK(tn_plane_fill(gradients[i], TN_PLANE_DATA, 0, l->ops.stream));
        invalid++;
    }
    return invalid > 0;
}

static void expect_gradients_untouched(const test_layer *l) {
    for (int i = 0; i < test_layer_products(l); i++) {
        static char bytes[sizeof(float) * LAYER_K * 2 * LAYER_F];
        int64_t rows, cols;
        if (l->dweight[i].value == 0) continue;
        test_layer_shape(&l->config, i, &rows, &cols);
        assert_int_equal(test_state(l->dweight[i], TN_PLANE_DATA), TN_PLANE_VALID);
        test_read(&l->ops, l->dweight[i], bytes);
        for (size_t b = 0; b < (size_t)(rows * cols) * sizeof(float); b++)
            assert_int_equal(bytes[b], 0);
    }
}

static void expect_as_before(const test_layer *l, const scenario *s, const tn_ledger *before,
                             const test_layer_saved *saved, const tn_delayed_gradient delayed[2],
                             int *cut_short) {
    const tn_ledger now = test_ledger(l->saved_scope);
    assert_int_equal(test_ledger(l->op).tensors, 0);
    assert_int_equal(test_ledger(l->ops.scope).leases, 0);
    assert_int_equal(now.total_bytes, before->total_bytes);
    assert_int_equal(now.tensors, before->tensors);
    assert_memory_equal(saved, &l->saved, sizeof *saved);
    assert_memory_equal(delayed, l->delayed, sizeof l->delayed);
    EXPECT_OK(tn_ledger_check(l->ops.pool));
    EXPECT_OK(tn_pool_check(l->ops.pool));
    if (is_cut_short(l))
        ++*cut_short;
    else if (!s->is_sim)
        expect_gradients_untouched(l);
}

static test_ops open_ops(const scenario *s) {
    return s->is_sim ? test_ops_open(test_open_sim(0, 0)) : test_ops_open_host();
}

static void close_ops(test_ops *ops, const scenario *s) {
    test_ops_close(ops);
    if (s->is_sim)
        test_close_sim(ops->device);
    else
        EXPECT_OK(tn_device_destroy(ops->device));
}

/* A driver that is asked to free may refuse: then what there is goes with its scope. */
static int refuses_frees(const fault_point *fault) { return !fault->is_host; }

static int run(const void *argument, fault_point *fault) {
    const scenario *s = argument;
    test_ops ops = open_ops(s);
    test_layer l = test_layer_open(&ops, &s->config);
    for (int p = FORWARD; p < (int)s->part; p++)
        EXPECT_OK(run_part(&l, (part)p, ops.stream));
    const tn_ledger before = test_ledger(l.saved_scope);
    const test_layer_saved saved = l.saved;
    tn_delayed_gradient delayed[2];
    memcpy(delayed, l.delayed, sizeof delayed);
    fault_begin(fault);
    tn_status status = run_part(&l, s->part, ops.stream);
    fault_end(fault);
    if (status != TN_OK && !refuses_frees(fault)) {
        expect_as_before(&l, s, &before, &saved, delayed, s->cut_short);
        EXPECT_OK(run_part(&l, s->part, ops.stream));
    }
    EXPECT_OK(tn_ledger_check(ops.pool));
    close_ops(&ops, s);
    return status != TN_OK;
}

enum { WAYS = 3 };

static test_layer_config config_of(int kind, int way, int is_sim) {
    static const tn_format formats[WAYS][2] = {
        {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_2D},
        {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_PLAIN},
        {TN_FORMAT_FP8_TENSOR, TN_FORMAT_FP8_TENSOR}}; /* by delayed scaling */
    return (test_layer_config){.kind = (test_layer_kind)kind,
                               .format = {formats[way][0], formats[way][1]},
                               .has_scales = 1,
                               .dtype = TN_BF16,
                               .norm = TN_NORM_LAYER,
                               .recompute = way == 1,
                               .delay = 1,
                               .policy = TN_POLICY_BUDGET,
                               .has_no_values = is_sim};
}

static void fail_all(int is_sim, int is_host) {
    for (int i = 0; i < TEST_LAYER_KINDS * WAYS * PARTS; i++) {
        int cut_short = 0;
        scenario s = {.cut_short = &cut_short,
                      .config = config_of(i / WAYS % TEST_LAYER_KINDS, i % WAYS, is_sim),
                      .part = (part)(i / WAYS / TEST_LAYER_KINDS),
                      .is_sim = is_sim};
        for (int and_after = 0; and_after < 2; and_after++) {
            const fault_point fault = {
                .is_host = is_host, .and_after = and_after, .code = UNKNOWN_ERROR};
            assert_true(fault_each(fault, run, &s) > 0);
        }
        assert_true(cut_short <= 2 * LAUNCHES_LAST);
    }
}

static void a_host_allocation_that_fails_changes_nothing(void **state) {
    (void)state;
    fail_all(0, 1);
}

static void a_host_allocation_that_fails_before_a_ghost_changes_nothing(void **state) {
    (void)state;
    fail_all(1, 1);
}

static void a_driver_call_that_fails_leaks_nothing(void **state) {
    (void)state;
    fail_all(1, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_host_allocation_that_fails_changes_nothing),
        cmocka_unit_test(a_host_allocation_that_fails_before_a_ghost_changes_nothing),
        cmocka_unit_test(a_driver_call_that_fails_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
