/* GEMM on CUDA, between its files: what a shape is run with, and what a call prepares.
 *
 *     cuda_gemm.c         what a call needs of scratch, padded copies, the launch
 *     cuda_gemm_plans.c   the plans of a device: made, found, given up
 *     cuda_gemm_offers.c  what cuBLASLt offers for a shape
 *     cuda_gemm_tune.c    timing what is offered for a shape
 *     cuda_gemm_file.c    the choices of a device as text, and back
 *     cuda_gemm_spare.c   a product that leaves multiprocessors to what runs beside it
 *     cuda_gemm_own.c     our own product among the offers
 *
 * A plan has the descriptors of a shape, made once, and what is offered for it (candidates), first
 * what cuBLASLt's heuristic offers, in its order. One of them is chosen: the first, until the shape
 * has been tuned or a choice has been loaded. To be tuned a shape gets a wide plan, of more offers.
 *
 * Invariants:
 * - A device keeps at most TN__GEMM_PLANS_MAX plans that nobody uses. The one whose last use is
 *   longest ago goes first, of those that were not measured before those that were.
 * - A plan that is acquired stays until it is released. Its candidates do not change but for their
 *   times; those, and which is chosen, change under the lock of the device's plans.
 * - A plan without candidates says that cuBLASLt does not add the bias of such a product.
 * - Descriptors hold the addresses of scales: who sets them keeps the plan's lock until cuBLASLt
 *   has been called.
 */
#ifndef TENURE_CUDA_GEMM_H
#define TENURE_CUDA_GEMM_H

#include "cuda_blas.h"

#include <pthread.h>
#include <stdio.h>

enum { TN__GEMM_PLANS_MAX = 1024, TN__GEMM_ALIGNMENT = 512 };
/* Offers of the heuristic in one call; of all that a shape is tuned with. */
enum { TN__GEMM_OFFERS_MAX = 32, TN__GEMM_CANDIDATES_MAX = 96 };

typedef struct tn__gemm_candidate {
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace_bytes;
    double us; /* of one product as measured; 0: not measured; less: refused to run */
} tn__gemm_candidate;

typedef struct tn__gemm_plan {
    struct tn__gemm_plan *next; /* of the same bucket */
    tn__blas_shape shape;
    tn__blas_product product;
    pthread_mutex_t lock; /* of what `product` says of scales */
    int users;
    int is_replaced; /* no longer in the table: ends with its last user */
    uint64_t last_use;
    int is_measured;       /* chosen by its time, here or where the file was written */
    int is_wide;           /* has all offers that there are */
    tn_gemm_engine engine; /* that was measured to be faster than all of them; AUTO: none */
    int has_refused;       /* for a part of the multiprocessors: `refused` is none of them, and */
    cublasLtMatmulAlgo_t refused; /* can not be one */
    int chosen;
    int count;
    tn__gemm_candidate candidates[];
} tn__gemm_plan;

struct tn__cuda_gemm {
    const tn__blas *blas;
    cublasLtHandle_t handle;
    int own_processors;   /* multiprocessors for our own product; 0: it does not run here */
    pthread_mutex_t lock; /* of all that follows */
    tn__gemm_plan *buckets[TN__GEMM_PLANS_MAX];
    int count;
    uint64_t uses;
};

/* ---- plans ---------------------------------------------------------------------------------- */

/* cuBLASLt's state for a device, made at its first GEMM. */
tn_status tn__gemm_of(tn__cuda_context *context, tn__cuda_gemm **out);

/* The plan of a shape, made if there is none, and which of its candidates is chosen. */
tn_status tn__gemm_plan_acquire(tn__cuda_gemm *gemm, const tn__blas_shape *shape,
                                tn__gemm_plan **out, int *chosen);
void tn__gemm_plan_release(tn__cuda_gemm *gemm, tn__gemm_plan *plan);

/* A plan that is not in the table yet; `also` is offered behind the others if it is not among them
 * and cuBLASLt says that it runs (NULL: nothing), and chosen. */
tn_status tn__gemm_plan_make(const tn__cuda_gemm *gemm, const tn__blas_shape *shape,
                             const tn__gemm_candidate *also, int is_wide, tn__gemm_plan **out);
/* Sees to it that the shape's plan is a wide one; what is chosen by its time stays chosen. */
tn_status tn__gemm_plan_widen(tn__cuda_gemm *gemm, const tn__blas_shape *shape);
/* Puts it into the table in the place of the one that is there. */
void tn__gemm_plan_put(tn__cuda_gemm *gemm, tn__gemm_plan *plan);
void tn__gemm_plan_end(const tn__cuda_gemm *gemm, tn__gemm_plan *plan);

/* What all candidates together may ask for: the largest workspace. */
size_t tn__gemm_plan_workspace(const tn__gemm_plan *plan);

/* ---- offers --------------------------------------------------------------------------------- */

typedef struct tn__gemm_offers {
    tn__gemm_candidate found[TN__GEMM_CANDIDATES_MAX];
    int count;
} tn__gemm_offers;

/* NOT_SUPPORTED if there is none. */
cublasStatus_t tn__gemm_offers_get(const tn__cuda_gemm *gemm, const tn__blas_product *product,
                                   const tn__blas_shape *shape, int is_wide,
                                   tn__gemm_offers *offers);
/* Whether cuBLASLt takes the algorithm for the shape, within the bound of workspaces. */
cublasStatus_t tn__gemm_offer_check(const tn__cuda_gemm *gemm, const tn__blas_product *product,
                                    const tn__blas_shape *shape,
                                    const cublasLtMatmulAlgo_t *algorithm, size_t *workspace_bytes);
/* One of the numbers that make an algorithm what it is; 0 if it has not such a one. */
uint32_t tn__gemm_attribute(const tn__blas *blas, const cublasLtMatmulAlgo_t *algorithm,
                            cublasLtMatmulAlgoConfigAttributes_t which);
int tn__gemm_is_algorithm(const tn__gemm_candidate *candidate, const cublasLtMatmulAlgo_t *algo);

/* ---- our own product (cuda_gemm_own.c) ------------------------------------------------------ */

/* What stands for it among the algorithms. */
const cublasLtMatmulAlgo_t *tn__gemm_own(void);
int tn__gemm_is_own(const cublasLtMatmulAlgo_t *algorithm);
/* Or of another version of it, which a file may hold. */
int tn__gemm_is_of_ours(const cublasLtMatmulAlgo_t *algorithm);
int tn__gemm_own_takes(const tn__cuda_gemm *gemm, const tn__blas_shape *shape);
int64_t tn__gemm_own_tiles(const tn__blas_shape *shape);

/* ---- a call --------------------------------------------------------------------------------- */

/* Copies around the product; offsets into scratch, bytes 0 where there is no copy. */
typedef struct tn__gemm_piece {
    size_t offset;
    size_t bytes;
} tn__gemm_piece;

typedef struct tn__gemm_layout {
    tn__blas_shape shape; /* as cuBLASLt sees it: padded */
    tn__gemm_piece a, a_scale, b, b_scale, bias, d;
    size_t bytes; /* of the pieces: the workspace begins there */
} tn__gemm_layout;

/* Everything that one call needs to know before it launches anything. */
typedef struct tn__gemm_preparation {
    tn__cuda_context *context;
    tn__cuda_gemm *gemm;
    tn__gemm_plan *plan; /* acquired */
    int chosen;          /* of its candidates: the pinned one, if one is */
    tn__gemm_layout layout;
} tn__gemm_preparation;

tn_status tn__gemm_prepare(tn_device *device, const tn__gemm_work *work, tn__gemm_preparation *out);
void tn__gemm_unprepare(tn__gemm_preparation *prepared);

/* The product without that many multiprocessors, by the same algorithm, in the place of what was
 * prepared. 0 if cuBLASLt has no such thing; then all stays as it is. */
int tn__gemm_spare(tn__gemm_preparation *prepared, int spared);

/* What cuBLASLt gets: the caller's memory, or padded copies of it, which are put on the stream. */
typedef struct tn__gemm_placed {
    const void *a, *b;
    tn__blas_addresses addresses;
    void *d;
} tn__gemm_placed;

tn_status tn__gemm_place(const tn__gemm_preparation *by, const tn__gemm_work *work,
                         tn_stream stream, tn__gemm_placed *out);

/* Puts the product on the stream by one candidate; NOT_SUPPORTED without enough workspace. */
cublasStatus_t tn__gemm_multiply(const tn__gemm_preparation *by, const tn__gemm_work *work,
                                 const tn__gemm_placed *placed, int candidate, tn_stream stream);

/* The same by our own, which the shape's plan must have; it needs no scratch. */
tn_status tn__gemm_own_multiply(const tn__gemm_preparation *by, const tn__gemm_placed *placed,
                                tn_stream stream);

#endif
