/* Threads: leases ended by another thread, tensors of one pool used by several, ledgers read
 * meanwhile. Meaningful under ThreadSanitizer; what is asserted holds in any build.
 */
#include "tensor_fixture.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>

#include "books.h"
#include "tenure_lifetime.h"

enum { ROUNDS = 200 };

static void join(pthread_t thread) {
    void *failure = NULL;
    assert_int_equal(pthread_join(thread, &failure), 0);
    if (failure) fail_msg("%s", (const char *)failure);
}

/* ---- leases ended elsewhere ---------------------------------------------------------------- */

enum { SLOTS = 4 };

typedef struct hand_over { /* a ring of leases from one thread to another */
    tn_lease leases[SLOTS];
    sem_t filled, empty;
} hand_over;

static void *end_leases(void *argument) {
    hand_over *ring = argument;
    for (int i = 0; i < ROUNDS; i++) {
        sem_wait(&ring->filled);
        tn_lease lease = ring->leases[i % SLOTS];
        tn_status status = i % 5 ? tn_lease_end(lease) : tn_lease_abandon(lease);
        sem_post(&ring->empty);
        if (status != TN_OK) return (void *)"a lease could not be ended";
        if (tn_lease_end(lease) != TN_STALE_HANDLE) return (void *)"a lease was ended twice";
    }
    return NULL;
}

static void leases_are_ended_by_another_thread(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
    hand_over ring;
    pthread_t ender;
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    assert_int_equal(sem_init(&ring.filled, 0, 0), 0);
    assert_int_equal(sem_init(&ring.empty, 0, SLOTS), 0);
    assert_int_equal(pthread_create(&ender, NULL, end_leases, &ring), 0);
    for (int i = 0; i < ROUNDS; i++) {
        tn_plane_view view;
        tn_plane plane = i % 2 ? TN_PLANE_ROW : TN_PLANE_COL;
        sem_wait(&ring.empty);
        EXPECT_OK(tn_lease_begin(tensor, plane, TN_READ, i % 3 ? f->stream : f->other,
                                 &ring.leases[i % SLOTS], &view));
        sem_post(&ring.filled);
    }
    join(ender);
    sem_destroy(&ring.filled);
    sem_destroy(&ring.empty);
    assert_int_equal(fixture_ledger(f->scope).leases, 0);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
}

/* Two threads end the same lease: one succeeds, the other is told. */
typedef struct contest {
    pthread_barrier_t start;
    tn_lease lease;
    tn_status statuses[2];
} contest;

typedef struct contestant {
    contest *contest;
    int number;
} contestant;

static void *end_one(void *argument) {
    contestant *self = argument;
    pthread_barrier_wait(&self->contest->start);
    self->contest->statuses[self->number] = tn_lease_end(self->contest->lease);
    return NULL;
}

static void of_two_threads_one_ends_the_lease(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_PLAIN, 8, 8, "y");
    for (int round = 0; round < 50; round++) {
        contest race;
        contestant sides[2] = {{&race, 0}, {&race, 1}};
        pthread_t threads[2];
        tn_plane_view view;
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, f->stream, &race.lease, &view));
        assert_int_equal(pthread_barrier_init(&race.start, NULL, 2), 0);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(pthread_create(&threads[i], NULL, end_one, &sides[i]), 0);
        }
        for (int i = 0; i < 2; i++)
            join(threads[i]);
        pthread_barrier_destroy(&race.start);
        int winner = race.statuses[0] == TN_OK ? 0 : 1;
        assert_int_equal(race.statuses[winner], TN_OK);
        assert_int_equal(race.statuses[!winner], TN_STALE_HANDLE);
    }
}

/* ---- one pool, several threads ------------------------------------------------------------- */

typedef struct worker {
    const tensor_fixture *fixture;
    int number;
} worker;

#define TRY(call)                                                                                  \
    do {                                                                                           \
        if ((call) != TN_OK) return #call;                                                         \
    } while (0)

/* A scope and tensors of its own, below the shared root. */
static const char *one_step(const tensor_fixture *f, tn_stream stream) {
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_ledger ledger = TN_LEDGER_INIT;
    tn_scope step;
    tn_tensor tensor;
    tn_plane_view view;
    tn_lease lease;
    scope_config.parent = f->scope;
    TRY(tn_scope_create(&scope_config, &step));
    config.format = TN_FORMAT_FP8_BLOCK_2D, config.dtype = TN_E4M3;
    config.rank = 2, config.shape[0] = config.shape[1] = 8;
    TRY(tn_tensor_create(step, &config, &tensor));
    TRY(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, stream, &lease, &view));
    TRY(tn_lease_end(lease));
    TRY(tn_plane_require(tensor, TN_PLANE_COL, stream));
    TRY(tn_scope_ledger(step, &ledger));
    if (ledger.total_bytes != 160) return "the step's ledger is not its own";
    if (ledger.peak_total_bytes != 160) return "the step's peak is not its own";
    TRY(tn_ledger_check(f->pool));
    TRY(tn_scope_close(step));
    return NULL;
}

static void *work(void *argument) {
    worker *self = argument;
    const tensor_fixture *f = self->fixture;
    tn_stream stream;
    if (tn_stream_create(f->device, &stream) != TN_OK) return (void *)"no stream";
    for (int i = 0; i < ROUNDS / 4; i++) {
        const char *failure = one_step(f, stream);
        if (failure) return (void *)failure;
    }
    if (tn_stream_destroy(f->device, stream) != TN_OK)
        return (void *)"the stream was not destroyed";
    return NULL;
}

static void threads_share_a_pool_and_a_root(void **state) {
    const tensor_fixture *f = *state;
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    worker workers[THREADS];
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){f, i};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < ROUNDS; i++)
        EXPECT_OK(tn_ledger_check(f->pool));
    for (int i = 0; i < THREADS; i++)
        join(threads[i]);
    assert_int_equal(fixture_owned_bytes(f), 0);
    assert_true(fixture_ledger(f->scope).peak_total_bytes >= 160);
    assert_true(fixture_ledger(f->scope).peak_total_bytes <= THREADS * (size_t)160);
}

/* Root scopes come and go: the books of the pool are made and given back under contention. */
static void *open_and_close_roots(void *argument) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.pool = argument;
    for (int i = 0; i < ROUNDS; i++) {
        tn_scope scope;
        if (tn_scope_create(&config, &scope) != TN_OK) return (void *)"no root";
        if (tn_ledger_check(config.pool) != TN_OK) return (void *)"no balance";
        if (tn_scope_close(scope) != TN_OK) return (void *)"the root was not closed";
    }
    return NULL;
}

static void roots_come_and_go_in_several_threads(void **state) {
    const tensor_fixture *f = *state;
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    pthread_t threads[4];
    tn_pool *pool;
    EXPECT_OK(tn_pool_create(f->device, &config, &pool));
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, open_and_close_roots, pool), 0);
    }
    for (int i = 0; i < 20; i++) { /* streams end meanwhile, which the books hear of */
        tn_stream stream;
        EXPECT_OK(tn_stream_create(f->device, &stream));
        EXPECT_OK(tn_stream_destroy(f->device, stream));
    }
    for (int i = 0; i < 4; i++)
        join(threads[i]);
    EXPECT_OK(tn_pool_destroy(pool));
}

/* ---- the end of a pool's last scope ---------------------------------------------------------- */

/* Another thread closes a scope between the moment when the last one of this pool is gone and the
 * return of its close: the books of both are then that thread's to free. */
typedef struct other_close {
    const tensor_fixture *base;
    tn_pool *pool; /* whose last scope is being closed */
    sem_t begun;
} other_close;

static void *close_another(void *argument) {
    other_close *other = argument;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = other->base->scope;
    sem_wait(&other->begun);
    if (tn_scope_create(&config, &scope) != TN_OK) return (void *)"no scope could be made";
    return tn_scope_close(scope) == TN_OK ? NULL : (void *)"the scope could not be closed";
}

static void let_the_other_free(void *context) {
    other_close *other = context;
    sem_post(&other->begun);
    for (tn__books *books; (books = tn__books_find(other->pool)) != NULL; sched_yield())
        tn__unlock(books->lock);
}

static void a_closed_scope_leaves_its_pool_and_its_device(void **state) {
    tensor_fixture own;
    other_close other = {.base = *state};
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    tn_tensor adopted;
    pthread_t thread;
    tensor_fixture_open(&own);
    other.pool = own.pool;
    tn_tensor tensor = fixture_tensor(&own, TN_FORMAT_PLAIN, 8, 8, "offloaded");
    fixture_write(tensor, TN_PLANE_DATA, own.stream);
    EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_DATA, own.stream)); /* takes some time to end */
    memory.release = let_the_other_free;
    memory.context = &other;
    config.rank = 1; /* of no elements */
    EXPECT_OK(tn_tensor_adopt(own.scope, &config, &memory, &adopted));
    EXPECT_OK(tn_stream_synchronize(own.device, own.stream));
    EXPECT_OK(tn_stream_destroy(own.device, own.stream));
    EXPECT_OK(tn_stream_destroy(own.device, own.other));
    assert_int_equal(sem_init(&other.begun, 0, 0), 0);
    assert_int_equal(pthread_create(&thread, NULL, close_another, &other), 0);
    EXPECT_OK(tn_scope_close(own.scope));
    EXPECT_OK(tn_pool_destroy(own.pool));
    EXPECT_OK(tn_device_destroy(own.device));
    join(thread);
    sem_destroy(&other.begun);
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, tensor_fixture_tear_down)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(leases_are_ended_by_another_thread),
        WITH_FIXTURE(of_two_threads_one_ends_the_lease),
        WITH_FIXTURE(threads_share_a_pool_and_a_root),
        WITH_FIXTURE(roots_come_and_go_in_several_threads),
        WITH_FIXTURE(a_closed_scope_leaves_its_pool_and_its_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
