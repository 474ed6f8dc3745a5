/* Models out of files and their checks: see simulate_model.h. */
#include "simulate_model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "option_values.h"

enum { PATH_BYTES = 4096, FILE_BYTES_MAX = 1 << 20 };

typedef struct model_field {
    const char *name;
    size_t offset;
    int64_t least, most, otherwise;
} model_field;

static const model_field fields[] = {
#define SIMULATE_ROW(field, least, most, otherwise, meaning)                                       \
    {#field, offsetof(simulate_model, field), least, most, otherwise},
    SIMULATE_FIELDS(SIMULATE_ROW)
#undef SIMULATE_ROW
};
enum { FIELD_COUNT = sizeof(fields) / sizeof(fields[0]) };

__attribute__((format(printf, 2, 3))) static int refuse(char *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, SIMULATE_ERROR_BYTES, format, arguments);
    va_end(arguments);
    return 0;
}

static int64_t *value_of(simulate_model *model, const model_field *field) {
    return (int64_t *)((char *)model + field->offset);
}

static const model_field *find_field(const char *name) {
    for (int i = 0; i < FIELD_COUNT; i++) {
        if (strcmp(fields[i].name, name) == 0) return &fields[i];
    }
    return NULL;
}

/* ---- files ----------------------------------------------------------------------------------- */

static int take_text(const cJSON *item, char *out, size_t bytes, const char *origin, char *error) {
    if (!cJSON_IsString(item) || strlen(item->valuestring) >= bytes || !item->valuestring[0])
        return refuse(error, "%s: %s is no text of 1 to %zu bytes", origin, item->string,
                      bytes - 1);
    for (const char *at = item->valuestring; *at; at++) {
        if ((unsigned char)*at < ' ')
            return refuse(error, "%s: %s has a control character", origin, item->string);
    }
    snprintf(out, bytes, "%s", item->valuestring);
    return 1;
}

static int take_number(const cJSON *item, simulate_model *model, const char *origin, char *error) {
    const model_field *field = find_field(item->string);
    double value = item->valuedouble;
    if (!field) return refuse(error, "%s: there is no field %.64s", origin, item->string);
    if (!cJSON_IsNumber(item) || value != floor(value) || value < (double)field->least ||
        value > (double)field->most)
        return refuse(error, "%s: %s is no whole number from %lld to %lld", origin, field->name,
                      (long long)field->least, (long long)field->most);
    *value_of(model, field) = (int64_t)value;
    return 1;
}

static int is_twice(const cJSON *root, const cJSON *item) {
    for (const cJSON *other = root->child; other != item; other = other->next) {
        if (strcmp(other->string, item->string) == 0) return 1;
    }
    return 0;
}

static int take_item(const cJSON *root, const cJSON *item, simulate_model *model,
                     const char *origin, char *error) {
    char remarks[4 * SIMULATE_SOURCE_BYTES];
    if (is_twice(root, item))
        return refuse(error, "%s: %.64s is there twice", origin, item->string);
    if (strcmp(item->string, "name") == 0)
        return take_text(item, model->name, sizeof model->name, origin, error);
    if (strcmp(item->string, "source") == 0)
        return take_text(item, model->source, sizeof model->source, origin, error);
    if (strcmp(item->string, "remarks") == 0)
        return take_text(item, remarks, sizeof remarks, origin, error);
    return take_number(item, model, origin, error);
}

static int take_root(const cJSON *root, const char *origin, simulate_model *model, char *error) {
    memset(model, 0, sizeof *model);
    for (int i = 0; i < FIELD_COUNT; i++)
        *value_of(model, &fields[i]) = fields[i].otherwise;
    if (!cJSON_IsObject(root)) return refuse(error, "%s: it is no JSON object", origin);
    for (const cJSON *item = root->child; item; item = item->next) {
        if (!take_item(root, item, model, origin, error)) return 0;
    }
    if (!model->name[0] || !model->source[0])
        return refuse(error, "%s: name and source are needed", origin);
    for (int i = 0; i < FIELD_COUNT; i++) {
        if (*value_of(model, &fields[i]) < 0)
            return refuse(error, "%s: %s is missing", origin, fields[i].name);
    }
    return 1;
}

int simulate_model_parse(const char *text, size_t bytes, const char *origin, simulate_model *model,
                         char *error) {
    const char *end = NULL;
    cJSON *root = cJSON_ParseWithLengthOpts(text, bytes, &end, 0);
    while (root && end < text + bytes && *end && strchr(" \t\r\n", *end))
        end++;
    int is_whole = root && end == text + bytes;
    int taken = is_whole ? take_root(root, origin, model, error)
                         : refuse(error, "%s: it is no JSON object", origin);
    cJSON_Delete(root);
    return taken;
}

/* One that comes with the project, built or installed. */
static int find_shipped(const char *name, char *path) {
    static const char *const places[] = {"bench/models", "../share/tenure/models",
                                         "share/tenure/models"};
    char relative[PATH_BYTES];
    for (int i = 0; i < 3; i++) {
        int length = snprintf(relative, sizeof relative, "%s/%s.json", places[i], name);
        if (length < 0 || (size_t)length >= sizeof relative) return 0;
        if (option_project_path(relative, path, PATH_BYTES) && access(path, R_OK) == 0) return 1;
    }
    return 0;
}

static int is_name(const char *text) {
    return text[0] && text[0] != '.' && !strchr(text, '/') && !strstr(text, ".json");
}

int simulate_model_read(const char *name, simulate_model *model, char *error) {
    char found[PATH_BYTES];
    const char *path = name;
    size_t bytes = 0;
    if (is_name(name)) {
        if (!find_shipped(name, found))
            return refuse(error,
                          "%.200s: no model of that name comes with tenure; a file is named "
                          "with its path, such as ./%.200s.json",
                          name, name);
        path = found;
    }
    char *text = (char *)option_read_file(path, 1, &bytes);
    if (!text) return refuse(error, "%.300s: it can not be read, or is empty", path);
    int taken = bytes > FILE_BYTES_MAX
                    ? refuse(error, "%.300s: it is longer than any description", path)
                    : simulate_model_parse(text, bytes, option_file_name(path), model, error);
    free(text);
    return taken;
}

/* ---- the command line ------------------------------------------------------------------------ */

int simulate_model_set(simulate_model *model, const char *name, int64_t value, char *error) {
    const model_field *field = find_field(name);
    if (!field) return refuse(error, "there is no field %.64s", name);
    if (value < field->least || value > field->most)
        return refuse(error, "%s: expected a number from %lld to %lld", name,
                      (long long)field->least, (long long)field->most);
    *value_of(model, field) = value;
    return 1;
}

/* ---- what must fit --------------------------------------------------------------------------- */

static int check_divides(const char *whole, int64_t value, const char *part, int64_t by,
                         char *error) {
    if (value % by == 0) return 1;
    return refuse(error, "%s is %lld, no multiple of %s, which is %lld", whole, (long long)value,
                  part, (long long)by);
}

static int check_attention(const simulate_model *model, char *error) {
    if (model->head_dim % 8 != 0)
        return refuse(error, "head_dim is %lld, no multiple of 8", (long long)model->head_dim);
    if (!check_divides("heads", model->heads, "heads_kv", model->heads_kv, error)) return 0;
    if (!check_divides("heads_kv", model->heads_kv, "tp", model->tp, error)) return 0;
    if (!model->query_rank != !model->kv_rank)
        return refuse(error, "query_rank and kv_rank are both 0 or both are not");
    if (model->query_rank && model->heads_kv != model->heads)
        return refuse(error, "heads_kv is %lld, and with a kv_rank it is heads, which is %lld",
                      (long long)model->heads_kv, (long long)model->heads);
    return 1;
}

static int check_experts(const simulate_model *model, char *error) {
    if (model->experts == 0) {
        if (model->experts_per_token || model->expert_ffn || model->shared_ffn ||
            model->dense_layers || model->ep > 1)
            return refuse(error, "experts is 0, and then dense_layers, experts_per_token, "
                                 "expert_ffn and shared_ffn are 0 and ep is 1");
        return 1;
    }
    if (model->experts_per_token < 1 || model->experts_per_token > model->experts)
        return refuse(error, "experts_per_token is %lld: it is 1 to experts, which is %lld",
                      (long long)model->experts_per_token, (long long)model->experts);
    if (model->expert_ffn < 1) return refuse(error, "expert_ffn is 0, and there are experts");
    if (model->dense_layers > model->layers)
        return refuse(error, "dense_layers is %lld, more than layers, which is %lld",
                      (long long)model->dense_layers, (long long)model->layers);
    if (!check_divides("experts", model->experts, "ep", model->ep, error)) return 0;
    if (!check_divides("tp x dp", model->tp * model->dp, "ep", model->ep, error)) return 0;
    return check_divides("shared_ffn", model->shared_ffn, "tp", model->tp, error);
}

static int check_layout(const simulate_model *model, char *error) {
    int64_t chunks = model->pp * model->vpp;
    if (chunks > model->layers)
        return refuse(error, "pp x vpp is %lld, more than layers, which is %lld", (long long)chunks,
                      (long long)model->layers);
    if (model->frozen_layers > model->layers)
        return refuse(error, "frozen_layers is %lld, more than layers, which is %lld",
                      (long long)model->frozen_layers, (long long)model->layers);
    if (model->vpp > 1 && model->pp == 1)
        return refuse(error, "vpp is %lld, and with one stage (pp 1) it is 1",
                      (long long)model->vpp);
    if (model->vpp > 1 &&
        !check_divides("microbatches", model->microbatches, "pp", model->pp, error))
        return 0;
    if (!check_divides("context x microbatch", simulate_model_tokens(model), "tp", model->tp,
                       error))
        return 0;
    if (simulate_model_tokens(model) > (int64_t)1 << 26)
        return refuse(error, "context x microbatch is %lld, more than %d",
                      (long long)simulate_model_tokens(model), 1 << 26);
    if (simulate_model_ranks(model) > 1 << 16)
        return refuse(error, "tp x pp x dp is %lld ranks, more than %d",
                      (long long)simulate_model_ranks(model), 1 << 16);
    return 1;
}

int simulate_model_check(const simulate_model *model, char *error) {
    if (!check_attention(model, error) || !check_experts(model, error)) return 0;
    if (model->ffn == 0 && (model->experts == 0 || model->dense_layers > 0))
        return refuse(error, "ffn is 0, and there are layers without experts");
    if (!check_divides("ffn", model->ffn, "tp", model->tp, error)) return 0;
    if (model->vocabulary > 256 &&
        !check_divides("vocabulary", model->vocabulary, "tp", model->tp, error))
        return 0;
    return check_layout(model, error);
}

/* ---- reports --------------------------------------------------------------------------------- */

cJSON *simulate_model_to_json(const simulate_model *model) {
    cJSON *object = cJSON_CreateObject();
    int complete = object && cJSON_AddStringToObject(object, "name", model->name) &&
                   cJSON_AddStringToObject(object, "source", model->source);
    for (int i = 0; complete && i < FIELD_COUNT; i++) {
        const int64_t *value = (const int64_t *)((const char *)model + fields[i].offset);
        complete = cJSON_AddNumberToObject(object, fields[i].name, (double)*value) != NULL;
    }
    if (complete) return object;
    cJSON_Delete(object);
    return NULL;
}
