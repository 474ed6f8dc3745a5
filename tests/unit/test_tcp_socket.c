/* Connecting where addresses swallow what they are sent, and names are not there yet; and processes
 * that are short of files. getaddrinfo and accept4 are this test's. */
#include "test_support.h"

#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tcp_socket.h"
#include "tcp_store.h"
#include "tcp_store_server.h"

enum { LONG_US = 60 * 1000 * 1000, SHORT_US = 150 * 1000, FULL_CONNECTIONS = 4, ADDRESSES = 2 };

#define VISIBLE __attribute__((visibility("default")))

/* ---- the system's calls ---------------------------------------------------------------------- */

static struct {
    const int *codes; /* that the next calls give; then the addresses */
    int code_count;
    int calls;
    struct sockaddr_in addresses[ADDRESSES];
    struct addrinfo list[ADDRESSES];
} names;

VISIBLE int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                        struct addrinfo **out) {
    (void)host, (void)service, (void)hints;
    const int call = names.calls++;
    if (call < names.code_count) return names.codes[call];
    for (int i = 0; i < ADDRESSES; i++)
        names.list[i] = (struct addrinfo){.ai_family = AF_INET,
                                          .ai_socktype = SOCK_STREAM,
                                          .ai_addrlen = sizeof names.addresses[i],
                                          .ai_addr = (struct sockaddr *)&names.addresses[i],
                                          .ai_next = i + 1 < ADDRESSES ? &names.list[i + 1] : NULL};
    *out = names.list;
    return 0;
}

VISIBLE void freeaddrinfo(struct addrinfo *list) { assert_ptr_equal(list, names.list); }

static struct {
    uint64_t fails_until_ns;
    int calls;
} accepts;

typedef int (*accept4_function)(int, struct sockaddr *, socklen_t *, int);

VISIBLE int accept4(int file, struct sockaddr *address, socklen_t *bytes, int flags) {
    static accept4_function real;
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "accept4");
    __atomic_add_fetch(&accepts.calls, 1, __ATOMIC_RELAXED);
    if (tn__tcp_now_ns() >= __atomic_load_n(&accepts.fails_until_ns, __ATOMIC_RELAXED))
        return real(file, address, bytes, flags);
    errno = EMFILE;
    return -1;
}

/* ---- listeners ------------------------------------------------------------------------------- */

/* A port that nobody else gets, and on which nobody listens yet. */
static int bound_at(struct sockaddr_in *out) {
    socklen_t bytes = sizeof *out;
    int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(file >= 0);
    *out = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(bind(file, (struct sockaddr *)out, sizeof *out), 0);
    assert_int_equal(getsockname(file, (struct sockaddr *)out, &bytes), 0);
    return file;
}

static int listener_at(struct sockaddr_in *out, int backlog) {
    int file = bound_at(out);
    assert_int_equal(listen(file, backlog), 0);
    return file;
}

/* Nobody accepts, and what is sent to a full queue is swallowed. */
static void fill_queue(const struct sockaddr_in *at, int *files) {
    int is_swallowed = 0;
    for (int i = 0; i < FULL_CONNECTIONS; i++) {
        files[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        assert_true(files[i] >= 0);
        (void)connect(files[i], (const struct sockaddr *)at, sizeof *at);
        struct pollfd ready = {.fd = files[i], .events = POLLOUT};
        is_swallowed = poll(&ready, 1, 100) == 0;
    }
    assert_true(is_swallowed);
}

/* ---- connecting ------------------------------------------------------------------------------ */

static void an_address_that_swallows_all_does_not_keep_the_next_from_being_asked(void **state) {
    (void)state;
    int files[FULL_CONNECTIONS], connected = -1;
    int full = listener_at(&names.addresses[0], 0), open = listener_at(&names.addresses[1], 8);
    fill_queue(&names.addresses[0], files);
    names.code_count = 0;
    const uint64_t start = tn__tcp_now_ns();
    EXPECT_OK(
        tn__tcp_connect_host("two", 1, tn__tcp_deadline_ns(4 * (uint64_t)LONG_US), &connected));
    assert_true(tn__tcp_now_ns() - start < (uint64_t)LONG_US * 1000);
    tn__tcp_close(&connected);
    tn__tcp_close(&open);
    /* With neither there it ends at the deadline. */
    int silent = bound_at(&names.addresses[1]);
    EXPECT_STATUS(tn__tcp_connect_host("two", 1, tn__tcp_deadline_ns(SHORT_US), &connected),
                  TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("nobody answered on two, TCP port 1");
    for (int i = 0; i < FULL_CONNECTIONS; i++)
        tn__tcp_close(&files[i]);
    tn__tcp_close(&silent);
    tn__tcp_close(&full);
}

static void a_name_that_is_not_there_yet_is_asked_for_again(void **state) {
    (void)state;
    static const int codes[] = {EAI_AGAIN, EAI_NONAME, EAI_AGAIN};
    int connected = -1, open = listener_at(&names.addresses[0], 8);
    names.addresses[1] = names.addresses[0];
    names.codes = codes, names.code_count = 3, names.calls = 0;
    EXPECT_OK(tn__tcp_connect_host("late", 1, tn__tcp_deadline_ns(LONG_US), &connected));
    assert_int_equal(names.calls, 4);
    tn__tcp_close(&connected);
    tn__tcp_close(&open);
}

static void a_name_that_never_comes_ends_at_the_deadline(void **state) {
    (void)state;
    static int codes[10000];
    uint64_t timeout_us = SHORT_US;
    int connected = -1;
    for (int i = 0; i < 10000; i++)
        codes[i] = EAI_NONAME;
    names.codes = codes, names.code_count = 10000;
    do { /* anew if the time was over when the first answer came */
        names.calls = 0;
        EXPECT_STATUS(
            tn__tcp_connect_host("nobody", 1, tn__tcp_deadline_ns(timeout_us), &connected),
            TN_COMM_ERROR);
        EXPECT_ERROR_HAS("the address of host nobody: ");
        assert_true((uint64_t)names.calls < 100 * (timeout_us / SHORT_US)); /* it waits between */
        timeout_us *= 2;
    } while (names.calls == 1 && timeout_us <= LONG_US);
    assert_true(names.calls > 1);
    codes[0] = EAI_FAMILY; /* what does not pass */
    names.calls = 0;
    EXPECT_STATUS(tn__tcp_connect_host("nobody", 1, tn__tcp_deadline_ns(LONG_US), &connected),
                  TN_COMM_ERROR);
    assert_int_equal(names.calls, 1);
}

/* ---- files ----------------------------------------------------------------------------------- */

static void set_limit(rlim_t soft, rlim_t hard) {
    const struct rlimit limit = {.rlim_cur = soft, .rlim_max = hard};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

static rlim_t soft_limit(void) {
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    return limit.rlim_cur;
}

/* The last test of this process: only root gets a hard limit back. */
static void the_limit_of_files_is_raised_or_named(void **state) {
    (void)state;
    set_limit(256, 2048);
    EXPECT_OK(tn__tcp_reserve_files(100, "the test"));
    assert_int_equal(soft_limit(), 256);
    EXPECT_OK(tn__tcp_reserve_files(1000, "the test"));
    assert_int_equal(soft_limit(), 1064);
    EXPECT_STATUS(tn__tcp_reserve_files(2000, "the test"), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("the test takes 2000 open files, and this process may have 2048 at most");
    assert_int_equal(soft_limit(), 1064);
}

/* A store for so many ranks has more connections than the usual limit of files, which poll
 * refuses. */
static void a_store_of_many_ranks_serves(void **state) {
    (void)state;
    const int ranks = 700;
    int listener = -1;
    tn__store_server *server = NULL;
    tn__store *store = NULL;
    tn__store_hello hello = {.version = TN__STORE_VERSION, .rank_count = (uint32_t)ranks, .job = 5};
    char value[8];
    size_t bytes = 0;
    set_limit(1024, 2048);
    names.addresses[0] = names.addresses[1] = (struct sockaddr_in){0};
    EXPECT_OK(tn__tcp_listen(0, &listener));
    socklen_t length = sizeof names.addresses[0];
    struct sockaddr_in6 at;
    length = sizeof at;
    assert_int_equal(getsockname(listener, (struct sockaddr *)&at, &length), 0);
    for (int i = 0; i < ADDRESSES; i++)
        names.addresses[i] = (struct sockaddr_in){.sin_family = AF_INET,
                                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                                  .sin_port = at.sin6_port};
    names.code_count = 0;
    EXPECT_OK(tn__store_server_begin(listener, ranks, 5, &server));
    /* Short of files for a while: it waits, and does not ask again and again. */
    __atomic_store_n(&accepts.fails_until_ns, tn__tcp_deadline_ns(2 * SHORT_US), __ATOMIC_RELAXED);
    EXPECT_OK(tn__store_open("here", ntohs(at.sin6_port), &hello, LONG_US, &store));
    assert_true(__atomic_load_n(&accepts.calls, __ATOMIC_RELAXED) < 50);
    EXPECT_OK(tn__store_set(store, "key", "value", 5));
    EXPECT_OK(tn__store_get(store, "key", LONG_US, value, sizeof value, &bytes));
    assert_int_equal(bytes, 5);
    tn__store_close(store);
    tn__store_server_end(server, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_address_that_swallows_all_does_not_keep_the_next_from_being_asked),
        cmocka_unit_test(a_name_that_is_not_there_yet_is_asked_for_again),
        cmocka_unit_test(a_name_that_never_comes_ends_at_the_deadline),
        cmocka_unit_test(a_store_of_many_ranks_serves),
        cmocka_unit_test(the_limit_of_files_is_raised_or_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
