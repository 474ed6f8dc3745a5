/* The trace and the report of `tenure run`.
 *
 * Both are the program's calls, as it makes them: a block is freed there when the program frees it,
 * whenever its memory is idle. The process that `tenure run` started writes to the names given; its
 * children, which inherit them, put their own number into the name. A trace begins with the first
 * block, and the report is written when exit begins: a process that makes no such call writes
 * neither.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "dropin.h"
#include "host_alloc.h"
#include "options.h"
#include "trace_writer.h"

enum { STREAMS_MAX = 1024 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static tn__trace_writer *trace;
static char *report_path;
static size_t live_bytes, peak_bytes;
static uint64_t live_blocks;
static void *streams[STREAMS_MAX]; /* by number in the trace; 0 is the default stream */
static int64_t stream_count = 1;

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

/* ---- names ----------------------------------------------------------------------------------- */

/* A device, or a pipe. */
static int is_no_file(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && !S_ISREG(status.st_mode);
}

/* FILE.gz becomes FILE.PID.gz, and FILE.csv FILE.PID.csv, in all processes but the first. */
static char *path_for_process(const char *path) {
    const char *first = getenv("TENURE_RUN_PROCESS");
    const char *name = strrchr(path, '/');
    const char *end = path + strlen(path);
    size_t bytes = strlen(path) + 32;
    char *made;
    if (!first || strtol(first, NULL, 10) == (long)getpid() || is_no_file(path)) {
        return tn__host_strdup(path);
    }
    made = tn__host_alloc(bytes, 1);
    if (!made) return NULL;
    name = name ? name + 1 : path;
    if (end - name > 3 && strcmp(end - 3, ".gz") == 0) end -= 3;
    for (const char *at = end; at > name; at--) {
        if (at[-1] != '.') continue;
        if (at - 1 > name) end = at - 1;
        break;
    }
    snprintf(made, bytes, "%.*s.%ld%s", (int)(end - path), path, (long)getpid(), end);
    return made;
}

void tn__dropin_record_open(void) {
    const char *trace_name = tn__options_get()->run_trace;
    const char *report_name = tn__options_get()->run_report;
    char *trace_path = *trace_name ? path_for_process(trace_name) : NULL;
    if (*report_name) report_path = path_for_process(report_name);
    if (trace_path && tn__trace_open(trace_path, now_us(), &trace) != TN_OK) {
        fprintf(stderr, "tenure: %s\n", tn_error_last());
    }
    tn__host_free(trace_path);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* The number of a stream in the trace; of too many the last is shared. */
static int64_t number_of(void *stream) {
    if (!stream || stream == TN__CU_STREAM_LEGACY) return 0;
    for (int64_t i = 1; i < stream_count; i++) {
        if (streams[i] == stream) return i;
    }
    if (stream_count == STREAMS_MAX) return STREAMS_MAX - 1;
    streams[stream_count] = stream;
    return stream_count++;
}

void tn__dropin_record_alloc(tn__dropin_block *block, void *stream) {
    pthread_mutex_lock(&mutex);
    live_bytes += block->bytes;
    live_blocks++;
    if (live_bytes > peak_bytes) peak_bytes = live_bytes;
    if (trace) {
        const tn__trace_block traced = {block->bytes, block->address, NULL};
        int64_t number = number_of(stream);
        block->trace_id = tn__trace_alloc(trace, &traced, &number, now_us());
    }
    pthread_mutex_unlock(&mutex);
}

void tn__dropin_record_free(const tn__dropin_block *block) {
    pthread_mutex_lock(&mutex);
    live_bytes -= block->bytes;
    live_blocks--;
    if (trace && block->trace_id) tn__trace_free(trace, block->trace_id, now_us());
    pthread_mutex_unlock(&mutex);
}

void tn__dropin_record_refusal(size_t bytes) {
    const tn__trace_block traced = {bytes, 0, NULL};
    tn__dropin_count(&tn__dropin.counts.refused);
    pthread_mutex_lock(&mutex);
    if (trace) tn__trace_shortage(trace, &traced, now_us());
    pthread_mutex_unlock(&mutex);
}

void tn__dropin_record_lock(void) { pthread_mutex_lock(&mutex); }
void tn__dropin_record_unlock(void) { pthread_mutex_unlock(&mutex); }

/* ---- the report ------------------------------------------------------------------------------ */

static void write_pool(FILE *file, const char *name, tn_pool *pool) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    if (!pool || tn_pool_stats_get(pool, &stats) != TN_OK) return;
    fprintf(file, "%s.reserved_bytes: %zu\n", name, stats.reserved_bytes);
    fprintf(file, "%s.peak_reserved_bytes: %zu\n", name, stats.peak_reserved_bytes);
}

static void write_device(FILE *file, const tn__dropin_device *device) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    char name[32];
    snprintf(name, sizeof name, "device%d.pool", device->ordinal);
    write_pool(file, name, device->pool);
    snprintf(name, sizeof name, "device%d.stream_pool", device->ordinal);
    write_pool(file, name, device->stream_pool);
    fprintf(file, "device%d.whole_bytes: %zu\n", device->ordinal,
            atomic_load(&device->whole_bytes));
    if (tn_device_driver_stats(device->device, &stats) != TN_OK) return;
    for (int call = 0; call < TN_CALL_COUNT; call++) {
        if (!stats.calls[call]) continue;
        fprintf(file, "device%d.driver_calls.%s: %" PRIu64 "\n", device->ordinal,
                tn_driver_call_name((tn_driver_call)call), stats.calls[call]);
    }
}

static void write_report(FILE *file) {
    fprintf(file, "tenure: %s\nprocess: %ld\n", tn_version(), (long)getpid());
    fprintf(file, "program: %s\n", program_invocation_name);
    fprintf(file, "pool: %s\n", tn__run_pool_choices[tn__options_get()->run_pool]);
#define WRITE_COUNT(name, meaning)                                                                 \
    fprintf(file, #name ": %" PRIu64 "\n", atomic_load(&tn__dropin.counts.name));
    TN__DROPIN_COUNTS(WRITE_COUNT)
    fprintf(file,
            "peak_live_bytes: %zu\nlive_bytes_at_exit: %zu\nlive_blocks_at_exit: %" PRIu64 "\n",
            peak_bytes, live_bytes, live_blocks);
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++) {
        tn__dropin_device *device = tn__dropin_device_pin(i);
        if (!device) continue;
        write_device(file, device);
        tn__dropin_device_unpin(device);
    }
}

static int write_report_to(const char *path) {
    FILE *file = fopen(path, "we");
    int is_good;
    if (file) write_report(file);
    is_good = file && !ferror(file);
    if (file && fclose(file) != 0) is_good = 0;
    return is_good;
}

/* Beside its name first: whoever looks there finds the whole report or none. What is no file, such
 * as /dev/stderr, is written to. */
static void save_report(void) {
    size_t bytes = strlen(report_path) + 8;
    char *beside = tn__host_alloc(bytes, 1);
    int is_good;
    if (!beside) return;
    snprintf(beside, bytes, "%s.part", report_path);
    if (is_no_file(report_path)) {
        is_good = write_report_to(report_path);
    } else {
        is_good = write_report_to(beside) && rename(beside, report_path) == 0;
    }
    if (!is_good) {
        fprintf(stderr, "tenure: the report %s can not be written: %s\n", report_path,
                strerror(errno));
        if (!is_no_file(report_path)) (void)unlink(beside);
    }
    tn__host_free(beside);
}

void tn__dropin_record_close(void) {
    pthread_mutex_lock(&mutex);
    if (trace && tn__trace_close(trace) != TN_OK) {
        fprintf(stderr, "tenure: %s\n", tn_error_last());
    }
    trace = NULL;
    if (report_path) save_report();
    tn__host_free(report_path);
    report_path = NULL;
    pthread_mutex_unlock(&mutex);
}
