/* An op with two outputs whose planes were made on another stream: if telling the pool of their
 * uses fails, none of them is valid. */
#include "test_ops.h"

#include "host_alloc.h"

enum { STREAMS = 6, FAULTS_MAX = 200, ROWS = 130, COLS = 200 };

typedef struct outputs {
    test_ops ops;
    tn_quantize_args quantize;
} outputs;

static outputs open_outputs(void) {
    static const float values[ROWS * COLS] = {1.0f};
    outputs o = {.ops = test_ops_open_host(), .quantize = TN_QUANTIZE_ARGS_INIT};
    o.quantize.src = test_plain(o.ops.scope, TN_FP32, ROWS, COLS);
    test_write(&o.ops, o.quantize.src, values);
    o.quantize.dst = test_fp8(o.ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, ROWS, COLS);
    o.quantize.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    EXPECT_OK(tn_quantize(&o.quantize, o.ops.stream));
    return o;
}

/* ROW is begun first: it is VALID after a failure only if nothing was begun, and COL with it. */
static void expect_none_or_all_as_before(const outputs *o) {
    if (test_state(o->quantize.dst, TN_PLANE_ROW) != TN_PLANE_VALID) return;
    assert_int_equal(test_state(o->quantize.dst, TN_PLANE_COL), TN_PLANE_VALID);
}

/* Every host allocation of a quantization on a stream that the planes do not come from fails. */
static void fail_each_allocation_on(outputs *o, tn_stream stream) {
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    for (long nth = 1; status != TN_OK && nth < FAULTS_MAX; nth++) {
        tn__host_alloc_fault(nth, 0);
        status = tn_quantize(&o->quantize, stream);
        tn__host_alloc_fault(0, 0);
        if (status == TN_OK) break;
        assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
        expect_none_or_all_as_before(o);
        assert_int_equal(test_ledger(o->ops.scope).leases, 0);
        EXPECT_OK(tn_ledger_check(o->ops.pool));
    }
    EXPECT_OK(status);
}

static void two_outputs_are_valid_together_or_not_at_all(void **state) {
    (void)state;
    outputs o = open_outputs();
    tn_stream streams[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        EXPECT_OK(tn_stream_create(o.ops.device, &streams[i]));
        fail_each_allocation_on(&o, streams[i]);
    }
    EXPECT_OK(tn_device_synchronize(o.ops.device));
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_destroy(o.ops.device, streams[i]));
    test_ops_close_host(&o.ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_outputs_are_valid_together_or_not_at_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
