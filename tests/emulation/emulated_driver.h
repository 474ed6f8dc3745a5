/* A CUDA driver whose device runs the kernels on the CPU.
 *
 * A program that is linked with it has this in the place of alloc/driver_cuda.c: TN_DRIVER_CUDA
 * opens a device with the host driver's memory, streams and events, on which the CUDA table of the
 * ops loads its images, finds its kernels and launches them as it does on a GPU. In the place of
 * cuBLASLt is a scripted one (scripted_cublaslt.h), or none without its header.
 */
#ifndef TENURE_EMULATED_DRIVER_H
#define TENURE_EMULATED_DRIVER_H

#include "tenure_alloc.h"

enum { EMULATED_MULTIPROCESSORS = 132 };

/* Fails the test if it can not be opened. */
tn_device *emulated_open(void);

/* Kernels that were launched since the program began: shows that a test has run any. */
uint64_t emulated_launch_count(void);

/* Whether a device that is opened from now on has products of our own: 0 at first, since scripts
 * give times to cuBLASLt's. */
extern int emulated_has_products;

/* Whether the driver of devices that are opened from now on lacks the call that boxes need. */
extern int emulated_lacks_boxes;

/* Told of each kernel that has run; NULL: nobody. */
extern void (*emulated_ran)(const char *kernel);
/* The one that was launched last. */
const char *emulated_last_kernel(void);

#endif
