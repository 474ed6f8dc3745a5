/* A replay's result as JSON and as a table; see replay_output.h. */
#include "replay_output.h"

#include "text_table.h"

static int add_passes(cJSON *object, const replay_result *result) {
    cJSON *passes = cJSON_AddArrayToObject(object, "passes");
    for (uint32_t i = 0; passes && i < result->pass_count; i++) {
        const replay_pass *pass = &result->passes[i];
        cJSON *item = cJSON_CreateObject();
        if (!item || !cJSON_AddItemToArray(passes, item)) return 0;
        if (!cJSON_AddNumberToObject(item, "driver_calls", (double)pass->driver_calls)) return 0;
        if (!cJSON_AddNumberToObject(item, "driver_time_us", pass->driver_time_us)) return 0;
        if (!cJSON_AddNumberToObject(item, "host_ns_per_event", pass->host_ns_per_event)) return 0;
    }
    return passes != NULL;
}

/* Counts and sizes stay below 2^53, so that the doubles of JSON hold them exactly. */
cJSON *replay_result_to_json(const replay_result *result) {
    const struct {
        const char *key;
        double value;
    } numbers[] = {{"events", (double)result->events},
                   {"peak_live_bytes", (double)result->peak_live_bytes},
                   {"peak_reserved_bytes", (double)result->peak_reserved_bytes},
                   {"utilization", result->utilization},
                   {"driver_calls", (double)result->driver_calls},
                   {"driver_time_us", result->driver_time_us},
                   {"driver_time_first_us", result->driver_time_first_us},
                   {"driver_time_after_first_us", result->driver_time_after_first_us},
                   {"host_ns_per_event", result->host_ns_per_event},
                   {"oom_count", (double)result->oom_count},
                   {"leaked_bytes", (double)result->leaked_bytes},
                   {"races", (double)result->races},
                   {"alive_at_end_bytes", (double)result->alive_at_end_bytes},
                   {"host_waits", (double)result->host_waits},
                   {"page_bytes", (double)result->page_bytes}};
    cJSON *object = cJSON_CreateObject();
    int complete = object != NULL;
    for (size_t i = 0; complete && i < sizeof(numbers) / sizeof(numbers[0]); i++)
        complete = cJSON_AddNumberToObject(object, numbers[i].key, numbers[i].value) != NULL;
    complete = complete && cJSON_AddStringToObject(object, "device", result->device);
    complete = complete && cJSON_AddStringToObject(object, "driver", result->driver);
    complete = complete && add_passes(object, result);
    if (complete) return object;
    cJSON_Delete(object);
    return NULL;
}

int json_print(const cJSON *value, FILE *stream) {
    char *text = cJSON_Print(value);
    if (!text) return 0;
    fprintf(stream, "%s\n", text);
    cJSON_free(text);
    return !ferror(stream);
}

static void add_text(text_table *table, const char *label, const char *text) {
    text_table_cell(table, "%s", label);
    text_table_cell(table, "%s", text);
    text_table_cell(table, "%s", "");
}

static void add_bytes(text_table *table, const char *label, uint64_t bytes) {
    text_table_cell(table, "%s", label);
    text_table_cell(table, "%s", text_size(bytes).text);
    text_table_cell(table, "%s", bytes < 1024 ? "" : text_count(bytes).text);
}

static void add_count(text_table *table, const char *label, uint64_t count) {
    add_text(table, label, text_count(count).text);
}

static void add_times(text_table *table, const replay_result *result) {
    text_table_cell(table, "driver time");
    text_table_cell(table, "%.3f ms", result->driver_time_us / 1000.0);
    text_table_cell(table, "%s", "");
    text_table_cell(table, "after the first creation");
    text_table_cell(table, "%.3f ms", result->driver_time_after_first_us / 1000.0);
    text_table_cell(table, "%s", "");
    text_table_cell(table, "host time per event");
    text_table_cell(table, "%.0f ns", result->host_ns_per_event);
    text_table_cell(table, "%s", "");
}

static void add_last_pass(text_table *table, const replay_result *result) {
    const replay_pass *last = &result->passes[result->pass_count - 1];
    add_count(table, "passes", result->pass_count);
    add_count(table, "driver calls in the last", last->driver_calls);
    text_table_cell(table, "driver time in the last");
    text_table_cell(table, "%.3f ms", last->driver_time_us / 1000.0);
    text_table_cell(table, "%s", "");
}

int replay_result_print(const replay_result *result, FILE *stream) {
    text_table *table = text_table_create("<>>");
    if (!table) return 0;
    add_text(table, "device", result->device);
    add_text(table, "driver", result->driver);
    add_bytes(table, "page", result->page_bytes);
    text_table_rule(table);
    add_count(table, "events", result->events);
    add_bytes(table, "peak live", result->peak_live_bytes);
    add_bytes(table, "peak reserved", result->peak_reserved_bytes);
    text_table_cell(table, "utilization");
    text_table_cell(table, "%.2f %%", result->utilization * 100.0);
    text_table_cell(table, "%s", "");
    add_count(table, "driver calls", result->driver_calls);
    add_times(table, result);
    if (result->pass_count > 1) add_last_pass(table, result);
    text_table_rule(table);
    add_count(table, "out of memory", result->oom_count);
    add_bytes(table, "alive at the end", result->alive_at_end_bytes);
    add_bytes(table, "leaked", result->leaked_bytes);
    add_count(table, "races", result->races);
    int printed = text_table_print(table, stream);
    text_table_destroy(table);
    return printed;
}
