/* plane_simulation: what planes do, against an oracle, on the simulated driver.
 *
 *     plane_simulation --sequences 6                  all sequences of six operations
 *     plane_simulation --sequences 6 --shard 3/16     the third of 16 parts of them
 *     plane_simulation --faults 3                     all of three, the last one under each fault
 *     plane_simulation --seed 7 --steps 10000000      random ones, of all formats and policies
 *
 * Sequences that come to the same state (of planes, leases, and the order of uses on streams) by
 * different ways are continued once, and states that differ only in the names of the two tensors
 * and the two streams are the same. So each operation is tried in each state that so many
 * operations can reach. An operation that changes nothing is tried too, in turn with others.
 * Exit status: 0, 1 (it has failed), 2 (bad usage). With --expect-failure 0 and 1 are the other
 * way round: that is for builds in which a fault has been planted.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "plane_world.h"

enum { DEPTH_MAX = 8, OPERATIONS_MAX = 512, NTH_MAX = 200, LEASES_IN_SEQUENCES = 5 };

typedef struct command {
    int sequences, faults;
    uint64_t seed, steps;
    unsigned shard, shards;
    int expects_failure;
    const char *library;
} command;

/* ---- states that were reached -------------------------------------------------------------- */

typedef struct path {
    model_operation steps[DEPTH_MAX];
} path;

typedef struct reached {
    uint64_t *hashes; /* open addressing; 0: free */
    size_t count, limit;
    path *paths; /* of the newest length */
    size_t path_count, path_limit;
} reached;

static void *more(void *memory, size_t bytes) {
    void *larger = realloc(memory, bytes);
    if (larger) return larger;
    fprintf(stderr, "plane_simulation: no memory\n");
    exit(2);
}

static int insert(uint64_t *hashes, size_t limit, uint64_t hash) {
    size_t at = (size_t)(hash * UINT64_C(0x9E3779B97F4A7C15)) & (limit - 1);
    while (hashes[at] && hashes[at] != hash)
        at = (at + 1) & (limit - 1);
    if (hashes[at]) return 0;
    hashes[at] = hash;
    return 1;
}

static void grow(reached *r) {
    size_t limit = r->limit ? 2 * r->limit : 1 << 12;
    uint64_t *hashes = more(NULL, limit * sizeof *hashes);
    memset(hashes, 0, limit * sizeof *hashes);
    for (size_t i = 0; i < r->limit; i++) {
        if (r->hashes[i]) (void)insert(hashes, limit, r->hashes[i]);
    }
    free(r->hashes);
    r->hashes = hashes;
    r->limit = limit;
}

/* 1 if it was not there. */
static int reach(reached *r, uint64_t hash) {
    if (2 * r->count >= r->limit) grow(r);
    int is_new = insert(r->hashes, r->limit, hash);
    r->count += (size_t)is_new;
    return is_new;
}

static void add_path(reached *r, const path *p) {
    if (r->path_count == r->path_limit) {
        r->path_limit = r->path_limit ? 2 * r->path_limit : 1024;
        r->paths = more(r->paths, r->path_limit * sizeof *r->paths);
    }
    r->paths[r->path_count++] = *p;
}

/* ---- all sequences ------------------------------------------------------------------------- */

typedef struct search {
    plane_world *w;
    const command *c;
    tn_format format;
    tn_plane_policy policy;
    int length; /* of the sequences that are run to their end */
    uint64_t sequences, faults_met;
} search;

static void model_of(const search *s, const path *p, int length, model *m) {
    model_init(m, s->format, s->policy);
    for (int i = 0; i < length; i++)
        (void)model_step(m, p->steps[i]);
}

static void run_path(search *s, const path *p, int length) {
    plane_world_begin(s->w, s->format, s->policy);
    for (int i = 0; i < length; i++)
        plane_world_step(s->w, p->steps[i]);
}

/* A fault at each call that the operation makes, until one is not met. */
static void run_faults(search *s, const path *p, int length, model_operation op) {
    for (int kind = 0; kind < 4; kind++) {
        for (long nth = 1; nth <= NTH_MAX; nth++) {
            plane_fault fault = {kind & 1, kind >> 1, nth};
            run_path(s, p, length);
            int is_met = plane_world_step_faulted(s->w, op, fault);
            plane_world_end(s->w);
            s->faults_met += (uint64_t)is_met;
            if (!is_met) break;
        }
    }
}

/* Tries every operation in the state that the path leads to. What changes nothing is done in one
 * run, one after the other. */
static void try_all(search *s, const path *p, int length, int is_last) {
    model_operation operations[OPERATIONS_MAX];
    model before, after;
    model_of(s, p, length, &before);
    int count = model_operations(&before, LEASES_IN_SEQUENCES, 0, operations, OPERATIONS_MAX);
    run_path(s, p, length);
    for (int i = 0; i < count; i++) {
        after = before;
        (void)model_step(&after, operations[i]);
        s->sequences++;
        if (memcmp(&before, &after, sizeof before) == 0) plane_world_step(s->w, operations[i]);
    }
    plane_world_end(s->w);
    for (int i = 0; i < count && is_last; i++) {
        after = before;
        (void)model_step(&after, operations[i]);
        if (s->c->faults) run_faults(s, p, length, operations[i]);
        if (memcmp(&before, &after, sizeof before) == 0) continue;
        run_path(s, p, length);
        plane_world_step(s->w, operations[i]);
        plane_world_end(s->w);
    }
}

/* The states that one more operation reaches. */
static void extend(const search *s, const path *p, int length, reached *r, reached *next) {
    model_operation operations[OPERATIONS_MAX];
    model before, after;
    model_of(s, p, length, &before);
    int count = model_operations(&before, LEASES_IN_SEQUENCES, 0, operations, OPERATIONS_MAX);
    for (int i = 0; i < count; i++) {
        path longer = *p;
        after = before;
        (void)model_step(&after, operations[i]);
        if (!reach(r, model_hash(&after))) continue;
        longer.steps[length] = operations[i];
        add_path(next, &longer);
    }
}

static void search_format(search *s) {
    reached all = {0}, now = {0};
    model start;
    path none = {{{0}}};
    model_init(&start, s->format, s->policy);
    (void)reach(&all, model_hash(&start));
    add_path(&now, &none);
    for (int length = 0; length < s->length; length++) {
        reached next = {0};
        for (size_t i = 0; i < now.path_count; i++) {
            if (length + 1 < s->length) extend(s, &now.paths[i], length, &all, &next);
            if (i % s->c->shards != s->c->shard) continue;
            (void)snprintf(s->w->label, sizeof s->w->label, "--sequences %d", s->length);
            try_all(s, &now.paths[i], length, 1);
            if (i % 1024 == 0) plane_world_synchronize(s->w);
        }
        printf("%s, %s: %zu states after %d operations, %llu sequences, %llu faults\n",
               tn_format_name(s->format), tn_policy_name(s->policy), now.path_count, length,
               (unsigned long long)s->sequences, (unsigned long long)s->faults_met);
        fflush(stdout);
        free(now.paths);
        now = next;
    }
    free(now.paths);
    free(all.hashes);
}

static const struct {
    tn_format format;
    tn_plane_policy policy;
} kinds[] = {{TN_FORMAT_FP8_BLOCK_1D, TN_POLICY_KEEP},
             {TN_FORMAT_FP8_BLOCK_2D, TN_POLICY_KEEP},
             {TN_FORMAT_FP8_BLOCK_2D, TN_POLICY_UNTIL_LAST_USE},
             {TN_FORMAT_FP8_BLOCK_2D, TN_POLICY_UNTIL_BACKWARD_END},
             {TN_FORMAT_FP8_TENSOR, TN_POLICY_KEEP},
             {TN_FORMAT_FP8_TENSOR, TN_POLICY_UNTIL_BACKWARD_END}};

enum { KINDS = sizeof kinds / sizeof *kinds };

static void run_sequences(plane_world *w, const command *c) {
    for (int i = 0; i < KINDS; i++) {
        search s = {.w = w, .c = c, .length = c->faults ? c->faults : c->sequences};
        s.format = kinds[i].format;
        s.policy = kinds[i].policy;
        search_format(&s);
    }
}

/* ---- random sequences ---------------------------------------------------------------------- */

static uint64_t random_of(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    uint64_t mixed = (*state ^ (*state >> 33)) * UINT64_C(0xFF51AFD7ED558CCD);
    return mixed ^ (mixed >> 33);
}

/* What ends much, or makes other operations of no effect, is done more seldom. */
static int is_seldom(int kind) {
    return kind == MODEL_DESTROY || kind == MODEL_POLICY || kind == MODEL_BUDGET ||
           kind >= MODEL_SLOT_BUFFERS;
}

/* Not modelled: a budget's choice under a fault, which of two buffers a derivation that failed has
 * taken, a stream that can not be made anew. */
static int may_fail(const model *m, model_operation op) {
    int tensor = op.tensor == MODEL_VIEW ? m->view.base : op.tensor;
    if (op.kind == MODEL_RENEW || op.kind == MODEL_BUDGET) return 0;
    return op.kind != MODEL_RELEASE || m->tensors[tensor].policy != TN_POLICY_BUDGET;
}

typedef struct random_run {
    tn_format format;
    tn_plane_policy policy;
    int steps, leases_max, is_faulty;
} random_run;

typedef struct fault_counts {
    uint64_t seeds, met, left; /* left: steps with memory that could not be given back */
} fault_counts;

/* Of all that can be tried most is refused while much is leased, so that leases end soon, and much
 * changes nothing: what moves planes and contents comes twice as often. */
static model_operation random_operation(const model *m, int leases_max, uint64_t *state) {
    model_operation operations[OPERATIONS_MAX];
    if (m->lease_count && random_of(state) % 3 == 0) {
        int kind = random_of(state) % 4 ? MODEL_END : MODEL_ABANDON;
        return (model_operation){(unsigned char)kind, 0, 0, 0,
                                 (unsigned char)(random_of(state) % m->lease_count)};
    }
    int count = model_operations(m, leases_max, 1, operations, OPERATIONS_MAX);
    model_operation op = operations[random_of(state) % (uint64_t)count];
    int moves = op.kind == MODEL_REQUIRE || (op.kind >= MODEL_RELEASE && op.kind <= MODEL_REPLACE);
    if (!moves && random_of(state) % 2) op = operations[random_of(state) % (uint64_t)count];
    return op;
}

static void random_step(plane_world *w, uint64_t *state, const random_run *run,
                        fault_counts *counts) {
    model_operation op = random_operation(&w->m, run->leases_max, state);
    if (is_seldom(op.kind) && random_of(state) % 8) return;
    if (run->is_faulty && op.kind == MODEL_SLOT_BUFFERS) return;
    if (run->is_faulty && random_of(state) % 4 == 0 && may_fail(&w->m, op)) {
        plane_fault fault = {(int)(random_of(state) % 2), (int)(random_of(state) % 2),
                             1 + (long)(random_of(state) % (1 + random_of(state) % 12))};
        counts->met += (uint64_t)plane_world_step_faulted(w, op, fault);
    } else {
        plane_world_step(w, op);
    }
    counts->left += w->remains > 0;
}

static random_run run_of(uint64_t *state) {
    random_run run;
    run.format = kinds[random_of(state) % KINDS].format;
    run.policy = (tn_plane_policy)(TN_POLICY_KEEP + random_of(state) % (TN_POLICY_COUNT - 1));
    run.steps = 20 + (int)(random_of(state) % 400);
    run.leases_max = 1 + (int)(random_of(state) % MODEL_LEASES);
    run.is_faulty = random_of(state) % 4 == 0;
    return run;
}

/* Runs of some hundred steps, each of a seed of its own; in one of four, calls fail. */
static void run_random(plane_world *w, const command *c) {
    fault_counts counts = {0};
    uint64_t seed = c->seed;
    for (; w->steps < c->steps; seed++) {
        uint64_t state = seed * UINT64_C(0x9E3779B97F4A7C15);
        random_run run = run_of(&state);
        (void)snprintf(w->label, sizeof w->label, "--seed %llu --steps 1",
                       (unsigned long long)seed);
        plane_world_begin(w, run.format, run.policy);
        for (int i = 0; i < run.steps && w->m.writes < 250; i++) /* they are numbered in a byte */
            random_step(w, &state, &run, &counts);
        counts.seeds += (uint64_t)run.is_faulty;
        plane_world_end(w);
        plane_world_synchronize(w);
    }
    printf("%llu steps of %llu seeds; %llu of them with failures, %llu met, %llu steps with memory "
           "that could not be given back yet\n",
           (unsigned long long)w->steps, (unsigned long long)(seed - c->seed),
           (unsigned long long)counts.seeds, (unsigned long long)counts.met,
           (unsigned long long)counts.left);
}

/* ---- command line -------------------------------------------------------------------------- */

static _Noreturn void explain(void) {
    fputs("usage: plane_simulation [--sequences N | --faults N] [--shard I/N] [--seed N]\n"
          "                        [--steps N] [--library FILE] [--expect-failure]\n",
          stderr);
    exit(2);
}

static uint64_t read_number(const char *text, uint64_t most) {
    char *end = NULL;
    unsigned long long number = text ? strtoull(text, &end, 10) : 0;
    if (!text || end == text || *end || number == 0 || number > most) explain();
    return number;
}

static void read_shard(command *c, const char *text) {
    if (!text || sscanf(text, "%u/%u", &c->shard, &c->shards) != 2) explain();
    if (c->shard < 1 || c->shard > c->shards) explain();
    c->shard--;
}

static void read_command(command *c, char **arguments) {
    for (char **at = arguments + 1; *at; at++) {
        if (strcmp(*at, "--sequences") == 0)
            c->sequences = (int)read_number(*++at, DEPTH_MAX);
        else if (strcmp(*at, "--faults") == 0)
            c->faults = (int)read_number(*++at, DEPTH_MAX);
        else if (strcmp(*at, "--seed") == 0)
            c->seed = read_number(*++at, UINT64_MAX);
        else if (strcmp(*at, "--steps") == 0)
            c->steps = read_number(*++at, UINT64_MAX);
        else if (strcmp(*at, "--shard") == 0)
            read_shard(c, *++at);
        else if (strcmp(*at, "--library") == 0)
            c->library = *++at;
        else if (strcmp(*at, "--expect-failure") == 0)
            c->expects_failure = 1;
        else
            explain();
    }
}

static int run(const command *c) {
    static plane_world w;
    plane_world_open(&w, c->library);
    if (c->sequences || c->faults)
        run_sequences(&w, c);
    else
        run_random(&w, c);
    plane_world_close(&w);
    return 0;
}

/* In a process of its own, so that a crash is a failure like any other. */
static int expect_failure(const command *c) {
    int status = 0;
    pid_t child = fork();
    if (child < 0) return 2;
    if (child == 0) exit(run(c));
    waitpid(child, &status, 0);
    if (status != 0) return 0;
    fprintf(stderr, "a fault was planted and not found\n");
    return 1;
}

int main(int count, char **arguments) {
    command c = {.seed = 1, .steps = 100000, .shards = 1};
    (void)count;
    read_command(&c, arguments);
    return c.expects_failure ? expect_failure(&c) : run(&c);
}
