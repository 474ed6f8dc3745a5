/* Real threads that do all that is thread-safe at once: blocks that one thread allocates and
 * another frees, uses, trims, reports, streams and pools that come and go. Nothing is torn:
 * statuses are right, books balance while all run, and in the end nothing is left; under the
 * thread and address sanitizers, no memory is touched without order. On both drivers. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "tenure_pool.h"
#include "test_pools.h"

enum { THREADS = 6, SLOTS = 16, KEPT = 6 };

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { STEPS = 2000 };
#else
enum { STEPS = 8000 };
#endif

typedef struct passed {
    void *block;
    tn_stream last; /* that used it */
} passed;

typedef struct shared {
    tn_device *device;
    tn_pool *pools[2];
    pthread_mutex_t mutex;
    passed slots[SLOTS];
    atomic_ulong allocs;
    atomic_ulong frees;
} shared;

typedef struct worker {
    shared *s;
    pthread_t thread;
    tn_stream stream;
    uint64_t random;
    passed kept[KEPT];
    char failure[512];
} worker;

static size_t below(worker *w, size_t limit) {
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return (size_t)(w->random >> 11) % limit;
}

/* 1 if the status is right; the first one that is not is kept. */
static int is_ok(worker *w, tn_status status, const char *what) {
    if (status == TN_OK) return 1;
    if (!w->failure[0]) {
        snprintf(w->failure, sizeof w->failure, "%s: %s: %.400s", what, tn_status_name(status),
                 tn_error_last());
    }
    return 0;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static size_t choose_bytes(worker *w) {
    switch (below(w, 8)) {
    case 0: return 1 + below(w, 3 << 20);
    case 1: return 512 << below(w, 10);
    default: return 1 + below(w, 20000);
    }
}

static void use(worker *w, passed *block) {
    if (block->last != w->stream) {
        if (!is_ok(w, tn_stream_wait(w->s->device, w->stream, block->last), "tn_stream_wait"))
            return;
        if (!is_ok(w, tn_record_use(block->block, w->stream), "tn_record_use")) return;
    }
    (void)is_ok(w, tn_fill(w->s->device, block->block, 7, 1, w->stream), "tn_fill");
    block->last = w->stream;
}

static void alloc(worker *w, passed *out) {
    void *block = NULL;
    if (!is_ok(w, tn_alloc(w->s->pools[below(w, 2)], choose_bytes(w), w->stream, NULL, &block),
               "tn_alloc"))
        return;
    atomic_fetch_add(&w->s->allocs, 1);
    *out = (passed){block, w->stream};
}

static void give(worker *w, passed *block) {
    if (!block->block) return;
    if (!is_ok(w, tn_free(block->block, w->stream), "tn_free")) return;
    atomic_fetch_add(&w->s->frees, 1);
    block->block = NULL;
}

static void step_block(worker *w) {
    passed *kept = &w->kept[below(w, KEPT)];
    if (!kept->block) {
        alloc(w, kept);
    } else if (below(w, 3) == 0) {
        use(w, kept);
    } else {
        give(w, kept);
    }
}

/* Leaves a block for others and takes what another has left. */
static void step_pass(worker *w) {
    passed *slot = &w->s->slots[below(w, SLOTS)];
    passed *kept = &w->kept[below(w, KEPT)];
    passed taken;
    pthread_mutex_lock(&w->s->mutex);
    taken = *slot;
    *slot = *kept;
    pthread_mutex_unlock(&w->s->mutex);
    *kept = taken;
    if (taken.block) use(w, kept);
}

/* ---- all the rest --------------------------------------------------------------------------- */

static void look(worker *w) {
    tn_pool *pool = w->s->pools[below(w, 2)];
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    char text[4096];
    if (!is_ok(w, tn_pool_stats_get(pool, &stats), "tn_pool_stats_get")) return;
    if (stats.live_bytes + stats.cached_bytes + stats.pending_bytes + stats.partial_bytes +
            stats.driver_held_bytes !=
        stats.reserved_bytes)
        snprintf(w->failure, sizeof w->failure, "the books do not balance");
    (void)is_ok(w, tn_pool_check(pool), "tn_pool_check");
    (void)tn_pool_report(pool, TN_REPORT_JSON, text, sizeof text);
}

static void stream_comes_and_goes(worker *w) {
    tn_device *device = w->s->device;
    tn_stream stream = NULL;
    void *block = NULL;
    if (!is_ok(w, tn_stream_create(device, &stream), "tn_stream_create")) return;
    if (is_ok(w, tn_alloc(w->s->pools[0], 3000, stream, NULL, &block), "tn_alloc")) {
        atomic_fetch_add(&w->s->allocs, 1);
        (void)is_ok(w, tn_fill(device, block, 1, 3000, stream), "tn_fill");
        if (is_ok(w, tn_free(block, stream), "tn_free")) atomic_fetch_add(&w->s->frees, 1);
    }
    (void)is_ok(w, tn_stream_destroy(device, stream), "tn_stream_destroy");
}

static void pool_comes_and_goes(worker *w) {
    tn_pool *pool = NULL;
    void *block = NULL;
    if (!is_ok(w, tn_pool_create(w->s->device, NULL, &pool), "tn_pool_create")) return;
    if (is_ok(w, tn_alloc(pool, 70000, w->stream, NULL, &block), "tn_alloc")) {
        (void)is_ok(w, tn_free(block, w->stream), "tn_free");
    }
    (void)is_ok(w, tn_pool_destroy(pool), "tn_pool_destroy");
}

static void events_come_and_go(worker *w) {
    tn_pool *pool = w->s->pools[1];
    tn_status status = tn_pool_events_begin(pool, 64, 0);
    size_t count = 0;
    if (status == TN_INVALID_STATE) return;
    if (!is_ok(w, status, "tn_pool_events_begin")) return;
    step_block(w);
    (void)is_ok(w, tn_pool_events_read(pool, NULL, 0, &count, NULL), "tn_pool_events_read");
    (void)is_ok(w, tn_pool_events_end(pool), "tn_pool_events_end");
}

static void step_rare(worker *w) {
    switch (below(w, 8)) {
    case 0: stream_comes_and_goes(w); break;
    case 1: pool_comes_and_goes(w); break;
    case 2:
        (void)is_ok(w, tn_pool_trim(w->s->pools[below(w, 2)], below(w, 64 << 20), NULL),
                    "tn_pool_trim");
        break;
    case 3: (void)is_ok(w, tn_stream_synchronize(w->s->device, w->stream), "synchronize"); break;
    case 4: (void)is_ok(w, tn_pool_stats_reset_peaks(w->s->pools[0]), "reset_peaks"); break;
    case 5: events_come_and_go(w); break;
    default: look(w); break;
    }
}

static void *work(void *argument) {
    worker *w = argument;
    for (int step = 0; step < STEPS && !w->failure[0]; step++) {
        size_t choice = below(w, 100);
        if (choice < 4)
            step_rare(w);
        else if (choice < 25)
            step_pass(w);
        else
            step_block(w);
    }
    for (int i = 0; i < KEPT; i++)
        give(w, &w->kept[i]);
    return NULL;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static void run_workers(shared *s) {
    static worker workers[THREADS];
    memset(workers, 0, sizeof workers);
    for (int i = 0; i < THREADS; i++) {
        workers[i].s = s;
        workers[i].random = 88172645463325252u + (uint64_t)i * 977;
        workers[i].stream = test_open_stream(s->device);
    }
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    for (int i = 0; i < THREADS; i++) {
        if (workers[i].failure[0]) fail_msg("thread %d: %s", i, workers[i].failure);
    }
    for (int i = 0; i < SLOTS; i++)
        give(&workers[0], &s->slots[i]);
    for (int i = 0; i < THREADS; i++)
        EXPECT_OK(tn_stream_destroy(s->device, workers[i].stream));
}

static void stress(tn_device *device) {
    static shared s;
    tn_pool_stats first;
    tn_pool_stats second;
    memset(&s, 0, sizeof s);
    s.device = device;
    s.pools[0] = test_open_pool(device, TN_BACKING_AUTO, 0);
    s.pools[1] = test_open_pool(device, TN_BACKING_PLAIN, 0);
    pthread_mutex_init(&s.mutex, NULL);
    run_workers(&s);
    first = test_pool_stats(s.pools[0]);
    second = test_pool_stats(s.pools[1]);
    assert_int_equal(first.allocs + second.allocs, atomic_load(&s.allocs));
    assert_int_equal(first.frees + second.frees, atomic_load(&s.frees));
    assert_int_equal(first.live_bytes + second.live_bytes, 0);
    EXPECT_OK(tn_pool_destroy(s.pools[0]));
    EXPECT_OK(tn_pool_destroy(s.pools[1]));
    pthread_mutex_destroy(&s.mutex);
    test_close_sim(device);
}

static void threads_do_everything_at_once_on_the_host(void **state) {
    (void)state;
    stress(test_open_host());
}

static void threads_do_everything_at_once_on_the_simulated_device(void **state) {
    (void)state;
    stress(test_open_sim(0, 0));
}

static void threads_do_everything_at_once_where_memory_is_short(void **state) {
    (void)state;
    stress(test_open_sim(256 * MIB_BYTES, 0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_do_everything_at_once_on_the_host),
        cmocka_unit_test(threads_do_everything_at_once_on_the_simulated_device),
        cmocka_unit_test(threads_do_everything_at_once_where_memory_is_short),
    };
    return cmocka_run_group_tests_name("api/pool_stress", tests, NULL, NULL);
}
