/* The skip flag of tn_quantize: a number in device memory that says, when the work runs, whether
 * anything is done. */
#include "ops_planes_support.h"

#include <string.h>

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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_flag_that_is_not_0_leaves_planes_as_they_are),
        cmocka_unit_test(planes_that_are_not_valid_are_refused),
        cmocka_unit_test(a_flag_of_another_kind_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
