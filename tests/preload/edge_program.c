/* What programs seldom do, in cases, on the driver as lookalike_cuda.c has it: contexts of their
 * own, devices that have only work, memory that ends with something else. */
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <time.h>
#include <unistd.h>

#include "program_checks.h"

static CUcontext contexts[2];

static void use_device(int ordinal) {
    EXPECT_OK(DRIVER(cuInit)(0));
    if (!contexts[ordinal]) {
        EXPECT_OK(DRIVER(cuDevicePrimaryCtxRetain)(&contexts[ordinal], ordinal));
    }
    EXPECT_OK(DRIVER(cuCtxSetCurrent)(contexts[ordinal]));
}

static CUdeviceptr allocate(size_t bytes) {
    CUdeviceptr address = 0;
    EXPECT_OK(DRIVER(cuMemAlloc_v2)(&address, bytes));
    return address;
}

static void release(CUdeviceptr address) { EXPECT_OK(DRIVER(cuMemFree_v2)(address)); }

static uint64_t calls(const char *name) { return DRIVER(tnsim_call_count)(name); }

static CUstream new_stream(void) {
    CUstream stream = NULL;
    EXPECT_OK(DRIVER(cuStreamCreate)(&stream, 1));
    return stream;
}

static void write_on(CUstream stream, CUdeviceptr memory, size_t bytes, double us) {
    tnsim_range range = {(void *)(uintptr_t)memory, bytes, 1};
    EXPECT_OK(DRIVER(tnsim_launch)(stream, "write", &range, 1, us));
}

static void await(int gate) {
    while (!DRIVER(lookalike_is_waiting)(gate))
        sched_yield();
}

/* ---- devices --------------------------------------------------------------------------------- */

/* One of two devices is reset after an error that stays: the other one's memory, which waits for
 * both, comes back. */
static void reset_of_one(void) {
    CUdeviceptr last = 0;
    use_device(1);
    allocate(4096);
    use_device(0);
    allocate(4096);
    use_device(1);
    for (int i = 0; i < 3; i++)
        release(allocate(40 * MIB)); /* a fence each, on both devices */
    EXPECT_OK(DRIVER(tnsim_fault)("cuCtxSynchronize", 1, 0, CUDA_ERROR_ILLEGAL_ADDRESS));
    EXPECT_OK(DRIVER(cuDevicePrimaryCtxReset_v2)(0));
    for (int i = 0; i < 600; i++) {
        last = allocate(MIB);
        release(last);
    }
    release(allocate(40 * MIB));
    EXPECT_OK(DRIVER(cuDevicePrimaryCtxReset_v2)(1));
    release(allocate(MIB));
}

static int retained_in_reset;

static void *free_in_reset(void *unused) {
    use_device(1);
    await(LOOKALIKE_RESET);
    for (int i = 0; i < 3; i++)
        release(allocate(40 * MIB)); /* a fence each, on every device that is in use */
    retained_in_reset = DRIVER(lookalike_retained)(0);
    DRIVER(lookalike_hold)(LOOKALIKE_RESET, 0);
    return unused;
}

/* What another thread frees elsewhere does not open the device that is being reset: what was opened
 * would go with the context. */
static void reset_beside_frees(void) {
    pthread_t thread;
    use_device(1);
    allocate(4096);
    use_device(0);
    allocate(4096);
    DRIVER(lookalike_hold)(LOOKALIKE_RESET, 1);
    EXPECT(pthread_create(&thread, NULL, free_in_reset, NULL) == 0);
    EXPECT_OK(DRIVER(cuDevicePrimaryCtxReset_v2)(0));
    EXPECT(pthread_join(thread, NULL) == 0);
    EXPECT(retained_in_reset == 1); /* by this program */
    release(allocate(40 * MIB));
}

static void *wait_for_fences(void *stream) {
    CUdeviceptr blocks[8];
    use_device(1);
    write_on(stream, 0, 0, 10);
    for (int i = 0; i < 8; i++)
        blocks[i] = allocate(40 * MIB);
    for (int i = 0; i < 8; i++)
        release(blocks[i]);
    release(allocate(4096)); /* too much is behind fences: a wait for the oldest */
    return NULL;
}

static sem_t is_done;

static void *reset_first(void *unused) {
    EXPECT_OK(DRIVER(cuDevicePrimaryCtxReset_v2)(0));
    sem_post(&is_done);
    return unused;
}

static int is_done_within_50_ms(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return sem_timedwait(&is_done, &until) == 0;
}

/* Device of 1 GiB. Another thread waits for a fence on the first device's event (nth 1), which the
 * reset waits for, or on the second's (2), which it does not. */
static void reset_beside_a_wait_for_event(int nth) {
    pthread_t waits, resets;
    CUstream stream;
    EXPECT(sem_init(&is_done, 0, 0) == 0);
    use_device(0);
    allocate(4096);
    use_device(1);
    allocate(4096);
    stream = new_stream();
    EXPECT_OK(DRIVER(tnsim_stall)(stream, 1));
    DRIVER(lookalike_hold)(LOOKALIKE_EVENT_WAIT, nth);
    EXPECT(pthread_create(&waits, NULL, wait_for_fences, stream) == 0);
    await(LOOKALIKE_EVENT_WAIT);
    EXPECT(pthread_create(&resets, NULL, reset_first, NULL) == 0);
    if (nth == 1) {
        EXPECT(!is_done_within_50_ms());
    } else {
        EXPECT(sem_wait(&is_done) == 0);
    }
    EXPECT_OK(DRIVER(tnsim_stall)(stream, 0));
    DRIVER(lookalike_hold)(LOOKALIKE_EVENT_WAIT, 0);
    EXPECT(pthread_join(waits, NULL) == 0);
    EXPECT(pthread_join(resets, NULL) == 0);
    release(allocate(40 * MIB));
    EXPECT_OK(DRIVER(cuDevicePrimaryCtxReset_v2)(1));
    EXPECT(DRIVER(tnsim_race_count)() == 0);
}

static void reset_beside_a_wait_for_it(void) { reset_beside_a_wait_for_event(1); }
static void reset_beside_a_wait_for_another(void) { reset_beside_a_wait_for_event(2); }

/* A device that has no memory of its own here may work on another's: that comes again only when
 * both are done. */
static void work_of_another_device(void) {
    CUdeviceptr first, second;
    CUstream stream;
    use_device(1);
    stream = new_stream();
    use_device(0);
    first = allocate(40 * MIB);
    use_device(1);
    write_on(stream, 0, 0, 1e6);
    use_device(0);
    release(first);
    second = allocate(40 * MIB);
    EXPECT(second != first);
    release(second);
    use_device(1);
    EXPECT_OK(DRIVER(cuStreamSynchronize)(stream));
    use_device(0);
    second = allocate(40 * MIB);
    EXPECT(second == first);
}

/* Mapped pages of two devices, each of which the other one reaches, whichever has memory first. */
static void peers_both_ways(void) {
    CUdeviceptr memory;
    CUstream stream;
    use_device(1);
    stream = new_stream();
    allocate(MIB);
    use_device(0);
    EXPECT_OK(DRIVER(cuStreamSynchronize)(NULL));
    use_device(1);
    EXPECT_OK(DRIVER(cuCtxEnablePeerAccess)(contexts[0], 0));
    use_device(0);
    EXPECT_OK(DRIVER(cuCtxEnablePeerAccess)(contexts[1], 0));
    memory = allocate(3 * MIB);
    use_device(1);
    write_on(stream, memory, 3 * MIB, 10);
    EXPECT_OK(DRIVER(cuStreamSynchronize)(stream));
}

typedef struct meeting {
    CUstream first, second; /* of the devices */
    int is_in_order;        /* memory of cuMemAllocAsync */
} meeting;

static CUdeviceptr allocate_of(const meeting *m) {
    CUdeviceptr memory = 0;
    if (!m->is_in_order) return allocate(3 * MIB);
    EXPECT_OK(DRIVER(cuMemAllocAsync)(&memory, 3 * MIB, m->second));
    EXPECT_OK(DRIVER(cuStreamSynchronize)(m->second));
    return memory;
}

static void *allocate_first(void *m) {
    use_device(1);
    allocate_of(m);
    return NULL;
}

/* Gives the memory of the second device to the first, as soon as there is some. */
static void *allocate_and_reach(void *argument) {
    const meeting *m = argument;
    CUdeviceptr memory;
    use_device(1);
    memory = allocate_of(m);
    use_device(0);
    write_on(m->first, memory, 3 * MIB, 10);
    EXPECT_OK(DRIVER(cuStreamSynchronize)(m->first));
    sem_post(&is_done);
    return NULL;
}

/* Another thread is about to tell a new pool who reaches it: nobody gets memory of it before. */
static void meet_at_a_new_pool(int is_in_order) {
    meeting m = {.is_in_order = is_in_order};
    pthread_t threads[2];
    EXPECT(sem_init(&is_done, 0, 0) == 0);
    use_device(0);
    m.first = new_stream();
    use_device(1);
    m.second = new_stream();
    if (is_in_order) allocate(MIB);
    use_device(0);
    EXPECT_OK(DRIVER(cuCtxEnablePeerAccess)(contexts[1], 0));
    DRIVER(lookalike_hold)(LOOKALIKE_PEER, 1);
    EXPECT(pthread_create(&threads[0], NULL, allocate_first, &m) == 0);
    await(LOOKALIKE_PEER);
    EXPECT(pthread_create(&threads[1], NULL, allocate_and_reach, &m) == 0);
    EXPECT(!is_done_within_50_ms());
    DRIVER(lookalike_hold)(LOOKALIKE_PEER, 0);
    for (int i = 0; i < 2; i++)
        EXPECT(pthread_join(threads[i], NULL) == 0);
}

static void peers_of_a_new_device(void) { meet_at_a_new_pool(0); }
static void peers_of_a_new_stream_pool(void) { meet_at_a_new_pool(1); }

/* ---- contexts -------------------------------------------------------------------------------- */

/* A context of the program's own: its memory is the driver's, and the device gets no other one. */
static void own_context(void) {
    uint64_t allocs, retained;
    use_device(0);
    DRIVER(lookalike_use_own_context)(1);
    retained = calls("cuDevicePrimaryCtxRetain");
    allocs = calls("cuMemAlloc_v2");
    for (int i = 0; i < 100; i++)
        release(allocate(4096));
    EXPECT(calls("cuMemAlloc_v2") == allocs + 100);
    EXPECT(calls("cuDevicePrimaryCtxRetain") == retained);
    DRIVER(lookalike_use_own_context)(0);
    release(allocate(4096));
    release(allocate(4096));
    EXPECT(calls("cuMemAlloc_v2") == allocs + 101);
}

/* Device of 256 MiB: what the pools keep goes back when memory of such a context is short. */
static void own_context_shortage(void) {
    CUdeviceptr pitched = 0;
    size_t pitch = 0;
    use_device(0);
    for (int i = 0; i < 2; i++) {
        DRIVER(lookalike_use_own_context)(0);
        release(allocate(200 * MIB));
        DRIVER(lookalike_use_own_context)(1);
        if (i == 0) {
            release(allocate(180 * MIB));
        } else {
            EXPECT_OK(DRIVER(cuMemAllocPitch_v2)(&pitched, &pitch, MIB, 180, 4));
            release(pitched);
        }
    }
}

/* ---- memory that ends with something else ---------------------------------------------------- */

/* Memory of the driver's own that ends without a call (with its graph, its context) may be a pool's
 * the next time. */
static void lost_memory(void) {
    static const struct {
        size_t lost_bytes, bytes;
    } sizes[] = {{20 * MIB, 20 * MIB}, {32 * MIB, MIB}};
    use_device(0);
    for (size_t i = 0; i < 2; i++) {
        CUdeviceptr lost = 0, now;
        uint64_t frees;
        EXPECT_OK(DRIVER(cuMemAllocManaged)(&lost, sizes[i].lost_bytes, 1));
        EXPECT_OK(DRIVER(lookalike_lose)(lost));
        now = allocate(sizes[i].bytes);
        EXPECT(now == lost);
        frees = calls("cuMemFree_v2");
        release(now);
        EXPECT_CODE(DRIVER(cuMemFree_v2)(now), 1);
        EXPECT(calls("cuMemFree_v2") == frees);
    }
}

/* ---- memory of other processes --------------------------------------------------------------- */

/* A close that the driver refuses can be made again. */
static void ipc_close_again(void) {
    CUipcMemHandle handle;
    CUdeviceptr block, opened = 0, base;
    use_device(0);
    allocate(4096);
    block = allocate(4096);
    EXPECT_OK(DRIVER(cuIpcGetMemHandle)(&handle, block));
    EXPECT_OK(DRIVER(cuIpcOpenMemHandle_v2)(&opened, handle, 1));
    base = DRIVER(lookalike_last_opened)();
    EXPECT(opened != base);
    EXPECT_OK(DRIVER(tnsim_fault)("cuMemFree_v2", 1, 0, CUDA_ERROR_INVALID_VALUE));
    EXPECT_CODE(DRIVER(cuIpcCloseMemHandle)(opened), CUDA_ERROR_INVALID_VALUE);
    EXPECT_OK(DRIVER(cuIpcCloseMemHandle)(opened));
    EXPECT(DRIVER(lookalike_last_closed)() == base);
}

/* ---- waits ----------------------------------------------------------------------------------- */

/* Device of 256 MiB, of which more is kept than may be for long: what that is given back at waits
 * for the device as cuMemFree does, and so no allocation does it. */
static void no_wait_to_allocate(void) {
    CUdeviceptr blocks[3];
    CUstream stream;
    uint64_t frees;
    use_device(0);
    stream = new_stream();
    for (int i = 0; i < 3; i++)
        blocks[i] = allocate(60 * MIB);
    for (int i = 0; i < 3; i++)
        release(blocks[i]);
    EXPECT_OK(DRIVER(tnsim_stall)(stream, 1));
    write_on(stream, 0, 0, 10);
    frees = calls("cuMemFree_v2");
    blocks[0] = allocate(4096);
    blocks[1] = allocate(4096);
    EXPECT(calls("cuMemFree_v2") == frees);
    EXPECT_OK(DRIVER(tnsim_stall)(stream, 0));
    release(blocks[0]);
    EXPECT(calls("cuMemFree_v2") == frees + 2);
}

static void *let_go_on(void *unused) {
    CUdeviceptr memory = 0;
    CUstream stream;
    use_device(0);
    stream = new_stream();
    await(LOOKALIKE_CONTEXT_WAIT);
    EXPECT_OK(DRIVER(cuMemAllocAsync)(&memory, 4096, stream));
    EXPECT_OK(DRIVER(cuMemFreeAsync)(memory, stream));
    memory = allocate(4096);
    release(memory);
    EXPECT_OK(DRIVER(cuStreamDestroy_v2)(stream));
    DRIVER(lookalike_hold)(LOOKALIKE_CONTEXT_WAIT, 0);
    return unused;
}

/* Where a free waits, other threads go on: the device may be waiting for one of them. */
static void free_beside_others(void) {
    CUdeviceptr memory;
    pthread_t thread;
    use_device(0);
    EXPECT_OK(DRIVER(tnsim_fault)("cuCtxRecordEvent", 1, 1, CUDA_ERROR_NOT_SUPPORTED));
    memory = allocate(40 * MIB);
    DRIVER(lookalike_hold)(LOOKALIKE_CONTEXT_WAIT, 1);
    EXPECT(pthread_create(&thread, NULL, let_go_on, NULL) == 0);
    release(memory);
    EXPECT(pthread_join(thread, NULL) == 0);
    release(allocate(40 * MIB));
    EXPECT(DRIVER(tnsim_race_count)() == 0);
}

typedef struct taker {
    pthread_t thread;
    size_t bytes;
    CUresult result;
} taker;

static void *take(void *argument) {
    taker *t = argument;
    CUdeviceptr memory = 0;
    use_device(0);
    t->result = DRIVER(cuMemAlloc_v2)(&memory, t->bytes);
    sem_post(&is_done);
    return NULL;
}

/* Device of 256 MiB, of which one thread gets hold of what serves two, and is held up in the call
 * that the gate is of: the other one waits for it and is not refused. */
static void take_beside_another(int gate, CUstream stalled) {
    taker takers[2] = {{.bytes = 100 * MIB}, {.bytes = 60 * MIB}};
    EXPECT(sem_init(&is_done, 0, 0) == 0);
    DRIVER(lookalike_hold)(gate, 1);
    EXPECT(pthread_create(&takers[0].thread, NULL, take, &takers[0]) == 0);
    await(gate);
    EXPECT(pthread_create(&takers[1].thread, NULL, take, &takers[1]) == 0);
    EXPECT(!is_done_within_50_ms());
    if (stalled) EXPECT_OK(DRIVER(tnsim_stall)(stalled, 0));
    DRIVER(lookalike_hold)(gate, 0);
    for (int i = 0; i < 2; i++)
        EXPECT(pthread_join(takers[i].thread, NULL) == 0);
    EXPECT_OK(takers[0].result);
    EXPECT_OK(takers[1].result);
    EXPECT(DRIVER(tnsim_race_count)() == 0);
}

static void short_beside_a_wait(void) {
    CUdeviceptr memory;
    CUstream stream;
    use_device(0);
    stream = new_stream();
    memory = allocate(200 * MIB);
    EXPECT_OK(DRIVER(tnsim_stall)(stream, 1));
    write_on(stream, memory, 200 * MIB, 10);
    release(memory);
    take_beside_another(LOOKALIKE_EVENT_WAIT, stream);
}

static void short_beside_a_trim(void) {
    use_device(0);
    release(allocate(200 * MIB));
    take_beside_another(LOOKALIKE_FREE, NULL);
}

/* ---- a limit --------------------------------------------------------------------------------- */

static void *allocate_large(void *unused) {
    CUdeviceptr memory = 0;
    use_device(0);
    EXPECT_OK(DRIVER(cuMemAlloc_v2)(&memory, 40 * MIB));
    return unused;
}

/* Limit of 64 MiB, which two threads come to at once: with a block of its own, and in a pool. */
static void limit_of_two(void) {
    pthread_t thread;
    use_device(0);
    DRIVER(lookalike_hold)(LOOKALIKE_LARGE_ALLOC, 1);
    EXPECT(pthread_create(&thread, NULL, allocate_large, NULL) == 0);
    await(LOOKALIKE_LARGE_ALLOC);
    for (int i = 0; i < 3; i++)
        allocate(7 * MIB);
    DRIVER(lookalike_hold)(LOOKALIKE_LARGE_ALLOC, 0);
    EXPECT(pthread_join(thread, NULL) == 0);
    EXPECT(DRIVER(lookalike_bytes)() <= 64 * MIB);
}

/* As tenure_pool.h has it. */
typedef struct process_limits {
    size_t size, hard_bytes, soft_bytes, reserved_bytes;
} process_limits;

/* Limit of 64 MiB: the pools have what is left of it, and nothing softer than that. */
static void limit_that_comes_back(void) {
    process_limits limits = {.size = sizeof limits};
    int (*get)(process_limits *);
    void *library;
    use_device(0);
    release(allocate(62 * MIB));
    allocate(30 * MIB);
    library = dlopen(getenv("TENURE_LIBRARY"), RTLD_NOW | RTLD_NOLOAD);
    EXPECT(library);
    *(void **)&get = dlsym(library, "tn_process_limits_get");
    EXPECT(get && get(&limits) == 0);
    EXPECT(limits.hard_bytes == 34 * MIB);
    EXPECT(limits.soft_bytes == 34 * MIB);
}

static const program_case cases[] = {
    {"no_wait_to_allocate", no_wait_to_allocate},
    {"free_beside_others", free_beside_others},
    {"short_beside_a_wait", short_beside_a_wait},
    {"short_beside_a_trim", short_beside_a_trim},
    {"reset_of_one", reset_of_one},
    {"reset_beside_frees", reset_beside_frees},
    {"reset_beside_a_wait_for_it", reset_beside_a_wait_for_it},
    {"reset_beside_a_wait_for_another", reset_beside_a_wait_for_another},
    {"work_of_another_device", work_of_another_device},
    {"peers_both_ways", peers_both_ways},
    {"peers_of_a_new_device", peers_of_a_new_device},
    {"peers_of_a_new_stream_pool", peers_of_a_new_stream_pool},
    {"own_context", own_context},
    {"limit_of_two", limit_of_two},
    {"limit_that_comes_back", limit_that_comes_back},
    {"own_context_shortage", own_context_shortage},
    {"lost_memory", lost_memory},
    {"ipc_close_again", ipc_close_again},
};

int main(int argc, char **argv) {
    alarm(300); /* what waits for ever has failed */
    return program_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
