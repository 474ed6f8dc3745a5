/* A rank fails alone, anywhere in the life of a sharded model: it makes the failed call again, and
 * training goes on to the same bits as if nothing had been; or, where that can not be, all ranks
 * are told at once, and nobody waits for a deadline. Nothing is left behind either way.
 *
 * The N-th allocation of host memory fails, and on a simulated device the N-th driver call, on one
 * rank and then on the other. TENURE_FAULT_STRIDE=1 has every N; without it each run tries some,
 * beginning elsewhere for each model. */
#include "ranks_support.h"
#include "tenure_sharded.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"

enum {
    STRIDE = 61,
    SIM_STRIDE = 601, /* of a life there are 5,000 driver calls and more */
    ROWS = 136,       /* two tiles, which a cut over two ranks goes through */
    COLS = 72,
    UNITS = 3,
    STEPS = 3,
    MICRO_BATCHES = 2,
    ELEMENTS = ROWS * COLS,
    MASTERS_MAX = UNITS * 2 * ELEMENTS,
    ATTEMPTS = 3,
    DEADLINE_US = 120 * 1000 * 1000,
    CODE_OUT_OF_MEMORY = 2
};

typedef struct kind {
    const char *name;
    tn_gradient_wire wire;
    tn_gradient_sum sum;
    tn_shard_layout layout;
    int keep;
    int shards_from_masters;
    int update_ahead;
} kind;

static const kind kinds[] = {
    {"parts are added up", TN_GRADIENT_WIRE_PLAIN, TN_GRADIENT_SUM_SHARDED, TN_SHARD_FLAT, 0, 0, 0},
    {"gradients in FP8, shards made", TN_GRADIENT_WIRE_FP8, TN_GRADIENT_SUM_SHARDED, TN_SHARD_TILES,
     0, 1, 0},
    {"whole sums, kept", TN_GRADIENT_WIRE_PLAIN, TN_GRADIENT_SUM_WHOLE, TN_SHARD_FLAT, 1, 0, 0},
    {"updated ahead", TN_GRADIENT_WIRE_PLAIN, TN_GRADIENT_SUM_SHARDED, TN_SHARD_FLAT, 0, 0, 1},
};

static rank_fixture all; /* its communicator is for the test's own meetings */
static tn_comm *comm;    /* the models' */

/* ---- faults -------------------------------------------------------------------------------- */

typedef enum fault_kind { HOST_MEMORY, DRIVER_CALLS } fault_kind;

static void arm(fault_kind faults, long nth) {
    if (faults == HOST_MEMORY)
        (void)tn__host_alloc_fault(nth, 0);
    else
        test_sim_get()->fault(NULL, nth, 0, CODE_OUT_OF_MEMORY);
}

/* 1: it has come. */
static int disarm(fault_kind faults, long nth, uint64_t calls_before) {
    if (faults == HOST_MEMORY) return tn__host_alloc_fault(0, 0) == 0;
    const uint64_t calls = test_sim_get()->call_count(NULL) - calls_before;
    test_sim_get()->fault(NULL, 0, 0, 0);
    return calls >= (uint64_t)nth;
}

/* ---- a model's life ------------------------------------------------------------------------ */

typedef struct life {
    const kind *of;
    tn_scope scope;
    tn_sharded_model *model;
    tn_tensor initial;
    int failed_calls;
    int is_over; /* the communicator has failed, or this rank has given it up */
} life;

static int is_lost(tn_status status) {
    return status == TN_COMM_ERROR || status == TN_COMM_TIMEOUT;
}

/* A call is made again where it has failed; a rank that can not go on says so to the others. */
#define ATTEMPT(l, call)                                                                           \
    do {                                                                                           \
        tn_status attempt = TN_OK;                                                                 \
        for (int tries = 0; tries < ATTEMPTS && !(l)->is_over; tries++) {                          \
            attempt = (call);                                                                      \
            if (attempt == TN_OK) break;                                                           \
            (l)->failed_calls++;                                                                   \
            assert_int_not_equal(attempt, TN_COMM_TIMEOUT);                                        \
            (l)->is_over = is_lost(attempt);                                                       \
        }                                                                                          \
        if (attempt != TN_OK) tn_comm_abort(comm, tn_error_last());                                \
        if (attempt != TN_OK) (l)->is_over = 1;                                                    \
        if ((l)->is_over) return;                                                                  \
    } while (0)

static void build(life *l) {
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    config.scope = l->scope, config.comm = comm, config.stream = all.stream;
    config.micro_batches = MICRO_BATCHES;
    config.gradient_wire = l->of->wire;
    config.gradient_sum = l->of->sum;
    config.keep_after_forward = l->of->keep;
    config.shards_from_masters = l->of->shards_from_masters;
    ATTEMPT(l, tn_sharded_create(&config, &l->model));
    for (int i = 0; i < UNITS; i++) {
        tn_sharded_unit_config unit = TN_SHARDED_UNIT_CONFIG_INIT;
        const tn_sharded_tensor trained = {.name = "trained",
                                           .format = TN_FORMAT_FP8_BLOCK_2D,
                                           .dtype = TN_E4M3,
                                           .rows = ROWS,
                                           .cols = COLS,
                                           .initial = l->initial};
        tn_sharded_tensor tensors[2] = {trained, trained};
        int number = -1;
        tensors[1].name = "in bf16", tensors[1].high_precision = 1;
        unit.tensors = tensors, unit.tensor_count = 2, unit.layout = l->of->layout;
        ATTEMPT(l, tn_sharded_unit_add(l->model, &unit, &number));
    }
    ATTEMPT(l, tn_sharded_seal(l->model));
}

static tn_status write_gradient(const life *l, int unit, int tensor, int step) {
    static float values[2][ELEMENTS];
    float *to = values[tensor];
    for (int i = 0; i < ELEMENTS; i++)
        to[i] = (float)((i * 7 + step * 13 + unit * 5 + all.rank * 3 + tensor) % 31 - 15) / 64.0f;
    tn_status status = tn_plane_write(tn_sharded_gradient(l->model, unit, tensor), TN_PLANE_DATA,
                                      to, sizeof values[tensor], NULL, 0, all.stream);
    const tn_status waited = tn_stream_synchronize(all.device, all.stream);
    return status == TN_OK ? waited : status;
}

static void pass(life *l, int step, int micro_batch) {
    for (int unit = 0; unit < UNITS; unit++) {
        ATTEMPT(l, tn_sharded_forward_begin(l->model, unit));
        ATTEMPT(l, tn_sharded_forward_end(l->model, unit));
    }
    for (int unit = UNITS - 1; unit >= 0; unit--) {
        ATTEMPT(l, tn_sharded_backward_begin(l->model, unit));
        const int adds = tn_sharded_accumulates(l->model, unit);
        for (int tensor = 0; tensor < 2 && !adds; tensor++)
            ATTEMPT(l, write_gradient(l, unit, tensor, step * MICRO_BATCHES + micro_batch));
        ATTEMPT(l, tn_sharded_backward_end(l->model, unit));
    }
}

static void train(life *l) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    const int is_ahead = l->of->update_ahead;
    update.max_norm = is_ahead ? 0.0f : 1.0f;
    build(l);
    for (int step = 0; step < STEPS && !l->is_over; step++) {
        if (is_ahead) ATTEMPT(l, tn_sharded_update_ahead(l->model, &update));
        for (int i = 0; i < MICRO_BATCHES && !l->is_over; i++)
            pass(l, step, i);
        if (!l->is_over) ATTEMPT(l, tn_sharded_update(l->model, is_ahead ? NULL : &update));
    }
    if (!l->is_over) ATTEMPT(l, tn_comm_wait(comm));
}

/* This rank's masters after the last step: how many. */
static size_t read_masters(const life *l, float *masters) {
    size_t count = 0;
    for (int unit = 0; unit < UNITS; unit++) {
        tn_sharded_unit_info info = TN_SHARDED_UNIT_INFO_INIT;
        tn_tensor_info shape = TN_TENSOR_INFO_INIT;
        EXPECT_OK(tn_sharded_unit_info_get(l->model, unit, &info));
        if (info.master.value == 0) continue;
        EXPECT_OK(tn_tensor_info_get(info.master, &shape));
        const size_t elements = (size_t)(shape.rows * shape.cols);
        assert_true(count + elements <= MASTERS_MAX);
        EXPECT_OK(tn_plane_read(info.master, TN_PLANE_DATA, masters + count,
                                elements * sizeof *masters, NULL, 0, all.stream));
        count += elements;
    }
    ranks_wait(&all);
    return count;
}

typedef struct outcome {
    int has_come; /* the fault, somewhere */
    int is_over;
    int failed_calls;
} outcome;

/* Another rank has failed behind the last collective: the next one says so. */
static void hear_of_the_end(life *l) {
    tn_status status = tn_barrier(comm, all.stream);
    if (status == TN_OK) status = tn_comm_wait(comm);
    assert_int_equal(status, TN_COMM_ERROR);
    l->is_over = 1;
}

/* masters: those of a life without faults, which are `count`; NULL: they are read here. */
static outcome live(const kind *of, fault_kind faults, long nth, float *masters, size_t *count) {
    static float seen[MASTERS_MAX];
    life l = {.of = of};
    tn_scope_config scope = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    const uint64_t calls = all.place == RANKS_ON_SIM ? test_sim_get()->call_count(NULL) : 0;
    scope.pool = all.pool;
    EXPECT_OK(tn_scope_create(&scope, &l.scope));
    config.rank = 2, config.shape[0] = ROWS, config.shape[1] = COLS;
    EXPECT_OK(tn_tensor_create(l.scope, &config, &l.initial));
    EXPECT_OK(tn_plane_fill(l.initial, TN_PLANE_DATA, 0, all.stream));
    if (nth) arm(faults, nth);
    train(&l);
    outcome seen_here = {.failed_calls = l.failed_calls};
    if (nth) seen_here.has_come = disarm(faults, nth, calls);
    seen_here.is_over = ranks_most(&all, (float)l.is_over) > 0.0f;
    if (seen_here.is_over && !l.is_over) hear_of_the_end(&l);
    if (!l.is_over && !nth) *count = read_masters(&l, masters);
    if (!l.is_over && nth) {
        assert_int_equal(read_masters(&l, seen), *count);
        /* The simulated device computes nothing. */
        if (all.place != RANKS_ON_SIM) assert_memory_equal(seen, masters, *count * sizeof *seen);
    }
    const tn_status ended = tn_sharded_destroy(l.model);
    if (!l.is_over) EXPECT_OK(ended);
    EXPECT_OK(tn_scope_close(l.scope));
    return seen_here;
}

/* ---- the tests ----------------------------------------------------------------------------- */

static long stride(void) {
    const char *text = getenv("TENURE_FAULT_STRIDE");
    const long asked = text ? atol(text) : 0;
    if (asked > 0) return asked;
    return all.place == RANKS_ON_SIM ? SIM_STRIDE : STRIDE;
}

static void expect_balance(void) {
    const tn_pool_stats stats = test_pool_stats(all.pool);
    EXPECT_OK(tn_pool_check(all.pool));
    EXPECT_OK(tn_ledger_check(all.pool));
    assert_int_equal(stats.live_bytes, 0);
}

static void new_comm(void) {
    tn_status status = tn_comm_destroy(comm);
    assert_int_equal(status, TN_COMM_ERROR);
    comm = ranks_comm(&all, "models", DEADLINE_US);
}

static void fail_each(const kind *of, fault_kind faults, int faulty, long first) {
    static float masters[MASTERS_MAX];
    size_t count = 0;
    long lives = 0, over = 0, failed = 0;
    outcome seen = live(of, faults, 0, masters, &count);
    assert_int_equal(seen.is_over, 0);
    int has_come = 1;
    for (long nth = first; has_come; nth += stride()) {
        seen = live(of, faults, all.rank == faulty ? nth : 0, masters, &count);
        if (all.rank != faulty && seen.is_over == 0) assert_int_equal(seen.failed_calls, 0);
        has_come = ranks_most(&all, (float)seen.has_come) > 0.0f;
        lives++, over += seen.is_over, failed += seen.failed_calls > 0;
        if (seen.is_over) new_comm();
        expect_balance();
    }
    if (all.rank == faulty)
        printf("  %s, rank %d: %ld lives, %ld with a failed call, %ld over\n", of->name, faulty,
               lives, failed, over);
    if (faults == HOST_MEMORY && all.rank == faulty && stride() <= STRIDE)
        assert_true(failed > over);
}

static void fail_all(fault_kind faults) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        for (int rank = 0; rank < all.count; rank++)
            fail_each(&kinds[i], faults, rank, 1 + ((long)i * 5 + rank * 3) % stride());
}

static void host_memory_fails_on_one_rank(void **state) {
    (void)state;
    fail_all(HOST_MEMORY);
}

static void driver_calls_fail_on_one_rank(void **state) {
    (void)state;
    if (all.place == RANKS_ON_SIM) fail_all(DRIVER_CALLS);
}

/* A model after one step. */
static life open_life(const kind *of) {
    life l = {.of = of};
    tn_scope_config scope = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    scope.pool = all.pool;
    EXPECT_OK(tn_scope_create(&scope, &l.scope));
    config.rank = 2, config.shape[0] = ROWS, config.shape[1] = COLS;
    EXPECT_OK(tn_tensor_create(l.scope, &config, &l.initial));
    EXPECT_OK(tn_plane_fill(l.initial, TN_PLANE_DATA, 0, all.stream));
    build(&l);
    pass(&l, 0, 0);
    assert_int_equal(l.is_over, 0);
    return l;
}

/* On all ranks at the same driver call: what failed is gone on with. */
static void an_end_that_fails_is_called_again(void **state) {
    (void)state;
    long failed = 0;
    int has_come = all.place == RANKS_ON_SIM;
    for (long nth = 1; has_come; nth += 9) {
        life l = open_life(&kinds[0]);
        EXPECT_OK(tn_comm_wait(comm));
        const uint64_t calls = test_sim_get()->call_count(NULL);
        arm(DRIVER_CALLS, nth);
        tn_status status = tn_sharded_destroy(l.model);
        has_come = disarm(DRIVER_CALLS, nth, calls);
        if (status != TN_OK && status != TN_COMM_ERROR) {
            failed++;
            status = tn_sharded_destroy(l.model);
        }
        const int is_over = ranks_most(&all, status == TN_COMM_ERROR) > 0.0f;
        has_come = ranks_most(&all, (float)has_come) > 0.0f;
        if (is_over && status == TN_OK) hear_of_the_end(&l);
        if (!is_over) EXPECT_OK(status);
        EXPECT_OK(tn_scope_close(l.scope));
        if (is_over) new_comm();
        expect_balance();
    }
    if (all.place == RANKS_ON_SIM) assert_true(failed > 0);
}

/* Made again by the rank where it has failed, which the others do not wait for: 1 if it has. */
static int give_up_step(life *l, fault_kind faults, long nth, int *has_come) {
    const uint64_t calls = all.place == RANKS_ON_SIM ? test_sim_get()->call_count(NULL) : 0;
    if (nth) arm(faults, nth);
    tn_status status = tn_sharded_abandon(l->model);
    *has_come = nth && disarm(faults, nth, calls);
    const int has_failed = status != TN_OK;
    for (int tries = 0; tries < ATTEMPTS && status != TN_OK && !is_lost(status); tries++)
        status = tn_sharded_abandon(l->model);
    if (status == TN_OK) status = tn_comm_wait(comm); /* the fault may have met the barrier's end */
    l->is_over = ranks_most(&all, (float)is_lost(status)) > 0.0f;
    if (l->is_over && status == TN_OK) hear_of_the_end(l);
    if (!l->is_over) EXPECT_OK(status);
    *has_come = ranks_most(&all, (float)*has_come) > 0.0f;
    return has_failed;
}

static void close_life(life *l) {
    const tn_status status = tn_sharded_destroy(l->model);
    assert_true(status == TN_OK || l->is_over);
    EXPECT_OK(tn_scope_close(l->scope));
    if (l->is_over) new_comm();
    expect_balance();
}

static void give_up_each(const kind *of, fault_kind faults, int faulty) {
    long failed = 0;
    int has_come = 1;
    life l = open_life(of);
    for (long nth = 1; has_come; nth++) {
        failed += give_up_step(&l, faults, all.rank == faulty ? nth : 0, &has_come);
        if (l.is_over) {
            close_life(&l);
            l = open_life(of);
            continue;
        }
        pass(&l, 0, 0); /* it goes on from the same weights */
        assert_int_equal(l.is_over, 0);
    }
    if (all.rank == faulty) printf("  %s, rank %d: %ld failed\n", of->name, faulty, failed);
    if (all.rank == faulty) assert_true(failed > 0);
    close_life(&l);
}

static void a_step_is_given_up_by_one_rank_later(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        give_up_each(&kinds[i], HOST_MEMORY, i);
        if (all.place == RANKS_ON_SIM) give_up_each(&kinds[i], DRIVER_CALLS, 1 - i);
    }
}

static int open_ranks(void **state) {
    (void)state;
    all = ranks_open();
    all.has_given_up = 1;
    comm = ranks_comm(&all, "models", DEADLINE_US);
    return 0;
}

static int close_ranks(void **state) {
    (void)state;
    EXPECT_OK(tn_comm_destroy(comm));
    ranks_close(&all);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_memory_fails_on_one_rank),
        cmocka_unit_test(driver_calls_fail_on_one_rank),
        cmocka_unit_test(an_end_that_fails_is_called_again),
        cmocka_unit_test(a_step_is_given_up_by_one_rank_later),
    };
    return TEST_RUN_GROUP(tests, open_ranks, close_ranks);
}
