/* The entry points of libtenure-preload: each call that is taken over, under the driver's name.
 *
 * A program comes by them in three ways: the dynamic linker binds them (a program linked with the
 * driver), dlsym gives them (preload_lookup.c), or cuGetProcAddress does (below). All three end in
 * the same function, which hands the call to libtenure-dropin, or to the driver where that stands
 * aside or can not be loaded.
 *
 * `inside` is set while this thread is in libtenure-dropin: what that, libtenure and the driver
 * itself call or look for meanwhile goes straight to the driver.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "preload_lookup.h"

#define EXPORTED __attribute__((visibility("default")))

static _Thread_local int inside __attribute__((tls_model("initial-exec")));
static tn__dropin_calls real;  /* the driver's own; NULL until the program has come by it */
static tn__dropin_calls hooks; /* complete once is_open is 1 */
static pthread_mutex_t open_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int is_open; /* -1: libtenure-dropin can not be had */

int tn__preload_stands_aside(void) {
    static _Atomic int disabled; /* 1: no, 2: yes */
    if (!disabled) {
        const char *value = getenv("TENURE_DISABLE");
        disabled = value && strcmp(value, "1") == 0 ? 2 : 1;
    }
    return inside || disabled == 2;
}

/* ---- libtenure-dropin ------------------------------------------------------------------------ */

static int complain(const char *what) {
    fprintf(stderr, "tenure: not active in process: %s\n", what);
    return -1;
}

static int open_dropin(void) {
    static const tn__dropin_driver driver = {TN__DROPIN_BUILD, &real, tn__preload_find};
    static const char name[] = "libtenure-dropin.so";
    char path[4096];
    Dl_info here;
    const char *slash;
    tn__dropin_open_function open;
    void *library;
    if (!dladdr((const void *)&is_open, &here) || !here.dli_fname) return complain("no path");
    slash = strrchr(here.dli_fname, '/');
    if (snprintf(path, sizeof path, "%.*s%s", slash ? (int)(slash - here.dli_fname + 1) : 0,
                 here.dli_fname, name) >= (int)sizeof path) {
        return complain("its path is too long");
    }
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return complain(dlerror());
    *(void **)&open = tn__preload_dlsym()(library, "tn__dropin_open");
    if (!open) return complain(dlerror());
    return open(&driver, &hooks) ? 1 : -1;
}

static int open_once(void) {
    int now = is_open;
    if (now) return now;
    pthread_mutex_lock(&open_mutex);
    if (!is_open) {
        inside = 1;
        is_open = open_dropin();
        inside = 0;
    }
    now = is_open;
    pthread_mutex_unlock(&open_mutex);
    return now;
}

/* A fork while another thread loads it: the child, which has that thread no more, tries again. */
static void before_fork(void) { pthread_mutex_lock(&open_mutex); }
static void after_fork(void) { pthread_mutex_unlock(&open_mutex); }

__attribute__((constructor)) static void load(void) {
    pthread_atfork(before_fork, after_fork, after_fork);
}

/* ---- calls ----------------------------------------------------------------------------------- */

typedef struct call_row {
    const char *name;
    const char *base;
    int since;
    int variant;
    void **real;
    void *entry;
} call_row;

enum { NO_STREAM, LEGACY, PER_THREAD };

#define DECLARE(name, base, since, variant, parameters, arguments)                                 \
    EXPORTED tn__cu_result name parameters;
TN__DROPIN_CALLS(DECLARE)

#define AS_ROW(name, base, since, variant, parameters, arguments)                                  \
    {#name, base, since, variant, (void **)&real.name, (void *)name},
static const call_row rows[] = {TN__DROPIN_CALLS(AS_ROW)};

/* The driver's own function is there, or the call can not be made. */
static int has_real(int call) {
    if (!*rows[call].real) *rows[call].real = tn__preload_find(rows[call].name);
    return *rows[call].real != NULL;
}

/* 1: the call is the drop-in's, and the thread is inside from here on. */
static int enter(void) {
    if (tn__preload_stands_aside() || open_once() != 1) return 0;
    inside = 1;
    return 1;
}

#define DEFINE(name, base, since, variant, parameters, arguments)                                  \
    tn__cu_result name parameters {                                                                \
        tn__cu_result result;                                                                      \
        if (!has_real(TN__DROPIN_##name)) return TN__CU_ERROR_NOT_INITIALIZED;                     \
        if (!enter()) return real.name arguments;                                                  \
        result = hooks.name arguments;                                                             \
        inside = 0;                                                                                \
        return result;                                                                             \
    }
TN__DROPIN_CALLS(DEFINE)

void *tn__preload_take(int call, void *found) {
    if (!*rows[call].real) *rows[call].real = found;
    return rows[call].entry;
}

int tn__preload_number(const char *name) {
    for (int i = 0; i < TN__DROPIN_CALL_COUNT; i++) {
        if (strcmp(rows[i].name, name) == 0) return i;
    }
    return -1;
}

#define PER_THREAD_FLAG 2u

/* The youngest function of the name that the version has. What is older than all here, with other
 * parameters, is not taken over. */
int tn__preload_number_of(const char *base, int version, uint64_t flags) {
    int variant = flags & PER_THREAD_FLAG ? PER_THREAD : LEGACY;
    int best = -1;
    for (int i = 0; i < TN__DROPIN_CALL_COUNT; i++) {
        if (rows[i].variant != NO_STREAM && rows[i].variant != variant) continue;
        if (version < rows[i].since || strcmp(rows[i].base, base) != 0) continue;
        if (best < 0 || rows[i].since > rows[best].since) best = i;
    }
    return best;
}

/* ---- cuGetProcAddress ------------------------------------------------------------------------ */

typedef tn__cu_result older_get_function(const char *symbol, void **out, int version,
                                         uint64_t flags);
typedef tn__cu_result newer_get_function(const char *symbol, void **out, int version,
                                         uint64_t flags, int *status);

EXPORTED tn__cu_result cuGetProcAddress(const char *symbol, void **out, int version,
                                        uint64_t flags);
EXPORTED tn__cu_result cuGetProcAddress_v2(const char *symbol, void **out, int version,
                                           uint64_t flags, int *status);

void *tn__preload_entry(int is_newer) {
    return is_newer ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
}

#define NEWER_SINCE 12000

/* The driver has answered: its functions are replaced, all else stays as it said. */
static void replace(const char *symbol, void **out, int version, uint64_t flags) {
    int call;
    if (!symbol || !out || !*out || tn__preload_stands_aside()) return;
    if (strcmp(symbol, "cuGetProcAddress") == 0) {
        *out = tn__preload_entry(version >= NEWER_SINCE);
        return;
    }
    call = tn__preload_number_of(symbol, version, flags);
    if (call < 0) call = tn__preload_number(symbol);
    if (call >= 0) *out = tn__preload_take(call, *out);
}

tn__cu_result cuGetProcAddress(const char *symbol, void **out, int version, uint64_t flags) {
    static _Atomic(older_get_function *) own;
    tn__cu_result result;
    if (!own) own = (older_get_function *)tn__preload_find("cuGetProcAddress");
    if (!own) return TN__CU_ERROR_NOT_INITIALIZED;
    result = own(symbol, out, version, flags);
    if (result == TN__CU_SUCCESS) replace(symbol, out, version, flags);
    return result;
}

tn__cu_result cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags,
                                  int *status) {
    static _Atomic(newer_get_function *) own;
    tn__cu_result result;
    if (!own) own = (newer_get_function *)tn__preload_find("cuGetProcAddress_v2");
    if (!own) return TN__CU_ERROR_NOT_INITIALIZED;
    result = own(symbol, out, version, flags, status);
    if (result == TN__CU_SUCCESS) replace(symbol, out, version, flags);
    return result;
}
