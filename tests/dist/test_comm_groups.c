/* Groups: several calls put as one, all or none; and what begin, end and cancel refuse. */
#include "rank_values_support.h"

#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"

enum { BYTES = 5000, COUNT = 1111, SEGMENTS = 4 };

static rank_fixture all;

/* ---- what is in a group --------------------------------------------------------------------- */

/* Blocks for one call of each kind, filled with the rank's values. */
typedef struct blocks {
    unsigned char *part, *whole;   /* all_gather of BYTES */
    float *sum;                    /* all_reduce of COUNT, in place */
    float *shares, *share;         /* reduce_scatter of COUNT */
    unsigned char *unit;           /* all_gather_uneven, in place */
    unsigned char *spread;         /* broadcast of BYTES from the last rank */
    tn_segment segments[SEGMENTS]; /* several of one rank */
} blocks;

static void fill_floats(float *block, size_t count) {
    float *data = malloc(count * sizeof *data);
    for (size_t i = 0; i < count; i++)
        data[i] = ranks_number(all.rank, i);
    ranks_put(&all, block, data, count * sizeof *data);
    ranks_wait(&all);
    free(data);
}

static void fill_block(unsigned char *block, int rank, size_t bytes) {
    unsigned char *data = malloc(bytes);
    ranks_fill_bytes(data, rank, bytes);
    ranks_put(&all, block, data, bytes);
    ranks_wait(&all);
    free(data);
}

static blocks take_blocks(void) {
    size_t ranks = (size_t)all.count;
    blocks made = {.part = ranks_take(&all, BYTES), .whole = ranks_take(&all, BYTES * ranks)};
    made.sum = ranks_take(&all, COUNT * sizeof(float));
    made.shares = ranks_take(&all, COUNT * ranks * sizeof(float));
    made.share = ranks_take(&all, COUNT * sizeof(float));
    made.unit = ranks_take(&all, BYTES);
    made.spread = ranks_take(&all, BYTES);
    for (size_t i = 0; i < SEGMENTS; i++)
        made.segments[i] = (tn_segment){(int)(i % ranks), i * (BYTES / SEGMENTS), 100 + i};
    fill_block(made.part, all.rank, BYTES);
    fill_block(made.unit, all.rank, BYTES);
    fill_block(made.spread, all.rank, BYTES);
    fill_floats(made.sum, COUNT);
    fill_floats(made.shares, COUNT * ranks);
    return made;
}

static void give_blocks(blocks *made) {
    void *const taken[] = {made->part,  made->whole, made->sum,   made->shares,
                           made->share, made->unit,  made->spread};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        ranks_give(&all, taken[i]);
}

static void call_each(const blocks *with) {
    EXPECT_OK(tn_all_gather(all.comm, with->part, with->whole, BYTES, all.stream));
    EXPECT_OK(
        tn_all_reduce(all.comm, with->sum, with->sum, COUNT, TN_FP32, TN_REDUCE_SUM, all.stream));
    EXPECT_OK(tn_reduce_scatter(all.comm, with->shares, with->share, COUNT, TN_FP32, TN_REDUCE_SUM,
                                all.stream));
    EXPECT_OK(tn_all_gather_uneven(all.comm, with->unit, with->unit, with->segments, SEGMENTS,
                                   all.stream));
    EXPECT_OK(tn_broadcast(all.comm, with->spread, BYTES, all.count - 1, all.stream));
}

/* ---- what comes out ------------------------------------------------------------------------- */

static void expect_floats(const float *block, size_t first) {
    float *seen = malloc(COUNT * sizeof *seen);
    ranks_get(&all, seen, block, COUNT * sizeof *seen);
    for (size_t i = 0; i < COUNT; i++)
        assert_true(seen[i] == ranks_reduced_as(&all, TN_FP32, TN_REDUCE_SUM, first + i, seen, i));
    free(seen);
}

static void expect_block(const unsigned char *block, const unsigned char *expected, size_t bytes) {
    unsigned char *seen = malloc(bytes);
    ranks_get(&all, seen, block, bytes);
    assert_memory_equal(seen, expected, bytes);
    free(seen);
}

static void expect_results(const blocks *made) {
    size_t whole_bytes = BYTES * (size_t)all.count;
    unsigned char *expected = malloc(whole_bytes);
    for (int rank = 0; rank < all.count; rank++)
        ranks_fill_bytes(expected + (size_t)rank * BYTES, rank, BYTES);
    expect_block(made->whole, expected, whole_bytes);
    ranks_fill_bytes(expected, all.rank, BYTES);
    for (size_t i = 0; i < SEGMENTS; i++) {
        const tn_segment *segment = &made->segments[i];
        for (size_t at = segment->offset; at < segment->offset + segment->count; at++)
            expected[at] = ranks_byte(segment->rank, at);
    }
    expect_block(made->unit, expected, BYTES);
    ranks_fill_bytes(expected, all.count - 1, BYTES);
    expect_block(made->spread, expected, BYTES);
    expect_floats(made->sum, 0);
    expect_floats(made->share, (size_t)all.rank * COUNT);
    free(expected);
}

static void a_group_is_one_task_that_does_all_its_calls(void **state) {
    (void)state;
    blocks made = take_blocks();
    tn_comm_stats before = ranks_stats(&all);
    uint64_t launches = test_calls(all.device, TN_CALL_LAUNCH);
    EXPECT_OK(tn_comm_group_begin(all.comm));
    call_each(&made);
    assert_int_equal(test_calls(all.device, TN_CALL_LAUNCH), launches);
    tn_comm_stats between = ranks_stats(&all);
    assert_memory_equal(&before, &between, sizeof before);
    EXPECT_OK(tn_comm_group_end(all.comm, all.stream));
    /* On a CUDA device it is copies, too, and a host function for each round. */
    if (all.place == RANKS_ON_HOST)
        assert_int_equal(test_calls(all.device, TN_CALL_LAUNCH), launches + 1);
    expect_results(&made);
    assert_int_equal(ranks_stats(&all).groups, before.groups + 1);
    give_blocks(&made);
}

static void a_group_counts_what_its_calls_alone_count(void **state) {
    (void)state;
    blocks made = take_blocks();
    tn_comm_stats start = ranks_stats(&all);
    call_each(&made);
    tn_comm_stats alone = ranks_stats(&all);
    ranks_wait(&all);
    EXPECT_OK(tn_comm_group_begin(all.comm));
    call_each(&made);
    EXPECT_OK(tn_comm_group_end(all.comm, all.stream));
    tn_comm_stats grouped = ranks_stats(&all);
    for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++) {
        assert_int_equal(grouped.calls[kind] - alone.calls[kind],
                         alone.calls[kind] - start.calls[kind]);
        assert_int_equal(grouped.wire_bytes[kind] - alone.wire_bytes[kind],
                         alone.wire_bytes[kind] - start.wire_bytes[kind]);
    }
    ranks_wait(&all);
    give_blocks(&made);
}

/* Hundreds of segments: the unit of a sharding plan with many tensors. */
static void many_uneven_gathers_are_one_group(void **state) {
    (void)state;
    enum { UNITS = 5, PIECES = 64 };
    static tn_segment segments[PIECES];
    unsigned char *units[UNITS], *seen = malloc(BYTES);
    for (size_t i = 0; i < PIECES; i++)
        segments[i] = (tn_segment){(int)((i * 5) % (size_t)all.count), i * 70, i % 71};
    for (int unit = 0; unit < UNITS; unit++) {
        units[unit] = ranks_take(&all, BYTES);
        fill_block(units[unit], all.rank, BYTES);
    }
    EXPECT_OK(tn_comm_group_begin(all.comm));
    for (int unit = 0; unit < UNITS; unit++)
        EXPECT_OK(
            tn_all_gather_uneven(all.comm, units[unit], units[unit], segments, PIECES, all.stream));
    EXPECT_OK(tn_comm_group_end(all.comm, all.stream));
    for (int unit = 0; unit < UNITS; unit++) {
        ranks_get(&all, seen, units[unit], BYTES);
        for (size_t i = 0; i < PIECES; i++)
            for (size_t at = i * 70; at < i * 70 + i % 71; at++)
                assert_int_equal(seen[at], ranks_byte(segments[i].rank, at));
        ranks_give(&all, units[unit]);
    }
    free(seen);
}

/* ---- begin, end, cancel --------------------------------------------------------------------- */

static void a_group_is_begun_once_and_ended_once(void **state) {
    (void)state;
    EXPECT_STATUS(tn_comm_group_end(all.comm, all.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("no group is open");
    EXPECT_OK(tn_comm_group_begin(all.comm));
    EXPECT_STATUS(tn_comm_group_begin(all.comm), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("a group is open already");
    tn_comm *none = NULL;
    EXPECT_STATUS(tn_comm_split(all.comm, 0, 0, NULL, &none), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("while a group is open");
    EXPECT_OK(tn_comm_group_end(all.comm, all.stream));
    EXPECT_STATUS(tn_comm_group_begin(NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_comm_group_end(NULL, all.stream), TN_INVALID_ARGUMENT);
    tn_comm_group_cancel(NULL);
    tn_comm_group_cancel(all.comm);
}

static void groups_without_bytes_put_nothing(void **state) {
    (void)state;
    tn_comm_stats before = ranks_stats(&all);
    EXPECT_OK(tn_comm_group_begin(all.comm));
    EXPECT_OK(tn_all_gather(all.comm, NULL, NULL, 0, all.stream));
    EXPECT_OK(tn_comm_group_end(all.comm, all.stream));
    EXPECT_OK(tn_comm_group_begin(all.comm));
    EXPECT_OK(tn_comm_group_end(all.comm, all.other));
    tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&before, &after, sizeof before);
}

static void a_wrong_call_is_not_in_the_group(void **state) {
    (void)state;
    blocks made = take_blocks();
    EXPECT_OK(tn_comm_group_begin(all.comm));
    call_each(&made);
    EXPECT_STATUS(tn_all_gather(all.comm, NULL, made.whole, 1, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_barrier(all.comm, all.other), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("barrier is on stream");
    EXPECT_STATUS(tn_comm_group_end(all.comm, all.other), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tn_comm_group_end is on stream");
    EXPECT_OK(tn_comm_group_end(all.comm, all.stream));
    expect_results(&made);
    give_blocks(&made);
}

static void a_cancelled_group_has_put_nothing(void **state) {
    (void)state;
    blocks made = take_blocks();
    tn_comm_stats before = ranks_stats(&all);
    EXPECT_OK(tn_comm_group_begin(all.comm));
    call_each(&made);
    tn_comm_group_cancel(all.comm);
    tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&before, &after, sizeof before);
    call_each(&made);
    expect_results(&made);
    give_blocks(&made);
}

/* The end fails at each of its allocations: the group is open as it was, and then works. */
static void an_end_that_fails_can_be_made_again(void **state) {
    (void)state;
    blocks made = take_blocks();
    tn_comm_stats before = ranks_stats(&all);
    EXPECT_OK(tn_comm_group_begin(all.comm));
    call_each(&made);
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    int failures = 0;
    for (long nth = 1; status != TN_OK; nth++) {
        tn__host_alloc_fault(nth, 0);
        status = tn_comm_group_end(all.comm, all.stream);
        tn__host_alloc_fault(0, 0);
        if (status == TN_OK) break;
        EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
        tn_comm_stats after = ranks_stats(&all);
        assert_memory_equal(&before, &after, sizeof before);
        failures++;
    }
    assert_true(failures >= 2 ||
                all.engine == TN_COMM_NCCL); /* whose calls allocate nothing here */
    expect_results(&made);
    give_blocks(&made);
}

static void a_communicator_is_destroyed_with_its_open_group(void **state) {
    (void)state;
    tn_comm *comm = ranks_comm(&all, "left open", 0);
    EXPECT_OK(tn_comm_group_begin(comm));
    EXPECT_OK(tn_barrier(comm, all.stream));
    EXPECT_OK(tn_comm_destroy(comm));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_group_is_one_task_that_does_all_its_calls),
        cmocka_unit_test(a_group_counts_what_its_calls_alone_count),
        cmocka_unit_test(many_uneven_gathers_are_one_group),
        cmocka_unit_test(a_group_is_begun_once_and_ended_once),
        cmocka_unit_test(groups_without_bytes_put_nothing),
        cmocka_unit_test(a_wrong_call_is_not_in_the_group),
        cmocka_unit_test(a_cancelled_group_has_put_nothing),
        cmocka_unit_test(an_end_that_fails_can_be_made_again),
        cmocka_unit_test(a_communicator_is_destroyed_with_its_open_group),
    };
    return RANKS_RUN(&all, tests);
}
