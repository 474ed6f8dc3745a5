/* The simulated driver's streams: virtual time, stalls, host functions, several host threads. */
#include <pthread.h>
#include <string.h>

#include "simcuda_support.h"

static const simcuda_calls *cu;
static CUstream first, second;
static CUevent event;

static int set_up(void **state) {
    (void)state;
    cu = simcuda_start(16 * MIB, 1);
    first = simcuda_stream();
    second = simcuda_stream();
    EXPECT_CUDA_OK(cu->cuEventCreate(&event, CU_EVENT_DEFAULT));
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(event));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(first));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(second));
    simcuda_end();
    return 0;
}

static void run_for(CUstream stream, double duration_us) {
    EXPECT_CUDA_OK(cu->tnsim_launch(stream, "kernel", NULL, 0, duration_us));
}

static void expect_now(double us) { assert_true(cu->tnsim_now_us() == us); }

/* ---- virtual time ---------------------------------------------------------------------------- */

static void streams_run_beside_each_other(void **state) {
    (void)state;
    run_for(first, 100);  /* 3.8 ... 103.8 */
    run_for(second, 100); /* 7.6 ... 107.6 */
    run_for(first, 50);   /* 103.8 ... 153.8 */
    expect_now(11.4);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(second));
    expect_now(107.6);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    expect_now(153.8);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(second));
    expect_now(153.8);
}

static void a_wait_delays_the_stream_not_the_host(void **state) {
    (void)state;
    run_for(first, 100);                                     /* ... 103.8 */
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));         /* now 4.17 */
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(second, event, 0)); /* now 4.53 */
    run_for(second, 10);                                     /* 103.8 ... 113.8 */
    expect_now(8.33);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(second));
    expect_now(113.8);
}

static void queries_answer_from_virtual_time(void **state) {
    int queries = 0;
    (void)state;
    EXPECT_CUDA_OK(cu->cuEventQuery(event)); /* never recorded: complete */
    run_for(first, 10);                      /* 4.09 ... 14.09 */
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    while (cu->cuEventQuery(event) == CUDA_ERROR_NOT_READY)
        queries++;
    assert_int_equal(queries, 33); /* 4.46 + 33 * 0.29 = 14.03, and one more says done */
}

static void elapsed_time_is_virtual(void **state) {
    CUevent end;
    float milliseconds = -1;
    (void)state;
    EXPECT_CUDA_OK(cu->cuEventCreate(&end, CU_EVENT_DEFAULT));
    EXPECT_CUDA(cu->cuEventElapsedTime(&milliseconds, event, end), CUDA_ERROR_INVALID_HANDLE);
    run_for(first, 100);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    run_for(first, 2500);
    EXPECT_CUDA_OK(cu->cuEventRecord(end, first));
    EXPECT_CUDA(cu->cuEventElapsedTime(&milliseconds, event, end), CUDA_ERROR_NOT_READY);
    EXPECT_CUDA_OK(cu->cuEventSynchronize(end));
    EXPECT_CUDA_OK(cu->cuEventElapsedTime(&milliseconds, event, end));
    assert_true(milliseconds == 2.5f);
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(end));
}

/* The clock after a few kernels one after another, with this seed. */
static double now_with_seed(uint64_t seed) {
    tnsim_config config = {.size = sizeof config, .seed = seed};
    CUcontext context;
    EXPECT_CUDA_OK(cu->tnsim_configure(&config));
    EXPECT_CUDA_OK(cu->cuInit(0));
    EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxRetain(&context, 0));
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(context));
    for (int i = 0; i < 10; i++)
        run_for(NULL, 100);
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    return cu->tnsim_now_us();
}

static void a_seed_stretches_work_and_repeats(void **state) {
    double exact = now_with_seed(0);
    double one = now_with_seed(1);
    double two = now_with_seed(2);
    (void)state;
    assert_true(exact == 1003.8);
    assert_true(one > exact && one < 2 * exact);
    assert_true(two > exact && two < 2 * exact);
    assert_true(one != two);
    assert_true(one == now_with_seed(1));
    set_up(state); /* for tear_down */
}

static void legacy_work_is_in_line_with_blocking_streams(void **state) {
    CUstream blocking;
    (void)state;
    EXPECT_CUDA_OK(cu->cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    run_for(blocking, 100); /* 3.8 ... 103.8 */
    run_for(NULL, 100);     /* 103.8 ... 203.8 */
    run_for(blocking, 100); /* 203.8 ... 303.8 */
    run_for(first, 100);    /* 15.2 ... 115.2 */
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    expect_now(115.2);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(NULL));
    expect_now(203.8);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(blocking));
    expect_now(303.8);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(blocking));
}

/* ---- stalls ---------------------------------------------------------------------------------- */

static void waiting_for_a_stalled_stream_is_an_error(void **state) {
    (void)state;
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 1));
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(second, event, 0));
    EXPECT_CUDA(cu->cuStreamSynchronize(first), CUDA_ERROR_LAUNCH_TIMEOUT);
    EXPECT_CUDA(cu->cuEventSynchronize(event), CUDA_ERROR_LAUNCH_TIMEOUT);
    EXPECT_CUDA(cu->cuCtxSynchronize(), CUDA_ERROR_LAUNCH_TIMEOUT);
    EXPECT_CUDA(cu->cuStreamSynchronize(second), CUDA_ERROR_LAUNCH_TIMEOUT);
    EXPECT_CUDA(cu->cuEventQuery(event), CUDA_ERROR_NOT_READY);
    EXPECT_CUDA(cu->cuStreamQuery(second), CUDA_ERROR_NOT_READY);
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 0));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(second));
}

static void work_before_a_stall_goes_on(void **state) {
    (void)state;
    run_for(first, 100);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 1));
    EXPECT_CUDA_OK(cu->cuEventSynchronize(event));
    expect_now(103.8);
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 0));
}

static void released_work_runs_from_then_on(void **state) {
    (void)state;
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 1));
    run_for(first, 10);
    run_for(second, 1000); /* 7.6 ... 1007.6 */
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(second));
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 0));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    expect_now(1017.6);
}

static void queued_copies_move_when_released(void **state) {
    simcuda_block block = simcuda_block_create(2 * MIB, 1);
    unsigned char in[64];
    (void)state;
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address, 1, 64, first));
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 1));
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address, 2, 64, first));
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(second, event, 0));
    memset(in, 0, sizeof in);
    EXPECT_CUDA_OK(cu->cuMemcpyAsync((uintptr_t)in, block.address, 64, second));
    assert_int_equal(in[0], 0);
    assert_int_equal(*(unsigned char *)(uintptr_t)block.address, 1);
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 0));
    assert_int_equal(in[0], 2);
    assert_int_equal(in[63], 2);
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    assert_int_equal(cu->tnsim_race_count(), 0);
    simcuda_block_destroy(&block);
}

static void a_queued_copy_into_unmapped_memory_is_illegal(void **state) {
    simcuda_block block = simcuda_block_create(2 * MIB, 1);
    (void)state;
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 1));
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address, 2, 64, first));
    simcuda_block_destroy(&block);
    assert_int_equal(cu->tnsim_race_count(), 1);
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 0));
    EXPECT_CUDA(cu->cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    set_up(state); /* heals, for tear_down */
}

/* ---- host functions -------------------------------------------------------------------------- */

static char order_text[16];

static char letters[] = "abcdehi";
static void append(void *letter) { strncat(order_text, letter, 1); }
static void *letter_of(char letter) { return strchr(letters, letter); }

static void host_functions_run_in_stream_order(void **state) {
    (void)state;
    order_text[0] = '\0';
    EXPECT_CUDA_OK(cu->cuLaunchHostFunc(first, append, letter_of('a')));
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 1));
    EXPECT_CUDA_OK(cu->cuLaunchHostFunc(first, append, letter_of('b')));
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    EXPECT_CUDA_OK(cu->cuLaunchHostFunc(first, append, letter_of('c')));
    EXPECT_CUDA_OK(cu->cuLaunchHostFunc(second, append, letter_of('d')));
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(second, event, 0));
    EXPECT_CUDA_OK(cu->cuLaunchHostFunc(second, append, letter_of('e')));
    assert_string_equal(order_text, "ad");
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 0));
    assert_string_equal(order_text, "adbce");
}

static CUresult inner_result;
static void call_the_driver(void *argument) {
    (void)argument;
    inner_result = cu->cuStreamQuery(second);
}

static void a_host_function_may_not_call_the_driver(void **state) {
    (void)state;
    inner_result = CUDA_SUCCESS;
    EXPECT_CUDA_OK(cu->cuLaunchHostFunc(first, call_the_driver, NULL));
    EXPECT_CUDA(inner_result, CUDA_ERROR_NOT_PERMITTED);
    EXPECT_CUDA_OK(cu->cuStreamQuery(second));
}

/* The function blocks until another thread has called the driver. */
static pthread_barrier_t barrier;
static void meet_twice(void *argument) {
    (void)argument;
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    append(letter_of('h'));
}

static void *call_while_a_host_function_runs(void *argument) {
    CUcontext context = argument;
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(context));
    pthread_barrier_wait(&barrier);
    EXPECT_CUDA(cu->cuStreamQuery(first), CUDA_ERROR_NOT_READY);
    EXPECT_CUDA_OK(
        cu->cuLaunchHostFunc(first, append, letter_of('i'))); /* behind the running one */
    EXPECT_CUDA_OK(cu->cuStreamQuery(second));
    pthread_barrier_wait(&barrier);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first)); /* waits for both */
    assert_string_equal(order_text, "hi");
    return NULL;
}

static void host_functions_run_without_the_lock(void **state) {
    CUcontext context;
    pthread_t thread;
    (void)state;
    order_text[0] = '\0';
    EXPECT_CUDA_OK(cu->cuCtxGetCurrent(&context));
    pthread_barrier_init(&barrier, NULL, 2);
    assert_int_equal(pthread_create(&thread, NULL, call_while_a_host_function_runs, context), 0);
    EXPECT_CUDA_OK(cu->cuLaunchHostFunc(first, meet_twice, NULL));
    assert_int_equal(pthread_join(thread, NULL), 0);
    pthread_barrier_destroy(&barrier);
}

/* ---- threads --------------------------------------------------------------------------------- */

static unsigned long long thread_stream_id;
static void *read_thread_stream_id(void *argument) {
    EXPECT_CUDA(cu->cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT); /* none current yet */
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(argument));
    EXPECT_CUDA_OK(cu->cuStreamGetId(CU_STREAM_PER_THREAD, &thread_stream_id));
    run_for(CU_STREAM_PER_THREAD, 10);
    return NULL;
}

static void each_thread_has_its_own_default_stream(void **state) {
    unsigned long long id, again, legacy, other_legacy;
    CUcontext context;
    pthread_t thread;
    (void)state;
    EXPECT_CUDA_OK(cu->cuCtxGetCurrent(&context));
    EXPECT_CUDA_OK(cu->cuStreamGetId(CU_STREAM_PER_THREAD, &id));
    EXPECT_CUDA_OK(cu->cuStreamGetId(CU_STREAM_PER_THREAD, &again));
    EXPECT_CUDA_OK(cu->cuStreamGetId(NULL, &legacy));
    EXPECT_CUDA_OK(cu->cuStreamGetId(CU_STREAM_LEGACY, &other_legacy));
    assert_int_equal(id, again);
    assert_int_equal(legacy, other_legacy);
    assert_true(id != legacy);
    assert_int_equal(pthread_create(&thread, NULL, read_thread_stream_id, context), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(thread_stream_id != id);
    assert_true(thread_stream_id != legacy);
}

static void nothing(void *argument) { (void)argument; }

#define HAMMER_THREADS 4
#define HAMMER_ROUNDS  25
static void *hammer(void *argument) {
    CUstream stream;
    CUevent own;
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(argument));
    EXPECT_CUDA_OK(cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    EXPECT_CUDA_OK(cu->cuEventCreate(&own, CU_EVENT_DISABLE_TIMING));
    for (int i = 0; i < HAMMER_ROUNDS; i++) {
        simcuda_block block = simcuda_block_create(2 * MIB, 1);
        EXPECT_CUDA_OK(simcuda_write(stream, block.address, block.bytes));
        EXPECT_CUDA_OK(cu->cuEventRecord(own, stream));
        EXPECT_CUDA_OK(cu->cuLaunchHostFunc(stream, nothing, NULL));
        EXPECT_CUDA_OK(cu->cuEventSynchronize(own));
        simcuda_block_destroy(&block);
    }
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(stream));
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(own));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(stream));
    return NULL;
}

static void threads_may_call_at_the_same_time(void **state) {
    pthread_t threads[HAMMER_THREADS];
    CUcontext context;
    (void)state;
    EXPECT_CUDA_OK(cu->cuCtxGetCurrent(&context));
    EXPECT_CUDA_OK(cu->cuLaunchHostFunc(first, nothing, NULL));
    for (int i = 0; i < HAMMER_THREADS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, hammer, context), 0);
    }
    for (int i = 0; i < HAMMER_THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(cu->tnsim_race_count(), 0);
    assert_int_equal(cu->tnsim_call_count("cuMemCreate"), HAMMER_THREADS * HAMMER_ROUNDS);
    assert_int_equal(cu->tnsim_physical_bytes(0), 0);
}

/* ---- watching -------------------------------------------------------------------------------- */

typedef struct watched {
    int count;
    tnsim_interval last;
} watched;

static void note_interval(void *context, const tnsim_interval *interval) {
    watched *seen = context;
    seen->count++;
    seen->last = *interval;
}

static void expect_interval(const watched *seen, int count, const char *what, double begin_us,
                            double end_us) {
    assert_int_equal(seen->count, count);
    assert_string_equal(seen->last.what, what);
    assert_true(seen->last.begin_us == begin_us);
    assert_true(seen->last.end_us == end_us);
    assert_int_equal(seen->last.device, 0);
}

static void a_watcher_sees_each_piece_of_work_at_its_time(void **state) {
    watched seen = {0};
    (void)state;
    cu->tnsim_watch(note_interval, &seen);
    run_for(first, 100);
    expect_interval(&seen, 1, "kernel", 3.8, 103.8);
    const uint64_t first_id = seen.last.stream;
    EXPECT_CUDA_OK(cu->tnsim_stall(second, 1));
    run_for(second, 10); /* queued: it has no time yet */
    expect_interval(&seen, 1, "kernel", 3.8, 103.8);
    run_for(first, 50);
    expect_interval(&seen, 2, "kernel", 103.8, 153.8);
    assert_int_equal(seen.last.stream, first_id);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first)); /* now 153.8 */
    EXPECT_CUDA_OK(cu->tnsim_stall(second, 0));
    expect_interval(&seen, 3, "kernel", 153.8, 163.8);
    assert_int_not_equal(seen.last.stream, first_id);
    cu->tnsim_watch(NULL, NULL);
    run_for(first, 1);
    assert_int_equal(seen.count, 3);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void stale_and_foreign_handles_are_invalid(void **state) {
    CUstream stream = simcuda_stream();
    CUevent gone;
    (void)state;
    EXPECT_CUDA_OK(cu->cuEventCreate(&gone, CU_EVENT_DEFAULT));
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(gone));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(stream));
    EXPECT_CUDA(cu->cuStreamDestroy_v2(stream), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_CUDA(cu->cuStreamDestroy_v2(NULL), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_CUDA(cu->cuStreamQuery((CUstream)(uintptr_t)12345), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_CUDA(cu->cuEventRecord(gone, first), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_CUDA(cu->cuEventRecord(event, stream), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_CUDA(cu->cuStreamWaitEvent(first, gone, 0), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_CUDA(cu->cuStreamWaitEvent(first, event, 1), CUDA_ERROR_NOT_SUPPORTED);
    assert_string_equal(cu->tnsim_refusal(), "cuStreamWaitEvent: flags 0x1 are not simulated");
    EXPECT_CUDA(cu->cuStreamCreate(&stream, 2), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_CUDA(cu->cuEventCreate(&gone, 4), CUDA_ERROR_NOT_SUPPORTED);
}

#define STREAM_TEST(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        STREAM_TEST(streams_run_beside_each_other),
        STREAM_TEST(a_wait_delays_the_stream_not_the_host),
        STREAM_TEST(queries_answer_from_virtual_time),
        STREAM_TEST(elapsed_time_is_virtual),
        STREAM_TEST(a_seed_stretches_work_and_repeats),
        STREAM_TEST(legacy_work_is_in_line_with_blocking_streams),
        STREAM_TEST(waiting_for_a_stalled_stream_is_an_error),
        STREAM_TEST(work_before_a_stall_goes_on),
        STREAM_TEST(released_work_runs_from_then_on),
        STREAM_TEST(queued_copies_move_when_released),
        STREAM_TEST(a_queued_copy_into_unmapped_memory_is_illegal),
        STREAM_TEST(host_functions_run_in_stream_order),
        STREAM_TEST(a_host_function_may_not_call_the_driver),
        STREAM_TEST(host_functions_run_without_the_lock),
        STREAM_TEST(each_thread_has_its_own_default_stream),
        STREAM_TEST(threads_may_call_at_the_same_time),
        STREAM_TEST(a_watcher_sees_each_piece_of_work_at_its_time),
        STREAM_TEST(stale_and_foreign_handles_are_invalid),
    };
    return cmocka_run_group_tests_name("simcuda_streams", tests, NULL, NULL);
}
