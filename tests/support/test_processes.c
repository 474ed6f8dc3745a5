/* Ranks as forked processes: see test_processes.h. */
#include "test_processes.h"

#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS_MAX = 16 };

test_meeting test_meeting_open(void) {
    test_meeting meeting = {.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t bytes = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_true(meeting.listener >= 0);
    assert_int_equal(bind(meeting.listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(meeting.listener, 128), 0);
    assert_int_equal(getsockname(meeting.listener, (struct sockaddr *)&address, &bytes), 0);
    meeting.port = ntohs(address.sin_port);
    return meeting;
}

void test_meeting_close(test_meeting *meeting) {
    if (meeting->listener >= 0) close(meeting->listener);
    meeting->listener = -1;
}

typedef struct rank_job {
    test_meeting meeting;
    test_rank_body body;
} rank_job;

static void run_body(void **state) {
    const rank_job *job = *state;
    job->body(&job->meeting);
}

/* In a group of its own: an assertion that fails jumps to where its test was started. */
static void run_rank(rank_job *job) {
    char name[32];
    snprintf(name, sizeof name, "rank %d", job->meeting.rank);
    const struct CMUnitTest tests[] = {{name, run_body, NULL, NULL, job}};
    int failures = _cmocka_run_group_tests(name, tests, 1, NULL, NULL);
    fflush(stdout);
    fflush(stderr);
    _exit(failures ? 1 : 0);
}

pid_t test_rank_begin(const test_meeting *meeting, int rank, int rank_count, test_rank_body body) {
    rank_job job = {.meeting = *meeting, .body = body};
    job.meeting.rank = rank;
    job.meeting.rank_count = rank_count;
    fflush(stdout);
    fflush(stderr);
    pid_t process = fork();
    assert_true(process >= 0);
    if (process) return process;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* one that hangs does not outlive a test that has failed */
    if (rank) test_meeting_close(&job.meeting);
    run_rank(&job);
    return 0;
}

static int wait_for(pid_t rank) {
    int status = 0;
    assert_int_equal(waitpid(rank, &status, 0), rank);
    return status;
}

void test_rank_end(pid_t rank) {
    int status = wait_for(rank);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

void test_rank_end_killed(pid_t rank) {
    int status = wait_for(rank);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGKILL);
}

void test_ranks_run(int rank_count, test_rank_body body, const void *argument) {
    pid_t ranks[RANKS_MAX];
    assert_true(rank_count <= RANKS_MAX);
    test_meeting meeting = test_meeting_open();
    meeting.argument = argument;
    for (int rank = 0; rank < rank_count; rank++)
        ranks[rank] = test_rank_begin(&meeting, rank, rank_count, body);
    test_meeting_close(&meeting);
    for (int rank = 0; rank < rank_count; rank++)
        test_rank_end(ranks[rank]);
}
