/* Another library that is preloaded, before the drop-in or after it: it counts cuMemAlloc and
 * passes it on, has a dlsym of its own, and a malloc that finds the next one by RTLD_NEXT. At the
 * end it says what it has seen. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

/* Without a frame of its own, so that RTLD_NEXT is still that of who has called: gcc at -O1 is to
 * be told, clang does it by itself. */
#ifdef __clang__
#define PASSED_ON
#else
#define PASSED_ON __attribute__((optimize("O2")))
#endif

typedef void *lookup_function(void *handle, const char *name);

static _Atomic int allocs, lookups, mallocs;

static lookup_function *next_dlsym(void) {
    static lookup_function *_Atomic next;
    if (!next) {
        lookup_function *base = (lookup_function *)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        if (!base) base = (lookup_function *)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        next = (lookup_function *)base(RTLD_NEXT, "dlsym");
    }
    return next;
}

/* Only names of the driver's; what is asked with RTLD_NEXT is not its business. */
EXPORTED void *dlsym(void *restrict handle, const char *restrict name);
PASSED_ON void *dlsym(void *restrict handle, const char *restrict name) {
    if (strncmp(name, "cuMem", 5) == 0) lookups++;
    return next_dlsym()(handle, name);
}

EXPORTED int cuMemAlloc_v2(unsigned long long *out, size_t bytes);
int cuMemAlloc_v2(unsigned long long *out, size_t bytes) {
    static int (*_Atomic next)(unsigned long long *, size_t);
    if (!next) next = (int (*)(unsigned long long *, size_t))next_dlsym()(RTLD_NEXT, __func__);
    allocs++;
    return next ? next(out, bytes) : 3;
}

EXPORTED void *reallocarray(void *memory, size_t count, size_t bytes);
void *reallocarray(void *memory, size_t count, size_t bytes) {
    static void *(*_Atomic next)(void *, size_t, size_t);
    if (!next) next = (void *(*)(void *, size_t, size_t))dlsym(RTLD_NEXT, "reallocarray");
    mallocs++;
    return next(memory, count, bytes);
}

__attribute__((destructor)) static void tell(void) {
    printf("other preload: cuMemAlloc %s, lookups %s, reallocarray %s\n", allocs ? "seen" : "none",
           lookups ? "seen" : "none", mallocs ? "seen" : "none");
    fflush(stdout);
}
