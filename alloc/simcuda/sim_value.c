/* Streams that wait for a value which the host writes to pinned memory.
 *
 * The host's write is no call, so that no call's thread could perform what was behind the wait: a
 * thread of ours looks at the words for as long as such waits are queued. It is started with the
 * first one, and ended at unload.
 *
 * As for the real driver, whose manual says so, such a wait orders nothing: what happens before
 * the write is not known to happen before what is behind the wait. It reads its word, as a kernel
 * does: the word must still be there, and be written by no work of a device meanwhile.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "sim_capture.h"
#include "sim_memory.h"

#define LOOK_NS 50000

static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER; /* under the lock, as all of this */
static pthread_t looker;
static int has_looker;
static int is_ending;

/* ---- the thread that looks ------------------------------------------------------------------- */

static void *look(void *ignored) {
    const struct timespec pause = {0, LOOK_NS};
    (void)ignored;
    pthread_mutex_lock(&tn__sim.lock);
    while (!is_ending) {
        if (!tn__sim_streams_queued_values()) {
            pthread_cond_wait(&wanted, &tn__sim.lock);
            continue;
        }
        tn__sim.in_memory_call = 0;
        tn__sim_streams_drain();
        pthread_mutex_unlock(&tn__sim.lock);
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&tn__sim.lock);
    }
    pthread_mutex_unlock(&tn__sim.lock);
    return NULL;
}

/* The program's signals are for its own threads. */
static void start_looking(void) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&looker, NULL, look, NULL) != 0) {
        fputs("tenure-simcuda: the host has no thread left for the simulation\n", stderr);
        abort();
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    has_looker = 1;
}

void tn__sim_value_watch(void) {
    if (!has_looker) start_looking();
    pthread_cond_signal(&wanted);
}

void tn__sim_values_unload(void) {
    pthread_mutex_lock(&tn__sim.lock);
    is_ending = 1;
    pthread_cond_signal(&wanted);
    pthread_mutex_unlock(&tn__sim.lock);
    if (has_looker) pthread_join(looker, NULL);
}

/* ---- the wait -------------------------------------------------------------------------------- */

/* Numbers that go round: what is up to 2^31 - 1 ahead is at least the value. */
int tn__sim_value_has_come(const sim_work *work) {
    const uint32_t *word = (const uint32_t *)(uintptr_t)work->src;
    return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - work->value) >= 0;
}

static CUresult wait_value(CUstream handle, CUdeviceptr address, uint32_t value, unsigned flags) {
    sim_stream *stream = tn__sim_stream_find(handle);
    const sim_region *region = tn__sim_region_containing(address, sizeof value);
    sim_job job = {.work = {.kind = SIM_WORK_VALUE}, .what = "cuStreamWaitValue32"};
    CUresult result;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (address % sizeof value) return CUDA_ERROR_INVALID_VALUE;
    if (flags != CU_STREAM_WAIT_VALUE_GEQ) {
        return tn__sim_refuse("cuStreamWaitValue32: flags 0x%x are not simulated", flags);
    }
    if (!region || !region->is_host) {
        return tn__sim_refuse("cuStreamWaitValue32: words of other than pinned host memory are "
                              "not simulated");
    }
    result = tn__sim_capture_gate(stream);
    if (result != CUDA_SUCCESS) return result;
    if (stream->capture) {
        return tn__sim_refuse("cuStreamWaitValue32: captures of it are not simulated");
    }
    job.work.src = address;
    job.work.value = value;
    return tn__sim_job_run(stream, &job, SIM_COST_EVENT_WAIT);
}

CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value,
                                unsigned flags) {
    SIM_ENTER(cuStreamWaitValue32_v2);
    return tn__sim_leave(wait_value(stream, address, value, flags));
}
