/* A simulation as a table and as JSON: see simulate_report.h. */
#include "simulate_report.h"

#include <math.h>

#include "replay_output.h"
#include "text_table.h"

/* Whole nanoseconds, so that sums of times print as such. */
static double exact(double us) { return floor(us * 1e3 + 0.5) / 1e3; }

/* Milliseconds of microseconds. */
static double ms(double us) { return us / 1e3; }

static uint64_t wire_bytes(const simulate_record *record) {
    uint64_t sum = 0;
    for (int i = 0; i < TN_COLLECTIVE_COUNT; i++)
        sum += record->wire_bytes[i];
    return sum;
}

/* The note at which most is alive; NULL if there is none. */
static const simulate_note *fullest(const simulate_record *record) {
    const simulate_note *most = NULL;
    for (size_t i = 0; i < record->note_count; i++) {
        if (!most || record->notes[i].live_bytes > most->live_bytes) most = &record->notes[i];
    }
    return most;
}

/* ---- the table ------------------------------------------------------------------------------- */

static void add_role(text_table *table, const simulate_role *role) {
    const simulate_record *record = &role->record;
    text_table_cell(table, "%lld", (long long)role->rank);
    text_table_cell(table, "%s", text_count((uint64_t)role->rank_count).text);
    text_table_cell(table, "%d", role->stage);
    text_table_cell(table, "%s", text_mebibytes(record->peak_live_bytes).text);
    text_table_cell(table, "%s", text_mebibytes(record->peak_reserved_bytes).text);
    text_table_cell(table, "%s", text_mebibytes(record->resting_bytes).text);
    text_table_cell(table, "%.3f ms", ms(record->compute_us));
    text_table_cell(table, "%.3f ms", ms(record->communication_us));
    text_table_cell(table, "%.3f ms", ms(record->exposed_us));
    text_table_cell(table, "%s", text_size(wire_bytes(record)).text);
}

static int print_roles(const simulate_result *result, FILE *stream) {
    static const char *const titles[] = {"rank",     "ranks like it", "stage",     "peak live",
                                         "reserved", "at rest",       "computing", "sending",
                                         "exposed",  "sent"};
    text_table *table = text_table_create(">>>>>>>>>>");
    if (!table) return 0;
    for (size_t i = 0; i < sizeof titles / sizeof *titles; i++)
        text_table_cell(table, "%s", titles[i]);
    text_table_rule(table);
    for (size_t i = 0; i < result->role_count; i++)
        add_role(table, &result->roles[i]);
    int printed = text_table_print(table, stream);
    text_table_destroy(table);
    return printed;
}

/* What is alive where most is between two sub-steps, on the rank that has most. */
static int print_owners(const simulate_result *result, FILE *stream) {
    const simulate_role *of_most = NULL;
    const simulate_note *most = NULL;
    for (size_t i = 0; i < result->role_count; i++) {
        const simulate_note *note = fullest(&result->roles[i].record);
        if (!note || (most && note->live_bytes <= most->live_bytes)) continue;
        most = note;
        of_most = &result->roles[i];
    }
    text_table *table = text_table_create("<>>");
    if (!table || !most) return 0;
    fprintf(stream, "\nRank %lld after \"%s\":\n", (long long)of_most->rank, most->name);
    for (int i = 0; i < SIMULATE_OWNER_COUNT; i++) {
        if (!most->owner_bytes[i]) continue;
        text_table_cell(table, "%s", simulate_owner_name((simulate_owner)i));
        text_table_cell(table, "%s", text_mebibytes(most->owner_bytes[i]).text);
        text_table_cell(table, "%s", text_count(most->owner_bytes[i]).text);
    }
    text_table_rule(table);
    text_table_cell(table, "all");
    text_table_cell(table, "%s", text_mebibytes(most->live_bytes).text);
    text_table_cell(table, "%s", text_count(most->live_bytes).text);
    int printed = text_table_print(table, stream);
    text_table_destroy(table);
    return printed;
}

static void print_lifetimes(const simulate_lifetimes *lifetimes, FILE *stream) {
    fprintf(stream, "lifetimes L1 %s, L2 %s, L3 %s, L4 %s\n",
            lifetimes->frozen_columns ? "on" : "off", lifetimes->planes_by_use ? "on" : "off",
            lifetimes->gathered_activations ? "on" : "off",
            lifetimes->gather_rows_only ? "on" : "off");
}

int simulate_report_text(const simulate_result *result, FILE *stream) {
    const simulate_model *model = &result->job->model;
    fprintf(stream, "%s: %lld ranks (TP %lld, PP %lld, VPP %lld, EP %lld, DP %lld), ", model->name,
            (long long)simulate_model_ranks(model), (long long)model->tp, (long long)model->pp,
            (long long)model->vpp, (long long)model->ep, (long long)model->dp);
    fprintf(stream, "%lld x %lld tokens, %lld micro-batches\n", (long long)model->microbatch,
            (long long)model->context, (long long)model->microbatches);
    print_lifetimes(&result->job->lifetimes, stream);
    if (result->job->sim)
        fprintf(stream, "step %.3f ms, of which the pipeline waits %.3f ms at most\n",
                ms(result->step_us), ms(result->bubble_us));
    fputc('\n', stream);
    return print_roles(result, stream) && print_owners(result, stream) && !ferror(stream);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static int add_number(cJSON *object, const char *key, double value) {
    return cJSON_AddNumberToObject(object, key, value) != NULL;
}

static int add_note(cJSON *notes, const simulate_note *note) {
    cJSON *item = cJSON_CreateObject();
    if (!item || !cJSON_AddItemToArray(notes, item)) return 0;
    if (!cJSON_AddStringToObject(item, "after", note->name)) return 0;
    if (!add_number(item, "time_us", exact(note->time_us))) return 0;
    if (!add_number(item, "live_bytes", (double)note->live_bytes)) return 0;
    cJSON *owners = cJSON_AddObjectToObject(item, "owners");
    for (int i = 0; owners && i < SIMULATE_OWNER_COUNT; i++) {
        if (note->owner_bytes[i] && !add_number(owners, simulate_owner_name((simulate_owner)i),
                                                (double)note->owner_bytes[i]))
            return 0;
    }
    return owners != NULL;
}

static int add_wire(cJSON *object, const simulate_record *record) {
    cJSON *wire = cJSON_AddObjectToObject(object, "wire_bytes");
    for (int i = 0; wire && i < TN_COLLECTIVE_COUNT; i++) {
        if (record->calls[i] &&
            !add_number(wire, tn_collective_name((tn_collective)i), (double)record->wire_bytes[i]))
            return 0;
    }
    return wire != NULL;
}

static int add_role_object(cJSON *roles, const simulate_role *role) {
    const simulate_record *record = &role->record;
    const struct {
        const char *key;
        double value;
    } numbers[] = {{"rank", (double)role->rank},
                   {"ranks", (double)role->rank_count},
                   {"stage", role->stage},
                   {"peak_live_bytes", (double)record->peak_live_bytes},
                   {"peak_reserved_bytes", (double)record->peak_reserved_bytes},
                   {"resting_bytes", (double)record->resting_bytes},
                   {"gemm_workspace_bytes", (double)record->workspace_bytes},
                   {"step_us", exact(record->step_us)},
                   {"compute_us", exact(record->compute_us)},
                   {"communication_us", exact(record->communication_us)},
                   {"exposed_us", exact(record->exposed_us)},
                   {"races", (double)record->races}};
    cJSON *object = cJSON_CreateObject();
    if (!object || !cJSON_AddItemToArray(roles, object)) return 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (!add_number(object, numbers[i].key, numbers[i].value)) return 0;
    }
    cJSON *notes = add_wire(object, record) ? cJSON_AddArrayToObject(object, "notes") : NULL;
    for (size_t i = 0; notes && i < record->note_count; i++) {
        if (!add_note(notes, &record->notes[i])) return 0;
    }
    return notes != NULL;
}

static int fill_object(cJSON *object, const simulate_result *result) {
    const simulate_lifetimes *lifetimes = &result->job->lifetimes;
    cJSON *model = simulate_model_to_json(&result->job->model);
    if (!model || !cJSON_AddItemToObject(object, "model", model)) return 0;
    if (!add_number(object, "ranks", (double)simulate_model_ranks(&result->job->model))) return 0;
    if (!add_number(object, "step_us", exact(result->step_us))) return 0;
    if (!add_number(object, "bubble_us", exact(result->bubble_us))) return 0;
    cJSON *on = cJSON_AddObjectToObject(object, "lifetimes");
    if (!on || !cJSON_AddBoolToObject(on, "L1", lifetimes->frozen_columns) ||
        !cJSON_AddBoolToObject(on, "L2", lifetimes->planes_by_use) ||
        !cJSON_AddBoolToObject(on, "L3", lifetimes->gathered_activations) ||
        !cJSON_AddBoolToObject(on, "L4", lifetimes->gather_rows_only))
        return 0;
    cJSON *roles = cJSON_AddArrayToObject(object, "roles");
    for (size_t i = 0; roles && i < result->role_count; i++) {
        if (!add_role_object(roles, &result->roles[i])) return 0;
    }
    return roles != NULL;
}

int simulate_report_json(const simulate_result *result, FILE *stream) {
    cJSON *object = cJSON_CreateObject();
    int printed = object && fill_object(object, result) && json_print(object, stream);
    cJSON_Delete(object);
    return printed;
}
