/* The battery in its short form, through the public interface: the host against the emulated
 * device, which a test of the GPU's takes for a real one. */
#include "emulator.h"
#include "op_battery_support.h"

static gpu_side device, host;

static void expect_no_fault(void) {
    char fault[EMULATED_FAULT_BYTES];
    emulated_take_fault(fault);
    assert_string_equal(fault, "");
}

static void every_op_on_the_emulated_device_equals_the_host(void **state) {
    (void)state;
    battery_run(&device, &host, BATTERY_SHORT);
    expect_no_fault();
    gpu_count_report("emulated against host");
}

static const battery_case ragged = {130, 152, GPU_FILL_NORMAL, 5, 0};

/* In other orders of threads and blocks the bits are the same: no barrier is missing. */
static void check_orders(const battery_op *op) {
    static const uint64_t orders[] = {1, 2, 3};
    for (unsigned way = 0; way<op->ways; way += op->ways> 12 ? 5 : 1) {
        battery_case c = ragged;
        c.way = way;
        battery_operands expected_operands = battery_prepare(&device, op, &c);
        op->launch(&device, &c, &expected_operands);
        battery_results expected = battery_fetch(&device, &expected_operands);
        for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
            battery_operands operands = battery_prepare(&device, op, &c);
            emulated_set_order(orders[i]);
            op->launch(&device, &c, &operands);
            battery_results actual = battery_fetch(&device, &operands);
            emulated_set_order(0);
            battery_compare(&operands, &actual, &expected, op->name, "in another order");
            battery_results_end(&operands, &actual);
            battery_end(&device, &operands);
        }
        battery_results_end(&expected_operands, &expected);
        battery_end(&device, &expected_operands);
    }
}

static void every_order_of_threads_gives_the_same_bits(void **state) {
    (void)state;
    battery_each_op(check_orders);
    expect_no_fault();
    gpu_count_report("other orders of threads");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_op_on_the_emulated_device_equals_the_host),
        cmocka_unit_test(every_order_of_threads_gives_the_same_bits),
    };
    gpu_open(&device);
    gpu_open_host(&host, (size_t)1 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&host);
    gpu_close(&device);
    return failures;
}
