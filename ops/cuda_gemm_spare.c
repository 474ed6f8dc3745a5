/* Products that leave multiprocessors to what runs beside them: the derivation of the plane that
 * the next one reads.
 *
 * Product and derivation go together without cost where both of this holds:
 *
 * - The product's tiles take as many rounds on fewer multiprocessors: 1024 tiles of 128 x 128 take
 *   8 on 132, and 8 on 128. Then those are idle for the length of the whole product.
 * - The derivation is done before the product is, on them alone: they move about 80 GB/s each
 *   beside one. Afterwards it would take memory from work that is bound by it.
 *
 * A product's blocks go in pairs of neighbours, and do not fit around single multiprocessors that
 * are taken: so they are spared two by two (tn__kernel_launch_narrow). Those of our own product go
 * so where it spares some: else the derivation finds few pairs and waits for the product's end,
 * which on an H200 made a layer's step 3.4 % longer. cuBLASLt keeps to a number of multiprocessors
 * that its descriptor says; that is a plan of its own, which is never tuned: it takes the
 * algorithm that is chosen for the product alone, so that what runs beside it changes no bit. A
 * variation that tuning has chosen and cuBLASLt does not offer by itself is put to the offers of
 * that plan; if cuBLASLt does not take it there, no multiprocessor is spared.
 */
#include "cuda_gemm.h"

/* What one multiprocessor moves, read and written, beside a product; FLOP/s of one that was not
 * timed. As measured on an H200; both are on the low side. */
static const double bytes_per_second = 80e9;
static const double flop_per_second = 1.2e15;

enum { SPARED_STEP = TN__NARROW_CLUSTER, SPARED_PART_MAX = 16 /* of all: a sixteenth */ };

/* ---- the same algorithm ---------------------------------------------------------------------- */

static int are_alike(const tn__blas *blas, const tn__gemm_candidate *x,
                     const tn__gemm_candidate *y) {
    static const cublasLtMatmulAlgoConfigAttributes_t all[] = {
        CUBLASLT_ALGO_CONFIG_ID,
        CUBLASLT_ALGO_CONFIG_TILE_ID,
        CUBLASLT_ALGO_CONFIG_STAGES_ID,
        CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
        CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
        CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
        CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
        CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,
        CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID};
    if (tn__gemm_is_own(&x->algorithm) || tn__gemm_is_own(&y->algorithm))
        return tn__gemm_is_algorithm(x, &y->algorithm);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (tn__gemm_attribute(blas, &x->algorithm, all[i]) !=
            tn__gemm_attribute(blas, &y->algorithm, all[i]))
            return 0;
    return x->workspace_bytes >= y->workspace_bytes;
}

/* Of the other plan, in the place of the candidate that was chosen; -1: there is none. */
static int find_alike(const tn__blas *blas, const tn__gemm_candidate *chosen,
                      const tn__gemm_plan *plan) {
    for (int i = 0; i < plan->count; i++)
        if (are_alike(blas, chosen, &plan->candidates[i])) return i;
    return -1;
}

static int is_refused(tn__cuda_gemm *gemm, const tn__gemm_plan *plan,
                      const tn__gemm_candidate *chosen) {
    pthread_mutex_lock(&gemm->lock);
    const int refused = plan->has_refused && tn__gemm_is_algorithm(chosen, &plan->refused);
    pthread_mutex_unlock(&gemm->lock);
    return refused;
}

static void refuse(tn__cuda_gemm *gemm, tn__gemm_plan *plan, const tn__gemm_candidate *chosen) {
    pthread_mutex_lock(&gemm->lock);
    plan->has_refused = 1;
    plan->refused = chosen->algorithm;
    pthread_mutex_unlock(&gemm->lock);
}

/* Puts a plan that has the chosen candidate, too, in the place of that one. It is not measured, and
 * so goes into no file. */
static void extend(tn__cuda_gemm *gemm, tn__gemm_plan *plan, const tn__gemm_candidate *chosen) {
    tn__gemm_plan *made;
    if (is_refused(gemm, plan, chosen)) return;
    if (tn__gemm_plan_make(gemm, &plan->shape, chosen, 0, &made) != TN_OK) {
        refuse(gemm, plan, chosen);
        return;
    }
    made->is_measured = 0;
    if (find_alike(gemm->blas, chosen, made) < 0) { /* it wants more memory than it does alone */
        refuse(gemm, plan, chosen);
        tn__gemm_plan_end(gemm, made);
        return;
    }
    tn__gemm_plan_put(gemm, made);
}

/* Takes a plan of the shape that has the candidate; TN_OK, and no place, if there is none. */
static tn_status acquire_with(tn__cuda_gemm *gemm, const tn__blas_shape *shape,
                              const tn__gemm_candidate *chosen, tn__gemm_plan **out, int *place) {
    int unused;
    TN_TRY(tn__gemm_plan_acquire(gemm, shape, out, &unused));
    *place = find_alike(gemm->blas, chosen, *out);
    if (*place >= 0) return TN_OK;
    extend(gemm, *out, chosen);
    tn__gemm_plan_release(gemm, *out);
    TN_TRY(tn__gemm_plan_acquire(gemm, shape, out, &unused));
    *place = find_alike(gemm->blas, chosen, *out);
    return TN_OK;
}

int tn__gemm_spare(tn__gemm_preparation *prepared, int spared) {
    const tn__gemm_candidate *chosen = &prepared->plan->candidates[prepared->chosen];
    tn__blas_shape shape = prepared->layout.shape;
    tn__gemm_plan *plan;
    int place;
    tn__saved_error error;
    shape.processors = prepared->context->multiprocessors - spared;
    if (shape.processors <= 0) return 0;
    tn__error_save(&error);
    tn_status status = acquire_with(prepared->gemm, &shape, chosen, &plan, &place);
    tn__error_restore(&error);
    if (status != TN_OK) return 0;
    if (place < 0) {
        tn__gemm_plan_release(prepared->gemm, plan);
        return 0;
    }
    tn__gemm_plan_release(prepared->gemm, prepared->plan);
    prepared->plan = plan;
    prepared->chosen = place;
    return 1;
}

/* ---- how many -------------------------------------------------------------------------------- */

/* The tiles of the chosen algorithm; 0: cuBLASLt's, and others than 128 x 128. */
static int64_t tiles_of(const tn__gemm_preparation *by) {
    const cublasLtMatmulAlgo_t *algorithm = &by->plan->candidates[by->chosen].algorithm;
    const tn__blas_shape *shape = &by->layout.shape;
    if (tn__gemm_is_own(algorithm)) return tn__gemm_own_tiles(shape);
    if (tn__gemm_attribute(by->gemm->blas, algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID) !=
        CUBLASLT_MATMUL_TILE_128x128)
        return 0;
    return (shape->rows + 127) / 128 * ((shape->cols + 127) / 128);
}

static double seconds_of(const tn__gemm_preparation *by) {
    const tn__blas_shape *shape = &by->layout.shape;
    return 2.0 * (double)shape->rows * (double)shape->cols * (double)shape->contracted /
           flop_per_second;
}

static int64_t rounds(int64_t tiles, int processors) {
    return (tiles + processors - 1) / processors;
}

/* The fewest on which the derivation is done in time, if the product can do without them. */
static int spared_by(const tn__gemm_preparation *by, size_t plane_bytes) {
    const int all = by->context->multiprocessors;
    const int64_t tiles = tiles_of(by);
    const double moved = 2.0 * (double)plane_bytes;
    int spared = SPARED_STEP;
    if (tiles == 0) return 0;
    while (spared <= all / SPARED_PART_MAX && moved > spared * bytes_per_second * seconds_of(by))
        spared += SPARED_STEP;
    if (spared > all / SPARED_PART_MAX) return 0;
    return rounds(tiles, all - spared) == rounds(tiles, all) ? spared : 0;
}

int tn__cuda_gemm_spares(tn_device *device, const tn__gemm_work *work, size_t plane_bytes) {
    tn__gemm_preparation by;
    tn__saved_error error;
    int spared = 0;
    tn__error_save(&error);
    if (tn__gemm_prepare(device, work, &by) != TN_OK) { /* the launch will say so */
        tn__error_restore(&error);
        return 0;
    }
    if (by.context->multiprocessors > 0 && work->algorithm == 0)
        spared = spared_by(&by, plane_bytes);
    if (spared > 0 && !tn__gemm_spare(&by, spared)) spared = 0;
    tn__gemm_unprepare(&by);
    return spared;
}
