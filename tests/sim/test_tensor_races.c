/* Leases keep the uses of a plane in order on every stream: the simulated driver sees no race
 * where work is put under leases, and sees one where it is not.
 */
#include "tensor_fixture.h"

#include <pthread.h>

#include "host_alloc.h"
#include "tenure_lifetime.h"
#include "tensor_state.h"

enum { ROWS = 64, COLS = 64, STREAMS = 4, STEPS = 400 };

static void use(const tensor_fixture *f, tn_tensor tensor, tn_plane plane, tn_access access,
                tn_stream stream) {
    tn_plane_view view, old;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, plane, access, stream, &lease, &view));
    if (access == TN_REPLACE && tn_lease_old_view(lease, &old) == TN_OK) {
        fixture_touch(f, &old, 0, stream);
    }
    fixture_touch(f, &view, access != TN_READ, stream);
    EXPECT_OK(tn_lease_end(lease));
}

static uint64_t next_random(uint64_t *seed) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *seed >> 33;
}

/* ---- in order ------------------------------------------------------------------------------ */

static void one_random_step(tensor_fixture *f, tn_tensor *tensors, tn_stream *streams,
                            uint64_t *seed) {
    tn_tensor *tensor = &tensors[next_random(seed) % 3];
    tn_stream *stream = &streams[next_random(seed) % STREAMS];
    tn_plane plane = next_random(seed) % 2 ? TN_PLANE_ROW : TN_PLANE_COL;
    switch (next_random(seed) % 8) {
    case 0: use(f, *tensor, plane, TN_WRITE, *stream); break;
    case 1: use(f, *tensor, plane, TN_REPLACE, *stream); break;
    case 2: /* another tensor gets the memory, on any stream */
        EXPECT_OK(tn_tensor_destroy(*tensor, *stream));
        *tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
        use(f, *tensor, TN_PLANE_ROW, TN_WRITE, *stream);
        break;
    case 3: /* dropped where another plane is left */
        if (fixture_state(*tensor, TN_PLANE_ROW) == TN_PLANE_VALID) {
            EXPECT_OK(tn_plane_require(*tensor, TN_PLANE_COL, *stream));
            EXPECT_OK(tn_plane_drop(*tensor, plane, *stream));
        }
        break;
    case 4: /* a stream ends and another one may get its handle */
        if (next_random(seed) % 4) break;
        EXPECT_OK(tn_stream_destroy(f->device, *stream));
        EXPECT_OK(tn_stream_create(f->device, stream));
        break;
    default: use(f, *tensor, plane, TN_READ, *stream); break;
    }
}

static void run_seed(uint64_t seed) {
    tensor_fixture fixture;
    tn_stream streams[STREAMS];
    tn_tensor tensors[3];
    uint64_t first_seed = seed;
    tensor_fixture_open_sim(&fixture);
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_create(fixture.device, &streams[i]));
    for (int i = 0; i < 3; i++) {
        tensors[i] = fixture_tensor(&fixture, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
        use(&fixture, tensors[i], TN_PLANE_ROW, TN_WRITE, streams[0]);
    }
    for (int step = 0; step < STEPS; step++) {
        one_random_step(&fixture, tensors, streams, &seed);
        if (test_sim_get()->race_count()) {
            fail_msg("seed %llu, step %d: %s", (unsigned long long)first_seed, step,
                     test_sim_get()->race_text(0));
        }
        EXPECT_OK(tn_ledger_check(fixture.pool));
    }
    EXPECT_OK(tn_scope_close(fixture.scope));
    EXPECT_OK(tn_pool_check(fixture.pool));
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_destroy(fixture.device, streams[i]));
    tensor_fixture_close(&fixture);
}

static void work_under_leases_never_races(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++)
        run_seed(seed);
}

typedef struct elsewhere {
    const tensor_fixture *fixture;
    tn_tensor tensor;
    tn_stream stream;
} elsewhere;

static void *write_elsewhere(void *argument) {
    const elsewhere *self = argument;
    use(self->fixture, self->tensor, TN_PLANE_ROW, TN_WRITE, self->stream);
    return NULL;
}

/* The per-thread default stream is another one in each thread, under one handle. */
static void per_thread_default_streams_are_told_apart(void **state) {
    tensor_fixture f;
    tn_stream per_thread = (tn_stream)(uintptr_t)2;
    pthread_t thread;
    (void)state;
    tensor_fixture_open_sim(&f);
    elsewhere other = {&f, fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w"), per_thread};
    use(&f, other.tensor, TN_PLANE_ROW, TN_WRITE, per_thread);
    assert_int_equal(pthread_create(&thread, NULL, write_elsewhere, &other), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    use(&f, other.tensor, TN_PLANE_ROW, TN_READ, per_thread);
    assert_int_equal(test_sim_get()->race_count(), 0);
    tensor_fixture_close(&f);
}

/* ---- out of order: the injected bugs ------------------------------------------------------- */

/* Closes a fixture in which a race was provoked. */
static void close_after_race(tensor_fixture *f, int is_race_expected) {
    assert_int_equal(test_sim_get()->race_count() > 0, is_race_expected);
    EXPECT_OK(tn_device_synchronize(f->device));
    EXPECT_OK(tn_scope_close(f->scope));
    EXPECT_OK(tn_stream_destroy(f->device, f->stream));
    EXPECT_OK(tn_stream_destroy(f->device, f->other));
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_device_destroy(f->device));
}

static void work_put_after_the_end_of_its_lease_is_a_race(void **state) {
    (void)state;
    for (int is_late = 0; is_late < 2; is_late++) {
        tensor_fixture f;
        tn_plane_view view;
        tn_lease lease;
        tensor_fixture_open_sim(&f);
        tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
        use(&f, tensor, TN_PLANE_ROW, TN_WRITE, f.stream);
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_READ, f.stream, &lease, &view));
        if (!is_late) fixture_touch(&f, &view, 0, f.stream);
        EXPECT_OK(tn_lease_end(lease));
        use(&f, tensor, TN_PLANE_ROW, TN_WRITE, f.other);
        if (is_late) fixture_touch(&f, &view, 0, f.stream);
        close_after_race(&f, is_late);
    }
}

/* The plane forgets a read before it is freed: its memory is given out again too early. */
static void a_use_that_is_not_recorded_is_a_race(void **state) {
    (void)state;
    for (int is_forgotten = 0; is_forgotten < 2; is_forgotten++) {
        tensor_fixture f;
        tn_plane_view view;
        tn_lease lease;
        tn__tensor_object *object = NULL;
        tensor_fixture_open_sim(&f);
        tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
        use(&f, tensor, TN_PLANE_ROW, TN_WRITE, f.stream);
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_READ, f.other, &lease, &view));
        fixture_touch(&f, &view, 0, f.other);
        if (is_forgotten) { /* as if the lease's stream were the block's own */
            EXPECT_OK(tn__tensor_acquire(tensor, &object));
            object->planes[TN_PLANE_ROW].home_stream_id =
                object->planes[TN_PLANE_ROW].first_lease->stream_id;
            tn__tensor_unlock(object);
        }
        EXPECT_OK(tn_lease_end(lease));
        EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
        tn_tensor next = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "next");
        use(&f, next, TN_PLANE_ROW, TN_WRITE, f.stream);
        close_after_race(&f, is_forgotten);
    }
}

/* The pool could not be told of a use when its lease was abandoned: it is told before the free. */
static void a_use_whose_record_failed_is_recorded_before_the_free(void **state) {
    (void)state;
    for (int is_write = 0; is_write < 2; is_write++) {
        tensor_fixture f;
        tn_plane_view view;
        tn_lease lease;
        tn__tensor_object *object = NULL;
        tensor_fixture_open_sim(&f);
        tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
        use(&f, tensor, TN_PLANE_ROW, TN_WRITE, f.stream);
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, is_write ? TN_UPDATE : TN_READ, f.other,
                                 &lease, &view));
        fixture_touch(&f, &view, is_write, f.other);
        tn__host_alloc_fault(1, 1); /* the pool has not seen this stream yet and can not note it */
        EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_ROW, f.other), TN_IN_USE);
        EXPECT_STATUS(tn_lease_end(lease), TN_OUT_OF_HOST_MEMORY); /* nothing has changed */
        EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_ROW, f.other), TN_IN_USE);
        EXPECT_OK(tn_lease_abandon(lease));
        EXPECT_ERROR_HAS("drop must wait"); /* the last error is still what it was */
        tn__host_alloc_fault(0, 0);
        EXPECT_OK(tn__tensor_acquire(tensor, &object));
        const tn__plane_object *plane = &object->planes[TN_PLANE_ROW];
        assert_int_equal(is_write ? plane->write.is_recorded : plane->reads[0].is_recorded, 0);
        tn__tensor_unlock(object);
        EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
        tn_tensor next = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "next");
        use(&f, next, TN_PLANE_ROW, TN_WRITE, f.stream);
        close_after_race(&f, 0);
    }
}

/* A consumer's stream that is destroyed after its lease: there is no name for it any more, and its
 * work may still run. */
static void work_of_a_stream_that_was_destroyed_is_waited_for(void **state) {
    (void)state;
    for (int is_write = 0; is_write < 2; is_write++) {
        tensor_fixture f;
        tn_stream foreign = NULL;
        tensor_fixture_open_sim(&f);
        const tn__driver *driver = tn__device_driver(f.device);
        tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
        use(&f, tensor, TN_PLANE_ROW, TN_WRITE, f.stream);
        EXPECT_OK(driver->stream_create(tn__device_state(f.device), &foreign));
        use(&f, tensor, TN_PLANE_ROW, is_write ? TN_UPDATE : TN_READ, foreign);
        EXPECT_OK(driver->stream_destroy(tn__device_state(f.device), foreign));
        use(&f, tensor, TN_PLANE_ROW, TN_UPDATE, f.other);
        EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
        close_after_race(&f, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(work_of_a_stream_that_was_destroyed_is_waited_for),
        cmocka_unit_test(work_under_leases_never_races),
        cmocka_unit_test(per_thread_default_streams_are_told_apart),
        cmocka_unit_test(work_put_after_the_end_of_its_lease_is_a_race),
        cmocka_unit_test(a_use_that_is_not_recorded_is_a_race),
        cmocka_unit_test(a_use_whose_record_failed_is_recorded_before_the_free),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
