/* What each layer leaves alive after each call, on the host: see test_layer_bytes. */
#include "test_layers.h"

static void between_calls_only_what_is_saved_is_alive(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    assert_int_equal(test_layer_bytes(&ops, 0, 0), 960);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(between_calls_only_what_is_saved_is_alive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
