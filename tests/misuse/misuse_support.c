/* See misuse_support.h. */
#include "misuse_support.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECONDS_MAX 600

scene misuse_scene;
static const char *driver_name = "host";

/* ---- running a part -------------------------------------------------------------------------- */

/* What does not fit is read too: who writes it must not be stopped by that. */
static void read_all(int file, char *text, size_t text_bytes) {
    char rest[1024];
    size_t used = 0;
    for (;;) {
        size_t room = text_bytes - 1 - used;
        ssize_t got = room ? read(file, text + used, room) : read(file, rest, sizeof rest);
        if (got <= 0) break;
        if (room) used += (size_t)got;
    }
    text[used] = 0;
}

ending misuse_run(const char *name, const char *driver) {
    ending end = {-1, ""};
    int ends[2], status = 0;
    pid_t child;
    assert_int_equal(pipe(ends), 0);
    child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        setenv("TENURE_SIM_STRICT_UNLOAD", "0", 1);
        setenv("ASAN_OPTIONS", "allocator_may_return_null=1:detect_leaks=0", 1);
        alarm(SECONDS_MAX);
        execl("/proc/self/exe", "part", name, driver, (char *)NULL);
        _exit(126);
    }
    close(ends[1]);
    read_all(ends[0], end.text, sizeof end.text);
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    end.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return end;
}

static void expect_on(const char *name, const char *driver, int status) {
    ending end = misuse_run(name, driver);
    if (end.status == status) return;
    fail_msg("%s on %s ended with %d and not with %d: %s", name, driver, end.status, status,
             end.text);
}

void misuse_expect(const char *name, int status) {
    expect_on(name, "host", status);
    expect_on(name, "sim", status);
}

void misuse_play(int argc, char **argv, const part *parts, size_t count) {
    if (argc != 3) return;
    driver_name = argv[2];
    for (size_t i = 0; i < count; i++) {
        if (strcmp(parts[i].name, argv[1]) != 0) continue;
        parts[i].play();
        exit(0);
    }
    _exit(125);
}

void misuse_require(int holds, const char *what, int line) {
    if (holds) return;
    fprintf(stderr, "line %d: not %s: %s\n", line, what, tn_error_last());
    _exit(3);
}

/* ---- the scene ------------------------------------------------------------------------------- */

void misuse_open(void) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    scene *s = &misuse_scene;
    config.driver = TN_DRIVER_HOST;
    if (strcmp(driver_name, "sim") == 0) {
        config.driver = TN_DRIVER_CUDA;
        config.cuda_library = TENURE_SIM_LIBRARY;
    }
    REQUIRE(tn_device_create(&config, &s->device) == TN_OK);
    REQUIRE(tn_pool_create(s->device, NULL, &s->pool) == TN_OK);
    REQUIRE(tn_stream_create(s->device, &s->stream) == TN_OK);
    REQUIRE(tn_alloc(s->pool, 3 << 20, s->stream, NULL, &s->block) == TN_OK);
}

/* ---- threads that never end ------------------------------------------------------------------ */

static atomic_int busy_threads; /* that have been through it once */

/* Once exit has begun an alloc fails and a free succeeds: on it goes. */
static void *be_busy(void *argument) {
    size_t bytes = (size_t)1000 << (size_t)argument * 3;
    tn_stream stream = NULL;
    REQUIRE(tn_stream_create(misuse_scene.device, &stream) == TN_OK);
    for (int round = 0;; round++) {
        void *blocks[4] = {NULL, NULL, NULL, NULL};
        for (int i = 0; i < 4; i++) {
            if (tn_alloc(misuse_scene.pool, bytes << i, stream, NULL, &blocks[i]) != TN_OK) break;
        }
        for (int i = 0; i < 4; i++)
            REQUIRE(tn_free(blocks[i], stream) == TN_OK);
        if (tn_pool_trim(misuse_scene.pool, 0, NULL) != TN_OK) sched_yield();
        if (round == 0) atomic_fetch_add(&busy_threads, 1);
    }
    return NULL;
}

void misuse_start_busy_threads(int count) {
    for (int i = 0; i < count; i++) {
        pthread_t thread;
        REQUIRE(pthread_create(&thread, NULL, be_busy, (void *)(size_t)i) == 0);
        REQUIRE(pthread_detach(thread) == 0);
    }
    while (atomic_load(&busy_threads) < count)
        sched_yield();
}
