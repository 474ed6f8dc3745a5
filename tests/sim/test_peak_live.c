/* The peak of live bytes where calls overlap: of blocks that calls have, those that still wait for
 * the pool's mutex among them, and never of calls that are refused. */
#include <pthread.h>
#include <sched.h>

#include "pool_fixture.h"
#include "thread_cache.h"

enum { SMALL = 4096, OTHER = 1000, ROUNDS = 100, YIELDS = 200 };
#define LIMIT (64 * MIB_BYTES)

/* A thread with a call to make, and what came of it; it begins when it is told. */
typedef struct caller {
    tn_pool *pool;
    tn_stream stream;
    size_t bytes;
    void *kept; /* the block that its cache has, if it has one */
    pthread_barrier_t *begin;
    tn_status status;
    void *block;
} caller;

static void *make_call(void *argument) {
    caller *c = argument;
    tn_status status = tn_alloc(c->pool, SMALL, c->stream, NULL, &c->kept);
    if (status == TN_OK) status = tn_free(c->kept, c->stream);
    c->status = status;
    pthread_barrier_wait(c->begin); /* it has a cache */
    pthread_barrier_wait(c->begin); /* now */
    if (status == TN_OK) c->status = tn_alloc(c->pool, c->bytes, c->stream, NULL, &c->block);
    if (c->block) c->status = tn_free(c->block, c->stream);
    return NULL;
}

static int is_live(tn_pool *pool, const void *address) {
    const tn__piece *block = tn__block_table_find(&pool->heap.blocks, (uintptr_t)address);
    return block && atomic_load(&block->tag) == tn__block_tag((uintptr_t)address, TN__BLOCK_LIVE);
}

/* Its credit is gone, since another block is live: it has the block before it has the mutex. */
static void a_block_is_live_while_its_call_waits(void **state) {
    pool_fixture f = pool_fixture_open(0, TN_BACKING_VMM, LIMIT);
    pthread_barrier_t begin;
    caller c = {.pool = f.pool, .stream = f.a, .bytes = SMALL, .begin = &begin};
    pthread_t thread;
    void *other;
    (void)state;
    pthread_barrier_init(&begin, NULL, 2);
    assert_int_equal(pthread_create(&thread, NULL, make_call, &c), 0);
    pthread_barrier_wait(&begin);
    other = test_take(f.pool, OTHER, f.b);
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, SMALL);
    pthread_mutex_lock(&f.pool->mutex);
    pthread_barrier_wait(&begin);
    while (!is_live(f.pool, c.kept))
        sched_yield();
    tn__caches_stop(f.pool);
    assert_int_equal(f.pool->heap.live_bytes, OTHER + SMALL);
    assert_int_equal(f.pool->peak_live_bytes, OTHER + SMALL);
    tn__caches_go(f.pool);
    pthread_mutex_unlock(&f.pool->mutex);
    pthread_join(thread, NULL);
    EXPECT_OK(c.status);
    assert_ptr_equal(c.block, c.kept);
    test_give(f.pool, other, f.b);
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, OTHER + SMALL);
    pthread_barrier_destroy(&begin);
    pool_fixture_close(&f);
}

/* Both find their caches stopped and come to the mutex at the same time, in either order. */
static void make_two_calls_at_once(pool_fixture *f, caller *taker, caller *refused) {
    pthread_barrier_t begin;
    pthread_t threads[2];
    pthread_barrier_init(&begin, NULL, 3);
    *taker = (caller){.pool = f->pool, .stream = f->a, .bytes = SMALL, .begin = &begin};
    *refused = (caller){.pool = f->pool, .stream = f->b, .bytes = 2 * LIMIT, .begin = &begin};
    assert_int_equal(pthread_create(&threads[0], NULL, make_call, taker), 0);
    assert_int_equal(pthread_create(&threads[1], NULL, make_call, refused), 0);
    pthread_barrier_wait(&begin);
    EXPECT_OK(tn_pool_stats_reset_peaks(f->pool));
    tn__pool_lock_whole(f->pool);
    pthread_barrier_wait(&begin);
    for (int i = 0; i < YIELDS; i++) /* time for both to come; it is no failure if they do not */
        sched_yield();
    tn__pool_unlock_whole(f->pool);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    pthread_barrier_destroy(&begin);
}

static void a_call_that_is_refused_leaves_no_mark(void **state) {
    pool_fixture f = pool_fixture_open(0, TN_BACKING_VMM, LIMIT);
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        caller taker, refused;
        make_two_calls_at_once(&f, &taker, &refused);
        EXPECT_OK(taker.status);
        assert_int_equal(refused.status, TN_OUT_OF_DEVICE_MEMORY);
        assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, SMALL);
    }
    pool_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_is_live_while_its_call_waits),
        cmocka_unit_test(a_call_that_is_refused_leaves_no_mark),
    };
    return cmocka_run_group_tests_name("sim/peak_live", tests, NULL, NULL);
}
