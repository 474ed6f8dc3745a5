/* dlsym as libtenure-preload has it: by it the driver's calls are found by programs with a static
 * CUDA runtime, by libcudart itself, by Python's ctypes and by all who open the driver themselves.
 *
 * A name that is none of ours is passed on by a jump, so that the C library sees the caller's own
 * return address: RTLD_NEXT means "after the caller", and so it stays. (Built with optimization in
 * every build for that.) A name of ours is answered with our entry if the handle's own answer is
 * the driver's function: what another library exports under that name stays that library's. Both
 * versions of the symbol, of libdl (GLIBC_2.2.5) and of libc (GLIBC_2.34), are bound to this one,
 * because it has no version.
 */
#include "preload_lookup.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#define OLDEST_VERSION "GLIBC_2.2.5"
#else
#define OLDEST_VERSION "GLIBC_2.17"
#endif

/* By its version, and not by name: that would be ours. From there the next one after us. */
tn__dlsym_function *tn__preload_dlsym(void) {
    static _Atomic(tn__dlsym_function *) next;
    if (!next) {
        tn__dlsym_function *base = (tn__dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        if (!base) base = (tn__dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", OLDEST_VERSION);
        if (!base) abort(); /* no program that is linked dynamically is without */
        next = (tn__dlsym_function *)base(RTLD_NEXT, "dlsym");
    }
    return next;
}

void *tn__preload_driver(void) {
    static void *_Atomic driver;
    const char *path = getenv("TENURE_CUDA_LIBRARY");
    if (driver) return driver;
    if (path && *path) driver = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    (void)dlerror();
    return driver;
}

void *tn__preload_find(const char *name) {
    void *found = tn__preload_dlsym()(RTLD_NEXT, name);
    void *driver = tn__preload_driver();
    if (!found && driver) found = tn__preload_dlsym()(driver, name);
    (void)dlerror();
    return found;
}

/* libtenure in a program of its own calls the driver for its pools: never through other pools. */
static int is_libtenure(const void *caller) {
    Dl_info info;
    return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "/libtenure.so");
}

static void *entry_of(const char *name, int *call) {
    *call = -1;
    if (strcmp(name, "cuGetProcAddress") == 0) return tn__preload_entry(0);
    if (strcmp(name, "cuGetProcAddress_v2") == 0) return tn__preload_entry(1);
    *call = tn__preload_number(name);
    return *call < 0 ? NULL : tn__preload_take(*call, NULL);
}

/* As if this library were not there: a search in all libraries finds its entries, too. With dlerror
 * if nothing else has the name. */
static void *answer_without(void *handle, const char *name, const void *entry) {
    void *found = tn__preload_dlsym()(handle, name);
    if (found != entry) return found;
    found = tn__preload_find(name);
    if (!found) (void)tn__preload_dlsym()(RTLD_NEXT, name);
    return found;
}

static void *answer(void *handle, const char *name, void *entry, int call) {
    void *found = tn__preload_dlsym()(handle, name);
    void *driver = found ? tn__preload_driver() : NULL;
    if (!found) return NULL;
    if (found == entry) return driver ? entry : answer_without(handle, name, entry);
    if (!driver || tn__preload_dlsym()(driver, name) != found) return found;
    return call < 0 ? entry : tn__preload_take(call, found);
}

__attribute__((visibility("default"))) void *dlsym(void *restrict handle,
                                                   const char *restrict name) {
    tn__dlsym_function *next = tn__preload_dlsym();
    void *entry = NULL;
    int call = -1;
    if (name[0] == 'c' && name[1] == 'u' && handle != RTLD_NEXT) {
        entry = entry_of(name, &call);
    }
    if (!entry) return next(handle, name);
    if (tn__preload_stands_aside() || is_libtenure(__builtin_return_address(0))) {
        return answer_without(handle, name, entry);
    }
    return answer(handle, name, entry, call);
}
