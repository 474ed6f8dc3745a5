/* tenure-bench-dist: what a ring's prefetch hides, and how fast a unit is gathered.
 *
 *     mpirun -n 2 build/release/tenure-bench-dist [--driver host|cuda] [--small] [--rounds N]
 *
 * A stack of equal layers, one FP8 weight each, sharded over the ranks: a step acquires each unit,
 * multiplies by its weight, and releases it. With prefetch the next unit is gathered meanwhile; a
 * third run has the products alone, on one unit that stays. Rank 0 prints CSV:
 *
 *     prefetch,ranks,driver,step_us,exposed_us          medians; exposed: beyond the products alone
 *     gather,ranks,driver,bytes,us,bus_bytes_per_us     bus: what goes over one link of a ring
 *
 * Times are of the host's clock, from a barrier to the end of all work. One process a rank;
 * on the CUDA driver the ranks may share a GPU, as MPI's engine stages through the host.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "dist_bench.h"
#include "option_values.h"

enum { EXIT_BAD_USAGE = 2, ROUNDS_MAX = 99 };

typedef struct bench_options {
    tn_driver_kind driver;
    long rounds;
    int is_small;
} bench_options;

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int by_value(const void *left, const void *right) {
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* The median time of `rounds` runs, one more before them to warm up; negative if one fails. */
static double measure(dist_bench *bench, long rounds, dist_bench_work work, size_t argument) {
    double times[ROUNDS_MAX];
    for (long i = -1; i < rounds; i++) {
        if (tn_barrier(bench->comm, bench->stream) != TN_OK) return -1.0;
        if (tn_stream_synchronize(bench->device, bench->stream) != TN_OK) return -1.0;
        const double start_us = now_us();
        if (work(bench, argument) != TN_OK) return -1.0;
        if (tn_device_synchronize(bench->device) != TN_OK) return -1.0;
        if (i >= 0) times[i] = now_us() - start_us;
    }
    qsort(times, (size_t)rounds, sizeof *times, by_value);
    return times[rounds / 2];
}

/* ---- the two tables -------------------------------------------------------------------------- */

static int run_steps(dist_bench *bench, const bench_options *options, const char *driver) {
    const double alone_us = measure(bench, options->rounds, dist_bench_products, 0);
    const double with_us = measure(bench, options->rounds, dist_bench_step, 1);
    const double without_us = measure(bench, options->rounds, dist_bench_step, 0);
    if (alone_us < 0 || with_us < 0 || without_us < 0) return 0;
    if (tn_comm_rank(bench->comm) != 0) return 1;
    printf("prefetch,ranks,driver,step_us,exposed_us\n");
    printf("on,%d,%s,%.1f,%.1f\n", tn_comm_size(bench->comm), driver, with_us, with_us - alone_us);
    printf("off,%d,%s,%.1f,%.1f\n", tn_comm_size(bench->comm), driver, without_us,
           without_us - alone_us);
    return 1;
}

static int run_gathers(dist_bench *bench, const bench_options *options, const char *driver) {
    const int ranks = tn_comm_size(bench->comm);
    if (tn_comm_rank(bench->comm) == 0) printf("gather,ranks,driver,bytes,us,bus_bytes_per_us\n");
    for (size_t bytes = 4096; bytes <= dist_bench_gather_bytes(bench); bytes *= 8) {
        const double us = measure(bench, options->rounds, dist_bench_gather, bytes);
        if (us < 0) return 0;
        if (tn_comm_rank(bench->comm) != 0) continue;
        printf("all_gather,%d,%s,%zu,%.1f,%.1f\n", ranks, driver, bytes * (size_t)ranks, us,
               (double)bytes * (ranks - 1) / us);
    }
    return 1;
}

/* ---- options --------------------------------------------------------------------------------- */

static int bad_usage(const char *what, const char *value) {
    fprintf(
        stderr,
        "tenure-bench-dist: %s%s\nusage: mpirun -n RANKS tenure-bench-dist [--driver host|cuda] "
        "[--small] [--rounds 1-%d]\n",
        what, value, ROUNDS_MAX);
    return EXIT_BAD_USAGE;
}

static int parse(int argc, char **argv, bench_options *options) {
    static const struct option names[] = {{"driver", required_argument, NULL, 'd'},
                                          {"rounds", required_argument, NULL, 'r'},
                                          {"small", no_argument, NULL, 's'},
                                          {NULL, 0, NULL, 0}};
    int option;
    opterr = 0;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 'd':
            if (!option_driver(optarg, &options->driver)) return bad_usage("--driver ", optarg);
            break;
        case 'r':
            if (!option_count(optarg, 1, ROUNDS_MAX, &options->rounds))
                return bad_usage("--rounds ", optarg);
            break;
        case 's': options->is_small = 1; break;
        default: return bad_usage("not understood: ", argv[optind - 1]);
        }
    }
    return optind == argc ? 0 : bad_usage("unexpected ", argv[optind]);
}

int main(int argc, char **argv) {
    bench_options options = {TN_DRIVER_HOST, 9, 0};
    dist_bench bench = {.device = NULL};
    int status = parse(argc, argv, &options);
    if (status != 0) return status;
    const char *driver = options.driver == TN_DRIVER_HOST ? "host" : "cuda";
    int is_done = dist_bench_open(&bench, options.driver, options.is_small) == TN_OK &&
                  run_steps(&bench, &options, driver) && run_gathers(&bench, &options, driver);
    if (!is_done) fprintf(stderr, "tenure-bench-dist: %s\n", tn_error_last());
    if (dist_bench_close(&bench) != TN_OK) is_done = 0;
    return is_done ? EXIT_SUCCESS : EXIT_FAILURE;
}
