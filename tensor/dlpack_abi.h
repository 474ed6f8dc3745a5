/* The binary interface of DLPack, declared by ourselves: both its structs and the numbers in them.
 *
 * Facts only, as of DLPack 1.1, so that no dlpack.h is needed (Debian's is older than FP8 and the
 * versioned struct). tests/unit/test_dlpack_abi.c compares this with a dlpack.h where one is found;
 * the names here differ from its names so that both can be included. tenure_lifetime.h declares the
 * structs by their names in dlpack.h: they are these.
 */
#ifndef TENURE_DLPACK_ABI_H
#define TENURE_DLPACK_ABI_H

#include <stdint.h>

/* A struct of another major version has the same first five members, and no more to rely on. */
enum { TN__DL_MAJOR = 1, TN__DL_MINOR = 1 };

enum { TN__DL_CPU = 1, TN__DL_CUDA = 2, TN__DL_CUDA_HOST = 3, TN__DL_CUDA_MANAGED = 13 };

enum {
    TN__DL_UINT = 1,
    TN__DL_FLOAT = 2,
    TN__DL_BFLOAT = 4,
    TN__DL_FLOAT8_E4M3FN = 10,
    TN__DL_FLOAT8_E5M2 = 12,
    TN__DL_FLOAT8_E8M0FNU = 14,
    TN__DL_FLOAT4_E2M1FN = 17
};

enum { TN__DL_READ_ONLY = 1, TN__DL_IS_COPIED = 2, TN__DL_SUBBYTE_PADDED = 4 };

typedef struct tn__dl_device {
    int32_t type;
    int32_t id;
} tn__dl_device;

typedef struct tn__dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} tn__dl_dtype;

typedef struct tn__dl_tensor {
    void *data;
    tn__dl_device device;
    int32_t rank;
    tn__dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL, before DLPack 1.2: row-major without gaps */
    uint64_t byte_offset;
} tn__dl_tensor;

typedef struct tn__dl_managed {
    tn__dl_tensor tensor;
    void *context;
    void (*deleter)(struct tn__dl_managed *self); /* NULL: there is nothing to do */
} tn__dl_managed;

typedef struct tn__dl_versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct tn__dl_versioned *self);
    uint64_t flags;
    tn__dl_tensor tensor;
} tn__dl_versioned;

#endif
