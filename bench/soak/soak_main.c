/* tenure-soak: options, threads, and what must hold at the end: see soak.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "soak.h"

typedef struct settings {
    int seconds;
    int threads;
    int percent; /* of the memory that is free at the start */
    unsigned long long seed;
    tn_driver_kind driver;
} settings;

static void usage(FILE *to) {
    fprintf(to, "usage: tenure-soak [--seconds N] [--threads N] [--percent N] [--seed N] "
                "[--driver cuda|host]\n"
                "\n"
                "Random training-like load; every byte is checked on the device. Exit status 1 if\n"
                "a word was wrong, the books did not balance, or more than the limit was held.\n");
}

static int refuse(const char *what, const char *argument) {
    fprintf(stderr, "tenure-soak: %s%s\n", what, argument);
    usage(stderr);
    return 2;
}

void soak_require(tn_status status, const char *call) {
    if (status == TN_OK) return;
    fprintf(stderr, "tenure-soak: %s: %s: %s\n", call, tn_status_name(status), tn_error_last());
    exit(1);
}

double soak_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int read_number(const char *text, int most, int *out) {
    char *end = NULL;
    long value = strtol(text, &end, 10);
    if (!*text || *end || value < 1 || value > most) return 0;
    *out = (int)value;
    return 1;
}

/* Exit status 2 with words, or -1 to go on. */
static int read_settings(int argc, char **argv, settings *out) {
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        const char *value = i + 1 < argc ? argv[++i] : NULL;
        int is_good = 0;
        if (strcmp(name, "--help") == 0) {
            usage(stdout);
            return 0;
        }
        if (!value) return refuse("a value is missing after ", name);
        if (strcmp(name, "--seconds") == 0) is_good = read_number(value, 86400, &out->seconds);
        if (strcmp(name, "--threads") == 0) {
            is_good = read_number(value, SOAK_THREADS_MAX, &out->threads);
        }
        if (strcmp(name, "--percent") == 0) is_good = read_number(value, 99, &out->percent);
        if (strcmp(name, "--seed") == 0) {
            char *end = NULL;
            out->seed = strtoull(value, &end, 10);
            is_good = *value && !*end;
        }
        if (strcmp(name, "--driver") == 0) {
            is_good = strcmp(value, "cuda") == 0 || strcmp(value, "host") == 0;
            out->driver = value[0] == 'c' ? TN_DRIVER_CUDA : TN_DRIVER_HOST;
        }
        if (!is_good) return refuse("not accepted: ", name);
    }
    return -1;
}

static void open_soak(soak *shared, const settings *chosen) {
    tn_device_config device_config = TN_DEVICE_CONFIG_INIT;
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_device_info info = TN_DEVICE_INFO_INIT;
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    device_config.driver = chosen->driver;
    SOAK_TRY(tn_device_create(&device_config, &shared->device));
    SOAK_TRY(tn_device_info_get(shared->device, &info));
    shared->info = info;
    SOAK_TRY(tn__device_driver(shared->device)
                 ->memory_info(tn__device_state(shared->device), &free_bytes, &total_bytes));
    shared->limit_bytes = total_bytes / 100 * (size_t)chosen->percent;
    if (shared->limit_bytes > free_bytes) shared->limit_bytes = free_bytes;
    shared->limit_bytes -= shared->limit_bytes % info.granularity_bytes;
    pool_config.name = "soak";
    pool_config.limit_bytes = shared->limit_bytes;
    SOAK_TRY(tn_pool_create(shared->device, &pool_config, &shared->pool));
    shared->seed = chosen->seed;
    shared->thread_count = chosen->threads;
    pthread_mutex_init(&shared->mailbox_mutex, NULL);
    soak_work_open(shared);
}

static void run_threads(soak *shared, soak_thread *threads, const settings *chosen) {
    shared->deadline_s = soak_now() + chosen->seconds;
    for (int i = 0; i < shared->thread_count; i++) {
        threads[i].shared = shared;
        threads[i].random = shared->seed * 1000003 + (uint64_t)i;
        if (pthread_create(&threads[i].thread, NULL, soak_thread_run, &threads[i]) != 0) {
            soak_require(TN_OUT_OF_HOST_MEMORY, "pthread_create");
        }
    }
    for (int i = 0; i < shared->thread_count; i++)
        pthread_join(threads[i].thread, NULL);
    /* Threads put blocks into the mailbox until their end: the last one's are still there. */
    for (int i = 0; i < shared->mailbox_count; i++) {
        soak_verify(shared, &shared->mailbox[i], shared->mailbox[i].stream);
        SOAK_TRY(tn_free(shared->mailbox[i].address, shared->mailbox[i].stream));
    }
    SOAK_TRY(tn_device_synchronize(shared->device));
}

static uint64_t read_errors(soak *shared) {
    uint64_t errors = 0;
    if (shared->info.simulated) return 0; /* its memory holds nothing; it counts races itself */
    SOAK_TRY(tn_copy(shared->device, &errors, shared->errors, sizeof errors, NULL));
    SOAK_TRY(tn_device_synchronize(shared->device));
    return errors;
}

static int report(soak *shared, const soak_thread *threads, const settings *chosen) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    uint64_t errors = read_errors(shared);
    uint64_t allocs = 0;
    uint64_t shortages = 0;
    uint64_t handed_over = 0;
    size_t parts;
    for (int i = 0; i < shared->thread_count; i++) {
        allocs += threads[i].allocs;
        shortages += threads[i].shortages;
        handed_over += threads[i].handed_over;
    }
    SOAK_TRY(tn_pool_check(shared->pool));
    SOAK_TRY(tn_pool_stats_get(shared->pool, &stats));
    parts = stats.live_bytes + stats.cached_bytes + stats.pending_bytes + stats.partial_bytes +
            stats.driver_held_bytes;
    printf("%s, %d threads, %d s, seed %llu\n", shared->info.name, chosen->threads, chosen->seconds,
           chosen->seed);
    printf("blocks %llu, refused %llu, freed by another thread %llu, device-side waits %llu\n",
           (unsigned long long)allocs, (unsigned long long)shortages,
           (unsigned long long)handed_over, (unsigned long long)stats.stream_waits);
    printf("limit %zu, peak reserved %zu, peak live %zu (%.2f %% of the limit)\n",
           shared->limit_bytes, stats.peak_reserved_bytes, stats.peak_live_bytes,
           100.0 * (double)stats.peak_live_bytes / (double)shared->limit_bytes);
    printf("wrong words %llu, live blocks at the end %llu, books off by %zu\n",
           (unsigned long long)errors, (unsigned long long)stats.live_blocks - 1,
           parts > stats.reserved_bytes ? parts - stats.reserved_bytes
                                        : stats.reserved_bytes - parts);
    return errors == 0 && stats.live_blocks == 1 && parts == stats.reserved_bytes &&
           stats.peak_reserved_bytes <= shared->limit_bytes;
}

int main(int argc, char **argv) {
    static soak shared;
    static soak_thread threads[SOAK_THREADS_MAX];
    settings chosen = {.seconds = 10, .threads = 8, .percent = 95, .seed = 1};
    int status = read_settings(argc, argv, &chosen);
    int is_good;
    if (status >= 0) return status;
    open_soak(&shared, &chosen);
    run_threads(&shared, threads, &chosen);
    is_good = report(&shared, threads, &chosen);
    soak_work_close(&shared);
    for (int i = 0; i < shared.thread_count; i++) {
        for (int j = 0; j < SOAK_STREAMS; j++)
            SOAK_TRY(tn_stream_destroy(shared.device, threads[i].streams[j]));
    }
    SOAK_TRY(tn_pool_destroy(shared.pool));
    SOAK_TRY(tn_device_destroy(shared.device));
    puts(is_good ? "ok" : "NOT ok");
    return is_good ? 0 : 1;
}
