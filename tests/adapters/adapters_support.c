/* Adapters over the simulated driver: see adapters_support.h. */
#include "adapters_support.h"

#include <stdlib.h>

#include "host_alloc.h"
#include "options.h"

tn_device *adapters_open(int device_count, size_t memory_bytes) {
    tnsim_config config = {
        .size = sizeof config, .memory_bytes = memory_bytes, .device_count = device_count};
    setenv("TENURE_CUDA_LIBRARY", TENURE_SIM_LIBRARY, 1);
    tn__options_reload();
    return test_open_sim_as(&config);
}

void adapters_close(tn_device *device) {
    EXPECT_OK(tn_adapters_close());
    test_close_sim(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

void *adapters_take(size_t bytes, tn_stream stream) {
    void *block = NULL;
    EXPECT_OK(tn__framework_alloc(0, bytes, stream, "test", &block));
    assert_non_null(block);
    return block;
}

void adapters_give(void *block, tn_stream stream) {
    EXPECT_OK(tn__framework_free(0, block, stream));
}

uint64_t adapters_number(const char *name) {
    uint64_t value = 0;
    EXPECT_OK(tn_adapter_stat(0, name, &value));
    return value;
}

static int accepts(void *context, tn_stream stream) {
    adapters_filter *filter = context;
    filter->asked++;
    return !filter->stream || filter->stream == stream;
}

static void end_filter(void *context) { ((adapters_filter *)context)->ended++; }

void adapters_begin(uint64_t key, adapters_filter *filter) {
    const uint64_t keys[2] = {0, key};
    const tn__stream_filter given = {accepts, end_filter, filter};
    EXPECT_OK(tn__framework_begin(0, keys, &given));
}

tn_status adapters_end(uint64_t key) {
    const uint64_t keys[2] = {0, key};
    return tn__framework_end(0, keys);
}

tn_status adapters_release(uint64_t key) {
    const uint64_t keys[2] = {0, key};
    return tn__framework_release(0, keys);
}
