/* Blocks of a pool on the host driver, through the public interface alone: what is given out can
 * be used, what is not ours is refused, and the books balance after every step. */
#include <stdio.h>
#include <string.h>

#include "test_support.h"

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    tn_stream b;
} fixture;

static int open_pool(void **state) {
    static fixture f;
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.name = "blocks";
    f.device = test_open_host();
    EXPECT_OK(tn_pool_create(f.device, &config, &f.pool));
    EXPECT_OK(tn_stream_create(f.device, &f.a));
    EXPECT_OK(tn_stream_create(f.device, &f.b));
    *state = &f;
    return 0;
}

static int close_pool(void **state) {
    fixture *f = *state;
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    EXPECT_OK(tn_device_destroy(f->device));
    return 0;
}

static tn_pool_stats stats_of(tn_pool *pool) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_pool_check(pool));
    EXPECT_OK(tn_pool_stats_get(pool, &stats));
    assert_int_equal(stats.live_bytes + stats.cached_bytes + stats.pending_bytes +
                         stats.partial_bytes + stats.driver_held_bytes,
                     stats.reserved_bytes);
    return stats;
}

static void *take(fixture *f, size_t bytes, tn_stream stream) {
    void *block = NULL;
    EXPECT_OK(tn_alloc(f->pool, bytes, stream, NULL, &block));
    (void)stats_of(f->pool);
    return block;
}

static void give(fixture *f, void *block, tn_stream stream) {
    EXPECT_OK(tn_free(block, stream));
    (void)stats_of(f->pool);
}

static void a_block_can_be_used_and_is_reused_on_its_stream(void **state) {
    fixture *f = *state;
    size_t bytes = 3 << 20;
    unsigned char *block = take(f, bytes, f->a);
    unsigned char back[2] = {0, 0};
    EXPECT_OK(tn_fill(f->device, block, 0x5A, bytes, f->a));
    EXPECT_OK(tn_copy(f->device, back, block, 1, f->a));
    EXPECT_OK(tn_copy(f->device, back + 1, block + bytes - 1, 1, f->a));
    EXPECT_OK(tn_stream_synchronize(f->device, f->a));
    assert_int_equal(back[0], 0x5A);
    assert_int_equal(back[1], 0x5A);
    give(f, block, f->a);
    assert_ptr_equal(take(f, bytes, f->a), block);
    assert_int_equal(stats_of(f->pool).stream_waits, 0);
    give(f, block, f->a);
}

static void blocks_are_aligned(void **state) {
    fixture *f = *state;
    for (size_t alignment = 1; alignment <= (2u << 20); alignment *= 2) {
        tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
        size_t least = alignment > 512 ? alignment : 512;
        void *block = NULL;
        void *other = take(f, 700, f->a);
        options.alignment = alignment;
        EXPECT_OK(tn_alloc(f->pool, 1000, f->a, &options, &block));
        assert_int_equal((uintptr_t)block % least, 0);
        (void)stats_of(f->pool);
        give(f, block, f->a);
        give(f, other, f->a);
    }
}

static void live_bytes_are_as_asked_for(void **state) {
    fixture *f = *state;
    void *one = take(f, 1, f->a);
    void *odd = take(f, 1000001, f->a);
    tn_pool_stats stats = stats_of(f->pool);
    size_t bytes = 0;
    tn_pool *pool = NULL;
    assert_int_equal(stats.live_bytes, 1000002);
    assert_int_equal(stats.live_blocks, 2);
    assert_int_equal(stats.owned_bytes, 0);
    EXPECT_OK(tn_block_info(odd, &bytes, &pool));
    assert_int_equal(bytes, 1000001);
    assert_ptr_equal(pool, f->pool);
    EXPECT_OK(tn_block_info(one, NULL, NULL));
    give(f, one, f->a);
    give(f, odd, f->a);
    stats = stats_of(f->pool);
    assert_int_equal(stats.live_bytes, 0);
    assert_int_equal(stats.peak_live_bytes, 1000002);
    EXPECT_OK(tn_pool_stats_reset_peaks(f->pool));
    assert_int_equal(stats_of(f->pool).peak_live_bytes, 0);
    assert_int_equal(stats_of(f->pool).peak_reserved_bytes, stats.reserved_bytes);
}

static void no_bytes_are_no_block(void **state) {
    fixture *f = *state;
    void *block = &block;
    EXPECT_OK(tn_alloc(f->pool, 0, f->a, NULL, &block));
    assert_null(block);
    EXPECT_OK(tn_free(NULL, f->a));
    EXPECT_OK(tn_record_use(NULL, f->a));
    assert_int_equal(stats_of(f->pool).allocs, 0);
    assert_int_equal(stats_of(f->pool).frees, 0);
}

static void sizes_that_no_device_has_do_not_wrap(void **state) {
    fixture *f = *state;
    size_t sizes[] = {SIZE_MAX,       SIZE_MAX - 1,    SIZE_MAX - 510,
                      SIZE_MAX - 511, SIZE_MAX - 512,  SIZE_MAX - (2u << 20),
                      SIZE_MAX / 2,   (size_t)1 << 57, (size_t)1 << 40};
    void *block = &block;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        EXPECT_STATUS(tn_alloc(f->pool, sizes[i], f->a, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
        assert_ptr_equal(block, &block);
        EXPECT_ERROR_HAS("the request is larger than the device's memory");
        assert_int_equal(stats_of(f->pool).reserved_bytes, 0);
        assert_int_equal(stats_of(f->pool).out_of_memory, i + 1);
    }
}

static void strange_pointers_are_refused_by_name(void **state) {
    fixture *f = *state;
    char *block = take(f, 5 << 20, f->a);
    int on_stack = 0;
    void *foreign[] = {&on_stack,
                       block + 1,
                       block + 512,
                       block + (5 << 20) - 1,
                       (void *)8,
                       (void *)UINTPTR_MAX,
                       (void *)((uintptr_t)1 << 60)};
    tn_pool_stats before = stats_of(f->pool);
    tn_pool_stats after;
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        char name[32];
        snprintf(name, sizeof name, "%p", foreign[i]);
        EXPECT_STATUS(tn_free(foreign[i], f->a), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS(name);
        EXPECT_STATUS(tn_record_use(foreign[i], f->b), TN_INVALID_ARGUMENT);
        EXPECT_STATUS(tn_block_info(foreign[i], NULL, NULL), TN_INVALID_ARGUMENT);
    }
    after = stats_of(f->pool);
    assert_memory_equal(&before, &after, sizeof before);
    give(f, block, f->a);
}

static void a_second_free_is_refused_and_changes_nothing(void **state) {
    fixture *f = *state;
    void *small = take(f, 100, f->a);
    void *large = take(f, 9 << 20, f->a);
    tn_pool_stats before;
    tn_pool_stats after;
    give(f, small, f->a);
    give(f, large, f->a);
    before = stats_of(f->pool);
    EXPECT_STATUS(tn_free(small, f->a), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("freed before");
    EXPECT_STATUS(tn_free(large, f->a), TN_INVALID_ARGUMENT);
    after = stats_of(f->pool);
    assert_memory_equal(&before, &after, sizeof before);
}

static void a_stream_of_nobody_is_refused(void **state) {
    fixture *f = *state;
    void *block = take(f, 4096, f->a);
    void *other = NULL;
    tn_stream nobody = (tn_stream)&other;
    tn_pool_stats before = stats_of(f->pool);
    tn_pool_stats after;
    EXPECT_STATUS(tn_alloc(f->pool, 4096, nobody, NULL, &other), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_free(block, nobody), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_record_use(block, nobody), TN_INVALID_ARGUMENT);
    after = stats_of(f->pool);
    assert_memory_equal(&before, &after, sizeof before);
    give(f, block, f->a);
}

static void wrong_options_are_refused(void **state) {
    fixture *f = *state;
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    void *block = NULL;
    options.alignment = 768;
    EXPECT_STATUS(tn_alloc(f->pool, 1, f->a, &options, &block), TN_INVALID_ARGUMENT);
    options.alignment = 4 << 20;
    EXPECT_STATUS(tn_alloc(f->pool, 1, f->a, &options, &block), TN_INVALID_ARGUMENT);
    options.size = 4;
    EXPECT_STATUS(tn_alloc(f->pool, 1, f->a, &options, &block), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_alloc(NULL, 1, f->a, NULL, &block), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_alloc(f->pool, 1, f->a, NULL, NULL), TN_INVALID_ARGUMENT);
    config.page_bytes = 12345;
    EXPECT_STATUS(tn_pool_create(f->device, &config, &pool), TN_INVALID_ARGUMENT);
    config.page_bytes = (size_t)1 << 50; /* more than the device has */
    EXPECT_STATUS(tn_pool_create(f->device, &config, &pool), TN_INVALID_ARGUMENT);
    config.page_bytes = 0;
    config.backing = TN_BACKING_VMM;
    EXPECT_STATUS(tn_pool_create(f->device, &config, &pool), TN_UNSUPPORTED);
    config.size = 1;
    EXPECT_STATUS(tn_pool_create(f->device, &config, &pool), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_create(NULL, NULL, &pool), TN_INVALID_ARGUMENT);
    assert_null(pool);
}

static void destroying_a_pool_with_live_blocks_names_their_owners(void **state) {
    fixture *f = *state;
    tn_pool *pool = NULL;
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *weights = NULL;
    void *scratch[2];
    EXPECT_OK(tn_pool_create(f->device, NULL, &pool));
    options.owner = "weights";
    options.site = "model.c:7";
    EXPECT_OK(tn_alloc(pool, 3000, f->a, &options, &weights));
    options.owner = "scratch";
    options.site = NULL;
    EXPECT_OK(tn_alloc(pool, 1000, f->a, &options, &scratch[0]));
    EXPECT_OK(tn_alloc(pool, 1500, f->a, &options, &scratch[1]));
    EXPECT_STATUS(tn_pool_destroy(pool), TN_LEAK);
    EXPECT_ERROR_HAS("3 live blocks of 5500 bytes: weights (model.c:7): 3000 bytes in 1 block "
                     "(oldest 2 operations ago), scratch: 2500 bytes in 2 blocks");
    assert_int_equal(stats_of(pool).live_bytes, 5500);
    EXPECT_STATUS(tn_device_destroy(f->device), TN_IN_USE);
    EXPECT_OK(tn_free(weights, f->a));
    EXPECT_OK(tn_free(scratch[0], f->a));
    EXPECT_OK(tn_free(scratch[1], f->a));
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_pool_destroy(NULL));
}

static void pools_tell_what_they_are(void **state) {
    fixture *f = *state;
    assert_string_equal(tn_pool_name(f->pool), "blocks");
    assert_ptr_equal(tn_pool_device(f->pool), f->device);
}

static void trim_gives_back_what_is_idle_and_keeps_what_it_is_told_to(void **state) {
    fixture *f = *state;
    void *kept = take(f, 40 << 20, f->a);
    void *first = take(f, 64 << 20, f->a);
    void *second = take(f, 36 << 20, f->a);
    size_t released = 1;
    give(f, first, f->a);
    give(f, second, f->a);
    EXPECT_OK(tn_device_synchronize(f->device));
    EXPECT_OK(tn_pool_trim(f->pool, SIZE_MAX, &released));
    assert_int_equal(released, 0);
    EXPECT_OK(tn_pool_trim(f->pool, 36 << 20, &released));
    assert_int_equal(released, 64 << 20);
    assert_int_equal(stats_of(f->pool).cached_bytes, 36 << 20);
    EXPECT_OK(tn_pool_trim(f->pool, 0, NULL));
    assert_int_equal(stats_of(f->pool).cached_bytes, 0);
    assert_int_equal(stats_of(f->pool).reserved_bytes, 40 << 20);
    give(f, kept, f->a);
}

static void a_recorded_use_keeps_a_block_pending_until_it_is_known_complete(void **state) {
    fixture *f = *state;
    void *block = take(f, 32 << 20, f->a);
    EXPECT_OK(tn_record_use(block, f->b));
    give(f, block, f->a);
    assert_int_equal(stats_of(f->pool).pending_bytes, 32 << 20);
    assert_int_equal(stats_of(f->pool).cached_bytes, 0);
    EXPECT_OK(tn_device_synchronize(f->device));
    EXPECT_OK(tn_pool_trim(f->pool, SIZE_MAX, NULL));
    assert_int_equal(stats_of(f->pool).pending_bytes, 0);
    assert_int_equal(stats_of(f->pool).cached_bytes, 32 << 20);
}

static void the_end_of_a_stream_ends_its_uses(void **state) {
    fixture *f = *state;
    tn_stream c = NULL;
    void *block;
    void *again;
    EXPECT_OK(tn_stream_create(f->device, &c));
    block = take(f, 32 << 20, c);
    EXPECT_OK(tn_fill(f->device, block, 1, 32 << 20, c));
    give(f, block, c);
    block = take(f, 32 << 20, c);
    EXPECT_OK(tn_stream_destroy(f->device, c));
    (void)stats_of(f->pool);
    give(f, block, f->a);
    again = take(f, 32 << 20, f->b);
    assert_ptr_equal(again, block);
    /* One wait for f->a, where it was freed; none for the stream that is gone. */
    assert_int_equal(stats_of(f->pool).stream_waits, 1);
    give(f, again, f->b);
}

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>

static void the_address_sanitizer_sees_the_ends_of_blocks(void **state) {
    fixture *f = *state;
    char *block = take(f, 1000, f->a);
    assert_false(__asan_address_is_poisoned(block));
    assert_false(__asan_address_is_poisoned(block + 999));
    assert_true(__asan_address_is_poisoned(block + 1000));
    give(f, block, f->a);
    EXPECT_OK(tn_device_synchronize(f->device));
    EXPECT_OK(tn_pool_trim(f->pool, SIZE_MAX, NULL));
    assert_true(__asan_address_is_poisoned(block));
}
#endif

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_pool, close_pool)
    const struct CMUnitTest tests[] = {
        TEST(a_block_can_be_used_and_is_reused_on_its_stream),
        TEST(blocks_are_aligned),
        TEST(live_bytes_are_as_asked_for),
        TEST(no_bytes_are_no_block),
        TEST(sizes_that_no_device_has_do_not_wrap),
        TEST(strange_pointers_are_refused_by_name),
        TEST(a_second_free_is_refused_and_changes_nothing),
        TEST(a_stream_of_nobody_is_refused),
        TEST(wrong_options_are_refused),
        TEST(destroying_a_pool_with_live_blocks_names_their_owners),
        TEST(pools_tell_what_they_are),
        TEST(trim_gives_back_what_is_idle_and_keeps_what_it_is_told_to),
        TEST(a_recorded_use_keeps_a_block_pending_until_it_is_known_complete),
        TEST(the_end_of_a_stream_ends_its_uses),
#if defined(__SANITIZE_ADDRESS__)
        TEST(the_address_sanitizer_sees_the_ends_of_blocks),
#endif
    };
    return cmocka_run_group_tests_name("api/pool_blocks", tests, NULL, NULL);
}
