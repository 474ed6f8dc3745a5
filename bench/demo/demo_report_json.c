/* The demo's report as one JSON object: the same figures as the table, sizes in bytes. */
#include "demo_report.h"

#include <cjson/cJSON.h>
#include <stdlib.h>

static void add_owners(cJSON *run, const demo_train_result *result) {
    cJSON *owners = cJSON_AddArrayToObject(run, "owners");
    for (int i = 0; i < DEMO_OWNER_COUNT; i++) {
        cJSON *owner = cJSON_CreateObject();
        cJSON_AddStringToObject(owner, "name", result->owners[i].name);
        cJSON_AddNumberToObject(owner, "resident_bytes", (double)result->owners[i].resident_bytes);
        cJSON_AddNumberToObject(owner, "peak_bytes", (double)result->owners[i].peak_bytes);
        cJSON_AddItemToArray(owners, owner);
    }
}

static void add_run(cJSON *root, const char *name, const demo_train_result *result, int steps) {
    cJSON *run = cJSON_AddObjectToObject(root, name);
    cJSON_AddNumberToObject(run, "resident_bytes", (double)result->resident_bytes);
    cJSON_AddNumberToObject(run, "peak_bytes", (double)result->peak_bytes);
    cJSON_AddNumberToObject(run, "reserved_bytes", (double)result->reserved_bytes);
    cJSON_AddNumberToObject(run, "columnwise_bytes_after_backward",
                            (double)result->columnwise_bytes);
    cJSON_AddNumberToObject(run, "step_time_us", result->step_us);
    cJSON_AddItemToObject(run, "loss", cJSON_CreateDoubleArray(result->loss, steps));
    add_owners(run, result);
}

static void add_replay(cJSON *root, const demo_report *report) {
    const replay_result *replay = &report->replay;
    cJSON *object = cJSON_AddObjectToObject(root, "replay");
    cJSON_AddStringToObject(object, "trace", report->trace_name);
    cJSON_AddNumberToObject(object, "events", (double)replay->events);
    cJSON_AddNumberToObject(object, "peak_live_bytes", (double)replay->peak_live_bytes);
    cJSON_AddNumberToObject(object, "peak_reserved_bytes", (double)replay->peak_reserved_bytes);
    cJSON_AddNumberToObject(object, "utilization", replay->utilization);
    cJSON_AddNumberToObject(object, "races", (double)replay->races);
    cJSON_AddNumberToObject(object, "leaked_bytes", (double)replay->leaked_bytes);
    cJSON_AddNumberToObject(object, "oom_count", (double)replay->oom_count);
}

static void add_shape(cJSON *root, const demo_report *report) {
    cJSON_AddStringToObject(root, "device", report->device.name);
    cJSON_AddNumberToObject(root, "layers", report->shape.layers);
    cJSON_AddNumberToObject(root, "hidden", (double)report->shape.hidden);
    cJSON_AddNumberToObject(root, "tokens", (double)report->shape.tokens);
    cJSON_AddNumberToObject(root, "steps", report->steps);
    cJSON_AddStringToObject(root, "text", report->text_name);
}

static int add_claims(cJSON *root, const demo_report *report) {
    demo_claim claims[DEMO_CLAIM_MAX];
    const int count = demo_report_claims(report, claims);
    cJSON *object = cJSON_AddObjectToObject(root, "claims");
    int all_hold = 1;
    for (int i = 0; i < count; i++) {
        cJSON_AddBoolToObject(object, claims[i].words, claims[i].holds);
        all_hold = all_hold && claims[i].holds;
    }
    return all_hold;
}

int demo_report_print_json(const demo_report *report, FILE *stream) {
    cJSON *root = cJSON_CreateObject();
    add_shape(root, report);
    add_replay(root, report);
    add_run(root, "kept", &report->keep, report->steps);
    add_run(root, "released", &report->release, report->steps);
    cJSON_AddNumberToObject(root, "step_time_ratio", report->step_time_ratio);
    cJSON_AddBoolToObject(root, "all_hold", add_claims(root, report));
    char *text = cJSON_Print(root);
    const int printed = text && fprintf(stream, "%s\n", text) > 0 && fflush(stream) == 0;
    cJSON_free(text);
    cJSON_Delete(root);
    return printed;
}
