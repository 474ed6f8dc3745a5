/* Runs CUDA kernels on the CPU, thread by thread, with the meaning that CUDA gives them.
 *
 * The kernels are the shipped sources: emulated_cuda.h stands for what nvcc knows by itself, and
 * g++ compiles ops/cuda_*.cu with it. Each CUDA thread is a fiber. A fiber runs until it must wait
 * for others, at a barrier or at an exchange within its warp, and then another one runs; the last
 * one to arrive computes the results for all. Blocks run one after the other, so that `__shared__`
 * is one static object.
 *
 *     order 0     threads and blocks as they are numbered
 *     order 1     the last thread that can run first, blocks from the last to the first
 *     others      whichever thread the random numbers of this seed pick
 *
 * so that a kernel that lacks a barrier gives other bits in one of them. In a build with TSan a
 * barrier orders what is around it and nothing else does: a race in shared memory, or of two
 * threads in global memory, is reported where it is.
 *
 * What is a fault, and ends the launch: threads that wait for each other for ever; lanes that wait
 * with one mask for different exchanges; a lane of a mask, or a thread of a barrier, that has
 * returned; a read of a lane that takes no part.
 */
#ifndef TENURE_EMULATOR_H
#define TENURE_EMULATOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { EMULATED_WARP = 32, EMULATED_THREADS_MAX = 1024, EMULATED_FAULT_BYTES = 512 };

/* ---- what a kernel sees ---------------------------------------------------------------------- */

typedef struct emulated_dim {
    unsigned x, y, z;
} emulated_dim;

/* Of the thread that runs. */
typedef struct emulated_place {
    emulated_dim thread, block, block_size, grid_size;
} emulated_place;
extern emulated_place emulated_current;

typedef enum emulated_exchange {
    EMULATED_SYNC = 0,
    EMULATED_SHUFFLE, /* the value of the lane that `argument` names */
    EMULATED_BALLOT,  /* the mask of lanes whose value is not 0 */
    EMULATED_MATCH,   /* the mask of lanes with the same value */
    EMULATED_ADD,     /* of 32-bit values, as are those that follow */
    EMULATED_AND,
    EMULATED_OR,
    EMULATED_XOR,
    EMULATED_MIN,
    EMULATED_MAX,
    EMULATED_MIN_SIGNED,
    EMULATED_MAX_SIGNED
} emulated_exchange;

/* Between the lanes of the mask, of which this is one. */
uint64_t emulated_in_warp(emulated_exchange kind, uint32_t mask, uint64_t value, int argument);

/* The lane that runs, 0 to 31. */
int emulated_lane(void);

/* All threads of the block; returns how many came with a predicate that is not 0. */
int emulated_in_block(int predicate);

/* Other threads run: this one waits for what one of them writes. */
void emulated_let_others(void);

/* The kernel has done what it must not. Does not return. */
__attribute__((noreturn)) void emulated_fault(const char *words);

/* ---- launches -------------------------------------------------------------------------------- */

/* A kernel takes one argument by value. `image` is the .cu that it is in. */
typedef struct emulated_kernel {
    const char *image;
    const char *name;
    size_t argument_bytes;
    void (*invoke)(const void *argument);
} emulated_kernel;

/* All kernels of the library: written by list_kernels.py when it is built. */
extern const emulated_kernel emulated_kernels[];
extern const size_t emulated_kernel_count;

/* And all their shared memory, which is all ones when a launch begins; the last has no image. */
typedef struct emulated_shared {
    const char *image;
    void *address;
    size_t bytes;
} emulated_shared;
extern const emulated_shared emulated_shared_memory[];

const emulated_kernel *emulated_kernel_find(const char *image, const char *name);

typedef struct emulated_launch {
    const emulated_kernel *kernel;
    const void *argument;
    unsigned blocks;  /* grid and block have one dimension */
    unsigned threads; /* of a block */
} emulated_launch;

/* Runs the kernel now, on the calling thread; one launch at a time, others wait. */
void emulated_run(const emulated_launch *launch);

/* How the launches from now on choose among threads; see above. */
void emulated_set_order(uint64_t order);

/* What the first launch with a fault since the last call did wrong; "" if none did. */
void emulated_take_fault(char text[EMULATED_FAULT_BYTES]);

#ifdef __cplusplus
}
#endif

#endif
