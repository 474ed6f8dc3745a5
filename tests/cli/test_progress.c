/* The progress line, with a clock that the test moves. */
#include <stdlib.h>
#include <string.h>

#include "progress.h"
#include "test_support.h"

static double test_now_s;
static double test_clock(void) { return test_now_s; }

typedef struct capture {
    FILE *stream;
    char *text;
    size_t bytes;
} capture;

static void capture_begin(capture *out, progress *bar) {
    *out = (capture){0};
    out->stream = open_memstream(&out->text, &out->bytes);
    assert_non_null(out->stream);
    test_now_s = 100.0;
    progress_begin_on(bar, "replay", out->stream, test_clock);
}

static void capture_end(capture *out, const char *expected) {
    fclose(out->stream);
    assert_string_equal(out->text, expected);
    free(out->text);
}

static void quick_work_shows_nothing(void **state) {
    capture out;
    progress bar;
    (void)state;
    capture_begin(&out, &bar);
    test_now_s = 101.9;
    progress_update(&bar, 1, 2);
    progress_end(&bar);
    capture_end(&out, "");
}

static void after_two_seconds_the_line_is_drawn_and_then_cleared(void **state) {
    capture out;
    progress bar;
    (void)state;
    capture_begin(&out, &bar);
    test_now_s = 102.0;
    progress_update(&bar, 1, 2);
    progress_end(&bar);
    progress_end(&bar);
    capture_end(&out, "\r\033[Kreplay  [###############...............]  50 %  2 s\r\033[K");
}

static void it_is_drawn_ten_times_a_second_at_most(void **state) {
    capture out;
    progress bar;
    (void)state;
    capture_begin(&out, &bar);
    test_now_s = 104.0;
    progress_update(&bar, 0, 3);
    test_now_s = 104.0625;
    progress_update(&bar, 1, 3);
    test_now_s = 104.125;
    progress_update(&bar, 7, 3);
    capture_end(&out, "\r\033[Kreplay  [..............................]   0 %  4 s"
                      "\r\033[Kreplay  [##############################] 100 %  4 s");
}

static void an_unknown_total_shows_the_time_alone(void **state) {
    capture out;
    progress bar;
    (void)state;
    capture_begin(&out, &bar);
    test_now_s = 109.0;
    progress_update(&bar, -1, 0);
    capture_end(&out, "\r\033[Kreplay  9 s");
}

static void without_a_terminal_there_is_no_stream(void **state) {
    progress bar;
    (void)state;
    assert_non_null(freopen("/dev/null", "w", stderr));
    progress_begin(&bar, "replay");
    assert_null(bar.stream);
    progress_update(&bar, 1, 2);
    progress_end(&bar);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quick_work_shows_nothing),
        cmocka_unit_test(after_two_seconds_the_line_is_drawn_and_then_cleared),
        cmocka_unit_test(it_is_drawn_ten_times_a_second_at_most),
        cmocka_unit_test(an_unknown_total_shows_the_time_alone),
        cmocka_unit_test(without_a_terminal_there_is_no_stream),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
