/* Requests and replies of the store as bytes: see tcp_store_wire.h. */
#include "tcp_store_wire.h"

#define MAGIC 0x52534E54u /* "TNSR" */

static void put_number(unsigned char *bytes, uint64_t number, int count) {
    for (int i = 0; i < count; i++)
        bytes[i] = (unsigned char)(number >> 8 * i);
}

static uint64_t get_number(const unsigned char *bytes, int count) {
    uint64_t number = 0;
    for (int i = 0; i < count; i++)
        number |= (uint64_t)bytes[i] << 8 * i;
    return number;
}

static uint32_t get_32(const unsigned char *bytes) { return (uint32_t)get_number(bytes, 4); }

void tn__store_request_write(const tn__store_request *request,
                             unsigned char bytes[TN__STORE_REQUEST_BYTES]) {
    put_number(bytes, MAGIC, 4);
    put_number(bytes + 4, (uint64_t)request->operation, 4);
    put_number(bytes + 8, request->key_bytes, 4);
    put_number(bytes + 12, request->value_bytes, 4);
    put_number(bytes + 16, request->timeout_us, 8);
}

/* HELLO and BYE have no key, the others one; HELLO's value has one size. */
static int sizes_fit(const tn__store_request *request) {
    int has_key = request->key_bytes > 0;
    if (request->key_bytes > TN__STORE_KEY_MAX || request->value_bytes > TN__STORE_VALUE_MAX)
        return 0;
    switch (request->operation) {
    case TN__STORE_HELLO: return !has_key && request->value_bytes == TN__STORE_HELLO_BYTES;
    case TN__STORE_BYE: return !has_key && !request->value_bytes;
    case TN__STORE_GET: return has_key && !request->value_bytes;
    default: return has_key;
    }
}

int tn__store_request_read(const unsigned char bytes[TN__STORE_REQUEST_BYTES],
                           tn__store_request *out) {
    uint32_t operation = get_32(bytes + 4);
    if (get_32(bytes) != MAGIC || operation < TN__STORE_HELLO || operation > TN__STORE_BYE)
        return 0;
    out->operation = (tn__store_operation)operation;
    out->key_bytes = get_32(bytes + 8);
    out->value_bytes = get_32(bytes + 12);
    out->timeout_us = get_number(bytes + 16, 8);
    return sizes_fit(out);
}

void tn__store_reply_write(const tn__store_reply *reply,
                           unsigned char bytes[TN__STORE_REPLY_BYTES]) {
    put_number(bytes, MAGIC, 4);
    put_number(bytes + 4, reply->status, 4);
    put_number(bytes + 8, reply->bytes, 4);
}

int tn__store_reply_read(const unsigned char bytes[TN__STORE_REPLY_BYTES], tn__store_reply *out) {
    out->status = get_32(bytes + 4);
    out->bytes = get_32(bytes + 8);
    if (get_32(bytes) != MAGIC) return 0;
    if (out->status == TN__STORE_FAREWELL) return out->bytes == 0;
    return out->status < TN_STATUS_COUNT && out->bytes <= TN__STORE_REPLY_MAX;
}

void tn__store_hello_write(const tn__store_hello *hello,
                           unsigned char bytes[TN__STORE_HELLO_BYTES]) {
    put_number(bytes, hello->version, 4);
    put_number(bytes + 4, hello->rank, 4);
    put_number(bytes + 8, hello->rank_count, 4);
    put_number(bytes + 12, hello->channel, 4);
    put_number(bytes + 16, hello->job, 8);
}

void tn__store_hello_read(const unsigned char bytes[TN__STORE_HELLO_BYTES], tn__store_hello *out) {
    out->version = get_32(bytes);
    out->rank = get_32(bytes + 4);
    out->rank_count = get_32(bytes + 8);
    out->channel = get_32(bytes + 12);
    out->job = get_number(bytes + 16, 8);
}
