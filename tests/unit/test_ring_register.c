/* A ring's buffer is registered with its communicator once, as a window, else as a buffer, else not
 * at all, on all ranks alike: whatever fails, the ring works, and its statistics say what has
 * become of it. What is registered ends before its memory does. */
#include "test_processes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm_watch.h"
#include "host_alloc.h"
#include "options.h"
#include "registering_support.h"
#include "ring_fixture.h"
#include "tenure_pool.h"
#include "tenure_sharded.h"

enum { ROWS = 64, UNITS = 3, ALLOCATIONS = 40, HANG_US = 1000 * 1000, LONG_US = 60 * 1000 * 1000 };

static const tn_scope NO_SCOPE = {0};

/* ---- one rank, on the simulated device ------------------------------------------------------- */

typedef struct subject {
    ring_fixture f;
    tn_comm *comm;
} subject;

static void open_alone(subject *s, const tn__comm_engine *engine, tn_ring_register wanted) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    registering = (registering_script){.allocated = 0};
    ring_fixture_open(&s->f, 1);
    config.device = s->f.t.device;
    config.rank_count = 1;
    EXPECT_OK(tn__comm_create(&config, engine, &s->comm));
    s->comm->windows.is_known = 1; /* the simulated device keeps no contents to look at */
    s->f.config.comm = s->comm;
    s->f.config.registration = wanted;
    for (int unit = 0; unit < UNITS; unit++)
        ring_fixture_add(&s->f, ROWS, (unsigned char)(unit + 1));
    ring_fixture_make(&s->f);
}

static const tn__comm_engine *simulated(void) {
    const tn__comm_engine *engine = NULL;
    EXPECT_OK(tn__simulated_engine_get(&engine));
    return engine;
}

static void open_registering(subject *s, tn_ring_register wanted) {
    open_alone(s, registering_engine(simulated()), wanted);
}

static void step(ring_fixture *f) {
    for (int unit = 0; unit < UNITS; unit++) {
        EXPECT_OK(tn_ring_acquire(f->ring, unit, NO_SCOPE, f->t.stream));
        ring_fixture_expect_there(f, unit, f->t.stream);
        EXPECT_OK(tn_ring_release(f->ring, unit));
    }
}

static void end(ring_fixture *f, tn_comm *comm, tn_status comm_status) {
    EXPECT_OK(tn_ring_destroy(f->ring));
    f->ring = NULL;
    assert_int_equal(registering.registered, 0);
    EXPECT_STATUS(tn_comm_destroy(comm), comm_status);
    assert_int_equal(registering.allocated, 0);
    ring_fixture_close(f);
}

static void expect_registered(const ring_fixture *f, tn_ring_registered as, tn_status status,
                              const char *words) {
    const tn_ring_stats stats = ring_fixture_stats(f);
    assert_int_equal(stats.registered, as);
    EXPECT_STATUS(stats.register_status, status);
    if (status == TN_OK) assert_string_equal(stats.register_text, "");
    if (!strstr(stats.register_text, words)) fail_msg("no '%s' in: %s", words, stats.register_text);
}

/* "window N " and the like, with the buffer's bytes for each %zu. */
static void expect_log(const ring_fixture *f, const char *first, const char *second) {
    char expected[REGISTERING_LOG_BYTES];
    const size_t bytes = ring_fixture_stats(f).buffer_bytes;
    int used = snprintf(expected, sizeof expected, "%s %zu ", first, bytes);
    if (second) snprintf(expected + used, sizeof expected - (size_t)used, "%s %zu ", second, bytes);
    assert_string_equal(registering.log, expected);
}

/* The buffer is one block that others may map, as an engine needs it, and still the ledger's. */
static int is_shareable(const ring_fixture *f) {
    tn_share share;
    int file = -1;
    tn__error_scope_begin();
    const tn_status status = tn_share_export(f->ring->base, &share, &file);
    (void)tn__error_scope_end(TN_OK);
    if (file >= 0) close(file);
    return status == TN_OK;
}

static int ends_seen;
static void expect_live(const void *address) {
    size_t bytes = 0;
    tn_pool *pool = NULL;
    EXPECT_OK(tn_block_info(address, &bytes, &pool));
    ends_seen++;
}

static void the_buffer_is_a_window_till_it_ends(void **state) {
    subject s;
    (void)state;
    open_registering(&s, TN_RING_REGISTER_AUTO);
    size_t before = fixture_ledger(s.f.t.scope).total_bytes;
    EXPECT_OK(tn_ring_seal(s.f.ring));
    expect_log(&s.f, "window", NULL);
    expect_registered(&s.f, TN_RING_REGISTERED_WINDOW, TN_OK, "");
    assert_int_equal(registering.registered, 1);
    assert_int_equal(fixture_ledger(s.f.t.scope).total_bytes - before,
                     ring_fixture_stats(&s.f).buffer_bytes);
    EXPECT_OK(tn_ledger_check(s.f.t.pool));
    step(&s.f);
    registering.on_end = expect_live;
    ends_seen = 0;
    end(&s.f, s.comm, TN_OK);
    assert_int_equal(ends_seen, 1);
    open_registering(&s, TN_RING_REGISTER_AUTO);
    EXPECT_OK(tn_ring_seal(s.f.ring));
    assert_true(is_shareable(&s.f));
    end(&s.f, s.comm, TN_OK);
}

static void it_is_what_is_wanted(void **state) {
    subject s;
    (void)state;
    open_registering(&s, TN_RING_REGISTER_BUFFER);
    EXPECT_OK(tn_ring_seal(s.f.ring));
    expect_log(&s.f, "buffer", NULL);
    expect_registered(&s.f, TN_RING_REGISTERED_BUFFER, TN_OK, "");
    step(&s.f);
    end(&s.f, s.comm, TN_OK);
    open_registering(&s, TN_RING_REGISTER_NONE);
    EXPECT_OK(tn_ring_seal(s.f.ring));
    assert_string_equal(registering.log, "");
    expect_registered(&s.f, TN_RING_UNREGISTERED, TN_OK, "");
    assert_false(is_shareable(&s.f));
    step(&s.f);
    end(&s.f, s.comm, TN_OK);
}

static void other_engines_are_not_asked(void **state) {
    subject s;
    (void)state;
    open_alone(&s, simulated(), TN_RING_REGISTER_AUTO);
    EXPECT_OK(tn_ring_seal(s.f.ring));
    expect_registered(&s.f, TN_RING_UNREGISTERED, TN_OK, "");
    assert_false(is_shareable(&s.f));
    assert_true(ring_fixture_stats(&s.f).register_us == 0);
    step(&s.f);
    end(&s.f, s.comm, TN_OK);
}

static void what_can_not_be_is_done_without(void **state) {
    subject s;
    (void)state;
    open_registering(&s, TN_RING_REGISTER_AUTO);
    registering.refused_window = 1;
    EXPECT_OK(tn_ring_seal(s.f.ring));
    assert_string_equal(tn_error_last(), "");
    expect_log(&s.f, "window", "buffer");
    expect_registered(&s.f, TN_RING_REGISTERED_BUFFER, TN_INVALID_ARGUMENT, "the script refuses");
    step(&s.f);
    end(&s.f, s.comm, TN_OK);
    open_registering(&s, TN_RING_REGISTER_AUTO);
    registering.refused_window = registering.refused_buffer = 1;
    EXPECT_OK(tn_ring_seal(s.f.ring));
    expect_registered(&s.f, TN_RING_UNREGISTERED, TN_INVALID_ARGUMENT, "the script refuses");
    step(&s.f);
    end(&s.f, s.comm, TN_OK);
}

/* Memory that is registered is not freed: the call is made again. */
static void a_registration_that_does_not_end_keeps_its_memory(void **state) {
    subject s;
    (void)state;
    open_registering(&s, TN_RING_REGISTER_AUTO);
    EXPECT_OK(tn_ring_seal(s.f.ring));
    size_t owned = fixture_owned_bytes(&s.f.t);
    registering.refused_end = 1;
    EXPECT_STATUS(tn_ring_destroy(s.f.ring), TN_INVALID_ARGUMENT);
    assert_int_equal(fixture_owned_bytes(&s.f.t), owned);
    assert_int_equal(registering.registered, 1);
    end(&s.f, s.comm, TN_OK);
}

static void fail_comm(tn_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    (void)tn__comm_fail_locked(comm, TN_FAIL(TN_COMM_ERROR, "a failure of the test"));
    pthread_mutex_unlock(&comm->lock);
}

static void with_a_failed_communicator_all_of_it_ends(void **state) {
    subject s;
    (void)state;
    open_registering(&s, TN_RING_REGISTER_AUTO);
    EXPECT_OK(tn_ring_seal(s.f.ring));
    fail_comm(s.comm);
    end(&s.f, s.comm, TN_COMM_ERROR);
    open_registering(&s, TN_RING_REGISTER_AUTO);
    EXPECT_OK(tn_ring_seal(s.f.ring));
    registering.refused_end = registering.breaks = 1;
    end(&s.f, s.comm, TN_COMM_ERROR); /* whatever the end met itself */
    open_registering(&s, TN_RING_REGISTER_AUTO);
    fail_comm(s.comm);
    EXPECT_OK(tn_ring_seal(s.f.ring)); /* a ring needs its communicator only for gathers */
    expect_registered(&s.f, TN_RING_UNREGISTERED, TN_COMM_ERROR, "a failure of the test");
    end(&s.f, s.comm, TN_COMM_ERROR);
}

/* The N-th allocation fails, once: the seal does, and the next one is as ever. */
static void a_seal_that_fails_leaves_nothing_registered(void **state) {
    (void)state;
    int failures = 0;
    for (long nth = 1; nth <= ALLOCATIONS; nth++) {
        subject s;
        open_registering(&s, TN_RING_REGISTER_AUTO);
        tn__host_alloc_fault(nth, 0);
        const tn_status status = tn_ring_seal(s.f.ring);
        tn__host_alloc_fault(0, 0);
        if (status != TN_OK) {
            failures++;
            assert_int_equal(registering.registered, 0);
            EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
            EXPECT_OK(tn_ring_seal(s.f.ring));
        }
        expect_registered(&s.f, TN_RING_REGISTERED_WINDOW, TN_OK, "");
        step(&s.f);
        end(&s.f, s.comm, TN_OK);
    }
    assert_true(failures > 2);
}

/* What ranks agree on would be a part of the group. */
static void no_ring_is_sealed_in_a_group(void **state) {
    subject s;
    (void)state;
    open_registering(&s, TN_RING_REGISTER_AUTO);
    EXPECT_OK(tn_comm_group_begin(s.comm));
    EXPECT_STATUS(tn_ring_seal(s.f.ring), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("while a group is open");
    assert_string_equal(registering.log, "");
    tn_comm_group_cancel(s.comm);
    EXPECT_OK(tn_ring_seal(s.f.ring));
    expect_registered(&s.f, TN_RING_REGISTERED_WINDOW, TN_OK, "");
    end(&s.f, s.comm, TN_OK);
}

/* A sharded model's ring is registered as the model's configuration says. */
static void a_sharded_models_ring_is_registered_as_it_says(void **state) {
    static const char *const first[] = {"window ", "buffer ", ""};
    (void)state;
    for (int wanted = TN_RING_REGISTER_AUTO; wanted <= TN_RING_REGISTER_NONE; wanted++) {
        tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
        tn_sharded_unit_config unit = TN_SHARDED_UNIT_CONFIG_INIT;
        tn_sharded_model *model = NULL;
        subject s;
        int number = -1;
        open_registering(&s, TN_RING_REGISTER_NONE);
        const tn_tensor initial = fixture_tensor(&s.f.t, TN_FORMAT_PLAIN, 128, 128, "initial");
        const tn_sharded_tensor tensor = {.name = "w",
                                          .format = TN_FORMAT_FP8_BLOCK_2D,
                                          .dtype = TN_E4M3,
                                          .rows = 128,
                                          .cols = 128,
                                          .initial = initial};
        fixture_write(initial, TN_PLANE_DATA, s.f.t.stream);
        config.scope = s.f.t.scope, config.comm = s.comm, config.stream = s.f.t.stream;
        config.ring_registration = (tn_ring_register)wanted;
        unit.tensors = &tensor, unit.tensor_count = 1;
        EXPECT_OK(tn_sharded_create(&config, &model));
        EXPECT_OK(tn_sharded_unit_add(model, &unit, &number));
        EXPECT_OK(tn_sharded_seal(model));
        assert_int_equal(registering.registered, wanted != TN_RING_REGISTER_NONE);
        assert_int_equal(strncmp(registering.log, first[wanted], strlen(first[wanted])), 0);
        EXPECT_OK(tn_sharded_destroy(model));
        end(&s.f, s.comm, TN_OK);
    }
}

/* ---- several ranks, each a process ----------------------------------------------------------- */

enum { ALL_RANKS = -1 };

/* What is planted, on which rank, and what all of them are to have then. */
typedef struct planted {
    int rank;
    int hangs, refused_window, refused_buffer;
    int is_short;    /* each allocation of its seal has failed once, and it seals again */
    int is_checked;  /* TENURE_CHECK_COLLECTIVES */
    int refused_end; /* on the other ranks */
    int is_lost;     /* it can not agree with the others, and all know at once */
    tn_ring_register wanted;
    tn_ring_registered as;
    tn_status status; /* on the other ranks */
    const char *words;
} planted;

/* As often as it takes. What it fails with is this rank's alone: the others wait meanwhile. */
static void seal_short_of_memory(tn_ring *ring) {
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    int failures = 0;
    for (long nth = 1; nth <= ALLOCATIONS && status != TN_OK; nth++) {
        failures++;
        registering.ends_fault = 1;
        tn__host_alloc_fault(nth, 0);
        status = tn_ring_seal(ring);
        tn__host_alloc_fault(0, 0);
        if (status != TN_OK) EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
    }
    EXPECT_OK(status);
    assert_true(failures > 2);
}

static void run_ring(const test_meeting *meeting) {
    const planted *fault = meeting->argument;
    const int is_here = fault->rank == ALL_RANKS || fault->rank == meeting->rank;
    ring_fixture f;
    tn_comm *comm = NULL;
    tn_rendezvous *ranks = NULL;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;
    how.rank = meeting->rank, how.rank_count = meeting->rank_count;
    how.host = "127.0.0.1", how.port = meeting->port;
    how.listen_file = meeting->rank ? -1 : meeting->listener;
    how.timeout_us = LONG_US;
    setenv("TENURE_CHECK_COLLECTIVES", fault->is_checked ? "1" : "0", 1);
    tn__options_reload();
    EXPECT_OK(tn_rendezvous_create(&how, &ranks));
    ring_fixture_open(&f, 0);
    config.device = f.t.device;
    config.rendezvous = ranks;
    config.timeout_us = LONG_US;
    EXPECT_OK(tn__comm_create(&config, registering_engine(tn__tcp_engine_get()), &comm));
    /* One that gives up would be the end of another's that is still being made. */
    EXPECT_OK(tn_rendezvous_gather(ranks, NULL, 0, NULL));
    /* No trial, which fails on all ranks alike. */
    comm->windows.is_known = fault->is_short || fault->is_lost;
    comm->windows.trial_us = fault->hangs ? HANG_US : LONG_US;
    f.config.comm = comm;
    f.config.registration = fault->wanted;
    registering = (registering_script){.hangs = is_here && fault->hangs,
                                       .refused_window = is_here ? fault->refused_window : 0,
                                       .refused_buffer = is_here ? fault->refused_buffer : 0,
                                       .refused_end = is_here ? 0 : fault->refused_end,
                                       .refused_start = is_here && fault->is_lost};
    for (int unit = 0; unit < UNITS; unit++)
        ring_fixture_add(&f, ROWS, (unsigned char)(unit + 1));
    ring_fixture_make(&f);
    if (is_here && fault->is_short)
        seal_short_of_memory(f.ring);
    else
        EXPECT_OK(tn_ring_seal(f.ring));
    if (!is_here) expect_registered(&f, fault->as, fault->status, fault->words);
    assert_int_equal(ring_fixture_stats(&f).registered, fault->as);
    step(&f);
    registering.hangs = 0;
    EXPECT_STATUS(tn_barrier(comm, f.t.stream), fault->is_lost ? TN_COMM_ERROR : TN_OK);
    end(&f, comm, fault->is_lost ? TN_COMM_ERROR : TN_OK);
    tn_rendezvous_destroy(ranks);
}

static void all_ranks_have_a_window(void **state) {
    (void)state;
    const planted none = {.rank = 99, .as = TN_RING_REGISTERED_WINDOW, .words = ""};
    test_ranks_run(2, run_ring, &none);
    test_ranks_run(3, run_ring, &none);
}

static void windows_that_hang_leave_a_buffer(void **state) {
    (void)state;
    const planted hang = {.rank = 0,
                          .hangs = 1,
                          .as = TN_RING_REGISTERED_BUFFER,
                          .status = TN_UNSUPPORTED,
                          .words = "no window"};
    test_ranks_run(2, run_ring, &hang);
}

/* The third window is the ring's own: the trial has had two. */
static void a_rank_that_fails_speaks_for_all(void **state) {
    (void)state;
    planted fault = {.rank = 1,
                     .refused_window = 3,
                     .as = TN_RING_REGISTERED_BUFFER,
                     .status = TN_UNSUPPORTED,
                     .words = "rank 1 could not have its buffer registered"};
    test_ranks_run(3, run_ring, &fault);
    fault.is_checked = 1;
    test_ranks_run(3, run_ring, &fault);
    fault.refused_window = 0, fault.refused_buffer = 1;
    fault.wanted = TN_RING_REGISTER_BUFFER, fault.as = TN_RING_UNREGISTERED;
    test_ranks_run(3, run_ring, &fault);
    fault.is_checked = 0;
    test_ranks_run(3, run_ring, &fault);
}

/* The others have that window, which does not end (the trial has ended two), until the ring does:
 * they try the buffer with the one that has none. */
static void a_window_that_stays_is_no_ranks_business(void **state) {
    (void)state;
    planted fault = {.rank = 1,
                     .refused_window = 3,
                     .refused_end = 3,
                     .as = TN_RING_REGISTERED_BUFFER,
                     .status = TN_UNSUPPORTED,
                     .words = "rank 1 could not have its buffer registered"};
    test_ranks_run(3, run_ring, &fault);
    fault.is_checked = 1;
    test_ranks_run(2, run_ring, &fault);
}

static void a_rank_that_can_not_agree_is_told_of(void **state) {
    (void)state;
    const planted fault = {.rank = 1,
                           .is_lost = 1,
                           .as = TN_RING_UNREGISTERED,
                           .status = TN_COMM_ERROR,
                           .words = "the script starts none"};
    test_ranks_run(3, run_ring, &fault);
}

static void a_rank_seals_again_alone(void **state) {
    (void)state;
    const planted fault = {.rank = 1, .is_short = 1, .as = TN_RING_REGISTERED_WINDOW, .words = ""};
    test_ranks_run(2, run_ring, &fault);
    test_ranks_run(3, run_ring, &fault);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ranks_have_a_window),
        cmocka_unit_test(windows_that_hang_leave_a_buffer),
        cmocka_unit_test(a_rank_that_fails_speaks_for_all),
        cmocka_unit_test(a_window_that_stays_is_no_ranks_business),
        cmocka_unit_test(a_rank_that_can_not_agree_is_told_of),
        cmocka_unit_test(a_rank_seals_again_alone),
        cmocka_unit_test(the_buffer_is_a_window_till_it_ends),
        cmocka_unit_test(it_is_what_is_wanted),
        cmocka_unit_test(other_engines_are_not_asked),
        cmocka_unit_test(what_can_not_be_is_done_without),
        cmocka_unit_test(a_registration_that_does_not_end_keeps_its_memory),
        cmocka_unit_test(with_a_failed_communicator_all_of_it_ends),
        cmocka_unit_test(a_seal_that_fails_leaves_nothing_registered),
        cmocka_unit_test(no_ring_is_sealed_in_a_group),
        cmocka_unit_test(a_sharded_models_ring_is_registered_as_it_says),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
