/* One call of tn_grouped_quantize with all that it reads and leaves, for tests. */
#ifndef TENURE_TESTS_OPS_GROUPS_SUPPORT_H
#define TENURE_TESTS_OPS_GROUPS_SUPPORT_H

#include "ops_planes_support.h"

#include "tenure_grouped.h"

enum { TEST_GROUPED_BEFORE = 0xA5, TEST_GROUPS_MAX = 130 };

/* One plane as the call left it; every byte was TEST_GROUPED_BEFORE before. */
typedef struct test_grouped_plane {
    uint8_t *data;
    float *scale;
    int64_t data_bytes;
    int64_t scale_floats; /* before the call: how many to have, 0 for the bound */
} test_grouped_plane;

typedef struct test_grouped {
    int64_t groups;
    tn_format format;
    tn_dtype dtype;
    tn_scale_mode mode;
    float epsilon;
    unsigned planes;    /* TN_QUANTIZE_... */
    int64_t spare_rows; /* of src behind the last group */
    int has_skip;
    float skip;
    uint32_t error_before;
    tn__matrix src;
    int64_t offsets[TEST_GROUPS_MAX + 1];
    test_grouped_plane row, col; /* from here on: what came of it */
    uint32_t error;
} test_grouped;

/* Makes offsets and src for that many rows in each group. */
void test_grouped_counts(test_grouped *made, const int64_t *counts, tn_dtype source, int64_t cols,
                         uint32_t seed);

/* Makes the tensors, calls, and reads back what came of it. */
void test_grouped_run(const test_ops *ops, test_grouped *made);

void test_grouped_end(test_grouped *made);

/* The rows of a group, in src's own memory. */
tn__matrix test_group(const test_grouped *made, int64_t group);

/* A PLAIN tensor with these bytes: of TN_BYTE. */
tn_tensor test_bytes(const test_ops *ops, tn_scope scope, const void *bytes, size_t count);

#endif
