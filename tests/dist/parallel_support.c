/* Matrices and tensors of tests of parallel layers: see parallel_support.h. */
#include "parallel_support.h"

#include <stdlib.h>
#include <string.h>

/* ---- matrices -------------------------------------------------------------------------------- */

parallel_matrix parallel_zeros(int64_t rows, int64_t cols) {
    parallel_matrix matrix = {rows, cols, calloc((size_t)(rows * cols) + 1, sizeof(float))};
    assert_non_null(matrix.at);
    return matrix;
}

static float to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits += 0x7fff + (bits >> 16 & 1);
    bits &= 0xffff0000u;
    memcpy(&value, &bits, sizeof value);
    return value;
}

parallel_matrix parallel_numbers(int64_t rows, int64_t cols, uint32_t seed) {
    parallel_matrix matrix = parallel_zeros(rows, cols);
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t mixed = (uint32_t)i * 2654435761u + seed * 40503u;
        mixed ^= mixed >> 15;
        mixed *= 2246822519u;
        mixed ^= mixed >> 13;
        matrix.at[i] = to_bf16((float)(int32_t)mixed * 0x1p-31f);
    }
    return matrix;
}

void parallel_free(parallel_matrix *matrix) { free(matrix->at); }

parallel_matrix parallel_part(const parallel_matrix *of, int64_t row, int64_t rows, int64_t col,
                              int64_t cols) {
    parallel_matrix part = parallel_zeros(rows, cols);
    for (int64_t i = 0; i < rows; i++)
        memcpy(part.at + i * cols, of->at + (row + i) * of->cols + col,
               (size_t)cols * sizeof(float));
    return part;
}

parallel_matrix parallel_in_tiles(const parallel_matrix *of, const int64_t *rows, int ranks) {
    parallel_matrix all = parallel_zeros(parallel_total_in_tiles(rows, ranks), of->cols);
    for (int r = 0; r < ranks; r++) {
        if (rows[r] == 0) continue;
        memcpy(all.at + parallel_first_in_tiles(rows, r) * of->cols,
               of->at + parallel_first(rows, r) * of->cols,
               (size_t)(rows[r] * of->cols) * sizeof(float));
    }
    return all;
}

void parallel_add(parallel_matrix *a, const parallel_matrix *b) {
    for (int64_t i = 0; i < a->rows * a->cols; i++)
        a->at[i] += b->at[i];
}

void parallel_round(parallel_matrix *a) {
    for (int64_t i = 0; i < a->rows * a->cols; i++)
        a->at[i] = to_bf16(a->at[i]);
}

/* ---- rows ------------------------------------------------------------------------------------ */

int64_t parallel_first(const int64_t *rows, int rank) {
    int64_t first = 0;
    for (int i = 0; i < rank; i++)
        first += rows[i];
    return first;
}

int64_t parallel_first_in_tiles(const int64_t *rows, int rank) {
    int64_t first = 0;
    for (int i = 0; i < rank; i++)
        first = (first + rows[i] + PARALLEL_TILE - 1) / PARALLEL_TILE * PARALLEL_TILE;
    return first;
}

int64_t parallel_total_in_tiles(const int64_t *rows, int ranks) {
    int64_t total = 0;
    for (int i = 0; i < ranks; i++)
        if (rows[i]) total = parallel_first_in_tiles(rows, i) + rows[i];
    return total;
}

/* ---- tensors --------------------------------------------------------------------------------- */

tn_scope parallel_scope(const rank_fixture *all, tn_scope_kind kind, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope;
    config.pool = all->pool;
    config.kind = kind;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

tn_tensor parallel_tensor(const rank_fixture *all, tn_scope scope, tn_dtype dtype,
                          const parallel_matrix *of) {
    tn_tensor wide = test_plain(scope, TN_FP32, of->rows, of->cols), tensor;
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    EXPECT_OK(tn_plane_write(wide, TN_PLANE_DATA, of->at, (size_t)(of->rows * of->cols) * 4, NULL,
                             0, all->stream));
    EXPECT_OK(tn_stream_synchronize(all->device, all->stream));
    if (dtype == TN_FP32) return wide;
    tensor = test_plain(scope, dtype, of->rows, of->cols);
    args.x = wide, args.y = tensor;
    EXPECT_OK(tn_convert(&args, all->stream));
    EXPECT_OK(tn_tensor_destroy(wide, all->stream));
    return tensor;
}

tn_tensor parallel_weight(const rank_fixture *all, tn_scope scope, tn_format format,
                          const parallel_matrix *of) {
    tn_tensor plain = parallel_tensor(all, scope, TN_BF16, of);
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    if (format == TN_FORMAT_PLAIN) return plain;
    args.src = plain;
    args.dst = test_fp8(scope, format, TN_E4M3, of->rows, of->cols);
    EXPECT_OK(tn_quantize(&args, all->stream));
    EXPECT_OK(tn_tensor_destroy(plain, all->stream));
    return args.dst;
}

parallel_matrix parallel_fetch(const rank_fixture *all, tn_tensor tensor) {
    tn_scope scope = parallel_scope(all, TN_SCOPE_OP, "fetch");
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    parallel_matrix matrix = parallel_zeros(info.rows, info.cols);
    args.x = tensor, args.y = test_plain(scope, TN_FP32, info.rows, info.cols);
    EXPECT_OK(tn_convert(&args, all->stream));
    EXPECT_OK(tn_plane_read(args.y, TN_PLANE_DATA, matrix.at, (size_t)(info.rows * info.cols) * 4,
                            NULL, 0, all->stream));
    ranks_wait(all);
    EXPECT_OK(tn_scope_close(scope));
    return matrix;
}

void parallel_expect(const rank_fixture *all, const char *what, tn_tensor actual,
                     parallel_matrix expected) {
    parallel_matrix found = parallel_fetch(all, actual);
    assert_int_equal(found.rows, expected.rows);
    assert_int_equal(found.cols, expected.cols);
    for (int64_t i = 0; i < found.rows * found.cols; i++) {
        if (memcmp(&found.at[i], &expected.at[i], sizeof(float)) == 0) continue;
        if (found.at[i] == expected.at[i]) continue; /* 0 of another sign */
        fail_msg("rank %d of %d, %s: at %lld of %lld x %lld %.9g, expected %.9g", all->rank,
                 all->count, what, (long long)i, (long long)found.rows, (long long)found.cols,
                 (double)found.at[i], (double)expected.at[i]);
    }
    parallel_free(&found), parallel_free(&expected);
}
