/* A ring whose units are gathered from the shards of several ranks: every byte comes from where the
 * plan says, bytes on the wire are the closed form, steps take no memory, ranks that make other
 * calls are found out, and a communicator that fails leaves nothing behind.
 */
#include "ranks_support.h"
#include "tenure_ring.h"

#include <stdlib.h>
#include <string.h>

enum { UNITS = 4, TENSORS = 2, ROWS = 300, COLS = 200, STEPS = 3 };

static const tn_scope NO_SCOPE = {0};
static rank_fixture all;

typedef struct ranked_unit {
    tn_shard_plan *plan;
    tn_tensor shard;
    tn_tensor weights[TENSORS];
    int version;
} ranked_unit;

typedef struct model {
    tn_scope scope;
    tn_comm *comm;
    tn_ring *ring;
    ranked_unit units[UNITS];
} model;

/* ---- contents: a byte for each place in the gathered buffer -------------------------------- */

static unsigned char expected_byte(const model *m, int index, size_t at) {
    return (unsigned char)(at * 131 + at / 251 + (size_t)index * 17 +
                           (size_t)m->units[index].version * 29);
}

/* This rank's bytes of it, as its shard has them. */
static void write_shard(model *m, int index) {
    ranked_unit *of = &m->units[index];
    const tn_segment *segments = NULL;
    size_t count = 0, offset = 0, sent = 0, bytes = 0;
    EXPECT_OK(tn_shard_bytes(of->plan, all.rank, &bytes));
    EXPECT_OK(tn_shard_segments(of->plan, TN_SHARD_FORWARD, &segments, &count));
    EXPECT_OK(tn_shard_sent_bytes(of->plan, TN_SHARD_FORWARD, all.rank, &offset, &sent));
    unsigned char *shard = calloc(bytes + 1, 1);
    size_t at = offset;
    assert_non_null(shard);
    of->version++;
    for (size_t i = 0; i < count; i++) {
        if (segments[i].rank != all.rank) continue;
        for (size_t byte = 0; byte < segments[i].count; byte++)
            shard[at++] = expected_byte(m, index, segments[i].offset + byte);
    }
    assert_int_equal(at, offset + sent);
    EXPECT_OK(tn_plane_write(of->shard, TN_PLANE_DATA, shard, bytes, NULL, 0, all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    free(shard);
}

/* The elements of each weight are what the ranks have; scales, where they are gathered, too. */
static void expect_contents(const model *m, int index, tn_stream stream) {
    const ranked_unit *of = &m->units[index];
    char base[1];
    for (int i = 0; i < TENSORS; i++) {
        tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
        EXPECT_OK(tn_shard_plane_memory(of->plan, TN_SHARD_FORWARD, i, base, base, &memory));
        size_t offset = (size_t)((char *)memory.data - base);
        unsigned char *data = malloc(memory.data_bytes), *scale = malloc(memory.scale_bytes + 1);
        EXPECT_OK(tn_plane_read(of->weights[i], memory.plane, data, memory.data_bytes,
                                memory.scale_bytes ? scale : NULL, memory.scale_bytes, stream));
        EXPECT_OK(tn_stream_synchronize(all.device, stream));
        for (size_t at = 0; at < memory.data_bytes; at++)
            assert_int_equal(data[at], expected_byte(m, index, offset + at));
        free(data);
        free(scale);
    }
}

/* ---- a model ------------------------------------------------------------------------------- */

static tn_shard_plan *make_plan(tn_shard_layout layout, int ranks) {
    const tn_shard_tensor tensors[TENSORS] = {
        {"fp8", TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_SCALE_POW2, ROWS, COLS, 0},
        {"plain", TN_FORMAT_PLAIN, TN_BF16, TN_SCALE_POW2, 1, COLS, 0}};
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    tn_shard_plan *plan = NULL;
    config.tensors = tensors, config.tensor_count = TENSORS;
    config.rank_count = ranks, config.layout = layout;
    EXPECT_OK(tn_shard_plan_create(&config, &plan));
    return plan;
}

static tn_tensor make_tensor(tn_scope scope, tn_format format, tn_dtype dtype, int64_t rows,
                             int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = format, config.dtype = dtype;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    return tensor;
}

static void make_unit(model *m, int index, tn_shard_layout layout) {
    ranked_unit *of = &m->units[index];
    tn_ring_unit_config config = TN_RING_UNIT_CONFIG_INIT;
    size_t bytes = 0;
    int out = -1;
    of->plan = make_plan(layout, all.count);
    EXPECT_OK(tn_shard_bytes(of->plan, all.rank, &bytes));
    of->shard = make_tensor(m->scope, TN_FORMAT_PLAIN, TN_BYTE, 1, (int64_t)bytes);
    of->weights[0] = make_tensor(m->scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, ROWS, COLS);
    of->weights[1] = make_tensor(m->scope, TN_FORMAT_PLAIN, TN_BF16, 1, COLS);
    config.plan = of->plan, config.shard = of->shard;
    config.tensors = of->weights, config.tensor_count = TENSORS;
    EXPECT_OK(tn_ring_unit_add(m->ring, &config, &out));
    assert_int_equal(out, index);
    write_shard(m, index);
}

static void model_open(model *m, tn_shard_layout layout) {
    tn_scope_config scope = TN_SCOPE_CONFIG_INIT;
    tn_ring_config config = TN_RING_CONFIG_INIT;
    memset(m, 0, sizeof *m);
    scope.pool = all.pool;
    EXPECT_OK(tn_scope_create(&scope, &m->scope));
    m->comm = ranks_comm(&all, "ring", 0);
    config.scope = m->scope, config.comm = m->comm;
    EXPECT_OK(tn_ring_create(&config, &m->ring));
    for (int i = 0; i < UNITS; i++)
        make_unit(m, i, layout);
    EXPECT_OK(tn_ring_seal(m->ring));
}

/* Everything is freed, whatever became of the communicator. */
static void model_close(model *m, tn_status comm_status) {
    EXPECT_OK(tn_ring_destroy(m->ring));
    EXPECT_STATUS(tn_comm_destroy(m->comm), comm_status);
    EXPECT_OK(tn_scope_close(m->scope));
    for (int i = 0; i < UNITS; i++)
        tn_shard_plan_destroy(m->units[i].plan);
}

/* ---- steps --------------------------------------------------------------------------------- */

static void use(model *m, int index, int next) {
    EXPECT_OK(tn_ring_acquire(m->ring, index, NO_SCOPE, all.stream));
    if (next >= 0 && next < UNITS) EXPECT_OK(tn_ring_prefetch(m->ring, next));
    expect_contents(m, index, index % 2 ? all.stream : all.other);
    EXPECT_OK(tn_ring_release(m->ring, index));
}

/* Forward and backward, then new contents of all shards. */
static void run_step(model *m) {
    for (int i = 0; i < UNITS; i++)
        use(m, i, i + 1);
    for (int i = UNITS - 1; i >= 0; i--)
        use(m, i, i - 1);
    for (int i = 0; i < UNITS; i++)
        write_shard(m, i);
}

static uint64_t allocations(void) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_pool_stats_get(all.pool, &stats));
    return stats.allocs;
}

static uint64_t wire_bytes(const model *m) {
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    uint64_t bytes = 0;
    EXPECT_OK(tn_comm_stats_get(m->comm, &stats));
    for (int i = 0; i < TN_COLLECTIVE_COUNT; i++)
        bytes += stats.wire_bytes[i];
    return bytes;
}

static void expect_steps(tn_shard_layout layout) {
    model m;
    size_t offset = 0, sent = 0;
    tn_ring_stats stats = TN_RING_STATS_INIT;
    model_open(&m, layout);
    EXPECT_OK(tn_shard_sent_bytes(m.units[0].plan, TN_SHARD_FORWARD, all.rank, &offset, &sent));
    uint64_t before = wire_bytes(&m); /* where memory is registered, ranks have agreed on that */
    run_step(&m);
    uint64_t blocks = allocations();
    for (int step = 2; step <= STEPS; step++)
        run_step(&m);
    assert_int_equal(allocations(), blocks);
    uint64_t gathers = (uint64_t)STEPS * 2 * UNITS;
    assert_int_equal(wire_bytes(&m) - before, gathers * sent * (uint64_t)(all.count - 1));
    EXPECT_OK(tn_ring_stats_get(m.ring, &stats));
    assert_int_equal(stats.gathers, gathers);
    assert_int_equal(stats.live_bytes, 0);
    assert_int_equal(stats.peak_live_bytes, stats.buffer_bytes);
    EXPECT_OK(tn_ring_verify(m.ring));
    model_close(&m, TN_OK);
}

static void steps_bring_every_ranks_bytes(void **state) {
    (void)state;
    expect_steps(TN_SHARD_TILES);
    expect_steps(TN_SHARD_RAGGED);
    expect_steps(TN_SHARD_FLAT);
}

/* ---- what goes wrong ----------------------------------------------------------------------- */

/* Rank 0 releases in another order: no collective differs, and so nothing else would say it. */
static void ranks_that_make_other_calls_are_found_out(void **state) {
    model m;
    (void)state;
    model_open(&m, TN_SHARD_TILES);
    for (int i = 0; i < 2; i++)
        EXPECT_OK(tn_ring_acquire(m.ring, i, NO_SCOPE, all.stream));
    EXPECT_OK(tn_ring_verify(m.ring));
    for (int i = 0; i < 2; i++)
        EXPECT_OK(tn_ring_release(m.ring, all.rank == 0 ? i : 1 - i));
    tn_status status = tn_ring_verify(m.ring);
    if (all.count > 1) {
        EXPECT_STATUS(status, TN_COMM_ERROR);
        EXPECT_ERROR_HAS("has made other calls");
    } else {
        EXPECT_OK(status);
    }
    model_close(&m, TN_OK);
}

/* Rank 0 goes to a barrier where the others gather: the communicator fails on all of them. */
static void a_failed_communicator_leaves_nothing_behind(void **state) {
    model m;
    (void)state;
    if (all.count == 1) return;
    if (ranks_leaves_out(&all,
                         "NCCL compares no calls: nccl_faults has what differs in checked mode"))
        return;
    model_open(&m, TN_SHARD_RAGGED);
    EXPECT_OK(tn_ring_acquire(m.ring, 0, NO_SCOPE, all.stream));
    tn_status first = all.rank == 0 ? tn_barrier(m.comm, all.stream) : tn_ring_prefetch(m.ring, 1);
    assert_true(first == TN_OK || first == TN_COMM_ERROR);
    EXPECT_STATUS(tn_comm_wait(m.comm), TN_COMM_ERROR);
    EXPECT_STATUS(tn_ring_acquire(m.ring, 2, NO_SCOPE, all.stream), TN_COMM_ERROR);
    EXPECT_OK(tn_ring_release(m.ring, 0));
    EXPECT_STATUS(tn_ring_verify(m.ring), TN_COMM_ERROR);
    model_close(&m, TN_COMM_ERROR);
}

static void units_that_do_not_fit_their_plan_are_refused(void **state) {
    model m;
    int out = -1;
    (void)state;
    model_open(&m, TN_SHARD_TILES);
    tn_ring *ring = NULL;
    tn_ring_config config = TN_RING_CONFIG_INIT;
    tn_ring_unit_config unit = TN_RING_UNIT_CONFIG_INIT;
    tn_tensor others[TENSORS] = {
        make_tensor(m.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, ROWS, COLS + 1),
        make_tensor(m.scope, TN_FORMAT_PLAIN, TN_BF16, 1, COLS)};
    config.scope = m.scope, config.comm = m.comm;
    EXPECT_OK(tn_ring_create(&config, &ring));
    EXPECT_STATUS(tn_ring_unit_add(ring, &unit, &out), TN_INVALID_ARGUMENT);
    unit.plan = m.units[0].plan, unit.shard = m.units[0].shard;
    unit.tensors = others, unit.tensor_count = 1;
    EXPECT_STATUS(tn_ring_unit_add(ring, &unit, &out), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("2 tensors, and 1 were given");
    unit.tensor_count = TENSORS;
    EXPECT_STATUS(tn_ring_unit_add(ring, &unit, &out), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("of 300 x 201");
    unit.tensors = m.units[0].weights;
    unit.shard = others[1];
    EXPECT_STATUS(tn_ring_unit_add(ring, &unit, &out), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("and not bytes");
    tn_shard_plan *wider = make_plan(TN_SHARD_TILES, all.count + 1);
    unit.plan = wider, unit.shard = m.units[0].shard;
    EXPECT_STATUS(tn_ring_unit_add(ring, &unit, &out), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("ranks, and communicator ring has");
    tn_shard_plan_destroy(wider);
    EXPECT_OK(tn_ring_destroy(ring));
    model_close(&m, TN_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_bring_every_ranks_bytes),
        cmocka_unit_test(ranks_that_make_other_calls_are_found_out),
        cmocka_unit_test(a_failed_communicator_leaves_nothing_behind),
        cmocka_unit_test(units_that_do_not_fit_their_plan_are_refused),
    };
    return RANKS_RUN(&all, tests);
}
