/* What cuBLASLt offers for a shape.
 *
 * Its heuristic, best first as it estimates: the only offers of a shape that nobody tunes. For one
 * that is tuned also what the heuristic says to smaller workspaces, and what becomes of its first
 * offers with another tile, cluster or order of blocks, as far as cuBLASLt's own check lets it: the
 * heuristic offers one algorithm for 1x128 by 128x128 scales, though more than one runs. The places
 * of the first offers are the same for both, and so is that of our own product, behind them, where
 * it takes the shape (cuda_gemm_own.c), also where cuBLASLt has nothing to offer for it.
 *
 * The workspace that an algorithm may ask for is what 8 fp32 copies of d take, but 1 MiB at least
 * and 32 MiB at most: the partial sums of a split contraction are such copies, and a small product
 * must not be the one that a step's peak of memory comes from. They are summed in fp32: a scheme
 * that rounds them to D's type in between is not asked for.
 */
#include "cuda_gemm.h"

#include <string.h>

enum { POINTER_ALIGNMENT = 16, WORKSPACE_COPIES = 8, VARIED_MAX = 2, TILES_MAX = 128 };

static const int64_t workspace_bytes_min = (int64_t)1 << 20;
static const int64_t workspace_bytes_max = (int64_t)32 << 20;

static size_t workspace_limit(const tn__blas_shape *shape) {
    int64_t copies_max = workspace_bytes_max / (WORKSPACE_COPIES * (int64_t)sizeof(float));
    if (shape->rows > copies_max / shape->cols) return (size_t)workspace_bytes_max;
    int64_t bytes = shape->rows * shape->cols * WORKSPACE_COPIES * (int64_t)sizeof(float);
    return (size_t)(bytes < workspace_bytes_min ? workspace_bytes_min : bytes);
}

/* ---- the list ------------------------------------------------------------------------------- */

int tn__gemm_is_algorithm(const tn__gemm_candidate *candidate, const cublasLtMatmulAlgo_t *algo) {
    return memcmp(&candidate->algorithm, algo, sizeof *algo) == 0;
}

/* Once each, as long as there is room. */
static void put(tn__gemm_offers *offers, const cublasLtMatmulAlgo_t *algorithm,
                size_t workspace_bytes) {
    for (int i = 0; i < offers->count; i++)
        if (tn__gemm_is_algorithm(&offers->found[i], algorithm)) return;
    if (offers->count == TN__GEMM_CANDIDATES_MAX) return;
    offers->found[offers->count++] = (tn__gemm_candidate){*algorithm, workspace_bytes, 0.0};
}

/* ---- the heuristic -------------------------------------------------------------------------- */

static cublasStatus_t set_preferences(const tn__blas *blas, cublasLtMatmulPreference_t preference,
                                      size_t workspace_bytes) {
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    uint32_t alignment = POINTER_ALIGNMENT;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasStatus_t status =
        blas->MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &workspace_bytes, sizeof workspace_bytes);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = blas->MatmulPreferenceSetAttribute(
            preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions);
    for (int i = 0; i < 4 && status == CUBLAS_STATUS_SUCCESS; i++)
        status = blas->MatmulPreferenceSetAttribute(preference, alignments[i], &alignment,
                                                    sizeof alignment);
    return status;
}

static cublasStatus_t ask_heuristic(const tn__cuda_gemm *gemm, const tn__blas_product *product,
                                    size_t workspace_bytes, tn__gemm_offers *offers) {
    const tn__blas *blas = gemm->blas;
    cublasLtMatmulHeuristicResult_t found[TN__GEMM_OFFERS_MAX];
    cublasLtMatmulPreference_t preference = NULL;
    int count = 0;
    cublasStatus_t status = blas->MatmulPreferenceCreate(&preference);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    status = set_preferences(blas, preference, workspace_bytes);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = blas->MatmulAlgoGetHeuristic(gemm->handle, product->operation, product->a,
                                              product->b, product->d, product->d, preference,
                                              TN__GEMM_OFFERS_MAX, found, &count);
    (void)blas->MatmulPreferenceDestroy(preference);
    if (status == CUBLAS_STATUS_SUCCESS && count == 0) status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (status == CUBLAS_STATUS_SUCCESS) status = found[0].state;
    for (int i = 0; i < count && status == CUBLAS_STATUS_SUCCESS; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS)
            put(offers, &found[i].algo, found[i].workspaceSize);
    return status;
}

/* ---- variations ----------------------------------------------------------------------------- */

cublasStatus_t tn__gemm_offer_check(const tn__cuda_gemm *gemm, const tn__blas_product *product,
                                    const tn__blas_shape *shape,
                                    const cublasLtMatmulAlgo_t *algorithm,
                                    size_t *workspace_bytes) {
    cublasLtMatmulHeuristicResult_t checked;
    if (tn__gemm_is_of_ours(algorithm)) {
        *workspace_bytes = 0;
        return tn__gemm_is_own(algorithm) && tn__gemm_own_takes(gemm, shape)
                   ? CUBLAS_STATUS_SUCCESS
                   : CUBLAS_STATUS_NOT_SUPPORTED;
    }
    memset(&checked, 0, sizeof checked);
    cublasStatus_t status =
        gemm->blas->MatmulAlgoCheck(gemm->handle, product->operation, product->a, product->b,
                                    product->d, product->d, algorithm, &checked);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (checked.workspaceSize > workspace_limit(shape)) return CUBLAS_STATUS_NOT_SUPPORTED;
    *workspace_bytes = checked.workspaceSize;
    return CUBLAS_STATUS_SUCCESS;
}

uint32_t tn__gemm_attribute(const tn__blas *blas, const cublasLtMatmulAlgo_t *algorithm,
                            cublasLtMatmulAlgoConfigAttributes_t which) {
    const int is_short = which == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID ||
                         which == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID;
    uint32_t value = 0;
    uint16_t narrow = 0;
    size_t written = 0;
    if (is_short) {
        (void)blas->MatmulAlgoConfigGetAttribute(algorithm, which, &narrow, sizeof narrow,
                                                 &written);
        return narrow;
    }
    (void)blas->MatmulAlgoConfigGetAttribute(algorithm, which, &value, sizeof value, &written);
    return value;
}

/* What all offers of a shape differ in. */
typedef struct variation {
    uint32_t tile;
    uint16_t cluster;
    uint32_t swizzle;
} variation;

static cublasStatus_t vary(const tn__blas *blas, const variation *with,
                           cublasLtMatmulAlgo_t *algorithm) {
    cublasStatus_t status = blas->MatmulAlgoConfigSetAttribute(
        algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &with->tile, sizeof with->tile);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = blas->MatmulAlgoConfigSetAttribute(
            algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &with->cluster, sizeof with->cluster);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = blas->MatmulAlgoConfigSetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
                                                    &with->swizzle, sizeof with->swizzle);
    return status;
}

/* Tiles that the algorithm has; 0 if it does not say. */
static int tiles_of(const tn__blas *blas, const cublasLtMatmulAlgo_t *algorithm,
                    uint32_t tiles[TILES_MAX]) {
    size_t bytes = 0;
    cublasStatus_t status = blas->MatmulAlgoCapGetAttribute(
        algorithm, CUBLASLT_ALGO_CAP_TILE_IDS, tiles, TILES_MAX * sizeof *tiles, &bytes);
    if (status != CUBLAS_STATUS_SUCCESS || bytes > TILES_MAX * sizeof *tiles) return 0;
    return (int)(bytes / sizeof *tiles);
}

/* All variations with the tile, the offer itself among them. */
static void vary_tile(const tn__cuda_gemm *gemm, const tn__blas_product *product,
                      const tn__blas_shape *shape, cublasLtMatmulAlgo_t base, uint32_t tile,
                      tn__gemm_offers *offers) {
    static const uint16_t clusters[] = {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1,
                                        CUBLASLT_CLUSTER_SHAPE_1x2x1, CUBLASLT_CLUSTER_SHAPE_2x2x1,
                                        CUBLASLT_CLUSTER_SHAPE_4x1x1, CUBLASLT_CLUSTER_SHAPE_1x4x1};
    enum { CLUSTERS = sizeof clusters / sizeof *clusters };
    for (int i = 0; i < 2 * CLUSTERS; i++) {
        const variation with = {tile, clusters[i / 2], (uint32_t)(i % 2)};
        cublasLtMatmulAlgo_t algorithm = base;
        size_t workspace_bytes = 0;
        if (vary(gemm->blas, &with, &algorithm) != CUBLAS_STATUS_SUCCESS) continue;
        if (tn__gemm_offer_check(gemm, product, shape, &algorithm, &workspace_bytes) ==
            CUBLAS_STATUS_SUCCESS)
            put(offers, &algorithm, workspace_bytes);
    }
}

static void vary_offer(const tn__cuda_gemm *gemm, const tn__blas_product *product,
                       const tn__blas_shape *shape, cublasLtMatmulAlgo_t base,
                       tn__gemm_offers *offers) {
    uint32_t tiles[TILES_MAX];
    uint32_t own = 0;
    size_t written = 0;
    if (gemm->blas->MatmulAlgoConfigGetAttribute(&base, CUBLASLT_ALGO_CONFIG_TILE_ID, &own,
                                                 sizeof own, &written) != CUBLAS_STATUS_SUCCESS)
        return;
    vary_tile(gemm, product, shape, base, own, offers);
    int count = tiles_of(gemm->blas, &base, tiles);
    for (int i = 0; i < count; i++)
        if (tiles[i] != own) vary_tile(gemm, product, shape, base, tiles[i], offers);
}

cublasStatus_t tn__gemm_offers_get(const tn__cuda_gemm *gemm, const tn__blas_product *product,
                                   const tn__blas_shape *shape, int is_wide,
                                   tn__gemm_offers *offers) {
    const size_t limit = workspace_limit(shape);
    const int is_ours_too = tn__gemm_own_takes(gemm, shape);
    offers->count = 0;
    const cublasStatus_t status = ask_heuristic(gemm, product, limit, offers);
    const int is_only_ours = is_ours_too && status == CUBLAS_STATUS_NOT_SUPPORTED;
    if (status != CUBLAS_STATUS_SUCCESS && !is_only_ours) return status;
    const int asked = offers->count;
    if (is_ours_too) put(offers, tn__gemm_own(), 0);
    if (!is_wide) return CUBLAS_STATUS_SUCCESS;
    (void)ask_heuristic(gemm, product, limit / 8, offers);
    (void)ask_heuristic(gemm, product, 0, offers);
    for (int i = 0; i < asked && i < VARIED_MAX; i++)
        vary_offer(gemm, product, shape, offers->found[i].algorithm, offers);
    return CUBLAS_STATUS_SUCCESS;
}
