/* Stacks that are switched by hand, told to the sanitizers of the build.
 *
 * `emulator_fiber` 0 ... are those of CUDA threads; the thread that makes a launch has one of its
 * own for as long as it does. All calls come from that thread, between begin and end.
 */
#ifndef TENURE_EMULATOR_FIBER_H
#define TENURE_EMULATOR_FIBER_H

/* The calling thread is about to run fibers 0 ... count - 1, each of which will call `body` with
 * its number at its first switch, and must never return from it. Fibers that are there already
 * keep their state. */
void emulator_fibers_begin(int count, void (*body)(int fiber));

/* From the thread to a fiber, and from a fiber back. Neither orders memory for TSan. */
void emulator_fiber_enter(int fiber);
void emulator_fiber_leave(int fiber);

/* What the fiber was doing is given up: its next switch calls `body` anew. */
void emulator_fiber_forget(int fiber);

void emulator_fibers_end(void);

/* For TSan: what happened before release() happens before what follows an acquire(). */
void emulator_fiber_release(void *at);
void emulator_fiber_acquire(void *at);

#endif
