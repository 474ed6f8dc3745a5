/* A CUDA program as others write it: the runtime, linked statically (nvcc's default), and nothing
 * of Tenure. Run it as it is and under `tenure run`, and compare.
 *
 *     tenure-cuda-program pairs            microseconds of a cudaMalloc and its cudaFree, by size
 *     tenure-cuda-program work             a job that allocates and frees around every kernel:
 *                                          time, and a checksum of what it computes
 *     tenure-cuda-program poison ROUNDS    kernels of several streams and threads still write
 *                                          memory when it is freed and allocated again: errors
 *     tenure-cuda-program plant ROUNDS     the same with memory that is used again too early, as a
 *                                          wrong cudaFree would have it: must find errors
 *     tenure-cuda-program graph            allocates and frees while streams capture: checksum
 *     tenure-cuda-program shapes           pitches and attributes, and a reset: checksum
 *     tenure-cuda-program share            a second process writes what this one has (CUDA IPC):
 *                                          checksum
 *
 * Each ends with status 1 if a call of CUDA failed or an error was found (plant: if none was).
 */
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <pthread.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        if (error_ != cudaSuccess) {                                                               \
            fprintf(stderr, "%s failed: %s\n", #call, cudaGetErrorString(error_));                 \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static double now_us() {
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static void pairs() {
    static const struct {
        const char *name;
        size_t bytes;
        int count;
    } rows[] = {{"4 KiB", (size_t)4 << 10, 4000},
                {"1 MiB", (size_t)1 << 20, 2000},
                {"64 MiB", (size_t)64 << 20, 400},
                {"1 GiB", (size_t)1 << 30, 100}};
    for (const auto &row : rows) {
        void *memory;
        for (int i = 0; i < row.count / 4; i++) {
            CHECK(cudaMalloc(&memory, row.bytes));
            CHECK(cudaFree(memory));
        }
        double start = now_us();
        for (int i = 0; i < row.count; i++) {
            CHECK(cudaMalloc(&memory, row.bytes));
            CHECK(cudaFree(memory));
        }
        printf("pair %s: %.2f us\n", row.name, (now_us() - start) / row.count);
    }
}

/* ---- work ------------------------------------------------------------------------------------ */

__global__ void mix(unsigned *out, const unsigned *in, size_t count, unsigned round) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = (in[i] ^ round) * 2654435761u + (unsigned)i;
}

__global__ void add(unsigned *sum, const unsigned *in, size_t count) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) atomicAdd(sum, in[i]);
}

static void launch_mix(unsigned *out, const unsigned *in, size_t count, unsigned round,
                       cudaStream_t stream) {
    mix<<<(unsigned)((count + 255) / 256), 256, 0, stream>>>(out, in, count, round);
    CHECK(cudaGetLastError());
}

static void work() {
    const size_t count = 1 << 20;
    unsigned *kept, *sum, host = 0;
    double start = now_us();
    CHECK(cudaMalloc((void **)&kept, count * 4));
    CHECK(cudaMalloc((void **)&sum, 4));
    CHECK(cudaMemset(kept, 1, count * 4));
    CHECK(cudaMemset(sum, 0, 4));
    for (unsigned round = 0; round < 3000; round++) {
        size_t some = count - (round * 7919u) % (count / 2);
        unsigned *a, *b;
        CHECK(cudaMalloc((void **)&a, count * 4));
        CHECK(cudaMalloc((void **)&b, some * 4));
        launch_mix(a, kept, count, round, 0);
        launch_mix(b, a, some, round + 1, 0);
        launch_mix(kept, b, some, round + 2, 0);
        CHECK(cudaFree(a));
        CHECK(cudaFree(b));
    }
    add<<<(unsigned)((count + 255) / 256), 256>>>(sum, kept, count);
    CHECK(cudaMemcpy(&host, sum, 4, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(kept));
    CHECK(cudaFree(sum));
    printf("work: %.1f ms\nchecksum %08x\n", (now_us() - start) / 1e3, host);
}

/* ---- poison ---------------------------------------------------------------------------------- */

/* Writes slowly, so that the memory is in use for long after its cudaFree. */
__global__ void write_slowly(unsigned *out, size_t count, unsigned value, int passes) {
    for (int pass = 0; pass < passes; pass++) {
        for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
             i += (size_t)gridDim.x * blockDim.x) {
            ((volatile unsigned *)out)[i] = value;
        }
    }
}

__global__ void expect(const unsigned *in, size_t count, unsigned value,
                       unsigned long long *errors) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        if (((const volatile unsigned *)in)[i] != value) atomicAdd(errors, 1ull);
    }
}

enum { STREAMS = 6, THREADS = 3 };

typedef struct poison_thread {
    pthread_t thread;
    unsigned number;
    long rounds;
    int is_planted;
    unsigned long long *errors;
} poison_thread;

/* The default streams, that of the thread, and streams of both kinds. */
static void make_streams(cudaStream_t *streams) {
    streams[0] = cudaStreamLegacy;
    streams[1] = cudaStreamPerThread;
    for (int i = 2; i < STREAMS; i++) {
        CHECK(cudaStreamCreateWithFlags(&streams[i],
                                        i % 2 ? cudaStreamNonBlocking : cudaStreamDefault));
    }
}

static void *poison(void *argument) {
    poison_thread *self = (poison_thread *)argument;
    cudaStream_t streams[STREAMS];
    unsigned random = self->number * 2654435761u + 1;
    void *planted = NULL;
    make_streams(streams);
    if (self->is_planted) CHECK(cudaMalloc(&planted, 1 << 20));
    for (long round = 0; round < self->rounds; round++) {
        unsigned value = (unsigned)round * THREADS + self->number;
        random = random * 1664525u + 1013904223u;
        size_t bytes = (size_t)4096 << (random >> 16) % 9;
        cudaStream_t stream = streams[(random >> 24) % STREAMS];
        unsigned *memory = (unsigned *)planted;
        if (!planted) CHECK(cudaMalloc((void **)&memory, bytes));
        write_slowly<<<4, 128, 0, stream>>>(memory, bytes / 4, value, (int)(random >> 8) % 3 + 1);
        expect<<<4, 128, 0, stream>>>(memory, bytes / 4, value, self->errors);
        CHECK(cudaGetLastError());
        if (!planted) CHECK(cudaFree(memory));
        if (round % 4096 == 4095) CHECK(cudaDeviceSynchronize()); /* the queue stays short */
    }
    CHECK(cudaDeviceSynchronize());
    for (int i = 2; i < STREAMS; i++)
        CHECK(cudaStreamDestroy(streams[i]));
    if (planted) CHECK(cudaFree(planted));
    return NULL;
}

static int poison_rounds(long rounds, int is_planted) {
    poison_thread threads[THREADS];
    unsigned long long *errors, host = 0;
    double start = now_us();
    CHECK(cudaMalloc((void **)&errors, sizeof *errors));
    CHECK(cudaMemset(errors, 0, sizeof *errors));
    CHECK(cudaDeviceSynchronize());
    for (unsigned i = 0; i < THREADS; i++) {
        threads[i] = {0, i, (rounds + THREADS - 1) / THREADS, is_planted, errors};
        if (pthread_create(&threads[i].thread, NULL, poison, &threads[i]) != 0) exit(1);
    }
    for (auto &thread : threads)
        pthread_join(thread.thread, NULL);
    CHECK(cudaMemcpy(&host, errors, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(errors));
    printf("%s: %ld rounds on %d streams of %d threads in %.1f s: %llu errors\n",
           is_planted ? "plant" : "poison", rounds, STREAMS, THREADS, (now_us() - start) / 1e6,
           host);
    return is_planted ? host == 0 : host != 0;
}

/* ---- graph ----------------------------------------------------------------------------------- */

/* Memory is allocated and freed while a stream captures: it must neither spoil the capture nor get
 * into the graph's way. */
static void graph() {
    const size_t count = 1 << 18;
    unsigned *kept, *sum, host = 0;
    cudaStream_t stream;
    cudaGraph_t captured;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc((void **)&kept, count * 4));
    CHECK(cudaMalloc((void **)&sum, 4));
    CHECK(cudaMemset(kept, 3, count * 4));
    CHECK(cudaMemset(sum, 0, 4));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    for (unsigned round = 0; round < 64; round++) {
        unsigned *other;
        CHECK(cudaMalloc((void **)&other, ((size_t)1 + round) << 20));
        launch_mix(kept, kept, count, round, stream);
        if (round % 2) {
            void *nodes;
            CHECK(cudaMallocAsync(&nodes, 1 << 16, stream));
            CHECK(cudaFreeAsync(nodes, stream));
        }
        CHECK(cudaFree(other));
    }
    CHECK(cudaStreamEndCapture(stream, &captured));
    CHECK(cudaGraphInstantiate(&exec, captured, 0));
    for (int i = 0; i < 10; i++) {
        void *between;
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaMalloc(&between, 1 << 20));
        CHECK(cudaMemsetAsync(between, 0, 1 << 20, stream));
        CHECK(cudaFree(between));
    }
    CHECK(cudaStreamSynchronize(stream));
    add<<<(unsigned)((count + 255) / 256), 256, 0, stream>>>(sum, kept, count);
    CHECK(cudaMemcpyAsync(&host, sum, 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(captured));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(kept));
    CHECK(cudaFree(sum));
    printf("checksum %08x\n", host);
}

/* ---- shapes ---------------------------------------------------------------------------------- */

static void add_told(unsigned long long *sum, unsigned long long told) {
    *sum = *sum * 1099511628211ull + told;
}

/* What the runtime says of memory: pitches, kinds, devices. */
static void shapes() {
    static const size_t widths[] = {1, 100, 511, 512, 513, 4097, 100000};
    unsigned long long sum = 14695981039346656037ull;
    for (size_t width : widths) {
        void *memory;
        size_t pitch;
        cudaPitchedPtr box;
        cudaPointerAttributes attributes;
        CHECK(cudaMallocPitch(&memory, &pitch, width, 33));
        add_told(&sum, pitch);
        CHECK(cudaMemset2D(memory, pitch, 7, width, 33));
        CHECK(cudaPointerGetAttributes(&attributes, (char *)memory + pitch * 32));
        add_told(&sum, (unsigned long long)attributes.type);
        add_told(&sum, (unsigned long long)attributes.device);
        add_told(&sum, attributes.hostPointer == NULL);
        CHECK(cudaFree(memory));
        CHECK(cudaMalloc3D(&box, make_cudaExtent(width, 5, 3)));
        add_told(&sum, box.pitch);
        add_told(&sum, box.ysize);
        CHECK(cudaFree(box.ptr));
    }
    void *managed, *host_only = &sum;
    cudaPointerAttributes attributes;
    CHECK(cudaMallocManaged(&managed, 1 << 20));
    CHECK(cudaPointerGetAttributes(&attributes, managed));
    add_told(&sum, (unsigned long long)attributes.type);
    CHECK(cudaFree(managed));
    CHECK(cudaPointerGetAttributes(&attributes, host_only));
    add_told(&sum, (unsigned long long)attributes.type);
    CHECK(cudaDeviceReset());
    void *after;
    CHECK(cudaMalloc(&after, 1 << 20));
    CHECK(cudaMemset(after, 1, 1 << 20));
    CHECK(cudaFree(after));
    printf("checksum %llx\n", sum);
}

/* ---- share ----------------------------------------------------------------------------------- */

static const size_t shared_bytes[] = {4096, 4096, 1 << 20, 20 << 20};
enum { SHARED = sizeof shared_bytes / sizeof shared_bytes[0] };

/* The second process: the handles come by standard input. */
static void share_with() {
    cudaIpcMemHandle_t handles[SHARED];
    if (fread(handles, sizeof handles, 1, stdin) != 1) exit(1);
    for (int i = 0; i < SHARED; i++) {
        void *memory;
        unsigned char first = 0, last = 0;
        CHECK(cudaIpcOpenMemHandle(&memory, handles[i], cudaIpcMemLazyEnablePeerAccess));
        CHECK(cudaMemcpy(&first, memory, 1, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(&last, (char *)memory + shared_bytes[i] - 1, 1, cudaMemcpyDeviceToHost));
        if (first != 10 + i || last != 10 + i) {
            fprintf(stderr, "block %d has %d and %d\n", i, first, last);
            exit(1);
        }
        CHECK(cudaMemset(memory, 20 + i, shared_bytes[i]));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaIpcCloseMemHandle(memory));
    }
}

static void share() {
    cudaIpcMemHandle_t handles[SHARED];
    void *blocks[SHARED];
    unsigned long long sum = 0;
    for (int i = 0; i < SHARED; i++) {
        CHECK(cudaMalloc(&blocks[i], shared_bytes[i]));
        CHECK(cudaMemset(blocks[i], 10 + i, shared_bytes[i]));
        CHECK(cudaIpcGetMemHandle(&handles[i], blocks[i]));
    }
    CHECK(cudaDeviceSynchronize());
    FILE *other = popen("/proc/$PPID/exe share-with", "w");
    if (!other || fwrite(handles, sizeof handles, 1, other) != 1 || pclose(other) != 0) exit(1);
    for (int i = 0; i < SHARED; i++) {
        unsigned char *host = (unsigned char *)malloc(shared_bytes[i]);
        CHECK(cudaMemcpy(host, blocks[i], shared_bytes[i], cudaMemcpyDeviceToHost));
        for (size_t at = 0; at < shared_bytes[i]; at++)
            sum += host[at];
        free(host);
        CHECK(cudaFree(blocks[i]));
    }
    printf("checksum %llx\n", sum);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 100000;
    if (strcmp(what, "pairs") == 0) return pairs(), 0;
    if (strcmp(what, "work") == 0) return work(), 0;
    if (strcmp(what, "poison") == 0) return poison_rounds(rounds, 0);
    if (strcmp(what, "plant") == 0) return poison_rounds(rounds, 1);
    if (strcmp(what, "graph") == 0) return graph(), 0;
    if (strcmp(what, "shapes") == 0) return shapes(), 0;
    if (strcmp(what, "share") == 0) return share(), 0;
    if (strcmp(what, "share-with") == 0) return share_with(), 0;
    fprintf(stderr,
            "usage: %s pairs | work | poison ROUNDS | plant ROUNDS | graph | shapes | share\n",
            argv[0]);
    return 2;
}
