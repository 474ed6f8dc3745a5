/* Planes in plain memory for tests of host kernels, and a reference quantizer that shares no code
 * with them: it goes block by block over (m, k), in double, and searches for the nearest code. */
#ifndef TENURE_TESTS_OPS_PLANES_SUPPORT_H
#define TENURE_TESTS_OPS_PLANES_SUPPORT_H

#include "test_support.h"

#include "host_kernels.h"
#include "test_ops.h"

/* A plane of an M x K tensor, filled with 0xFF bytes (so every scale is NaN) before and after. */
typedef struct test_plane {
    tn_plane_view view;
    tn_format format;
    int64_t m, k;
} test_plane;

test_plane test_plane_make(tn_format format, tn_plane plane, tn_dtype dtype, int64_t m, int64_t k);

/* Fails if anything was written behind data or scales; frees. */
void test_plane_free(test_plane *plane);

/* Fails unless all padding of the scales is +0. */
void test_plane_expect_zero_padding(const test_plane *plane);

/* Puts NaN there, to show that nobody reads it. */
void test_plane_poison_padding(test_plane *plane);

uint8_t test_plane_code(const test_plane *plane, int64_t m, int64_t k);
float test_plane_scale(const test_plane *plane, int64_t m, int64_t k);

/* q * scale in double: what the plane says the value is. */
double test_plane_value(const test_plane *plane, int64_t m, int64_t k);

/* A source matrix whose blocks differ in magnitude, with zeros and -0 among them. */
tn__matrix test_matrix_make(tn_dtype dtype, int64_t rows, int64_t cols, uint32_t seed);
float test_matrix_get(const tn__matrix *matrix, int64_t row, int64_t col);
void test_matrix_set(tn__matrix *matrix, int64_t row, int64_t col, float value);
void test_matrix_free(tn__matrix *matrix);

/* Quantizes src into the planes that are not NULL. */
void test_quantize(const tn__matrix *src, test_plane *row, test_plane *col, tn_scale_mode mode,
                   float epsilon);

/* Fails unless the plane is, bit for bit, what the reference makes of src. */
void test_plane_expect_quantized(const test_plane *plane, const tn__matrix *src, tn_scale_mode mode,
                                 float epsilon);

/* A PLAIN tensor with the matrix's type, shape and contents. */
tn_tensor test_tensor_of(const test_ops *ops, tn_scope scope, const tn__matrix *matrix);

/* DATA of a PLAIN tensor, and an FP8 plane, read back. */
tn__matrix test_fetch_matrix(const test_ops *ops, tn_tensor tensor);
test_plane test_fetch_plane(const test_ops *ops, tn_tensor tensor, tn_plane plane);

/* src, quantized to planes (TN_QUANTIZE_...) of a new E4M3 tensor. */
tn_tensor test_quantized(const test_ops *ops, tn_scope scope, const tn__matrix *src,
                         tn_format format, unsigned planes);

/* Fails unless both have the same type, shape and bytes. */
void test_expect_same_matrix(const tn__matrix *a, const tn__matrix *b);

#endif
