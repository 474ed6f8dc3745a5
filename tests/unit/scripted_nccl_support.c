/* See scripted_nccl_support.h. */
#include "scripted_nccl_support.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

enum { SKIPPED = 77, PATH_BYTES = 4096 };

int scripted_nccl_open(const char *build, scripted_nccl **script, const tn__comm_engine **engine) {
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/tests/libtenure_scripted_nccl.so", build);
    setenv("TENURE_NCCL_LIBRARY", path, 1);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        puts("skipped: built without NCCL (TENURE_NCCL=OFF)");
        return SKIPPED;
    }
    *script = dlsym(library, "scripted_nccl_state");
    if (tn__nccl_engine_get(engine) == TN_OK) return 0;
    puts(tn_error_last());
    return EXIT_FAILURE;
}
