/* Two training runs of the demo side by side: steps, times, ledgers; see demo_train.h.
 *
 * Invariants: at any time both runs have made the same number of steps, or the first of a pair one
 * more. What each owns is in a pool of its own, so that neither is in the other's sums; both run on
 * the same two streams, so that no queue of the device is on one side of the comparison only.
 */
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
    tn_stream stream, side; /* both runs' */
    unsigned char *tokens;  /* [tokens + 1]: a window of the text, read round */
    double *step_us;
    demo_train_result *out;
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

/* Sorts them. */
static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

/* The first two steps fill caches and choose algorithms: left out where there are more. Sorts the
 * times of the steps. */
static tn_status set_times(training runs[2], double *ratio_out) {
    const int steps = runs[0].config->steps, skipped = steps > 4 ? 2 : 0, count = steps - skipped;
    double *ratios = malloc((size_t)count * sizeof *ratios);
    if (!ratios) return TN_OUT_OF_HOST_MEMORY;
    for (int i = 0; i < count; i++)
        ratios[i] = runs[1].step_us[skipped + i] / runs[0].step_us[skipped + i];
    for (int i = 0; i < 2; i++)
        runs[i].out->step_us = median(runs[i].step_us + skipped, count);
    *ratio_out = median(ratios, count);
    free(ratios);
    return TN_OK;
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

static tn_status check_books(const training *run) {
    demo_train_result *out = run->out;
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

static tn_status train_step(training *run, int step) {
    demo_train_result *out = run->out;
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
    return check_books(run);
}

/* What the machine does to one of a pair it does to the other, and neither always comes first. */
static tn_status train_pair(training runs[2], int step) {
    const int first = step % 2;
    DEMO_TRY(train_step(&runs[first], step));
    return train_step(&runs[1 - first], step);
}

static tn_status train_steps(training runs[2], const char *label) {
    const int steps = runs[0].config->steps;
    progress bar;
    tn_status status = TN_OK;
    for (int i = 0; i < 2 && status == TN_OK; i++)
        status = reset_peaks(&runs[i].model);
    progress_begin(&bar, label);
    for (int step = 0; step < steps && status == TN_OK; step++) {
        status = train_pair(runs, step);
        progress_update(&bar, step + 1, steps);
    }
    progress_end(&bar);
    for (int i = 0; i < 2 && status == TN_OK; i++)
        status = read_owners(&runs[i].model, runs[i].out);
    return status;
}

/* ---- what a run has ------------------------------------------------------------------------- */

static tn_status allocate(training *run) {
    const size_t steps = (size_t)run->config->steps, tokens = (size_t)run->config->shape.tokens;
    demo_train_result *out = run->out;
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

/* close_run ends what there is after a failure, too. */
static tn_status open_run(training *run, tn_device *device) {
    static const char *const names[] = {[TN_POLICY_KEEP] = "kept",
                                        [TN_POLICY_UNTIL_LAST_USE] = "released",
                                        [TN_POLICY_BUDGET] = "budget"};
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    pool_config.name = names[run->config->policy];
    DEMO_TRY(tn_pool_create(device, &pool_config, &run->pool));
    DEMO_TRY(demo_model_create(&run->model, device, run->pool, run->stream, run->side,
                               &run->config->shape, run->config->policy));
    if (run->config->policy == TN_POLICY_BUDGET)
        DEMO_TRY(tn_scope_budget_set(run->model.frozen, run->config->budget_bytes));
    return allocate(run);
}

static void note(tn_status *first, tn_status status) {
    if (*first == TN_OK) *first = status;
}

static tn_status open_streams(tn_device *device, training runs[2]) {
    DEMO_TRY(tn_stream_create(device, &runs[0].stream));
    DEMO_TRY(tn_stream_create(device, &runs[0].side));
    runs[1].stream = runs[0].stream;
    runs[1].side = runs[0].side;
    return TN_OK;
}

static void close_streams(tn_device *device, const training *run, tn_status *status) {
    if (run->side) note(status, tn_stream_destroy(device, run->side));
    if (run->stream) note(status, tn_stream_destroy(device, run->stream));
}

static tn_status close_run(training *run, tn_device *device) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn_status status = TN_OK;
    if (run->pool) {
        note(&status, tn_device_synchronize(device));
        note(&status, demo_model_destroy(&run->model));
        note(&status, tn_pool_stats_get(run->pool, &stats));
        run->out->live_after_destroy_bytes = stats.live_bytes;
    }
    if (run->pool) note(&status, tn_pool_destroy(run->pool));
    free(run->tokens);
    free(run->step_us);
    return status;
}

tn_status demo_train(tn_device *device, const demo_train_config *config, const char *label,
                     demo_train_result *kept, demo_train_result *other, double *ratio) {
    demo_train_config kept_config = *config;
    training runs[2] = {{.config = &kept_config, .out = kept}, {.config = config, .out = other}};
    tn_status status;
    kept_config.policy = TN_POLICY_KEEP;
    *kept = *other = (demo_train_result){.balanced = 1};
    status = open_streams(device, runs);
    for (int i = 0; i < 2 && status == TN_OK; i++)
        status = open_run(&runs[i], device);
    if (status == TN_OK) status = train_steps(runs, label);
    if (status == TN_OK) status = set_times(runs, ratio);
    for (int i = 0; i < 2; i++)
        note(&status, close_run(&runs[i], device));
    close_streams(device, &runs[0], &status);
    if (status != TN_OK) {
        demo_train_result_free(kept);
        demo_train_result_free(other);
    }
    return status;
}

void demo_train_result_free(demo_train_result *result) {
    free(result->loss);
    free(result->token_loss);
    free(result->gradients);
    *result = (demo_train_result){0};
}
