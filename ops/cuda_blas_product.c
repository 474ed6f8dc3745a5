/* The descriptors of one product for cuBLASLt, and its statuses in our words.
 *
 * cuBLASLt is column-major. Our row-major d [rows, cols] is its D, cols x rows with leading
 * dimension cols, so its A is our b (transposed if b is stored by rows) and its B is our a:
 *
 *     D (cols x rows) = op(A) (cols x contracted)  op(B) (contracted x rows)
 *
 * An operand that is stored [r, contracted] is for cuBLASLt a contracted x r matrix with leading
 * dimension contracted. For FP8 that is the only form that Hopper has (A transposed, B not).
 *
 * They are made once for a shape and kept: all that changes from call to call is where the scales
 * and the bias are.
 */
#include "cuda_blas.h"

#include <stdio.h>

tn_status tn__blas_status(const tn__blas *blas, cublasStatus_t status, const char *call,
                          const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return TN_OK;
    tn_status ours = status == CUBLAS_STATUS_NOT_SUPPORTED ? TN_UNSUPPORTED : TN_DRIVER_ERROR;
    return TN_FAIL_NATIVE(ours, (int)status, "cublasLt%s: %s (%d) for %s", call,
                          blas->GetStatusName(status), (int)status, what);
}

static cudaDataType_t data_type(tn_dtype dtype) {
    switch (dtype) {
    case TN_BF16: return CUDA_R_16BF;
    case TN_FP16: return CUDA_R_16F;
    case TN_E4M3: return CUDA_R_8F_E4M3;
    case TN_E5M2: return CUDA_R_8F_E5M2;
    default: return CUDA_R_32F;
    }
}

static const char *kind_name(tn__operand_kind kind) {
    static const char *const names[] = {"plain", "1x128", "128x128", "tensor"};
    return names[kind];
}

void tn__blas_shape_text(const tn__blas_shape *shape, char text[TN__BLAS_TEXT_BYTES]) {
    snprintf(text, TN__BLAS_TEXT_BYTES,
             "%s (%s) by %s (%s) in %s%s, rows %lld, columns %lld, contracted %lld",
             tn_dtype_name(shape->a.dtype), kind_name(shape->a.kind), tn_dtype_name(shape->b.dtype),
             kind_name(shape->b.kind), tn_dtype_name(shape->d), shape->has_bias ? " with bias" : "",
             (long long)shape->rows, (long long)shape->cols, (long long)shape->contracted);
}

static cublasStatus_t set(const tn__blas *blas, cublasLtMatmulDesc_t operation,
                          cublasLtMatmulDescAttributes_t attribute, const void *value,
                          size_t bytes) {
    return blas->MatmulDescSetAttribute(operation, attribute, value, bytes);
}

static cublasStatus_t set_scale(const tn__blas *blas, cublasLtMatmulDesc_t operation,
                                const tn__blas_operand *operand, const float *scale,
                                cublasLtMatmulDescAttributes_t attribute) {
    if (operand->kind == TN__OPERAND_PLAIN) return CUBLAS_STATUS_SUCCESS;
    return set(blas, operation, attribute, &scale, sizeof scale);
}

cublasStatus_t tn__blas_product_address(const tn__blas *blas, const tn__blas_shape *shape,
                                        const tn__blas_addresses *addresses,
                                        const tn__blas_product *product) {
    cublasLtMatmulDesc_t operation = product->operation;
    cublasStatus_t status = set_scale(blas, operation, &shape->b, addresses->b_scale,
                                      CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set_scale(blas, operation, &shape->a, addresses->a_scale,
                           CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
    if (status == CUBLAS_STATUS_SUCCESS && shape->has_bias)
        status = set(blas, operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &addresses->bias,
                     sizeof addresses->bias);
    return status;
}

/* cuBLASLt adds it in fp32, before it rounds. */
static cublasStatus_t set_bias(const tn__blas *blas, cublasLtMatmulDesc_t operation,
                               const tn__blas_shape *shape) {
    const int32_t epilogue = CUBLASLT_EPILOGUE_BIAS, type = data_type(shape->d);
    if (!shape->has_bias) return CUBLAS_STATUS_SUCCESS;
    cublasStatus_t status =
        set(blas, operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return set(blas, operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type);
}

static cublasStatus_t set_scale_mode(const tn__blas *blas, cublasLtMatmulDesc_t operation,
                                     const tn__blas_operand *operand,
                                     cublasLtMatmulDescAttributes_t attribute) {
    static const int32_t modes[] = {[TN__OPERAND_VECTOR] = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                                    [TN__OPERAND_TILE] =
                                        CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
                                    [TN__OPERAND_TENSOR] = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F};
    if (operand->kind == TN__OPERAND_PLAIN) return CUBLAS_STATUS_SUCCESS;
    const int32_t mode = modes[operand->kind];
    return set(blas, operation, attribute, &mode, sizeof mode);
}

static cublasStatus_t make_operation(const tn__blas *blas, const tn__blas_shape *shape,
                                     cublasLtMatmulDesc_t *out) {
    int32_t of_a = shape->b.is_transposed ? CUBLAS_OP_N : CUBLAS_OP_T;
    int32_t of_b = shape->a.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t status = blas->MatmulDescCreate(out, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set(blas, *out, CUBLASLT_MATMUL_DESC_TRANSA, &of_a, sizeof of_a);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set(blas, *out, CUBLASLT_MATMUL_DESC_TRANSB, &of_b, sizeof of_b);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set_scale_mode(blas, *out, &shape->b, CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set_scale_mode(blas, *out, &shape->a, CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
    if (status == CUBLAS_STATUS_SUCCESS && shape->processors > 0) {
        const int32_t processors = shape->processors;
        status =
            set(blas, *out, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &processors, sizeof processors);
    }
    if (status == CUBLAS_STATUS_SUCCESS) status = set_bias(blas, *out, shape);
    return status;
}

static cublasStatus_t make_layout(const tn__blas *blas, const tn__blas_operand *operand,
                                  int64_t rows, int64_t contracted, cublasLtMatrixLayout_t *out) {
    int64_t inner = operand->is_transposed ? rows : contracted;
    int64_t outer = operand->is_transposed ? contracted : rows;
    return blas->MatrixLayoutCreate(out, data_type(operand->dtype), (uint64_t)inner,
                                    (uint64_t)outer, inner);
}

/* Any aligned addresses: the heuristic wants to see that there is something, and reads none. */
static const tn__blas_addresses any_addresses = {
    (const float *)(uintptr_t)512, (const float *)(uintptr_t)512, (const void *)(uintptr_t)512};

tn_status tn__blas_product_make(const tn__blas *blas, const tn__blas_shape *shape,
                                tn__blas_product *product) {
    *product = (tn__blas_product){NULL, NULL, NULL, NULL};
    cublasStatus_t status = make_operation(blas, shape, &product->operation);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = tn__blas_product_address(blas, shape, &any_addresses, product);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = make_layout(blas, &shape->b, shape->cols, shape->contracted, &product->a);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = make_layout(blas, &shape->a, shape->rows, shape->contracted, &product->b);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = blas->MatrixLayoutCreate(&product->d, data_type(shape->d), (uint64_t)shape->cols,
                                          (uint64_t)shape->rows, shape->cols);
    if (status == CUBLAS_STATUS_SUCCESS) return TN_OK;
    char text[TN__BLAS_TEXT_BYTES];
    tn__blas_shape_text(shape, text);
    tn__blas_product_end(blas, product);
    return tn__blas_status(blas, status, "MatmulDesc/MatrixLayout", text);
}

void tn__blas_product_end(const tn__blas *blas, tn__blas_product *product) {
    if (product->d) (void)blas->MatrixLayoutDestroy(product->d);
    if (product->b) (void)blas->MatrixLayoutDestroy(product->b);
    if (product->a) (void)blas->MatrixLayoutDestroy(product->a);
    if (product->operation) (void)blas->MatmulDescDestroy(product->operation);
    *product = (tn__blas_product){NULL, NULL, NULL, NULL};
}
