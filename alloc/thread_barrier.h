/* The seam to the operating system that makes one side of a handshake free: the other side makes
 * all running threads of the process pass a full barrier (Linux: membarrier).
 */
#ifndef TENURE_THREAD_BARRIER_H
#define TENURE_THREAD_BARRIER_H

/* 1 if tn__barrier_all_threads works in this process; asks the system once. The thread sanitizer
 * does not know the call, so it is not used there. */
int tn__barrier_is_there(void);

void tn__barrier_all_threads(void);

#endif
