/* NCCL with one rank on a real GPU: every collective, order, an adopted communicator, errors.
 *
 * Skipped (77) where there is no GPU. With one rank a collective is a copy, so every
 * result is known; what is shown is that the engine joins, works in stream order and leaves.
 */
#include "gpu_support.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_abi.h"
#include "tenure_registration.h"
#include "test_pools.h"

enum { BYTES = 3 << 20 };

static tn_device *device;
static tn_pool *pool;
static tn_stream stream, other;
static tn_comm *comm;

static tn_comm *join(void) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm_id id;
    tn_comm *made = NULL;
    EXPECT_OK(tn_comm_id_create(&id));
    config.device = device;
    config.id = &id;
    config.rank_count = 1;
    config.timeout_us = 60 * 1000 * 1000;
    EXPECT_OK(tn_comm_create(&config, &made));
    return made;
}

static void the_communicator_is_of_one_rank(void **state) {
    (void)state;
    assert_int_equal(tn_comm_rank(comm), 0);
    assert_int_equal(tn_comm_size(comm), 1);
    assert_string_equal(tn_comm_engine_name(comm), "NCCL");
    EXPECT_STATUS(tn_device_destroy(device), TN_IN_USE);
}

static void each_collective_gives_what_was_put_in(void **state) {
    (void)state;
    unsigned char *data = malloc(BYTES), *seen = malloc(BYTES);
    void *src = test_take(pool, BYTES, stream), *dst = test_take(pool, BYTES, stream);
    for (size_t i = 0; i < BYTES; i++)
        data[i] = (unsigned char)(i * 7 % 113); /* no NaN in fp32 or bf16 */
    EXPECT_OK(tn_copy(device, src, data, BYTES, stream));
    EXPECT_OK(tn_all_gather(comm, src, dst, BYTES, stream));
    EXPECT_OK(tn_broadcast(comm, dst, BYTES, 0, stream));
    EXPECT_OK(tn_all_reduce(comm, dst, src, BYTES / 4, TN_FP32, TN_REDUCE_SUM, stream));
    EXPECT_OK(tn_barrier(comm, stream));
    EXPECT_OK(tn_reduce_scatter(comm, src, dst, BYTES / 2, TN_BF16, TN_REDUCE_MAX, stream));
    EXPECT_OK(tn_copy(device, seen, dst, BYTES, stream));
    EXPECT_OK(tn_comm_wait(comm));
    EXPECT_OK(tn_stream_synchronize(device, stream));
    assert_memory_equal(seen, data, BYTES);
    test_give(pool, src, stream);
    test_give(pool, dst, stream);
    free(data);
    free(seen);
}

/* Segments of the one rank, in the reverse order of their places. */
static void uneven_collectives_give_what_was_put_in(void **state) {
    (void)state;
    enum { HALF = BYTES / 2 };
    const tn_segment bytes[] = {{0, HALF, 1000}, {0, 0, HALF}}, floats[] = {{0, 250, 50}};
    const size_t whole[] = {BYTES};
    unsigned char *data = malloc(BYTES), *seen = malloc(BYTES);
    char *src = test_take(pool, BYTES, stream), *dst = test_take(pool, BYTES, stream);
    for (size_t i = 0; i < BYTES; i++)
        data[i] = (unsigned char)(i * 7 % 113);
    EXPECT_OK(tn_copy(device, src, data, BYTES, stream));
    EXPECT_OK(tn_all_to_all(comm, src, dst, BYTES, stream));
    EXPECT_OK(tn_all_to_all_uneven(comm, dst, whole, NULL, src, whole, NULL, stream));
    EXPECT_OK(tn_fill(device, dst, 0, BYTES, stream));
    EXPECT_OK(tn_all_gather_uneven(comm, src, dst, bytes, 2, stream));
    EXPECT_OK(tn_all_gather_uneven(comm, dst, dst, bytes, 2, stream));
    EXPECT_OK(tn_copy(device, seen, dst, BYTES, stream));
    EXPECT_OK(tn_stream_synchronize(device, stream));
    assert_memory_equal(seen + HALF, data, 1000);
    assert_memory_equal(seen, data + 1000, HALF);
    EXPECT_OK(tn_reduce_scatter_uneven(comm, src, dst, floats, 1, TN_FP32, TN_REDUCE_SUM, stream));
    EXPECT_OK(tn_copy(device, seen, dst, 200, stream));
    EXPECT_OK(tn_comm_wait(comm));
    EXPECT_OK(tn_stream_synchronize(device, stream));
    assert_memory_equal(seen, data + 1000, 200);
    test_give(pool, src, stream);
    test_give(pool, dst, stream);
    free(data);
    free(seen);
}

static void a_group_sends_to_itself_and_gathers(void **state) {
    (void)state;
    const tn_segment segments[] = {{0, 0, 100}, {0, 300, 50}};
    unsigned char seen[350];
    char *src = test_take(pool, 350, stream), *dst = test_take(pool, 350, stream);
    tn_comm_stats before = TN_COMM_STATS_INIT, after = TN_COMM_STATS_INIT;
    EXPECT_OK(tn_comm_stats_get(comm, &before));
    EXPECT_OK(tn_fill(device, src, 5, 350, stream));
    EXPECT_OK(tn_fill(device, dst, 0, 350, stream));
    EXPECT_OK(tn_comm_group_begin(comm));
    EXPECT_OK(tn_all_gather_uneven(comm, src, dst, segments, 2, stream));
    EXPECT_OK(tn_send(comm, src, 60, 0, stream));
    EXPECT_OK(tn_receive(comm, dst + 200, 60, 0, stream));
    EXPECT_OK(tn_comm_group_end(comm, stream));
    EXPECT_OK(tn_copy(device, seen, dst, 350, stream));
    EXPECT_OK(tn_comm_wait(comm));
    EXPECT_OK(tn_stream_synchronize(device, stream));
    for (int i = 0; i < 350; i++)
        assert_int_equal(seen[i], i < 100 || (i >= 200 && i < 260) || i >= 300 ? 5 : 0);
    EXPECT_OK(tn_comm_stats_get(comm, &after));
    assert_int_equal(after.groups, before.groups + 1);
    test_give(pool, src, stream);
    test_give(pool, dst, stream);
}

/* A pool of ncclMemAlloc, a block of it registered as each kind, and a gather through it. */
static void registered_memory_of_nccl_carries_collectives(void **state) {
    (void)state;
    tn_comm *side = join();
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *nccl_pool = NULL;
    config.backing = TN_BACKING_CALLER;
    EXPECT_OK(tn_comm_memory_functions(side, &config.functions));
    EXPECT_OK(tn_pool_create(device, &config, &nccl_pool));
    char *block = test_take(nccl_pool, 2 * BYTES, stream);
    for (int kind = TN_REGISTER_BUFFER; kind <= TN_REGISTER_WINDOW; kind++) {
        tn_registration_info info = TN_REGISTRATION_INFO_INIT;
        tn_registration *record = NULL, *left = NULL;
        unsigned char seen[4] = {0};
        EXPECT_OK(tn_comm_register(side, block, 2 * BYTES, (tn_registration_kind)kind, &record));
        EXPECT_OK(tn_registration_info_get(record, &info));
        assert_int_equal(info.bytes, 2 * BYTES);
        assert_int_equal(info.kind, kind);
        EXPECT_OK(tn_fill(device, block, 7 + kind, BYTES, stream));
        EXPECT_OK(tn_all_gather(side, block, block + BYTES, BYTES, stream));
        EXPECT_OK(tn_copy(device, seen, block + 2 * BYTES - 4, 4, stream));
        EXPECT_OK(tn_comm_deregister(record));
        EXPECT_OK(tn_stream_synchronize(device, stream));
        assert_int_equal(seen[3], 7 + kind);
        /* One that is left is ended with the communicator. */
        if (kind == TN_REGISTER_WINDOW)
            EXPECT_OK(tn_comm_register(side, block, BYTES, TN_REGISTER_BUFFER, &left));
    }
    EXPECT_OK(tn_comm_destroy(side));
    test_give(nccl_pool, block, stream);
    EXPECT_OK(tn_stream_synchronize(device, stream));
    EXPECT_OK(tn_pool_destroy(nccl_pool));
}

static void a_split_communicator_outlives_the_old_one(void **state) {
    (void)state;
    tn_comm *old = join(), *part = NULL, *none = old;
    EXPECT_OK(tn_comm_split(old, 3, 0, "part", &part));
    EXPECT_OK(tn_comm_split(old, -1, 0, NULL, &none));
    assert_null(none);
    EXPECT_OK(tn_comm_destroy(old));
    assert_int_equal(tn_comm_size(part), 1);
    assert_string_equal(tn_comm_name(part), "part");
    EXPECT_OK(tn_barrier(part, stream));
    EXPECT_OK(tn_comm_destroy(part));
}

static void collectives_on_two_streams_keep_their_order(void **state) {
    (void)state;
    float sent = 3.5f, seen = 0.0f;
    float *a = test_take(pool, sizeof *a, stream), *b = test_take(pool, sizeof *b, stream);
    EXPECT_OK(tn_copy(device, a, &sent, sizeof sent, stream));
    EXPECT_OK(tn_all_reduce(comm, a, b, 1, TN_FP32, TN_REDUCE_SUM, stream));
    EXPECT_OK(tn_all_reduce(comm, b, a, 1, TN_FP32, TN_REDUCE_SUM, other));
    EXPECT_OK(tn_record_use(a, other));
    EXPECT_OK(tn_record_use(b, other));
    EXPECT_OK(tn_copy(device, &seen, a, sizeof seen, other));
    EXPECT_OK(tn_stream_synchronize(device, other));
    EXPECT_OK(tn_comm_wait(comm));
    assert_true(seen == sent);
    test_give(pool, a, stream);
    test_give(pool, b, stream);
}

static void one_rank_sends_nothing(void **state) {
    (void)state;
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    EXPECT_OK(tn_comm_stats_get(comm, &stats));
    for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++) {
        assert_true(stats.calls[kind] > 0);
        assert_int_equal(stats.wire_bytes[kind], 0);
    }
}

static void a_wrong_configuration_is_refused(void **state) {
    (void)state;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *none = NULL;
    tn_comm_id id = {{0}};
    config.device = device;
    EXPECT_STATUS(tn_comm_create(&config, &none), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("one of an id, an nccl_comm and a rendezvous");
    config.id = &id;
    config.rank = 1, config.rank_count = 1;
    EXPECT_STATUS(tn_comm_create(&config, &none), TN_INVALID_ARGUMENT);
    config.engine = TN_COMM_MPI;
    EXPECT_STATUS(tn_comm_create(&config, &none), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("id and nccl_comm are for NCCL");
    assert_null(none);
}

/* Rank 0 of 2, and no rank 1: NCCL waits, and is aborted at the deadline. */
static void a_rank_that_does_not_join_is_a_timeout(void **state) {
    (void)state;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *none = NULL;
    tn_comm_id id;
    EXPECT_OK(tn_comm_id_create(&id));
    config.device = device;
    config.id = &id;
    config.rank_count = 2;
    config.timeout_us = 500 * 1000;
    EXPECT_STATUS(tn_comm_create(&config, &none), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("ncclCommInitRankConfig: not all ranks joined it within 0.5 s");
    assert_null(none);
}

static void a_second_communicator_lives_beside_the_first(void **state) {
    (void)state;
    tn_comm *second = join();
    EXPECT_OK(tn_barrier(second, stream));
    EXPECT_OK(tn_barrier(comm, stream));
    EXPECT_OK(tn_comm_destroy(second));
    EXPECT_OK(tn_comm_wait(comm));
}

/* What a program has made with NCCL itself stays its own. */
static void an_adopted_communicator_is_used_and_left_alone(void **state) {
    (void)state;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn__nccl_config nccl_config = {sizeof nccl_config, TN__NCCL_CONFIG_MAGIC,
                                   TN__NCCL_CONFIG_VERSION, 1};
    tn__nccl_calls calls;
    tn__nccl_id id;
    tn_comm *adopted = NULL;
    void *theirs = NULL, *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    int ranks = 0;
    if (!library) fail_msg("%s", dlerror());
    *(void **)&calls.id = dlsym(library, "ncclGetUniqueId");
    *(void **)&calls.join = dlsym(library, "ncclCommInitRankConfig");
    *(void **)&calls.count = dlsym(library, "ncclCommCount");
    *(void **)&calls.destroy = dlsym(library, "ncclCommDestroy");
    assert_int_equal(calls.id(&id), TN__NCCL_SUCCESS);
    assert_int_equal(calls.join(&theirs, 1, id, 0, &nccl_config), TN__NCCL_SUCCESS);
    config.device = device;
    config.nccl_comm = theirs;
    EXPECT_OK(tn_comm_create(&config, &adopted));
    assert_int_equal(tn_comm_size(adopted), 1);
    EXPECT_OK(tn_barrier(adopted, stream));
    EXPECT_OK(tn_comm_destroy(adopted));
    assert_int_equal(calls.count(theirs, &ranks), TN__NCCL_SUCCESS);
    assert_int_equal(ranks, 1);
    assert_int_equal(calls.destroy(theirs), TN__NCCL_SUCCESS);
}

static int open_all(void **state) {
    (void)state;
    pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    stream = test_open_stream(device);
    other = test_open_stream(device);
    comm = join();
    return 0;
}

static int close_all(void **state) {
    (void)state;
    EXPECT_OK(tn_comm_destroy(comm));
    EXPECT_OK(tn_device_synchronize(device));
    assert_int_equal(test_pool_stats(pool).live_bytes, 0);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_stream_destroy(device, stream));
    EXPECT_OK(tn_stream_destroy(device, other));
    EXPECT_OK(tn_device_destroy(device));
    return 0;
}

static int open_device(void) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device_info info = TN_DEVICE_INFO_INIT;
    config.driver = TN_DRIVER_CUDA;
    if (tn_device_create(&config, &device) != TN_OK) {
        printf("skipped: %s\n", tn_error_last());
        return 0;
    }
    if (tn_device_info_get(device, &info) == TN_OK && !info.simulated) return 1;
    printf("skipped: the CUDA driver is the simulated one\n");
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_communicator_is_of_one_rank),
        cmocka_unit_test(each_collective_gives_what_was_put_in),
        cmocka_unit_test(uneven_collectives_give_what_was_put_in),
        cmocka_unit_test(a_group_sends_to_itself_and_gathers),
        cmocka_unit_test(registered_memory_of_nccl_carries_collectives),
        cmocka_unit_test(a_split_communicator_outlives_the_old_one),
        cmocka_unit_test(collectives_on_two_streams_keep_their_order),
        cmocka_unit_test(one_rank_sends_nothing),
        cmocka_unit_test(a_wrong_configuration_is_refused),
        cmocka_unit_test(a_second_communicator_lives_beside_the_first),
        cmocka_unit_test(an_adopted_communicator_is_used_and_left_alone),
        cmocka_unit_test(a_rank_that_does_not_join_is_a_timeout),
    };
    if (!open_device()) return 77;
    return TEST_RUN_GROUP(tests, open_all, close_all);
}
