/* The curve of byte budgets against step time: see demo_budget.h. */
#include "demo_budget.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

typedef struct budget_point {
    int is_reference; /* all planes kept: policy KEEP */
    size_t budget_bytes, kept_bytes, peak_bytes;
    double step_us;
    double ratio; /* of step times, to those of the run that keeps all beside it */
    int is_identical, is_exact;
} budget_point;

static int gradients_equal(const demo_train_result *a, const demo_train_result *b, int steps) {
    const size_t count = (size_t)steps * a->gradient_count;
    return a->gradient_count == b->gradient_count &&
           memcmp(a->gradients, b->gradients, count * sizeof *a->gradients) == 0;
}

static budget_point point_of(const demo_train_config *config, const demo_train_result *result,
                             const demo_train_result *reference, double ratio) {
    const int is_reference = result == reference;
    const size_t budget_bytes =
        is_reference
            ? (size_t)config->shape.layers * demo_model_columnwise_bytes_of_one(&config->shape)
            : config->budget_bytes;
    budget_point point = {.is_reference = is_reference,
                          .budget_bytes = budget_bytes,
                          .kept_bytes = result->columnwise_bytes,
                          .peak_bytes = result->peak_bytes,
                          .step_us = result->step_us,
                          .ratio = ratio};
    point.is_identical = gradients_equal(result, reference, config->steps);
    point.is_exact = result->balanced && result->columnwise_bytes == budget_bytes;
    return point;
}

/* ---- output --------------------------------------------------------------------------------- */

static const char *policy_name(const budget_point *point) {
    return point->is_reference ? "keep" : "budget";
}

static int print_csv(const budget_point *points, int count, FILE *stream) {
    fprintf(stream, "policy,budget_bytes,kept_bytes,peak_bytes,step_us,ratio,bit_identical\n");
    for (int i = 0; i < count; i++) {
        const budget_point *point = &points[i];
        fprintf(stream, "%s,%zu,%zu,%zu,%.1f,%.4f,%d\n", policy_name(point), point->budget_bytes,
                point->kept_bytes, point->peak_bytes, point->step_us, point->ratio,
                point->is_identical);
    }
    return fflush(stream) == 0 && !ferror(stream);
}

static int print_json(const budget_point *points, int count, FILE *stream) {
    cJSON *array = cJSON_CreateArray();
    for (int i = 0; i < count; i++) {
        const budget_point *point = &points[i];
        cJSON *object = cJSON_CreateObject();
        cJSON_AddStringToObject(object, "policy", policy_name(point));
        cJSON_AddNumberToObject(object, "budget_bytes", (double)point->budget_bytes);
        cJSON_AddNumberToObject(object, "kept_bytes", (double)point->kept_bytes);
        cJSON_AddNumberToObject(object, "peak_bytes", (double)point->peak_bytes);
        cJSON_AddNumberToObject(object, "step_us", point->step_us);
        cJSON_AddNumberToObject(object, "ratio", point->ratio);
        cJSON_AddBoolToObject(object, "bit_identical", point->is_identical);
        cJSON_AddItemToArray(array, object);
    }
    char *text = cJSON_Print(array);
    const int printed = text && fprintf(stream, "%s\n", text) > 0 && fflush(stream) == 0;
    cJSON_free(text);
    cJSON_Delete(array);
    return printed;
}

/* ---- the runs ------------------------------------------------------------------------------- */

/* Whole planes, so that a budget can be used up to the byte. */
static size_t budget_at(const demo_shape *shape, int point, int points) {
    const size_t planes = (size_t)shape->layers * (size_t)point / (size_t)points;
    return planes * demo_model_columnwise_bytes_of_one(shape);
}

/* Each budget beside a run of its own that keeps all; the first of those is the first line. */
static tn_status run_points(tn_device *device, const demo_train_config *base, int points,
                            budget_point *out) {
    for (int i = 0; i <= points; i++) {
        demo_train_config config = *base;
        demo_train_result kept, result;
        double ratio = 0.0;
        config.policy = TN_POLICY_BUDGET;
        config.budget_bytes = budget_at(&config.shape, i, points);
        DEMO_TRY(demo_train(device, &config, "train, budget", &kept, &result, &ratio));
        if (i == 0) out[0] = point_of(&config, &kept, &kept, 1.0);
        out[i + 1] = point_of(&config, &result, &kept, ratio);
        demo_train_result_free(&kept);
        demo_train_result_free(&result);
    }
    return TN_OK;
}

tn_status demo_budget_curve(tn_device *device, const demo_train_config *base, int points, int json,
                            FILE *stream, int *holds) {
    budget_point curve[DEMO_BUDGET_POINTS_MAX + 2] = {{0}};
    const int count = points + 2;
    DEMO_TRY(run_points(device, base, points, curve));
    *holds = 1;
    for (int i = 0; i < count; i++)
        *holds = *holds && curve[i].is_identical && curve[i].is_exact;
    const int printed = json ? print_json(curve, count, stream) : print_csv(curve, count, stream);
    return printed ? TN_OK : TN_IO;
}
