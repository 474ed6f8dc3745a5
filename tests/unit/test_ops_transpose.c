/* Planes derived from each other on the host, there and back: 2D and one scale for a tensor. The
 * derived plane is compared with its definition, element by element, and the round trip with the
 * bytes that were written; padding of scales is NaN before and 0 after.
 */
#include "test_ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_TENSOR};
static const int64_t shapes[][2] = {{1, 1},   {1, 300},   {300, 1},   {127, 129}, {128, 128},
                                    {129, 5}, {640, 257}, {130, 515}, {4, 4096}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* A whole plane in host memory of exactly its size. */
typedef struct plane_bytes {
    tn_plane_layout layout;
    uint8_t *data;
    float *scale;
} plane_bytes;

static plane_bytes bytes_for(tn_tensor tensor, tn_plane plane) {
    plane_bytes of;
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &of.layout));
    of.data = malloc(of.layout.data_bytes);
    of.scale = malloc(of.layout.scale_bytes);
    assert_true(of.data && of.scale);
    return of;
}

static void bytes_free(const plane_bytes *of) {
    free(of->data);
    free(of->scale);
}

/* Every byte value in turn, scales that are all different, NaN in the padding. */
static plane_bytes random_plane(tn_tensor tensor, tn_plane plane) {
    plane_bytes of = bytes_for(tensor, plane);
    uint64_t state = 7;
    for (size_t i = 0; i < of.layout.data_bytes; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        of.data[i] = (uint8_t)(state >> 56);
    }
    for (int64_t r = 0; r < of.layout.scale_rows; r++) {
        for (int64_t c = 0; c < of.layout.scale_stride; c++)
            of.scale[r * of.layout.scale_stride + c] =
                c < of.layout.scale_cols ? ldexpf(1.0f + (float)c, (int)(r % 60)) : NAN;
    }
    return of;
}

static void write(const test_ops *ops, tn_tensor tensor, tn_plane plane, const plane_bytes *from) {
    EXPECT_OK(tn_plane_write(tensor, plane, from->data, from->layout.data_bytes, from->scale,
                             from->layout.scale_bytes, ops->stream));
}

static plane_bytes read(const test_ops *ops, tn_tensor tensor, tn_plane plane) {
    plane_bytes of = bytes_for(tensor, plane);
    EXPECT_OK(tn_plane_read(tensor, plane, of.data, of.layout.data_bytes, of.scale,
                            of.layout.scale_bytes, ops->stream));
    test_ops_wait(ops);
    return of;
}

static int is_zero(float value) { return value == 0.0f && !signbit(value); }

static void expect_transposed(const plane_bytes *from, const plane_bytes *to) {
    const tn_plane_layout *a = &from->layout, *b = &to->layout;
    assert_int_equal(b->rows, a->cols);
    assert_int_equal(b->scale_rows, a->scale_cols);
    for (int64_t r = 0; r < b->rows; r++) {
        for (int64_t c = 0; c < b->cols; c++)
            if (to->data[r * b->cols + c] != from->data[c * a->cols + r])
                fail_msg("element (%lld, %lld) differs", (long long)r, (long long)c);
    }
    for (int64_t r = 0; r < b->scale_rows; r++) {
        for (int64_t c = 0; c < b->scale_stride; c++) {
            float scale = to->scale[r * b->scale_stride + c];
            int is_padding = c >= b->scale_cols;
            assert_true(is_padding ? is_zero(scale)
                                   : scale == from->scale[c * a->scale_stride + r]);
        }
    }
}

static void expect_same_plane(const plane_bytes *first, const plane_bytes *again) {
    const tn_plane_layout *layout = &first->layout;
    assert_memory_equal(again->data, first->data, layout->data_bytes);
    for (int64_t r = 0; r < layout->scale_rows; r++)
        assert_memory_equal(again->scale + r * layout->scale_stride,
                            first->scale + r * layout->scale_stride,
                            (size_t)layout->scale_cols * sizeof(float));
}

static void round_trip(const test_ops *ops, tn_format format, int64_t m, int64_t k, tn_plane from,
                       tn_plane to) {
    tn_tensor tensor = test_fp8(ops->scope, format, TN_E4M3, m, k);
    plane_bytes written = random_plane(tensor, from);
    write(ops, tensor, from, &written);
    plane_bytes derived = read(ops, tensor, to);
    expect_transposed(&written, &derived);
    EXPECT_OK(tn_plane_drop(tensor, from, ops->stream));
    EXPECT_OK(tn_plane_require(tensor, from, ops->stream));
    plane_bytes back = read(ops, tensor, from);
    expect_transposed(&derived, &back);
    expect_same_plane(&written, &back);
    bytes_free(&written), bytes_free(&derived), bytes_free(&back);
    EXPECT_OK(tn_tensor_destroy(tensor, ops->stream));
}

static void planes_derived_there_and_back_have_the_same_bits(void **state) {
    test_ops ops = test_ops_open_host();
    (void)state;
    for (int f = 0; f < 2; f++) {
        for (int s = 0; s < SHAPES; s++) {
            round_trip(&ops, formats[f], shapes[s][0], shapes[s][1], TN_PLANE_ROW, TN_PLANE_COL);
            round_trip(&ops, formats[f], shapes[s][0], shapes[s][1], TN_PLANE_COL, TN_PLANE_ROW);
        }
    }
    test_ops_close_host(&ops);
}

static void a_tensors_one_scale_is_where_the_view_says(void **state) {
    test_ops ops = test_ops_open_host();
    tn_tensor tensor = test_fp8(ops.scope, TN_FORMAT_FP8_TENSOR, TN_E5M2, 130, 70);
    plane_bytes written = random_plane(tensor, TN_PLANE_ROW);
    tn_plane_view view;
    tn_lease lease;
    (void)state;
    written.scale[0] = 0.75f;
    write(&ops, tensor, TN_PLANE_ROW, &written);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_READ, ops.stream, &lease, &view));
    test_ops_wait(&ops);
    assert_ptr_equal(view.global_scale, view.scale);
    assert_true(*view.global_scale == 0.75f);
    EXPECT_OK(tn_lease_end(lease));
    bytes_free(&written);
    test_ops_close_host(&ops);
}

/* NVFP4 has no ops yet: its planes can be made, written and leased all the same. */
static void the_scale_of_an_nvfp4_tensor_comes_after_the_others(void **state) {
    test_ops ops = test_ops_open_host();
    tn_tensor tensor = test_fp8(ops.scope, TN_FORMAT_NVFP4, TN_E2M1, 130, 70);
    tn_plane_view view;
    tn_lease lease;
    (void)state;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_WRITE, ops.stream, &lease, &view));
    const size_t blocks = (size_t)128 * 12; /* 70 rows of 130 elements: up128(70) x up4(9) */
    assert_int_equal(view.layout.data_bytes, 70 * 65);
    assert_int_equal(view.layout.scale_bytes, blocks + 16);
    assert_ptr_equal(view.global_scale, (char *)view.scale + blocks);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_STATUS(tn_plane_require(tensor, TN_PLANE_ROW, ops.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("each plane has scales of its own");
    test_ops_close_host(&ops);
}

static void a_format_without_exact_transposes_is_refused_by_name(void **state) {
    test_ops ops = test_ops_open_host();
    tn_transpose_args args = TN_TRANSPOSE_ARGS_INIT;
    (void)state;
    args.tensor = test_fp8(ops.scope, TN_FORMAT_MXFP8, TN_E4M3, 64, 64);
    EXPECT_STATUS(tn_transpose(&args, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("is mxfp8, expected fp8_block_2d or fp8_tensor");
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(planes_derived_there_and_back_have_the_same_bits),
        cmocka_unit_test(a_tensors_one_scale_is_where_the_view_says),
        cmocka_unit_test(the_scale_of_an_nvfp4_tensor_comes_after_the_others),
        cmocka_unit_test(a_format_without_exact_transposes_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
