/* Arguments of the products of cuda_wgmma.cu, between the host and the kernels. */
#ifndef TENURE_CUDA_WGMMA_ARGUMENTS_H
#define TENURE_CUDA_WGMMA_ARGUMENTS_H

#include <stdint.h>

enum {
    TN__WGMMA_WARPGROUPS = 3, /* that multiply; one more moves what they read */
    TN__WGMMA_PART = 64,      /* rows of d that one of them has */
    TN__WGMMA_ROWS = TN__WGMMA_WARPGROUPS * TN__WGMMA_PART, /* of a block's tile of d */
    TN__WGMMA_COLS = 128,
    TN__WGMMA_DEPTH = 128, /* of a step: the elements that a scale is of */
    TN__WGMMA_STEPS = 4,   /* steps in shared memory */
    TN__WGMMA_THREADS = (TN__WGMMA_WARPGROUPS + 1) * 128,
    TN__WGMMA_BOXES = 2,       /* of d, of 64 rows of 128 bytes, that a warpgroup has at once */
    TN__WGMMA_BOX_BYTES = 128, /* of a row of such a box */
    TN__WGMMA_SHARED_BYTES =
        1024 + /* to align it */
        TN__WGMMA_STEPS * (TN__WGMMA_ROWS + TN__WGMMA_COLS) * TN__WGMMA_DEPTH +
        TN__WGMMA_WARPGROUPS * TN__WGMMA_BOXES * TN__WGMMA_PART * TN__WGMMA_BOX_BYTES +
        TN__WGMMA_STEPS * (TN__WGMMA_ROWS + TN__WGMMA_COLS) * 4 + 2 * TN__WGMMA_STEPS * 8
};

/* d [rows, cols] = (adds ? d : 0) + a [rows, contracted] b [cols, contracted]^T with their scales:
 * a's are 1 x 128, one row of `rows` for each step; b's likewise, or 128 x 128, of which those of a
 * row of tiles follow each other. What tn__driver.box_map says is of boxes of TN__WGMMA_ROWS x 128
 * of a, TN__WGMMA_COLS x 128 of b, one row of TN__WGMMA_ROWS or TN__WGMMA_COLS scales, and 64 rows
 * of 128 bytes of d. */
typedef struct tn__cuda_wgmma_arguments {
    unsigned char a_map[128], b_map[128], a_scale_map[128], b_scale_map[128], d_map[128];
    const unsigned char *a, *b;
    const float *a_scale, *b_scale;
    void *d;
    int64_t b_scale_stride; /* of 128 x 128: between rows of tiles */
    int rows, cols, contracted;
    int tiles_down, tiles_across;
    int d_type; /* place among fp32, bf16, fp16 */
    int adds;   /* fp32 only */
} __attribute__((aligned(64))) tn__cuda_wgmma_arguments;

#endif
