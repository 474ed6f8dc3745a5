/* Shards and packed elements of some ranks made those of others on a communicator, and back: to the
 * byte what a cast for those ranks would have made, with no more bytes on the wire than change
 * hands. */
#include "rank_values_support.h"
#include "test_shards.h"

#include <stdlib.h>
#include <string.h>

enum { TENSORS = 6 };

static rank_fixture all;
static tn_shard_tensor tensors[TENSORS];
static shard_plane row[TENSORS], col[TENSORS];

/* FLAT takes the first so many only. */
enum { FLAT_TENSORS = 4 };

static void make_tensors(void) {
    tensors[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 700, 20);
    tensors[1] = shard_tensor_of(TN_FORMAT_PLAIN, 3, 33);
    tensors[2] = shard_tensor_of(TN_FORMAT_FP8_TENSOR, 300, 7);
    tensors[3] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 129, 130);
    tensors[4] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_1D, 515, 9);
    tensors[5] = shard_tensor_of(TN_FORMAT_MXFP8, 300, 33);
    tensors[1].frozen = 1;
    for (int i = 0; i < TENSORS; i++) {
        row[i] = shard_plane_make(&tensors[i], i, shard_forward_plane(&tensors[i]));
        if (shard_has_col(&tensors[i])) col[i] = shard_plane_make(&tensors[i], i, TN_PLANE_COL);
    }
}

/* What this rank has under a plan of some of the ranks. */
typedef struct held {
    tn_shard_plan *plan;
    int count, ranks;
    tn_shard_part part;
    size_t bytes;
    uint8_t *expected;
    void *block; /* NULL: nothing */
} held;

static void put_elements(const held *h) {
    uint32_t *packed = (uint32_t *)(void *)h->expected;
    for (int i = 0; i < h->count; i++) {
        tn_shard_piece piece = TN_SHARD_PIECE_INIT;
        EXPECT_OK(tn_shard_piece_get(h->plan, all.rank, i, &piece));
        if (piece.packed_first < 0) continue;
        for (int64_t at = 0; at < piece.count; at++)
            packed[piece.packed_first + at] = (uint32_t)(piece.first + at + 1) * 8 + (uint32_t)i;
    }
}

static void put_planes(const held *h) {
    for (int i = 0; i < h->count; i++) {
        const tn_shard_tensor *t = &tensors[i];
        shard_put_piece(h->plan, all.rank, i, &row[i], shard_forward_plane(t), h->expected);
        if (shard_has_col(t))
            shard_put_piece(h->plan, all.rank, i, &col[i], TN_PLANE_COL, h->expected);
    }
}

static held hold(tn_shard_layout layout, int count, int ranks, tn_shard_part part) {
    held h = {.count = count, .ranks = ranks, .part = part};
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    int64_t elements;
    config.tensors = tensors, config.tensor_count = count;
    config.rank_count = ranks, config.layout = layout;
    EXPECT_OK(tn_shard_plan_create(&config, &h.plan));
    if (all.rank >= ranks) {
        h.expected = shard_zeros(0);
        return h;
    }
    EXPECT_OK(tn_shard_bytes(h.plan, all.rank, &h.bytes));
    EXPECT_OK(tn_shard_packed_elements(h.plan, all.rank, &elements));
    if (part == TN_SHARD_PART_PACKED) h.bytes = (size_t)elements * 4;
    h.expected = shard_zeros(h.bytes);
    if (part == TN_SHARD_PART_PACKED)
        put_elements(&h);
    else
        put_planes(&h);
    if (h.bytes) h.block = ranks_take(&all, h.bytes);
    return h;
}

static void let_go(held *h) {
    if (h->block) ranks_give(&all, h->block);
    free(h->expected);
    tn_shard_plan_destroy(h->plan);
}

static uint64_t bytes_to_others(const tn_shard_move *list, size_t count, size_t element) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        if (list[i].from_rank == all.rank && list[i].to_rank != all.rank)
            sum += (uint64_t)list[i].lines * list[i].count * element;
    }
    return sum;
}

/* `to` is full of other bytes before. */
static void reshard(const held *from, const held *to) {
    size_t element = from->part == TN_SHARD_PART_PACKED ? 4 : 1, count;
    tn_shard_moves *moves;
    const tn_shard_move *list;
    uint8_t *got = shard_zeros(to->bytes);
    EXPECT_OK(tn_shard_moves_create(from->plan, to->plan, &moves));
    EXPECT_OK(tn_shard_moves_get(moves, from->part, &list, &count));
    if (to->bytes) EXPECT_OK(tn_fill(all.device, to->block, 0xA5, to->bytes, all.stream));
    tn_comm_stats before = ranks_stats(&all), after;
    EXPECT_OK(
        tn_shard_reshard(moves, from->part, all.comm, from->block, to->block, element, all.stream));
    after = ranks_stats(&all);
    assert_int_equal(after.wire_bytes[TN_SEND] - before.wire_bytes[TN_SEND],
                     bytes_to_others(list, count, element));
    if (to->bytes) ranks_get(&all, got, to->block, to->bytes);
    assert_memory_equal(got, to->expected, to->bytes);
    free(got);
    tn_shard_moves_destroy(moves);
}

static void check(tn_shard_layout from_layout, tn_shard_layout to_layout, int from_ranks,
                  int to_ranks) {
    int is_flat = from_layout == TN_SHARD_FLAT || to_layout == TN_SHARD_FLAT;
    for (int part = 0; part < TN_SHARD_PART_COUNT; part++) {
        int count = is_flat ? FLAT_TENSORS : TENSORS;
        held from = hold(from_layout, count, from_ranks, (tn_shard_part)part);
        held to = hold(to_layout, count, to_ranks, (tn_shard_part)part);
        if (from.bytes) ranks_put(&all, from.block, from.expected, from.bytes);
        reshard(&from, &to);
        reshard(&to, &from);
        let_go(&from);
        let_go(&to);
    }
}

static void fewer_and_more_ranks_have_what_a_cast_would_give(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= all.count; ranks++) {
        check(TN_SHARD_TILES, TN_SHARD_RAGGED, all.count, ranks);
        check(TN_SHARD_FLAT, TN_SHARD_FLAT, all.count, ranks);
        check(TN_SHARD_FLAT, TN_SHARD_TILES, ranks, all.count);
    }
}

static void what_can_not_be_is_refused(void **state) {
    (void)state;
    held one = hold(TN_SHARD_TILES, TENSORS, all.count, TN_SHARD_PART_SHARD);
    held more = hold(TN_SHARD_TILES, TENSORS, all.count + 1, TN_SHARD_PART_SHARD);
    tn_shard_moves *moves, *too_many;
    char room[16];
    EXPECT_OK(tn_shard_moves_create(one.plan, one.plan, &moves));
    EXPECT_OK(tn_shard_moves_create(one.plan, more.plan, &too_many));
    EXPECT_STATUS(tn_shard_reshard(NULL, TN_SHARD_PART_SHARD, all.comm, room, room, 1, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_reshard(moves, TN_SHARD_PART_COUNT, all.comm, room, room, 1, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("part is 2");
    EXPECT_STATUS(tn_shard_reshard(moves, TN_SHARD_PART_SHARD, all.comm, room, room, 4, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("element_bytes is 4");
    EXPECT_STATUS(
        tn_shard_reshard(moves, TN_SHARD_PART_PACKED, all.comm, room, room, 0, all.stream),
        TN_INVALID_ARGUMENT);
    EXPECT_STATUS(
        tn_shard_reshard(too_many, TN_SHARD_PART_SHARD, all.comm, room, room, 1, all.stream),
        TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("communicator ranks has ");
    if (one.bytes) {
        EXPECT_STATUS(
            tn_shard_reshard(moves, TN_SHARD_PART_SHARD, all.comm, NULL, one.block, 1, all.stream),
            TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS("from is NULL");
        EXPECT_STATUS(
            tn_shard_reshard(moves, TN_SHARD_PART_SHARD, all.comm, one.block, NULL, 1, all.stream),
            TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS("to is NULL");
    }
    tn_shard_moves_destroy(moves);
    tn_shard_moves_destroy(too_many);
    let_go(&one);
    let_go(&more);
}

static int open_ranks(void **state) {
    (void)state;
    all = ranks_open();
    make_tensors();
    return 0;
}

static int close_ranks(void **state) {
    (void)state;
    for (int i = 0; i < TENSORS; i++) {
        shard_plane_free(&row[i]);
        shard_plane_free(&col[i]);
    }
    ranks_close(&all);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fewer_and_more_ranks_have_what_a_cast_would_give),
        cmocka_unit_test(what_can_not_be_is_refused),
    };
    return TEST_RUN_GROUP(tests, open_ranks, close_ranks);
}
