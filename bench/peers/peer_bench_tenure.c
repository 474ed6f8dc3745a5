/* Tenure among the peers: one pool of the ordinary kind, nothing tuned. */
#include <stdio.h>
#include <stdlib.h>

#include "peer_bench.h"

static tn_device *device;
static tn_pool *pool;

void peer_require(tn_status status, const char *call) {
    if (status == TN_OK) return;
    fprintf(stderr, "tenure-bench-peers: %s: %s: %s\n", call, tn_status_name(status),
            tn_error_last());
    exit(1);
}

static void open_pool(void) { PEER_TRY(tn_pool_create(device, NULL, &pool)); }

static void close_pool(void) {
    PEER_TRY(tn_pool_destroy(pool));
    pool = NULL;
}

static void enter_thread(void) {}

static void *allocate(size_t bytes, void *stream) {
    void *block = NULL;
    PEER_TRY(tn_alloc(pool, bytes, stream, NULL, &block));
    return block;
}

static void release(void *block, size_t bytes, void *stream) {
    (void)bytes;
    PEER_TRY(tn_free(block, stream));
}

static void use_across(size_t bytes, void *owner, void *user) {
    void *block = NULL;
    PEER_TRY(tn_alloc(pool, bytes, owner, NULL, &block));
    PEER_TRY(tn_record_use(block, user));
    PEER_TRY(tn_free(block, owner));
}

static void trim(void) { PEER_TRY(tn_pool_trim(pool, 0, NULL)); }

const peer_allocator *peer_tenure(tn_device *of_device) {
    static const peer_allocator allocator = {
        .name = "tenure",
        .open = open_pool,
        .close = close_pool,
        .enter_thread = enter_thread,
        .alloc = allocate,
        .free = release,
        .use_across = use_across,
        .trim = trim,
    };
    device = of_device;
    return &allocator;
}
