/* The scheduler of a block's threads: see emulator.h.
 *
 * Invariant: a thread is in `ready` once if it can run and has not begun to, and nowhere else;
 * `waiting` says for what the others wait. Threads that a fault has left in the middle are
 * forgotten before the next block.
 */
#include "emulator.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator_fiber.h"

typedef enum thread_state { READY, IN_WARP, IN_BLOCK, DONE } thread_state;

typedef struct emulated_thread {
    thread_state state;
    emulated_exchange kind; /* IN_WARP: what for, and with what */
    uint32_t mask;
    uint64_t value;
    int argument;
    int predicate; /* IN_BLOCK */
} emulated_thread;

emulated_place emulated_current;

static struct {
    pthread_mutex_t lock; /* of a launch, and of `fault` and `order` */
    uint64_t order;
    uint64_t random;
    char fault[EMULATED_FAULT_BYTES];
    const emulated_launch *launch;
    emulated_thread threads[EMULATED_THREADS_MAX];
    int ready[EMULATED_THREADS_MAX]; /* a ring */
    int ready_first, ready_count;
    int in_block; /* threads at the barrier */
    int idle;     /* times that a thread let others run, one after the other */
    int done;
    int barrier_result;
    int is_faulted;                                      /* this launch */
    char sync[EMULATED_THREADS_MAX / EMULATED_WARP + 1]; /* TSan: a warp's, then the block's */
} emulator = {.lock = PTHREAD_MUTEX_INITIALIZER};

enum { BLOCK_SYNC = EMULATED_THREADS_MAX / EMULATED_WARP, IDLE_MAX = 1 << 22 };

/* ---- who runs next -------------------------------------------------------------------------- */

static uint64_t next_random(void) {
    uint64_t z = (emulator.random += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static int *ready_at(int index) {
    return &emulator.ready[(emulator.ready_first + index) % EMULATED_THREADS_MAX];
}

static void make_ready(int thread) {
    emulator.threads[thread].state = READY;
    emulator.idle = 0;
    *ready_at(emulator.ready_count++) = thread;
}

static int take_ready(void) {
    int last = emulator.ready_count - 1;
    int pick = emulator.order == 0 ? 0 : emulator.order == 1 ? last : 0;
    if (emulator.order > 1) pick = (int)(next_random() % (uint64_t)emulator.ready_count);
    int thread = *ready_at(pick);
    emulator.ready_count--;
    if (emulator.order == 0) {
        emulator.ready_first = (emulator.ready_first + 1) % EMULATED_THREADS_MAX;
    } else {
        *ready_at(pick) = *ready_at(last);
    }
    return thread;
}

static int self(void) { return (int)emulated_current.thread.x; }

int emulated_lane(void) { return self() % EMULATED_WARP; }

/* The other threads run; comes back when this one may go on. */
static void wait_for_others(void) {
    int thread = self();
    emulator_fiber_leave(thread);
    emulated_current.thread.x = (unsigned)thread;
}

void emulated_fault(const char *words) {
    if (emulator.fault[0] == '\0') {
        snprintf(emulator.fault, sizeof emulator.fault, "%s, block %u, thread %u: %s",
                 emulator.launch->kernel->name, emulated_current.block.x, emulated_current.thread.x,
                 words);
    }
    emulator.is_faulted = 1;
    emulator_fiber_release(&emulator.sync[BLOCK_SYNC]);
    for (;;)
        emulator_fiber_leave(self());
}

/* ---- within a warp -------------------------------------------------------------------------- */

/* Do all lanes of the mask wait, and for the same? A lane that never will is a fault. */
static int is_complete(int first, const emulated_thread *own) {
    for (int lane = 0; lane < EMULATED_WARP; lane++) {
        if (!(own->mask >> lane & 1)) continue;
        if (first + lane >= (int)emulator.launch->threads)
            emulated_fault("an exchange with a lane that is not there");
        const emulated_thread *other = &emulator.threads[first + lane];
        if (other->state == DONE) emulated_fault("an exchange with a lane that has returned");
        if (other->state != IN_WARP || other->mask != own->mask) return 0; /* not here yet */
        if (other->kind != own->kind) emulated_fault("an exchange with lanes in another one");
    }
    return 1;
}

static uint64_t combined(emulated_exchange kind, uint64_t a, uint64_t b) {
    switch (kind) {
    case EMULATED_ADD: return (uint32_t)(a + b);
    case EMULATED_AND: return a & b;
    case EMULATED_OR: return a | b;
    case EMULATED_XOR: return a ^ b;
    case EMULATED_MIN: return a < b ? a : b;
    case EMULATED_MAX: return a > b ? a : b;
    case EMULATED_MIN_SIGNED: return (int32_t)a < (int32_t)b ? a : b;
    default: return (int32_t)a > (int32_t)b ? a : b;
    }
}

static uint64_t reduced(const uint64_t value[EMULATED_WARP], emulated_exchange kind,
                        uint32_t mask) {
    int lane = __builtin_ctz(mask);
    uint64_t result = value[lane];
    while (++lane < EMULATED_WARP)
        if (mask >> lane & 1) result = combined(kind, result, value[lane]);
    return result;
}

static uint64_t matching(const uint64_t value[EMULATED_WARP], uint32_t mask, uint64_t wanted,
                         int is_ballot) {
    uint64_t lanes = 0;
    for (int lane = 0; lane < EMULATED_WARP; lane++) {
        int is_in = is_ballot ? value[lane] != 0 : value[lane] == wanted;
        if (mask >> lane & 1 && is_in) lanes |= (uint64_t)1 << lane;
    }
    return lanes;
}

/* What a lane gets goes to where its own value was. */
static void resolve(int first, emulated_exchange kind, uint32_t mask) {
    uint64_t value[EMULATED_WARP] = {0};
    for (int lane = 0; lane < EMULATED_WARP; lane++)
        if (mask >> lane & 1) value[lane] = emulator.threads[first + lane].value;
    uint64_t all = kind >= EMULATED_ADD ? reduced(value, kind, mask) : 0;
    for (int lane = 0; lane < EMULATED_WARP; lane++) {
        if (!(mask >> lane & 1)) continue;
        emulated_thread *thread = &emulator.threads[first + lane];
        if (kind == EMULATED_SHUFFLE) {
            if (!(mask >> thread->argument & 1))
                emulated_fault("a shuffle from a lane that takes no part");
            thread->value = value[thread->argument];
        } else if (kind == EMULATED_BALLOT || kind == EMULATED_MATCH) {
            thread->value = matching(value, mask, thread->value, kind == EMULATED_BALLOT);
        } else {
            thread->value = all;
        }
    }
}

uint64_t emulated_in_warp(emulated_exchange kind, uint32_t mask, uint64_t value, int argument) {
    int thread = self(), first = thread - thread % EMULATED_WARP;
    emulated_thread *own = &emulator.threads[thread];
    void *sync = &emulator.sync[thread / EMULATED_WARP];
    if (!(mask >> emulated_lane() & 1)) emulated_fault("an exchange whose mask lacks the caller");
    *own = (emulated_thread){IN_WARP, kind, mask, value, argument, 0};
    if (kind == EMULATED_SYNC) emulator_fiber_release(sync);
    if (is_complete(first, own)) {
        resolve(first, kind, mask);
        for (int lane = 0; lane < EMULATED_WARP; lane++)
            if (mask >> lane & 1 && first + lane != thread) make_ready(first + lane);
        own->state = READY;
    } else {
        wait_for_others();
    }
    if (kind == EMULATED_SYNC) emulator_fiber_acquire(sync);
    return own->value;
}

/* ---- the whole block ------------------------------------------------------------------------ */

int emulated_in_block(int predicate) {
    int thread = self(), threads = (int)emulator.launch->threads;
    emulator.threads[thread].state = IN_BLOCK;
    emulator.threads[thread].predicate = predicate != 0;
    emulator_fiber_release(&emulator.sync[BLOCK_SYNC]);
    if (emulator.done > 0) emulated_fault("a barrier after a thread of the block has returned");
    if (++emulator.in_block < threads) {
        wait_for_others();
    } else {
        emulator.in_block = 0;
        emulator.barrier_result = 0;
        for (int other = 0; other < threads; other++)
            emulator.barrier_result += emulator.threads[other].predicate;
        for (int other = 0; other < threads; other++)
            if (other != thread) make_ready(other);
        emulator.threads[thread].state = READY;
    }
    emulator_fiber_acquire(&emulator.sync[BLOCK_SYNC]);
    return emulator.barrier_result;
}

/* In falling order the ring's first is the last one of all. */
void emulated_let_others(void) {
    if (++emulator.idle > IDLE_MAX) emulated_fault("a wait for what nobody writes");
    if (emulator.order == 1) {
        emulator.ready_first =
            (emulator.ready_first + EMULATED_THREADS_MAX - 1) % EMULATED_THREADS_MAX;
        emulator.ready_count++;
        *ready_at(0) = self();
    } else {
        *ready_at(emulator.ready_count++) = self();
    }
    wait_for_others();
}

/* A fiber is a CUDA thread of one block after another. */
static void run_thread(int thread) {
    for (;;) {
        emulator_fiber_acquire(&emulator.sync[BLOCK_SYNC]);
        emulated_current.thread.x = (unsigned)thread;
        emulator.launch->kernel->invoke(emulator.launch->argument);
        emulated_current.thread.x = (unsigned)thread;
        emulator.threads[thread].state = DONE;
        if (emulator.in_block > 0) emulated_fault("a return while others are at a barrier");
        emulator.done++;
        emulator_fiber_release(&emulator.sync[BLOCK_SYNC]);
        emulator_fiber_leave(thread);
    }
}

static void tell_deadlock(void) {
    int thread = 0;
    while (emulator.threads[thread].state == DONE)
        thread++;
    if (emulator.fault[0] == '\0') {
        snprintf(emulator.fault, sizeof emulator.fault,
                 "%s, block %u: no thread can go on; thread %d waits %s",
                 emulator.launch->kernel->name, emulated_current.block.x, thread,
                 emulator.threads[thread].state == IN_BLOCK ? "at a barrier of the block"
                                                            : "for lanes of its warp");
    }
    emulator.is_faulted = 1;
}

static void run_block(unsigned block) {
    int threads = (int)emulator.launch->threads;
    emulated_current.block = (emulated_dim){block, 0, 0};
    emulator.in_block = emulator.done = emulator.idle = 0;
    emulator.ready_first = emulator.ready_count = 0;
    emulator_fiber_release(&emulator.sync[BLOCK_SYNC]);
    for (int thread = 0; thread < threads; thread++)
        make_ready(thread);
    while (emulator.ready_count > 0 && !emulator.is_faulted) {
        int thread = take_ready();
        emulated_current.thread.x = (unsigned)thread;
        emulator_fiber_enter(thread);
    }
    if (!emulator.is_faulted && emulator.done < threads) tell_deadlock();
    emulator_fiber_acquire(&emulator.sync[BLOCK_SYNC]);
    for (int thread = 0; emulator.is_faulted && thread < threads; thread++)
        emulator_fiber_forget(thread);
}

/* ---- launches ------------------------------------------------------------------------------- */

const emulated_kernel *emulated_kernel_find(const char *image, const char *name) {
    for (size_t i = 0; i < emulated_kernel_count; i++) {
        const emulated_kernel *kernel = &emulated_kernels[i];
        if (strcmp(kernel->image, image) == 0 && strcmp(kernel->name, name) == 0) return kernel;
    }
    return NULL;
}

static void scramble_shared(const char *image) {
    for (const emulated_shared *shared = emulated_shared_memory; shared->image; shared++)
        if (strcmp(shared->image, image) == 0) memset(shared->address, 0xFF, shared->bytes);
}

void emulated_run(const emulated_launch *launch) {
    if (launch->threads > EMULATED_THREADS_MAX) abort();
    pthread_mutex_lock(&emulator.lock);
    emulator.launch = launch;
    emulator.random = emulator.order;
    emulator.is_faulted = 0;
    emulated_current = (emulated_place){.block_size = {launch->threads, 1, 1},
                                        .grid_size = {launch->blocks, 1, 1}};
    scramble_shared(launch->kernel->image);
    emulator_fibers_begin((int)launch->threads, run_thread);
    unsigned first = emulator.order > 1 ? (unsigned)(next_random() % launch->blocks) : 0;
    for (unsigned i = 0; i < launch->blocks && !emulator.is_faulted; i++) {
        unsigned block = (unsigned)(((uint64_t)first + i) % launch->blocks);
        run_block(emulator.order == 1 ? launch->blocks - 1 - i : block);
    }
    emulator_fibers_end();
    pthread_mutex_unlock(&emulator.lock);
}

void emulated_set_order(uint64_t order) {
    pthread_mutex_lock(&emulator.lock);
    emulator.order = order;
    pthread_mutex_unlock(&emulator.lock);
}

void emulated_take_fault(char text[EMULATED_FAULT_BYTES]) {
    pthread_mutex_lock(&emulator.lock);
    memcpy(text, emulator.fault, EMULATED_FAULT_BYTES);
    emulator.fault[0] = '\0';
    pthread_mutex_unlock(&emulator.lock);
}
