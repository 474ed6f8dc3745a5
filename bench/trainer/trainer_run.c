/* A training run: see trainer_run.h.
 *
 * With a graph the first step runs as it is, which loads kernels and chooses algorithms; the second
 * is captured and launched, and so are all later ones: in front of each launch its tokens and its
 * rate are copied to where the graph reads them.
 *
 * Invariant: between steps nothing is alive but what the model owns.
 */
#include "trainer_run.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "progress.h"
#include "tenure_lifetime.h"
#include "text_table.h"
#include "trainer_graph.h"

enum { UNTIMED_STEPS = 2, HELD_OUT_BATCHES_MAX = 8 };

typedef struct training {
    const trainer_config *config;
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    trainer_model model;
    trainer_scopes scopes;       /* of steps that run as they are */
    trainer_scopes graph_scopes; /* of the captured one */
    trainer_graph graph;
    unsigned char *tokens, *targets; /* [micro_batches][tokens] */
    float *losses;                   /* likewise */
    float rate, norm;
    double timed_us; /* of the steps that are timed, and how many they are */
    int timed_steps;
    size_t replay_live_bytes, replay_reserved_bytes; /* after the first launch */
    trainer_result *out;
} training;

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static size_t tokens_of(const training *run) {
    return (size_t)trainer_model_tokens(&run->config->shape);
}

/* ---- books ---------------------------------------------------------------------------------- */

static tn_status memory_calls(const training *run, uint64_t *out) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    TRAINER_TRY(tn_device_driver_stats(run->device, &stats));
    *out = 0;
    for (int i = 0; i <= TN_CALL_MEM_FREE; i++)
        *out += stats.calls[i];
    return TN_OK;
}

/* Live and reserved bytes of both pools, and whether each one's books balance. */
static tn_status read_pools(training *run, size_t *live, size_t *reserved) {
    tn_pool *const pools[] = {run->pool, run->graph.pool};
    *live = *reserved = run->out->peak_bytes = 0;
    for (int i = 0; i < 2 && pools[i]; i++) {
        tn_pool_stats stats = TN_POOL_STATS_INIT;
        TRAINER_TRY(tn_pool_stats_get(pools[i], &stats));
        const size_t parts = stats.live_bytes + stats.cached_bytes + stats.pending_bytes +
                             stats.partial_bytes + stats.driver_held_bytes;
        const int is_balanced = parts == stats.reserved_bytes &&
                                stats.owned_bytes == stats.live_bytes &&
                                tn_ledger_check(pools[i]) == TN_OK;
        run->out->is_balanced = run->out->is_balanced && is_balanced;
        *live += stats.live_bytes;
        *reserved += stats.reserved_bytes;
        run->out->peak_bytes += stats.peak_live_bytes;
    }
    return TN_OK;
}

/* A launch must change nothing that anybody can count. */
static void check_replay(training *run, size_t live, size_t reserved, uint64_t calls) {
    if (run->out->replays++ == 0) {
        run->replay_live_bytes = live;
        run->replay_reserved_bytes = reserved;
        return; /* the step that was captured */
    }
    const int is_stable =
        live == run->replay_live_bytes && reserved == run->replay_reserved_bytes && calls == 0;
    run->out->replays_are_stable = run->out->replays_are_stable && is_stable;
}

static tn_status read_owner(tn_scope scope, const char *name, trainer_owner *owner) {
    tn_ledger ledger = TN_LEDGER_INIT;
    if (!scope.value) return TN_OK;
    TRAINER_TRY(tn_scope_ledger(scope, &ledger));
    owner->name = name;
    owner->resident_bytes += ledger.total_bytes;
    if (ledger.peak_total_bytes > owner->peak_bytes) owner->peak_bytes = ledger.peak_total_bytes;
    return TN_OK;
}

static tn_status read_owners(training *run) {
    const trainer_model *model = &run->model;
    trainer_owner *owners = run->out->owners;
    TRAINER_TRY(read_owner(model->values, "parameters", &owners[0]));
    TRAINER_TRY(read_owner(model->columns, "transposed weights, one at a time", &owners[1]));
    owners[1].resident_bytes -= owners[0].resident_bytes;
    owners[1].peak_bytes -= owners[0].peak_bytes;
    TRAINER_TRY(read_owner(model->gradients, "gradients", &owners[2]));
    TRAINER_TRY(read_owner(model->optimizer, "optimizer state", &owners[3]));
    TRAINER_TRY(read_owner(model->data, "batches", &owners[4]));
    TRAINER_TRY(read_owner(run->scopes.saved, "saved for backward", &owners[5]));
    TRAINER_TRY(read_owner(run->graph_scopes.saved, "saved for backward", &owners[5]));
    TRAINER_TRY(read_owner(run->scopes.scratch, "activations, scratch", &owners[6]));
    return read_owner(run->graph_scopes.scratch, "activations, scratch", &owners[6]);
}

/* ---- one step ------------------------------------------------------------------------------- */

/* Rises over the first tenth of the steps, falls along a cosine to a tenth over the others. */
static float rate_of(int step, int steps) {
    const int rising = steps / 10 > 0 ? steps / 10 : 1;
    if (step < rising) return (float)(step + 1) / (float)rising;
    const double share = (double)(step - rising) / (double)(steps - rising);
    return (float)(0.1 + 0.45 * (1.0 + cos(acos(-1.0) * share)));
}

static tn_status write_batch(const training *run, int index) {
    const trainer_batch *batch = &run->model.batches[index];
    const size_t tokens = tokens_of(run), at = (size_t)index * tokens;
    TRAINER_TRY(tn_plane_write(batch->tokens, TN_PLANE_DATA, run->tokens + at, tokens, NULL, 0,
                               run->stream));
    return tn_plane_write(batch->targets, TN_PLANE_DATA, run->targets + at, tokens, NULL, 0,
                          run->stream);
}

static tn_status write_step(training *run, int step) {
    const trainer_shape *shape = &run->config->shape;
    for (int i = 0; i < shape->micro_batches; i++) {
        const size_t at = (size_t)i * tokens_of(run);
        const uint64_t seed =
            shape->seed * 1000003u + (uint64_t)step * (uint64_t)shape->micro_batches + (uint64_t)i;
        trainer_text_batch(run->config->text, seed, shape->batch, shape->sequence, run->tokens + at,
                           run->targets + at);
        TRAINER_TRY(write_batch(run, i));
    }
    run->rate = rate_of(step, run->config->steps);
    return tn_plane_write(run->model.rate, TN_PLANE_DATA, &run->rate, sizeof run->rate, NULL, 0,
                          run->stream);
}

/* The mean loss of the first batches, once the stream is done; 0 where nothing computes. */
static tn_status read_loss(const training *run, int batches, double *out) {
    const size_t tokens = tokens_of(run);
    *out = 0.0;
    if (run->out->is_simulated) return tn_stream_synchronize(run->device, run->stream);
    for (int i = 0; i < batches; i++) {
        TRAINER_TRY(tn_plane_read(run->model.batches[i].loss, TN_PLANE_DATA,
                                  run->losses + (size_t)i * tokens, tokens * sizeof(float), NULL, 0,
                                  run->stream));
    }
    TRAINER_TRY(tn_stream_synchronize(run->device, run->stream));
    for (size_t i = 0; i < (size_t)batches * tokens; i++)
        *out += (double)run->losses[i];
    *out /= (double)batches * (double)tokens;
    return TN_OK;
}

/* Of the step's gradients, once the stream is done. */
static tn_status read_norm(training *run) {
    if (run->out->is_simulated) return TN_OK;
    return tn_plane_read(run->model.norm, TN_PLANE_DATA, &run->norm, sizeof run->norm, NULL, 0,
                         run->stream);
}

static tn_status capture(training *run) {
    TRAINER_TRY(trainer_scopes_open(&run->graph_scopes, run->graph.pool));
    TRAINER_TRY(trainer_graph_begin(&run->graph));
    tn_status status = trainer_step(&run->model, &run->graph_scopes, &run->out->trail);
    if (status == TN_OK) status = trainer_graph_end(&run->graph);
    if (status != TN_OK) trainer_graph_abort(&run->graph);
    return status;
}

static tn_status run_step(training *run, int step) {
    if (!run->config->uses_graph || step == 0)
        return trainer_step(&run->model, &run->scopes, &run->out->trail);
    if (step == 1) TRAINER_TRY(capture(run));
    return trainer_graph_launch(&run->graph);
}

static tn_status train_step(training *run, int step) {
    trainer_result *out = run->out;
    uint64_t calls_before = 0, calls = 0;
    size_t live = 0, reserved = 0;
    TRAINER_TRY(memory_calls(run, &calls_before));
    const double start_us = now_us();
    TRAINER_TRY(write_step(run, step));
    TRAINER_TRY(run_step(run, step));
    TRAINER_TRY(read_norm(run));
    TRAINER_TRY(read_loss(run, run->config->shape.micro_batches, &out->loss[step]));
    out->norm[step] = (double)run->norm;
    if (step >= UNTIMED_STEPS || run->config->steps <= 2 * UNTIMED_STEPS) {
        run->timed_us += now_us() - start_us;
        run->timed_steps++;
    }
    TRAINER_TRY(memory_calls(run, &calls));
    TRAINER_TRY(read_pools(run, &live, &reserved));
    *(step < UNTIMED_STEPS ? &out->memory_calls : &out->later_memory_calls) += calls - calls_before;
    if (run->config->uses_graph && step > 0)
        check_replay(run, live, reserved, calls - calls_before);
    out->live_bytes = live;
    out->reserved_bytes = reserved;
    return TN_OK;
}

/* ---- validation and what is shown meanwhile -------------------------------------------------- */

static tn_status validate(training *run, double *out) {
    const trainer_shape *shape = &run->config->shape;
    int64_t batches =
        trainer_text_held_out_batches(run->config->text, shape->batch, shape->sequence);
    if (batches > HELD_OUT_BATCHES_MAX) batches = HELD_OUT_BATCHES_MAX;
    double sum = 0.0;
    for (int64_t i = 0; i < batches; i++) {
        double loss = 0.0;
        trainer_text_held_out(run->config->text, i, shape->batch, shape->sequence, run->tokens,
                              run->targets);
        TRAINER_TRY(write_batch(run, 0));
        TRAINER_TRY(trainer_evaluate(&run->model, &run->scopes));
        TRAINER_TRY(read_loss(run, 1, &loss));
        sum += loss;
    }
    *out = sum / (double)batches;
    return TN_OK;
}

static double tokens_per_second(const training *run) {
    const double tokens = (double)tokens_of(run) * run->config->shape.micro_batches;
    return run->timed_us > 0.0 ? tokens * run->timed_steps * 1e6 / run->timed_us : 0.0;
}

static void show_heading(void) {
    printf("%6s%11s%11s%11s%13s%15s\n", "steps", "loss", "held out", "rate", "tokens/s", "live");
}

/* A cell; nothing where there is no such number. */
static void show_number(int width, int decimals, double value, int is_there) {
    if (is_there) printf("%*.*f", width, decimals, value);
    if (!is_there) printf("%*s", width, "-");
}

/* The mean of the losses since the last row. */
static void show_row(const training *run, int steps, int since) {
    const trainer_result *out = run->out;
    const int computes = !out->is_simulated;
    double sum = 0.0;
    for (int i = since; i < steps; i++)
        sum += out->loss[i];
    printf("%6d", steps);
    show_number(11, 4, sum / (steps > since ? steps - since : 1), computes && steps > 0);
    show_number(11, 4, out->held_out[steps], computes);
    show_number(11, 6, (double)(run->config->shape.learning_rate * run->rate), steps > 0);
    show_number(13, 0, tokens_per_second(run), computes && run->timed_steps > 0);
    printf("%15s\n", text_size(out->live_bytes).text);
    fflush(stdout);
}

static int is_validated(const trainer_config *config, int steps) {
    return steps == 0 || steps == config->steps || steps % config->validate_every == 0;
}

/* The line of progress: what it says is renewed with each step. */
static void show_progress(const training *run, int step, progress *bar, char *label,
                          size_t label_bytes) {
    snprintf(label, label_bytes, "step %d of %d  loss %.4f  %.0f tokens/s  %s live", step + 1,
             run->config->steps, run->out->loss[step], tokens_per_second(run),
             text_size(run->out->live_bytes).text);
    progress_update(bar, step + 1, run->config->steps);
}

static tn_status train_steps(training *run, progress *bar, char *label, size_t label_bytes) {
    int shown = 0;
    TRAINER_TRY(read_pools(run, &run->out->live_bytes, &run->out->reserved_bytes));
    for (int steps = 0; steps <= run->config->steps; steps++) {
        if (is_validated(run->config, steps)) {
            TRAINER_TRY(validate(run, &run->out->held_out[steps]));
            progress_end(bar);
            show_row(run, steps, shown);
            shown = steps;
        }
        if (steps == run->config->steps) break;
        TRAINER_TRY(train_step(run, steps));
        show_progress(run, steps, bar, label, label_bytes);
    }
    return TN_OK;
}

static tn_status train(training *run) {
    char label[128] = "training";
    progress bar;
    const double start_us = now_us();
    show_heading();
    progress_begin(&bar, label);
    tn_status status = train_steps(run, &bar, label, sizeof label);
    progress_end(&bar);
    if (status == TN_OK) status = read_owners(run);
    run->out->wall_s = (now_us() - start_us) * 1e-6;
    run->out->step_us = run->timed_steps ? run->timed_us / run->timed_steps : 0.0;
    return status;
}

/* ---- what a run has ------------------------------------------------------------------------- */

static tn_status allocate(training *run) {
    const size_t steps = (size_t)run->config->steps;
    const size_t tokens = tokens_of(run) * (size_t)run->config->shape.micro_batches;
    trainer_result *out = run->out;
    out->loss = calloc(steps, sizeof *out->loss);
    out->norm = calloc(steps, sizeof *out->norm);
    out->held_out = malloc((steps + 1) * sizeof *out->held_out);
    run->tokens = malloc(tokens);
    run->targets = malloc(tokens);
    run->losses = malloc(tokens * sizeof *run->losses);
    if (!out->loss || !out->norm || !out->held_out || !run->tokens || !run->targets || !run->losses)
        return TN_OUT_OF_HOST_MEMORY;
    for (size_t i = 0; i <= steps; i++)
        out->held_out[i] = -1.0;
    return TN_OK;
}

static tn_status count_parameters(const trainer_model *model, uint64_t *out) {
    *out = 0;
    for (int i = 0; i < trainer_model_parameter_count(&model->shape); i++) {
        tn_tensor_info info = TN_TENSOR_INFO_INIT;
        TRAINER_TRY(tn_tensor_info_get(model->parameters[i].master, &info));
        *out += (uint64_t)info.rows * (uint64_t)info.cols;
    }
    return TN_OK;
}

/* close_run ends what there is after a failure, too. */
static tn_status open_run(training *run) {
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_device_info info = TN_DEVICE_INFO_INIT;
    TRAINER_TRY(allocate(run));
    TRAINER_TRY(tn_device_info_get(run->device, &info));
    run->out->is_simulated = info.simulated;
    pool_config.name = "training";
    TRAINER_TRY(tn_pool_create(run->device, &pool_config, &run->pool));
    TRAINER_TRY(tn_stream_create(run->device, &run->stream));
    TRAINER_TRY(trainer_model_create(&run->model, run->device, run->pool, run->stream,
                                     &run->config->shape));
    TRAINER_TRY(count_parameters(&run->model, &run->out->parameters));
    TRAINER_TRY(trainer_scopes_open(&run->scopes, run->pool));
    if (!run->config->uses_graph) return TN_OK;
    return trainer_graph_open(&run->graph, run->device, run->stream);
}

static void note(tn_status *first, tn_status status) {
    if (*first == TN_OK) *first = status;
}

static tn_status close_run(training *run) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn_status status = TN_OK;
    if (run->pool) {
        note(&status, tn_device_synchronize(run->device));
        note(&status, trainer_scopes_close(&run->graph_scopes));
        note(&status, trainer_scopes_close(&run->scopes));
        note(&status, trainer_graph_close(&run->graph));
        note(&status, trainer_model_destroy(&run->model));
        note(&status, tn_pool_stats_get(run->pool, &stats));
        run->out->live_after_destroy_bytes = stats.live_bytes;
    }
    if (run->stream) note(&status, tn_stream_destroy(run->device, run->stream));
    note(&status, tn_pool_destroy(run->pool));
    free(run->tokens);
    free(run->targets);
    free(run->losses);
    return status;
}

int trainer_run(tn_device *device, const trainer_config *config, trainer_result *out,
                char message[TRAINER_MESSAGE_BYTES]) {
    training run = {.config = config, .device = device, .out = out};
    *out = (trainer_result){.is_balanced = 1, .replays_are_stable = 1};
    tn_status status = open_run(&run);
    if (status == TN_OK) status = train(&run);
    if (status != TN_OK) {
        snprintf(message, TRAINER_MESSAGE_BYTES, "%s",
                 run.graph.message[0] ? run.graph.message : tn_error_last());
    }
    const tn_status closed = close_run(&run);
    if (status == TN_OK && closed != TN_OK)
        snprintf(message, TRAINER_MESSAGE_BYTES, "closing: %s", tn_error_last());
    return status == TN_OK && closed == TN_OK;
}

void trainer_result_free(trainer_result *result) {
    free(result->loss);
    free(result->norm);
    free(result->held_out);
    trainer_trail_free(&result->trail);
    *result = (trainer_result){.loss = NULL};
}

double trainer_result_final_loss(const trainer_result *result, int steps) {
    const int count = steps < TRAINER_FINAL_STEPS ? steps : TRAINER_FINAL_STEPS;
    double sum = 0.0;
    for (int i = steps - count; i < steps; i++)
        sum += result->loss[i];
    return sum / (double)count;
}
