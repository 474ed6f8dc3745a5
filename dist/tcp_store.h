/* A rank's connection to the store of the ranks (tcp_store_server.h).
 *
 * One request at a time: threads take turns, and a wait in GET or GATHER holds the others up. Each
 * call ends within its timeout, and a little for the way there and back. A connection whose server
 * is gone or talks nonsense has failed for good, and says so from then on.
 */
#ifndef TENURE_TCP_STORE_H
#define TENURE_TCP_STORE_H

#include "error.h"
#include "tcp_store_wire.h"

typedef struct tn__store tn__store;

/* Connects within the timeout and says hello, again if the connection is closed without an answer.
 * TN_COMM_TIMEOUT: nobody serves there. TN_COMM_ERROR: refused, with the server's words. */
tn_status tn__store_open(const char *host, unsigned port, const tn__store_hello *hello,
                         uint64_t timeout_us, tn__store **out);

/* Leaves. NULL is a no-op. */
void tn__store_close(tn__store *store);

/* At most TN__STORE_VALUE_MAX bytes; a key has at most TN__STORE_KEY_MAX. */
tn_status tn__store_set(tn__store *store, const char *key, const void *value, size_t bytes);

/* Waits for the value; *bytes is what it has, of which `room` are written at most (0: value may be
 * NULL). */
tn_status tn__store_get(tn__store *store, const char *key, uint64_t timeout_us, void *value,
                        size_t room, size_t *bytes);

/* all = every rank's `bytes` in the order of ranks. TN_COMM_TIMEOUT names the ranks that have not
 * come, TN_COMM_ERROR one that is gone, or whose value is of another size. */
tn_status tn__store_gather(tn__store *store, const char *key, const void *mine, size_t bytes,
                           void *all, uint64_t timeout_us);

/* Whether the store is still there, as far as the calls have shown. */
typedef enum tn__store_end {
    TN__STORE_SERVES,
    TN__STORE_LEFT,  /* rank 0 has left in good order */
    TN__STORE_DIED,  /* rank 0's process has ended without a word */
    TN__STORE_SILENT /* it has not answered in time */
} tn__store_end;
tn__store_end tn__store_end_get(tn__store *store);

/* The socket, for its addresses. */
int tn__store_file(const tn__store *store);

#endif
