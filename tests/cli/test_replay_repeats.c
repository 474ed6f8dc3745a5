/* The start of a recorded job, played again and again in one pool: what each pass costs, to the
 * call. The first finds memory; some find better places and keep what is mapped; from then on the
 * job is placed as it was, and there is no driver call any more. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "replay_engine.h"
#include "test_support.h"
#include "trace_reader.h"

#define LORA   TENURE_SOURCE_DIR "/bench/traces/lora.csv.gz"
#define EVENTS 16000
#define PASSES 8

/* The first events of the trace in a file of their own. */
static void write_start(const char *path) {
    char error[TRACE_ERROR_BYTES];
    trace_reader *reader = NULL;
    trace_event event;
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    assert_int_equal(trace_reader_open(LORA, &reader, error), TRACE_EVENT);
    assert_true(fprintf(out, "op,id,bytes,stream\n") > 0);
    for (int i = 0; i < EVENTS; i++) {
        assert_int_equal(trace_reader_next(reader, &event), TRACE_EVENT);
        if (event.op == TRACE_ALLOC) {
            fprintf(out, "a,%u,%llu,0\n", event.slot, (unsigned long long)event.bytes);
        } else {
            fprintf(out, "f,%u,,\n", event.slot);
        }
    }
    trace_reader_close(reader);
    assert_int_equal(fclose(out), 0);
}

static void a_job_that_repeats_comes_to_make_no_driver_call(void **state) {
    static const uint64_t calls[PASSES] = {23680, 1378, 424, 0, 0, 0, 0, 0};
    char path[] = "/tmp/tenure_repeats_XXXXXX";
    int file = mkstemp(path);
    replay_options options = REPLAY_OPTIONS_INIT;
    replay_result result;
    (void)state;
    assert_true(file >= 0);
    close(file);
    write_start(path);
    options.trace_path = path;
    options.repeat_count = PASSES;
    assert_int_equal(replay_run(&options, &result), REPLAY_DONE);
    for (int pass = 0; pass < PASSES; pass++)
        assert_int_equal(result.passes[pass].driver_calls, calls[pass]);
    assert_int_equal(result.events, PASSES * EVENTS);
    assert_int_equal(result.host_waits, 0);
    assert_int_equal(result.races, 0);
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_job_that_repeats_comes_to_make_no_driver_call),
    };
    return cmocka_run_group_tests_name("cli/replay_repeats", tests, NULL, NULL);
}
