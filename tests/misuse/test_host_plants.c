/* Memory checkers see the blocks inside a pool's memory on the host driver (alloc/track.h): errors
 * that stay inside memory of the driver are planted, and must be reported.
 *
 * Each plant is a process of its own, this program with the plant's name: run by itself in a build
 * with ASan, else under Valgrind. Without either the test is skipped (77).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test_support.h"

#if defined(__SANITIZE_ADDRESS__)
#define CHECKER_IS_BUILT_IN 1
#else
#define CHECKER_IS_BUILT_IN 0
#endif

#if defined(__SANITIZE_THREAD__) || !__has_include(<valgrind/memcheck.h>)
#define VALGRIND_IS_TOLD 0
#else
#define VALGRIND_IS_TOLD 1
#endif

enum { BLOCK_BYTES = 1000, FOUND = 9 };

/* ---- the planted process --------------------------------------------------------------------- */

/* Through a volatile pointer: the compiler must neither drop the write nor foresee it. */
static void write_at(char *block, size_t index) {
    volatile char *at = block + index;
    *at = 1;
}

static void run_plant(const char *plant) {
    tn_device *device = test_open_host();
    tn_pool *pool = NULL;
    tn_stream stream = NULL;
    void *blocks[2] = {NULL, NULL};
    EXPECT_OK(tn_pool_create(device, NULL, &pool));
    EXPECT_OK(tn_stream_create(device, &stream));
    for (int i = 0; i < 2; i++) {
        EXPECT_OK(tn_alloc(pool, BLOCK_BYTES, stream, NULL, &blocks[i]));
        EXPECT_OK(tn_fill(device, blocks[i], 0, BLOCK_BYTES, stream));
    }
    EXPECT_OK(tn_stream_synchronize(device, stream));
    if (strcmp(plant, "overrun") == 0) write_at(blocks[0], BLOCK_BYTES);
    if (strcmp(plant, "fill") == 0) {
        EXPECT_OK(tn_fill(device, blocks[0], 1, BLOCK_BYTES + 1, stream));
    }
    EXPECT_OK(tn_free(blocks[1], stream));
    EXPECT_OK(tn_stream_synchronize(device, stream));
    EXPECT_OK(tn_pool_trim(pool, SIZE_MAX, NULL)); /* asks what is over by now */
    if (strcmp(plant, "freed") == 0) write_at(blocks[1], 0);
    EXPECT_OK(tn_free(blocks[0], stream));
    EXPECT_OK(tn_stream_destroy(device, stream));
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_device_destroy(device));
}

/* ---- the test -------------------------------------------------------------------------------- */

static const char *program;

static void run_checked(const char *plant) {
    if (CHECKER_IS_BUILT_IN) {
        setenv("ASAN_OPTIONS", "exitcode=9", 1);
        execl(program, program, plant, (char *)NULL);
    } else {
        execlp("valgrind", "valgrind", "-q", "--error-exitcode=9", program, plant, (char *)NULL);
    }
    _exit(127);
}

/* The exit status; its output in text. */
static int run_child(const char *plant, char *text, size_t text_bytes) {
    int ends[2];
    int result = -1;
    size_t used = 0;
    ssize_t got;
    pid_t child;
    assert_int_equal(pipe(ends), 0);
    child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        run_checked(plant);
    }
    assert_true(child > 0);
    close(ends[1]);
    while (used < text_bytes - 1 && (got = read(ends[0], text + used, text_bytes - 1 - used)) > 0)
        used += (size_t)got;
    text[used] = 0;
    close(ends[0]);
    assert_int_equal(waitpid(child, &result, 0), child);
    return WIFEXITED(result) ? WEXITSTATUS(result) : -1;
}

static void expect_found(const char *plant, const char *asan_words, const char *valgrind_words) {
    static char text[65536];
    const char *words = CHECKER_IS_BUILT_IN ? asan_words : valgrind_words;
    int status = run_child(plant, text, sizeof text);
    if (status != FOUND || !strstr(text, words)) {
        fail_msg("%s: status %d, no \"%s\" in:\n%s", plant, status, words, text);
    }
}

static void nothing_planted_nothing_reported(void **state) {
    static char text[65536];
    (void)state;
    if (run_child("nothing", text, sizeof text) != 0) fail_msg("reported:\n%s", text);
}

static void a_write_behind_a_block_is_reported(void **state) {
    (void)state;
    expect_found("overrun", "use-after-poison", "Invalid write of size 1");
}

static void a_stream_that_writes_behind_a_block_is_reported(void **state) {
    (void)state;
    expect_found("fill", "use-after-poison", "Invalid write");
}

static void a_write_to_a_freed_block_is_reported(void **state) {
    (void)state;
    expect_found("freed", "use-after-poison", "Invalid write of size 1");
}

static int can_check(void) {
    if (CHECKER_IS_BUILT_IN) return 1;
    return VALGRIND_IS_TOLD && system("valgrind --version >/dev/null 2>&1") == 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_planted_nothing_reported),
        cmocka_unit_test(a_write_behind_a_block_is_reported),
        cmocka_unit_test(a_stream_that_writes_behind_a_block_is_reported),
        cmocka_unit_test(a_write_to_a_freed_block_is_reported),
    };
    program = argv[0];
    if (argc == 2) {
        run_plant(argv[1]);
        return 0;
    }
    if (!can_check()) {
        fprintf(stderr, "skipped: neither Valgrind nor a build with ASan\n");
        return 77;
    }
    return cmocka_run_group_tests_name("misuse/host_plants", tests, NULL, NULL);
}
