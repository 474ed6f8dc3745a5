/* Streams and events of the host driver: order, waits across streams, unknown streams.
 *
 * Nothing here sleeps. A gate is a host task that stands in its stream until the test opens it, so
 * that "not yet" can be asserted for certain.
 */
#include "test_support.h"

#include <pthread.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"

typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int is_entered;
    int is_open;
} gate;

#define GATE_INIT                                                                                  \
    { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0 }

static void stand_in_gate(void *argument) {
    gate *closed = argument;
    pthread_mutex_lock(&closed->lock);
    closed->is_entered = 1;
    pthread_cond_broadcast(&closed->changed);
    while (!closed->is_open)
        pthread_cond_wait(&closed->changed, &closed->lock);
    pthread_mutex_unlock(&closed->lock);
}

static void wait_until_entered(gate *closed) {
    pthread_mutex_lock(&closed->lock);
    while (!closed->is_entered)
        pthread_cond_wait(&closed->changed, &closed->lock);
    pthread_mutex_unlock(&closed->lock);
}

static void open_gate(gate *closed) {
    pthread_mutex_lock(&closed->lock);
    closed->is_open = 1;
    pthread_cond_broadcast(&closed->changed);
    pthread_mutex_unlock(&closed->lock);
}

static const tn__driver *const host = &tn__driver_host;

static tn__driver_device *open_device(void) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device_info info;
    tn__driver_device *device = NULL;
    EXPECT_OK(host->open(&config, &info, &device));
    return device;
}

static uint64_t calls_of(tn__driver_device *device, tn_driver_call call) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(host->stats(device, &stats));
    return stats.calls[call];
}

typedef struct append {
    int *at;
    int *list;
    int value;
} append;

static void append_value(void *argument) {
    append *item = argument;
    item->list[(*item->at)++] = item->value;
}

static void work_is_done_in_the_order_of_the_stream(void **state) {
    (void)state;
    enum { COUNT = 1000 }; /* more than the queue's first capacity */
    static int list[COUNT];
    static append items[COUNT];
    int at = 0;
    gate start = GATE_INIT;
    tn_stream stream;
    tn__driver_device *device = open_device();
    EXPECT_OK(host->stream_create(device, &stream));
    EXPECT_OK(host->host_task(device, stand_in_gate, &start, stream));
    for (int i = 0; i < COUNT; i++) {
        items[i] = (append){&at, list, i};
        EXPECT_OK(host->host_task(device, append_value, &items[i], stream));
    }
    open_gate(&start);
    EXPECT_OK(host->stream_synchronize(device, stream));
    assert_int_equal(at, COUNT);
    for (int i = 0; i < COUNT; i++)
        assert_int_equal(list[i], i);
    assert_int_equal(calls_of(device, TN_CALL_LAUNCH), COUNT + 1);
    EXPECT_OK(host->stream_destroy(device, stream));
    host->close(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void fill_and_copy_run_in_order_on_the_default_stream(void **state) {
    (void)state;
    unsigned char first[64] = {0}, second[64] = {0};
    tn__driver_device *device = open_device();
    EXPECT_OK(host->fill(device, first, 0xab, sizeof first, NULL));
    EXPECT_OK(host->copy(device, second, first, sizeof first, NULL));
    EXPECT_OK(host->fill(device, first, 0xcd, sizeof first, NULL));
    EXPECT_OK(host->stream_synchronize(device, NULL));
    for (size_t i = 0; i < sizeof first; i++) {
        assert_int_equal(first[i], 0xcd);
        assert_int_equal(second[i], 0xab);
    }
    host->close(device);
}

static void rows_are_copied_between_matrices_of_other_widths(void **state) {
    (void)state;
    unsigned char narrow[3 * 5], wide[3 * 8] = {0}, expected[3 * 8] = {0};
    tn__row_copy rows = {.dst = wide + 2, .dst_stride = 8, .src = narrow + 1, .src_stride = 5};
    tn__driver_device *device = open_device();
    rows.row_bytes = 4, rows.rows = 3;
    for (size_t i = 0; i < sizeof narrow; i++)
        narrow[i] = (unsigned char)(i + 1);
    for (size_t i = 0; i < 12; i++)
        expected[i / 4 * 8 + 2 + i % 4] = narrow[i / 4 * 5 + 1 + i % 4];
    EXPECT_OK(host->copy_rows(device, &rows, NULL));
    EXPECT_OK(host->stream_synchronize(device, NULL));
    assert_memory_equal(wide, expected, sizeof wide);
    rows.src = NULL;
    EXPECT_STATUS(host->copy_rows(device, &rows, NULL), TN_INVALID_ARGUMENT);
    host->close(device);
}

static void an_event_holds_another_stream_until_its_work_is_done(void **state) {
    (void)state;
    int list[2] = {0, 0}, at = 0;
    append first = {&at, list, 1}, second = {&at, list, 2};
    gate closed = GATE_INIT;
    tn_stream producer, consumer;
    tn__event produced, consumed;
    int is_done = -1;
    tn__driver_device *device = open_device();
    EXPECT_OK(host->stream_create(device, &producer));
    EXPECT_OK(host->stream_create(device, &consumer));
    EXPECT_OK(host->event_create(device, &produced));
    EXPECT_OK(host->event_create(device, &consumed));

    EXPECT_OK(host->host_task(device, stand_in_gate, &closed, producer));
    EXPECT_OK(host->host_task(device, append_value, &first, producer));
    EXPECT_OK(host->event_record(device, produced, producer));
    EXPECT_OK(host->stream_wait_event(device, consumer, produced));
    EXPECT_OK(host->host_task(device, append_value, &second, consumer));
    EXPECT_OK(host->event_record(device, consumed, consumer));
    wait_until_entered(&closed);
    EXPECT_OK(host->event_is_done(device, produced, &is_done));
    assert_int_equal(is_done, 0);
    EXPECT_OK(host->event_is_done(device, consumed, &is_done));
    assert_int_equal(is_done, 0);

    open_gate(&closed);
    EXPECT_OK(host->event_synchronize(device, consumed));
    EXPECT_OK(host->event_is_done(device, produced, &is_done));
    assert_int_equal(is_done, 1);
    assert_int_equal(list[0], 1);
    assert_int_equal(list[1], 2);
    assert_int_equal(calls_of(device, TN_CALL_STREAM_WAIT), 1);
    EXPECT_OK(host->event_destroy(device, consumed));
    EXPECT_OK(host->event_destroy(device, produced));
    EXPECT_OK(host->stream_destroy(device, consumer));
    EXPECT_OK(host->stream_destroy(device, producer));
    host->close(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* As cuStreamWaitEvent: a wait is for the record at the time of the call. */
static void recording_anew_and_destroying_leave_earlier_waits_as_they_were(void **state) {
    (void)state;
    int list[2] = {0, 0}, at = 0, is_done = -1;
    append first = {&at, list, 1}, second = {&at, list, 2};
    gate closed = GATE_INIT;
    tn_stream slow, fast, waiting;
    tn__event event;
    tn__driver_device *device = open_device();
    EXPECT_OK(host->stream_create(device, &slow));
    EXPECT_OK(host->stream_create(device, &fast));
    EXPECT_OK(host->stream_create(device, &waiting));
    EXPECT_OK(host->event_create(device, &event));
    EXPECT_OK(host->host_task(device, stand_in_gate, &closed, slow));
    EXPECT_OK(host->host_task(device, append_value, &first, slow));
    EXPECT_OK(host->event_record(device, event, slow));
    EXPECT_OK(host->stream_wait_event(device, waiting, event));
    EXPECT_OK(host->host_task(device, append_value, &second, waiting));
    EXPECT_OK(host->event_record(device, event, fast)); /* nothing was put there */
    EXPECT_OK(host->event_is_done(device, event, &is_done));
    assert_int_equal(is_done, 1);
    EXPECT_OK(host->event_destroy(device, event));
    wait_until_entered(&closed);
    assert_int_equal(at, 0);
    open_gate(&closed);
    EXPECT_OK(host->stream_synchronize(device, waiting));
    assert_int_equal(list[0], 1);
    assert_int_equal(list[1], 2);
    host->close(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void an_event_never_recorded_is_complete(void **state) {
    (void)state;
    int is_done = 0;
    tn__event event;
    tn__driver_device *device = open_device();
    EXPECT_OK(host->event_create(device, &event));
    EXPECT_OK(host->event_is_done(device, event, &is_done));
    assert_int_equal(is_done, 1);
    EXPECT_OK(host->event_synchronize(device, event));
    EXPECT_OK(host->stream_wait_event(device, NULL, event));
    EXPECT_OK(host->stream_synchronize(device, NULL));
    EXPECT_OK(host->event_destroy(device, event));
    host->close(device);
}

static void an_event_outlives_its_stream(void **state) {
    (void)state;
    int is_done = 0;
    tn__event event;
    tn_stream stream;
    tn__driver_device *device = open_device();
    EXPECT_OK(host->event_create(device, &event));
    EXPECT_OK(host->stream_create(device, &stream));
    EXPECT_OK(host->event_record(device, event, stream));
    EXPECT_OK(host->stream_destroy(device, stream));
    EXPECT_OK(host->event_is_done(device, event, &is_done));
    assert_int_equal(is_done, 1);
    EXPECT_OK(host->stream_wait_event(device, NULL, event));
    EXPECT_OK(host->synchronize(device));
    EXPECT_OK(host->event_destroy(device, event));
    host->close(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void destroying_a_stream_finishes_its_work(void **state) {
    (void)state;
    unsigned char bytes[4096] = {0};
    tn_stream stream;
    tn__driver_device *device = open_device();
    EXPECT_OK(host->stream_create(device, &stream));
    for (int i = 1; i <= 200; i++)
        EXPECT_OK(host->fill(device, bytes, (unsigned char)i, sizeof bytes, stream));
    EXPECT_OK(host->stream_destroy(device, stream));
    for (size_t i = 0; i < sizeof bytes; i++)
        assert_int_equal(bytes[i], 200);
    host->close(device);
}

static void synchronize_waits_for_every_stream(void **state) {
    (void)state;
    enum { STREAMS = 5 };
    unsigned char bytes[STREAMS + 1] = {0};
    tn_stream streams[STREAMS];
    tn__driver_device *device = open_device();
    for (int i = 0; i < STREAMS; i++) {
        EXPECT_OK(host->stream_create(device, &streams[i]));
        EXPECT_OK(host->fill(device, &bytes[i], 7, 1, streams[i]));
    }
    EXPECT_OK(host->fill(device, &bytes[STREAMS], 7, 1, NULL));
    EXPECT_OK(host->synchronize(device));
    for (int i = 0; i <= STREAMS; i++)
        assert_int_equal(bytes[i], 7);
    host->close(device);
}

static void an_unknown_stream_is_refused_and_nothing_is_done(void **state) {
    (void)state;
    unsigned char byte = 1;
    uint64_t id = 99;
    int local = 0;
    tn_stream foreign, ended;
    tn__event event;
    tn__driver_device *device = open_device(), *other = open_device();
    EXPECT_OK(host->stream_create(other, &foreign));
    EXPECT_OK(host->stream_create(device, &ended));
    EXPECT_OK(host->stream_destroy(device, ended));
    EXPECT_OK(host->event_create(device, &event));
    tn_stream unknown[3] = {foreign, ended, &local};
    for (int i = 0; i < 3; i++) {
        tn_stream stream = unknown[i];
        EXPECT_STATUS(host->fill(device, &byte, 2, 1, stream), TN_INVALID_ARGUMENT);
        EXPECT_STATUS(host->copy(device, &byte, &id, 1, stream), TN_INVALID_ARGUMENT);
        EXPECT_STATUS(host->event_record(device, event, stream), TN_INVALID_ARGUMENT);
        EXPECT_STATUS(host->stream_wait_event(device, stream, event), TN_INVALID_ARGUMENT);
        EXPECT_STATUS(host->stream_synchronize(device, stream), TN_INVALID_ARGUMENT);
        EXPECT_STATUS(host->stream_id(device, stream, &id), TN_INVALID_ARGUMENT);
        EXPECT_STATUS(host->stream_destroy(device, stream), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS("is no stream of this host device");
    }
    EXPECT_STATUS(host->stream_destroy(device, NULL), TN_INVALID_ARGUMENT);
    EXPECT_OK(host->synchronize(other));
    assert_int_equal(byte, 1);
    assert_int_equal(id, 99);
    EXPECT_OK(host->event_destroy(device, event));
    host->close(other);
    host->close(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void stream_ids_never_repeat(void **state) {
    (void)state;
    uint64_t last = 0, id = 0;
    char byte;
    tn__driver_device *device = open_device();
    EXPECT_OK(host->stream_id(device, NULL, &last));
    EXPECT_OK(host->fill(device, &byte, 0, 1, NULL)); /* its worker starts now */
    EXPECT_OK(host->stream_id(device, NULL, &id));
    assert_int_equal(id, last);
    for (int i = 0; i < 50; i++) {
        tn_stream stream; /* often at the same address as the one before */
        EXPECT_OK(host->stream_create(device, &stream));
        EXPECT_OK(host->stream_id(device, stream, &id));
        assert_true(id > last);
        last = id;
        EXPECT_OK(host->stream_destroy(device, stream));
    }
    host->close(device);
}

static void a_failed_host_allocation_leaves_nothing(void **state) {
    (void)state;
    tn_stream stream = NULL;
    tn__event event = NULL;
    tn__driver_device *device = open_device();
    EXPECT_OK(host->fill(device, &stream, 0, sizeof stream, NULL)); /* the registry has room now */
    EXPECT_OK(host->synchronize(device));
    long before = tn__host_live_blocks(), calls = 0;
    tn_status status;
    do { /* the stream, its queue: until the fault is no longer reached */
        tn__host_alloc_fault(++calls, 0);
        status = host->stream_create(device, &stream);
        tn__host_alloc_fault(0, 0);
        if (status != TN_OK) assert_null(stream);
    } while (status == TN_OUT_OF_HOST_MEMORY);
    EXPECT_OK(status);
    assert_int_equal(calls, 3);
    assert_int_equal(tn__host_live_blocks(), before + 2);
    tn__host_alloc_fault(1, 0);
    EXPECT_STATUS(host->event_create(device, &event), TN_OUT_OF_HOST_MEMORY);
    tn__host_alloc_fault(0, 0);
    assert_null(event);
    assert_int_equal(tn__host_live_blocks(), before + 2);
    host->close(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(work_is_done_in_the_order_of_the_stream),
        cmocka_unit_test(fill_and_copy_run_in_order_on_the_default_stream),
        cmocka_unit_test(rows_are_copied_between_matrices_of_other_widths),
        cmocka_unit_test(an_event_holds_another_stream_until_its_work_is_done),
        cmocka_unit_test(recording_anew_and_destroying_leave_earlier_waits_as_they_were),
        cmocka_unit_test(an_event_never_recorded_is_complete),
        cmocka_unit_test(an_event_outlives_its_stream),
        cmocka_unit_test(destroying_a_stream_finishes_its_work),
        cmocka_unit_test(synchronize_waits_for_every_stream),
        cmocka_unit_test(an_unknown_stream_is_refused_and_nothing_is_done),
        cmocka_unit_test(stream_ids_never_repeat),
        cmocka_unit_test(a_failed_host_allocation_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
