/* What is measured: see peer_bench.h. Medians over batches, after a batch that is not counted. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "peer_bench.h"

enum { BATCHES_MAX = 15, HANDOVER_BLOCKS = 256 };

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static int compare_doubles(const void *a, const void *b) {
    double left = *(const double *)a;
    double right = *(const double *)b;
    return left < right ? -1 : left > right;
}

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return values[count / 2];
}

static void run_pairs(const peer_allocator *allocator, size_t bytes, void *stream, int pairs) {
    for (int i = 0; i < pairs; i++) {
        void *block = allocator->alloc(bytes, stream);
        allocator->free(block, bytes, stream);
    }
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static const char *size_name(size_t bytes, char *text, size_t text_bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    int unit = 0;
    while (bytes >= 1024 && unit < 3) {
        bytes /= 1024;
        unit++;
    }
    snprintf(text, text_bytes, "%zu %s", bytes, units[unit]);
    return text;
}

void peer_measure_sizes(const peer_bench *bench, const peer_allocator *allocator) {
    char name[32];
    allocator->enter_thread();
    for (size_t bytes = 512; bytes <= bench->largest_bytes; bytes *= 8) {
        double ns[BATCHES_MAX];
        for (int batch = -1; batch < bench->batches; batch++) {
            double start = now_ns();
            run_pairs(allocator, bytes, bench->streams[0], bench->pairs);
            if (batch >= 0) ns[batch] = (now_ns() - start) / bench->pairs;
        }
        printf("pair,%s,%s,1,%.1f,ns\n", allocator->name, size_name(bytes, name, sizeof name),
               median(ns, bench->batches));
        fflush(stdout);
    }
}

/* ---- threads --------------------------------------------------------------------------------- */

typedef struct worker {
    const peer_bench *bench;
    const peer_allocator *allocator;
    pthread_barrier_t *barrier;
    tn_stream stream;
    size_t bytes;
    int pairs;
} worker;

static void *work_in_pairs(void *argument) {
    const worker *me = argument;
    me->allocator->enter_thread();
    run_pairs(me->allocator, me->bytes, me->stream, me->pairs / 10 + 1);
    for (int batch = 0; batch < me->bench->batches; batch++) {
        pthread_barrier_wait(me->barrier); /* the main thread takes the time here */
        run_pairs(me->allocator, me->bytes, me->stream, me->pairs);
        pthread_barrier_wait(me->barrier);
    }
    return NULL;
}

static double threads_ns(const peer_bench *bench, const peer_allocator *allocator, size_t bytes,
                         int count, int pairs) {
    worker workers[PEER_STREAMS];
    pthread_t threads[PEER_STREAMS];
    pthread_barrier_t barrier;
    double ns[BATCHES_MAX];
    pthread_barrier_init(&barrier, NULL, (unsigned)count + 1);
    for (int i = 0; i < count; i++) {
        workers[i] = (worker){bench, allocator, &barrier, bench->streams[i], bytes, pairs};
        pthread_create(&threads[i], NULL, work_in_pairs, &workers[i]);
    }
    for (int batch = 0; batch < bench->batches; batch++) {
        double start;
        pthread_barrier_wait(&barrier);
        start = now_ns();
        pthread_barrier_wait(&barrier);
        ns[batch] = (now_ns() - start) / pairs;
    }
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&barrier);
    return median(ns, bench->batches);
}

/* The batches of slow allocators are made shorter: under contention a pair may cost 100 us. */
void peer_measure_threads(const peer_bench *bench, const peer_allocator *allocator) {
    static const size_t sizes[] = {4096, (size_t)1 << 20};
    char name[32];
    for (int i = 0; i < 2; i++) {
        double single = threads_ns(bench, allocator, sizes[i], 1, bench->pairs);
        for (int count = 1; count <= PEER_STREAMS; count *= 2) {
            int pairs = single < 200.0 ? bench->pairs : bench->pairs / (4 * count) + 1;
            double ns = threads_ns(bench, allocator, sizes[i], count, pairs);
            size_name(sizes[i], name, sizeof name);
            printf("threads,%s,%s,%d,%.1f,ns\n", allocator->name, name, count, ns);
            printf("throughput,%s,%s,%d,%.3f,M pairs/s\n", allocator->name, name, count,
                   count * 1e3 / ns);
            fflush(stdout);
        }
    }
}

/* ---- from one thread to another -------------------------------------------------------------- */

typedef struct handover {
    const peer_allocator *allocator;
    pthread_barrier_t barrier;
    tn_stream stream;
    size_t bytes;
    int rounds;
    void *blocks[HANDOVER_BLOCKS];
    double alloc_ns;
    double free_ns;
} handover;

static void *work_as_freer(void *argument) {
    handover *shared = argument;
    shared->allocator->enter_thread();
    for (int round = -1; round < shared->rounds; round++) {
        double start;
        pthread_barrier_wait(&shared->barrier);
        start = now_ns();
        for (int i = 0; i < HANDOVER_BLOCKS; i++)
            shared->allocator->free(shared->blocks[i], shared->bytes, shared->stream);
        if (round >= 0) shared->free_ns += now_ns() - start;
        pthread_barrier_wait(&shared->barrier);
    }
    return NULL;
}

void peer_measure_handover(const peer_bench *bench, const peer_allocator *allocator) {
    handover shared = {.allocator = allocator, .stream = bench->streams[0], .bytes = 65536};
    double count;
    pthread_t thread;
    shared.rounds = bench->pairs / HANDOVER_BLOCKS + 1;
    count = (double)shared.rounds * HANDOVER_BLOCKS;
    pthread_barrier_init(&shared.barrier, NULL, 2);
    pthread_create(&thread, NULL, work_as_freer, &shared);
    allocator->enter_thread();
    for (int round = -1; round < shared.rounds; round++) {
        double start = now_ns();
        for (int i = 0; i < HANDOVER_BLOCKS; i++)
            shared.blocks[i] = allocator->alloc(shared.bytes, shared.stream);
        if (round >= 0) shared.alloc_ns += now_ns() - start;
        pthread_barrier_wait(&shared.barrier);
        pthread_barrier_wait(&shared.barrier);
    }
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&shared.barrier);
    printf("handover alloc,%s,64 KiB,2,%.1f,ns\n", allocator->name, shared.alloc_ns / count);
    printf("handover free,%s,64 KiB,2,%.1f,ns\n", allocator->name, shared.free_ns / count);
    fflush(stdout);
}

/* ---- two streams ----------------------------------------------------------------------------- */

void peer_measure_streams(const peer_bench *bench, const peer_allocator *allocator) {
    int blocks = bench->pairs / 10 + 2;
    double ns[BATCHES_MAX];
    allocator->enter_thread();
    for (int batch = -1; batch < bench->batches; batch++) {
        double start = now_ns();
        for (int i = 0; i < blocks; i++) {
            allocator->use_across((size_t)1 << 20, bench->streams[i % 2],
                                  bench->streams[1 - i % 2]);
        }
        if (batch >= 0) ns[batch] = (now_ns() - start) / blocks;
    }
    PEER_TRY(tn_device_synchronize(bench->device));
    printf("two streams,%s,1 MiB,1,%.1f,ns\n", allocator->name, median(ns, bench->batches));
    fflush(stdout);
}
