/* A program that forbids itself system calls once the library has counted on them (sandboxes do).
 * The one that other threads' safety rests on ends it, with words; going on would be a race. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/membarrier.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "misuse_support.h"

#define s misuse_scene

enum { BUSY_THREADS = 2, TRIMS = 2000, SURVIVED = 71 };

static void forbid_membarrier(void) {
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof program / sizeof program[0], program};
    REQUIRE(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    REQUIRE(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
}

/* Trimming stops the other threads' caches, once they have some: they must pass a barrier then. */
static void filter_after_the_start(void) {
    misuse_open();
    misuse_start_busy_threads(BUSY_THREADS);
    forbid_membarrier();
    for (int i = 0; i < TRIMS; i++)
        REQUIRE(tn_pool_trim(s.pool, 0, NULL) == TN_OK);
    _Exit(SURVIVED);
}

static const part parts[] = {
    {"filter_after_the_start", filter_after_the_start},
};

/* Nothing counts on a call that is not there, nor under the thread sanitizer; and under that for
 * addresses blocks of host memory do not stay in caches. */
static int is_counted_on(int is_host) {
#if defined(__SANITIZE_THREAD__)
    (void)is_host;
    return 0;
#else
#if defined(__SANITIZE_ADDRESS__)
    if (is_host) return 0;
#endif
    (void)is_host;
    return syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
#endif
}

static void a_barrier_that_is_refused_ends_the_process(void **state) {
    const char *drivers[] = {"host", "sim"};
    (void)state;
    for (int i = 0; i < 2; i++) {
        const int is_counted = is_counted_on(i == 0);
        ending end = misuse_run("filter_after_the_start", drivers[i]);
        assert_int_equal(end.status, is_counted ? 128 + SIGABRT : SURVIVED);
        if (is_counted) assert_non_null(strstr(end.text, "thread_barrier.c"));
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_barrier_that_is_refused_ends_the_process),
    };
    misuse_play(argc, argv, parts, sizeof parts / sizeof parts[0]);
    return cmocka_run_group_tests_name("misuse/system_call_filter", tests, NULL, NULL);
}
