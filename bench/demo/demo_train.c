/* The training run of the demo: steps, times, ledgers; see demo_train.h. */
#include "demo_train.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "progress.h"
#include "tenure_lifetime.h"

typedef struct training {
    const demo_train_config *config;
    demo_model model;
    tn_pool *pool;
    tn_stream stream, side;
    unsigned char *tokens; /* [tokens + 1]: a window of the text, read round */
    double *step_us;
} training;

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The first two steps fill caches and choose algorithms: left out where there are more. */
static double median_step_us(const double *step_us, int steps) {
    const int skipped = steps > 4 ? 2 : 0, count = steps - skipped;
    double *sorted = malloc((size_t)count * sizeof *sorted);
    if (!sorted) return 0.0;
    memcpy(sorted, step_us + skipped, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, compare_doubles);
    const double median = sorted[count / 2];
    free(sorted);
    return median;
}

static tn_status read_owner(tn_scope scope, const char *name, demo_owner *owner) {
    tn_ledger ledger = TN_LEDGER_INIT;
    DEMO_TRY(tn_scope_ledger(scope, &ledger));
    owner->name = name;
    owner->resident_bytes = ledger.total_bytes;
    owner->peak_bytes = ledger.peak_total_bytes;
    return TN_OK;
}

static tn_status read_owners(const demo_model *model, demo_train_result *out) {
    demo_owner *owners = out->owners;
    demo_owner all;
    DEMO_TRY(read_owner(model->frozen, "frozen weights", &owners[0]));
    DEMO_TRY(read_owner(model->edges, "embedding, head", &owners[1]));
    DEMO_TRY(read_owner(model->trained, "adapters", &owners[2]));
    DEMO_TRY(read_owner(model->saved, "saved for backward", &owners[3]));
    DEMO_TRY(read_owner(model->scratch, "step scratch", &owners[4]));
    DEMO_TRY(read_owner(model->root, "all", &all));
    out->resident_bytes = all.resident_bytes;
    out->peak_bytes = all.peak_bytes;
    return TN_OK;
}

/* Peaks are those of the steps, not of building the model. */
static tn_status reset_peaks(const demo_model *model) {
    const tn_scope scopes[] = {model->root,    model->frozen, model->edges,
                               model->trained, model->saved,  model->scratch};
    for (size_t i = 0; i < sizeof scopes / sizeof *scopes; i++) {
        DEMO_TRY(tn_scope_ledger_reset_peaks(scopes[i]));
    }
    return TN_OK;
}

static tn_status check_books(training *run, demo_train_result *out) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn_ledger ledger = TN_LEDGER_INIT;
    DEMO_TRY(tn_pool_stats_get(run->pool, &stats));
    DEMO_TRY(tn_scope_ledger(run->model.root, &ledger));
    const size_t parts = stats.live_bytes + stats.cached_bytes + stats.pending_bytes +
                         stats.partial_bytes + stats.driver_held_bytes;
    const int balanced = parts == stats.reserved_bytes && ledger.total_bytes == stats.live_bytes &&
                         tn_ledger_check(run->pool) == TN_OK;
    out->balanced = out->balanced && balanced;
    out->reserved_bytes = stats.reserved_bytes;
    return TN_OK;
}

static void fill_window(training *run, int step) {
    const demo_train_config *config = run->config;
    const size_t tokens = (size_t)config->shape.tokens;
    for (size_t i = 0; i <= tokens; i++) {
        run->tokens[i] = config->text[((size_t)step * tokens + i) % config->text_bytes];
    }
}

static tn_status train_step(training *run, int step, demo_train_result *out) {
    const size_t tokens = (size_t)run->config->shape.tokens;
    float *token_loss = out->token_loss + (size_t)step * tokens;
    size_t columnwise = 0;
    fill_window(run, step);
    const double start_us = now_us();
    DEMO_TRY(demo_model_step(&run->model, run->tokens, run->tokens + 1, run->config->learning_rate,
                             token_loss));
    DEMO_TRY(tn_stream_synchronize(run->model.device, run->stream));
    run->step_us[step] = now_us() - start_us;
    DEMO_TRY(demo_model_read_gradients(&run->model,
                                       out->gradients + (size_t)step * out->gradient_count));
    DEMO_TRY(demo_model_columnwise_bytes(&run->model, &columnwise));
    out->columnwise_bytes = columnwise;
    if (columnwise > out->columnwise_after_backward_max) {
        out->columnwise_after_backward_max = columnwise;
    }
    for (size_t i = 0; i < tokens; i++)
        out->loss[step] += (double)token_loss[i];
    out->loss[step] /= (double)tokens;
    return check_books(run, out);
}

static tn_status train_steps(training *run, const char *label, demo_train_result *out) {
    const int steps = run->config->steps;
    progress bar;
    tn_status status = reset_peaks(&run->model);
    progress_begin(&bar, label);
    for (int step = 0; step < steps && status == TN_OK; step++) {
        status = train_step(run, step, out);
        progress_update(&bar, step + 1, steps);
    }
    progress_end(&bar);
    if (status != TN_OK) return status;
    out->step_us = median_step_us(run->step_us, steps);
    return read_owners(&run->model, out);
}

static tn_status allocate(training *run, demo_train_result *out) {
    const size_t steps = (size_t)run->config->steps, tokens = (size_t)run->config->shape.tokens;
    out->gradient_count = demo_model_gradient_count(&run->model);
    out->loss = calloc(steps, sizeof *out->loss);
    out->token_loss = calloc(steps * tokens, sizeof *out->token_loss);
    out->gradients = calloc(steps * out->gradient_count, sizeof *out->gradients);
    run->tokens = malloc(tokens + 1);
    run->step_us = calloc(steps, sizeof *run->step_us);
    const int complete =
        out->loss && out->token_loss && out->gradients && run->tokens && run->step_us;
    return complete ? TN_OK : TN_OUT_OF_HOST_MEMORY;
}

static tn_status build_and_train(training *run, tn_device *device, const char *label,
                                 demo_train_result *out) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    DEMO_TRY(demo_model_create(&run->model, device, run->pool, run->stream, run->side,
                               &run->config->shape, run->config->policy));
    tn_status status = TN_OK;
    if (run->config->policy == TN_POLICY_BUDGET)
        status = tn_scope_budget_set(run->model.frozen, run->config->budget_bytes);
    if (status == TN_OK) status = allocate(run, out);
    if (status == TN_OK) status = train_steps(run, label, out);
    tn_status synchronized = tn_stream_synchronize(device, run->stream);
    tn_status destroyed = demo_model_destroy(&run->model);
    if (status == TN_OK) status = synchronized != TN_OK ? synchronized : destroyed;
    if (status == TN_OK) status = tn_pool_stats_get(run->pool, &stats);
    out->live_after_destroy_bytes = stats.live_bytes;
    return status;
}

static void end_stream(tn_device *device, tn_stream stream, tn_status *status) {
    tn_status ended = tn_stream_destroy(device, stream);
    if (*status == TN_OK) *status = ended;
}

tn_status demo_train(tn_device *device, const demo_train_config *config, const char *label,
                     demo_train_result *out) {
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    training run = {.config = config};
    *out = (demo_train_result){.balanced = 1};
    pool_config.name = label;
    DEMO_TRY(tn_pool_create(device, &pool_config, &run.pool));
    tn_status status = tn_stream_create(device, &run.stream);
    if (status == TN_OK) {
        status = tn_stream_create(device, &run.side);
        if (status == TN_OK) {
            status = build_and_train(&run, device, label, out);
            end_stream(device, run.side, &status);
        }
        end_stream(device, run.stream, &status);
    }
    tn_status destroyed = tn_pool_destroy(run.pool);
    if (status == TN_OK) status = destroyed;
    free(run.tokens);
    free(run.step_us);
    if (status != TN_OK) demo_train_result_free(out);
    return status;
}

void demo_train_result_free(demo_train_result *result) {
    free(result->loss);
    free(result->token_loss);
    free(result->gradients);
    *result = (demo_train_result){0};
}
