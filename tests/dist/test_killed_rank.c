/* A rank is killed: the others notice it, by the deadline under MPI and at once under TCP, release
 * all they have, and say so. Where the last rank is killed the argument says:
 *
 *     create           another communicator is being made
 *     collective       a kernel of its stream's, between two collectives
 *     forward, backward, update    a call of a step of a sharded model
 *     anywhere         somewhere in its communication stream: a step's work, chosen at random
 *     write, rename    rank 1 at a write of the second checkpoint, or rank 0 before it puts its
 *                      index in place: the first one is then whole
 *
 * mpiexec is told not to end the job (--enable-recovery): MPI itself can neither notice a dead rank
 * nor end without it, so that the survivors' exit ends the job, as with a rank that hangs. */
#include "ranks_support.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "tenure_checkpoint.h"
#include "tenure_sharded.h"

enum { DEADLINE_US = 5 * 1000 * 1000, SIDE = 160, UNITS = 3, STEPS = 6, ELEMENTS = 60000 };

static const char *phase;
static rank_fixture all;
static int is_victim;

static int is_phase(const char *name) { return strcmp(phase, name) == 0; }

static void die(void *argument) {
    (void)argument;
    raise(SIGKILL);
}

static void die_in(const char *name) {
    if (is_victim && is_phase(name)) die(NULL);
}

static void put_death(tn_stream stream) {
    EXPECT_OK(
        tn__device_driver(all.device)->host_task(tn__device_state(all.device), die, NULL, stream));
}

static int is_noticed(tn_status status) {
    return status == TN_COMM_TIMEOUT || status == TN_COMM_ERROR;
}

/* ---- collectives --------------------------------------------------------------------------- */

static tn_status gather_for_ever(tn_comm *comm) {
    const size_t bytes = 1 << 16;
    unsigned char *part = test_take(all.pool, bytes, all.stream);
    unsigned char *whole = test_take(all.pool, bytes * (size_t)all.count, all.stream);
    tn_status status = TN_OK;
    for (int i = 0; status == TN_OK; i++) {
        if (i == 5 && is_victim) put_death(all.stream);
        status = tn_all_gather(comm, part, whole, bytes, all.stream);
        if (status == TN_OK) status = tn_comm_wait(comm);
    }
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    test_give(all.pool, part, all.stream);
    test_give(all.pool, whole, all.stream);
    return status;
}

static void killed_in_collectives(void) {
    tn_comm *comm = ranks_comm(&all, "doomed", DEADLINE_US);
    assert_true(is_noticed(gather_for_ever(comm)));
    assert_true(is_noticed(tn_comm_destroy(comm)));
}

static void killed_in_create(void) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *comm = NULL;
    config.device = all.device, config.timeout_us = DEADLINE_US;
    config.rendezvous = all.rendezvous;
    die_in("create");
    assert_true(is_noticed(tn_comm_create(&config, &comm)));
    assert_null(comm);
}

/* ---- a sharded model ----------------------------------------------------------------------- */

static tn_scope open_scope(void) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.pool = all.pool;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_sharded_model *open_model(tn_scope scope, tn_comm *comm) {
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    tn_tensor_config shape = TN_TENSOR_CONFIG_INIT;
    tn_sharded_model *model = NULL;
    config.scope = scope, config.comm = comm, config.stream = all.stream;
    config.comm_stream = all.other;
    EXPECT_OK(tn_sharded_create(&config, &model));
    for (int i = 0; i < UNITS; i++) {
        tn_sharded_unit_config unit = TN_SHARDED_UNIT_CONFIG_INIT;
        tn_sharded_tensor weight = {.name = "weight",
                                    .format = TN_FORMAT_FP8_BLOCK_2D,
                                    .dtype = TN_E4M3,
                                    .rows = SIDE,
                                    .cols = SIDE};
        int number;
        shape.rank = 2, shape.shape[0] = shape.shape[1] = SIDE;
        EXPECT_OK(tn_tensor_create(scope, &shape, &weight.initial));
        EXPECT_OK(tn_plane_fill(weight.initial, TN_PLANE_DATA, 0, all.stream));
        unit.tensors = &weight, unit.tensor_count = 1, unit.layout = TN_SHARD_FLAT;
        EXPECT_OK(tn_sharded_unit_add(model, &unit, &number));
    }
    EXPECT_OK(tn_sharded_seal(model));
    return model;
}

static tn_status forward(tn_sharded_model *model, int unit) {
    tn_status status = tn_sharded_forward_begin(model, unit);
    return status == TN_OK ? tn_sharded_forward_end(model, unit) : status;
}

static tn_status backward(tn_sharded_model *model, int unit) {
    tn_status status = tn_sharded_backward_begin(model, unit);
    if (status == TN_OK)
        status = tn_plane_fill(tn_sharded_gradient(model, unit, 0), TN_PLANE_DATA, 0, all.stream);
    return status == TN_OK ? tn_sharded_backward_end(model, unit) : status;
}

static tn_status step(tn_sharded_model *model, int number) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    tn_status status = TN_OK;
    update.max_norm = 1.0f;
    for (int i = 0; i < UNITS && status == TN_OK; i++) {
        if (number == 2 && i == 1) die_in("forward");
        status = forward(model, i);
    }
    for (int i = UNITS - 1; i >= 0 && status == TN_OK; i--) {
        if (number == 2 && i == 1) die_in("backward");
        status = backward(model, i);
    }
    if (number == 2) die_in("update");
    return status == TN_OK ? tn_sharded_update(model, &update) : status;
}

/* Somewhere in what comm_stream has of one of the steps. */
static void killed_in_training(void) {
    const unsigned seed = (unsigned)time(NULL) ^ (unsigned)getpid();
    const int doom = is_phase("anywhere") ? (int)(seed % (STEPS - 1)) : -1;
    tn_scope scope = open_scope();
    tn_comm *comm = ranks_comm(&all, "doomed", DEADLINE_US);
    tn_sharded_model *model = open_model(scope, comm);
    tn_status status = TN_OK;
    if (is_victim && doom >= 0) printf("killed in the work of step %d\n", doom);
    for (int i = 0; i < STEPS && status == TN_OK; i++) {
        status = step(model, i);
        if (i == doom && is_victim) put_death(all.other);
    }
    if (status == TN_OK) status = tn_comm_wait(comm);
    assert_true(is_noticed(status));
    assert_true(is_noticed(tn_sharded_destroy(model)));
    EXPECT_OK(tn_scope_close(scope));
    assert_true(is_noticed(tn_comm_destroy(comm)));
}

/* ---- a checkpoint -------------------------------------------------------------------------- */

static int writes_left; /* of this rank until it dies; 0: it does not */
static int dies_at_rename;

__attribute__((visibility("default"))) ssize_t pwrite(int file, const void *bytes, size_t count,
                                                      off_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pwrite");
    if (writes_left && --writes_left == 0) die(NULL);
    return real(file, bytes, count, offset);
}

__attribute__((visibility("default"))) int rename(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "rename");
    if (dies_at_rename) die(NULL);
    return real(from, to);
}

/* Rank by rank a part of one tensor, or all of it. */
static tn_status checkpoint(const char *path, tn_comm *comm, float fill, int is_load) {
    const int64_t first = comm ? (int64_t)all.rank * ELEMENTS : 0;
    const int64_t count = comm ? ELEMENTS : (int64_t)all.count * ELEMENTS;
    tn_checkpoint_piece piece = {first, count, 0};
    tn_checkpoint_entry entry = {
        .name = "weight", .dtype = TN_FP32, .rank = 1, .pieces = &piece, .piece_count = 1};
    tn_checkpoint_config config = TN_CHECKPOINT_CONFIG_INIT;
    tn_tensor_config shape = TN_TENSOR_CONFIG_INIT;
    tn_scope scope = open_scope();
    const size_t bytes = (size_t)count * sizeof(float);
    float *values = malloc(bytes);
    for (int64_t i = 0; i < count; i++)
        values[i] = fill + (float)(first + i);
    shape.rank = 1, shape.shape[0] = count;
    EXPECT_OK(tn_tensor_create(scope, &shape, &entry.memory));
    entry.shape[0] = (int64_t)all.count * ELEMENTS;
    EXPECT_OK(tn_plane_write(entry.memory, TN_PLANE_DATA, values, bytes, NULL, 0, all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    config.path = path, config.comm = comm, config.scope = scope;
    config.entries = &entry, config.entry_count = 1;
    config.staging_bytes = 65536;
    tn_status status =
        is_load ? tn_checkpoint_load(&config, all.stream) : tn_checkpoint_save(&config, all.stream);
    if (status == TN_OK && is_load) {
        EXPECT_OK(tn_plane_read(entry.memory, TN_PLANE_DATA, values, bytes, NULL, 0, all.stream));
        EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
        for (int64_t i = 0; i < count; i++)
            assert_true(values[i] == 1.0f + (float)i);
    }
    free(values);
    EXPECT_OK(tn_scope_close(scope));
    return status;
}

static void remove_all(const char *path) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static void killed_in_saving(void) {
    char path[64];
    tn_comm *comm = ranks_comm(&all, "doomed", DEADLINE_US);
    /* Where the test runs; it stays, as the survivors can not meet to remove it. */
    snprintf(path, sizeof path, "killed_rank_%s.checkpoint", phase);
    if (all.rank == 0) remove_all(path);
    EXPECT_OK(tn_barrier(comm, all.stream));
    EXPECT_OK(tn_comm_wait(comm));
    EXPECT_OK(checkpoint(path, comm, 1.0f, 0));
    if (is_victim && is_phase("write")) writes_left = 2;
    if (is_victim && is_phase("rename")) dies_at_rename = 1;
    assert_true(is_noticed(checkpoint(path, comm, 2.0f, 0)));
    EXPECT_OK(checkpoint(path, NULL, 3.0f, 1));
    assert_true(is_noticed(tn_comm_destroy(comm)));
}

/* ---- the test ------------------------------------------------------------------------------ */

static void the_survivors_are_clean(void **state) {
    (void)state;
    all = ranks_open();
    is_victim = all.rank == (is_phase("rename") ? 0 : is_phase("write") ? 1 : all.count - 1);
    if (is_phase("create"))
        killed_in_create();
    else if (is_phase("collective"))
        killed_in_collectives();
    else if (is_phase("write") || is_phase("rename"))
        killed_in_saving();
    else
        killed_in_training();
    EXPECT_OK(tn_ledger_check(all.pool));
    all.has_given_up = 1;
    const int met_through_mpi = all.rendezvous != NULL;
    ranks_close(&all);
    printf("clean after a killed rank\n");
    fflush(stdout);
    if (met_through_mpi) _exit(0); /* MPI, of which no communicator has failed, would wait */
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_survivors_are_clean)};
    if (argc != 2) return 2;
    phase = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
