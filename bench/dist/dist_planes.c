/* What it costs to gather columnwise copies of FP8 weights, too.
 *
 * A layer's weights (those of Llama-3-8B: hidden 4096) are gathered as this library does, each
 * one's ROW plane with its scales, and as it would be done where no rank derives columns: with the
 * COL planes beside them. The COL plane of an FP8_BLOCK_2D tensor has the layout of the ROW plane
 * of its transpose, and so the second unit has each weight's transpose as a tensor of its own. The
 * bytes are the communicator's count; the rows alone are exactly half of them, unless the ranks are
 * so many that the parts are padded.
 */
#include <stdlib.h>

#include "dist_wire.h"

#define TRY(call)                                                                                  \
    do {                                                                                           \
        tn_status try_status = (call);                                                             \
        if (try_status != TN_OK) return try_status;                                                \
    } while (0)

enum { WEIGHTS = 4, SMALL_DIVISOR = 16, CALLS = 4 };

/* Output x input features: query, key and value; output; gate and up; down. */
static const int64_t shapes[WEIGHTS][2] = {
    {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};

/* One way to gather: its plan, this rank's shard and where the planes come to lie. */
typedef struct planes_way {
    const char *name;
    tn_shard_plan *plan;
    uint64_t padding_ppm; /* of its parts */
    char *shard, *gathered;
    size_t shard_bytes, gathered_bytes;
    uint64_t wire_bytes; /* of this rank, of one gather */
    double times[DIST_BENCH_ROUNDS_MAX];
} planes_way;

/* ---- making ---------------------------------------------------------------------------------- */

static tn_shard_tensor tensor_of(int64_t rows, int64_t cols) {
    return (tn_shard_tensor){
        .format = TN_FORMAT_FP8_BLOCK_2D, .dtype = TN_E4M3, .rows = rows, .cols = cols};
}

static tn_status make_plan(dist_bench *bench, const dist_wire_options *options, int has_columns,
                           tn_shard_plan **out) {
    const int64_t divisor = options->is_small ? SMALL_DIVISOR : 1;
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    tn_shard_tensor *tensors = calloc((size_t)2 * WEIGHTS, sizeof *tensors);
    if (!tensors) return TN_OUT_OF_HOST_MEMORY;
    for (int i = 0; i < WEIGHTS; i++) {
        const int64_t rows = shapes[i][0] / divisor, cols = shapes[i][1] / divisor;
        tensors[config.tensor_count++] = tensor_of(rows, cols);
        if (has_columns) tensors[config.tensor_count++] = tensor_of(cols, rows);
    }
    config.tensors = tensors;
    config.rank_count = tn_comm_size(bench->comm);
    const tn_status status = tn_shard_plan_create(&config, out);
    free(tensors);
    return status;
}

static tn_status make_way(dist_bench *bench, const dist_wire_options *options, int has_columns,
                          planes_way *way) {
    tn_shard_plan_info info = TN_SHARD_PLAN_INFO_INIT;
    tn_shard_cost cost = TN_SHARD_COST_INIT;
    void *shard = NULL, *gathered = NULL;
    way->name = has_columns ? "rows_and_columns" : "rows";
    TRY(make_plan(bench, options, has_columns, &way->plan));
    TRY(tn_shard_plan_info_get(way->plan, &info));
    TRY(tn_shard_cost_get(way->plan, info.layout, &cost));
    way->padding_ppm = cost.padding_ppm;
    TRY(tn_shard_bytes(way->plan, tn_comm_rank(bench->comm), &way->shard_bytes));
    way->gathered_bytes = info.gathered_bytes[TN_SHARD_FORWARD];
    TRY(tn_alloc(bench->pool, way->shard_bytes, bench->stream, NULL, &shard));
    way->shard = shard;
    TRY(tn_alloc(bench->pool, way->gathered_bytes, bench->stream, NULL, &gathered));
    way->gathered = gathered;
    return TN_OK;
}

static tn_status drop_way(dist_bench *bench, planes_way *way) {
    tn_shard_plan_destroy(way->plan);
    const tn_status first = tn_free(way->shard, bench->stream);
    const tn_status second = tn_free(way->gathered, bench->stream);
    return first == TN_OK ? second : first;
}

/* ---- gathering ------------------------------------------------------------------------------- */

static uint64_t sent_so_far(dist_bench *bench) {
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    if (tn_comm_stats_get(bench->comm, &stats) != TN_OK) return 0;
    return stats.wire_bytes[TN_ALL_GATHER] + stats.wire_bytes[TN_ALL_GATHER_UNEVEN];
}

static tn_status gather(dist_bench *bench, const planes_way *way) {
    return tn_shard_gather(way->plan, TN_SHARD_FORWARD, bench->comm, way->shard, way->gathered,
                           bench->stream);
}

static tn_status time_batch(dist_bench *bench, planes_way *way, double *us) {
    TRY(dist_bench_line_up(bench));
    const uint64_t sent = sent_so_far(bench);
    const double start_us = dist_bench_now_us();
    for (int i = 0; i < CALLS; i++)
        TRY(gather(bench, way));
    TRY(tn_stream_synchronize(bench->device, bench->stream));
    *us = (dist_bench_now_us() - start_us) / CALLS;
    way->wire_bytes = (sent_so_far(bench) - sent) / CALLS;
    return tn_comm_wait(bench->comm);
}

/* Both ways in turn in every round. */
static tn_status measure(dist_bench *bench, long rounds, planes_way ways[2]) {
    double warm_us = 0.0;
    for (long round = -1; round < rounds; round++)
        for (int i = 0; i < 2; i++)
            TRY(time_batch(bench, &ways[i], round < 0 ? &warm_us : &ways[i].times[round]));
    return TN_OK;
}

/* ---- contents -------------------------------------------------------------------------------- */

/* Each rank's shard is its words, and of what it sends the first byte is where the shard says. */
static tn_status check_way(dist_bench *bench, const dist_stage *stage, const planes_way *way) {
    const int ranks = tn_comm_size(bench->comm);
    const tn_segment *segments = NULL;
    size_t count = 0, *next = calloc((size_t)ranks, sizeof *next), sent = 0;
    tn_status status = next ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    for (int rank = 0; status == TN_OK && rank < ranks; rank++)
        status = tn_shard_sent_bytes(way->plan, TN_SHARD_FORWARD, rank, &next[rank], &sent);
    if (status == TN_OK) status = tn_shard_segments(way->plan, TN_SHARD_FORWARD, &segments, &count);
    for (size_t i = 0; status == TN_OK && i < count; i++) {
        const dist_pattern pattern = {DIST_WORDS, segments[i].rank, 0, next[segments[i].rank]};
        status = dist_pattern_check(stage, &pattern, way->gathered + segments[i].offset,
                                    segments[i].count);
        next[segments[i].rank] += segments[i].count;
    }
    free(next);
    return status;
}

static tn_status fill_way(dist_bench *bench, const dist_stage *stage, const planes_way *way) {
    const dist_pattern pattern = {DIST_WORDS, tn_comm_rank(bench->comm), 0, 0};
    TRY(tn_fill(bench->device, way->gathered, 0xFF, way->gathered_bytes, bench->stream));
    return dist_pattern_write(stage, &pattern, way->shard, way->shard_bytes);
}

/* ---- the table ------------------------------------------------------------------------------- */

static tn_status tell(dist_bench *bench, const dist_wire_options *options, planes_way ways[2]) {
    const int ranks = tn_comm_size(bench->comm), is_first = tn_comm_rank(bench->comm) == 0;
    if (is_first)
        printf("gather of a layer's FP8 weights, %d ranks, %s\n%18s %14s %12s %12s %12s\n", ranks,
               tn_comm_engine_name(bench->comm), "planes", "bytes sent", "us", "least", "most");
    for (int i = 0; i < 2; i++) {
        const dist_bench_spread us = dist_bench_spread_of(ways[i].times, options->rounds);
        if (is_first)
            printf("%18s %14llu %12.1f %12.1f %12.1f\n", ways[i].name,
                   (unsigned long long)ways[i].wire_bytes, us.median, us.least, us.most);
        dist_wire_csv_line(bench, options->csv, ways[i].name, "pool", ways[i].wire_bytes, &us,
                           (double)ways[i].wire_bytes / us.median, "TN_OK");
    }
    if (ways[0].padding_ppm || ways[1].padding_ppm) return TN_OK;
    if (ways[1].wire_bytes == 2 * ways[0].wire_bytes) return TN_OK;
    fprintf(stderr, "tenure-bench-dist: rank %d: the rows alone are not half of both: %llu, %llu\n",
            tn_comm_rank(bench->comm), (unsigned long long)ways[0].wire_bytes,
            (unsigned long long)ways[1].wire_bytes);
    return TN_CORRUPT_INPUT;
}

static tn_status run(dist_bench *bench, const dist_wire_options *options, dist_stage *stage,
                     planes_way ways[2]) {
    TRY(dist_stage_open(stage, bench->device, bench->stream));
    for (int i = 0; i < 2; i++) {
        TRY(make_way(bench, options, i, &ways[i]));
        TRY(fill_way(bench, stage, &ways[i]));
    }
    TRY(measure(bench, options->rounds, ways));
    for (int i = 0; i < 2; i++)
        TRY(check_way(bench, stage, &ways[i]));
    return tell(bench, options, ways);
}

tn_status dist_planes_run(dist_bench *bench, const dist_wire_options *options) {
    planes_way *ways = calloc(2, sizeof *ways);
    dist_stage stage = {.device = NULL};
    if (!ways) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = run(bench, options, &stage, ways), ended;
    for (int i = 0; i < 2; i++) {
        ended = drop_way(bench, &ways[i]);
        if (status == TN_OK) status = ended;
    }
    ended = dist_stage_close(&stage);
    free(ways);
    return status == TN_OK ? ended : status;
}
