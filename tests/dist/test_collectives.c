/* Collectives on any count of ranks: every byte and bit, and the bytes on the wire.
 *
 * Every expected value is computed from what all ranks put in. Sizes go from one element to
 * several rounds of the engine's staging buffers.
 */
#include "rank_values_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static rank_fixture all;

/* ---- gather and broadcast ------------------------------------------------------------------- */

static void gather_of(size_t bytes, int in_place) {
    size_t whole_bytes = bytes * (size_t)all.count;
    unsigned char *expected = malloc(whole_bytes), *actual = malloc(whole_bytes);
    unsigned char *whole = ranks_take(&all, whole_bytes);
    unsigned char *part =
        in_place ? whole + (size_t)all.rank * bytes : (unsigned char *)ranks_take(&all, bytes);
    for (int rank = 0; rank < all.count; rank++)
        ranks_fill_bytes(expected + (size_t)rank * bytes, rank, bytes);
    ranks_put(&all, part, expected + (size_t)all.rank * bytes, bytes);
    EXPECT_OK(tn_all_gather(all.comm, part, whole, bytes, all.stream));
    ranks_get(&all, actual, whole, whole_bytes);
    assert_memory_equal(actual, expected, whole_bytes);
    if (!in_place) ranks_give(&all, part);
    ranks_give(&all, whole);
    free(expected);
    free(actual);
}

static void all_gather_puts_every_ranks_bytes_in_order(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 7, 4096, 100003, (3 << 20) + 5};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        gather_of(sizes[i], 0);
        gather_of(sizes[i], 1);
    }
}

static void broadcast_gives_the_roots_bytes_to_all(void **state) {
    (void)state;
    size_t bytes = (2 << 20) + 13;
    unsigned char *data = malloc(bytes), *expected = malloc(bytes),
                  *block = ranks_take(&all, bytes);
    for (int root = 0; root < all.count; root++) {
        ranks_fill_bytes(data, all.rank, bytes);
        ranks_fill_bytes(expected, root, bytes);
        ranks_put(&all, block, data, bytes);
        EXPECT_OK(tn_broadcast(all.comm, block, bytes, root, all.stream));
        ranks_get(&all, data, block, bytes);
        assert_memory_equal(data, expected, bytes);
    }
    ranks_give(&all, block);
    free(data);
    free(expected);
}

/* ---- reductions ----------------------------------------------------------------------------- */

static void reduce_of(tn_collective kind, size_t count, tn_dtype dtype, tn_reduce reduce,
                      int in_place) {
    int scatters = kind == TN_REDUCE_SCATTER;
    size_t whole = scatters ? count * (size_t)all.count : count;
    size_t first = scatters ? count * (size_t)all.rank : 0, width = tn_dtype_bytes(dtype);
    void *data = malloc(whole * width), *expected = malloc(count * width);
    char *src = ranks_take(&all, whole * width);
    void *dst = in_place ? (void *)(src + first * width) : ranks_take(&all, count * width);
    for (size_t i = 0; i < whole; i++)
        ranks_store(data, i, dtype, ranks_number(all.rank, i));
    ranks_put(&all, src, data, whole * width);
    if (scatters)
        EXPECT_OK(tn_reduce_scatter(all.comm, src, dst, count, dtype, reduce, all.stream));
    else
        EXPECT_OK(tn_all_reduce(all.comm, src, dst, count, dtype, reduce, all.stream));
    ranks_get(&all, data, dst, count * width);
    for (size_t i = 0; i < count; i++)
        ranks_store(expected, i, dtype, ranks_reduced_as(&all, dtype, reduce, first + i, data, i));
    assert_memory_equal(data, expected, count * width);
    if (!in_place) ranks_give(&all, dst);
    ranks_give(&all, src);
    free(data);
    free(expected);
}

static void reductions_have_the_bits_of_sums_in_rank_order(void **state) {
    (void)state;
    static const size_t counts[] = {1, 2, 5, 1023, 300007};
    static const tn_dtype dtypes[] = {TN_FP32, TN_BF16};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (int d = 0; d < 2; d++) {
            reduce_of(TN_REDUCE_SCATTER, counts[i], dtypes[d], TN_REDUCE_SUM, i % 2);
            reduce_of(TN_ALL_REDUCE, counts[i], dtypes[d], TN_REDUCE_SUM, i % 2);
            reduce_of(TN_REDUCE_SCATTER, counts[i], dtypes[d], TN_REDUCE_MAX, i % 2);
            reduce_of(TN_ALL_REDUCE, counts[i], dtypes[d], TN_REDUCE_MAX, i % 2);
        }
    }
}

static void bf16_sums_are_rounded_once(void **state) {
    (void)state;
    /* 256 + 1 + 1 ...: rounded at each step it would stay 256. */
    uint16_t value = ranks_narrow(all.rank == 0 ? 256.0f : 1.0f), result;
    uint16_t *block = ranks_take(&all, sizeof value);
    ranks_put(&all, block, &value, sizeof value);
    EXPECT_OK(tn_all_reduce(all.comm, block, block, 1, TN_BF16, TN_REDUCE_SUM, all.stream));
    ranks_get(&all, &result, block, sizeof result);
    if (ranks_sum_in_order(&all))
        assert_int_equal(result, ranks_narrow(256.0f + (float)(all.count - 1)));
    else
        assert_in_range(result, ranks_narrow(256.0f), ranks_narrow(256.0f + (float)all.count));
    ranks_give(&all, block);
}

static void maxima_pass_over_nan_and_sums_keep_it(void **state) {
    (void)state;
    float values[3] = {all.rank == 0 ? NAN : (float)all.rank, NAN, -INFINITY}, results[3];
    float *block = ranks_take(&all, sizeof values);
    ranks_put(&all, block, values, sizeof values);
    EXPECT_OK(tn_all_reduce(all.comm, block, block, 3, TN_FP32, TN_REDUCE_MAX, all.stream));
    ranks_get(&all, results, block, sizeof results);
    if (all.count > 1)
        assert_true(results[0] == (float)(all.count - 1));
    else
        assert_true(isnan(results[0]));
    assert_true(isnan(results[1]));
    assert_true(results[2] == -INFINITY);
    ranks_put(&all, block, values, sizeof values);
    EXPECT_OK(tn_all_reduce(all.comm, block, block, 1, TN_FP32, TN_REDUCE_SUM, all.stream));
    ranks_get(&all, results, block, sizeof *results);
    assert_true(isnan(results[0]));
    ranks_give(&all, block);
}

/* ---- counts --------------------------------------------------------------------------------- */

static void nothing_is_put_for_a_count_of_zero(void **state) {
    (void)state;
    tn_comm_stats before = ranks_stats(&all);
    uint64_t launches = test_calls(all.device, TN_CALL_LAUNCH);
    EXPECT_OK(tn_all_gather(all.comm, NULL, NULL, 0, all.stream));
    EXPECT_OK(tn_broadcast(all.comm, NULL, 0, 0, all.stream));
    EXPECT_OK(tn_reduce_scatter(all.comm, NULL, NULL, 0, TN_FP32, TN_REDUCE_SUM, all.stream));
    EXPECT_OK(tn_all_reduce(all.comm, NULL, NULL, 0, TN_BF16, TN_REDUCE_MAX, all.stream));
    tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&before, &after, sizeof before);
    assert_int_equal(test_calls(all.device, TN_CALL_LAUNCH), launches);
}

static uint64_t sum_over_ranks(uint64_t mine) {
    /* Exact in fp32: the figures are small. */
    float value = (float)mine, sum;
    float *block = ranks_take(&all, sizeof value);
    ranks_put(&all, block, &value, sizeof value);
    EXPECT_OK(tn_all_reduce(all.comm, block, block, 1, TN_FP32, TN_REDUCE_SUM, all.stream));
    ranks_get(&all, &sum, block, sizeof sum);
    ranks_give(&all, block);
    return (uint64_t)sum;
}

static void bytes_on_the_wire_are_the_closed_form(void **state) {
    (void)state;
    uint64_t others = (uint64_t)all.count - 1, n = (uint64_t)all.count;
    char *src = ranks_take(&all, 40000), *dst = ranks_take(&all, 40000);
    tn_comm_stats before = ranks_stats(&all);
    EXPECT_OK(tn_fill(all.device, src, 0, 40000, all.stream));
    EXPECT_OK(tn_all_gather(all.comm, src, dst, 1000, all.stream));
    EXPECT_OK(tn_reduce_scatter(all.comm, src, dst, 30, TN_BF16, TN_REDUCE_SUM, all.stream));
    EXPECT_OK(tn_all_reduce(all.comm, src, dst, 1001, TN_FP32, TN_REDUCE_SUM, all.stream));
    EXPECT_OK(tn_broadcast(all.comm, dst, 77, all.count - 1, all.stream));
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    tn_comm_stats after = ranks_stats(&all);
    uint64_t sent[TN_COLLECTIVE_COUNT];
    for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++) {
        assert_int_equal(after.calls[kind] - before.calls[kind], kind <= TN_BARRIER);
        sent[kind] = after.wire_bytes[kind] - before.wire_bytes[kind];
    }
    assert_int_equal(sent[TN_ALL_GATHER], others * 1000);
    assert_int_equal(sent[TN_REDUCE_SCATTER], others * 30 * 2);
    assert_int_equal(sent[TN_BROADCAST], (uint64_t)all.rank == others ? others * 77 : 0);
    assert_int_equal(sent[TN_BARRIER], 0);
    /* All ranks together send each element n - 1 times to reduce it, and as often to spread it. */
    assert_int_equal(sum_over_ranks(sent[TN_ALL_REDUCE]), 2 * others * 1001 * 4);
    if (1001 % n == 0) assert_int_equal(sent[TN_ALL_REDUCE], 2 * others * (1001 / n) * 4);
    ranks_wait(&all);
    ranks_give(&all, src);
    ranks_give(&all, dst);
}

static void a_communicator_says_what_it_is(void **state) {
    (void)state;
    assert_string_equal(tn_comm_name(all.comm), "ranks");
    assert_string_equal(tn_comm_engine_name(all.comm), ranks_engine(&all));
    assert_in_range(all.rank, 0, all.count - 1);
    EXPECT_STATUS(tn_device_destroy(all.device), TN_IN_USE);
    assert_string_equal(tn_collective_name(TN_REDUCE_SCATTER), "reduce_scatter");
    assert_string_equal(tn_collective_name(TN_COLLECTIVE_COUNT), "unknown collective");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_gather_puts_every_ranks_bytes_in_order),
        cmocka_unit_test(broadcast_gives_the_roots_bytes_to_all),
        cmocka_unit_test(reductions_have_the_bits_of_sums_in_rank_order),
        cmocka_unit_test(bf16_sums_are_rounded_once),
        cmocka_unit_test(maxima_pass_over_nan_and_sums_keep_it),
        cmocka_unit_test(nothing_is_put_for_a_count_of_zero),
        cmocka_unit_test(bytes_on_the_wire_are_the_closed_form),
        cmocka_unit_test(a_communicator_says_what_it_is),
    };
    return RANKS_RUN(&all, tests);
}
