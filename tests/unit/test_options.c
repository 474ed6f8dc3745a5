/* Options from the environment: accepted, refused, aliased; and statuses in words. */
#include "test_support.h"

#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"
#include "options.h"

static void sizes_take_binary_units_and_nothing_else(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t bytes;
    } good[] = {{"0", 0},          {"512", 512},         {"2MiB", 2097152},
                {"1.5 KiB", 1536}, {"3GiB", 3221225472}, {"18446744073709551615", SIZE_MAX}};
    static const char *const bad[] = {"",
                                      "abc",
                                      "-1",
                                      "1MB",
                                      "2MiBs",
                                      "0x10",
                                      "1e3",
                                      "1..5MiB",
                                      "18446744073709551616",
                                      "9999999999TiB"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        size_t bytes = 7;
        assert_int_equal(tn__parse_size(good[i].text, &bytes), 1);
        assert_int_equal(bytes, good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        size_t bytes = 7;
        assert_int_equal(tn__parse_size(bad[i], &bytes), 0);
        assert_int_equal(bytes, 7);
    }
}

static void a_good_value_is_taken_and_its_source_shown(void **state) {
    (void)state;
    char text[4096];
    setenv("TENURE_PAGE_BYTES", "32MiB", 1);
    setenv("NVTE_RELEASE_FROZEN_WEIGHT_COLUMNWISE", "1", 1);
    tn__options_reload();
    assert_int_equal(tn__options_get()->page_bytes, 32 << 20);
    assert_int_equal(tn__options_get()->release_frozen_columnwise, 1);
    size_t bytes = tn_options_describe(text, sizeof text);
    assert_int_equal(bytes, strlen(text));
    assert_non_null(strstr(text, "32MiB          (TENURE_PAGE_BYTES)"));
    assert_non_null(strstr(text, "(NVTE_RELEASE_FROZEN_WEIGHT_COLUMNWISE)"));
    unsetenv("TENURE_PAGE_BYTES");
    unsetenv("NVTE_RELEASE_FROZEN_WEIGHT_COLUMNWISE");
}

static void a_bad_value_keeps_the_default(void **state) {
    (void)state;
    setenv("TENURE_PAGE_BYTES", "abc", 1);
    setenv("TENURE_DRIVER", "gpu", 1);
    setenv("TENURE_RELEASE_FROZEN_COLUMNWISE", "2", 1);
    tn__options_reload();
    assert_int_equal(tn__options_get()->page_bytes, 4 << 20);
    assert_int_equal(tn__options_get()->driver, TN__DRIVER_CHOICE_AUTO);
    assert_int_equal(tn__options_get()->release_frozen_columnwise, 0);
    unsetenv("TENURE_PAGE_BYTES");
    unsetenv("TENURE_DRIVER");
    unsetenv("TENURE_RELEASE_FROZEN_COLUMNWISE");
    tn__options_reload();
}

static void a_page_size_beyond_the_device_is_refused_by_name(void **state) {
    (void)state;
    tn_device *device = test_open_host();
    tn_pool *pool = NULL;
    setenv("TENURE_PAGE_BYTES", "1024TiB", 1);
    tn__options_reload();
    EXPECT_STATUS(tn_pool_create(device, NULL, &pool), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("TENURE_PAGE_BYTES");
    unsetenv("TENURE_PAGE_BYTES");
    tn__options_reload();
    EXPECT_OK(tn_device_destroy(device));
}

static void every_status_has_a_name_and_words(void **state) {
    (void)state;
    for (int i = 0; i < TN_STATUS_COUNT; i++) {
        assert_memory_equal(tn_status_name((tn_status)i), "TN_", 3);
        assert_true(strlen(tn_status_text((tn_status)i)) > 1);
    }
    assert_string_equal(tn_status_name((tn_status)999), "unknown status");
}

static void the_last_error_keeps_words_and_native_code(void **state) {
    (void)state;
    tn_status status = TN_FAIL_NATIVE(TN_DRIVER_ERROR, 700, "cuSomething(%d) failed", 5);
    assert_int_equal(status, TN_DRIVER_ERROR);
    assert_int_equal(tn_error_last_native(), 700);
    assert_non_null(strstr(tn_error_last(), "cuSomething(5) failed [TN_DRIVER_ERROR, "));
    status = TN_FAIL(TN_IO, "again: %s", tn_error_last());
    assert_int_equal(status, TN_IO);
    assert_non_null(strstr(tn_error_last(), "again: cuSomething(5)"));
}

static void host_memory_faults_hit_the_call_they_name(void **state) {
    (void)state;
    long live = tn__host_live_blocks();
    tn__host_alloc_fault(2, 0);
    void *first = tn__host_alloc(3, 5);
    assert_non_null(first);
    assert_null(tn__host_alloc(3, 5));
    void *third = tn__host_alloc(3, 5);
    assert_non_null(third);
    tn__host_alloc_fault(1, 1);
    assert_null(tn__host_alloc(1, 1));
    assert_null(tn__host_strdup("x"));
    tn__host_alloc_fault(0, 0);
    assert_null(tn__host_alloc(SIZE_MAX, 2));
    tn__host_free(first);
    tn__host_free(third);
    assert_int_equal(tn__host_live_blocks(), live);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_take_binary_units_and_nothing_else),
        cmocka_unit_test(a_good_value_is_taken_and_its_source_shown),
        cmocka_unit_test(a_bad_value_keeps_the_default),
        cmocka_unit_test(a_page_size_beyond_the_device_is_refused_by_name),
        cmocka_unit_test(every_status_has_a_name_and_words),
        cmocka_unit_test(the_last_error_keeps_words_and_native_code),
        cmocka_unit_test(host_memory_faults_hit_the_call_they_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
