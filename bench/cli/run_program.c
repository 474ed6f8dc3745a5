/* The program of `tenure run` and its environment: see run_program.h. */
#include "run_program.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tenure_alloc.h"

/* ---- the program ----------------------------------------------------------------------------- */

static int is_file(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && !S_ISDIR(status.st_mode);
}

static int fail(int status, const char *name, const char *why) {
    fprintf(stderr, "tenure run: %s: %s\n", name, why);
    return status;
}

static int check_start(const char *name, const char *path) {
    if (access(path, X_OK) == 0) return 0;
    return fail(RUN_NO_START, name, strerror(errno));
}

/* Folders of PATH in turn; an empty one is the current folder. */
static int find_in_path(const char *name, char *out, size_t bytes) {
    const char *path = getenv("PATH");
    const char *found_but = NULL;
    for (const char *at = path ? path : "/bin:/usr/bin"; at;) {
        const char *end = strchrnul(at, ':');
        int length = (int)(end - at);
        int used = snprintf(out, bytes, "%.*s%s%s", length, at, length ? "/" : "./", name);
        if (used > 0 && (size_t)used < bytes && is_file(out)) {
            if (access(out, X_OK) == 0) return 0;
            found_but = strerror(errno);
        }
        at = *end ? end + 1 : NULL;
    }
    if (found_but) return fail(RUN_NO_START, name, found_but);
    return fail(RUN_NO_PROGRAM, name, "no such program in PATH");
}

int run_program_find(const char *name, char *out, size_t bytes) {
    if (!*name) return fail(RUN_NO_PROGRAM, "''", "no such program");
    if (!strchr(name, '/')) return find_in_path(name, out, bytes);
    if (strlen(name) >= bytes) return fail(RUN_NO_PROGRAM, name, strerror(ENAMETOOLONG));
    memcpy(out, name, strlen(name) + 1);
    if (access(name, F_OK) != 0) return fail(RUN_NO_PROGRAM, name, strerror(errno));
    if (!is_file(name)) return fail(RUN_NO_START, name, strerror(EISDIR));
    return check_start(name, out);
}

/* ---- the drop-in ----------------------------------------------------------------------------- */

int run_program_drop_in(char *out, size_t bytes) {
    Dl_info info;
    const char *slash = NULL;
    if (dladdr((const void *)tn_version, &info) && info.dli_fname) {
        slash = strrchr(info.dli_fname, '/');
    }
    if (!slash || snprintf(out, bytes, "%.*s/libtenure-preload.so", (int)(slash - info.dli_fname),
                           info.dli_fname) >= (int)bytes) {
        fprintf(stderr, "tenure run: no path to libtenure\n");
        return 0;
    }
    char *real = realpath(out, NULL);
    if (!real || strlen(real) >= bytes) {
        fprintf(stderr, "tenure run: %s: %s\n", out, real ? "too long" : strerror(errno));
        free(real);
        return 0;
    }
    memcpy(out, real, strlen(real) + 1);
    free(real);
    if (!strpbrk(out, " :")) return 1;
    fprintf(stderr, "tenure run: %s: LD_PRELOAD takes no path with a space or a colon\n", out);
    return 0;
}

int run_program_preload(const char *drop_in) {
    const char *before = getenv("LD_PRELOAD");
    size_t bytes = (before ? strlen(before) : 0) + strlen(drop_in) + 2;
    char *value;
    int is_set;
    if (!before || !*before) return setenv("LD_PRELOAD", drop_in, 1) == 0;
    value = malloc(bytes);
    if (!value) return 0;
    snprintf(value, bytes, "%s:%s", before, drop_in);
    is_set = setenv("LD_PRELOAD", value, 1) == 0;
    free(value);
    return is_set;
}

/* ---- files ----------------------------------------------------------------------------------- */

static int make_absolute(const char *name, char *out, size_t bytes) {
    char *here = *name == '/' ? NULL : getcwd(NULL, 0);
    int used;
    if (*name != '/' && !here) return 0;
    used = snprintf(out, bytes, "%s%s%s", here ? here : "", here ? "/" : "", name);
    free(here);
    if (used >= 0 && (size_t)used < bytes) return 1;
    errno = ENAMETOOLONG;
    return 0;
}

/* A link is there also if what it leads to is not. A pipe that nobody reads is not waited for. */
static int can_write(const char *path) {
    struct stat status;
    int was_there = lstat(path, &status) == 0;
    int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    if (file < 0) return 0;
    close(file);
    if (!was_there) (void)unlink(path);
    return 1;
}

int run_program_is_regular(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISREG(status.st_mode);
}

/* A link to a file stays one: the file itself is written. */
static void follow_link(char *path, size_t bytes) {
    char *real = run_program_is_regular(path) ? realpath(path, NULL) : NULL;
    if (real && strlen(real) < bytes) memcpy(path, real, strlen(real) + 1);
    free(real);
}

int run_program_check_output(const char *option, const char *name, char *out, size_t bytes) {
    errno = ENOENT;
    if (*name && make_absolute(name, out, bytes) && can_write(out)) {
        follow_link(out, bytes);
        return 1;
    }
    fprintf(stderr, "tenure run: %s %s: can not be written: %s\n", option, name, strerror(errno));
    return 0;
}
