/* membarrier: see thread_barrier.h. */
#include "thread_barrier.h"

#include "error.h"

#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#if !defined(__SANITIZE_THREAD__)

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int is_there;

static void register_process(void) {
    is_there = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
}

int tn__barrier_is_there(void) {
    pthread_once(&once, register_process);
    return is_there;
}

/* A process that forbids itself the call once it is registered (a system call filter) ends here:
 * its threads have counted on it since, and going on would let two of them into one list. */
void tn__barrier_all_threads(void) {
    int is_refused = syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) != 0;
    TN_CHECK(!is_refused);
}

#else

int tn__barrier_is_there(void) { return 0; }

void tn__barrier_all_threads(void) {}

#endif
