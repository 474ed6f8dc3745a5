/* Norms and gradients of norms of so many rows that a GPU reads everything once (the battery's
 * matrices are too low for that): against the host where that is quick, else against what the GPU
 * makes by kernels that the battery holds to the host: gradients when a plane is wanted too, norms
 * without a scope for scratch. Bit for bit. */
#include "op_battery_support.h"
#include "tenure_train.h"

#include <stdlib.h>
#include <string.h>

static gpu_side gpu, host;

/* ---- against the host ------------------------------------------------------------------------ */

static battery_results run_on(gpu_side *side, const battery_op *op, const battery_case *c,
                              battery_operands *operands) {
    *operands = battery_prepare(side, op, c);
    EXPECT_OK(op->launch(side, c, operands));
    return battery_fetch(side, operands);
}

/* On an H200 a tile of 128 rows is made by 8, 4, 2 blocks and by one. */
static void check_op(const battery_op *op) {
    static const unsigned without_planes[] = {0, 19, 14, 9, 4, 23};
    static const int64_t rows[] = {1905, 5001, 8575, 17100};
    for (size_t i = 0; i < 4 * sizeof without_planes / sizeof *without_planes; i++) {
        const battery_case c = {rows[i % 4],           72,  GPU_FILL_NORMAL, i + 1,
                                without_planes[i / 4], NULL};
        battery_operands on_gpu, on_host;
        battery_results actual = run_on(&gpu, op, &c, &on_gpu);
        battery_results expected = run_on(&host, op, &c, &on_host);
        gpu_count("low, against the host",
                  battery_results_equal(&on_gpu, &actual, &expected, op->name));
        battery_results_end(&on_gpu, &actual);
        battery_results_end(&on_host, &expected);
        battery_end(&gpu, &on_gpu);
        battery_end(&host, &on_host);
    }
}

static void short_rows_equal_the_host(void **state) {
    (void)state;
    battery_each_op("norm backward", check_op);
    gpu_count_report("gradients of norms, many short rows");
}

/* ---- against other kernels ------------------------------------------------------------------- */

typedef struct gradient_case {
    int64_t rows, cols;
    tn_dtype dtype;
    tn_norm norm;
    int has_added;
} gradient_case;

static tn_tensor filled(tn_dtype dtype, int64_t rows, int64_t cols, uint64_t seed) {
    enum { DRAWN = 4099 }; /* and again: drawing a number takes longer than all that follows */
    const size_t bytes = tn_dtype_bytes(dtype), count = (size_t)(rows * cols);
    tn_tensor tensor = gpu_plain(&gpu, dtype, rows, cols);
    unsigned char *data = malloc((count + DRAWN) * bytes);
    assert_non_null(data);
    gpu_fill_values(GPU_FILL_NORMAL, dtype, seed, data, DRAWN);
    for (size_t at = DRAWN; at < count; at += DRAWN)
        memcpy(data + at * bytes, data, DRAWN * bytes);
    gpu_upload(&gpu, tensor, data);
    free(data);
    return tensor;
}

static void compare(tn_tensor once, tn_tensor twice, const char *what) {
    gpu_copy actual = gpu_download(&gpu, once, TN_PLANE_DATA);
    gpu_copy expected = gpu_download(&gpu, twice, TN_PLANE_DATA);
    gpu_count(what, gpu_copies_equal(&actual, &expected, what));
    gpu_copy_end(&actual);
    gpu_copy_end(&expected);
    gpu_destroy(&gpu, once);
    gpu_destroy(&gpu, twice);
}

static void check_case(const gradient_case *c) {
    tn_norm_backward_args args = TN_NORM_BACKWARD_ARGS_INIT;
    const int is_layer = c->norm == TN_NORM_LAYER;
    tn_tensor dx[2], dgamma[2], dbeta[2] = {{0}, {0}};
    args.norm = c->norm;
    args.dy = filled(c->dtype, c->rows, c->cols, 1);
    args.x = filled(c->dtype, c->rows, c->cols, 2);
    if (c->has_added) args.added = filled(c->dtype, c->rows, c->cols, 3);
    args.rstd = filled(TN_FP32, c->rows, 1, 4);
    if (is_layer) args.mean = filled(TN_FP32, c->rows, 1, 5);
    args.gamma = filled(TN_BF16, 1, c->cols, 6);
    args.scope = gpu.scope;
    tn_tensor planes =
        gpu_fp8(&gpu, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_SCALE_POW2, c->rows, c->cols);
    for (int twice = 0; twice < 2; twice++) {
        dx[twice] = args.dx = gpu_plain(&gpu, c->dtype, c->rows, c->cols);
        dgamma[twice] = args.dgamma = gpu_plain(&gpu, TN_FP32, 1, c->cols);
        if (is_layer) dbeta[twice] = args.dbeta = gpu_plain(&gpu, TN_FP32, 1, c->cols);
        gpu_poison(&gpu, args.dx, TN_PLANE_DATA);
        if (twice) args.quantized.tensor = planes, args.quantized.planes = TN_QUANTIZE_ROW;
        EXPECT_OK(tn_norm_backward(&args, gpu.stream));
    }
    compare(dx[0], dx[1], "dx, against that of planes");
    compare(dgamma[0], dgamma[1], "dgamma, likewise");
    if (is_layer) compare(dbeta[0], dbeta[1], "dbeta, likewise");
    gpu_destroy(&gpu, planes);
    gpu_destroy(&gpu, args.dy), gpu_destroy(&gpu, args.x), gpu_destroy(&gpu, args.rstd);
    gpu_destroy(&gpu, args.gamma);
    if (c->has_added) gpu_destroy(&gpu, args.added);
    if (is_layer) gpu_destroy(&gpu, args.mean);
}

static void rows_of_any_length_equal_planes(void **state) {
    static const int64_t shapes[][2] = {{8575, 1032}, {8448, 2048}, {6783, 4096}, {6784, 4088},
                                        {6783, 7168}, {6784, 8192}, {1905, 1032}, {1905, 8192},
                                        {2600, 7168}, {8600, 4096}, {17500, 4096}};
    static const tn_dtype types[] = {TN_BF16, TN_FP16, TN_FP32};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (int way = 0; way < 6; way++) {
            const gradient_case c = {.rows = shapes[s][0],
                                     .cols = shapes[s][1],
                                     .dtype = types[way % 3],
                                     .norm = way / 3 ? TN_NORM_LAYER : TN_NORM_RMS,
                                     .has_added = (way + (int)s) % 2};
            check_case(&c);
        }
    }
    gpu_count_report("gradients of norms, many rows");
}

/* ---- norms ----------------------------------------------------------------------------------- */

static void compare_planes(tn_tensor once, tn_tensor twice) {
    static const tn_plane planes[] = {TN_PLANE_ROW, TN_PLANE_COL};
    for (int p = 0; p < 2; p++) {
        gpu_copy actual = gpu_download(&gpu, once, planes[p]);
        gpu_copy expected = gpu_download(&gpu, twice, planes[p]);
        gpu_count("planes", gpu_copies_equal(&actual, &expected, "planes"));
        gpu_copy_end(&actual);
        gpu_copy_end(&expected);
    }
    gpu_destroy(&gpu, once);
    gpu_destroy(&gpu, twice);
}

static void check_norm(tn_dtype dtype, int64_t rows, int64_t cols, int way) {
    const tn_format format = way % 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
    tn_norm_args args = TN_NORM_ARGS_INIT;
    const int has_residual = way % 3 != 0, has_value = way % 3 != 1;
    tn_tensor sum[2] = {{0}, {0}}, y[2] = {{0}, {0}}, rstd[2], planes[2];
    args.x = filled(dtype, rows, cols, 1);
    if (has_residual) args.residual = filled(dtype, rows, cols, 2);
    args.gamma = filled(TN_BF16, 1, cols, 3);
    for (int twice = 0; twice < 2; twice++) {
        if (has_residual) sum[twice] = args.sum = gpu_plain(&gpu, dtype, rows, cols);
        if (has_value) y[twice] = args.y = gpu_plain(&gpu, dtype, rows, cols);
        rstd[twice] = args.rstd = gpu_plain(&gpu, TN_FP32, rows, 1);
        planes[twice] = args.quantized.tensor =
            gpu_fp8(&gpu, format, TN_E4M3, TN_SCALE_POW2, rows, cols);
        args.quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        args.scope = twice ? (tn_scope){0} : gpu.scope;
        EXPECT_OK(tn_norm_forward(&args, gpu.stream));
    }
    if (has_residual) compare(sum[0], sum[1], "sums");
    if (has_value) compare(y[0], y[1], "y");
    compare(rstd[0], rstd[1], "rstd");
    compare_planes(planes[0], planes[1]);
    gpu_destroy(&gpu, args.x), gpu_destroy(&gpu, args.gamma);
    if (has_residual) gpu_destroy(&gpu, args.residual);
}

static void norms_equal_two_reads(void **state) {
    static const int64_t shapes[][2] = {{54400, 1032}, {8560, 7168}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int way = 0; way < 6; way++)
            check_norm((way + s) % 2 ? TN_BF16 : TN_FP16, shapes[s][0], shapes[s][1], way);
    gpu_count_report("norms with planes, many rows");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(short_rows_equal_the_host),
                                       cmocka_unit_test(rows_of_any_length_equal_planes),
                                       cmocka_unit_test(norms_equal_two_reads)};
    gpu_open(&gpu);
    gpu_open_host(&host, (size_t)4 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&host);
    gpu_close(&gpu);
    return failures;
}
