/* tn_gemm of the CUDA table, over a scripted cuBLASLt that multiplies by the host's definition:
 * what pads, cuts out, converts and adds around the product gives the host's bits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "emulated_driver.h"
#include "emulator.h"
#include "gpu_support.h"
#include "scripted_cublaslt.h"
#include "tenure_gemm.h"
#include "tenure_lifetime.h"

static gpu_side device, host;

typedef struct gemm_case {
    tn_gemm_form form;
    int64_t m, n, k;
    tn_format weight;   /* PLAIN: both are */
    tn_format a_format; /* of a, if it is 2D beside a b that is 1D */
    tn_dtype a, b, d;
    tn_scale_mode mode;
    int accumulate;
    int has_bias;
    tn_dtype bias;
    tn_gemm_engine engine; /* on the device; AUTO: as it comes */
} gemm_case;

static tn_tensor make_operand(gpu_side *side, const gemm_case *c, tn_format format, tn_dtype dtype,
                              unsigned planes, int64_t rows, int64_t cols, uint64_t seed) {
    size_t count = (size_t)(rows * cols);
    tn_dtype source_dtype = format == TN_FORMAT_PLAIN ? dtype : TN_BF16;
    void *data = malloc(count * sizeof(float) + 1);
    gpu_fill_values(GPU_FILL_NORMAL, source_dtype, seed, data, count);
    tn_tensor source = gpu_plain(side, source_dtype, rows, cols);
    gpu_upload(side, source, data);
    free(data);
    if (format == TN_FORMAT_PLAIN) return source;
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = source;
    args.dst = gpu_fp8(side, format, dtype, c->mode, rows, cols);
    args.planes = planes;
    EXPECT_OK(tn_quantize(&args, side->stream));
    gpu_destroy(side, source);
    return args.dst;
}

static tn_gemm_args make_args(gpu_side *side, const gemm_case *c) {
    int is_plain = c->weight == TN_FORMAT_PLAIN;
    int is_whole = is_plain || c->weight == TN_FORMAT_FP8_TENSOR;
    tn_format vector = is_whole ? c->weight : TN_FORMAT_FP8_BLOCK_1D;
    tn_format of_a = c->a_format != TN_FORMAT_PLAIN ? c->a_format : vector;
    int is_wgrad = c->form == TN_GEMM_WGRAD, is_fprop = c->form == TN_GEMM_FPROP;
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = c->form;
    args.accumulate = c->accumulate;
    args.scope = side->scope;
    args.a = make_operand(side, c, of_a, c->a, is_wgrad ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW, c->m,
                          is_fprop ? c->k : c->n, 1);
    args.b = make_operand(side, c, c->weight, c->b, is_fprop ? TN_QUANTIZE_ROW : TN_QUANTIZE_COL,
                          is_wgrad ? c->m : c->n, c->k, 2);
    if (c->has_bias)
        args.bias =
            make_operand(side, c, TN_FORMAT_PLAIN, c->bias, 0, 1, is_fprop ? c->n : c->k, 4);
    gemm_case of_d = *c;
    of_d.mode = TN_SCALE_POW2;
    args.d = make_operand(side, &of_d, TN_FORMAT_PLAIN, c->d, 0, is_wgrad ? c->n : c->m,
                          is_fprop ? c->n : c->k, 3);
    return args;
}

static void end_args(gpu_side *side, const tn_gemm_args *args) {
    gpu_destroy(side, args->a);
    gpu_destroy(side, args->b);
    gpu_destroy(side, args->d);
    if (args->bias.value) gpu_destroy(side, args->bias);
}

static gpu_copy product(gpu_side *side, const gemm_case *c) {
    tn_gemm_args args = make_args(side, c);
    if (side == &device) args.engine = c->engine;
    EXPECT_OK(tn_gemm(&args, side->stream));
    gpu_copy copy = gpu_download(side, args.d, TN_PLANE_DATA);
    end_args(side, &args);
    return copy;
}

static void check(const gemm_case *c, const char *name) {
    char what[160];
    gpu_copy actual = product(&device, c), expected = product(&host, c);
    snprintf(what, sizeof what, "%s form %d m %lld n %lld k %lld %s x %s -> %s%s%s", name, c->form,
             (long long)c->m, (long long)c->n, (long long)c->k, tn_dtype_name(c->a),
             tn_dtype_name(c->b), tn_dtype_name(c->d), c->accumulate ? " +=" : "",
             c->mode == TN_SCALE_FP32 ? " fp32 scales" : "");
    gpu_count(name, gpu_copies_equal(&actual, &expected, what));
    gpu_copy_end(&actual);
    gpu_copy_end(&expected);
}

static gemm_case fp8_case(int64_t m, int64_t n, int64_t k) {
    gemm_case c = {.m = m,
                   .n = n,
                   .k = k,
                   .weight = TN_FORMAT_FP8_BLOCK_2D,
                   .a = TN_E4M3,
                   .b = TN_E4M3,
                   .d = TN_FP32};
    return c;
}

static const int64_t shapes[][3] = {{16, 128, 128},  {128, 256, 64}, {1, 1, 1},      {7, 5, 3},
                                    {100, 130, 128}, {17, 192, 200}, {129, 36, 131}, {4, 4, 640},
                                    {255, 8, 120},   {3, 260, 16}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static void fp8_equals_the_host_to_the_bit(void **state) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (int i = 0; i < SHAPES * 24; i++) {
        gemm_case c = fp8_case(shapes[i % SHAPES][0], shapes[i % SHAPES][1], shapes[i % SHAPES][2]);
        int way = i / SHAPES;
        c.form = way % 4 == 3 ? TN_GEMM_FPROP : (tn_gemm_form)(way % 4);
        c.weight = way % 4 >= 2 ? TN_FORMAT_FP8_BLOCK_1D : TN_FORMAT_FP8_BLOCK_2D;
        if (c.weight == TN_FORMAT_FP8_BLOCK_1D && i % 3 == 0) c.a_format = TN_FORMAT_FP8_BLOCK_2D;
        c.a = way % 3 == 1 ? TN_E5M2 : TN_E4M3;
        c.b = way % 3 == 2 ? TN_E5M2 : TN_E4M3;
        c.d = types[way / 4 % 3];
        c.mode = way % 5 == 0 ? TN_SCALE_FP32 : TN_SCALE_POW2;
        c.accumulate = way / 12;
        check(&c, "fp8");
    }
    gpu_count_report("GEMM on the emulated device, FP8");
}

static void one_scale_a_tensor_equals_the_host_to_the_bit(void **state) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (int i = 0; i < SHAPES * 9; i++) {
        gemm_case c = fp8_case(shapes[i % SHAPES][0], shapes[i % SHAPES][1], shapes[i % SHAPES][2]);
        int way = i / SHAPES;
        c.form = (tn_gemm_form)(way % 3);
        c.weight = TN_FORMAT_FP8_TENSOR;
        c.a = i % 2 ? TN_E5M2 : TN_E4M3;
        c.d = types[way / 3];
        c.mode = i % 5 == 0 ? TN_SCALE_FP32 : TN_SCALE_POW2;
        c.accumulate = i % 4 == 3;
        check(&c, "one scale");
    }
    gpu_count_report("GEMM on the emulated device, one scale a tensor");
}

/* Added by cuBLASLt where it can, by us where it can not, does not, or D has another type. */
static void a_bias_equals_the_host_to_the_bit(void **state) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_PLAIN,
                                        TN_FORMAT_FP8_TENSOR};
    (void)state;
    for (int i = 0; i < SHAPES * 18; i++) {
        gemm_case c = fp8_case(shapes[i % SHAPES][0], shapes[i % SHAPES][1], shapes[i % SHAPES][2]);
        int way = i / SHAPES;
        c.weight = formats[way % 3];
        c.form = (tn_gemm_form)(i % 3);
        if (c.weight == TN_FORMAT_FP8_BLOCK_2D && c.form == TN_GEMM_WGRAD)
            c.weight = TN_FORMAT_FP8_BLOCK_1D;
        c.d = types[way / 3 % 3];
        c.has_bias = 1;
        c.bias = way < 9 ? c.d : types[way % 3];
        if (c.weight == TN_FORMAT_PLAIN) c.a = c.b = types[i % 3];
        c.accumulate = i % 4 == 1;
        scripted.has_no_bias = i % 5 == 2;
        check(&c, "bias");
    }
    scripted.has_no_bias = 0;
    gpu_count_report("GEMM on the emulated device, with a bias");
}

static void plain_equals_the_host_to_the_bit(void **state) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (int i = 0; i < 54 * 3; i++) {
        const int64_t *shape = shapes[2 + i / 54 * 3];
        gemm_case c = fp8_case(shape[0], shape[1], shape[2]);
        c.weight = TN_FORMAT_PLAIN;
        c.form = (tn_gemm_form)(i % 3);
        c.a = c.b = types[i / 3 % 3];
        c.d = types[i / 9 % 3];
        c.accumulate = i / 27 % 2;
        check(&c, "plain");
    }
    gpu_count_report("GEMM on the emulated device, plain");
}

/* ---- our own product ------------------------------------------------------------------------ */

/* Scales of tiles in powers of two: else the host multiplies in another order. */
static gemm_case own_case(int i) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    static const int64_t further[][3] = {{200, 130, 520}, {1700, 258, 16}};
    const int64_t *shape = i % 12 < SHAPES ? shapes[i % 12] : further[i % 12 - SHAPES];
    gemm_case c = fp8_case(shape[0], shape[1], shape[2]);
    const int way = i / 12;
    c.engine = TN_GEMM_ENGINE_WGMMA;
    c.form = (tn_gemm_form)(way % 3);
    c.weight = way % 3 == 2 ? TN_FORMAT_FP8_BLOCK_1D : TN_FORMAT_FP8_BLOCK_2D;
    c.a = i % 3 == 1 ? TN_E5M2 : TN_E4M3;
    c.b = i % 3 == 2 ? TN_E5M2 : TN_E4M3;
    c.d = types[way / 3 % 3];
    c.mode = way % 3 == 2 && i % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
    c.accumulate = c.d == TN_FP32 && i % 4 == 0;
    return c;
}

static void our_own_product_equals_the_host_to_the_bit(void **state) {
    (void)state;
    for (int i = 0; i < 12 * 9; i++) {
        const gemm_case c = own_case(i);
        const int products = scripted.products;
        check(&c, "own");
        assert_int_equal(scripted.products, products);
        const char *last = emulated_last_kernel();
        assert_true(strncmp(last, "product_", 8) == 0 || strncmp(last, "finish_", 7) == 0);
    }
    gpu_count_report("GEMM on the emulated device, our own");
}

static void expect_not_ours(const gemm_case *c, const char *text) {
    tn_gemm_args args = make_args(&device, c);
    gpu_copy before = gpu_download(&device, args.d, TN_PLANE_DATA);
    args.engine = TN_GEMM_ENGINE_WGMMA;
    assert_int_equal(tn_gemm(&args, device.stream), TN_UNSUPPORTED);
    assert_non_null(strstr(tn_error_last(), text));
    gpu_copy after = gpu_download(&device, args.d, TN_PLANE_DATA);
    assert_true(gpu_copies_equal(&after, &before, "d of a refused product"));
    gpu_copy_end(&before), gpu_copy_end(&after);
    args.engine = TN_GEMM_ENGINE_AUTO;
    EXPECT_OK(tn_gemm(&args, device.stream));
    EXPECT_OK(tn_stream_synchronize(device.device, device.stream));
    end_args(&device, &args);
}

static void what_our_own_does_not_take_it_refuses(void **state) {
    (void)state;
    gemm_case c = fp8_case(128, 128, 128);
    c.d = TN_BF16, c.accumulate = 1;
    expect_not_ours(&c, "the engine wgmma is pinned");
    c = fp8_case(128, 128, 128);
    c.weight = TN_FORMAT_FP8_TENSOR;
    expect_not_ours(&c, "the engine wgmma is pinned");
    c = fp8_case(128, 128, 128);
    c.weight = TN_FORMAT_PLAIN, c.a = c.b = TN_BF16;
    expect_not_ours(&c, "the engine wgmma is pinned");
    c = fp8_case(128, 128, 128);
    c.a_format = TN_FORMAT_FP8_BLOCK_2D, c.weight = TN_FORMAT_FP8_BLOCK_1D;
    expect_not_ours(&c, "the engine wgmma is pinned");
    c = fp8_case(128, 128, 128);
    c.d = c.bias = TN_BF16, c.has_bias = 1;
    expect_not_ours(&c, "the engine wgmma is pinned");
}

static void our_own_is_chosen_pinned_kept_and_left(void **state) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    char path[] = "/tmp/tenure_gemm_XXXXXX";
    (void)state;
    gemm_case c = fp8_case(16, 16, 32);
    c.d = TN_BF16;
    tn_gemm_args args = make_args(&device, &c);
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_CUBLASLT);
    assert_int_equal(choice.algorithms, 2);
    args.algorithm = 2;
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_WGMMA);
    args.engine = TN_GEMM_ENGINE_CUBLASLT;
    assert_int_equal(tn_gemm(&args, device.stream), TN_INVALID_ARGUMENT);
    assert_non_null(strstr(tn_error_last(), "algorithm 2 is none of the engine cublaslt"));
    args.algorithm = 0, args.engine = TN_GEMM_ENGINE_AUTO;

    scripted.algorithms[0].us = 1000.0, scripted.own_us = 980.0;
    EXPECT_OK(tn_gemm_tune(&args, device.stream));
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_WGMMA);
    assert_string_equal(choice.description, "Tenure: wgmma, tile 192 x 128");
    assert_int_equal(choice.workspace_bytes, 0);
    const int made = mkstemp(path);
    assert_true(made >= 0);
    close(made);
    EXPECT_OK(tn_gemm_table_save(device.device, path));
    EXPECT_OK(tn_gemm_table_load(device.device, path));
    unlink(path);
    EXPECT_OK(tn_gemm(&args, device.stream));
    assert_string_equal(emulated_last_kernel(), "product_tiles_e4m3_e4m3");
    args.engine = TN_GEMM_ENGINE_CUBLASLT;
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_CUBLASLT);
    const int products = scripted.products;
    EXPECT_OK(tn_gemm(&args, device.stream));
    EXPECT_OK(tn_stream_synchronize(device.device, device.stream));
    assert_int_equal(scripted.products, products + 1);
    end_args(&device, &args);
}

extern tn__driver tn__driver_emulated;
static tn_status (*launch_all)(tn__driver_device *, tn__function, const tn__launch *, tn_stream);

static tn_status launch_others(tn__driver_device *state, tn__function function,
                               const tn__launch *launch, tn_stream stream) {
    if (strncmp(((const emulated_kernel *)function)->name, "product_", 8) == 0)
        return TN_FAIL(TN_DRIVER_ERROR, "this launch is planted to fail");
    return launch_all(state, function, launch, stream);
}

/* A pin tells our own failure; without one cuBLASLt goes on. */
static void a_launch_of_ours_that_fails_is_told_as_ours(void **state) {
    (void)state;
    gemm_case c = fp8_case(16, 48, 32);
    tn_gemm_args args = make_args(&device, &c);
    scripted.algorithms[0].us = 1000.0, scripted.own_us = 500.0;
    EXPECT_OK(tn_gemm_tune(&args, device.stream));
    launch_all = tn__driver_emulated.launch;
    tn__driver_emulated.launch = launch_others;
    const int products = scripted.products;
    assert_int_equal(tn_gemm(NULL, device.stream), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_gemm(&args, device.stream));
    assert_null(strstr(tn_error_last(), "planted")); /* the last error is of a call that failed */
    args.engine = TN_GEMM_ENGINE_WGMMA;
    assert_int_equal(tn_gemm(&args, device.stream), TN_DRIVER_ERROR);
    assert_non_null(strstr(tn_error_last(), "this launch is planted to fail"));
    tn__driver_emulated.launch = launch_all;
    EXPECT_OK(tn_stream_synchronize(device.device, device.stream));
    assert_int_equal(scripted.products, products + 1);
    end_args(&device, &args);
}

/* With cuBLASLt's best in its place the dequantized product would win, and be the slower one. */
static void our_own_is_in_the_contest_of_engines(void **state) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    (void)state;
    gemm_case c = fp8_case(16, 32, 32);
    c.d = TN_BF16;
    tn_gemm_args args = make_args(&device, &c);
    args.may_differ = 1;
    scripted.algorithms[0].us = 1000.0, scripted.own_us = 500.0, scripted.plain_share = 0.7;
    EXPECT_OK(tn_gemm_tune(&args, device.stream));
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_WGMMA);
    scripted.own_us = 900.0, scripted.plain_share = 0.5;
    EXPECT_OK(tn_gemm_tune(&args, device.stream));
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    args.may_differ = 0;
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_WGMMA);
    scripted.plain_share = 1.0;
    end_args(&device, &args);
}

/* ---- epilogues ------------------------------------------------------------------------------ */

enum { OUTPUTS = 3 };

/* d, pre and dbias of the case with an epilogue; none that there is not. */
static void run_epilogue(gpu_side *side, const gemm_case *c, tn_gemm_epilogue epilogue,
                         gpu_copy copies[OUTPUTS]) {
    tn_gemm_args args = make_args(side, c);
    const int64_t rows = c->form == TN_GEMM_WGRAD ? c->n : c->m;
    const int64_t cols = c->form == TN_GEMM_FPROP ? c->n : c->k;
    args.epilogue = epilogue;
    if (epilogue != TN_GEMM_EPILOGUE_NONE)
        args.pre = make_operand(side, c, TN_FORMAT_PLAIN, c->d, 0, rows, cols, 5);
    if (epilogue != TN_GEMM_EPILOGUE_GELU) {
        const int64_t sums = epilogue == TN_GEMM_EPILOGUE_NONE ? c->n : cols;
        args.dbias = make_operand(side, c, TN_FORMAT_PLAIN, TN_FP32, 0, 1, sums, 6);
        args.accumulate_dbias = c->accumulate;
    }
    if (epilogue != TN_GEMM_EPILOGUE_NONE) args.accumulate = 0;
    EXPECT_OK(tn_gemm(&args, side->stream));
    const tn_tensor outputs[OUTPUTS] = {args.d, args.pre, args.dbias};
    for (int i = 0; i < OUTPUTS; i++) {
        copies[i] = (gpu_copy){.data = NULL};
        if (outputs[i].value) copies[i] = gpu_download(side, outputs[i], TN_PLANE_DATA);
    }
    if (args.pre.value) gpu_destroy(side, args.pre);
    if (args.dbias.value) gpu_destroy(side, args.dbias);
    end_args(side, &args);
}

static void epilogues_equal_the_host_to_the_bit(void **state) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (int i = 0; i < SHAPES * 9; i++) {
        gemm_case c = fp8_case(shapes[i % SHAPES][0], shapes[i % SHAPES][1], shapes[i % SHAPES][2]);
        const int way = i / SHAPES;
        const tn_gemm_epilogue epilogue = (tn_gemm_epilogue)(way % TN_GEMM_EPILOGUE_COUNT);
        c.d = types[way / 3];
        c.form = (tn_gemm_form)(epilogue == TN_GEMM_EPILOGUE_NONE ? 1 + i % 2 : i % 3);
        if (c.form == TN_GEMM_WGRAD || i % 2) c.weight = TN_FORMAT_FP8_BLOCK_1D;
        if (epilogue == TN_GEMM_EPILOGUE_NONE || i % 4 == 3)
            c.weight = TN_FORMAT_PLAIN, c.a = c.b = c.d;
        c.has_bias = epilogue == TN_GEMM_EPILOGUE_GELU && i % 5 < 3;
        c.bias = i % 5 ? c.d : TN_FP32;
        c.accumulate = i % 4 == 1;
        gpu_copy actual[OUTPUTS], expected[OUTPUTS];
        run_epilogue(&device, &c, epilogue, actual);
        run_epilogue(&host, &c, epilogue, expected);
        for (int output = 0; output < OUTPUTS; output++) {
            if (expected[output].data)
                gpu_count("epilogue",
                          gpu_copies_equal(&actual[output], &expected[output], "epilogue"));
            gpu_copy_end(&actual[output]), gpu_copy_end(&expected[output]);
        }
    }
    gpu_count_report("GEMM on the emulated device, epilogues");
}

/* Rows of a view begin where they begin. What is refused for that has not been started: D, which
 * was to be added to, is what it was, and so are the rows beside it. */
static void a_view_that_is_not_aligned_is_refused_and_kept(void **state) {
    (void)state;
    gemm_case c = fp8_case(4, 4, 16);
    c.weight = TN_FORMAT_PLAIN;
    c.a = c.b = c.d = TN_BF16;
    tn_gemm_args args = make_args(&device, &c);
    tn_tensor base = make_operand(&device, &c, TN_FORMAT_PLAIN, TN_BF16, 0, 5, 4, 3);
    gpu_copy before = gpu_download(&device, base, TN_PLANE_DATA);
    gpu_destroy(&device, args.d);
    args.accumulate = 1;
    EXPECT_OK(tn_tensor_view_rows(base, 1, 4, device.scope, &args.d));
    assert_int_equal(tn_gemm(&args, device.stream), TN_INVALID_ARGUMENT);
    assert_non_null(strstr(tn_error_last(), "aligned to 16 bytes"));
    gpu_copy after = gpu_download(&device, base, TN_PLANE_DATA);
    assert_true(gpu_copies_equal(&after, &before, "rows of a refused product"));
    gpu_copy_end(&before);
    gpu_copy_end(&after);
    gpu_destroy(&device, args.d);
    gpu_destroy(&device, base);
    gpu_destroy(&device, args.a);
    gpu_destroy(&device, args.b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8_equals_the_host_to_the_bit),
        cmocka_unit_test(one_scale_a_tensor_equals_the_host_to_the_bit),
        cmocka_unit_test(a_bias_equals_the_host_to_the_bit),
        cmocka_unit_test(plain_equals_the_host_to_the_bit),
        cmocka_unit_test(our_own_product_equals_the_host_to_the_bit),
        cmocka_unit_test(what_our_own_does_not_take_it_refuses),
        cmocka_unit_test(our_own_is_chosen_pinned_kept_and_left),
        cmocka_unit_test(our_own_is_in_the_contest_of_engines),
        cmocka_unit_test(a_launch_of_ours_that_fails_is_told_as_ours),
        cmocka_unit_test(epilogues_equal_the_host_to_the_bit),
        cmocka_unit_test(a_view_that_is_not_aligned_is_refused_and_kept),
    };
    char fault[EMULATED_FAULT_BYTES];
    scripted_cublaslt_begin();
    emulated_has_products = 1;
    gpu_open(&device);
    gpu_open_host(&host, (size_t)1 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&device);
    gpu_close(&host);
    emulated_take_fault(fault);
    if (fault[0]) printf("%s\n", fault);
    return failures + (fault[0] != 0) + (scripted.descriptors != 0);
}
