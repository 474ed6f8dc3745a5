/* The simulated driver's waits for values: streams that the host lets go on by a write, without any
 * call; what they order, and what they refuse. */
#include <semaphore.h>
#include <string.h>

#include "simcuda_support.h"

static const simcuda_calls *cu;
static CUstream first, second;
static CUevent event;
static uint32_t *words;

static int set_up(void **state) {
    (void)state;
    cu = simcuda_start(16 * MIB, 1);
    first = simcuda_stream();
    second = simcuda_stream();
    EXPECT_CUDA_OK(cu->cuEventCreate(&event, CU_EVENT_DEFAULT));
    EXPECT_CUDA_OK(cu->cuMemHostAlloc((void **)&words, 4096, 0));
    memset(words, 0, 4096);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    EXPECT_CUDA_OK(cu->cuMemFreeHost(words));
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(event));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(first));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(second));
    simcuda_end();
    return 0;
}

static CUdeviceptr address_of(const void *memory) { return (CUdeviceptr)(uintptr_t)memory; }

static CUresult wait_for(CUstream stream, const uint32_t *word, uint32_t value) {
    return cu->cuStreamWaitValue32_v2(stream, address_of(word), value, CU_STREAM_WAIT_VALUE_GEQ);
}

static void write_word(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static void post(void *semaphore) { sem_post(semaphore); }

static void await(sem_t *semaphore) {
    while (sem_wait(semaphore) != 0)
        continue;
}

/* No call is made after the write: the stream goes on by itself. */
static void what_is_behind_the_wait_runs_once_the_host_has_written(void **state) {
    sem_t passed;
    unsigned char byte = 0;
    CUdeviceptr block;
    (void)state;
    sem_init(&passed, 0, 0);
    EXPECT_CUDA_OK(cu->cuMemAlloc_v2(&block, MIB));
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block, 1, MIB, first));
    EXPECT_CUDA_OK(wait_for(first, &words[0], 7));
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block, 2, MIB, first));
    EXPECT_CUDA_OK(cu->cuLaunchHostFunc(first, post, &passed));
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(second)); /* another stream goes on */
    EXPECT_CUDA(cu->cuEventQuery(event), CUDA_ERROR_NOT_READY);
    memcpy(&byte, (void *)(uintptr_t)block, 1);
    assert_int_equal(byte, 1);
    write_word(&words[0], 6);
    EXPECT_CUDA(cu->cuStreamQuery(first), CUDA_ERROR_NOT_READY);
    write_word(&words[0], 7);
    await(&passed);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    EXPECT_CUDA_OK(cu->cuEventQuery(event));
    memcpy(&byte, (void *)(uintptr_t)block, 1);
    assert_int_equal(byte, 2);
    EXPECT_CUDA_OK(cu->cuMemFree_v2(block));
    sem_destroy(&passed);
}

static void a_value_that_is_there_holds_nothing_up(void **state) {
    (void)state;
    write_word(&words[1], 9);
    EXPECT_CUDA_OK(wait_for(first, &words[1], 9));
    EXPECT_CUDA_OK(wait_for(first, &words[1], 3));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    assert_int_equal(cu->tnsim_race_count(), 0);
}

static void values_go_round(void **state) {
    (void)state;
    write_word(&words[0], 0xFFFFFFFFu);
    EXPECT_CUDA_OK(wait_for(first, &words[0], 0xFFFFFFF0u));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    EXPECT_CUDA_OK(wait_for(first, &words[0], 2));
    EXPECT_CUDA(cu->cuStreamQuery(first), CUDA_ERROR_NOT_READY);
    write_word(&words[0], 2 + 0x7FFFFFFFu);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    EXPECT_CUDA_OK(wait_for(first, &words[0], 2));
    write_word(&words[0], 3 + 0x7FFFFFFFu); /* 2^31 ahead of 2 is behind it */
    EXPECT_CUDA_OK(wait_for(second, &words[0], 2));
    EXPECT_CUDA(cu->cuStreamQuery(second), CUDA_ERROR_NOT_READY);
    write_word(&words[0], 2);
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
}

/* Behind a stall the word is not looked at; a wait for an event comes after the wait before it. */
static void a_wait_has_its_place_in_the_stream(void **state) {
    (void)state;
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 1));
    EXPECT_CUDA_OK(wait_for(first, &words[0], 1));
    EXPECT_CUDA(cu->cuStreamSynchronize(first), CUDA_ERROR_LAUNCH_TIMEOUT);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(second, event, 0));
    EXPECT_CUDA_OK(cu->tnsim_stall(first, 0));
    EXPECT_CUDA(cu->cuStreamQuery(second), CUDA_ERROR_NOT_READY);
    write_word(&words[0], 1);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(second));
    EXPECT_CUDA_OK(cu->cuStreamQuery(first));
}

static void the_word_is_read_as_a_kernel_would(void **state) {
    (void)state;
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(address_of(&words[8]), 0xFF, 4, first));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    EXPECT_CUDA_OK(wait_for(first, &words[8], 0xFFFFFFFFu));
    assert_int_equal(cu->tnsim_race_count(), 0);
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(address_of(&words[8]), 0xFF, 4, second));
    assert_int_equal(cu->tnsim_race_count(), 1);
    assert_non_null(strstr(cu->tnsim_race_text(0), "cuStreamWaitValue32"));
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
}

/* The host's write is no order: what is behind the wait races with what another stream did before,
 * though the host has waited for neither. */
static void a_wait_orders_no_other_stream(void **state) {
    CUdeviceptr block;
    (void)state;
    EXPECT_CUDA_OK(cu->cuMemAlloc_v2(&block, MIB));
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block, 1, MIB, second));
    write_word(&words[0], 1);
    EXPECT_CUDA_OK(wait_for(first, &words[0], 1));
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block, 2, MIB, first));
    assert_int_equal(cu->tnsim_race_count(), 1);
    EXPECT_CUDA_OK(cu->cuMemFree_v2(block));
}

static void what_is_not_simulated_is_refused_by_name(void **state) {
    CUdeviceptr block;
    CUgraph graph = NULL;
    (void)state;
    EXPECT_CUDA_OK(cu->cuMemAlloc_v2(&block, MIB));
    EXPECT_CUDA(cu->cuStreamWaitValue32_v2(first, address_of(words), 0, 1),
                CUDA_ERROR_NOT_SUPPORTED);
    assert_string_equal(cu->tnsim_refusal(), "cuStreamWaitValue32: flags 0x1 are not simulated");
    EXPECT_CUDA(cu->cuStreamWaitValue32_v2(first, block, 0, 0), CUDA_ERROR_NOT_SUPPORTED);
    assert_string_equal(cu->tnsim_refusal(), "cuStreamWaitValue32: words of other than pinned host "
                                             "memory are not simulated");
    EXPECT_CUDA(cu->cuStreamWaitValue32_v2(first, address_of(words) + 2, 0, 0),
                CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(wait_for((CUstream)(uintptr_t)12345, words, 0), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_CUDA_OK(cu->cuStreamBeginCapture_v2(first, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT_CUDA(wait_for(first, words, 0), CUDA_ERROR_NOT_SUPPORTED);
    assert_string_equal(cu->tnsim_refusal(),
                        "cuStreamWaitValue32: captures of it are not simulated");
    EXPECT_CUDA_OK(cu->cuStreamEndCapture(first, &graph));
    EXPECT_CUDA_OK(cu->cuGraphDestroy(graph));
    EXPECT_CUDA_OK(cu->cuMemFree_v2(block));
}

/* Also what never passes: it is told of, and ends with the configuration. */
static void a_wait_that_is_left_is_unfinished_work(void **state) {
    char text[1024] = "";
    (void)state;
    EXPECT_CUDA_OK(wait_for(first, &words[0], 1));
    assert_true(cu->tnsim_leftovers(text, sizeof text) > 0);
    assert_non_null(strstr(text, "unfinished work: on 1 streams"));
    cu = simcuda_start(16 * MIB, 1);
    assert_int_equal(cu->tnsim_leftovers(text, sizeof text), 0);
}

#define VALUE_TEST(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        VALUE_TEST(what_is_behind_the_wait_runs_once_the_host_has_written),
        VALUE_TEST(a_value_that_is_there_holds_nothing_up),
        VALUE_TEST(values_go_round),
        VALUE_TEST(a_wait_has_its_place_in_the_stream),
        VALUE_TEST(the_word_is_read_as_a_kernel_would),
        VALUE_TEST(a_wait_orders_no_other_stream),
        VALUE_TEST(what_is_not_simulated_is_refused_by_name),
        cmocka_unit_test_setup(a_wait_that_is_left_is_unfinished_work, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
