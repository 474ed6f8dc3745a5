/* Which algorithm a GEMM runs with: timed by a script's clock, pinned, kept, written, read. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulated_driver.h"
#include "gpu_support.h"
#include "host_alloc.h"
#include "scripted_cublaslt.h"
#include "tenure_gemm.h"
#include "test_pools.h"

/* As in cuda_gemm.h, of which a test of what users see knows nothing else. */
enum { PLANS_MAX = 1024 };

static gpu_side gpu;

static void script(int count, const scripted_algorithm *algorithms) {
    memset(scripted.algorithms, 0, sizeof scripted.algorithms);
    memcpy(scripted.algorithms, algorithms, (size_t)count * sizeof *algorithms);
    scripted.count = count;
    scripted.version = 130100;
}

static int open_gpu(void **state) {
    (void)state;
    emulated_has_products = 0;
    gpu_open(&gpu);
    return 0;
}

static int close_gpu(void **state) {
    (void)state;
    gpu_close(&gpu);
    assert_int_equal(scripted.descriptors, 0);
    return 0;
}

static tn_tensor filled(int64_t rows, int64_t cols, uint64_t seed) {
    size_t count = (size_t)(rows * cols);
    void *data = malloc(count * 2 + 1);
    gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, seed, data, count);
    tn_tensor tensor = gpu_plain(&gpu, TN_BF16, rows, cols);
    gpu_upload(&gpu, tensor, data);
    free(data);
    return tensor;
}

static tn_gemm_args product_of(int64_t m, int64_t n, int64_t k) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = filled(m, k, 1);
    args.b = filled(n, k, 2);
    args.d = filled(m, n, 3);
    args.scope = gpu.scope;
    return args;
}

static void end_product(const tn_gemm_args *args) {
    gpu_destroy(&gpu, args->a);
    gpu_destroy(&gpu, args->b);
    gpu_destroy(&gpu, args->d);
}

static tn_gemm_choice choice_of(const tn_gemm_args *args) {
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    EXPECT_OK(tn_gemm_choice_get(args, &choice));
    return choice;
}

static void expect_runs_with(const tn_gemm_args *args, int place) {
    EXPECT_OK(tn_gemm(args, gpu.stream));
    assert_int_equal(scripted.last, place);
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
}

static void expect_time(double us, double expected) { assert_true(us > expected * 0.999999); }

/* ---- tuning --------------------------------------------------------------------------------- */

static const scripted_algorithm five[] = {{.us = 1000.0},
                                          {.us = 500.0, .refuses = 1},
                                          {.us = 1250.0},
                                          {.us = 750.0, .workspace_bytes = 4096},
                                          {.us = 800.0}};

static void the_fastest_that_runs_is_kept_and_d_is_not_touched(void **state) {
    (void)state;
    script(5, five);
    tn_gemm_args args = product_of(40, 24, 64);
    args.accumulate = 1;
    gpu_copy before = gpu_download(&gpu, args.d, TN_PLANE_DATA);
    tn_gemm_choice choice = choice_of(&args);
    assert_int_equal(choice.algorithm, 1);
    assert_int_equal(choice.algorithms, 5);
    assert_int_equal(choice.is_measured, 0);
    assert_true(choice.us == 0.0);
    assert_int_equal(choice.workspace_bytes, 0);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    gpu_copy after = gpu_download(&gpu, args.d, TN_PLANE_DATA);
    assert_true(gpu_copies_equal(&after, &before, "d"));
    choice = choice_of(&args);
    assert_int_equal(choice.algorithm, 4);
    assert_int_equal(choice.is_measured, 1);
    expect_time(choice.us, 750.0);
    assert_true(choice.us < 760.0);
    expect_time(choice.first_us, 1000.0);
    assert_int_equal(choice.workspace_bytes, 4096);
    assert_int_equal(choice.scratch_bytes, 4096);
    assert_non_null(strstr(choice.description, "algorithm 4"));
    expect_runs_with(&args, 4);
    args.accumulate = 0; /* another shape: nobody has timed it */
    assert_int_equal(choice_of(&args).is_measured, 0);
    gpu_copy_end(&before), gpu_copy_end(&after);
    end_product(&args);
}

static void the_first_stays_where_another_is_hardly_faster(void **state) {
    static const scripted_algorithm close[] = {{.us = 1000.0}, {.us = 992.0}};
    static const scripted_algorithm clear[] = {{.us = 1000.0}, {.us = 985.0}};
    (void)state;
    tn_gemm_args args = product_of(40, 24, 80);
    script(2, close);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    assert_int_equal(choice_of(&args).algorithm, 1);
    script(2, clear);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream)); /* and a shape may be tuned again */
    assert_int_equal(choice_of(&args).algorithm, 2);
    end_product(&args);
}

/* A clock that goes down by a quarter and up again while algorithms are timed, and 1 % of noise on
 * each product: whoever is timed at a good moment looks better than one that is 2 % faster. */
static void a_clock_that_changes_is_nobodys_advantage(void **state) {
    static const scripted_algorithm close[] = {
        {.us = 1000.0}, {.us = 1010.0}, {.us = 980.0}, {.us = 1005.0}, {.us = 1000.0}};
    (void)state;
    tn_gemm_args args = product_of(8, 8, 16);
    script(5, close);
    for (unsigned long long seed = 1; seed <= 40; seed++) {
        scripted.weather = (scripted_weather){.drift = 0.25,
                                              .period_us = 200000.0 + 7777.0 * (double)seed,
                                              .noise = 0.01,
                                              .seed = seed};
        tn_status status = tn_gemm_tune(&args, gpu.stream);
        scripted.weather = (scripted_weather){.seed = 0};
        EXPECT_OK(status);
        if (choice_of(&args).algorithm != 3)
            fail_msg("seed %llu: algorithm %d was chosen", seed, choice_of(&args).algorithm);
    }
    end_product(&args);
}

/* Blocks in another order are 10 % faster here, and the heuristic does not offer that. What it
 * offers keeps its places. */
static void what_is_not_offered_is_tried_by_tuning(void **state) {
    static const scripted_algorithm hidden[] = {{.us = 1000.0, .swizzled_us = 900.0},
                                                {.us = 950.0, .workspace_bytes = 65536}};
    (void)state;
    tn_gemm_args args = product_of(40, 24, 104);
    script(2, hidden);
    assert_int_equal(choice_of(&args).algorithms, 2);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    tn_gemm_choice choice = choice_of(&args);
    assert_int_equal(choice.algorithms, 3);
    assert_int_equal(choice.algorithm, 3);
    expect_time(choice.us, 900.0);
    expect_runs_with(&args, -1);
    args.algorithm = 2;
    expect_runs_with(&args, 2);
    args.algorithm = 0;
    scripted.algorithms[1].us = 700.0; /* tuned again: the same list */
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    assert_int_equal(choice_of(&args).algorithms, 3);
    assert_int_equal(choice_of(&args).algorithm, 2);
    end_product(&args);
}

/* What is measured then is the host, and another algorithm would change nothing. */
static void the_first_stays_where_the_host_is_what_is_waited_for(void **state) {
    (void)state;
    script(5, five);
    tn_gemm_args args = product_of(40, 24, 88);
    scripted.outruns_host = 1;
    tn_status status = tn_gemm_tune(&args, gpu.stream);
    scripted.outruns_host = 0;
    EXPECT_OK(status);
    assert_int_equal(choice_of(&args).algorithm, 1);
    assert_int_equal(choice_of(&args).is_measured, 1);
    end_product(&args);
}

static void none_that_runs_is_a_status_and_no_choice(void **state) {
    static const scripted_algorithm none[] = {{.us = 1000.0, .refuses = 1},
                                              {.us = 900.0, .refuses = 1}};
    (void)state;
    script(2, none);
    tn_gemm_args args = product_of(40, 24, 96);
    EXPECT_STATUS(tn_gemm_tune(&args, gpu.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("none of the 2 algorithms");
    assert_int_equal(choice_of(&args).is_measured, 0);
    end_product(&args);
}

static void nothing_to_multiply_is_tuned_without_a_product(void **state) {
    (void)state;
    script(5, five);
    tn_gemm_args args = product_of(0, 24, 64);
    tn_gemm_args nothing = product_of(8, 8, 0);
    int before = scripted.products;
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    EXPECT_OK(tn_gemm_tune(&nothing, gpu.stream));
    assert_int_equal(choice_of(&args).algorithms, 0);
    assert_int_equal(scripted.products, before);
    end_product(&args), end_product(&nothing);
}

/* ---- pins ----------------------------------------------------------------------------------- */

static void a_pin_is_what_runs_or_is_refused(void **state) {
    (void)state;
    script(5, five);
    tn_gemm_args args = product_of(40, 24, 112);
    for (args.algorithm = 1; args.algorithm <= 5; args.algorithm++) {
        if (args.algorithm == 2) {
            EXPECT_STATUS(tn_gemm(&args, gpu.stream), TN_UNSUPPORTED);
            gpu_upload(&gpu, args.d, (const uint16_t[40 * 24]){0});
        } else {
            expect_runs_with(&args, args.algorithm);
        }
    }
    EXPECT_STATUS(tn_gemm(&args, gpu.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("algorithm is 6, expected at most 5");
    args.algorithm = -1;
    EXPECT_STATUS(tn_gemm(&args, gpu.stream), TN_INVALID_ARGUMENT);
    gpu_copy kept = gpu_download(&gpu, args.d, TN_PLANE_DATA); /* a pin that is none: d is valid */
    gpu_copy_end(&kept);
    end_product(&args);
}

static void an_offer_that_is_refused_is_passed_over(void **state) {
    static const scripted_algorithm refused[] = {{.us = 100.0, .refuses = 1}, {.us = 200.0}};
    (void)state;
    script(2, refused);
    tn_gemm_args args = product_of(40, 24, 128);
    expect_runs_with(&args, 2);
    end_product(&args);
}

/* ---- what is kept --------------------------------------------------------------------------- */

static void descriptors_are_made_once_a_shape(void **state) {
    (void)state;
    script(5, five);
    tn_gemm_args args = product_of(48, 32, 64);
    int made = scripted.made, asked = scripted.heuristics;
    for (int i = 0; i < 100; i++)
        EXPECT_OK(tn_gemm(&args, gpu.stream));
    assert_int_equal(scripted.made - made, 1);
    assert_int_equal(scripted.heuristics - asked, 1);
    end_product(&args);
}

enum { WARM_CALLS = 20 };

/* Once a shape has been multiplied, a call asks the driver for no memory, stream or event and keeps
 * no host memory, nor does it ask cuBLASLt for anything but the product. */
static void expect_warm(const tn_gemm_args *args) {
    static const tn_driver_call never[] = {
        TN_CALL_MEM_CREATE, TN_CALL_ADDRESS_RESERVE,  TN_CALL_MEM_MAP,  TN_CALL_MEM_SET_ACCESS,
        TN_CALL_MEM_UNMAP,  TN_CALL_MEM_ALLOC,        TN_CALL_MEM_FREE, TN_CALL_STREAM,
        TN_CALL_EVENT,      TN_CALL_EVENT_SYNCHRONIZE};
    uint64_t before[sizeof never / sizeof *never];
    for (int i = 0; i < 3; i++)
        EXPECT_OK(tn_gemm(args, gpu.stream));
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    for (size_t i = 0; i < sizeof never / sizeof *never; i++)
        before[i] = test_calls(gpu.device, never[i]);
    const long blocks = tn__host_live_blocks();
    const int made = scripted.made, asked = scripted.heuristics, products = scripted.products;
    for (int i = 0; i < WARM_CALLS; i++)
        EXPECT_OK(tn_gemm(args, gpu.stream));
    for (size_t i = 0; i < sizeof never / sizeof *never; i++)
        assert_int_equal(test_calls(gpu.device, never[i]) - before[i], 0);
    assert_int_equal(scripted.products - products, WARM_CALLS);
    assert_int_equal(scripted.made, made);
    assert_int_equal(scripted.heuristics, asked);
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    assert_int_equal(tn__host_live_blocks(), blocks);
}

static tn_tensor quantized(int64_t rows, int64_t cols, uint64_t seed) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = filled(rows, cols, seed);
    args.dst = gpu_fp8(&gpu, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_SCALE_POW2, rows, cols);
    EXPECT_OK(tn_quantize(&args, gpu.stream));
    gpu_destroy(&gpu, args.src);
    return args.dst;
}

static void a_warm_call_makes_nothing(void **state) {
    (void)state;
    script(1, &five[3]); /* with a workspace */
    tn_gemm_args args = product_of(48, 32, 64);
    expect_warm(&args);
    args.bias = filled(1, 32, 4);
    expect_warm(&args);
    args.epilogue = TN_GEMM_EPILOGUE_GELU;
    expect_warm(&args);
    gpu_destroy(&gpu, args.bias);
    end_product(&args);
    args = (tn_gemm_args)TN_GEMM_ARGS_INIT; /* padded, all of it */
    args.a = quantized(37, 50, 1), args.b = quantized(21, 50, 2), args.d = filled(37, 21, 3);
    args.scope = gpu.scope;
    expect_warm(&args);
    args.engine = TN_GEMM_ENGINE_DEQUANTIZE_BF16;
    expect_warm(&args);
    end_product(&args);
}

static void no_more_plans_are_kept_than_the_bound(void **state) {
    (void)state;
    script(5, five);
    tn_tensor all = filled(8, 8, 1);
    tn_gemm_args tuned = product_of(8, 16, 24);
    EXPECT_OK(tn_gemm_tune(&tuned, gpu.stream));
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.scope = gpu.scope;
    args.a = filled(1, 1, 1);
    for (int64_t n = 1; n <= PLANS_MAX + 50; n++) {
        args.b = filled(n, 1, 2);
        args.d = gpu_plain(&gpu, TN_BF16, 1, n);
        EXPECT_OK(tn_gemm(&args, gpu.stream));
        gpu_destroy(&gpu, args.b), gpu_destroy(&gpu, args.d);
        assert_true(scripted.descriptors <= PLANS_MAX);
    }
    assert_int_equal(scripted.descriptors, PLANS_MAX);
    int asked = scripted.heuristics;
    expect_runs_with(&tuned, 4); /* it was there first and used least, and was measured */
    assert_int_equal(scripted.heuristics, asked);
    gpu_destroy(&gpu, args.a), gpu_destroy(&gpu, all);
    end_product(&tuned);
}

/* ---- files ---------------------------------------------------------------------------------- */

static char path[] = "/tmp/tenure_gemms_XXXXXX";

static size_t read_table(char *text, size_t room) {
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t bytes = fread(text, 1, room, file);
    assert_int_equal(fclose(file), 0);
    return bytes;
}

static void write_table(const char *text, size_t bytes) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static void reopen(void) {
    gpu_close(&gpu);
    gpu_open(&gpu);
}

static void choices_come_back_from_a_file(void **state) {
    (void)state;
    script(5, five);
    tn_gemm_args one = product_of(40, 24, 64), two = product_of(24, 40, 64);
    EXPECT_OK(tn_gemm_tune(&one, gpu.stream));
    EXPECT_OK(tn_gemm_tune(&two, gpu.stream));
    tn_gemm_choice tuned = choice_of(&one);
    EXPECT_OK(tn_gemm_table_save(gpu.device, path));
    end_product(&one), end_product(&two);
    reopen();
    one = product_of(40, 24, 64);
    assert_int_equal(choice_of(&one).is_measured, 0);
    EXPECT_OK(tn_gemm_table_load(gpu.device, path));
    tn_gemm_choice loaded = choice_of(&one);
    assert_int_equal(loaded.algorithm, tuned.algorithm);
    assert_int_equal(loaded.algorithms, tuned.algorithms);
    assert_int_equal(loaded.is_measured, 1);
    assert_true(loaded.us > tuned.us - 0.001 && loaded.us < tuned.us + 0.001);
    expect_runs_with(&one, 4);
    /* An algorithm that is no longer offered runs all the same, if it may. */
    scripted.algorithms[3].workspace_bytes = (size_t)1 << 19;
    reopen();
    EXPECT_OK(tn_gemm_table_load(gpu.device, path));
    EXPECT_OK(tn_gemm_table_load(gpu.device, path)); /* in the place of the same */
    EXPECT_OK(tn_gemm_table_save(gpu.device, path));
    one = product_of(40, 24, 64);
    expect_runs_with(&one, 4);
    end_product(&one);
}

/* A time that is next to nothing is one that a file can hold. */
static void the_shortest_time_comes_back_too(void **state) {
    static const scripted_algorithm shortest[] = {{.us = 1e-5}};
    (void)state;
    script(1, shortest);
    tn_gemm_args args = product_of(40, 24, 64);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    EXPECT_OK(tn_gemm_table_save(gpu.device, path));
    EXPECT_OK(tn_gemm_table_load(gpu.device, path));
    assert_int_equal(choice_of(&args).is_measured, 1);
    end_product(&args);
}

static void a_file_of_another_device_or_library_is_refused(void **state) {
    char text[4096];
    (void)state;
    script(5, five);
    tn_gemm_args args = product_of(40, 24, 64);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    EXPECT_OK(tn_gemm_table_save(gpu.device, path));
    end_product(&args);
    reopen();
    args = product_of(40, 24, 64);
    scripted.version = 130200;
    EXPECT_STATUS(tn_gemm_table_load(gpu.device, path), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("cublaslt 130100");
    scripted.version = 130100;
    size_t bytes = read_table(text, sizeof text);
    char *device = strstr(text, "device 9.0");
    assert_non_null(device);
    device[7] = '8';
    write_table(text, bytes);
    EXPECT_STATUS(tn_gemm_table_load(gpu.device, path), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("device 8.0");
    assert_int_equal(choice_of(&args).is_measured, 0);
    end_product(&args);
}

static void expect_line_is_named(const char *text, size_t at) {
    char expected[64];
    int line = 1;
    for (size_t i = 0; i < at; i++)
        line += text[i] == '\n';
    snprintf(expected, sizeof expected, "line %d of the table of GEMMs", line);
    if (!strstr(tn_error_last(), expected))
        fail_msg("byte %zu is of line %d: %s", at, line, tn_error_last());
}

/* Cut at every byte, and with every byte changed: never a crash, never half of it, and the message
 * names the line of that byte. */
static void a_file_that_is_not_whole_changes_nothing(void **state) {
    char text[4096];
    (void)state;
    script(5, five);
    tn_gemm_args args = product_of(40, 24, 64), other = product_of(24, 40, 64);
    EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
    EXPECT_OK(tn_gemm_tune(&other, gpu.stream));
    EXPECT_OK(tn_gemm_table_save(gpu.device, path));
    end_product(&args), end_product(&other);
    reopen();
    args = product_of(40, 24, 64), other = product_of(24, 40, 64);
    size_t bytes = read_table(text, sizeof text);
    for (size_t i = 0; i < bytes; i++) {
        write_table(text, i);
        EXPECT_STATUS(tn_gemm_table_load(gpu.device, path), TN_CORRUPT_INPUT);
        expect_line_is_named(text, i);
        char byte = text[i];
        text[i] = (char)(byte ^ (i % 3 == 0 ? 0x80 : i % 3 == 1 ? 1 : byte));
        write_table(text, bytes);
        tn_status status = tn_gemm_table_load(gpu.device, path);
        text[i] = byte;
        if (status != TN_CORRUPT_INPUT && status != TN_UNSUPPORTED)
            fail_msg("byte %zu of %zu: %s", i, bytes, tn_status_name(status));
        if (status == TN_CORRUPT_INPUT) expect_line_is_named(text, i);
    }
    assert_int_equal(choice_of(&args).is_measured, 0);
    assert_int_equal(choice_of(&other).is_measured, 0);
    write_table(text, bytes);
    EXPECT_OK(tn_gemm_table_load(gpu.device, path));
    assert_int_equal(choice_of(&other).is_measured, 1);
    EXPECT_STATUS(tn_gemm_table_load(gpu.device, "/nowhere/at/all"), TN_IO);
    EXPECT_STATUS(tn_gemm_table_save(gpu.device, "/nowhere/at/all"), TN_IO);
    end_product(&args), end_product(&other);
}

/* Whole lines that are missing, twice there, in another order, or behind the end. */
static void a_file_with_other_lines_changes_nothing(void **state) {
    enum { HEAD = 3, SHAPES = 3, LINES = HEAD + SHAPES + 1 };
    static const struct {
        int order[LINES + 1]; /* of the lines, from 1 on; 0 ends them */
        int line;             /* that the message names */
    } wrong[] = {{{1, 2, 3, 5, 6, 7}, 4},    {{1, 2, 3, 4, 5, 7}, 6}, {{1, 2, 3, 4, 4, 5, 6, 7}, 5},
                 {{1, 2, 3, 4, 6, 5, 7}, 5}, {{1, 2, 3, 7}, 4},       {{1, 2, 3, 4, 5, 6, 7, 7}, 7},
                 {{1, 2, 3, 4, 5, 6}, 7}};
    char text[4096], *lines[LINES + 1] = {text}, expected[64];
    (void)state;
    script(5, five);
    for (int64_t k = 16; k <= (int64_t)16 * SHAPES; k += 16) {
        tn_gemm_args args = product_of(8, 8, k);
        EXPECT_OK(tn_gemm_tune(&args, gpu.stream));
        end_product(&args);
    }
    EXPECT_OK(tn_gemm_table_save(gpu.device, path));
    read_table(text, sizeof text);
    for (int i = 0; i < LINES; i++)
        lines[i + 1] = strchr(lines[i], '\n') + 1;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        FILE *file = fopen(path, "w");
        assert_non_null(file);
        for (const int *line = wrong[i].order; *line; line++)
            fwrite(lines[*line - 1], 1, (size_t)(lines[*line] - lines[*line - 1]), file);
        assert_int_equal(fclose(file), 0);
        EXPECT_STATUS(tn_gemm_table_load(gpu.device, path), TN_CORRUPT_INPUT);
        snprintf(expected, sizeof expected, "line %d of the table", wrong[i].line);
        EXPECT_ERROR_HAS(expected);
    }
}

/* ---- threads -------------------------------------------------------------------------------- */

enum { THREADS = 4 };

static int thread_turns;

/* Each has scales of its own at the one plan, while another thread tunes it. */
static void *multiply_again_and_again(void *argument) {
    uint64_t seed = *(const uint64_t *)argument;
    enum { M = 16, N = 8, K = 128 };
    static _Thread_local uint16_t values[M * K];
    tn_stream stream;
    tn_tensor sources[2], operands[2];
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    EXPECT_OK(tn_stream_create(gpu.device, &stream));
    gpu_side own = gpu;
    own.stream = stream;
    for (int i = 0; i < 2; i++) {
        tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
        int64_t rows = i == 0 ? M : N;
        gpu_fill_values(GPU_FILL_NORMAL, TN_BF16, seed * 2 + (uint64_t)i, values, (size_t)rows * K);
        for (int64_t at = 0; at < rows * K; at++) /* scales that differ by thread */
            values[at] = (uint16_t)(values[at] + (seed << 7));
        sources[i] = gpu_plain(&own, TN_BF16, rows, K);
        gpu_upload(&own, sources[i], values);
        operands[i] = gpu_fp8(&own, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_SCALE_POW2, rows, K);
        quantize.src = sources[i], quantize.dst = operands[i];
        EXPECT_OK(tn_quantize(&quantize, stream));
    }
    args.a = operands[0], args.b = operands[1], args.scope = gpu.scope;
    args.d = gpu_plain(&own, TN_FP32, M, N);
    EXPECT_OK(tn_gemm(&args, stream));
    gpu_copy first = gpu_download(&own, args.d, TN_PLANE_DATA);
    for (int turn = 0; turn < thread_turns; turn++) {
        if (seed == 0 && turn % 20 == 0) EXPECT_OK(tn_gemm_tune(&args, stream));
        EXPECT_OK(tn_gemm(&args, stream));
        gpu_copy again = gpu_download(&own, args.d, TN_PLANE_DATA);
        assert_true(gpu_copies_equal(&again, &first, "threads"));
        gpu_copy_end(&again);
    }
    gpu_copy_end(&first);
    for (int i = 0; i < 2; i++)
        gpu_destroy(&own, sources[i]), gpu_destroy(&own, operands[i]);
    gpu_destroy(&own, args.d);
    EXPECT_OK(tn_stream_destroy(gpu.device, stream));
    return NULL;
}

static void run_threads(int turns) {
    pthread_t threads[THREADS];
    uint64_t seeds[THREADS];
    thread_turns = turns;
    for (int i = 0; i < THREADS; i++) {
        seeds[i] = (uint64_t)i;
        assert_int_equal(pthread_create(&threads[i], NULL, multiply_again_and_again, &seeds[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
}

static void threads_share_a_plan_each_with_its_own_scales(void **state) {
    (void)state;
    script(5, five);
    run_threads(60);
}

/* Which is the fastest, as one of them finds out: what its launches are told is each call's own. */
static void threads_share_our_own_product(void **state) {
    (void)state;
    script(5, five);
    scripted.own_us = 100.0;
    emulated_has_products = 1;
    gpu_close(&gpu), gpu_open(&gpu);
    run_threads(8);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_gpu, close_gpu)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(the_fastest_that_runs_is_kept_and_d_is_not_touched),
        TEST(the_first_stays_where_another_is_hardly_faster),
        TEST(a_clock_that_changes_is_nobodys_advantage),
        TEST(what_is_not_offered_is_tried_by_tuning),
        TEST(the_first_stays_where_the_host_is_what_is_waited_for),
        TEST(none_that_runs_is_a_status_and_no_choice),
        TEST(nothing_to_multiply_is_tuned_without_a_product),
        TEST(a_pin_is_what_runs_or_is_refused),
        TEST(an_offer_that_is_refused_is_passed_over),
        TEST(descriptors_are_made_once_a_shape),
        TEST(a_warm_call_makes_nothing),
        TEST(no_more_plans_are_kept_than_the_bound),
        TEST(choices_come_back_from_a_file),
        TEST(the_shortest_time_comes_back_too),
        TEST(a_file_of_another_device_or_library_is_refused),
        TEST(a_file_that_is_not_whole_changes_nothing),
        TEST(a_file_with_other_lines_changes_nothing),
        TEST(threads_share_a_plan_each_with_its_own_scales),
        TEST(threads_share_our_own_product),
    };
    int file = mkstemp(path);
    if (file < 0 || close(file) != 0) return EXIT_FAILURE;
    scripted_cublaslt_begin();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failures;
}
