/* Our declarations of DLPack's structs against the real dlpack.h: Debian's (libdlpack-dev), which
 * has the older struct, or a newer one, which has both.
 */
#include <stddef.h>
#include <stdio.h>

#include "dlpack_abi.h"

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>

#define SAME(ours, theirs)      _Static_assert((long long)(ours) == (long long)(theirs), #theirs)
#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define SAME_PLACE(ours, our_field, theirs, their_field)                                           \
    _Static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field), #their_field);      \
    _Static_assert(sizeof(((ours *)0)->our_field) == sizeof(((theirs *)0)->their_field),           \
                   #their_field)

SAME(TN__DL_CPU, kDLCPU);
SAME(TN__DL_CUDA, kDLCUDA);
SAME(TN__DL_CUDA_HOST, kDLCUDAHost);
SAME(TN__DL_CUDA_MANAGED, kDLCUDAManaged);
SAME(TN__DL_UINT, kDLUInt);
SAME(TN__DL_FLOAT, kDLFloat);
SAME(TN__DL_BFLOAT, kDLBfloat);

SAME_SIZE(tn__dl_device, DLDevice);
SAME_PLACE(tn__dl_device, type, DLDevice, device_type);
SAME_PLACE(tn__dl_device, id, DLDevice, device_id);
SAME_SIZE(tn__dl_dtype, DLDataType);
SAME_PLACE(tn__dl_dtype, code, DLDataType, code);
SAME_PLACE(tn__dl_dtype, bits, DLDataType, bits);
SAME_PLACE(tn__dl_dtype, lanes, DLDataType, lanes);
SAME_SIZE(tn__dl_tensor, DLTensor);
SAME_PLACE(tn__dl_tensor, data, DLTensor, data);
SAME_PLACE(tn__dl_tensor, device, DLTensor, device);
SAME_PLACE(tn__dl_tensor, rank, DLTensor, ndim);
SAME_PLACE(tn__dl_tensor, dtype, DLTensor, dtype);
SAME_PLACE(tn__dl_tensor, shape, DLTensor, shape);
SAME_PLACE(tn__dl_tensor, strides, DLTensor, strides);
SAME_PLACE(tn__dl_tensor, byte_offset, DLTensor, byte_offset);
SAME_SIZE(tn__dl_managed, DLManagedTensor);
SAME_PLACE(tn__dl_managed, tensor, DLManagedTensor, dl_tensor);
SAME_PLACE(tn__dl_managed, context, DLManagedTensor, manager_ctx);
SAME_PLACE(tn__dl_managed, deleter, DLManagedTensor, deleter);

#ifdef DLPACK_MAJOR_VERSION
SAME(TN__DL_MAJOR, DLPACK_MAJOR_VERSION);
SAME(TN__DL_READ_ONLY, DLPACK_FLAG_BITMASK_READ_ONLY);
SAME(TN__DL_IS_COPIED, DLPACK_FLAG_BITMASK_IS_COPIED);
SAME_SIZE(tn__dl_versioned, DLManagedTensorVersioned);
SAME_PLACE(tn__dl_versioned, major, DLManagedTensorVersioned, version.major);
SAME_PLACE(tn__dl_versioned, minor, DLManagedTensorVersioned, version.minor);
SAME_PLACE(tn__dl_versioned, context, DLManagedTensorVersioned, manager_ctx);
SAME_PLACE(tn__dl_versioned, deleter, DLManagedTensorVersioned, deleter);
SAME_PLACE(tn__dl_versioned, flags, DLManagedTensorVersioned, flags);
SAME_PLACE(tn__dl_versioned, tensor, DLManagedTensorVersioned, dl_tensor);
#define VERSION DLPACK_MAJOR_VERSION * 100 + DLPACK_MINOR_VERSION
#if DLPACK_MINOR_VERSION >= 1
SAME(TN__DL_FLOAT8_E4M3FN, kDLFloat8_e4m3fn);
SAME(TN__DL_FLOAT8_E5M2, kDLFloat8_e5m2);
SAME(TN__DL_FLOAT8_E8M0FNU, kDLFloat8_e8m0fnu);
SAME(TN__DL_FLOAT4_E2M1FN, kDLFloat4_e2m1fn);
SAME(TN__DL_SUBBYTE_PADDED, DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED);
#endif
#else
#define VERSION DLPACK_VERSION
#endif

int main(void) {
    printf("dlpack.h %d agrees with tensor/dlpack_abi.h\n", VERSION);
    return 0;
}
#else
int main(void) {
    printf("no dlpack.h to compare tensor/dlpack_abi.h with: install libdlpack-dev\n");
    return 1;
}
#endif
