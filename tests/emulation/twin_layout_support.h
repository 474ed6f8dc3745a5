/* The layout of a plane by its format and shape, without a tensor. */
#ifndef TENURE_TWIN_LAYOUT_SUPPORT_H
#define TENURE_TWIN_LAYOUT_SUPPORT_H

#include "tenure_tensor.h"

/* Fails the test if the format has no such plane. */
tn_plane_layout twin_layout(tn_format format, tn_plane plane, tn_dtype dtype, int64_t m, int64_t k);

#endif
