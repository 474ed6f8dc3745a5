/* The layers on the simulated device: bytes as on the host after each call, and no races. */
#include "test_layers.h"

static void the_ghost_keeps_the_same_bytes_alive(void **state) {
    (void)state;
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    assert_int_equal(test_layer_bytes(&ops, 1, 0), 960);
    test_ops_close(&ops);
    test_close_sim(ops.device); /* fails if there were races */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_ghost_keeps_the_same_bytes_alive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
