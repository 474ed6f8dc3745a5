/* Numbers near the end of int64 that a caller gives to ops: refused, or counted without a sum that
 * does not fit (UBSan sees one that does not). */
#include "ops_groups_support.h"
#include "tenure_layers.h"

enum { SIDES = 6 };
static const int64_t sides[SIDES] = {0, 1, INT64_MAX, INT64_MAX - 127, INT64_MIN, (int64_t)1 << 62};

/* ---- shards ---------------------------------------------------------------------------------- */

/* A weight whose other side is 0 has no elements, however long this one is. */
static int is_a_weight(int64_t rows, int64_t cols) {
    return rows >= 0 && cols >= 0 && (rows == 0 || cols == 0 || rows == 1 || cols == 1);
}

static tn_status shard(const test_ops *ops, tn_tensor src, tn_tensor tiles, int64_t rows,
                       int64_t cols, int64_t first) {
    tn_shard_amax_args amax = TN_SHARD_AMAX_ARGS_INIT;
    tn_shard_quantize_args quantize = TN_SHARD_QUANTIZE_ARGS_INIT;
    amax.src = quantize.src = src;
    amax.amax = quantize.amax = tiles;
    amax.rows = quantize.rows = rows, amax.cols = quantize.cols = cols;
    amax.first = quantize.first = first;
    quantize.data = test_bytes(ops, ops->scope, "", 0);
    quantize.data_first = first;
    tn_status status = tn_shard_amax(&amax, ops->stream);
    tn_status other = tn_shard_quantize(&quantize, ops->stream);
    if (first == 0) assert_int_equal(status == TN_OK, other == TN_OK);
    return status;
}

static void sides_of_sharded_weights(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_tensor src = test_plain(ops.scope, TN_FP32, 0, 1),
              tiles = test_plain(ops.scope, TN_FP32, 0, 1);
    test_declare_valid(&ops, src, TN_PLANE_DATA);
    test_declare_valid(&ops, tiles, TN_PLANE_DATA);
    for (int r = 0; r < SIDES; r++) {
        for (int c = 0; c < SIDES; c++) {
            for (int first = 0; first < SIDES; first++) {
                tn_status status = shard(&ops, src, tiles, sides[r], sides[c], sides[first]);
                int is_none = is_a_weight(sides[r], sides[c]) && (sides[r] == 0 || sides[c] == 0);
                if (is_none && sides[first] == 0) {
                    assert_int_equal(status, TN_OK);
                } else {
                    assert_int_equal(status, TN_INVALID_ARGUMENT);
                }
            }
        }
    }
    test_ops_close_host(&ops);
}

/* ---- groups ---------------------------------------------------------------------------------- */

static void rows_of_padded_groups(void **state) {
    static const int64_t offsets[] = {0, 3, 5};
    static const uint32_t no_error;
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_pad_groups_args args = TN_PAD_GROUPS_ARGS_INIT;
    args.offsets = test_bytes(&ops, ops.scope, offsets, sizeof offsets);
    args.padded_offsets = test_plain(ops.scope, TN_BYTE, 1, sizeof offsets);
    args.map = test_plain(ops.scope, TN_BYTE, 600, 8);
    args.error = test_bytes(&ops, ops.scope, &no_error, sizeof no_error);
    args.scope = ops.scope;
    for (int i = 0; i < SIDES; i++) {
        args.inverse = test_plain(ops.scope, TN_BYTE, 5, 8), args.rows = sides[i];
        EXPECT_STATUS(tn_pad_groups(&args, ops.stream), TN_INVALID_ARGUMENT);
        args.inverse.value = 0, args.rows = 5, args.multiple = sides[i];
        EXPECT_STATUS(tn_pad_groups(&args, ops.stream),
                      sides[i] == 1 ? TN_OK : TN_INVALID_ARGUMENT);
        args.multiple = 128;
    }
    args.rows = INT64_MAX / 8; /* with nothing made for each row, as many as one likes */
    EXPECT_OK(tn_pad_groups(&args, ops.stream));
    test_ops_close_host(&ops);
}

/* What the device finds in the table: the host can only leave a word. */
static void offsets_that_only_the_device_sees(void **state) {
    static const int64_t tables[][4] = {{0, 5, 5, INT64_MAX},
                                        {0, INT64_MAX, INT64_MAX, INT64_MAX},
                                        {0, INT64_MIN, 5, 20},
                                        {INT64_MIN, 0, 5, 20},
                                        {0, INT64_MAX, INT64_MIN, 20}};
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 5 * 2; i++) {
        static const int64_t counts[] = {5, 0, 15};
        test_grouped made = {.groups = 3,
                             .format = i / 5 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D,
                             .dtype = TN_E4M3,
                             .planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL};
        test_grouped_counts(&made, counts, TN_BF16, 70, 1);
        for (int g = 0; g < 4; g++)
            made.offsets[g] = tables[i % 5][g];
        test_grouped_run(&ops, &made);
        assert_int_equal(made.error, i % 5 < 2 ? TN_GROUPED_OVER_CAPACITY : TN_GROUPED_BAD_OFFSETS);
        test_grouped_end(&made);
    }
    test_ops_close_host(&ops);
}

static void scales_of_groups_are_counted_or_refused(void **state) {
    (void)state;
    for (int i = 0; i < SIDES * SIDES * SIDES; i++) {
        int64_t groups = sides[i % SIDES], rows = sides[i / SIDES % SIDES];
        int64_t cols = sides[i / SIDES / SIDES], floats = -1;
        for (int way = 0; way < 4; way++) {
            tn_status status = tn_grouped_scale_floats(
                way / 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D,
                way % 2 ? TN_PLANE_COL : TN_PLANE_ROW, groups, rows, cols, &floats);
            if (status != TN_OK) assert_int_equal(status, TN_INVALID_ARGUMENT);
            assert_true(status != TN_OK || floats >= 0);
        }
    }
}

/* ---- places in tensors ----------------------------------------------------------------------- */

static void slots_of_delayed_scaling(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix values = test_matrix_make(TN_BF16, 3, 5, 1);
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = test_tensor_of(&ops, ops.scope, &values);
    args.dst = test_fp8(ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, 3, 5);
    args.scale = test_plain(ops.scope, TN_FP32, 1, 1);
    test_declare_valid(&ops, args.scale, TN_PLANE_DATA);
    for (int i = 0; i < SIDES; i++) {
        args.slot = sides[i];
        EXPECT_STATUS(tn_quantize(&args, ops.stream), i == 0 ? TN_OK : TN_INVALID_ARGUMENT);
    }
    test_matrix_free(&values);
    test_ops_close_host(&ops);
}

/* ---- tensors without elements, however long one side is -------------------------------------- */

/* Of a tensor that can be made. */
#define SIDE_MAX ((int64_t)1 << 62)

typedef struct extent {
    int64_t rows, cols;
} extent;

static const extent without_elements[] = {
    {0, SIDE_MAX}, {SIDE_MAX, 0}, {0, 0}, {SIDE_MAX - 127, 0}, {(int64_t)1 << 44, 0}};
enum { WITHOUT_ELEMENTS = sizeof without_elements / sizeof *without_elements };

static tn_tensor nothing(const test_ops *ops, tn_dtype dtype, extent s) {
    tn_tensor tensor = test_plain(ops->scope, dtype, s.rows, s.cols);
    test_declare_valid(ops, tensor, TN_PLANE_DATA);
    return tensor;
}

static void casts_of_nothing(const test_ops *ops, extent s) {
    static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D,
                                        TN_FORMAT_FP8_TENSOR, TN_FORMAT_MXFP8, TN_FORMAT_NVFP4};
    for (int i = 0; i < 5; i++) {
        tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
        tn_dequantize_args dequantize = TN_DEQUANTIZE_ARGS_INIT;
        quantize.src = nothing(ops, TN_BF16, s);
        quantize.dst = test_fp8(ops->scope, formats[i], i == 4 ? TN_E2M1 : TN_E4M3, s.rows, s.cols);
        quantize.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        dequantize.src = quantize.dst, dequantize.dst = quantize.src;
        EXPECT_OK(tn_quantize(&quantize, ops->stream));
        EXPECT_OK(tn_dequantize(&dequantize, ops->stream));
    }
}

static void norms_of_nothing(const test_ops *ops, extent s) {
    tn_norm_args norm = TN_NORM_ARGS_INIT;
    tn_norm_backward_args back = TN_NORM_BACKWARD_ARGS_INIT;
    norm.norm = back.norm = TN_NORM_LAYER;
    norm.x = back.x = nothing(ops, TN_BF16, s);
    norm.y = nothing(ops, TN_BF16, s);
    norm.scope = ops->scope;
    EXPECT_OK(tn_norm_forward(&norm, ops->stream));
    if (s.cols == 0) return; /* without columns there are statistics of each row still */
    back.dy = nothing(ops, TN_BF16, s), back.dx = nothing(ops, TN_BF16, s);
    back.mean = nothing(ops, TN_FP32, (extent){0, 1});
    back.rstd = nothing(ops, TN_FP32, (extent){0, 1});
    back.scope = ops->scope;
    EXPECT_OK(tn_norm_backward(&back, ops->stream));
}

static void producers_of_nothing(const test_ops *ops, extent s) {
    tn_activation_args forward = TN_ACTIVATION_ARGS_INIT;
    tn_activation_backward_args back = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    tn_bias_gradient_args bias = TN_BIAS_GRADIENT_ARGS_INIT;
    forward.x = back.x = nothing(ops, TN_BF16, s), forward.y = nothing(ops, TN_BF16, s);
    EXPECT_OK(tn_activation_forward(&forward, ops->stream));
    back.dy = nothing(ops, TN_BF16, s), back.dx = nothing(ops, TN_BF16, s);
    back.scope = bias.scope = ops->scope;
    if (s.cols == 0) back.dbias = nothing(ops, TN_FP32, (extent){1, 0});
    EXPECT_OK(tn_activation_backward(&back, ops->stream));
    if (s.cols != 0) return; /* the sums are as many as there are columns */
    bias.dy = back.dy, bias.dbias = back.dbias;
    EXPECT_OK(tn_bias_gradient(&bias, ops->stream));
}

static void elements_of_nothing(const test_ops *ops, extent s) {
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    tn_axpy_args axpy = TN_AXPY_ARGS_INIT;
    tn_square_sums_args sums = TN_SQUARE_SUMS_ARGS_INIT;
    convert.x = axpy.x = sums.x = nothing(ops, TN_BF16, s);
    convert.y = axpy.y = nothing(ops, TN_FP32, s);
    sums.sums = test_plain(ops->scope, TN_FP32, 1, TN_SQUARE_SUMS);
    EXPECT_OK(tn_convert(&convert, ops->stream));
    EXPECT_OK(tn_axpy(&axpy, ops->stream));
    EXPECT_OK(tn_square_sums(&sums, ops->stream));
}

/* [rows, 0] by [0, 0]: nothing is contracted, and nothing made. */
static void products_of_nothing(const test_ops *ops, extent s) {
    tn_linear_forward_args forward = TN_LINEAR_FORWARD_ARGS_INIT;
    tn_linear_backward_args back = TN_LINEAR_BACKWARD_ARGS_INIT;
    const extent weight = {s.cols, s.cols};
    if (s.cols != 0) return;
    forward.x = back.x = nothing(ops, TN_BF16, s), forward.y = nothing(ops, TN_BF16, s);
    forward.w.weight = back.w.weight = nothing(ops, TN_BF16, weight);
    forward.common.scope = back.common.scope = ops->scope;
    back.dy = nothing(ops, TN_BF16, s), back.dx = nothing(ops, TN_BF16, s);
    back.gradient.dweight = nothing(ops, TN_FP32, weight);
    back.gradient.dbias = nothing(ops, TN_FP32, (extent){1, 0});
    EXPECT_OK(tn_linear_forward(&forward, NULL, ops->stream));
    EXPECT_OK(tn_linear_backward(&back, NULL, NULL, ops->stream));
}

static void nothing_is_success_however_long_it_is(void **state) {
    (void)state;
    for (int i = 0; i < 2 * WITHOUT_ELEMENTS; i++) {
        const extent s = without_elements[i / 2];
        test_ops ops = i % 2 ? test_ops_open(test_open_sim(0, 0)) : test_ops_open_host();
        tn_device *device = ops.device;
        casts_of_nothing(&ops, s);
        norms_of_nothing(&ops, s);
        producers_of_nothing(&ops, s);
        elements_of_nothing(&ops, s);
        products_of_nothing(&ops, s);
        if (i % 2) {
            test_ops_close(&ops);
            test_close_sim(device);
        } else {
            test_ops_close_host(&ops);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sides_of_sharded_weights),
        cmocka_unit_test(rows_of_padded_groups),
        cmocka_unit_test(offsets_that_only_the_device_sees),
        cmocka_unit_test(scales_of_groups_are_counted_or_refused),
        cmocka_unit_test(slots_of_delayed_scaling),
        cmocka_unit_test(nothing_is_success_however_long_it_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
