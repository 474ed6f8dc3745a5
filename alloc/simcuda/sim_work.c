/* Calls that give streams work: copies, fills, host functions, declared kernels; and the control
 * functions that declare a take, tell who wrote last and stall a stream.
 *
 * Whether memory may be touched is decided when the work is submitted, in this order: is it mapped
 * with access (else error 700, after which the context is dead), does it race. Bytes move
 * when the work is performed, in backed mode only. In unbacked mode a copy or fill that
 * involves device memory moves nothing: there is no memory behind the addresses.
 *
 * An address that no region contains is the host's; pinned memory is the host's too, but its uses
 * are watched, and its bytes move in either mode.
 *
 * On a stream that captures none of this happens: the job becomes a node of the graph, and is
 * checked and run at each launch.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "sim_capture.h"
#include "sim_memory.h"

static CUresult illegal_address(int device) {
    tn__sim.devices[device].dead = CUDA_ERROR_ILLEGAL_ADDRESS;
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}

static int is_on_device(CUdeviceptr address) {
    const sim_region *region = tn__sim_region_find(address);
    return region && !region->is_host;
}

/* Memory that the program has from us, and has not freed: on a device, or pinned. */
static int may_touch(CUdeviceptr address, size_t bytes, int device, int is_write) {
    return tn__sim_range_is_accessible(address, bytes, device, is_write) &&
           tn__sim_mempool_lends(tn__sim_region_find(address), address, bytes);
}

/* A side of a transfer: pageable memory of the host can always be touched. */
static int side_is_ok(CUdeviceptr address, size_t bytes, int device, int is_write) {
    return !tn__sim_region_find(address) || may_touch(address, bytes, device, is_write);
}

/* ---- declaring touches ----------------------------------------------------------------------- */

static void touch_range(sim_operation *operation, CUdeviceptr address, size_t bytes,
                        sim_access_kind kind) {
    const sim_region *region = tn__sim_region_containing(address, bytes);
    CUdeviceptr end = address + bytes;
    sim_span span;
    while (region && address < end && tn__sim_span_next(region, &address, end, &span)) {
        tn__sim_touch(operation, span.mapping, span.offset, span.bytes, kind);
    }
}

static int range_is_ok(const tnsim_range *range, int device) {
    CUdeviceptr address = (uintptr_t)range->address;
    if (range->bytes == 0) return 1;
    return may_touch(address, range->bytes, device, range->is_write);
}

static void submit_work(sim_stream *stream, const sim_job *job, sim_ns duration) {
    sim_work work = job->work;
    work.what = job->what;
    work.submitted = tn__sim.now;
    work.duration = tn__sim_stretch(duration);
    tn__sim_stream_submit(stream, &work);
}

static CUresult run_kernel(sim_stream *stream, const sim_job *job, sim_ns cost) {
    sim_operation operation;
    for (size_t i = 0; i < job->range_count; i++) {
        if (!range_is_ok(&job->ranges[i], stream->device)) return illegal_address(stream->device);
    }
    tn__sim_spend(cost);
    tn__sim_stream_begin(stream);
    tn__sim_operation_of_stream(&operation, stream, job->what);
    for (size_t i = 0; i < job->range_count; i++) {
        touch_range(&operation, (uintptr_t)job->ranges[i].address, job->ranges[i].bytes,
                    job->ranges[i].is_write ? SIM_ACCESS_WRITE : SIM_ACCESS_READ);
    }
    submit_work(stream, job, job->work.duration);
    return CUDA_SUCCESS;
}

/* From the first byte of a side to its last: rows that lie apart are watched with what is between
 * them. */
static size_t side_bytes(const sim_work *work, size_t stride) {
    return work->rows ? (work->rows - 1) * stride + work->row_bytes : work->bytes;
}

static CUresult run_transfer(sim_stream *stream, const sim_job *job, sim_ns cost) {
    sim_job checked = *job;
    sim_work *work = &checked.work;
    int has_source = work->kind == SIM_WORK_COPY;
    int to_device = is_on_device(work->dst);
    int from_device = has_source && is_on_device(work->src);
    size_t sides = (size_t)to_device + (size_t)from_device;
    int crosses_link = has_source && to_device != from_device;
    int device = stream->device;
    size_t dst_bytes = side_bytes(work, work->dst_stride);
    size_t src_bytes = side_bytes(work, work->src_stride);
    sim_operation operation;
    if (!side_is_ok(work->dst, dst_bytes, device, 1)) return illegal_address(device);
    if (has_source && !side_is_ok(work->src, src_bytes, device, 0)) {
        return illegal_address(device);
    }
    tn__sim_spend(cost);
    tn__sim_stream_begin(stream);
    tn__sim_operation_of_stream(&operation, stream, job->what);
    if (has_source) touch_range(&operation, work->src, src_bytes, SIM_ACCESS_READ);
    touch_range(&operation, work->dst, dst_bytes, SIM_ACCESS_WRITE);
    work->to_device = to_device;
    work->from_device = from_device;
    submit_work(stream, &checked,
                tn__sim_transfer_time(sides * work->bytes, crosses_link ? work->bytes : 0));
    return CUDA_SUCCESS;
}

static CUresult run_value_wait(sim_stream *stream, const sim_job *job, sim_ns cost) {
    sim_operation operation;
    tn__sim_spend(cost);
    tn__sim_stream_begin(stream);
    tn__sim_operation_of_stream(&operation, stream, job->what);
    touch_range(&operation, job->work.src, sizeof job->work.value, SIM_ACCESS_READ);
    submit_work(stream, job, 0);
    return CUDA_SUCCESS;
}

CUresult tn__sim_job_run(sim_stream *stream, const sim_job *job, sim_ns cost) {
    if (job->work.kind == SIM_WORK_KERNEL) return run_kernel(stream, job, cost);
    if (job->work.kind == SIM_WORK_VALUE) return run_value_wait(stream, job, cost);
    if (job->work.kind != SIM_WORK_HOST_FUNCTION) return run_transfer(stream, job, cost);
    tn__sim_spend(cost);
    tn__sim_stream_begin(stream);
    submit_work(stream, job, 0);
    return CUDA_SUCCESS;
}

/* Runs the job or, on a stream that captures, makes it a node. */
static CUresult put(sim_stream *stream, const sim_job *job) {
    CUresult result = tn__sim_capture_gate(stream);
    if (result != CUDA_SUCCESS) return result;
    if (!stream->capture) return tn__sim_job_run(stream, job, SIM_COST_SUBMIT);
    tn__sim_spend(SIM_COST_SUBMIT);
    tn__sim_graph_record(stream->capture->graph, stream, job);
    return CUDA_SUCCESS;
}

/* ---- the calls ------------------------------------------------------------------------------- */

static CUresult launch(CUstream handle, const char *kernel, const tnsim_range *ranges,
                       size_t range_count, double duration_us) {
    sim_stream *stream = tn__sim_stream_find(handle);
    sim_job job = {.work = {.kind = SIM_WORK_KERNEL},
                   .what = kernel ? kernel : "kernel",
                   .ranges = ranges,
                   .range_count = range_count};
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if ((range_count && !ranges) || !(duration_us >= 0)) return CUDA_ERROR_INVALID_VALUE;
    job.work.duration = (sim_ns)llround(duration_us * 1e3);
    return put(stream, &job);
}

int tnsim_launch(void *stream, const char *kernel, const tnsim_range *ranges, size_t range_count,
                 double duration_us) {
    SIM_ENTER(tnsim_launch);
    return tn__sim_leave(launch(stream, kernel, ranges, range_count, duration_us));
}

static CUresult copy(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream handle) {
    sim_stream *stream = tn__sim_stream_find(handle);
    sim_job job = {.work = {.kind = SIM_WORK_COPY, .dst = dst, .src = src, .bytes = bytes},
                   .what = "cuMemcpyAsync"};
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0) return CUDA_SUCCESS;
    if (!dst || !src) return CUDA_ERROR_INVALID_VALUE;
    return put(stream, &job);
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    SIM_ENTER(cuMemcpyAsync);
    return tn__sim_leave(copy(dst, src, bytes, stream));
}

/* Of plain addresses, as nothing here has arrays or offsets. */
static CUresult copy_rows(const CUDA_MEMCPY2D *copy, CUstream handle) {
    sim_stream *stream = tn__sim_stream_find(handle);
    sim_job job = {.work = {.kind = SIM_WORK_COPY}, .what = "cuMemcpy2DAsync"};
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!copy) return CUDA_ERROR_INVALID_VALUE;
    if (copy->srcMemoryType != CU_MEMORYTYPE_UNIFIED || copy->srcXInBytes || copy->srcY ||
        copy->dstMemoryType != CU_MEMORYTYPE_UNIFIED || copy->dstXInBytes || copy->dstY)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (copy->WidthInBytes == 0 || copy->Height == 0) return CUDA_SUCCESS;
    if (!copy->srcDevice || !copy->dstDevice) return CUDA_ERROR_INVALID_VALUE;
    if (copy->srcPitch < copy->WidthInBytes || copy->dstPitch < copy->WidthInBytes)
        return CUDA_ERROR_INVALID_VALUE;
    job.work.dst = copy->dstDevice, job.work.dst_stride = copy->dstPitch;
    job.work.src = copy->srcDevice, job.work.src_stride = copy->srcPitch;
    job.work.row_bytes = copy->WidthInBytes, job.work.rows = copy->Height;
    job.work.bytes = copy->WidthInBytes * copy->Height;
    return put(stream, &job);
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream) {
    SIM_ENTER(cuMemcpy2DAsync_v2);
    return tn__sim_leave(copy_rows(copy, stream));
}

static CUresult fill(CUdeviceptr dst, unsigned char byte, size_t bytes, CUstream handle) {
    sim_stream *stream = tn__sim_stream_find(handle);
    sim_job job = {.work = {.kind = SIM_WORK_FILL, .dst = dst, .byte = byte, .bytes = bytes},
                   .what = "cuMemsetD8Async"};
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0) return CUDA_SUCCESS;
    if (!tn__sim_region_find(dst)) return CUDA_ERROR_INVALID_VALUE;
    return put(stream, &job);
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char byte, size_t count, CUstream stream) {
    SIM_ENTER(cuMemsetD8Async);
    return tn__sim_leave(fill(dst, byte, count, stream));
}

static CUresult host_function(CUstream handle, CUhostFn function, void *argument) {
    sim_stream *stream = tn__sim_stream_find(handle);
    sim_job job = {.work = {.kind = SIM_WORK_HOST_FUNCTION}, .what = "cuLaunchHostFunc"};
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    job.work.function = function;
    job.work.argument = argument;
    return put(stream, &job);
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    SIM_ENTER(cuLaunchHostFunc);
    return tn__sim_leave(host_function(stream, function, argument));
}

/* ---- moving bytes ---------------------------------------------------------------------------- */

/* 1 if the device's bytes can be touched now. Work that was queued may find its memory unmapped:
 * that race has been reported, and the device meets it as an illegal access. */
static int can_touch(const sim_stream *stream, CUdeviceptr address, size_t bytes, int is_write) {
    if (tn__sim_range_is_accessible(address, bytes, stream->device, is_write)) {
        return tn__sim.config.backed;
    }
    illegal_address(stream->device);
    return 0;
}

void tn__sim_work_move(const sim_stream *stream, const sim_work *work) {
    void *dst = (void *)(uintptr_t)work->dst;
    const void *src = (const void *)(uintptr_t)work->src;
    size_t dst_bytes = side_bytes(work, work->dst_stride);
    size_t src_bytes = side_bytes(work, work->src_stride);
    if (work->to_device && !can_touch(stream, work->dst, dst_bytes, 1)) return;
    if (work->from_device && !can_touch(stream, work->src, src_bytes, 0)) return;
    if (work->kind == SIM_WORK_FILL)
        memset(dst, work->byte, work->bytes);
    else if (work->rows == 0)
        memmove(dst, src, work->bytes);
    for (size_t i = 0; i < work->rows; i++) {
        memmove((char *)dst + i * work->dst_stride, (const char *)src + i * work->src_stride,
                work->row_bytes);
    }
}

/* ---- control: take, stamp, stall ------------------------------------------------------------ */

/* As tn__sim_enter for a control function that is about a stream: not counted, no faults. */
static CUresult enter_control(void) {
    if (!tn__sim_lock()) return CUDA_ERROR_NOT_INITIALIZED;
    if (tn__sim_thread()->depth > 0) return CUDA_SUCCESS;
    tn__sim_unlock();
    return CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult take(CUstream handle, CUdeviceptr address, size_t bytes) {
    sim_stream *stream = tn__sim_stream_find(handle);
    sim_operation operation;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0) return CUDA_SUCCESS;
    if (!may_touch(address, bytes, stream->device, 1)) return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) return CUDA_SUCCESS; /* seen at each launch, if at all */
    tn__sim_operation_of_take(&operation, stream);
    touch_range(&operation, address, bytes, SIM_ACCESS_TAKE);
    return CUDA_SUCCESS;
}

int tnsim_take(void *stream, const void *address, size_t bytes) {
    CUresult result = enter_control();
    if (result != CUDA_SUCCESS) return result;
    return tn__sim_leave(take(stream, (uintptr_t)address, bytes));
}

static CUresult stamp_of(CUdeviceptr address, size_t bytes, uint64_t *out) {
    const sim_region *region = tn__sim_region_containing(address, bytes);
    CUdeviceptr end = address + bytes;
    sim_stamp stamp = {0};
    sim_span span;
    while (region && address < end && tn__sim_span_next(region, &address, end, &span)) {
        tn__sim_stamp_add(&stamp, span.mapping, span.offset, span.bytes);
    }
    if (stamp.position != bytes) return CUDA_ERROR_INVALID_VALUE; /* not all of it is mapped */
    *out = stamp.hash;
    return CUDA_SUCCESS;
}

int tnsim_write_stamp(const void *address, size_t bytes, uint64_t *out) {
    CUresult result = enter_control();
    if (result != CUDA_SUCCESS) return result;
    return tn__sim_leave(stamp_of((uintptr_t)address, bytes, out));
}

static CUresult stall(CUstream handle, int is_stalled) {
    sim_stream *stream = tn__sim_stream_find(handle);
    sim_work work = {.kind = SIM_WORK_STALL, .submitted = tn__sim.now};
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->is_stalled == !!is_stalled) return CUDA_SUCCESS;
    if (!is_stalled) {
        tn__sim_stream_release(stream);
        return CUDA_SUCCESS;
    }
    stream->is_stalled = 1;
    tn__sim_stream_submit(stream, &work);
    return CUDA_SUCCESS;
}

int tnsim_stall(void *stream, int stalled) {
    CUresult result = enter_control();
    if (result != CUDA_SUCCESS) return result;
    return tn__sim_leave(stall(stream, stalled));
}
