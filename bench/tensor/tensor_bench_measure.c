/* What is measured: see tensor_bench.h. Medians over many short batches, most of which no other
 * program interrupts; each batch of leases comes after one of mutex pairs, so that both see the
 * machine in the same state. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "tensor_bench.h"

enum { BATCHES_MAX = 301, ROWS = 256, COLS = 256, DERIVATIONS = 2000 };

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static int compare_doubles(const void *a, const void *b) {
    double left = *(const double *)a;
    double right = *(const double *)b;
    return left < right ? -1 : left > right;
}

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return values[count / 2];
}

static tn_tensor make_weight(const tensor_bench *bench) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor weight;
    tn_lease lease;
    tn_plane_view view;
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = ROWS;
    config.shape[1] = COLS;
    config.name = "weight";
    TENSOR_TRY(tn_tensor_create(bench->scope, &config, &weight));
    TENSOR_TRY(tn_lease_begin(weight, TN_PLANE_ROW, TN_WRITE, bench->home, &lease, &view));
    TENSOR_TRY(tn_lease_end(lease));
    return weight;
}

/* ---- leases ---------------------------------------------------------------------------------- */

static double time_mutex(int pairs) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    double start = now_ns();
    for (int i = 0; i < pairs; i++) {
        pthread_mutex_lock(&mutex);
        pthread_mutex_unlock(&mutex);
    }
    return (now_ns() - start) / pairs;
}

static double time_leases(tn_tensor tensor, tn_access access, tn_stream stream, int pairs) {
    double start = now_ns();
    for (int i = 0; i < pairs; i++) {
        tn_lease lease;
        tn_plane_view view;
        TENSOR_TRY(tn_lease_begin(tensor, TN_PLANE_ROW, access, stream, &lease, &view));
        TENSOR_TRY(tn_lease_end(lease));
    }
    return (now_ns() - start) / pairs;
}

static void measure_access(tensor_bench *bench, text_table *table, tn_access access,
                           tn_stream stream) {
    static const char *const names[] = {"READ", "WRITE", "UPDATE"};
    double mutex_ns[BATCHES_MAX], lease_ns[BATCHES_MAX];
    tn_tensor weight = make_weight(bench);
    (void)time_leases(weight, access, stream, bench->pairs);
    for (int batch = 0; batch < bench->batches; batch++) {
        mutex_ns[batch] = time_mutex(bench->pairs);
        lease_ns[batch] = time_leases(weight, access, stream, bench->pairs);
    }
    bench->mutex_ns = median(mutex_ns, bench->batches);
    double ns = median(lease_ns, bench->batches);
    text_table_cell(table, "%s, %s", names[access], stream == bench->home ? "home" : "second");
    text_table_cell(table, "%.1f", ns);
    text_table_cell(table, "%.1f", bench->mutex_ns);
    text_table_cell(table, "%.2f", ns / bench->mutex_ns);
    TENSOR_TRY(tn_tensor_destroy(weight, stream));
}

static void *wait_for_end(void *barrier) {
    pthread_barrier_wait(barrier);
    return NULL;
}

/* The C library locks nothing while a program has one thread, which none that uses a GPU has. */
void tensor_bench_leases(tensor_bench *bench, text_table *table) {
    pthread_barrier_t barrier;
    pthread_t thread;
    if (bench->batches > BATCHES_MAX) bench->batches = BATCHES_MAX;
    pthread_barrier_init(&barrier, NULL, 2);
    if (pthread_create(&thread, NULL, wait_for_end, &barrier)) abort();
    for (int access = TN_READ; access <= TN_UPDATE; access++) {
        measure_access(bench, table, (tn_access)access, bench->home);
        measure_access(bench, table, (tn_access)access, bench->second);
    }
    pthread_barrier_wait(&barrier);
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&barrier);
}

/* ---- derive and drop ------------------------------------------------------------------------- */

static uint64_t memory_calls(const tn_driver_stats *stats) {
    uint64_t calls = 0;
    for (int call = TN_CALL_MEM_CREATE; call <= TN_CALL_MEM_FREE; call++)
        calls += stats->calls[call];
    return calls;
}

static void derive_and_drop(const tensor_bench *bench, tn_tensor weight, int count) {
    for (int i = 0; i < count; i++) {
        TENSOR_TRY(tn_plane_require(weight, TN_PLANE_COL, bench->home));
        TENSOR_TRY(tn_plane_drop(weight, TN_PLANE_COL, bench->home));
    }
}

void tensor_bench_derive(const tensor_bench *bench, text_table *table) {
    tn_driver_stats before = TN_DRIVER_STATS_INIT, after = TN_DRIVER_STATS_INIT;
    tn_tensor weight = make_weight(bench);
    derive_and_drop(bench, weight, 10);
    TENSOR_TRY(tn_stream_synchronize(bench->device, bench->home));
    TENSOR_TRY(tn_device_driver_stats(bench->device, &before));
    double start = now_ns();
    derive_and_drop(bench, weight, DERIVATIONS);
    double ns = (now_ns() - start) / DERIVATIONS;
    TENSOR_TRY(tn_device_driver_stats(bench->device, &after));
    text_table_cell(table, "2D, %d x %d", (int)ROWS, (int)COLS);
    text_table_cell(table, "%.2f", ns / 1000.0);
    text_table_cell(table, "%.3f",
                    (double)(memory_calls(&after) - memory_calls(&before)) / DERIVATIONS);
    text_table_cell(table, "%.3f",
                    (double)(after.calls[TN_CALL_LAUNCH] - before.calls[TN_CALL_LAUNCH]) /
                        DERIVATIONS);
    TENSOR_TRY(tn_tensor_destroy(weight, bench->home));
}
