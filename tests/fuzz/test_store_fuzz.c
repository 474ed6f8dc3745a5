/* Strangers at the port of the ranks' store: whatever they send, and however they cut it up, the
 * store serves its ranks, holds no more than its bounds and ends.
 *
 * Each stranger is made by the seed and its own number alone, so a failure is replayed by
 * TENURE_FUZZ_SEED=S TENURE_FUZZ_FIRST=N, which it prints. Run under ASan and UBSan by the asan
 * preset.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "host_alloc.h"
#include "tcp_socket.h"
#include "tcp_store.h"
#include "tcp_store_server.h"
#include "fuzz_support.h"

enum { STRANGERS = 1500, PER_STORE = 100, BYTES_MAX = 8192, JOB = 77, LONG_US = 60 * 1000 * 1000 };

static uint32_t random_below(uint64_t *state, uint32_t bound) {
    return (uint32_t)fuzz_below(state, bound);
}

/* ---- the bytes of a stranger ---------------------------------------------------------------- */

/* Sizes at, and about, every bound. */
static uint32_t random_size(uint64_t *state) {
    static const uint32_t bounds[] = {
        0, 1, 24, TN__STORE_KEY_MAX, TN__STORE_VALUE_MAX, 65536, 0x7FFFFFFF, 0xFFFFFFFF};
    return bounds[random_below(state, 8)] + random_below(state, 3) - 1;
}

static size_t add_hello(uint64_t *state, unsigned char *at) {
    tn__store_hello hello = {.version = TN__STORE_VERSION + (random_below(state, 8) == 0),
                             .rank = random_below(state, 4) ? 1 : random_size(state),
                             .rank_count = 2 + (random_below(state, 8) == 0),
                             .channel = random_below(state, 3),
                             .job = JOB + (random_below(state, 4) == 0)};
    tn__store_request request = {.operation = TN__STORE_HELLO,
                                 .value_bytes = TN__STORE_HELLO_BYTES};
    tn__store_request_write(&request, at);
    tn__store_hello_write(&hello, at + TN__STORE_REQUEST_BYTES);
    return TN__STORE_REQUEST_BYTES + TN__STORE_HELLO_BYTES;
}

static size_t add_request(uint64_t *state, unsigned char *at, size_t room) {
    tn__store_request request = {
        .operation = (tn__store_operation)random_below(state, 8),
        .key_bytes = random_below(state, 2) ? random_below(state, 4) : random_size(state),
        .value_bytes = random_below(state, 2) ? random_below(state, 9) : random_size(state),
        .timeout_us = random_below(state, 2) ? random_below(state, 1000) : fuzz_next(state)};
    size_t body = (size_t)request.key_bytes + request.value_bytes;
    tn__store_request_write(&request, at);
    if (body > room - TN__STORE_REQUEST_BYTES) body = room - TN__STORE_REQUEST_BYTES;
    memset(at + TN__STORE_REQUEST_BYTES, 'k', body);
    return TN__STORE_REQUEST_BYTES + body;
}

static size_t make_bytes(uint64_t *state, unsigned char *bytes) {
    size_t used = random_below(state, 4) ? add_hello(state, bytes) : 0;
    for (uint32_t i = random_below(state, 4); i; i--)
        used += add_request(state, bytes + used, BYTES_MAX / 4);
    for (uint32_t i = random_below(state, 3); i && used; i--)
        bytes[random_below(state, (uint32_t)used)] = (unsigned char)fuzz_next(state);
    if (random_below(state, 4) == 0) used = random_below(state, (uint32_t)used + 1);
    return used;
}

/* In pieces; then it hangs up, or stays connected for as long as its place lasts. */
static void visit(const tn__tcp_address *where, uint64_t number, uint64_t seed, int *stays) {
    unsigned char bytes[BYTES_MAX];
    uint64_t state = seed ^ number * UINT64_C(0x5851F42D4C957F2D);
    size_t count = make_bytes(&state, bytes), at = 0;
    int file = -1;
    assert_int_equal(tn__tcp_connect(where, tn__tcp_deadline_ns(LONG_US), &file), TN__TCP_DONE);
    while (at < count) {
        size_t piece = 1 + random_below(&state, 64);
        if (piece > count - at) piece = count - at;
        if (tn__tcp_send(file, bytes + at, piece, tn__tcp_deadline_ns(LONG_US)) != TN__TCP_DONE)
            break;
        at += piece;
    }
    tn__tcp_close(stays);
    *stays = file;
    if (random_below(&state, 2)) tn__tcp_close(stays);
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void serve_on(tn__tcp_address *where, tn__store_server **server) {
    int listener = -1;
    EXPECT_OK(tn__tcp_listen(0, &listener));
    EXPECT_OK(tn__tcp_reachable(listener, listener, where));
    memset(where->bytes, 0, sizeof where->bytes);
    where->bytes[10] = where->bytes[11] = 0xFF;
    where->bytes[12] = 127, where->bytes[15] = 1;
    EXPECT_OK(tn__store_server_begin(listener, 2, JOB, server));
}

/* A rank uses the store while the stranger does what it does. */
static void expect_service(tn__store *store, uint64_t number, uint64_t seed) {
    char key[32] = "", value[32] = "";
    size_t bytes = 0;
    snprintf(key, sizeof key, "key %llu", (unsigned long long)number);
    tn_status status = tn__store_set(store, key, key, sizeof key);
    if (status == TN_OK) status = tn__store_get(store, key, LONG_US, value, sizeof value, &bytes);
    if (status != TN_OK || strcmp(key, value) != 0)
        printf("replay: TENURE_FUZZ_SEED=%llu TENURE_FUZZ_FIRST=%llu\n", (unsigned long long)seed,
               (unsigned long long)(number - number % PER_STORE));
    EXPECT_OK(status);
    assert_string_equal(key, value);
}

/* A store of two ranks, the second of which the strangers may be: for once in its life. */
static void strangers_visit(uint64_t first, uint64_t seed) {
    tn__store_hello hello = {.version = TN__STORE_VERSION, .rank_count = 2, .job = JOB};
    tn__store_server *server = NULL;
    tn__store *store = NULL;
    tn__tcp_address where;
    int stays[PER_STORE];
    for (int i = 0; i < PER_STORE; i++)
        stays[i] = -1;
    serve_on(&where, &server);
    EXPECT_OK(tn__store_open("127.0.0.1", where.port, &hello, LONG_US, &store));
    for (uint64_t i = 0; i < PER_STORE; i++) {
        visit(&where, first + i, seed, &stays[i]);
        expect_service(store, first + i, seed);
    }
    for (int i = 0; i < PER_STORE; i++)
        tn__tcp_close(&stays[i]);
    tn__store_close(store);
    tn__store_server_end(server, 0);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void strangers_do_not_disturb_the_ranks(void **unused) {
    (void)unused;
    uint64_t seed = fuzz_setting("TENURE_FUZZ_SEED", 1),
             first = fuzz_setting("TENURE_FUZZ_FIRST", 0);
    for (uint64_t number = first; number < first + STRANGERS; number += PER_STORE)
        strangers_visit(number, seed);
}

static void what_is_read_is_within_the_bounds(void **unused) {
    (void)unused;
    enum { HEADERS = 200000 };
    uint64_t state = fuzz_setting("TENURE_FUZZ_SEED", 1);
    int accepted = 0;
    for (int i = 0; i < HEADERS; i++) {
        unsigned char bytes[TN__STORE_REQUEST_BYTES + TN__STORE_HELLO_BYTES + BYTES_MAX];
        tn__store_request request;
        (void)add_request(&state, bytes, sizeof bytes);
        if (random_below(&state, 2))
            bytes[random_below(&state, 16)] ^= 1u << random_below(&state, 8);
        if (!tn__store_request_read(bytes, &request)) continue;
        accepted++;
        assert_true(request.key_bytes <= TN__STORE_KEY_MAX);
        assert_true(request.value_bytes <= TN__STORE_VALUE_MAX);
        assert_in_range(request.operation, TN__STORE_HELLO, TN__STORE_BYE);
    }
    assert_in_range(accepted, HEADERS / 50, HEADERS / 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strangers_do_not_disturb_the_ranks),
        cmocka_unit_test(what_is_read_is_within_the_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
