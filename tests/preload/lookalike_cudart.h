/* The calls of lookalike_cudart.c: the real runtime's names, as far as the tests need them. */
#ifndef TENURE_LOOKALIKE_CUDART_H
#define TENURE_LOOKALIKE_CUDART_H

#include <stddef.h>

int cudaMalloc(void **out, size_t bytes);
int cudaFree(void *pointer);
int cudaMallocManaged(void **out, size_t bytes, unsigned flags);
int cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height);
int cudaMallocAsync(void **out, size_t bytes, void *stream);
int cudaFreeAsync(void *pointer, void *stream);
int cudaMallocFromPoolAsync(void **out, size_t bytes, void *pool, void *stream);
int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
int cudaDeviceSynchronize(void);
int cudaDeviceReset(void);
void *cudaGetDriverEntryPoint(const char *symbol, unsigned long long flags);

#endif
