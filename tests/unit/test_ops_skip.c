/* The skip flag: a number in device memory that says, when the work runs, whether anything is
 * done. Of tn_quantize; and of the ops that go from planes to planes, back, and on with scales. */
#include "ops_planes_support.h"

#include <string.h>

#include "tenure_cast.h"

enum { ROWS = 130, COLS = 70 };

static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};

typedef struct skipping {
    test_ops ops;
    tn_quantize_args args;
    tn__matrix before, after; /* what the planes are of, and what src has become */
} skipping;

/* Planes of one matrix, and a source with another. */
static skipping open_skipping(tn_format format, unsigned planes) {
    skipping s = {.ops = test_ops_open_host(), .args = TN_QUANTIZE_ARGS_INIT};
    s.before = test_matrix_make(TN_BF16, ROWS, COLS, 1);
    s.after = test_matrix_make(TN_BF16, ROWS, COLS, 2);
    s.args.dst = test_quantized(&s.ops, s.ops.scope, &s.before, format, planes);
    s.args.src = test_tensor_of(&s.ops, s.ops.scope, &s.after);
    s.args.planes = planes;
    s.args.skip = test_plain(s.ops.scope, TN_FP32, 1, 1);
    return s;
}

static void close_skipping(skipping *s) {
    test_matrix_free(&s->before);
    test_matrix_free(&s->after);
    test_ops_close_host(&s->ops);
}

static void set_flag(const skipping *s, float value) { test_write(&s->ops, s->args.skip, &value); }

static void expect_planes(const skipping *s, const tn__matrix *of) {
    for (int p = 0; p < 2; p++) {
        if (!(s->args.planes >> p & 1)) continue;
        tn_plane plane = p ? TN_PLANE_COL : TN_PLANE_ROW;
        assert_int_equal(test_state(s->args.dst, plane), TN_PLANE_VALID);
        test_plane fetched = test_fetch_plane(&s->ops, s->args.dst, plane);
        test_plane_expect_quantized(&fetched, of, TN_SCALE_POW2, 0.0f);
        test_plane_free(&fetched);
    }
}

/* TransformerEngine PR 2119 and 3298: a step that is repeated with the flag set writes nothing,
 * and the next one without it does. */
static void a_flag_that_is_not_0_leaves_planes_as_they_are(void **state) {
    static const float flags[] = {1.0f, -1.0f, 0x1p-149f};
    (void)state;
    for (unsigned way = 0; way < 6; way++) {
        skipping s = open_skipping(formats[way % 2], way / 2 + 1);
        for (int i = 0; i < 3; i++) {
            set_flag(&s, flags[i]);
            EXPECT_OK(tn_quantize(&s.args, s.ops.stream));
            expect_planes(&s, &s.before);
        }
        set_flag(&s, -0.0f);
        EXPECT_OK(tn_quantize(&s.args, s.ops.stream));
        expect_planes(&s, &s.after);
        close_skipping(&s);
    }
}

/* What could be left as it is must be there: all planes of the call, whatever the flag says. */
static void planes_that_are_not_valid_are_refused(void **state) {
    (void)state;
    for (int f = 0; f < 2; f++) {
        skipping s = open_skipping(formats[f], TN_QUANTIZE_ROW);
        set_flag(&s, 0.0f);
        s.args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        EXPECT_STATUS(tn_quantize(&s.args, s.ops.stream), TN_INVALID_STATE);
        EXPECT_ERROR_HAS("plane COL of dst is not valid, which the skip flag may leave as it is");
        s.args.planes = TN_QUANTIZE_ROW;
        expect_planes(&s, &s.before);
        assert_int_equal(test_state(s.args.dst, TN_PLANE_COL), TN_PLANE_ABSENT);
        close_skipping(&s);
    }
}

static void expect_refused(skipping *s, tn_tensor skip, tn_status status, const char *words) {
    s->args.skip = skip;
    EXPECT_STATUS(tn_quantize(&s->args, s->ops.stream), status);
    EXPECT_ERROR_HAS(words);
    expect_planes(s, &s->before);
}

static void a_flag_of_another_kind_is_refused_by_name(void **state) {
    (void)state;
    skipping s = open_skipping(TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW);
    test_ops other = test_ops_open_host();
    tn_tensor unwritten = s.args.skip;
    expect_refused(&s, unwritten, TN_INVALID_STATE, "no plane of it is valid");
    expect_refused(&s, test_plain(s.ops.scope, TN_FP32, 1, 2), TN_INVALID_ARGUMENT,
                   "skip (tensor ");
    expect_refused(&s, test_plain(s.ops.scope, TN_BF16, 1, 1), TN_INVALID_ARGUMENT,
                   "has elements of bf16, expected fp32");
    expect_refused(&s, s.args.dst, TN_INVALID_ARGUMENT, "expected plain");
    expect_refused(&s, test_plain(other.scope, TN_FP32, 1, 1), TN_INVALID_ARGUMENT,
                   "another device");
    EXPECT_OK(tn_tensor_destroy(unwritten, s.ops.stream));
    expect_refused(&s, unwritten, TN_STALE_HANDLE, "");
    test_ops_close_host(&other);
    close_skipping(&s);
}

/* ---- other ops ------------------------------------------------------------------------------ */

/* Runs the op with a flag that is set, unless `is_clear`. */
static tn_tensor flag_of(const test_ops *ops, int is_clear) {
    const float value = is_clear ? 0.0f : 1.0f;
    tn_tensor skip = test_plain(ops->scope, TN_FP32, 1, 1);
    test_write(ops, skip, &value);
    return skip;
}

static void expect_values(const test_ops *ops, tn_tensor tensor, const tn__matrix *expected) {
    tn__matrix actual = test_fetch_matrix(ops, tensor);
    test_expect_same_matrix(&actual, expected);
    test_matrix_free(&actual);
}

/* From any plane of either kind, to any type. */
static void dequantizing_leaves_its_output(void **state) {
    static const tn_dtype floats[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (unsigned way = 0; way < 12; way++) {
        test_ops ops = test_ops_open_host();
        tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
        tn__matrix source = test_matrix_make(TN_FP32, ROWS, COLS, way);
        tn__matrix before = test_matrix_make(floats[way % 3], ROWS, COLS, 99);
        args.src = test_quantized(&ops, ops.scope, &source, formats[way / 3 % 2], 3);
        args.plane = way / 6 ? TN_PLANE_COL : TN_PLANE_ROW;
        args.dst = test_tensor_of(&ops, ops.scope, &before);
        args.skip = flag_of(&ops, 0);
        EXPECT_OK(tn_dequantize(&args, ops.stream));
        expect_values(&ops, args.dst, &before);
        args.skip.value = 0;
        EXPECT_OK(tn_dequantize(&args, ops.stream));
        tn__matrix expected = test_fetch_matrix(&ops, args.dst);
        assert_true(memcmp(expected.data, before.data, 100) != 0);
        test_write(&ops, args.dst, before.data);
        args.skip = flag_of(&ops, 1);
        EXPECT_OK(tn_dequantize(&args, ops.stream));
        expect_values(&ops, args.dst, &expected);
        args.dst = test_plain(ops.scope, floats[way % 3], ROWS, COLS);
        EXPECT_STATUS(tn_dequantize(&args, ops.stream), TN_INVALID_STATE);
        EXPECT_ERROR_HAS("plane DATA of dst is not valid");
        assert_int_equal(test_state(args.dst, TN_PLANE_DATA), TN_PLANE_ABSENT);
        test_matrix_free(&source), test_matrix_free(&before), test_matrix_free(&expected);
        test_ops_close_host(&ops);
    }
}

static void expect_quantized_as(const test_ops *ops, tn_tensor tensor, unsigned planes,
                                tn_tensor expected) {
    for (int p = 0; p < 2; p++) {
        if (!(planes >> p & 1)) continue;
        tn_plane plane = p ? TN_PLANE_COL : TN_PLANE_ROW;
        test_plane a = test_fetch_plane(ops, tensor, plane);
        test_plane b = test_fetch_plane(ops, expected, plane);
        assert_memory_equal(a.view.data, b.view.data, a.view.layout.data_bytes);
        assert_memory_equal(a.view.scale, b.view.scale, a.view.layout.scale_bytes);
        test_plane_free(&a), test_plane_free(&b);
    }
}

/* With new scales into any planes, and shifted into the other one. */
static void requantizing_leaves_its_planes(void **state) {
    (void)state;
    for (unsigned way = 0; way < 7; way++) {
        test_ops ops = test_ops_open_host();
        const int shifts = way == 6;
        const tn_format format = shifts ? TN_FORMAT_FP8_BLOCK_1D : formats[way % 2];
        tn_requantize_args args = TN_REQUANTIZE_ARGS_INIT;
        tn__matrix source = test_matrix_make(TN_FP32, ROWS, COLS, way);
        tn__matrix before = test_matrix_make(TN_FP32, ROWS, COLS, 99);
        args.src = test_quantized(&ops, ops.scope, &source, TN_FORMAT_FP8_BLOCK_1D, 1);
        args.planes = shifts ? TN_QUANTIZE_COL : way / 2 + 1;
        args.mode = shifts ? TN_REQUANTIZE_SHIFT : TN_REQUANTIZE_VALUES;
        args.dst = test_quantized(&ops, ops.scope, &before, format, args.planes);
        tn_tensor old = test_quantized(&ops, ops.scope, &before, format, args.planes);
        args.skip = flag_of(&ops, 0);
        EXPECT_OK(tn_requantize(&args, ops.stream));
        expect_quantized_as(&ops, args.dst, args.planes, old);
        tn_requantize_args plain = args;
        plain.skip.value = 0;
        plain.dst = test_fp8(ops.scope, format, TN_E4M3, ROWS, COLS);
        EXPECT_OK(tn_requantize(&plain, ops.stream));
        args.skip = flag_of(&ops, 1);
        EXPECT_OK(tn_requantize(&args, ops.stream));
        expect_quantized_as(&ops, args.dst, args.planes, plain.dst);
        args.dst = test_fp8(ops.scope, format, TN_E4M3, ROWS, COLS);
        EXPECT_STATUS(tn_requantize(&args, ops.stream), TN_INVALID_STATE);
        EXPECT_ERROR_HAS("of dst is not valid");
        assert_int_equal(test_state(args.dst, TN_PLANE_ROW), TN_PLANE_ABSENT);
        test_matrix_free(&source), test_matrix_free(&before);
        test_ops_close_host(&ops);
    }
}

static void updating_scales_leaves_them_and_the_history(void **state) {
    static const float history[] = {7.0f, 2.0f, 4.0f}, rolled[] = {0.0f, 4.0f, 7.0f};
    static const float old = 3.0f, updated = 64.0f;
    float values[3], scale;
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_scale_update_args args = TN_SCALE_UPDATE_ARGS_INIT;
    args.amax_history = test_plain(ops.scope, TN_FP32, 3, 1);
    args.scale = test_plain(ops.scope, TN_FP32, 1, 1);
    test_write(&ops, args.amax_history, history);
    test_write(&ops, args.scale, &old);
    for (int is_clear = 0; is_clear < 2; is_clear++) {
        args.skip = flag_of(&ops, is_clear);
        EXPECT_OK(tn_scale_update(&args, ops.stream));
        test_read(&ops, args.amax_history, values);
        test_read(&ops, args.scale, &scale);
        assert_memory_equal(values, is_clear ? rolled : history, sizeof values);
        assert_memory_equal(&scale, is_clear ? &updated : &old, sizeof scale);
    }
    test_ops_close_host(&ops);
}

/* Each asks for the same kind of flag. */
static void other_ops_refuse_a_flag_of_another_kind(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix source = test_matrix_make(TN_FP32, ROWS, COLS, 1);
    tn_dequantize_args dequantize = TN_DEQUANTIZE_ARGS_INIT;
    tn_requantize_args requantize = TN_REQUANTIZE_ARGS_INIT;
    tn_scale_update_args update = TN_SCALE_UPDATE_ARGS_INIT;
    dequantize.src = requantize.src = test_quantized(&ops, ops.scope, &source, formats[0], 1);
    dequantize.dst = test_tensor_of(&ops, ops.scope, &source);
    requantize.dst = test_quantized(&ops, ops.scope, &source, formats[1], 1);
    update.amax_history = test_plain(ops.scope, TN_FP32, 1, 1);
    update.scale = test_plain(ops.scope, TN_FP32, 1, 1);
    dequantize.skip = requantize.skip = update.skip = test_plain(ops.scope, TN_FP32, 2, 2);
    EXPECT_STATUS(tn_dequantize(&dequantize, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tn_dequantize: skip (tensor");
    EXPECT_STATUS(tn_requantize(&requantize, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tn_requantize: skip (tensor");
    EXPECT_STATUS(tn_scale_update(&update, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tn_scale_update: skip (tensor");
    expect_values(&ops, dequantize.dst, &source);
    assert_int_equal(test_state(requantize.dst, TN_PLANE_ROW), TN_PLANE_VALID);
    test_matrix_free(&source);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_flag_that_is_not_0_leaves_planes_as_they_are),
        cmocka_unit_test(planes_that_are_not_valid_are_refused),
        cmocka_unit_test(a_flag_of_another_kind_is_refused_by_name),
        cmocka_unit_test(dequantizing_leaves_its_output),
        cmocka_unit_test(requantizing_leaves_its_planes),
        cmocka_unit_test(updating_scales_leaves_them_and_the_history),
        cmocka_unit_test(other_ops_refuse_a_flag_of_another_kind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
