/* The table of element types: ours, and what DLPack calls them. */
#include "dlpack_types.h"

#include "error.h"

static const tn__dl_dtype types[TN_DTYPE_COUNT] = {
    [TN_FP32] = {TN__DL_FLOAT, 32, 1},        [TN_BF16] = {TN__DL_BFLOAT, 16, 1},
    [TN_FP16] = {TN__DL_FLOAT, 16, 1},        [TN_E4M3] = {TN__DL_FLOAT8_E4M3FN, 8, 1},
    [TN_E5M2] = {TN__DL_FLOAT8_E5M2, 8, 1},   [TN_BYTE] = {TN__DL_UINT, 8, 1},
    [TN_E2M1] = {TN__DL_FLOAT4_E2M1FN, 4, 1}, [TN_E8M0] = {TN__DL_FLOAT8_E8M0FNU, 8, 1},
};

tn__dl_dtype tn__dlpack_type(tn_dtype dtype) {
    TN_ASSERT((int)dtype >= 0 && dtype < TN_DTYPE_COUNT);
    return types[dtype];
}

int tn__dlpack_dtype(tn__dl_dtype type, tn_dtype *dtype, int *lanes) {
    for (int i = 0; i < TN_DTYPE_COUNT; i++) {
        int lanes_max = i == TN_E2M1 ? 2 : 1;
        if (types[i].code != type.code || types[i].bits != type.bits) continue;
        if (type.lanes < 1 || type.lanes > lanes_max) continue;
        *dtype = (tn_dtype)i;
        *lanes = type.lanes;
        return 1;
    }
    return 0;
}
