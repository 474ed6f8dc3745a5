/* What frameworks ask of their allocators, with a status: torch_shim.cpp and cupy_ort.c turn it
 * into what each framework expects. */
#ifndef TENURE_FRAMEWORK_CALLS_H
#define TENURE_FRAMEWORK_CALLS_H

#include "error.h"

/* Whose allocations go to a pool of the framework's: accepts is 1 for those of `stream`. */
typedef struct tn__stream_filter {
    int (*accepts)(void *context, tn_stream stream);
    void (*end)(void *context); /* frees the context; NULL: nothing to free */
    void *context;
} tn__stream_filter;

/* Memory for the stream: of the graph pool that its capture belongs to, else of the device's pool.
 * 0 bytes give NULL. */
TN_SISTER_API TN_MUST_USE tn_status tn__framework_alloc(int device, size_t bytes, tn_stream stream,
                                                        const char *owner, void **out);

/* Frees in the order of the stream, and of those that tn__framework_use named. What can not be done
 * during a capture is done after it; behind all work of the devices if the stream has been ended.
 * TN_INVALID_ARGUMENT: no live block begins there. */
TN_SISTER_API TN_MUST_USE tn_status tn__framework_free(int device, void *block, tn_stream stream);

/* The stream has, or will have until the block is freed, work with it. Memory that is of no pool
 * here is none of our concern: TN_OK. */
TN_SISTER_API TN_MUST_USE tn_status tn__framework_use(void *block, tn_stream stream);

/* A block for the stream that is freed without one, from the device's pool whatever captures. */
TN_SISTER_API TN_MUST_USE tn_status tn__framework_segment(int device, size_t bytes,
                                                          tn_stream stream, const char *owner,
                                                          void **out);
/* What fails is told on stderr. NULL and other devices' blocks: nothing is done. */
TN_SISTER_API void tn__framework_free_unordered(int device, void *block);

/* At most this part of the device's memory, 0 to 1. See tn_pool_limit_set. */
TN_SISTER_API TN_MUST_USE tn_status tn__framework_fraction_set(int device, double fraction);

/* A pool of the framework's for captured graphs, named by two numbers: see graph_memory.h. begin
 * owns the filter's context once it has succeeded. end and release without a begin are
 * TN_INVALID_ARGUMENT. */
TN_SISTER_API TN_MUST_USE tn_status tn__framework_begin(int device, const uint64_t key[2],
                                                        const tn__stream_filter *filter);
TN_SISTER_API TN_MUST_USE tn_status tn__framework_end(int device, const uint64_t key[2]);
TN_SISTER_API TN_MUST_USE tn_status tn__framework_release(int device, const uint64_t key[2]);

/* Says on stderr what could not be done, with tn_error_last(): at most 20 times in a process. */
TN_SISTER_API void tn__framework_warn(const char *what);

#endif
