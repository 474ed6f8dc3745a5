/* GEMM on CUDA: what a shape needs so that cuBLASLt takes it, and the launch.
 *
 * cuBLASLt wants of FP8 operands: contracted % 16 == 0, rows and columns multiples of 8 (4 would
 * do for the scales, 8 for 16-bit output), and, of 1x128 scales, a stride of exactly the rows.
 * Where the caller's shape lacks that, operands are copied into scratch with zeros around them,
 * which add nothing to any sum, and the product is cut out of a padded one. 128x128 scales need
 * no copy: their layout does not change by padding to 16 and 8.
 *
 *     scratch   [ a ][ a's scales ][ b ][ b's scales ][ bias ][ d ][ workspace ]    512-aligned
 *
 * A bias of D's type, 16 bits, is cuBLASLt's to add where it can and D needs no scratch; else we
 * add it, in fp32, to what is in scratch.
 *
 * d is in scratch also when cuBLASLt can not write its type. Where D is added to, cuBLASLt rounds
 * the product to D's type first, then adds in fp32 and rounds the sum (as measured on an H200 with
 * 13.1, for each format), and so do we from scratch, which is fp32 then. The workspace is what the
 * chosen algorithm wants (cuda_gemm_offers.c has its bounds); a call that got less, because another
 * one was chosen since it asked, takes the first algorithm that does with it.
 */
#include "cuda_gemm.h"

enum { POINTER_ALIGNMENT = 16 };

/* ---- what a shape needs ------------------------------------------------------------------- */

static int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

static tn__gemm_piece take(tn__gemm_layout *of, int64_t bytes) {
    tn__gemm_piece taken = {of->bytes, (size_t)bytes};
    of->bytes += (size_t)round_up(bytes, TN__GEMM_ALIGNMENT);
    return taken;
}

/* Types that cuBLASLt writes from these operands; else it writes fp32 and we convert. */
static tn_dtype written_dtype(const tn__gemm_work *work) {
    tn_dtype d = work->d.dtype;
    if (work->a.kind != TN__OPERAND_PLAIN || d == work->a.dtype) return d;
    return TN_FP32;
}

static tn__blas_operand operand_of(const tn__operand *operand) {
    tn__blas_operand of = {operand->kind, operand->dtype, operand->is_transposed};
    return of;
}

/* Of a PLAIN operand, whose rows cuBLASLt takes as they are: all of it, in whole 16 bytes. */
static int64_t plain_bytes(const tn__operand *operand, int64_t contracted) {
    return round_up(operand->rows * contracted * (int64_t)tn_dtype_bytes(operand->dtype), 16);
}

static int is_padded(const tn__gemm_work *work, const tn__blas_shape *shape) {
    return shape->rows != work->a.rows || shape->cols != work->b.rows;
}

static int can_have_bias(const tn__gemm_work *work, const tn__blas_shape *shape) {
    return work->bias.cols > 0 && work->bias.dtype == work->d.dtype && work->d.dtype != TN_FP32 &&
           shape->d == work->d.dtype && !is_padded(work, shape) && !work->d_is_unaligned;
}

/* adds_bias: cuBLASLt is to add it where it can. */
static tn__gemm_layout layout_of(const tn__gemm_work *work, int adds_bias) {
    const tn__operand *a = &work->a, *b = &work->b;
    int is_fp8 = a->kind != TN__OPERAND_PLAIN;
    tn__gemm_layout of = {
        .shape = {.rows = is_fp8 ? round_up(a->rows, 8) : a->rows,
                  .cols = is_fp8 ? round_up(b->rows, 8) : b->rows,
                  .contracted = is_fp8 ? round_up(work->contracted, 16) : work->contracted,
                  .a = operand_of(a),
                  .b = operand_of(b),
                  .d = written_dtype(work)}};
    const tn__blas_shape *shape = &of.shape;
    int64_t blocks = (work->contracted + TN__TILE - 1) / TN__TILE;
    int is_short = shape->contracted != work->contracted;
    if (is_short || shape->rows != a->rows || a->is_unaligned)
        of.a =
            take(&of, is_fp8 ? shape->rows * shape->contracted : plain_bytes(a, work->contracted));
    if (a->kind == TN__OPERAND_VECTOR && a->scale_stride != shape->rows)
        of.a_scale = take(&of, blocks * shape->rows * (int64_t)sizeof(float));
    if (is_short || shape->cols != b->rows || b->is_unaligned)
        of.b =
            take(&of, is_fp8 ? shape->cols * shape->contracted : plain_bytes(b, work->contracted));
    if (b->kind == TN__OPERAND_VECTOR && b->scale_stride != shape->cols)
        of.b_scale = take(&of, blocks * shape->cols * (int64_t)sizeof(float));
    of.shape.has_bias = adds_bias && can_have_bias(work, shape);
    int is_ours = work->bias.cols > 0 && !shape->has_bias;
    if (is_ours && work->bias.dtype != TN_FP32)
        of.bias = take(&of, work->bias.cols * (int64_t)sizeof(float));
    if (is_padded(work, shape) || shape->d != work->d.dtype || work->d_is_unaligned || is_ours) {
        if (work->accumulate || is_ours) of.shape.d = TN_FP32;
        of.d = take(&of, shape->rows * shape->cols * (int64_t)tn_dtype_bytes(shape->d));
    }
    of.shape.has_beta = work->accumulate && of.d.bytes == 0;
    return of;
}

/* Whether the device has GEMMs of the operands' formats has been asked of the format table. */
static tn_status require_supported(const tn__gemm_work *work) {
    const tn__operand *a = &work->a, *b = &work->b;
    if (a->kind == TN__OPERAND_PLAIN) return TN_OK;
    if (a->kind == TN__OPERAND_TILE && b->kind == TN__OPERAND_TILE)
        return TN_FAIL(TN_UNSUPPORTED, "cuBLASLt has no GEMM of two operands with 128x128 scales: "
                                       "one must be scaled 1x128");
    if (a->dtype == TN_E5M2 && b->dtype == TN_E5M2)
        return TN_FAIL(TN_UNSUPPORTED, "there is no GEMM of E5M2 by E5M2: one must be E4M3");
    return TN_OK;
}

/* ---- before the launch ---------------------------------------------------------------------- */

static int is_own_at(const tn__gemm_plan *plan, int place) {
    return tn__gemm_is_own(&plan->candidates[place].algorithm);
}

/* The fastest of the engine's that were measured, else its first; -1: there is none that runs. */
static int best_of_engine(const tn__gemm_plan *plan, tn_gemm_engine engine) {
    int best = -1;
    double least = 0.0;
    for (int i = 0; i < plan->count; i++) {
        const double us = plan->candidates[i].us;
        if (is_own_at(plan, i) != (engine == TN_GEMM_ENGINE_WGMMA) || us < 0.0) continue;
        if (best >= 0 && (us == 0.0 || (least > 0.0 && us >= least))) continue;
        best = i;
        least = us;
    }
    return best;
}

static tn_status pin_engine(const tn__gemm_work *work, tn__gemm_preparation *prepared) {
    const int is_wanted_own = work->engine == TN_GEMM_ENGINE_WGMMA;
    char text[TN__BLAS_TEXT_BYTES];
    if (!is_wanted_own && work->engine != TN_GEMM_ENGINE_CUBLASLT) return TN_OK;
    if (is_own_at(prepared->plan, prepared->chosen) == is_wanted_own) return TN_OK;
    tn__blas_shape_text(&prepared->layout.shape, text);
    if (work->algorithm != 0)
        return TN_FAIL(TN_INVALID_ARGUMENT, "algorithm %d is none of the engine %s, for %s",
                       work->algorithm, tn_gemm_engine_name(work->engine), text);
    pthread_mutex_lock(&prepared->gemm->lock);
    const int best = best_of_engine(prepared->plan, work->engine);
    pthread_mutex_unlock(&prepared->gemm->lock);
    if (best < 0 && is_wanted_own && prepared->gemm->own_processors == 0)
        return TN_FAIL(TN_UNSUPPORTED,
                       "the engine wgmma is pinned, and this device does not run it; leave the "
                       "engine to be chosen: %s",
                       prepared->context->product_refusal);
    if (best < 0)
        return TN_FAIL(TN_UNSUPPORTED,
                       "the engine %s is pinned, and does not take %s here: leave it to be "
                       "chosen",
                       tn_gemm_engine_name(work->engine), text);
    prepared->chosen = best;
    return TN_OK;
}

static tn_status pin(const tn__gemm_work *work, tn__gemm_preparation *prepared) {
    char text[TN__BLAS_TEXT_BYTES];
    int count = prepared->plan->count;
    if (work->algorithm == 0) return pin_engine(work, prepared);
    prepared->chosen = work->algorithm - 1;
    if (work->algorithm <= count) return pin_engine(work, prepared);
    tn__blas_shape_text(&prepared->layout.shape, text);
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "algorithm is %d, expected at most %d, as many as there are"
                   " for %s",
                   work->algorithm, count, text);
}

/* The shape's plan; to tune it, a wide one. */
static tn_status acquire(const tn__gemm_work *work, tn__gemm_preparation *out) {
    if (work->tunes) TN_TRY(tn__gemm_plan_widen(out->gemm, &out->layout.shape));
    return tn__gemm_plan_acquire(out->gemm, &out->layout.shape, &out->plan, &out->chosen);
}

tn_status tn__gemm_prepare(tn_device *device, const tn__gemm_work *work,
                           tn__gemm_preparation *out) {
    TN_TRY(tn__cuda_context_of(device, &out->context));
    TN_TRY(require_supported(work));
    TN_TRY(tn__gemm_of(out->context, &out->gemm));
    TN_TRY(out->context->driver->make_current(out->context->state));
    out->layout = layout_of(work, 1);
    TN_TRY(acquire(work, out));
    if (out->plan->count == 0) { /* cuBLASLt does not add the bias */
        tn__gemm_unprepare(out);
        out->layout = layout_of(work, 0);
        TN_TRY(acquire(work, out));
    }
    tn_status status = pin(work, out);
    if (status != TN_OK) tn__gemm_unprepare(out);
    if (status == TN_OK && work->spared > 0) (void)tn__gemm_spare(out, work->spared);
    return status;
}

void tn__gemm_unprepare(tn__gemm_preparation *prepared) {
    tn__gemm_plan_release(prepared->gemm, prepared->plan);
}

tn_status tn__cuda_gemm_scratch_bytes(tn_device *device, const tn__gemm_work *work, size_t *out) {
    tn__gemm_preparation prepared;
    TN_TRY(tn__gemm_prepare(device, work, &prepared));
    size_t workspace = work->tunes ? tn__gemm_plan_workspace(prepared.plan)
                                   : prepared.plan->candidates[prepared.chosen].workspace_bytes;
    *out = prepared.layout.bytes + workspace;
    tn__gemm_unprepare(&prepared);
    return TN_OK;
}

/* ---- the launch --------------------------------------------------------------------------- */

static void *in_scratch(const tn__gemm_work *work, const tn__gemm_piece *of) {
    return (unsigned char *)work->scratch + of->offset;
}

/* Copies rows x row_bytes into the piece, whose rows are dst_row_bytes, and zeros around it. */
static tn_status pad(const tn__gemm_preparation *by, const tn__gemm_work *work,
                     const tn__gemm_piece *into, const void *src, int64_t rows, int64_t row_bytes,
                     int64_t src_stride_bytes, int64_t dst_row_bytes, tn_stream stream) {
    tn__cuda_pad_arguments argument = {.src = src,
                                       .dst = in_scratch(work, into),
                                       .rows = rows,
                                       .row_bytes = row_bytes,
                                       .src_stride_bytes = src_stride_bytes,
                                       .dst_row_bytes = dst_row_bytes,
                                       .chunks = (int64_t)(into->bytes / 16)};
    return tn__kernel_launch(by->context, TN__KERNEL_PAD,
                             (argument.chunks + TN__FLAT_THREADS - 1) / TN__FLAT_THREADS,
                             TN__FLAT_THREADS, &argument, stream);
}

/* What cuBLASLt gets for an operand: the caller's memory, or padded copies of it. */
static tn_status place_operand(const tn__gemm_preparation *by, const tn__gemm_work *work,
                               const tn__operand *operand, const tn__gemm_piece *data,
                               const tn__gemm_piece *scale, int64_t padded_rows, tn_stream stream,
                               const void **data_out, const float **scale_out) {
    int64_t blocks = (work->contracted + TN__TILE - 1) / TN__TILE;
    int64_t float_bytes = (int64_t)sizeof(float);
    *data_out = operand->data;
    *scale_out = operand->scale;
    if (data->bytes > 0 && operand->kind == TN__OPERAND_PLAIN) {
        int64_t bytes = operand->rows * work->contracted * (int64_t)tn_dtype_bytes(operand->dtype);
        *data_out = in_scratch(work, data);
        TN_TRY(pad(by, work, data, operand->data, 1, bytes, bytes, (int64_t)data->bytes, stream));
    } else if (data->bytes > 0) {
        *data_out = in_scratch(work, data);
        TN_TRY(pad(by, work, data, operand->data, operand->rows, work->contracted, work->contracted,
                   by->layout.shape.contracted, stream));
    }
    if (scale->bytes > 0) {
        *scale_out = in_scratch(work, scale);
        TN_TRY(pad(by, work, scale, operand->scale, blocks, operand->rows * float_bytes,
                   operand->scale_stride * float_bytes, padded_rows * float_bytes, stream));
    }
    return TN_OK;
}

tn_status tn__gemm_place(const tn__gemm_preparation *by, const tn__gemm_work *work,
                         tn_stream stream, tn__gemm_placed *out) {
    const tn__gemm_layout *of = &by->layout;
    TN_TRY(place_operand(by, work, &work->a, &of->a, &of->a_scale, of->shape.rows, stream, &out->a,
                         &out->addresses.a_scale));
    TN_TRY(place_operand(by, work, &work->b, &of->b, &of->b_scale, of->shape.cols, stream, &out->b,
                         &out->addresses.b_scale));
    out->addresses.bias = work->bias.data;
    out->d = of->d.bytes > 0 ? in_scratch(work, &of->d) : work->d.data;
    return TN_OK;
}

cublasStatus_t tn__gemm_multiply(const tn__gemm_preparation *by, const tn__gemm_work *work,
                                 const tn__gemm_placed *placed, int candidate, tn_stream stream) {
    const tn__blas *blas = by->gemm->blas;
    const tn__gemm_candidate *with = &by->plan->candidates[candidate];
    const tn__blas_product *product = &by->plan->product;
    const float alpha = 1.0f, beta = by->layout.shape.has_beta ? 1.0f : 0.0f;
    const tn__gemm_piece rest = {by->layout.bytes, work->scratch_bytes - by->layout.bytes};
    if (tn__gemm_is_own(&with->algorithm))
        return tn__gemm_own_multiply(by, placed, stream) == TN_OK ? CUBLAS_STATUS_SUCCESS
                                                                  : CUBLAS_STATUS_EXECUTION_FAILED;
    if (with->workspace_bytes > rest.bytes) return CUBLAS_STATUS_NOT_SUPPORTED;
    void *workspace = with->workspace_bytes > 0 ? in_scratch(work, &rest) : NULL;
    pthread_mutex_lock(&by->plan->lock);
    cublasStatus_t status =
        tn__blas_product_address(blas, &by->plan->shape, &placed->addresses, product);
    if (status == CUBLAS_STATUS_SUCCESS)
        status =
            blas->Matmul(by->gemm->handle, product->operation, &alpha, placed->b, product->a,
                         placed->a, product->b, &beta, placed->d, product->d, placed->d, product->d,
                         &with->algorithm, workspace, with->workspace_bytes, (cudaStream_t)stream);
    pthread_mutex_unlock(&by->plan->lock);
    return status;
}

/* The chosen one, or, unless something was pinned, the first that runs: what is offered may be
 * refused. */
static cublasStatus_t multiply(const tn__gemm_preparation *by, const tn__gemm_work *work,
                               const tn__gemm_placed *placed, tn_stream stream, int *last) {
    *last = by->chosen;
    cublasStatus_t status = tn__gemm_multiply(by, work, placed, by->chosen, stream);
    const int is_pinned = work->algorithm != 0 || work->engine == TN_GEMM_ENGINE_WGMMA;
    for (int i = 0; i < by->plan->count && !is_pinned && status != CUBLAS_STATUS_SUCCESS; i++) {
        if (work->engine == TN_GEMM_ENGINE_CUBLASLT && is_own_at(by->plan, i)) continue;
        if (i == by->chosen) continue;
        *last = i;
        status = tn__gemm_multiply(by, work, placed, i, stream);
    }
    return status;
}

/* The words are made only for a failure: they would be a good part of a call's time. */
static tn_status product_status(const tn__gemm_preparation *by, cublasStatus_t status, int last) {
    char text[TN__BLAS_TEXT_BYTES];
    if (status == CUBLAS_STATUS_SUCCESS) return TN_OK;
    if (is_own_at(by->plan, last) && status == CUBLAS_STATUS_EXECUTION_FAILED)
        return TN_DRIVER_ERROR; /* whose text says why */
    tn__blas_shape_text(&by->layout.shape, text);
    return tn__blas_status(by->gemm->blas, status, "Matmul", text);
}

/* The bias in fp32 where we add it, else NULL. */
static tn_status wide_bias(const tn__gemm_preparation *by, const tn__gemm_work *work,
                           tn_stream stream, const float **out) {
    const tn__gemm_layout *of = &by->layout;
    const int64_t cols = work->bias.cols;
    *out = NULL;
    if (cols == 0 || of->shape.has_bias) return TN_OK;
    *out = work->bias.data;
    if (of->bias.bytes == 0) return TN_OK;
    *out = in_scratch(work, &of->bias);
    tn__cuda_map_arguments argument = {work->bias.data, in_scratch(work, &of->bias), cols, 1.0f};
    return tn__kernel_launch(
        by->context, tn__kernel_of_pair(TN__KERNEL_CONVERT, work->bias.dtype, TN_FP32),
        (cols + TN__MAP_ELEMENTS - 1) / TN__MAP_ELEMENTS, TN__FLAT_THREADS, &argument, stream);
}

static tn_status finish(const tn__gemm_preparation *by, const tn__gemm_work *work,
                        tn_stream stream) {
    const tn__gemm_layout *of = &by->layout;
    const tn__matrix *d = &work->d;
    int64_t across = (d->cols + TN__FINISH_ELEMENTS - 1) / TN__FINISH_ELEMENTS;
    tn__cuda_finish_arguments argument = {.src = in_scratch(work, &of->d),
                                          .dst = d->data,
                                          .rows = d->rows,
                                          .cols = d->cols,
                                          .src_stride = of->shape.cols,
                                          .blocks_across = (uint32_t)across,
                                          .accumulate = work->accumulate};
    TN_TRY(wide_bias(by, work, stream, &argument.bias));
    return tn__kernel_launch(by->context,
                             tn__kernel_of_pair(TN__KERNEL_FINISH, of->shape.d, d->dtype),
                             d->rows * across, TN__FLAT_THREADS, &argument, stream);
}

static int is_misplaced(const tn__operand *operand) {
    uintptr_t data = operand->is_unaligned ? 0 : (uintptr_t)operand->data;
    return (data | (uintptr_t)operand->scale) % POINTER_ALIGNMENT != 0;
}

static tn_status require_memory(const tn__gemm_preparation *by, const tn__gemm_work *work) {
    uintptr_t rest =
        (work->d_is_unaligned ? 0 : (uintptr_t)work->d.data) | (uintptr_t)work->bias.data;
    TN_REQUIRE(work->scratch_bytes >= by->layout.bytes,
               "gemm got %zu bytes of scratch and needs %zu", work->scratch_bytes,
               by->layout.bytes);
    TN_REQUIRE(!is_misplaced(&work->a) && !is_misplaced(&work->b) && rest % POINTER_ALIGNMENT == 0,
               "an operand of gemm is not aligned to %d bytes", POINTER_ALIGNMENT);
    return TN_OK;
}

static tn_status run(const tn__gemm_preparation *by, const tn__gemm_work *work, tn_stream stream) {
    tn__gemm_placed placed;
    int last;
    TN_TRY(require_memory(by, work));
    TN_TRY(tn__gemm_place(by, work, stream, &placed));
    tn__error_scope_begin();
    const cublasStatus_t status = multiply(by, work, &placed, stream, &last);
    TN_TRY(tn__error_scope_end(product_status(by, status, last)));
    return by->layout.d.bytes > 0 ? finish(by, work, stream) : TN_OK;
}

tn_status tn__cuda_gemm_run(tn_device *device, const tn__gemm_work *work, tn_stream stream) {
    tn__gemm_preparation by;
    TN_TRY(tn__gemm_prepare(device, work, &by));
    tn_status status = run(&by, work, stream);
    tn__gemm_unprepare(&by);
    return status;
}
