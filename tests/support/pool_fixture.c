/* See pool_fixture.h. */
#include "pool_fixture.h"

#include "host_alloc.h"

pool_fixture pool_fixture_open(size_t memory_bytes, tn_pool_backing backing, size_t limit_bytes) {
    pool_fixture f = {.device = test_open_sim(memory_bytes, 0)};
    f.pool = test_open_pool(f.device, backing, limit_bytes);
    f.a = test_open_stream(f.device);
    f.b = test_open_stream(f.device);
    return f;
}

static void close_pool_and_streams(pool_fixture *f) {
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    EXPECT_OK(tn_stream_destroy(f->device, f->c));
}

void pool_fixture_close(pool_fixture *f) {
    close_pool_and_streams(f);
    test_close_sim(f->device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

uint64_t pool_fixture_close_with_races(pool_fixture *f) {
    uint64_t races;
    close_pool_and_streams(f);
    races = test_close_sim_with_races(f->device);
    assert_int_equal(tn__host_live_blocks(), 0);
    return races;
}
