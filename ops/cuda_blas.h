/* cuBLASLt, opened at run time: a program without GEMMs on a GPU does not need it.
 *
 * Loaded once a process and never unloaded (it registers its own exit handlers); its symbols stay
 * out of the program's way (RTLD_LOCAL). Types are those of the toolkit's cublasLt.h.
 */
#ifndef TENURE_CUDA_BLAS_H
#define TENURE_CUDA_BLAS_H

#include <cublasLt.h>

#include "cuda_module.h"

/* X(name): each is cublasLt<name> in the library. */
#define TN__BLAS_CALLS(X)                                                                          \
    X(Create)                                                                                      \
    X(Destroy)                                                                                     \
    X(GetStatusName)                                                                               \
    X(GetVersion)                                                                                  \
    X(Matmul)                                                                                      \
    X(MatmulAlgoCapGetAttribute)                                                                   \
    X(MatmulAlgoCheck)                                                                             \
    X(MatmulAlgoConfigGetAttribute)                                                                \
    X(MatmulAlgoConfigSetAttribute)                                                                \
    X(MatmulAlgoGetHeuristic)                                                                      \
    X(MatmulDescCreate)                                                                            \
    X(MatmulDescDestroy)                                                                           \
    X(MatmulDescSetAttribute)                                                                      \
    X(MatmulPreferenceCreate)                                                                      \
    X(MatmulPreferenceDestroy)                                                                     \
    X(MatmulPreferenceSetAttribute)                                                                \
    X(MatrixLayoutCreate)                                                                          \
    X(MatrixLayoutDestroy)

typedef struct tn__blas {
#define TN__BLAS_MEMBER(name) __typeof__(&cublasLt##name) name;
    TN__BLAS_CALLS(TN__BLAS_MEMBER)
#undef TN__BLAS_MEMBER
} tn__blas;

/* TN_UNSUPPORTED if the library, or one of the calls, is not found: the text says what to do. */
tn_status tn__blas_get(const tn__blas **out);

/* The status of a cuBLASLt call as ours: NOT_SUPPORTED is TN_UNSUPPORTED. */
tn_status tn__blas_status(const tn__blas *blas, cublasStatus_t status, const char *call,
                          const char *what);

/* ---- one matrix product as cuBLASLt sees it ------------------------------------------------- */

/* How one operand is handed over: stored `outer` x `inner`, contiguous in inner. */
typedef struct tn__blas_operand {
    tn__operand_kind kind;
    tn_dtype dtype;
    int is_transposed; /* stored [contracted, rows] */
} tn__blas_operand;

/* Row-major d [rows, cols] = a [rows, contracted] b [cols, contracted]^T: what decides on an
 * algorithm, and nothing else (so that it is the key of the cache). No padding bytes matter:
 * compared member by member. */
typedef struct tn__blas_shape {
    int64_t rows;
    int64_t cols;
    int64_t contracted;
    tn__blas_operand a;
    tn__blas_operand b;
    tn_dtype d;
    int has_beta;   /* beta is 1, else 0 */
    int has_bias;   /* of d's type, one for each column */
    int processors; /* multiprocessors that it may take; 0: all */
} tn__blas_shape;

/* The descriptors of one product; all NULL, or as many as were made before a failure. */
typedef struct tn__blas_product {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a; /* cuBLASLt's A: our b */
    cublasLtMatrixLayout_t b;
    cublasLtMatrixLayout_t d;
} tn__blas_product;

tn_status tn__blas_product_make(const tn__blas *blas, const tn__blas_shape *shape,
                                tn__blas_product *product);
/* Where a call's scales and bias are: what descriptors that are kept must be told each time. */
typedef struct tn__blas_addresses {
    const float *a_scale, *b_scale;
    const void *bias;
} tn__blas_addresses;
cublasStatus_t tn__blas_product_address(const tn__blas *blas, const tn__blas_shape *shape,
                                        const tn__blas_addresses *addresses,
                                        const tn__blas_product *product);
void tn__blas_product_end(const tn__blas *blas, tn__blas_product *product);

/* "E4M3 (1x128) by E4M3 (128x128) in bf16, rows 100, ..." for messages. */
enum { TN__BLAS_TEXT_BYTES = 160 };
void tn__blas_shape_text(const tn__blas_shape *shape, char text[TN__BLAS_TEXT_BYTES]);

#endif
