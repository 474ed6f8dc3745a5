/* Element types in DLPack's terms. */
#ifndef TENURE_DLPACK_TYPES_H
#define TENURE_DLPACK_TYPES_H

#include "dlpack_abi.h"
#include "tenure_tensor.h"

/* What the element type is there; E2M1 as elements of one lane, which are packed. */
tn__dl_dtype tn__dlpack_type(tn_dtype dtype);

/* The element type; 0 if there is none. Of E2M1, whose elements may come in pairs of two lanes,
 * *lanes says how many an element of the DLPack tensor is. */
int tn__dlpack_dtype(tn__dl_dtype type, tn_dtype *dtype, int *lanes);

#endif
