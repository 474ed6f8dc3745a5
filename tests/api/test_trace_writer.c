/* Traces that a pool writes: the lines, the two kinds of file, and what can go wrong. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include "tenure_pool.h"
#include "test_pools.h"

static const char *own_path;
static char folder[64];

static const char *in_folder(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* Cuts the line at its n-th comma from 0 on; what is behind it. */
static char *cut_at_comma(char *line, int n) {
    char *at = line;
    for (; *at && (*at != ',' || n-- > 0); at++)
        continue;
    assert_int_equal(*at, ',');
    *at = 0;
    return at + 1;
}

/* The file's text with times and addresses left out: times are numbers that never fall, and only
 * allocations have addresses. */
static const char *read_trace(const char *path) {
    static char text[4096];
    char line[256];
    size_t used = 0;
    double last = 0;
    gzFile file = gzopen(path, "rb");
    assert_non_null(file);
    text[0] = 0;
    while (gzgets(file, line, sizeof line)) {
        char *time_text = cut_at_comma(line, 3);
        char *address = cut_at_comma(time_text, 0);
        char *owner = cut_at_comma(address, 0);
        if (used > 0) {
            char *end = NULL;
            double time = strtod(time_text, &end);
            assert_string_equal(end, "");
            assert_true(time >= last);
            assert_int_equal(strtoull(address, &end, 16) != 0, line[0] == 'a');
            assert_string_equal(end, "");
            last = time;
        }
        used += (size_t)snprintf(text + used, sizeof text - used, "%s,%s", line, owner);
    }
    gzclose(file);
    return text;
}

static int is_gzip(const char *path) {
    unsigned char magic[2] = {0, 0};
    FILE *file = fopen(path, "rb");
    size_t count;
    assert_non_null(file);
    count = fread(magic, 1, 2, file);
    fclose(file);
    return count == 2 && magic[0] == 0x1f && magic[1] == 0x8b;
}

static void write_and_read(const char *name, int gzip) {
    char path[128];
    tn_device *device = test_open_host();
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    tn_stream stream = test_open_stream(device);
    void *before = test_take(pool, 77, NULL);
    void *a;
    void *b;
    snprintf(path, sizeof path, "%s", in_folder(name));
    EXPECT_OK(tn_pool_trace_begin(pool, path));
    EXPECT_STATUS(tn_pool_trace_begin(pool, path), TN_INVALID_STATE);
    a = test_take(pool, 1000, stream);
    b = test_take(pool, 2 * MIB_BYTES, NULL);
    test_give(pool, before, NULL); /* began before the trace: not in it */
    test_give(pool, a, stream);
    a = test_take(pool, 5, stream);
    test_give(pool, b, stream);
    EXPECT_OK(tn_pool_trace_end(pool));
    EXPECT_STATUS(tn_pool_trace_end(pool), TN_INVALID_STATE);
    assert_string_equal(read_trace(path), "op,id,bytes,stream,owner\n"
                                          "a,1,1000,0,\n"
                                          "a,2,2097152,1,\n"
                                          "f,1,,,\n"
                                          "a,3,5,0,\n"
                                          "f,2,,,\n");
    assert_int_equal(is_gzip(path), gzip);
    /* Another trace of the pool starts anew. */
    EXPECT_OK(tn_pool_trace_begin(pool, path));
    b = test_take(pool, 9, NULL);
    test_give(pool, a, stream);
    test_give(pool, b, NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    assert_string_equal(read_trace(path), "op,id,bytes,stream,owner\na,1,9,0,\nf,1,,,\n");
    EXPECT_OK(tn_stream_destroy(device, stream));
    EXPECT_OK(tn_device_destroy(device));
}

static void a_trace_has_every_event_after_its_beginning(void **state) {
    (void)state;
    write_and_read("plain.csv", 0);
    write_and_read("packed.csv.gz", 1);
}

static void owners_and_addresses_are_written(void **state) {
    char path[128];
    char line[256];
    char expected[256];
    char long_owner[2 * TN_EVENT_OWNER_BYTES];
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    tn_device *device = test_open_host();
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    void *blocks[2];
    gzFile file;
    (void)state;
    memset(long_owner, 'o', sizeof long_owner);
    long_owner[sizeof long_owner - 1] = 0;
    snprintf(path, sizeof path, "%s", in_folder("plain.csv"));
    EXPECT_OK(tn_pool_trace_begin(pool, path));
    options.owner = "layer 1, \"q\"\nweights";
    EXPECT_OK(tn_alloc(pool, 10, NULL, &options, &blocks[0]));
    options.owner = long_owner;
    EXPECT_OK(tn_alloc(pool, 10, NULL, &options, &blocks[1]));
    EXPECT_OK(tn_pool_trace_end(pool));
    file = gzopen(path, "rb");
    assert_non_null(file);
    assert_non_null(gzgets(file, line, sizeof line));
    for (int i = 0; i < 2; i++) {
        char *address;
        assert_non_null(gzgets(file, line, sizeof line));
        address = cut_at_comma(line, 4);
        snprintf(expected, sizeof expected, "%p,%.*s\n", blocks[i], TN_EVENT_OWNER_BYTES - 1,
                 i ? long_owner : "layer 1, \"q\"?weights");
        assert_string_equal(address, expected);
        test_give(pool, blocks[i], NULL);
    }
    assert_null(gzgets(file, line, sizeof line));
    gzclose(file);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_device_destroy(device));
}

static void what_could_not_be_served_is_written(void **state) {
    char path[128];
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    tn_device *device = test_open_host();
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    void *block = NULL;
    (void)state;
    snprintf(path, sizeof path, "%s", in_folder("plain.csv"));
    EXPECT_OK(tn_pool_trace_begin(pool, path));
    options.owner = "logits";
    EXPECT_STATUS(tn_alloc(pool, (size_t)1 << 46, NULL, &options, &block), TN_OUT_OF_DEVICE_MEMORY);
    test_give(pool, test_take(pool, 9, NULL), NULL);
    EXPECT_OK(tn_pool_trace_end(pool));
    assert_string_equal(read_trace(path), "op,id,bytes,stream,owner\n"
                                          "o,,70368744177664,,logits\n"
                                          "a,1,9,0,\n"
                                          "f,1,,,\n");
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_device_destroy(device));
}

static void a_file_that_can_not_be_written_is_named(void **state) {
    tn_device *device = test_open_host();
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    (void)state;
    EXPECT_STATUS(tn_pool_trace_begin(pool, in_folder("no/such/folder.csv")), TN_IO);
    EXPECT_ERROR_HAS("no/such/folder.csv");
    EXPECT_STATUS(tn_pool_trace_begin(pool, ""), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_trace_begin(pool, NULL), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_pool_trace_begin(pool, "/dev/full"));
    test_give(pool, test_take(pool, 100, NULL), NULL);
    EXPECT_STATUS(tn_pool_trace_end(pool), TN_IO);
    EXPECT_ERROR_HAS("/dev/full");
    EXPECT_STATUS(tn_pool_trace_end(pool), TN_INVALID_STATE);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_device_destroy(device));
}

/* The pool outlives the failure, so that no one uses what is not there; the trace does not. */
static void a_pool_whose_trace_is_not_complete_is_destroyed_the_second_time(void **state) {
    tn_device *device = test_open_host();
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    (void)state;
    EXPECT_OK(tn_pool_trace_begin(pool, "/dev/full"));
    test_give(pool, test_take(pool, 100, NULL), NULL);
    EXPECT_STATUS(tn_pool_destroy(pool), TN_IO);
    EXPECT_ERROR_HAS("/dev/full");
    assert_int_equal(test_pool_stats(pool).reserved_bytes, 0);
    EXPECT_STATUS(tn_pool_trace_end(pool), TN_INVALID_STATE);
    test_give(pool, test_take(pool, 100, NULL), NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_device_destroy(device));
}

/* ---- TENURE_TRACE, in a process of its own ------------------------------------------------- */

/* Two pools, and an end without a word to either. */
static int run_traced(void) {
    tn_device *device = test_open_host();
    tn_pool *first = test_open_pool(device, TN_BACKING_AUTO, 0);
    tn_pool *second = test_open_pool(device, TN_BACKING_AUTO, 0);
    (void)test_take(first, 123, NULL);
    (void)test_take(second, 456, NULL);
    return 42;
}

static int run_program(const char *trace) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        setenv("TENURE_TRACE", trace, 1);
        execl(own_path, own_path, "traced", (char *)NULL);
        _exit(4);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void the_variable_traces_the_first_pool(void **state) {
    char path[128];
    (void)state;
    snprintf(path, sizeof path, "%s", in_folder("by_variable.csv.gz"));
    assert_int_equal(run_program(path), 42);
    assert_string_equal(read_trace(path), "op,id,bytes,stream,owner\na,1,123,0,\n");
}

static void a_variable_that_can_not_be_used_is_no_failure(void **state) {
    (void)state;
    assert_int_equal(run_program(in_folder("no/such/folder.csv")), 42);
}

static int make_folder(void **state) {
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/tenure_trace_XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    (void)unlink(in_folder("plain.csv"));
    (void)unlink(in_folder("packed.csv.gz"));
    (void)unlink(in_folder("by_variable.csv.gz"));
    return rmdir(folder);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_trace_has_every_event_after_its_beginning),
        cmocka_unit_test(owners_and_addresses_are_written),
        cmocka_unit_test(what_could_not_be_served_is_written),
        cmocka_unit_test(a_file_that_can_not_be_written_is_named),
        cmocka_unit_test(a_pool_whose_trace_is_not_complete_is_destroyed_the_second_time),
        cmocka_unit_test(the_variable_traces_the_first_pool),
        cmocka_unit_test(a_variable_that_can_not_be_used_is_no_failure),
    };
    own_path = argv[0];
    if (argc == 2 && strcmp(argv[1], "traced") == 0) return run_traced();
    return TEST_RUN_GROUP(tests, make_folder, remove_folder);
}
