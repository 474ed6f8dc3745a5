/* Programs that end in unusual ways: each test starts its own program again with a part to play,
 * and looks at how it ends and what it says. */
#ifndef TENURE_MISUSE_SUPPORT_H
#define TENURE_MISUSE_SUPPORT_H

#include "tenure_pool.h"
#include "test_support.h"

typedef struct part {
    const char *name;
    void (*play)(void);
} part;

/* How a part ended: exit status, or 128 + the signal; and its standard error. */
typedef struct ending {
    int status;
    char text[4096];
} ending;

/* Plays the part with the driver ("host" or "sim") in a process of its own, that is killed after
 * 60 s. What is left on the simulated device, or of host memory, is not fatal there. */
ending misuse_run(const char *name, const char *driver);

/* Fails unless the part ends with that status on either driver. */
void misuse_expect(const char *name, int status);

/* For main: plays what the arguments name, and does not return then. */
void misuse_play(int argc, char **argv, const part *parts, size_t count);

/* What a part works with, opened by misuse_open with the driver of the arguments. */
typedef struct scene {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    void *block; /* 3 MiB */
} scene;
extern scene misuse_scene;
void misuse_open(void);

/* Ends the process with status 3 and words unless it holds. */
void misuse_require(int holds, const char *what, int line);
#define REQUIRE(condition) misuse_require((condition), #condition, __LINE__)

/* Threads that allocate and free without end; in a while, all of them are at it. */
void misuse_start_busy_threads(int count);

#endif
