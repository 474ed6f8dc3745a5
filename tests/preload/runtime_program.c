/* A program on the CUDA runtime, in cases: what the drop-in must do with its memory. The runtime is
 * lookalike_cudart.c, shared or static; the driver lookalike_cuda.c. */
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lookalike_cudart.h"
#include "program_checks.h"

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };

static uint64_t driver_calls(const char *name) { return DRIVER(tnsim_call_count)(name); }

static void *allocate(size_t bytes) {
    void *memory = NULL;
    EXPECT_OK(cudaMalloc(&memory, bytes));
    EXPECT(memory != NULL);
    return memory;
}

static CUstream new_stream(unsigned flags) {
    CUstream stream = NULL;
    EXPECT_OK(cudaDeviceSynchronize()); /* so that there is a context */
    EXPECT_OK(DRIVER(cuStreamCreate)(&stream, flags));
    return stream;
}

static void write_on(CUstream stream, const void *memory, size_t bytes, double us) {
    tnsim_range range = {memory, bytes, 1};
    EXPECT_OK(DRIVER(tnsim_launch)(stream, "write", &range, 1, us));
}

static void expect_no_race(void) {
    if (DRIVER(tnsim_race_count)() == 0) return;
    fprintf(stderr, "%s\n", DRIVER(tnsim_race_text)(0));
    exit(1);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* How many of the driver's calls it takes, printed. */
static void counts(void) {
    uint64_t allocs, frees;
    for (int i = 0; i < 1000; i++)
        EXPECT_OK(cudaFree(allocate(4096 + (size_t)i)));
    allocs = driver_calls("cuMemAlloc_v2");
    frees = driver_calls("cuMemFree_v2");
    printf("driver allocs %llu frees %llu\n", (unsigned long long)allocs,
           (unsigned long long)frees);
}

/* Memory is given out again only when all streams are done with it, also those that were given work
 * after others, and none is made to wait for another. */
static void reuse(void) {
    CUstream streams[5] = {NULL, CU_STREAM_PER_THREAD, new_stream(0), new_stream(1), new_stream(1)};
    void *kept[64] = {NULL};
    allocate(4096);
    for (int i = 0; i < 4000; i++) {
        size_t bytes = ((size_t)i * 7919 % 97 + 1) * 4 * KIB;
        void **slot = &kept[i * 31 % 64];
        if (*slot) EXPECT_OK(cudaFree(*slot));
        *slot = allocate(bytes);
        write_on(streams[i % 5], *slot, bytes, (i % 7) * 40.0);
        write_on(streams[(i + 2) % 5], *slot, 0, 1.0);
    }
    expect_no_race();
    for (int i = 0; i < 64; i++)
        EXPECT_OK(cudaFree(kept[i]));
    EXPECT_OK(cudaDeviceSynchronize());
    expect_no_race();
}

/* That the simulated driver would have seen it: here the program itself is wrong. */
static void planted_race(void) {
    CUstream first = new_stream(1), second = new_stream(1);
    void *memory = allocate(64 * KIB);
    write_on(first, memory, 64 * KIB, 100);
    write_on(second, memory, 64 * KIB, 100);
    EXPECT(DRIVER(tnsim_race_count)() == 1);
}

/* A block that is freed while its work goes on: the next one is elsewhere, no wait. */
static void no_wait(void) {
    CUstream stream = new_stream(1);
    void *memory = allocate(33 * MIB);
    double before_us;
    write_on(stream, memory, 33 * MIB, 1e6);
    before_us = DRIVER(tnsim_now_us)();
    EXPECT_OK(cudaFree(memory));
    EXPECT(allocate(33 * MIB) != memory);
    printf("waited %s\n", DRIVER(tnsim_now_us)() - before_us < 1e5 ? "not" : "long");
    EXPECT_OK(cudaDeviceSynchronize());
}

static void shapes(void) {
    void *memory = NULL, *async = NULL, *managed = NULL;
    size_t pitch = 0, free_bytes = 0, total_bytes = 0, later = 0;
    EXPECT_OK(cudaMemGetInfo(&free_bytes, &total_bytes));
    EXPECT_OK(cudaMallocPitch(&memory, &pitch, 1000, 10));
    EXPECT(pitch == 1024);
    EXPECT_OK(cudaMallocManaged(&managed, 4096, 1));
    EXPECT_CODE(cudaMallocManaged(&managed, 4096, 7), INVALID_VALUE);
    EXPECT_OK(cudaMallocAsync(&async, 4096, NULL));
    EXPECT_OK(cudaFreeAsync(async, NULL));
    EXPECT_OK(cudaFree(managed));
    EXPECT_OK(cudaFree(memory));
    EXPECT_OK(cudaMemGetInfo(&later, &total_bytes));
    EXPECT(later <= free_bytes && free_bytes - later <= 64 * MIB);
}

static void misuse(void) {
    void *memory = allocate(5000), *other = allocate(5000), *nothing = NULL;
    EXPECT_CODE(cudaFree((char *)memory + 512), INVALID_VALUE);
    EXPECT_OK(cudaFree(memory));
    EXPECT_CODE(cudaFree(memory), INVALID_VALUE);
    EXPECT_CODE(cudaFreeAsync(memory, NULL), INVALID_VALUE);
    EXPECT_OK(cudaFree(other));
    EXPECT_CODE(cudaFree(other), INVALID_VALUE);
    EXPECT_OK(cudaFree(NULL));
    EXPECT_CODE(cudaFree((void *)(uintptr_t)0x1234500), INVALID_VALUE);
    EXPECT_CODE(cudaMalloc(&nothing, 0), INVALID_VALUE);
    for (size_t i = 0; i < 511; i += 51) {
        EXPECT_CODE(cudaMalloc(&nothing, SIZE_MAX - i), OUT_OF_MEMORY);
        EXPECT_CODE(cudaMallocAsync(&nothing, SIZE_MAX - i, NULL), OUT_OF_MEMORY);
    }
    EXPECT(nothing == NULL);
    EXPECT_CODE(cudaMemGetInfo(NULL, NULL), INVALID_VALUE);
    EXPECT_OK(cudaFree(allocate(4ull << 30)));
}

/* Device of 256 MiB. Freed memory serves whoever comes next, the driver's own allocations too. */
static void shortage(void) {
    CUstream stream = new_stream(1);
    CUmemAllocationProp properties = {.type = 1, .location = {1, 0}};
    CUmemGenericAllocationHandle handle = 0;
    void *blocks[5], *nothing = NULL;
    size_t free_bytes = 0, total_bytes = 0;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 5; i++) {
            blocks[i] = allocate(48 * MIB);
            write_on(stream, blocks[i], 48 * MIB, 1000);
        }
        EXPECT_CODE(cudaMalloc(&nothing, 48 * MIB), OUT_OF_MEMORY);
        for (int i = 0; i < 5; i++)
            EXPECT_OK(cudaFree(blocks[i]));
        blocks[0] = allocate(180 * MIB);
        EXPECT_OK(cudaFree(blocks[0]));
    }
    EXPECT_OK(cudaMemGetInfo(&free_bytes, &total_bytes));
    EXPECT(free_bytes >= 220 * MIB && total_bytes == 256 * MIB);
    EXPECT_OK(DRIVER(cuMemCreate)(&handle, 200 * MIB, &properties, 0));
    EXPECT_OK(DRIVER(cuMemRelease)(handle));
    EXPECT_OK(cudaMallocAsync(&blocks[1], 180 * MIB, stream));
    EXPECT_OK(cudaFreeAsync(blocks[1], stream));
    EXPECT_OK(cudaFree(allocate(180 * MIB)));
    EXPECT_OK(cudaDeviceSynchronize());
    expect_no_race();
}

/* ---- streams and captures -------------------------------------------------------------------- */

static void in_order(void) {
    CUstream streams[3] = {NULL, new_stream(1), new_stream(0)};
    CUmemoryPool own = NULL, general = NULL;
    CUmemPoolProps properties = {.allocType = 1, .location = {1, 0}};
    void *memory = NULL, *pooled = NULL;
    uint64_t before;
    allocate(4096);
    before = driver_calls("cuMemAllocFromPoolAsync");
    for (int i = 0; i < 500; i++) {
        size_t bytes = (size_t)(i % 40 + 1) * 64 * KIB;
        CUstream stream = streams[i % 3];
        EXPECT_OK(cudaMallocAsync(&memory, bytes, stream));
        write_on(stream, memory, bytes, 200);
        EXPECT_OK(i % 10 == 9 ? cudaFree(memory) : cudaFreeAsync(memory, stream));
    }
    printf("pool calls %llu\n",
           (unsigned long long)(driver_calls("cuMemAllocFromPoolAsync") - before));
    /* A stream that ends with its block alive, and memory of cuMemAlloc freed in order. */
    EXPECT_OK(cudaMallocAsync(&memory, MIB, streams[1]));
    write_on(streams[1], memory, MIB, 500);
    EXPECT_OK(DRIVER(cuStreamDestroy_v2)(streams[1]));
    EXPECT_OK(cudaFreeAsync(memory, streams[2]));
    memory = allocate(MIB);
    write_on(streams[2], memory, MIB, 500);
    EXPECT_OK(cudaFreeAsync(memory, streams[2]));
    /* The default pool is taken over, one of the program's own is not, and both are freed. */
    EXPECT_OK(DRIVER(cuDeviceGetDefaultMemPool)(&general, 0));
    EXPECT_OK(cudaMallocFromPoolAsync(&pooled, MIB, general, NULL));
    EXPECT_OK(cudaFreeAsync(pooled, NULL));
    EXPECT_OK(DRIVER(cuMemPoolCreate)(&own, &properties));
    before = driver_calls("cuMemFreeAsync");
    EXPECT_OK(cudaMallocFromPoolAsync(&pooled, MIB, own, NULL));
    EXPECT_OK(cudaFreeAsync(pooled, NULL));
    EXPECT(driver_calls("cuMemFreeAsync") == before + 1);
    EXPECT_OK(DRIVER(cuDeviceSetMemPool)(0, own));
    before = driver_calls("cuMemAllocFromPoolAsync");
    EXPECT_OK(cudaMallocAsync(&pooled, MIB, NULL));
    EXPECT(driver_calls("cuMemAllocFromPoolAsync") == before + 1);
    EXPECT_OK(cudaFreeAsync(pooled, NULL));
    EXPECT_OK(cudaDeviceSynchronize());
    EXPECT_OK(DRIVER(cuMemPoolDestroy)(own));
    expect_no_race();
    EXPECT(DRIVER(tnsim_lost_stream_uses)() == 0);
}

/* cuStreamDestroy waits for nothing: not for work that this very thread has yet to let go on. */
static void doomed_streams(void) {
    for (int i = 0; i < 50; i++) {
        CUstream stream = new_stream(1);
        void *memory = NULL;
        EXPECT_OK(cudaMallocAsync(&memory, MIB, stream));
        EXPECT_OK(DRIVER(tnsim_stall)(stream, 1));
        write_on(stream, memory, MIB, 10);
        EXPECT_OK(cudaFreeAsync(memory, stream));
        EXPECT_OK(DRIVER(cuStreamDestroy_v2)(stream));
        EXPECT_OK(DRIVER(tnsim_stall)(stream, 0));
        if (i % 2) EXPECT_OK(cudaDeviceSynchronize());
    }
    EXPECT_OK(cudaDeviceSynchronize());
    EXPECT_OK(DRIVER(cuStreamDestroy_v2)(new_stream(1)));
    expect_no_race();
}

/* Whose memory others may reach by the pool's word stays the pool's. */
static void shared_pool(void) {
    CUmemAccessDesc access = {{1, 0}, 3};
    CUmemoryPool general = NULL;
    void *memory = NULL;
    allocate(4096);
    EXPECT_OK(DRIVER(cuDeviceGetDefaultMemPool)(&general, 0));
    EXPECT_OK(DRIVER(cuMemPoolSetAccess)(general, &access, 1));
    uint64_t before = driver_calls("cuMemAllocFromPoolAsync");
    EXPECT_OK(cudaMallocAsync(&memory, MIB, NULL));
    EXPECT(driver_calls("cuMemAllocFromPoolAsync") == before + 1);
    EXPECT_OK(cudaFreeAsync(memory, NULL));
}

/* Nothing that the drop-in does may end a capture, in any mode. */
static void capture(void) {
    CUstream stream = new_stream(1);
    void *kept = allocate(MIB), *memory = NULL;
    for (int mode = 0; mode < 3; mode++) {
        CUgraph graph = NULL;
        EXPECT_OK(DRIVER(cuStreamBeginCapture_v2)(stream, mode));
        write_on(stream, kept, MIB, 10);
        for (int i = 0; i < 600; i++)
            EXPECT_OK(cudaFree(allocate(256 * KIB)));
        /* A node of the graph is the driver's: the simulated one has none, and says so. */
        if (mode == 2) {
            EXPECT_CODE(cudaMallocAsync(&memory, 4096, stream), CUDA_ERROR_NOT_SUPPORTED);
            EXPECT_OK(cudaFree(allocate(2048 * MIB)));
        }
        EXPECT_OK(DRIVER(cuStreamEndCapture)(stream, &graph));
        EXPECT_OK(DRIVER(cuGraphDestroy)(graph));
    }
    for (int i = 0; i < 600; i++)
        EXPECT_OK(cudaFree(allocate(256 * KIB)));
    EXPECT_OK(cudaDeviceSynchronize());
    expect_no_race();
}

/* ---- threads, processes ---------------------------------------------------------------------- */

static void *_Atomic handed[64];

static void *work(void *number) {
    unsigned random = (unsigned)(uintptr_t)number * 2654435761u + 1;
    for (int i = 0; i < 3000; i++) {
        random = random * 1664525u + 1013904223u;
        size_t bytes = ((size_t)1 << (random >> 8) % 18) + 1;
        void *memory = allocate(bytes);
        write_on(CU_STREAM_PER_THREAD, memory, bytes, 5);
        memory =
            __atomic_exchange_n((void **)&handed[(random >> 16) % 64], memory, __ATOMIC_ACQ_REL);
        if (memory) EXPECT_OK(cudaFree(memory));
    }
    return NULL;
}

static void threads(void) {
    pthread_t all[6];
    for (size_t i = 0; i < 6; i++)
        EXPECT(pthread_create(&all[i], NULL, work, (void *)i) == 0);
    for (size_t i = 0; i < 6; i++)
        EXPECT(pthread_join(all[i], NULL) == 0);
    for (size_t i = 0; i < 64; i++) {
        if (handed[i]) EXPECT_OK(cudaFree(handed[i]));
    }
    EXPECT_OK(cudaDeviceSynchronize());
    expect_no_race();
}

/* The driver's error for its own memory, nothing for ours; the child ends by itself. */
static void forked(void) {
    void *memory = allocate(4096), *nothing = NULL;
    int status = 0;
    pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        if (cudaFree(memory) != 0) _exit(3);
        if (cudaMalloc(&nothing, 4096) != CUDA_ERROR_NOT_INITIALIZED) _exit(4);
        exit(0);
    }
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT_OK(cudaFree(memory));
    EXPECT_OK(cudaFree(allocate(4096)));
}

static _Atomic int is_enough;

/* Shared by captures, alone for a free beside none: what is freed beside a capture comes back after
 * it, and a thread that is held up in one must not leave all memory to the other's frees. */
static pthread_rwlock_t in_capture = PTHREAD_RWLOCK_INITIALIZER;

static void *keep_busy(void *argument) {
    CUstream stream = argument;
    for (int i = 0; !is_enough; i++) {
        void *ordered = NULL;
        CUgraph graph = NULL;
        int is_alone = i % 16 == 0;
        if (is_alone) EXPECT(pthread_rwlock_wrlock(&in_capture) == 0);
        EXPECT_OK(cudaFree(allocate(40 * MIB)));
        if (is_alone) EXPECT(pthread_rwlock_unlock(&in_capture) == 0);
        EXPECT_OK(cudaMallocAsync(&ordered, 4096, stream));
        EXPECT_OK(cudaFreeAsync(ordered, stream));
        EXPECT(pthread_rwlock_rdlock(&in_capture) == 0);
        EXPECT_OK(DRIVER(cuStreamBeginCapture_v2)(stream, 2));
        EXPECT_OK(DRIVER(cuStreamEndCapture)(stream, &graph));
        EXPECT(pthread_rwlock_unlock(&in_capture) == 0);
        EXPECT_OK(DRIVER(cuGraphDestroy)(graph));
    }
    return NULL;
}

/* A child ends, whatever locks other threads of the parent had when it was made. */
static void forked_under_threads(void) {
    pthread_t all[2];
    CUstream streams[2] = {new_stream(1), new_stream(1)};
    void *memory = allocate(4096), *nothing = NULL;
    __typeof__(&cuStreamBeginCapture_v2) begin = DRIVER(cuStreamBeginCapture_v2);
    EXPECT_OK(cudaMallocAsync(&nothing, 4096, NULL)); /* the runtime has looked all up */
    EXPECT_OK(cudaFreeAsync(nothing, NULL));
    for (size_t i = 0; i < 2; i++)
        EXPECT(pthread_create(&all[i], NULL, keep_busy, streams[i]) == 0);
    for (int i = 0; i < 60; i++) {
        int status = 0;
        pid_t child = fork();
        EXPECT(child >= 0);
        if (child == 0) {
            (void)begin(NULL, 2);
            (void)cudaFreeAsync(&status, NULL);
            (void)cudaMallocAsync(&nothing, 4096, NULL);
            if (cudaFree(&status) == 0) _exit(11);
            _exit(cudaFree(memory));
        }
        EXPECT(waitpid(child, &status, 0) == child);
        EXPECT_CODE(status, 0);
    }
    is_enough = 1;
    for (size_t i = 0; i < 2; i++)
        EXPECT(pthread_join(all[i], NULL) == 0);
}

static void *at_exit;

static void free_late(void) {
    if (cudaFree(at_exit) != 0) _exit(5);
    (void)cudaMalloc(&at_exit, 4096); /* whatever the driver says by then */
}

static void exiting(void) {
    EXPECT(atexit(free_late) == 0); /* before anything of CUDA: so it runs behind all of that */
    at_exit = allocate(4096);
}

static void reset(void) {
    CUstream stream = new_stream(1);
    void *memory = NULL;
    allocate(40 * MIB);
    EXPECT_OK(cudaFree(allocate(MIB)));
    EXPECT_OK(cudaMallocAsync(&memory, MIB, stream));
    EXPECT_OK(cudaDeviceReset());
    EXPECT(DRIVER(lookalike_left_at_reset)() == 0);
    EXPECT_CODE(cudaFree(memory), INVALID_VALUE);
    EXPECT_OK(cudaFree(allocate(MIB)));
    EXPECT_OK(cudaDeviceReset());
    EXPECT(DRIVER(lookalike_left_at_reset)() == 0);
}

static const program_case cases[] = {
    {"counts", counts},
    {"reuse", reuse},
    {"planted_race", planted_race},
    {"no_wait", no_wait},
    {"shapes", shapes},
    {"misuse", misuse},
    {"shortage", shortage},
    {"in_order", in_order},
    {"capture", capture},
    {"threads", threads},
    {"forked", forked},
    {"exiting", exiting},
    {"reset", reset},
    {"doomed_streams", doomed_streams},
    {"shared_pool", shared_pool},
    {"forked_under_threads", forked_under_threads},
};

int main(int argc, char **argv) {
    return program_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
