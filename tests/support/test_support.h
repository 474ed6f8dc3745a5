/* What every test may use: devices of both drivers, and the simulated driver's controls. */
#ifndef TENURE_TEST_SUPPORT_H
#define TENURE_TEST_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "simcuda.h"
#include "tenure_alloc.h"

/* Fails with the status's name and tn_error_last(). */
void test_expect_status(tn_status actual, tn_status expected, const char *call, const char *file,
                        int line);
#define EXPECT_STATUS(call, expected)                                                              \
    test_expect_status((call), (expected), #call, __FILE__, __LINE__)
#define EXPECT_OK(call) EXPECT_STATUS(call, TN_OK)

/* Fails if tn_error_last() does not contain the words. */
void test_expect_error_has(const char *words, const char *file, int line);
#define EXPECT_ERROR_HAS(words) test_expect_error_has((words), __FILE__, __LINE__)

/* Removes a directory with all that is in it, or nothing where there is none. */
void test_remove_tree(const char *path);

/* Runs a group of tests between two functions of cmocka's kind. A group whose closing fails has
 * failed, which cmocka itself only prints. */
int test_run_group(const struct CMUnitTest *tests, size_t count, CMFixtureFunction open,
                   CMFixtureFunction close);
#define TEST_RUN_GROUP(tests, open, close)                                                         \
    test_run_group((tests), sizeof(tests) / sizeof *(tests), (open), (close))

/* A host device with the default memory. */
tn_device *test_open_host(void);

/* The ordinal of the GPU for a rank: its own number. With TENURE_RANKS_SHARE_GPU=1 all have the
 * first one, and NCCL, which takes no two ranks of one machine on a GPU, is told that each is on a
 * machine of its own: to be called before NCCL is loaded. */
int test_gpu_of_rank(int rank);

/* The simulated driver's control functions, of the one library that test_open_sim loads. */
typedef struct test_sim {
    void *library;
    int (*configure)(const tnsim_config *config);
    int (*launch)(void *stream, const char *kernel, const tnsim_range *ranges, size_t range_count,
                  double duration_us);
    int (*fault)(const char *call, long nth, int and_after, int code);
    uint64_t (*call_count)(const char *call);
    int (*set_memory)(int device, size_t bytes);
    int (*stall)(void *stream, int stalled);
    uint64_t (*lost_stream_uses)(void);
    uint64_t (*race_count)(void);
    const char *(*race_text)(uint64_t index);
    double (*now_us)(void);
    size_t (*physical_bytes)(int device);
    size_t (*physical_peak_bytes)(int device);
    int (*leftovers)(char *text, size_t text_bytes);
    void (*watch)(tnsim_watcher watcher, void *context);
} test_sim;

/* Loads the library once and gives its controls. */
const test_sim *test_sim_get(void);

/* Configures the simulated driver anew (memory 0: its default; unbacked unless backed) and opens
 * its first device. */
tn_device *test_open_sim(size_t memory_bytes, int backed);

/* Destroys the device; fails if races were seen or, on the simulated one, anything is left. */
void test_close_sim(tn_device *device);

#endif
