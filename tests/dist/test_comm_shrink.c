/* Going on without some ranks: after deaths and hangs, and by choice; and a training that goes on
 * from its checkpoint, with the bits of one rank that saw what the ranks saw.
 *
 * Ranks are forked processes, TENURE_TEST_RANKS of them (3 if that is not set), over TCP, or over
 * NCCL (TENURE_TEST_ENGINE, TENURE_RANKS_ON: see ranks_support.h).
 */
#include "model_support.h"

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tenure_checkpoint.h"

enum { RANKS_MAX = 16, MICROSECONDS = 1000000, STEPS_BEFORE = 2, STEPS_AFTER = 3, LAYERS = 2 };

typedef struct loss {
    int victim;
    int hangs;
} loss;

static rank_fixture all;
static atomic_int *passed; /* shared by the ranks: how often one has come to a point */

/* A rank that is about to end waits until all ranks that are left have come as far: what they are
 * in would else end with it. */
static void pass(int is_last, int awaited) {
    atomic_fetch_add(passed, 1);
    while (is_last && atomic_load(passed) < awaited)
        sched_yield();
}

static int rank_count_of_test(void) {
    const char *text = getenv("TENURE_TEST_RANKS");
    return text ? atoi(text) : 3;
}

static uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * MICROSECONDS + (uint64_t)now.tv_nsec / 1000;
}

static int is_nccl(void) {
    const char *engine = getenv("TENURE_TEST_ENGINE");
    return engine && strcmp(engine, "NCCL") == 0;
}

/* A deadline that a test waits for, long enough to join by: NCCL's first communicator of a process
 * takes seconds on a GPU. */
static uint64_t short_us(void) {
    const char *place = getenv("TENURE_RANKS_ON");
    return (place && strcmp(place, "cuda") == 0 ? 15 : 5) * (uint64_t)MICROSECONDS;
}

/* victim: who does not end well; -1: all do. */
static void run_ranks(int count, const loss *plan, int victim, test_rank_body body) {
    pid_t ranks[RANKS_MAX];
    test_meeting meeting = test_meeting_open();
    meeting.argument = plan;
    passed = mmap(NULL, sizeof *passed, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(passed != MAP_FAILED);
    cmocka_set_test_filter(NULL);
    for (int rank = 0; rank < count; rank++)
        ranks[rank] = test_rank_begin(&meeting, rank, count, body);
    test_meeting_close(&meeting);
    for (int rank = 0; rank < count; rank++)
        if (rank != victim) test_rank_end(ranks[rank]);
    munmap(passed, sizeof *passed);
    if (victim < 0) return;
    kill(ranks[victim], SIGKILL);
    test_rank_end_killed(ranks[victim]);
}

static void run_round(const loss *plan, int victim, test_rank_body body) {
    run_ranks(rank_count_of_test(), plan, victim, body);
}

/* The sum of 1, 2, 4 ... of the ranks by their first numbers: who has taken part. */
static int takes_part(tn_comm *comm, int first_rank) {
    float value = (float)(1 << first_rank), sum = 0.0f;
    float *word = test_take(all.pool, sizeof value, all.stream);
    EXPECT_OK(tn_copy(all.device, word, &value, sizeof value, all.stream));
    EXPECT_OK(tn_all_reduce(comm, word, word, 1, TN_FP32, TN_REDUCE_SUM, all.stream));
    EXPECT_OK(tn_copy(all.device, &sum, word, sizeof sum, all.stream));
    EXPECT_OK(tn_comm_wait(comm));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    test_give(all.pool, word, all.stream);
    return (int)sum;
}

static int everybody(void) { return (1 << tn_rendezvous_size(all.rendezvous)) - 1; }

/* ---- lost ranks ----------------------------------------------------------------------------- */

/* Until the communicator has failed here, too. */
static tn_status await_failure(void) {
    tn_status status = tn_barrier(all.comm, all.stream);
    if (status == TN_OK) status = tn_comm_wait(all.comm);
    assert_true(status == TN_COMM_ERROR || status == TN_COMM_TIMEOUT);
    return status;
}

/* Several that are left without the store of rank 0 shrink by ncclCommShrink, which refuses if NCCL
 * has met the death itself, as it does on the host: then this rank ends here, with all else in
 * order. */
static tn_comm *shrink_or_end(tn_comm *comm, int victim, tn_status failure) {
    tn_comm *shrunk = NULL;
    const int left = tn_comm_size(comm) - 1, is_by_store = comm == all.comm && victim != 0;
    tn_status status = tn_comm_shrink(comm, &victim, 1, "survivors", &shrunk);
    int may_refuse = is_nccl() && left > 1 && !is_by_store;
    if (!may_refuse || (status == TN_OK && all.place == RANKS_ON_CUDA)) {
        EXPECT_STATUS(status, TN_OK);
        return shrunk;
    }
    assert_true(status == TN_COMM_ERROR || all.place == RANKS_ON_CUDA);
    EXPECT_ERROR_HAS("make a new rendezvous");
    assert_null(shrunk);
    EXPECT_STATUS(tn_comm_destroy(comm), failure);
    if (comm != all.comm) EXPECT_STATUS(tn_comm_destroy(all.comm), TN_COMM_ERROR);
    all.comm = NULL;
    ranks_close(&all);
    fflush(stdout);
    _exit(0);
}

/* The survivors make sub-groups as any communicator's ranks do. */
static void split_survivors(tn_comm *shrunk, int first_rank, int survivors) {
    tn_comm *part = NULL;
    EXPECT_OK(tn_comm_split(shrunk, 0, first_rank, "part", &part));
    assert_int_equal(takes_part(part, first_rank), survivors);
    EXPECT_OK(tn_comm_destroy(part));
}

static void lose_and_go_on(const test_meeting *meeting) {
    const loss *plan = meeting->argument;
    tn_comm *again = NULL;
    int mine = meeting->rank, excluded[] = {plan->victim};
    all = ranks_open_forked(meeting, plan->hangs ? short_us() : 0);
    assert_int_equal(takes_part(all.comm, mine), everybody());
    pass(mine == plan->victim, meeting->rank_count);
    if (mine == plan->victim && !plan->hangs) raise(SIGKILL);
    while (mine == plan->victim)
        pause();
    tn_status status = await_failure();
    tn_comm *shrunk = shrink_or_end(all.comm, plan->victim, status);
    EXPECT_STATUS(tn_comm_shrink(all.comm, excluded, 1, NULL, &again), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("it has been already");
    EXPECT_STATUS(tn_barrier(all.comm, all.stream), status);
    assert_string_equal(tn_comm_name(shrunk), "survivors");
    assert_int_equal(tn_comm_size(shrunk), meeting->rank_count - 1);
    assert_int_equal(tn_comm_rank(shrunk), mine - (mine > plan->victim));
    assert_int_equal(takes_part(shrunk, mine), everybody() - (1 << plan->victim));
    split_survivors(shrunk, mine, everybody() - (1 << plan->victim));
    if (plan->hangs) { /* rank 0 would wait for it to leave */
        EXPECT_STATUS(tn_comm_destroy(all.comm), status);
        EXPECT_OK(tn_comm_destroy(shrunk));
        fflush(stdout);
        _exit(0);
    }
    int survivors = everybody() - (1 << plan->victim);
    ranks_go_on(&all, shrunk, status);
    assert_int_equal(takes_part(shrunk, mine), survivors);
    ranks_close(&all);
}

static void ranks_go_on_without_one_that_died(void **state) {
    (void)state;
    for (int victim = 0; victim < rank_count_of_test(); victim++) {
        const loss plan = {.victim = victim};
        run_round(&plan, victim, lose_and_go_on);
    }
}

static void ranks_go_on_without_one_that_hangs(void **state) {
    (void)state;
    const loss plan = {.victim = rank_count_of_test() - 1, .hangs = 1};
    run_round(&plan, plan.victim, lose_and_go_on);
}

/* One after the other leaves, down to the last rank: each time what is left is shrunk again. */
static void lose_all_others(const test_meeting *meeting) {
    tn_comm *comm, *next;
    int left = meeting->rank_count, mine = meeting->rank, awaited = 0;
    all = ranks_open_forked(meeting, 0);
    comm = all.comm;
    for (; left > 1; left--) {
        tn_status status = TN_OK;
        assert_int_equal(takes_part(comm, mine), (1 << left) - 1);
        pass(mine == left - 1, awaited += left);
        if (mine == left - 1) _exit(0); /* without a word */
        while (status == TN_OK) {
            status = tn_barrier(comm, all.stream);
            if (status == TN_OK) status = tn_comm_wait(comm);
        }
        next = shrink_or_end(comm, left - 1, status);
        if (comm != all.comm) EXPECT_STATUS(tn_comm_destroy(comm), status);
        comm = next;
    }
    ranks_go_on(&all, comm, TN_COMM_ERROR);
    assert_int_equal(takes_part(comm, 0), 1);
    ranks_close(&all);
}

static void what_was_shrunk_is_shrunk_again(void **state) {
    (void)state;
    run_round(NULL, -1, lose_all_others);
}

/* Nobody shrinks it: what is on the stream ends all the same, and the communicator with it. */
static void keep_too_long(const test_meeting *meeting) {
    const loss *plan = meeting->argument;
    all = ranks_open_forked(meeting, short_us());
    assert_int_equal(takes_part(all.comm, meeting->rank), everybody());
    pass(meeting->rank == plan->victim, meeting->rank_count);
    if (meeting->rank == plan->victim) raise(SIGKILL);
    tn_status status = await_failure();
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    EXPECT_STATUS(tn_comm_destroy(all.comm), status);
    all.comm = NULL;
    ranks_close(&all);
}

static void what_is_kept_ends_by_itself(void **state) {
    (void)state;
    const loss plan = {.victim = rank_count_of_test() - 1};
    run_round(&plan, plan.victim, keep_too_long);
}

/* ---- by choice ------------------------------------------------------------------------------ */

static void choose(const test_meeting *meeting) {
    tn_comm *shrunk = NULL;
    int mine = meeting->rank, excluded[] = {0};
    all = ranks_open_forked(meeting, 0);
    EXPECT_STATUS(tn_comm_shrink(NULL, excluded, 1, NULL, &shrunk), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_comm_shrink(all.comm, excluded, 1, NULL, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_comm_shrink(all.comm, NULL, 1, NULL, &shrunk), TN_INVALID_ARGUMENT);
    const int wrong[][2] = {{-1, 1}, {99, 1}, {mine, 1}, {!mine, !mine}};
    for (size_t i = 0; i < 4 && all.count > 2; i++) {
        EXPECT_STATUS(tn_comm_shrink(all.comm, wrong[i], i == 3 ? 2 : 1, NULL, &shrunk),
                      TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS("tn_comm_shrink of communicator ranks");
    }
    EXPECT_OK(tn_comm_group_begin(all.comm));
    const int other[] = {!mine};
    EXPECT_STATUS(tn_comm_shrink(all.comm, other, 1, NULL, &shrunk), TN_INVALID_STATE);
    tn_comm_group_cancel(all.comm);
    assert_null(shrunk);
    if (mine > 0) {
        EXPECT_OK(tn_comm_shrink(all.comm, excluded, 1, "but the first", &shrunk));
        assert_int_equal(takes_part(shrunk, mine), everybody() - 1);
    }
    assert_int_equal(takes_part(all.comm, mine), everybody());
    EXPECT_OK(tn_comm_destroy(shrunk));
    ranks_close(&all);
}

static void ranks_may_be_left_out_by_choice(void **state) {
    (void)state;
    run_round(NULL, -1, choose);
}

/* Who was left out is nobody's rank any more. */
static void die_left_out(const test_meeting *meeting) {
    const int last = meeting->rank_count - 1, excluded[] = {last};
    tn_comm *shrunk = NULL;
    all = ranks_open_forked(meeting, 0);
    assert_int_equal(takes_part(all.comm, meeting->rank), everybody());
    if (meeting->rank != last) EXPECT_OK(tn_comm_shrink(all.comm, excluded, 1, NULL, &shrunk));
    pass(meeting->rank == last, meeting->rank_count);
    if (meeting->rank == last) raise(SIGKILL);
    tn_status status = await_failure();
    for (int i = 0; i < 20; i++)
        assert_int_equal(takes_part(shrunk, meeting->rank), (1 << last) - 1);
    ranks_go_on(&all, shrunk, status);
    assert_int_equal(takes_part(shrunk, meeting->rank), (1 << last) - 1);
    ranks_close(&all);
}

static void who_was_left_out_may_die(void **state) {
    (void)state;
    run_round(NULL, rank_count_of_test() - 1, die_left_out);
}

/* Rank 1 was to stay and does not come: the others learn that, and go on without it. */
static void miss_one(const test_meeting *meeting) {
    const int last = meeting->rank_count - 1, first_list[] = {last}, next_list[] = {last, 1};
    tn_comm *shrunk = NULL;
    all = ranks_open_forked(meeting, short_us());
    assert_int_equal(takes_part(all.comm, meeting->rank), everybody());
    pass(meeting->rank == last, meeting->rank_count);
    if (meeting->rank == last) _exit(0);
    tn_status status = await_failure();
    if (meeting->rank != 1) {
        EXPECT_STATUS(tn_comm_shrink(all.comm, first_list, 1, NULL, &shrunk), TN_COMM_TIMEOUT);
        EXPECT_ERROR_HAS("was not shrunk to rank");
        assert_null(shrunk);
        EXPECT_OK(tn_comm_shrink(all.comm, next_list, 2, NULL, &shrunk));
        assert_int_equal(tn_comm_size(shrunk), meeting->rank_count - 2);
        EXPECT_OK(tn_comm_destroy(shrunk));
    }
    EXPECT_STATUS(tn_comm_destroy(all.comm), status);
    all.comm = NULL;
    ranks_close(&all);
}

static void who_does_not_come_is_left_out_next(void **state) {
    (void)state;
    if (is_nccl()) return; /* keeps a failed communicator for one timeout, which is over then */
    run_ranks(3, NULL, -1, miss_one);
}

/* First rank 0 comes alone, then rank 1, each till its deadline; then both, rank 1 first: what one
 * has put in the store for an attempt that is over is not for the next. */
static void come_one_by_one(const test_meeting *meeting) {
    const int last = meeting->rank_count - 1, excluded[] = {last};
    tn_comm *shrunk = NULL;
    all = ranks_open_forked(meeting, short_us());
    assert_int_equal(takes_part(all.comm, meeting->rank), everybody());
    for (int alone = 0; alone < 2; alone++) {
        if (meeting->rank == alone) {
            EXPECT_STATUS(tn_comm_shrink(all.comm, excluded, 1, NULL, &shrunk), TN_COMM_TIMEOUT);
            assert_null(shrunk);
        }
        pass(1, (alone + 1) * meeting->rank_count);
    }
    const uint64_t begin_us = now_us();
    while (meeting->rank != 1 && now_us() - begin_us < MICROSECONDS / 4)
        sched_yield(); /* if rank 1 is slow nothing is shown */
    if (meeting->rank != last) {
        EXPECT_OK(tn_comm_shrink(all.comm, excluded, 1, NULL, &shrunk));
        assert_int_equal(takes_part(shrunk, meeting->rank), (1 << last) - 1);
        EXPECT_OK(tn_comm_destroy(shrunk));
    }
    pass(1, 3 * meeting->rank_count);
    const tn_status status = await_failure();
    EXPECT_STATUS(tn_comm_destroy(all.comm), status);
    all.comm = NULL;
    ranks_close(&all);
}

static void ranks_go_on_after_a_shrink_that_timed_out(void **state) {
    (void)state;
    if (rank_count_of_test() > 2) run_ranks(3, NULL, -1, come_one_by_one);
}

/* Rank 0 comes to the next attempt only: others have met each other in the first, and do again. */
static void come_without_first(const test_meeting *meeting) {
    const int last = meeting->rank_count - 1, excluded[] = {last};
    tn_comm *shrunk = NULL;
    all = ranks_open_forked(meeting, short_us());
    assert_int_equal(takes_part(all.comm, meeting->rank), everybody());
    if (meeting->rank != 0 && meeting->rank != last) {
        EXPECT_STATUS(tn_comm_shrink(all.comm, excluded, 1, NULL, &shrunk), TN_COMM_TIMEOUT);
        assert_null(shrunk);
    }
    pass(1, meeting->rank_count);
    if (meeting->rank != last) {
        EXPECT_OK(tn_comm_shrink(all.comm, excluded, 1, NULL, &shrunk));
        assert_int_equal(takes_part(shrunk, meeting->rank), (1 << last) - 1);
        EXPECT_OK(tn_comm_destroy(shrunk));
    }
    pass(1, 2 * meeting->rank_count);
    const tn_status status = await_failure();
    EXPECT_STATUS(tn_comm_destroy(all.comm), status);
    all.comm = NULL;
    ranks_close(&all);
}

static void ranks_go_on_after_some_have_come_without_the_first(void **state) {
    (void)state;
    if (rank_count_of_test() > 2) run_ranks(4, NULL, -1, come_without_first);
}

/* ---- training ------------------------------------------------------------------------------- */

enum { KINDS = 3, ENTRIES = LAYERS * BLOCK_PARTS * KINDS + 1 };

/* Masters and moments of all weights, and the count of steps: names, and who holds what. */
typedef struct state_of_training {
    char path[64], names[ENTRIES][32];
    tn_checkpoint_entry entries[ENTRIES];
    tn_checkpoint_piece pieces[ENTRIES];
    tn_checkpoint_config config;
    size_t count;
} state_of_training;

static void add_entry(state_of_training *s, int layer, int part, int kind, int64_t elements,
                      tn_tensor memory, tn_checkpoint_piece piece) {
    tn_checkpoint_entry *entry = &s->entries[s->count];
    snprintf(s->names[s->count], sizeof s->names[0], "%d.%d.%d", layer, part, kind);
    s->pieces[s->count] = piece;
    *entry = (tn_checkpoint_entry){.name = s->names[s->count], .dtype = TN_FP32, .rank = 1};
    entry->shape[0] = elements;
    entry->memory = piece.count ? memory : (tn_tensor){0};
    entry->plane = TN_PLANE_DATA;
    entry->pieces = &s->pieces[s->count];
    entry->piece_count = piece.count > 0;
    s->count++;
}

static state_of_training *begin_state(const char *path, tn_comm *comm, tn_scope scope) {
    state_of_training *s = calloc(1, sizeof *s);
    assert_non_null(s);
    snprintf(s->path, sizeof s->path, "%s", path);
    s->config = (tn_checkpoint_config)TN_CHECKPOINT_CONFIG_INIT;
    s->config.path = s->path, s->config.comm = comm, s->config.scope = scope;
    s->config.entries = s->entries;
    return s;
}

static int64_t elements_of(const model_options *options, int part) {
    return block_part_rows(&options->shape, part) * block_part_cols(&options->shape, part);
}

/* What this rank has of it. */
static void save_state(const test_model *model, tn_tensor step, const char *path) {
    state_of_training *s = begin_state(path, all.comm, model->scope);
    for (int layer = 0; layer < LAYERS; layer++) {
        tn_sharded_unit_info unit = TN_SHARDED_UNIT_INFO_INIT;
        EXPECT_OK(tn_sharded_unit_info_get(model->sharded, layer, &unit));
        const tn_tensor held[KINDS] = {unit.master, unit.first, unit.second};
        for (int part = 0; part < BLOCK_PARTS; part++) {
            tn_shard_piece piece = TN_SHARD_PIECE_INIT;
            EXPECT_OK(tn_shard_piece_get(unit.plan, all.rank, part, &piece));
            const tn_checkpoint_piece at = {piece.first, piece.count,
                                            (size_t)piece.packed_first * sizeof(float)};
            for (int kind = 0; kind < KINDS; kind++)
                add_entry(s, layer, part, kind, elements_of(&model->options, part), held[kind], at);
        }
    }
    add_entry(s, LAYERS, 0, 0, 3, step, (tn_checkpoint_piece){0, all.rank ? 0 : 3, 0});
    s->config.entry_count = s->count;
    EXPECT_OK(tn_checkpoint_save(&s->config, all.stream));
    free(s);
}

/* All of it, on each rank by itself. */
static void load_state(reference_model *into, const char *path) {
    state_of_training *s = begin_state(path, NULL, into->scope);
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int part = 0; part < BLOCK_PARTS; part++) {
            const reference_part *of = &into->parts[layer][part];
            const tn_tensor held[KINDS] = {of->master, of->first, of->second};
            const int64_t elements = elements_of(&into->options, part);
            for (int kind = 0; kind < KINDS; kind++)
                add_entry(s, layer, part, kind, elements, held[kind],
                          (tn_checkpoint_piece){0, elements, 0});
        }
    }
    add_entry(s, LAYERS, 0, 0, 3, into->step, (tn_checkpoint_piece){0, 3, 0});
    s->config.entry_count = s->count;
    EXPECT_OK(tn_checkpoint_load(&s->config, all.stream));
    free(s);
}

/* Bits; or, where NCCL sums in its own order, within what a gradient of another sign moves: twice
 * the rate a step. */
static void compare(const test_model *model, const reference_model *reference, int is_exact) {
    if (is_exact)
        (void)model_compare_masters(model, reference);
    else
        assert_true(model_master_distance(model, reference) <=
                    2.0f * 0x1p-8f * (STEPS_BEFORE + STEPS_AFTER));
}

static void step_of_both(test_model *model, reference_model *reference, int step, int is_exact) {
    reference->data_ranks = all.count;
    model_step(model, step);
    reference_gradients(reference, step);
    reference_update(reference);
    compare(model, reference, is_exact);
}

/* Whatever is under way in the step ends, and all of the model. */
static void drop_model(test_model *model) {
    tn_status status = TN_OK;
    for (int layer = 0; layer < LAYERS && status == TN_OK; layer++) {
        status = tn_sharded_forward_begin(model->sharded, layer);
        if (status == TN_OK) status = tn_comm_wait(model->comm);
    }
    /* What the victim had still sent may have been enough. */
    if (status == TN_OK) status = tn_barrier(model->comm, all.stream);
    if (status == TN_OK) status = tn_comm_wait(model->comm);
    assert_true(status == TN_COMM_ERROR || status == TN_COMM_TIMEOUT);
    EXPECT_OK(tn_sharded_abandon(model->sharded));
    EXPECT_STATUS(tn_sharded_destroy(model->sharded), status);
    EXPECT_OK(tn_scope_close(model->scratch));
    EXPECT_OK(tn_scope_close(model->scope));
    EXPECT_STATUS(tn_comm_destroy(model->comm), status);
    free(model);
}

static void train_on(const test_meeting *meeting) {
    const loss *plan = meeting->argument;
    model_options options = model_options_small(LAYERS);
    char path[64];
    snprintf(path, sizeof path, "/tmp/tenure-shrink-%ld", (long)getppid());
    all = ranks_open_forked(meeting, 0);
    int is_exact = ranks_sum_in_order(&all);
    test_model *model = model_open(&all, &options, NULL);
    reference_model *reference = reference_open(&all, &options);
    for (int step = 0; step < STEPS_BEFORE; step++)
        step_of_both(model, reference, step, is_exact);
    save_state(model, reference->step, path);
    pass(all.rank == plan->victim, all.count);
    if (all.rank == plan->victim) {
        EXPECT_OK(tn_sharded_forward_begin(model->sharded, 0));
        raise(SIGKILL);
    }
    drop_model(model);
    tn_status status = await_failure();
    tn_comm *shrunk = shrink_or_end(all.comm, plan->victim, status);
    ranks_go_on(&all, shrunk, status);
    reference_model *restored = reference_open(&all, &options);
    load_state(restored, path);
    model = model_open(&all, &options, restored);
    compare(model, reference, is_exact);
    for (int step = STEPS_BEFORE; step < STEPS_BEFORE + STEPS_AFTER; step++)
        step_of_both(model, reference, step, is_exact);
    model_close(model);
    reference_close(restored);
    reference_close(reference);
    ranks_close(&all);
}

static void training_goes_on_from_its_checkpoint(void **state) {
    (void)state;
    const int last = rank_count_of_test() - 1;
    char command[64];
    int is_without_first = !is_nccl() || last == 1; /* else NCCL may refuse */
    for (int victim = is_without_first ? 0 : last; victim <= last; victim += last) {
        const loss plan = {.victim = victim};
        run_round(&plan, victim, train_on);
    }
    snprintf(command, sizeof command, "rm -r /tmp/tenure-shrink-%ld", (long)getpid());
    assert_int_equal(system(command), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_go_on_without_one_that_died),
        cmocka_unit_test(ranks_go_on_without_one_that_hangs),
        cmocka_unit_test(what_was_shrunk_is_shrunk_again),
        cmocka_unit_test(what_is_kept_ends_by_itself),
        cmocka_unit_test(ranks_may_be_left_out_by_choice),
        cmocka_unit_test(who_was_left_out_may_die),
        cmocka_unit_test(who_does_not_come_is_left_out_next),
        cmocka_unit_test(ranks_go_on_after_a_shrink_that_timed_out),
        cmocka_unit_test(ranks_go_on_after_some_have_come_without_the_first),
        cmocka_unit_test(training_goes_on_from_its_checkpoint),
    };
    cmocka_set_test_filter(getenv("TENURE_TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
