/* The casts of a GPU to and from TENSOR, MXFP8 and NVFP4, and delayed scaling, against the host
 * driver's, byte for byte: data, scales and their padding, which are full of 0xFF before. */
#include "gpu_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tenure_cast.h"

static gpu_side gpu, host;

static const tn_dtype sources[] = {TN_FP32, TN_BF16, TN_FP16};
static const tn_plane planes[] = {TN_PLANE_ROW, TN_PLANE_COL};

static const struct casting {
    tn_format format;
    tn_dtype dtype;
} castings[] = {{TN_FORMAT_FP8_TENSOR, TN_E4M3},
                {TN_FORMAT_FP8_TENSOR, TN_E5M2},
                {TN_FORMAT_MXFP8, TN_E4M3},
                {TN_FORMAT_MXFP8, TN_E5M2},
                {TN_FORMAT_NVFP4, TN_E2M1}};
enum { CASTINGS = sizeof castings / sizeof *castings };

/* One source on both sides, and what it is cast to. */
typedef struct format_case {
    tn_tensor src[2]; /* gpu, host */
    int64_t rows, cols;
    tn_dtype source;
    const struct casting *to;
    tn_scale_mode mode;
    float epsilon;
    char what[160];
} format_case;

static gpu_side *side_of(int s) { return s ? &host : &gpu; }

static int planes_equal(tn_tensor on_gpu, tn_tensor on_host, tn_plane plane, const char *what) {
    gpu_copy actual = gpu_download(&gpu, on_gpu, plane);
    gpu_copy expected = gpu_download(&host, on_host, plane);
    int equal = gpu_copies_equal(&actual, &expected, what);
    gpu_copy_end(&actual), gpu_copy_end(&expected);
    return equal;
}

static tn_tensor quantized(const format_case *c, int s, unsigned mask) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    gpu_side *side = side_of(s);
    args.src = c->src[s];
    args.dst = gpu_fp8(side, c->to->format, c->to->dtype, c->mode, c->rows, c->cols);
    args.planes = mask;
    args.amax_epsilon = c->epsilon;
    for (int p = 0; p < 2; p++)
        if (mask & (1u << p)) gpu_poison(side, args.dst, planes[p]);
    EXPECT_OK(tn_quantize(&args, side->stream));
    return args.dst;
}

static void check_back(const format_case *c, const tn_tensor quantized_on[2], tn_plane plane) {
    for (int d = 0; d < 3; d++) {
        tn_tensor dst[2];
        for (int s = 0; s < 2; s++) {
            tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
            args.src = quantized_on[s], args.plane = plane;
            args.dst = dst[s] = gpu_plain(side_of(s), sources[d], c->rows, c->cols);
            EXPECT_OK(tn_dequantize(&args, side_of(s)->stream));
        }
        gpu_count("dequantize", planes_equal(dst[0], dst[1], TN_PLANE_DATA, c->what));
        for (int s = 0; s < 2; s++)
            gpu_destroy(side_of(s), dst[s]);
    }
}

static void check_casting(const format_case *c) {
    for (unsigned mask = 1; mask <= 3; mask++) {
        tn_tensor made[2] = {quantized(c, 0, mask), quantized(c, 1, mask)};
        for (int p = 0; p < 2; p++) {
            if (!(mask & (1u << p))) continue;
            gpu_count(tn_format_name(c->to->format),
                      planes_equal(made[0], made[1], planes[p], c->what));
            if (mask == 3) check_back(c, made, planes[p]);
        }
        for (int s = 0; s < 2; s++)
            gpu_destroy(side_of(s), made[s]);
    }
}

static void check_source(int64_t rows, int64_t cols, tn_dtype source, gpu_fill fill) {
    format_case c = {.rows = rows, .cols = cols, .source = source};
    size_t count = (size_t)(rows * cols);
    void *data = malloc(count * 4 + 1);
    gpu_fill_values(fill, source, (uint64_t)(rows * 131071 + cols), data, count);
    for (int s = 0; s < 2; s++) {
        c.src[s] = gpu_plain(side_of(s), source, rows, cols);
        gpu_upload(side_of(s), c.src[s], data);
    }
    for (int i = 0; i < CASTINGS * 2; i++) {
        c.to = &castings[i % CASTINGS];
        c.mode = i < CASTINGS ? TN_SCALE_POW2 : TN_SCALE_FP32;
        c.epsilon = i < CASTINGS ? 0.0f : 1.0f;
        snprintf(c.what, sizeof c.what, "%s %s->%s %lldx%lld fill %s", tn_format_name(c.to->format),
                 tn_dtype_name(source), tn_dtype_name(c.to->dtype), (long long)rows,
                 (long long)cols, gpu_fill_name(fill));
        check_casting(&c);
    }
    for (int s = 0; s < 2; s++)
        gpu_destroy(side_of(s), c.src[s]);
    free(data);
}

static void test_casts_equal_the_host(void **state) {
    static const int64_t shapes[][2] = {{1, 16},    {65, 96},    {256, 256}, {993, 512},
                                        {303, 300}, {305, 257},  {1024, 1},  {16, 512},
                                        {128, 128}, {2000, 1024}};
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int source = 0; source < 3; source++)
            for (int fill = 0; fill < GPU_FILL_COUNT; fill++)
                check_source(shapes[i][0], shapes[i][1], sources[source], (gpu_fill)fill);
    gpu_count_report("casts of formats");
}

static void test_every_tail(void **state) {
    (void)state;
    for (int64_t tail = 1; tail <= 129; tail++) {
        check_source(tail, 136, sources[tail % 3], GPU_FILL_SPECIAL);
        check_source(136, tail, sources[(tail + 1) % 3], GPU_FILL_SPECIAL);
        check_source(128 + tail, 257 - tail, sources[(tail + 2) % 3], GPU_FILL_NORMAL);
    }
    gpu_count_report("casts of formats, tails 1 to 129");
}

/* ---- delayed scaling ----------------------------------------------------------------------- */

enum { LENGTH = 300, TENSORS = 3, STEPS = 310 };

typedef struct recipe_state {
    tn_tensor src, dst, scale, history;
} recipe_state;

static recipe_state recipe_open(gpu_side *side, const void *values) {
    static const float zeros[LENGTH * TENSORS], ones[TENSORS] = {1.0f, 1.0f, 1.0f};
    recipe_state r = {gpu_plain(side, TN_BF16, 200, 137),
                      gpu_fp8(side, TN_FORMAT_FP8_TENSOR, TN_E4M3, TN_SCALE_FP32, 200, 137),
                      gpu_plain(side, TN_FP32, 1, TENSORS),
                      gpu_plain(side, TN_FP32, LENGTH, TENSORS)};
    gpu_upload(side, r.src, values);
    gpu_upload(side, r.scale, ones);
    gpu_upload(side, r.history, zeros);
    return r;
}

static void recipe_step(gpu_side *side, const recipe_state *r, int step) {
    tn_quantize_args cast = TN_QUANTIZE_ARGS_INIT;
    tn_scale_update_args update = TN_SCALE_UPDATE_ARGS_INIT;
    cast.src = r->src, cast.dst = r->dst, cast.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    cast.scale = r->scale, cast.amax_history = r->history, cast.slot = step % TENSORS;
    EXPECT_OK(tn_quantize(&cast, side->stream));
    update.amax_history = r->history, update.scale = r->scale;
    update.amax = step / 5 % 2 ? TN_AMAX_MOST : TN_AMAX_MOST_RECENT;
    EXPECT_OK(tn_scale_update(&update, side->stream));
}

static void test_delayed_scaling_equals_the_host(void **state) {
    static unsigned short values[200 * 137];
    (void)state;
    gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, 1, values, 200 * 137);
    recipe_state of[2] = {recipe_open(&gpu, values), recipe_open(&host, values)};
    for (int step = 0; step < STEPS; step++) {
        for (int s = 0; s < 2; s++)
            recipe_step(side_of(s), &of[s], step);
        if (step % 31 != 0) continue;
        gpu_count("cast", planes_equal(of[0].dst, of[1].dst, TN_PLANE_ROW, "delayed row") &&
                              planes_equal(of[0].dst, of[1].dst, TN_PLANE_COL, "delayed col"));
        gpu_count("state",
                  planes_equal(of[0].scale, of[1].scale, TN_PLANE_DATA, "scale") &&
                      planes_equal(of[0].history, of[1].history, TN_PLANE_DATA, "history"));
    }
    for (int s = 0; s < 2; s++) {
        gpu_destroy(side_of(s), of[s].src), gpu_destroy(side_of(s), of[s].dst);
        gpu_destroy(side_of(s), of[s].scale), gpu_destroy(side_of(s), of[s].history);
    }
    gpu_count_report("delayed scaling");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_casts_equal_the_host),
        cmocka_unit_test(test_every_tail),
        cmocka_unit_test(test_delayed_scaling_equals_the_host),
    };
    gpu_open(&gpu);
    gpu_open_host(&host, (size_t)1 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&host);
    gpu_close(&gpu);
    return failures;
}
