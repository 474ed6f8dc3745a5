/* Several devices: access of peers to a pool's memory, and memory that streams of other devices
 * use: it is not given to others, moved or unmapped before their work has ended (pytorch#196257,
 * pytorch#196258), and every call is made with the right device current. */
#include <pthread.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"
#include "tenure_pool.h"
#include "test_pools.h"

#define MIB MIB_BYTES

enum { DEVICES = 4, CUDA_UNKNOWN = 999, NTH_MAX = 200 };

typedef struct fixture {
    tn_device *devices[DEVICES];
    tn_pool *pool; /* of device 0 */
    tn_stream own;
    tn_stream peer; /* of device 1 */
} fixture;

static tn_device *open_device(int ordinal) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = TENURE_SIM_LIBRARY;
    config.ordinal = ordinal;
    EXPECT_OK(tn_device_create(&config, &device));
    return device;
}

static void open_with(fixture *f, size_t memory_bytes, uint32_t isolated) {
    tnsim_config config = {.size = sizeof config,
                           .memory_bytes = memory_bytes,
                           .device_count = DEVICES,
                           .isolated_devices = isolated};
    assert_int_equal(test_sim_get()->configure(&config), 0);
    for (int i = 0; i < DEVICES; i++)
        f->devices[i] = open_device(i);
    f->pool = test_open_pool(f->devices[0], TN_BACKING_VMM, 0);
    f->own = test_open_stream(f->devices[0]);
    f->peer = test_open_stream(f->devices[1]);
}

static void close_all(fixture *f) {
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->devices[0], f->own));
    EXPECT_OK(tn_stream_destroy(f->devices[1], f->peer));
    for (int i = DEVICES - 1; i > 0; i--)
        EXPECT_OK(tn_device_destroy(f->devices[i]));
    test_close_sim(f->devices[0]);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static tn_status touch(fixture *f, int device, tn_stream stream, const void *address,
                       double duration_us) {
    const tn__range range = {address, 1, 1};
    return tn__device_driver(f->devices[device])
        ->ghost_launch(tn__device_state(f->devices[device]), "touch", &range, 1, duration_us,
                       stream);
}

/* A take is refused where the stream's device has no access; a kernel would end its context. */
static int can_reach(fixture *f, int device, tn_stream stream, const void *address) {
    return tn__device_driver(f->devices[device])
               ->note_take(tn__device_state(f->devices[device]), address, 1, stream) == TN_OK;
}

/* ---- access ---------------------------------------------------------------------------------- */

static void a_peer_reaches_what_is_mapped_and_what_will_be(void **state) {
    fixture f;
    void *before, *after;
    (void)state;
    open_with(&f, 0, 0);
    before = test_take(f.pool, 5 * MIB, f.own);
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
    after = test_take(f.pool, 9 * MIB, f.own);
    EXPECT_OK(touch(&f, 1, f.peer, before, 1));
    EXPECT_OK(touch(&f, 1, f.peer, after, 1));
    EXPECT_OK(tn_record_use(before, f.peer));
    EXPECT_OK(tn_record_use(after, f.peer));
    test_give(f.pool, before, f.own);
    test_give(f.pool, after, f.own);
    close_all(&f);
}

static void access_ends_when_no_work_of_the_peer_is_left(void **state) {
    fixture f;
    void *block;
    (void)state;
    open_with(&f, 0, 0);
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
    block = test_take(f.pool, 5 * MIB, f.own);
    EXPECT_OK(touch(&f, 1, f.peer, block, 1));
    EXPECT_OK(tn_record_use(block, f.peer));
    EXPECT_STATUS(tn_pool_peer_disable(f.pool, f.devices[1]), TN_IN_USE);
    EXPECT_OK(tn_stream_synchronize(f.devices[1], f.peer));
    EXPECT_OK(tn_pool_peer_disable(f.pool, f.devices[1]));
    EXPECT_STATUS(tn_pool_peer_disable(f.pool, f.devices[1]), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_record_use(block, f.peer), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tn_pool_peer_enable");
    assert_false(can_reach(&f, 1, f.peer, block));
    test_give(f.pool, block, f.own);
    close_all(&f);
}

static void peers_that_can_not_be_are_refused(void **state) {
    fixture f;
    tn_device *host = test_open_host();
    tn_pool *plain;
    (void)state;
    open_with(&f, 0, 1u << 2);
    plain = test_open_pool(f.devices[0], TN_BACKING_PLAIN, 0);
    EXPECT_STATUS(tn_pool_peer_enable(f.pool, f.devices[2]), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_pool_peer_enable(f.pool, f.devices[0]), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_peer_enable(f.pool, host), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_peer_enable(plain, f.devices[1]), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_pool_peer_enable(f.pool, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_peer_enable(NULL, f.devices[1]), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_peer_disable(f.pool, f.devices[1]), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_pool_destroy(plain));
    EXPECT_OK(tn_device_destroy(host));
    close_all(&f);
}

static void a_peer_outlives_the_pool(void **state) {
    fixture f;
    (void)state;
    open_with(&f, 0, 0);
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[2]));
    EXPECT_STATUS(tn_device_destroy(f.devices[2]), TN_IN_USE);
    close_all(&f);
}

/* ---- order ----------------------------------------------------------------------------------- */

/* pytorch#196257: a kernel of another device writes into a buffer that is freed and trimmed. */
static void memory_is_not_unmapped_under_a_peers_work(void **state) {
    fixture f;
    void *block;
    size_t released = 1;
    (void)state;
    open_with(&f, 0, 0);
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
    block = test_take(f.pool, 8 * MIB, f.own);
    EXPECT_OK(touch(&f, 1, f.peer, block, 1e4));
    EXPECT_OK(tn_record_use(block, f.peer));
    test_give(f.pool, block, f.own);
    EXPECT_OK(tn_device_synchronize(f.devices[0])); /* the owner alone is not enough */
    EXPECT_OK(tn_pool_trim(f.pool, 0, &released));
    assert_int_equal(released, 0);
    assert_int_equal(test_pool_stats(f.pool).pending_bytes, 8 * MIB);
    EXPECT_OK(tn_device_synchronize(f.devices[1]));
    EXPECT_OK(tn_pool_trim(f.pool, 0, &released));
    assert_int_equal(released, 8 * MIB);
    close_all(&f);
}

static void reuse_waits_for_a_peers_work_on_the_device(void **state) {
    fixture f;
    void *block, *again;
    (void)state;
    open_with(&f, 16 * MIB, 0); /* no room to go elsewhere */
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
    block = test_take(f.pool, 16 * MIB, f.own);
    EXPECT_OK(touch(&f, 1, f.peer, block, 1e4));
    EXPECT_OK(tn_record_use(block, f.peer));
    test_give(f.pool, block, f.own);
    again = test_take(f.pool, 16 * MIB, f.own);
    EXPECT_OK(touch(&f, 0, f.own, again, 1));
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 1);
    test_give(f.pool, again, f.own);
    close_all(&f);
}

/* Pages move while a peer still uses them at their old address. */
static void pages_move_behind_a_peers_work(void **state) {
    fixture f;
    void *small[8], *large;
    (void)state;
    open_with(&f, 32 * MIB, 0);
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
    for (int i = 0; i < 8; i++)
        small[i] = test_take(f.pool, 4 * MIB, f.own);
    for (int i = 0; i < 8; i += 2) {
        EXPECT_OK(touch(&f, 1, f.peer, small[i], 1e4));
        EXPECT_OK(tn_record_use(small[i], f.peer));
        test_give(f.pool, small[i], f.own);
    }
    large = test_take(f.pool, 16 * MIB, f.own);
    EXPECT_OK(touch(&f, 0, f.own, large, 1));
    EXPECT_OK(touch(&f, 1, f.peer, small[1], 1));
    EXPECT_OK(tn_record_use(small[1], f.peer));
    test_give(f.pool, large, f.own);
    for (int i = 1; i < 8; i += 2)
        test_give(f.pool, small[i], f.own);
    close_all(&f);
}

/* Mappings that are kept for a shape that may return are reached too, and reached no more once the
 * peer has gone. */
static void kept_mappings_are_reached_when_they_return(void **state) {
    fixture f;
    (void)state;
    open_with(&f, 32 * MIB, 0);
    for (int round = 0; round < 9; round++) {
        int is_peer = round >= 3 && round < 6;
        void *parts[4], *whole;
        if (round == 3) EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
        if (round == 6) EXPECT_OK(tn_pool_peer_disable(f.pool, f.devices[1]));
        for (int i = 0; i < 4; i++)
            parts[i] = test_take(f.pool, 8 * MIB, f.own);
        for (int i = 0; i < 4; i++) {
            assert_int_equal(can_reach(&f, 1, f.peer, parts[i]), is_peer);
            if (is_peer) EXPECT_OK(touch(&f, 1, f.peer, parts[i], 10));
            if (is_peer) EXPECT_OK(tn_record_use(parts[i], f.peer));
            test_give(f.pool, parts[i], f.own);
        }
        whole = test_take(f.pool, 32 * MIB, f.own);
        EXPECT_OK(touch(&f, 0, f.own, whole, 1));
        assert_int_equal(can_reach(&f, 1, f.peer, (char *)whole + 31 * MIB), is_peer);
        test_give(f.pool, whole, f.own);
        EXPECT_OK(tn_device_synchronize(f.devices[0]));
        EXPECT_OK(tn_device_synchronize(f.devices[1]));
    }
    close_all(&f);
}

/* pytorch#196258: whatever device is current when a pool unmaps. */
static void the_callers_current_device_does_not_matter(void **state) {
    fixture f;
    void *block;
    size_t released = 0;
    (void)state;
    open_with(&f, 0, 0);
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
    EXPECT_OK(tn__device_driver(f.devices[3])->make_current(tn__device_state(f.devices[3])));
    block = test_take(f.pool, 8 * MIB, f.own);
    EXPECT_OK(touch(&f, 1, f.peer, block, 1e3));
    EXPECT_OK(tn_record_use(block, f.peer));
    test_give(f.pool, block, f.peer);
    EXPECT_OK(tn_device_synchronize(f.devices[1]));
    EXPECT_OK(tn_pool_trim(f.pool, 0, &released));
    assert_int_equal(released, 8 * MIB);
    close_all(&f);
}

/* Blocks may be made for a peer's stream; when that stream ends, the pool hears of it. */
static void a_peers_stream_has_blocks_and_ends(void **state) {
    fixture f;
    tn_stream other;
    void *block, *again;
    (void)state;
    open_with(&f, 0, 0);
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
    other = test_open_stream(f.devices[1]);
    block = test_take(f.pool, 8 * MIB, other);
    EXPECT_OK(touch(&f, 1, other, block, 1e4));
    EXPECT_OK(tn_stream_destroy(f.devices[1], other));
    test_give(f.pool, block, f.own);
    again = test_take(f.pool, 8 * MIB, f.own);
    assert_ptr_equal(again, block);
    EXPECT_OK(touch(&f, 0, f.own, again, 1));
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 0);
    test_give(f.pool, again, f.own);
    close_all(&f);
}

/* A stream of no peer's device, also one that another library made. */
static void streams_of_other_devices_are_refused(void **state) {
    fixture f;
    const tn__driver *driver;
    tn_stream foreign = NULL;
    void *block, *none = NULL;
    (void)state;
    open_with(&f, 0, 0);
    driver = tn__device_driver(f.devices[2]);
    EXPECT_OK(driver->stream_create(tn__device_state(f.devices[2]), &foreign));
    block = test_take(f.pool, 1 * MIB, f.own);
    EXPECT_STATUS(tn_record_use(block, foreign), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_free(block, foreign), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_alloc(f.pool, 100, foreign, NULL, &none), TN_INVALID_ARGUMENT);
    assert_null(none);
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[2]));
    EXPECT_OK(tn_record_use(block, foreign));
    test_give(f.pool, block, f.own);
    EXPECT_OK(driver->stream_destroy(tn__device_state(f.devices[2]), foreign));
    close_all(&f);
}

/* ---- threads --------------------------------------------------------------------------------- */

enum { WORKERS = 3, WORK_ROUNDS = 400, PEER_ROUNDS = 40 };

typedef struct worker {
    fixture *f;
    int device;
    tn_stream stream;
} worker;

static void *take_and_give(void *argument) {
    const worker *w = argument;
    for (int i = 0; i < WORK_ROUNDS; i++) {
        size_t bytes = (size_t)1000 << i % 14;
        void *block = NULL;
        EXPECT_OK(tn_alloc(w->f->pool, bytes, w->stream, NULL, &block));
        EXPECT_OK(touch(w->f, w->device, w->stream, block, 1));
        EXPECT_OK(tn_free(block, w->stream));
    }
    return NULL;
}

/* Threads of two devices use the pool while a third device comes and goes. */
static void peers_come_and_go_under_threads(void **state) {
    fixture f;
    pthread_t threads[WORKERS];
    worker workers[WORKERS];
    (void)state;
    open_with(&f, 0, 0);
    EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
    for (int i = 0; i < WORKERS; i++) {
        int device = i % 2;
        workers[i] = (worker){&f, device, test_open_stream(f.devices[device])};
        assert_int_equal(pthread_create(&threads[i], NULL, take_and_give, &workers[i]), 0);
    }
    for (int i = 0; i < PEER_ROUNDS; i++) {
        EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[2]));
        (void)test_pool_stats(f.pool);
        EXPECT_OK(tn_pool_peer_disable(f.pool, f.devices[2]));
    }
    for (int i = 0; i < WORKERS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        EXPECT_OK(tn_stream_destroy(f.devices[workers[i].device], workers[i].stream));
    }
    EXPECT_OK(tn_pool_peer_disable(f.pool, f.devices[1]));
    close_all(&f);
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void prepare(fixture *f, void **blocks) {
    open_with(f, 0, 0);
    for (int i = 0; i < 4; i++)
        blocks[i] = test_take(f->pool, 4 * MIB, f->own);
    blocks[4] = test_take(f->pool, 1000, f->own);
}

static void expect_access(fixture *f, void *const *blocks, int is_allowed) {
    for (int i = 0; i < 5; i++) {
        assert_int_equal(can_reach(f, 1, f->peer, blocks[i]), is_allowed);
        assert_true(can_reach(f, 0, f->own, blocks[i]));
    }
}

/* Every call of enabling or disabling fails once, and from then on. */
static void run_with_fault(int is_disable, long nth, int and_after, int *failed) {
    const test_sim *sim = test_sim_get();
    fixture f;
    void *blocks[5];
    tn_status status;
    prepare(&f, blocks);
    if (is_disable) EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
    if (is_disable) expect_access(&f, blocks, 1);
    assert_int_equal(sim->fault(NULL, nth, and_after, CUDA_UNKNOWN), 0);
    status = is_disable ? tn_pool_peer_disable(f.pool, f.devices[1])
                        : tn_pool_peer_enable(f.pool, f.devices[1]);
    assert_int_equal(sim->fault(NULL, 0, 0, 0), 0);
    *failed = status != TN_OK;
    if (*failed) {
        (void)test_pool_stats(f.pool);
        if (!and_after) expect_access(&f, blocks, is_disable);
        EXPECT_OK(is_disable ? tn_pool_peer_disable(f.pool, f.devices[1])
                             : tn_pool_peer_enable(f.pool, f.devices[1]));
    }
    expect_access(&f, blocks, !is_disable);
    for (int i = 0; i < 5; i++)
        test_give(f.pool, blocks[i], f.own);
    close_all(&f);
}

static void a_fault_half_way_is_undone(void **state) {
    (void)state;
    for (int is_disable = 0; is_disable < 2; is_disable++) {
        for (int and_after = 0; and_after < 2; and_after++) {
            int failed = 1;
            int count = 0;
            for (long nth = 1; failed; nth++) {
                assert_true(nth < NTH_MAX);
                run_with_fault(is_disable, nth, and_after, &failed);
                count += failed;
            }
            assert_true(count >= 3);
        }
    }
}

static void host_memory_that_fails_changes_nothing(void **state) {
    (void)state;
    for (long nth = 1; nth <= 3; nth++) {
        fixture f;
        void *blocks[5];
        tn_status status;
        prepare(&f, blocks);
        tn__host_alloc_fault(nth, 0);
        status = tn_pool_peer_enable(f.pool, f.devices[1]);
        tn__host_alloc_fault(0, 0);
        assert_int_equal(status, nth < 3 ? TN_OUT_OF_HOST_MEMORY : TN_OK);
        EXPECT_OK(tn_pool_peer_enable(f.pool, f.devices[1]));
        expect_access(&f, blocks, 1);
        for (int i = 0; i < 5; i++)
            test_give(f.pool, blocks[i], f.own);
        close_all(&f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_reaches_what_is_mapped_and_what_will_be),
        cmocka_unit_test(access_ends_when_no_work_of_the_peer_is_left),
        cmocka_unit_test(peers_that_can_not_be_are_refused),
        cmocka_unit_test(a_peer_outlives_the_pool),
        cmocka_unit_test(memory_is_not_unmapped_under_a_peers_work),
        cmocka_unit_test(reuse_waits_for_a_peers_work_on_the_device),
        cmocka_unit_test(pages_move_behind_a_peers_work),
        cmocka_unit_test(kept_mappings_are_reached_when_they_return),
        cmocka_unit_test(the_callers_current_device_does_not_matter),
        cmocka_unit_test(a_peers_stream_has_blocks_and_ends),
        cmocka_unit_test(streams_of_other_devices_are_refused),
        cmocka_unit_test(peers_come_and_go_under_threads),
        cmocka_unit_test(a_fault_half_way_is_undone),
        cmocka_unit_test(host_memory_that_fails_changes_nothing),
    };
    return cmocka_run_group_tests_name("sim/peer_access", tests, NULL, NULL);
}
