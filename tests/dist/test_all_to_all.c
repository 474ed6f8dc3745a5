/* All-to-alls and messages between two ranks: every byte, in groups and alone; bytes on the wire;
 * and what two ranks that disagree learn. */
#include "rank_values_support.h"

#include <stdlib.h>
#include <string.h>

enum { RANKS_MAX = 16, SEEDS = 25, GUARD = 0xC7 };

static rank_fixture all;

/* Byte `at` of what `from` gives `to`. */
static unsigned char byte_between(int from, int to, size_t at) {
    return ranks_byte(from * RANKS_MAX + to, at);
}

static uint64_t wire_of(tn_collective kind) { return ranks_stats(&all).wire_bytes[kind]; }

/* ---- all to all ----------------------------------------------------------------------------- */

static void exchange_equal_parts(size_t bytes) {
    size_t whole = bytes * (size_t)all.count;
    unsigned char *data = malloc(whole), *expected = malloc(whole);
    unsigned char *src = ranks_take(&all, whole), *dst = ranks_take(&all, whole);
    uint64_t before = wire_of(TN_ALL_TO_ALL);
    for (int other = 0; other < all.count; other++) {
        for (size_t i = 0; i < bytes; i++) {
            data[(size_t)other * bytes + i] = byte_between(all.rank, other, i);
            expected[(size_t)other * bytes + i] = byte_between(other, all.rank, i);
        }
    }
    ranks_put(&all, src, data, whole);
    EXPECT_OK(tn_all_to_all(all.comm, src, dst, bytes, all.stream));
    ranks_get(&all, data, dst, whole);
    assert_memory_equal(data, expected, whole);
    assert_int_equal(wire_of(TN_ALL_TO_ALL) - before, ((uint64_t)all.count - 1) * bytes);
    ranks_give(&all, src);
    ranks_give(&all, dst);
    free(data);
    free(expected);
}

static void each_part_goes_to_its_rank(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 13, 4096, 700001};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        exchange_equal_parts(sizes[i]);
}

/* What `from` gives `to` in the exchange of a seed: often nothing. */
static size_t random_bytes(unsigned seed, int from, int to) {
    unsigned mixed = seed * 2654435761u + (unsigned)from * 40503u + (unsigned)to * 9973u + 1;
    mixed ^= mixed >> 13;
    mixed *= 2246822519u;
    mixed ^= mixed >> 16;
    size_t most = seed % 6 ? 900 : 250000;
    return mixed % 3 ? mixed / 3 % most : 0;
}

/* Parts of both sides one after the other, or with gaps and in the reverse order of ranks. */
static size_t place_parts(const size_t *bytes, size_t *offsets, int is_spread) {
    size_t at = 0;
    for (int i = 0; i < all.count; i++) {
        int rank = is_spread ? all.count - 1 - i : i;
        at += is_spread ? 3 : 0;
        offsets[rank] = at;
        at += bytes[rank];
    }
    return at;
}

static void exchange_random_parts(unsigned seed) {
    size_t sent[RANKS_MAX], received[RANKS_MAX], from[RANKS_MAX], to[RANKS_MAX];
    int is_spread = seed % 2;
    for (int other = 0; other < all.count; other++) {
        sent[other] = random_bytes(seed, all.rank, other);
        received[other] = random_bytes(seed, other, all.rank);
    }
    size_t src_bytes = place_parts(sent, from, is_spread) + 1;
    size_t dst_bytes = place_parts(received, to, is_spread) + 1;
    unsigned char *data = malloc(src_bytes), *expected = malloc(dst_bytes);
    unsigned char *actual = malloc(dst_bytes);
    unsigned char *src = ranks_take(&all, src_bytes), *dst = ranks_take(&all, dst_bytes);
    uint64_t before = wire_of(TN_ALL_TO_ALL_UNEVEN), wire = 0;
    memset(data, 0, src_bytes);
    memset(expected, GUARD, dst_bytes);
    for (int other = 0; other < all.count; other++) {
        wire += other == all.rank ? 0 : sent[other];
        for (size_t i = 0; i < sent[other]; i++)
            data[from[other] + i] = byte_between(all.rank, other, i);
        for (size_t i = 0; i < received[other]; i++)
            expected[to[other] + i] = byte_between(other, all.rank, i);
    }
    ranks_put(&all, src, data, src_bytes);
    EXPECT_OK(tn_fill(all.device, dst, GUARD, dst_bytes, all.stream));
    EXPECT_OK(tn_all_to_all_uneven(all.comm, src, sent, is_spread ? from : NULL, dst, received,
                                   is_spread ? to : NULL, all.stream));
    ranks_get(&all, actual, dst, dst_bytes);
    for (size_t i = 0; i < dst_bytes; i++)
        if (actual[i] != expected[i])
            fail_msg("seed %u, rank %d of %d: byte %zu differs", seed, all.rank, all.count, i);
    assert_int_equal(wire_of(TN_ALL_TO_ALL_UNEVEN) - before, wire);
    ranks_give(&all, src);
    ranks_give(&all, dst);
    free(data);
    free(expected);
    free(actual);
}

static void parts_of_any_size_and_place_go_to_their_ranks(void **state) {
    (void)state;
    for (unsigned seed = 1; seed <= SEEDS; seed++)
        exchange_random_parts(seed);
}

static void an_exchange_of_nothing_is_still_a_collective(void **state) {
    (void)state;
    static const size_t nothing[RANKS_MAX];
    uint64_t before = ranks_stats(&all).calls[TN_ALL_TO_ALL_UNEVEN];
    EXPECT_OK(tn_all_to_all_uneven(all.comm, NULL, nothing, NULL, NULL, nothing, NULL, all.stream));
    ranks_wait(&all);
    assert_int_equal(ranks_stats(&all).calls[TN_ALL_TO_ALL_UNEVEN], before + 1);
    EXPECT_OK(tn_all_to_all(all.comm, NULL, NULL, 0, all.stream));
}

/* ---- messages ------------------------------------------------------------------------------- */

enum { MESSAGE_BYTES = 300007 };

static void fill_between(unsigned char *block, int from, int to, size_t bytes) {
    unsigned char *data = malloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = byte_between(from, to, i);
    ranks_put(&all, block, data, bytes);
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    free(data);
}

static void expect_between(const unsigned char *block, int from, int to, size_t bytes) {
    unsigned char *seen = malloc(bytes);
    ranks_get(&all, seen, block, bytes);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(seen[i], byte_between(from, to, i));
    free(seen);
}

/* Everybody sends to the next and receives from the one before: alone this would be a deadlock. */
static void a_group_of_messages_goes_round_in_a_ring(void **state) {
    (void)state;
    int next = (all.rank + 1) % all.count, last = (all.rank + all.count - 1) % all.count;
    unsigned char *src = ranks_take(&all, MESSAGE_BYTES), *dst = ranks_take(&all, MESSAGE_BYTES);
    uint64_t sent = wire_of(TN_SEND);
    fill_between(src, all.rank, next, MESSAGE_BYTES);
    EXPECT_OK(tn_comm_group_begin(all.comm));
    EXPECT_OK(tn_send(all.comm, src, MESSAGE_BYTES, next, all.stream));
    EXPECT_OK(tn_receive(all.comm, dst, MESSAGE_BYTES, last, all.stream));
    EXPECT_OK(tn_comm_group_end(all.comm, all.stream));
    expect_between(dst, last, all.rank, MESSAGE_BYTES);
    assert_int_equal(wire_of(TN_SEND) - sent, all.count > 1 ? MESSAGE_BYTES : 0);
    assert_int_equal(wire_of(TN_RECEIVE), 0);
    ranks_give(&all, src);
    ranks_give(&all, dst);
}

/* A pipeline: from rank to rank, each alone and after the other. */
static void messages_alone_concern_two_ranks(void **state) {
    (void)state;
    unsigned char *block = ranks_take(&all, MESSAGE_BYTES);
    fill_between(block, 0, all.rank, MESSAGE_BYTES);
    if (all.rank > 0)
        EXPECT_OK(tn_receive(all.comm, block, MESSAGE_BYTES, all.rank - 1, all.stream));
    if (all.rank + 1 < all.count)
        EXPECT_OK(tn_send(all.comm, block, MESSAGE_BYTES, all.rank + 1, all.stream));
    expect_between(block, 0, 0, MESSAGE_BYTES);
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    ranks_wait(&all);
    ranks_give(&all, block);
}

/* Only the first and the last rank meet; those between go on to the barrier. */
static void messages_in_a_group_keep_their_order(void **state) {
    (void)state;
    int last = all.count - 1, is_first = all.rank == 0;
    unsigned char *a = ranks_take(&all, 100), *b = ranks_take(&all, 50);
    EXPECT_OK(tn_fill(all.device, a, is_first ? 1 : 0, 100, all.stream));
    EXPECT_OK(tn_fill(all.device, b, is_first ? 2 : 0, 50, all.stream));
    if (all.count > 1 && (is_first || all.rank == last)) {
        tn_status (*const message)(tn_comm *, void *, size_t, int, tn_stream) = tn_receive;
        EXPECT_OK(tn_comm_group_begin(all.comm));
        EXPECT_OK(is_first ? tn_send(all.comm, a, 100, last, all.stream)
                           : message(all.comm, a, 100, 0, all.stream));
        EXPECT_OK(is_first ? tn_send(all.comm, b, 50, last, all.stream)
                           : message(all.comm, b, 50, 0, all.stream));
        EXPECT_OK(tn_comm_group_end(all.comm, all.stream));
    }
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    unsigned char seen[2] = {1, 2};
    if (is_first || all.rank == last) {
        ranks_get(&all, &seen[0], a + 99, 1);
        ranks_get(&all, &seen[1], b + 49, 1);
    }
    ranks_wait(&all);
    assert_int_equal(seen[0] * 10 + seen[1], 12);
    ranks_give(&all, a);
    ranks_give(&all, b);
}

static void a_rank_sends_to_itself_in_a_group(void **state) {
    (void)state;
    unsigned char *src = ranks_take(&all, 150), *dst = ranks_take(&all, 150);
    fill_between(src, all.rank, 1, 150);
    EXPECT_STATUS(tn_send(all.comm, src, 150, all.rank, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("can send to or from itself in a group only");
    EXPECT_OK(tn_comm_group_begin(all.comm));
    EXPECT_OK(tn_send(all.comm, src, 100, all.rank, all.stream));
    EXPECT_STATUS(tn_comm_group_end(all.comm, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("sends itself 100 bytes where it receives 0 from itself");
    EXPECT_OK(tn_send(all.comm, src + 100, 50, all.rank, all.stream));
    EXPECT_OK(tn_receive(all.comm, dst, 100, all.rank, all.stream));
    EXPECT_OK(tn_receive(all.comm, dst + 100, 50, all.rank, all.stream));
    EXPECT_OK(tn_comm_group_end(all.comm, all.stream));
    expect_between(dst, all.rank, 1, 150);
    ranks_give(&all, src);
    ranks_give(&all, dst);
}

/* Experts: rows and their scales to each rank, sizes and a sum, as one collective. */
static void a_group_mixes_messages_with_collectives_for_all(void **state) {
    (void)state;
    enum { ROWS = 700, SCALES = 31 };
    int last = all.count - 1;
    size_t ranks = (size_t)all.count;
    unsigned char *rows = ranks_take(&all, ROWS * ranks), *got = ranks_take(&all, ROWS * ranks);
    unsigned char *extra = ranks_take(&all, SCALES);
    float one = 1.0f, sum = 0.0f, *total = ranks_take(&all, sizeof one);
    for (int other = 0; other < all.count; other++)
        fill_between(rows + (size_t)other * ROWS, all.rank, other, ROWS);
    fill_between(extra, 0, 7, SCALES);
    if (all.rank == last && last > 0) EXPECT_OK(tn_fill(all.device, extra, 0, SCALES, all.stream));
    ranks_put(&all, total, &one, sizeof one);
    EXPECT_OK(tn_comm_group_begin(all.comm));
    if (all.rank == 0 && last > 0) EXPECT_OK(tn_send(all.comm, extra, SCALES, last, all.stream));
    EXPECT_OK(tn_all_to_all(all.comm, rows, got, ROWS, all.stream));
    EXPECT_OK(tn_all_reduce(all.comm, total, total, 1, TN_FP32, TN_REDUCE_SUM, all.stream));
    if (all.rank == last && last > 0) EXPECT_OK(tn_receive(all.comm, extra, SCALES, 0, all.stream));
    EXPECT_OK(tn_comm_group_end(all.comm, all.stream));
    for (int other = 0; other < all.count; other++)
        expect_between(got + (size_t)other * ROWS, other, all.rank, ROWS);
    if (all.rank == last) expect_between(extra, 0, 7, SCALES);
    ranks_get(&all, &sum, total, sizeof sum);
    assert_true(sum == (float)all.count);
    ranks_give(&all, rows);
    ranks_give(&all, got);
    ranks_give(&all, extra);
    ranks_give(&all, total);
}

/* ---- what is wrong -------------------------------------------------------------------------- */

static void wrong_arguments_are_refused_and_change_nothing(void **state) {
    (void)state;
    size_t eight[RANKS_MAX], other[RANKS_MAX], zero[RANKS_MAX] = {0};
    unsigned char *block = ranks_take(&all, 8 * RANKS_MAX * 2);
    tn_comm_stats before = ranks_stats(&all);
    for (int i = 0; i < RANKS_MAX; i++)
        eight[i] = other[i] = 8;
    other[all.rank] = 9;
    EXPECT_STATUS(tn_all_to_all(NULL, block, block, 8, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_all_to_all(all.comm, block, block, 8, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("the ranges overlap");
    EXPECT_STATUS(tn_all_to_all_uneven(NULL, block, eight, NULL, block, eight, NULL, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_all_to_all_uneven(all.comm, block, NULL, NULL, block, eight, NULL, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("send_bytes and receive_bytes are needed");
    EXPECT_STATUS(tn_all_to_all_uneven(all.comm, NULL, eight, NULL, block, eight, NULL, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("src is NULL, and it has");
    EXPECT_STATUS(
        tn_all_to_all_uneven(all.comm, block, eight, NULL, block + 200, other, NULL, all.stream),
        TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("sends itself 8 bytes and receives 9 from itself");
    EXPECT_STATUS(
        tn_all_to_all_uneven(all.comm, block, eight, NULL, block + 7, eight, NULL, all.stream),
        TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("overlaps what comes from rank");
    if (all.count > 1) {
        EXPECT_STATUS(tn_all_to_all_uneven(all.comm, block, eight, NULL, block + 128, eight, zero,
                                           all.stream),
                      TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS("overlaps another one");
    }
    other[all.rank] = SIZE_MAX;
    EXPECT_STATUS(
        tn_all_to_all_uneven(all.comm, block, other, NULL, block, eight, NULL, all.stream),
        TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("too large");
    EXPECT_STATUS(tn_send(NULL, block, 8, 0, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_send(all.comm, block, 8, all.count, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("send: peer ");
    EXPECT_STATUS(tn_receive(NULL, block, 8, 0, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_receive(all.comm, block, 8, -1, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_receive(all.comm, NULL, 8, 0, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("an address is NULL");
    tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&before, &after, sizeof before);
    ranks_give(&all, block);
}

typedef tn_status (*differing_call)(tn_comm *comm, unsigned char *block);

/* All ranks but those between the first two may see it by a deadline only: two ranks are asked. */
static void expect_mismatch(differing_call call, const char *words) {
    tn_comm *pair = NULL;
    if (all.count < 2) return;
    EXPECT_OK(tn_comm_split(all.comm, all.rank < 2 ? 0 : -1, 0, "mismatched", &pair));
    if (!pair) return;
    unsigned char *block = ranks_take(&all, 4096);
    EXPECT_OK(call(pair, block));
    EXPECT_STATUS(tn_comm_wait(pair), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("communicator mismatched: rank ");
    EXPECT_ERROR_HAS(words);
    EXPECT_STATUS(tn_comm_destroy(pair), TN_COMM_ERROR);
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    ranks_give(&all, block);
}

static tn_status other_size_to_one(tn_comm *comm, unsigned char *block) {
    const size_t mine[2] = {10, 10}, expected[2] = {10, all.rank == 0 ? 11 : 10};
    size_t sent[2] = {mine[0], mine[1]};
    sent[all.rank] = expected[all.rank];
    return tn_all_to_all_uneven(comm, block, sent, NULL, block + 2000, expected, NULL, all.stream);
}

static tn_status other_message(tn_comm *comm, unsigned char *block) {
    return all.rank ? tn_receive(comm, block, 20, 0, all.stream)
                    : tn_send(comm, block, 30, 1, all.stream);
}

static tn_status other_order_of_messages(tn_comm *comm, unsigned char *block) {
    EXPECT_OK(tn_comm_group_begin(comm));
    for (int i = 0; i < 2; i++) {
        size_t bytes = (i == 1) == (all.rank == 0) ? 20 : 10;
        unsigned char *at = block + i * 100;
        EXPECT_OK(all.rank ? tn_receive(comm, at, bytes, 0, all.stream)
                           : tn_send(comm, at, bytes, 1, all.stream));
    }
    return tn_comm_group_end(comm, all.stream);
}

static tn_status message_and_barrier(tn_comm *comm, unsigned char *block) {
    return all.rank ? tn_barrier(comm, all.stream) : tn_send(comm, block, 30, 1, all.stream);
}

static void ranks_that_disagree_both_learn_it(void **state) {
    (void)state;
    if (ranks_leaves_out(&all,
                         "NCCL compares no calls: nccl_faults has what differs in checked mode"))
        return;
    expect_mismatch(other_size_to_one, "rank 1 sends 10 bytes to rank 0, which expects 11");
    expect_mismatch(other_message, "rank 0 sends 30 bytes to rank 1, which expects 20");
    expect_mismatch(other_order_of_messages, "rank 0 sends 30 bytes to rank 1, which expects 30");
    expect_mismatch(message_and_barrier, "called send or receive after 0");
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    ranks_wait(&all);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_part_goes_to_its_rank),
        cmocka_unit_test(parts_of_any_size_and_place_go_to_their_ranks),
        cmocka_unit_test(an_exchange_of_nothing_is_still_a_collective),
        cmocka_unit_test(a_group_of_messages_goes_round_in_a_ring),
        cmocka_unit_test(messages_alone_concern_two_ranks),
        cmocka_unit_test(messages_in_a_group_keep_their_order),
        cmocka_unit_test(a_rank_sends_to_itself_in_a_group),
        cmocka_unit_test(a_group_mixes_messages_with_collectives_for_all),
        cmocka_unit_test(wrong_arguments_are_refused_and_change_nothing),
        cmocka_unit_test(ranks_that_disagree_both_learn_it),
    };
    return RANKS_RUN(&all, tests);
}
