/* Plans of random units: every byte of every plane is in one rank's shard and gets to its place.
 *
 * The planes are filled with bytes that depend on where they are. Each rank's shard is made of its
 * pieces by the layouts of tenure_tensor.h alone, element by element and scale by scale; then the
 * plan's segments are copied as a gather does, and the gathered buffer is compared. Elements of
 * buckets likewise. A failure is replayed by TENURE_FUZZ_SEED=S TENURE_FUZZ_FIRST=N, which it
 * prints.
 */
#include <stdlib.h>
#include <string.h>

#include "fuzz_support.h"
#include "host_alloc.h"
#include "test_shards.h"

enum { TENSORS_MAX = 9, RANKS_MAX = 13, UNITS = 600 };

static int random_below(uint64_t *state, int bound) {
    return (int)fuzz_below(state, (size_t)bound);
}

/* ---- units ---------------------------------------------------------------------------------- */

typedef struct unit {
    int ranks, tensors;
    tn_shard_tensor tensor[TENSORS_MAX];
    tn_shard_plan *plan;
    tn_shard_plan_info info;
} unit;

static void random_tensor(uint64_t *state, tn_shard_tensor *tensor) {
    static const int64_t extents[] = {0,   1,   7,   64,  96,  127, 128, 129, 192, 200,
                                      256, 384, 500, 576, 130, 640, 33,  300, 16,  260};
    static const tn_dtype plain[] = {TN_FP32, TN_BF16, TN_FP16, TN_BYTE};
    enum { EXTENTS = sizeof extents / sizeof *extents };
    *tensor = (tn_shard_tensor){.format = (tn_format)random_below(state, TN_FORMAT_COUNT)};
    tensor->dtype = TN_E4M3;
    if (tensor->format == TN_FORMAT_PLAIN) tensor->dtype = plain[random_below(state, 4)];
    if (tensor->format == TN_FORMAT_NVFP4) tensor->dtype = TN_E2M1;
    tensor->rows = extents[random_below(state, EXTENTS)];
    tensor->cols = extents[random_below(state, EXTENTS)];
    if (random_below(state, 8) == 0) tensor->rows = 128 * (1 + random_below(state, 12));
    tensor->frozen = random_below(state, 3) == 0;
}

static int can_be_flat(const unit *u) {
    for (int i = 0; i < u->tensors; i++) {
        const tn_shard_tensor *t = &u->tensor[i];
        int is_cut = t->format == TN_FORMAT_PLAIN || t->format == TN_FORMAT_FP8_BLOCK_2D ||
                     t->format == TN_FORMAT_FP8_TENSOR;
        if (!is_cut && t->rows * t->cols > 0) return 0;
    }
    return 1;
}

static unit random_unit(uint64_t *state) {
    unit u = {.ranks = 1 + random_below(state, RANKS_MAX),
              .tensors = random_below(state, TENSORS_MAX + 1),
              .info = TN_SHARD_PLAN_INFO_INIT};
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    for (int i = 0; i < u.tensors; i++) {
        random_tensor(state, &u.tensor[i]);
        if (i > 0 && random_below(state, 2)) u.tensor[i].format = u.tensor[i - 1].format;
        if (i > 0 && u.tensor[i].format == u.tensor[i - 1].format)
            u.tensor[i].dtype = u.tensor[i - 1].dtype;
    }
    config.tensors = u.tensor, config.tensor_count = u.tensors;
    config.rank_count = u.ranks;
    config.layout = (tn_shard_layout)random_below(state, TN_SHARD_LAYOUT_COUNT);
    if (config.layout == TN_SHARD_FLAT && !can_be_flat(&u)) config.layout = TN_SHARD_RAGGED;
    if (random_below(state, 2)) config.costs = (tn_shard_costs){50000, 2000000, 9000, 100};
    EXPECT_OK(tn_shard_plan_create(&config, &u.plan));
    EXPECT_OK(tn_shard_plan_info_get(u.plan, &u.info));
    return u;
}

/* ---- planes --------------------------------------------------------------------------------- */

typedef struct planes {
    shard_plane row[TENSORS_MAX], col[TENSORS_MAX];
} planes;

static uint8_t *make_shard(const unit *u, const planes *all, int rank) {
    size_t bytes;
    EXPECT_OK(tn_shard_bytes(u->plan, rank, &bytes));
    assert_int_equal(bytes % 16, 0);
    assert_true(bytes <= u->info.shard_bytes_max);
    uint8_t *shard = shard_zeros(bytes);
    for (int i = 0; i < u->tensors; i++) {
        const tn_shard_tensor *t = &u->tensor[i];
        shard_put_piece(u->plan, rank, i, &all->row[i], shard_forward_plane(t), shard);
        if (shard_has_col(t)) shard_put_piece(u->plan, rank, i, &all->col[i], TN_PLANE_COL, shard);
    }
    return shard;
}

/* What is left beside the planes must be 0. */
static void expect_planes(const unit *u, const planes *all, uint8_t *const *shards,
                          tn_shard_phase phase) {
    size_t bytes = u->info.gathered_bytes[phase];
    uint8_t *gathered = shard_zeros(bytes);
    shard_gather(u->plan, shards, phase, gathered);
    for (int i = 0; i < u->tensors; i++) {
        int is_col = phase == TN_SHARD_BACKWARD && shard_has_col(&u->tensor[i]);
        shard_take_plane(u->plan, phase, i, is_col ? &all->col[i] : &all->row[i], shards[0],
                         gathered);
    }
    for (size_t i = 0; i < bytes; i++)
        if (gathered[i]) fail_msg("byte %zu of the gathered buffer is not 0", i);
    free(gathered);
}

/* ---- buckets -------------------------------------------------------------------------------- */

/* Which rank the bucket's segments give each element to, and as which of its packed ones. */
static void expect_bucket(const unit *u) {
    const tn_segment *segments;
    size_t count, room = (size_t)u->info.bucket_elements;
    int64_t packed[RANKS_MAX] = {0};
    int *rank_of = shard_zeros(room * sizeof *rank_of);
    int64_t *packed_at = shard_zeros(room * sizeof *packed_at);
    EXPECT_OK(tn_shard_bucket_segments(u->plan, &segments, &count));
    for (size_t i = 0; i < count; i++) {
        for (size_t at = segments[i].offset; at < segments[i].offset + segments[i].count; at++) {
            if (at >= room || rank_of[at]) fail_msg("element %zu is given twice", at);
            rank_of[at] = segments[i].rank + 1;
            packed_at[at] = packed[segments[i].rank]++;
        }
    }
    for (int rank = 0; rank < u->ranks; rank++) {
        int64_t elements;
        EXPECT_OK(tn_shard_packed_elements(u->plan, rank, &elements));
        assert_int_equal(elements, packed[rank]);
        for (int i = 0; i < u->tensors; i++) {
            tn_shard_piece piece = TN_SHARD_PIECE_INIT;
            int64_t begin;
            EXPECT_OK(tn_shard_bucket_offset(u->plan, i, &begin));
            EXPECT_OK(tn_shard_piece_get(u->plan, rank, i, &piece));
            assert_int_equal(begin < 0, u->tensor[i].frozen);
            assert_int_equal(piece.packed_first < 0, u->tensor[i].frozen);
            if (begin < 0) continue;
            assert_int_equal(begin % 64, 0);
            if (piece.count > 0) assert_int_equal(piece.packed_first % 16, 0);
            for (int64_t at = 0; at < piece.count; at++) {
                if (rank_of[begin + piece.first + at] != rank + 1 ||
                    packed_at[begin + piece.first + at] != piece.packed_first + at)
                    fail_msg("element %lld of tensor %d is not rank %d's", (long long)at, i, rank);
            }
        }
    }
    free(rank_of);
    free(packed_at);
}

/* Pieces follow each other in the order of ranks or not, but have each element once. */
static void expect_partition(const unit *u) {
    for (int i = 0; i < u->tensors; i++) {
        int64_t sum = 0, whole = u->tensor[i].rows * u->tensor[i].cols;
        for (int rank = 0; rank < u->ranks; rank++) {
            tn_shard_piece piece = TN_SHARD_PIECE_INIT;
            EXPECT_OK(tn_shard_piece_get(u->plan, rank, i, &piece));
            if (piece.count > 0) assert_int_equal(piece.first, sum);
            sum += piece.count;
        }
        assert_int_equal(sum, whole);
    }
}

/* ---- units ---------------------------------------------------------------------------------- */

static void check(uint64_t seed) {
    uint64_t state = seed;
    unit u = random_unit(&state);
    planes all = {.row = {{.data = NULL}}};
    uint8_t *shards[RANKS_MAX];
    for (int i = 0; i < u.tensors; i++) {
        all.row[i] = shard_plane_make(&u.tensor[i], i, shard_forward_plane(&u.tensor[i]));
        if (shard_has_col(&u.tensor[i]))
            all.col[i] = shard_plane_make(&u.tensor[i], i, TN_PLANE_COL);
    }
    for (int rank = 0; rank < u.ranks; rank++)
        shards[rank] = make_shard(&u, &all, rank);
    expect_partition(&u);
    expect_planes(&u, &all, shards, TN_SHARD_FORWARD);
    expect_planes(&u, &all, shards, TN_SHARD_BACKWARD);
    expect_bucket(&u);
    for (int rank = 0; rank < u.ranks; rank++)
        free(shards[rank]);
    for (int i = 0; i < u.tensors; i++) {
        shard_plane_free(&all.row[i]);
        shard_plane_free(&all.col[i]);
    }
    tn_shard_plan_destroy(u.plan);
}

static uint64_t seed_of_run, unit_of_run;
static int is_through;

static void every_byte_gets_to_its_place(void **state) {
    uint64_t first = fuzz_setting("TENURE_FUZZ_FIRST", 0);
    long blocks = tn__host_live_blocks();
    (void)state;
    seed_of_run = fuzz_setting("TENURE_FUZZ_SEED", 1);
    for (unit_of_run = first; unit_of_run < first + UNITS; unit_of_run++)
        check((seed_of_run << 32) + unit_of_run);
    assert_int_equal(tn__host_live_blocks(), blocks);
    is_through = 1;
}

static int say_how_to_replay(void **state) {
    (void)state;
    if (!is_through) {
        print_message("replay with TENURE_FUZZ_SEED=%llu TENURE_FUZZ_FIRST=%llu\n",
                      (unsigned long long)seed_of_run, (unsigned long long)unit_of_run);
    }
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(every_byte_gets_to_its_place, say_how_to_replay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
