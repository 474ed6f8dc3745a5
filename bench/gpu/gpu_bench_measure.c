/* The GPU of the benchmarks, tensors of random data, and the gate behind which work is timed. */
#include "gpu_bench.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NOISE_ROWS = 1024, NOISE_COLS = 4096, WARM_TURNS = 5, LEAST_TURNS = 12, HOST_TURNS = 200 };

/* A batch lasts about this long, so that opening the gate and the last wait are 1 % of it. */
static const double batch_seconds = 0.004;

void gpu_bench_require(tn_status status, const char *call) {
    if (status == TN_OK) return;
    fprintf(stderr, "tenure-bench: %s: %s: %s\n", call, tn_status_name(status), tn_error_last());
    exit(EXIT_FAILURE);
}

void gpu_bench_out_of_memory(void) {
    fprintf(stderr, "tenure-bench: out of host memory\n");
    exit(EXIT_FAILURE);
}

/* ---- the GPU ------------------------------------------------------------------------------- */

static float normal(uint64_t *state) {
    double sum = 0.0;
    for (int i = 0; i < 12; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        sum += (double)(*state >> 40) * 0x1p-24;
    }
    return (float)(sum - 6.0);
}

static void make_noise(gpu_bench *bench) {
    const size_t count = (size_t)NOISE_ROWS * NOISE_COLS;
    uint16_t *values = malloc(count * sizeof *values);
    uint64_t state = 1;
    if (!values) gpu_bench_out_of_memory();
    for (size_t i = 0; i < count; i++) {
        float value = normal(&state);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        values[i] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    }
    bench->noise = gpu_bench_zeros(bench, TN_BF16, NOISE_ROWS, NOISE_COLS);
    GPU_BENCH_TRY(tn_plane_write(bench->noise, TN_PLANE_DATA, values, count * sizeof *values, NULL,
                                 0, bench->stream));
    GPU_BENCH_TRY(tn_stream_synchronize(bench->device, bench->stream));
    free(values);
}

static int open_device(gpu_bench *bench, int ordinal) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = bench->is_rehearsal ? TN_DRIVER_HOST : TN_DRIVER_CUDA;
    config.ordinal = ordinal;
    if (tn_device_create(&config, &bench->device) != TN_OK) {
        fprintf(stderr, "tenure-bench: no GPU: %s\n", tn_error_last());
        return 0;
    }
    GPU_BENCH_TRY(tn_device_info_get(bench->device, &bench->info));
    if (!bench->info.simulated) return 1;
    fprintf(stderr, "tenure-bench: no GPU: the CUDA driver is the simulated one\n");
    GPU_BENCH_TRY(tn_device_destroy(bench->device));
    return 0;
}

int gpu_bench_open(gpu_bench *bench, int ordinal, int is_rehearsal) {
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    memset(bench, 0, sizeof *bench);
    bench->info = (tn_device_info)TN_DEVICE_INFO_INIT;
    bench->is_rehearsal = is_rehearsal;
    if (!open_device(bench, ordinal)) return 0;
    GPU_BENCH_TRY(tn_pool_create(bench->device, &pool_config, &bench->pool));
    GPU_BENCH_TRY(tn_stream_create(bench->device, &bench->stream));
    scope_config.pool = bench->pool;
    scope_config.name = "benchmark";
    GPU_BENCH_TRY(tn_scope_create(&scope_config, &bench->scope));
    make_noise(bench);
    return 1;
}

void gpu_bench_close(gpu_bench *bench) {
    GPU_BENCH_TRY(tn_scope_close(bench->scope));
    GPU_BENCH_TRY(tn_stream_destroy(bench->device, bench->stream));
    GPU_BENCH_TRY(tn_pool_destroy(bench->pool));
    GPU_BENCH_TRY(tn_device_destroy(bench->device));
}

/* ---- tensors ------------------------------------------------------------------------------- */

static tn_tensor make(gpu_bench *bench, tn_tensor_config *config, int64_t rows, int64_t cols) {
    tn_tensor tensor;
    config->rank = 2;
    config->shape[0] = rows;
    config->shape[1] = cols;
    GPU_BENCH_TRY(tn_tensor_create(bench->scope, config, &tensor));
    return tensor;
}

tn_tensor gpu_bench_zeros(gpu_bench *bench, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_plane_view view;
    tn_lease lease;
    config.dtype = dtype;
    tn_tensor tensor = make(bench, &config, rows, cols);
    GPU_BENCH_TRY(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, bench->stream, &lease, &view));
    GPU_BENCH_TRY(tn_fill(bench->device, view.data, 0, view.layout.data_bytes, bench->stream));
    GPU_BENCH_TRY(tn_lease_end(lease));
    return tensor;
}

/* The noise again and again: to a kernel or a GEMM it is as random as more of it would be. */
static tn_tensor random_bf16(gpu_bench *bench, int64_t rows, int64_t cols) {
    tn_tensor tensor = gpu_bench_zeros(bench, TN_BF16, rows, cols);
    tn_plane_view from, to;
    tn_lease leases[2];
    GPU_BENCH_TRY(
        tn_lease_begin(bench->noise, TN_PLANE_DATA, TN_READ, bench->stream, &leases[0], &from));
    GPU_BENCH_TRY(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, bench->stream, &leases[1], &to));
    for (size_t at = 0; at < to.layout.data_bytes; at += from.layout.data_bytes) {
        size_t rest = to.layout.data_bytes - at;
        size_t bytes = rest < from.layout.data_bytes ? rest : from.layout.data_bytes;
        GPU_BENCH_TRY(
            tn_copy(bench->device, (char *)to.data + at, from.data, bytes, bench->stream));
    }
    GPU_BENCH_TRY(tn_lease_end(leases[1]));
    GPU_BENCH_TRY(tn_lease_end(leases[0]));
    return tensor;
}

tn_tensor gpu_bench_random(gpu_bench *bench, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    args.x = random_bf16(bench, rows, cols);
    if (dtype == TN_BF16) return args.x;
    args.y = gpu_bench_zeros(bench, dtype, rows, cols);
    GPU_BENCH_TRY(tn_convert(&args, bench->stream));
    gpu_bench_destroy(bench, args.x);
    return args.y;
}

tn_tensor gpu_bench_upload(gpu_bench *bench, tn_dtype dtype, int64_t rows, int64_t cols,
                           const void *content) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    tn_tensor tensor = make(bench, &config, rows, cols);
    size_t bytes = (size_t)rows * (size_t)cols * tn_dtype_bytes(dtype);
    GPU_BENCH_TRY(tn_plane_write(tensor, TN_PLANE_DATA, content, bytes, NULL, 0, bench->stream));
    GPU_BENCH_TRY(tn_stream_synchronize(bench->device, bench->stream));
    return tensor;
}

tn_tensor gpu_bench_quantized(gpu_bench *bench, tn_format format, tn_scale_mode scale_mode,
                              int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = format;
    config.dtype = format == TN_FORMAT_NVFP4 ? TN_E2M1 : TN_E4M3;
    config.scale_mode = scale_mode;
    return make(bench, &config, rows, cols);
}

tn_tensor gpu_bench_random_quantized(gpu_bench *bench, tn_format format, unsigned planes,
                                     int64_t rows, int64_t cols) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = random_bf16(bench, rows, cols);
    args.dst = gpu_bench_quantized(bench, format, TN_SCALE_POW2, rows, cols);
    args.planes = planes;
    GPU_BENCH_TRY(tn_quantize(&args, bench->stream));
    gpu_bench_destroy(bench, args.src);
    return args.dst;
}

void gpu_bench_destroy(gpu_bench *bench, tn_tensor tensor) {
    GPU_BENCH_TRY(tn_tensor_destroy(tensor, bench->stream));
}

double gpu_bench_plane_bytes(tn_tensor tensor, tn_plane plane) {
    tn_plane_layout layout;
    GPU_BENCH_TRY(tn_plane_layout_get(tensor, plane, &layout));
    return (double)layout.data_bytes + (double)layout.scale_bytes;
}

/* ---- times --------------------------------------------------------------------------------- */

double gpu_bench_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int compare_doubles(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

double gpu_bench_median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return values[count / 2];
}

/* Locked while the work behind it must wait; the host task passes it on the driver's thread. */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

static void pass_gate(void *argument) {
    (void)argument;
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
}

double gpu_bench_gated_seconds(gpu_bench *bench, gpu_bench_work work, void *argument, int turns) {
    const tn__driver *driver = tn__device_driver(bench->device);
    GPU_BENCH_TRY(tn_stream_synchronize(bench->device, bench->stream));
    pthread_mutex_lock(&gate);
    GPU_BENCH_TRY(
        driver->host_task(tn__device_state(bench->device), pass_gate, NULL, bench->stream));
    for (int turn = 0; turn < turns; turn++)
        work(bench, argument, turn);
    double start = gpu_bench_now();
    pthread_mutex_unlock(&gate);
    GPU_BENCH_TRY(tn_stream_synchronize(bench->device, bench->stream));
    return (gpu_bench_now() - start) / turns;
}

static uint64_t launches_so_far(const gpu_bench *bench) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    GPU_BENCH_TRY(tn_device_driver_stats(bench->device, &stats));
    return stats.calls[TN_CALL_LAUNCH] + stats.calls[TN_CALL_STREAM_WAIT] +
           stats.calls[TN_CALL_EVENT_RECORD];
}

/* As many turns as may wait behind the gate, given what each puts on the stream. */
static int turns_max(const gpu_bench *bench, uint64_t launches_before, int turns) {
    uint64_t launches = (launches_so_far(bench) - launches_before) / (uint64_t)turns;
    return GPU_BENCH_GATED_MAX / (int)(launches > 1 ? launches : 1);
}

double gpu_bench_device_seconds(gpu_bench *bench, gpu_bench_work work, void *argument) {
    double seconds[GPU_BENCH_BATCHES];
    const uint64_t before = launches_so_far(bench);
    if (bench->is_rehearsal) return gpu_bench_gated_seconds(bench, work, argument, 2);
    for (int turn = 0; turn < WARM_TURNS; turn++)
        work(bench, argument, turn);
    const int most = turns_max(bench, before, WARM_TURNS);
    double turns = batch_seconds / gpu_bench_gated_seconds(bench, work, argument, 2 * WARM_TURNS);
    int count = turns < LEAST_TURNS ? LEAST_TURNS : turns > most ? most : (int)turns;
    for (int i = 0; i < GPU_BENCH_BATCHES; i++)
        seconds[i] = gpu_bench_gated_seconds(bench, work, argument, count);
    return gpu_bench_median(seconds, GPU_BENCH_BATCHES);
}

/* The queue is empty at the start of each batch and never full, so that the host is not held. */
double gpu_bench_host_seconds(gpu_bench *bench, gpu_bench_work work, void *argument) {
    double seconds[GPU_BENCH_BATCHES];
    for (int batch = -1; batch < GPU_BENCH_BATCHES; batch++) {
        double start = gpu_bench_now();
        for (int turn = 0; turn < HOST_TURNS; turn++)
            work(bench, argument, turn);
        if (batch >= 0) seconds[batch] = (gpu_bench_now() - start) / HOST_TURNS;
        GPU_BENCH_TRY(tn_stream_synchronize(bench->device, bench->stream));
    }
    return gpu_bench_median(seconds, GPU_BENCH_BATCHES);
}
