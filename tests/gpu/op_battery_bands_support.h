/* Matrices with bands of values, beside compact ones that tell what each tile must become: see
 * op_battery_bands_support.c. */
#ifndef TENURE_OP_BATTERY_BANDS_SUPPORT_H
#define TENURE_OP_BATTERY_BANDS_SUPPORT_H

#include "op_battery_support.h"

/* The first tile, one in the middle, and the last. */
battery_bands battery_bands_of(int64_t rows);

/* Data or scales of a plane of a large tensor, from those of the compact one; host memory. */
void battery_expand(const battery_bands *bands, tn_tensor large, tn_tensor compact, tn_plane plane,
                    int is_scales, const unsigned char *from, unsigned char *to);

/* 1 if all bytes of a large output are what the compact one's say. */
int battery_large_equal(gpu_side *side, const battery_bands *bands, const battery_output *large,
                        const battery_output *compact, const gpu_copy *expected);

#endif
