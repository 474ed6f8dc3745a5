/* What goes over a connection to the store of the ranks: requests and replies, checked.
 *
 *     request   | magic | operation | key bytes | value bytes | timeout |  key  value
 *     reply     | magic | status    | bytes     |                         value, or a text
 *
 * Numbers are little-endian. A connection begins with HELLO, whose value says who it is of; each
 * request is answered before the next is sent. Whatever was asked, or if nothing was, the last
 * reply is FAREWELL where rank 0 leaves in good order: a connection that ends without it is of a
 * rank 0 that has died. Nothing here depends on what the bytes are but by
 * what tn__store_request_read accepts, so that any bytes from anybody are a request within these
 * bounds or the end of the connection.
 */
#ifndef TENURE_TCP_STORE_WIRE_H
#define TENURE_TCP_STORE_WIRE_H

#include "error.h"

enum {
    TN__STORE_REQUEST_BYTES = 24,
    TN__STORE_REPLY_BYTES = 12,
    TN__STORE_HELLO_BYTES = 24,
    TN__STORE_KEY_MAX = 200,
    TN__STORE_VALUE_MAX = 4096 + 64, /* a public meeting, and what is told with it */
    TN__STORE_REPLY_MAX = 64 << 20,  /* a gather of TN__STORE_RANKS_MAX values */
    TN__STORE_RANKS_MAX = 8192,
    TN__STORE_CHANNELS = 2, /* connections of one rank */
    TN__STORE_VERSION = 2
};

/* The key of the text of the job's first failure, which the store itself sets if a rank dies. */
#define TN__FAILED_KEY "failed"
/* What the store sets once a rank has left, or is gone: its words. */
#define TN__LOST_KEY "lost"

typedef enum tn__store_operation {
    TN__STORE_HELLO = 1,
    TN__STORE_SET,    /* a key's value, for good; the same value again is fine */
    TN__STORE_GET,    /* a key's value, as soon as there is one */
    TN__STORE_GATHER, /* every rank's value of this key, in the order of ranks: a meeting */
    TN__STORE_BYE     /* this connection is about to end, and that is all right */
} tn__store_operation;

typedef struct tn__store_request {
    tn__store_operation operation;
    uint32_t key_bytes;
    uint32_t value_bytes;
    uint64_t timeout_us; /* of GET and GATHER */
} tn__store_request;

/* In place of a status, and without a value. */
#define TN__STORE_FAREWELL ((uint32_t)TN_STATUS_COUNT)

typedef struct tn__store_reply {
    uint32_t status; /* a tn_status, or FAREWELL */
    uint32_t bytes;
} tn__store_reply;

typedef struct tn__store_hello {
    uint32_t version;
    uint32_t rank;
    uint32_t rank_count;
    uint32_t channel;
    uint64_t job; /* whoever has another number is of another job */
} tn__store_hello;

void tn__store_request_write(const tn__store_request *request,
                             unsigned char bytes[TN__STORE_REQUEST_BYTES]);
/* 1, or 0: not a request of ours, or beyond a bound. */
int tn__store_request_read(const unsigned char bytes[TN__STORE_REQUEST_BYTES],
                           tn__store_request *out);

void tn__store_reply_write(const tn__store_reply *reply,
                           unsigned char bytes[TN__STORE_REPLY_BYTES]);
/* 0 also for a status that there is not. */
int tn__store_reply_read(const unsigned char bytes[TN__STORE_REPLY_BYTES], tn__store_reply *out);

void tn__store_hello_write(const tn__store_hello *hello,
                           unsigned char bytes[TN__STORE_HELLO_BYTES]);
void tn__store_hello_read(const unsigned char bytes[TN__STORE_HELLO_BYTES], tn__store_hello *out);

#endif
