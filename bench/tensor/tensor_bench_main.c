/* tenure-bench-tensor: what a lease costs the host, beside a mutex that nobody else wants; and a
 * derived plane that is made and dropped again.
 *
 * Exit status: 0, 1 if something failed, 2 for bad usage.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_library.h"
#include "tenure_pool.h"
#include "tensor_bench.h"

enum { EXIT_BAD_USAGE = 2 };

static const char usage_text[] =
    "usage: tenure-bench-tensor [--driver host|sim|cuda] [--pairs N]\n"
    "\n"
    "The host's time in tn_lease_begin + tn_lease_end of a warm plane, by access, on the stream\n"
    "that the plane was made on and on a second one; and in deriving and dropping a plane.\n"
    "\n"
    "  --driver NAME   host (default), sim or cuda\n"
    "  --pairs N       leases in each of 301 batches (2000)\n"
    "  --help          this text\n";

void tensor_bench_require(tn_status status, const char *call) {
    if (status == TN_OK) return;
    fprintf(stderr, "tenure-bench-tensor: %s: %s\n", call, tn_error_last());
    exit(1);
}

static int refuse(const char *what, const char *argument) {
    fprintf(stderr, "tenure-bench-tensor: %s%s\n%s", what, argument, usage_text);
    return EXIT_BAD_USAGE;
}

static void open_bench(tensor_bench *bench, const tn_device_config *config) {
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    TENSOR_TRY(tn_device_create(config, &bench->device));
    TENSOR_TRY(tn_pool_create(bench->device, NULL, &bench->pool));
    TENSOR_TRY(tn_stream_create(bench->device, &bench->home));
    TENSOR_TRY(tn_stream_create(bench->device, &bench->second));
    scope_config.pool = bench->pool;
    scope_config.kind = TN_SCOPE_MODEL;
    TENSOR_TRY(tn_scope_create(&scope_config, &bench->scope));
}

static void close_bench(const tensor_bench *bench) {
    TENSOR_TRY(tn_ledger_check(bench->pool));
    TENSOR_TRY(tn_scope_close(bench->scope));
    TENSOR_TRY(tn_device_synchronize(bench->device));
    TENSOR_TRY(tn_stream_destroy(bench->device, bench->home));
    TENSOR_TRY(tn_stream_destroy(bench->device, bench->second));
    TENSOR_TRY(tn_pool_destroy(bench->pool));
    TENSOR_TRY(tn_device_destroy(bench->device));
}

static int print(const char *title, text_table *table) {
    printf("%s\n\n", title);
    int is_printed = text_table_print(table, stdout);
    printf("\n");
    text_table_destroy(table);
    return is_printed;
}

static int run(tensor_bench *bench, const tn_device_config *config) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    text_table *leases = text_table_create("<>>>");
    text_table *planes = text_table_create("<>>>");
    open_bench(bench, config);
    TENSOR_TRY(tn_device_info_get(bench->device, &info));
    const char *const lease_titles[] = {"access, stream", "ns", "mutex pair ns", "ratio"};
    const char *const plane_titles[] = {"plane", "us", "memory calls", "launches"};
    for (int i = 0; i < 4; i++) {
        text_table_cell(leases, "%s", lease_titles[i]);
        text_table_cell(planes, "%s", plane_titles[i]);
    }
    text_table_rule(leases);
    text_table_rule(planes);
    tensor_bench_leases(bench, leases);
    tensor_bench_derive(bench, planes);
    printf("device: %s\n\n", info.name);
    int is_printed = print("tn_lease_begin + tn_lease_end of a warm plane", leases);
    is_printed &= print("tn_plane_require (derives) + tn_plane_drop, calls each", planes);
    close_bench(bench);
    return is_printed ? 0 : 1;
}

static int open_sim(sim_library *sim) {
    char error[SIM_LIBRARY_ERROR_BYTES];
    if (sim_library_open(sim, error) && sim_library_configure(sim, 0)) return 1;
    fprintf(stderr, "tenure-bench-tensor: %s\n", error);
    return 0;
}

static int run_on(tensor_bench *bench, const char *driver) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    sim_library sim = {0};
    config.driver = strcmp(driver, "host") == 0 ? TN_DRIVER_HOST : TN_DRIVER_CUDA;
    if (strcmp(driver, "sim") == 0) {
        if (!open_sim(&sim)) return 1;
        config.cuda_library = sim.path;
    }
    int status = run(bench, &config);
    sim_library_close(&sim);
    return status;
}

static int is_driver(const char *name) {
    return !strcmp(name, "host") || !strcmp(name, "sim") || !strcmp(name, "cuda");
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"driver", required_argument, NULL, 'd'},
                                            {"pairs", required_argument, NULL, 'p'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    tensor_bench bench = {.batches = 301, .pairs = 2000};
    const char *driver = "host";
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 'd':
            if (!is_driver(optarg)) return refuse("no such driver: ", optarg);
            driver = optarg;
            break;
        case 'p':
            bench.pairs = atoi(optarg);
            if (bench.pairs <= 0) return refuse("not a number of pairs: ", optarg);
            break;
        case 'h': return fputs(usage_text, stdout) < 0;
        default: fputs(usage_text, stderr); return EXIT_BAD_USAGE;
        }
    }
    if (optind < argc) return refuse("unexpected argument: ", argv[optind]);
    return run_on(&bench, driver);
}
