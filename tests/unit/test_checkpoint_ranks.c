/* Ranks that load a checkpoint together, while another program puts a newer one in its place: all
 * of what they load is of one of the two. */
#include "test_processes.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "file_steps.h"
#include "host_alloc.h"
#include "tenure_checkpoint.h"
#include "tenure_rendezvous.h"
#include "test_pools.h"

enum { ELEMENTS = 512, RANKS = 2, HALF = ELEMENTS / RANKS };

typedef struct loader {
    int rank;
    const char *path;
    tn_rendezvous *ranks;
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_scope scope;
    tn_comm *comm;
    tn_tensor half, whole; /* of the ranks' checkpoint; of the other program's */
} loader;

static loader me;

/* ---- a rank ---------------------------------------------------------------------------------- */

static tn_tensor open_floats(int64_t count) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.rank = 1, config.shape[0] = count;
    EXPECT_OK(tn_tensor_create(me.scope, &config, &tensor));
    return tensor;
}

static void open_loader(const test_meeting *meeting) {
    tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_scope_config scope = TN_SCOPE_CONFIG_INIT;
    me = (loader){.rank = meeting->rank, .path = meeting->argument};
    how.rank = meeting->rank, how.rank_count = meeting->rank_count;
    how.host = "127.0.0.1", how.port = meeting->port;
    how.listen_file = meeting->rank ? -1 : meeting->listener;
    EXPECT_OK(tn_rendezvous_create(&how, &me.ranks));
    me.device = test_open_host();
    me.pool = test_open_pool(me.device, TN_BACKING_AUTO, 0);
    me.stream = test_open_stream(me.device);
    scope.pool = me.pool;
    EXPECT_OK(tn_scope_create(&scope, &me.scope));
    config.device = me.device, config.rendezvous = me.ranks;
    EXPECT_OK(tn_comm_create(&config, &me.comm));
    me.half = open_floats(HALF), me.whole = open_floats(ELEMENTS);
}

static void close_loader(void) {
    EXPECT_OK(tn_comm_destroy(me.comm));
    EXPECT_OK(tn_scope_close(me.scope));
    EXPECT_OK(tn_pool_destroy(me.pool));
    EXPECT_OK(tn_stream_destroy(me.device, me.stream));
    EXPECT_OK(tn_device_destroy(me.device));
    tn_rendezvous_destroy(me.ranks);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void fill(tn_tensor tensor, int64_t count, float value) {
    float values[ELEMENTS];
    for (int64_t i = 0; i < count; i++)
        values[i] = value;
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_DATA, values, (size_t)count * sizeof *values, NULL, 0,
                             me.stream));
    EXPECT_OK(tn_stream_synchronize(me.device, me.stream));
}

static void expect_half(float value) {
    float values[HALF];
    EXPECT_OK(tn_plane_read(me.half, TN_PLANE_DATA, values, sizeof values, NULL, 0, me.stream));
    EXPECT_OK(tn_stream_synchronize(me.device, me.stream));
    for (int i = 0; i < HALF; i++)
        assert_true(values[i] == value);
}

typedef tn_status (*checkpoint_call)(const tn_checkpoint_config *config, tn_stream stream);

/* With the other ranks, of which each has its half; or all of it as another program. */
static tn_status make(checkpoint_call call, int is_alone) {
    const tn_checkpoint_piece piece = {.first = is_alone ? 0 : (int64_t)HALF * me.rank,
                                       .count = is_alone ? ELEMENTS : HALF};
    const tn_checkpoint_entry entry = {.name = "w",
                                       .dtype = TN_FP32,
                                       .rank = 1,
                                       .shape = {ELEMENTS},
                                       .memory = is_alone ? me.whole : me.half,
                                       .plane = TN_PLANE_DATA,
                                       .pieces = &piece,
                                       .piece_count = 1};
    tn_checkpoint_config config = TN_CHECKPOINT_CONFIG_INIT;
    config.path = me.path, config.comm = is_alone ? NULL : me.comm, config.scope = me.scope;
    config.entries = &entry, config.entry_count = 1;
    return call(&config, me.stream);
}

/* ---- another program comes between ----------------------------------------------------------- */

/* A pipe: whoever reads it waits for what is written. */
static int open_mark(void) {
    char mark[512];
    snprintf(mark, sizeof mark, "%s.read", me.path);
    const int file = open(mark, O_RDWR | O_CLOEXEC); /* which waits for nobody */
    assert_true(file >= 0);
    return file;
}

static int is_index(const char *path) {
    const char *name = strrchr(path, '/');
    return name && strcmp(name, "/index.json") == 0;
}

/* Rank 0 has read which checkpoint it is. */
static int tell(void *context, const char *step, const char *path) {
    if (strcmp(step, "close") != 0 || !is_index(path)) return 0;
    assert_int_equal(write(*(int *)context, "r", 1), 1);
    return 0;
}

/* Before rank 1 reads it there is another one. */
static int come_between(void *context, const char *step, const char *path) {
    char word;
    if (strcmp(step, "open") != 0 || !is_index(path)) return 0;
    tn__file_steps_watch(NULL, NULL);
    assert_int_equal(read(*(int *)context, &word, 1), 1);
    fill(me.whole, ELEMENTS, 2.0f);
    EXPECT_OK(make(tn_checkpoint_save, 1));
    return 0;
}

static void load_what_is_replaced(const test_meeting *meeting) {
    open_loader(meeting);
    fill(me.half, HALF, 1.0f);
    EXPECT_OK(make(tn_checkpoint_save, 0));
    fill(me.half, HALF, 9.0f);
    int mark = open_mark();
    tn__file_steps_watch(me.rank == 0 ? tell : come_between, &mark);
    EXPECT_STATUS(make(tn_checkpoint_load, 0), TN_INVALID_STATE);
    EXPECT_ERROR_HAS(me.rank == 0 ? "rank 1 has failed" : "another one was put in its place");
    tn__file_steps_watch(NULL, NULL);
    expect_half(9.0f);
    EXPECT_OK(make(tn_checkpoint_load, 0));
    expect_half(2.0f);
    assert_int_equal(close(mark), 0);
    close_loader();
}

static void ranks_load_one_and_the_same(void **state) {
    char directory[] = "/tmp/tenure-checkpoint-ranks-XXXXXX", path[64], mark[80];
    (void)state;
    assert_non_null(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/run", directory);
    snprintf(mark, sizeof mark, "%s.read", path);
    assert_int_equal(mkfifo(mark, 0600), 0);
    test_ranks_run(RANKS, load_what_is_replaced, path);
    test_remove_tree(directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(ranks_load_one_and_the_same)};
    return cmocka_run_group_tests_name("unit/checkpoint_ranks", tests, NULL, NULL);
}
