/* The small operations of a GPU against the host driver's.
 *
 * convert, axpy and embed must have the same bytes. The cross entropy is computed in double on
 * both sides, but in another order and with another exp: its loss may differ by 2 units in the
 * last place of an fp32 (2^-22 of the value, or of 1 where the value is smaller), its gradient by
 * one rounding step of the type that it is stored in; and it has the same bits in every run.
 */
#include "gpu_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static gpu_side gpu, host;

static const tn_dtype floats[] = {TN_FP32, TN_BF16, TN_FP16};

/* One tensor on both sides with the same contents. */
typedef struct pair {
    tn_tensor on_gpu, on_host;
} pair;

static pair make_pair(tn_dtype dtype, int64_t rows, int64_t cols, const void *data) {
    pair made = {gpu_plain(&gpu, dtype, rows, cols), gpu_plain(&host, dtype, rows, cols)};
    if (data) {
        gpu_upload(&gpu, made.on_gpu, data);
        gpu_upload(&host, made.on_host, data);
    } else {
        gpu_poison(&gpu, made.on_gpu, TN_PLANE_DATA);
        gpu_poison(&host, made.on_host, TN_PLANE_DATA);
    }
    return made;
}

static pair make_filled(tn_dtype dtype, int64_t rows, int64_t cols, gpu_fill fill, uint64_t seed) {
    void *data = malloc((size_t)(rows * cols) * 4);
    gpu_fill_values(fill, dtype, seed, data, (size_t)(rows * cols));
    pair made = make_pair(dtype, rows, cols, data);
    free(data);
    return made;
}

static pair make_bytes(int64_t count, uint64_t seed) {
    unsigned char *data = malloc((size_t)count);
    for (int64_t i = 0; i < count; i++)
        data[i] = (unsigned char)gpu_random(&seed);
    pair made = make_pair(TN_BYTE, 1, count, data);
    free(data);
    return made;
}

static void end_pair(pair *of) {
    gpu_destroy(&gpu, of->on_gpu);
    gpu_destroy(&host, of->on_host);
}

static void compare(const pair *of, const char *name, const char *what) {
    gpu_copy actual = gpu_download(&gpu, of->on_gpu, TN_PLANE_DATA);
    gpu_copy expected = gpu_download(&host, of->on_host, TN_PLANE_DATA);
    gpu_count(name, gpu_copies_equal(&actual, &expected, what));
    gpu_copy_end(&actual);
    gpu_copy_end(&expected);
}

/* ---- element by element --------------------------------------------------------------------- */

static const int64_t counts[] = {1, 7, 255, 2048, 2049, 100003};
enum { COUNTS = sizeof counts / sizeof *counts };

static void check_convert(tn_dtype from, tn_dtype to, int64_t count, gpu_fill fill) {
    char what[96];
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    pair x = make_filled(from, 1, count, fill, 1), y = make_pair(to, 1, count, NULL);
    snprintf(what, sizeof what, "convert %s to %s, %lld %s", tn_dtype_name(from), tn_dtype_name(to),
             (long long)count, gpu_fill_name(fill));
    args.x = x.on_gpu, args.y = y.on_gpu;
    EXPECT_OK(tn_convert(&args, gpu.stream));
    args.x = x.on_host, args.y = y.on_host;
    EXPECT_OK(tn_convert(&args, host.stream));
    compare(&y, "convert", what);
    end_pair(&x);
    end_pair(&y);
}

static void check_axpy(tn_dtype from, tn_dtype to, int64_t count, gpu_fill fill, float alpha) {
    char what[96];
    tn_axpy_args args = TN_AXPY_ARGS_INIT;
    pair x = make_filled(from, 1, count, fill, 2), y = make_filled(to, 1, count, fill, 3);
    snprintf(what, sizeof what, "axpy %g %s to %s, %lld %s", (double)alpha, tn_dtype_name(from),
             tn_dtype_name(to), (long long)count, gpu_fill_name(fill));
    args.alpha = alpha;
    args.x = x.on_gpu, args.y = y.on_gpu;
    EXPECT_OK(tn_axpy(&args, gpu.stream));
    args.x = x.on_host, args.y = y.on_host;
    EXPECT_OK(tn_axpy(&args, host.stream));
    compare(&y, "axpy", what);
    end_pair(&x);
    end_pair(&y);
}

static void test_convert_and_axpy_equal_the_host(void **state) {
    static const float alphas[] = {1.0f, -0.37f, 0.0f};
    (void)state;
    for (int way = 0; way < 9; way++) {
        tn_dtype from = floats[way / 3], to = floats[way % 3];
        for (int i = 0; i < COUNTS; i++) {
            for (int fill = 0; fill < GPU_FILL_COUNT; fill++) {
                check_convert(from, to, counts[i], (gpu_fill)fill);
                check_axpy(from, to, counts[i], (gpu_fill)fill, alphas[(i + fill) % 3]);
            }
        }
    }
    gpu_count_report("element by element");
}

/* ---- embedding ------------------------------------------------------------------------------ */

static void test_embed_equals_the_host(void **state) {
    static const int64_t widths[] = {1, 7, 8, 512, 4100}, lengths[] = {1, 37, 1000};
    (void)state;
    for (int way = 0; way < 45; way++) {
        tn_dtype dtype = floats[way % 3];
        int64_t width = widths[way / 3 % 5], length = lengths[way / 15];
        tn_embed_args args = TN_EMBED_ARGS_INIT;
        char what[96];
        pair tokens = make_bytes(length, (uint64_t)way);
        pair table = make_filled(dtype, 256, width, GPU_FILL_SPECIAL, 4);
        pair y = make_pair(dtype, length, width, NULL);
        snprintf(what, sizeof what, "embed %lld x %lld %s", (long long)length, (long long)width,
                 tn_dtype_name(dtype));
        args.tokens = tokens.on_gpu, args.table = table.on_gpu, args.y = y.on_gpu;
        EXPECT_OK(tn_embed(&args, gpu.stream));
        args.tokens = tokens.on_host, args.table = table.on_host, args.y = y.on_host;
        EXPECT_OK(tn_embed(&args, host.stream));
        compare(&y, "embed", what);
        end_pair(&tokens);
        end_pair(&table);
        end_pair(&y);
    }
    gpu_count_report("embedding");
}

/* ---- cross entropy -------------------------------------------------------------------------- */

/* Distance between neighbours of `value` in the type, but not below its smallest normal ones. */
static double step_of(tn_dtype dtype, double value) {
    static const int mantissa_bits[] = {23, 7, 10}, exponent_min[] = {-126, -126, -14};
    int exponent = value == 0.0 ? exponent_min[dtype] : ilogb(value);
    if (exponent < exponent_min[dtype]) exponent = exponent_min[dtype];
    return ldexp(1.0, exponent - mantissa_bits[dtype]);
}

/* Largest difference over the allowed one: at most 1 is a pass; NaN is none. */
static double loss_excess(const gpu_copy *actual, const gpu_copy *expected, int64_t rows) {
    double worst = 0.0;
    for (int64_t t = 0; t < rows; t++) {
        double x = gpu_value(TN_FP32, actual->data, (size_t)t);
        double y = gpu_value(TN_FP32, expected->data, (size_t)t);
        double excess = fabs(x - y) / (fmax(fabs(y), 1.0) * 0x1p-22);
        if (!(excess <= worst)) worst = excess;
    }
    return worst;
}

static double gradient_excess(tn_dtype dtype, const gpu_copy *actual, const gpu_copy *expected,
                              int64_t count) {
    double worst = 0.0;
    for (int64_t i = 0; i < count; i++) {
        double x = gpu_value(dtype, actual->data, (size_t)i);
        double y = gpu_value(dtype, expected->data, (size_t)i);
        double excess = fabs(x - y) / step_of(dtype, y);
        if (!(excess <= worst)) worst = excess;
    }
    return worst;
}

typedef struct loss_case {
    tn_dtype logits, gradient;
    int64_t rows, classes;
} loss_case;

static void run_loss(gpu_side *side, tn_tensor logits, tn_tensor targets, tn_tensor loss,
                     tn_tensor dlogits) {
    tn_cross_entropy_args args = TN_CROSS_ENTROPY_ARGS_INIT;
    args.logits = logits;
    args.targets = targets;
    args.loss = loss;
    args.dlogits = dlogits;
    EXPECT_OK(tn_cross_entropy(&args, side->stream));
}

static void check_tolerances(const loss_case *c, const pair *loss, const pair *gradient) {
    gpu_copy copies[] = {gpu_download(&gpu, loss->on_gpu, TN_PLANE_DATA),
                         gpu_download(&host, loss->on_host, TN_PLANE_DATA),
                         gpu_download(&gpu, gradient->on_gpu, TN_PLANE_DATA),
                         gpu_download(&host, gradient->on_host, TN_PLANE_DATA)};
    double of_loss = loss_excess(&copies[0], &copies[1], c->rows);
    double of_gradient = gradient_excess(c->gradient, &copies[2], &copies[3], c->rows * c->classes);
    printf("cross entropy %s to %s %lld x %lld: loss %.3g, gradient %.3g of what is allowed\n",
           tn_dtype_name(c->logits), tn_dtype_name(c->gradient), (long long)c->rows,
           (long long)c->classes, of_loss, of_gradient);
    gpu_count("loss", of_loss <= 1.0);
    gpu_count("gradient", of_gradient <= 1.0);
    for (int i = 0; i < 4; i++)
        gpu_copy_end(&copies[i]);
}

static void check_repeats(const pair *logits, const pair *targets, const pair *loss,
                          const pair *gradient) {
    gpu_copy first_loss = gpu_download(&gpu, loss->on_gpu, TN_PLANE_DATA);
    gpu_copy first_gradient = gpu_download(&gpu, gradient->on_gpu, TN_PLANE_DATA);
    for (int i = 0; i < 10; i++) {
        gpu_poison(&gpu, loss->on_gpu, TN_PLANE_DATA);
        gpu_poison(&gpu, gradient->on_gpu, TN_PLANE_DATA);
        run_loss(&gpu, logits->on_gpu, targets->on_gpu, loss->on_gpu, gradient->on_gpu);
        gpu_copy again_loss = gpu_download(&gpu, loss->on_gpu, TN_PLANE_DATA);
        gpu_copy again_gradient = gpu_download(&gpu, gradient->on_gpu, TN_PLANE_DATA);
        gpu_count("repeat", gpu_copies_equal(&again_loss, &first_loss, "loss, repeated"));
        gpu_count("repeat",
                  gpu_copies_equal(&again_gradient, &first_gradient, "gradient, repeated"));
        gpu_copy_end(&again_loss);
        gpu_copy_end(&again_gradient);
    }
    gpu_copy_end(&first_loss);
    gpu_copy_end(&first_gradient);
}

static void check_loss(const loss_case *c) {
    pair logits = make_filled(c->logits, c->rows, c->classes, GPU_FILL_NORMAL, 5);
    pair targets = make_bytes(c->rows, 6);
    pair loss = make_pair(TN_FP32, 1, c->rows, NULL);
    pair gradient = make_pair(c->gradient, c->rows, c->classes, NULL);
    run_loss(&gpu, logits.on_gpu, targets.on_gpu, loss.on_gpu, gradient.on_gpu);
    run_loss(&host, logits.on_host, targets.on_host, loss.on_host, gradient.on_host);
    check_tolerances(c, &loss, &gradient);
    check_repeats(&logits, &targets, &loss, &gradient);
    end_pair(&logits);
    end_pair(&targets);
    end_pair(&loss);
    end_pair(&gradient);
}

static void test_cross_entropy_is_near_the_host_and_repeats(void **state) {
    static const int64_t shapes[][2] = {{1, 256}, {37, 257}, {200, 1000}, {3, 65536}};
    (void)state;
    for (int way = 0; way < 36; way++) {
        loss_case c = {floats[way % 3], floats[way / 3 % 3], shapes[way / 9][0],
                       shapes[way / 9][1]};
        check_loss(&c);
    }
    gpu_count_report("cross entropy");
}

/* ---- kernels of two devices ------------------------------------------------------------------ */

static void convert_on(gpu_side *side, const float *data, int64_t count) {
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    args.x = gpu_plain(side, TN_FP32, 1, count);
    args.y = gpu_plain(side, TN_FP32, 1, count);
    gpu_upload(side, args.x, data);
    gpu_poison(side, args.y, TN_PLANE_DATA);
    EXPECT_OK(tn_convert(&args, side->stream));
    gpu_copy copy = gpu_download(side, args.y, TN_PLANE_DATA);
    assert_memory_equal(copy.data, data, (size_t)count * sizeof *data);
    gpu_copy_end(&copy);
    gpu_destroy(side, args.x);
    gpu_destroy(side, args.y);
}

/* Each opened device loads its own kernels, and takes only those with it. */
static void test_a_second_device_comes_and_goes(void **state) {
    enum { COUNT = 5000 };
    static float data[COUNT];
    gpu_side second;
    (void)state;
    for (int i = 0; i < COUNT; i++)
        data[i] = (float)i;
    convert_on(&gpu, data, COUNT);
    gpu_open(&second);
    convert_on(&second, data, COUNT);
    gpu_close(&second);
    convert_on(&gpu, data, COUNT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_convert_and_axpy_equal_the_host),
        cmocka_unit_test(test_embed_equals_the_host),
        cmocka_unit_test(test_cross_entropy_is_near_the_host_and_repeats),
        cmocka_unit_test(test_a_second_device_comes_and_goes),
    };
    gpu_open(&gpu);
    gpu_open_host(&host, (size_t)2 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&host);
    gpu_close(&gpu);
    return failures;
}
