/* Casts of shards: for all ranks of a unit, one after the other in one process, each byte of each
 * shard is what tn_quantize makes of the whole tensor, and no byte beside the pieces is written.
 *
 * Shards are full of another byte before, so that what a cast may not touch shows; the ranks'
 * amaxes are reduced here. The test of the same over ranks that are processes: tests/dist.
 */
#include "test_ops.h"
#include "test_shards.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"
#include "tenure_lifetime.h"

enum { RANKS_MAX = 9, BEFORE = 0xA5, GUARD = 48 };

/* ---- ranks ---------------------------------------------------------------------------------- */

typedef struct rank_cast {
    tn_scope scope;
    tn_tensor masters[SHARD_UNIT_TENSORS];
    tn_shard_cast_args args;
} rank_cast;

static rank_cast rank_open(const test_ops *ops, const shard_unit *u, int rank) {
    rank_cast r = {.scope = test_ops_scope(ops, TN_SCOPE_OP, "rank"),
                   .args = TN_SHARD_CAST_ARGS_INIT};
    for (int i = 0; i < u->count; i++)
        r.masters[i] = shard_unit_master(ops, u, r.scope, rank, i);
    r.args.plan = u->plan, r.args.rank = rank;
    r.args.with_frozen = 1;
    r.args.amax_epsilon = u->epsilon;
    r.args.scope = ops->scope;
    return r;
}

/* The array is not in the struct that is returned. */
static tn_shard_cast_args *args_of(rank_cast *r) {
    r->args.masters = r->masters;
    return &r->args;
}

/* As one all-reduce leaves them. */
static void reduce_amaxes(const test_ops *ops, const shard_unit *u, float *reduced) {
    float *own = shard_zeros((size_t)u->info.amax_count * sizeof *own);
    for (int rank = 0; rank < u->ranks && u->info.amax_count > 0; rank++) {
        rank_cast r = rank_open(ops, u, rank);
        r.args.amax = test_plain(r.scope, TN_FP32, 1, u->info.amax_count);
        EXPECT_OK(tn_shard_cast_amax(args_of(&r), ops->stream));
        test_read(ops, r.args.amax, own);
        for (int64_t i = 0; i < u->info.amax_count; i++)
            reduced[i] = fmaxf(reduced[i], own[i]);
        EXPECT_OK(tn_scope_close(r.scope));
    }
    free(own);
}

/* The rank's shard after a cast, and as many bytes behind it; they are as the whole planes say, and
 * else as they were. */
static uint8_t *cast_rank(const test_ops *ops, const shard_unit *u, int rank, tn_tensor amax) {
    rank_cast r = rank_open(ops, u, rank);
    size_t bytes;
    EXPECT_OK(tn_shard_bytes(u->plan, rank, &bytes));
    uint8_t *shard = shard_zeros(bytes + GUARD), *expected = shard_zeros(bytes + GUARD);
    memset(shard, BEFORE, bytes + GUARD);
    memset(expected, BEFORE, bytes + GUARD);
    r.args.shard = test_plain(r.scope, TN_BYTE, 1, (int64_t)bytes + GUARD);
    r.args.amax = amax;
    test_write(ops, r.args.shard, shard);
    EXPECT_OK(tn_shard_cast(args_of(&r), ops->stream));
    test_read(ops, r.args.shard, shard);
    for (int i = 0; i < u->count; i++) {
        const tn_shard_tensor *t = &u->tensor[i];
        shard_put_piece(u->plan, rank, i, &u->row[i], shard_forward_plane(t), expected);
        if (shard_has_col(t)) shard_put_piece(u->plan, rank, i, &u->col[i], TN_PLANE_COL, expected);
    }
    assert_memory_equal(shard, expected, bytes + GUARD);
    free(expected);
    EXPECT_OK(tn_scope_close(r.scope));
    return shard;
}

static void expect_gathered(const shard_unit *u, uint8_t *const *shards) {
    for (int phase = 0; phase < TN_SHARD_PHASE_COUNT; phase++) {
        uint8_t *gathered = shard_zeros(u->info.gathered_bytes[phase]);
        shard_gather(u->plan, shards, (tn_shard_phase)phase, gathered);
        for (int i = 0; i < u->count; i++) {
            int is_col = phase == TN_SHARD_BACKWARD && shard_has_col(&u->tensor[i]);
            shard_take_plane(u->plan, (tn_shard_phase)phase, i, is_col ? &u->col[i] : &u->row[i],
                             shards[0], gathered);
        }
        free(gathered);
    }
}

static void check(const test_ops *ops, shard_unit *u, tn_shard_layout layout) {
    shard_unit_open(ops, u, layout);
    float *reduced = shard_zeros((size_t)u->info.amax_count * sizeof *reduced);
    tn_tensor amax = test_plain(u->scope, TN_FP32, 1, u->info.amax_count);
    uint8_t *shards[RANKS_MAX];
    reduce_amaxes(ops, u, reduced);
    test_write(ops, amax, reduced);
    for (int rank = 0; rank < u->ranks; rank++)
        shards[rank] = cast_rank(ops, u, rank, amax);
    expect_gathered(u, shards);
    for (int rank = 0; rank < u->ranks; rank++)
        free(shards[rank]);
    free(reduced);
    shard_unit_close(u);
}

/* ---- every cut of uneven rows --------------------------------------------------------------- */

/* Rows that no count of ranks divides, columns that are no multiple of a tile. */
static const int64_t uneven_rows[] = {192, 96, 576, 1365, 200, 1, 128};
enum { UNEVEN = sizeof uneven_rows / sizeof *uneven_rows };

static void uneven_rows_on_any_count_of_ranks(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int r = 0; r < UNEVEN; r++) {
        for (int ranks = 1; ranks <= RANKS_MAX; ranks++) {
            for (int layout = TN_SHARD_TILES; layout < TN_SHARD_LAYOUT_COUNT; layout++) {
                shard_unit u = {.count = 1, .ranks = ranks, .master_dtype = TN_FP32};
                u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, uneven_rows[r], 72);
                u.tensor[0].scale_mode = ranks % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
                check(&ops, &u, (tn_shard_layout)layout);
            }
        }
    }
    test_ops_close_host(&ops);
}

/* ---- mixed units ---------------------------------------------------------------------------- */

static void all_formats_in_a_unit(void **state) {
    static const tn_dtype masters[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int ranks = 1; ranks <= RANKS_MAX; ranks++) {
        for (int layout = TN_SHARD_TILES; layout <= TN_SHARD_RAGGED; layout++) {
            shard_unit u = {.count = 8, .ranks = ranks, .master_dtype = masters[ranks % 3]};
            u.epsilon = ranks == 4 ? 0.25f : 0.0f;
            for (int i = 0; i < TN_FORMAT_COUNT; i++)
                u.tensor[i] = shard_tensor_of((tn_format)i, 130 + 70 * i, 33 + 60 * i);
            u.tensor[6] = shard_tensor_of(TN_FORMAT_FP8_TENSOR, 300, 40);
            u.tensor[6].dtype = TN_E5M2, u.tensor[6].scale_mode = TN_SCALE_FP32;
            u.tensor[7] = shard_tensor_of(TN_FORMAT_PLAIN, 260, 7);
            u.tensor[7].dtype = TN_BYTE;
            check(&ops, &u, (tn_shard_layout)layout);
        }
    }
    test_ops_close_host(&ops);
}

/* Ranges end in tiles, rows and between tensors; the last ranks have nothing. */
static void flat_units_with_tensors_smaller_than_a_part(void **state) {
    static const tn_dtype masters[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int ranks = 1; ranks <= RANKS_MAX; ranks++) {
        shard_unit u = {.count = 6, .ranks = ranks, .master_dtype = masters[ranks % 3]};
        u.epsilon = ranks == 5 ? 0.25f : 0.0f;
        u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 7, 9);
        u.tensor[1] = shard_tensor_of(TN_FORMAT_FP8_TENSOR, 131, 33);
        u.tensor[2] = shard_tensor_of(TN_FORMAT_PLAIN, 1, 200);
        u.tensor[3] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 200, 515);
        u.tensor[3].dtype = TN_E5M2;
        u.tensor[4] = shard_tensor_of(TN_FORMAT_FP8_TENSOR, 2, 3);
        u.tensor[5] = shard_tensor_of(TN_FORMAT_PLAIN, 50, 3);
        u.tensor[5].dtype = TN_FP32;
        check(&ops, &u, TN_SHARD_FLAT);
        u.count = 1; /* 63 bytes: all of one rank */
        check(&ops, &u, TN_SHARD_FLAT);
    }
    test_ops_close_host(&ops);
}

/* ---- frozen tensors, skipping --------------------------------------------------------------- */

static shard_unit frozen_unit(const test_ops *ops, tn_shard_layout layout) {
    shard_unit u = {.count = 3, .ranks = 2, .master_dtype = TN_FP32};
    u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 200, 100);
    u.tensor[1] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 300, 100);
    u.tensor[2] = shard_tensor_of(TN_FORMAT_PLAIN, 128, 10);
    u.tensor[0].frozen = 1;
    shard_unit_open(ops, &u, layout);
    return u;
}

static void frozen_tensors_stay_as_they_are(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int layout = TN_SHARD_TILES; layout < TN_SHARD_LAYOUT_COUNT; layout++) {
        shard_unit u = frozen_unit(&ops, (tn_shard_layout)layout);
        for (int rank = 0; rank < u.ranks; rank++) {
            rank_cast r = rank_open(&ops, &u, rank);
            size_t bytes;
            EXPECT_OK(tn_shard_bytes(u.plan, rank, &bytes));
            uint8_t *shard = shard_zeros(bytes), *expected = shard_zeros(bytes);
            memset(shard, BEFORE, bytes);
            r.masters[0] = (tn_tensor){0};
            r.args.shard = test_plain(r.scope, TN_BYTE, 1, (int64_t)bytes);
            r.args.amax = test_plain(r.scope, TN_FP32, 1, u.info.amax_count);
            test_write(&ops, r.args.shard, shard);
            r.args.with_frozen = 0;
            EXPECT_OK(tn_shard_cast_amax(args_of(&r), ops.stream));
            EXPECT_OK(tn_shard_cast(args_of(&r), ops.stream));
            test_read(&ops, r.args.shard, shard);
            /* The other tensors' pieces are written and differ from what was there. */
            memset(expected, BEFORE, bytes);
            shard_put_piece(u.plan, rank, 2, &u.row[2], TN_PLANE_DATA, expected);
            tn_shard_piece frozen = TN_SHARD_PIECE_INIT, plain = TN_SHARD_PIECE_INIT;
            EXPECT_OK(tn_shard_piece_get(u.plan, rank, 0, &frozen));
            EXPECT_OK(tn_shard_piece_get(u.plan, rank, 2, &plain));
            for (int64_t i = 0; i < frozen.count; i++)
                assert_int_equal(shard[frozen.data_offset + i], BEFORE);
            if (frozen.scale_offset >= 0) assert_int_equal(shard[frozen.scale_offset], BEFORE);
            if (plain.count > 0)
                assert_memory_equal(shard + plain.data_offset, expected + plain.data_offset,
                                    (size_t)plain.count * 2);
            free(shard), free(expected);
            EXPECT_OK(tn_scope_close(r.scope));
        }
        shard_unit_close(&u);
    }
    test_ops_close_host(&ops);
}

static void a_skipped_cast_leaves_quantized_pieces(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int layout = TN_SHARD_TILES; layout < TN_SHARD_LAYOUT_COUNT; layout++) {
        shard_unit u = {.count = 2, .ranks = 1, .master_dtype = TN_FP32};
        u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 200, 100);
        u.tensor[1] = shard_tensor_of(TN_FORMAT_FP8_TENSOR, 30, 10);
        shard_unit_open(&ops, &u, (tn_shard_layout)layout);
        rank_cast r = rank_open(&ops, &u, 0);
        const float one = 1.0f;
        size_t bytes;
        EXPECT_OK(tn_shard_bytes(u.plan, 0, &bytes));
        uint8_t *shard = shard_zeros(bytes);
        memset(shard, BEFORE, bytes);
        r.args.shard = test_plain(r.scope, TN_BYTE, 1, (int64_t)bytes);
        r.args.skip = test_plain(r.scope, TN_FP32, 1, 1);
        test_write(&ops, r.args.shard, shard);
        test_write(&ops, r.args.skip, &one);
        EXPECT_OK(tn_shard_cast(args_of(&r), ops.stream));
        test_read(&ops, r.args.shard, shard);
        for (size_t i = 0; i < bytes; i++)
            assert_int_equal(shard[i], BEFORE);
        free(shard);
        EXPECT_OK(tn_scope_close(r.scope));
        shard_unit_close(&u);
    }
    test_ops_close_host(&ops);
}

/* A shard that has no contents yet is 0 between its pieces. */
static void a_new_shard_is_zero_between_its_pieces(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    shard_unit u = {.count = 2, .ranks = 1, .master_dtype = TN_FP32};
    u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 3, 5);
    u.tensor[1] = shard_tensor_of(TN_FORMAT_PLAIN, 3, 5);
    shard_unit_open(&ops, &u, TN_SHARD_TILES);
    rank_cast r = rank_open(&ops, &u, 0);
    size_t bytes;
    EXPECT_OK(tn_shard_bytes(u.plan, 0, &bytes));
    uint8_t *shard = shard_zeros(bytes), *expected = shard_zeros(bytes);
    r.args.shard = test_plain(r.scope, TN_BYTE, 1, (int64_t)bytes);
    EXPECT_OK(tn_shard_cast(args_of(&r), ops.stream));
    test_read(&ops, r.args.shard, shard);
    shard_put_piece(u.plan, 0, 0, &u.row[0], TN_PLANE_ROW, expected);
    shard_put_piece(u.plan, 0, 1, &u.row[1], TN_PLANE_DATA, expected);
    assert_memory_equal(shard, expected, bytes);
    free(shard), free(expected);
    EXPECT_OK(tn_scope_close(r.scope));
    shard_unit_close(&u);
    test_ops_close_host(&ops);
}

/* Of a frozen piece there is no other copy than the shard's. */
static void a_failed_cast_keeps_frozen_pieces(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int layout = TN_SHARD_TILES; layout < TN_SHARD_LAYOUT_COUNT; layout++) {
        shard_unit u = {.count = 2, .ranks = 1, .master_dtype = TN_FP32};
        u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 3, 64);
        u.tensor[0].frozen = 1;
        u.tensor[1] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 5, 64);
        shard_unit_open(&ops, &u, (tn_shard_layout)layout);
        rank_cast r = rank_open(&ops, &u, 0);
        tn_plane_view view;
        tn_lease writer;
        size_t bytes;
        EXPECT_OK(tn_shard_bytes(u.plan, 0, &bytes));
        uint8_t *shard = shard_zeros(bytes), *expected = shard_zeros(bytes);
        r.args.shard = test_plain(r.scope, TN_BYTE, 1, (int64_t)bytes);
        r.args.with_frozen = 1;
        EXPECT_OK(tn_shard_cast(args_of(&r), ops.stream));
        test_read(&ops, r.args.shard, expected);
        r.args.with_frozen = 0;
        EXPECT_OK(
            tn_lease_begin(r.masters[1], TN_PLANE_DATA, TN_UPDATE, ops.stream, &writer, &view));
        EXPECT_STATUS(tn_shard_cast(args_of(&r), ops.stream), TN_IN_USE);
        EXPECT_OK(tn_lease_end(writer));
        EXPECT_OK(tn_shard_cast(args_of(&r), ops.stream));
        test_read(&ops, r.args.shard, shard);
        assert_memory_equal(shard, expected, bytes);
        free(shard), free(expected);
        EXPECT_OK(tn_scope_close(r.scope));
        shard_unit_close(&u);
    }
    test_ops_close_host(&ops);
}

/* ---- refusals and faults -------------------------------------------------------------------- */

static void refused(rank_cast *r, const test_ops *ops, tn_status status, const char *words) {
    tn_ledger before = test_ledger(ops->scope);
    EXPECT_STATUS(tn_shard_cast(args_of(r), ops->stream), status);
    EXPECT_ERROR_HAS(words);
    tn_ledger after = test_ledger(ops->scope);
    test_expect_same_ledger(&before, &after);
}

static void arguments_that_do_not_fit_are_named(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    shard_unit u = frozen_unit(&ops, TN_SHARD_FLAT);
    rank_cast good = rank_open(&ops, &u, 1), r;
    size_t bytes;
    EXPECT_OK(tn_shard_bytes(u.plan, 1, &bytes));
    good.args.shard = test_plain(good.scope, TN_BYTE, 1, (int64_t)bytes);
    good.args.amax = test_plain(good.scope, TN_FP32, 1, u.info.amax_count);
    EXPECT_STATUS(tn_shard_cast(NULL, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("args is not TN_SHARD_CAST_ARGS_INIT");
    r = good, r.args.plan = NULL;
    refused(&r, &ops, TN_INVALID_ARGUMENT, "plan is NULL");
    r = good, r.args.rank = 2;
    refused(&r, &ops, TN_INVALID_ARGUMENT, "rank 2 of unit unit, which has 2 ranks");
    r = good, r.args.with_frozen = 7;
    refused(&r, &ops, TN_INVALID_ARGUMENT, "with_frozen is 7");
    r = good, r.args.amax_epsilon = -1.0f;
    refused(&r, &ops, TN_INVALID_ARGUMENT, "amax_epsilon is -1");
    r = good, r.masters[1] = (tn_tensor){0};
    refused(&r, &ops, TN_INVALID_ARGUMENT, "tensor tensor 1: masters[1] is {0}, and rank 1 has ");
    r = good, r.masters[1] = good.masters[2];
    refused(&r, &ops, TN_INVALID_ARGUMENT, "elements, rank 1 has ");
    r = good, r.masters[1] = test_plain(good.scope, TN_BYTE, 1, 1);
    refused(&r, &ops, TN_INVALID_ARGUMENT, "masters[1]");
    r = good, r.args.shard = (tn_tensor){0};
    refused(&r, &ops, TN_INVALID_ARGUMENT, "shard is {0}, and rank 1 has ");
    r = good, r.args.shard = test_plain(good.scope, TN_BYTE, 1, (int64_t)bytes - 1);
    refused(&r, &ops, TN_INVALID_ARGUMENT, "bytes, rank 1 has ");
    r = good, r.args.shard = test_plain(good.scope, TN_FP32, 1, (int64_t)bytes);
    refused(&r, &ops, TN_INVALID_ARGUMENT, "expected plain bytes");
    r = good, r.args.amax = (tn_tensor){0};
    refused(&r, &ops, TN_INVALID_ARGUMENT, "without a communicator, amax is to be given");
    r = good, r.args.amax = test_plain(good.scope, TN_FP32, 1, 3);
    refused(&r, &ops, TN_INVALID_ARGUMENT, "expected plain fp32 of ");
    r = good;
    refused(&r, &ops, TN_INVALID_STATE, "plane DATA is ABSENT"); /* nothing was reduced into it */
    r = good, r.args.scope = (tn_scope){77};
    EXPECT_STATUS(tn_shard_cast(args_of(&r), ops.stream), TN_STALE_HANDLE);
    r = good, r.args.masters = NULL;
    EXPECT_STATUS(tn_shard_cast(&r.args, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("masters is NULL");
    EXPECT_OK(tn_scope_close(good.scope));
    shard_unit_close(&u);
    test_ops_close_host(&ops);
}

static void a_cast_that_finds_no_memory_leaves_nothing(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int layout = TN_SHARD_TILES; layout < TN_SHARD_LAYOUT_COUNT; layout++) {
        shard_unit u = {.count = 3, .ranks = 1, .master_dtype = TN_FP32};
        u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 200, 100);
        u.tensor[1] = shard_tensor_of(TN_FORMAT_FP8_TENSOR, 30, 10);
        u.tensor[2] = shard_tensor_of(TN_FORMAT_PLAIN, 30, 10);
        shard_unit_open(&ops, &u, (tn_shard_layout)layout);
        rank_cast r = rank_open(&ops, &u, 0);
        size_t bytes;
        int failures = 0;
        EXPECT_OK(tn_shard_bytes(u.plan, 0, &bytes));
        r.args.shard = test_plain(r.scope, TN_BYTE, 1, (int64_t)bytes);
        for (long nth = 1;; nth++) {
            test_ops_wait(&ops);
            tn_ledger before = test_ledger(ops.scope);
            tn__host_alloc_fault(nth, (int)(nth % 2));
            tn_status status = tn_shard_cast(args_of(&r), ops.stream);
            tn__host_alloc_fault(0, 0);
            if (status == TN_OK) break;
            assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
            test_ops_wait(&ops);
            tn_ledger after = test_ledger(ops.scope);
            assert_int_equal(after.tensors, before.tensors);
            assert_int_equal(after.leases, 0);
            assert_int_equal(after.foreign_bytes, 0);
            failures++;
        }
        assert_true(failures > 10);
        uint8_t *shard = shard_zeros(bytes), *expected = shard_zeros(bytes);
        test_read(&ops, r.args.shard, shard);
        for (int i = 0; i < u.count; i++)
            shard_put_piece(u.plan, 0, i, &u.row[i], shard_forward_plane(&u.tensor[i]), expected);
        assert_memory_equal(shard, expected, bytes);
        free(shard), free(expected);
        EXPECT_OK(tn_scope_close(r.scope));
        shard_unit_close(&u);
    }
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(uneven_rows_on_any_count_of_ranks),
        cmocka_unit_test(all_formats_in_a_unit),
        cmocka_unit_test(flat_units_with_tensors_smaller_than_a_part),
        cmocka_unit_test(frozen_tensors_stay_as_they_are),
        cmocka_unit_test(a_skipped_cast_leaves_quantized_pieces),
        cmocka_unit_test(a_new_shard_is_zero_between_its_pieces),
        cmocka_unit_test(a_failed_cast_keeps_frozen_pieces),
        cmocka_unit_test(arguments_that_do_not_fit_are_named),
        cmocka_unit_test(a_cast_that_finds_no_memory_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
