/* Plays an allocation trace through a pool and says what it took.
 *
 *     replay_options options = REPLAY_OPTIONS_INIT;
 *     replay_result result;
 *     options.trace_path = "lora.csv.gz";
 *     if (replay_run(&options, &result) == REPLAY_DONE) ... result.utilization ...
 *     else puts(result.message);
 *
 * One device, one pool, one stream of our own for each stream that the trace names; every event
 * is one tn_alloc or tn_free and nothing else is put on the streams. What the trace leaves alive
 * is freed at the end. With repeat_count above 1 it is played so often, and what is alive is freed
 * after each pass: what later passes cost is what shapes that come back cost. Everything that is
 * opened is closed again before the call returns. Uses the process's simulated device: one replay
 * at a time.
 */
#ifndef TENURE_REPLAY_ENGINE_H
#define TENURE_REPLAY_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#define REPLAY_MESSAGE_BYTES 2048
#define REPLAY_PASSES_MAX    64

typedef enum replay_driver {
    REPLAY_DRIVER_SIM = 0,
    REPLAY_DRIVER_HOST,
    REPLAY_DRIVER_CUDA
} replay_driver;

typedef struct replay_options {
    const char *trace_path; /* "-": standard input */
    replay_driver driver;
    size_t device_memory_bytes; /* 0: what the driver has; on CUDA a limit for the pool */
    size_t page_bytes;          /* 0: what the pool likes */
    uint32_t repeat_count;      /* passes; 0 and 1 are one */
    const char *progress_label; /* NULL: no progress line */
    const char *own_trace_path; /* where the pool's own trace goes; NULL: there is none */
    const char *snapshot_path;  /* of the pool after the last event; NULL: there is none */
} replay_options;
#define REPLAY_OPTIONS_INIT                                                                        \
    { NULL, REPLAY_DRIVER_SIM, 0, 0, 1, NULL, NULL, NULL }

/* These are the exit statuses of `tenure replay`. */
typedef enum replay_status {
    REPLAY_DONE = 0, /* played to its end, no allocation failed, no leak, no race */
    REPLAY_FAILED,   /* played to its end, but not so, and message says what; or `!completed` */
    REPLAY_BAD_INPUT /* the trace or an option is wrong; message says what and where */
} replay_status;

typedef struct replay_pass {
    uint64_t driver_calls;
    double driver_time_us;
    double host_ns_per_event;
} replay_pass;

typedef struct replay_result {
    int completed; /* 1: played to the end; all figures are set */
    uint64_t events;
    uint64_t peak_live_bytes; /* as asked for */
    uint64_t peak_reserved_bytes;
    double utilization;    /* peak live / peak reserved; 1 if nothing was reserved */
    uint64_t driver_calls; /* from making the pool to the last event; no kernels or copies */
    double driver_time_us; /* in the memory calls of those; of the virtual clock if simulated */

    /* Of that: what it takes to make and map the handles of peak_reserved_bytes once each, at the
     * mean price; of backings without handles, to take the segments that there are at the end.
     * Every job pays it; the rest is what the policy costs. */
    double driver_time_first_us;
    double driver_time_after_first_us;
    double host_ns_per_event;
    uint64_t oom_count;          /* allocations that failed; their frees were skipped */
    uint64_t alive_at_end_bytes; /* that the trace itself never freed */
    uint64_t leaked_bytes;       /* held by the pool or the device after everything was freed */
    uint64_t races;              /* found by the simulated driver */
    uint64_t host_waits;         /* calls that waited on the host for work of the device */
    uint64_t page_bytes;
    uint32_t pass_count;
    replay_pass passes[REPLAY_PASSES_MAX];
    const char *driver; /* "sim", "host" or "cuda" */
    char device[128];
    char message[REPLAY_MESSAGE_BYTES]; /* "" if the status is REPLAY_DONE */
} replay_result;

replay_status replay_run(const replay_options *options, replay_result *result);

/* "sim", "host", "cuda"; 1 and the driver if the name is one of them. */
const char *replay_driver_name(replay_driver driver);
int replay_driver_parse(const char *name, replay_driver *out);

#endif
