/* TCP sockets with deadlines: see tcp_socket.h. */
#include "tcp_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    NS_PER_US = 1000,
    NS_PER_MS = 1000000,
    RETRY_MS = 20,
    TURN_MS = 1000, /* that an address has to answer, the first time round */
    SOME_BYTES_MAX = 1 << 20,
    OTHER_FILES = 64 /* that a program has open besides */
};
#define NS_PER_S ((uint64_t)1000000000)

uint64_t tn__tcp_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t tn__tcp_deadline_ns(uint64_t timeout_us) {
    uint64_t now = tn__tcp_now_ns();
    return timeout_us < (UINT64_MAX - now) / NS_PER_US ? now + timeout_us * NS_PER_US : UINT64_MAX;
}

int tn__tcp_poll_ms(uint64_t deadline_ns) {
    uint64_t now = tn__tcp_now_ns();
    if (deadline_ns <= now) return 0;
    uint64_t ms = (deadline_ns - now) / NS_PER_MS + 1;
    return ms > 1000000 ? 1000000 : (int)ms;
}

void tn__tcp_close(int *file) {
    if (*file >= 0) close(*file);
    *file = -1;
}

static tn_status fail(const char *what, int code) {
    return TN_FAIL_NATIVE(TN_COMM_ERROR, code, "%s: %s", what, strerror(code));
}

static void set_up(int file) {
    int one = 1;
    (void)setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

tn_status tn__tcp_reserve_files(size_t count, const char *what) {
    struct rlimit limit;
    rlim_t needed = (rlim_t)count + OTHER_FILES;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return fail("the limit of open files", errno);
    if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= needed) return TN_OK;
    if (limit.rlim_max != RLIM_INFINITY && limit.rlim_max < needed)
        return TN_FAIL(
            TN_UNSUPPORTED,
            "%s takes %zu open files, and this process may have %llu at most, %d of them "
            "for all else: raise the hard limit (ulimit -Hn)",
            what, count, (unsigned long long)limit.rlim_max, OTHER_FILES);
    limit.rlim_cur = needed;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0 ? TN_OK : fail("the limit of open files", errno);
}

int tn__tcp_is_short_of_files(int code) {
    return code == EMFILE || code == ENFILE || code == ENOBUFS || code == ENOMEM;
}

/* ---- listening ------------------------------------------------------------------------------ */

/* IPv6 takes IPv4 as well; where a machine has no IPv6, IPv4. */
static int bind_any(int family, unsigned port) {
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int is_six = family == AF_INET6, one = 1, zero = 0;
    int file = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (file < 0) return -1;
    (void)setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (is_six) (void)setsockopt(file, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    const struct sockaddr *address = is_six ? (struct sockaddr *)&six : (struct sockaddr *)&four;
    socklen_t bytes = is_six ? sizeof six : sizeof four;
    if (bind(file, address, bytes) == 0 && listen(file, SOMAXCONN) == 0) return file;
    int code = errno;
    close(file);
    errno = code;
    return -1;
}

tn_status tn__tcp_listen(unsigned port, int *out) {
    int file = bind_any(AF_INET6, port);
    if (file < 0 && errno != EADDRINUSE) file = bind_any(AF_INET, port);
    if (file < 0) {
        int code = errno;
        return TN_FAIL_NATIVE(TN_COMM_ERROR, code, "listening on TCP port %u: %s", port,
                              strerror(code));
    }
    *out = file;
    return TN_OK;
}

tn_status tn__tcp_listen_on(int file) {
    int is_listening = 0;
    socklen_t bytes = sizeof is_listening;
    if (getsockopt(file, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &bytes) != 0)
        return fail("the socket to listen on", errno);
    TN_REQUIRE(is_listening, "file %d is no listening socket", file);
    if (fcntl(file, F_SETFL, O_NONBLOCK) != 0 || fcntl(file, F_SETFD, FD_CLOEXEC) != 0)
        return fail("the socket to listen on", errno);
    return TN_OK;
}

static void from_system(const struct sockaddr_storage *system, tn__tcp_address *out) {
    struct sockaddr_in6 six;
    struct sockaddr_in four;
    memset(out, 0, sizeof *out);
    if (system->ss_family == AF_INET6) {
        memcpy(&six, system, sizeof six);
        memcpy(out->bytes, &six.sin6_addr, sizeof out->bytes);
        out->port = ntohs(six.sin6_port);
        return;
    }
    memcpy(&four, system, sizeof four);
    out->bytes[10] = out->bytes[11] = 0xFF;
    memcpy(out->bytes + 12, &four.sin_addr, 4);
    out->port = ntohs(four.sin_port);
}

/* 1 if the bytes are IPv4's as IPv6 maps them: such an address needs no IPv6 on this machine. */
static int is_mapped(const unsigned char *bytes) {
    static const unsigned char prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
    return memcmp(bytes, prefix, sizeof prefix) == 0;
}

int tn__tcp_is_loopback(const tn__tcp_address *address) {
    static const unsigned char six[16] = {[15] = 1};
    if (is_mapped(address->bytes)) return address->bytes[12] == 127;
    return memcmp(address->bytes, six, sizeof six) == 0;
}

static tn_status name_of(int file, tn__tcp_address *out) {
    struct sockaddr_storage name;
    socklen_t bytes = sizeof name;
    memset(&name, 0, sizeof name);
    if (getsockname(file, (struct sockaddr *)&name, &bytes) != 0)
        return fail("the address of a socket", errno);
    from_system(&name, out);
    return TN_OK;
}

tn_status tn__tcp_reachable(int listener, int connection, tn__tcp_address *out) {
    tn__tcp_address here, there;
    TN_TRY(name_of(listener, &here));
    TN_TRY(name_of(connection, &there));
    there.port = here.port;
    *out = there;
    return TN_OK;
}

tn_status tn__tcp_peer(int connection, tn__tcp_address *out) {
    struct sockaddr_storage name;
    socklen_t bytes = sizeof name;
    memset(&name, 0, sizeof name);
    if (getpeername(connection, (struct sockaddr *)&name, &bytes) != 0)
        return fail("the other end of a connection", errno);
    from_system(&name, out);
    return TN_OK;
}

int tn__tcp_accept(int listener) {
    int file = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (file >= 0) set_up(file);
    return file;
}

/* ---- connecting ----------------------------------------------------------------------------- */

/* A port of the range that the system gives to connections may be given to this very one: it is
 * then connected to itself. */
static int is_own_echo(int file) {
    struct sockaddr_storage ours, theirs;
    socklen_t our_bytes = sizeof ours, their_bytes = sizeof theirs;
    memset(&ours, 0, sizeof ours);
    memset(&theirs, 0, sizeof theirs);
    return getsockname(file, (struct sockaddr *)&ours, &our_bytes) == 0 &&
           getpeername(file, (struct sockaddr *)&theirs, &their_bytes) == 0 &&
           our_bytes == their_bytes && memcmp(&ours, &theirs, our_bytes) == 0;
}

static tn__tcp_end connect_system(const struct sockaddr *address, socklen_t bytes,
                                  uint64_t deadline_ns, int *out) {
    int file = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int code = 0;
    socklen_t code_bytes = sizeof code;
    if (file < 0) return TN__TCP_CLOSED;
    set_up(file);
    if (connect(file, address, bytes) != 0 && errno != EINPROGRESS) {
        close(file);
        return TN__TCP_CLOSED;
    }
    struct pollfd ready = {.fd = file, .events = POLLOUT};
    while (poll(&ready, 1, tn__tcp_poll_ms(deadline_ns)) <= 0) {
        if (tn__tcp_now_ns() < deadline_ns) continue;
        close(file);
        return TN__TCP_LATE;
    }
    if (getsockopt(file, SOL_SOCKET, SO_ERROR, &code, &code_bytes) != 0 || code ||
        is_own_echo(file)) {
        close(file);
        return TN__TCP_CLOSED;
    }
    *out = file;
    return TN__TCP_DONE;
}

tn__tcp_end tn__tcp_connect(const tn__tcp_address *address, uint64_t deadline_ns, int *out) {
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(address->port)};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(address->port)};
    if (is_mapped(address->bytes)) {
        memcpy(&four.sin_addr, address->bytes + 12, 4);
        return connect_system((struct sockaddr *)&four, sizeof four, deadline_ns, out);
    }
    memcpy(&six.sin6_addr, address->bytes, sizeof address->bytes);
    return connect_system((struct sockaddr *)&six, sizeof six, deadline_ns, out);
}

/* Each address once, and each has a turn of that long: one that swallows what it is sent does not
 * keep the next one from being asked. The connection, or -1. */
static int connect_any(const struct addrinfo *list, uint64_t turn_ns, uint64_t deadline_ns) {
    int file = -1;
    for (const struct addrinfo *at = list; at && file < 0; at = at->ai_next) {
        uint64_t now = tn__tcp_now_ns();
        uint64_t turn_ends_ns =
            deadline_ns > now && deadline_ns - now > turn_ns ? now + turn_ns : deadline_ns;
        (void)connect_system(at->ai_addr, at->ai_addrlen, turn_ends_ns, &file);
    }
    return file;
}

/* Round by round, with turns that get longer. */
static int connect_in_rounds(const struct addrinfo *list, uint64_t deadline_ns) {
    uint64_t turn_ns = (uint64_t)TURN_MS * NS_PER_MS;
    int file = connect_any(list, turn_ns, deadline_ns);
    while (file < 0 && tn__tcp_now_ns() < deadline_ns) {
        (void)poll(NULL, 0, RETRY_MS);
        if (turn_ns < UINT64_MAX / 2) turn_ns *= 2;
        file = connect_any(list, turn_ns, deadline_ns);
    }
    return file;
}

/* Who is asked may have no answer yet: a machine that is still to come has no name, either. */
static int may_have_a_name(int code) {
    return code == EAI_AGAIN || code == EAI_NONAME || code == EAI_NODATA || code == EAI_FAIL;
}

tn_status tn__tcp_connect_host(const char *host, unsigned port, uint64_t deadline_ns, int *out) {
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *list = NULL;
    char service[16];
    snprintf(service, sizeof service, "%u", port);
    int code = getaddrinfo(host, service, &hints, &list);
    while (may_have_a_name(code) && tn__tcp_now_ns() < deadline_ns) {
        (void)poll(NULL, 0, RETRY_MS);
        code = getaddrinfo(host, service, &hints, &list);
    }
    if (code) return TN_FAIL(TN_COMM_ERROR, "the address of host %s: %s", host, gai_strerror(code));
    int file = connect_in_rounds(list, deadline_ns);
    freeaddrinfo(list);
    if (file < 0) return TN_FAIL(TN_COMM_TIMEOUT, "nobody answered on %s, TCP port %u", host, port);
    *out = file;
    return TN_OK;
}

/* ---- bytes ---------------------------------------------------------------------------------- */

static ptrdiff_t count_or_gone(ssize_t count) {
    if (count > 0) return count;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
    return -1;
}

ptrdiff_t tn__tcp_send_some(int file, const void *bytes, size_t count) {
    size_t most = count < SOME_BYTES_MAX ? count : SOME_BYTES_MAX;
    return count_or_gone(send(file, bytes, most, MSG_NOSIGNAL));
}

ptrdiff_t tn__tcp_receive_some(int file, void *bytes, size_t count) {
    size_t most = count < SOME_BYTES_MAX ? count : SOME_BYTES_MAX;
    return count_or_gone(recv(file, bytes, most, 0));
}

int tn__tcp_has_ended(int file) {
    struct pollfd ends = {.fd = file, .events = POLLRDHUP};
    return poll(&ends, 1, 0) > 0;
}

static tn__tcp_end wait_for(int file, short events, uint64_t deadline_ns) {
    struct pollfd ready = {.fd = file, .events = events};
    while (poll(&ready, 1, tn__tcp_poll_ms(deadline_ns)) <= 0)
        if (tn__tcp_now_ns() >= deadline_ns) return TN__TCP_LATE;
    return TN__TCP_DONE;
}

tn__tcp_end tn__tcp_send(int file, const void *bytes, size_t count, uint64_t deadline_ns) {
    const unsigned char *at = bytes;
    while (count) {
        ptrdiff_t sent = tn__tcp_send_some(file, at, count);
        if (sent < 0) return TN__TCP_CLOSED;
        at += sent, count -= (size_t)sent;
        if (count && !sent && wait_for(file, POLLOUT, deadline_ns) == TN__TCP_LATE)
            return TN__TCP_LATE;
    }
    return TN__TCP_DONE;
}

tn__tcp_end tn__tcp_receive(int file, void *bytes, size_t count, uint64_t deadline_ns) {
    unsigned char *at = bytes;
    while (count) {
        ptrdiff_t received = tn__tcp_receive_some(file, at, count);
        if (received < 0) return TN__TCP_CLOSED;
        at += received, count -= (size_t)received;
        if (count && !received && wait_for(file, POLLIN, deadline_ns) == TN__TCP_LATE)
            return TN__TCP_LATE;
    }
    return TN__TCP_DONE;
}
