/* Random programs on simulated devices, each made of one seed: the battery's long arm.
 *
 *     simulation_main.c    the command: many seeds, each in a process of its own; shrinking
 *     simulation_threads.c threads that run one at a time, in an order that the seed gives
 *     simulation_world.c   devices, streams and pools of a seed: made, ended, checked at the end
 *     simulation_steps.c   blocks: what a program does with them
 *     simulation_upsets.c   what goes wrong: faults, stalls, less memory, bad calls, ends
 *     simulation_sequences.c  not random: every short sequence of calls there is
 *     simulation_capture.c   streams that capture, graph pools
 *     simulation_check.c   what must hold after every step
 *     interval_oracle.c    the blocks as they must be, without the allocator's code
 *
 * The seed gives the world: 1-4 devices, 1-8 streams on each, 1-4 pools of any backing, 1-4
 * threads, sizes of memory, limits. Step k draws its numbers from the seed and k alone, so that
 * leaving out steps leaves the others what they were: that is how a failure is shrunk. After each
 * step the pool that it touched is compared with the oracle, its books are added up, and the
 * simulated device is asked for races; every few hundred steps every pool is walked.
 */
#ifndef TENURE_SIMULATION_H
#define TENURE_SIMULATION_H

#include "simcuda.h"
#include "tenure_pool.h"

#include "interval_oracle.h"

enum {
    WORLD_DEVICES = 4,
    WORLD_CREATED = 16, /* slots of streams that are made */
    WORLD_LEGACY = WORLD_CREATED,
    WORLD_PER_THREAD = WORLD_LEGACY + WORLD_DEVICES, /* of device 0, one a thread */
    WORLD_THREADS = 4,
    WORLD_STREAMS = WORLD_PER_THREAD + WORLD_THREADS,
    WORLD_POOLS = 4,
    WORLD_SIZES = 12,
    WORLD_GRAPHS = 4
};

/* What a run counts; a short run must have counted each at least once. */
#define WORLD_COUNTS(X)                                                                            \
    X(steps)                                                                                       \
    X(allocs)                                                                                      \
    X(host_allocs)                                                                                 \
    X(frees)                                                                                       \
    X(cross_stream_frees)                                                                          \
    X(uses)                                                                                        \
    X(recorded_uses)                                                                               \
    X(out_of_memory)                                                                               \
    X(device_waits)                                                                                \
    X(pages_mapped)                                                                                \
    X(driver_faults)                                                                               \
    X(host_faults)                                                                                 \
    X(stalls)                                                                                      \
    X(bad_calls)                                                                                   \
    X(streams_ended)                                                                               \
    X(foreign_streams_ended)                                                                       \
    X(pools_ended)                                                                                 \
    X(leaks_refused)                                                                               \
    X(captures)                                                                                    \
    X(captures_aborted)                                                                            \
    X(launches)                                                                                    \
    X(streams_adopted)                                                                             \
    X(callbacks)                                                                                   \
    X(process_limits)                                                                              \
    X(pauses)                                                                                      \
    X(trims)                                                                                       \
    X(threads_ended)                                                                               \
    X(walks)

typedef struct world_counts {
    uint64_t failed_step;
#define WORLD_COUNT_MEMBER(name) uint64_t name;
    WORLD_COUNTS(WORLD_COUNT_MEMBER)
#undef WORLD_COUNT_MEMBER
} world_counts;

typedef struct world_random {
    uint64_t state;
} world_random;

typedef struct world_stream {
    tn_stream handle;
    int device;
    int is_live;
    int is_foreign; /* not made by tn_stream_create: the pools do not hear of its end */
    int is_adopted; /* then they do: it is told to them */
    int is_stalled;
} world_stream;

typedef struct world_pool {
    tn_pool *pool; /* NULL: the slot is empty */
    int device;
    tn_pool_backing backing;
    int is_host_memory; /* none of the device's: its kernels' touches are not watched */
    size_t limit_bytes; /* 0: none */
    size_t live_bytes;  /* what the oracle says the statistics must be */
    uint64_t live_blocks;
    uint64_t allocs;
    uint64_t frees;
    uint64_t out_of_memory;
} world_pool;

/* Graphs of one graph pool; each launch comes after the one before. */
typedef struct world_graphs {
    tn_pool *pool;
    int last_stream; /* of the last launch */
    int count;
    void *graphs[WORLD_GRAPHS];
    void *execs[WORLD_GRAPHS];
    tn_graph_memory memories[WORLD_GRAPHS];
} world_graphs;

typedef struct world {
    uint64_t seed;
    uint64_t step;
    uint64_t walk_every;
    const char *doing; /* in words, for a failure */
    int tells;         /* every call is told on standard output */
    int thread;        /* whose turn it is */
    int device_count;
    size_t memory_bytes; /* of each device at the start */
    tn_device *devices[WORLD_DEVICES];
    world_stream streams[WORLD_STREAMS];
    world_pool pools[WORLD_POOLS];
    world_graphs graphs;
    int capturing; /* the stream that captures: nobody waits for it, nobody uses it */
    size_t blocks_max;
    size_t sizes[WORLD_SIZES]; /* that come again and again, as in a model */
    uint64_t books_every;
    int stalled_count;
    unsigned tolerated; /* a bit a status that calls may give now, besides TN_OK */
    int has_lost_count; /* a driver's pool could not be asked what it has reserved */
    int is_limited;     /* the process is, at present */
    int ends_thread;    /* the thread whose turn it is ends after the step, another begins */
    size_t memory_now[WORLD_DEVICES];
    interval_oracle oracle;
    world_counts *counts;
} world;

/* The controls of the simulated library. */
typedef struct world_controls {
    int (*configure)(const tnsim_config *config);
    int (*fault)(const char *call, long nth, int and_after, int code);
    int (*set_memory)(int device, size_t bytes);
    int (*stall)(void *stream, int stalled);
    int (*begin_capture)(void *stream, int mode);
    int (*end_capture)(void *stream, void **graph);
    int (*instantiate)(void **exec, void *graph, unsigned long long flags);
    int (*launch)(void *exec, void *stream);
    int (*exec_destroy)(void *exec);
    int (*graph_destroy)(void *graph);
    uint64_t (*race_count)(void);
    const char *(*race_text)(uint64_t index);
    uint64_t (*call_count)(const char *call);
    size_t (*physical_bytes)(int device);
    int (*leftovers)(char *text, size_t text_bytes);
} world_controls;
const world_controls *world_sim(void);

/* Where that library is; named before it is first used. */
extern const char *world_library;

/* ---- chance: splitmix64 ---------------------------------------------------------------------- */

uint64_t world_next(world_random *random);
size_t world_below(world_random *random, size_t limit);
/* 1 in `limit` times. */
static inline int world_one_in(world_random *random, size_t limit) {
    return world_below(random, limit) == 0;
}
/* The numbers of one step, or of what is set up (steps from UINT64_MAX down). */
world_random world_random_of(uint64_t seed, uint64_t step);

/* ---- simulation_world.c ---------------------------------------------------------------------- */

void world_open(world *w);
/* One device of so much memory, two streams, a pool: slots 0, 0 and 1, 0. */
void world_open_small(world *w, size_t memory_bytes, tn_pool_backing backing);
void world_open_pool(world *w, world_random *random, int slot);
void world_open_stream(world *w, world_random *random, int slot);
/* Frees every block and ends everything; nothing may be left anywhere. */
void world_close(world *w);

/* A stream of the device that the thread whose turn it is may use. */
int world_pick_stream(const world *w, world_random *random, int device);
int world_pick_pool(const world *w, world_random *random);

/* The stream's handle for the thread whose turn it is. */
tn_stream world_name_of(const world *w, int slot);
/* Makes the device's context current on this thread. */
void world_make_current(const world *w, int device);

/* Makes work put on `stream` from now on come after the work so far on each of the others. */
void world_wait(world *w, int stream, uint32_t others);

/* ---- steps ----------------------------------------------------------------------------------- */

void world_step(world *w, world_random *random);
/* One of what goes wrong; simulation_upsets.c. */
void world_upset(world *w, world_random *random);

/* The calls on blocks, with what the oracle says of them. Each gives the status that came back,
 * once it has been found to be one that may; the pool's statistics are the caller's to check. */
tn_status world_alloc(world *w, int pool, size_t bytes, size_t alignment, int stream);
tn_status world_free(world *w, size_t index, int stream);
tn_status world_record_use(world *w, size_t index, int stream);
tn_status world_trim(world *w, int pool, size_t keep_bytes);
void world_use(world *w, size_t index, int stream, int is_write, double duration_us);
void world_synchronize(world *w, int device);
size_t world_choose_bytes(world_random *random);
void world_release_stalls(world *w);

/* ---- simulation_capture.c -------------------------------------------------------------------- */

void world_open_graphs(world *w);
void world_close_graphs(world *w);
void world_graphs_moved(world *w, int from, int to);
void world_capture(world *w, world_random *random);

/* ---- simulation_check.c ---------------------------------------------------------------------- */

/* Ends the process with the words, the seed and the command that replays it. */
void world_fail(const world *w, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));
/* A line for what is done, if the world tells. */
void world_say(const world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define world_tell(w, ...)              ((w)->tells ? world_say((w), __VA_ARGS__) : (void)0)
#define WORLD_EXPECT(w, condition, ...) ((condition) ? (void)0 : world_fail((w), __VA_ARGS__))

/* Fails unless the status is TN_OK. */
void world_expect_ok(const world *w, tn_status status, const char *what);

/* Statistics of the pool agree with the oracle and with each other. */
void world_check_pool(world *w, int pool, tn_pool_stats *out);
/* That of every pool, each pool walked, no races, and all memory accounted for. */
void world_walk(world *w);
void world_check_races(const world *w);

/* ---- simulation_threads.c -------------------------------------------------------------------- */

/* Runs the world's steps on threads that take turns; those with a mark are left out. left_out may
 * be NULL. */
void world_run(world *w, uint64_t steps, const unsigned char *left_out);

/* ---- simulation_sequences.c ------------------------------------------------------------------ */

/* One of `count` parts of the work. */
typedef struct world_shard {
    uint64_t index;
    uint64_t count;
} world_shard;

/* Runs every sequence of so many calls, four sizes on two streams, that falls to the shard; the
 * count of those. */
uint64_t world_run_sequences(world *w, int length, world_shard shard);

#endif
