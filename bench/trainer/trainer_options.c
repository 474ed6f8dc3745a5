/* The trainer's command line: see trainer_options.h. */
#include "trainer_options.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "command_usage.h"
#include "option_values.h"

/* Places and tokens are bytes; a head's width is what attention takes. */
enum { SEQUENCE_MAX = 256, HEAD_WIDTH_STEP = 8, HEAD_WIDTH_MAX = 128, TOKENS_MAX = 1 << 20 };

static const char usage_text[] =
    "usage: tenure-train [options]      (./run train [options])\n"
    "\n"
    "Trains a byte-level transformer on text, with exact memory: what is alive after each sub-step "
    "is\n"
    "the same in every step, and at the end nothing is.\n"
    "\n"
    "  --recipe NAME       fp8 (default: weights and activations of layers block-scaled), "
    "fp8-tensor\n"
    "                      (one scale each, of its own amax), fp8-delayed (of the last 16 steps), "
    "bf16,\n"
    "                      fp32\n"
    "  --driver NAME       auto (default: a CUDA device if there is one), cuda or host\n"
    "  --graph             CUDA: forward, backward and optimizer are one captured graph\n"
    "  --layers N          layers (8 on CUDA, 2 on the host)\n"
    "  --hidden N          width (1024 on CUDA, 128 on the host)\n"
    "  --heads N           heads of attention (hidden / 64)\n"
    "  --ffn N             width within the MLP (hidden * 8 / 3, up to a multiple of 128)\n"
    "  --sequence N        tokens of a sequence, at most 256 (256 on CUDA, 64 on the host)\n"
    "  --batch N           sequences of a micro-batch (16 on CUDA, 8 on the host)\n"
    "  --accumulate N      micro-batches of a step (1)\n"
    "  --recompute         backward computes again what forward would save\n"
    "  --steps N           steps (300)\n"
    "  --rate X            highest learning rate, which the first tenth of the steps rises to and "
    "the\n"
    "                      others fall from, to a tenth of it (0.001 on CUDA, 0.003 on the host)\n"
    "  --clip X            largest norm of all gradients of a step (1); inf: they are not clipped\n"
    "  --seed N            of weights and of the windows of text (1)\n"
    "  --text FILE         the data, in the order given if there are several (the project's "
    "README,\n"
    "                      docs/ and public headers); the last tenth is held out\n"
    "  --validate-every N  steps (50)\n"
    "  --csv FILE          the losses of each step, for plot_loss.py\n"
    "  --bytes FILE        what is alive after each sub-step, as CSV\n"
    "  --help              this text\n";

int trainer_bad_usage(const char *what, const char *value) {
    return program_misused("tenure-train", what, value);
}

/* ---- parsing -------------------------------------------------------------------------------- */

static int parse_recipe(const char *text, trainer_recipe *out) {
    for (int i = 0; i < TRAINER_RECIPE_COUNT; i++) {
        if (strcmp(text, trainer_recipe_name((trainer_recipe)i)) == 0)
            return *out = (trainer_recipe)i, 1;
    }
    return 0;
}

static int parse_rate(const char *text, float *out) {
    char *end = NULL;
    const float value = strtof(text, &end);
    if (end == text || *end || !(value > 0.0f && value <= 1.0f)) return 0;
    *out = value;
    return 1;
}

/* Above 0, infinite too. */
static int parse_clip(const char *text, float *out) {
    char *end = NULL;
    const float value = strtof(text, &end);
    if (end == text || *end || !(value > 0.0f)) return 0;
    *out = value;
    return 1;
}

static int parse_int(const char *text, long least, long most, int *out) {
    long value = 0;
    if (!option_count(text, least, most, &value)) return 0;
    *out = (int)value;
    return 1;
}

static int parse_size(const char *text, long most, int64_t *out) {
    long value = 0;
    if (!option_count(text, 1, most, &value)) return 0;
    *out = value;
    return 1;
}

static int parse_text(const char *path, trainer_options *options) {
    if (options->text_count == TRAINER_FILES_MAX) return 0;
    options->texts[options->text_count++] = path;
    return 1;
}

static int parse_seed(const char *text, trainer_shape *shape) {
    int64_t seed = 0;
    if (!parse_size(text, 1L << 40, &seed)) return 0;
    shape->seed = (uint64_t)seed;
    return 1;
}

static int parse_one(int option, const char *value, trainer_options *options) {
    trainer_config *config = &options->config;
    trainer_shape *shape = &config->shape;
    switch (option) {
    case 'r': return parse_recipe(value, &shape->recipe);
    case 'd': return option_driver(value, &options->driver);
    case 'g': return config->uses_graph = 1;
    case 'l': return parse_int(value, 1, 1000, &shape->layers);
    case 'h': return parse_size(value, 65536, &shape->hidden);
    case 'a': return parse_size(value, 8192, &shape->heads);
    case 'f': return parse_size(value, 1 << 18, &shape->ffn);
    case 'q': return parse_size(value, SEQUENCE_MAX, &shape->sequence);
    case 'b': return parse_size(value, TOKENS_MAX, &shape->batch);
    case 'm': return parse_int(value, 1, 1024, &shape->micro_batches);
    case 'c': return shape->recompute = 1;
    case 's': return parse_int(value, 2, 1000000, &config->steps);
    case 'x': return parse_rate(value, &shape->learning_rate);
    case 'p': return parse_clip(value, &shape->clip);
    case 'e': return parse_seed(value, shape);
    case 't': return parse_text(value, options);
    case 'v': return parse_int(value, 1, 1000000, &config->validate_every);
    case 'o': return (options->csv_path = value) != NULL;
    default: return (options->bytes_path = value) != NULL;
    }
}

int trainer_options_parse(int argc, char **argv, trainer_options *options) {
    enum { HELP = 256 };
    static const struct option known[] = {{"recipe", required_argument, NULL, 'r'},
                                          {"driver", required_argument, NULL, 'd'},
                                          {"graph", no_argument, NULL, 'g'},
                                          {"layers", required_argument, NULL, 'l'},
                                          {"hidden", required_argument, NULL, 'h'},
                                          {"heads", required_argument, NULL, 'a'},
                                          {"ffn", required_argument, NULL, 'f'},
                                          {"sequence", required_argument, NULL, 'q'},
                                          {"batch", required_argument, NULL, 'b'},
                                          {"accumulate", required_argument, NULL, 'm'},
                                          {"recompute", no_argument, NULL, 'c'},
                                          {"steps", required_argument, NULL, 's'},
                                          {"rate", required_argument, NULL, 'x'},
                                          {"clip", required_argument, NULL, 'p'},
                                          {"seed", required_argument, NULL, 'e'},
                                          {"text", required_argument, NULL, 't'},
                                          {"validate-every", required_argument, NULL, 'v'},
                                          {"csv", required_argument, NULL, 'o'},
                                          {"bytes", required_argument, NULL, 'y'},
                                          {"help", no_argument, NULL, HELP},
                                          {NULL, 0, NULL, 0}};
    int option, index = 0;
    while ((option = getopt_long(argc, argv, "", known, &index)) != -1) {
        if (option == '?') return 1 + 2;
        if (option == HELP) return fputs(usage_text, stdout) >= 0 ? 1 : 2;
        if (!parse_one(option, optarg, options))
            return 1 + trainer_bad_usage(known[index].name, optarg);
    }
    if (optind < argc) return 1 + trainer_bad_usage("unexpected argument", argv[optind]);
    return 0;
}

/* ---- what is left, and what does not fit ----------------------------------------------------- */

static void set_size(int64_t *size, int64_t value) {
    if (!*size) *size = value;
}

static void set_sizes(trainer_config *config, int is_cuda) {
    trainer_shape *shape = &config->shape;
    set_size(&shape->hidden, is_cuda ? 1024 : 128);
    set_size(&shape->heads, shape->hidden > 64 ? shape->hidden / 64 : 1);
    set_size(&shape->ffn, (shape->hidden * 8 / 3 + 127) / 128 * 128);
    set_size(&shape->sequence, is_cuda ? 256 : 64);
    set_size(&shape->batch, is_cuda ? 16 : 8);
    if (!shape->layers) shape->layers = is_cuda ? 8 : 2;
    if (!shape->micro_batches) shape->micro_batches = 1;
    if (shape->learning_rate <= 0.0f) shape->learning_rate = is_cuda ? 0.001f : 0.003f;
    if (shape->clip <= 0.0f) shape->clip = 1.0f;
    if (!shape->seed) shape->seed = 1;
    if (!config->steps) config->steps = 300;
    if (!config->validate_every) config->validate_every = 50;
}

int trainer_options_complete(trainer_options *options, const tn_device_info *device) {
    const int is_cuda = device->driver == TN_DRIVER_CUDA;
    const trainer_shape *shape = &options->config.shape;
    char words[128];
    set_sizes(&options->config, is_cuda);
    const int64_t width = shape->hidden / shape->heads;
    snprintf(words, sizeof words,
             "%lld heads of hidden %lld: a head must be a multiple of %d, at most %d",
             (long long)shape->heads, (long long)shape->hidden, HEAD_WIDTH_STEP, HEAD_WIDTH_MAX);
    if (width * shape->heads != shape->hidden || width % HEAD_WIDTH_STEP != 0 ||
        width > HEAD_WIDTH_MAX)
        return trainer_bad_usage("heads", words), 0;
    snprintf(words, sizeof words, "%lld sequences of %lld are more than %d tokens",
             (long long)shape->batch, (long long)shape->sequence, TOKENS_MAX);
    if (trainer_model_tokens(shape) > TOKENS_MAX) return trainer_bad_usage("batch", words), 0;
    if (options->config.uses_graph && !is_cuda)
        return trainer_bad_usage("graph", "only a CUDA device captures"), 0;
    return 1;
}
