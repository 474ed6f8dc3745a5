/* Calls of tn_grouped_quantize: see ops_groups_support.h. */
#include "ops_groups_support.h"

#include <stdlib.h>
#include <string.h>

tn_tensor test_bytes(const test_ops *ops, tn_scope scope, const void *bytes, size_t count) {
    tn_tensor tensor = test_plain(scope, TN_BYTE, 1, (int64_t)count);
    test_write(ops, tensor, bytes);
    return tensor;
}

void test_grouped_counts(test_grouped *made, const int64_t *counts, tn_dtype source, int64_t cols,
                         uint32_t seed) {
    assert_true(made->groups <= TEST_GROUPS_MAX);
    made->offsets[0] = 0;
    for (int64_t g = 0; g < made->groups; g++)
        made->offsets[g + 1] = made->offsets[g] + counts[g];
    made->src =
        test_matrix_make(source, made->offsets[made->groups] + made->spare_rows, cols, seed);
}

tn__matrix test_group(const test_grouped *made, int64_t group) {
    tn__matrix rows = made->src;
    int64_t first = made->offsets[group];
    rows.data = (char *)rows.data + (size_t)(first * rows.cols) * tn_dtype_bytes(rows.dtype);
    rows.rows = made->offsets[group + 1] - first;
    return rows;
}

/* Memory and tensors of one plane, all of it TEST_GROUPED_BEFORE. */
static tn_grouped_plane make_plane(const test_ops *ops, tn_scope scope, const test_grouped *made,
                                   tn_plane plane, test_grouped_plane *of) {
    tn_grouped_plane tensors;
    int64_t elements = made->src.rows * made->src.cols;
    if (of->scale_floats == 0) {
        EXPECT_OK(tn_grouped_scale_floats(made->format, plane, made->groups, made->src.rows,
                                          made->src.cols, &of->scale_floats));
    }
    of->data_bytes = elements + 5;
    of->data = malloc((size_t)of->data_bytes);
    of->scale = malloc((size_t)of->scale_floats * sizeof(float) + 1);
    memset(of->data, TEST_GROUPED_BEFORE, (size_t)of->data_bytes);
    memset(of->scale, TEST_GROUPED_BEFORE, (size_t)of->scale_floats * sizeof(float));
    tensors.data = test_bytes(ops, scope, of->data, (size_t)of->data_bytes);
    tensors.scale = test_plain(scope, TN_FP32, 1, of->scale_floats);
    test_write(ops, tensors.scale, of->scale);
    return tensors;
}

static void fetch_plane(const test_ops *ops, const tn_grouped_plane *tensors,
                        test_grouped_plane *of) {
    test_read(ops, tensors->data, of->data);
    test_read(ops, tensors->scale, of->scale);
}

void test_grouped_run(const test_ops *ops, test_grouped *made) {
    tn_scope scope = test_ops_scope(ops, TN_SCOPE_OP, "grouped");
    tn_grouped_quantize_args args = TN_GROUPED_QUANTIZE_ARGS_INIT;
    args.src = test_tensor_of(ops, scope, &made->src);
    args.offsets =
        test_bytes(ops, scope, made->offsets, (size_t)(made->groups + 1) * sizeof(int64_t));
    args.error = test_bytes(ops, scope, &made->error_before, sizeof made->error_before);
    args.format = made->format;
    args.dtype = made->dtype;
    args.scale_mode = made->mode;
    args.amax_epsilon = made->epsilon;
    args.scope = scope;
    if (made->planes & TN_QUANTIZE_ROW)
        args.row = make_plane(ops, scope, made, TN_PLANE_ROW, &made->row);
    if (made->planes & TN_QUANTIZE_COL)
        args.col = make_plane(ops, scope, made, TN_PLANE_COL, &made->col);
    if (made->has_skip) {
        args.skip = test_plain(scope, TN_FP32, 1, 1);
        test_write(ops, args.skip, &made->skip);
    }
    EXPECT_OK(tn_grouped_quantize(&args, ops->stream));
    if (made->planes & TN_QUANTIZE_ROW) fetch_plane(ops, &args.row, &made->row);
    if (made->planes & TN_QUANTIZE_COL) fetch_plane(ops, &args.col, &made->col);
    test_read(ops, args.error, &made->error);
    EXPECT_OK(tn_scope_close(scope));
}

void test_grouped_end(test_grouped *made) {
    test_matrix_free(&made->src);
    free(made->row.data), free(made->row.scale);
    free(made->col.data), free(made->col.scale);
}
