/* The battery in its short form, through the public interface: the host against the emulated
 * device, which a test of the GPU's takes for a real one. */
#include "emulator.h"
#include "op_battery_support.h"
#include "scripted_cublaslt.h"

static gpu_side device, host;

static void expect_no_fault(void) {
    char fault[EMULATED_FAULT_BYTES];
    emulated_take_fault(fault);
    assert_string_equal(fault, "");
}

static void every_op_on_the_emulated_device_equals_the_host(void **state) {
    const battery_config config = {&device, &host, BATTERY_SHORT, 1, NULL};
    (void)state;
    battery_run(&config);
    expect_no_fault();
    assert_int_equal(battery_failures(BATTERY_COMPARED), 0);
    assert_int_equal(battery_failures(BATTERY_SKIPPED), 0);
}

static const battery_case ragged = {130, 152, GPU_FILL_NORMAL, 5, 0, NULL};

/* In other orders of threads and blocks the bits are the same: no barrier is missing. */
static void check_orders(const battery_op *op) {
    static const uint64_t orders[] = {1, 2, 3};
    for (unsigned way = 0; way < op->ways; way += (op->ways + 7) / 8) {
        battery_case c = ragged;
        c.way = way;
        battery_operands expected_operands = battery_prepare(&device, op, &c);
        EXPECT_OK(op->launch(&device, &c, &expected_operands));
        battery_results expected = battery_fetch(&device, &expected_operands);
        for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
            battery_operands operands = battery_prepare(&device, op, &c);
            emulated_set_order(orders[i]);
            EXPECT_OK(op->launch(&device, &c, &operands));
            battery_results actual = battery_fetch(&device, &operands);
            emulated_set_order(0);
            battery_count(op, BATTERY_REORDERED,
                          battery_results_equal(&operands, &actual, &expected, op->name));
            battery_results_end(&operands, &actual);
            battery_end(&device, &operands);
        }
        battery_results_end(&expected_operands, &expected);
        battery_end(&device, &expected_operands);
    }
}

static void every_order_of_threads_gives_the_same_bits(void **state) {
    (void)state;
    battery_each_op(NULL, check_orders);
    expect_no_fault();
    assert_int_equal(battery_failures(BATTERY_REORDERED), 0);
}

int main(void) {
#ifdef __SANITIZE_ADDRESS__
    return 77; /* a switch of fibers costs so much there that it takes more than ten minutes */
#endif
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_op_on_the_emulated_device_equals_the_host),
        cmocka_unit_test(every_order_of_threads_gives_the_same_bits),
    };
    scripted_cublaslt_begin();
    gpu_open(&device);
    gpu_open_host(&host, (size_t)1 << 30);
    battery_look_for_products(&device);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    battery_print_table("operation");
    gpu_close(&host);
    gpu_close(&device);
    return failures;
}
