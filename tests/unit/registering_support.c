/* An engine that registers memory: see registering_support.h. */
#include "registering_support.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"

registering_script registering;

enum { STATES_MAX = 8 };

/* What is known of a communicator of the engine below. */
typedef struct known_state {
    tn__comm_state *state; /* NULL: the place is free */
    const tn__driver *driver;
    tn__driver_device *on;
    int registered, windows;
    int is_aborted;
} known_state;

static const tn__comm_engine *below;
static tn__comm_engine engine;
static int is_broken;
static known_state known[STATES_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void write_down(const char *format, ...) {
    const size_t used = strlen(registering.log);
    va_list list;
    va_start(list, format);
    vsnprintf(registering.log + used, sizeof registering.log - used, format, list);
    va_end(list);
}

static known_state *find(tn__comm_state *state) {
    for (int i = 0; i < STATES_MAX; i++)
        if (known[i].state == state) return &known[i];
    abort();
}

static void remember(tn__comm_state *state, const tn__driver *driver, tn__driver_device *on) {
    known_state *place = find(NULL);
    *place = (known_state){.state = state, .driver = driver, .on = on};
}

/* From here on the other ranks are in it. */
static void end_fault(void) {
    if (registering.ends_fault) tn__host_alloc_fault(0, 0);
    registering.ends_fault = 0;
}

/* ---- as the engine below --------------------------------------------------------------------- */

static tn_status join(const tn_comm_config *config, int *rank, int *rank_count,
                      tn__comm_state **out) {
    TN_TRY(below->join(config, rank, rank_count, out));
    remember(*out, tn__device_driver(config->device), tn__device_state(config->device));
    return TN_OK;
}

static tn_status split(tn__comm_state *state, int color, int key, const char *name,
                       tn_status so_far, int *rank, int *rank_count, tn__comm_state **out) {
    const known_state *of = find(state);
    end_fault();
    write_down("split ");
    TN_TRY(below->split(state, color, key, name, so_far, rank, rank_count, out));
    if (*out) remember(*out, of->driver, of->on);
    return TN_OK;
}

static tn_status check(tn__comm_state *state) {
    return is_broken ? TN_FAIL(TN_COMM_ERROR, "the script breaks") : below->check(state);
}

static void leave(tn__comm_state *state) {
    find(state)->state = NULL;
    below->leave(state);
}

/* What is registered goes with it. */
static void abort_state(tn__comm_state *state) {
    known_state *of = find(state);
    pthread_mutex_lock(&lock);
    of->is_aborted = 1;
    registering.registered -= of->registered;
    of->registered = of->windows = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    below->abort(state);
}

/* Counts down to the one that is refused. */
static int is_refused(int *countdown) { return *countdown && --*countdown == 0; }

/* ---- collectives with a window --------------------------------------------------------------- */

static void end_when_aborted(void *argument) {
    const known_state *of = argument;
    pthread_mutex_lock(&lock);
    while (!of->is_aborted)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void change_byte(void *argument) { *(unsigned char *)argument ^= 1; }

static tn_status start(tn__comm_state *state, const tn__batch *batch, tn_stream stream) {
    known_state *of = find(state);
    const tn__collective_call *call = &batch->calls[0];
    end_fault();
    if (is_refused(&registering.refused_start))
        return TN_FAIL(TN_INVALID_ARGUMENT, "the script starts none");
    if (of->windows && registering.hangs)
        return of->driver->host_task(of->on, end_when_aborted, of, stream);
    TN_TRY(below->start(state, batch, stream));
    if (!of->windows || !registering.corrupts || call->kind != TN_ALL_GATHER) return TN_OK;
    return of->driver->host_task(of->on, change_byte, (char *)call->dst + call->count - 1, stream);
}

/* ---- registered memory ----------------------------------------------------------------------- */

static tn_status enroll(tn__comm_state *state, void *address, size_t bytes, int is_window,
                        void **handle) {
    int *refused = is_window ? &registering.refused_window : &registering.refused_buffer;
    write_down("%s %zu ", is_window ? "window" : "buffer", bytes);
    if (is_refused(refused)) return TN_FAIL(TN_INVALID_ARGUMENT, "the script refuses %p", address);
    find(state)->windows += is_window;
    find(state)->registered++;
    registering.registered++;
    *handle = address;
    return TN_OK;
}

static tn_status withdraw(tn__comm_state *state, void *handle, int is_window) {
    write_down("%s ", is_window ? "end_window" : "end_buffer");
    if (is_refused(&registering.refused_end)) {
        is_broken = registering.breaks;
        return TN_FAIL(TN_INVALID_ARGUMENT, "the script does not end %p", handle);
    }
    if (registering.on_end) registering.on_end(handle);
    find(state)->windows -= is_window;
    find(state)->registered--;
    registering.registered--;
    return TN_OK;
}

static tn_status take(void *context, size_t bytes, void **out) {
    (void)context;
    *out = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*out) return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY, "no memory for the script");
    registering.allocated++;
    return TN_OK;
}

static tn_status give(void *context, void *address, size_t bytes) {
    (void)context, (void)bytes;
    registering.allocated--;
    free(address);
    return TN_OK;
}

static tn_status memory_functions(tn_device *device, tn_memory_functions *out) {
    *out = (tn_memory_functions){take, give, device};
    return TN_OK;
}

const tn__comm_engine *registering_engine(const tn__comm_engine *base) {
    below = base;
    is_broken = 0;
    engine = *base;
    engine.name = "registering";
    engine.has_deadlines = 0; /* it has a watch, as NCCL has */
    engine.join = join;
    engine.split = split;
    engine.start = start;
    engine.check = check;
    engine.abort = abort_state;
    engine.leave = leave;
    engine.enroll = enroll;
    engine.withdraw = withdraw;
    engine.memory_functions = memory_functions;
    return &engine;
}
