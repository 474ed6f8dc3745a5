/* The trainer's report: see trainer_report.h. */
#include "trainer_report.h"

#include "text_table.h"

typedef struct claim {
    const char *words;
    int holds;
    int applies; /* 0: not to this run */
} claim;

void trainer_report_heading(const trainer_config *config, const tn_device_info *device,
                            FILE *stream) {
    const trainer_shape *shape = &config->shape;
    fprintf(stream, "%s on %s: %d layers, hidden %lld, heads %lld, ffn %lld\n",
            trainer_recipe_name(shape->recipe), device->name, shape->layers,
            (long long)shape->hidden, (long long)shape->heads, (long long)shape->ffn);
    fprintf(stream, "text: %s bytes of %d files (%016llx), the last %s held out\n",
            text_count(config->text->count).text, config->text->files,
            (unsigned long long)config->text->checksum,
            text_count(config->text->count - config->text->train_count).text);
    fprintf(stream, "a step: %d micro-batches of %lld sequences of %lld bytes, seed %llu%s%s\n\n",
            shape->micro_batches, (long long)shape->batch, (long long)shape->sequence,
            (unsigned long long)shape->seed, shape->recompute ? ", recomputed in backward" : "",
            config->uses_graph ? ", one CUDA graph" : "");
    fflush(stream);
}

/* ---- claims --------------------------------------------------------------------------------- */

/* What a step leaves must have its owner: no byte of a step is alive between two. */
static int nothing_is_left(const trainer_result *result) {
    size_t owned = 0;
    for (int i = 0; i < TRAINER_OWNER_COUNT; i++)
        owned += result->owners[i].resident_bytes;
    return owned == result->live_bytes && result->owners[5].resident_bytes == 0 &&
           result->owners[6].resident_bytes == 0;
}

static int print_claims(const trainer_config *config, const trainer_result *result, FILE *stream) {
    const int computes = !result->is_simulated;
    const claim claims[] = {
        {"the loss falls, and so does the held-out one",
         trainer_result_final_loss(result, config->steps) < result->loss[0] &&
             result->held_out[config->steps] < result->held_out[0],
         computes},
        {"the bytes alive after each sub-step are the same in every step",
         result->trail.differences == 0, 1},
        {"between steps only parameters, gradients, optimizer state and batches are alive",
         nothing_is_left(result), 1},
        {"the ledger balances after every step", result->is_balanced, 1},
        {"launches of the graph change no live or reserved byte and call no driver for memory",
         result->replays_are_stable, config->uses_graph},
        {"nothing is alive at the end", result->live_after_destroy_bytes == 0, 1},
    };
    int all_hold = 1;
    for (size_t i = 0; i < sizeof claims / sizeof *claims; i++) {
        if (!claims[i].applies) continue;
        fprintf(stream, "  %s  %s\n", claims[i].holds ? "ok  " : "FAIL", claims[i].words);
        all_hold = all_hold && claims[i].holds;
    }
    return all_hold;
}

/* ---- the table ------------------------------------------------------------------------------ */

static void size_row(text_table *table, const char *name, size_t resident, size_t peak) {
    text_table_cell(table, "%s", name);
    text_table_cell(table, "%s", text_count(resident).text);
    text_table_cell(table, "%s", text_count(peak).text);
}

static int print_ledger(const trainer_result *result, FILE *stream) {
    text_table *table = text_table_create("<>>");
    if (!table) return 0;
    text_table_cell(table, "bytes");
    text_table_cell(table, "between steps");
    text_table_cell(table, "at most");
    text_table_rule(table);
    for (int i = 0; i < TRAINER_OWNER_COUNT; i++) {
        const trainer_owner *owner = &result->owners[i];
        size_row(table, owner->name, owner->resident_bytes, owner->peak_bytes);
    }
    text_table_rule(table);
    size_row(table, "all", result->live_bytes, result->peak_bytes);
    text_table_cell(table, "reserved from the device");
    text_table_cell(table, "%s", text_count(result->reserved_bytes).text);
    text_table_cell(table, "%s", "");
    text_table_cell(table, "after the model is gone");
    text_table_cell(table, "%s", text_count(result->live_after_destroy_bytes).text);
    const int printed = text_table_print(table, stream);
    text_table_destroy(table);
    return printed;
}

static int clipped_steps(const trainer_config *config, const trainer_result *result) {
    int count = 0;
    for (int i = 0; i < config->steps; i++)
        count += result->norm[i] > (double)config->shape.clip;
    return count;
}

static double most(const double *values, int count) {
    double of_all = values[0];
    for (int i = 1; i < count; i++)
        if (values[i] > of_all) of_all = values[i];
    return of_all;
}

static void print_speed(const trainer_config *config, const trainer_result *result, FILE *stream) {
    const double tokens =
        (double)trainer_model_tokens(&config->shape) * config->shape.micro_batches;
    fprintf(stream, "\n%s parameters, %d steps in %.1f s", text_count(result->parameters).text,
            config->steps, result->wall_s);
    if (!result->is_simulated) {
        fprintf(stream,
                ", %.3f ms a step, %.0f tokens/s\nloss %.4f (mean of the last %d steps), "
                "held out %.4f\ngradients of %d steps had a norm above %g, the most %.4g",
                result->step_us * 1e-3, tokens * 1e6 / result->step_us,
                trainer_result_final_loss(result, config->steps),
                config->steps < TRAINER_FINAL_STEPS ? config->steps : TRAINER_FINAL_STEPS,
                result->held_out[config->steps], clipped_steps(config, result),
                (double)config->shape.clip, most(result->norm, config->steps));
    }
    fprintf(stream,
            "\ncalls into the driver for memory: %llu in the first two steps, %llu in all "
            "others\n",
            (unsigned long long)result->memory_calls,
            (unsigned long long)result->later_memory_calls);
    if (config->uses_graph)
        fprintf(stream, "%llu launches of one graph\n", (unsigned long long)result->replays);
    fprintf(stream, "%d sub-steps in a step\n\n", result->trail.count);
}

int trainer_report_print(const trainer_config *config, const trainer_result *result, FILE *stream,
                         int *all_hold) {
    fputc('\n', stream);
    if (!print_ledger(result, stream)) return 0;
    print_speed(config, result, stream);
    *all_hold = print_claims(config, result, stream);
    return fflush(stream) == 0 && !ferror(stream);
}

/* ---- the curve ------------------------------------------------------------------------------ */

int trainer_report_csv(const trainer_config *config, const trainer_result *result, FILE *stream) {
    fprintf(stream, "step,loss,norm,held_out\n");
    for (int i = 0; i <= config->steps; i++) {
        fprintf(stream, "%d,", i);
        if (i < config->steps) fprintf(stream, "%.9g,%.9g", result->loss[i], result->norm[i]);
        if (i == config->steps) fputc(',', stream);
        fputc(',', stream);
        if (result->held_out[i] >= 0.0) fprintf(stream, "%.9g", result->held_out[i]);
        fputc('\n', stream);
    }
    return fflush(stream) == 0 && !ferror(stream);
}
