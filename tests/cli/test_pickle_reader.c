/* The pickle reader: what it makes of each instruction, and that it refuses the rest unrun. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pickle_reader.h"
#include "pickle_writer.h"
#include "test_support.h"

/* Fails the test if it can not be read. */
static pickle *read_bytes(const char *bytes, size_t length) {
    char error[PICKLE_ERROR_BYTES];
    pickle *made = NULL;
    if (pickle_read((const unsigned char *)bytes, length, &made, error) != PICKLE_READ)
        fail_msg("%s", error);
    return made;
}
#define READ(text) read_bytes(text, sizeof(text) - 1)

static void expect_error_of(const char *bytes, size_t length, const char *words) {
    char error[PICKLE_ERROR_BYTES] = "";
    pickle *made = NULL;
    assert_int_equal(pickle_read((const unsigned char *)bytes, length, &made, error),
                     PICKLE_BAD_INPUT);
    assert_null(made);
    if (!strstr(error, words)) fail_msg("expected \"%s\" in: %s", words, error);
}
#define EXPECT_REFUSED(text, words) expect_error_of(text, sizeof(text) - 1, words)

static void expect_integer(const char *bytes, size_t length, int64_t expected) {
    pickle *made = read_bytes(bytes, length);
    assert_int_equal(pickle_root(made)->kind, PICKLE_INTEGER);
    assert_true(pickle_root(made)->of.integer == expected);
    pickle_free(made);
}
#define EXPECT_INTEGER(text, expected) expect_integer(text, sizeof(text) - 1, expected)

static void whole_numbers_are_read(void **state) {
    (void)state;
    EXPECT_INTEGER("\x80\x02K\xff.", 255);
    EXPECT_INTEGER("\x80\x02M\xff\xff.", 65535);
    EXPECT_INTEGER("\x80\x02J\xff\xff\xff\xff.", -1);
    EXPECT_INTEGER("\x80\x02J\x00\x00\x00\x80.", INT32_MIN);
    EXPECT_INTEGER("\x80\x02\x8a\x00.", 0);
    EXPECT_INTEGER("\x80\x02\x8a\x01\xff.", -1);
    EXPECT_INTEGER("\x80\x02\x8a\x06\x00\x00\x00\x00\x00\x7f.", INT64_C(0x7f0000000000));
    EXPECT_INTEGER("\x80\x02\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80.", INT64_MIN);
    EXPECT_INTEGER("\x80\x02\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00.", -1);
    EXPECT_INTEGER("\x80\x02\x8b\x01\x00\x00\x00\x05.", 5);
    EXPECT_REFUSED("\x80\x02\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x01.", "64 bits");
    EXPECT_REFUSED("\x80\x02\x8b\xff\xff\xff\x7f\x05.", "ends early");
    EXPECT_REFUSED("\x80\x02\x8a\x0a\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a.", "64 bits");
}

static void other_scalars_are_read(void **state) {
    pickle *made = READ("\x80\x04N.");
    (void)state;
    assert_int_equal(pickle_root(made)->kind, PICKLE_NONE);
    pickle_free(made);
    made = READ("\x80\x05\x88.");
    assert_int_equal(pickle_root(made)->kind, PICKLE_BOOLEAN);
    assert_true(pickle_root(made)->of.integer == 1);
    pickle_free(made);
    made = READ("\x80\x02G\x3f\xf8\x00\x00\x00\x00\x00\x00.");
    assert_int_equal(pickle_root(made)->kind, PICKLE_FLOAT);
    assert_true(pickle_root(made)->of.number == 1.5);
    pickle_free(made);
    made = READ("\x80\x04\x8c\x05hello.");
    assert_true(pickle_is_text(pickle_root(made), "hello"));
    assert_false(pickle_is_text(pickle_root(made), "hell"));
    assert_false(pickle_is_text(NULL, "hello"));
    pickle_free(made);
    made = READ("\x80\x04\x8d\x02\x00\x00\x00\x00\x00\x00\x00hi.");
    assert_true(pickle_is_text(pickle_root(made), "hi"));
    pickle_free(made);
    EXPECT_REFUSED("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffhi.", "ends early");
    EXPECT_REFUSED("\x80\x04X\x00\x00\x00\x80hi.", "ends early");
}

static void lists_and_dicts_are_filled_in_every_way(void **state) {
    /* {"a": [1, 2, 3], "b": (4, 5)}, with the last "b" that counts */
    pickle *made = READ("\x80\x02}(X\x01\x00\x00\x00"
                        "a]K\x01"
                        "a(K\x02K\x03"
                        "eX\x01\x00\x00\x00"
                        "bNuX\x01\x00\x00\x00"
                        "bK\x04K\x05\x86s.");
    const pickle_value *list = pickle_member(made, pickle_root(made), "a");
    const pickle_value *pair = pickle_member(made, pickle_root(made), "b");
    (void)state;
    assert_int_equal(list->count, 3);
    for (uint32_t i = 0; i < 3; i++)
        assert_true(pickle_item(made, list, i)->of.integer == (int64_t)i + 1);
    assert_int_equal(pair->kind, PICKLE_LIST);
    assert_int_equal(pair->count, 2);
    assert_true(pickle_item(made, pair, 1)->of.integer == 5);
    assert_null(pickle_member(made, pickle_root(made), "c"));
    assert_null(pickle_member(made, list, "a"));
    assert_null(pickle_member(made, NULL, "a"));
    pickle_free(made);
    made = READ("\x80\x02(K\x01(K\x02(K\x03ltd.");
    pickle_free(made);
}

/* A memo number is a key: the largest costs no more than the first. A list may hold itself. */
static void the_memo_is_recalled(void **state) {
    pickle *made = READ("\x80\x02]r\xff\xff\xff\xffj\xff\xff\xff\xff"
                        "a.");
    const pickle_value *list = pickle_root(made);
    (void)state;
    assert_int_equal(list->count, 1);
    assert_ptr_equal(pickle_item(made, list, 0), list);
    assert_int_equal(pickle_value_number(made, list), 0);
    assert_int_equal(pickle_value_count(made), 1);
    pickle_free(made);
    made = READ("\x80\x04K\x07\x94\x30K\x08\x94\x30h\x00h\x01\x86.");
    assert_true(pickle_item(made, pickle_root(made), 0)->of.integer == 7);
    assert_true(pickle_item(made, pickle_root(made), 1)->of.integer == 8);
    pickle_free(made);
    EXPECT_REFUSED("\x80\x02h\x05.", "memo 5 is asked for before it was made");
}

static void what_runs_code_is_named_and_not_run(void **state) {
    (void)state;
    EXPECT_REFUSED("\x80\x02"
                   "cos\nsystem\n(X\x02\x00\x00\x00"
                   "lstR.",
                   "GLOBAL, which names a Python object (os.system)");
    EXPECT_REFUSED("\x80\x04\x8c\x08"
                   "builtins\x8c\x04"
                   "eval\x93.",
                   "STACK_GLOBAL, which names a Python object (builtins.eval)");
    EXPECT_REFUSED("\x80\x02NNR.", "REDUCE, which calls a Python function");
    EXPECT_REFUSED("\x80\x02NNb.", "BUILD");
    EXPECT_REFUSED("\x80\x02NN\x81.", "NEWOBJ");
    EXPECT_REFUSED("\x80\x02\x82\x01.", "EXT");
    EXPECT_REFUSED("\x80\x02(ios\nsystem\n.", "INST");
    EXPECT_REFUSED("\x80\x02Pname\n.", "PERSID");
    EXPECT_REFUSED("\x80\x02I1\n.", "protocols 0 and 1");
    EXPECT_REFUSED("\x80\x02\xff.", "instruction 0xff is no instruction of pickles");
    EXPECT_REFUSED("\x80\x02"
                   "c\x1b[31m\nx\n.",
                   "(?[31m.x)");
    EXPECT_REFUSED("\x80\x02"
                   "cos\nsystem\n.",
                   "nothing of this file was run");
}

static void a_machine_that_runs_dry_is_refused(void **state) {
    (void)state;
    EXPECT_REFUSED("", "does not begin");
    EXPECT_REFUSED("(l.", "does not begin");
    EXPECT_REFUSED("\x80", "ends early");
    EXPECT_REFUSED("\x80\x01N.", "protocol 1; expected 2 to 5");
    EXPECT_REFUSED("\x80\x06N.", "protocol 6; expected 2 to 5");
    EXPECT_REFUSED("\x80\x02", "byte 2 of the pickle: the pickle ends early");
    EXPECT_REFUSED("\x80\x02.", "needs 1 value, but the stack has 0");
    EXPECT_REFUSED("\x80\x02K\x01", "ends early");
    EXPECT_REFUSED("\x80\x02K", "ends early");
    EXPECT_REFUSED("\x80\x02K\x01\x86.", "needs 2 values, but the stack has 1");
    EXPECT_REFUSED("\x80\x02K\x01(\x85.", "needs 1 value, but the stack has 0");
    EXPECT_REFUSED("\x80\x02t.", "needs a mark");
    EXPECT_REFUSED("\x80\x02K\x01K\x02"
                   "a.",
                   "no list");
    EXPECT_REFUSED("\x80\x02]K\x01K\x02s.", "no dict");
    EXPECT_REFUSED("\x80\x02}(K\x01u.", "a key without a value");
    EXPECT_REFUSED("\x80\x02(K\x01"
                   "d.",
                   "a key without a value");
    EXPECT_REFUSED("\x80\x04\x95\xff\x00\x00\x00\x00\x00\x00\x00N.", "ends early");
    EXPECT_REFUSED("\x80\x02q\x00.", "needs 1 value");
}

/* A million lists within each other, and a mark for each of a million. */
static void depth_costs_no_more_than_length(void **state) {
    enum { DEPTH = 1000000 };
    char *bytes = malloc(2 * DEPTH + 4);
    pickle *made;
    (void)state;
    assert_non_null(bytes);
    memcpy(bytes, "\x80\x02", 2);
    memset(bytes + 2, ']', DEPTH);
    memset(bytes + 2 + DEPTH, 'a', DEPTH - 1);
    bytes[2 * DEPTH + 1] = '.';
    made = read_bytes(bytes, 2 * DEPTH + 2);
    assert_int_equal(pickle_value_count(made), DEPTH);
    pickle_free(made);
    memset(bytes + 2, '(', DEPTH);
    memset(bytes + 2 + DEPTH, 't', DEPTH);
    bytes[2 * DEPTH + 2] = '.';
    made = read_bytes(bytes, 2 * DEPTH + 3);
    assert_int_equal(pickle_value_count(made), DEPTH);
    pickle_free(made);
    free(bytes);
}

/* What the writer writes, the reader reads. */
static void a_written_pickle_is_read(void **state) {
    static const int64_t numbers[] = {0, 255, 256, -1, INT32_MAX, INT64_C(1) << 31, INT64_MIN};
    char *bytes = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&bytes, &length);
    pickle *made;
    const pickle_value *list;
    (void)state;
    assert_non_null(stream);
    pickle_begin(stream);
    pickle_list_begin(stream);
    for (uint32_t i = 0; i < 7; i++) {
        pickle_list_next(stream, i);
        pickle_integer(stream, numbers[i]);
    }
    pickle_list_next(stream, 7);
    pickle_text(stream, "\xc3\xa4");
    pickle_remember(stream, 300);
    for (uint32_t i = 8; i < 2500; i++) {
        pickle_list_next(stream, i);
        pickle_recall(stream, 300);
    }
    pickle_list_end(stream);
    pickle_boolean(stream, 1);
    pickle_pair(stream);
    pickle_end(stream);
    assert_int_equal(fclose(stream), 0);
    made = read_bytes(bytes, length);
    list = pickle_item(made, pickle_root(made), 0);
    assert_int_equal(list->count, 2500);
    for (uint32_t i = 0; i < 7; i++)
        assert_true(pickle_item(made, list, i)->of.integer == numbers[i]);
    for (uint32_t i = 7; i < 2500; i++)
        assert_true(pickle_is_text(pickle_item(made, list, i), "\xc3\xa4"));
    pickle_free(made);
    free(bytes);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_numbers_are_read),
        cmocka_unit_test(other_scalars_are_read),
        cmocka_unit_test(lists_and_dicts_are_filled_in_every_way),
        cmocka_unit_test(the_memo_is_recalled),
        cmocka_unit_test(what_runs_code_is_named_and_not_run),
        cmocka_unit_test(a_machine_that_runs_dry_is_refused),
        cmocka_unit_test(depth_costs_no_more_than_length),
        cmocka_unit_test(a_written_pickle_is_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
