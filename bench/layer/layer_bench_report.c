/* What tenure-bench-layer prints: two tables a pair of sides, what costs most, and what the target
 * would need. */
#include <stdlib.h>
#include <string.h>

#include "layer_bench.h"
#include "replay_output.h"
#include "text_table.h"

enum { WORST = 5 };

static const double target = 1.5;

static const char *const pair_titles[LAYER_PAIRS] = {
    "The four products with their casts (weights once, x and dy into both planes, w transposed)",
    "The same with the layer's norms and GELU, which quantize what they make"};
static const char *const pair_keys[LAYER_PAIRS] = {"products", "layer"};
static const char *const kind_names[LAYER_KINDS] = {"casts", "norms", "GELU",
                                                    "fprop", "dgrad", "wgrad"};

/* Of some steps of a side. */
typedef struct layer_sum {
    double seconds, limit, bytes, flop;
} layer_sum;

/* Of one kind, or of all (LAYER_KINDS). */
static layer_sum sum_of(const layer_side *side, layer_kind kind) {
    layer_sum sum = {0.0, 0.0, 0.0, 0.0};
    for (int i = 0; i < side->count; i++) {
        const layer_step *step = &side->steps[i];
        if (kind != LAYER_KINDS && step->kind != kind) continue;
        sum.seconds += step->seconds;
        sum.limit += step->limit;
        sum.bytes += step->bytes;
        sum.flop += step->flop;
    }
    return sum;
}

static double rate_of(layer_sum sum) { return sum.flop / sum.seconds * 1e-12; }

/* ---- tables --------------------------------------------------------------------------------- */

static void put_work(text_table *table, double bytes, double flop, double seconds) {
    if (flop > 0.0)
        text_table_cell(table, "%.0f TFLOP/s", flop / seconds * 1e-12);
    else
        text_table_cell(table, "%.0f GB/s", bytes / seconds * 1e-9);
}

static const layer_step *step_named(const layer_side *side, const char *name) {
    for (int i = 0; i < side->count; i++)
        if (strcmp(side->steps[i].name, name) == 0) return &side->steps[i];
    return NULL;
}

/* An empty cell where there is none. */
static void put_number(text_table *table, int is_there, int digits, double number) {
    if (is_there)
        text_table_cell(table, "%.*f", digits, number);
    else
        text_table_cell(table, "%s", "");
}

/* Every step of the FP8 side, and what has its name on the bf16 side. */
static int print_steps(const layer_side *sides, FILE *stream) {
    const layer_side *fp8 = &sides[LAYER_FP8];
    text_table *table = text_table_create("<>>>>>");
    if (!table) return 0;
    static const char *const columns[] = {"step",    "FP8 us", "at its limit",
                                          "over it", "rate",   "bf16 us"};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        text_table_cell(table, "%s", columns[i]);
    text_table_rule(table);
    for (int i = 0; i < fp8->count; i++) {
        const layer_step *step = &fp8->steps[i],
                         *other = step_named(&sides[LAYER_BF16], step->name);
        text_table_cell(table, "%s", step->name);
        text_table_cell(table, "%.1f", step->seconds * 1e6);
        text_table_cell(table, "%.1f", step->limit * 1e6);
        text_table_cell(table, "%.1f", (step->seconds - step->limit) * 1e6);
        put_work(table, step->bytes, step->flop, step->seconds);
        put_number(table, other != NULL, 1, other ? other->seconds * 1e6 : 0.0);
    }
    const int is_printed = text_table_print(table, stream);
    text_table_destroy(table);
    return is_printed;
}

static void put_kind(text_table *table, const char *name, const layer_side *sides,
                     layer_kind kind) {
    const layer_sum fp8 = sum_of(&sides[LAYER_FP8], kind), bf16 = sum_of(&sides[LAYER_BF16], kind);
    if (fp8.seconds <= 0.0) return;
    text_table_cell(table, "%s", name);
    text_table_cell(table, "%.0f", fp8.seconds * 1e6);
    text_table_cell(table, "%.0f", fp8.limit * 1e6);
    text_table_cell(table, "%.0f", bf16.seconds * 1e6);
    text_table_cell(table, "%.0f", bf16.limit * 1e6);
    put_number(table, bf16.seconds > 0.0, 2, bf16.seconds / fp8.seconds);
}

static int print_kinds(const layer_side *sides, double ratio, FILE *stream) {
    text_table *table = text_table_create("<>>>>>");
    if (!table) return 0;
    static const char *const columns[] = {"sums",    "FP8 us",       "at its limit",
                                          "bf16 us", "at its limit", "bf16 / FP8"};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        text_table_cell(table, "%s", columns[i]);
    text_table_rule(table);
    for (int kind = 0; kind < LAYER_KINDS; kind++)
        put_kind(table, kind_names[kind], sides, (layer_kind)kind);
    put_kind(table, "all, each alone", sides, LAYER_KINDS);
    text_table_cell(table, "the whole, in turn");
    text_table_cell(table, "%.0f", sides[LAYER_FP8].seconds * 1e6);
    text_table_cell(table, "%s", "");
    text_table_cell(table, "%.0f", sides[LAYER_BF16].seconds * 1e6);
    text_table_cell(table, "%s", "");
    text_table_cell(table, "%.3f", ratio);
    const int is_printed = text_table_print(table, stream);
    text_table_destroy(table);
    return is_printed;
}

/* ---- what costs most ------------------------------------------------------------------------ */

/* The step furthest above its limit of those that are below `bound` above theirs. */
static const layer_step *next_worst(const layer_side *side, double bound) {
    const layer_step *worst = NULL;
    double most = 0.0;
    for (int i = 0; i < side->count; i++) {
        const double over = side->steps[i].seconds - side->steps[i].limit;
        if (over >= bound || over <= most) continue;
        most = over;
        worst = &side->steps[i];
    }
    return worst;
}

static void print_worst(const layer_side *side, FILE *stream) {
    double bound = 1e9;
    fprintf(stream, "Furthest above their limits:");
    for (int i = 0; i < WORST; i++) {
        const layer_step *step = next_worst(side, bound);
        if (!step) break;
        bound = step->seconds - step->limit;
        fprintf(stream, "%s %s %.1f us", i ? "," : "", step->name, bound * 1e6);
    }
    fprintf(stream, ".\n");
}

/* What the ratio would be if one thing were different and all else took the time that it takes. */
static void print_target(const layer_side *sides, FILE *stream) {
    const layer_side *fp8 = &sides[LAYER_FP8];
    const layer_sum fprop = sum_of(fp8, LAYER_FPROP), dgrad = sum_of(fp8, LAYER_DGRAD),
                    wgrad = sum_of(fp8, LAYER_WGRAD), all = sum_of(fp8, LAYER_KINDS);
    const double bf16_us = sides[LAYER_BF16].seconds * 1e6, fp8_us = fp8->seconds * 1e6;
    const double over_us = fp8_us - bf16_us / target;
    const double at_limits_us = fp8_us - (all.seconds - all.limit) * 1e6;
    const double even_us = fp8_us - (wgrad.seconds - wgrad.flop / fprop.flop * fprop.seconds) * 1e6;
    fprintf(stream, "For %.1fx the FP8 side may take %.0f us: %.0f us %s.\n", target,
            bf16_us / target, over_us > 0.0 ? over_us : -over_us,
            over_us > 0.0 ? "too much" : "to spare");
    fprintf(
        stream,
        "With all steps at their limits: %.3fx. With products alone, without any cast: %.3fx.\n",
        bf16_us / at_limits_us, bf16_us / ((fprop.seconds + dgrad.seconds + wgrad.seconds) * 1e6));
    fprintf(stream,
            "wgrad runs at %.0f TFLOP/s, fprop at %.0f: with wgrad at fprop's rate %.3fx.\n",
            rate_of(wgrad), rate_of(fprop), bf16_us / even_us);
}

static void print_host(const layer_side *sides, FILE *stream) {
    const layer_side *fp8 = &sides[LAYER_FP8];
    fprintf(stream,
            "The host puts it on the stream in %.0f us (bf16: %.0f us): %s. Times are behind a "
            "gate, as those of a captured graph.\n",
            fp8->host_seconds * 1e6, sides[LAYER_BF16].host_seconds * 1e6,
            fp8->host_seconds < fp8->seconds ? "launches bound nothing"
                                             : "without a graph the host is what bounds it");
}

static void print_calls(const layer_report *report, FILE *stream) {
    const layer_calls *fp8 = &report->calls[LAYER_FP8], *bf16 = &report->calls[LAYER_BF16];
    const layer_calls *beside = &report->calls[LAYER_FP8_BESIDE];
    fprintf(stream,
            "\nThrough tn_norm_linear_*, tn_linear_* and tn_norm_mlp_*: FP8 %.0f us, bf16 %.0f us: "
            "%.3fx (host: %.0f us, %.0f us).\nWith weights transposed on a stream beside the "
            "products: FP8 %.0f us (host: %.0f us).\n",
            fp8->seconds * 1e6, bf16->seconds * 1e6, report->calls_ratio, fp8->host_seconds * 1e6,
            bf16->host_seconds * 1e6, beside->seconds * 1e6, beside->host_seconds * 1e6);
}

int layer_report_print(const layer_report *report, const char *device, FILE *stream) {
    int is_printed =
        fprintf(stream,
                "%s\n%lld tokens, hidden %lld, FFN %lld; main gradients %s, added to; %d rounds in "
                "turn of %d; copies %.0f GB/s\n",
                device, (long long)report->shape.tokens, (long long)report->shape.hidden,
                (long long)report->shape.ffn, tn_dtype_name(report->shape.main_gradient),
                report->rounds, LAYER_TURNS, report->copy_rate * 1e-9) > 0;
    for (int pair = 0; pair < LAYER_PAIRS && is_printed; pair++) {
        const layer_side *sides = report->sides[pair];
        fprintf(stream, "\n%s\n\n", pair_titles[pair]);
        is_printed = print_steps(sides, stream);
        fprintf(stream, "\n");
        is_printed = is_printed && print_kinds(sides, report->ratio[pair], stream);
        fprintf(stream, "\n");
        print_worst(&sides[LAYER_FP8], stream);
        print_target(sides, stream);
        print_host(sides, stream);
    }
    print_calls(report, stream);
    return is_printed && !ferror(stream);
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static int add_numbers(cJSON *object, const char *const *names, const double *values, int count) {
    int is_whole = object != NULL;
    for (int i = 0; i < count && is_whole; i++)
        is_whole = cJSON_AddNumberToObject(object, names[i], values[i]) != NULL;
    return is_whole;
}

static int add_side(cJSON *parent, const layer_side *side) {
    static const char *const names[] = {"us", "limit_us", "bytes", "flop"};
    cJSON *object = cJSON_AddObjectToObject(parent, side->name);
    int is_whole = object && cJSON_AddNumberToObject(object, "us", side->seconds * 1e6) &&
                   cJSON_AddNumberToObject(object, "host_us", side->host_seconds * 1e6);
    cJSON *steps = is_whole ? cJSON_AddObjectToObject(object, "steps") : NULL;
    is_whole = is_whole && steps;
    for (int i = 0; i < side->count && is_whole; i++) {
        const layer_step *step = &side->steps[i];
        const double values[] = {step->seconds * 1e6, step->limit * 1e6, step->bytes, step->flop};
        is_whole = add_numbers(cJSON_AddObjectToObject(steps, step->name), names, values, 4);
    }
    return is_whole;
}

static int add_report(cJSON *json, const layer_report *report, const char *device) {
    static const char *const names[] = {"tokens", "hidden", "ffn", "rounds", "copy_gb_per_s"};
    const double values[] = {(double)report->shape.tokens, (double)report->shape.hidden,
                             (double)report->shape.ffn, (double)report->rounds,
                             report->copy_rate * 1e-9};
    int is_whole = cJSON_AddStringToObject(json, "device", device) &&
                   cJSON_AddStringToObject(json, "main_gradient",
                                           tn_dtype_name(report->shape.main_gradient)) &&
                   add_numbers(json, names, values, 5);
    cJSON *calls = is_whole ? cJSON_AddObjectToObject(json, "calls") : NULL;
    static const char *const call_names[] = {"ratio", "FP8", "bf16", "FP8 beside"};
    const double times[] = {report->calls_ratio, report->calls[LAYER_FP8].seconds * 1e6,
                            report->calls[LAYER_BF16].seconds * 1e6,
                            report->calls[LAYER_FP8_BESIDE].seconds * 1e6};
    is_whole = is_whole && add_numbers(calls, call_names, times, 4);
    for (int pair = 0; pair < LAYER_PAIRS && is_whole; pair++) {
        cJSON *object = cJSON_AddObjectToObject(json, pair_keys[pair]);
        is_whole = object && cJSON_AddNumberToObject(object, "ratio", report->ratio[pair]);
        for (int of = 0; of < LAYER_SIDES && is_whole; of++)
            is_whole = add_side(object, &report->sides[pair][of]);
    }
    return is_whole;
}

int layer_report_print_json(const layer_report *report, const char *device, FILE *stream) {
    cJSON *json = cJSON_CreateObject();
    const int is_printed = json && add_report(json, report, device) && json_print(json, stream);
    cJSON_Delete(json);
    return is_printed;
}
