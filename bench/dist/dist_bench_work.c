/* Sharded stacks of weights: see dist_bench.h. Contents are zeros: no time depends on them. */
#include "dist_bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call)                                                                                  \
    do {                                                                                           \
        tn_status try_status = (call);                                                             \
        if (try_status != TN_OK) return try_status;                                                \
    } while (0)

static const size_t gather_bytes = (size_t)4096 * 8 * 8 * 8 * 8; /* of a rank: 16 MiB */
static const size_t small_gather_bytes = (size_t)4096 * 8;

static tn_status make(const dist_bench *bench, tn_format format, tn_dtype dtype, int64_t rows,
                      int64_t cols, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = format;
    config.dtype = dtype;
    config.rank = 2;
    config.shape[0] = rows;
    config.shape[1] = cols;
    return tn_tensor_create(bench->scope, &config, out);
}

/* ---- opening --------------------------------------------------------------------------------- */

/* NCCL takes no two ranks of one machine on a GPU: each is on a machine of its own, it is told. */
static void share_gpu(const dist_bench *bench) {
    char host[32];
    snprintf(host, sizeof host, "tenure-rank-%d", tn_rendezvous_rank(bench->ranks));
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1); /* else the rendezvous refuses it */
}

/* With NCCL each rank has a GPU of its own; with MPI they share the first, as it stages through the
 * host. */
static tn_status open_device(dist_bench *bench, const dist_bench_config *config) {
    tn_device_config device = TN_DEVICE_CONFIG_INIT;
    const int local = bench->ranks ? tn_rendezvous_local_rank(bench->ranks) : 0;
    device.driver = config->driver;
    if (config->engine == TN_COMM_NCCL && config->shares_gpu)
        share_gpu(bench);
    else if (config->engine == TN_COMM_NCCL && config->driver != TN_DRIVER_HOST)
        device.ordinal = local >= 0 ? local : tn_rendezvous_rank(bench->ranks);
    TRY(tn_device_create(&device, &bench->device));
    TRY(tn_stream_create(bench->device, &bench->stream));
    return tn_stream_create(bench->device, &bench->side);
}

static tn_status open_comm(dist_bench *bench, const dist_bench_config *config) {
    tn_pool_config pool = TN_POOL_CONFIG_INIT;
    tn_comm_config comm = TN_COMM_CONFIG_INIT;
    tn_scope_config scope = TN_SCOPE_CONFIG_INIT;
    comm.device = bench->device;
    comm.engine = config->engine;
    comm.rendezvous = bench->ranks;
    comm.timeout_us = DIST_BENCH_TIMEOUT_US;
    TRY(tn_pool_create(bench->device, &pool, &bench->pool));
    TRY(tn_comm_create(&comm, &bench->comm));
    scope.pool = bench->pool;
    return tn_scope_create(&scope, &bench->scope);
}

static tn_status make_layer(dist_bench *bench, dist_bench_stack *stack, int layer) {
    tn_ring_unit_config unit = TN_RING_UNIT_CONFIG_INIT;
    size_t bytes;
    TRY(make(bench, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, bench->width, bench->width,
             &stack->weights[layer]));
    TRY(tn_shard_bytes(bench->plan, tn_comm_rank(bench->comm), &bytes));
    if (bytes) {
        TRY(make(bench, TN_FORMAT_PLAIN, TN_BYTE, 1, (int64_t)bytes, &stack->shards[layer]));
        TRY(tn_plane_fill(stack->shards[layer], TN_PLANE_DATA, 0, bench->stream));
    }
    unit.plan = bench->plan;
    unit.shard = stack->shards[layer];
    unit.tensors = &stack->weights[layer];
    unit.tensor_count = 1;
    return tn_ring_unit_add(stack->ring, &unit, &stack->units[layer]);
}

static tn_status make_stack(dist_bench *bench, tn_ring_register registration) {
    dist_bench_stack *stack = &bench->stacks[bench->stack_count++];
    tn_ring_config ring = TN_RING_CONFIG_INIT;
    ring.scope = bench->scope;
    ring.comm = bench->comm;
    ring.stream = bench->side;
    ring.registration = registration;
    TRY(tn_ring_create(&ring, &stack->ring));
    for (int i = 0; i < DIST_BENCH_LAYERS; i++)
        TRY(make_layer(bench, stack, i));
    return tn_ring_seal(stack->ring);
}

tn_status dist_bench_make_stacks(dist_bench *bench) {
    const int registers = strcmp(tn_comm_engine_name(bench->comm), "NCCL") == 0;
    tn_shard_plan_config plan = TN_SHARD_PLAN_CONFIG_INIT;
    const tn_shard_tensor weight = {.format = TN_FORMAT_FP8_BLOCK_2D,
                                    .dtype = TN_E4M3,
                                    .rows = bench->width,
                                    .cols = bench->width};
    plan.tensors = &weight;
    plan.tensor_count = 1;
    plan.rank_count = tn_comm_size(bench->comm);
    TRY(tn_shard_plan_create(&plan, &bench->plan));
    TRY(make_stack(bench, TN_RING_REGISTER_NONE));
    bench->stack = &bench->stacks[0];
    if (!registers) return TN_OK;
    TRY(make_stack(bench, TN_RING_REGISTER_BUFFER));
    return make_stack(bench, TN_RING_REGISTER_AUTO);
}

const char *dist_bench_registered(const dist_bench_stack *stack) {
    static const char *const names[] = {"no", "buffer", "window"};
    tn_ring_stats stats = TN_RING_STATS_INIT;
    if (tn_ring_stats_get(stack->ring, &stats) != TN_OK) return "unknown";
    if (stats.register_status != TN_OK)
        fprintf(stderr, "tenure-bench-dist: a ring's buffer: %s\n", stats.register_text);
    return names[stats.registered];
}

static tn_status make_operands(dist_bench *bench) {
    const int64_t ranks = tn_comm_size(bench->comm);
    TRY(make(bench, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, bench->tokens, bench->width, &bench->x));
    TRY(tn_plane_fill(bench->x, TN_PLANE_ROW, 0, bench->stream));
    TRY(make(bench, TN_FORMAT_PLAIN, TN_BF16, bench->tokens, bench->width, &bench->y));
    TRY(make(bench, TN_FORMAT_PLAIN, TN_BYTE, ranks, (int64_t)dist_bench_gather_bytes(bench),
             &bench->whole));
    return tn_plane_fill(bench->whole, TN_PLANE_DATA, 0, bench->stream);
}

tn_status dist_bench_open(dist_bench *bench, const dist_bench_config *config) {
    const int is_host = config->driver == TN_DRIVER_HOST, is_small = config->is_small;
    bench->width = is_small ? 128 : is_host ? 512 : 8192;
    bench->tokens = is_small ? 64 : is_host ? 256 : 4096;
    TRY(dist_bench_meet(bench, config));
    TRY(open_device(bench, config));
    TRY(open_comm(bench, config));
    return make_operands(bench);
}

/* What comes first in failing is returned; all is tried. */
static void note(tn_status *status, tn_status of_call) {
    if (*status == TN_OK) *status = of_call;
}

tn_status dist_bench_close(dist_bench *bench) {
    tn_status status = TN_OK;
    for (int i = 0; i < bench->stack_count; i++)
        note(&status, tn_ring_destroy(bench->stacks[i].ring));
    note(&status, tn_scope_close(bench->scope));
    tn_shard_plan_destroy(bench->plan);
    note(&status, tn_comm_destroy(bench->comm));
    tn_rendezvous_destroy(bench->ranks);
    if (bench->side) note(&status, tn_stream_destroy(bench->device, bench->side));
    if (bench->stream) note(&status, tn_stream_destroy(bench->device, bench->stream));
    note(&status, tn_pool_destroy(bench->pool));
    if (bench->device) note(&status, tn_device_destroy(bench->device));
    return status;
}

/* ---- what is timed --------------------------------------------------------------------------- */

static tn_status multiply(dist_bench *bench, int layer) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = TN_GEMM_FPROP;
    args.a = bench->x;
    args.b = bench->stack->weights[layer];
    args.d = bench->y;
    args.scope = bench->scope;
    return tn_gemm(&args, bench->stream);
}

tn_status dist_bench_step(dist_bench *bench, size_t has_prefetch) {
    const tn_scope none = {0};
    for (int i = 0; i < DIST_BENCH_LAYERS; i++) {
        TRY(tn_ring_acquire(bench->stack->ring, bench->stack->units[i], none, bench->stream));
        if (has_prefetch && i + 1 < DIST_BENCH_LAYERS)
            TRY(tn_ring_prefetch(bench->stack->ring, bench->stack->units[i + 1]));
        TRY(multiply(bench, i));
        TRY(tn_ring_release(bench->stack->ring, bench->stack->units[i]));
    }
    return TN_OK;
}

tn_status dist_bench_products(dist_bench *bench, size_t ignored) {
    const tn_scope none = {0};
    (void)ignored;
    TRY(tn_ring_acquire(bench->stack->ring, bench->stack->units[0], none, bench->stream));
    for (int i = 0; i < DIST_BENCH_LAYERS; i++)
        TRY(multiply(bench, 0));
    return tn_ring_release(bench->stack->ring, bench->stack->units[0]);
}

size_t dist_bench_gather_bytes(const dist_bench *bench) {
    return bench->width > 128 ? gather_bytes : small_gather_bytes;
}

tn_status dist_bench_gather(dist_bench *bench, size_t bytes) {
    tn_lease lease;
    tn_plane_view view;
    TRY(tn_lease_begin(bench->whole, TN_PLANE_DATA, TN_UPDATE, bench->stream, &lease, &view));
    char *own = (char *)view.data + bytes * (size_t)tn_comm_rank(bench->comm);
    TRY(tn_all_gather(bench->comm, own, view.data, bytes, bench->stream));
    return tn_lease_end(lease);
}
