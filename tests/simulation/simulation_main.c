/* pool_simulation: random programs of many seeds against the oracle.
 *
 *     pool_simulation --seed 7 --steps 20000            one seed; also how a failure is replayed
 *     pool_simulation --seed 1 --operations 100000000   seeds from 1 on, until there were so many
 *
 *     pool_simulation --sequences 5                     every sequence of five calls
 *     pool_simulation --sequences 7 --shard 3/16        the third of 16 parts of them
 *
 * The simulated driver is the one of the build, or what --library names.
 *
 * Each seed runs in a process of its own, whose addresses are not randomised, so that it is the
 * same program whatever ran before. A seed that fails is run again with steps left out, as long as
 * it still fails, and the shortest command that fails is printed. Exit status: 0, 1 (a seed has
 * failed), 2 (bad usage). With --expect-failure 0 and 1 are the other way round: that is for
 * builds in which a fault has been planted.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "simulation.h"

enum { SHRINK_RUNS_MAX = 600 };

typedef struct command {
    uint64_t seed;
    uint64_t steps;      /* of each seed */
    uint64_t operations; /* in all; 0: one seed */
    int sequences;       /* not 0: all of so many calls, and nothing random */
    world_shard shard;   /* of the sequences */
    int expects_failure;
    int wants_all_counts;
    int shrinks;
    int tells;
    int runs_here;           /* without a process for each seed: for tools that do not follow */
    unsigned char *left_out; /* a mark a step */
    int leaves_out;
} command;

/* ---- one seed -------------------------------------------------------------------------------- */

static void run_seed(const command *c, uint64_t seed, uint64_t steps, world_counts *counts) {
    static world w;
    memset(&w, 0, sizeof w);
    w.seed = seed;
    w.counts = counts;
    w.tells = c->tells;
    w.doing = "beginning";
    world_open(&w);
    world_run(&w, steps, c->left_out);
    world_close(&w);
}

/* 0, or what the process ended with. A failure that has been told once is not told again. */
static int run_in_child(const command *c, uint64_t seed, uint64_t steps, world_counts *counts,
                        int is_quiet) {
    int status = 0;
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        exit(2);
    }
    if (child == 0) {
        if (is_quiet && !freopen("/dev/null", "w", stderr)) _Exit(2);
        run_seed(c, seed, steps, counts);
        exit(0);
    }
    waitpid(child, &status, 0);
    return status;
}

/* ---- shrinking ------------------------------------------------------------------------------- */

/* Leaves [from, to) out as well, if the seed then still fails; 1 if so. */
static int leave_out(command *c, uint64_t seed, uint64_t steps, uint64_t from, uint64_t to) {
    unsigned char *before = malloc(steps);
    world_counts ignored;
    int fails;
    if (!before) return 0;
    memcpy(before, c->left_out, steps);
    memset(c->left_out + from, 1, to - from);
    fails =
        memcmp(before, c->left_out, steps) != 0 && run_in_child(c, seed, steps, &ignored, 1) != 0;
    if (!fails) memcpy(c->left_out, before, steps);
    free(before);
    return fails;
}

/* Half the steps first, then quarters, and so on; the last step is the one that fails. */
static void shrink(command *c, uint64_t seed, uint64_t steps) {
    int runs = 0;
    for (uint64_t stretch = steps / 2; stretch > 0; stretch /= 2) {
        for (uint64_t from = 0; from < steps; from += stretch) {
            uint64_t to = from + stretch < steps ? from + stretch : steps;
            if (runs++ == SHRINK_RUNS_MAX) return;
            (void)leave_out(c, seed, steps, from, to);
        }
    }
}

static void tell_shortest(const command *c, uint64_t seed, uint64_t steps) {
    fprintf(stderr, "shorter: pool_simulation --seed %llu --steps %llu", (unsigned long long)seed,
            (unsigned long long)steps);
    for (uint64_t from = 0; from < steps; from++) {
        uint64_t to = from;
        while (to < steps && c->left_out[to])
            to++;
        if (to == from) continue;
        fprintf(stderr, " --leave-out %llu-%llu", (unsigned long long)from, (unsigned long long)to);
        from = to;
    }
    fprintf(stderr, "\n");
}

/* ---- many seeds ------------------------------------------------------------------------------ */

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void tell_counts(const world_counts *counts, uint64_t seeds, double seconds) {
    printf("%llu programs, %.1f s, %.0f steps a second:", (unsigned long long)seeds, seconds,
           (double)counts->steps / seconds);
#define TELL_COUNT(name) printf(" " #name "=%llu", (unsigned long long)counts->name);
    WORLD_COUNTS(TELL_COUNT)
#undef TELL_COUNT
    printf("\n");
    fflush(stdout);
}

static int has_all_counts(const world_counts *counts) {
    int has_all = 1;
#define EXPECT_COUNT(name)                                                                         \
    if (!counts->name) {                                                                           \
        fprintf(stderr, "nothing was counted under " #name "\n");                                  \
        has_all = 0;                                                                               \
    }
    WORLD_COUNTS(EXPECT_COUNT)
#undef EXPECT_COUNT
    return has_all;
}

static int tell_failure(command *c, uint64_t seed, uint64_t steps, int status, uint64_t failed) {
    if (!WIFSIGNALED(status) && failed < steps) steps = failed + 1;
    if (WIFSIGNALED(status)) {
        fprintf(stderr,
                "seed %llu ended by signal %d\nreplay: pool_simulation --seed %llu --steps"
                " %llu\n",
                (unsigned long long)seed, WTERMSIG(status), (unsigned long long)seed,
                (unsigned long long)steps);
    }
    if (c->expects_failure) return 0;
    if (c->shrinks) {
        shrink(c, seed, steps);
        tell_shortest(c, seed, steps);
    }
    return 1;
}

static int run_all(command *c, world_counts *counts) {
    uint64_t operations = c->operations ? c->operations : c->steps;
    double start = seconds_now();
    double told = start;
    uint64_t seed = c->seed;
    for (; counts->steps < operations; seed++) {
        uint64_t left = operations - counts->steps;
        uint64_t steps = left < c->steps ? left : c->steps;
        int status = 0;
        if (c->runs_here)
            run_seed(c, seed, steps, counts);
        else
            status = run_in_child(c, seed, steps, counts, 0);
        if (status) {
            tell_counts(counts, seed - c->seed, seconds_now() - start);
            return tell_failure(c, seed, steps, status, counts->failed_step);
        }
        if (c->leaves_out) break;
        if (seconds_now() - told < 60) continue;
        told = seconds_now();
        tell_counts(counts, seed + 1 - c->seed, told - start);
    }
    tell_counts(counts, seed - c->seed, seconds_now() - start);
    if (c->wants_all_counts && !has_all_counts(counts)) return 1;
    if (!c->expects_failure) return 0;
    fprintf(stderr, "a fault was planted and not found\n");
    return 1;
}

/* On a device so small that most sequences come to its end. */
static int run_sequences(const command *c, world_counts *counts) {
    static const tn_pool_backing backings[] = {TN_BACKING_VMM, TN_BACKING_PLAIN};
    const size_t memory_bytes = (size_t)12 << 20;
    for (size_t i = 0; i < sizeof backings / sizeof *backings; i++) {
        static world w;
        double start = seconds_now();
        uint64_t sequences;
        memset(&w, 0, sizeof w);
        w.counts = counts;
        w.tells = c->tells;
        world_open_small(&w, memory_bytes, backings[i]);
        sequences = world_run_sequences(&w, c->sequences, c->shard);
        world_close(&w);
        tell_counts(counts, sequences, seconds_now() - start);
    }
    return 0;
}

/* ---- command line ---------------------------------------------------------------------------- */

static _Noreturn void explain(void) {
    fputs(
        "usage: pool_simulation [--sequences N [--shard I/N]] [--seed N] [--steps N]\n"
        "                       [--operations N] [--leave-out FROM-TO] [--library FILE] [--tell]\n"
        "                       [--all-counts] [--no-shrink] [--in-process]\n"
        "                       [--expect-failure]\n",
        stderr);
    exit(2);
}

static uint64_t read_number(const char *text) {
    char *end = NULL;
    uint64_t number = text ? strtoull(text, &end, 10) : 0;
    if (!text || end == text || *end) explain();
    return number;
}

static void read_gap(command *c, const char *text) {
    unsigned long long from;
    unsigned long long to;
    if (!text || sscanf(text, "%llu-%llu", &from, &to) != 2) explain();
    if (from > to || to > c->steps) explain();
    memset(c->left_out + from, 1, to - from);
    c->leaves_out = 1;
}

static void read_shard(command *c, const char *text) {
    unsigned long long part;
    unsigned long long count;
    if (!text || sscanf(text, "%llu/%llu", &part, &count) != 2) explain();
    if (part < 1 || part > count) explain();
    c->shard = (world_shard){part - 1, count};
}

static const char *read_name(const char *text) {
    if (!text) explain();
    return text;
}

/* Steps are marked once it is known how many there are. */
static void read_steps(command *c, const char *text) {
    c->steps = read_number(text);
    if (c->steps == 0 || c->steps > UINT32_MAX) explain();
    free(c->left_out);
    c->left_out = calloc(c->steps, 1);
    if (!c->left_out) exit(2);
}

static void read_flag(command *c, const char *flag) {
    if (strcmp(flag, "--all-counts") == 0)
        c->wants_all_counts = 1;
    else if (strcmp(flag, "--no-shrink") == 0)
        c->shrinks = 0;
    else if (strcmp(flag, "--tell") == 0)
        c->tells = 1;
    else if (strcmp(flag, "--in-process") == 0)
        c->runs_here = 1;
    else if (strcmp(flag, "--expect-failure") == 0)
        c->expects_failure = 1;
    else
        explain();
}

static void read_command(command *c, char **arguments) {
    for (char **at = arguments + 1; *at; at++) {
        if (strcmp(*at, "--seed") == 0)
            c->seed = read_number(*++at);
        else if (strcmp(*at, "--steps") == 0)
            read_steps(c, *++at);
        else if (strcmp(*at, "--operations") == 0)
            c->operations = read_number(*++at);
        else if (strcmp(*at, "--sequences") == 0)
            c->sequences = (int)read_number(*++at);
        else if (strcmp(*at, "--shard") == 0)
            read_shard(c, *++at);
        else if (strcmp(*at, "--library") == 0)
            world_library = read_name(*++at);
        else if (strcmp(*at, "--leave-out") == 0)
            read_gap(c, *++at);
        else
            read_flag(c, *at);
    }
}

/* Addresses decide where blocks go: the same in every run, where the system allows it. */
static void fix_addresses(char **arguments) {
    int now = personality(0xFFFFFFFF);
    if (now == -1 || now & ADDR_NO_RANDOMIZE) return;
    if (personality((unsigned long)now | ADDR_NO_RANDOMIZE) == -1) return;
    execv("/proc/self/exe", arguments);
}

int main(int count, char **arguments) {
    static command c = {.seed = 1, .shrinks = 1, .shard = {0, 1}};
    world_counts *counts;
    (void)count;
    read_steps(&c, "20000");
    read_command(&c, arguments);
    fix_addresses(arguments);
    counts = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (counts == MAP_FAILED) {
        perror("mmap");
        return 2;
    }
    return c.sequences ? run_sequences(&c, counts) : run_all(&c, counts);
}
