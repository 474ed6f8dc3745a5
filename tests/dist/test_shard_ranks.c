/* Shards on ranks that are processes: a plan that all have, one cast and one gather of each unit,
 * and every plane is, to the bit, what one rank makes of the whole weights; COL derived from what
 * was gathered, too. Bytes on the wire are those of the plan.
 */
#include "ranks_support.h"
#include "test_shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tenure_lifetime.h"

static rank_fixture all;
static test_ops ops;

typedef struct rank_unit {
    shard_unit u;
    tn_tensor masters[SHARD_UNIT_TENSORS];
    tn_shard_cast_args cast;
    size_t shard_bytes;
} rank_unit;

static void open_unit(rank_unit *r, tn_shard_layout layout) {
    r->u.ranks = all.count;
    shard_unit_open(&ops, &r->u, layout);
    for (int i = 0; i < r->u.count; i++)
        r->masters[i] = shard_unit_master(&ops, &r->u, r->u.scope, all.rank, i);
    EXPECT_OK(tn_shard_bytes(r->u.plan, all.rank, &r->shard_bytes));
    r->cast = (tn_shard_cast_args)TN_SHARD_CAST_ARGS_INIT;
    r->cast.plan = r->u.plan, r->cast.comm = all.comm;
    r->cast.masters = r->masters;
    r->cast.with_frozen = 1;
    r->cast.amax_epsilon = r->u.epsilon;
    r->cast.scope = ops.scope;
    if (r->shard_bytes) r->cast.shard = test_plain(r->u.scope, TN_BYTE, 1, (int64_t)r->shard_bytes);
}

static uint64_t sum_of_wire_bytes(const tn_comm_stats *stats) {
    uint64_t sum = 0;
    for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++)
        sum += stats->wire_bytes[kind];
    return sum;
}

/* What one collective more has sent. */
static uint64_t sent_since(const tn_comm_stats *before) {
    tn_comm_stats after = ranks_stats(&all);
    return sum_of_wire_bytes(&after) - sum_of_wire_bytes(before);
}

/* ---- planes --------------------------------------------------------------------------------- */

static void expect_plane(const shard_unit *u, int tensor, tn_tensor gathered, tn_plane plane) {
    shard_plane expected = {.layout = u->row[tensor].layout}, got;
    tn_tensor whole = u->cast[tensor].value ? u->cast[tensor] : u->whole[tensor];
    EXPECT_OK(tn_plane_layout_get(whole, plane, &expected.layout));
    got = expected;
    shard_plane *both[] = {&expected, &got};
    tn_tensor from[] = {whole, gathered};
    for (int i = 0; i < 2; i++) {
        size_t data = expected.layout.data_bytes, scale = expected.layout.scale_bytes;
        both[i]->data = shard_zeros(data), both[i]->scale = shard_zeros(scale);
        EXPECT_OK(tn_plane_read(from[i], plane, both[i]->data, data, scale ? both[i]->scale : NULL,
                                scale, all.stream));
    }
    ranks_wait(&all);
    assert_memory_equal(got.data, expected.data, expected.layout.data_bytes);
    assert_memory_equal(got.scale, expected.scale, expected.layout.scale_bytes);
    for (int i = 0; i < 2; i++)
        free(both[i]->data), free(both[i]->scale);
}

/* Whole tensors of what was gathered; COL of formats with an exact transpose is derived from it. */
static void expect_tensors(const rank_unit *r, tn_shard_phase phase, void *shard, void *gathered) {
    const shard_unit *u = &r->u;
    tn_scope scope = test_ops_scope(&ops, TN_SCOPE_OP, "gathered");
    for (int i = 0; i < u->count; i++) {
        const tn_shard_tensor *t = &u->tensor[i];
        tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
        tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
        tn_tensor tensor;
        config.format = t->format, config.dtype = t->dtype, config.scale_mode = t->scale_mode;
        config.rank = 2, config.shape[0] = t->rows, config.shape[1] = t->cols;
        memory.stream = all.stream;
        EXPECT_OK(tn_shard_plane_memory(u->plan, phase, i, shard, gathered, &memory));
        EXPECT_OK(tn_tensor_adopt(scope, &config, &memory, &tensor));
        expect_plane(u, i, tensor, memory.plane);
        if (t->format == TN_FORMAT_FP8_BLOCK_2D || t->format == TN_FORMAT_FP8_TENSOR) {
            EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, all.stream));
            expect_plane(u, i, tensor, TN_PLANE_COL);
        }
    }
    EXPECT_OK(tn_scope_close(scope));
}

static void gather_and_expect(const rank_unit *r, tn_shard_phase phase) {
    size_t bytes = r->u.info.gathered_bytes[phase], offset, sent;
    tn_tensor buffer = test_plain(r->u.scope, TN_BYTE, 1, (int64_t)bytes);
    tn_plane_view from = {.data = NULL}, to = {.data = NULL};
    tn_lease shard = {0}, gathered;
    if (r->shard_bytes) {
        EXPECT_OK(tn_lease_begin(r->cast.shard, TN_PLANE_DATA, TN_READ, all.stream, &shard, &from));
    }
    EXPECT_OK(tn_lease_begin(buffer, TN_PLANE_DATA, TN_WRITE, all.stream, &gathered, &to));
    tn_comm_stats before = ranks_stats(&all);
    EXPECT_OK(tn_shard_gather(r->u.plan, phase, all.comm, from.data, to.data, all.stream));
    EXPECT_OK(tn_shard_sent_bytes(r->u.plan, phase, all.rank, &offset, &sent));
    assert_int_equal(sent_since(&before), (uint64_t)(all.count - 1) * sent);
    expect_tensors(r, phase, from.data, to.data);
    EXPECT_OK(tn_lease_end(gathered));
    if (r->shard_bytes) EXPECT_OK(tn_lease_end(shard));
    EXPECT_OK(tn_tensor_destroy(buffer, all.stream));
}

/* An all-reduce of n numbers sends 2 (ranks - 1) n / ranks of them where that comes out even; of
 * all ranks together it is always 2 (ranks - 1) n. */
static void cast_and_expect(const rank_unit *r) {
    int64_t count = r->cast.with_frozen ? r->u.info.amax_count : r->u.info.amax_count_trained;
    tn_comm_stats before = ranks_stats(&all), after;
    EXPECT_OK(tn_shard_cast(&r->cast, all.stream));
    after = ranks_stats(&all);
    int is_reduced = count > 0 && all.count > 1;
    assert_int_equal(after.calls[TN_ALL_REDUCE] - before.calls[TN_ALL_REDUCE], is_reduced);
    if (count % all.count == 0)
        assert_int_equal(sent_since(&before),
                         2 * (uint64_t)(all.count - 1) * (uint64_t)(count / all.count) * 4);
}

static void check(rank_unit *r, tn_shard_layout layout) {
    open_unit(r, layout);
    EXPECT_OK(tn_shard_plan_verify(r->u.plan, all.comm, ops.scope, all.stream));
    for (int step = 0; step < 2; step++) {
        r->cast.with_frozen = step == 0;
        cast_and_expect(r);
        for (int phase = 0; phase < TN_SHARD_PHASE_COUNT; phase++)
            gather_and_expect(r, (tn_shard_phase)phase);
    }
    ranks_wait(&all);
    shard_unit_close(&r->u);
}

/* ---- units ---------------------------------------------------------------------------------- */

/* 200 rows are less than a tile row each on three ranks; 576 end in half a one. */
static void uneven_rows_come_together(void **state) {
    (void)state;
    for (int layout = TN_SHARD_AUTO; layout < TN_SHARD_LAYOUT_COUNT; layout++) {
        rank_unit r = {.u = {.count = 5, .master_dtype = TN_FP32}};
        r.u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 200, 130);
        r.u.tensor[1] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 576, 64);
        r.u.tensor[2] = shard_tensor_of(TN_FORMAT_PLAIN, 1, 200);
        r.u.tensor[3] = shard_tensor_of(TN_FORMAT_FP8_TENSOR, 1365, 16);
        r.u.tensor[4] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 96, 256);
        r.u.tensor[1].frozen = 1, r.u.tensor[3].scale_mode = TN_SCALE_FP32;
        check(&r, (tn_shard_layout)layout);
    }
}

static void even_tiles_come_together(void **state) {
    (void)state;
    rank_unit r = {.u = {.count = 2, .master_dtype = TN_BF16, .epsilon = 0.25f}};
    r.u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 128 * (int64_t)all.count, 96);
    r.u.tensor[1] = shard_tensor_of(TN_FORMAT_PLAIN, 128 * (int64_t)all.count, 24);
    check(&r, TN_SHARD_AUTO);
}

/* Backward gathers COL of those whose COL is not derived. */
static void formats_without_a_transpose_bring_both_planes(void **state) {
    (void)state;
    for (int layout = TN_SHARD_AUTO; layout <= TN_SHARD_RAGGED; layout++) {
        rank_unit r = {.u = {.count = 4, .master_dtype = TN_FP32}};
        r.u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_1D, 300, 40);
        r.u.tensor[1] = shard_tensor_of(TN_FORMAT_MXFP8, 260, 130);
        r.u.tensor[2] = shard_tensor_of(TN_FORMAT_NVFP4, 130, 33);
        r.u.tensor[3] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 256, 40);
        check(&r, (tn_shard_layout)layout);
    }
}

static void units_smaller_than_the_count_of_ranks_come_together(void **state) {
    (void)state;
    for (int layout = TN_SHARD_TILES; layout < TN_SHARD_LAYOUT_COUNT; layout++) {
        rank_unit r = {.u = {.count = 1, .master_dtype = TN_FP16}};
        r.u.tensor[0] = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 3, 5);
        check(&r, (tn_shard_layout)layout);
        rank_unit none = {.u = {.count = 0}};
        check(&none, (tn_shard_layout)layout);
    }
}

/* ---- plans that differ ---------------------------------------------------------------------- */

static tn_shard_plan *plan_with(int rows, int ranks) {
    tn_shard_tensor tensor = shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, rows, 256);
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    tn_shard_plan *plan = NULL;
    config.name = "layer", config.tensors = &tensor, config.tensor_count = 1;
    config.rank_count = ranks;
    EXPECT_OK(tn_shard_plan_create(&config, &plan));
    return plan;
}

static void expect_differing(const tn_shard_plan *plan, const char *words) {
    if (all.count == 1) {
        EXPECT_OK(tn_shard_plan_verify(plan, all.comm, ops.scope, all.stream));
        return;
    }
    EXPECT_STATUS(tn_shard_plan_verify(plan, all.comm, ops.scope, all.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("unit layer: ");
    EXPECT_ERROR_HAS(words);
}

static void a_rank_with_another_plan_is_named_on_all(void **state) {
    char words[96];
    (void)state;
    for (int odd = 0; odd < all.count; odd++) {
        tn_shard_plan *plan = plan_with(all.rank == odd ? 512 : 640, all.count);
        /* If rank 0 is the odd one, rank 1 is the first that differs from it. */
        snprintf(words, sizeof words, "rank %d of communicator ranks is the first", odd ? odd : 1);
        expect_differing(plan, words);
        tn_shard_plan_destroy(plan);
    }
    tn_shard_plan *plan = plan_with(512, all.rank == 0 ? all.count : all.count + 1);
    expect_differing(plan, "rank 1 of communicator ranks is the first");
    tn_shard_plan_destroy(plan);
    plan = plan_with(512, all.count + 1);
    EXPECT_STATUS(tn_shard_plan_verify(plan, all.comm, ops.scope, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("communicator ranks has ");
    EXPECT_STATUS(tn_shard_gather(plan, TN_SHARD_FORWARD, all.comm, &plan, &plan, all.stream),
                  TN_INVALID_ARGUMENT);
    tn_shard_cast_args args = TN_SHARD_CAST_ARGS_INIT;
    tn_tensor none = {0};
    args.plan = plan, args.comm = all.comm, args.masters = &none, args.scope = ops.scope;
    EXPECT_STATUS(tn_shard_cast(&args, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("is cut for ");
    tn_shard_plan_destroy(plan);
}

static void gathers_that_can_not_be_are_refused(void **state) {
    (void)state;
    tn_shard_plan *plan = plan_with(1024, all.count);
    char room[16];
    EXPECT_STATUS(tn_shard_gather(NULL, TN_SHARD_FORWARD, all.comm, room, room, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_gather(plan, TN_SHARD_FORWARD, NULL, room, room, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_gather(plan, TN_SHARD_PHASE_COUNT, all.comm, room, room, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("phase is 2");
    EXPECT_STATUS(tn_shard_gather(plan, TN_SHARD_FORWARD, all.comm, NULL, room, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("shard is NULL");
    EXPECT_STATUS(tn_shard_gather(plan, TN_SHARD_FORWARD, all.comm, room, NULL, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("gathered is NULL");
    EXPECT_STATUS(tn_shard_plan_verify(NULL, all.comm, ops.scope, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_plan_verify(plan, NULL, ops.scope, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_plan_verify(plan, all.comm, (tn_scope){5}, all.stream), TN_STALE_HANDLE);
    tn_shard_plan_destroy(plan);
}

static int open_ranks(void **state) {
    (void)state;
    all = ranks_open();
    ops = (test_ops){.device = all.device, .stream = all.stream, .pool = all.pool};
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.pool = all.pool, config.name = "rank";
    EXPECT_OK(tn_scope_create(&config, &ops.scope));
    return 0;
}

static int close_ranks(void **state) {
    (void)state;
    EXPECT_OK(tn_scope_close(ops.scope));
    ranks_close(&all);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(uneven_rows_come_together),
        cmocka_unit_test(even_tiles_come_together),
        cmocka_unit_test(formats_without_a_transpose_bring_both_planes),
        cmocka_unit_test(units_smaller_than_the_count_of_ranks_come_together),
        cmocka_unit_test(a_rank_with_another_plan_is_named_on_all),
        cmocka_unit_test(gathers_that_can_not_be_are_refused),
    };
    return TEST_RUN_GROUP(tests, open_ranks, close_ranks);
}
