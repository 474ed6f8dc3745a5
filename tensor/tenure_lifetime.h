/* Tenure: how long planes live, and how tensors change hands.
 *
 * tenure_tensor.h is what every user of tensors needs; this header is what else they can do. The
 * same rules hold: handles with generations, one tensor by one thread at a time, everything in
 * stream order, and a call that fails has changed nothing.
 */
#ifndef TENURE_LIFETIME_H
#define TENURE_LIFETIME_H

#include "tenure_tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the planes that GEMMs take ------------------------------------------------------------ */

/* What decides which operands a GEMM takes. */
typedef enum tn_architecture {
    TN_ARCHITECTURE_HOST = 0,      /* the host driver: what libtenure-ops does there */
    TN_ARCHITECTURE_OTHER,         /* a GPU without FP8: PLAIN only */
    TN_ARCHITECTURE_ADA,           /* compute capability 8.9 */
    TN_ARCHITECTURE_HOPPER,        /* 9.x */
    TN_ARCHITECTURE_BLACKWELL,     /* 10.x, 11.x */
    TN_ARCHITECTURE_BLACKWELL_RTX, /* 12.x */
    TN_ARCHITECTURE_COUNT
} tn_architecture;

/* Operands by form: D = A B^T (FPROP), A B (DGRAD), A^T B (WGRAD) of A and B as M x K matrices;
 * so x w^T, dy w and dy^T x of a layer y = x w^T. */
typedef enum tn_operand {
    TN_OPERAND_FPROP_A = 0,
    TN_OPERAND_FPROP_B,
    TN_OPERAND_DGRAD_A,
    TN_OPERAND_DGRAD_B,
    TN_OPERAND_WGRAD_A,
    TN_OPERAND_WGRAD_B,
    TN_OPERAND_COUNT
} tn_operand;

TN_API const char *tn_architecture_name(tn_architecture architecture);

/* Of a device; a simulated one is what it says it is. NULL is TN_ARCHITECTURE_OTHER. */
TN_API tn_architecture tn_device_architecture(tn_device *device);

/* The plane of a tensor of this format that the operand is read from: the one quantized along the
 * contracted dimension, or the one whose exact values the GEMM reads either way. TN_UNSUPPORTED
 * names format, architecture and reason where there is no GEMM of it. Thread-safe. */
TN_API TN_MUST_USE tn_status tn_format_operand(tn_format format, tn_architecture architecture,
                                               tn_operand operand, tn_plane *out);

/* ---- replacing, saving, cloning, viewing --------------------------------------------------- */

/* ---- policies and phases ------------------------------------------------------------------- */

/* ---- saved sets and recomputation ---------------------------------------------------------- */

/* ---- offloading to host memory ------------------------------------------------------------- */

/* ---- foreign memory and DLPack ------------------------------------------------------------- */

/* ---- reports, differences, expectations ---------------------------------------------------- */

#ifdef __cplusplus
}
#endif
#endif
