/* The NCCL engine over a scripted NCCL: calls in progress are polled, deadlines abort, errors have
 * names, and an adopted communicator is left alone. On the simulated device, which has no NCCL. */
#include "test_support.h"

#include <errno.h>

#include "scripted_nccl_support.h"

enum { SHORT_US = 20000, LONG_US = 60 * 1000 * 1000, REMOTE_ERROR = 6 };

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

/* One call with its segments, or a group of the same call twice. */
static tn_status put(tn__comm_state *state, tn__collective_call call, tn_segment *segments,
                     size_t segment_count, size_t times) {
    tn__collective_call calls[2];
    call.segment_count = segment_count;
    calls[0] = calls[1] = call;
    const tn__batch batch = {calls, times, segments, segment_count};
    return engine->start(state, &batch, NULL);
}

static const tn__collective_call barrier_call = {
    .kind = TN_BARRIER, .element_bytes = 1, .dtype = TN_BYTE};

static tn_status barrier(tn__comm_state *state) { return put(state, barrier_call, NULL, 0, 1); }

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

static void a_limit_is_the_deadline_from_then_on(void **state) {
    (void)state;
    tn__comm_state *comm;
    void *window = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    engine->limit(comm, SHORT_US);
    script->polls_in_progress = -1;
    EXPECT_STATUS(engine->enroll(comm, script, 100, 1, &window), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("ncclCommWindowRegister: not all ranks joined it within 0.02 s");
    engine->leave(comm);
    assert_int_equal(script->aborted, 1);
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

/* ---- groups --------------------------------------------------------------------------------- */

static char memory[4096];

static void a_call_alone_is_no_group_and_two_are_one(void **state) {
    (void)state;
    tn__comm_state *comm;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    EXPECT_OK(barrier(comm));
    assert_string_equal(script->log, "all_reduce 1 ");
    EXPECT_OK(put(comm, barrier_call, NULL, 0, 2));
    assert_string_equal(script->log, "all_reduce 1 group( all_reduce 1 all_reduce 1 ) ");
    engine->leave(comm);
}

static const tn__collective_call gather_call = {.kind = TN_ALL_GATHER_UNEVEN,
                                                .src = memory,
                                                .dst = memory + 1000,
                                                .count = 1,
                                                .element_bytes = 1,
                                                .dtype = TN_BYTE};
static const tn__collective_call reduce_call = {.kind = TN_REDUCE_SCATTER_UNEVEN,
                                                .src = memory,
                                                .dst = memory + 1000,
                                                .count = 1,
                                                .element_bytes = 2,
                                                .dtype = TN_BF16};

static void uneven_segments_are_broadcast_from_and_reduced_to_their_ranks(void **state) {
    (void)state;
    tn_segment segments[] = {{1, 0, 10}, {0, 10, 20}, {0, 30, 0}, {1, 100, 7}};
    tn__comm_state *comm;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    EXPECT_OK(put(comm, gather_call, segments, 4, 1));
    assert_string_equal(script->log,
                        "group( broadcast 10 root 1 broadcast 20 root 0 broadcast 7 root 1 ) ");
    /* The second segment of rank 1, which is this one, is behind its first of 10 bytes. */
    assert_ptr_equal(script->src, memory + 10);
    assert_ptr_equal(script->dst, memory + 1000 + 100);
    script->log[0] = 0;
    EXPECT_OK(put(comm, reduce_call, segments, 4, 1));
    assert_string_equal(script->log, "group( reduce 10 root 1 reduce 20 root 0 reduce 7 root 1 ) ");
    assert_ptr_equal(script->src, memory + 200);
    assert_ptr_equal(script->dst, memory + 1000 + 20);
    engine->leave(comm);
}

static void uneven_calls_in_place_stay_where_they_are(void **state) {
    (void)state;
    tn_segment segments[] = {{0, 0, 10}, {1, 16, 7}};
    tn__collective_call call = gather_call;
    tn__comm_state *comm;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    call.dst = memory;
    EXPECT_OK(put(comm, call, segments, 2, 1));
    assert_ptr_equal(script->src, memory + 16);
    assert_ptr_equal(script->dst, memory + 16);
    call = reduce_call;
    call.dst = memory;
    EXPECT_OK(put(comm, call, segments, 2, 1));
    assert_ptr_equal(script->src, memory + 32);
    assert_ptr_equal(script->dst, memory + 32);
    engine->leave(comm);
}

static void equal_shares_in_order_are_ncclAllGather_and_ncclReduceScatter(void **state) {
    (void)state;
    tn_segment segments[] = {{0, 0, 8}, {1, 8, 8}};
    tn__collective_call in_place = gather_call;
    tn__comm_state *comm;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    EXPECT_OK(put(comm, gather_call, segments, 2, 1));
    EXPECT_OK(put(comm, reduce_call, segments, 2, 1));
    assert_string_equal(script->log, "group( all_gather 8 ) group( reduce_scatter 8 ) ");
    in_place.dst = memory;
    EXPECT_OK(put(comm, in_place, segments, 2, 1));
    assert_ptr_equal(script->src, memory + 8);
    assert_ptr_equal(script->dst, memory);
    engine->leave(comm);
}

static void all_to_all_is_a_send_and_a_receive_for_each_rank(void **state) {
    (void)state;
    tn_segment segments[] = {{0, 0, 5}, {1, 5, 0}, {0, 100, 6}, {1, 200, 7}};
    tn__collective_call even = gather_call, uneven = gather_call;
    tn__comm_state *comm;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    even.kind = TN_ALL_TO_ALL, even.count = 8;
    EXPECT_OK(put(comm, even, NULL, 0, 1));
    assert_string_equal(script->log,
                        "group( send 8 to 0 receive 8 from 0 send 8 to 1 receive 8 from 1 ) ");
    assert_ptr_equal(script->dst, memory + 1000 + 8);
    script->log[0] = 0;
    uneven.kind = TN_ALL_TO_ALL_UNEVEN;
    EXPECT_OK(put(comm, uneven, segments, 4, 1));
    assert_string_equal(script->log, "group( send 5 to 0 receive 6 from 0 receive 7 from 1 ) ");
    assert_ptr_equal(script->dst, memory + 1000 + 200);
    engine->leave(comm);
}

static void messages_follow_the_calls_for_all_ranks(void **state) {
    (void)state;
    tn__collective_call calls[3] = {gather_call, gather_call, barrier_call};
    tn__comm_state *comm;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    calls[0].kind = TN_SEND, calls[0].count = 9;
    calls[1].kind = TN_RECEIVE, calls[1].count = 4, calls[1].root = 1;
    EXPECT_OK(put(comm, calls[0], NULL, 0, 1));
    assert_string_equal(script->log, "send 9 to 0 ");
    script->log[0] = 0;
    const tn__batch batch = {calls, 3, NULL, 0};
    EXPECT_OK(engine->start(comm, &batch, NULL));
    assert_string_equal(script->log, "group( all_reduce 1 send 9 to 0 receive 4 from 1 ) ");
    engine->leave(comm);
}

static void a_refused_call_ends_its_group_and_the_communicator_goes_on(void **state) {
    (void)state;
    tn__comm_state *comm;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    script->refused = 2;
    EXPECT_STATUS(put(comm, barrier_call, NULL, 0, 2), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("ncclGroupEnd failed: ncclInvalidArgument");
    assert_string_equal(script->log, "group( all_reduce 1 all_reduce 1 ) ");
    EXPECT_OK(engine->check(comm));
    EXPECT_OK(barrier(comm));
    engine->leave(comm);
    assert_int_equal(script->aborted, 0);
}

/* ---- memory --------------------------------------------------------------------------------- */

/* Each kind ends by its own call: the other one's has no meaning for it. */
static void registered_memory_ends_by_the_call_of_its_kind(void **state) {
    (void)state;
    tn__comm_state *comm;
    void *buffer = NULL, *window = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    script->polls_in_progress = 2;
    EXPECT_OK(engine->enroll(comm, memory, 100, 0, &buffer));
    EXPECT_OK(engine->enroll(comm, memory, 200, 1, &window));
    assert_int_equal(script->registered, 2);
    EXPECT_OK(engine->withdraw(comm, window, 1));
    EXPECT_OK(engine->withdraw(comm, buffer, 0));
    assert_string_equal(script->log, "buffer 100 window 200 end_window end_buffer ");
    assert_int_equal(script->registered, 0);
    EXPECT_OK(engine->withdraw(comm, NULL, 1));
    engine->leave(comm);
}

/* As NCCL 2.28 does it with windows. */
static void registrations_follow_each_other(void **state) {
    (void)state;
    tn__comm_state *comm;
    void *first = NULL, *second = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    script->polls_in_progress = 2;
    script->is_early = 1;
    EXPECT_OK(engine->enroll(comm, memory, 200, 1, &first));
    EXPECT_OK(engine->enroll(comm, memory, 100, 0, &second));
    EXPECT_OK(engine->withdraw(comm, second, 0));
    EXPECT_OK(engine->withdraw(comm, first, 1));
    assert_int_equal(script->registered, 0);
    engine->leave(comm);
}

static void refused_memory_is_not_registered(void **state) {
    (void)state;
    tn__comm_state *comm;
    void *window = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    script->refused = 1;
    EXPECT_STATUS(engine->enroll(comm, memory, 200, 1, &window), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("ncclCommWindowRegister failed: ncclInvalidArgument");
    assert_null(window);
    EXPECT_OK(engine->check(comm));
    engine->abort(comm);
    EXPECT_OK(engine->withdraw(comm, memory, 1));
    assert_int_equal(script->registered, 0);
    engine->leave(comm);
}

static void memory_of_ncclMemAlloc_serves_pools(void **state) {
    (void)state;
    tn_memory_functions functions = {NULL, NULL, NULL};
    void *block = NULL;
    EXPECT_OK(engine->memory_functions(device, &functions));
    EXPECT_OK(functions.alloc(functions.context, 4096, &block));
    assert_int_equal(script->allocated, 1);
    EXPECT_STATUS(functions.free(functions.context, memory, 4096), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("ncclMemFree failed");
    EXPECT_OK(functions.free(functions.context, block, 4096));
    assert_int_equal(script->allocated, 0);
    script->refused = 1;
    EXPECT_STATUS(functions.alloc(functions.context, 4096, &block), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("ncclMemAlloc of 4096 bytes failed");
}

/* ---- splitting ------------------------------------------------------------------------------ */

static tn_status split(tn__comm_state *comm, int color, tn__comm_state **out) {
    int rank = -1, count = -1;
    TN_TRY(engine->split_prepare(comm, out));
    TN_TRY(engine->split(comm, color, 3, "part", TN_OK, &rank, &count, out));
    if (*out) assert_int_equal(rank * 10 + count, 12);
    return TN_OK;
}

static void a_split_communicator_is_its_own(void **state) {
    (void)state;
    tn__comm_state *comm, *part = NULL, *none = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    script->polls_in_progress = 2;
    EXPECT_OK(split(comm, 5, &part));
    assert_string_equal(script->log, "split color 5 key 3 ");
    EXPECT_OK(split(comm, -7, &none));
    assert_null(none);
    assert_string_equal(script->log, "split color 5 key 3 split color -1 key 3 ");
    engine->leave(comm);
    assert_int_equal(script->destroyed, 1);
    EXPECT_OK(barrier(part));
    engine->leave(part);
    assert_int_equal(script->destroyed, 2);
}

/* As NCCL 2.28 does it. */
static void splits_follow_each_other(void **state) {
    (void)state;
    tn__comm_state *comm, *first = NULL, *second = NULL, *none = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    script->polls_in_progress = 2;
    script->is_early = 1;
    EXPECT_OK(split(comm, 5, &first));
    EXPECT_OK(split(comm, -1, &none));
    EXPECT_OK(split(comm, 6, &second));
    engine->leave(comm);
    engine->leave(first);
    engine->leave(second);
    assert_int_equal(script->destroyed, 3);
}

static void a_split_that_takes_too_long_fails_the_old_one_for_good(void **state) {
    (void)state;
    tn__comm_state *comm, *part = NULL;
    EXPECT_OK(join(SHORT_US, NULL, &comm));
    script->polls_in_progress = -1;
    EXPECT_STATUS(split(comm, 0, &part), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("ncclCommSplit: not all ranks joined it within 0.02 s");
    assert_null(part);
    EXPECT_STATUS(engine->check(comm), TN_COMM_TIMEOUT);
    engine->leave(comm);
    assert_int_equal(script->destroyed, 0);
}

/* ---- shrinking ------------------------------------------------------------------------------ */

static tn_status shrink(tn__comm_state *comm, tn__comm_state **out) {
    const int excluded[] = {0, 3};
    int rank = -1, count = -1;
    TN_TRY(engine->shrink(comm, excluded, 2, "part", &rank, &count, out));
    assert_int_equal(rank * 10 + count, 12);
    return TN_OK;
}

static void a_communicator_is_shrunk_by_choice(void **state) {
    (void)state;
    tn__comm_state *comm, *part = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    script->polls_in_progress = 2;
    EXPECT_OK(shrink(comm, &part));
    assert_string_equal(script->log, "shrink 0 3 flags 0 ");
    EXPECT_OK(barrier(comm));
    engine->leave(comm);
    engine->leave(part);
    assert_int_equal(script->destroyed, 2);
    assert_int_equal(script->aborted, 0);
}

static void what_has_failed_is_kept_to_be_shrunk(void **state) {
    (void)state;
    tn__comm_state *comm, *part = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    engine->keep(comm, 1);
    engine->abort(comm);
    assert_int_equal(script->aborted, 0);
    EXPECT_OK(shrink(comm, &part));
    assert_string_equal(script->log, "shrink 0 3 flags 1 ");
    engine->leave(comm);
    assert_int_equal(script->aborted, 1);
    engine->leave(part);
    assert_int_equal(script->destroyed, 1);
}

/* What NCCL has met itself it says again, at once. */
static void a_refused_shrink_says_what_to_do(void **state) {
    (void)state;
    tn__comm_state *comm, *part = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    engine->keep(comm, 1);
    engine->abort(comm);
    script->refused_shrink = REMOTE_ERROR;
    EXPECT_STATUS(shrink(comm, &part), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("ncclCommShrink failed: ncclRemoteError");
    EXPECT_ERROR_HAS("make a new rendezvous");
    assert_null(part);
    assert_int_equal(script->aborted, 0);
    engine->leave(comm);
    assert_int_equal(script->aborted, 1);
}

/* NCCL would write to what it makes later on: it ends. */
static void a_shrink_that_takes_too_long_ends_the_old_one(void **state) {
    (void)state;
    tn__comm_state *comm, *part = NULL;
    EXPECT_OK(join(SHORT_US, NULL, &comm));
    engine->keep(comm, 1);
    script->polls_in_progress = -1;
    EXPECT_STATUS(shrink(comm, &part), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("make a new rendezvous");
    assert_null(part);
    assert_true(script->aborted > 0);
    engine->leave(comm);
}

/* As its caller does, with the lock. */
static void expire(tn__comm_state *comm) {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    engine->expire(comm, &lock);
    assert_int_equal(pthread_mutex_trylock(&lock), EBUSY);
    pthread_mutex_unlock(&lock);
}

static void what_is_kept_expires(void **state) {
    (void)state;
    tn__comm_state *comm, *part = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    engine->keep(comm, 1);
    expire(comm);
    assert_int_equal(script->aborted, 0);
    engine->abort(comm);
    expire(comm);
    assert_int_equal(script->aborted, 1);
    EXPECT_STATUS(shrink(comm, &part), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("tn_comm_config.shrinkable");
    assert_null(part);
    engine->leave(comm);
    assert_int_equal(script->aborted, 1);
    assert_int_equal(script->destroyed, 0);
}

/* What is in graphs ends by the one who waits for them, and is not to be shrunk meanwhile. */
static void what_is_in_graphs_is_kept_but_not_to_be_shrunk(void **state) {
    (void)state;
    tn__comm_state *comm, *part = NULL;
    EXPECT_OK(join(LONG_US, NULL, &comm));
    engine->keep(comm, 0);
    EXPECT_OK(shrink(comm, &part));
    engine->leave(part);
    engine->keep(comm, 0);
    engine->abort(comm);
    assert_int_equal(script->aborted, 0);
    EXPECT_STATUS(shrink(comm, &part), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("tn_comm_config.shrinkable");
    expire(comm);
    assert_int_equal(script->aborted, 1);
    engine->leave(comm);
    assert_int_equal(script->aborted, 1);
}

static int begin_script(void **state) {
    (void)state;
    *script = (scripted_nccl){.rank = 1, .rank_count = 2};
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
    const struct CMUnitTest tests[] = {
        SCRIPTED(a_call_in_progress_is_polled_until_it_is_through),
        SCRIPTED(joining_that_takes_too_long_is_aborted),
        SCRIPTED(a_collective_that_takes_too_long_fails_for_good),
        SCRIPTED(a_limit_is_the_deadline_from_then_on),
        SCRIPTED(an_error_has_its_name_and_words),
        SCRIPTED(an_adopted_communicator_is_left_alone),
        SCRIPTED(a_call_alone_is_no_group_and_two_are_one),
        SCRIPTED(uneven_segments_are_broadcast_from_and_reduced_to_their_ranks),
        SCRIPTED(uneven_calls_in_place_stay_where_they_are),
        SCRIPTED(equal_shares_in_order_are_ncclAllGather_and_ncclReduceScatter),
        SCRIPTED(all_to_all_is_a_send_and_a_receive_for_each_rank),
        SCRIPTED(messages_follow_the_calls_for_all_ranks),
        SCRIPTED(a_refused_call_ends_its_group_and_the_communicator_goes_on),
        SCRIPTED(registered_memory_ends_by_the_call_of_its_kind),
        SCRIPTED(registrations_follow_each_other),
        SCRIPTED(refused_memory_is_not_registered),
        SCRIPTED(memory_of_ncclMemAlloc_serves_pools),
        SCRIPTED(a_split_communicator_is_its_own),
        SCRIPTED(splits_follow_each_other),
        SCRIPTED(a_split_that_takes_too_long_fails_the_old_one_for_good),
        SCRIPTED(a_communicator_is_shrunk_by_choice),
        SCRIPTED(what_has_failed_is_kept_to_be_shrunk),
        SCRIPTED(a_refused_shrink_says_what_to_do),
        SCRIPTED(a_shrink_that_takes_too_long_ends_the_old_one),
        SCRIPTED(what_is_kept_expires),
        SCRIPTED(what_is_in_graphs_is_kept_but_not_to_be_shrunk),
    };
    const int refusal = scripted_nccl_open(TENURE_BUILD_DIR, &script, &engine);
    if (refusal) return refusal;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
