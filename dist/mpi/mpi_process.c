/* MPI in this process: see mpi_process.h.
 *
 * At exit, if we started MPI: the ranks first meet in a barrier on a communicator of its own, which
 * has a deadline on a rank where a communicator failed. The others, which can not know of a failure
 * in a sub-group, wait for it as MPI_Finalize would. If all come, MPI_Finalize is safe. If one
 * does not (it hangs, say, and MPI_Finalize would wait for it for ever), the job is aborted with
 * a line that says so: MPI offers no other way to end some of its ranks.
 */
#include "mpi_process.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "host_alloc.h"

enum { BUSY_POLLS = 64, POLL_NS = 50000, NS_PER_US = 1000 };
#define NS_PER_S ((uint64_t)1000000000)

typedef struct kept_memory {
    struct kept_memory *next;
    void (*release)(void *);
    void *memory;
} kept_memory;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_started; /* by us or by the program */
static int is_ending;
static pid_t owner;
static MPI_Comm farewell = MPI_COMM_NULL;
static uint64_t farewell_us; /* longest timeout of a failed communicator; 0: none failed */
static kept_memory *kept;

uint64_t tn__mpi_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t tn__mpi_deadline_ns(uint64_t timeout_us) {
    uint64_t now = tn__mpi_now_ns();
    return timeout_us < (UINT64_MAX - now) / NS_PER_US ? now + timeout_us * NS_PER_US : UINT64_MAX;
}

tn_status tn__mpi_fail(int code, const char *call) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) text[0] = 0;
    return TN_FAIL_NATIVE(TN_COMM_ERROR, code, "%s failed: %s", call, *text ? text : "no text");
}

/* ---- the lock ------------------------------------------------------------------------------- */

int tn__mpi_lock(void) {
    pthread_mutex_lock(&lock);
    int finalized = 0;
    if (!is_ending && is_started) MPI_Finalized(&finalized);
    if (!is_ending && !finalized) return 1;
    pthread_mutex_unlock(&lock);
    return 0;
}

void tn__mpi_unlock(void) { pthread_mutex_unlock(&lock); }

/* ---- polling -------------------------------------------------------------------------------- */

static void pause_between(long polls) {
    struct timespec pause = {0, POLL_NS};
    if (polls < BUSY_POLLS)
        sched_yield();
    else
        nanosleep(&pause, NULL);
}

int tn__mpi_poll(MPI_Request *requests, int count, uint64_t deadline_ns, int (*is_over)(void *),
                 void *context, int *code) {
    *code = MPI_SUCCESS;
    for (long polls = 0;; polls++) {
        int are_complete = 0;
        if (!tn__mpi_lock()) return 0;
        *code = MPI_Testall(count, requests, &are_complete, MPI_STATUSES_IGNORE);
        int is_late = *code == MPI_SUCCESS && !are_complete && is_over(context);
        tn__mpi_unlock();
        if (*code != MPI_SUCCESS || is_late) return 0;
        if (are_complete) return 1;
        if (tn__mpi_now_ns() >= deadline_ns) return 0;
        pause_between(polls);
    }
}

/* ---- the end -------------------------------------------------------------------------------- */

void tn__mpi_process_note_failure(uint64_t timeout_us) {
    pthread_mutex_lock(&lock);
    if (farewell_us < timeout_us) farewell_us = timeout_us;
    pthread_mutex_unlock(&lock);
}

void tn__mpi_process_keep(void (*release)(void *), void *memory) {
    kept_memory *entry = tn__host_alloc(1, sizeof *entry);
    if (!entry) return; /* then it stays for good, which is as safe */
    entry->release = release;
    entry->memory = memory;
    pthread_mutex_lock(&lock);
    entry->next = kept;
    kept = entry;
    pthread_mutex_unlock(&lock);
}

static void release_kept(void) {
    while (kept) {
        kept_memory *entry = kept;
        kept = entry->next;
        entry->release(entry->memory);
        tn__host_free(entry);
    }
}

static int all_come_to_the_end(void) {
    MPI_Request request = MPI_REQUEST_NULL;
    int have_come = 0;
    uint64_t deadline = farewell_us ? tn__mpi_deadline_ns(farewell_us) : UINT64_MAX;
    if (MPI_Ibarrier(farewell, &request) != MPI_SUCCESS) return 0;
    while (!have_come && tn__mpi_now_ns() < deadline) {
        if (MPI_Test(&request, &have_come, MPI_STATUS_IGNORE) != MPI_SUCCESS) return 0;
        if (!have_come) pause_between(BUSY_POLLS);
    }
    return have_come;
}

static void end_at_exit(void) {
    int finalized = 0;
    if (getpid() != owner) return; /* a forked child: MPI is its parent's */
    pthread_mutex_lock(&lock);
    is_ending = 1; /* from here no other thread calls MPI */
    MPI_Finalized(&finalized);
    if (!finalized) {
        if (!all_come_to_the_end() && farewell_us) {
            int rank = 0;
            MPI_Comm_rank(MPI_COMM_WORLD, &rank);
            fprintf(stderr,
                    "tenure: rank %d: a communicator had failed, and not all ranks came to the end "
                    "within %g s: aborting the job\n",
                    rank, (double)farewell_us / 1e6);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        MPI_Finalize();
    }
    release_kept();
    pthread_mutex_unlock(&lock);
}

/* ---- the start ------------------------------------------------------------------------------ */

static tn_status check_threads(int provided) {
    if (provided >= MPI_THREAD_SERIALIZED) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "MPI was initialized for one thread, and collectives are done by others: "
                   "use MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave it to Tenure");
}

static tn_status start_ours(void) {
    int provided = MPI_THREAD_SINGLE;
    int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, "MPI_Init_thread");
    owner = getpid();
    if (atexit(end_at_exit) != 0)
        return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "no room for an exit handler");
    code = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS) code = MPI_Comm_dup(MPI_COMM_WORLD, &farewell);
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, "MPI_Comm_dup");
    return check_threads(provided);
}

static tn_status start_locked(void) {
    int initialized = 0, finalized = 0, provided = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (finalized || is_ending)
        return TN_FAIL(TN_INVALID_STATE, "MPI has been finalized in this process");
    if (is_started) return TN_OK;
    if (!initialized) {
        TN_TRY(start_ours());
    } else {
        MPI_Query_thread(&provided);
        TN_TRY(check_threads(provided));
    }
    is_started = 1;
    return TN_OK;
}

tn_status tn__mpi_process_start(void) {
    pthread_mutex_lock(&lock);
    tn_status status = start_locked();
    pthread_mutex_unlock(&lock);
    return status;
}
