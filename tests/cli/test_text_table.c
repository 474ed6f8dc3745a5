/* Tables and numbers come out as they are shown here, to the character. */
#include <stdlib.h>
#include <string.h>

#include "test_support.h"
#include "text_table.h"

static void expect_printed(const text_table *table, const char *expected) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    assert_non_null(stream);
    assert_true(text_table_print(table, stream));
    fclose(stream);
    assert_string_equal(text, expected);
    free(text);
}

static void columns_are_aligned(void **state) {
    text_table *table = text_table_create("<>>");
    (void)state;
    text_table_cell(table, "owner");
    text_table_cell(table, "bytes");
    text_table_cell(table, "share");
    text_table_rule(table);
    text_table_cell(table, "weights");
    text_table_cell(table, "%d", 1024);
    text_table_cell(table, "%.1f %%", 99.5);
    text_table_cell(table, "rest");
    text_table_cell(table, "%d", 5);
    expect_printed(table, "owner    bytes   share\n"
                          "-------  -----  ------\n"
                          "weights   1024  99.5 %\n"
                          "rest         5\n");
    text_table_destroy(table);
}

static void a_rule_ends_a_row_and_may_be_last(void **state) {
    text_table *table = text_table_create("<<");
    (void)state;
    text_table_cell(table, "a");
    text_table_rule(table);
    text_table_cell(table, "b");
    text_table_cell(table, "c");
    text_table_rule(table);
    expect_printed(table, "a\n-  -\nb  c\n-  -\n");
    text_table_destroy(table);
}

static void widths_are_of_characters_not_bytes(void **state) {
    text_table *table = text_table_create("<>");
    (void)state;
    text_table_cell(table, "4096\u00d74096");
    text_table_cell(table, "1");
    text_table_cell(table, "123456789");
    text_table_cell(table, "2");
    expect_printed(table, "4096\u00d74096  1\n123456789  2\n");
    text_table_destroy(table);
}

static void a_table_without_cells_prints_nothing(void **state) {
    text_table *table = text_table_create(">");
    (void)state;
    expect_printed(table, "");
    text_table_destroy(table);
    text_table_destroy(NULL);
    assert_null(text_table_create(""));
    assert_null(text_table_create("<<<<<<<<<<<<<<<<<"));
}

static void a_stream_that_fails_is_reported(void **state) {
    FILE *full = fopen("/dev/full", "w");
    text_table *table = text_table_create("<");
    (void)state;
    assert_non_null(full);
    setvbuf(full, NULL, _IONBF, 0);
    text_table_cell(table, "text");
    assert_false(text_table_print(table, full));
    fclose(full);
    text_table_destroy(table);
}

static void sizes_use_the_largest_unit_that_fits(void **state) {
    (void)state;
    assert_string_equal(text_size(0).text, "0 B");
    assert_string_equal(text_size(1023).text, "1023 B");
    assert_string_equal(text_size(1024).text, "1.0 KiB");
    assert_string_equal(text_size(1536).text, "1.5 KiB");
    assert_string_equal(text_size((1 << 20) - 1).text, "1.0 MiB");
    assert_string_equal(text_size(UINT64_C(45681213440)).text, "42.5 GiB");
    assert_string_equal(text_size(UINT64_MAX).text, "16.0 EiB");
}

static void counts_have_commas_and_mebibytes_one_decimal(void **state) {
    (void)state;
    assert_string_equal(text_count(0).text, "0");
    assert_string_equal(text_count(999).text, "999");
    assert_string_equal(text_count(1000).text, "1,000");
    assert_string_equal(text_count(109804).text, "109,804");
    assert_string_equal(text_count(UINT64_MAX).text, "18,446,744,073,709,551,615");
    assert_string_equal(text_mebibytes(0).text, "0.0 MiB");
    assert_string_equal(text_mebibytes(1536 << 10).text, "1.5 MiB");
    assert_string_equal(text_mebibytes((1 << 20) - 1).text, "1.0 MiB");
    assert_string_equal(text_mebibytes(UINT64_C(43564) << 20).text, "43,564.0 MiB");
    assert_string_equal(text_mebibytes(UINT64_MAX).text, "17,592,186,044,416.0 MiB");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(columns_are_aligned),
        cmocka_unit_test(a_rule_ends_a_row_and_may_be_last),
        cmocka_unit_test(widths_are_of_characters_not_bytes),
        cmocka_unit_test(a_table_without_cells_prints_nothing),
        cmocka_unit_test(a_stream_that_fails_is_reported),
        cmocka_unit_test(sizes_use_the_largest_unit_that_fits),
        cmocka_unit_test(counts_have_commas_and_mebibytes_one_decimal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
