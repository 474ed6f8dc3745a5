/* The simulated driver's race detection: each way to order two pieces of work, with the race that
 * appears when the order is missing and the silence when it is there. */
#include <stdio.h>
#include <string.h>

#include "simcuda_support.h"

#define BYTES (2 * MIB)

static const simcuda_calls *cu;
static CUstream first, second, third;
static CUevent event, other_event;
static simcuda_block block;

static int set_up(void **state) {
    (void)state;
    cu = simcuda_start(0, 0);
    first = simcuda_stream();
    second = simcuda_stream();
    third = simcuda_stream();
    EXPECT_CUDA_OK(cu->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    EXPECT_CUDA_OK(cu->cuEventCreate(&other_event, CU_EVENT_DISABLE_TIMING));
    block = simcuda_block_create(BYTES, 2);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    simcuda_block_destroy(&block);
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(event));
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(other_event));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(first));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(second));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(third));
    simcuda_end();
    return 0;
}

static void write_on(CUstream stream) {
    EXPECT_CUDA_OK(simcuda_write(stream, block.address, BYTES));
}

static void read_on(CUstream stream) { EXPECT_CUDA_OK(simcuda_read(stream, block.address, BYTES)); }

static void expect_races(uint64_t count) { assert_int_equal(cu->tnsim_race_count(), count); }

/* `later` waits for what `earlier` has got so far. */
static void order(CUstream earlier, CUstream later, CUevent by) {
    EXPECT_CUDA_OK(cu->cuEventRecord(by, earlier));
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(later, by, 0));
}

/* ---- which touches conflict ------------------------------------------------------------------ */

static void one_stream_orders_its_work(void **state) {
    (void)state;
    write_on(first);
    read_on(first);
    write_on(first);
    expect_races(0);
}

static void two_unordered_writes_race(void **state) {
    (void)state;
    write_on(first);
    write_on(second);
    expect_races(1);
}

static void a_read_after_an_unordered_write_races(void **state) {
    (void)state;
    write_on(first);
    read_on(second);
    expect_races(1);
}

static void a_write_races_with_each_unordered_reader(void **state) {
    (void)state;
    read_on(first);
    read_on(second);
    expect_races(0);
    write_on(third);
    expect_races(2);
}

static void a_race_is_told_once(void **state) {
    (void)state;
    read_on(first);
    write_on(second);
    expect_races(1);
    write_on(second); /* after a write that has raced: nothing new */
    read_on(second);
    expect_races(1);
}

static void reads_are_remembered_where_a_write_cuts_them(void **state) {
    (void)state;
    read_on(first);
    EXPECT_CUDA_OK(simcuda_write(first, block.address + 4096, 4096));
    EXPECT_CUDA_OK(simcuda_write(second, block.address, 4096));
    expect_races(1);
    EXPECT_CUDA_OK(simcuda_write(third, block.address + 8192, 4096));
    expect_races(2);
}

static void ranges_that_do_not_overlap_do_not_race(void **state) {
    (void)state;
    EXPECT_CUDA_OK(simcuda_write(first, block.address, 512));
    EXPECT_CUDA_OK(simcuda_write(second, block.address + 512, 512));
    EXPECT_CUDA_OK(simcuda_write(third, block.address + 1024, BYTES));
    expect_races(0);
    EXPECT_CUDA_OK(simcuda_write(second, block.address + 511, 1));
    expect_races(1);
    EXPECT_CUDA_OK(simcuda_read(second, block.address + 1024 + BYTES - 1, 2));
    expect_races(2);
}

static void a_conflict_over_many_stretches_is_one_race(void **state) {
    (void)state;
    EXPECT_CUDA_OK(simcuda_write(first, block.address, 2 * BYTES));
    EXPECT_CUDA_OK(simcuda_read(first, block.address + 4096, 4096));
    order(first, third, event);
    EXPECT_CUDA_OK(simcuda_read(third, block.address, 512));
    expect_races(0);
    /* with the write, with the read on `first`, with the read on `third` */
    EXPECT_CUDA_OK(simcuda_write(second, block.address, 2 * BYTES));
    expect_races(3);
}

static void copies_and_fills_race_as_kernels_do(void **state) {
    static char host[512];
    (void)state;
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address, 0, 512, first));
    EXPECT_CUDA_OK(cu->cuMemcpyAsync((uintptr_t)host, block.address, 512, second));
    expect_races(1);
    EXPECT_CUDA_OK(cu->cuMemcpyAsync(block.address, block.address + BYTES, 512, first));
    expect_races(2); /* the write of 512 bytes after the read on `second` */
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address + BYTES, 0, 512, second));
    expect_races(3);
}

/* ---- what orders ----------------------------------------------------------------------------- */

static void an_event_orders_two_streams(void **state) {
    (void)state;
    write_on(first);
    order(first, second, event);
    write_on(second);
    expect_races(0);
}

static void an_event_orders_only_what_came_before_its_record(void **state) {
    (void)state;
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    write_on(first);
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(second, event, 0));
    write_on(second);
    expect_races(1);
}

static void a_wait_orders_only_what_comes_after_it(void **state) {
    (void)state;
    write_on(first);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    write_on(second);
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(second, event, 0));
    expect_races(1);
}

static void an_event_that_is_recorded_anew_keeps_old_waits(void **state) {
    (void)state;
    write_on(first);
    order(first, second, event);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, third));
    write_on(second);
    expect_races(0);
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(third, event, 0));
    write_on(third);
    expect_races(1);
}

static void an_event_that_is_recorded_anew_forgets_its_old_place(void **state) {
    (void)state;
    write_on(first);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    order(third, second, event);
    write_on(second);
    expect_races(1);
}

static void order_goes_through_a_third_stream(void **state) {
    (void)state;
    write_on(first);
    order(first, third, event);
    order(third, second, other_event);
    write_on(second);
    expect_races(0);
}

static void a_third_stream_that_did_not_wait_orders_nothing(void **state) {
    (void)state;
    write_on(first);
    order(third, second, other_event);
    order(first, third, event);
    write_on(second);
    expect_races(1);
}

static void the_host_orders_what_it_waited_for(void **state) {
    (void)state;
    write_on(first);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    write_on(second);
    expect_races(0);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, second));
    EXPECT_CUDA_OK(cu->cuEventSynchronize(event));
    write_on(third);
    expect_races(0);
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    write_on(first);
    expect_races(0);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(second));
    write_on(second);
    expect_races(1);
}

/* Time alone orders nothing: only that the host was told. */
static void a_query_orders_if_it_says_done(void **state) {
    (void)state;
    write_on(first);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    EXPECT_CUDA(cu->cuEventQuery(event), CUDA_ERROR_NOT_READY);
    while (cu->cuEventQuery(event) == CUDA_ERROR_NOT_READY)
        continue;
    write_on(second);
    expect_races(0);
    while (cu->cuStreamQuery(second) == CUDA_ERROR_NOT_READY)
        continue;
    write_on(third);
    expect_races(0);
}

static void a_query_that_says_not_ready_orders_nothing(void **state) {
    (void)state;
    write_on(first);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    EXPECT_CUDA(cu->cuEventQuery(event), CUDA_ERROR_NOT_READY);
    EXPECT_CUDA(cu->cuStreamQuery(first), CUDA_ERROR_NOT_READY);
    write_on(second);
    expect_races(1);
}

static void work_that_is_over_but_that_nobody_waited_for_races(void **state) {
    (void)state;
    write_on(first);
    EXPECT_CUDA_OK(simcuda_write(third, block.address + BYTES, BYTES));
    EXPECT_CUDA_OK(cu->tnsim_launch(third, "long", NULL, 0, 1000));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(third));
    write_on(second);
    expect_races(1);
}

/* ---- default streams ------------------------------------------------------------------------- */

static void the_legacy_stream_is_ordered_with_blocking_streams(void **state) {
    CUstream blocking;
    (void)state;
    EXPECT_CUDA_OK(cu->cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    write_on(blocking);
    write_on(NULL);
    write_on(blocking);
    write_on(CU_STREAM_PER_THREAD);
    expect_races(1); /* two blocking streams, with nothing on the legacy stream between */
    write_on(CU_STREAM_LEGACY);
    write_on(CU_STREAM_PER_THREAD);
    expect_races(1);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(blocking));
}

static void the_legacy_stream_is_not_ordered_with_non_blocking_streams(void **state) {
    (void)state;
    write_on(NULL);
    write_on(first);
    expect_races(1);
    write_on(NULL);
    expect_races(2);
}

/* ---- physical memory and addresses ----------------------------------------------------------- */

static void one_handle_at_two_addresses_is_one_memory(void **state) {
    CUdeviceptr elsewhere = simcuda_reserve(BYTES);
    (void)state;
    simcuda_map(elsewhere, BYTES, block.handles[0]);
    write_on(first);
    EXPECT_CUDA_OK(simcuda_write(second, elsewhere, BYTES));
    expect_races(1);
    order(second, third, event);
    write_on(third);
    expect_races(1);
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    EXPECT_CUDA_OK(cu->cuMemUnmap(elsewhere, BYTES));
    EXPECT_CUDA_OK(cu->cuMemAddressFree(elsewhere, BYTES));
    expect_races(1);
}

static void an_unmap_must_know_that_uses_are_over(void **state) {
    (void)state;
    write_on(first);
    EXPECT_CUDA_OK(cu->cuMemUnmap(block.address, BYTES));
    expect_races(1);
    assert_non_null(strstr(cu->tnsim_race_text(0), "cuMemUnmap by the host"));
    simcuda_map(block.address, BYTES, block.handles[0]);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    write_on(second);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(second));
    EXPECT_CUDA_OK(cu->cuMemUnmap(block.address, BYTES));
    expect_races(1);
    simcuda_map(block.address, BYTES, block.handles[0]);
}

/* Moving memory in stream order: the old address goes while the new one is in use. */
static void an_unmap_is_about_its_own_address(void **state) {
    CUdeviceptr elsewhere = simcuda_reserve(BYTES);
    (void)state;
    simcuda_map(elsewhere, BYTES, block.handles[0]);
    EXPECT_CUDA_OK(simcuda_write(first, elsewhere, BYTES));
    order(first, second, event);
    write_on(second);
    EXPECT_CUDA_OK(cu->cuEventSynchronize(event));
    EXPECT_CUDA_OK(cu->cuMemUnmap(elsewhere, BYTES));
    expect_races(0);
    EXPECT_CUDA_OK(cu->cuMemAddressFree(elsewhere, BYTES));
}

static void an_unmap_of_many_handles_is_one_race_a_kernel(void **state) {
    (void)state;
    EXPECT_CUDA_OK(simcuda_write(first, block.address, 2 * BYTES));
    EXPECT_CUDA_OK(cu->cuMemUnmap(block.address, 2 * BYTES));
    expect_races(1);
    simcuda_map(block.address, BYTES, block.handles[0]);
    simcuda_map(block.address + BYTES, BYTES, block.handles[1]);
}

static void freeing_plain_memory_in_use_waits_instead(void **state) {
    CUdeviceptr address;
    double before;
    (void)state;
    EXPECT_CUDA_OK(cu->cuMemAlloc_v2(&address, BYTES));
    EXPECT_CUDA_OK(simcuda_write(first, address, BYTES));
    EXPECT_CUDA_OK(cu->tnsim_launch(second, "long", NULL, 0, 100000));
    before = cu->tnsim_now_us();
    EXPECT_CUDA_OK(cu->cuMemFree_v2(address));
    assert_true(cu->tnsim_now_us() > before + 100000);
    expect_races(0);
}

/* ---- taking ---------------------------------------------------------------------------------- */

static void take(CUstream stream) {
    EXPECT_CUDA_OK(cu->tnsim_take(stream, (void *)(uintptr_t)block.address, BYTES));
}

static void a_take_needs_all_uses_before_it(void **state) {
    (void)state;
    write_on(first);
    order(first, second, event);
    read_on(second);
    take(first);
    expect_races(1); /* the read on `second` */
    assert_non_null(strstr(cu->tnsim_race_text(0), "taking the memory into use"));
    order(second, first, event);
    take(first);
    expect_races(1);
}

static void a_take_is_no_use(void **state) {
    (void)state;
    take(first);
    take(second);
    write_on(third);
    expect_races(0);
}

static void a_take_on_the_legacy_stream_knows_blocking_streams(void **state) {
    CUstream blocking;
    (void)state;
    EXPECT_CUDA_OK(cu->cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    write_on(blocking);
    take(NULL);
    expect_races(0);
    /* Looking orders nothing by itself. */
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(NULL));
    take(first);
    expect_races(1);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(blocking));
}

/* ---- what is kept ---------------------------------------------------------------------------- */

__attribute__((noinline)) static void write_from_here(CUstream stream) {
    write_on(stream);
    __asm__ volatile(""); /* no tail call: the frame stays */
}

static void a_race_names_both_sides(void **state) {
    unsigned long long first_id, second_id;
    char expected[200];
    const char *text;
    (void)state;
    EXPECT_CUDA_OK(cu->cuStreamGetId(first, &first_id));
    EXPECT_CUDA_OK(cu->cuStreamGetId(second, &second_id));
    write_from_here(first);
    read_on(second);
    text = cu->tnsim_race_text(0);
    assert_non_null(text);
    snprintf(expected, sizeof expected,
             "race: reader on stream %llu does not wait for writer on stream %llu, both on "
             "[0x%llx, 0x%llx)\n",
             second_id, first_id, block.address, block.address + BYTES);
    assert_int_equal(strncmp(text, expected, strlen(expected)), 0);
    text = strstr(text, "  reader was submitted from\n    #0 0x");
    assert_non_null(text);
    assert_non_null(strstr(text, "  writer was submitted from\n    #0 0x"));
    assert_null(cu->tnsim_race_text(1));
}

static void all_races_are_counted_and_some_kept(void **state) {
    (void)state;
    for (int i = 0; i < 150; i++)
        write_on(i % 2 ? first : second);
    expect_races(149);
    assert_non_null(cu->tnsim_race_text(99));
    assert_null(cu->tnsim_race_text(100));
}

/* 70,000 kernels by different names are more than the sites that are kept. */
static void places_beyond_the_limit_still_race(void **state) {
    tnsim_range range = {(const void *)(uintptr_t)block.address, BYTES, 1};
    char name[32];
    (void)state;
    for (int i = 0; i < 70000; i++) {
        snprintf(name, sizeof name, "kernel %d", i);
        EXPECT_CUDA_OK(cu->tnsim_launch(first, name, &range, 1, 1));
    }
    read_on(second);
    expect_races(1);
    assert_non_null(strstr(cu->tnsim_race_text(0), "wait for (one of too many places) on"));
}

/* Handles are reused, as by a real driver, also before the old stream's work is over. */
static void a_stream_with_a_used_handle_is_not_the_old_one(void **state) {
    unsigned long long old_id, new_id;
    CUstream old = first;
    (void)state;
    EXPECT_CUDA_OK(cu->cuStreamGetId(first, &old_id));
    write_on(first);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(first));
    assert_int_equal(cu->tnsim_lost_stream_uses(), 0);
    assert_int_equal(cu->cuStreamGetId(old, &new_id), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    assert_int_equal(cu->tnsim_lost_stream_uses(), 1);
    first = simcuda_stream();
    assert_true(first == old);
    write_on(first);
    expect_races(1);
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(first));
    first = simcuda_stream();
    assert_true(first == old);
    EXPECT_CUDA_OK(cu->cuStreamGetId(first, &new_id));
    assert_true(new_id > old_id);
    write_on(first);
    expect_races(1);
}

#define RACE_TEST(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        RACE_TEST(one_stream_orders_its_work),
        RACE_TEST(two_unordered_writes_race),
        RACE_TEST(a_read_after_an_unordered_write_races),
        RACE_TEST(a_write_races_with_each_unordered_reader),
        RACE_TEST(a_race_is_told_once),
        RACE_TEST(reads_are_remembered_where_a_write_cuts_them),
        RACE_TEST(ranges_that_do_not_overlap_do_not_race),
        RACE_TEST(a_conflict_over_many_stretches_is_one_race),
        RACE_TEST(copies_and_fills_race_as_kernels_do),
        RACE_TEST(an_event_orders_two_streams),
        RACE_TEST(an_event_orders_only_what_came_before_its_record),
        RACE_TEST(a_wait_orders_only_what_comes_after_it),
        RACE_TEST(an_event_that_is_recorded_anew_keeps_old_waits),
        RACE_TEST(an_event_that_is_recorded_anew_forgets_its_old_place),
        RACE_TEST(order_goes_through_a_third_stream),
        RACE_TEST(a_third_stream_that_did_not_wait_orders_nothing),
        RACE_TEST(the_host_orders_what_it_waited_for),
        RACE_TEST(a_query_orders_if_it_says_done),
        RACE_TEST(a_query_that_says_not_ready_orders_nothing),
        RACE_TEST(work_that_is_over_but_that_nobody_waited_for_races),
        RACE_TEST(the_legacy_stream_is_ordered_with_blocking_streams),
        RACE_TEST(the_legacy_stream_is_not_ordered_with_non_blocking_streams),
        RACE_TEST(one_handle_at_two_addresses_is_one_memory),
        RACE_TEST(an_unmap_must_know_that_uses_are_over),
        RACE_TEST(an_unmap_is_about_its_own_address),
        RACE_TEST(an_unmap_of_many_handles_is_one_race_a_kernel),
        RACE_TEST(freeing_plain_memory_in_use_waits_instead),
        RACE_TEST(a_take_needs_all_uses_before_it),
        RACE_TEST(a_take_is_no_use),
        RACE_TEST(a_take_on_the_legacy_stream_knows_blocking_streams),
        RACE_TEST(a_race_names_both_sides),
        RACE_TEST(all_races_are_counted_and_some_kept),
        RACE_TEST(places_beyond_the_limit_still_race),
        RACE_TEST(a_stream_with_a_used_handle_is_not_the_old_one),
    };
    return cmocka_run_group_tests_name("simcuda_races", tests, NULL, NULL);
}
