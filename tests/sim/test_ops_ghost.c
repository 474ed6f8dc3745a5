/* Ops on the simulated device: whole training steps without a GPU, their bytes, order and time. */
#include "test_ops_step.h"

#include <string.h>

#include "op_kernels.h"
#include "tenure_cast.h"

/* The frozen stack: 16 layers of 4096 x 4096, 4096 tokens. */
enum { LAYERS = 16, WIDTH = 4096, TOKENS = 4096 };

/* [K, N] bytes, and a scale for each of 32 x 32 tiles. */
static const size_t col_bytes = (size_t)WIDTH * WIDTH + 32 * 32 * sizeof(float);

static size_t columnwise_bytes(const test_ops *ops) {
    tn_ledger ledger = test_ledger(ops->scope);
    return ledger.data_bytes[TN_PLANE_COL] + ledger.scale_bytes[TN_PLANE_COL];
}

static void expect_no_races(void) {
    const test_sim *sim = test_sim_get();
    if (sim->race_count()) fail_msg("race: %s", sim->race_text(0));
}

static test_stack big_stack(tn_plane_policy policy) {
    test_stack stack = {.layers = LAYERS, .tokens = TOKENS, .width = WIDTH, .policy = policy};
    return stack;
}

static void close_sim(test_ops *ops) {
    test_ops_close(ops);
    test_close_sim(ops->device);
}

/* Both policies, two steps each: after backward the columnwise bytes are none, or one plane for
 * each layer; the peak is lower by the same, less the one plane that dgrad needs. */
static void releasing_columnwise_planes_saves_them_to_the_byte(void **state) {
    (void)state;
    static const tn_plane_policy policies[] = {TN_POLICY_KEEP, TN_POLICY_UNTIL_LAST_USE};
    static const size_t left[] = {LAYERS, 0}, peak[] = {LAYERS, 1};
    size_t peak_total[2];
    for (int p = 0; p < 2; p++) {
        test_ops ops = test_ops_open(test_open_sim(0, 0));
        test_stack stack = big_stack(policies[p]);
        EXPECT_OK(test_stack_load(&stack, ops.scope, ops.stream));
        EXPECT_OK(tn_scope_ledger_reset_peaks(ops.scope));
        for (int step = 0; step < 2; step++) {
            EXPECT_OK(test_stack_step(&stack, ops.scope, ops.stream, ops.stream));
            assert_int_equal(columnwise_bytes(&ops), left[p] * col_bytes);
        }
        tn_ledger ledger = test_ledger(ops.scope);
        assert_int_equal(ledger.peak_plane_bytes[TN_PLANE_COL], peak[p] * col_bytes);
        peak_total[p] = ledger.peak_total_bytes;
        assert_int_equal(ledger.leases, 0);
        expect_no_races();
        close_sim(&ops);
    }
    /* KEEP peaks at the first layer's backward with the gradients of no more than two layers
     * alive, and all planes: the same moment in both runs but for the planes kept. */
    assert_int_equal(peak_total[0] - peak_total[1], (LAYERS - 1) * col_bytes);
}

/* Forward on one stream and backward on another: leases put in every wait that is needed. */
static void steps_across_streams_have_no_races(void **state) {
    (void)state;
    for (int trainable = 0; trainable < 2; trainable++) {
        test_ops ops = test_ops_open(test_open_sim(0, 0));
        test_stack stack = {.layers = 3,
                            .tokens = 200,
                            .width = 300,
                            .policy = TN_POLICY_UNTIL_LAST_USE,
                            .trainable = trainable};
        tn_stream other;
        EXPECT_OK(tn_stream_create(ops.device, &other));
        EXPECT_OK(test_stack_load(&stack, ops.scope, other));
        for (int step = 0; step < 4; step++) {
            EXPECT_OK(test_stack_step(&stack, ops.scope, ops.stream, other));
            EXPECT_OK(test_stack_step(&stack, ops.scope, other, ops.stream));
        }
        expect_no_races();
        EXPECT_OK(tn_device_synchronize(ops.device));
        EXPECT_OK(tn_stream_destroy(ops.device, other));
        close_sim(&ops);
    }
}

/* ---- a missing order is seen --------------------------------------------------------------- */

/* Quantizes on one stream; then a kernel reads the result on another. */
static uint64_t races_of_a_reader(int takes_a_lease) {
    const test_sim *sim = test_sim_get();
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    tn_stream other;
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_stream_create(ops.device, &other));
    quantize.src = test_plain(ops.scope, TN_BF16, 512, 512);
    quantize.dst = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 512, 512);
    test_declare_valid(&ops, quantize.src, TN_PLANE_DATA);
    EXPECT_OK(tn_quantize(&quantize, ops.stream));
    /* The planted fault: an address that was leased for another stream. */
    EXPECT_OK(tn_lease_begin(quantize.dst, TN_PLANE_ROW, TN_READ,
                             takes_a_lease ? other : ops.stream, &lease, &view));
    tn__range range = {view.data, view.layout.data_bytes, 0};
    EXPECT_OK(tn__device_driver(ops.device)
                  ->ghost_launch(tn__device_state(ops.device), "reader", &range, 1, 5.0, other));
    EXPECT_OK(tn_lease_end(lease));
    uint64_t races = sim->race_count();
    if (races) {
        assert_non_null(strstr(sim->race_text(0), "quantize"));
        assert_non_null(strstr(sim->race_text(0), "reader"));
    }
    EXPECT_OK(tn_device_synchronize(ops.device));
    test_ops_close(&ops);
    EXPECT_OK(tn_stream_destroy(ops.device, other));
    EXPECT_OK(tn_device_destroy(ops.device));
    return races;
}

static void reading_a_plane_without_a_lease_on_the_stream_is_a_race(void **state) {
    (void)state;
    assert_int_equal(races_of_a_reader(1), 0);
    assert_true(races_of_a_reader(0) > 0);
}

/* ---- ranges and time ----------------------------------------------------------------------- */

/* Virtual time from before the calls until the stream is done. */
static double time_of(const test_ops *ops, tn_status (*work)(const void *, tn_stream),
                      const void *args) {
    const test_sim *sim = test_sim_get();
    test_ops_wait(ops);
    double start = sim->now_us();
    EXPECT_OK(work(args, ops->stream));
    test_ops_wait(ops);
    return sim->now_us() - start;
}

static tn_status do_quantize(const void *args, tn_stream stream) {
    return tn_quantize(args, stream);
}

static tn_status do_gemm(const void *args, tn_stream stream) { return tn_gemm(args, stream); }

/* A large cast is bound by its bytes: 2 read and 2 written an element, and the scales. */
static void a_cast_takes_the_time_of_its_bytes(void **state) {
    (void)state;
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    double elements = 16384.0 * 16384.0, scales = 2.0 * 128.0 * 16384.0 * 4.0;
    args.src = test_plain(ops.scope, TN_BF16, 16384, 16384);
    args.dst = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 16384, 16384);
    args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    test_declare_valid(&ops, args.src, TN_PLANE_DATA);
    EXPECT_OK(tn_quantize(&args, ops.stream)); /* makes the planes */
    double floor_us = 2.0 + (4.0 * elements + scales) / 4.0e6;
    double actual_us = time_of(&ops, do_quantize, &args);
    assert_true(actual_us >= floor_us);
    assert_true(actual_us < floor_us + 50.0); /* what the calls themselves take */
    close_sim(&ops);
}

/* A large product is bound by its operations: 2 M N K at 1.1e15 a second. */
static void a_product_takes_the_time_of_its_operations(void **state) {
    (void)state;
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 8192, 8192);
    args.b = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 8192, 8192);
    args.d = test_plain(ops.scope, TN_BF16, 8192, 8192);
    args.scope = ops.scope;
    test_declare_valid(&ops, args.a, TN_PLANE_ROW);
    test_declare_valid(&ops, args.b, TN_PLANE_ROW);
    EXPECT_OK(tn_gemm(&args, ops.stream));
    double floor_us = 2.0 + 2.0 * 8192.0 * 8192.0 * 8192.0 / 1.1e9;
    double actual_us = time_of(&ops, do_gemm, &args);
    assert_true(actual_us >= floor_us);
    assert_true(actual_us < floor_us + 50.0);
    close_sim(&ops);
}

/* A product's scratch grows with its result from 1 MiB to 32 MiB, and is gone afterwards. */
static void a_products_workspace_is_bounded_by_its_result(void **state) {
    (void)state;
    static const struct {
        int64_t side;
        size_t bytes;
    } rows[] = {{16, 1 << 20}, {256, 256 * 256 * 32}, {4096, 32 << 20}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        test_ops ops = test_ops_open(test_open_sim(0, 0));
        tn_gemm_args args = TN_GEMM_ARGS_INIT;
        args.a = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, rows[i].side, 256);
        args.b = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, rows[i].side, 256);
        args.d = test_plain(ops.scope, TN_BF16, rows[i].side, rows[i].side);
        args.scope = ops.scope;
        test_declare_valid(&ops, args.a, TN_PLANE_ROW);
        test_declare_valid(&ops, args.b, TN_PLANE_ROW);
        test_declare_valid(&ops, args.d, TN_PLANE_DATA);
        EXPECT_OK(tn_scope_ledger_reset_peaks(ops.scope));
        size_t before = test_ledger(ops.scope).total_bytes;
        EXPECT_OK(tn_gemm(&args, ops.stream));
        tn_ledger after = test_ledger(ops.scope);
        assert_int_equal(after.total_bytes, before);
        assert_int_equal(after.peak_total_bytes, before + rows[i].bytes);
        close_sim(&ops);
    }
}

/* Each small op once, with sizes that leave some ranges empty: nothing outside is touched (that
 * would be an error of the simulated device), nothing races. */
static void every_small_op_touches_only_its_own(void **state) {
    (void)state;
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_tensor bf16 = test_plain(ops.scope, TN_BF16, 30, 300);
    tn_tensor fp32 = test_plain(ops.scope, TN_FP32, 30, 300);
    tn_tensor table = test_plain(ops.scope, TN_BF16, 256, 300);
    tn_tensor bytes = test_plain(ops.scope, TN_BYTE, 1, 30);
    test_declare_valid(&ops, bf16, TN_PLANE_DATA);
    test_declare_valid(&ops, fp32, TN_PLANE_DATA);
    test_declare_valid(&ops, table, TN_PLANE_DATA);
    test_declare_valid(&ops, bytes, TN_PLANE_DATA);
    tn_axpy_args axpy = {sizeof axpy, bf16, fp32, 2.0f};
    tn_convert_args convert = {sizeof convert, fp32, bf16};
    tn_embed_args embed = {sizeof embed, bytes, table, bf16};
    tn_cross_entropy_args loss = {sizeof loss, bf16, bytes, test_plain(ops.scope, TN_FP32, 1, 30),
                                  fp32};
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    tn_dequantize_args dequantize = TN_DEQUANTIZE_ARGS_INIT;
    EXPECT_OK(tn_axpy(&axpy, ops.stream));
    EXPECT_OK(tn_convert(&convert, ops.stream));
    EXPECT_OK(tn_embed(&embed, ops.stream));
    EXPECT_OK(tn_cross_entropy(&loss, ops.stream));
    quantize.src = bf16;
    quantize.dst = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 30, 300);
    EXPECT_OK(tn_quantize(&quantize, ops.stream));
    dequantize.src = quantize.dst;
    dequantize.plane = TN_PLANE_COL; /* transposed first */
    dequantize.dst = fp32;
    EXPECT_OK(tn_dequantize(&dequantize, ops.stream));
    close_sim(&ops);
}

/* Casts of the other formats, current and delayed, and the update of scales, likewise. */
static void casts_of_every_format_touch_only_their_own(void **state) {
    (void)state;
    static const tn_format formats[] = {TN_FORMAT_FP8_TENSOR, TN_FORMAT_MXFP8, TN_FORMAT_NVFP4};
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_scale_update_args update = TN_SCALE_UPDATE_ARGS_INIT;
    tn_tensor scale = test_plain(ops.scope, TN_FP32, 1, 3);
    tn_tensor history = test_plain(ops.scope, TN_FP32, 4, 3);
    test_declare_valid(&ops, scale, TN_PLANE_DATA);
    test_declare_valid(&ops, history, TN_PLANE_DATA);
    for (int i = 0; i < 4; i++) {
        tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
        tn_dequantize_args dequantize = TN_DEQUANTIZE_ARGS_INIT;
        tn_format format = formats[i % 3];
        quantize.src = test_plain(ops.scope, TN_BF16, 67, 131);
        quantize.dst = test_fp8(ops.scope, format, i == 2 ? TN_E2M1 : TN_E4M3, 67, 131);
        quantize.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        if (i == 3) quantize.scale = scale, quantize.amax_history = history, quantize.slot = 2;
        test_declare_valid(&ops, quantize.src, TN_PLANE_DATA);
        EXPECT_OK(tn_quantize(&quantize, ops.stream));
        dequantize.src = quantize.dst, dequantize.plane = TN_PLANE_COL;
        dequantize.dst = test_plain(ops.scope, TN_FP16, 67, 131);
        EXPECT_OK(tn_dequantize(&dequantize, ops.stream));
    }
    tn_requantize_args requantize = TN_REQUANTIZE_ARGS_INIT;
    requantize.src = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 67, 131);
    requantize.dst = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 67, 131);
    requantize.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    test_declare_valid(&ops, requantize.src, TN_PLANE_ROW);
    EXPECT_OK(tn_requantize(&requantize, ops.stream));
    update.amax_history = history, update.scale = scale;
    EXPECT_OK(tn_scale_update(&update, ops.stream));
    close_sim(&ops);
}

static void the_simulated_device_has_the_ghosts(void **state) {
    (void)state;
    tn_device *sim = test_open_sim(0, 0), *host = test_open_host();
    assert_ptr_equal(tn__op_table_of(sim), &tn__op_table_ghost);
    assert_ptr_equal(tn__op_table_of(host), &tn__op_table_host);
    EXPECT_OK(tn_device_destroy(host));
    test_close_sim(sim);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_simulated_device_has_the_ghosts),
        cmocka_unit_test(releasing_columnwise_planes_saves_them_to_the_byte),
        cmocka_unit_test(steps_across_streams_have_no_races),
        cmocka_unit_test(reading_a_plane_without_a_lease_on_the_stream_is_a_race),
        cmocka_unit_test(a_cast_takes_the_time_of_its_bytes),
        cmocka_unit_test(a_product_takes_the_time_of_its_operations),
        cmocka_unit_test(a_products_workspace_is_bounded_by_its_result),
        cmocka_unit_test(every_small_op_touches_only_its_own),
        cmocka_unit_test(casts_of_every_format_touch_only_their_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
