/* Reads the options of the table in options.h from the environment.
 *
 * Invariant: after the first tn__options_get every field holds an accepted value, and source_of
 * says which variable it came from (NULL: the default).
 */
#include "options.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nvtx_memory.h"
#include "text_sink.h"

#define AS_INDEX(kind, field, variable, alias, fallback, meaning) OPTION_##field,
enum option_index { TN_OPTION_TABLE(AS_INDEX) OPTION_COUNT };

typedef enum option_kind {
    OPTION_BOOL,
    OPTION_SIZE,
    OPTION_LIMIT,
    OPTION_NUMBER,
    OPTION_TEXT,
    OPTION_CHOICE,
    OPTION_POLICY,
    OPTION_ENGINE,
    OPTION_BACKING
} option_kind;

typedef struct option_row {
    option_kind kind;
    size_t offset;
    const char *variable;
    const char *alias;
    const char *fallback;
    const char *meaning;
} option_row;

#define AS_ROW(kind, field, variable, alias, fallback, meaning)                                    \
    {OPTION_##kind, offsetof(tn__options, field), variable, alias, fallback, meaning},
static const option_row rows[OPTION_COUNT] = {TN_OPTION_TABLE(AS_ROW)};

static const char *const driver_choices[] = {"auto", "cuda", "host", NULL};

const char *const tn__policy_choices[] = {
    "default", "keep",   "until_last_use", "until_backward_end",
    "scratch", "budget", "offload",        NULL};

/* As the op layer's tn_gemm_engine counts them. */
static const char *const engine_choices[] = {
    "auto", "reference", "cublaslt", "dequantize-bf16", "dequantize-fp32", "wgmma", NULL};

const char *const tn__run_pool_choices[] = {"plain", "vmm", "async", "none", NULL};

static tn__options values;
static const char *source_of[OPTION_COUNT];
static const char *text_of[OPTION_COUNT];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const char *accepted_form(option_kind kind) {
    switch (kind) {
    case OPTION_BOOL: return "0 or 1";
    case OPTION_SIZE: return "a number of bytes, or one with KiB, MiB, GiB or TiB (64MiB)";
    case OPTION_LIMIT: return "none, or a size (64MiB)";
    case OPTION_NUMBER: return "a number from 0 to 1048576";
    case OPTION_CHOICE: return "auto, cuda or host";
    case OPTION_POLICY:
        return "default, keep, until_last_use, until_backward_end, scratch, budget or offload";
    case OPTION_ENGINE:
        return "auto, reference, cublaslt, dequantize-bf16, dequantize-fp32 or wgmma";
    case OPTION_BACKING: return "plain, vmm, async or none";
    default: return "a text";
    }
}

/* Bytes of one unit of the suffix, 0 if there is no such. */
static double unit_of(const char *suffix) {
    static const char *const names[] = {"KiB", "MiB", "GiB", "TiB"};
    double unit = 1024.0;
    while (*suffix == ' ')
        suffix++;
    if (!*suffix || strcasecmp(suffix, "B") == 0) return 1.0;
    for (int i = 0; i < 4; i++, unit *= 1024.0) {
        if (strcasecmp(suffix, names[i]) == 0) return unit;
    }
    return 0.0;
}

int tn__parse_size(const char *text, size_t *bytes) {
    char *end = NULL;
    if (*text < '0' || *text > '9') return 0;
    errno = 0;
    unsigned long long whole = strtoull(text, &end, 10);
    if (errno) return 0;
    if (!*end) {
        *bytes = (size_t)whole;
        return 1;
    }
    if (*end == 'x' || *end == 'X' || *end == 'e' || *end == 'E') return 0;
    double number = strtod(text, &end);
    double total = number * unit_of(end);
    if (unit_of(end) == 0.0 || !(total < 9.0e18)) return 0;
    *bytes = (size_t)total;
    return 1;
}

static int parse_bool(const char *text, int *out) {
    static const char *const words[2][4] = {{"0", "off", "no", "false"},
                                            {"1", "on", "yes", "true"}};
    for (int value = 0; value < 2; value++) {
        for (int i = 0; i < 4; i++) {
            if (strcasecmp(text, words[value][i]) == 0) return *out = value, 1;
        }
    }
    return 0;
}

static int parse_choice(const char *text, const char *const *choices, int *out) {
    for (int i = 0; choices[i]; i++) {
        if (strcasecmp(text, choices[i]) == 0) return *out = i, 1;
    }
    return 0;
}

static int parse_limit(const char *text, size_t *out) {
    if (strcasecmp(text, "none") == 0) return *out = 0, 1;
    return tn__parse_size(text, out) && *out > 0;
}

static int parse_number(const char *text, size_t *out) {
    size_t number = 0;
    if (text[strspn(text, "0123456789")] || !tn__parse_size(text, &number)) return 0;
    if (number > 1048576) return 0;
    *out = number;
    return 1;
}

static int parse_into(const option_row *row, const char *text, tn__options *out) {
    void *field = (char *)out + row->offset;
    switch (row->kind) {
    case OPTION_BOOL: return parse_bool(text, field);
    case OPTION_CHOICE: return parse_choice(text, driver_choices, field);
    case OPTION_POLICY: return parse_choice(text, tn__policy_choices, field);
    case OPTION_ENGINE: return parse_choice(text, engine_choices, field);
    case OPTION_BACKING: return parse_choice(text, tn__run_pool_choices, field);
    case OPTION_LIMIT: return parse_limit(text, field);
    case OPTION_NUMBER: return parse_number(text, field);
    case OPTION_SIZE: return tn__parse_size(text, field) && *(size_t *)field > 0;
    default: *(const char **)field = text; return 1;
    }
}

static void reject(const option_row *row, const char *variable, const char *text) {
    fprintf(stderr, "tenure: %s=%s is not accepted: it takes %s; using %s\n", variable, text,
            accepted_form(row->kind), row->fallback);
    if (values.strict) {
        fprintf(stderr, "tenure: TENURE_STRICT=1: ending\n");
        exit(2);
    }
}

static void read_option(size_t index) {
    const option_row *row = &rows[index];
    const char *variable = row->variable;
    const char *text = getenv(variable);
    if (!text && row->alias) text = getenv(variable = row->alias);
    TN_CHECK(parse_into(row, row->fallback, &values));
    source_of[index] = NULL;
    text_of[index] = row->fallback;
    if (!text || !*text) return;
    if (parse_into(row, text, &values)) {
        source_of[index] = variable;
        text_of[index] = text;
    } else {
        TN_CHECK(parse_into(row, row->fallback, &values));
        reject(row, variable, text);
    }
}

void tn__options_reload(void) {
    for (size_t i = 0; i < OPTION_COUNT; i++)
        read_option(i); /* strict is the first */
}

const tn__options *tn__options_get(void) {
    pthread_once(&once, tn__options_reload);
    return &values;
}

size_t tn_options_describe(char *text, size_t text_bytes) {
    tn__text out = tn__text_begin(text, text_bytes);
    (void)tn__options_get();
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        tn__text_add(&out, "%-32s %-14s (%s) %s\n", rows[i].variable, text_of[i],
                     source_of[i] ? source_of[i] : "default", rows[i].meaning);
    }
    tn__text_add(&out, "NVTX memory annotations are%s built in\n",
                 tn__nvtx_is_built() ? "" : " not");
    return out.used;
}
