/* Gradients that cross the wire in FP8 and are summed in fp32.
 *
 *     quantize     each segment of the bucket, 1D along rows of 128 elements (a segment that is not
 *                  made of such rows is one row), into the part of `sent` that is its rank's
 *     exchange     all to all
 *     sum          what has come from rank 0, 1, ... is dequantized and added in fp32
 *
 * A segment is a rank's part of one tensor, so a scale never covers two tensors or two ranks. In
 * `sent` and `come` lie, for each segment, its data and then its scales, each from a multiple of
 * 256 bytes on. The rank's own part takes the same way as the others', so that the sum is the same
 * however many ranks there are.
 */
#include "sharded.h"

#include "error.h"
#include "host_alloc.h"
#include "tenure_ops.h"

enum { PART_ALIGNMENT = 256 };

/* ---- segments ------------------------------------------------------------------------------- */

static size_t up(size_t bytes) {
    return (bytes + PART_ALIGNMENT - 1) / PART_ALIGNMENT * PART_ALIGNMENT;
}

typedef struct piece {
    int64_t rows, cols;
    size_t data_bytes, scale_bytes;
    size_t bytes; /* of both, each rounded up */
} piece;

/* Scales of a 1D ROW plane are [ceil(cols/128), up4(rows)]. */
static piece piece_of(const tn_segment *segment) {
    const int64_t count = (int64_t)segment->count, width = TN__SHARDED_WIDTH;
    piece p = {.rows = 1, .cols = count, .data_bytes = segment->count};
    if (count % width == 0) p.rows = count / width, p.cols = width;
    const size_t tiles = (size_t)((p.cols + width - 1) / width);
    p.scale_bytes = tiles * (((size_t)p.rows + 3) / 4 * 4) * sizeof(float);
    p.bytes = up(p.data_bytes) + up(p.scale_bytes);
    return p;
}

size_t tn__sharded_fp8_bytes(const tn__sharded_unit *unit, int rank) {
    const tn_segment *segments;
    size_t count, bytes = 0;
    if (tn_shard_bucket_segments(unit->plan, &segments, &count) != TN_OK) return 0;
    for (size_t i = 0; i < count; i++)
        if (segments[i].rank == rank && segments[i].count > 0)
            bytes += piece_of(&segments[i]).bytes;
    return bytes;
}

/* ---- buffers -------------------------------------------------------------------------------- */

typedef struct sizes {
    size_t sent, come, decoded;
} sizes;

/* Of the largest unit, each by itself. */
static sizes sizes_of(const tn_sharded_model *model) {
    sizes most = {0, 0, 0};
    if (model->config.gradient_wire != TN_GRADIENT_WIRE_FP8) return most;
    for (int i = 0; i < model->unit_count; i++) {
        const tn__sharded_unit *unit = model->units[i];
        const size_t decoded = unit->held_elements * sizeof(float);
        const size_t come = tn__sharded_fp8_bytes(unit, model->rank) * (size_t)model->rank_count;
        size_t sent = 0;
        for (int rank = 0; rank < model->rank_count; rank++)
            sent += tn__sharded_fp8_bytes(unit, rank);
        if (sent > most.sent) most.sent = sent;
        if (come > most.come) most.come = come;
        if (model->rank_count > 1 && decoded > most.decoded) most.decoded = decoded;
    }
    return most;
}

size_t tn__sharded_fp8_buffer_bytes(const tn_sharded_model *model) {
    const sizes most = sizes_of(model);
    return most.sent + most.come + most.decoded;
}

tn_status tn__sharded_fp8_make(tn_sharded_model *model) {
    const sizes most = sizes_of(model);
    tn__sharded_buffer *buffers[3] = {&model->fp8.sent, &model->fp8.come, &model->fp8.decoded};
    const size_t bytes[3] = {most.sent, most.come, most.decoded};
    for (int i = 0; i < 3; i++)
        if (bytes[i] > 0 && buffers[i]->memory.value == 0)
            TN_TRY(tn__sharded_buffer_make(model, bytes[i], model->config.comm_stream,
                                           "gradients in FP8", buffers[i]));
    return TN_OK;
}

tn_status tn__sharded_fp8_end(tn_sharded_model *model, tn_stream stream) {
    TN_TRY(tn__sharded_buffer_end(&model->fp8.sent, stream));
    TN_TRY(tn__sharded_buffer_end(&model->fp8.come, stream));
    return tn__sharded_buffer_end(&model->fp8.decoded, stream);
}

/* ---- tensors over memory -------------------------------------------------------------------- */

static tn_status adopt(const tn_sharded_model *model, const piece *p, tn_format format,
                       tn_dtype dtype, void *data, tn_tensor *out) {
    const int is_fp8 = format != TN_FORMAT_PLAIN;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    config.format = format, config.dtype = dtype;
    config.rank = 2, config.shape[0] = p->rows, config.shape[1] = p->cols;
    config.policy = TN_POLICY_KEEP;
    config.name = "piece of a gradient";
    memory.plane = is_fp8 ? TN_PLANE_ROW : TN_PLANE_DATA;
    memory.data = data;
    memory.data_bytes = is_fp8 ? p->data_bytes : p->data_bytes * tn_dtype_bytes(dtype);
    if (is_fp8) {
        memory.scale = (char *)data + up(p->data_bytes);
        memory.scale_bytes = p->scale_bytes;
    }
    memory.stream = model->config.comm_stream;
    return tn_tensor_adopt(model->scope, &config, &memory, out);
}

/* Ends both, after `status` of what was done with them. */
static tn_status end_both(const tn_sharded_model *model, tn_tensor a, tn_tensor b,
                          tn_status status) {
    tn__saved_error saved;
    tn__error_save(&saved);
    const tn_tensor both[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        if (both[i].value == 0) continue;
        const tn_status ended = tn_tensor_destroy(both[i], model->config.comm_stream);
        if (status != TN_OK || ended == TN_OK) continue;
        tn__error_save(&saved);
        status = ended;
    }
    if (status != TN_OK) tn__error_restore(&saved);
    return status;
}

static tn_status quantize(const tn_sharded_model *model, const tn__sharded_unit *unit,
                          const tn_segment *segment, char *to) {
    const size_t element_bytes = tn_dtype_bytes(model->config.gradient_dtype);
    const piece p = piece_of(segment);
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    char *from = (char *)unit->bucket->buffer.data + segment->offset * element_bytes;
    args.planes = TN_QUANTIZE_ROW;
    tn_status status =
        adopt(model, &p, TN_FORMAT_PLAIN, model->config.gradient_dtype, from, &args.src);
    if (status == TN_OK) status = adopt(model, &p, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, to, &args.dst);
    if (status == TN_OK) status = tn_quantize(&args, model->config.comm_stream);
    return end_both(model, args.src, args.dst, status);
}

static tn_status dequantize(const tn_sharded_model *model, const tn_segment *segment, char *from,
                            float *to) {
    const piece p = piece_of(segment);
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    args.plane = TN_PLANE_ROW;
    tn_status status = adopt(model, &p, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, from, &args.src);
    if (status == TN_OK) status = adopt(model, &p, TN_FORMAT_PLAIN, TN_FP32, to, &args.dst);
    if (status == TN_OK) status = tn_dequantize(&args, model->config.comm_stream);
    return end_both(model, args.src, args.dst, status);
}

/* ---- the way of a reduction ----------------------------------------------------------------- */

typedef struct exchange {
    const tn_segment *segments;
    size_t segment_count;
    size_t *bytes, *offsets; /* of each rank in `sent`, then of each rank in `come` */
} exchange;

static tn_status quantize_all(const tn_sharded_model *model, const tn__sharded_unit *unit,
                              exchange *e) {
    const size_t ranks = (size_t)model->rank_count;
    const size_t mine = tn__sharded_fp8_bytes(unit, model->rank);
    size_t at = 0;
    for (size_t rank = 0; rank < ranks; rank++) {
        e->offsets[rank] = at;
        for (size_t i = 0; i < e->segment_count; i++) {
            const tn_segment *segment = &e->segments[i];
            if (segment->rank != (int)rank || segment->count == 0) continue;
            TN_TRY(quantize(model, unit, segment, (char *)model->fp8.sent.data + at));
            at += piece_of(segment).bytes;
        }
        e->bytes[rank] = at - e->offsets[rank];
        e->bytes[ranks + rank] = mine;
        e->offsets[ranks + rank] = rank * mine;
    }
    return TN_OK;
}

static tn_status send(const tn_sharded_model *model, const tn__sharded_unit *unit, exchange *e) {
    const size_t ranks = (size_t)model->rank_count;
    TN_TRY(quantize_all(model, unit, e));
    return tn_all_to_all_uneven(model->config.comm, model->fp8.sent.data, e->bytes, e->offsets,
                                model->fp8.come.data, e->bytes + ranks, e->offsets + ranks,
                                model->config.comm_stream);
}

tn_status tn__sharded_fp8_send(const tn_sharded_model *model, const tn__sharded_unit *unit) {
    const size_t ranks = (size_t)model->rank_count;
    exchange e = {NULL, 0, NULL, NULL};
    TN_TRY(tn_shard_bucket_segments(unit->plan, &e.segments, &e.segment_count));
    e.bytes = tn__host_alloc(4 * ranks, sizeof *e.bytes);
    if (!e.bytes) return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "the parts of an exchange of gradients");
    e.offsets = e.bytes + 2 * ranks;
    const tn_status status = send(model, unit, &e);
    tn__host_free(e.bytes);
    return status;
}

/* This rank's elements, as one rank has sent them, into `to`. */
static tn_status dequantize_all(const tn_sharded_model *model, const tn__sharded_unit *unit,
                                char *from, float *to) {
    const tn_segment *segments;
    size_t count;
    TN_TRY(tn_shard_bucket_segments(unit->plan, &segments, &count));
    for (size_t i = 0; i < count; i++) {
        const tn_segment *segment = &segments[i];
        if (segment->rank != model->rank || segment->count == 0) continue;
        TN_TRY(dequantize(model, segment, from, to));
        from += piece_of(segment).bytes;
        to += segment->count;
    }
    return TN_OK;
}

/* The first rank's go straight to where they are summed. */
tn_status tn__sharded_fp8_sum(const tn_sharded_model *model, const tn__sharded_unit *unit,
                              float *sums) {
    const int64_t count = (int64_t)unit->held_elements;
    const piece all = {.rows = 1, .cols = count, .data_bytes = (size_t)count};
    const size_t mine = tn__sharded_fp8_bytes(unit, model->rank);
    char *come = model->fp8.come.data;
    float *decoded = model->fp8.decoded.data;
    TN_TRY(dequantize_all(model, unit, come, sums));
    for (int rank = 1; rank < model->rank_count; rank++) {
        tn_axpy_args add = TN_AXPY_ARGS_INIT;
        TN_TRY(dequantize_all(model, unit, come + (size_t)rank * mine, decoded));
        tn_status status = adopt(model, &all, TN_FORMAT_PLAIN, TN_FP32, decoded, &add.x);
        if (status == TN_OK) status = adopt(model, &all, TN_FORMAT_PLAIN, TN_FP32, sums, &add.y);
        if (status == TN_OK) status = tn_axpy(&add, model->config.comm_stream);
        TN_TRY(end_both(model, add.x, add.y, status));
    }
    return TN_OK;
}
