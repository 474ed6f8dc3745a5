/* Memory of captured graphs as torch asks for it: begin before the capture, end after it, release
 * with the graph; captures that fail, blocks that outlive their pool, frees in the middle of a
 * capture. Launches touch what their graphs use, so memory that went to others shows as a race. */
#include "adapters_support.h"

#include <pthread.h>
#include <semaphore.h>

typedef struct fixture {
    tn_device *device;
    tn_stream a; /* captures */
    tn_stream b;
} fixture;

static int set_up(void **state) {
    static fixture f;
    f.device = adapters_open(1, 0);
    f.a = test_open_foreign_stream(f.device);
    f.b = test_open_foreign_stream(f.device);
    *state = &f;
    return 0;
}

static int tear_down(void **state) {
    fixture *f = *state;
    EXPECT_OK(tn_device_synchronize(f->device));
    test_close_foreign_stream(f->device, f->a);
    test_close_foreign_stream(f->device, f->b);
    adapters_close(f->device);
    return 0;
}

static void begin(fixture *f, uint64_t key, adapters_filter *filter) {
    adapters_begin(key, filter);
    test_capture_begin(f->device, f->a, TEST_CAPTURE_GLOBAL);
}

static test_graph end(fixture *f, uint64_t key) {
    test_graph graph = test_capture_end(f->device, f->a);
    EXPECT_OK(adapters_end(key));
    return graph;
}

static void *take_and_write(fixture *f, size_t bytes, tn_stream stream) {
    void *block = adapters_take(bytes, stream);
    test_sim_write(f->device, stream, block, bytes, 10);
    return block;
}

/* A graph with a temporary and a result; ordinary work between its launches uses other memory. */
static void launches_and_ordinary_work_use_different_memory(void **state) {
    fixture *f = *state;
    adapters_filter filter = {f->a, 0, 0};
    void *temporary;
    void *result;
    test_graph graph;
    begin(f, 1, &filter);
    temporary = take_and_write(f, 4 * MIB, f->a);
    adapters_give(temporary, f->a);
    result = take_and_write(f, 2 * MIB, f->a);
    graph = end(f, 1);
    assert_int_equal(filter.asked, 1); /* then the capture is known */
    assert_int_equal(filter.ended, 1);
    for (int i = 0; i < 10; i++) {
        void *other;
        test_graph_launch(f->device, &graph, f->a);
        other = take_and_write(f, 4 * MIB, f->b);
        assert_ptr_not_equal(other, temporary);
        adapters_give(other, f->b);
    }
    test_sim_read(f->device, f->a, result, 2 * MIB, 10);
    test_graph_destroy(f->device, &graph);
    adapters_give(result, f->a);
    EXPECT_OK(adapters_release(1));
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("reserved_bytes"), 0);
}

/* Streams that the filter does not accept, or that do not capture, get ordinary memory. */
static void only_streams_that_capture_and_are_accepted_go_there(void **state) {
    fixture *f = *state;
    adapters_filter filter = {f->a, 0, 0};
    tn_pool *ordinary = NULL; /* the stream's */
    tn_pool *pool = NULL;
    void *before;
    void *outside;
    void *inside;
    test_graph graph;
    adapters_begin(1, &filter);
    before = adapters_take(MIB, f->a);
    test_capture_begin(f->device, f->a, TEST_CAPTURE_THREAD_LOCAL);
    outside = adapters_take(MIB, f->b);
    inside = adapters_take(MIB, f->a);
    EXPECT_OK(tn_block_info(before, NULL, &ordinary));
    EXPECT_OK(tn_block_info(inside, NULL, &pool));
    assert_ptr_not_equal(pool, ordinary);
    EXPECT_OK(tn_block_info(outside, NULL, &ordinary));
    assert_ptr_not_equal(pool, ordinary);
    adapters_give(outside, f->b);
    adapters_give(inside, f->a);
    graph = end(f, 1);
    adapters_give(before, f->a);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(adapters_release(1));
}

/* Two graphs share a pool; the pool ends with the second. A result of the first outlives both. */
static void a_shared_pool_ends_with_its_last_graph_and_block(void **state) {
    fixture *f = *state;
    adapters_filter filter = {f->a, 0, 0};
    void *result;
    void *other;
    test_graph first;
    test_graph second;
    begin(f, 2, &filter);
    result = take_and_write(f, 2 * MIB, f->a);
    first = end(f, 2);
    begin(f, 2, &filter);
    other = take_and_write(f, 2 * MIB, f->a);
    test_sim_read(f->device, f->a, result, 2 * MIB, 10);
    adapters_give(other, f->a);
    second = end(f, 2);
    test_graph_launch(f->device, &first, f->a);
    test_graph_launch(f->device, &second, f->a);
    test_graph_destroy(f->device, &first);
    EXPECT_OK(adapters_release(2));
    test_graph_launch(f->device, &second, f->a);
    test_graph_destroy(f->device, &second);
    EXPECT_OK(adapters_release(2));
    EXPECT_STATUS(adapters_release(2), TN_INVALID_ARGUMENT);
    assert_int_equal(adapters_number("live_blocks"), 1);
    test_sim_read(f->device, f->a, result, 2 * MIB, 10);
    adapters_give(result, f->a); /* the pool's last block: it ends here */
    assert_int_equal(adapters_number("reserved_bytes"), 0);
    EXPECT_STATUS(adapters_release(2), TN_INVALID_ARGUMENT);
}

/* A block that could not be freed in a capture, whose stream is gone once that has ended. */
static void a_late_free_outlives_its_stream(void **state) {
    fixture *f = *state;
    tn_stream stream = test_open_foreign_stream(f->device);
    adapters_filter filter = {stream, 0, 0};
    test_graph graphs[2];
    void *block = NULL;
    for (int i = 0; i < 2; i++) {
        adapters_begin(1, &filter);
        test_capture_begin(f->device, stream, TEST_CAPTURE_RELAXED);
        if (block) adapters_give(block, stream);
        block = take_and_write(f, 2 * MIB, stream);
        if (i == 1) adapters_give(block, stream);
        graphs[i] = test_capture_end(f->device, stream);
        if (i == 0) EXPECT_OK(adapters_end(1));
    }
    assert_int_equal(adapters_number("live_blocks"), 1);
    for (int i = 0; i < 2; i++)
        test_graph_destroy(f->device, &graphs[i]);
    test_close_foreign_stream(f->device, stream);
    EXPECT_OK(adapters_end(1));
    EXPECT_OK(adapters_release(1));
    EXPECT_OK(adapters_release(1));
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 0);
}

/* A block of an earlier capture is freed on the stream while that captures again: later. */
static void an_older_block_is_freed_after_the_capture(void **state) {
    fixture *f = *state;
    adapters_filter filter = {f->a, 0, 0};
    void *old;
    void *plain = take_and_write(f, 2 * MIB, f->a);
    test_graph first;
    test_graph second;
    begin(f, 3, &filter);
    old = take_and_write(f, 2 * MIB, f->a);
    first = end(f, 3);
    begin(f, 3, &filter);
    adapters_give(old, f->a);
    EXPECT_STATUS(tn__framework_free(0, old, f->a), TN_INVALID_ARGUMENT);
    adapters_give(plain, f->a); /* of the ordinary pool */
    adapters_give(take_and_write(f, 2 * MIB, f->a), f->a);
    second = end(f, 3);
    assert_int_equal(adapters_number("live_blocks"), 0);
    test_graph_launch(f->device, &first, f->a);
    test_graph_launch(f->device, &second, f->a);
    test_graph_destroy(f->device, &first);
    test_graph_destroy(f->device, &second);
    EXPECT_OK(adapters_release(3));
    EXPECT_OK(adapters_release(3));
    adapters_give(take_and_write(f, 2 * MIB, f->b), f->b);
}

/* torch does not end, nor release, a capture that failed; its filter must not be asked any more. */
static void a_capture_that_fails_leaves_nothing_behind(void **state) {
    fixture *f = *state;
    adapters_filter failed = {f->a, 0, 0};
    adapters_filter filter = {f->a, 0, 0};
    test_graph graph;
    void *kept;
    for (int i = 0; i < 3; i++) {
        begin(f, 10 + (uint64_t)i, &failed);
        kept = take_and_write(f, 4 * MIB, f->a);
        test_capture_spoil(f->device, f->a);
        test_capture_end_invalid(f->device, f->a);
        assert_int_equal(failed.asked, i + 1);
        adapters_give(kept, f->a);
    }
    adapters_give(adapters_take(MIB, f->a), f->a);
    assert_int_equal(failed.asked, 3);
    assert_int_equal(failed.ended, 3);
    begin(f, 20, &filter);
    adapters_give(take_and_write(f, 4 * MIB, f->a), f->a);
    graph = end(f, 20);
    test_graph_launch(f->device, &graph, f->a);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(adapters_release(20));
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("reserved_bytes"), 0);
    assert_int_equal(adapters_number("live_blocks"), 0);
}

/* A capture that fails before it asks for memory: once the caches were emptied, as torch does
 * before the next one, what waited is freed; a capture that goes on is not given up. */
static void a_capture_that_fails_without_memory_is_given_up(void **state) {
    fixture *f = *state;
    adapters_filter failed = {f->a, 0, 0};
    adapters_filter filter = {f->a, 0, 0};
    void *segment = NULL;
    void *inside;
    test_graph graph;
    EXPECT_OK(tn__framework_segment(0, 4 * MIB, NULL, "test", &segment));
    tn__framework_free_unordered(0, segment);
    begin(f, 30, &failed);
    test_capture_spoil(f->device, f->a);
    test_capture_end_invalid(f->device, f->a);
    assert_int_equal(adapters_number("live_blocks"), 1);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 1);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 0);
    assert_int_equal(failed.ended, 0);
    begin(f, 31, &filter);
    assert_int_equal(failed.ended, 1);
    EXPECT_OK(tn_adapters_trim()); /* in the middle of a capture: doubted, until memory is asked */
    inside = take_and_write(f, MIB, f->a);
    EXPECT_OK(tn__framework_segment(0, 4 * MIB, f->b, "test", &segment));
    tn__framework_free_unordered(0, segment);
    EXPECT_OK(tn_adapters_trim());
    assert_true(test_is_capturing(f->device, f->a));
    assert_int_equal(adapters_number("live_blocks"), 2);
    adapters_give(inside, f->a);
    graph = end(f, 31);
    test_graph_launch(f->device, &graph, f->a);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(adapters_release(31));
    EXPECT_STATUS(adapters_release(30), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 0);
}

static void *trim_aside(void *unused) {
    (void)unused;
    return tn_adapters_trim() == TN_OK ? NULL : unused;
}

static void another_threads_trim_leaves_a_capture_alone(void **state) {
    fixture *f = *state;
    adapters_filter filter = {f->a, 0, 0};
    pthread_t thread;
    test_graph graph;
    begin(f, 32, &filter);
    assert_int_equal(pthread_create(&thread, NULL, trim_aside, NULL), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    adapters_give(take_and_write(f, MIB, f->a), f->a);
    graph = end(f, 32);
    test_graph_launch(f->device, &graph, f->a);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(adapters_release(32));
}

/* A capture that fails in a pool that other graphs are in: the pool goes on. */
static void a_capture_that_fails_leaves_a_shared_pool_usable(void **state) {
    fixture *f = *state;
    adapters_filter filter = {f->a, 0, 0};
    void *result;
    void *lost;
    test_graph graph;
    test_graph second;
    begin(f, 4, &filter);
    result = take_and_write(f, 2 * MIB, f->a);
    graph = end(f, 4);
    begin(f, 4, &filter);
    lost = adapters_take(2 * MIB, f->a);
    test_capture_spoil(f->device, f->a);
    test_capture_end_invalid(f->device, f->a);
    begin(f, 4, &filter);
    adapters_give(take_and_write(f, 2 * MIB, f->a), f->a);
    second = end(f, 4);
    adapters_give(lost, f->a);
    test_graph_launch(f->device, &graph, f->a);
    test_sim_read(f->device, f->a, result, 2 * MIB, 10);
    test_graph_launch(f->device, &second, f->a);
    test_graph_destroy(f->device, &graph);
    test_graph_destroy(f->device, &second);
    adapters_give(result, f->a);
    EXPECT_OK(adapters_release(4));
    EXPECT_OK(adapters_release(4));
    assert_int_equal(adapters_number("live_blocks"), 0);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("reserved_bytes"), 0);
}

/* Uses that are told in a capture: of a stream in it, and of one that is not. */
static void uses_are_told_inside_and_outside_of_a_capture(void **state) {
    fixture *f = *state;
    adapters_filter filter = {NULL, 0, 0};
    void *block;
    void *ordinary = take_and_write(f, 2 * MIB, NULL);
    test_graph graph;
    EXPECT_OK(tn_device_synchronize(f->device));
    begin(f, 5, &filter);
    block = take_and_write(f, 2 * MIB, f->a);
    EXPECT_OK(tn__framework_use(block, f->b)); /* not in the capture */
    adapters_give(block, f->a);
    EXPECT_OK(tn__framework_use(ordinary, f->a)); /* in it */
    test_sim_read(f->device, f->a, ordinary, 2 * MIB, 10);
    graph = end(f, 5);
    test_graph_launch(f->device, &graph, f->a);
    EXPECT_OK(tn_device_synchronize(f->device));
    adapters_give(ordinary, NULL);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(adapters_release(5));
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 0);
}

/* While a framework captures, nothing waits for the device: it would spoil the capture. */
static void nothing_waits_for_the_device_in_a_capture(void **state) {
    fixture *f = *state;
    adapters_filter filter = {f->a, 0, 0};
    void *segment = NULL;
    void *inside = NULL;
    test_graph graph;
    EXPECT_OK(tn__framework_segment(0, 256 * MIB, f->b, "test", &segment));
    begin(f, 6, &filter);
    for (int i = 0; i < 12; i++) {
        void *block = NULL;
        EXPECT_OK(tn__framework_segment(0, 256 * MIB, f->b, "test", &block));
        tn__framework_free_unordered(0, block);
    }
    tn__framework_free_unordered(0, segment);
    /* torch's own allocator takes segments of a memory pool on a stream that captures */
    EXPECT_OK(tn__framework_segment(0, 2 * MIB, f->a, "test", &inside));
    test_sim_write(f->device, f->a, inside, 2 * MIB, 10);
    assert_true(test_is_capturing(f->device, f->a));
    graph = end(f, 6);
    test_graph_launch(f->device, &graph, f->a);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(adapters_release(6));
    tn__framework_free_unordered(0, inside);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 0);
}

/* ---- threads that capture -------------------------------------------------------------------- */

typedef struct aside {
    fixture *f;
    adapters_filter filter;
    sem_t has_begun, may_end;
} aside;

static void open_aside(aside *other, fixture *f, tn_stream stream) {
    other->f = f;
    other->filter = (adapters_filter){stream, 0, 0};
    assert_int_equal(sem_init(&other->has_begun, 0, 0) | sem_init(&other->may_end, 0, 0), 0);
}

static void *begin_and_end_aside(void *argument) {
    aside *other = argument;
    adapters_begin(1, &other->filter);
    sem_post(&other->has_begun);
    sem_wait(&other->may_end);
    EXPECT_OK(adapters_end(1));
    return NULL;
}

/* Two threads are about to capture for one pool: each ends what it has begun. */
static void a_thread_ends_its_own_begin(void **state) {
    fixture *f = *state;
    adapters_filter mine = {f->a, 0, 0};
    aside other;
    pthread_t thread;
    open_aside(&other, f, f->b);
    adapters_begin(1, &mine);
    assert_int_equal(pthread_create(&thread, NULL, begin_and_end_aside, &other), 0);
    sem_wait(&other.has_begun);
    EXPECT_OK(adapters_end(1));
    assert_int_equal(mine.ended, 1);
    assert_int_equal(other.filter.ended, 0);
    sem_post(&other.may_end);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(other.filter.ended, 1);
    EXPECT_OK(adapters_release(1));
    EXPECT_OK(adapters_release(1));
}

static void *fail_without_memory(void *argument) {
    aside *other = argument;
    begin(other->f, 40, &other->filter);
    test_capture_spoil(other->f->device, other->f->a);
    test_capture_end_invalid(other->f->device, other->f->a);
    return NULL;
}

static void *fail_with_memory(void *argument) {
    aside *other = argument;
    void *block;
    begin(other->f, 41, &other->filter);
    block = take_and_write(other->f, MIB, other->f->a);
    test_capture_spoil(other->f->device, other->f->a);
    test_capture_end_invalid(other->f->device, other->f->a);
    adapters_give(block, other->f->a);
    return NULL;
}

static void *leave_open(void *argument) {
    aside *other = argument;
    adapters_begin(42, &other->filter);
    test_capture_begin(other->f->device, other->f->a, TEST_CAPTURE_RELAXED);
    adapters_give(take_and_write(other->f, MIB, other->f->a), other->f->a);
    return NULL;
}

static void run_aside(aside *other, fixture *f, void *(*body)(void *)) {
    pthread_t thread;
    open_aside(other, f, f->a);
    assert_int_equal(pthread_create(&thread, NULL, body, other), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
}

/* Captures that fail in threads that end: what waits for the device does not wait for ever. */
static void failed_captures_end_with_their_thread(void **state) {
    fixture *f = *state;
    void *(*const bodies[])(void *) = {fail_without_memory, fail_with_memory};
    static aside others[2];
    for (int i = 0; i < 2; i++) {
        void *segment = NULL;
        EXPECT_OK(tn__framework_segment(0, 4 * MIB, NULL, "test", &segment));
        tn__framework_free_unordered(0, segment);
        run_aside(&others[i], f, bodies[i]);
        EXPECT_OK(tn_adapters_trim());
        assert_int_equal(adapters_number("live_blocks"), 0);
        assert_int_equal(others[i].filter.ended, 1);
    }
    EXPECT_STATUS(adapters_end(40), TN_INVALID_ARGUMENT);
}

/* A capture that goes on without the thread that began it keeps its way; another one ends it. */
static void a_capture_outlives_its_thread(void **state) {
    fixture *f = *state;
    static aside other;
    test_graph graph;
    run_aside(&other, f, leave_open);
    EXPECT_OK(tn_adapters_trim());
    assert_true(test_is_capturing(f->device, f->a));
    adapters_give(take_and_write(f, MIB, f->a), f->a);
    assert_int_equal(other.filter.ended, 0);
    graph = test_capture_end(f->device, f->a);
    EXPECT_OK(adapters_end(42));
    assert_int_equal(other.filter.ended, 1);
    test_graph_launch(f->device, &graph, f->a);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(adapters_release(42));
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("reserved_bytes"), 0);
}

static void ends_and_releases_without_a_begin_are_refused(void **state) {
    fixture *f = *state;
    adapters_filter filter = {f->a, 0, 0};
    EXPECT_STATUS(adapters_end(1), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(adapters_release(1), TN_INVALID_ARGUMENT);
    adapters_begin(1, &filter);
    EXPECT_STATUS(adapters_end(2), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_adapters_close(), TN_IN_USE);
    EXPECT_OK(adapters_end(1)); /* nothing was captured */
    EXPECT_STATUS(adapters_end(1), TN_INVALID_ARGUMENT);
    EXPECT_OK(adapters_release(1));
    assert_int_equal(filter.ended, 1);
    (void)f;
}

/* ---- shortage in a capture ------------------------------------------------------------------- */

static void shortage_in_a_capture_leaves_it_as_it_was(void **state) {
    tn_device *device = adapters_open(1, 64 * MIB);
    fixture f = {device, test_open_foreign_stream(device), NULL};
    adapters_filter filter = {f.a, 0, 0};
    void *block = NULL;
    test_graph graph;
    (void)state;
    begin(&f, 1, &filter);
    EXPECT_STATUS(tn__framework_alloc(0, 100 * MIB, f.a, "test", &block), TN_OUT_OF_DEVICE_MEMORY);
    assert_null(block);
    assert_true(test_is_capturing(device, f.a));
    block = take_and_write(&f, 16 * MIB, f.a);
    adapters_give(block, f.a);
    graph = end(&f, 1);
    test_graph_launch(device, &graph, f.a);
    EXPECT_OK(tn_device_synchronize(device));
    test_graph_destroy(device, &graph);
    EXPECT_OK(adapters_release(1));
    adapters_give(adapters_take(60 * MIB, NULL), NULL);
    test_close_foreign_stream(device, f.a);
    adapters_close(device);
}

/* Also one that no begin has told of: torch's own allocator, with a pool of our segments. */
static void shortage_in_a_capture_of_others_waits_for_nothing(void **state) {
    tn_device *device = adapters_open(1, 64 * MIB);
    tn_stream stream = test_open_foreign_stream(device);
    void *waits = NULL;
    void *block = NULL;
    test_graph graph;
    (void)state;
    EXPECT_OK(tn__framework_segment(0, 40 * MIB, NULL, "test", &waits));
    tn__framework_free_unordered(0, waits);
    test_capture_begin(device, stream, TEST_CAPTURE_RELAXED);
    EXPECT_STATUS(tn__framework_segment(0, 40 * MIB, stream, "test", &block),
                  TN_OUT_OF_DEVICE_MEMORY);
    assert_true(test_is_capturing(device, stream));
    EXPECT_OK(tn__framework_segment(0, 16 * MIB, stream, "test", &block));
    test_sim_write(device, stream, block, 16 * MIB, 10);
    graph = test_capture_end(device, stream);
    test_graph_launch(device, &graph, stream);
    test_graph_destroy(device, &graph);
    tn__framework_free_unordered(0, block);
    EXPECT_OK(tn__framework_segment(0, 60 * MIB, stream, "test", &block));
    tn__framework_free_unordered(0, block);
    test_close_foreign_stream(device, stream);
    adapters_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(launches_and_ordinary_work_use_different_memory, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(only_streams_that_capture_and_are_accepted_go_there, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_shared_pool_ends_with_its_last_graph_and_block, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_late_free_outlives_its_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(an_older_block_is_freed_after_the_capture, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_capture_that_fails_leaves_nothing_behind, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_capture_that_fails_leaves_a_shared_pool_usable, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_capture_that_fails_without_memory_is_given_up, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(another_threads_trim_leaves_a_capture_alone, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(uses_are_told_inside_and_outside_of_a_capture, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(nothing_waits_for_the_device_in_a_capture, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(ends_and_releases_without_a_begin_are_refused, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_thread_ends_its_own_begin, set_up, tear_down),
        cmocka_unit_test_setup_teardown(failed_captures_end_with_their_thread, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_capture_outlives_its_thread, set_up, tear_down),
        cmocka_unit_test(shortage_in_a_capture_of_others_waits_for_nothing),
        cmocka_unit_test(shortage_in_a_capture_leaves_it_as_it_was),
    };
    return cmocka_run_group_tests_name("adapters/framework_graphs", tests, NULL, NULL);
}
