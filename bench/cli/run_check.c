/* `tenure run --check`: see run_check.h. */
#include "run_check.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the probe ------------------------------------------------------------------------------- */

typedef int result;
typedef result get_v2(const char *symbol, void **out, int version, uint64_t flags, int *status);
typedef result alloc_call(unsigned long long *out, size_t bytes);
typedef result free_call(unsigned long long address);

static int is_drop_in(const void *function, const char *way) {
    Dl_info info;
    int is = function && dladdr(function, &info) && info.dli_fname &&
             strstr(info.dli_fname, "libtenure-preload");
    printf("  %-20s %s\n", way, is ? "taken over" : "NOT taken over");
    return is;
}

static int make_current(void *driver) {
    result (*init)(unsigned) = NULL;
    result (*retain)(void **, int) = NULL;
    result (*set)(void *) = NULL;
    void *context = NULL;
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&set = dlsym(driver, "cuCtxSetCurrent");
    return init && retain && set && init(0) == 0 && retain(&context, 0) == 0 && set(context) == 0;
}

static int allocate(alloc_call *alloc, free_call *release) {
    unsigned long long address = 0;
    result code = alloc ? alloc(&address, 4096) : -1;
    if (code == 0) code = release ? release(address) : -1;
    printf("  %-20s %s\n", "4 KiB and back", code == 0 ? "done" : "FAILED");
    return code == 0;
}

int run_probe(void) {
    const char *name = getenv("TENURE_CUDA_LIBRARY");
    void *driver = dlopen(name && *name ? name : "libcuda.so.1", RTLD_NOW);
    get_v2 *get = NULL;
    void *by_name, *by_get = NULL, *release;
    int is_good, status;
    if (!driver) {
        printf("no CUDA driver to check with: %s\n", dlerror());
        return EXIT_FAILURE;
    }
    by_name = dlsym(driver, "cuMemAlloc_v2");
    release = dlsym(driver, "cuMemFree_v2");
    *(void **)&get = dlsym(driver, "cuGetProcAddress_v2");
    is_good = is_drop_in(by_name, "dlsym");
    if (get && get("cuMemAlloc", &by_get, 12000, 0, &status) != 0) by_get = NULL;
    if (get) is_good &= is_drop_in(by_get, "cuGetProcAddress");
    if (!make_current(driver)) {
        printf("no CUDA device to check with\n");
        return EXIT_FAILURE;
    }
    is_good &= allocate((alloc_call *)by_name, (free_call *)release);
    return is_good ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* ---- reports --------------------------------------------------------------------------------- */

typedef struct found {
    char program[256];
    unsigned long long process, allocations, frees, passed;
} found;

static int read_report(const char *path, found *out) {
    char line[512];
    FILE *file = fopen(path, "re");
    memset(out, 0, sizeof *out);
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        (void)sscanf(line, "program: %255[^\n]", out->program);
        (void)sscanf(line, "process: %llu", &out->process);
        (void)sscanf(line, "allocations: %llu", &out->allocations);
        (void)sscanf(line, "frees: %llu", &out->frees);
        (void)sscanf(line, "passed: %llu", &out->passed);
    }
    fclose(file);
    return 1;
}

/* Reads all reports in the folder and removes them with it. */
static int tell_reports(const char *folder) {
    DIR *list = opendir(folder);
    const struct dirent *entry;
    int active = 0;
    while (list && (entry = readdir(list)) != NULL) {
        char path[4096];
        found report;
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (read_report(path, &report)) {
            printf("process %llu (%s): %llu allocations and %llu frees taken over, %llu left to "
                   "the driver\n",
                   report.process, report.program, report.allocations, report.frees, report.passed);
            active += report.allocations > 0;
        }
        (void)unlink(path);
    }
    if (list) closedir(list);
    (void)rmdir(folder);
    return active;
}

/* ---- the run --------------------------------------------------------------------------------- */

static int run_child(const char *path, char **argv, const char *report) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        char process[32];
        snprintf(process, sizeof process, "%ld", (long)getpid());
        (void)setenv("TENURE_RUN_PROCESS", process, 1);
        (void)setenv("TENURE_RUN_REPORT", report, 1);
        execv(path, argv);
        fprintf(stderr, "tenure run: %s: %s\n", path, strerror(errno));
        _exit(127);
    }
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (child < 0) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int run_check(const char *path, char **argv) {
    static char probe_path[] = "/proc/self/exe", name[] = "tenure", run[] = "run",
                probe[] = "--probe";
    char *probe_argv[] = {name, run, probe, NULL};
    const char *temporary = getenv("TMPDIR");
    char folder[2048], report[2064];
    int status, active;
    snprintf(folder, sizeof folder, "%s/tenure-check-XXXXXX",
             temporary && *temporary ? temporary : "/tmp");
    if (!mkdtemp(folder)) {
        fprintf(stderr, "tenure run: %s: %s\n", folder, strerror(errno));
        return EXIT_FAILURE;
    }
    snprintf(report, sizeof report, "%s/report", folder);
    fflush(stdout);
    status = run_child(path ? path : probe_path, path ? argv : probe_argv, report);
    active = tell_reports(folder);
    if (status != 0) printf("the program ended with status %d\n", status);
    printf("%s\n",
           active ? "the drop-in is active" : "the drop-in is NOT active: nothing was taken over");
    return active && (path || status == 0) ? EXIT_SUCCESS : EXIT_FAILURE;
}
