/* Sums of activations over ranks, of which each keeps its rows. */
#include "comm.h"
#include "error.h"
#include "host_alloc.h"
#include "parallel_call.h"

typedef struct reduction {
    const char *name;
    tn__row_cut cut;
    tn_tensor_info src, dst;
    tn_tensor sums; /* dst, or this rank's rows in src's type */
} reduction;

static tn_status put(const reduction *r, const void *src, void *dst, tn_stream stream) {
    const size_t cols = (size_t)r->src.cols;
    tn__row_part part = tn__row_part_first(&r->cut);
    tn_segment *segments = tn__host_alloc((size_t)r->cut.ranks, sizeof *segments);
    if (!segments) return TN_OUT_OF_HOST_MEMORY;
    for (int rank = 0;;) {
        segments[rank] = (tn_segment){rank, (size_t)part.first * cols, (size_t)part.rows * cols};
        if (++rank == r->cut.ranks) break;
        part = tn__row_part_next(&r->cut, rank, &part);
    }
    tn_status status = tn_reduce_scatter_uneven(
        r->cut.comm, src, dst, segments, (size_t)r->cut.ranks, r->src.dtype, TN_REDUCE_SUM, stream);
    tn__host_free(segments);
    return status;
}

static tn_status sum_up(const reduction *r, tn_tensor src, tn_stream stream) {
    tn_lease reading, writing;
    tn_plane_view from, to;
    TN_TRY(tn_lease_begin(src, TN_PLANE_DATA, TN_READ, stream, &reading, &from));
    tn_status status = tn_lease_begin(r->sums, TN_PLANE_DATA, TN_WRITE, stream, &writing, &to);
    if (status == TN_OK) {
        if (r->cut.total > 0 && r->src.cols > 0) status = put(r, from.data, to.data, stream);
        status = tn__lease_close(writing, status);
    }
    return tn__lease_close(reading, status);
}

static tn_status convert(const reduction *r, tn_tensor dst, tn_stream stream) {
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    args.x = r->sums, args.y = dst;
    return tn_convert(&args, stream);
}

static tn_status run(reduction *r, const tn_sequence_reduce_args *args, tn_stream stream) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    r->sums = args->dst;
    if (r->dst.dtype == r->src.dtype) return sum_up(r, args->src, stream);
    config.dtype = r->src.dtype;
    config.rank = 2;
    config.shape[0] = r->dst.rows, config.shape[1] = r->dst.cols;
    config.name = "sums over ranks";
    TN_TRY(tn_tensor_create(args->scope, &config, &r->sums));
    tn_status status = sum_up(r, args->src, stream);
    if (status == TN_OK) status = convert(r, args->dst, stream);
    return tn__tensor_close(r->sums, stream, status);
}

static tn_status check(const reduction *r) {
    TN_REQUIRE(r->src.format == TN_FORMAT_PLAIN &&
                   (r->src.dtype == TN_FP32 || r->src.dtype == TN_BF16),
               "%s: src (tensor %s) is %s of %s, expected %s fp32 or bf16", r->name, r->src.name,
               tn_format_name(r->src.format), tn_dtype_name(r->src.dtype),
               tn_format_name(TN_FORMAT_PLAIN));
    TN_REQUIRE(r->dst.format == TN_FORMAT_PLAIN, "%s: dst (tensor %s) is %s, expected %s", r->name,
               r->dst.name, tn_format_name(r->dst.format), tn_format_name(TN_FORMAT_PLAIN));
    TN_REQUIRE(r->src.rows == r->cut.total && r->src.cols == r->dst.cols,
               "%s: src (tensor %s) is %lld x %lld, expected %lld x %lld: all ranks' rows x dst's "
               "columns",
               r->name, r->src.name, (long long)r->src.rows, (long long)r->src.cols,
               (long long)r->cut.total, (long long)r->dst.cols);
    return TN_OK;
}

tn_status tn_sequence_reduce(const tn_sequence_reduce_args *args, tn_stream stream) {
    reduction r = {
        .name = "tn_sequence_reduce", .src = TN_TENSOR_INFO_INIT, .dst = TN_TENSOR_INFO_INIT};
    TN_REQUIRE(args && args->size == sizeof *args,
               "%s: args is NULL, or not from the initializer macro", r.name);
    TN_TRY(tn_tensor_info_get(args->src, &r.src));
    TN_TRY(tn_tensor_info_get(args->dst, &r.dst));
    TN_TRY(tn__row_cut_make(r.name, &args->sequence, r.dst.rows, &r.cut));
    TN_TRY(check(&r));
    const uint64_t puts = tn__comm_puts(r.cut.comm);
    return tn__comm_end_call(r.cut.comm, r.name, puts, run(&r, args, stream));
}
