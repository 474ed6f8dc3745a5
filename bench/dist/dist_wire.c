/* Bus bandwidths, all kinds of buffers in turn in every round: see dist_wire.h.
 *
 * The unit's S bytes are gathered from n ranks' parts, even ones or ragged ones (each other rank
 * has a quarter more, its neighbour a quarter less), or reduced (bf16) to parts. Bus bandwidth is
 *
 *     S / time x (n - 1) / n
 *
 * which is what goes over each link of a ring of the ranks, and the hardware's peak whatever n is
 * (nccl-tests, doc/PERFORMANCE.md: "busbw" of AllGather and ReduceScatter). The same of ragged
 * parts, so that the three can be compared. A time is that of a batch of calls, by the host's clock
 * from all ranks being here to the end of the stream's work, over the number of calls.
 */
#include "dist_wire.h"

#include <stdlib.h>
#include <string.h>

#define TRY(call)                                                                                  \
    do {                                                                                           \
        tn_status try_status = (call);                                                             \
        if (try_status != TN_OK) return try_status;                                                \
    } while (0)

enum { SIZES_MAX = 8, MIB_BITS = 20, SIZE_STEP = 4, BF16_BYTES = 2, GRAIN = 64 };

typedef enum wire_kind { GATHER, GATHER_RAGGED, REDUCE, WIRE_KINDS } wire_kind;
static const char *const kind_names[WIRE_KINDS] = {"all_gather", "all_gather_ragged",
                                                   "reduce_scatter"};

/* Of one kind of collective, on all kinds of buffers. */
typedef struct wire_job {
    dist_bench *bench;
    const dist_wire_options *options;
    dist_stage stage;
    dist_wire_buffer buffers[DIST_WIRE_VARIANTS];
    int buffer_count;
    size_t sizes[SIZES_MAX];
    int size_count;
    tn_segment *segments; /* of ragged parts, one a rank */
    double *times;        /* of a size: by buffer, then by round */
} wire_job;

static int rank_of(const wire_job *job) { return tn_comm_rank(job->bench->comm); }
static int count_of(const wire_job *job) { return tn_comm_size(job->bench->comm); }

/* ---- parts of a unit ------------------------------------------------------------------------- */

/* The even part, a multiple of 64 bytes. */
static size_t even_part(const wire_job *job, size_t bytes) {
    return bytes / (size_t)count_of(job) / GRAIN * GRAIN;
}

/* What is gathered or reduced: the even parts of all. */
static size_t unit_bytes(const wire_job *job, size_t bytes) {
    return even_part(job, bytes) * (size_t)count_of(job);
}

static void cut_ragged(const wire_job *job, size_t bytes) {
    const size_t even = even_part(job, bytes), more = even / 4 / GRAIN * GRAIN;
    size_t offset = 0;
    for (int rank = 0; rank < count_of(job); rank++) {
        const int has_pair = (rank ^ 1) < count_of(job);
        const size_t part = !has_pair ? even : rank % 2 == 0 ? even + more : even - more;
        job->segments[rank] = (tn_segment){rank, offset, part};
        offset += part;
    }
}

/* ---- one call -------------------------------------------------------------------------------- */

static tn_status put(const wire_job *job, wire_kind kind, const dist_wire_buffer *buffer,
                     size_t bytes) {
    const size_t part = even_part(job, bytes), count = (size_t)count_of(job);
    const tn_stream stream = job->bench->stream;
    switch (kind) {
    case GATHER: return tn_all_gather(buffer->comm, buffer->part, buffer->whole, part, stream);
    case GATHER_RAGGED:
        return tn_all_gather_uneven(buffer->comm, buffer->part, buffer->whole, job->segments, count,
                                    stream);
    default:
        return tn_reduce_scatter(buffer->comm, buffer->whole, buffer->part, part / BF16_BYTES,
                                 TN_BF16, TN_REDUCE_SUM, stream);
    }
}

static int calls_of(const wire_job *job, size_t bytes) {
    if (job->options->is_small) return 2;
    return bytes <= (size_t)4 << MIB_BITS ? 16 : bytes <= (size_t)64 << MIB_BITS ? 8 : 4;
}

static tn_status time_batch(const wire_job *job, wire_kind kind, const dist_wire_buffer *buffer,
                            size_t bytes, double *us) {
    const int calls = calls_of(job, bytes);
    TRY(dist_bench_line_up(job->bench));
    const double start_us = dist_bench_now_us();
    for (int i = 0; i < calls; i++)
        TRY(put(job, kind, buffer, bytes));
    TRY(tn_stream_synchronize(job->bench->device, job->bench->stream));
    *us = (dist_bench_now_us() - start_us) / calls;
    return tn_comm_wait(buffer->comm);
}

/* ---- contents -------------------------------------------------------------------------------- */

/* What is gathered from or reduced, of the largest size: of smaller ones it is the beginning. */
static tn_status write_source(const wire_job *job, wire_kind kind, const dist_wire_buffer *buffer) {
    dist_pattern pattern = {DIST_WORDS, rank_of(job), count_of(job), 0};
    if (kind != REDUCE)
        return dist_pattern_write(&job->stage, &pattern, buffer->part, buffer->half_bytes);
    pattern.kind = DIST_NUMBERS;
    return dist_pattern_write(&job->stage, &pattern, buffer->whole, buffer->half_bytes);
}

static tn_status clear_target(const wire_job *job, wire_kind kind, const dist_wire_buffer *buffer) {
    char *target = kind == REDUCE ? buffer->part : buffer->whole;
    return tn_fill(job->bench->device, target, 0xFF, buffer->half_bytes, job->bench->stream);
}

static tn_status check_target(const wire_job *job, wire_kind kind, const dist_wire_buffer *buffer,
                              size_t bytes) {
    const size_t even = even_part(job, bytes);
    dist_pattern pattern = {DIST_SUMS, 0, count_of(job), (size_t)rank_of(job) * even};
    if (kind == REDUCE) return dist_pattern_check(&job->stage, &pattern, buffer->part, even);
    pattern = (dist_pattern){DIST_WORDS, 0, 0, 0};
    for (int rank = 0; rank < count_of(job); rank++) {
        const size_t offset = kind == GATHER ? (size_t)rank * even : job->segments[rank].offset;
        const size_t part = kind == GATHER ? even : job->segments[rank].count;
        pattern.rank = rank;
        TRY(dist_pattern_check(&job->stage, &pattern, buffer->whole + offset, part));
    }
    return TN_OK;
}

/* ---- one size, all buffers in turn ----------------------------------------------------------- */

/* What a buffer fails with it has failed with for good, on all ranks. */
static void note(const wire_job *job, dist_wire_buffer *buffer, tn_status mine) {
    char words[DIST_WIRE_WORDS];
    snprintf(words, sizeof words, "%s", mine == TN_OK ? "another rank failed" : tn_error_last());
    buffer->status = dist_bench_worst(job->bench, mine);
    if (buffer->status == TN_OK) return;
    snprintf(buffer->words, sizeof buffer->words, "%s", words);
    fprintf(stderr, "tenure-bench-dist: rank %d, %s: %s: %s\n", rank_of(job), buffer->name,
            tn_status_name(buffer->status), words);
}

static double *times_of(const wire_job *job, int buffer) {
    return job->times + (size_t)buffer * DIST_BENCH_ROUNDS_MAX;
}

static void measure(wire_job *job, wire_kind kind, size_t bytes) {
    for (long round = -1; round < job->options->rounds; round++) {
        for (int i = 0; i < job->buffer_count; i++) {
            dist_wire_buffer *buffer = &job->buffers[i];
            double us = 0.0;
            if (buffer->status != TN_OK) continue;
            tn_status status = round < 0 ? clear_target(job, kind, buffer) : TN_OK;
            if (status == TN_OK) status = time_batch(job, kind, buffer, bytes, &us);
            note(job, buffer, status); /* ranks may see a failure in different rounds */
            if (round >= 0) times_of(job, i)[round] = us;
        }
    }
    for (int i = 0; i < job->buffer_count; i++)
        if (job->buffers[i].status == TN_OK)
            note(job, &job->buffers[i], check_target(job, kind, &job->buffers[i], bytes));
}

/* ---- tables ---------------------------------------------------------------------------------- */

void dist_wire_csv_head(FILE *csv) {
    if (csv)
        fprintf(csv, "what,ranks,engine,buffers,bytes,us_median,us_least,us_most,bus_gb_per_s,"
                     "status\n");
}

void dist_wire_csv_line(dist_bench *bench, FILE *csv, const char *what, const char *buffers,
                        size_t bytes, const dist_bench_spread *us, double bus_bytes_per_us,
                        const char *status) {
    if (!csv || tn_comm_rank(bench->comm) != 0) return;
    fprintf(csv, "%s,%d,%s,%s,%zu,", what, tn_comm_size(bench->comm),
            tn_comm_engine_name(bench->comm), buffers, bytes);
    if (us)
        fprintf(csv, "%.2f,%.2f,%.2f,%.2f,", us->median, us->least, us->most,
                bus_bytes_per_us / 1e3);
    else
        fprintf(csv, ",,,,");
    fprintf(csv, "%s\n", status);
}

static void print_head(const wire_job *job, wire_kind kind) {
    printf("%s, %d ranks, %s: bus GB/s, median of %ld rounds and half the spread\n",
           kind_names[kind], count_of(job), tn_comm_engine_name(job->bench->comm),
           job->options->rounds);
    printf("%12s", "bytes");
    for (int i = 0; i < job->buffer_count; i++)
        printf(" %17s", job->buffers[i].name);
    printf("\n");
}

static void print_line(const wire_job *job, wire_kind kind, size_t bytes) {
    const size_t moved = unit_bytes(job, bytes);
    const double factor = (double)(count_of(job) - 1) / count_of(job);
    if (rank_of(job) == 0) printf("%12zu", moved);
    for (int i = 0; i < job->buffer_count; i++) {
        const dist_wire_buffer *buffer = &job->buffers[i];
        if (buffer->status != TN_OK) {
            if (rank_of(job) == 0) printf(" %17s", "-");
            dist_wire_csv_line(job->bench, job->options->csv, kind_names[kind], buffer->name, moved,
                               NULL, 0.0, tn_status_name(buffer->status));
            continue;
        }
        const dist_bench_spread us = dist_bench_spread_of(times_of(job, i), job->options->rounds);
        const double bus = (double)moved * factor / us.median;
        if (rank_of(job) == 0)
            printf(" %9.2f +- %3.0f%%", bus / 1e3, 50.0 * (us.most - us.least) / us.median);
        dist_wire_csv_line(job->bench, job->options->csv, kind_names[kind], buffer->name, moved,
                           &us, bus, "TN_OK");
    }
    if (rank_of(job) == 0) printf("\n");
}

/* Of buffers that are not to be had, why; of registered ones, how long that took. */
static void print_buffers(const wire_job *job) {
    for (int i = 0; i < job->buffer_count; i++) {
        const dist_wire_buffer *buffer = &job->buffers[i];
        const double us = (double)buffer->register_us;
        const dist_bench_spread spread = {us, us, us};
        if (buffer->status != TN_OK && rank_of(job) == 0)
            printf("%s: %s: %s\n", buffer->name, tn_status_name(buffer->status), buffer->words);
        if (buffer->status == TN_OK && us > 0.0 && rank_of(job) == 0)
            printf("%s: registering %zu bytes took %.0f us\n", buffer->name, 2 * buffer->half_bytes,
                   us);
        if (buffer->status != TN_OK || us > 0.0)
            dist_wire_csv_line(job->bench, job->options->csv, "register", buffer->name,
                               2 * buffer->half_bytes, buffer->status == TN_OK ? &spread : NULL,
                               0.0, tn_status_name(buffer->status));
    }
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void run_kind(wire_job *job, wire_kind kind) {
    for (int i = 0; i < job->buffer_count; i++)
        if (job->buffers[i].status == TN_OK)
            note(job, &job->buffers[i], write_source(job, kind, &job->buffers[i]));
    if (rank_of(job) == 0) print_head(job, kind);
    for (int i = 0; i < job->size_count; i++) {
        cut_ragged(job, job->sizes[i]);
        measure(job, kind, job->sizes[i]);
        print_line(job, kind, job->sizes[i]);
    }
}

/* 1 MiB to 1 GiB; on a host what its memory has room for. */
static void choose_sizes(wire_job *job, int is_host) {
    const size_t least = job->options->is_small ? 4096 : (size_t)1 << MIB_BITS;
    const size_t most = job->options->is_small ? 65536 : (size_t)(is_host ? 16 : 1024) << MIB_BITS;
    for (size_t bytes = least; bytes <= most; bytes *= SIZE_STEP)
        job->sizes[job->size_count++] = bytes;
}

static void open_buffers(wire_job *job) {
    const size_t half = job->sizes[job->size_count - 1];
    for (int i = 0; i < DIST_WIRE_VARIANTS; i++) {
        if (!dist_wire_is_wanted(job->options->only, dist_wire_buffer_name(i))) continue;
        dist_wire_buffer_open(job->bench, i, half, &job->buffers[job->buffer_count++]);
    }
}

static tn_status run(wire_job *job) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    TRY(tn_device_info_get(job->bench->device, &info));
    TRY(dist_stage_open(&job->stage, job->bench->device, job->bench->stream));
    choose_sizes(job, info.driver == TN_DRIVER_HOST);
    open_buffers(job);
    print_buffers(job);
    for (int kind = 0; kind < WIRE_KINDS; kind++)
        run_kind(job, (wire_kind)kind);
    return TN_OK;
}

tn_status dist_wire_run(dist_bench *bench, const dist_wire_options *options) {
    wire_job job = {.bench = bench, .options = options};
    const size_t times = (size_t)DIST_WIRE_VARIANTS * DIST_BENCH_ROUNDS_MAX;
    job.segments = calloc((size_t)tn_comm_size(bench->comm), sizeof *job.segments);
    job.times = calloc(times, sizeof *job.times);
    tn_status status = job.segments && job.times ? run(&job) : TN_OUT_OF_HOST_MEMORY;
    for (int i = 0; i < job.buffer_count; i++) {
        const tn_status closed = dist_wire_buffer_close(bench, &job.buffers[i]);
        if (status == TN_OK) status = closed;
        /* A kind that is not to be had is a line of the table; wrong contents are a failure. */
        if (job.buffers[i].status == TN_CORRUPT_INPUT) status = TN_CORRUPT_INPUT;
    }
    const tn_status closed = dist_stage_close(&job.stage);
    free(job.segments);
    free(job.times);
    return status == TN_OK ? closed : status;
}
