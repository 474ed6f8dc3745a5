/* tn_quantize and tn_dequantize of TENSOR, MXFP8 and NVFP4 tensors on the host device, and delayed
 * scaling: what is kept between steps, and what is refused. */
#include "ops_formats_support.h"

#include <math.h>
#include <string.h>

#include "tenure_cast.h"

typedef struct casting {
    tn_format format;
    tn_dtype dtype;
} casting;

static const casting castings[] = {{TN_FORMAT_FP8_TENSOR, TN_E4M3},
                                   {TN_FORMAT_FP8_TENSOR, TN_E5M2},
                                   {TN_FORMAT_MXFP8, TN_E4M3},
                                   {TN_FORMAT_MXFP8, TN_E5M2},
                                   {TN_FORMAT_NVFP4, TN_E2M1}};
enum { CASTINGS = sizeof castings / sizeof *castings };

static test_plane fetch_plane(const test_ops *ops, tn_tensor tensor, tn_plane plane) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    test_plane fetched = format_plane_make(info.format, plane, info.dtype, info.rows, info.cols);
    EXPECT_OK(tn_plane_read(tensor, plane, fetched.view.data, fetched.view.layout.data_bytes,
                            fetched.view.scale, fetched.view.layout.scale_bytes, ops->stream));
    test_ops_wait(ops);
    return fetched;
}

static tn_tensor vector_of(const test_ops *ops, int64_t rows, int64_t cols, const float *values) {
    tn_tensor tensor = test_plain(ops->scope, TN_FP32, rows, cols);
    test_write(ops, tensor, values);
    return tensor;
}

/* ---- current scaling ------------------------------------------------------------------------ */

static void every_format_is_made_and_read_back(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (unsigned i = 0; i < CASTINGS * 3; i++) {
        casting what = castings[i % CASTINGS];
        tn__matrix src = test_matrix_make(TN_BF16, 130, 71, i);
        tn_scope scope = test_ops_scope(&ops, TN_SCOPE_OP, "one");
        tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
        args.src = test_tensor_of(&ops, scope, &src);
        args.dst = test_fp8(scope, what.format, what.dtype, 130, 71);
        args.planes = 1 + i / CASTINGS;
        EXPECT_OK(tn_quantize(&args, ops.stream));
        for (int side = TN_PLANE_ROW; side <= TN_PLANE_COL; side++) {
            if (!(args.planes & (side == TN_PLANE_ROW ? 1u : 2u))) continue;
            test_plane plane = fetch_plane(&ops, args.dst, (tn_plane)side);
            tn_dequantize_args back = TN_DEQUANTIZE_ARGS_INIT;
            format_plane_expect_quantized(&plane, &src, TN_SCALE_POW2, 0.0f);
            back.src = args.dst, back.plane = (tn_plane)side;
            back.dst = test_plain(scope, TN_FP32, 130, 71);
            EXPECT_OK(tn_dequantize(&back, ops.stream));
            tn__matrix values = test_fetch_matrix(&ops, back.dst);
            for (int64_t at = 0; at < 130 * 71; at++)
                assert_true(test_matrix_get(&values, at / 71, at % 71) ==
                            format_plane_value(&plane, at / 71, at % 71));
            test_matrix_free(&values), format_plane_free(&plane);
        }
        test_matrix_free(&src);
        EXPECT_OK(tn_scope_close(scope));
    }
    test_ops_close_host(&ops);
}

static void a_quantized_tensor_scale_plane_equals_the_derived_one(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix src = test_matrix_make(TN_FP32, 130, 71, 3);
    test_plane made[2];
    for (int i = 0; i < 2; i++) { /* quantized, then derived from ROW */
        tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
        args.src = test_tensor_of(&ops, ops.scope, &src);
        args.dst = test_fp8(ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, 130, 71);
        args.planes = i ? TN_QUANTIZE_ROW : TN_QUANTIZE_COL;
        EXPECT_OK(tn_quantize(&args, ops.stream));
        EXPECT_OK(tn_plane_require(args.dst, TN_PLANE_COL, ops.stream));
        made[i] = fetch_plane(&ops, args.dst, TN_PLANE_COL);
    }
    assert_memory_equal(made[0].view.data, made[1].view.data, 130 * 71);
    assert_memory_equal(made[0].view.scale, made[1].view.scale, 16);
    format_plane_free(&made[0]), format_plane_free(&made[1]), test_matrix_free(&src);
    test_ops_close_host(&ops);
}

static void an_empty_tensor_is_success_and_changes_no_history(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const float one = 1.0f;
    for (int i = 0; i < CASTINGS; i++) {
        tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
        args.src = test_plain(ops.scope, TN_BF16, i % 2 ? 0 : 5, i % 2 ? 7 : 0);
        test_declare_valid(&ops, args.src, TN_PLANE_DATA);
        args.dst = test_fp8(ops.scope, castings[i].format, castings[i].dtype, i % 2 ? 0 : 5,
                            i % 2 ? 7 : 0);
        args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        if (i < 2) args.scale = vector_of(&ops, 1, 1, &one);
        if (i < 2) args.amax_history = vector_of(&ops, 1, 1, &one);
        EXPECT_OK(tn_quantize(&args, ops.stream));
        assert_int_equal(test_state(args.dst, TN_PLANE_COL), TN_PLANE_VALID);
        if (i >= 2) continue;
        float amax = 0.0f;
        test_read(&ops, args.amax_history, &amax);
        assert_true(amax == 1.0f);
    }
    test_ops_close_host(&ops);
}

/* ---- delayed scaling ------------------------------------------------------------------------ */

static void a_given_scale_is_used_and_the_amax_collected(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const float scales[3] = {1.0f, 3.0f, 1.0f};
    const float history[6] = {9.0f, 0.5f, 9.0f, 8.0f, 7.0f, 6.0f};
    float after[6];
    float values[4] = {100.0f, -200.0f, NAN, 0.25f};
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = vector_of(&ops, 2, 2, values);
    args.dst = test_fp8(ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, 2, 2);
    args.scale = vector_of(&ops, 1, 3, scales);
    args.amax_history = vector_of(&ops, 2, 3, history);
    args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    args.slot = 1;
    EXPECT_OK(tn_quantize(&args, ops.stream));
    test_plane row = fetch_plane(&ops, args.dst, TN_PLANE_ROW);
    test_plane col = fetch_plane(&ops, args.dst, TN_PLANE_COL);
    const uint8_t codes[] = {0x79, 0xFE, 0x7F, 0x34}; /* 288 of 300, -448 of -600, NaN, 0.75 */
    for (int at = 0; at < 4; at++) {
        assert_int_equal(format_plane_code(&row, at / 2, at % 2), codes[at]);
        assert_int_equal(format_plane_code(&col, at / 2, at % 2), codes[at]);
    }
    assert_true(*row.view.global_scale == 1.0f / 3.0f && *col.view.global_scale == 1.0f / 3.0f);
    format_plane_expect_zero_padding(&row), format_plane_expect_zero_padding(&col);
    test_read(&ops, args.amax_history, after);
    assert_true(after[1] == 200.0f); /* raised; the others are not touched */
    after[1] = 0.5f;
    assert_memory_equal(after, history, sizeof history);
    EXPECT_OK(tn_quantize(&args, ops.stream)); /* a second cast of the step: the larger stays */
    test_read(&ops, args.amax_history, after);
    assert_true(after[1] == 200.0f);
    format_plane_free(&row), format_plane_free(&col);
    test_ops_close_host(&ops);
}

/* What the planes store is the canonical NaN, whichever was given. */
static void a_given_scale_that_is_nan_stays_one(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const float scale = -NAN, values[2] = {1.0f, 2.0f};
    const uint32_t canonical = 0x7FFFFFFF;
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = vector_of(&ops, 1, 2, values);
    args.dst = test_fp8(ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, 1, 2);
    args.scale = vector_of(&ops, 1, 1, &scale);
    EXPECT_OK(tn_quantize(&args, ops.stream));
    test_plane row = fetch_plane(&ops, args.dst, TN_PLANE_ROW);
    assert_memory_equal(row.view.global_scale, &canonical, sizeof canonical);
    assert_int_equal(format_plane_code(&row, 0, 0), 0x7F);
    format_plane_free(&row);
    test_ops_close_host(&ops);
}

/* Without a scale the scaling is current, and the history may be kept all the same. */
static void current_scaling_collects_the_amax_too(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const float values[2] = {-7.0f, 1.0f}, nothing = 0.0f;
    float amax;
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = vector_of(&ops, 1, 2, values);
    args.dst = test_fp8(ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, 1, 2);
    args.amax_history = vector_of(&ops, 1, 1, &nothing);
    EXPECT_OK(tn_quantize(&args, ops.stream));
    test_read(&ops, args.amax_history, &amax);
    assert_true(amax == 7.0f);
    test_plane row = fetch_plane(&ops, args.dst, TN_PLANE_ROW);
    assert_true(*row.view.global_scale == 0x1p-6f);
    format_plane_free(&row);
    test_ops_close_host(&ops);
}

/* What the text of tn_scale_update says, for one tensor and in whole arrays. */
static float updated(const tn_scale_update_args *args, float *history, int length, int stride,
                     float scale) {
    float before[8], largest = 0.0f;
    for (int i = 0; i < length; i++) {
        before[i] = history[i * stride];
        if (before[i] > largest) largest = before[i];
    }
    for (int i = 0; i < length; i++)
        history[i * stride] = i == 0 ? 0.0f : before[(i + 1) % length];
    float amax = args->amax == TN_AMAX_MOST ? largest : before[0];
    double max = args->dtype == TN_E4M3 ? 448.0 : 57344.0;
    if (amax > 0.0f && isfinite(amax)) scale = (float)(ldexp(max, -args->margin) / (double)amax);
    return isinf(scale) ? 0x1.FFFFFEp127f : scale;
}

static void updating_rolls_the_history_and_sets_the_scale(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const float amaxes[] = {0.0f, 3.0f, INFINITY, 1e-40f, 0.7f, 1e30f, NAN, 448.0f, 0.0f, 2.5f};
    for (int i = 0; i < 16; i++) {
        tn_scale_update_args args = TN_SCALE_UPDATE_ARGS_INIT;
        int length = 1 + i % 5, count = 1 + i % 3, scope_of = i % 10;
        float history[8 * 3] = {0}, scale[3] = {1.0f, 2.0f, 0.5f}, got[8 * 3], got_scale[3];
        args.amax = i % 2 ? TN_AMAX_MOST : TN_AMAX_MOST_RECENT;
        args.dtype = i % 4 < 2 ? TN_E4M3 : TN_E5M2;
        args.margin = i % 3 - 1;
        args.amax_history = vector_of(&ops, length, count, history);
        args.scale = vector_of(&ops, 1, count, scale);
        for (int step = 0; step < 12; step++) {
            for (int c = 0; c < count; c++)
                history[c] = amaxes[(step + c + scope_of) % 10];
            test_write(&ops, args.amax_history, history);
            EXPECT_OK(tn_scale_update(&args, ops.stream));
            for (int c = 0; c < count; c++)
                scale[c] = updated(&args, history + c, length, count, scale[c]);
            test_read(&ops, args.amax_history, got);
            test_read(&ops, args.scale, got_scale);
            assert_memory_equal(got, history, sizeof(float) * (size_t)(length * count));
            assert_memory_equal(got_scale, scale, sizeof(float) * (size_t)count);
        }
    }
    test_ops_close_host(&ops);
}

/* ---- refusals ------------------------------------------------------------------------------- */

static void what_delayed_scaling_can_not_use_is_refused(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    tn_tensor vector = vector_of(&ops, 1, 4, ones), matrix = vector_of(&ops, 2, 4, ones);
    tn_tensor half = test_plain(ops.scope, TN_BF16, 1, 4);
    tn_tensor block = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 1, 4);
    for (int i = 0; i < 7; i++) {
        static const char *const words[] = {"slot is 4", "slot is -1", "expected fp8_tensor",
                                            "bf16",      "slot is 1",  "neither scale nor",
                                            "slot is 4"};
        tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
        args.src = vector, args.dst = test_fp8(ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, 1, 4);
        args.scale = vector_of(&ops, 1, 4, ones), args.amax_history = matrix;
        if (i == 0) args.slot = 4;
        if (i == 1) args.slot = -1;
        if (i == 2) args.dst = block;
        if (i == 3) args.scale = half;
        if (i == 4) args.scale = vector_of(&ops, 1, 1, ones), args.slot = 1;
        if (i == 5) args.scale = args.amax_history = (tn_tensor){0}, args.slot = 1;
        if (i == 6) args.scale = (tn_tensor){0}, args.slot = 4;
        EXPECT_STATUS(tn_quantize(&args, ops.stream), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS(words[i]);
        assert_int_equal(test_state(args.dst, TN_PLANE_ROW), TN_PLANE_ABSENT);
    }
    for (int i = 0; i < 7; i++) {
        static const char *const words[] = {
            "e4m3 or e5m2", "margin is 65", "amax is 2", "args->size", "bf16", "4 tensors", "bf16"};
        tn_scale_update_args args = TN_SCALE_UPDATE_ARGS_INIT;
        args.amax_history = matrix, args.scale = vector;
        if (i == 0) args.dtype = TN_FP32;
        if (i == 1) args.margin = 65;
        if (i == 2) args.amax = (tn_amax_choice)2;
        if (i == 3) args.size--;
        if (i == 4) args.scale = half;
        if (i == 5) args.scale = vector_of(&ops, 1, 3, ones);
        if (i == 6) args.amax_history = half;
        EXPECT_STATUS(tn_scale_update(&args, ops.stream), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS(words[i]);
    }
    test_ops_close_host(&ops);
}

static void a_history_that_is_not_valid_fails_and_makes_no_plane(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const float ones[4] = {1, 1, 1, 1};
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = vector_of(&ops, 1, 4, ones);
    args.dst = test_fp8(ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, 1, 4);
    args.amax_history = test_plain(ops.scope, TN_FP32, 1, 4);
    EXPECT_STATUS(tn_quantize(&args, ops.stream), TN_INVALID_STATE);
    assert_int_equal(test_state(args.dst, TN_PLANE_ROW), TN_PLANE_ABSENT);
    assert_int_equal(test_state(args.amax_history, TN_PLANE_DATA), TN_PLANE_ABSENT);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_is_made_and_read_back),
        cmocka_unit_test(a_quantized_tensor_scale_plane_equals_the_derived_one),
        cmocka_unit_test(an_empty_tensor_is_success_and_changes_no_history),
        cmocka_unit_test(a_given_scale_is_used_and_the_amax_collected),
        cmocka_unit_test(a_given_scale_that_is_nan_stays_one),
        cmocka_unit_test(current_scaling_collects_the_amax_too),
        cmocka_unit_test(updating_rolls_the_history_and_sets_the_scale),
        cmocka_unit_test(what_delayed_scaling_can_not_use_is_refused),
        cmocka_unit_test(a_history_that_is_not_valid_fails_and_makes_no_plane),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
