/* tenure-bench-dist: what a ring's prefetch hides, and how fast a unit is gathered.
 *
 *     mpirun -n 2 build/release/tenure-bench-dist [--driver host|cuda]            (MPI)
 *     build/release/tenure-bench-dist --ranks 2 --engine tcp                      (TCP)
 *     build/release/tenure-bench-dist --ranks 2 --engine nccl                     (a GPU each)
 *     mpirun -n 2 build/release/tenure-bench-dist --engine nccl                   (likewise)
 *
 *     [--parts steps,gathers,wire,planes] [--buffers NAME,...] [--csv FILE] [--share-gpu] [--small]
 *     [--rounds N]
 *
 * With --ranks the program starts its ranks itself; else each process is one, as the environment
 * of mpirun, Slurm or torchrun says. Rank 0 prints what parts have found (default: all):
 *
 *     steps     A stack of equal layers, one FP8 weight each, cut over the ranks: a step acquires
 *               each unit, multiplies by its weight, and releases it. With prefetch the next unit
 *               is gathered meanwhile; a third run has the products alone, on one unit that stays.
 *               With NCCL the ring's buffer is not registered, a buffer, a window, in turn. CSV:
 *               prefetch,ranks,driver,registered,step_us,exposed_us
 *               (medians; exposed: beyond the products alone)
 *     gathers   all-gathers of a block of the pool.
 *               CSV: gather,ranks,driver,bytes,us,bus_bytes_per_us   (bus: over a link of a ring)
 *     wire      gathers, even and ragged, and reduce-scatters of 1 MiB to 1 GiB, by where their
 *               buffers come from: plain (cudaMalloc's), pool and pool-registered (a pool's pages),
 *               handle-registered and handle-window (a block of one handle), nccl, nccl-registered
 *               and nccl-window (ncclMemAlloc). Contents are checked. --buffers chooses some
 *     planes    the gather of a layer's FP8 weights, rows alone against rows and columns
 *
 * --csv writes what wire and planes have found. Times are of the host's clock, from all ranks being
 * there to the end of all work. On the CUDA driver MPI's ranks share a GPU, as it stages through
 * the host. With --share-gpu NCCL's do, over its sockets, as if on several machines: what is shown
 * then is that it works, and no bandwidth.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dist_bench.h"
#include "dist_wire.h"
#include "option_values.h"

enum { EXIT_BAD_USAGE = 2, RANKS_MAX = 64 };

typedef enum bench_part { STEPS, GATHERS, WIRE, PLANES, PARTS } bench_part;
static const char *const part_names[PARTS] = {"steps", "gathers", "wire", "planes"};

typedef struct bench_options {
    dist_bench_config config;
    dist_wire_options wire;
    long ranks; /* 0: not started here */
    int has_engine, has_driver;
    int parts[PARTS];
    const char *csv;
} bench_options;

/* The time of a run, from all ranks being there to the end of its work. */
static tn_status time_work(dist_bench *bench, dist_bench_work work, size_t argument, double *us) {
    tn_status status = dist_bench_line_up(bench);
    const double start_us = dist_bench_now_us();
    if (status == TN_OK) status = work(bench, argument);
    if (status == TN_OK) status = tn_device_synchronize(bench->device);
    *us = dist_bench_now_us() - start_us;
    return status;
}

/* ---- parts ----------------------------------------------------------------------------------- */

/* What it really is, whatever was asked for. */
static const char *driver_name(const dist_bench *bench) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    if (tn_device_info_get(bench->device, &info) != TN_OK) return "unknown";
    if (info.driver == TN_DRIVER_HOST) return "host";
    return info.simulated ? "simulated" : "cuda";
}

/* A stack's steps with and without prefetch, and its products alone. */
typedef struct step_times {
    double alone[DIST_BENCH_ROUNDS_MAX], on[DIST_BENCH_ROUNDS_MAX], off[DIST_BENCH_ROUNDS_MAX];
} step_times;

/* All of them in turn, one round. */
static tn_status time_steps(dist_bench *bench, step_times *times, long round) {
    tn_status status = TN_OK;
    for (int i = 0; status == TN_OK && i < bench->stack_count; i++) {
        bench->stack = &bench->stacks[i];
        status = time_work(bench, dist_bench_products, 0, &times[i].alone[round]);
        if (status == TN_OK) status = time_work(bench, dist_bench_step, 1, &times[i].on[round]);
        if (status == TN_OK) status = time_work(bench, dist_bench_step, 0, &times[i].off[round]);
    }
    return status;
}

static void print_steps(const dist_bench *bench, step_times *times, int stack, long rounds,
                        const char *driver) {
    const int ranks = tn_comm_size(bench->comm);
    const double alone_us = dist_bench_spread_of(times->alone, rounds).median;
    const double on_us = dist_bench_spread_of(times->on, rounds).median;
    const double off_us = dist_bench_spread_of(times->off, rounds).median;
    const char *registered = dist_bench_registered(&bench->stacks[stack]);
    printf("on,%d,%s,%s,%.1f,%.1f\n", ranks, driver, registered, on_us, on_us - alone_us);
    printf("off,%d,%s,%s,%.1f,%.1f\n", ranks, driver, registered, off_us, off_us - alone_us);
}

static int run_steps(dist_bench *bench, const bench_options *options) {
    const long rounds = options->wire.rounds;
    step_times *times = calloc(DIST_BENCH_STACKS, sizeof *times);
    tn_status status = times ? dist_bench_make_stacks(bench) : TN_OUT_OF_HOST_MEMORY;
    for (long round = -1; status == TN_OK && round < rounds; round++)
        status = time_steps(bench, times, round < 0 ? 0 : round); /* the first warms up */
    if (status == TN_OK && tn_comm_rank(bench->comm) == 0) {
        printf("prefetch,ranks,driver,registered,step_us,exposed_us\n");
        for (int i = 0; i < bench->stack_count; i++)
            print_steps(bench, &times[i], i, rounds, driver_name(bench));
    }
    free(times);
    return status == TN_OK;
}

static int run_gathers(dist_bench *bench, const bench_options *options) {
    const int ranks = tn_comm_size(bench->comm);
    double times[DIST_BENCH_ROUNDS_MAX];
    if (tn_comm_rank(bench->comm) == 0) printf("gather,ranks,driver,bytes,us,bus_bytes_per_us\n");
    for (size_t bytes = 4096; bytes <= dist_bench_gather_bytes(bench); bytes *= 8) {
        for (long i = -1; i < options->wire.rounds; i++)
            if (time_work(bench, dist_bench_gather, bytes, &times[i < 0 ? 0 : i]) != TN_OK)
                return 0;
        const double us = dist_bench_spread_of(times, options->wire.rounds).median;
        if (tn_comm_rank(bench->comm) != 0) continue;
        printf("all_gather,%d,%s,%zu,%.1f,%.1f\n", ranks, driver_name(bench), bytes * (size_t)ranks,
               us, (double)bytes * (ranks - 1) / us);
    }
    return 1;
}

static int run_part(dist_bench *bench, const bench_options *options, bench_part part) {
    switch (part) {
    case STEPS: return run_steps(bench, options);
    case GATHERS: return run_gathers(bench, options);
    case WIRE: return dist_wire_run(bench, &options->wire) == TN_OK;
    default: return dist_planes_run(bench, &options->wire) == TN_OK;
    }
}

static int run_parts(dist_bench *bench, const bench_options *options) {
    for (int part = 0; part < PARTS; part++)
        if (options->parts[part] && !run_part(bench, options, (bench_part)part)) return 0;
    return 1;
}

/* Rank 0 alone writes it. */
static int open_csv(dist_bench *bench, bench_options *options) {
    if (!options->csv || tn_comm_rank(bench->comm) != 0) return 1;
    options->wire.csv = fopen(options->csv, "w");
    if (!options->wire.csv) perror(options->csv);
    dist_wire_csv_head(options->wire.csv);
    return options->wire.csv != NULL;
}

static int close_csv(bench_options *options) {
    if (!options->wire.csv || fclose(options->wire.csv) == 0) return 1;
    perror(options->csv);
    return 0;
}

static int run(bench_options *options) {
    dist_bench bench = {.device = NULL};
    int is_open = dist_bench_open(&bench, &options->config) == TN_OK, is_done = 0;
    if (is_open) is_done = open_csv(&bench, options) && run_parts(&bench, options);
    if (!is_done && *tn_error_last()) fprintf(stderr, "tenure-bench-dist: %s\n", tn_error_last());
    if (!close_csv(options)) is_done = 0;
    if (dist_bench_close(&bench) != TN_OK) is_done = 0;
    return is_done ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* ---- options --------------------------------------------------------------------------------- */

static void print_usage(FILE *out) {
    fprintf(out,
            "usage: [mpirun -n RANKS] tenure-bench-dist [--driver host|cuda] [--engine "
            "mpi|tcp|nccl]\n       [--ranks 1-%d] [--parts steps,gathers,wire,planes] [--buffers "
            "NAME,...] [--csv FILE]\n       [--share-gpu] [--small] [--rounds 1-%d]\n",
            RANKS_MAX, DIST_BENCH_ROUNDS_MAX);
}

static int bad_usage(const char *what, const char *value) {
    fprintf(stderr, "tenure-bench-dist: %s%s\n", what, value);
    print_usage(stderr);
    return EXIT_BAD_USAGE;
}

static int parse_engine(const char *text, bench_options *options) {
    static const char *const names[] = {"mpi", "tcp", "nccl"};
    static const tn_comm_engine engines[] = {TN_COMM_MPI, TN_COMM_TCP, TN_COMM_NCCL};
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, names[i]) != 0) continue;
        options->config.engine = engines[i];
        return options->has_engine = 1;
    }
    return 0;
}

static int parse_parts(const char *text, bench_options *options) {
    size_t named = 0, items = 1;
    for (const char *at = text; *at; at++)
        items += *at == ',';
    for (int part = 0; part < PARTS; part++) {
        options->parts[part] = dist_wire_is_wanted(text, part_names[part]);
        named += (size_t)options->parts[part];
    }
    return named == items;
}

/* What an option's letter says: 1, or 0 if it is not understood. */
static int parse_option(int option, bench_options *options) {
    switch (option) {
    case 'd': return options->has_driver = option_driver(optarg, &options->config.driver);
    case 'e': return parse_engine(optarg, options);
    case 'n': return option_count(optarg, 1, RANKS_MAX, &options->ranks);
    case 'p': return parse_parts(optarg, options);
    case 'b': options->wire.only = optarg; return dist_wire_names_are_known(optarg);
    case 'c': options->csv = optarg; return 1;
    case 'r': return option_count(optarg, 1, DIST_BENCH_ROUNDS_MAX, &options->wire.rounds);
    case 'g': return options->config.shares_gpu = 1;
    case 's': return options->wire.is_small = options->config.is_small = 1;
    case 'h': print_usage(stdout); exit(EXIT_SUCCESS);
    default: return 0;
    }
}

static int parse(int argc, char **argv, bench_options *options) {
    static const struct option names[] = {{"driver", required_argument, NULL, 'd'},
                                          {"engine", required_argument, NULL, 'e'},
                                          {"ranks", required_argument, NULL, 'n'},
                                          {"parts", required_argument, NULL, 'p'},
                                          {"buffers", required_argument, NULL, 'b'},
                                          {"csv", required_argument, NULL, 'c'},
                                          {"rounds", required_argument, NULL, 'r'},
                                          {"share-gpu", no_argument, NULL, 'g'},
                                          {"small", no_argument, NULL, 's'},
                                          {"help", no_argument, NULL, 'h'},
                                          {NULL, 0, NULL, 0}};
    int option;
    opterr = 0;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1)
        if (!parse_option(option, options)) return bad_usage("not understood: ", argv[optind - 1]);
    if (optind != argc) return bad_usage("unexpected ", argv[optind]);
    if (options->ranks && options->config.engine == TN_COMM_MPI && options->has_engine)
        return bad_usage("--ranks: mpirun starts the ranks of ", "--engine mpi");
    if (options->ranks && !options->has_engine) options->config.engine = TN_COMM_TCP;
    if (options->config.engine == TN_COMM_NCCL && !options->has_driver)
        options->config.driver = TN_DRIVER_CUDA;
    return 0;
}

int main(int argc, char **argv) {
    bench_options options = {.config = {.driver = TN_DRIVER_HOST, .engine = TN_COMM_MPI},
                             .wire = {.rounds = 9},
                             .parts = {1, 1, 1, 1}};
    int status = parse(argc, argv, &options);
    if (status != 0) return status;
    if (options.ranks &&
        !dist_bench_start_ranks((int)options.ranks, &options.config.place, &status))
        return status;
    return run(&options);
}
