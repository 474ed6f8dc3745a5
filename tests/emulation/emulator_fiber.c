/* Fibers on ucontext: see emulator_fiber.h.
 *
 * cmake/emulation.cmake tells which sanitizer is in the build: TSan must not instrument this file,
 * which does what no two threads could.
 */
#include "emulator_fiber.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "emulator.h"

#if defined(EMULATED_WITH_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMULATED_WITH_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

enum { STACK_BYTES = 256 << 10, GUARD_BYTES = 64 << 10 };

typedef struct context {
    ucontext_t saved;
    char *stack;
    const void *bottom; /* for ASan: of the stack that this context runs on */
    size_t bytes;
    void *fake_stack;
    void *tsan_fiber;
} context;

static context fibers[EMULATED_THREADS_MAX];
static context launcher;
static void (*fiber_body)(int fiber);

/* ---- the sanitizers' side of a switch ------------------------------------------------------ */

static void before_switch(context *from, context *to) {
#if defined(EMULATED_WITH_ASAN)
    __sanitizer_start_switch_fiber(&from->fake_stack, to->bottom, to->bytes);
#endif
#if defined(EMULATED_WITH_TSAN)
    __tsan_switch_to_fiber(to->tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
    (void)from, (void)to;
}

/* `from` is where the switch came from: its bounds are learned the first time. */
static void after_switch(context *to, context *from) {
#if defined(EMULATED_WITH_ASAN)
    __sanitizer_finish_switch_fiber(to->fake_stack, &from->bottom, &from->bytes);
#endif
    (void)to, (void)from;
}

static void switch_contexts(context *from, context *to) {
    before_switch(from, to);
    if (swapcontext(&from->saved, &to->saved) != 0) abort();
    after_switch(from, to);
}

void emulator_fiber_release(void *at) {
#if defined(EMULATED_WITH_TSAN)
    __tsan_release(at);
#endif
    (void)at;
}

void emulator_fiber_acquire(void *at) {
#if defined(EMULATED_WITH_TSAN)
    __tsan_acquire(at);
#endif
    (void)at;
}

/* ---- fibers --------------------------------------------------------------------------------- */

static void fiber_main(int fiber) {
    after_switch(&fibers[fiber], &launcher);
    fiber_body(fiber);
    abort();
}

static void prepare(int fiber) {
    context *c = &fibers[fiber];
    if (getcontext(&c->saved) != 0) abort();
    c->saved.uc_stack.ss_sp = c->stack;
    c->saved.uc_stack.ss_size = STACK_BYTES;
    c->saved.uc_link = NULL;
    c->fake_stack = NULL;
    makecontext(&c->saved, (void (*)(void))fiber_main, 1, fiber);
}

static void make(int fiber) {
    context *c = &fibers[fiber];
    char *memory = mmap(NULL, STACK_BYTES + GUARD_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) {
        perror("the stack of an emulated thread");
        abort();
    }
    c->stack = memory + GUARD_BYTES;
    c->bottom = c->stack;
    c->bytes = STACK_BYTES;
#if defined(EMULATED_WITH_TSAN)
    c->tsan_fiber = __tsan_create_fiber(0);
#endif
    prepare(fiber);
}

void emulator_fiber_forget(int fiber) {
#if defined(EMULATED_WITH_ASAN)
    __asan_unpoison_memory_region(fibers[fiber].stack, STACK_BYTES);
#endif
#if defined(EMULATED_WITH_TSAN)
    __tsan_destroy_fiber(fibers[fiber].tsan_fiber);
    fibers[fiber].tsan_fiber = __tsan_create_fiber(0);
#endif
    prepare(fiber);
}

void emulator_fibers_begin(int count, void (*body)(int fiber)) {
    fiber_body = body;
    for (int fiber = 0; fiber < count; fiber++)
        if (!fibers[fiber].stack) make(fiber);
#if defined(EMULATED_WITH_TSAN)
    launcher.tsan_fiber = __tsan_get_current_fiber();
#endif
}

void emulator_fiber_enter(int fiber) { switch_contexts(&launcher, &fibers[fiber]); }

void emulator_fiber_leave(int fiber) { switch_contexts(&fibers[fiber], &launcher); }

/* The stacks stay for the next launch, which another thread may make. */
void emulator_fibers_end(void) { launcher = (context){0}; }
