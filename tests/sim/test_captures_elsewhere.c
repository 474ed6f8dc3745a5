/* Captures that are none of a pool's business, and which it must not spoil.
 *
 * Where all work of a device has to be waited for, since a stream that is gone has left a use that
 * no event is behind, what is known of captures keeps the wait off: each case runs with a capture
 * that is known in another way. And one that another thread begins just before the pool records an
 * event has the event, and would have whoever waits for it.
 */
#include "tensor_fixture.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "driver_cuda.h"
#include "pool_internal.h"
#include "tenure_pool.h"
#include "test_graphs.h"

enum { SIDE = 256, OUT_OF_MEMORY = 2, BLOCKING = 0, NON_BLOCKING = 1 };

#define MIB ((size_t)1 << 20)

typedef enum known_by { BY_GRAPH_POOL, BY_ITS_MAKER, BY_ADOPTION, BY_LEGACY, KNOWN_COUNT } known_by;

typedef struct lost_work {
    tensor_fixture base;
    tn_stream stream; /* another library's, that goes */
    known_by known;
    tn_stream capturing; /* that the pool has never seen */
    tn_pool *graphs;
} lost_work;

static int (*create)(tn_stream *out, unsigned flags);
static int (*destroy)(tn_stream stream);

static tn_stream make_stream(const lost_work *f, unsigned flags) {
    tn_stream stream = NULL;
    void *library = test_sim_get()->library;
    *(void **)&create = dlsym(library, "cuStreamCreate");
    *(void **)&destroy = dlsym(library, "cuStreamDestroy_v2");
    EXPECT_OK(tn__device_driver(f->base.device)->make_current(tn__device_state(f->base.device)));
    assert_int_equal(create(&stream, flags), 0);
    return stream;
}

static void open_all(lost_work *f, known_by known) {
    tensor_fixture_open_sim(&f->base);
    f->known = known;
    f->stream = make_stream(f, NON_BLOCKING);
    f->graphs =
        known == BY_GRAPH_POOL ? test_open_graph_pool(f->base.device, TN_BACKING_AUTO) : NULL;
    if (known == BY_ITS_MAKER)
        EXPECT_OK(tn_stream_create(f->base.device, &f->capturing));
    else
        f->capturing = make_stream(f, known == BY_LEGACY ? BLOCKING : NON_BLOCKING);
    if (known == BY_ADOPTION) EXPECT_OK(tn_stream_adopt(f->base.device, f->capturing));
}

static void close_all(lost_work *f) {
    if (f->graphs) EXPECT_OK(tn_pool_destroy(f->graphs));
    if (f->known == BY_ADOPTION) EXPECT_OK(tn_stream_forget(f->base.device, f->capturing));
    if (f->known == BY_ITS_MAKER)
        EXPECT_OK(tn_stream_destroy(f->base.device, f->capturing));
    else
        assert_int_equal(destroy(f->capturing), 0);
    if (f->stream) assert_int_equal(destroy(f->stream), 0);
    assert_int_equal(test_sim_get()->race_count(), 0);
    tensor_fixture_close(&f->base);
}

static void begin_capture(const lost_work *f) {
    test_capture_begin(f->base.device, f->capturing, TEST_CAPTURE_RELAXED);
    if (f->graphs) EXPECT_OK(tn_graph_capture_begin(f->graphs, f->capturing));
}

/* It was not spoiled. */
static void end_capture(const lost_work *f) {
    assert_true(test_is_capturing(f->base.device, f->capturing));
    if (f->graphs) EXPECT_OK(tn_graph_capture_abort(f->graphs));
    test_graph graph = test_capture_end(f->base.device, f->capturing);
    test_graph_destroy(f->base.device, &graph);
}

static void touch(const lost_work *f, const void *data, size_t bytes, tn_stream stream) {
    tn__range range = {data, bytes, 1};
    EXPECT_OK(
        tn__device_driver(f->base.device)
            ->ghost_launch(tn__device_state(f->base.device), "touch", &range, 1, 50.0, stream));
}

static void a_pool_takes_other_memory_than_wait_in_a_capture(void **state) {
    (void)state;
    for (int known = 0; known < KNOWN_COUNT; known++) {
        lost_work f;
        void *lost = NULL, *block = NULL;
        open_all(&f, (known_by)known);
        EXPECT_OK(tn_alloc(f.base.pool, 64 * MIB, f.stream, NULL, &lost));
        touch(&f, lost, 64 * MIB, f.stream);
        tn_stream old = f.stream;
        assert_int_equal(destroy(old), 0);
        f.stream = make_stream(&f, NON_BLOCKING);
        assert_ptr_equal(f.stream, old);
        EXPECT_OK(tn_free(lost, f.base.stream)); /* it can not be asked any more */
        begin_capture(&f);
        EXPECT_OK(tn_alloc(f.base.pool, 64 * MIB, f.base.stream, NULL, &block));
        assert_ptr_not_equal(block, lost);
        end_capture(&f);
        touch(&f, block, 64 * MIB, f.base.stream);
        EXPECT_OK(tn_free(block, f.base.stream));
        EXPECT_OK(tn_alloc(f.base.pool, 128 * MIB, f.base.stream, NULL, &block));
        touch(&f, block, 128 * MIB, f.base.stream);
        EXPECT_OK(tn_free(block, f.base.stream));
        close_all(&f);
    }
}

static void a_plane_is_not_waited_for_in_a_capture(void **state) {
    (void)state;
    for (int known = 0; known < KNOWN_COUNT; known++) {
        lost_work f;
        tn_plane_view view;
        tn_lease lease;
        open_all(&f, (known_by)known);
        tn_tensor tensor = fixture_tensor(&f.base, TN_FORMAT_FP8_BLOCK_2D, SIDE, SIDE, "tensor");
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f.stream, &lease, &view));
        fixture_touch(&f.base, &view, 1, f.stream);
        EXPECT_OK(tn_lease_end(lease));
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_READ, f.stream, &lease, &view));
        fixture_touch(&f.base, &view, 0, f.stream);
        assert_int_equal(test_sim_get()->fault("cuEventRecord", 1, 0, OUT_OF_MEMORY), 0);
        EXPECT_OK(tn_lease_abandon(lease));
        assert_int_equal(destroy(f.stream), 0);
        f.stream = NULL;
        begin_capture(&f);
        EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f.base.stream, &lease, &view),
                      TN_INVALID_STATE);
        EXPECT_ERROR_HAS("not while a stream captures");
        end_capture(&f);
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f.base.stream, &lease, &view));
        fixture_touch(&f.base, &view, 1, f.base.stream);
        EXPECT_OK(tn_lease_end(lease));
        assert_int_equal(test_sim_get()->lost_stream_uses(), 0);
        close_all(&f);
    }
}

/* ---- a capture that begins meanwhile --------------------------------------------------------- */

static int (*record_really)(void *event, void *stream);
static const tensor_fixture *meanwhile; /* its stream begins to capture just before the record */

static int record_in_capture(void *event, void *stream) {
    if (meanwhile && stream == meanwhile->stream) {
        test_capture_begin(meanwhile->device, stream, TEST_CAPTURE_RELAXED);
        meanwhile = NULL;
    }
    return record_really(event, stream);
}

static const tn__cu_calls *begin_meanwhile(const tensor_fixture *base) {
    static tn__cu_calls calls;
    const tn__cu_calls *real = base->pool->state->cu;
    calls = *real;
    record_really = real->event_record;
    calls.event_record = record_in_capture;
    base->pool->state->cu = &calls;
    meanwhile = base;
    return real;
}

/* The capture has begun, and nobody else is in it. */
static void end_meanwhile(const tensor_fixture *base, const tn__cu_calls *real) {
    base->pool->state->cu = real;
    assert_null(meanwhile);
    assert_true(test_is_capturing(base->device, base->stream));
    assert_false(test_is_capturing(base->device, base->other));
    test_graph graph = test_capture_end(base->device, base->stream);
    test_graph_destroy(base->device, &graph);
}

static void nobody_waits_for_an_event_that_a_capture_has(void **state) {
    tensor_fixture base;
    void *block = NULL, *first = NULL;
    (void)state;
    tensor_fixture_open_sim(&base);
    EXPECT_OK(tn_alloc(base.pool, 64 * MIB, base.stream, NULL, &first));
    EXPECT_OK(tn_free(first, base.stream));
    const tn__cu_calls *real = begin_meanwhile(&base);
    EXPECT_OK(tn_alloc(base.pool, 64 * MIB, base.other, NULL, &block));
    assert_ptr_not_equal(block, first);
    EXPECT_OK(tn_pool_trim(base.pool, 0, NULL)); /* asks no event of the capture */
    end_meanwhile(&base, real);
    EXPECT_OK(tn_free(block, base.other));
    EXPECT_OK(tn_alloc(base.pool, 128 * MIB, base.other, NULL, &block));
    EXPECT_OK(tn_free(block, base.other));
    assert_int_equal(test_sim_get()->race_count(), 0);
    tensor_fixture_close(&base);
}

static void no_plane_waits_for_an_event_that_a_capture_has(void **state) {
    tensor_fixture base;
    (void)state;
    tensor_fixture_open_sim(&base);
    tn_tensor tensor = fixture_tensor(&base, TN_FORMAT_FP8_BLOCK_2D, SIDE, SIDE, "tensor");
    fixture_write(tensor, TN_PLANE_ROW, base.stream);
    EXPECT_OK(tn_stream_synchronize(base.device, base.stream));
    const tn__cu_calls *real = begin_meanwhile(&base);
    fixture_write(tensor, TN_PLANE_ROW, base.other);
    end_meanwhile(&base, real);
    uint64_t waits = test_calls(base.device, TN_CALL_STREAM_WAIT);
    fixture_write(tensor, TN_PLANE_ROW, base.other); /* now it can be waited for */
    assert_int_equal(test_calls(base.device, TN_CALL_STREAM_WAIT) - waits, 1);
    assert_int_equal(test_sim_get()->race_count(), 0);
    tensor_fixture_close(&base);
}

/* ---- captures of a thread that others know nothing of ---------------------------------------- */

enum { CAPTURES = 60 };

typedef struct capturer {
    lost_work work;
    atomic_int is_over;
} capturer;

/* As tn_no_wait_begin says: nobody may be about to wait for the device when a capture begins, and
 * it is open in the graph pool till it has ended. */
static void *capture_again_and_again(void *argument) {
    capturer *self = argument;
    const char *failure = NULL;
    for (int i = 0; i < CAPTURES && !failure; i++) {
        if (tn_no_wait_begin() != TN_OK) failure = "no no-wait time";
        test_capture_begin(self->work.base.device, self->work.capturing, TEST_CAPTURE_THREAD_LOCAL);
        if (tn_graph_capture_begin(self->work.graphs, self->work.capturing) != TN_OK)
            failure = "the capture could not be opened";
        if (tn_no_wait_end() != TN_OK) failure = "a no-wait time without an end";
        sched_yield();
        if (!test_is_capturing(self->work.base.device, self->work.capturing))
            failure = "it was spoiled";
        test_capture_drop(self->work.base.device, self->work.capturing);
        if (tn_graph_capture_abort(self->work.graphs) != TN_OK) failure = "it could not be closed";
    }
    atomic_store(&self->is_over, 1);
    return (void *)failure;
}

/* While a capture is open there may be no memory, since what is waited for stays. */
static void *take_if_there_is(const lost_work *f, tn_stream stream) {
    void *block = NULL;
    tn_status status = tn_alloc(f->base.pool, 64 * MIB, stream, NULL, &block);
    if (status != TN_OUT_OF_DEVICE_MEMORY) EXPECT_OK(status);
    if (block) touch(f, block, 64 * MIB, stream);
    return block;
}

/* Memory that a stream which is gone has left in use, each time. */
static void lose_a_stream(const lost_work *f) {
    tn_stream old = make_stream(f, NON_BLOCKING);
    void *lost = take_if_there_is(f, old);
    assert_int_equal(destroy(old), 0);
    tn_stream other = make_stream(f, NON_BLOCKING);
    EXPECT_OK(tn_free(lost, f->base.stream));
    EXPECT_OK(tn_free(take_if_there_is(f, f->base.stream), f->base.stream));
    assert_int_equal(destroy(other), 0);
}

static void captures_that_begin_in_a_no_wait_time_are_never_spoiled(void **state) {
    capturer self = {.is_over = 0};
    pthread_t thread;
    void *failure = NULL;
    (void)state;
    open_all(&self.work, BY_GRAPH_POOL);
    assert_int_equal(pthread_create(&thread, NULL, capture_again_and_again, &self), 0);
    while (!atomic_load(&self.is_over))
        lose_a_stream(&self.work);
    assert_int_equal(pthread_join(thread, &failure), 0);
    if (failure) fail_msg("%s", (const char *)failure);
    close_all(&self.work);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nobody_waits_for_an_event_that_a_capture_has),
        cmocka_unit_test(no_plane_waits_for_an_event_that_a_capture_has),
        cmocka_unit_test(a_pool_takes_other_memory_than_wait_in_a_capture),
        cmocka_unit_test(a_plane_is_not_waited_for_in_a_capture),
        cmocka_unit_test(captures_that_begin_in_a_no_wait_time_are_never_spoiled),
    };
    return cmocka_run_group_tests_name("sim/captures_elsewhere", tests, NULL, NULL);
}
