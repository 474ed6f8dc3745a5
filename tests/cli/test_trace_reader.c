/* The trace reader: what it makes of good traces, event by event, and of every kind of bad one.
 *
 * inputs/expected_errors.txt has the exact message of each bad input whose message does not
 * depend on the version of zlib. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test_support.h"
#include "trace_reader.h"

typedef struct expected_event {
    trace_op op;
    uint32_t slot;
    uint32_t stream;
    uint64_t bytes;
    uint64_t line;
} expected_event;

#define INPUTS TENURE_SOURCE_DIR "/tests/cli/inputs/"

static trace_reader *open_input(const char *name) {
    char path[512];
    char error[TRACE_ERROR_BYTES];
    trace_reader *reader = NULL;
    snprintf(path, sizeof(path), INPUTS "%s", name);
    if (trace_reader_open(path, &reader, error) != TRACE_EVENT) fail_msg("%s", error);
    return reader;
}

/* A reader of the text, as if it came from a file named "text". */
static trace_result open_text(const char *text, size_t length, trace_reader **reader, char *error) {
    FILE *file = tmpfile();
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, length, file), length);
    rewind(file);
    int descriptor = dup(fileno(file));
    fclose(file);
    assert_true(descriptor >= 0);
    return trace_reader_open_descriptor(descriptor, "text", reader, error);
}

static void expect_events(const char *name, const expected_event *expected, size_t count) {
    trace_reader *reader = open_input(name);
    trace_event event;
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(trace_reader_next(reader, &event), TRACE_EVENT);
        if (event.op != expected[i].op || event.slot != expected[i].slot ||
            event.stream != expected[i].stream || event.bytes != expected[i].bytes ||
            event.line != expected[i].line)
            fail_msg("%s: event %zu is op %d slot %u stream %u bytes %llu line %llu", name, i,
                     (int)event.op, event.slot, event.stream, (unsigned long long)event.bytes,
                     (unsigned long long)event.line);
    }
    assert_int_equal(trace_reader_next(reader, &event), TRACE_END);
    assert_int_equal(trace_reader_next(reader, &event), TRACE_END);
    assert_string_equal(trace_reader_error(reader), "");
    trace_reader_close(reader);
}

static const expected_event small_events[] = {
    {TRACE_ALLOC, 0, 0, 4096, 2}, {TRACE_ALLOC, 1, 0, 1048576, 3}, {TRACE_FREE, 0, 0, 4096, 4},
    {TRACE_ALLOC, 0, 1, 512, 5},  {TRACE_ALLOC, 2, 1, 0, 6},       {TRACE_FREE, 1, 1, 1048576, 7},
    {TRACE_FREE, 2, 1, 0, 8},
};

static void plain_gzip_and_windows_lines_give_the_same_events(void **state) {
    (void)state;
    expect_events("good_small.csv", small_events, 7);
    expect_events("good_small.csv.gz", small_events, 7);
    expect_events("good_crlf.csv", small_events, 7);
    expect_events("good_header_only.csv", small_events, 0);
}

static void times_are_checked_and_a_free_may_name_its_stream(void **state) {
    static const expected_event expected[] = {{TRACE_ALLOC, 0, 0, 1024, 2},
                                              {TRACE_ALLOC, 1, 1, 2048, 3},
                                              {TRACE_FREE, 0, 0, 1024, 4},
                                              {TRACE_FREE, 1, 0, 2048, 5}};
    (void)state;
    expect_events("good_timed.csv", expected, 4);
}

static void owners_and_addresses_are_read(void **state) {
    trace_reader *reader = open_input("good_owned.csv");
    trace_event event;
    (void)state;
    assert_int_equal(trace_reader_next(reader, &event), TRACE_EVENT);
    assert_true(event.time_us == 12.25);
    assert_int_equal(event.address, 0x7f0000000000);
    assert_string_equal(trace_reader_owner(reader, event.owner), "layer 1, weights");
    assert_int_equal(trace_reader_next(reader, &event), TRACE_EVENT);
    assert_int_equal(event.address, 0);
    assert_int_equal(event.owner, 0);
    assert_int_equal(trace_reader_next(reader, &event), TRACE_EVENT);
    assert_int_equal(event.op, TRACE_FREE);
    assert_true(event.time_us == 90.0);
    assert_int_equal(trace_reader_next(reader, &event), TRACE_EVENT);
    assert_string_equal(trace_reader_owner(reader, event.owner), "a ? b");
    assert_int_equal(trace_reader_next(reader, &event), TRACE_END);
    assert_string_equal(trace_reader_owner(reader, 0), "");
    trace_reader_close(reader);
}

static void what_could_not_be_served_comes_out_on_demand(void **state) {
    static const char text[] = "op,id,bytes,stream,time_us,address,owner\n"
                               "o,,18446744073709551615,,3,,logits\na,1,8,0,4,0x10,\n";
    char error[TRACE_ERROR_BYTES];
    trace_reader *reader = NULL;
    trace_event event;
    (void)state;
    for (int wants = 0; wants < 2; wants++) {
        assert_int_equal(open_text(text, sizeof(text) - 1, &reader, error), TRACE_EVENT);
        if (wants) {
            assert_true(trace_reader_want_shortages(reader));
            assert_int_equal(trace_reader_next(reader, &event), TRACE_EVENT);
            assert_int_equal(event.op, TRACE_SHORTAGE);
            assert_true(event.bytes == UINT64_MAX && event.time_us == 3.0 && event.line == 2);
            assert_string_equal(trace_reader_owner(reader, event.owner), "logits");
        }
        trace_reader_limit(reader, 8);
        assert_int_equal(trace_reader_next(reader, &event), TRACE_EVENT);
        assert_int_equal(event.op, TRACE_ALLOC);
        assert_int_equal(trace_reader_next(reader, &event), TRACE_END);
        trace_reader_close(reader);
    }
    reader = open_input("good_small.csv");
    assert_false(trace_reader_want_shortages(reader));
    trace_reader_close(reader);
    reader = open_input("good_rmm.csv");
    assert_true(trace_reader_want_shortages(reader));
    trace_reader_close(reader);
}

/* Failed allocations and null pointers are no events; "0" and "0x0" are one stream. */
static void rmm_logs_are_read(void **state) {
    static const expected_event expected[] = {{TRACE_ALLOC, 0, 0, 1024, 2},
                                              {TRACE_ALLOC, 1, 1, 2048, 3},
                                              {TRACE_FREE, 0, 1, 1024, 6},
                                              {TRACE_FREE, 1, 0, 2048, 7},
                                              {TRACE_ALLOC, 1, 1, 4096, 9}};
    (void)state;
    expect_events("good_rmm.csv", expected, 5);
}

/* The message of the first failure, in `message`. */
static void read_to_failure(const char *name, char *message) {
    char path[512];
    trace_reader *reader = NULL;
    trace_event event;
    snprintf(path, sizeof(path), INPUTS "%s", name);
    trace_result result = trace_reader_open(path, &reader, message);
    if (result == TRACE_EVENT) {
        trace_reader_limit(reader, UINT64_C(1) << 30);
        do {
            result = trace_reader_next(reader, &event);
        } while (result == TRACE_EVENT);
        assert_int_equal(trace_reader_next(reader, &event), result);
        snprintf(message, TRACE_ERROR_BYTES, "%s", trace_reader_error(reader));
        trace_reader_close(reader);
    }
    if (result != TRACE_BAD_INPUT) fail_msg("%s was read without a complaint", name);
}

static void each_bad_input_has_its_message_with_the_line(void **state) {
    char line[1024];
    char message[TRACE_ERROR_BYTES];
    size_t count = 0;
    FILE *list = fopen(INPUTS "expected_errors.txt", "r");
    (void)state;
    assert_non_null(list);
    while (fgets(line, sizeof(line), list)) {
        line[strcspn(line, "\n")] = 0;
        char name[64];
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(line, ":"), line);
        read_to_failure(name, message);
        assert_string_equal(message + strlen(INPUTS), line);
        count++;
    }
    fclose(list);
    assert_int_equal(count, 45);
}

static void damaged_and_truncated_gzip_is_named_as_such(void **state) {
    char message[TRACE_ERROR_BYTES];
    (void)state;
    read_to_failure("bad_truncated.csv.gz", message);
    assert_non_null(strstr(message, ": the compressed data ends early; expected a whole gzip"));
    read_to_failure("bad_no_trailer.csv.gz", message);
    assert_non_null(strstr(message, ": the compressed data ends early; expected a whole gzip"));
    read_to_failure("bad_damaged.csv.gz", message);
    assert_non_null(strstr(message, ": damaged compressed data (invalid distance too far back)"));
    read_to_failure("bad_checksum.csv.gz", message);
    assert_non_null(strstr(message, ": damaged compressed data (incorrect data check)"));
}

/* A trace that is cut at any byte is refused, unless the cut is right behind a whole line. */
static void a_trace_cut_at_any_byte_is_refused(void **state) {
    static const char text[] = "op,id,bytes,stream\na,1,4096,0\na,2,512,0\nf,1,,\nf,2,,\n";
    (void)state;
    for (size_t length = 0; length < sizeof(text); length++) {
        char error[TRACE_ERROR_BYTES] = "";
        trace_reader *reader = NULL;
        trace_event event;
        int whole = length > 0 && text[length - 1] == '\n';
        trace_result result = open_text(text, length, &reader, error);
        while (result == TRACE_EVENT)
            result = trace_reader_next(reader, &event);
        if (length < sizeof(text) - 1 || whole)
            assert_int_equal(result, whole ? TRACE_END : TRACE_BAD_INPUT);
        trace_reader_close(reader);
    }
}

static void what_is_no_trace_file_is_named(void **state) {
    char error[TRACE_ERROR_BYTES];
    trace_reader *reader = NULL;
    (void)state;
    assert_int_equal(trace_reader_open(INPUTS "none.csv", &reader, error), TRACE_BAD_INPUT);
    assert_string_equal(error, INPUTS "none.csv: cannot open: No such file or directory");
    assert_int_equal(trace_reader_open(INPUTS, &reader, error), TRACE_BAD_INPUT);
    assert_string_equal(error, INPUTS ": cannot open: it is a directory; expected a trace");
    assert_null(reader);
}

static void streams_are_limited_in_number(void **state) {
    static char text[64 * (TRACE_STREAMS_MAX + 2)];
    char error[TRACE_ERROR_BYTES];
    trace_reader *reader = NULL;
    trace_event event;
    size_t used = (size_t)snprintf(text, sizeof(text), "op,id,bytes,stream\n");
    (void)state;
    for (int i = 0; i <= TRACE_STREAMS_MAX; i++)
        used += (size_t)snprintf(text + used, sizeof(text) - used, "a,%d,1,%d\n", i, i * 3);
    assert_int_equal(open_text(text, used, &reader, error), TRACE_EVENT);
    for (int i = 0; i < TRACE_STREAMS_MAX; i++)
        assert_int_equal(trace_reader_next(reader, &event), TRACE_EVENT);
    assert_int_equal(event.stream, TRACE_STREAMS_MAX - 1);
    assert_int_equal(trace_reader_next(reader, &event), TRACE_BAD_INPUT);
    assert_string_equal(trace_reader_error(reader),
                        "text:1026: stream 3072 is one too many; expected at most 1024 different "
                        "streams");
    assert_int_equal(trace_reader_stream_count(reader), TRACE_STREAMS_MAX);
    trace_reader_close(reader);
}

/* Ids that come and go reuse slots: memory is bounded by what is live at once. */
static void slots_are_as_many_as_ids_were_live_at_once(void **state) {
    trace_event event;
    trace_result result = TRACE_EVENT;
    size_t count = 0, live = 0, most = 0;
    char error[TRACE_ERROR_BYTES];
    trace_reader *reader = NULL;
    (void)state;
    if (trace_reader_open(TENURE_SOURCE_DIR "/bench/traces/lora.csv.gz", &reader, error))
        fail_msg("%s", error);
    while ((result = trace_reader_next(reader, &event)) == TRACE_EVENT) {
        live += event.op == TRACE_ALLOC ? 1 : (size_t)-1;
        most = live > most ? live : most;
        count++;
    }
    assert_int_equal(result, TRACE_END);
    assert_int_equal(count, 109804);
    assert_int_equal(live, 2);
    assert_int_equal(trace_reader_slot_count(reader), most);
    assert_true(trace_reader_done(reader) == 1.0);
    trace_reader_close(reader);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_gzip_and_windows_lines_give_the_same_events),
        cmocka_unit_test(times_are_checked_and_a_free_may_name_its_stream),
        cmocka_unit_test(owners_and_addresses_are_read),
        cmocka_unit_test(what_could_not_be_served_comes_out_on_demand),
        cmocka_unit_test(rmm_logs_are_read),
        cmocka_unit_test(each_bad_input_has_its_message_with_the_line),
        cmocka_unit_test(damaged_and_truncated_gzip_is_named_as_such),
        cmocka_unit_test(a_trace_cut_at_any_byte_is_refused),
        cmocka_unit_test(what_is_no_trace_file_is_named),
        cmocka_unit_test(streams_are_limited_in_number),
        cmocka_unit_test(slots_are_as_many_as_ids_were_live_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
