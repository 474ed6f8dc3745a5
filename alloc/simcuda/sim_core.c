/* Entry and exit of every call, the clock, the account of physical memory: see sim_core.h.
 *
 * Order of the checks at entry: process state (forked, exiting), permission (a host function makes
 * no calls), then under the lock the count, the fault, cuInit, the context, captures. A call that
 * fails, by a fault or by itself, changes nothing (but a capture that forbids it is invalid then)
 * and takes no virtual time; it is counted.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_capture.h"
#include "sim_core.h"
#include "sim_lifecycle.h"

typedef enum sim_needs { SIM_NEEDS_NOTHING, SIM_NEEDS_INIT, SIM_NEEDS_CONTEXT } sim_needs;

typedef struct call_row {
    const char *name;
    sim_needs needs;
    int is_memory;
} call_row;

static const call_row call_rows[SIM_CALL_COUNT] = {
#define SIM_CALL_ROW(name, needs, memory) {#name, SIM_NEEDS_##needs, memory},
    SIM_CALL_TABLE(SIM_CALL_ROW)
#undef SIM_CALL_ROW
};

sim_state tn__sim = {.lock = PTHREAD_MUTEX_INITIALIZER, .progress = PTHREAD_COND_INITIALIZER};

static _Thread_local sim_thread this_thread;

const char *tn__sim_call_name(sim_call call) { return call_rows[call].name; }

sim_thread *tn__sim_thread(void) {
    sim_thread *thread = &this_thread;
    if (thread->generation != tn__sim.generation) {
        thread->generation = tn__sim.generation;
        thread->depth = 0;
        memset(thread->default_streams, 0, sizeof thread->default_streams);
    }
    return thread;
}

int tn__sim_lock(void) {
    if (tn__sim_is_forked()) return 0;
    pthread_mutex_lock(&tn__sim.lock);
    return 1;
}

void tn__sim_unlock(void) { pthread_mutex_unlock(&tn__sim.lock); }

static int fault_is_due(sim_fault *fault) {
    if (fault->remaining == 0) return 0;
    if (fault->remaining > 1) {
        fault->remaining--;
        return 0;
    }
    if (!fault->and_after) fault->remaining = 0;
    return 1;
}

/* What turns an error into words, and what only changes the thread's own mode, is spared by faults
 * of "any call", and not part of all calls. */
static int counts_among_all(sim_call call) {
    return call != SIM_CALL_cuGetErrorName && call != SIM_CALL_cuGetErrorString &&
           call != SIM_CALL_cuThreadExchangeStreamCaptureMode;
}

static CUresult take_fault(sim_call call) {
    int of_this = fault_is_due(&tn__sim.faults[call]);
    int of_any = counts_among_all(call) && fault_is_due(&tn__sim.any_fault);
    if (of_this) return (CUresult)tn__sim.faults[call].code;
    if (of_any) return (CUresult)tn__sim.any_fault.code;
    return CUDA_SUCCESS;
}

static CUresult check_needs(sim_needs needs) {
    const sim_thread *thread = tn__sim_thread();
    const sim_device *device;
    if (needs == SIM_NEEDS_NOTHING) return CUDA_SUCCESS;
    if (!tn__sim.initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (needs == SIM_NEEDS_INIT) return CUDA_SUCCESS;
    if (thread->depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
    device = &tn__sim.devices[tn__sim_current()];
    if (device->primary_retained == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return device->dead;
}

CUresult tn__sim_enter(sim_call call) {
    CUresult result;
    if (tn__sim_is_forked()) return CUDA_ERROR_NOT_INITIALIZED;
    if (tn__sim_is_exiting()) return CUDA_ERROR_DEINITIALIZED;
    if (this_thread.in_host_function) return CUDA_ERROR_NOT_PERMITTED;
    pthread_mutex_lock(&tn__sim.lock);
    tn__sim.counts[call]++;
    this_thread.refusal[0] = '\0';
    result = take_fault(call);
    if (result == CUDA_SUCCESS) result = check_needs(call_rows[call].needs);
    if (result == CUDA_SUCCESS) result = tn__sim_capture_admits(call, call_rows[call].is_memory);
    tn__sim.in_memory_call = call_rows[call].is_memory;
    if (result != CUDA_SUCCESS) pthread_mutex_unlock(&tn__sim.lock);
    return result;
}

CUresult tn__sim_leave(CUresult result) {
    tn__sim.in_memory_call = 0;
    pthread_mutex_unlock(&tn__sim.lock);
    return result;
}

CUresult tn__sim_refuse(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(this_thread.refusal, sizeof this_thread.refusal, format, arguments);
    va_end(arguments);
    return CUDA_ERROR_NOT_SUPPORTED;
}

const char *tnsim_refusal(void) { return this_thread.refusal; }

int tn__sim_current(void) {
    const sim_thread *thread = tn__sim_thread();
    return thread->devices[thread->depth - 1];
}

void tn__sim_spend(sim_ns cost) {
    tn__sim.now += cost;
    if (tn__sim.in_memory_call) tn__sim.memory_time += cost;
}

void tn__sim_wait_until(sim_ns time) {
    if (time > tn__sim.now) tn__sim_spend(time - tn__sim.now);
}

int tn__sim_charge(int ordinal, size_t bytes) {
    sim_device *device = &tn__sim.devices[ordinal];
    if (device->used_bytes > device->memory_bytes) return 0; /* it has shrunk */
    if (bytes > device->memory_bytes - device->used_bytes) return 0;
    device->used_bytes += bytes;
    if (device->used_bytes > device->peak_bytes) device->peak_bytes = device->used_bytes;
    return 1;
}

void tn__sim_discharge(int ordinal, size_t bytes) { tn__sim.devices[ordinal].used_bytes -= bytes; }

/* Work of the device is stretched by up to its own length, so that seeds try out many orders of
 * completion, each of which repeats. (The generator is splitmix64.) */
sim_ns tn__sim_stretch(sim_ns duration) {
    uint64_t z;
    if (!tn__sim.config.seed) return duration;
    z = tn__sim.random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return duration + (sim_ns)((double)duration * ((double)(z >> 11) * 0x1p-53));
}

/* ---- control: faults, counts, clock ---------------------------------------------------------- */

static int find_call(const char *name) {
    for (int call = 0; call < SIM_CALL_COUNT; call++) {
        if (strcmp(call_rows[call].name, name) == 0) return call;
    }
    return -1;
}

int tnsim_fault(const char *call, long nth, int and_after, int code) {
    sim_fault fault = {nth, and_after, code};
    int index = call ? find_call(call) : 0;
    if (index < 0 || nth < 0) return CUDA_ERROR_INVALID_VALUE;
    if (nth > 0 && code == CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
    if (!tn__sim_lock()) return CUDA_ERROR_NOT_INITIALIZED;
    if (!call && nth == 0) memset(tn__sim.faults, 0, sizeof tn__sim.faults);
    *(call ? &tn__sim.faults[index] : &tn__sim.any_fault) = fault;
    tn__sim_unlock();
    return CUDA_SUCCESS;
}

uint64_t tnsim_call_count(const char *call) {
    uint64_t count = 0;
    int index = call ? find_call(call) : 0;
    if (index < 0 || !tn__sim_lock()) return 0;
    if (call) count = tn__sim.counts[index];
    for (int i = 0; !call && i < SIM_CALL_COUNT; i++) {
        if (counts_among_all((sim_call)i)) count += tn__sim.counts[i];
    }
    tn__sim_unlock();
    return count;
}

double tnsim_now_us(void) {
    double now;
    if (!tn__sim_lock()) return 0;
    now = (double)tn__sim.now / 1e3;
    tn__sim_unlock();
    return now;
}

double tnsim_memory_call_us(void) {
    double time;
    if (!tn__sim_lock()) return 0;
    time = (double)tn__sim.memory_time / 1e3;
    tn__sim_unlock();
    return time;
}

/* ---- control: physical memory ---------------------------------------------------------------- */

static size_t device_figure(int ordinal, int is_peak) {
    size_t bytes = 0;
    if (!tn__sim_lock()) return 0;
    if (ordinal >= 0 && ordinal < tn__sim.config.device_count) {
        const sim_device *device = &tn__sim.devices[ordinal];
        bytes = is_peak ? device->peak_bytes : device->used_bytes;
    }
    tn__sim_unlock();
    return bytes;
}

size_t tnsim_physical_bytes(int device) { return device_figure(device, 0); }
size_t tnsim_physical_peak_bytes(int device) { return device_figure(device, 1); }

int tnsim_set_memory(int device, size_t bytes) {
    int known;
    if (!tn__sim_lock()) return CUDA_ERROR_NOT_INITIALIZED;
    known = device >= 0 && device < tn__sim.config.device_count;
    if (known) tn__sim.devices[device].memory_bytes = bytes;
    tn__sim_unlock();
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

/* ---- the simulator's own host memory --------------------------------------------------------- */

static void *or_end(void *memory) {
    if (memory) return memory;
    fputs("tenure-simcuda: the host has no memory left for the simulation\n", stderr);
    abort();
}

void *tn__sim_alloc(size_t count, size_t item_bytes) {
    return or_end(calloc(count ? count : 1, item_bytes));
}

void *tn__sim_grow(void *memory, size_t count, size_t item_bytes) {
    return or_end(reallocarray(memory, count, item_bytes));
}
void tn__sim_free(void *memory) { free(memory); }
