/* What the test programs of the drop-in share: they are programs like any other, that link neither
 * libtenure nor a test library. A check that fails says so and ends the program with status 1. */
#ifndef TENURE_PROGRAM_CHECKS_H
#define TENURE_PROGRAM_CHECKS_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "lookalike_cuda.h"

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (condition) break;                                                                      \
        fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                    \
        exit(1);                                                                                   \
    } while (0)

#define EXPECT_CODE(call, expected)                                                                \
    do {                                                                                           \
        int code_ = (int)(call);                                                                   \
        if (code_ == (int)(expected)) break;                                                       \
        fprintf(stderr, "%s:%d: %s: %d, not %d\n", __FILE__, __LINE__, #call, code_,               \
                (int)(expected));                                                                  \
        exit(1);                                                                                   \
    } while (0)

#define EXPECT_OK(call) EXPECT_CODE(call, 0)

/* The driver's function, as a program finds it that opens the driver itself. */
static inline void *program_find(const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = driver ? dlsym(driver, name) : NULL;
    if (!found) {
        fprintf(stderr, "no %s\n", name);
        exit(1);
    }
    return found;
}

#define DRIVER(function) ((__typeof__(&function))program_find(#function))

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

typedef struct program_case {
    const char *name;
    void (*run)(void);
} program_case;

/* Runs the case that the command line names. */
static inline int program_main(int argc, char **argv, const program_case *cases, size_t count) {
    for (size_t i = 0; argc == 2 && i < count; i++) {
        if (__builtin_strcmp(argv[1], cases[i].name) != 0) continue;
        cases[i].run();
        return 0;
    }
    fprintf(stderr, "no such case\n");
    return 2;
}

#endif
