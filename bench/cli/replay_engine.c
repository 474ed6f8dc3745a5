/* The replay: see replay_engine.h.
 *
 * Events are read and checked in batches, so that the clock around the playing of a batch costs
 * nothing per event and reading is not measured. All mistakes of a trace are found by the
 * reader: playing a batch can only fail for want of memory or through the driver.
 */
#include "replay_engine.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "options.h"
#include "output_file.h"
#include "progress.h"
#include "sim_library.h"
#include "tenure_pool.h"
#include "trace_reader.h"

enum { BATCH_EVENTS = 2048 };

typedef struct replay_block {
    void *address; /* NULL: free, or its allocation failed, or it has 0 bytes */
    uint64_t bytes;
    uint32_t stream;
} replay_block;

typedef struct replay {
    const replay_options *options;
    replay_result *result;
    sim_library sim;
    trace_reader *reader;
    tn_device *device;
    tn_device_info info;
    tn_pool *pool;
    tn_driver_stats calls_before;
    tn_driver_stats calls_at_open;
    uint64_t races_before;
    size_t physical_before;
    uint64_t play_ns;
    replay_block *blocks;
    uint32_t block_count;
    uint32_t stream_count;
    size_t batch_count;
    tn_stream streams[TRACE_STREAMS_MAX];
    trace_event batch[BATCH_EVENTS];
    char *own_trace_part; /* what is to be renamed when the trace is whole */
    trace_event *kept;    /* all events, if there is a second pass */
    size_t kept_count;
    size_t kept_capacity;
    size_t kept_at;                       /* the next to be played */
    char first_oom[REPLAY_MESSAGE_BYTES]; /* shown if nothing worse happens */
} replay;

const char *replay_driver_name(replay_driver driver) {
    static const char *const names[] = {"sim", "host", "cuda"};
    return names[driver];
}

int replay_driver_parse(const char *name, replay_driver *out) {
    for (int driver = REPLAY_DRIVER_SIM; driver <= REPLAY_DRIVER_CUDA; driver++) {
        if (strcmp(name, replay_driver_name((replay_driver)driver)) != 0) continue;
        *out = (replay_driver)driver;
        return 1;
    }
    return 0;
}

/* ---- messages ----------------------------------------------------------------------------- */

/* The first message stands: what follows from a failure must not hide it. */
__attribute__((format(printf, 3, 4))) static replay_status fail(replay *self, replay_status status,
                                                                const char *format, ...) {
    va_list arguments;
    if (self->result->message[0]) return status;
    va_start(arguments, format);
    vsnprintf(self->result->message, sizeof(self->result->message), format, arguments);
    va_end(arguments);
    return status;
}

static replay_status fail_call(replay *self, const char *call) {
    return fail(self, REPLAY_FAILED, "%s failed: %s", call, tn_error_last());
}

/* ---- opening ------------------------------------------------------------------------------ */

static replay_status open_reader(replay *self) {
    char error[TRACE_ERROR_BYTES];
    trace_result result = trace_reader_open(self->options->trace_path, &self->reader, error);
    if (result == TRACE_EVENT) return REPLAY_DONE;
    return fail(self, result == TRACE_NO_MEMORY ? REPLAY_FAILED : REPLAY_BAD_INPUT, "%s", error);
}

/* A library that was named wrongly is bad input; a machine without the driver is not. */
static replay_status no_driver_status(void) {
    const char *chosen = getenv("TENURE_CUDA_LIBRARY");
    return chosen && *chosen ? REPLAY_BAD_INPUT : REPLAY_FAILED;
}

/* The simulated driver warns of a bad value and goes on; TENURE_STRICT=1 makes that an end. */
static replay_status check_sim_memory(replay *self) {
    size_t bytes = 0;
    const char *value = getenv("TENURE_SIM_MEMORY");
    if (!tn__options_get()->strict || !value || tn__parse_size(value, &bytes)) return REPLAY_DONE;
    return fail(self, REPLAY_BAD_INPUT,
                "TENURE_SIM_MEMORY=%s is not accepted: it takes a size such as 80GiB", value);
}

static replay_status open_simulation(replay *self) {
    char error[SIM_LIBRARY_ERROR_BYTES];
    if (check_sim_memory(self) != REPLAY_DONE) return REPLAY_BAD_INPUT;
    if (!sim_library_open(&self->sim, error)) return fail(self, no_driver_status(), "%s", error);
    if (sim_library_configure(&self->sim, self->options->device_memory_bytes)) return REPLAY_DONE;
    return fail(self, REPLAY_BAD_INPUT, "the simulated device does not take %zu bytes of memory",
                self->options->device_memory_bytes);
}

static replay_status open_device(replay *self) {
    const replay_options *options = self->options;
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    int is_host = options->driver == REPLAY_DRIVER_HOST;
    config.driver = is_host ? TN_DRIVER_HOST : TN_DRIVER_CUDA;
    if (is_host) config.memory_limit_bytes = options->device_memory_bytes;
    if (options->driver == REPLAY_DRIVER_SIM) {
        replay_status status = open_simulation(self);
        if (status != REPLAY_DONE) return status;
        config.cuda_library = self->sim.path;
    }
    tn_status status = tn_device_create(&config, &self->device);
    if (status == TN_UNSUPPORTED) return fail(self, no_driver_status(), "%s", tn_error_last());
    if (status != TN_OK) return fail_call(self, "tn_device_create");
    if (tn_device_info_get(self->device, &self->info) != TN_OK)
        return fail_call(self, "tn_device_info_get");
    return REPLAY_DONE;
}

/* What the trace's allocations may have at most: the device, or the limit that was asked for. */
static replay_status check_memory(replay *self) {
    size_t asked = self->options->device_memory_bytes;
    size_t there = self->info.memory_bytes;
    if (asked > there)
        return fail(self, REPLAY_BAD_INPUT, "--device-memory asks for %zu bytes, but %s has %zu",
                    asked, self->info.name, there);
    trace_reader_limit(self->reader, asked ? asked : there);
    return REPLAY_DONE;
}

/* Like output_file.h: whole under its name or not at all, but for devices and pipes. The pool
 * writes the file and goes by its name for gzip. */
static replay_status begin_own_trace(replay *self) {
    const char *path = self->options->own_trace_path;
    size_t length = path ? strlen(path) : 0;
    struct stat about;
    const char *written;
    if (!path) return REPLAY_DONE;
    if (stat(path, &about) != 0 || S_ISREG(about.st_mode)) {
        int is_gzip = length > 3 && strcmp(path + length - 3, ".gz") == 0;
        int descriptor = output_part_make(path, is_gzip ? ".gz" : "", &self->own_trace_part);
        if (descriptor < 0)
            return fail(self, REPLAY_BAD_INPUT, "the trace %s can not be written: %s", path,
                        strerror(errno));
        close(descriptor);
    }
    written = self->own_trace_part ? self->own_trace_part : path;
    if (tn_pool_trace_begin(self->pool, written) == TN_OK) return REPLAY_DONE;
    if (self->own_trace_part) (void)unlink(self->own_trace_part);
    free(self->own_trace_part);
    self->own_trace_part = NULL;
    return fail(self, REPLAY_BAD_INPUT, "%s", tn_error_last());
}

static replay_status end_own_trace(replay *self) {
    const char *path = self->options->own_trace_path;
    if (!path) return REPLAY_DONE;
    if (tn_pool_trace_end(self->pool) != TN_OK)
        return fail(self, REPLAY_BAD_INPUT, "%s", tn_error_last());
    if (!self->own_trace_part) return REPLAY_DONE;
    if (rename(self->own_trace_part, path) != 0)
        return fail(self, REPLAY_BAD_INPUT, "the trace %s can not be written: %s", path,
                    strerror(errno));
    free(self->own_trace_part);
    self->own_trace_part = NULL;
    return REPLAY_DONE;
}

static replay_status write_snapshot(replay *self) {
    const char *path = self->options->snapshot_path;
    if (!path || tn_pool_snapshot_write(self->pool, path) == TN_OK) return REPLAY_DONE;
    return fail(self, REPLAY_BAD_INPUT, "%s", tn_error_last());
}

static replay_status open_pool(replay *self) {
    const replay_options *options = self->options;
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.name = "replay";
    config.page_bytes = options->page_bytes;
    if (options->driver == REPLAY_DRIVER_CUDA) config.limit_bytes = options->device_memory_bytes;
    if (self->sim.handle) {
        self->races_before = self->sim.race_count();
        self->physical_before = self->sim.physical_bytes(0);
    }
    if (tn_device_driver_stats(self->device, &self->calls_before) != TN_OK)
        return fail_call(self, "tn_device_driver_stats");
    self->calls_at_open = self->calls_before;
    tn_status status = tn_pool_create(self->device, &config, &self->pool);
    if (status == TN_INVALID_ARGUMENT) return fail(self, REPLAY_BAD_INPUT, "%s", tn_error_last());
    if (status != TN_OK) return fail_call(self, "tn_pool_create");
    self->result->page_bytes = tn_pool_page_bytes(self->pool);
    return begin_own_trace(self);
}

static replay_status open_all(replay *self) {
    replay_status status = open_reader(self);
    if (status == REPLAY_DONE) status = open_device(self);
    if (status == REPLAY_DONE) status = check_memory(self);
    if (status == REPLAY_DONE) status = open_pool(self);
    return status;
}

/* ---- playing ------------------------------------------------------------------------------ */

static int reserve_blocks(replay *self) {
    uint32_t needed = trace_reader_slot_count(self->reader);
    uint32_t count = self->block_count ? self->block_count : BATCH_EVENTS;
    if (needed <= self->block_count) return 1;
    while (count < needed)
        count *= 2; /* the reader has fewer than 2^31 slots */
    replay_block *blocks = realloc(self->blocks, count * sizeof(*blocks));
    if (!blocks) return 0;
    memset(blocks + self->block_count, 0, (count - self->block_count) * sizeof(*blocks));
    self->blocks = blocks;
    self->block_count = count;
    return 1;
}

static replay_status make_streams(replay *self) {
    for (; self->stream_count < trace_reader_stream_count(self->reader); self->stream_count++) {
        if (tn_stream_create(self->device, &self->streams[self->stream_count]) != TN_OK)
            return fail_call(self, "tn_stream_create");
    }
    return REPLAY_DONE;
}

static int keep_batch(replay *self) {
    size_t needed = self->kept_count + self->batch_count;
    if (needed > self->kept_capacity) {
        size_t capacity = 2 * needed;
        trace_event *kept = realloc(self->kept, capacity * sizeof(*kept));
        if (!kept) return 0;
        self->kept = kept;
        self->kept_capacity = capacity;
    }
    memcpy(self->kept + self->kept_count, self->batch, self->batch_count * sizeof(*self->kept));
    self->kept_count = needed;
    return 1;
}

/* Reads until the batch is full or the trace ends; makes what the batch needs to be played. */
static replay_status read_batch(replay *self) {
    trace_result result = TRACE_EVENT;
    self->batch_count = 0;
    while (self->batch_count < BATCH_EVENTS) {
        result = trace_reader_next(self->reader, &self->batch[self->batch_count]);
        if (result != TRACE_EVENT) break;
        self->batch_count++;
    }
    if (result == TRACE_BAD_INPUT || result == TRACE_NO_MEMORY)
        return fail(self, result == TRACE_NO_MEMORY ? REPLAY_FAILED : REPLAY_BAD_INPUT, "%s",
                    trace_reader_error(self->reader));
    if (!reserve_blocks(self)) return fail(self, REPLAY_FAILED, "out of host memory");
    if (self->options->repeat_count > 1 && !keep_batch(self))
        return fail(self, REPLAY_FAILED, "out of host memory");
    return make_streams(self);
}

/* The next batch of a later pass. */
static void recall_batch(replay *self) {
    size_t left = self->kept_count - self->kept_at;
    self->batch_count = left < BATCH_EVENTS ? left : BATCH_EVENTS;
    memcpy(self->batch, self->kept + self->kept_at, self->batch_count * sizeof(*self->batch));
    self->kept_at += self->batch_count;
}

static replay_status play_alloc(replay *self, const trace_event *event) {
    void *address = NULL;
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    options.owner = event->owner ? trace_reader_owner(self->reader, event->owner) : NULL;
    tn_status status =
        tn_alloc(self->pool, event->bytes, self->streams[event->stream], &options, &address);
    self->blocks[event->slot] =
        (replay_block){status == TN_OK ? address : NULL, event->bytes, event->stream};
    if (status == TN_OK) return REPLAY_DONE;
    if (status != TN_OUT_OF_DEVICE_MEMORY) return fail_call(self, "tn_alloc");
    if (self->result->oom_count++ == 0)
        snprintf(self->first_oom, sizeof(self->first_oom), "line %llu: %s",
                 (unsigned long long)event->line, tn_error_last());
    return REPLAY_DONE;
}

static replay_status play_free(replay *self, const trace_event *event) {
    replay_block *block = &self->blocks[event->slot];
    if (tn_free(block->address, self->streams[event->stream]) != TN_OK)
        return fail_call(self, "tn_free");
    block->address = NULL;
    return REPLAY_DONE;
}

static uint64_t clock_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static replay_status play_batch(replay *self) {
    replay_status status = REPLAY_DONE;
    uint64_t begin_ns = clock_now_ns();
    for (size_t i = 0; i < self->batch_count && status == REPLAY_DONE; i++) {
        const trace_event *event = &self->batch[i];
        status = event->op == TRACE_ALLOC ? play_alloc(self, event) : play_free(self, event);
    }
    self->play_ns += clock_now_ns() - begin_ns;
    self->result->events += self->batch_count;
    return status;
}

/* Without a label there is no line: a bar without a stream draws nothing. */
static void begin_progress(const replay *self, progress *bar) {
    *bar = (progress){0};
    if (self->options->progress_label) progress_begin(bar, self->options->progress_label);
}

static replay_status play_first(replay *self, progress *bar) {
    double passes = self->options->repeat_count > 1 ? (double)self->options->repeat_count : 1.0;
    replay_status status = REPLAY_DONE;
    do {
        status = read_batch(self);
        if (status == REPLAY_DONE) status = play_batch(self);
        double done = trace_reader_done(self->reader);
        progress_update(bar, done, done < 0.0 ? 0.0 : passes);
    } while (status == REPLAY_DONE && self->batch_count == BATCH_EVENTS);
    return status;
}

static replay_status play_again(replay *self, progress *bar, uint32_t pass) {
    replay_status status = REPLAY_DONE;
    self->kept_at = 0;
    do {
        recall_batch(self);
        status = play_batch(self);
        progress_update(bar, (double)pass + (double)self->kept_at / (double)(self->kept_count + 1),
                        (double)self->options->repeat_count);
    } while (status == REPLAY_DONE && self->batch_count == BATCH_EVENTS);
    return status;
}

/* ---- figures ------------------------------------------------------------------------------ */

/* What the driver did since the figures were taken last: they are added up over the passes. */
static replay_status take_driver_figures(replay *self, replay_pass *pass) {
    replay_result *result = self->result;
    tn_driver_stats now = TN_DRIVER_STATS_INIT;
    if (tn_device_driver_stats(self->device, &now) != TN_OK)
        return fail_call(self, "tn_device_driver_stats");
    pass->driver_calls = 0;
    for (int call = 0; call < TN_CALL_LAUNCH; call++)
        pass->driver_calls += now.calls[call] - self->calls_before.calls[call];
    pass->driver_time_us = now.time_us - self->calls_before.time_us;
    result->driver_calls += pass->driver_calls;
    result->driver_time_us += pass->driver_time_us;
    result->host_waits +=
        now.calls[TN_CALL_EVENT_SYNCHRONIZE] - self->calls_before.calls[TN_CALL_EVENT_SYNCHRONIZE];
    self->calls_before = now;
    return REPLAY_DONE;
}

static uint64_t calls_made(const replay *self, tn_driver_call call) {
    return self->calls_before.calls[call] - self->calls_at_open.calls[call];
}

/* The part of a call's time that `count` of `all` took. */
static double part_of_time(const replay *self, tn_driver_call call, uint64_t count, uint64_t all) {
    double time_us = self->calls_before.call_time_us[call] - self->calls_at_open.call_time_us[call];
    return count < all ? time_us * (double)count / (double)all : time_us;
}

/* Access is given to several mappings at once: its time is theirs in equal parts. */
static void take_first_time(replay *self) {
    replay_result *result = self->result;
    uint64_t handles = result->peak_reserved_bytes / result->page_bytes;
    uint64_t maps = calls_made(self, TN_CALL_MEM_MAP);
    uint64_t takes = calls_made(self, TN_CALL_MEM_ALLOC);
    uint64_t segments = takes - calls_made(self, TN_CALL_MEM_FREE);
    result->driver_time_first_us =
        part_of_time(self, TN_CALL_MEM_CREATE, handles, calls_made(self, TN_CALL_MEM_CREATE)) +
        part_of_time(self, TN_CALL_MEM_MAP, handles, maps) +
        part_of_time(self, TN_CALL_MEM_SET_ACCESS, handles, maps) +
        part_of_time(self, TN_CALL_MEM_ALLOC, segments, takes);
    result->driver_time_after_first_us = result->driver_time_us - result->driver_time_first_us;
}

static replay_status take_figures(replay *self) {
    replay_result *result = self->result;
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    if (tn_pool_stats_get(self->pool, &stats) != TN_OK) return fail_call(self, "tn_pool_stats_get");
    result->peak_live_bytes = stats.peak_live_bytes;
    result->peak_reserved_bytes = stats.peak_reserved_bytes;
    result->utilization = stats.peak_reserved_bytes
                              ? (double)stats.peak_live_bytes / (double)stats.peak_reserved_bytes
                              : 1.0;
    if (result->events) result->host_ns_per_event = (double)self->play_ns / (double)result->events;
    take_first_time(self);
    return REPLAY_DONE;
}

/* Frees what the trace, or what was played of it, left alive; what the pool then still calls live
 * is leaked. */
static replay_status free_rest(replay *self) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    uint64_t alive_bytes = 0;
    if (!self->pool) return REPLAY_DONE;
    for (uint32_t i = 0; i < self->block_count; i++) {
        replay_block *block = &self->blocks[i];
        if (!block->address) continue;
        if (tn_free(block->address, self->streams[block->stream]) != TN_OK)
            return fail_call(self, "tn_free");
        alive_bytes += block->bytes;
        block->address = NULL;
    }
    if (tn_pool_stats_get(self->pool, &stats) != TN_OK) return fail_call(self, "tn_pool_stats_get");
    self->result->leaked_bytes = stats.live_bytes;
    self->result->alive_at_end_bytes = alive_bytes;
    return REPLAY_DONE;
}

/* What is alive at the end of a pass stays until its figures are taken. */
static replay_status play_pass(replay *self, uint32_t number, progress *bar) {
    replay_pass *pass = &self->result->passes[number];
    uint64_t play_ns = self->play_ns;
    uint64_t events = self->result->events;
    replay_status status = number == 0 ? play_first(self, bar) : play_again(self, bar, number);
    if (status == REPLAY_DONE) status = take_driver_figures(self, pass);
    if (status != REPLAY_DONE) return status;
    events = self->result->events - events;
    if (events) pass->host_ns_per_event = (double)(self->play_ns - play_ns) / (double)events;
    self->result->pass_count = number + 1;
    return REPLAY_DONE;
}

static replay_status play_all(replay *self) {
    progress bar;
    begin_progress(self, &bar);
    replay_status status = play_pass(self, 0, &bar);
    for (uint32_t pass = 1; status == REPLAY_DONE && pass < self->options->repeat_count; pass++) {
        status = free_rest(self);
        if (status == REPLAY_DONE) status = play_pass(self, pass, &bar);
    }
    progress_end(&bar);
    return status;
}

/* ---- closing ------------------------------------------------------------------------------ */

/* Closes what is open, whatever happened before; complains only if nothing else was wrong. */
static replay_status close_all(replay *self) {
    replay_status status = REPLAY_DONE;
    if (self->device && tn_device_synchronize(self->device) != TN_OK)
        status = fail_call(self, "tn_device_synchronize");
    if (tn_pool_destroy(self->pool) != TN_OK) status = fail_call(self, "tn_pool_destroy");
    for (uint32_t i = 0; i < self->stream_count; i++) {
        if (tn_stream_destroy(self->device, self->streams[i]) != TN_OK)
            status = fail_call(self, "tn_stream_destroy");
    }
    if (self->device && tn_device_destroy(self->device) != TN_OK)
        status = fail_call(self, "tn_device_destroy");
    trace_reader_close(self->reader);
    if (self->own_trace_part) (void)unlink(self->own_trace_part);
    free(self->own_trace_part);
    free(self->blocks);
    free(self->kept);
    return status;
}

/* What the simulated device saw, once everything else is closed. */
static void take_simulation_figures(replay *self) {
    replay_result *result = self->result;
    if (!self->sim.handle) return;
    size_t physical_bytes = self->sim.physical_bytes(0);
    result->races = self->sim.race_count() - self->races_before;
    if (result->leaked_bytes == 0 && physical_bytes > self->physical_before)
        result->leaked_bytes = physical_bytes - self->physical_before;
    if (result->races > 0)
        fail(self, REPLAY_FAILED, "race: %s", self->sim.race_text(self->races_before));
}

static replay_status judge(replay *self) {
    const replay_result *result = self->result;
    if (result->leaked_bytes > 0)
        return fail(self, REPLAY_FAILED, "%llu bytes are held after everything was freed",
                    (unsigned long long)result->leaked_bytes);
    if (result->oom_count > 0) return fail(self, REPLAY_FAILED, "%s", self->first_oom);
    return result->races > 0 ? REPLAY_FAILED : REPLAY_DONE;
}

replay_status replay_run(const replay_options *options, replay_result *result) {
    memset(result, 0, sizeof(*result));
    result->driver = replay_driver_name(options->driver);
    replay *self = calloc(1, sizeof(*self));
    if (!self) {
        snprintf(result->message, sizeof(result->message), "out of host memory");
        return REPLAY_FAILED;
    }
    self->options = options;
    self->result = result;
    self->info = (tn_device_info)TN_DEVICE_INFO_INIT;
    self->calls_before = (tn_driver_stats)TN_DRIVER_STATS_INIT;
    self->calls_at_open = self->calls_before;
    replay_status status = open_all(self);
    if (status == REPLAY_DONE) status = play_all(self);
    if (status == REPLAY_DONE) status = end_own_trace(self);
    if (status == REPLAY_DONE) status = write_snapshot(self);
    if (status == REPLAY_DONE) status = take_figures(self);
    replay_status freed = free_rest(self);
    if (status == REPLAY_DONE) status = freed;
    snprintf(result->device, sizeof(result->device), "%s", self->info.name);
    replay_status closed = close_all(self);
    if (status == REPLAY_DONE) {
        result->completed = 1;
        take_simulation_figures(self);
        status = closed == REPLAY_DONE ? judge(self) : closed;
    }
    sim_library_close(&self->sim);
    free(self);
    return status;
}
