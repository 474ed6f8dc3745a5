/* The seam to memory checkers: a pool's blocks inside a slab, as ASan and Valgrind should see them.
 *
 *     TN_TRACK_ALLOC(address, bytes)   the bytes may be used from here on, contents undefined
 *     TN_TRACK_FREE(address, bytes)    touching them is an error until the next TN_TRACK_ALLOC
 *     TN_TRACK_IS_ON()                 1 if a checker is there to be told
 *     TN_TRACK_IS_OUTSIDE()            1 if it is no part of the build: Valgrind
 *
 * For memory of the host driver only: what lies behind a GPU address is not a checker's business.
 * Memory goes back to the driver usable, since whoever gets the addresses next knows nothing of
 * our marks. Without a checker both are nothing and cost nothing.
 */
#ifndef TENURE_TRACK_H
#define TENURE_TRACK_H

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define TN_TRACK_ALLOC(address, bytes) ASAN_UNPOISON_MEMORY_REGION((address), (bytes))
#define TN_TRACK_FREE(address, bytes)  ASAN_POISON_MEMORY_REGION((address), (bytes))
#define TN_TRACK_IS_ON()               1
#define TN_TRACK_IS_OUTSIDE()          0
#elif defined(__has_include)
#if __has_include(<valgrind/memcheck.h>) && !defined(__SANITIZE_THREAD__)
#include <valgrind/memcheck.h>
#define TN_TRACK_ALLOC(address, bytes) ((void)VALGRIND_MAKE_MEM_UNDEFINED((address), (bytes)))
#define TN_TRACK_FREE(address, bytes)  ((void)VALGRIND_MAKE_MEM_NOACCESS((address), (bytes)))
#define TN_TRACK_IS_ON()               (RUNNING_ON_VALGRIND != 0)
#define TN_TRACK_IS_OUTSIDE()          (RUNNING_ON_VALGRIND != 0)
#endif
#endif

#ifndef TN_TRACK_ALLOC
#define TN_TRACK_ALLOC(address, bytes) ((void)(address), (void)(bytes))
#define TN_TRACK_FREE(address, bytes)  ((void)(address), (void)(bytes))
#define TN_TRACK_IS_ON()               0
#define TN_TRACK_IS_OUTSIDE()          0
#endif

#endif
