/* The scenarios of op_faults_support.h: one call with one failure in it. */
#include "op_faults_support.h"

#include <stdlib.h>
#include <string.h>

typedef struct scenario {
    const op_fault_row *row;
    int is_sim;
    int is_again;
} scenario;

/* ---- what there was before ------------------------------------------------------------------ */

typedef struct snapshot {
    tn_plane_state state[OP_FAULTS_OUTPUTS];
    char *bytes[OP_FAULTS_OUTPUTS]; /* data, then scales; NULL: not valid, or nothing is there */
    tn_ledger ledger;
} snapshot;

static char *bytes_of(const test_ops *ops, const op_fault_output *out) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(out->tensor, out->plane, &layout));
    char *bytes = malloc(layout.data_bytes + layout.scale_bytes + 1);
    EXPECT_OK(tn_plane_read(out->tensor, out->plane, bytes, layout.data_bytes,
                            layout.scale_bytes ? bytes + layout.data_bytes : NULL,
                            layout.scale_bytes, ops->stream));
    test_ops_wait(ops);
    return bytes;
}

static snapshot take(const test_ops *ops, const scenario *s, const op_fault_call *call,
                     tn_scope scope) {
    snapshot shot = {.ledger = test_ledger(scope)};
    for (int i = 0; i < call->out_count; i++) {
        shot.state[i] = test_state(call->out[i].tensor, call->out[i].plane);
        if (shot.state[i] == TN_PLANE_VALID && !s->is_sim)
            shot.bytes[i] = bytes_of(ops, &call->out[i]);
    }
    return shot;
}

/* Whether a part of the call's work was put on the stream: then none of its outputs is valid. */
static int is_cut_short(const scenario *s, const op_fault_call *call, const snapshot *before) {
    int changed = 0, valid = 0;
    for (int i = 0; i < call->out_count; i++) {
        tn_plane_state now = test_state(call->out[i].tensor, call->out[i].plane);
        changed += now != before->state[i];
        valid += now == TN_PLANE_VALID;
    }
    if (!s->row->is_split || changed == 0) return 0;
    assert_int_equal(valid, 0);
    return 1;
}

static void expect_same_output(const test_ops *ops, const scenario *s, const op_fault_output *out,
                               tn_plane_state state, const char *bytes, long nth) {
    tn_plane_layout layout;
    tn_plane_state now = test_state(out->tensor, out->plane);
    if (now != state)
        fail_msg("%s, %s outputs, failure %ld: plane %s was in state %d and is in %d", s->row->name,
                 s->is_again ? "valid" : "new", nth, tn_plane_name(out->plane), (int)state,
                 (int)now);
    if (!bytes) return;
    EXPECT_OK(tn_plane_layout_get(out->tensor, out->plane, &layout));
    char *after = bytes_of(ops, out);
    assert_memory_equal(after, bytes, layout.data_bytes + layout.scale_bytes);
    free(after);
}

/* What was to be added to is made anew, where it is not valid any more. */
static void refill(const test_ops *ops, const op_fault_call *call, const snapshot *before) {
    for (int i = 0; i < call->out_count; i++) {
        const op_fault_output *out = &call->out[i];
        if (out->plane == TN_PLANE_DATA && before->state[i] == TN_PLANE_VALID &&
            test_state(out->tensor, out->plane) != TN_PLANE_VALID)
            test_declare_valid(ops, out->tensor, out->plane);
    }
}

static void end(snapshot *shot) {
    for (int i = 0; i < OP_FAULTS_OUTPUTS; i++)
        free(shot->bytes[i]);
}

/* ---- one failure ---------------------------------------------------------------------------- */

static int run_with_fault(const void *argument, fault_point *fault) {
    const scenario *s = argument;
    op_fault_call call = {.out_count = 0};
    test_ops ops = s->is_sim ? test_ops_open(test_open_sim(0, 0)) : test_ops_open_host();
    tn_scope scope = test_ops_scope(&ops, TN_SCOPE_MODEL, "operands");
    tn_scope scratch = test_ops_scope(&ops, TN_SCOPE_OP, "scratch");
    tn_stream other;
    EXPECT_OK(tn_stream_create(ops.device, &other));
    s->row->prepare(&ops, scope, scratch, &call);
    if (s->is_again) EXPECT_OK(s->row->run(&call, ops.stream));
    snapshot before = take(&ops, s, &call, ops.scope);
    fault_begin(fault);
    tn_status status = s->row->run(&call, s->is_again ? other : ops.stream);
    fault_end(fault);
    if (status != TN_OK) {
        assert_int_equal(status, fault->is_host ? TN_OUT_OF_HOST_MEMORY : TN_DRIVER_ERROR);
        tn_ledger after = test_ledger(ops.scope);
        test_expect_same_ledger(&before.ledger, &after);
        for (int i = 0; i < call.out_count && !is_cut_short(s, &call, &before); i++)
            expect_same_output(&ops, s, &call.out[i], before.state[i], before.bytes[i], fault->nth);
    }
    assert_int_equal(test_ledger(ops.scope).leases, 0);
    EXPECT_OK(tn_ledger_check(ops.pool));
    EXPECT_OK(tn_pool_check(ops.pool));
    refill(&ops, &call, &before);
    EXPECT_OK(s->row->run(&call, ops.stream));
    EXPECT_OK(tn_device_synchronize(ops.device));
    EXPECT_OK(tn_scope_close(scratch));
    EXPECT_OK(tn_scope_close(scope));
    EXPECT_OK(tn_stream_destroy(ops.device, other));
    tn_device *device = ops.device;
    if (s->is_sim) {
        test_ops_close(&ops);
        test_close_sim(device);
    } else {
        test_ops_close_host(&ops);
    }
    end(&before);
    return status != TN_OK;
}

int op_faults_fail_each(const op_fault_row *rows, int count, fault_point fault, int is_sim) {
    int failed = 0;
    for (int i = 0; i < count; i++) {
        for (int is_again = 0; is_again < 2; is_again++) {
            scenario s = {&rows[i], is_sim, is_again};
            for (fault.and_after = 0; fault.and_after < 2; fault.and_after++) {
                failed += fault_each(fault, run_with_fault, &s);
            }
        }
    }
    return failed;
}
