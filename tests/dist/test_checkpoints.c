/* Checkpoints of any count of ranks, loaded by any other: every byte, with ranks that hold nothing,
 * pieces that do not lie in order, and a rank that fails, which is every rank's failure. */
#include "ranks_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "host_alloc.h"
#include "tenure_checkpoint.h"

enum { ENTRIES = 4, MASTER_ELEMENTS = 1003 * 7, WEIGHT_ELEMENTS = 300 * 96, TINY_ELEMENTS = 3 };

static rank_fixture all;
static tn_scope scope;
static char path[64];

static const struct {
    const char *name;
    tn_dtype dtype;
    int64_t elements;
} kinds[ENTRIES] = {{"master", TN_FP32, MASTER_ELEMENTS},
                    {"weight", TN_E4M3, WEIGHT_ELEMENTS},
                    {"tiny", TN_BF16, TINY_ELEMENTS}, /* with four ranks one has none of it */
                    {"zero", TN_E5M2, 0}};

/* One rank's part of the model: bytes of one block, entry behind entry. */
typedef struct share {
    tn_tensor block;
    size_t bytes;
    tn_checkpoint_entry entries[ENTRIES];
    tn_checkpoint_piece pieces[ENTRIES][2];
    tn_checkpoint_config config;
} share;

static unsigned char byte_of(unsigned seed, int entry, size_t at) {
    uint32_t mixed = (uint32_t)at * 2654435761u + seed * 40503u + (uint32_t)entry * 977u;
    return (unsigned char)(mixed >> 13);
}

/* Equal shares of the elements; each in two pieces, the second half first. */
static void lay_out(share *mine, int rank, int count) {
    for (int i = 0; i < ENTRIES; i++) {
        tn_checkpoint_entry *entry = &mine->entries[i];
        size_t width = tn_dtype_bytes(kinds[i].dtype);
        int64_t part = (kinds[i].elements + count - 1) / count;
        int64_t begin = part * rank < kinds[i].elements ? part * rank : kinds[i].elements;
        int64_t held = kinds[i].elements - begin < part ? kinds[i].elements - begin : part;
        int64_t half = held / 2;
        *entry = (tn_checkpoint_entry){.name = kinds[i].name, .dtype = kinds[i].dtype, .rank = 1};
        entry->shape[0] = kinds[i].elements;
        entry->pieces = mine->pieces[i], entry->piece_count = 2;
        mine->pieces[i][0] = (tn_checkpoint_piece){begin + half, held - half, mine->bytes};
        mine->bytes += (size_t)(held - half) * width;
        mine->pieces[i][1] = (tn_checkpoint_piece){begin, half, mine->bytes};
        mine->bytes += (size_t)half * width;
    }
}

static void fill(share *mine, unsigned seed) {
    unsigned char *bytes = malloc(mine->bytes + 1);
    for (int i = 0; i < ENTRIES; i++) {
        size_t width = tn_dtype_bytes(kinds[i].dtype);
        for (int j = 0; j < 2; j++) {
            const tn_checkpoint_piece *piece = &mine->pieces[i][j];
            for (size_t k = 0; k < (size_t)piece->count * width; k++)
                bytes[piece->offset + k] = byte_of(seed, i, (size_t)piece->first * width + k);
        }
    }
    EXPECT_OK(tn_plane_write(mine->block, TN_PLANE_DATA, bytes, mine->bytes, NULL, 0, all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    free(bytes);
}

static int has(share *mine, unsigned seed) {
    unsigned char *bytes = malloc(mine->bytes + 1);
    int is_same = 1;
    EXPECT_OK(tn_plane_read(mine->block, TN_PLANE_DATA, bytes, mine->bytes, NULL, 0, all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    for (int i = 0; i < ENTRIES; i++) {
        size_t width = tn_dtype_bytes(kinds[i].dtype);
        for (int j = 0; j < 2; j++) {
            const tn_checkpoint_piece *piece = &mine->pieces[i][j];
            for (size_t k = 0; k < (size_t)piece->count * width; k++)
                is_same = is_same && bytes[piece->offset + k] ==
                                         byte_of(seed, i, (size_t)piece->first * width + k);
        }
    }
    free(bytes);
    return is_same;
}

static void open_share(share *mine, int rank, int count, tn_comm *comm) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    memset(mine, 0, sizeof *mine);
    lay_out(mine, rank, count);
    config.dtype = TN_BYTE;
    config.rank = 1, config.shape[0] = (int64_t)mine->bytes;
    EXPECT_OK(tn_tensor_create(scope, &config, &mine->block));
    for (int i = 0; i < ENTRIES; i++)
        mine->entries[i].memory = mine->block;
    mine->config = (tn_checkpoint_config)TN_CHECKPOINT_CONFIG_INIT;
    mine->config.path = path, mine->config.comm = comm, mine->config.scope = scope;
    mine->config.entries = mine->entries, mine->config.entry_count = ENTRIES;
    mine->config.staging_bytes = 8192;
    fill(mine, 999);
}

static void close_share(share *mine) { EXPECT_OK(tn_tensor_destroy(mine->block, all.stream)); }

static void meet(void) {
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    ranks_wait(&all);
}

static void save(unsigned seed) {
    share mine;
    open_share(&mine, all.rank, all.count, all.comm);
    fill(&mine, seed);
    mine.config.step = seed, mine.config.plan_hash = 77;
    EXPECT_OK(tn_checkpoint_save(&mine.config, all.stream));
    close_share(&mine);
}

/* As rank `rank` of `count`, whoever we are. */
static void expect_loaded(unsigned seed, int rank, int count) {
    share other;
    open_share(&other, rank, count, NULL);
    EXPECT_OK(tn_checkpoint_load(&other.config, all.stream));
    assert_true(has(&other, seed));
    close_share(&other);
}

static void any_count_of_ranks_loads_what_another_saved(void **state) {
    (void)state;
    tn_checkpoint_info info = TN_CHECKPOINT_INFO_INIT;
    save(1);
    EXPECT_OK(tn_checkpoint_info_get(path, &info));
    assert_int_equal(info.rank_count, all.count);
    assert_int_equal(info.entry_count, ENTRIES);
    assert_int_equal(info.step, 1);
    assert_int_equal(info.plan_hash, 77);
    assert_int_equal(info.bytes, MASTER_ELEMENTS * 4 + WEIGHT_ELEMENTS + TINY_ELEMENTS * 2);
    for (int count = 1; count <= 5; count++) {
        for (int rank = 0; rank < count; rank++)
            expect_loaded(1, rank, count);
    }
    meet();
}

static void ranks_load_together(void **state) {
    (void)state;
    share mine;
    save(2);
    open_share(&mine, all.rank, all.count, all.comm);
    EXPECT_OK(tn_checkpoint_load(&mine.config, all.stream));
    assert_true(has(&mine, 2));
    close_share(&mine);
    meet();
}

static void one_rank_that_fails_is_the_failure_of_all(void **state) {
    (void)state;
    share mine;
    save(3);
    open_share(&mine, all.rank, all.count, all.comm);
    fill(&mine, 4);
    int is_culprit = all.rank == all.count - 1;
    if (is_culprit) mine.pieces[1][0].count++; /* of the next rank, or of none */
    tn_status status = tn_checkpoint_save(&mine.config, all.stream);
    EXPECT_STATUS(status, TN_INVALID_ARGUMENT);
    if (is_culprit) mine.pieces[1][0].count--;
    if (is_culprit) mine.entries[0].name = "mistress";
    EXPECT_STATUS(tn_checkpoint_load(&mine.config, all.stream), TN_INVALID_ARGUMENT);
    if (is_culprit) EXPECT_ERROR_HAS("has no entry mistress");
    if (!is_culprit) EXPECT_ERROR_HAS("has failed (");
    if (is_culprit) mine.entries[0].name = "master";
    assert_true(has(&mine, 4)); /* nothing has been loaded anywhere */
    EXPECT_OK(tn_checkpoint_load(&mine.config, all.stream));
    assert_true(has(&mine, 3));
    close_share(&mine);
    meet();
}

/* ---- the fixture ---------------------------------------------------------------------------- */

static tn_status save_again(share *mine) {
    tn_status status = tn_checkpoint_save(&mine->config, all.stream);
    for (int tries = 0; tries < 3 && status != TN_OK && status != TN_COMM_ERROR; tries++)
        status = tn_checkpoint_save(&mine->config, all.stream);
    return status;
}

/* *has_come: the fault. 1: the communicator has failed, on all ranks and at once. */
static int save_short_of_memory(tn_comm *comm, long nth, int *has_come) {
    share mine;
    open_share(&mine, all.rank, all.count, comm);
    fill(&mine, (unsigned)nth);
    if (all.rank == 1) (void)tn__host_alloc_fault(nth, 0);
    tn_status status = save_again(&mine);
    *has_come = ranks_most(&all, all.rank == 1 && tn__host_alloc_fault(0, 0) == 0) > 0.0f;
    const int is_over = ranks_most(&all, status != TN_OK) > 0.0f;
    if (is_over && status == TN_OK) status = tn_barrier(comm, all.stream);
    if (is_over && status == TN_OK) status = tn_comm_wait(comm);
    assert_int_equal(status, is_over ? TN_COMM_ERROR : TN_OK);
    if (!is_over) {
        fill(&mine, 999);
        EXPECT_OK(tn_checkpoint_load(&mine.config, all.stream));
        assert_true(has(&mine, (unsigned)nth));
    }
    close_share(&mine);
    return is_over;
}

/* What fails before the ranks have met is called again by this one alone, what fails after that by
 * all; where it could not even say so, all have heard. */
static void a_rank_short_of_memory_keeps_nobody_waiting(void **state) {
    enum { DEADLINE_US = 120 * 1000 * 1000 };
    int has_come = all.count > 1;
    (void)state;
    for (long nth = 1; has_come; nth += 2) {
        tn_comm *comm = ranks_comm(&all, "saving", DEADLINE_US);
        const int is_over = save_short_of_memory(comm, nth, &has_come);
        assert_int_equal(tn_comm_destroy(comm), is_over ? TN_COMM_ERROR : TN_OK);
        if (is_over) all.has_given_up = 1;
    }
}

static void a_scope_of_another_device_is_refused(void **state) {
    (void)state;
    tn_device *device = test_open_host();
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    tn_scope_config there = TN_SCOPE_CONFIG_INIT;
    share mine;
    there.pool = pool;
    open_share(&mine, all.rank, all.count, all.comm);
    EXPECT_OK(tn_scope_create(&there, &mine.config.scope));
    EXPECT_STATUS(tn_checkpoint_save(&mine.config, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("the communicator ranks and the scope are of different devices");
    EXPECT_OK(tn_scope_close(mine.config.scope));
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_device_destroy(device));
    close_share(&mine);
}

static int open_ranks(void **state) {
    (void)state;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    all = ranks_open();
    config.pool = all.pool;
    EXPECT_OK(tn_scope_create(&config, &scope));
    /* All ranks have the launcher as parent. */
    snprintf(path, sizeof path, "checkpoint-of-ranks-%ld", (long)getppid());
    return 0;
}

static int close_ranks(void **state) {
    (void)state;
    EXPECT_OK(tn_scope_close(scope));
    meet();
    if (all.rank == 0) test_remove_tree(path);
    ranks_close(&all);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_count_of_ranks_loads_what_another_saved),
        cmocka_unit_test(ranks_load_together),
        cmocka_unit_test(one_rank_that_fails_is_the_failure_of_all),
        cmocka_unit_test(a_scope_of_another_device_is_refused),
        cmocka_unit_test(a_rank_short_of_memory_keeps_nobody_waiting),
    };
    return TEST_RUN_GROUP(tests, open_ranks, close_ranks);
}
