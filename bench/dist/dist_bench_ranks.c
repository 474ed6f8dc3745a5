/* The ranks of the benchmark: started, met and kept in step. See dist_bench.h. */
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dist_bench.h"

/* Where ranks that mpirun started meet, if nothing in the environment says so. */
enum { PORT_DEFAULT = 29517, BACKLOG = 128 };

/* ---- starting -------------------------------------------------------------------------------- */

/* A socket of this machine alone; -1 if there is none. */
static int open_listener(int *port) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t bytes = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(listener, BACKLOG) != 0 ||
        getsockname(listener, (struct sockaddr *)&address, &bytes) != 0) {
        perror("tenure-bench-dist: no socket for the ranks to meet on");
        if (listener >= 0) close(listener);
        return -1;
    }
    *port = ntohs(address.sin_port);
    return listener;
}

/* Waits for that many children: the worst of their exit statuses. */
static int wait_for_all(int count) {
    int worst = EXIT_SUCCESS;
    for (int i = 0; i < count; i++) {
        int status = 0;
        if (wait(&status) < 0) return EXIT_FAILURE;
        if (WIFSIGNALED(status))
            fprintf(stderr, "tenure-bench-dist: a rank was ended by signal %d\n", WTERMSIG(status));
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
        if (code > worst) worst = code;
    }
    return worst;
}

int dist_bench_start_ranks(int count, dist_bench_place *place, int *exit_status) {
    const int listener = open_listener(&place->port);
    int started = 0;
    *exit_status = EXIT_FAILURE;
    if (listener < 0) return 0;
    for (; started < count; started++) {
        const pid_t process = fork();
        if (process < 0) break;
        if (process > 0) continue;
        place->rank = started;
        place->rank_count = count;
        place->listen_file = started == 0 ? listener : -1;
        if (started != 0) close(listener);
        return 1;
    }
    close(listener);
    if (started < count) perror("tenure-bench-dist: no process for a rank");
    const int worst = wait_for_all(started);
    *exit_status = started < count ? EXIT_FAILURE : worst;
    return 0;
}

/* ---- meeting --------------------------------------------------------------------------------- */

tn_status dist_bench_meet(dist_bench *bench, const dist_bench_config *config) {
    const dist_bench_place *place = &config->place;
    tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;
    if (config->engine == TN_COMM_MPI) return TN_OK;
    how.timeout_us = DIST_BENCH_TIMEOUT_US;
    if (place->rank_count) {
        how.rank = place->rank;
        how.rank_count = place->rank_count;
        how.port = place->port;
        how.listen_file = place->listen_file;
    } else if (!getenv("MASTER_PORT") && !getenv("TENURE_RENDEZVOUS_PORT")) {
        how.port = PORT_DEFAULT;
    }
    if (place->rank_count || !getenv("MASTER_ADDR")) how.host = "127.0.0.1";
    return tn_rendezvous_create(&how, &bench->ranks);
}

tn_status dist_bench_line_up(dist_bench *bench) {
    tn_status status = tn_device_synchronize(bench->device);
    if (status == TN_OK && bench->ranks) return tn_rendezvous_gather(bench->ranks, NULL, 0, NULL);
    if (status == TN_OK) status = tn_barrier(bench->comm, bench->stream);
    return status == TN_OK ? tn_stream_synchronize(bench->device, bench->stream) : status;
}

tn_status dist_bench_worst(dist_bench *bench, tn_status mine) {
    const int own = (int)mine, count = bench->ranks ? tn_rendezvous_size(bench->ranks) : 0;
    int *all = malloc((size_t)(count + 1) * sizeof *all);
    tn_status worst = mine;
    if (!all) return TN_OUT_OF_HOST_MEMORY;
    if (bench->ranks && tn_rendezvous_gather(bench->ranks, &own, sizeof own, all) == TN_OK) {
        for (int i = count - 1; i >= 0; i--)
            if (all[i] != TN_OK) worst = (tn_status)all[i];
    }
    free(all);
    return worst;
}

/* ---- times ----------------------------------------------------------------------------------- */

double dist_bench_now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int by_value(const void *left, const void *right) {
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

dist_bench_spread dist_bench_spread_of(double *times, long count) {
    qsort(times, (size_t)count, sizeof *times, by_value);
    return (dist_bench_spread){times[count / 2], times[0], times[count - 1]};
}
