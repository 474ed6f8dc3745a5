/* The ring of a pool's last events: what is kept, in which order, what is lost, and that keeping
 * them changes nothing else. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "host_alloc.h"
#include "options.h"
#include "tenure_pool.h"
#include "pool_fixture.h"

#define MIB MIB_BYTES

static int open_fixture(void **state) {
    static pool_fixture f;
    f = pool_fixture_open(64 * MIB, TN_BACKING_VMM, 0);
    *state = &f;
    return 0;
}

static int close_fixture(void **state) {
    pool_fixture_close(*state);
    return 0;
}

static size_t read_all(tn_pool *pool, tn_event *events, size_t capacity, uint64_t *lost) {
    size_t count = SIZE_MAX;
    EXPECT_OK(tn_pool_events_read(pool, events, capacity, &count, lost));
    for (size_t i = 1; i < count; i++) {
        assert_int_equal(events[i].number, events[i - 1].number + 1);
        assert_true(events[i].time_us >= events[i - 1].time_us);
    }
    return count;
}

static void expect_event(const tn_event *event, tn_event_kind kind, const void *address,
                         size_t bytes, tn_stream stream, const char *owner) {
    assert_string_equal(tn_event_kind_name(event->kind), tn_event_kind_name(kind));
    assert_ptr_equal(event->address, address);
    assert_int_equal(event->bytes, bytes);
    assert_ptr_equal(event->stream, stream);
    assert_string_equal(event->owner, owner);
    assert_int_equal(event->frame_count, 0);
}

static void everything_that_happens_is_told_in_order(void **state) {
    pool_fixture *f = *state;
    tn_event events[32];
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    uint64_t lost = 7;
    size_t released = 0;
    void *x = NULL;
    void *y = NULL;
    void *none = NULL;
    size_t reserved[2];
    options.owner = "weights";
    EXPECT_OK(tn_pool_events_begin(f->pool, 32, 0));
    EXPECT_OK(tn_alloc(f->pool, 3 * MIB, f->a, &options, &x));
    reserved[0] = test_pool_stats(f->pool).reserved_bytes;
    test_sim_write(f->device, f->a, x, 3 * MIB, 1e5);
    EXPECT_OK(tn_record_use(x, f->b));
    EXPECT_OK(tn_free(x, f->a));
    EXPECT_STATUS(tn_alloc(f->pool, 100 * MIB, f->a, &options, &none), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_OK(tn_alloc(f->pool, 64 * MIB, f->b, NULL, &y));
    reserved[1] = test_pool_stats(f->pool).reserved_bytes;
    EXPECT_OK(tn_free(y, f->b));
    EXPECT_OK(tn_stream_synchronize(f->device, f->b));
    EXPECT_OK(tn_pool_trim(f->pool, 0, &released));
    assert_int_equal(released, 64 * MIB);
    assert_int_equal(reserved[1], 64 * MIB);
    assert_int_equal(test_pool_stats(f->pool).stream_waits, 1);

    assert_int_equal(read_all(f->pool, events, 32, &lost), 10);
    assert_int_equal(lost, 0);
    assert_int_equal(events[0].number, 1);
    assert_int_equal(events[0].thread, gettid());
    expect_event(&events[0], TN_EVENT_GROW, NULL, reserved[0], f->a, "");
    expect_event(&events[1], TN_EVENT_ALLOC, x, 3 * MIB, f->a, "weights");
    expect_event(&events[2], TN_EVENT_RECORD_USE, x, 3 * MIB, f->b, "weights");
    expect_event(&events[3], TN_EVENT_FREE, x, 3 * MIB, f->a, "weights");
    expect_event(&events[4], TN_EVENT_OUT_OF_MEMORY, NULL, 100 * MIB, f->a, "weights");
    expect_event(&events[5], TN_EVENT_WAIT, NULL, 0, f->b, "");
    expect_event(&events[6], TN_EVENT_GROW, NULL, 64 * MIB - reserved[0], f->b, "");
    expect_event(&events[7], TN_EVENT_ALLOC, y, 64 * MIB, f->b, "");
    expect_event(&events[8], TN_EVENT_FREE, y, 64 * MIB, f->b, "");
    expect_event(&events[9], TN_EVENT_RELEASE, NULL, 64 * MIB, NULL, "");
    assert_int_not_equal(events[1].stream_id, events[2].stream_id);
    assert_int_equal(read_all(f->pool, events, 32, &lost), 0);
    EXPECT_OK(tn_pool_events_end(f->pool));
}

/* The device is full: what the last block needs comes from the two that were freed. */
static void memory_that_moves_is_told_with_where_it_was(void **state) {
    pool_fixture *f = *state;
    tn_event events[32];
    char *freed[2] = {test_take(f->pool, 30 * MIB, f->a), NULL};
    void *kept = test_take(f->pool, 2 * MIB, f->a);
    size_t moved = 0;
    size_t count;
    void *block;
    freed[1] = test_take(f->pool, 32 * MIB, f->a);
    for (int i = 0; i < 2; i++)
        test_give(f->pool, freed[i], f->a);
    EXPECT_OK(tn_pool_events_begin(f->pool, 32, 0));
    block = test_take(f->pool, 60 * MIB, f->a);
    count = read_all(f->pool, events, 32, NULL);
    assert_true(count >= 2);
    expect_event(&events[count - 1], TN_EVENT_ALLOC, block, 60 * MIB, f->a, "");
    for (size_t i = 0; i + 1 < count; i++) {
        const char *address = events[i].address;
        int is_first = address >= freed[0] && address + events[i].bytes <= freed[0] + 30 * MIB;
        int is_second = address >= freed[1] && address + events[i].bytes <= freed[1] + 32 * MIB;
        assert_string_equal(tn_event_kind_name(events[i].kind), "move");
        assert_true(is_first || is_second);
        moved += events[i].bytes;
    }
    /* At most one of them can have stayed where it is, under the new block. */
    assert_in_range(moved, 28 * MIB, 60 * MIB);
    EXPECT_OK(tn_pool_events_end(f->pool));
    test_give(f->pool, block, f->a);
    test_give(f->pool, kept, f->a);
}

static void a_full_ring_keeps_the_last_and_counts_the_lost(void **state) {
    pool_fixture *f = *state;
    tn_event events[16];
    uint64_t lost = 0;
    void *block = test_take(f->pool, 4096, f->a);
    size_t count = 0;
    EXPECT_OK(tn_pool_events_begin(f->pool, 8, 0));
    for (int i = 0; i < 21; i++)
        EXPECT_OK(tn_record_use(block, i % 2 ? f->b : f->a));
    assert_int_equal(read_all(f->pool, events, 3, &lost), 3);
    assert_int_equal(lost, 13);
    assert_int_equal(events[0].number, 14);
    for (int i = 0; i < 4; i++)
        EXPECT_OK(tn_record_use(block, f->a));
    /* 5 were left and 4 came: one was lost. */
    assert_int_equal(read_all(f->pool, events, 16, &lost), 8);
    assert_int_equal(lost, 1);
    assert_int_equal(events[0].number, 18);
    assert_int_equal(events[7].number, 25);
    EXPECT_OK(tn_pool_events_read(f->pool, NULL, 0, &count, NULL));
    assert_int_equal(count, 0);
    EXPECT_OK(tn_pool_events_end(f->pool));
    test_give(f->pool, block, f->a);
}

static void an_owner_is_copied_and_cut(void **state) {
    pool_fixture *f = *state;
    char owner[100];
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    tn_event event[4];
    void *block = NULL;
    memset(owner, 'x', sizeof owner - 1);
    owner[sizeof owner - 1] = 0;
    options.owner = owner;
    EXPECT_OK(tn_alloc(f->pool, 512, f->a, &options, &block));
    EXPECT_OK(tn_pool_events_begin(f->pool, 4, 0));
    EXPECT_OK(tn_free(block, f->a));
    memset(owner, 'y', sizeof owner - 1);
    assert_int_equal(read_all(f->pool, event, 4, NULL), 1);
    assert_int_equal(strspn(event[0].owner, "x"), TN_EVENT_OWNER_BYTES - 1);
    assert_int_equal(strlen(event[0].owner), TN_EVENT_OWNER_BYTES - 1);
    EXPECT_OK(tn_pool_events_end(f->pool));
}

__attribute__((noinline)) static void take_and_give_here(pool_fixture *f) {
    void *block = NULL;
    EXPECT_OK(tn_alloc(f->pool, 512, f->a, NULL, &block));
    EXPECT_OK(tn_free(block, f->a));
}

static void a_stack_leads_to_the_caller(void **state) {
    pool_fixture *f = *state;
    uintptr_t begin = (uintptr_t)take_and_give_here;
    tn_event events[8];
    size_t count;
    EXPECT_OK(tn_pool_events_begin(f->pool, 8, 1));
    take_and_give_here(f);
    count = read_all(f->pool, events, 8, NULL);
    assert_int_equal(count, 3);
    for (size_t i = 0; i < count; i++) {
        uint32_t at = 0;
        assert_in_range(events[i].frame_count, 3, TN_EVENT_FRAMES);
        while (at < events[i].frame_count && ((uintptr_t)events[i].frames[at] < begin ||
                                              (uintptr_t)events[i].frames[at] > begin + 4096))
            at++;
        assert_true(at < events[i].frame_count);
    }
    EXPECT_OK(tn_pool_events_end(f->pool));
}

static void what_is_not_right_changes_nothing(void **state) {
    pool_fixture *f = *state;
    tn_event event;
    size_t count = 77;
    EXPECT_STATUS(tn_pool_events_begin(NULL, 8, 0), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_events_begin(f->pool, 0, 0), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_events_begin(f->pool, TN_EVENTS_MAX + 1, 0), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_events_read(f->pool, &event, 1, &count, NULL), TN_INVALID_STATE);
    EXPECT_STATUS(tn_pool_events_end(f->pool), TN_INVALID_STATE);
    for (long nth = 1; nth <= 3; nth++) {
        tn__host_alloc_fault(nth, 0);
        EXPECT_STATUS(tn_pool_events_begin(f->pool, 8, 1), TN_OUT_OF_HOST_MEMORY);
        tn__host_alloc_fault(0, 0);
        EXPECT_STATUS(tn_pool_events_end(f->pool), TN_INVALID_STATE);
    }
    EXPECT_OK(tn_pool_events_begin(f->pool, 8, 0));
    EXPECT_STATUS(tn_pool_events_begin(f->pool, 8, 0), TN_INVALID_STATE);
    EXPECT_STATUS(tn_pool_events_read(f->pool, NULL, 1, &count, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_events_read(f->pool, &event, 1, NULL, NULL), TN_INVALID_ARGUMENT);
    assert_int_equal(count, 77);
    assert_string_equal(tn_event_kind_name((tn_event_kind)-1), "unknown event");
    assert_string_equal(tn_event_kind_name(TN_EVENT_KIND_COUNT), "unknown event");
    /* The pool is destroyed with its ring. */
}

static void an_option_keeps_them_for_every_pool(void **state) {
    pool_fixture *f = *state;
    tn_pool *pool;
    tn_event event;
    setenv("TENURE_EVENTS", "2", 1);
    tn__options_reload();
    pool = test_open_pool(f->device, TN_BACKING_AUTO, 0);
    test_give(pool, test_take(pool, 512, f->a), f->a);
    assert_int_equal(read_all(pool, &event, 1, NULL), 1);
    assert_int_equal(event.number, 2);
    assert_int_equal(event.kind, TN_EVENT_ALLOC);
    EXPECT_OK(tn_pool_destroy(pool));
    setenv("TENURE_EVENTS", "1048577", 1);
    tn__options_reload();
    assert_int_equal(tn__options_get()->events, 0);
    unsetenv("TENURE_EVENTS");
    tn__options_reload();
}

enum { THREADS = 4, PAIRS = 200 };

static void *take_and_give_often(void *argument) {
    pool_fixture *f = argument;
    for (int i = 0; i < PAIRS; i++) {
        void *block = NULL;
        if (tn_alloc(f->pool, 512, i % 2 ? f->a : f->b, NULL, &block) != TN_OK) return NULL;
        if (tn_free(block, i % 2 ? f->a : f->b) != TN_OK) return NULL;
    }
    return argument;
}

static void calls_of_all_threads_are_seen(void **state) {
    static tn_event events[4 * THREADS * PAIRS];
    pool_fixture *f = *state;
    pthread_t threads[THREADS];
    size_t kinds[TN_EVENT_KIND_COUNT] = {0};
    uint64_t lost = 1;
    size_t count;
    EXPECT_OK(tn_pool_events_begin(f->pool, sizeof events / sizeof events[0], 0));
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, take_and_give_often, f), 0);
    for (int i = 0; i < THREADS; i++) {
        void *done = NULL;
        assert_int_equal(pthread_join(threads[i], &done), 0);
        assert_non_null(done);
    }
    count = read_all(f->pool, events, sizeof events / sizeof events[0], &lost);
    assert_int_equal(lost, 0);
    for (size_t i = 0; i < count; i++)
        kinds[events[i].kind]++;
    assert_int_equal(kinds[TN_EVENT_ALLOC], THREADS * PAIRS);
    assert_int_equal(kinds[TN_EVENT_FREE], THREADS * PAIRS);
    assert_int_equal(kinds[TN_EVENT_WAIT], test_pool_stats(f->pool).stream_waits);
    EXPECT_OK(tn_pool_events_end(f->pool));
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
        TEST(everything_that_happens_is_told_in_order),
        TEST(memory_that_moves_is_told_with_where_it_was),
        TEST(a_full_ring_keeps_the_last_and_counts_the_lost),
        TEST(an_owner_is_copied_and_cut),
        TEST(a_stack_leads_to_the_caller),
        TEST(what_is_not_right_changes_nothing),
        TEST(an_option_keeps_them_for_every_pool),
        TEST(calls_of_all_threads_are_seen),
    };
    return cmocka_run_group_tests_name("unit/insight_events", tests, NULL, NULL);
}
