/* tenure-bench-peers: what an allocation costs the host, Tenure beside other allocators.
 *
 * All are measured in one process on the same device and streams, one after the other; lines of
 * CSV, `what,allocator,size,threads,figure,unit`, go to standard output.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "peer_bench.h"

static void usage(FILE *to) {
    fprintf(to,
            "usage: tenure-bench-peers [--pairs N] [--driver cuda|host] [PLUGIN.so...]\n"
            "\n"
            "Host cost of warm allocations: by size, by threads, from thread to thread, between\n"
            "two streams. bench/peers/build_plugins.sh builds the plug-ins.\n");
}

static int refuse(const char *what, const char *argument) {
    fprintf(stderr, "tenure-bench-peers: %s%s\n", what, argument);
    usage(stderr);
    return 2;
}

/* Takes the allocators of a plug-in; 0 if it can not be loaded. */
static int load_plugin(peer_bench *bench, const char *path) {
    peer_allocators_function function;
    const peer_allocator *all;
    int count = 0;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, "peer_allocators") : NULL;
    if (!symbol) {
        fprintf(stderr, "tenure-bench-peers: %s\n", dlerror());
        return 0;
    }
    memcpy(&function, &symbol, sizeof function);
    all = function(&count);
    for (int i = 0; i < count && bench->count < PEER_ALLOCATORS; i++)
        bench->allocators[bench->count++] = &all[i];
    return 1;
}

static void measure(const peer_bench *bench, const peer_allocator *allocator) {
    allocator->open();
    peer_measure_sizes(bench, allocator);
    peer_measure_threads(bench, allocator);
    peer_measure_handover(bench, allocator);
    peer_measure_streams(bench, allocator);
    allocator->trim();
    allocator->close();
}

static int run(peer_bench *bench, tn_driver_kind driver, char **plugins, int plugin_count) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device_info info = TN_DEVICE_INFO_INIT;
    config.driver = driver;
    PEER_TRY(tn_device_create(&config, &bench->device));
    PEER_TRY(tn_device_info_get(bench->device, &info));
    for (int i = 0; i < PEER_STREAMS; i++)
        PEER_TRY(tn_stream_create(bench->device, &bench->streams[i]));
    bench->allocators[bench->count++] = peer_tenure(bench->device);
    for (int i = 0; i < plugin_count; i++) {
        if (!load_plugin(bench, plugins[i])) return 1;
    }
    printf("# %s, %d batches of %d pairs, medians\nwhat,allocator,size,threads,figure,unit\n",
           info.name, bench->batches, bench->pairs);
    for (int i = 0; i < bench->count; i++)
        measure(bench, bench->allocators[i]);
    for (int i = 0; i < PEER_STREAMS; i++)
        PEER_TRY(tn_stream_destroy(bench->device, bench->streams[i]));
    PEER_TRY(tn_device_destroy(bench->device));
    return 0;
}

int main(int argc, char **argv) {
    peer_bench bench = {.largest_bytes = (size_t)1 << 30, .batches = 5, .pairs = 50000};
    tn_driver_kind driver = TN_DRIVER_AUTO;
    int i = 1;
    for (; i < argc && strncmp(argv[i], "--", 2) == 0; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            usage(stdout);
            return 0;
        }
        if (i + 1 == argc) return refuse("a value is missing after ", argv[i]);
        if (strcmp(argv[i], "--pairs") == 0) {
            bench.pairs = atoi(argv[++i]);
            if (bench.pairs < 1) return refuse("--pairs takes a number from 1, not ", argv[i]);
        } else if (strcmp(argv[i], "--driver") == 0) {
            const char *name = argv[++i];
            if (strcmp(name, "cuda") != 0 && strcmp(name, "host") != 0) {
                return refuse("--driver takes cuda or host, not ", name);
            }
            driver = name[0] == 'c' ? TN_DRIVER_CUDA : TN_DRIVER_HOST;
        } else {
            return refuse("there is no option ", argv[i]);
        }
    }
    return run(&bench, driver, argv + i, argc - i);
}
