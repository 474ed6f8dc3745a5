/* What the GPU tests share: a side (device, pool, stream, scope) of each driver, tensors on both
 * sides with the same contents, fills, and a table of what was compared.
 *
 * Without a real GPU gpu_open ends the program with status 77, a skip.
 */
#ifndef TENURE_GPU_SUPPORT_H
#define TENURE_GPU_SUPPORT_H

#include "test_support.h"

#include "tenure_ops.h"

typedef struct gpu_side {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_scope scope;
} gpu_side;

/* The first real CUDA device, or exit(77). */
void gpu_open(gpu_side *side);
/* The host driver with memory_bytes to offer. */
void gpu_open_host(gpu_side *side, size_t memory_bytes);
/* Closes everything; fails if a block is left. */
void gpu_close(gpu_side *side);

/* ---- numbers ------------------------------------------------------------------------------- */

uint64_t gpu_random(uint64_t *state);
/* Normal, mean 0 and variance 1. */
float gpu_normal(uint64_t *state);
double gpu_fp8_value(tn_dtype dtype, unsigned char bits);
double gpu_value(tn_dtype dtype, const void *data, size_t index);
/* Rounds to nearest even; NaN, infinities, -0 and denormals are kept. */
void gpu_put(tn_dtype dtype, void *data, size_t index, float value);

typedef enum gpu_fill {
    GPU_FILL_NORMAL = 0,
    GPU_FILL_ZERO,     /* +0 and -0 */
    GPU_FILL_SPECIAL,  /* normal with NaN, infinities, -0 here and there */
    GPU_FILL_DENORMAL, /* all denormal in the type */
    GPU_FILL_MAXIMUM,  /* the type's largest, both signs */
    GPU_FILL_RANGE,    /* magnitudes over the whole range of the type */
    GPU_FILL_COUNT
} gpu_fill;
const char *gpu_fill_name(gpu_fill fill);
void gpu_fill_values(gpu_fill fill, tn_dtype dtype, uint64_t seed, void *data, size_t count);

/* ---- tensors ------------------------------------------------------------------------------- */

tn_tensor gpu_plain(gpu_side *side, tn_dtype dtype, int64_t rows, int64_t cols);
tn_tensor gpu_fp8(gpu_side *side, tn_format format, tn_dtype dtype, tn_scale_mode mode,
                  int64_t rows, int64_t cols);
void gpu_destroy(gpu_side *side, tn_tensor tensor);
void gpu_upload(gpu_side *side, tn_tensor tensor, const void *data);
/* Every byte of the plane, scales and their padding too, becomes 0xFF (all NaN). */
void gpu_poison(gpu_side *side, tn_tensor tensor, tn_plane plane);

/* A plane in host memory; freed by gpu_copy_end. */
typedef struct gpu_copy {
    tn_plane_layout layout;
    unsigned char *data;
    float *scale;
} gpu_copy;
gpu_copy gpu_download(gpu_side *side, tn_tensor tensor, tn_plane plane);
void gpu_copy_end(gpu_copy *copy);
/* 1 if data and scales, padding included, have the same bytes; else says where they differ. */
int gpu_copies_equal(const gpu_copy *actual, const gpu_copy *expected, const char *what);

/* ---- the table of what was compared ---------------------------------------------------------- */

/* Counts one comparison under a name; `passed` 0 is a failure. */
void gpu_count(const char *name, int passed);
/* Prints name, cases and failures, and fails if there were any. */
void gpu_count_report(const char *title);

#endif
