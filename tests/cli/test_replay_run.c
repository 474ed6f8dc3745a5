/* Replays on the simulated and the host driver: exact figures, and the same ones each time. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "replay_engine.h"
#include "replay_output.h"
#include "test_support.h"
#include "trace_reader.h"

#define INPUTS TENURE_SOURCE_DIR "/tests/cli/inputs/"
#define LORA   TENURE_SOURCE_DIR "/bench/traces/lora.csv.gz"

static replay_status run_on(const char *path, replay_driver driver, size_t device_memory_bytes,
                            replay_result *result) {
    replay_options options = REPLAY_OPTIONS_INIT;
    options.trace_path = path;
    options.driver = driver;
    options.device_memory_bytes = device_memory_bytes;
    return replay_run(&options, result);
}

static void expect_done(replay_status status, const replay_result *result) {
    if (status != REPLAY_DONE) fail_msg("status %d: %s", (int)status, result->message);
    assert_true(result->completed);
    assert_int_equal(result->oom_count, 0);
    assert_int_equal(result->leaked_bytes, 0);
    assert_int_equal(result->races, 0);
    assert_string_equal(result->message, "");
}

/* What a trace asks for, worked out without a pool. */
typedef struct demand {
    uint64_t events;
    uint64_t live_bytes;
    uint64_t peak_bytes;
} demand;

static demand demand_of(const char *path) {
    char error[TRACE_ERROR_BYTES];
    demand out = {0};
    trace_reader *reader = NULL;
    trace_event event;
    assert_int_equal(trace_reader_open(path, &reader, error), TRACE_EVENT);
    while (trace_reader_next(reader, &event) == TRACE_EVENT) {
        out.events++;
        out.live_bytes += event.op == TRACE_ALLOC ? event.bytes : -event.bytes;
        if (out.live_bytes > out.peak_bytes) out.peak_bytes = out.live_bytes;
    }
    trace_reader_close(reader);
    return out;
}

static void a_small_trace_has_these_figures(void **state) {
    replay_result result;
    (void)state;
    expect_done(run_on(INPUTS "good_small.csv", REPLAY_DRIVER_SIM, 0, &result), &result);
    assert_int_equal(result.events, 7);
    assert_int_equal(result.peak_live_bytes, 4096 + 1048576);
    assert_int_equal(result.alive_at_end_bytes, 512);
    assert_int_equal(result.page_bytes, 4 << 20);
    assert_int_equal(result.peak_reserved_bytes % result.page_bytes, 0);
    assert_true(result.utilization ==
                (double)result.peak_live_bytes / (double)result.peak_reserved_bytes);
    assert_true(result.driver_calls > 0);
    assert_true(result.driver_time_us > 0.0);
    assert_true(result.host_ns_per_event > 0.0);
    assert_string_equal(result.driver, "sim");
}

/* The simulated device's price of a handle of 2 MiB: create, map, give access. However often the
 * job is played, its first creation is the same. */
static void the_first_creation_is_the_price_of_the_peaks_handles(void **state) {
    const double handle_us = 13.3 + 1.1 + 28.0;
    (void)state;
    for (uint32_t passes = 1; passes <= 3; passes++) {
        replay_options options = REPLAY_OPTIONS_INIT;
        replay_result result;
        double first_us;
        options.trace_path = INPUTS "good_small.csv";
        options.page_bytes = 2 << 20;
        options.repeat_count = passes;
        expect_done(replay_run(&options, &result), &result);
        first_us = (double)(result.peak_reserved_bytes >> 21) * handle_us;
        assert_true(first_us > 0.0);
        assert_true(fabs(result.driver_time_first_us - first_us) < 0.001);
        assert_true(result.driver_time_after_first_us > 0.0); /* addresses are reserved */
        assert_true(fabs(result.driver_time_us - result.driver_time_first_us -
                         result.driver_time_after_first_us) < 0.001);
    }
}

static void an_empty_trace_reserves_nothing(void **state) {
    replay_result result;
    (void)state;
    expect_done(run_on(INPUTS "good_header_only.csv", REPLAY_DRIVER_SIM, 0, &result), &result);
    assert_int_equal(result.events, 0);
    assert_int_equal(result.peak_live_bytes, 0);
    assert_int_equal(result.peak_reserved_bytes, 0);
    assert_true(result.utilization == 1.0);
    assert_true(result.driver_time_first_us == 0.0);
}

static void the_host_driver_plays_the_same_trace(void **state) {
    replay_result result;
    (void)state;
    expect_done(run_on(INPUTS "good_rmm.csv", REPLAY_DRIVER_HOST, 64 << 20, &result), &result);
    assert_int_equal(result.events, 5);
    assert_int_equal(result.peak_live_bytes, 4096);
    assert_int_equal(result.alive_at_end_bytes, 4096);
    assert_true(result.driver_time_first_us == result.driver_time_us); /* one segment, once */
    assert_string_equal(result.driver, "host");
}

/* The job that the project ships: what it asks for is known from elsewhere, 43,564 MiB. */
static void the_lora_job_is_played_whole(void **state) {
    replay_result result;
    demand expected = demand_of(LORA);
    (void)state;
    expect_done(run_on(LORA, REPLAY_DRIVER_SIM, 0, &result), &result);
    assert_int_equal(result.events, 109804);
    assert_int_equal(result.events, expected.events);
    assert_int_equal(result.peak_live_bytes, expected.peak_bytes);
    assert_int_equal(result.peak_live_bytes >> 20, 43564);
    assert_int_equal(result.alive_at_end_bytes, expected.live_bytes);
    assert_true(result.peak_reserved_bytes >= result.peak_live_bytes);
    assert_true(result.utilization >= 0.985);
    assert_int_equal(result.host_waits, 0);
    assert_int_equal(result.pass_count, 1);
    assert_int_equal(result.passes[0].driver_calls, result.driver_calls);
}

/* What is live at the peak may be 1 % less than the device has. */
static void the_lora_job_fits_in_little_more_than_it_asks_for(void **state) {
    replay_result result;
    size_t asked = demand_of(LORA).peak_bytes;
    size_t device = (asked / 99 * 100 / (2 << 20) + 1) * (2 << 20);
    (void)state;
    expect_done(run_on(LORA, REPLAY_DRIVER_SIM, device, &result), &result);
    assert_int_equal(result.oom_count, 0);
    assert_true(result.peak_reserved_bytes <= device);
}

static void later_passes_of_a_small_trace_make_no_driver_call(void **state) {
    replay_options options = REPLAY_OPTIONS_INIT;
    replay_result result;
    (void)state;
    options.trace_path = INPUTS "good_small.csv";
    options.repeat_count = 3;
    expect_done(replay_run(&options, &result), &result);
    assert_int_equal(result.events, 21);
    assert_int_equal(result.pass_count, 3);
    assert_true(result.passes[0].driver_calls > 0);
    assert_int_equal(result.passes[1].driver_calls, 0);
    assert_int_equal(result.passes[2].driver_calls, 0);
    assert_int_equal(result.alive_at_end_bytes, 512);
}

/* Everything but the time that this machine took. */
static char *repeatable_text(const replay_result *result) {
    cJSON *json = replay_result_to_json(result);
    assert_non_null(json);
    cJSON_DeleteItemFromObject(json, "host_ns_per_event");
    cJSON *pass;
    cJSON_ArrayForEach(pass, cJSON_GetObjectItem(json, "passes")) {
        cJSON_DeleteItemFromObject(pass, "host_ns_per_event");
    }
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    assert_non_null(text);
    return text;
}

static void two_replays_say_the_same(void **state) {
    replay_result first, second;
    (void)state;
    expect_done(run_on(LORA, REPLAY_DRIVER_SIM, 0, &first), &first);
    expect_done(run_on(LORA, REPLAY_DRIVER_SIM, 0, &second), &second);
    char *first_text = repeatable_text(&first);
    char *second_text = repeatable_text(&second);
    assert_string_equal(first_text, second_text);
    free(first_text);
    free(second_text);
}

/* The second of two blocks does not fit: one failure, its free is skipped, the rest is played. */
static void out_of_memory_is_counted_and_the_rest_is_played(void **state) {
    replay_result result;
    (void)state;
    assert_int_equal(run_on(INPUTS "oom.csv", REPLAY_DRIVER_SIM, 1u << 30, &result), REPLAY_FAILED);
    assert_true(result.completed);
    assert_int_equal(result.events, 6);
    assert_int_equal(result.oom_count, 1);
    assert_int_equal(result.peak_live_bytes, 600 << 20);
    assert_int_equal(result.alive_at_end_bytes, 600 << 20);
    assert_int_equal(result.leaked_bytes, 0);
    assert_int_equal(result.races, 0);
    assert_ptr_equal(strstr(result.message, "line 3: "), result.message);
}

/* The same trace fits once the device is as large as what is live. */
static void a_device_as_large_as_the_job_is_enough(void **state) {
    replay_result result;
    (void)state;
    expect_done(run_on(INPUTS "oom.csv", REPLAY_DRIVER_SIM, 1200u << 20, &result), &result);
    assert_int_equal(result.peak_reserved_bytes, 1200 << 20);
    assert_true(result.utilization == 1.0);
}

static void bad_input_in_the_middle_leaves_no_figures_and_nothing_open(void **state) {
    replay_result result;
    (void)state;
    assert_int_equal(run_on(INPUTS "bad_above_device.csv", REPLAY_DRIVER_SIM, 1u << 30, &result),
                     REPLAY_BAD_INPUT);
    assert_false(result.completed);
    assert_non_null(strstr(result.message, "bad_above_device.csv:4: 1073741825 bytes"));
    assert_int_equal(run_on(INPUTS "bad_free_twice.csv", REPLAY_DRIVER_HOST, 0, &result),
                     REPLAY_BAD_INPUT);
    assert_false(result.completed);
    assert_int_equal(test_sim_get()->leftovers(NULL, 0), 0);
}

static void json_has_these_keys_in_this_order(void **state) {
    static const char *const keys[] = {"events",
                                       "peak_live_bytes",
                                       "peak_reserved_bytes",
                                       "utilization",
                                       "driver_calls",
                                       "driver_time_us",
                                       "driver_time_first_us",
                                       "driver_time_after_first_us",
                                       "host_ns_per_event",
                                       "oom_count",
                                       "leaked_bytes",
                                       "races",
                                       "alive_at_end_bytes",
                                       "host_waits",
                                       "page_bytes",
                                       "device",
                                       "driver",
                                       "passes"};
    replay_result result = {.peak_live_bytes = UINT64_C(999999999999999), .driver = "sim"};
    size_t count = 0;
    (void)state;
    cJSON *made = replay_result_to_json(&result);
    char *text = cJSON_Print(made);
    cJSON *json = cJSON_Parse(text);
    assert_non_null(json);
    for (const cJSON *item = json->child; item; item = item->next) {
        assert_in_range(count, 0, sizeof(keys) / sizeof(keys[0]) - 1);
        assert_string_equal(item->string, keys[count++]);
    }
    assert_int_equal(count, sizeof(keys) / sizeof(keys[0]));
    assert_true(cJSON_GetObjectItem(json, "peak_live_bytes")->valuedouble == 999999999999999.0);
    cJSON_Delete(json);
    cJSON_Delete(made);
    cJSON_free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_trace_has_these_figures),
        cmocka_unit_test(the_first_creation_is_the_price_of_the_peaks_handles),
        cmocka_unit_test(an_empty_trace_reserves_nothing),
        cmocka_unit_test(the_host_driver_plays_the_same_trace),
        cmocka_unit_test(the_lora_job_is_played_whole),
        cmocka_unit_test(the_lora_job_fits_in_little_more_than_it_asks_for),
        cmocka_unit_test(later_passes_of_a_small_trace_make_no_driver_call),
        cmocka_unit_test(two_replays_say_the_same),
        cmocka_unit_test(out_of_memory_is_counted_and_the_rest_is_played),
        cmocka_unit_test(a_device_as_large_as_the_job_is_enough),
        cmocka_unit_test(bad_input_in_the_middle_leaves_no_figures_and_nothing_open),
        cmocka_unit_test(json_has_these_keys_in_this_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
