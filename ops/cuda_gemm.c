/* GEMM on CUDA: what a shape needs so that cuBLASLt takes it, algorithms, and the launch.
 *
 * cuBLASLt wants of FP8 operands: contracted % 16 == 0, rows and columns multiples of 8 (4 would
 * do for the scales, 8 for 16-bit output), and, of 1x128 scales, a stride of exactly the rows.
 * Where the caller's shape lacks that, operands are copied into scratch with zeros around them,
 * which add nothing to any sum, and the product is cut out of a padded one. 128x128 scales need
 * no copy: their layout does not change by padding to 16 and 8.
 *
 *     scratch   [ a ][ a's scales ][ b ][ b's scales ][ d ][ workspace ]    each 512-aligned
 *
 * d is in scratch also when cuBLASLt can not write its type. What is added to is added to in fp32
 * before the one rounding, by cuBLASLt or, from scratch, by us. The workspace is what the algorithm
 * wants, and an algorithm may want what 8 fp32 copies of d take, but 1 MiB at least and 32 MiB at
 * most: the partial sums of a split contraction are such copies, and a small product must not be
 * the one that a step's peak of memory comes from.
 *
 * A shape's algorithm is looked up once per device and kept. The list of plans only grows, and
 * only under the lock; a plan does not change once it is in the list.
 */
#include "cuda_blas.h"
#include "host_alloc.h"

#include <pthread.h>

enum { ALGORITHMS_MAX = 8, SCRATCH_ALIGNMENT = 512, POINTER_ALIGNMENT = 16 };

/* What an algorithm may ask for: fp32 copies of D, the partial sums of a split contraction. */
enum { WORKSPACE_COPIES = 8 };
static const int64_t workspace_bytes_min = (int64_t)1 << 20;
static const int64_t workspace_bytes_max = (int64_t)32 << 20;

typedef struct plan {
    struct plan *next;
    tn__blas_shape shape;
    int count;
    cublasLtMatmulHeuristicResult_t found[ALGORITHMS_MAX];
    size_t workspace_bytes; /* that the first one wants */
} plan;

struct tn__cuda_gemm {
    const tn__blas *blas;
    cublasLtHandle_t handle;
    pthread_mutex_t lock;
    plan *plans;
};

/* ---- cuBLASLt for a device ---------------------------------------------------------------- */

static tn_status gemm_make(tn__cuda_context *context, tn__cuda_gemm **out) {
    const tn__blas *blas;
    TN_TRY(tn__blas_get(&blas));
    TN_TRY(context->driver->make_current(context->state));
    tn__cuda_gemm *gemm = tn__host_alloc(1, sizeof *gemm);
    if (!gemm) return TN_OUT_OF_HOST_MEMORY;
    gemm->blas = blas;
    tn_status status = tn__blas_status(blas, blas->Create(&gemm->handle), "Create", "this device");
    if (status != TN_OK) {
        tn__host_free(gemm);
        return status;
    }
    pthread_mutex_init(&gemm->lock, NULL);
    *out = gemm;
    return TN_OK;
}

/* Makes cuBLASLt's state at the device's first GEMM. */
static tn_status gemm_of(tn__cuda_context *context, tn__cuda_gemm **out) {
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    tn_status status = TN_OK;
    tn__cuda_gemm *gemm = __atomic_load_n(&context->gemm, __ATOMIC_ACQUIRE);
    if (!gemm) {
        pthread_mutex_lock(&making);
        gemm = context->gemm;
        if (!gemm) status = gemm_make(context, &gemm);
        if (status == TN_OK) __atomic_store_n(&context->gemm, gemm, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&making);
    }
    if (status == TN_OK) *out = gemm;
    return status;
}

void tn__cuda_gemm_end(tn__cuda_context *context) {
    tn__cuda_gemm *gemm = context->gemm;
    if (!gemm) return;
    if (!tn__driver_is_gone() && context->driver->make_current(context->state) == TN_OK)
        (void)gemm->blas->Destroy(gemm->handle);
    while (gemm->plans) {
        plan *first = gemm->plans;
        gemm->plans = first->next;
        tn__host_free(first);
    }
    pthread_mutex_destroy(&gemm->lock);
    tn__host_free(gemm);
    context->gemm = NULL;
}

/* ---- what a shape needs ------------------------------------------------------------------- */

/* Copies around the product; offsets into scratch, bytes 0 where there is no copy. */
typedef struct piece {
    size_t offset;
    size_t bytes;
} piece;

typedef struct layout {
    tn__blas_shape shape; /* as cuBLASLt sees it: padded */
    piece a, a_scale, b, b_scale, d, workspace;
    size_t bytes;
} layout;

static int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

static piece take(layout *of, int64_t bytes) {
    piece taken = {of->bytes, (size_t)bytes};
    of->bytes += (size_t)round_up(bytes, SCRATCH_ALIGNMENT);
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

static layout layout_of(const tn__gemm_work *work) {
    const tn__operand *a = &work->a, *b = &work->b;
    int is_fp8 = a->kind != TN__OPERAND_PLAIN;
    layout of = {.shape = {.rows = is_fp8 ? round_up(a->rows, 8) : a->rows,
                           .cols = is_fp8 ? round_up(b->rows, 8) : b->rows,
                           .contracted = is_fp8 ? round_up(work->contracted, 16) : work->contracted,
                           .a = operand_of(a),
                           .b = operand_of(b),
                           .d = written_dtype(work)}};
    const tn__blas_shape *shape = &of.shape;
    int64_t blocks = (work->contracted + TN__TILE - 1) / TN__TILE;
    int is_short = shape->contracted != work->contracted;
    if (is_short || shape->rows != a->rows) of.a = take(&of, shape->rows * shape->contracted);
    if (a->kind == TN__OPERAND_VECTOR && a->scale_stride != shape->rows)
        of.a_scale = take(&of, blocks * shape->rows * (int64_t)sizeof(float));
    if (is_short || shape->cols != b->rows) of.b = take(&of, shape->cols * shape->contracted);
    if (b->kind == TN__OPERAND_VECTOR && b->scale_stride != shape->cols)
        of.b_scale = take(&of, blocks * shape->cols * (int64_t)sizeof(float));
    if (shape->rows != a->rows || shape->cols != b->rows || shape->d != work->d.dtype) {
        if (work->accumulate) of.shape.d = TN_FP32;
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

/* ---- algorithms --------------------------------------------------------------------------- */

static int operands_equal(const tn__blas_operand *x, const tn__blas_operand *y) {
    return x->kind == y->kind && x->dtype == y->dtype && x->is_transposed == y->is_transposed;
}

static int shapes_equal(const tn__blas_shape *x, const tn__blas_shape *y) {
    return x->rows == y->rows && x->cols == y->cols && x->contracted == y->contracted &&
           operands_equal(&x->a, &y->a) && operands_equal(&x->b, &y->b) && x->d == y->d &&
           x->has_beta == y->has_beta;
}

static size_t workspace_limit(const tn__blas_shape *shape) {
    int64_t copies_max = workspace_bytes_max / (WORKSPACE_COPIES * (int64_t)sizeof(float));
    if (shape->rows > copies_max / shape->cols) return (size_t)workspace_bytes_max;
    int64_t bytes = shape->rows * shape->cols * WORKSPACE_COPIES * (int64_t)sizeof(float);
    return (size_t)(bytes < workspace_bytes_min ? workspace_bytes_min : bytes);
}

static cublasStatus_t set_preferences(const tn__blas *blas, cublasLtMatmulPreference_t preference,
                                      size_t workspace_bytes) {
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    uint32_t alignment = POINTER_ALIGNMENT;
    cublasStatus_t status =
        blas->MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &workspace_bytes, sizeof workspace_bytes);
    for (int i = 0; i < 4 && status == CUBLAS_STATUS_SUCCESS; i++)
        status = blas->MatmulPreferenceSetAttribute(preference, alignments[i], &alignment,
                                                    sizeof alignment);
    return status;
}

static cublasStatus_t ask_heuristic(const tn__cuda_gemm *gemm, const tn__blas_product *product,
                                    plan *made) {
    const tn__blas *blas = gemm->blas;
    cublasLtMatmulPreference_t preference = NULL;
    cublasStatus_t status = blas->MatmulPreferenceCreate(&preference);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    status = set_preferences(blas, preference, workspace_limit(&made->shape));
    if (status == CUBLAS_STATUS_SUCCESS)
        status = blas->MatmulAlgoGetHeuristic(gemm->handle, product->operation, product->a,
                                              product->b, product->d, product->d, preference,
                                              ALGORITHMS_MAX, made->found, &made->count);
    (void)blas->MatmulPreferenceDestroy(preference);
    if (status == CUBLAS_STATUS_SUCCESS && made->count == 0) status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (status == CUBLAS_STATUS_SUCCESS) status = made->found[0].state;
    return status;
}

/* Any 16-byte aligned address: the heuristic wants to see that there are scales, and reads none. */
static const float *scale_or_any(const float *scale) {
    return scale ? scale : (const float *)(uintptr_t)SCRATCH_ALIGNMENT;
}

static tn_status plan_make(const tn__cuda_gemm *gemm, const tn__blas_shape *shape,
                           const tn__gemm_work *work, plan **out) {
    tn__blas_product product;
    char text[TN__BLAS_TEXT_BYTES];
    TN_TRY(tn__blas_product_make(gemm->blas, shape, scale_or_any(work->a.scale),
                                 scale_or_any(work->b.scale), &product));
    plan *made = tn__host_alloc(1, sizeof *made);
    tn_status status = made ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    if (made) {
        made->shape = *shape;
        tn__blas_shape_text(shape, text);
        status = tn__blas_status(gemm->blas, ask_heuristic(gemm, &product, made),
                                 "MatmulAlgoGetHeuristic", text);
    }
    tn__blas_product_end(gemm->blas, &product);
    if (status != TN_OK) {
        tn__host_free(made);
        return status;
    }
    made->workspace_bytes = made->found[0].workspaceSize;
    *out = made;
    return TN_OK;
}

static tn_status plan_of(tn__cuda_gemm *gemm, const tn__blas_shape *shape,
                         const tn__gemm_work *work, const plan **out) {
    tn_status status = TN_OK;
    pthread_mutex_lock(&gemm->lock);
    plan *found = gemm->plans;
    while (found && !shapes_equal(&found->shape, shape))
        found = found->next;
    if (!found) {
        status = plan_make(gemm, shape, work, &found);
        if (status == TN_OK) {
            found->next = gemm->plans;
            gemm->plans = found;
        }
    }
    pthread_mutex_unlock(&gemm->lock);
    if (status == TN_OK) *out = found;
    return status;
}

/* Everything that one call needs to know before it launches anything. */
typedef struct preparation {
    tn__cuda_context *context;
    tn__cuda_gemm *gemm;
    const plan *plan;
    layout layout;
} preparation;

static tn_status prepare(tn_device *device, const tn__gemm_work *work, preparation *out) {
    TN_TRY(tn__cuda_context_of(device, &out->context));
    TN_TRY(require_supported(work));
    TN_TRY(gemm_of(out->context, &out->gemm));
    TN_TRY(out->context->driver->make_current(out->context->state));
    out->layout = layout_of(work);
    TN_TRY(plan_of(out->gemm, &out->layout.shape, work, &out->plan));
    if (out->plan->workspace_bytes > 0)
        out->layout.workspace = take(&out->layout, (int64_t)out->plan->workspace_bytes);
    return TN_OK;
}

tn_status tn__cuda_gemm_scratch_bytes(tn_device *device, const tn__gemm_work *work, size_t *out) {
    preparation prepared;
    TN_TRY(prepare(device, work, &prepared));
    *out = prepared.layout.bytes;
    return TN_OK;
}

/* ---- the launch --------------------------------------------------------------------------- */

static void *in_scratch(const tn__gemm_work *work, const piece *of) {
    return (unsigned char *)work->scratch + of->offset;
}

/* Copies rows x row_bytes into the piece, whose rows are dst_row_bytes, and zeros around it. */
static tn_status pad(const preparation *by, const tn__gemm_work *work, const piece *into,
                     const void *src, int64_t rows, int64_t row_bytes, int64_t src_stride_bytes,
                     int64_t dst_row_bytes, tn_stream stream) {
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
static tn_status place_operand(const preparation *by, const tn__gemm_work *work,
                               const tn__operand *operand, const piece *data, const piece *scale,
                               int64_t padded_rows, tn_stream stream, const void **data_out,
                               const float **scale_out) {
    int64_t blocks = (work->contracted + TN__TILE - 1) / TN__TILE;
    int64_t float_bytes = (int64_t)sizeof(float);
    *data_out = operand->data;
    *scale_out = operand->scale;
    if (data->bytes > 0) {
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

/* Takes the first algorithm that runs: what the heuristic offers may still be refused. */
static cublasStatus_t multiply(const preparation *by, const tn__gemm_work *work,
                               const tn__blas_product *product, const void *a, const void *b,
                               void *d, tn_stream stream) {
    const layout *of = &by->layout;
    const float alpha = 1.0f, beta = of->shape.has_beta ? 1.0f : 0.0f;
    void *workspace = of->workspace.bytes > 0 ? in_scratch(work, &of->workspace) : NULL;
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    for (int i = 0; i < by->plan->count && status != CUBLAS_STATUS_SUCCESS; i++) {
        const cublasLtMatmulHeuristicResult_t *found = &by->plan->found[i];
        if (found->state != CUBLAS_STATUS_SUCCESS) continue;
        if (found->workspaceSize > of->workspace.bytes) continue;
        status =
            by->gemm->blas->Matmul(by->gemm->handle, product->operation, &alpha, b, product->a, a,
                                   product->b, &beta, d, product->d, d, product->d, &found->algo,
                                   workspace, of->workspace.bytes, (cudaStream_t)stream);
    }
    return status;
}

/* The words are made only for a failure: they would be a good part of a call's time. */
static tn_status product_status(const preparation *by, cublasStatus_t status) {
    char text[TN__BLAS_TEXT_BYTES];
    if (status == CUBLAS_STATUS_SUCCESS) return TN_OK;
    tn__blas_shape_text(&by->layout.shape, text);
    return tn__blas_status(by->gemm->blas, status, "Matmul", text);
}

static tn_status finish(const preparation *by, const tn__gemm_work *work, tn_stream stream) {
    const layout *of = &by->layout;
    const tn__matrix *d = &work->d;
    int64_t across = (d->cols + TN__FINISH_ELEMENTS - 1) / TN__FINISH_ELEMENTS;
    tn__cuda_finish_arguments argument = {.src = in_scratch(work, &of->d),
                                          .dst = d->data,
                                          .rows = d->rows,
                                          .cols = d->cols,
                                          .src_stride = of->shape.cols,
                                          .blocks_across = (uint32_t)across,
                                          .accumulate = work->accumulate};
    return tn__kernel_launch(by->context,
                             tn__kernel_of_pair(TN__KERNEL_FINISH, of->shape.d, d->dtype),
                             d->rows * across, TN__FLAT_THREADS, &argument, stream);
}

static tn_status require_memory(const preparation *by, const tn__gemm_work *work) {
    uintptr_t all = (uintptr_t)work->a.data | (uintptr_t)work->b.data | (uintptr_t)work->d.data |
                    (uintptr_t)work->a.scale | (uintptr_t)work->b.scale;
    TN_REQUIRE(work->scratch_bytes >= by->layout.bytes,
               "gemm got %zu bytes of scratch and needs %zu", work->scratch_bytes,
               by->layout.bytes);
    TN_REQUIRE(all % POINTER_ALIGNMENT == 0, "an operand of gemm is not aligned to %d bytes",
               POINTER_ALIGNMENT);
    return TN_OK;
}

tn_status tn__cuda_gemm_run(tn_device *device, const tn__gemm_work *work, tn_stream stream) {
    preparation by;
    tn__blas_product product;
    const void *a, *b;
    const float *a_scale, *b_scale;
    TN_TRY(prepare(device, work, &by));
    TN_TRY(require_memory(&by, work));
    const layout *of = &by.layout;
    TN_TRY(place_operand(&by, work, &work->a, &of->a, &of->a_scale, of->shape.rows, stream, &a,
                         &a_scale));
    TN_TRY(place_operand(&by, work, &work->b, &of->b, &of->b_scale, of->shape.cols, stream, &b,
                         &b_scale));
    TN_TRY(tn__blas_product_make(by.gemm->blas, &of->shape, a_scale, b_scale, &product));
    void *d = of->d.bytes > 0 ? in_scratch(work, &of->d) : work->d.data;
    tn_status status = product_status(&by, multiply(&by, work, &product, a, b, d, stream));
    tn__blas_product_end(by.gemm->blas, &product);
    if (status == TN_OK && of->d.bytes > 0) status = finish(&by, work, stream);
    return status;
}
