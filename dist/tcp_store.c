/* A rank's end of the store: see tcp_store.h. */
#include "tcp_store.h"

#include <poll.h>
#include <pthread.h>
#include <string.h>

#include "host_alloc.h"
#include "tcp_socket.h"

enum { GRACE_US = 10 * 1000 * 1000, COUNT_BYTES = 4, TEXT_BYTES = 512, AGAIN_MS = 20 };

/* Threads get their turns in the order in which they came: one that waits for news again and again
 * does not keep another from publishing some. */
struct tn__store {
    pthread_mutex_t lock;
    pthread_cond_t turn_ended;
    uint64_t turns_taken; /* under lock */
    uint64_t turn;        /* whose it is: of the next exchange */
    int file;
    int rank_count;
    tn__store_end end;
};

/* ---- one request ---------------------------------------------------------------------------- */

/* What a request sends and what came back. */
typedef struct exchange {
    tn__store_request request;
    const char *key;
    const void *value;
    tn_status status;
    int is_closed;         /* the connection ended before there was an answer */
    unsigned char *answer; /* the caller frees it */
    size_t answer_bytes;
} exchange;

static tn_status lost(tn__store *store, tn__tcp_end end) {
    tn__tcp_close(&store->file);
    store->end = end == TN__TCP_LATE ? TN__STORE_SILENT : TN__STORE_DIED;
    return end == TN__TCP_LATE
               ? TN_FAIL(TN_COMM_TIMEOUT, "the store of the ranks (rank 0) does not answer")
               : TN_FAIL(TN_COMM_ERROR, "the store of the ranks (rank 0) is gone");
}

static tn__tcp_end send_request(const tn__store *store, const exchange *with, uint64_t deadline) {
    unsigned char bytes[TN__STORE_REQUEST_BYTES + TN__STORE_KEY_MAX + TN__STORE_VALUE_MAX];
    size_t key_bytes = with->request.key_bytes, value_bytes = with->request.value_bytes;
    unsigned char *at = bytes + TN__STORE_REQUEST_BYTES;
    tn__store_request_write(&with->request, bytes);
    if (key_bytes) memcpy(at, with->key, key_bytes);
    if (value_bytes) memcpy(at + key_bytes, with->value, value_bytes);
    return tn__tcp_send(store->file, bytes, TN__STORE_REQUEST_BYTES + key_bytes + value_bytes,
                        deadline);
}

static tn_status receive_reply(tn__store *store, exchange *with, uint64_t deadline) {
    unsigned char bytes[TN__STORE_REPLY_BYTES];
    tn__store_reply reply;
    tn__tcp_end end = tn__tcp_receive(store->file, bytes, sizeof bytes, deadline);
    with->is_closed = end == TN__TCP_CLOSED;
    if (end != TN__TCP_DONE) return lost(store, end);
    if (!tn__store_reply_read(bytes, &reply)) {
        tn__tcp_close(&store->file);
        return TN_FAIL(TN_COMM_ERROR, "what answers on the port of the store is no store of ranks");
    }
    if (reply.status == TN__STORE_FAREWELL) {
        tn__tcp_close(&store->file);
        store->end = TN__STORE_LEFT;
        return TN_FAIL(TN_COMM_ERROR, "rank 0 has left, and the store of the ranks with it");
    }
    with->answer = tn__host_alloc(1, (size_t)reply.bytes + 1); /* texts end with a 0 */
    if (!with->answer) {
        tn__tcp_close(&store->file); /* the rest of the answer would be taken for the next */
        return TN_OUT_OF_HOST_MEMORY;
    }
    end = tn__tcp_receive(store->file, with->answer, reply.bytes, deadline);
    if (end != TN__TCP_DONE) return lost(store, end);
    with->status = (tn_status)reply.status;
    with->answer_bytes = reply.bytes;
    return TN_OK;
}

/* Something has come that nobody asked for: rank 0's farewell, or the end of the connection. */
static int has_word(const tn__store *store) {
    struct pollfd one = {.fd = store->file, .events = POLLIN};
    return poll(&one, 1, 0) > 0;
}

static tn_status exchange_in_turn(tn__store *store, exchange *with) {
    uint64_t timeout_us = with->request.timeout_us;
    uint64_t wait_us = timeout_us < UINT64_MAX - GRACE_US ? timeout_us + GRACE_US : UINT64_MAX;
    uint64_t deadline = tn__tcp_deadline_ns(wait_us);
    if (store->file < 0) return TN_FAIL(TN_COMM_ERROR, "the store of the ranks (rank 0) is gone");
    if (!has_word(store)) {
        tn__tcp_end end = send_request(store, with, deadline);
        with->is_closed = end == TN__TCP_CLOSED;
        if (end != TN__TCP_DONE) return lost(store, end);
    }
    TN_TRY(receive_reply(store, with, deadline));
    if (with->status == TN_OK) return TN_OK;
    return TN_FAIL(with->status, "%.*s", TEXT_BYTES, (const char *)with->answer);
}

static tn_status ask(tn__store *store, exchange *with) {
    pthread_mutex_lock(&store->lock);
    const uint64_t mine = store->turns_taken++;
    while (store->turn != mine)
        pthread_cond_wait(&store->turn_ended, &store->lock);
    pthread_mutex_unlock(&store->lock);
    tn_status status = exchange_in_turn(store, with);
    pthread_mutex_lock(&store->lock);
    store->turn++;
    pthread_cond_broadcast(&store->turn_ended);
    pthread_mutex_unlock(&store->lock);
    return status;
}

static exchange make_exchange(tn__store_operation operation, const char *key, const void *value,
                              size_t bytes, uint64_t timeout_us) {
    exchange with = {.key = key, .value = value};
    with.request.operation = operation;
    with.request.key_bytes = key ? (uint32_t)strlen(key) : 0;
    with.request.value_bytes = (uint32_t)bytes;
    with.request.timeout_us = timeout_us;
    TN_ASSERT(with.request.key_bytes <= TN__STORE_KEY_MAX);
    TN_ASSERT(bytes <= TN__STORE_VALUE_MAX);
    return with;
}

/* ---- the calls ------------------------------------------------------------------------------ */

static tn_status say_hello(tn__store *store, const tn__store_hello *hello, int *is_closed) {
    unsigned char bytes[TN__STORE_HELLO_BYTES];
    tn__store_hello_write(hello, bytes);
    exchange with = make_exchange(TN__STORE_HELLO, NULL, bytes, sizeof bytes, 0);
    tn_status status = ask(store, &with);
    *is_closed = with.is_closed;
    tn__host_free(with.answer);
    return status;
}

/* A store that this rank has left, and that is there for others for a while, closes without a
 * word: the next one will be on its port. */
static tn_status connect_store(tn__store *store, const char *host, unsigned port,
                               const tn__store_hello *hello, uint64_t deadline_ns) {
    for (;;) {
        int is_closed = 0;
        TN_TRY(tn__tcp_connect_host(host, port, deadline_ns, &store->file));
        tn_status status = say_hello(store, hello, &is_closed);
        if (status == TN_OK || !is_closed || tn__tcp_now_ns() >= deadline_ns) return status;
        (void)poll(NULL, 0, AGAIN_MS);
    }
}

tn_status tn__store_open(const char *host, unsigned port, const tn__store_hello *hello,
                         uint64_t timeout_us, tn__store **out) {
    tn__store *store = tn__host_alloc(1, sizeof *store);
    if (!store) return TN_OUT_OF_HOST_MEMORY;
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->turn_ended, NULL);
    store->file = -1;
    store->rank_count = (int)hello->rank_count;
    tn_status status = connect_store(store, host, port, hello, tn__tcp_deadline_ns(timeout_us));
    if (status != TN_OK) {
        tn__tcp_close(&store->file);
        tn__store_close(store);
        return status;
    }
    *out = store;
    return TN_OK;
}

void tn__store_close(tn__store *store) {
    if (!store) return;
    exchange with = make_exchange(TN__STORE_BYE, NULL, NULL, 0, 0);
    tn__saved_error saved;
    tn__error_save(&saved);
    if (store->file >= 0) (void)ask(store, &with);
    tn__error_restore(&saved);
    tn__host_free(with.answer);
    tn__tcp_close(&store->file);
    pthread_cond_destroy(&store->turn_ended);
    pthread_mutex_destroy(&store->lock);
    tn__host_free(store);
}

tn_status tn__store_set(tn__store *store, const char *key, const void *value, size_t bytes) {
    exchange with = make_exchange(TN__STORE_SET, key, value, bytes, 0);
    tn_status status = ask(store, &with);
    tn__host_free(with.answer);
    return status;
}

tn_status tn__store_get(tn__store *store, const char *key, uint64_t timeout_us, void *value,
                        size_t room, size_t *bytes) {
    exchange with = make_exchange(TN__STORE_GET, key, NULL, 0, timeout_us);
    tn_status status = ask(store, &with);
    if (status == TN_OK) {
        const size_t written = with.answer_bytes < room ? with.answer_bytes : room;
        *bytes = with.answer_bytes;
        if (written) memcpy(value, with.answer, written);
    }
    tn__host_free(with.answer);
    return status;
}

static size_t count_at(const unsigned char *bytes) {
    return (size_t)bytes[0] | (size_t)bytes[1] << 8 | (size_t)bytes[2] << 16 |
           (size_t)bytes[3] << 24;
}

/* The answer's values, each of which must have `bytes`. */
static tn_status take_apart(const tn__store *store, const exchange *with, size_t bytes, void *all) {
    const unsigned char *at = with->answer, *end = at + with->answer_bytes;
    for (int rank = 0; rank < store->rank_count; rank++) {
        if ((size_t)(end - at) < COUNT_BYTES || count_at(at) > (size_t)(end - at) - COUNT_BYTES)
            return TN_FAIL(TN_COMM_ERROR, "the answer of the store of the ranks is cut off");
        if (count_at(at) != bytes)
            return TN_FAIL(TN_COMM_ERROR,
                           "rank %d brought %zu bytes to a meeting of %zu bytes a rank: all ranks "
                           "make the same calls in the same order, with the same library",
                           rank, count_at(at), bytes);
        if (bytes) memcpy((char *)all + (size_t)rank * bytes, at + COUNT_BYTES, bytes);
        at += COUNT_BYTES + bytes;
    }
    return TN_OK;
}

tn_status tn__store_gather(tn__store *store, const char *key, const void *mine, size_t bytes,
                           void *all, uint64_t timeout_us) {
    exchange with = make_exchange(TN__STORE_GATHER, key, mine, bytes, timeout_us);
    tn_status status = ask(store, &with);
    if (status == TN_OK) status = take_apart(store, &with, bytes, all);
    tn__host_free(with.answer);
    return status;
}

tn__store_end tn__store_end_get(tn__store *store) {
    pthread_mutex_lock(&store->lock);
    tn__store_end end = store->end;
    pthread_mutex_unlock(&store->lock);
    return end;
}

int tn__store_file(const tn__store *store) { return store->file; }
