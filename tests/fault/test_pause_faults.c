/* The N-th failure of every driver call and every host allocation of a pause and of a resume, once
 * and from then on. A pause that fails leaves the pool running, or paused if the driver refused to
 * undo it; a resume that fails leaves it paused. Either way nothing is lost: in the end all blocks
 * are where they were, with their bytes. */
#include <string.h>

#include "fault_loop_support.h"
#include "driver.h"
#include "host_alloc.h"
#include "tenure_pool.h"
#include "test_pools.h"

#define MIB    MIB_BYTES
#define BLOCKS 3

enum { CUDA_UNKNOWN = 999 };

typedef struct subject {
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    unsigned char *blocks[BLOCKS];
} subject;

static size_t bytes_of(int block) { return 500000 * (size_t)(block + 1); }

static void open_subject(subject *s) {
    s->device = test_open_sim(64 * MIB, 1);
    s->pool = test_open_pool(s->device, TN_BACKING_VMM, 0);
    s->a = test_open_stream(s->device);
    for (int i = 0; i < BLOCKS; i++) {
        s->blocks[i] = test_take(s->pool, bytes_of(i), s->a);
        EXPECT_OK(
            tn_fill(s->device, s->blocks[i], (unsigned char)(0x11 * (i + 1)), bytes_of(i), s->a));
    }
    /* A mapping that was kept, and idle memory. */
    test_give(s->pool, test_take(s->pool, 2 * MIB, s->a), s->a);
    test_give(s->pool, test_take(s->pool, 4 * MIB, s->a), s->a);
}

static void expect_contents(subject *s) {
    for (int i = 0; i < BLOCKS; i++) {
        size_t bytes = 0;
        EXPECT_OK(tn_block_info(s->blocks[i], &bytes, NULL));
        assert_int_equal(bytes, bytes_of(i));
        assert_int_equal(s->blocks[i][0], 0x11 * (i + 1));
        assert_memory_equal(s->blocks[i], s->blocks[i] + 1, bytes - 1);
    }
}

static void close_subject(subject *s) {
    for (int i = 0; i < BLOCKS; i++)
        EXPECT_OK(tn_free(s->blocks[i], s->a));
    (void)test_pool_stats(s->pool);
    EXPECT_OK(tn_pool_destroy(s->pool));
    EXPECT_OK(tn_stream_destroy(s->device, s->a));
    test_close_sim(s->device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* 1 if the pool is paused. */
static int is_paused(subject *s) {
    void *block = NULL;
    if (tn_alloc(s->pool, 512, s->a, NULL, &block) == TN_INVALID_STATE) return 1;
    EXPECT_OK(tn_free(block, s->a));
    return 0;
}

/* Whatever the failure has left: the books are right, and the pool can be paused and resumed. */
static void recover(subject *s) {
    tn_pool_stats stats = test_pool_stats(s->pool);
    assert_int_equal(stats.live_blocks, BLOCKS);
    if (!is_paused(s)) {
        assert_int_equal(stats.paused_bytes, 0);
        EXPECT_OK(tn_stream_synchronize(s->device, s->a));
        expect_contents(s);
        EXPECT_OK(tn_pool_pause(s->pool, 1));
        stats = test_pool_stats(s->pool);
        assert_int_equal(stats.reserved_bytes, 0);
        assert_int_equal(test_sim_get()->physical_bytes(0), 0);
    }
    EXPECT_OK(tn_pool_resume(s->pool));
    stats = test_pool_stats(s->pool);
    assert_int_equal(stats.paused_bytes, 0);
    expect_contents(s);
}

typedef struct fault_run {
    int is_resume;
    int paused;  /* failures of a pause that left the pool paused */
    int running; /* that left it running */
} fault_run;

static tn_status run(subject *s, const fault_run *kind) {
    return kind->is_resume ? tn_pool_resume(s->pool) : tn_pool_pause(s->pool, 1);
}

static void prepare(subject *s, const fault_run *kind) {
    open_subject(s);
    if (!kind->is_resume) return;
    EXPECT_OK(tn_pool_pause(s->pool, 1));
}

static void after_failure(subject *s, fault_run *kind) {
    if (is_paused(s)) {
        kind->paused++;
    } else {
        kind->running++;
    }
}

static int run_with_fault(const void *argument, fault_point *fault) {
    fault_run *kind = *(fault_run *const *)argument;
    tn_status status;
    subject s;
    prepare(&s, kind);
    fault_begin(fault);
    status = run(&s, kind);
    fault_end(fault);
    if (status != TN_OK) {
        if (fault->is_host)
            assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
        else
            EXPECT_ERROR_HAS(" failed: CUDA_ERROR_UNKNOWN");
        after_failure(&s, kind);
    }
    recover(&s);
    close_subject(&s);
    return status != TN_OK;
}

static fault_run fail_everywhere(int is_resume, const fault_point *fault, int least) {
    fault_run kind = {.is_resume = is_resume};
    fault_run *counted = &kind;
    assert_true(fault_each(*fault, run_with_fault, &counted) >= least);
    return kind;
}

static fault_run every_driver_call(int is_resume, int and_after) {
    const fault_point fault = {.and_after = and_after, .code = CUDA_UNKNOWN};
    return fail_everywhere(is_resume, &fault, 20);
}

static void a_pause_that_fails_once_leaves_the_pool_running(void **state) {
    (void)state;
    assert_int_equal(every_driver_call(0, 0).paused, 0);
}

static void a_pause_under_a_dead_driver_loses_nothing(void **state) {
    (void)state;
    fault_run kind = every_driver_call(0, 1);
    assert_true(kind.running > 0);
}

static void a_resume_that_fails_leaves_the_pool_paused(void **state) {
    (void)state;
    assert_int_equal(every_driver_call(1, 0).running, 0);
    assert_int_equal(every_driver_call(1, 1).running, 0);
}

static void host_memory_that_fails_changes_nothing(void **state) {
    (void)state;
    for (int and_after = 0; and_after < 2; and_after++) {
        const fault_point fault = {.is_host = 1, .and_after = and_after};
        assert_int_equal(fail_everywhere(1, &fault, 0).running, 0);
        assert_int_equal(fail_everywhere(0, &fault, 3).paused, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pause_that_fails_once_leaves_the_pool_running),
        cmocka_unit_test(a_pause_under_a_dead_driver_loses_nothing),
        cmocka_unit_test(a_resume_that_fails_leaves_the_pool_paused),
        cmocka_unit_test(host_memory_that_fails_changes_nothing),
    };
    return cmocka_run_group_tests_name("fault/pause_faults", tests, NULL, NULL);
}
