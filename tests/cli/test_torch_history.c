/* Snapshots of PyTorch that are none, or not as they should be: each is refused with its reason, at
 * once, whatever its lists hold. What is made of good ones, torch_snapshot_checks.py looks at. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pickle_writer.h"
#include "test_support.h"
#include "torch_history.h"

typedef struct maker {
    FILE *stream;
    char *bytes;
    size_t length;
    uint32_t index; /* of the next event */
} maker;

/* {"segments": [], "device_traces": [[ ... up to end. */
static void begin(maker *made) {
    *made = (maker){0};
    made->stream = open_memstream(&made->bytes, &made->length);
    assert_non_null(made->stream);
    pickle_begin(made->stream);
    pickle_dict_begin(made->stream);
    pickle_text(made->stream, "segments");
    pickle_list_begin(made->stream);
    pickle_list_end(made->stream);
    pickle_text(made->stream, "device_traces");
    pickle_list_begin(made->stream);
    pickle_list_begin(made->stream);
}

static void end(maker *made) {
    pickle_list_end(made->stream);
    pickle_list_end(made->stream);
    pickle_dict_end(made->stream);
    pickle_end(made->stream);
    assert_int_equal(fclose(made->stream), 0);
}

static void begin_event(maker *made, const char *action) {
    pickle_list_next(made->stream, made->index++);
    pickle_dict_begin(made->stream);
    pickle_text(made->stream, "action");
    pickle_text(made->stream, action);
}

static void put_member(maker *made, const char *name, int64_t value) {
    pickle_text(made->stream, name);
    pickle_integer(made->stream, value);
}

static void put_event(maker *made, const char *action, int64_t address, int64_t bytes) {
    begin_event(made, action);
    put_member(made, "addr", address);
    put_member(made, "size", bytes);
    pickle_dict_end(made->stream);
}

static memory_history *read_made(maker *made) {
    char error[HISTORY_ERROR_BYTES];
    memory_history *history = NULL;
    end(made);
    if (torch_history_read("made", (unsigned char *)made->bytes, made->length, ORDINAL_ANY,
                           &history, error) != 0)
        fail_msg("%s", error);
    free(made->bytes);
    return history;
}

static void expect_refused(maker *made, const char *words) {
    char error[HISTORY_ERROR_BYTES] = "";
    memory_history *history = NULL;
    end(made);
    assert_int_equal(torch_history_read("made", (unsigned char *)made->bytes, made->length,
                                        ORDINAL_ANY, &history, error),
                     2);
    assert_null(history);
    if (!strstr(error, words)) fail_msg("expected \"%s\" in: %s", words, error);
    free(made->bytes);
}

static void events_must_be_events(void **state) {
    maker made;
    (void)state;
    begin(&made);
    expect_refused(&made, "made: the snapshot has no memory and no events; record with");
    begin(&made);
    pickle_integer(made.stream, 7);
    expect_refused(&made, "event 0 is no dict");
    begin(&made);
    pickle_dict_begin(made.stream);
    pickle_dict_end(made.stream);
    expect_refused(&made, "event 0 of device 0 has no action");
    begin(&made);
    begin_event(&made, "alloc");
    put_member(&made, "addr", 512);
    pickle_dict_end(made.stream);
    expect_refused(&made, "event 0 of device 0 has no size");
    begin(&made);
    put_event(&made, "alloc", 512, -1);
    expect_refused(&made, "event 0 of device 0 has no size of at least 0");
    begin(&made);
    begin_event(&made, "free_completed");
    put_member(&made, "size", 512);
    pickle_dict_end(made.stream);
    expect_refused(&made, "event 0 of device 0 has no address");
    begin(&made);
    put_event(&made, "alloc", 0x1000, 512);
    put_event(&made, "alloc", 0x1000, 512);
    expect_refused(&made, "event 1 of device 0 allocates address 0x1000, which is still alive");
}

/* A free that was asked for and never completed ends with the next block of that address. */
static void completions_may_be_missing(void **state) {
    maker made;
    memory_history *history;
    (void)state;
    begin(&made);
    put_event(&made, "alloc", 0x1000, 512);
    put_event(&made, "free_requested", 0x1000, 512);
    put_event(&made, "alloc", 0x1000, 1024);
    put_event(&made, "free_completed", 0x9000, 64);
    put_event(&made, "something new", 0, 0);
    history = read_made(&made);
    assert_int_equal(history->event_count, 5);
    assert_int_equal(history->before_count, 1);
    assert_int_equal(history->blocks[history->events[0].index].address, 0x9000);
    assert_int_equal(history_live_bytes(history), 1024);
    history_destroy(history);
}

/* Lists that hold themselves, and one event a million times: seen, counted, refused. */
static void lists_may_hold_anything(void **state) {
    maker made;
    memory_history *history;
    (void)state;
    begin(&made);
    begin_event(&made, "snapshot");
    pickle_dict_end(made.stream);
    pickle_remember(made.stream, 5);
    for (int i = 0; i < 1000000; i++) {
        pickle_list_next(made.stream, made.index++);
        pickle_recall(made.stream, 5);
    }
    expect_refused(&made, "the same lists are used again and again");
    begin(&made);
    begin_event(&made, "alloc");
    put_member(&made, "addr", 0x1000);
    put_member(&made, "size", 8);
    pickle_text(made.stream, "frames");
    fputs("]r", made.stream); /* a list that is remembered before it is filled, with itself */
    fwrite("\x07\0\0\0", 1, 4, made.stream);
    fputs("j", made.stream);
    fwrite("\x07\0\0\0", 1, 4, made.stream);
    fputs("a", made.stream);
    pickle_dict_end(made.stream);
    history = read_made(&made);
    assert_int_equal(history->blocks[0].owner, 0);
    history_destroy(history);
    begin(&made);
    begin_event(&made, "alloc");
    for (int i = 0; i < 100; i++)
        put_member(&made, "size", 8);
    pickle_dict_end(made.stream);
    expect_refused(&made, "event 0 has 101 members; expected at most 64");
}

static void put_block(maker *made, uint32_t index, int64_t bytes, const char *what) {
    pickle_list_next(made->stream, index);
    pickle_dict_begin(made->stream);
    put_member(made, "size", bytes);
    pickle_text(made->stream, "state");
    pickle_text(made->stream, what);
    pickle_dict_end(made->stream);
}

/* A second "segments", which is the one that counts, with one of 4096 bytes. */
static void begin_segment(maker *made, int64_t first_bytes) {
    begin(made);
    pickle_list_end(made->stream);
    pickle_list_end(made->stream);
    pickle_text(made->stream, "segments");
    pickle_list_begin(made->stream);
    pickle_dict_begin(made->stream);
    put_member(made, "address", 0x10000);
    put_member(made, "total_size", 4096);
    pickle_text(made->stream, "blocks");
    pickle_list_begin(made->stream);
    put_block(made, 0, first_bytes, "active_allocated");
    put_block(made, 1, 1024, "active_awaiting_free");
    put_block(made, 2, 1024, "inactive");
    pickle_list_end(made->stream);
    pickle_dict_end(made->stream);
    pickle_list_end(made->stream);
    /* What end() ends. */
    pickle_text(made->stream, "device_traces");
    pickle_list_begin(made->stream);
    pickle_list_begin(made->stream);
}

/* A stack of 500 frames in each of 300 events, and one name of 3 MiB in all of them. */
static void a_long_name_is_not_read_for_each_frame(void **state) {
    enum { FRAMES = 500, EVENTS = 300, NAME_BYTES = 3 << 20 };
    static const char ending[] = "/torch/nn.py";
    char *name = malloc(NAME_BYTES + sizeof ending);
    maker made;
    memory_history *history;
    (void)state;
    assert_non_null(name);
    memset(name, 'a', NAME_BYTES);
    memcpy(name + NAME_BYTES, ending, sizeof ending);
    begin(&made);
    for (int event = 0; event < EVENTS; event++) {
        begin_event(&made, "alloc");
        put_member(&made, "addr", 4096 * (event + 1));
        put_member(&made, "size", 64);
        pickle_text(made.stream, "frames");
        pickle_list_begin(made.stream);
        if (event == 0) {
            pickle_dict_begin(made.stream);
            pickle_text(made.stream, "filename");
            pickle_text(made.stream, name);
            pickle_dict_end(made.stream);
            pickle_remember(made.stream, 0);
        }
        for (int frame = event == 0; frame < FRAMES; frame++)
            pickle_recall(made.stream, 0);
        pickle_list_end(made.stream);
        pickle_dict_end(made.stream);
    }
    history = read_made(&made);
    assert_int_equal(history->block_count, EVENTS);
    assert_string_equal(name_table_text(&history->owners, history->blocks[EVENTS - 1].owner),
                        "nn.py");
    history_destroy(history);
    free(name);
}

static void blocks_must_add_up(void **state) {
    maker made;
    memory_history *history;
    (void)state;
    begin_segment(&made, 2048);
    history = read_made(&made);
    assert_int_equal(history->block_count, 2);
    assert_int_equal(history->before_count, 2);
    assert_int_equal(history_live_bytes(history), 3072);
    assert_int_equal(history_reserved_bytes(history), 4096);
    assert_int_equal(history->pieces[1].state, HISTORY_PENDING);
    assert_int_equal(history->pieces[1].address, 0x10800);
    history_destroy(history);
    begin_segment(&made, 1024);
    expect_refused(&made, "the blocks of segment 0 add up to 3072 bytes, but it has 4096");
    begin_segment(&made, -2048);
    expect_refused(&made, "block 0 of a segment has no size");
}

/* Whatever is not a dict with these two lists. */
static void other_pickles_are_refused(void **state) {
    static const struct {
        const char *bytes;
        const char *words;
    } cases[] = {
        {"\x80\x02N.", "not of a dict with a few members; expected a memory snapshot of PyTorch"},
        {"\x80\x02}.", "no list segments"},
        {"\x80\x02}X\x08\x01\x01\x01segments].", "ends early"},
        {"\x80\x04}\x8c\x08segments]s.", "no list device_traces"},
        {"\x80\x04}\x8c\x08segments]s\x8c\x0d"
         "device_traces](Nes.",
         "device_traces 0 is no list"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char error[HISTORY_ERROR_BYTES] = "";
        memory_history *history = NULL;
        assert_int_equal(torch_history_read("made", (const unsigned char *)cases[i].bytes,
                                            strlen(cases[i].bytes), ORDINAL_ANY, &history, error),
                         2);
        if (!strstr(error, cases[i].words))
            fail_msg("expected \"%s\" in: %s", cases[i].words, error);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_must_be_events),
        cmocka_unit_test(completions_may_be_missing),
        cmocka_unit_test(lists_may_hold_anything),
        cmocka_unit_test(blocks_must_add_up),
        cmocka_unit_test(other_pickles_are_refused),
        cmocka_unit_test(a_long_name_is_not_read_for_each_frame),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
