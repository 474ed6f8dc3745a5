/* CUDA launches of the casts to and from TENSOR, MXFP8 and NVFP4: see cuda_formats.h.
 *
 * Where a scale follows from the amax of the whole tensor, its bits are collected where that scale
 * is to be, so that no scratch is needed: one thread clears the word, tiles raise it, the cast
 * reads it, and one thread puts the scale there, and into the other plane.
 */
#include "cuda_formats.h"
#include "cuda_launch.h"

/* One block of one thread. */
static tn_status launch_one(tn__cuda_context *context, int kernel,
                            tn__cuda_quantize_arguments *argument, tn_stream stream) {
    return tn__kernel_launch(context, kernel, 1, 1, argument, stream);
}

static tn_status launch_tiles(tn__cuda_context *context, int kernel, const tn__matrix *matrix,
                              tn__cuda_quantize_arguments *argument, tn_stream stream) {
    return tn__kernel_launch(context, kernel, tn__matrix_tiles(matrix), TN__TILE_THREADS, argument,
                             stream);
}

static tn_status launch_amax(tn__cuda_context *context, const tn__matrix *src,
                             tn__cuda_quantize_arguments *argument, tn_stream stream) {
    TN_TRY(launch_one(context, TN__KERNEL_AMAX_START, argument, stream));
    return launch_tiles(context, tn__kernel_of_amax(src->dtype), src, argument, stream);
}

tn_status tn__cuda_amax(tn__cuda_context *context, const tn__matrix *src, float *amax,
                        tn_stream stream) {
    const tn__quantize_work work = {.src = *src};
    tn__cuda_quantize_arguments argument = tn__cuda_quantize_argument(&work);
    argument.total = (int *)amax;
    if (tn__matrix_tiles(src) == 0) {
        return launch_one(context, TN__KERNEL_AMAX_START, &argument, stream);
    }
    return launch_amax(context, src, &argument, stream);
}

/* The amax of the source, then `kernel`, then `finish`. An amax that is given is where nothing is
 * written, so that the scale comes first: what the cast is behind must not write its source. */
static tn_status launch_current(tn__cuda_context *context, const tn__quantize_work *work,
                                int kernel, int finish, tn__cuda_quantize_arguments *argument,
                                tn_stream stream) {
    const tn__matrix *src = &work->src;
    argument->total = (int *)work->whole_amax;
    if (work->whole_amax) {
        TN_TRY(launch_one(context, finish, argument, stream));
        return launch_tiles(context, kernel, src, argument, stream);
    }
    argument->total = (int *)(work->has_row ? work->row.global_scale : work->col.global_scale);
    TN_TRY(launch_amax(context, src, argument, stream));
    TN_TRY(launch_tiles(context, kernel, src, argument, stream));
    return launch_one(context, finish, argument, stream);
}

static int family_of(tn_format format) {
    switch (format) {
    case TN_FORMAT_MXFP8: return TN__KERNEL_QUANTIZE_MXFP8;
    case TN_FORMAT_NVFP4: return TN__KERNEL_QUANTIZE_NVFP4;
    default: return TN__KERNEL_QUANTIZE_TENSOR;
    }
}

/* Bytes that a lane writes of a row at once, and those of a piece of a transposed column. */
static int64_t row_piece(const tn__quantize_work *work) {
    int64_t elements = tn__vector_of(work->src.dtype);
    return work->format == TN_FORMAT_NVFP4 ? elements / 2 : elements;
}

static int64_t col_piece(const tn__quantize_work *work) {
    switch (work->format) {
    case TN_FORMAT_MXFP8: return row_piece(work);
    case TN_FORMAT_NVFP4: return 4;
    default: return 16;
    }
}

tn_status tn__cuda_quantize_formats(tn__cuda_context *context, const tn__quantize_work *work,
                                    tn_stream stream) {
    tn__cuda_quantize_arguments argument = tn__cuda_quantize_argument(work);
    int kernel = tn__kernel_of_format(family_of(work->format), work);
    if (work->has_row) argument.row = tn__cuda_plane_of(&work->row, row_piece(work));
    if (work->has_col) argument.col = tn__cuda_plane_of(&work->col, col_piece(work));
    argument.row.square_blocks = argument.col.square_blocks = work->square_blocks;
    argument.factor = work->factor;
    argument.amax = (int *)work->amax;
    if (work->format == TN_FORMAT_MXFP8 || work->factor) {
        return launch_tiles(context, kernel, &work->src, &argument, stream);
    }
    int finish = work->format == TN_FORMAT_NVFP4 ? TN__KERNEL_NVFP4_FINISH
                                                 : tn__kernel_of_scale_finish(work->dtype);
    return launch_current(context, work, kernel, finish, &argument, stream);
}

tn_status tn__cuda_dequantize_formats(tn__cuda_context *context, const tn__dequantize_work *work,
                                      tn_stream stream) {
    const tn__matrix *dst = &work->dst;
    int is_col = work->src.plane == TN_PLANE_COL, is_nvfp4 = work->format == TN_FORMAT_NVFP4;
    int64_t piece = tn__vector_of(dst->dtype);
    tn__cuda_dequantize_arguments argument = tn__cuda_dequantize_argument(work);
    if (is_nvfp4) piece = is_col ? 4 : piece / 2;
    argument.src = tn__cuda_plane_of(&work->src, piece);
    int family = is_nvfp4 ? TN__KERNEL_DEQUANTIZE_NVFP4 : TN__KERNEL_DEQUANTIZE_MXFP8;
    return tn__kernel_launch(context,
                             tn__kernel_of_format_back(family, is_col, work->src.dtype, dst->dtype),
                             tn__matrix_tiles(dst), TN__TILE_THREADS, &argument, stream);
}

/* ---- re-quantize ---------------------------------------------------------------------------- */

/* `to` describes the source by its shape alone, as fp32, which is what the kernel holds. */
static tn_status launch_values(tn__cuda_context *context, const tn__requantize_work *work,
                               tn_stream stream) {
    const tn__quantize_work *to = &work->to;
    const int is_col = work->from.plane == TN_PLANE_COL;
    const tn__dequantize_work from = {.format = work->format, .dst = to->src};
    tn__cuda_requantize_arguments argument = {.from = tn__cuda_dequantize_argument(&from),
                                              .to = tn__cuda_quantize_argument(to),
                                              .is_col = is_col};
    const int64_t piece = tn__vector_of(TN_FP16); /* codes are held as halves */
    argument.from.src = tn__cuda_plane_of(&work->from, is_col ? 16 : piece);
    argument.from.is_1d = work->format == TN_FORMAT_FP8_BLOCK_1D;
    argument.from.tile_step = 1;
    if (to->has_row) argument.to.row = tn__cuda_plane_of(&to->row, piece);
    if (to->has_col) argument.to.col = tn__cuda_plane_of(&to->col, 16);
    int kernel =
        tn__kernel_of_requantize(to->format == TN_FORMAT_FP8_BLOCK_1D, work->from.dtype, to->dtype);
    return tn__kernel_launch(context, kernel, tn__matrix_tiles(&to->src), TN__TILE_THREADS,
                             &argument, stream);
}

static tn_status launch_shift(tn__cuda_context *context, const tn__requantize_work *work,
                              tn_stream stream) {
    const tn_plane_layout *layout = &work->from.layout;
    const tn_plane_view *to = work->to.has_row ? &work->to.row : &work->to.col;
    const tn__matrix stored = {TN_FP32, NULL, layout->rows, layout->cols};
    const tn__dequantize_work from = {.format = work->format, .dst = stored};
    const tn__quantize_work out = {.src = stored, .skip = work->to.skip};
    tn__cuda_requantize_arguments argument = {.from = tn__cuda_dequantize_argument(&from),
                                              .to = tn__cuda_quantize_argument(&out)};
    argument.from.src = tn__cuda_plane_of(&work->from, tn__vector_of(TN_FP16));
    argument.from.is_1d = 1;
    argument.to.col = tn__cuda_plane_of(to, 16);
    return tn__kernel_launch(context, tn__kernel_of_shift(work->from.dtype),
                             tn__matrix_tiles(&stored), TN__TILE_THREADS, &argument, stream);
}

tn_status tn__cuda_requantize(tn__cuda_context *context, const tn__requantize_work *work,
                              tn_stream stream) {
    if (work->shifts) return launch_shift(context, work, stream);
    return launch_values(context, work, stream);
}
