/* The NCCL engine over a scripted NCCL: calls in progress are polled, deadlines abort, errors have
 * names, and an adopted communicator is left alone. On the simulated device, which has no NCCL. */
#include "test_support.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "../dist/scripted_nccl.h"
#include "comm_engine.h"

enum { SHORT_US = 20000, LONG_US = 20 * 1000 * 1000, REMOTE_ERROR = 6 };

static tn_device *device;
static const tn__comm_engine *engine;
static scripted_nccl *script;

static tn_status join(uint64_t timeout_us, void *adopted, tn__comm_state **out) {
    static const tn_comm_id id;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    int rank = -1, count = -1;
    config.device = device;
    config.timeout_us = timeout_us;
    config.nccl_comm = adopted;
    if (!adopted) config.id = &id, config.rank = 1, config.rank_count = 2;
    TN_TRY(engine->join(&config, &rank, &count, out));
    assert_int_equal(rank, 1);
    assert_int_equal(count, 2);
    return TN_OK;
}

static tn_status barrier(tn__comm_state *state) {
    const tn__collective_call call = {.kind = TN_BARRIER, .element_bytes = 1, .dtype = TN_BYTE};
    return engine->start(state, &call, NULL);
}

static void a_call_in_progress_is_polled_until_it_is_through(void **state) {
    (void)state;
    tn__comm_state *comm;
    script->polls_in_progress = 3;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    EXPECT_OK(barrier(comm));
    EXPECT_OK(engine->check(comm));
    engine->leave(comm);
    assert_int_equal(script->collectives, 1);
    assert_int_equal(script->finalized, 1);
    assert_int_equal(script->destroyed, 1);
    assert_int_equal(script->aborted, 0);
}

static void joining_that_takes_too_long_is_aborted(void **state) {
    (void)state;
    tn__comm_state *comm = NULL;
    script->polls_in_progress = -1;
    EXPECT_STATUS(join(SHORT_US, NULL, &comm), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("ncclCommInitRankConfig: not all ranks joined it within 0.02 s");
    assert_null(comm);
    assert_int_equal(script->aborted, 1);
    assert_int_equal(script->destroyed, 0);
}

static void a_collective_that_takes_too_long_fails_for_good(void **state) {
    (void)state;
    tn__comm_state *comm;
    EXPECT_OK(join(SHORT_US, NULL, &comm));
    script->polls_in_progress = -1;
    EXPECT_STATUS(barrier(comm), TN_COMM_TIMEOUT);
    EXPECT_STATUS(engine->check(comm), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("ncclAllReduce of a barrier");
    engine->abort(comm);
    engine->leave(comm);
    assert_int_equal(script->aborted, 1);
    assert_int_equal(script->finalized, 0);
}

static void an_error_has_its_name_and_words(void **state) {
    (void)state;
    tn__comm_state *comm;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    script->result = REMOTE_ERROR;
    EXPECT_STATUS(engine->check(comm), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("ncclRemoteError (a scripted failure): its last words");
    assert_int_equal(tn_error_last_native(), REMOTE_ERROR);
    engine->abort(comm);
    engine->leave(comm);
    assert_int_equal(script->aborted, 1);
}

static void an_adopted_communicator_is_left_alone(void **state) {
    (void)state;
    tn__comm_state *comm;
    EXPECT_OK(join(SHORT_US, script, &comm));
    engine->leave(comm);
    EXPECT_OK(join(SHORT_US, script, &comm));
    script->polls_in_progress = -1;
    EXPECT_STATUS(barrier(comm), TN_COMM_TIMEOUT);
    engine->leave(comm);
    assert_int_equal(script->aborted + script->finalized + script->destroyed, 0);
}

static int begin_script(void **state) {
    (void)state;
    *script = (scripted_nccl){0};
    device = test_open_sim(0, 0);
    return 0;
}

static int end_script(void **state) {
    (void)state;
    test_close_sim(device); /* fails if the engine left device memory behind */
    return 0;
}

#define SCRIPTED(test) cmocka_unit_test_setup_teardown(test, begin_script, end_script)

int main(void) {
    static const char path[] = TENURE_BUILD_DIR "/tests/libtenure_scripted_nccl.so";
    const struct CMUnitTest tests[] = {
        SCRIPTED(a_call_in_progress_is_polled_until_it_is_through),
        SCRIPTED(joining_that_takes_too_long_is_aborted),
        SCRIPTED(a_collective_that_takes_too_long_fails_for_good),
        SCRIPTED(an_error_has_its_name_and_words),
        SCRIPTED(an_adopted_communicator_is_left_alone),
    };
    setenv("TENURE_NCCL_LIBRARY", path, 1);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        puts("skipped: built without NCCL (TENURE_NCCL=OFF)");
        return 77;
    }
    script = dlsym(library, "scripted_nccl_state");
    if (tn__nccl_engine_get(&engine) != TN_OK) {
        puts(tn_error_last());
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
