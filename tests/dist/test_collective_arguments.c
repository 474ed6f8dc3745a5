/* Calls that are wrong: on one rank they are refused and change nothing; where ranks differ, all
 * of them learn it, and a new communicator works. */
#include "ranks_support.h"

#include <string.h>

#include "tenure_registration.h"

static rank_fixture all;
static float *src, *dst; /* of 64 elements for each rank */

static tn_status reduce(tn_comm *comm, size_t count, tn_dtype dtype, tn_reduce reduce) {
    return tn_all_reduce(comm, src, dst, count, dtype, reduce, all.stream);
}

static void wrong_arguments_are_refused_and_change_nothing(void **state) {
    (void)state;
    char *bytes = (char *)src;
    tn_comm_stats before = ranks_stats(&all);
    EXPECT_STATUS(tn_all_gather(NULL, src, dst, 4, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_all_gather(all.comm, NULL, dst, 4, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("an address is NULL");
    EXPECT_STATUS(tn_all_gather(all.comm, bytes + 1, bytes, 100, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("the ranges overlap and are not in place");
    EXPECT_STATUS(tn_all_reduce(all.comm, bytes + 4, bytes, 2, TN_FP32, TN_REDUCE_SUM, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_all_reduce(all.comm, bytes + 2, dst, 1, TN_FP32, TN_REDUCE_SUM, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("is not aligned to an element of 4 bytes");
    EXPECT_STATUS(reduce(all.comm, 1, TN_FP16, TN_REDUCE_SUM), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("all_reduce of fp16: reductions are of fp32 and bf16");
    EXPECT_STATUS(reduce(all.comm, 1, TN_FP32, (tn_reduce)7), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(reduce(all.comm, SIZE_MAX / 4, TN_FP32, TN_REDUCE_SUM), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("too large");
    EXPECT_STATUS(tn_broadcast(all.comm, src, 4, all.count, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_broadcast(all.comm, src, 4, -1, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("root -1");
    /* CUDA can not tell a stream from any other address. */
    if (all.place == RANKS_ON_HOST)
        EXPECT_STATUS(tn_barrier(all.comm, (tn_stream)&all), TN_INVALID_ARGUMENT);
    tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&before, &after, sizeof before);
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    ranks_wait(&all);
}

/* One row for each rule of a list; SIZE_MAX / 4 elements are too many bytes. */
static void wrong_segments_are_refused_and_change_nothing(void **state) {
    (void)state;
    static const struct {
        tn_segment segments[2];
        const char *words;
    } rows[] = {
        {{{0, 0, 4}, {-1, 8, 4}}, "segment 1 is of rank -1"},
        {{{0, 0, 4}, {99, 8, 4}}, "segment 1 is of rank 99"},
        {{{0, 0, 4}, {0, 3, 4}}, "rank 0 with 4 elements at 0 overlaps another one"},
        {{{0, 3, 4}, {0, 0, 4}}, "rank 0 with 4 elements at 0 overlaps another one"},
        {{{0, 0, 9}, {0, 2, 1}}, "overlaps another one"},
        {{{0, SIZE_MAX, 2}, {0, 0, 1}}, "segment 0 of 2 elements at"},
        {{{0, 0, SIZE_MAX / 4}, {0, 0, 0}}, "too large"},
    };
    const tn_segment fine[] = {{0, 0, 4}, {all.rank, 8, 4}};
    tn_comm_stats before = ranks_stats(&all);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        EXPECT_STATUS(tn_reduce_scatter_uneven(all.comm, src, dst, rows[i].segments, 2, TN_FP32,
                                               TN_REDUCE_SUM, all.stream),
                      TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS(rows[i].words);
    }
    EXPECT_STATUS(tn_all_gather_uneven(NULL, src, dst, fine, 2, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_all_gather_uneven(all.comm, src, dst, NULL, 2, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("segments is NULL, and their count 2");
    EXPECT_STATUS(tn_all_gather_uneven(all.comm, src, NULL, fine, 2, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_all_gather_uneven(all.comm, NULL, dst, fine, 2, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("an address is NULL");
    EXPECT_STATUS(tn_all_gather_uneven(all.comm, (char *)dst + 7, dst, fine, 2, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("overlap segment 1, and are not in place");
    EXPECT_STATUS(
        tn_reduce_scatter_uneven(all.comm, src, dst, fine, 2, TN_BYTE, TN_REDUCE_SUM, all.stream),
        TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_reduce_scatter_uneven(all.comm, (char *)src + 2, dst, fine, 2, TN_FP32,
                                           TN_REDUCE_SUM, all.stream),
                  TN_INVALID_ARGUMENT);
    tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&before, &after, sizeof before);
}

/* What NCCL only has. */
static void memory_is_registered_with_no_other_engine(void **state) {
    (void)state;
    tn_registration *none = NULL;
    tn_memory_functions functions;
    if (ranks_leaves_out(&all, "NCCL registers memory: nccl_single has that")) return;
    EXPECT_STATUS(tn_comm_register(all.comm, src, 8, TN_REGISTER_BUFFER, &none), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("registers no memory, NCCL does");
    EXPECT_STATUS(tn_comm_memory_functions(all.comm, &functions), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_comm_register(NULL, src, 8, TN_REGISTER_BUFFER, &none), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_comm_register(all.comm, NULL, 8, TN_REGISTER_BUFFER, &none),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_comm_register(all.comm, src, 0, TN_REGISTER_BUFFER, &none),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_comm_register(all.comm, src, 8, (tn_registration_kind)5, &none),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("5 is no kind of registration");
    assert_null(none);
    EXPECT_OK(tn_comm_deregister(none));
}

static void a_wrong_configuration_is_refused(void **state) {
    (void)state;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *comm = NULL;
    tn_comm_id id = {{0}};
    EXPECT_STATUS(tn_comm_create(&config, &comm), TN_INVALID_ARGUMENT);
    config.device = all.device;
    config.size = 8;
    EXPECT_STATUS(tn_comm_create(&config, &comm), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("TN_COMM_CONFIG_INIT");
    config.size = sizeof config;
    config.engine = (tn_comm_engine)9;
    EXPECT_STATUS(tn_comm_create(&config, &comm), TN_INVALID_ARGUMENT);
    config.engine = TN_COMM_MPI;
    config.rank_count = 2;
    EXPECT_STATUS(tn_comm_create(&config, &comm), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("MPI says them itself");
    config.rank_count = 0;
    config.id = &id;
    EXPECT_STATUS(tn_comm_create(&config, &comm), TN_INVALID_ARGUMENT);
    assert_null(comm);
    EXPECT_OK(tn_comm_destroy(NULL));
}

/* Puts a call that differs by rank on a communicator of its own, which must fail everywhere. */
typedef tn_status (*differing_call)(tn_comm *comm);

static void expect_mismatch(differing_call call, const char *words) {
    tn_comm *comm = ranks_comm(&all, "mismatched", 0);
    EXPECT_OK(call(comm));
    EXPECT_STATUS(tn_comm_wait(comm), all.count > 1 ? TN_COMM_ERROR : TN_OK);
    if (all.count > 1) {
        EXPECT_ERROR_HAS(words);
        EXPECT_ERROR_HAS("communicator mismatched: rank ");
        EXPECT_STATUS(tn_barrier(comm, all.stream), TN_COMM_ERROR);
        EXPECT_ERROR_HAS(words);
        EXPECT_STATUS(tn_all_gather(comm, src, dst, 0, all.stream), TN_COMM_ERROR);
    }
    EXPECT_STATUS(tn_comm_destroy(comm), all.count > 1 ? TN_COMM_ERROR : TN_OK);
}

static tn_status other_count(tn_comm *comm) {
    return reduce(comm, all.rank ? 5 : 3, TN_FP32, TN_REDUCE_SUM);
}

static tn_status other_dtype(tn_comm *comm) {
    return reduce(comm, 4, all.rank ? TN_BF16 : TN_FP32, TN_REDUCE_SUM);
}

static tn_status other_reduction(tn_comm *comm) {
    return reduce(comm, 4, TN_FP32, all.rank ? TN_REDUCE_MAX : TN_REDUCE_SUM);
}

static tn_status other_root(tn_comm *comm) {
    return tn_broadcast(comm, src, 4, all.rank ? 1 : 0, all.stream);
}

static tn_status other_kind(tn_comm *comm) {
    if (all.rank) return tn_all_gather(comm, src, dst, 4, all.stream);
    return tn_barrier(comm, all.stream);
}

static tn_status other_segments(tn_comm *comm) {
    int last = all.count - 1;
    const tn_segment segments[] = {
        {0, 0, 8}, {last, 8, all.rank ? 16 : 12}, {last, 24, all.rank ? 4 : 8}};
    return tn_all_gather_uneven(comm, dst, dst, segments, 3, all.stream);
}

static tn_status other_owner(tn_comm *comm) {
    const tn_segment segments[] = {{0, 0, 8}, {all.rank, 8, 4}};
    return tn_reduce_scatter_uneven(comm, dst, dst, segments, 2, TN_FP32, TN_REDUCE_SUM,
                                    all.stream);
}

/* The same calls in another order: the bytes of all of them are equal. */
static tn_status other_order_in_group(tn_comm *comm) {
    EXPECT_OK(tn_comm_group_begin(comm));
    for (int i = 0; i < 2; i++) {
        char *buffer = (char *)dst + i * 128;
        EXPECT_OK(tn_broadcast(comm, buffer, (i == 1) == (all.rank == 0) ? 8 : 16, 0, all.stream));
    }
    return tn_comm_group_end(comm, all.stream);
}

static tn_status other_group(tn_comm *comm) {
    EXPECT_OK(tn_comm_group_begin(comm));
    for (int i = 0; i < (all.rank ? 3 : 2); i++)
        EXPECT_OK(tn_barrier(comm, all.stream));
    return tn_comm_group_end(comm, all.stream);
}

static tn_status group_of_one_rank(tn_comm *comm) {
    if (all.rank) return tn_barrier(comm, all.stream);
    return other_group(comm);
}

static void calls_that_differ_between_ranks_fail_on_all_of_them(void **state) {
    (void)state;
    if (ranks_leaves_out(&all,
                         "NCCL compares no calls: nccl_faults has what differs in checked mode"))
        return;
    expect_mismatch(other_count, "of 3 fp32 sum");
    expect_mismatch(other_dtype, "of 4 bf16 sum");
    expect_mismatch(other_reduction, "of 4 fp32 max");
    expect_mismatch(other_root, "root 1");
    expect_mismatch(other_kind, "called barrier 1");
    expect_mismatch(other_segments, "called all_gather_uneven 1 of 28 byte");
    expect_mismatch(other_owner, "called reduce_scatter_uneven 1 of 12 fp32 sum");
    expect_mismatch(other_order_in_group, "called group 1 of 2 calls");
    expect_mismatch(other_group, "called group 1 of 3 calls");
    expect_mismatch(group_of_one_rank, "called group 1 of 2 calls");
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    ranks_wait(&all);
}

static int open_ranks(void **state) {
    (void)state;
    all = ranks_open();
    src = test_take(all.pool, 256 * (size_t)all.count, all.stream);
    dst = test_take(all.pool, 256 * (size_t)all.count, all.stream);
    EXPECT_OK(tn_fill(all.device, src, 0, 256 * (size_t)all.count, all.stream));
    return 0;
}

static int close_ranks(void **state) {
    (void)state;
    test_give(all.pool, src, all.stream);
    test_give(all.pool, dst, all.stream);
    ranks_close(&all);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_arguments_are_refused_and_change_nothing),
        cmocka_unit_test(wrong_segments_are_refused_and_change_nothing),
        cmocka_unit_test(memory_is_registered_with_no_other_engine),
        cmocka_unit_test(a_wrong_configuration_is_refused),
        cmocka_unit_test(calls_that_differ_between_ranks_fail_on_all_of_them),
    };
    return TEST_RUN_GROUP(tests, open_ranks, close_ranks);
}
