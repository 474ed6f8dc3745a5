/* Blocks inside a pool's memory as NVTX tools see them: compute-sanitizer then reports a kernel
 * that touches what is no block, though it lies in memory that the driver gave out.
 *
 * NVTX's own code loads the tool that NVTX_INJECTION64_PATH names, at the first call. Compute
 * Sanitizer takes heaps that are one allocation of the driver each: so only PLAIN pools are told
 * of, and where a tool is to be told, a pool of backing AUTO is a PLAIN one.
 *
 * Where the headers of NVTX are not there when the library is built, tools are told nothing.
 */
#ifndef TENURE_NVTX_MEMORY_H
#define TENURE_NVTX_MEMORY_H

#include <stddef.h>

int tn__nvtx_is_built(void);

/* 1 if pools shall tell: a tool is injected, or TENURE_NVTX=1; and it is built. */
int tn__nvtx_is_wanted(void);

/* A heap, one allocation of the driver: of it only blocks may be touched. NULL if no tool wants to
 * know, or it can not. The device is current, here and in the calls below. */
void *tn__nvtx_heap_begin(const void *address, size_t bytes);
void tn__nvtx_heap_end(void *heap);

/* A block in the heap. It overlaps no other. name may be NULL. */
void tn__nvtx_block_begin(void *heap, const void *address, size_t bytes, const char *name);
void tn__nvtx_block_end(const void *address);

#endif
