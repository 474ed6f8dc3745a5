/* An allocator as the benchmark of peers sees it: a table of calls.
 *
 * Tenure's table is in the program; every other one comes from a plug-in, a shared library that
 * exports `peer_allocators`, so that the program needs none of their libraries to be built.
 * Streams are CUstreams, which cudaStream_t is another name for. A call that fails prints why and
 * ends the program: a benchmark has nothing to save.
 */
#ifndef TENURE_PEER_ALLOCATOR_H
#define TENURE_PEER_ALLOCATOR_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct peer_allocator {
    const char *name;
    /* Once before the first call and after the last one; on the main thread. */
    void (*open)(void);
    void (*close)(void);
    /* Once on each thread that allocates, before its first call. */
    void (*enter_thread)(void);
    void *(*alloc)(size_t bytes, void *stream);
    void (*free)(void *block, size_t bytes, void *stream);
    /* Allocates for `owner`, says that `user` uses the block behind the owner's work, and frees it:
     * by whatever means this allocator has to keep the memory until both streams are done. */
    void (*use_across)(size_t bytes, void *owner, void *user);
    /* Gives all idle memory back, so that the next allocator finds the device empty. */
    void (*trim)(void);
} peer_allocator;

/* What a plug-in exports: its allocators, count of them written to *count. */
typedef const peer_allocator *(*peer_allocators_function)(int *count);

#ifdef __cplusplus
}
#endif
#endif
