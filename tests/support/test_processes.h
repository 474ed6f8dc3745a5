/* Ranks as forked processes, for tests that end some of them: no launcher ends the others.
 *
 *     test_meeting meeting = test_meeting_open();          (in a program without threads yet)
 *     pid_t ranks[3];
 *     for (int rank = 0; rank < 3; rank++) ranks[rank] = test_rank_begin(&meeting, rank, 3, body);
 *     test_meeting_close(&meeting);
 *     for (int rank = 0; rank < 3; rank++) test_rank_end(ranks[rank]);
 *
 * A body may use cmocka's assertions: a failure ends its process with status 1.
 */
#ifndef TENURE_TEST_PROCESSES_H
#define TENURE_TEST_PROCESSES_H

#include <sys/types.h>

#include "test_support.h"

typedef struct test_meeting {
    int listener; /* -1 in all ranks but 0 */
    int port;
    int rank;
    int rank_count;
    const void *argument; /* the test's own */
} test_meeting;

/* A port of this machine that nobody else gets. */
test_meeting test_meeting_open(void);
void test_meeting_close(test_meeting *meeting);

typedef void (*test_rank_body)(const test_meeting *meeting);
pid_t test_rank_begin(const test_meeting *meeting, int rank, int rank_count, test_rank_body body);

/* Waits; fails unless the process ended with status 0. */
void test_rank_end(pid_t rank);

/* Waits; fails unless the process was ended by SIGKILL. */
void test_rank_end_killed(pid_t rank);

/* All ranks run the body, and end well. */
void test_ranks_run(int rank_count, test_rank_body body, const void *argument);

#endif
