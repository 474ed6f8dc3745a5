/* A program outside the tree, in C, of libtenure alone: a block of a pool goes there and back. */
#include <stdio.h>
#include <string.h>
#include <tenure/tenure_alloc.h>

#define TRY(call)                                                                                  \
    do {                                                                                           \
        if ((call) != TN_OK) return puts(tn_error_last()), 1;                                      \
    } while (0)

enum { BYTES = 1 << 20 };
static unsigned char there[BYTES], back[BYTES];

int main(void) {
    tn_device_config device_config = TN_DEVICE_CONFIG_INIT;
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    void *block;
    if (strcmp(tn_version(), TN_VERSION_STRING) != 0) return 2;
    device_config.driver = TN_DRIVER_HOST;
    TRY(tn_device_create(&device_config, &device));
    TRY(tn_pool_create(device, &pool_config, &pool));
    TRY(tn_stream_create(device, &stream));
    TRY(tn_alloc(pool, BYTES, stream, NULL, &block));
    for (int i = 0; i < BYTES; i++)
        there[i] = (unsigned char)(i * 7 + 1);
    TRY(tn_copy(device, block, there, BYTES, stream));
    TRY(tn_copy(device, back, block, BYTES, stream));
    TRY(tn_stream_synchronize(device, stream));
    if (memcmp(there, back, BYTES) != 0) return 3;
    TRY(tn_pool_stats_get(pool, &stats));
    if (stats.live_bytes != BYTES || stats.live_blocks != 1) return 4;
    TRY(tn_free(block, stream));
    TRY(tn_stream_destroy(device, stream));
    TRY(tn_pool_destroy(pool));
    TRY(tn_device_destroy(device));
    puts("outside_alloc: 1048576 bytes there and back");
    return 0;
}
