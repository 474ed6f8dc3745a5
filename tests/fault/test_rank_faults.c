/* A rank that dies, hangs, calls something else or is slow, at every point of a training step: the
 * others end with the status and words that say so, their memory is theirs, and nothing is left.
 *
 * Ranks are processes of this machine over TCP. Where a death is to be seen the deadline is ten
 * minutes, so that a test that ends has seen the death and not the deadline. Random rounds are
 * replayed by TENURE_FAULT_SEED=S TENURE_FAULT_FIRST=N, which a failure prints;
 * TENURE_FAULT_ROUNDS=N makes more of them.
 */
#include "test_processes.h"

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include "host_alloc.h"
#include "tenure_rendezvous.h"
#include "test_pools.h"

enum {
    LAYERS = 3,
    SHARD = 20000, /* elements of a rank's part of a layer: several segments of a socket */
    STEPS = 2,
    OPS = STEPS * (3 * LAYERS + 2), /* collectives of a run */
    LONG_US = 0,                    /* ten minutes */
    SHORT_US = 5 * 1000 * 1000,     /* of a hang: more than a busy machine keeps a rank waiting */
    RANKS_MAX = 4,
    ROUNDS = 12
};

typedef enum fault_kind { FAULT_NONE, FAULT_KILL, FAULT_HANG, FAULT_SIZE, FAULT_SLOW } fault_kind;

/* Where within the victim's op `at` it strikes. */
typedef enum fault_moment { BEFORE_PUT, AFTER_PUT, AFTER_WAIT, MOMENTS } fault_moment;

typedef struct fault_plan {
    fault_kind kind;
    int victim;
    int at;
    fault_moment moment;
    long timer_us; /* of a KILL: not at an op but when this time is over; 0: at the op */
} fault_plan;

static atomic_int *passed; /* shared by the ranks: how often one has come to a meeting */

/* Nothing is in it that would end with a rank that dies right behind it. */
static void meet(int awaited) {
    atomic_fetch_add(passed, 1);
    while (atomic_load(passed) < awaited)
        sched_yield();
}

/* ---- the training-like run ------------------------------------------------------------------ */

typedef struct trainee {
    const fault_plan *plan;
    tn_rendezvous *ranks;
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_comm *comm;
    float *shard, *whole, *gradient;
    int rank;
    int ops; /* put so far */
} trainee;

static void open_trainee(trainee *t, const test_meeting *meeting) {
    const fault_plan *plan = meeting->argument;
    tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    size_t whole_bytes = sizeof(float) * SHARD * (size_t)meeting->rank_count;
    *t = (trainee){.plan = plan, .rank = meeting->rank};
    how.rank = meeting->rank;
    how.rank_count = meeting->rank_count;
    how.host = "127.0.0.1";
    how.port = meeting->port;
    how.listen_file = meeting->rank ? -1 : meeting->listener;
    EXPECT_OK(tn_rendezvous_create(&how, &t->ranks));
    t->device = test_open_host();
    t->pool = test_open_pool(t->device, TN_BACKING_AUTO, 0);
    t->stream = test_open_stream(t->device);
    config.device = t->device;
    config.name = "step";
    config.rendezvous = t->ranks;
    config.timeout_us = plan->kind == FAULT_HANG ? SHORT_US : LONG_US;
    EXPECT_OK(tn_comm_create(&config, &t->comm));
    t->shard = test_take(t->pool, sizeof(float) * SHARD, t->stream);
    t->whole = test_take(t->pool, whole_bytes, t->stream);
    t->gradient = test_take(t->pool, whole_bytes, t->stream);
    EXPECT_OK(tn_fill(t->device, t->shard, 0, sizeof(float) * SHARD, t->stream));
    EXPECT_OK(tn_fill(t->device, t->gradient, 0, whole_bytes, t->stream));
    meet(meeting->rank_count); /* who is still joining would fail in that */
}

/* However the communicator has ended, all else balances. A rank that knows of a fault does not wait
 * for the others at the end. */
static void close_trainee(trainee *t, tn_status expected) {
    EXPECT_STATUS(tn_comm_destroy(t->comm), expected);
    EXPECT_OK(tn_stream_synchronize(t->device, t->stream));
    test_give(t->pool, t->shard, t->stream);
    test_give(t->pool, t->whole, t->stream);
    test_give(t->pool, t->gradient, t->stream);
    tn_pool_stats stats = test_pool_stats(t->pool);
    assert_int_equal(stats.live_bytes, 0);
    EXPECT_OK(tn_pool_destroy(t->pool));
    EXPECT_OK(tn_stream_destroy(t->device, t->stream));
    EXPECT_OK(tn_device_destroy(t->device));
    tn_rendezvous_destroy(t->ranks);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void spend(long iterations) {
    volatile long spent = 0;
    while (spent < iterations)
        spent++;
}

static void strike(trainee *t, fault_moment moment) {
    const fault_plan *plan = t->plan;
    if (plan->victim != t->rank || plan->at != t->ops || plan->moment != moment) return;
    if (plan->kind == FAULT_KILL && !plan->timer_us) raise(SIGKILL);
    if (plan->kind == FAULT_SLOW) spend(100 * 1000 * 1000);
    if (plan->kind != FAULT_HANG) return;
    tn_rendezvous_destroy(t->ranks); /* or rank 0 would wait for this one at its end */
    for (;;)
        pause();
}

static tn_status put_op(trainee *t, int op, size_t count) {
    tn_comm *comm = t->comm;
    if (op < LAYERS)
        return tn_all_gather(comm, t->shard, t->whole, sizeof(float) * count, t->stream);
    if (op < 3 * LAYERS && (op - LAYERS) % 2 == 0)
        return tn_all_gather(comm, t->shard, t->whole, sizeof(float) * count, t->stream);
    if (op < 3 * LAYERS)
        return tn_reduce_scatter(comm, t->gradient, t->shard, count, TN_FP32, TN_REDUCE_SUM,
                                 t->stream);
    if (op == 3 * LAYERS)
        return tn_all_reduce(comm, t->shard, t->shard, count, TN_FP32, TN_REDUCE_SUM, t->stream);
    return tn_barrier(comm, t->stream);
}

/* One collective of the run, with what is to happen around it. Every third is waited for. */
static tn_status do_op(trainee *t, int op) {
    int is_other = t->plan->kind == FAULT_SIZE && t->plan->victim == t->rank &&
                   t->plan->at == t->ops && op != 3 * LAYERS + 1;
    strike(t, BEFORE_PUT);
    tn_status status = put_op(t, op, is_other ? SHARD / 2 : SHARD);
    strike(t, AFTER_PUT);
    if (status == TN_OK && (t->ops % 3 == 0 || t->plan->moment == AFTER_WAIT))
        status = tn_comm_wait(t->comm);
    strike(t, AFTER_WAIT);
    t->ops++;
    return status;
}

static tn_status run(trainee *t) {
    for (int step = 0; step < STEPS; step++)
        for (int op = 0; op < 3 * LAYERS + 2; op++) {
            tn_status status = do_op(t, op);
            if (status != TN_OK) return status;
        }
    return tn_comm_wait(t->comm);
}

/* ---- what the others see -------------------------------------------------------------------- */

static void expect_words(const fault_plan *plan, int rank) {
    char words[64];
    if (plan->kind == FAULT_KILL) {
        snprintf(words, sizeof words, "rank %d is gone: its process has ended", plan->victim);
        EXPECT_ERROR_HAS(words);
    } else if (plan->kind == FAULT_HANG) {
        /* Where the machine is so busy that the engine comes to its deadline late, that of the wait
         * for it, which knows no rank, has been over first. */
        if (!strstr(tn_error_last(), "its collectives were not done 10 s after")) {
            EXPECT_ERROR_HAS("waited 5 s for ");
            snprintf(words, sizeof words, "rank %d", plan->victim);
            EXPECT_ERROR_HAS(words);
        }
    } else {
        EXPECT_ERROR_HAS("all ranks make the same calls in the same order");
    }
    snprintf(words, sizeof words, "communicator step, rank %d of", rank);
    if (plan->kind != FAULT_SIZE) EXPECT_ERROR_HAS(words);
}

static tn_status status_of(const fault_plan *plan) {
    if (plan->kind == FAULT_NONE || plan->kind == FAULT_SLOW) return TN_OK;
    return plan->kind == FAULT_HANG ? TN_COMM_TIMEOUT : TN_COMM_ERROR;
}

static void die(int signal) {
    (void)signal;
    kill(getpid(), SIGKILL);
}

static void set_timer(const fault_plan *plan, int rank) {
    struct itimerval timer = {.it_value = {.tv_usec = plan->timer_us}};
    if (plan->kind != FAULT_KILL || plan->victim != rank || !plan->timer_us) return;
    signal(SIGALRM, die);
    setitimer(ITIMER_REAL, &timer, NULL);
}

/* A death behind the last collective, or in it, which some ranks may be through with. */
static int may_come_too_late(const fault_plan *plan) {
    int is_last = plan->at == OPS - 1 && plan->moment != BEFORE_PUT;
    return plan->kind == FAULT_KILL && (plan->timer_us || is_last);
}

static void train(const test_meeting *meeting) {
    trainee t;
    open_trainee(&t, meeting);
    set_timer(t.plan, t.rank);
    tn_status expected = status_of(t.plan), status = run(&t);
    if (may_come_too_late(t.plan) && status == TN_OK) {
        while (t.plan->victim == t.rank)
            pause();
        expected = TN_OK;
    }
    EXPECT_STATUS(status, expected);
    if (status != TN_OK) {
        expect_words(t.plan, t.rank);
        EXPECT_STATUS(tn_barrier(t.comm, t.stream), expected);
        expect_words(t.plan, t.rank);
    }
    close_trainee(&t, expected);
}

/* ---- rounds --------------------------------------------------------------------------------- */

static void run_round(const fault_plan *plan, int rank_count) {
    pid_t ranks[RANKS_MAX];
    test_meeting meeting = test_meeting_open();
    meeting.argument = plan;
    passed = mmap(NULL, sizeof *passed, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(passed != MAP_FAILED);
    for (int rank = 0; rank < rank_count; rank++)
        ranks[rank] = test_rank_begin(&meeting, rank, rank_count, train);
    test_meeting_close(&meeting);
    int dies = plan->kind == FAULT_KILL || plan->kind == FAULT_HANG;
    for (int rank = 0; rank < rank_count; rank++)
        if (!dies || rank != plan->victim) test_rank_end(ranks[rank]);
    munmap(passed, sizeof *passed);
    if (!dies) return;
    if (plan->kind == FAULT_HANG) kill(ranks[plan->victim], SIGKILL);
    test_rank_end_killed(ranks[plan->victim]);
}

static void without_a_fault_all_ends_well(void **state) {
    (void)state;
    const fault_plan plan = {.kind = FAULT_NONE};
    for (int count = 1; count <= RANKS_MAX; count++)
        run_round(&plan, count);
}

static void a_death_at_each_collective_is_named(void **state) {
    (void)state;
    for (int at = 0; at < OPS; at++) {
        fault_plan plan = {.kind = FAULT_KILL, .victim = at % 3, .at = at};
        plan.moment = (fault_moment)(at % MOMENTS);
        run_round(&plan, 3);
    }
}

static void a_hang_is_timed_out_and_named(void **state) {
    (void)state;
    for (int at = 3; at < OPS; at += 8) {
        fault_plan plan = {.kind = FAULT_HANG, .victim = at % 3, .at = at, .moment = BEFORE_PUT};
        run_round(&plan, 3);
    }
}

static void another_size_is_named_by_all(void **state) {
    (void)state;
    for (int at = 0; at < 3 * LAYERS + 1; at += 3) {
        const fault_plan plan = {.kind = FAULT_SIZE, .victim = at % 3, .at = at};
        run_round(&plan, 3);
    }
}

static void a_slow_rank_is_no_fault(void **state) {
    (void)state;
    for (int at = 0; at < OPS; at += 7) {
        const fault_plan plan = {.kind = FAULT_SLOW, .victim = at % 3, .at = at};
        run_round(&plan, 3);
    }
}

/* ---- at random ------------------------------------------------------------------------------ */

static uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static int random_below(uint64_t *state, int bound) {
    return (int)(random_next(state) % (uint64_t)bound);
}

static fault_plan random_plan(uint64_t seed, uint64_t number, int *rank_count) {
    static const fault_kind kinds[] = {FAULT_KILL, FAULT_KILL, FAULT_KILL, FAULT_KILL,
                                       FAULT_HANG, FAULT_SIZE, FAULT_SIZE, FAULT_SLOW};
    uint64_t state = seed ^ number * UINT64_C(0x5851F42D4C957F2D);
    fault_plan plan = {.kind = kinds[random_below(&state, 8)]};
    *rank_count = 2 + random_below(&state, RANKS_MAX - 1);
    plan.victim = random_below(&state, *rank_count);
    plan.at = random_below(&state, plan.kind == FAULT_SIZE ? 3 * LAYERS + 1 : OPS);
    plan.moment = plan.kind == FAULT_KILL ? (fault_moment)random_below(&state, MOMENTS) : 0;
    if (plan.kind == FAULT_KILL && random_below(&state, 3))
        plan.timer_us = 1 + random_below(&state, 20000);
    return plan;
}

static uint64_t number_of(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static void faults_at_random_moments_end_as_they_should(void **state) {
    (void)state;
    uint64_t seed = number_of("TENURE_FAULT_SEED", 1), first = number_of("TENURE_FAULT_FIRST", 0);
    uint64_t rounds = number_of("TENURE_FAULT_ROUNDS", ROUNDS);
    for (uint64_t number = first; number < first + rounds; number++) {
        int rank_count;
        fault_plan plan = random_plan(seed, number, &rank_count);
        printf("round %llu: kind %d, rank %d of %d, op %d, moment %d, timer %ld us; replay with "
               "TENURE_FAULT_SEED=%llu TENURE_FAULT_FIRST=%llu\n",
               (unsigned long long)number, (int)plan.kind, plan.victim, rank_count, plan.at,
               (int)plan.moment, plan.timer_us, (unsigned long long)seed,
               (unsigned long long)number);
        run_round(&plan, rank_count);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_a_fault_all_ends_well),
        cmocka_unit_test(a_death_at_each_collective_is_named),
        cmocka_unit_test(a_hang_is_timed_out_and_named),
        cmocka_unit_test(another_size_is_named_by_all),
        cmocka_unit_test(a_slow_rank_is_no_fault),
        cmocka_unit_test(faults_at_random_moments_end_as_they_should),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
