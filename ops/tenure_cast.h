/* Tenure: casts that do more than one tensor's plain cast, and ops that quantize what they make.
 *
 *     tn_quantized_out quantized = TN_QUANTIZED_OUT_INIT;
 *     quantized.tensor = saved_h;                      (FP8_BLOCK_1D)
 *     quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
 *
 * The rules of tenure_ops.h hold here too. Of every op that makes a high-precision value and
 * quantizes it in the same pass: the planes are, to the bit, those that tn_quantize makes of that
 * value rounded to its own type.
 */
#ifndef TENURE_CAST_H
#define TENURE_CAST_H

#include "tenure_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what a producer quantizes to ----------------------------------------------------------- */

/* tensor {0}: nothing is quantized. planes and amax_epsilon are those of tn_quantize. */
typedef struct tn_quantized_out {
    tn_tensor tensor;
    unsigned planes;    /* TN_QUANTIZE_ROW, TN_QUANTIZE_COL or both; 0 means ROW */
    float amax_epsilon; /* finite, at least 0 */
} tn_quantized_out;
#define TN_QUANTIZED_OUT_INIT                                                                      \
    { {0}, 0, 0.0f }

#ifdef __cplusplus
}
#endif
#endif
