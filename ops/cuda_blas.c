/* Opening cuBLASLt, once a process. */
#include "cuda_blas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

/* ---- opening ------------------------------------------------------------------------------ */

static tn__blas loaded;
static tn_status load_status;
static char load_problem[256];

static void *open_library(void) {
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12",
                                        "/usr/local/cuda/lib64/libcublasLt.so"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *library = dlopen(names[i], RTLD_LAZY | RTLD_LOCAL);
        if (library) return library;
        if (i == 0) snprintf(load_problem, sizeof load_problem, "%s", dlerror());
    }
    return NULL;
}

static int find_call(void *library, const char *name, void *out) {
    void *symbol = dlsym(library, name);
    if (!symbol) snprintf(load_problem, sizeof load_problem, "it has no %s", name);
    *(void **)out = symbol;
    return symbol != NULL;
}

static void load(void) {
    void *library = open_library();
    int is_whole = library != NULL;
#define TN__BLAS_FIND(name)                                                                        \
    is_whole = is_whole && find_call(library, "cublasLt" #name, &loaded.name);
    TN__BLAS_CALLS(TN__BLAS_FIND)
#undef TN__BLAS_FIND
    if (!is_whole) {
        if (library) dlclose(library);
        load_status = TN_UNSUPPORTED;
    }
}

tn_status tn__blas_get(const tn__blas **out) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    if (load_status != TN_OK)
        return TN_FAIL(load_status,
                       "GEMMs on CUDA need libcublasLt.so.13 or .12 (%s): install cuBLAS, or add "
                       "its folder to LD_LIBRARY_PATH",
                       load_problem);
    *out = &loaded;
    return TN_OK;
}
