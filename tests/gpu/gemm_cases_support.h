/* GEMMs of a GPU against fp64: what the tests of them share.
 *
 * The reference is a sample of rows and columns of the product of the very operands that the GPU
 * multiplied, dequantized on the CPU. The measure is ||out - ref|| / ||ref|| over the samples. In
 * fp32 out it must be below 1e-3 (the tensor cores add with fewer bits than fp32); 16-bit out adds
 * its own rounding, half a unit in the last place of each value. DeepGEMM's measure, 1 - 2 <x, y> /
 * (|x|^2 + |y|^2), is |x - y|^2 / (|x|^2 + |y|^2): below 2e-5 where this one is below 6e-3. It is
 * made, too, and must be below DeepGEMM's 1e-3.
 */
#ifndef TENURE_GEMM_CASES_SUPPORT_H
#define TENURE_GEMM_CASES_SUPPORT_H

#include "gpu_support.h"

#include "tenure_gemm.h"

extern gpu_side gemm_gpu;

typedef struct gemm_case {
    tn_gemm_form form;
    int64_t m, n, k;    /* as in tenure_ops.h: FPROP y [m, n], DGRAD dx [m, k], WGRAD dw [n, k] */
    tn_format weight;   /* of b; PLAIN, TENSOR: of both operands */
    tn_format a_format; /* of a beside a b of blocks; PLAIN: 1D */
    tn_dtype a, b, d;
    tn_scale_mode mode;
    float a_magnitude, b_magnitude; /* of what is quantized; 0: 1 */
    int accumulate;
    int has_bias;
    tn_dtype bias;
    int poison_padding; /* NaN into the padding of the operands' scales */
    int algorithm;
    tn_gemm_engine engine;
    int is_quiet; /* tells of failures only */
} gemm_case;

/* An operand as the GEMM contracts it: [rows, contracted]. */
typedef struct gemm_operand {
    tn_tensor tensor;
    tn_plane plane;
    int64_t rows, contracted;
    gpu_copy copy;
    tn_format format;
    tn_dtype dtype;
    int is_turned; /* PLAIN, stored [contracted, rows] */
} gemm_operand;

/* FP8, 1x128 by 128x128, E4M3 by E4M3, fp32 out. */
gemm_case gemm_fp8_case(int64_t m, int64_t n, int64_t k);

gemm_operand gemm_operand_a(const gemm_case *c);
gemm_operand gemm_operand_b(const gemm_case *c);
void gemm_operands_make(const gemm_case *c, gemm_operand *a, gemm_operand *b);
void gemm_operand_end(gemm_operand *of);
/* Of the dequantized operand. */
double gemm_operand_value(const gemm_operand *of, int64_t row, int64_t k);

/* What block `block` of 128 of the contracted dimension gives before its scales, by the tensor
 * cores: a product of the same codes as tensors of one scale, which is 1. [a rows, b rows], for
 * free(). */
float *gemm_partial_sums(const gemm_operand *a, const gemm_operand *b, int64_t block);
float gemm_scale_of(const gemm_operand *of, int64_t row, int64_t block);

/* NaN everywhere, or values to add to. */
tn_tensor gemm_output_make(const gemm_case *c, const gemm_operand *a, const gemm_operand *b);
tn_gemm_args gemm_args_of(const gemm_case *c, const gemm_operand *a, const gemm_operand *b,
                          tn_tensor d);

/* PLAIN, one for each column of D; {0} if the case has none. */
tn_tensor gemm_bias_make(const gemm_case *c, const gemm_operand *b);

/* Multiplies and compares; one comparison under the form's and the format's name. */
void gemm_check(const gemm_case *c);
/* The same on operands that are there. */
void gemm_check_operands(const gemm_case *c, const gemm_operand *a, const gemm_operand *b);

#endif
