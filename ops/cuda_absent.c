/* The CUDA table of a library that was built without kernels: every call says so.
 *
 * Invariant: no entry is NULL, so that a front never has to ask whether there are kernels.
 */
#include "op_kernels.h"

static tn_status built_without_kernels(const char *operation) {
    return TN_FAIL(TN_UNSUPPORTED,
                   "%s: this libtenure-ops was built without CUDA kernels; build it where nvcc and "
                   "cublasLt.h are found (TENURE_CUDA=ON), or use the host driver",
                   operation);
}

static tn_status quantize(tn_device *device, const tn__quantize_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("quantize");
}

static size_t list_scratch_bytes(int64_t tensors) {
    (void)tensors;
    return 0;
}

static tn_status grouped_quantize(tn_device *device, const tn__grouped_quantize_work *work,
                                  tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("grouped_quantize");
}

static tn_status quantize_list(tn_device *device, const tn__quantize_list_work *work,
                               tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("quantize_list");
}

static tn_status pad_groups(tn_device *device, const tn__pad_groups_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("pad_groups");
}

static tn_status gather_rows(tn_device *device, const tn__gather_rows_work *work,
                             tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("gather_rows");
}

static tn_status combine_rows(tn_device *device, const tn__combine_rows_work *work,
                              tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("combine_rows");
}

static tn_status shard_amax(tn_device *device, const tn__shard_amax_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("shard_amax");
}

static tn_status shard_quantize(tn_device *device, const tn__shard_quantize_work *work,
                                tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("shard_quantize");
}

static tn_status dequantize(tn_device *device, const tn__dequantize_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("dequantize");
}

static tn_status transpose(tn_device *device, const tn__transpose_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("transpose");
}

static tn_status requantize(tn_device *device, const tn__requantize_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("requantize");
}

static tn_status scale_update(tn_device *device, const tn__scale_update_work *work,
                              tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("scale_update");
}

static tn_status produce(tn_device *device, const tn__produce_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("produce");
}

static tn_status norm(tn_device *device, const tn__norm_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("norm");
}

static tn_status column_sums(tn_device *device, const tn__column_sums_work *work,
                             tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("column_sums");
}

static tn_status norm_gradient_means(tn_device *device, const tn__norm_gradient_work *work,
                                     tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("norm_gradient_means");
}

static tn_status norm_gradient(tn_device *device, const tn__norm_gradient_work *work,
                               tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("norm_gradient");
}

static tn_status row_products(tn_device *device, const tn__row_products_work *work,
                              tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("row_products");
}

static tn_status embed_gradient(tn_device *device, const tn__embed_gradient_work *work,
                                tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("embed_gradient");
}

static tn_status adamw(tn_device *device, const tn__adamw_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("adamw");
}

static tn_status adamw_advance(tn_device *device, const tn__adamw_advance_work *work,
                               tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("adamw_advance");
}

static tn_status square_sums(tn_device *device, const tn__square_sums_work *work,
                             tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("square_sums");
}

static tn_status clip_factor(tn_device *device, const tn__clip_factor_work *work,
                             tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("clip_factor");
}

static tn_status attention(tn_device *device, const tn__attention_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("attention");
}

static tn_status gemm_scratch_bytes(tn_device *device, const tn__gemm_work *work, size_t *out) {
    (void)device, (void)work, (void)out;
    return built_without_kernels("gemm");
}

static tn_status gemm(tn_device *device, const tn__gemm_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("gemm");
}

static tn_status gemm_choice(tn_device *device, const tn__gemm_work *work, tn_gemm_choice *out) {
    (void)device, (void)work, (void)out;
    return built_without_kernels("gemm_choice");
}

static tn_status gemm_table_text(tn_device *device, char **text, size_t *bytes) {
    (void)device, (void)text, (void)bytes;
    return built_without_kernels("gemm_table_save");
}

static tn_status gemm_table_take(tn_device *device, const char *text, size_t bytes) {
    (void)device, (void)text, (void)bytes;
    return built_without_kernels("gemm_table_load");
}

static tn_status axpy(tn_device *device, const tn__axpy_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("axpy");
}

static tn_status convert(tn_device *device, const tn__matrix *x, const tn__matrix *y,
                         tn_stream stream) {
    (void)device, (void)x, (void)y, (void)stream;
    return built_without_kernels("convert");
}

static tn_status embed(tn_device *device, const tn__embed_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("embed");
}

static tn_status cross_entropy(tn_device *device, const tn__cross_entropy_work *work,
                               tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return built_without_kernels("cross_entropy");
}

const tn__op_table tn__op_table_cuda = {
    .name = "cuda",
    .quantize = quantize,
    .list_scratch_bytes = list_scratch_bytes,
    .grouped_quantize = grouped_quantize,
    .quantize_list = quantize_list,
    .pad_groups = pad_groups,
    .gather_rows = gather_rows,
    .combine_rows = combine_rows,
    .shard_amax = shard_amax,
    .shard_quantize = shard_quantize,
    .dequantize = dequantize,
    .transpose = transpose,
    .requantize = requantize,
    .scale_update = scale_update,
    .produce = produce,
    .norm = norm,
    .column_sums = column_sums,
    .norm_gradient_means = norm_gradient_means,
    .norm_gradient = norm_gradient,
    .row_products = row_products,
    .embed_gradient = embed_gradient,
    .adamw = adamw,
    .adamw_advance = adamw_advance,
    .square_sums = square_sums,
    .clip_factor = clip_factor,
    .attention = attention,
    .attention_gradient = attention,
    .gemm_scratch_bytes = gemm_scratch_bytes,
    .gemm = gemm,
    .gemm_tune = gemm,
    .gemm_choice = gemm_choice,
    .gemm_table_text = gemm_table_text,
    .gemm_table_take = gemm_table_take,
    .axpy = axpy,
    .convert = convert,
    .embed = embed,
    .cross_entropy = cross_entropy,
};
