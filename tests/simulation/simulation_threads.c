/* Threads that take turns: real ones, so that what the library keeps for a thread is there, but
 * only one of them runs at a time, for a number of steps that the seed gives. See simulation.h. */
#include <pthread.h>
#include <semaphore.h>

#include "simulation.h"

enum { TURN_STEPS_MAX = 48 };

typedef struct turn_taker {
    pthread_t thread;
    sem_t mine; /* posted: this thread's turn */
    sem_t done;
    struct turns *turns;
    int is_running;
    int must_end;
} turn_taker;

typedef struct turns {
    world *w;
    const unsigned char *left_out; /* a mark a step; NULL: none */
    uint64_t from;                 /* of the turn */
    uint64_t to;
    turn_taker takers[WORLD_THREADS];
} turns;

/* ---- steps ----------------------------------------------------------------------------------- */

/* To ask for statistics stops all threads' caches: some worlds ask only now and then, so that the
 * caches are also seen as they are between. */
static void check_books(world *w) {
    tn_pool_stats stats;
    for (int slot = 0; slot < WORLD_POOLS && w->step % w->books_every == 0; slot++) {
        if (w->pools[slot].pool) world_check_pool(w, slot, &stats);
    }
    world_check_races(w);
    if (w->step % w->walk_every == 0) world_walk(w);
}

/* Up to the end of the turn, or to the step after which the thread has to end. */
static void take_turn(turns *t) {
    world *w = t->w;
    while (t->from < t->to && !w->ends_thread) {
        w->step = t->from++;
        if (t->left_out && t->left_out[w->step]) continue;
        world_random random = world_random_of(w->seed, w->step);
        world_step(w, &random);
        check_books(w);
        w->counts->steps++;
    }
}

/* ---- turns ----------------------------------------------------------------------------------- */

static void *run_taker(void *argument) {
    turn_taker *taker = argument;
    for (;;) {
        sem_wait(&taker->mine);
        if (taker->must_end) break;
        take_turn(taker->turns);
        sem_post(&taker->done);
    }
    return NULL;
}

static void begin_taker(turns *t, int index) {
    turn_taker *taker = &t->takers[index];
    taker->turns = t;
    taker->must_end = 0;
    WORLD_EXPECT(t->w, pthread_create(&taker->thread, NULL, run_taker, taker) == 0,
                 "a thread can not be made");
    taker->is_running = 1;
}

static void end_taker(turns *t, int index) {
    turn_taker *taker = &t->takers[index];
    world *w = t->w;
    if (!taker->is_running) return;
    taker->must_end = 1;
    sem_post(&taker->mine);
    pthread_join(taker->thread, NULL);
    taker->is_running = 0;
    w->counts->threads_ended++;
}

static void give_turn(turns *t, int index) {
    turn_taker *taker = &t->takers[index];
    world *w = t->w;
    if (!taker->is_running) begin_taker(t, index);
    w->thread = index;
    sem_post(&taker->mine);
    sem_wait(&taker->done);
    if (!w->ends_thread) return;
    end_taker(t, index);
    w->ends_thread = 0;
}

void world_run(world *w, uint64_t steps, const unsigned char *left_out) {
    turns t = {.w = w, .left_out = left_out};
    world_random setup = world_random_of(w->seed, UINT64_MAX - 1);
    size_t threads = world_one_in(&setup, 3) ? 1 : 2 + world_below(&setup, WORLD_THREADS - 1);
    for (int i = 0; i < WORLD_THREADS; i++) {
        sem_init(&t.takers[i].mine, 0, 0);
        sem_init(&t.takers[i].done, 0, 0);
    }
    while (t.from < steps) {
        world_random random = world_random_of(w->seed, UINT64_MAX - 2 - t.from);
        uint64_t turn = threads == 1 ? 4096 : 1 + world_below(&random, TURN_STEPS_MAX);
        t.to = turn < steps - t.from ? t.from + turn : steps;
        give_turn(&t, (int)world_below(&random, threads));
    }
    for (int i = 0; i < WORLD_THREADS; i++) {
        end_taker(&t, i);
        sem_destroy(&t.takers[i].mine);
        sem_destroy(&t.takers[i].done);
    }
    w->thread = WORLD_THREADS; /* none of them */
}
