/* CUDA launches of the casts to and from TENSOR, MXFP8 and NVFP4, and of re-quantizing. */
#ifndef TENURE_CUDA_FORMATS_H
#define TENURE_CUDA_FORMATS_H

#include "cuda_module.h"

tn_status tn__cuda_quantize_formats(tn__cuda_context *context, const tn__quantize_work *work,
                                    tn_stream stream);

/* MXFP8 and NVFP4 only: the kernels of blocks of 128 read TENSOR too. */
tn_status tn__cuda_dequantize_formats(tn__cuda_context *context, const tn__dequantize_work *work,
                                      tn_stream stream);

/* *amax = that of the matrix, 0 if it has no elements. */
tn_status tn__cuda_amax(tn__cuda_context *context, const tn__matrix *src, float *amax,
                        tn_stream stream);

tn_status tn__cuda_requantize(tn__cuda_context *context, const tn__requantize_work *work,
                              tn_stream stream);

#endif
