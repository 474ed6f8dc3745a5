/* tenure-bench-sharded: a training step of transformer layers that are sharded over the ranks.
 *
 *     mpirun -n 2 build/release/tenure-bench-sharded --driver cuda [OPTIONS]
 *
 *     --driver host|cuda     host: shapes are small
 *     --engine mpi|nccl      host: mpi; cuda: nccl, or mpi, with which ranks can share a GPU
 *     --share-gpu            nccl: all ranks on the first GPU, over sockets: it works, at no speed
 *     --weights fp8|bf16|both        --prefetch on|off|both
 *     --layout auto|tiles|ragged|flat        how a layer is cut: tenure_shard.h
 *     --shards kept|made     made: of the masters for each gather, as FSDP2's are
 *     --update end|ahead     ahead: of each layer behind its reduction
 *     --layers N --hidden N --heads N --ffn N --tokens N      tokens: of each rank
 *     --sequence N           attention of sequences of N tokens; 0: none, see sharded_bench.h
 *     --gradients bf16|fp32  on the wire
 *     --rounds N             steps that are timed
 *     --tune                 algorithms of products are timed first
 *     --check                no times: what ranks train together is what one rank trains
 *
 * Rank 0 prints CSV, a line for each rank and setting, and bench/peers/fsdp2_peer.py the same of
 * PyTorch FSDP2. Times in microseconds; exposed_us is what the step takes beyond layers_us (all
 * layers on weights that are there) and update_us (the update by itself; with --update ahead what
 * of it is left at the end), each with the host's clock and waits around it. Bytes: of live blocks
 * between steps, the most of them, what the pool has taken, what the driver says is taken of the
 * device by all; and what the rank sends in a step.
 * Planned: what the same program does on a simulated device, before.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "option_values.h"
#include "sharded_bench.h"

enum { EXIT_BAD_USAGE = 2, SIZE_MAX_OF_OPTIONS = 1 << 24 };

typedef struct bench_options {
    tn_driver_kind driver;
    tn_comm_engine engine;
    int fp8, bf16;                                             /* 1: to be measured */
    int ahead, on_call;                                        /* prefetch on, off */
    long layers, hidden, heads, ffn, tokens, sequence, rounds; /* -1: not given */
    tn_dtype gradient_dtype;
    tn_shard_layout layout;
    int shards_from_masters, update_ahead;
    int tunes, checks, shares_gpu;
} bench_options;

/* ---- options --------------------------------------------------------------------------------- */

static void print_usage(FILE *out) {
    fprintf(out,
            "usage: mpirun -n RANKS tenure-bench-sharded [--driver host|cuda] [--engine mpi|nccl]\n"
            "       [--weights fp8|bf16|both] [--prefetch on|off|both]\n"
            "       [--layout auto|tiles|ragged|flat] [--shards kept|made] [--update end|ahead]\n"
            "       [--layers N] [--hidden N] [--heads N] [--ffn N] [--tokens N] [--sequence N]\n"
            "       [--gradients bf16|fp32] [--rounds 1-%d] [--tune] [--check] [--share-gpu]\n",
            SHARDED_ROUNDS_MAX);
}

static int bad_usage(const char *what, const char *value) {
    fprintf(stderr, "tenure-bench-sharded: %s%s\n", what, value);
    print_usage(stderr);
    return EXIT_BAD_USAGE;
}

/* Which of two names, or "both": 1, or 0. */
static int parse_either(const char *text, const char *first, const char *second, int *is_first,
                        int *is_second) {
    const int is_both = strcmp(text, "both") == 0;
    if (!is_both && strcmp(text, first) != 0 && strcmp(text, second) != 0) return 0;
    *is_first = is_both || strcmp(text, first) == 0;
    *is_second = is_both || strcmp(text, second) == 0;
    return 1;
}

/* Which of two names it is: 0, or 1. */
static int parse_second(const char *text, const char *first, const char *second, int *is_second) {
    int is_first = 0;
    return parse_either(text, first, second, &is_first, is_second) && is_first != *is_second;
}

static int parse_layout(const char *text, tn_shard_layout *out) {
    for (int i = 0; i < TN_SHARD_LAYOUT_COUNT; i++) {
        if (strcmp(text, tn_shard_layout_name((tn_shard_layout)i)) != 0) continue;
        *out = (tn_shard_layout)i;
        return 1;
    }
    return 0;
}

static int parse_names(int option, bench_options *options) {
    int is_second = 0;
    switch (option) {
    case 'd': return option_driver(optarg, &options->driver);
    case 'w': return parse_either(optarg, "fp8", "bf16", &options->fp8, &options->bf16);
    case 'p': return parse_either(optarg, "on", "off", &options->ahead, &options->on_call);
    case 'c': return parse_layout(optarg, &options->layout);
    case 'm': return parse_second(optarg, "kept", "made", &options->shards_from_masters);
    case 'u': return parse_second(optarg, "end", "ahead", &options->update_ahead);
    case 'e':
        if (!parse_second(optarg, "mpi", "nccl", &is_second)) return 0;
        options->engine = is_second ? TN_COMM_NCCL : TN_COMM_MPI;
        return 1;
    default:
        if (!parse_second(optarg, "bf16", "fp32", &is_second)) return 0;
        options->gradient_dtype = is_second ? TN_FP32 : TN_BF16;
        return 1;
    }
}

static int parse_number(int option, bench_options *options) {
    const long most = SIZE_MAX_OF_OPTIONS;
    switch (option) {
    case 'l': return option_count(optarg, 1, SHARDED_LAYERS_MAX, &options->layers);
    case 'h': return option_count(optarg, 1, most, &options->hidden);
    case 'a': return option_count(optarg, 1, most, &options->heads);
    case 'f': return option_count(optarg, 1, most, &options->ffn);
    case 't': return option_count(optarg, 1, most, &options->tokens);
    case 's': return option_count(optarg, 0, most, &options->sequence);
    default: return option_count(optarg, 1, SHARDED_ROUNDS_MAX, &options->rounds);
    }
}

static const struct option option_names[] = {{"driver", required_argument, NULL, 'd'},
                                             {"engine", required_argument, NULL, 'e'},
                                             {"weights", required_argument, NULL, 'w'},
                                             {"prefetch", required_argument, NULL, 'p'},
                                             {"gradients", required_argument, NULL, 'g'},
                                             {"layout", required_argument, NULL, 'c'},
                                             {"shards", required_argument, NULL, 'm'},
                                             {"update", required_argument, NULL, 'u'},
                                             {"layers", required_argument, NULL, 'l'},
                                             {"hidden", required_argument, NULL, 'h'},
                                             {"heads", required_argument, NULL, 'a'},
                                             {"ffn", required_argument, NULL, 'f'},
                                             {"tokens", required_argument, NULL, 't'},
                                             {"sequence", required_argument, NULL, 's'},
                                             {"rounds", required_argument, NULL, 'r'},
                                             {"tune", no_argument, NULL, 'T'},
                                             {"check", no_argument, NULL, 'C'},
                                             {"share-gpu", no_argument, NULL, 'G'},
                                             {"help", no_argument, NULL, 'H'},
                                             {NULL, 0, NULL, 0}};

static const char *name_of(int option) {
    for (const struct option *of = option_names; of->name; of++)
        if (of->val == option) return of->name;
    return "";
}

/* What was not given, by device. */
static void complete(bench_options *options) {
    const int is_host = options->driver == TN_DRIVER_HOST;
    if (options->engine == TN_COMM_AUTO) options->engine = is_host ? TN_COMM_MPI : TN_COMM_NCCL;
    if (options->layers < 0) options->layers = 8;
    if (options->hidden < 0) options->hidden = is_host ? 256 : 4096;
    if (options->heads < 0) options->heads = is_host ? 4 : 32;
    if (options->ffn < 0) options->ffn = is_host ? 512 : 14336;
    if (options->tokens < 0) options->tokens = is_host ? 128 : 8192;
    if (options->sequence < 0) options->sequence = 0;
    if (options->rounds < 0) options->rounds = is_host ? 3 : 9;
}

static int check_sizes(const bench_options *options) {
    if (options->heads % 2 || options->hidden % options->heads)
        return bad_usage("--heads is to be even and to divide --hidden", "");
    if (options->sequence && options->tokens % options->sequence)
        return bad_usage("--sequence is to divide --tokens", "");
    if (options->driver == TN_DRIVER_HOST && options->engine == TN_COMM_NCCL)
        return bad_usage("--engine nccl is for --driver cuda", "");
    return 0;
}

static int parse(int argc, char **argv, bench_options *options) {
    char words[40];
    int option;
    opterr = 0;
    while ((option = getopt_long(argc, argv, "", option_names, NULL)) != -1) {
        int is_taken = 1;
        if (option == '?') return bad_usage("not understood: ", argv[optind - 1]);
        if (option == 'H') {
            print_usage(stdout);
            exit(EXIT_SUCCESS);
        }
        if (option == 'T')
            options->tunes = 1;
        else if (option == 'C')
            options->checks = 1;
        else if (option == 'G')
            options->shares_gpu = 1;
        else
            is_taken = strchr("dewpgcmu", option) ? parse_names(option, options)
                                                  : parse_number(option, options);
        snprintf(words, sizeof words, "--%s ", name_of(option));
        if (!is_taken) return bad_usage(words, optarg);
    }
    if (optind != argc) return bad_usage("unexpected ", argv[optind]);
    complete(options);
    return check_sizes(options);
}

/* ---- results of all ranks -------------------------------------------------------------------- */

static tn_status gather_into(const sharded_place *place, tn_tensor all,
                             const sharded_result *result, sharded_result *results) {
    const size_t ranks = (size_t)tn_comm_size(place->comm),
                 rank = (size_t)tn_comm_rank(place->comm);
    tn_plane_view view;
    tn_lease lease;
    results[rank] = *result;
    SHARDED_TRY(tn_plane_write(all, TN_PLANE_DATA, results, ranks * sizeof *results, NULL, 0,
                               place->stream));
    SHARDED_TRY(tn_lease_begin(all, TN_PLANE_DATA, TN_UPDATE, place->stream, &lease, &view));
    sharded_result *shared = view.data;
    const tn_status status =
        tn_all_gather(place->comm, shared + rank, shared, sizeof *results, place->stream);
    SHARDED_TRY(tn_lease_end(lease));
    SHARDED_TRY(status);
    SHARDED_TRY(tn_plane_read(all, TN_PLANE_DATA, results, ranks * sizeof *results, NULL, 0,
                              place->stream));
    return tn_stream_synchronize(place->device, place->stream);
}

static tn_status gather(const sharded_place *place, const sharded_result *result,
                        sharded_result results[SHARDED_RANKS_MAX]) {
    const int64_t bytes = (int64_t)sizeof *result * tn_comm_size(place->comm);
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    tn_tensor all = {0};
    config.pool = place->pool;
    SHARDED_TRY(tn_scope_create(&config, &scope));
    tn_status status = sharded_make(scope, TN_BYTE, 1, bytes, "results", &all);
    if (status == TN_OK) status = gather_into(place, all, result, results);
    const tn_status closed = tn_scope_close(scope);
    return status == TN_OK ? closed : status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void print_heading(void) {
    printf("side,weights,mix,prefetch,layout,shards,update,rank,ranks,device,engine,layers,hidden,"
           "ffn,tokens,"
           "gradients,step_us,layers_us,update_us,exposed_us,live_bytes,peak_bytes,reserved_bytes,"
           "driver_bytes,wire_bytes,planned_live_bytes,planned_peak_bytes,planned_wire_bytes\n");
}

static void print_row(const sharded_place *place, const sharded_shape *shape, int rank,
                      const sharded_result *r) {
    const int is_host = place->info.driver == TN_DRIVER_HOST;
    char mix[40] = "gate";
    if (shape->sequence) snprintf(mix, sizeof mix, "attention %lld", (long long)shape->sequence);
    printf("tenure,%s,%s,%s,%s,%s,%s,%d,%d,%s,%s,%d,%lld,%lld,%lld,%s,",
           shape->is_fp8 ? "fp8" : "bf16", mix, shape->has_prefetch ? "on" : "off",
           tn_shard_layout_name(shape->layout), shape->shards_from_masters ? "made" : "kept",
           shape->update_ahead ? "ahead" : "end", rank, tn_comm_size(place->comm),
           is_host ? "host" : place->info.name, tn_comm_engine_name(place->comm), shape->layers,
           (long long)shape->hidden, (long long)shape->ffn, (long long)shape->tokens,
           tn_dtype_name(shape->gradient_dtype));
    printf("%.1f,%.1f,%.1f,%.1f,", r->step_us, r->layers_us, r->update_us,
           r->step_us - r->layers_us - r->update_us);
    printf("%llu,%llu,%llu,%llu,%llu,%llu,%llu,%llu\n", (unsigned long long)r->live_bytes,
           (unsigned long long)r->peak_bytes, (unsigned long long)r->reserved_bytes,
           (unsigned long long)r->driver_bytes, (unsigned long long)r->wire_bytes,
           (unsigned long long)r->planned_live_bytes, (unsigned long long)r->planned_peak_bytes,
           (unsigned long long)r->planned_wire_bytes);
    fflush(stdout);
}

/* ---- settings -------------------------------------------------------------------------------- */

static int measure(const sharded_place *place, const sharded_shape *shape, int rounds) {
    sharded_result result = {0}, results[SHARDED_RANKS_MAX] = {{0}};
    const int rank = tn_comm_rank(place->comm), ranks = tn_comm_size(place->comm);
    if (sharded_plan(shape, rank, ranks, &result) != TN_OK) return 0;
    if (sharded_measure(place, shape, rounds, &result) != TN_OK) return 0;
    if (gather(place, &result, results) != TN_OK) return 0;
    for (int i = 0; rank == 0 && i < ranks; i++)
        print_row(place, shape, i, &results[i]);
    return 1;
}

/* Any rank's differences fail its process, and with it the whole. */
static int check(const sharded_place *place, const sharded_shape *shape) {
    const int rank = tn_comm_rank(place->comm);
    uint64_t differences = 0;
    if (sharded_check(place, shape, &differences) != TN_OK) return 0;
    printf("check,%s,rank %d of %d,%llu elements differ from those of one rank\n",
           shape->is_fp8 ? "fp8" : "bf16", rank, tn_comm_size(place->comm),
           (unsigned long long)differences);
    fflush(stdout);
    if (differences == 0) return 1;
    fprintf(stderr, "tenure-bench-sharded: ranks together train another model than one\n");
    exit(EXIT_FAILURE);
}

static int run_setting(const sharded_place *place, const bench_options *options,
                       const sharded_shape *shape) {
    if (options->checks) return check(place, shape);
    return measure(place, shape, (int)options->rounds);
}

static int run(const sharded_place *place, const bench_options *options) {
    sharded_shape shape = {.layers = (int)options->layers,
                           .hidden = options->hidden,
                           .heads = options->heads,
                           .ffn = options->ffn,
                           .tokens = options->tokens,
                           .sequence = options->sequence,
                           .gradient_dtype = options->gradient_dtype,
                           .layout = options->layout,
                           .shards_from_masters = options->shards_from_masters,
                           .update_ahead = options->update_ahead};
    if (tn_comm_rank(place->comm) == 0 && !options->checks) print_heading();
    for (shape.is_fp8 = 1; shape.is_fp8 >= 0; shape.is_fp8--) {
        if (!(shape.is_fp8 ? options->fp8 : options->bf16)) continue;
        if (options->tunes && sharded_tune(place, &shape) != TN_OK) return 0;
        for (shape.has_prefetch = 1; shape.has_prefetch >= 0; shape.has_prefetch--) {
            if (!(shape.has_prefetch ? options->ahead : options->on_call)) continue;
            if (!run_setting(place, options, &shape)) return 0;
        }
    }
    return 1;
}

int main(int argc, char **argv) {
    bench_options options = {.driver = TN_DRIVER_HOST,
                             .fp8 = 1,
                             .bf16 = 1,
                             .ahead = 1,
                             .on_call = 1,
                             .layers = -1,
                             .hidden = -1,
                             .heads = -1,
                             .ffn = -1,
                             .tokens = -1,
                             .sequence = -1,
                             .rounds = -1,
                             .gradient_dtype = TN_BF16};
    sharded_place place;
    const int status = parse(argc, argv, &options);
    if (status != 0) return status;
    int is_done =
        sharded_place_open(&place, options.driver, options.engine, options.shares_gpu) == TN_OK;
    if (is_done && tn_comm_size(place.comm) > SHARDED_RANKS_MAX) {
        fprintf(stderr, "tenure-bench-sharded: more than %d ranks\n", SHARDED_RANKS_MAX);
        is_done = 0;
    } else {
        is_done = is_done && run(&place, &options);
        if (!is_done) fprintf(stderr, "tenure-bench-sharded: %s\n", tn_error_last());
    }
    if (sharded_place_close(&place) != TN_OK) is_done = 0;
    return is_done ? EXIT_SUCCESS : EXIT_FAILURE;
}
