/* Ranks that meet over TCP, as processes of this machine: all come, one never does, one is of
 * another job or count, one dies, and strangers say anything. */
#include "test_processes.h"

#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "host_alloc.h"
#include "rendezvous.h"

enum { SHORT_US = 400 * 1000, LONG_US = 60 * 1000 * 1000 };

static tn_rendezvous_config config_of(const test_meeting *meeting, uint64_t timeout_us) {
    tn_rendezvous_config config = TN_RENDEZVOUS_CONFIG_INIT;
    config.rank = meeting->rank;
    config.rank_count = meeting->rank_count;
    config.host = "127.0.0.1";
    config.port = meeting->port;
    config.listen_file = meeting->rank ? -1 : meeting->listener;
    config.timeout_us = timeout_us;
    return config;
}

static tn_rendezvous *join(const test_meeting *meeting) {
    tn_rendezvous_config config = config_of(meeting, LONG_US);
    tn_rendezvous *ranks = NULL;
    EXPECT_OK(tn_rendezvous_create(&config, &ranks));
    assert_int_equal(tn_rendezvous_rank(ranks), meeting->rank);
    assert_int_equal(tn_rendezvous_size(ranks), meeting->rank_count);
    return ranks;
}

static void leave(tn_rendezvous *ranks) {
    tn_rendezvous_destroy(ranks);
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* ---- all come ------------------------------------------------------------------------------- */

static void meet_many_times(const test_meeting *meeting) {
    enum { ROUNDS = 50 };
    tn_rendezvous *ranks = join(meeting);
    for (int round = 0; round < ROUNDS; round++) {
        int mine[2] = {meeting->rank, round}, all[8][2];
        EXPECT_OK(tn_rendezvous_gather(ranks, mine, sizeof mine, all));
        for (int rank = 0; rank < meeting->rank_count; rank++) {
            assert_int_equal(all[rank][0], rank);
            assert_int_equal(all[rank][1], round);
        }
        EXPECT_OK(tn_rendezvous_gather(ranks, NULL, 0, NULL));
    }
    EXPECT_OK(tn_rendezvous_agree(ranks, "the plan's hash", 77));
    leave(ranks);
}

static void all_ranks_meet_in_their_order(void **state) {
    (void)state;
    for (int count = 1; count <= 4; count++)
        test_ranks_run(count, meet_many_times, NULL);
}

static void say_different_things(const test_meeting *meeting) {
    tn_rendezvous *ranks = join(meeting);
    EXPECT_STATUS(tn_rendezvous_agree(ranks, "the plan's hash", meeting->rank == 2), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("the plan's hash of rank 2 is 0000000000000001, and of rank 0 "
                     "0000000000000000");
    /* That was an answer: the meeting itself took place. */
    EXPECT_OK(tn_rendezvous_agree(ranks, "another hash", 5));
    EXPECT_STATUS(meeting->rank == 1 ? tn_rendezvous_gather(ranks, NULL, 0, NULL)
                                     : tn_rendezvous_agree(ranks, "a third", 5),
                  TN_COMM_ERROR);
    EXPECT_STATUS(tn_rendezvous_gather(ranks, NULL, 0, NULL), TN_COMM_ERROR); /* for good */
    leave(ranks);
}

static void ranks_that_differ_are_named(void **state) {
    (void)state;
    test_ranks_run(3, say_different_things, NULL);
}

/* On one port: who is early meets the store of the time before, which may be there for others. */
static void meet_again_and_again(const test_meeting *meeting) {
    enum { TIMES = 6 };
    tn_rendezvous_config config = config_of(meeting, LONG_US);
    config.listen_file = -1;
    for (int i = 0; i < TIMES; i++) {
        tn_rendezvous *ranks = NULL;
        EXPECT_OK(tn_rendezvous_create(&config, &ranks));
        EXPECT_OK(tn_rendezvous_agree(ranks, "the time", (uint64_t)i));
        leave(ranks);
    }
}

/* A free port that the system gives to nobody by itself. */
static int find_port_of_servers(void) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    int port = 20000 + (int)getpid() % 10000, is_free = 0;
    for (; !is_free; port++) {
        int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        address.sin_port = htons((uint16_t)port);
        is_free = bind(file, (struct sockaddr *)&address, sizeof address) == 0;
        close(file);
    }
    return port - 1;
}

static void a_new_rendezvous_follows_on_the_same_port(void **state) {
    (void)state;
    enum { RANKS = 4 };
    const test_meeting meeting = {.listener = -1, .port = find_port_of_servers()};
    pid_t ranks[RANKS];
    for (int rank = 0; rank < RANKS; rank++)
        ranks[rank] = test_rank_begin(&meeting, rank, RANKS, meet_again_and_again);
    for (int rank = 0; rank < RANKS; rank++)
        test_rank_end(ranks[rank]);
}

static void use_values(const test_meeting *meeting) {
    tn_rendezvous *ranks = join(meeting);
    char value[8] = "";
    size_t bytes = 0;
    if (meeting->rank == 1) {
        EXPECT_STATUS(tn__store_get(ranks->store, "none", 1000, value, sizeof value, &bytes),
                      TN_COMM_TIMEOUT);
        EXPECT_OK(tn_rendezvous_gather(ranks, NULL, 0, NULL));
        EXPECT_OK(tn__store_set(ranks->store, "late", "words", 5));
        EXPECT_OK(tn__store_set(ranks->store, "late", "words", 5));
        EXPECT_STATUS(tn__store_set(ranks->store, "late", "other", 5), TN_INVALID_STATE);
    } else {
        EXPECT_OK(tn_rendezvous_gather(ranks, NULL, 0, NULL));
        EXPECT_OK(tn__store_get(ranks->store, "late", LONG_US, value, 3, &bytes));
        assert_int_equal(bytes, 5);
        assert_string_equal(value, "wor");
    }
    leave(ranks);
}

static void a_value_is_waited_for(void **state) {
    (void)state;
    test_ranks_run(2, use_values, NULL);
}

/* ---- the environment ------------------------------------------------------------------------ */

static void set_number(const char *name, int number) {
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    setenv(name, text, 1);
}

/* As torchrun sets it; its agent has MASTER_PORT. */
static void meet_by_environment(const test_meeting *meeting) {
    tn_rendezvous_config config = TN_RENDEZVOUS_CONFIG_INIT;
    tn_rendezvous *ranks = NULL;
    set_number("RANK", meeting->rank);
    set_number("WORLD_SIZE", meeting->rank_count);
    set_number("LOCAL_RANK", meeting->rank);
    set_number("LOCAL_WORLD_SIZE", meeting->rank_count);
    set_number("MASTER_PORT", meeting->port - 1);
    setenv("MASTER_ADDR", "localhost", 1);
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    setenv("TORCHELASTIC_RUN_ID", "a job", 1);
    config.listen_file = meeting->listener;
    EXPECT_OK(tn_rendezvous_create(&config, &ranks));
    assert_int_equal(tn_rendezvous_rank(ranks), meeting->rank);
    assert_int_equal(tn_rendezvous_local_rank(ranks), meeting->rank);
    EXPECT_OK(tn_rendezvous_gather(ranks, NULL, 0, NULL));
    leave(ranks);
}

static void torchruns_environment_is_enough(void **state) {
    (void)state;
    test_ranks_run(3, meet_by_environment, NULL);
}

static void clear_environment(void) {
    static const char *const names[] = {
        "RANK",         "WORLD_SIZE",    "LOCAL_RANK",         "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",     "PMI_SIZE",      "SLURM_PROCID",       "OMPI_COMM_WORLD_SIZE",
        "SLURM_NTASKS", "SLURM_LOCALID", "MASTER_PORT",        "OMPI_COMM_WORLD_LOCAL_RANK",
        "SLURM_JOB_ID", "MASTER_ADDR",   "TORCHELASTIC_RUN_ID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
}

static void launchers_count_where_they_agree(void **state) {
    (void)state;
    tn__place place;
    clear_environment();
    EXPECT_OK(tn__place_read(1, &place));
    assert_int_equal(place.rank_count, 0);
    assert_int_equal(place.local_rank, -1);
    setenv("PMI_RANK", "2", 1);
    setenv("PMI_SIZE", "3", 1);
    setenv("SLURM_LOCALID", "1", 1);
    EXPECT_OK(tn__place_read(1, &place));
    assert_int_equal(place.rank, 2);
    assert_int_equal(place.rank_count, 3);
    assert_int_equal(place.local_rank, 1);
    setenv("SLURM_PROCID", "0", 1);
    setenv("SLURM_NTASKS", "1", 1);
    EXPECT_STATUS(tn__place_read(1, &place), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("PMI_RANK says rank 2 of 3, SLURM_PROCID rank 0 of 1: set RANK");
    /* A program that says them itself does not care. */
    tn_rendezvous_config config = TN_RENDEZVOUS_CONFIG_INIT;
    tn_rendezvous *alone = NULL;
    config.rank_count = 1;
    EXPECT_OK(tn_rendezvous_create(&config, &alone));
    assert_int_equal(tn_rendezvous_size(alone), 1);
    tn_rendezvous_destroy(alone);
    setenv("RANK", "0", 1);
    EXPECT_STATUS(tn__place_read(1, &place), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("one of RANK and WORLD_SIZE");
    setenv("WORLD_SIZE", "7", 1);
    EXPECT_OK(tn__place_read(1, &place));
    assert_int_equal(place.rank_count, 7);
    setenv("RANK", "7", 1);
    EXPECT_STATUS(tn__place_read(1, &place), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("RANK is \"7\": a number from 0 to 6");
    setenv("RANK", "1x", 1);
    EXPECT_STATUS(tn__place_read(1, &place), TN_INVALID_ARGUMENT);
    setenv("RANK", "1", 1);
    setenv("MASTER_PORT", "65536", 1);
    EXPECT_STATUS(tn__place_read(1, &place), TN_INVALID_ARGUMENT);
    clear_environment();
}

/* ---- who does not come, dies, or is another ------------------------------------------------- */

static void time_out_within(const test_meeting *meeting, uint64_t timeout_us) {
    tn_rendezvous_config config = config_of(meeting, timeout_us);
    tn_rendezvous *ranks = NULL;
    EXPECT_STATUS(tn_rendezvous_create(&config, &ranks), TN_COMM_TIMEOUT);
    assert_null(ranks);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void time_out(const test_meeting *meeting) { time_out_within(meeting, SHORT_US); }

/* The time of one rank is over, and both are told, whenever rank 0 comes to it. */
static void name_the_missing(const test_meeting *meeting) {
    time_out_within(meeting, meeting->rank ? SHORT_US : LONG_US);
    EXPECT_ERROR_HAS("rendezvous for tn_rendezvous_create, rank ");
    EXPECT_ERROR_HAS("waited 0.4 s for ");
    EXPECT_ERROR_HAS("rank 1, rank 3");
}

static void ranks_that_never_come_are_named(void **state) {
    (void)state;
    test_meeting meeting = test_meeting_open();
    pid_t first = test_rank_begin(&meeting, 0, 4, name_the_missing);
    pid_t second = test_rank_begin(&meeting, 2, 4, name_the_missing);
    test_meeting_close(&meeting);
    test_rank_end(first);
    test_rank_end(second);
}

/* The port is taken, so that nobody else gets it, and nobody listens there. */
static void a_store_that_is_not_there_is_waited_for(void **state) {
    (void)state;
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t bytes = sizeof address;
    test_meeting meeting = {.listener = -1};
    int taken = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(taken, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(getsockname(taken, (struct sockaddr *)&address, &bytes), 0);
    meeting.port = ntohs(address.sin_port);
    test_rank_end(test_rank_begin(&meeting, 1, 2, time_out));
    close(taken);
}

static void come_with_another_count(const test_meeting *meeting) {
    tn_rendezvous_config config = config_of(meeting, LONG_US);
    tn_rendezvous *ranks = NULL;
    config.rank_count = 5;
    EXPECT_STATUS(tn_rendezvous_create(&config, &ranks), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("rank 1 was told of 5 ranks, rank 0 of 2");
    config.rank_count = 2;
    config.job = "another";
    EXPECT_STATUS(tn_rendezvous_create(&config, &ranks), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("rank 1 is of another job than rank 0");
    config.job = NULL;
    EXPECT_OK(tn_rendezvous_create(&config, &ranks));
    leave(ranks);
}

static void join_and_leave(const test_meeting *meeting) { leave(join(meeting)); }

static void another_count_or_job_is_refused(void **state) {
    (void)state;
    test_meeting meeting = test_meeting_open();
    pid_t first = test_rank_begin(&meeting, 0, 2, join_and_leave);
    pid_t second = test_rank_begin(&meeting, 1, 2, come_with_another_count);
    test_meeting_close(&meeting);
    test_rank_end(second);
    test_rank_end(first);
}

static void wait_for_a_dead_rank(const test_meeting *meeting) {
    tn_rendezvous *ranks = join(meeting);
    if (meeting->rank == 1) raise(SIGKILL);
    EXPECT_STATUS(tn_rendezvous_gather(ranks, NULL, 0, NULL), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("rank 1 is gone: its process has ended");
    leave(ranks);
}

/* Long before the timeout. */
static void a_rank_that_dies_is_noticed(void **state) {
    (void)state;
    test_meeting meeting = test_meeting_open();
    pid_t ranks[3];
    for (int rank = 0; rank < 3; rank++)
        ranks[rank] = test_rank_begin(&meeting, rank, 3, wait_for_a_dead_rank);
    test_meeting_close(&meeting);
    test_rank_end_killed(ranks[1]);
    test_rank_end(ranks[0]);
    test_rank_end(ranks[2]);
}

static void lose_the_store(const test_meeting *meeting) {
    tn_rendezvous *ranks = join(meeting);
    char value[8];
    size_t bytes = 0;
    if (meeting->rank == 0) {
        /* The other one has been told that all are here. */
        EXPECT_OK(tn__store_get(ranks->store, "joined", LONG_US, value, sizeof value, &bytes));
        raise(SIGKILL);
    }
    tn_status told = tn__store_set(ranks->store, "joined", NULL, 0);
    assert_true(told == TN_OK || told == TN_COMM_ERROR); /* rank 0 may die before it answers */
    EXPECT_STATUS(tn_rendezvous_gather(ranks, NULL, 0, NULL), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("the store of the ranks (rank 0) is gone");
    leave(ranks);
}

static void the_store_dies_with_rank_0(void **state) {
    (void)state;
    test_meeting meeting = test_meeting_open();
    pid_t ranks[2];
    for (int rank = 0; rank < 2; rank++)
        ranks[rank] = test_rank_begin(&meeting, rank, 2, lose_the_store);
    test_meeting_close(&meeting);
    test_rank_end_killed(ranks[0]);
    test_rank_end(ranks[1]);
}

static void serve_where_somebody_does(const test_meeting *meeting) {
    tn_rendezvous_config config = config_of(meeting, LONG_US);
    tn_rendezvous *ranks = NULL;
    config.listen_file = -1;
    EXPECT_STATUS(tn_rendezvous_create(&config, &ranks), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("listening on TCP port");
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void a_second_job_on_the_port_is_refused(void **state) {
    (void)state;
    test_meeting meeting = test_meeting_open();
    test_rank_end(test_rank_begin(&meeting, 0, 2, serve_where_somebody_does));
    pid_t first = test_rank_begin(&meeting, 0, 2, join_and_leave);
    pid_t second = test_rank_begin(&meeting, 1, 2, join_and_leave);
    test_meeting_close(&meeting);
    test_rank_end(first);
    test_rank_end(second);
}

/* ---- callbacks, arguments ------------------------------------------------------------------- */

static int gather_alone(void *context, const void *mine, size_t bytes, void *all) {
    int *calls = context;
    if (++*calls == 3) return 42;
    memcpy(all, mine, bytes);
    memcpy((char *)all + bytes, mine, bytes);
    return 0;
}

static void the_programs_own_gather_serves(void **state) {
    (void)state;
    tn_rendezvous_config config = TN_RENDEZVOUS_CONFIG_INIT;
    tn_rendezvous *ranks = NULL;
    int calls = 0, one = 1, all[2] = {0};
    config.rank = 1;
    config.rank_count = 2;
    config.all_gather = gather_alone;
    config.context = &calls;
    EXPECT_OK(tn_rendezvous_create(&config, &ranks));
    EXPECT_OK(tn_rendezvous_gather(ranks, &one, sizeof one, all));
    assert_int_equal(all[0] + all[1], 2);
    EXPECT_STATUS(tn_rendezvous_gather(ranks, &one, sizeof one, all), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("the program's all_gather failed");
    assert_int_equal(tn_error_last_native(), 42);
    assert_int_equal(calls, 3);
    leave(ranks);
}

static void expect_refusal(tn_rendezvous_config config, const char *words) {
    tn_rendezvous *ranks = NULL;
    EXPECT_STATUS(tn_rendezvous_create(&config, &ranks), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS(words);
    assert_null(ranks);
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* ---- memory that runs out while a communicator is made --------------------------------------- */

/* What the ranks of one round tell the test. */
typedef struct shortage {
    long nth; /* allocation of rank 1 that fails */
    int has_come;
    tn_status ends[2];
} shortage;

static void create_with_shortage(const test_meeting *meeting) {
    shortage *at = (shortage *)(uintptr_t)meeting->argument;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_rendezvous *ranks = join(meeting);
    tn_comm *comm = NULL;
    tn_status status = TN_UNSUPPORTED;
    config.device = test_open_host(), config.rendezvous = ranks;
    if (meeting->rank == 1) (void)tn__host_alloc_fault(at->nth, 0);
    for (int tries = 0; tries < 3 && status != TN_OK; tries++) {
        status = tn_comm_create(&config, &comm);
        if (status != TN_OK) assert_null(strstr(tn_error_last(), "met for something else"));
    }
    if (meeting->rank == 1) at->has_come = tn__host_alloc_fault(0, 0) == 0;
    at->ends[meeting->rank] = status;
    EXPECT_OK(tn_comm_destroy(comm));
    EXPECT_OK(tn_device_destroy(config.device));
    leave(ranks);
}

/* The rank that has none calls again, and nobody has gone on without it. Only where an answer has
 * no room it has lost its connection: then all know. */
static void a_rank_short_of_memory_comes_again(void **state) {
    const size_t bytes = sizeof(shortage);
    shortage *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int lost = 0;
    (void)state;
    assert_true(at != MAP_FAILED);
    for (*at = (shortage){.nth = 1, .has_come = 1}; at->has_come; at->nth++) {
        test_ranks_run(2, create_with_shortage, at);
        assert_int_equal(at->ends[0] == TN_OK, at->ends[1] == TN_OK);
        lost += at->ends[0] != TN_OK;
    }
    assert_true(at->nth > 10);
    assert_int_equal(lost, 3); /* the answers of a hello and of two meetings */
    assert_int_equal(munmap(at, bytes), 0);
}

/* ---- a rank that can not connect ------------------------------------------------------------- */

enum { FILES = 256 };

/* All files but `left` that this process may open; how many they are. */
static int take_files(int *files, int left) {
    const struct rlimit limit = {FILES, FILES};
    int count = 0;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    while (count < FILES && (files[count] = dup(0)) >= 0)
        count++;
    assert_true(count > left);
    for (; left > 0; left--)
        close(files[--count]);
    return count;
}

static void give_files(const int *files, int count) {
    while (count > 0)
        close(files[--count]);
}

static void expect_given_up(const test_meeting *meeting, tn_status status) {
    EXPECT_STATUS(status, TN_COMM_ERROR);
    EXPECT_ERROR_HAS(meeting->rank == 1 ? "rank 1 could not connect to rank 0"
                                        : "rank 1 has given up");
}

/* Of three ranks the second has files for what comes before its connections, and not for these. */
static void connect_without_files(const test_meeting *meeting) {
    enum { OF_CREATE = 2, OF_SPLIT = 1 };
    int files[FILES], count = 0;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_rendezvous *ranks = join(meeting);
    tn_comm *comm = NULL, *part = NULL;
    config.device = test_open_host(), config.rendezvous = ranks;
    config.timeout_us = LONG_US;
    if (meeting->rank == 1) count = take_files(files, OF_CREATE);
    expect_given_up(meeting, tn_comm_create(&config, &comm));
    give_files(files, count);
    EXPECT_OK(tn_rendezvous_gather(ranks, NULL, 0, NULL));
    EXPECT_OK(tn_comm_create(&config, &comm));
    count = meeting->rank == 1 ? take_files(files, OF_SPLIT) : 0;
    expect_given_up(meeting, tn_comm_split(comm, 0, meeting->rank, NULL, &part));
    give_files(files, count);
    EXPECT_STATUS(tn_comm_destroy(comm), TN_COMM_ERROR);
    EXPECT_OK(tn_device_destroy(config.device));
    leave(ranks);
}

static void a_rank_that_can_not_connect_is_heard(void **state) {
    (void)state;
    test_ranks_run(3, connect_without_files, NULL);
}

static void impossible_arguments_are_refused(void **state) {
    (void)state;
    tn_rendezvous_config config = TN_RENDEZVOUS_CONFIG_INIT;
    clear_environment();
    expect_refusal(config, "rank 0 of 0");
    config.rank_count = 2;
    config.rank = 2;
    expect_refusal(config, "rank 2 of 2");
    config.rank = 1;
    expect_refusal(config, "no host to meet on");
    config.host = "127.0.0.1";
    expect_refusal(config, "no port to meet on");
    config.port = 70000;
    expect_refusal(config, "a port is at most 65535");
    config.port = 1;
    config.listen_file = 0;
    expect_refusal(config, "listen_file is for rank 0");
    config.rank = 0;
    int file = fileno(tmpfile());
    tn_rendezvous *ranks = NULL;
    config.listen_file = file;
    EXPECT_STATUS(tn_rendezvous_create(&config, &ranks), TN_COMM_ERROR);
    config.size--;
    expect_refusal(config, "begin with TN_RENDEZVOUS_CONFIG_INIT");
    EXPECT_STATUS(tn_rendezvous_create(NULL, &ranks), TN_INVALID_ARGUMENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ranks_meet_in_their_order),
        cmocka_unit_test(ranks_that_differ_are_named),
        cmocka_unit_test(a_value_is_waited_for),
        cmocka_unit_test(a_new_rendezvous_follows_on_the_same_port),
        cmocka_unit_test(torchruns_environment_is_enough),
        cmocka_unit_test(launchers_count_where_they_agree),
        cmocka_unit_test(ranks_that_never_come_are_named),
        cmocka_unit_test(a_store_that_is_not_there_is_waited_for),
        cmocka_unit_test(another_count_or_job_is_refused),
        cmocka_unit_test(a_rank_that_dies_is_noticed),
        cmocka_unit_test(the_store_dies_with_rank_0),
        cmocka_unit_test(a_second_job_on_the_port_is_refused),
        cmocka_unit_test(the_programs_own_gather_serves),
        cmocka_unit_test(a_rank_short_of_memory_comes_again),
        cmocka_unit_test(a_rank_that_can_not_connect_is_heard),
        cmocka_unit_test(impossible_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
