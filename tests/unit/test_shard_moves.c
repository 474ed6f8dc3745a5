/* Shards of W ranks made those of W' by moves alone: for all pairs of 1 to 9, in any two layouts,
 * each byte and packed element is where a cast for W' ranks would have put it, and back again. */
#include "test_shards.h"

#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"

enum { RANKS_MAX = 9, TENSORS_MAX = 7 };

typedef struct unit {
    int count;
    tn_shard_tensor tensor[TENSORS_MAX];
    shard_plane row[TENSORS_MAX], col[TENSORS_MAX];
} unit;

static void unit_fill(unit *u) {
    for (int i = 0; i < u->count; i++) {
        u->row[i] = shard_plane_make(&u->tensor[i], i, shard_forward_plane(&u->tensor[i]));
        if (shard_has_col(&u->tensor[i]))
            u->col[i] = shard_plane_make(&u->tensor[i], i, TN_PLANE_COL);
    }
}

static void unit_free(unit *u) {
    for (int i = 0; i < u->count; i++) {
        shard_plane_free(&u->row[i]);
        shard_plane_free(&u->col[i]);
    }
}

/* ---- all ranks of a plan -------------------------------------------------------------------- */

/* What each rank has: the shard, or the packed elements as bytes of 4. */
typedef struct ranks {
    tn_shard_plan *plan;
    int count;
    size_t bytes[RANKS_MAX];
    uint8_t *block[RANKS_MAX];
} ranks;

static tn_shard_plan *plan_of(const unit *u, tn_shard_layout layout, int count) {
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    tn_shard_plan *plan = NULL;
    config.tensors = u->tensor, config.tensor_count = u->count;
    config.rank_count = count, config.layout = layout;
    EXPECT_OK(tn_shard_plan_create(&config, &plan));
    return plan;
}

static void put_planes(const unit *u, const ranks *r, int rank) {
    for (int i = 0; i < u->count; i++) {
        const tn_shard_tensor *t = &u->tensor[i];
        shard_put_piece(r->plan, rank, i, &u->row[i], shard_forward_plane(t), r->block[rank]);
        if (shard_has_col(t))
            shard_put_piece(r->plan, rank, i, &u->col[i], TN_PLANE_COL, r->block[rank]);
    }
}

/* Each element is a number that says which one it is. */
static void put_elements(const unit *u, const ranks *r, int rank) {
    uint32_t *packed = (uint32_t *)(void *)r->block[rank];
    for (int i = 0; i < u->count; i++) {
        tn_shard_piece piece = TN_SHARD_PIECE_INIT;
        EXPECT_OK(tn_shard_piece_get(r->plan, rank, i, &piece));
        if (piece.packed_first < 0) continue;
        for (int64_t at = 0; at < piece.count; at++)
            packed[piece.packed_first + at] = (uint32_t)(piece.first + at + 1) * 8 + (uint32_t)i;
    }
}

static ranks ranks_of(const unit *u, tn_shard_plan *plan, int count, tn_shard_part part,
                      int is_filled) {
    ranks r = {.plan = plan, .count = count};
    for (int rank = 0; rank < count; rank++) {
        int64_t elements;
        EXPECT_OK(tn_shard_bytes(plan, rank, &r.bytes[rank]));
        EXPECT_OK(tn_shard_packed_elements(plan, rank, &elements));
        if (part == TN_SHARD_PART_PACKED) r.bytes[rank] = (size_t)elements * 4;
        r.block[rank] = shard_zeros(r.bytes[rank]);
        if (!is_filled) continue;
        if (part == TN_SHARD_PART_PACKED)
            put_elements(u, &r, rank);
        else
            put_planes(u, &r, rank);
    }
    return r;
}

static void ranks_free(ranks *r) {
    for (int rank = 0; rank < r->count; rank++)
        free(r->block[rank]);
}

/* ---- moves ---------------------------------------------------------------------------------- */

/* Fails if a byte is the target of two moves, or one that a rank has itself comes from another. */
static void apply(const tn_shard_moves *moves, tn_shard_part part, const ranks *from, ranks *to) {
    size_t element = part == TN_SHARD_PART_PACKED ? 4 : 1, count;
    const tn_shard_move *list;
    uint8_t *seen[RANKS_MAX];
    for (int rank = 0; rank < to->count; rank++)
        seen[rank] = shard_zeros(to->bytes[rank]);
    EXPECT_OK(tn_shard_moves_get(moves, part, &list, &count));
    for (size_t i = 0; i < count; i++) {
        const tn_shard_move *m = &list[i];
        assert_in_range(m->from_rank, 0, from->count - 1);
        assert_in_range(m->to_rank, 0, to->count - 1);
        for (size_t line = 0; line < (size_t)m->lines; line++) {
            size_t source = (m->from_offset + line * m->from_stride) * element;
            size_t target = (m->to_offset + line * m->to_stride) * element;
            size_t bytes = m->count * element;
            assert_true(source + bytes <= from->bytes[m->from_rank]);
            assert_true(target + bytes <= to->bytes[m->to_rank]);
            memcpy(to->block[m->to_rank] + target, from->block[m->from_rank] + source, bytes);
            for (size_t at = target; at < target + bytes; at++)
                if (seen[m->to_rank][at]++) fail_msg("byte %zu is moved to twice", at);
        }
    }
    for (int rank = 0; rank < to->count; rank++)
        free(seen[rank]);
}

static void expect_same(const ranks *a, const ranks *b) {
    for (int rank = 0; rank < a->count; rank++)
        assert_memory_equal(a->block[rank], b->block[rank], a->bytes[rank]);
}

/* There, and back. */
static void check_part(const unit *u, tn_shard_part part, tn_shard_plan *from, int from_count,
                       tn_shard_plan *to, int to_count) {
    tn_shard_moves *there, *back;
    EXPECT_OK(tn_shard_moves_create(from, to, &there));
    EXPECT_OK(tn_shard_moves_create(to, from, &back));
    ranks source = ranks_of(u, from, from_count, part, 1), target, expected, again;
    target = ranks_of(u, to, to_count, part, 0);
    expected = ranks_of(u, to, to_count, part, 1);
    again = ranks_of(u, from, from_count, part, 0);
    apply(there, part, &source, &target);
    expect_same(&target, &expected);
    apply(back, part, &target, &again);
    expect_same(&again, &source);
    ranks_free(&source), ranks_free(&target), ranks_free(&expected), ranks_free(&again);
    tn_shard_moves_destroy(there);
    tn_shard_moves_destroy(back);
}

static void check_all_pairs(const unit *u, const tn_shard_layout *layouts, int count) {
    for (int pair = 0; pair < RANKS_MAX * RANKS_MAX; pair++) {
        int from_count = 1 + pair / RANKS_MAX, to_count = 1 + pair % RANKS_MAX;
        for (int i = 0; i < count * count; i++) {
            tn_shard_plan *from = plan_of(u, layouts[i / count], from_count);
            tn_shard_plan *to = plan_of(u, layouts[i % count], to_count);
            check_part(u, TN_SHARD_PART_SHARD, from, from_count, to, to_count);
            check_part(u, TN_SHARD_PART_PACKED, from, from_count, to, to_count);
            tn_shard_plan_destroy(from);
            tn_shard_plan_destroy(to);
        }
    }
}

static void any_layout_becomes_any_other(void **state) {
    static const tn_shard_layout layouts[] = {TN_SHARD_TILES, TN_SHARD_RAGGED, TN_SHARD_FLAT};
    unit u = {.count = 5};
    (void)state;
    u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 200, 20);
    u.tensor[1] = shard_tensor_of(TN_FORMAT_PLAIN, 1, 33);
    u.tensor[2] = shard_tensor_of(TN_FORMAT_FP8_TENSOR, 140, 7);
    u.tensor[3] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 700, 3);
    u.tensor[4] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 0, 3);
    u.tensor[1].frozen = 1;
    unit_fill(&u);
    check_all_pairs(&u, layouts, 3);
    unit_free(&u);
}

static void pieces_that_lie_strided_move_line_by_line(void **state) {
    static const tn_shard_layout layouts[] = {TN_SHARD_TILES, TN_SHARD_RAGGED};
    unit u = {.count = 5};
    (void)state;
    u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_1D, 515, 9);
    u.tensor[1] = shard_tensor_of(TN_FORMAT_MXFP8, 300, 33);
    u.tensor[2] = shard_tensor_of(TN_FORMAT_NVFP4, 130, 20);
    u.tensor[3] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_1D, 256, 300);
    u.tensor[4] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_1D, 400, 1);
    unit_fill(&u);
    check_all_pairs(&u, layouts, 2);
    unit_free(&u);
}

/* What a rank keeps does not come from another one: from 4 ranks to as many nothing is sent. */
static void nothing_is_sent_where_nothing_changes(void **state) {
    static const tn_shard_layout layouts[] = {TN_SHARD_TILES, TN_SHARD_RAGGED, TN_SHARD_FLAT};
    unit u = {.count = 2};
    (void)state;
    u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 700, 20);
    u.tensor[1] = shard_tensor_of(TN_FORMAT_FP8_TENSOR, 300, 7);
    for (int i = 0; i < 3; i++) {
        tn_shard_plan *plan = plan_of(&u, layouts[i], 4);
        tn_shard_moves *moves;
        const tn_shard_move *list;
        size_t count;
        EXPECT_OK(tn_shard_moves_create(plan, plan, &moves));
        for (int part = 0; part < TN_SHARD_PART_COUNT; part++) {
            EXPECT_OK(tn_shard_moves_get(moves, (tn_shard_part)part, &list, &count));
            assert_true(count > 0);
            for (size_t at = 0; at < count; at++)
                assert_int_equal(list[at].from_rank, list[at].to_rank);
        }
        tn_shard_moves_destroy(moves);
        tn_shard_plan_destroy(plan);
    }
}

/* ---- refusals and faults -------------------------------------------------------------------- */

static void units_that_differ_are_named(void **state) {
    unit a = {.count = 2}, b;
    tn_shard_moves *moves = NULL;
    const tn_shard_move *list;
    size_t count;
    (void)state;
    a.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 700, 20);
    a.tensor[1] = shard_tensor_of(TN_FORMAT_PLAIN, 300, 7);
    a.tensor[1].name = "norm";
    tn_shard_plan *from = plan_of(&a, TN_SHARD_TILES, 4), *to;
    b = a, b.tensor[1].rows = 301;
    to = plan_of(&b, TN_SHARD_TILES, 4);
    EXPECT_STATUS(tn_shard_moves_create(from, to, &moves), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tensor 1 is norm in unit unit and another one, norm, in unit unit");
    tn_shard_plan_destroy(to);
    b = a, b.count = 1;
    to = plan_of(&b, TN_SHARD_TILES, 4);
    EXPECT_STATUS(tn_shard_moves_create(from, to, &moves), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("unit unit has 2 tensors, unit unit has 1");
    EXPECT_STATUS(tn_shard_moves_create(NULL, to, &moves), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_moves_create(to, to, NULL), TN_INVALID_ARGUMENT);
    assert_null(moves);
    EXPECT_OK(tn_shard_moves_create(to, to, &moves));
    EXPECT_STATUS(tn_shard_moves_get(moves, TN_SHARD_PART_COUNT, &list, &count),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("part is 2, which there is not");
    EXPECT_STATUS(tn_shard_moves_get(moves, TN_SHARD_PART_SHARD, NULL, &count),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_moves_get(NULL, TN_SHARD_PART_SHARD, &list, &count),
                  TN_INVALID_ARGUMENT);
    tn_shard_moves_destroy(moves);
    tn_shard_moves_destroy(NULL);
    tn_shard_plan_destroy(from);
    tn_shard_plan_destroy(to);
}

static void moves_that_find_no_memory_leave_nothing(void **state) {
    unit u = {.count = 3};
    int failures = 0;
    (void)state;
    u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_1D, 700, 20);
    u.tensor[1] = shard_tensor_of(TN_FORMAT_PLAIN, 300, 7);
    u.tensor[2] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 2000, 7);
    tn_shard_plan *from = plan_of(&u, TN_SHARD_TILES, 9), *to = plan_of(&u, TN_SHARD_RAGGED, 7);
    long blocks = tn__host_live_blocks();
    for (long nth = 1;; nth++) {
        tn_shard_moves *moves = NULL;
        tn__host_alloc_fault(nth, (int)(nth % 2));
        tn_status status = tn_shard_moves_create(from, to, &moves);
        tn__host_alloc_fault(0, 0);
        if (status == TN_OK) {
            tn_shard_moves_destroy(moves);
            break;
        }
        assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
        assert_null(moves);
        assert_int_equal(tn__host_live_blocks(), blocks);
        failures++;
    }
    assert_true(failures > 8);
    assert_int_equal(tn__host_live_blocks(), blocks);
    tn_shard_plan_destroy(from);
    tn_shard_plan_destroy(to);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_layout_becomes_any_other),
        cmocka_unit_test(pieces_that_lie_strided_move_line_by_line),
        cmocka_unit_test(nothing_is_sent_where_nothing_changes),
        cmocka_unit_test(units_that_differ_are_named),
        cmocka_unit_test(moves_that_find_no_memory_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
