/* The MPI engine: a plug-in beside this library, loaded when it is first asked for.
 *
 * The plug-in needs libmpi, and so this library does not. Once loaded it stays: MPI can not be
 * started twice in a process, and runs threads and exit handlers of its own.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "comm_engine.h"
#include "options.h"

#ifndef TENURE_WITH_MPI
#define TENURE_WITH_MPI 0
#endif

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const tn__comm_engine *loaded;

/* A name without a directory is one beside this library; where this library has been linked into
 * a program, one that the loader finds. */
static void find_path(const char *name, char *path, size_t path_bytes) {
    Dl_info info;
    const char *slash = NULL;
    if (!strchr(name, '/') && dladdr((void *)&loaded, &info) && info.dli_fname)
        slash = strrchr(info.dli_fname, '/');
    int directory_bytes = slash ? (int)(slash + 1 - info.dli_fname) : 0;
    snprintf(path, path_bytes, "%.*s%s", directory_bytes, slash ? info.dli_fname : "", name);
}

static const char *how_to_get_it(void) {
    return TENURE_WITH_MPI ? "; it is built and installed beside libtenure-dist"
                           : "; this libtenure-dist was built without it: build with "
                             "TENURE_MPI=ON where libopenmpi-dev is installed";
}

static tn_status load(const tn__comm_engine **out) {
    char path[4096];
    find_path(tn__options_get()->mpi_library, path, sizeof path);
    /* MPI libraries load components that look for its symbols among the global ones. */
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE);
    if (!library) {
        const char *reason = dlerror();
        return TN_FAIL(TN_UNSUPPORTED, "no MPI engine: %s%s, or named in TENURE_MPI_LIBRARY",
                       reason ? reason : path, how_to_get_it());
    }
    const tn__comm_engine *engine = dlsym(library, TN__MPI_ENGINE_SYMBOL);
    if (!engine || engine->abi != TN__COMM_ENGINE_ABI) {
        dlclose(library);
        return TN_FAIL(TN_UNSUPPORTED, "no MPI engine: %s is not of this build of Tenure", path);
    }
    *out = engine;
    return TN_OK;
}

tn_status tn__mpi_engine_get(const tn__comm_engine **out) {
    tn_status status = TN_OK;
    pthread_mutex_lock(&lock);
    if (!loaded) status = load(&loaded);
    if (status == TN_OK) *out = loaded;
    pthread_mutex_unlock(&lock);
    return status;
}
