/* Tenure: FP8 block-scaled operations on tensors: casts, GEMMs, small ops of a trainer.
 *
 *     tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
 *     quantize.src = activation;                       (PLAIN, bf16, M x K)
 *     quantize.dst = quantized;                        (FP8_BLOCK_1D)
 *     quantize.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
 *     tn_quantize(&quantize, stream);                  (reads the source once)
 *
 *     tn_gemm_args gemm = TN_GEMM_ARGS_INIT;
 *     gemm.form = TN_GEMM_FPROP;
 *     gemm.a = quantized, gemm.b = weight, gemm.d = output, gemm.scope = op_scope;
 *     tn_gemm(&gemm, stream);
 *
 * Rules for every op: inputs and outputs are tensors whose planes are leased for the length of
 * the call; work goes on `stream`, the call never waits for the device; scratch lives in the
 * scope that the caller names and is freed in stream order before the call returns; any sizes,
 * a tensor without elements is success without a launch; a call that fails has put no result
 * anywhere (an output plane that it made is freed again). Three implementations beside each
 * other, chosen by the device: host (the definition), CUDA, and a ghost of it on the simulated
 * device, which moves no data but touches the same ranges for the time it would take.
 *
 * Errors of all: TN_STALE_HANDLE, TN_INVALID_ARGUMENT (shapes, formats, dtypes: the text gives
 * both sides), TN_INVALID_STATE (a plane that is read is not valid), TN_IN_USE (an output is
 * leased), TN_UNSUPPORTED (no kernels in this build, or no such GEMM on this GPU), out of memory,
 * TN_DRIVER_ERROR. Thread-safe for distinct tensors.
 */
#ifndef TENURE_OPS_H
#define TENURE_OPS_H

#include "tenure_tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- casts -------------------------------------------------------------------------------- */

/* Quantizes PLAIN src (fp32, bf16 or fp16) to the tensor dst of the same rows and columns, whose
 * format is any other. Formats of blocks of 128: for each 1x128 (1D ROW), 128x1 (1D COL) or
 * 128x128 (2D) block of valid elements:
 *
 *     amax      = max of |x|, NaN ignored, at least amax_epsilon
 *     scale     = 1 if amax is 0 or infinite, else max_of_format / amax (rounded to nearest);
 *                 where that is infinite, the largest finite number of src's type;
 *                 in POW2 mode rounded down to a power of two
 *     q         = cast(x * scale), round to nearest even, saturating, NaN kept, -0 kept
 *     stored    = 1 / scale
 *
 * as TransformerEngine's block-scaling recipe does, to the bit. Padding of scales is 0.
 * TENSOR, MXFP8 and NVFP4: docs/formats.md says how their scales come about.
 *
 * With `random`, elements (never scales) are rounded stochastically instead, as NVFP4's recipe does
 * with gradients. A magnitude low + x (high - low) between two neighbours of the element type, x
 * from 0 to below 1, becomes high if
 *
 *     x * 2^16 + r + 1/2 >= 2^16            r: the element's random number, 0 ... 2^16 - 1
 *
 * and low otherwise. So what the type can hold stays, and the mean over all r is the value: exactly
 * where x is a multiple of 2^-16, else within 2^-17 of the gap. Saturation, NaN and the sign are as
 * above. r depends on nothing but the tensor's seed and offset and on where the element (m, k) of
 * M x K is, so that both planes round an element by one r, and no launch can change it: bits
 * 16 (k mod 8) to 16 (k mod 8) + 15 of the 128 that Philox4x32-10 gives for the key seed and the
 * counter whose low half is m ceil(K/8) + floor(k/8) and whose high half is offset. */
enum { TN_QUANTIZE_ROW = 1, TN_QUANTIZE_COL = 2 };

typedef struct tn_quantize_args {
    size_t size;
    tn_tensor src;
    tn_tensor dst;
    unsigned planes;    /* TN_QUANTIZE_ROW, TN_QUANTIZE_COL or both; 0 means ROW */
    float amax_epsilon; /* finite, at least 0 */
    /* TENSOR only, PLAIN fp32: delayed scaling (tn_scale_update in tenure_cast.h). Element `slot`
     * of scale is what src is multiplied with, instead of one that follows from its amax, and
     * element `slot` of the first row of amax_history [H] or [H, n] is raised to that amax.
     * {0}: neither; they go without each other. */
    tn_tensor scale;
    tn_tensor amax_history;
    int64_t slot;
    /* PLAIN fp32 of one element. If that is not 0 when the work runs, planes, scales and the amax
     * history stay as they are, bit for bit; so all `planes` must be valid before (else
     * TN_INVALID_STATE), and the call can be captured once for steps that cast and steps that do
     * not. {0}: never. */
    tn_tensor skip;
    /* TN_BYTE of 16 bytes: two uint64, seed and offset, which the caller writes once. When the work
     * is done it has added 1 to offset, in the stream's order (not if it is skipped, nor for a
     * tensor without elements): the next call draws other numbers, and so does each launch of a
     * graph that has captured this one. {0}: to nearest even. */
    tn_tensor random;
    /* NVFP4 only, 1: a block's scale follows from the amax of the 16 x 16 elements around it, so
     * that ROW and COL hold the same numbers, as NVFP4's recipe does with weights. The layout
     * stays: the scale is there once for each row (column) of the square. */
    int square_blocks;
    /* TENSOR only, without delayed scaling: PLAIN fp32 of one element, which is taken for the amax
     * of src: that of all parts, where src is one of several of a tensor (tn_shard_amax). */
    tn_tensor whole_amax;
} tn_quantize_args;
#define TN_QUANTIZE_ARGS_INIT                                                                      \
    {                                                                                              \
        sizeof(tn_quantize_args), {0}, {0}, 0, 0.0f, {0}, {0}, 0, {0}, {0}, 0, { 0 }               \
    }

TN_API TN_MUST_USE tn_status tn_quantize(const tn_quantize_args *args, tn_stream stream);

/* dst (PLAIN fp32, bf16 or fp16, same rows and columns) = q * stored scale of the ROW or COL
 * plane of src, of any format but PLAIN, in fp32, rounded to nearest even to dst's type. NVFP4's
 * two scales are multiplied first. */
typedef struct tn_dequantize_args {
    size_t size;
    tn_tensor src;
    tn_plane plane; /* TN_PLANE_ROW or TN_PLANE_COL; DATA (0) means ROW */
    tn_tensor dst;
    tn_tensor skip; /* as that of tn_quantize: dst stays as it is */
} tn_dequantize_args;
#define TN_DEQUANTIZE_ARGS_INIT                                                                    \
    {                                                                                              \
        sizeof(tn_dequantize_args), {0}, TN_PLANE_DATA, {0}, { 0 }                                 \
    }

TN_API TN_MUST_USE tn_status tn_dequantize(const tn_dequantize_args *args, tn_stream stream);

/* Makes the missing plane of a 2D or TENSOR tensor from the other one: data and scales transposed,
 * exact. The same as tn_plane_require(tensor, to, stream), which uses it. A plane that is valid is
 * left alone, so that there is nothing that a skip flag could keep. */
typedef struct tn_transpose_args {
    size_t size;
    tn_tensor tensor;
    tn_plane to; /* TN_PLANE_ROW or TN_PLANE_COL */
} tn_transpose_args;
#define TN_TRANSPOSE_ARGS_INIT                                                                     \
    { sizeof(tn_transpose_args), {0}, TN_PLANE_COL }

TN_API TN_MUST_USE tn_status tn_transpose(const tn_transpose_args *args, tn_stream stream);

/* ---- GEMM --------------------------------------------------------------------------------- */

/*     form    D           A                 B
 *     FPROP   y [M, N]    x  [M, K], ROW    w [N, K], ROW
 *     DGRAD   dx [M, K]   dy [M, N], ROW    w [N, K], COL
 *     WGRAD   dw [N, K]   dy [M, N], COL    x [M, K], COL
 *
 * FP8 A and B are 1D and 1D, 1D and 2D, 2D and 1D, or both have one scale a tensor.
 *
 * D = A B^T, A B, A^T B: of the dequantized values, in fp32, written in D's type (fp32, bf16 or
 * fp16), or added to D if `accumulate`. A and B both FP8, or both PLAIN of one type (bf16, fp16,
 * fp32): then the same forms on DATA. Nothing to contract: D is 0, or stays if `accumulate`.
 * E5M2 x E5M2 is TN_UNSUPPORTED, and so is a format without a GEMM on the device: which plane each
 * operand is read from is tn_format_operand's to say. A plane that is absent is derived where it
 * can be and stays by the policy of its tensor.
 *
 * Host FP8, one scale a tensor: y = sum of products in fp32 from 0 in order, times scale_a, times
 * scale_b. Blocks: for each block of 128 along the contracted dimension (tail shorter): p = sum of
 * products in fp32 from 0 in order; y = fma(p * scale_a, scale_b, y). Then bias is
 * added in fp32 and the sum is rounded to D's type; with `accumulate` D is added to that, in fp32,
 * and rounded again. CUDA: cuBLASLt's block-scaled kernels and our own, of which tn_gemm_tune
 * (tenure_gemm.h) finds the fastest; bias and D are added as on the host.
 *
 * Scratch, on CUDA: the workspace that the chosen algorithm wants, which is at most
 * min(32 MiB, max(1 MiB, 32 bytes for each element of D)): eight fp32 copies of D, partial sums
 * of a split contraction. And copies of an FP8 operand or of D where cuBLASLt takes them only
 * padded (contracted to a multiple of 16, rows and columns to 8) or does not write D's type; and
 * of D in fp32 for a bias that is not of D's type, is fp32, or that cuBLASLt does not add. */
typedef enum tn_gemm_form { TN_GEMM_FPROP = 0, TN_GEMM_DGRAD, TN_GEMM_WGRAD } tn_gemm_form;

/* Ways to multiply. AUTO is what TENURE_GEMM_ENGINE says, for layers too, else the device's own:
 * REFERENCE on the host; on CUDA CUBLASLT, or WGMMA where tn_gemm_tune has found it faster, or
 * where it takes a product for which cuBLASLt's heuristic has nothing.
 *
 * WGMMA is ours, on GPUs of compute capability 9.0 with a driver of CUDA 12.0 or later: FP8 with
 * 1x128 scales by FP8 with 1x128 or 128x128 scales; not where cuBLASLt itself adds a bias, or adds
 * to D of 16 bits. Pinned where it is not, or for what it does not take, it is TN_UNSUPPORTED. Its
 * bits are cuBLASLt's, but where D is added to: there numbers below 2^-126 may count as 0.
 *
 * The others take any formats on any device, also one PLAIN operand of their type: what is
 * quantized is dequantized into scratch, from the plane along the contracted dimension, and
 * multiplied as PLAIN bf16 or fp32. They are never taken without being asked for, or allowed
 * (may_differ). */
typedef enum tn_gemm_engine {
    TN_GEMM_ENGINE_AUTO = 0,
    TN_GEMM_ENGINE_REFERENCE,
    TN_GEMM_ENGINE_CUBLASLT,
    TN_GEMM_ENGINE_DEQUANTIZE_BF16,
    TN_GEMM_ENGINE_DEQUANTIZE_FP32,
    TN_GEMM_ENGINE_WGMMA,
    TN_GEMM_ENGINE_COUNT
} tn_gemm_engine;
TN_API const char *tn_gemm_engine_name(tn_gemm_engine engine);

/* What becomes of the product P = A B (+ bias). With an epilogue nothing is accumulated, and `pre`
 * is PLAIN of D's shape and type.
 *
 *     NONE           D = P
 *     GELU           pre = P in D's type, which is written unless it is {0}; D = gelu(pre)
 *     GELU_GRADIENT  D = dpre = P in D's type times gelu'(pre), which is read; no bias
 *
 * GELU is that of tn_activation_forward and _backward, to the bit, on what tn_gemm writes: on CUDA
 * a pass of ours follows the product, for which P lies in scratch, or in pre. */
typedef enum tn_gemm_epilogue {
    TN_GEMM_EPILOGUE_NONE = 0,
    TN_GEMM_EPILOGUE_GELU,
    TN_GEMM_EPILOGUE_GELU_GRADIENT,
    TN_GEMM_EPILOGUE_COUNT
} tn_gemm_epilogue;

typedef struct tn_gemm_args {
    size_t size;
    tn_gemm_form form;
    tn_tensor a;
    tn_tensor b;
    tn_tensor d;
    int accumulate;
    tn_scope scope; /* for scratch (workspace, padded operands) */
    /* PLAIN, one for each column of D: added in fp32 before the product is rounded; {0}: none.
     * There must be something to contract. */
    tn_tensor bias;
    tn_gemm_engine engine; /* pins one */
    int algorithm; /* pins one of those that tn_gemm_choice_get counts, from 1 on; 0: the chosen */
    tn_gemm_epilogue epilogue;
    tn_tensor pre;
    /* PLAIN, the gradient of a bias, as tn_bias_gradient sums it up: with GELU_GRADIENT of what D
     * becomes, else of dy, which is PLAIN A of DGRAD or WGRAD; one for each of its columns. A dy
     * that is quantized has been summed up when it was cast. {0}: not wanted. */
    tn_tensor dbias;
    int accumulate_dbias; /* 1: it is added to what dbias holds */
    /* 1, with AUTO: other numbers than the formats' own will do. An engine that dequantizes is
     * taken where tn_gemm_tune, told the same, has found it faster, and no algorithm is pinned, and
     * where there is no other. */
    int may_differ;
} tn_gemm_args;
#define TN_GEMM_ARGS_INIT                                                                          \
    {                                                                                              \
        sizeof(tn_gemm_args), TN_GEMM_FPROP, {0}, {0}, {0}, 0, {0}, {0}, TN_GEMM_ENGINE_AUTO, 0,   \
            TN_GEMM_EPILOGUE_NONE, {0}, {0}, 0, 0                                                  \
    }

TN_API TN_MUST_USE tn_status tn_gemm(const tn_gemm_args *args, tn_stream stream);

/* ---- small operations of a trainer ---------------------------------------------------------- */

/* y = alpha * x + y, element by element, in fp32, rounded once; PLAIN, any mix of types. */
typedef struct tn_axpy_args {
    size_t size;
    tn_tensor x;
    tn_tensor y;
    float alpha;
} tn_axpy_args;
#define TN_AXPY_ARGS_INIT                                                                          \
    { sizeof(tn_axpy_args), {0}, {0}, 1.0f }
TN_API TN_MUST_USE tn_status tn_axpy(const tn_axpy_args *args, tn_stream stream);

/* y = x in y's type, rounded to nearest even; PLAIN, same element count. */
typedef struct tn_convert_args {
    size_t size;
    tn_tensor x;
    tn_tensor y;
} tn_convert_args;
#define TN_CONVERT_ARGS_INIT                                                                       \
    {                                                                                              \
        sizeof(tn_convert_args), {0}, { 0 }                                                        \
    }
TN_API TN_MUST_USE tn_status tn_convert(const tn_convert_args *args, tn_stream stream);

/* y[t, :] = table[tokens[t], :]; tokens are TN_BYTE [T], table PLAIN [256, H], y [T, H] of the
 * table's type. */
typedef struct tn_embed_args {
    size_t size;
    tn_tensor tokens;
    tn_tensor table;
    tn_tensor y;
} tn_embed_args;
#define TN_EMBED_ARGS_INIT                                                                         \
    {                                                                                              \
        sizeof(tn_embed_args), {0}, {0}, { 0 }                                                     \
    }
TN_API TN_MUST_USE tn_status tn_embed(const tn_embed_args *args, tn_stream stream);

/* loss[t] = -log softmax(logits[t, :])[targets[t]] (fp32 [T]); dlogits = (softmax - one_hot) / T
 * in dlogits' type. logits PLAIN [T, V], V at most 65536; targets TN_BYTE [T] (V >= 256). The
 * order of all sums is fixed: the same input gives the same bits. */
typedef struct tn_cross_entropy_args {
    size_t size;
    tn_tensor logits;
    tn_tensor targets;
    tn_tensor loss;
    tn_tensor dlogits;
} tn_cross_entropy_args;
#define TN_CROSS_ENTROPY_ARGS_INIT                                                                 \
    {                                                                                              \
        sizeof(tn_cross_entropy_args), {0}, {0}, {0}, { 0 }                                        \
    }
TN_API TN_MUST_USE tn_status tn_cross_entropy(const tn_cross_entropy_args *args, tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
