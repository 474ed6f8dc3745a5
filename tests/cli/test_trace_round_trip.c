/* What a pool writes down, the replay plays: the same events, peaks and rest. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "replay_engine.h"
#include "test_support.h"

enum { BLOCKS = 300, STREAMS = 3 };

typedef struct recording {
    uint64_t events;
    uint64_t peak_live_bytes;
    uint64_t live_bytes;
} recording;

/* Allocates 300 blocks on three streams and frees all but every seventh, some on another stream;
 * the trace ends before the rest is freed. */
static recording record(const char *path) {
    tn_device *device = test_open_host();
    tn_pool *pool = NULL;
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn_stream streams[STREAMS];
    void *blocks[BLOCKS];
    EXPECT_OK(tn_pool_create(device, &config, &pool));
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_create(device, &streams[i]));
    EXPECT_OK(tn_pool_trace_begin(pool, path));
    for (int i = 0; i < BLOCKS; i++) {
        size_t bytes = (size_t)(i + 1) * 1000;
        EXPECT_OK(tn_alloc(pool, bytes, streams[i % STREAMS], NULL, &blocks[i]));
        if (i % 7 == 0) continue;
        tn_stream stream = streams[i % 2 ? i % STREAMS : (i + 1) % STREAMS];
        EXPECT_OK(tn_free(blocks[i], stream));
    }
    EXPECT_OK(tn_pool_trace_end(pool));
    EXPECT_OK(tn_pool_stats_get(pool, &stats));
    recording out = {stats.allocs + stats.frees, stats.peak_live_bytes, stats.live_bytes};
    for (int i = 0; i < BLOCKS; i += 7)
        EXPECT_OK(tn_free(blocks[i], streams[i % STREAMS]));
    EXPECT_OK(tn_pool_destroy(pool));
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_destroy(device, streams[i]));
    EXPECT_OK(tn_device_destroy(device));
    return out;
}

static void expect_round_trip(const char *name) {
    char path[256];
    replay_options options = REPLAY_OPTIONS_INIT;
    replay_result result;
    snprintf(path, sizeof(path), "%s/round_trip_%ld%s", TENURE_BUILD_DIR, (long)getpid(), name);
    recording made = record(path);
    options.trace_path = path;
    replay_status status = replay_run(&options, &result);
    if (status != REPLAY_DONE) fail_msg("%s", result.message);
    unlink(path);
    assert_int_equal(made.events, BLOCKS + BLOCKS - (BLOCKS + 6) / 7);
    assert_int_equal(result.events, made.events);
    assert_int_equal(result.peak_live_bytes, made.peak_live_bytes);
    assert_int_equal(result.alive_at_end_bytes, made.live_bytes);
}

static void a_plain_trace_is_replayed(void **state) {
    (void)state;
    expect_round_trip(".csv");
}

static void a_gzip_trace_is_replayed(void **state) {
    (void)state;
    expect_round_trip(".csv.gz");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plain_trace_is_replayed),
        cmocka_unit_test(a_gzip_trace_is_replayed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
