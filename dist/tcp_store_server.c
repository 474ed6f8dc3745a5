/* The store's thread: connections, and what they ask. See tcp_store_server.h.
 *
 * Invariant, of a connection: it is reading a request, or waits_for an entry or a value, or has a
 * reply that is not yet sent; it is served by what poll says of its socket and by its deadline.
 */
#include "tcp_store_server.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "host_alloc.h"
#include "tcp_store_entries.h"

enum { STRANGERS_MAX = 64, MESSAGE_US = 10 * 1000 * 1000, SHORTAGE_US = 50 * 1000 };

typedef enum rank_state { RANK_AWAITED, RANK_PRESENT, RANK_LEFT, RANK_GONE } rank_state;

typedef struct connection {
    int file; /* -1: not in use */
    int rank; /* -1: a stranger's */
    int channel;
    int ends_when_sent;
    uint64_t age;         /* of strangers: who came first has the least */
    uint64_t deadline_ns; /* of the message or the wait under way */
    unsigned char header[TN__STORE_REQUEST_BYTES];
    tn__store_request request;
    size_t have; /* bytes of the header, then of the body */
    int has_header;
    int is_waiting;
    unsigned char *body; /* key and value */
    unsigned char *reply;
    size_t reply_bytes;
    size_t sent;
} connection;

struct tn__store_server {
    int listener;
    int wake; /* the deadline has come into being */
    int rank_count;
    uint64_t job;
    pthread_t thread;
    _Atomic uint64_t end_ns; /* 0: serves */
    uint64_t arrivals;
    uint64_t accepts_at_ns; /* not before: the process was short of files */
    rank_state *ranks;
    connection *connections;
    struct pollfd *polls;
    size_t capacity;
    tn__store_entries entries;
};

/* ---- replies -------------------------------------------------------------------------------- */

static void close_connection(tn__store_server *server, connection *at);

static unsigned char *begin_reply(tn__store_server *server, connection *at, tn_status status,
                                  size_t bytes) {
    tn__store_reply reply = {.status = (uint32_t)status, .bytes = (uint32_t)bytes};
    at->is_waiting = 0;
    at->reply = tn__host_alloc(1, TN__STORE_REPLY_BYTES + bytes);
    if (!at->reply) {
        close_connection(server, at);
        return NULL;
    }
    at->reply_bytes = TN__STORE_REPLY_BYTES + bytes;
    at->sent = 0;
    at->deadline_ns = tn__tcp_deadline_ns(MESSAGE_US);
    tn__store_reply_write(&reply, at->reply);
    return at->reply + TN__STORE_REPLY_BYTES;
}

static void answer(tn__store_server *server, connection *at, tn_status status, const void *value,
                   size_t bytes) {
    unsigned char *place = begin_reply(server, at, status, bytes);
    if (place && bytes) memcpy(place, value, bytes);
}

static void answer_text(tn__store_server *server, connection *at, tn_status status,
                        const char *text) {
    answer(server, at, status, text, strlen(text));
}

/* The last error of this thread, as it is recorded. */
static void answer_error(tn__store_server *server, connection *at, tn_status status) {
    answer_text(server, at, status, tn_error_last());
}

/* ---- meetings ------------------------------------------------------------------------------- */

static const void *key_of(const connection *at) { return at->body; }

static tn__store_entry *entry_of(const tn__store_server *server, const connection *at) {
    return tn__store_entries_find(&server->entries, key_of(at), at->request.key_bytes);
}

static void answer_meeting(tn__store_server *server, connection *at, const tn__store_entry *entry) {
    if (entry->broken != TN_OK) {
        answer_text(server, at, entry->broken, entry->text);
        return;
    }
    size_t bytes = tn__store_entry_answer_bytes(entry, server->rank_count);
    unsigned char *place = begin_reply(server, at, TN_OK, bytes);
    if (place) tn__store_entry_answer(entry, server->rank_count, place);
}

/* Everybody who waits for it gets its answer. */
static void end_meeting(tn__store_server *server, tn__store_entry *entry) {
    for (size_t i = 0; i < server->capacity; i++) {
        connection *at = server->connections + i;
        if (at->file < 0 || !at->is_waiting || at->request.operation != TN__STORE_GATHER) continue;
        if (entry_of(server, at) == entry) answer_meeting(server, at, entry);
    }
    if (entry->broken == TN_OK) tn__store_entries_remove(&server->entries, entry);
}

static void break_meeting(tn__store_server *server, tn__store_entry *entry, tn_status status,
                          const char *text) {
    entry->broken = status;
    snprintf(entry->text, sizeof entry->text, "%s", text);
    end_meeting(server, entry);
}

static void say_lost(const tn__store_server *server, int rank, char *text, size_t text_bytes) {
    snprintf(text, text_bytes, "rank %d %s", rank,
             server->ranks[rank] == RANK_LEFT ? "has left" : "is gone: its process has ended");
}

static void break_for_rank(tn__store_server *server, tn__store_entry *entry, int rank) {
    char text[TN__STORE_TEXT_BYTES];
    say_lost(server, rank, text, sizeof text);
    break_meeting(server, entry, TN_COMM_ERROR, text);
}

/* A rank will not come any more. The first one is told whoever asks. */
static void lose_rank(tn__store_server *server, int rank) {
    char text[TN__STORE_TEXT_BYTES];
    for (tn__store_entry *entry = server->entries.first; entry; entry = entry->next)
        if (entry->is_meeting && entry->broken == TN_OK && !entry->values[rank].is_there)
            break_for_rank(server, entry, rank);
    say_lost(server, rank, text, sizeof text);
    (void)tn__store_entries_set(&server->entries, TN__LOST_KEY, strlen(TN__LOST_KEY), text,
                                (uint32_t)strlen(text));
}

static int is_lost(const tn__store_server *server, int rank) {
    return server->ranks[rank] == RANK_LEFT || server->ranks[rank] == RANK_GONE;
}

static void look_at_meeting(tn__store_server *server, tn__store_entry *entry) {
    if (entry->broken != TN_OK || entry->came == server->rank_count) {
        end_meeting(server, entry);
        return;
    }
    for (int rank = 0; rank < server->rank_count; rank++) {
        if (!is_lost(server, rank) || entry->values[rank].is_there) continue;
        break_for_rank(server, entry, rank);
        return;
    }
}

static void wait_is_over(tn__store_server *server, connection *at) {
    char missing[TN__STORE_TEXT_BYTES / 2], text[TN__STORE_TEXT_BYTES];
    if (at->request.operation == TN__STORE_GET) {
        answer_text(server, at, TN_COMM_TIMEOUT, "no rank has set the value");
        return;
    }
    tn__store_entry *entry = entry_of(server, at);
    tn__store_entry_missing(entry, server->rank_count, missing, sizeof missing);
    snprintf(text, sizeof text, "waited %g s for %s", (double)at->request.timeout_us / 1e6,
             missing);
    break_meeting(server, entry, TN_COMM_TIMEOUT, text);
}

/* ---- requests ------------------------------------------------------------------------------- */

static const char *refusal_of(const tn__store_server *server, const tn__store_hello *hello,
                              char *text, size_t text_bytes) {
    if (hello->version != TN__STORE_VERSION)
        snprintf(text, text_bytes, "rank %u speaks version %u of the store, rank 0 version %d",
                 hello->rank, hello->version, TN__STORE_VERSION);
    else if (hello->job != server->job)
        snprintf(text, text_bytes, "rank %u is of another job than rank 0", hello->rank);
    else if (hello->rank_count != (uint32_t)server->rank_count)
        snprintf(text, text_bytes, "rank %u was told of %u ranks, rank 0 of %d", hello->rank,
                 hello->rank_count, server->rank_count);
    else if (hello->rank >= hello->rank_count || hello->channel >= TN__STORE_CHANNELS)
        snprintf(text, text_bytes, "rank %u of %u: there is no such rank", hello->rank,
                 hello->rank_count);
    else
        return NULL;
    return text;
}

static int is_connected(const tn__store_server *server, int rank, int channel) {
    for (size_t i = 0; i < server->capacity; i++) {
        const connection *at = server->connections + i;
        if (at->file >= 0 && at->rank == rank && at->channel == channel) return 1;
    }
    return 0;
}

static void do_hello(tn__store_server *server, connection *at) {
    tn__store_hello hello;
    char text[TN__STORE_TEXT_BYTES];
    tn__store_hello_read(at->body, &hello);
    const char *refusal = refusal_of(server, &hello, text, sizeof text);
    int rank = refusal ? 0 : (int)hello.rank, channel = refusal ? 0 : (int)hello.channel;
    /* A rank that has left comes to the store that will be here next, and tries again. */
    if (!refusal && server->ranks[rank] == RANK_LEFT) {
        close_connection(server, at);
        return;
    }
    if (!refusal && (is_lost(server, rank) || is_connected(server, rank, channel))) {
        snprintf(text, sizeof text,
                 "there has been a rank %d already: two processes have this rank, "
                 "or two jobs this port",
                 rank);
        refusal = text;
    }
    if (refusal) {
        at->ends_when_sent = 1;
        answer_text(server, at, TN_COMM_ERROR, refusal);
        return;
    }
    at->rank = rank;
    at->channel = channel;
    server->ranks[rank] = RANK_PRESENT;
    answer(server, at, TN_OK, NULL, 0);
}

static void answer_waiting_gets(tn__store_server *server) {
    for (size_t i = 0; i < server->capacity; i++) {
        connection *at = server->connections + i;
        if (at->file < 0 || !at->is_waiting || at->request.operation != TN__STORE_GET) continue;
        tn__store_entry *entry = entry_of(server, at);
        if (entry && !entry->is_meeting)
            answer(server, at, TN_OK, entry->values->bytes, entry->values->count);
    }
}

static void do_set(tn__store_server *server, connection *at) {
    const tn__store_request *request = &at->request;
    tn_status status = tn__store_entries_set(&server->entries, key_of(at), request->key_bytes,
                                             at->body + request->key_bytes, request->value_bytes);
    if (status != TN_OK) {
        answer_error(server, at, status);
        return;
    }
    answer(server, at, TN_OK, NULL, 0);
    answer_waiting_gets(server);
}

static void do_gather(tn__store_server *server, connection *at) {
    const tn__store_request *request = &at->request;
    tn__store_entry *entry;
    tn_status status =
        tn__store_entries_come(&server->entries, key_of(at), request->key_bytes, at->rank,
                               at->body + request->key_bytes, request->value_bytes, &entry);
    if (status != TN_OK)
        answer_error(server, at, status);
    else
        look_at_meeting(server, entry);
}

static void do_request(tn__store_server *server, connection *at) {
    at->is_waiting = 1;
    at->deadline_ns = tn__tcp_deadline_ns(at->request.timeout_us);
    if ((at->rank < 0) != (at->request.operation == TN__STORE_HELLO)) {
        close_connection(server, at);
        return;
    }
    switch (at->request.operation) {
    case TN__STORE_HELLO: do_hello(server, at); break;
    case TN__STORE_SET: do_set(server, at); break;
    case TN__STORE_GET: answer_waiting_gets(server); break;
    case TN__STORE_GATHER: do_gather(server, at); break;
    case TN__STORE_BYE:
        server->ranks[at->rank] = RANK_LEFT;
        lose_rank(server, at->rank);
        at->ends_when_sent = 1;
        answer(server, at, TN_OK, NULL, 0);
        break;
    }
}

/* ---- connections ---------------------------------------------------------------------------- */

static void begin_message(connection *at) {
    tn__host_free(at->body);
    tn__host_free(at->reply);
    at->body = at->reply = NULL;
    at->have = 0;
    at->has_header = at->is_waiting = 0;
    at->deadline_ns = at->rank < 0 ? tn__tcp_deadline_ns(MESSAGE_US) : UINT64_MAX;
}

/* Whoever waits for news of failures hears it. */
static void publish_death(tn__store_server *server, int rank) {
    char text[TN__STORE_TEXT_BYTES];
    snprintf(text, sizeof text, "rank %d is gone: its process has ended", rank);
    if (tn__store_entries_set(&server->entries, TN__FAILED_KEY, strlen(TN__FAILED_KEY), text,
                              (uint32_t)strlen(text)) == TN_OK)
        answer_waiting_gets(server);
}

static void close_connection(tn__store_server *server, connection *at) {
    int rank = at->rank;
    begin_message(at);
    tn__tcp_close(&at->file);
    if (rank < 0 || server->ranks[rank] != RANK_PRESENT) return;
    server->ranks[rank] = RANK_GONE;
    lose_rank(server, rank);
    publish_death(server, rank);
}

/* 1 once `count` bytes are there; a connection that is gone is closed. */
static int read_up_to(tn__store_server *server, connection *at, unsigned char *bytes,
                      size_t count) {
    if (at->have == count) return 1;
    ptrdiff_t got = tn__tcp_receive_some(at->file, bytes + at->have, count - at->have);
    if (got < 0) {
        close_connection(server, at);
        return 0;
    }
    /* Who has begun a message ends it soon. */
    if (got && !at->has_header && !at->have) at->deadline_ns = tn__tcp_deadline_ns(MESSAGE_US);
    at->have += (size_t)got;
    return at->have == count;
}

static void read_message(tn__store_server *server, connection *at) {
    if (!at->has_header) {
        if (!read_up_to(server, at, at->header, sizeof at->header)) return;
        if (!tn__store_request_read(at->header, &at->request)) {
            close_connection(server, at);
            return;
        }
        at->has_header = 1;
        at->have = 0;
        at->body = tn__host_alloc(1, (size_t)at->request.key_bytes + at->request.value_bytes + 1);
        if (!at->body) {
            close_connection(server, at);
            return;
        }
    }
    if (read_up_to(server, at, at->body, at->request.key_bytes + at->request.value_bytes))
        do_request(server, at);
}

static void send_reply(tn__store_server *server, connection *at) {
    ptrdiff_t sent = tn__tcp_send_some(at->file, at->reply + at->sent, at->reply_bytes - at->sent);
    if (sent < 0) {
        close_connection(server, at);
        return;
    }
    at->sent += (size_t)sent;
    if (at->sent < at->reply_bytes) return;
    if (at->ends_when_sent)
        close_connection(server, at);
    else
        begin_message(at);
}

/* A free place, else that of the stranger who has been here longest; NULL if all are ranks'. */
static connection *find_place(tn__store_server *server) {
    connection *oldest = NULL;
    size_t strangers = 0;
    for (size_t i = 0; i < server->capacity; i++) {
        connection *at = server->connections + i;
        if (at->file < 0 || at->rank >= 0) continue;
        strangers++;
        if (!oldest || at->age < oldest->age) oldest = at;
    }
    if (strangers >= STRANGERS_MAX) close_connection(server, oldest);
    for (size_t i = 0; i < server->capacity; i++)
        if (server->connections[i].file < 0) return server->connections + i;
    return NULL;
}

static void take_in(tn__store_server *server) {
    int file = tn__tcp_accept(server->listener);
    if (file < 0) {
        if (tn__tcp_is_short_of_files(errno))
            server->accepts_at_ns = tn__tcp_deadline_ns(SHORTAGE_US);
        return;
    }
    connection *at = find_place(server);
    if (!at) {
        tn__tcp_close(&file);
        return;
    }
    memset(at, 0, sizeof *at);
    at->file = file;
    at->rank = -1;
    at->age = server->arrivals++;
    begin_message(at);
}

/* ---- the thread ----------------------------------------------------------------------------- */

/* While it waits, a connection has nothing to say: bytes then, or its end, are the end of it. */
static void serve(tn__store_server *server, connection *at, short events) {
    if (at->file < 0) return;
    if (at->is_waiting) {
        if (events)
            close_connection(server, at);
        else if (tn__tcp_now_ns() >= at->deadline_ns)
            wait_is_over(server, at);
        return;
    }
    if (events && at->reply)
        send_reply(server, at);
    else if (events)
        read_message(server, at);
    if (at->file >= 0 && !at->is_waiting && tn__tcp_now_ns() >= at->deadline_ns)
        close_connection(server, at);
}

/* Returns the nearest deadline. */
static uint64_t prepare(tn__store_server *server) {
    uint64_t nearest = atomic_load(&server->end_ns) ? atomic_load(&server->end_ns) : UINT64_MAX;
    for (size_t i = 0; i < server->capacity; i++) {
        const connection *at = server->connections + i;
        server->polls[i] = (struct pollfd){.fd = at->file, .events = at->reply ? POLLOUT : POLLIN};
        if (at->file >= 0 && at->deadline_ns < nearest) nearest = at->deadline_ns;
    }
    int accepts = tn__tcp_now_ns() >= server->accepts_at_ns;
    if (!accepts && server->accepts_at_ns < nearest) nearest = server->accepts_at_ns;
    server->polls[server->capacity] =
        (struct pollfd){.fd = accepts ? server->listener : -1, .events = POLLIN};
    server->polls[server->capacity + 1] = (struct pollfd){.fd = server->wake, .events = POLLIN};
    return nearest;
}

static int all_have_left(const tn__store_server *server) {
    for (size_t i = 0; i < server->capacity; i++)
        if (server->connections[i].file >= 0 && server->connections[i].rank >= 0) return 0;
    return 1;
}

static int is_over(tn__store_server *server) {
    uint64_t end_ns = atomic_load(&server->end_ns), seen;
    if (!end_ns) return 0;
    ssize_t bytes = read(server->wake, &seen, sizeof seen);
    (void)bytes;
    return all_have_left(server) || tn__tcp_now_ns() >= end_ns;
}

/* To everybody who is not in the middle of an answer. */
static void say_farewell(tn__store_server *server) {
    const tn__store_reply farewell = {.status = TN__STORE_FAREWELL};
    unsigned char bytes[TN__STORE_REPLY_BYTES];
    tn__store_reply_write(&farewell, bytes);
    for (size_t i = 0; i < server->capacity; i++) {
        const connection *at = server->connections + i;
        if (at->file >= 0 && at->rank >= 0 && !at->reply)
            (void)tn__tcp_send(at->file, bytes, sizeof bytes, 0);
    }
}

static void *run(void *argument) {
    tn__store_server *server = argument;
    while (!is_over(server)) {
        uint64_t nearest = prepare(server);
        if (poll(server->polls, server->capacity + 2, tn__tcp_poll_ms(nearest)) < 0) {
            if (errno != EINTR) (void)poll(NULL, 0, SHORTAGE_US / 1000); /* the kernel's memory */
            continue;
        }
        for (size_t i = 0; i < server->capacity; i++)
            serve(server, server->connections + i, server->polls[i].revents);
        if (server->polls[server->capacity].revents) take_in(server);
    }
    say_farewell(server);
    return NULL;
}

/* ---- begin and end -------------------------------------------------------------------------- */

static void free_server(tn__store_server *server) {
    for (size_t i = 0; server->connections && i < server->capacity; i++) {
        begin_message(server->connections + i);
        tn__tcp_close(&server->connections[i].file);
    }
    tn__store_entries_free(&server->entries);
    tn__tcp_close(&server->wake);
    tn__host_free(server->ranks);
    tn__host_free(server->connections);
    tn__host_free(server->polls);
    tn__host_free(server);
}

static tn_status make_tables(tn__store_server *server) {
    size_t ranks = (size_t)server->rank_count;
    server->capacity = ranks * TN__STORE_CHANNELS + STRANGERS_MAX;
    server->ranks = tn__host_alloc(ranks, sizeof *server->ranks);
    server->connections = tn__host_alloc(server->capacity, sizeof *server->connections);
    server->polls = tn__host_alloc(server->capacity + 2, sizeof *server->polls);
    if (!server->ranks || !server->connections || !server->polls) return TN_OUT_OF_HOST_MEMORY;
    for (size_t i = 0; i < server->capacity; i++)
        server->connections[i].file = -1;
    return TN_OK;
}

/* The program's signals are for its own threads. */
static tn_status start_thread(tn__store_server *server) {
    sigset_t all, before;
    server->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (server->wake < 0) return TN_FAIL(TN_COMM_ERROR, "no event file for the store's thread");
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&server->thread, NULL, run, server);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code)
        return TN_FAIL_NATIVE(TN_OUT_OF_HOST_MEMORY, code, "no thread for the store of the ranks");
    pthread_setname_np(server->thread, "tenure-store");
    return TN_OK;
}

tn_status tn__store_server_begin(int listener, int rank_count, uint64_t job,
                                 tn__store_server **out) {
    tn__store_server *server = tn__host_alloc(1, sizeof *server);
    if (!server) return TN_OUT_OF_HOST_MEMORY;
    server->listener = listener;
    server->wake = -1;
    server->rank_count = server->entries.rank_count = rank_count;
    server->job = job;
    tn_status status = make_tables(server);
    if (status == TN_OK)
        status = tn__tcp_reserve_files(server->capacity + 2, "the store of the ranks");
    if (status == TN_OK) status = start_thread(server);
    if (status != TN_OK) {
        free_server(server);
        return status;
    }
    *out = server;
    return TN_OK;
}

void tn__store_server_end(tn__store_server *server, uint64_t deadline_ns) {
    uint64_t one = 1;
    if (!server) return;
    atomic_store(&server->end_ns, deadline_ns ? deadline_ns : 1);
    ssize_t bytes = write(server->wake, &one, sizeof one);
    (void)bytes;
    pthread_join(server->thread, NULL);
    tn__tcp_close(&server->listener);
    free_server(server);
}
