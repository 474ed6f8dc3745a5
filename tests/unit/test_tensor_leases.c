/* Leases: who may hold what, what becomes stale and valid again, and which stream waits. */
#include "tensor_fixture.h"

#include <stdio.h>
#include <string.h>

#include "books.h"
#include "driver.h"
#include "host_alloc.h"

enum { PLANE_BYTES = 64 + 16 }; /* 8 x 8 in 2D: data and one row of four floats */

static tn_tensor square(const tensor_fixture *f) {
    return fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
}

static void expect_begin(tn_tensor tensor, tn_plane plane, tn_access access, tn_stream stream,
                         tn_status expected) {
    tn_plane_view view = {.data = &view};
    tn_lease lease = {5};
    EXPECT_STATUS(tn_lease_begin(tensor, plane, access, stream, &lease, &view), expected);
    assert_int_equal(lease.value, 5); /* results are written last */
    assert_ptr_equal(view.data, &view);
}

/* ---- what a lease gives -------------------------------------------------------------------- */

static void a_lease_gives_addresses_and_the_layout(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_1D, 129, 257, "x");
    tn_plane_layout layout;
    tn_plane_view view, again;
    tn_lease lease;
    size_t bytes = 0;
    tn_pool *pool = NULL;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_WRITE, f->stream, &lease, &view));
    EXPECT_OK(tn_plane_layout_get(tensor, TN_PLANE_COL, &layout));
    assert_memory_equal(&view.layout, &layout, sizeof layout);
    assert_int_equal(view.dtype, TN_E4M3);
    assert_int_equal(view.plane, TN_PLANE_COL);
    EXPECT_OK(tn_block_info(view.data, &bytes, &pool));
    assert_int_equal(bytes, layout.data_bytes);
    assert_ptr_equal(pool, f->pool);
    EXPECT_OK(tn_block_info(view.scale, &bytes, &pool));
    assert_int_equal(bytes, layout.scale_bytes);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_READ, f->stream, &lease, &again));
    assert_ptr_equal(again.data, view.data); /* it stays where it is */
    EXPECT_OK(tn_lease_end(lease));
}

static void a_plain_plane_has_no_scale_address(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_PLAIN, 3, 5, "y");
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, f->stream, &lease, &view));
    assert_non_null(view.data);
    assert_null(view.scale);
    assert_int_equal(fixture_owned_bytes(f), 60);
    EXPECT_OK(tn_lease_end(lease));
}

/* ---- who may hold what --------------------------------------------------------------------- */

static void readers_share_and_writers_exclude(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    char holder[64];
    tn_lease write = fixture_lease(tensor, TN_PLANE_ROW, TN_WRITE, f->other);
    expect_begin(tensor, TN_PLANE_ROW, TN_READ, f->stream, TN_IN_USE);
    snprintf(holder, sizeof holder, "under a WRITE lease on stream %p", f->other);
    EXPECT_ERROR_HAS(holder);
    EXPECT_ERROR_HAS("tensor w, plane ROW");
    expect_begin(tensor, TN_PLANE_ROW, TN_WRITE, f->stream, TN_IN_USE);
    expect_begin(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream, TN_IN_USE);
    EXPECT_OK(tn_lease_end(write));
    tn_lease first = fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->stream);
    tn_lease second = fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->other);
    expect_begin(tensor, TN_PLANE_ROW, TN_WRITE, f->stream, TN_IN_USE);
    EXPECT_ERROR_HAS("under a READ lease");
    assert_int_equal(fixture_ledger(f->scope).leases, 2);
    EXPECT_OK(tn_lease_end(first));
    expect_begin(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream, TN_IN_USE); /* one reader is left */
    EXPECT_OK(tn_lease_end(second));
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream)));
    assert_int_equal(fixture_ledger(f->scope).leases, 0);
}

static void a_read_of_one_plane_keeps_writers_off_the_other(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    tn_lease read = fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->stream);
    expect_begin(tensor, TN_PLANE_COL, TN_WRITE, f->stream, TN_IN_USE);
    EXPECT_ERROR_HAS("plane ROW is under a READ lease");
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_ABSENT);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    EXPECT_OK(tn_lease_end(read));
}

static void update_wants_a_valid_plane(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    expect_begin(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream, TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tensor w, plane ROW is ABSENT: UPDATE needs a valid plane");
    EXPECT_OK(tn_plane_make(tensor, TN_PLANE_ROW, f->stream));
    expect_begin(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream, TN_INVALID_STATE);
    EXPECT_ERROR_HAS("ALLOCATED");
    expect_begin(tensor, TN_PLANE_ROW, TN_READ, f->stream, TN_INVALID_STATE);
    fixture_write(tensor, TN_PLANE_COL, f->stream);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_ROW, f->stream));
    fixture_write(tensor, TN_PLANE_COL, f->stream);
    expect_begin(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream, TN_INVALID_STATE);
    EXPECT_ERROR_HAS("STALE");
}

static void a_lease_is_ended_once(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    tn_lease lease = fixture_lease(tensor, TN_PLANE_ROW, TN_WRITE, f->stream);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_STATUS(tn_lease_end(lease), TN_STALE_HANDLE);
    EXPECT_ERROR_HAS("lease 0x");
    EXPECT_STATUS(tn_lease_abandon(lease), TN_STALE_HANDLE);
    tn_lease next = fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->stream); /* in the same slot */
    EXPECT_STATUS(tn_lease_end(lease), TN_STALE_HANDLE);
    assert_int_equal(fixture_ledger(f->scope).leases, 1);
    EXPECT_OK(tn_lease_end(next));
    EXPECT_STATUS(tn_lease_end((tn_lease){0}), TN_STALE_HANDLE);
}

/* ---- stale and valid again ----------------------------------------------------------------- */

static void a_write_stales_the_other_plane_when_it_begins(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    tn_lease lease = fixture_lease(tensor, TN_PLANE_ROW, TN_WRITE, f->stream);
    fixture_expect_states(tensor, TN_PLANE_ALLOCATED, TN_PLANE_STALE);
    expect_begin(tensor, TN_PLANE_COL, TN_READ, f->stream, TN_IN_USE);
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_COL, f->stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("plane COL is STALE and the last copy");
    EXPECT_OK(tn_lease_end(lease));
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_STALE);
    assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES); /* KEEP: derived in place */
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_VALID);
    assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES);
    assert_int_equal(fixture_ledger(f->scope).peak_total_bytes, 2 * PLANE_BYTES);
}

static void an_abandoned_write_gives_the_other_plane_back(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    tn_lease lease = fixture_lease(tensor, TN_PLANE_COL, TN_WRITE, f->stream); /* makes COL */
    fixture_expect_states(tensor, TN_PLANE_STALE, TN_PLANE_ALLOCATED);
    EXPECT_OK(tn_lease_abandon(lease));
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_ABSENT);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_lease_abandon(fixture_lease(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream)));
    fixture_expect_states(tensor, TN_PLANE_ALLOCATED,
                          TN_PLANE_VALID); /* ROW's contents are undefined */
    EXPECT_OK(tn_lease_abandon(fixture_lease(tensor, TN_PLANE_COL, TN_READ, f->stream)));
    fixture_expect_states(tensor, TN_PLANE_ALLOCATED, TN_PLANE_VALID);
}

static void two_planes_written_at_once_stale_neither(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    tn_lease row = fixture_lease(tensor, TN_PLANE_ROW, TN_WRITE, f->stream);
    tn_lease col = fixture_lease(tensor, TN_PLANE_COL, TN_WRITE, f->stream);
    EXPECT_OK(tn_lease_end(row));
    EXPECT_OK(tn_lease_end(col));
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_VALID);
    row = fixture_lease(tensor, TN_PLANE_ROW, TN_WRITE, f->stream);
    col = fixture_lease(tensor, TN_PLANE_COL, TN_WRITE, f->stream);
    EXPECT_OK(tn_lease_end(row));
    EXPECT_OK(tn_lease_abandon(col)); /* its old contents are older than ROW's */
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_ALLOCATED);
    row = fixture_lease(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream);
    expect_begin(tensor, TN_PLANE_COL, TN_WRITE, f->stream, TN_IN_USE); /* ROW is being read */
    EXPECT_OK(tn_lease_end(row));
}

/* COL was valid before ROW's write began. While that goes on COL is written too, so there is
 * nothing left to come back to. */
static void a_plane_written_meanwhile_does_not_come_back(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    fixture_write(tensor, TN_PLANE_COL, f->stream);
    tn_lease row = fixture_lease(tensor, TN_PLANE_ROW, TN_WRITE, f->stream);
    tn_lease col = fixture_lease(tensor, TN_PLANE_COL, TN_WRITE, f->stream);
    EXPECT_OK(tn_lease_abandon(col));
    EXPECT_OK(tn_lease_abandon(row));
    fixture_expect_states(tensor, TN_PLANE_ABSENT, TN_PLANE_ALLOCATED);
    EXPECT_STATUS(tn_plane_require(tensor, TN_PLANE_COL, f->stream), TN_INVALID_STATE);
}

/* ---- streams ------------------------------------------------------------------------------- */

static void uses_on_one_stream_need_no_wait(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    uint64_t waits = fixture_waits(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_COL, TN_READ, f->stream)));
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_COL, TN_READ, f->stream)));
    assert_int_equal(fixture_waits(f), waits);
}

static void a_reader_waits_once_for_the_last_write_and_not_for_readers(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    uint64_t waits = fixture_waits(f);
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->other)));
    assert_int_equal(fixture_waits(f), waits + 1);
    EXPECT_OK(
        tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->other))); /* has waited */
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->stream)));
    assert_int_equal(fixture_waits(f), waits + 1);
}

static void a_writer_waits_for_every_reader_and_through_them_for_the_write(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    tn_stream third;
    EXPECT_OK(tn_stream_create(f->device, &third));
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->other)));
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->stream)));
    uint64_t waits = fixture_waits(f);
    fixture_write(tensor, TN_PLANE_ROW, third); /* write on stream, reads on stream and other */
    assert_int_equal(fixture_waits(f), waits + 2);
    fixture_write(tensor, TN_PLANE_ROW, third); /* only its own write is left */
    assert_int_equal(fixture_waits(f), waits + 2);
    fixture_write(tensor, TN_PLANE_ROW, f->stream); /* no reader since third's write */
    assert_int_equal(fixture_waits(f), waits + 3);
    EXPECT_OK(tn_stream_destroy(f->device, third));
}

static void a_plane_made_on_one_stream_is_used_on_another_after_its_allocation(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    EXPECT_OK(tn_plane_make(tensor, TN_PLANE_ROW, f->stream));
    uint64_t waits = fixture_waits(f);
    fixture_write(tensor, TN_PLANE_ROW, f->other);
    assert_int_equal(fixture_waits(f), waits + 1);
}

static void many_reading_streams_are_bounded_by_merging_idle_ones(void **state) {
    const tensor_fixture *f = *state;
    enum { STREAMS = 20 };
    tn_stream streams[STREAMS];
    tn_lease leases[STREAMS];
    tn_tensor tensor = square(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_create(f->device, &streams[i]));
    uint64_t waits = fixture_waits(f);
    for (int i = 0; i < STREAMS; i++) {
        EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_READ, streams[i])));
    }
    assert_int_equal(fixture_waits(f), waits + STREAMS + (STREAMS - 8)); /* 8 are kept apart */
    waits = fixture_waits(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    assert_int_equal(fixture_waits(f), waits + 8);
    for (int i = 0; i < STREAMS; i++) { /* all at once: none may be merged */
        leases[i] = fixture_lease(tensor, TN_PLANE_ROW, TN_READ, streams[i]);
    }
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_lease_end(leases[i]));
    waits = fixture_waits(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    assert_int_equal(fixture_waits(f), waits + STREAMS);
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_destroy(f->device, streams[i]));
}

static uint64_t calls_of(const tensor_fixture *f, tn_driver_call call) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(f->device, &stats));
    return stats.calls[call];
}

static void a_stream_that_has_ended_is_not_waited_for(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    tn_stream gone[2];
    unsigned char data[64] = {1}, back[64];
    float scales[4] = {1};
    for (int i = 0; i < 2; i++)
        EXPECT_OK(tn_stream_create(f->device, &gone[i]));
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_ROW, data, 64, scales, 16, gone[0]));
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_READ, gone[1])));
    for (int i = 0; i < 2; i++)
        EXPECT_OK(tn_stream_destroy(f->device, gone[i]));
    uint64_t waits = fixture_waits(f), stream_calls = calls_of(f, TN_CALL_STREAM);
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->stream)));
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_UPDATE, f->other)));
    assert_int_equal(fixture_waits(f), waits + 1);               /* other for stream */
    assert_int_equal(calls_of(f, TN_CALL_STREAM), stream_calls); /* nor for the whole device */
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_ROW, back, 64, scales, 16, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    assert_memory_equal(back, data, 64);
}

/* Asks for the id of a stream; 1 if it is kept to be known the next time. */
static int is_id_kept(tn_scope scope, tn_stream stream, uint64_t *stream_id) {
    tn__scope_object *object;
    int is_kept = 0;
    EXPECT_OK(tn__scope_acquire(scope, &object));
    tn__books *books = object->books;
    if (*stream_id == 0) EXPECT_OK(tn__books_stream_id(books, stream, stream_id));
    for (unsigned i = 0; i < TN__RECENT_STREAMS; i++) {
        is_kept |= tn__recent_is_set(books, i) && books->recent_ids[i].stream_id == *stream_id;
    }
    tn__scope_unlock(object);
    return is_kept;
}

/* Only of a stream whose end we hear of may the id be kept, and only until then: another stream
 * may get the same handle. */
static void ids_are_kept_of_our_own_streams_until_they_end(void **state) {
    const tensor_fixture *f = *state;
    const tn__driver *driver = tn__device_driver(f->device);
    tn__driver_device *device = tn__device_state(f->device);
    tn_stream own, foreign;
    uint64_t own_id = 0, foreign_id = 0, default_id = 0, asked = 0;
    EXPECT_OK(tn_stream_create(f->device, &own));
    EXPECT_OK(driver->stream_create(device, &foreign));
    assert_true(is_id_kept(f->scope, own, &own_id));
    assert_false(is_id_kept(f->scope, foreign, &foreign_id));
    assert_true(is_id_kept(f->scope, NULL, &default_id));
    EXPECT_OK(driver->stream_id(device, own, &asked));
    assert_int_equal(asked, own_id);
    EXPECT_OK(driver->stream_id(device, foreign, &asked));
    assert_int_equal(asked | TN__STREAM_ID_MAY_GO, foreign_id);
    EXPECT_OK(tn_stream_destroy(f->device, own));
    assert_false(is_id_kept(f->scope, own, &own_id));
    assert_true(is_id_kept(f->scope, NULL, &default_id));
    EXPECT_OK(driver->stream_destroy(device, foreign));
}

static void leases_on_a_stream_that_has_ended_can_still_be_ended(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f), other = square(f);
    tn_stream gone;
    EXPECT_OK(tn_stream_create(f->device, &gone));
    tn_lease write = fixture_lease(tensor, TN_PLANE_ROW, TN_WRITE, gone);
    tn_lease abandoned = fixture_lease(other, TN_PLANE_ROW, TN_WRITE, gone);
    EXPECT_OK(tn_stream_destroy(f->device, gone));
    EXPECT_OK(tn_lease_end(write));
    EXPECT_OK(tn_lease_abandon(abandoned));
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_ABSENT);
    fixture_expect_states(other, TN_PLANE_ABSENT, TN_PLANE_ABSENT);
}

static uint64_t all_driver_calls(const tensor_fixture *f) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    uint64_t calls = 0;
    EXPECT_OK(tn_device_driver_stats(f->device, &stats));
    for (int i = 0; i < TN_CALL_COUNT; i++)
        calls += stats.calls[i];
    return calls;
}

/* Planes come and go, leases begin and end: on one stream that is bookkeeping alone. */
static void a_warm_step_on_one_stream_makes_no_driver_call(void **state) {
    const tensor_fixture *f = *state;
    uint64_t calls = 0;
    for (int round = 0; round < 10; round++) {
        if (round == 1) calls = all_driver_calls(f);
        tn_tensor tensor = square(f);
        fixture_write(tensor, TN_PLANE_ROW, f->stream);
        fixture_write(tensor, TN_PLANE_COL, f->stream);
        EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_COL, TN_READ, f->stream)));
        EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream));
        EXPECT_OK(tn_tensor_destroy(tensor, f->stream));
    }
    assert_int_equal(all_driver_calls(f), calls);
}

/* What one stream writes another reads: the values arrive, in any order of the host's calls. */
static void values_cross_streams_in_order(void **state) {
    const tensor_fixture *f = *state;
    enum { BYTES = 1 << 20 };
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_PLAIN, 1, BYTES / 4, "big");
    unsigned char *data = test_malloc(BYTES), *back = test_malloc(BYTES);
    for (int round = 1; round <= 20; round++) {
        memset(data, round, BYTES);
        EXPECT_OK(tn_plane_write(tensor, TN_PLANE_DATA, data, BYTES, NULL, 0, f->stream));
        EXPECT_OK(tn_plane_read(tensor, TN_PLANE_DATA, back, BYTES, NULL, 0, f->other));
        EXPECT_OK(tn_stream_synchronize(f->device, f->other));
        assert_memory_equal(back, data, BYTES);
    }
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    test_free(data);
    test_free(back);
}

static void no_host_memory_is_left_when_all_is_closed(void **state) {
    (void)state;
    tensor_fixture fixture;
    long blocks = tn__host_live_blocks();
    tensor_fixture_open(&fixture);
    tn_tensor tensor = square(&fixture);
    fixture_write(tensor, TN_PLANE_ROW, fixture.stream);
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_COL, TN_READ, fixture.other)));
    tensor_fixture_close(&fixture);
    assert_int_equal(tn__host_live_blocks(), blocks);
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, tensor_fixture_tear_down)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(a_lease_gives_addresses_and_the_layout),
        WITH_FIXTURE(a_plain_plane_has_no_scale_address),
        WITH_FIXTURE(readers_share_and_writers_exclude),
        WITH_FIXTURE(a_read_of_one_plane_keeps_writers_off_the_other),
        WITH_FIXTURE(update_wants_a_valid_plane),
        WITH_FIXTURE(a_lease_is_ended_once),
        WITH_FIXTURE(a_write_stales_the_other_plane_when_it_begins),
        WITH_FIXTURE(an_abandoned_write_gives_the_other_plane_back),
        WITH_FIXTURE(two_planes_written_at_once_stale_neither),
        WITH_FIXTURE(a_plane_written_meanwhile_does_not_come_back),
        WITH_FIXTURE(uses_on_one_stream_need_no_wait),
        WITH_FIXTURE(a_reader_waits_once_for_the_last_write_and_not_for_readers),
        WITH_FIXTURE(a_writer_waits_for_every_reader_and_through_them_for_the_write),
        WITH_FIXTURE(a_plane_made_on_one_stream_is_used_on_another_after_its_allocation),
        WITH_FIXTURE(many_reading_streams_are_bounded_by_merging_idle_ones),
        WITH_FIXTURE(a_stream_that_has_ended_is_not_waited_for),
        WITH_FIXTURE(ids_are_kept_of_our_own_streams_until_they_end),
        WITH_FIXTURE(leases_on_a_stream_that_has_ended_can_still_be_ended),
        WITH_FIXTURE(a_warm_step_on_one_stream_makes_no_driver_call),
        WITH_FIXTURE(values_cross_streams_in_order),
        cmocka_unit_test(no_host_memory_is_left_when_all_is_closed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
