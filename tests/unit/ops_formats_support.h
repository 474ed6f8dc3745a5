/* Planes of any quantized format in plain memory, and a reference for their casts that shares no
 * code with the host kernels: values of codes from the definitions of the types, in double, and the
 * nearest one found by comparing with all of them. */
#ifndef TENURE_TESTS_OPS_FORMATS_SUPPORT_H
#define TENURE_TESTS_OPS_FORMATS_SUPPORT_H

#include "ops_planes_support.h"

/* Filled with 0xFF bytes, with as many behind it that must stay. */
test_plane format_plane_make(tn_format format, tn_plane plane, tn_dtype dtype, int64_t m,
                             int64_t k);

/* Fails if anything was written behind data or scales; frees. */
void format_plane_free(test_plane *plane);

/* What the type says a code is worth; NaN where it is none. E4M3, E5M2, E2M1 or E8M0. */
double format_code_value(tn_dtype dtype, unsigned code);

/* The code whose value is nearest, ties to the even code; saturates; NaN as the type has it. */
unsigned format_nearest_code(tn_dtype dtype, double value);

unsigned format_plane_code(const test_plane *plane, int64_t m, int64_t k);
double format_plane_scale(const test_plane *plane, int64_t m, int64_t k); /* of blocks */

/* The fp32 value that dequantizing must give. */
float format_plane_value(const test_plane *plane, int64_t m, int64_t k);

/* Padding of scales, and half bytes behind rows of an odd number of elements, put to a byte that
 * nobody may read; and: fails unless all of it is 0. */
void format_plane_poison(test_plane *plane);
void format_plane_expect_zero_padding(const test_plane *plane);

/* Quantizes src into the planes that are not NULL. */
void format_quantize(const tn__matrix *src, test_plane *row, test_plane *col, tn_scale_mode mode,
                     float epsilon);

/* Fails unless the plane is, bit for bit, what the reference makes of src. */
void format_plane_expect_quantized(const test_plane *plane, const tn__matrix *src,
                                   tn_scale_mode mode, float epsilon);

#endif
