/* Activations and their gradients on the host: their values against formulas in double, what is
 * quantized and summed up against the same ops one after the other, bit for bit, and bad input. */
#include "ops_planes_support.h"

#include "tenure_cast.h"

#include <math.h>

typedef struct shape {
    int64_t rows, cols;
} shape;

/* Whole tiles, tails in both directions, rows of odd length, one row, one column. */
static const shape shapes[] = {{128, 128}, {130, 72}, {200, 129}, {1, 300}, {257, 1}, {3, 5}};

/* ---- formulas in double -------------------------------------------------------------------- */

static double in_double(tn_activation activation, double x) {
    const double pi = 3.14159265358979323846;
    switch (activation) {
    case TN_ACTIVATION_GELU: return x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)));
    case TN_ACTIVATION_QUICK_GELU: return x / (1 + exp(-1.702 * x));
    case TN_ACTIVATION_SILU: return x / (1 + exp(-x));
    case TN_ACTIVATION_RELU: return x > 0 ? x : 0;
    default: return x > 0 ? x * x : 0;
    }
}

/* By a central difference, which is good to 1e-9 here. */
static double slope_in_double(tn_activation activation, double x) {
    const double step = 1e-5;
    if (activation == TN_ACTIVATION_RELU) return x > 0 ? 1 : 0;
    return (in_double(activation, x + step) - in_double(activation, x - step)) / (2 * step);
}

static void expect_near(double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance * (1.0 + fabs(want))))
        fail_msg("%.9g, expected %.9g", got, want);
}

/* ---- calls --------------------------------------------------------------------------------- */

/* A matrix of numbers in [-8, 8). */
static tn__matrix small_matrix(tn_dtype dtype, int64_t rows, int64_t cols, uint32_t seed) {
    tn__matrix matrix = test_matrix_make(dtype, rows, cols, seed);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            seed = seed * 1664525u + 1013904223u;
            test_matrix_set(&matrix, i, j, (float)(int32_t)seed * 0x1p-28f);
        }
    }
    return matrix;
}

static tn_tensor fp8_like(const test_ops *ops, tn_format format, int64_t rows, int64_t cols) {
    return test_fp8(ops->scope, format, TN_E4M3, rows, cols);
}

static void quantize(const test_ops *ops, tn_tensor src, tn_tensor dst) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = src, args.dst = dst;
    args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    assert_int_equal(tn_quantize(&args, ops->stream), TN_OK);
}

/* Fails unless both planes of two tensors are the same bytes, padding too. */
static void expect_same_planes(const test_ops *ops, tn_tensor a, tn_tensor b) {
    for (tn_plane plane = TN_PLANE_ROW; plane <= TN_PLANE_COL; plane++) {
        test_plane one = test_fetch_plane(ops, a, plane), two = test_fetch_plane(ops, b, plane);
        assert_memory_equal(one.view.data, two.view.data, one.view.layout.data_bytes);
        assert_memory_equal(one.view.scale, two.view.scale, one.view.layout.scale_bytes);
        test_plane_free(&one), test_plane_free(&two);
    }
}

static void expect_same_values(const test_ops *ops, tn_tensor a, tn_tensor b) {
    tn__matrix one = test_fetch_matrix(ops, a), two = test_fetch_matrix(ops, b);
    test_expect_same_matrix(&one, &two);
    test_matrix_free(&one), test_matrix_free(&two);
}

/* ---- forward ------------------------------------------------------------------------------- */

typedef struct forward {
    tn__matrix x, weights;
    tn_tensor x_tensor, weights_tensor, y, quantized;
} forward;

static forward run_forward(const test_ops *ops, tn_activation activation, int gated, int weighted,
                           tn_dtype dtype, tn_format format, shape s) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    forward f = {.x = small_matrix(dtype, s.rows, gated ? 2 * s.cols : s.cols, 7)};
    f.x_tensor = test_tensor_of(ops, ops->scope, &f.x);
    f.weights = small_matrix(TN_FP32, s.rows, 1, 9);
    f.weights_tensor = test_tensor_of(ops, ops->scope, &f.weights);
    f.y = test_plain(ops->scope, dtype, s.rows, s.cols);
    f.quantized = fp8_like(ops, format, s.rows, s.cols);
    args.activation = activation, args.gated = gated;
    args.x = f.x_tensor, args.y = f.y;
    if (weighted) args.weights = f.weights_tensor;
    args.quantized.tensor = f.quantized;
    args.quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    assert_int_equal(tn_activation_forward(&args, ops->stream), TN_OK);
    return f;
}

static void free_forward(forward *f) {
    test_matrix_free(&f->x);
    test_matrix_free(&f->weights);
}

static void expect_forward_values(const test_ops *ops, const forward *f, tn_activation activation,
                                  int gated, int weighted) {
    tn__matrix y = test_fetch_matrix(ops, f->y);
    for (int64_t i = 0; i < y.rows; i++) {
        for (int64_t j = 0; j < y.cols; j++) {
            double want = in_double(activation, test_matrix_get(&f->x, i, j));
            if (gated) want *= test_matrix_get(&f->x, i, y.cols + j);
            if (weighted) want *= test_matrix_get(&f->weights, i, 0);
            expect_near(test_matrix_get(&y, i, j), want, 3e-7);
        }
    }
    test_matrix_free(&y);
}

static void test_values_are_those_of_the_formulas(void **state) {
    test_ops ops = test_ops_open_host();
    (void)state;
    for (tn_activation a = 0; a < TN_ACTIVATION_COUNT; a++) {
        for (int kind = 0; kind < 4; kind++) {
            forward f = run_forward(&ops, a, kind & 1, kind >> 1, TN_FP32, TN_FORMAT_FP8_BLOCK_1D,
                                    shapes[kind]);
            expect_forward_values(&ops, &f, a, kind & 1, kind >> 1);
            free_forward(&f);
        }
    }
    test_ops_close_host(&ops);
}

/* In every type, shape and format, gated or not, the planes are those that a second call makes of
 * the value. */
static void test_planes_are_those_of_a_quantize_after_it(void **state) {
    test_ops ops = test_ops_open_host();
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (tn_dtype dtype = TN_FP32; dtype <= TN_FP16; dtype++) {
            for (int kind = 0; kind < 4; kind++) {
                tn_format format = kind & 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
                forward f = run_forward(&ops, TN_ACTIVATION_SILU, kind & 1, kind == 3, dtype,
                                        format, shapes[s]);
                tn_tensor after = fp8_like(&ops, format, shapes[s].rows, shapes[s].cols);
                quantize(&ops, f.y, after);
                expect_same_planes(&ops, f.quantized, after);
                free_forward(&f);
            }
        }
    }
    test_ops_close_host(&ops);
}

/* Without y the planes are the same, and there may be one plane alone. */
static void test_outputs_are_optional(void **state) {
    test_ops ops = test_ops_open_host();
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    (void)state;
    forward f =
        run_forward(&ops, TN_ACTIVATION_GELU, 1, 0, TN_BF16, TN_FORMAT_FP8_BLOCK_1D, shapes[2]);
    args.activation = TN_ACTIVATION_GELU, args.gated = 1, args.x = f.x_tensor;
    args.quantized.tensor = fp8_like(&ops, TN_FORMAT_FP8_BLOCK_1D, 200, 129);
    assert_int_equal(tn_activation_forward(&args, ops.stream), TN_OK);
    assert_int_equal(test_state(args.quantized.tensor, TN_PLANE_COL), TN_PLANE_ABSENT);
    args.quantized.planes = TN_QUANTIZE_COL;
    assert_int_equal(tn_activation_forward(&args, ops.stream), TN_OK);
    test_plane row = test_fetch_plane(&ops, f.quantized, TN_PLANE_ROW);
    args.quantized.planes = TN_QUANTIZE_ROW;
    assert_int_equal(tn_activation_forward(&args, ops.stream), TN_OK);
    test_plane alone = test_fetch_plane(&ops, args.quantized.tensor, TN_PLANE_ROW);
    assert_memory_equal(row.view.data, alone.view.data, row.view.layout.data_bytes);
    test_plane_free(&row), test_plane_free(&alone);
    args.quantized = (tn_quantized_out)TN_QUANTIZED_OUT_INIT;
    args.y = test_plain(ops.scope, TN_BF16, 200, 129);
    assert_int_equal(tn_activation_forward(&args, ops.stream), TN_OK);
    expect_same_values(&ops, args.y, f.y);
    free_forward(&f);
    test_ops_close_host(&ops);
}

/* ---- backward ------------------------------------------------------------------------------ */

typedef struct gradient {
    forward f;
    tn__matrix dy;
    tn_tensor dx, quantized, dbias;
} gradient;

static gradient run_backward(const test_ops *ops, tn_activation activation, int gated, int weighted,
                             tn_dtype dtype, tn_format format, shape s) {
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    gradient g = {.f = run_forward(ops, activation, gated, weighted, dtype, format, s)};
    const int64_t cols = gated ? 2 * s.cols : s.cols;
    g.dy = small_matrix(dtype, s.rows, s.cols, 11);
    g.dx = test_plain(ops->scope, dtype, s.rows, cols);
    g.quantized = fp8_like(ops, format, s.rows, cols);
    g.dbias = test_plain(ops->scope, TN_FP32, 1, cols);
    args.activation = activation, args.gated = gated;
    args.dy = test_tensor_of(ops, ops->scope, &g.dy);
    args.x = g.f.x_tensor, args.dx = g.dx, args.dbias = g.dbias;
    if (weighted) args.weights = g.f.weights_tensor;
    args.quantized.tensor = g.quantized;
    args.quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    args.scope = ops->scope;
    assert_int_equal(tn_activation_backward(&args, ops->stream), TN_OK);
    return g;
}

static void free_gradient(gradient *g) {
    free_forward(&g->f);
    test_matrix_free(&g->dy);
}

static void expect_gradient_values(const test_ops *ops, const gradient *g, tn_activation activation,
                                   int gated, int weighted) {
    tn__matrix dx = test_fetch_matrix(ops, g->dx);
    const int64_t cols = g->dy.cols;
    for (int64_t i = 0; i < dx.rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            const double x = test_matrix_get(&g->f.x, i, j);
            double dy = test_matrix_get(&g->dy, i, j);
            if (weighted) dy *= test_matrix_get(&g->f.weights, i, 0);
            const double gate = gated ? test_matrix_get(&g->f.x, i, cols + j) : 1;
            expect_near(test_matrix_get(&dx, i, j), slope_in_double(activation, x) * dy * gate,
                        2e-6);
            if (gated)
                expect_near(test_matrix_get(&dx, i, cols + j), in_double(activation, x) * dy, 3e-7);
        }
    }
    test_matrix_free(&dx);
}

static void test_gradients_are_those_of_the_formulas(void **state) {
    test_ops ops = test_ops_open_host();
    (void)state;
    for (tn_activation a = 0; a < TN_ACTIVATION_COUNT; a++) {
        for (int kind = 0; kind < 4; kind++) {
            gradient g = run_backward(&ops, a, kind & 1, kind >> 1, TN_FP32, TN_FORMAT_FP8_BLOCK_1D,
                                      shapes[kind]);
            expect_gradient_values(&ops, &g, a, kind & 1, kind >> 1);
            free_gradient(&g);
        }
    }
    test_ops_close_host(&ops);
}

/* The sums of columns as the header orders them, from what is in memory. */
static void expect_column_sums(const test_ops *ops, tn_tensor dbias, tn_tensor value) {
    tn__matrix sums = test_fetch_matrix(ops, dbias), v = test_fetch_matrix(ops, value);
    for (int64_t col = 0; col < v.cols; col++) {
        float total[8] = {0};
        for (int64_t top = 0; top < v.rows; top += 128) {
            float tile = 0.0f;
            for (int64_t pair = top; pair < top + 128; pair += 16) {
                float group[2] = {0.0f, 0.0f};
                for (int64_t row = pair; row < pair + 16 && row < v.rows; row++)
                    group[(row - pair) / 8] += test_matrix_get(&v, row, col);
                tile += group[0] + group[1];
            }
            total[top / 128 % 8] += tile;
        }
        const float want = ((total[0] + total[4]) + (total[2] + total[6])) +
                           ((total[1] + total[5]) + (total[3] + total[7]));
        assert_true(test_matrix_get(&sums, 0, col) == want);
    }
    test_matrix_free(&sums), test_matrix_free(&v);
}

static void test_gradients_are_quantized_and_summed_up_as_one_after_the_other(void **state) {
    test_ops ops = test_ops_open_host();
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (tn_dtype dtype = TN_FP32; dtype <= TN_FP16; dtype++) {
            for (int kind = 0; kind < 4; kind++) {
                tn_format format = kind & 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
                gradient g = run_backward(&ops, TN_ACTIVATION_GELU, kind & 1, kind == 3, dtype,
                                          format, shapes[s]);
                tn_tensor after =
                    fp8_like(&ops, format, shapes[s].rows, shapes[s].cols * (kind & 1 ? 2 : 1));
                quantize(&ops, g.dx, after);
                expect_same_planes(&ops, g.quantized, after);
                expect_column_sums(&ops, g.dbias, g.dx);
                free_gradient(&g);
            }
        }
    }
    test_ops_close_host(&ops);
}

static void test_a_bias_gradient_is_the_sum_beside_the_quantized_gradient(void **state) {
    test_ops ops = test_ops_open_host();
    (void)state;
    const shape tall[] = {{1400, 140}, {128, 128}, {2, 3}};
    for (size_t s = 0; s < sizeof tall / sizeof *tall; s++) {
        tn_bias_gradient_args args = TN_BIAS_GRADIENT_ARGS_INIT;
        tn__matrix dy = small_matrix(TN_BF16, tall[s].rows, tall[s].cols, 21);
        args.dy = test_tensor_of(&ops, ops.scope, &dy);
        args.dbias = test_plain(ops.scope, TN_FP32, 1, tall[s].cols);
        args.scope = ops.scope;
        args.quantized.tensor = fp8_like(&ops, TN_FORMAT_FP8_BLOCK_1D, dy.rows, dy.cols);
        args.quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        assert_int_equal(tn_bias_gradient(&args, ops.stream), TN_OK);
        expect_column_sums(&ops, args.dbias, args.dy);
        tn_tensor after = fp8_like(&ops, TN_FORMAT_FP8_BLOCK_1D, dy.rows, dy.cols);
        quantize(&ops, args.dy, after);
        expect_same_planes(&ops, args.quantized.tensor, after);
        test_matrix_free(&dy);
    }
    test_ops_close_host(&ops);
}

/* ---- special values, nothing, and the flag ------------------------------------------------- */

static void test_special_values(void **state) {
    test_ops ops = test_ops_open_host();
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    const float in[4] = {NAN, INFINITY, -3e38f, -0.0f};
    float out[4];
    (void)state;
    args.x = test_plain(ops.scope, TN_FP32, 1, 4);
    args.y = test_plain(ops.scope, TN_FP32, 1, 4);
    test_write(&ops, args.x, in);
    for (args.activation = 0; args.activation < TN_ACTIVATION_COUNT; args.activation++) {
        assert_int_equal(tn_activation_forward(&args, ops.stream), TN_OK);
        test_read(&ops, args.y, out);
        uint32_t bits;
        memcpy(&bits, out, sizeof bits);
        assert_int_equal(bits, 0x7FFFFFFF);
        assert_true(out[1] == INFINITY);
        assert_true(out[2] == 0.0f && out[3] == 0.0f);
    }
    test_ops_close_host(&ops);
}

static void test_nothing_is_success_and_its_sums_are_zero(void **state) {
    test_ops ops = test_ops_open_host();
    tn_bias_gradient_args bias = TN_BIAS_GRADIENT_ARGS_INIT;
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    float sums[3] = {1.0f, 2.0f, 3.0f};
    (void)state;
    args.x = test_plain(ops.scope, TN_BF16, 5, 0), args.y = test_plain(ops.scope, TN_BF16, 5, 0);
    test_declare_valid(&ops, args.x, TN_PLANE_DATA);
    assert_int_equal(tn_activation_forward(&args, ops.stream), TN_OK);
    bias.dy = test_plain(ops.scope, TN_BF16, 0, 3);
    bias.dbias = test_plain(ops.scope, TN_FP32, 1, 3);
    bias.scope = ops.scope;
    test_declare_valid(&ops, bias.dy, TN_PLANE_DATA);
    assert_int_equal(tn_bias_gradient(&bias, ops.stream), TN_OK);
    test_read(&ops, bias.dbias, sums);
    assert_true(sums[0] == 0.0f && sums[1] == 0.0f && sums[2] == 0.0f);
    test_ops_close_host(&ops);
}

/* With the flag set a call leaves its outputs as they were, and refuses those that are nothing. */
static void test_the_skip_flag_leaves_outputs_alone(void **state) {
    test_ops ops = test_ops_open_host();
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    const float flags[2] = {1.0f, 0.0f};
    (void)state;
    forward f =
        run_forward(&ops, TN_ACTIVATION_SILU, 0, 0, TN_FP32, TN_FORMAT_FP8_BLOCK_1D, shapes[1]);
    forward same =
        run_forward(&ops, TN_ACTIVATION_SILU, 0, 0, TN_FP32, TN_FORMAT_FP8_BLOCK_1D, shapes[1]);
    forward relu =
        run_forward(&ops, TN_ACTIVATION_RELU, 0, 0, TN_FP32, TN_FORMAT_FP8_BLOCK_1D, shapes[1]);
    args.activation = TN_ACTIVATION_RELU, args.x = f.x_tensor, args.y = f.y;
    args.quantized.tensor = f.quantized;
    args.quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    args.skip = test_plain(ops.scope, TN_FP32, 1, 1);
    test_write(&ops, args.skip, &flags[0]);
    assert_int_equal(tn_activation_forward(&args, ops.stream), TN_OK);
    expect_same_values(&ops, f.y, same.y);
    expect_same_planes(&ops, f.quantized, same.quantized);
    test_write(&ops, args.skip, &flags[1]);
    assert_int_equal(tn_activation_forward(&args, ops.stream), TN_OK);
    expect_same_values(&ops, f.y, relu.y);
    expect_same_planes(&ops, f.quantized, relu.quantized);
    args.y = test_plain(ops.scope, TN_FP32, 130, 72);
    assert_int_equal(tn_activation_forward(&args, ops.stream), TN_INVALID_STATE);
    assert_int_equal(test_state(args.y, TN_PLANE_DATA), TN_PLANE_ABSENT);
    free_forward(&f), free_forward(&same), free_forward(&relu);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values_are_those_of_the_formulas),
        cmocka_unit_test(test_planes_are_those_of_a_quantize_after_it),
        cmocka_unit_test(test_outputs_are_optional),
        cmocka_unit_test(test_gradients_are_those_of_the_formulas),
        cmocka_unit_test(test_gradients_are_quantized_and_summed_up_as_one_after_the_other),
        cmocka_unit_test(test_a_bias_gradient_is_the_sum_beside_the_quantized_gradient),
        cmocka_unit_test(test_special_values),
        cmocka_unit_test(test_nothing_is_success_and_its_sums_are_zero),
        cmocka_unit_test(test_the_skip_flag_leaves_outputs_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
