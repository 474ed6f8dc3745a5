#!/bin/sh
# A program linked with libtenure, with and without the private jemalloc, and one that loads it with
# dlopen: each runs the host device, and in each malloc and free are still libc's.
# Usage: test_linked_malloc.sh BUILD_DIRECTORY SOURCE_DIRECTORY
set -eu
build=$1
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compiler=${CC:-cc}
command -v "$compiler" > /dev/null || { echo "skipped: no C compiler ($compiler)"; exit 77; }
if nm -D "$build/libtenure.so" | grep -qE '__(asan|tsan|ubsan)_'; then
    echo "skipped: in a sanitizer's build malloc is the sanitizer's"
    exit 77
fi

cat > "$work/program.c" << 'EOF'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tenure_alloc.h"

#ifdef LOADED
#define TN(name) ((__typeof__(&name))dlsym(library, #name))
#else
#define TN(name) name
#endif

static int is_of_libc(const char *name) {
    Dl_info info;
    void *address = dlsym(RTLD_DEFAULT, name);
    if (!address || !dladdr(address, &info)) return 0;
    printf("%s is in %s\n", name, info.dli_fname);
    return strstr(info.dli_fname, "/libc.so.6") != NULL;
}

int main(int argc, char **argv) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn_device *device = NULL;
    void *library = argc > 2 ? dlopen(argv[2], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (argc > 2 && !library) return puts(dlerror()), 2;
    config.driver = TN_DRIVER_HOST;
    if (TN(tn_device_create)(&config, &device) != TN_OK) return puts(TN(tn_error_last)()), 3;
    if (TN(tn_device_info_get)(device, &info) != TN_OK) return 4;
    puts(info.name);
    if (!strstr(info.name, argv[1])) return 5;
    if (!is_of_libc("malloc") || !is_of_libc("free") || !is_of_libc("realloc")) return 6;
    void *block = malloc(100);
    if (!block) return 7;
    free(block);
    if (TN(tn_device_destroy)(device) != TN_OK) return 8;
    return 0;
}
EOF

compile() { # OUTPUT OPTIONS...
    output=$1
    shift
    "$compiler" -std=gnu17 -I"$source/alloc" "$work/program.c" -o "$work/$output" "$@"
}

links="-L$build -ltenure -Wl,-rpath,$build"
compile plain $links
compile with_jemalloc $links -Wl,--no-as-needed -ltenure-jemalloc
compile loading -DLOADED -ldl

"$work/plain" mmap || { echo "FAIL: linked: $?"; exit 1; }
"$work/with_jemalloc" jemalloc || { echo "FAIL: linked with libtenure-jemalloc: $?"; exit 1; }
"$work/loading" mmap "$build/libtenure.so" || { echo "FAIL: loading: $?"; exit 1; }
GLIBC_TUNABLES=glibc.rtld.optional_static_tls=8192 \
    "$work/loading" jemalloc "$build/libtenure.so" || { echo "FAIL: tunable: $?"; exit 1; }
echo "ok"
