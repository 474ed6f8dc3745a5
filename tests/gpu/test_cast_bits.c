/* The casts of a GPU against the host driver's, byte for byte: data, scales and their padding.
 *
 * Outputs are full of 0xFF (NaN) before each cast, so that a byte that was not written shows.
 */
#include "gpu_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static gpu_side gpu, host;

static const tn_dtype sources[] = {TN_FP32, TN_BF16, TN_FP16};
static const tn_dtype formats[] = {TN_E4M3, TN_E5M2};
static const tn_plane planes[] = {TN_PLANE_ROW, TN_PLANE_COL};

/* One matrix on both sides and how it is quantized. */
typedef struct cast_case {
    int64_t rows, cols;
    tn_dtype source, dtype;
    tn_format format;
    tn_scale_mode mode;
    float epsilon;
    gpu_fill fill;
} cast_case;

static void describe(const cast_case *c, const char *op, char *text, size_t bytes) {
    snprintf(text, bytes, "%s %s %s->%s %s %lldx%lld eps %g fill %s", op,
             c->format == TN_FORMAT_FP8_BLOCK_1D ? "1D" : "2D", tn_dtype_name(c->source),
             tn_dtype_name(c->dtype), c->mode == TN_SCALE_POW2 ? "pow2" : "fp32",
             (long long)c->rows, (long long)c->cols, (double)c->epsilon, gpu_fill_name(c->fill));
}

static tn_tensor quantized(gpu_side *side, const cast_case *c, tn_tensor src, unsigned mask) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = src;
    args.dst = gpu_fp8(side, c->format, c->dtype, c->mode, c->rows, c->cols);
    args.planes = mask;
    args.amax_epsilon = c->epsilon;
    for (int p = 0; p < 2; p++)
        if (mask & (1u << p)) gpu_poison(side, args.dst, planes[p]);
    EXPECT_OK(tn_quantize(&args, side->stream));
    return args.dst;
}

/* ---- quantize ------------------------------------------------------------------------------ */

static void compare_planes(const cast_case *c, tn_tensor actual, unsigned mask,
                           const gpu_copy expected[2], const char *op) {
    char what[160], name[64];
    describe(c, op, what, sizeof what);
    snprintf(name, sizeof name, "%s %s", op, c->format == TN_FORMAT_FP8_BLOCK_1D ? "1D" : "2D");
    int equal = 1;
    for (int p = 0; p < 2; p++) {
        if (!(mask & (1u << p))) continue;
        gpu_copy copy = gpu_download(&gpu, actual, planes[p]);
        equal = gpu_copies_equal(&copy, &expected[p], what) && equal;
        gpu_copy_end(&copy);
    }
    gpu_count(name, equal);
}

static void check_quantize(const cast_case *c, tn_tensor on_gpu, tn_tensor on_host) {
    static const char *const ops[] = {"", "quantize row", "quantize col", "quantize both"};
    tn_tensor reference = quantized(&host, c, on_host, TN_QUANTIZE_ROW | TN_QUANTIZE_COL);
    gpu_copy expected[2] = {gpu_download(&host, reference, TN_PLANE_ROW),
                            gpu_download(&host, reference, TN_PLANE_COL)};
    for (unsigned mask = 1; mask <= 3; mask++) {
        tn_tensor actual = quantized(&gpu, c, on_gpu, mask);
        compare_planes(c, actual, mask, expected, ops[mask]);
        gpu_destroy(&gpu, actual);
    }
    gpu_copy_end(&expected[0]);
    gpu_copy_end(&expected[1]);
    gpu_destroy(&host, reference);
}

/* Every way to quantize one matrix; a large one with fewer epsilons. */
static void check_ways(cast_case *c, tn_tensor on_gpu, tn_tensor on_host) {
    int is_large = c->rows * c->cols > 1 << 20;
    for (int f = 0; f < 2; f++) {
        for (int way = 0; way < 8; way++) {
            c->dtype = formats[f];
            c->format = way & 1 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
            c->mode = way & 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
            c->epsilon = way & 4 ? 1.0f : 0.0f;
            if (is_large && way >= 4) continue;
            check_quantize(c, on_gpu, on_host);
        }
    }
}

static void with_matrix(cast_case *c, void (*check)(cast_case *, tn_tensor, tn_tensor)) {
    size_t count = (size_t)(c->rows * c->cols);
    void *data = malloc(count * 4 + 1);
    gpu_fill_values(c->fill, c->source, (uint64_t)(c->rows * 131071 + c->cols), data, count);
    tn_tensor on_gpu = gpu_plain(&gpu, c->source, c->rows, c->cols);
    tn_tensor on_host = gpu_plain(&host, c->source, c->rows, c->cols);
    gpu_upload(&gpu, on_gpu, data);
    gpu_upload(&host, on_host, data);
    check(c, on_gpu, on_host);
    gpu_destroy(&gpu, on_gpu);
    gpu_destroy(&host, on_host);
    free(data);
}

static void test_quantize_equals_the_host(void **state) {
    static const int64_t shapes[][2] = {{1, 16},      {65, 96},     {256, 256},  {993, 512},
                                        {256, 65536}, {4096, 1632}, {1024, 1},   {16, 512},
                                        {1, 1024},    {256, 1024},  {512, 512},  {303, 300},
                                        {305, 256},   {2000, 1024}, {128, 7168}, {513, 131}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (int source = 0; source < 3; source++) {
            for (int fill = 0; fill < GPU_FILL_COUNT; fill++) {
                cast_case c = {.rows = shapes[s][0],
                               .cols = shapes[s][1],
                               .source = sources[source],
                               .fill = (gpu_fill)fill};
                int is_large = c.rows * c.cols > 1 << 20;
                if (is_large && fill != GPU_FILL_NORMAL && fill != GPU_FILL_SPECIAL) continue;
                with_matrix(&c, check_ways);
            }
        }
    }
    gpu_count_report("quantize, host's shapes");
}

static void check_default_ways(cast_case *c, tn_tensor on_gpu, tn_tensor on_host) {
    c->dtype = TN_E4M3;
    for (int way = 0; way < 2; way++) {
        c->format = way ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
        check_quantize(c, on_gpu, on_host);
    }
}

static void test_quantize_every_tail(void **state) {
    (void)state;
    for (int64_t tail = 1; tail <= 129; tail++) {
        cast_case row_tail = {.rows = tail, .cols = 136, .source = TN_BF16};
        cast_case col_tail = {.rows = 136, .cols = tail, .source = TN_BF16};
        cast_case both = {.rows = 128 + tail, .cols = 257 - tail, .source = TN_FP32};
        row_tail.fill = col_tail.fill = GPU_FILL_SPECIAL;
        with_matrix(&row_tail, check_default_ways);
        with_matrix(&col_tail, check_default_ways);
        with_matrix(&both, check_default_ways);
    }
    gpu_count_report("quantize, tails 1 to 129");
}

/* ---- transpose and dequantize --------------------------------------------------------------- */

static void check_transpose(cast_case *c, tn_tensor source, int from) {
    char what[160];
    tn_transpose_args args = TN_TRANSPOSE_ARGS_INIT;
    tn_tensor both = quantized(&gpu, c, source, 3);
    args.tensor = quantized(&gpu, c, source, 1u << from);
    args.to = planes[!from];
    EXPECT_OK(tn_transpose(&args, gpu.stream));
    gpu_copy actual = gpu_download(&gpu, args.tensor, planes[!from]);
    gpu_copy expected = gpu_download(&gpu, both, planes[!from]);
    describe(c, "transpose", what, sizeof what);
    gpu_count(from ? "transpose to row" : "transpose to col",
              gpu_copies_equal(&actual, &expected, what));
    gpu_copy_end(&actual);
    gpu_copy_end(&expected);
    gpu_destroy(&gpu, both);
    gpu_destroy(&gpu, args.tensor);
}

static void dequantized(gpu_side *side, tn_tensor tensor, tn_plane plane, tn_tensor dst) {
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    args.src = tensor;
    args.plane = plane;
    args.dst = dst;
    gpu_poison(side, dst, TN_PLANE_DATA);
    EXPECT_OK(tn_dequantize(&args, side->stream));
}

static void check_dequantize(const cast_case *c, tn_tensor on_gpu, tn_tensor on_host, int plane,
                             tn_dtype dtype) {
    char what[160];
    tn_tensor actual = gpu_plain(&gpu, dtype, c->rows, c->cols);
    tn_tensor expected = gpu_plain(&host, dtype, c->rows, c->cols);
    dequantized(&gpu, on_gpu, planes[plane], actual);
    dequantized(&host, on_host, planes[plane], expected);
    gpu_copy actual_copy = gpu_download(&gpu, actual, TN_PLANE_DATA);
    gpu_copy expected_copy = gpu_download(&host, expected, TN_PLANE_DATA);
    describe(c, plane ? "dequantize col" : "dequantize row", what, sizeof what);
    gpu_count(plane ? "dequantize col" : "dequantize row",
              gpu_copies_equal(&actual_copy, &expected_copy, what));
    gpu_copy_end(&actual_copy);
    gpu_copy_end(&expected_copy);
    gpu_destroy(&gpu, actual);
    gpu_destroy(&host, expected);
}

static void check_inverse_ops(cast_case *c, tn_tensor on_gpu, tn_tensor on_host) {
    for (int way = 0; way < 4; way++) {
        c->dtype = formats[way & 1];
        c->format = way & 2 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
        c->mode = way & 1 ? TN_SCALE_FP32 : TN_SCALE_POW2;
        tn_tensor gpu_values = quantized(&gpu, c, on_gpu, 3);
        tn_tensor host_values = quantized(&host, c, on_host, 3);
        for (int plane = 0; plane < 2; plane++)
            for (int dtype = 0; dtype < 3; dtype++)
                check_dequantize(c, gpu_values, host_values, plane, sources[dtype]);
        gpu_destroy(&gpu, gpu_values);
        gpu_destroy(&host, host_values);
        if (c->format != TN_FORMAT_FP8_BLOCK_2D) continue;
        check_transpose(c, on_gpu, 0);
        check_transpose(c, on_gpu, 1);
    }
}

static void test_transpose_and_dequantize(void **state) {
    static const int64_t shapes[][2] = {{1, 1},     {1, 300},   {300, 1},   {127, 129}, {128, 128},
                                        {129, 127}, {256, 512}, {513, 260}, {1000, 72}, {40, 1000}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (int fill = 0; fill < GPU_FILL_COUNT; fill++) {
            cast_case c = {.rows = shapes[s][0],
                           .cols = shapes[s][1],
                           .source = TN_FP32,
                           .fill = (gpu_fill)fill};
            with_matrix(&c, check_inverse_ops);
        }
    }
    gpu_count_report("transpose, dequantize");
}

/* Any bytes, written from the host: also those that no cast makes. */
static tn_tensor tensor_scaled(gpu_side *side, int64_t rows, int64_t cols, tn_plane from,
                               const unsigned char *data) {
    static const float scale[4] = {0.375f, NAN, NAN, NAN}; /* padding that must not be read */
    tn_tensor tensor = gpu_fp8(side, TN_FORMAT_FP8_TENSOR, TN_E4M3, TN_SCALE_POW2, rows, cols);
    EXPECT_OK(tn_plane_write(tensor, from, data, (size_t)(rows * cols), scale, sizeof scale,
                             side->stream));
    EXPECT_OK(tn_stream_synchronize(side->device, side->stream));
    return tensor;
}

static void check_tensor_transpose(int64_t rows, int64_t cols, int from) {
    unsigned char *data = malloc((size_t)(rows * cols));
    uint64_t seed = (uint64_t)(rows * 1000 + cols);
    char what[80];
    for (int64_t i = 0; i < rows * cols; i++)
        data[i] = (unsigned char)(gpu_random(&seed) >> 56);
    tn_tensor on_gpu = tensor_scaled(&gpu, rows, cols, planes[from], data);
    tn_tensor on_host = tensor_scaled(&host, rows, cols, planes[from], data);
    gpu_copy actual = gpu_download(&gpu, on_gpu, planes[!from]); /* derived by the read */
    gpu_copy expected = gpu_download(&host, on_host, planes[!from]);
    snprintf(what, sizeof what, "one scale, %lld x %lld", (long long)rows, (long long)cols);
    gpu_count(from ? "one scale: row from col" : "one scale: col from row",
              gpu_copies_equal(&actual, &expected, what) && actual.scale[0] == 0.375f);
    gpu_copy_end(&actual);
    gpu_copy_end(&expected);
    gpu_destroy(&gpu, on_gpu);
    gpu_destroy(&host, on_host);
    free(data);
}

static void test_transpose_with_one_scale(void **state) {
    static const int64_t shapes[][2] = {{1, 1},     {1, 300},   {300, 1},   {127, 129},
                                        {128, 128}, {129, 127}, {512, 256}, {513, 260},
                                        {1000, 72}, {40, 1000}, {144, 272}, {2048, 4096}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        check_tensor_transpose(shapes[s][0], shapes[s][1], 0);
        check_tensor_transpose(shapes[s][0], shapes[s][1], 1);
    }
    gpu_count_report("transpose, one scale for the tensor");
}

static void test_empty_is_success(void **state) {
    static const int64_t shapes[][2] = {{0, 128}, {128, 0}, {0, 0}};
    (void)state;
    for (int s = 0; s < 3; s++) {
        cast_case c = {.rows = shapes[s][0], .cols = shapes[s][1], .source = TN_BF16};
        with_matrix(&c, check_default_ways);
        c.source = TN_FP32;
        with_matrix(&c, check_inverse_ops);
    }
    gpu_count_report("empty");
}

/* ---- more than 2^31 elements --------------------------------------------------------------- */

enum { LARGE_ROWS = 65537, LARGE_COLS = 32768, BAND = 128, BAND_COUNT = 3 };
/* The first and a middle band of 128 rows, and the last row: its first element has index 2^31. */
static const int64_t bands[BAND_COUNT] = {0, 32768, 65536};

static int64_t band_rows(int b) {
    int64_t left = LARGE_ROWS - bands[b];
    return left < BAND ? left : BAND;
}

static void large_source(tn_tensor tensor, unsigned short *const band_data[BAND_COUNT]) {
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, gpu.stream, &lease, &view));
    EXPECT_OK(tn_fill(gpu.device, view.data, 0x3C, view.layout.data_bytes, gpu.stream));
    for (int b = 0; b < BAND_COUNT; b++)
        EXPECT_OK(tn_copy(gpu.device, (unsigned short *)view.data + bands[b] * LARGE_COLS,
                          band_data[b], (size_t)band_rows(b) * LARGE_COLS * 2, gpu.stream));
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
}

/* A band starts at a multiple of 128 rows, so on its own it has the same blocks. */
static int large_band_equal(const gpu_copy *row, const gpu_copy *col, int64_t first,
                            const gpu_copy *band_row, const gpu_copy *band_col) {
    int64_t rows = band_row->layout.rows;
    int equal =
        memcmp(row->data + first * LARGE_COLS, band_row->data, (size_t)(rows * LARGE_COLS)) == 0;
    for (int64_t block = 0; block < LARGE_COLS / 128; block++)
        equal = equal && memcmp(row->scale + block * row->layout.scale_stride + first,
                                band_row->scale + block * band_row->layout.scale_stride,
                                (size_t)rows * 4) == 0;
    for (int64_t k = 0; k < LARGE_COLS; k++)
        equal = equal && memcmp(col->data + k * LARGE_ROWS + first, band_col->data + k * rows,
                                (size_t)rows) == 0;
    return equal && memcmp(col->scale + first / 128 * col->layout.scale_stride, band_col->scale,
                           (size_t)LARGE_COLS * 4) == 0;
}

static void test_more_than_2_to_the_31_elements(void **state) {
    unsigned short *band_data[BAND_COUNT];
    cast_case c = {.rows = LARGE_ROWS,
                   .cols = LARGE_COLS,
                   .source = TN_BF16,
                   .dtype = TN_E4M3,
                   .format = TN_FORMAT_FP8_BLOCK_1D};
    (void)state;
    for (int b = 0; b < BAND_COUNT; b++) {
        size_t count = (size_t)band_rows(b) * LARGE_COLS;
        band_data[b] = malloc(count * 2);
        gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, (uint64_t)b + 5, band_data[b], count);
    }
    tn_tensor source = gpu_plain(&gpu, TN_BF16, LARGE_ROWS, LARGE_COLS);
    large_source(source, band_data);
    tn_tensor actual = quantized(&gpu, &c, source, 3);
    gpu_copy row = gpu_download(&gpu, actual, TN_PLANE_ROW);
    gpu_copy col = gpu_download(&gpu, actual, TN_PLANE_COL);
    for (int b = 0; b < BAND_COUNT; b++) {
        c.rows = band_rows(b);
        tn_tensor band = gpu_plain(&host, TN_BF16, c.rows, LARGE_COLS);
        gpu_upload(&host, band, band_data[b]);
        tn_tensor expected = quantized(&host, &c, band, 3);
        gpu_copy band_row = gpu_download(&host, expected, TN_PLANE_ROW);
        gpu_copy band_col = gpu_download(&host, expected, TN_PLANE_COL);
        gpu_count("65537 x 32768 bf16, both planes",
                  large_band_equal(&row, &col, bands[b], &band_row, &band_col));
        gpu_copy_end(&band_row);
        gpu_copy_end(&band_col);
        gpu_destroy(&host, expected);
        gpu_destroy(&host, band);
        free(band_data[b]);
    }
    gpu_copy_end(&row);
    gpu_copy_end(&col);
    gpu_destroy(&gpu, actual);
    gpu_destroy(&gpu, source);
    gpu_count_report("more than 2^31 elements");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantize_equals_the_host),
        cmocka_unit_test(test_quantize_every_tail),
        cmocka_unit_test(test_transpose_and_dequantize),
        cmocka_unit_test(test_transpose_with_one_scale),
        cmocka_unit_test(test_empty_is_success),
        cmocka_unit_test(test_more_than_2_to_the_31_elements),
    };
    gpu_open(&gpu);
    gpu_open_host(&host, (size_t)8 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&host);
    gpu_close(&gpu);
    return failures;
}
