/* GEMMs of a GPU: sampled shapes, every algorithm that there is, choices in a file, views, one
 * scale a tensor, mixes that are dequantized, shapes from reports of users, and a probe of the
 * order in which cuBLASLt applies scales.
 *
 * GEMM_LISTS_SEED=N replays the sampled shapes; GEMM_LISTS_TRIPLES=N takes so many.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gemm_cases_support.h"
#include "tenure_cast.h"
#include "tenure_lifetime.h"

static uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

/* ---- sampled shapes ------------------------------------------------------------------------- */

enum { TRIPLES = 2000, EXTENT_MAX = 260 };

static int64_t extent_of(uint64_t *state) { return 1 + (int64_t)(gpu_random(state) % EXTENT_MAX); }

static gemm_case sampled_case(uint64_t *state) {
    static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_1D,
                                        TN_FORMAT_FP8_TENSOR, TN_FORMAT_PLAIN};
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    gemm_case c = gemm_fp8_case(extent_of(state), extent_of(state), extent_of(state));
    uint64_t draw = gpu_random(state);
    c.form = (tn_gemm_form)(draw % 3);
    c.weight = formats[draw / 3 % 4];
    c.d = types[draw / 12 % 3];
    c.mode = draw / 36 % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
    c.accumulate = (int)(draw / 72 % 2);
    c.a = draw / 144 % 3 == 1 ? TN_E5M2 : TN_E4M3;
    c.b = draw / 144 % 3 == 2 ? TN_E5M2 : TN_E4M3;
    if (c.weight == TN_FORMAT_PLAIN) c.a = c.b = types[draw / 432 % 3];
    if (c.weight == TN_FORMAT_FP8_BLOCK_1D && draw / 1296 % 2) c.a_format = TN_FORMAT_FP8_BLOCK_2D;
    c.has_bias = draw / 2592 % 4 == 0;
    c.bias = types[draw / 10368 % 3];
    c.is_quiet = 1;
    return c;
}

static void sampled_shapes_up_to_260(void **state) {
    uint64_t seed = setting("GEMM_LISTS_SEED", 20261130), random = seed;
    uint64_t count = setting("GEMM_LISTS_TRIPLES", TRIPLES);
    (void)state;
    printf("seed %llu (GEMM_LISTS_SEED replays it)\n", (unsigned long long)seed);
    for (uint64_t i = 0; i < count; i++) {
        gemm_case c = sampled_case(&random);
        gemm_check(&c);
    }
    gpu_count_report("GEMM, sampled shapes");
}

/* ---- algorithms ----------------------------------------------------------------------------- */

/* The tuned choice, and everything else that it was chosen from. */
static void check_algorithms(gemm_case c) {
    gemm_operand a, b;
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    gemm_operands_make(&c, &a, &b);
    tn_tensor d = gemm_output_make(&c, &a, &b);
    tn_gemm_args args = gemm_args_of(&c, &a, &b, d);
    EXPECT_OK(tn_gemm_tune(&args, gemm_gpu.stream));
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    printf("m %lld n %lld k %lld: %d of %d, %.2f us against %.2f us of the first: %s\n",
           (long long)c.m, (long long)c.n, (long long)c.k, choice.algorithm, choice.algorithms,
           choice.us, choice.first_us, choice.description);
    assert_int_equal(choice.is_measured, 1);
    assert_true(choice.us > 0.0);
    gemm_check_operands(&c, &a, &b);
    for (int i = 1; i <= choice.algorithms; i++) {
        args.algorithm = c.algorithm = i;
        EXPECT_OK(tn_gemm_choice_get(&args, &choice));
        if (choice.us > 0.0) gemm_check_operands(&c, &a, &b); /* one that refused to run has none */
    }
    gpu_destroy(&gemm_gpu, d);
    gemm_operand_end(&a);
    gemm_operand_end(&b);
}

static void every_algorithm_gives_the_product(void **state) {
    static const int64_t shapes[][3] = {
        {2048, 2048, 4096}, {4096, 2112, 1024}, {256, 512, 4096}, {100, 130, 128}, {16, 7168, 512}};
    (void)state;
    for (int i = 0; i < 5 * 4; i++) {
        gemm_case c = gemm_fp8_case(shapes[i % 5][0], shapes[i % 5][1], shapes[i % 5][2]);
        int way = i / 5;
        c.is_quiet = 1;
        c.d = way == 1 ? TN_FP32 : TN_BF16;
        c.accumulate = way == 1;
        if (way == 1) c.form = TN_GEMM_WGRAD, c.weight = TN_FORMAT_FP8_BLOCK_1D;
        if (way == 2) c.weight = TN_FORMAT_PLAIN, c.a = c.b = TN_BF16;
        if (way == 3) c.weight = TN_FORMAT_FP8_TENSOR;
        check_algorithms(c);
    }
    gpu_count_report("GEMM, every algorithm");
}

/* ---- files ---------------------------------------------------------------------------------- */

static void choices_survive_a_file(void **state) {
    gemm_case c = gemm_fp8_case(512, 768, 1024);
    gemm_operand a, b;
    tn_gemm_choice tuned = TN_GEMM_CHOICE_INIT, loaded = TN_GEMM_CHOICE_INIT;
    gpu_copy copies[2];
    char path[64];
    (void)state;
    snprintf(path, sizeof path, "/tmp/tenure_gemms_%ld.txt", (long)getpid());
    c.form = TN_GEMM_WGRAD, c.weight = TN_FORMAT_FP8_BLOCK_1D;
    for (int i = 0; i < 2; i++) {
        gemm_operands_make(&c, &a, &b);
        tn_tensor d = gemm_output_make(&c, &a, &b);
        tn_gemm_args args = gemm_args_of(&c, &a, &b, d);
        if (i == 0) EXPECT_OK(tn_gemm_tune(&args, gemm_gpu.stream));
        if (i == 1) EXPECT_OK(tn_gemm_table_load(gemm_gpu.device, path));
        EXPECT_OK(tn_gemm_choice_get(&args, i ? &loaded : &tuned));
        EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
        copies[i] = gpu_download(&gemm_gpu, d, TN_PLANE_DATA);
        if (i == 0) EXPECT_OK(tn_gemm_table_save(gemm_gpu.device, path));
        gpu_destroy(&gemm_gpu, d);
        gemm_operand_end(&a), gemm_operand_end(&b);
        if (i == 0) gpu_close(&gemm_gpu), gpu_open(&gemm_gpu); /* which forgets all choices */
    }
    remove(path);
    printf("%s\n%s\n", tuned.description, loaded.description);
    assert_int_equal(loaded.is_measured, 1);
    assert_string_equal(loaded.description, tuned.description);
    assert_true(fabs(loaded.us - tuned.us) < 0.001);
    assert_true(gpu_copies_equal(&copies[1], &copies[0], "a loaded choice"));
    gpu_copy_end(&copies[0]), gpu_copy_end(&copies[1]);
}

/* ---- views ---------------------------------------------------------------------------------- */

enum { VIEW_ROWS = 64, BASE_ROWS = VIEW_ROWS + 8, VIEW_COLS = 36, CONTRACTED = 40 };

static tn_tensor normal(uint64_t seed, int64_t rows, int64_t cols) {
    uint16_t data[BASE_ROWS * CONTRACTED];
    gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, seed, data, (size_t)(rows * cols));
    tn_tensor tensor = gpu_plain(&gemm_gpu, TN_BF16, rows, cols);
    gpu_upload(&gemm_gpu, tensor, data);
    return tensor;
}

/* Rows `from` on of x times w into rows `to` on of y, whose others stay: rows of x have 80 bytes,
 * those of y 72, so that what begins at an odd row of y is not aligned. */
static void check_view(int64_t from, int64_t to, int is_taken) {
    tn_tensor x = normal(1, BASE_ROWS, CONTRACTED), w = normal(2, VIEW_COLS, CONTRACTED);
    tn_tensor y = normal(3, BASE_ROWS, VIEW_COLS),
              copy = gpu_plain(&gemm_gpu, TN_BF16, VIEW_ROWS, VIEW_COLS);
    gpu_copy of_x = gpu_download(&gemm_gpu, x, TN_PLANE_DATA);
    tn_tensor same = gpu_plain(&gemm_gpu, TN_BF16, VIEW_ROWS, CONTRACTED);
    gpu_upload(&gemm_gpu, same, of_x.data + from * CONTRACTED * 2);
    gpu_copy before = gpu_download(&gemm_gpu, y, TN_PLANE_DATA);
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = same, args.b = w, args.d = copy, args.scope = gemm_gpu.scope;
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    gpu_copy expected = gpu_download(&gemm_gpu, copy, TN_PLANE_DATA);
    EXPECT_OK(tn_tensor_view_rows(x, from, VIEW_ROWS, gemm_gpu.scope, &args.a));
    EXPECT_OK(tn_tensor_view_rows(y, to, VIEW_ROWS, gemm_gpu.scope, &args.d));
    tn_status status = tn_gemm(&args, gemm_gpu.stream);
    assert_int_equal(status, is_taken ? TN_OK : TN_INVALID_ARGUMENT);
    if (!is_taken) EXPECT_ERROR_HAS("aligned to 16 bytes");
    gpu_copy after = gpu_download(&gemm_gpu, y, TN_PLANE_DATA);
    if (is_taken)
        memcpy(before.data + to * VIEW_COLS * 2, expected.data, expected.layout.data_bytes);
    gpu_count(is_taken ? "taken" : "refused", gpu_copies_equal(&after, &before, "rows of a view"));
    gpu_copy_end(&of_x), gpu_copy_end(&before), gpu_copy_end(&expected), gpu_copy_end(&after);
    const tn_tensor all[] = {args.a, args.d, x, w, y, copy, same};
    for (int i = 0; i < 7; i++)
        gpu_destroy(&gemm_gpu, all[i]);
}

static void views_of_rows_are_multiplied_or_refused(void **state) {
    (void)state;
    check_view(0, 0, 1);
    check_view(3, 2, 1);
    check_view(8, 8, 1);
    check_view(1, 1, 0);
    check_view(1, 3, 0);
    gpu_count_report("GEMM, views");
}

/* ---- lists ---------------------------------------------------------------------------------- */

static void one_scale_a_tensor(void **state) {
    static const int64_t shapes[][3] = {{128, 128, 128}, {320, 336, 256}, {100, 130, 129},
                                        {7, 5, 3},       {1, 1, 1},       {512, 1024, 768}};
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (int i = 0; i < 6 * 9; i++) {
        gemm_case c = gemm_fp8_case(shapes[i % 6][0], shapes[i % 6][1], shapes[i % 6][2]);
        c.form = (tn_gemm_form)(i / 6 % 3);
        c.weight = TN_FORMAT_FP8_TENSOR;
        c.d = types[i / 18];
        c.b = i % 2 ? TN_E5M2 : TN_E4M3;
        c.accumulate = i % 4 == 3;
        gemm_check(&c);
    }
    gpu_count_report("GEMM, one scale a tensor");
}

static void shapes_that_users_reported(void **state) {
    static const int64_t shapes[][3] = {{1536, 256, 2048}, {64, 128, 147456}, {256, 1, 640},
                                        {1, 4096, 1152},   {64, 448, 1152},   {2048, 2048, 128}};
    (void)state;
    for (int i = 0; i < 6 * 2; i++) {
        gemm_case c = gemm_fp8_case(shapes[i % 6][0], shapes[i % 6][1], shapes[i % 6][2]);
        if (i >= 6) { /* the last is what is contracted here, too */
            c.form = TN_GEMM_WGRAD;
            c.weight = TN_FORMAT_FP8_BLOCK_1D;
            c.m = shapes[i % 6][2], c.n = shapes[i % 6][0], c.k = shapes[i % 6][1];
        }
        gemm_check(&c);
    }
    gpu_count_report("GEMM, shapes of reports");
}

/* E5M2 by E5M2 has no GEMM on any GPU; with power-of-two scales bf16 holds every value. */
static void mixes_without_a_gemm_are_dequantized_on_request(void **state) {
    static const tn_gemm_engine engines[] = {TN_GEMM_ENGINE_DEQUANTIZE_BF16,
                                             TN_GEMM_ENGINE_DEQUANTIZE_FP32};
    (void)state;
    for (int i = 0; i < 6; i++) {
        gemm_case c = gemm_fp8_case(200, 136, 328);
        c.form = (tn_gemm_form)(i % 3);
        c.weight = c.form == TN_GEMM_WGRAD ? TN_FORMAT_FP8_BLOCK_1D : TN_FORMAT_FP8_BLOCK_2D;
        c.a = c.b = TN_E5M2;
        c.engine = engines[i / 3];
        gemm_check(&c);
    }
    gpu_count_report("GEMM, dequantized first");
}

/* ---- epilogues ------------------------------------------------------------------------------ */

static void expect_same(tn_tensor actual, tn_tensor expected, const char *what) {
    gpu_copy x = gpu_download(&gemm_gpu, actual, TN_PLANE_DATA);
    gpu_copy y = gpu_download(&gemm_gpu, expected, TN_PLANE_DATA);
    gpu_count(what, gpu_copies_equal(&x, &y, what));
    gpu_copy_end(&x), gpu_copy_end(&y);
}

/* The product with an epilogue, and the calls that it stands for. */
static void check_epilogues(const gemm_case *c) {
    gemm_operand a, b;
    gemm_operands_make(c, &a, &b);
    tn_tensor product = gemm_output_make(c, &a, &b), d = gemm_output_make(c, &a, &b);
    tn_tensor pre = gemm_output_make(c, &a, &b), expected = gemm_output_make(c, &a, &b);
    tn_tensor sums[2] = {gpu_plain(&gemm_gpu, TN_FP32, 1, b.rows),
                         gpu_plain(&gemm_gpu, TN_FP32, 1, b.rows)};
    tn_activation_args forward = TN_ACTIVATION_ARGS_INIT;
    tn_activation_backward_args backward = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    tn_gemm_args args = gemm_args_of(c, &a, &b, product);
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    args.d = d, args.pre = pre, args.epilogue = TN_GEMM_EPILOGUE_GELU;
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    forward.activation = backward.activation = TN_ACTIVATION_GELU;
    forward.x = product, forward.y = expected;
    EXPECT_OK(tn_activation_forward(&forward, gemm_gpu.stream));
    expect_same(pre, product, "pre");
    expect_same(d, expected, "gelu");
    args.dbias = sums[0], args.epilogue = TN_GEMM_EPILOGUE_GELU_GRADIENT;
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    backward.dy = product, backward.x = pre, backward.dx = expected, backward.dbias = sums[1];
    backward.scope = gemm_gpu.scope;
    EXPECT_OK(tn_activation_backward(&backward, gemm_gpu.stream));
    expect_same(d, expected, "gelu's gradient");
    expect_same(sums[0], sums[1], "its sums");
    const tn_tensor all[] = {product, d, pre, expected, sums[0], sums[1]};
    for (int i = 0; i < 6; i++)
        gpu_destroy(&gemm_gpu, all[i]);
    gemm_operand_end(&a), gemm_operand_end(&b);
}

static void epilogues_are_the_calls_that_they_stand_for(void **state) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (int i = 0; i < 3 * 3 * 2 * 2; i++) {
        gemm_case c = gemm_fp8_case(i % 2 ? 384 : 131, i % 2 ? 512 : 77, i % 2 ? 640 : 205);
        c.form = (tn_gemm_form)(i / 2 % 3);
        c.d = types[i / 6 % 3];
        if (i / 18) c.weight = TN_FORMAT_PLAIN, c.a = c.b = c.d;
        check_epilogues(&c);
    }
    gpu_count_report("GEMM, epilogues");
}

/* ---- the order of scales -------------------------------------------------------------------- */

enum { ORDERS = 6 };
static const char *const order_names[ORDERS] = {"fma(p * sa, sb, y)", "fma(p * sb, sa, y)",
                                                "fma(sa * sb, p, y)", "y + (p * sa) * sb",
                                                "y + (p * sb) * sa",  "y + (sa * sb) * p"};

static float add_block(int order, float y, float p, float sa, float sb) {
    volatile float product;
    switch (order) {
    case 0: return fmaf(p * sa, sb, y);
    case 1: return fmaf(p * sb, sa, y);
    case 2: return fmaf(sa * sb, p, y);
    case 3: product = p * sa, product = product * sb; break;
    case 4: product = p * sb, product = product * sa; break;
    default: product = sa * sb, product = product * p;
    }
    return y + product;
}

static uint32_t bits_of(const void *value) {
    uint32_t bits;
    memcpy(&bits, value, sizeof bits);
    return bits;
}

/* How many elements each order gives to the bit. */
static void count_orders(const gemm_operand *a, const gemm_operand *b, const gpu_copy *d,
                         int64_t counts[ORDERS]) {
    int64_t blocks = (a->contracted + 127) / 128, cols = b->rows;
    size_t elements = (size_t)(a->rows * cols);
    float *y = calloc(elements * ORDERS, sizeof *y);
    for (int64_t block = 0; block < blocks; block++) {
        float *p = gemm_partial_sums(a, b, block);
        for (int order = 0; order < ORDERS; order++) {
            float *sums = y + (size_t)order * elements;
            for (size_t i = 0; i < elements; i++)
                sums[i] =
                    add_block(order, sums[i], p[i], gemm_scale_of(a, (int64_t)i / cols, block),
                              gemm_scale_of(b, (int64_t)i % cols, block));
        }
        free(p);
    }
    for (int order = 0; order < ORDERS; order++) {
        counts[order] = 0;
        for (size_t i = 0; i < elements; i++)
            counts[order] +=
                bits_of(&y[(size_t)order * elements + i]) == bits_of(d->data + i * sizeof(float));
    }
    free(y);
}

/* expected: the order that gives all of them, as it did with cuBLASLt 13.1 on an H200; less than
 * 0: all do. */
static void probe(gemm_case c, int expected) {
    gemm_operand a, b;
    int64_t counts[ORDERS];
    gemm_operands_make(&c, &a, &b);
    tn_tensor d = gemm_output_make(&c, &a, &b);
    tn_gemm_args args = gemm_args_of(&c, &a, &b, d);
    EXPECT_OK(tn_gemm(&args, gemm_gpu.stream));
    gpu_copy copy = gpu_download(&gemm_gpu, d, TN_PLANE_DATA);
    count_orders(&a, &b, &copy, counts);
    printf("m %lld n %lld k %lld %s %s scales:", (long long)c.m, (long long)c.n, (long long)c.k,
           c.weight == TN_FORMAT_FP8_BLOCK_2D ? "1D x 2D" : "1D x 1D",
           c.mode == TN_SCALE_FP32 ? "fp32" : "pow2");
    for (int order = 0; order < ORDERS; order++)
        printf("  %s %.2f %%", order_names[order],
               100.0 * (double)counts[order] / (double)(a.rows * b.rows));
    printf("\n");
    for (int order = 0; order < ORDERS; order++)
        if (expected < 0 || order == expected)
            gpu_count(order_names[order], counts[order] == a.rows * b.rows);
    gpu_copy_end(&copy);
    gpu_destroy(&gemm_gpu, d);
    gemm_operand_end(&a), gemm_operand_end(&b);
}

/* Which of the orders gives cuBLASLt's bits: not the same one with 1x128 by 128x128 scales as with
 * 1x128 by 1x128 ones. With powers of two all are the same, and the product is that of the tensor
 * cores' sums of blocks, to the bit. The shapes are TransformerEngine's. */
static void order_in_which_scales_are_applied(void **state) {
    static const int64_t shapes[][3] = {{128, 128, 128}, {256, 256, 128},    {320, 336, 128},
                                        {320, 336, 64},  {256, 256, 256},    {320, 336, 256},
                                        {16, 128, 128},  {1024, 1024, 4096}, {4096, 4096, 128}};
    enum { SHAPES = sizeof shapes / sizeof *shapes };
    (void)state;
    for (int i = 0; i < SHAPES * 4; i++) {
        const int64_t *shape = shapes[i % SHAPES];
        gemm_case c = gemm_fp8_case(shape[0], shape[1], shape[2]);
        int is_vectors = i / SHAPES % 2, is_pow2 = i / SHAPES / 2;
        c.weight = is_vectors ? TN_FORMAT_FP8_BLOCK_1D : TN_FORMAT_FP8_BLOCK_2D;
        c.mode = is_pow2 ? TN_SCALE_POW2 : TN_SCALE_FP32;
        probe(c, is_pow2 ? -1 : is_vectors ? 0 : 2);
    }
    gpu_count_report("GEMM, order of scales");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(order_in_which_scales_are_applied),
        cmocka_unit_test(one_scale_a_tensor),
        cmocka_unit_test(mixes_without_a_gemm_are_dequantized_on_request),
        cmocka_unit_test(shapes_that_users_reported),
        cmocka_unit_test(epilogues_are_the_calls_that_they_stand_for),
        cmocka_unit_test(every_algorithm_gives_the_product),
        cmocka_unit_test(choices_survive_a_file),
        cmocka_unit_test(views_of_rows_are_multiplied_or_refused),
        cmocka_unit_test(sampled_shapes_up_to_260),
    };
    gpu_open(&gemm_gpu);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gemm_gpu);
    return failures;
}
